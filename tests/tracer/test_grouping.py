"""Grouping without sorting gives what sorting gives."""

from __future__ import annotations

import numpy as np
import pytest

from tracer.grouping import SMALL, grouped, totals


@pytest.mark.parametrize("highest", [1, 50, SMALL * 3])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_groups_are_those_of_unique(highest: int, count: int) -> None:
    keys = np.random.default_rng(count + highest).integers(-2, highest, count)
    distinct, place = grouped(keys)
    expected, at = np.unique(keys, return_inverse=True)
    assert np.array_equal(distinct, expected) and np.array_equal(place, at)


def test_sums_are_whole_numbers() -> None:
    values = np.array([2**52, 1, 5, -3])
    assert totals(np.array([1, 1, 0, 0]), values, 3).tolist() == [2, 2**52 + 1, 0]
