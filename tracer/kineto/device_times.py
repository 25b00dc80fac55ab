"""Device work with the calls that launched it and the calls that wait for it, from raw columns of events.

It mends single pieces of work with a wrong start or a wrong end; ``mending`` moves whole clocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracer.graph import NONE, LaunchTable
from tracer.kineto.columns import Collector
from tracer.kineto.events import NameGroup
from tracer.kineto.linking import LinkedWork, link

EARLY_NS = 5_000
"""Clocks are matched to some µs. Work that starts this much before its launch call shows a clock that is behind."""
IMPOSSIBLE_NS = 100_000
"""Work that starts this much before its launch call is wrong by more than a clock's offset."""
LATE_NS = 10 * 10**9
"""No device begins queued work this long after the last host call: launch queues hold some 1,000 kernels."""
ASTRAY_NS = 60 * 10**9
"""Work launched before the window starts at most this long before the first recorded call."""
PROMPT_NS = 100_000
"""A launch on an idle stream starts its kernel within this time (V100, A100, H100, MI300: 5 to 31 µs)."""
LAUNCH_NS = 5_000
"""Least time from a call's start to its kernel's start (2 to 18 µs over twelve kinds of GPU and driver)."""
FOREVER = np.iinfo(np.int64).max
_WHOLE_DEVICE, _ONE_STREAM = "DeviceSynchronize", "StreamSynchronize"


@dataclass(slots=True)
class Waits:
    """Host calls that return once all device work launched before them is done, by start, [calls]."""

    start: np.ndarray
    end: np.ndarray

    def following(self, launched_ns: np.ndarray) -> np.ndarray:
        """Return the index of the first wait after each launch; ``len(self.start)`` where no wait follows."""
        return np.searchsorted(self.start, launched_ns)


@dataclass(slots=True)
class DeviceTimes:
    """Device work in the order of the file, with the calls that launched it; times in ns of the trace's clock.

    Attributes:
        start, duration: Times of each piece of work, [work].
        clock: Number of its device and the process that uses it, [work].
        stream: Number of its stream and clock, [work].
        launched: Whether its call was recorded, [work].
        call_start, call_end: Times of that call; 0 for none, [work].
        shared: Whether the call launched other work too (a CUDA graph), [work].
        same: Number of its kernel and launch grid, [work].
        waits: Clock → calls that wait for all its work; absent where unknown.
        unsteady: Whether the difference of its clock and the host's changes, [work]. Then wrong times of single work
            cannot be found.
        host_first, host_last: First start and last end of all calls; 0 without any.
    """

    start: np.ndarray
    duration: np.ndarray
    clock: np.ndarray
    stream: np.ndarray
    launched: np.ndarray
    call_start: np.ndarray
    call_end: np.ndarray
    shared: np.ndarray
    same: np.ndarray
    waits: dict[int, Waits]
    unsteady: np.ndarray
    host_first: int
    host_last: int

    @property
    def end(self) -> np.ndarray:
        """Return the end of each piece of work."""
        return self.start + self.duration

    @property
    def unstamped(self) -> np.ndarray:
        """Return a mask of the work without a start: the profiler wrote 0."""
        return self.start <= 0

    @property
    def lead(self) -> np.ndarray:
        """Return the time from the call's start to the work's; ``FOREVER`` where no call or no start is known."""
        known = self.launched & ~self.unstamped
        return np.where(known, self.start - self.call_start, FOREVER)

    def impossible_starts(self) -> np.ndarray:
        """Return a mask of the work without a start, or with one before its launch or long after all calls."""
        found = self.unstamped | ((self.lead < -IMPOSSIBLE_NS) & ~self.unsteady)
        if self.launched.any():
            found |= self.start > self.host_last + LATE_NS
            found |= ~self.launched & (self.start < self.host_first - ASTRAY_NS)
        return found

    def done_by(self) -> np.ndarray:
        """Return the time at which a wait for each piece of work returned; ``FOREVER`` where none is known."""
        done = np.full(len(self.start), FOREVER, np.int64)
        for clock, waits in self.waits.items():
            rows = np.flatnonzero((self.clock == clock) & self.launched)
            done[rows] = np.append(waits.end, FOREVER)[waits.following(self.call_end[rows])]
        return done


def device_times(collected: Collector) -> DeviceTimes:
    """Return the device work linked to its calls."""
    start, duration, device, stream, correlation, kind, name, grid = collected.gathered(
        NameGroup.DEVICE, "start", "duration", "device", "stream", "correlation", "kind", "name", "grid")
    call_start, call_duration, thread, call_correlation, call_name = collected.gathered(
        NameGroup.CALL, "start", "duration", "thread", "correlation", "name")
    calls = LaunchTable.blank(len(call_start))
    calls.start_ns, calls.duration_ns, calls.correlation = call_start, call_duration, call_correlation
    processes = collected.threads.processes()[thread]
    launch = link(LinkedWork(kind, device, stream, start, correlation), calls, processes)
    launched = launch >= 0
    call_times = np.zeros((2, len(start)), np.int64)
    process, shared = np.full(len(start), NONE, np.int64), np.zeros(len(start), np.bool_)
    if launched.any():
        of = launch[launched]
        call_times[:, launched] = call_start[of], (call_start + call_duration)[of]
        process[launched] = processes[of]
        shared[launched] = (np.bincount(of) > 1)[of]
    clock = _numbers(device, _owners(device, process))
    waits = _waits(collected, calls, call_name, processes, clock, stream, process)
    return DeviceTimes(
        start=start.copy(), duration=duration.copy(), clock=clock, stream=_numbers(clock, stream), launched=launched,
        call_start=call_times[0], call_end=call_times[1], shared=shared, same=_numbers(name, grid), waits=waits,
        unsteady=np.zeros(len(start), bool),
        host_first=int(call_start.min()) if len(calls) else 0,
        host_last=int((call_start + call_duration).max()) if len(calls) else 0)


def _numbers(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return a number that identifies each pair of values."""
    codes = [np.unique(values, return_inverse=True)[1].reshape(-1) for values in (first, second)]
    return np.unique(codes[0] * np.int64(len(first) + 1) + codes[1], return_inverse=True)[1].reshape(-1)


def _owners(device: np.ndarray, process: np.ndarray) -> np.ndarray:
    """Return the process of each piece of work: that of its launch, else of most launches on its device."""
    owner = process.copy()
    for number in np.unique(device[process == NONE]).tolist():
        mine = process[(device == number) & (process != NONE)]
        if len(mine):
            owner[(device == number) & (process == NONE)] = np.bincount(mine).argmax()
    return owner


def _waits(collected: Collector, calls: LaunchTable, name: np.ndarray, processes: np.ndarray, clock: np.ndarray,
           stream: np.ndarray, process: np.ndarray) -> dict[int, Waits]:
    """Return each clock's waits. The calls of a process with several devices do not record which one they wait for:
    they are left out. On a device with several streams, only waits for the whole device count."""
    found: dict[int, Waits] = {}
    texts = list(collected.strings)
    codes = np.unique(name).tolist()
    for owner in np.unique(process[process != NONE]).tolist():
        clocks = np.unique(clock[process == owner])
        if len(clocks) != 1:
            continue
        ends = (_WHOLE_DEVICE,) if len(np.unique(stream[clock == clocks[0]])) > 1 else (_WHOLE_DEVICE, _ONE_STREAM)
        named = [code for code in codes if texts[code].endswith(ends)]
        rows = np.flatnonzero(np.isin(name, named) & (processes == owner))
        rows = rows[np.argsort(calls.start_ns[rows], kind="stable")]
        if len(rows):
            found[int(clocks[0])] = Waits(calls.start_ns[rows], (calls.start_ns + calls.duration_ns)[rows])
    return found


_OVERLAP_NS = 100_000
"""Overlap of kernels that is allowed on a stream whose kernels rarely overlap. Programmatic dependent launch: 4 µs on
H100 and B200."""
_HABIT = 0.5
"""A stream overlaps by habit if more than this share of its kernels overlap the next one."""
_ODD_OVERLAP = 10
"""On a stream that overlaps by habit, an overlap of this multiple of the median is unusual."""
_LATE_END_NS = 100_000
"""A kernel that ends this long after a call that waited for it has a wrong end."""


def cut_overruns(times: DeviceTimes) -> np.ndarray:
    """Cut work that overlaps its successors or a wait for it, in place, and return its rows.

    Work of CUDA graphs is left alone: it does not run in the order of its stream.
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
    """Return a mask of work, by stream and start, that overlaps its successor more than is usual on the stream."""
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
    """Return a mask of work that ends long after a wait for it; all false if most does, since clocks then differ."""
    passed = (done != FOREVER) & (times.end[rows] > np.minimum(done, FOREVER - _LATE_END_NS) + _LATE_END_NS)
    if passed.sum() > 1 and 2 * len(np.unique(done[passed])) > len(np.unique(done[done != FOREVER])):
        return np.zeros(len(rows), bool)
    return passed


def _typical(times: DeviceTimes, rows: np.ndarray, good: np.ndarray) -> np.ndarray:
    """Return the median duration of good work with each row's kernel and grid; ``FOREVER`` where there is none."""
    alike = np.flatnonzero(good & np.isin(times.same, times.same[rows]))
    alike = alike[np.lexsort((times.duration[alike], times.same[alike]))]
    low, high = (np.searchsorted(times.same[alike], times.same[rows], side=side) for side in ("left", "right"))
    found = np.full(len(rows), FOREVER, np.int64)
    known = high > low
    found[known] = times.duration[alike[(low + (high - low) // 2)[known]]]
    return found


def place_strays(times: DeviceTimes, rows: np.ndarray) -> np.ndarray:
    """Move work with a wrong start to the earliest possible time after its launch, in place.

    The work keeps its duration; if that was lost with the start, it takes its kernel's usual time. It must lie after
    the earlier work of its stream, before the later work, and before the return of a call that waited for it.

    Args:
        times: the device work; all of it except ``rows`` is trusted.
        rows: the work with wrong starts.

    Returns:
        A mask of the rows that were placed, [rows]. All others lack a call or a duration, or do not fit.
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
        if start + length > last:  # a launch may also have been faster than usual
            start = max(last - length, min(start, int(times.call_start[wanted[at]]) + LAUNCH_NS),
                        int(before[at]), cursor if of == stream else 0)
        if start + length <= last:
            starts[at], cursor, stream = start, start + length, of
    ok = starts >= 0
    times.start[wanted[ok]] = starts[ok]
    placed[fit[ok]] = True
    return placed


def _neighbours(times: DeviceTimes, wanted: np.ndarray, good: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each wanted row the last end of earlier launches on its stream, and the first start of later ones."""
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
