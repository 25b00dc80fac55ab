"""Device memory of a plan's step: what every stage holds at its fullest moment, and whether that fits.

``memory_state`` has what stays, ``memory_moments`` what comes and goes; whether it fits is ``memory_fit``'s judgement.
"""

from __future__ import annotations

from dataclasses import replace

from graph_predictor.request.memory_fit import CONTEXT, ERROR, FRAGMENTED, StageMemory
from kernel_models.collectives.nccl_constants import COMMUNICATOR_BYTES
from planner.parallel.memory_moments import Moment, moments_of
from planner.parallel.memory_state import state_of
from planner.parallel.narrow import narrow_type
from planner.parallel.pieces import LayerPieces
from planner.parallel.stages import blocks_of_stage
from tracer.device_memory import MemoryAccount
from tracer.parallel_plan import ParallelPlan, Sharding
from tracer.shape_only.transformer import TransformerShape


def memory_of(plan: ParallelPlan, shape: TransformerShape, pieces: LayerPieces) -> MemoryAccount:
    """Return the memory of the stage that needs most."""
    return fullest_of(plan, shape, pieces).account


def fullest_of(plan: ParallelPlan, shape: TransformerShape, pieces: LayerPieces) -> StageMemory:
    """Return the stage that needs most."""
    # Of neighbours with the same blocks the first has more micro-batches in flight.
    held = [blocks_of_stage(plan, shape, stage) for stage in range(plan.pp)]
    # The second has no embedding's weights, but no fewer blocks either.
    stages = {0, plan.pp - 1} | {stage for stage in range(1, plan.pp) if stage == 1 or held[stage] != held[stage - 1]}
    return max((stage_memory(plan, shape, pieces, stage) for stage in sorted(stages)),
               key=lambda memory: memory.account.total)


def stage_memory(plan: ParallelPlan, shape: TransformerShape, pieces: LayerPieces, stage: int) -> StageMemory:
    """Return what a rank of a stage holds at its fullest moment."""
    moment: Moment = max(moments_of(plan, shape, pieces, stage), key=lambda each: each.total)
    held = state_of(plan, shape, stage)
    narrow = narrow_type(shape.linears, pieces.device)
    if narrow is not None and plan.sharding is not Sharding.PARAMETERS:
        # Cast weights are kept from the step's first micro-batch to its last.
        held = replace(held, parameters=held.parameters + narrow.bytes * narrow.copies * sum(
            count * kind.block_parameters(plan.tp, plan.ep, plan.etp)
            for kind, count in blocks_of_stage(plan, shape, stage)))
    account = replace(held, activations=moment.activations, temporaries=moment.temporaries)
    groups = sum(size > 1 for size in (plan.dp * plan.cp, plan.tp, plan.pp, plan.ep))
    outside = CONTEXT + groups * COMMUNICATOR_BYTES
    allocated = account.total
    return StageMemory(
        stage, moment.name, replace(account, reserved=outside + FRAGMENTED * moment.total),
        low=allocated * (1 - ERROR) + CONTEXT, high=allocated * (1 + ERROR) + outside + 3 * FRAGMENTED * moment.total)
