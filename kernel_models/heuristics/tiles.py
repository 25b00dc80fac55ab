"""Tile and wave quantisation of matrix products: what blocks of fixed size on a fixed number of units cost."""

from __future__ import annotations

import numpy as np

from kernel_models.device import DeviceSpec
from tracer.arrays import Float64

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (16, 64), (16, 128))
"""Output tiles (rows, columns) of cuBLAS, CUTLASS and rocBLAS kernels, as the kernels' names tell."""
SPLITS = (1, 2, 3, 4, 8, 16)
"""Parts that the contraction is cut into where the output has too few tiles for all units (split-k)."""
TILE_COST = 16.0
"""a in a tile's relative efficiency 1/(1 + a(1/rows + 1/columns)): operands loaded for a product fall with its size."""
QUANTISED = 0.3
"""Share of a partly filled last wave that is lost: persistent and stream-k kernels win some of it back. 1 = all."""
SPLIT_COST = 0.15
"""Share of its work that a split kernel adds for adding up its parts, for each doubling."""


def padded_product_us(batch: Float64, m: Float64, n: Float64, k: Float64, peak_tflops: Float64, device: DeviceSpec,
                      ) -> Float64:
    """Time of batch·m·n·k multiply-adds at the peak rate with whole tiles and waves, µs: the best tile and split.

    blocks = ⌈m/Tm⌉·⌈n/Tn⌉·batch·split, waves = blocks/units, of which a partly filled last one counts ``QUANTISED``;
    t = waves · 2·Tm·Tn·k/split / (rate of a unit · tile efficiency). The minimum over tiles and splits
    never falls when a size grows. Source: NVIDIA "Matrix Multiplication Background User's Guide" (tile and wave
    quantisation); ``TILE_COST`` and ``QUANTISED`` are the best of 4 to 48 and 0 to 1 on the products of
    the tables in benchmarks/kernel_tables.py, ``SPLIT_COST`` is set.
    """
    unit_rate = peak_tflops * 1e6 / device.sm_count  # operations per µs
    best = np.full(np.shape(m), np.inf)
    reference = 1.0 + TILE_COST * (1 / 256 + 1 / 128)
    for rows, columns in TILES:
        cost = (1.0 + TILE_COST * (1 / rows + 1 / columns)) / reference
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
        for split in SPLITS:
            waves = tiles * split / device.sm_count
            counted = QUANTISED * np.ceil(waves) + (1.0 - QUANTISED) * np.maximum(waves, 1.0)
            block = 2.0 * rows * columns * k / split * (1.0 + SPLIT_COST * np.log2(split))
            np.minimum(best, counted * block * cost / unit_rate, out=best)
    return best


def filled_units(blocks: Float64, device: DeviceSpec) -> Float64:
    """Share of the units' time that equal blocks use, from 0 to 1, with the last wave counted as above."""
    waves = np.maximum(blocks, 1e-9) / device.sm_count
    return waves / (QUANTISED * np.ceil(waves) + (1.0 - QUANTISED) * np.maximum(waves, 1.0))
