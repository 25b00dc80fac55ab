"""Host time of one recording: overheads by kind, latencies and gaps of launches, and the cost of recording an event.

A thread's host time is cut into the overheads of Lin et al. (2022), T1 to T5.

::

    ops        |------ aten::linear ------|           |-- aten::view --|
    calls          |launch|   |launch|
    segments    T2  T4     T5  T4      T3      T1              T5

T1 lies between two top-level operations, T2 between an operation's start and its first launch, T3 between its last
launch and its end. T4 is a call itself. T5 lies between two launches of an operation, or is a whole operation without
launches. Calls that launch nothing (attribute queries, event records, allocations) are T4 too, under their own names.
Operations nested in others belong to the outermost one. A thread's waiting time is no overhead, since it depends on
what the thread waits for. The caller passes such intervals in, and they are excluded.

Launch constants of one trace are a handful of medians and means that replace per-event residuals.

Every constant is estimated from the events whose time has no other cause:

* *launch latency* of a kernel kind: the median time from the end of its launch call to its start, on a stream that had
  been idle before the call began. Samples above 60 µs are waits, not latency.
* *gap* between two queued kernels of one stream, by the kinds of both and by whether a CUDA graph launched them. It is
  a mean, since gaps add up along a stream. Samples above 20 µs are waits.

Units are nanoseconds. A constant with fewer than three samples falls back to the pool of all kinds. An empty pool takes
the defaults below, which are typical of the traces the project was developed against (V100 to B200). Even one launch of
the recording is better evidence than they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tracer.arrays import Bool, Float64, Int8, Int64
from tracer.columns import covered
from tracer.graph import LAUNCHING, NONE, ExecutionGraph, GapKind, KernelKind, OpKind


class Overhead(IntEnum):
    """Kinds of host time."""

    BETWEEN_OPS = 0
    """T1: Python, autograd's bookkeeping, everything outside any operation and call."""
    BEFORE_CALL = 1
    """T2, from an operation's start to its first launch."""
    AFTER_CALL = 2
    """T3, from an operation's last launch to its end."""
    CALL = 3
    """T4: a runtime or driver call, without the time in which it blocked."""
    BETWEEN_CALLS = 4
    """T5, between two launches of one operation."""
    NO_CALL = 5
    """T5, a whole operation without launches."""
    DATA = 6
    """Data loading outside any operation."""

    @property
    def label(self) -> str:
        """Short name with the symbol of Lin et al."""
        return _LABELS[self]


_LABELS = {
    Overhead.BETWEEN_OPS: "T1 between operations", Overhead.BEFORE_CALL: "T2 before the first launch",
    Overhead.AFTER_CALL: "T3 after the last launch", Overhead.CALL: "T4 calls",
    Overhead.BETWEEN_CALLS: "T5 between launches", Overhead.NO_CALL: "T5 operations without a launch",
    Overhead.DATA: "data loading",
}


@dataclass(frozen=True, slots=True)
class HostIntervals:
    """Intervals of threads, ns in the graph's window, ``end_ns`` exclusive; they may overlap, or be empty."""

    thread: npt.NDArray[np.integer]
    start_ns: Int64
    end_ns: Int64

    def within(self, thread: Int64, start_ns: Int64, end_ns: Int64) -> Int64:
        """Return how much of each given interval the intervals of ``self`` cover, ns; overlaps count once."""
        kept = self.end_ns > self.start_ns
        found = np.zeros(len(thread), np.int64)
        if not kept.any() or not len(thread):
            return found
        ends = [self.start_ns[kept], self.end_ns[kept], start_ns, end_ns]
        low = min(int(each.min()) for each in ends)
        span = max(int(each.max()) for each in ends) - low + 1
        own, asked = self.thread[kept].astype(np.int64) * span - low, thread * span - low  # threads one after another
        order = np.argsort(start_ns + asked, kind="stable")
        found[order] = covered((ends[0] + own, ends[1] + own), (start_ns + asked)[order], (end_ns + asked)[order])
        return found


@dataclass(frozen=True, slots=True)
class Segments:
    """Pieces of host time, sorted by (thread, start). Columns of equal length.

    Attributes:
        kind: An ``Overhead``.
        op: Row of the top-level operation around it; for T1 the row of the next operation; -1 where there is none.
        before: For T1 the top-level operation before it, -1 elsewhere.
        call: Row of ``graph.launches`` for T4, else -1.
        thread, start_ns: Thread and start, ns.
        duration_ns: Duration without waiting, ns.
        events: Operations and calls recorded in it; each cost the profiler time.
        step: Row of ``graph.steps``, -1 outside every step.
    """

    kind: Int8
    op: Int64
    before: Int64
    call: Int64
    thread: Int64
    start_ns: Int64
    duration_ns: Int64
    events: Int64
    step: Int64

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, rows: Bool | Int64) -> Segments:
        """Return the segments of the chosen rows."""
        return Segments(*(getattr(self, f.name)[rows] for f in fields(self)))


def host_segments(graph: ExecutionGraph, excluded: HostIntervals | None = None) -> Segments:
    """Cut the host threads of a graph into segments.

    Args:
        graph: a recorded window.
        excluded: time that is no overhead: waiting, and on a CPU the computation itself.
    """
    ops, calls = graph.ops, graph.launches
    op_end, call_end = ops.start_ns + ops.duration_ns, calls.start_ns + calls.duration_ns
    operation = ops.kind == OpKind.OPERATION
    top_ops = _top(ops.thread[operation].astype(np.int64), ops.start_ns[operation], op_end[operation],
                   np.flatnonzero(operation))
    top_calls = np.flatnonzero(calls.parent == NONE)
    threads = np.intersect1d(ops.thread[operation], ops.thread[operation])
    starts_work = launching(graph)
    parts = [_thread_segments(graph, int(t), top_ops[ops.thread[top_ops] == t], top_calls[calls.thread[top_calls] == t],
                              starts_work, op_end, call_end) for t in threads]
    columns = [np.concatenate([p[i] for p in parts]) if parts else np.zeros(0, np.int64) for i in range(7)]
    kind, op, before, call, thread, start, end = columns
    kind = _data_loading(graph, kind, thread, start, end)
    duration = end - start
    if excluded is not None:
        duration = duration - excluded.within(thread, start, end)
    profiled = HostIntervals(graph.overheads.thread, graph.overheads.start_ns,
                             graph.overheads.start_ns + graph.overheads.duration_ns)
    duration = np.maximum(duration - profiled.within(thread, start, end), 0)
    return Segments(kind.astype(np.int8), op, before, call, thread, start, duration,
                    _events(graph, thread, start, end), _step_of(graph, start))


def _top(thread: Int64, start: Int64, end: Int64, rows: Int64) -> Int64:
    """Return the rows that are not inside another row of the same thread (sorted by thread, start, -duration)."""
    if not len(rows):
        return rows
    span = int(end.max()) + 1
    reached = np.maximum.accumulate(end + thread * span)
    outer = np.ones(len(rows), np.bool_)
    outer[1:] = start[1:] + thread[1:] * span >= reached[:-1]
    return rows[outer]


def _thread_segments(graph: ExecutionGraph, thread: int, top: Int64, calls: Int64, starts_work: Bool,
                     op_end: Int64, call_end: Int64) -> tuple[Int64, ...]:
    """Return (kind, op, before, call, thread, start, end) of one thread's segments."""
    # Cut at every start and end of an operation, a call or a step.
    op_start, call_start = graph.ops.start_ns[top], graph.launches.start_ns[calls]
    steps = graph.steps
    own = steps.thread == thread
    borders = np.unique(np.concatenate([
        op_start, op_end[top], call_start, call_end[calls], steps.start_ns[own],
        steps.start_ns[own] + steps.duration_ns[own]]))
    if len(borders) < 2:
        return tuple(np.zeros(0, np.int64) for _ in range(7))
    start, end = borders[:-1], borders[1:]
    op = _containing(start, op_start, op_end[top])
    call = _containing(start, call_start, call_end[calls])
    # Within an operation: is there a launch before the segment, and one after it?
    launch = call_start[starts_work[calls]]
    last, following_launch = (np.searchsorted(launch, start, side=side) for side in ("right", "left"))
    begins, finishes = _at(op_start, op), _at(op_end[top], op)
    has_before = (last > 0) & (_at(launch, last - 1) >= begins)
    has_after = (following_launch < len(launch)) & (
        _at(launch, np.minimum(following_launch, len(launch) - 1)) < finishes)
    kind = np.full(len(start), Overhead.BETWEEN_OPS, np.int64)
    inside = op >= 0
    kind[inside & ~has_before & ~has_after] = Overhead.NO_CALL
    kind[inside & ~has_before & has_after] = Overhead.BEFORE_CALL
    kind[inside & has_before & ~has_after] = Overhead.AFTER_CALL
    kind[inside & has_before & has_after] = Overhead.BETWEEN_CALLS
    kind[call >= 0] = Overhead.CALL
    following = np.searchsorted(op_start, start, side="left")
    row = np.where(inside, _at(top, op), NONE)
    gap = kind == Overhead.BETWEEN_OPS
    row[gap] = np.where(following < len(top), _at(top, np.minimum(following, len(top) - 1)), NONE)[gap]
    before = np.where(gap & (following > 0), _at(top, following - 1), NONE)
    return (kind, row, before, np.where(call >= 0, _at(calls, call), NONE),
            np.full(len(start), thread, np.int64), start, end)


def _at(values: Int64, place: Int64) -> Int64:
    """Return ``values[place]``, or zeros if ``values`` is empty."""
    return values[np.maximum(place, 0)].astype(np.int64) if len(values) else np.zeros(len(place), np.int64)


def _containing(time: Int64, start: Int64, end: Int64) -> Int64:
    """Return the index of the interval [start, end) that contains each time, or -1; starts are sorted."""
    place = np.searchsorted(start, time, side="right") - 1
    if not len(start):
        return np.full(len(time), NONE, np.int64)
    return np.where((place >= 0) & (time < end[np.maximum(place, 0)]), place, NONE)


def _data_loading(graph: ExecutionGraph, kind: Int64, thread: Int64, start: Int64, end: Int64) -> Int64:
    """Return the kinds, with ``DATA`` for T1 segments that the reader found to be data loading."""
    gaps = graph.gaps
    loading = gaps.kind == GapKind.DATA_LOADING
    data = HostIntervals(gaps.thread[loading], gaps.start_ns[loading],
                         (gaps.start_ns + gaps.duration_ns)[loading])
    mostly = data.within(thread, start, end) * 2 > end - start
    return np.where((kind == Overhead.BETWEEN_OPS) & mostly, Overhead.DATA, kind)


def _events(graph: ExecutionGraph, thread: Int64, start: Int64, end: Int64) -> Int64:
    """Return the number of operations and calls that begin in each segment."""
    begins = np.concatenate([graph.ops.start_ns, graph.launches.start_ns])
    on = np.concatenate([graph.ops.thread, graph.launches.thread]).astype(np.int64)
    if not len(begins) or not len(start):
        return np.zeros(len(start), np.int64)
    span = max(int(begins.max()), int(end.max())) + 1
    place = np.sort(begins + on * span)
    return np.searchsorted(place, end + thread * span) - np.searchsorted(place, start + thread * span)


def _step_of(graph: ExecutionGraph, time: Int64) -> Int64:
    """Return the step that contains each time; host time of other threads counts to the step that runs then."""
    order = np.argsort(graph.steps.start_ns, kind="stable")
    start = graph.steps.start_ns[order]
    place = _containing(time, start, start + graph.steps.duration_ns[order])
    return np.where(place >= 0, _at(order.astype(np.int64), place), NONE)


def launching(graph: ExecutionGraph) -> Bool:
    """Return whether each call starts device work (kernels, copies, sets, CUDA graphs)."""
    return np.isin(graph.launches.kind, LAUNCHING)


LATENCY_CEILING_NS = 60_000
"""Longest latency from the start of the call: a kernel that begins later waited for something else. Set."""
GAP_CEILING_NS = 20_000
"""Longest gap of queued kernels; a longer one is a wait. Set."""
IDLE_MARGIN_NS = 5_000
"""A stream is idle for a launch when its last work ended at least this long before the call began. Set."""
QUEUED_MARGIN_NS = 10_000
"""A kernel was certainly queued if its predecessor ended at least this long after the kernel's launch returned."""
LATENCY_DEFAULT_NS = 2_000
GAP_DEFAULT_NS = 1_200
COPY_IN_CALL_DEFAULT_NS = 15_000
RETURN_DEFAULT_NS = 6_000
STAGED_TAIL_DEFAULT_NS = 100_000
"""Defaults: typical of the traces named in the module's text (V100 to B200)."""
FEW = 3
"""Fewest samples for a constant of its own. Set: the median of three is not an extreme."""
KINDS = len(KernelKind)


@dataclass(slots=True)
class LaunchConstants:
    """Constants of one rank's trace, nanoseconds.

    ``latency[kind]`` counts from the call's end, ``latency_in_call[kind]`` from the start of a call that waits for its
    own work; ``gap[before, kind, in_graph]`` lies between kernels of two kinds. ``returns`` maps a call's name to the
    lag between the end of the awaited work and the call's return; ``queue_return`` is this lag for a full launch queue.
    ``base_cost`` maps a call's name to its unblocked cost.
    """

    latency: Int64
    latency_in_call: Int64
    gap: Int64
    returns: dict[str, int] = field(default_factory=dict)
    base_cost: dict[str, int] = field(default_factory=dict)
    staged_tail: int = STAGED_TAIL_DEFAULT_NS
    """Time from the return of a call that stages a large pageable copy to the copy's end."""
    queue_return: int = RETURN_DEFAULT_NS
    queue_depth: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    """Number of samples of each constant, by its name."""


@dataclass(frozen=True, slots=True)
class LaunchSamples:
    """Samples of launch latency and gaps: columns of equal length, one row per kernel with a recorded launch.

    ``previous_end`` and ``previous_kind`` describe the kernel before it on its stream (very small end, kind -1 when
    there is none). ``in_call`` marks copies that their own call waits for, ``staged`` large pageable copies that their
    call feeds. Times in ns.
    """

    kind: Int8
    start: Int64
    call_start: Int64
    call_end: Int64
    previous_end: Int64
    previous_kind: Int8
    in_graph: Bool
    in_call: Bool
    staged: Bool
    end: Int64


def fit_launch_constants(samples: LaunchSamples) -> LaunchConstants:
    """Estimate latencies and gaps (see the module's text for which events count)."""
    s = samples
    counts: dict[str, int] = {}
    soon = s.start - s.call_start < LATENCY_CEILING_NS
    idle = ~s.in_graph & (s.previous_end + IDLE_MARGIN_NS <= s.call_start) & soon
    outside, inside = idle & ~s.in_call & ~s.staged, idle & s.in_call
    latency = _by_kind(s.start - s.call_end, s.kind, outside, LATENCY_DEFAULT_NS, "latency", counts)
    in_call = _by_kind(s.start - s.call_start, s.kind, inside, COPY_IN_CALL_DEFAULT_NS, "latency_in_call", counts)

    gap_value = s.start - s.previous_end
    queued = (s.previous_kind >= 0) & (gap_value < GAP_CEILING_NS) & (
        s.in_graph | (s.previous_end > s.call_end + QUEUED_MARGIN_NS))
    pooled = round(float(gap_value[queued].mean())) if queued.any() else GAP_DEFAULT_NS
    gap = np.full((KINDS, KINDS, 2), pooled, np.int64)
    for before in range(KINDS):
        for kind in range(KINDS):
            for in_graph in range(2):
                rows = queued & (s.previous_kind == before) & (s.kind == kind) & (s.in_graph == bool(in_graph))
                n = int(rows.sum())
                if n >= FEW:
                    gap[before, kind, in_graph] = round(float(gap_value[rows].mean()))
                    counts[f"gap/{KernelKind(before).name}/{KernelKind(kind).name}/{'graph' if in_graph else ''}"] = n
    tail = STAGED_TAIL_DEFAULT_NS
    if s.staged.any():
        tail = int(np.median((s.end - s.call_end)[s.staged]))
        counts["staged_tail"] = int(s.staged.sum())
    return LaunchConstants(latency=latency, latency_in_call=in_call, gap=gap, staged_tail=tail, samples=counts)


def _by_kind(
    value: Int64, kind: Int8, rows: Bool, default: int, name: str,
    counts: dict[str, int],
) -> Int64:
    """Return the median per kernel kind, falling back to the pool of all kinds and then to ``default``."""
    pooled = int(np.median(value[rows])) if rows.any() else default
    result = np.full(KINDS, pooled, np.int64)
    for code in range(KINDS):
        chosen = rows & (kind == code)
        n = int(chosen.sum())
        if n >= FEW:
            result[code] = int(np.median(value[chosen]))
            counts[f"{name}/{KernelKind(code).name}"] = n
    return result


LEAST_WRAPPERS = 8
"""Fewest operations made of others that show an event's cost. Chosen so that their median is reliable."""
SPREAD = 0.2
"""Standard deviation of the log of the true cost over that median: 0.16 of 19 programs, 0.20 of eight others."""
USUAL_NS, USUAL_SPREAD_NS = 1_000.0, 2_000.0
"""Cost of an event in a recording with fewer than ``LEAST_WRAPPERS``, and its standard deviation. The median of those
programs is 0.9 µs, on one CPU; half of 72 captures on another, busy one lie between 1.8 and 5.6 µs."""
OBSERVED_NS, OBSERVED_SPREAD_NS = 20_000.0, 10_000.0
"""Added cost of an event, and its standard deviation, where an execution trace is recorded in the same window."""
PYTHON_EVENTS = 0.3
"""Cost of recording a call of a Python function, in events: 0.16 µs, against 0.4 to 0.7 µs of an operation's, in loops
that do nothing else (on that CPU)."""
CALL_EVENTS = 1.5
"""Cost of recording a call of the device's runtime, in events: its own record, and that of the work it starts. Set, not
measured. Launches of ten published traces then take 2.1 µs in the median."""


@dataclass(frozen=True, slots=True)
class EventCost:
    """The profiler's cost of recording one event, ns, and its standard deviation."""

    ns: float
    spread_ns: float


def event_cost(graph: ExecutionGraph) -> EventCost:
    """Return the profiler's cost of recording one event on a rank's host, without regard to unprofiled steps."""
    own, wraps = _own_ns(graph)
    known = int(wraps.sum()) >= LEAST_WRAPPERS
    ns = float(np.median(own[wraps])) if known else USUAL_NS
    found = EventCost(ns, SPREAD * ns) if known else EventCost(USUAL_NS, USUAL_SPREAD_NS)
    if graph.meta.profiler_flags.get("execution_trace"):
        return EventCost(found.ns + OBSERVED_NS, float(np.hypot(found.spread_ns, OBSERVED_SPREAD_NS)))
    return found


def _own_ns(graph: ExecutionGraph) -> tuple[Float64, np.ndarray]:
    """Return each operation's own time, ns, and which of PyTorch's operations are made of others."""
    ops = graph.ops
    inside = ops.parent != NONE
    parts = np.bincount(ops.parent[inside], weights=ops.duration_ns[inside], minlength=len(ops))
    named = np.array([text.startswith("aten::") for text in graph.strings], np.bool_)
    wraps = np.zeros(len(ops), np.bool_)
    wraps[ops.parent[inside]] = True
    # An operation that launches work does more than call its parts.
    launches = graph.launches.op[graph.launches.op != NONE]
    wraps[launches] = False
    own: Float64 = ops.duration_ns.astype(np.float64) - parts
    return own, wraps & named[ops.name]
