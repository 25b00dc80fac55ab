"""Memory that one rank of a stage holds from step to step: weights, gradients, optimizer state, and buffers for them.

Bytes a parameter, in half precision with Adam (Rajbhandari et al., "ZeRO", 2020, section 3.1, with gradients in fp32 as
Megatron-Core's and FSDP2's usual settings have them); N ranks share what is marked /N:

    sharding       weights       gradients   optimizer state     framework
    0              2             4           12                  Megatron-Core, DDP
    1              2             4           12/N                Megatron-Core's distributed optimizer, HSDP of it
    2              2 + 4/N       4/N         8/N                 FSDP2 that keeps parameters after forward, ZeRO 2
    3              4/N           4/N         8/N                 FSDP2, torchtitan, ZeRO 3, Megatron-FSDP
    3, pipeline    2 + 4/N       4 + 4/N     8/N                 torchtitan: gathered and reduced once a step

Gradients take 2 bytes in place of 4 where they are kept in the parameters' type (``half_gradients``). An optimizer in
the host's memory (``offload_optimizer``) leaves none of its state here.

FSDP's sharded weights are themselves the fp32 copy that the optimizer updates. Of what it gathers, the block at work
and the next one are whole, and gradients of a block are whole twice until they are reduced: as autograd leaves them,
and cast to fp32 in the buffer that is reduced (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
"""

from __future__ import annotations

from planner.parallel.loads import gradient_bytes, optimizer_parameters, stage_parameters
from planner.parallel.stages import blocks_of_stage
from tracer.device_memory import MemoryAccount
from tracer.parallel_plan import ParallelPlan, Sharding
from tracer.shape_only.transformer import TransformerShape

MOMENTS_BYTES = 8
"""Adam's two moments in fp32."""
MASTER_BYTES = 4
"""The fp32 copy of a half-precision parameter."""
WORKSPACES = 64 * 2**20
"""cuBLAS' workspaces on Hopper and later: PyTorch's own and Transformer Engine's, 32 MiB each
(``get_cublas_workspace_size_bytes`` of transformer_engine/pytorch/module/base.py)."""


def state_of(plan: ParallelPlan, shape: TransformerShape, stage: int) -> MemoryAccount:
    """Return what a rank of a stage holds throughout the step."""
    count, share = stage_parameters(plan, shape, stage), optimizer_parameters(plan, shape, stage)
    width, each = shape.element_bytes, gradient_bytes(plan, shape)
    master = MASTER_BYTES if width < MASTER_BYTES else 0
    if plan.sharding <= Sharding.OPTIMIZER:
        return MemoryAccount(parameters=count * width, gradients=count * each,
                             optimizer_state=0 if plan.offload_optimizer else share * (master + MOMENTS_BYTES),
                             buffers=WORKSPACES + _gradient_stand_ins(plan, shape, stage))
    own = share * MASTER_BYTES  # fp32, whatever is computed in
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
    """Bytes of what autograd is given in place of gradients that products have added to the fp32 ones themselves.

    Transformer Engine keeps one tensor of each weight's shape for that (``get_dummy_wgrad`` of the same file), so that
    all blocks of a kind, and all experts of a rank, share theirs.
    """
    if shape.dtype == "fp32":
        return 0
    sizes: set[tuple[str, int]] = set()
    for kind, _ in blocks_of_stage(plan, shape, stage):
        sizes.add(("attention", kind.attention_parameters(plan.tp)))
        sizes.add(("state-space mixer", kind.state_parameters(plan.tp)))
        if not kind.experts:
            sizes.add(("feed-forward", kind.feed_forward_parameters(plan.tp)))
            continue
        sizes.add(("an expert", kind.expert_parameters(kind.experts, plan.expert_tp)))
        if kind.shared_ffn:
            sizes.add(("shared experts", kind.feed_forward_parameters(plan.tp)))
    return shape.element_bytes * sum(size for _, size in sizes)
