"""Fitting corrections of the formulas to whole steps, and to measured kernels as well.

A step's time is the sum of its calls' times; only the sum is known. So all corrections are fitted at once to the
logarithm of the sums' errors, and each is pulled to zero, more strongly the narrower its class is:

    least  Σ weight · H(log T − log measured) / ε² + ½ Σ strength(class) · w² + ½ smoothness · Σ (w_q − w_{q+1})²

H is Huber's loss, which limits the effect of steps of a disturbed machine. A measured kernel is a step of one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
from scipy.optimize import minimize

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.call_classes import grouped
from kernel_models.heuristics.corrections import (
    KNOTS,
    LARGEST,
    PARTS,
    THE_DEVICE,
    Corrections,
    Weight,
    curves_of,
    excess_of,
    parts_of,
    plain_weights,
    traffic_factor,
    traits_of,
)
from kernel_models.heuristics.roofline import Least, Parts, RooflineModel
from kernel_models.heuristics.work import SHARPNESS, overlapped
from kernel_models.op_call import PRODUCTS, Family, OpCall
from tracer.arrays import Float64, Int64

TOLERANCE, KERNEL_TOLERANCE = 0.1, 0.2
"""Errors of a step and of a kernel, as logarithms, that count as one unit in the fit: chosen, about the formulas'
errors."""
HUBER = 0.15
"""Larger errors count linearly, not squared: chosen, one and a half times a step's unit."""
STRENGTH = (0.6, 2.0, 6.0, 12.0, 6.0, 100.0, 200.0)
"""Pull of corrections to zero: four classes from wide to narrow, kind of memory or arithmetic, architecture, device.

Chosen among eight sets on the first 170 models of ``benchmarks/zoo.py``, by leaving out families of models and by
leaving out a GPU. Strong pulls on a device's own make devices share corrections, which a new device needs.
"""
CURVE_STRENGTH, SMOOTHNESS = (2.0, 6.0), 4.0
"""Pull to zero of a curve's knots, and pull of neighbouring knots together: chosen with ``STRENGTH``."""
FIXED_OF_DEVICE = 0.05
"""Factor on the pull of one device's fixed costs to zero: an empty kernel's time is a device's own, and short kernels
of one device must not shorten another's. Architectures and memories keep the whole pull: theirs are carried over."""
TRAFFIC_OF_PRODUCTS = 8.0
"""Factor on the pull on the traffic of products. No step shows whether arithmetic or traffic takes the time, but
another device has other rates of either, and the traffic is better known. Chosen between 1 and 8 on the rows of PyTorch
2.4, three of the five folds, by the predictions for the other GPU."""
ITERATIONS = 300
"""Iterations of L-BFGS. Chosen: the cost hardly falls afterwards."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A timed step, or a measured kernel.

    Attributes:
        calls: Number of runs of each call in the step.
        device: Device that ran the step.
        measured_us: Time without the profiler, µs.
        weight: Weight in the fit, relative to a usual step.
        is_kernel: Whether the step is one measured kernel.
    """

    calls: Mapping[OpCall, float]
    device: DeviceSpec
    measured_us: float
    weight: float = 1.0
    is_kernel: bool = False


class StepProblem:
    """Measured steps as matrices: built once, fitted to any subset of the steps.

    Args:
        steps: the measured steps.
        start: corrections that the fit starts from and is pulled to; ``None``: the formulas without corrections.

    Raises:
        ValueError: a step has no device work, or no positive time.
    """

    def __init__(self, steps: Sequence[MeasuredStep], start: Corrections | None = None) -> None:
        self.steps = steps
        self.start = start
        self.measured_us: Float64 = np.array([step.measured_us for step in steps], np.float64)
        self.weight: Float64 = np.array([step.weight / (KERNEL_TOLERANCE if step.is_kernel else TOLERANCE) ** 2
                                         for step in steps], np.float64)
        self._calls: list[OpCall] = []
        self._rows: list[tuple[DeviceSpec, Int64]] = []
        self.count = self._counted()
        n = len(self._calls)
        self.parts = Parts(*(np.zeros(n) for _ in Parts._fields))
        self.least = Least(*(np.zeros(n) for _ in Least._fields))
        self._excess = np.ones(n)
        self._start = {part: np.zeros(n) for part in PARTS}
        self.family = np.array([call.family.value for call in self._calls])
        for device, rows in self._rows:
            self._price(device, rows)
        self.weights: list[tuple[str, Weight]] = []
        self.matrix = self._design()
        self._strength = np.array([self._pull(part, weight) for part, weight in self.weights])
        self._neighbours = self._next_knots()
        usual = self.times_us(np.zeros(len(self.weights)))
        sound = np.isfinite(usual) & (usual > 0) & np.isfinite(self.measured_us) & (self.measured_us > 0)
        if not sound.all():
            raise ValueError(f"{(~sound).sum()} steps have no device work, or no measured time; the first is number "
                             f"{np.argmin(sound)}.")

    def _counted(self) -> scipy.sparse.csr_matrix:
        """Return the number of runs of each distinct call (by device) in each step, [steps, calls]."""
        places: dict[tuple[str, OpCall], int] = {}
        by_device: dict[str, tuple[DeviceSpec, list[int]]] = {}
        entries: list[tuple[int, int, float]] = []
        for number, step in enumerate(self.steps):
            _, mine = by_device.setdefault(step.device.name, (step.device, []))
            for call, times in step.calls.items():
                place = places.setdefault((step.device.name, call), len(places))
                if place == len(self._calls):
                    self._calls.append(call)
                    mine.append(place)
                entries.append((number, place, times))
        self._rows = [(device, np.array(rows, np.int64)) for device, rows in by_device.values()]
        row, column, value = np.array(entries, np.float64).reshape(-1, 3).T
        return scipy.sparse.csr_matrix((value, (row.astype(np.int64), column.astype(np.int64))),
                                       shape=(len(self.steps), len(self._calls)))

    def _price(self, device: DeviceSpec, rows: Int64) -> None:
        for family in Family:
            mine = rows[[self._calls[row].family is family for row in rows.tolist()]]
            if len(mine):
                calls = [self._calls[row] for row in mine.tolist()]
                parts, least = RooflineModel(family, device).parts(calls)
                for column, values in zip((*self.parts, *self.least), (*parts, *least), strict=True):
                    column[mine] = values
                if family in PRODUCTS:
                    self._excess[mine] = excess_of(device)
                if self.start is not None:
                    for part, sums in zip(PARTS, self.start.sums(calls, device), strict=True):
                        self._start[part][mine] = sums

    def _design(self) -> dict[str, scipy.sparse.csr_matrix]:
        """Return for each part of a price the coefficients of the fitted numbers in every call, [calls, numbers]."""
        numbers: dict[tuple[str, str], int] = {}
        entries: dict[str, list[tuple[Int64, Int64, Float64]]] = {part: [] for part in PARTS}

        def number(part: str, weight: Weight) -> int:
            found = numbers.setdefault((part, weight.name), len(numbers))
            if found == len(self.weights):
                self.weights.append((part, weight))
            return found

        for device, rows in self._rows:
            calls = [self._calls[row] for row in rows.tolist()]
            traits = traits_of(device)
            for group in grouped(calls, device):
                mine = rows[group.rows]
                ones = np.ones(len(mine))
                for part in parts_of(group.classes.family):
                    for weight in plain_weights(group.classes, traits, part):
                        place = number(part, weight)
                        entries[part].append((mine, np.full(len(mine), place), ones))
                    for name, size, level in curves_of(group.classes, part):
                        below = np.minimum(np.floor(group.sizes[:, size]).astype(np.int64), KNOTS - 2)
                        share = np.clip(group.sizes[:, size] - below, 0.0, 1.0)
                        places = {knot: number(part, Weight(f"{traits.maker} {name}@{knot}", level, True)) for knot in
                                  sorted({*below.tolist(), *(below + 1).tolist()})}
                        for knots, much in ((below, 1.0 - share), (below + 1, share)):
                            entries[part].append((mine, np.array([places[knot] for knot in knots.tolist()]), much))
        found = {}
        for part, pieces in entries.items():
            row, column, value = (np.concatenate([piece[i] for piece in pieces]) if pieces else np.zeros(0)
                                  for i in range(3))
            found[part] = scipy.sparse.csr_matrix((value, (row, column)), shape=(len(self._calls), len(numbers)))
        return found

    @staticmethod
    def _pull(part: str, weight: Weight) -> float:
        pull = (CURVE_STRENGTH if weight.is_curve else STRENGTH)[weight.level]
        if part == "fixed" and weight.level == THE_DEVICE:
            pull *= FIXED_OF_DEVICE
        of_product = any(f" {family.value}" in weight.name for family in PRODUCTS)
        return pull * TRAFFIC_OF_PRODUCTS if part == "memory" and of_product else pull

    def _next_knots(self) -> Int64:
        places = {(part, weight.name): place for place, (part, weight) in enumerate(self.weights) if weight.is_curve}
        pairs = []
        for (part, name), place in places.items():
            curve, _, knot = name.rpartition("@")
            after = places.get((part, f"{curve}@{int(knot) + 1}"))
            if after is not None:
                pairs.append((place, after))
        return np.array(pairs, np.int64).reshape(-1, 2)

    def times_us(self, values: Float64) -> Float64:
        """Return the time of every step, µs [steps]."""
        found: Float64 = self.count @ self._times(values)[0]
        return found

    def family_times_us(self, values: Float64) -> tuple[list[str], Float64]:
        """Return the names of the families, and the time of each family in every step, µs [steps, families]."""
        whole = self._times(values)[0]
        names = sorted(set(self.family.tolist()))
        return names, np.stack([self.count @ np.where(self.family == name, whole, 0.0) for name in names], axis=1)

    def _times(self, values: Float64) -> tuple[Float64, dict[str, Float64]]:
        """Return the time of every call, µs, and its derivative by the logarithm of each part."""
        sums = {part: np.clip(self._start[part] + self.matrix[part] @ values, -LARGEST, LARGEST) for part in PARTS}
        free_compute = self.parts.compute_us * np.exp(sums["compute"])
        factor, slope = traffic_factor(sums["memory"], self._excess)
        free_memory = self.parts.memory_us * factor
        compute = np.maximum(free_compute, self.least.compute_us)
        memory = np.maximum(free_memory, self.least.memory_us)
        together = overlapped(compute, memory)
        fixed = self.parts.fixed_us * np.exp(sums["fixed"])
        # A part at its lower limit does not change with the numbers.
        by_compute = np.where(free_compute >= compute, together * (compute / together) ** SHARPNESS, 0.0)
        by_memory = np.where(free_memory >= memory, slope * together * (memory / together) ** SHARPNESS, 0.0)
        return fixed + together, {"compute": by_compute, "memory": by_memory, "fixed": fixed}

    def fit(self, rows: Int64 | None = None, iterations: int = ITERATIONS) -> Float64:
        """Return the numbers that fit the steps of ``rows`` best (default: all steps), in the order of ``weights``."""
        rows = np.arange(len(self.steps)) if rows is None else rows
        count, transposed = self.count[rows], self.count[rows].T.tocsr()
        target, weight = np.log(self.measured_us[rows]), self.weight[rows]
        first, second = self._neighbours.T
        of_numbers = {part: matrix.T.tocsr() for part, matrix in self.matrix.items()}

        def cost(values: Float64) -> tuple[float, Float64]:
            times, slopes = self._times(values)
            total = count @ times
            error = np.log(total) - target
            size = np.abs(error)
            loss = float(np.sum(weight * np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))))
            by_call = transposed @ (weight * np.clip(error, -HUBER, HUBER) / total)
            slope = self._strength * values
            loss += 0.5 * float(np.sum(self._strength * values**2))
            for part, matrix in of_numbers.items():
                slope = slope + matrix @ (by_call * slopes[part])
            steps = values[first] - values[second]
            loss += 0.5 * SMOOTHNESS * float(np.sum(steps**2))
            np.add.at(slope, first, SMOOTHNESS * steps)
            np.add.at(slope, second, -SMOOTHNESS * steps)
            return loss, slope

        found: Any = minimize(cost, np.zeros(len(self.weights)), jac=True, method="L-BFGS-B",
                              options={"maxiter": iterations, "maxcor": 20})
        values: Float64 = np.asarray(found.x, np.float64)
        return values

    def corrections(self, values: Float64, *, widths: Mapping[str, float] | None = None, source: str = "",
                    ) -> Corrections:
        """Return the fitted numbers as corrections, added to those that the fit started from."""
        start = self.start
        points = dict(start.points) if start else {}
        curves = {name: curve.copy() for name, curve in start.curves.items()} if start else {}
        for (part, weight), value in zip(self.weights, values.tolist(), strict=True):
            if weight.is_curve:
                name, _, knot = f"{part} {weight.name}".rpartition("@")
                curves.setdefault(name, np.full(KNOTS, np.nan))[int(knot)] = value + (
                    start.curves[name][int(knot)] if start and name in start.curves else 0.0)
            else:
                name = f"{part} {weight.name}"
                points[name] = points.get(name, 0.0) + value
        # Beyond the measured sizes a curve keeps its last value.
        held = {name: np.interp(np.arange(KNOTS), np.flatnonzero(np.isfinite(curve)), curve[np.isfinite(curve)])
                for name, curve in curves.items()}
        devices = tuple(sorted({*(start.devices if start else ()), *(step.device.name for step in self.steps
                                                                     if not step.is_kernel)}))
        families = frozenset(self.family.tolist()) | (start.families if start else frozenset())
        return Corrections(points, held, families, dict(widths or {}), devices, source)


def fit_widths(shares: Float64, errors: Float64, names: Sequence[str], least: float = 0.02) -> dict[str, float]:
    """Return the standard deviation of each family's log error in a step, from errors of steps left out of the fit.

    A step's variance is taken to be Σ (share · width)²: families err independently, the calls of one family equally.

    Args:
        shares: share of each family in the time of each step, [steps, families].
        errors: log of predicted over measured, [steps].
        names: names of the families.
        least: lower limit of each standard deviation.
    """
    clipped = np.clip(errors, *np.quantile(errors, (0.02, 0.98)))

    def cost(logs: Float64) -> float:
        variance = (shares**2) @ np.exp(2 * logs) + 1e-4
        return float(np.sum(0.5 * np.log(variance) + 0.5 * clipped**2 / variance)) + 0.5 * float(
            np.sum((logs - np.log(0.25)) ** 2))

    found: Any = minimize(cost, np.full(len(names), np.log(0.15)), method="L-BFGS-B",
                          bounds=[(np.log(least), np.log(1.5))] * len(names))
    return {name: float(width) for name, width in zip(names, np.exp(found.x), strict=True)}
