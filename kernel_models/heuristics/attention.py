"""Fused attention, from whole prompts to one query on a long cache: blocks of packed query rows, or the cache's bytes.

One formula for all lengths of queries and keys::

    rows    = queries of the heads that share keys and values, packed:    ``heads / kv_heads · q_len``
    blocks  = ``batch · kv_heads · ⌈rows / 128⌉``, keys split where these leave units idle (flash decoding).
    Compute = operations over whole blocks / the rate of the units that have one + what each block costs to start.
    Memory  = queries, results and, once, the keys and values in the window / the bandwidth that blocks can ask for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.products import filled_units
from kernel_models.heuristics.work import CallTable, KernelWork, memory_us, one, peak_tflops, work_of
from kernel_models.op_call import DIMENSIONS, Family, OpCall, itemsize
from tracer.arrays import Float64

QUERY_BLOCK = 128.0
"""Query rows of one block (FlashAttention-2 and -3, and cuDNN's fused attention)."""
LEAST_ROWS = 64.0
"""Fewest rows that a block computes: the smallest tile of matrix instructions that these kernels use."""
LONGEST_ROWS = {"ampere": 128.0, "blackwell": 256.0}
"""Rows of the last block, which works alone on the whole length of keys; 64 elsewhere (three groups of warps alternate
in Hopper's blocks). A causal mask gives the last rows twice the mean work, which shows where blocks are few. Tiles of
FlashAttention-2; for Blackwell, two tiles of 128. Chosen among 64, 128 and 256 by tables of A100, H100 and L40S
(``attention_forward_causal``) and a half of SimuMax's kernels on a B200, by a hash of their sizes."""
BLOCK_CLOCKS = 2600.0
"""Clocks of a unit that a block costs in addition to its arithmetic, over the rate's efficiency (5,000 in all). A block
finds its pages, loads its queries and writes its results. From one-token sequences of ``attention_forward_causal``: one
more sequence and key head costs 0.021 µs on an H100 and 0.035 on an A100. That is 5,100 and 5,400 clocks of one unit,
for any number of query heads that share it."""
KEY_BLOCK = 64.0
"""Cost of the start and end of a block of keys in a backward pass, as a number of queries."""
SPLIT_KEYS = 128.0
"""Fewest keys in a part of a split cache: one tile of them (flash decoding)."""
HALF_FILLED = 0.5
"""Share of the units whose requests fill the memory's bandwidth. Set, not measured."""
COMBINE = 0.15
"""Share of a kernel's fixed cost for adding the parts of a split cache: a small kernel after a large one. Set, not
measured."""
CACHE_STREAM, CACHE_STREAM_ELSEWHERE = {"hopper": 0.36}, 0.4
"""Time of a byte of the cache over that of a byte of the step's own tokens. A cache streams at 0.9 of the bandwidth of
long copies (Flash-Decoding's 131,072 over 65,536 tokens on an A100). On Hopper it streams at all of it, as weights do
(0.88 of the peak; FlashMLA publishes 0.9 of an H800's, github.com/deepseek-ai/FlashMLA). Tokens of a step, which
servers write to the cache and read again, reach 0.36 in ``attention_forward_causal``."""
LATENT = 1.3
"""Factor on the usual rate for kernels of a latent cache (MLA): 580 to 660 TFLOP/s on an H800 (FlashMLA), 0.6 of its
peak."""
PORTABLE = {"hopper": 0.66}
"""Rate of FlashAttention-1 and -2 and the memory-efficient kernels, which PyTorch runs, over that of kernels written
for the architecture: they issue Ampere's matrix instructions. Measured: 0.364 of an H100's peak for 32k queries of a
video transformer (``kernels/h100_wan_video_ops``), where FlashAttention-3 reaches 0.58
(``attention_forward_causal``)."""
FIRST = 0.55
"""Rate of FlashAttention-1 (its Triton version too) over FlashAttention-2's: "around 2×", from 25–40% to 50–73% of an
A100's peak (Dao, 2023)."""
FORWARD, BACKWARD, BACKWARD_ELSEWHERE = {"blackwell": 0.93}, {"blackwell": 0.71}, 0.89
"""Factors on the rate: forward on a B200, backward on a B200, backward elsewhere; ``WIDE_BACKWARD`` for backward passes
of heads wider than ``WIDE_HEAD`` on any device. Medians over a half of SimuMax's attention kernels (by a hash of their
sizes). With ``BACKWARD_ELSEWHERE`` backward passes reach half of the peak, as on an A100 and H100."""
CUDNN_WIDE, CUDNN_NARROW, NARROW_HEAD = {"blackwell": (1.18, 1.31)}, {"blackwell": (0.80, 0.65)}, 64
"""Forward and backward rates of cuDNN's kernels since version 9.18, over those of other heads. Heads wider than
``WIDE_HEAD`` have narrower values; heads up to ``NARROW_HEAD`` are limited by exponentials. From cuDNN's own benchmark
on a GB200, January and February 2026 (github.com/NVIDIA/cudnn-frontend, ``benchmark/sdpa_benchmark_training/results``).
Causal, 4,096 tokens: 1,324 and 1,083 TFLOP/s for 128 heads of 192 and 128 features; 574 and 617 for heads of 64 in a
window of 1,024 tokens. Heads of 128, to which whole steps were fitted, keep their rates."""
EIGHT_BITS = {"blackwell": (0.69, 0.62)}
"""Rates of forward and backward passes in fp8 over twice their 16-bit rates. In cuDNN's benchmark fp8 is 1.28 to 1.48
and 1.09 to 1.33 times as quick."""
EXPONENTIALS = {"10.3": (1.2, 1.08)}
"""Rates (forward, backward) with more units for exponentials, by compute capability, over the architecture's. From
cuDNN's GB300 over its GB200 (June 2026: 1,659 and 1,405 TFLOP/s forward, 1,150 and 1,064 backward)."""
WIDE_HEAD, WIDE_BACKWARD = 128, 0.85
TAUGHT = (1.107, 0.96, 1.134)
"""Arithmetic, traffic and fixed cost of a step's own tokens on boards with GDDR memory, relative to the default
efficiencies. Corrections were fitted to this form (``corrections.json.gz``); the defaults have since been fitted to
other boards."""
HEAD_SIZES = (32, 64, 96, 128, 192, 256)
"""Head sizes for which kernels are built; others are padded to the next (FlashAttention-2, ``headdim_switch``; cuDNN's
are assumed to be like it)."""


class Blocks(NamedTuple):
    """Division of calls into blocks [n].

    Attributes:
        rows: Query rows of all heads that share keys and values.
        padded: Computed rows over actual rows.
        keys: Number of keys that a query row can see, limited by a window.
        whole: Blocks of query rows if keys are not split.
        blocks: Blocks with split keys.
    """

    rows: Float64
    padded: Float64
    keys: Float64
    whole: Float64
    blocks: Float64


def padded_head(size: Float64) -> Float64:
    """Return the head sizes that a kernel computes for the given ones; above all ``HEAD_SIZES`` multiples of 64."""
    kernels = np.array(HEAD_SIZES, np.float64)
    place = np.searchsorted(kernels, size)
    return np.where(place < len(kernels), kernels[np.minimum(place, len(kernels) - 1)], np.ceil(size / 64.0) * 64.0)


def _is_backward(kind: str) -> float:
    return float(kind.partition(":")[0].endswith("_backward"))


def _reached(kind: str, architecture: str) -> float:
    """Return the share of the usual rate that a kind of kernel reaches on an architecture."""
    written_for_ampere = kind.startswith(("flash_", "flash1_", "efficient_"))
    portable = PORTABLE.get(architecture, 1.0) if written_for_ampere else 1.0
    if kind.startswith("flash1_"):
        portable *= FIRST
    if kind.startswith("mla_"):
        portable *= LATENT
    if _is_backward(kind):
        return portable * BACKWARD.get(architecture, BACKWARD_ELSEWHERE)
    return portable * FORWARD.get(architecture, 1.0)


@work_of(Family.ATTENTION)
def attention_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the times of the operations over whole blocks and of the bytes, µs, and the number of kernels.

    Heads are padded to ``HEAD_SIZES``. Where blocks are few, the kernel waits for the one with the most keys. Source:
    Dao, FlashAttention-2 (2023), sections 3.1 and 3.2; Dao et al., "Flash-Decoding for long-context inference" (2023).
    """
    peak = table.by_dtype(lambda dtype: peak_tflops(device, dtype, matrix=True))
    peak = peak * table.by_kind(lambda kind: _reached(kind, device.architecture))
    peak = peak * _by_head(table, device)
    backward = table.by_kind(_is_backward).astype(bool)
    cut = blocks_of(table, device)
    wide = np.maximum(table.dim("head_dim"), table.dim("v_head_dim")) > WIDE_HEAD
    heads = padded_heads(table) / np.where(wide & backward, WIDE_BACKWARD, 1.0)
    filled = table.flops * cut.padded * heads / peak / 1e6 / filled_units(cut.blocks, device)
    starting = cut.blocks * BLOCK_CLOCKS / device.boost_clock_mhz / device.sm_count
    forward = np.hypot(filled, _longest_us(table, cut, heads, peak, device)) + starting
    compute = np.where(backward, filled * (1.0 + KEY_BLOCK / table.dim("kv_len")), forward)
    asked = np.where(backward, 1.0, np.maximum(1.0, HALF_FILLED * device.sm_count / cut.blocks))
    split = cut.blocks / cut.whole - 1.0
    partial = 2.0 * 4.0 * table.dim("batch") * table.dim("heads") * table.dim("q_len") * table.dim("v_head_dim") * split
    cached = _cache_share(table, cut)
    faster = 1.0 - CACHE_STREAM.get(device.architecture, CACHE_STREAM_ELSEWHERE)
    memory = memory_us(table.bytes_moved + partial, device) * (1.0 - faster * cached) * asked
    found = KernelWork(compute, memory, 1.0 + COMBINE * np.minimum(split, 1.0))
    if device.vendor == "nvidia" and device.memory_kind.startswith("GDDR"):
        own = np.where(backward, 0.0, 1.0 - cached)
        return _blended(found, _as_taught(table, heads, peak, device), own)
    return found


def _by_head(table: CallTable, device: DeviceSpec) -> Float64:
    """Return the factor on the usual rate for a head's width, 8-bit products and units for exponentials [n]."""
    backward = table.by_kind(_is_backward) > 0
    wide = np.maximum(table.dim("head_dim"), table.dim("v_head_dim"))
    own = table.by_kind(lambda kind: float(kind.startswith("cudnn_"))) > 0
    found: Float64 = np.ones(len(table))
    for shares, mine in ((CUDNN_WIDE.get(device.architecture), own & (wide > WIDE_HEAD)),
                         (CUDNN_NARROW.get(device.architecture), own & (wide <= NARROW_HEAD)),
                         (EIGHT_BITS.get(device.architecture), table.by_dtype(lambda dtype: float(dtype == "fp8")) > 0),
                         (EXPONENTIALS.get(device.compute_capability), own)):
        if shares is not None:
            found = np.where(mine, found * np.where(backward, shares[1], shares[0]), found)
    return found


def _as_taught(table: CallTable, heads: Float64, peak: Float64, device: DeviceSpec) -> KernelWork:
    """Return the work of whole prompts in the form for which corrections of GDDR boards were fitted (``TAUGHT``)."""
    queries, keys = table.dim("q_len"), table.dim("kv_len")
    tiles = np.ceil(queries / QUERY_BLOCK)
    padding = np.where(queries < QUERY_BLOCK, np.maximum(LEAST_ROWS / queries, 1.0), tiles * QUERY_BLOCK / queries)
    blocks = table.dim("batch") * table.dim("heads") * tiles
    compute = table.flops * padding * heads * (1.0 + KEY_BLOCK / keys) / peak / 1e6 / filled_units(blocks, device)
    return KernelWork(TAUGHT[0] * compute, TAUGHT[1] * memory_us(table.bytes_moved, device), TAUGHT[2] * one(table))


def _blended(first: KernelWork, second: KernelWork, share: Float64) -> KernelWork:
    """Return the first work, with a share [n] of it replaced by that of the second."""
    return KernelWork(*(getattr(first, name) * (1.0 - share) + getattr(second, name) * share
                        for name in ("compute_us", "memory_us", "kernels")))


def blocks_of(table: CallTable, device: DeviceSpec) -> Blocks:
    """Return the blocks of calls: packed rows in forward passes, each head's queries or keys in backward passes."""
    queries, keys = table.dim("q_len"), table.dim("kv_len")
    window = table.dims[:, DIMENSIONS[table.family].index("window")]
    keys = np.where(window > 0, np.minimum(keys, window + queries - 1.0), keys)
    backward = table.by_kind(_is_backward).astype(bool)
    heads, shared = table.dim("heads"), np.where(backward, table.dim("heads"), table.dim("kv_heads"))
    rows = queries * heads / shared
    tiles = np.ceil(rows / QUERY_BLOCK)
    padded = np.where(rows < QUERY_BLOCK, np.maximum(rows, LEAST_ROWS), tiles * QUERY_BLOCK) / rows
    whole = table.dim("batch") * shared * tiles
    parts = np.maximum(keys / SPLIT_KEYS * QUERY_BLOCK / np.maximum(queries, QUERY_BLOCK), 1.0)
    blocks = np.where(backward, whole, np.maximum(whole, np.minimum(whole * parts, device.sm_count)))
    return Blocks(rows, padded, keys, whole, blocks)


def _longest_us(table: CallTable, cut: Blocks, heads: Float64, peak: Float64, device: DeviceSpec) -> Float64:
    """Return the time of the block with the most keys on one unit, at the published rate, µs [n]."""
    rows = np.minimum(np.maximum(cut.rows, LEAST_ROWS), LONGEST_ROWS.get(device.architecture, LEAST_ROWS))
    keys = np.minimum(cut.keys, cut.keys * cut.whole / cut.blocks)
    each = 2.0 * rows * keys * (table.dim("head_dim") + table.dim("v_head_dim")) * heads
    return each / (peak * 1e6 / device.sm_count)


def _cache_share(table: CallTable, cut: Blocks) -> Float64:
    """Return the share of the bytes that are keys and values of earlier steps [n]."""
    old = np.maximum(cut.keys - table.dim("q_len"), 0.0) * table.dim("batch") * table.dim("kv_heads")
    size = np.fromiter((kv_bytes(call) for call in table.calls), np.float64, len(table))
    return np.minimum(old * size / np.maximum(table.bytes_moved, 1.0), 1.0)


def kv_bytes(call: OpCall) -> float:
    """Return the bytes of one token's keys and values in one head, as stored in the cache."""
    kept = next((flag[3:] for flag in call.flags if flag.startswith("kv_")), call.dtype)
    keyed, valued = call.dims[5:7] if len(call.dims) >= 7 else (1, 1)
    return float(itemsize(kept) * (keyed if "latent" in call.flags else keyed + valued))


def padded_heads(table: CallTable) -> Float64:
    """Return the factor on the arithmetic for padded heads [n]."""
    keyed, valued = table.dim("head_dim"), table.dim("v_head_dim")
    return (padded_head(keyed) + padded_head(valued)) / (keyed + valued)


def idle_units(table: CallTable, device: DeviceSpec) -> Float64:
    """Return the factor by which idle units lengthen the time, where blocks do not fill all units [n]."""
    return 1.0 / filled_units(blocks_of(table, device).blocks, device)
