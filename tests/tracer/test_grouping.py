"""Grouping without sorting gives what sorting gives."""

from __future__ import annotations

import numpy as np
import pytest

from tracer.grouping import SMALL, grouped, kinds_of, totals


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


def test_kinds_are_what_numpy_finds_unique() -> None:
    random = np.random.default_rng(3)
    columns = random.integers(-2, 4, (3, 500))
    _, first, place = np.unique(columns, axis=1, return_index=True, return_inverse=True)
    found = kinds_of(*columns)
    assert (found[0] == place.reshape(-1)).all() and (found[1] == first).all()
    assert [len(each) for each in kinds_of(columns[0, :0], columns[1, :0])] == [0, 0]
