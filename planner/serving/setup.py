"""``ServingSetup``: how a decoder is served: the engine, the split of a replica over GPUs, and the types of weights.

Defaults come from the engines' documentation. Host times are assumptions with a spread, chosen on the looked-at half of
AIConfigurator's serving table (``benchmarks/serving.py`` judges on the other half). ``--step-us`` and ``--calibrate``
replace them. The spread of a load's figures is chosen so that about 80% of the looked-at half lie inside the interval;
the other half judges.

``Requests``: the load on a server. ``CacheAccount``: the memory left for caches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import numpy as np

from graph_predictor.request.memory_fit import CONTEXT
from kernel_models.collectives.datasheet import COMMUNICATOR_BYTES
from kernel_models.device import DeviceSpec
from planner.serving.kept_modules import ATTENTION, EXPERTS, FEED_FORWARD
from tracer.arrays import Float64, Int64
from tracer.errors import ForetraceError
from tracer.shape_only.transformer import TransformerShape


class ServingError(ForetraceError):
    """A served model, a split of it or a load is not possible; the message says why and what is possible."""


class Mixing(str, Enum):
    """How an engine combines prompts and decoding in its steps."""

    MIXED = "mixed"
    """A step decodes all sequences and fills its remaining tokens with pieces of prompts (chunked prefill)."""
    PREFILL_FIRST = "prefill first"
    """Waiting prompts are read in steps of their own, as many as fit; decoding sequences wait meanwhile."""


@dataclass(frozen=True, slots=True)
class AnswerReserve:
    """Cache that an engine keeps free for the rest of running answers when it admits a request.

    The admitted request's own answer must fit whole. Source: SGLang's ``new_token_ratio`` (``environ.py``,
    ``schedule_policy.py``). The share falls from step to step. After sequences were evicted, it is set to the share
    that the remaining answers have made.

    Attributes:
        first, least: share of the rest of each answer, at the beginning and at the end.
        steps: number of decoding steps in which the share falls from ``first`` to ``least``.
        longest: an answer counts with at most this number of tokens.
        ahead: number of steps that are added to what was made when the share is set.
    """

    first: float
    least: float
    steps: int
    longest: int
    ahead: int

    @property
    def fall(self) -> float:
        """Decrease of the share in a step."""
        return (self.first - self.least) / self.steps


@dataclass(frozen=True, slots=True)
class Engine:
    """A serving engine.

    Attributes:
        name: value of ``--engine``.
        mixing: how prompts and decoding share steps.
        chunk: most tokens of a step.
        splits: whether a prompt may be split over steps; else steps take whole prompts.
        sequences: most sequences that run at once.
        memory: share of the device's memory that the engine uses.
        step_us: host time of a step that the GPU waits for: scheduler, inputs, sampling's results, detokenisation, µs.
        sequence_us: further host time for each sequence of the step, µs.
        request_us: time that the server's front takes for each request, one after another: parsing, tokenisation,
            sending. Requests that arrive together thus reach the engine one by one, in different steps.
        reply_us: transport time of a request and of its first token to the client; it delays no other request.
        launch_us: host time of a kernel's launch outside CUDA graphs, µs.
        graph_batch: most sequences for which decoding is captured as a CUDA graph.
        piecewise: whether steps with prompts run as CUDA graphs too, up to ``graph_batch`` tokens: a graph for each
            layer, without attention.
        all_reduce_us: least time of the engine's own all-reduce kernel within a node, µs; infinite if NCCL does it.
        reserves: whether a sequence starts only if the cache has room for its full length. Else sequences are evicted
            when the cache is full, and read again later.
        of_rest: whether ``memory`` is a share of the memory left by the weights, all for caches.
        turns_in_cache: whether one kernel rotates queries and keys (rotary positions) and writes the cache.
        wait_tokens: tokens that prompts must have together before a decoding step takes any, so that fewer steps are
            slowed down; TensorRT-LLM's ``batch_wait_max_tokens_ratio``, times the tokens of a step.
        wait_steps: decoding steps after which waiting prompts are taken anyway (``batch_wait_timeout_iters``). 0, the
            default of all engines: prompts do not wait for each other.
        first_tokens: tokens in an answer's first message, which a client sees as its first token: TensorRT-LLM's
            ``stream_interval`` if it holds the first token back.
        begin_us: further host time of a step that reads prompts, µs: a session that makes buffers for each batch.
        reserve: cache kept free for running answers; ``None`` if the engine admits all that fits now.
    """

    name: str
    mixing: Mixing
    chunk: int
    splits: bool
    sequences: int
    memory: float
    step_us: float
    sequence_us: float
    request_us: float
    reply_us: float
    launch_us: float
    graph_batch: int
    all_reduce_us: float
    reserves: bool
    of_rest: bool = False
    turns_in_cache: bool = False
    wait_tokens: float = 0.0
    wait_steps: int = 0
    first_tokens: int = 1
    begin_us: float = 0.0
    piecewise: bool = False
    reserve: AnswerReserve | None = None


ENGINES: Mapping[str, Engine] = MappingProxyType({engine.name: engine for engine in (
    Engine("vllm", Mixing.MIXED, chunk=8192, splits=True, sequences=1024, memory=0.90, step_us=1500.0, sequence_us=8.0,
           request_us=2000.0, reply_us=5000.0, launch_us=50.0, graph_batch=512, all_reduce_us=4.4, reserves=False,
           piecewise=True),
    Engine("sglang", Mixing.PREFILL_FIRST, chunk=8192, splits=True, sequences=2048, memory=0.88, step_us=500.0,
           sequence_us=6.0, request_us=2000.0, reply_us=5000.0, launch_us=130.0, graph_batch=512, all_reduce_us=2.6,
           reserves=False, reserve=AnswerReserve(0.7, 0.098, 600, 4096, 20)),
    Engine("trtllm", Mixing.MIXED, chunk=8192, splits=True, sequences=2048, memory=0.90, step_us=400.0,
           sequence_us=8.0, request_us=2000.0, reply_us=5000.0, launch_us=65.0, graph_batch=512, all_reduce_us=2.6,
           reserves=True, of_rest=True, turns_in_cache=True),
    Engine("compiled", Mixing.PREFILL_FIRST, chunk=1 << 20, splits=False, sequences=1 << 20, memory=0.95, step_us=0.0,
           sequence_us=0.0, request_us=0.0, reply_us=0.0, launch_us=6.0, graph_batch=1 << 20, all_reduce_us=2.6,
           reserves=True, turns_in_cache=True),
    Engine("nemo", Mixing.PREFILL_FIRST, chunk=1 << 20, splits=False, sequences=1 << 20, memory=0.95, step_us=780.0,
           sequence_us=0.0, request_us=0.0, reply_us=0.0, launch_us=6.0, graph_batch=0, all_reduce_us=math.inf,
           reserves=True, turns_in_cache=True, begin_us=15_000.0),
)})
"""Engines by name; "compiled" is a compiled model in a loop without a server, such as gpt-fast.

"trtllm" is TensorRT-LLM today (1.0 and later). "nemo" is its first releases, as NeMo exported them in 2023
(``nemo/export/trt_llm``). A Python session launches kernels one by one without CUDA graphs, and NCCL does all-reduces.
Its host times were set with five of the published latencies (Llama-2-7B on A100, batch 1); the others judge them
(``benchmarks/serving.py --rows latency``).

Steps of at most 8,192 tokens are vLLM's ``max_num_batched_tokens`` for a server on GPUs of 70 GB and more, SGLang's
``chunked-prefill-size`` on such GPUs, and TensorRT-LLM's ``max_num_tokens``. Shares of memory are their
``gpu-memory-utilization``, ``mem-fraction-static`` and ``free_gpu_memory_fraction``. Piecewise graphs up to 512 tokens
are vLLM's default (``cudagraph_mode``, ``max_cudagraph_capture_size``); the other engines have them only on request.
Launch times were set with the looked-at half. Least times of all-reduce kernels are from ``custom_all_reduce_h200`` in
CUDA graphs on two GPUs (vLLM 0.24, SGLang 0.5.14, TensorRT-LLM 1.3).
"""
USUAL = "vllm"


OTHER_NAMES = {"nemo/tensorrt-llm": "nemo", "tensorrt-llm": "trtllm"}


def engine_of(name: str) -> Engine:
    """Return an engine by its name. Raises ``ServingError``."""
    known = name.strip().lower()
    try:
        return ENGINES[OTHER_NAMES.get(known, known)]
    except KeyError:
        raise ServingError(f"{name[:40]} is no engine that is known; give {', '.join(ENGINES)}.") from None


PRECISIONS = ("bf16", "fp16", "fp32", "fp8", "fp8_block", "nvfp4", "mxfp4", "int8", "int4")
"""Types of linear layers' weights; all but the first three may be multiplied in a wider type (``WeightType``)."""
WHOLE = PRECISIONS[:3]
"""Types that a whole model may have, including its activations."""
KV_TYPES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Bytes of a cached value, including its share of a scale."""
_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "fp8_block": 1.0 + 4 / 128**2, "nvfp4": 0.5 + 1 / 16,
          "mxfp4": 0.5 + 1 / 32, "int8": 1.0, "int4": 0.5 + 2 / 128}
"""Bytes of a weight with its share of a scale: blocks of 128 × 128 (DeepSeek-V3, 2024), 16, 32, and 128 in a row."""
_MATRIX = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "mxfp4": "fp4", "int8": "int8", "int4": ""}
_MOST = 1 << 20  # a choice, against typing errors


@dataclass(frozen=True, slots=True)
class WeightType:
    """How a device multiplies by weights of a type.

    Attributes:
        precision: one of ``PRECISIONS``.
        dtype: type that the matrix units multiply; "" for the activations' type: weights are widened when read.
        bytes: bytes of a weight.
    """

    precision: str
    dtype: str
    bytes: float

    @property
    def stored(self) -> str:
        """Return the element type's name in ``kernel_models``."""
        return {"nvfp4": "fp4", "mxfp4": "fp4", "fp8_block": "fp8"}.get(self.precision, self.precision)

    @property
    def widened(self) -> bool:
        """Return whether weights are stored in a narrower type than they are multiplied in."""
        return not self.dtype and self.bytes < 2.0


def weight_type(precision: str, device: DeviceSpec) -> WeightType:
    """Return how a device multiplies by weights of a type. Raises ``ServingError`` for an unknown type."""
    if precision not in PRECISIONS:
        raise ServingError(f"{precision[:40]} is no type of weights that is known; give {', '.join(PRECISIONS)}.")
    dtype = _MATRIX.get(precision, "")
    if dtype not in device.matrix_tflops:
        dtype = ""
    return WeightType(precision, dtype, _BYTES[precision])


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: a draft of several tokens, checked in one step.

    Attributes:
        tokens: number of tokens of a draft.
        accepted: mean tokens that a step yields, including its own token: from 1 to ``tokens`` + 1.
    """

    tokens: int
    accepted: float

    @staticmethod
    def parse(text: str) -> Speculation:
        """Parse "3:2.4": drafts of 3 tokens, 2.4 tokens a step. Raises ``ServingError``."""
        match = re.fullmatch(r"\s*(\d{1,3})\s*:\s*(\d{1,3}(?:\.\d{1,6})?)\s*", text)
        if match is None:
            raise ServingError(f"--speculate {text[:40]!r} says no draft; give its tokens and how many a step yields "
                               "in the mean, such as 3:2.4.")
        found = Speculation(int(match.group(1)), float(match.group(2)))
        if found.tokens < 1 or not 1.0 <= found.accepted <= found.tokens + 1:
            raise ServingError(f"--speculate {text.strip()} cannot be: a draft of {found.tokens} tokens yields from 1 "
                               f"to {found.tokens + 1} tokens a step.")
        return found


@dataclass(frozen=True, slots=True)
class ServingSetup:
    """One replica of a served decoder, on ``gpus`` GPUs.

    Attributes:
        tp: number of GPUs that share each layer's attention.
        pp: number of pipeline stages.
        attention_dp: number of groups of ``tp`` GPUs. Each has all of attention and sequences of its own; all of them
            share experts and feed-forward parts.
        ep: number of groups over which whole experts are spread; the GPUs of a group share each of its experts.
        precision: type of linear layers' weights, and of experts' unless ``experts`` is given.
        experts: type of experts' weights.
        kv: type of the cache; "" for the model's own type.
        engine: the serving engine.
        chunk: most tokens of a step; 0 for the engine's value.
        graphs: whether decoding runs as CUDA graphs.
        speculation: speculative decoding; ``None`` for none.
    """

    tp: int = 1
    pp: int = 1
    attention_dp: int = 1
    ep: int = 1
    precision: str = "bf16"
    experts: str = ""
    kv: str = ""
    engine: Engine = ENGINES[USUAL]
    chunk: int = 0
    graphs: bool = True
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "attention_dp", "ep"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
                raise ServingError(f"{name}={value!r} is not possible; give a whole number from 1.")
        if self.chunk < 0 or self.chunk > _MOST:
            raise ServingError(f"chunk={self.chunk} is no number of tokens of a step; give one from 1 to {_MOST:,}.")
        for precision in filter(None, (self.precision, self.experts)):
            if precision not in PRECISIONS:
                raise ServingError(f"{precision[:40]} is no type of weights that is known; give "
                                   f"{', '.join(PRECISIONS)}.")
        if self.kv and self.kv not in KV_TYPES:
            raise ServingError(f"{self.kv[:40]} is no type of a cache that is known; give {', '.join(KV_TYPES)}.")
        if self.layer_gpus % self.ep:
            raise ServingError(f"The {self.layer_gpus} GPUs that share a layer cannot be split evenly by ep={self.ep}; "
                               "choose a divisor.")

    @property
    def layer_gpus(self) -> int:
        """GPUs that share a layer's experts and feed-forward part."""
        return self.tp * self.attention_dp

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return self.layer_gpus * self.pp

    @property
    def expert_tp(self) -> int:
        """GPUs that share each expert."""
        return self.layer_gpus // self.ep

    @property
    def of_experts(self) -> str:
        """Type of experts' weights."""
        return self.experts or self.precision

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        return self.chunk or self.engine.chunk

    @property
    def piecewise_tokens(self) -> int:
        """Most tokens of a step with prompts that still runs as CUDA graphs, one a layer; 0 without such graphs."""
        return self.engine.graph_batch if self.graphs and self.engine.piecewise else 0

    @property
    def drafted(self) -> int:
        """Tokens that each decoding sequence has in a step."""
        return 1 if self.speculation is None else 1 + self.speculation.tokens

    @property
    def yielded(self) -> float:
        """Mean tokens that a decoding sequence gets from a step."""
        return 1.0 if self.speculation is None else self.speculation.accepted

    def kv_heads(self, kind: TransformerShape) -> int:
        """Return the key and value heads on a GPU; if there are more GPUs than heads, each GPU copies one head."""
        return max(kind.kv_heads // self.tp, 1)

    def kv_bytes(self, shape: TransformerShape) -> float:
        """Return the bytes of a cached value."""
        return KV_TYPES[self.kv] if self.kv else float(shape.element_bytes)

    def check(self, shape: TransformerShape) -> None:
        """Raise ``ServingError`` unless the model can be divided by this split."""
        for kind in shape.kinds:
            if kind.attends:
                self._check(kind.heads, "heads", "tp", self.tp)
                if max(kind.kv_heads, self.tp) % min(kind.kv_heads, self.tp) and kind.latent is None:
                    raise ServingError(f"{kind.kv_heads} heads of keys and values can be neither split nor copied "
                                       f"evenly by tp={self.tp}; choose a divisor or a multiple.")
            if kind.state is not None:
                self._check(kind.state.heads, "heads of a state-space mixer", "tp", self.tp)
            if kind.experts:
                self._check(kind.experts, "experts", "ep", self.ep)
                self._check(kind.ffn, "features of an expert", "the GPUs of an expert", self.expert_tp)
            elif kind.ffn:
                self._check(kind.ffn, "features of the feed-forward part", "tp", self.dense_tp)
        if self.pp > shape.layers:
            raise ServingError(f"pp={self.pp} stages are more than the model's {shape.layers} layers; give fewer.")
        routed = any(kind.experts for kind in shape.kinds)
        if self.experts and not routed:
            raise ServingError(f"experts={self.experts} is of experts' weights, and the model has none; give "
                               "--precision for its weights.")
        if self.ep > 1 and not routed:
            raise ServingError(f"ep={self.ep} needs experts, and the model has none; leave it out.")

    @property
    def dense_tp(self) -> int:
        """GPUs that share a dense feed-forward part: those of one attention group."""
        return self.tp

    @staticmethod
    def _check(value: int, what: str, name: str, by: int) -> None:
        if value % by:
            raise ServingError(f"{value:,} {what} cannot be split evenly by {name}={by}; choose a divisor, such as "
                               f"{math.gcd(value, by)}.")

    def __str__(self) -> str:
        parts = [f"tp={self.tp}"]
        parts += [f"{name}={getattr(self, name)}" for name in ("pp", "attention_dp", "ep") if getattr(self, name) > 1]
        return ",".join(parts)


FIRST_TOKEN = 0.3
"""Standard deviation of the logarithm of the time to the first token, in addition to that of the steps. The measured
mean depends on how a benchmark begins, and on the server's own queues."""
FIRST_LEAST = 0.5
"""Least share of ``FIRST_TOKEN`` that remains after calibration: rows determine times between tokens far better."""
BETWEEN_TOKENS = 0.10
"""Standard deviation of the logarithm of the time between tokens, in addition to that of the steps."""


GRAPHS = 1.0e9
"""Bytes that captured CUDA graphs of many batch sizes hold: an assumption (vLLM and SGLang log 0.5 to 3 GB)."""
SAMPLED = 6
"""Copies of the logits, as 32-bit values, that a sampler holds at once: logits, probabilities, their logarithms, sorted
values, and their 64-bit indices (vLLM's ``Sampler``)."""
STATE_BYTES = 4
"""Bytes of a value of a recurrence's state."""


@dataclass(frozen=True, slots=True)
class CacheAccount:
    """Memory of the fullest GPU, bytes.

    Attributes:
        device: all memory of the GPU.
        weights: the GPU's share of the weights.
        workspace: activations of a step, logits, CUDA graphs, context and communicators.
        room: memory left for caches within the engine's share; negative if not even the weights fit.
        sequence: cache of each sequence, independent of its length: a recurrence's state and full windows.
        token: cache of each token of a sequence's context.
        groups: number of groups of GPUs that have sequences of their own.
    """

    device: float
    weights: float
    workspace: float
    room: float
    sequence: float
    token: float
    groups: int

    def of(self, context: float) -> float:
        """Return the bytes that a sequence of ``context`` tokens takes on a GPU of its group."""
        return self.sequence + self.token * context

    def largest_batch(self, context: int) -> int:
        """Return the number of sequences of ``context`` tokens that fit a replica."""
        each = self.of(context)
        return self.groups * int(max(self.room, 0.0) // each) if each else 1 << 20

    def check(self, batch: int, context: int, what: str) -> None:
        """Raise ``ServingError`` with one sentence unless ``batch`` sequences of ``context`` tokens fit."""
        if self.room <= 0:
            raise ServingError(f"{what} does not fit: a GPU's share of the weights is {self.weights / 1e9:,.1f} GB, "
                               f"work space {self.workspace / 1e9:,.1f}, and the engine uses "
                               f"{(self.weights + self.workspace + self.room) / 1e9:,.1f} of its "
                               f"{self.device / 1e9:,.1f} GB; give more GPUs (--tp) or a narrower type (--precision).")
        if batch > (most := self.largest_batch(context)):
            raise ServingError(f"{batch:,} sequences of {context:,} tokens do not fit: their cache takes "
                               f"{self.of(context) * -(-batch // self.groups) / 1e9:,.1f} GB of a GPU and there is "
                               f"room for {self.room / 1e9:,.1f}; the largest batch is {most:,}.")


def cache_account(shape: TransformerShape, setup: ServingSetup, device: DeviceSpec, longest: int) -> CacheAccount:
    """Return the memory of a replica's fullest GPU for sequences of at most ``longest`` tokens."""
    linear, experts = weight_type(setup.precision, device), weight_type(setup.of_experts, device)
    weights, token, sequence = 0.0, 0.0, 0.0
    width = setup.kv_bytes(shape)
    for run in shape.runs:
        layers = run.layers / setup.pp
        routed = run.expert_parameters(setup.ep, setup.expert_tp)
        router = run.hidden * run.experts
        attention = run.attention_parameters(setup.tp) + run.state_parameters(setup.tp)
        rest = run.dense_parameters(setup.tp) - router - attention
        weights += layers * (router * 2 + sum(
            count * (shape.element_bytes if part in run.kept else kind.bytes) for part, count, kind in (
                (ATTENTION, attention, linear), (FEED_FORWARD, rest, linear), (EXPERTS, routed, experts))))
        if run.attends:
            each = layers * width * (run.latent.key_rank + run.latent.rotated if run.latent is not None else
                                     setup.kv_heads(run) * (run.width_of_head + run.width_of_values))
            if run.window and run.window < longest:
                sequence += each * run.window
            else:
                token += each
        if run.state is not None:
            own = run.state.share(setup.tp)
            sequence += layers * (own.inner * own.state * STATE_BYTES + own.mixed * own.window * 2)
    weights += shape.root_parameters(setup.tp) * shape.element_bytes
    if setup.speculation is not None:
        block = shape.runs[-1]
        weights += block.dense_parameters(setup.tp) * linear.bytes + experts.bytes * block.expert_parameters(
            setup.ep, setup.expert_tp)
    tokens = min(setup.step_tokens, max(longest, 1) * 4)
    inner = max(max(2 * kind.ffn // setup.dense_tp if not kind.experts else 2 * kind.top_k * kind.ffn // setup.expert_tp
                    for kind in shape.kinds), 4 * shape.hidden)
    logits = min(setup.engine.sequences, 256) * shape.vocab * 4 * SAMPLED
    groups = sum(size > 1 for size in (setup.layer_gpus, setup.pp))
    workspace = (tokens * (4 * shape.hidden + inner) * shape.element_bytes + logits + CONTEXT
                 + groups * COMMUNICATOR_BYTES + (GRAPHS if setup.graphs else 0.0))
    total, share = device.memory_gb * 1e9, setup.engine.memory
    left = total - weights - workspace
    room = share * left if setup.engine.of_rest and left > 0 else total * share - weights - workspace
    return CacheAccount(total, weights, workspace, room, sequence, token, setup.attention_dp)


MOST_TOKENS, MOST_REQUESTS, LEAST_RATE, MOST_RATE = 1 << 24, 200_000, 1e-6, 1e6
"""Limits of a load's values; others are taken for typing errors."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of numbers of tokens.

    Attributes:
        least, most: ends of a uniform distribution; if equal, always this number.
        spread: if positive, a gamma distribution of mean ``least`` and this coefficient of variation replaces it.
    """

    least: int
    most: int
    spread: float = 0.0

    @staticmethod
    def parse(text: str, option: str) -> Lengths:
        """Parse "1024", "512-2048" (uniform) or "1024~0.5" (gamma, coefficient of variation).

        Raises:
            ServingError: the text has another form, or a value is not possible.
        """
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9})|~(\d{1,3}(?:\.\d{1,6})?))?\s*", text)
        if match is None:
            raise ServingError(f"{option} {text[:40]!r} is no number of tokens; give 1024, 512-2048 for any number "
                               "between, or 1024~0.5 for a gamma distribution with that coefficient of variation.")
        least, most = int(match.group(1)), int(match.group(2) or match.group(1))
        spread = float(match.group(3) or 0.0)
        if not 1 <= least <= most <= MOST_TOKENS or spread > 10:
            raise ServingError(f"{option} {text.strip()} cannot be: tokens go from 1 to {MOST_TOKENS:,}, from few to "
                               "many, with a coefficient of variation up to 10.")
        return Lengths(least, most, spread)

    @property
    def mean(self) -> float:
        """Mean number of tokens."""
        return (self.least + self.most) / 2

    @property
    def longest(self) -> int:
        """Most tokens; for a gamma distribution a number that about 1 in 1,000 draws exceeds."""
        return self.most if not self.spread else math.ceil(self.least * (1 + 4 * self.spread))

    def draw(self, count: int, random: np.random.Generator) -> Int64:
        """Return ``count`` random numbers of tokens."""
        if self.spread:
            shape = 1.0 / self.spread**2
            found = random.gamma(shape, self.least / shape, count)
            return np.clip(np.rint(found), 1, self.longest).astype(np.int64)
        return random.integers(self.least, self.most + 1, count)

    def __str__(self) -> str:
        if self.spread:
            return f"{self.least:,}~{self.spread:g}"
        return f"{self.least:,}" if self.least == self.most else f"{self.least:,}-{self.most:,}"


@dataclass(frozen=True, slots=True)
class Requests:
    """The load on a server.

    Attributes:
        prompt, output: numbers of tokens of prompts and answers.
        concurrency: number of clients that each send a request as soon as they have an answer; 0 if ``rate`` is given.
        rate: requests a second at random times (Poisson); 0 if ``concurrency`` is given.
        count: number of all requests; 0 for ``WAVES`` a client, or for a rate a number that gives percentiles. Only the
            requests after ``warm_up`` count.
        seed: of random draws.
        warm_up: number of first requests that are served but do not count, because they all arrive at once.
        cached: tokens of a prefix that all prompts share and that is already in the cache. At least one token of each
            prompt is read.
        apart: if all clients ask for one length, answers end up to ``NEARLY`` before or after it. Answers of exactly
            equal length would always end together, and their next prompts would wait for each other.

    Raises:
        ServingError: not exactly one of concurrency and rate is given, or a value is not possible.
    """

    prompt: Lengths
    output: Lengths
    concurrency: int = 0
    rate: float = 0.0
    count: int = 0
    seed: int = 0
    warm_up: int = 0
    apart: bool = False
    cached: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cached <= MOST_TOKENS:
            raise ServingError(f"cached={self.cached!r} is no number of tokens that prompts share; give one from 0 to "
                               f"{MOST_TOKENS:,}.")
        if not (self.rate == 0 or LEAST_RATE <= self.rate <= MOST_RATE):
            raise ServingError(f"rate={self.rate!r} is no number of requests a second; give one from {LEAST_RATE:g} to "
                               f"{MOST_RATE:,.0f}.")
        if self.concurrency < 0 or self.concurrency > MOST_REQUESTS:
            raise ServingError(f"concurrency={self.concurrency!r} is no number of clients; give one from 1 to "
                               f"{MOST_REQUESTS:,}.")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise ServingError(f"seed={self.seed!r} is no seed; give a whole number from 0.")
        if bool(self.rate) == bool(self.concurrency):
            raise ServingError("A load is either a rate of requests or a number of clients at once; give one of --rate "
                               "and --concurrency, above 0.")
        if not 0 <= self.warm_up < self.requests:
            raise ServingError(f"warm_up={self.warm_up!r} leaves none of {self.requests:,} requests to count; give "
                               "less.")
        if 0 < self.count < self.concurrency:
            raise ServingError(f"{self.count:,} requests do not keep {self.concurrency:,} clients busy; give "
                               f"{self.concurrency:,} or more.")
        if not 0 <= self.count <= MOST_REQUESTS:
            raise ServingError(f"count={self.count!r} is no number of requests; give one up to {MOST_REQUESTS:,}.")

    @property
    def requests(self) -> int:
        """Number of simulated requests."""
        if self.count:
            return self.count
        if self.concurrency:
            return min(WAVES * self.concurrency, MOST_REQUESTS)
        return min(max(math.ceil(self.rate * SECONDS_OF_A_RATE), OF_A_RATE), MOST_OF_A_RATE)

    def drawn(self) -> tuple[Float64, Int64, Int64]:
        """Return arrival times, µs (all 0 with ``concurrency``), and the tokens of prompts and of outputs [n]."""
        random = np.random.default_rng(self.seed)
        n = self.requests
        prompts, outputs = self.prompt.draw(n, random), self.output.draw(n, random)
        if not self.rate:
            if self.apart and self.output.least == self.output.most and not self.output.spread:
                outputs = np.rint(outputs * random.uniform(1 - NEARLY, 1 + NEARLY, n)).astype(np.int64)
            return np.zeros(n), prompts, outputs
        # ``n`` arrivals of a Poisson process within their expected time, so that the rate is met exactly.
        return np.sort(random.uniform(0.0, n / self.rate * 1e6, n)), prompts, outputs


NEARLY = 0.02
"""Relative spread of answers around a requested length. Fitted to genai-perf's times to the first token of vLLM and
TensorRT-LLM (looked-at half of ``benchmarks/serving.py``: 22.5% off; 22.8% with 0.96 to 1, 23.6% within 5%)."""
WAVES = 6
"""Requests of each client: benchmarks of servers usually send 4 to 10."""
OF_A_RATE, SECONDS_OF_A_RATE, MOST_OF_A_RATE = 400, 60.0, 4000
"""Requests simulated for a rate: at least enough for the 90th percentile, those of a minute, and at most 4,000."""
