"""The simulator's input: one job as flat arrays, durations separated from dependencies.

A program holds *host items* (calls and markers, in program order per thread) and *kernels* (device work, in stream
order), of all ranks. It contains no waiting: a blocked call has its unblocked cost, and edges to what it waited for.

::

    host thread   ──work──[ item ]──work──[ item: waits for a kernel ]──work──[ marker: end of step ]
                             │ latency            ▲ return lag
    stream            ──────[ kernel ]──gap──[ kernel ]─────

Times are int64 nanoseconds on the job's clock; ``NEVER`` means "no external event"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tracer.arrays import Float64, Int8, Int32, Int64
from tracer.errors import ForetraceError
from tracer.graph import NONE


class StartCause(IntEnum):
    """The cause of a host item's start."""

    PROGRAM_ORDER = 0
    OTHER_THREAD = 1


class EndCause(IntEnum):
    """The cause of a host item's end."""

    OWN_COST = 0
    KERNEL = 1
    QUEUE = 2
    EXTERNAL = 3


class KernelCause(IntEnum):
    """The cause of a kernel's start."""

    LAUNCH = 0
    STREAM = 1
    EDGE = 2
    EXTERNAL = 3


class Bound(IntEnum):
    """The kind of work that a microsecond of the step was spent on."""

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
        """Return the name that reports show."""
        return self.name.lower().replace("_", " ")


NEVER = np.int64(-(2**62))
"""Time of an external event that does not exist."""

MOST_FACTOR = 1e12
"""Largest factor on the speed of any part of a machine: a larger one is a slip, and overflows."""
LONGEST_NS = 2.0**56
"""More than two years: sums of simulated times below it stay far from int64's end."""


def whole_ns(times: npt.ArrayLike) -> Int64:
    """Round times to whole nanoseconds for the simulator; all edited times are rounded here. Times of several programs,
    [rows, programs], are checked program by program.

    Raises:
        ForetraceError: a time is no number, or their sum is longer than 64 bits can hold.
    """
    values = np.asarray(times, np.float64)
    # A NaN is not less than anything, so that it is refused too.
    together = np.abs(values).sum(axis=0 if values.ndim == 2 else None)
    if not float(np.max(together, initial=0.0)) < LONGEST_NS:
        raise ForetraceError("With these changes the step would last for years, or for no time that can be told; give "
                             "smaller factors.")
    return np.rint(values).astype(np.int64)


def total_ratio(before: Int64 | Float64, after: Float64) -> float:
    """Return the sum of times over the sum before; 1 if the sum before is 0."""
    total = float(before.sum())
    return float(after.sum()) / total if total else 1.0


class ItemKind(IntEnum):
    """The kind of a host item."""

    CALL = 0
    STEP_BEGIN = 1
    STEP_END = 2
    HAND_OVER = 3
    """The point at which another thread's work starts."""
    RESUME = 4
    """The point where a thread resumes after another thread's work."""
    DATA_READY = 5
    """The end of a multi-process data loader's wait: an external event."""


class LaunchReference(IntEnum):
    """The point from which a kernel's launch latency counts."""

    CALL_END = 0
    CALL_START = 1
    STAGED = 2
    """Counts from the call's end to the *end* of the copy, which the call feeds piece by piece."""


@dataclass(slots=True)
class Program:
    """All arrays of one job. CSR pairs are named ``x_ptr`` and ``x_*``; indices are global over ranks.

    Host items, thread by thread (``thread_ptr``): ``item_work`` is host work since the previous item of its thread.
    ``item_cost`` is the item's own unblocked duration, ``item_external`` the earliest time at which it can return.
    ``after_*`` are host-to-host edges into the item's start; ``wait_*`` are kernel-to-host edges into its end.
    ``item_queue`` counts the launch-queue entries of its ``item_channel`` submitted before it (-1: not a launch). A
    launch without a channel never waits for a slot. ``item_return`` is the lag after a full queue frees a slot.

    Kernels: ``kernel_item`` launches it (-1: not recorded), ``kernel_latency`` later it can start, and
    ``kernel_gap`` after its stream's previous kernel. ``edge_*`` are kernel-to-kernel edges: the kernel starts no
    earlier than ``start + fraction * duration + lag`` of the other. ``kernel_group`` is a rendezvous (-1: none).
    """

    # threads
    thread_ptr: Int64
    thread_rank: Int32
    thread_start: Int64
    # host items
    item_kind: Int8
    item_row: Int32
    """Row of ``launches`` (calls) or ``steps`` (step markers) of the item's rank, else -1."""
    item_work: Int64
    item_cost: Int64
    item_external: Int64
    item_queue: Int64
    item_channel: Int64
    item_return: Int64
    after_ptr: Int64
    after_item: Int64
    after_lag: Int64
    wait_ptr: Int64
    wait_kernel: Int64
    wait_lag: Int64
    # kernels
    kernel_ptr: Int64
    """Kernels of rank r are rows ``kernel_ptr[r]`` to ``kernel_ptr[r + 1]``, in the order of ``graph.kernels``."""
    kernel_item: Int64
    kernel_reference: Int8
    kernel_latency: Int64
    kernel_previous: Int64
    kernel_gap: Int64
    kernel_duration: Int64
    kernel_external: Int64
    edge_ptr: Int64
    edge_kernel: Int64
    edge_fraction: Float64
    edge_lag: Int64
    kernel_group: Int64
    group_size: Int64
    # launch queue, per channel: entries leave in the order they were submitted in
    queue_ptr: Int64
    queue_kernel: Int64
    queue_depth: Int64
    # what was recorded, for comparison only: the simulator never reads these
    recorded_item_start: Int64
    recorded_item_end: Int64
    recorded_kernel_start: Int64
    recorded_kernel_end: Int64

    @property
    def ranks(self) -> int:
        """Return the number of ranks in the program."""
        return len(self.kernel_ptr) - 1

    def kernel_rank(self) -> Int64:
        """Return the rank index (position in the job) of every kernel."""
        return owners(self.kernel_ptr)

    def item_thread(self) -> Int64:
        """Return the thread index of every host item."""
        return owners(self.thread_ptr)

    @property
    def recorded(self) -> EventTimes:
        """Return the recorded times."""
        return EventTimes(self.recorded_item_start, self.recorded_item_end, self.recorded_kernel_start,
                             self.recorded_kernel_end)

    def with_durations(self, kernel_duration: Int64) -> Program:
        """Return the program with other kernel durations (ns)."""
        return replace(self, kernel_duration=np.ascontiguousarray(kernel_duration, dtype=np.int64))

    def copy(self) -> Program:
        """Return a deep copy, for edits."""
        return Program(**{f.name: getattr(self, f.name).copy() for f in fields(self)})


@dataclass(slots=True)
class Simulated:
    """Simulated times (ns) of every item and kernel, and the cause of each.

    Attributes:
        item_start, item_end, kernel_start, kernel_end: times, ns.
        item_start_cause, item_end_cause, kernel_cause: codes of ``StartCause``, ``EndCause`` and ``KernelCause``.
        item_start_source, item_end_source, kernel_source: row of the item, kernel or edge that is the cause.
        group_last: the kernel that arrived last at each rendezvous.
        order: rows of items, and of kernels (plus the number of items), in an order in which they were computed.
    """

    item_start: Int64
    item_end: Int64
    item_start_cause: Int8
    item_start_source: Int32
    item_end_cause: Int8
    item_end_source: Int32
    kernel_start: Int64
    kernel_end: Int64
    kernel_cause: Int8
    kernel_source: Int32
    group_last: Int32
    order: Int64


@dataclass(frozen=True, slots=True)
class EventTimes:
    """The recorded times (ns) of a program's items and kernels."""

    item_start: Int64
    item_end: Int64
    kernel_start: Int64
    kernel_end: Int64


@dataclass(frozen=True, slots=True)
class Structure:
    """A program's dependencies without times: rows grouped by the row they depend on, each group with a CSR pointer.

    Attributes:
        launched: kernels by the item that launches them; ``successor``: by the previous kernel of their stream.
        out_edge: edges by the kernel they start from; ``owner``: the kernel at which each edge ends.
        member: kernels by their rendezvous.
    """

    launched_ptr: Int64
    launched: Int64
    successor_ptr: Int64
    successor: Int64
    out_ptr: Int64
    out_edge: Int64
    member_ptr: Int64
    member: Int64
    owner: Int64


def pointers(counts: np.ndarray | Sequence[int]) -> Int64:
    """Return the first row of each group, and the end of the last one, from the groups' numbers of rows."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def owners(pointer: Int64) -> Int64:
    """Return the group of each row, given the groups' CSR pointer."""
    return np.repeat(np.arange(len(pointer) - 1), np.diff(pointer))


def entries_waited_for(p: Program) -> Int64:
    """Return for each item the queue entry that must leave before the item's own fits; -1 if there is room."""
    if not len(p.queue_depth):
        return np.full(len(p.item_kind), NONE, np.int64)
    channel = np.maximum(p.item_channel, 0)
    depth = p.queue_depth[channel]
    waits = (p.item_channel >= 0) & (depth > 0) & (p.item_queue >= depth)
    return np.where(waits, p.queue_ptr[channel] + p.item_queue - depth, NONE)


def step_items(program: Program) -> list[tuple[int, int, int, int]]:
    """Return (rank, step row, begin item, end item) of every step of every rank, in order."""
    thread = program.item_thread()
    begins = np.nonzero(program.item_kind == ItemKind.STEP_BEGIN)[0]
    ends = {(int(thread[i]), int(program.item_row[i])): int(i)
            for i in np.nonzero(program.item_kind == ItemKind.STEP_END)[0]}
    found = [(int(program.thread_rank[thread[i]]), int(program.item_row[i]), int(i),
              ends[int(thread[i]), int(program.item_row[i])]) for i in begins]
    return sorted(found)
