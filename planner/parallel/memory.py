"""Device memory of a plan's step: what stays on every stage, what is temporary, and the fullest moment. Whether a plan
fits is judged by ``memory_fit``.

Bytes a parameter, in half precision with Adam (Rajbhandari et al., "ZeRO", 2020, section 3.1, but with gradients in
fp32, the usual setting of Megatron-Core and FSDP2); N ranks share what is marked /N:

    sharding       weights       gradients   optimizer state     framework
    0              2             4           12                  Megatron-Core, DDP.
    1              2             4           12/N                Megatron-Core's distributed optimizer, HSDP of it.
    2              2 + 4/N       4/N         8/N                 FSDP2 that keeps parameters after forward, ZeRO 2.
    3              4/N           4/N         8/N                 FSDP2, torchtitan, ZeRO 3, Megatron-FSDP.
    3, pipeline    2 + 4/N       4 + 4/N     8/N                 torchtitan: gathered and reduced once a step.

Gradients take 2 bytes instead of 4 if they are kept in the parameters' type (``half_gradients``). An optimizer in the
host's memory (``offload_optimizer``) has no state here.

FSDP's sharded weights are themselves the fp32 copy that the optimizer updates. Of the gathered weights, those of the
running block and of the next block are whole. Before a block's gradients are reduced, two whole copies exist:
autograd's, and the fp32 buffer that is reduced (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).

A stage keeps its input and what each block saves, including the block's output, which is the next block's input
(traced: ``LayerCosts.saved_bytes``). The stage's own output is sent on and freed (Megatron-Core's
``deallocate_pipeline_outputs``). With context parallelism attention's result is kept twice: as its kernel and as the
next product take it (Transformer Engine's all-to-all; its ring keeps one). A recomputed block keeps its output only,
and is whole while it runs again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.request.memory_fit import FRAGMENTED, StageMemory, with_waste
from kernel_models.collectives.datasheet import COMMUNICATOR_BYTES
from planner.parallel.layer_costs import LayerCosts, narrow_type
from planner.parallel.plan_costs import block_part, gradient_bytes, optimizer_parameters, stage_parameters
from planner.parallel.schedule import BACKWARD, FORWARD, WEIGHTS, order_of
from planner.parallel.stages import blocks_of_stage
from tracer.device_memory import MemoryAccount
from tracer.parallel_plan import ParallelPlan, Recomputation, Schedule, Sharding
from tracer.shape_only.transformer import TransformerShape

MOMENTS_BYTES = 8
"""Bytes of Adam's two moments of a parameter, in fp32."""
MASTER_BYTES = 4
"""Bytes of the fp32 copy of a half-precision parameter."""
WORKSPACES = 64 * 2**20
"""cuBLAS' workspaces on Hopper and later: PyTorch's own and Transformer Engine's, 32 MiB each
(``get_cublas_workspace_size_bytes`` of transformer_engine/pytorch/module/base.py)."""


def state_of(plan: ParallelPlan, shape: TransformerShape, stage: int) -> MemoryAccount:
    """Return the memory that a rank of a stage holds throughout the step."""
    count, share = stage_parameters(plan, shape, stage), optimizer_parameters(plan, shape, stage)
    width, each = shape.element_bytes, gradient_bytes(plan, shape)
    master = MASTER_BYTES if width < MASTER_BYTES else 0
    if plan.sharding <= Sharding.OPTIMIZER:
        return MemoryAccount(parameters=count * width, gradients=count * each,
                             optimizer_state=0 if plan.offload_optimizer else share * (master + MOMENTS_BYTES),
                             buffers=WORKSPACES + _gradient_stand_ins(plan, shape, stage))
    own = share * MASTER_BYTES  # fp32 in every precision
    gradients = share * each
    if plan.sharding is Sharding.PARAMETERS and plan.pp > 1:
        parameters, gradients = own + count * width, gradients + count * each
        return MemoryAccount(parameters=parameters, gradients=gradients, optimizer_state=share * MOMENTS_BYTES,
                             buffers=WORKSPACES)
    block = max(kind.block_parameters(plan.tp, plan.ep, plan.etp) for kind in shape.kinds)
    gathered = count if plan.sharding is Sharding.GRADIENTS else min(2 * block + shape.root_parameters(plan.tp), count)
    return MemoryAccount(parameters=own + gathered * width, gradients=gradients, optimizer_state=share * MOMENTS_BYTES,
                         buffers=WORKSPACES + block * (width + each))


def _gradient_stand_ins(plan: ParallelPlan, shape: TransformerShape, stage: int) -> int:
    """Return the bytes of dummy gradients: autograd gets them where a product adds to the fp32 gradient itself.

    Transformer Engine keeps one such tensor of each weight's shape (``get_dummy_wgrad`` of the same file). All blocks
    of a kind share theirs, and so do all experts of a rank.
    """
    if shape.dtype == "fp32":
        return 0
    sizes: set[tuple[str, int]] = set()
    for kind, *_ in blocks_of_stage(plan, shape, stage):
        sizes.add(("attention", kind.attention_parameters(plan.tp)))
        sizes.add(("state-space mixer", kind.state_parameters(plan.tp)))
        if not kind.experts:
            sizes.add(("feed-forward", kind.feed_forward_parameters(plan.tp)))
            continue
        sizes.add(("an expert", kind.expert_parameters(kind.experts, plan.expert_tp)))
        if kind.shared_ffn:
            sizes.add(("shared experts", kind.feed_forward_parameters(plan.tp)))
    return shape.element_bytes * sum(size for _, size in sizes)


LOGITS_IN_STEPS = 4
"""Bytes of a logit kept for backward if the loss is computed step by step: fp32."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step: its name, bytes kept for backward, and temporary bytes."""

    name: str
    activations: float
    temporaries: float

    @property
    def total(self) -> float:
        """Bytes kept and temporary."""
        return self.activations + self.temporaries


def in_flight(plan: ParallelPlan, stage: int) -> float:
    """Return the most micro-batches, counted as whole stages, whose activations are kept at once."""
    if plan.schedule is Schedule.GPIPE:
        return plan.passes
    if plan.schedule is Schedule.ZERO_BUBBLE:
        return min(plan.pp, plan.passes)  # delayed weight gradients keep activations too
    if plan.chunks > 1:
        ahead = min((plan.pp - stage - 1) * 2 + (plan.chunks - 1) * plan.pp + 1, plan.passes * plan.chunks)
        return ahead / plan.chunks
    return min(plan.pp - stage, plan.passes)


def moments_of(plan: ParallelPlan, shape: TransformerShape, pieces: LayerCosts, stage: int) -> list[Moment]:
    """Return the moments (bytes) at which a rank of a stage may hold most, in order.

    They are the loss (last stage only), the largest block's backward, and the embedding's gradient (first stage only),
    during which the micro-batch keeps nothing else.
    """
    one, recomputed = kept_of(plan, shape, pieces, stage)
    flying, stream = in_flight(plan, stage), stream_bytes(plan, shape)
    found = []
    last, logits = stage == plan.pp - 1, 0.0
    if last:
        logits = _logits(plan, shape) * (flying if plan.schedule is Schedule.GPIPE else 1)
        found.append(Moment("loss", flying * one + logits, _beside_loss(plan, shape)))
        logits -= _logits(plan, shape)
    beside = max((_beside_block(plan, kind) for kind, *_ in blocks_of_stage(plan, shape, stage)), default=0.0)
    found.append(Moment("a block's backward", flying * one + recomputed + logits, beside))
    if stage == 0:
        whole = shape.vocabulary_parameters(plan.tp) * shape.element_bytes
        found.append(Moment("embedding's backward", max(flying - 1, 0) * one + stream + logits, whole))
    return found


def kept_of(plan: ParallelPlan, shape: TransformerShape, pieces: LayerCosts, stage: int) -> tuple[float, float]:
    """Return the bytes that one micro-batch keeps for backward on a stage, and the bytes of the largest recomputed
    block (0 without recomputation)."""
    # Traced for one sequence: what backward needs grows with the micro-batch.
    part = block_part(plan, 1)
    # With selective recomputation, unfused attention keeps as little as fused attention.
    fused = plan.recompute is Recomputation.SELECTIVE
    stream = stream_bytes(plan, shape)
    total, largest = stream, 0.0
    for kind, count, recomputed in blocks_of_stage(plan, shape, stage):
        block = float(plan.samples * pieces.saved_bytes(replace(kind, flash=True) if fused else kind, part))
        if plan.cp > 1 and kind.attends:
            block += tokens_of(plan, kind) * kind.heads / plan.tp * kind.width_of_values * kind.element_bytes
        if plan.recompute_modules:
            again = plan.samples * pieces.module_bytes(kind, part, plan.recompute_modules)
            block, largest = block - again, max(largest, again)
        total += (count - recomputed) * block
        if recomputed:
            more = plan.samples * pieces.kept_bytes(kind, part, plan.recompute)
            total += recomputed * (stream + more)
            largest = max(largest, block)
    return total - (stream if stage < plan.pp - 1 else 0.0), largest


def tokens_of(plan: ParallelPlan, shape: TransformerShape) -> int:
    """Return the tokens of a micro-batch in a rank's layers, before sequence parallelism splits them over ``tp``."""
    return plan.samples * shape.seq // plan.cp


def stream_bytes(plan: ParallelPlan, shape: TransformerShape) -> float:
    """Return the bytes of a rank's part of the residual stream for one micro-batch."""
    whole = tokens_of(plan, shape) * shape.hidden * shape.element_bytes
    return whole / (plan.tp if plan.sequence_parallel else 1)


def _logits(plan: ParallelPlan, shape: TransformerShape) -> float:
    """Return the bytes that the loss keeps for backward: the last norm's output, and logits. A fused loss overwrites
    logits with their gradient (Transformer Engine, Liger); a loss in steps keeps fp32 probabilities."""
    each = shape.element_bytes if shape.fused_loss else LOGITS_IN_STEPS
    return (stream_bytes(plan, shape) + _logit_count(plan, shape) * each) * (1 + shape.predictions)


def _logit_count(plan: ParallelPlan, shape: TransformerShape) -> float:
    return tokens_of(plan, shape) * -(-shape.vocab // plan.tp)


def _beside_loss(plan: ParallelPlan, shape: TransformerShape) -> float:
    """Return the temporary bytes while the gradient of the logits' matrix is computed. They are this gradient or its
    dummy, the logits' gradient if separate, the stream's gradient, and with sequence parallelism its gathered input."""
    width = shape.element_bytes
    stream = tokens_of(plan, shape) * shape.hidden * width * (2 if plan.sequence_parallel else 1)
    logits = 0.0 if shape.fused_loss else _logit_count(plan, shape) * width
    return stream + logits + shape.vocabulary_parameters(plan.tp) * width


def _beside_block(plan: ParallelPlan, kind: TransformerShape) -> float:
    """Return the most temporary bytes of gradients within a block. They are the stream's two ends, and the largest of
    feed-forward inner values, unfused attention's scores, and inputs of a mixer's recurrence."""
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


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Memory of one task of a stage.

    Attributes:
        task: "forward", "backward" or "weights".
        microbatch, chunk: numbers of the task.
        before, peak: bytes allocated when the task begins, and at its fullest moment.
    """

    task: str
    microbatch: int
    chunk: int
    before: float
    peak: float


def timeline(plan: ParallelPlan, shape: TransformerShape, pieces: LayerCosts, stage: int) -> list[MemoryPoint]:
    """Return the memory of a rank of a stage before and during each of its tasks.

    A forward adds what its chunk keeps. A backward, or the separate task of weight gradients, frees it. All chunks are
    assumed to keep equally much.
    """
    order = order_of(plan.schedule, plan.pp, plan.passes, plan.chunks)
    names = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "weights"}
    held = state_of(plan, shape, stage).total
    one, _ = kept_of(plan, shape, pieces, stage)
    each = one / plan.chunks
    most = max(moment.total for moment in moments_of(plan, shape, pieces, stage))
    kinds = order.kind[stage]
    lets_go = WEIGHTS if plan.schedule is Schedule.ZERO_BUBBLE else BACKWARD
    after = np.cumsum(np.where(kinds == FORWARD, each, np.where(kinds == lets_go, -each, 0.0)))
    # The step's fullest moment is assumed in the backward at which most is kept.
    beside = most - float(np.max(after))
    found = []
    for i, kind in enumerate(kinds.tolist()):
        before = held + (float(after[i - 1]) if i else 0.0)
        peak = held + float(after[i]) if kind == FORWARD else before + max(beside, 0.0)
        found.append(MemoryPoint(names[kind], int(order.microbatch[stage, i]), int(order.chunk[stage, i]), before,
                                 peak))
    return found


def fullest_of(plan: ParallelPlan, shape: TransformerShape, pieces: LayerCosts) -> StageMemory:
    """Return the memory of the stage that needs most."""
    # Of neighbouring stages with equal blocks, the first has more micro-batches in flight.
    held = [blocks_of_stage(plan, shape, stage) for stage in range(plan.pp)]
    # Stage 1 has no embedding, but may have more micro-batches in flight than later stages.
    stages = {0, plan.pp - 1} | {stage for stage in range(1, plan.pp) if stage == 1 or held[stage] != held[stage - 1]}
    return max((stage_memory(plan, shape, pieces, stage) for stage in sorted(stages)),
               key=lambda memory: memory.account.total)


def stage_memory(plan: ParallelPlan, shape: TransformerShape, pieces: LayerCosts, stage: int) -> StageMemory:
    """Return the memory of a rank of a stage at its fullest moment."""
    moment = max(moments_of(plan, shape, pieces, stage), key=lambda each: each.total)
    held = state_of(plan, shape, stage)
    own = pieces.profile.memory
    if copies := own.get("gradient_copies"):
        more = round(copies * stage_parameters(plan, shape, stage) * shape.element_bytes)
        held = replace(held, gradients=held.gradients + more)
    narrow = narrow_type(shape.linears, pieces.device)
    if narrow is not None and plan.sharding is not Sharding.PARAMETERS:
        # Cast weights are kept throughout the step, and may replace the wider weights (``fp8_parameters``).
        each = narrow.bytes * narrow.copies - shape.element_bytes * plan.fp8_parameters
        held = replace(held, parameters=held.parameters + each * sum(
            count * kind.block_parameters(plan.tp, plan.ep, plan.etp)
            for kind, count, _ in blocks_of_stage(plan, shape, stage)))
    account = replace(held, activations=moment.activations, temporaries=moment.temporaries)
    groups = sum(size > 1 for size in (plan.dp * plan.cp, plan.tp, plan.pp, plan.ep))
    return with_waste(account, stage, moment.name, groups * COMMUNICATOR_BYTES,
                      own.get("fragmented", FRAGMENTED))
