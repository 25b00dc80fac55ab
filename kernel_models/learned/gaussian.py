"""``GaussianModel``: formulas with efficiencies fitted to a device, and a Gaussian process for their residuals.

Where a library switches between algorithms, trees can follow the steps, a smooth process cannot. There the geometric
mean of both is taken, if it is better on rows left out. On a CPU's convolutions 0.19 becomes 0.15, on its matrix
products 0.17 becomes 0.12 (mean absolute errors by cross-validation, 426 and 114 calls).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernel_models.datasets.samples import Samples, fold_of
from kernel_models.device import DeviceSpec
from kernel_models.heuristics.efficiency import INTERVAL, NARROWEST, fit_efficiencies
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.learned.boosted import SHORTEST_US, BoostedModel, Intervals
from kernel_models.learned.boosting import Boosting
from kernel_models.learned.fit import FOLDS, Problem
from kernel_models.learned.process import Kernel, Points, Process, fit_process
from kernel_models.op_call import Arrays, Family, OpCall, Source, Times
from tracer.arrays import Bool, Float64

LEAST_CALLS, MOST_CALLS = 12, 900
"""Fewest calls that show more than the formulas, and most: trees suit more calls (the work grows with the cube)."""
REACH = 4.0
"""A size is covered up to this factor beyond the measured ones: further out the formulas remain. Chosen."""
BLEND_ABOVE, BLEND_FROM = 0.06, 60
"""Trees are tried where the process's mean absolute error is above the first figure and there are at least as many
calls as the second. Chosen: there the process alone is worse than a repeated measurement would be."""
TREES = Boosting(120, 0.15, 8, 0.5, 4)
"""Settings of the trees, as ``kernel_models.fitting.SMALL``."""
_BLENDED = "trees."
"""Prefix of the trees' arrays in a state."""


@dataclass(frozen=True)
class GaussianModel:
    """A Gaussian process over formulas, for one family on one device.

    Attributes:
        family: The family.
        formula: The formulas, with fitted efficiencies.
        points: Mapping of calls to points.
        process: Process of log(measured / formula).
        widths: Half width of the interval in conditional standard deviations, from rows left out.
        trees: Trees whose times are mixed in for the calls that they cover, or ``None``.
    """

    family: Family
    formula: RooflineModel
    points: Points
    process: Process
    widths: float
    trees: BoostedModel | None = None

    kind = "gaussian"
    """Name among the kinds of models a profile can hold."""
    source = Source.LEARNED

    def covers(self, calls: Sequence[OpCall]) -> Bool:
        """Return whether kind, dtype, layout and flags were measured, and sizes lie within a factor of ``REACH``."""
        return self.points.within(calls, REACH)

    def predict(self, calls: Sequence[OpCall]) -> Times:
        """Return the times of calls that ``covers`` accepts, µs."""
        x, v = self.points.points(calls)
        mean, deviation = self.process.predict(x, v)
        time = np.maximum(self.formula.predict(calls).time_us * np.exp(mean), SHORTEST_US)
        if self.trees is not None:
            known = self.trees.covers(calls)
            if known.any():
                mine = [call for call, keep in zip(calls, known, strict=True) if keep]
                time[known] = np.sqrt(time[known] * self.trees.predict(mine).time_us)
        half = np.maximum(self.widths * deviation, NARROWEST)
        return Times(time, time * np.exp(-half), time * np.exp(half))

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return the model as plain values and arrays; see ``from_state``."""
        formula, _ = self.formula.state()
        values: dict[str, Any] = {
            "family": self.family.value, "formula": formula, "points": self.points.to_json(),
            "kernel": self.process.kernel.to_json(), "widths": self.widths}
        arrays = {"x": self.process.x, "v": self.process.v, "y": self.process.y, "loose": self.process.loose}
        if self.trees is not None:
            values["trees"], more = self.trees.state()
            arrays |= {_BLENDED + name: array for name, array in more.items()}
        return values, arrays

    @classmethod
    def from_state(cls, values: dict[str, Any], arrays: Arrays, spec: DeviceSpec | None = None) -> GaussianModel:
        """Return the model that ``state`` stored, on ``spec`` or the device that the state names.

        Raises:
            DeviceError: no such device.
            KeyError, TypeError, ValueError: the state is not as ``state`` makes it.
        """
        points, kernel = Points.from_json(values["points"]), Kernel.from_json(values["kernel"])
        x, y, loose = (np.ascontiguousarray(arrays[name], np.float64) for name in ("x", "y", "loose"))
        v = np.ascontiguousarray(arrays["v"], np.int64)
        n = len(y)
        if (x.shape != (n, len(points.kept)) or v.shape != (n, len(points.parts)) or loose.shape != (n,)
                or kernel.lengths.shape != (x.shape[1],) or kernel.differs.shape != (v.shape[1],)
                or not all(np.isfinite(one).all() for one in (x, y, loose)) or not n or (loose < 1).any()):
            raise ValueError("the arrays of a model do not fit together")
        trees = None
        if values.get("trees") is not None:
            trees = BoostedModel.from_state(values["trees"], {name.removeprefix(_BLENDED): array for name, array in
                                                              arrays.items() if name.startswith(_BLENDED)})
        return cls(Family(values["family"]), RooflineModel.from_state(values["formula"], {}, spec), points,
                   Process(kernel, x, v, y, loose), float(values["widths"]), trees)


def fit_gaussian(samples: Samples, spec: DeviceSpec, until: float = math.inf) -> tuple[GaussianModel, Float64]:
    """Return the model of samples, and each row as predicted without its shape group, µs [n].

    The formulas and the kernel's few parameters are those of all rows; the process sees no row of the group's fold.
    After ``until``, on the monotonic clock, the parameters are the best found so far, and no trees are tried.
    """
    formula = RooflineModel(samples.family, spec, fit_efficiencies(samples.calls, samples.measured_us, spec,
                                                                   source=samples.source))
    base = formula.predict(samples.calls).time_us
    points = Points.of(samples.family, samples.calls)
    x, v = points.points(samples.calls)
    process = fit_process(x, v, np.log(samples.measured_us / base), until=until)
    fold = np.array([fold_of(label, FOLDS) for label in samples.labels()])
    out = process.left_out_by(fold) if len(set(fold.tolist())) > 1 else process.left_out()[0]
    alone = base * np.exp(out)
    trees, blended = (None, alone) if time.monotonic() > until else _blended(samples, spec, alone)
    _, deviation = process.left_out()
    far = np.abs(np.log(samples.measured_us / blended)) / deviation
    widths = float(np.clip(np.quantile(far, INTERVAL[1] - INTERVAL[0]), 0.5, 5.0))
    return GaussianModel(samples.family, formula, points, process, widths, trees), blended


def _blended(samples: Samples, spec: DeviceSpec, alone: Float64) -> tuple[BoostedModel | None, Float64]:
    """Return the trees and the mixed times, if better than the process's own times ``alone``."""
    measured = samples.measured_us
    error = np.abs(alone / measured - 1).mean()
    if len(samples) < BLEND_FROM or error < BLEND_ABOVE:
        return None, alone
    problem = Problem.of(samples, spec)
    predicted, done, members = problem.out_of_fold(TREES)
    mixed = np.where(done, np.sqrt(alone * np.where(done, predicted, 1.0)), alone)
    if np.abs(mixed / measured - 1).mean() > error:
        return None, alone
    return problem.model(replace(TREES, members=members), Intervals.of(predicted[done], measured[done])), mixed
