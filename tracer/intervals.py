"""Intervals of time: their union, and how much of others it covers. Ends are exclusive; times are ns."""

from __future__ import annotations

import numpy as np

from tracer.arrays import Int64


def union(start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Sort intervals and join those that overlap or touch; returns starts and ends."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order].astype(np.int64), np.maximum.accumulate(end[order].astype(np.int64))
    opens = np.ones(len(start), np.bool_)
    opens[1:] = start[1:] > reached[:-1]
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(start))[: len(first)] - 1
    return start[first], reached[last]


def union_ns(start: Int64, end: Int64) -> int:
    """Return how long at least one of some intervals lasts."""
    starts, ends = union(start, end)
    return int((ends - starts).sum())


def covered(joined: tuple[Int64, Int64], start: Int64, end: Int64) -> Int64:
    """Return how much of each given interval is covered by others that ``union`` joined."""
    starts, ends = joined
    if not len(starts):
        return np.zeros(len(start), np.int64)
    total = np.concatenate([[0], np.cumsum(ends - starts)])

    def before(time: Int64) -> Int64:
        place = np.searchsorted(starts, time, side="right")
        inside = np.where(place > 0, np.minimum(time, ends[place - 1]) - starts[place - 1], 0)
        return total[np.maximum(place - 1, 0)] + np.maximum(inside, 0)

    return before(end) - before(start)
