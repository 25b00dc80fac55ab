"""A job's host time in slices, which edits change by operation, and programs simulated again with other times.

Slices divide each item's work and cost among operations.

::

    item       ───────── work ─────────[ cost ]──
    operation      |── addmm ────────────────|
    slices     |gap|   addmm own       | addmm |

A slice belongs to the innermost operation around it. Time outside any operation is a *gap*; it belongs to the top-level
operation that follows on its thread. Slices contain no waiting, because the program has none.

Programs with the same dependencies and other durations are simulated again, many at once. The order of computation
depends on dependencies alone, not on durations. So the order that the simulator found for one program is valid for all
programs that differ in times alone. In this order every time is a maximum of sums of earlier times. Dependencies are
looked up once, when the order is made into tapes (``tape``). Times equal those of ``simulate`` to the nanosecond.

::

    rows of host time ──┐                 ┌──▶ every start and end of one program, and its cause
    rows of durations ──┼──▶ a tape ──▶──┤
    lags of a program ──┘                 └──▶ a few ends of many variants

Copies of one item or kernel take their times from one row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from graph_predictor.simulation.build import Built
from graph_predictor.simulation.engine import simulate
from graph_predictor.simulation.host_loop import cut_queries, innermost_times
from graph_predictor.simulation.program import (
    NEVER,
    ItemKind,
    Program,
    Simulated,
    Structure,
    entries_waited_for,
    pointers,
    whole_ns,
)
from graph_predictor.simulation.tape import Rows, Tape, TimeNumbers, constants_of
from graph_predictor.simulation.tape_loop import LANES, play, play_variants
from kernel_models.host.segments import HostIntervals
from tracer.arrays import Bool, Float64, Int8, Int32, Int64
from tracer.columns import nearest
from tracer.graph import NONE, ExecutionGraph, GapKind, OpKind
from tracer.step_work import LOADER, WORKERS, operations_like, operations_under

ROOM = 64
"""Slices to allocate in addition to four for each query; the number doubles until all fit."""


@dataclass
class HostTime:
    """Disjoint intervals sorted by (thread, start), ns of the rank's window; ``op`` is the innermost operation.

    ::

        ops        |------- aten::linear -------|     |-- aten::relu --|
                      |-- aten::addmm --|
        intervals  |l||      addmm      |linear|      |      relu      |
    """

    thread: Int64
    start_ns: Int64
    end_ns: Int64
    op: Int64

    def between(self, start: int, end: int) -> HostTime:
        """Return the intervals cut to [start, end). The cost grows with the threads, and with the intervals found."""
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
        """Return ``HostTime`` made from intervals in any order."""
        order = np.lexsort((start_ns, thread))
        return cls(thread[order], start_ns[order], end_ns[order], op[order])

    @cached_property
    def first(self) -> Int64:
        """Return the first interval of each thread, and the number of intervals."""
        return np.append(np.flatnonzero(np.diff(self.thread, prepend=self.thread[:1] - 1)), len(self.thread))

    @cached_property
    def latest_end(self) -> Int64:
        """Return for each interval the latest end of its thread's intervals up to it."""
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
    """Return the innermost operation of every thread over time. Annotations (``ProfilerStep#3``) are no operations."""
    ops = graph.ops
    room = np.empty((4, 2 * len(ops)), np.int64)
    found = innermost_times(ops.kind, ops.thread, ops.start_ns, ops.duration_ns,
                            *np.empty((2, len(ops)), np.int64), *room)
    return HostTime(*room[:, :found])


def operation_of(graph: ExecutionGraph) -> Int64:
    """Return for every row of ``ops`` the nearest operation at or above it (-1: only annotations)."""
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
        The slices, by query; those of one query in time order, operations first. They add up to its length exactly.
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


FETCH = "_SingleProcessDataLoaderIter"
"""Part of the name of the operation in which the training process itself makes a batch."""


@dataclass(frozen=True, slots=True)
class HostSlices:
    """A job's host time, cut into slices of one item and operation each. It is a job's longest table (four rows an
    operation), so row numbers take 32 bits. Sums by item are the program's ``item_work`` and ``item_cost``.

    Attributes:
        rank: position in the job.
        item: item of the recorded program.
        is_cost: the item's own cost rather than work before it.
        op: row of the rank's ``ops`` around it; -1 in a gap.
        following: in a gap, the top-level operation that comes next on the thread; -1 elsewhere, or at a step's end.
        launch_kind: a ``LaunchKind`` of a call's cost, -1 of work.
        data: host time of loading data.
        fetched: host time of making samples, collating and copying them in the training process, without workers.
        start_ns: recorded begin, ns of the rank's window.
        ns: duration.
    """

    rank: Int32
    item: Int32
    is_cost: Bool
    op: Int32
    following: Int32
    launch_kind: Int8
    data: Bool
    fetched: Bool
    start_ns: Int64
    ns: Int64

    def __len__(self) -> int:
        return len(self.ns)

    def of_rank(self, rank: int) -> Int64:
        """Return the rows of one rank."""
        return np.flatnonzero(self.rank == rank)


def host_slices(built: Built) -> HostSlices:
    """Return the host time of all ranks in slices, without the profiler's time if the job's program excludes it."""
    if built.without_profiler is not None:
        return built.without_profiler.slices
    parts = [_rank_slices(built, rank) for rank in range(len(built.graphs))]
    if len(parts) == 1:
        return parts[0]
    return HostSlices(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(HostSlices)))


def with_host(program: Program, slices: HostSlices, ns: Float64) -> tuple[Int64, Int64]:
    """Return ``item_work`` and ``item_cost`` of all items, ns, if each slice takes its time in ``ns``."""
    size = len(program.item_kind)
    work, cost = np.bincount(slices.item + size * slices.is_cost, weights=ns, minlength=2 * size).reshape(2, size)
    return whole_ns(work), whole_ns(cost)


def _items(built: Built, rank: int) -> tuple[Int64, Int64, Int64]:
    """Return a rank's items, their threads (rows of ``graph.threads``), and when the work before each begins, on the
    graph's clock."""
    program = built.recorded_program
    thread = program.item_thread()
    items = np.flatnonzero(program.thread_rank[thread] == rank)
    number = np.array(built.thread_number, np.int64)[thread[items]]
    start, end = program.recorded_item_start[items], program.recorded_item_end[items]
    follows = np.zeros(len(items), np.bool_)
    follows[1:] = thread[items][1:] == thread[items][:-1]
    begin = np.where(follows, np.concatenate([[0], end[:-1]])[: len(items)], start - program.item_work[items])
    return items, number, begin - built.clock_ns[rank]


def _rank_slices(built: Built, rank: int) -> HostSlices:
    program, graph = built.program, built.graphs[rank]
    items, number, begin = _items(built, rank)
    host = exclusive_time(graph)
    end = begin + program.item_work[items]
    found = split(host, number, begin, end)
    # Host time after a step's last operation is not part of a gap before the next step's first operation.
    left = program.item_kind[items][found.query] == ItemKind.STEP_END
    left &= found.start_ns + found.ns == end[found.query]
    following = np.where((found.op < 0) & ~left, _following(graph, number[found.query], found.start_ns), NONE)
    part, ns, data, fetched = _loading(graph, found, number)
    query, op, following = found.query[part], found.op[part], following[part]
    calls = np.flatnonzero((program.item_kind[items] == ItemKind.CALL) & (program.item_cost[items] > 0))
    row = program.item_row[items[calls]]
    around = np.append(operation_of(graph), NONE)[graph.launches.op[row]]
    none, no = np.full(len(calls), NONE, np.int64), np.zeros(len(calls), np.bool_)
    return HostSlices(
        rank=np.full(len(ns) + len(calls), rank, np.int32),
        item=np.concatenate([items[query], items[calls]]).astype(np.int32),
        is_cost=np.concatenate([np.zeros(len(ns), np.bool_), np.ones(len(calls), np.bool_)]),
        op=np.concatenate([op, around]).astype(np.int32),
        following=np.concatenate([following, none]).astype(np.int32),
        launch_kind=np.concatenate([np.full(len(ns), NONE, np.int8), graph.launches.kind[row]]).astype(np.int8),
        data=np.concatenate([data, no]), fetched=np.concatenate([fetched, no]),
        start_ns=np.concatenate([found.start_ns[part], graph.launches.start_ns[row]]),
        ns=np.concatenate([ns, program.item_cost[items[calls]]]))


def _following(graph: ExecutionGraph, thread: Int64, time: Int64) -> Int64:
    """Return the first top-level operation of a thread that begins at a time or later; -1 for none."""
    ops = graph.ops
    top = top_operations(graph)
    span = int((ops.start_ns + ops.duration_ns).max(initial=0)) + int(np.abs(time).max(initial=0)) + 2
    key = ops.thread[top].astype(np.int64) * span + ops.start_ns[top]
    order = np.argsort(key, kind="stable")
    place = np.searchsorted(key[order], thread * span + time, side="left")
    found = top[order[np.minimum(place, max(len(top) - 1, 0))]] if len(top) else np.full(len(time), NONE)
    inside = place < len(top)
    return np.where(inside & (ops.thread[found] == thread) if len(top) else False, found, NONE)


def top_operations(graph: ExecutionGraph) -> Int64:
    """Return the rows of operations that lie in no other operation."""
    ops = graph.ops
    above = np.append(operation_of(graph), NONE)[ops.parent]
    return np.flatnonzero((ops.kind == OpKind.OPERATION) & (above < 0))


def _loading(graph: ExecutionGraph, found: HostSplit, thread: Int64) -> tuple[
        Int64, Int64, Bool, Bool]:
    """Return (row of ``found``, ns, data, fetched) of the slices. Slices of a loader's operations load data. A gap is
    cut into time that loads data, in the training process or from a worker, and other time."""
    loader, workers = (operations_under(graph, name) for name in (LOADER, WORKERS))
    data = (found.op >= 0) & np.append(loader, False)[found.op]
    fetched = data & ~np.append(workers, False)[found.op]
    gap = np.flatnonzero(found.op < 0)
    query, start, end = thread[found.query[gap]], found.start_ns[gap], (found.start_ns + found.ns)[gap]
    gaps = graph.gaps
    loading = gaps.kind == GapKind.DATA_LOADING
    theirs = loading & _within(gaps.thread, gaps.start_ns, graph, WORKERS)
    of_all, of_workers = (
        HostIntervals(gaps.thread[rows], gaps.start_ns[rows], (gaps.start_ns + gaps.duration_ns)[rows]).within(
            query, start, end) for rows in (loading, theirs))
    in_data = np.minimum(of_all, found.ns[gap])
    in_workers = np.minimum(of_workers, in_data)
    ns = found.ns.copy()
    ns[gap] -= in_data
    no, yes = np.zeros(len(gap), np.bool_), np.ones(len(gap), np.bool_)
    part = np.concatenate([np.arange(len(ns)), gap, gap])
    ns = np.concatenate([ns, in_workers, in_data - in_workers])
    data, fetched = np.concatenate([data, yes, yes]), np.concatenate([fetched, no, yes])
    worked = ns > 0
    return part[worked], ns[worked], data[worked], fetched[worked]


def fetch_ranges(graph: ExecutionGraph) -> Int64:
    """Return the rows of ``ops`` that are the fetching of one batch in the training process."""
    return np.flatnonzero(operations_like(graph, FETCH))


def _within(thread: Int32, time: Int64, graph: ExecutionGraph, name: str) -> Bool:
    """Return whether moments of threads lie in operations of the name."""
    ops = graph.ops
    rows = np.flatnonzero(operations_like(graph, name))
    ranges = HostIntervals(ops.thread[rows], ops.start_ns[rows], (ops.start_ns + ops.duration_ns)[rows])
    return ranges.within(thread.astype(np.int64), time, time + 1) > 0


MOST_KEPT = 16_000_000
"""Most numbers of a scratch array that a thread keeps for its next call (128 MB)."""

Lanes = list[Int64]
"""Arrays of [rows, LANES], one variant a column; copies of the last variant fill the last array."""


def lanes(rows: Int64) -> Lanes:
    """Return rows of variants, [rows, variants], as ``Lanes``."""
    missing = -rows.shape[1] % LANES
    if missing:
        rows = np.concatenate([rows, np.repeat(rows[:, -1:], missing, axis=1)], axis=1)
    return [np.ascontiguousarray(rows[:, at:at + LANES]) for at in range(0, rows.shape[1], LANES)]


@dataclass(frozen=True, slots=True)
class HostRows:
    """Host time of programs with the same rows, ns, [programs, rows] each: work before items, and the items' own
    cost."""

    work: Int64
    cost: Int64


@dataclass(frozen=True, slots=True)
class HostVariants:
    """Host time of variants, by merged items. Each variant takes the times of one of a few programs.

    Attributes:
        work, cost: host time of the programs, ns, [programs, rows] each.
        program: the program of each variant; most are the first one.
    """

    work: Int64
    cost: Int64
    program: Int64

    def lanes(self) -> Iterator[tuple[Int64, Int64]]:
        """Yield work and cost of the next ``LANES`` variants, [rows, LANES] each; the last variant is repeated.
        They are made one pair at a time: together they would be the largest arrays of a prediction."""
        program = np.append(self.program, np.repeat(self.program[-1:], -len(self.program) % LANES))
        for of in program.reshape(-1, LANES):
            yield _side_by_side(self.work, of), _side_by_side(self.cost, of)


def _side_by_side(rows: Int64, of: Int64) -> Int64:
    """Return the programs ``of`` of ``rows``, [programs, rows], as columns, [rows, len(of)]."""
    found: Int64 = np.empty((rows.shape[1], len(of)), np.int64)
    found[:] = rows[of[0], :, None]
    for lane in np.flatnonzero(of != of[0]).tolist():
        found[:, lane] = rows[of[lane]]
    return found


class WorkingOrder:
    """An order in which a program's items and kernels can be computed. It is valid for every program that differs in
    times alone: work, costs, lags, latencies, durations, gaps of the same sign, and existing external times.

    Args:
        program: the program.
        structure: its dependencies.
        rows: rows of its times. Items of one row have the same work and cost, kernels of one row the same duration.
        items, kernels: items and kernels whose ends ``ends`` returns, in any shape.

    Raises:
        SimulationStuck: the dependencies have a cycle.
    """

    def __init__(self, program: Program, structure: Structure, rows: Rows, items: Int64, kernels: Int64) -> None:
        self.program, self.structure, self.rows = program, structure, rows
        self.items, self.kernels = items, kernels
        self.times = TimeNumbers(program)

    @cached_property
    def _nodes(self) -> Int64:
        return simulate(self.program, structure=self.structure).order

    @cached_property
    def _tape(self) -> _SharedTape:
        return _SharedTape.of(self)

    def lags(self, program: Program) -> Int64:
        """Return the constants of a program in the tape's order; programs with the same constants can share them."""
        return constants_of(program)[self._tape.tape.constant]

    def simulate(self, lags: Int64, host: HostRows, duration: Int64, floor: Int64) -> Simulated:
        """Work out all times of one program, ns.

        Args:
            lags: its constants.
            host: its host time, [1, rows].
            duration: durations of its kernels, [rows].
            floor: the floors of its items, [rows].
        """
        t = self.times
        times: Int64 = np.empty(t.count, np.int64)
        cause: Int8 = np.zeros(t.count, np.int8)
        source: Int32 = np.full(t.count, NONE, np.int32)
        play(self._tape.tape.operations, lags, t.items, t.kernels, self.rows.item, host.work.ravel(),
             host.cost.ravel(), duration, floor, self.program.edge_fraction, times, cause, source)
        begins, ends = slice(0, t.items), slice(t.item_end, t.kernel_start)
        kernels = slice(t.kernel_start, t.kernel_end)
        return Simulated(
            item_start=times[begins], item_end=times[ends], item_start_cause=cause[begins],
            item_start_source=source[begins], item_end_cause=cause[ends], item_end_source=source[ends],
            kernel_start=times[kernels], kernel_end=times[t.kernel_end:t.left], kernel_cause=cause[kernels],
            kernel_source=source[kernels], group_last=source[t.met:], order=self._nodes)

    def host_variants(self, host: HostRows, program: Int64) -> HostVariants:
        """Return the host time of variants for ``ends``; ``program`` is the row of ``host`` for each variant."""
        return HostVariants(*self._tape.summed(host), program)

    def ends(self, lags: Int64, host: HostVariants, duration: Lanes, floor: Lanes) -> tuple[Int64, Int64]:
        """Return the ends of the items and kernels asked for in all variants, ns, [*rows, variants] each. Arguments are
        those of ``simulate``, each with the variants as last axis."""
        shared = self._tape
        times = _WORKSPACE.rows(shared.places)
        found = []
        for (work, cost), length, least in zip(host.lanes(), duration, floor, strict=True):
            play_variants(shared.placed.operations, lags, work, cost, length, least, self.program.edge_fraction,
                          times)
            found.append((times[shared.at_items], times[shared.at_kernels]))
        item_end, kernel_end = (np.concatenate(parts, axis=-1) for parts in zip(*found, strict=True))
        return item_end, kernel_end


@dataclass(frozen=True, slots=True)
class _SharedTape:
    """The tape that variants share.

    Attributes:
        tape, placed: a tape that keeps every time, and one that reuses ``places`` places for times. The ends asked for
            are at ``at_items`` and ``at_kernels``.
        chain, pointer: for each row of the tape, the recorded rows whose work it sums; the row's own is last.
    """

    tape: Tape
    placed: Tape
    places: int
    at_items: Int64
    at_kernels: Int64
    chain: Int64
    pointer: Int64

    @classmethod
    def of(cls, order: WorkingOrder) -> _SharedTape:
        """Return the tape of an order."""
        p, alike, count = order.program, order.rows.item, order.times.items
        opens = np.zeros(count, np.bool_)
        opens[p.thread_ptr[:-1][np.diff(p.thread_ptr) > 0]] = True
        kept = np.zeros(count, np.bool_)
        kept[order.items] = True
        kept |= order.rows.floor >= 0
        taken = _taken_in(p, opens, alike, kept)
        own = np.flatnonzero(~taken)
        begins: Int64 = np.zeros(count, np.int64)
        begins[own] = np.concatenate([[0], own[:-1] + 1])[:len(own)]
        follows = np.full(count, NONE)
        follows[own] = np.where(opens[begins[own]], NONE, begins[own] - 1)
        _, first, row_of = np.unique(alike[own], return_index=True, return_inverse=True)
        row: Int64 = np.zeros(count, np.int64)
        row[own] = row_of
        shown = own[first]
        lengths = shown - begins[shown] + 1
        pointer = pointers(lengths)
        chain = np.arange(pointer[-1]) + np.repeat(begins[shown] - pointer[:-1], lengths)
        nodes = order._nodes
        nodes = nodes[~np.concatenate([taken, np.zeros(order.times.kernels, np.bool_)])[nodes]]
        tape = Tape.of(p, nodes, order.structure, replace(order.rows, item=row), follows)
        asked = np.concatenate([order.times.item_end + order.items.ravel(),
                                order.times.kernel_end + order.kernels.ravel()])
        placed, at, places = tape.placed(asked, order.times.count)
        split = order.items.size
        return cls(tape, placed, places, at[:split].reshape(order.items.shape), at[split:].reshape(order.kernels.shape),
                   alike[chain], pointer)

    def summed(self, host: HostRows) -> tuple[Int64, Int64]:
        """Return each item's work (merged items included) and own cost, [programs, rows] each."""
        last = self.pointer[1:] - 1
        work, cost = (np.take(each, self.chain, axis=1) for each in (host.work, host.cost))  # a program after another
        own = np.take(cost, last, axis=1)
        cost[:, last] = 0
        return np.add.reduceat(work + cost, self.pointer[:-1], axis=1) if len(last) else work, own


def _taken_in(p: Program, opens: Bool, alike: Int64, kept: Bool) -> Bool:
    """Return which items can be merged into the next one of their thread: only that one waits for them, and they wait
    only for the one before. Items of one row are merged together or not at all."""
    follows = np.zeros(len(p.item_work), np.bool_)
    follows[:-1] = ~opens[1:]
    free = follows & ~kept & (p.item_kind != ItemKind.STEP_BEGIN) & (p.item_external <= NEVER)
    free &= (np.diff(p.after_ptr) == 0) & (np.diff(p.wait_ptr) == 0) & (entries_waited_for(p) < 0)
    free[p.after_item] = False
    free[p.kernel_item[p.kernel_item >= 0]] = False
    size = int(alike.max(initial=-1)) + 1
    # Items of one row merge only where the items before them are of one row; at the borders of copies they may differ.
    behind = np.flatnonzero(follows)
    before: Int64 = np.full(size, NONE, np.int64)
    before[alike[behind[::-1] + 1]] = alike[behind[::-1]]
    other = behind[before[alike[behind + 1]] != alike[behind]]
    free[other] = False
    refused = np.zeros(size + 1, np.bool_)  # the last entry is for no item
    refused[before[alike[np.append(other + 1, np.flatnonzero(opens))]]] = True
    refused[alike[~free]] = True
    return ~refused[alike]  # type: ignore[no-any-return]


class _Workspace(threading.local):
    """A scratch array that a thread uses again and again: getting a new one page by page from the system would double
    the time."""

    def __init__(self) -> None:
        self._kept: Int64 = _aligned(0)

    def rows(self, size: int) -> Int64:
        """Return an array [``size``, ``LANES``] with arbitrary content, valid until the next call."""
        total = size * LANES
        kept = self._kept if total <= len(self._kept) else _aligned(total)
        if total <= MOST_KEPT:
            self._kept = kept
        return kept[:total].reshape(-1, LANES)


def _aligned(size: int) -> Int64:
    """Return an array of ``size`` numbers that begins at a cache line, so that no vector crosses two lines."""
    found = np.empty(size + LANES, np.int64)
    skipped = -found.ctypes.data % 64 // found.itemsize
    return found[skipped:skipped + size]


_WORKSPACE = _Workspace()
