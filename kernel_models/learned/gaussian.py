"""``GaussianModel``: formulas with efficiencies fitted to a device, and what is left over as a Gaussian process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernel_models.datasets.samples import Samples, fold_of
from kernel_models.device import DeviceSpec
from kernel_models.heuristics import RooflineModel, fit_efficiencies
from kernel_models.learned.points import Points
from kernel_models.learned.process import Kernel, Process, fit_process
from kernel_models.model import Arrays, Float64, Source, Times
from kernel_models.op_call import Family, OpCall

LEAST_CALLS, MOST_CALLS = 12, 900
"""Fewer say nothing beyond the formulas; more are better left to trees (the work grows with the cube)."""
REACH = 4.0
"""A size is covered up to this factor beyond those measured: further off the process returns to the formulas."""
_SHORTEST_US = 0.1
_SHARE = 0.8
"""Of an interval."""
_NARROWEST = 0.05
"""Least half width of an interval, log: what the same kernel varies by between runs."""
_FOLDS = 5


@dataclass(frozen=True)
class GaussianModel:
    """One family on one device.

    Attributes:
        family: the family.
        formula: the formulas, with fitted efficiencies.
        points: how calls become points.
        process: of log(measured / formula).
        widths: half width of the interval in conditional standard deviations, from rows left out.
    """

    family: Family
    formula: RooflineModel
    points: Points
    process: Process
    widths: float

    kind = "gaussian"
    """Name among the kinds of models a profile can hold."""
    source = Source.LEARNED

    def covers(self, calls: Sequence[OpCall]) -> npt.NDArray[np.bool_]:
        """Kinds, dtypes, layouts and flags all measured, sizes within a factor of ``REACH`` of those measured."""
        return self.points.within(calls, REACH)

    def predict(self, calls: Sequence[OpCall]) -> Times:
        """Times of covered calls, µs."""
        x, v = self.points.points(calls)
        mean, deviation = self.process.predict(x, v)
        time = np.maximum(self.formula.predict(calls).time_us * np.exp(mean), _SHORTEST_US)
        half = np.maximum(self.widths * deviation, _NARROWEST)
        return Times(time, time * np.exp(-half), time * np.exp(half))

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Plain values and arrays; see ``from_state``."""
        formula, _ = self.formula.state()
        return ({"family": self.family.value, "formula": formula, "points": self.points.to_json(),
                 "kernel": self.process.kernel.to_json(), "widths": self.widths},
                {"x": self.process.x, "v": self.process.v, "y": self.process.y, "loose": self.process.loose})

    @classmethod
    def from_state(cls, values: dict[str, Any], arrays: Arrays, spec: DeviceSpec | None = None) -> GaussianModel:
        """The model of a state, on ``spec`` or the device the state names.

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
        return cls(Family(values["family"]), RooflineModel.from_state(values["formula"], {}, spec), points,
                   Process(kernel, x, v, y, loose), float(values["widths"]))


def fit_gaussian(samples: Samples, spec: DeviceSpec) -> tuple[GaussianModel, Float64]:
    """The model of samples, and each row as predicted without its shape group, µs [n].

    The formulas and the kernel's few parameters are those of all rows; the process sees no row of the group's fold.
    """
    formula = RooflineModel(samples.family, spec, fit_efficiencies(samples.calls, samples.measured_us, spec,
                                                                   source=samples.source))
    base = formula.predict(samples.calls).time_us
    points = Points.of(samples.family, samples.calls)
    x, v = points.points(samples.calls)
    process = fit_process(x, v, np.log(samples.measured_us / base))
    fold = np.array([fold_of(label, _FOLDS) for label in samples.labels()])
    out = process.left_out_by(fold) if len(set(fold.tolist())) > 1 else process.left_out()[0]
    mean, deviation = process.left_out()
    widths = float(np.clip(np.quantile(np.abs(process.y - mean) / deviation, _SHARE), 0.5, 5.0))
    return GaussianModel(samples.family, formula, points, process, widths), base * np.exp(out)
