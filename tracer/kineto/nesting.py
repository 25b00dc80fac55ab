"""Parents of host events from their times alone: within a thread, an event's parent is the innermost one around it.

    thread 1   |--------- aten::linear ---------|      |-- aten::relu --|
                  |- aten::t -|  |- aten::addmm -|..      sticks out: cut to its parent and counted

Recorded times are rounded (whole microseconds until 2023, a quarter in float64 epochs), so two neighbours can seem to
overlap by less than a microsecond. Then the earlier one is cut, not the later one swallowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tracer.graph import NONE
from tracer.kineto.nesting_loop import nest_rows, rows_around

ROUNDING_NS = 1000
"""Overlap that rounding of timestamps alone explains: one microsecond."""


_NEVER = 2**63 - 1
_FEW = 32
"""Levels that are gone up one by one: what real traces need."""


@dataclass(slots=True)
class Nesting:
    """Result of ``nest``; all arrays in the order of the input rows."""

    parent: np.ndarray
    end: np.ndarray
    depth: np.ndarray
    clamped: int


def host_order(thread: np.ndarray, start: np.ndarray, duration: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """Row order (thread, start, −duration, event index): an enclosing event comes before what it encloses."""
    keys = (-duration, start, thread)
    return np.lexsort(keys if order is None else (order, *keys))


def nest(thread: np.ndarray, start: np.ndarray, duration: np.ndarray) -> Nesting:
    """Parents of rows that are in ``host_order``. Times in nanoseconds.

    Returns:
        Parent rows (``NONE`` at top level), ends after clamping (int64), depths and the number of clamped events.
    """
    rows = len(start)
    end = start + duration
    parent, depth, open_row = (np.empty(size, np.int32) for size in (rows, rows, rows + 1))
    open_end = np.empty(rows + 1, np.int64)
    open_row[0], open_end[0] = NONE, _NEVER
    clamped = nest_rows(np.ascontiguousarray(thread, np.int32), np.ascontiguousarray(start), end, parent, depth,
                        open_row, open_end, ROUNDING_NS)
    return Nesting(parent, end, depth, clamped)


def innermost(thread: np.ndarray, at: np.ndarray, until: np.ndarray, rows_thread: np.ndarray, rows_start: np.ndarray,
              nesting: Nesting) -> np.ndarray:
    """For each query, the innermost nested row of its thread that starts by ``at`` and lasts to ``until`` (else NONE).

    Args:
        thread, at, until: the queries; nanoseconds from the window's start.
        rows_thread, rows_start, nesting: the nested rows, in ``host_order``.
    """
    if len(rows_start) == 0 or len(at) == 0:
        return np.full(len(at), NONE, np.int32)
    found = np.empty(len(at), np.int32)
    if not rows_around(np.ascontiguousarray(thread), np.ascontiguousarray(at), np.ascontiguousarray(until), rows_thread,
                       rows_start, nesting.end, nesting.parent, found, _FEW):
        return found
    active = np.flatnonzero(found >= 0)
    active = active[nesting.end[found[active]] < until[active]]
    # Far up: by jumps over 2^k ancestors, as ends only grow upwards.
    for jump in reversed(_jumps(nesting.parent)):
        above = jump[found[active]]
        below = (above >= 0) & (nesting.end[above] < until[active])
        found[active[below]] = above[below]
    found[active] = nesting.parent[found[active]]
    return found


def _jumps(parent: np.ndarray) -> list[np.ndarray]:
    """The ancestors 1, 2, 4, … levels above each row (``NONE`` where there is none)."""
    found = [parent]
    while (found[-1] >= 0).any():
        last = found[-1]
        found.append(np.where(last >= 0, last[last], NONE))
    return found


def inherit(values: np.ndarray, nesting: Nesting, unset: int) -> np.ndarray:
    """Fill rows whose value is ``unset`` from their nearest ancestor that has one (level by level, from the top)."""
    out = values.copy()
    if len(out) == 0:
        return out
    by_depth = np.argsort(nesting.depth, kind="stable")
    borders = np.searchsorted(nesting.depth[by_depth], np.arange(1, int(nesting.depth.max()) + 2))
    for low, high in pairwise(borders.tolist()):
        rows = by_depth[low:high]
        rows = rows[out[rows] == unset]
        out[rows] = out[nesting.parent[rows]]
    return out
