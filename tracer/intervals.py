"""Intervals of time: their union, and how much of others it covers. Ends are exclusive; times are ns."""

from __future__ import annotations

import numpy as np

from tracer.arrays import Int64
from tracer.intervals_loop import UNSORTED, cover

_NONE: Int64 = np.zeros(0, np.int64)


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
    return _covered(start, end, _NONE, _NONE, _NONE)


def covered(by: tuple[Int64, Int64], start: Int64, end: Int64) -> Int64:
    """Return how much of each given interval is covered by others, whose starts and ends are ``by``."""
    found: Int64 = np.empty(len(start), np.int64)
    _covered(*by, start, end, found)
    return found


def _covered(start: Int64, end: Int64, asked_start: Int64, asked_end: Int64, found: Int64) -> int:
    start, end, asked_start, asked_end = (np.ascontiguousarray(each, np.int64)
                                          for each in (start, end, asked_start, asked_end))
    joined: Int64 = np.empty((3, len(start)), np.int64)
    total = cover(start, end, joined, asked_start, asked_end, found)
    if total == UNSORTED:
        order = np.argsort(start, kind="stable")
        total = cover(start[order], end[order], joined, asked_start, asked_end, found)
    return total
