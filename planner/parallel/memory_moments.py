"""Memory that one rank of a stage holds for a while: what backward needs of the micro-batches in flight, and what comes
and goes beside it. The moments of a step at which that may be most are looked at one by one.

A stage keeps its input and what each block leaves (traced: ``LayerPieces.saved_bytes``; the block's output, the next
one's input, is among it). Its own output goes to the next stage and is let go (Megatron-Core's
``deallocate_pipeline_outputs``). With context parallelism attention's result is kept both as its kernel and as the next
product take it (Transformer Engine's all-to-all; its ring keeps one). A recomputed block leaves its output alone, and
is whole while it is run again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.parallel.pieces import LayerPieces
from planner.parallel.stages import blocks_of_stage, recomputed_of_stage
from tracer.parallel_plan import ParallelPlan, Recomputation, Schedule
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape

LOGITS_IN_STEPS = 4
"""Bytes of a logit that backward needs where the loss is computed in steps: fp32."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step: what it is, bytes kept for backward, and bytes that come and go."""

    name: str
    activations: float
    temporaries: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.activations + self.temporaries


def in_flight(plan: ParallelPlan, stage: int) -> float:
    """Micro-batches of a whole stage whose activations are kept at once, at most."""
    if plan.schedule is Schedule.GPIPE:
        return plan.passes
    if plan.schedule is Schedule.ZERO_BUBBLE:
        return min(plan.pp, plan.passes)  # what is left to do of weights' gradients keeps activations too
    if plan.chunks > 1:
        ahead = min((plan.pp - stage - 1) * 2 + (plan.chunks - 1) * plan.pp + 1, plan.passes * plan.chunks)
        return ahead / plan.chunks
    return min(plan.pp - stage, plan.passes)


def moments_of(plan: ParallelPlan, shape: TransformerShape, pieces: LayerPieces, stage: int) -> list[Moment]:
    """Return the moments at which a rank of a stage may hold most, the first first.

    Backward begins with the loss where there is one, then each block's; the embedding's gradient is the last, when
    the micro-batch keeps nothing else.
    """
    one, again = kept_of(plan, shape, pieces, stage)
    flying, stream = in_flight(plan, stage), stream_bytes(plan, shape)
    found = []
    last, logits = stage == plan.pp - 1, 0.0
    if last:
        logits = _logits(plan, shape) * (flying if plan.schedule is Schedule.GPIPE else 1)
        found.append(Moment("loss", flying * one + logits, _beside_loss(plan, shape)))
        logits -= _logits(plan, shape)
    beside = max(_beside_block(plan, kind) for kind, _ in blocks_of_stage(plan, shape, stage))
    found.append(Moment("a block's backward", flying * one + again + logits, beside))
    if stage == 0:
        whole = shape.vocabulary_parameters(plan.tp) * shape.element_bytes
        found.append(Moment("embedding's backward", max(flying - 1, 0) * one + stream + logits, whole))
    return found


def kept_of(plan: ParallelPlan, shape: TransformerShape, pieces: LayerPieces, stage: int) -> tuple[float, float]:
    """Return bytes that one micro-batch keeps for backward on a stage, and bytes of the largest block that is run
    again (0 for none)."""
    # Traced for one sequence: what backward needs grows with the micro-batch.
    part = TransformerPart(Piece.BLOCK, 1, plan.tp, plan.cp, plan.ep, plan.sequence_parallel, plan.etp)
    # With selective recomputation, what attention leaves is what fused attention does.
    fused = plan.recompute is Recomputation.SELECTIVE
    stream = stream_bytes(plan, shape)
    total, largest = stream, 0.0
    kinds = zip(blocks_of_stage(plan, shape, stage), recomputed_of_stage(plan, shape, stage), strict=True)
    for (kind, count), again in kinds:
        block = float(plan.samples * pieces.saved_bytes(replace(kind, flash=True) if fused else kind, part))
        if plan.cp > 1 and kind.attends:
            block += tokens_of(plan, kind) * kind.heads / plan.tp * kind.width_of_values * kind.element_bytes
        total += (count - again) * block
        if again:
            more = plan.samples * pieces.kept_bytes(kind, part, plan.recompute)
            total += again * (stream + more)
            largest = max(largest, block)
    return total - (stream if stage < plan.pp - 1 else 0.0), largest


def tokens_of(plan: ParallelPlan, shape: TransformerShape) -> int:
    """Return the tokens of a micro-batch that a rank's layers see, those of all its tensor-parallel ranks together."""
    return plan.samples * shape.seq // plan.cp


def stream_bytes(plan: ParallelPlan, shape: TransformerShape) -> float:
    """Return bytes of a rank's part of the residual stream for one micro-batch."""
    whole = tokens_of(plan, shape) * shape.hidden * shape.element_bytes
    return whole / (plan.tp if plan.sequence_parallel else 1)


def _logits(plan: ParallelPlan, shape: TransformerShape) -> float:
    """Bytes that the loss keeps for backward: the last norm's output and logits. A fused loss puts their gradient in
    their place (Transformer Engine's and Liger's); in steps it keeps fp32 shares."""
    each = shape.element_bytes if shape.fused_loss else LOGITS_IN_STEPS
    return (stream_bytes(plan, shape) + _logit_count(plan, shape) * each) * (1 + shape.predictions)


def _logit_count(plan: ParallelPlan, shape: TransformerShape) -> float:
    return tokens_of(plan, shape) * -(-shape.vocab // plan.tp)


def _beside_loss(plan: ParallelPlan, shape: TransformerShape) -> float:
    """Bytes beside them when the gradient of the logits' matrix is computed: it, or what stands for it; the logits'
    gradient, where it has its own place; the gradient of the stream, and with sequence parallelism its gathered
    input."""
    width = shape.element_bytes
    stream = tokens_of(plan, shape) * shape.hidden * width * (2 if plan.sequence_parallel else 1)
    logits = 0.0 if shape.fused_loss else _logit_count(plan, shape) * width
    return stream + logits + shape.vocabulary_parameters(plan.tp) * width


def _beside_block(plan: ParallelPlan, kind: TransformerShape) -> float:
    """Bytes of gradients within a block, at most: of the feed-forward part's inner values and the stream's two ends,
    of attention's scores where they are not fused, or of what goes into a state-space mixer's recurrence."""
    width, tokens = kind.element_bytes, tokens_of(plan, kind)
    inner = (2 if kind.gated else 1) * width
    if kind.experts:
        own = tokens / (plan.tp if plan.sequence_parallel else 1)
        rows = own * kind.top_k * kind.imbalance * (plan.expert_tp if plan.sequence_parallel else 1)
        forward = rows * (inner * kind.ffn / plan.expert_tp + 2 * width * kind.hidden)
    else:
        forward = tokens * inner * kind.ffn / plan.tp
    scores = 0.0
    if kind.attends and not kind.flash:
        scores = 2 * width * plan.samples * kind.heads / plan.tp * kind.seq / plan.cp * kind.seq
    mixed = 0.0 if kind.state is None else tokens * width * (kind.state.projected + kind.state.inner) / plan.tp
    return float(max(forward, scores, mixed) + 2 * width * tokens * kind.hidden)
