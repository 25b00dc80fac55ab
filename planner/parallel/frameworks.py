"""The parts of a plan that each training framework has: the plans a search tries, and the ones a plan can be exported
to.

Sources: Megatron-Core's arguments (``megatron/training/arguments.py`` of github.com/NVIDIA/Megatron-LM), torchtitan's
``[parallelism]`` and ``[activation_checkpoint]`` settings (``torchtitan/config/job_config.py`` of
github.com/pytorch/torchtitan) and PyTorch's ``fully_shard`` and ``DistributedDataParallel``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from planner.parallel.stages import spread
from tracer.parallel_plan import ParallelPlan, Recomputation, Schedule, Sharding
from tracer.shape_only.transformer import TransformerShape


class Framework(str, Enum):
    """A program that trains with a plan."""

    MEGATRON = "megatron"
    """Megatron-Core: DDP or the distributed optimizer; Megatron-FSDP without a pipeline."""
    TORCHTITAN = "torchtitan"
    FSDP = "fsdp"
    """PyTorch's FSDP2 or DDP around a model, and nothing else."""


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways of spreading a step that a framework has.

    Attributes:
        shardings, piped: what replicas share, without and with a pipeline.
        copied: of these, what is shared within copies of the state (``replicate``).
        schedules: of a pipeline; chunked: of these, those that run chunks.
        recompute: what is computed again.
        parts: shares of a chunk's blocks that may be computed again, besides all of them.
        layers, sequences, experts: tensor, context and expert parallelism.
        plain_tensor: tensor parallelism without sequence parallelism.
    """

    shardings: tuple[Sharding, ...]
    piped: tuple[Sharding, ...] = ()
    copied: tuple[Sharding, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    chunked: tuple[Schedule, ...] = ()
    recompute: tuple[Recomputation, ...] = (Recomputation.NONE, Recomputation.NEEDED)
    parts: tuple[float, ...] = ()
    layers: bool = True
    sequences: bool = True
    experts: bool = True
    plain_tensor: bool = False


WAYS = {
    Framework.MEGATRON: Ways(
        shardings=(Sharding.NONE, Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS),
        piped=(Sharding.NONE, Sharding.OPTIMIZER), copied=(Sharding.OPTIMIZER,),
        schedules=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED), chunked=(Schedule.INTERLEAVED,),
        recompute=(Recomputation.NONE, Recomputation.SELECTIVE, Recomputation.FULL), parts=(0.25, 0.5, 0.75),
        plain_tensor=True),
    # A rank of torchtitan's multi-stage schedules has two chunks or more. Every n-th block may be recomputed.
    Framework.TORCHTITAN: Ways(
        shardings=(Sharding.GRADIENTS, Sharding.PARAMETERS), piped=(Sharding.PARAMETERS,),
        copied=(Sharding.GRADIENTS, Sharding.PARAMETERS),
        schedules=(Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE),
        chunked=(Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE), parts=(0.25, 0.5),
        recompute=(Recomputation.NONE, Recomputation.NEEDED, Recomputation.OPERATORS)),
    Framework.FSDP: Ways(
        shardings=(Sharding.NONE, Sharding.GRADIENTS, Sharding.PARAMETERS),
        copied=(Sharding.GRADIENTS, Sharding.PARAMETERS), layers=False, sequences=False, experts=False),
}


def frameworks_of(plan: ParallelPlan, shape: TransformerShape) -> tuple[Framework, ...]:
    """Return the frameworks that can run a plan."""
    return tuple(framework for framework, ways in WAYS.items() if _has(framework, ways, plan, shape))


def _has(framework: Framework, ways: Ways, plan: ParallelPlan, shape: TransformerShape) -> bool:
    shares = plan.dp * plan.cp > 1
    shardings = ways.piped if plan.pp > 1 else ways.shardings
    tensor_ok = ways.layers or plan.tp == 1
    if plan.tp > 1 and not plan.sequence_parallel:
        # Megatron-Core asks for sequence parallelism where experts and tensor parallelism meet.
        tensor_ok = ways.plain_tensor and not (any(run.experts for run in shape.runs))
    if framework is Framework.TORCHTITAN and plan.tp * plan.cp > 1:
        tensor_ok = tensor_ok and all(run.state is None for run in shape.runs)  # Megatron-Core alone splits mixers
    alone = not shares and not plan.sharding
    return (
        tensor_ok
        and (plan.pp == 1 or (ways.layers and plan.schedule in ways.schedules))
        and (plan.schedule is not Schedule.ZERO_BUBBLE or plan.chunks > 1)
        and (plan.cp == 1 or ways.sequences)
        and (plan.ep == 1 or ways.experts)
        and (alone or plan.sharding in shardings or _is_plain_ddp(framework, plan))
        and (plan.replicate == 1 or plan.sharding in ways.copied)
        and plan.recompute in ways.recompute
        and not (plan.half_gradients and framework is Framework.TORCHTITAN)
        and not (plan.offload_optimizer and framework is not Framework.MEGATRON)
        and _layers_ok(framework, plan, shape)
    )


def _is_plain_ddp(framework: Framework, plan: ParallelPlan) -> bool:
    """Return whether it is torchtitan's DDP, which goes with nothing else."""
    return framework is Framework.TORCHTITAN and not plan.sharding and plan.tp * plan.pp * plan.cp * plan.ep == 1


def _layers_ok(framework: Framework, plan: ParallelPlan, shape: TransformerShape) -> bool:
    """Return whether layers can be spread and recomputed so."""
    if plan.recompute_layers is not None:
        least = min(sum(chunk) for stage in spread(plan, shape) for chunk in stage)
        every = plan.recompute_layers < least and least % plan.recompute_layers == 0
        if not (framework is Framework.MEGATRON or (framework is Framework.TORCHTITAN and every)):
            return False
    if framework is not Framework.MEGATRON or plan.pp == 1 or plan.first_layers or plan.last_layers:
        return framework is Framework.MEGATRON or not (plan.first_layers or plan.last_layers)
    return lacking(plan, shape) <= 2


def lacking(plan: ParallelPlan, shape: TransformerShape) -> int:
    """Return how many layers more would give every chunk of every stage as many. Megatron-Core leaves out one on the
    last stage, and one on the first, where loss and embedding count as layers."""
    return -shape.layers % (plan.pp * plan.chunks)
