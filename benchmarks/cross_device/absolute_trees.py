"""Trees by absolute error, which scikit-learn fits: ``foretrace fit`` boosts by squared error."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernel_models.learned.bins import Bins
from kernel_models.learned.growing_loop import ALWAYS_LEFT, CHILD_BITS, FEATURE_BITS
from kernel_models.learned.trees import Trees


def fit_absolute(features: npt.NDArray[np.float32], target: npt.NDArray[np.float64], *, iterations: int,
                 learning_rate: float, leaves: int, least_rows: int = 20) -> Trees:
    """Boosted trees of features [n, f] and a target [n]; see ``Boosting`` for the settings."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    bins = Bins.of(features)
    model = HistGradientBoostingRegressor(
        loss="absolute_error", max_iter=iterations, learning_rate=learning_rate, max_leaf_nodes=leaves,
        min_samples_leaf=least_rows, early_stopping=False, random_state=0,
    ).fit(bins.codes(features).astype(np.float32), target)
    words, values, depths = zip(*(_tree(predictor.nodes) for (predictor,) in model._predictors), strict=True)
    return Trees(bins, np.concatenate(words), np.concatenate(values).astype(np.float32),
                 np.concatenate([[0], np.cumsum([len(part) for part in words])]).astype(np.int32),
                 np.array(depths, np.uint8), float(np.ravel(model._baseline_prediction)[0]))


def _tree(nodes: Any) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float64], int]:
    """Words and values of one of scikit-learn's trees, children side by side, and its depth."""
    order = [0]  # our place → their place
    child: list[int] = []
    level = [0]
    at = 0
    while at < len(order):
        node = nodes[order[at]]
        if node["is_leaf"]:
            child.append(at)
        else:
            child.append(len(order))
            order += [int(node["left"]), int(node["right"])]
            level += [level[at] + 1] * 2
        at += 1
    mine = nodes[order]
    leaf = mine["is_leaf"].astype(bool)
    if len(order) > 1 << 16 or mine["feature_idx"].max() > 255 or mine["is_categorical"].any():
        raise ValueError("These trees have too many nodes or features, or categories.")
    # Codes are whole numbers and thresholds lie between them.
    last_left = np.where(leaf, ALWAYS_LEFT, np.floor(np.where(leaf, 0.0, mine["num_threshold"]))).astype(np.uint32)
    feature = np.where(leaf, 0, mine["feature_idx"]).astype(np.uint32)
    words = np.array(child, np.uint32) << CHILD_BITS | last_left << FEATURE_BITS | feature
    return words.astype(np.uint32), np.where(leaf, mine["value"], 0.0), max(level)
