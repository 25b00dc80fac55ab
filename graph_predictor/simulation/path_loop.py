# mypy: disable-error-code="no-untyped-def, assignment"
"""Walks back along causes, compiled: of any number of paths in one call. See ``engine``."""

from __future__ import annotations

from dataclasses import dataclass

from graph_predictor.simulation.program import (
    Bound,
    EndCause,
    KernelCause,
    LaunchReference,
    Program,
    Simulated,
    StartCause,
)
from tracer.arrays import Bool, Int8, Int64
from tracer.machine_code import kept_loop

# Compiled code knows plain numbers only.
PROGRAM_ORDER, OTHER_THREAD = int(StartCause.PROGRAM_ORDER), int(StartCause.OTHER_THREAD)
OWN_COST = int(EndCause.OWN_COST)
END_KERNEL, END_QUEUE, END_EXTERNAL = (int(EndCause[n]) for n in ("KERNEL", "QUEUE", "EXTERNAL"))
BY_LAUNCH, BY_STREAM, BY_EDGE = (int(KernelCause[n]) for n in ("LAUNCH", "STREAM", "EDGE"))
CALL_START, STAGED = int(LaunchReference.CALL_START), int(LaunchReference.STAGED)
HOST, LAUNCH, WAITING_FOR_RANK, DATA_LOADING, SYNC = (
    int(Bound[n]) for n in ("HOST", "LAUNCH", "WAITING_FOR_RANK", "DATA_LOADING", "SYNC"))
AT_ITEM, AT_KERNEL, AT_NOTHING = 0, 1, 2
"""What a walk stands at."""
COUNT, WALK, AT, ROW, TIME = range(5)
"""Places of the state that is kept where the room is full."""
MOST = 4
"""Segments that one move along the path may add."""


@dataclass(slots=True)
class Walks:
    """Any number of walks: where each begins and ends, and what was found.

    Attributes:
        at_kind, at_row: what each begins at: one of the above, and its row.
        until, stops: when it ends, and where it stops, ns.
        state: kept where the room for segments is full.
        first: segments of each walk begin there.
        first_item: whether an item is its thread's first one.
        bound_of: the ``Bound`` of each kernel's own time.
    """

    at_kind: Int8
    at_row: Int64
    until: Int64
    stops: Int64
    state: Int64
    first: Int64
    first_item: Int8
    bound_of: Int8


@dataclass(slots=True)
class PathSegments:
    """Room for the segments of paths; none where only sums are asked for. ``item`` or ``kernel`` is what ran (the other
    is -1)."""

    start_ns: Int64
    end_ns: Int64
    bound: Int8
    item: Int64
    kernel: Int64
    is_work: Bool
    """True where the segment is host work before ``item`` rather than ``item`` itself."""


def _segment(start, bound, item, kernel, work, walk, time, w, found, sums):
    """Close [start, time) with a bound, clipped to where the walk ends; returns where it begins."""
    start = min(max(start, w.stops[walk]), time)
    if found.item.shape[0] > 0 and start < time:
        at = w.state[COUNT]
        found.start_ns[at], found.end_ns[at], found.bound[at] = start, time, bound
        found.item[at], found.kernel[at], found.is_work[at] = item, kernel, work
        w.state[COUNT] = at + 1
    sums[walk, bound] += time - start
    return start


def _along_thread(row, time, stop, walk, p, s, w, sums):
    """Go back along a thread as far as items wait for nothing but the one before; returns the item and time reached.
    Most paths are mostly such items, and of sums alone nothing else has to be looked at."""
    launch, all_time = 0, time
    while (s.item_end_cause[row] == OWN_COST and s.item_start_cause[row] == PROGRAM_ORDER and not w.first_item[row]
           and s.item_end[row - 1] > stop):
        start = min(s.item_start[row], time)
        if p.item_queue[row] >= 0:
            launch += time - start
        row -= 1
        time = min(s.item_end[row], start)
    sums[walk, LAUNCH] += launch
    sums[walk, HOST] += all_time - time - launch
    return row, time


def _along_stream(row, time, stop, walk, p, s, w, sums):
    """Go back along a stream as far as kernels wait for the one before alone; as ``_along_thread``."""
    while p.kernel_group[row] < 0 and s.kernel_cause[row] == BY_STREAM and s.kernel_end[s.kernel_source[row]] > stop:
        start = min(s.kernel_start[row], time)
        before = s.kernel_source[row]
        end = min(s.kernel_end[before], start)
        sums[walk, w.bound_of[row]] += time - start
        sums[walk, LAUNCH] += start - end
        row, time = before, end
    return row, time


def _turned(column, low, high):
    """Turn a stretch of a column round."""
    while low < high:
        column[low], column[high] = column[high], column[low]
        low += 1
        high -= 1


def _in_time_order(low, high, found):
    """Turn the segments of one walk round, which were found last first."""
    _turned(found.start_ns, low, high)
    _turned(found.end_ns, low, high)
    _turned(found.bound, low, high)
    _turned(found.item, low, high)
    _turned(found.kernel, low, high)
    _turned(found.is_work, low, high)


@kept_loop(Program, Simulated, Walks, PathSegments, "int64", "int64[:,:]",
           inner=(_segment, _along_thread, _along_stream, _turned, _in_time_order))
def walk_back(p, s, w, found, across, sums):
    """Walk from each place and time back to its stop; returns how many walks are done.

    Where the room for segments is full it returns early, to be called again with more. ``sums`` [walks, bounds] are
    there in any case.
    """
    keep = found.item.shape[0] > 0
    walks = w.at_row.shape[0]
    walk, at, row, time = w.state[WALK], w.state[AT], w.state[ROW], w.state[TIME]
    while walk < walks:
        stop = w.stops[walk]
        if at < 0:
            at, row, time = w.at_kind[walk], w.at_row[walk], w.until[walk]
        before = -1  # an item on whose thread the path goes on
        if keep and w.state[COUNT] + MOST > found.item.shape[0]:
            break
        if time <= stop or at == AT_NOTHING:
            # Nothing before: the window opened here with this already under way.
            time = _segment(stop, HOST, -1, -1, False, walk, time, w, found, sums)
            if keep:
                _in_time_order(w.first[walk], w.state[COUNT] - 1, found)
                w.first[walk + 1] = w.state[COUNT]
            walk += 1
            at = -1
            continue
        if at == AT_ITEM:
            if not keep:
                row, time = _along_thread(row, time, stop, walk, p, s, w, sums)
            cause = s.item_end_cause[row]
            if cause in (END_KERNEL, END_QUEUE):
                kernel = s.item_end_source[row]
                own = SYNC if cause == END_KERNEL else LAUNCH
                time = _segment(s.kernel_end[kernel], own, row, -1, False, walk, time, w, found, sums)
                at, row = AT_KERNEL, kernel
                continue
            own = DATA_LOADING if cause == END_EXTERNAL else (LAUNCH if p.item_queue[row] >= 0 else HOST)
            time = _segment(s.item_start[row], own, row, -1, False, walk, time, w, found, sums)
            before = row
        else:
            if not keep:
                row, time = _along_stream(row, time, stop, walk, p, s, w, sums)
            bound = w.bound_of[row]
            if p.kernel_group[row] >= 0:
                last = s.group_last[p.kernel_group[row]]
                time = _segment(s.kernel_start[last], bound, -1, row, False, walk, time, w, found, sums)
                if across:
                    row = last
                time = _segment(s.kernel_start[row], WAITING_FOR_RANK, -1, row, False, walk, time, w, found, sums)
            cause, source = s.kernel_cause[row], s.kernel_source[row]
            if cause == BY_LAUNCH and p.kernel_reference[row] == STAGED:
                time = _segment(s.item_end[source], bound, -1, row, False, walk, time, w, found, sums)
                at, row = AT_ITEM, source
                continue
            time = _segment(s.kernel_start[row], bound, -1, row, False, walk, time, w, found, sums)
            if cause == BY_STREAM:
                time = _segment(s.kernel_end[source], LAUNCH, -1, row, False, walk, time, w, found, sums)
                at, row = AT_KERNEL, source
                continue
            if cause == BY_EDGE:
                other = p.edge_kernel[source]
                if p.edge_fraction[source] == 1.0:
                    time = _segment(s.kernel_end[other], SYNC, -1, row, False, walk, time, w, found, sums)
                else:  # held back for lack of room: the time since the blocker began is the blocker's
                    time = _segment(s.kernel_start[other], w.bound_of[other], -1, other, False, walk, time, w, found,
                                    sums)
                at, row = AT_KERNEL, other
                continue
            # Held back by something that was not recorded: what it was held from is its launch, where that was.
            launch = source if cause == BY_LAUNCH else p.kernel_item[row]
            if launch < 0:
                at = AT_NOTHING
                continue
            if p.kernel_reference[row] != CALL_START:
                time = _segment(s.item_end[launch], LAUNCH, -1, row, False, walk, time, w, found, sums)
                at, row = AT_ITEM, launch
                continue
            # A copy its own call waits for: the latency lies inside the call; go on before the call.
            time = _segment(s.item_start[launch], LAUNCH, -1, row, False, walk, time, w, found, sums)
            before = launch
        if s.item_start_cause[before] == OTHER_THREAD:
            other = p.after_item[s.item_start_source[before]]
            time = _segment(s.item_end[other], HOST, before, -1, True, walk, time, w, found, sums)
            at, row = AT_ITEM, other
        elif w.first_item[before]:
            at = AT_NOTHING
        else:
            time = _segment(s.item_end[before - 1], HOST, before, -1, True, walk, time, w, found, sums)
            at, row = AT_ITEM, before - 1
    w.state[WALK], w.state[AT], w.state[ROW], w.state[TIME] = walk, at, row, time
    return walk
