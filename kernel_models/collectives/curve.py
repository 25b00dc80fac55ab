"""A measured curve: time over size, monotone, interpolated between an α–β line and a cubic in log-log.

Between two measured sizes a straight line of time over size is what ``t = α + S / B`` draws, and is too low where the
next measured size uses another protocol; a monotone cubic of log time over log size (Fritsch and Carlson 1980) is
smooth through the bends. Their weighted geometric mean is monotone too. The weight is chosen on held-out *measured*
sizes (``choose_blend``).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracer.arrays import Float64

BLENDS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights of the α–β line that are tried."""
DEFAULT_BLEND = 0.5
SHORTEST = 4
"""Sizes a curve needs for one of them to be left out."""
HELD_OUT_POINTS = 40
"""A longer curve leaves out about this many of its sizes in turn, evenly spread."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Sizes ascending (bytes), ``log_time`` non-decreasing (log µs) and its cubic's slopes in log size."""

    size: Float64
    log_time: Float64
    slope: Float64

    @staticmethod
    def fit(size: npt.ArrayLike, time_us: npt.ArrayLike) -> Curve:
        """A curve through measured times; where they decrease, neighbours are pooled (isotonic, least absolute errors).

        Args:
            size: Bytes, each at most once, above zero.
            time_us: µs, above zero.
        """
        order = np.argsort(np.asarray(size, np.float64), kind="stable")
        x = np.asarray(size, np.float64)[order]
        y = _isotonic(np.log(np.asarray(time_us, np.float64)[order]))
        return Curve(x, y, _slopes(np.log(x), y))

    def log_at(self, size: npt.ArrayLike, blend: float = DEFAULT_BLEND) -> Float64:
        """Log of µs at the given sizes. Below the smallest: its time; above the largest: on along the last line."""
        x = np.asarray(size, np.float64)
        if len(self.size) == 1:
            # Nothing is known of the slope: never faster than in proportion to the size.
            return self.log_time[0] + np.log(np.maximum(x / self.size[0], 1.0))
        inside = np.clip(x, self.size[0], self.size[-1])
        i = np.clip(np.searchsorted(self.size, inside, side="right") - 1, 0, len(self.size) - 2)
        time = np.exp(self.log_time)
        rate = np.diff(time) / np.diff(self.size)
        out: Float64 = np.zeros(len(x))
        if blend > 0.0:
            out += blend * np.log((time[:-1] - rate * self.size[:-1])[i] + rate[i] * inside)
        if blend < 1.0:
            # The cubic's coefficients in u = log(size / left) of each interval.
            left, width = np.log(self.size[:-1]), np.diff(np.log(self.size))
            delta = np.diff(self.log_time) / width
            c2 = (3 * delta - 2 * self.slope[:-1] - self.slope[1:]) / width
            c3 = (self.slope[:-1] + self.slope[1:] - 2 * delta) / width**2
            u = np.log(inside) - left[i]
            out += (1.0 - blend) * (self.log_time[:-1][i] + u * (self.slope[:-1][i] + u * (c2[i] + u * c3[i])))
        beyond = x > self.size[-1]
        if beyond.any():
            last = max(rate[-1], 0.5 * time[-1] / self.size[-1])
            out = np.where(beyond, np.log(time[-1] + last * np.maximum(x - self.size[-1], 0.0)), out)
        return out


def left_out_step(sizes: int) -> int:
    """Return the step between the sizes of a curve that are left out in turn."""
    return max(sizes // HELD_OUT_POINTS, 1)


def choose_blend(curves: Sequence[tuple[Float64, Float64]]) -> tuple[float, Float64]:
    """The weight with the least mean absolute log error on sizes left out of measured curves in turn.

    Args:
        curves: (sizes ascending, µs) each.

    Returns:
        The weight, and [m, 2] of the left-out points: size and residual log(measured / predicted) at that weight.
        Curves of fewer than ``SHORTEST`` sizes leave nothing out.
    """
    weights = np.array(BLENDS)
    errors: list[Float64] = []
    sizes: list[float] = []
    for size, time_us in curves:
        if len(size) < SHORTEST:
            continue
        raw = np.log(time_us)
        for row in range(0, len(size), left_out_step(len(size))):
            kept = np.arange(len(size)) != row
            partial = Curve.fit(size[kept], time_us[kept])
            # Every weight is a mixture of the two components.
            line, cubic = (float(partial.log_at(size[row:row + 1], blend)[0]) for blend in (1.0, 0.0))
            errors.append(raw[row] - (weights * line + (1.0 - weights) * cubic))
            sizes.append(float(size[row]))
    if not errors:
        return DEFAULT_BLEND, np.zeros((0, 2))
    table = np.array(errors)
    best = int(np.abs(table).mean(axis=0).argmin())
    return BLENDS[best], np.stack([np.array(sizes), table[:, best]], axis=1)


def _isotonic(y: Float64) -> Float64:
    """Non-decreasing least absolute fit (pool adjacent violators, each pool at its median)."""
    if len(y) < 2 or (np.diff(y) >= 0).all():
        return y.copy()
    pools: list[list[float]] = []
    levels: list[float] = []
    for value in y.tolist():
        pools.append([value])
        levels.append(value)
        while len(pools) > 1 and levels[-2] > levels[-1]:
            for late in pools.pop():
                insort(pools[-1], late)
            levels.pop()
            pool = pools[-1]
            levels[-1] = 0.5 * (pool[(len(pool) - 1) // 2] + pool[len(pool) // 2])
    return np.repeat(levels, [len(pool) for pool in pools])


def _slopes(x: Float64, y: Float64) -> Float64:
    """Slopes of the monotone piecewise cubic through (x, y)."""
    if len(x) < 2:
        return np.zeros(len(x))
    h = np.diff(x)
    delta = np.diff(y) / h
    if len(x) == 2:
        return np.repeat(delta, 2)
    w1, w2 = 2 * h[1:] + h[:-1], h[1:] + 2 * h[:-1]
    flat = (delta[:-1] <= 0) | (delta[1:] <= 0)
    safe0, safe1 = np.where(flat, 1.0, delta[:-1]), np.where(flat, 1.0, delta[1:])
    inner = np.where(flat, 0.0, (w1 + w2) / (w1 / safe0 + w2 / safe1))
    return np.concatenate([[_end_slope(h[0], h[1], delta[0], delta[1])], inner,
                           [_end_slope(h[-1], h[-2], delta[-1], delta[-2])]])


def _end_slope(h0: float, h1: float, d0: float, d1: float) -> float:
    """Three-point slope at an end, kept within what stays monotone."""
    slope = ((2 * h0 + h1) * d0 - h0 * d1) / (h0 + h1)
    return float(min(max(slope, 0.0), 3.0 * d0))
