"""Mends or drops device work with impossible recorded times, before tables are built.

A profiler converts the device's clock to the host's and may lose a record's end. Four faults follow::

    call      |call|                      |call|
    stream ▓▓▓                       ▓▓▓▓               the device's clock is behind: all kernels before their calls
    stream ▓▓▓ (27 h early)               ▓▓▓▓          a start is wrong
    stream        ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ …        an end is wrong
                        ▓▓▓ ▓▓▓

A clock is moved, a wrong end is cut, and a wrong start is mended where the kernel fits between its neighbours. Work
that cannot be mended is dropped, so that its launch counts as one without GPU work. Good recordings pass unchanged: in
the known ones no kernel starts before its launch, and kernels of one stream overlap by 4 µs at most.

A clock's shift is estimated from the kernels recorded before their own launch. A kernel on an idle stream starts some
µs after its launch call began. If the device's clock is behind by ``d``, such prompt kernels are recorded ``d`` before
that; queued ones may still be recorded after their launch. The shift is the smallest that leaves no kernel before its
launch, and it may not put kernels behind a call that waited for them.

Events whose times lie impossibly far from all others are dropped: a single one at time 0 would stretch the window to
decades and hide everything in it. Events of impossibly many streams or threads are dropped too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracer.kineto.columns import GROUP_COLUMNS, Collector
from tracer.kineto.device_times import (
    EARLY_NS,
    FOREVER,
    LATE_NS,
    LAUNCH_NS,
    PROMPT_NS,
    DeviceTimes,
    cut_overruns,
    device_times,
    place_strays,
)
from tracer.kineto.events import NameGroup

_SKEW_NS = 1_000_000
"""Badly matched clocks differ by less, single wrong times by more. So one early kernel is enough for a smaller shift
that no kernel contradicts, and two are needed for a larger one."""
_STRAY = 10
"""A kernel has a wrong time of its own if it is early by this multiple of the median early kernel's lead."""
_MINORITY = 0.25
"""Least ratio of early kernels that agree on a small shift to promptly started ones, from which the clock is behind.
Work of several streams starts late for other reasons, and then looks prompt."""
_WAIT_SLACK_NS = 50_000
"""A wait returns within this time of the last kernel's end, if the clocks are matched."""
_CONTRADICTED = 0.25
"""A constant shift is refused if it puts work behind more than this share of the calls that waited for it."""
_AGREEMENT = 0.1
"""Early kernels of one clock must agree on its shift within this share where no wait bounds it."""


@dataclass(frozen=True, slots=True)
class ClockMove:
    """A device clock that is behind the host's.

    Attributes:
        clock: Its number.
        shift_ns: Time by which its work was moved; 0 if the difference changes, so that no work was moved.
        early: Number of kernels recorded before their launch.
        most_ns: The largest time by which one of those is early.
        work: Number of all pieces of its work.
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
    """Return how far the clock is behind, ns; 0 if single kernels are wrong instead; None if the difference changes."""
    early = lead < -EARLY_NS
    stray = early & (lead < _STRAY * float(np.median(lead[early])) - _SKEW_NS)
    if stray.any() and 2 * stray.sum() < early.sum():  # single wrong times next to a clock that is behind
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
    else:  # without a wait only agreement distinguishes a late clock from wrong kernels
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
    """Return whether enough work is early to show a clock that is behind, rather than single wrong times.

    Args:
        lead: time from each launch to its kernel, ns.
        early: mask of the kernels that start before their launch.
        alone: mask of the kernels that start on an idle stream.
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
    """Return a mask of the rows that start on an idle stream."""
    order = np.lexsort((times.start[rows], times.stream[rows]))
    stream, start = times.stream[rows][order], times.start[rows][order]
    paused = np.ones(len(rows), bool)
    paused[1:] = (stream[1:] != stream[:-1]) | (start[1:] - times.end[rows][order][:-1] > EARLY_NS)
    found = np.empty(len(rows), bool)
    found[order] = paused
    return found


def _rooms(times: DeviceTimes, clock: int, rows: np.ndarray) -> np.ndarray:
    """Return the time between the end of the last kernel that a call waits for and the call's return, ns, [waits]."""
    waits = times.waits.get(clock)
    if waits is None:
        return np.zeros(0, np.int64)
    wait = waits.following(times.call_end[rows])
    last = np.full(len(waits.start) + 1, -1, np.int64)
    np.maximum.at(last, wait, times.end[rows])
    known = np.flatnonzero(last[:-1] >= 0)
    return np.asarray(waits.end[known] - last[known])


def mend_device_times(collected: Collector) -> None:
    """Move, cut or drop device work with impossible times; count and note it in the loss report."""
    if not collected.rows(NameGroup.DEVICE):
        return
    times = device_times(collected)
    before = times.start.copy(), times.duration.copy()
    loss, notes = collected.loss, []
    for move in move_clocks(times):
        device = _device(collected, times, move.clock)
        if move.shift_ns:
            loss.shifted_kernels += move.work
            notes.append(f"The clock of device {device} was {_span(move.shift_ns)} behind the host's, so that "
                         f"{_pieces(move.early)} started before the launch: all its work ({move.work}) was moved.")
        else:
            loss.early_kernels += move.early
            notes.append(f"The clock of device {device} was behind the host's by a time that changes (up to "
                         f"{_span(move.most_ns)}), so that {_pieces(move.early)} started before the launch. No shift "
                         "mends that: do not trust how its work and the host's wait for each other; record again.")
    cut = cut_overruns(times)
    loss.cut_kernels += len(cut)
    if len(cut):
        notes.append(f"{_pieces(len(cut))} had an impossible duration (up to {_span(before[1][cut].max())}): the next "
                     "work of the stream ran, or a call that waits had returned, before the end. It was cut to the "
                     "usual duration of the same kernel, and at the latest there.")
    unstamped = times.unstamped
    stray = np.flatnonzero(times.impossible_starts())
    placed = place_strays(times, stray)
    loss.placed_kernels += int(placed.sum())
    if placed.any():
        far = _how_far(times, before[0], stray[placed])
        notes.append(f"{_pieces(int(placed.sum()))} had an impossible start ({far}). It was placed after its launch, "
                     "where it fits between the work around it, with its recorded duration (where it has none, the "
                     "usual one of the same kernel).")
    keep = np.ones(len(times.start), bool)
    keep[stray[~placed]] = False
    for rows, what in ((~keep & unstamped, "had no start (time 0)"),
                       (~keep & ~unstamped, "had an impossible start (before the launch, or far from all calls)")):
        if rows.any():
            loss.dropped_events += int(rows.sum())
            notes.append(f"{_pieces(int(rows.sum()))} {what} and did not fit where it was launched: left "
                         "out. The launch counts as one without GPU work, and GPU active time lacks it.")
    if not notes:
        return
    loss.notes += notes
    found = collected.finish(NameGroup.DEVICE)
    put_back(collected, NameGroup.DEVICE, {**found, "start": times.start, "duration": times.duration}, keep)
    collected.bound_again()


def _device(collected: Collector, times: DeviceTimes, clock: int) -> int:
    (device,) = collected.gathered(NameGroup.DEVICE, "device")
    return int(device[np.flatnonzero(times.clock == clock)[0]])


def _pieces(number: int) -> str:
    return "1 piece of GPU work" if number == 1 else f"{number} pieces of GPU work"


def _how_far(times: DeviceTimes, before: np.ndarray, rows: np.ndarray) -> str:
    far = np.abs(times.start[rows] - before[rows])[before[rows] > 0]
    zero = int((before[rows] <= 0).sum())
    texts = [f"up to {_span(int(far.max()))} off"] if len(far) else []
    return ", ".join([*texts, *([f"{zero} at time 0"] if zero else [])])


def _span(ns: int) -> str:
    """Return a time in the unit that suits it."""
    for size, unit in ((3600 * 10**9, "h"), (10**9, "s"), (10**6, "ms")):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns / 1e3:.3g} µs"


MAX_WINDOW_NS = 7 * 24 * 3600 * 10**9
"""No profiler window lasts a week: buffers hold minutes at most."""


MOST_STREAMS, MOST_THREADS, _MOST_DEVICES = 4096, 1 << 14, 64
"""Largest numbers of streams of a process, and of threads that did work: real traces have some dozens."""


def drop_outliers(collected: Collector) -> None:
    """Drop and count events over half a week long, or away from the median start, if the window lasts over a week."""
    if collected.first_ns is None or collected.last_ns - collected.first_ns <= MAX_WINDOW_NS:
        return
    columns = {group: collected.finish(group) for group in GROUP_COLUMNS}
    starts = np.concatenate([found["start"] for found in columns.values()])
    if len(starts) == 0:
        return
    middle = int(np.sort(starts)[len(starts) // 2])
    dropped = 0
    first, last = [], []
    for group, found in columns.items():
        keep = (np.abs(found["start"] - middle) <= MAX_WINDOW_NS // 2) & (found["duration"] <= MAX_WINDOW_NS // 2)
        dropped += int(len(keep) - keep.sum())
        kept = put_back(collected, group, found, keep)
        if keep.any():
            first.append(int(kept["start"].min()))
            last.append(int((kept["start"] + kept["duration"]).max()))
    collected.first_ns, collected.last_ns = min(first, default=None), max(last, default=0)
    collected.loss.dropped_events += dropped
    collected.loss.notes.append(f"{dropped} events more than half a week from all others were dropped: their times are "
                                "wrong.")


def drop_excess(collected: Collector) -> None:
    """Drop and count the events of streams and threads beyond the largest possible number, in order of appearance."""
    if (collected.reach(NameGroup.DEVICE, "stream") >= MOST_STREAMS
            or collected.reach(NameGroup.DEVICE, "device") >= _MOST_DEVICES):
        found = collected.finish(NameGroup.DEVICE)
        device, stream = (np.unique(found[name], return_inverse=True)[1].reshape(-1) for name in ("device", "stream"))
        _, first, place = np.unique(device * len(stream) + stream, return_index=True, return_inverse=True)
        order = np.empty(len(first), np.int64)
        order[np.argsort(first)] = np.arange(len(first))
        keep = order[place.reshape(-1)] < MOST_STREAMS
        put_back(collected, NameGroup.DEVICE, found, keep)
        _tell(collected, keep, f"on streams beyond the first {MOST_STREAMS:,}")
    if len(collected.threads.keys_in_order) <= MOST_THREADS:
        return
    for group in GROUP_COLUMNS:
        if "thread" in GROUP_COLUMNS[group]:
            found = collected.finish(group)
            keep = found["thread"] < MOST_THREADS
            put_back(collected, group, found, keep)
            _tell(collected, keep, f"on threads beyond the first {MOST_THREADS:,}")
    del collected.threads.keys_in_order[MOST_THREADS:]


def _tell(collected: Collector, keep: np.ndarray, where: str) -> None:
    dropped = int(len(keep) - keep.sum())
    if dropped:
        collected.loss.dropped_events += dropped
        collected.loss.notes.append(f"{dropped} events {where} were dropped: no process has so many.")


def put_back(collected: Collector, group: NameGroup, found: dict[str, np.ndarray], keep: np.ndarray) -> \
        dict[str, np.ndarray]:
    """Put the kept rows of a group back, and return them."""
    row = np.cumsum(keep) - 1
    for owner, comms in ((NameGroup.OPERATION, collected.operation_comms), (NameGroup.DEVICE, collected.device_comms)):
        if owner is group:
            comms[:] = [(int(row[old]), args) for old, args in comms if keep[old]]
    kept = {name: column[keep] for name, column in found.items()}
    collected.restore(group, kept)
    return kept
