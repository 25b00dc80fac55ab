"""Rows of AIConfigurator's serving table as what they were: a decoder, a setup and a load."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas

from benchmarks.serving_parts.split import is_development
from planner.serving.setup import Lengths, Requests, ServingSetup, engine_of
from planner.serving.source import published_name

TABLE = "end_to_end/serving_h100_h200.parquet"
DEVICES = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm"}
SHORTEST = 0.8
"""Rows that name the groups of attention are InferenceMAX's (github.com/SemiAnalysisAI/InferenceX): prompts and answers
of 0.8 to 1.0 of the length that is said (``random-range-ratio``)."""
NEARLY = 0.96
"""The other rows' least length over what is said, but for SGLang's. They are AIConfigurator's own (its ``eval`` folder:
genai-perf for vLLM and TensorRT-LLM, SGLang's ``bench_serving`` with a ``random-range-ratio`` of 1). Both ask for equal
lengths; genai-perf counts tokens by a tokeniser of its own, so that what a server gets differs by some. Set with the
looked-at half: with equal lengths clients would stay in step, as SGLang's do."""
BALANCED = 60
"""Steps for which DeepSeek's prompts wait until each group of attention has one (``attention_dp_config`` of
``dsr1_fp8_h200_trt_slurm.sh``)."""
STREAMED = 10
"""Tokens of DeepSeek's first message (``stream_interval`` of that script). The other scripts set 10 and 20 too, but
with ``num_postprocess_workers``, and their rows of the looked-at half show no wait for more than one token."""
ASYNC_US, ASYNC_SEQUENCE_US = 300.0, 2.0
"""Host time of a step, and of each of its sequences, where vLLM prepares the next step while this one runs
(``async-scheduling`` of ``gptoss_fp4_h100_docker.sh``): an assumption."""
WAVES = 10
"""Requests of each client. All count, those with which a benchmark begins too: both warm up before."""
TO_GATHER = 0.9, 20
CHUNKS = {"llama": 16_384, "gpt-oss": 20_000}
"""What InferenceMAX's scripts tell TensorRT-LLM (``benchmarks/70b_fp8_h200_trt_slurm.sh``,
``gptoss_fp4_h200_trt_slurm.sh``, ``dsr1_fp8_h200_trt_slurm.sh``): Llama's prompts of 1,024 tokens for answers as long
wait until they fill 0.9 of a step, or 20 steps, on fewer than 8 GPUs; tokens of a step at most."""


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A measured row.

    Attributes:
        number: in the table.
        model, device: names.
        setup, load: of it.
        ttft_ms, tpot_ms: measured.
        development: whether it was looked at.
        group: of rows that one user would measure: model, engine, its version, GPU and types.
        row: as the table has it.
    """

    number: int
    model: str
    device: str
    setup: ServingSetup
    load: Requests
    ttft_ms: float
    tpot_ms: float
    development: bool
    group: str
    row: Any


def read_rows(data: Path) -> list[ServedRow]:
    """Return all rows but repeated ones: equal in everything, times too."""
    frame = pandas.read_parquet(data / TABLE).drop_duplicates()
    return [_row(number, row) for number, row in enumerate(frame.itertuples(index=False))]


def _row(number: int, row: Any) -> ServedRow:
    model = published_name(row.model)
    tp, groups, ep = _gpus(row)
    precision, experts = _types(model, row)
    known = math.isfinite(row.attention_dp_size)
    shortest = SHORTEST if known else 1.0 if row.backend == "sglang" and row.input_tokens % 1000 else NEARLY
    prompt, output = (Lengths(round(shortest * each), each) for each in (int(row.input_tokens), int(row.output_tokens)))
    clients = int(row.concurrency if math.isfinite(row.concurrency) else row.batch)
    setup = ServingSetup(tp=tp, attention_dp=groups, ep=ep, precision=precision, experts=experts,
                         kv="fp8" if row.backend == "trtllm" and precision.startswith("fp8") else "",
                         engine=engine_of(row.backend))
    if known and row.backend == "trtllm":
        setup = _as_published(setup, model, int(row.input_tokens), int(row.output_tokens), clients)
    if known and row.backend == "vllm" and model.startswith("gpt-oss"):
        setup = replace(setup, engine=replace(setup.engine, step_us=ASYNC_US, sequence_us=ASYNC_SEQUENCE_US))
    group = "|".join(map(str, (row.model, row.backend, row.backend_version, row.gpu, row.gemm_quant_mode)))
    return ServedRow(number, model, DEVICES[row.gpu], setup,
                     Requests(prompt, output, clients, count=WAVES * clients), row.ttft_ms, row.tpot_ms,
                     is_development(row), group, row)


def _as_published(setup: ServingSetup, model: str, prompt: int, output: int, clients: int) -> ServingSetup:
    """Return a setup with the options that InferenceMAX gives TensorRT-LLM."""
    chunk = next((tokens for name, tokens in CHUNKS.items() if model.startswith(name)),
                 (clients + prompt + 127) // 64 * 64)
    engine = setup.engine
    if model.startswith("llama") and (prompt, output) == (1024, 1024) and setup.tp < 8:
        engine = replace(engine, wait_tokens=TO_GATHER[0] * chunk, wait_steps=TO_GATHER[1])
    if setup.attention_dp > 1:
        engine = replace(engine, wait_tokens=float(setup.attention_dp * prompt), wait_steps=BALANCED)
    if model.startswith("deepseek"):
        engine = replace(engine, first_tokens=STREAMED)
    return replace(setup, chunk=chunk, engine=engine)


def _gpus(row: Any) -> tuple[int, int, int]:
    """GPUs of an attention group, groups, and groups of experts. Some rows multiply the GPUs by the groups of experts
    (the same times stand once with tp=8 and once with tp=64, moe_tp=8, moe_ep=8)."""
    groups = int(row.attention_dp_size) if math.isfinite(row.attention_dp_size) else 1
    tp, ep, shared = int(row.tp), max(int(row.moe_ep_size), 1), max(int(row.moe_tp_size), 1)
    if math.isfinite(row.attention_dp_size) and shared == ep > 1 and tp * groups == shared * ep:
        tp, groups = (1, ep) if groups > 1 else (ep, 1)
    elif tp * groups < shared * ep and (shared * ep) % tp == 0 and not math.isfinite(row.attention_dp_size):
        groups = shared * ep // tp
    return tp, groups, ep if (tp * groups) % ep == 0 else 1


def _types(model: str, row: Any) -> tuple[str, str]:
    """Types of the weights, of experts where they have another. What is served as gpt-oss has experts in MXFP4 alone,
    Kimi experts in int4 alone, and what is published in fp8 by blocks is served so."""
    if model.startswith("gpt-oss"):
        return "bf16", "mxfp4"
    said = row.gemm_quant_mode
    if said is None or said != said:
        return "bf16", ""
    if said == "int4_wo":
        return "bf16", "int4"
    if model.startswith(("deepseek", "minimax", "glm", "qwen3-235b", "qwen3.5")):
        return "fp8_block", ""
    return {"nvfp4": "nvfp4", "fp8": "fp8", "fp8_block": "fp8_block"}[said], ""
