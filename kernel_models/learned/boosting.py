"""Fitting trees: histogram gradient boosting by squared error over features of one byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kernel_models.learned.bins import Bins, Codes
from kernel_models.learned.growing_loop import CODES, COUNT_BITS, NODE, SCALED_BITS, TOGETHER, grow_trees
from kernel_models.learned.trees import Trees
from kernel_models.threads import in_threads
from tracer.arrays import Float64

BLOCKS = 10
"""Trees grow in so many blocks where it is looked after each whether rows left out still gain by them."""
LEAST_GAIN = 0.003
"""A block that makes the error of rows left out smaller by less than this share is the last."""
STOPPED_FROM = 3_000
"""Fewer rows say too little of where to stop (of 286 in four groups, the fifth came out at 13.0 in place of 11.1%), and
all their trees take no time."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of the ensembles of trees whose weighted mean a model takes.

    Attributes:
        neighbours: of matrix products, whether it sees what measured neighbours took.
        share: of the settings' trees that it needs; the others would no longer help rows left out.
        weight: its part of the mean.
    """

    neighbours: bool = False
    share: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Boosting:
    """Settings of boosting. Every number in use was chosen by cross-validation over shape groups of a fit split.

    Attributes:
        iterations, learning_rate, leaves: trees, the share each one adds, and leaves of each.
        feature_share: features that each split may choose from; less decorrelates the trees.
        least_rows: rows of a leaf at least.
        ridge: L2 penalty of leaf values.
        depth: levels at most; 0 for no limit.
        members: ensembles whose mean is taken, each of up to so many trees.
    """

    iterations: int = 1000
    learning_rate: float = 0.05
    leaves: int = 31
    feature_share: float = 0.4
    least_rows: int = 20
    ridge: float = 0.0
    depth: int = 0
    members: tuple[Member, ...] = (Member(),)

    @property
    def neighbours(self) -> bool:
        """Whether a member sees what measured neighbours took."""
        return any(member.neighbours for member in self.members)

    def scaled(self, share: float) -> Boosting:
        """The same with that share of the trees, each adding more: for quick fits."""
        return replace(self, iterations=max(1, round(self.iterations * share)),
                       learning_rate=min(0.3, self.learning_rate / share))


def fit_trees(
    features: npt.NDArray[np.float32], target: Float64, how: Boosting, *, seed: int = 0, plain: int = 0,
) -> Trees:
    """Fit trees to a target, each member on a core of its own.

    Args:
        features: [n, f].
        target: [n].
        how: the settings.
        seed: of the features each split may choose from; the same data and seed give the same trees.
        plain: members without neighbours see only so many of the first features; 0 for all.
    """
    bins = Bins.of(features)
    codes = _by_feature(bins, features)
    growing = [Growing(bins, _seen(codes, member, plain), target, how, seed) for member in how.members]
    counts = [max(1, round(how.iterations * member.share)) for member in how.members]
    return Trees.mean(in_threads([partial(one.more, count) for one, count in zip(growing, counts, strict=True)]),
                      [member.weight for member in how.members])


def stop_early(
    features: npt.NDArray[np.float32], target: Float64, how: Boosting, left_out: npt.NDArray[np.float32],
    wanted: Float64, *, plain: int = 0,
) -> list[tuple[float, Float64]]:
    """Grow each member's trees as long as they help rows left out.

    Args:
        features, target, how, plain: see ``fit_trees``.
        left_out: features of other rows, [m, f].
        wanted: their target, [m].

    Returns:
        Of each member the share of the trees that it took, and what it says of the rows left out, [m]. Of fewer than
        ``STOPPED_FROM`` rows in all every tree is grown.
    """
    least_gain = LEAST_GAIN if len(target) + len(wanted) >= STOPPED_FROM else -np.inf
    bins = Bins.of(features)
    codes, others = _by_feature(bins, features), bins.codes(left_out)
    return in_threads([partial(_while_it_helps, Growing(bins, _seen(codes, member, plain), target, how, 0), others,
                               wanted, how.iterations, least_gain) for member in how.members])


def _while_it_helps(
    growing: Growing, left_out: Codes, wanted: Float64, most: int, least_gain: float,
) -> tuple[float, Float64]:
    """Return the share of the trees after which rows left out gain little, and what these say of them."""
    found: Float64 = np.full(len(wanted), growing.baseline)
    taken, error = 0, np.inf
    for trees in map(len, np.array_split(np.arange(most), min(BLOCKS, most))):
        grown = growing.more(trees)
        next_found = found + grown.predict_codes(left_out) - grown.baseline
        next_error = float(np.abs(next_found - wanted).mean())
        gain = 1 - next_error / error if error else 0.0
        if gain > min(least_gain, 0.0):
            taken, found, error = taken + trees, next_found, next_error
        if gain < least_gain:
            break
    return taken / most, found


def _by_feature(bins: Bins, features: npt.NDArray[np.float32]) -> Codes:
    """Codes of features × rows, [f, n]."""
    return np.ascontiguousarray(bins.codes(features).T)


def _seen(codes: Codes, member: Member, plain: int) -> Codes:
    return codes if member.neighbours or not plain else codes[:plain]


class Growing:
    """Trees that explain what those before them left over, grown as many at a time as are asked for.

    Args:
        bins: how features became codes.
        codes: of the first features and all rows, [f, n].
        target: what is to be explained, [n].
        how: the settings; its members and iterations are others' concern.
        seed: of the features each split may choose from.

    Attributes:
        baseline: the target's mean, where the sum of trees starts.
    """

    def __init__(self, bins: Bins, codes: Codes, target: Float64, how: Boosting, seed: int) -> None:
        f, n = codes.shape
        self.baseline = float(target.mean())
        self._bins, self._codes, self._how = bins, codes, how
        self._widths = np.diff(bins.start[:f + 1]).astype(np.int64) + 1
        self._many = max(1, int(how.feature_share * f))
        self._left_over, self._words = target - self.baseline, np.empty((2, n), np.int64)
        self._order, self._state = np.arange(f), np.array([seed])

    def more(self, trees: int) -> Trees:
        """Grow further trees; returns them alone, with the baseline."""
        how, many, n = self._how, self._many, len(self._left_over)
        nodes = 2 * how.leaves - 1
        words, values = np.zeros(trees * nodes, np.uint32), np.zeros(trees * nodes, np.float32)
        start, depth = np.zeros(trees + 1, np.int64), np.zeros(trees, np.uint8)
        used = grow_trees(
            self._codes, self._widths, self._left_over, trees, how.learning_rate, how.leaves, many, how.least_rows,
            how.ridge, how.depth, 2.0 ** min(SCALED_BITS, 63 - COUNT_BITS - n.bit_length()), 0, *self._words,
            self._order, self._state, np.empty((many + TOGETHER, CODES), np.int64), *np.empty((2, CODES), np.int64),
            np.empty((nodes, NODE), np.int64), np.empty(nodes), words, values, start, depth)
        return Trees(self._bins, words[:used].copy(), values[:used].copy(), start.astype(np.int32), depth,
                     self.baseline)
