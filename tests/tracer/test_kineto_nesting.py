"""Parents from times, against a slow definition and the awkward cases of recorded clocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.graph import NONE
from tracer.kineto.nesting import host_order, inherit, innermost, nest

Row = tuple[int, int, int]


def columns(rows: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    return [np.array(column, np.int64) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(("rows", "parents", "ends", "clamped"), [
    ([(0, 0, 100), (0, 10, 20), (0, 15, 5), (0, 30, 10), (1, 5, 50)], [NONE, 0, 1, 0, NONE], [100, 30, 20, 40, 55], 0),
    ([(0, 0, 10_000), (0, 5_000, 6_000)], [NONE, 0], [10_000, 10_000], 1),
    # 0.25 us of overlap: the long second operation is no child of the first
    ([(0, 0, 10_250), (0, 10_000, 50_000)], [NONE, NONE], [10_000, 60_000], 1),
    # whole microseconds: what began and ended within the one its neighbour ended in was called by that neighbour
    ([(0, 0, 10), (0, 5, 0), (0, 5, 0), (0, 10, 0)], [NONE, 0, 1, 0], [10, 5, 5, 10], 0),
    ([(0, 0, 10), (0, 10, 5)], [NONE, NONE], [10, 15], 0),
], ids=["siblings and threads", "sticks out", "overlap by rounding", "no duration", "neighbours"])
def test_parents_ends_and_what_was_cut(rows: list[Row], parents: list[int], ends: list[int], clamped: int) -> None:
    thread, start, duration = columns(rows)
    result = nest(thread.astype(np.int32), start, duration)
    assert (result.parent.tolist(), result.end.tolist(), result.clamped) == (parents, ends, clamped)


def test_the_event_index_breaks_ties_and_the_nearest_ancestor_is_inherited() -> None:
    thread = np.zeros(3, np.int32)
    start, duration = np.array([5, 5, 5]), np.array([10, 10, 3])
    assert host_order(thread, start, duration, np.array([9, 2, 1])).tolist() == [1, 0, 2]
    result = nest(np.zeros(4, np.int32), np.array([0, 1, 2, 3]), np.array([100, 50, 40, 30]))
    assert inherit(np.array([1, NONE, 7, NONE]), result, NONE).tolist() == [1, 1, 7, 7]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=40),
       st.lists(st.tuples(st.integers(0, 1), st.integers(0, 110)), min_size=1, max_size=10))
def test_every_event_lies_within_its_parent_and_innermost_covers_the_query(
        rows: list[Row], queries: list[tuple[int, int]]) -> None:
    thread, start, duration = columns(rows)
    order = host_order(thread, start, duration, None)
    thread, start, duration = thread[order].astype(np.int32), start[order], duration[order]
    result = nest(thread, start, duration)
    assert (result.end >= start).all() and (result.end <= start + duration).all()
    for row, parent in enumerate(result.parent.tolist()):
        if parent != NONE:
            assert thread[parent] == thread[row] and parent < row
            assert start[parent] <= start[row] and result.end[row] <= result.end[parent]
            assert result.depth[row] == result.depth[parent] + 1
    where, at = columns(queries)
    for query, row in enumerate(innermost(where.astype(np.int32), at, at, thread, start, result).tolist()):
        covering = np.flatnonzero((thread == where[query]) & (start <= at[query]) & (result.end >= at[query]))
        if row != NONE:
            assert row in covering
        # only an end that touches the query can be passed over, when a later event began since
        elif (duration > 0).all():
            assert all(result.end[each] == at[query] or start[each] == at[query] for each in covering)


def test_innermost_goes_up_very_many_levels() -> None:
    depth = 3000
    start = np.arange(depth)
    thread, end = np.zeros(depth, np.int32), 10_000 - start
    result = nest(thread, start, end - start)
    until = np.arange(6_000, 11_000, 7)
    at = np.full(len(until), depth)
    found = innermost(np.zeros(len(until), np.int32), at, until, thread, start, result)
    assert result.depth.max() == depth - 1
    assert found.tolist() == [min(10_000 - each, depth - 1) if each <= 10_000 else NONE for each in until.tolist()]
