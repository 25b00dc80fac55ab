# mypy: disable-error-code="no-untyped-def, assignment"
"""The simulator's inner loop, compiled with numba. Plain arrays in, plain arrays filled; see ``engine.simulate``."""

from __future__ import annotations

import numpy as np

from graph_predictor.simulation.program import EndCause, KernelCause, LaunchReference, StartCause
from tracer.machine_code import kept_loop

# Compiled code knows plain numbers only.
PROGRAM_ORDER, OTHER_THREAD = int(StartCause.PROGRAM_ORDER), int(StartCause.OTHER_THREAD)
OWN_COST, KERNEL, QUEUE, EXTERNAL = (int(EndCause[n]) for n in ("OWN_COST", "KERNEL", "QUEUE", "EXTERNAL"))
BY_LAUNCH, BY_STREAM, BY_EDGE, BY_EXTERNAL = (int(KernelCause[n]) for n in ("LAUNCH", "STREAM", "EDGE", "EXTERNAL"))
CALL_START, STAGED = int(LaunchReference.CALL_START), int(LaunchReference.STAGED)
SUBMITTED = -1
"""Stands in an item's start cause while the item is parked with its own work submitted already."""


def _offer(kernel, ready, cause, source, start, causes, sources, pending, stack, depth):
    """One input of a kernel is known: it starts no earlier than ``ready``. Returns the stack's new depth."""
    if ready > start[kernel]:
        start[kernel] = ready
        causes[kernel] = cause
        sources[kernel] = source
    pending[kernel] -= 1
    if pending[kernel] == 0:
        stack[depth] = kernel
        depth += 1
    return depth


def _park(thread, parked, on, next_parked):
    """A thread waits for item or kernel ``on``; threads that wait for the same one are a chain."""
    next_parked[thread] = parked[on]
    parked[on] = thread


def _wake(parked, on, next_parked, runnable, count):
    """Threads that waited for ``on`` may go on; returns how many are runnable now."""
    thread = parked[on]
    parked[on] = -1
    while thread >= 0:
        runnable[count] = thread
        count += 1
        thread = next_parked[thread]
    return count


def _put_thread(keys, threads, size, thread, key):
    """Add a thread to the heap of those that can run, by (time of its next item, thread); returns its size."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if keys[parent] < key or (keys[parent] == key and threads[parent] <= thread):
            break
        keys[i] = keys[parent]
        threads[i] = threads[parent]
        i = parent
    keys[i] = key
    threads[i] = thread
    return size + 1


def _take_thread(keys, threads, size):
    """Remove the earliest thread; returns (it, the heap's new size)."""
    earliest = threads[0]
    size -= 1
    key, moved = keys[size], threads[size]
    i = 0
    while size > 0:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and (keys[child + 1] < keys[child] or (
                keys[child + 1] == keys[child] and threads[child + 1] < threads[child])):
            child += 1
        if key < keys[child] or (key == keys[child] and moved <= threads[child]):
            break
        keys[i] = keys[child]
        threads[i] = threads[child]
        i = child
    keys[i] = key
    threads[i] = moved
    return earliest, size


_WHOLE, _SMALL = "int64[:]", "int8[:]"


@kept_loop(
    _WHOLE, "int32[:]", *[_WHOLE] * 13, _SMALL, *[_WHOLE] * 7, "float64[:]", *[_WHOLE] * 17,
    _WHOLE, _WHOLE, _SMALL, _WHOLE, _SMALL, _WHOLE, _WHOLE, _WHOLE, _SMALL, _WHOLE, _WHOLE,
    "boolean[:]", "boolean[:]", *[_WHOLE] * 14, inner=(_offer, _park, _wake, _put_thread, _take_thread))
def run(
    thread_ptr, thread_rank, thread_start, item_work, item_cost, item_external, item_queue,
    item_channel,
    after_ptr, after_item, after_lag, wait_ptr, wait_kernel, wait_lag,
    kernel_item, kernel_reference, kernel_latency, kernel_previous, kernel_gap, kernel_duration,
    kernel_external, edge_ptr, edge_kernel, edge_fraction, edge_lag, kernel_group, group_size,
    queue_ptr, queue_kernel, queue_depth, item_return, intrinsic,
    launched_ptr, launched, successor_ptr, successor, out_ptr, out_edge, owner, member_ptr, member,
    item_start, item_end, item_start_cause, item_start_source, item_end_cause,
    item_end_source, kernel_start, kernel_end, kernel_cause, kernel_source, group_last,
    item_done, kernel_done, pending, group_left, stack, heap_key, heap_thread, position, clock,
    parked_on_item, parked_on_kernel, next_parked, runnable, queue_at, left_by, resolved,
):  # fmt: skip
    """Returns how many items and kernels were resolved, in the order of ``resolved``. See ``simulate``; all arrays as
    in ``Program``, and those of ``workspace`` to work in."""
    threads, items, kernels = thread_rank.shape[0], item_work.shape[0], kernel_item.shape[0]
    done = 0
    for k in range(kernels):
        n = edge_ptr[k + 1] - edge_ptr[k]
        if kernel_item[k] >= 0:
            n += 1
        if kernel_previous[k] >= 0:
            n += 1
        pending[k] = n
        kernel_start[k] = kernel_external[k]
        kernel_cause[k] = BY_EXTERNAL
    depth = 0
    for k in range(kernels):
        if pending[k] == 0:
            stack[depth] = k
            depth += 1

    heap = 0
    runnable_count = 0
    for t in range(threads):
        if position[t] < thread_ptr[t + 1]:
            runnable[runnable_count] = t
            runnable_count += 1

    while True:
        # 1. settle every kernel whose inputs are known
        while depth > 0:
            depth -= 1
            k = stack[depth]
            g = kernel_group[k]
            first, last = k, k + 1
            resolved_group = False
            if g >= 0:
                if group_last[g] < 0 or kernel_start[k] > kernel_start[group_last[g]]:
                    group_last[g] = k
                group_left[g] -= 1
                if group_left[g] > 0:
                    continue
                resolved_group = True
                first, last = member_ptr[g], member_ptr[g + 1]
            for m in range(first, last):
                if resolved_group:
                    k = member[m]
                    kernel_end[k] = kernel_start[group_last[g]] + intrinsic[k]
                else:
                    kernel_end[k] = kernel_start[k] + kernel_duration[k]
                kernel_done[k] = True
                resolved[done] = items + k
                done += 1
                for j in range(successor_ptr[k], successor_ptr[k + 1]):
                    s = successor[j]
                    # With overlap (a negative gap) a kernel still does not start before its predecessor did.
                    t_ready = max(kernel_end[k] + kernel_gap[s], kernel_start[k])
                    depth = _offer(s, t_ready, BY_STREAM, k, kernel_start, kernel_cause, kernel_source, pending,
                                   stack, depth)
                for j in range(out_ptr[k], out_ptr[k + 1]):
                    e = out_edge[j]
                    s = owner[e]
                    if edge_fraction[e] == 1.0:
                        t_ready = kernel_end[k] + edge_lag[e]
                    else:
                        t_ready = (kernel_start[k]
                                   + np.int64(edge_fraction[e] * (kernel_end[k] - kernel_start[k])) + edge_lag[e])
                    depth = _offer(s, t_ready, BY_EDGE, e, kernel_start, kernel_cause, kernel_source, pending,
                                   stack, depth)
                runnable_count = _wake(parked_on_kernel, k, next_parked, runnable, runnable_count)

        # 2. put threads that may go on into the heap, keyed by their clock
        while runnable_count > 0:
            runnable_count -= 1
            t = runnable[runnable_count]
            heap = _put_thread(heap_key, heap_thread, heap, t, clock[t] + item_work[position[t]])
        if heap == 0:
            break

        # 3. the earliest thread's next item
        t, heap = _take_thread(heap_key, heap_thread, heap)
        n = position[t]

        start = clock[t] + item_work[n]
        cause, source = PROGRAM_ORDER, np.int64(-1)
        parked = False
        for j in range(after_ptr[n], after_ptr[n + 1]):
            other = after_item[j]
            if not item_done[other]:
                _park(t, parked_on_item, other, next_parked)
                parked = True
                break
            ready = item_end[other] + after_lag[j]
            if ready > start:
                start, cause, source = ready, OTHER_THREAD, j
        if parked:
            continue

        # Kernels that hang on this call's start (a blocking copy works while the call waits for it).
        begins_here = False
        for j in range(launched_ptr[n], launched_ptr[n + 1]):
            if kernel_reference[launched[j]] == CALL_START:
                begins_here = True
        end = start + item_cost[n]
        end_cause, end_source = OWN_COST, np.int64(-1)
        slot = np.int64(-1)
        channel = item_channel[n]
        # Only once the queue can be full do the ends of earlier entries matter.
        if channel >= 0 and queue_depth[channel] > 0 and item_queue[n] >= queue_depth[channel]:
            first = queue_ptr[channel]
            leaves = first + item_queue[n] - queue_depth[channel]
            while queue_at[channel] <= leaves and kernel_done[queue_kernel[queue_at[channel]]]:
                at = queue_at[channel]
                left_by[at] = queue_kernel[at]
                if at > first and kernel_end[left_by[at - 1]] > kernel_end[left_by[at]]:
                    left_by[at] = left_by[at - 1]
                queue_at[channel] += 1
            if queue_at[channel] <= leaves:
                _park(t, parked_on_kernel, queue_kernel[queue_at[channel]], next_parked)
                continue
            slot = left_by[leaves]
            if slot >= 0 and kernel_end[slot] + item_return[n] > end:
                end, end_cause, end_source = kernel_end[slot] + item_return[n], QUEUE, slot
        if begins_here:
            # Submitted when the queue lets it in; the wait for its own end comes below.
            submitted = start if slot < 0 else max(start, kernel_end[slot])
            for j in range(launched_ptr[n], launched_ptr[n + 1]):
                k = launched[j]
                if kernel_reference[k] == CALL_START and not kernel_done[k] and item_start_cause[n] != SUBMITTED:
                    depth = _offer(k, submitted + kernel_latency[k], BY_LAUNCH, n, kernel_start, kernel_cause,
                                   kernel_source, pending, stack, depth)
            # Mark as submitted, so that coming back to this item after parking does not submit twice.
            item_start_cause[n] = SUBMITTED
        for j in range(wait_ptr[n], wait_ptr[n + 1]):
            k = wait_kernel[j]
            if not kernel_done[k]:
                _park(t, parked_on_kernel, k, next_parked)
                parked = True
                break
            ready = kernel_end[k] + wait_lag[j]
            if ready > end:
                end, end_cause, end_source = ready, KERNEL, k
        if parked:
            continue
        if item_external[n] > end:
            end, end_cause, end_source = item_external[n], EXTERNAL, np.int64(-1)

        item_start[n] = start
        item_end[n] = end
        item_start_cause[n] = cause
        item_start_source[n] = source
        item_end_cause[n] = end_cause
        item_end_source[n] = end_source
        item_done[n] = True
        resolved[done] = n
        done += 1
        clock[t] = end
        position[t] = n + 1
        for j in range(launched_ptr[n], launched_ptr[n + 1]):
            k = launched[j]
            if kernel_reference[k] != CALL_START:
                ready = end + kernel_latency[k]
                if kernel_reference[k] == STAGED:
                    ready -= kernel_duration[k]
                depth = _offer(k, max(ready, start), BY_LAUNCH, n, kernel_start, kernel_cause, kernel_source, pending,
                               stack, depth)
        runnable_count = _wake(parked_on_item, n, next_parked, runnable, runnable_count)
        if position[t] < thread_ptr[t + 1]:
            runnable[runnable_count] = t
            runnable_count += 1
    return done
