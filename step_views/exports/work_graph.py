"""``WorkGraph``: a simulated job as nodes and dependencies only: each node starts when all its dependencies have ended.

The simulator's program has further rules: latencies, lags, starts within a kernel, a launch queue. Each becomes a node
or a dependency here, so that a reader that only knows "after" gets the same times:

::

    program    call ──latency──> kernel ──gap──> kernel ──return lag──> call's end
    here       [call] ─> [delay] ─> [kernel] ─> [delay] ─> [kernel] ─> [delay] ─> [end]

Rendezvous remain: their members begin together, when the last has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from graph_predictor.prediction.simulated_job import SimulatedJob
from graph_predictor.simulation.program import NEVER, LaunchReference, Program
from step_views.exports.work_graph_loop import longest_path
from tracer.arrays import Int8, Int64


class WorkKind(IntEnum):
    """The kind of a node of a ``WorkGraph``."""

    HOST = 0
    """Host work before a call, of one operation."""
    CALL = 1
    """A call's own cost, or a marker."""
    RETURN = 2
    """The return of a call that waited for something; takes no time."""
    KERNEL = 3
    START = 4
    """The start of a call or kernel from which something else counts; takes no time."""
    DELAY = 5
    """A latency, gap or lag: time that occupies neither host nor device."""
    TAIL = 6
    """The end of a kernel with which the kernel after it may overlap."""


class After(IntEnum):
    """The reason why one node comes after another."""

    PROGRAM_ORDER = 0
    LAUNCH = 1
    STREAM_ORDER = 2
    EVENT_WAIT = 3
    """Between streams: a recorded or inferred wait, or a lack of room on the device."""
    SYNC = 4
    """A call that returns only after device work has ended."""
    LAUNCH_QUEUE = 5
    """A launch that waits for room in the full queue."""
    HAND_OVER = 6
    """Between host threads, such as autograd's."""
    OUTSIDE = 7
    """A cause outside the recording: a fixed time on the job's clock."""

    @property
    def label(self) -> str:
        """The name in reports."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class WorkGraph:
    """Nodes and dependencies of a job.

    Attributes:
        job: the simulated job.
        kind: ``WorkKind`` of each node.
        rank: position of the rank in the job.
        row: the item (for host work, calls, their starts and returns) or kernel in the job's program; for a delay, the
            item or kernel that it delays.
        on_kernel: whether ``row`` is a kernel.
        op: row of the rank's ``ops`` that host work belongs to; -1 for other nodes.
        start_ns, duration_ns: on the simulated clock, from the job's start; a rendezvous starts with its last arrival.
        group: rendezvous of a kernel; -1 for none.
        before_ptr, before, why: dependencies of each node (CSR), each with its ``After``.
        left_out: number of dependencies that cannot be written as "after"; they decided nothing.
    """

    job: SimulatedJob
    kind: Int8
    rank: Int64
    row: Int64
    on_kernel: np.ndarray
    op: Int64
    start_ns: Int64
    duration_ns: Int64
    group: Int64
    before_ptr: Int64
    before: Int64
    why: Int8
    left_out: int

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def duration_us(self) -> Int64:
        """Durations in whole µs, rounded so that they add up along every path: if a node ends when another starts, so
        do their rounded times."""
        return (self.start_ns + self.duration_ns) // 1000 - self.start_ns // 1000

    @property
    def in_order(self) -> Int64:
        """The nodes in order of start, each after all its dependencies."""
        _, place = self.ends(self.duration_ns)
        return np.lexsort((place, self.start_ns))

    def ends(self, duration: Int64) -> tuple[Int64, Int64]:
        """Return when each node ends if nodes take ``duration``, and its place in an order of dependencies (-1 for both
        on a cycle). Only dependencies and rendezvous count."""
        count = len(self)
        owner = np.repeat(np.arange(count), np.diff(self.before_ptr))
        order = np.argsort(self.before, kind="stable")
        pointer = np.concatenate([[0], np.cumsum(np.bincount(self.before, minlength=count))]).astype(np.int64)
        sizes = np.bincount(self.group[self.group >= 0], minlength=int(self.group.max(initial=-1)) + 1).astype(np.int64)
        members = np.flatnonzero(self.group >= 0)
        members = members[np.argsort(self.group[members], kind="stable")]
        member_ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return longest_path(pointer, owner[order].astype(np.int64), np.diff(self.before_ptr).astype(np.int64),
                            duration, self.group, member_ptr, members.astype(np.int64))


@dataclass(slots=True)
class _Edges:
    """Dependencies between events, before delays become nodes. Events: starts and ends of items, kernels, threads."""

    source: list[Int64]
    target: list[Int64]
    delay: list[Int64]
    why: list[Int64]

    def add(self, source: Int64, target: Int64, delay: Int64, why: After) -> None:
        """Add dependencies of one kind."""
        self.source.append(source)
        self.target.append(target)
        self.delay.append(delay)
        self.why.append(np.full(len(source), int(why), np.int64))


def work_graph(job: SimulatedJob) -> WorkGraph:
    """Return the nodes and dependencies of a simulated job."""
    return _Builder(job).build()


class _Builder:
    """Numbers the events of a program: items' starts and ends, kernels' starts and ends, threads' starts, in order."""

    def __init__(self, job: SimulatedJob) -> None:
        self.job = job
        p, s = job.program, job.simulated
        self.items, self.kernels, self.threads = len(p.item_kind), len(p.kernel_item), len(p.thread_rank)
        self.n, self.k = np.arange(self.items), np.arange(self.kernels)
        used = np.diff(p.thread_ptr) > 0
        starts = [p.thread_start[used], s.item_start, s.kernel_start]
        self.first_ns = min((int(times.min()) for times in starts if len(times)), default=0)
        self.end_of_item = self.items
        self.start_of_kernel = 2 * self.items
        self.end_of_kernel = 2 * self.items + self.kernels
        self.start_of_thread = 2 * (self.items + self.kernels)
        self.main_of_kernel = self.start_of_thread + self.threads
        self.nothing = self.main_of_kernel + self.kernels
        self.tail_ns = self._tails()
        self.time = np.concatenate([s.item_start, s.item_end, s.kernel_start, s.kernel_end, p.thread_start,
                                    s.kernel_end - self.tail_ns, [self.first_ns]]) - self.first_ns
        self.edges = _Edges([], [], [], [])

    def build(self) -> WorkGraph:
        """Gather the dependencies, and make nodes of events and delays."""
        self._between_items()
        self._into_returns()
        self._launches()
        self._between_kernels()
        source, target, delay, why = (np.concatenate(column) if column else np.zeros(0, np.int64) for column in (
            self.edges.source, self.edges.target, self.edges.delay, self.edges.why))
        delay = np.maximum(delay, 0)
        # A lag that reaches back before its own start cannot be written, and has decided nothing.
        kept = self.time[source] + delay <= self.time[target]
        return self._nodes(source[kept], target[kept], delay[kept], why[kept], int((~kept).sum()))

    # -- dependencies -------------------------------------------------------------------------------------------------

    def _tails(self) -> Int64:
        """Return by how much each kernel may overlap with what follows it: the largest negative gap or lag after it,
        as a positive time, ns."""
        p, s = self.job.program, self.job.simulated
        tail = np.zeros(self.kernels, np.int64)
        behind = np.flatnonzero(p.kernel_previous >= 0)
        whole = p.edge_fraction == 1.0
        for before, lag in ((p.kernel_previous[behind], p.kernel_gap[behind]),
                            (p.edge_kernel[whole], p.edge_lag[whole]), (p.wait_kernel, p.wait_lag)):
            np.maximum.at(tail, before, -lag)
        # A rendezvous begins with its last arrival: the cut-off end is at most as long as the transfer.
        meets = np.where(p.kernel_group >= 0, s.group_last[p.kernel_group] if len(p.group_size) else -1, self.k)
        return np.minimum(tail, s.kernel_end - s.kernel_start[meets])

    def _after_kernels(self, kernel: Int64, target: Int64, lag: Int64, why: After) -> None:
        """Add dependencies on kernels' ends plus a lag; with a negative lag, on the end of their main part."""
        late = lag >= 0
        self.edges.add(self.end_of_kernel + kernel[late], target[late], lag[late], why)
        early = ~late
        rest = lag[early] + self.tail_ns[kernel[early]]
        self.edges.add(self.main_of_kernel + kernel[early], target[early], rest, why)

    def _lagging(self, end: Int64, start: Int64, target: Int64, lag: Int64, why: After) -> None:
        """Add dependencies on ``end`` + ``lag``; with a negative lag, on ``start`` plus the time from there."""
        late = lag >= 0
        self.edges.add(end[late], target[late], lag[late], why)
        early = ~late
        self.edges.add(start[early], target[early], self.time[end[early]] + lag[early] - self.time[start[early]], why)

    def _between_items(self) -> None:
        p = self.job.program
        owner = np.repeat(self.n, np.diff(p.after_ptr))
        self._lagging(self.end_of_item + p.after_item, p.after_item, owner, p.after_lag, After.HAND_OVER)
        used = np.flatnonzero(np.diff(p.thread_ptr) > 0)
        self._at(self.start_of_thread + used, p.thread_start[used])

    def _at(self, target: Int64, time: Int64) -> None:
        """Hold events back until a time on the job's clock."""
        self.edges.add(np.full(len(target), self.nothing), target, time - self.first_ns, After.OUTSIDE)

    def _into_returns(self) -> None:
        p = self.job.program
        owner = np.repeat(self.n, np.diff(p.wait_ptr))
        self._after_kernels(p.wait_kernel, self.end_of_item + owner, p.wait_lag, After.SYNC)
        self.queued, self.slots = _slots(p, self.job.simulated.kernel_end)
        self._lagging(self.end_of_kernel + self.slots, self.start_of_kernel + self.slots,
                      self.end_of_item + self.queued, p.item_return[self.queued], After.LAUNCH_QUEUE)
        held = np.flatnonzero(p.item_external > NEVER)
        self._at(self.end_of_item + held, p.item_external[held])

    def _launches(self) -> None:
        p, s = self.job.program, self.job.simulated
        launched = np.flatnonzero(p.kernel_item >= 0)
        call, latency, anchor = p.kernel_item[launched], p.kernel_latency[launched], p.kernel_reference[launched]
        duration = s.kernel_end[launched] - s.kernel_start[launched]
        cost = s.item_end[call] - s.item_start[call]
        target = self.start_of_kernel + launched
        after = (anchor == LaunchReference.CALL_END) & (latency >= 0)
        self.edges.add(self.end_of_item + call[after], target[after], latency[after], After.LAUNCH)
        since = np.where(anchor == LaunchReference.CALL_START, latency,
                         cost + latency - np.where(anchor == LaunchReference.STAGED, duration, 0))
        self.edges.add(call[~after], target[~after], np.maximum(since, 0)[~after], After.LAUNCH)
        # Work that its own launch waits for is submitted as soon as there is room.
        slot = np.full(self.items, -1)
        slot[self.queued] = self.slots
        inside = (anchor == LaunchReference.CALL_START) & (slot[call] >= 0)
        self.edges.add(self.end_of_kernel + slot[call[inside]], target[inside], latency[inside], After.LAUNCH_QUEUE)
        held = np.flatnonzero(p.kernel_external > NEVER)
        self._at(self.start_of_kernel + held, p.kernel_external[held])

    def _between_kernels(self) -> None:
        p, s = self.job.program, self.job.simulated
        behind = np.flatnonzero(p.kernel_previous >= 0)
        before = p.kernel_previous[behind]
        self._after_kernels(before, self.start_of_kernel + behind, p.kernel_gap[behind], After.STREAM_ORDER)
        owner = np.repeat(self.k, np.diff(p.edge_ptr))
        whole = p.edge_fraction == 1.0
        other = p.edge_kernel
        self._after_kernels(other[whole], self.start_of_kernel + owner[whole], p.edge_lag[whole], After.EVENT_WAIT)
        part = ~whole
        length = (s.kernel_end - s.kernel_start)[other[part]]
        since = (p.edge_fraction[part] * length).astype(np.int64) + p.edge_lag[part]
        self.edges.add(self.start_of_kernel + other[part], self.start_of_kernel + owner[part], since, After.EVENT_WAIT)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _nodes(self, source: Int64, target: Int64, delay: Int64, why: Int64, left_out: int) -> WorkGraph:
        p, s, time = self.job.program, self.job.simulated, self.time
        rank_of_item, rank_of_kernel = p.thread_rank[p.item_thread()].astype(np.int64), p.kernel_rank()
        # Calls, then kernels; then events that need a node: starts from which others count, returns, threads' starts.
        starts = np.zeros(self.items + self.kernels, np.bool_)
        starts[source[source < self.items]] = True
        of_kernel = source[(source >= self.start_of_kernel) & (source < self.end_of_kernel)]
        starts[self.items + of_kernel - self.start_of_kernel] = True
        into_end = target[(target >= self.end_of_item) & (target < self.start_of_kernel)] - self.end_of_item
        returns = np.unique(into_end)
        threads = np.flatnonzero(np.diff(p.thread_ptr) > 0)
        count = self.items + self.kernels
        begins = np.flatnonzero(starts)
        starting = count + np.arange(len(begins))
        returning = count + len(begins) + np.arange(len(returns))
        threading = count + len(begins) + len(returns) + np.arange(len(threads))
        tailed = np.flatnonzero(self.tail_ns > 0)
        ending = count + len(begins) + len(returns) + len(threads) + np.arange(len(tailed))
        after_events = count + len(begins) + len(returns) + len(threads) + len(tailed)

        # Node of each event as the source, and as the target, of a dependency.
        says, takes = np.full(self.nothing + 1, -1, np.int64), np.full(self.nothing + 1, -1, np.int64)
        says[self.end_of_item:self.start_of_kernel] = self.n
        says[self.end_of_item + returns] = returning
        says[self.end_of_kernel:self.start_of_thread] = self.items + self.k
        says[self.main_of_kernel:self.nothing] = self.items + self.k
        says[self.end_of_kernel + tailed] = ending
        takes[:self.items] = self.n
        takes[self.end_of_item + returns] = returning
        takes[self.start_of_kernel:self.end_of_kernel] = self.items + self.k
        event = np.where(begins < self.items, begins, begins - self.items + self.start_of_kernel)
        says[event] = takes[event] = starting
        says[self.start_of_thread + threads] = takes[self.start_of_thread + threads] = threading

        work = self._work()
        delayed = np.flatnonzero(delay > 0)
        worked = after_events + np.arange(len(work.item))
        waiting = after_events + len(work.item) + np.arange(len(delayed))

        # Dependencies: direct, both sides of delays, starts before own work, own work before returns, host work.
        pairs: list[tuple[Int64, Int64, Int64]] = []
        direct = (delay == 0) & (source != self.nothing)
        pairs.append((says[source[direct]], takes[target[direct]], why[direct]))
        from_something = source[delayed] != self.nothing
        pairs.append((says[source[delayed[from_something]]], waiting[from_something], why[delayed[from_something]]))
        pairs.append((waiting, takes[target[delayed]], why[delayed]))
        order = int(After.PROGRAM_ORDER)
        pairs.append((starting, begins, np.full(len(begins), order)))
        pairs.append((returns, returning, np.full(len(returns), order)))
        pairs.append((self.items + tailed, ending, np.full(len(tailed), order)))
        first = np.zeros(self.items, np.bool_)
        first[p.thread_ptr[threads]] = True
        previous = says[self.end_of_item + np.maximum(self.n - 1, 0)]
        previous[first] = threading
        head, tail = work.first[self.n], work.last[self.n]
        idle = head < 0
        pairs.append((previous[idle], takes[self.n[idle]], np.full(int(idle.sum()), order)))
        busy = ~idle
        pairs.append((previous[busy], worked[head[busy]], np.full(int(busy.sum()), order)))
        pairs.append((worked[tail[busy]], takes[self.n[busy]], np.full(int(busy.sum()), order)))
        inner = np.flatnonzero(work.item[1:] == work.item[:-1])
        pairs.append((worked[inner], worked[inner + 1], np.full(len(inner), order)))

        held = target[delayed]
        held_kernel = (held >= self.start_of_kernel) & (held < self.end_of_kernel)
        beside = np.zeros(len(returns) + len(threads), np.bool_)
        held_row = np.where(held_kernel, held - self.start_of_kernel, np.where(
            held >= self.start_of_thread, p.thread_ptr[np.clip(held - self.start_of_thread, 0, self.threads - 1)],
            np.where(held >= self.end_of_item, held - self.end_of_item, held)))
        begins_kernel = begins >= self.items
        row = np.concatenate([self.n, self.k, np.where(begins_kernel, begins - self.items, begins), returns,
                              p.thread_ptr[threads], tailed, work.item, held_row])
        on_kernel = np.concatenate([
            np.zeros(self.items, np.bool_), np.ones(self.kernels, np.bool_), begins_kernel,
            beside, np.ones(len(tailed), np.bool_), np.zeros(len(work.item), np.bool_), held_kernel])
        rank = np.where(on_kernel, np.append(rank_of_kernel, 0)[np.where(on_kernel, row, -1)],
                        np.append(rank_of_item, 0)[np.where(on_kernel, -1, row)])
        group = np.full(len(row), -1, np.int64)
        group[self.items:count] = p.kernel_group
        meets = np.where(p.kernel_group >= 0, s.group_last[p.kernel_group] if len(p.group_size) else -1, self.k)
        kernel_start = s.kernel_start[meets] - self.first_ns
        kernel_end = s.kernel_end - self.first_ns
        start = np.concatenate([time[:self.items], kernel_start, time[event], time[self.end_of_item + returns],
                                time[self.start_of_thread + threads], time[self.main_of_kernel + tailed],
                                work.start_ns, time[source[delayed]]])
        duration = np.concatenate([
            p.item_cost, kernel_end - kernel_start - self.tail_ns,
            np.zeros(len(begins) + len(returns) + len(threads), np.int64), self.tail_ns[tailed], work.ns,
            delay[delayed]])
        kind = np.concatenate([np.full(size, int(of), np.int8) for size, of in (
            (self.items, WorkKind.CALL), (self.kernels, WorkKind.KERNEL), (len(begins), WorkKind.START),
            (len(returns), WorkKind.RETURN), (len(threads), WorkKind.START), (len(tailed), WorkKind.TAIL),
            (len(work.item), WorkKind.HOST),
            (len(delayed), WorkKind.DELAY))])
        op = np.full(len(row), -1, np.int64)
        op[after_events:after_events + len(work.item)] = work.op
        before, owner, reason = (np.concatenate(column) for column in zip(*pairs, strict=True))
        by = np.argsort(owner, kind="stable")
        pointer = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(row)))]).astype(np.int64)
        return WorkGraph(self.job, kind, rank, row, on_kernel, op, start, duration, group, pointer,
                         before[by].astype(np.int64), reason[by].astype(np.int8), left_out)

    def _work(self) -> _Work:
        """Return the host work before each item, divided by operation in proportion to the recorded slices."""
        job, p = self.job, self.job.program
        slices, slice_ns = job.host_slices()
        rows = np.flatnonzero(~slices.is_cost & (slice_ns > 0))
        # By item, then by time; neighbouring slices of one operation are joined.
        rows = rows[np.lexsort((slices.start_ns[rows], slices.item[rows]))]
        item, op, ns = slices.item[rows], slices.op[rows], slice_ns[rows]
        opens = np.ones(len(rows), np.bool_)
        opens[1:] = (item[1:] != item[:-1]) | (op[1:] != op[:-1])
        at = np.flatnonzero(opens)
        item, op = item[at], op[at]
        ns = np.add.reduceat(ns, at) if len(at) else ns
        recorded = len(job.built.program.item_kind)
        pointer = np.concatenate([[0], np.cumsum(np.bincount(item, minlength=recorded))]).astype(np.int64)
        worked = np.flatnonzero(p.item_work > 0)
        source = job.item[worked]
        counts = np.diff(pointer)[source]
        number = np.maximum(counts, 1)
        owner = np.repeat(np.arange(len(worked)), number)
        offset = np.arange(len(owner)) - np.repeat(np.cumsum(number) - number, number)
        known = counts[owner] > 0
        row = np.where(known, np.repeat(pointer[source], number) + offset, 0)
        share = np.where(known, np.append(ns, 1.0)[np.where(known, row, -1)], 1.0)
        reached = np.cumsum(share)
        base = np.repeat(reached[np.cumsum(number) - 1] - np.bincount(owner, weights=share, minlength=len(worked)),
                         number) if len(owner) else share
        whole = np.bincount(owner, weights=share, minlength=len(worked))
        work = p.item_work[worked][owner]
        until = np.rint((reached - base) / np.maximum(whole[owner], 1e-9) * work).astype(np.int64)
        last = offset == number[owner] - 1
        until[last] = work[last]
        since = np.where(offset > 0, np.concatenate([[0], until[:-1]])[: len(until)], 0)
        begin = self._work_begins()[worked][owner]
        first, final = np.full(self.items, -1, np.int64), np.full(self.items, -1, np.int64)
        place = np.arange(len(owner))
        first[worked], final[worked] = place[offset == 0], place[last]
        return _Work(worked[owner], np.where(known, np.append(op, -1)[np.where(known, row, -1)], -1), begin + since,
                     until - since, first, final)

    def _work_begins(self) -> Int64:
        """Return when the work before each item begins: at the end of the item before it on its thread."""
        p = self.job.program
        ends = self.time[self.end_of_item:self.start_of_kernel]
        begin = np.concatenate([[0], ends[:-1]])[: self.items]
        used = np.flatnonzero(np.diff(p.thread_ptr) > 0)
        begin[p.thread_ptr[used]] = p.thread_start[used] - self.first_ns
        return begin


@dataclass(frozen=True, slots=True)
class _Work:
    """Pieces of host work in order, and the ``first`` and ``last`` piece of every item (-1 for none)."""

    item: Int64
    op: Int64
    start_ns: Int64
    ns: Int64
    first: Int64
    last: Int64


def _slots(p: Program, kernel_end: Int64) -> tuple[Int64, Int64]:
    """Return the launches that may find the queue full, and for each the kernel whose end makes room. Entries leave the
    queue in order, so this kernel is the last to end among the entries up to the launch's slot."""
    if not len(p.queue_depth) or not len(p.item_kind):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    channel = np.maximum(p.item_channel, 0)
    depth = p.queue_depth[channel]
    queued = np.flatnonzero((p.item_channel >= 0) & (depth > 0) & (p.item_queue >= depth))
    leaves = np.full(len(p.queue_kernel), -1, np.int64)
    for low, high in zip(p.queue_ptr[:-1].tolist(), p.queue_ptr[1:].tolist(), strict=True):
        ends = kernel_end[p.queue_kernel[low:high]]
        if len(ends):
            later = np.maximum.accumulate(ends)
            opens = np.concatenate([[True], later[1:] > later[:-1]])
            leaves[low:high] = p.queue_kernel[low + np.maximum.accumulate(np.where(opens, np.arange(len(ends)), 0))]
    return queued, leaves[p.queue_ptr[channel[queued]] + p.item_queue[queued] - depth[queued]]
