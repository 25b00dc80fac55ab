"""Points of an acceptance run: what is required of a machine, what was measured, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

import msgspec

from tracer.campaign.plan import CampaignBusyError
from tracer.errors import DiskFullError, reason_of

Shown = Callable[[float], str]
"""Returns a figure as text with its unit."""
NO_FAULT = CampaignBusyError, DiskFullError
"""Errors that say nothing about the machine: the part must be run again."""
MOST_REASON = 300  # chosen: a longer text of an error would not be read
UNJUDGED = "errors of times"
"""Name of the point that reports that errors of times are not judged; the part then does not pass by other points."""


class PointVerdict(str, Enum):
    """The outcome of a point, or of a part."""

    PASSED = "pass"
    FAILED = "FAIL"
    ABSENT = "not here"
    NOTED = "noted"
    INTERRUPTED = "interrupted"


class AcceptancePoint(msgspec.Struct, frozen=True):
    """One checked claim of an acceptance run, and its outcome.

    Attributes:
        name: the checked figure or fact.
        asked: the condition, in words.
        measured: the measured value, or why there is none.
        verdict: the outcome. ``ABSENT`` and ``NOTED`` neither pass nor fail. Only a part is ``INTERRUPTED``.
        value: the number behind ``measured``, if any.
    """

    name: str
    asked: str
    measured: str
    verdict: PointVerdict
    value: float | None = None


def percent(value: float) -> str:
    """Return a share as text."""
    return f"{value:.2%}"


def plain(value: float) -> str:
    """Return a number as text."""
    return f"{value:,.4g}"


def _judged(name: str, asked: str, value: float | None, bound: float, passes: Callable[[float], bool], shown: Shown
            ) -> AcceptancePoint:
    if value is None or not math.isfinite(value):
        return AcceptancePoint(name, asked, "nothing was measured", PointVerdict.FAILED)
    if math.isinf(bound):
        return noted(name, shown(value), float(value))
    verdict = PointVerdict.PASSED if passes(value) else PointVerdict.FAILED
    return AcceptancePoint(name, asked, shown(value), verdict, float(value))


def at_most(name: str, value: float | None, most: float, shown: Shown = percent) -> AcceptancePoint:
    """Require a figure to be at most ``most``; a missing figure or NaN fails. An infinite limit judges nothing."""
    return _judged(name, f"≤ {shown(most)}", value, most, lambda found: found <= most, shown)


def at_least(name: str, value: float | None, least: float, shown: Shown = percent) -> AcceptancePoint:
    """Require a figure to be at least ``least``."""
    return _judged(name, f"≥ {shown(least)}", value, least, lambda found: found >= least, shown)


def near(name: str, value: float | None, wanted: float, tolerance: float, shown: Shown = plain) -> AcceptancePoint:
    """Require a figure to be within a share of another figure, or within that amount of 0."""
    asked = f"{shown(wanted)} ± {shown(tolerance) if wanted == 0.0 else f'{tolerance:.1%}'}"
    room = tolerance if wanted == 0.0 else tolerance * abs(wanted)
    return _judged(name, asked, value, tolerance, lambda found: abs(found - wanted) <= room, shown)


def is_true(name: str, asked: str, holds: bool, measured: str) -> AcceptancePoint:
    """Require a condition to hold."""
    return AcceptancePoint(name, asked, measured, PointVerdict.PASSED if holds else PointVerdict.FAILED)


def absent(name: str, why: str) -> AcceptancePoint:
    """Report that something does not exist on this machine."""
    return AcceptancePoint(name, "", why, PointVerdict.ABSENT)


def noted(name: str, measured: str, value: float | None = None) -> AcceptancePoint:
    """Report a figure that is not judged."""
    return AcceptancePoint(name, "", measured, PointVerdict.NOTED, value)


def guarded(name: str, points: Iterable[AcceptancePoint]) -> Iterator[AcceptancePoint]:
    """Yield points as they are found; an error among them becomes a failed point, and later parts still run."""
    try:
        yield from points
    except NO_FAULT:
        raise
    except Exception as error:  # drivers, compilers and readers raise errors of many types
        yield is_true(name, "no error", False, f"{type(error).__name__}: {reason_of(error, MOST_REASON)}")


def verdict_of(points: Iterable[AcceptancePoint]) -> PointVerdict:
    """Return a part's verdict. It is failed if a point failed or there is none, and passed if a point passed and times
    were judged. Else it is noted, or absent if all points are."""
    all_ = list(points)
    found = {point.verdict for point in all_}
    if any(point.name == UNJUDGED for point in all_):
        found.discard(PointVerdict.PASSED)
    order = PointVerdict.FAILED, PointVerdict.PASSED, PointVerdict.NOTED, PointVerdict.ABSENT
    return next((verdict for verdict in order if verdict in found), PointVerdict.FAILED)
