"""Columns grouped, joined as intervals and gone up as trees, against their plain definitions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer import columns
from tracer.columns import SMALL, covered, grouped, kinds_of, named, spans, tallied, totals, union, union_ns
from tracer.graph import OpTable


@pytest.mark.parametrize(("highest", "count"), [(50, 0), (1, 1000), (50, 1000), (SMALL * 3, 1), (SMALL * 3, 1000)])
def test_groups_are_those_of_unique(highest: int, count: int) -> None:
    keys = np.random.default_rng(count + highest).integers(-2, highest, count)
    distinct, place = grouped(keys)
    expected, at = np.unique(keys, return_inverse=True)
    assert np.array_equal(distinct, expected) and np.array_equal(place, at)


def test_kinds_are_what_numpy_finds_unique() -> None:
    random = np.random.default_rng(3)
    values = random.integers(-2, 4, (3, 500))
    _, first, place = np.unique(values, axis=1, return_index=True, return_inverse=True)
    found = kinds_of(*values)
    assert (found[0] == place.reshape(-1)).all() and (found[1] == first).all()
    assert [len(each) for each in kinds_of(values[0, :0], values[1, :0])] == [0, 0]


def test_sums_are_whole_numbers_and_spans_are_written_out_behind_one_another() -> None:
    assert totals(np.array([1, 1, 0, 0]), np.array([2**52, 1, 5, -3]), 3).tolist() == [2, 2**52 + 1, 0]
    assert spans(np.array([5, 2, 7]), np.array([8, 2, 9])).tolist() == [5, 6, 7, 7, 8]
    assert spans(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_rows_are_found_by_their_number_and_all_of_them_by_minus_one() -> None:
    rng = np.random.default_rng(5)
    number, chosen = rng.integers(-1, 6, 200).astype(np.int32), rng.random(200) < 0.7
    found = columns.RowsByNumber(number, 7, chosen)
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


def test_rows_of_names_are_those_whose_text_matches() -> None:
    codes, strings = np.array([2, -1, 0, 2, 1], np.int32), ["aten::mm", "step", "aten::add"]
    assert named(codes, strings, lambda text: text.startswith("aten::")).tolist() == [True, False, True, True, False]
    assert named(codes[:0], strings, str.isalpha).tolist() == []


PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12)


def starts_and_ends(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([begin for begin, _ in pairs], np.int64)
    return start, start + np.array([length for _, length in pairs], np.int64)


@settings(max_examples=40)
@given(PAIRS, PAIRS)
def test_a_union_covers_every_moment_once(pairs: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    start, end = starts_and_ends(pairs)
    moments = {time for begin, length in pairs for time in range(begin, begin + length)}
    starts, ends = union(start, end)
    assert union_ns(start, end) == len(moments) and (starts[1:] > ends[:-1]).all()
    assert {time for a, b in zip(starts, ends, strict=True) for time in range(a, b)} == moments
    found = covered((start, end), *starts_and_ends(others))
    assert (found == covered((starts, ends), *starts_and_ends(others))).all()
    assert found.tolist() == [sum(time in moments for time in range(a, a + length)) for a, length in others]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(-1, 40), st.booleans()), max_size=25))
def test_ways_up_a_tree(rows: list[tuple[int, bool]]) -> None:
    parent = np.array([min(above, row - 1) for row, (above, _) in enumerate(rows)], np.int64)
    chosen = np.array([mark for _, mark in rows], np.bool_)
    top, marked = columns.outermost(parent), columns.within(parent, chosen)
    for row in range(len(rows)):
        path = [row]
        while parent[path[-1]] >= 0:
            path.append(int(parent[path[-1]]))
        first = next((at for at in path if chosen[at]), -1)
        assert (top[row], marked[row]) == (path[-1], first >= 0)
        assert columns.nearest(parent, chosen, np.array([row]))[0] == first


def test_a_constant_column_can_be_written_to_also_without_a_row() -> None:
    for rows in (0, 1, 5):
        table = OpTable.blank(rows)
        table.writable("et_node")[:] = 3
        assert table.et_node.tolist() == [3] * rows
