"""Tile and wave quantisation of matrix products: what blocks of fixed size on a fixed number of units cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

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
FEW = 1024
"""Products that are put into all tilings at once; of more, one tiling at a time takes less memory."""
SPLIT_COST = 0.15
"""Share of its work that a split kernel adds for adding up its parts, for each doubling."""


class Tiling(NamedTuple):
    """Factors by which products take longer, in their best tile and split, than in full, largest tiles [n].

    Attributes:
        tiles: rows and columns that the result's last tiles have for nothing.
        waves: units that the last wave of blocks leaves idle, or all blocks where they are fewer than the units.
        small: smaller tiles, which load their operands more often, and split sums.
    """

    tiles: Float64
    waves: Float64
    small: Float64


def padded_product_us(batch: Float64, m: Float64, n: Float64, k: Float64, peak_tflops: Float64, device: DeviceSpec,
                      ) -> Float64:
    """Time of batch·m·n·k multiply-adds at the peak rate with whole tiles and waves, µs: the best tile and split.

    blocks = ⌈m/Tm⌉·⌈n/Tn⌉·batch·split, waves = blocks/units, of which a partly filled last one counts ``QUANTISED``;
    t = waves · 2·Tm·Tn·k/split / (rate of a unit · tile efficiency). The minimum over tiles and splits
    never falls when a size grows. Source: NVIDIA "Matrix Multiplication Background User's Guide" (tile and wave
    quantisation); ``TILE_COST`` and ``QUANTISED`` are the best of 4 to 48 and 0 to 1 on the products of
    the tables in benchmarks/kernel_tables.py, ``SPLIT_COST`` is set.
    """
    if np.size(m) <= FEW:
        batch, m, n, k, peak_tflops = (np.asarray(each, np.float64)[..., None]
                                       for each in (batch, m, n, k, peak_tflops))
        us, _ = _tiling_us(device, batch, m, n, k, peak_tflops, *_Tilings.all())
        return np.asarray(us.min(axis=-1))
    best = np.full(np.shape(m), np.inf)
    for us, _ in _every_tiling(batch, m, n, k, peak_tflops, device):
        np.minimum(best, us, out=best)
    return best


def tiling(batch: Float64, m: Float64, n: Float64, device: DeviceSpec) -> Tiling:
    """Return what ``padded_product_us`` is made of: it is the ideal time, 2·batch·m·n·k / peak, times all three
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
    """For every tile and split its time, µs, and its number of tiles, their area, and what tile and split cost more."""
    for rows, columns, split, cost, more in zip(*_Tilings.all(), strict=True):
        us, tiles = _tiling_us(device, batch, m, n, k, peak_tflops, rows, columns, split, cost, more)
        yield us, (tiles, float(rows * columns), cost * more)


class _Tilings(NamedTuple):
    """Every tile with every split, [tiles × splits]: rows, columns, split, and what tile and split cost more."""

    rows: Float64
    columns: Float64
    split: Float64
    cost: Float64
    more: Float64

    @classmethod
    @lru_cache(maxsize=1)
    def all(cls) -> _Tilings:
        """Make them."""
        reference = 1.0 + TILE_COST * (1 / 256 + 1 / 128)
        each = [(rows, columns, split, (1.0 + TILE_COST * (1 / rows + 1 / columns)) / reference,
                 1.0 + SPLIT_COST * np.log2(split)) for rows, columns in TILES for split in SPLITS]
        return cls(*np.array(each, np.float64).T)


def _tiling_us(device: DeviceSpec, batch: Float64, m: Float64, n: Float64, k: Float64, peak_tflops: Float64,
               rows: Float64, columns: Float64, split: Float64, cost: Float64, more: Float64,
               ) -> tuple[Float64, Float64]:
    """Time of products in one tile and split, µs, and their number of tiles."""
    unit_rate = peak_tflops * 1e6 / device.sm_count  # operations per µs
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
    waves = tiles * split / device.sm_count
    counted = QUANTISED * np.ceil(waves) + (1.0 - QUANTISED) * np.maximum(waves, 1.0)
    block = 2.0 * rows * columns * k / split * more
    return counted * block * cost / unit_rate, tiles


def filled_units(blocks: Float64, device: DeviceSpec) -> Float64:
    """Share of the units' time that equal blocks use, from 0 to 1, with the last wave counted as above."""
    waves = np.maximum(blocks, 1e-9) / device.sm_count
    return waves / (QUANTISED * np.ceil(waves) + (1.0 - QUANTISED) * np.maximum(waves, 1.0))
