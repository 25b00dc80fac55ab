"""A CPU's traces as measurements: what each operation computed itself, shared among its calls.

Unlike a GPU's, whose kernels are one call each, many operations of a CPU are several calls in one time: a convolution's
gradients of its input and its weights. Their formulas' shares of it are theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kernel_models.datasets.samples import Samples
from kernel_models.device import DeviceSpec
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_of
from tracer.arrays import Float64, Int64
from tracer.graph import ExecutionGraph


@dataclass(frozen=True, slots=True)
class HostWork:
    """What operations of one recorded step computed on the host.

    Attributes:
        op: rows of ``graph.ops`` [n].
        ns: without waits and the profiler's own cost [n].
    """

    op: Int64
    ns: Float64


def host_samples(graph: ExecutionGraph, work: HostWork, spec: DeviceSpec) -> Iterator[Samples]:
    """Return samples of every family, of the calls whose sizes were recorded.

    Args:
        graph: of a step that computes on the host.
        work: of its operations.
        spec: the CPU as a device.
    """
    ops = graph.ops
    known: dict[tuple[int, ...], tuple[tuple[OpCall, ...], Float64]] = {}
    calls: dict[str, list[OpCall]] = {}
    times: dict[str, list[float]] = {}
    for row, us in zip(work.op.tolist(), (work.ns / 1e3).tolist(), strict=True):
        alike = tuple(int(column[row]) for column in (ops.name, ops.shapes, ops.dtypes, ops.strides, ops.scalars))
        if alike not in known:
            made = calls_of(Operation.from_graph(graph, row))
            known[alike] = made, _shares(made, spec)
        made, shares = known[alike]
        if us <= 0 or any("unsized" in call.flags for call in made):
            continue
        for call, share in zip(made, shares.tolist(), strict=True):
            calls.setdefault(call.family.value, []).append(call)
            times.setdefault(call.family.value, []).append(us * share)
    software = f"torch {graph.meta.torch_version}" if graph.meta.torch_version else "torch"
    for family, mine in calls.items():
        yield Samples(spec.name, software, graph.meta.source, mine, np.array(times[family]),
                      {"shape": ["x".join(map(str, call.dims)) for call in mine]}).aggregated()


def _shares(calls: Sequence[OpCall], spec: DeviceSpec) -> Float64:
    """Return what of an operation's time each of its calls took, by the formulas."""
    if len(calls) < 2:
        return np.ones(len(calls))
    us = np.array([float(RooflineModel(call.family, spec).predict([call]).time_us[0]) for call in calls])
    return us / us.sum()
