"""Choice of the next measurement: the family that needs it most, and, on a shared CPU, repeated visits.

*Families*: errors fall about as the square root of the number of measurements. So a second of measuring lowers a
squared error by about that error over the time spent so far. The family where this ratio is largest is next. Its error
is that of a Gaussian process of log(time / formula), each measurement predicted from the others. The next size of a
family is drawn at random, short measurements more often (``source``). Choosing the sizes with the least certain
prediction was no better in the same time: 0.84 to 1.15 times the error after 3 s (1.01 in the mean) on eight families
of simulated measurements, and no better on two published tables (``benchmarks/calibration_curve.py``).

*Visits* (``Visits``): on a shared CPU a single measurement of a shape is unreliable. Other programs' use of caches and
memory makes the same work take up to twice the time, for milliseconds or for a minute, and never makes it quicker. So
every benchmark is visited again, with growing gaps, until its two quickest visits agree: the quickest visit then shows
the undisturbed time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.learned.process import Points, Process, fit_process
from kernel_models.op_call import Family, OpCall
from tracer.arrays import Float64
from tracer.campaign.items import Item

LEAST_TO_LEARN = 8
"""Fewest measurements to learn from: a process fitted to fewer knows little more than its priors."""
LEARN_AGAIN = 1.4
"""The process is fitted again when the measurements have grown by this factor. Chosen to keep fitting cheap."""
MOST_TO_LEARN = 700
"""Most measurements in a fit: with more, fitting the process would take longer than measuring."""
GAPS, LEAST_GAP_S = (1 / 16, 1 / 6, 1 / 3), 1.0
"""Gaps between a benchmark's visits, as shares of the whole time, and the least gap in seconds. Most disturbances end
before the next visit; within two seconds they did not (``docs/calibration.md``)."""
CLOSING = 0.85
"""After this share of the time visits come before they are due, so that late measurements get a second visit too."""
AGREE = 0.08
"""Two visits agree if the slower takes at most this share longer."""


class FamilyProgress:
    """The measurements of one family so far, and the Gaussian process fitted to them.

    Args:
        family: the family.
        spec: the device, for the formulas.
        seed: seed for choosing the rows that the process learns from.
    """

    def __init__(self, family: Family, spec: DeviceSpec, seed: int = 0) -> None:
        self._formula, self._seed = RooflineModel(family, spec), seed
        self._calls: list[OpCall] = []
        self._logs: list[float] = []
        self._learned: tuple[Points, Process] | None = None
        self._learn_at = float(LEAST_TO_LEARN)
        self.seconds = 0.0

    @property
    def measured(self) -> int:
        """Number of measurements so far."""
        return len(self._calls)

    def tell(self, call: OpCall, measured_us: float) -> None:
        """Add a measurement, µs."""
        self._calls.append(call)
        self._logs.append(self._log(call, measured_us))
        if self._learn_at <= self.measured <= MOST_TO_LEARN:
            points = Points.of(self._formula.family, self._calls)
            start = self._learned[1].kernel if self._learned and self._learned[0].kept == points.kept else None
            self._learned = points, fit_process(*points.points(self._calls), np.array(self._logs), start, self._seed)
            self._learn_at = LEARN_AGAIN * self.measured

    def correct(self, row: int, call: OpCall, measured_us: float) -> None:
        """Replace the time of measurement ``row`` (from 0) by that of a later, quicker visit."""
        self._logs[row] = self._log(call, measured_us)

    def _log(self, call: OpCall, measured_us: float) -> float:
        return float(np.log(measured_us / self._formula.predict([call]).time_us[0]))

    def error(self) -> float:
        """Return the mean absolute log error of measurements, each predicted from the others; 1 while there are few."""
        if self._learned is None:
            return 1.0
        process = self._learned[1]
        return float(np.abs(process.y - process.left_out()[0]).mean())

    def need(self) -> float:
        """Return the expected decrease of the squared error per second of measuring, 1/s."""
        return self.error() ** 2 / max(self.seconds, 1e-3)

    def predict(self, calls: Sequence[OpCall]) -> Float64:
        """Return the times predicted from the measurements so far, µs [n]."""
        times: Float64 = self._formula.predict(calls).time_us
        if self._learned is None:
            return times
        points, process = self._learned
        return times * np.exp(process.predict(*points.points(calls))[0])


@dataclass
class _Shape:
    """One benchmark, the times of its visits (repeated measurements), µs, and the time of the last visit, s."""

    item: Item
    times_us: list[float]
    at_s: float

    def settled(self) -> bool:
        """Return whether further visits are unnecessary."""
        if len(self.times_us) > len(GAPS):
            return True
        first, *others = sorted(self.times_us)
        return bool(others) and others[0] <= (1 + AGREE) * first


class Visits:
    """Benchmarks to be measured again later; each measurement is a visit.

    Args:
        begun_s: start of the measuring, by the caller's clock.
        time_s: longest duration of the measuring.
    """

    def __init__(self, begun_s: float, time_s: float) -> None:
        self._begun_s, self._time_s = begun_s, time_s
        self._shapes: dict[str, _Shape] = {}
        self._due: list[tuple[float, str]] = []

    def add(self, item: Item, time_us: float, now_s: float) -> None:
        """Add a benchmark that was measured for the first time."""
        self._plan(_Shape(item, [time_us], now_s))

    def due(self, now_s: float) -> Item | None:
        """Return the benchmark whose next visit is due, ``None`` without one; near the end visits are due early."""
        if not self._due:
            return None
        due_s, name = self._due[0]
        shape = self._shapes[name]
        closing = now_s - self._begun_s > CLOSING * self._time_s
        if due_s > now_s and not (closing and now_s - shape.at_s >= LEAST_GAP_S):
            return None
        heapq.heappop(self._due)
        return msgspec.structs.replace(shape.item, visit=len(shape.times_us) + 1)

    def took(self, item: Item, time_us: float, now_s: float) -> bool:
        """Note the time of a visit; return whether it was the quickest so far."""
        shape = self._shapes[item.id]
        quicker = time_us < min(shape.times_us)
        shape.times_us.append(time_us)
        shape.at_s = now_s
        self._plan(shape)
        return quicker

    def spread(self) -> list[float]:
        """Return for each benchmark how much longer its slowest visit took than its quickest, as shares."""
        return [max(shape.times_us) / min(shape.times_us) - 1 for shape in self._shapes.values()
                if len(shape.times_us) > 1 and min(shape.times_us) > 0]

    def _plan(self, shape: _Shape) -> None:
        self._shapes[shape.item.id] = shape
        if not shape.settled():
            gap_s = max(GAPS[len(shape.times_us) - 1] * self._time_s, LEAST_GAP_S)
            heapq.heappush(self._due, (shape.at_s + gap_s, shape.item.id))
