"""Calls of one family as columns of numbers, the one step of pricing that works call by call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import numpy as np

from kernel_models.op_call import DIMENSIONS, Family, OpCall
from tracer.arrays import Bool, Float64, Int64

Variant = tuple[str, str, str, tuple[str, ...]]
"""Kind, dtype, layout and flags: everything of a call but its sizes."""

_variant = attrgetter("kind", "dtype", "layout", "flags")
_dims = attrgetter("dims")
_work = attrgetter("flops", "bytes_read", "bytes_written")

_EPILOGUES = frozenset({"bias", "out_bf16", "out_fp16", "out_fp32", "rowwise", "assumed"})
"""Flags of a matrix product that change its time by less than its noise: what is done to each result once."""


def plain(family: Family, variant: Variant) -> Variant:
    """The variant whose model prices this one: a product with a bias is priced as one without.

    Flags that hold a number ("affine=64") are left out too, or there would be a variant for every number.
    """
    kind, dtype, layout, flags = variant
    left_out = _EPILOGUES if family is Family.GEMM else frozenset()
    return kind, dtype, layout, tuple(flag for flag in flags if flag not in left_out and "=" not in flag)


@dataclass(frozen=True, slots=True)
class Columns:
    """Calls as columns.

    Attributes:
        dims: sizes as ``DIMENSIONS`` names them, [n, d].
        code: place of each call's plain variant in the list of known ones, −1 for an unknown one, [n].
        flops, bytes_read, bytes_written: the calls', [n]; empty unless asked for.
    """

    dims: Int64
    code: Int64
    flops: Float64
    bytes_read: Float64
    bytes_written: Float64

    def __len__(self) -> int:
        return len(self.code)

    def taken(self, rows: Bool) -> Columns:
        """Some of the calls."""
        return Columns(self.dims[rows], self.code[rows], *(
            part[rows] if len(part) else part for part in (self.flops, self.bytes_read, self.bytes_written)))


class Variants:
    """Known variants of a family, by number."""

    def __init__(self, family: Family, known: Sequence[Variant]) -> None:
        self.family, self.known = family, tuple(known)
        self._plain = {variant: i for i, variant in enumerate(known)}
        self._codes: dict[Variant, int] = {}

    @classmethod
    def of(cls, family: Family, calls: Sequence[OpCall]) -> Variants:
        """Return the variants that occur, sorted."""
        return cls(family, sorted({plain(family, variant) for variant in set(map(_variant, calls))}))

    def columns(self, calls: Sequence[OpCall], *, work: bool) -> Columns:
        """The calls' numbers; ``work`` asks for FLOPs and bytes too."""
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
        """Its number; a 16-bit float takes the other one's, which costs the same."""
        kind, dtype, layout, flags = variant
        other = {"fp16": "bf16", "bf16": "fp16"}.get(dtype, dtype)
        return self._plain.get(variant, self._plain.get((kind, other, layout, flags), -1))
