"""``plan``: the best ways to spread a decoder's step over a cluster, from names as a user writes them.

    foretrace.plan("llama", 64, preset="70b", device="h200-sxm")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from graph_predictor.comm.clusters import bandwidths_of, cluster_of, measured_file
from graph_predictor.prediction.host_steps import host_by_name, traced_host_step
from graph_predictor.simulation.program import MOST_FACTOR
from graph_predictor.synthesis.step import calls_by_operation
from kernel_models.collectives import CollectiveModel, planned_topology
from kernel_models.device import DeviceSpec, find_device, scaled_device, shape_device
from kernel_models.host.model import HostModel
from kernel_models.profile import DeviceProfile
from planner.parallel.calibrate import SPREADS, PlanCalibration, calibrate, read_measured_plans
from planner.parallel.comm_study import mixture_of_plan
from planner.parallel.corrections import UNCORRECTED, CorrectionFactors
from planner.parallel.decoder import other_nodes, read_decoder
from planner.parallel.estimate import Estimate, StepSchedule, estimate, step_schedule
from planner.parallel.frameworks import FrameworkProfile, profile_of
from planner.parallel.layer_costs import LayerCosts, narrow_type
from planner.parallel.plan_costs import costs_of_plan
from planner.parallel.search import BEST, Found, Ranked, price_plan, search
from planner.parallel.space import Framework, frameworks_of, says_batch, with_batch
from planner.requests import by_fields
from tracer.job import Job, read_job
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape
from tracer.shown import MOST_BARS, Chart, ChartSeries, Shown, frame_of

if TYPE_CHECKING:
    import pandas

TOLD_HOST = 0.3
"""Spread of the host's time where a user says what a launch takes: of other operations it is another one. An
assumption."""


@dataclass(frozen=True, slots=True)
class Technology:
    """Factors on a device's and its nodes' figures.

    Attributes:
        clock, bandwidth, memory, power: of the device: its rates, its memory's speed and size, its board's limit.
        link: on the links between a node's GPUs, and on the network cards that join nodes.
    """

    clock: float = 1.0
    bandwidth: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    power: float = 1.0

    def __str__(self) -> str:
        return ", ".join(f"{name} × {factor:g}" for name, factor in asdict(self).items() if factor != 1.0)

    def device(self, spec: DeviceSpec) -> DeviceSpec:
        """Return the device so changed, by a name that says it; itself where nothing of it is."""
        edited = scaled_device(spec, clock=self.clock, bandwidth=self.bandwidth, memory=self.memory, power=self.power)
        return edited if edited is spec else replace(edited, name=f"{spec.name} ({replace(self, link=1.0)})")


AS_IT_IS = Technology()


@dataclass(repr=False, kw_only=True)
class Plans(Shown, Found):
    """Plans of a decoder on a number of GPUs, the fastest first, and why others are not among them.

    Attributes:
        model: the decoder's name.
        shape: its sizes.
        gpus, device, topology: the cluster.
        notes: what was assumed.
        calibration: on measured steps, where there were some.
        schedule: when the work of the fastest plan's step is done.
    """

    model: str
    shape: TransformerShape
    gpus: int
    device: str
    topology: str
    notes: tuple[str, ...]
    calibration: PlanCalibration | None = None
    schedule: StepSchedule | None = None

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
        return {"plans": partial(frame_of, [_row(each) for each in self.plans]),
                "refused": partial(frame_of, [{"reason": each.reason, "example": each.example, "plans": each.count,
                                             "least_bytes": each.least_bytes}
                                            for each in self.refused])}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What plans are wanted for.

    Attributes:
        source: a workload ("llama", "gpt2", "moe"), a capture or shape-only trace of one, a model's Hugging Face
            ``config.json`` (the file or its folder), or a published one's name ("deepseek-v3").
        gpus: of the job.
        device: of each; a name or a file.
        topology: of the cluster; by default the device's usual nodes.
        settings: of the workload, as "seq=4096"; of a config seq, batch, layers, dtype, imbalance and predictions; of
            any source attention=unfused, dropout=0.1 and dtype=fp16.
        preset: of the workload, or a trained model: llama 8b, 70b, 405b; gpt2 xl, 175b; moe 8x7b.
        global_batch: sequences of a step; by default what the source does, on every GPU, or what ``only`` says.
        only: one plan alone, such as "dp=8,tp=4,pp=2,microbatches=16".
        framework: "megatron", "torchtitan", "fsdp", "nanotron" or "deepspeed": the only one whose plans are wanted, as
            it runs them (``FrameworkProfile``).
        best: how many plans are wanted; ``None`` for all that can be and fit, which takes long.
        memory_limit: bytes of a device; by default all it has.
        profile: fitted models of the device.
        comm_profile: a file of measured collectives, or a table or text of measured bandwidths (``BusBandwidths``).
        comm_choices: a file of several backends' measured collectives, or "auto": each is done by the best of them.
        linears: "fp8", "fp8_block", "mxfp8" or "nvfp4": what linear layers' products are computed in.
        launch_us: host time of a kernel's launch, where it is known.
        host: factor on it.
        host_from: a host by name, or captures on it: a launch then costs what its operations do.
        measured: a table of plans that were run, as ``read_measured_plans`` reads it, on which kernels, collectives and
            host are calibrated; or what another call has learned of one.
        pieces: what another call with this device and profile has traced, for jobs of several sizes.
        technology: factors on the device's and its nodes' figures; what was measured of them is then not known.

    Raises:
        PlanError: two of its parts contradict each other, or one is a figure that no job can have.
    """

    source: str | Job = field(kw_only=False)
    gpus: int = field(kw_only=False)
    device: str = "h200-sxm"
    topology: str | None = None
    settings: Sequence[str] = ()
    preset: str | None = None
    global_batch: int | None = None
    only: str | None = None
    framework: str | None = None
    best: int | None = BEST
    memory_limit: float | None = None
    profile: DeviceProfile | None = None
    comm_profile: str | None = None
    comm_choices: str | None = None
    linears: str = ""
    launch_us: float | None = None
    host: float = 1.0
    host_from: str | None = None
    measured: str | PlanCalibration | None = None
    pieces: LayerCosts | None = None
    technology: Technology = AS_IT_IS

    def __post_init__(self) -> None:
        for name in ("gpus", "global_batch", "best"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise PlanError(f"{name}={value!r} is not possible; give a whole number from 1.")
        for name, what in (("launch_us", "the host time of a launch in µs"), ("memory_limit", "bytes of a device")):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, (int, float)) or not math.isfinite(number)
                                       or number < 0):
                raise PlanError(f"{name}={number!r} is no figure to compute with; give {what}, 0 or more.")
        check_finite(self.host, "host", "a factor of the host time")
        if self.host <= 0:
            raise PlanError(f"host={self.host:g} is no factor of a time; give a number above 0.")
        if self.launch_us is not None and self.host_from is not None:
            raise PlanError("A launch's time and a host to take it from are two answers to one question; give one of "
                            "them.")

    def devices(self) -> tuple[DeviceSpec, DeviceSpec]:
        """Return the device as it is known, and as it is changed.

        Raises:
            PlanError: it is no GPU, or what was measured of it says nothing of the changed one.
        """
        known = find_device(self.device)
        if known.vendor == "host":
            raise PlanError(f"Plans are of GPUs, and {known.name} is a host's processor; name a GPU (foretrace "
                            "devices).")
        spec = self.technology.device(known)
        if (self.profile is not None and spec is not known) or (
                measured_file(self.comm_profile, self.comm_choices) is not None and self.technology.link != 1.0):
            raise PlanError(f"What was measured is of {known.name} as it is and says nothing of {self.technology}; "
                            "leave the profile out.")
        if self.memory_limit is not None and self.memory_limit > spec.memory_gb * 1e9 > 0:
            raise PlanError(f"A memory limit of {self.memory_limit / 1e9:,.4g} GB is more than the "
                            f"{spec.memory_gb:,.4g} GB that {spec.name} has; give less, or --memory for a device with "
                            "more.")
        return known, spec

    def clusters(self, known: DeviceSpec) -> Callable[[int], CollectiveModel]:
        """Return the collectives by number of GPUs: of the cluster that was named, or of the device's usual nodes."""
        bandwidths = bandwidths_of(self.comm_profile, self.comm_choices)
        if self.topology is None and (bandwidths is not None or measured_file(
                self.comm_profile, self.comm_choices) is None):
            return lambda size: CollectiveModel(planned_topology(known, size).with_links(self.technology.link),
                                                mixed=self.comm_choices is not None, bandwidths=bandwidths)
        named = cluster_of(self.topology, self.comm_profile, None, self.comm_choices)
        named = replace(named, topology=named.topology.with_links(self.technology.link))
        return lambda size: named

    @property
    def runs(self) -> FrameworkProfile:
        """Return how the framework that is wanted runs a step."""
        return profile_of(self.framework)

    def start(self, shape: TransformerShape, spec: DeviceSpec, cluster: CollectiveModel) -> CorrectionFactors:
        """Return the factors with what a launch costs the host, as far as it is known."""
        own = self.runs.rated(UNCORRECTED, cluster)
        us, spread = self.launch_us, TOLD_HOST
        if self.host_from is not None:
            host = host_by_name(self.host_from, lambda path: read_job([path]))
            us, spread = launch_us(host, shape, spec), host.spread
        start = own if us is None else replace(
            own, host_us=us, host_collective_us=us, spreads=replace(own.spreads, host=spread))
        return replace(start, host_us=start.host_us * self.host,
                       host_collective_us=start.host_collective_us * self.host)

    def calibration(self, pieces: LayerCosts, cluster: Callable[[int], CollectiveModel],
                    start: CorrectionFactors) -> PlanCalibration | None:
        """Return what measured steps say, where there are some."""
        if not isinstance(self.measured, str):
            return self.measured

        def model(name: str, preset: str, settings: list[str] | None) -> TransformerShape:
            same = not name or name == self.source
            own = settings or (self.settings if same else ())
            shape = read_decoder(name or self.source, own, preset or (self.preset if same else None))[1]
            return self.runs.shaped(shape.in_linears(self.linears))

        return calibrate(read_measured_plans(self.measured, model, pieces, cluster, self.runs.planned), start,
                         self.runs.widths or SPREADS)

    def said_plan(self, text: str, per_gpu: int) -> ParallelPlan:
        """Return a plan as its text has it, with the sequences of the step. Raises ``PlanError``: it is none."""
        # A plan's own word goes before the source's, and not before the user's for the whole step.
        own = not says_batch(text) and any(item.partition("=")[0].strip() == "batch" for item in self.settings)
        batch = self.global_batch or (per_gpu * self.gpus if own else None)
        return with_batch(ParallelPlan.parse(text, self.gpus), text, batch)

    def named_plan(self, shape: TransformerShape, per_gpu: int) -> ParallelPlan | None:
        """Return the one plan that is wanted; ``None`` where the best are.

        Raises:
            PlanError: it is no plan, or none of the framework that is wanted.
        """
        if self.only is None:
            return None
        wanted, alone = framework_of(self.framework), self.runs.planned(self.said_plan(self.only, per_gpu))
        if wanted is not None and wanted not in frameworks_of(alone, shape, wanted):
            raise PlanError(f"{wanted.value} does not have the plan {alone}; leave the framework out, or "
                            "the plan for the best of its own.")
        return alone

    def host_note(self, rates: CorrectionFactors) -> list[str]:
        """Return the note on the assumed cost of a launch; none where the request gives it."""
        if self.host_from is not None:
            return [f"A launch is taken to cost the host {rates.host_us:.3g} µs, as operations of {self.host_from} do, "
                    "with the Python between them."]
        return [] if self.launch_us is not None else [
            f"A launch is taken to cost the host {rates.host_us:g} µs; give --launch-us where it is known, or "
            "--host-from."]


@dataclass(frozen=True)
class PlanJob:
    """What the plans of a request are estimated with.

    Attributes:
        request: what is wanted.
        name, shape, per_gpu: the decoder, and sequences of a GPU that its source does.
        known: the device as it is known.
        pieces, cluster, rates: work, collectives and factors on both.
        calibration: on measured steps, where there were some.
        notes: what was assumed.
    """

    request: PlanRequest
    name: str
    shape: TransformerShape
    per_gpu: int
    known: DeviceSpec
    pieces: LayerCosts
    cluster: CollectiveModel
    rates: CorrectionFactors
    calibration: PlanCalibration | None
    notes: tuple[str, ...]

    def estimate(self, plan: ParallelPlan) -> Estimate:
        """Estimate a plan, whether it fits or not. Raises ``PlanError``: it cannot be."""
        return estimate(costs_of_plan(plan, self.shape, self.pieces, self.cluster), self.rates)


def job_of(request: PlanRequest) -> PlanJob:
    """Read what a request names.

    Raises:
        PlanError: the source is no decoder.
        ForetraceError: a name or a file is not known, or cannot be read.
    """
    known, spec = request.devices()
    name, shape, per_gpu, assumed = read_decoder(request.source, request.settings, request.preset)
    shape = request.runs.shaped(shape.in_linears(request.linears))
    narrow_type(request.linears, spec)
    clusters = request.clusters(known)
    pieces = request.pieces or LayerCosts(spec, request.profile, profile=request.runs)
    rates = request.start(shape, spec, clusters(request.gpus))
    calibration = request.calibration(pieces, clusters, rates)
    return PlanJob(request, name, shape, per_gpu, known, pieces, clusters(request.gpus),
                   rates if calibration is None else calibration.rates, calibration,
                   (*assumed, *_without_matrix_units(shape, spec)))


def find_plans(request: PlanRequest) -> Plans:
    """Find the best plans there are: data, tensor, sequence, pipeline, context and expert parallelism, schedules,
    micro-batch, recomputation, sharding and copies of it; ``plan`` is called with the fields of a ``PlanRequest``.

    Raises:
        PlanError: the source is no decoder, the plan is none, or the batch can be split by no number of replicas.
        ForetraceError: a name or a file is not known, or cannot be read.
    """
    job = job_of(request)
    known, shape, pieces, cluster, rates = job.known, job.shape, job.pieces, job.cluster, job.rates
    notes = [*job.notes]
    if (alone := request.named_plan(shape, job.per_gpu)) is not None:
        found = price_plan(alone, shape, pieces, cluster, memory_limit=request.memory_limit, rates=rates,
                           framework=framework_of(request.framework))
    else:
        batch = request.global_batch or job.per_gpu * request.gpus
        found = search(shape, request.gpus, batch, pieces, cluster, memory_limit=request.memory_limit, rates=rates,
                       framework=framework_of(request.framework), best=request.best, profile=request.runs)
        uneven = [str(dp) for dp in range(1, request.gpus + 1) if request.gpus % dp == 0 and batch % dp]
        if uneven:
            notes.append(f"A batch of {batch:,} sequences cannot be split evenly over dp={', '.join(uneven)}: there "
                         f"are "
                         "no plans with these.")
    notes += other_nodes(cluster.topology, known)
    notes += request.host_note(rates) if job.calibration is None else [str(job.calibration)]
    schedule = None
    if found.plans:
        if request.comm_choices is not None:
            notes += mixture_of_plan(found.plans[0].plan, shape, cluster).sentences()
        schedule = step_schedule(costs_of_plan(found.plans[0].plan, shape, pieces, cluster), rates)
    label = f"{known.name} ({request.technology})" if str(request.technology) else known.name
    return Plans(**vars(found), model=job.name, shape=shape, gpus=request.gpus, device=label,
                 topology=cluster.topology.name, notes=tuple(notes), calibration=job.calibration, schedule=schedule)


plan = by_fields(PlanRequest)(find_plans)


def _without_matrix_units(shape: TransformerShape, spec: DeviceSpec) -> list[str]:
    """Say that a device computes bf16 on its other units, as all before Ampere do."""
    if shape.dtype != "bf16" or "bf16" in spec.matrix_tflops or "fp16" not in spec.matrix_tflops:
        return []
    return [f"{spec.name} has no matrix units for bf16, so that products take {spec.peak_tflops('bf16'):g} TFLOP/s at "
            f"most; in fp16 they have {spec.matrix_tflops['fp16']:g}: give --set dtype=fp16."]


def launch_us(host: HostModel, shape: TransformerShape, device: DeviceSpec) -> float:
    """Return the mean host time of a block's launches, µs: of its operations and the time between them.

    A plan's frameworks have Python of their own around a block, which the programs that a host was learned from have
    not.

    Args:
        host: what its operations cost.
        shape: whose block is traced, of one sequence on one GPU.
        device: which it is traced for.

    Raises:
        PlanError: the host launches nothing: its programs computed on it.
    """
    if not host.launch_ns:
        raise PlanError(f"{host.host} is of programs that compute on their host and launch nothing, and a plan is of "
                        "GPUs; give captures on a GPU's host, or gpu-steps.")
    from tracer.shape_only.transformer_parts import trace_part  # imports torch

    graph = trace_part(shape.one_layer(), TransformerPart(Piece.BLOCK, 1), shape_device(device))
    before, inside = host.estimate(traced_host_step(graph))
    launches = sum(len(calls) for calls in calls_by_operation(graph, range(len(graph.ops))).values())
    # What comes before a step's first operation and after its last one is no block's.
    return float(before[1:-1].sum() + inside.sum()) / 1e3 / max(launches, 1)


def framework_of(name: str | None) -> Framework | None:
    """Return the framework of a name; ``None`` and "any" are all of them. Raises ``PlanError``."""
    if name is None or name == "any":
        return None
    try:
        return Framework(profile_of(name).framework or name.strip().lower())
    except ValueError:
        raise PlanError(f"{name} is no framework whose plans are known; give "
                        f"{', '.join(each.value for each in Framework)} or any.") from None


def check_finite(value: float | None, name: str, what: str) -> None:
    """Raise ``PlanError``, which calls the value ``name``, for what is no number, and for what is so large that its
    products are none: they would be ranked like any other."""
    if value is not None and not abs(value) <= MOST_FACTOR:
        raise PlanError(f"{name} {value:g} is no figure to compute with; give {what}.")


def _row(each: Ranked) -> dict[str, Any]:
    e = each.estimate
    return {"plan": str(e.plan), "step_ms": e.time_us / 1e3, "low_ms": e.low_us / 1e3, "high_ms": e.high_us / 1e3,
            "memory_gb": each.memory.total / 1e9, "exposed_communication_ms": e.exposed_us / 1e3, "bubble": e.bubble,
            "sequences_per_second": e.plan.global_batch / e.time_us * 1e6, "bound": e.bound}
