"""The inner loop of features' codes."""

from __future__ import annotations

from tracer.machine_code import kept_loop


@kept_loop("float32[:,:]", "float32[:]", "int32[:]", "uint8[:,:]")
def find_codes(rows, edges, start, result):  # type: ignore[no-untyped-def]
    """Count the edges below each value: fills in the codes, [n, f], which were 0, and returns 0; see ``Bins``."""
    for f in range(rows.shape[1]):
        first, count = start[f], start[f + 1] - start[f]
        if count < 1:
            continue
        for i in range(rows.shape[0]):
            value = rows[i, f]
            # Branchless lower bound: how many edges are below the value.
            at, left = 0, count
            while left > 1:
                half = left >> 1
                at += half if edges[first + at + half - 1] < value else 0
                left -= half
            if left == 1 and edges[first + at] < value:
                at += 1
            result[i, f] = at
    return 0
