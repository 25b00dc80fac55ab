"""The search for the best plan of a decoder on a number of GPUs. Plans that are not possible and plans that do not fit
are reported with the reason. Plans that are provably slower than the best are skipped; the rest are estimated.

Best first: families of plans, then single plans, are taken in the order of their lower bounds (``Bounds``). The search
ends when the next bound is above the slowest wanted plan, so it misses none of the best plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from math import exp, gcd, hypot, inf
from typing import Any

import numpy as np

from graph_predictor.figures import signed_percent
from graph_predictor.request.memory_fit import Fit, StageMemory, fit_of, fit_probability
from kernel_models.collectives import CollectiveModel, Topology
from planner.parallel.corrections import UNCORRECTED, Z80, CorrectionFactors
from planner.parallel.decoder import check_decoder_plan
from planner.parallel.estimate import Estimate, estimate, exchange_us, passes_us
from planner.parallel.frameworks import PLAIN, FrameworkProfile
from planner.parallel.layer_costs import BlockKernels, LayerCosts
from planner.parallel.memory import MemoryPoint, fullest_of, stage_memory, state_of, timeline
from planner.parallel.plan_costs import (
    CallName,
    PlanCosts,
    block_part,
    costs_of_layers,
    costs_of_plan,
    exchanges_of,
)
from planner.parallel.space import ANY, Framework, PlanFamily, State, families, frameworks_of, layouts
from planner.parallel.stages import recomputed, spread
from planner.parallel.work import NOTHING, Exchange
from tracer.arrays import Float64
from tracer.device_memory import MemoryAccount
from tracer.parallel_plan import MOST_TASKS, ParallelPlan, PlanError, Recomputation, Schedule, Sharding, slowest_of
from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.transformer import TransformerShape


@dataclass(frozen=True, slots=True)
class Relief:
    """One change of a plan that needs less memory.

    Attributes:
        change: description of the change.
        plan: the plan after the change.
        frees_bytes: decrease of the fullest stage's memory.
        fits: whether the changed plan is expected to fit.
        probability: probability that it fits.
        time_us: time of its step if it fits; 0 if unknown.
    """

    change: str
    plan: ParallelPlan
    frees_bytes: float
    fits: bool
    probability: float = 0.0
    time_us: float = 0.0


def relief(plan: ParallelPlan, shape: TransformerShape, pieces: LayerCosts, topology: Topology,
           limit_bytes: float, step_us: Callable[[ParallelPlan], float] = lambda plan: 0.0,
           wanted: Framework | None = None) -> list[Relief]:
    """Return single changes of a plan that free memory. Sufficient changes come first, the fastest first, and among
    equally fast changes the smallest.

    All changes keep the number of GPUs and sequences. Changes are left out if the model cannot be divided by them, or
    if no framework can run them although one can run the plan.
    """
    needs = fullest_of(plan, shape, pieces).account.total
    found = []
    had = frameworks_of(plan, shape, wanted)
    for change, values in _changes(plan, max(sum(chunk) for stage in spread(plan, shape) for chunk in stage)):
        try:
            other = replace(plan, **values)
            check_decoder_plan(other, shape, topology)
            fullest = fullest_of(other, shape, pieces)
            total = fullest.account.total
            if total >= needs or (had and not frameworks_of(other, shape, wanted)):
                continue
            fits = total <= limit_bytes
            found.append(Relief(change, other, needs - total, fits, fit_probability(fullest, limit_bytes),
                                step_us(other) if fits else 0.0))
        except (PlanError, ShapeOnlyError):
            continue
    return sorted(found, key=lambda each: (not each.fits, each.time_us, each.frees_bytes if each.fits else
                                           -each.frees_bytes))


def _changes(plan: ParallelPlan, blocks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield possible changes, each in words and as fields of the plan; a chunk has ``blocks`` blocks."""
    if plan.samples % 2 == 0:
        yield "micro-batches half as large", {"microbatch": plan.samples // 2, "microbatches": 2 * plan.passes}
    if plan.schedule is not Schedule.ZERO_BUBBLE:
        for kind, name in ((Recomputation.OPERATORS, "all but what torchtitan's op keeps"),
                           (Recomputation.FULL, "whole blocks")):
            if plan.recompute is not kind:
                yield f"recomputing {name}", {
                    "recompute": kind, "recompute_layers": None, "recompute_modules": ()}
        if not plan.recompute.blocks:
            for some in sorted({round(blocks * part) for part in (0.25, 0.5, 0.75)} - {0, blocks}):
                yield f"recomputing {some} of {blocks} blocks of a chunk", {
                    "recompute": Recomputation.FULL, "recompute_layers": some, "recompute_modules": ()}
    if plan.dp * plan.cp > 1 and plan.sharding < Sharding.PARAMETERS:
        for sharding, name in ((Sharding.OPTIMIZER, "the optimizer's state"), (Sharding.GRADIENTS, "gradients too"),
                               (Sharding.PARAMETERS, "parameters too")):
            if sharding > plan.sharding:
                yield f"sharing {name} among replicas (ZeRO {int(sharding)})", {"sharding": sharding}
    if not plan.offload_optimizer:
        yield "the optimizer's state in the hosts' memory", {"offload_optimizer": True}
    if plan.tp > 1 and not plan.sequence_parallel:
        yield "sequence parallelism", {"sequence_parallel": True}
    if plan.dp % 2 == 0 and (plan.dp // 2) % plan.replicate == 0:
        half = {"dp": plan.dp // 2, "microbatches": 2 * plan.passes, "microbatch": plan.samples}
        yield f"tp={2 * plan.tp} in place of half of the replicas", {
            **half, "tp": 2 * plan.tp, "sequence_parallel": True}
        yield f"cp={2 * plan.cp} in place of half of the replicas", {**half, "cp": 2 * plan.cp}
        yield f"pp={2 * plan.pp} in place of half of the replicas", {**half, "pp": 2 * plan.pp}


class Bounds:
    """Lower bounds on the step times of a decoder's plans. The work of equal chunks is computed once for all plans.

    In any schedule the first micro-batch passes the stages before stage s, then s does all its work, and its last
    backward goes back through the stages before it:

        step ≥ max over s of  Σ (i < s) (forward + gradients of activations of one micro-batch on i) + all work of s

    Zero-bubble stages do the rest of their weight gradients while their last backward goes back. Transfers, data
    parallelism's gradients and parameters, the optimizer and other waits are left out.
    """

    def __init__(self, shape: TransformerShape, pieces: LayerCosts, collectives: CollectiveModel,
                 rates: CorrectionFactors) -> None:
        self._shape, self._pieces, self._collectives, self._rates = shape, pieces, collectives, rates
        self._exchanges: dict[tuple[object, ...], Mapping[CallName, Exchange]] = {}
        self._floors: dict[tuple[object, ...], tuple[Float64, Float64]] = {}
        self._loads: dict[tuple[object, ...], PlanCosts] = {}
        self._stages: dict[tuple[object, ...], tuple[float, float]] = {}

    def least_us(self, plan: ParallelPlan) -> float:
        """Return a lower bound of a step's time, µs."""
        per_pass, ahead = self._of_stages(plan)
        return self._whole(per_pass * plan.passes + ahead, plan)

    def floor_us(self, plan: ParallelPlan) -> float:
        """Return a weaker lower bound, µs, without tracing a piece. It counts the larger of two: blocks' linear layers
        and the collectives they wait for, or the host's launches of routed experts."""
        counts = np.array(spread(plan, self._shape), np.float64)
        forward, backward = ((counts @ each)[..., 0].max(axis=0) for each in self._floor(plan))
        through = forward[:, 0] + backward[:, 0] * (plan.schedule is not Schedule.ZERO_BUBBLE)
        busy = (forward + backward).sum(axis=1) * plan.passes
        return self._whole(float((busy + np.cumsum(through) - through).max()), plan)

    def _whole(self, us: float, plan: ParallelPlan) -> float:
        """Return a step's bound with slow GPUs, the fixed time and residuals added to its stages' work."""
        rates = self._rates
        least = us * (1 + rates.jitter * slowest_of(plan.world_size)) + rates.step_us
        return least if rates.residuals is None else least * exp(rates.residuals.least)

    def _floor(self, plan: ParallelPlan) -> tuple[Float64, Float64]:
        """Return lower bounds of a block's forward and backward by kind, µs, each [device or host, 1, kind, 1]."""
        key = self._key(plan)
        if key not in self._floors:
            part, rates, exchanges = block_part(plan, plan.samples), self._rates, self._exchanged(plan)
            kernels = BlockKernels.of(plan)
            waits = ("block",) if plan.expert_overlap else ("block", "experts")
            host = [rates.host_us * kernels.least_launches(kind) for kind in self._shape.kinds]
            passes = []
            for which, times in (("forward", 1.0), ("backward", 2.0)):
                device = [times * rates.products * self._pieces.least_products_us(kind, part) + sum(
                    exchange_us(exchanges.get((row, f"{what} {which}"), NOTHING), rates) for what in waits)
                    for row, kind in enumerate(self._shape.kinds)]
                passes.append(np.array([device, host])[:, None, :, None])
            self._floors[key] = passes[0], passes[1]
        return self._floors[key]

    def _of_stages(self, plan: ParallelPlan) -> tuple[float, float]:
        """Return the deciding stage's work for each micro-batch, and the time before and after that work, µs."""
        key = (self._key(plan), plan.pp, plan.chunks, plan.recompute, plan.recompute_layers, plan.first_layers,
               plan.last_layers, plan.embedding_layer, plan.loss_layer, plan.balanced, plan.passes,
               plan.schedule is Schedule.ZERO_BUBBLE)
        if key not in self._stages:
            costs = replace(self._within(plan), plan=replace(plan, sharding=Sharding.NONE, replicate=1),
                            counts=spread(plan, self._shape), recomputed=recomputed(plan, self._shape))
            forward, backward, weights = passes_us(costs, self._rates)
            busy = (forward + backward).sum(axis=1)
            back = backward[:, 0] - (0.0 if weights is None else weights[:, 0])
            best, before, after = (-1.0, 0.0), 0.0, 0.0
            for stage in range(plan.pp):
                # A stage that delays weight gradients does them while its last passes go back.
                late = 0.0 if weights is None else min(stage, plan.passes * plan.chunks) * float(weights[stage].max())
                best = max(best, (float(busy[stage]), before + max(after - late, 0.0)),
                           key=lambda each: each[0] * plan.passes + each[1])
                before, after = before + float(forward[stage, 0]), after + float(back[stage])
            self._stages[key] = best
        return self._stages[key]

    def _key(self, plan: ParallelPlan) -> tuple[object, ...]:
        return (plan.tp, plan.cp, plan.ep, plan.etp, plan.sequence_parallel, plan.tensor_overlap, plan.samples,
                plan.overlap)

    def _within(self, plan: ParallelPlan) -> PlanCosts:
        """Return the costs of one stage without replicas; its layers cost the same as the plan's."""
        key = self._key(plan)
        if key not in self._loads:
            self._loads[key] = costs_of_layers(_alone(plan), self._shape, self._pieces, self._exchanged(plan))
        return self._loads[key]

    def _exchanged(self, plan: ParallelPlan) -> Mapping[CallName, Exchange]:
        """Return the collectives of one stage without replicas."""
        key = self._key(plan)
        if key not in self._exchanges:
            self._exchanges[key] = exchanges_of(_alone(plan), self._shape, self._collectives)
        return self._exchanges[key]


def _alone(plan: ParallelPlan) -> ParallelPlan:
    """Return a plan of one stage and as few replicas as the experts need, otherwise like ``plan``."""
    return ParallelPlan(
        dp=plan.ep // gcd(plan.ep, plan.cp * plan.tp // plan.expert_tp), tp=plan.tp, cp=plan.cp, ep=plan.ep,
        etp=plan.etp, microbatch=plan.samples, overlap=plan.overlap, sequence_parallel=plan.sequence_parallel,
        tensor_overlap=plan.tensor_overlap, recompute=Recomputation.NONE)


BEST = 10
"""Number of best plans that a search certainly finds, if there are that many."""
MOST_SHOWN_TASKS = 4096
"""Most tasks of a plan for which memory over time is computed."""
REACH = 1.05
"""The search finds all plans up to this multiple of the fastest step, because some of them need less memory."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A feasible plan: its estimate, the memory of its fullest stage, frameworks that can run it, and whether and how
    probably it fits."""

    estimate: Estimate
    memory: MemoryAccount
    frameworks: tuple[Framework, ...] = ()
    fit: Fit = Fit.FITS
    probability: float = 1.0

    @property
    def plan(self) -> ParallelPlan:
        """The plan."""
        return self.estimate.plan


@dataclass(slots=True)
class Refused:
    """Plans refused for one reason: their number, and an example. Plans of sizes by which the model cannot be divided
    count as one plan. If memory is the reason, the example is the plan that needs least, ``least_bytes``; else the
    first plan."""

    reason: str
    example: str
    count: int = 0
    least_bytes: float | None = None

    @property
    def such_as(self) -> str:
        """Describe the example, with its memory if that is the reason."""
        needs = f", which needs {self.least_bytes / 1e9:,.1f} GB" if self.least_bytes else ""
        return self.example + needs + (", the least of these" if needs and self.count > 1 else "")


@dataclass
class Found:
    """The result of a search.

    Attributes:
        plans: feasible plans, the fastest first.
        refused: reasons why other plans are not possible, with the number of plans.
        relief: changes that would let the single requested plan fit; if no plan fits, for the plan of least memory.
        needs, needs_us: for that plan: memory of its fullest stage, and its step's time if it fitted.
        limit_bytes: memory of a device.
        stages: for a single requested plan: the memory of each stage, and that memory over the step.
        slower: number of plans that were not estimated, because none takes less than ``slower_us``; whether they fit is
            unknown.
    """

    plans: list[Ranked] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    slower: int = 0
    slower_us: float = 0.0
    relief: list[Relief] = field(default_factory=list)
    needs: StageMemory | None = None
    needs_us: float = 0.0
    limit_bytes: float = 0.0
    stages: list[tuple[StageMemory, list[MemoryPoint]]] = field(default_factory=list)

    @property
    def considered(self) -> int:
        """Number of all plans."""
        return len(self.plans) + sum(each.count for each in self.refused) + self.slower


def search(shape: TransformerShape, gpus: int, global_batch: int, pieces: LayerCosts, collectives: CollectiveModel, *,
           memory_limit: float | None = None, rates: CorrectionFactors = UNCORRECTED,
           framework: Framework | None = None, best: int | None = BEST, reach: float = REACH,
           profile: FrameworkProfile = PLAIN) -> Found:
    """Estimate every plan that is possible, fits and may be among the best.

    Args:
        memory_limit: usable bytes of a device; by default all its memory.
        framework: only plans of this framework.
        best: number of plans wanted; ``None`` for all that are possible and fit.
        reach: plans up to this multiple of the fastest plan's time are wanted too.
        profile: the framework whose kernels and schedule are assumed; ``pieces`` and ``rates`` must belong to it.

    Raises:
        PlanError: the cluster is too small, or no plan can split the batch.
    """
    collectives.check_fits(gpus)
    job = _Search(shape, pieces, collectives, memory_limit, rates, best, reach, wanted=framework)
    for layout in layouts(shape, gpus, global_batch):
        node = collectives.topology.node.gpus
        own = families(layout, shape, global_batch, framework, node=node, profile=profile)
        try:
            check_decoder_plan(layout.usual, shape, collectives.topology)
        except PlanError as error:
            if next(own, None) is not None:
                job.refuse(error, layout.usual)
            continue
        for family in own:
            job.add(family)
    found = job.run()
    least = min((each for each in found.refused if each.least_bytes), key=lambda each: each.least_bytes or inf,
                default=None)
    if not found.plans and least is not None:
        job.relieve(ParallelPlan.parse(least.example))
    if not found.considered:
        raise PlanError(f"A batch of {global_batch:,} sequences cannot be split over {gpus:,} GPUs by any plan of at "
                        f"most {MOST_TASKS:,} micro-batches"
                        + (f" that {framework.value} has" if framework else "")
                        + "; choose a batch that shares divisors with it.")
    return found


def price_plan(plan: ParallelPlan, shape: TransformerShape, pieces: LayerCosts, collectives: CollectiveModel, *,
               memory_limit: float | None = None, rates: CorrectionFactors = UNCORRECTED,
               framework: Framework | None = None) -> Found:
    """Estimate or refuse one plan; the result has the form of a search's."""
    job = _Search(shape, pieces, collectives, memory_limit, rates, None, 1.0, named=True, wanted=framework)
    try:
        check_decoder_plan(plan, shape, collectives.topology)
        job.look_at(plan)
    except PlanError as error:
        job.refuse(error, plan)
        return job.run()
    found = job.run()
    few = plan.pp * plan.passes * plan.chunks <= MOST_SHOWN_TASKS
    found.stages = [(stage_memory(plan, shape, pieces, stage), timeline(plan, shape, pieces, stage) if few else [])
                    for stage in range(plan.pp)]
    if not found.plans:
        job.relieve(plan)
    return found


class _Search:
    """State of a search: the plans found so far, and the families and plans left, ordered by lower bound."""

    def __init__(self, shape: TransformerShape, pieces: LayerCosts, collectives: CollectiveModel,
                 memory_limit: float | None, rates: CorrectionFactors, best: int | None, reach: float,
                 named: bool = False, wanted: Framework | None = None) -> None:
        self._shape, self._pieces, self._collectives, self._rates = shape, pieces, collectives, rates
        self.limit_bytes = memory_limit if memory_limit is not None else pieces.device.memory_gb * 1e9
        self._best, self._reach, self._named = best, reach, named
        self._wanted, self._asked = wanted if wanted not in ANY else None, wanted
        self._bounds = Bounds(shape, pieces, collectives, rates)
        self._left: list[tuple[float, int, PlanFamily | ParallelPlan, bool]] = []  # last: whether pieces were traced
        self._order = count()
        self._states: dict[tuple[object, ...], float] = {}
        self._unmeasured: dict[str, list[tuple[float, int, PlanFamily, State]]] = {}
        self._times: list[float] = []  # negated, so that the heap's first is the slowest of the best
        self._fastest = float("inf")
        self._found = Found()
        self._reasons: dict[str, Refused] = {}

    def add(self, family: PlanFamily) -> None:
        """Add a family of plans to those left, by its lower bound."""
        first = family.least
        try:
            check_decoder_plan(first, self._shape, self._collectives.topology)
            bound = self._bounds.floor_us(first)
        except PlanError as error:
            self.refuse(error, first, len(family.states))
            return
        heapq.heappush(self._left, (bound, next(self._order), family, False))

    def run(self) -> Found:
        """Look at plans until no other plan can be among the best."""
        while self._left and self._left[0][0] <= self._worst:
            bound, _, each, traced = heapq.heappop(self._left)
            if isinstance(each, ParallelPlan):
                self.look_at(each)
                continue
            if not traced:
                # Its bound was the one without traced pieces; most families never get further.
                self._bound(bound, each)
                continue
            for state in each.states:
                plan = each.plan(state)
                heapq.heappush(self._left, (max(bound, self._bounds.least_us(plan)), next(self._order), plan, True))
        self._find_least()
        found = self._found
        if self._left:
            found.slower_us = self._left[0][0]
            found.slower = sum(1 if isinstance(each, ParallelPlan) else len(each.states)
                               for _, _, each, _ in self._left)
        # Of plans that take the same time, the plan with the least memory comes first.
        found.plans.sort(key=lambda each: (each.estimate.time_us, each.memory.total))
        found.refused = sorted(self._reasons.values(), key=lambda each: -each.count)
        return found

    def _bound(self, floor: float, family: PlanFamily) -> None:
        """Add a family again with its better bound, without the plans whose model state alone does not fit."""
        kept = []
        known: dict[tuple[Sharding, int], tuple[float, str | None]] = {}  # equal for all recomputation
        for state in family.states:
            if state[:2] not in known:
                held = self._state_of(family.plan(state))
                known[state[:2]] = held, MemoryAccount(parameters=held).lacking(
                    self.limit_bytes, self._pieces.device.name)
            held, lacking = known[state[:2]]
            if lacking is None:
                kept.append(state)
                continue
            if lacking not in self._reasons:
                self.refuse(PlanError(lacking), family.plan(state), 0)
            self._reasons[lacking].count += 1
            self._unmeasured.setdefault(lacking, []).append((held, next(self._order), family, state))
        if not kept:
            return
        family = replace(family, states=tuple(kept))
        try:
            least = self._bounds.least_us(family.least)
        except (PlanError, ShapeOnlyError) as error:
            self.refuse(error, family.least, len(kept))
            return
        heapq.heappush(self._left, (max(floor, least), next(self._order), family, True))

    def _state_of(self, plan: ParallelPlan) -> float:
        """Return a lower bound of the fullest stage's memory: the bytes of its model state."""
        key = plan.dp, plan.tp, plan.pp, plan.cp, plan.ep, plan.etp, plan.chunks, plan.sharding, plan.replicate
        if key not in self._states:
            self._states[key] = max(state_of(plan, self._shape, stage).total for stage in {0, plan.pp - 1})
        return self._states[key]

    def _find_least(self) -> None:
        """Find the plan that needs least memory, including plans that were refused for their model state."""
        for reason, left in self._unmeasured.items():
            heapq.heapify(left)
            refused = self._reasons[reason]
            while left and left[0][0] < (refused.least_bytes or inf):
                _, _, family, state = heapq.heappop(left)
                plan = family.plan(state)
                needs = fullest_of(plan, self._shape, self._pieces).account.total
                if needs < (refused.least_bytes or inf):
                    refused.least_bytes, refused.example = needs, str(plan)

    def look_at(self, plan: ParallelPlan) -> None:
        """Estimate a possible plan, if it fits."""
        fullest = fullest_of(plan, self._shape, self._pieces)
        memory, fit = fullest.account, fit_of(fullest, self.limit_bytes)
        lacking = memory.lacking(self.limit_bytes, self._pieces.device.name)
        # A named plan is refused only if it certainly does not fit; other plans must be expected to fit.
        if lacking is not None and (fit is Fit.NO or not self._named):
            self.refuse(PlanError(lacking), plan, needs=memory.total)
            return
        found = estimate(costs_of_plan(plan, self._shape, self._pieces, self._collectives), self._rates)
        self._found.plans.append(Ranked(found, memory, frameworks_of(plan, self._shape, self._wanted), fit,
                                        fit_probability(fullest, self.limit_bytes)))
        self._fastest = min(self._fastest, found.time_us)
        if self._best is not None:
            heapq.heappush(self._times, -found.time_us)
            if len(self._times) > self._best:
                heapq.heappop(self._times)

    def relieve(self, plan: ParallelPlan) -> None:
        """Record what a plan that does not fit needs, and which changes would make it fit."""
        def step_us(plan: ParallelPlan) -> float:
            return estimate(costs_of_plan(plan, self._shape, self._pieces, self._collectives), self._rates).time_us

        found = self._found
        found.needs, found.needs_us = fullest_of(plan, self._shape, self._pieces), step_us(plan)
        found.limit_bytes = self.limit_bytes
        found.relief = relief(plan, self._shape, self._pieces, self._collectives.topology, self.limit_bytes, step_us,
                              self._asked)

    def refuse(self, error: Exception, plan: ParallelPlan, number: int = 1, needs: float | None = None) -> None:
        """Count plans as refused for a reason; ``needs`` is the memory of a plan that does not fit, bytes."""
        refused = self._reasons.get(reason := str(error))
        if refused is None:
            refused = self._reasons[reason] = Refused(reason, str(plan))
        refused.count += number
        if needs is not None and needs < (refused.least_bytes or inf):
            refused.least_bytes, refused.example = needs, str(plan)

    @property
    def _worst(self) -> float:
        """Time above which no plan is wanted, µs."""
        if self._best is None or len(self._times) < self._best:
            return float("inf")
        return max(-self._times[0], self._fastest * self._reach)


PARTS = {"arithmetic": ("products",), "memory traffic": ("others", "optimizer"), "host": ("host", "fixed"),
         "exposed communication": ("layers", "data"), "pipeline bubble": ("pipeline",), "slowest GPU": ("stragglers",)}
"""Fields of an ``Estimate`` for each part of a step that reports name; together the parts are the step."""
REPEATED = 0.005
"""Relative difference between steps of one plan. In SimuMax's B200 jobs a micro-batch takes 0.5 to 4% longer in steps
of 32 than in steps of 8."""
LEAST_SHARE = 0.1
"""Least share of the sum of all differences that a part must have to be named."""


def parts_of(estimate: Estimate) -> dict[str, float]:
    """Return the parts of a step by name, µs."""
    return {name: float(sum(getattr(estimate, each) for each in parts)) for name, parts in PARTS.items()}


def differences(first: Estimate, second: Estimate) -> dict[str, float]:
    """Return how much longer each part takes in the second plan, µs."""
    one, two = parts_of(first), parts_of(second)
    return {name: two[name] - one[name] for name in PARTS}


def unsure_us(first: Estimate, second: Estimate) -> float:
    """Return the 80% half-width of the difference between two plans' times, µs.

    The error of work that both plans do cancels. Work that one plan does in addition keeps the relative error of its
    kind; kinds are independent. Waits for other stages and GPUs have the relative error of products.
    """
    by, spreads = differences(first, second), (first.spreads, second.spreads)
    products, others, collectives, host = (max(getattr(each, name) for each in spreads) for name in (
        "products", "others", "collectives", "host"))
    waits = abs(by["pipeline bubble"]) + abs(by["slowest GPU"])
    return Z80 * hypot(products * (abs(by["arithmetic"]) + waits), others * by["memory traffic"],
                       collectives * by["exposed communication"], host * by["host"])


def tied(first: Estimate, second: Estimate) -> bool:
    """Return whether two plans' times differ by no more than the difference's uncertainty, or than runs of one plan."""
    return abs(second.time_us - first.time_us) <= max(unsure_us(first, second), REPEATED * first.time_us)


def separation(first: Estimate, second: Estimate) -> str:
    """Describe in a line what separates a plan from a faster one: the parts that differ most, in ms."""
    by = differences(first, second)
    every = sum(abs(us) for us in by.values())
    told = sorted((name for name, us in by.items() if every and abs(us) >= LEAST_SHARE * every),
                  key=lambda name: -abs(by[name]))
    parts = ", ".join(f"{abs(by[name]) / 1e3:,.3g} ms {'more' if by[name] > 0 else 'less'} {name}" for name in told)
    longer = second.time_us / first.time_us - 1 if first.time_us else 0.0
    return f"{signed_percent(longer)}: {parts or 'nothing'}"


def front(plans: Iterable[Ranked]) -> list[Ranked]:
    """Return the Pareto front of plans, fastest first: no other plan is as good in time of a sequence, memory of a
    device and GPUs. A step costs GPUs × time, so the cheapest plans are in the front."""
    ordered = sorted(plans, key=_figures)
    kept: list[Ranked] = []
    for each in ordered:
        if not any(all(a <= b for a, b in zip(_figures(other), _figures(each), strict=True)) for other in kept):
            kept.append(each)
    return kept


def _figures(each: Ranked) -> tuple[float, float, int]:
    return each.estimate.time_us / each.plan.global_batch, each.memory.total, each.plan.world_size
