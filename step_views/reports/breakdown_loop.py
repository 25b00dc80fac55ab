# mypy: disable-error-code="no-untyped-def"
"""Host and GPU time of steps by operation, compiled: each event of a step is looked at once. See ``breakdown``."""

from __future__ import annotations

from tracer.columns_loop import COUNT, GROUP, add, after, hand_over
from tracer.machine_code import kept_loop

CALLS, HOST, WAITING, GPU = range(4)
"""The four sums."""


def rounded(value):
    """The nearest whole number, of two the even one: as ``whole_ns`` rounds."""
    size = abs(value)
    whole = int(size)
    rest = size - whole
    if rest > 0.5 or (rest == 0.5 and whole & 1):
        whole += 1
    return -whole if value < 0 else whole


def spend(op, column, ns, slot_of, share, room, there):
    """Add time of the host to an operation's slot: as recorded, or the share of it that is left."""
    if share.shape[0] > 0:
        ns = rounded(ns * share[op])
    if ns != 0:
        add(slot_of[op], column, ns, room, there)


@kept_loop(
    "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]",
    "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]",
    "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]",
    "int64[:]", "float64[:]", "int64[:,:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:,:]",
    inner=(after, rounded, add, spend, hand_over))
def sum_steps(
    low, high, own_thread, host_first, host_thread, host_start, host_end, host_op,
    wait_first, wait_thread, wait_start, wait_end, wait_latest, host_of_wait,
    kernel_first, kernel_order, launched_by, kernel_ns, call_first, call_order,
    slot_of, share, room, there, state, steps, slots, sums,
):
    """Add up what steps consist of by slot; returns how many steps are done.

    Where there is no more room for sums it returns early, to be called again with more and the same ``state``.

    Args:
        low, high, own_thread: begin, end (ns of the window) and thread of each step.
        host_first, host_thread, host_start, host_end, host_op: the operations' own time, disjoint intervals by thread
            and start, and where those of each thread begin.
        wait_first, wait_thread, wait_start, wait_end, wait_latest: waiting likewise, with the latest end of a thread's
            intervals up to each.
        host_of_wait: of each thread that waits, which of those with operations it is (-1: none).
        kernel_first, kernel_order: each step's device work, see ``tally_rows``.
        launched_by, kernel_ns: of all device work: its operation, and its length.
        call_first, call_order: each step's calls of operations.
        slot_of: of each operation; of what is in none and of work whose launch is unknown.
        share: of each operation, of what is in none: the share of its time that is left; empty where all of it is.
        room, there, state, steps, slots, sums: see ``tally_rows``.
    """
    nowhere = slot_of.shape[0] - 2
    for step in range(state[GROUP], low.shape[0]):
        if state[COUNT] + room.shape[0] > steps.shape[0]:
            state[GROUP] = step
            return step
        begin, until, own, waited = low[step], high[step], 0, 0
        for thread in range(host_first.shape[0] - 1):
            last = host_first[thread + 1]
            at = after(host_end, host_first[thread], last, begin)
            while at < last and host_start[at] < until:
                ns = min(host_end[at], until) - max(host_start[at], begin)
                if host_thread[at] == own_thread[step]:
                    own += ns
                spend(host_op[at], HOST, ns, slot_of, share, room, there)
                at += 1
        for thread in range(wait_first.shape[0] - 1):
            wait = after(wait_latest, wait_first[thread], wait_first[thread + 1], begin)
            among = host_of_wait[thread]
            while wait < wait_first[thread + 1] and wait_start[wait] < until:
                first, end = max(wait_start[wait], begin), min(wait_end[wait], until)
                wait += 1
                if first >= end:
                    continue
                rest = end - first
                if among >= 0:
                    last = host_first[among + 1]
                    at = after(host_end, host_first[among], last, first)
                    while at < last and host_start[at] < end:
                        ns = min(host_end[at], end) - max(host_start[at], first)
                        spend(host_op[at], HOST, -ns, slot_of, share, room, there)
                        add(slot_of[host_op[at]], WAITING, ns, room, there)
                        rest -= ns
                        at += 1
                # Outside any operation only the step's own thread counts: others are idle there.
                if wait_thread[wait - 1] == own_thread[step]:
                    waited += rest
        if own_thread[step] >= 0:
            if waited != 0:
                add(slot_of[nowhere], WAITING, waited, room, there)
            spend(nowhere, HOST, until - begin - own - waited, slot_of, share, room, there)
        for at in range(kernel_first[step], kernel_first[step + 1]):
            row = kernel_order[at]
            if kernel_ns[row] != 0:
                add(slot_of[launched_by[row]], GPU, kernel_ns[row], room, there)
        for at in range(call_first[step], call_first[step + 1]):
            add(slot_of[call_order[at]], CALLS, 1, room, there)
        hand_over(step, room, there, state, steps, slots, sums)
    state[GROUP] = low.shape[0]
    return low.shape[0]
