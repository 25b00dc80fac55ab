"""``Engine``: what vLLM, SGLang and TensorRT-LLM do around a step: their defaults, and what their hosts cost.

Defaults are those of the engines' documentation. What the host costs is an assumption with a spread (``spreads``), set
with the looked-at half of AIConfigurator's serving table at hand (``benchmarks/serving.py`` judges the other half);
``--step-us`` and ``--calibrate`` replace it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from planner.serving.errors import ServingError


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
