# mypy: disable-error-code="no-untyped-def"
"""The longest path through nodes that start when all they depend on has ended, compiled with numba."""

from __future__ import annotations

import numpy as np

from kernel_models.compiled import compiled


@compiled()
def longest_path(after_ptr, after, waits, duration, group, member_ptr, member):
    """Return when each node ends, and its place in an order of dependencies; -1 for those on a cycle.

    ``after`` lists by node those that depend on it, ``waits`` is how many each depends on. Members of a group start
    together, when the last is ready.
    """
    count = len(waits)
    end = np.full(count, -1, np.int64)
    place = np.full(count, -1, np.int64)
    ready = np.zeros(count, np.int64)
    left = waits.copy()
    group_left = member_ptr[1:] - member_ptr[:-1]
    group_ready = np.zeros(len(group_left), np.int64)
    queue = np.empty(count, np.int64)
    head, tail, done = 0, 0, 0
    for node in range(count):
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
    return end, place
