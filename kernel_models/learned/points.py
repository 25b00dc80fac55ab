"""Calls as points of a Gaussian process: logarithms of their sizes, and codes of the parts of their variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernel_models.heuristics.embedding import parts_of
from kernel_models.heuristics.work import CallTable
from kernel_models.op_call import DIMENSIONS, Family, OpCall
from tracer.arrays import Bool, Float64, Int64

Codes = Int64

_ALIGNED = {Family.GEMM: (1, 2, 3), Family.CONV: (1, 2), Family.ATTENTION: (5,)}
"""Sizes whose alignment decides which kernel runs, and how well it is filled."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class Points:
    """The mapping of a family's calls to points.

    Attributes:
        family: the family.
        kept: columns of all that differ among the calls seen.
        parts: values seen of each part of a variant: kinds, dtypes, layouts, and sets of flags; the place is the code.
        low, high: least and largest of each dimension seen.
    """

    family: Family
    kept: tuple[int, ...]
    parts: tuple[tuple[str, ...], ...]
    low: tuple[int, ...]
    high: tuple[int, ...]

    @classmethod
    def of(cls, family: Family, calls: Sequence[OpCall]) -> Points:
        """For what occurs in these calls."""
        columns = _columns(family, calls)
        kept: list[int] = []
        for i, column in enumerate(columns.T):
            known = any(np.array_equal(column - column[0], columns[:, k] - columns[0, k]) for k in kept)
            if np.ptp(column) > 0 and not known:
                kept.append(i)
        dims = np.array([call.dims for call in calls], np.int64).reshape(len(calls), len(DIMENSIONS[family]))
        parts = tuple(tuple(sorted(set(values))) for values in zip(*map(_parts, calls), strict=True))
        return cls(family, tuple(kept), parts, tuple(dims.min(0).tolist()), tuple(dims.max(0).tolist()))

    def points(self, calls: Sequence[OpCall]) -> tuple[Float64, Codes]:
        """Coordinates [n, d] and codes [n, c]; −1 for a part not seen."""
        x = _columns(self.family, calls)[:, list(self.kept)]
        places = [{value: i for i, value in enumerate(values)} for values in self.parts]
        codes = [[places[k].get(value, -1) for k, value in enumerate(_parts(call))] for call in calls]
        return x, np.array(codes, np.int64).reshape(len(calls), len(self.parts))

    def within(self, calls: Sequence[OpCall], reach: float) -> Bool:
        """Calls of parts all seen, whose sizes lie within a factor of those seen (infinity: any), [n]."""
        _, codes = self.points(calls)
        known: Bool = np.all(codes >= 0, axis=1)
        if np.isinf(reach):
            return known
        dims = np.array([call.dims for call in calls], np.float64).reshape(len(calls), len(self.low))
        inside = (dims >= np.array(self.low) / reach) & (dims <= np.array(self.high) * reach)
        found: Bool = known & np.all(inside, axis=1)
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values to store."""
        return {"family": self.family.value, "kept": list(self.kept), "parts": [list(part) for part in self.parts],
                "low": list(self.low), "high": list(self.high)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Points:
        """The points of ``to_json``."""
        family = Family(values["family"])
        found = cls(family, tuple(map(int, values["kept"])), tuple(tuple(map(str, part)) for part in values["parts"]),
                    tuple(map(int, values["low"])), tuple(map(int, values["high"])))
        width = len(DIMENSIONS[family])
        columns = width + 2 + len(_ALIGNED.get(family, ())) + (2 if family is Family.EMBEDDING else 0)
        if {len(found.low), len(found.high)} != {width} or len(found.parts) != 4 or not all(
                0 <= column < columns for column in found.kept):
            raise ValueError("the sizes of a model do not fit its family")
        return found


def _columns(family: Family, calls: Sequence[OpCall]) -> Float64:
    """Every column: logarithms to base 2 of the sizes, the bytes and the FLOPs, alignments, and reuse of look-ups."""
    dims = np.array([call.dims for call in calls], np.int64).reshape(len(calls), len(DIMENSIONS[family]))
    moved = np.array([[call.bytes_moved, call.flops] for call in calls], np.float64).reshape(len(calls), 2)
    aligned = np.gcd(np.maximum(dims[:, list(_ALIGNED.get(family, ()))], 1), _ALIGNMENT)
    reuse = [_reuse(calls)] if family is Family.EMBEDDING else []
    return np.log2(np.maximum(np.hstack([dims, moved, aligned, *reuse]), 1.0))


def _reuse(calls: Sequence[OpCall]) -> Float64:
    """Different rows looked up, and look-ups of the longest bag [n, 2]."""
    parts, n = parts_of(CallTable.of(Family.EMBEDDING, calls)), len(calls)
    return np.stack([parts.sum(parts.rows_of_bin.sum(1), n), parts.most(parts.longest, n)], axis=1)


def _parts(call: OpCall) -> tuple[str, str, str, str]:
    """Flags that hold a number are left out: there would be a part for every number."""
    return call.kind, call.dtype, call.layout, " ".join(flag for flag in call.flags if "=" not in flag)
