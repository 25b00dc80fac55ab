"""``serve``: prefill and decode of a served decoder, and what a server makes of them, from names as a user writes them.

    foretrace.serve("llama-3.1-70b", device="h200-sxm", tp=8, batch=32, context=4096)

``serve_search``: the configuration of a number of GPUs that serves most within a target of latency.

    splits of a replica × replicas × chunk ──ServingModel, once each──▶ surfaces ──served at every concurrency──▶ best
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graph_predictor.comm.clusters import cluster_of, measured_file
from graph_predictor.prediction.scenario import Edit, EditError
from kernel_models.collectives import CollectiveModel, topology_of
from kernel_models.device import DeviceSpec
from kernel_models.device_choice import find_device
from kernel_models.profile import DeviceProfile
from planner.parallel.corrections import Z80
from planner.parallel.decoder import other_nodes
from planner.serving.batching import ServedRequests, StepTimes, simulate_serving
from planner.serving.calibrate import ServingCalibration, calibrate_serving, features, read_measured_rows
from planner.serving.edited import edited_model
from planner.serving.setup import (
    BETWEEN_TOKENS,
    FIRST_LEAST,
    FIRST_TOKEN,
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
from planner.serving.steps import PrefillChunk, ServedOperation, ServedStep, ServingModel, StepTime, rates_of
from planner.serving.trace_calibration import read_anchor
from tracer.shown import Shown

if TYPE_CHECKING:
    import pandas


PERCENTILES = (50, 90, 99)
LATE = 0.05
"""A load is not kept up with where waiting grows by more than this share of the time that requests come for."""
MOST_BATCH = 1 << 20


@dataclass(frozen=True, slots=True)
class Figure80:
    """A figure and its 80% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """What a load gets from a replica.

    Attributes:
        load: that was asked.
        requests: what each got, as expected.
        ttft_ms, tpot_ms, tokens_per_second: means and throughput of a replica.
        ttft_percentiles, tpot_percentiles: ms, by percentile, as expected.
    """

    load: Requests
    requests: ServedRequests
    ttft_ms: Figure80
    tpot_ms: Figure80
    tokens_per_second: Figure80
    ttft_percentiles: Mapping[int, float]
    tpot_percentiles: Mapping[int, float]

    @property
    def keeps_up(self) -> bool:
        """Return whether requests of a rate are answered as quickly as they come: the last ones wait little longer than
        those before."""
        got = self.requests
        quarter = len(got.ttft_us) // 4
        if not self.load.rate or not quarter:
            return True
        second, last = slice(quarter, 2 * quarter), slice(-quarter, None)
        grown, passed = (float(each[last].mean() - each[second].mean()) for each in (got.ttft_us, got.arrival_us))
        return grown < LATE * passed

    def plain(self) -> dict[str, Any]:
        """Return the figures as values."""
        got = self.requests
        return {
            "prompt": str(self.load.prompt), "output": str(self.load.output), "concurrency": self.load.concurrency,
            "rate": self.load.rate, "requests": self.load.requests, "ttft_ms": asdict(self.ttft_ms),
            "tpot_ms": asdict(self.tpot_ms) if math.isfinite(self.tpot_ms.value) else None,
            "tokens_per_second": asdict(self.tokens_per_second),
            "requests_per_second": got.requests_per_second,
            "ttft_percentiles_ms": dict(self.ttft_percentiles), "tpot_percentiles_ms": dict(self.tpot_percentiles),
            "sequences_in_flight": got.in_flight, "sequences_decoding": got.running, "thrown_out": got.preempted,
            "busy": got.busy,
            "keeps_up": self.keeps_up}


@dataclass(frozen=True, repr=False)
class Served(Shown):
    """A served decoder's steps, its memory, and what a load gets.

    Attributes:
        model: its name.
        setup: how a replica is served.
        device, topology: names.
        batch, context, prompt: of the steps that are shown.
        decode, prefill: their times; of one prompt for each attention group, in pieces if it is longer than a step.
        decode_operations, prefill_operations: what they are made of, on one GPU.
        cache: memory of the fullest GPU.
        largest_batch: sequences of ``context`` tokens that fit a replica.
        served: what a load gets, where one was asked for.
        notes: what was assumed.
        calibration: on measured rows, where there were some.
        edits: what is changed, a phrase each.
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
        """Tokens that decoding yields, of a replica."""
        return self.batch * self.setup.yielded / self.decode.us * 1e6

    def headline(self) -> str:
        """Say what a step takes, and what a load gets."""
        said = (f"{self.model} on {self.setup.gpus} {self.device}: decoding {self.batch:,} sequences of "
                f"{self.context:,} tokens {self.decode.us / 1e3:,.2f} ms ({self.decode.low / 1e3:,.2f} to "
                f"{self.decode.high / 1e3:,.2f}), a prompt of {self.prompt:,} {self.prefill.us / 1e3:,.1f} ms "
                f"({self.prefill.low / 1e3:,.1f} to {self.prefill.high / 1e3:,.1f}), at most {self.largest_batch:,} "
                "such sequences")
        return said if self.served is None else (
            f"{said}; TTFT {self.served.ttft_ms.value:,.0f} ms, TPOT {self.served.tpot_ms.value:,.2f} ms, "
            f"{self.served.tokens_per_second.value:,.0f} tokens/s")

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Make the steps; what decoding and a prompt are made of; and what each request of a load got."""
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
        import pandas

        return pandas.DataFrame([{"step": name, **_step_ms(each)} for name, each in (
            ("decode", self.decode), ("prefill", self.prefill))])

    def _requests(self) -> pandas.DataFrame:
        import pandas

        if self.served is None:
            return pandas.DataFrame()
        got = self.served.requests
        return pandas.DataFrame({"arrival_ms": got.arrival_us / 1e3, "prompt": got.prompt, "output": got.output,
                                 "ttft_ms": got.ttft_us / 1e3, "tpot_ms": got.tpot_us / 1e3,
                                 "end_ms": got.end_us / 1e3})


def serve(source: str, *, device: str = "h200-sxm", topology: str | None = None, settings: Sequence[str] = (),
          preset: str | None = None, tp: int = 1, pp: int = 1, ep: int = 1, attention_dp: int = 1,
          precision: str = "", experts: str = "", kv_dtype: str = "", engine: str = "vllm", chunk: int = 0,
          cuda_graphs: bool = True, speculate: str | None = None, batch: int = 1, context: int = 0,
          prompt: str | int = "", output: str | int = "", rate: float = 0.0, concurrency: int = 0, requests: int = 0,
          seed: int = 0, step_us: float | None = None, profile: DeviceProfile | None = None,
          comm_profile: str | None = None, comm_choices: str | None = None,
          measured: str | ServingCalibration | None = None, anchor: str | None = None,
          anchor_capture: str | None = None, step_region: str | None = None, edits: Sequence[Edit] = ()) -> Served:
    """Predict how a decoder is served.

    Args:
        source: a published model's name ("llama-3.1-70b", "deepseek-v3"), a Hugging Face ``config.json`` or its folder,
            or a workload.
        device: of each GPU; a name or a file.
        topology: of the cluster; by default the device's usual nodes.
        settings: of a config or a workload, as ``foretrace.plan`` takes them.
        preset: of a workload.
        tp, pp, ep, attention_dp: how a replica is split, as ``ServingSetup`` says.
        precision: of linear layers' weights: bf16, fp8, fp8_block, nvfp4, mxfp4, int8 or int4; by default the model's.
        experts: of experts' weights where they have another.
        kv_dtype: of the cache: bf16, fp8 or fp4; by default the model's.
        engine: vllm, sglang, trtllm, or compiled for a model without a server.
        chunk: tokens of a step at most; by default the engine's.
        cuda_graphs: decoding runs as CUDA graphs.
        speculate: drafts of so many tokens and how many a step yields, such as "3:2.4".
        batch, context: sequences that decode, and tokens of each one's cache; by default what the load's are.
        prompt, output: tokens of prompts and answers: 1024, "512-2048" or "1024~0.5".
        rate: requests a second that come by chance.
        concurrency: clients that each ask again when they have an answer.
        requests: how many are simulated.
        seed: of what is drawn.
        step_us: host time of a step that the GPU waits for, where it is known.
        profile: fitted models of the device.
        comm_profile, comm_choices: measured collectives, as ``foretrace.plan`` takes them.
        measured: a table of measured rows, as ``calibrate.read_measured_rows`` reads it, or what another call learned.
        anchor: a trace of this decoder served so on this device, as ``anchor.read_anchor`` reads it: what its kernels
            took over what is predicted of its steps, operation by operation, is taken of all steps. Where its steps'
            names do not say what they worked on, and ``context`` is given, they decode ``batch`` sequences of it.
        anchor_capture: a trace of the capture of its CUDA graphs, whose operations have their kernels.
        step_region: the anchor's steps are the regions of this name.
        edits: of ``graph_predictor.edits``, those of recorded steps.

    Raises:
        EditError: an edit cannot be done.
        ServingError: it cannot be split so, does not fit, or the load cannot be.
        ForetraceError: a name or a file is not known, or cannot be read.
    """
    for name, value in (("batch", batch), ("context", context), ("requests", requests)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_BATCH * 16:
            raise ServingError(f"{name}={value!r} is not possible; give a whole number from 1.")
    if batch < 1:
        raise ServingError(f"batch={batch} is not possible; give a whole number from 1.")
    if step_us is not None and not (math.isfinite(step_us) and 0 <= step_us < 1e9):
        raise ServingError(f"step_us={step_us!r} is no time of a step's host; give µs, 0 or more.")
    decoder = served_decoder(source, settings, preset).in_type(precision)
    spec = served_device(device)
    linear, of_experts = decoder.weights(precision, experts)
    setup = ServingSetup(
        tp=tp, pp=pp, attention_dp=attention_dp, ep=ep, precision=linear, experts=of_experts, kv=kv_dtype,
        engine=engine_of(engine), chunk=chunk, graphs=cuda_graphs,
        speculation=None if speculate is None else Speculation.parse(speculate))
    setup.check(decoder.shape)
    collectives = cluster_for(spec, setup.gpus, topology, comm_profile, comm_choices)
    prompts = Lengths.parse(str(prompt or context or 1024), "--prompt")
    outputs = Lengths.parse(str(output or 256), "--output")
    given = context
    context = context or math.ceil(prompts.mean + outputs.mean / 2)
    asked = context if not (rate or concurrency) else max(context, prompts.longest + outputs.longest)
    check_length(decoder, asked)
    if prompts.longest > (decoder.longest or prompts.longest):
        check_length(decoder, prompts.longest)
    rates = rates_of(setup) if step_us is None else replace(rates_of(setup), step_us=step_us)
    notes: list[str] = []
    anchored = None
    if anchor_capture is not None and anchor is None:
        raise ServingError("--anchor-capture says which operations the graphs of an anchor were captured of; give "
                           "--anchor too.")
    if step_region is not None and anchor is None:
        raise ServingError("--step-region names the steps of an anchor; give --anchor too.")
    if anchor is not None:
        anchored = read_anchor(anchor, ServingModel(decoder.shape, setup, spec, collectives, profile, rates),
                               capture=anchor_capture, assumed=ServedStep(batch, given) if given else None,
                               step_region=step_region)
        rates = anchored.rates
    calibration = measured if isinstance(measured, ServingCalibration) else None
    if isinstance(measured, str):
        rows = read_measured_rows(measured, decoder.shape, setup, spec, profile,
                                  lambda gpus: cluster_for(spec, gpus, topology, comm_profile, comm_choices),
                                  decoder.longest)
        calibration = calibrate_serving(rows, rates)
    model = ServingModel(decoder.shape, setup, spec, collectives, profile,
                         rates if calibration is None else calibration.rates)
    if anchored is not None:
        model = anchored.of(model) if calibration is None else model.with_factors(anchored.factors)
    plain, model = model, edited_model(model, edits)
    cache = cache_account(decoder.shape, setup, spec, max(asked, prompts.longest))
    cache.check(batch, context, f"{decoder.name} on {setup.gpus} {spec.name}")
    decode, prefill = ServedStep(batch, context), prompt_step(setup, math.ceil(prompts.mean))
    if anchored is not None:
        notes.append(f"{anchored} {anchored.rests(plain, decode):.0%} of the step of decoding and "
                     f"{anchored.rests(plain, prefill):.0%} of the prompt's rest on operations that were recorded.")
    served = None
    if rate or concurrency:
        load = Requests(prompts, outputs, concurrency, rate, requests, seed, warm_up=_warm_up(concurrency, requests))
        served = served_load(load, model, cache, calibration)
        if not served.keeps_up:
            notes.append(f"A replica does not keep up with {rate:g} requests a second: it answers "
                         f"{served.requests.requests_per_second:,.2f}, and requests wait longer the longer they come; "
                         f"the time to the first token is the mean of {load.requests:,} requests' alone.")
    elif requests:
        raise ServingError("--requests is of a load; give --rate or --concurrency too.")
    return Served(
        decoder.name, setup, spec.name, collectives.topology.name, batch, context, math.ceil(prompts.mean),
        model.time(decode), prompt_time(model, math.ceil(prompts.mean)), tuple(model.operations(decode)),
        tuple(model.operations(prefill)), cache, cache.largest_batch(context), served,
        (*notes, *_notes(decoder, setup, spec, collectives, step_us, calibration)), calibration,
        tuple(edit.describe() for edit in edits))


def served_device(name: str) -> DeviceSpec:
    """Return a GPU by its name or file. Raises ``ServingError`` for a host's processor."""
    spec = find_device(name)
    if spec.vendor == "host":
        raise ServingError(f"Served are GPUs' steps, and {spec.name} is a host's processor; name a GPU (foretrace "
                           "devices).")
    return spec


def cluster_for(spec: DeviceSpec, gpus: int, topology: str | None, comm_profile: str | None,
                comm_choices: str | None) -> CollectiveModel:
    """Return the cluster of so many GPUs. Raises ``PlanError`` where there is none so large."""
    if topology is not None or measured_file(comm_profile, comm_choices) is not None:
        found = cluster_of(topology, comm_profile, None, comm_choices)
    else:
        found = CollectiveModel(topology_of(spec, gpus), mixed=comm_choices is not None)
    found.check_fits(gpus)
    return found


def check_length(decoder: ServedDecoder, tokens: int) -> None:
    """Raise ``ServingError`` for a context that is longer than the model's."""
    if decoder.longest and tokens > decoder.longest:
        raise ServingError(f"A context of {tokens:,} tokens is longer than the {decoder.longest:,} that {decoder.name} "
                           "takes; give less.")


def prompt_step(setup: ServingSetup, tokens: int) -> ServedStep:
    """Return the last step of a prompt for each attention group of a replica."""
    past = (tokens - 1) // setup.step_tokens * setup.step_tokens
    count = setup.attention_dp
    return ServedStep(0, 0, (PrefillChunk(count, tokens - past, past),), count)


def prompt_steps(setup: ServingSetup, tokens: int) -> list[ServedStep]:
    """Return all steps that read a prompt for each attention group of a replica."""
    count = setup.attention_dp
    return [*(ServedStep(0, 0, (PrefillChunk(count, setup.step_tokens, past),))
              for past in range(0, tokens - setup.step_tokens, setup.step_tokens)), prompt_step(setup, tokens)]


def prompt_time(model: ServingModel, tokens: int) -> StepTime:
    """Return the time of a prompt for each attention group of a replica, all its pieces together."""
    setup = model.setup
    steps = [model.time(step) for step in prompt_steps(setup, tokens)]
    return StepTime(*(sum(values) for values in zip(*(
        (each.us, each.low, each.high, each.products, each.others, each.collectives, each.host, each.engine)
        for each in steps), strict=True)))


def served_load(load: Requests, model: ServingModel, cache: CacheAccount,
                calibration: ServingCalibration | None = None) -> ServedLoad:
    """Return what a load gets from a replica, with intervals: of clients that wait all times scale with those of steps,
    a rate is served again with all steps as short and as long as they may be."""
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
    found = ServedLoad(load, got, ends[0], ends[1], _scaled(second, between), _percentiles(like[0] * got.ttft_us),
                       _percentiles(like[1] * got.tpot_us))
    if load.rate and found.keeps_up:
        # Answers are as many as requests, however long each takes.
        found = replace(found, tokens_per_second=Figure80(second, min([second, *others]), max([second, *others])))
    return found


def _warm_up(clients: int, requests: int) -> int:
    """Return how many requests of clients that all begin at once do not count: the first of each, if others remain."""
    return clients if not requests or requests >= 2 * clients else 0


class _Slower:
    """A surface all of whose times are a factor longer."""

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


def _notes(decoder: ServedDecoder, setup: ServingSetup, spec: DeviceSpec, collectives: CollectiveModel,
           step_us: float | None, calibration: ServingCalibration | None) -> list[str]:
    notes = [*decoder.notes, *other_nodes(collectives.topology, spec)]
    notes += [f"The matrix units of {spec.name} do not multiply {precision}: weights are read so and widened to "
              f"{decoder.shape.dtype}." for precision in dict.fromkeys((setup.precision, setup.of_experts))
              if weight_type(precision, spec).widened]
    if calibration is not None:
        notes.append(str(calibration))
    elif step_us is None and setup.engine.step_us:
        notes.append(f"{setup.engine.name} is taken to add {setup.engine.step_us / 1e3:g} ms to each step and "
                     f"{setup.engine.sequence_us:g} µs for each of its sequences; give --step-us where it is known, or "
                     "--calibrate.")
    return notes


def _step_ms(step: StepTime) -> dict[str, float]:
    return {name: us / 1e3 for name, us in (
        ("ms", step.us), ("low", step.low), ("high", step.high), ("products", float(step.products)),
        ("others", float(step.others)), ("collectives", float(step.collectives)), ("host", step.host),
        ("engine", step.engine))}


def _operations(found: Sequence[ServedOperation]) -> pandas.DataFrame:
    import pandas

    total = sum(each.us for each in found) or 1.0
    return pandas.DataFrame([{"operation": each.name, "count": each.count, "ms": each.us / 1e3,
                              "share": each.us / total, "bound": each.bound, "gflops": each.flops / 1e9,
                              "moved_gb": each.moved_bytes / 1e9,
                              "source": max(each.sources, key=each.sources.__getitem__)}
                             for each in found])


CHUNKS = (2048, 8192)
MOST_CLIENTS = 1024
"""Clients of a replica at most."""
WAVES = 3
"""Requests of each client while configurations are compared; the best ones are served again as ``serve`` does."""
MOST_GPUS = 1024


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """What may pass at most in the mean, ms; infinity where nothing is asked.

    Attributes:
        ttft_ms: to the first token.
        tpot_ms: between tokens.
    """

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf

    @staticmethod
    def parse(text: str) -> LatencyTarget:
        """Return what "ttft=500,tpot=30" says, ms. Raises ``ServingError``."""
        found: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(ttft|tpot)\s*=\s*(\d{1,9}(?:\.\d{1,6})?)\s*(?:ms)?\s*", part.lower())
            if match is None or match.group(1) in found or not float(match.group(2)):
                raise ServingError(f"--target {text[:40]!r} is no target of latency; give ms in the mean, such as "
                                   "ttft=500,tpot=30.")
            found[match.group(1)] = float(match.group(2))
        return LatencyTarget(found.get("ttft", math.inf), found.get("tpot", math.inf))

    def met(self, got: ServedLoad) -> bool:
        """Return whether a load is served within it, as expected."""
        return got.ttft_ms.value <= self.ttft_ms and not got.tpot_ms.value > self.tpot_ms

    def surely(self, got: ServedLoad) -> bool:
        """Return whether it is so even at the slow ends of the 80% intervals."""
        return got.ttft_ms.high <= self.ttft_ms and not got.tpot_ms.high > self.tpot_ms

    def __str__(self) -> str:
        parts = [f"{name} {value:g} ms" for name, value in (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms))
                 if math.isfinite(value)]
        return " and ".join(parts) or "any latency"


@dataclass(frozen=True, slots=True)
class ServingChoice:
    """A configuration that was served.

    Attributes:
        setup: of a replica.
        replicas: of it.
        got: what a replica's load gets.
    """

    setup: ServingSetup
    replicas: int
    got: ServedLoad

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all replicas' answers."""
        return self.replicas * self.got.tokens_per_second.value

    @property
    def tokens_per_gpu(self) -> float:
        """The same of a GPU."""
        return self.got.tokens_per_second.value / self.setup.gpus


@dataclass(frozen=True, repr=False)
class ServingChoices(Shown):
    """Configurations, the best first.

    Attributes:
        model, device: names.
        gpus: of all replicas together.
        target: of latency.
        prompt, output, rate: of the load.
        choices: of each split and chunk the best that meets the target.
        tried: configurations that were served, those that miss the target too.
        refused: splits that cannot be, with the reason.
        notes: what was assumed.
    """

    model: str
    device: str
    gpus: int
    target: LatencyTarget
    prompt: Lengths
    output: Lengths
    rate: float
    choices: tuple[ServingChoice, ...]
    tried: int
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def headline(self) -> str:
        """Say which is the best."""
        where = f"{self.model} on {self.gpus} {self.device} within {self.target}: {self.tried:,} configurations served"
        if not self.choices:
            return f"{where}, none within the target"
        best = self.choices[0]
        return (f"{where}; best {best.replicas} × {best.setup} with {best.got.load.concurrency or self.rate:g} "
                f"{'clients each' if best.got.load.concurrency else 'requests/s'}: "
                f"{best.tokens_per_second:,.0f} tokens/s")

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Make the configurations, and the reasons against others."""
        return {"choices": self._choices, "refused": self._refused}

    def rows(self) -> list[dict[str, Any]]:
        """Return the configurations as values."""
        return [{
            "replicas": each.replicas, "setup": str(each.setup), "gpus": each.replicas * each.setup.gpus,
            "chunk": each.setup.step_tokens, "concurrency": each.got.load.concurrency,
            "tokens_per_second": each.tokens_per_second, "tokens_per_second_per_gpu": each.tokens_per_gpu,
            "ttft_ms": each.got.ttft_ms.value, "ttft_low": each.got.ttft_ms.low, "ttft_high": each.got.ttft_ms.high,
            "tpot_ms": each.got.tpot_ms.value, "tpot_low": each.got.tpot_ms.low, "tpot_high": each.got.tpot_ms.high,
            "surely": self.target.surely(each.got)} for each in self.choices]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"model": self.model, "device": self.device, "gpus": self.gpus, "target": str(self.target),
                "prompt": str(self.prompt), "output": str(self.output), "rate": self.rate, "tried": self.tried,
                "choices": self.rows(),
                "refused": [{"setup": setup, "reason": reason} for setup, reason in self.refused],
                "notes": list(self.notes)}

    def _choices(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(self.rows())

    def _refused(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(list(self.refused), columns=["setup", "reason"])


def serve_search(source: str, gpus: int, *, target: str | LatencyTarget = "", device: str = "h200-sxm",
                 topology: str | None = None, settings: Sequence[str] = (), preset: str | None = None,
                 prompt: str | int = 1024, output: str | int = 256, rate: float = 0.0, precision: str = "",
                 experts: str = "", kv_dtype: str = "", engine: str = "vllm", cuda_graphs: bool = True,
                 speculate: str | None = None, seed: int = 0, profile: DeviceProfile | None = None,
                 comm_profile: str | None = None, comm_choices: str | None = None,
                 edits: Sequence[Edit] = ()) -> ServingChoices:
    """Find how GPUs serve most tokens within a target of latency, or a rate of requests most quickly.

    Args:
        source, device, topology, settings, preset: as ``serve`` takes them.
        precision, experts, kv_dtype, engine, cuda_graphs: as ``serve`` takes them.
        speculate, seed, profile, comm_profile, comm_choices, edits: as ``serve`` takes them.
        gpus: of all replicas together.
        target: means at most, ms, such as "ttft=500,tpot=30".
        prompt, output: tokens of requests.
        rate: requests a second of all replicas; without, the number of clients is searched too.

    Raises:
        EditError: an edit cannot be done with any split.
        ServingError: the model fits no split, or the load cannot be.
    """
    if not isinstance(gpus, int) or isinstance(gpus, bool) or not 1 <= gpus <= MOST_GPUS:
        raise ServingError(f"gpus={gpus!r} is not possible; give a whole number from 1 to {MOST_GPUS:,}.")
    goal = target if isinstance(target, LatencyTarget) else LatencyTarget.parse(target) if target else LatencyTarget()
    decoder, spec = served_decoder(source, settings, preset).in_type(precision), served_device(device)
    prompts, outputs = Lengths.parse(str(prompt), "--prompt"), Lengths.parse(str(output), "--output")
    check_length(decoder, prompts.longest + outputs.longest)
    linear, of_experts = decoder.weights(precision, experts)
    start = ServingSetup(precision=linear, experts=of_experts, kv=kv_dtype, engine=engine_of(engine),
                         graphs=cuda_graphs,
                         speculation=None if speculate is None else Speculation.parse(speculate))
    choices, refused, tried = [], [], 0
    for setup in _splits(decoder, start, gpus, spec):
        try:
            setup.check(decoder.shape)
            cache = cache_account(decoder.shape, setup, spec, prompts.longest + outputs.longest)
            cache.check(1, prompts.longest + outputs.longest, f"{decoder.name} on {setup.gpus} {spec.name}")
            collectives = cluster_for(spec, setup.gpus, topology, comm_profile, comm_choices)
            model = edited_model(ServingModel(decoder.shape, setup, spec, collectives, profile), edits)
        except (ServingError, EditError) as error:
            refused.append((str(setup), str(error)))
            continue
        for chunk in (CHUNKS if setup.engine.splits else (0,)):
            own = model.with_chunk(chunk)
            best, number = _best(own, cache, prompts, outputs, gpus // setup.gpus, rate, goal, seed)
            tried += number
            if best is not None:
                choices.append(best)
    if not choices and refused and tried == 0:
        raise ServingError(refused[-1][1])
    if rate:
        choices.sort(key=lambda each: each.got.tpot_ms.value)
    else:
        choices.sort(key=lambda each: -each.replicas * each.got.tokens_per_second.value)
    return ServingChoices(decoder.name, spec.name, gpus, goal, prompts, outputs, rate, tuple(choices), tried,
                          tuple(refused), decoder.notes)


def _splits(decoder: ServedDecoder, start: ServingSetup, gpus: int, spec: DeviceSpec) -> Iterator[ServingSetup]:
    """Splits of a replica: attention over powers of two of a node's GPUs, experts whole or shared, attention groups."""
    routed = any(kind.experts for kind in decoder.shape.kinds)
    sizes = [1 << power for power in range(4) if gpus % (1 << power) == 0]
    for size in sizes:
        for groups in ([each for each in sizes if size % each == 0] if routed else [1]):
            for ep in sorted({1, size} if routed else {1}):
                if groups == 1 or ep == size:
                    yield replace(start, tp=size // groups, attention_dp=groups, ep=ep)


def _best(model: ServingModel, cache: CacheAccount, prompts: Lengths, outputs: Lengths, replicas: int, rate: float,
          goal: LatencyTarget, seed: int) -> tuple[ServingChoice | None, int]:
    """Return the best load of a split that meets the target, and how many were served."""
    setup = model.setup
    if rate:
        got = served_load(Requests(prompts, outputs, rate=rate / replicas, seed=seed), model, cache)
        return (ServingChoice(setup, replicas, got) if goal.met(got) and got.keeps_up else None), 1
    best, tried, clients = None, 0, 1
    while clients <= MOST_CLIENTS:
        load = Requests(prompts, outputs, clients, count=max(WAVES * clients, 4), seed=seed, warm_up=clients)
        got = served_load(load, model, cache)
        tried += 1
        if goal.met(got) and (best is None or got.tokens_per_second.value > best.got.tokens_per_second.value):
            best = ServingChoice(setup, replicas, got)
        if got.tpot_ms.value > goal.tpot_ms or got.ttft_ms.value > 4 * goal.ttft_ms:
            break
        if best is not None and got.tokens_per_second.value < 0.9 * best.got.tokens_per_second.value:
            break
        clients *= 2
    return best, tried
