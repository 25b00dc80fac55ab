"""The host side of the recorded program after the edits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.repeat import Repeated
from graph_predictor.prediction.rewriting import Rewritten, replaced_host
from graph_predictor.prediction.scenario import Loading, Scenario
from graph_predictor.prediction.work import Gone
from graph_predictor.simulation.host_slices import with_host
from graph_predictor.simulation.program import NEVER, LaunchReference, total_ratio, whole_ns
from kernel_models.launch_constants import LaunchConstants
from tracer.arrays import Float64, Int64
from tracer.graph import LAUNCHING, ExecutionGraph

GRAPH_LAUNCH_NS = 10_000.0
"""Host time of one CUDA graph launch: 2.5 µs + 1 ns a node from CUDA 12.6, 5 to 10 µs before for some hundred nodes
(NVIDIA, "Constant Time Launch for Straight-Line CUDA Graphs", 2024)."""


@dataclass(frozen=True, slots=True)
class EditedHost:
    """Host side of the recorded program after the edits.

    Attributes:
        ns: by slice of ``Scenario.slices``. What is in no slice is the launch of a CUDA graph.
        work, cost: by item, ns.
        after_lag, external, latency, queue_depth: as of ``Program``.
        floor: what loading a cycle's batches takes each rank beside it, ns.
        workers: what worker processes take for a cycle's batches, ns a rank.
        gone: what is no longer there; ``None`` where all is.
        labels: what reports call new work in the place of other work, by its kernel or, on a CPU, by its slice.
    """

    ns: Float64
    work: Int64
    cost: Int64
    after_lag: Int64
    external: Int64
    latency: Int64
    queue_depth: Int64
    floor: Float64
    workers: Float64
    gone: Gone | None
    labels: dict[int, str]


def edit_host(scenario: Scenario, rewritten: Rewritten | None) -> EditedHost:
    """Resolve a scenario's changes of the host, in one order whatever the order of the edits."""
    program, slices = scenario.built.program, scenario.slices
    host, batches, launches = scenario.host, scenario.batches, scenario.launches
    ns = scenario.host_times()
    lag = program.after_lag.astype(np.float64)
    if host.ns is not None:
        mine = scenario.cycle.working[slices.item]
        lag = lag * total_ratio(slices.ns[mine], ns[mine])
    if batches.data_loading is not None:
        ns = ns * batches.data_loading.on(slices, batches.data_loading.expected)
    external = program.item_external
    depth = program.queue_depth
    floor: Float64 = np.zeros(program.ranks)
    workers: Float64 = np.zeros(program.ranks)
    if batches.workers is not None:
        workers = batches.workers.of_ranks(program.ranks).interval_ns * scenario.cycle.steps
        external = np.full_like(external, NEVER)
    if batches.loading is not Loading.INLINE:
        if batches.loading is Loading.BACKGROUND:
            mine = slices.data & scenario.cycle.working[slices.item]
            floor += np.bincount(slices.rank[mine], weights=ns[mine], minlength=program.ranks) * host.factor
        ns[slices.data] = 0.0
        external = np.full_like(external, NEVER)
    ns = replaced_host(rewritten, ns)
    if host.weight is not None:
        ns = ns * host.weight
    if not launches.cost:
        ns[slices.is_cost & np.isin(slices.launch_kind, LAUNCHING)] = 0.0
    if launches.graphed:
        # Within the graph no operation runs on the host; one launch is left, on the first item of each rank's step.
        ns = np.where(slices.data, ns, 0.0)
        lag = lag * 0.0
        depth = np.zeros_like(depth)
    ns, lag = ns * host.factor, lag * host.factor
    work, cost = with_host(program, slices, ns)
    if launches.graphed:
        first = _first_launches(scenario)
        cost[first] += int(GRAPH_LAUNCH_NS * host.factor)
    latency = program.kernel_latency if host.constants is None else _latency(scenario, host.constants)
    if not launches.cost:
        latency = np.where(program.kernel_reference == LaunchReference.CALL_END, 0, latency)
    return EditedHost(ns, work, cost, whole_ns(lag), external, latency, depth, floor, workers,
                      None if rewritten is None else rewritten.gone, {} if rewritten is None else rewritten.labels())


def _first_launches(scenario: Scenario) -> Int64:
    """The first item of each rank that launches work in the cycle."""
    program, slices = scenario.built.program, scenario.slices
    rows = np.flatnonzero(slices.is_cost & np.isin(slices.launch_kind, LAUNCHING) & scenario.cycle.item[slices.item])
    rank = slices.rank[rows]
    order = np.lexsort((program.recorded_item_start[slices.item[rows]], rank))
    _, first = np.unique(rank[order], return_index=True)
    return slices.item[rows[order[first]]]


def _latency(scenario: Scenario, constants: list[LaunchConstants]) -> Int64:
    """Launch latencies of other constants, by kind; of copies within calls and staged ones as recorded."""
    program = scenario.built.program
    latency = program.kernel_latency.copy()
    for rank, graph in enumerate(scenario.built.graphs):
        low, high = int(program.kernel_ptr[rank]), int(program.kernel_ptr[rank + 1])
        own = constants[min(rank, len(constants) - 1)]
        plain = program.kernel_reference[low:high] == LaunchReference.CALL_END
        latency[low:high] = np.where(plain, own.latency[graph.kernels.kind], latency[low:high])
    return latency


def kinds_of(repeated: Repeated, graphs: list[ExecutionGraph]) -> list[np.ndarray]:
    """``KernelKind`` of the repeated program's kernels, an array a rank."""
    every = np.concatenate([g.kernels.kind for g in graphs]) if graphs else np.zeros(0, np.int8)
    of = every[repeated.kernel]
    pointer = repeated.program.kernel_ptr
    return [of[pointer[rank]:pointer[rank + 1]] for rank in range(len(pointer) - 1)]
