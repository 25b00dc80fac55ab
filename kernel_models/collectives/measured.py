"""The measured level: curves interpolated over sizes, and between group sizes.

Between group sizes of one node two laws are mixed. A latency grows with the steps of a ring, so it is affine in n. A
transfer's traffic per byte is ``(n − 1) / n`` on the link, plus ``1 / n`` for the rank's own part, so it is affine in
1/n. The weight of the first law is the smallest size's time over the time at the given size. Where all ranks share a
host bridge (PCIe) neither law holds, and log time is interpolated over log n.

Over sizes, a curve is monotone. Between two measured sizes ``t = α + S / B`` draws a straight line of time over size.
That line is too low where the next measured size uses another protocol. A monotone cubic of log time over log size
(Fritsch and Carlson 1980) is smooth through the bends. The weighted geometric mean of both is monotone too. Its weight
is chosen on held-out *measured* sizes (``choose_blend``).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kernel_models.collectives.call import DTYPE_BYTES, DTYPES, CollectiveBatch, CommError, CommTimes, Level
from kernel_models.collectives.measurements import (
    CollectiveMeasurements,
    LogRatio,
    Micros,
    Setting,
    Share,
    Size,
    Spread,
    StoredSetting,
    setting_of,
    stored_setting,
)
from tracer.arrays import Float64
from tracer.input_file import DecodeError, convert

BLENDS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights of the α–β line that are tried."""
DEFAULT_BLEND = 0.5
"""Weight of the α–β line where every curve is too short to choose it. Set: the middle."""
SHORTEST = 4
"""Fewest sizes of a curve from which one can be left out."""
HELD_OUT_POINTS = 40
"""Most sizes of a curve that are left out, one at a time, evenly spread. Set: it bounds the time of a fit."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve: ascending sizes (bytes), non-decreasing ``log_time`` (log µs) and its cubic's slopes in log size."""

    size: Float64
    log_time: Float64
    slope: Float64

    @staticmethod
    def fit(size: npt.ArrayLike, time_us: npt.ArrayLike) -> Curve:
        """Fit a curve through times; where they decrease, neighbours are pooled (isotonic, least absolute errors).

        Args:
            size: Bytes, each at most once, above zero.
            time_us: µs, above zero.
        """
        order = np.argsort(np.asarray(size, np.float64), kind="stable")
        x = np.asarray(size, np.float64)[order]
        y = _isotonic(np.log(np.asarray(time_us, np.float64)[order]))
        return Curve(x, y, _slopes(np.log(x), y))

    def log_at(self, size: npt.ArrayLike, blend: float = DEFAULT_BLEND) -> Float64:
        """Return log µs at sizes in bytes: constant below the smallest measured size, a line above the largest."""
        x = np.asarray(size, np.float64)
        if len(self.size) == 1:
            # With one size the slope is unknown: beyond it, time is taken to grow in proportion to size.
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
    """Return the step between the sizes of a curve that are left out, one at a time."""
    return max(sizes // HELD_OUT_POINTS, 1)


def choose_blend(curves: Sequence[tuple[Float64, Float64]]) -> tuple[float, Float64]:
    """Return the weight of the α–β line with the least mean absolute log error on measured sizes, left out one by one.

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
            # Each weight mixes these two components.
            line, cubic = (float(partial.log_at(size[row:row + 1], blend)[0]) for blend in (1.0, 0.0))
            errors.append(raw[row] - (weights * line + (1.0 - weights) * cubic))
            sizes.append(float(size[row]))
    if not errors:
        return DEFAULT_BLEND, np.zeros((0, 2))
    table = np.array(errors)
    best = int(np.abs(table).mean(axis=0).argmin())
    return BLENDS[best], np.stack([np.array(sizes), table[:, best]], axis=1)


def _isotonic(y: Float64) -> Float64:
    """Fit a non-decreasing curve by least absolute errors (pool adjacent violators, each pool at its median)."""
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
    """Return the slopes of the monotone piecewise cubic through (x, y)."""
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
    """Return the three-point slope at an end, limited so that the cubic stays monotone."""
    slope = ((2 * h0 + h1) * d0 - h0 * d1) / (h0 + h1)
    return float(min(max(slope, 0.0), 3.0 * d0))


FLOOR = 0.02
"""Least half width of an interval, ±2%: the scatter of identical measurements (H100 repeats: 2% median)."""
LOW, HIGH = 0.1, 0.9  # ends of an 80% interval
RANKS_DEFAULT, RANKS_SHARED = 0.15, 0.6
"""Log half-widths between group sizes: where a table is too small to leave a group size out, and where ranks share a
bridge; see benchmarks/collectives.py."""
DTYPE_EXTRA = 0.05
"""Added to the log half-width for a dtype that was not measured: half and int8 differ by up to 4–7% in reductions."""
MOST_FACTOR = 4
"""Group sizes up to this factor beyond the measured ones are extrapolated; the formulas price larger factors."""
LATENCY_BYTES, BELOW = 16 * 1024.0, 2.0
"""A curve that starts at this size or below starts with the latency, which also holds for every smaller size."""
EXTRAPOLATED = 0.03
"""Added to the log half-width for each doubling beyond the largest measured size."""
OCTAVES = 2.5
"""Residuals of sizes within this many doublings determine the interval at a size. Set."""


@dataclass
class MeasuredModel:
    """Curves by setting. ``shared_link``: all ranks of a node share one bridge (PCIe).

    Attributes:
        curves: By kind, dtype, ranks, nodes, most and fewest ranks on a node.
        blend: Weight of the α–β line between sizes (``choose_blend``).
        residual_size, residual: Left-out sizes (bytes), and their log(measured / predicted).
        misfit: Distance of these sizes' times from the monotone curve fitted with them.
        ranks_residual: Log(measured / predicted) of whole group sizes left out.
        spread: Scatter of medians of repeats, as a log ratio.
    """

    curves: dict[Setting, Curve]
    blend: float = DEFAULT_BLEND
    residual_size: Float64 = field(default_factory=lambda: np.zeros(0))
    residual: Float64 = field(default_factory=lambda: np.zeros(0))
    misfit: Float64 = field(default_factory=lambda: np.zeros(0))
    ranks_residual: Float64 = field(default_factory=lambda: np.zeros(0))
    spread: float = 0.0
    shared_link: bool = False

    @staticmethod
    def fit(
        measurements: CollectiveMeasurements, *, shared_link: bool = False, intervals: bool = True
    ) -> MeasuredModel:
        """Fit the curves of all settings; left-out measured sizes choose the interpolation and the intervals."""
        rows = measurements.aggregated()
        points = rows.curves()
        curves = {key: Curve.fit(*value) for key, value in points.items() if len(value[0]) > 1}
        blend, held_out = choose_blend(list(points.values()))
        misfit = [np.abs(np.log(points[key][1]) - curve.log_time)[::left_out_step(len(curve.size))]
                  for key, curve in curves.items() if len(curve.size) >= SHORTEST]
        model = MeasuredModel(curves, blend, held_out[:, 0], held_out[:, 1],
                              np.concatenate(misfit) if misfit else np.zeros(0), spread=rows.spread,
                              shared_link=shared_link)
        if intervals:
            model.ranks_residual = model._leave_ranks_out(points)
        return model

    def predict(self, batch: CollectiveBatch) -> CommTimes:
        """Return times where a curve covers the call; ``Level.UNKNOWN`` elsewhere."""
        out = CommTimes.empty(len(batch))
        first, setting = batch.settings()
        order = np.argsort(setting, kind="stable")
        bounds = np.append(np.searchsorted(setting[order], np.arange(len(first))), len(batch))
        for index, row in enumerate(first.tolist()):
            rows = slice(None) if len(first) == 1 else order[bounds[index]:bounds[index + 1]]
            key = setting_of(batch, row)
            self._predict_setting(key, batch.payload_bytes[rows], out, rows)
        return out

    def _predict_setting(self, key: Setting, size: Float64, out: CommTimes, rows: Any) -> None:
        found, near = self.nearest_dtype(key), None
        if found is not None:
            curve, level = self.curves[found], Level.MEASURED if found == key else Level.INTERPOLATED
            log_time = curve.log_at(size, self.blend)
            low, high = self._interval(curve, size)
            extra = 0.0 if found == key else DTYPE_EXTRA
        else:
            near = self._neighbours(key)
            if near is None:
                return
            level, extra = Level.INTERPOLATED, 0.0
            log_time = self._between(key[2], *near).log_at(size, self.blend)
            below, above = _quantiles(self.ranks_residual, RANKS_SHARED if self.shared_link else RANKS_DEFAULT)
            low, high = np.full(len(size), below), np.full(len(size), above)
        out.time_us[rows] = np.exp(log_time)
        out.low_us[rows] = np.exp(log_time + low - extra)
        out.high_us[rows] = np.exp(log_time + high + extra)
        level_of = np.full(len(size), int(level), np.int64)
        # A flat start at a large size is not the latency: times at much smaller sizes are unknown.
        level_of[size < self._begin((found,) if found is not None else near or ())] = int(Level.UNKNOWN)
        out.level[rows] = level_of

    def _begin(self, used: tuple[Setting, ...]) -> float:
        """Return the smallest size that these settings' curves predict, bytes; 0 where the latency was measured."""
        first = max(float(self.curves[key].size[0]) for key in used)
        return first / BELOW if first > LATENCY_BYTES else 0.0

    def begins(self, batch: CollectiveBatch) -> Float64:
        """Return the smallest size that this level predicts for each row's setting, bytes; NaN where there is none."""
        out = np.full(len(batch), np.nan)
        first, setting = batch.settings()
        for index, row in enumerate(first.tolist()):
            key = setting_of(batch, row)
            found = self.nearest_dtype(key)
            used = (found,) if found is not None else self._neighbours(key)
            if used is not None:
                out[setting == index] = self._begin(used)
        return out

    def nearest_dtype(self, key: Setting) -> Setting | None:
        """Return the measured setting equal to ``key``, else the nearest that differs in dtype only, else ``None``."""
        if key in self.curves:
            return key
        same = [k for k in self.curves if k[0] == key[0] and k[2:] == key[2:]]
        width = DTYPE_BYTES[DTYPES[key[1]]]
        return min(same, key=lambda k: (abs(np.log(DTYPE_BYTES[DTYPES[k[1]]] / width)), k), default=None)

    def _neighbours(self, key: Setting) -> tuple[Setting, Setting] | None:
        """Return two measured settings of one node with other rank counts, on both sides where possible."""
        kind, dtype, ranks, nodes = key[:4]
        if nodes != 1:
            return None
        counts = sorted({k[2] for k in self.curves if k[0] == kind and k[3] == 1 and k[2] > 1})
        below, above = [n for n in counts if n < ranks], [n for n in counts if n > ranks]
        if len(counts) < 2:
            return None
        a, b = (below[-1], above[0]) if below and above else (below[-2], below[-1]) if below else (above[0], above[1])
        if ranks > b * MOST_FACTOR or ranks * MOST_FACTOR < a:
            return None
        first, second = (self.nearest_dtype((kind, dtype, n, 1, n, n)) for n in (a, b))
        return None if first is None or second is None else (first, second)

    def _between(self, n: int, first: Setting, second: Setting) -> Curve:
        """Return the curve of n ranks, at the sizes measured for either neighbour; it is monotone."""
        curve_a, curve_b = self.curves[first], self.curves[second]
        size = np.union1d(curve_a.size, curve_b.size)
        log_a, log_b = curve_a.log_at(size, self.blend), curve_b.log_at(size, self.blend)
        a, b = first[2], second[2]
        if self.shared_link:
            w = np.log(n / a) / np.log(b / a)
            return Curve.fit(size, np.exp((1 - w) * log_a + w * log_b))
        share = np.exp(np.minimum(0.5 * (curve_a.log_time[0] + curve_b.log_time[0] - log_a - log_b), 0.0))
        by_n, by_inverse = (n - a) / (b - a), (1 / n - 1 / a) / (1 / b - 1 / a)
        w = share * by_n + (1 - share) * by_inverse
        time_us = (1 - w) * np.exp(log_a) + w * np.exp(log_b)
        # An extrapolated sum of two times can fall below both: half the smaller time is the lower limit.
        return Curve.fit(size, np.maximum(time_us, 0.5 * np.exp(np.minimum(log_a, log_b))))

    def _interval(self, curve: Curve, size: Float64) -> tuple[Float64, Float64]:
        """Return log offsets of the 80% interval: at measured sizes from repeats, far from them from left-out sizes."""
        octave = np.log2(np.maximum(size, 1.0))
        grid = np.arange(np.floor(octave.min()), np.ceil(octave.max()) + 1) if len(octave) else np.zeros(1)
        log_size = np.log2(np.maximum(self.residual_size, 1.0))
        low_grid, high_grid, floor_grid = np.empty(len(grid)), np.empty(len(grid)), np.empty(len(grid))
        for i, at in enumerate(grid):
            near = np.abs(log_size - at) <= OCTAVES
            low_grid[i], high_grid[i] = _quantiles(self.residual[near], 0.10)
            floor_grid[i] = max(FLOOR, self.spread, np.quantile(self.misfit[near], 0.8) if near.any() else 0.0)
        measured = np.log2(curve.size)
        right = np.clip(np.searchsorted(measured, octave), min(1, len(measured) - 1), len(measured) - 1)
        left = np.maximum(right - 1, 0)
        distance = np.minimum(np.abs(octave - measured[left]), np.abs(octave - measured[right]))
        # A left-out size lay in the middle of two steps of its table; the middle of any gap counts as that far away.
        away = np.minimum(2.0 * distance / np.maximum(measured[right] - measured[left], 1e-9), 1.0)
        beyond = EXTRAPOLATED * np.maximum(octave - measured[-1], 0.0)
        floor = np.interp(octave, grid, floor_grid)
        low = -np.maximum(-np.interp(octave, grid, low_grid) * away, floor)
        high = np.maximum(np.interp(octave, grid, high_grid) * away, floor)
        return low - beyond, high + beyond

    def _leave_ranks_out(self, points: dict[Setting, tuple[Float64, Float64]]) -> Float64:
        residuals = []
        for key, (size, time_us) in points.items():
            others = {k: c for k, c in self.curves.items() if k[2:] != key[2:]}
            partial = MeasuredModel(others, self.blend, shared_link=self.shared_link)
            near = partial._neighbours(key)
            if near is not None:
                residuals.append(np.log(time_us) - partial._between(key[2], *near).log_at(size, self.blend))
        return np.concatenate(residuals) if residuals else np.zeros(0)

    def state(self) -> dict[str, Any]:
        """Return the model as plain JSON values."""
        return {
            "blend": self.blend, "spread": self.spread, "shared_link": self.shared_link,
            "residual_size": self.residual_size.tolist(), "residual": self.residual.tolist(),
            "misfit": self.misfit.tolist(), "ranks_residual": self.ranks_residual.tolist(),
            "curves": [{"setting": [key[0], DTYPES[key[1]], *key[2:]], "size": c.size.tolist(),
                        "time_us": np.exp(c.log_time).tolist()} for key, c in self.curves.items()],
        }

    @staticmethod
    def from_state(state: dict[str, Any]) -> MeasuredModel:
        """Return the model that ``state()`` stored. Raises ``CommError`` for other values."""
        try:
            found = convert(state, _State)
            curves = {}
            for entry in found.curves:
                size, time_us = np.array(entry.size), np.array(entry.time_us)
                if not len(size) or len(size) != len(time_us) or (np.diff(size) <= 0).any():
                    raise ValueError("a curve is no curve")
                curves[stored_setting(entry.setting)] = Curve.fit(size, time_us)
            if len({len(found.residual_size), len(found.residual), len(found.misfit)}) > 1:
                raise ValueError("the residuals do not fit together")
            return MeasuredModel(
                curves, found.blend, np.array(found.residual_size, np.float64), np.array(found.residual, np.float64),
                np.array(found.misfit, np.float64), np.array(found.ranks_residual, np.float64), found.spread,
                found.shared_link)
        except (DecodeError, ValueError) as error:
            raise CommError(f"The measured curves cannot be read ({type(error).__name__}: {error}); fit them again "
                            "with 'foretrace comm fit'.") from None


class _Curve(msgspec.Struct):
    setting: StoredSetting
    size: list[Size]
    time_us: list[Micros]


class _State(msgspec.Struct):
    """The stored form of a ``MeasuredModel``, as ``state()`` returns it."""

    blend: Share
    spread: Spread
    shared_link: bool
    residual_size: list[Size]
    residual: list[LogRatio]
    misfit: list[Spread]
    ranks_residual: list[LogRatio]
    curves: list[_Curve]


def _quantiles(residual: Float64, default: float) -> tuple[float, float]:
    """Return the 10% and 90% quantiles, at least the floor away from zero; ±``default`` below eight residuals."""
    if len(residual) < 8:
        return -default, default
    low, high = np.quantile(residual, [LOW, HIGH])
    return float(min(low, -FLOOR)), float(max(high, FLOOR))
