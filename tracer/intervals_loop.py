# mypy: disable-error-code="no-untyped-def"
"""Intervals joined, and how much of others they cover, compiled."""

from __future__ import annotations

from tracer.machine_code import kept_loop

UNSORTED = -2**62
"""What ``cover`` returns of intervals that are not in the order of their starts."""


def _before(time, place, joined, count):
    """Return the last joined interval that begins no later than a time, looking on from ``place``; -1 for none."""
    while place + 1 < count and joined[0, place + 1] <= time:
        place += 1
    while place >= 0 and joined[0, place] > time:
        place -= 1
    return place


def _until(time, place, joined):
    """Return how much is covered until a time, in or behind the joined interval ``place``."""
    if place < 0:
        return 0
    return joined[2, place] + min(time, joined[1, place]) - joined[0, place]


@kept_loop("int64[:]", "int64[:]", "int64[:,:]", "int64[:]", "int64[:]", "int64[:]", inner=(_before, _until))
def cover(start, end, joined, asked_start, asked_end, found):
    """Join intervals that are in the order of their starts, and fill in how much of each asked one they cover. Returns
    how much they cover in all. ``joined``, [3, intervals], has room for starts, ends and what is covered before each.
    """
    count, total, reached = 0, 0, 0
    for i in range(start.shape[0]):
        if i > 0 and start[i] < start[i - 1]:
            return UNSORTED
        if i == 0 or start[i] > reached:
            if count > 0:
                joined[1, count - 1] = reached
                total += reached - joined[0, count - 1]
            joined[0, count], joined[2, count] = start[i], total
            count += 1
        if i == 0 or end[i] > reached:
            reached = end[i]
    if count > 0:
        joined[1, count - 1] = reached
        total += reached - joined[0, count - 1]
    place = -1
    for i in range(asked_start.shape[0]):
        place = _before(asked_start[i], place, joined, count)
        last = _before(asked_end[i], place, joined, count)
        found[i] = _until(asked_end[i], last, joined) - _until(asked_start[i], place, joined)
    return total
