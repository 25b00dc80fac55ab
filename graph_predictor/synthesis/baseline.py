"""Any job made ready for predictions: recorded, traced by shapes, or traced by shapes with recorded times.

    job = tracer.read_job("resnet50-V100/")
    baseline_of(job).predict([Device("a100-sxm-40g")]).step_time_us
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graph_predictor.prediction.predictor import Baseline, Spreads
from graph_predictor.prediction.repeat import steps_of
from graph_predictor.prediction.scenario import (
    BatchChange,
    DeviceChange,
    HostChange,
    KernelChange,
    KernelSources,
    Scenario,
)
from graph_predictor.prediction.step_spread import RESOLVED
from graph_predictor.recorded.facts import damage_notes
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_slices import host_slices
from graph_predictor.synthesis.program import RankTimes, synthesize
from graph_predictor.synthesis.recorded_times import SharedCores, StandInTimes, cores_shared
from graph_predictor.synthesis.step import (
    SynthesizedStep,
    check_fits,
    collective_notes,
    collective_works,
    modelled_step,
    with_host_waits,
)
from kernel_models.device import DeviceSpec
from kernel_models.pricing import Models
from kernel_models.spreads import SHARED_CORES
from tracer.errors import ForetraceError
from tracer.graph import SHAPE_ONLY, ExecutionGraph
from tracer.job import AnyJob, Job, graphs_of

if TYPE_CHECKING:
    from kernel_models.collectives import CollectiveModel
    from kernel_models.host.model import HostModel


def baseline_of(job: AnyJob, steps: str | int | range | None = None, *, device: DeviceSpec | None = None,
                models: Models | None = None, host: HostModel | None = None,
                collectives: CollectiveModel | None = None, profiled: bool = False,
                built: Built | None = None) -> Baseline:
    """Make a job ready for predictions.

    Args:
        job: a job, its graphs, or one rank's graph.
        steps: which steps to repeat, see ``Baseline.recorded``; a job traced by shapes alone has a single step.
        device: the device of the recording, if the trace lacks it or states a wrong one; for a step traced by shapes
            alone, the device it would run on.
        models: fitted models of that device.
        host: for a step traced by shapes alone, model of the host it would run on.
        collectives: for a step traced by shapes alone, the cluster it would run on.
        profiled, built: for a recorded job: predict the step under the profiler; its program, already built.

    Raises:
        ForetraceError: there is nothing to simulate, no step, or no such step.
    """
    graphs, notes = graphs_of(job), list(job.notes) if isinstance(job, Job) else []
    if not graphs:
        raise ForetraceError("There is nothing to predict from: no graph was given. Read a trace or a job first.")
    if not _shapes_only(graphs):
        return Baseline.recorded(graphs, steps, device=device, models=models, profiled=profiled, notes=notes,
                                 built=built)
    step = modelled_step(graphs, device, models, host, collectives)
    scenario = _scenario(step, models, steps, profiled=False)
    return Baseline(scenario, Spreads(step.host_spread, RESOLVED), [*notes, *damage_notes(graphs), *step.notes],
                    ran=False)


def retraced(recorded: Baseline, job: AnyJob, change: str = "", *, collectives: CollectiveModel | None = None) -> \
        Baseline:
    """Return the baseline of a step traced by shapes, for instance at other sizes, with the times of a recorded job.

    A traced operation takes the time of its matching recorded operation: as measured if the sizes are equal, else
    measured × the models' ratio. Without a match, models price it.

    Args:
        recorded: baseline of the recorded job.
        job: traced by shapes, one graph a rank; ranks beyond the recorded ones take the last recorded rank's times.
        change: a phrase for reports on what is different.
        collectives: model of another cluster to run on.

    Raises:
        ForetraceError: the job was recorded, or the baseline was not; or it has no sizes to compare (``EditError``).
    """
    graphs, notes = graphs_of(job), list(job.notes) if isinstance(job, Job) else []
    if not recorded.ran or not _shapes_only(graphs):
        raise ForetraceError("Times go from a recorded step to one that was traced by shapes alone; these are not of "
                             "these two kinds.")
    was, spreads = recorded.scenario, recorded.spreads
    times = StandInTimes(was, spreads.host)
    step = anchored_step(graphs, times, collectives)
    scenario = _scenario(step, was.devices.source_models, None, profiled=was.profiled, origin=times.origin,
                         batches=BatchChange(was.batches.loader))
    said = [*recorded.notes, *notes, *damage_notes(graphs), *step.notes]
    return Baseline(scenario, Spreads(step.host_spread, spreads.least), said, ran=False, origin=recorded,
                    changes=(change,) if change else ())


def anchored_step(graphs: Sequence[ExecutionGraph], recorded: StandInTimes,
                  collectives: CollectiveModel | None = None) -> SynthesizedStep:
    """Return a step traced by shapes with the times of matching recorded operations.

    Args:
        graphs: the graphs of one job, one for each rank.
        recorded: the recorded job that the times come from.
        collectives: model of another cluster; by default collectives take their recorded times.

    Raises:
        EditError: the recording does not state its device, or the sizes of its operations.
    """
    spec = recorded.device
    check_fits(graphs, collectives)
    ranks = []
    shared = _cores_shared(graphs, recorded, collectives) if recorded.on_cpu else None
    for position, graph in enumerate(graphs):
        works = collective_works(graph, spec, collectives)
        times = recorded.times(graph, position, works, measured_collectives=collectives is None)
        times = times if shared is None else shared.apply(graph, times)
        ranks.append(RankTimes(graph, with_host_waits(graph, times, spec), recorded.constants(position)))
    made = synthesize(ranks)
    device_ns = float(made.built.program.kernel_duration.sum())
    notes = [*recorded.notes(device_ns), *(() if shared is None else (shared.note(),)),
             *(() if collectives is None else collective_notes(graphs, spec, collectives))]
    change = recorded.change_spread if shared is None else float(np.hypot(recorded.change_spread, SHARED_CORES))
    return SynthesizedStep(made, spec, recorded.recorded_spread, recorded.host_source, change, tuple(notes), (),
                           recorded.guessed_share)


def _cores_shared(graphs: Sequence[ExecutionGraph], recorded: StandInTimes, collectives: CollectiveModel | None) -> \
        SharedCores | None:
    ranks = max(graph.meta.world_size for graph in graphs)
    if collectives is not None:
        ranks = min(ranks, collectives.topology.node.gpus)
    return cores_shared(recorded.scenario.built.graphs[0].meta, ranks)


def _scenario(step: SynthesizedStep, models: Models | None, steps: str | int | range | None,
              **known: object) -> Scenario:
    made = step.made
    cycle = steps_of(made.built, steps)
    return Scenario(
        made.built, cycle, host_slices(made.built), DeviceChange(step.device, models),
        KernelChange(sources=KernelSources(made.source, made.low, made.high)),
        HostChange(spread=step.change_spread, source=step.host_source, guessed=step.guessed), warnings=step.warnings,
        **known)  # type: ignore[arg-type]


def _shapes_only(graphs: Sequence[ExecutionGraph]) -> bool:
    return all(graph.meta.era == SHAPE_ONLY for graph in graphs)
