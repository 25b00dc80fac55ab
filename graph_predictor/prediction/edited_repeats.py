"""The host side of the recorded program after edits, and the copies of a cycle with edited times.

All copies are simulated along one order that they share.

::

    edited host ──▶ rows of host time  ┐
    priced kernels ──▶ rows of lengths ┼──▶ order of the copies ──▶ all times of the step, or the periods of variants
    edited launches ──▶ lags           ┘

Rows are made once for all predictions with the same host, or the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from graph_predictor.prediction.interval import KernelVariants
from graph_predictor.prediction.repeat import Cycle, Repeated, Shared
from graph_predictor.prediction.rewriting import Rewritten, replaced_host
from graph_predictor.prediction.scenario import Gone, Loading, Scenario
from graph_predictor.simulation.build import kernel_kinds
from graph_predictor.simulation.changed_program import same_order, without
from graph_predictor.simulation.engine import structure_of
from graph_predictor.simulation.host_slices import HostRows, HostVariants, Lanes, WorkingOrder, lanes, with_host
from graph_predictor.simulation.program import (
    NEVER,
    ItemKind,
    LaunchReference,
    Program,
    Simulated,
    Structure,
    total_ratio,
    whole_ns,
)
from graph_predictor.simulation.tape import Rows
from graph_predictor.simulation.tape_loop import LANES
from kernel_models.host.segments import LaunchConstants
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import LAUNCHING, NONE, ExecutionGraph, KernelKind, Phase

GRAPH_LAUNCH_NS = 10_000.0
"""Host time of one CUDA graph launch: 2.5 µs + 1 ns a node from CUDA 12.6, 5 to 10 µs before for some hundred nodes
(NVIDIA, "Constant Time Launch for Straight-Line CUDA Graphs", 2024)."""


@dataclass(frozen=True, slots=True)
class EditedHost:
    """Host side of the recorded program after the edits.

    Attributes:
        ns: host time of each slice of ``Scenario.slices``; launches of CUDA graphs lie in no slice.
        work, cost: work before each item and its own cost, ns.
        after_lag, external, latency, queue_depth: see ``Program``.
        floor: time to load a cycle's batches in the background, ns a rank.
        workers: time that worker processes take for a cycle's batches, ns a rank.
        gone: removed work; ``None`` where nothing is removed.
        labels: names in reports of work that replaces other work, by its kernel or, on a CPU, by its slice.
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
    """Apply a scenario's changes of the host, always in the same order: the order of the edits has no effect."""
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
    """Return the first item of each rank that launches work in the cycle."""
    program, slices = scenario.built.program, scenario.slices
    rows = np.flatnonzero(slices.is_cost & np.isin(slices.launch_kind, LAUNCHING) & scenario.cycle.item[slices.item])
    rank = slices.rank[rows]
    order = np.lexsort((program.recorded_item_start[slices.item[rows]], rank))
    _, first = np.unique(rank[order], return_index=True)
    return slices.item[rows[order[first]]]


def _latency(scenario: Scenario, constants: list[LaunchConstants]) -> Int64:
    """Return each kernel's launch latency, ns, by ``constants``; copies within calls and staged copies keep theirs."""
    program = scenario.built.program
    latency = program.kernel_latency.copy()
    for rank, graph in enumerate(scenario.built.graphs):
        low, high = int(program.kernel_ptr[rank]), int(program.kernel_ptr[rank + 1])
        own = constants[min(rank, len(constants) - 1)]
        plain = program.kernel_reference[low:high] == LaunchReference.CALL_END
        latency[low:high] = np.where(plain, own.latency[graph.kernels.kind], latency[low:high])
    return latency


def kinds_of(repeated: Repeated, graphs: list[ExecutionGraph]) -> list[np.ndarray]:
    """Return ``KernelKind`` of the repeated program's kernels, an array for each rank."""
    of = kernel_kinds(graphs)[repeated.kernel]
    pointer = repeated.program.kernel_ptr
    return [of[pointer[rank]:pointer[rank + 1]] for rank in range(len(pointer) - 1)]


@dataclass(frozen=True, slots=True)
class CycleRows:
    """The recorded rows that copies of a cycle take their times from.

    Attributes:
        items: rows of the recorded items.
        begins: which of ``items`` begin steps.
        kernels: rows of the recorded kernels; ``recorded`` their durations, ns.
        own, kernel: durations that the copies' kernels take, ns, and the row of ``kernels`` of each. If all copies of a
            kernel last as long, ``own`` is ``recorded`` and ``kernel`` is ``None``.
        rank: rank of each of ``own``.
        first: which of ``own`` belong to the first copy.
        of: for each item and kernel of the copies, its row of ``items`` or ``own``; and of the floors in ``starts``.
        starts: rows of the first item of each rank in each copy.
        fed: copies from pageable memory that calls feed, by rows of the cycle.
    """

    items: Int64
    begins: Bool
    kernels: Int64
    recorded: Int64
    own: Int64
    kernel: Int64 | None
    rank: Int64
    first: Bool
    of: Rows
    starts: Int64
    fed: FedCopies

    @classmethod
    def make(cls, cycle: Cycle, repeated: Repeated) -> CycleRows:
        """Return the rows of the copies of a cycle."""
        source, own = cycle.built.program, repeated.program.kernel_duration
        items, kernels = np.flatnonzero(cycle.item), np.flatnonzero(cycle.kernel)
        item, kernel = np.full(len(source.item_kind), NONE), np.full(len(source.kernel_item), NONE)
        item[items], kernel[kernels] = np.arange(len(items)), np.arange(len(kernels))
        recorded, row = source.kernel_duration[kernels], kernel[repeated.kernel]
        starts = np.flatnonzero(np.isin(repeated.item, cycle.first))
        floor = np.full(len(repeated.item), NONE)
        floor[starts] = np.arange(len(starts))
        begins = source.item_kind[items] == ItemKind.STEP_BEGIN
        fed = FedCopies.of(source).within(item, kernel)
        if np.array_equal(own, recorded[row]):  # the usual case: all copies of a kernel last equally long
            return cls(items, begins, kernels, recorded, recorded, None, source.kernel_rank()[kernels],
                       np.ones(len(kernels), np.bool_), Rows(item[repeated.item], row, floor), starts, fed)
        return cls(items, begins, kernels, recorded, own, row, repeated.program.kernel_rank(),
                   repeated.copy_of_kernel == 0, Rows(item[repeated.item], np.arange(len(own)), floor), starts, fed)

    def durations(self, kernel_ns: Float64) -> Int64:
        """Return the durations of ``own``, ns, if the cycle's kernels take ``kernel_ns`` [kernels, variants]."""
        # Scaled by a ratio: a collective with members outside the cycle keeps its recorded duration, waiting included.
        known = self.recorded > 0
        recorded, own, row = self.recorded[:, None], self.own[:, None], self.kernel
        if known.all():
            ratio = kernel_ns / recorded
            return whole_ns(np.maximum(own * (ratio if row is None else ratio[row]), 0.0))
        factor = np.where(known[:, None], kernel_ns / np.maximum(recorded, 1), 1.0)
        if row is not None:
            factor, known, kernel_ns = factor[row], known[row], kernel_ns[row]
        return whole_ns(np.maximum(np.where(known[:, None], own * factor, kernel_ns), 0.0))


@dataclass(frozen=True, slots=True)
class FedCopies:
    """Copies from pageable memory that a host call feeds: call and copy both wait for the link.

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
    def of(cls, program: Program) -> FedCopies:
        """Return the fed copies of a recorded program."""
        kernel = np.flatnonzero((program.kernel_reference == LaunchReference.STAGED) & (program.kernel_item >= 0))
        kernel = kernel[program.kernel_duration[kernel] > 0]
        item = program.kernel_item[kernel]
        feeding = program.recorded_item_end[item] - np.maximum(program.recorded_kernel_start[kernel],
                                                               program.recorded_item_start[item])
        return cls(kernel, item, np.clip(feeding, 0, program.item_cost[item]), program.kernel_duration[kernel])

    def within(self, item: Int64, kernel: Int64) -> FedCopies:
        """Return the copies whose item and kernel have a row in ``item`` and ``kernel``, by these rows."""
        inside = (kernel[self.kernel] >= 0) & (item[self.item] >= 0)
        return FedCopies(kernel[self.kernel[inside]], item[self.item[inside]], self.feeding[inside],
                         self.recorded[inside])

    def change(self, kernel_ns: Float64) -> Float64:
        """Return the additional ns of the calls, [copies, variants], for kernels' times [kernels, variants]."""
        return self.feeding[:, None] * (kernel_ns[self.kernel] / self.recorded[:, None] - 1.0)

    def changed(self, cost: Int64, change: Float64) -> Int64:
        """Return the costs of items plus ``change``, ns, [variants, items], at least 0."""
        found = cost.copy()
        more = np.broadcast_to(np.rint(change).astype(np.int64).T, (len(found), len(self.item)))
        for own, each in zip(found, more, strict=True):
            np.add.at(own, self.item, each)
        return np.maximum(found, 0)


HOSTS_KEPT = 64
"""Number of edited hosts that predictions from one recording keep: enough for every value of an axis of factors."""
NUMBERS_KEPT = 16_000_000
"""Most numbers in the kept rows of host time (128 MB each of work and cost); a large job keeps fewer hosts."""


@dataclass(frozen=True)
class KernelRows:
    """Durations of the kernels in variants of a step: the step with other times of its kernels or its host.

    Attributes:
        duration: by row of ``CycleRows.own``, whole ns, [rows, variants]; variants that fill up a whole vector have
            expected durations.
        fed: additional time of calls that feed copies, ns, [such copies, variants].
        overlapping: time of work that overlaps the step, by rank, ns, [ranks, variants]: no step is shorter.
    """

    duration: Int64
    fed: Float64
    overlapping: Float64

    @cached_property
    def lanes(self) -> Lanes:
        """Return the durations in the layout that ``WorkingOrder.ends`` takes."""
        return lanes(self.duration)


class EditedRepeats:
    """Copies of the steps of a scenario with its edits.

    Args:
        repeated: the copies.
        scenario: the edited job.
        host: its host.
    """

    def __init__(self, repeated: Repeated, scenario: Scenario, host: EditedHost) -> None:
        self.repeated, self.scenario, self.host = repeated, scenario, host
        self._shared: Shared = repeated.shared
        self._variants: tuple[tuple[float, ...], HostVariants] | None = None

    @classmethod
    def once(cls, repeated: Repeated, scenario: Scenario, host: EditedHost) -> EditedRepeats:
        """Return the copies with this host and the scenario's launches; results are kept as far as memory allows."""
        of = (host, scenario.launches.waits, scenario.launches.hidden_collectives, _loads_in_background(scenario))
        return repeated.shared.once("copies", of, lambda: cls(repeated, scenario, host),
                                    most=repeated.shared.as_many(len(repeated.item) // repeated.copies * LANES,
                                                                 NUMBERS_KEPT, HOSTS_KEPT))

    @cached_property
    def rows(self) -> CycleRows:
        """Return the rows that the copies take their times from."""
        return self._shared.once("rows", (), lambda: CycleRows.make(self.scenario.cycle, self.repeated))

    @cached_property
    def launches(self) -> Program:
        """Return the program of the copies with edited launches and waits, and the recorded times."""
        repeated, host, scenario = self.repeated, self.host, self.scenario
        p, source = repeated.program, scenario.built.program
        changes: dict[str, np.ndarray] = {"kernel_latency": host.latency[repeated.kernel],
                                          "queue_depth": host.queue_depth}
        if len(p.after_lag):
            changes["after_lag"] = _copied_lags(repeated, host.after_lag, source)
        if host.external is not source.item_external:
            changes["item_external"] = np.full_like(p.item_external, NEVER)
        if not scenario.launches.waits:
            changes["wait_ptr"] = np.zeros_like(p.wait_ptr)
            changes["wait_kernel"], changes["wait_lag"] = p.wait_kernel[:0], p.wait_lag[:0]
        edited = replace(p, **changes)
        gone = host.gone
        return edited if gone is None else without(edited, gone.kernels[repeated.kernel], gone.items[repeated.item])

    @cached_property
    def structure(self) -> Structure:
        """Return the order within the copies that does not depend on any time."""
        p, own = self.launches, self.repeated
        return own.structure if p.kernel_group is own.program.kernel_group else structure_of(p)

    @cached_property
    def _order(self) -> WorkingOrder:
        """Return the order of computation, shared by all copies that differ in times alone. It is found with the
        recorded times, so that it is reproducible."""
        p, own = self.launches, self.repeated.program
        # Removed work may change what waits for what; then these copies need an order of their own.
        gone = None if self.host.gone is None or same_order(p, own) else self.host.gone
        of = (gone, self.scenario.launches.waits, p.item_external is own.item_external, tuple(p.queue_depth.tolist()))

        def make() -> WorkingOrder:
            program = replace(own, wait_ptr=p.wait_ptr, wait_kernel=p.wait_kernel, wait_lag=p.wait_lag,
                              item_external=p.item_external, queue_depth=p.queue_depth, queue_ptr=p.queue_ptr,
                              queue_kernel=p.queue_kernel, item_queue=p.item_queue, item_channel=p.item_channel,
                              kernel_group=p.kernel_group, group_size=p.group_size)
            return WorkingOrder(program, self.structure, self.rows.of, self.repeated.end[:, -2:],
                                self.repeated.tail[:, -2:])

        return self._shared.once("order", of, make)

    @cached_property
    def _lags(self) -> Int64:
        return self._order.lags(self.launches)

    @cached_property
    def training(self) -> EditedRepeats:
        """Return the copies without the loader's worker processes: the training processes alone."""
        if not self.host.workers.any():
            return self
        host = replace(self.host, workers=np.zeros_like(self.host.workers))
        return EditedRepeats(self.repeated, self.scenario, host)

    def kernels(self, variants: KernelVariants) -> KernelRows:
        """Return the durations of the copies' kernels, given the times of the cycle's kernels."""
        rows, ranks = self.rows, self.repeated.program.ranks
        duration = rows.durations(variants.ns)
        fed = variants.over(rows.fed.change(variants.ns), rows.fed.kernel)
        longest: Float64 = np.zeros((ranks, fed.shape[1]))
        for mask in overlapping_masks(self.scenario):
            of_cycle = np.arange(len(rows.own)) if rows.kernel is None else rows.kernel
            mine = mask[rows.kernels[of_cycle]]
            once = np.flatnonzero(mine & rows.first)
            each = np.zeros_like(longest)
            np.add.at(each, rows.rank[once], variants.over(duration[once], of_cycle[once]))
            longest = np.maximum(longest, each)
            duration[mine] = 0
        return KernelRows(variants.over(duration, rows.kernel, LANES), fed, longest)

    def kernels_once(self, kind: str, of: object, make: Callable[[], KernelVariants]) -> KernelRows:
        """Return ``kernels(make())``, or the result kept for an equal ``of``: all that decides the kernels' times."""
        key = (of, self.scenario.launches.hidden_collectives, _loads_in_background(self.scenario))
        return self._shared.once(f"{kind} kernels", key, lambda: self.kernels(make()))

    def simulated(self, kernels: KernelRows) -> Simulated:
        """Return all times of the copies; ``kernels`` has one variant."""
        return self._order.simulate(self._lags, self._own_rows(kernels), kernels.duration[:, 0].copy(),
                                    self._floor((1.0,), kernels)[0][:, 0].copy())

    def periods_ns(self, kernels: KernelRows, host_factors: Sequence[float]) -> Int64:
        """Return the slowest rank's period in each variant, ns; each variant has a factor on the host time."""
        factors = tuple(host_factors)
        ends = self._order.ends(self._lags, self._host_variants(factors, kernels), kernels.lanes,
                                self._floor(factors, kernels))
        found = np.concatenate([end[:, 1] - end[:, 0] for end in ends]).max(axis=0)
        return found[:len(factors)]  # type: ignore[no-any-return]

    def program(self, kernels: KernelRows) -> Program:
        """Return the program that ``simulated`` simulates."""
        host, of = self._own_rows(kernels), self.rows.of
        external = self.launches.item_external
        floor = self._floor((1.0,), kernels)[0][:, 0]
        if (floor > NEVER).any():
            external = external.copy()
            external[self.rows.starts] = np.maximum(external[self.rows.starts], floor)
        return replace(self.launches, kernel_duration=kernels.duration[of.kernel, 0], item_work=host.work[0, of.item],
                       item_cost=host.cost[0, of.item], item_external=external)

    def _own_rows(self, kernels: KernelRows) -> HostRows:
        """Return the host time without a factor; ``kernels`` has one variant."""
        found = self._unscaled
        return found if not kernels.fed.any() else HostRows(found.work, self.rows.fed.changed(found.cost, kernels.fed))

    @cached_property
    def _unscaled(self) -> HostRows:
        return self._host_rows((1.0,))[0]

    def _host_rows(self, factors: tuple[float, ...]) -> tuple[HostRows, Int64]:
        """Return the host time for each different factor, and the row of it that each variant takes."""
        rows, host = self.rows, self.host
        known, program = np.unique(factors, return_inverse=True)
        work, cost = (np.stack([ns if factor == 1.0 else whole_ns(ns * factor) for factor in known.tolist()])
                      for ns in (host.work[rows.items], host.cost[rows.items]))
        work[:, rows.begins] = 0
        return HostRows(work, cost), program

    def _host_variants(self, factors: tuple[float, ...], kernels: KernelRows) -> HostVariants:
        """Return the variants' host time with a factor each; the last result is kept if kernels do not change it."""
        if kernels.fed.any():
            found, program = self._host_rows(factors)
            cost = self.rows.fed.changed(found.cost[program], kernels.fed)
            return self._order.host_variants(HostRows(found.work[program], cost), np.arange(len(factors)))
        if self._variants is None or self._variants[0] != factors:
            self._variants = factors, self._order.host_variants(*self._host_rows(factors))
        return self._variants[1]

    def _floor(self, factors: tuple[float, ...], kernels: KernelRows) -> Lanes:
        """Return the earliest ends of the copies' first items, ns, [first items, variants]. A rank's cycle is at least
        as long as the work that overlaps it (loading, hidden collectives)."""
        host, repeated, starts = self.host, self.repeated, self.rows.starts
        if not (self._held or kernels.overlapping.any()):
            return [self._free] * -(-len(factors) // LANES)
        floor = np.stack([np.maximum(host.floor * factor, host.workers) for factor in factors], axis=1)
        floor = np.maximum(floor, kernels.overlapping)
        program = repeated.program
        thread = program.item_thread()[starts]
        return lanes(program.thread_start[thread][:, None] + whole_ns(
            repeated.copy_of_item[starts][:, None] * floor[program.thread_rank[thread]]))

    @cached_property
    def _held(self) -> bool:
        """Return whether batches that load in the background, or in worker processes, take any time."""
        return bool(self.host.floor.any() or self.host.workers.any())

    @cached_property
    def _free(self) -> Int64:
        """Return the floors (earliest ends) of first items that nothing holds back, [first items, LANES]."""
        return np.full((len(self.rows.starts), LANES), NEVER)


def _copied_lags(repeated: Repeated, lag: Int64, source: Program) -> Int64:
    """Return the lags of the copies' host-to-host edges, scaled by the edit's factor on the recorded lags."""
    p = repeated.program
    if np.array_equal(lag, source.after_lag):
        return p.after_lag
    # Lags of one program are scaled by one factor, so that each copy's follows from its own.
    total = float(source.after_lag.sum())
    return whole_ns(p.after_lag * (float(lag.sum()) / total if total else 1.0))


def overlapping_masks(scenario: Scenario) -> list[Bool]:
    """Return masks of kernels that overlap the step and take no time of it: background copies, hidden collectives."""
    return [*([input_copies(scenario)] if _loads_in_background(scenario) else []),
            *([collective_rows(scenario)] if scenario.launches.hidden_collectives else [])]


def _loads_in_background(scenario: Scenario) -> bool:
    return scenario.batches.loading is Loading.BACKGROUND


def input_copies(scenario: Scenario) -> Bool:
    """Return which kernels copy batches to the device: from host to device, outside the optimizer."""
    found = []
    for graph in scenario.built.graphs:
        to_device = np.array(["htod" in text.lower().replace(" ", "") for text in graph.strings] or [False], np.bool_)
        phase = np.append(graph.ops.phase, NONE)[graph.kernels.op]
        found.append(to_device[graph.kernels.name] & (graph.kernels.kind == KernelKind.MEMCPY)
                     & (phase != Phase.OPTIMIZER))
    return np.concatenate(found)


def collective_rows(scenario: Scenario) -> Bool:
    """Return which kernels are collectives."""
    return np.concatenate([graph.kernels.kind == KernelKind.COLLECTIVE for graph in scenario.built.graphs])
