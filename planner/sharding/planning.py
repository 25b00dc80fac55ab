"""``shard``: the fastest shardings of a model's tables over a cluster, from names as a user writes them.

    foretrace.shard("tables.csv", 16, device="h200-sxm")

``drifted`` compares plans on data that changed: rows are looked up by another distribution, or bags are longer. The
step of an unchanged plan is compared with that of the best plan found for the changed data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from graph_predictor.comm.clusters import cluster_of, measured_file
from graph_predictor.comm.mixing import mixture
from kernel_models.collectives import planned_topology
from kernel_models.device import DeviceSpec, find_device
from kernel_models.profile import DeviceProfile
from planner.sharding.choices import choices_of
from planner.sharding.estimate import ShardedStep, anchored_problem, estimate
from planner.sharding.problem import ShardingPlan, ShardingProblem, own_order
from planner.sharding.search import ShardingSearch, search
from planner.sharding.sources import device_of, sharding_source
from planner.sharding.step import Scores, StepModel, assignment_of
from tracer.cluster.workers import TaskWorkers, ThisProcess
from tracer.lazy import pandas
from tracer.lookup_data.plan_file import SHORT_KINDS, ShardingError, ShardKind
from tracer.lookup_data.tables import LOCATIONS, EmbeddingTable
from tracer.shown import Shown, frame_of

BAG_DRIFT = 0.4
"""Standard deviation of the logarithm of a bag length's change: one table in twelve changes by a factor of 2 or more.
An assumption."""


@dataclass(frozen=True, slots=True)
class DataDrift:
    """Changed data for the same tables.

    Attributes:
        name: for reports.
        skew: exponent of every table's Zipf law; ``None`` if unchanged.
        bags: standard deviation of the logarithm of the factor on each table's bag length.
    """

    name: str
    skew: float | None = None
    bags: float = 0.0

    def applied(self, tables: Sequence[EmbeddingTable], seed: int = 0) -> tuple[EmbeddingTable, ...]:
        """Return the tables with the changed data."""
        factors = np.empty(len(tables))
        factors[own_order(tables)] = np.exp(self.bags * np.random.default_rng(seed).standard_normal(len(tables)))
        found = []
        for table, factor in zip(tables, factors.tolist(), strict=True):
            changed = table if self.skew is None else replace(table, skew=self.skew, reuse=(), reuse_lookups=0)
            if self.bags:
                # The distribution of rows stays, so ``reuse`` is kept: it gives the histogram of the longer batch too.
                changed = replace(changed, bag=changed.bag * factor,
                                  longest_bag=math.ceil(changed.longest_bag * factor))
            found.append(changed)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class DriftedStep:
    """Steps of plans on changed data.

    Attributes:
        drift: the change.
        plans_us: step of each plan, µs; infinite if the plan no longer fits the memory.
        best_us: step of the best plan that a search finds for this data, µs.
    """

    drift: DataDrift
    plans_us: tuple[float, ...]
    best_us: float

    @property
    def regret(self) -> float:
        """Return by which share the first plan is slower than the best plan for this data."""
        return self.plans_us[0] / self.best_us - 1.0


def drifted(problem: ShardingProblem, plans: Sequence[ShardingPlan], drift: DataDrift, seed: int = 0) -> DriftedStep:
    """Compute the steps of plans on changed data.

    Raises:
        ShardingError: no sharding of the changed tables fits.
    """
    changed = replace(problem, tables=drift.applied(problem.tables, seed))
    model = StepModel(changed)
    steps = []
    for plan in plans:
        scores = Scores(changed, choices_of(changed, plan.shardings), model)
        standing = scores.standing(assignment_of(plan, scores.choices))
        steps.append(standing.step_us if scores.fits(standing) else math.inf)
    best = search(changed, 1, seed, model=model, prove=False).best[0][0]
    # A given plan may be faster than the result of the new search.
    return DriftedStep(drift, tuple(steps), min([best, *steps]))


TOP, CHECKED = 5, 4
"""Choices: number of shardings that are shown, and how many times that number is estimated in full before selection."""
AS_RECORDED = "as recorded"
"""Name of the baseline with the recorded sharding."""
MOST_DRIFTED = 200
"""Up to this number of tables, plans are also compared on changed data by default."""


@dataclass(frozen=True, repr=False)
class Shardings(Shown):
    """The fastest shardings of a model's tables, and baselines under the same model.

    Attributes:
        problem: the sharding problem.
        name: name of the model.
        plans: the fastest plans, fastest first.
        baselines: by name; ``None`` if a baseline finds no sharding that fits.
        drifted: steps of ``plans`` on changed data.
        proven: whether no other sharding is faster.
        looked_at: number of shardings whose steps were compared.
        notes: assumptions.
    """

    problem: ShardingProblem
    name: str
    plans: tuple[ShardedStep, ...]
    baselines: Mapping[str, ShardedStep | None]
    drifted: tuple[DriftedStep, ...]
    proven: bool
    looked_at: int
    notes: tuple[str, ...]

    def headline(self) -> str:
        """Return the time of the fastest sharding in a line."""
        best = self.plans[0]
        return (f"{len(self.problem.tables):,} tables of {self.name} over {self.problem.ranks} GPUs of "
                f"{self.problem.collectives.topology.name}: {best.time_us / 1e3:,.3f} ms a step "
                f"({best.low_us / 1e3:,.3f} to {best.high_us / 1e3:,.3f})")

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Return tables: plans and baselines, times in ms; and the place of each table in the fastest plan."""
        rows = [_row(f"plan {i + 1}", step) for i, step in enumerate(self.plans)]
        rows += [_row(name, step) for name, step in self.baselines.items() if step is not None]
        best = self.plans[0].plan
        placed = [{"table": table.name, "kind": sharding.kind.value, "location": sharding.location,
                   "ranks": list(sharding.ranks)}
                  for table, sharding in zip(best.tables, best.shardings, strict=True)]
        return {"plans": partial(frame_of, rows), "tables": partial(frame_of, placed)}


def shard(source: str, gpus: int, *, device: str | DeviceSpec | None = None, topology: str | None = None,
          memory: float | None = None, host_memory: float = 0.0, batch: int | None = None, top: int = TOP,
          pinned: Mapping[str, int] | None = None, kinds: Collection[str] = (), skews: Sequence[float] = (),
          preset: str | None = None, settings: Sequence[str] = (), profile: DeviceProfile | None = None,
          comm_profile: str | None = None, comm_choices: str | None = None, pipelined: bool = True,
          fused: bool | None = None, seed: int = 0, step_region: str | None = None,
          workers: TaskWorkers | None = None) -> Shardings:
    """Find the fastest shardings of a model's tables.

    Args:
        source: a file of tables (.csv, .parquet, .json, .toml), a workload with tables, or a trace or capture.
        gpus: number of GPUs of the job.
        device: the GPU: a name, a file, or its figures; by default the device of a recorded source, else
            ``sources.DEFAULT_DEVICE``.
        topology: the cluster; by default the device's usual nodes.
        memory: usable bytes of a device; by default all its memory.
        host_memory: bytes of a node's host for tables; by default none.
        batch: samples of a rank; by default the source's own.
        top: number of plans to return.
        pinned: rank of each table that must lie whole on that rank, by name.
        kinds: kinds of sharding that tables may have (``ShardKind``); all by default.
        skews: exponents of Zipf laws for which the plans are priced again.
        preset, settings: preset and settings of the workload.
        profile: models fitted for the device.
        comm_profile: a file of measured collectives.
        comm_choices: a file of several backends' measured collectives, or "auto": each is done by the best of them.
        pipelined: whether the next batch's indices are exchanged during the dense part.
        fused: whether one kernel looks up a rank's tables and its backward includes the optimizer (FBGEMM). If not,
            table by table with sparse gradients (``nn.EmbeddingBag``). By default as recorded, else fused.
        seed: of the search's random draws.
        step_region: name of the regions that are steps of a trace or capture.
        workers: processes that share the searches for other data, one a call; by default this one.

    Raises:
        ShardingError: the tables do not fit, or a pin or kind is not possible.
        ForetraceError: a name or file is unknown, or cannot be read.
    """
    if gpus < 1:
        raise ShardingError(f"{gpus} GPUs are none; give at least one.")
    spec = device_of(source) if device is None else find_device(device) if isinstance(device, str) else device
    found = sharding_source(source, spec, profile, samples=batch, preset=preset, settings=settings,
                            step_region=step_region)
    collectives = cluster_of(topology, comm_profile, None, comm_choices, lambda: planned_topology(spec, gpus))
    if collectives.mixed:  # exchanges are priced one by one, all with the usual backend
        collectives = replace(collectives, backend=collectives.backends.usual)
    usual = topology is None and measured_file(comm_profile, comm_choices) is None
    allowed = frozenset(ShardKind.of(kind) for kind in kinds) or frozenset(ShardKind)
    problem = ShardingProblem(found.tables, found.samples, gpus, spec, collectives, profile, found.dense, memory,
                              host_memory, allowed, pinned or {}, pipelined=pipelined,
                              fused=found.fused if fused is None else fused)
    anchored = None
    if found.recorded is not None:
        anchored = anchored_problem(problem, found.recorded, usual)
        problem = anchored.problem
    result = search(problem, max(top, 1) * CHECKED, seed)
    baselines = {name: None if known is None else estimate(result.scores, known[1])
                 for name, known in result.baselines.items()}
    if anchored is not None and (own := anchored.own) is not None and problem.anchors.exchanges is not None and (
            own.plan.ranks, own.plan.per_node) == (problem.ranks, problem.per_node):
        baselines[AS_RECORDED] = own
    plans = _fastest(result, baselines, top)
    wanted = [*(DataDrift(f"skew {skew:g}", skew) for skew in skews),
              DataDrift("bag lengths drift", bags=BAG_DRIFT)] if (
        skews or len(found.tables) <= MOST_DRIFTED) else []
    shown = tuple((workers or ThisProcess()).each(
        partial(drifted, problem, [each.plan for each in plans], seed=seed), wanted, name=lambda drift: drift.name))
    mixed = mixture(plans[0].calls, [1.0] * len(plans[0].calls), problem.collectives).sentences() if (
        collectives.mixed and plans) else ()
    return Shardings(problem, found.name, plans, baselines, shown, result.proven, result.looked_at,
                     (*found.notes, *(anchored.notes if anchored is not None else ()), *_notes(problem, result, plans),
                      *mixed))


def _fastest(result: ShardingSearch, baselines: Mapping[str, ShardedStep | None], top: int) -> tuple[
        ShardedStep, ...]:
    """Return the fastest plans of the search and the baselines, without duplicates, each estimated in full."""
    steps = [estimate(result.scores, assignment) for _, assignment in result.best]
    seen = {each.plan.shardings for each in steps}
    for step in baselines.values():
        if step is not None and step.plan.shardings not in seen and _allowed(result.scores.problem, step):
            seen.add(step.plan.shardings)
            steps.append(step)
    return tuple(sorted(steps, key=lambda each: each.time_us)[:top])


def _allowed(problem: ShardingProblem, step: ShardedStep) -> bool:
    return (all(sharding.kind in problem.kinds or table.name in problem.pinned
                for table, sharding in zip(step.plan.tables, step.plan.shardings, strict=True))
            and max(each.total for each in step.memory) <= problem.limit_bytes)


def _notes(problem: ShardingProblem, result: ShardingSearch, plans: Sequence[ShardedStep]) -> list[str]:
    notes = []
    if any(sharding.location != "hbm" for each in plans for sharding in each.plan.shardings):
        notes.append("What tables in the hosts' memory take is a formula that no measurement has tested: the interval "
                     "allows for a factor of 3 more.")
    if not problem.trained:
        notes.append("Tables are only looked up: the step has no gradients.")
    node = find_device(problem.collectives.topology.node.device).name
    if node != problem.device.name:
        notes.append(f"The nodes of the topology have {node}, not {problem.device.name}; their network is taken.")
    if not result.proven:
        notes.append("The search is not exhaustive: a faster sharding may exist.")
    for name, known in result.baselines.items():
        if known is None:
            notes.append(f"The baseline {name} finds no sharding that fits.")
    return notes


def kinds_text(step: ShardedStep) -> str:
    """Return a plan's kinds and locations with their numbers of tables, such as "tw 20, cw 4; uvm_cached 3"."""
    kinds, places = (Counter(column) for column in zip(
        *((sharding.kind, sharding.location) for sharding in step.plan.shardings), strict=True))
    found = ", ".join(f"{SHORT_KINDS[kind]} {kinds[kind]:,}" for kind in ShardKind if kind in kinds)
    far = ", ".join(f"{where} {places[where]:,}" for where in LOCATIONS[1:] if where in places)
    return f"{found}; {far}" if far else found


def _row(name: str, step: ShardedStep) -> dict[str, Any]:
    return {"plan": name, "kinds": kinds_text(step), "step_ms": step.time_us / 1e3, "low_ms": step.low_us / 1e3,
            "high_ms": step.high_us / 1e3, "slowest_compute_ms": float(step.compute_us.max()) / 1e3,
            "communication_ms": step.communication_us / 1e3, "imbalance": step.imbalance,
            "memory_gb": step.fullest.total / 1e9, "host_memory_gb": float(step.host_bytes.sum()) / 1e9,
            "bound": step.bound}
