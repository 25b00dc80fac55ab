"""Intervals from what cross-validation left over: quantiles of log residuals by predicted time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tracer.arrays import Float64

QUANTILES = (0.1, 0.9)
"""The 80% interval."""
LEAST_IN_BIN = 80
MOST_BINS = 12


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
        """Fit to out-of-fold predictions: split-conformal quantiles in bins of equally many predictions."""
        log_us = np.log(predicted_us)
        residuals = np.log(measured_us) - log_us
        bins = int(np.clip(len(residuals) // LEAST_IN_BIN, 1, MOST_BINS))
        order = np.array_split(np.argsort(log_us, kind="stable"), bins)
        knots = np.array([[np.median(log_us[rows]), *_ends(residuals[rows])] for rows in order])
        return cls(*np.ascontiguousarray(knots.T.round(6)))

    def around(self, time_us: Float64) -> tuple[Float64, Float64]:
        """Low and high ends of predicted times, µs."""
        log_us = np.log(time_us)
        return (time_us * np.exp(np.interp(log_us, self.log_us, self.low)),
                time_us * np.exp(np.interp(log_us, self.log_us, self.high)))

    def to_json(self) -> dict[str, Any]:
        """Plain values to store."""
        return {name: getattr(self, name).tolist() for name in ("log_us", "low", "high")}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Intervals:
        """The intervals of ``to_json``."""
        found = [np.array(values[name], np.float64) for name in ("log_us", "low", "high")]
        if not (found[0].ndim == 1 and len(found[0]) and len({len(x) for x in found}) == 1
                and all(np.isfinite(x).all() for x in found)):
            raise ValueError("the intervals of a model are damaged")
        return cls(*found)


def _ends(residuals: Float64) -> tuple[float, float]:
    """Quantiles with the finite-sample correction of conformal prediction: as if one more residual lay outside."""
    n = len(residuals)
    widened = (n + 1) / n
    low, high = np.quantile(residuals, [max(0.0, 1 - (1 - QUANTILES[0]) * widened), min(1.0, QUANTILES[1] * widened)])
    return min(float(low), 0.0), max(float(high), 0.0)
