"""The operation a host thread was in at any time: its operations' exclusive time as disjoint intervals.

::

    ops        |------- aten::linear -------|     |-- aten::relu --|
                  |-- aten::addmm --|
    intervals  |l||      addmm      |linear|      |      relu      |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from graph_predictor.simulation.host_loop import cut_queries, innermost_times
from graph_predictor.simulation.program import ItemKind, Program
from tracer.arrays import Int64
from tracer.columns import nearest
from tracer.graph import NONE, ExecutionGraph, OpKind

ROOM = 64
"""Pieces that there is room for beside four a query; it doubles where that is too few."""


@dataclass
class HostTime:
    """Disjoint intervals sorted by (thread, start), ns of the rank's window; ``op`` is the innermost operation."""

    thread: Int64
    start_ns: Int64
    end_ns: Int64
    op: Int64

    def between(self, start: int, end: int) -> HostTime:
        """The intervals cut to [start, end). Takes as long as there are threads and intervals in there."""
        found = []
        for first, last in pairwise(self.first.tolist()):
            low = first + int(np.searchsorted(self.latest_end[first:last], start, side="right"))
            found.append(np.arange(low, first + int(np.searchsorted(self.start_ns[first:last], end, side="left"))))
        rows = np.concatenate([np.zeros(0, np.int64), *found])
        rows = rows[self.end_ns[rows] > start]
        return HostTime(self.thread[rows], np.maximum(self.start_ns[rows], start), np.minimum(self.end_ns[rows], end),
                        self.op[rows])

    @classmethod
    def ordered(cls, thread: Int64, start_ns: Int64, end_ns: Int64, op: Int64) -> HostTime:
        """Intervals given in any order."""
        order = np.lexsort((start_ns, thread))
        return cls(thread[order], start_ns[order], end_ns[order], op[order])

    @cached_property
    def first(self) -> Int64:
        """Where each thread's intervals begin, and the end."""
        return np.append(np.flatnonzero(np.diff(self.thread, prepend=self.thread[:1] - 1)), len(self.thread))

    @cached_property
    def latest_end(self) -> Int64:
        """The latest end of a thread's intervals up to each."""
        return np.concatenate([np.zeros(0, np.int64), *(
            np.maximum.accumulate(self.end_ns[low:high]) for low, high in pairwise(self.first.tolist()))])


@dataclass(slots=True)
class HostSplit:
    """Parts of some queried intervals: ``query`` is the row asked for, ``op`` -1 where no operation ran."""

    query: Int64
    op: Int64
    start_ns: Int64
    ns: Int64


def exclusive_time(graph: ExecutionGraph) -> HostTime:
    """The innermost operation of every thread over time. Annotations (``ProfilerStep#3``) are no operations."""
    ops = graph.ops
    room = np.empty((4, 2 * len(ops)), np.int64)
    found = innermost_times(ops.kind, ops.thread, ops.start_ns, ops.duration_ns,
                            *np.empty((2, len(ops)), np.int64), *room)
    return HostTime(*room[:, :found])


def operation_of(graph: ExecutionGraph) -> Int64:
    """For every row of ``ops`` the nearest row at or above it that is an operation (-1: only annotations)."""
    ops = graph.ops
    return nearest(ops.parent, ops.kind != OpKind.ANNOTATION, np.arange(len(ops)))


def split(host: HostTime, thread: Int64, start: Int64, end: Int64) -> HostSplit:
    """Cut intervals of threads at the borders of operations.

    Args:
        host: The threads' exclusive time.
        thread: Thread of each queried interval; -1 where it is not known.
        start: Begin of each (ns of the window).
        end: End of each.

    Returns:
        The pieces, by query; of one those in an operation first, in order of time. They add up to its length exactly.
    """
    thread, start, end = (np.ascontiguousarray(each, np.int64) for each in (thread, start, end))
    state: Int64 = np.zeros(2, np.int64)
    room: Int64 = np.empty((4, 4 * len(start) + ROOM), np.int64)
    while cut_queries(host.thread, host.start_ns, host.end_ns, host.op, thread, start, end, state, *room) < len(start):
        room = np.concatenate([room, np.empty_like(room)], axis=1)
    return HostSplit(*room[:, :int(state[0])])


def waits(program: Program, rank: int, thread_number: list[int], clock_ns: int) -> HostTime:
    """Return when each thread of a rank waited in the recording: blocked in calls, for another thread, or for data.

    Args:
        program: The program as built: its work and costs have all waiting taken out.
        rank: Position of the rank.
        thread_number: Thread of the graph for each of the program.
        clock_ns: Start of the rank's window on the job's clock.

    Returns:
        Intervals in ns of the window; their ``op`` is not set (-1).
    """
    thread = program.item_thread()
    mine = np.nonzero(program.thread_rank[thread] == rank)[0]
    start, end = program.recorded_item_start[mine], program.recorded_item_end[mine]
    number = np.array([*thread_number, NONE], np.int64)[thread[mine]] if thread_number else np.full(len(mine), NONE)
    follows = np.zeros(len(mine), np.bool_)
    follows[1:] = thread[mine][1:] == thread[mine][:-1]
    before = np.where(follows, np.concatenate([[0], end[:-1]])[: len(mine)], start)
    from_before = np.minimum(before + program.item_work[mine], start)
    blocked = np.where(program.item_kind[mine] == ItemKind.CALL, end - start - program.item_cost[mine], 0)
    low = np.concatenate([from_before, end - np.maximum(blocked, 0)]) - clock_ns
    high = np.concatenate([start, end]) - clock_ns
    kept = low < high
    return HostTime.ordered(np.concatenate([number, number])[kept].astype(np.int64), low[kept], high[kept],
                            np.full(int(kept.sum()), NONE, np.int64))
