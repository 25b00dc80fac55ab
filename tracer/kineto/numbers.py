"""Digits to integers without a float in between: a float64 cannot hold today's microseconds with nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any

import numpy as np

Int64 = np.ndarray

_DIGIT, _DOT, _MINUS, _BAD = 0, 1, 2, 3
_CLASS = np.full(256, _BAD, np.uint8)
_CLASS[48:58] = _DIGIT
_CLASS[46] = _DOT
_CLASS[45] = _MINUS
_CLASS[10] = _DIGIT  # the separator, handled apart

MAX_US = 9_000_000_000_000_000
"""Largest microsecond value accepted (the year 2255): times 1000 it still fits an int64."""


def nanoseconds(texts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """JSON number texts in microseconds → (int64 nanoseconds, bool valid).

    Accepts integers, decimals (rounded half up to the nanosecond), exponents, and numbers in quotes. Missing texts,
    ``null``, NaN, infinities, other JSON values and numbers beyond ``MAX_US`` are not valid (value 0).
    """
    count = len(texts)
    if count == 0:
        return np.zeros(0, np.int64), np.zeros(0, bool)
    blob = b"\n".join(texts) + b"\n"
    data = np.frombuffer(blob, np.uint8)
    ends = np.flatnonzero(data == 10)
    if len(ends) != count:  # a value is a pretty-printed list or object
        return _one_by_one(texts)
    starts = np.empty(count, np.int64)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    classes = _CLASS[data]
    valid = ends > starts
    odd = np.flatnonzero(classes == _BAD)
    slow = np.zeros(count, bool)
    slow[np.searchsorted(ends, odd)] = True
    dots = np.flatnonzero(classes == _DOT)
    owner = np.searchsorted(ends, dots)
    point = ends.copy()
    point[owner] = dots
    if len(owner) and len(np.unique(owner)) != len(owner):
        slow[owner] = True
    minus = np.flatnonzero(classes == _MINUS)
    negative = np.zeros(count, bool)
    if len(minus):
        owner = np.searchsorted(ends, minus)
        negative[owner] = True
        slow[owner[minus != starts[owner]]] = True
    first = starts + negative
    slow |= (point - first > 16) | (point == first)
    value = np.zeros(count, np.int64)
    scale = 1
    for place in range(1, int(min(16, (point - first).max(initial=0))) + 1):
        at = point - place
        digit = data[np.maximum(at, 0)].astype(np.int64) - 48
        value += np.where(at >= first, digit, 0) * scale
        scale *= 10
    value *= 1000
    has_point = point < ends
    if has_point.any():
        for place, weight in ((1, 100), (2, 10), (3, 1)):
            at = point + place
            digit = data[np.minimum(at, len(data) - 1)].astype(np.int64) - 48
            value += np.where(at < ends, digit, 0) * weight
        at = point + 4
        value += (at < ends) & (data[np.minimum(at, len(data) - 1)] >= 53)
    value[negative] *= -1
    valid &= ~slow & (np.abs(value) <= MAX_US * 1000)
    value[~valid] = 0
    rows = np.flatnonzero(slow)
    if len(rows):
        value[rows], valid[rows] = _one_by_one([texts[row] for row in rows.tolist()])
    return value, valid


def _one_by_one(texts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    pairs = [decimal_nanoseconds(bytes(text)) for text in texts]
    return np.array([value for value, _ in pairs], np.int64), np.array([ok for _, ok in pairs], bool)


def decimal_nanoseconds(text: bytes) -> tuple[int, bool]:
    """JSON text of any number of microseconds, or one in quotes → nanoseconds and whether it is valid.

    Rounded half up. ``null``, NaN, infinities, other JSON values and numbers beyond ``MAX_US`` are not valid (0).
    """
    try:
        number = Decimal(text.decode("ascii").strip().strip('"').strip())
    except (InvalidOperation, UnicodeDecodeError, ValueError):
        return 0, False
    # adjusted() first: 1e999999 would otherwise become an integer of a million digits.
    if not number.is_finite() or number.adjusted() > 16 or abs(number) > MAX_US:
        return 0, False
    if number.adjusted() < -6:
        return 0, True
    return int((number * 1000).to_integral_value(ROUND_HALF_UP)), True


def int64_column(values: list[Any]) -> np.ndarray:
    """Integers, or their digits as text → int64. What is no number or does not fit becomes −1.

    (An unsigned 64-bit −1 stands for "none" in some traces.)
    """
    try:
        return np.array(values, np.int64)
    except (OverflowError, ValueError, TypeError):
        return np.array([integer(value) for value in values], np.int64)


def int32_column(values: list[Any]) -> np.ndarray:
    """Read a column as ``int64_column`` does, for int32."""
    wide = int64_column(values)
    wide[(wide > 2**31 - 1) | (wide < -(2**31))] = -1
    return wide.astype(np.int32)


def integer(value: Any) -> int:
    """One value of ``int64_column``."""
    if isinstance(value, str) and len(value) > 20:
        return -1
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if -(2**63) <= number < 2**63 else -1
