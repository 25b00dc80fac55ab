"""Embedding lookups: bytes of rows in whole sectors, with the rows that the cache already holds costing less."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.call_table import CallTable
from kernel_models.heuristics.curves import (
    GB_PER_S_IN_BYTES_PER_US,
    L2_SPEEDUP,
    memory_us,
    sector_bytes,
    usable_cache_bytes,
)
from kernel_models.heuristics.streaming import SECTOR_BYTES
from kernel_models.heuristics.sustained import bandwidth_gbps
from kernel_models.heuristics.work import KernelWork, vector_us, work_of
from kernel_models.op_call import Family
from tracer.arrays import Float64

REUSE_BINS = 17
"""Bins of a reuse histogram: accesses of a distinct row, 1, 2, 3–4, 5–8, …, more than 32768 (Lin et al., 2024)."""
BACKWARD_KERNELS = 10.0
"""Kernels of a gradient: indices made linear, sorted by radix, run lengths, then the rows (FBGEMM's fused lookups)."""
_REUSE_OF_BIN = np.array([1.0] + [0.75 * 2.0 ** b for b in range(1, REUSE_BINS)])
REUSE_FLAG = "reuse="


def reuse_flag(histogram: Sequence[float]) -> str:
    """The flag of a call that carries a reuse histogram: shares of lookups by how often their row is looked up.

    Raises:
        ValueError: it has not ``REUSE_BINS`` shares, or they are negative or add up to nothing.
    """
    shares = np.asarray(histogram, np.float64)
    if shares.shape != (REUSE_BINS,) or not np.isfinite(shares).all() or (shares < 0).any() or shares.sum() <= 0:
        raise ValueError(f"a reuse histogram is {REUSE_BINS} shares, none negative, not all zero")
    return REUSE_FLAG + ":".join(f"{share:.6g}" for share in shares / shares.sum())


def distinct_rows(lookups: Float64, table_rows: Float64, shares: Float64 | None = None) -> Float64:
    """Rows that lookups touch at all [n].

    Without a histogram rows are drawn evenly: T·(1 − (1 − 1/T)^lookups). With one, ``shares`` [n, 17] of the lookups
    by reuse factor, it is lookups·Σ share/reuse. Never more than the table has, or than there are lookups.
    Source: Lin et al., 2024 (arXiv 2404.12674), section on data-distribution-aware embeddings.
    """
    even = -table_rows * np.expm1(lookups * np.log1p(-1.0 / np.maximum(table_rows, 1.0 + 1e-9)))
    if shares is not None:
        told = shares.sum(axis=1) > 0
        even = np.where(told, lookups * (shares / _REUSE_OF_BIN).sum(axis=1), even)
    return np.minimum(np.minimum(even, table_rows), lookups)


@work_of(Family.EMBEDDING)
def embedding_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Rows looked up and bags written, µs.

    A row costs its whole sectors. Of a lookup's rows, the first access comes from memory; a later one hits the cache
    with probability min(1, usable cache / distinct bytes). Hits move ``L2_SPEEDUP`` times faster. Outputs, and what
    else a call says it moves (indices, offsets, gradients), stream. Source: Lin et al., 2024 (arXiv 2404.12674).
    """
    lookups, tables = table.dim("lookups"), table.dim("tables")
    row_bytes = table.dim("columns") * table.item_bytes()
    touched = sector_bytes(np.ones(len(table)), row_bytes, SECTOR_BYTES)
    distinct = distinct_rows(lookups / tables, table.dim("table_rows"), _shares(table)) * tables
    hit = (1.0 - distinct / lookups) * np.minimum(1.0, usable_cache_bytes(device) / np.maximum(distinct * touched, 1.0))
    bandwidth = bandwidth_gbps(device) * GB_PER_S_IN_BYTES_PER_US
    rows_us = lookups * touched * (hit / L2_SPEEDUP + (1.0 - hit)) / bandwidth
    other = np.maximum(table.bytes_moved - np.minimum(lookups * row_bytes, table.bytes_read), 0.0)
    kernels = table.by_kind(lambda kind: BACKWARD_KERNELS if "backward" in kind else 1.0)
    return KernelWork(vector_us(table, device), rows_us + memory_us(other, device), kernels)


def _shares(table: CallTable) -> Float64 | None:
    """Reuse histograms of the calls that carry one [n, 17]; zeros for the others."""
    rows = [(i, flag) for i, call in enumerate(table.calls) for flag in call.flags if flag.startswith(REUSE_FLAG)]
    if not rows:
        return None
    shares = np.zeros((len(table), REUSE_BINS))
    for i, flag in rows:
        values = flag.removeprefix(REUSE_FLAG).split(":")
        if len(values) == REUSE_BINS:
            shares[i] = [float(value) for value in values]
    return shares
