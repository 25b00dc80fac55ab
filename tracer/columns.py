"""A ``Table``: equally long NumPy columns. An ``ExecutionGraph`` has several.

Functions over columns: group equal keys, measure the time that intervals cover, and walk trees upwards.

Keys that are codes of a table are grouped without sorting. Ends of intervals are exclusive; times are ns. Trees are
columns of parents (-1: a root).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tracer.arrays import Bool, Int32, Int64
from tracer.columns_loop import UNSORTED, cover, place_rows, tally_rows

NONE = -1
"""Code of a missing string, parent, step, launch, op or number in every integer column."""


def is_constant(column: np.ndarray) -> bool:
    """Return whether a column stores one value once, by ``np.broadcast_to``, and so cannot be written to."""
    return len(column) > 0 and column.strides == (0,)


def is_time(column: str) -> bool:
    """Return whether a column's name means times or durations; these are always stored in full, to be edited."""
    return column.endswith("_ns")


@dataclass(slots=True)
class Table:
    """Equally long NumPy columns of integers. Subclasses only list them, as ``Int64``, ``Int32`` or ``Int8``.

    A column that was read may store a single value once and then cannot be written to, see ``writable``. Columns of
    times (``is_time``) never do.
    """

    STRING_COLUMNS: ClassVar[frozenset[str]] = frozenset()
    """Columns whose values are codes into ``graph.strings``."""
    ENUMS: ClassVar[dict[str, type[IntEnum]]] = {}
    """Columns whose values are members of an enumeration."""
    ADDED: ClassVar[frozenset[str]] = frozenset()
    """Columns that files of earlier versions lack; they are read as ``NONE``."""

    def __len__(self) -> int:
        return len(getattr(self, next(iter(self.layout()))))

    @classmethod
    @cache  # opening a small file would spend most of its time here
    def layout(cls) -> dict[str, np.dtype]:
        """Return the names of the columns, in order, and their NumPy types."""
        return {column.name: np.dtype(str(column.type).lower()) for column in fields(cls)}

    def columns(self) -> dict[str, np.ndarray]:
        """Return name → array, without copying."""
        return {name: getattr(self, name) for name in self.layout()}

    @classmethod
    def empty(cls, rows: int = 0) -> Any:
        """Return a table of ``rows`` rows, every value ``NONE``."""
        return cls(**{name: np.full(rows, NONE, dtype) for name, dtype in cls.layout().items()})

    @classmethod
    def blank(cls, rows: int) -> Any:
        """Return a table as ``empty`` does, with read-only columns that take no memory and must be replaced."""
        return cls(**{name: np.broadcast_to(column, rows) for name, column in cls.empty(1).columns().items()})

    def writable(self, name: str) -> np.ndarray:
        """Return a column to write to; a column that stores a single value once is expanded first."""
        column: np.ndarray = getattr(self, name)
        if not column.flags.writeable:  # also one without a row
            column = column.copy()
            setattr(self, name, column)
        return column

    def take(self, rows: np.ndarray) -> Any:
        """Return a new table of the given rows (indices or mask), in that order."""
        return type(self)(**{name: column[rows] for name, column in self.columns().items()})


SMALL = 1 << 16
"""Span of keys for which a table is always used: it costs less than sorting a thousand keys."""


def grouped(keys: Int64) -> tuple[Int64, Int64]:
    """Return the distinct keys in ascending order, and the index of each key among them, as ``np.unique`` does.

    If the span of the keys is little larger than their number, they are looked up in a table; else they are sorted.
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


def named(codes: Int32, strings: Sequence[str], matches: Callable[[str], object]) -> Bool:
    """Return a mask of the codes whose text matches; each text is tested once, however many rows have it."""
    matching = np.zeros(len(strings) + 1, np.bool_)  # the last entry serves code -1
    for code in np.flatnonzero(np.bincount(codes + 1)[1:]).tolist():
        matching[code] = bool(matches(strings[code]))
    return matching[codes]


def totals(place: Int64, values: Int64, count: int) -> Int64:
    """Return the sum of the integers at each place, [count], exact below 2^53."""
    return np.bincount(place, weights=values, minlength=count).astype(np.int64)


def kinds_of(*columns: Int64) -> tuple[Int64, Int64]:
    """Return for each row its index among the distinct rows of some columns, and the first row of each distinct one.

    Distinct rows are in ascending order, with the first column as the main key, as in ``np.unique``.
    """
    place: Int64 = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, of_column = grouped(column)
        _, place = grouped(place * max(len(values), 1) + of_column)
    first = np.zeros(int(place.max()) + 1 if len(place) else 0, np.int64)
    first[place[::-1]] = np.arange(len(place) - 1, -1, -1)
    return place, first


def spans(low: Int64, high: Int64) -> Int64:
    """Return the integers from ``low`` up to ``high`` (exclusive) of each span, one span after the other."""
    count = high - low
    return np.repeat(low - np.cumsum(count) + count, count) + np.arange(int(count.sum()))


class RowsByNumber:
    """Rows in the order of a column of small numbers (of steps), so that the rows of one number are found directly.

    Args:
        number: the number of each row, from -1 on.
        numbers: the count of numbers from 0 on.
        chosen: mask of the rows to keep; by default all.
    """

    def __init__(self, number: Int32, numbers: int, chosen: Bool | None = None) -> None:
        self._first = np.zeros(numbers + 3, np.int64)
        order = np.empty(len(number), np.int64)
        chosen = np.broadcast_to(np.True_, len(number)) if chosen is None else chosen
        self.order = order[:place_rows(np.ascontiguousarray(number, np.int32), chosen, self._first, order)]

    def bounds(self, numbers: Int64) -> tuple[Int64, Int64]:
        """Return where in ``order`` the rows of each number begin and end; -1 means all rows."""
        every = numbers < 0
        return (np.where(every, 0, self._first[numbers + 1]),
                np.where(every, len(self.order), self._first[numbers + 2]))


@dataclass(frozen=True, slots=True)
class GroupSums:
    """Sums by group and slot, sorted by both: each row has a group, a slot and its sums, [rows, sums]."""

    group: Int64
    slot: Int64
    sums: Int64


def tallied(first: Int64, order: Int64, slot: Int64, amount: Int64, slots: int) -> GroupSums:
    """Return the count and the amount of the rows of each group by slot.

    Args:
        first: the rows of group ``n`` are ``order[first[n]:first[n + 1]]``.
        slot: the slot of each row, from 0 to before ``slots``.
        amount: the amount of each row.
    """
    room = min(len(order), slots * (len(first) - 1))
    group, found = np.empty((2, room), np.int64)
    sums = np.empty((room, 2), np.int64)
    count = tally_rows(first, order, slot, amount, *empty_room(slots, 2), np.zeros(2, np.int64), group, found,
                            sums)
    return GroupSums(group[:count], found[:count], sums[:count])


def empty_room(slots: int, sums: int) -> tuple[Int64, Int64]:
    """Return zeros for sums by slot, and bits that mark the slots in use."""
    return np.zeros((slots, sums), np.int64), np.zeros(slots // 64 + 1, np.int64)


_NONE: Int64 = np.zeros(0, np.int64)


def union(start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Sort intervals and join those that overlap or touch; return starts and ends."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order].astype(np.int64), np.maximum.accumulate(end[order].astype(np.int64))
    opens = np.ones(len(start), np.bool_)
    opens[1:] = start[1:] > reached[:-1]
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(start))[: len(first)] - 1
    return start[first], reached[last]


def union_ns(start: Int64, end: Int64) -> int:
    """Return the time during which at least one interval lasts."""
    return _covered(start, end, _NONE, _NONE, _NONE)


def covered(by: tuple[Int64, Int64], start: Int64, end: Int64) -> Int64:
    """Return the time of each given interval that is covered by others, whose starts and ends are ``by``."""
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


Parents = npt.NDArray[np.integer]


def outermost(parent: Parents) -> Int64:
    """Return the root of the tree that contains each row (a root's own row), by pointer jumping."""
    top = np.where(parent >= 0, parent, np.arange(len(parent))).astype(np.int64)
    while len(top) and not np.array_equal(following := top[top], top):
        top = following
    return top


def nearest(parent: Parents, chosen: Bool, rows: Int64) -> Int64:
    """Return for each of ``rows`` the nearest chosen row among itself and its ancestors; -1 where there is none.

    By pointer jumping, so that rows nested many thousand deep take no longer than others.
    """
    none = len(parent)
    up = np.append(np.where(chosen, np.arange(none), parent), none)
    up[up < 0] = none
    while not np.array_equal(above := up[up], up):
        up = above
    found = up[rows]
    return np.where(found < none, found, -1)


def within(parent: Parents, chosen: Bool) -> Bool:
    """Return a mask of the rows that are chosen or have a chosen ancestor."""
    return nearest(parent, chosen, np.arange(len(parent))) >= 0
