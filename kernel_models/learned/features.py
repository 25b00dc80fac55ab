"""Features of calls: from a family's calls to columns of numbers, and from these to the features of trees.

    calls ──Variants──▶ Columns ──a recipe──▶ Described: features [n, f], and a simple formula's time [n], µs

Trees learn the logarithm of the measured time over the formula's. Every feature has a physical meaning. ``RECIPES``
names the recipes; a stored model keeps the name, so a recipe that changes the meaning of its features takes a new name.

- *Matrix products*: sizes, work, and how tiles fill the multiprocessors. A library cuts the results into tiles (Tm ×
  Tn), each computed by one multiprocessor, and works on as many at a time as there are multiprocessors: a wave.
  ``tiles = ⌈m/Tm⌉·⌈n/Tn⌉·batch``, ``waves = ⌈tiles/SMs⌉``, and the unused share of the last wave is lost time. Where
  there are few tiles, the contraction is split among more of them. The library's choice of tile is unknown; the trees
  see the counts of usual tiles. Source: NVIDIA, "Matrix Multiplication Background User's Guide".
- *Attention*: its two products over pairs of positions, and its blocks over the multiprocessors. Pairs that count:
  q·kv, the triangle of them under a causal mask, and at most a window's width for each query. FLOPs = 2·(head_dim +
  v_head_dim)·pairs·batch·heads, backward 2·(3·head_dim + 2·v_head_dim) (Dao, "FlashAttention-2", 2023). A block is a
  tile of queries of one head of one sequence; blocks over multiprocessors make waves, as in a product.
- *Streaming*: everything that device memory bounds: bytes, elements, their order, and how they fill multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernel_models.op_call import DIMENSIONS, Family, OpCall, itemsize
from tracer.arrays import Bool, Float64, Int64

if TYPE_CHECKING:
    from kernel_models.device import DeviceSpec

Variant = tuple[str, str, str, tuple[str, ...]]
"""Kind, dtype, layout and flags: all properties of a call except its sizes."""

_variant = attrgetter("kind", "dtype", "layout", "flags")
_dims = attrgetter("dims")
_work = attrgetter("flops", "bytes_read", "bytes_written")

_EPILOGUES = frozenset({"bias", "out_bf16", "out_fp16", "out_fp32", "rowwise", "assumed"})
"""Flags of a matrix product that change its time by less than its noise: operations on each result, done once."""


def plain(family: Family, variant: Variant) -> Variant:
    """Return the variant whose model prices this one: a product with a bias is priced like a product without.

    Flags that hold a number ("affine=64") are left out too: otherwise every number would be a variant.
    """
    kind, dtype, layout, flags = variant
    left_out = _EPILOGUES if family is Family.GEMM else frozenset()
    return kind, dtype, layout, tuple(flag for flag in flags if flag not in left_out and "=" not in flag)


@dataclass(frozen=True, slots=True)
class Columns:
    """Calls as columns.

    Attributes:
        dims: Sizes in the order of ``DIMENSIONS``, [n, d].
        code: Index of each call's plain variant in the list of known ones, −1 for an unknown one, [n].
        flops, bytes_read, bytes_written: Work of the calls, [n]; empty unless asked for.
    """

    dims: Int64
    code: Int64
    flops: Float64
    bytes_read: Float64
    bytes_written: Float64

    def __len__(self) -> int:
        return len(self.code)

    def taken(self, rows: Bool) -> Columns:
        """Return the columns of the chosen calls."""
        return Columns(self.dims[rows], self.code[rows], *(
            part[rows] if len(part) else part for part in (self.flops, self.bytes_read, self.bytes_written)))


class Variants:
    """A family's known variants (kind, dtype, layout, flags); the code of a variant is its index in ``known``."""

    def __init__(self, family: Family, known: Sequence[Variant]) -> None:
        self.family, self.known = family, tuple(known)
        self._plain = {variant: i for i, variant in enumerate(known)}
        self._codes: dict[Variant, int] = {}

    @classmethod
    def of(cls, family: Family, calls: Sequence[OpCall]) -> Variants:
        """Return the variants of these calls, sorted."""
        return cls(family, sorted({plain(family, variant) for variant in set(map(_variant, calls))}))

    def columns(self, calls: Sequence[OpCall], *, work: bool) -> Columns:
        """Return the calls' sizes and variant codes as columns; ``work`` asks for FLOPs and bytes too."""
        n, width = len(calls), len(DIMENSIONS[self.family])
        dims = np.fromiter(chain.from_iterable(map(_dims, calls)), np.int64, n * width).reshape(n, width)
        variants = list(map(_variant, calls))
        codes = self._codes
        try:
            code = np.fromiter(map(codes.__getitem__, variants), np.int64, n)
        except KeyError:
            for variant in set(variants) - codes.keys():
                codes[variant] = self._find(plain(self.family, variant))
            code = np.fromiter(map(codes.__getitem__, variants), np.int64, n)
        numbers = np.array(list(map(_work, calls)), np.float64).reshape(n, 3) if work else np.zeros((0, 3))
        return Columns(dims, code, *np.ascontiguousarray(numbers.T))

    def _find(self, variant: Variant) -> int:
        """Return the code of a variant. bfloat16 and float16 share one: they cost the same."""
        kind, dtype, layout, flags = variant
        other = {"fp16": "bf16", "bf16": "fp16"}.get(dtype, dtype)
        return self._plain.get(variant, self._plain.get((kind, other, layout, flags), -1))


FLOOR_US = 2.0
"""Time of an almost empty kernel, µs: the shortest in the published tables take 2 to 3 on any GPU. Trees learn the
rest, so that it need not be the device's own."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the device and of each variant, for recipes.

    Attributes:
        sm_count: Multiprocessors.
        bandwidth_gbps: Device memory, 10⁹ bytes/s.
        l2_mb: Last cache, MiB.
        tflops: Peak rate of each variant's dtype, 10¹²/s, matrix units where it has them, [variants].
        element_bytes: Bytes of an element of each variant's dtype, [variants].
        causal: Whether a variant masks the upper triangle, [variants].
        backward: Whether a variant is a gradient, [variants].
    """

    sm_count: int
    bandwidth_gbps: float
    l2_mb: float
    tflops: tuple[float, ...]
    element_bytes: tuple[float, ...]
    causal: tuple[bool, ...]
    backward: tuple[bool, ...]

    @classmethod
    def of(cls, spec: DeviceSpec, variants: Sequence[Variant]) -> Figures:
        """Return the figures of a device for these variants."""
        return cls(spec.sm_count, spec.memory_bandwidth_gbps, spec.l2_mb,
                   tuple(spec.peak_tflops(dtype, matrix=True) for _, dtype, _, _ in variants),
                   tuple(float(itemsize(dtype)) for _, dtype, _, _ in variants),
                   tuple("causal" in flags for _, _, _, flags in variants),
                   tuple(kind.endswith("backward") for kind, _, _, _ in variants))

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain values to store."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Figures:
        """Return the figures that ``to_json`` stored. Raises ``ValueError`` if one is not positive."""
        found = cls(int(values["sm_count"]), float(values["bandwidth_gbps"]), float(values["l2_mb"]),
                    tuple(map(float, values["tflops"])), tuple(map(float, values["element_bytes"])),
                    tuple(map(bool, values["causal"])), tuple(map(bool, values["backward"])))
        if not all(0 < each < np.inf for each in (found.sm_count, found.bandwidth_gbps, found.l2_mb, *found.tflops,
                                                  *found.element_bytes)):
            raise ValueError("a figure of its device is not positive")
        return found

    def by_row(self, columns: Columns) -> tuple[Float64, Float64]:
        """Return peak rate (FLOP/µs) and element bytes of each call."""
        return np.array(self.tflops)[columns.code] * 1e6, np.array(self.element_bytes)[columns.code]


class Described(NamedTuple):
    """Features [n, f], and the baseline's time [n], µs."""

    features: npt.NDArray[np.float32]
    baseline_us: Float64


class Recipe(NamedTuple):
    """A named function that makes features; ``work``: whether it needs FLOPs and bytes. Its input has codes ≥ 0."""

    name: str
    describe: Callable[[Columns, Figures], Described]
    work: bool = False


def parts(size: Int64, part: Int64 | int) -> Int64:
    """Return the number of parts that cover a size, rounded up."""
    return -(-size // part)


def stack(features: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    """Return feature columns as one array [n, f]."""
    result = np.empty((len(features[0]), len(features)), np.float32)
    for i, column in enumerate(features):
        result[:, i] = column
    return result


_THREADS = 2048
"""Threads of a multiprocessor (NVIDIA, compute capability 7.0 to 9.0); a full wave of the simplest kernels."""


def streaming_features(columns: Columns, figures: Figures) -> Described:
    """Return all features: logarithms of every size, bytes, FLOPs, waves, and alignment of the innermost size."""
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


_BLOCK_ROWS = (64, 128, 192)
_KEY_ROWS = 128
"""Rows of a block of queries, and of one step over keys, in FlashAttention 2 and 3 (Dao, 2023; Shah et al., 2024)."""


def _pairs(columns: Columns, figures: Figures) -> Float64:
    """Return the pairs of query and key positions that are computed, in one head of one sequence."""
    _, _, _, q, kv, _, _, window = columns.dims.T.astype(np.float64)
    causal = np.array(figures.causal)[columns.code]
    # The last query sees all keys, the first one kv − q + 1; a window leaves the last `reach` of them.
    first = np.maximum(kv - q + 1, 1) if causal.any() else kv
    reach = np.where(window > 0, np.minimum(window, kv), kv)
    short = np.clip(reach - first, 0, q)  # queries that see fewer keys than that
    return np.where(causal, short * (first + (short - 1) / 2) + (q - short) * reach, q * reach)


def attention_work(columns: Columns, figures: Figures) -> tuple[Float64, Float64, Float64, Float64]:
    """Return pairs, FLOPs, bytes, and the baseline in µs: compute + memory + floor."""
    batch, heads, kv_heads, q, kv, width, v_width, _ = columns.dims.T.astype(np.float64)
    rate, size = figures.by_row(columns)
    pairs = _pairs(columns, figures)
    backward = np.array(figures.backward)[columns.code]
    flops = 2.0 * np.where(backward, 3 * width + 2 * v_width, width + v_width) * pairs * batch * heads
    moved = size * np.where(backward, 2, 1) * batch * (heads * q + kv_heads * kv) * (width + v_width)
    return pairs, flops, moved, flops / rate + moved / (figures.bandwidth_gbps * 1e3) + FLOOR_US


def attention_features(columns: Columns, figures: Figures) -> Described:
    """Return all features of attention."""
    batch, heads, kv_heads, q, kv, width, v_width, window = columns.dims.T
    rate, size = figures.by_row(columns)
    pairs, flops, moved, baseline = attention_work(columns, figures)
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
        # The longest block alone, and all blocks evenly spread: both are lower limits of any schedule.
        keys = np.where(window > 0, np.minimum(kv, window + rows), kv)
        steps = parts(keys, _KEY_ROWS)
        longest = 2.0 * rows * (width + v_width) * steps * _KEY_ROWS * figures.sm_count / rate
        features += [np.log2(longest + 1), np.log2(np.maximum(longest, flops / rate) + FLOOR_US)]
    return Described(stack(features), baseline)


_MAIN = ((64, 64, .45), (64, 128, .62), (128, 64, .62), (128, 128, .75), (64, 256, .75), (256, 64, .7),
         (128, 256, .85), (256, 128, .85))
_OTHERS = ((64, 96), (128, 192), (192, 128), (256, 192), (64, 192), (128, 96), (64, 16), (64, 32), (32, 64),
           (16, 128), (128, 32), (64, 8))
"""Tiles of CUTLASS and cuBLAS, as in their kernels' names. ``_MAIN`` also has the share of peak that a tile's inner
loop sustains: chosen to rise with the tile's reuse; only the estimate of a tile's own time uses it."""
_SPLITS = (1, 2, 4, 8)
_SPLIT_US = 0.9
"""Splits of a contraction that are tried, and the cost of adding their parts in addition to its traffic, µs: chosen,
about half a short kernel's time."""
_STEP = 64
"""Contraction steps of a tile's inner loop are a multiple of this (the usual k of CUTLASS's tiles)."""
_L2_OVER_MEMORY = 3.0
"""Bandwidth of L2, in which tiles share operands, over that of device memory, about (NVIDIA A100, H100)."""
_WAVES_SEEN = 64
"""Chosen: above this number of waves the lost part of the last one is below 2%."""


def gemm_work(columns: Columns, figures: Figures) -> tuple[Float64, Float64, Float64, Float64, Float64, Float64]:
    """Return element bytes, FLOPs, bytes of A, B and results, and the baseline in µs: compute + memory + floor."""
    batch, m, n, k = columns.dims.T
    rate, size = figures.by_row(columns)
    flops = 2.0 * batch * m * n * k
    # Eight-bit products write sixteen bits.
    a, b, out = size * batch * m * k, size * batch * n * k, np.maximum(size, 2.0) * batch * m * n
    baseline = flops / rate + (a + b + out) / (figures.bandwidth_gbps * 1e3) + FLOOR_US
    return size, flops, a, b, out, baseline


def gemm_baseline_us(columns: Columns, figures: Figures) -> Float64:
    """Return the times of products by the baseline's formula alone, µs [n]."""
    return gemm_work(columns, figures)[-1]


def gemm_features(columns: Columns, figures: Figures) -> Described:
    """Return all features of matrix products."""
    batch, m, n, k = columns.dims.T
    rate, _ = figures.by_row(columns)
    size, flops, a, b, out, baseline = gemm_work(columns, figures)
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
    """Return the time of the fastest split of the contraction, µs: waves × the longer of a tile's work and loads."""
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


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (
    Recipe("gemm-1", gemm_features), Recipe("attention-1", attention_features),
    Recipe("streaming-1", streaming_features, work=True),
)}
"""Every recipe by name."""


def recipe_of(family: Family) -> str:
    """Return the name of a family's recipe."""
    return {Family.GEMM: "gemm-1", Family.ATTENTION: "attention-1"}.get(family, "streaming-1")
