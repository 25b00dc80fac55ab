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

from graph_predictor.simulation.program import ItemKind, Program
from tracer.arrays import Int64
from tracer.graph import NONE, ExecutionGraph, OpKind
from tracer.trees import depths, nearest


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
        for first, last in self._threads:
            low = first + int(np.searchsorted(self._latest_end[first:last], start, side="right"))
            found.append(np.arange(low, first + int(np.searchsorted(self.start_ns[first:last], end, side="left"))))
        rows = np.concatenate([np.zeros(0, np.int64), *found])
        rows = rows[self.end_ns[rows] > start]
        return HostTime(self.thread[rows], np.maximum(self.start_ns[rows], start), np.minimum(self.end_ns[rows], end),
                        self.op[rows])

    def cut(self, starts: Int64, ends: Int64) -> tuple[HostTime, Int64]:
        """The intervals cut to each of some windows, in no order, and which window each piece lies in.

        Args:
            starts: of the windows, ns.
            ends: of the windows; those that follow one another without overlap are cut all at once.
        """
        order = np.argsort(starts, kind="stable")
        low, high = starts[order], ends[order]
        if (low > high).any() or (high[:-1] > low[1:]).any():
            parts = [self.between(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]
            window = np.repeat(np.arange(len(parts)), [len(part.op) for part in parts])
            return HostTime(*(np.concatenate([getattr(part, name) for part in parts])
                              for name in ("thread", "start_ns", "end_ns", "op"))), window
        found = self.between(int(low[0]), int(high[-1])) if len(low) else self.between(0, 0)
        first = np.searchsorted(high, found.start_ns, side="right")
        count = np.maximum(np.searchsorted(low, found.end_ns, side="left") - first, 0)
        row = np.repeat(np.arange(len(first)), count)
        place = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count) + first[row]
        return HostTime(found.thread[row], np.maximum(found.start_ns[row], low[place]),
                        np.minimum(found.end_ns[row], high[place]), found.op[row]), order[place]

    @classmethod
    def ordered(cls, thread: Int64, start_ns: Int64, end_ns: Int64, op: Int64) -> HostTime:
        """Intervals given in any order."""
        order = np.lexsort((start_ns, thread))
        return cls(thread[order], start_ns[order], end_ns[order], op[order])

    @cached_property
    def _threads(self) -> list[tuple[int, int]]:
        """First row and end of each thread's intervals."""
        bounds = np.concatenate([[0], np.flatnonzero(np.diff(self.thread)) + 1, [len(self.thread)]])
        return [(low, high) for low, high in pairwise(bounds.tolist()) if low < high]

    @cached_property
    def _latest_end(self) -> Int64:
        """The latest end of a thread's intervals up to each."""
        return np.concatenate([np.zeros(0, np.int64), *(
            np.maximum.accumulate(self.end_ns[first:last]) for first, last in self._threads)])


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
    rows = np.nonzero((ops.kind == OpKind.OPERATION) & (ops.duration_ns > 0))[0]
    if not len(rows):
        none = np.zeros(0, np.int64)
        return HostTime(none, none, none, none)
    parent = operation_of(graph)[ops.parent[rows]]
    parent = np.where(ops.parent[rows] >= 0, parent, NONE)
    depth = depths(ops.parent)[rows]
    start = ops.start_ns[rows]
    # At a start the operation takes over, at its end its parent does. At one instant ends come first, inner ones
    # before outer ones, then starts, outer ones before inner ones.
    time = np.concatenate([start, start + ops.duration_ns[rows]])
    thread = np.concatenate([ops.thread[rows], ops.thread[rows]]).astype(np.int64)
    now = np.concatenate([rows, parent]).astype(np.int64)
    begins = np.concatenate([np.ones(len(rows), np.int8), np.zeros(len(rows), np.int8)])
    order = np.lexsort((np.concatenate([depth, -depth]), begins, time, thread))
    time, thread, now = time[order], thread[order], now[order]
    kept = (thread[1:] == thread[:-1]) & (time[1:] > time[:-1]) & (now[:-1] >= 0)
    return HostTime(thread[:-1][kept], time[:-1][kept], time[1:][kept], now[:-1][kept])


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
        The pieces, by query. Those of one query add up to its length exactly.
    """
    thread, start, end = (np.asarray(a, np.int64) for a in (thread, start, end))
    end = np.maximum(start, end)
    queries = np.arange(len(start), dtype=np.int64)
    if not len(host.op) or not len(start):
        return HostSplit(queries, np.full(len(start), NONE, np.int64), start, end - start)
    # One sortable number for (thread, time).
    low, high = int(min(host.start_ns.min(), start.min())), int(max(host.end_ns.max(), end.max()))
    span = high - low + 1
    first = np.searchsorted(host.thread * span + host.end_ns - low, thread * span + start - low, side="right")
    last = np.searchsorted(host.thread * span + host.start_ns - low, thread * span + end - low, side="left")
    count = np.where(end > start, np.maximum(last - first, 0), 0)
    query = np.repeat(queries, count)
    begins = np.cumsum(count) - count
    row = np.arange(len(query)) - np.repeat(begins, count) + np.repeat(first, count)
    inside, until = np.maximum(host.start_ns[row], start[query]), np.minimum(host.end_ns[row], end[query])
    # Where no operation ran: before each of these parts, and after the last one.
    free = np.insert(until, begins, start)
    taken = np.insert(inside, begins + count, end)
    gap = np.flatnonzero(taken > free)
    of_gap = np.repeat(queries, count + 1)[gap]
    return HostSplit(
        np.concatenate([query, of_gap]), np.concatenate([host.op[row], np.full(len(gap), NONE, np.int64)]),
        np.concatenate([inside, free[gap]]), np.concatenate([until - inside, (taken - free)[gap]]))


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
