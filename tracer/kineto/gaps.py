"""Host time outside any operation and any call, and why.

    ops     |---- aten::linear ----|            |-- aten::relu --|
    calls                             |sync|
    gaps                            ^^      ^^^^
"""

from __future__ import annotations

import re

import numpy as np

from tracer.graph import GapKind, GapTable, LaunchTable, OpKind, OpTable, OverheadTable, StepTable

_DATA = re.compile(r"enumerate\(Data(?:Loader|Pipe)\)")

PROFILER_SHARE = 0.5
"""A gap is the profiler's if its overhead events cover at least this share of it."""


def find_gaps(ops: OpTable, op_end: np.ndarray, calls: LaunchTable, steps: StepTable, overheads: OverheadTable,
              strings: list[str]) -> GapTable:
    """Gaps between neighbouring operations and calls of each thread.

    Annotations are not work: time inside `ProfilerStep#N` but in no operation is a gap. On a step's thread the step's
    borders bound and cut gaps, so that they add up per step; a data loader's range cuts them too, and inside it they
    are DATA_LOADING. ``step`` is left to the caller.
    """
    work = np.flatnonzero(ops.kind == OpKind.OPERATION)
    loaders = np.flatnonzero(np.isin(ops.name, [c for c in np.unique(ops.name).tolist() if _DATA.match(strings[c])]))
    # Zero-length marks at step and loader borders cut the gaps there.
    marks_thread = np.concatenate([steps.thread, steps.thread, ops.thread[loaders], ops.thread[loaders]])
    marks_at = np.concatenate([steps.start_ns, steps.start_ns + steps.duration_ns, ops.start_ns[loaders],
                               op_end[loaders]])
    thread = np.concatenate([ops.thread[work], calls.thread, marks_thread]).astype(np.int32)
    start = np.concatenate([ops.start_ns[work], calls.start_ns, marks_at])
    end = np.concatenate([op_end[work], calls.start_ns + calls.duration_ns, marks_at])
    if len(start) == 0:
        return GapTable.empty()
    order = np.lexsort((start, thread))
    thread, start, end = thread[order], start[order], end[order]
    # Running maximum of ends within each thread: shift every thread above the one before it.
    shift = thread.astype(np.int64) * np.int64(int(end.max()) + 1)
    reached = np.maximum.accumulate(end + shift) - shift
    free = (thread[1:] == thread[:-1]) & (start[1:] > reached[:-1])
    rows = np.flatnonzero(free)
    gaps = GapTable.empty(len(rows))
    gaps.thread = thread[rows]
    gaps.start_ns = reached[rows]
    gaps.duration_ns = start[rows + 1] - reached[rows]
    gaps.kind = np.full(len(rows), GapKind.PYTHON, np.int8)
    gaps.kind[_profiled(gaps, overheads)] = GapKind.PROFILER
    for row in loaders.tolist():
        low, high = np.searchsorted(gaps.thread, [ops.thread[row], ops.thread[row] + 1])
        first, last = low + np.searchsorted(gaps.start_ns[low:high], [ops.start_ns[row], op_end[row]])
        gaps.kind[first:last] = GapKind.DATA_LOADING
    return gaps


def _profiled(gaps: GapTable, overheads: OverheadTable) -> np.ndarray:
    """Gaps mostly covered by the profiler's own work (overheads may carry no host thread: matched by time)."""
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
