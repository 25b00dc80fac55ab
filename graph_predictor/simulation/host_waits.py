"""Work that blocking calls wait for, and their own cost when nothing has to be waited for.

Call by call, what the device was doing tells the two apart. A call that returned just after the end of the work it
waited for did nothing of its own: it keeps a base cost (the median of its unblocked peers by name) and returns a
constant lag after that work. One that went on for longer did its own work then, as freeing memory does, which takes as
long as it took whatever it waited for before::

    call      |== waits ==|lag|                    call      |== waits ==|== own work, kept as recorded ==|
    stream    ### work ###                         stream    ### work ###"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.simulation.device_waits import CLOCK_NS, RETURNS_WITHIN_NS
from graph_predictor.simulation.ranks import LONG_AGO, RankView
from kernel_models.launch_constants import RETURN_DEFAULT_NS, LaunchConstants
from tracer.arrays import Bool, Int64
from tracer.graph import NONE, ExecutionGraph, KernelKind, LaunchKind, SyncKind

IMPLICIT_SYNCS = ("cudaFree", "hipFree", "hipHostFree", "hipFreeHost")
"""Frees that wait for all work of the device (CUDA programming guide, implicit synchronization; HIP's reference)."""
ALLOCATING = ("cudaMalloc", "cudaMallocHost", "cudaHostAlloc", "cudaFreeHost", "cuMemAlloc_v2", "hipMalloc",
              "hipExtMallocWithFlags", "hipHostMalloc", "hipHostAlloc")
"""Calls that may wait for the device or for another thread's call, and mostly do not."""
WAITING_SHARE = 0.5
"""A call waited for at least this share of it, or nothing says so: of 1,460 hipMalloc on an MI300X, with a median of
8 µs, eleven took 30–40 µs, and a kernel ended beside four of those, all in their first 6 µs."""


@dataclass(slots=True)
class AllocationWaits:
    """What calls of several threads that allocate waited for. A row a call of ``launches``.

    The driver serves one thread at a time.

    ::

        thread 1      |==== cudaMalloc ====|
        thread 2             |=== waits ===|== own work ==|

    Such calls seldom wait, and nothing in a recording says that one did. A wait is claimed only where the rest of the
    call is nearer its usual time, by its name, than the whole of it is, and at most half of it.
    """

    holder: Int64
    """The other thread's call that it waited for, or -1."""
    begins: Int64
    """When its own work began (ns of the window): its start, or the holder's end."""
    usual: dict[int, int]
    """Median duration (ns) of the calls of ``ALLOCATING`` that cannot have waited, by code of their name."""

    def rest_is_usual(self, name: int, whole_ns: int, rest_ns: int) -> bool:
        """Return whether the rest of a call after a wait is nearer (by ratio) its usual time than the whole is."""
        waited = whole_ns - rest_ns >= WAITING_SHARE * whole_ns
        return waited and name in self.usual and whole_ns * rest_ns > self.usual[name] ** 2


def named(graph: ExecutionGraph, names: tuple[str, ...]) -> Bool:
    """Return which calls of ``graph.launches`` have one of these names."""
    code = np.array([text in names for text in graph.strings], np.bool_)
    found: Bool = code[graph.launches.name] if code.any() else np.zeros(len(graph.launches), np.bool_)
    return found


def allocation_waits(view: RankView, taking_part: Bool) -> AllocationWaits:
    """Find the calls that waited for another thread's allocation or free.

    Args:
        view: one rank.
        taking_part: which calls are items of the program; the others decide nothing.

    A call waits for the last one that began before it and ended between its begin and its end.
    """
    calls = view.graph.launches
    found = AllocationWaits(np.full(len(calls), NONE, np.int64), calls.start_ns.copy(), {})
    top = taking_part & (calls.parent == NONE)
    allocating = np.flatnonzero(named(view.graph, ALLOCATING) & top)
    holders = np.flatnonzero(named(view.graph, ALLOCATING + IMPLICIT_SYNCS) & top)
    begin, end, thread = calls.start_ns[holders], view.c_end[holders], calls.thread[holders]
    met: dict[int, Int64] = {}
    for call in allocating.tolist():
        met[call] = np.flatnonzero((begin < calls.start_ns[call]) & (end > calls.start_ns[call])
                                   & (thread != calls.thread[call]))
    alone = np.array([not len(met[call]) for call in allocating.tolist()], np.bool_)
    free = allocating[alone & ~_after_a_kernel(view, allocating)]
    for name in np.unique(calls.name[free]).tolist():
        found.usual[name] = int(np.median(calls.duration_ns[free[calls.name[free] == name]]))
    for call in allocating.tolist():
        before = met[call][end[met[call]] < view.c_end[call]]
        if len(before):
            last = int(before[np.argmax(end[before])])
            rest = int(view.c_end[call] - end[last])
            if found.rest_is_usual(int(calls.name[call]), int(calls.duration_ns[call]), rest):
                found.holder[call], found.begins[call] = holders[last], end[last]
    return found


def _after_a_kernel(view: RankView, call: Int64) -> Bool:
    """Return which calls returned just after a kernel that ended beside them, and not only as they are short."""
    ends = np.sort(view.k_end)
    begin, returned = view.graph.launches.start_ns[call], view.c_end[call]
    recent = np.searchsorted(ends, returned, side="right") > np.searchsorted(
        ends, np.maximum(begin, returned - RETURNS_WITHIN_NS), side="left")
    found: Bool = recent & (returned - begin > RETURNS_WITHIN_NS)
    return found


CLOCKS_DIFFER_NS = 20_000
"""Host and device clocks can disagree: on an MI300X a device sync returned 8 µs before the last kernel's end."""
BLOCKED_COST_DEFAULT_NS = 3_000
"""Cost of a blocking call none of whose name was seen unblocked."""
FREE_SYNC_NS = 40_000
"""A synchronising call with nothing to wait for costs up to this (hipDeviceSynchronize on MI300: 31–33 µs)."""


@dataclass(slots=True)
class HostWaits:
    """Edges kernel → call's return, and every top-level call's unblocked cost (ns)."""

    call: Int64
    kernel: Int64
    lag: Int64
    cost: Int64
    """A row a call of ``launches``."""
    blocked: int
    """Number of calls that blocked on device work in the recording."""
    unexplained_ns: int
    """Time in synchronising calls of more than a plausible cost that no kernel's end explains."""


def waiting_calls(graph: ExecutionGraph) -> Bool:
    """Return which calls of ``graph.launches`` wait for the device, whether or not it was at work."""
    found: Bool = (graph.launches.kind == LaunchKind.BLOCKING_SYNC) | named(graph, IMPLICIT_SYNCS)
    return found


def infer_host_waits(view: RankView, constants: LaunchConstants, allocations: AllocationWaits) -> HostWaits:
    """Find what every blocking call waits for; fits ``constants.returns`` and ``constants.base_cost``.

    Time that a call waited for another thread's (``allocations``) is in no cost.
    """
    calls = view.graph.launches
    waits: dict[int, list[int]] = {}
    for k in np.nonzero(view.k_in_call)[0].tolist():
        call = int(view.k_call[k])
        if view.k_end[k] <= view.c_end[call] + CLOCKS_DIFFER_NS:
            waits.setdefault(call, []).append(k)
    index = _StreamIndex(view)
    for call in np.nonzero(waiting_calls(view.graph) & (calls.parent == NONE))[0].tolist():
        found = [k for k in _awaited(view, index, call) if view.k_end[k] <= view.c_end[call] + CLOCKS_DIFFER_NS]
        if found:
            waits.setdefault(call, []).extend(found)
    for call in np.nonzero(named(view.graph, ALLOCATING) & (calls.parent == NONE))[0].tolist():
        if call not in waits and (found := _drained(view, index, call, allocations)):
            waits[call] = found

    cost = view.c_end - allocations.begins
    lags: dict[str, list[int]] = {}
    blocked_calls: list[tuple[int, str]] = []
    own_work: dict[int, int] = {}
    for call, found in waits.items():
        last = max(int(view.k_end[k]) for k in found)
        own = int(view.c_end[call]) - max(last, int(allocations.begins[call]))
        if own > RETURNS_WITHIN_NS:
            own_work[call] = cost[call] = own
        if last > allocations.begins[call]:
            name = view.call_name(call)
            blocked_calls.append((call, name))
            if call not in own_work:
                lags.setdefault(name, []).append(int(view.c_end[call]) - last)
    constants.returns = {name: int(np.median(values)) for name, values in lags.items()}
    blocked = {call for call, _ in blocked_calls}
    for call, name in blocked_calls:
        if call in own_work:
            continue
        if name not in constants.base_cost:
            peers = np.nonzero(calls.name == calls.name[call])[0]
            free = [int(calls.duration_ns[p]) for p in peers.tolist() if p not in blocked]
            ceiling = max(constants.returns[name], 0)
            constants.base_cost[name] = min(int(np.median(free)), ceiling) if free else min(
                BLOCKED_COST_DEFAULT_NS, ceiling)
        cost[call] = min(constants.base_cost[name], int(calls.duration_ns[call]))

    call_of = np.array([c for c, found in waits.items() for _ in found], np.int64)
    kernel_of = np.array([k for found in waits.values() for k in found], np.int64)
    lag_of = np.array([constants.returns.get(view.call_name(int(c)), RETURN_DEFAULT_NS) for c in call_of], np.int64)
    # A call that found its work done returned when it did: its edge must not push it later than recorded.
    if len(call_of):
        lag_of = np.where(np.isin(call_of, list(blocked)), lag_of,
                          np.minimum(lag_of, view.c_end[call_of] - view.k_end[kernel_of]))
        lag_of = np.array([own_work.get(int(c), lag) for c, lag in zip(call_of, lag_of, strict=True)], np.int64)
    behind = _behind_the_stream(view)
    cost[view.k_call[behind]] = feeding = (view.k_call_end - view.k_end[view.k_previous])[behind]
    call_of = np.concatenate([call_of, view.k_call[behind]])
    kernel_of = np.concatenate([kernel_of, view.k_previous[behind]])
    lag_of = np.concatenate([lag_of, feeding])
    long_syncs = (calls.kind == LaunchKind.BLOCKING_SYNC) & (calls.parent == NONE) & (
        calls.duration_ns > FREE_SYNC_NS)
    # A call that only waits has no work of its own: what no kernel's end explains it waited for, or did, unseen.
    alone = [int(c) for c in np.nonzero(long_syncs)[0] if int(c) not in blocked or int(c) in own_work]
    beyond = np.array([own_work.get(c, int(calls.duration_ns[c])) - FREE_SYNC_NS for c in alone], np.int64)
    return HostWaits(call=call_of, kernel=kernel_of, lag=lag_of, cost=cost, blocked=len(blocked) + len(behind),
                     unexplained_ns=int(np.maximum(beyond, 0).sum()))


def _behind_the_stream(view: RankView) -> Int64:
    """Staged copies whose call waited for its stream: what was there before ended during the call.

    ::

        call      |== waits ==|== feeds the copy ==|
        stream    ## before ##.######## copy ########
    """
    if not len(view.k_staged):
        return np.zeros(0, np.int64)
    before = view.k_end[view.k_previous]
    starts = view.graph.kernels.start_ns
    return np.nonzero(view.k_staged & (view.k_previous >= 0) & (before > view.k_call_start)
                      & (before < view.k_call_end) & (starts >= before - CLOCK_NS))[0]


class _StreamIndex:
    """The last kernel of each stream launched before a time."""

    def __init__(self, view: RankView) -> None:
        self.view = view
        self.rows = []
        self.launched = []
        for stream in range(len(view.streams)):
            rows = np.nonzero(view.k_stream == stream)[0]
            rows = rows[np.argsort(view.k_order[rows], kind="stable")]
            self.rows.append(rows)
            self.launched.append(view.k_queued[rows])

    def last(self, stream: int, before: int, returned: int) -> int:
        """Row of the kernel, or -1; orphans that outlast ``returned`` were launched later, unseen."""
        at = int(np.searchsorted(self.launched[stream], before, side="left")) - 1
        rows, view = self.rows[stream], self.view
        while at >= 0 and view.k_call[rows[at]] < 0 and view.k_end[rows[at]] > returned + CLOCK_NS:
            at -= 1
        return int(rows[at]) if at >= 0 else NONE


def _awaited(view: RankView, index: _StreamIndex, call: int) -> list[int]:
    """Kernels whose end a synchronising call waits for."""
    graph = view.graph
    calls = graph.launches
    name, begin, returned = view.call_name(call), int(calls.start_ns[call]), int(view.c_end[call])
    row = np.nonzero(graph.syncs.launch == call)[0]
    streams = range(len(view.streams))
    if "Device" in name or "Ctx" in name or name in IMPLICIT_SYNCS:
        return [k for s in streams if (k := index.last(s, begin, returned)) >= 0]
    if "Stream" in name:
        stream = _sync_stream(view, call, row)
        if stream >= 0:
            k = index.last(stream, begin, returned)
            return [k] if k >= 0 else []
    if "Event" in name and len(row) and graph.syncs.kind[row[0]] == SyncKind.EVENT_SYNC:
        record = np.nonzero(calls.correlation == graph.syncs.record_correlation[row[0]])[0]
        before = int(calls.start_ns[record[0]]) if len(record) else begin
        numbers = [n for _, n in view.streams]
        if int(graph.syncs.wait_stream[row[0]]) in numbers:
            k = index.last(numbers.index(int(graph.syncs.wait_stream[row[0]])), before, returned)
            return [k] if k >= 0 else []
    # Nothing says what it waits for: a kernel launched before it that ended just before it returned.
    near = np.nonzero((view.k_end <= returned) & (view.k_end > max(begin, returned - RETURNS_WITHIN_NS))
                      & (view.k_call_start < begin))[0]
    return [int(near[np.argmax(view.k_end[near])])] if len(near) else []


def _drained(view: RankView, index: _StreamIndex, call: int, allocations: AllocationWaits) -> list[int]:
    """Kernels that an allocating call waited for: it returned just after the device had run out of work."""
    begin, returned = int(allocations.begins[call]), int(view.c_end[call])
    streams = range(len(view.streams))
    found = [k for s in streams if (k := index.last(s, int(view.graph.launches.start_ns[call]), returned)) >= 0]
    last = max((int(view.k_end[k]) for k in found), default=begin)
    rest = returned - last
    waited = begin < last < returned and rest <= RETURNS_WITHIN_NS < returned - begin and allocations.rest_is_usual(
        int(view.graph.launches.name[call]), returned - begin, rest)
    return found if waited else []


def _sync_stream(view: RankView, call: int, row: Int64) -> int:
    """Stream index a cudaStreamSynchronize waits for, or -1: as recorded, else that of the launch just before it."""
    graph = view.graph
    if len(row):
        number = int(graph.syncs.stream[row[0]])
        for stream, (_, own) in enumerate(view.streams):
            if own == number:
                return stream
    calls, kernels = graph.launches, graph.kernels
    before = np.nonzero((view.k_call >= 0) & (view.k_call_start < calls.start_ns[call])
                        & (view.k_call_start > LONG_AGO))[0]
    before = before[calls.thread[view.k_call[before]] == calls.thread[call]]
    if not len(before):
        return NONE
    last = int(before[np.argmax(view.k_order[before])])
    same_op = calls.op[view.k_call[last]] == calls.op[call]
    return int(view.k_stream[last]) if same_op or kernels.kind[last] == KernelKind.MEMCPY else NONE
