"""Edited host time, launches and kernel times, put into the repeated program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.changes import Loading
from graph_predictor.prediction.repeat import Repeated
from graph_predictor.prediction.rewriting import Rewritten, replaced_host
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.simulation.host_pieces import with_host
from graph_predictor.simulation.program import NEVER, Anchor, ItemKind, Program, total_ratio, whole_ns
from graph_predictor.simulation.retiming import ProgramVariants
from kernel_models.launch_constants import LaunchConstants
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import LAUNCHING, NONE, ExecutionGraph, KernelKind, Phase
from tracer.intervals import union_ns

GRAPH_LAUNCH_NS = 10_000.0
"""Host time of one CUDA graph launch: 2.5 µs + 1 ns a node from CUDA 12.6, 5 to 10 µs before for some hundred nodes
(NVIDIA, "Constant Time Launch for Straight-Line CUDA Graphs", 2024)."""


@dataclass(frozen=True, slots=True)
class EditedHost:
    """Host side of the recorded program after the edits.

    Attributes:
        work, cost: by item, ns.
        after_lag, external, latency, queue_depth: as of ``Program``.
        floor: what loading a cycle's batches takes each rank beside it, ns.
        workers: what worker processes take for a cycle's batches, ns a rank.
        kernel_gone: kernels that are no longer launched; ``None`` where all are.
    """

    work: Int64
    cost: Int64
    after_lag: Int64
    external: Int64
    latency: Int64
    queue_depth: Int64
    floor: Float64
    workers: Float64
    kernel_gone: Bool | None


def edit_host(scenario: Scenario, rewritten: Rewritten | None) -> EditedHost:
    """Resolve a scenario's changes of the host, in one order whatever the order of the edits."""
    program, pieces = scenario.built.program, scenario.pieces
    host, batches, launches = scenario.host, scenario.batches, scenario.launches
    ns = scenario.host_times()
    lag = program.after_lag.astype(np.float64)
    if host.ns is not None:
        mine = scenario.cycle.working[pieces.item]
        lag = lag * total_ratio(pieces.ns[mine], ns[mine])
    if batches.fetching is not None:
        ns = ns * batches.fetching.on(pieces, batches.fetching.expected)
    external = program.item_external
    depth = program.queue_depth
    floor: Float64 = np.zeros(program.ranks)
    workers: Float64 = np.zeros(program.ranks)
    if batches.workers is not None:
        workers = batches.workers.of_ranks(program.ranks).interval_ns * scenario.cycle.steps
        external = np.full_like(external, NEVER)
    if batches.loading is not Loading.INLINE:
        if batches.loading is Loading.BACKGROUND:
            mine = pieces.data & scenario.cycle.working[pieces.item]
            floor += np.bincount(pieces.rank[mine], weights=ns[mine], minlength=program.ranks) * host.factor
        ns[pieces.data] = 0.0
        external = np.full_like(external, NEVER)
    ns = replaced_host(scenario, rewritten, ns)
    if host.weight is not None:
        ns = ns * host.weight
    if not launches.cost:
        ns[pieces.is_cost & np.isin(pieces.launch_kind, LAUNCHING)] = 0.0
    if launches.graphed:
        # Within the graph no operation runs on the host; one launch is left, on the first item of each rank's step.
        ns = np.where(pieces.data, ns, 0.0)
        lag = lag * 0.0
        depth = np.zeros_like(depth)
    ns, lag = ns * host.factor, lag * host.factor
    work, cost = with_host(program, pieces, ns)
    if launches.graphed:
        first = _first_launches(scenario)
        cost[first] += int(GRAPH_LAUNCH_NS * host.factor)
    latency = program.kernel_latency if host.constants is None else _latency(scenario, host.constants)
    if not launches.cost:
        latency = np.where(program.kernel_anchor == Anchor.CALL_END, 0, latency)
    gone = None if rewritten is None else rewritten.kernel_gone
    return EditedHost(work, cost, whole_ns(lag), external, latency, depth, floor, workers, gone)


def host_changed(scenario: Scenario, rewritten: Rewritten | None) -> bool:
    """Return whether host time that is left is other than what was recorded; time that an edit merely takes away is
    not."""
    host, weight = scenario.host, scenario.host.weight
    return (host.ns is not None or scenario.batches.fetching is not None or host.factor != 1.0
            or (weight is not None and not np.isin(weight, (0.0, 1.0)).all())
            or (rewritten is not None and ((rewritten.units.on_host and bool(rewritten.replacements))
                                           or not np.isin(rewritten.host_weight, (0.0, 1.0)).all())))


def edited_program(repeated: Repeated, host: EditedHost, scenario: Scenario, kernel_ns: Float64,
                   host_factor: float = 1.0) -> Program:
    """The repeated program with edited host time and kernel times (ns by recorded kernel)."""
    p, source = repeated.program, scenario.built.program
    fed = scenario.shared.once("fed copies", (source,), lambda: _FedCopies.of(source))
    work, cost = (host.work, host.cost) if host_factor == 1.0 else (
        whole_ns(ns * host_factor) for ns in (host.work, host.cost))
    program = replace(
        edited_launches(repeated, host, scenario),
        kernel_duration=whole_ns(_durations(p.kernel_duration, repeated.kernel, source.kernel_duration, kernel_ns)),
        item_work=np.where(p.item_kind == ItemKind.STEP_BEGIN, 0, work[repeated.item]),
        item_cost=fed.changed(cost, kernel_ns)[repeated.item])
    return _beside(program, repeated, scenario, np.maximum(host.floor * host_factor, host.workers))


def edited_launches(repeated: Repeated, host: EditedHost, scenario: Scenario) -> Program:
    """The repeated program with what edits change of launches and waits, and the recorded times."""
    p, source = repeated.program, scenario.built.program
    changes: dict[str, np.ndarray] = {"kernel_latency": host.latency[repeated.kernel], "queue_depth": host.queue_depth}
    if len(p.after_lag):
        changes["after_lag"] = _copied_lags(repeated, host.after_lag, source)
    if host.external is not source.item_external:
        changes["item_external"] = np.full_like(p.item_external, NEVER)
    if not scenario.launches.waits:
        changes["wait_ptr"] = np.zeros_like(p.wait_ptr)
        changes["wait_kernel"], changes["wait_lag"] = p.wait_kernel[:0], p.wait_lag[:0]
    if host.kernel_gone is not None:
        changes["kernel_gap"] = np.where(host.kernel_gone[repeated.kernel], 0, p.kernel_gap)
    return replace(p, **changes)


def _durations(own: Int64, rows: Int64 | None, recorded: Int64, kernel_ns: Float64) -> Float64:
    """Durations of kernels, ns, of times by recorded kernel: their ``own``, and the recorded ``rows`` they are of, all
    in turn by default."""
    # A ratio, since the recorded duration of a collective whose other members are outside the cycle is another one.
    known = recorded > 0
    if known.all():
        ratio = kernel_ns / recorded
        return np.maximum(own * (ratio if rows is None else ratio[rows]), 0.0)
    factor = np.where(known, kernel_ns / np.maximum(recorded, 1), 1.0)
    if rows is not None:
        factor, known, kernel_ns = factor[rows], known[rows], kernel_ns[rows]
    return np.maximum(np.where(known, own * factor, kernel_ns), 0.0)


def edited_variants(repeated: Repeated, host: EditedHost, scenario: Scenario, kernel_ns: Float64,
                    host_factors: Sequence[float]) -> ProgramVariants | None:
    """The times of ``edited_program`` for several kernel times and factors on the host's time together, to put into
    ``edited_launches``; ``None`` where work runs beside the step, which each program has to itself.

    Args:
        repeated, host, scenario: as of ``edited_program``.
        kernel_ns: times of the kernels of the cycle, ns, [kernels of the cycle, variants].
        host_factors: of each variant.
    """
    if _beside_masks(scenario) != []:
        return None
    p, cycle = repeated.program, scenario.cycle.shared.once(
        "cycle rows", (scenario.built, repeated), lambda: _CycleRows.of(scenario, repeated))
    duration = _durations(cycle.own[:, None], cycle.row, cycle.recorded[:, None], kernel_ns)
    work, cost = host.work[cycle.items], host.cost[cycle.items]
    known, column = np.unique(host_factors, return_inverse=True)
    works, costs = (np.stack([ns if factor == 1.0 else whole_ns(ns * factor) for factor in known.tolist()], axis=1)
                    for ns in (work, cost))
    works[cycle.begins] = 0
    if cycle.fed.changes(kernel_ns):
        works, costs, column = works[:, column], cycle.fed.changed(costs[:, column], kernel_ns), np.arange(len(column))
    floors = [np.maximum(host.floor * factor, host.workers) for factor in host_factors]
    starts: Int64 = np.zeros(0, np.int64)
    floor: Int64 = np.zeros((0, len(floors)), np.int64)
    if any(each.any() for each in floors):
        starts = _starts(repeated, scenario)
        floor = np.stack([_floor_ns(p, repeated, starts, each) for each in floors], axis=1)
    return ProgramVariants(cycle.item, works, costs, column, cycle.kernel, whole_ns(duration), starts, floor)


@dataclass(frozen=True, slots=True)
class _CycleRows:
    """What copies of a cycle are copies of, and nothing of the other recorded steps.

    Attributes:
        items: rows of the recorded items, and ``item`` which of them each item of the copies is.
        begins: which of them begin steps.
        own, row: recorded lengths of the kernels that differ, ns, and which kernel of the cycle each of them is;
            ``None`` for all in turn.
        kernel: which of ``own`` each kernel of the copies is.
        recorded: recorded lengths of the kernels of the cycle, ns.
        fed: copies that their calls feed, by rows of the cycle.
    """

    items: Int64
    item: Int64
    begins: Bool
    own: Int64
    row: Int64 | None
    kernel: Int64
    recorded: Int64
    fed: _FedCopies

    @classmethod
    def of(cls, scenario: Scenario, repeated: Repeated) -> _CycleRows:
        """Find them."""
        source, own = scenario.built.program, repeated.program.kernel_duration
        items, kernels = np.flatnonzero(scenario.cycle.item), np.flatnonzero(scenario.cycle.kernel)
        item, kernel = np.full(len(source.item_kind), NONE), np.full(len(source.kernel_item), NONE)
        item[items], kernel[kernels] = np.arange(len(items)), np.arange(len(kernels))
        recorded, row = source.kernel_duration[kernels], kernel[repeated.kernel]
        found = _FedCopies.of(source)
        inside = (kernel[found.kernel] >= 0) & (item[found.item] >= 0)
        fed = _FedCopies(kernel[found.kernel[inside]], item[found.item[inside]], found.feeding[inside],
                         found.recorded[inside])
        begins = source.item_kind[items] == ItemKind.STEP_BEGIN
        if np.array_equal(own, recorded[row]):  # as nearly always: then all copies of a kernel are as long
            return cls(items, item[repeated.item], begins, recorded, None, row, recorded, fed)
        return cls(items, item[repeated.item], begins, own, row, np.arange(len(own)), recorded, fed)


@dataclass(frozen=True, slots=True)
class _FedCopies:
    """Copies from pageable memory that calls of the recorded program feed: it is the link that both wait for.

    Attributes:
        kernel, item: the copies, and their calls.
        feeding: ns of each call in which it feeds its copy.
        recorded: ns of the copies.
    """

    kernel: Int64
    item: Int64
    feeding: Int64
    recorded: Int64

    @classmethod
    def of(cls, program: Program) -> _FedCopies:
        """Find them."""
        kernel = np.flatnonzero((program.kernel_anchor == Anchor.STAGED) & (program.kernel_item >= 0))
        kernel = kernel[program.kernel_duration[kernel] > 0]
        item = program.kernel_item[kernel]
        feeding = program.recorded_item_end[item] - np.maximum(program.recorded_kernel_start[kernel],
                                                               program.recorded_item_start[item])
        return cls(kernel, item, np.clip(feeding, 0, program.item_cost[item]), program.kernel_duration[kernel])

    def changes(self, kernel_ns: Float64) -> bool:
        """Return whether other times of kernels change the cost of any call."""
        return bool(self._change(kernel_ns).any())

    def changed(self, cost: Int64, kernel_ns: Float64) -> Int64:
        """Costs of calls, ns by item, with the time in which they feed a copy changed as the copy's own; of variants,
        [items, variants]."""
        change = self._change(kernel_ns)
        if not change.any():
            return cost
        found = cost.copy()
        np.add.at(found, self.item, np.rint(change).astype(np.int64))
        return np.maximum(found, 0)

    def _change(self, kernel_ns: Float64) -> Float64:
        across = (slice(None), *[None] * (kernel_ns.ndim - 1))
        return self.feeding[across] * (kernel_ns[self.kernel] / self.recorded[across] - 1.0)


def _beside_masks(scenario: Scenario) -> list[np.ndarray]:
    """Kernels that run beside the step, of each kind of such work."""
    return [*([input_copies(scenario)] if scenario.batches.loading is Loading.BACKGROUND else []),
            *([collective_rows(scenario)] if scenario.launches.hidden_collectives else [])]


def _beside(program: Program, repeated: Repeated, scenario: Scenario, floor: Float64) -> Program:
    """Work that runs beside the step: it takes no time of its own, but no step can be shorter than it."""
    program = replace(program, kernel_duration=program.kernel_duration.copy())
    floor = floor.copy()
    for beside in _beside_masks(scenario):
        mine = beside[repeated.kernel]
        once = mine & (repeated.copy_of_kernel == 0)
        rank = program.kernel_rank()
        longest = np.bincount(rank[once], weights=program.kernel_duration[once], minlength=program.ranks)
        floor = np.maximum(floor, longest)
        program.kernel_duration[mine] = 0
    if not floor.any():
        return program
    external = program.item_external.copy()
    starts = _starts(repeated, scenario)
    external[starts] = np.maximum(external[starts], _floor_ns(program, repeated, starts, floor))
    return replace(program, item_external=external)


def _starts(repeated: Repeated, scenario: Scenario) -> Int64:
    """The first items of the copies."""
    return np.flatnonzero(np.isin(repeated.item, scenario.cycle.first))


def _floor_ns(program: Program, repeated: Repeated, starts: Int64, floor: Float64) -> Int64:
    """When the first items of the copies end at the earliest, where a cycle takes each rank no less than ``floor``."""
    thread = program.item_thread()[starts]
    return program.thread_start[thread] + whole_ns(
        repeated.copy_of_item[starts] * floor[program.thread_rank[thread]])


def input_copies(scenario: Scenario) -> np.ndarray:
    """Return which kernels copy batches to the device: from host to device, outside the optimizer."""
    found = []
    for graph in scenario.built.graphs:
        to_device = np.array(["htod" in text.lower().replace(" ", "") for text in graph.strings] or [False], np.bool_)
        phase = np.append(graph.ops.phase, NONE)[graph.kernels.op]
        found.append(to_device[graph.kernels.name] & (graph.kernels.kind == KernelKind.MEMCPY)
                     & (phase != Phase.OPTIMIZER))
    return np.concatenate(found)


def collective_rows(scenario: Scenario) -> np.ndarray:
    """Return which kernels are collectives."""
    return np.concatenate([graph.kernels.kind == KernelKind.COLLECTIVE for graph in scenario.built.graphs])


def _copied_lags(repeated: Repeated, lag: Int64, source: Program) -> Int64:
    """Lags of the copies' host-to-host edges, which keep the order they have at each recorded item."""
    p = repeated.program
    if np.array_equal(lag, source.after_lag):
        return p.after_lag
    # Lags of one program are scaled by one factor, so that each copy's follows from its own.
    total = float(source.after_lag.sum())
    return whole_ns(p.after_lag * (float(lag.sum()) / total if total else 1.0))


def _first_launches(scenario: Scenario) -> Int64:
    """The first item of each rank that launches work in the cycle."""
    program, pieces = scenario.built.program, scenario.pieces
    rows = np.flatnonzero(pieces.is_cost & np.isin(pieces.launch_kind, LAUNCHING) & scenario.cycle.item[pieces.item])
    rank = pieces.rank[rows]
    order = np.lexsort((program.recorded_item_start[pieces.item[rows]], rank))
    _, first = np.unique(rank[order], return_index=True)
    return pieces.item[rows[order[first]]]


def _latency(scenario: Scenario, constants: list[LaunchConstants]) -> Int64:
    """Launch latencies of other constants, by kind; of copies within calls and staged ones as recorded."""
    program = scenario.built.program
    latency = program.kernel_latency.copy()
    for rank, graph in enumerate(scenario.built.graphs):
        low, high = int(program.kernel_ptr[rank]), int(program.kernel_ptr[rank + 1])
        own = constants[min(rank, len(constants) - 1)]
        plain = program.kernel_anchor[low:high] == Anchor.CALL_END
        latency[low:high] = np.where(plain, own.latency[graph.kernels.kind], latency[low:high])
    return latency


def kinds_of(repeated: Repeated, graphs: list[ExecutionGraph]) -> list[np.ndarray]:
    """``KernelKind`` of the repeated program's kernels, an array a rank."""
    every = np.concatenate([g.kernels.kind for g in graphs]) if graphs else np.zeros(0, np.int8)
    of = every[repeated.kernel]
    pointer = repeated.program.kernel_ptr
    return [of[pointer[rank]:pointer[rank + 1]] for rank in range(len(pointer) - 1)]


def gpu_active_ns(start: Int64, end: Int64, rows: Int64, kind: np.ndarray) -> int:
    """Time in which at least one of the given kernels, collectives apart, ran, ns."""
    rows = rows[kind[rows] != KernelKind.COLLECTIVE]
    return union_ns(start[rows], end[rows])
