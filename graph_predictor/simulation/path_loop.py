# mypy: disable-error-code="no-untyped-def, assignment"
"""Walks back along causes, compiled: of any number of paths in one call. See ``critical_path``."""

from __future__ import annotations

from graph_predictor.simulation.program import Bound, EndCause, KernelCause, LaunchReference, StartCause
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


def _segment(start, bound, item, kernel, work, stop, walk, keep, time, state, times, runs, kinds, sums):
    """Close [start, time) with a bound, clipped to where the walk ends; returns where it begins."""
    start = min(max(start, stop), time)
    if keep and start < time:
        at = state[COUNT]
        times[0, at], times[1, at] = start, time
        runs[0, at], runs[1, at] = item, kernel
        kinds[0, at], kinds[1, at] = bound, work
        state[COUNT] = at + 1
    sums[walk, bound] += time - start
    return start


def _along_thread(row, time, stop, walk, item_start, item_end, item_start_cause, item_end_cause, item_queue, first_item,
                  sums):
    """Go back along a thread as far as items wait for nothing but the one before; returns the item and time reached.
    Most paths are mostly such items, and of sums alone nothing else has to be looked at."""
    launch, all_time = 0, time
    while (item_end_cause[row] == OWN_COST and item_start_cause[row] == PROGRAM_ORDER and not first_item[row]
           and item_end[row - 1] > stop):
        start = min(item_start[row], time)
        if item_queue[row] >= 0:
            launch += time - start
        row -= 1
        time = min(item_end[row], start)
    sums[walk, LAUNCH] += launch
    sums[walk, HOST] += all_time - time - launch
    return row, time


def _along_stream(row, time, stop, walk, kernel_start, kernel_end, kernel_cause, kernel_source, kernel_group, bound_of,
                  sums):
    """Go back along a stream as far as kernels wait for the one before alone; as ``_along_thread``."""
    while kernel_group[row] < 0 and kernel_cause[row] == BY_STREAM and kernel_end[kernel_source[row]] > stop:
        start = min(kernel_start[row], time)
        before = kernel_source[row]
        end = min(kernel_end[before], start)
        sums[walk, bound_of[row]] += time - start
        sums[walk, LAUNCH] += start - end
        row, time = before, end
    return row, time


def _in_time_order(low, high, times, runs, kinds):
    """Turn the segments of one walk round, which were found last first."""
    high -= 1
    while low < high:
        for row in range(2):
            times[row, low], times[row, high] = times[row, high], times[row, low]
            runs[row, low], runs[row, high] = runs[row, high], runs[row, low]
            kinds[row, low], kinds[row, high] = kinds[row, high], kinds[row, low]
        low += 1
        high -= 1


@kept_loop(
    "int64[:]", "int64[:]", "int8[:]", "int32[:]", "int8[:]", "int32[:]",
    "int64[:]", "int64[:]", "int8[:]", "int32[:]", "int32[:]",
    "int64[:]", "int64[:]", "int8[:]", "int64[:]", "int8[:]", "int64[:]", "int64[:]", "float64[:]", "int8[:]",
    "int8[:]", "int64[:]", "int64[:]", "int64[:]", "int64", "int64",
    "int64[:]", "int64[:,:]", "int64[:,:]", "int8[:,:]", "int64[:]", "int64[:,:]",
    inner=(_segment, _along_thread, _along_stream, _in_time_order))
def walk_back(
    item_start, item_end, item_start_cause, item_start_source, item_end_cause, item_end_source,
    kernel_start, kernel_end, kernel_cause, kernel_source, group_last,
    item_queue, after_item, first_item, kernel_item, kernel_reference, kernel_group, edge_kernel, edge_fraction,
    bound_of, at_kind, at_row, until, stops, across, keep,
    state, times, runs, kinds, first, sums,
):
    """Walk from each place and time back to its stop; returns how many walks are done.

    Segments are columns of ``times`` (start, end), ``runs`` (item, kernel) and ``kinds`` (bound, work before the
    item); those of one walk begin at its ``first``. Where they are full it returns early, to be called again with more
    room and the same ``state``. ``sums`` [walks, bounds] are there in any case.
    """
    walks = at_row.shape[0]
    walk, at, row, time = state[WALK], state[AT], state[ROW], state[TIME]
    while walk < walks:
        stop = stops[walk]
        if at < 0:
            at, row, time = at_kind[walk], at_row[walk], until[walk]
        before = -1  # an item on whose thread the path goes on
        if keep and state[COUNT] + MOST > times.shape[1]:
            break
        if time <= stop or at == AT_NOTHING:
            # Nothing before: the window opened here with this already under way.
            time = _segment(stop, HOST, -1, -1, 0, stop, walk, keep, time, state, times, runs, kinds, sums)
            if keep:
                _in_time_order(first[walk], state[COUNT], times, runs, kinds)
                first[walk + 1] = state[COUNT]
            walk += 1
            at = -1
            continue
        if at == AT_ITEM:
            if not keep:
                row, time = _along_thread(row, time, stop, walk, item_start, item_end, item_start_cause,
                                          item_end_cause, item_queue, first_item, sums)
            cause = item_end_cause[row]
            if cause in (END_KERNEL, END_QUEUE):
                kernel = item_end_source[row]
                own = SYNC if cause == END_KERNEL else LAUNCH
                time = _segment(kernel_end[kernel], own, row, -1, 0, stop, walk, keep, time, state, times,
                                runs, kinds, sums)
                at, row = AT_KERNEL, kernel
                continue
            own = DATA_LOADING if cause == END_EXTERNAL else (LAUNCH if item_queue[row] >= 0 else HOST)
            time = _segment(item_start[row], own, row, -1, 0, stop, walk, keep, time, state, times,
                            runs, kinds, sums)
            before = row
        else:
            if not keep:
                row, time = _along_stream(row, time, stop, walk, kernel_start, kernel_end, kernel_cause, kernel_source,
                                          kernel_group, bound_of, sums)
            bound = bound_of[row]
            if kernel_group[row] >= 0:
                last = group_last[kernel_group[row]]
                time = _segment(kernel_start[last], bound, -1, row, 0, stop, walk, keep, time, state, times,
                                runs, kinds, sums)
                if across:
                    row = last
                time = _segment(kernel_start[row], WAITING_FOR_RANK, -1, row, 0, stop, walk, keep, time, state, times,
                                runs, kinds, sums)
            cause, source = kernel_cause[row], kernel_source[row]
            if cause == BY_LAUNCH and kernel_reference[row] == STAGED:
                time = _segment(item_end[source], bound, -1, row, 0, stop, walk, keep, time, state, times,
                                runs, kinds, sums)
                at, row = AT_ITEM, source
                continue
            time = _segment(kernel_start[row], bound, -1, row, 0, stop, walk, keep, time, state, times,
                            runs, kinds, sums)
            if cause == BY_STREAM:
                time = _segment(kernel_end[source], LAUNCH, -1, row, 0, stop, walk, keep, time, state, times,
                                runs, kinds, sums)
                at, row = AT_KERNEL, source
                continue
            if cause == BY_EDGE:
                other = edge_kernel[source]
                if edge_fraction[source] == 1.0:
                    time = _segment(kernel_end[other], SYNC, -1, row, 0, stop, walk, keep, time, state, times,
                                    runs, kinds, sums)
                else:  # held back for lack of room: the time since the blocker began is the blocker's
                    time = _segment(kernel_start[other], bound_of[other], -1, other, 0, stop, walk, keep, time, state,
                                    times, runs, kinds, sums)
                at, row = AT_KERNEL, other
                continue
            # Held back by something that was not recorded: what it was held from is its launch, where that was.
            launch = source if cause == BY_LAUNCH else kernel_item[row]
            if launch < 0:
                at = AT_NOTHING
                continue
            if kernel_reference[row] != CALL_START:
                time = _segment(item_end[launch], LAUNCH, -1, row, 0, stop, walk, keep, time, state, times,
                                runs, kinds, sums)
                at, row = AT_ITEM, launch
                continue
            # A copy its own call waits for: the latency lies inside the call; go on before the call.
            time = _segment(item_start[launch], LAUNCH, -1, row, 0, stop, walk, keep, time, state, times,
                            runs, kinds, sums)
            before = launch
        if item_start_cause[before] == OTHER_THREAD:
            other = after_item[item_start_source[before]]
            time = _segment(item_end[other], HOST, before, -1, 1, stop, walk, keep, time, state, times,
                            runs, kinds, sums)
            at, row = AT_ITEM, other
        elif first_item[before]:
            at = AT_NOTHING
        else:
            time = _segment(item_end[before - 1], HOST, before, -1, 1, stop, walk, keep, time, state, times,
                            runs, kinds, sums)
            at, row = AT_ITEM, before - 1
    state[WALK], state[AT], state[ROW], state[TIME] = walk, at, row, time
    return walk
