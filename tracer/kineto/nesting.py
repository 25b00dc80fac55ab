"""The nesting of host events and the gaps between them, from their times alone.

Within a thread, an event's parent is the innermost one around it::

    thread 1   |--------- aten::linear ---------|      |-- aten::relu --|
                  |- aten::t -|  |- aten::addmm -|..      sticks out: cut to its parent and counted
    gaps                                           ^^^^

Recorded times are rounded (whole microseconds until 2023, a quarter in float64 epochs), so that two neighbours can seem
to overlap by less than a microsecond. Then the earlier one is cut, and the later one is not nested in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracer.columns import covered, named, nearest
from tracer.graph import NONE, GapKind, GapTable, LaunchTable, OpKind, OpTable, OverheadTable, Phase, StepTable
from tracer.kineto.events import DATA_LOADER
from tracer.kineto.host_loop import gaps_between, nest_rows, rows_around

ROUNDING_NS = 1000
"""Largest overlap that rounding of timestamps alone explains: one microsecond."""


_NEVER = 2**63 - 1  # the largest of 64 bits
_FEW = 32
"""Levels that are climbed one by one, as many as real traces need."""


@dataclass(slots=True)
class Nesting:
    """Parent row, end and depth of each nested row, in the order of the input, and the number of clamped events."""

    parent: np.ndarray
    end: np.ndarray
    depth: np.ndarray
    clamped: int


def host_order(thread: np.ndarray, start: np.ndarray, duration: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """Return the row order (thread, start, −duration, event index): an enclosing event comes before its inner ones."""
    keys = (-duration, start, thread)
    return np.lexsort(keys if order is None else (order, *keys))


def nest(thread: np.ndarray, start: np.ndarray, duration: np.ndarray) -> Nesting:
    """Return the nesting of rows that are in ``host_order``. Times in nanoseconds.

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
    """Return for each query the innermost row of its thread that starts by ``at`` and lasts to ``until`` (or NONE).

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
    # Further up: by jumps over 2^k ancestors, since ends never decrease upwards.
    for jump in reversed(_jumps(nesting.parent)):
        above = jump[found[active]]
        below = (above >= 0) & (nesting.end[above] < until[active])
        found[active[below]] = above[below]
    found[active] = nesting.parent[found[active]]
    return found


def _jumps(parent: np.ndarray) -> list[np.ndarray]:
    """Return the ancestors 1, 2, 4, … levels above each row (``NONE`` where there is none)."""
    found = [parent]
    while (found[-1] >= 0).any():
        last = found[-1]
        found.append(np.where(last >= 0, last[last], NONE))
    return found


def inherit(values: np.ndarray, nesting: Nesting, unset: int) -> np.ndarray:
    """Fill rows whose value is ``unset`` from their nearest ancestor that has one."""
    found = nearest(nesting.parent, values != unset, np.arange(len(values)))
    return np.where(found >= 0, values[found], values) if len(values) else values


PROFILER_SHARE = 0.5
"""A gap is the profiler's if the profiler's overhead events cover at least this share of it."""
WAITING_SHARE = 0.5
"""A gap of a step's thread is a wait if its work on other threads covers at least this share of the gap."""
WAITING_NS = 20_000
"""Shorter gaps are no waits: waking a thread takes longer."""
_HANDED_OVER = ("gloo:",)
"""Beginnings of the names of ranges in which a backend's own thread communicates."""


def find_gaps(ops: OpTable, op_end: np.ndarray, calls: LaunchTable, steps: StepTable, overheads: OverheadTable,
              strings: list[str]) -> GapTable:
    """Return the gaps between neighbouring operations and calls of each thread.

    Annotations are not work: time inside `ProfilerStep#N` but in no operation is a gap. On a step's thread the step's
    borders bound and cut gaps, so that they add up per step. A data loader's range cuts gaps too; inside it they are
    DATA_LOADING. A step's thread is BLOCKED while autograd's threads, or a backend's, do work that it gave them. The
    caller sets ``step``.
    """
    loaders = np.flatnonzero(named(ops.name, strings, DATA_LOADER.match))
    # Zero-length marks at step and loader borders cut the gaps there.
    marks_thread = np.concatenate([steps.thread, steps.thread, ops.thread[loaders], ops.thread[loaders]])
    marks_at = np.concatenate([steps.start_ns, steps.start_ns + steps.duration_ns, ops.start_ns[loaders],
                               op_end[loaders]])
    order = np.lexsort((marks_at, marks_thread))
    room = len(ops) + len(calls) + len(order)
    thread, (start, duration) = np.empty(room, np.int32), np.empty((2, room), np.int64)
    found = gaps_between(ops.kind, ops.thread, ops.start_ns, op_end, calls.thread, calls.start_ns, calls.duration_ns,
                         marks_thread[order], marks_at[order], thread, start, duration)
    gaps = GapTable.blank(found)
    gaps.thread, gaps.start_ns, gaps.duration_ns = thread[:found], start[:found], duration[:found]
    gaps.kind = np.full(found, GapKind.PYTHON, np.int8)
    gaps.kind[_waiting(gaps, ops, op_end, steps, strings)] = GapKind.BLOCKED
    gaps.kind[_profiled(gaps, overheads)] = GapKind.PROFILER
    opened = np.zeros(found + 1, np.int64)  # loaders that begin at a gap, less those that have ended by then
    for thread in np.unique(ops.thread[loaders]).tolist():
        mine = loaders[ops.thread[loaders] == thread]
        low, high = np.searchsorted(gaps.thread, [thread, thread + 1])
        for edge, step in ((ops.start_ns[mine], 1), (op_end[mine], -1)):
            np.add.at(opened, low + np.searchsorted(gaps.start_ns[low:high], edge), step)
    gaps.kind[np.cumsum(opened[:-1]) > 0] = GapKind.DATA_LOADING
    return gaps


def _waiting(gaps: GapTable, ops: OpTable, op_end: np.ndarray, steps: StepTable, strings: list[str]) -> np.ndarray:
    """Return a mask of the gaps on steps' threads mostly covered by backward or communication on other threads."""
    found = np.zeros(len(gaps), np.bool_)
    work = ((ops.phase == Phase.BACKWARD) & (ops.kind == OpKind.OPERATION)) | named(
        ops.name, strings, lambda text: text.startswith(_HANDED_OVER))
    for thread in np.unique(steps.thread).tolist():
        mine = np.flatnonzero((gaps.thread == thread) & (gaps.duration_ns >= WAITING_NS))
        rows = np.flatnonzero(work & (ops.thread != thread))
        if not len(mine) or not len(rows):
            continue
        start, length = gaps.start_ns[mine], gaps.duration_ns[mine]
        shared = covered((ops.start_ns[rows], op_end[rows]), start, start + length)
        found[mine] = shared >= WAITING_SHARE * length
    return found


def _profiled(gaps: GapTable, overheads: OverheadTable) -> np.ndarray:
    """Return a mask of the gaps mostly covered by the profiler's work (overheads without a thread match by time)."""
    if not len(overheads):
        return np.zeros(len(gaps), np.bool_)
    overlap = np.zeros(len(gaps), np.int64)
    known = np.isin(overheads.thread, gaps.thread)
    for thread in (NONE, *np.unique(overheads.thread[known]).tolist()):
        low, high = np.searchsorted(gaps.thread, [thread, thread + 1]) if thread != NONE else (0, len(gaps))
        which = known & (overheads.thread == thread) if thread != NONE else ~known
        begin, start = overheads.start_ns[which], gaps.start_ns[low:high]
        end = begin + overheads.duration_ns[which]
        overlap[low:high] += _passed(begin, end, start + gaps.duration_ns[low:high]) - _passed(begin, end, start)
    return (overlap > 0) & (overlap >= PROFILER_SHARE * gaps.duration_ns)


def _passed(begin: np.ndarray, end: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return how much of intervals lies before each time, all intervals together."""
    passed = np.zeros(len(at), np.int64)
    for edge, sign in ((np.sort(begin), 1), (np.sort(end), -1)):
        before = np.searchsorted(edge, at)
        passed += sign * (before * at - np.append(0, np.cumsum(edge))[before])
    return passed
