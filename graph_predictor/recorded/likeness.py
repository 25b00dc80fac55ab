"""The alignment of two steps' operations that pairs the most alike ones: by name, surroundings, module and sizes.

Steps may differ anywhere, so that every way to pair them counts: the classic dynamic programme (Needleman & Wunsch
1970) in a band around the diagonal, compiled (``likeness_loop``). Where two recordings show one program and only names
are known, ``tracer.alignment`` finds their common window in near-linear time instead.
"""

from __future__ import annotations

import numpy as np

from tracer.arrays import Int64

CELLS = 16_000_000
"""Most cells with which everything is compared with everything; longer sequences get a band, as wide as they differ
in length."""
MOST_CELLS = 200_000_000
"""A byte each: a band is no wider than this allows."""
LEAST_BAND = 256


def most_alike_pairs(one: Int64, other: Int64) -> Int64:
    """Return for each element of ``one`` the index of its partner in ``other``, -1 for none, [n]; the order is kept.

    Args:
        one: each element's name, and what else makes a pair more alike: its contents or neighbours, its module, its
            shapes, all as numbers, [4, n]. ``likeness_loop`` says what each is worth.
        other: the same of the other sequence, [4, m].
    """
    n, m = one.shape[1], other.shape[1]
    if not n or not m:
        return np.full(n, -1, np.int64)
    from graph_predictor.recorded.likeness_loop import align_band

    wanted = max(abs(n - m) + LEAST_BAND, CELLS // (2 * n))
    band = min(wanted, max(LEAST_BAND, MOST_CELLS // (2 * n)))
    found: Int64 = align_band(one, other, min(band, m))
    return found
