"""Shared overheads: the host time of a workload that was never recorded, from others recorded on the same host.

What the new workload contributes is its sequence of operations and nesting, no time. An event is an operation's own
time (without the operations in it), or the gap before a top-level operation. It costs

    ns = base · cold + slope · tensors,        cold = exp(0.2 · log₂ max(distance / 32, 1))

*Base*: the mean of the same event elsewhere (an operation in the same operation; a gap between the same two), or, where
there is none, the mean of a pool: the same operation anywhere, operations of its class, all. *Distance*: events since
the same one ran last, around the end of the step to its beginning. What ran long ago finds its code and data out of the
caches, and costs up to four times as much. *Tensors*: an optimizer's list operations, and the Python around them and
around the step, cost so much for each tensor updated.
Shared overheads as such, means by kind of launch, are from Lin et al. (2022).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from graph_predictor.prediction.overheads import computing_operations, waiting_intervals
from graph_predictor.simulation.host_time import exclusive_time, operation_of
from kernel_models.host.overheads import record
from kernel_models.host.segments import Overhead, Segments
from kernel_models.operation import is_free
from tracer.arrays import Bool, Float64, Int64
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph, OpKind

Names = npt.NDArray[np.object_]

WARM_DISTANCE = 32.0
"""Events within which the same one is still in the caches."""
COLDER = 0.2
"""Natural logarithm of the cost's growth for each doubling of the distance beyond. It, the distance and how pools are
averaged were chosen on five workloads of the suite (GPT-2, ViT, MoE, LSTM, U-Net), each left out in turn."""
LEAST_NS = 50.0
"""Least base cost that a pool counts."""
LISTS = "_foreach"
_MODULES = frozenset(f"aten::{name}" for name in (
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "batch_norm", "layer_norm", "rms_norm", "group_norm",
    "embedding", "embedding_bag", "dropout", "relu", "relu_", "gelu", "silu", "max_pool2d", "avg_pool2d",
    "adaptive_avg_pool2d", "lstm", "gru", "cross_entropy_loss", "binary_cross_entropy_with_logits"))
"""Operations that ``torch.nn`` modules call first: Python's way into a module and out of it lies around them."""
_NODE = re.compile(r"Backward\d+$|AccumulateGrad$")

Label = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class HostEvents:
    """Host time of one step of a workload, event by event in order. Columns of equal length.

    Attributes:
        is_gap: the time before a top-level operation rather than an operation's own.
        name: the operation; of a gap the one that follows, "" at the step's end.
        beside: the operation around it, "" for none; of a gap the one before, "" at the step's begin.
        tensors: that a list operation updates, of a gap the more of both sides; of a gap that comes once a step, of
            all list operations of the step.
        computes: the event is a CPU's computation, no overhead.
        ns: how long it took; zeros where it has not been measured.
    """

    is_gap: Bool
    name: Names
    beside: Names
    tensors: Int64
    computes: Bool
    ns: Float64

    def __len__(self) -> int:
        return len(self.is_gap)

    @property
    def host_ns(self) -> float:
        """Measured host time of the step without computation."""
        return float(self.ns[~self.computes].sum())

    def distance(self) -> Int64:
        """Events since the same one ran last, around the step's end."""
        numbers: dict[Label, int] = {}
        same = np.array([numbers.setdefault((gap, name, beside if gap else ""), len(numbers))
                         for gap, name, beside in zip(self.is_gap.tolist(), self.name, self.beside, strict=True)])
        order = np.argsort(same, kind="stable")
        found = np.zeros(len(same), np.int64)
        if not len(same):
            return found
        begins = np.flatnonzero(np.diff(same[order], prepend=-1))
        ends = np.append(begins[1:], len(same)) - 1
        found[order[1:]] = np.diff(order)
        found[order[begins]] = order[begins] - order[ends] + len(same)
        return found

    def alone(self) -> Bool:
        """Events that come once in the step."""
        numbers: dict[Label, int] = {}
        same = np.array([numbers.setdefault(key, len(numbers)) for key in zip(
            self.is_gap.tolist(), self.name, self.beside, strict=True)], np.int64)
        return np.bincount(same, minlength=1)[same] == 1

    def coldness(self) -> Float64:
        """Factor on the base cost."""
        doublings = np.log2(np.maximum(self.distance() / WARM_DISTANCE, 1.0))
        return np.exp(COLDER * doublings)


@dataclass(frozen=True, slots=True)
class SharedOverheads:
    """Fitted on steps of some workloads of one host; see the module's text.

    Attributes:
        base_ns: by label, most particular labels and pools.
        slope_ns: for each tensor, by the most particular label.
        pooled_slope_ns: median slope of list operations (False) and of gaps (True).
    """

    base_ns: dict[Label, float]
    slope_ns: dict[Label, float]
    pooled_slope_ns: dict[bool, float]

    @classmethod
    def fit(cls, parts: Sequence[HostEvents]) -> SharedOverheads:
        """Fit to recorded steps, one of each workload.

        Raises:
            ForetraceError: there is no host time in them.
        """
        labels: dict[Label, int] = {}
        chains: list[list[Label]] = []
        codes, cold, tensors, ns = [], [], [], []
        for part in parts:
            kept = np.flatnonzero(~part.computes)
            for row in kept.tolist():
                chain = _labels(bool(part.is_gap[row]), part.name[row], part.beside[row])
                if chain[0] not in labels:
                    labels[chain[0]] = len(labels)
                    chains.append(chain)
                codes.append(labels[chain[0]])
            cold.append(part.coldness()[kept])
            tensors.append(part.tensors[kept])
            ns.append(part.ns[kept])
        if not codes:
            raise ForetraceError("There is no host time to share: the captures have no operations on any host thread.")
        code, x, y = np.array(codes), np.concatenate(tensors).astype(np.float64), np.concatenate(ns)
        slope, known = _slopes(code, x, y, len(labels))
        gap = np.array([bool(chain[0][0]) for chain in chains])
        pooled = {side: float(np.median(slope[known & (gap == side)])) if (known & (gap == side)).any() else 0.0
                  for side in (False, True)}
        slope = np.where(known, slope, np.where(gap, pooled[True], pooled[False]))
        left = np.maximum(y - slope[code] * x, 0.0) / np.concatenate(cold)
        base = np.bincount(code, left, len(labels)) / np.bincount(code, minlength=len(labels))
        sums: dict[Label, list[float]] = {}
        for chain, value in zip(chains, base.tolist(), strict=True):
            for label in chain:
                sums.setdefault(label, []).append(value)
        return cls({label: _typical(values) for label, values in sums.items()},
                   {chain[0]: float(value) for chain, value in zip(chains, slope, strict=True)}, pooled)

    def estimate_ns(self, events: HostEvents) -> Float64:
        """Expected time of each event, ns; times in ``events`` are not looked at, and computation gets none."""
        found = np.zeros(len(events))
        cold = events.coldness()
        for row in np.flatnonzero(~events.computes).tolist():
            gap = bool(events.is_gap[row])
            chain = _labels(gap, events.name[row], events.beside[row])
            base = next((self.base_ns[label] for label in chain if label in self.base_ns), 0.0)
            slope = self.slope_ns.get(chain[0], self.pooled_slope_ns[gap])
            found[row] = base * cold[row] + slope * events.tensors[row]
        return found

    def seen(self, events: HostEvents) -> Bool:
        """Return which overheads are known as they are, from another workload."""
        return np.array([_labels(bool(gap), name, beside)[0] in self.base_ns for gap, name, beside in zip(
            events.is_gap, events.name, events.beside, strict=True)], np.bool_) & ~events.computes


def host_class(name: str) -> str:
    """Class of an operation by what the host does for it."""
    if name.startswith("autograd::engine"):
        return "engine"
    if _NODE.search(name):
        return "node"
    if LISTS in name:
        return "list"
    if name in _MODULES:
        return "module"
    if is_free(name):
        return "view"
    return "in place" if name.endswith("_") else "other"


def _labels(gap: bool, name: str, beside: str) -> list[Label]:
    """An event's own label and those of the pools above it, nearest first."""
    if gap:
        return [(True, name, beside), (True, "classes", host_class(name), host_class(beside)),
                (True, "class", host_class(name)), (True,)]
    return [(False, name, beside), (False, name), (False, "class", host_class(name)), (False,)]


def _typical(bases: list[float]) -> float:
    """Geometric mean, ns, none below ``LEAST_NS``: a few events cost a hundred times the others of their pool."""
    return float(np.exp(np.log(np.maximum(bases, LEAST_NS)).mean()))


def _slopes(code: Int64, x: Float64, y: Float64, size: int) -> tuple[Float64, Bool]:
    """Least-squares slope of y over x for each code, neither slope nor intercept below zero; whether x varies."""
    n = np.maximum(np.bincount(code, minlength=size), 1)
    mean_x, mean_y = np.bincount(code, x, size) / n, np.bincount(code, y, size) / n
    spread = np.bincount(code, (x - mean_x[code])**2, size)
    known = spread > 0
    slope = np.bincount(code, (x - mean_x[code]) * (y - mean_y[code]), size) / np.where(known, spread, 1.0)
    slope = np.maximum(slope, 0.0)
    through_zero = np.bincount(code, x * y, size) / np.maximum(np.bincount(code, x * x, size), 1.0)
    return np.where(mean_y - slope * mean_x < 0, through_zero, slope), known


def step_events(graphs: Sequence[ExecutionGraph]) -> HostEvents:
    """One step of a workload, event by event: medians over the steps that do exactly what most of them do.

    Args:
        graphs: recorded windows of one workload, one rank's each.

    Raises:
        ForetraceError: no step has an operation.
    """
    steps = [events for graph in graphs for events in _events_of_steps(graph)]
    if not steps:
        raise ForetraceError("There is no host time in any step of the capture: profile whole steps, with "
                             "ProfilerActivity.CPU.")
    sequences = [hash((tuple(step.is_gap), tuple(step.name), tuple(step.beside))) for step in steps]
    usual = Counter(sequences).most_common(1)[0][0]
    alike = [step for step, sequence in zip(steps, sequences, strict=True) if sequence == usual]
    first = alike[0]
    return HostEvents(first.is_gap, first.name, first.beside, first.tensors, first.computes,
                      np.median([step.ns for step in alike], axis=0))


def _events_of_steps(graph: ExecutionGraph) -> list[HostEvents]:
    """Every step's events."""
    ops = graph.ops
    if not len(graph.steps):
        return []
    waiting = waiting_intervals(graph)
    segments = record(graph, waiting).segments
    outside = (segments.kind == Overhead.BETWEEN_OPS) | (segments.kind == Overhead.DATA)
    gaps: Segments = segments.take(outside & (segments.step >= 0))
    own = exclusive_time(graph)
    worked = own.end_ns - own.start_ns - waiting.within(own.thread, own.start_ns, own.end_ns)
    own_ns = np.bincount(own.op, worked, len(ops))
    begins = np.argsort(graph.steps.start_ns, kind="stable")
    place = np.searchsorted(graph.steps.start_ns[begins], ops.start_ns, side="right") - 1
    step = np.where(place >= 0, begins[np.maximum(place, 0)], -1)
    ended = ops.start_ns >= (graph.steps.start_ns + graph.steps.duration_ns)[step]
    step = np.where((ops.kind == OpKind.OPERATION) & (step >= 0) & ~ended, step, -1)
    rows = np.flatnonzero(step >= 0)
    names = np.array([*graph.strings, ""], dtype=object)
    name_of = np.append(ops.name, -1)
    around = np.append(operation_of(graph), -1)[ops.parent]
    lists = np.append([LISTS in text for text in graph.strings], False)[ops.name]
    parts = np.bincount(ops.parent[(ops.parent >= 0) & (ops.kind == OpKind.OPERATION)], minlength=len(ops))
    tensors = np.append(np.where(lists, parts, 0), 0)
    computes = computing_operations(graph) & graph.computes_on_host
    # A neighbour in another step is none: what a step begins and ends with is the same in the first and the last.
    after, before = (np.where((neighbour >= 0) & (step[neighbour] == gaps.step), neighbour, -1)
                     for neighbour in (gaps.op, gaps.before))
    columns = {
        "is_gap": np.concatenate([np.ones(len(gaps), np.bool_), np.zeros(len(rows), np.bool_)]),
        "name": np.concatenate([names[name_of[after]], names[name_of[rows]]]),
        "beside": np.concatenate([names[name_of[before]], names[name_of[around[rows]]]]),
        "tensors": np.concatenate([np.maximum(tensors[after], tensors[before]), tensors[rows]]),
        "computes": np.concatenate([np.zeros(len(gaps), np.bool_), computes[rows]]),
        "ns": np.concatenate([gaps.duration_ns, own_ns[rows]]).astype(np.float64)}
    where = np.concatenate([gaps.step, step[rows]])
    thread = np.concatenate([gaps.thread, ops.thread[rows]])
    start = np.concatenate([gaps.start_ns, ops.start_ns[rows]])
    order = np.lexsort((np.arange(len(where)), start, thread, where))
    found = []
    for number in range(len(graph.steps)):
        mine = order[where[order] == number]
        if columns["is_gap"][mine].all():
            continue
        events = HostEvents(**{key: values[mine] for key, values in columns.items()})
        once = events.is_gap & (events.tensors == 0) & events.alone()
        found.append(replace(events, tensors=np.where(once, events.tensors.max(), events.tensors)))
    return found
