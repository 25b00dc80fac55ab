"""The bounded launch queue: how deep it is, and which calls it blocked.

A launch call blocks while ``depth`` earlier pieces of device work of its rank are unfinished, and returns a constant
lag after one of them ends. A CUDA graph takes several entries: with graphs in flight on an A100 the limit was reached
at about 908–930 launches plus 9–13 graphs instead of 1,022 launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.program import Int64
from graph_predictor.rank_view import RankView
from kernel_models.launch_constants import RETURN_DEFAULT_NS, LaunchConstants
from tracer.graph import NONE, LaunchKind

CUDA_DEPTH = 1_022
"""Seen on V100 (outstanding launches saturate at 1,022–1,023)."""
ENTRIES_PER_GRAPH = 9
"""(1,022 - 919) / 11 entries: from the A100 figures above."""
NEARLY_FULL = 850
BLOCKED_NS = 30_000
"""A launch call this long with a nearly full queue was blocked."""
RETURNS_WITHIN_NS = 30_000
FEW_BLOCKED = 5


@dataclass(slots=True)
class LaunchQueue:
    """Entries in launch order (kernel rows; a graph's last kernel several times) and each call's place."""

    kernel: Int64
    before_call: Int64
    """Entries submitted before each call of ``launches``; -1 for calls that submit nothing."""
    depth: int
    """0: unbounded."""
    source: str
    """Where the depth comes from: "measured", "default" or "unbounded"."""
    cost: Int64
    """Cost of every call, with blocking by the queue taken out (ns)."""
    blocked: int


def infer_launch_queue(view: RankView, cost: Int64, constants: LaunchConstants) -> LaunchQueue:
    """Measure the queue's depth where it filled, and take its blocking out of the launch calls' costs."""
    graph = view.graph
    calls = graph.launches
    entries, before_call = _entries(view)
    ends = view.k_end[entries]
    launching = np.nonzero(before_call >= 0)[0]
    launching = launching[np.argsort(calls.start_ns[launching], kind="stable")]
    hip = any(name.startswith("hip") for name in {graph.string(int(c)) for c in np.unique(calls.name)})
    outstanding = _outstanding(ends, before_call[launching], calls.start_ns[launching])
    # Only a device-work end just before the return shows that the queue, not something else, held the call.
    sorted_ends = np.sort(ends)
    returned = view.c_end[launching]
    at = np.searchsorted(sorted_ends, returned, side="right") - 1
    since = np.where(at >= 0, returned - sorted_ends[np.maximum(at, 0)], RETURNS_WITHIN_NS + 1) if len(
        sorted_ends) else np.full(len(launching), RETURNS_WITHIN_NS + 1)
    held = (outstanding >= NEARLY_FULL) & (calls.duration_ns[launching] > BLOCKED_NS) & (since <= RETURNS_WITHIN_NS)
    cost = cost.copy()
    if held.sum() >= FEW_BLOCKED:
        values, counts = np.unique(outstanding[held], return_counts=True)
        depth, source = int(values[np.argmax(counts)]), "measured"
    elif hip:
        return LaunchQueue(entries, before_call, 0, "unbounded", cost, 0)
    else:
        depth, source = max(CUDA_DEPTH, int(outstanding.max(initial=0)) + 1), "default"
        return LaunchQueue(entries, before_call, depth, source, cost, 0)

    freed = slot_freed(ends, before_call[launching], depth)
    blocked = freed > calls.start_ns[launching]
    lag = returned[blocked] - freed[blocked]
    plausible = (lag >= 0) & (lag <= RETURNS_WITHIN_NS)
    constants.queue_return = int(np.median(lag[plausible])) if plausible.any() else RETURN_DEFAULT_NS
    free_calls = np.zeros(len(calls), np.bool_)
    free_calls[launching[~blocked]] = True
    blocked_calls = launching[blocked]
    for name in np.unique(calls.name[blocked_calls]).tolist():
        peers = free_calls & (calls.name == name)
        base = int(np.median(calls.duration_ns[peers])) if peers.any() else constants.queue_return
        constants.base_cost[graph.string(name)] = base
        mine = blocked_calls[calls.name[blocked_calls] == name]
        cost[mine] = np.minimum(base, calls.duration_ns[mine])
    return LaunchQueue(entries, before_call, depth, source, cost, int(blocked.sum()))


def _entries(view: RankView) -> tuple[Int64, Int64]:
    """Queue entries in launch order, and how many come before each submitting call."""
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
    before = np.full(len(calls), NONE, np.int64)
    owners = np.unique(view.k_call[entries][view.k_call[entries] >= 0])
    starts = view.k_queued[entries]
    before[owners] = np.searchsorted(starts, calls.start_ns[owners], side="left")
    lost = (calls.kind >= LaunchKind.KERNEL) & (calls.kind <= LaunchKind.GRAPH) & (calls.parent == NONE) & (before < 0)
    before[lost] = np.searchsorted(starts, calls.start_ns[lost], side="left")
    return entries, before


def _outstanding(ends: Int64, before: Int64, when: Int64) -> Int64:
    """Entries submitted before each call and unfinished when it began (calls in launch order)."""
    # Every entry that ended by then was submitted by then, so a count of all ends suffices.
    return before - np.searchsorted(np.sort(ends), when, side="right")


def slot_freed(ends: Int64, before: Int64, depth: int) -> Int64:
    """When at most ``depth - 1`` of the first ``before`` entries were left unfinished (calls in launch order)."""
    import heapq

    freed = np.full(len(before), np.iinfo(np.int64).min // 2, np.int64)
    heap: list[int] = []
    last, at = int(freed[0]) if len(freed) else 0, 0
    values = ends.tolist()
    for i, count in enumerate(before.tolist()):
        while at < count:
            heapq.heappush(heap, values[at])
            if len(heap) > depth - 1:
                last = max(last, heapq.heappop(heap))
            at += 1
        freed[i] = last
    return freed
