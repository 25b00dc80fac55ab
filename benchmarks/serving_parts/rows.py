"""Rows of AIConfigurator's serving table as what they were: a decoder, a setup and a load."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from benchmarks.serving_parts.split import is_development
from graph_predictor.serving.engines import engine_of
from graph_predictor.serving.load import Lengths, Requests
from graph_predictor.serving.setup import ServingSetup
from graph_predictor.serving.source import published_name

TABLE = "end_to_end/serving_h100_h200.parquet"
DEVICES = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm"}
SHORTEST = 0.8
"""Rows that name the groups of attention were taken with prompts and answers of 0.8 to 1.0 of the length that is said
(InferenceMAX's ``random-range-ratio``)."""


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
    prompt, output = (Lengths(round(SHORTEST * each) if known else each, each)
                      for each in (int(row.input_tokens), int(row.output_tokens)))
    clients = int(row.concurrency if math.isfinite(row.concurrency) else row.batch)
    # InferenceMAX sends ten requests for each client and counts all; the others first warm up.
    count, warm_up = (10 * clients, 0) if known else (6 * clients, clients)
    setup = ServingSetup(tp=tp, attention_dp=groups, ep=ep, precision=precision, experts=experts,
                         kv="fp8" if row.backend == "trtllm" and precision.startswith("fp8") else "",
                         engine=engine_of(row.backend))
    group = "|".join(map(str, (row.model, row.backend, row.backend_version, row.gpu, row.gemm_quant_mode)))
    return ServedRow(number, model, DEVICES[row.gpu], setup,
                     Requests(prompt, output, clients, count=count, warm_up=warm_up), row.ttft_ms, row.tpot_ms,
                     is_development(row), group, row)


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
