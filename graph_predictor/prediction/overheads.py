"""Host overheads of recorded jobs: all ranks' segments without waiting, and the cost of each kind of overhead a step.

The simulator's program defines waiting: blocked calls, waits for the autograd thread and for data. On a CPU the
operations are the "kernels", so their computation is not counted either. The rest is the cost that a host would still
pay if the operations ran on a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graph_predictor.prediction.operation_costs import computing_operations
from graph_predictor.recorded.facts import check_device_work
from graph_predictor.simulation.build import build_program
from graph_predictor.simulation.host_slices import exclusive_time, waits
from kernel_models.host.overheads import (
    ANY,
    Distribution,
    HostOverheads,
    HostRatio,
    Recorded,
    compare_hosts,
    fit_overheads,
    profiler_event_ns,
    record,
)
from kernel_models.host.segments import HostIntervals, LaunchConstants, Overhead
from tracer.graph import ExecutionGraph, KernelKind
from tracer.job import Job


@dataclass(frozen=True, slots=True)
class KindRow:
    """One kind of host time: events and time (ns) a step and rank, an event's quantiles (ns), share of host time."""

    kind: Overhead
    events: float
    step_ns: float
    quantiles_ns: tuple[float, ...]
    share: float


@dataclass(frozen=True, slots=True)
class OperationRow:
    """Host time of one top-level operation by kind (T1 to T5).

    Attributes:
        name: name of the operation; its T1 is the time before it.
        kinds: a distribution of each kind that it has.
        step_ns: time of all kinds, a step and rank.
        shared_ns: ``step_ns`` if each event took the mean of its kind over all operations ("shared overheads").
    """

    name: str
    kinds: dict[Overhead, Distribution]
    step_ns: float
    shared_ns: float

    @staticmethod
    def host_kinds() -> list[Overhead]:
        """Return the kinds that an operation can have, in the order of Lin et al."""
        return [kind for kind in Overhead if kind != Overhead.DATA]


@dataclass(slots=True)
class JobOverheads:
    """Overheads of a job's steps.

    Attributes:
        overheads: fitted on all steps of all ranks.
        kinds: a row for every kind that occurs.
        steps: total number of steps of all ranks.
        host_ns: mean host time a step and rank, without waiting, stalls and computation on a CPU.
        step_ns: mean recorded step.
        stalls: pauses that belong to no operation: their number, and their time a step and rank (ns).
        computation_ns: a CPU's own computation a step, which is subtracted; zero where a GPU computes.
        profiler_event_ns: the profiler's cost of an event, which is subtracted; ``None`` where not measured.
        constants: launch latencies and gaps of the first rank.
    """

    overheads: HostOverheads
    kinds: list[KindRow]
    steps: int
    host_ns: float
    step_ns: float
    stalls: tuple[int, float]
    computation_ns: float
    profiler_event_ns: float | None
    constants: LaunchConstants
    notes: list[str] = field(default_factory=list)

    def largest(self, kind: Overhead, top: int) -> list[tuple[str, int, float, float]]:
        """Return (name, samples, mean ns, total ns) of the operations (or calls) with the most time of a kind."""
        rows = []
        for (code, op, detail), found in self.overheads.table.items():
            pooled = op == ANY and detail != ANY if kind == Overhead.CALL else op != ANY and detail == ANY
            if code == kind and pooled:
                rows.append((detail if kind == Overhead.CALL else op, found.count, found.mean_ns, found.total_ns))
        return sorted(rows, key=lambda row: -row[3])[:top]

    def operations(self, top: int) -> list[OperationRow]:
        """Return the operations with the most host time, most first."""
        kinds: dict[str, dict[Overhead, Distribution]] = {}
        for (code, op, detail), found in self.overheads.table.items():
            if op not in (ANY, "") and detail == ANY:
                kinds.setdefault(op, {})[Overhead(code)] = found
        shared = {kind: self.overheads.table[kind, ANY, ANY].mean_ns for kind in Overhead
                  if (kind, ANY, ANY) in self.overheads.table}
        rows = [OperationRow(name, mine, sum(d.total_ns for d in mine.values()) / self.steps,
                             sum(d.count * shared[kind] for kind, d in mine.items()) / self.steps)
                for name, mine in kinds.items()]
        return sorted(rows, key=lambda row: -row.step_ns)[:top]

    def to_json(self, top: int) -> dict[str, Any]:
        """Return plain values, times in microseconds."""
        return {
            "steps": self.steps, "host_us": self.host_ns / 1e3, "step_us": self.step_ns / 1e3,
            "stalls": {"count": self.stalls[0], "us_per_step": self.stalls[1] / 1e3},
            "computation_us": self.computation_ns / 1e3,
            "profiler_event_us": None if self.profiler_event_ns is None else self.profiler_event_ns / 1e3,
            "launch_latency_us": None if not self.constants.samples else {
                "empty_stream": int(self.constants.latency[KernelKind.COMPUTE]) / 1e3,
                "busy_stream_gap": int(self.constants.gap[0, 0, 0]) / 1e3},
            "kinds": {row.kind.name.lower(): {
                "events_per_step": row.events, "us_per_step": row.step_ns / 1e3, "share": row.share,
                "share_of_step": row.step_ns / self.step_ns if self.step_ns else None,
                "quantiles_us": [q / 1e3 for q in row.quantiles_ns],
                "largest": [{"name": name, "count": n, "mean_us": mean / 1e3, "total_us": total / 1e3}
                            for name, n, mean, total in self.largest(row.kind, top)]} for row in self.kinds},
            "operations": [{
                "name": row.name, "us_per_step": row.step_ns / 1e3, "shared_us_per_step": row.shared_ns / 1e3,
                "kinds": {kind.name.lower(): {"count": d.count, "mean_us": d.mean_ns / 1e3,
                                              "quantiles_us": [q / 1e3 for q in d.quantiles_ns]}
                          for kind, d in row.kinds.items()}} for row in self.operations(top)],
            "notes": self.notes,
        }


def recorded_overheads(graph: ExecutionGraph, *, profiled: bool = False) -> tuple[Recorded, float | None]:
    """Return one rank's segments without waiting, and the profiler's cost of an event (ns), subtracted by default."""
    waiting, computing = waiting_intervals(graph), _computing(graph)
    excluded = HostIntervals(*(np.concatenate([getattr(waiting, name), getattr(computing, name)])
                               for name in ("thread", "start_ns", "end_ns")))
    recorded = record(graph, excluded)
    event_ns = profiler_event_ns(graph, recorded)
    if event_ns and not profiled:
        recorded = recorded.without_profiler(event_ns)
    return recorded, event_ns


def measure_overheads(job: Job) -> JobOverheads:
    """Return the overheads of all steps of a job's ranks.

    Raises:
        ForetraceError: no rank has host time inside steps, or a device's work is unknown.
    """
    check_device_work(job.graphs)
    parts, totals, notes = [], [], []
    stalled, stall_ns, computation, events = 0, 0.0, 0.0, None
    for graph in job.graphs:
        recorded, events = recorded_overheads(graph)
        inside = recorded.segments.step >= 0
        if not inside.any():
            notes.append(f"Rank {graph.meta.rank} has no steps: its host time is not counted.")
            continue
        stalls = recorded.stalls() & inside
        stalled, stall_ns = stalled + int(stalls.sum()), stall_ns + float(recorded.segments.duration_ns[stalls].sum())
        computing = _computing(graph)
        computation += float((computing.end_ns - computing.start_ns).sum())
        kept = recorded.take(inside & ~stalls)
        parts.append(kept)
        totals.append((kept, graph.steps.duration_ns))
    overheads = fit_overheads(parts, _host(job))
    steps = sum(len(durations) for _, durations in totals)
    host = float(sum(part.segments.duration_ns.sum() for part in parts)) / steps
    return JobOverheads(
        overheads, _kinds(overheads, steps), steps, host,
        float(np.concatenate([durations for _, durations in totals]).mean()), (stalled, stall_ns / steps),
        computation / steps, events, build_program([job.graphs[0]]).reports[0].constants, [*job.notes, *notes])


def compare(first: JobOverheads, second: JobOverheads) -> dict[Overhead | None, HostRatio]:
    """Return the ratios of two jobs' host overheads, see ``compare_hosts``."""
    return compare_hosts(first.overheads, second.overheads)


def waiting_intervals(graph: ExecutionGraph) -> HostIntervals:
    """Return the times in which the host's threads wait, by the simulator's program."""
    built = build_program([graph])
    found = waits(built.program, 0, built.thread_number, built.clock_ns[0])
    return HostIntervals(found.thread, found.start_ns, found.end_ns)


def _kinds(overheads: HostOverheads, steps: int) -> list[KindRow]:
    found = [(kind, overheads.table[kind, ANY, ANY]) for kind in Overhead if (kind, ANY, ANY) in overheads.table]
    total = sum(d.total_ns for _, d in found) or 1.0
    return [KindRow(kind, d.count / steps, d.total_ns / steps, d.quantiles_ns, d.total_ns / total) for kind, d in found]


def _host(job: Job) -> dict[str, Any]:
    meta = job.graphs[0].meta
    return {"source": meta.source, "torch": meta.torch_version, "device": meta.device, **meta.versions}


def _computing(graph: ExecutionGraph) -> HostIntervals:
    """Return the own time of operations that compute on a CPU; empty if device work was recorded."""
    if not graph.computes_on_host:
        return HostIntervals(*(np.zeros(0, np.int64) for _ in range(3)))
    own = exclusive_time(graph)
    computes = computing_operations(graph)[own.op]
    return HostIntervals(own.thread[computes], own.start_ns[computes], own.end_ns[computes])
