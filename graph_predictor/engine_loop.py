# mypy: disable-error-code="no-untyped-def, assignment"
"""The simulator's inner loop, compiled with numba. Plain arrays in, plain arrays filled; see ``engine.simulate``."""

from __future__ import annotations

import numpy as np

from graph_predictor.causes import EndCause, KernelCause, StartCause
from graph_predictor.program import Anchor
from kernel_models.compiled import compiled

# Compiled code knows plain numbers only.
PROGRAM_ORDER, OTHER_THREAD = int(StartCause.PROGRAM_ORDER), int(StartCause.OTHER_THREAD)
OWN_COST, KERNEL, QUEUE, EXTERNAL = (int(EndCause[n]) for n in ("OWN_COST", "KERNEL", "QUEUE", "EXTERNAL"))
BY_LAUNCH, BY_STREAM, BY_EDGE, BY_EXTERNAL = (int(KernelCause[n]) for n in ("LAUNCH", "STREAM", "EDGE", "EXTERNAL"))
CALL_START, STAGED = int(Anchor.CALL_START), int(Anchor.STAGED)
SUBMITTED = -1
"""Stands in an item's start cause while the item is parked with its own work submitted already."""



@compiled()
def _push(heap, size, kernel, key):
    """Append a kernel to a binary min-heap of kernels ordered by ``key``; returns the new size."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if key[heap[parent]] <= key[kernel]:
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = kernel
    return size + 1


@compiled()
def _pop(heap, size, key):
    """Remove the kernel with the least key; returns (it, the new size)."""
    least = heap[0]
    size -= 1
    moved = heap[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        if key[moved] <= key[heap[child]]:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = moved
    return least, size


@compiled()
def _count_up_to(heap, size, key, limit, enough):
    """How many kernels of the heap have a key of at most ``limit``, counting no further than ``enough``."""
    todo = np.empty(enough + 64, np.int64)
    todo[0] = 0
    left, found = 1, 0
    while left > 0 and found < enough:
        left -= 1
        i = todo[left]
        if i >= size or key[heap[i]] > limit:
            continue
        found += 1
        # Depth first: at most one sibling a level stays behind, and a heap of 2**64 elements has 64 levels.
        todo[left] = 2 * i + 2
        todo[left + 1] = 2 * i + 1
        left += 2
    return found


@compiled()
def _enter(heap, rank, room, kernel, key, size, slot_kernel):
    """Put a finished entry into a rank's queue; the earliest of more than ``room`` of them has left its slot."""
    size[rank] = _push(heap, size[rank], kernel, key)
    if size[rank] > room:
        left, size[rank] = _pop(heap, size[rank], key)
        if slot_kernel[rank] < 0 or key[left] > key[slot_kernel[rank]]:
            slot_kernel[rank] = left


@compiled()
def _line_up(line, base, room, first, size, rank, kernel, key, slot_kernel):
    """Put a finished entry into a rank's queue: a ring of ``room + 1`` places in the order of their ends, from
    ``first`` on. The earliest of more than ``room`` of them has left its slot.

    Entries come nearly in that order, so that few have to make place.
    """
    places = room + 1
    here = first[rank] + size[rank]
    if here >= places:
        here -= places
    for _ in range(size[rank]):
        before = here - 1 if here > 0 else room
        if key[line[base + before]] <= key[kernel]:
            break
        line[base + here] = line[base + before]
        here = before
    line[base + here] = kernel
    size[rank] += 1
    if size[rank] > room:
        left = line[base + first[rank]]
        first[rank] = first[rank] + 1 if first[rank] < room else 0
        size[rank] -= 1
        if slot_kernel[rank] < 0 or key[left] > key[slot_kernel[rank]]:
            slot_kernel[rank] = left


@compiled()
def _ended_by(line, base, room, first, size, key, limit):
    """How many entries of a ring (see ``_line_up``) have ended by ``limit``."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if key[line[base + (first + middle) % (room + 1)]] <= limit:
            low = middle + 1
        else:
            high = middle
    return low


@compiled()
def _overtaken(entries, room, kernel_done, kernel_end, in_time):
    """The queue for a call whose entries a call of another thread, recorded later, has passed already.

    Returns (the entry whose end frees the call's slot or -1, an unsettled entry to wait for or -1).
    """
    heap = np.empty(room + 2, np.int64)
    size, slot = np.zeros(1, np.int64), np.full(1, -1, np.int64)
    still, first = 0, np.int64(-1)
    for k in entries:
        if kernel_done[k]:
            _enter(heap, 0, room, k, kernel_end, size, slot)
        else:
            still += 1
            if first < 0:
                first = k
    excess = size[0] + still - room
    if still > 0 and excess > 0 and _count_up_to(heap, size[0], kernel_end, in_time, excess) < excess:
        return np.int64(-1), first
    return slot[0], np.int64(-1)


@compiled()
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


@compiled()
def _park(thread, parked, on, next_parked):
    """A thread waits for item or kernel ``on``; threads that wait for the same one are a chain."""
    next_parked[thread] = parked[on]
    parked[on] = thread


@compiled()
def _wake(parked, on, next_parked, runnable, count):
    """Threads that waited for ``on`` may go on; returns how many are runnable now."""
    thread = parked[on]
    parked[on] = -1
    while thread >= 0:
        runnable[count] = thread
        count += 1
        thread = next_parked[thread]
    return count


@compiled()
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


@compiled()
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


@compiled()
def run(
    thread_ptr, thread_rank, thread_start, item_work, item_cost, item_external, item_queue,
    after_ptr, after_item, after_lag, wait_ptr, wait_kernel, wait_lag,
    kernel_item, kernel_anchor, kernel_latency, kernel_previous, kernel_gap, kernel_duration,
    kernel_external, edge_ptr, edge_kernel, edge_fraction, edge_lag, kernel_group, group_size,
    queue_ptr, queue_kernel, queue_depth, item_return, intrinsic,
    launched_ptr, launched, successor_ptr, successor, out_ptr, out_edge, owner, member_ptr, member,
    item_start, item_end, item_start_cause, item_start_source, item_end_cause,
    item_end_source, kernel_start, kernel_end, kernel_cause, kernel_source, group_last,
):  # fmt: skip
    """Returns how many items and kernels were resolved. See ``simulate``; all arrays as in ``Program``."""
    threads, items, kernels = thread_rank.shape[0], item_work.shape[0], kernel_item.shape[0]
    ranks = queue_depth.shape[0]
    done = 0
    item_done = np.zeros(items, np.bool_)
    kernel_done = np.zeros(kernels, np.bool_)
    pending = np.zeros(kernels, np.int64)
    group_left = group_size.copy()
    for k in range(kernels):
        n = edge_ptr[k + 1] - edge_ptr[k]
        if kernel_item[k] >= 0:
            n += 1
        if kernel_previous[k] >= 0:
            n += 1
        pending[k] = n
        kernel_start[k] = kernel_external[k]
        kernel_cause[k] = BY_EXTERNAL
    # A stack of kernels whose inputs are all known; each enters once.
    stack = np.empty(kernels + 1, np.int64)
    depth = 0
    for k in range(kernels):
        if pending[k] == 0:
            stack[depth] = k
            depth += 1

    # Threads that can run, ordered by the time of their next item. Keys and threads move together in the heap.
    heap_key = np.empty(threads + 1, np.int64)
    heap_thread = np.empty(threads + 1, np.int64)
    heap = 0
    position = thread_ptr[:-1].copy()
    clock = thread_start.copy()
    # A parked thread waits for one item or one kernel; chains by array links.
    parked_on_item = np.full(items, -1, np.int64)
    parked_on_kernel = np.full(kernels, -1, np.int64)
    next_parked = np.full(threads, -1, np.int64)
    runnable = np.empty(threads, np.int64)
    runnable_count = 0
    for t in range(threads):
        if position[t] < thread_ptr[t + 1]:
            runnable[runnable_count] = t
            runnable_count += 1

    # Launch queue of each rank: the largest (depth - 1) ends so far, in order; what falls out is the last freed slot.
    queue_at = queue_ptr[:-1].copy()
    queue_base = np.zeros(ranks + 1, np.int64)
    for r in range(ranks):
        queue_base[r + 1] = queue_base[r] + max(queue_depth[r], 1) + 1
    line = np.empty(queue_base[ranks] + 1, np.int64)
    line_first = np.zeros(ranks, np.int64)
    queue_size = np.zeros(ranks, np.int64)
    slot_kernel = np.full(ranks, -1, np.int64)
    unsettled = np.empty(queue_kernel.shape[0] + 1, np.int64)
    unsettled_count = np.zeros(ranks, np.int64)

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
        r = thread_rank[t]

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
            if kernel_anchor[launched[j]] == CALL_START:
                begins_here = True
        end = start + item_cost[n]
        end_cause, end_source = OWN_COST, np.int64(-1)
        slot = np.int64(-1)
        wanted = item_queue[n]
        # Only once the queue can be full do the ends of earlier entries matter.
        if wanted >= queue_depth[r] and queue_depth[r] > 0:
            room = queue_depth[r] - 1
            low, high = queue_ptr[r], queue_ptr[r] + wanted
            # A slot that is free by then delays nothing: neither the call's return nor what the call itself waits for.
            in_time = end - item_return[n]
            if begins_here and start < in_time:
                in_time = start
            blocker = np.int64(-1)
            if high < queue_at[r]:
                slot, blocker = _overtaken(queue_kernel[low:high], room, kernel_done, kernel_end, in_time)
            else:
                base = queue_base[r]
                still = 0
                for j in range(low, low + unsettled_count[r]):
                    k = unsettled[j]
                    if kernel_done[k]:
                        _line_up(line, base, room, line_first, queue_size, r, k, kernel_end, slot_kernel)
                    else:
                        unsettled[low + still] = k
                        still += 1
                unsettled_count[r] = still
                if still > 0:
                    blocker = unsettled[low]
                ended = 0
                for j in range(queue_at[r], high):
                    k = queue_kernel[j]
                    if not kernel_done[k]:
                        if blocker < 0:
                            blocker = k
                    elif kernel_end[k] <= in_time:
                        ended += 1
                # Work that is not settled yet may hold its slot for ever: enough others must have ended in time.
                if blocker >= 0:
                    excess = queue_size[r] + still + high - queue_at[r] - room
                    if excess <= ended or ended + _ended_by(line, base, room, line_first[r], queue_size[r], kernel_end,
                                                            in_time) >= excess:
                        blocker = -1
                if blocker < 0:
                    while queue_at[r] < high:
                        k = queue_kernel[queue_at[r]]
                        queue_at[r] += 1
                        if kernel_done[k]:
                            _line_up(line, base, room, line_first, queue_size, r, k, kernel_end, slot_kernel)
                        else:
                            unsettled[low + still] = k
                            still += 1
                    unsettled_count[r] = still
                    slot = slot_kernel[r]
            if blocker >= 0:
                _park(t, parked_on_kernel, blocker, next_parked)
                continue
            if slot >= 0 and kernel_end[slot] + item_return[n] > end:
                end, end_cause, end_source = kernel_end[slot] + item_return[n], QUEUE, slot
        if begins_here:
            # Submitted when the queue lets it in; the wait for its own end comes below.
            submitted = start if slot < 0 else max(start, kernel_end[slot])
            for j in range(launched_ptr[n], launched_ptr[n + 1]):
                k = launched[j]
                if kernel_anchor[k] == CALL_START and not kernel_done[k] and item_start_cause[n] != SUBMITTED:
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
        done += 1
        clock[t] = end
        position[t] = n + 1
        for j in range(launched_ptr[n], launched_ptr[n + 1]):
            k = launched[j]
            if kernel_anchor[k] != CALL_START:
                ready = end + kernel_latency[k]
                if kernel_anchor[k] == STAGED:
                    ready -= kernel_duration[k]
                depth = _offer(k, max(ready, start), BY_LAUNCH, n, kernel_start, kernel_cause, kernel_source, pending,
                               stack, depth)
        runnable_count = _wake(parked_on_item, n, next_parked, runnable, runnable_count)
        if position[t] < thread_ptr[t + 1]:
            runnable[runnable_count] = t
            runnable_count += 1
    return done
