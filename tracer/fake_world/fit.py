"""Whether a plan fits a workload, decided from the settings alone. Needs no torch."""

from __future__ import annotations

from tracer.fake_world.errors import FakeWorldError
from tracer.fake_world.plan import DataParallel, ParallelPlan
from tracer.workloads.settings import Settings

SPLIT_WORKLOADS = frozenset({"llama"})
"""Workloads that tensor parallelism and pipelines know how to split."""
EXPERT_WORKLOADS = frozenset({"moe"})
"""Workloads with experts."""


_LARGER = " or the published size (--preset real)"


def check_plan(settings: Settings, plan: ParallelPlan) -> None:
    """Raise ``FakeWorldError``, in one sentence, unless the plan can be done with the workload."""
    name = settings.WORKLOAD
    if (plan.tp > 1 or plan.pp > 1) and name not in SPLIT_WORKLOADS:
        what = "tensor parallelism" if plan.tp > 1 else "a pipeline"
        raise FakeWorldError(f"{name} cannot be split by {what} yet ({', '.join(sorted(SPLIT_WORKLOADS))} can); choose "
                             "ddp or fsdp2.")
    if plan.tp > 1:
        for setting in ("heads", "kv_heads"):
            _divides(settings, setting, "tp", plan.tp, _LARGER)
        _divides(settings, "hidden", "tp", plan.tp, _LARGER)
        _reaches(settings, "vocabulary", "tp", plan.tp)
    if plan.pp > 1:
        _reaches(settings, "depth", "pp", plan.pp)
        _divides(settings, "batch", "microbatches", plan.microbatches)
        if settings.accumulation > 1:
            raise FakeWorldError(f"{name}: accumulation={settings.accumulation} does not go with a pipeline, whose "
                                 "micro-batches accumulate already; set microbatches in the plan instead.")
        if settings.compile:
            raise FakeWorldError(f"{name}: compile=true does not go with a pipeline yet; set compile=false.")
    if plan.ep > 1:
        _experts_fit(settings, plan)
    if settings.compile and plan.tp > 1:
        raise FakeWorldError(f"{name}: compile=true does not go with tensor parallelism yet; set compile=false.")
    if plan.kind is DataParallel.FSDP2 and getattr(settings, "sparse", False):
        raise FakeWorldError(f"{name}: sparse=true does not go with fsdp2, which shards dense gradients; set "
                             "sparse=false or choose ddp.")


def _experts_fit(settings: Settings, plan: ParallelPlan) -> None:
    name = settings.WORKLOAD
    if name not in EXPERT_WORKLOADS:
        raise FakeWorldError(f"{name} has no experts to spread over ep={plan.ep} ranks "
                             f"({', '.join(sorted(EXPERT_WORKLOADS))} has); leave ep out.")
    _divides(settings, "experts", "ep", plan.ep)
    if settings.compile:
        raise FakeWorldError(f"{name}: compile=true does not go with expert parallelism yet; set compile=false.")


def stage_sizes(depth: int, stages: int) -> list[int]:
    """Blocks of each pipeline stage: as even as can be, the first stages one more (the last has the head)."""
    return [depth // stages + (stage < depth % stages) for stage in range(stages)]


def _divides(settings: Settings, name: str, dimension: str, size: int, larger: str = "") -> None:
    value = getattr(settings, name)
    if value % size:
        raise FakeWorldError(f"{settings.WORKLOAD}: {name}={value} cannot be split evenly by {dimension}={size}; "
                             f"choose a multiple of {size} (--set {name}=…){larger}, or another {dimension}.")


def _reaches(settings: Settings, name: str, dimension: str, size: int) -> None:
    value = getattr(settings, name)
    if value < size:
        raise FakeWorldError(f"{settings.WORKLOAD}: {name}={value} is less than {dimension}={size}, so that a rank "
                             f"would have nothing to do; choose a larger {name} (--set {name}=…){_LARGER}, or a "
                             f"smaller {dimension}.")
