"""The inner loop of prices by trees: blocks of rows that walk them together."""

from __future__ import annotations

from tracer.machine_code import kept_loop

BLOCK = 16
"""Rows that walk a tree together: enough to hide the loads' latency, few enough to stay in the first cache."""


@kept_loop("uint8[:,:]", "uint32[:]", "float32[:]", "int32[:]", "uint8[:]", "int64[:]", "float64[:]")
def walk_trees(codes, words, values, start, depth, place, result):  # type: ignore[no-untyped-def]
    """Add the leaf of each tree to each row's result; returns 0.

    Args:
        codes: of whole blocks of rows, [n, f].
        words, values, start, depth: see ``Trees``.
        place: to work in, [BLOCK].
        result: [n].
    """
    for block in range(0, codes.shape[0], BLOCK):
        rows = codes[block:block + BLOCK]
        for tree in range(depth.shape[0]):
            first = start[tree]
            for r in range(BLOCK):
                place[r] = 0
            for _ in range(depth[tree]):
                for r in range(BLOCK):
                    word = words[first + place[r]]
                    goes_right = rows[r, word & 0xFF] > (word >> 8) & 0xFF
                    place[r] = (word >> 16) + (1 if goes_right else 0)
            for r in range(BLOCK):
                result[block + r] += values[first + place[r]]
    return 0
