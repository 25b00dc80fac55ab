"""Errors of predictions, the figures that tables and profiles show, and a profile judged by measured calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kernel_models.datasets.samples import DataError, Samples, joined
from kernel_models.op_call import Source
from kernel_models.pricing import price
from kernel_models.profile import DeviceProfile
from tracer.arrays import Float64


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of n predictions p of measured times t, as shares |p/t − 1| unless stated otherwise.

    Attributes:
        n: number of cases.
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
        """Return the errors as plain values, six decimals."""
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()
                if value is not None}


def errors_of(
    predicted_us: Float64, measured_us: Float64, low_us: Float64 | None = None, high_us: Float64 | None = None
) -> Errors:
    """Return the errors of predictions, and with the ends of intervals their coverage. All arrays [n], n ≥ 1."""
    signed = predicted_us / measured_us - 1
    error = np.abs(signed)
    coverage = None
    if low_us is not None and high_us is not None:
        coverage = float(np.mean((low_us <= measured_us) & (measured_us <= high_us)))
    return Errors(len(error), float(error.mean()), float(np.median(error)), float(signed.mean()),
                  float(np.quantile(error, 0.9)), float(error.max()), coverage)


@dataclass(frozen=True)
class Evaluation:
    """The result of ``evaluate_profile``.

    Attributes:
        device: The profile's device.
        families: Errors by family, with the interval's coverage.
        by_software: Errors by family and software.
        sources: Share of the calls from each source, by family.
        notes: Sentences about what was left out.
    """

    device: str
    families: dict[str, Errors]
    by_software: dict[tuple[str, str], Errors]
    sources: dict[str, dict[str, float]]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the evaluation as plain values; errors as shares, not percent."""
        return {
            "device": self.device,
            "families": {name: {**errors.to_json(), "sources": self.sources[name]}
                         for name, errors in self.families.items()},
            "software": [{"family": family, "software": software, **errors.to_json()}
                         for (family, software), errors in self.by_software.items()],
            "notes": self.notes,
        }


def evaluate_profile(profile: DeviceProfile, samples: Sequence[Samples]) -> Evaluation:
    """Price every measured call of the profile's device and compare the prices with the measurements.

    Raises:
        DataError: nothing was measured on that device.
    """
    mine = joined(one for one in samples if one.device == profile.device.name)
    others = sorted({one.device for one in samples} - {profile.device.name})
    if not mine:
        raise DataError(f"The data hold nothing measured on {profile.device.name}, the profile's device; they are of "
                        f"{', '.join(others) or 'no device'}.")
    parts: dict[tuple[str, str], np.ndarray] = {}
    for one in mine:
        priced = price(one.calls, profile.device, profile.with_software(one.software))
        at = priced.index
        parts[one.family.value, one.software] = np.array(
            [one.measured_us, priced.time_us[at], priced.low_us[at], priced.high_us[at], priced.source[at]])
    families = {}
    for family in sorted({family for family, _ in parts}):
        families[family] = np.concatenate([part for (name, _), part in parts.items() if name == family], axis=1)
    known = {entry.software for entry in profile.entries}
    strange = sorted({software for _, software in parts if software not in known})
    notes = [f"Measurements of other devices were left out: {', '.join(others)}."] if others else []
    if strange:
        notes.append(f"The profile has no model of {', '.join(strange[:6])}: priced by models of other software.")
    return Evaluation(
        profile.device.name, {name: _errors(numbers) for name, numbers in families.items()},
        {key: _errors(part) for key, part in parts.items()},
        {name: {source.label: round(float(np.mean(numbers[4] == source)), 4) for source in Source
                if (numbers[4] == source).any()} for name, numbers in families.items()}, notes)


def _errors(numbers: np.ndarray) -> Errors:
    measured, predicted, low, high, _ = numbers
    return errors_of(predicted, measured, low, high)
