# mypy: disable-error-code="no-untyped-def"
"""The alignment of two steps' operations that pairs the most alike ones: by name, surroundings, module and sizes.

Steps may differ anywhere, so that every way to pair them counts: the classic dynamic programme (Needleman & Wunsch
1970) in a band around the diagonal, compiled. Where two recordings show one program and only names are known,
``tracer.alignment`` finds their common window in near-linear time instead.
"""

from __future__ import annotations

import numpy as np

from tracer.arrays import Int64
from tracer.machine_code import kept_loop

CELLS = 16_000_000
"""Most cells with which everything is compared with everything; longer sequences get a band, as wide as they differ
in length."""
MOST_CELLS = 200_000_000
"""A byte each: a band is no wider than this allows."""
LEAST_BAND = 256
SAME_NAME, SAME_INSIDE, SAME_MODULE, SAME_SHAPES = 4, 3, 2, 1
"""The worth of a pair. The parts after the first together outweigh one more pair, so that pairs of the right module
win over more pairs of the wrong one."""


def most_alike_pairs(one: Int64, other: Int64) -> Int64:
    """Return for each element of ``one`` the index of its partner in ``other``, -1 for none, [n]; the order is kept.

    Args:
        one: each element's name, and what else makes a pair more alike: its contents or neighbours, its module, its
            shapes, all as numbers, [4, n]. ``SAME_NAME`` and those beside it say what each is worth.
        other: the same of the other sequence, [4, m].
    """
    n, m = one.shape[1], other.shape[1]
    found = np.full(n, -1, np.int64)
    if not n or not m:
        return found
    wanted = max(abs(n - m) + LEAST_BAND, CELLS // (2 * n))
    band = min(wanted, max(LEAST_BAND, MOST_CELLS // (2 * n)), m)
    _align(np.ascontiguousarray(one), np.ascontiguousarray(other), band, np.zeros((n + 1, 2 * band + 1), np.int8),
           np.zeros(m + 1, np.int32), np.zeros(m + 1, np.int32), found)
    return found


@kept_loop("int64[:,:]", "int64[:,:]", "int64", "int8[:,:]", "int32[:]", "int32[:]", "int64[:]")
def _align(one, other, band, came, before, now, met):
    """Put partners into ``met``. ``came`` is where the best way into a cell comes from: 0 above, 1 left, 2 a pair;
    ``before`` and ``now`` are two rows of what the best ways are worth."""
    n, m = one.shape[1], other.shape[1]
    width = 2 * band + 1
    for i in range(1, n + 1):
        centre = i * m // n
        low, high = max(1, centre - band), min(m, centre + band)
        now[low - 1] = before[low - 1]
        for j in range(low, high + 1):
            best, way = before[j], 0
            if now[j - 1] > best:
                best, way = now[j - 1], 1
            if one[0, i - 1] == other[0, j - 1]:
                worth = SAME_NAME
                if one[1, i - 1] == other[1, j - 1]:
                    worth += SAME_INSIDE
                if one[2, i - 1] == other[2, j - 1]:
                    worth += SAME_MODULE
                if one[3, i - 1] == other[3, j - 1]:
                    worth += SAME_SHAPES
                if before[j - 1] + worth >= best:
                    best, way = before[j - 1] + worth, 2
            now[j] = best
            came[i, j - centre + band] = way
        for j in range(high + 1, m + 1):
            now[j] = now[high]
        before, now = now, before
    pairs = 0
    i, j = n, m
    while i > 0 and j > 0:
        centre = i * m // n
        at = j - centre + band
        if at < 0:
            i -= 1
        elif at >= width:
            j -= 1
        elif came[i, at] == 2:
            met[i - 1] = j - 1
            pairs += 1
            i, j = i - 1, j - 1
        elif came[i, at] == 1:
            j -= 1
        else:
            i -= 1
    return pairs
