# mypy: disable-error-code="no-untyped-def, assignment"
"""The simulator's inner loop, compiled with numba; see ``engine.simulate``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.simulation.program import (
    EndCause,
    KernelCause,
    LaunchReference,
    Program,
    Simulated,
    StartCause,
    Structure,
)
from tracer.arrays import Bool, Int64
from tracer.machine_code import kept_loop

# Compiled code knows plain numbers only.
PROGRAM_ORDER, OTHER_THREAD = int(StartCause.PROGRAM_ORDER), int(StartCause.OTHER_THREAD)
OWN_COST, KERNEL, QUEUE, EXTERNAL = (int(EndCause[n]) for n in ("OWN_COST", "KERNEL", "QUEUE", "EXTERNAL"))
BY_LAUNCH, BY_STREAM, BY_EDGE, BY_EXTERNAL = (int(KernelCause[n]) for n in ("LAUNCH", "STREAM", "EDGE", "EXTERNAL"))
CALL_START, STAGED = int(LaunchReference.CALL_START), int(LaunchReference.STAGED)
SUBMITTED = -1
"""Stands in an item's start cause while the item is parked with its own work submitted already."""


def _offer(kernel, ready, cause, source, out, w, depth):
    """One input of a kernel is known: it starts no earlier than ``ready``. Returns the stack's new depth."""
    if ready > out.kernel_start[kernel]:
        out.kernel_start[kernel] = ready
        out.kernel_cause[kernel] = cause
        out.kernel_source[kernel] = source
    w.pending[kernel] -= 1
    if w.pending[kernel] == 0:
        w.stack[depth] = kernel
        depth += 1
    return depth


def _park(thread, parked, on, w):
    """A thread waits for item or kernel ``on``."""
    w.next_parked[thread] = parked[on]
    parked[on] = thread


def _wake(parked, on, w, count):
    """Threads that waited for ``on`` may go on; returns how many are runnable now."""
    thread = parked[on]
    parked[on] = -1
    while thread >= 0:
        w.runnable[count] = thread
        count += 1
        thread = w.next_parked[thread]
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


@dataclass(slots=True)
class Workspace:
    """Arrays that ``run`` works in.

    Attributes:
        item_done, kernel_done: what is resolved.
        pending: inputs of each kernel that are not known yet.
        group_left: members of each rendezvous that have not arrived.
        stack: kernels whose inputs are all known; each enters once.
        heap_key, heap_thread: threads that can run, ordered by the time of their next item.
        position, clock: next item of each thread, and when the one before ended.
        parked_on_item, parked_on_kernel, next_parked: a parked thread waits for one item or one kernel; those that wait
            for the same one are a chain.
        runnable: threads that may go on.
        queue_at, left_by: the launch queue of each channel: entries up to ``queue_at`` are settled, and leave in order,
            each together with ``left_by``, the last to end of those up to it.
    """

    item_done: Bool
    kernel_done: Bool
    pending: Int64
    group_left: Int64
    stack: Int64
    heap_key: Int64
    heap_thread: Int64
    position: Int64
    clock: Int64
    parked_on_item: Int64
    parked_on_kernel: Int64
    next_parked: Int64
    runnable: Int64
    queue_at: Int64
    left_by: Int64


@kept_loop(Program, Structure, Simulated, Workspace, inner=(_offer, _park, _wake, _put_thread, _take_thread))
def run(p, order, out, w):
    """Returns how many items and kernels were resolved, and fills in ``out``."""
    threads, items, kernels = p.thread_rank.shape[0], p.item_work.shape[0], p.kernel_item.shape[0]
    done = 0
    for k in range(kernels):
        n = p.edge_ptr[k + 1] - p.edge_ptr[k]
        if p.kernel_item[k] >= 0:
            n += 1
        if p.kernel_previous[k] >= 0:
            n += 1
        w.pending[k] = n
        out.kernel_start[k] = p.kernel_external[k]
        out.kernel_cause[k] = BY_EXTERNAL
    depth = 0
    for k in range(kernels):
        if w.pending[k] == 0:
            w.stack[depth] = k
            depth += 1

    heap = 0
    runnable_count = 0
    for t in range(threads):
        if w.position[t] < p.thread_ptr[t + 1]:
            w.runnable[runnable_count] = t
            runnable_count += 1

    while True:
        # 1. settle every kernel whose inputs are known
        while depth > 0:
            depth -= 1
            k = w.stack[depth]
            g = p.kernel_group[k]
            first, last, began = k, k + 1, out.kernel_start[k]
            if g >= 0:
                if out.group_last[g] < 0 or began > out.kernel_start[out.group_last[g]]:
                    out.group_last[g] = k
                w.group_left[g] -= 1
                if w.group_left[g] > 0:
                    continue
                first, last, began = order.member_ptr[g], order.member_ptr[g + 1], out.kernel_start[out.group_last[g]]
            for m in range(first, last):
                if g >= 0:
                    k = order.member[m]
                out.kernel_end[k] = began + p.kernel_duration[k]
                w.kernel_done[k] = True
                out.order[done] = items + k
                done += 1
                for j in range(order.successor_ptr[k], order.successor_ptr[k + 1]):
                    s = order.successor[j]
                    # With overlap (a negative gap) a kernel still does not start before its predecessor did.
                    t_ready = max(out.kernel_end[k] + p.kernel_gap[s], out.kernel_start[k])
                    depth = _offer(s, t_ready, BY_STREAM, k, out, w, depth)
                for j in range(order.out_ptr[k], order.out_ptr[k + 1]):
                    e = order.out_edge[j]
                    s = order.owner[e]
                    if p.edge_fraction[e] == 1.0:
                        t_ready = out.kernel_end[k] + p.edge_lag[e]
                    else:
                        t_ready = (out.kernel_start[k]
                                   + np.int64(p.edge_fraction[e] * (out.kernel_end[k] - out.kernel_start[k]))
                                   + p.edge_lag[e])
                    depth = _offer(s, t_ready, BY_EDGE, e, out, w, depth)
                runnable_count = _wake(w.parked_on_kernel, k, w, runnable_count)

        # 2. put threads that may go on into the heap, keyed by their clock
        while runnable_count > 0:
            runnable_count -= 1
            t = w.runnable[runnable_count]
            heap = _put_thread(w.heap_key, w.heap_thread, heap, t, w.clock[t] + p.item_work[w.position[t]])
        if heap == 0:
            break

        # 3. the earliest thread's next item
        t, heap = _take_thread(w.heap_key, w.heap_thread, heap)
        n = w.position[t]

        start = w.clock[t] + p.item_work[n]
        cause, source = PROGRAM_ORDER, np.int64(-1)
        parked = False
        for j in range(p.after_ptr[n], p.after_ptr[n + 1]):
            other = p.after_item[j]
            if not w.item_done[other]:
                _park(t, w.parked_on_item, other, w)
                parked = True
                break
            ready = out.item_end[other] + p.after_lag[j]
            if ready > start:
                start, cause, source = ready, OTHER_THREAD, j
        if parked:
            continue

        # Kernels that hang on this call's start (a blocking copy works while the call waits for it).
        begins_here = False
        for j in range(order.launched_ptr[n], order.launched_ptr[n + 1]):
            if p.kernel_reference[order.launched[j]] == CALL_START:
                begins_here = True
        end = start + p.item_cost[n]
        end_cause, end_source = OWN_COST, np.int64(-1)
        slot = np.int64(-1)
        channel = p.item_channel[n]
        # Only once the queue can be full do the ends of earlier entries matter.
        if channel >= 0 and p.queue_depth[channel] > 0 and p.item_queue[n] >= p.queue_depth[channel]:
            first = p.queue_ptr[channel]
            leaves = first + p.item_queue[n] - p.queue_depth[channel]
            while w.queue_at[channel] <= leaves and w.kernel_done[p.queue_kernel[w.queue_at[channel]]]:
                at = w.queue_at[channel]
                w.left_by[at] = p.queue_kernel[at]
                if at > first and out.kernel_end[w.left_by[at - 1]] > out.kernel_end[w.left_by[at]]:
                    w.left_by[at] = w.left_by[at - 1]
                w.queue_at[channel] += 1
            if w.queue_at[channel] <= leaves:
                _park(t, w.parked_on_kernel, p.queue_kernel[w.queue_at[channel]], w)
                continue
            slot = w.left_by[leaves]
            if slot >= 0 and out.kernel_end[slot] + p.item_return[n] > end:
                end, end_cause, end_source = out.kernel_end[slot] + p.item_return[n], QUEUE, slot
        if begins_here:
            # Submitted when the queue lets it in; the wait for its own end comes below.
            submitted = start if slot < 0 else max(start, out.kernel_end[slot])
            for j in range(order.launched_ptr[n], order.launched_ptr[n + 1]):
                k = order.launched[j]
                if (p.kernel_reference[k] == CALL_START and not w.kernel_done[k]
                        and out.item_start_cause[n] != SUBMITTED):
                    depth = _offer(k, submitted + p.kernel_latency[k], BY_LAUNCH, n, out, w, depth)
            # Mark as submitted, so that coming back to this item after parking does not submit twice.
            out.item_start_cause[n] = SUBMITTED
        for j in range(p.wait_ptr[n], p.wait_ptr[n + 1]):
            k = p.wait_kernel[j]
            if not w.kernel_done[k]:
                _park(t, w.parked_on_kernel, k, w)
                parked = True
                break
            ready = out.kernel_end[k] + p.wait_lag[j]
            if ready > end:
                end, end_cause, end_source = ready, KERNEL, k
        if parked:
            continue
        if p.item_external[n] > end:
            end, end_cause, end_source = p.item_external[n], EXTERNAL, np.int64(-1)

        out.item_start[n] = start
        out.item_end[n] = end
        out.item_start_cause[n] = cause
        out.item_start_source[n] = source
        out.item_end_cause[n] = end_cause
        out.item_end_source[n] = end_source
        w.item_done[n] = True
        out.order[done] = n
        done += 1
        w.clock[t] = end
        w.position[t] = n + 1
        for j in range(order.launched_ptr[n], order.launched_ptr[n + 1]):
            k = order.launched[j]
            if p.kernel_reference[k] != CALL_START:
                ready = end + p.kernel_latency[k]
                if p.kernel_reference[k] == STAGED:
                    ready -= p.kernel_duration[k]
                depth = _offer(k, max(ready, start), BY_LAUNCH, n, out, w, depth)
        runnable_count = _wake(w.parked_on_item, n, w, runnable_count)
        if w.position[t] < p.thread_ptr[t + 1]:
            w.runnable[runnable_count] = t
            runnable_count += 1
    return done
