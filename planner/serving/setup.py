"""``ServingSetup``: how a decoder is served: its engine, how a replica is split over GPUs, and in which types.

Defaults are those of the engines' documentation. What the host costs is an assumption with a spread, set
with the looked-at half of AIConfigurator's serving table at hand (``benchmarks/serving.py`` judges the other half);
``--step-us`` and ``--calibrate`` replace it.

How far off what a load gets may be is set so that of the looked-at half of ``benchmarks/serving.py`` about 80% lie
inside; the other half judges.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from kernel_models.device import DeviceSpec
from tracer.errors import ForetraceError
from tracer.shape_only.transformer import TransformerShape


class ServingError(ForetraceError):
    """A served model, a split of it, or a load, that cannot be: what was asked, why not, what can be."""


class Mixing(str, Enum):
    """What an engine does with prompts while it decodes."""

    MIXED = "mixed"
    """A step decodes and takes pieces of prompts into what is left of its tokens (chunked prefill)."""
    PREFILL_FIRST = "prefill first"
    """Waiting prompts are read in steps of their own, as many as fit; sequences that decode wait."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A serving engine.

    Attributes:
        name: as ``--engine`` takes it.
        mixing: of prompts and decoding.
        chunk: tokens of a step at most.
        splits: whether a prompt may be split over steps; else steps take whole prompts.
        sequences: that run at once at most.
        memory: share of the device's memory that the engine uses.
        step_us: host time of a step that the GPU waits for: scheduler, inputs, sampling's results, detokenisation.
        sequence_us: the same for each sequence of the step.
        request_us: of the server's front for each request, one after another: parsing, tokenisation, sending. Requests
            that come together so reach the engine one by one, and end up in different steps.
        reply_us: of the way of a request and its first token to the client, which keeps nobody else waiting.
        launch_us: host time of a kernel's launch outside CUDA graphs.
        graph_batch: sequences up to which decoding is captured as a CUDA graph.
        all_reduce_us: least time of its all-reduce kernel within a node.
        reserves: whether a sequence starts only where the cache has room for all that it may become; else sequences
            are thrown out, and read again later, where the cache is full.
        of_rest: whether the share of memory is of what weights leave, all of it for caches.
        turns_in_cache: whether one kernel turns queries and keys (rotary positions) and writes the cache.
        wait_tokens: that prompts must have together before a step that decodes takes any, so that fewer steps are
            slowed down; TensorRT-LLM's ``batch_wait_max_tokens_ratio``, times the tokens of a step.
        wait_steps: of decoding after which they are taken all the same; its ``batch_wait_timeout_iters``. 0: prompts do
            not wait for each other, as all engines have it unless they are told.
        first_tokens: of an answer that its first message has, which a client sees as its first token: TensorRT-LLM's
            ``stream_interval`` where it holds the first one back.
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


ENGINES: Mapping[str, Engine] = MappingProxyType({engine.name: engine for engine in (
    Engine("vllm", Mixing.MIXED, chunk=8192, splits=True, sequences=1024, memory=0.90, step_us=1500.0, sequence_us=8.0,
           request_us=2000.0, reply_us=5000.0, launch_us=40.0, graph_batch=512, all_reduce_us=4.4, reserves=False),
    Engine("sglang", Mixing.PREFILL_FIRST, chunk=8192, splits=True, sequences=2048, memory=0.88, step_us=500.0,
           sequence_us=6.0, request_us=2000.0, reply_us=5000.0, launch_us=120.0, graph_batch=512, all_reduce_us=2.6,
           reserves=False),
    Engine("trtllm", Mixing.MIXED, chunk=8192, splits=True, sequences=2048, memory=0.90, step_us=400.0,
           sequence_us=8.0, request_us=2000.0, reply_us=5000.0, launch_us=65.0, graph_batch=512, all_reduce_us=2.6,
           reserves=True, of_rest=True, turns_in_cache=True),
    Engine("compiled", Mixing.PREFILL_FIRST, chunk=1 << 20, splits=False, sequences=1 << 20, memory=0.95, step_us=0.0,
           sequence_us=0.0, request_us=0.0, reply_us=0.0, launch_us=6.0, graph_batch=1 << 20, all_reduce_us=2.6,
           reserves=True, turns_in_cache=True),
)})
"""Engines by name; "compiled" is a compiled model in a loop without a server, such as gpt-fast.

Steps of at most 8,192 tokens are vLLM's ``max_num_batched_tokens`` for a server on GPUs of 70 GB and more, SGLang's
``chunked-prefill-size`` on such GPUs, and TensorRT-LLM's ``max_num_tokens``; shares of memory are their
``gpu-memory-utilization``, ``mem-fraction-static`` and ``free_gpu_memory_fraction``. Least times of all-reduce kernels
are those of ``custom_all_reduce_h200`` in CUDA graphs on two GPUs (vLLM 0.24, SGLang 0.5.14, TensorRT-LLM 1.3).
"""
USUAL = "vllm"


def engine_of(name: str) -> Engine:
    """Return an engine by its name. Raises ``ServingError``."""
    try:
        return ENGINES[name.strip().lower()]
    except KeyError:
        raise ServingError(f"{name[:40]} is no engine that is known; give {', '.join(ENGINES)}.") from None


PRECISIONS = ("bf16", "fp16", "fp32", "fp8", "fp8_block", "nvfp4", "mxfp4", "int8", "int4")
"""Types of linear layers' weights; all but the first three may be computed in a wider one (``WeightType``)."""
WHOLE = PRECISIONS[:3]
"""Types of a whole model, its activations too."""
KV_TYPES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Bytes of a value of the cache, with its share of a scale."""
_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "fp8_block": 1.0 + 4 / 128**2, "nvfp4": 0.5 + 1 / 16,
          "mxfp4": 0.5 + 1 / 32, "int8": 1.0, "int4": 0.5 + 2 / 128}
"""Bytes of a weight with its share of a scale: blocks of 128 × 128 (DeepSeek-V3, 2024), 16, 32, and 128 in a row."""
_MATRIX = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "mxfp4": "fp4", "int8": "int8", "int4": ""}
_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class WeightType:
    """How products with weights of a type are done on a device.

    Attributes:
        precision: of ``PRECISIONS``.
        dtype: that the matrix units multiply: "" for the activations' own, where weights are widened as they are read.
        bytes: of a weight.
    """

    precision: str
    dtype: str
    bytes: float

    @property
    def stored(self) -> str:
        """Return the element type by which ``kernel_models`` knows it."""
        return {"nvfp4": "fp4", "mxfp4": "fp4", "fp8_block": "fp8"}.get(self.precision, self.precision)

    @property
    def widened(self) -> bool:
        """Return whether weights are narrower than what they are multiplied as."""
        return not self.dtype and self.bytes < 2.0


def weight_type(precision: str, device: DeviceSpec) -> WeightType:
    """Return how a device multiplies with weights of a type. Raises ``ServingError`` for a type that is none."""
    if precision not in PRECISIONS:
        raise ServingError(f"{precision[:40]} is no type of weights that is known; give {', '.join(PRECISIONS)}.")
    dtype = _MATRIX.get(precision, "")
    if dtype not in device.matrix_tflops:
        dtype = ""
    return WeightType(precision, dtype, _BYTES[precision])


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: a draft of so many tokens, checked in one step.

    Attributes:
        tokens: of a draft.
        accepted: tokens that a step yields in the mean, its own one among them: from 1 to ``tokens`` + 1.
    """

    tokens: int
    accepted: float

    @staticmethod
    def parse(text: str) -> Speculation:
        """Return what "3:2.4" says: drafts of 3 tokens, 2.4 tokens a step. Raises ``ServingError``."""
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
        tp: GPUs that share each layer's attention.
        pp: stages.
        attention_dp: groups of ``tp`` GPUs that have all of attention each, and sequences of their own; experts and
            feed-forward parts are shared by all of them.
        ep: groups among which whole experts are spread; within each, GPUs share every expert.
        precision: of linear layers' weights, of experts where ``experts`` says nothing.
        experts: of experts' weights.
        kv: type of the cache; "" for the model's own.
        engine: that serves it.
        chunk: tokens of a step at most; 0 for the engine's.
        graphs: decoding runs as CUDA graphs.
        speculation: if any.
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
        """Tokens of a step at most."""
        return self.chunk or self.engine.chunk

    @property
    def drafted(self) -> int:
        """Tokens of each decoding sequence in a step."""
        return 1 if self.speculation is None else 1 + self.speculation.tokens

    @property
    def yielded(self) -> float:
        """Tokens that a decoding sequence gets from a step, in the mean."""
        return 1.0 if self.speculation is None else self.speculation.accepted

    def kv_heads(self, kind: TransformerShape) -> int:
        """Heads of keys and values of a GPU: with more GPUs than heads each has a copy of one."""
        return max(kind.kv_heads // self.tp, 1)

    def kv_bytes(self, shape: TransformerShape) -> float:
        """Bytes of a value of the cache."""
        return KV_TYPES[self.kv] if self.kv else float(shape.element_bytes)

    def check(self, shape: TransformerShape) -> None:
        """Raise ``ServingError`` unless the model divides as the split wants it."""
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
"""Standard deviation of the logarithm of a time to the first token, added to that of its steps: what is measured as its
mean depends on how a benchmark begins, and on the server's own queues."""
FIRST_LEAST = 0.5
"""Share of it that a calibration leaves at least: rows tell times between tokens far better."""
BETWEEN_TOKENS = 0.10
"""The same of the time between tokens."""
