"""Measurements of a capture: step times, device time, memory, and the counts that are the same each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from graph_predictor.check.captures import StoredCapture
from graph_predictor.comm.report import communication_report
from graph_predictor.recorded.gpu_active import step_active_ns
from tracer.graph import HOST_READ, LAUNCHING, ExecutionGraph, KernelKind, LaunchKind, OpKind
from tracer.job import Job

Number = Annotated[int, msgspec.Meta(ge=0)]
"""A number of calls, bytes or nanoseconds."""
Times = Annotated[list[Annotated[int, msgspec.Meta(gt=0)]], msgspec.Meta(min_length=1)]
"""Times of steps, ns."""


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine and software of a recording; empty strings and zeros where a capture does not say."""

    device: str = ""
    cpu: str = ""
    cores: int = 0
    threads: int = 0
    world_size: int = 1
    torch: str = ""

    def other_machine(self, other: Environment) -> str:
        """Return what makes times incomparable, in words; empty if nothing does."""
        names = ("device", "cpu", "cores", "threads", "world_size")
        unlike = [f"{name.replace('_', ' ')} {getattr(self, name)} → {getattr(other, name)}" for name in names
                  if getattr(self, name) and getattr(other, name) and getattr(self, name) != getattr(other, name)]
        return ", ".join(unlike)


class Count(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number a step: of the typical step, whether more than half of the window's steps have it, and the most."""

    typical: Number
    steady: bool
    most: Number


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One capture's measurements, nanoseconds and bytes.

    Attributes:
        recorded: its date.
        step_ns: steps with nothing watching; without those, under the profiler (``profiled``).
        profiled_ns: the window's steps, under the profiler.
        gpu_active_ns: of each profiled step, time in which device work other than collectives ran; empty without any.
        peak_device_bytes: most memory allocated on the device, 0 where unknown.
        peak_host_bytes: most resident memory of the process, 0 where unknown.
    """

    recorded: str
    step_ns: Times
    profiled: bool
    profiled_ns: Times
    gpu_active_ns: list[Number]
    peak_device_bytes: Number
    peak_host_bytes: Number


COUNTS = ("operations", "host_reads", "launches", "kernels", "blocking_syncs", "collectives", "communicated_bytes")
"""The counts: for a step of all recorded ranks together, but bytes for the mean rank."""


@dataclass(frozen=True, slots=True)
class MeasuredProgram:
    """All that is measured of a capture."""

    environment: Environment
    counts: dict[str, Count]
    run: Run


def measure(capture: StoredCapture) -> MeasuredProgram:
    """Measure a capture. Raises ``CheckError`` if nothing was recorded in it."""
    job = capture.job
    return MeasuredProgram(_environment(capture, job), count_steps(job.graphs), _run(capture, job))


def _environment(capture: StoredCapture, job: Job) -> Environment:
    context = capture.contexts[0] if capture.contexts else {}
    hardware = context.get("hardware") if isinstance(context.get("hardware"), dict) else {}
    meta = job.graphs[0].meta
    return Environment(
        device=meta.device or str((hardware or {}).get("device", "")), cpu=str((hardware or {}).get("cpu", "")),
        cores=_whole((hardware or {}).get("cores_usable", (hardware or {}).get("cores"))),
        threads=_whole(context.get("torch_threads")), world_size=max(job.world_size, 1), torch=meta.torch_version)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _run(capture: StoredCapture, job: Job) -> Run:
    timed = [graph.meta.unprofiled_step_ns for graph in job.graphs if graph.meta.unprofiled_step_ns]
    recorded = [graph.steps.duration_ns.tolist() for graph in job.graphs if len(graph.steps)]
    active = [_active(graph) for graph in job.graphs]
    memory = [each["peak_memory"] for each in capture.contexts if isinstance(each.get("peak_memory"), dict)]
    return Run(
        recorded=str(capture.contexts[0].get("recorded", "")) if capture.contexts else "",
        step_ns=_slowest(timed or recorded), profiled=not timed, profiled_ns=_slowest(recorded),
        gpu_active_ns=_slowest([each for each in active if each]),
        peak_device_bytes=max((_whole(each.get("allocated_bytes")) for each in memory), default=0),
        peak_host_bytes=max((_whole(each.get("host_bytes")) for each in memory), default=0))


def _active(graph: ExecutionGraph) -> list[int]:
    """Return for each step the ns in which device work that it launched ran, without collectives; empty without any."""
    return [step_active_ns(graph, step) for step in range(len(graph.steps))] if len(graph.kernels) else []


def _slowest(ranks: list[list[int]]) -> list[int]:
    """Return the slowest rank's time in each step where all made the same steps; else the times of the slowest rank."""
    if not ranks:
        return []
    if len({len(rank) for rank in ranks}) == 1:
        return [max(step) for step in zip(*ranks, strict=True)]
    return max(ranks, key=lambda rank: float(np.median(rank)))


def count_steps(graphs: list[ExecutionGraph]) -> dict[str, Count]:
    """``COUNTS`` of the ranks of a job, recorded or made up."""
    found = {name: _added([counter(graph) for graph in graphs]) for name, counter in _COUNTERS.items()}
    report = communication_report(graphs)
    ranks = max(len(graphs), 1)
    size = round(sum(row.payload_bytes for row in report.traffic) / ranks / max(report.steps, 1.0))
    found["communicated_bytes"] = Count(size, True, size)
    return found


def _added(ranks: list[np.ndarray]) -> Count:
    """Counts of the ranks' steps, added up; steps are taken in order."""
    most = max((len(rank) for rank in ranks), default=0)
    total = np.zeros(most, np.int64)
    for rank in ranks:
        if len(rank):
            # A rank with fewer steps repeats its last one: its steps are as many as the others'.
            total += np.concatenate([rank, np.full(most - len(rank), rank[-1], np.int64)])
    if not most:
        return Count(0, True, 0)
    typical = int(np.sort(total)[(most - 1) // 2])
    return Count(typical, 2 * int((total == typical).sum()) > most, int(total.max()))


def _per_step(graph: ExecutionGraph, step: np.ndarray) -> np.ndarray:
    steps = len(graph.steps)
    return np.bincount(step[(step >= 0) & (step < steps)], minlength=steps)


def _operations(graph: ExecutionGraph) -> np.ndarray:
    return _per_step(graph, graph.ops.step[graph.ops.kind == OpKind.OPERATION])


def _host_reads(graph: ExecutionGraph) -> np.ndarray:
    codes = [code for code, text in enumerate(graph.strings) if text == HOST_READ]
    return _per_step(graph, graph.ops.step[np.isin(graph.ops.name, codes)])


def _launches(graph: ExecutionGraph) -> np.ndarray:
    return _per_step(graph, graph.launches.step[np.isin(graph.launches.kind, LAUNCHING)])


def _kernels(graph: ExecutionGraph) -> np.ndarray:
    return _per_step(graph, graph.kernels.step[graph.kernels.kind != KernelKind.COLLECTIVE])


def _blocking(graph: ExecutionGraph) -> np.ndarray:
    return _per_step(graph, graph.launches.step[graph.launches.kind == LaunchKind.BLOCKING_SYNC])


def _collectives(graph: ExecutionGraph) -> np.ndarray:
    table = graph.collectives
    step = np.where(table.op >= 0, graph.ops.step[table.op] if len(graph.ops) else -1, -1)
    if len(graph.kernels):
        step = np.where((step < 0) & (table.kernel >= 0), graph.kernels.step[table.kernel], step)
    return _per_step(graph, step)


_COUNTERS = {"operations": _operations, "host_reads": _host_reads, "launches": _launches, "kernels": _kernels,
             "blocking_syncs": _blocking, "collectives": _collectives}
