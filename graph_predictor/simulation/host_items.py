"""Host threads as items: calls with what they wait for, step markers, hand-overs between threads, loader waits.

A blocking call waits for work, and also has a cost of its own. The device's work at that time separates the two, call
by call. A call that returned just after the end of its awaited work did no work of its own. It keeps a base cost (the
median of unblocked calls of its name) and returns a constant lag after that work. A call that continued for longer did
work of its own afterwards, such as freeing memory. This work keeps its recorded time for any length of the wait::

    call      |== waits ==|lag|                    call      |== waits ==|== own work, kept as recorded ==|
    stream    ### work ###                         stream    ### work ###

A thread's time between two items is *work*: operators' own time, Python, allocator. Three kinds of time are not work.
They are subtracted here, and the simulator computes them again from dependencies:

* the caller of ``backward()`` waits while the autograd thread works; ::

      main      ──ops──┐ hand-over                      ┌─resume──ops──
      autograd         └─resume──backward ops──hand-over┘

* the autograd thread waits between two backward passes;
* a multi-process data loader's ``__next__`` waits for a batch, whose arrival is an external event.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.simulation.device_waits import CLOCK_NS, RETURNS_WITHIN_NS
from graph_predictor.simulation.program import NEVER, ItemKind
from graph_predictor.simulation.ranks import LONG_AGO, RankView, running_maximum
from kernel_models.host.segments import RETURN_DEFAULT_NS, LaunchConstants
from tracer.arrays import Bool, Int8, Int32, Int64
from tracer.columns import covered, union
from tracer.graph import NONE, ExecutionGraph, KernelKind, LaunchKind, OpKind, Phase, SyncKind

IMPLICIT_SYNCS = ("cudaFree", "hipFree", "hipHostFree", "hipFreeHost")
"""Frees that wait for all work of the device (CUDA programming guide, implicit synchronization; HIP's reference)."""
ALLOCATING = ("cudaMalloc", "cudaMallocHost", "cudaHostAlloc", "cudaFreeHost", "cuMemAlloc_v2", "hipMalloc",
              "hipExtMallocWithFlags", "hipHostMalloc", "hipHostAlloc")
"""Calls that may wait for the device or for another thread's call, and mostly do not."""
WAITING_SHARE = 0.5
"""Least share of an allocating call that a claimed wait takes. Of 1,460 hipMalloc calls on an MI300X (median 8 µs),
eleven took 30–40 µs. A kernel ended during four of these, always in their first 6 µs."""


@dataclass(slots=True)
class AllocationWaits:
    """Waits of allocating calls for calls of other threads, one row for each call of ``launches``.

    The driver serves one thread at a time::

        thread 1      |==== cudaMalloc ====|
        thread 2             |=== waits ===|== own work ==|

    Such calls seldom wait, and a recording does not show their waits. A wait is claimed only where the rest of the call
    is nearer to the usual time of such calls than the whole call is. The rest must also be at most half of the call.
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
        taking_part: which calls are items of the program; other calls are ignored.

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
    """Return which calls returned just after a kernel ended during them; calls shorter than the tolerance do not
    count."""
    ends = np.sort(view.k_end)
    begin, returned = view.graph.launches.start_ns[call], view.c_end[call]
    recent = np.searchsorted(ends, returned, side="right") > np.searchsorted(
        ends, np.maximum(begin, returned - RETURNS_WITHIN_NS), side="left")
    found: Bool = recent & (returned - begin > RETURNS_WITHIN_NS)
    return found


CLOCKS_DIFFER_NS = 20_000
"""Host and device clocks can disagree: on an MI300X a device sync returned 8 µs before the last kernel's end."""
BLOCKED_COST_DEFAULT_NS = 3_000
"""Cost of a blocking call if no call of its name was seen unblocked. Chosen."""
FREE_SYNC_NS = 40_000
"""A synchronising call with nothing to wait for costs up to this (hipDeviceSynchronize on MI300: 31–33 µs)."""


@dataclass(slots=True)
class HostWaits:
    """Edges kernel → call's return, and every top-level call's unblocked cost (ns)."""

    call: Int64
    kernel: Int64
    lag: Int64
    cost: Int64
    """One row for each call of ``launches``."""
    blocked: int
    """Number of calls that blocked on device work in the recording."""
    unexplained_ns: int
    """Time in synchronising calls, beyond a plausible cost, that no kernel's end explains."""


def waiting_calls(graph: ExecutionGraph) -> Bool:
    """Return which calls of ``graph.launches`` wait for the device, whether or not it was at work."""
    found: Bool = (graph.launches.kind == LaunchKind.BLOCKING_SYNC) | named(graph, IMPLICIT_SYNCS)
    return found


def infer_host_waits(view: RankView, constants: LaunchConstants, allocations: AllocationWaits) -> HostWaits:
    """Return each blocking call's awaited kernels and own cost; fits ``constants.returns`` and ``constants.base_cost``.

    Time that a call waited for another thread's allocation or free (``allocations``) is not part of its cost.
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
    # A call whose awaited work had already ended did not wait: its edge must not delay it beyond its recorded return.
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
    # A call that only waits has no work of its own: the rest is a wait, or work, that the trace does not show.
    alone = [int(c) for c in np.nonzero(long_syncs)[0] if int(c) not in blocked or int(c) in own_work]
    beyond = np.array([own_work.get(c, int(calls.duration_ns[c])) - FREE_SYNC_NS for c in alone], np.int64)
    return HostWaits(call=call_of, kernel=kernel_of, lag=lag_of, cost=cost, blocked=len(blocked) + len(behind),
                     unexplained_ns=int(np.maximum(beyond, 0).sum()))


def _behind_the_stream(view: RankView) -> Int64:
    """Return the staged copies whose call waited for its stream: the work queued before the copy ended during the call.

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
        """Return the row of the stream's last kernel launched before ``before``, or -1; orphans that end after
        ``returned`` were launched later by unrecorded calls and do not count."""
        at = int(np.searchsorted(self.launched[stream], before, side="left")) - 1
        rows, view = self.rows[stream], self.view
        while at >= 0 and view.k_call[rows[at]] < 0 and view.k_end[rows[at]] > returned + CLOCK_NS:
            at -= 1
        return int(rows[at]) if at >= 0 else NONE


def _awaited(view: RankView, index: _StreamIndex, call: int) -> list[int]:
    """Return the kernels whose end a synchronising call waits for."""
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
    # Without a record, take a kernel launched before the call that ended just before the call returned.
    near = np.nonzero((view.k_end <= returned) & (view.k_end > max(begin, returned - RETURNS_WITHIN_NS))
                      & (view.k_call_start < begin))[0]
    return [int(near[np.argmax(view.k_end[near])])] if len(near) else []


def _drained(view: RankView, index: _StreamIndex, call: int, allocations: AllocationWaits) -> list[int]:
    """Return the kernels that an allocating call waited for: it returned just after the device had run out of work."""
    begin, returned = int(allocations.begins[call]), int(view.c_end[call])
    streams = range(len(view.streams))
    found = [k for s in streams if (k := index.last(s, int(view.graph.launches.start_ns[call]), returned)) >= 0]
    last = max((int(view.k_end[k]) for k in found), default=begin)
    rest = returned - last
    waited = begin < last < returned and rest <= RETURNS_WITHIN_NS < returned - begin and allocations.rest_is_usual(
        int(view.graph.launches.name[call]), returned - begin, rest)
    return found if waited else []


def _sync_stream(view: RankView, call: int, row: Int64) -> int:
    """Return the index of the stream a cudaStreamSynchronize waits for (recorded, or of the launch before); else -1."""
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


HAND_OVER_GAP_NS = 100_000
"""An autograd thread's pause this long, with its caller busy, ends a backward pass."""
RESUME_GAP_NS = 20_000
"""A caller's pause this long, with the autograd thread busy, is a wait for it."""
MOSTLY = 0.5
"""The other thread's work fills a pause if it takes at least this share of it."""
LOADER_WAIT_NS = 1_000_000
"""A multi-process loader's largest pause inside ``__next__``, if longer, is the wait for the batch; a ready batch is
unpacked in 0.1–0.3 ms (8×A100 trace)."""


@dataclass(slots=True)
class HostItems:
    """Items of one rank, thread by thread. ``after`` edges are (item, predecessor, lag); times in window ns."""

    thread: Int32
    kind: Int8
    row: Int32
    start: Int64
    end: Int64
    work: Int64
    external: Int64
    after: list[tuple[int, int, int]]
    item_of_call: Int64
    """Item of every top-level call (row of ``launches``), -1 for nested calls and dropped threads."""
    threads: list[int]
    """Thread numbers of the graph that take part, in item order."""
    thread_start: Int64
    """Start of each of ``threads``."""
    hand_overs: int


@dataclass(slots=True)
class _Marker:
    thread: int
    time: int
    kind: ItemKind
    row: int = NONE
    after: int = NONE
    """Index of the marker it follows."""
    lag: int = 0
    since: int = NONE
    """Begin of a wait: the thread's own work lasts until then."""


def build_host_items(view: RankView) -> HostItems:
    """Lay out one rank's host threads as items (see the module's text)."""
    graph = view.graph
    calls = graph.launches
    threads = _taking_part(view)
    markers = [
        marker
        for row in range(len(graph.steps))
        for marker in (
            _Marker(int(graph.steps.thread[row]), int(graph.steps.start_ns[row]), ItemKind.STEP_BEGIN, row),
            _Marker(int(graph.steps.thread[row]), int(graph.steps.start_ns[row] + graph.steps.duration_ns[row]),
                    ItemKind.STEP_END, row),
        )
    ]
    threads = sorted(set(threads) | {m.thread for m in markers})
    hand_overs = _hand_overs(view, threads, markers)
    waits = _loader_waits(view)
    markers += [_Marker(thread, end, ItemKind.DATA_READY) for thread, _, end in waits]

    top = np.nonzero((calls.parent == NONE) & np.isin(calls.thread, threads))[0]
    kind = np.concatenate([np.full(len(top), ItemKind.CALL, np.int8),
                           np.array([m.kind for m in markers], np.int8)])
    thread = np.concatenate([calls.thread[top], np.array([m.thread for m in markers], np.int32)]).astype(np.int32)
    start = np.concatenate([calls.start_ns[top], np.array([m.time for m in markers], np.int64)])
    end = np.concatenate([view.c_end[top], start[len(top):]])
    row = np.concatenate([top, np.array([m.row for m in markers], np.int64)]).astype(np.int32)
    # Order at one instant: ends before begins, and markers of an ended step before those of the next step.
    rank_in_tie = np.array([4, 3, 1, 0, 2, 0], np.int8)[kind]
    order = np.lexsort((rank_in_tie, start, thread))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    kind, thread, start, end, row = kind[order], thread[order], start[order], end[order], row[order]

    same = np.zeros(len(order), np.bool_)
    same[1:] = thread[1:] == thread[:-1]
    # A marker inside a call (or a call the trace lets overlap the one before) begins when that call returned.
    running = running_maximum(thread, end)
    previous_end = np.where(same, np.concatenate([[0], running[:-1]]), start)
    shifted = np.maximum(start, previous_end)
    end = np.maximum(end, shifted)
    work = shifted - previous_end
    external = np.full(len(order), NEVER, np.int64)
    is_resume = kind == ItemKind.RESUME
    since = np.concatenate([np.full(len(top), NONE), np.array([m.since for m in markers], np.int64)])[order]
    work[is_resume] = np.maximum(since[is_resume] - previous_end[is_resume], 0)
    for (_, begin, finish), marker in zip(waits, range(len(markers) - len(waits), len(markers)), strict=True):
        at = int(place[len(top) + marker])
        external[at] = finish
        work[at] = max(0, int(work[at]) - (finish - begin))
    after = [(int(place[len(top) + i]), int(place[len(top) + m.after]), m.lag)
             for i, m in enumerate(markers) if m.after >= 0]

    item_of_call = np.full(len(calls), NONE, np.int64)
    item_of_call[top] = place[: len(top)]
    present, first = np.unique(thread, return_index=True)
    begins = np.where(is_resume[first], 0, shifted[first]) if len(first) else np.zeros(0, np.int64)
    return HostItems(
        thread=thread, kind=kind, row=row, start=shifted, end=end, work=work, external=external, after=after,
        item_of_call=item_of_call, threads=[int(t) for t in present], thread_start=begins.astype(np.int64),
        hand_overs=hand_overs,
    )


def hold_back(items: HostItems, allocations: AllocationWaits) -> None:
    """Let each call that waited for another thread's call begin when that call returned."""
    for call in np.flatnonzero(allocations.holder >= 0).tolist():
        item, holder = int(items.item_of_call[call]), int(items.item_of_call[allocations.holder[call]])
        items.start[item] = max(int(items.start[item]), int(allocations.begins[call]))
        items.after.append((item, holder, 0))


def _taking_part(view: RankView) -> list[int]:
    """Return the threads that run operators or launch work; watchdogs that only poll events are left out."""
    launching = view.graph.launches.thread[view.k_call[view.k_call >= 0]]
    running = view.graph.ops.thread[view.graph.ops.kind == OpKind.OPERATION]
    return sorted({int(t) for t in np.unique(launching)} | {int(t) for t in np.unique(running)})


def _busy(view: RankView, thread: int) -> tuple[Int64, Int64]:
    """Return the merged [start, end) intervals in which a thread ran an operator or a call."""
    ops, calls = view.graph.ops, view.graph.launches
    o = (ops.thread == thread) & (ops.kind == OpKind.OPERATION)
    c = calls.thread == thread
    start = np.concatenate([ops.start_ns[o], calls.start_ns[c]])
    end = np.concatenate([(ops.start_ns + ops.duration_ns)[o], view.c_end[c]])
    return union(start, end)


def _hand_overs(view: RankView, threads: list[int], markers: list[_Marker]) -> int:
    """Append the hand-over and resume markers of each pair of caller and autograd thread; return their number."""
    ops = view.graph.ops
    backward = {int(t) for t in np.unique(ops.thread[(ops.phase == Phase.BACKWARD) & (ops.kind == OpKind.OPERATION)])}
    callers = [t for t in threads if t in {int(x) for x in view.graph.steps.thread}]
    if not callers:
        rest = [t for t in threads if t not in backward]
        weight = {t: int(((ops.thread == t) & (ops.kind == OpKind.OPERATION)).sum()) for t in rest}
        callers = sorted(rest, key=lambda t: -weight[t])[:1]
    found = 0
    for caller in callers[:1]:
        caller_start, caller_end = _busy(view, caller)
        for worker in sorted(backward - set(callers)):
            start, end = _busy(view, worker)
            if not len(start) or not len(caller_start):
                continue
            found += _worker_resumes(caller, worker, (caller_start, caller_end), (start, end), markers)
            found += _caller_resumes(caller, worker, (caller_start, caller_end), (start, end), markers)
        _share_lags(caller, markers)
        _keep_out_of_calls(view, caller, markers)
    return found


def _share_lags(caller: int, markers: list[_Marker]) -> None:
    """Give threads that the caller waited for together the lag of the last to finish; the others' slack is waiting."""
    lags: dict[int, int] = {}
    resumes = [m for m in markers if m.kind == ItemKind.RESUME and m.thread == caller]
    for marker in resumes:
        lags[marker.time] = min(marker.lag, lags.get(marker.time, marker.lag))
    for marker in resumes:
        marker.lag = lags[marker.time]


def _keep_out_of_calls(view: RankView, caller: int, markers: list[_Marker]) -> None:
    """Move a hand-over from inside a call to the call's begin: another thread's start does not wait for its return."""
    calls = view.graph.launches
    mine = np.nonzero((calls.thread == caller) & (calls.parent == NONE))[0]
    begin, end = calls.start_ns[mine], view.c_end[mine]
    for resume in [m for m in markers if m.kind == ItemKind.RESUME and m.after >= 0]:
        marker = markers[resume.after]
        at = int(np.searchsorted(begin, marker.time, side="left")) - 1
        if marker.thread == caller and at >= 0 and marker.time < end[at]:
            resume.lag += marker.time - int(begin[at])
            marker.time = int(begin[at])


def _worker_resumes(caller: int, worker: int, caller_busy: tuple[Int64, Int64], busy: tuple[Int64, Int64],
                    markers: list[_Marker]) -> int:
    """Append markers where the autograd thread begins a pass, after the caller's last work; return how many passes."""
    start, end = busy
    pause_from = np.concatenate([[min(int(caller_busy[0][0]), int(start[0]))], end[:-1]])
    length = start - pause_from
    share = covered(caller_busy, pause_from, start)
    begins = (length > HAND_OVER_GAP_NS) & (share >= MOSTLY * length)
    begins[0] = True
    found = 0
    for b in np.nonzero(begins)[0].tolist():
        when = int(start[b])
        at = int(np.searchsorted(caller_busy[0], when, side="left")) - 1
        if at < 0:
            continue
        trigger = min(int(caller_busy[1][at]), when)
        markers.append(_Marker(caller, trigger, ItemKind.HAND_OVER))
        markers.append(_Marker(worker, when, ItemKind.RESUME, after=len(markers) - 1, lag=when - trigger,
                               since=int(end[b - 1]) if b else NONE))
        found += 1
    return found


def _caller_resumes(caller: int, worker: int, caller_busy: tuple[Int64, Int64], busy: tuple[Int64, Int64],
                    markers: list[_Marker]) -> int:
    """Append markers where the caller resumes, after the autograd thread's last work; return how many times it does."""
    pause_from, pause_to = caller_busy[1][:-1], caller_busy[0][1:]
    length = pause_to - pause_from
    share = covered(busy, pause_from, pause_to)
    waits = (length > RESUME_GAP_NS) & (share >= MOSTLY * length)
    found = 0
    for w in np.nonzero(waits)[0].tolist():
        when = int(pause_to[w])
        at = int(np.searchsorted(busy[1], when, side="right")) - 1
        if at < 0 or int(busy[1][at]) <= int(pause_from[w]):
            continue
        finished = int(busy[1][at])
        markers.append(_Marker(worker, finished, ItemKind.HAND_OVER))
        markers.append(_Marker(caller, when, ItemKind.RESUME, after=len(markers) - 1, lag=when - finished,
                               since=int(pause_from[w])))
        found += 1
    return found


def _loader_waits(view: RankView) -> list[tuple[int, int, int]]:
    """Return (thread, from, to) of the wait inside every ``__next__`` of a multi-process data loader."""
    graph, ops = view.graph, view.graph.ops
    loader = np.array(["_MultiProcessingDataLoaderIter" in text for text in graph.strings], np.bool_)
    if not loader.any():
        return []
    waits = []
    for row in np.nonzero(loader[ops.name])[0].tolist():
        begin, finish = int(ops.start_ns[row]), int(ops.start_ns[row] + ops.duration_ns[row])
        inside = (ops.thread == ops.thread[row]) & (ops.start_ns >= begin) & (ops.start_ns < finish)
        inside &= ops.kind == OpKind.OPERATION
        inside[row] = False
        start = np.append(np.sort(ops.start_ns[inside]), finish)
        before = np.concatenate([[begin], np.maximum.accumulate(np.sort((ops.start_ns + ops.duration_ns)[inside]))])
        longest = int(np.argmax(start - before))
        if start[longest] - before[longest] > LOADER_WAIT_NS:
            waits.append((int(ops.thread[row]), int(before[longest]), int(start[longest])))
    return waits
