"""``price_layer``: time and bound of each operation of a decoder's layer, for several devices, phases and batches.

    foretrace.price_layer("llama-3.1-8b", devices=("a100-sxm-80g", "h100-sxm"), batches=(1, 64))

Times are those that ``serve`` adds up. The bound follows from the data sheet alone, as in a roofline. It is the longer
of two times: floating point operations over the peak rate of their type, and bytes over the memory's bandwidth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kernel_models.device import DeviceSpec
from kernel_models.op_call import DIMENSIONS, OpCall
from planner.parallel.layer_costs import PRODUCTS
from planner.serving.serve import MOST_COUNT, USUAL_OUTPUT, USUAL_PROMPT, ServedModelRequest, check_length
from planner.serving.setup import Lengths, ServingError
from planner.serving.step_operations import StepExchange, StepOperation, StepOperations, layer_in_order
from planner.serving.steps import ServingModel
from tracer.errors import listed
from tracer.lazy import pandas
from tracer.shape_only.transformer import TransformerShape
from tracer.shown import Shown

PHASES = ("decode", "prefill")
NETWORK = "network"
"""Bound of a collective."""


@dataclass(frozen=True, slots=True)
class LayerOperation:
    """Equal operations of one layer on one GPU.

    Attributes:
        device, phase, batch: the case.
        name: name in ``serve``'s reports.
        sizes: sizes of a call, such as "m=8 n=6,144 k=4,096"; bytes of a collective.
        count: number of these operations in the layer.
        us, low, high: time of all of them, and its 80% interval, µs.
        share: their share of the layer's time.
        bound: compute, memory or network.
        intensity: floating point operations a byte; ``None`` for a collective.
        product: whether the matrix units compute it.
    """

    device: str
    phase: str
    batch: int
    name: str
    sizes: str
    count: int
    us: float
    low: float
    high: float
    share: float
    bound: str
    intensity: float | None
    product: bool


@dataclass(frozen=True, repr=False)
class PricedLayer(Shown):
    """A layer's operations on several devices.

    Attributes:
        model: the decoder's name.
        layers, alike: number of all layers, and of layers of the priced kind, which is the most frequent.
        prompt, context: tokens of a prompt in prefill, and of each cache in decoding.
        operations: in the layer's order, device by device within phase and batch.
        notes: assumptions.
    """

    model: str
    layers: int
    alike: int
    prompt: int
    context: int
    operations: tuple[LayerOperation, ...]
    notes: tuple[str, ...]

    def headline(self) -> str:
        """Return in a line what is priced."""
        kind = "a layer" if self.alike == self.layers else f"a layer of the kind that {self.alike} of {self.layers} are"
        devices = listed(dict.fromkeys(each.device for each in self.operations))
        return f"{self.model}: {kind}, on one GPU of {devices}"

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Return one table with a row for each operation, device, phase and batch."""
        return {"operations": lambda: pandas.DataFrame([asdict(each) for each in self.operations])}

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


def price_layer(source: str, *, devices: Sequence[str] = ("h200-sxm",), phases: Sequence[str] = PHASES,
                batches: Sequence[int] = (1,), prompt: int | str = 0, context: int = 0, tp: int = 1,
                **model: Any) -> PricedLayer:
    """Predict the time of each operation in a decoder's most frequent layer.

    Args:
        source: as in ``serve``; ``model`` are further fields of its request: precision, engine, settings….
        devices: names or files.
        phases: "decode" for one token of each sequence; "prefill" for whole prompts, those of a batch together.
        batches: numbers of sequences.
        prompt: tokens of a prompt, as in ``serve`` (a distribution counts by its mean); by default ``USUAL_PROMPT``.
        context: tokens of each cache in decoding; by default ``prompt`` plus half of ``USUAL_OUTPUT``.
        tp: number of GPUs that share a layer.

    Raises:
        ServingError: a phase is unknown, a number is not possible, or the layer cannot be split in this way.
        ForetraceError: a name or a file is unknown, or cannot be read.
    """
    for phase in phases:
        if phase not in PHASES:
            raise ServingError(f"{phase!r} is no phase of serving; give {' or '.join(PHASES)}.")
    prompt = math.ceil(Lengths.parse(str(prompt or USUAL_PROMPT), "--prompt").mean)
    context = context or math.ceil(prompt + USUAL_OUTPUT / 2)
    for name, value in (*(("batch", each) for each in batches), ("prompt", prompt), ("context", context)):
        if not 1 <= value <= MOST_COUNT:
            raise ServingError(f"{name}={value} is not possible; give a whole number from 1 to {MOST_COUNT:,}.")
    found: list[LayerOperation] = []
    notes: list[str] = []
    for name in devices:
        request = ServedModelRequest(source, device=name, **model)
        decoder = request.decoder()
        check_length(decoder, max(prompt, context))
        served = ServingModel(decoder.shape, replace(request.setup(decoder), tp=tp), request.spec(),
                              request.cluster(tp), request.profile)
        notes += decoder.notes
        for phase in phases:
            for batch in batches:
                found += _layer(served, phase, batch, prompt, context)
    return PricedLayer(decoder.name, decoder.shape.layers, _most_frequent(served)[1], prompt, context,
                       tuple(found), tuple(dict.fromkeys(notes)))


def _most_frequent(served: ServingModel) -> tuple[TransformerShape, int]:
    """Return the most frequent kind of layer of a decoder (the first of equals), and the number of such layers."""
    counted: Counter[TransformerShape] = Counter()
    for run in served.shape.runs:
        counted[run.one_layer()] += run.layers
    return counted.most_common(1)[0]


def _layer(served: ServingModel, phase: str, batch: int, prompt: int, context: int) -> Iterator[LayerOperation]:
    kind, _ = _most_frequent(served)
    make = StepOperations(served.shape, served.setup, served.device, served.collectives.topology)
    decoding = phase == PHASES[0]
    tokens = batch if decoding else batch * prompt
    attention = make.of_decoding(kind, batch, context) if decoding else make.of_prompts(kind, batch, prompt, 0)
    counted = Counter(layer_in_order([*make.of_tokens(kind, tokens)], [*attention], [*make.exchanges(kind, tokens)]))
    times = zip(*(each.tolist() for each in served.prices_of([*counted])), strict=True)
    priced = [(each, number, [number * us for us in three])
              for (each, number), three in zip(counted.items(), times, strict=True)]
    whole = sum(us for _, _, (us, _, _) in priced)
    for each, number, (us, low, high) in priced:
        call = each.call if isinstance(each, StepOperation) else None
        yield LayerOperation(
            served.device.name, phase, batch, each.name, _sizes(each), number, us, low, high, us / whole,
            NETWORK if call is None else bound_of(call, served.device),
            None if call is None else call.flops / call.bytes_moved if call.bytes_moved else 0.0,
            call is not None and call.family in PRODUCTS)


def bound_of(call: OpCall, device: DeviceSpec) -> str:
    """Return "compute" or "memory", the longer time by the data sheet alone."""
    peak = device.peak_tflops(call.dtype, matrix=call.family in PRODUCTS) * 1e12
    return "compute" if call.flops / peak > call.bytes_moved / (device.memory_bandwidth_gbps * 1e9) else "memory"


def _sizes(each: StepOperation | StepExchange) -> str:
    if isinstance(each, StepExchange):
        return f"{each.call.payload_bytes / 1e6:,.3g} MB"
    sizes = dict(zip(DIMENSIONS[each.call.family], each.call.dims, strict=False))
    if each.call.dtype == "fp4":
        sizes["k"] *= 2  # it counts pairs of packed values
    if sizes.get("v_head_dim") == sizes.get("head_dim"):
        sizes.pop("v_head_dim", None)
    return " ".join(f"{name}={size:,}" for name, size in sizes.items() if size > 1)
