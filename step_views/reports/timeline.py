"""A job's timeline: parts from which every format is written, and the Chrome trace that Perfetto opens.

Each rank has a process "rank 0 simulated" and, if its steps were measured, a process "rank 0 measured". Both have the
same tracks: steps, host threads (operations and calls), and streams. Arrows lead from a launch to its kernel. Counters
show the work in the launch queue and the work running on the device.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec
import numpy as np

from graph_predictor.prediction.replay import Replay
from graph_predictor.prediction.simulated_job import SimulatedJob, replayed_job
from graph_predictor.simulation.host_slices import HostSlices
from graph_predictor.simulation.program import ItemKind, KernelCause, Program, Simulated
from tracer.arrays import Float64, Int64
from tracer.columns import kinds_of
from tracer.graph import NONE, OpKind
from tracer.output_file import whole_file
from tracer.output_kind import TIMELINE, check_output

_FIRST_TRACK = 1_000_000
"""First number of a track: track numbers are unique over processes, and differ from process numbers."""
_COMPRESSION = 3
"""Higher levels cost several times the time for a tenth of the size."""


def write_timeline(replay: Replay | SimulatedJob, path: str | os.PathLike[str]) -> None:
    """Write the timeline of a replay or of any simulated job, compressed if the name ends with ``.gz``. Times in the
    file are µs from the job's start, with three decimals. An existing timeline is replaced once the new one is
    complete; other files are not. Raises ``ForetraceError`` if the file cannot be written."""
    check_output(os.fspath(path), [], TIMELINE)
    write_events(timeline_events(replay), path)


def write_events(blocks: Iterable[str], path: str | os.PathLike[str]) -> None:
    """Write blocks of events (JSON objects separated by commas) as a timeline file, as ``write_timeline`` does."""
    with ExitStack() as stack:
        stream: BinaryIO = stack.enter_context(whole_file(path))
        if os.fspath(path).endswith(".gz"):
            stream = stack.enter_context(  # type: ignore[assignment]
                gzip.GzipFile(filename="", mode="wb", fileobj=stream, compresslevel=_COMPRESSION, mtime=0))
        stream.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for block in blocks:
            if block:
                stream.write(separator + block.encode("utf-8", "replace"))
                separator = b",\n"
        stream.write(b"\n]}\n")


def timeline_events(source: Replay | SimulatedJob) -> Iterator[str]:
    """Yield events in blocks of JSON objects, separated by commas within a block; blocks may be empty."""
    tracks = Tracks()
    job = source if isinstance(source, SimulatedJob) else replayed_job(source)
    for listed, parts in job_timeline(job):
        process = TimelineProcess(tracks, listed.number, listed.name)
        texts = _JsonTexts()
        for part in parts:
            for order, name in listed.tracks:
                process.track(order, name)
            yield from _part_events(part, process, texts)
        yield process.metadata()


class _JsonTexts:
    """Tables of texts as JSON, each converted once."""

    def __init__(self) -> None:
        self.known: dict[int, list[str]] = {}

    def of(self, texts: list[str]) -> list[str]:
        """Return a table's texts as JSON."""
        if id(texts) not in self.known:
            self.known[id(texts)] = [json_text(text) for text in texts]
        return self.known[id(texts)]


EVENTS_AT_ONCE = 20_000
"""Events of one block, whose text takes a few MB: a choice."""


def _blocks(rows: int) -> Iterator[slice]:
    """Return the rows of each block as slices."""
    return (slice(low, low + EVENTS_AT_ONCE) for low in range(0, rows, EVENTS_AT_ONCE))


def _part_events(part: TimelinePart, process: TimelineProcess, known: _JsonTexts) -> Iterator[str]:
    """Yield the events of a part as JSON texts with many events each."""
    tids = np.array(list(process.tids.values()) or [0], np.int64)
    if isinstance(part, CountBlock):
        form = f'{{"ph":"C","pid":{process.pid},"name":{json_text(part.name)},"ts":%.3f,"args":{{"count":%d}}}}'
        for some in _blocks(len(part.at_ns)):
            yield ",\n".join([form % row for row in zip((part.at_ns[some] / 1e3).tolist(), part.value[some].tolist(),
                                                        strict=True)])
    elif isinstance(part, ArrowBlock):
        form = (f'{{"ph":"s","cat":"launch","name":"launch","pid":{process.pid},"tid":%d,"ts":%.3f,"id":%d}},\n'
                f'{{"ph":"f","bp":"e","cat":"launch","name":"launch","pid":{process.pid},"tid":%d,"ts":%.3f,"id":%d}}')
        for some in _blocks(len(part.from_ns)):
            first = process.tracks.arrows
            process.tracks.arrows += len(part.from_ns[some])
            yield ",\n".join([form % (source, at, first + n, target, to, first + n) for n, (source, at, target, to) in
                              enumerate(zip(tids[part.from_track[some]].tolist(), (part.from_ns[some] / 1e3).tolist(),
                                            tids[part.to_track[some]].tolist(), (part.to_ns[some] / 1e3).tolist(),
                                            strict=True))])
    else:
        texts = known.of(part.texts)
        made, place = _arguments(part, texts)
        for some in _blocks(len(part.start_ns)):
            yield process.slices(part.category, tids[part.track[some]].tolist(), part.start_ns[some],
                                 part.duration_ns[some], [texts[code] for code in part.name[some].tolist()],
                                 [made[each] for each in place[some].tolist()] if part.arguments else None)


def _arguments(part: SliceBlock, texts: list[str]) -> tuple[list[str], Int64]:
    """Return the distinct arguments as JSON, and the index of each slice's arguments among them."""
    if not part.arguments:
        return [], np.zeros(0, np.int64)
    forms = [f"{json_text(key)}:%s" for key in part.arguments]
    form = "{" + ",".join(forms).replace("%", "%%").replace("%%s", "%s") + "}"
    place, first = kinds_of(*part.arguments.values())
    columns = [[texts[code] for code in column[first].tolist()] for column in part.arguments.values()]
    return [form % row for row in zip(*columns, strict=True)], place


class Tracks:
    """Assigns track numbers."""

    def __init__(self) -> None:
        self.used = _FIRST_TRACK
        self.arrows = 1
        """Number of the next arrow."""

    def new(self) -> int:
        """Return the next number."""
        self.used += 1
        return self.used


class TimelineProcess:
    """One process of the timeline: its number and its named tracks."""

    def __init__(self, tracks: Tracks, pid: int, name: str) -> None:
        self.tracks, self.pid, self.name = tracks, pid, name
        self.tids: dict[tuple[int, str], int] = {}

    def track(self, order: int, name: str) -> int:
        """Return the number of the track with this name; ``order`` sorts the tracks."""
        if (order, name) not in self.tids:
            self.tids[order, name] = self.tracks.new()
        return self.tids[order, name]

    def slices(self, category: str, tid: Iterable[int], start: Int64, duration: Int64, names: Iterable[str],
               arguments: Iterable[str] | None = None) -> str:
        """Return the complete events; times in ns, ``names`` and ``arguments`` already JSON."""
        head = f'{{"ph":"X","cat":"{category}","pid":{self.pid},"tid":%d,"ts":%.3f,"dur":%.3f,"name":%s'
        ts, dur = (start / 1e3).tolist(), (duration / 1e3).tolist()
        if arguments is None:
            form = head + "}"
            return ",\n".join([form % row for row in zip(tid, ts, dur, names, strict=True)])
        form = head + ',"args":%s}'
        return ",\n".join([form % row for row in zip(tid, ts, dur, names, arguments, strict=True)])

    def metadata(self) -> str:
        """Return the names and order of the process and its tracks."""
        if not self.tids:
            return ""
        events = [("process_name", 0, {"name": self.name}), ("process_sort_index", 0, {"sort_index": self.pid})]
        for (order, name), tid in self.tids.items():
            events += [("thread_name", tid, {"name": name}), ("thread_sort_index", tid, {"sort_index": order})]
        return ",\n".join(json_text({"ph": "M", "pid": self.pid, "tid": tid, "name": name, "args": args})
                          for name, tid, args in events)


def json_text(value: object) -> str:
    """Return a value as JSON; text that is not valid Unicode (half a surrogate pair) is replaced."""
    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode()
    return msgspec.json.encode(value).decode()


def known_times(recorded: Program, simulated: Simulated, slices: HostSlices, ns: Float64, items: Int64, rows: Int64,
                clock_ns: int) -> tuple[Int64, Int64]:
    """Return the known times of one thread, as recorded and as simulated, both on the job's clock in ns and in order.

    ``slices`` are the host time of ``recorded``, and ``ns`` their simulated durations. ``items`` are one thread's items
    of the simulated program, ``rows`` the recorded items that they copy. ``clock_ns`` is added to times of the rank's
    window to get the job's clock. An operation that takes no time after the edits begins and ends at one moment.
    """
    place = np.full(len(recorded.item_kind), -1, np.int64)
    place[rows] = np.arange(len(rows))
    inside = np.flatnonzero((place[slices.item] >= 0) & ~slices.is_cost)
    inside = inside[np.lexsort((slices.start_ns[inside], place[slices.item[inside]]))]
    at = place[slices.item[inside]]
    # Work follows the thread's previous item; work before the first item ends where that item begins.
    reached = np.cumsum(ns[inside])
    before = np.searchsorted(at, at)
    done = reached - np.append(0.0, reached)[before]
    follows = items[at] - 1 == items[np.maximum(at - 1, 0)]
    total = np.bincount(at, weights=ns[inside], minlength=len(items))[at]
    begin = np.where(follows, simulated.item_end[items[np.maximum(at - 1, 0)]], simulated.item_start[items[at]] - total)
    start, length = slices.start_ns[inside] + clock_ns, slices.ns[inside]
    # Parts of one gap have equal starts: they are put one after another.
    opens = np.ones(len(inside), np.bool_)
    opens[1:] = (at[1:] != at[:-1]) | (start[1:] != start[:-1])
    sofar = np.cumsum(length) - length
    start = start + sofar - sofar[np.flatnonzero(opens)[np.cumsum(opens) - 1]]
    known = np.concatenate([np.stack([start, start + length], 1).reshape(-1), np.stack(
        [recorded.recorded_item_start[rows], recorded.recorded_item_end[rows]], 1).reshape(-1)])
    now = np.concatenate([np.stack([begin + done - ns[inside], begin + done], 1).reshape(-1), np.stack(
        [simulated.item_start[items], simulated.item_end[items]], 1).reshape(-1).astype(np.float64)])
    order = np.argsort(known, kind="stable")
    return known[order], np.rint(np.maximum.accumulate(now[order])).astype(np.int64)


def carried(times: Int64, recorded: Int64, moved: Int64) -> Int64:
    """Return times (ns) on the simulated clock: interpolated between ``recorded`` → ``moved``, shifted outside."""
    inside = np.interp(times, recorded, moved)
    inside = np.where(times < recorded[0], times - recorded[0] + moved[0], inside)
    return np.rint(np.where(times > recorded[-1], times - recorded[-1] + moved[-1], inside)).astype(np.int64)


_STEPS, _HOST, _DEVICE = 0, 1, 1_000
"""First order number of each kind of track in a process."""
QUEUED, RUNNING = "launched, not yet started", "running on the device"

STARTS_AFTER = {
    KernelCause.LAUNCH: "its launch", KernelCause.STREAM: "the kernel before it on its stream",
    KernelCause.EDGE: "a kernel of another stream", KernelCause.EXTERNAL: "something outside the recording",
}


@dataclass(slots=True, eq=False)
class TrackList:
    """A process of a timeline: its number, its name, and its tracks by (order, name)."""

    number: int
    name: str
    tracks: dict[tuple[int, str], int] = field(default_factory=dict)

    def track(self, order: int, name: str) -> int:
        """Return the index of a track, which is added if it is new; ``order`` sorts the tracks."""
        return self.tracks.setdefault((order, name), len(self.tracks))


@dataclass(slots=True, eq=False)
class SliceBlock:
    """Slices of one process and kind; times in ns. ``name`` and the arguments' values are indices into ``texts``."""

    process: TrackList
    category: str
    track: Int64
    start_ns: Int64
    duration_ns: Int64
    name: Int64
    texts: list[str]
    arguments: dict[str, Int64] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ArrowBlock:
    """Arrows within a process, each from the start of one slice to the start of another."""

    process: TrackList
    from_track: Int64
    from_ns: Int64
    to_track: Int64
    to_ns: Int64


@dataclass(slots=True, eq=False)
class CountBlock:
    """A count over time; each value holds until the next time."""

    process: TrackList
    name: str
    at_ns: Int64
    value: Int64


TimelinePart = SliceBlock | ArrowBlock | CountBlock


def job_timeline(job: SimulatedJob) -> Iterator[tuple[TrackList, Iterator[TimelinePart]]]:
    """Yield the processes of a job's timeline and their parts; a process's tracks are complete once its parts are
    read."""
    slices, ns = job.host_slices()
    for position in range(len(job.graphs)):
        rows = _RankRows(job, position, slices, ns)
        rank = job.rank_of(position)
        if not job.predicted:
            measured = TrackList(2 * position + 1, f"rank {rank} measured")
            yield measured, rows.measured(measured)
        which = "predicted" if job.predicted else "simulated"
        simulated = TrackList(2 * position + 2, f"rank {rank} {which}")
        yield simulated, rows.simulated(simulated)


class _RankRows:
    """Makes the timeline's parts for one rank."""

    def __init__(self, job: SimulatedJob, position: int, slices: HostSlices, ns: Float64) -> None:
        self.job, self.position, self.graph = job, position, job.graphs[position]
        self.slices, self.ns = slices, ns
        self.clock = job.built.clock_ns[position]
        self.texts = [*self.graph.strings, *STARTS_AFTER.values(), ""]
        program = job.program
        self.kernels, self.rows = job.kernel_rows(position)
        thread = program.item_thread()
        self.items = np.flatnonzero(program.thread_rank[thread] == position)
        self.item_thread = job.thread_numbers()[self.items]
        ops = self.graph.ops
        self.ops = np.flatnonzero((ops.kind == OpKind.OPERATION) | ~np.isin(ops.name, self.graph.steps.name))

    def measured(self, process: TrackList) -> Iterator[TimelinePart]:
        graph, clock = self.graph, self.clock
        steps, ops, calls, kernels = graph.steps, graph.ops, graph.launches, graph.kernels
        yield self._steps(process, steps.start_ns + clock, steps.duration_ns, steps.name.astype(np.int64), self.texts)
        rows = self.ops
        yield self._slices(process, "op", self._host(process, ops.thread[rows]), ops.start_ns[rows] + clock,
                           ops.duration_ns[rows], ops.name[rows])
        yield self._slices(process, "call", self._host(process, calls.thread), calls.start_ns + clock,
                           calls.duration_ns, calls.name)
        start = kernels.start_ns + clock
        end = start + kernels.duration_ns
        every = np.arange(len(kernels))
        yield self._slices(process, "kernel", self._streams(process, every, start, end), start, kernels.duration_ns,
                           kernels.name, {"op": self._operation(every)})
        launched = np.flatnonzero(kernels.launch >= 0)
        call = kernels.launch[launched]
        yield from _counts(process, (calls.start_ns + calls.duration_ns)[call] + clock, start[launched], start, end)

    def simulated(self, process: TrackList) -> Iterator[TimelinePart]:
        graph, program, simulated = self.graph, self.job.program, self.job.simulated
        steps = [step for step in self.job.steps() if step.rank == self.position]
        begin = simulated.item_end[[step.begin_item for step in steps]] if steps else np.zeros(0, np.int64)
        end = simulated.item_end[[step.end_item for step in steps]] if steps else np.zeros(0, np.int64)
        yield self._steps(process, begin, end - begin, np.arange(len(steps)), [step.name for step in steps])
        yield from self._simulated_ops(process)

        is_call = (program.item_kind[self.items] == ItemKind.CALL) & (program.item_row[self.items] >= 0)
        items, thread = self.items[is_call], self.item_thread[is_call]
        start, end = simulated.item_start[items], simulated.item_end[items]
        host = self._host(process, thread)
        yield self._slices(process, "call", host, start, end - start, graph.launches.name[program.item_row[items]])
        kernels, rows = self.kernels, self.rows
        kernel_start, kernel_end = simulated.kernel_start[kernels], simulated.kernel_end[kernels]
        streams = self._streams(process, rows, kernel_start, kernel_end)
        cause = np.array([len(graph.strings) + place for place in range(len(STARTS_AFTER))], np.int64)
        yield self._slices(process, "kernel", streams, kernel_start, kernel_end - kernel_start,
                           graph.kernels.name[rows],
                           {"op": self._operation(rows), "starts after": cause[simulated.kernel_cause[kernels]]})
        launching = program.kernel_item[kernels]
        place = np.searchsorted(items, launching)
        found = launching >= 0
        yield ArrowBlock(process, host[place[found]], simulated.item_start[launching[found]], streams[found],
                         kernel_start[found])
        yield from _counts(process, simulated.item_end[launching[found]], kernel_start[found], kernel_start, kernel_end)

    def _simulated_ops(self, process: TrackList) -> Iterator[TimelinePart]:
        """Yield operations at simulated times: recorded times, shifted with the host time around them."""
        ops, built, simulated = self.graph.ops, self.job.built, self.job.simulated
        copies = self.job.copy[self.items]
        there = self.ops if self.job.gone is None else self.ops[~self.job.gone.operations[self.position][self.ops]]
        for thread in np.unique(self.item_thread).tolist():
            rows = there[ops.thread[there] == thread]
            if thread < 0 or not len(rows):
                continue
            start = ops.start_ns[rows] + self.clock
            end = start + ops.duration_ns[rows]
            mine = self.item_thread == thread
            for copy in np.unique(copies[mine]).tolist():
                items = self.items[mine & (copies == copy)]
                recorded, moved = known_times(built.recorded_program, simulated, self.slices, self.ns,
                                              items, self.job.item[items], self.clock)
                inside = (start >= recorded[0]) & (end <= recorded[-1]) if self.job.predicted else np.ones(
                    len(rows), np.bool_)
                start_now, end_now = (carried(times[inside], recorded, moved) for times in (start, end))
                yield self._slices(process, "op", self._host(process, ops.thread[rows[inside]]), start_now,
                                   end_now - start_now, ops.name[rows[inside]])

    def _slices(self, process: TrackList, category: str, track: Int64, start: Int64, duration: Int64,
                name: np.ndarray, arguments: dict[str, Int64] | None = None) -> SliceBlock:
        return SliceBlock(process, category, track, start, duration, name.astype(np.int64), self.texts,
                          arguments or {})

    def _steps(self, process: TrackList, start: Int64, duration: Int64, name: Int64, texts: list[str]) -> SliceBlock:
        track = process.track(_STEPS, "steps") if len(name) else 0
        return SliceBlock(process, "step", np.full(len(name), track), start, duration, name, texts)

    def _host(self, process: TrackList, thread: np.ndarray) -> Int64:
        """Return the track of each row by its thread."""
        found = np.zeros(len(thread), np.int64)
        for number in np.unique(thread).tolist():
            known = self.graph.threads[number] if number >= 0 else None
            name = (known.name or f"thread {known.tid}") if known else "thread"
            found[thread == number] = process.track(_HOST + max(number, 0), name)
        return found

    def _streams(self, process: TrackList, rows: Int64, start: Int64, end: Int64) -> Int64:
        """Return the track of each kernel by its stream; kernels that overlap on one stream get further lanes."""
        found = np.zeros(len(start), np.int64)
        if not len(start):
            return found
        device, stream = self.graph.kernels.device[rows], self.graph.kernels.stream[rows]
        several = len(np.unique(device)) > 1
        pairs, index = np.unique(np.stack([device, stream]), axis=1, return_inverse=True)
        for number, (gpu, queue) in enumerate(pairs.T.tolist()):
            mine = np.nonzero(index.reshape(-1) == number)[0]
            name = f"GPU {gpu} stream {queue}" if several else f"stream {queue}"
            lane_of = lanes(start[mine], end[mine])
            for lane in np.unique(lane_of).tolist():
                shown = name if not lane else f"{name}, overlapping {lane}"
                found[mine[lane_of == lane]] = process.track(_DEVICE + number, shown)
        return found

    def _operation(self, rows: Int64) -> Int64:
        """Return the index in ``texts`` of each kernel's operation; without one, the index of the empty last text."""
        op = self.graph.kernels.op[rows]
        return np.where(op >= 0, np.append(self.graph.ops.name, NONE)[op], NONE).astype(np.int64)


def _counts(process: TrackList, submitted: Int64, left: Int64, start: Int64, end: Int64) -> Iterator[CountBlock]:
    """Yield two counts over time: work launched but not started, and work running."""
    if len(start):
        yield _count(process, QUEUED, submitted, np.maximum(left, submitted))
        yield _count(process, RUNNING, start, end)


def _count(process: TrackList, name: str, up: Int64, down: Int64) -> CountBlock:
    at = np.concatenate([up, down])
    change = np.concatenate([np.ones(len(up), np.int64), np.full(len(down), -1, np.int64)])
    order = np.argsort(at, kind="stable")
    at, value = at[order], np.cumsum(change[order])
    # Of several changes at one time, only the final count is kept.
    last = np.append(at[1:] != at[:-1], True)[: len(at)]
    return CountBlock(process, name, at[last], value[last])


MOST_LANES = 100  # chosen: more would not be read, and a lane for each kernel takes quadratic time


def lanes(start: Int64, end: Int64) -> Int64:
    """Return the first free lane for each interval; the last of ``MOST_LANES`` if all lanes are taken."""
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(end[order])
    lanes = np.zeros(len(start), np.int64)
    if (start[order][1:] >= reached[:-1]).all():
        return lanes
    free: list[int] = []
    for row, begin, finish in zip(order.tolist(), start[order].tolist(), end[order].tolist(), strict=True):
        lane = next((i for i, until in enumerate(free) if until <= begin), min(len(free), MOST_LANES - 1))
        if lane == len(free):
            free.append(finish)
        free[lane] = max(free[lane], finish)
        lanes[row] = lane
    return lanes
