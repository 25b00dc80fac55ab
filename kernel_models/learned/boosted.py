"""``BoostedModel``: the times of one family's calls on one device, learned from its measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernel_models.heuristics.efficiency import INTERVAL
from kernel_models.learned.features import RECIPES, Columns, Figures, Variants, gemm_baseline_us
from kernel_models.learned.neighbours import Neighbours
from kernel_models.learned.trees import Trees
from kernel_models.op_call import DIMENSIONS, Arrays, Family, OpCall, Source, Times
from tracer.arrays import Bool, Float64, Int64

REACH = 2.0
"""A size is covered up to this factor beyond the measured ones; further out the trees would repeat their last leaf."""
SHORTEST_US = 0.1
"""Least predicted time of a kernel, µs: chosen, a tenth of the shortest in the tables."""
MOST_LOG = 50.0
"""Largest log of a predicted time over its baseline: only damaged trees predict more."""
LEAST_IN_BIN, MOST_BINS = 80, 12
"""Least residuals of a bin, and most bins of predicted times: chosen so that each quantile of a bin lies among eight
residuals or more."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Ends of the interval over the predicted time, natural logarithms, at knots of the predicted time.

    Attributes:
        log_us: logarithms of predicted times, ascending, [knots].
        low, high: log(end / predicted), [knots]; ``low`` ≤ 0 ≤ ``high``.
    """

    log_us: Float64
    low: Float64
    high: Float64

    @classmethod
    def of(cls, predicted_us: Float64, measured_us: Float64) -> Intervals:
        """Fit to out-of-fold predictions: split-conformal quantiles in bins with equal numbers of predictions."""
        log_us = np.log(predicted_us)
        residuals = np.log(measured_us) - log_us
        bins = int(np.clip(len(residuals) // LEAST_IN_BIN, 1, MOST_BINS))
        order = np.array_split(np.argsort(log_us, kind="stable"), bins)
        knots = np.array([[np.median(log_us[rows]), *_ends(residuals[rows])] for rows in order])
        return cls(*np.ascontiguousarray(knots.T.round(6)))

    def around(self, time_us: Float64) -> tuple[Float64, Float64]:
        """Return the low and the high ends around predicted times, µs."""
        log_us = np.log(time_us)
        return (time_us * np.exp(np.interp(log_us, self.log_us, self.low)),
                time_us * np.exp(np.interp(log_us, self.log_us, self.high)))

    def to_json(self) -> dict[str, Any]:
        """Return the intervals as plain values to store."""
        return {name: getattr(self, name).tolist() for name in ("log_us", "low", "high")}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Intervals:
        """Return the intervals that ``to_json`` stored."""
        found = [np.array(values[name], np.float64) for name in ("log_us", "low", "high")]
        if not (found[0].ndim == 1 and len(found[0]) and len({x.shape for x in found}) == 1
                and all(np.isfinite(x).all() for x in found)):
            raise ValueError("the intervals of a model are damaged")
        return cls(*found)


def _ends(residuals: Float64) -> tuple[float, float]:
    """Return quantiles with the finite-sample correction of conformal prediction: one more residual lies outside."""
    n = len(residuals)
    widened = (n + 1) / n
    low, high = np.quantile(residuals, [max(0.0, 1 - (1 - INTERVAL[0]) * widened), min(1.0, INTERVAL[1] * widened)])
    return min(float(low), 0.0), max(float(high), 0.0)


@dataclass(frozen=True)
class BoostedModel:
    """Model of boosted trees on a recipe's features, times the recipe's baseline. ``kernel_models.fitting`` makes it.

    Attributes:
        family: The family.
        recipe: Name in ``RECIPES``.
        variants: Kinds, dtypes, layouts and flags in the fit.
        figures: Figures of the device.
        limits: Least and largest measured size of each variant, [variants, 2, dimensions].
        trees: Trees that predict log(time / baseline).
        intervals: Intervals from out-of-fold residuals.
        neighbours: Measured products whose times are features too, after the recipe's.
    """

    family: Family
    recipe: str
    variants: Variants
    figures: Figures
    limits: Int64
    trees: Trees
    intervals: Intervals
    neighbours: Neighbours | None = None

    kind = "boosted"
    """Name among the kinds of models a profile can hold."""
    source = Source.LEARNED

    def covers(self, calls: Sequence[OpCall]) -> Bool:
        """Return whether each call is a known variant with all sizes within a factor of ``REACH`` of measured ones."""
        return self._within(self.variants.columns(calls, work=False))

    def _within(self, columns: Columns) -> Bool:
        low, high = self.limits[columns.code, 0] / REACH, self.limits[columns.code, 1] * REACH
        return (columns.code >= 0) & ((columns.dims >= low) & (columns.dims <= high)).all(axis=1)

    def predict(self, calls: Sequence[OpCall]) -> Times:
        """Return the times of calls that ``covers`` accepts, µs.

        Raises:
            ValueError: a call is of a variant that the model does not know.
        """
        columns = self.variants.columns(calls, work=RECIPES[self.recipe].work)
        if len(columns) and columns.code.min() < 0:
            raise ValueError(f"A {self.family.value} call is of a kind this model was not fitted to.")
        time_us = self.times(columns)
        return Times(time_us, *self.intervals.around(time_us))

    def covered_times(self, calls: Sequence[OpCall]) -> tuple[Bool, Times]:
        """Return ``covers`` and the times of covered calls; the calls' numbers are collected once."""
        columns = self.variants.columns(calls, work=RECIPES[self.recipe].work)
        covered = self._within(columns)
        if not covered.all():
            columns = columns.taken(covered)
        time_us = self.times(columns) if len(columns) else np.zeros(0)
        return covered, Times(time_us, *self.intervals.around(time_us))

    def times(self, columns: Columns) -> Float64:
        """Return the expected times of the calls in ``columns``, µs [n]."""
        features, baseline = RECIPES[self.recipe].describe(columns, self.figures)
        if self.neighbours is not None:
            near = self.neighbours.features(columns, lambda asked: gemm_baseline_us(asked, self.figures))
            features = np.hstack([features, near])
        return np.maximum(baseline * np.exp(np.minimum(self.trees.predict(features), MOST_LOG)), SHORTEST_US)

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return the model as plain values and arrays; see ``from_state``."""
        values = {"family": self.family.value, "recipe": self.recipe, "figures": self.figures.to_json(),
                  "variants": [[kind, dtype, layout, list(flags)] for kind, dtype, layout, flags in
                               self.variants.known],
                  "intervals": self.intervals.to_json()}
        near = {} if self.neighbours is None else self.neighbours.arrays()
        return values, {"limits": self.limits, **self.trees.arrays(), **near}

    @classmethod
    def from_state(cls, values: dict[str, Any], arrays: Arrays) -> BoostedModel:
        """Return the model that ``state`` stored.

        Raises:
            KeyError, TypeError, ValueError: the state is not as ``state`` makes it.
        """
        family = Family(values["family"])
        if values["recipe"] not in RECIPES:
            raise ValueError(f"its recipe {str(values['recipe'])[:40]!r} is not known to this foretrace")
        variants = Variants(family, [(str(kind), str(dtype), str(layout), tuple(map(str, flags)))
                                     for kind, dtype, layout, flags in values["variants"]])
        figures = Figures.from_json(values["figures"])
        limits = np.ascontiguousarray(arrays["limits"], np.int64)
        known = len(variants.known)
        if limits.shape != (known, 2, len(DIMENSIONS[family])) or any(
                len(column) != known for column in (figures.tflops, figures.element_bytes, figures.causal,
                                                    figures.backward)):
            raise ValueError("the arrays of a model do not fit its variants")
        near = Neighbours.from_arrays(arrays)
        if near is not None and (family is not Family.GEMM or int(near.head[:, 0].max()) >= known):
            raise ValueError("the neighbours of a model do not fit its family or variants")
        return cls(family, values["recipe"], variants, figures, limits, Trees.from_arrays(arrays),
                   Intervals.from_json(values["intervals"]), near)


def limits_of(columns: Columns, variants: int) -> Int64:
    """Return the least and the largest size of each variant, [variants, 2, dimensions]."""
    limits = np.zeros((variants, 2, columns.dims.shape[1]), np.int64)
    for code in range(variants):
        rows = columns.dims[columns.code == code]
        limits[code] = rows.min(axis=0), rows.max(axis=0)
    return limits
