"""A rank report as a timeline: a track of each rank's parts, one of each group's meetings, and the critical path."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graph_predictor.reports.ranks.report import JobReport
from graph_predictor.reports.ranks.stragglers import collective_name
from graph_predictor.reports.timeline import TimelineProcess, Tracks, json_text
from tracer.arrays import Int64
from tracer.graph import KernelKind


def rank_events(report: JobReport) -> Iterator[str]:
    """Blocks of events: times are those of the simulated job, from the earliest window's begin."""
    times = report.times
    base = min((w.start_ns for step in times.windows for w in step), default=0)
    tracks = Tracks()
    names = ["busy", "exposed communication", "waiting for rank", "bubble", "idle"]
    path = TimelineProcess(tracks, 1, "path across ranks")
    chosen = next((step for step in times.windows if step and step[0].name == report.path_step), [])
    if chosen and report.path:
        begin = max(chosen, key=lambda w: (w.length_ns, w.end_ns)).start_ns - base
        start = np.array([s.start_ns for s in report.path], np.int64) + begin
        labels = [json_text(f"rank {times.number(s.rank)}: {s.parts[0].bound.label}, {s.parts[0].operation}")
                  for s in report.path]
        yield path.slices("path", [path.track(0, "path")] * len(start), start,
                          np.array([s.length_ns for s in report.path], np.int64), labels)
        yield path.metadata()
    for rank in range(len(times.graphs)):
        process = TimelineProcess(tracks, 2 + rank, f"rank {times.number(rank)}")
        for step, taken in zip(times.windows, report.parts, strict=True):
            for window, parts in zip(step, taken, strict=True):
                if window.rank != rank:
                    continue
                yield process.slices("step", [process.track(0, "steps")], np.array([window.start_ns - base]),
                                     np.array([window.length_ns]), [json_text(window.name)])
                if not len(parts.part):  # a window of no length
                    continue
                cuts = np.concatenate([[0], np.flatnonzero(np.diff(parts.part)) + 1, [len(parts.part)]])
                first, edge = parts.edge_ns[cuts[:-1]], parts.edge_ns[cuts[1:]]
                yield process.slices("part", [process.track(1, "parts")] * len(first), first - base, edge - first,
                                     [json_text(names[code]) for code in parts.part[cuts[:-1]].tolist()])
        yield from _device(report, process, rank, base)
        yield process.metadata()
    yield from _groups(report, tracks, base)


def _device(report: JobReport, process: TimelineProcess, rank: int, base: int) -> Iterator[str]:
    """A rank's computation and its collectives, of the windows."""
    times = report.times
    kernels = _chosen(report, rank)
    kind = times.kinds[rank][kernels - int(times.program.kernel_ptr[rank])]
    graph = times.graphs[rank]
    for order, (name, of) in enumerate((("computation and copies", kind != KernelKind.COLLECTIVE),
                                        ("collectives", kind == KernelKind.COLLECTIVE))):
        rows = kernels[of]
        if len(rows):
            start, end = times.simulated.kernel_start[rows], times.simulated.kernel_end[rows]
            texts = [json_text(graph.string(code)) for code in graph.kernels.name[times.graph_row(rows)].tolist()]
            streams = graph.kernels.stream[times.graph_row(rows)].tolist()
            tracks = [process.track(2 + order, f"{name}, stream {stream}") for stream in streams]
            yield process.slices("kernel", tracks, start - base, end - start, texts)


def _groups(report: JobReport, tracks: Tracks, base: int) -> Iterator[str]:
    """Yield each communication group's meetings: until the last member arrived, and the transfer."""
    times, meet = report.times, report.meet
    program, simulated = times.program, times.simulated
    kernels = np.concatenate([_chosen(report, rank) for rank in range(len(times.graphs))] or [np.zeros(0, np.int64)])
    kernels = kernels[program.kernel_group[kernels] >= 0]
    kernels = kernels[np.lexsort((meet.ready[kernels], program.kernel_group[kernels]))]
    group, opens = np.unique(program.kernel_group[kernels], return_index=True)
    processes: dict[str, TimelineProcess] = {}
    members: dict[str, list[int]] = {}
    for number, at in zip(group.tolist(), opens.tolist(), strict=True):
        k = int(kernels[at])
        ranks = program.kernel_rank()[kernels[program.kernel_group[kernels] == number]]
        members.setdefault(f"ranks {', '.join(str(times.number(r)) for r in np.sort(ranks).tolist())}: "
                           f"{collective_name(times, k)}", []).append(k)
    for name, rows in members.items():
        process = processes.setdefault(name, TimelineProcess(tracks, 2 + len(times.graphs) + len(processes), name))
        first = np.array(rows, np.int64)
        late = simulated.group_last[program.kernel_group[first]]
        ready, met, end = meet.ready[first], meet.met[first], simulated.kernel_end[first]
        labels = [json_text(f"waiting for rank {times.number(r)}") for r in program.kernel_rank()[late].tolist()]
        yield process.slices("group", [process.track(0, "waiting")] * len(first), ready - base, met - ready, labels)
        yield process.slices("group", [process.track(1, "transfer")] * len(first), met - base, end - met,
                             [json_text("transfer")] * len(first))
        yield process.metadata()


def _chosen(report: JobReport, rank: int) -> Int64:
    """A rank's device work launched in the windows."""
    rows = [w.kernels for step in report.times.windows for w in step if w.rank == rank]
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)
