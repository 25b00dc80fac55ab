# mypy: disable-error-code="no-untyped-def, assignment"
"""``retiming.WorkingOrder.times``'s inner loop, compiled. Each item and kernel is worked out once, from others before,
in ``LANES`` variants together: what waits for what is looked up once for all, and a row of them is one vector register.

Nearly all items follow the one before and wait for nothing, and nearly all kernels wait for a launch and the kernel
before alone: each of these is one pass over a row (``_item_alone``, ``_kernel_alone``). Times are kept only while
something still waits for them, in rows that are used again (``place``): they stay in the processor's cache.
"""

from __future__ import annotations

from graph_predictor.simulation.program import Anchor
from tracer.machine_code import kept_loop

CALL_END, CALL_START, STAGED = int(Anchor.CALL_END), int(Anchor.CALL_START), int(Anchor.STAGED)
LANES = 8
"""Variants that are worked out together: so many int64 are a cache line, and a vector register of most servers."""
_WHOLE, _EACH = "int64[:]", "int64[:,:]"


def _item_alone(at, last, row, external, work, cost, before, start, end):
    """Fill in an item that follows the one before it on its thread, and waits for nothing else."""
    for v in range(LANES):
        begins = before[last, v] + work[row, v]
        start[at, v] = begins
        end[at, v] = max(begins + cost[row, v], external)


def _kernel_alone(k, n, lag, before, gap, external, row, item_start, item_end, duration, earlier_start, earlier_end,
                  start, end):
    """Fill in a kernel that waits for the end of its launch and for the kernel before it on its stream."""
    for v in range(LANES):
        launched = max(item_end[n, v] + lag, item_start[n, v])
        free = max(earlier_end[before, v] + gap, earlier_start[before, v])
        begins = max(max(external, launched), free)
        start[k, v] = begins
        end[k, v] = begins + duration[row, v]


def _after(n, other, lag, source, found):
    """Let a row be no less than another and a lag."""
    for v in range(LANES):
        found[n, v] = max(found[n, v], source[other, v] + lag)


def _start_item(n, opens, before, place, thread_start, item_of, work, after_ptr, after_item, after_lag, start, end):
    """Fill in when an item starts: after the one before it in its thread, and after those of other threads."""
    row, at = item_of[n], place[n]
    if opens[n] >= 0:
        for v in range(LANES):
            start[at, v] = thread_start[opens[n]] + work[row, v]
    else:
        last = place[before[n]]
        for v in range(LANES):
            start[at, v] = end[last, v] + work[row, v]
    for j in range(after_ptr[n], after_ptr[n + 1]):
        _after(at, place[after_item[j]], after_lag[j], end, start)


def _leaves(n, item_channel, item_queue, queue_ptr, queue_depth):
    """Where in the launch queues the entry is whose leaving makes room for an item's; -1 if there is room anyway."""
    channel = item_channel[n]
    if channel < 0 or queue_depth[channel] <= 0 or item_queue[n] < queue_depth[channel]:
        return -1
    return queue_ptr[channel] + item_queue[n] - queue_depth[channel]


def _slot(n, items, place, item_channel, item_queue, queue_ptr, queue_kernel, queue_depth, queue_at, left, end):
    """``_leaves``, with the times by which entries have left filled in up to there."""
    leaves = _leaves(n, item_channel, item_queue, queue_ptr, queue_depth)
    if leaves < 0:
        return leaves
    channel = item_channel[n]
    first = queue_ptr[channel]
    while queue_at[channel] <= leaves:
        at = queue_at[channel]
        k = place[items + queue_kernel[at]]
        for v in range(LANES):
            left[at, v] = end[k, v]
        if at > first:
            for v in range(LANES):
                left[at, v] = max(left[at, v], left[at - 1, v])
        queue_at[channel] += 1
    return leaves


@kept_loop(
    *[_WHOLE] * 6, _EACH, _EACH, *[_WHOLE] * 2, _EACH, *[_WHOLE] * 9, "int8[:]", *[_WHOLE] * 5, _EACH, *[_WHOLE] * 2,
    "float64[:]", *[_WHOLE] * 8, *[_EACH] * 2, _WHOLE, _EACH, _WHOLE,
    inner=(_after, _item_alone, _kernel_alone, _start_item, _leaves, _slot), apart=True)
def retime(
    order, opens, previous, place, thread_start, item_of, work, cost, item_external, floor_of, floor, item_queue,
    item_channel,
    after_ptr, after_item, after_lag, wait_ptr, wait_kernel, wait_lag, kernel_item, kernel_anchor, kernel_latency,
    kernel_previous, kernel_gap, kernel_external, kernel_of, duration, edge_ptr, edge_kernel, edge_fraction, edge_lag,
    kernel_group, queue_ptr, queue_kernel, queue_depth, item_return, member_ptr, member, start, end, queue_at, left,
    group_met,
):  # fmt: skip
    """Work through starts and ends, [places, LANES]; arrays as in ``Program``, ``retiming.ProgramVariants`` and
    ``retiming.WorkingOrder``."""
    items = item_of.shape[0]
    for i in range(order.shape[0]):
        n = order[i]
        at = place[n]
        if n < items:
            row, external = item_of[n], item_external[n]
            slot = _slot(n, items, place, item_channel, item_queue, queue_ptr, queue_kernel, queue_depth, queue_at,
                         left, end)
            first, last = wait_ptr[n], wait_ptr[n + 1]
            if opens[n] < 0 and after_ptr[n] == after_ptr[n + 1]:
                _item_alone(at, place[previous[n]], row, external, work, cost, end, start, end)
            else:
                _start_item(n, opens, previous, place, thread_start, item_of, work, after_ptr, after_item, after_lag,
                            start, end)
                for v in range(LANES):
                    end[at, v] = max(start[at, v] + cost[row, v], external)
            if slot >= 0:
                _after(at, slot, item_return[n], left, end)
            for j in range(first, last):
                _after(at, place[items + wait_kernel[j]], wait_lag[j], end, end)
            if floor_of[n] >= 0:
                _after(at, floor_of[n], 0, floor, end)
            continue
        k = n - items
        g, n, before, e = kernel_group[k], kernel_item[k], kernel_previous[k], edge_ptr[k]
        if g < 0 and n >= 0 and before >= 0 and e == edge_ptr[k + 1] and kernel_anchor[k] == CALL_END:
            _kernel_alone(at, place[n], kernel_latency[k], place[items + before], kernel_gap[k], kernel_external[k],
                          kernel_of[k], start, end, duration, start, end, start, end)
            continue
        first, last = 0, 1
        if g >= 0:
            if group_met[g] >= 0:
                continue  # worked out with the first of its rendezvous
            group_met[g] = 1
            first, last = member_ptr[g], member_ptr[g + 1]
        for m in range(first, last):
            if g >= 0:
                k = member[m]
                at = place[items + k]
            external, n, lag, anchor = kernel_external[k], kernel_item[k], kernel_latency[k], kernel_anchor[k]
            row = kernel_of[k]
            for v in range(LANES):
                start[at, v] = external
            if n >= 0 and anchor == CALL_START:
                # Submitted within the call, as soon as the queue lets it in; the call may not have ended.
                _start_item(n, opens, previous, place, thread_start, item_of, work, after_ptr, after_item, after_lag,
                            start, end)
                slot = _slot(n, items, place, item_channel, item_queue, queue_ptr, queue_kernel, queue_depth, queue_at,
                             left, end)
                _after(at, place[n], lag, start, start)
                if slot >= 0:
                    _after(at, slot, lag, left, start)
            elif n >= 0 and anchor == STAGED:
                call = place[n]
                for v in range(LANES):
                    ready = max(end[call, v] + lag - duration[row, v], start[call, v])
                    start[at, v] = max(external, ready)
            elif n >= 0:
                call = place[n]
                for v in range(LANES):
                    start[at, v] = max(external, max(end[call, v] + lag, start[call, v]))
            before, gap = kernel_previous[k], kernel_gap[k]
            if before >= 0:
                earlier = place[items + before]
                for v in range(LANES):
                    ready = max(end[earlier, v] + gap, start[earlier, v])
                    start[at, v] = max(start[at, v], ready)
            for e in range(edge_ptr[k], edge_ptr[k + 1]):
                source, fraction, lag = place[items + edge_kernel[e]], edge_fraction[e], edge_lag[e]
                if fraction == 1.0:
                    _after(at, source, lag, end, start)
                else:
                    for v in range(LANES):
                        part = int(fraction * (end[source, v] - start[source, v]))
                        start[at, v] = max(start[at, v], start[source, v] + part + lag)
        if g < 0:
            row = kernel_of[k]
            for v in range(LANES):
                end[at, v] = start[at, v] + duration[row, v]
            continue
        for v in range(LANES):
            arrived = start[place[items + member[first]], v]
            for m in range(first + 1, last):
                arrived = max(arrived, start[place[items + member[m]], v])
            for m in range(first, last):
                end[place[items + member[m]], v] = arrived + duration[kernel_of[member[m]], v]
    return items


def _read_item(i, n, items, last_read, opens, previous, after_ptr, after_item, item_channel, item_queue, queue_ptr,
               queue_kernel, queue_depth, queue_at):
    """Note what is read at a position to fill in when an item starts, and when the queue lets it in."""
    if opens[n] < 0:
        last_read[previous[n]] = i
    for j in range(after_ptr[n], after_ptr[n + 1]):
        last_read[after_item[j]] = i
    leaves = _leaves(n, item_channel, item_queue, queue_ptr, queue_depth)
    if leaves >= 0:
        channel = item_channel[n]
        while queue_at[channel] <= leaves:
            last_read[items + queue_kernel[queue_at[channel]]] = i
            queue_at[channel] += 1
    return 0


def _take(node, i, place, used, free, last_read, first_of, next_of, kept):
    """Give a node a place, and note until when it has it; returns how many places there are. ``used`` has the number
    of places, and of those that are free."""
    if place[node] >= 0:
        return used[0]
    if used[1] > 0:
        used[1] -= 1
        place[node] = free[used[1]]
    else:
        place[node] = used[0]
        used[0] += 1
    if not kept[node]:
        until = max(i, last_read[node])
        next_of[node] = first_of[until]
        first_of[until] = node
    return used[0]


@kept_loop(*[_WHOLE] * 8, "int8[:]", *[_WHOLE] * 11, "boolean[:]", *[_WHOLE] * 8,
           inner=(_leaves, _read_item, _take))
def place_nodes(
    order, opens, previous, item_queue, item_channel, after_ptr, after_item, kernel_item, kernel_anchor,
    kernel_previous, wait_ptr, wait_kernel, edge_ptr, edge_kernel, kernel_group, queue_ptr, queue_kernel, queue_depth,
    member_ptr, member, kept, queue_at, group_met, last_read, first_of, next_of, free, used, place,
):  # fmt: skip
    """Fill in a place for the times of every node, that of another one that nothing waits for any more where there is
    one; those that are ``kept`` stay. Returns how many places there are."""
    items = opens.shape[0]
    for turn in range(2):
        for i in range(order.shape[0]):
            n = order[i]
            if n < items:
                if turn == 0:
                    last_read[n] = i  # a copy within the call may have filled in its start before
                    _read_item(i, n, items, last_read, opens, previous, after_ptr, after_item, item_channel,
                               item_queue, queue_ptr, queue_kernel, queue_depth, queue_at)
                    for j in range(wait_ptr[n], wait_ptr[n + 1]):
                        last_read[items + wait_kernel[j]] = i
                else:
                    _take(n, i, place, used, free, last_read, first_of, next_of, kept)
            else:
                k = n - items
                g = kernel_group[k]
                first, last = 0, 1
                if g >= 0:
                    first, last = member_ptr[g], member_ptr[g + 1]
                    if group_met[g] > turn:
                        last = first
                    group_met[g] = turn + 1
                for m in range(first, last):
                    if g >= 0:
                        k = member[m]
                    n = kernel_item[k]
                    if turn == 1:
                        _take(items + k, i, place, used, free, last_read, first_of, next_of, kept)
                        if n >= 0 and kernel_anchor[k] == CALL_START:
                            _take(n, i, place, used, free, last_read, first_of, next_of, kept)
                        continue
                    if n >= 0:
                        last_read[n] = i
                        if kernel_anchor[k] == CALL_START:
                            _read_item(i, n, items, last_read, opens, previous, after_ptr, after_item, item_channel,
                                       item_queue, queue_ptr, queue_kernel, queue_depth, queue_at)
                    if kernel_previous[k] >= 0:
                        last_read[items + kernel_previous[k]] = i
                    for e in range(edge_ptr[k], edge_ptr[k + 1]):
                        last_read[items + edge_kernel[e]] = i
            if turn == 1:
                node = first_of[i]
                while node >= 0:
                    free[used[1]] = place[node]
                    used[1] += 1
                    node = next_of[node]
    return used[0]
