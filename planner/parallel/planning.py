"""``plan``: the best ways to spread a decoder's step over a cluster, from names as a user writes them.

    foretrace.plan("llama", 64, preset="70b", device="h200-sxm")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graph_predictor.comm.clusters import cluster_of, measured_file
from graph_predictor.prediction.host_names import host_by_name
from graph_predictor.request.memory_fit import StageMemory
from kernel_models.collectives import CollectiveModel, Topology, topology_of
from kernel_models.device import DeviceSpec
from kernel_models.device_choice import find_device
from kernel_models.profile import DeviceProfile
from planner.parallel.calibrate import PlanCalibration, calibrate
from planner.parallel.communication import mixture_of_plan
from planner.parallel.config_file import ConfigModel, config_path, decoder_of_config, read_config
from planner.parallel.decoder import DECODERS, decoder_of, published
from planner.parallel.estimate import Rates
from planner.parallel.frameworks import Framework, frameworks_of
from planner.parallel.loads import loads_of
from planner.parallel.measured_plans import read_measured_plans
from planner.parallel.memory_timeline import MemoryPoint
from planner.parallel.narrow import narrow_type
from planner.parallel.pieces import LayerPieces
from planner.parallel.plan_batch import says_batch, with_batch
from planner.parallel.plan_host import launch_us as launch_us_on
from planner.parallel.plan_program import TooManyKernels
from planner.parallel.published_configs import CONFIGS
from planner.parallel.relief import Relief
from planner.parallel.search import BEST, Ranked, Refused, price_plan, search
from planner.parallel.simulated_plan import SimulatedPlan, simulate_plan
from planner.parallel.spreads import PUBLISHED
from planner.parallel.technology import Technology
from tracer.errors import ForetraceError
from tracer.job import Job, read_job
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.transformer import TransformerShape
from tracer.shown import MOST_BARS, Chart, ChartSeries, Shown

if TYPE_CHECKING:
    import pandas

TOLD_HOST = 0.3
"""Spread of the host's time where a user says what a launch takes: of other operations it is another one."""
_MOST_DIGITS = 10
"""Most digits of a number of samples, and one."""


@dataclass(frozen=True, repr=False)
class Plans(Shown):
    """Plans of a decoder on a number of GPUs, the fastest first, and why others are not among them.

    Attributes:
        model: the decoder's name.
        shape: its sizes.
        gpus, device, topology: the cluster.
        plans: those that can be and fit.
        refused: reasons why others cannot, each with its number of plans.
        slower, slower_us: how many more plans there are, none of which takes less than so many µs.
        notes: what was assumed.
        calibration: on measured steps, where there were some.
        relief: where the one plan that was asked for does not fit, what would have to change.
        stages: of the one plan that was asked for, the memory of each stage, and over its step.
        simulated: the fastest plan's step on the simulator, where that was asked for and is not too long for it.
    """

    model: str
    shape: TransformerShape
    gpus: int
    device: str
    topology: str
    plans: tuple[Ranked, ...]
    refused: tuple[Refused, ...]
    notes: tuple[str, ...]
    slower: int = 0
    slower_us: float = 0.0
    calibration: PlanCalibration | None = None
    relief: tuple[Relief, ...] = ()
    stages: tuple[tuple[StageMemory, list[MemoryPoint]], ...] = ()
    simulated: SimulatedPlan | None = None

    @property
    def considered(self) -> int:
        """Plans in all."""
        return len(self.plans) + sum(each.count for each in self.refused) + self.slower

    def headline(self) -> str:
        """Say what the fastest plan is."""
        where = f"{self.model} on {self.gpus} GPUs of {self.topology}: {self.considered:,} plans"
        if not self.plans:
            return f"{where}, none possible"
        best = self.plans[0].estimate
        return (f"{where}, {len(self.plans):,} possible; fastest {best.plan} with {best.time_us / 1e3:,.1f} ms "
                f"({best.low_us / 1e3:,.1f} to {best.high_us / 1e3:,.1f})")

    def chart(self) -> Chart:
        """Return the fastest plans, with their intervals."""
        best = [each.estimate for each in self.plans[:MOST_BARS]]
        return Chart("bars", self.headline(), [str(one.plan) for one in best], [ChartSeries(
            "step", [one.time_us / 1e3 for one in best], [one.low_us / 1e3 for one in best],
            [one.high_us / 1e3 for one in best])], "ms")

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Make the possible plans, times in ms, and the reasons against the others."""
        return {"plans": partial(_frame, [_row(each) for each in self.plans]),
                "refused": partial(_frame, [{"reason": each.reason, "example": each.example, "plans": each.count}
                                            for each in self.refused])}


def plan(source: str | Job, gpus: int, *, device: str = "h200-sxm", topology: str | None = None,
         settings: Sequence[str] = (), preset: str | None = None, global_batch: int | None = None,
         only: str | None = None, framework: str | None = None, best: int | None = BEST,
         memory_limit: float | None = None, profile: DeviceProfile | None = None, comm_profile: str | None = None,
         comm_choices: str | None = None, linears: str = "",
         launch_us: float | None = None, host: float = 1.0, host_from: str | None = None,
         measured: str | PlanCalibration | None = None, pieces: LayerPieces | None = None,
         technology: Technology = Technology(), simulated: bool = True) -> Plans:  # noqa: B008
    """Find the best plans there are: data, tensor, sequence, pipeline, context and expert parallelism, schedules,
    micro-batch, recomputation, sharding and copies of it.

    Args:
        source: a workload ("llama", "gpt2", "moe"), a capture or shape-only trace of one, a model's Hugging Face
            ``config.json`` (the file or its folder), or a published one's name ("deepseek-v3").
        gpus: of the job.
        device: of each; a name or a file.
        topology: of the cluster; by default the device's usual nodes.
        settings: of the workload, as "seq=4096"; of a config seq, batch, layers, dtype, imbalance and predictions.
        preset: of the workload, or a trained model: llama 8b, 70b, 405b; gpt2 xl, 175b; moe 8x7b.
        global_batch: sequences of a step; by default what the source does, on every GPU, or what ``only`` says.
        only: one plan alone, such as "dp=8,tp=4,pp=2,microbatches=16".
        framework: "megatron", "torchtitan" or "fsdp": the only one whose plans are wanted.
        best: how many plans are wanted; ``None`` for all that can be and fit, which takes long.
        memory_limit: bytes of a device; by default all it has.
        profile: fitted models of the device.
        comm_profile: a file of measured collectives.
        comm_choices: a file of several backends' measured collectives, or "auto": each is done by the best of them.
        linears: "fp8", "fp8_block", "mxfp8" or "nvfp4": what linear layers' products are computed in.
        launch_us: host time of a kernel's launch, where it is known.
        host: factor on it.
        host_from: a host by name, or captures on it: a launch then costs what its operations do.
        measured: a table of plans that were run, as ``measured_plans`` reads it, on which kernels, collectives and host
            are calibrated; or what another call has learned of one.
        pieces: what another call with this device and profile has traced, for jobs of several sizes.
        technology: factors on the device's and its nodes' figures; what was measured of them is then not known.
        simulated: whether the fastest plan's step is simulated too, as a check of its estimate.

    Raises:
        PlanError: the source is no decoder, the plan is none, or the batch can be split by no number of replicas.
        ForetraceError: a name or a file is not known, or cannot be read.
    """
    _check_numbers(gpus, global_batch, best, memory_limit, launch_us)
    check_finite(host, "host", "a factor of the host time")
    if host <= 0:
        raise PlanError(f"host={host:g} is no factor of a time; give a number above 0.")
    if launch_us is not None and host_from is not None:
        raise PlanError("A launch's time and a host to take it from are two answers to one question; give one of them.")
    known_device = find_device(device)
    if known_device.vendor == "host":
        raise PlanError(f"Plans are of GPUs, and {known_device.name} is a host's processor; name a GPU (foretrace "
                        "devices).")
    spec = technology.device(known_device)
    if (profile is not None and spec is not known_device) or (
            measured_file(comm_profile, comm_choices) is not None and technology.link != 1.0):
        raise PlanError(f"What was measured is of {known_device.name} as it is and says nothing of {technology}; leave "
                        "the profile out.")
    name, shape, per_gpu, assumed = read_decoder(source, settings, preset)
    if memory_limit is not None and memory_limit > spec.memory_gb * 1e9 > 0:
        raise PlanError(f"A memory limit of {memory_limit / 1e9:,.4g} GB is more than the {spec.memory_gb:,.4g} GB "
                        f"that {spec.name} has; give less, or --memory for a device with more.")
    shape = shape.in_linears(linears)
    narrow_type(linears, spec)
    collectives = None
    if topology is not None or measured_file(comm_profile, comm_choices) is not None:
        collectives = cluster_of(topology, comm_profile, None, comm_choices)
        collectives = replace(collectives, topology=technology.cluster(collectives.topology))

    def cluster(size: int) -> CollectiveModel:
        return collectives or CollectiveModel(technology.cluster(topology_of(known_device, size)),
                                              mixed=comm_choices is not None)

    pieces = pieces or LayerPieces(spec, profile)
    start = Rates()
    if host_from is not None:
        known_host = host_by_name(host_from, lambda path: read_job([path]))
        start = _with_launches(launch_us_on(known_host, shape, spec), known_host.spread)
    elif launch_us is not None:
        start = _with_launches(launch_us, TOLD_HOST)
    rates = replace(start, host_us=start.host_us * host, host_collective_us=start.host_collective_us * host)
    calibration = None if isinstance(measured, str) else measured
    if isinstance(measured, str):
        def model(name: str, its_preset: str, its_settings: list[str] | None) -> TransformerShape:
            same = not name or name == source
            own = its_settings or (settings if same else ())
            return read_decoder(name or source, own, its_preset or (preset if same else None))[1].in_linears(linears)

        calibration = calibrate(read_measured_plans(measured, model, pieces, cluster), rates)
    rates = rates if calibration is None else calibration.rates
    notes = list(assumed)
    if only is not None:
        # A plan's own word goes before the source's, and not before the user's for the whole step.
        own = not says_batch(only) and any(item.partition("=")[0].strip() == "batch" for item in settings)
        alone = with_batch(ParallelPlan.parse(only, gpus), only, global_batch or (per_gpu * gpus if own else None))
        wanted = framework_of(framework)
        if wanted is not None and wanted not in frameworks_of(alone, shape):
            raise PlanError(f"{wanted.value} does not have the plan {alone}; leave the framework out, or "
                            "the plan for the best of its own.")
        found = price_plan(alone, shape, pieces, cluster(gpus), memory_limit=memory_limit, rates=rates)
    else:
        batch = global_batch or per_gpu * gpus
        found = search(shape, gpus, batch, pieces, cluster(gpus), memory_limit=memory_limit, rates=rates,
                       framework=framework_of(framework), best=best)
        notes += _not_considered(batch, gpus)
    on = cluster(gpus).topology
    notes += other_nodes(on, known_device)
    if calibration is not None:
        notes.append(str(calibration))
    elif host_from is not None:
        notes.append(f"A launch is taken to cost the host {rates.host_us:.3g} µs, as operations of {host_from} do, "
                     "with the Python between them.")
    elif launch_us is None:
        notes.append(f"A launch is taken to cost the host {rates.host_us:g} µs; give --launch-us where it is known, or "
                     "--host-from.")
    if comm_choices is not None and found.plans:
        notes += mixture_of_plan(found.plans[0].plan, shape, cluster(gpus)).sentences()
    program = None
    if simulated and found.plans:
        try:
            program = simulate_plan(loads_of(found.plans[0].plan, shape, pieces, cluster(gpus)), rates)
        except TooManyKernels as error:
            notes.append(str(error))
    label = f"{known_device.name} ({technology})" if str(technology) else known_device.name
    return Plans(name, shape, gpus, label, on.name, tuple(found.plans), tuple(found.refused), tuple(notes),
                 found.slower, found.slower_us, calibration, tuple(found.relief), tuple(found.stages), program)


def _with_launches(us: float, spread: float) -> Rates:
    """Return the usual rates with what a launch costs the host."""
    return replace(Rates(), host_us=us, host_collective_us=us, spreads=replace(PUBLISHED, host=spread))


def _check_numbers(gpus: int, global_batch: int | None, best: int | None, memory_limit: float | None,
                   launch_us: float | None) -> None:
    """Raise ``PlanError`` for a figure that no job can have."""
    for name, value in (("gpus", gpus), ("global_batch", global_batch), ("best", best)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise PlanError(f"{name}={value!r} is not possible; give a whole number from 1.")
    for name, number, what in (("launch_us", launch_us, "the host time of a launch in µs"),
                               ("memory_limit", memory_limit, "bytes of a device")):
        if number is not None and (not isinstance(number, (int, float)) or not math.isfinite(number) or number < 0):
            raise PlanError(f"{name}={number!r} is no figure to compute with; give {what}, 0 or more.")


def other_nodes(on: Topology, spec: DeviceSpec) -> list[str]:
    """Say where a topology's nodes have another device than the one that computes."""
    node = find_device(on.node.device).name
    return [] if node == spec.name else [
        f"The nodes of the topology have {node}, not {spec.name}; their network is taken."]


def framework_of(name: str | None) -> Framework | None:
    """Return the framework of a name; ``None`` and "any" are all of them. Raises ``PlanError``."""
    if name is None or name == "any":
        return None
    try:
        return Framework(name.strip().lower())
    except ValueError:
        raise PlanError(f"{name} is no framework whose plans are known; give "
                        f"{', '.join(each.value for each in Framework)} or any.") from None


def check_finite(value: float | None, name: str, what: str) -> None:
    """Raise ``PlanError``, which calls the value ``name``, for infinity and for what is no number: they would be ranked
    like any other."""
    if value is not None and not math.isfinite(value):
        raise PlanError(f"{name} {value:g} is no figure to compute with; give {what}.")


def read_decoder(source: str | Job, assignments: Sequence[str] = (),
                 preset: str | None = None) -> tuple[str, TransformerShape, int, tuple[str, ...]]:
    """Return what is planned, the decoder of a workload's or a model's name, a config or a trace, the sequences of its
    step, and what was assumed."""
    from tracer import workloads

    if isinstance(source, str) and (model := config_model(source, assignments)) is not None:
        if preset is not None:
            raise PlanError(f"{source} says itself which sizes its model has; leave --preset {preset} out.")
        changed = f" with {', '.join(assignments)}" if assignments else ""
        return f"{model.name}{changed}", model.shape, model.batch, model.notes
    if isinstance(source, str) and source in workloads.names():
        chosen, own = published(source, preset)
        settings = workloads.parse(source, [*own, *assignments], preset="real" if own else chosen)
        changed = f" with {', '.join(assignments)}" if assignments else ""
        return (f"{source} {chosen}{changed}", decoder_of(source, workloads.as_plain(settings)),
                settings.samples_per_step, ())
    job = _read(source) if isinstance(source, str) else source
    meta, said = job.graphs[0].meta, source if isinstance(source, str) else "The job"
    if not meta.workload:
        raise PlanError(f"{said} does not say which model it is of, so that how to split its layers is not known; "
                        "give a workload, or a capture or trace made with --workload.")
    if preset is not None:
        raise PlanError(f"{said} says itself which sizes its model has; leave --preset {preset} out.")
    values = {**meta.workload["settings"], **dict(item.partition("=")[::2] for item in assignments)}
    return (f"{meta.workload['name']} of {said}", decoder_of(meta.workload["name"], values),
            _whole(values, "batch") * _whole(values, "accumulation"), ())


def _check_there(source: str) -> None:
    """Raise ``PlanError`` for a word that is neither a path nor a name of a model."""
    if Path(source).name != source or Path(source).suffix or Path(source).exists():
        return
    names = [*DECODERS, *CONFIGS]
    near = get_close_matches(source.lower(), names, n=3)
    said = f"did you mean {' or '.join(near)}?" if near else f"known models are {', '.join(names)}."
    raise PlanError(f"{source} is neither a path nor a model that is known; {said}")


def _read(source: str) -> Job:
    """Return a capture or trace; for what is none, say too that it is no model's config."""
    _check_there(source)
    try:
        return read_job([source])
    except ForetraceError as error:
        raise PlanError(f"{error} Nor is {source} a model's config.json, which has a model_type, or a folder with "
                        "one.") from None


def config_model(source: str, assignments: Sequence[str]) -> ConfigModel | None:
    """Return the model of a config's path or of a published model's name; ``None`` for another source."""
    if source in CONFIGS:
        return decoder_of_config(CONFIGS[source], source, source, assignments)
    path = config_path(source)
    return None if path is None else read_config(path, assignments)


def _whole(values: Mapping[str, Any], name: str) -> int:
    """Return a setting that is a number of samples, 1 if it is not there. Raises ``PlanError``."""
    text = str(values.get(name, 1))
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < _MOST_DIGITS and int(text)):
        raise PlanError(f"The setting {name}={text[:_MOST_DIGITS]} is no number of samples; give --set {name}=8.")
    return int(text)


def _not_considered(batch: int, gpus: int) -> list[str]:
    """Say which numbers of replicas the batch cannot be split over."""
    uneven = [str(dp) for dp in range(1, gpus + 1) if gpus % dp == 0 and batch % dp]
    return [f"A batch of {batch:,} sequences cannot be split evenly over dp={', '.join(uneven)}: there are no plans "
            "with these."] if uneven else []


def _row(each: Ranked) -> dict[str, Any]:
    e = each.estimate
    return {"plan": str(e.plan), "step_ms": e.time_us / 1e3, "low_ms": e.low_us / 1e3, "high_ms": e.high_us / 1e3,
            "memory_gb": each.memory.total / 1e9, "exposed_communication_ms": e.exposed_us / 1e3, "bubble": e.bubble,
            "sequences_per_second": e.plan.global_batch / e.time_us * 1e6, "bound": e.bound}


def _frame(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame(rows)
