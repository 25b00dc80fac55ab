"""The search for the best plan of a decoder on a number of GPUs: plans that cannot be and those that do not fit are
named with the reason, those that are provably slower than the best are left out, and the rest are estimated.

Best first: families of plans, then plans, come in the order of their lower bounds (``bounds``), and the search ends
when the next bound is above the slowest plan that is wanted. Nothing that would be among the best can be missed so.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from graph_predictor.request.memory_fit import Fit, StageMemory, fit_of
from kernel_models.collectives import CollectiveModel
from planner.parallel.bounds import Bounds
from planner.parallel.decoder import check_decoder_plan
from planner.parallel.estimate import Estimate, Rates, estimate
from planner.parallel.frameworks import Framework, frameworks_of
from planner.parallel.loads import loads_of
from planner.parallel.memory import fullest_of, stage_memory
from planner.parallel.memory_timeline import MemoryPoint, timeline
from planner.parallel.pieces import LayerPieces
from planner.parallel.relief import Relief, relief
from planner.parallel.space import PlanFamily, families, layouts
from tracer.device_memory import MemoryAccount
from tracer.parallel_plan import MOST_TASKS, ParallelPlan, PlanError
from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.transformer import TransformerShape

BEST = 10
"""Plans that are certainly among those found, if there are so many."""
MOST_SHOWN_TASKS = 4096
"""Tasks of the largest plan whose memory over time is given."""
REACH = 1.05
"""All plans are found that take up to so many times as long as the fastest: what trades time for memory is of use."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A feasible plan, the memory of its fullest stage, the frameworks that have it, and whether it surely fits."""

    estimate: Estimate
    memory: MemoryAccount
    frameworks: tuple[Framework, ...] = ()
    fit: Fit = Fit.FITS

    @property
    def plan(self) -> ParallelPlan:
        """The plan."""
        return self.estimate.plan


@dataclass(slots=True)
class Refused:
    """Plans that cannot be, for one reason: how many, and the first of them. Sizes that the model cannot be divided by
    count as one plan, whatever else it would be."""

    reason: str
    example: str
    count: int = 0


@dataclass(slots=True)
class Found:
    """The result of a search.

    Attributes:
        plans: feasible ones, the fastest first.
        refused: why others are not among them.
        relief: what would have to change for the one plan that was asked for, where it does not fit.
        stages: of the one plan that was asked for, the memory of each stage, and over its step.
        slower: plans that were not estimated, for none of them takes less than ``slower_us``; whether they fit is not
            known.
    """

    plans: list[Ranked] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    slower: int = 0
    slower_us: float = 0.0
    relief: list[Relief] = field(default_factory=list)
    stages: list[tuple[StageMemory, list[MemoryPoint]]] = field(default_factory=list)

    @property
    def considered(self) -> int:
        """Plans in all."""
        return len(self.plans) + sum(each.count for each in self.refused) + self.slower


def search(shape: TransformerShape, gpus: int, global_batch: int, pieces: LayerPieces, collectives: CollectiveModel, *,
           memory_limit: float | None = None, rates: Rates | None = None, framework: Framework | None = None,
           best: int | None = BEST, reach: float = REACH, tick: Callable[[], None] = lambda: None) -> Found:
    """Estimate every plan that can be, fits and may be among the best.

    Args:
        memory_limit: bytes of a device; by default all it has.
        framework: the only one whose plans are wanted.
        best: how many plans are wanted; ``None`` for all that can be and fit.
        reach: plans of up to so many times the fastest one's time are wanted too.
        tick: called once a plan that is looked at.

    Raises:
        PlanError: the cluster is too small, or the batch can be split by no number of replicas.
    """
    collectives.check_fits(gpus)
    job = _Search(shape, pieces, collectives, memory_limit, rates or Rates(), best, reach, tick)
    for layout in layouts(shape, gpus, global_batch):
        node = collectives.topology.node.gpus
        own = families(layout, shape, global_batch, framework, node=node)
        try:
            check_decoder_plan(layout.usual, shape, collectives.topology)
        except PlanError as error:
            if next(own, None) is not None:
                job.refuse(error, layout.usual)
            continue
        for family in own:
            job.add(family)
    found = job.run()
    if not found.considered:
        raise PlanError(f"A batch of {global_batch:,} sequences cannot be split over {gpus:,} GPUs by any plan of at "
                        f"most {MOST_TASKS:,} micro-batches"
                        + (f" that {framework.value} has" if framework else "")
                        + "; choose a batch that shares divisors with it.")
    return found


def price_plan(plan: ParallelPlan, shape: TransformerShape, pieces: LayerPieces, collectives: CollectiveModel, *,
               memory_limit: float | None = None, rates: Rates | None = None) -> Found:
    """One plan as a search that found it or refused it."""
    job = _Search(shape, pieces, collectives, memory_limit, rates or Rates(), None, 1.0, lambda: None, named=True)
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
        found.relief = relief(plan, shape, pieces, collectives.topology, job.limit_bytes)
    return found


class _Search:
    """A search: the plans found so far, and those left to look at, by lower bound."""

    def __init__(self, shape: TransformerShape, pieces: LayerPieces, collectives: CollectiveModel,
                 memory_limit: float | None, rates: Rates, best: int | None, reach: float,
                 tick: Callable[[], None], named: bool = False) -> None:
        self._shape, self._pieces, self._collectives, self._rates = shape, pieces, collectives, rates
        self.limit_bytes = memory_limit if memory_limit is not None else pieces.device.memory_gb * 1e9
        self._best, self._reach, self._tick, self._named = best, reach, tick, named
        self._bounds = Bounds(shape, pieces, collectives, rates)
        self._left: list[tuple[float, int, PlanFamily | ParallelPlan]] = []
        self._order = count()
        self._times: list[float] = []  # negative: the slowest of the best is the heap's first
        self._fastest = float("inf")
        self._found = Found()
        self._reasons: dict[str, Refused] = {}

    def add(self, family: PlanFamily) -> None:
        """Put a family of plans on the list."""
        first = family.least
        try:
            check_decoder_plan(first, self._shape, self._collectives.topology)
            bound = self._bounds.least_us(first)
        except (PlanError, ShapeOnlyError) as error:
            self.refuse(error, first, len(family.states))
            return
        heapq.heappush(self._left, (bound, next(self._order), family))

    def run(self) -> Found:
        """Look at plans until no other can be among the best."""
        while self._left and self._left[0][0] <= self._worst:
            bound, _, each = heapq.heappop(self._left)
            if isinstance(each, ParallelPlan):
                self._tick()
                self.look_at(each)
                continue
            for state in each.states:
                plan = each.plan(state)
                heapq.heappush(self._left, (max(bound, self._bounds.least_us(plan)), next(self._order), plan))
        found = self._found
        if self._left:
            found.slower_us = self._left[0][0]
            found.slower = sum(1 if isinstance(each, ParallelPlan) else len(each.states) for _, _, each in self._left)
        # Of plans that take the same time, the one that needs least memory comes first.
        found.plans.sort(key=lambda each: (each.estimate.time_us, each.memory.total))
        found.refused = sorted(self._reasons.values(), key=lambda each: -each.count)
        return found

    def look_at(self, plan: ParallelPlan) -> None:
        """Estimate a plan that can be, if it fits."""
        fullest = fullest_of(plan, self._shape, self._pieces)
        memory, fit = fullest.account, fit_of(fullest, self.limit_bytes)
        lacking = memory.lacking(self.limit_bytes, self._pieces.device.name)
        # What is named is refused only where it cannot fit; what is looked for must be expected to.
        if lacking is not None and (fit is Fit.NO or not self._named):
            self.refuse(PlanError(lacking), plan)
            return
        found = estimate(loads_of(plan, self._shape, self._pieces, self._collectives), self._rates)
        self._found.plans.append(Ranked(found, memory, frameworks_of(plan, self._shape), fit))
        self._fastest = min(self._fastest, found.time_us)
        if self._best is not None:
            heapq.heappush(self._times, -found.time_us)
            if len(self._times) > self._best:
                heapq.heappop(self._times)

    def refuse(self, error: Exception, plan: ParallelPlan, number: int = 1) -> None:
        """Count plans that cannot be for a reason."""
        reason = str(error)
        if reason not in self._reasons:
            self._reasons[reason] = Refused(reason, str(plan))
        self._reasons[reason].count += number

    @property
    def _worst(self) -> float:
        """Time beyond which no plan is wanted, µs."""
        if self._best is None or len(self._times) < self._best:
            return float("inf")
        return max(-self._times[0], self._fastest * self._reach)
