"""Features of scaled-dot-product attention: its two products over pairs of positions, and its blocks over the SMs.

Pairs that count: q·kv, the triangle of them under a causal mask, and at most a window's width for each query. FLOPs =
2·(head_dim + v_head_dim)·pairs·batch·heads, backward 2·(3·head_dim + 2·v_head_dim) (Dao, "FlashAttention-2", 2023). A
block is a tile of queries of one head of one sequence; blocks over multiprocessors make waves, as in a matrix product.
"""

from __future__ import annotations

import numpy as np

from kernel_models.learned.columns import Columns
from kernel_models.learned.features.recipe import FLOOR_US, Described, Figures, parts, stack
from tracer.arrays import Float64

_BLOCK_ROWS = (64, 128, 192)
_KEY_ROWS = 128


def _pairs(columns: Columns, figures: Figures) -> Float64:
    """Query and key positions that meet, of one head of one sequence."""
    _, _, _, q, kv, _, _, window = columns.dims.T.astype(np.float64)
    causal = np.array(figures.causal)[columns.code]
    # The last query sees all keys, the first one kv − q + 1, of which only the last `reach`.
    first = np.maximum(kv - q + 1, 1) if causal.any() else kv
    reach = np.where(window > 0, np.minimum(window, kv), kv)
    short = np.clip(reach - first, 0, q)  # queries that see less than that
    return np.where(causal, short * (first + (short - 1) / 2) + (q - short) * reach, q * reach)


def work(columns: Columns, figures: Figures) -> tuple[Float64, Float64, Float64, Float64]:
    """Pairs, FLOPs, bytes, and the baseline in µs: compute + memory + floor."""
    batch, heads, kv_heads, q, kv, width, v_width, _ = columns.dims.T.astype(np.float64)
    rate, size = figures.by_row(columns)
    pairs = _pairs(columns, figures)
    backward = np.array(figures.backward)[columns.code]
    flops = 2.0 * np.where(backward, 3 * width + 2 * v_width, width + v_width) * pairs * batch * heads
    moved = size * np.where(backward, 2, 1) * batch * (heads * q + kv_heads * kv) * (width + v_width)
    return pairs, flops, moved, flops / rate + moved / (figures.bandwidth_gbps * 1e3) + FLOOR_US


def attention_features(columns: Columns, figures: Figures) -> Described:
    """All features."""
    batch, heads, kv_heads, q, kv, width, v_width, window = columns.dims.T
    rate, size = figures.by_row(columns)
    pairs, flops, moved, baseline = work(columns, figures)
    memory_us = moved / (figures.bandwidth_gbps * 1e3)
    group = heads / kv_heads
    features = [
        columns.code, np.log2(batch), np.log2(q), np.log2(kv), np.log2(heads), np.log2(kv_heads), np.log2(group),
        width, v_width, window, np.log2(pairs), np.log2(flops), np.log2(moved), np.log2(flops / moved),
        np.log2(baseline), np.log2(flops / rate / memory_us), np.log2(batch * heads), np.log2(batch * kv_heads),
        np.log2(batch * q), np.log2(batch * q * heads), np.where(window > 0, np.log2(kv / np.maximum(window, 1)), -20),
        width / (parts(width, 64) * 64), np.log2(size * batch * kv_heads * kv * (width + v_width)),
        np.log2(size * batch * heads * q * (width + v_width)), np.gcd(q, 128), np.gcd(heads, 64),
    ]
    for rows in _BLOCK_ROWS:
        blocks = batch * heads * parts(q, rows)
        waves = parts(blocks, figures.sm_count)
        features += [np.log2(blocks), blocks / (waves * figures.sm_count), np.minimum(waves, 64),
                     q / (parts(q, rows) * rows)]
        # Queries that share keys may be packed into one block.
        packed = batch * kv_heads * parts(q * heads // kv_heads, rows)
        waves = parts(packed, figures.sm_count)
        features += [np.log2(packed), packed / (waves * figures.sm_count)]
        # The longest block alone, and all blocks evenly spread: no schedule is faster than either.
        keys = np.where(window > 0, np.minimum(kv, window + rows), kv)
        steps = parts(keys, _KEY_ROWS)
        longest = 2.0 * rows * (width + v_width) * steps * _KEY_ROWS * figures.sm_count / rate
        features += [np.log2(longest + 1), np.log2(np.maximum(longest, flops / rate) + FLOOR_US)]
    return Described(stack(features), baseline)


def attention_brief(columns: Columns, figures: Figures) -> Described:
    """A few features that cost little: for a distilled model."""
    batch, heads, kv_heads, q, kv, width, _, window = columns.dims.T
    _, flops, moved, baseline = work(columns, figures)
    log_batch, log_heads, log_kv_heads, log_q = (np.log2(x) for x in (batch, heads, kv_heads, q))
    blocks = batch * heads * parts(q, 128)
    features = [columns.code, log_batch, log_heads, log_kv_heads, log_q, kv, width, window, flops, moved,
                log_heads - log_kv_heads, log_batch + log_heads, log_batch + log_q, log_batch + log_q + log_heads,
                log_batch + log_kv_heads, flops / moved, blocks,
                blocks / (parts(blocks, figures.sm_count) * figures.sm_count)]
    return Described(stack(features), baseline)
