"""Classes of a call, and the sizes its efficiency runs over: what corrections of the formulas are told apart by.

A call belongs to classes from wide to narrow ("conv", "conv/forward/depthwise", "conv/forward/depthwise/nhwc/k9") and
has curves, each over the logarithm of one of its sizes ("conv/pointwise/nhwc over in_channels").

::

    call ──classes_of──▶ names          each with one number in a correction
         ──classes_of──▶ curves         each with one number at every power of two
         ──sizes_of────▶ log2 sizes     where on its curves the call lies
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import log2
from typing import NamedTuple

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.curves import usable_cache_bytes
from kernel_models.op_call import DIMENSIONS, Family, OpCall
from tracer.arrays import Float64, Int64

PRODUCTS = (Family.GEMM, Family.CONV, Family.ATTENTION, Family.RECURRENT)
"""Families whose arithmetic may decide; of the others traffic does."""
STEM_CHANNELS = 4
"""Input channels up to which a convolution is a network's first one, which has kernels of its own."""
CACHE_PARTS = 1024.0
_ALIGNED = (64, 32, 16, 8, 4, 2, 1)
_KERNELS = (1, 3, 4, 7, 9, 11, 16, 21, 25, 49, 81, 121, 256)


class Classes(NamedTuple):
    """What calls that differ in their sizes alone have in common.

    Attributes:
        names: classes, and how narrow each is (0: a family).
        curves: name of a curve, the place of its size in ``sizes_of``, and how narrow it is.
    """

    names: tuple[tuple[str, int], ...]
    curves: tuple[tuple[str, int, int], ...]


class Grouped(NamedTuple):
    """Calls of the same classes: their rows [n] and log2 sizes [n, sizes]."""

    classes: Classes
    rows: Int64
    sizes: Float64


def grouped(calls: Sequence[OpCall], device: DeviceSpec) -> list[Grouped]:
    """Sort calls by their classes."""
    cache_bytes = usable_cache_bytes(device)
    rows: dict[tuple[object, ...], list[int]] = {}
    for i, call in enumerate(calls):
        rows.setdefault(_key(call), []).append(i)
    return [Grouped(classes_of(calls[mine[0]]), np.array(mine, np.int64),
                    np.array([sizes_of(calls[i], cache_bytes) for i in mine], np.float64)) for mine in rows.values()]


def classes_of(call: OpCall) -> Classes:
    """The classes of a call and the curves it lies on."""
    return _classes(*_key(call))


def sizes_of(call: OpCall, cache_bytes: float) -> tuple[float, ...]:
    """Base-two logarithms of the sizes that a call's curves run over; none is below 0.

    The first is that of what it moves, in units of a ``CACHE_PARTS``-th of the last-level cache."""
    sizes = call.dims if len(call.dims) == len(DIMENSIONS[call.family]) else (1,) * len(DIMENSIONS[call.family])
    if call.family is Family.CONV:
        batch, inputs, outputs, groups, _, _, _, *out = sizes[:10]
        groups = max(groups, 1)
        area = max(out[0], 1) * max(out[1], 1) * max(out[2], 1)
        values: tuple[float, ...] = (inputs / groups, outputs / groups, groups, batch * area, area)
    elif call.family is Family.ELEMENTWISE:
        elements, _, read = sizes
        values = (call.bytes_moved, 16.0 * read / max(elements, 1))
    elif call.family in _SIZED:
        values = (*sizes, call.bytes_moved)
    else:
        values = (call.bytes_moved,)
    in_cache = call.bytes_moved * CACHE_PARTS / max(cache_bytes, 1.0)
    return tuple(log2(value) if value > 1 else 0.0 for value in (in_cache, *values))


_SIZED = (Family.GEMM, Family.ATTENTION, Family.NORM, Family.SOFTMAX, Family.REDUCTION, Family.COPY, Family.CONCAT,
          Family.INDEX, Family.POOLING, Family.INTERPOLATE, Family.EMBEDDING, Family.SORT, Family.LOSS)
_CONV_SIZES = ("in_channels", "out_channels", "groups", "positions", "area")


def _key(call: OpCall) -> tuple[object, ...]:
    """All that classes depend on."""
    flags = tuple(flag.partition("=")[0] for flag in call.flags)
    if call.family is Family.CONV and len(call.dims) == len(DIMENSIONS[Family.CONV]):
        _, inputs, outputs, groups, _, _, _, _, _, _, kd, kh, kw, sd, sh, sw, *_ = call.dims
        groups = max(groups, 1)
        special: tuple[object, ...] = (_form(inputs // groups, outputs // groups, groups, kd * kh * kw),
                                       _near(kd * kh * kw), max(sd, sh, sw) > 1, _aligned(inputs // groups, 8),
                                       _aligned(outputs // groups, 8))
    elif call.family is Family.GEMM and len(call.dims) == len(DIMENSIONS[Family.GEMM]):
        batch, m, n, k = call.dims
        special = (batch > 1, _aligned(m), _aligned(n), _aligned(k))
    else:
        special = ()
    return call.family, call.kind, call.dtype, call.layout, flags, special


@lru_cache(maxsize=1 << 16)
def _classes(family: Family, kind: str, dtype: str, layout: str, flags: tuple[str, ...], special: tuple[object, ...],
             ) -> Classes:
    name = family.value
    names = [(name, 0), (f"{name}/{kind}", 1), (f"{name}/{kind}/{dtype}", 2), (f"{name}/{kind}/{dtype}/{layout}", 2)]
    if layout:
        names.append((f"{name}//{layout}", 1))
    for flag in flags:
        names += [(f"{name}/with {flag}", 2), (f"{name}/{kind}/with {flag}", 3)]
    if family is Family.CONV and special:
        return _convolution(names, kind, layout, special)
    if family is Family.GEMM and special:
        return _product(names, layout, dtype, special)
    over = [*DIMENSIONS[family], "bytes"] if family in _SIZED else ["bytes"]
    if family is Family.ELEMENTWISE:
        over = ["bytes", "inputs"]
    curves = []
    for i, size in enumerate(("cache", *over)):
        curves += [(f"{name} over {size}", i, 0), (f"{name}/{kind}/{layout} over {size}", i, 1)]
    return Classes(tuple(names), tuple(curves))


def _convolution(names: list[tuple[str, int]], kind: str, layout: str, special: tuple[object, ...]) -> Classes:
    form, kernel, strided, inputs, outputs = special
    mine, there = f"conv/{kind}/{form}", f"conv/{kind}/{form}/{layout}"
    stride = "strided" if strided else "dense"
    names += [(f"conv/{form}", 1), (mine, 1), (there, 2), (f"{mine}/k{kernel}", 2), (f"{mine}/{stride}", 2),
              (f"{there}/k{kernel}", 3), (f"{there}/{stride}", 3), (f"conv/{form}/in aligned {inputs}", 2),
              (f"conv/{form}/out aligned {outputs}", 2), (f"{there}/aligned {inputs}, {outputs}", 3)]
    curves = []
    for i, size in enumerate(("cache", *_CONV_SIZES)):
        curves += [(f"conv/{form}/{layout} over {size}", i, 0), (f"{there} over {size}", i, 1)]
    return Classes(tuple(names), tuple(curves))


def _product(names: list[tuple[str, int]], layout: str, dtype: str, special: tuple[object, ...]) -> Classes:
    many, *aligned = special
    form = "gemm/batched" if many else "gemm/single"
    names += [(form, 1), (f"{form}/{layout}", 2), (f"{form}/{dtype}", 2)]
    for size, number in zip("mnk", aligned, strict=True):
        names += [(f"gemm/{dtype}/{size} aligned {number}", 2), (f"{form}/{layout}/{dtype}/{size} aligned {number}", 3)]
    curves = []
    for i, size in enumerate(("cache", *DIMENSIONS[Family.GEMM], "bytes")):
        curves += [(f"{form} over {size}", i, 0), (f"{form}/{layout} over {size}", i, 1)]
    return Classes(tuple(names), tuple(curves))


def _form(inputs: int, outputs: int, groups: int, kernel: int) -> str:
    if groups == 1:
        return "stem" if inputs <= STEM_CHANNELS else "pointwise" if kernel == 1 else "spatial"
    return "depthwise" if inputs == 1 and outputs == 1 else "multiplied" if inputs == 1 else "grouped"


def _near(kernel: int) -> int:
    """The usual kernel area nearest to one."""
    return min(_KERNELS, key=lambda area: abs(log2(area) - log2(max(kernel, 1))))


def _aligned(size: int, most: int = 64) -> int:
    """The largest power of two, up to ``most``, that divides a size."""
    return next(number for number in _ALIGNED if number <= most and size % number == 0)
