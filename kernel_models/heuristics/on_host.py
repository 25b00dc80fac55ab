"""Formulas for a CPU where it differs from a GPU: it has no tiles to fill, and copies operands before multiplying them.

A core's arithmetic and its traffic add up (``efficiency.together``). A product first copies its operands into the order
of its innermost loop, and one thread does one thing at a time.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.families.attention import PRODUCTS
from kernel_models.heuristics.embedding import LookupParts, columns_of, parts_of
from kernel_models.heuristics.work import (
    GB_PER_S_IN_BYTES_PER_US,
    L2_SPEEDUP,
    WORK,
    CallTable,
    KernelWork,
    bandwidth_gbps,
    memory_us,
    one,
    peak_tflops,
    work_of,
)
from kernel_models.op_call import Family, TablePart, multiply_adds
from tracer.arrays import Bool, Float64

LANES = 8.0
"""fp32 values in a vector of 256 bits (AVX2); channels are rounded up to it, since oneDNN blocks channels by it."""
LEAST_COLUMNS = 16.0
"""Fewest columns that the innermost loop of an fp32 product computes at a time: fewer cost as much. Two vectors of AVX2
(BLIS's kernels, Van Zee and van de Geijn 2015). Measured on one thread of an AMD EPYC with AVX2: 8 columns take 1.0 to
2.3 times the time of 16, and 32 take 1.5 to 1.8 times that time (LoRA's ranks, rows of 256 to 1,024)."""
AS_IT_STANDS = 0.13
"""Fixed cost of a convolution computed as products, over oneDNN's (fitted to a calibration on one thread of an AMD
EPYC: 4 µs against 52 forward, 8 to 12 against 58 backward)."""
FEW_BATCHES, FEW_VALUES, SMALL_KERNEL = 16.0, 20480.0, 3.0
"""Limits below which PyTorch computes convolutions as products instead of by oneDNN. They apply to samples for a 1×1
kernel without stride, to values of a single image, and to a kernel's height or width. From ``ConvParams::use_mkldnn``
in ATen/native/Convolution.cpp, for fp32 on one thread."""
QUERY_BLOCK, SKIPS = 256.0, 768.0
"""Queries of a block of fused attention, for sequences of at least this length (32 and 64 for shorter ones)."""
LOOKUP_CYCLES, ROW_CYCLES, BAG_CYCLES = 2.5, 10.0, 6.0
"""Cycles of a look-up in a bag, of a look-up without a bag, and of a bag, in addition to arithmetic and traffic. These
and the next constants: ``benchmarks/dlrm_lookups.py`` on an AMD EPYC (one thread)."""
SORTED_CYCLES, SUMMED_CYCLES, COPIED_CYCLES = 236.0, 2.25, 6.0
"""Cycles of a gradient: per look-up and per element of a distinct row (dense), and per look-up (sparse)."""
MISSED_CYCLES = 14.0
"""Cycles of a bag's row that comes from memory: loads of the next rows hide most of its latency."""
ADDED_CYCLES, BYTE_CYCLES = 60.0, 0.16
"""Cycles of a row added to another: the larger of the first and the row's bytes times the second."""
NEAR_CYCLES, WALK_CYCLES, FAR_CYCLES = 47.0, 80.0, 330.0
"""Further cycles of an added row: outside a core's own cache, on a page whose address the core does not hold, and
outside half of the last cache. Added values stream through that cache too."""
NUMBER_BYTES, NUMBER_SHARE = 32.0, 0.15
"""Most bytes of a single number, read and written, and the share of a copy's fixed cost for reading it
(``aten::_local_scalar_dense`` in traces/host: 0.1 µs)."""
PAGE, PAGES = 4096.0, 2048.0
"""Bytes of a page, and number of pages whose addresses a core holds."""
BATCHES = 4.0
"""Number of recent batches whose rows may still be cached."""
CORE_CACHE, CORE_SPEEDUP = 512.0 * 2**10, 8.0
"""Bytes of a core's own cache, and its bandwidth over the memory's. From `benchmarks/dlrm_lookups.py` on an AMD EPYC
(one thread)."""
_GATES = {"rnn": 1.0, "gru": 3.0, "lstm": 4.0}  # by definition


@work_of(Family.GEMM, on_host=True)
def product_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the work of a product, µs: 2·batch·m·n·k operations at the peak rate; operands and output move once.

    A product of many rows by a few columns costs as much as one by ``LEAST_COLUMNS``; a product with a vector only
    reads its matrix. With few rows the time is that of reading the weights, so at first it does not grow with the rows.
    Source: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): packing is O(mk + kn).
    """
    m, n = table.dim("m"), table.dim("n")
    columns = np.where(n > 1, np.maximum(n, np.minimum(m, LEAST_COLUMNS)), n)
    product = table.dim("batch") * m * columns * table.dim("k")
    flops = 2.0 * product * table.by_dtype(multiply_adds)
    return KernelWork(flops / _peak(table, device) / 1e6, memory_us(table.bytes_moved, device), one(table))


@work_of(Family.CONV, on_host=True)
def convolution_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the work of a convolution, µs: channels round up to whole vectors; input, weights and output move once.

    Source: Georganas et al., "Anatomy of high-performance deep learning convolutions on SIMD architectures" (2018):
    channels are in blocks of a vector's width. Their preparation has a fixed cost for every call; small convolutions
    are computed as products without it.
    """
    groups = table.dim("groups")
    inputs, outputs = (np.maximum(table.dim(name) / groups, 1.0) for name in ("in_channels", "out_channels"))
    # Vectors of depthwise kernels run along the groups.
    lanes = np.where((inputs <= 1.0) & (groups > 1.0), groups, outputs)
    padded = np.ceil(lanes / LANES) * LANES / lanes
    prepared = np.where(_of_products(table), AS_IT_STANDS, 1.0)
    return KernelWork(table.flops * padded / _peak(table, device) / 1e6, memory_us(table.bytes_moved, device), prepared)


def _of_products(table: CallTable) -> Bool:
    """Return which convolutions PyTorch computes as products."""
    window = np.prod([table.dim(f"{name}_{axis}") for name in ("kernel", "stride") for axis in "dhw"], axis=0)
    batch = table.dim("batch")
    values = np.prod([table.dim(f"in_{axis}") for axis in ("channels", "d", "h", "w")], axis=0)
    small = np.minimum(table.dim("kernel_h"), table.dim("kernel_w")) <= SMALL_KERNEL
    single = (table.dim("groups") <= 1.0) & small & (batch <= 1.0) & (values <= FEW_VALUES)
    fp32 = table.by_dtype(lambda dtype: float(dtype in ("fp32", "tf32"))) > 0
    found: Bool = fp32 & (((window <= 1.0) & (batch < FEW_BATCHES)) | single)
    return found


@work_of(Family.ATTENTION, on_host=True)
def attention_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the times of the operations at the peak rate and of the call's bytes, µs.

    A causal mask saves less than the call's own count of operations. A block of queries takes all keys up to its last
    query's. In short sequences masking costs the saved time (measured: nothing saved up to 512 tokens, 38% of 2,048).
    Source: ATen/native/cpu/FlashAttentionKernel.cpp.
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
    """Return the work of look-ups, µs: instructions per look-up and bag; rows first from memory, then from cache.

    A dense gradient first zeroes a gradient as large as the table and then finds the place of each look-up's row. A
    sparse one copies a row for each look-up.
    """
    n = len(table)
    parts = parts_of(table)
    backward = table.by_kind(lambda kind: float("_backward" in kind)) > 0
    dense = table.by_kind(lambda kind: float(kind.endswith("_backward"))) > 0
    pooled = table.by_kind(lambda kind: float(kind == "bag")) > 0
    distinct = parts.rows_of_bin.sum(1)
    of_lookup = np.select([dense, backward, pooled], [SORTED_CYCLES, COPIED_CYCLES, LOOKUP_CYCLES], ROW_CYCLES)
    cycles = parts.sum(parts.lookups * of_lookup[parts.call] + parts.bags * BAG_CYCLES
                       + dense[parts.call] * distinct * parts.columns * SUMMED_CYCLES, n)
    bandwidth = bandwidth_gbps(device) * GB_PER_S_IN_BYTES_PER_US
    # The rows of a few batches, of all tables together, stay in the smallest cache that holds them.
    kept = parts.sum(np.minimum(parts.rows * parts.tables, BATCHES * distinct) * parts.row_bytes, n)[parts.call]
    far = kept > max(device.l2_mb, device.l3_mb) * 2**20
    cycles += parts.sum(np.where(far & ~backward[parts.call], distinct, 0.0) * MISSED_CYCLES, n)
    first = np.where(kept <= CORE_CACHE, 0.0, distinct) * parts.row_bytes
    again = np.maximum(parts.lookups * parts.row_bytes - first, 0.0)
    looked_up = parts.sum((first / np.where(far, 1.0, L2_SPEEDUP) + again / CORE_SPEEDUP) / bandwidth, n)
    filled = np.maximum(parts.rows * parts.tables * parts.row_bytes - CORE_CACHE, 0.0) / bandwidth
    # A sparse gradient has a row for each look-up, also for repeated rows of the table.
    every = parts.lookups * parts.row_bytes
    copied = (np.maximum(every - CORE_CACHE, 0.0) + every / CORE_SPEEDUP) / bandwidth
    moved = np.select([dense, backward], [parts.sum(filled, n), parts.sum(copied, n)], looked_up)
    return KernelWork(cycles / device.boost_clock_mhz, moved, one(table))


@work_of(Family.INDEX, on_host=True)
def index_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the work as on a GPU, except that rows added to a table wait for their place one at a time, µs.

    An optimizer adds the rows of a sparse gradient at random places of its table.
    """
    plain = WORK[Family.INDEX](table, device)
    added = table.by_kind(lambda kind: float(kind == "index_add")) > 0
    parts = _added_to(table)
    last = max(device.l2_mb, device.l3_mb) * 2**20 / 2.0
    # Rows share pages, each row counts as its share of a page, and there are as many pages as rows need.
    on_page = np.minimum(parts.rows * parts.row_bytes / PAGE, parts.rows) / parts.rows
    waits = (_misses(parts, parts.row_bytes, CORE_CACHE) * NEAR_CYCLES + _misses(parts, on_page, PAGES) * WALK_CYCLES
             + _misses(parts, parts.row_bytes, last) * FAR_CYCLES)
    cycles = parts.lookups * np.maximum(ADDED_CYCLES, BYTE_CYCLES * parts.row_bytes) + waits
    return KernelWork(plain.compute_us + np.where(added, cycles / device.boost_clock_mhz, 0.0),
                      np.where(added, 0.0, plain.memory_us), plain.kernels)


def _added_to(table: CallTable) -> LookupParts:
    """Return the table to which each call adds rows; if the rows are unknown, they are drawn evenly."""
    inner = np.maximum(table.dim("inner"), 1.0)
    numbers = np.stack((table.dim("source_elements") / inner, inner, table.dim("elements") / inner), axis=1).astype(int)
    parts = [call.accesses[0] if call.accesses else TablePart(max(rows, 1), columns, call.dtype, added, added)
             for call, (rows, columns, added) in zip(table.calls, numbers.tolist(), strict=True)]
    return columns_of(parts, np.arange(len(parts)))


def _misses(parts: LookupParts, size: Float64, held: float) -> Float64:
    """Return the look-ups [p] whose row is not among the most popular that fit in ``held``; a row takes ``size``.

    The rows of a few batches compete for the cache; rows looked up once in a batch are new rows in the next batch.
    """
    distinct = np.maximum(parts.rows_of_bin.sum(1), 1e-9)
    kept = np.minimum(parts.rows, BATCHES * distinct)
    rows, accesses = parts.rows_of_bin[:, ::-1], parts.accesses_of_bin[:, ::-1]
    others = np.where(accesses < 2.0 * rows, (kept / distinct)[:, None], 1.0)
    sizes = rows * others * size[:, None]
    before = np.cumsum(sizes, axis=1) - sizes
    hits = np.clip((held - before) / np.maximum(sizes, 1e-9), 0.0, 1.0) * accesses
    return np.where(kept * size <= held, 0.0, np.maximum(parts.lookups - hits.sum(1), 0.0))


@work_of(Family.TRANSFER, on_host=True)
def transfer_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the work as on a GPU, except that reading a single number costs no transfer, µs."""
    plain = WORK[Family.TRANSFER](table, device)
    there = table.bytes_moved <= NUMBER_BYTES
    return KernelWork(plain.compute_us, np.where(there, 0.0, plain.memory_us),
                      np.where(there, NUMBER_SHARE, plain.kernels))


@work_of(Family.REDUCTION, Family.SOFTMAX, Family.NORM, on_host=True)
def rows_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the time to move each byte once, for any number of rows, µs."""
    return KernelWork(np.zeros(len(table)), memory_us(table.bytes_moved, device), one(table))


@work_of(Family.RECURRENT, on_host=True)
def recurrent_on_host(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the work of a recurrent network, µs: steps run one after another and each reads the recurrent weights."""
    gates = table.by_kind(lambda kind: _GATES.get(kind.split("_")[0], 1.0))
    steps = table.dim("sequence") * table.dim("layers") * table.dim("directions")
    weights = gates * table.dim("hidden") ** 2 * table.item_bytes()
    moved = steps * memory_us(weights, device) + memory_us(table.bytes_moved, device)
    return KernelWork(table.flops / _peak(table, device) / 1e6, moved, steps)


def _products(at: int, kind: str) -> float:
    return float(PRODUCTS[kind.rsplit("_", 1)[1]][at])


def _peak(table: CallTable, device: DeviceSpec) -> Float64:
    return table.by_dtype(lambda dtype: peak_tflops(device, dtype, matrix=True))
