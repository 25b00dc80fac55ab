"""The critical path of a simulated step: which work its time consists of, back from the step's end.

Each nanosecond between a step's simulated begin and end is in exactly one segment, so the segments add up to the step
time. The path stays in the step's own rank: where a collective waited for a later rank, that is a segment of its own;
unless it is asked to go on ``across`` ranks, with what held the last one up. Where a receive waited for another rank's
send, it goes on with that rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from graph_predictor.simulation.causes import EndCause, KernelCause, StartCause
from graph_predictor.simulation.chain_loop import chain
from graph_predictor.simulation.engine import Simulated
from graph_predictor.simulation.program import Anchor, ItemKind, Program
from tracer.arrays import Int8, Int64
from tracer.graph import ExecutionGraph, KernelKind

# Plain numbers: the walk compares them a hundred thousand times, and members of an enumeration are slow to look up.
_ANCHOR_CALL_START, _ANCHOR_STAGED = int(Anchor.CALL_START), int(Anchor.STAGED)
_END_EXTERNAL, _END_KERNEL, _END_QUEUE = int(EndCause.EXTERNAL), int(EndCause.KERNEL), int(EndCause.QUEUE)
_KERNEL_EDGE, _KERNEL_LAUNCH, _KERNEL_STREAM = int(KernelCause.EDGE), int(KernelCause.LAUNCH), int(KernelCause.STREAM)
_START_OTHER_THREAD = int(StartCause.OTHER_THREAD)


class Bound(IntEnum):
    """The bound of a microsecond of the step: what it was spent on."""

    HOST = 0
    LAUNCH = 1
    COMPUTE = 2
    MEMORY_COPY = 3
    EXPOSED_COMMUNICATION = 4
    WAITING_FOR_RANK = 5
    DATA_LOADING = 6
    SYNC = 7

    @property
    def label(self) -> str:
        """The name people read."""
        return self.name.lower().replace("_", " ")


@dataclass(slots=True)
class Path:
    """Segments in time order (ns of the simulated clock). ``item`` or ``kernel`` is what ran (the other is -1)."""

    start_ns: Int64
    end_ns: Int64
    bound: Int8
    item: Int64
    kernel: Int64
    is_work: np.ndarray
    """True where the segment is host work before ``item`` rather than ``item`` itself."""

    @property
    def total_ns(self) -> int:
        """Sum of the segments, equal to the step's simulated time."""
        return int((self.end_ns - self.start_ns).sum())

    def by_bound(self) -> dict[str, int]:
        """Nanoseconds by bound; every bound is present."""
        sums = np.bincount(self.bound, weights=(self.end_ns - self.start_ns).astype(np.float64), minlength=len(Bound))
        return {b.label: int(sums[b]) for b in Bound}


class Causes:
    """The causes of a simulated program's times, looked up once for any number of walks.

    Args:
        program: What was simulated.
        simulated: Its times.
        kinds: ``KernelKind`` of the program's kernels, an array a rank.
    """

    def __init__(self, program: Program, simulated: Simulated, kinds: list[Int8]) -> None:
        self.program, self.simulated = program, simulated
        self.first_item = set(program.thread_ptr[:-1].tolist())
        self.last_special = _last_special(program, simulated)
        self.bound_of_kernel = _kernel_bounds(kinds)
        # Of kernels that only waited for the one before on their stream, that one.
        waited = (simulated.kernel_cause == _KERNEL_STREAM) & (program.kernel_group < 0)
        self.before = np.where(waited, simulated.kernel_source, -1)


def critical_path(program: Program, simulated: Simulated, graphs: list[ExecutionGraph], begin: int, end: int, *,
                  causes: Causes | None = None) -> Path:
    """Walk back from item ``end`` to the time of item ``begin`` (both items of one thread).

    Args:
        program: What was simulated.
        simulated: Its times.
        graphs: The job's graphs, one a rank of the program.
        begin: Item of the step's begin.
        end: Item of the step's end.
        causes: Of the program, where paths of several steps are wanted.
    """
    causes = causes or Causes(program, simulated, _kinds(graphs))
    return _Walk(causes, int(simulated.item_end[begin]), int(simulated.item_end[end])).run(("item", end))


def window_path(program: Program, simulated: Simulated, graphs: list[ExecutionGraph], rank: int) -> Path:
    """The path of a rank's whole window, back from its last simulated event to its first one.

    Args:
        program: What was simulated.
        simulated: Its times.
        graphs: The job's graphs, one a rank of the program.
        rank: Position of the rank in the program.
    """
    items = np.nonzero(program.thread_rank[program.item_thread()] == rank)[0]
    kernels = np.arange(program.kernel_ptr[rank], program.kernel_ptr[rank + 1])
    starts = np.concatenate([simulated.item_start[items], simulated.kernel_start[kernels]])
    ends = np.concatenate([simulated.item_end[items], simulated.kernel_end[kernels]])
    if not len(ends):
        return _Walk(Causes(program, simulated, _kinds(graphs)), 0, 0).run(None)
    last = int(np.argmax(ends))
    at = ("item", int(items[last])) if last < len(items) else ("kernel", int(kernels[last - len(items)]))
    return _Walk(Causes(program, simulated, _kinds(graphs)), int(starts.min()), int(ends[last])).run(at)


def _kinds(graphs: list[ExecutionGraph]) -> list[Int8]:
    return [g.kernels.kind for g in graphs]


def path_back(program: Program, simulated: Simulated, kinds: list[Int8], at: tuple[str, int], stop_ns: int, *,
              across: bool = False, causes: Causes | None = None) -> Path:
    """Walk back from the end of any item or kernel to a time.

    Args:
        program: What was simulated.
        simulated: Its times.
        kinds: ``KernelKind`` of the program's kernels, an array a rank.
        at: ("item" or "kernel", row) where the path ends.
        stop_ns: Where it begins, on the simulated clock.
        across: At a collective go on with the rank that arrived last, rather than wait for it.
        causes: Of the program, where several paths are wanted.
    """
    end = simulated.item_end[at[1]] if at[0] == "item" else simulated.kernel_end[at[1]]
    return _Walk(causes or Causes(program, simulated, kinds), stop_ns, int(end), across).run(at)


class _Walk:
    """State of one walk: the current time and the segments found so far, last first: ``parts``, then ``segments``."""

    def __init__(self, causes: Causes, stop: int, time: int, across: bool = False) -> None:
        self.p, self.s, self.stop, self.time, self.across = causes.program, causes.simulated, stop, time, across
        self.first_item, self.last_special = causes.first_item, causes.last_special
        self.bound_of_kernel, self.before = causes.bound_of_kernel, causes.before
        self.segments: list[tuple[int, int, int, int, int, bool]] = []
        self.parts: list[Int64] = []

    def run(self, at: tuple[str, int] | None) -> Path:
        """Follow the causes from an item or kernel until the stop time."""
        while at is not None and self.time > self.stop:
            if at[0] == "kernel":
                at = self._kernel(at[1]) if self.before[at[1]] < 0 else self._stream(at[1])
            elif self.last_special[at[1]] < at[1]:
                at = self._plain(int(self.last_special[at[1]]) + 1, at[1])
            else:
                at = self._item(at[1])
        if self.time > self.stop:
            # Nothing before: the window opened here with this already under way.
            self._segment(self.stop, Bound.HOST)
        self._flush()
        found = np.concatenate([np.zeros((6, 0), np.int64), *self.parts], axis=1)[:, ::-1]
        return Path(start_ns=found[0], end_ns=found[1], bound=found[2].astype(np.int8), item=found[3],
                    kernel=found[4], is_work=found[5].astype(np.bool_))

    def _flush(self) -> None:
        """Make columns of the segments that were found one by one."""
        if self.segments:
            self.parts.append(np.array(self.segments, np.int64).T)
            self.segments = []

    def _add(self, start: Int64, end: Int64, bound: Int64, item: Int64, kernel: Int64, is_work: Int64) -> None:
        """Many segments at once, last first; those without length are left out."""
        self._flush()
        self.parts.append(np.stack([start, end, bound, item, kernel, is_work])[:, start < end])
        self.time = int(start[-1])

    def _segment(self, start: int, bound: Bound, item: int = -1, kernel: int = -1, is_work: bool = False) -> None:
        """Close [start, current time) with ``bound``; clipped to the step."""
        start = max(start, self.stop)
        if start < self.time:
            self.segments.append((start, self.time, int(bound), item, kernel, is_work))
            self.time = start

    def _plain(self, first: int, last: int) -> tuple[str, int]:
        """``_item`` of many items that follow one another on a thread, last to first."""
        p, s = self.p, self.s
        first = min(first + int(np.searchsorted(s.item_end[first:last + 1], self.stop)), last)
        items = np.arange(last, first - 1, -1)
        start = np.stack([s.item_start[items], s.item_end[items - 1]], axis=1).reshape(-1)
        start = np.maximum(np.minimum(start, self.time), self.stop)
        end = np.concatenate([[self.time], start[:-1]])
        own = np.where(p.item_queue[items] >= 0, int(Bound.LAUNCH), int(Bound.HOST))
        bound = np.stack([own, np.full(len(items), int(Bound.HOST))], axis=1).reshape(-1)
        self._add(start, end, bound, np.repeat(items, 2), np.full(len(end), -1), np.tile([0, 1], len(items)))
        return ("item", first - 1)

    def _stream(self, k: int) -> tuple[str, int] | None:
        """``_kernel`` of many kernels that follow one another on a stream, last to first."""
        begins, found = self.s.kernel_start, np.empty(len(self.before) + 1, np.int64)
        count = chain(k, self.stop, self.before, begins, found)
        if count == 1:
            return self._kernel(k)
        kernels, earlier, k = found[:count - 1], found[1:count], int(found[count - 1])
        start = np.stack([begins[kernels], self.s.kernel_end[earlier]], axis=1).reshape(-1)
        start = np.maximum(np.minimum.accumulate(np.minimum(start, self.time)), self.stop)
        end = np.concatenate([[self.time], start[:-1]])
        bound = np.stack([self.bound_of_kernel[kernels], np.full(len(kernels), int(Bound.LAUNCH))], axis=1).reshape(-1)
        self._add(start, end, bound, np.full(len(end), -1), np.repeat(kernels, 2), np.zeros(len(end), np.int64))
        return ("kernel", k)

    def _item(self, n: int) -> tuple[str, int] | None:
        p, s = self.p, self.s
        cause = s.item_end_cause[n]
        if cause in (_END_KERNEL, _END_QUEUE):
            k = int(s.item_end_source[n])
            self._segment(int(s.kernel_end[k]), Bound.SYNC if cause == _END_KERNEL else Bound.LAUNCH, item=n)
            return ("kernel", k)
        if cause == _END_EXTERNAL:
            self._segment(int(s.item_start[n]), Bound.DATA_LOADING, item=n)
        else:
            launches = p.item_queue[n] >= 0
            self._segment(int(s.item_start[n]), Bound.LAUNCH if launches else Bound.HOST, item=n)
        if s.item_start_cause[n] == _START_OTHER_THREAD:
            other = int(p.after_item[s.item_start_source[n]])
            self._segment(int(s.item_end[other]), Bound.HOST, item=n, is_work=True)
            return ("item", other)
        if n in self.first_item:
            return None
        self._segment(int(s.item_end[n - 1]), Bound.HOST, item=n, is_work=True)
        return ("item", n - 1)

    def _kernel(self, k: int) -> tuple[str, int] | None:
        p, s = self.p, self.s
        bound = self._bound(k)
        group = int(p.kernel_group[k])
        if group >= 0:
            last = int(s.group_last[group])
            self._segment(int(s.kernel_start[last]), bound, kernel=k)
            if self.across:
                k = last
            self._segment(int(s.kernel_start[k]), Bound.WAITING_FOR_RANK, kernel=k)
        cause, source = s.kernel_cause[k], int(s.kernel_source[k])
        if cause == _KERNEL_LAUNCH and p.kernel_anchor[k] == _ANCHOR_STAGED:
            self._segment(int(s.item_end[source]), bound, kernel=k)
            return ("item", source)
        self._segment(int(s.kernel_start[k]), bound, kernel=k)
        if cause == _KERNEL_LAUNCH:
            return self._from_launch(k, source)
        if cause == _KERNEL_STREAM:
            self._segment(int(s.kernel_end[source]), Bound.LAUNCH, kernel=k)
            return ("kernel", source)
        if cause == _KERNEL_EDGE:
            other = int(p.edge_kernel[source])
            if p.edge_fraction[source] == 1.0:
                self._segment(int(s.kernel_end[other]), Bound.SYNC, kernel=k)
                return ("kernel", other)
            # Held back for lack of room: the time since the blocker began is the blocker's.
            self._segment(int(s.kernel_start[other]), self._bound(other), kernel=other)
            return self._kernel(other)
        # Held back by something that was not recorded: what it was held from is its launch, where that was.
        return self._from_launch(k, int(p.kernel_item[k])) if p.kernel_item[k] >= 0 else None

    def _from_launch(self, k: int, n: int) -> tuple[str, int] | None:
        """Walk from a kernel's start back to the call that launched it."""
        if self.p.kernel_anchor[k] == _ANCHOR_CALL_START:
            return self._from_call_start(k, n)
        self._segment(int(self.s.item_end[n]), Bound.LAUNCH, kernel=k)
        return ("item", n)

    def _from_call_start(self, k: int, n: int) -> tuple[str, int] | None:
        """A copy its own call waits for: the latency lies inside the call; go on before the call."""
        self._segment(int(self.s.item_start[n]), Bound.LAUNCH, kernel=k)
        if self.s.item_start_cause[n] == _START_OTHER_THREAD:
            other = int(self.p.after_item[self.s.item_start_source[n]])
            self._segment(int(self.s.item_end[other]), Bound.HOST, item=n, is_work=True)
            return ("item", other)
        if n in self.first_item:
            return None
        self._segment(int(self.s.item_end[n - 1]), Bound.HOST, item=n, is_work=True)
        return ("item", n - 1)

    def _bound(self, k: int) -> Bound:
        return Bound(int(self.bound_of_kernel[k]))


def _last_special(p: Program, s: Simulated) -> Int64:
    """For each item the last one up to it that is more than its thread going on: the first, or one that waited."""
    cause = s.item_end_cause
    special = (cause == _END_KERNEL) | (cause == _END_QUEUE) | (cause == _END_EXTERNAL)
    special |= s.item_start_cause == _START_OTHER_THREAD
    special[p.thread_ptr[:-1][np.diff(p.thread_ptr) > 0]] = True
    return np.maximum.accumulate(np.where(special, np.arange(len(special)), -1)) if len(special) else np.zeros(
        0, np.int64)


def _kernel_bounds(kinds: list[Int8]) -> Int64:
    """The bound of each kernel's own time, as numbers of ``Bound``."""
    kind = np.concatenate(kinds) if kinds else np.zeros(0, np.int8)
    found = np.full(len(kind), int(Bound.MEMORY_COPY), np.int64)
    found[kind == KernelKind.COMPUTE] = Bound.COMPUTE
    found[kind == KernelKind.COLLECTIVE] = Bound.EXPOSED_COMMUNICATION
    return found


def step_items(program: Program) -> list[tuple[int, int, int, int]]:
    """(rank, step row, begin item, end item) of every step of every rank, in order."""
    thread = program.item_thread()
    begins = np.nonzero(program.item_kind == ItemKind.STEP_BEGIN)[0]
    ends = {(int(thread[i]), int(program.item_row[i])): int(i)
            for i in np.nonzero(program.item_kind == ItemKind.STEP_END)[0]}
    found = [(int(program.thread_rank[thread[i]]), int(program.item_row[i]), int(i),
              ends[int(thread[i]), int(program.item_row[i])]) for i in begins]
    return sorted(found)
