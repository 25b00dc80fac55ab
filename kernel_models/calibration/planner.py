"""Choice of the most valuable measurement: the one that lowers its family's expected error most per second.

A Gaussian process of log(time / formula) is conditioned on what was measured. Measuring c lowers the variance at r by

    cov(r, c)² / (var(c) + noise)

whatever the time turns out to be; a candidate's gain is the mean of that over reference calls that stand for all calls
of the family. Before anything is measured the broad priors make the same rule spread the measurements out. Source:
Seo et al., "Gaussian process regression: active data selection and test point rejection" (2000), after Cohn (1996).

*Coming back* (``Visits``): on a shared CPU a single moment says little of what a shape takes. Neighbours on a machine,
their caches and memory traffic make the same work take up to twice as long, for milliseconds or for a minute; they
never make it quicker. So every benchmark is visited again, later each time, until its two quickest visits agree: the
quickest is then what the machine can do.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics import RooflineModel
from kernel_models.learned.process import Kernel, Points, Process, fit_process
from kernel_models.op_call import Family, OpCall
from tracer.arrays import Bool, Float64
from tracer.campaign.items import Item

LEAST_TO_LEARN = 8
"""Measurements before lengths and amplitudes are learned."""
LEARN_AGAIN = 1.4
"""They are learned again each time there are so many times as many measurements."""
MOST_CONDITIONED = 700
"""Beyond so many measurements the process would take longer than they do; further ones are chosen by the first."""


class Planner:
    """Chooses among candidates of one family.

    Args:
        spec: the device, for the formulas.
        candidates: what may be measured; all of the process's sizes and parts are taken from them and the reference.
        seconds: what measuring each takes.
        reference: calls that stand for all that will be priced.
        seed: of the rows that lengths are learned from.
    """

    def __init__(self, spec: DeviceSpec, candidates: Sequence[OpCall], seconds: Sequence[float],
                 reference: Sequence[OpCall], seed: int = 0) -> None:
        self.family: Family = candidates[0].family
        self._formula = RooflineModel(self.family, spec)
        self._points = Points.of(self.family, [*candidates, *reference])
        self._x, self._v = self._points.points(candidates)
        self._reference = self._points.points(reference)
        self._seconds = np.asarray(seconds, np.float64)
        self._open: Bool = np.ones(len(candidates), np.bool_)
        d, c = self._x.shape[1], self._v.shape[1]
        self._process = Process(Kernel.start(d, c), np.zeros((0, d)), np.zeros((0, c), np.int64), np.zeros(0),
                                np.zeros(0))
        self._learned_at, self._seed = 0, seed
        self._gains: Float64 | None = None
        self._doubt: float | None = None
        self._error: float | None = None
        self._time_factor = 1.0

    @property
    def measured(self) -> int:
        """Measurements noted so far."""
        return len(self._process.y)

    @property
    def open(self) -> int:
        """Candidates not taken yet."""
        return int(self._open.sum())

    def tell(self, calls: Sequence[OpCall], measured_us: Sequence[float]) -> None:
        """Take measurements in; calls of variants that no candidate has are passed over."""
        known = self._points.within(calls, np.inf)
        calls = [call for call, keep in zip(calls, known, strict=True) if keep]
        if not calls:
            return
        times = np.asarray(measured_us, np.float64)[known]
        x, v = self._points.points(calls)
        target = np.log(times / self._formula.predict(calls).time_us)
        self._process = self._process.seeing(x, v, target)
        n = self.measured
        if n >= LEAST_TO_LEARN and n >= LEARN_AGAIN * self._learned_at and n <= MOST_CONDITIONED:
            start = self._process.kernel if self._learned_at else None
            self._process = fit_process(self._process.x, self._process.v, self._process.y, start, self._seed)
            self._learned_at = n
        self._gains, self._doubt, self._error = None, None, None

    def correct(self, row: int, call: OpCall, measured_us: float) -> None:
        """A later visit of the measurement noted as number ``row`` (from 0) was quicker."""
        target = float(np.log(measured_us / self._formula.predict([call]).time_us[0]))
        self._process = self._process.corrected(row, target)
        self._doubt, self._error = None, None

    def extend(self, candidates: Sequence[OpCall], seconds: Sequence[float]) -> Bool:
        """Offer further candidates, whose places follow; returns which were taken, of parts known before."""
        known = self._points.within(candidates, np.inf)
        x, v = self._points.points(candidates)
        self._x, self._v = np.vstack([self._x, x[known]]), np.vstack([self._v, v[known]])
        self._seconds = np.concatenate([self._seconds, np.asarray(seconds, np.float64)[known]])
        self._open = np.concatenate([self._open, np.ones(int(known.sum()), np.bool_)])
        self._gains = None
        return known

    def took(self, expected_s: float, seconds: float) -> None:
        """Learn from a measurement's time, beside the expected one, how long further ones will take; seconds."""
        if expected_s > 0 and seconds > 0:
            self._time_factor = 0.8 * self._time_factor + 0.2 * seconds / expected_s

    def take(self, place: int) -> None:
        """Remove a candidate from the choice."""
        self._open[place] = False

    def best(self) -> tuple[int, float]:
        """The candidate of most gain per second, and that gain; (−1, 0) if there is none left."""
        if not self._open.any():
            return -1, 0.0
        rates = np.where(self._open, self.gains() / (self._seconds * self._time_factor), -1.0)
        place = int(np.argmax(rates))
        return place, float(rates[place])

    def gains(self) -> Float64:
        """Mean variance over the reference calls that measuring each candidate would take away, [candidates]."""
        if self._gains is None:
            shared, own = self._process.covariance(*self._reference, self._x, self._v)
            self._gains = np.mean(shared**2, axis=0) / (own + self._process.kernel.noise)
        return self._gains

    def doubt(self) -> float:
        """Expected error over the reference calls: the mean conditional standard deviation without noise, log."""
        if self._doubt is None:
            _, deviation = self._process.predict(*self._reference)
            self._doubt = float(np.mean(np.sqrt(np.maximum(deviation**2 - self._process.kernel.noise, 0.0))))
        return self._doubt

    def error(self) -> float:
        """Mean absolute error of each measurement by what the others say of it, log; 1 before there are enough."""
        if self.measured < LEAST_TO_LEARN:
            return 1.0
        if self._error is None:
            mean, _ = self._process.left_out()
            self._error = float(np.abs(self._process.y - mean).mean())
        return self._error

    def predict(self, calls: Sequence[OpCall]) -> Float64:
        """Times by what was measured so far, µs [n]."""
        mean, _ = self._process.predict(*self._points.points(calls))
        times: Float64 = self._formula.predict(calls).time_us * np.exp(mean)
        return times


GAPS = (1 / 16, 1 / 6, 1 / 3)
"""From each visit to the next, shares of the time there is: what disturbs one has mostly gone by the next."""
LEAST_GAP_S = 1.0
CLOSING = 0.85
"""After this share of the time visits come before they are due, so that what was measured last has one too."""
AGREE = 0.08
"""Two visits agree if the slower one takes no more than this share longer."""


@dataclass
class _Shape:
    """One benchmark, what its visits took, and when the last one was."""

    item: Item
    times_us: list[float]
    at_s: float

    def settled(self) -> bool:
        """Return whether a further visit would say nothing new."""
        if len(self.times_us) > len(GAPS):
            return True
        first, *others = sorted(self.times_us)
        return bool(others) and others[0] <= (1 + AGREE) * first


class Visits:
    """Benchmarks to come back to.

    Args:
        begun_s: when the measuring began, by the caller's clock.
        time_s: how long it may last.
    """

    def __init__(self, begun_s: float, time_s: float) -> None:
        self._begun_s, self._time_s = begun_s, time_s
        self._shapes: dict[str, _Shape] = {}
        self._due: list[tuple[float, str]] = []

    def add(self, item: Item, time_us: float, now_s: float) -> None:
        """A benchmark was measured for the first time."""
        self._plan(_Shape(item, [time_us], now_s))

    def due(self, now_s: float) -> Item | None:
        """The next visit if one is due; near the end whichever is due first. ``took`` answers it, if it worked."""
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
        """A visit took so long; returns whether it was the quickest so far."""
        shape = self._shapes[item.id]
        quicker = time_us < min(shape.times_us)
        shape.times_us.append(time_us)
        shape.at_s = now_s
        self._plan(shape)
        return quicker

    def spread(self) -> list[float]:
        """Return how much longer the slowest visit of each benchmark took than its quickest, shares."""
        return [max(shape.times_us) / min(shape.times_us) - 1 for shape in self._shapes.values()
                if len(shape.times_us) > 1]

    def _plan(self, shape: _Shape) -> None:
        self._shapes[shape.item.id] = shape
        if not shape.settled():
            gap_s = max(GAPS[len(shape.times_us) - 1] * self._time_s, LEAST_GAP_S)
            heapq.heappush(self._due, (shape.at_s + gap_s, shape.item.id))
