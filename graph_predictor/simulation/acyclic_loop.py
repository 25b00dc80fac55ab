# mypy: disable-error-code="no-untyped-def"
"""Orders of dependencies, compiled: nodes that nothing is left to wait for are taken away in turn."""

from __future__ import annotations

from tracer.machine_code import kept_loop


@kept_loop(*["int64[:]"] * 6)
def take_away(source, target, waits, first, out, free):
    """Returns how many nodes could be taken away. A node waits for ``waits`` others; ``out`` has targets by source."""
    nodes, edges = waits.shape[0], source.shape[0]
    for e in range(edges):
        waits[target[e]] += 1
        first[source[e]] += 1
    at = 0
    for n in range(nodes):
        at += first[n]
        first[n] = at
    first[nodes] = at
    for e in range(edges):
        first[source[e]] -= 1
        out[first[source[e]]] = target[e]
    count = 0
    for n in range(nodes):
        if waits[n] == 0:
            free[count] = n
            count += 1
    taken = 0
    while taken < count:
        n = free[taken]
        taken += 1
        for j in range(first[n], first[n + 1]):
            waits[out[j]] -= 1
            if waits[out[j]] == 0:
                free[count] = out[j]
                count += 1
    return taken


@kept_loop(*["int64[:]"] * 13)
def longest_path(after_ptr, after, waits, duration, group, member_ptr, member, end, place, ready, queue, group_left,
                 group_ready):
    """Fill in when each node ends, and its place in an order of dependencies; returns how many have one. Those on a
    cycle have none: ``end`` and ``place`` stay what they are.

    ``after`` lists by node those that depend on it, ``waits`` is how many each depends on (used up). Members of a group
    start together, when the last is ready: ``group_left`` are its members (used up). The others are room: zeros.
    """
    head, tail, done = 0, 0, 0
    for node in range(waits.shape[0]):
        if waits[node] == 0:
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
                waits[other] -= 1
                if waits[other] == 0:
                    queue[tail] = other
                    tail += 1
    return done
