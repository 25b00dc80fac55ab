"""Features of a matrix product: sizes, work, and how its tiles fill the multiprocessors.

A library cuts the results into tiles (Tm × Tn), each computed by one multiprocessor, and works on as many at a time as
there are multiprocessors: a wave. ``tiles = ⌈m/Tm⌉·⌈n/Tn⌉·batch``, ``waves = ⌈tiles/SMs⌉``, and the share of the last
wave that is in use is lost time. Where there are few tiles, the contraction is split among more of them. Which tile a
library takes is not known; the trees see the counts of the usual ones. Source: NVIDIA, "Matrix Multiplication
Background User's Guide".
"""

from __future__ import annotations

import numpy as np

from kernel_models.learned.columns import Columns
from kernel_models.learned.features.recipe import FLOOR_US, Described, Figures, parts, stack
from tracer.arrays import Float64, Int64

# Tile and the share of peak that its inner loop sustains, for an estimate of a tile's own time only.
_MAIN = ((64, 64, .45), (64, 128, .62), (128, 64, .62), (128, 128, .75), (64, 256, .75), (256, 64, .7),
         (128, 256, .85), (256, 128, .85))
_OTHERS = ((64, 96), (128, 192), (192, 128), (256, 192), (64, 192), (128, 96), (64, 16), (64, 32), (32, 64),
           (16, 128), (128, 32), (64, 8))
_SPLITS = (1, 2, 4, 8)
_SPLIT_US = 0.9
"""Cost of adding the parts of a split contraction beside its traffic, about one short kernel's work, µs."""
_STEP = 64
"""Contraction steps of a tile's inner loop are a multiple of this."""
_L2_OVER_MEMORY = 3.0
"""Tiles share operands in L2, which is about this many times faster than device memory (NVIDIA A100, H100)."""
_WAVES_SEEN = 64


def work(columns: Columns, figures: Figures) -> tuple[Float64, Float64, Float64, Float64, Float64, Float64]:
    """Element bytes, FLOPs, bytes of A, B and results, and the baseline in µs: compute + memory + floor."""
    batch, m, n, k = columns.dims.T
    rate, size = figures.by_row(columns)
    flops = 2.0 * batch * m * n * k
    # Eight-bit products write sixteen bits.
    a, b, out = size * batch * m * k, size * batch * n * k, np.maximum(size, 2.0) * batch * m * n
    baseline = flops / rate + (a + b + out) / (figures.bandwidth_gbps * 1e3) + FLOOR_US
    return size, flops, a, b, out, baseline


def baseline_us(columns: Columns, figures: Figures) -> Float64:
    """The baseline alone, µs [n]."""
    return work(columns, figures)[-1]


def gemm_features(columns: Columns, figures: Figures) -> Described:
    """All features."""
    batch, m, n, k = columns.dims.T
    rate, _ = figures.by_row(columns)
    size, flops, a, b, out, baseline = work(columns, figures)
    moved, memory_rate = a + b + out, figures.bandwidth_gbps * 1e3
    log_m, log_n, log_k, log_batch = (np.log2(x) for x in (m, n, k, batch))
    features = [
        log_m, log_n, log_k, log_batch, columns.code, np.log2(flops), np.log2(moved), np.log2(flops / moved),
        log_m + log_n + log_batch, np.log2(baseline), np.log2(flops / rate / (moved / memory_rate)),
        np.log2(a), np.log2(b), np.log2(out), log_k - log_n, log_m - log_n,
        np.gcd(m, 256), np.gcd(n, 256), np.gcd(k, 256), n / (parts(n, 128) * 128), parts(k, _STEP),
    ]
    features += [m / (parts(m, unit) * unit) for unit in (16, 64, 128, 256)]
    estimates = []
    for high, wide, share in _MAIN:
        tiles = batch * parts(m, high) * parts(n, wide)
        waves = parts(tiles, figures.sm_count)
        estimates.append(_tile_us(tiles, high, wide, k, size, rate * share / figures.sm_count, memory_rate, out,
                                  figures.sm_count))
        features += [np.log2(tiles), tiles / (waves * figures.sm_count), np.minimum(waves, _WAVES_SEEN),
                     np.log2(estimates[-1] + 1)]
    best = np.minimum.reduce(estimates)
    in_cache = moved < figures.l2_mb * 2.0**20
    memory_us = moved / memory_rate / np.where(in_cache, 2, 1)
    features += [np.log2(best + 1), np.log2(np.maximum(best, memory_us) + FLOOR_US)]
    for high, wide in _OTHERS:
        tiles = batch * parts(m, high) * parts(n, wide)
        features += [np.log2(tiles), tiles / (parts(tiles, figures.sm_count) * figures.sm_count)]
    for high, wide in ((64, 64), (128, 128), (128, 256)):
        tiles = batch * parts(m, high) * parts(n, wide)
        split = np.clip(figures.sm_count // tiles, 1, parts(k, 128))
        features += [np.log2(split), np.log2(parts(k, split)), tiles * split / figures.sm_count]
    return Described(stack(features), baseline)


def _tile_us(
    tiles: Int64, high: int, wide: int, k: Int64, size: Float64, rate: Float64, memory_rate: float, out: Float64,
    sm_count: int,
) -> Float64:
    """Time of the fastest split of the contraction: waves × the longer of a tile's computing and its loads, µs."""
    fastest = np.full(len(tiles), np.inf)
    for split in _SPLITS:
        pieces = tiles * split
        steps = parts(parts(k, split), _STEP) * float(_STEP)
        compute = 2.0 * high * wide * steps / rate
        load = (high + wide) * steps * size * np.minimum(pieces, sm_count) / (memory_rate * _L2_OVER_MEMORY)
        time = parts(pieces, sm_count) * np.maximum(compute, load)
        if split > 1:
            time = time + _SPLIT_US + out * split / memory_rate
        fastest = np.minimum(fastest, time)
    return fastest


def gemm_brief(columns: Columns, figures: Figures) -> Described:
    """A few features that cost little: for a distilled model, which copies another's predictions."""
    batch, m, n, k = columns.dims.T
    _, flops, a, b, out, baseline = work(columns, figures)
    log_m, log_n, log_k = np.log2(m), np.log2(n), np.log2(k)
    features = [log_m, log_n, log_k, batch, columns.code, log_m + log_n, log_n + log_k, log_m + log_k,
                log_m + log_n + log_k, a + b + out, flops / (a + b + out), m / (parts(m, 128) * 128)]
    for high, wide in ((128, 128), (128, 256), (64, 64), (256, 128)):
        tiles = batch * parts(m, high) * parts(n, wide)
        features += [tiles, tiles / (parts(tiles, figures.sm_count) * figures.sm_count)]
    return Described(stack(features), baseline)
