"""Growing boosted trees: scikit-learn's histogram gradient boosting by squared error, over features of one byte.

The trees are copied into plain arrays (``Trees``), so that a profile holds no pickle and prices need no scikit-learn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kernel_models.learned.trees import ALWAYS_LEFT, CHILD_BITS, FEATURE_BITS, Bins, Codes, Float32, Trees
from kernel_models.threads import in_threads
from tracer.arrays import Float64
from tracer.lazy import ensemble, threadpoolctl

BLOCKS = 10
"""Number of blocks into which trees are divided to find how many help rows left out. Chosen."""
AS_GOOD = 0.001
"""Least relative decrease of the error on rows left out for which further blocks are worth their time."""
PATIENCE = 60
"""Trees without a gain after which growth ends. An early end hurts dissimilar models. With 20, ``AS_GOOD`` of 0.003 and
the folds' mean share in place of the largest, an A40's products of a model left out erred by 3.8 in place of 2.8%."""
MOST_BINS = 63
"""Number of codes of a feature that splits distinguish. With all 255 codes growth took up to twice the time, and
held-out errors of three stacks were 3.1, 2.1 and 2.7% in place of 3.0, 2.0 and 2.8."""
STOPPED_FROM = 3_000
"""Fewest rows for an early stop: fewer show too little, and all their trees take almost no time. With a stop on 286
rows of four groups, the fifth's error was 13.0 in place of 11.1%."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of the ensembles of trees whose weighted mean is a model's prediction.

    Attributes:
        neighbours: For matrix products, whether it sees the times of measured neighbours.
        share: Share of the settings' trees that it uses; further trees do not help rows left out.
        weight: Its weight in the mean.
    """

    neighbours: bool = False
    share: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Boosting:
    """Settings of boosting. Every number in use was chosen by cross-validation over shape groups of a fit split.

    Attributes:
        iterations, learning_rate, leaves: Number of trees, the share each one adds, and leaves of each.
        feature_share: Share of the features that each split may choose from; fewer decorrelate the trees.
        least_rows: Fewest rows of a leaf.
        depth: Most levels; 0 for no limit.
        members: Ensembles whose mean is taken, each of up to ``iterations`` trees.
    """

    iterations: int
    learning_rate: float
    leaves: int
    feature_share: float
    least_rows: int
    depth: int = 0
    members: tuple[Member, ...] = (Member(),)

    @property
    def neighbours(self) -> bool:
        """Return whether a member sees the times of measured neighbours."""
        return any(member.neighbours for member in self.members)

    def scaled(self, share: float) -> Boosting:
        """Return the settings with that share of the trees, each adding more: for quick fits."""
        return replace(self, iterations=max(1, round(self.iterations * share)),
                       learning_rate=self.learning_rate / share)


def fit_trees(features: Float32, target: Float64, how: Boosting, *, seed: int = 0, plain: int = 0) -> Trees:
    """Fit trees to a target, each member on a core of its own.

    Args:
        features: [n, f].
        target: [n].
        how: The settings.
        seed: Seed of the features each split may choose from; equal data and seed give equal trees.
        plain: Number of first features that members without neighbours see; 0 for all.
    """
    bins = Bins.of(features)
    codes = bins.codes(features)
    grown = in_threads([partial(grow_trees, bins, _seen(codes, member, plain), target, replace(
        how, iterations=max(1, round(how.iterations * member.share))), seed) for member in how.members])
    return Trees.mean(grown, [member.weight for member in how.members])


def stop_early(features: Float32, target: Float64, how: Boosting, left_out: Float32, wanted: Float64, *,
               plain: int = 0) -> list[tuple[float, Float64]]:
    """Grow each member's trees, and keep those that help rows left out.

    Args:
        features, target, how, plain: see ``fit_trees``.
        left_out: features of other rows, [m, f].
        wanted: their target, [m].

    Returns:
        For each member the share of the trees that it kept, and its predictions of the rows left out, [m]. With fewer
        than ``STOPPED_FROM`` rows in all every tree is kept.
    """
    bins = Bins.of(features)
    codes, others = bins.codes(features), bins.codes(left_out)
    stops = len(target) + len(wanted) >= STOPPED_FROM

    def taken(member: Member) -> tuple[float, Float64]:
        judge = (_seen(others, member, plain), wanted) if stops else None
        trees = grow_trees(bins, _seen(codes, member, plain), target, how, 0, judge)
        ends = np.unique(np.linspace(0, len(trees.depth), BLOCKS + 1).round().astype(np.int64))
        said = trees.baseline + np.cumsum([trees.part(first, end).predict_codes(others) for first, end in zip(
            ends[:-1].tolist(), ends[1:].tolist(), strict=True)], axis=0)
        errors = np.abs(said - wanted).mean(axis=1)
        best = int(np.argmax(errors <= errors.min() * (1 + AS_GOOD))) if stops else len(said) - 1
        return float(ends[best + 1]) / how.iterations, said[best]

    return in_threads([partial(taken, member) for member in how.members])


def _seen(codes: Codes, member: Member, plain: int) -> Codes:
    return codes if member.neighbours or not plain else codes[:, :plain]


def grow_trees(bins: Bins, codes: Codes, target: Float64, how: Boosting, seed: int,
               left_out: tuple[Codes, Float64] | None = None,
               loss: Literal["squared_error", "absolute_error"] = "squared_error") -> Trees:
    """Grow one ensemble, on one core: equal data give equal trees on any machine.

    Args:
        bins: Mapping of features to codes.
        codes: Codes of the first features, [n, f].
        target: [n].
        how: The settings; their members are ignored.
        seed: Seed of the features each split may choose from.
        left_out: Codes and target of other rows: growth ends where ``PATIENCE`` trees gain nothing on them.
        loss: The loss to minimise.
    """
    model = ensemble.HistGradientBoostingRegressor(
        loss=loss, max_iter=how.iterations, learning_rate=how.learning_rate, max_leaf_nodes=how.leaves,
        max_depth=how.depth or None, min_samples_leaf=how.least_rows, max_features=how.feature_share,
        max_bins=MOST_BINS, early_stopping=left_out is not None, n_iter_no_change=PATIENCE, tol=0.0, random_state=seed)
    with threadpoolctl.threadpool_limits(1, "openmp"):
        model.fit(codes, target, X_val=left_out and left_out[0], y_val=left_out and left_out[1])
    grown = [predictor.nodes for (predictor,) in model._predictors]
    words, values = zip(*map(_plain_tree, grown), strict=True)
    return Trees(bins, np.concatenate(words), np.concatenate(values),
                 np.concatenate([[0], np.cumsum([len(nodes) for nodes in grown])]).astype(np.int32),
                 np.array([nodes["depth"].max() for nodes in grown], np.uint8),
                 float(np.ravel(model._baseline_prediction)[0]))


def _plain_tree(nodes: Any) -> tuple[npt.NDArray[np.uint32], Float32]:
    """Return the words and values of one of scikit-learn's trees, renumbered so that siblings are adjacent."""
    leaf = nodes["is_leaf"] == 1
    inner = np.flatnonzero(~leaf)
    place, child = np.zeros(len(nodes), np.uint32), np.zeros(len(nodes), np.uint32)
    child[inner] = 1 + 2 * np.arange(len(inner))
    place[nodes["left"][inner]], place[nodes["right"][inner]] = child[inner], child[inner] + 1
    child[leaf] = place[leaf]
    # Codes are whole numbers and thresholds lie between them.
    last_left, feature = np.full(len(nodes), ALWAYS_LEFT, np.uint32), np.zeros(len(nodes), np.uint32)
    last_left[inner], feature[inner] = np.floor(nodes["num_threshold"][inner]), nodes["feature_idx"][inner]
    words, values = np.zeros(len(nodes), np.uint32), np.zeros(len(nodes), np.float32)
    words[place] = child << CHILD_BITS | last_left << FEATURE_BITS | feature
    values[place] = np.where(leaf, nodes["value"], 0.0)
    return words, values
