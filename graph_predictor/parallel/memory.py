"""Device memory of a plan's step: what every stage holds at its fullest moment, and whether that fits.

``memory_state`` has what stays, ``memory_moments`` what comes and goes. What the framework's allocator hands out is
known to some per cent; what else is taken of the device is assumed, so that whether a plan fits is a judgement
(``Fit``): it is refused only where it cannot fit even with the least of all that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from graph_predictor.parallel.memory_moments import Moment, in_flight, moments_of
from graph_predictor.parallel.memory_state import state_of
from graph_predictor.parallel.narrow import narrow_type
from graph_predictor.parallel.pieces import LayerPieces
from graph_predictor.parallel.stages import blocks_of_stage
from kernel_models.collectives.nccl_constants import COMMUNICATOR_BYTES
from tracer.memory_account import MemoryAccount
from tracer.parallel_plan import ParallelPlan, Sharding
from tracer.shape_only.transformer import TransformerShape

__all__ = ["CONTEXT", "Fit", "StageMemory", "fit_of", "fullest_of", "in_flight", "memory_of", "stage_memory"]

CONTEXT = 0.6e9
"""Bytes of a CUDA context with its loaded kernels: an assumption."""
FRAGMENTED = 0.05
"""Share of what comes and goes that the allocator holds and cannot use: an assumption; up to three times as much, none
with expandable segments."""
ERROR = 0.04
"""Share by which what is allocated may be more or less than predicted. Of 41 published peaks above 10 GiB none is
further off than 3.4%; small models, of which logits and workspaces decide, may be by half
(``benchmarks/llm_memory.py``)."""


class Fit(str, Enum):
    """Whether a plan fits a device."""

    FITS = "fits"
    TIGHT = "may not fit"
    """The expected memory is too much, or so near to all there is that usual waste would be too much."""
    NO = "does not fit"


@dataclass(frozen=True, slots=True)
class StageMemory:
    """A rank of a stage at its fullest moment.

    Attributes:
        stage: which, from 0.
        moment: when, such as "loss".
        account: its bytes; ``reserved`` is what is taken beside the allocator's.
        low, high: the same in all, at least and at most.
    """

    stage: int
    moment: str
    account: MemoryAccount
    low: float
    high: float

    @property
    def allocated(self) -> float:
        """Bytes that the framework has handed out: PyTorch's ``max_memory_allocated``."""
        return self.account.allocated


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


def with_waste(account: MemoryAccount) -> StageMemory:
    """Return a step's own memory, as a trace knows it, with what is taken beside it."""
    moving = account.activations + account.temporaries
    return StageMemory(0, "step", replace(account, reserved=CONTEXT + FRAGMENTED * moving),
                       low=account.total * (1 - ERROR) + CONTEXT,
                       high=account.total * (1 + ERROR) + CONTEXT + 3 * FRAGMENTED * moving)


def fit_of(memory: StageMemory, limit_bytes: float) -> Fit:
    """Return whether a stage fits a device; one whose memory is unknown (0) has enough."""
    if not 0 < limit_bytes < memory.high:
        return Fit.FITS
    return Fit.NO if memory.low > limit_bytes else Fit.TIGHT
