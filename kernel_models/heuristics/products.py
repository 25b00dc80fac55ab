"""Matrix products, and convolutions as implicit products: the time of whole tiles and waves, or of operand bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.call_classes import ROWS
from kernel_models.heuristics.work import (
    GB_PER_S_IN_BYTES_PER_US,
    CallTable,
    KernelWork,
    bandwidth_gbps,
    computed_as,
    memory_us,
    one,
    peak_tflops,
    vector_us,
    work_of,
)
from kernel_models.op_call import Family, itemsize, multiply_adds, stored_itemsize
from tracer.arrays import Bool, Float64

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (16, 64), (16, 128))
"""Output tiles (rows, columns) of cuBLAS, CUTLASS and rocBLAS kernels, as in the kernels' names."""
SPLITS = (1, 2, 3, 4, 8, 16)
"""Numbers of parts of the contraction where the output has too few tiles for all units (split-k)."""
TILE_COST = 16.0
"""a in a tile's relative efficiency 1/(1 + a(1/rows + 1/columns)): larger tiles load fewer operands per product. See
``padded_product_us``."""
QUANTISED = 0.3
"""Lost share of the idle part of the last wave: persistent and stream-k kernels recover some of it. 1 = all is lost."""
AT_ONCE = 1024
"""Most products for which all tilings are computed at a time; for more, one tiling at a time uses less memory."""
SPLIT_COST = 0.15
"""Share of its work that a split kernel needs in addition for adding up its parts, for each doubling."""


class Tiling(NamedTuple):
    """Factors on the time of products in their best tile and split, relative to full, largest tiles [n].

    Attributes:
        tiles: For unused rows and columns of the result's last tiles.
        waves: For units that the last wave of blocks leaves idle, or that too few blocks leave idle.
        small: For smaller tiles, which load their operands more often, and for split sums.
    """

    tiles: Float64
    waves: Float64
    small: Float64


def padded_product_us(batch: Float64, m: Float64, n: Float64, k: Float64, peak_tflops: Float64, device: DeviceSpec,
                      ) -> Float64:
    """Return the time of batch·m·n·k multiply-adds at the peak rate in whole tiles and waves, µs: best tile and split.

    blocks = ⌈m/Tm⌉·⌈n/Tn⌉·batch·split, waves = blocks/units, where the idle part of the last one counts ``QUANTISED``;
    t = waves · 2·Tm·Tn·k/split / (rate of a unit · tile efficiency). The minimum over tiles and splits never falls when
    a size grows. Source: NVIDIA "Matrix Multiplication Background User's Guide" (tile and wave quantisation);
    ``TILE_COST`` and ``QUANTISED`` are the best of 4 to 48 and 0 to 1 on the products of the tables in
    benchmarks/kernel_tables.py, ``SPLIT_COST`` is set.
    """
    if np.size(m) <= AT_ONCE:
        batch, m, n, k, peak_tflops = (np.asarray(each, np.float64)[..., None]
                                       for each in (batch, m, n, k, peak_tflops))
        us, _ = _tiling_us(device, batch, m, n, k, peak_tflops, *_Tilings.all())
        return np.asarray(us.min(axis=-1))
    best = np.full(np.shape(m), np.inf)
    for us, _ in _every_tiling(batch, m, n, k, peak_tflops, device):
        np.minimum(best, us, out=best)
    return best


def tiling(batch: Float64, m: Float64, n: Float64, device: DeviceSpec) -> Tiling:
    """Return the factors of ``padded_product_us``: its result is the ideal time, 2·batch·m·n·k / peak, times all three
    factors."""
    ideal = np.maximum(2.0 * batch * m * n, 1.0) / 1e6
    one = np.ones(np.shape(m))
    best, found = one * np.inf, Tiling(one, one, one)
    for us, (blocks, area, each) in _every_tiling(batch, m, n, one, one, device):
        better, padded = us < best, blocks * area / (batch * m * n)
        best = np.where(better, us, best)
        found = Tiling(np.where(better, padded, found.tiles),
                       np.where(better, us / ideal / padded / each, found.waves), np.where(better, each, found.small))
    return found


def _every_tiling(batch: Float64, m: Float64, n: Float64, k: Float64, peak_tflops: Float64, device: DeviceSpec,
                  ) -> Iterator[tuple[Float64, tuple[Float64, float, float]]]:
    """Return for every tile and split its time, µs, its number of tiles, their area, and extra cost."""
    for rows, columns, split, cost, more in zip(*_Tilings.all(), strict=True):
        us, tiles = _tiling_us(device, batch, m, n, k, peak_tflops, rows, columns, split, cost, more)
        yield us, (tiles, float(rows * columns), cost * more)


class _Tilings(NamedTuple):
    """Every tile with every split, [tiles × splits]: rows, columns, split, and extra costs of tile and split."""

    rows: Float64
    columns: Float64
    split: Float64
    cost: Float64
    more: Float64

    @classmethod
    @lru_cache(maxsize=1)
    def all(cls) -> _Tilings:
        """Return all tiles with all splits."""
        reference = 1.0 + TILE_COST * (1 / 256 + 1 / 128)
        each = [(rows, columns, split, (1.0 + TILE_COST * (1 / rows + 1 / columns)) / reference,
                 1.0 + SPLIT_COST * np.log2(split)) for rows, columns in TILES for split in SPLITS]
        return cls(*np.array(each, np.float64).T)


def _tiling_us(device: DeviceSpec, batch: Float64, m: Float64, n: Float64, k: Float64, peak_tflops: Float64,
               rows: Float64, columns: Float64, split: Float64, cost: Float64, more: Float64,
               ) -> tuple[Float64, Float64]:
    """Return the time of products in one tile and split, µs, and their number of tiles."""
    unit_rate = peak_tflops * 1e6 / device.sm_count  # operations per µs
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
    waves = tiles * split / device.sm_count
    counted = QUANTISED * np.ceil(waves) + (1.0 - QUANTISED) * np.maximum(waves, 1.0)
    block = 2.0 * rows * columns * k / split * more
    return counted * block * cost / unit_rate, tiles


def filled_units(blocks: Float64, device: DeviceSpec) -> Float64:
    """Return the share of the units' time that equal blocks use, from 0 to 1; for the last wave see ``QUANTISED``."""
    waves = np.maximum(blocks, 1e-9) / device.sm_count
    return waves / (QUANTISED * np.ceil(waves) + (1.0 - QUANTISED) * np.maximum(waves, 1.0))


LOAD_BYTES, LEAST_BYTES = 16, 4
"""Bytes of the widest and the narrowest asynchronous copy to shared memory (CUDA C++ Programming Guide, ``cp.async``):
rows of whole 16 bytes use the widest. Rows of 16-bit values that are no multiple of 4 bytes are read value by value."""
NARROW, SINGLE = 1.49, 3.61
"""Factor on the time of the arithmetic if the least aligned row is no multiple of 16 bytes, and of 4 bytes.

Fitted: an A100's sweep through the contraction (``vocab_h_sweep`` of ``kernels/gemm_alignment_fp16``, medians over rows
of whole loads; ``benchmarks/shape_advice.py`` computes them again and judges the other sweeps). Used for all of
NVIDIA's data center boards with matrix units (A100 and V100 were measured); an MI250X shows none."""
DEPTH_BYTES = 64
"""Bytes of a contraction in one step of a tile: 32 values of 16 bits, as in kernels' names
("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn")."""


def affected(table: CallTable, device: DeviceSpec) -> Bool:
    """Return whether calls are products that matrix units compute on a measured kind of board.

    On boards with GDDR memory the corrections learned from steps include the cost of unaligned rows."""
    like = device.vendor == "nvidia" and not device.memory_kind.startswith("GDDR")
    return table.by_dtype(lambda dtype: float(
        like and computed_as(device, dtype) in device.matrix_tflops and itemsize(dtype) <= 4 and dtype != "fp32")) > 0


def narrow_rows(table: CallTable, device: DeviceSpec) -> Float64:
    """Return the factor on the arithmetic for rows that are no multiple of the widest load [n]."""
    return np.where(affected(table, device), table.once("narrow rows", lambda: _narrow(table)), 1.0)


def _narrow(table: CallTable) -> Float64:
    """Return the factor of ``narrow_rows`` for all products, without the check of ``affected``."""
    by_name = {name: table.dim(name) * table.item_bytes() for name in "mnk"}
    rest: Float64 = np.full(len(table), float(LOAD_BYTES))
    layouts = np.array([ROWS.get(call.layout, "nk") for call in table.calls])
    for rows in np.unique(layouts).tolist() if len(table) else []:
        mine = layouts == rows
        for name in rows:
            row = by_name[name].astype(np.int64)
            rest[mine] = np.minimum(rest, np.minimum(row & -row, LOAD_BYTES))[mine]
    return np.where(rest >= LOAD_BYTES, 1.0, np.where(rest >= LEAST_BYTES, NARROW, SINGLE))


def whole_depth(table: CallTable, device: DeviceSpec) -> Float64:
    """Return the length of the contraction, rounded up to whole steps of a tile [n]."""
    k, step = table.dim("k"), DEPTH_BYTES / table.item_bytes()
    return np.where(affected(table, device), np.ceil(k / step) * step, k)


FEW_ROWS = 16
"""Most rows and columns of a result whose sums may be computed without matrix units: their smallest tile
(``mma.m16n8k16``)."""

STREAMED = {"hopper": 0.83, "ampere": 0.96}
"""Time of a weight's byte over that of other operands'. Products of few rows read their weights at 0.88 of an H100's
bandwidth and at 0.77 of an A100's (``gemm_forward``, m up to 64; weights of 64 MB and more)."""
DEPTH_FLOORS, DEEPEST = 6e-5, 8192.0
"""Kernel floors that each step of the contraction adds to a product's fixed cost, and the depth from which it is split:
blocks run through all steps in order. From rows of ``gemm_forward`` with 1 to 8 MB: 0.2 ns for each of k on A100, H100
and H200. For 16 bits, and for 8 where the product does not also cast its activations."""
GROUPED = {"nt": 0.92, "nn": 0.86, "tn": 0.75}
"""Rate of grouped products over that of single ones, by layout: forward, input gradient, weight gradient. From
SimuMax's rows of an A100, and those of a B200 with 1,000 rows a group and more, compared with their single products."""
GROUP_US = {"blackwell": 4.5}
"""Extra cost of each group of a grouped product, µs, by architecture. Transformer Engine launches one product per
group, and on a B200 each ends before the next has filled the device. From SimuMax's rows "chosen on" of
``benchmarks/inference_kernels.py``, groups of 128 to 10,000 rows. It is 0 on an A100 and for servers' fused kernels."""
GROUPED_FP8 = 0.6
"""A further factor on grouped products of 8 and 4 bits: kernels scale blocks of values while they run. DeepSeek's
DeepGEMM publishes 0.5 to 0.7 of an H800's peak for groups of 4,096 rows; servers' Triton kernels reach less. Set, not
measured. It does not apply where scales belong to whole tensors or matrix units apply them (MX, NVFP4; flag
"unit_scales"): Transformer Engine runs each group like a single product."""
ROUTED = 0.5
"""Rate of servers' fused kernels over single products: they also gather tokens (Triton's, Marlin's, of any type). In a
recorded step of gpt-oss the experts of 8,192 tokens reach 0.5 on an MI300X (trace ``vllm-cuda-graph``)."""

ROUTED_WIDENED, ROUTED_FP8 = 0.23, 0.3
"""The rate ``ROUTED`` on NVIDIA's GPUs where each expert has ``FILLED`` rows or more, as in prompts. The first is for
weights widened to 16 bits as they are read (Marlin's and Triton's kernels for int4 and MXFP4), the second for 8 bits
scaled by blocks. Set with times to the first token of one half of the serving table (``benchmarks/serving.py``), which
judges them by the other half. Experts of few rows reach ``ROUTED``."""
FILLED, BARE = 16.0, 4.0
"""Rows of an expert from which a block's products limit it, and up to which its weights do. Set, not measured."""


@work_of(Family.GEMM)
def gemm_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the times of 2·batch·m·n·k operations in whole tiles and waves, and of A, B and the output once each, µs.

    A product of a few rows by a few columns, such as the gradient of weights that mix attention heads, is summed
    without matrix units, whose tile it would leave almost empty: the quicker form counts. Source: roofline (Williams et
    al., 2009) with tile and wave quantisation (``padded_product_us``) and rows that are no whole number of loads
    (``narrow_rows``).
    """
    peak = table.by_dtype(lambda dtype: peak_tflops(device, dtype, matrix=True))
    batch, m, n = (table.dim(name) for name in ("batch", "m", "n"))
    k = whole_depth(table, device) * table.by_dtype(multiply_adds)
    product = padded_product_us(batch, m, n, k, peak, device) * narrow_rows(table, device) / _grouped(table, device)
    direct = np.where(np.maximum(m, n) <= FEW_ROWS, vector_us(table, device), np.inf)
    memory, fixed = memory_us(table.bytes_moved, device), one(table)
    if device.vendor == "nvidia" and not device.memory_kind.startswith("GDDR"):
        weights = table.once("weights", lambda: _weight_share(table))
        streamed = table.bytes_moved / (bandwidth_gbps(device) * GB_PER_S_IN_BYTES_PER_US)
        memory += weights * (streamed * STREAMED.get(device.architecture, 1.0) - memory)
        fixed += DEPTH_FLOORS * np.minimum(table.dim("k"), DEEPEST) * _goes_through(table)
    launched = _launched(table, device)
    return KernelWork(np.minimum(product, direct) + launched, memory + launched, fixed)


def _goes_through(table: CallTable) -> Float64:
    """Return 1 where the steps of the contraction add to a call's fixed cost, else 0 [n]."""
    counts = [dtype in ("fp16", "bf16") or (dtype == "fp8" and kind != "mm") for kind, dtype in table.groups]
    return np.array(counts, np.float64)[table.group]


def _weight_share(table: CallTable) -> Float64:
    """Return the share of the bytes that belong to the larger operand: a weight, where rows are few [n].

    It is not in a cache, since a model's other weights were read after it."""
    k, many = table.dim("k"), np.maximum(table.dim("m"), table.dim("n"))
    size = np.array([stored_bytes(call.flags, call.dtype) for call in table.calls])
    weight = table.dim("batch") * many * k * size
    return np.minimum(weight / np.maximum(table.bytes_moved, 1.0), 1.0)


def stored_bytes(flags: tuple[str, ...], dtype: str) -> float:
    """Return the bytes of a weight's element: its stored type may differ from the products' type (``weight_fp4``)."""
    kept = next((flag[7:] for flag in flags if flag.startswith("weight_")), dtype)
    return stored_itemsize(kept)


def _grouped(table: CallTable, device: DeviceSpec) -> Float64:
    """Return the rate of grouped products over that of single ones [n]."""
    found = np.ones(len(table))
    narrow = table.by_dtype(lambda dtype: GROUPED_FP8 if dtype in ("fp8", "fp4", "int8") else 1.0)
    rows = table.dim("m")
    for i, call in enumerate(table.calls):
        if call.kind == "grouped":
            found[i] = (_routed(call.dtype, call.flags, float(rows[i]), device) if "routed" in call.flags else
                        GROUPED.get(call.layout, GROUPED["nt"]) * (1.0 if "unit_scales" in call.flags else narrow[i]))
    return found


def _launched(table: CallTable, device: DeviceSpec) -> Float64:
    """Return the extra cost of all groups of a grouped product, µs [n]."""
    each = GROUP_US.get(device.architecture, 0.0)
    apart = [each if call.kind == "grouped" and not {"routed", "one_launch"} & set(call.flags) else 0.0
             for call in table.calls]
    return table.dim("batch") * np.array(apart, np.float64)


def _routed(dtype: str, flags: tuple[str, ...], rows: float, device: DeviceSpec) -> float:
    """Return the rate of a server's fused experts with ``rows`` rows each, over that of a single product."""
    widened = any(flag.startswith("weight_") for flag in flags)
    if device.vendor != "nvidia" or not (widened or dtype == "fp8"):
        return ROUTED
    filled = ROUTED_WIDENED if widened else ROUTED_FP8
    way = min(max(math.log(max(rows, 1.0) / BARE) / math.log(FILLED / BARE), 0.0), 1.0)
    return ROUTED * (filled / ROUTED) ** way


@work_of(Family.CONV)
def convolution_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the times of the implicit product in whole tiles and waves, and of input, weights and output once, µs.

    Forward: m = batch·output positions, n = output channels of a group, k = input channels of a group · kernel size.
    The input's gradient swaps input and output channels, with k divided by the stride. The weights' gradient contracts
    over batch and positions. Depthwise kernels may do without matrix units: the quicker counts. Source: cuDNN (Chetlur
    et al., 2014, "implicit GEMM"); NVIDIA "Convolutional Layers User's Guide".
    """
    peak = table.by_dtype(lambda dtype: peak_tflops(device, dtype, matrix=True))
    groups, inputs, outputs, m, n, k = table.once("product", lambda: _product(table))
    product = padded_product_us(groups, m, n, k, peak, device)
    direct = np.where(np.minimum(inputs, outputs) <= 4, vector_us(table, device), np.inf)
    return KernelWork(np.minimum(product, direct), memory_us(table.bytes_moved, device), one(table))


def _product(table: CallTable) -> tuple[Float64, Float64, Float64, Float64, Float64, Float64]:
    """Return the groups, input and output channels of a group, and m, n and k of the implicit product, [n] each."""
    groups = table.dim("groups")
    batch = table.dim("batch")
    inputs = np.maximum(table.dim("in_channels") / groups, 1.0)
    outputs = np.maximum(table.dim("out_channels") / groups, 1.0)
    in_positions = batch * table.dim("in_d") * table.dim("in_h") * table.dim("in_w")
    out_positions = batch * table.dim("out_d") * table.dim("out_h") * table.dim("out_w")
    kernel = table.dim("kernel_d") * table.dim("kernel_h") * table.dim("kernel_w")
    # The gradient of the input has a position for each input, which only 1/stride of the kernel's taps reach.
    taps = np.maximum(kernel * np.minimum(out_positions / in_positions, 1.0), 1.0)
    is_input = table.by_kind(lambda kind: float("dgrad" in kind)) > 0
    is_weight = table.by_kind(lambda kind: float("wgrad" in kind)) > 0
    m = np.where(is_weight, outputs, np.where(is_input, in_positions, out_positions))
    n = np.where(is_weight, inputs * kernel, np.where(is_input, inputs, outputs))
    k = np.where(is_weight, out_positions, np.where(is_input, outputs * taps, inputs * kernel))
    return groups, inputs, outputs, m, n, k * table.by_dtype(multiply_adds)
