"""Single pieces of device work with a wrong start or a wrong end."""

from __future__ import annotations

import numpy as np

from tracer.kineto.device_times import EARLY_NS, FOREVER, LAUNCH_NS, PROMPT_NS, DeviceTimes

_OVERLAP_NS = 100_000
"""Kernels of a stream that rarely overlap may overlap by this much. Programmatic dependent launch: 4 µs on H100 and
B200."""
_HABIT = 0.5
"""A stream where more kernels than this share overlap the next one does so by habit."""
_ODD_OVERLAP = 10
"""On such a stream an overlap of this many times the median one is none of the habit."""
_LATE_END_NS = 100_000
"""A kernel that ends this long after a call that waited for it has a wrong end."""


def cut_overruns(times: DeviceTimes) -> np.ndarray:
    """Cut the work that runs over its successors or a wait for it, in place, and return its rows.

    Work of CUDA graphs is left alone: its stream is not the order in which it runs.
    """
    rows = np.flatnonzero(~times.impossible_starts() & ~times.shared & ~times.unsteady)
    rows = rows[np.lexsort((times.start[rows], times.stream[rows]))]
    stream, start, end = times.stream[rows], times.start[rows], times.end[rows]
    follows = np.append(stream[1:] == stream[:-1], False) if len(rows) else np.zeros(0, bool)
    next_start = np.where(follows, np.append(start[1:], 0)[:len(rows)], FOREVER)
    next_end = np.where(follows, np.append(end[1:], 0)[:len(rows)], FOREVER)
    over = np.where(follows, end - np.where(follows, next_start, 0), 0)
    done = times.done_by()[rows]
    wrong = _beyond_habit(stream, over, end > next_end) | _beyond_waits(times, rows, done)
    at = np.flatnonzero(wrong)
    if not len(at):
        return np.zeros(0, np.int64)
    limit = np.minimum(next_start[at], done[at]) - start[at]
    good = np.ones(len(times.start), bool)
    good[rows[at]] = False
    good[times.impossible_starts()] = False
    times.duration[rows[at]] = np.minimum(np.maximum(limit, 0), _typical(times, rows[at], good))
    return rows[at]


def _beyond_habit(stream: np.ndarray, over: np.ndarray, contains: np.ndarray) -> np.ndarray:
    """Return which work, by stream and start, overlaps its successor as none on the stream does."""
    overlapping = np.flatnonzero(over > 0)
    wrong = np.zeros(len(over), bool)
    for number in np.unique(stream[overlapping]).tolist():
        rows = overlapping[stream[overlapping] == number]
        if len(rows) > _HABIT * (stream == number).sum():
            wrong[rows] = over[rows] > max(_OVERLAP_NS, _ODD_OVERLAP * float(np.median(over[rows])))
        else:
            wrong[rows] = (over[rows] > _OVERLAP_NS) | (contains[rows] & (over[rows] > EARLY_NS))
    return wrong


def _beyond_waits(times: DeviceTimes, rows: np.ndarray, done: np.ndarray) -> np.ndarray:
    """Return which work ends long after a wait for it. Where most waits are passed, the clocks differ, not the work."""
    passed = (done != FOREVER) & (times.end[rows] > np.minimum(done, FOREVER - _LATE_END_NS) + _LATE_END_NS)
    if passed.sum() > 1 and 2 * len(np.unique(done[passed])) > len(np.unique(done[done != FOREVER])):
        return np.zeros(len(rows), bool)
    return passed


def _typical(times: DeviceTimes, rows: np.ndarray, good: np.ndarray) -> np.ndarray:
    """Return the median duration of the good work of each row's kernel and grid; ``FOREVER`` where there is none."""
    alike = np.flatnonzero(good & np.isin(times.same, times.same[rows]))
    alike = alike[np.lexsort((times.duration[alike], times.same[alike]))]
    low, high = (np.searchsorted(times.same[alike], times.same[rows], side=side) for side in ("left", "right"))
    found = np.full(len(rows), FOREVER, np.int64)
    known = high > low
    found[known] = times.duration[alike[(low + (high - low) // 2)[known]]]
    return found


def place_strays(times: DeviceTimes, rows: np.ndarray) -> np.ndarray:
    """Give work with a wrong start the earliest place after its launch, in place.

    The work keeps its duration; where that was lost with the start, it takes as long as its kernel usually does. It
    must lie after what its stream ran before, and before what came next and before the
    return of a call that waited for it.

    Args:
        times: the device work; all of it but ``rows`` is believed.
        rows: the work with wrong starts.

    Returns:
        Which of the rows were placed, [rows]. The others lack a call or a duration, or do not fit.
    """
    placed = np.zeros(len(rows), bool)
    believed = np.ones(len(times.start), bool)
    believed[rows] = False
    lost = rows[times.unstamped[rows] & (times.duration[rows] <= 0)]
    usual = _typical(times, lost, believed)
    times.duration[lost] = np.where(usual == FOREVER, 0, usual)
    fit = np.flatnonzero(times.launched[rows] & ~times.shared[rows] & (times.duration[rows] > 0))
    if not len(fit):
        return placed
    fit = fit[np.lexsort((times.call_start[rows[fit]], times.stream[rows[fit]]))]
    wanted = rows[fit]
    before, after = _neighbours(times, wanted, np.flatnonzero(believed & times.launched))
    after = np.minimum(after, times.done_by()[wanted])
    begin = np.maximum(times.call_start[wanted] + _launch_time(times, believed), before)
    cursor, stream = 0, -1
    starts = np.full(len(wanted), -1, np.int64)
    for at, (first, last, length, of) in enumerate(zip(begin.tolist(), after.tolist(), times.duration[wanted].tolist(),
                                                       times.stream[wanted].tolist(), strict=True)):
        start = max(first, cursor) if of == stream else first
        if start + length > last:  # a launch may also have been quicker than usual
            start = max(last - length, min(start, int(times.call_start[wanted[at]]) + LAUNCH_NS),
                        int(before[at]), cursor if of == stream else 0)
        if start + length <= last:
            starts[at], cursor, stream = start, start + length, of
    ok = starts >= 0
    times.start[wanted[ok]] = starts[ok]
    placed[fit[ok]] = True
    return placed


def _neighbours(times: DeviceTimes, wanted: np.ndarray, good: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each wanted row, the last end of earlier and the first start of later launches on its stream."""
    before = np.zeros(len(wanted), np.int64)
    after = np.full(len(wanted), FOREVER, np.int64)
    for stream in np.unique(times.stream[wanted]).tolist():
        mine = np.flatnonzero(times.stream[wanted] == stream)
        rows = good[times.stream[good] == stream]
        if not len(rows):
            continue
        rows = rows[np.argsort(times.call_start[rows], kind="stable")]
        launched = times.call_start[rows]
        ends = np.append(0, np.maximum.accumulate(times.end[rows]))
        starts = np.append(np.minimum.accumulate(times.start[rows][::-1])[::-1], FOREVER)
        before[mine] = ends[np.searchsorted(launched, times.call_start[wanted[mine]], side="left")]
        after[mine] = starts[np.searchsorted(launched, times.call_start[wanted[mine]], side="right")]
    return before, after


def _launch_time(times: DeviceTimes, good: np.ndarray) -> int:
    """Return the usual time from a call's start to its kernel on an idle stream."""
    prompt = times.lead[good]
    prompt = prompt[(prompt >= 0) & (prompt <= PROMPT_NS)]
    return int(np.median(prompt)) if len(prompt) else LAUNCH_NS
