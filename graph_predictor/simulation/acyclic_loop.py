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
