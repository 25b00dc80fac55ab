"""The bounded launch queue: how deep it is, which streams share one, and which calls it blocked.

A launch call blocks while ``depth`` earlier pieces of work of its channel have not left it, and returns a constant lag
after one of them does; entries leave in the order they were submitted in. CUDA gives each stream a channel of its own,
or one to all where ``CUDA_DEVICE_MAX_CONNECTIONS`` is 1; which of the two it was is read off the calls that blocked. A
CUDA graph takes several entries: on an A100 the limit was reached at about 908–930 launches plus 9–13 graphs instead of
1,022 launches.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from graph_predictor.simulation.program import NEVER
from graph_predictor.simulation.rank_view import RankView
from kernel_models.launch_constants import RETURN_DEFAULT_NS, LaunchConstants
from tracer.arrays import Bool, Int64
from tracer.graph import NONE, LaunchKind

CUDA_DEPTH = 1_022
"""Seen on V100 and H100 (launches outstanding on one stream saturate at 1,022–1,023)."""
ENTRIES_PER_GRAPH = 9
"""(1,022 - 919) / 11 entries: from the A100 figures above."""
NEARLY_FULL = 850
BLOCKED_NS = 30_000
"""A launch call this long with a nearly full queue was blocked."""
RETURNS_WITHIN_NS = 30_000
FEW_BLOCKED = 5
CONTRADICTED_NS = 20_000
"""A call that returned this long before its slot was free did not wait for it (clocks of host and device differ)."""


@dataclass(slots=True)
class LaunchQueue:
    """One rank's queue: entries of each channel, and each call's channel and place.

    Attributes:
        kernel: kernel row of every entry, channel by channel in launch order (a graph's last kernel several times).
        count: entries of each channel.
        channel: of each call of ``launches``; -1 for calls that submit nothing, and for those whose wait for a slot the
            recording contradicts.
        before_call: entries of its channel submitted before each call; -1 for calls that submit nothing.
        depth: entries a channel holds; 0 if unbounded.
        source: where the depth comes from: "measured", "default" or "unbounded".
        cost: cost of every call, with blocking by the queue taken out (ns).
        blocked: how many calls the queue blocked.
        contradicted: how many calls returned although the queue was full by this account.
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
    # Where both readings explain the blocked calls, the one nearer to the depth of the hardware is right.
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
        # Clearly unfinished entries of a call that had returned: a channel that never held a call holds more than that.
        reached = self._unfinished(view.c_end + CONTRADICTED_NS)
        usual = int(values[np.argmax(counts)]) if len(values) else 0
        self.agreeing = int((np.abs(outstanding[held] - usual) <= 1).sum())
        self.measured = self.agreeing >= max(FEW_BLOCKED, int((reached >= usual).sum()))
        self.depth = usual if self.measured else max(CUDA_DEPTH, int(reached.max(initial=0)) + 1)

    def _by_channel(self) -> list[tuple[Int64, Int64]]:
        """Places of each channel's calls within ``calls``, and its entries' ends."""
        own = self.channel[self.calls]
        return [(np.nonzero(own == c)[0], ends) for c, ends in enumerate(self.ends)]

    def _unfinished(self, when: Int64) -> Int64:
        """Entries submitted before each call and unfinished at its time (``when`` has a row a call of ``launches``)."""
        found = np.zeros(len(self.calls), np.int64)
        for rows, ends in self._by_channel():
            at = self.calls[rows]
            # Every entry that ended by then was submitted by then, so a count of all ends suffices.
            found[rows] = self.before[at] - np.searchsorted(np.sort(ends), when[at], side="right")
        return found

    def queue(self, cost: Int64, constants: LaunchConstants, *, shared: bool) -> LaunchQueue:
        """The queue of this reading, with its blocking taken out of ``cost``; fits ``constants.queue_return``."""
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
        """Put the usual cost of its name in place of each blocked call's duration."""
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
    """Queue entries channel by channel in launch order, how many each channel has, every submitting call's channel, and
    how many entries of it come before that call.

    Args:
        view: The rank.
        channel_of: Channel of each stream.
    """
    calls = view.graph.launches
    order = np.argsort(view.k_order, kind="stable")
    call = view.k_call[order]
    # One entry a piece of work, but a graph's kernels share a few: keep the last kernel to end of each graph call.
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
    """Channel of calls whose work left no record: that of their thread's launch before, else of its first one."""
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
    """Return when a channel had room after the first ``before`` entries: the first ``before - depth + 1`` of them had
    left."""
    leaves = before - depth
    left = np.maximum.accumulate(ends) if len(ends) else ends
    freed = np.full(len(before), NEVER, np.int64)
    full = leaves >= 0
    freed[full] = left[leaves[full]]
    return freed
