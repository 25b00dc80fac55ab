# mypy: disable-error-code="no-untyped-def"
"""The inner loop of an alignment by likeness, compiled with numba; see ``likeness``."""

from __future__ import annotations

import numpy as np

from kernel_models.compiled import compiled

SAME_NAME, SAME_INSIDE, SAME_MODULE, SAME_SHAPES = 4, 3, 2, 1
"""The worth of a pair. The parts after the first together outweigh one more pair, so that pairs of the right module
win over more pairs of the wrong one."""


@compiled()
def align_band(one, other, band):
    """Return the pairs of two sequences that are worth most together.

    Args:
        one: name, digest, module and shapes of each element, [4, n].
        other: the same of the other sequence, [4, m].
        band: how far a pair may lie from the diagonal.

    Returns:
        For each element of ``one`` the index of its partner, -1 for none, [n].
    """
    n, m = one.shape[1], other.shape[1]
    width = 2 * band + 1
    # Where the best way into a cell comes from: 0 above, 1 left, 2 a pair.
    came = np.zeros((n + 1, width), np.int8)
    before = np.zeros(m + 1, np.int32)
    now = np.zeros(m + 1, np.int32)
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
    met = np.full(n, -1, np.int64)
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
            i, j = i - 1, j - 1
        elif came[i, at] == 1:
            j -= 1
        else:
            i -= 1
    return met
