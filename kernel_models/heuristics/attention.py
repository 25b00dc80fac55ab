"""Fused attention: its operations at the matrix units' rate over whole blocks of queries, or its bytes."""

from __future__ import annotations

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.call_table import CallTable
from kernel_models.heuristics.curves import memory_us
from kernel_models.heuristics.sustained import peak_tflops
from kernel_models.heuristics.tiles import filled_units
from kernel_models.heuristics.work import KernelWork, one, work_of
from kernel_models.op_call import Family
from tracer.arrays import Float64

QUERY_BLOCK = 128.0
"""Queries of one block (FlashAttention-2 and -3, and cuDNN's fused attention)."""
KEY_BLOCK = 64.0
"""A block of queries costs as much as this many keys more, for its start and end."""
PORTABLE = {"hopper": 0.63}
"""Share of the rate of kernels written for an architecture that FlashAttention-1 and -2 and the memory-efficient
kernels reach, which PyTorch runs: they issue Ampere's matrix instructions. Measured: 0.364 of an H100's peak for 32k
queries of a video transformer (``kernels/h100_wan_video_ops``), where FlashAttention-3 reaches 0.58
(``attention_forward_causal``)."""
FIRST = 0.55
"""The same of FlashAttention-1 (its Triton version too) to FlashAttention-2: "around 2×", from 25–40% to 50–73% of an
A100's peak (Dao, 2023)."""
BACKWARD = {"blackwell": 0.83}
"""The same of backward passes where the matrix units outran what feeds them; and of backward passes of heads wider than
``WIDE_HEAD``, on any device. Both are medians over a half of SimuMax's attention kernels (by a hash of their sizes):
the other half says 0.85 and 0.81."""
WIDE_HEAD, WIDE_BACKWARD = 128, 0.85
HEAD_SIZES = (32, 64, 96, 128, 192, 256)
"""Features of a head that kernels are built for; others are padded to the next (FlashAttention-2, ``headdim_switch``;
cuDNN's are taken to be like it)."""


def padded_head(size: Float64) -> Float64:
    """The features that a kernel computes for heads of a size; wider ones in whole 64s."""
    kernels = np.array(HEAD_SIZES, np.float64)
    place = np.searchsorted(kernels, size)
    return np.where(place < len(kernels), kernels[np.minimum(place, len(kernels) - 1)], np.ceil(size / 64.0) * 64.0)


def _is_backward(kind: str) -> float:
    return float(kind.partition(":")[0].endswith("_backward"))


def _reached(kind: str, architecture: str) -> float:
    """Share of the usual rate that a kind of kernel reaches on an architecture."""
    written_for_ampere = kind.startswith(("flash_", "flash1_", "efficient_"))
    portable = PORTABLE.get(architecture, 1.0) if written_for_ampere else 1.0
    if kind.startswith("flash1_"):
        portable *= FIRST
    return portable * (BACKWARD.get(architecture, 1.0) if _is_backward(kind) else 1.0)


@work_of(Family.ATTENTION)
def attention_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Time of the call's operations over the share of units that blocks of queries (forward) or keys fill, µs.

    The call counts 4·batch·heads·queries·keys·size operations, half of the square part when causal, 2.5 times as many
    backward; heads are padded to ``HEAD_SIZES``. blocks = batch·heads·⌈queries/128⌉; short sequences of few heads
    leave units idle unless keys are split (flash decoding), as is assumed for less than a block of queries. Source:
    Dao, FlashAttention-2 (2023), sections 3.1 and 3.2.
    """
    peak = table.by_dtype(lambda dtype: peak_tflops(device, dtype, matrix=True))
    peak = peak * table.by_kind(lambda kind: _reached(kind, device.architecture))
    queries, keys = table.dim("q_len"), table.dim("kv_len")
    padding = np.ceil(queries / QUERY_BLOCK) * QUERY_BLOCK / queries
    padded = np.where(queries < QUERY_BLOCK, np.maximum(QUERY_BLOCK / 2 / queries, 1.0), padding) * padded_heads(table)
    wide = np.maximum(table.dim("head_dim"), table.dim("v_head_dim")) > WIDE_HEAD
    padded = padded / np.where(wide & table.by_kind(_is_backward).astype(bool), WIDE_BACKWARD, 1.0)
    compute = table.flops * padded * (1.0 + KEY_BLOCK / keys) / peak / 1e6 * idle_units(table, device)
    return KernelWork(compute, memory_us(table.bytes_moved, device), one(table))


def padded_heads(table: CallTable) -> Float64:
    """Factor of the arithmetic for heads that are padded [n]."""
    keyed, valued = table.dim("head_dim"), table.dim("v_head_dim")
    return (padded_head(keyed) + padded_head(valued)) / (keyed + valued)


def idle_units(table: CallTable, device: DeviceSpec) -> Float64:
    """Factor of the time for units that blocks of queries leave idle [n]."""
    batch, heads = table.dim("batch"), table.dim("heads")
    queries, keys = table.dim("q_len"), table.dim("kv_len")
    blocks = batch * heads * np.ceil(queries / QUERY_BLOCK)
    # Decoding splits the keys into pieces that fill the device.
    blocks = np.where(queries < QUERY_BLOCK, np.maximum(blocks, np.minimum(batch * heads * np.ceil(keys / 512.0),
                                                                           device.sm_count)), blocks)
    return 1.0 / filled_units(blocks, device)
