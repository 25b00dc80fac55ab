"""``relief``: what would have to change for a plan that does not fit: single changes, what each frees, and whether it
is then enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernel_models.collectives import Topology
from planner.parallel.decoder import check_decoder_plan
from planner.parallel.memory import fullest_of
from planner.parallel.pieces import LayerPieces
from tracer.parallel_plan import ParallelPlan, PlanError, Recomputation, Schedule, Sharding
from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.transformer import TransformerShape


@dataclass(frozen=True, slots=True)
class Relief:
    """One change of a plan.

    Attributes:
        change: in words.
        plan: after it.
        frees_bytes: of the fullest stage's memory.
        fits: whether the plan is then expected to fit.
    """

    change: str
    plan: ParallelPlan
    frees_bytes: float
    fits: bool


def relief(plan: ParallelPlan, shape: TransformerShape, pieces: LayerPieces, topology: Topology,
           limit_bytes: float) -> list[Relief]:
    """Single changes of a plan that free memory, those that are enough and free least first.

    All have as many GPUs and sequences; what the model cannot be divided by is left out.
    """
    needs = fullest_of(plan, shape, pieces).account.total
    found = []
    for change, other in _changes(plan):
        try:
            check_decoder_plan(other, shape, topology)
            total = fullest_of(other, shape, pieces).account.total
        except (PlanError, ShapeOnlyError):
            continue
        if total < needs:
            found.append(Relief(change, other, needs - total, total <= limit_bytes))
    return sorted(found, key=lambda each: (not each.fits, each.frees_bytes if each.fits else -each.frees_bytes))


def _changes(plan: ParallelPlan) -> Iterator[tuple[str, ParallelPlan]]:
    for say, values in _values(plan):
        try:
            yield say, replace(plan, **values)  # type: ignore[arg-type]
        except PlanError:
            continue


def _values(plan: ParallelPlan) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield what may change, in words and in fields."""
    if plan.samples % 2 == 0:
        yield "micro-batches half as large", {"microbatch": plan.samples // 2, "microbatches": 2 * plan.passes}
    if plan.schedule is not Schedule.ZERO_BUBBLE:
        again = {Recomputation.OPERATORS: "what torchtitan's op keeps", Recomputation.FULL: "whole blocks"}
        for kind, name in again.items():
            if plan.recompute is not kind:
                yield f"recomputing all but {name}" if kind is Recomputation.OPERATORS else f"recomputing {name}", {
                    "recompute": kind, "recompute_layers": None}
    if plan.dp * plan.cp > 1 and plan.sharding < Sharding.PARAMETERS:
        named = {Sharding.OPTIMIZER: "the optimizer's state", Sharding.GRADIENTS: "gradients too",
                 Sharding.PARAMETERS: "parameters too"}
        for sharding, name in named.items():
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
