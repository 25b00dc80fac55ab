"""Errors of predictions: the figures every table and profile shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tracer.arrays import Float64


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of n predictions, as shares of the measured time: |p/t − 1| unless it says otherwise.

    Attributes:
        n: cases.
        mape: mean.
        median, p90, max: median, 90th percentile and largest.
        bias: mean of p/t − 1, signed.
        coverage: share of measured times within the 80% interval; ``None`` without intervals.
    """

    n: int
    mape: float
    median: float
    bias: float
    p90: float
    max: float
    coverage: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, six decimals."""
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()
                if value is not None}


def errors_of(
    predicted_us: Float64, measured_us: Float64, low_us: Float64 | None = None, high_us: Float64 | None = None
) -> Errors:
    """The errors of predictions, and with the intervals' ends their coverage. All [n], n ≥ 1."""
    signed = predicted_us / measured_us - 1
    error = np.abs(signed)
    coverage = None
    if low_us is not None and high_us is not None:
        coverage = float(np.mean((low_us <= measured_us) & (measured_us <= high_us)))
    return Errors(len(error), float(error.mean()), float(np.median(error)), float(signed.mean()),
                  float(np.quantile(error, 0.9)), float(error.max()), coverage)
