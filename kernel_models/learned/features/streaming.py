"""Features of everything that device memory bounds: bytes, elements, and how they lie and fill the multiprocessors."""

from __future__ import annotations

import numpy as np

from kernel_models.learned.columns import Columns
from kernel_models.learned.features.recipe import FLOOR_US, Described, Figures, parts, stack

_THREADS = 2048
"""Threads of a multiprocessor (NVIDIA, compute capability 7.0 to 9.0); a full wave of the simplest kernels."""


def streaming_features(columns: Columns, figures: Figures) -> Described:
    """All features: logarithms of every size, bytes, FLOPs, waves, and alignment of the innermost size."""
    rate, size = figures.by_row(columns)
    moved = np.maximum(columns.bytes_read + columns.bytes_written, 1.0)
    memory_us = moved / (figures.bandwidth_gbps * 1e3)
    baseline = columns.flops / rate + memory_us + FLOOR_US
    elements = np.maximum(moved / size, 1.0)
    waves = elements / (figures.sm_count * _THREADS)
    dims = np.maximum(columns.dims, 1)
    logs = np.log2(dims)
    features = [
        columns.code, np.log2(moved), np.log2(columns.bytes_read + 1), np.log2(columns.bytes_written + 1),
        np.log2(columns.flops + 1), np.log2(baseline), np.log2(waves), np.minimum(waves, 16) % 1,
        moved / (figures.l2_mb * 2.0**20), *logs.T,
        *(np.log2(np.gcd(column, 1024)) for column in dims.T),
        *(column / (parts(column, figures.sm_count) * figures.sm_count) for column in dims[:, :2].T),
    ]
    if dims.shape[1] > 1:
        features += [logs[:, 0] + logs[:, 1], logs[:, 0] - logs[:, 1]]
    return Described(stack(features), baseline)
