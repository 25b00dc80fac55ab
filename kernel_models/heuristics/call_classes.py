"""Classes of a call, and the sizes of its efficiency curves: the keys to corrections of the formulas.

A call belongs to classes from wide to narrow ("conv", "conv/forward/depthwise", "conv/forward/depthwise/nhwc/k9") and
has curves, each over the logarithm of one of its sizes ("conv/pointwise/nhwc over in_channels").

::

    call ──classes_of──▶ names          One number of each in a correction.
         ──classes_of──▶ curves         A number at every power of two of each.
         ──sizes_of────▶ log2 sizes     Places on its curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import log2
from typing import NamedTuple, cast

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.work import computed_as, usable_cache_bytes
from kernel_models.op_call import DIMENSIONS, PRODUCTS, Family, OpCall
from tracer.arrays import Float64, Int64

_Named = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int, int], ...]]
_Key = tuple[Family, str, str, str, tuple[str, ...], tuple[object, ...]]
STEM_CHANNELS = 4
"""Most input channels of a network's first convolution, which has kernels of its own."""
CACHE_PARTS = 1024.0
"""Parts of the last-level cache, as the unit of bytes. Set."""
_ALIGNMENTS = (2, 4, 8, 16, 32, 64)  # chosen: every power of two up to a row of 128 bytes in 16 bits
ROWS = {"nn": "kn", "nt": "kn", "tn": "mn", "tt": "mkn"}
"""Sizes that are the length of a row of an operand or of the result, by layout. A kernel reads wide words only if these
lengths are multiples of a word."""
_KERNELS = (1, 3, 4, 7, 9, 11, 16, 21, 25, 49, 81, 121, 256)
"""Areas of usual kernels: 1×1 to 16×16, also lines of 3 to 11 and cubes of 3."""


class Classes(NamedTuple):
    """Classes of calls that differ in their sizes alone.

    Attributes:
        family: Family of the kernels: a copy without a change of type or order streams as element-wise kernels do.
        names: Classes, and how narrow each is (0: a family).
        curves: For each curve its name, the index of its size in ``sizes_of``, and how narrow it is.
    """

    family: Family
    names: tuple[tuple[str, int], ...]
    curves: tuple[tuple[str, int, int], ...]


class Grouped(NamedTuple):
    """Calls with equal classes: their rows [n] and log2 sizes [n, sizes]."""

    classes: Classes
    rows: Int64
    sizes: Float64


def grouped(calls: Sequence[OpCall], device: DeviceSpec) -> list[Grouped]:
    """Group calls by their classes."""
    cache_bytes = usable_cache_bytes(device)
    rows: dict[_Key, list[int]] = {}
    for i, call in enumerate(calls):
        rows.setdefault(_key(call, device), []).append(i)
    return [Grouped(_classes(*key), np.array(mine, np.int64),
                    np.array([sizes_of(calls[i], cache_bytes) for i in mine], np.float64))
            for key, mine in rows.items()]


def streams(call: OpCall) -> bool:
    """Return whether a copy reads and writes its elements contiguously and without a change of type."""
    return call.family is Family.COPY and call.kind == "copy" and not call.layout


def sizes_of(call: OpCall, cache_bytes: float) -> tuple[float, ...]:
    """Return the base-two logarithms of the sizes of a call's curves; none is below 0.

    The first is that of the bytes moved, in units of a ``CACHE_PARTS``-th of the last-level cache."""
    sizes = call.dims if len(call.dims) == len(DIMENSIONS[call.family]) else (1,) * len(DIMENSIONS[call.family])
    if call.family is Family.CONV:
        batch, inputs, outputs, groups, _, _, _, *out = sizes[:10]
        groups = max(groups, 1)
        area = max(out[0], 1) * max(out[1], 1) * max(out[2], 1)
        values: tuple[float, ...] = (inputs / groups, outputs / groups, groups, batch * area, area)
    elif call.family is Family.ELEMENTWISE:
        elements, _, read = sizes
        values = (call.bytes_moved, 16.0 * read / max(elements, 1))
    elif streams(call):
        values = (call.bytes_moved, 16.0)
    elif call.family in _SIZED:
        values = (*sizes, call.bytes_moved)
    else:
        values = (call.bytes_moved,)
    in_cache = call.bytes_moved * CACHE_PARTS / max(cache_bytes, 1.0)
    return tuple(log2(value) if value > 1 else 0.0 for value in (in_cache, *values))


_SIZED = (Family.GEMM, Family.ATTENTION, Family.NORM, Family.SOFTMAX, Family.REDUCTION, Family.COPY, Family.CONCAT,
          Family.INDEX, Family.POOLING, Family.INTERPOLATE, Family.EMBEDDING, Family.SORT, Family.LOSS)
_CONV_SIZES = ("in_channels", "out_channels", "groups", "positions", "area")


def _key(call: OpCall, device: DeviceSpec) -> _Key:
    """Return all facts that determine a call's classes."""
    if streams(call):
        return Family.ELEMENTWISE, "", "", "", (), ()
    family, dtype = call.family, call.dtype
    if family in PRODUCTS:
        dtype = computed_as(device, dtype)
    elif dtype == "bf16":
        dtype = "fp16"  # equal bytes, and arithmetic in fp32
    flags = tuple(flag.partition("=")[0] for flag in call.flags)
    if call.family is Family.CONV and len(call.dims) == len(DIMENSIONS[Family.CONV]):
        _, inputs, outputs, groups, _, _, _, _, _, _, kd, kh, kw, sd, sh, sw, *_ = call.dims
        groups = max(groups, 1)
        special: tuple[object, ...] = (_form(inputs // groups, outputs // groups, groups, kd * kh * kw),
                                       _near(kd * kh * kw), max(sd, sh, sw) > 1, _aligned(inputs // groups, 8),
                                       _aligned(outputs // groups, 8))
    elif call.family is Family.GEMM and len(call.dims) == len(DIMENSIONS[Family.GEMM]):
        batch, m, n, k = call.dims
        special = batch > 1, *(_aligned(size) for size in (m, n, k))
    else:
        special = ()
    return family, call.kind, dtype, call.layout, flags, special


@lru_cache(maxsize=1 << 16)
def _classes(family: Family, kind: str, dtype: str, layout: str, flags: tuple[str, ...], special: tuple[object, ...],
             ) -> Classes:
    name = family.value
    if family is Family.ELEMENTWISE and not kind:
        over = enumerate(("cache", "bytes", "inputs"))
        return Classes(family, ((name, 0),), tuple((f"{name} over {size}", i, 0) for i, size in over))
    names = [(name, 0), (f"{name}/{kind}", 1), (f"{name}/{kind}/{dtype}", 2), (f"{name}/{kind}/{dtype}/{layout}", 2)]
    if layout:
        names.append((f"{name}//{layout}", 1))
    for flag in flags:
        names += [(f"{name}/with {flag}", 2), (f"{name}/{kind}/with {flag}", 3)]
    if family is Family.CONV and special:
        return Classes(family, *_convolution(names, kind, layout, special))
    if family is Family.GEMM and special:
        return Classes(family, *_product(names, layout, dtype, special))
    sizes = [*DIMENSIONS[family], "bytes"] if family in _SIZED else ["bytes"]
    if family is Family.ELEMENTWISE:
        sizes = ["bytes", "inputs"]
    curves = []
    for i, size in enumerate(("cache", *sizes)):
        curves += [(f"{name} over {size}", i, 0), (f"{name}/{kind}/{layout} over {size}", i, 1)]
    return Classes(family, tuple(names), tuple(curves))


def _convolution(names: list[tuple[str, int]], kind: str, layout: str, special: tuple[object, ...],
                 ) -> _Named:
    form, kernel, strided, *aligned = special
    mine, there = f"conv/{kind}/{form}", f"conv/{kind}/{form}/{layout}"
    stride = "strided" if strided else "dense"
    names += [(f"conv/{form}", 1), (mine, 1), (there, 2), (f"{mine}/k{kernel}", 2), (f"{mine}/{stride}", 2),
              (f"{there}/k{kernel}", 3), (f"{there}/{stride}", 3)]
    for side, number in zip(("in", "out"), cast(Sequence[int], aligned), strict=True):
        names += [(f"conv/{form}/{side} not aligned by {most}", 2) for most in _not_aligned(number, 8)]
        names += [(f"{there}/{side} not aligned by {most}", 3) for most in _not_aligned(number, 8)]
    curves = []
    for i, size in enumerate(("cache", *_CONV_SIZES)):
        curves += [(f"conv/{form}/{layout} over {size}", i, 0), (f"{there} over {size}", i, 1)]
    return tuple(names), tuple(curves)


def _product(names: list[tuple[str, int]], layout: str, dtype: str, special: tuple[object, ...]) -> _Named:
    many, *aligned = special
    form = "gemm/batched" if many else "gemm/single"
    names += [(form, 1), (f"{form}/{layout}", 2), (f"{form}/{dtype}", 2)]
    by_size = dict(zip("mnk", cast(Sequence[int], aligned), strict=True))
    rows = ROWS.get(layout, "nk")
    for size in rows:
        names += [(f"gemm/{dtype}/{size} not aligned by {number}", 1) for number in _not_aligned(by_size[size])]
    names += [(f"{form}/{layout}/{dtype}/rows not aligned by {number}", 2)
              for number in _not_aligned(min(by_size[size] for size in rows))]
    curves = []
    for i, size in enumerate(("cache", *DIMENSIONS[Family.GEMM], "bytes")):
        curves += [(f"{form} over {size}", i, 0), (f"{form}/{layout} over {size}", i, 1)]
    return tuple(names), tuple(curves)


def _form(inputs: int, outputs: int, groups: int, kernel: int) -> str:
    if groups == 1:
        return "stem" if inputs <= STEM_CHANNELS else "pointwise" if kernel == 1 else "spatial"
    return "depthwise" if inputs == 1 and outputs == 1 else "multiplied" if inputs == 1 else "grouped"


def _near(kernel: int) -> int:
    """Return the usual kernel area nearest to the given area."""
    return min(_KERNELS, key=lambda area: abs(log2(area) - log2(max(kernel, 1))))


def _aligned(size: int, most: int = 64) -> int:
    """Return the largest power of two, up to ``most``, that divides a size."""
    return min(size & -size, most) or most


def _not_aligned(aligned: int, most: int = 64) -> list[int]:
    """Return the powers of two up to ``most`` that do not divide a size aligned to ``aligned``: their costs add up."""
    return [number for number in _ALIGNMENTS if aligned < number <= most]
