"""How the time of an operation follows its work, from captures at several sizes.

Times are taken by logs: ``log t = level + slope · log w``, with w what a model says of the work. A slope of 1 trusts
the model; the captures say how far to believe it: fixed costs make it smaller, caches that overflow larger. The slope
is the one the captures show, drawn to the expected one as far as their times are noisy (a Bayesian line in closed
form). Between captured sizes that line is followed. Beyond them a slope below 1 is read as a fixed cost plus a linear
part, and one above 1 ends: past a cache's edge time grows as the work does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracer.arrays import Float64


@dataclass(frozen=True, slots=True)
class Doubt:
    """How far times are to be believed.

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
