# mypy: disable-error-code="no-untyped-def, assignment"
"""``retiming.WorkingOrder.times``'s inner loop, compiled. Each item and kernel is worked out once, from others before,
in ``LANES`` variants together: what waits for what is looked up once for all, and a row of them is one vector register.

Nearly all items follow the one before and wait for nothing, and nearly all kernels wait for a launch and the kernel
before alone: each of these is one pass over a row (``_item_alone``, ``_kernel_alone``).
"""

from __future__ import annotations

from graph_predictor.simulation.program import Anchor
from tracer.machine_code import kept_loop

CALL_END, CALL_START, STAGED = int(Anchor.CALL_END), int(Anchor.CALL_START), int(Anchor.STAGED)
LANES = 8
"""Variants that are worked out together: so many int64 are a cache line, and a vector register of most servers."""
_WHOLE, _EACH = "int64[:]", "int64[:,:]"


def _item_alone(n, row, external, work, cost, before, start, end):
    """Fill in an item that follows the one before it on its thread, and waits for nothing else."""
    for v in range(LANES):
        begins = before[n - 1, v] + work[row, v]
        start[n, v] = begins
        end[n, v] = max(begins + cost[row, v], external)


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


def _start_item(n, opens, thread_start, item_of, work, after_ptr, after_item, after_lag, item_start, item_end):
    """Fill in when an item starts: after the one before it in its thread, and after those of other threads."""
    row = item_of[n]
    if opens[n] >= 0:
        for v in range(LANES):
            item_start[n, v] = thread_start[opens[n]] + work[row, v]
    else:
        for v in range(LANES):
            item_start[n, v] = item_end[n - 1, v] + work[row, v]
    for j in range(after_ptr[n], after_ptr[n + 1]):
        _after(n, after_item[j], after_lag[j], item_end, item_start)


def _slot(n, item_channel, item_queue, queue_ptr, queue_kernel, queue_depth, queue_at, left, kernel_end):
    """Where in the launch queues the entry is whose leaving makes room for an item's; -1 if there is room anyway."""
    channel = item_channel[n]
    if channel < 0 or queue_depth[channel] <= 0 or item_queue[n] < queue_depth[channel]:
        return -1
    first = queue_ptr[channel]
    leaves = first + item_queue[n] - queue_depth[channel]
    while queue_at[channel] <= leaves:
        at = queue_at[channel]
        k = queue_kernel[at]
        for v in range(LANES):
            left[at, v] = kernel_end[k, v]
        if at > first:
            for v in range(LANES):
                left[at, v] = max(left[at, v], left[at - 1, v])
        queue_at[channel] += 1
    return leaves


@kept_loop(
    *[_WHOLE] * 4, _EACH, _EACH, *[_WHOLE] * 2, _EACH, *[_WHOLE] * 9, "int8[:]", *[_WHOLE] * 5, _EACH, *[_WHOLE] * 2,
    "float64[:]", *[_WHOLE] * 8, *[_EACH] * 4, _WHOLE, _EACH, _WHOLE,
    inner=(_after, _item_alone, _kernel_alone, _start_item, _slot), apart=True)
def retime(
    order, opens, thread_start, item_of, work, cost, item_external, floor_of, floor, item_queue, item_channel,
    after_ptr, after_item, after_lag, wait_ptr, wait_kernel, wait_lag, kernel_item, kernel_anchor, kernel_latency,
    kernel_previous, kernel_gap, kernel_external, kernel_of, duration, edge_ptr, edge_kernel, edge_fraction, edge_lag,
    kernel_group, queue_ptr, queue_kernel, queue_depth, item_return, member_ptr, member, item_start, item_end,
    kernel_start, kernel_end, queue_at, left, group_met,
):  # fmt: skip
    """Fill in starts and ends, [rows, LANES]; arrays as in ``Program`` and ``retiming.ProgramVariants``."""
    items = item_of.shape[0]
    for i in range(order.shape[0]):
        n = order[i]
        if n < items:
            row, external = item_of[n], item_external[n]
            slot = _slot(n, item_channel, item_queue, queue_ptr, queue_kernel, queue_depth, queue_at, left, kernel_end)
            first, last = wait_ptr[n], wait_ptr[n + 1]
            if opens[n] < 0 and after_ptr[n] == after_ptr[n + 1]:
                _item_alone(n, row, external, work, cost, item_end, item_start, item_end)
            else:
                _start_item(n, opens, thread_start, item_of, work, after_ptr, after_item, after_lag, item_start,
                            item_end)
                for v in range(LANES):
                    item_end[n, v] = max(item_start[n, v] + cost[row, v], external)
            if slot >= 0:
                _after(n, slot, item_return[n], left, item_end)
            for j in range(first, last):
                _after(n, wait_kernel[j], wait_lag[j], kernel_end, item_end)
            if floor_of[n] >= 0:
                _after(n, floor_of[n], 0, floor, item_end)
            continue
        k = n - items
        g, n, before, e = kernel_group[k], kernel_item[k], kernel_previous[k], edge_ptr[k]
        if g < 0 and n >= 0 and before >= 0 and e == edge_ptr[k + 1] and kernel_anchor[k] == CALL_END:
            _kernel_alone(k, n, kernel_latency[k], before, kernel_gap[k], kernel_external[k], kernel_of[k], item_start,
                          item_end, duration, kernel_start, kernel_end, kernel_start, kernel_end)
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
            external, n, lag, anchor = kernel_external[k], kernel_item[k], kernel_latency[k], kernel_anchor[k]
            row = kernel_of[k]
            for v in range(LANES):
                kernel_start[k, v] = external
            if n >= 0 and anchor == CALL_START:
                # Submitted within the call, as soon as the queue lets it in; the call may not have ended.
                _start_item(n, opens, thread_start, item_of, work, after_ptr, after_item, after_lag, item_start,
                            item_end)
                slot = _slot(n, item_channel, item_queue, queue_ptr, queue_kernel, queue_depth, queue_at, left,
                             kernel_end)
                _after(k, n, lag, item_start, kernel_start)
                if slot >= 0:
                    _after(k, slot, lag, left, kernel_start)
            elif n >= 0 and anchor == STAGED:
                for v in range(LANES):
                    ready = max(item_end[n, v] + lag - duration[row, v], item_start[n, v])
                    kernel_start[k, v] = max(external, ready)
            elif n >= 0:
                for v in range(LANES):
                    kernel_start[k, v] = max(external, max(item_end[n, v] + lag, item_start[n, v]))
            before, gap = kernel_previous[k], kernel_gap[k]
            if before >= 0:
                for v in range(LANES):
                    ready = max(kernel_end[before, v] + gap, kernel_start[before, v])
                    kernel_start[k, v] = max(kernel_start[k, v], ready)
            for e in range(edge_ptr[k], edge_ptr[k + 1]):
                source, fraction, lag = edge_kernel[e], edge_fraction[e], edge_lag[e]
                if fraction == 1.0:
                    _after(k, source, lag, kernel_end, kernel_start)
                else:
                    for v in range(LANES):
                        part = int(fraction * (kernel_end[source, v] - kernel_start[source, v]))
                        kernel_start[k, v] = max(kernel_start[k, v], kernel_start[source, v] + part + lag)
        if g < 0:
            row = kernel_of[k]
            for v in range(LANES):
                kernel_end[k, v] = kernel_start[k, v] + duration[row, v]
            continue
        for v in range(LANES):
            arrived = kernel_start[member[first], v]
            for m in range(first + 1, last):
                arrived = max(arrived, kernel_start[member[m], v])
            for m in range(first, last):
                kernel_end[member[m], v] = arrived + duration[kernel_of[member[m]], v]
    return items
