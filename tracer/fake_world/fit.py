"""Checks of fake worlds and of plans in them, with their error.

They show whether a fake world is possible and a plan fits a workload, from numbers and settings. Needs no torch.
"""

from __future__ import annotations

from tracer.errors import ForetraceError
from tracer.guard import MOST_RANKS
from tracer.parallel_plan import ParallelPlan, PlanError, Sharding, said
from tracer.workloads.places import pieces_of
from tracer.workloads.settings import Settings, WorkloadError


class FakeWorldError(ForetraceError):
    """A fake world cannot be made."""


SPLIT_WORKLOADS = frozenset({"llama"})
"""Workloads that tensor and pipeline parallelism can split."""
EXPERT_WORKLOADS = frozenset({"moe"})
"""Workloads with experts."""


_LARGER = " or the published size (--preset real)"


def check_world(world_size: int, rank: int) -> None:
    """Raise ``FakeWorldError`` unless a world with this size and rank is possible."""
    for name, value, least in (("world_size", world_size, 1), ("rank", rank, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise FakeWorldError(f"{name}={value!r} is not possible: give a whole number, {least} or more.")
    if world_size > MOST_RANKS:
        raise FakeWorldError(f"world_size={_number(world_size)} is more than a fake world can have; give "
                             f"{MOST_RANKS:,} or less.")
    if rank >= world_size:
        raise FakeWorldError(f"There is no rank {rank} in a world of {world_size}; choose one from 0 to "
                             f"{world_size - 1}.")


def _number(value: int) -> str:
    """Return a number as text for a sentence, even a very long one."""
    return f"{value:,}" if value < 10**15 else f"10^{int(value.bit_length() * 0.30103)} or so"


def check_traceable(plan: ParallelPlan) -> None:
    """Raise ``PlanError`` for parts of a plan that can only be estimated: the suite's workloads cannot run them."""
    usual = ParallelPlan()
    refused = {
        "cp": "no workload splits its sequences",
        "etp": "tensor-parallel ranks share each expert",
        "chunks": "pipelines run in the 1F1B schedule, without chunks",
        "schedule": "pipelines run in the 1F1B schedule",
        "sequence_parallel": "tensor parallelism does not split the tokens",
        "tensor_overlap": "tensor parallelism's collectives are not cut in pieces",
        "recompute_layers": "what is recomputed is a setting of the workload (--set checkpointing=true)",
        "replicate": "replicas share what they share among all of them",
        "recompute": "what is recomputed is a setting of the workload (--set checkpointing=true)",
        "overlap": "DDP and FSDP2 always overlap",
        "first_layers": "stages have as many layers as the others, or one more",
        "last_layers": "stages have as many layers as the others, or one more",
        "embedding_layer": "stages have as many layers as the others, or one more",
        "loss_layer": "stages have as many layers as the others, or one more",
        "half_gradients": "gradients have the parameters' type, which is a setting of the workload (--set dtype=bf16)",
        "offload_optimizer": "optimizers run on the device",
        "dispatcher": "tokens go to their experts by all-to-all",
        "expert_overlap": "exchanges of experts are waited for",
        "fused_experts": "experts' products and activation are kernels of their own",
        "graphs": "launches are traced one by one",
        "fp8_attention": "attention is in the workload's type",
        "fp8_parameters": "weights are in the workload's type",
        "recompute_modules": "what is recomputed is a setting of the workload (--set checkpointing=true)",
        "microbatch": "the batch of a replica is a setting of the workload (--set batch=…)",
    }
    for name, why in refused.items():
        value = getattr(plan, name)
        if value != getattr(usual, name):
            raise PlanError(f"{name}={str(said(value)).lower()} cannot be traced: {why}; leave it out, or estimate the "
                            "plan with foretrace plan.")
    if plan.sharding not in (Sharding.NONE, Sharding.PARAMETERS):
        raise PlanError(f"sharding={int(plan.sharding)} cannot be traced: replicas share nothing (ddp) or all they "
                        "have (fsdp2); choose one of them, or estimate the plan with foretrace plan.")
    if plan.pp == 1 and plan.microbatches is not None:
        raise PlanError("microbatches belong to a pipeline: add pp=2 or more, or accumulate gradients with "
                        "--set accumulation instead.")


def check_plan(settings: Settings, plan: ParallelPlan) -> None:
    """Raise ``PlanError``, in one sentence, unless the workload can run under the plan."""
    check_traceable(plan)
    name = settings.WORKLOAD
    if (plan.tp > 1 or plan.pp > 1) and name not in SPLIT_WORKLOADS:
        what = "tensor parallelism" if plan.tp > 1 else "a pipeline"
        raise PlanError(f"{name} cannot be split by {what} yet ({', '.join(sorted(SPLIT_WORKLOADS))} can); choose "
                             "ddp or fsdp2.")
    if plan.tp > 1:
        for setting in ("heads", "kv_heads"):
            _divides(settings, setting, "tp", plan.tp, _LARGER)
        _divides(settings, "hidden", "tp", plan.tp, _LARGER)
        _reaches(settings, "vocabulary", "tp", plan.tp)
    if plan.pp > 1:
        _reaches(settings, "depth", "pp", plan.pp)
        _divides(settings, "batch", "microbatches", plan.passes)
        if settings.accumulation > 1:
            raise PlanError(f"{name}: accumulation={settings.accumulation} does not go with a pipeline, whose "
                                 "micro-batches accumulate already; set microbatches in the plan instead.")
        if settings.compile:
            raise PlanError(f"{name}: compile=true does not go with a pipeline yet; set compile=false.")
    if plan.ep > 1:
        _experts_fit(settings, plan)
    if settings.compile and plan.tp > 1:
        raise PlanError(f"{name}: compile=true does not go with tensor parallelism yet; set compile=false.")
    if getattr(settings, "sharding", ""):
        _tables_fit(settings, plan)
    if plan.fsdp2 and getattr(settings, "sparse", False):
        raise PlanError(f"{name}: sparse=true does not go with fsdp2, which shards dense gradients; set "
                             "sparse=false or choose ddp.")


def _tables_fit(settings: Settings, plan: ParallelPlan) -> None:
    tables = settings.embedding_tables()
    if not plan.ddp:
        raise PlanError(f"{settings.WORKLOAD}: sharding spreads tables over ddp's replicas; choose ddp, or leave "
                        "sharding out.")
    try:
        pieces_of(tables, settings.sharding, plan.dp)  # type: ignore[attr-defined]
    except WorkloadError as error:
        raise PlanError(str(error)) from None


def _experts_fit(settings: Settings, plan: ParallelPlan) -> None:
    name = settings.WORKLOAD
    if name not in EXPERT_WORKLOADS:
        raise PlanError(f"{name} has no experts to spread over ep={plan.ep} ranks "
                             f"({', '.join(sorted(EXPERT_WORKLOADS))} has); leave ep out.")
    _divides(settings, "experts", "ep", plan.ep)
    if settings.compile:
        raise PlanError(f"{name}: compile=true does not go with expert parallelism yet; set compile=false.")


def stage_sizes(depth: int, stages: int) -> list[int]:
    """Return the blocks of each stage: equal numbers, or one more in the first stages (the last has the head)."""
    return [depth // stages + (stage < depth % stages) for stage in range(stages)]


def _divides(settings: Settings, name: str, dimension: str, size: int, larger: str = "") -> None:
    value = getattr(settings, name)
    if value % size:
        raise PlanError(f"{settings.WORKLOAD}: {name}={value} cannot be split evenly by {dimension}={size}; "
                             f"choose a multiple of {size} (--set {name}=…){larger}, or another {dimension}.")


def _reaches(settings: Settings, name: str, dimension: str, size: int) -> None:
    value = getattr(settings, name)
    if value < size:
        raise PlanError(f"{settings.WORKLOAD}: {name}={value} is less than {dimension}={size}, so that a rank "
                             f"would have nothing to do; choose a larger {name} (--set {name}=…){_LARGER}, or a "
                             f"smaller {dimension}.")
