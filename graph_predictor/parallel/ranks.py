"""A recorded step spread over ranks it never ran on: the program is traced again in a fake world under a parallel plan.

Collectives are then where the framework puts them (DDP's buckets as gradients become ready, FSDP2's gathers ahead and
reduce-scatters, tensor parallelism's pairs, a pipeline's sends), with the buffers it fills for them; every operation
that the recording has too keeps its measured time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graph_predictor.comm.collective_times import CollectiveModel
from graph_predictor.parallel.recorded_ddp import NOTE, spread_recording
from graph_predictor.prediction.scenario import EditError
from graph_predictor.synthesis.baseline import retraced
from tracer.graph import ExecutionGraph
from tracer.job import Job
from tracer.shape_only.devices import TracedDevice

if TYPE_CHECKING:
    from graph_predictor.prediction.predictor import Baseline

_SIZES = ("ddp", "fsdp2", "tp", "pp")
_MORE = ("microbatches", "bucket_mb", "ep", "accumulation")
MOST_SEPARATE = 8
"""Worlds up to this size are simulated rank by rank; of larger ones, one rank of each class of equal ranks."""


@dataclass(frozen=True)
class Ranks:
    """How a step is spread.

    Attributes:
        plan: kinds with sizes as ``tracer.fake_world.parse_plan`` reads them, such as "fsdp2=8,tp=2".
        settings: settings of the workload that are to be others, such as accumulation.
    """

    plan: str
    world_size: int
    settings: dict[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Ranks:
        """From "ddp=8", "fsdp2=8,tp=2", "ddp=4,bucket_mb=50,accumulation=8" or "pp=4,microbatches=8".

        Raises:
            EditError: an unknown part, or one without its size.
        """
        world, parts, settings = 1, [], {}
        for part in text.split(","):
            name, _, number = (piece.strip().lower() for piece in part.partition("="))
            if name not in (*_SIZES, *_MORE) or not number.isdecimal() or len(number) > 6 or (
                    not int(number)):
                raise EditError(f"{part.strip()!r} is no part of a plan: write kinds with their sizes, such as ddp=8, "
                                "fsdp2=8,tp=2, pp=4,microbatches=8 or fsdp2=8,ep=4 (there are "
                                f"{', '.join((*_SIZES, *_MORE))}).")
            if name == "accumulation":
                settings[name] = int(number)
                continue
            parts.append(f"{name}={number}")
            world *= int(number) if name in _SIZES else 1
        if not any(part.startswith(_SIZES) for part in parts):
            raise EditError(f"{text!r} names no ranks: add ddp=N, fsdp2=N, tp=N or pp=N.")
        return cls(",".join(parts), world, settings)

    def describe(self) -> str:
        """One phrase."""
        more = "".join(f", {name} {value}" for name, value in self.settings.items())
        return f"{self.plan} on {self.world_size:,} ranks{more}"


def traced(ranks: Ranks, workload: dict[str, Any], device: str | TracedDevice, *, also: Sequence[int] = ()) -> Job:
    """A workload's step under a plan, traced by shapes: all ranks of a small world, else one of each class.

    Args:
        workload: name and settings as a capture or trace keeps them.
        also: ranks that get a graph of their own too.

    Raises:
        EditError: nothing is known of the workload.
        FakeWorldError: the plan does not fit the workload.
    """
    from tracer import workloads
    from tracer.shape_only import trace_job

    values = {name: value for name, value in workload["settings"].items() if name != "device"}
    settings = workloads.configure(workload["name"], **{**values, **ranks.settings})
    return unfolded(trace_job(settings, device, world_size=ranks.world_size, parallel=ranks.plan), ranks, also)


def unfolded(job: Job, ranks: Ranks, also: Sequence[int] = ()) -> Job:
    """The ranks of a folded job that are simulated one by one: all of a small world, else one of each class.

    Raises:
        EditError: there is no such rank as one of ``also``.
    """
    wrong = [rank for rank in also if not 0 <= rank < ranks.world_size]
    if wrong:
        raise EditError(f"There is no rank {wrong[0]} among {ranks.world_size:,} ranks; name one from 0 to "
                        f"{ranks.world_size - 1:,}.")
    small = range(ranks.world_size) if ranks.world_size <= MOST_SEPARATE else ()
    own = sorted({*small, *also, *(graph.meta.rank for graph in job.graphs)})
    return replace(job, graphs=[job.rank(rank) for rank in own], classes=[])


def on_ranks(baseline: Baseline, ranks: Ranks, collectives: CollectiveModel | None = None, *,
             also: Sequence[int] = ()) -> Baseline:
    """A recorded step as it would be on many ranks: traced again under the plan, else by ``with_ddp``.

    Args:
        baseline: a recording of one rank.
        collectives: the cluster; by default the device's usual links.
        also: as ``traced``.

    Raises:
        EditError: the recording is of several ranks, or says too little for the plan.
        FakeWorldError: the plan does not fit the workload.
        PlanError: the cluster is too small.
    """
    graphs: list[ExecutionGraph] = baseline.built.graphs
    if len(graphs) > 1 or graphs[0].meta.world_size > 1:
        raise EditError("Only a step that was recorded on one rank can be spread over others; this is one of several.")
    workload = graphs[0].meta.workload
    if collectives is not None:
        collectives.check_fits(ranks.world_size)
    if workload:
        job = traced(ranks, workload, baseline.scenario.known_source().name, also=also)
        return retraced(baseline, job, ranks.describe(), collectives=collectives)
    return with_ddp(baseline, ranks, collectives, also=also)


def with_ddp(baseline: Baseline, ranks: Ranks, collectives: CollectiveModel | None = None, *,
             also: Sequence[int] = ()) -> Baseline:
    """A recorded step of a program that cannot be traced again, with DDP added to the recording: approximate.

    Raises:
        EditError: the plan is of more than DDP, or the recording does not show the gradients and their sizes.
    """
    from tracer.fake_world import DataParallel, parse_plan

    plan = parse_plan(ranks.plan, ranks.world_size)
    if plan.kind is not DataParallel.DDP or plan.dp != plan.world_size or plan.ep > 1 or ranks.settings:
        raise EditError("The recording does not say which workload of the suite it is of, so that it cannot be traced "
                        "again under a plan, and only ddp=N can be added to it as it is; record it with --workload, or "
                        "trace your own script under a plan with foretrace trace SCRIPT.py:FUNCTION --world-size N.")
    job = spread_recording(baseline.built.graphs[0], baseline.cycle, plan.world_size, plan.bucket_mb)
    found = retraced(baseline, unfolded(job, ranks, also), f"{ranks.describe()}, approximate", collectives=collectives)
    found.notes.insert(0, NOTE)
    return found
