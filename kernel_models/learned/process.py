"""A Gaussian process over sizes and variants, for the few dozen to few hundred calls of a calibration.

    y(x, v) ~ N(0, (a·M(x, x') + b)·Π_c exp(−θ_c [v_c ≠ v'_c]) + noise)

``x`` are logarithms of sizes, ``v`` the parts of a variant (kind, dtype, layout, flags). M is the Matérn kernel of
smoothness 5/2 with a length for each size. Each differing part of two variants scales their covariance by e^−θ.
Lengths, amplitudes, θ and noise maximise the posterior density under broad priors. Source: Rasmussen and Williams,
"Gaussian Processes for Machine Learning" (2006), chapters 2, 4 and 5; the leave-one-out formulas are its equation 5.12.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kernel_models.heuristics.embedding import parts_of
from kernel_models.heuristics.work import CallTable
from kernel_models.op_call import DIMENSIONS, Family, OpCall
from tracer.arrays import Bool, Float64, Int64
from tracer.lazy import optimize

Codes = Int64

MOST_TO_LEARN_FROM = 240
"""Most rows from which lengths, amplitudes, θ and noise are learned, chosen for a search of half a second; the
conditional mean uses all rows."""
FAR = 3.0
"""A row this many standard deviations from its prediction by the others gets its own, larger noise."""
_START_LENGTH, _START_VARIANCE, _START_NOISE, _START_DIFFERS = 4.0, 0.1, 0.02**2, 0.3
"""Start values: length, doublings of a size; variance and noise, squared log units of time; θ per part of a variant.
Chosen: kernels scatter by 2% and differ from fitted formulas by a third."""
_PRIOR_WIDTHS = {"length": 1.0, "variance": 1.5, "noise": 1.5, "differs": 1.5}
"""Standard deviations of the priors, natural logarithms: broad."""
_LEAST_NOISE = 0.005**2
_REACH = 7.0
"""Least noise, squared log units, and largest distance from the middle of a prior, natural logarithms: chosen, to keep
the search numerically stable."""
_EVALUATIONS = 60
"""Most evaluations of the posterior density. Chosen: it hardly rises afterwards."""
_ALIGNED = {Family.GEMM: (1, 2, 3), Family.CONV: (1, 2), Family.ATTENTION: (5,)}
_ALIGNMENT = 64
"""Sizes whose alignment decides which kernel runs and how well it is filled, and the largest alignment that counts."""


@dataclass(frozen=True)
class Points:
    """The mapping of a family's calls to points.

    Attributes:
        family: The family.
        kept: Columns that differ among the calls seen.
        parts: Values seen of each part of a variant: kinds, dtypes, layouts, and sets of flags; the index is the code.
        low, high: Least and largest value seen of each dimension.
    """

    family: Family
    kept: tuple[int, ...]
    parts: tuple[tuple[str, ...], ...]
    low: tuple[int, ...]
    high: tuple[int, ...]

    @classmethod
    def of(cls, family: Family, calls: Sequence[OpCall]) -> Points:
        """Return the mapping made from the calls of a fit."""
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
        """Return coordinates [n, d] and codes [n, c] of calls; −1 for a part that was not seen."""
        x = _columns(self.family, calls)[:, list(self.kept)]
        places = [{value: i for i, value in enumerate(values)} for values in self.parts]
        codes = [[places[k].get(value, -1) for k, value in enumerate(_parts(call))] for call in calls]
        return x, np.array(codes, np.int64).reshape(len(calls), len(self.parts))

    def within(self, calls: Sequence[OpCall], reach: float) -> Bool:
        """Return which calls have known parts, and sizes within the factor ``reach`` of seen ones (inf: any), [n]."""
        _, codes = self.points(calls)
        known: Bool = np.all(codes >= 0, axis=1)
        if np.isinf(reach):
            return known
        dims = np.array([call.dims for call in calls], np.float64).reshape(len(calls), len(self.low))
        inside = (dims >= np.array(self.low) / reach) & (dims <= np.array(self.high) * reach)
        found: Bool = known & np.all(inside, axis=1)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the mapping as plain values to store."""
        return {"family": self.family.value, "kept": list(self.kept), "parts": [list(part) for part in self.parts],
                "low": list(self.low), "high": list(self.high)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Points:
        """Return the mapping that ``to_json`` stored."""
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
    """Return every column: log2 of the sizes, the bytes and the FLOPs, alignments, and reuse of look-ups."""
    dims = np.array([call.dims for call in calls], np.int64).reshape(len(calls), len(DIMENSIONS[family]))
    moved = np.array([[call.bytes_moved, call.flops] for call in calls], np.float64).reshape(len(calls), 2)
    aligned = np.gcd(np.maximum(dims[:, list(_ALIGNED.get(family, ()))], 1), _ALIGNMENT)
    reuse = [_reuse(calls)] if family is Family.EMBEDDING else []
    return np.log2(np.maximum(np.hstack([dims, moved, aligned, *reuse]), 1.0))


def _reuse(calls: Sequence[OpCall]) -> Float64:
    """Return the number of distinct rows looked up, and look-ups of the longest bag [n, 2]."""
    parts, n = parts_of(CallTable.of(Family.EMBEDDING, calls)), len(calls)
    return np.stack([parts.sum(parts.rows_of_bin.sum(1), n), parts.most(parts.longest, n)], axis=1)


def _parts(call: OpCall) -> tuple[str, str, str, str]:
    """Return a call's kind, dtype, layout and flags, without flags that hold a number (each would be a part)."""
    return call.kind, call.dtype, call.layout, " ".join(flag for flag in call.flags if "=" not in flag)


@dataclass(frozen=True)
class Kernel:
    """The covariance's parameters: ``smooth`` (a), ``offset`` (b), ``noise``, ``lengths`` [d], ``differs`` (θ) [c]."""

    smooth: float
    offset: float
    noise: float
    lengths: Float64
    differs: Float64

    @classmethod
    def start(cls, sizes: int, parts: int) -> Kernel:
        """Return the kernel in the middle of the priors."""
        return cls(_START_VARIANCE, _START_VARIANCE, _START_NOISE, np.full(sizes, _START_LENGTH),
                   np.full(parts, _START_DIFFERS))

    def between(self, x: Float64, v: Codes, other_x: Float64, other_v: Codes) -> Float64:
        """Return the covariances between two sets of points, without noise, [n, m]."""
        unlike = np.zeros((len(x), len(other_x)))
        for k, differs in enumerate(self.differs.tolist()):
            unlike += differs * (v[:, None, k] != other_v[None, :, k])
        a, b = x / self.lengths, other_x / self.lengths
        square = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
        r = np.sqrt(5.0 * np.maximum(square, 0.0))
        covariances: Float64 = (self.smooth * (1 + r + r**2 / 3) * np.exp(-r) + self.offset) * np.exp(-unlike)
        return covariances

    def variance(self) -> float:
        """Return the prior variance of a point, without noise."""
        return self.smooth + self.offset

    def to_json(self) -> dict[str, Any]:
        """Return the kernel as plain values to store."""
        return {"smooth": self.smooth, "offset": self.offset, "noise": self.noise, "lengths": self.lengths.tolist(),
                "differs": self.differs.tolist()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Kernel:
        """Return the kernel that ``to_json`` stored."""
        found = cls(float(values["smooth"]), float(values["offset"]), float(values["noise"]),
                    np.array(values["lengths"], np.float64), np.array(values["differs"], np.float64))
        numbers = np.concatenate([[found.smooth, found.offset, found.noise], found.lengths])
        if not (np.isfinite(numbers).all() and (numbers > 0).all() and (found.differs >= 0).all()):
            raise ValueError("the hyper-parameters of a model are damaged")
        return found


@dataclass(frozen=True)
class Process:
    """A Gaussian process: kernel, data ``x`` [n, d], ``v`` [n, c], ``y`` [n]; noise is scaled by ``loose`` [n]."""

    kernel: Kernel
    x: Float64
    v: Codes
    y: Float64
    loose: Float64

    @cached_property
    def inverse(self) -> Float64:
        """Return the inverse of the covariances with noise, [n, n]."""
        covariances = self.kernel.between(self.x, self.v, self.x, self.v)
        return np.asarray(np.linalg.inv(covariances + np.diag(self.kernel.noise * self.loose)), np.float64)

    @cached_property
    def weights(self) -> Float64:
        """Weight of each row in a conditional mean, [n]."""
        return self.inverse @ self.y

    def predict(self, x: Float64, v: Codes) -> tuple[Float64, Float64]:
        """Return the conditional mean and standard deviation, noise included, [m]."""
        across = self.kernel.between(x, v, self.x, self.v)
        variance = self.kernel.variance() - ((across @ self.inverse) * across).sum(1)
        return across @ self.weights, np.sqrt(np.maximum(variance, 0.0) + self.kernel.noise)

    def left_out(self) -> tuple[Float64, Float64]:
        """Return the prediction of each row by the others: mean and standard deviation, noise included, [n]."""
        own = np.diag(self.inverse)
        return self.y - self.weights / own, 1.0 / np.sqrt(own)

    def left_out_by(self, group: Codes) -> Float64:
        """Return the prediction of each row by the rows of other groups, [n]."""
        found = np.empty(len(self.y))
        for one in np.unique(group):
            rows = group == one
            # y_i − K⁻¹_ii⁻¹ (K⁻¹ y)_i, blockwise.
            found[rows] = self.y[rows] - np.linalg.solve(self.inverse[np.ix_(rows, rows)], self.weights[rows])
        return found


def fit_process(x: Float64, v: Codes, y: Float64, start: Kernel | None = None, seed: int = 0,
                until: float = math.inf) -> Process:
    """Learn a kernel from rows and condition on them; rows far from their prediction by the others count less.

    Args:
        x: [n, d] logarithms of sizes; n ≥ 1.
        v: [n, c] codes.
        y: [n].
        start: Kernel to start from; default: the middle of the priors.
        seed: Seed of the chosen rows where there are more than ``MOST_TO_LEARN_FROM``.
        until: Time on the monotonic clock after which the best kernel so far is taken.
    """
    rows = np.arange(len(y))
    if len(rows) > MOST_TO_LEARN_FROM:
        rows = np.sort(np.random.default_rng(seed).choice(rows, MOST_TO_LEARN_FROM, replace=False))
    kernel = _learned(x[rows], v[rows], y[rows], np.ones(len(rows)), start, until)
    process = Process(kernel, x, v, y, np.ones(len(y)))
    mean, deviation = process.left_out()
    far = np.abs(y - mean) / deviation
    if (far <= FAR).all():
        return process
    loose = np.where(far > FAR, far**2, 1.0)
    return Process(_learned(x[rows], v[rows], y[rows], loose[rows], kernel, until), x, v, y, loose)


class _TimeIsUp(Exception):
    """Raised to end a search."""


def _learned(x: Float64, v: Codes, y: Float64, loose: Float64, start: Kernel | None, until: float) -> Kernel:
    n, d, c = len(y), x.shape[1], v.shape[1]
    middle = _as_logs(Kernel.start(d, c))
    widths = np.array([_PRIOR_WIDTHS["variance"]] * 2 + [_PRIOR_WIDTHS["noise"]]
                      + [_PRIOR_WIDTHS["length"]] * d + [_PRIOR_WIDTHS["differs"]] * c)
    apart = [np.square(x[:, None, k] - x[None, :, k]) for k in range(d)]
    unlike = [(v[:, None, k] != v[None, :, k]).astype(np.float64) for k in range(c)]

    def cost(logs: Float64) -> tuple[float, Float64]:
        """Return the negative log posterior density, and its gradient by the logarithms."""
        smooth, offset, noise = np.exp(logs[:3])
        lengths, differs = np.exp(logs[3:3 + d]), np.exp(logs[3 + d:])
        alike = np.exp(-sum((t * u for t, u in zip(differs, unlike, strict=True)), np.zeros((n, n))))
        square = sum((a / length**2 for a, length in zip(apart, lengths, strict=True)), np.zeros((n, n)))
        r = np.sqrt(5.0 * square)
        decay = np.exp(-r)
        curve = smooth * (1 + r + r**2 / 3) * decay * alike
        flat = offset * alike
        spread = noise * loose
        try:
            root = np.linalg.cholesky(curve + flat + np.diag(spread + 1e-10))
        except np.linalg.LinAlgError:
            return 1e10, np.zeros(len(logs))
        inverse_root = np.linalg.inv(root)
        inverse = inverse_root.T @ inverse_root
        weights = inverse @ y
        slope = inverse - np.outer(weights, weights)  # twice the derivative of the cost by the covariances
        steep = (5.0 / 3.0) * smooth * (1 + r) * decay * alike
        gradient = [0.5 * np.sum(slope * curve), 0.5 * np.sum(slope * flat), 0.5 * np.sum(np.diag(slope) * spread)]
        gradient += [0.5 * np.sum(slope * steep * a) / length**2 for a, length in zip(apart, lengths, strict=True)]
        gradient += [-0.5 * t * np.sum(slope * (curve + flat) * u) for t, u in zip(differs, unlike, strict=True)]
        off = (logs - middle) / widths
        value = 0.5 * y @ weights + np.log(np.diag(root)).sum() + 0.5 * off @ off
        return float(value), np.array(gradient) + off / widths

    begin = middle if start is None else _as_logs(start)
    low, high = middle - _REACH, middle + _REACH
    low[2] = np.log(_LEAST_NOISE)
    begin = np.clip(begin, low, high)
    best, least = begin, math.inf

    def timed(logs: Float64) -> tuple[float, Float64]:
        nonlocal best, least
        if time.monotonic() > until:
            raise _TimeIsUp
        value, gradient = cost(logs)
        if value < least:
            best, least = logs.copy(), value
        return value, gradient

    with suppress(_TimeIsUp):
        best = optimize.minimize(timed, begin, jac=True, method="L-BFGS-B", bounds=list(zip(low, high, strict=True)),
                        options={"maxfun": _EVALUATIONS}).x
    smooth, offset, noise = np.exp(best[:3])
    return Kernel(float(smooth), float(offset), float(noise), np.exp(best[3:3 + d]), np.exp(best[3 + d:]))


def _as_logs(kernel: Kernel) -> Float64:
    return np.log(np.concatenate([[kernel.smooth, kernel.offset, kernel.noise], kernel.lengths,
                                  np.maximum(kernel.differs, 1e-6)]))
