"""Digits to integers without a float in between: a float64 cannot hold today's microseconds with nanoseconds."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any

MAX_US = 9_000_000_000_000_000
"""Largest microsecond value accepted (the year 2255): times 1000 it still fits an int64."""


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


def integer(value: Any) -> int:
    """An integer, or its digits as text; -1 for what is no number or does not fit 64 bits.

    (An unsigned 64-bit -1 stands for "none" in some traces.)
    """
    if isinstance(value, str) and len(value) > 20:
        return -1
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if -(2**63) <= number < 2**63 else -1
