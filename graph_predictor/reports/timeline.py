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

from graph_predictor.prediction.replay import Replay
from graph_predictor.prediction.simulated_job import SimulatedJob, replayed_job
from graph_predictor.reports.job_timeline import ArrowBlock, CountBlock, TimelinePart, job_timeline
from tracer.arrays import Int64
from tracer.output_file import whole_file
from tracer.output_kind import TIMELINE, check_output

_FIRST_TRACK = 1_000_000
"""Track numbers are unique over processes, and no process number."""
_COMPRESSION = 3
"""Higher levels cost several times the time for a tenth of the size."""


def write_timeline(replay: Replay | SimulatedJob, path: str | os.PathLike[str]) -> None:
    """Write the timelines of a replay, or of any simulated job.

    Args:
        replay: A replay, or a job as it was simulated (``prediction.simulated_job``).
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


def timeline_events(source: Replay | SimulatedJob) -> Iterator[str]:
    """The events as blocks of JSON objects, with commas between those of a block (blocks may be empty)."""
    tracks = Tracks()
    job = source if isinstance(source, SimulatedJob) else replayed_job(source)
    for listed, parts in job_timeline(job):
        process = TimelineProcess(tracks, listed.number, listed.name)
        texts = _JsonTexts()
        for part in parts:
            for order, name in listed.tracks:
                process.track(order, name)
            yield _part_events(part, process, texts)
        yield process.metadata()


class _JsonTexts:
    """JSON of tables of texts, made once each."""

    def __init__(self) -> None:
        self.known: dict[int, list[str]] = {}

    def of(self, texts: list[str]) -> list[str]:
        """Return a table's texts as JSON."""
        if id(texts) not in self.known:
            self.known[id(texts)] = [json_text(text) for text in texts]
        return self.known[id(texts)]


def _part_events(part: TimelinePart, process: TimelineProcess, known: _JsonTexts) -> str:
    tids = np.array(list(process.tids.values()) or [0], np.int64)
    if isinstance(part, CountBlock):
        form = f'{{"ph":"C","pid":{process.pid},"name":{json_text(part.name)},"ts":%.3f,"args":{{"count":%d}}}}'
        return ",\n".join([form % row for row in zip((part.at_ns / 1e3).tolist(), part.value.tolist(), strict=True)])
    if isinstance(part, ArrowBlock):
        form = (f'{{"ph":"s","cat":"launch","name":"launch","pid":{process.pid},"tid":%d,"ts":%.3f,"id":%d}},\n'
                f'{{"ph":"f","bp":"e","cat":"launch","name":"launch","pid":{process.pid},"tid":%d,"ts":%.3f,"id":%d}}')
        first = process.tracks.arrows
        process.tracks.arrows += len(part.from_ns)
        return ",\n".join([form % (source, at, first + n, target, to, first + n) for n, (source, at, target, to)
                           in enumerate(zip(tids[part.from_track].tolist(), (part.from_ns / 1e3).tolist(),
                                            tids[part.to_track].tolist(), (part.to_ns / 1e3).tolist(), strict=True))])
    texts = known.of(part.texts)
    arguments = None
    if part.arguments:
        forms = [f"{json_text(key)}:%s" for key in part.arguments]
        form = "{" + ",".join(forms).replace("%", "%%").replace("%%s", "%s") + "}"
        columns = [[texts[code] for code in column.tolist()] for column in part.arguments.values()]
        arguments = [form % row for row in zip(*columns, strict=True)]
    return process.slices(part.category, tids[part.track].tolist(), part.start_ns, part.duration_ns,
                          [texts[code] for code in part.name.tolist()], arguments)


class Tracks:
    """Hands out track numbers."""

    def __init__(self) -> None:
        self.used = _FIRST_TRACK
        self.arrows = 1
        """Number of the next arrow."""

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


def json_text(value: object) -> str:
    """JSON text; what is no valid text (half a surrogate pair) is replaced."""
    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode()
    return msgspec.json.encode(value).decode()
