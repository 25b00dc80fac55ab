"""Host threads as items: calls, step markers, hand-overs between threads, and data-loader waits.

A thread's time between two items is *work*: operators' own time, Python, allocator. Three kinds of time are not work
and are taken out here, to come back only from dependencies:

* the caller of ``backward()`` waits while the autograd thread works; ::

      main      ──ops──┐ hand-over                      ┌─resume──ops──
      autograd         └─resume──backward ops──hand-over┘

* the autograd thread waits between two backward passes;
* a multi-process data loader's ``__next__`` waits for a batch, whose arrival is an external event.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.simulation.host_waits import AllocationWaits
from graph_predictor.simulation.program import NEVER, ItemKind
from graph_predictor.simulation.ranks import RankView, running_maximum
from tracer.arrays import Int8, Int32, Int64
from tracer.columns import covered, union
from tracer.graph import NONE, OpKind, Phase

HAND_OVER_GAP_NS = 100_000
"""An autograd thread's pause this long, with its caller busy, ends a backward pass."""
RESUME_GAP_NS = 20_000
"""A caller's pause this long, with the autograd thread busy, is a wait for it."""
MOSTLY = 0.5
"""Share of a pause from which on the other thread's work fills it."""
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
    """Start of each of them."""
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
    # At one instant: what ends comes before what begins, and markers of an ended step before those of the next.
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
    """Let calls that waited for another thread's call begin when that one returned."""
    for call in np.flatnonzero(allocations.holder >= 0).tolist():
        item, holder = int(items.item_of_call[call]), int(items.item_of_call[allocations.holder[call]])
        items.start[item] = max(int(items.start[item]), int(allocations.begins[call]))
        items.after.append((item, holder, 0))


def _taking_part(view: RankView) -> list[int]:
    """Threads that run operators or launch work; watchdogs that only poll events decide nothing."""
    launching = view.graph.launches.thread[view.k_call[view.k_call >= 0]]
    running = view.graph.ops.thread[view.graph.ops.kind == OpKind.OPERATION]
    return sorted({int(t) for t in np.unique(launching)} | {int(t) for t in np.unique(running)})


def _busy(view: RankView, thread: int) -> tuple[Int64, Int64]:
    """Merged [start, end) intervals in which a thread ran an operator or a call."""
    ops, calls = view.graph.ops, view.graph.launches
    o = (ops.thread == thread) & (ops.kind == OpKind.OPERATION)
    c = calls.thread == thread
    start = np.concatenate([ops.start_ns[o], calls.start_ns[c]])
    end = np.concatenate([(ops.start_ns + ops.duration_ns)[o], view.c_end[c]])
    return union(start, end)


def _hand_overs(view: RankView, threads: list[int], markers: list[_Marker]) -> int:
    """Append the hand-over and resume markers of every (caller, autograd thread) pair; returns how many."""
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
    """Give threads the caller waited for together the lag of the last to finish; the others' slack is waiting."""
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
    """The autograd thread begins a pass after the caller's last work before it."""
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
    """The caller goes on after the autograd thread's last work before it."""
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
    """(thread, from, to) of the wait inside every ``__next__`` of a multi-process data loader."""
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
