"""Operations of a served decoder's step: what one GPU computes and communicates, as calls that models price.

A step reads new tokens: one (or a draft) of each sequence that decodes, and pieces of prompts. Only attention and
the logits depend on which sequences the tokens belong to. All other work depends on the number of tokens alone:

    ``of_tokens``      norms, products, rotary positions, cache, experts; collectives.
    ``of_decoding``    attention of one query to a cache, recurrences' states.
    ``of_prompts``     attention of a prompt's piece to itself and to what the cache has of it.
    ``of_rows``        the last norm, logits, sampling: a row for each sequence that gets a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kernel_models.collectives import CollectiveCall, CollectiveKind, Topology
from kernel_models.device import DeviceSpec
from kernel_models.families.attention import attention
from kernel_models.families.elementwise import elementwise
from kernel_models.families.embedding import embedding
from kernel_models.families.gemm import gemm
from kernel_models.families.inference import touched
from kernel_models.families.reduction import norm, softmax
from kernel_models.op_call import Family, OpCall, TensorSpec, itemsize
from planner.serving.kept_modules import ATTENTION, EXPERTS, FEED_FORWARD
from planner.serving.setup import ServingSetup, WeightType, weight_type
from tracer.shape_only.transformer import TransformerShape

PREFILL_KERNELS = {"hopper": "flash3", "blackwell": "cudnn"}
"""Attention kernels for prompts by GPU architecture; FlashAttention-2 for others."""
COMM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class StepOperation:
    """A call of device work, with the name that reports give it."""

    name: str
    call: OpCall


@dataclass(frozen=True, slots=True)
class StepExchange:
    """A collective, with the name that reports give it."""

    name: str
    call: CollectiveCall


class StepOperations:
    """Makes the operations of one GPU in a step.

    Args:
        shape: the decoder.
        setup: how it is served.
        device: the device of each GPU.
        on: topology that places the GPUs.
    """

    def __init__(self, shape: TransformerShape, setup: ServingSetup, device: DeviceSpec, on: Topology) -> None:
        self.shape, self.setup, self.device, self.on = shape, setup, device, on
        self.linear = weight_type(setup.precision, device)
        self.of_experts = weight_type(setup.of_experts, device)
        self.whole = weight_type(shape.dtype, device)
        self._dtype = shape.dtype

    def of_tokens(self, kind: TransformerShape, tokens: int) -> Iterator[StepOperation]:
        """Yield a block's operations on ``tokens`` tokens of each attention group."""
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
        """Yield a block's communication for ``tokens`` tokens of each attention group."""
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
        """Yield a block's work of decoding sequences on their caches of ``context`` tokens each."""
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
        """Yield a block's attention for pieces of prompts: ``new`` tokens each, over themselves and ``past`` tokens."""
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
            # Chunk by chunk (Dao and Gu, 2024, section 6): sums of decays, states of chunks, their passing on, results.
            tokens = prompts * new
            states = prompts * -(-new // own.chunk) * own.inner * own.state
            yield from self._pass("state-space recurrence", "cumsum", tokens * own.heads, tokens * own.heads, "fp32")
            yield from self._pass("state-space recurrence", "states", states, tokens * own.mixed, "fp32")
            yield from self._pass("state-space recurrence", "passing", states, states, "fp32")
            for call in gemm(own.heads, prompts * new, own.head_size + own.state, own.chunk, self._dtype, "nt",
                             kind="bmm"):
                yield StepOperation("state-space recurrence", call)

    def embedded(self, tokens: int) -> Iterator[StepOperation]:
        """Yield the embedding of ``tokens`` tokens."""
        rows = -(-self.shape.vocab // self.setup.tp)
        for call in embedding("embedding", tokens, tokens, rows, self.shape.hidden, 1, self._dtype, "int64"):
            yield StepOperation("embedding", call)

    def of_rows(self, rows: int) -> Iterator[StepOperation]:
        """Yield the last norm, the logits and the sampling of ``rows`` sequences."""
        shape = self.shape
        yield from self._norm("norms", rows, shape.kinds[0])
        for call in gemm(1, rows, -(-shape.vocab // self.setup.tp), shape.hidden, self._dtype, "nt"):
            yield StepOperation("logits", call)
        for call in softmax("softmax", TensorSpec((rows, shape.vocab), "fp32"), -1):
            yield StepOperation("sampling", call)
        for call in elementwise("argmax", [TensorSpec((rows, shape.vocab), "fp32")], (rows,), "int64"):
            yield StepOperation("sampling", call)

    def end_exchanges(self, tokens: int, rows: int) -> Iterator[StepExchange]:
        """Yield communication outside blocks: of embedded tokens, of logits, and between stages."""
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
        """Yield the projections around attention with key and value heads (grouped queries)."""
        setup, size = self.setup, kind.width_of_head
        heads, kv = kind.heads // setup.tp, setup.kv_heads(kind)
        yield from self._linear(kind, "queries, keys, values", tokens, (heads + 2 * kv) * size, kind.hidden,
                                bias=kind.biased_qkv, by_norm=True)
        if kind.qk_norm:
            yield from self._norms("norms", tokens * (heads + kv), size)
        turned = tokens * (heads + kv) * size
        yield from self._turned(turned if kind.rotary else 0, tokens, 2 * kv * size)
        yield from self._linear(kind, "attention's output", tokens, kind.hidden, heads * size, bias=kind.bias)

    def _latent(self, kind: TransformerShape, tokens: int) -> Iterator[StepOperation]:
        """Yield the projections of latent attention. Keys and values are not expanded from the cache: their matrices
        are applied to queries and outputs, as all engines do when decoding (DeepSeek-V2, 2024, section 2.1.2)."""
        of = kind.latent
        assert of is not None
        heads, name = kind.heads // self.setup.tp, "queries, keys, values"
        made = of.key_rank + of.rotated
        if of.query_rank:
            yield from self._linear(kind, name, tokens, of.query_rank + made, kind.hidden, by_norm=True)
            yield from self._norms("norms", tokens, of.query_rank)
            yield from self._linear(kind, name, tokens, heads * kind.width_of_head, of.query_rank, by_norm=True)
        else:
            yield from self._linear(kind, name, tokens, heads * kind.width_of_head + made, kind.hidden, by_norm=True)
        yield from self._norms("norms", tokens, of.key_rank)
        turned = tokens * (heads + 1) * of.rotated
        yield from self._turned(turned, tokens, made)
        for depth, width in ((of.plain, of.key_rank), (of.key_rank, of.values)):
            for call in gemm(heads, tokens, width, depth, self._dtype, "nn", kind="bmm"):
                yield StepOperation(name, call)
        yield from self._linear(kind, "attention's output", tokens, kind.hidden, heads * of.values)

    def _mixer(self, kind: TransformerShape, tokens: int) -> Iterator[StepOperation]:
        """Yield a state-space mixer's operations without its recurrence."""
        assert kind.state is not None
        own = kind.state.share(self.setup.tp)
        yield from self._linear(kind, "state-space projections", tokens, own.projected, kind.hidden, by_norm=True)
        yield from self._pass("state-space recurrence", "conv", tokens * own.mixed, tokens * own.mixed)
        yield from self._norms("norms", tokens, own.inner)
        yield from self._linear(kind, "state-space projections", tokens, kind.hidden, own.inner)

    def _feed_forward(self, of: str, tokens: int, kind: TransformerShape, width: int) -> Iterator[StepOperation]:
        """Yield a dense feed-forward part, or the experts shared by all tokens."""
        name = of or "feed-forward part"
        yield from self._linear(kind, name, tokens, width * (2 if kind.gated else 1), kind.hidden, bias=kind.bias,
                                by_norm=True)
        yield from self._activation(tokens, width, kind)
        yield from self._linear(kind, name, tokens, kind.hidden, width, bias=kind.bias)

    def _activation(self, rows: int, width: int, kind: TransformerShape) -> Iterator[StepOperation]:
        read = rows * width * (2 if kind.gated else 1)
        yield from self._pass("activation", "silu_and_mul" if kind.gated else "gelu", rows * width, read)

    def _experts(self, kind: TransformerShape, tokens: int) -> Iterator[StepOperation]:
        """Yield routing and experts on the GPU with most tokens."""
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
        weights = self.whole if EXPERTS in kind.kept else self.of_experts
        yield from self._product("experts", busy, each, gated * width, kind.hidden, weights)
        yield from self._activation(max(round(rows), 1), width, kind)
        yield from self._product("experts", busy, each, kind.hidden, width, weights)
        yield from self._pass("routing", "sum", tokens * kind.hidden, max(round(rows), 1) * kind.hidden)
        if kind.shared_ffn:
            # The GPUs of a dense part share them; each attention group has its own tokens.
            yield from self._feed_forward("shared experts", tokens // setup.attention_dp or 1, kind,
                                          max(kind.shared_ffn // setup.tp, 1))

    def _linear(self, kind: TransformerShape, name: str, m: int, n: int, k: int, *, bias: bool = False,
                by_norm: bool = False) -> Iterator[StepOperation]:
        """Yield a linear layer, and the cast of its input unless a norm before it writes the narrow type."""
        part = FEED_FORWARD if name in ("feed-forward part", "shared experts") else ATTENTION
        weights = self.whole if part in kind.kept else self.linear
        if weights.dtype and (not by_norm or weights.precision == "fp8_block"):
            yield StepOperation("casts", OpCall(
                Family.ELEMENTWISE, "cast", (m * k, 1, m * k), self._dtype, flags=(f"to_{weights.dtype}",),
                flops=float(m * k), bytes_read=float(m * k * itemsize(self._dtype)),
                bytes_written=m * k * weights.bytes))
        yield from self._product(name, 1, m, n, k, weights, added="bias" if bias else "")

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
        """Yield rotary positions of ``turned`` values, and the write to the cache."""
        if not turned or self.setup.engine.turns_in_cache:
            yield from self._cache(tokens, max(turned // tokens, width))
            return
        yield from self._pass("rotary positions, cache", "rope", turned, turned)
        yield from self._cache(tokens, width)

    def _cache(self, tokens: int, width: int) -> Iterator[StepOperation]:
        """Yield the write of new keys and values to the cache."""
        for call in elementwise("copy", [TensorSpec((tokens, width), self._dtype)], (tokens, width), self._dtype):
            written = tokens * width * self.setup.kv_bytes(self.shape)
            yield StepOperation("rotary positions, cache", replace(call, bytes_written=written))

    def _norm(self, name: str, rows: int, kind: TransformerShape) -> Iterator[StepOperation]:
        """Yield a norm of the residual stream that also adds the output of the part before it."""
        for call in norm("rms_norm" if kind.rms else "layer_norm", rows, kind.hidden, self._dtype, kind.hidden,
                         bias=not kind.rms, flags=("add",)):
            yield StepOperation(name, call)

    def _norms(self, name: str, rows: int, columns: int) -> Iterator[StepOperation]:
        for call in norm("rms_norm", rows, columns, self._dtype, columns, bias=False):
            yield StepOperation(name, call)

    def _pass(self, name: str, kind: str, written: int, read: int, dtype: str = "") -> Iterator[StepOperation]:
        """Yield one pass over memory: ``read`` elements in, ``written`` elements out."""
        of = dtype or self._dtype
        yield StepOperation(name, OpCall(
            Family.ELEMENTWISE, kind, (written, 1, read), of, flops=float(written),
            bytes_read=float(read * itemsize(of)), bytes_written=float(written * itemsize(of))))


AFTER_ATTENTION = ("attention's output", "state-space projections")
"""Operations that end the first half of a layer, with attention or a mixer."""


def layer_in_order(of_tokens: Sequence[StepOperation], attention: Sequence[StepOperation],
                   exchanges: Sequence[StepExchange]) -> list[StepOperation | StepExchange]:
    """Return a layer's work in order: attention before its output's product, then the first all-reduce, and the other
    exchanges around experts or at the end."""
    ends = [row for row, each in enumerate(of_tokens) if each.name in AFTER_ATTENTION]
    first = next((row for row, each in enumerate(of_tokens) if each.name == AFTER_ATTENTION[0]), len(ends) and ends[0])
    half = ends[-1] + 1 if ends else 0
    reduced = [each for each in exchanges if each.name == "all-reduce"]
    others = [each for each in exchanges if each.name != "all-reduce"]
    return [*of_tokens[:first], *attention, *of_tokens[first:half], *reduced[:1], *others[:1], *of_tokens[half:],
            *reduced[1:], *others[1:]]
