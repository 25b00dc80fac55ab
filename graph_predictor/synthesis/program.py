"""The program of a step that never ran, built from the costs of its operations.

On each rank host operations follow one another on one thread, with their calls inside them. Kernels run on the streams
of their calls in the calls' order. A call that waits returns when its stream is done::

    host      ─before─[ operation: half ─(call)─(call)─ half ]─before─[ operation … ]
                                            │ latency
    stream                                  [ kernel ]─gap─[ kernel ]

The simulator computes the times. Each rank's graph gets the times of its program simulated without the other ranks, so
that the operation at any moment is found as in a recording.

Between the ranks of a pipeline a send does not wait for its receiver (the data is buffered), and a receive waits until
its sender has begun. A rank traced by shapes alone records sender and receiver of each message. Messages between two
ranks keep the program's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from graph_predictor.simulation.build import (
    Built,
    RankReport,
    RankRows,
    assemble,
    dissolve,
    with_edges,
    with_rendezvous,
)
from graph_predictor.simulation.changed_program import without_cycles
from graph_predictor.simulation.device_waits import CUDA_DEPTH
from graph_predictor.simulation.engine import simulate
from graph_predictor.simulation.host_items import HostItems
from graph_predictor.simulation.program import NEVER, ItemKind, LaunchReference, Program, Simulated, whole_ns
from graph_predictor.simulation.ranks import STAGED_BYTES, match_in_order
from kernel_models.host.segments import GAP_DEFAULT_NS, KINDS, RETURN_DEFAULT_NS, LaunchConstants
from tracer.arrays import Float64, Int64
from tracer.graph import (
    NONE,
    CodeOf,
    ExecutionGraph,
    GapKind,
    GapTable,
    KernelKind,
    KernelTable,
    LaunchKind,
    LaunchTable,
    StepTable,
    SyncKind,
    SyncTable,
    string_coder,
)
from tracer.shape_only.devices import CPU

COMPUTE_STREAM, COMMUNICATION_STREAM = 7, 20  # names only; PyTorch on CUDA records such numbers
SEND, RECEIVE = "send", "recv"
STEP = "traced step"


@dataclass(slots=True)
class DeviceWork:
    """A piece of device work: its kind, stream, time (ns), bytes (``moved``), and the interval of its time.

    Attributes:
        collective: row of the rank's collectives; ``NONE`` for none.
        source: a ``Source`` code.
        low, high: logs of the 80% interval's ends over the time.
        in_call: whether the call waits for it (a copy to pageable memory).
    """

    name: str
    kind: KernelKind
    ns: float
    stream: int = COMPUTE_STREAM
    moved: int = NONE
    collective: int = NONE
    source: int = 0
    low: float = 0.0
    high: float = 0.0
    in_call: bool = False

    @property
    def staged(self) -> bool:
        """Return whether the call feeds the copy piece by piece (a large copy from pageable memory, see ``ranks``)."""
        return (self.kind == KernelKind.MEMCPY and not self.in_call and "Pageable ->" in self.name
                and self.moved > STAGED_BYTES)


@dataclass(slots=True)
class HostCall:
    """A runtime call of an operation: its name and kind, its own cost (ns), and the device work it starts.

    A waiting call waits for ``stream`` (``NONE``: for all streams).
    """

    name: str
    kind: LaunchKind
    ns: float
    kernels: list[DeviceWork] = field(default_factory=list)
    stream: int = NONE


@dataclass(slots=True)
class OperationTimes:
    """Times of one rank's operations, ns by row of ``ops``.

    Attributes:
        before: host time before each operation.
        inside: host time in each operation, without its calls.
        calls: runtime calls of the operations that make any.
        tail: host time after the last operation.
        fetch: host time that loads the batch, before the first operation.
    """

    before: Float64
    inside: Float64
    calls: dict[int, list[HostCall]]
    tail: float = 0.0
    fetch: float = 0.0


def paired_transfers(graphs: Sequence[ExecutionGraph], kernel_ptr: Int64) -> list[tuple[int, int]]:
    """Return (receive, send) of every pair, as rows of the program's kernels; rank r's begin at ``kernel_ptr[r]``.

    Messages without a counterpart among the ranks are left out.
    """
    found: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: {SEND: [], RECEIVE: []})
    for graph, low in zip(graphs, kernel_ptr.tolist(), strict=False):
        table = graph.collectives
        for row in np.flatnonzero(table.kernel >= 0).tolist():
            kind = graph.string(int(table.kind[row]))
            if kind in (SEND, RECEIVE):
                key = graph.string(int(table.group[row])), graph.string(int(table.ranks[row]))
                found[key][kind].append(low + int(table.kernel[row]))
    return [pair for ends in found.values() if len(ends[SEND]) == len(ends[RECEIVE])
            for pair in zip(ends[RECEIVE], ends[SEND], strict=True)]


@dataclass(frozen=True, slots=True)
class RankTimes:
    """A rank traced by shapes, the times of its operations, and the constants of its launches."""

    graph: ExecutionGraph
    times: OperationTimes
    constants: LaunchConstants


@dataclass(frozen=True, slots=True)
class Synthesized:
    """The program of a step that never ran. For each kernel of all ranks, ``source`` states where its time comes from;
    ``low`` and ``high`` are the logs of (interval's ends / time)."""

    built: Built
    source: Int64
    low: Float64
    high: Float64


def plain_constants(latency_ns: int) -> LaunchConstants:
    """Return launch constants for a device without recorded launches."""
    return LaunchConstants(np.full(KINDS, latency_ns, np.int64), np.full(KINDS, latency_ns, np.int64),
                           np.full((KINDS, KINDS, 2), GAP_DEFAULT_NS, np.int64), queue_depth=CUDA_DEPTH)


def synthesize(ranks: Sequence[RankTimes]) -> Synthesized:
    """Return the program of a job whose ranks were traced by shapes, with simulated times in its graphs."""
    parts = [_Rank(rank) for rank in ranks]
    alone = assemble([part.rows() for part in parts], [0] * len(parts))
    simulated = simulate(alone)
    alone = replace(alone, recorded_item_start=simulated.item_start, recorded_item_end=simulated.item_end,
                    recorded_kernel_start=simulated.kernel_start, recorded_kernel_end=simulated.kernel_end)
    graphs = [part.timed(alone, simulated, number) for number, part in enumerate(parts)]
    rendezvous = match_in_order(graphs)
    program = with_rendezvous(alone, rendezvous)
    pairs = np.array(paired_transfers(graphs, program.kernel_ptr), np.int64).reshape(-1, 2)
    # A receive waits until its sender has begun.
    program, left_out = without_cycles(with_edges(program, pairs[:, 0], pairs[:, 1], np.zeros(len(pairs))))
    dissolve(rendezvous, program)
    works = [work for part in parts for work in part.works]
    built = Built(program, graphs, [part.report() for part in parts], rendezvous, [0] * len(parts),
                  [part.thread for part in parts], left_out)
    return Synthesized(built, np.array([work.source for work in works], np.int64),
                       np.array([work.low for work in works], np.float64),
                       np.array([work.high for work in works], np.float64))


class _Rank:
    """One rank's calls and device work in program order."""

    def __init__(self, rank: RankTimes) -> None:
        self.graph, self.times, self.constants = rank.graph, rank.times, rank.constants
        self.thread = int(self.graph.ops.thread[0]) if len(self.graph.ops) else 0
        owners = sorted(op for op, calls in rank.times.calls.items() if calls)
        self.calls: list[HostCall] = [call for op in owners for call in rank.times.calls[op]]
        self.op_of_call = np.repeat(np.array(owners, np.int64), [len(rank.times.calls[op]) for op in owners])
        self.works: list[DeviceWork] = [work for call in self.calls for work in call.kernels]
        self.call_of_work = np.repeat(np.arange(len(self.calls)), [len(call.kernels) for call in self.calls])
        self.kind = np.array([work.kind for work in self.works], np.int64)
        self.stream = np.array([work.stream for work in self.works], np.int64)
        before, inside = whole_ns(rank.times.before), whole_ns(rank.times.inside)
        self.fetch = round(rank.times.fetch)
        passed = self.fetch + np.cumsum(before + inside)
        self.begins = passed - inside
        """Host time from the step's begin to each operation's begin, without calls; ``ends``: to its end."""
        self.ends = passed
        at_calls = (self.begins + inside // 2)[self.op_of_call]
        whole = int(passed[-1]) if len(passed) else self.fetch
        self.at_item: Int64 = np.concatenate([[0], at_calls, [whole + round(rank.times.tail)]]).astype(np.int64)
        """Host time without calls up to each item: the step's begin, its calls, its end."""

    def rows(self) -> RankRows:
        """Return the rank's rows of the program."""
        count, constants = len(self.calls), self.constants
        own = whole_ns(np.maximum([call.ns for call in self.calls], 0.0))
        wait_call, wait_kernel = self._waits()
        edge_target, edge_source = self._meeting_compute()
        channels, channel = np.unique(self.stream, return_inverse=True)
        by_channel = np.argsort(channel, kind="stable")
        call_channel, call_queued = self._submits(channel)
        previous, last = self._neighbours()
        in_call = np.array([work.in_call for work in self.works], np.bool_)
        staged = np.array([work.staged for work in self.works], np.bool_)
        unknown = np.zeros(len(self.works), np.int64)
        return RankRows(
            items=self._items(), call_cost=own, call_channel=call_channel, call_queued=call_queued,
            queue_return=constants.queue_return, wait_call=wait_call, wait_kernel=wait_kernel,
            wait_lag=np.array([constants.returns.get(self.calls[call].name, RETURN_DEFAULT_NS)
                               for call in wait_call.tolist()], np.int64),
            kernel_call=self.call_of_work if count else unknown,
            kernel_reference=np.select([in_call, staged], [LaunchReference.CALL_START, LaunchReference.STAGED],
                                    LaunchReference.CALL_END).astype(np.int8),
            kernel_latency=np.select([in_call, staged], [constants.latency_in_call[self.kind], constants.staged_tail],
                                     constants.latency[self.kind]).astype(np.int64),
            kernel_previous=previous,
            # A step's first work on a stream follows the last work of the step before.
            kernel_gap=constants.gap[self.kind[np.where(previous >= 0, previous, last)], self.kind, 0],
            kernel_duration=self._durations(), kernel_external=np.full(len(self.works), NEVER, np.int64),
            kernel_start=unknown, kernel_end=unknown, edge_target=edge_target, edge_source=edge_source,
            edge_fraction=np.ones(len(edge_target)), edge_lag=np.zeros(len(edge_target), np.int64),
            queue_count=np.bincount(channel, minlength=len(channels)).astype(np.int64), queue_kernel=by_channel,
            queue_depth=max(constants.queue_depth, 0))

    def timed(self, program: Program, simulated: Simulated, rank: int) -> ExecutionGraph:
        """Return the rank's graph with the simulated times; ``rank`` is its position in the program."""
        item = int(program.thread_ptr[rank])
        end = simulated.item_end[item:item + len(self.at_item)]
        start = simulated.item_start[item:item + len(self.at_item)]
        low, high = int(program.kernel_ptr[rank]), int(program.kernel_ptr[rank + 1])
        kernel_start, kernel_end = simulated.kernel_start[low:high], simulated.kernel_end[low:high]
        named = replace(self.graph, strings=list(self.graph.strings))
        code = string_coder(named)
        ops = self.graph.ops.take(np.arange(len(self.graph.ops)))
        first = np.searchsorted(self.op_of_call, np.arange(len(ops)), side="left")
        past = np.searchsorted(self.op_of_call, np.arange(len(ops)), side="right")
        # Item 0 is the step's begin, so that the item before call n is item n.
        ops.start_ns[:] = end[first] + self.begins - self.at_item[first]
        ops.duration_ns[:] = end[past] + self.ends - self.at_item[past] - ops.start_ns
        launches = LaunchTable.empty(len(self.calls))
        launches.name[:] = [code(call.name) for call in self.calls]
        launches.kind[:] = [call.kind for call in self.calls]
        launches.op[:], launches.thread[:], launches.step[:] = self.op_of_call, self.thread, ops.step[self.op_of_call]
        launches.start_ns[:], launches.duration_ns[:] = start[1:-1], (end - start)[1:-1]
        launches.correlation[:] = np.arange(len(self.calls))
        steps = StepTable.empty(1)
        steps.name[:], steps.thread[:] = code(STEP), self.thread
        steps.start_ns[:], steps.duration_ns[:] = end[0], end[-1] - end[0]
        gaps = GapTable.empty(1 if self.fetch else 0)
        gaps.thread[:], gaps.start_ns[:], gaps.duration_ns[:] = self.thread, end[0], self.fetch
        gaps.kind[:], gaps.step[:] = GapKind.DATA_LOADING, 0
        collectives = self.graph.collectives.take(np.arange(len(self.graph.collectives)))
        row = np.array([work.collective for work in self.works], np.int64)
        collectives.kernel[row[row >= 0]] = np.flatnonzero(row >= 0)
        window = max(int(end[-1]), int(kernel_end.max(initial=0)))
        # A step traced by shapes may name a device that is a CPU; recordings write "cpu".
        device = CPU if self.graph.computes_on_host else self.graph.meta.device
        return replace(
            self.graph, ops=ops, launches=launches, kernels=self._kernels(ops.step, kernel_start, kernel_end, code),
            collectives=collectives, steps=steps, gaps=gaps, syncs=self._syncs(launches), strings=named.strings,
            meta=replace(self.graph.meta, era="", device=device, window_ns=window))

    def report(self) -> RankReport:
        """Return the report on the rank's launches: its constants; nothing else was inferred."""
        depth = self.constants.queue_depth
        return RankReport(
            constants=self.constants, edges={}, hand_overs=0, blocked_calls=0, blocked_launches=0, queue_depth=depth,
            queue_source="default" if depth else "unbounded", queue_shared=False, queue_contradicted=0,
            unexplained_ns=0, window_ns=0)

    def _items(self) -> HostItems:
        count = len(self.calls)
        kind = np.full(count + 2, ItemKind.CALL, np.int8)
        kind[0], kind[-1] = ItemKind.STEP_BEGIN, ItemKind.STEP_END
        row = np.concatenate([[0], np.arange(count), [0]]).astype(np.int32)
        none = np.zeros(count + 2, np.int64)
        return HostItems(
            thread=np.full(count + 2, self.thread, np.int32), kind=kind, row=row, start=none, end=none,
            work=np.diff(self.at_item, prepend=0), external=np.full(count + 2, NEVER, np.int64), after=[],
            item_of_call=np.arange(1, count + 1), threads=[self.thread], thread_start=np.zeros(1, np.int64),
            hand_overs=0)

    def _durations(self) -> Int64:
        return whole_ns(np.maximum([work.ns for work in self.works], 0.0))

    def _neighbours(self) -> tuple[Int64, Int64]:
        """Return the kernel before each kernel on its stream (``NONE`` for the first), and the stream's last kernel."""
        order = np.argsort(self.stream, kind="stable")
        same = self.stream[order][1:] == self.stream[order][:-1]
        previous = np.full(len(order), NONE, np.int64)
        previous[order[1:][same]] = order[:-1][same]
        ends = np.searchsorted(self.stream[order], self.stream, side="right") - 1
        return previous, order[ends]

    def _waits(self) -> tuple[Int64, Int64]:
        """Return (call, kernel) of every wait: a copy in its call, or the last work of the streams a call waits for."""
        found: list[tuple[int, int]] = []
        last: dict[int, int] = {}
        kernel = 0
        for number, call in enumerate(self.calls):
            for work in call.kernels:
                if work.in_call:
                    found.append((number, kernel))
                last[work.stream] = kernel
                kernel += 1
            if call.kind == LaunchKind.BLOCKING_SYNC:
                found += [(number, row) for stream, row in last.items() if call.stream in (NONE, stream)]
        pairs = np.array(found, np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def _submits(self, channel: Int64) -> tuple[Int64, Int64]:
        """Return the launch-queue channel that each call submits to, and the number of its entries before the call."""
        call_channel, queued = (np.full(len(self.calls), NONE, np.int64) for _ in range(2))
        callers, first = np.unique(self.call_of_work, return_index=True)
        call_channel[callers] = channel[first]
        for number in np.unique(channel).tolist():
            mine = np.flatnonzero(call_channel == number)
            queued[mine] = np.searchsorted(self.call_of_work[channel == number], mine, side="left")
        return call_channel, queued

    def _meeting_compute(self) -> tuple[Int64, Int64]:
        """Return rows (target, source): the target waits for the source. A collective waits for the compute work
        launched before it; the first compute work of the operation that needs its result waits for the collective."""
        compute = np.flatnonzero(self.kind == KernelKind.COMPUTE)
        call, op = self.call_of_work[compute], self.op_of_call[self.call_of_work[compute]]
        target, source = [], []
        for kernel, work in enumerate(self.works):
            if work.collective < 0:
                continue
            own = int(self.call_of_work[kernel])
            before = int(np.searchsorted(call, own)) - 1
            if before >= 0:
                target.append(kernel)
                source.append(int(compute[before]))
            needs = int(self.graph.collectives.wait_op[work.collective])
            after = int(np.searchsorted(op, needs)) if needs >= 0 else len(compute)
            if after < len(compute) and call[after] > own:
                target.append(int(compute[after]))
                source.append(kernel)
        return np.array(target, np.int64), np.array(source, np.int64)

    def _kernels(self, step: Int64, start: Int64, end: Int64, code: CodeOf) -> KernelTable:
        kernels = KernelTable.empty(len(self.works))
        op = self.op_of_call[self.call_of_work]
        kernels.name[:] = [code(work.name) for work in self.works]
        kernels.kind[:], kernels.stream[:], kernels.device[:] = self.kind, self.stream, 0
        kernels.launch[:], kernels.op[:], kernels.correlation[:] = self.call_of_work, op, self.call_of_work
        kernels.bytes[:] = [work.moved for work in self.works]
        kernels.start_ns[:], kernels.duration_ns[:] = start, end - start
        kernels.step[:] = step[op]
        return kernels

    def _syncs(self, launches: LaunchTable) -> SyncTable:
        """Return the stream of each call that waits for one stream."""
        rows = [row for row, call in enumerate(self.calls) if call.stream != NONE]
        table = SyncTable.empty(len(rows))
        table.kind[:] = SyncKind.STREAM_SYNC
        table.launch[:], table.correlation[:] = rows, rows
        table.stream[:] = [self.calls[row].stream for row in rows]
        table.start_ns[:], table.duration_ns[:] = launches.start_ns[rows], launches.duration_ns[rows]
        return table
