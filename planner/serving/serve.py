"""``serve``: times of prefill and decoding of a served decoder, and what a load gets from the server.

    foretrace.serve("llama-3.1-70b", device="h200-sxm", tp=8, batch=32, context=4096)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from graph_predictor.comm.clusters import cluster_of, measured_file
from graph_predictor.prediction.scenario import Edit
from kernel_models.collectives import CollectiveModel, planned_topology
from kernel_models.device import DeviceSpec, find_device
from kernel_models.profile import DeviceProfile
from planner.parallel.corrections import Z80, CorrectionFactors
from planner.parallel.decoder import other_nodes
from planner.requests import by_fields
from planner.serving.batching import ServedRequests, StepTimes, simulate_serving
from planner.serving.calibrate import ServingCalibration, calibrate_serving, features, read_measured_rows
from planner.serving.edited import edited_model
from planner.serving.setup import (
    BETWEEN_TOKENS,
    FIRST_LEAST,
    FIRST_TOKEN,
    USUAL,
    CacheAccount,
    Lengths,
    Requests,
    ServingError,
    ServingSetup,
    Speculation,
    cache_account,
    engine_of,
    weight_type,
)
from planner.serving.source import ServedDecoder, served_decoder
from planner.serving.step_grids import PrefillChunk
from planner.serving.steps import ServedOperation, ServedStep, ServingModel, StepTime, rates_of
from planner.serving.trace_calibration import TraceCalibration, read_anchor
from tracer.lazy import pandas
from tracer.shown import Shown

PERCENTILES, LATE = (50, 90, 99), 0.05
"""Percentiles of reports. A server does not keep up with a rate if waiting times grow by more than ``LATE`` times the
time that passes."""
MOST_COUNT, USUAL_PROMPT, USUAL_OUTPUT = 1 << 24, 1024, 256
"""Choices: largest value of any number, and default tokens of prompts and of answers."""


@dataclass(frozen=True, slots=True)
class Figure80:
    """A figure and its 80% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """What the requests of a load get from a replica.

    Attributes:
        load: the load.
        requests: expected results of each request.
        ttft_ms, tpot_ms, request_ms, tokens_per_second: means of time to first token, time per further token and time
            to the end of the answer; throughput of a replica.
        ttft_percentiles, tpot_percentiles, request_percentiles: expected times, ms, by percentile.
    """

    load: Requests
    requests: ServedRequests
    ttft_ms: Figure80
    tpot_ms: Figure80
    request_ms: Figure80
    tokens_per_second: Figure80
    ttft_percentiles: Mapping[int, float]
    tpot_percentiles: Mapping[int, float]
    request_percentiles: Mapping[int, float]

    @property
    def keeps_up(self) -> bool:
        """Return whether a replica keeps up with a rate: the last quarter of the requests waits little longer than the
        second."""
        got = self.requests
        quarter = len(got.ttft_us) // 4
        if not self.load.rate or not quarter:
            return True
        second, last = slice(quarter, 2 * quarter), slice(-quarter, None)
        grown, passed = (float(each[last].mean() - each[second].mean()) for each in (got.ttft_us, got.arrival_us))
        return grown < LATE * passed

    def plain(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        got = self.requests
        return {
            "prompt": str(self.load.prompt), "output": str(self.load.output), "concurrency": self.load.concurrency,
            "rate": self.load.rate, "requests": self.load.requests, "ttft_ms": asdict(self.ttft_ms),
            "tpot_ms": asdict(self.tpot_ms) if math.isfinite(self.tpot_ms.value) else None,
            "request_ms": asdict(self.request_ms),
            "tokens_per_second": asdict(self.tokens_per_second),
            "requests_per_second": got.requests_per_second,
            "ttft_percentiles_ms": dict(self.ttft_percentiles), "tpot_percentiles_ms": dict(self.tpot_percentiles),
            "request_percentiles_ms": dict(self.request_percentiles),
            "sequences_in_flight": got.in_flight, "sequences_decoding": got.running, "thrown_out": got.preempted,
            "busy": got.busy,
            "keeps_up": self.keeps_up}


@dataclass(frozen=True, repr=False)
class Served(Shown):
    """A served decoder's steps, its memory, and what a load gets.

    Attributes:
        model: name of the model.
        setup: how a replica is served.
        device, topology: names.
        batch, context, prompt: sizes of the two steps that follow.
        decode, prefill: time of a decoding step, and of one prompt for each attention group (in pieces if long).
        decode_operations, prefill_operations: operations of these steps on one GPU.
        cache: memory of the fullest GPU.
        largest_batch: number of sequences of ``context`` tokens that fit a replica.
        served: what a load gets; ``None`` without a load.
        notes: assumptions.
        calibration: calibration on measured rows; ``None`` without rows.
        edits: descriptions of the edits.
    """

    model: str
    setup: ServingSetup
    device: str
    topology: str
    batch: int
    context: int
    prompt: int
    decode: StepTime
    prefill: StepTime
    decode_operations: tuple[ServedOperation, ...]
    prefill_operations: tuple[ServedOperation, ...]
    cache: CacheAccount
    largest_batch: int
    served: ServedLoad | None
    notes: tuple[str, ...]
    calibration: ServingCalibration | None = None
    edits: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens that a replica decodes in a second."""
        return self.batch * self.setup.yielded / self.decode.us * 1e6

    def headline(self) -> str:
        """Return the times of the steps and of the load in a line."""
        said = (f"{self.model} on {self.setup.gpus} {self.device}: decoding {self.batch:,} sequences of "
                f"{self.context:,} tokens {self.decode.us / 1e3:,.2f} ms ({self.decode.low / 1e3:,.2f} to "
                f"{self.decode.high / 1e3:,.2f}), a prompt of {self.prompt:,} {self.prefill.us / 1e3:,.1f} ms "
                f"({self.prefill.low / 1e3:,.1f} to {self.prefill.high / 1e3:,.1f}), at most {self.largest_batch:,} "
                "such sequences")
        return said if self.served is None else (
            f"{said}; TTFT {self.served.ttft_ms.value:,.0f} ms, TPOT {self.served.tpot_ms.value:,.2f} ms, "
            f"{self.served.tokens_per_second.value:,.0f} tokens/s")

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Return tables of the steps, of their operations, and of each request of the load."""
        return {"steps": self._steps, "decode": lambda: _operations(self.decode_operations),
                "prefill": lambda: _operations(self.prefill_operations), "requests": self._requests}

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        cache = self.cache
        return {
            "model": self.model, "device": self.device, "topology": self.topology, "setup": str(self.setup),
            "gpus": self.setup.gpus, "engine": self.setup.engine.name, "precision": self.setup.precision,
            "batch": self.batch, "context": self.context, "prompt": self.prompt,
            "decode_ms": _step_ms(self.decode), "prefill_ms": _step_ms(self.prefill),
            "tokens_per_second": self.tokens_per_second,
            "decode_operations": [asdict(each) for each in self.decode_operations],
            "prefill_operations": [asdict(each) for each in self.prefill_operations],
            "memory_gb": {"device": cache.device / 1e9, "weights": cache.weights / 1e9,
                          "work_space": cache.workspace / 1e9, "room_for_caches": cache.room / 1e9,
                          "cache": cache.of(self.context) * math.ceil(self.batch / cache.groups) / 1e9},
            "cache_bytes_per_token": cache.token, "cache_bytes_per_sequence": cache.sequence,
            "largest_batch": self.largest_batch, "load": None if self.served is None else self.served.plain(),
            "edits": list(self.edits),
            "calibration": None if self.calibration is None else self.calibration.to_dict(), "notes": list(self.notes)}

    def _steps(self) -> pandas.DataFrame:
        return pandas.DataFrame([{"step": name, **_step_ms(each)} for name, each in (
            ("decode", self.decode), ("prefill", self.prefill))])

    def _requests(self) -> pandas.DataFrame:
        if self.served is None:
            return pandas.DataFrame()
        got = self.served.requests
        return pandas.DataFrame({"arrival_ms": got.arrival_us / 1e3, "prompt": got.prompt, "output": got.output,
                                 "ttft_ms": got.ttft_us / 1e3, "tpot_ms": got.tpot_us / 1e3,
                                 "end_ms": got.end_us / 1e3})


@dataclass(frozen=True, kw_only=True)
class ServedModelRequest:
    """A decoder, the device and cluster that serve it, and how, as ``serve`` and ``serve_search`` take it.

    Attributes:
        source: a published model's name ("llama-3.1-70b", "deepseek-v3"), a Hugging Face ``config.json`` or its folder,
            or a workload.
        device: GPU, by a name or a file.
        topology: the cluster; by default the device's usual nodes.
        settings: assignments for a config or a workload, as in ``foretrace.plan``.
        preset: preset of a workload.
        precision: linear layers' weights: bf16, fp8, fp8_block, nvfp4, mxfp4, int8 or int4; by default the model's.
        experts: type of experts' weights; by default ``precision``.
        kv_dtype: type of the cache: bf16, fp8 or fp4; by default the model's.
        engine: vllm, sglang, trtllm, nemo for TensorRT-LLM of 2023, or compiled for a model without a server.
        gpu_memory_utilization: share of a GPU's memory that the engine uses, in the engine's sense; 0 for its default.
        cuda_graphs: whether decoding runs as CUDA graphs.
        speculate: tokens of a draft, and mean tokens that a step yields, such as "3:2.4".
        prompt, output: tokens of prompts and answers: 1024, "512-2048" or "1024~0.5".
        rate: requests a second at random times, for all replicas together.
        seed: of random draws.
        profile: models fitted for the device.
        comm_profile, comm_choices: measured collectives, as in ``foretrace.plan``.
        edits: edits of ``graph_predictor.edits``, as for recorded steps.
    """

    source: str = field(kw_only=False)
    device: str = "h200-sxm"
    topology: str | None = None
    settings: Sequence[str] = ()
    preset: str | None = None
    precision: str = ""
    experts: str = ""
    kv_dtype: str = ""
    engine: str = USUAL
    gpu_memory_utilization: float = 0.0
    cuda_graphs: bool = True
    speculate: str | None = None
    prompt: str | int = ""
    output: str | int = ""
    rate: float = 0.0
    seed: int = 0
    profile: DeviceProfile | None = None
    comm_profile: str | None = None
    comm_choices: str | None = None
    edits: Sequence[Edit] = ()

    def decoder(self) -> ServedDecoder:
        """Read the decoder."""
        return served_decoder(self.source, self.settings, self.preset).in_type(self.precision)

    def spec(self) -> DeviceSpec:
        """Return the GPU, or the processor of one socket. Raises ``ServingError`` for a placeholder without figures."""
        spec = find_device(self.device)
        if spec.vendor == "host" and spec.placeholder and self.profile is None:
            raise ServingError(f"{spec.name} stands for any processor and has no figures of its own; name one "
                               "(xeon-8575c), or measure yours (foretrace calibrate) and give --profile.")
        return spec

    def setup(self, decoder: ServedDecoder) -> ServingSetup:
        """Return how one GPU serves a decoder."""
        linear, experts = decoder.weights(self.precision, self.experts)
        engine = engine_of(self.engine)
        if not 0 <= self.gpu_memory_utilization <= 1:
            raise ServingError(f"gpu_memory_utilization={self.gpu_memory_utilization!r} is no share of a GPU's memory; "
                               "give one above 0, up to 1.")
        engine = replace(engine, memory=self.gpu_memory_utilization or engine.memory)
        if find_device(self.device).vendor == "host":
            # Launches on a processor are part of the operations' times.
            engine = replace(engine, launch_us=0.0)
        return ServingSetup(precision=linear, experts=experts, kv=self.kv_dtype, engine=engine,
                            graphs=self.cuda_graphs,
                            speculation=None if self.speculate is None else Speculation.parse(self.speculate))

    def cluster(self, gpus: int) -> CollectiveModel:
        """Return the cluster of ``gpus`` GPUs."""
        return cluster_for(find_device(self.device), gpus, self.topology, self.comm_profile, self.comm_choices)


@dataclass(frozen=True, kw_only=True)
class ServeRequest(ServedModelRequest):
    """One served replica and its load.

    Attributes:
        tp, pp, ep, attention_dp: split of a replica (``ServingSetup``).
        chunk: most tokens of a step; by default the engine's.
        batch, context: decoding sequences, and tokens of each one's cache; by default the load's mean.
        concurrency: number of clients that each send a request as soon as they have an answer.
        requests: number of simulated requests.
        cached_prefix: tokens of a prefix that all prompts share and that is already in the cache.
        step_us: host time of a step that the GPU waits for, µs, if known.
        measured: a table of measured rows (``calibrate.read_measured_rows``), or an earlier call's calibration.
        anchor: a trace of this server on this device (``read_anchor``). All steps are scaled, operation by operation,
            by recorded over predicted kernel time. If the names of recorded steps do not give their sizes, and
            ``context`` is given, each step is taken to decode ``batch`` sequences of ``context`` tokens.
        anchor_capture: a trace of the same server capturing its CUDA graphs; names the operations of their kernels.
        step_region: name of the regions that are the anchor's steps.

    Raises:
        ServingError: a value is not possible, or an option lacks another option that it needs.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1
    chunk: int = 0
    batch: int = 1
    context: int = 0
    concurrency: int = 0
    requests: int = 0
    cached_prefix: int = 0
    step_us: float | None = None
    measured: str | ServingCalibration | None = None
    anchor: str | None = None
    anchor_capture: str | None = None
    step_region: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("context", 0), ("requests", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_COUNT:
                raise ServingError(f"{name}={value!r} is not possible; give a whole number from 1.")
        if self.step_us is not None and not (math.isfinite(self.step_us) and 0 <= self.step_us < 1e9):
            raise ServingError(f"step_us={self.step_us!r} is no time of a step's host; give µs, 0 or more.")
        if self.anchor_capture is not None and self.anchor is None:
            raise ServingError("--anchor-capture says which operations the graphs of an anchor were captured of; give "
                               "--anchor too.")
        if self.step_region is not None and self.anchor is None:
            raise ServingError("--step-region names the steps of an anchor; give --anchor too.")
        for name in ("requests", "cached_prefix"):
            if getattr(self, name) and not (self.rate or self.concurrency):
                raise ServingError(f"--{name.replace('_', '-')} is of a load; give --rate or --concurrency too.")

    def setup(self, decoder: ServedDecoder) -> ServingSetup:
        """Return how a replica serves a decoder. Raises ``ServingError`` if the decoder cannot be split so."""
        setup = replace(super().setup(decoder), tp=self.tp, pp=self.pp, ep=self.ep, attention_dp=self.attention_dp,
                        chunk=self.chunk)
        setup.check(decoder.shape)
        return setup

    def load(self, prompts: Lengths, outputs: Lengths) -> Requests | None:
        """Return the load; ``None`` without one. If all clients begin at once, their first requests do not count,
        provided others remain."""
        if not (self.rate or self.concurrency):
            return None
        warm_up = self.concurrency if not self.requests or self.requests >= 2 * self.concurrency else 0
        return Requests(prompts, outputs, self.concurrency, self.rate, self.requests, self.seed, warm_up,
                        apart=True, cached=self.cached_prefix)

    def calibration(self, decoder: ServedDecoder, setup: ServingSetup,
                    rates: CorrectionFactors) -> ServingCalibration | None:
        """Return the calibration on measured rows; ``None`` without rows."""
        if not isinstance(self.measured, str):
            return self.measured
        rows = read_measured_rows(self.measured, decoder.shape, setup, self.spec(), self.profile, self.cluster,
                                  decoder.longest)
        return calibrate_serving(rows, rates)

    def model(self, decoder: ServedDecoder, setup: ServingSetup
              ) -> tuple[ServingModel, TraceCalibration | None, ServingCalibration | None]:
        """Return the model of steps before edits, the calibration on a trace and that on measured rows, if given."""
        spec, collectives = self.spec(), self.cluster(setup.gpus)
        rates = rates_of(setup) if self.step_us is None else replace(rates_of(setup), step_us=self.step_us)
        anchored = None
        if self.anchor is not None:
            anchored = read_anchor(
                self.anchor, ServingModel(decoder.shape, setup, spec, collectives, self.profile, rates),
                capture=self.anchor_capture, assumed=ServedStep(self.batch, self.context) if self.context else None,
                step_region=self.step_region)
            rates = anchored.rates
        calibration = self.calibration(decoder, setup, rates)
        plain = ServingModel(decoder.shape, setup, spec, collectives, self.profile,
                             rates if calibration is None else calibration.rates)
        return plain if anchored is None else plain.with_factors(anchored.factors), anchored, calibration


@by_fields(ServeRequest)
def serve(request: ServeRequest) -> Served:
    """Predict how a decoder is served. The arguments are the fields of a ``ServeRequest``.

    Raises:
        EditError: an edit is not possible.
        ServingError: the split or the load is not possible, or the model does not fit.
        ForetraceError: a name or a file is not known, or cannot be read.
    """
    decoder, spec = request.decoder(), request.spec()
    setup = request.setup(decoder)
    prompts = Lengths.parse(str(request.prompt or request.context or USUAL_PROMPT), "--prompt")
    outputs = Lengths.parse(str(request.output or USUAL_OUTPUT), "--output")
    batch, prompt = request.batch, math.ceil(prompts.mean)
    context = request.context or math.ceil(prompts.mean + outputs.mean / 2)
    load = request.load(prompts, outputs)
    asked = context if load is None else max(context, prompts.longest + outputs.longest)
    check_length(decoder, max(asked, prompts.longest))
    plain, anchored, calibration = request.model(decoder, setup)
    model = edited_model(plain, request.edits)
    cache = cache_account(decoder.shape, setup, spec, max(asked, prompts.longest))
    cache.check(batch, context, f"{decoder.name} on {setup.gpus} {spec.name}")
    decode, prefill = ServedStep(batch, context), prompt_step(setup, prompt)
    notes = [] if anchored is None else [
        f"{anchored} {anchored.rests(plain, decode):.0%} of the step of decoding and "
        f"{anchored.rests(plain, prefill):.0%} of the prompt's rest on operations that were recorded."]
    served = None if load is None else served_load(load, model, cache, calibration)
    if served is not None and not served.keeps_up:
        notes.append(f"A replica does not keep up with {request.rate:g} requests a second: it answers "
                     f"{served.requests.requests_per_second:,.2f}, and requests wait longer the longer they come; "
                     f"the time to the first token is the mean of {served.load.requests:,} requests' alone.")
    notes += [*decoder.notes, *other_nodes(plain.collectives.topology, spec)]
    notes += [f"The matrix units of {spec.name} do not multiply {precision}: weights are read so and widened to "
              f"{decoder.shape.dtype}." for precision in dict.fromkeys((setup.precision, setup.of_experts))
              if weight_type(precision, spec).widened]
    if spec.vendor == "host":
        notes.append(f"Each rank (GPU) is a socket of {spec.name}, whose memory has its part of the weights; what "
                     "memory and cores sustain is not measured unless --profile says it.")
    if calibration is not None:
        notes.append(str(calibration))
    elif request.step_us is None and setup.engine.step_us:
        notes.append(f"{setup.engine.name} is taken to add {setup.engine.step_us / 1e3:g} ms to each step and "
                     f"{setup.engine.sequence_us:g} µs for each of its sequences; give --step-us where it is known, or "
                     "--calibrate.")
    return Served(
        decoder.name, setup, spec.name, plain.collectives.topology.name, batch, context, prompt, model.time(decode),
        prompt_time(model, prompt), tuple(model.operations(decode)), tuple(model.operations(prefill)), cache,
        cache.largest_batch(context), served, tuple(notes), calibration,
        tuple(edit.describe() for edit in request.edits))


def cluster_for(spec: DeviceSpec, gpus: int, topology: str | None, comm_profile: str | None,
                comm_choices: str | None) -> CollectiveModel:
    """Return a cluster of ``gpus`` GPUs. Raises ``PlanError`` if the topology has fewer."""
    if topology is not None or measured_file(comm_profile, comm_choices) is not None:
        found = cluster_of(topology, comm_profile, None, comm_choices)
    else:
        found = CollectiveModel(planned_topology(spec, gpus), mixed=comm_choices is not None)
    found.check_fits(gpus)
    return found


def check_length(decoder: ServedDecoder, tokens: int) -> None:
    """Raise ``ServingError`` if a context is longer than the model allows."""
    if decoder.longest and tokens > decoder.longest:
        raise ServingError(f"A context of {tokens:,} tokens is longer than the {decoder.longest:,} that {decoder.name} "
                           "takes; give less.")


def prompt_step(setup: ServingSetup, tokens: int) -> ServedStep:
    """Return the step that reads the last piece of a prompt on each attention group of a replica."""
    past = (tokens - 1) // setup.step_tokens * setup.step_tokens
    count = setup.attention_dp
    return ServedStep(0, 0, (PrefillChunk(count, tokens - past, past),), count)


def prompt_time(model: ServingModel, tokens: int) -> StepTime:
    """Return the time to read a prompt on each attention group of a replica, with all its pieces."""
    count, most = model.setup.attention_dp, model.setup.step_tokens
    pieces = [ServedStep(0, 0, (PrefillChunk(count, most, past),)) for past in range(0, tokens - most, most)]
    steps = [model.time(step) for step in (*pieces, prompt_step(model.setup, tokens))]
    return StepTime(*(sum(values) for values in zip(*(
        (each.us, each.low, each.high, each.products, each.others, each.collectives, each.host, each.engine)
        for each in steps), strict=True)))


def served_load(load: Requests, model: ServingModel, cache: CacheAccount,
                calibration: ServingCalibration | None = None) -> ServedLoad:
    """Return what a load gets from a replica, with intervals. With ``concurrency`` all times scale with the steps'.
    With a rate, the load is simulated again with steps at both ends of their interval."""
    setup = model.setup
    got = simulate_serving(load, setup, model.surface, cache)
    tokens = max(math.ceil(load.prompt.mean), 1)
    mean_context = load.prompt.mean + load.output.mean / 2
    decode = model.time(ServedStep(max(got.running, 1.0), mean_context))
    prefill = prompt_time(model, tokens)
    scale = 1.0 if calibration is None else calibration.spread
    between = math.hypot(_log_spread(decode), BETWEEN_TOKENS * scale)
    first = math.hypot(_log_spread(prefill), FIRST_TOKEN * max(scale, FIRST_LEAST))
    place = features(setup, load)
    like = (1.0, 1.0) if calibration is None else (math.exp(calibration.first.at(place)),
                                                   math.exp(calibration.between.at(place)))
    ttft, tpot = like[0] * got.mean_ttft_us() / 1e3, like[1] * got.mean_tpot_us() / 1e3
    ends = [_scaled(ttft, first), _scaled(tpot, between)]
    others = []
    if load.rate:
        for side in (-1.0, 1.0):
            other = simulate_serving(load, setup, _Slower(model.surface, math.exp(side * Z80 * between)), cache)
            others.append(other.tokens_per_second)
            ends = [Figure80(each.value, min(each.low, value), max(each.high, value)) for each, value in zip(
                ends, (like[0] * other.mean_ttft_us() / 1e3, like[1] * other.mean_tpot_us() / 1e3), strict=True)]
    second = got.tokens_per_second
    first_us, rest_us = like[0] * got.ttft_us, like[1] * (got.end_us - got.ttft_us)
    rest = float(rest_us.mean()) / 1e3
    request = Figure80(*(mean + (rest * end / tpot if rest else 0.0) for mean, end in zip(
        (ends[0].value, ends[0].low, ends[0].high), (tpot, ends[1].low, ends[1].high), strict=True)))
    found = ServedLoad(load, got, ends[0], ends[1], request, _scaled(second, between), _percentiles(first_us),
                       _percentiles(like[1] * got.tpot_us), _percentiles(first_us + rest_us))
    if load.rate and found.keeps_up:
        # The rate decides the throughput, however long answers take.
        found = replace(found, tokens_per_second=Figure80(second, min([second, *others]), max([second, *others])))
    return found


class _Slower:
    """Step times multiplied by a factor."""

    def __init__(self, surface: StepTimes, factor: float) -> None:
        self._surface, self._factor = surface, factor

    def us(self, sequences: float, context: float, pieces: Sequence[PrefillChunk] = (), finished: float = 0.0) -> float:
        return self._factor * self._surface.us(sequences, context, pieces, finished)


def _log_spread(step: StepTime) -> float:
    return math.log(step.high / step.us) / Z80


def _scaled(value: float, spread: float) -> Figure80:
    return Figure80(value, value * math.exp(-Z80 * spread), value * math.exp(Z80 * spread))


def _percentiles(us: Any) -> dict[int, float]:
    known = us[np.isfinite(us)]
    return {at: float(np.percentile(known, at)) / 1e3 for at in PERCENTILES} if len(known) else {}


def _step_ms(step: StepTime) -> dict[str, float]:
    return {name: us / 1e3 for name, us in (
        ("ms", step.us), ("low", step.low), ("high", step.high), ("products", float(step.products)),
        ("others", float(step.others)), ("collectives", float(step.collectives)), ("host", step.host),
        ("engine", step.engine))}


def _operations(found: Sequence[ServedOperation]) -> pandas.DataFrame:
    total = sum(each.us for each in found) or 1.0
    return pandas.DataFrame([{"operation": each.name, "count": each.count, "ms": each.us / 1e3,
                              "share": each.us / total, "bound": each.bound, "gflops": each.flops / 1e9,
                              "moved_gb": each.moved_bytes / 1e9,
                              "source": max(each.sources, key=each.sources.__getitem__)}
                             for each in found])
