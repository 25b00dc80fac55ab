"""Anchoring: what recorded work takes after a change, by what was measured and what models say of before and after.

::

    one capture        time × model(after) / model(before)            the model says how time follows the work
    several captures   a line through (log model, log time)           and the captures say how far to believe it

Every way to another size, another device or another program takes its times from here. What a model gets wrong about an
operation in the same way before and after cancels. The interval of a ratio is that of both models' times as far as the
work changes: an e-fold of change, the whole of it.

With several captures ``log t = level + slope · log w``, with w what the models say of the work. A slope of 1 trusts the
models; the captures say how far to: fixed costs make it smaller, caches that overflow larger. The slope is the one the
captures show, drawn to the expected one as far as their times are noisy (a Bayesian line in closed form). Between
captured sizes that line is followed. Beyond them a slope below 1 is read as a fixed cost plus a linear part, and one
above 1 ends: past a cache's edge time grows as the work does. Through one capture the line has the expected slope: the
ratio above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.op_call import OpCall
from kernel_models.pricing import CallBatch, Models, price, sustained
from kernel_models.spreads import PER_DISTANCE, RESIZED_ON_CPU
from tracer.arrays import Float64

Calls = Sequence[tuple[OpCall, ...]]
LEAST_RATIO, MOST_RATIO = 1e-3, 1e3
"""Beyond them one recorded time says nothing of another."""
LEAST_SPAN = 0.1
"""e-folds of work that captures are taken to be apart at least."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Times that models predict for groups of calls, µs, and the logs of the interval's ends over them, [groups]."""

    time_us: Float64
    low: Float64
    high: Float64


@dataclass(frozen=True, slots=True)
class Ratios:
    """Time after a change over the recorded one, and the logs of the 80% interval's ends over it, [groups]."""

    ratio: Float64
    low: Float64
    high: Float64


class CallGroups:
    """Groups of calls, each priced as the sum of its calls, as in a step that keeps the device busy.

    What does not depend on the device is found once, for any number of devices.

    Args:
        calls: the groups.
        beside: calls that are priced with them, each by itself, as on a device that is not busy.
    """

    def __init__(self, calls: Calls, beside: Sequence[OpCall] = ()) -> None:
        flat = [call for group in calls for call in group]
        self._groups = len(calls)
        self._owner = np.repeat(np.arange(len(calls)), [len(group) for group in calls])
        self._batch = CallBatch([*flat, *beside])

    def prices(self, spec: DeviceSpec, models: Models | None) -> tuple[Prices, Float64]:
        """Return the groups' prices on a device, and the times of the calls beside them, µs."""
        if not len(self._batch.index):
            return Prices(*(np.zeros(self._groups) for _ in range(3))), np.zeros(0)
        priced = price(self._batch, spec, models)
        own = priced.index[:len(self._owner)]
        kept = sustained(priced, spec)
        time, low, high = (np.bincount(self._owner, weights=column[own], minlength=self._groups).astype(np.float64)
                           for column in (kept.time_us, kept.low_us, kept.high_us))
        safe = np.maximum(time, 1e-9)
        return (Prices(time, np.log(np.maximum(low, 1e-9) / safe), np.log(np.maximum(high, 1e-9) / safe)),
                priced.times_us[len(self._owner):])


def prices_of(calls: Calls, spec: DeviceSpec, models: Models | None) -> Prices:
    """Price groups of calls once, see ``CallGroups``."""
    return CallGroups(calls).prices(spec, models)[0]


def anchored(before: Prices, after: Prices, share: float | None = None) -> Ratios:
    """Ratios of recorded work: 0 where none is left, 1 where the models know no time of what was recorded.

    Args:
        before: of the recorded calls, where they were recorded.
        after: of those they become.
        share: of the models' intervals that the ratio keeps; by default as much as the work changes.
    """
    ratio = np.clip(after.time_us / np.maximum(before.time_us, 1e-9), LEAST_RATIO, MOST_RATIO)
    ratio = np.where(before.time_us > 0, np.where(after.time_us > 0, ratio, 0.0), 1.0)
    weight = size_of_change(ratio) if share is None else share
    return Ratios(ratio, -weight * np.hypot(after.low, before.high), weight * np.hypot(after.high, before.low))


def size_of_change(ratio: Float64) -> Float64:
    """Return how much work changes: the size of the log of its ratio, at most 1."""
    return np.minimum(np.abs(np.log(np.maximum(ratio, LEAST_RATIO))), 1.0)


def resized_on_cpu(ns: Float64, ratio: Float64, total_ns: float) -> float:
    """Log half width of the 80% interval of a host's time of which some is anchored computation.

    Args:
        ns: of the computation after the change.
        ratio: of each.
        total_ns: of the host.
    """
    return RESIZED_ON_CPU * float((ns * size_of_change(ratio)).sum()) / max(total_ns, 1.0)


def shrinking(stays_ns: float, total_ns: float, growth: float) -> float:
    """Log half width that smaller sizes add: host time that stays may shrink with them too, and weighs more in a step
    that got shorter (allocating, copying, what a larger batch drives out of caches). The interval holds both.

    Of five programs of benchmarks/foreign_tuning taken from batch 16 to 4 on a quiet core none came out more than 1%
    too short, and two 18 and 35% too long.

    Args:
        stays_ns: host time that stays although nobody knows that it does.
        total_ns: of the step.
        growth: of the sizes.
    """
    return -math.log1p(-stays_ns / total_ns * (1.0 - growth)) if growth < 1.0 and total_ns > 0.0 else 0.0


def trend_spread(log_work: Float64, at_captured: float) -> float:
    """Log half width of the 80% interval of times by a trend.

    Args:
        log_work: of a step in each capture, and of the new one.
        at_captured: half width at a captured size.
    """
    captured, new = log_work[:-1], float(log_work[-1])
    nearest = float(np.abs(captured - new).min())
    span = max(float(np.ptp(captured)), LEAST_SPAN)
    outside = max(new - float(captured.max()), float(captured.min()) - new, 0.0)
    return float(np.hypot(at_captured, PER_DISTANCE * nearest * (1.0 + outside / span)))


@dataclass(frozen=True, slots=True)
class Doubt:
    """The doubt about measured times.

    Attributes:
        slope_spread: standard deviation of the slope that times show around the one that is expected of them.
        noise_floor: standard deviation of the log of a mean time however many events it rests on: two runs of one
            program differ.
    """

    slope_spread: float
    noise_floor: float


OF_KERNELS = Doubt(0.3, 0.02)
OF_HOST = Doubt(0.08, 0.08)
"""Processes that run the same steps on a shared CPU differ by 4 to 9% (``spreads.HOST_AT_CAPTURED``). On the
tuning programs of benchmarks/foreign_sizes.py the models' slopes were nearer to the truth than those of two such
captures: MAPE 8.4% with a spread of 0.15, 7.9% with this one, 7.8% with 0.06."""
ALIKE = 1e-9


@dataclass(frozen=True, slots=True)
class Trend:
    """Times of groups of equal operations in several captures.

    Attributes:
        log_time: logs of mean times, [groups, captures].
        noise: standard deviation of these, [groups, captures].
        log_work: logs of the work, [groups, captures].
        slope: the slope that is expected, [groups].
        doubt: how far the times are to be believed against it.
    """

    log_time: Float64
    noise: Float64
    log_work: Float64
    slope: Float64
    doubt: Doubt

    def at(self, log_work: Float64) -> Float64:
        """Logs of the times at other work, [groups]."""
        weight = 1.0 / self.noise**2
        total = weight.sum(axis=1)
        middle_x = (weight * self.log_work).sum(axis=1) / total
        middle_y = (weight * self.log_time).sum(axis=1) / total
        dx, dy = self.log_work - middle_x[:, None], self.log_time - middle_y[:, None]
        prior = 1.0 / self.doubt.slope_spread**2
        slope = ((weight * dx * dy).sum(axis=1) + prior * self.slope) / ((weight * dx * dx).sum(axis=1) + prior)
        low, high = self.log_work.min(axis=1), self.log_work.max(axis=1)
        inside = middle_y + slope * (np.clip(log_work, low, high) - middle_x)
        beyond = log_work - np.clip(log_work, low, high)
        return inside + np.where(high - low > ALIKE, _beyond(slope, low, high, beyond), self.slope * beyond)


def _beyond(slope: Float64, low: Float64, high: Float64, beyond: Float64) -> Float64:
    """Return what the log of the time changes by outside the range, ``beyond`` below 0 under it and above 0 over it."""
    at = np.where(beyond > 0, high, low)
    # t = fixed + linear·w through the line's two ends, relative to the time at the nearer one.
    gain = np.exp(slope * (high - low)) - 1.0
    per_work = gain / np.maximum(np.exp(high - low) - 1.0, ALIKE)  # of the time at the low end, per work at the low end
    share = np.where(beyond > 0, per_work * np.exp((1.0 - slope) * (at - low)), per_work)
    share = np.clip(share, 0.0, 1.0)
    return np.log(np.maximum(1.0 - share + share * np.exp(beyond), ALIKE))


def noise_of(events: Float64, variation: Float64, doubt: Doubt) -> Float64:
    """Standard deviation of the log of a mean of so many events with that coefficient of variation."""
    return np.hypot(doubt.noise_floor, variation / np.sqrt(np.maximum(events, 1.0)))
