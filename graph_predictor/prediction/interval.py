"""The interval of a step time: quantiles of simulations with times drawn from the intervals of kernels and host.

Errors of one family share their cause and are drawn together; errors of different families and of the host are drawn
independently. A small program is simulated for every draw. For a large one, each factor alone is simulated at both ends
of its interval. The effects add up in quadrature on each side: exact where the step time is linear in the factors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from graph_predictor.prediction.pricing import KernelTimes
from kernel_models.spreads import END
from tracer.arrays import Float64, Int64

EXPECTED, LOW, HIGH = range(3)
"""Columns of times when each group varies alone."""

Number = TypeVar("Number", Int64, Float64)


@dataclass(frozen=True)
class FamilyRows:
    """The rows of each family of kernels, found once and kept for other times of the same kernels.

    Attributes:
        family: family code of each kernel.
        rows: rows of kernels by family.
    """

    family: Int64
    rows: dict[int, Int64]

    @classmethod
    def of(cls, family: Int64) -> FamilyRows:
        """Find the rows, given the family of each kernel."""
        return cls(family, {each: np.flatnonzero(family == each) for each in np.unique(family).tolist()})

    def with_weight(self, weight: Float64) -> list[int]:
        """Return the families with any kernel whose weight is above zero."""
        found = np.zeros(int(self.family.max(initial=-1)) + 1, np.bool_)
        found[self.family[weight > 0]] = True
        return np.flatnonzero(found).tolist()

    def groups(self, groups: list[list[int]]) -> Int64:
        """Return the number of the group that each kernel's family is in; -1 for none."""
        found: Int64 = np.full(len(self.family), -1, np.int64)
        for number, families in enumerate(groups):
            for family in families:
                found[self.rows[family]] = number
        return found


@dataclass(frozen=True)
class GroupEnds:
    """Variants of a step: in each, one group of kernels is at an end of its interval; two more have expected times.

    Attributes:
        group: group of each kernel; -1 for kernels with expected times in all variants.
        count: the number of groups.
    """

    group: Int64
    count: int

    def over(self, columns: Number, kernel: Int64 | None = None, width: int = 0) -> Number:
        """Return the variants of rows whose columns are known.

        Args:
            columns: expected, low and high values of the rows, [rows, 3].
            kernel: the kernel of each row; by default row i is of kernel i.
            width: least number of variants; the additional ones have expected values.
        """
        group = self.group if kernel is None else self.group[kernel]
        rows = np.flatnonzero(group >= 0)
        found = np.empty((len(columns), max(2 * self.count + 2, width)), columns.dtype)
        found[:] = columns[:, EXPECTED, None]
        flat, place = found.ravel(), rows * found.shape[1] + 2 * group[rows]
        flat[place], flat[place + 1] = columns[:, LOW][rows], columns[:, HIGH][rows]
        return found


@dataclass(frozen=True)
class KernelVariants:
    """Times of a cycle's kernels in variants::

        columns      expected  low  high           variants   group 0 low | group 0 high | group 1 low | … | as expected
        kernel of 0:    5       4    7                             4             7              5              5
        kernel of 1:    3       2    4                             3             3              2              3

    Where each group varies alone, results that follow from one kernel's time are computed for three columns, not for
    all variants.

    Attributes:
        ns: time of each kernel, [kernels, columns].
        ends: how the columns make variants; by default each column is a variant.
    """

    ns: Float64
    ends: GroupEnds | None = None

    def over(self, columns: Number, kernel: Int64 | None = None, width: int = 0) -> Number:
        """Return the variants of rows computed from the kernels' times, see ``GroupEnds.over``."""
        return columns if self.ends is None else self.ends.over(columns, kernel, width)


DRAWS = 128
"""Number of draws. Half of them mirror the others, so that their mean error is zero."""
DRAWN_EVENTS = 400_000
"""Largest draws × events for which every draw is simulated: about 0.1 s."""
MOST_FACTORS = 6
"""Most groups of families whose errors are drawn separately: the five largest families, and all others together."""
NEGLIGIBLE = 1e-3
"""Share of the step: in large programs, families whose errors cannot change the step by more are left out."""
SEED = 20
"""Fixed (any value) so that predictions are reproducible."""


@dataclass(frozen=True, slots=True)
class TimeErrors:
    """Errors of the times of a step, to be simulated as variants of it.

    Attributes:
        draws: standard normal errors of the groups of families and, last, of the host, [variants, groups + 1]; if they
            are not drawn, each alone at both ends of its interval.
        factors: factors on each kernel's time, [kernels, columns].
        ends: how the columns make variants; ``None`` if errors are drawn, with one column for each variant.
        effect: the largest change of the step time by each group, ns.
    """

    draws: Float64
    factors: Float64
    ends: GroupEnds | None
    effect: tuple[float, ...]

    @classmethod
    def of(cls, times: KernelTimes, families: FamilyRows, events: int) -> TimeErrors:
        """Return the errors, drawn if the program is small.

        Args:
            times: the times and intervals of the step's kernels; families with longer times rank higher.
            families: families of these kernels.
            events: size of the simulated program.
        """
        widest = times.ns * np.maximum(times.high, -times.low)
        effect = {family: float(widest[families.rows[family]].sum()) for family in families.with_weight(times.ns)}
        ranked = sorted(effect, key=lambda f: -effect[f])
        groups = [[f] for f in ranked[:MOST_FACTORS - 1]] + (
            [ranked[MOST_FACTORS - 1:]] if len(ranked) >= MOST_FACTORS else [])
        effects = tuple(sum(effect[f] for f in group) for group in groups)
        low, high = -times.low / END, times.high / END
        if DRAWS * events <= DRAWN_EVENTS:
            draws = np.random.default_rng(SEED).standard_normal((DRAWS // 2, len(groups) + 1))
            draws = np.concatenate([draws, -draws])
            return cls(draws, _drawn(low, high, families.groups(groups), draws[:, :-1]), None, effects)
        draws = np.repeat(np.eye(len(groups) + 1), 2, axis=0) * END
        draws[::2] *= -1.0
        factors = np.stack([np.ones(len(low)), np.exp(-END * low), np.exp(END * high)], axis=1)
        return cls(draws, factors, GroupEnds(families.groups(groups), len(groups)), effects)

    def variants(self, ns: Float64) -> KernelVariants:
        """Return the variants of kernels with the times ``ns``."""
        return KernelVariants(ns[:, None] * self.factors, self.ends)

    def of_host(self, spread: float) -> tuple[float, ...]:
        """Return the factor on the host's time in each variant, for a log half width of its 80% interval."""
        return tuple(float(np.exp(z * spread / END)) if z else 1.0 for z in self.draws[:, -1].tolist())

    def interval(self, step_ns: Float64, expected_ns: float) -> tuple[float, float]:
        """Return the 80% interval of the step time, ns, from the variants' step times and the expected one."""
        if self.ends is None:
            low, high = np.quantile(step_ns, (0.1, 0.9))
            return min(float(low), expected_ns), max(float(high), expected_ns)
        below = above = 0.0
        # A group cannot change the step by more than its kernels' errors: negligible groups must not add up.
        counts = [effect > NEGLIGIBLE * expected_ns for effect in self.effect for _ in range(2)]
        for counted, change in zip([*counts, True, True], (step_ns - expected_ns).tolist(), strict=True):
            if counted:
                below, above = below + min(change, 0.0) ** 2, above + max(change, 0.0) ** 2
        return expected_ns - math.sqrt(below), expected_ns + math.sqrt(above)


@dataclass(frozen=True, slots=True)
class ActiveErrors:
    """Errors of a device's active time: the sum of its kernels' times.

    Attributes:
        total: sum of the kernels' times, ns.
        below, above: distance from the total to the lower and upper end of its 80% interval, ns.
    """

    total: float
    below: float
    above: float

    @classmethod
    def of(cls, times: KernelTimes, weight: Float64, families: FamilyRows) -> ActiveErrors:
        """Return the errors of the sum of kernels' times.

        Args:
            times: the kernels' times and intervals.
            weight: ns of each kernel in the step; 0 for collectives and for those of other ranks.
            families: families of these kernels.
        """
        less, more = weight * -np.expm1(times.low), weight * np.expm1(times.high)
        below = above = 0.0
        for family in families.with_weight(weight):
            mine = families.rows[family]
            below += float(less[mine].sum()) ** 2
            above += float(more[mine].sum()) ** 2
        return cls(float(weight.sum()), float(np.sqrt(below)), float(np.sqrt(above)))

    def interval(self, active_ns: float, least: float) -> tuple[float, float]:
        """Return the 80% interval of the active time, ns.

        Args:
            active_ns: active time without errors; overlap of kernels is assumed to stay as it is.
            least: log half width of the narrowest interval.
        """
        share = active_ns / self.total if self.total else 0.0
        low, high = active_ns - share * self.below, active_ns + share * self.above
        return min(max(low, 0.0), active_ns * float(np.exp(-least))), max(high, active_ns * float(np.exp(least)))


def spread_by(low: float, high: float, expected_ns: float, spread: float) -> tuple[float, float]:
    """Return an interval widened by another cause of errors with log half width ``spread``; an end at 0 stays at 0."""
    if expected_ns <= 0:
        return low, high
    below = np.hypot(np.log(expected_ns / low), spread) if low > 0 else np.inf
    above = np.hypot(np.log(high / expected_ns), spread)
    return expected_ns * float(np.exp(-below)), expected_ns * float(np.exp(above))


def _drawn(low: Float64, high: Float64, group: Int64, draws: Float64) -> Float64:
    """Return the factor on each kernel's time, [kernels, draws], for standard normal draws of the groups, [draws,
    groups]; ``low`` and ``high`` are standard deviations of the logs of the kernels' times."""
    factor = np.ones((len(group), len(draws)))
    for number, of_group in enumerate(draws.T):
        rows = np.flatnonzero(group == number)
        below, above = low[rows], high[rows]
        for column, draw in enumerate(of_group.tolist()):
            if draw:
                factor[rows, column] = np.exp(draw * (below if draw < 0 else above))
    return factor
