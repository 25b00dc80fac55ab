"""Measured and simulated timelines side by side, as a Chrome trace that Perfetto and chrome://tracing open.

Each rank gives two processes, "rank 0 measured" and "rank 0 simulated", with the same tracks: its steps, its host
threads (operations and calls) and its streams. Arrows of the simulated one go from a launch to its kernel.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import BinaryIO

import msgspec
import numpy as np

from graph_predictor.prediction.replay import WINDOW, Replay
from graph_predictor.simulation.causes import KernelCause
from graph_predictor.simulation.program import ItemKind
from tracer.arrays import Int64
from tracer.graph import NONE, ExecutionGraph, OpKind
from tracer.output_file import whole_file
from tracer.output_kind import TIMELINE, check_output

_FIRST_TRACK = 1_000_000
"""Track numbers are unique over processes, and no process number."""
_STEPS, _HOST, _DEVICE = 0, 1, 1_000
"""First places of each kind of track in a process's order."""
_COMPRESSION = 3
"""Higher levels cost several times the time for a tenth of the size."""

_STARTS_AFTER = {
    KernelCause.LAUNCH: "its launch", KernelCause.STREAM: "the kernel before it on its stream",
    KernelCause.EDGE: "a kernel of another stream", KernelCause.EXTERNAL: "something outside the recording",
}


def write_timeline(replay: Replay, path: str | os.PathLike[str]) -> None:
    """Write the timelines of a replay.

    Args:
        replay: A replay.
        path: A local file; compressed if its name ends with ``.gz``. A timeline that is there is replaced, and only
            once the new one is complete; other files are refused. Times in it are microseconds from the job's start,
            with three decimals.

    Raises:
        ForetraceError: The file cannot be written.
    """
    check_output(os.fspath(path), [], TIMELINE)
    write_events(timeline_events(replay), path)


def write_events(blocks: Iterable[str], path: str | os.PathLike[str]) -> None:
    """Write blocks of events (JSON objects with commas between them) as a timeline, see ``write_timeline``."""
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


def timeline_events(replay: Replay) -> Iterator[str]:
    """The events as blocks of JSON objects, with commas between those of a block (blocks may be empty)."""
    tracks = Tracks()
    for position, graph in enumerate(replay.graphs):
        rank = graph.meta.rank if graph.meta.rank >= 0 else position
        measured = TimelineProcess(tracks, 2 * position + 1, f"rank {rank} measured")
        simulated = TimelineProcess(tracks, 2 * position + 2, f"rank {rank} simulated")
        texts = [json_text(text) for text in [*graph.strings, ""]]
        rows = _RankRows(replay, graph, position, rank, texts)
        yield from rows.measured(measured)
        yield from rows.simulated(simulated)
        yield measured.metadata()
        yield simulated.metadata()


class Tracks:
    """Hands out track numbers."""

    def __init__(self) -> None:
        self.used = _FIRST_TRACK

    def new(self) -> int:
        """The next number."""
        self.used += 1
        return self.used


class TimelineProcess:
    """One process of the timeline: its number and its named tracks."""

    def __init__(self, tracks: Tracks, pid: int, name: str) -> None:
        self.tracks, self.pid, self.name = tracks, pid, name
        self.tids: dict[tuple[int, str], int] = {}

    def track(self, order: int, name: str) -> int:
        """Number of the track with a name; ``order`` sorts the tracks."""
        if (order, name) not in self.tids:
            self.tids[order, name] = self.tracks.new()
        return self.tids[order, name]

    def slices(self, category: str, tid: Iterable[int], start: Int64, duration: Int64, names: Iterable[str],
               arguments: Iterable[str] | None = None) -> str:
        """Complete events; times in ns, ``names`` and ``arguments`` already JSON."""
        head = f'{{"ph":"X","cat":"{category}","pid":{self.pid},"tid":%d,"ts":%.3f,"dur":%.3f,"name":%s'
        ts, dur = (start / 1e3).tolist(), (duration / 1e3).tolist()
        if arguments is None:
            form = head + "}"
            return ",\n".join([form % row for row in zip(tid, ts, dur, names, strict=True)])
        form = head + ',"args":%s}'
        return ",\n".join([form % row for row in zip(tid, ts, dur, names, arguments, strict=True)])

    def metadata(self) -> str:
        """Names and order of the process and its tracks."""
        if not self.tids:
            return ""
        events = [("process_name", 0, {"name": self.name}), ("process_sort_index", 0, {"sort_index": self.pid})]
        for (order, name), tid in self.tids.items():
            events += [("thread_name", tid, {"name": name}), ("thread_sort_index", tid, {"sort_index": order})]
        return ",\n".join(json_text({"ph": "M", "pid": self.pid, "tid": tid, "name": name, "args": args})
                          for name, tid, args in events)


class _RankRows:
    """The slices of one rank."""

    def __init__(self, replay: Replay, graph: ExecutionGraph, position: int, rank: int, texts: list[str]) -> None:
        self.replay, self.graph, self.rank, self.texts = replay, graph, rank, texts
        self.clock = replay.built.clock_ns[position]
        program = replay.program
        self.first_kernel, self.kernels_end = (int(k) for k in program.kernel_ptr[position: position + 2])
        thread = program.item_thread()
        self.items = np.nonzero(program.thread_rank[thread] == position)[0]
        numbers = replay.built.thread_number or [NONE] * len(program.thread_rank)
        self.item_thread = np.array(numbers, np.int64)[thread[self.items]] if len(self.items) else self.items
        ops = graph.ops
        self.ops = np.nonzero((ops.kind == OpKind.OPERATION) | ~np.isin(ops.name, graph.steps.name))[0]

    def measured(self, process: TimelineProcess) -> Iterator[str]:
        graph, clock = self.graph, self.clock
        steps, ops, calls, kernels = graph.steps, graph.ops, graph.launches, graph.kernels
        yield self._steps(process, steps.start_ns + clock, steps.duration_ns, [self.texts[n] for n in steps.name])
        rows = self.ops
        yield process.slices("op", self._host(process, ops.thread[rows]), ops.start_ns[rows] + clock,
                             ops.duration_ns[rows], self._names(ops.name[rows]))
        yield process.slices("call", self._host(process, calls.thread), calls.start_ns + clock, calls.duration_ns,
                             self._names(calls.name))
        start = kernels.start_ns + clock
        yield process.slices("kernel", self._streams(process, start, start + kernels.duration_ns), start,
                             kernels.duration_ns, self._names(kernels.name), self._kernel_arguments(None))

    def simulated(self, process: TimelineProcess) -> Iterator[str]:
        graph, program, simulated = self.graph, self.replay.program, self.replay.simulated
        steps = [s for s in self.replay.steps if s.rank == self.rank and s.name != WINDOW]
        begin = simulated.item_end[[s.begin_item for s in steps]] if steps else np.zeros(0, np.int64)
        duration = np.array([s.replayed_ns for s in steps], np.int64)
        yield self._steps(process, begin, duration, [json_text(s.name) for s in steps])
        yield self._simulated_ops(process)

        is_call = program.item_kind[self.items] == ItemKind.CALL
        items, thread = self.items[is_call], self.item_thread[is_call]
        start, end = simulated.item_start[items], simulated.item_end[items]
        host = self._host(process, thread)
        yield process.slices("call", host, start, end - start,
                             self._names(graph.launches.name[program.item_row[items]]))
        low, high = self.first_kernel, self.kernels_end
        kernel_start, kernel_end = simulated.kernel_start[low:high], simulated.kernel_end[low:high]
        streams = self._streams(process, kernel_start, kernel_end)
        yield process.slices("kernel", streams, kernel_start, kernel_end - kernel_start,
                             self._names(graph.kernels.name), self._kernel_arguments(simulated.kernel_cause[low:high]))
        yield self._arrows(process, items, host, streams)

    def _arrows(self, process: TimelineProcess, items: Int64, host: list[int], streams: list[int]) -> str:
        """Yield an arrow from each launching call to its kernel."""
        program, simulated = self.replay.program, self.replay.simulated
        kernels = np.arange(self.first_kernel, self.kernels_end)
        launching = program.kernel_item[kernels]
        place = np.searchsorted(items, launching)
        kernels, place = kernels[launching >= 0], place[launching >= 0]
        begin = (simulated.item_start[items[place]] / 1e3).tolist()
        arrive = (simulated.kernel_start[kernels] / 1e3).tolist()
        form = (f'{{"ph":"s","cat":"launch","name":"launch","pid":{process.pid},"tid":%d,"ts":%.3f,"id":%d}},\n'
                f'{{"ph":"f","bp":"e","cat":"launch","name":"launch","pid":{process.pid},"tid":%d,"ts":%.3f,"id":%d}}')
        return ",\n".join([
            form % (host[p], from_ts, k + 1, streams[k - self.first_kernel], to_ts, k + 1)
            for p, from_ts, k, to_ts in zip(place.tolist(), begin, kernels.tolist(), arrive, strict=True)])

    def _simulated_ops(self, process: TimelineProcess) -> str:
        """Operations where the simulation moved them: recorded times carried along by the items around them."""
        ops, program, simulated = self.graph.ops, self.replay.program, self.replay.simulated
        blocks = []
        for thread in np.unique(self.item_thread).tolist():
            rows = self.ops[ops.thread[self.ops] == thread]
            items = self.items[self.item_thread == thread]
            if thread < 0 or not len(rows):
                continue
            recorded = np.stack([program.recorded_item_start[items], program.recorded_item_end[items]], 1).reshape(-1)
            moved = np.stack([simulated.item_start[items], simulated.item_end[items]], 1).reshape(-1)
            start = ops.start_ns[rows] + self.clock
            start_now, end_now = (carried(times, recorded, moved) for times in (start, start + ops.duration_ns[rows]))
            blocks.append(process.slices("op", self._host(process, ops.thread[rows]), start_now, end_now - start_now,
                                         self._names(ops.name[rows])))
        return ",\n".join(block for block in blocks if block)

    def _steps(self, process: TimelineProcess, start: Int64, duration: Int64, names: list[str]) -> str:
        tid = process.track(_STEPS, "steps") if len(names) else 0
        return process.slices("step", [tid] * len(names), start, duration, names)

    def _host(self, process: TimelineProcess, thread: np.ndarray) -> list[int]:
        """Track of each row by its thread."""
        tids = {}
        for number in np.unique(thread).tolist():
            known = self.graph.threads[number] if number >= 0 else None
            name = (known.name or f"thread {known.tid}") if known else "thread"
            tids[number] = process.track(_HOST + max(number, 0), name)
        return [tids[number] for number in thread.tolist()]

    def _streams(self, process: TimelineProcess, start: Int64, end: Int64) -> list[int]:
        """Track of each kernel by its stream; kernels that overlap on one stream get a lane more."""
        kernels = self.graph.kernels
        found = [0] * len(start)
        if not len(start):
            return found
        several = len(np.unique(kernels.device)) > 1
        pairs, index = np.unique(np.stack([kernels.device, kernels.stream]), axis=1, return_inverse=True)
        for number, (device, stream) in enumerate(pairs.T.tolist()):
            rows = np.nonzero(index.reshape(-1) == number)[0]
            name = f"GPU {device} stream {stream}" if several else f"stream {stream}"
            for row, lane in zip(rows.tolist(), lanes(start[rows], end[rows]), strict=True):
                shown = name if not lane else f"{name}, overlapping {lane}"
                found[row] = process.track(_DEVICE + number, shown)
        return found

    def _names(self, codes: np.ndarray) -> list[str]:
        texts = self.texts
        return [texts[code] for code in codes.tolist()]

    def _kernel_arguments(self, cause: np.ndarray | None) -> list[str]:
        kernels, ops = self.graph.kernels, self.graph.ops
        known = kernels.op >= 0
        name = np.full(len(known), NONE, np.int64)
        name[known] = ops.name[kernels.op[known]]
        op = [f'{{"op":{text}' for text in self._names(name)]
        if cause is None:
            return [text + "}" for text in op]
        why = {int(c): f',"starts after":{json_text(text)}}}' for c, text in _STARTS_AFTER.items()}
        return [text + why[c] for text, c in zip(op, cause.tolist(), strict=True)]


def carried(times: Int64, recorded: Int64, moved: Int64) -> Int64:
    """Recorded times (ns) on the simulated clock: between two known times in proportion, beyond them shifted."""
    inside = np.interp(times, recorded, moved)
    inside = np.where(times < recorded[0], times - recorded[0] + moved[0], inside)
    return np.rint(np.where(times > recorded[-1], times - recorded[-1] + moved[-1], inside)).astype(np.int64)


def lanes(start: Int64, end: Int64) -> list[int]:
    """Return the first lane in which each interval overlaps no other."""
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(end[order])
    found = [0] * len(start)
    if (start[order][1:] >= reached[:-1]).all():
        return found
    free: list[int] = []
    for row, begin, finish in zip(order.tolist(), start[order].tolist(), end[order].tolist(), strict=True):
        lane = next((i for i, until in enumerate(free) if until <= begin), len(free))
        if lane == len(free):
            free.append(finish)
        free[lane] = finish
        found[row] = lane
    return found


def json_text(value: object) -> str:
    """JSON text; what is no valid text (half a surrogate pair) is replaced."""
    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode()
    return msgspec.json.encode(value).decode()
