"""A rank's timeline made of what each operation costs the host and the device: a recording of a step that never ran.

Host operations follow one another, their calls inside them; kernels start as soon as their call has launched them and
their stream is free; a call that waits returns when its stream is done. Whatever else decides (ranks, queues, several
steps one after the other) is the simulator's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from graph_predictor.simulation.program import whole_ns
from graph_predictor.simulation.rank_view import STAGED_BYTES
from kernel_models.launch_constants import GAP_DEFAULT_NS, KINDS, RETURN_DEFAULT_NS, LaunchConstants
from tracer.arrays import Float64, Int64
from tracer.graph import (
    NONE,
    ExecutionGraph,
    KernelKind,
    KernelTable,
    LaunchKind,
    LaunchTable,
    StepTable,
    SyncKind,
    SyncTable,
)

COMPUTE_STREAM, COMMUNICATION_STREAM = 7, 20
STEP = "traced step"


@dataclass(slots=True)
class Call:
    """A runtime call of an operation: what it is, its own cost (ns), and the device work it starts."""

    name: str
    kind: LaunchKind
    ns: float
    kernels: list[Work] = field(default_factory=list)
    stream: int = NONE
    """Of a wait: the stream it waits for; ``NONE``: all."""


@dataclass(slots=True)
class Work:
    """A piece of device work: what, where, how long (ns), how much it moves, and how sure that is.

    ``collective`` is a row of the rank's collectives (``NONE``: none); ``source`` a ``Source``; ``low`` and ``high``
    the logs of the 80% interval's ends over the time.
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
    """Whether the call waits for it (a copy to pageable memory)."""

    @property
    def staged(self) -> bool:
        """Whether the call feeds it piece by piece (a large copy from pageable memory, see ``rank_view``)."""
        return (self.kind == KernelKind.MEMCPY and not self.in_call and "Pageable ->" in self.name
                and self.moved > STAGED_BYTES)


@dataclass(slots=True)
class OpTimes:
    """What one rank's operations cost: host time before each and in each, calls apart (ns, by row of ``ops``), and the
    calls of those that have any; host time after the last one."""

    before: Float64
    inside: Float64
    calls: dict[int, list[Call]]
    tail: float = 0.0


@dataclass(slots=True)
class LaidOut:
    """A rank's graph with times, and what is known of each of its kernels, in their order."""

    graph: ExecutionGraph
    ns: Int64
    source: Int64
    low: Float64
    high: Float64


def plain_constants(latency_ns: int) -> LaunchConstants:
    """Launch constants of a device no launch was recorded on."""
    return LaunchConstants(np.full(KINDS, latency_ns, np.int64), np.full(KINDS, latency_ns, np.int64),
                           np.full((KINDS, KINDS, 2), GAP_DEFAULT_NS, np.int64))


def laid_out(graph: ExecutionGraph, times: OpTimes, constants: LaunchConstants) -> LaidOut:
    """The timeline of a shape-only graph."""
    clock = _Clock(constants)
    start, end = _host(graph, times, clock)
    strings = list(graph.strings)
    codes: dict[str, int] = {}

    def code(text: str) -> int:
        if text not in codes:
            codes[text] = len(strings)
            strings.append(text)
        return codes[text]

    ops = graph.ops
    launches = _launches(graph, clock, code)
    begin = np.array(clock.begins, np.int64)
    works = clock.works
    ns = np.array([max(round(w.ns), 0) for w in works], np.int64)
    order = np.argsort(begin, kind="stable")
    kernels = KernelTable.empty(len(works))
    call = np.array(clock.call_of_work, np.int64)[order]
    op = np.array(clock.op_of_call, np.int64)[call] if len(works) else np.zeros(0, np.int64)
    kernels.name[:] = np.array([code(w.name) for w in works], np.int64)[order]
    kernels.kind[:] = np.array([w.kind for w in works], np.int64)[order]
    kernels.launch[:], kernels.op[:], kernels.device[:] = call, op, 0
    kernels.stream[:] = np.array([w.stream for w in works], np.int64)[order]
    kernels.bytes[:] = np.array([w.moved for w in works], np.int64)[order]
    kernels.start_ns[:], kernels.duration_ns[:] = begin[order], ns[order]
    kernels.correlation[:], kernels.step[:] = call, ops.step[op]
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    collectives = graph.collectives.take(np.arange(len(graph.collectives)))
    row = np.array([w.collective for w in works], np.int64)
    collectives.kernel[row[row >= 0]] = place[np.flatnonzero(row >= 0)]
    steps = StepTable.empty(1)
    steps.name[:], steps.start_ns[:], steps.duration_ns[:] = code(STEP), 0, clock.now + 1
    steps.thread[:] = ops.thread[0] if len(ops) else 0
    timed = ops.take(np.arange(len(ops)))
    timed.start_ns[:], timed.duration_ns[:] = start, end - start
    meta = replace(graph.meta, era="", window_ns=max(clock.now + 1, int((begin + ns).max(initial=0))))
    made = replace(graph, strings=strings, ops=timed, launches=launches, kernels=kernels, collectives=collectives,
                   steps=steps, syncs=_syncs(clock), meta=meta)
    source = np.array([w.source for w in works], np.int64)
    low, high = np.array([w.low for w in works], np.float64), np.array([w.high for w in works], np.float64)
    return LaidOut(made, ns[order], source[order], low[order], high[order])


class _Clock:
    """The host's time and when each stream is free, and the calls and works met so far."""

    def __init__(self, constants: LaunchConstants) -> None:
        self.constants, self.now = constants, 0
        self.free: dict[int, tuple[int, int]] = {}
        self.calls: list[Call] = []
        self.op_of_call: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.works: list[Work] = []
        self.begins: list[int] = []
        self.call_of_work: list[int] = []
        self.waited: list[int] = []

    def call(self, op: int, call: Call) -> None:
        """Make a call: its kernels are queued, and it waits for what it waits for."""
        begin = self.now
        self.now += max(round(call.ns), 0)
        for work in call.kernels:
            ended = self._queue(len(self.calls), work, begin)
            if work.in_call:
                self.now = max(self.now, ended + self.constants.returns.get(call.name, RETURN_DEFAULT_NS))
        stream = NONE
        if call.kind == LaunchKind.BLOCKING_SYNC:
            stream = call.stream
            ends = [end for number, (end, _) in self.free.items() if stream in (NONE, number)]
            if ends and max(ends) > begin:
                self.now = max(self.now, max(ends) + self.constants.returns.get(call.name, RETURN_DEFAULT_NS))
        self.calls.append(call)
        self.op_of_call.append(op)
        self.starts.append(begin)
        self.ends.append(self.now)
        self.waited.append(stream)

    def _queue(self, call: int, work: Work, begin: int) -> int:
        kind = int(work.kind)
        start = begin + int(self.constants.latency_in_call[kind]) if work.in_call else (
            self.now + int(self.constants.latency[kind]))
        if work.staged:
            start = max(begin, self.now + self.constants.staged_tail - max(round(work.ns), 0))
        if work.stream in self.free:
            end, before = self.free[work.stream]
            start = max(start, end + int(self.constants.gap[before, kind, 0]))
        self.works.append(work)
        self.begins.append(start)
        self.call_of_work.append(call)
        ended = start + max(round(work.ns), 0)
        self.free[work.stream] = ended, kind
        return ended


def _host(graph: ExecutionGraph, times: OpTimes, clock: _Clock) -> tuple[Int64, Int64]:
    """Run the host through all operations; their starts and ends."""
    count = len(graph.ops)
    start, end = np.empty(count, np.int64), np.empty(count, np.int64)
    before, inside = whole_ns(times.before).tolist(), whole_ns(times.inside).tolist()
    for op in range(count):
        clock.now += before[op]
        start[op] = clock.now
        calls = times.calls.get(op)
        if calls:
            first = inside[op] // 2
            clock.now += first
            for call in calls:
                clock.call(op, call)
            clock.now += inside[op] - first
        else:
            clock.now += inside[op]
        end[op] = clock.now
    clock.now += round(times.tail)
    return start, end


def _launches(graph: ExecutionGraph, clock: _Clock, code: object) -> LaunchTable:
    count = len(clock.calls)
    table = LaunchTable.empty(count)
    ops = graph.ops
    op = np.array(clock.op_of_call, np.int64)
    table.name[:] = [code(call.name) for call in clock.calls]  # type: ignore[operator]
    table.kind[:] = [call.kind for call in clock.calls]
    table.op[:], table.thread[:], table.step[:] = op, ops.thread[op], ops.step[op]
    table.start_ns[:] = clock.starts
    table.duration_ns[:] = np.array(clock.ends, np.int64) - np.array(clock.starts, np.int64)
    table.correlation[:] = np.arange(count)
    return table


def _syncs(clock: _Clock) -> SyncTable:
    """What each wait for one stream waits for."""
    rows = [i for i, stream in enumerate(clock.waited) if stream != NONE]
    table = SyncTable.empty(len(rows))
    table.kind[:] = SyncKind.STREAM_SYNC
    table.launch[:], table.correlation[:] = rows, rows
    table.stream[:] = [clock.waited[i] for i in rows]
    table.start_ns[:] = [clock.starts[i] for i in rows]
    table.duration_ns[:] = [clock.ends[i] - clock.starts[i] for i in rows]
    return table
