"""Figures as text: one way to write a time, a share, a count and a difference, in sentences, tables and pages.

A figure that is shown as zero has no sign.
"""

from __future__ import annotations


def milliseconds(ns: float) -> str:
    """Return a time in ms with three decimals."""
    return _without_sign_of_zero(f"{ns / 1e6:,.3f}")


def microseconds(ns: float) -> str:
    """Return a time in µs with one decimal."""
    return _without_sign_of_zero(f"{ns / 1e3:,.1f}")


def as_shown(ns: float) -> int:
    """Return a time as ``milliseconds`` shows it, whole µs: figures computed from it agree with shown times."""
    return round(1e3 * float(f"{ns / 1e6:.3f}"))


def signed_milliseconds(ns: float, decimals: int = 3) -> str:
    """Return a difference of times in ms, with its sign unless the shown figure is zero."""
    return _without_sign_of_zero(f"{ns / 1e6:+,.{decimals}f}")


def signed_microseconds(ns: float, decimals: int = 1) -> str:
    """Return a difference of times in µs, with its sign unless the shown figure is zero."""
    return _without_sign_of_zero(f"{ns / 1e3:+,.{decimals}f}")


def percent(share: float | None, decimals: int = 1) -> str:
    """Return a share in percent; a dash if it is not known."""
    return "–" if share is None else _without_sign_of_zero(f"{share * 100:.{decimals}f}%")


def signed_percent(share: float | None, decimals: int = 1) -> str:
    """Return a change in percent, with its sign unless the shown figure is zero; a dash if the change is not known."""
    return "–" if share is None else _without_sign_of_zero(f"{share * 100:+,.{decimals}f}%")


def small_percent(share: float) -> str:
    """Return a share in percent; a share above zero is never shown as zero."""
    return "less than 0.1%" if 0.0 < share < 5e-4 else percent(share)


def part_percent(share: float) -> str:
    """Return a share in whole percent. Only exact shares read 0% and 100%: others get a decimal, "<0.1%" or ">99.9%"
    instead."""
    if share in (0.0, 1.0) or 5e-3 <= share < 0.995:
        return percent(share, 0)
    if 5e-4 <= share < 0.9995:
        return percent(share)
    return "<0.1%" if share < 0.5 else ">99.9%"


def _without_sign_of_zero(shown: str) -> str:
    return shown if shown.strip("+-0.,%") else shown.lstrip("+-")


def count(number: float) -> str:
    """Return a count; means over steps may have one decimal."""
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.1f}"
