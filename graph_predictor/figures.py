"""Figures as text: one way to write a time, a share, a count and a difference, in sentences, tables and pages.

What is shown as zero has no sign.
"""

from __future__ import annotations


def milliseconds(ns: float) -> str:
    """A time in ms with three decimals."""
    return _without_sign_of_zero(f"{ns / 1e6:,.3f}")


def microseconds(ns: float) -> str:
    """A time in µs with one decimal."""
    return _without_sign_of_zero(f"{ns / 1e3:,.1f}")


def as_shown(ns: float) -> int:
    """A time as ``milliseconds`` shows it, whole µs: what is worked out from shown times agrees with them."""
    return round(1e3 * float(f"{ns / 1e6:.3f}"))


def signed_milliseconds(ns: float, decimals: int = 3) -> str:
    """A difference of times in ms, with its sign; without one where it is shown as zero."""
    return _without_sign_of_zero(f"{ns / 1e6:+,.{decimals}f}")


def signed_microseconds(ns: float, decimals: int = 1) -> str:
    """A difference of times in µs, with its sign; without one where it is shown as zero."""
    return _without_sign_of_zero(f"{ns / 1e3:+,.{decimals}f}")


def percent(share: float | None, decimals: int = 1) -> str:
    """A share in percent; a dash if it is not known."""
    return "–" if share is None else _without_sign_of_zero(f"{share * 100:.{decimals}f}%")


def signed_percent(share: float | None, decimals: int = 1) -> str:
    """A change in percent, with its sign; without one where it is shown as zero, a dash if it is not known."""
    return "–" if share is None else _without_sign_of_zero(f"{share * 100:+,.{decimals}f}%")


def small_percent(share: float) -> str:
    """A share in percent that is not rounded to nothing."""
    return "less than 0.1%" if 0.0 < share < 5e-4 else percent(share)


def part_percent(share: float) -> str:
    """A part of a whole in whole percent, which says neither that there is none of it nor that there is nothing else
    where that is not so."""
    if share in (0.0, 1.0) or 5e-3 <= share < 0.995:
        return percent(share, 0)
    if 5e-4 <= share < 0.9995:
        return percent(share)
    return "<0.1%" if share < 0.5 else ">99.9%"


def _without_sign_of_zero(shown: str) -> str:
    return shown if shown.strip("+-0.,%") else shown.lstrip("+-")


def count(number: float) -> str:
    """A count; means over steps may have one decimal."""
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.1f}"
