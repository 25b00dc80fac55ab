# mypy: disable-error-code="no-untyped-def"
"""The longest path through nodes that start when all they depend on has ended, compiled."""

from __future__ import annotations

import numpy as np

from tracer.arrays import Int64
from tracer.machine_code import kept_loop


def longest_path(after_ptr: Int64, after: Int64, waits: Int64, duration: Int64, group: Int64, member_ptr: Int64,
                 member: Int64) -> tuple[Int64, Int64]:
    """Return when each node ends, and its place in an order of dependencies; -1 for those on a cycle.

    ``after`` lists by node those that depend on it, ``waits`` is how many each depends on. Members of a group start
    together, when the last is ready.
    """
    count, groups = len(waits), len(member_ptr) - 1
    end, place = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    _walk(after_ptr, after, waits.copy(), np.ascontiguousarray(duration, np.int64), group, member_ptr, member,
          np.zeros(count, np.int64), np.diff(member_ptr), np.zeros(groups, np.int64), np.empty(count, np.int64), end,
          place)
    return end, place


@kept_loop(*["int64[:]"] * 13)
def _walk(after_ptr, after, left, duration, group, member_ptr, member, ready, group_left, group_ready, queue, end,
          place):
    """Put ends and places into the last two; returns how many nodes have some."""
    head, tail, done = 0, 0, 0
    for node in range(left.shape[0]):
        if left[node] == 0:
            queue[tail] = node
            tail += 1
    while head < tail:
        node = queue[head]
        head += 1
        meets = group[node]
        first, last = 0, 1
        if meets >= 0:
            group_ready[meets] = max(group_ready[meets], ready[node])
            group_left[meets] -= 1
            if group_left[meets] > 0:
                continue
            first, last = member_ptr[meets], member_ptr[meets + 1]
        for at in range(first, last):
            now = node
            start = ready[node]
            if meets >= 0:
                now = member[at]
                start = group_ready[meets]
            end[now] = start + duration[now]
            place[now] = done
            done += 1
            for i in range(after_ptr[now], after_ptr[now + 1]):
                other = after[i]
                ready[other] = max(ready[other], end[now])
                left[other] -= 1
                if left[other] == 0:
                    queue[tail] = other
                    tail += 1
    return done
