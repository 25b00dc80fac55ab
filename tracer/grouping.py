"""Equal keys brought together, without sorting where they are codes of a table."""

from __future__ import annotations

import numpy as np

from tracer.arrays import Int64

SMALL = 1 << 16
"""Keys may always span so much: a table of it costs less than sorting a thousand of them."""


def grouped(keys: Int64) -> tuple[Int64, Int64]:
    """Return the distinct keys in ascending order, and the place of each key among them, as ``np.unique`` does.

    Keys that span little more than there are of them are looked up in a table; others are sorted.
    """
    if not len(keys):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    low = int(keys.min())
    span = int(keys.max()) - low + 1
    if span > 4 * len(keys) + SMALL:
        distinct, place = np.unique(keys, return_inverse=True)
        return distinct.astype(np.int64), place.reshape(-1).astype(np.int64)
    at = keys - low
    there = np.zeros(span, np.bool_)
    there[at] = True
    return np.flatnonzero(there) + low, (np.cumsum(there) - 1)[at]


def totals(place: Int64, values: Int64, count: int) -> Int64:
    """Return the sums of whole values by place, [count], exact as long as they are below 2^53."""
    return np.bincount(place, weights=values, minlength=count).astype(np.int64)


def kinds_of(*columns: Int64) -> tuple[Int64, Int64]:
    """Return which of the distinct rows of some columns each row is, and the first row of each.

    Distinct rows are in ascending order, by the first column first, as ``np.unique`` has them.
    """
    place: Int64 = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, of_column = grouped(column)
        _, place = grouped(place * max(len(values), 1) + of_column)
    first = np.zeros(int(place.max()) + 1 if len(place) else 0, np.int64)
    first[place[::-1]] = np.arange(len(place) - 1, -1, -1)
    return place, first
