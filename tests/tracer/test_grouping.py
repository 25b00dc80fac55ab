"""Grouping without sorting gives what sorting gives."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tracer.columns import SMALL, RowsByNumber, grouped, kinds_of, spans, tallied, totals


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


def test_spans_are_written_out_behind_one_another() -> None:
    assert spans(np.array([5, 2, 7]), np.array([8, 2, 9])).tolist() == [5, 6, 7, 7, 8]
    assert spans(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_rows_are_found_by_their_number_and_all_of_them_by_minus_one() -> None:
    rng = np.random.default_rng(5)
    number, chosen = rng.integers(-1, 6, 200).astype(np.int32), rng.random(200) < 0.7
    found = RowsByNumber(number, 7, chosen)
    low, high = found.bounds(np.array([3, 6, 0]))
    for at, wanted in enumerate((3, 6, 0)):
        assert found.order[low[at]:high[at]].tolist() == np.flatnonzero(chosen & (number == wanted)).tolist()
    [[low], [high]] = found.bounds(np.array([-1]))
    assert sorted(found.order[low:high].tolist()) == np.flatnonzero(chosen).tolist()


@pytest.mark.parametrize("slots", [3, 64, 1000])
def test_counts_and_amounts_are_added_up_by_group_and_slot(slots: int) -> None:
    rng = np.random.default_rng(slots)
    slot, amount, order = rng.integers(0, slots, 500), rng.integers(-50, 50, 500), rng.permutation(500)[:300]
    first = np.array([0, 120, 120, 300])
    found = tallied(first, order, slot, amount, slots)
    wanted: dict[tuple[int, int], list[int]] = {}
    for group, (low, high) in enumerate(pairwise(first.tolist())):
        for row in order[low:high].tolist():
            entry = wanted.setdefault((group, int(slot[row])), [0, 0])
            entry[0], entry[1] = entry[0] + 1, entry[1] + int(amount[row])
    made = list(zip(zip(found.group.tolist(), found.slot.tolist(), strict=True), found.sums.tolist(), strict=True))
    assert made == sorted(wanted.items())
