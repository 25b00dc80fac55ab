"""A job's host time in pieces: what each item's work and cost was spent on, so that an edit can change it by operation.

::

    item       ───────── work ─────────[ cost ]──
    operation      |── addmm ────────────────|
    pieces     |gap|   addmm own       | addmm |

A piece belongs to the innermost operation around it. Time outside any operation is a *gap*, and goes by the top-level
operation that follows on its thread. Waiting is in no piece: the program has none.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_time import HostSplit, exclusive_time, operation_of, split
from graph_predictor.simulation.program import ItemKind, Program, whole_ns
from kernel_models.host.segments import HostIntervals
from tracer.arrays import Bool, Float64, Int8, Int32, Int64
from tracer.columns import within
from tracer.graph import NONE, ExecutionGraph, GapKind, OpKind

LOADER = "DataLoader"
"""Part of the name of a range that takes a batch from a loader."""
WORKERS = "_MultiProcessingDataLoaderIter"
"""Part of the name of the operation that takes a batch from worker processes."""
FETCH = "_SingleProcessDataLoaderIter"
"""Part of the name of the operation that makes a batch itself."""


@dataclass(frozen=True, slots=True)
class HostPieces:
    """Columns of equal length; sums by item are the program's ``item_work`` and ``item_cost``.

    Attributes:
        rank: position in the job.
        item: of the recorded program.
        is_cost: the item's own cost rather than work before it.
        op: row of the rank's ``ops`` around it; -1 in a gap.
        following: in a gap, the top-level operation that comes next on the thread; -1 elsewhere, or at a step's end.
        launch_kind: a ``LaunchKind`` of a call's cost, -1 of work.
        data: host time of loading data.
        fetched: of it, what the training process does in place of worker processes: making samples, collating, copying.
        start_ns: when it was recorded to begin, ns of the rank's window.
        ns: how long.
    """

    rank: Int64
    item: Int64
    is_cost: Bool
    op: Int64
    following: Int64
    launch_kind: Int8
    data: Bool
    fetched: Bool
    start_ns: Int64
    ns: Int64

    def __len__(self) -> int:
        return len(self.ns)

    def of_rank(self, rank: int) -> Int64:
        """Rows of one rank."""
        return np.flatnonzero(self.rank == rank)


def host_pieces(built: Built) -> HostPieces:
    """The pieces of all ranks of a recorded job, without the profiler where its program is."""
    if built.without_profiler is not None:
        return built.without_profiler.pieces
    parts = [_rank_pieces(built, rank) for rank in range(len(built.graphs))]
    return HostPieces(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(HostPieces)))


def with_host(program: Program, pieces: HostPieces, ns: Float64) -> tuple[Int64, Int64]:
    """``item_work`` and ``item_cost`` with other times of the pieces (ns)."""
    size = len(program.item_kind)
    work, cost = np.bincount(pieces.item + size * pieces.is_cost, weights=ns, minlength=2 * size).reshape(2, size)
    return whole_ns(work), whole_ns(cost)


def _items(built: Built, rank: int) -> tuple[Int64, Int64, Int64]:
    """A rank's items, their threads (rows of ``graph.threads``), and when the work before each begins, on the graph's
    clock."""
    program = built.recorded_program
    thread = program.item_thread()
    items = np.flatnonzero(program.thread_rank[thread] == rank)
    number = np.array(built.thread_number, np.int64)[thread[items]]
    start, end = program.recorded_item_start[items], program.recorded_item_end[items]
    follows = np.zeros(len(items), np.bool_)
    follows[1:] = thread[items][1:] == thread[items][:-1]
    begin = np.where(follows, np.concatenate([[0], end[:-1]])[: len(items)], start - program.item_work[items])
    return items, number, begin - built.clock_ns[rank]


def _rank_pieces(built: Built, rank: int) -> HostPieces:
    program, graph = built.program, built.graphs[rank]
    items, number, begin = _items(built, rank)
    host = exclusive_time(graph)
    end = begin + program.item_work[items]
    found = split(host, number, begin, end)
    # What is left of a step after its last operation is no gap before the next step's first one.
    left = program.item_kind[items][found.query] == ItemKind.STEP_END
    left &= found.start_ns + found.ns == end[found.query]
    following = np.where((found.op < 0) & ~left, _following(graph, number[found.query], found.start_ns), NONE)
    part, ns, data, fetched = _loading(graph, found, number)
    query, op, following = found.query[part], found.op[part], following[part]
    calls = np.flatnonzero((program.item_kind[items] == ItemKind.CALL) & (program.item_cost[items] > 0))
    row = program.item_row[items[calls]]
    around = np.append(operation_of(graph), NONE)[graph.launches.op[row]]
    none, no = np.full(len(calls), NONE, np.int64), np.zeros(len(calls), np.bool_)
    return HostPieces(
        rank=np.full(len(ns) + len(calls), rank, np.int64), item=np.concatenate([items[query], items[calls]]),
        is_cost=np.concatenate([np.zeros(len(ns), np.bool_), np.ones(len(calls), np.bool_)]),
        op=np.concatenate([op, around]), following=np.concatenate([following, none]),
        launch_kind=np.concatenate([np.full(len(ns), NONE, np.int8), graph.launches.kind[row]]).astype(np.int8),
        data=np.concatenate([data, no]), fetched=np.concatenate([fetched, no]),
        start_ns=np.concatenate([found.start_ns[part], graph.launches.start_ns[row]]),
        ns=np.concatenate([ns, program.item_cost[items[calls]]]))


def _following(graph: ExecutionGraph, thread: Int64, time: Int64) -> Int64:
    """The first top-level operation of a thread that begins at a time or later; -1 for none."""
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
    """Rows of operations that no other operation is around."""
    ops = graph.ops
    above = np.append(operation_of(graph), NONE)[ops.parent]
    return np.flatnonzero((ops.kind == OpKind.OPERATION) & (above < 0))


def _loading(graph: ExecutionGraph, found: HostSplit, thread: Int64) -> tuple[
        Int64, Int64, Bool, Bool]:
    """(row of ``found``, ns, data, fetched) of the pieces: those of a loader's operations load data, and a gap is cut
    into what loads data, by the training process or from a worker, and what does not."""
    loader, workers = (_under(graph, np.array([name in text for text in graph.strings], np.bool_))
                       for name in (LOADER, WORKERS))
    data = (found.op >= 0) & np.append(loader, False)[found.op]
    fetched = data & ~np.append(workers, False)[found.op]
    gap = np.flatnonzero(found.op < 0)
    query, start, end = thread[found.query[gap]], found.start_ns[gap], (found.start_ns + found.ns)[gap]
    gaps = graph.gaps
    loading = gaps.kind == GapKind.DATA_LOADING
    theirs = loading & _within(gaps.thread, gaps.start_ns, graph, WORKERS)
    of_all, of_workers = (
        HostIntervals.merged(gaps.thread[rows], gaps.start_ns[rows], (gaps.start_ns + gaps.duration_ns)[rows]).within(
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


def fetching_operations(graph: ExecutionGraph) -> Bool:
    """Operations in which the training process makes samples and collates them."""
    loader, workers = (_under(graph, np.array([name in text for text in graph.strings], np.bool_))
                       for name in (LOADER, WORKERS))
    return (graph.ops.kind == OpKind.OPERATION) & loader & ~workers


def fetch_ranges(graph: ExecutionGraph) -> Int64:
    """Rows of ``ops`` that are the fetching of one batch in the training process."""
    fetches = np.array([FETCH in text for text in graph.strings], np.bool_)
    return np.flatnonzero(fetches[graph.ops.name]) if len(graph.ops) else np.zeros(0, np.int64)


def _within(thread: Int32, time: Int64, graph: ExecutionGraph, name: str) -> Bool:
    """Return whether moments of threads lie in operations of the name."""
    ops = graph.ops
    named = np.array([name in text for text in graph.strings], np.bool_)
    rows = np.flatnonzero(named[ops.name]) if len(ops) else np.zeros(0, np.int64)
    ranges = HostIntervals.merged(ops.thread[rows], ops.start_ns[rows], (ops.start_ns + ops.duration_ns)[rows])
    return ranges.within(thread.astype(np.int64), time, time + 1) > 0


def _under(graph: ExecutionGraph, named: Bool) -> Bool:
    """Operations of the given names and all inside them."""
    if not named.any():
        return np.zeros(len(graph.ops), np.bool_)
    return within(graph.ops.parent, named[graph.ops.name]) if len(graph.ops) else np.zeros(0, np.bool_)
