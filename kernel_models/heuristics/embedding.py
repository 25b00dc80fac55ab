"""Embedding look-ups on a GPU: rows in whole sectors, caches, and the latency of a bag's consecutive look-ups.

A device has many bags in flight and each reads its rows one after another, so a look-up kernel takes the longest of

    traffic      Σ look-ups · sectors of a row / bandwidth; rows looked up again move faster if a cache kept them.
    The longest bag     look-ups of it · latency of one.
    All bags     Σ look-ups · latency / bags in flight.

Quantized rows also cost arithmetic. Rows of a table in the host's memory cross the host's link instead, in whole lines
and after a longer wait. If the device keeps a cache of such a table, the missing rows cross the link once per batch,
while others go back. Neither was measured: the interval is wide (``kernel_models.spreads.HOST_ROWS``).

The gradient with a fused optimizer sorts the look-ups by row and sums each row's gradients: kernel after kernel, each
with its traffic and its waits. Source: FBGEMM's table-batched embedding (kernels and grids as recorded on V100 and
A100), its ``lru_cache_populate``; cache by reuse: Lin et al., 2024 (arXiv 2404.12674).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.work import (
    GB_PER_S_IN_BYTES_PER_US,
    L2_SPEEDUP,
    SECTOR_BYTES,
    CallTable,
    KernelWork,
    bandwidth_gbps,
    memory_us,
    peak_tflops,
    sector_bytes,
    usable_cache_bytes,
    vector_us,
    work_of,
)
from kernel_models.op_call import Family, TablePart
from tracer.arrays import Bool, Float64, Int64
from tracer.lookup_data.tables import QUANTIZED, REUSE_BINS, REUSE_OF_BIN, stored_row_bytes

HIT_CYCLES, MISS_CYCLES = 193.0, 1029.0
"""Cycles from a load to its value, from the last-level cache and from memory. Rows are spread over gigabytes, so the
address of their page is not cached. Source: Jia et al., "Dissecting the NVIDIA Volta GPU architecture via
microbenchmarking" (2018, arXiv 1804.06826), used for every GPU."""
LOADS_BEFORE = 2.0
"""Consecutive loads of a bag before its first row: the bag's start, and the first index. Set, not measured."""
LOADS_OF_UPDATE = 6.0
"""Consecutive loads of a row's update: its look-ups' range, their places, gradient, weights, state. Set, not
measured."""
WARPS = 48.0
"""Warps of look-up kernels on a multiprocessor at a time: of 64, those for which registers suffice."""
VECTOR = 4.0
"""Columns that a thread reads at a time: FBGEMM's kernels give a bag at least 8 threads of a warp's 32."""
ONE_BLOCK = 4096.0
"""Most look-ups that one block sorts by itself; the whole device sorts more, pass after pass."""
RADIX_BITS = 8.0
"""Most bits of an index sorted in one pass (CUB's radix sort)."""
INDEX_BYTES, GRADIENT_BYTES, WEIGHT_BYTES = 8.0, 4.0, 4.0
FUSED_KERNELS, DENSE_KERNELS = 28.0, 8.0
"""Kernel floors of a gradient in addition to its sort's passes. Fused: ten kernels, mostly of one or a few blocks that
wait for each other. Ranks 0 to 3 of the recorded DLRM step (V100) need as much. Dense: PyTorch's own kernels."""
LONG_ROW = 32.0
"""Look-ups of one row from which the 32 warps of a block, not one warp, sum its gradients, 1,024 a block."""
DENSE_PIECE = 10.0
"""Look-ups of one row whose gradients a thread of PyTorch's dense kernel adds (ATen, EmbeddingBackwardKernel.cu)."""
UNPACKING = {"int8": 3.0, "int4": 5.0}
"""Operations to make a float of a stored element: convert, and a multiply-add; for int4 also shift and mask."""
INFERRED_BYTES = 2.0
"""Bytes of an element of a bag of quantized rows if not recorded: FBGEMM's inference returns fp16 by default."""
HOST_LINE, HOST_LATENCY_US = 128.0, 1.5
"""Least bytes of a load over the host's link (a GPU's cache line), and its latency. Set, not measured: of the order of
PCIe and NVLink-C2C. The rate is the link's, times the share of a bandwidth that look-ups reach (0.8; long reads over
NVLink-C2C reach 375 of 450 GB/s: Schieffer et al., 2024, arXiv 2407.07850)."""
CACHE_LOOKUP_BYTES, CACHE_KERNELS = 350.0, 20.0
"""Costs of a cache in the device's memory: bytes per look-up, and kernels, most of them the sort's. Bytes: the index is
numbered among those of all tables (8 read, 8 written) and sorted (4 passes of 16). Its set of 32 ways of 8 bytes is
read, its place written and read. Counted in FBGEMM's ``lru_cache_populate`` and ``lxu_cache_lookup``."""


@dataclass(frozen=True, slots=True)
class LookupParts:
    """Parts of tables of n calls, as columns over p parts; histograms are [p, 17] of rows and of accesses.

    ``call`` [p] is the call of each part; a part is ``tables`` equal tables. ``out_bytes``: of an element of a bag.
    ``weighted``: 1 where each look-up has a weight, whose gradient needs a pass of its own. ``gradient_bytes``: of an
    element of a bag's gradient. ``unpacking``: operations per element. ``far``: 1 where rows are read in the host's
    memory; ``cached``: 1 where the device keeps some of them. ``missed`` rows cross the host's link, ``written_back``
    rows go back; ``host_state_bytes`` of a row's optimizer state are on the host.
    """

    call: Int64
    tables: Float64
    rows: Float64
    columns: Float64
    lookups: Float64
    bags: Float64
    longest: Float64
    row_bytes: Float64
    state_bytes: Float64
    out_bytes: Float64
    weighted: Float64
    rows_of_bin: Float64
    accesses_of_bin: Float64
    gradient_bytes: Float64
    unpacking: Float64
    far: Float64
    cached: Float64
    missed: Float64
    written_back: Float64
    host_state_bytes: Float64

    def sum(self, values: Float64, calls: int) -> Float64:
        """Return the sum over the parts of each call [n]."""
        return np.bincount(self.call, weights=values, minlength=calls).astype(np.float64)

    def most(self, values: Float64, calls: int) -> Float64:
        """Return the largest value among the parts of each call [n]."""
        found = np.zeros(calls)
        np.maximum.at(found, self.call, values)
        return found


def even_distinct(lookups: Float64, table_rows: Float64) -> Float64:
    """Return the number of distinct rows among look-ups, all rows being equally likely: T·(1 − (1 − 1/T)^lookups)."""
    even = -table_rows * np.expm1(lookups * np.log1p(-1.0 / np.maximum(table_rows, 1.0 + 1e-9)))
    return np.minimum(np.minimum(even, table_rows), lookups)


@work_of(Family.EMBEDDING)
def embedding_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the work of look-ups and their gradients, µs: waits count as arithmetic, which overlaps with traffic."""
    parts = parts_of(table)
    backward = table.by_kind(lambda kind: float("backward" in kind)) > 0
    fused = table.by_kind(lambda kind: float(kind.endswith("_fused"))) > 0
    sparse = table.by_kind(lambda kind: float(kind.endswith("_sparse"))) > 0
    n = len(table)
    ahead = KernelWork(*_combined(table, parts, forward_terms(parts, device), device), np.ones(n))
    if not backward.any():
        return ahead
    sorted_ = _gradient(table, parts, device, fused)
    copied = KernelWork(np.zeros(n), memory_us(table.bytes_moved, device), np.full(n, 2.0))
    return KernelWork(*(np.where(backward, np.where(sparse, copy, sort), look) for look, sort, copy in (
        (getattr(one, part.name) for one in (ahead, sorted_, copied)) for part in fields(KernelWork))))


@dataclass(frozen=True, slots=True)
class LookupTerms:
    """The terms that each part adds to a kernel over several parts, µs [p], at published rates.

    A kernel streams the sum of ``stream_us``, and waits for the sum of ``flight_us``, at least for the largest
    ``wait_us``. The terms depend on which parts share a cache.
    """

    stream_us: Float64
    flight_us: Float64
    wait_us: Float64


def forward_terms(parts: LookupParts, device: DeviceSpec) -> LookupTerms:
    """Return the terms of a look-up: it reads rows in whole sectors, indices and bags' starts, and writes sums of bags;
    a device's cache of host rows adds its traffic."""
    row = _sectors(parts)
    touched = row * (1.0 - parts.far)
    hits = _hits(parts, touched, device) * (1.0 - parts.far)
    latency = _latency_us(parts, hits, device)
    moved = touched * (hits / L2_SPEEDUP + parts.lookups - hits)
    moved += INDEX_BYTES * (parts.lookups + parts.bags) + parts.out_bytes * parts.bags * parts.columns
    moved += WEIGHT_BYTES * parts.weighted * parts.lookups
    moved += parts.cached * (CACHE_LOOKUP_BYTES * parts.lookups + row * (parts.missed + parts.written_back))
    before = (LOADS_BEFORE * MISS_CYCLES / device.boost_clock_mhz
              + parts.cached * (CACHE_KERNELS * device.kernel_floor_us + HOST_LATENCY_US))
    unpacked = parts.unpacking * parts.lookups * parts.columns / peak_tflops(device, "fp32", matrix=False) / 1e6
    linked = _link_us(parts.missed + parts.written_back, parts.row_bytes, device)
    return LookupTerms(moved / _bandwidth(device) + linked,
                       np.maximum(parts.lookups * latency / _in_flight(parts, device), unpacked),
                       before + parts.longest * latency)


def gradient_terms(parts: LookupParts, device: DeviceSpec, fused: Bool, alone: Bool, passes: Float64) -> LookupTerms:
    """Return the terms of a gradient: look-ups are numbered, sorted by row and counted; each row's gradients are summed
    and the row updated.

    ``fused`` [p] writes the rows and the optimizer's state, else a gradient as large as the table, which is zeroed
    before; ``alone``, ``passes`` [p]: see ``sorting``. Waits: numbering runs along each bag; the gradients of a
    frequent row are read one after another, up to 32 by a warp, more by a block. Dense gradients are summed in pieces
    of 10.
    """
    stored = parts.gradient_bytes * parts.columns * parts.bags
    n = int(parts.call.max(initial=-1)) + 1
    kept = np.minimum(1.0, usable_cache_bytes(device) / np.maximum(parts.sum(stored, n), 1.0))[parts.call]
    again = np.maximum(parts.lookups - parts.bags, 0.0) * kept
    gradients = parts.gradient_bytes * parts.columns * (again / L2_SPEEDUP + parts.lookups - again)
    touched, distinct = _sectors(parts) * (1.0 - parts.far), parts.rows_of_bin.sum(1)
    state = sector_bytes(np.sign(parts.state_bytes), parts.state_bytes, SECTOR_BYTES)
    updated = 2.0 * distinct * (touched + state)
    written = np.where(fused, updated, 2.0 * parts.rows * parts.tables * parts.row_bytes)
    # Bytes a look-up: numbering reads 8, writes 8 and 4; a sort pass reads and writes 12; counting reads 8, writes 12.
    ordered = parts.lookups * (20.0 + np.where(alone, 24.0, 8.0 + 24.0 * passes) + 24.0)
    latency = _latency_us(parts, np.zeros(len(parts.call)), device)
    often = _most_accesses(parts)
    of_warp = np.minimum(often, np.where(fused, LONG_ROW, DENSE_PIECE))
    of_block = np.minimum(often, LONG_ROW**2) / LONG_ROW * (often > LONG_ROW) * fused
    numbering = 2.0 * HIT_CYCLES / device.boost_clock_mhz * parts.longest
    # Weights are read with the gradients they scale; their own gradients need gradients and rows, and are written.
    weights = parts.weighted * (gradients + parts.lookups * (touched + 2.0 * WEIGHT_BYTES))
    # Rows and state in the host's memory are read and written over its link; the weights' gradients also read rows.
    linked = _link_us(parts.far * (2.0 * distinct * fused + parts.weighted * parts.lookups), parts.row_bytes, device)
    linked += _link_us(2.0 * distinct * fused * np.sign(parts.host_state_bytes), parts.host_state_bytes, device)
    return LookupTerms((gradients + weights + written + ordered) / _bandwidth(device) + linked,
                       parts.lookups * latency / _in_flight(parts, device),
                       numbering + (of_warp + of_block + LOADS_OF_UPDATE) * latency)


def sorting(lookups: Float64, rows: Float64) -> tuple[Bool, Float64]:
    """Return whether one block sorts the look-ups by itself, and the passes of a sort by row among ``rows`` [n]."""
    alone: Bool = lookups <= ONE_BLOCK
    return alone, np.ceil(np.log2(np.maximum(rows, 2.0)) / RADIX_BITS)


def gradient_kernels(fused: Bool, alone: Bool, passes: Float64) -> Float64:
    """Return the cost of a gradient's kernels, in kernel floors [n]."""
    return np.where(fused, FUSED_KERNELS, DENSE_KERNELS) + np.where(alone, passes, 3.0 * passes + 4.0)


def _combined(table: CallTable, parts: LookupParts, terms: LookupTerms, device: DeviceSpec) -> tuple[Float64, Float64]:
    n = len(table)
    waits = np.maximum(parts.most(terms.wait_us, n), parts.sum(terms.flight_us, n))
    return np.maximum(vector_us(table, device), waits), parts.sum(terms.stream_us, n)


def _gradient(table: CallTable, parts: LookupParts, device: DeviceSpec, fused: Bool) -> KernelWork:
    n = len(table)
    alone, passes = sorting(parts.sum(parts.lookups, n), parts.sum(parts.rows * parts.tables, n))
    terms = gradient_terms(parts, device, fused[parts.call], alone[parts.call], passes[parts.call])
    return KernelWork(*_combined(table, parts, terms, device), gradient_kernels(fused, alone, passes))


def parts_of(table: CallTable) -> LookupParts:
    """Return the parts of the calls' tables; a call without known tables has equal ones with evenly drawn rows."""
    place = [i for i, call in enumerate(table.calls) for _ in call.accesses]
    told = columns_of([part for call in table.calls for part in call.accesses], np.array(place, np.int64))
    plain = np.array([i for i, call in enumerate(table.calls) if not call.accesses], np.int64)
    lookups, bags, tables = (table.dim(name)[plain] for name in ("lookups", "bags", "tables"))
    rows, columns, size = table.dim("table_rows")[plain], table.dim("columns")[plain], table.item_bytes()[plain]
    dtypes = [table.calls[i].dtype for i in plain]
    row_bytes = np.array([stored_row_bytes(dtype, wide) if dtype in QUANTIZED else wide * element
                          for dtype, wide, element in zip(dtypes, columns, size, strict=True)], np.float64)
    out_bytes = np.where([dtype in QUANTIZED for dtype in dtypes], INFERRED_BYTES, size)
    unpacking = np.array([UNPACKING.get(dtype, 0.0) for dtype in dtypes], np.float64)
    pooled = (table.by_kind(lambda kind: float(kind.startswith("bag"))) > 0)[plain]
    longest = np.where(pooled, np.maximum(lookups / bags, 1.0) * unequal(tables), 1.0)
    of_bin, none = np.zeros((2, len(plain), REUSE_BINS)), np.zeros(len(plain))
    of_bin[0, :, 0], of_bin[1, :, 0] = even_distinct(lookups / tables, rows) * tables, lookups
    untold = LookupParts(plain, tables, rows, columns, lookups, bags, longest, row_bytes,
                         np.full(len(plain), 4.0), out_bytes,
                         np.array(["weighted" in table.calls[i].flags for i in plain], np.float64),
                         of_bin[0], of_bin[1], np.full(len(plain), GRADIENT_BYTES), unpacking, none, none, none, none,
                         none)
    return LookupParts(*(np.concatenate([getattr(told, one.name), getattr(untold, one.name)])
                         for one in fields(LookupParts)))


def columns_of(parts: Sequence[TablePart], call: Int64) -> LookupParts:
    """Return table parts as columns; ``call`` [p] is the call of each part."""
    of_bin = np.zeros((2, len(parts), REUSE_BINS))
    for i, part in enumerate(parts):
        if part.reuse:
            of_bin[1, i] = part.lookups * np.array(part.reuse)
    of_bin[0] = of_bin[1] / REUSE_OF_BIN
    numbers = np.array([(part.rows, part.columns, part.lookups, part.bags, _longest(part), part.row_bytes,
                         part.state_bytes, part.output_bytes, part.weighted, not part.reuse,
                         UNPACKING.get(part.dtype, 0.0), part.location == "uvm", part.location == "uvm_cached",
                         part.missed, part.host_state_bytes, part.trained) for part in parts],
                       np.float64).reshape(len(parts), 16)
    (rows, columns, lookups, bags, longest, row_bytes, state_bytes, out_bytes, weighted, even, unpacking, far, cached,
     missed, host_state_bytes, trained) = numbers.T
    of_bin[0, :, 0] += even * even_distinct(lookups, rows)
    of_bin[1, :, 0] += even * lookups
    return LookupParts(call, np.ones(len(parts)), rows, columns, lookups, bags, longest, row_bytes, state_bytes,
                       out_bytes, weighted, of_bin[0], of_bin[1], out_bytes, unpacking, far, cached, missed,
                       cached * trained * missed, host_state_bytes)


def _longest(part: TablePart) -> float:
    return min(part.longest or max(part.lookups / max(part.bags, 1), 1.0), part.lookups)


def unequal(tables: Float64) -> Float64:
    """Return the assumed length of the longest bag of n tables over the mean: H_n = 1 + … + 1/n.

    Bags of published models differ from table to table by two orders of magnitude (of MLPerf's DLRM from 1 to 100). The
    largest of n lengths drawn from an exponential law is H_n times their mean.
    """
    return np.log(tables) + 0.5772 + 0.5 / tables - np.where(tables < 1.5, 0.0772, 0.0)


def _hits(parts: LookupParts, touched: Float64, device: DeviceSpec) -> Float64:
    """Return how many look-ups of each part find their row in the cache [p].

    Tables of a call share the cache. It holds the most frequent rows; the first look-up of a row misses.
    """
    p, bins = parts.rows_of_bin.shape
    rows, accesses = parts.rows_of_bin.ravel(), parts.accesses_of_bin.ravel()
    call, size = np.repeat(parts.call, bins), rows * np.repeat(touched, bins)
    often = accesses / np.maximum(rows, 1e-12)
    order = np.lexsort((-often, call))
    total = np.cumsum(size[order])
    ends = np.flatnonzero(np.diff(call[order], append=-1))
    start = np.zeros(len(total))
    start[ends[:-1] + 1] = total[ends[:-1]]
    before = total - size[order] - np.maximum.accumulate(start)
    fits = np.clip((usable_cache_bytes(device) - before) / np.maximum(size[order], 1e-9), 0.0, 1.0)
    hits = np.empty(p * bins)
    hits[order] = fits * np.maximum(accesses[order] - rows[order], 0.0)
    return hits.reshape(p, bins).sum(1)


def _sectors(parts: LookupParts) -> Float64:
    """Return the bytes of memory traffic for a row [p]."""
    return sector_bytes(np.ones(len(parts.call)), parts.row_bytes, SECTOR_BYTES)


def _link_us(rows: Float64, row_bytes: Float64, device: DeviceSpec) -> Float64:
    """Return the time of rows over the host's link, in whole lines, µs [p]."""
    return sector_bytes(rows, row_bytes, HOST_LINE) / (device.host_gbps * GB_PER_S_IN_BYTES_PER_US)


def _latency_us(parts: LookupParts, hits: Float64, device: DeviceSpec) -> Float64:
    """Return the mean time from a look-up to its row over a part's look-ups, µs [p]."""
    share = hits / np.maximum(parts.lookups, 1.0)
    near = (share * HIT_CYCLES + (1.0 - share) * MISS_CYCLES) / device.boost_clock_mhz
    return np.where(parts.far > 0, HOST_LATENCY_US, near)


def _in_flight(parts: LookupParts, device: DeviceSpec) -> Float64:
    """Return how many look-ups are in flight on the device at a time [p]."""
    threads = np.clip(np.ceil(parts.columns / VECTOR), 8.0, 32.0)
    return device.sm_count * WARPS * np.floor(32.0 / threads)


def _most_accesses(parts: LookupParts) -> Float64:
    """Return the look-ups of the most popular row, by the histogram's last bin that is not empty [p]."""
    often = np.where(parts.rows_of_bin > 0.5, parts.accesses_of_bin / np.maximum(parts.rows_of_bin, 1e-12), 0.0)
    return np.minimum(np.maximum(often.max(1), 1.0), np.maximum(parts.lookups, 1.0))


def _bandwidth(device: DeviceSpec) -> float:
    return bandwidth_gbps(device) * GB_PER_S_IN_BYTES_PER_US
