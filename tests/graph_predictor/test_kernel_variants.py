"""Variants of kernels' times put together of their expected time and both ends, against every variant worked out."""

from __future__ import annotations

import numpy as np
import pytest

from graph_predictor.prediction.interval import FamilyRows, GroupEnds, TimeErrors
from graph_predictor.prediction.pricing import KernelTimes
from kernel_models.spreads import END
from tracer.arrays import Float64, Int64

LARGE = 10**9
"""Events of a program whose errors are not drawn."""


def times_of(family: Int64) -> KernelTimes:
    random = np.random.default_rng(3)
    count = len(family)
    return KernelTimes(random.uniform(1, 99, count), np.zeros(count, np.int64), family, -random.uniform(0, 1, count),
                       random.uniform(0, 1, count), ())


def plain_factors(times: KernelTimes, groups: list[list[int]]) -> Float64:
    """A factor for each kernel and variant: 80% ends of one group, 1 of all others; the last two are as expected."""
    found = np.ones((len(times.ns), 2 * len(groups) + 2))
    for number, families in enumerate(groups):
        for kernel in np.flatnonzero(np.isin(times.family, families)).tolist():
            found[kernel, 2 * number] = np.exp(-END * (-times.low[kernel] / END))
            found[kernel, 2 * number + 1] = np.exp(END * (times.high[kernel] / END))
    return found


@pytest.mark.parametrize("families", [2, 9])
def test_errors_of_a_large_step_are_each_group_alone_at_both_ends(families: int) -> None:
    times = times_of(np.arange(40) % families)
    errors = TimeErrors.of(times, FamilyRows.of(times.family), LARGE)
    assert errors.ends is not None
    widest = [float((times.ns * np.maximum(times.high, -times.low))[times.family == each].sum())
              for each in range(families)]
    ranked = sorted(range(families), key=lambda each: -widest[each])
    groups = [[each] for each in ranked[:5]] + ([ranked[5:]] if families > 5 else [])
    variants = errors.variants(times.ns)
    assert np.array_equal(variants.over(variants.ns), times.ns[:, None] * plain_factors(times, groups))
    assert errors.effect == pytest.approx([sum(widest[each] for each in group) for group in groups])
    spread = errors.of_host(0.2)
    assert spread[:-2] == (1.0,) * (2 * len(groups)) and spread[-2] < 1.0 < spread[-1]


def test_errors_of_a_small_step_are_drawn_a_column_each() -> None:
    times = times_of(np.arange(12) % 3)
    errors = TimeErrors.of(times, FamilyRows.of(times.family), 12)
    assert errors.ends is None and errors.factors.shape == (12, len(errors.draws)) and len(errors.draws) > 100
    one = times.family == times.family[0]
    together = np.log(errors.factors[one]) / np.log(errors.factors[one][:1])
    assert (together > 0).all()  # kernels of one family err together


def test_rows_take_the_variants_of_their_kernels() -> None:
    ends = GroupEnds(np.array([1, -1, 0]), 2)
    columns = np.array([[10, 8, 13], [20, 18, 23], [30, 28, 33]])
    found = ends.over(columns, np.array([2, 1, 0]), 8)
    assert found.tolist() == [[8, 13, 10, 10, 10, 10, 10, 10], [20] * 8, [30, 30, 28, 33, 30, 30, 30, 30]]
    assert ends.over(columns).shape == (3, 6)
    assert FamilyRows.of(np.array([4, 2, 4])).with_weight(np.array([0.0, 0.0, 1.0])) == [4]
