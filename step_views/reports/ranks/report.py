"""``rank_report``: parts of the step, communication, stragglers and critical path of a job of several ranks.

``rank_events``: that report as a timeline: a track for each rank's parts, for each group's meetings, and for the path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from graph_predictor.comm.recorded_calls import on_host, with_host_collectives
from graph_predictor.comm.report import Traffic, communication_report
from graph_predictor.prediction.replay import Replay, replay
from graph_predictor.prediction.result import which_times
from step_views.reports.ranks.stragglers import (
    Arrivals,
    Late,
    Stretch,
    arrivals,
    collective_name,
    job_path,
    late_rank,
    like_the_median,
)
from step_views.reports.ranks.times import (
    JobTimes,
    Meetings,
    RankPart,
    RankParts,
    Window,
    meetings,
    parts_of,
    recorded_times,
)
from step_views.reports.timeline import TimelineProcess, Tracks, json_text
from tracer.arrays import Int64
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph, KernelKind
from tracer.job import Job
from tracer.lazy import pandas as pd
from tracer.shown import Chart, ChartSeries, Shown

BEGIN_TOGETHER = 0.05
"""Ranks that begin their steps further apart than this share of a step are reported."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """Times of one rank, summed over ``steps`` steps (ns).

    ``busy_ns``, ``exposed_ns``, ``waiting_ns``, ``bubble_ns`` and ``idle_ns`` add up to ``step_ns``; see ``parts``.
    ``overlapped_ns`` is part of the busy time. ``late_ns`` is how much later than the first rank this one began its
    recorded steps. ``like_median_ns`` is the time of one step of the job if this rank had the median rank's device and
    host work; ``None`` if that was not tried.
    """

    rank: int
    steps: int
    step_ns: int
    busy_ns: int
    exposed_ns: int
    waiting_ns: int
    bubble_ns: int
    idle_ns: int
    overlapped_ns: int
    late_ns: int
    arrivals: Arrivals
    like_median_ns: float | None

    def to_json(self, job_ns: float) -> dict[str, Any]:
        """Plain values, microseconds a step."""
        times = {name: getattr(self, f"{name}_ns") / self.steps / 1e3
                 for name in ("step", "busy", "exposed", "waiting", "bubble", "idle", "overlapped", "late")}
        one, like = self.arrivals, self.like_median_ns
        return {"rank": self.rank, **{f"{name}_us": value for name, value in times.items()},
                "collectives": one.met / self.steps, "arrives_last": one.last / one.met if one.met else None,
                "holds_others_us": one.held_ns / self.steps / 1e3,
                "others_waited_us": one.others_waited_ns / self.steps / 1e3,
                "job_step_like_median_us": None if like is None else like / 1e3,
                "gain_like_median": None if like is None or not job_ns else 1.0 - like / job_ns}


@dataclass(frozen=True, slots=True, repr=False)
class JobReport(Shown):
    """Report on a job of several ranks.

    Attributes:
        times: the times that the report is computed from.
        step_ns: the job's step time (``JobTimes.step_ns``).
        ranks: one row for each rank.
        groups: collectives by process group and kind over all windows, as in ``foretrace comm report``.
        path: critical path of the step of median length; ``path_step`` is this step's name.
        parts: for each step, the parts of each of its windows.
        meet: when ranks met in collectives.
        notes: remarks for the reader.
    """

    times: JobTimes
    step_ns: float
    ranks: list[RankRow]
    groups: list[Traffic]
    path: list[Stretch]
    path_step: str
    parts: list[list[RankParts]] = field(repr=False)
    meet: Meetings = field(repr=False)
    notes: list[str]
    late: Late | None = None
    """The rank that others wait for because it computes longer; only if by more than steps differ."""

    def headline(self) -> str:
        """Return the job's step time and the imbalance of its ranks in one line."""
        late = "" if self.late is None else f"; rank {self.times.number(self.late.rank)} computes longer"
        return (f"{len(self.ranks)} ranks, step {self.step_ns / 1e6:,.3f} ms, the busiest "
                f"{self.imbalance['busy'] - 1.0:.0%} above the mean{late}")

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return ``ranks``: each rank's step by part, µs a step; ``groups``: collectives by process group and kind."""
        found = self.to_json()
        return {"ranks": lambda: pd.DataFrame(found["ranks"]), "groups": lambda: pd.DataFrame(found["groups"])}

    def chart(self) -> Chart:
        """Return a bar chart of each rank's step by part."""
        rows = [row.to_json(self.step_ns) for row in self.ranks]
        parts = ("busy", "exposed", "waiting", "bubble", "idle")
        return Chart("bars", self.headline(), [f"rank {row['rank']}" for row in rows], [
            ChartSeries(part, [row[f"{part}_us"] / 1e3 for row in rows]) for part in parts
            if any(row[f"{part}_us"] for row in rows)], "ms a step")

    @property
    def shows_meetings(self) -> bool:
        """Whether meetings of ranks were recorded, as device work of collectives or ranges of a backend's threads."""
        return any((kinds == KernelKind.COLLECTIVE).any() for kinds in self.times.kinds)

    @property
    def steps(self) -> int:
        """Number of steps over which times are summed."""
        return len(self.times.windows) * self.times.steps

    @property
    def imbalance(self) -> dict[str, float]:
        """Largest over mean value of the ranks, for step, busy time, and own time (busy and idle)."""
        columns = {"step": [r.step_ns for r in self.ranks], "busy": [r.busy_ns for r in self.ranks],
                   "own": [r.busy_ns + r.idle_ns for r in self.ranks]}
        return {name: max(ns) / (sum(ns) / len(ns)) if sum(ns) else 1.0 for name, ns in columns.items()}

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """Return plain values for JSON, microseconds a step; the path's first ``top`` stretches, by default all."""
        total = sum(stretch.length_ns for stretch in self.path) or 1
        steps = self.steps
        return {
            "times": which_times(self.times.profiled, ran=self.times.ran),
            "recorded": None if self.times.recorded is None else self.times.recorded.to_json(),
            "step_time_us" if self.times.predicted else "replayed_step_us": self.step_ns / 1e3,
            "steps": steps, "predicted": self.times.predicted,
            "edits": list(self.times.edits), "imbalance": self.imbalance,
            "ranks": [row.to_json(self.step_ns) for row in self.ranks], "meetings_known": self.shows_meetings,
            "late_rank": None if self.late is None else {
                "rank": self.times.number(self.late.rank), "more_us": self.late.more_ns / 1e3,
                "steps": self.late.steps, "computes_longer": [
                    {"operation": name, "more_us": ns / 1e3} for name, ns in self.late.operations]},
            "groups": [{**row.to_json(), "waiting_us": waiting_ns(row, None), "steps": steps} for row in self.groups],
            "path_across_ranks": {"step": self.path_step, "stretches": [
                {"rank": self.times.number(s.rank), "start_us": s.start_ns / 1e3, "time_us": s.length_ns / 1e3,
                 "share": s.length_ns / total, "after": s.after or None,
                 "parts": [{"operation": p.operation, "bound": p.bound.label, "time_us": p.time_ns / 1e3}
                           for p in s.parts]} for s in self.path[:top]]},
            "notes": list(dict.fromkeys(self.notes)),
        }


def waiting_ns(row: Traffic, unknown: Any) -> Any:
    """Return a rank's mean wait for the last rank in a group's collectives, µs in all; ``unknown`` if not all met."""
    if not row.matched or row.matched * row.ranks != row.count:
        return unknown
    return (row.kernel_ns - row.transfer_ns) / 1e3


def rank_report(times: JobTimes) -> JobReport:
    """Report on all ranks of a job. Raises ``ForetraceError`` if the job has only one rank."""
    world = max([len(times.graphs), *(graph.meta.world_size for graph in times.graphs)])
    if world < 2:
        raise ForetraceError("There is one rank only, so there is nothing to compare: give the traces of all ranks of "
                             "a job, spread the step with --parallel, or look at one rank with foretrace breakdown.")
    meet = meetings(times)
    parts = [[parts_of(times, meet, window) for window in step] for step in times.windows]
    found = arrivals(times, meet)
    like = like_the_median(times, found)
    steps = len(times.windows) * times.steps
    rows = []
    for rank in range(len(times.graphs)):
        own = [(w, p) for step, taken in zip(times.windows, parts, strict=True)
               for w, p in zip(step, taken, strict=True) if w.rank == rank]
        sums = {part: sum(p.ns(part) for _, p in own) for part in RankPart}
        rows.append(RankRow(
            times.number(rank), steps, sum(w.length_ns for w, _ in own), sums[RankPart.BUSY], sums[RankPart.EXPOSED],
            sums[RankPart.WAITING], sums[RankPart.BUBBLE], sums[RankPart.IDLE], sum(p.overlapped_ns for _, p in own),
            0 if times.predicted else sum(w.start_ns - min(o.start_ns for o in step) for step in times.windows
                                          for w in step if w.rank == rank),
            found[rank], like.get(rank)))
    chosen = median_step(times.windows)
    return JobReport(
        times, times.step_ns, rows, _traffic(times), job_path(times, chosen) if chosen else [],
        chosen[0].name if chosen else "", parts, meet,
        list(dict.fromkeys([*times.notes, *_lacking(times, meet, world), *_apart(rows, times.step_ns)])),
        late_rank(times, found))


def _traffic(times: JobTimes) -> list[Traffic]:
    """Return collectives by group and kind. Predicted sends do not wait for receives, so their meetings are removed."""
    found = communication_report(timed_graphs(times)).traffic
    return [replace(row, matched=0, matched_bytes=0.0, transfer_ns=0, skew_ns=[], last={})
            if times.predicted and row.kind == "send_recv" else row for row in found]


def timed_graphs(times: JobTimes) -> list[ExecutionGraph]:
    """Return the ranks' graphs with only the device work inside the windows, at its simulated times."""
    base = min((w.start_ns for step in times.windows for w in step), default=0)
    made = []
    for rank, graph in enumerate(times.graphs):
        kernels = np.concatenate([w.kernels for step in times.windows for w in step if w.rank == rank]
                                 or [np.zeros(0, np.int64)])
        rows = times.graph_row(kernels)
        table = graph.kernels.take(rows)
        table.start_ns[:] = times.simulated.kernel_start[kernels] - base
        table.duration_ns[:] = times.simulated.kernel_end[kernels] - times.simulated.kernel_start[kernels]
        place = np.full(len(graph.kernels) + 1, -1, np.int64)
        place[rows] = np.arange(len(rows))
        met = graph.collectives.take(np.flatnonzero(place[graph.collectives.kernel] >= 0))
        met.kernel[:] = place[met.kernel]
        calls = graph.launches.take(np.arange(len(graph.launches)))
        calls.start_ns += times.built.clock_ns[rank] - base
        made.append(replace(graph, kernels=table, launches=calls, collectives=met,
                            meta=replace(graph.meta, base_time_ns=0)))
    return made


def median_step(windows: list[list[Window]]) -> list[Window]:
    """Return the step of median length (the lower one of two), judged by its longest window."""
    ordered = sorted(windows, key=lambda step: max(w.length_ns for w in step))
    return ordered[(len(ordered) - 1) // 2] if ordered else []


def _apart(rows: list[RankRow], step_ns: float) -> list[str]:
    """Return a note if ranks begin their recorded steps at different times."""
    latest = max(rows, key=lambda row: row.late_ns)
    late_ns = latest.late_ns / max(latest.steps, 1)
    if late_ns <= BEGIN_TOGETHER * step_ns:
        return []
    return [f"The ranks begin their recorded steps up to {late_ns / 1e6:,.3f} ms apart (rank {latest.rank} last): that "
            "much of the others' waiting is not of these steps' making, and more work or less would not change it."]


def _lacking(times: JobTimes, meet: Meetings, world: int) -> list[str]:
    """Return notes on facts that the recording does not show."""
    notes = []
    known = len(times.graphs)
    kinds = np.concatenate(times.kinds) if times.kinds else np.zeros(0, np.int8)
    if known == 1:
        notes.append(f"Only rank {times.number(0)} of {world:,} is known: what it waits for others is part of its "
                     "exposed communication, and who came late is not known; give the traces of the other ranks.")
    if not (kinds == KernelKind.COLLECTIVE).any():
        notes.append("No collective left device work or ranges of a backend's threads, so that nothing shows where "
                     "ranks met: waiting and exposed communication are not known, and are part of busy time.")
    elif known > 1 and not len(times.program.group_size) and not (times.predicted and meet.point_to_point.any()):
        notes.append("No collective could be matched over the ranks: waiting for others is part of exposed "
                     "communication.")
    return notes


HOST_CLOCK = ("The collectives ran on the hosts' threads (gloo): when ranks met was recorded under the profiler, and "
              "is shown on that clock.")


def replayed_ranks(job: Job, step: str | None = None, *, profiled: bool = False,
                   known: Replay | None = None) -> tuple[JobTimes, list[str]]:
    """Replay a recorded job so that its ranks can be compared. ``step`` is as in ``breakdown``. ``known`` is an
    existing replay of the job's graphs, which is used if no collective ran on a host. Raises ``ForetraceError`` if
    there is nothing to replay, or no such step.

    Returns:
        The times, and notes on them.
    """
    graphs = [with_host_collectives(graph) for graph in job.graphs]
    # A host's collectives end when the scheduler lets them, which only the recording shows.
    host = any(map(on_host, graphs))
    if known is not None and not host:
        return recorded_times(known, step), []
    found = recorded_times(replay(graphs, residuals=host, profiled=profiled or host), step)
    return found, [HOST_CLOCK] if host and not profiled else []


def rank_events(report: JobReport) -> Iterator[str]:
    """Yield the report's timeline as blocks of events; times count from the begin of the earliest window."""
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
                if not len(parts.part):  # the window has no length
                    continue
                cuts = np.concatenate([[0], np.flatnonzero(np.diff(parts.part)) + 1, [len(parts.part)]])
                first, edge = parts.edge_ns[cuts[:-1]], parts.edge_ns[cuts[1:]]
                yield process.slices("part", [process.track(1, "parts")] * len(first), first - base, edge - first,
                                     [json_text(names[code]) for code in parts.part[cuts[:-1]].tolist()])
        yield from _device_tracks(report, process, rank, base)
        yield process.metadata()
    yield from _group_tracks(report, tracks, base)


def _device_tracks(report: JobReport, process: TimelineProcess, rank: int, base: int) -> Iterator[str]:
    """Yield tracks of a rank's computation and of its collectives in the windows."""
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


def _group_tracks(report: JobReport, tracks: Tracks, base: int) -> Iterator[str]:
    """Yield tracks of each group's meetings: waiting until the last member arrives, then the transfer."""
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
    """Return the device work of a rank that was launched in the windows."""
    rows = [w.kernels for step in report.times.windows for w in step if w.rank == rank]
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)
