# mypy: disable-error-code="no-untyped-def"
"""Searches in ascending times that compiled loops share."""

from __future__ import annotations


def after(times, low, high, time):
    """First place in [low, high) of ascending times that is later than a time."""
    while low < high:
        middle = (low + high) // 2
        if times[middle] <= time:
            low = middle + 1
        else:
            high = middle
    return low


def since(times, low, high, time, at):
    """As ``after``, from a place that is probably near: the last answer of queries that mostly ascend."""
    if at <= low or at > high or times[at - 1] > time:
        return after(times, low, high, time)
    step = 1
    while at + step <= high and times[at + step - 1] <= time:
        at += step
        step *= 2
    return after(times, at, min(at + step, high), time)
