"""``RecordedStep``: a recorded step of a job with embedding tables, taken apart into what a sharding changes and what
stays.

::

    GPU     |look-ups|..all-to-all..|dense|.all-to-all.|look-ups' gradients|      |   . collectives that nothing runs
    of it    forward     waited      dense    waited         backward        host     beside; host: nothing runs at all

On a CPU operations are the kernels: the own time of each, and host time is that in no operation. Table work beside the
look-ups themselves (a division of gradients, the optimizer's pass) is known by tensors that have the shape of a table
or of its sparse gradient, and belongs to the backward. What a collective's call takes of a CPU is part of the
collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from graph_predictor.comm.recorded_calls import with_host_collectives
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device import DeviceSpec
from kernel_models.op_call import Family
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import NONE, ExecutionGraph, KernelKind, Phase
from tracer.intervals import union_ns
from tracer.job import Job
from tracer.lookup_data.noted import BACKWARD, find_lookups
from tracer.trees import nearest

COLLECTIVE_NAMES = ("c10d::", "record_param_comms", "nccl:", "gloo:", "_c10d_functional::")
"""Begins of the names of operations that are collectives."""


class StepPart(IntEnum):
    """The part of a step that an operation belongs to."""

    DENSE_FORWARD = 0
    DENSE_BACKWARD = 1
    OPTIMIZER = 2
    LOOKUPS = 3
    GRADIENTS = 4
    COLLECTIVE = 5
    NOTHING = 6


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step of each rank, µs.

    Attributes:
        device: it ran on; ``None`` if nobody knows it.
        step: its length, without waiting for ranks that came later for other reasons than their work.
        parts: time in each ``StepPart`` [parts, ranks], at most one at a time.
        exchanged: all collectives' transfers, from when their last rank came.
        host: in which the device had nothing to do, and collectives took longer than their transfers.
    """

    device: DeviceSpec | None
    step: float
    parts: Float64
    exchanged: float
    host: float

    def mean(self, part: StepPart) -> float:
        """Return the mean of a part over the ranks, ms."""
        return float(self.parts[part].mean())


def recorded_step(job: Job) -> RecordedStep:
    """Take a recorded job's typical step apart. Raises ``ForetraceError`` where it has none."""
    found = baseline_of([with_host_collectives(graph) for graph in job.graphs])
    scenario = found.scenario
    on_host = scenario.built.computes_on_host
    steps, waited, host = [], [], []
    parts = np.zeros((len(StepPart), len(job.graphs)))
    for rank, graph in enumerate(scenario.built.graphs):
        part = np.append(parts_of(graph), StepPart.NOTHING)
        length = float(scenario.cycle.recorded_ns(rank).mean()) if scenario.profiled else float(found.measured_ns or 0)
        parts[:, rank], alone = (_of_host if on_host else _of_device)(found, rank, part, length)
        steps.append(length / 1e3)
        waited.append(alone)
        host.append(float(parts[StepPart.NOTHING, rank]))
    # The rank that waits least in collectives waits for no other.
    first = int(np.argmin(waited))
    exchanged = _transfers_us(found)
    return RecordedStep(scenario.devices.source, steps[first], parts, min(exchanged, waited[first]) if on_host
                        else exchanged, host[first] + max(waited[first] - exchanged, 0.0))


def parts_of(graph: ExecutionGraph) -> Int64:
    """The ``StepPart`` of every operation of a graph."""
    ops = graph.ops
    own = find_lookups(graph)
    found = np.full(len(ops), StepPart.DENSE_FORWARD, np.int64)
    found[ops.phase == Phase.BACKWARD] = StepPart.DENSE_BACKWARD
    found[ops.phase == Phase.OPTIMIZER] = StepPart.OPTIMIZER
    weights = [each for each in own if len(each.shape) == 2]
    tables = {each.shape for each in weights}
    # Sparse gradients have a row for each look-up; with one look-up a sample other tensors have as many.
    tables |= {(each.lookups, each.shape[1]) for each in weights if each.lookups > each.bags}
    shaped = _with_shapes(graph, tables) & (ops.phase != Phase.FORWARD)
    found[shaped] = StepPart.GRADIENTS
    rows = np.array([row for each in own for row, _ in each.rows], np.int64)
    known: Bool = np.zeros(len(ops), np.bool_)
    known[rows] = True
    around = nearest(ops.parent, known, np.arange(len(ops)))
    gradient = np.array([*(text in BACKWARD for text in graph.strings), False], np.bool_)[ops.name]
    inside = around >= 0
    found[inside] = np.where(gradient[around[inside]] | (ops.phase[inside] == Phase.BACKWARD), StepPart.GRADIENTS,
                             StepPart.LOOKUPS)
    named = np.array([*(text.startswith(COLLECTIVE_NAMES) for text in graph.strings), False], np.bool_)[ops.name]
    found[nearest(ops.parent, named, np.arange(len(ops))) >= 0] = StepPart.COLLECTIVE
    return found


def _with_shapes(graph: ExecutionGraph, shapes: set[tuple[int, ...]]) -> Bool:
    """Operations that have a tensor of one of these shapes among their arguments."""
    ops = graph.ops
    codes, of_code = np.unique(ops.shapes, return_inverse=True)
    first = np.zeros(len(codes), np.int64)
    first[of_code] = np.arange(len(ops))
    known = np.array([any(argument.shape is not None and tuple(argument.shape) in shapes
                          for argument in graph.arguments(int(row))) for row in first.tolist()], np.bool_)
    return known[of_code] if len(codes) else np.zeros(len(ops), np.bool_)


def _of_host(found: Baseline, rank: int, part: Int64, length_ns: float) -> tuple[Float64, float]:
    """Own time of each part, and what of the step is collectives, µs."""
    pieces, cycle = found.scenario.slices, found.scenario.cycle
    mine = (pieces.rank == rank) & cycle.working[pieces.item]
    ns = found.scenario.host_times()[mine]
    times = np.bincount(part[pieces.op[mine]], weights=ns, minlength=len(StepPart)) / cycle.steps / 1e3
    others = float(times.sum() - times[StepPart.COLLECTIVE])
    # Work is uncertain by what steps differ; the collectives' own calls are in the step at least.
    return times, max(length_ns / 1e3 - others, float(times[StepPart.COLLECTIVE]))


def _of_device(found: Baseline, rank: int, part: Int64, length_ns: float) -> tuple[Float64, float]:
    """Device time of each part, and what of the step collectives take alone, µs."""
    scenario, graph = found.scenario, found.built.graphs[rank]
    low, high = (int(end) for end in scenario.built.program.kernel_ptr[rank:rank + 2])
    rows = np.flatnonzero(scenario.cycle.kernel[low:high])
    kernels = graph.kernels
    start, end = kernels.start_ns[rows], kernels.start_ns[rows] + kernels.duration_ns[rows]
    collective = kernels.kind[rows] == KernelKind.COLLECTIVE
    of_kernel = part[np.where(kernels.op[rows] < 0, NONE, kernels.op[rows])]
    piece = scenario.work.kernel_group[low:high][rows]
    for i in np.flatnonzero(piece >= 0).tolist():  # fused look-ups are known by what the device did
        calls = scenario.work.calls[int(scenario.work.call_row[piece[i]])]
        if calls and calls[0].family is Family.EMBEDDING:
            of_kernel[i] = StepPart.GRADIENTS if "backward" in calls[0].kind else StepPart.LOOKUPS
    of_kernel[~collective & (of_kernel >= StepPart.COLLECTIVE)] = StepPart.DENSE_FORWARD
    times = np.bincount(of_kernel[~collective], weights=(end - start)[~collective], minlength=len(StepPart))
    busy = union_ns(start[~collective], end[~collective])
    active = union_ns(start, end)
    times *= busy / max(times.sum(), 1.0)
    steps = scenario.cycle.steps
    times[StepPart.NOTHING] = max(length_ns * steps - active, 0.0)
    return times / steps / 1e3, (active - busy) / steps / 1e3


def _transfers_us(found: Baseline) -> float:
    """All collectives of a step, each from when its last rank came, µs."""
    built, cycle = found.scenario.built, found.scenario.cycle
    total = sum(ns for members, ns in zip(built.rendezvous.groups, built.rendezvous.intrinsic_ns, strict=True)
                if cycle.kernel[int(built.program.kernel_ptr[members[0][0]]) + members[0][1]])
    return total / cycle.steps / 1e3


def collective_bytes(graph: ExecutionGraph, kind: str) -> float:
    """Bytes that a step's collectives of a kind take in, 4 an element."""
    table = graph.collectives
    rows = [i for i, code in enumerate(table.kind.tolist()) if graph.string(int(code)) == kind]
    return 4.0 * float(sum(max(int(table.elements_in[i]), 0) for i in rows)) / max(len(graph.steps), 1)
