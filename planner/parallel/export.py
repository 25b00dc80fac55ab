"""A plan as the arguments of a framework: Megatron-Core's command line and torchtitan's TOML.

Names are those of ``megatron/training/arguments.py`` (Megatron-LM, core 0.12 and later) and of torchtitan's
``job_config.py`` (0.2).
"""

from __future__ import annotations

from planner.parallel.frameworks import Framework, frameworks_of, lacking
from tracer.parallel_plan import ParallelPlan, PlanError, Recomputation, Schedule, Sharding
from tracer.shape_only.transformer import TransformerShape

_STRATEGY = {Sharding.GRADIENTS: "optim_grads", Sharding.PARAMETERS: "optim_grads_params"}
_TITAN = {Schedule.GPIPE: "GPipe", Schedule.ONE_F_ONE_B: "1F1B", Schedule.INTERLEAVED: "Interleaved1F1B",
          Schedule.ZERO_BUBBLE: "InterleavedZeroBubble"}


def exported(plan: ParallelPlan, shape: TransformerShape, framework: Framework) -> str:
    """Return the arguments of a plan.

    Raises:
        PlanError: the framework does not have the plan, or no file of its own.
    """
    if framework is Framework.FSDP:
        raise PlanError("PyTorch's FSDP is called in a program and has no arguments of its own; export to megatron or "
                        "torchtitan.")
    if framework not in frameworks_of(plan, shape):
        raise PlanError(f"{framework.value} does not have the plan {plan}; give --framework {framework.value} for the "
                        "best of its own.")
    return "\n".join(_megatron(plan, shape) if framework is Framework.MEGATRON else _torchtitan(plan, shape))


def _megatron(plan: ParallelPlan, shape: TransformerShape) -> list[str]:
    found = [f"--tensor-model-parallel-size {plan.tp}", f"--pipeline-model-parallel-size {plan.pp}",
             f"--context-parallel-size {plan.cp}", f"--micro-batch-size {plan.samples}",
             f"--global-batch-size {plan.global_batch}"]
    if any(run.experts for run in shape.runs):
        found += [f"--expert-model-parallel-size {plan.ep}", f"--expert-tensor-parallel-size {plan.expert_tp}"]
    found += ["--sequence-parallel"] * plan.sequence_parallel + ["--tp-comm-overlap"] * plan.tensor_overlap
    found += _megatron_stages(plan, shape)
    if plan.sharding:
        found.append("--use-distributed-optimizer")
    found += ["--grad-reduce-in-bf16"] * plan.half_gradients + ["--optimizer-cpu-offload"] * plan.offload_optimizer
    if plan.sharding in _STRATEGY:
        found += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {_STRATEGY[plan.sharding]}"]
    if plan.replicate > 1:
        found.append(f"--num-distributed-optimizer-instances {plan.replicate}")
    if plan.overlap and plan.dp * plan.cp > 1:
        found += ["--overlap-grad-reduce"] + ["--overlap-param-gather"] * bool(plan.sharding)
    if plan.recompute is Recomputation.SELECTIVE:
        found.append("--recompute-granularity selective")
    elif plan.recompute.blocks:
        # "block" counts the blocks of each chunk that are computed again, "uniform" those that share an input.
        method, layers = ("uniform", 1) if plan.recompute_layers is None else ("block", plan.recompute_layers)
        found += ["--recompute-granularity full", f"--recompute-method {method}", f"--recompute-num-layers {layers}"]
    return found


def _megatron_stages(plan: ParallelPlan, shape: TransformerShape) -> list[str]:
    if plan.pp == 1:
        return []
    short = lacking(plan, shape)
    given = plan.first_layers or plan.last_layers
    found = []
    if plan.chunks > 1:
        each = shape.layers // (plan.pp * plan.chunks)
        found.append(f"--num-virtual-stages-per-pipeline-rank {plan.chunks}" if short or given
                     else f"--num-layers-per-virtual-pipeline-stage {each}")
    if plan.first_layers:
        found.append(f"--decoder-first-pipeline-num-layers {plan.first_layers}")
    if plan.last_layers:
        found.append(f"--decoder-last-pipeline-num-layers {plan.last_layers}")
    if plan.embedding_layer or (short == 2 and not given):
        found.append("--account-for-embedding-in-pipeline-split")
    if plan.loss_layer or (short in (1, 2) and not given):
        found.append("--account-for-loss-in-pipeline-split")
    return found


def _torchtitan(plan: ParallelPlan, shape: TransformerShape) -> list[str]:
    shared = plan.sharding is not Sharding.NONE
    copies = plan.replicate if shared else plan.dp
    # The batch of a replica: a pipeline cuts it into micro-batches, without one each is a step of accumulation.
    own = plan.samples * (plan.passes if plan.pp > 1 else 1)
    found = ["[training]", f"local_batch_size = {own}", f"global_batch_size = {plan.global_batch}",
             f"seq_len = {shape.seq}", "", "[parallelism]", f"data_parallel_replicate_degree = {copies}",
             f"data_parallel_shard_degree = {plan.dp // copies}",
             f'fsdp_reshard_after_forward = "{"never" if plan.sharding is Sharding.GRADIENTS else "default"}"',
             f"tensor_parallel_degree = {plan.tp}",
             f"enable_async_tensor_parallel = {str(plan.tensor_overlap).lower()}",
             f"context_parallel_degree = {plan.cp}", f"pipeline_parallel_degree = {plan.pp}"]
    if plan.pp > 1:
        places = plan.pp * plan.chunks
        short = lacking(plan, shape)
        found += [f'pipeline_parallel_schedule = "{_TITAN[plan.schedule]}"',
                  f"pipeline_parallel_microbatch_size = {plan.samples}",
                  f"pipeline_parallel_layers_per_stage = {-(-shape.layers // places)}",
                  f"pipeline_parallel_first_stage_less_layers = {int(short > 1)}",
                  f"pipeline_parallel_last_stage_less_layers = {int(short > 0)}"]
    if any(run.experts for run in shape.runs):
        found += [f"expert_parallel_degree = {plan.ep}", f"expert_tensor_parallel_degree = {plan.expert_tp}"]
    return [*found, "", "[activation_checkpoint]", *_checkpoint(plan, shape)]


def _checkpoint(plan: ParallelPlan, shape: TransformerShape) -> list[str]:
    if plan.recompute is Recomputation.NONE:
        return ['mode = "none"']
    if plan.recompute is Recomputation.OPERATORS:
        return ['mode = "selective"', 'selective_ac_option = "op"']
    if plan.recompute_layers is None:
        return ['mode = "full"']
    every = -(-shape.layers // (plan.pp * plan.chunks)) // plan.recompute_layers
    return ['mode = "selective"', f'selective_ac_option = "{every}"']
