"""Estimating how far a device's clock is behind the host's, from the kernels recorded before their own launch.

A kernel on an idle stream starts some µs after its launch call began. If the device's clock is behind by ``d``, such
prompt kernels are recorded ``d`` before that; queued ones may still be recorded after their launch. The shift is the
smallest that leaves no kernel before its launch, and it may not put kernels behind a call that waited for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracer.kineto.device_times import EARLY_NS, FOREVER, LATE_NS, LAUNCH_NS, PROMPT_NS, DeviceTimes

_SKEW_NS = 1_000_000
"""Clocks that were matched badly differ by less, single wrong stamps by more: one early kernel is enough for a smaller
shift where no kernel contradicts it, two for a larger one."""
_STRAY = 10
"""A kernel that is early by this many times what most are has a wrong time of its own."""
_MINORITY = 0.25
"""Early kernels that agree on a small shift are a clock's from this share of the promptly started ones upwards. Work of
several streams starts late for other reasons, and then looks prompt."""
_WAIT_SLACK_NS = 50_000
"""A wait returns within this time of the last kernel's end, as far as clocks are matched."""
_CONTRADICTED = 0.25
"""A constant shift is refused where it puts work behind more than this share of the calls that waited for it."""
_AGREEMENT = 0.1
"""Early kernels of one clock agree on its shift within this share where no wait bounds it."""


@dataclass(frozen=True, slots=True)
class ClockMove:
    """A clock that is behind the host's.

    Attributes:
        clock: its number.
        shift_ns: time by which its work was moved; 0 where the difference changes, so that none was.
        early: number of kernels recorded before their launch.
        most_ns: the most that one of those is early.
        work: number of all its work.
    """

    clock: int
    shift_ns: int
    early: int
    most_ns: int
    work: int


def move_clocks(times: DeviceTimes) -> list[ClockMove]:
    """Move all work of each clock that is behind the host's, in place, and return the moves.

    A clock whose difference changes during the window is not moved, and marked as unsteady.
    """
    moves = []
    lead = times.lead
    for clock in np.unique(times.clock[lead < -EARLY_NS]).tolist():
        rows = np.flatnonzero((times.clock == clock) & (lead != FOREVER))
        shift = _shift(times, clock, rows, lead[rows])
        if shift == 0:
            continue
        moved = np.flatnonzero((times.clock == clock) & ~times.unstamped)
        if shift is None:
            times.unsteady[moved] = True
        else:
            times.start[moved] += shift
        early = lead[rows][lead[rows] < -EARLY_NS]
        moves.append(ClockMove(clock, shift or 0, len(early), -int(early.min()), len(moved)))
    return moves


def _shift(times: DeviceTimes, clock: int, rows: np.ndarray, lead: np.ndarray) -> int | None:
    """Return how far the clock is behind; 0 where single kernels are wrong, not the clock; None where it changes."""
    early = lead < -EARLY_NS
    stray = early & (lead < _STRAY * float(np.median(lead[early])) - _SKEW_NS)
    if stray.any() and 2 * stray.sum() < early.sum():  # single wrong times beside a clock that is behind
        rows, lead, early = rows[~stray], lead[~stray], early[~stray]
    alone = _after_a_pause(times, rows)
    if not _is_of_the_clock(lead, early, alone):
        return 0
    rooms = _rooms(times, clock, rows)
    if len(rooms):
        room = int(np.median(rooms))
        believed = lead[early & (lead >= -(room + _WAIT_SLACK_NS))]
        if 2 * len(believed) < early.sum() or not len(believed):
            return 0
    else:  # without a wait only agreement tells a clock from wrong kernels
        believed = lead[early & alone]
        low = int(believed.min()) if len(believed) else 0
        if 2 * (believed <= low + max(PROMPT_NS, -_AGREEMENT * low)).sum() < max(len(believed), 1):
            return 0
        room = LAUNCH_NS - low
    least = -int(believed.min())
    if (rooms < least - _WAIT_SLACK_NS).sum() > max(1, _CONTRADICTED * len(rooms)):
        return None
    shift = max(least, min(least + LAUNCH_NS, room))
    return shift if np.median(times.start[rows] + shift) <= times.host_last + LATE_NS else 0


def _is_of_the_clock(lead: np.ndarray, early: np.ndarray, alone: np.ndarray) -> bool:
    """Return whether so many kernels are early that their clock is behind, or so few that their own times are wrong.

    Args:
        lead: time from each launch to its kernel, ns.
        early: which kernels start before their launch.
        alone: which kernels start on an idle stream.
    """
    number, first = int(early.sum()), int(lead[early].min())
    small = first >= -_SKEW_NS
    if number == 1 and not small:
        return False
    prompt = int((alone & ~early & (lead <= PROMPT_NS)).sum())
    most = int((alone & early).sum()) > prompt or 2 * number >= len(lead)
    agree = small and number > 1 and int(lead[early].max()) - first <= PROMPT_NS and number >= _MINORITY * prompt
    return most or agree


def _after_a_pause(times: DeviceTimes, rows: np.ndarray) -> np.ndarray:
    """Return which rows start on a stream that was idle before them."""
    order = np.lexsort((times.start[rows], times.stream[rows]))
    stream, start = times.stream[rows][order], times.start[rows][order]
    paused = np.ones(len(rows), bool)
    paused[1:] = (stream[1:] != stream[:-1]) | (start[1:] - times.end[rows][order][:-1] > EARLY_NS)
    found = np.empty(len(rows), bool)
    found[order] = paused
    return found


def _rooms(times: DeviceTimes, clock: int, rows: np.ndarray) -> np.ndarray:
    """Return the time from the last kernel that each call waits for to that call's return, [waits]."""
    waits = times.waits.get(clock)
    if waits is None:
        return np.zeros(0, np.int64)
    wait = waits.following(times.call_end[rows])
    last = np.full(len(waits.start) + 1, -1, np.int64)
    np.maximum.at(last, wait, times.end[rows])
    known = np.flatnonzero(last[:-1] >= 0)
    return np.asarray(waits.end[known] - last[known])
