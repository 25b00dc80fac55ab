"""Find what each kernel waited for in addition to its launch and its own stream.

Four sources, in this order:

* *recorded*: a ``cuda_sync`` "stream wait event" row that says which record it waited for;
* *structural*: a StreamWaitEvent call just before the kernel's launch makes the last work of every other stream a
  candidate. Candidates that end after the kernel starts are dropped;
* *timeline*: a kernel starts later than its launch and its stream explain, just when an earlier-launched kernel of
  another stream ends: it waited for that kernel;
* *contention*: such a kernel starts while another stream's computing kernel runs: that blocker left it no room. After
  an edit it starts at the same fraction of the blocker's new duration.

Delays without such a source are counted as unexplained, and never stored as a wait."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from graph_predictor.simulation.program import NEVER
from graph_predictor.simulation.ranks import LONG_AGO, RankView
from kernel_models.host.segments import RETURN_DEFAULT_NS, LaunchConstants
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import NONE, KernelKind, LaunchKind, SyncKind

EXPLAINED_NS = 12_000
"""A kernel that starts this much after its launch and stream allow waited for something (jitter stays below)."""
JUST_ENDED_NS = 15_000
"""A blocker ended at most this long before the kernel started: event latency is 1–14 µs on V100 and A100."""
CLOCK_NS = 1_000
"""Rounding of times in older traces: a microsecond."""
EDGE_LAG_DEFAULT_NS = 2_000
"""Lag of a wait across streams if the trace shows no such wait."""


@dataclass(slots=True)
class KernelEdges:
    """Edges ``source → target`` among one rank's kernels, the external starts, and the unexplained delays (ns)."""

    target: Int64
    source: Int64
    fraction: Float64
    lag: Int64
    external: Int64
    counts: dict[str, int] = field(default_factory=dict)
    unexplained_ns: int = 0
    unexplained: list[tuple[int, int]] = field(default_factory=list)
    """(kernel, ns) of the kernels that start later than every rule explains."""


def infer_kernel_edges(view: RankView, constants: LaunchConstants) -> KernelEdges:
    """Find the waits across streams of one rank (see the module's text)."""
    kernels = view.graph.kernels
    n = len(kernels)
    external = np.full(n, NEVER, np.int64)
    orphan = view.k_call < 0
    # The first orphan of a stream starts at its recorded time; the orphans behind it follow from their durations.
    first_orphan = orphan & ((view.k_previous < 0) | ~orphan[view.k_previous])
    external[first_orphan] = kernels.start_ns[first_orphan]

    explained = explained_start(view, constants)
    # The other orphans' launches were not recorded: a kernel that starts after a pause was launched then.
    paused = orphan & ~first_orphan & (kernels.start_ns - explained > EXPLAINED_NS)
    external[paused] = kernels.start_ns[paused]
    edges: set[tuple[int, int]] = set()
    counts = {"recorded": 0, "structural": 0, "timeline": 0, "contention": 0,
              "external": int(first_orphan.sum() + paused.sum())}
    for name, pairs in (("recorded", _recorded(view)), ("structural", _structural(view))):
        for pair in pairs:
            if pair not in edges:
                edges.add(pair)
                counts[name] += 1
    by_target: dict[int, list[int]] = {}
    for target, source in edges:
        by_target.setdefault(target, []).append(source)

    late = np.nonzero(~orphan & (kernels.start_ns - explained > EXPLAINED_NS))[0]
    contention: list[tuple[int, int, float]] = []
    unexplained: list[tuple[int, int]] = []
    by_end = np.argsort(view.k_end, kind="stable")
    ends = view.k_end[by_end]
    running = _Running(view)
    for k in late.tolist():
        start = int(kernels.start_ns[k])
        sources = by_target.get(k, [])
        if any(start - int(view.k_end[s]) <= JUST_ENDED_NS for s in sources):
            continue
        low, high = np.searchsorted(ends, [start - JUST_ENDED_NS, start + CLOCK_NS + 1])
        near = by_end[low:high]
        near = near[(view.k_stream[near] != view.k_stream[k]) & (view.k_order[near] < view.k_order[k])
                    & (kernels.start_ns[near] < start)]
        if len(near):
            # Ties go to the collective: waits are placed for communication far more often than for compute.
            collective = kernels.kind[near] == KernelKind.COLLECTIVE
            chosen = int((near[collective] if collective.any() else near)[-1])
            edges.add((k, chosen))
            counts["timeline"] += 1
            continue
        blocker = running.blocker(k)
        if blocker >= 0:
            fraction = (start - int(kernels.start_ns[blocker])) / max(int(kernels.duration_ns[blocker]), 1)
            contention.append((k, blocker, fraction))
            counts["contention"] += 1
        elif view.k_previous[k] < 0:
            # Nothing of this stream was recorded before: it was busy when the window opened.
            external[k] = start
            counts["external"] += 1
        else:
            unexplained.append((k, start - int(explained[k])))

    ordered = sorted(edges)
    targets = np.array([t for t, _ in ordered] + [c[0] for c in contention], np.int64)
    origins = np.array([s for _, s in ordered] + [c[1] for c in contention], np.int64)
    fractions = np.array([1.0] * len(ordered) + [c[2] for c in contention], np.float64)
    return KernelEdges(
        target=targets, source=origins, fraction=fractions,
        lag=_edge_lags(view, explained, targets, origins, fractions),
        external=external, counts=counts, unexplained_ns=sum(ns for _, ns in unexplained), unexplained=unexplained,
    )


def explained_start(view: RankView, constants: LaunchConstants) -> Int64:
    """Return the start of each kernel if only launch and stream decide it, by the constants (ns; recorded inputs)."""
    kernels = view.graph.kernels
    kind = kernels.kind
    by_launch = launch_latency(view, constants) + np.where(view.k_in_call, view.k_call_start, view.k_call_end)
    by_launch = np.where(view.k_staged, by_launch - kernels.duration_ns, by_launch)
    by_launch = np.where(view.k_call < 0, LONG_AGO, np.maximum(by_launch, view.k_call_start))
    has_previous = view.k_previous >= 0
    if not len(kind):
        return by_launch
    previous_end = np.where(has_previous, view.k_end[view.k_previous], LONG_AGO)
    gap = constants.gap[kind[view.k_previous], kind, view.k_in_graph.astype(np.int64)]
    return np.maximum(by_launch, np.where(has_previous, previous_end + gap, LONG_AGO))


def launch_latency(view: RankView, constants: LaunchConstants) -> Int64:
    """Return the launch latency of every kernel (ns); the moment it counts from depends on the kernel."""
    kind = view.graph.kernels.kind
    latency = np.where(view.k_in_call, constants.latency_in_call[kind], constants.latency[kind])
    return np.where(view.k_staged, constants.staged_tail, latency).astype(np.int64)


def _recorded(view: RankView) -> list[tuple[int, int]]:
    """Return edges of ``cuda_sync`` rows: the waiting stream's next kernel waits for the last one before the record."""
    graph, kernels = view.graph, view.graph.kernels
    syncs = graph.syncs
    pairs: list[tuple[int, int]] = []
    if not len(kernels) or not len(syncs):
        return pairs
    call_of = {int(c): i for i, c in enumerate(graph.launches.correlation) if c >= 0}
    stream_number = np.array([s for _, s in view.streams])[view.k_stream]
    for row in np.nonzero((syncs.kind == SyncKind.STREAM_WAIT_EVENT) & (syncs.launch >= 0))[0]:
        record = call_of.get(int(syncs.record_correlation[row]), -1)
        before = graph.launches.start_ns[record] if record >= 0 else graph.launches.start_ns[syncs.launch[row]]
        sources = np.nonzero((stream_number == syncs.wait_stream[row]) & (view.k_call_start < before))[0]
        waits_from = graph.launches.start_ns[syncs.launch[row]]
        targets = np.nonzero((stream_number == syncs.stream[row]) & (view.k_call_start > waits_from))[0]
        if not len(sources) or not len(targets):
            continue
        source = int(sources[np.argmax(view.k_order[sources])])
        target = int(targets[np.argmin(view.k_order[targets])])
        if view.k_stream[source] != view.k_stream[target] and _possible(view, target, source):
            pairs.append((target, source))
    return pairs


def _structural(view: RankView) -> list[tuple[int, int]]:
    """Return edges of StreamWaitEvent calls: the thread's next kernel waits for each other stream's last kernel."""
    calls = view.graph.launches
    launched = np.nonzero((view.k_call >= 0) & ~view.k_in_graph)[0]
    waits = np.nonzero(calls.kind == LaunchKind.STREAM_WAIT)[0]
    recorded = view.graph.syncs.launch[view.graph.syncs.record_correlation >= 0]
    waits = np.setdiff1d(waits, recorded)
    if len(view.streams) < 2 or not len(waits) or not len(launched):
        return []
    records = np.sort(calls.start_ns[calls.kind == LaunchKind.EVENT_RECORD])
    by_launch = launched[np.argsort(view.k_call_start[launched], kind="stable")]
    pairs: list[tuple[int, int]] = []
    per_stream = [by_launch[view.k_stream[by_launch] == s] for s in range(len(view.streams))]
    starts = [view.k_call_start[rows] for rows in per_stream]
    thread_of = calls.thread[view.k_call[by_launch]]
    for thread in np.unique(calls.thread[waits]):
        own = by_launch[thread_of == thread]
        own_start = view.k_call_start[own]
        for wait in waits[calls.thread[waits] == thread].tolist():
            when = int(calls.start_ns[wait])
            following = int(np.searchsorted(own_start, when, side="right"))
            if following >= len(own):
                continue
            target = int(own[following])
            # An event recorded by this thread right before the wait is the one waited for.
            at = int(np.searchsorted(records, when)) - 1
            before = int(records[at]) if at >= 0 and when - records[at] < EXPLAINED_NS else when
            for stream, rows in enumerate(per_stream):
                if stream == view.k_stream[target]:
                    continue
                last = int(np.searchsorted(starts[stream], before)) - 1
                if last >= 0 and _possible(view, target, int(rows[last])):
                    pairs.append((target, int(rows[last])))
    return pairs


def _possible(view: RankView, target: int, source: int) -> bool:
    """Return whether the recorded times allow ``target`` to have waited for ``source``, which was launched before
    it."""
    starts = view.graph.kernels.start_ns
    return bool(view.k_end[source] <= starts[target] + CLOCK_NS and starts[source] < starts[target]
                and view.k_order[source] < view.k_order[target])


class _Running:
    """The computing kernels of other streams that run at a time; collectives and copies leave room for others."""

    def __init__(self, view: RankView) -> None:
        kernels = view.graph.kernels
        self.view = view
        self.rows = [np.nonzero((view.k_stream == s) & (kernels.kind == KernelKind.COMPUTE))[0]
                     for s in range(len(view.streams))]

    def blocker(self, kernel: int) -> int:
        """Return the running kernel of another stream that ends soonest after ``kernel`` starts, or -1."""
        kernels = self.view.graph.kernels
        start = kernels.start_ns[kernel]
        best = -1
        for stream, rows in enumerate(self.rows):
            if stream == self.view.k_stream[kernel] or not len(rows):
                continue
            at = int(np.searchsorted(kernels.start_ns[rows], start, side="left")) - 1
            if at < 0 or self.view.k_end[rows[at]] <= start:
                continue
            if best < 0 or self.view.k_end[rows[at]] < self.view.k_end[best]:
                best = int(rows[at])
        return best


def _edge_lags(view: RankView, explained: Int64, target: Int64, source: Int64, fraction: Float64) -> Int64:
    """Return a lag for each edge, ns: the median start - end of edges that delayed a kernel, by kinds of their ends."""
    lag = np.zeros(len(target), np.int64)
    if not len(target):
        return lag
    kernels = view.graph.kernels
    waits = fraction == 1.0
    value = kernels.start_ns[target] - view.k_end[source]
    bound = waits & (value <= JUST_ENDED_NS) & (value >= -CLOCK_NS) & (
        kernels.start_ns[target] - explained[target] > EXPLAINED_NS)
    category = (kernels.kind[source] == KernelKind.COLLECTIVE) * 2 + (kernels.kind[target] == KernelKind.COLLECTIVE)
    for code in range(4):
        rows = waits & (category == code)
        used = rows & bound
        pool = used if used.any() else bound
        lag[rows] = int(np.median(value[pool])) if pool.any() else EDGE_LAG_DEFAULT_NS
    return lag


CUDA_DEPTH = 1_022
"""Seen on V100 and H100 (launches outstanding on one stream saturate at 1,022–1,023)."""
ENTRIES_PER_GRAPH = 9
"""(1,022 - 919) / 11 entries: from the A100 figures in ``LaunchQueue``."""
NEARLY_FULL = 850
"""Entries: the A100 of ``LaunchQueue``, where graphs take several, was full at 908."""
BLOCKED_NS = 30_000
"""A launch call this long with a nearly full queue was blocked."""
RETURNS_WITHIN_NS = 30_000
"""A call that returns at most this long after a kernel's end can have waited for that kernel."""
FEW_BLOCKED = 5
"""Fewer calls that agree on a depth may agree by chance."""
CONTRADICTED_NS = 20_000
"""A call that returned this long before its slot was free did not wait for it (clocks of host and device differ)."""


@dataclass(slots=True)
class LaunchQueue:
    """One rank's queue: entries of each channel, and each call's channel and place.

    A launch call blocks while ``depth`` earlier pieces of work of its channel have not left it, and returns a constant
    lag after one of them does. Entries leave in the order in which they were submitted. CUDA gives each stream its own
    channel, or all streams one where ``CUDA_DEVICE_MAX_CONNECTIONS`` is 1; the calls that blocked show which. A CUDA
    graph takes several entries: on an A100 the limit was reached at about 908–930 launches plus 9–13 graphs instead of
    1,022 launches.

    Attributes:
        kernel: kernel row of every entry, channel by channel in launch order (a graph's last kernel several times).
        count: entries of each channel.
        channel: channel of each call of ``launches``; -1 for calls that submit nothing, and for calls that returned
            although the inferred queue was full.
        before_call: entries of its channel submitted before each call; -1 for calls that submit nothing.
        depth: entries a channel holds; 0 if unbounded.
        source: where the depth comes from: "measured", "default" or "unbounded".
        cost: cost of every call without blocking by the queue (ns).
        blocked: number of calls that the queue blocked.
        contradicted: number of calls that returned although the inferred queue was full.
        shared: whether all streams share one channel.
    """

    kernel: Int64
    count: Int64
    channel: Int64
    before_call: Int64
    depth: int
    source: str
    cost: Int64
    blocked: int = 0
    contradicted: int = 0
    shared: bool = False


def infer_launch_queue(view: RankView, cost: Int64, constants: LaunchConstants) -> LaunchQueue:
    """Measure the queue's depth where it filled, and take its blocking out of the launch calls' costs."""
    own = _Channels(view, np.arange(len(view.streams)))
    together = _Channels(view, np.zeros(len(view.streams), np.int64)) if len(view.streams) > 1 else own
    # Where both readings explain the blocked calls, the reading nearer to the hardware's depth is used.
    shared = together.agreeing > own.agreeing + FEW_BLOCKED or (
        together.agreeing > own.agreeing - FEW_BLOCKED
        and abs(together.depth - CUDA_DEPTH) < abs(own.depth - CUDA_DEPTH))
    channels = together if shared else own
    return channels.queue(cost, constants, shared=shared)


class _Channels:
    """The queue of one rank if streams share channels in a given way."""

    def __init__(self, view: RankView, channel_of: Int64) -> None:
        self.view = view
        self.entries, self.count, self.channel, self.before = _entries(view, channel_of)
        calls = view.graph.launches
        self.calls = np.nonzero(self.channel >= 0)[0]
        bounds = np.concatenate([[0], np.cumsum(self.count)])
        self.ends = [view.k_end[self.entries[low:high]] for low, high in itertools.pairwise(bounds)]
        outstanding, since = self._unfinished(calls.start_ns), np.full(len(self.calls), RETURNS_WITHIN_NS + 1)
        # Only the end of a piece of the channel's work just before the return shows that the queue held the call.
        for rows, ends in self._by_channel():
            returned = view.c_end[self.calls[rows]]
            ordered = np.sort(ends)
            at = np.searchsorted(ordered, returned, side="right") - 1
            since[rows] = np.where(at >= 0, returned - ordered[np.maximum(at, 0)], RETURNS_WITHIN_NS + 1)
        held = (outstanding >= NEARLY_FULL) & (calls.duration_ns[self.calls] > BLOCKED_NS) & (
            since <= RETURNS_WITHIN_NS)
        values, counts = np.unique(outstanding[held], return_counts=True)
        # Entries clearly unfinished when their call returned: a channel that never blocked a call is deeper than that.
        reached = self._unfinished(view.c_end + CONTRADICTED_NS)
        usual = int(values[np.argmax(counts)]) if len(values) else 0
        self.agreeing = int((np.abs(outstanding[held] - usual) <= 1).sum())
        self.measured = self.agreeing >= max(FEW_BLOCKED, int((reached >= usual).sum()))
        self.depth = usual if self.measured else max(CUDA_DEPTH, int(reached.max(initial=0)) + 1)

    def _by_channel(self) -> list[tuple[Int64, Int64]]:
        """Return the places of each channel's calls within ``calls``, and its entries' ends."""
        own = self.channel[self.calls]
        return [(np.nonzero(own == c)[0], ends) for c, ends in enumerate(self.ends)]

    def _unfinished(self, when: Int64) -> Int64:
        """Return the entries before each call that are unfinished at ``when`` (one time for each of ``launches``)."""
        found = np.zeros(len(self.calls), np.int64)
        for rows, ends in self._by_channel():
            at = self.calls[rows]
            # Every entry that ended by then was submitted by then, so a count of all ends suffices.
            found[rows] = self.before[at] - np.searchsorted(np.sort(ends), when[at], side="right")
        return found

    def queue(self, cost: Int64, constants: LaunchConstants, *, shared: bool) -> LaunchQueue:
        """Return the queue for these channels, its blocking taken out of ``cost``; fits ``constants.queue_return``."""
        calls, strings = self.view.graph.launches, self.view.graph.strings
        names = np.unique(calls.name[self.calls]).tolist()
        unbounded = not self.measured and any(strings[name].startswith("hip") for name in names)
        found = LaunchQueue(
            self.entries, self.count, self.channel, self.before, 0 if unbounded else self.depth,
            "unbounded" if unbounded else "measured" if self.measured else "default", cost.copy(), shared=shared)
        if unbounded:
            return found
        freed = np.full(len(self.calls), NEVER, np.int64)
        for rows, ends in self._by_channel():
            freed[rows] = slot_freed(ends, self.before[self.calls[rows]], self.depth)
        returned = self.view.c_end[self.calls]
        contradicted = freed > returned + CONTRADICTED_NS
        found.contradicted = int(contradicted.sum())
        found.channel = self.channel.copy()
        found.channel[self.calls[contradicted]] = NONE
        if self.measured:
            self._take_out(found, freed, (freed > calls.start_ns[self.calls]) & ~contradicted, constants)
        return found

    def _take_out(self, found: LaunchQueue, freed: Int64, blocked: Bool,
                  constants: LaunchConstants) -> None:
        """Replace the duration of each blocked call by the usual cost of calls of its name."""
        view, calls = self.view, self.view.graph.launches
        lag = (view.c_end[self.calls] - freed)[blocked]
        plausible = (lag >= 0) & (lag <= RETURNS_WITHIN_NS)
        constants.queue_return = int(np.median(lag[plausible])) if plausible.any() else RETURN_DEFAULT_NS
        free_calls = np.zeros(len(calls), np.bool_)
        free_calls[self.calls[~blocked]] = True
        blocked_calls = self.calls[blocked]
        for name in np.unique(calls.name[blocked_calls]).tolist():
            peers = free_calls & (calls.name == name)
            base = int(np.median(calls.duration_ns[peers])) if peers.any() else constants.queue_return
            constants.base_cost[view.graph.string(name)] = base
            mine = blocked_calls[calls.name[blocked_calls] == name]
            found.cost[mine] = np.minimum(base, calls.duration_ns[mine])
        found.blocked = len(blocked_calls)


def _entries(view: RankView, channel_of: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Return the queue entries channel by channel in launch order, and their number by channel. Also return the channel
    of every submitting call, and the number of the channel's entries before that call.

    Args:
        view: The rank.
        channel_of: Channel of each stream.
    """
    calls = view.graph.launches
    order = np.argsort(view.k_order, kind="stable")
    call = view.k_call[order]
    # Each piece of work has one entry, but a graph's kernels share a few: keep the last kernel to end of each graph.
    in_graph = view.k_in_graph[order]
    single = order[~in_graph]
    last_of: dict[int, int] = {}
    for k, c in zip(order[in_graph].tolist(), call[in_graph].tolist(), strict=True):
        if c not in last_of or view.k_end[k] >= view.k_end[last_of[c]]:
            last_of[c] = k
    graphs = np.repeat(np.array(list(last_of.values()), np.int64), ENTRIES_PER_GRAPH)
    entries = np.concatenate([single, graphs]).astype(np.int64)
    entries = entries[np.argsort(view.k_order[entries], kind="stable")]
    used, of_entry = np.unique(channel_of[view.k_stream[entries]], return_inverse=True)
    entries, of_entry = (column[np.argsort(of_entry, kind="stable")] for column in (entries, of_entry))
    count = np.bincount(of_entry, minlength=len(used)).astype(np.int64)

    channel, before = (np.full(len(calls), NONE, np.int64) for _ in range(2))
    owners, first = np.unique(view.k_call[entries], return_index=True)
    channel[owners[owners >= 0]] = of_entry[first[owners >= 0]]
    lost = (calls.kind >= LaunchKind.KERNEL) & (calls.kind <= LaunchKind.GRAPH) & (calls.parent == NONE) & (channel < 0)
    channel[lost] = _nearest_channel(view, channel, np.nonzero(lost)[0])
    submitted = np.split(view.k_queued[entries], np.cumsum(count)[:-1])
    for number, starts in enumerate(submitted):
        mine = channel == number
        before[mine] = np.searchsorted(starts, calls.start_ns[mine], side="left")
    return entries, count, channel, before


def _nearest_channel(view: RankView, channel: Int64, lost: Int64) -> Int64:
    """Return the channel of calls whose work has no record: that of their thread's previous launch, else its first."""
    calls = view.graph.launches
    found = np.full(len(lost), NONE, np.int64)
    known = np.nonzero(channel >= 0)[0]
    for thread in np.unique(calls.thread[lost]).tolist():
        mine = np.nonzero(calls.thread[lost] == thread)[0]
        own = known[calls.thread[known] == thread]
        if len(own):
            own = own[np.argsort(calls.start_ns[own], kind="stable")]
            at = np.searchsorted(calls.start_ns[own], calls.start_ns[lost[mine]], side="right") - 1
            found[mine] = channel[own[np.maximum(at, 0)]]
    return found


def slot_freed(ends: Int64, before: Int64, depth: int) -> Int64:
    """Return when a channel had room after the first ``before`` entries: when the first ``before - depth + 1`` entries
    have left."""
    leaves = before - depth
    left = np.maximum.accumulate(ends) if len(ends) else ends
    freed = np.full(len(before), NEVER, np.int64)
    full = leaves >= 0
    freed[full] = left[leaves[full]]
    return freed
