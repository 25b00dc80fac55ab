"""Traces as measurements: kernels of one call with recorded sizes, and on a CPU the computing time of each operation.

An operation of several calls (a layer norm's gradient, a fused optimizer) has one time for all of them. On a GPU such
operations are left out, since the time of each call is unknown, and so are those known by kernel name only. On a CPU
many operations are several calls, as a convolution's gradients: each gets its formula's share of the time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kernel_models.datasets.samples import Samples, by_family
from kernel_models.device import DeviceError, DeviceSpec, device, resolve_device
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_of
from kernel_models.trace_calls import Basis, TraceCalls, graph_calls
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import ExecutionGraph
from tracer.job import Job
from tracer.shape_only.devices import CPU


@dataclass(frozen=True, slots=True)
class HostWork:
    """Computing time of the operations of one recorded step on the host.

    Attributes:
        op: rows of ``graph.ops`` [n].
        ns: time without waits and the profiler's own cost, ns [n].
    """

    op: Int64
    ns: Float64


def host_samples(graph: ExecutionGraph, work: HostWork, spec: DeviceSpec) -> Iterator[Samples]:
    """Return samples of every family, from the calls whose sizes were recorded.

    Args:
        graph: a step that computes on the host.
        work: the computing time of its operations.
        spec: the CPU as a device.
    """
    ops = graph.ops
    known: dict[tuple[int, ...], tuple[tuple[OpCall, ...], Float64]] = {}
    calls: list[OpCall] = []
    times: list[float] = []
    for row, us in zip(work.op.tolist(), (work.ns / 1e3).tolist(), strict=True):
        alike = tuple(int(column[row]) for column in (ops.name, ops.shapes, ops.dtypes, ops.strides, ops.scalars))
        if alike not in known:
            made = calls_of(Operation.from_graph(graph, row))
            known[alike] = made, _shares(made, spec)
        made, shares = known[alike]
        if us > 0 and not any("unsized" in call.flags for call in made):
            calls += made
            times += [us * share for share in shares.tolist()]
    yield from _samples(graph, spec, calls, times)


def _samples(graph: ExecutionGraph, spec: DeviceSpec, calls: Sequence[OpCall], us: Sequence[float]) \
        -> Iterator[Samples]:
    software = f"torch {graph.meta.torch_version}" if graph.meta.torch_version else "torch"
    for found in by_family(spec.name, software, graph.meta.source, calls, us):
        yield found.aggregated()


def _shares(calls: Sequence[OpCall], spec: DeviceSpec) -> Float64:
    """Return the share of an operation's time that each of its calls took, by the formulas."""
    if len(calls) < 2:
        return np.ones(len(calls))
    us = np.array([float(RooflineModel(call.family, spec).predict([call]).time_us[0]) for call in calls])
    return us / us.sum()


LEAST_US = 0.3
"""Shortest kernel used, µs: shorter times are below the profilers' resolution."""
_TOLD_FROM, _FAMILY_FROM = 0.001, 0.01
"""Least shares of the GPU time for which a note names a reason, and a family."""


def read_job_samples(
    job: Job, notes: list[str] | None = None, spec: DeviceSpec | None = None,
    host_work: Callable[[ExecutionGraph], HostWork] | None = None,
) -> Iterator[Samples]:
    """Yield the samples of every family, device and software in a job's graphs; the shape group is the sizes.

    Graphs without a known device are left out (see ``devices_of`` for the error).

    Args:
        job: The recorded job.
        notes: Receives a sentence for each graph: how much of its GPU time is usable, and why the rest is not.
        spec: The wanted device; graphs of other devices are left out. A CPU's trace does not name its CPU: it is taken
            for the wanted one, or ``cpu``.
        host_work: Returns the computing time of the operations of a CPU's trace; without it such graphs are left out.
    """
    told = [] if notes is None else notes
    for graph in job.graphs:
        name = os.path.basename(graph.meta.source) + (f", rank {graph.meta.rank}" if len(job.graphs) > 1 else "")
        if graph.meta.loss.truncated_bytes:
            told += [f"{name}: {note}" for note in graph.meta.loss.notes[:1]]
        if graph.computes_on_host and host_work is not None and (spec is None or spec.vendor == "host"):
            found_here = list(host_samples(graph, host_work(graph), spec or device(CPU)))
            if not found_here:
                told.append(f"{name}: nothing was used, no operation's sizes were recorded (profile with "
                            "record_shapes=True).")
            yield from found_here
            continue
        try:
            own = resolve_device(graph.meta.device, graph.meta.device_memory_bytes, graph.meta.sm_count)
        except DeviceError:
            told.append(f"{name}: nothing was used, its device ({graph.meta.device or 'without a name'}) is not known.")
            continue
        if spec is not None and own.name != spec.name:
            told.append(f"{name}: nothing was used, it is of another device ({own.name}).")
            continue
        found = graph_calls(graph)
        single = (np.diff(found.call_offset) == 1) & (found.basis != Basis.NAME)
        used = single & (found.time_ns >= LEAST_US * 1e3)
        told += _told(name, found, used)
        rows = np.flatnonzero(used)
        calls = [found.calls[i] for i in found.call_index[found.call_offset[rows]].tolist()]
        yield from _samples(graph, own, calls, (found.time_ns[rows] / 1e3).tolist())


def _told(name: str, found: TraceCalls, used: Bool) -> Iterator[str]:
    """Yield sentences on a trace's usable GPU time, with the families of the most time."""
    total = int(found.time_ns.sum()) + found.collective_ns
    if not total:
        return
    unsized = ~used & (found.basis == Basis.NAME)
    several = ~used & ~unsized & (np.diff(found.call_offset) != 1)
    lost = ("belongs to no operation with recorded sizes" if (found.basis == Basis.SHAPES).any() else
            "has no recorded sizes (profile with record_shapes=True)")
    why = [(int(found.time_ns[unsized].sum()), lost),
           (int(found.time_ns[several].sum()), "is of operations of several kinds of kernels, which share one time"),
           (found.collective_ns, "is of collectives"),
           (int(found.time_ns[~used & ~unsized & ~several].sum()), f"is of kernels shorter than {LEAST_US} µs")]
    reasons = [f"{_percent(time / total)} {reason}" for time, reason in why if time >= _TOLD_FROM * total]
    usable, every = found.time_by_family(used), found.time_by_family()
    shares = [f"{family.value} {_percent(usable.get(family, 0) / time)} of {time / 1e6:.3g} ms"
              for family, time in every.items() if time >= _FAMILY_FROM * total]
    yield (f"{name}: {_percent(sum(usable.values()) / total)} of {total / 1e6:.4g} ms GPU time was used"
           + (f"; {', '.join(reasons)}" if reasons else "") + f". Used by family: {', '.join(shares)}.")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or not share else "<1%"


def devices_of(jobs: Sequence[Job]) -> list[str]:
    """Return the names that the graphs give for their devices, for an error."""
    return sorted({"a CPU" if graph.computes_on_host else graph.meta.device or "no name"
                   for job in jobs for graph in job.graphs})
