"""Published kernel measurements as calls: one set a table and device, for fitting and checking kernel models.

DATA is the folder with `kernels/`. Rows are sampled with a fixed seed; repeated measurements of a shape are kept.
Left out, with the reason: NeuSight's convolutions (no shapes), its rows below 150 µs (host time is part of them; of
the others it is taken off), and
Vidur's vocabulary and rotary embeddings (several kernels of unknown number, or of unlike traffic) and times below 5 µs
(quantised to 0.5–1 µs); of the video model, operations with copies from or to the host, linear solvers,
and three-dimensional convolutions (mostly changes of layout, ten times slower than what is usual).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kernel_models.datasets.forms import device_of, operation_of
from kernel_models.device import DeviceSpec, resolve_device
from kernel_models.families.attention import attention
from kernel_models.op_call import OpCall
from kernel_models.operation import calls_of, operation

ROWS = 1500
"""Rows of a table, device and kind of kernel."""
SEED = 20240517
BFLOAT = {"bfloat16": "bf16", "fp8": "fp8"}


@dataclass(frozen=True, slots=True)
class TableSet:
    """Calls of one table and device, with measured times, µs [n], and what each row is (for leaving parts out)."""

    table: str
    device: DeviceSpec
    calls: list[OpCall]
    measured_us: np.ndarray

    @property
    def name(self) -> str:
        """ "gemm_forward H200-SXM" and the like."""
        return f"{self.table} {self.device.name}"


def table_sets(data: Path, rows: int = ROWS) -> Iterator[TableSet]:
    """Every table and device."""
    kernels = data / "kernels"
    yield from _gemm(kernels / "gemm_forward.parquet", rows)
    yield from _attention(kernels / "attention_forward_causal.parquet", rows)
    yield from _vidur(kernels / "transformer_block_ops_vidur.parquet", rows)
    yield from _neusight(kernels / "neusight_fp32.parquet", rows)
    yield from _video(kernels / "h100_wan_video_ops.parquet")


def _sampled(frame: pd.DataFrame, by: list[str], rows: int) -> pd.DataFrame:
    shuffled = frame.sample(frac=1.0, random_state=SEED)
    return shuffled.groupby(by, sort=True, observed=True).head(rows)


def _set(table: str, device: str | DeviceSpec, found: Iterable[tuple[tuple[OpCall, ...], float]]) -> TableSet:
    pairs = [(calls[0], time) for calls, time in found if len(calls) == 1 and "unsized" not in calls[0].flags]
    spec = device if isinstance(device, DeviceSpec) else resolve_device(device)
    return TableSet(table, spec, [call for call, _ in pairs], np.array([float(time) for _, time in pairs]))


def _gemm(path: Path, rows: int) -> Iterator[TableSet]:
    frame = _sampled(pd.read_parquet(path), ["gpu", "dtype"], rows)
    for gpu, part in frame.groupby("gpu"):
        found = []
        for r in part.itertuples():
            dtype = BFLOAT[r.dtype]
            if dtype == "fp8":
                op = operation("aten::_scaled_mm", [(r.m, r.k), (r.k, r.n), (), (), None, None, None], dtypes=[
                    "fp8", "fp8", "fp32", "fp32", "", "", ""], strides=[(r.k, 1), (1, r.k)],
                    values=[None] * 6 + [15])
            else:
                op = operation("aten::linear", [(r.m, r.k), (r.n, r.k), None], dtypes=dtype)
            found.append((calls_of(op), r.latency_us))
        yield _set("gemm_forward", gpu, found)


def _attention(path: Path, rows: int) -> Iterator[TableSet]:
    frame = pd.read_parquet(path)
    frame = frame[frame.window_size.isna() | (frame.window_size == 0)]
    frame = _sampled(frame, ["gpu"], rows)
    for gpu, part in frame.groupby("gpu"):
        # Servers run FlashAttention-3 wherever it runs.
        kind = "flash3_forward" if resolve_device(gpu).architecture == "hopper" else "flash_forward"
        found = []
        for r in part.itertuples():
            calls = tuple(attention(kind, r.batch_size, r.num_heads, r.num_kv_heads, r.seq_len, r.seq_len, r.head_dim,
                                    r.head_dim, "bf16", causal=True))
            found.append((calls, r.latency_us))
        yield _set("attention_forward", gpu, found)


def _vidur(path: Path, rows: int) -> Iterator[TableSet]:
    frame = pd.read_parquet(path)
    frame = frame[~frame.op.isin(["emb", "attn_rope"]) & (frame.latency_us >= 5.0)]
    frame = frame[~((frame.model == "phi-2") & frame.op.str.contains("layernorm"))]
    frame = _sampled(frame, ["gpu", "op"], rows // 5)
    for gpu, part in frame.groupby("gpu"):
        yield _set("vidur", device_of(gpu), ((calls_of(_vidur_op(r)), r.latency_us) for r in part.itertuples()))


def _vidur_op(r: Any) -> Any:
    t, p, width = r.num_tokens, r.num_tensor_parallel_workers, r.n_embd
    head, inner = width // r.n_head, r.n_expanded_embd // r.num_tensor_parallel_workers
    heads, kv = max(r.n_head // p, 1), max(r.n_kv_head // p, 1)
    products = {"attn_pre_proj": (width, (heads + 2 * kv) * head), "attn_post_proj": (heads * head, width),
                "mlp_up_proj": (width, inner * (2 if r.use_gated_mlp else 1)), "mlp_down_proj": (inner, width)}
    if r.op in products:
        k, n = products[r.op]
        return operation("aten::linear", [(t, k), (n, k), None], dtypes="fp16")
    if r.op == "add":
        return operation("aten::add", [(t, width), (t, width)], dtypes="fp16")
    if r.op == "mlp_act":
        return (operation("_C::silu_and_mul", [(t, inner), (t, 2 * inner)], dtypes="fp16") if r.use_gated_mlp
                else operation("aten::gelu", [(t, inner)], dtypes="fp16"))
    # vLLM's norm of Llama-like models; phi-2 has another.
    return operation("_C::rms_norm", [(t, width), (t, width), (width,)], dtypes="fp16")


NEUSIGHT_HOST_US = {"NVIDIA A100-PCIE-40GB": 18.0, "NVIDIA A100 80GB PCIe": 18.0, "Tesla V100-PCIE-32GB": 20.0,
                    "Tesla P100-PCIE-16GB": 31.0, "Tesla T4": 16.0, "Tesla P4": 15.0, "NVIDIA L4": 16.0}
"""Host time within NeuSight's times, µs: what its `relu` of 32 to 64 MB takes over its bytes at the speed of 8 GB."""
UNARY = {"relu": "relu", "tanh": "tanh", "gelu": "gelu"}
BINARY = {"add": "add", "mul": "mul", "div": "div", "pow": "pow"}


def _neusight(path: Path, rows: int) -> Iterator[TableSet]:
    frame = pd.read_parquet(path)
    frame = _sampled(frame[(frame.OPName != "conv") & (frame.latency_us >= 150.0)], ["Device", "OPName"], rows // 5)
    for gpu, part in frame.groupby("Device"):
        yield _set("neusight", gpu, ((calls_of(_neusight_op(r)), r.latency_us - NEUSIGHT_HOST_US[gpu])
                                     for r in part.itertuples()))


def _neusight_op(r: Any) -> Any:
    name = r.OPName
    if name in ("linear", "bmm"):
        # The columns' names mislead: N is the contraction, K the output's width.
        b, m, n, k = (int(value) for value in (r.B, r.M, r.K, r.N))
        if name == "linear":
            return operation("aten::linear", [(b * m, k), (n, k), (n,)])
        return operation("aten::bmm", [(b, m, k), (b, k, n)])
    shape = (int(r.B), int(r.H))
    if name == "softmax":
        return operation("aten::_softmax", [shape, None, None], values=[None, -1, False])
    if name == "ln":
        return operation("aten::native_layer_norm", [shape, None, shape[1:], shape[1:], None],
                         values=[None, list(shape[1:])])
    if name in BINARY:
        return operation(f"aten::{name}", [shape, shape])
    return operation(f"aten::{UNARY.get(name, name.removesuffix('u'))}", [shape])


def _video(path: Path) -> Iterator[TableSet]:
    frame = pd.read_parquet(path)
    frame = frame[~frame["kernel_details_summary"].str.contains("Memcpy HtoD|Memcpy DtoH|Pageable|Pinned")
                  & ~frame.name.str.contains("Synthetic|aten::convolution")]
    found = []
    for _, r in frame.iterrows():
        arguments = (r["Input Dims"], r["Input type"], r["Input Strides"], r["Concrete Inputs"])
        found.append((calls_of(operation_of(r["name"], *arguments)), r["Kernel Time (µs)_median"]))
    yield _set("video", "h100-sxm", found)
