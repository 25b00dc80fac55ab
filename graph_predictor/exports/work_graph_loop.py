# mypy: disable-error-code="no-untyped-def"
"""When nodes of a work graph end, by their dependencies and rendezvous alone, compiled."""

from __future__ import annotations

from tracer.machine_code import kept_loop


@kept_loop(*["int64[:]"] * 13)
def longest_path(after_ptr, after, left, duration, group, member_ptr, member, group_left, group_ready, ready, queue,
                 end, place):
    """Fill in when each node ends, and its place in an order of dependencies; those on a cycle keep theirs.

    ``after`` lists by node those that depend on it, ``left`` is how many each depends on. Members of a group start
    together, when the last is ready; ``group_left`` is how many it has. ``group_ready`` and ``ready`` start at 0,
    ``queue`` has room for every node. Returns how many nodes end.
    """
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
