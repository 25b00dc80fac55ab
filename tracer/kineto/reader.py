"""``read_kineto``: a profiler JSON file → an ``ExecutionGraph``."""

from __future__ import annotations

import os
from collections.abc import Callable

from tracer.errors import TraceError
from tracer.graph import ExecutionGraph, LossReport
from tracer.kineto.build import build_graph
from tracer.kineto.chunks import EventStream
from tracer.kineto.columns import Collector
from tracer.kineto.host_loop import gaps_between, nest_rows, rows_around
from tracer.kineto.mending import drop_excess, drop_outliers, mend_device_times
from tracer.kineto.processes import ProcessPart, processes_of
from tracer.kineto.scan_loop import place_tokens, scan_events
from tracer.kineto.scanner import HasValues, Scanner
from tracer.kineto.source import TraceSource, is_rocprof, local_export
from tracer.translate.nsys import NsysSource
from tracer.translate.rocprof import RocprofEvents

_Events = EventStream | NsysSource | RocprofEvents
LEAST_STORED_BYTES, _FREE_EVENTS = 2, 1 << 20
"""Least stored bytes of an event, and events allowed in any file: a profiler writes no more than these permit."""


def read_processes(source: str | os.PathLike[str], *,
                   progress: Callable[[int, int], None] | None = None,
                   step_region: str | None = None) -> list[ExecutionGraph]:
    """Read a trace as ``read_kineto`` does, from a file that may hold several processes. Return one graph for each;
    several graphs are numbered as ranks in the order of the processes.

    Raises:
        TraceError: As ``read_kineto``; or the events of two processes cannot be separated.
    """
    collector, stored_bytes, finish = _collected(source, progress, None, step_region)
    parts = processes_of(collector, os.fspath(source), stored_bytes)
    if not parts:
        return [finish(collector)]
    graphs = []
    for rank, part in enumerate(parts):
        own, _, finish = _collected(source, None, part, step_region)
        graph = finish(own)
        meta = graph.meta
        meta.rank, meta.world_size = rank, max(meta.world_size, len(parts))
        meta.loss.notes.append(f"The file holds {len(parts)} processes ({', '.join(each.pid for each in parts)}): "
                               f"this is {part.pid}, read as rank {rank} of a job.")
        if part.in_order:
            meta.loss.notes.append("The processes number their launches alike, and nothing in the file says which "
                                   "device is whose: they were paired in order. Give the trace of each process by "
                                   "itself to be sure.")
        graphs.append(graph)
    return graphs


def read_kineto(source: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None,
                step_region: str | None = None) -> ExecutionGraph:
    """Read one rank's profiler trace: Kineto JSON of any era, plain or gzip, rocprofv3's results, or the SQLite export
    of Nsight Systems.

    The text is streamed: memory grows with the number of events, not with the length of the text.

    Args:
        source: A path or any fsspec URL (``s3://…``, ``https://…``).
        progress: Called with (bytes done, bytes in all) of the stored file; the second is 0 if unknown.
        step_region: The steps are the regions of this name (see ``tracer.kineto.steps``); by default the best
            evidence decides.

    Returns:
        The graph. Times are int64 nanoseconds from the earliest event, which is at ``meta.base_time_ns``;
        what was missing, mended or lost is in ``meta.loss``.

    Raises:
        TraceError: The file is missing, empty, no profiler trace, too damaged to hold a single event, or of several
            processes.
        StepRegionError: It has no region named ``step_region``.
    """
    found = read_processes(source, progress=progress, step_region=step_region)
    if len(found) > 1:
        raise TraceError(f"{os.fspath(source)} holds {len(found)} processes, each a rank of a job: read it as one "
                         "(tracer.read_job).")
    return found[0]


def _collected(source: str | os.PathLike[str], progress: Callable[[int, int], None] | None,
               part: ProcessPart | None, step_region: str | None) -> tuple[
                   Collector, int, Callable[[Collector], ExecutionGraph]]:
    """Gather a file's events; return them, the file's stored bytes, and what makes the graph of the events."""
    loss = LossReport()
    opened, stream, values = _opened(source, progress, loss)
    collector = Collector(loss, values, part)
    try:
        for batch in stream:
            collector.add(batch)
            if loss.events_read > max(_FREE_EVENTS, opened.stored_bytes // LEAST_STORED_BYTES):
                opened.damage = (f"it has an event for every {opened.stored_bytes / loss.events_read:.1f} stored "
                                 "bytes, where traces take some 14 to 33")
                break
    except TraceError as error:
        if opened.damage and not loss.events_read:
            raise TraceError(f"{opened.name}: {opened.damage} before its first event; "
                             "copy or record it again.") from error
        raise
    if isinstance(values, Scanner):
        values.release()
    loss.notes += opened.notes
    _note_damage(stream, opened, loss)
    drop_excess(collector)
    mend_device_times(collector)
    drop_outliers(collector)
    _check(collector, stream, opened)
    return collector, opened.stored_bytes, lambda whole: build_graph(
        whole, stream.metadata, stream.is_list, opened.name, step_region or "")


def _opened(source: str | os.PathLike[str], progress: Callable[[int, int], None] | None, loss: LossReport) -> tuple[
        TraceSource | NsysSource, _Events, HasValues]:
    """Return a file, its events, and the scanner to which their codes belong."""
    if local_export(source):
        export = NsysSource(source, progress)
        return export, export, export.vocabulary
    opened = TraceSource(source, progress)
    results = opened.whole_if(is_rocprof)
    if results is not None:
        events = RocprofEvents(results, opened.name, opened.stored_bytes)
        opened.notes = events.notes
        return opened, events, events.vocabulary
    scanner = Scanner()
    return opened, EventStream(opened.blocks(), opened.name, loss, scanner), scanner


def ready_to_read() -> None:
    """Load the code that reading needs, so that processes forked from this one need not load it."""
    for loop in (scan_events, place_tokens, nest_rows, rows_around, gaps_between):
        loop.load()


def _check(collector: Collector, stream: _Events, source: TraceSource | NsysSource) -> None:
    loss = collector.loss
    if collector.first_ns is not None:
        return
    if loss.dropped_events:
        why = f"none of its {loss.dropped_events} timed events has usable times"
    elif source.damage:
        why = source.damage
    elif loss.truncated_bytes:
        why = "it ends within its first event"
    elif loss.events_read == 0:
        why = "its list of events is empty; the profiler was stopped before it recorded a step" \
            if not stream.is_list else "it is a JSON list without events"
    else:
        why = "it has no timed event (ph \"X\") of a known category"
    raise TraceError(f"{source.name} holds nothing to read: {why}. Check that it is a profiler trace, or record again.")


def _note_damage(stream: _Events, source: TraceSource | NsysSource, loss: LossReport) -> None:
    lost = f"{loss.events_read} events before that were recovered"
    if source.damage:
        loss.notes.append(f"The file is damaged: {source.damage}; {lost}, "
                          f"{loss.truncated_bytes} bytes of an unfinished event were lost.")
    elif not stream.complete:
        loss.notes.append(f"The file ends before its list of events does: it was cut off; {lost}, "
                          f"{loss.truncated_bytes} bytes of an unfinished event were lost.")
    if not stream.complete and not stream.is_list and "baseTimeNanoseconds" not in stream.metadata:
        loss.notes.append("The metadata after the events is lost with the tail: the window's absolute start may be "
                          "unknown, so that this rank cannot be aligned with others.")
    if loss.repaired_events:
        loss.notes.append(f"{loss.repaired_events} events were invalid JSON (unescaped quotes, backslashes, control "
                          "bytes, NaN or stray commas) and were mended.")
    if loss.dropped_events:
        loss.notes.append(f"{loss.dropped_events} events were dropped: their times are missing, negative or no "
                          "numbers, or their JSON could not be mended.")
