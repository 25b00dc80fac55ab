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
"""Spread of the host's time if a user gives the time of a launch: other operations take other times. An assumption."""


@dataclass(frozen=True, slots=True)
class Technology:
    """Factors on the figures of a device and its nodes.

    Attributes:
        clock, bandwidth, memory, power: on the device's rates, memory bandwidth, memory size and power limit.
        link: on the links between a node's GPUs, and on the network cards between nodes.
    """

    clock: float = 1.0
    bandwidth: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    power: float = 1.0

    def __str__(self) -> str:
        return ", ".join(f"{name} × {factor:g}" for name, factor in asdict(self).items() if factor != 1.0)

    def device(self, spec: DeviceSpec) -> DeviceSpec:
        """Return the changed device, with the factors in its name; the same device if nothing changes."""
        edited = scaled_device(spec, clock=self.clock, bandwidth=self.bandwidth, memory=self.memory, power=self.power)
        return edited if edited is spec else replace(edited, name=f"{spec.name} ({replace(self, link=1.0)})")


AS_IT_IS = Technology()


@dataclass(repr=False, kw_only=True)
class Plans(Shown, Found):
    """Plans of a decoder on a number of GPUs, fastest first, and the reasons against other plans.

    Attributes:
        model: the decoder's name.
        shape: its sizes.
        gpus, device, topology: the cluster.
        notes: assumptions.
        calibration: calibration on measured steps; ``None`` without such steps.
        schedule: the fastest plan's step over time.
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
        """Return the fastest plan and its time in a line."""
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
        """Return tables: possible plans, times in ms; and the reasons against the others."""
        return {"plans": partial(frame_of, [_row(each) for each in self.plans]),
                "refused": partial(frame_of, [{"reason": each.reason, "example": each.example, "plans": each.count,
                                             "least_bytes": each.least_bytes}
                                            for each in self.refused])}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request for the best plans, or for one plan.

    Attributes:
        source: a workload ("llama", "gpt2", "moe"), a capture or shape-only trace of a workload, a model's Hugging Face
            ``config.json`` (the file or its folder), or a published model's name ("deepseek-v3").
        gpus: number of GPUs of the job.
        device: the GPU: a name or a file.
        topology: the cluster; by default the device's usual nodes.
        settings: assignments for the workload, such as "seq=4096". For a config: seq, batch, layers, dtype, imbalance
            and predictions. For any source: attention=unfused, dropout=0.1 and dtype=fp16.
        preset: preset of the workload, or a trained model: llama 8b, 70b, 405b; gpt2 xl, 175b; moe 8x7b.
        global_batch: sequences of a step; by default the source's batch on every GPU, or that of ``only``.
        only: the only plan to estimate, such as "dp=8,tp=4,pp=2,microbatches=16".
        framework: "megatron", "torchtitan", "fsdp", "nanotron" or "deepspeed": only its plans are tried, as it runs
            them (``FrameworkProfile``).
        best: number of plans wanted; ``None`` for all that are possible and fit, which takes long.
        memory_limit: usable bytes of a device; by default all its memory.
        profile: models fitted for the device.
        comm_profile: a file of measured collectives, or a table or text of measured bandwidths (``BusBandwidths``).
        comm_choices: a file of several backends' measured collectives, or "auto": each is done by the best of them.
        linears: type of linear layers' products: "fp8", "fp8_block", "mxfp8" or "nvfp4".
        launch_us: host time of a kernel's launch, µs, if known.
        host: factor on the host time.
        host_from: a host's name, or captures made on it, from which the time of a launch is taken.
        measured: a table of plans that were run (``read_measured_plans``), on which kernels, collectives and host are
            calibrated; or the calibration of another call.
        pieces: traces of another call with this device and profile, for jobs of several sizes.
        technology: factors on the figures of the device and its nodes; measurements of them then do not apply.

    Raises:
        PlanError: two fields contradict each other, or a value is not possible.
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
        """Return the known device and the changed device.

        Raises:
            PlanError: the device is no GPU, or measurements were given for the unchanged device.
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
        """Return collectives for a number of GPUs, on the named cluster or on the device's usual nodes."""
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
        """How the requested framework runs a step."""
        return profile_of(self.framework)

    def start(self, shape: TransformerShape, spec: DeviceSpec, cluster: CollectiveModel) -> CorrectionFactors:
        """Return the correction factors with the host time of a launch, as far as it is known."""
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
        """Return the calibration on measured steps; ``None`` without such steps."""
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
        """Parse a plan and set the sequences of its step. Raises ``PlanError`` if the text is no plan."""
        # The user's global batch comes first, then the plan's own number, then the source's batch.
        own = not says_batch(text) and any(item.partition("=")[0].strip() == "batch" for item in self.settings)
        batch = self.global_batch or (per_gpu * self.gpus if own else None)
        return with_batch(ParallelPlan.parse(text, self.gpus), text, batch)

    def named_plan(self, shape: TransformerShape, per_gpu: int) -> ParallelPlan | None:
        """Return the one requested plan; ``None`` if the best plans are wanted.

        Raises:
            PlanError: the text is no plan, or the requested framework cannot run it.
        """
        if self.only is None:
            return None
        wanted, alone = framework_of(self.framework), self.runs.planned(self.said_plan(self.only, per_gpu))
        if wanted is not None and wanted not in frameworks_of(alone, shape, wanted):
            raise PlanError(f"{wanted.value} does not have the plan {alone}; leave the framework out, or "
                            "the plan for the best of its own.")
        return alone

    def host_note(self, rates: CorrectionFactors) -> list[str]:
        """Return the note on the assumed time of a launch; no note if the request gives the time."""
        if self.host_from is not None:
            return [f"A launch is taken to cost the host {rates.host_us:.3g} µs, as operations of {self.host_from} do, "
                    "with the Python between them."]
        return [] if self.launch_us is not None else [
            f"A launch is taken to cost the host {rates.host_us:g} µs; give --launch-us where it is known, or "
            "--host-from."]


@dataclass(frozen=True)
class PlanJob:
    """The models and figures by which the plans of a request are estimated.

    Attributes:
        request: the request.
        name, shape, per_gpu: the decoder, and the sequences of a GPU in its source.
        known: the unchanged device.
        pieces, cluster, rates: costs of work, prices of collectives, and correction factors on both.
        calibration: calibration on measured steps; ``None`` without such steps.
        notes: assumptions.
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
        """Estimate a plan, whether it fits or not. Raises ``PlanError`` if it is not possible."""
        return estimate(costs_of_plan(plan, self.shape, self.pieces, self.cluster), self.rates)


def job_of(request: PlanRequest) -> PlanJob:
    """Read everything that a request names.

    Raises:
        PlanError: the source is no decoder.
        ForetraceError: a name or a file is unknown, or cannot be read.
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
    """Find the best plans: data, tensor, sequence, pipeline, context and expert parallelism, schedules, micro-batch,
    recomputation, sharding and copies of it. ``plan`` takes the fields of a ``PlanRequest`` as arguments.

    Raises:
        PlanError: the source is no decoder, the text is no plan, or no number of replicas divides the batch.
        ForetraceError: a name or a file is unknown, or cannot be read.
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
    """Return a note if a device computes bf16 without matrix units, as all GPUs before Ampere do."""
    if shape.dtype != "bf16" or "bf16" in spec.matrix_tflops or "fp16" not in spec.matrix_tflops:
        return []
    return [f"{spec.name} has no matrix units for bf16, so that products take {spec.peak_tflops('bf16'):g} TFLOP/s at "
            f"most; in fp16 they have {spec.matrix_tflops['fp16']:g}: give --set dtype=fp16."]


def launch_us(host: HostModel, shape: TransformerShape, device: DeviceSpec) -> float:
    """Return the mean host time of a launch in a block, µs: the operations' time and the time between them.

    A plan's framework has further Python around a block, which the programs that a host was learned from lack.

    Args:
        host: the host's model of operations.
        shape: the decoder whose block is traced, for one sequence on one GPU.
        device: the device it is traced for.

    Raises:
        PlanError: the host model comes from programs that compute on the host and launch nothing.
    """
    if not host.launch_ns:
        raise PlanError(f"{host.host} is of programs that compute on their host and launch nothing, and a plan is of "
                        "GPUs; give captures on a GPU's host, or gpu-steps.")
    from tracer.shape_only.transformer_parts import trace_part  # imports torch

    graph = trace_part(shape.one_layer(), TransformerPart(Piece.BLOCK, 1), shape_device(device))
    before, inside = host.estimate(traced_host_step(graph))
    launches = sum(len(calls) for calls in calls_by_operation(graph, range(len(graph.ops))).values())
    # Time before a step's first operation and after its last does not belong to a block.
    return float(before[1:-1].sum() + inside.sum()) / 1e3 / max(launches, 1)


def framework_of(name: str | None) -> Framework | None:
    """Return the framework of a name; ``None`` (all) for ``None`` and "any". Raises ``PlanError``."""
    if name is None or name == "any":
        return None
    try:
        return Framework(profile_of(name).framework or name.strip().lower())
    except ValueError:
        raise PlanError(f"{name} is no framework whose plans are known; give "
                        f"{', '.join(each.value for each in Framework)} or any.") from None


def check_finite(value: float | None, name: str, what: str) -> None:
    """Raise ``PlanError``, with the value's ``name``, for NaN and for values so large that products overflow; such
    plans would be ranked like others."""
    if value is not None and not abs(value) <= MOST_FACTOR:
        raise PlanError(f"{name} {value:g} is no figure to compute with; give {what}.")


def _row(each: Ranked) -> dict[str, Any]:
    e = each.estimate
    return {"plan": str(e.plan), "step_ms": e.time_us / 1e3, "low_ms": e.low_us / 1e3, "high_ms": e.high_us / 1e3,
            "memory_gb": each.memory.total / 1e9, "exposed_communication_ms": e.exposed_us / 1e3, "bubble": e.bubble,
            "sequences_per_second": e.plan.global_batch / e.time_us * 1e6, "bound": e.bound}
