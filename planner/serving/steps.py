"""Operations of a served decoder's step: what one GPU computes and communicates, as calls that models price.

A step reads new tokens: one (or a draft) of each sequence that decodes, and pieces of prompts. All but attention and
the logits depends on how many tokens there are, whoever they belong to:

    of tokens      norms, products, rotary positions, cache, experts; collectives
    of decoding    attention of one query to a cache, recurrences' states
    of prompts     attention of a prompt's piece to itself and to what the cache has of it
    of rows        the last norm, logits, sampling: a row for each sequence that gets a token

``ServingModel``: the time of any step of a served decoder, from prices of its operations on a grid.

    step ──StepOperations──▶ calls ──price, price_calls──▶ parts, µs ──CorrectionFactors──▶ time ± interval

Prices are those of training steps (``kernel_models.pricing``, ``power``, ``collectives.price_calls``), factors and
spreads those of planned ones (``parallel.corrections``). A server takes thousands of steps of any number of tokens,
sequences and contexts; all that they depend on is priced once on a grid, in one go, and interpolated between its
points. ``operations`` prices one step exactly, for reports.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from kernel_models.collectives import (
    CollectiveBatch,
    CollectiveCall,
    CollectiveKind,
    CollectiveModel,
    CommTimes,
    Topology,
    price_calls,
)
from kernel_models.collectives.price import with_engine_kernels
from kernel_models.device import DeviceSpec
from kernel_models.families.attention import attention
from kernel_models.families.elementwise import elementwise
from kernel_models.families.embedding import embedding
from kernel_models.families.gemm import gemm
from kernel_models.families.inference import touched
from kernel_models.families.reduction import norm, softmax
from kernel_models.heuristics.roofline import heuristic_models
from kernel_models.op_call import Family, OpCall, Source, TensorSpec, itemsize
from kernel_models.pricing import Models, PricedCalls, price, sustained
from planner.parallel.corrections import Z80, CorrectionFactors
from planner.parallel.layer_costs import PRODUCTS
from planner.serving.setup import ServingSetup, WeightType, weight_type
from tracer.arrays import Float64
from tracer.shape_only.transformer import TransformerShape

PREFILL_KERNELS = {"hopper": "flash3", "blackwell": "cudnn"}
"""Kernels of prompts' attention by architecture; FlashAttention-2 elsewhere."""
COMM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class StepOperation:
    """Device work by the name that a report gives it."""

    name: str
    call: OpCall


@dataclass(frozen=True, slots=True)
class StepExchange:
    """Communication by the name that a report gives it."""

    name: str
    call: CollectiveCall


class StepOperations:
    """Makes the operations of one GPU.

    Args:
        shape: of the decoder.
        setup: how it is served.
        device: of each GPU.
        on: where its GPUs lie.
    """

    def __init__(self, shape: TransformerShape, setup: ServingSetup, device: DeviceSpec, on: Topology) -> None:
        self.shape, self.setup, self.device, self.on = shape, setup, device, on
        self.linear = weight_type(setup.precision, device)
        self.of_experts = weight_type(setup.of_experts, device)
        self._dtype = shape.dtype

    def of_tokens(self, kind: TransformerShape, tokens: int) -> Iterator[StepOperation]:
        """A block's operations on so many tokens of each attention group."""
        if kind.attends:
            yield from self._norm("norms", tokens, kind)
            yield from self._latent(kind, tokens) if kind.latent is not None else self._grouped(kind, tokens)
        if kind.state is not None:
            if not kind.attends:
                yield from self._norm("norms", tokens, kind)
            yield from self._mixer(kind, tokens)
        if not (kind.experts or kind.ffn):
            return
        if kind.norms >= 2:
            for _ in range(kind.norms - 1):
                yield from self._norm("norms", tokens, kind)
        if kind.experts:
            yield from self._experts(kind, tokens * self.setup.attention_dp)
        else:
            yield from self._feed_forward("", tokens, kind, kind.ffn // self.setup.dense_tp)

    def exchanges(self, kind: TransformerShape, tokens: int) -> Iterator[StepExchange]:
        """A block's communication for so many tokens of each attention group."""
        setup, stream = self.setup, float(tokens * self.shape.hidden * self.shape.element_bytes)
        if kind.attends or kind.state is not None:
            yield from self._exchange("all-reduce", CollectiveKind.ALL_REDUCE, stream, setup.tp)
        if kind.experts and setup.attention_dp > 1:
            whole = stream * setup.attention_dp
            yield from self._exchange("tokens to experts", CollectiveKind.ALL_GATHER, whole, setup.layer_gpus)
            yield from self._exchange("tokens from experts", CollectiveKind.REDUCE_SCATTER, whole, setup.layer_gpus)
        elif kind.experts or kind.ffn:
            yield from self._exchange("all-reduce", CollectiveKind.ALL_REDUCE, stream, setup.tp)

    def of_decoding(self, kind: TransformerShape, sequences: int, context: int) -> Iterator[StepOperation]:
        """A block's work on the caches of decoding sequences, of so many tokens each."""
        setup, queries = self.setup, self.setup.drafted
        if kind.attends:
            held = min(context, kind.window) if kind.window else context
            flags: tuple[str, ...] = ()
            kernel, kv_heads = "paged", setup.kv_heads(kind)
            width, values = kind.width_of_head, kind.width_of_values
            if kind.latent is not None:
                kernel, flags, kv_heads = "mla", ("latent",), 1
                width, values = kind.latent.key_rank + kind.latent.rotated, kind.latent.key_rank
            for call in attention(f"{kernel}_forward", sequences, kind.heads // setup.tp, kv_heads, queries,
                                  max(held, queries), width, values, self._dtype, causal=True, flags=flags,
                                  kv_dtype=setup.kv):
                yield StepOperation("attention of decoding", call)
        if kind.state is not None:
            own = kind.state.share(setup.tp)
            state = sequences * own.inner * own.state
            yield from self._pass("state-space recurrence", "scan", state, state, "fp32")

    def of_prompts(self, kind: TransformerShape, prompts: int, new: int, past: int) -> Iterator[StepOperation]:
        """A block's attention of pieces of prompts, so many new tokens each, to themselves and what came before."""
        setup = self.setup
        if kind.attends:
            kernel = PREFILL_KERNELS.get(self.device.architecture, "flash")
            kv_heads = kind.heads // setup.tp if kind.latent is not None else setup.kv_heads(kind)
            window = kind.window if kind.window and kind.window < new + past else 0
            held = min(new + past, new + window) if window else new + past
            for call in attention(f"{kernel}_forward", prompts, kind.heads // setup.tp, kv_heads, new, held,
                                  kind.width_of_head, kind.width_of_values, self._dtype, causal=True, window=window):
                yield StepOperation("attention of prompts", call)
        if kind.state is not None:
            own = kind.state.share(setup.tp)
            # Chunk by chunk (Dao and Gu, 2024, section 6): decays summed up, states made and passed on, results.
            tokens = prompts * new
            states = prompts * -(-new // own.chunk) * own.inner * own.state
            yield from self._pass("state-space recurrence", "cumsum", tokens * own.heads, tokens * own.heads, "fp32")
            yield from self._pass("state-space recurrence", "states", states, tokens * own.mixed, "fp32")
            yield from self._pass("state-space recurrence", "passing", states, states, "fp32")
            for call in gemm(own.heads, prompts * new, own.head_size + own.state, own.chunk, self._dtype, "nt",
                             kind="bmm"):
                yield StepOperation("state-space recurrence", call)

    def embedded(self, tokens: int) -> Iterator[StepOperation]:
        """The embedding of so many tokens."""
        rows = -(-self.shape.vocab // self.setup.tp)
        for call in embedding("embedding", tokens, tokens, rows, self.shape.hidden, 1, self._dtype, "int64"):
            yield StepOperation("embedding", call)

    def of_rows(self, rows: int) -> Iterator[StepOperation]:
        """The last norm, the logits and the sampling of so many sequences."""
        shape = self.shape
        yield from self._norm("norms", rows, shape.kinds[0])
        for call in gemm(1, rows, -(-shape.vocab // self.setup.tp), shape.hidden, self._dtype, "nt"):
            yield StepOperation("logits", call)
        for call in softmax("softmax", TensorSpec((rows, shape.vocab), "fp32"), -1):
            yield StepOperation("sampling", call)
        for call in elementwise("argmax", [TensorSpec((rows, shape.vocab), "fp32")], (rows,), "int64"):
            yield StepOperation("sampling", call)

    def end_exchanges(self, tokens: int, rows: int) -> Iterator[StepExchange]:
        """Communication outside blocks: of embedded tokens, of logits, and between stages."""
        shape, tp = self.shape, self.setup.tp
        stream = float(tokens * shape.hidden * shape.element_bytes)
        yield from self._exchange("all-reduce", CollectiveKind.ALL_REDUCE, stream, tp)
        yield from self._exchange("logits of all GPUs", CollectiveKind.ALL_GATHER,
                                  float(rows * shape.vocab * shape.element_bytes), tp)
        if self.setup.pp > 1:
            place = self.on.place([0, self.setup.layer_gpus])
            for _ in range(self.setup.pp - 1):
                yield StepExchange("between stages", CollectiveCall(CollectiveKind.SEND_RECV, stream, place,
                                                                    COMM_DTYPES[self._dtype]))

    def _exchange(self, name: str, kind: CollectiveKind, payload: float, ranks: int) -> Iterator[StepExchange]:
        if ranks > 1 and payload > 0:
            yield StepExchange(name, CollectiveCall(kind, payload, self.on.place(range(ranks)),
                                                    COMM_DTYPES[self._dtype]))

    def _grouped(self, kind: TransformerShape, tokens: int) -> Iterator[StepOperation]:
        """Projections of attention with heads of keys and values of their own, around attention."""
        setup, size = self.setup, kind.width_of_head
        heads, kv = kind.heads // setup.tp, setup.kv_heads(kind)
        yield from self._linear("queries, keys, values", tokens, (heads + 2 * kv) * size, kind.hidden,
                                bias=kind.biased_qkv, by_norm=True)
        if kind.qk_norm:
            yield from self._norms("norms", tokens * (heads + kv), size)
        turned = tokens * (heads + kv) * size
        yield from self._turned(turned if kind.rotary else 0, tokens, 2 * kv * size)
        yield from self._linear("attention's output", tokens, kind.hidden, heads * size, bias=kind.bias)

    def _latent(self, kind: TransformerShape, tokens: int) -> Iterator[StepOperation]:
        """Projections of latent attention; keys and values are not made of the cache but taken into queries and
        outputs, as all engines do when they decode (DeepSeek-V2, 2024, section 2.1.2)."""
        of = kind.latent
        assert of is not None
        heads, name = kind.heads // self.setup.tp, "queries, keys, values"
        made = of.key_rank + of.rotated
        if of.query_rank:
            yield from self._linear(name, tokens, of.query_rank + made, kind.hidden, by_norm=True)
            yield from self._norms("norms", tokens, of.query_rank)
            yield from self._linear(name, tokens, heads * kind.width_of_head, of.query_rank, by_norm=True)
        else:
            yield from self._linear(name, tokens, heads * kind.width_of_head + made, kind.hidden, by_norm=True)
        yield from self._norms("norms", tokens, of.key_rank)
        turned = tokens * (heads + 1) * of.rotated
        yield from self._turned(turned, tokens, made)
        for depth, width in ((of.plain, of.key_rank), (of.key_rank, of.values)):
            for call in gemm(heads, tokens, width, depth, self._dtype, "nn", kind="bmm"):
                yield StepOperation(name, call)
        yield from self._linear("attention's output", tokens, kind.hidden, heads * of.values)

    def _mixer(self, kind: TransformerShape, tokens: int) -> Iterator[StepOperation]:
        """A state-space mixer but for its recurrence."""
        assert kind.state is not None
        own = kind.state.share(self.setup.tp)
        yield from self._linear("state-space projections", tokens, own.projected, kind.hidden, by_norm=True)
        yield from self._pass("state-space recurrence", "conv", tokens * own.mixed, tokens * own.mixed)
        yield from self._norms("norms", tokens, own.inner)
        yield from self._linear("state-space projections", tokens, kind.hidden, own.inner)

    def _feed_forward(self, of: str, tokens: int, kind: TransformerShape, width: int) -> Iterator[StepOperation]:
        """A dense feed-forward part, or the experts that every token goes to."""
        name = of or "feed-forward part"
        yield from self._linear(name, tokens, width * (2 if kind.gated else 1), kind.hidden, bias=kind.bias,
                                by_norm=True)
        yield from self._activation(tokens, width, kind)
        yield from self._linear(name, tokens, kind.hidden, width, bias=kind.bias)

    def _activation(self, rows: int, width: int, kind: TransformerShape) -> Iterator[StepOperation]:
        read = rows * width * (2 if kind.gated else 1)
        yield from self._pass("activation", "silu_and_mul" if kind.gated else "gelu", rows * width, read)

    def _experts(self, kind: TransformerShape, tokens: int) -> Iterator[StepOperation]:
        """Routing and experts, of the GPU with most of the tokens."""
        setup, width = self.setup, kind.ffn // self.setup.expert_tp
        for call in gemm(1, tokens, kind.experts, kind.hidden, self._dtype, "nt"):
            yield StepOperation("routing", call)
        for call in softmax("softmax", TensorSpec((tokens, kind.experts), "fp32"), -1):
            yield StepOperation("routing", call)
        yield from self._pass("routing", "sort", tokens * kind.top_k, tokens * kind.top_k, "int32")
        here = kind.experts // setup.ep
        rows = tokens * kind.top_k / setup.ep
        rows = min(rows * (kind.imbalance if setup.ep > 1 else 1.0), float(tokens * min(kind.top_k, here)))
        busy = max(round(touched(tokens, kind.experts, kind.top_k) / setup.ep), 1)
        each = max(-(-round(rows) // busy), 1)
        gated = 2 if kind.gated else 1
        yield from self._product("experts", busy, each, gated * width, kind.hidden, self.of_experts)
        yield from self._activation(max(round(rows), 1), width, kind)
        yield from self._product("experts", busy, each, kind.hidden, width, self.of_experts)
        yield from self._pass("routing", "sum", tokens * kind.hidden, max(round(rows), 1) * kind.hidden)
        if kind.shared_ffn:
            # Shared by the GPUs that share a dense part; an attention group has its own tokens.
            yield from self._feed_forward("shared experts", tokens // setup.attention_dp or 1, kind,
                                          max(kind.shared_ffn // setup.tp, 1))

    def _linear(self, name: str, m: int, n: int, k: int, *, bias: bool = False, by_norm: bool = False
                ) -> Iterator[StepOperation]:
        """A linear layer, and the cast of what goes in where no norm before it does that."""
        if self.linear.dtype and (not by_norm or self.setup.precision == "fp8_block"):
            yield StepOperation("casts", OpCall(
                Family.ELEMENTWISE, "cast", (m * k, 1, m * k), self._dtype, flags=(f"to_{self.linear.dtype}",),
                flops=float(m * k), bytes_read=float(m * k * itemsize(self._dtype)),
                bytes_written=m * k * self.linear.bytes))
        yield from self._product(name, 1, m, n, k, self.linear, added="bias" if bias else "")

    def _product(self, name: str, batch: int, m: int, n: int, k: int, weights: WeightType, added: str = ""
                 ) -> Iterator[StepOperation]:
        kind = "grouped" if batch > 1 else "scaled" if weights.dtype else ""
        flags = ("routed",) if batch > 1 else ()
        packed = 2 if weights.dtype == "fp4" else 1
        stored = weights.stored if weights.widened else ""
        for call in gemm(batch, m, n, max(k // packed, 1), weights.dtype or self._dtype, "nt", kind=kind, added=added,
                         out_dtype=self._dtype if weights.dtype else "", weight_dtype=stored, flags=flags):
            yield StepOperation(name, call)

    def _turned(self, turned: int, tokens: int, width: int) -> Iterator[StepOperation]:
        """Rotary positions of so many values, and what is written to the cache."""
        if not turned or self.setup.engine.turns_in_cache:
            yield from self._cache(tokens, max(turned // tokens, width))
            return
        yield from self._pass("rotary positions, cache", "rope", turned, turned)
        yield from self._cache(tokens, width)

    def _cache(self, tokens: int, width: int) -> Iterator[StepOperation]:
        """New keys and values, written to the cache."""
        for call in elementwise("copy", [TensorSpec((tokens, width), self._dtype)], (tokens, width), self._dtype):
            written = tokens * width * self.setup.kv_bytes(self.shape)
            yield StepOperation("rotary positions, cache", replace(call, bytes_written=written))

    def _norm(self, name: str, rows: int, kind: TransformerShape) -> Iterator[StepOperation]:
        """A norm of the residual stream, which adds what the part before it made."""
        for call in norm("rms_norm" if kind.rms else "layer_norm", rows, kind.hidden, self._dtype, kind.hidden,
                         bias=not kind.rms, flags=("add",)):
            yield StepOperation(name, call)

    def _norms(self, name: str, rows: int, columns: int) -> Iterator[StepOperation]:
        for call in norm("rms_norm", rows, columns, self._dtype, columns, bias=False):
            yield StepOperation(name, call)

    def _pass(self, name: str, kind: str, written: int, read: int, dtype: str = "") -> Iterator[StepOperation]:
        """One pass over memory."""
        of = dtype or self._dtype
        yield StepOperation(name, OpCall(
            Family.ELEMENTWISE, kind, (written, 1, read), of, flops=float(written),
            bytes_read=float(read * itemsize(of)), bytes_written=float(written * itemsize(of))))


AFTER_ATTENTION = ("attention's output", "state-space projections")
"""Operations that end the first half of a layer."""


def layer_in_order(of_tokens: Sequence[StepOperation], attention: Sequence[StepOperation],
                   exchanges: Sequence[StepExchange]) -> list[StepOperation | StepExchange]:
    """Return a layer as it runs: attention before the product of its output, the first all-reduce after that, the other
    exchanges around experts or at the end."""
    ends = [row for row, each in enumerate(of_tokens) if each.name in AFTER_ATTENTION]
    first = next((row for row, each in enumerate(of_tokens) if each.name == AFTER_ATTENTION[0]), len(ends) and ends[0])
    half = ends[-1] + 1 if ends else 0
    reduced = [each for each in exchanges if each.name == "all-reduce"]
    others = [each for each in exchanges if each.name != "all-reduce"]
    return [*of_tokens[:first], *attention, *of_tokens[first:half], *reduced[:1], *others[:1], *of_tokens[half:],
            *reduced[1:], *others[1:]]


TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
          8192, 12_288, 16_384, 32_768)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
CONTEXTS = (1, 128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 1 << 20)
PIECES = (1, 64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
PASTS = (0, 1024, 2048, 4096, 8192, 16_384, 32_768, 131_072, 1 << 20)
"""Points of the grids: tokens of a step, sequences, their contexts, tokens of a prompt's piece and those before it."""
COLUMNS = 6
PRODUCT, OTHER, WITHIN, BETWEEN, LAUNCHES, CALLS = range(COLUMNS)
"""Columns of parts: µs of products with attention, of other kernels, of collectives within a node and of those that
leave it, kernels launched, collectives."""
GRAPH_LAUNCH_US = 15.0
"""Host time of launching a CUDA graph of a whole step; an assumption (a launch of the trace vllm-cuda-graph takes the
host 6 to 60 µs)."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Pieces of equal prompts that a step reads: how many, their tokens, and those of each that the cache has."""

    prompts: int
    new: int
    past: int = 0


@dataclass(frozen=True, slots=True)
class ServedStep:
    """What a step of all of a replica's GPUs works on.

    Attributes:
        sequences: that decode.
        context: tokens of the cache of each, its new ones among them, in the mean.
        pieces: of prompts.
        finished: prompts that end in this step, whose first token it makes.
    """

    sequences: float
    context: float = 0.0
    pieces: tuple[PrefillChunk, ...] = ()
    finished: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time, µs; its parts add up to it.

    Attributes:
        us, low, high: of the step and its 80% interval.
        products, others, collectives: of the device.
        host: what the host takes longer.
        engine: scheduling and all else around the step.
    """

    us: float
    low: float
    high: float
    products: float
    others: float
    collectives: float
    host: float
    engine: float


@dataclass(frozen=True, slots=True)
class ServedOperation:
    """All of a step's operations of one name.

    Attributes:
        name: of them.
        count: how many.
        us: of all of them on one GPU.
        bound: what most of their time is: compute, memory, launch, or network.
        flops, moved_bytes: of all.
        sources: µs by source.
    """

    name: str
    count: float
    us: float
    bound: str
    flops: float
    moved_bytes: float
    sources: dict[str, float]


SomeModel = TypeVar("SomeModel", bound="ServingModel")


class ServingModel:
    """Prices steps of one replica.

    Args:
        shape: of the decoder.
        setup: how it is served.
        device: of each GPU.
        collectives: of its cluster.
        models: fitted models of the device.
        rates: factors on all of it; by default those of the engine (``rates_of``).
    """

    def __init__(self, shape: TransformerShape, setup: ServingSetup, device: DeviceSpec, collectives: CollectiveModel,
                 models: Models | None = None, rates: CorrectionFactors | None = None) -> None:
        setup.check(shape)
        self.shape, self.setup, self.device, self.collectives = shape, setup, device, collectives
        self.rates = rates or rates_of(setup)
        self.models = models
        self._factors: Mapping[str, float] = {}
        self._make = StepOperations(shape, setup, device, collectives.topology)
        layers: dict[TransformerShape, int] = {}
        for run in shape.runs:
            layers[run.one_layer()] = layers.get(run.one_layer(), 0) + run.layers
        self._layers = layers
        self._grids: list[tuple[Float64, Float64, Float64, Float64]] = []

    def _other(self: SomeModel, **changed: object) -> SomeModel:
        other = type(self).__new__(type(self))
        other.__dict__.update({name: value for name, value in self.__dict__.items() if name != "surface"} | changed)
        return other

    def with_rates(self: SomeModel, rates: CorrectionFactors) -> SomeModel:
        """Return the same with other rates; what is priced is shared."""
        return self._other(rates=rates)

    def with_factors(self: SomeModel, factors: Mapping[str, float]) -> SomeModel:
        """Return the same whose operations of these names take so many times as long, beside the rates: what a trace
        says of them."""
        return self._other(_factors=dict(factors), _grids=[])

    def with_chunk(self: SomeModel, chunk: int) -> SomeModel:
        """Return the same with other steps; what is priced is shared."""
        return self._other(setup=replace(self.setup, chunk=chunk))

    waits = True
    """Whether the engine waits for a step before it prepares the next."""
    hides = False
    """Whether collectives run beside all else."""
    graph_us = GRAPH_LAUNCH_US
    """Host time of launching a step's CUDA graph."""

    def time(self, step: ServedStep) -> StepTime:
        """Return the time of a step."""
        rates, parts = self.rates, self.parts(step)
        products, others = float(parts[PRODUCT] * rates.products), float(parts[OTHER] * rates.others)
        waits = float(parts[WITHIN] * rates.collectives + parts[BETWEEN] * rates.network)
        device = float(parts[PRODUCT] * rates.products + parts[OTHER] * rates.others
                       + parts[WITHIN] * rates.collectives + parts[BETWEEN] * rates.network)
        host = self.graph_us * self.setup.pp if self.captured(step) else float(
            parts[LAUNCHES] * rates.host_us + parts[CALLS] * rates.host_collective_us)
        engine = self.engine_us(step)
        work = _together(device, host, rates.meet)
        total = work + engine
        if not self.waits:
            total = _together(device, host + engine, rates.meet)
            engine = total - work
        spread = Z80 * rates.spreads.of(products / total, others / total, waits / total,
                                        (work - device + engine) / total)
        return StepTime(total, total * float(np.exp(-spread)), total * float(np.exp(spread)), products, others, waits,
                        work - device, engine)

    @cached_property
    def surface(self) -> StepSurface:
        """Return the same times as plain numbers, for the many steps of a simulated server."""
        rates = self.rates
        device = np.array([rates.products, rates.others, rates.collectives, rates.network, 0.0, 0.0])
        host = np.array([0.0, 0.0, 0.0, 0.0, rates.host_us, rates.host_collective_us])
        tokens, rows, decoding, pieces = (((grid @ device).tolist(), (grid @ host).tolist()) for grid in self.grids)
        return StepSurface(tokens, rows, decoding, pieces, self)

    def parts(self, step: ServedStep) -> Float64:
        """Return a step's parts on one GPU of every stage together [6], without rates.

        A pipeline's stages work on as many parts of the batch at once; a token passes all of them.
        """
        setup = self.setup
        share = 1.0 / (setup.attention_dp * setup.pp)
        sequences = step.sequences * share
        prompts = [(piece.prompts * share, piece.new, piece.past) for piece in step.pieces]
        tokens = sequences * setup.drafted + sum(count * new for count, new, _ in prompts)
        rows = sequences * setup.drafted + step.finished * share
        by_tokens, by_rows, by_caches, by_pieces = self.grids
        found = _between(by_tokens, TOKENS, tokens) + _between(by_rows, SEQUENCES, rows)
        if sequences > 0:
            decoding = _in_square(by_caches, SEQUENCES, CONTEXTS, sequences, step.context)
            found = found + decoding
            if setup.speculation is not None:
                # Each token of a draft takes about one block and the logits once more (EAGLE, multi-token prediction).
                block = (_between(by_tokens, TOKENS, sequences) + decoding) / self.shape.layers
                found = found + setup.speculation.tokens * (block + _between(by_rows, SEQUENCES, sequences))
        for count, new, past in prompts:
            found = found + count * _in_square(by_pieces, PIECES, PASTS, new, past)
        return found

    def operations(self, step: ServedStep) -> list[ServedOperation]:
        """Return a step's operations by name, the longest first, each priced for this very step."""
        counted = Counter(self.in_order(step))
        found = [(each, float(count)) for each, count in counted.items() if isinstance(each, StepOperation)]
        exchanges = [(each, float(count)) for each, count in counted.items() if isinstance(each, StepExchange)]
        return sorted((*self._named(found), *self._exchanged(exchanges)), key=lambda each: -each.us)

    def in_order(self, step: ServedStep) -> list[StepOperation | StepExchange]:
        """Return everything that one GPU of each stage does in a step, drafts apart, as it runs: layer by layer."""
        setup, make = self.setup, self._make
        share = 1.0 / (setup.attention_dp * setup.pp)
        sequences = max(round(step.sequences * share), 1) if step.sequences else 0
        prompts = [(max(round(piece.prompts * share), 1), piece.new, piece.past) for piece in step.pieces]
        tokens = sequences * setup.drafted + sum(count * new for count, new, _ in prompts)
        rows = max(sequences * setup.drafted + round(step.finished * share), 1)
        layers: dict[TransformerShape, list[StepOperation | StepExchange]] = {}
        for kind in self._layers:
            attention = [*make.of_decoding(kind, sequences, max(round(step.context), 1))] if sequences else []
            for number, new, past in prompts:
                attention += make.of_prompts(kind, number, new, past)
            layers[kind] = layer_in_order([*make.of_tokens(kind, tokens)], attention, [*make.exchanges(kind, tokens)])
        ends = [*make.end_exchanges(tokens, rows)]
        found: list[StepOperation | StepExchange] = [*make.embedded(tokens), *ends[:1]]
        for run in self.shape.runs:
            found += run.layers * layers[run.one_layer()]
        return [*found, *make.of_rows(rows), *ends[1:]]

    def prices_of(self, found: Sequence[StepOperation | StepExchange]) -> tuple[Float64, Float64, Float64]:
        """Return what each takes with the rates, and the ends of its 80% interval, µs."""
        times = np.zeros((3, len(found)))
        calls = [row for row, each in enumerate(found) if isinstance(each, StepOperation)]
        if calls:
            priced = self._prices([each.call for each in found if isinstance(each, StepOperation)])
            rate = np.array([self.rates.products if call.family in PRODUCTS else self.rates.others
                             for call in priced.calls])
            known = np.array([self._factor(found[row].name) for row in calls])
            for row, us in enumerate((priced.time_us, priced.low_us, priced.high_us)):
                times[row, calls] = (us * rate)[priced.index] * known
        rest = [row for row, each in enumerate(found) if isinstance(each, StepExchange)]
        if rest:
            exchanges = [each.call for each in found if isinstance(each, StepExchange)]
            there = self._exchange_times(exchanges)
            rate = np.array([self.rates.network if call.placement.nodes > 1 else self.rates.collectives
                             for call in exchanges]) * np.array([self._factor(found[row].name) for row in rest])
            for row, us in enumerate((there.time_us, there.low_us, there.high_us)):
                times[row, rest] = us * rate
        return times[0], times[1], times[2]

    def captured(self, step: ServedStep) -> bool:
        """Return whether a step runs as a CUDA graph."""
        return self.setup.graphs and not step.pieces and step.sequences <= self.setup.engine.graph_batch

    def engine_us(self, step: ServedStep) -> float:
        """Return the time of the engine's host around a step, µs."""
        engine = self.setup.engine
        if not self.rates.step_us:
            return 0.0
        each = engine.sequence_us * self.rates.step_us / engine.step_us if engine.step_us else 0.0
        return self.rates.step_us + each * (step.sequences + step.finished)

    @property
    def grids(self) -> tuple[Float64, Float64, Float64, Float64]:
        """Return the parts by tokens, by rows of logits, by sequences and contexts, and by pieces of prompts and what
        came before them."""
        if not self._grids:
            self._grids.append(self._price_grids())
        return self._grids[0]

    def _price_grids(self) -> tuple[Float64, Float64, Float64, Float64]:
        make, layers = self._make, self._layers.items()
        tokens = self._priced([[(each, count) for kind, count in layers for each in make.of_tokens(kind, number)]
                               + [(each, 1) for each in make.embedded(number)] for number in TOKENS],
                              [[(each, count) for kind, count in layers for each in make.exchanges(kind, number)]
                               for number in TOKENS])
        rows = self._priced([[(each, 1) for each in make.of_rows(number)] for number in SEQUENCES],
                            [[(each, 1) for each in make.end_exchanges(number, number)] for number in SEQUENCES])
        decoding = self._priced([[(each, count) for kind, count in layers
                                  for each in make.of_decoding(kind, sequences, context)]
                                 for sequences in SEQUENCES for context in CONTEXTS])
        pieces = self._priced([[(each, count) for kind, count in layers
                                for each in make.of_prompts(kind, 1, new, past)] for new in PIECES for past in PASTS])
        return (np.maximum.accumulate(tokens, axis=0), rows, decoding.reshape(len(SEQUENCES), len(CONTEXTS), COLUMNS),
                pieces.reshape(len(PIECES), len(PASTS), COLUMNS))

    def _priced(self, points: Sequence[Sequence[tuple[StepOperation, int]]],
                exchanges: Sequence[Sequence[tuple[StepExchange, int]]] = ()) -> Float64:
        """Return the parts of every point [n, 6], all priced together."""
        calls = [each.call for point in points for each, _ in point]
        found: Float64 = np.zeros((len(points), COLUMNS))
        place = np.repeat(np.arange(len(points)), [len(point) for point in points])
        counts = np.array([count for point in points for _, count in point], np.float64)
        if calls:
            priced = self._prices(calls)
            product = np.array([call.family in PRODUCTS for call in priced.calls])[priced.index]
            known = np.array([self._factor(each.name) for point in points for each, _ in point])
            us = priced.times_us * counts * known
            for column, rows in ((PRODUCT, product), (OTHER, ~product)):
                np.add.at(found[:, column], place[rows], us[rows])
            np.add.at(found[:, LAUNCHES], place, counts)
        for row, point in enumerate(exchanges):
            times = self._exchange_times([each.call for each, _ in point])
            for (each, count), us in zip(point, times.time_us.tolist(), strict=True):
                column = BETWEEN if each.call.placement.nodes > 1 else WITHIN
                found[row, column] += count * us * self._factor(each.name)
                found[row, CALLS] += count
            if self.hides:
                # What is longer than the work beside it is still waited for.
                left = max(found[row, WITHIN] + found[row, BETWEEN] - found[row, PRODUCT] - found[row, OTHER], 0.0)
                found[row, WITHIN], found[row, BETWEEN] = left, 0.0
        return found

    def _factor(self, name: str) -> float:
        return self._factors.get(name, 1.0)

    def _prices(self, calls: Sequence[OpCall]) -> PricedCalls:
        return sustained(price(calls, self.device, self.models), self.device)

    def _exchange_times(self, calls: Sequence[CollectiveCall]) -> CommTimes:
        times = price_calls(calls, self.collectives)
        if self.collectives.profile is not None or not calls:
            return times
        return with_engine_kernels(times, CollectiveBatch.from_calls(calls), self.collectives.topology,
                                   self.setup.engine.all_reduce_us)

    def _named(self, found: Sequence[tuple[StepOperation, float]]) -> Iterable[ServedOperation]:
        priced = self._prices([each.call for each, _ in found])
        bounds = _bounds(priced.calls, self.device)
        rows: dict[str, list[tuple[int, float]]] = {}
        for number, (each, count) in enumerate(found):
            rows.setdefault(each.name, []).append((int(priced.index[number]), count))
        for name, mine in rows.items():
            by_bound: dict[str, float] = {}
            sources: dict[str, float] = {}
            for row, count in mine:
                us = float(priced.time_us[row]) * count * self._factor(name)
                by_bound[bounds[row]] = by_bound.get(bounds[row], 0.0) + us
                source = Source.ANCHORED if name in self._factors else Source(int(priced.source[row]))
                label = source.label
                sources[label] = sources.get(label, 0.0) + us
            rate = self.rates.products if all(priced.calls[row].family in PRODUCTS for row, _ in mine) else (
                self.rates.others)
            yield ServedOperation(
                name, sum(count for _, count in mine), rate * sum(by_bound.values()),
                max(by_bound, key=lambda word: by_bound[word]),
                sum(priced.calls[row].flops * count for row, count in mine),
                sum(priced.calls[row].bytes_moved * count for row, count in mine), sources)

    def _exchanged(self, found: Sequence[tuple[StepExchange, float]]) -> Iterable[ServedOperation]:
        times = self._exchange_times([each.call for each, _ in found])
        rows: dict[str, list[int]] = {}
        for number, (each, _) in enumerate(found):
            rows.setdefault(each.name, []).append(number)
        for name, mine in rows.items():
            us = sum(found[row][1] * float(times.time_us[row]) for row in mine) * self.rates.collectives
            us *= self._factor(name)
            yield ServedOperation(name, sum(found[row][1] for row in mine), us, "network", 0.0,
                                sum(found[row][1] * found[row][0].call.payload_bytes for row in mine),
                                {Source.ANCHORED.label if name in self._factors else "collectives": us})


class StepSurface:
    """Times of steps, µs, from grids with the rates already in them.

    Args:
        tokens, rows: (device µs, host µs) by ``TOKENS`` and ``SEQUENCES``.
        decoding, pieces: the same by ``SEQUENCES`` and ``CONTEXTS``, and by ``PIECES`` and ``PASTS``.
        of: the model that they are of.
    """

    def __init__(self, tokens: Lines, rows: Lines, decoding: Squares, pieces: Squares, of: ServingModel) -> None:
        self._tokens, self._rows, self._decoding, self._pieces = tokens, rows, decoding, pieces
        setup, rates = of.setup, of.rates
        self._share = 1.0 / (setup.attention_dp * setup.pp)
        self._drafted = float(setup.drafted)
        self._draft = 0 if setup.speculation is None else setup.speculation.tokens
        self._block = 1.0 / of.shape.layers
        self._meet = rates.meet
        self._captured = setup.engine.graph_batch if setup.graphs else 0
        self._graph_us = of.graph_us * setup.pp
        self._waits = of.waits
        self._step_us = rates.step_us
        self._each_us = setup.engine.sequence_us * rates.step_us / setup.engine.step_us if setup.engine.step_us else 0.0

    def us(self, sequences: float, context: float, pieces: Sequence[PrefillChunk] = (), finished: float = 0.0) -> float:
        """Return the time of a step, as ``ServingModel.time`` has it."""
        share = self._share
        own = sequences * share
        tokens = own * self._drafted
        for piece in pieces:
            tokens += piece.prompts * share * piece.new
        device, host = _on_line(self._tokens, TOKENS, tokens)
        more, calls = _on_line(self._rows, SEQUENCES, own * self._drafted + finished * share)
        device, host = device + more, host + calls
        if own > 0:
            read, calls = _on_square(self._decoding, SEQUENCES, CONTEXTS, own, context)
            device, host = device + read, host + calls
            if self._draft:
                one, one_host = _on_line(self._tokens, TOKENS, own)
                end, end_host = _on_line(self._rows, SEQUENCES, own)
                device += self._draft * ((one + read) * self._block + end)
                host += self._draft * ((one_host + calls) * self._block + end_host)
        for piece in pieces:
            more, calls = _on_square(self._pieces, PIECES, PASTS, piece.new, piece.past)
            device, host = device + piece.prompts * share * more, host + piece.prompts * share * calls
        if not pieces and sequences <= self._captured:
            host = self._graph_us
        engine = self._step_us + self._each_us * (sequences + finished)
        if not self._waits:
            return _together(device, host + engine, self._meet)
        return _together(device, host, self._meet) + engine


Lines = tuple[list[float], list[float]]
Squares = tuple[list[list[float]], list[list[float]]]


def _place(points: Sequence[int], value: float) -> tuple[int, float]:
    """Return the point below a value and how far it is on the way to the next; beyond the last the line goes on."""
    row = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return row, max(value - points[row], 0.0) / (points[row + 1] - points[row])


def _on_line(grid: Lines, points: Sequence[int], value: float) -> tuple[float, float]:
    if value <= 0:
        return 0.0, 0.0
    row, way = _place(points, value)
    return grid[0][row] * (1 - way) + grid[0][row + 1] * way, grid[1][row]


def _on_square(grid: Squares, rows: Sequence[int], columns: Sequence[int], down: float, right: float
               ) -> tuple[float, float]:
    (i, y), (j, x) = _place(rows, down), _place(columns, right)
    above, below = grid[0][i], grid[0][i + 1]
    return ((above[j] * (1 - x) + above[j + 1] * x) * (1 - y) + (below[j] * (1 - x) + below[j + 1] * x) * y,
            grid[1][i][j])


def rates_of(setup: ServingSetup) -> CorrectionFactors:
    """Return the usual rates with what an engine's host takes."""
    engine = setup.engine
    return CorrectionFactors(host_us=engine.launch_us, host_collective_us=engine.launch_us, step_us=engine.step_us)


def _together(device: float, host: float, meet: float) -> float:
    longest = max(device, host)
    if longest <= 0:
        return 0.0
    return float(longest * (1 + (min(device, host) / longest) ** meet) ** (1 / meet))


def _bounds(calls: Sequence[OpCall], device: DeviceSpec) -> list[str]:
    """What most of each call's time is by the roofline of its family."""
    models = heuristic_models(device)
    found = []
    for call in calls:
        parts, _ = models[call.family].parts([call])
        by = {"compute": float(parts.compute_us[0]), "memory": float(parts.memory_us[0]),
              "launch": float(parts.fixed_us[0])}
        found.append(max(by, key=lambda word: by[word]))
    return found


def _between(grid: Float64, points: Sequence[int], value: float) -> Float64:
    if value <= 0:
        return np.zeros(COLUMNS)
    row, way = _place(points, value)
    found: Float64 = grid[row] * (1 - way) + grid[row + 1] * way
    found[LAUNCHES:] = grid[row, LAUNCHES:]
    return found


def _in_square(grid: Float64, rows: Sequence[int], columns: Sequence[int], row_value: float, column_value: float
               ) -> Float64:
    (i, down), (j, right) = _place(rows, row_value), _place(columns, column_value)
    above = grid[i, j] * (1 - right) + grid[i, j + 1] * right
    below = grid[i + 1, j] * (1 - right) + grid[i + 1, j + 1] * right
    found: Float64 = above * (1 - down) + below * down
    found[LAUNCHES:] = grid[i, j, LAUNCHES:]
    return found
