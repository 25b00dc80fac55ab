"""Fitting trees: scikit-learn's histogram gradient boosting over our own bins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kernel_models.learned.bins import Bins
from kernel_models.learned.trees import Trees


@dataclass(frozen=True, slots=True)
class Boosting:
    """Settings of boosting. Every number in use was chosen by cross-validation over shape groups of a fit split.

    Attributes:
        iterations, learning_rate, leaves: trees, the share each one adds, and leaves of each.
        feature_share: features that each split may choose from; less decorrelates the trees.
        least_rows: rows of a leaf at least.
        ridge: L2 penalty of leaf values.
        depth: levels at most; 0 for no limit.
        seeds: fits whose mean is taken.
        loss: "squared_error" or "absolute_error".
        neighbours: of matrix products, whether as many trees again see what measured neighbours took, and the mean of
            both is taken.
    """

    iterations: int = 1000
    learning_rate: float = 0.05
    leaves: int = 31
    feature_share: float = 0.4
    least_rows: int = 20
    ridge: float = 0.0
    depth: int = 0
    seeds: int = 1
    loss: str = "squared_error"
    neighbours: bool = False

    def scaled(self, share: float) -> Boosting:
        """The same with that share of the trees, each adding more: for quick fits."""
        return replace(self, iterations=max(1, round(self.iterations * share)),
                       learning_rate=min(0.3, self.learning_rate / share))


def fit_trees(
    features: npt.NDArray[np.float32], target: npt.NDArray[np.float64], how: Boosting, *,
    weights: npt.NDArray[np.float64] | None = None, monotone: npt.NDArray[np.int8] | None = None, seed: int = 0,
    plain: int = 0,
) -> Trees:
    """Fit trees to a target.

    Args:
        features: [n, f].
        target: [n].
        weights: of the rows, [n].
        monotone: 1 (never falls), −1 (never rises) or 0 by feature, [f].
        seed: of the features each split may choose from; the same data and seed give the same trees.
        plain: as many trees again, averaged with the others, see only so many of the first features; 0 for none.
    """
    from sklearn.ensemble import HistGradientBoostingRegressor

    bins = Bins.of(features)
    codes = bins.codes(features).astype(np.float32)
    if plain and monotone is not None:
        raise ValueError("Trees that see some of the features cannot be told how each one rises.")
    options: dict[str, Any] = {"monotonic_cst": monotone} if monotone is not None and monotone.any() else {}
    models = [HistGradientBoostingRegressor(
        loss=how.loss, max_iter=how.iterations, learning_rate=how.learning_rate, max_leaf_nodes=how.leaves,
        max_depth=how.depth or None, min_samples_leaf=how.least_rows, l2_regularization=how.ridge,
        max_features=how.feature_share, early_stopping=False, random_state=seed + extra, **options,
    ).fit(codes[:, :seen], target, weights) for seen in ([plain] if plain else []) + [codes.shape[1]]
        for extra in range(how.seeds)]
    return Trees.from_sklearn(models, bins)
