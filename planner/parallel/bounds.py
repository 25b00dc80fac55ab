"""A lower bound on a plan's step: its stages' own work and the collectives within it, in the best order there is.

Whatever a schedule does, stage s cannot begin before the first micro-batch has come through the stages before it, then
has all its own work to do, and its last backward has yet to go back through them:

    step ≥ max over s of  Σ (i < s) (forward + gradients of activations of one micro-batch on i) + all work of s

What the estimate adds to it is left out: transfers, gradients and parameters of replicas, the optimizer, other waits.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, gcd

from kernel_models.collectives import CollectiveModel
from planner.parallel.estimate import Rates, slowest_of, stretches
from planner.parallel.loads import Exchange, Loads, loads_of
from planner.parallel.pieces import LayerPieces
from planner.parallel.stages import recomputed, spread
from tracer.parallel_plan import ParallelPlan, Recomputation, Schedule, Sharding
from tracer.shape_only.transformer import TransformerShape


class Bounds:
    """Lower bounds on plans of one decoder. Work of equal chunks is added up once, however many plans have them."""

    def __init__(self, shape: TransformerShape, pieces: LayerPieces, collectives: CollectiveModel,
                 rates: Rates) -> None:
        self._shape, self._pieces, self._collectives, self._rates = shape, pieces, collectives, rates
        self._loads: dict[tuple[object, ...], Loads] = {}
        self._stages: dict[tuple[object, ...], tuple[float, float]] = {}

    def least_us(self, plan: ParallelPlan) -> float:
        """Return what a step takes at least, µs."""
        per_pass, ahead = self._of_stages(plan)
        rates = self._rates
        least = (per_pass * plan.passes + ahead) * (1 + rates.jitter * slowest_of(plan.world_size)) + rates.step_us
        return least if rates.likeness is None else least * exp(rates.likeness.least)

    def _of_stages(self, plan: ParallelPlan) -> tuple[float, float]:
        """Work of the stage that decides for each micro-batch, and what passes before and after it."""
        key = (self._key(plan), plan.pp, plan.chunks, plan.recompute, plan.recompute_layers, plan.first_layers,
               plan.last_layers, plan.embedding_layer, plan.loss_layer, plan.passes,
               plan.schedule is Schedule.ZERO_BUBBLE)
        if key not in self._stages:
            loads = replace(self._within(plan), plan=replace(plan, sharding=Sharding.NONE, replicate=1),
                            counts=spread(plan, self._shape), again=recomputed(plan, self._shape))
            forward, backward, weights = stretches(loads, self._rates)
            busy = (forward + backward).sum(axis=1)
            first = forward[:, 0] + backward[:, 0] - (0.0 if weights is None else weights[:, 0])
            best, before = (-1.0, 0.0), 0.0
            for stage in range(plan.pp):
                best = max(best, (float(busy[stage]), before), key=lambda each: each[0] * plan.passes + each[1])
                before += float(first[stage])
            self._stages[key] = best
        return self._stages[key]

    def _key(self, plan: ParallelPlan) -> tuple[object, ...]:
        return (plan.tp, plan.cp, plan.ep, plan.etp, plan.sequence_parallel, plan.tensor_overlap, plan.samples,
                plan.overlap)

    def _within(self, plan: ParallelPlan) -> Loads:
        """Return the loads of one stage without replicas: those of its layers are the plan's."""
        key = self._key(plan)
        if key not in self._loads:
            dp = plan.ep // gcd(plan.ep, plan.cp * plan.tp // plan.expert_tp)
            alone = ParallelPlan(
                dp=dp, tp=plan.tp, cp=plan.cp, ep=plan.ep, etp=plan.etp, microbatch=plan.samples, overlap=plan.overlap,
                sequence_parallel=plan.sequence_parallel, tensor_overlap=plan.tensor_overlap,
                recompute=Recomputation.NONE)
            found = loads_of(alone, self._shape, self._pieces, self._collectives)
            self._loads[key] = replace(found, reduce=(Exchange(),), gather=(Exchange(),), transfer=())
        return self._loads[key]
