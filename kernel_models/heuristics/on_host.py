"""What a CPU does otherwise than a GPU: no tiles to fill, operands that are copied before they are multiplied.

A core's arithmetic and its traffic add up (``efficiency.together``): a product first brings its operands into the
order that its innermost loop wants, and one thread does one thing at a time.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.dtypes import multiply_adds
from kernel_models.families.attention import PRODUCTS
from kernel_models.heuristics.call_table import CallTable
from kernel_models.heuristics.curves import GB_PER_S_IN_BYTES_PER_US, L2_SPEEDUP, memory_us
from kernel_models.heuristics.embedding import parts_of
from kernel_models.heuristics.sustained import bandwidth_gbps, peak_tflops
from kernel_models.heuristics.work import KernelWork, one, work_of
from kernel_models.op_call import Family
from tracer.arrays import Float64

LANES = 8.0
"""Values of fp32 in a vector of 256 bits, which channels are rounded up to."""
AS_IT_STANDS = 0.1
"""Share of other convolutions' fixed cost that one of 1×1 positions has (measured: 5 to 15 of 80 µs)."""
QUERY_BLOCK, SKIPS = 256.0, 768.0
"""Queries of a block of fused attention, from this length of sequence on (shorter ones' are of 32 and 64)."""
LOOKUP_CYCLES, BAG_CYCLES, SORTED_CYCLES = 3.0, 15.0, 200.0
"""Cycles of a look-up, of a bag, and of a look-up's dense gradient, besides its arithmetic and its traffic.
Chosen as what a quarter of `benchmarks/dlrm_lookups.py`'s cases fits best."""
_GATES = {"rnn": 1.0, "gru": 3.0, "lstm": 4.0}


@work_of(Family.GEMM, on_host=True)
def product_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """2·batch·m·n·k operations at the peak rate, and both operands and the output once each, µs.

    With few rows reading the weights is what takes long, so that time does not grow with the rows at first.
    Source: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): packing is O(mk + kn).
    """
    product = table.dim("batch") * table.dim("m") * table.dim("n") * table.dim("k")
    flops = 2.0 * product * table.by_dtype(multiply_adds)
    return KernelWork(flops / _peak(table, device) / 1e6, memory_us(table.bytes_moved, device), one(table))


@work_of(Family.CONV, on_host=True)
def convolution_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Multiply-adds with channels rounded up to whole vectors, and input, weights and output once each, µs.

    Source: Georganas et al., "Anatomy of high-performance deep learning convolutions on SIMD architectures" (2018):
    channels lie in blocks of a vector's width. One of 1×1 positions without a stride is a product as it stands.
    """
    groups = table.dim("groups")
    inputs, outputs = (np.maximum(table.dim(name) / groups, 1.0) for name in ("in_channels", "out_channels"))
    # Depthwise kernels have their vectors along the groups.
    lanes = np.where((inputs <= 1.0) & (groups > 1.0), groups, outputs)
    padded = np.ceil(lanes / LANES) * LANES / lanes
    window = np.prod([table.dim(f"{name}_{axis}") for name in ("kernel", "stride") for axis in "dhw"], axis=0)
    prepared = np.where(window > 1.0, 1.0, AS_IT_STANDS)
    return KernelWork(table.flops * padded / _peak(table, device) / 1e6, memory_us(table.bytes_moved, device), prepared)


@work_of(Family.ATTENTION, on_host=True)
def attention_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """The operations that are done at the peak rate, and the call's bytes, µs.

    A causal mask saves less than the call's own count of operations says: a block of queries takes all keys up to its
    last query's, and of short sequences masking the scores costs what is left out (measured: nothing saved up to 512
    tokens, 38% of 2,048). Source: ATen/native/cpu/FlashAttentionKernel.cpp.
    """
    keys = table.dim("kv_len")
    over_keys, over_values = (table.by_kind(partial(_products, at)) for at in (0, 1))
    every = (2.0 * table.dim("batch") * table.dim("heads") * table.dim("q_len") * keys
             * (over_keys * table.dim("head_dim") + over_values * table.dim("v_head_dim")))
    blocks = np.minimum(table.flops + every * 0.5 * QUERY_BLOCK / keys, every)
    causal = (table.flops < every) & (table.dim("window") <= 1.0)
    flops = np.where(causal, np.where(table.dim("q_len") < SKIPS, every, blocks), table.flops)
    return KernelWork(flops / _peak(table, device) / 1e6, memory_us(table.bytes_moved, device), one(table))


@work_of(Family.EMBEDDING, on_host=True)
def lookups_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Instructions of every look-up and bag, and rows that come from memory unless they were looked up before, µs.

    A dense gradient goes through its look-ups one after another, with the place of each row's sum to be found, and
    clears a gradient as large as the table before.
    """
    n = len(table)
    parts = parts_of(table)
    dense = table.by_kind(lambda kind: float(kind.endswith("_backward"))) > 0
    cycles = parts.lookups * np.where(dense, SORTED_CYCLES, LOOKUP_CYCLES)[parts.call] + parts.bags * BAG_CYCLES
    compute = parts.sum(cycles, n) / device.boost_clock_mhz + table.flops / _peak(table, device) / 1e6
    distinct = parts.rows_of_bin.sum(1)
    again = parts.sum(np.maximum(parts.lookups - distinct, 0.0) * parts.row_bytes, n)
    first = memory_us(parts.sum(distinct * parts.row_bytes, n), device)
    other = np.maximum(table.bytes_moved - parts.sum(parts.lookups * parts.row_bytes, n), 0.0)
    kept = again / (L2_SPEEDUP * bandwidth_gbps(device) * GB_PER_S_IN_BYTES_PER_US)
    return KernelWork(compute, first + kept + memory_us(other, device), one(table))


@work_of(Family.REDUCTION, Family.SOFTMAX, Family.NORM, on_host=True)
def rows_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Each byte once, however few rows there are, µs."""
    return KernelWork(np.zeros(len(table)), memory_us(table.bytes_moved, device), one(table))


@work_of(Family.RECURRENT, on_host=True)
def recurrent_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Steps one after another, each of which reads the recurrent weights again, µs."""
    gates = table.by_kind(lambda kind: _GATES.get(kind.split("_")[0], 1.0))
    steps = table.dim("sequence") * table.dim("layers") * table.dim("directions")
    weights = gates * table.dim("hidden") ** 2 * table.item_bytes()
    moved = steps * memory_us(weights, device) + memory_us(table.bytes_moved, device)
    return KernelWork(table.flops / _peak(table, device) / 1e6, moved, steps)


def _products(at: int, kind: str) -> float:
    return float(PRODUCTS[kind.rsplit("_", 1)[1]][at])


def _peak(table: CallTable, device: DeviceSpec) -> Float64:
    return table.by_dtype(lambda dtype: peak_tflops(device, dtype, matrix=True))
