"""Fitting trees: histogram gradient boosting by squared error over features of one byte."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kernel_models.learned.bins import Bins, Codes
from kernel_models.learned.growing_loop import CODES, COUNT_BITS, NODE, SCALED_BITS, grow_trees
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
    neighbours: bool = False

    def scaled(self, share: float) -> Boosting:
        """The same with that share of the trees, each adding more: for quick fits."""
        return replace(self, iterations=max(1, round(self.iterations * share)),
                       learning_rate=min(0.3, self.learning_rate / share))


def fit_trees(
    features: npt.NDArray[np.float32], target: npt.NDArray[np.float64], how: Boosting, *, seed: int = 0, plain: int = 0,
) -> Trees:
    """Fit trees to a target.

    Args:
        features: [n, f].
        target: [n].
        how: the settings.
        seed: of the features each split may choose from; the same data and seed give the same trees.
        plain: as many trees again, averaged with the others, see only so many of the first features; 0 for none.
    """
    bins = Bins.of(features)
    codes = bins.codes(features)
    seen = (plain, bins.features) if plain else (bins.features,)
    return Trees.mean([_grown(bins, np.ascontiguousarray(codes[:, :first]), target, how, seed) for first in seen])


def _grown(bins: Bins, codes: Codes, target: npt.NDArray[np.float64], how: Boosting, seed: int) -> Trees:
    """Boosted trees of the codes of the first features."""
    n, f = codes.shape
    many = max(1, int(how.feature_share * f))
    most = how.iterations * (2 * how.leaves - 1)
    baseline = float(target.mean())
    words, values = np.zeros(most, np.uint32), np.zeros(most, np.float32)
    start, depth = np.zeros(how.iterations + 1, np.int64), np.zeros(how.iterations, np.uint8)
    used = grow_trees(
        codes, np.diff(bins.start[:f + 1]).astype(np.int64) + 1, target - baseline, how.iterations, how.learning_rate,
        how.leaves, many, how.least_rows, how.ridge, how.depth,
        2.0 ** min(SCALED_BITS, 63 - COUNT_BITS - n.bit_length()), 0, *np.empty((3, n), np.int64), np.arange(f),
        np.array([seed]), np.empty((many, CODES), np.int64), np.empty((2 * how.leaves - 1, NODE), np.int64),
        np.empty(2 * how.leaves - 1), words, values, start, depth)
    return Trees(bins, words[:used].copy(), values[:used].copy(), start.astype(np.int32), depth, baseline)
