"""A recorded step spread over ranks it never ran on: the program is traced again in a fake world under a parallel plan.

Collectives are then where the framework puts them (DDP's buckets as gradients become ready, FSDP2's gathers ahead and
reduce-scatters, tensor parallelism's pairs, a pipeline's sends), with the buffers it fills for them; every operation
that the recording has too keeps its measured time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graph_predictor.prediction.scenario import EditError
from graph_predictor.request.recorded_ddp import NOTE, spread_recording
from graph_predictor.synthesis.baseline import retraced
from kernel_models.collectives import CollectiveModel
from tracer.graph import ExecutionGraph
from tracer.job import Job
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.devices import TracedDevice

if TYPE_CHECKING:
    from graph_predictor.prediction.predictor import Baseline

MOST_SEPARATE = 8
"""Worlds up to this size are simulated rank by rank; of larger ones, one rank of each class of equal ranks."""


def settings_under(plan: ParallelPlan, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the workload's settings that change: those of ``sizes``, and what the plan says of micro-batches.

    Raises:
        PlanError: the two contradict each other.
    """
    own = {} if plan.microbatch is None else {"batch": plan.samples * (plan.passes if plan.pp > 1 else 1)}
    if plan.pp == 1 and plan.microbatches is not None:
        own["accumulation"] = plan.passes
    for name, value in own.items():
        if sizes.get(name, value) != value:
            raise PlanError(f"The plan says {name}={value} and the sizes say {name}={sizes[name]}; leave one of them "
                            "out.")
    return {**sizes, **own}


def traced(plan: ParallelPlan, workload: dict[str, Any], device: str | TracedDevice, *,
           sizes: Mapping[str, int] | None = None, also: Sequence[int] = ()) -> Job:
    """A workload's step under a plan, traced by shapes: all ranks of a small world, else one of each class.

    Args:
        workload: name and settings as a capture or trace keeps them.
        sizes: settings that are to be others.
        also: ranks that get a graph of their own too.

    Raises:
        PlanError: the plan does not fit the workload.
    """
    from tracer import workloads
    from tracer.shape_only import trace_job

    values = {name: value for name, value in workload["settings"].items() if name != "device"}
    settings = workloads.configure(workload["name"], **{**values, **settings_under(plan, sizes or {})})
    # Micro-batches without a pipeline are the workload's own.
    spread = replace(plan, microbatch=None, microbatches=plan.microbatches if plan.pp > 1 else None)
    job = trace_job(settings, device, world_size=plan.world_size, parallel=spread)
    return unfolded(job, plan.world_size, also)


def unfolded(job: Job, world_size: int, also: Sequence[int] = ()) -> Job:
    """The ranks of a folded job that are simulated one by one: all of a small world, else one of each class.

    Raises:
        EditError: there is no such rank as one of ``also``.
    """
    wrong = [rank for rank in also if not 0 <= rank < world_size]
    if wrong:
        raise EditError(f"There is no rank {wrong[0]} among {world_size:,} ranks; name one from 0 to "
                        f"{world_size - 1:,}.")
    small = range(world_size) if world_size <= MOST_SEPARATE else ()
    own = sorted({*small, *also, *(graph.meta.rank for graph in job.graphs)})
    return replace(job, graphs=[job.rank(rank) for rank in own], classes=[])


def on_ranks(baseline: Baseline, plan: ParallelPlan, collectives: CollectiveModel | None = None, *,
             sizes: Mapping[str, int] | None = None, also: Sequence[int] = ()) -> Baseline:
    """A recorded step as it would be on many ranks: traced again under the plan, else by ``with_ddp``.

    Args:
        baseline: a recording of one rank.
        plan: how the step is spread; micro-batches that it says are the workload's ``batch`` and ``accumulation``.
        collectives: the cluster; by default the device's usual links.
        sizes, also: as ``traced``.

    Raises:
        EditError: the recording is of several ranks, or says too little for the plan.
        PlanError: the plan does not fit the workload, or the cluster is too small.
    """
    graphs: list[ExecutionGraph] = baseline.built.graphs
    if len(graphs) > 1 or graphs[0].meta.world_size > 1:
        raise EditError("Only a step that was recorded on one rank can be spread over others; this is one of several.")
    workload = graphs[0].meta.workload
    if collectives is not None:
        collectives.check_fits(plan.world_size)
    if workload:
        job = traced(plan, workload, baseline.scenario.known_source().name, sizes=sizes, also=also)
        more = "".join(f", {name} {value}" for name, value in (sizes or {}).items())
        return retraced(baseline, job, f"{_described(plan)}{more}", collectives=collectives)
    return with_ddp(baseline, plan, collectives, also=also)


def with_ddp(baseline: Baseline, plan: ParallelPlan, collectives: CollectiveModel | None = None, *,
             also: Sequence[int] = ()) -> Baseline:
    """A recorded step of a program that cannot be traced again, with DDP added to the recording: approximate.

    Raises:
        EditError: the plan is of more than DDP, or the recording does not show the gradients and their sizes.
    """
    if not plan.ddp or plan != ParallelPlan(dp=plan.dp, bucket_mb=plan.bucket_mb, lone_ddp=plan.lone_ddp):
        raise EditError("The recording does not say which workload of the suite it is of, so that it cannot be traced "
                        "again under a plan, and only ddp=N can be added to it as it is; record it with --workload, or "
                        "trace your own script under a plan with foretrace trace SCRIPT.py:FUNCTION --world-size N.")
    job = spread_recording(baseline.built.graphs[0], baseline.cycle, plan.world_size, plan.bucket_mb)
    found = retraced(baseline, unfolded(job, plan.world_size, also), f"{_described(plan)}, approximate",
                     collectives=collectives)
    found.notes.insert(0, NOTE)
    return found


def _described(plan: ParallelPlan) -> str:
    return f"{plan} on {plan.world_size:,} ranks"
