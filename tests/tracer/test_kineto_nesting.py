"""Parents from times, against a slow definition and the awkward cases of recorded clocks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracer.graph import NONE
from tracer.kineto.nesting import host_order, inherit, innermost, nest


def nested(*rows: tuple[int, int, int]) -> tuple[list[int], list[int], int]:
    thread, start, duration = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    result = nest(thread.astype(np.int32), start, duration)
    return result.parent.tolist(), result.end.tolist(), result.clamped


def test_children_siblings_and_threads() -> None:
    assert nested((0, 0, 100), (0, 10, 20), (0, 15, 5), (0, 30, 10), (1, 5, 50)) == (
        [NONE, 0, 1, 0, NONE], [100, 30, 20, 40, 55], 0)


def test_a_child_that_sticks_out_is_cut_and_counted() -> None:
    parents, ends, clamped = nested((0, 0, 10_000), (0, 5_000, 6_000))
    assert (parents, ends, clamped) == ([NONE, 0], [10_000, 10_000], 1)


def test_neighbours_that_overlap_by_rounding_stay_neighbours() -> None:
    # 0.25 us of overlap: the long second operation is no child of the first
    parents, ends, clamped = nested((0, 0, 10_250), (0, 10_000, 50_000))
    assert (parents, ends, clamped) == ([NONE, NONE], [10_000, 60_000], 1)


def test_zero_duration_events() -> None:
    # whole microseconds: what began and ended within the one its neighbour ended in was called by that neighbour
    assert nested((0, 0, 10), (0, 5, 0), (0, 5, 0), (0, 10, 0)) == ([NONE, 0, 1, 0], [10, 5, 5, 10], 0)
    assert nested((0, 0, 10), (0, 10, 5)) == ([NONE, NONE], [10, 15], 0)


def test_event_index_breaks_ties() -> None:
    thread = np.zeros(3, np.int32)
    start, duration = np.array([5, 5, 5]), np.array([10, 10, 3])
    assert host_order(thread, start, duration, np.array([9, 2, 1])).tolist() == [1, 0, 2]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=40))
def test_every_event_lies_within_its_parent(rows: list[tuple[int, int, int]]) -> None:
    thread, start, duration = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    order = host_order(thread, start, duration, None)
    thread, start, duration = thread[order], start[order], duration[order]
    result = nest(thread.astype(np.int32), start, duration)
    assert (result.end >= start).all() and (result.end <= start + duration).all()
    for row, parent in enumerate(result.parent.tolist()):
        if parent != NONE:
            assert thread[parent] == thread[row] and parent < row
            assert start[parent] <= start[row] and result.end[row] <= result.end[parent]
            assert result.depth[row] == result.depth[parent] + 1


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=30),
       st.lists(st.tuples(st.integers(0, 1), st.integers(0, 110)), min_size=1, max_size=10))
def test_innermost_is_the_last_started_event_that_covers_the_query(
        rows: list[tuple[int, int, int]], queries: list[tuple[int, int]]) -> None:
    thread, start, duration = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    order = host_order(thread, start, duration, None)
    thread, start, duration = thread[order].astype(np.int32), start[order], duration[order]
    result = nest(thread, start, duration)
    where, at = (np.array(column, np.int64) for column in zip(*queries, strict=True))
    found = innermost(where.astype(np.int32), at, at, thread, start, result)
    for query, row in enumerate(found.tolist()):
        covering = np.flatnonzero((thread == where[query]) & (start <= at[query]) & (result.end >= at[query]))
        if row == NONE:
            # only an end that touches the query can be passed over, when a later event began since
            assert all(result.end[c] == at[query] or start[c] == at[query] for c in covering) or len(covering) == 0
        else:
            assert row in covering


def test_inherit_takes_the_nearest_ancestor() -> None:
    result = nest(np.zeros(4, np.int32), np.array([0, 1, 2, 3]), np.array([100, 50, 40, 30]))
    assert inherit(np.array([1, NONE, 7, NONE]), result, NONE).tolist() == [1, 1, 7, 7]


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
