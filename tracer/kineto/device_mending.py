"""Mending device work whose recorded times cannot be true, before the tables are built.

A profiler converts the device's clock to the host's and may lose a record's end. Four faults follow::

    call      |call|                      |call|
    stream ▓▓▓                       ▓▓▓▓               every kernel before its call: the device's clock is behind
    stream ▓▓▓ (27 h early)               ▓▓▓▓          one kernel before its call: its start is wrong
    stream        ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ …        one kernel over its successors: its end is wrong
                        ▓▓▓ ▓▓▓

A clock is moved, a wrong end is cut, and a wrong start is mended where the kernel fits between its neighbours. What
cannot be mended is dropped, so that its launch counts as one without GPU work. Good recordings pass unchanged: in those
at hand no kernel starts before its launch, and kernels of one stream overlap by 4 µs at most.
"""

from __future__ import annotations

import numpy as np

from tracer.kineto.columns import Collector
from tracer.kineto.device_clock import move_clocks
from tracer.kineto.device_faults import cut_overruns, place_strays
from tracer.kineto.device_times import DeviceTimes, device_times
from tracer.kineto.names import NameGroup
from tracer.kineto.outliers import put_back


def mend_device_times(collected: Collector) -> None:
    """Move, cut or drop the device work with impossible times, count it in the loss report, and say so in its notes."""
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
