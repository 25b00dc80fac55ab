"""Unions of intervals and ways up a tree, against their plain definitions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracer.columns import covered, depths, nearest, outermost, union, union_ns, within

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([begin for begin, _ in pairs], np.int64)
    return start, start + np.array([length for _, length in pairs], np.int64)


@given(PAIRS, PAIRS)
def test_a_union_covers_every_moment_once(pairs: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    start, end = columns(pairs)
    moments = {time for begin, length in pairs for time in range(begin, begin + length)}
    starts, ends = union(start, end)
    assert union_ns(start, end) == len(moments) and (starts[1:] > ends[:-1]).all()
    assert {time for a, b in zip(starts, ends, strict=True) for time in range(a, b)} == moments
    found = covered((start, end), *columns(others))
    assert (found == covered((starts, ends), *columns(others))).all()
    assert found.tolist() == [sum(time in moments for time in range(a, a + length)) for a, length in others]


@given(st.lists(st.tuples(st.integers(-1, 40), st.booleans()), max_size=25))
def test_ways_up_a_tree(rows: list[tuple[int, bool]]) -> None:
    parent = np.array([min(above, row - 1) for row, (above, _) in enumerate(rows)], np.int64)
    chosen = np.array([mark for _, mark in rows], np.bool_)
    for row in range(len(rows)):
        path = [row]
        while parent[path[-1]] >= 0:
            path.append(int(parent[path[-1]]))
        assert outermost(parent)[row] == path[-1] and depths(parent)[row] == len(path) - 1
        first = next((at for at in path if chosen[at]), -1)
        assert nearest(parent, chosen, np.array([row]))[0] == first and within(parent, chosen)[row] == (first >= 0)
