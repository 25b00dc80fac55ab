"""Host time outside any operation and any call, and why.

    ops     |---- aten::linear ----|            |-- aten::relu --|
    calls                             |sync|
    gaps                            ^^      ^^^^
"""

from __future__ import annotations

import re

import numpy as np

from tracer.graph import GapKind, GapTable, LaunchTable, OpKind, OpTable, OverheadTable, Phase, StepTable
from tracer.kineto.gaps_loop import gaps_between

_DATA = re.compile(r"enumerate\(Data(?:Loader|Pipe)\)")

PROFILER_SHARE = 0.5
"""A gap is the profiler's if its overhead events cover at least this share of it."""
WAITING_SHARE = 0.5
"""A gap of a step's thread is a wait if work it hands to other threads covers at least this share of it."""
WAITING_NS = 20_000
"""Shorter gaps are no waits: a thread is not woken faster."""
_HANDED_OVER = ("gloo:",)
"""Beginnings of the names of ranges in which a backend's own thread communicates."""


def find_gaps(ops: OpTable, op_end: np.ndarray, calls: LaunchTable, steps: StepTable, overheads: OverheadTable,
              strings: list[str]) -> GapTable:
    """Gaps between neighbouring operations and calls of each thread.

    Annotations are not work: time inside `ProfilerStep#N` but in no operation is a gap. On a step's thread the step's
    borders bound and cut gaps, so that they add up per step; a data loader's range cuts them too, and inside it they
    are DATA_LOADING. A step's thread is BLOCKED while the autograd threads, or a backend's, do what it gave them.
    ``step`` is left to the caller.
    """
    loaders = np.flatnonzero(np.isin(ops.name, [c for c in np.unique(ops.name).tolist() if _DATA.match(strings[c])]))
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
    for row in loaders.tolist():
        low, high = np.searchsorted(gaps.thread, [ops.thread[row], ops.thread[row] + 1])
        first, last = low + np.searchsorted(gaps.start_ns[low:high], [ops.start_ns[row], op_end[row]])
        gaps.kind[first:last] = GapKind.DATA_LOADING
    return gaps


def _waiting(gaps: GapTable, ops: OpTable, op_end: np.ndarray, steps: StepTable, strings: list[str]) -> np.ndarray:
    """Gaps of steps' threads mostly covered by backward operations, or communication, of other threads."""
    found = np.zeros(len(gaps), np.bool_)
    handed = [code for code, text in enumerate(strings) if text.startswith(_HANDED_OVER)]
    work = ((ops.phase == Phase.BACKWARD) & (ops.kind == OpKind.OPERATION)) | np.isin(ops.name, handed)
    for thread in np.unique(steps.thread).tolist():
        mine = np.flatnonzero((gaps.thread == thread) & (gaps.duration_ns >= WAITING_NS))
        rows = np.flatnonzero(work & (ops.thread != thread))
        if not len(mine) or not len(rows):
            continue
        rows = rows[np.argsort(ops.start_ns[rows], kind="stable")]
        reached = np.maximum.accumulate(op_end[rows])
        opens = np.append(True, ops.start_ns[rows][1:] > reached[:-1])
        low = ops.start_ns[rows][opens]
        high = reached[np.append(np.flatnonzero(opens)[1:] - 1, len(rows) - 1)]
        done = np.append(0, np.cumsum(high - low))

        def before(time: np.ndarray, low: np.ndarray = low, high: np.ndarray = high,
                   done: np.ndarray = done) -> np.ndarray:
            """Covered ns before each time."""
            at = np.searchsorted(low, time, side="right")
            return np.where(at > 0, done[at] - np.maximum(high[np.maximum(at - 1, 0)] - time, 0), 0)

        covered = before(gaps.start_ns[mine] + gaps.duration_ns[mine]) - before(gaps.start_ns[mine])
        found[mine] = covered >= WAITING_SHARE * gaps.duration_ns[mine]
    return found


def _profiled(gaps: GapTable, overheads: OverheadTable) -> np.ndarray:
    """Gaps mostly covered by the profiler's own work (overheads may carry no host thread: matched by time)."""
    if not len(overheads):
        return np.zeros(len(gaps), np.bool_)
    covered = np.zeros(len(gaps), np.int64)
    end = gaps.start_ns + gaps.duration_ns
    own_threads = set(gaps.thread.tolist())
    for row in range(len(overheads)):
        begin = int(overheads.start_ns[row])
        stop = begin + int(overheads.duration_ns[row])
        shared = np.clip(np.minimum(end, stop) - np.maximum(gaps.start_ns, begin), 0, None)
        if int(overheads.thread[row]) in own_threads:
            shared[gaps.thread != overheads.thread[row]] = 0
        covered += shared
    return (covered > 0) & (covered >= PROFILER_SHARE * gaps.duration_ns)
