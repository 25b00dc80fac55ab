"""The fitted level: ``t = α + β · payload`` for each protocol of each measured setting, and scaled formulas for others.

NCCL changes protocol (LL, LL128, Simple) or algorithm at one or two sizes, and within one its time is a straight line.
So a setting's measurements are cut into at most three pieces, each with its own α and β. Dynamic programming finds the
best cuts. A setting that was not measured takes the datasheet formula, times the ratio of fit to formula in the nearest
measured setting. So the constants are the user's, and the structure is NCCL's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from kernel_models.collectives.call import (
    DTYPE_BYTES,
    DTYPES,
    CollectiveBatch,
    CollectiveKind,
    CommError,
    CommTimes,
    Level,
)
from kernel_models.collectives.datasheet import DatasheetModel, RankGroup, nccl_lines
from kernel_models.collectives.measurements import (
    Bytes,
    CollectiveMeasurements,
    Cost,
    LogRatio,
    Setting,
    StoredSetting,
    setting_of,
    stored_setting,
)
from kernel_models.collectives.topology import Topology, topology_of_state, topology_state
from tracer.arrays import Float64
from tracer.input_file import DecodeError, convert

PROTOCOLS, SHORTEST = 3, 2
"""Most pieces (NCCL has LL, LL128 and Simple), and least measured sizes of a piece (it has two parameters)."""
MOST_CUTS, FOLDS = 40, 5
"""Most places tried as cuts (in a longer table evenly spread places), and folds of sizes left out."""
BELOW = 2.0
"""A fit ends at its smallest measured size divided by this factor."""
FINENESS = 16
"""Number of sizes per doubling at which a formula is scaled for a setting that was not measured."""
FLOOR = 0.02
"""Least half width of an interval, log: chosen, the scatter of repeated collectives."""
CAUCHY_SCALE = 0.1
"""Relative error at which a measurement has half its weight: a tenth, the intended accuracy of two parameters."""
ROUNDS = 40
"""Rounds of either kind of reweighting. Set: more than a line needs to converge."""
ANCHORED_EXTRA = 0.15
"""Added to the log half-width of a setting that was not measured (rank counts left out: benchmarks/collectives.py)."""
DEFAULT_WIDTH = 0.2
"""Half width of the interval, log, where fewer than eight sizes could be left out: chosen."""


@dataclass(frozen=True, slots=True)
class CurvePieces:
    """Consecutive straight lines: piece i holds up to ``upto[i]`` bytes (the last has no end), in µs and µs/byte."""

    upto: Float64
    latency_us: Float64
    us_per_byte: Float64
    smallest: float = 0.0
    """Smallest measured size, bytes."""

    @staticmethod
    def fit(size: Float64, time_us: Float64, most: int = PROTOCOLS) -> CurvePieces:
        """Fit at most ``most`` pieces to times at ascending sizes; fewer where there are too few sizes."""
        count = max(1, min(most, len(size) // SHORTEST))
        if count == 1:
            alpha, beta = _robust_line(size, time_us)
            return CurvePieces(np.zeros(0), np.array([alpha]), np.array([beta]), float(size[0]))
        cuts = np.unique(np.linspace(0, len(size), min(len(size), MOST_CUTS) + 1).round().astype(np.int64))
        cost = np.full((len(cuts), len(cuts)), np.inf)
        fitted: dict[tuple[int, int], tuple[float, float]] = {}
        for i, low in enumerate(cuts[:-1].tolist()):
            for j in range(i + 1, len(cuts)):
                if cuts[j] - low >= SHORTEST:
                    x, t = size[low:cuts[j]], time_us[low:cuts[j]]
                    fitted[i, j] = alpha, beta = _line(x, t, np.ones(len(x)))
                    cost[i, j] = np.abs((alpha + beta * x) / t - 1.0).sum()
        best = np.full((count + 1, len(cuts)), np.inf)
        best[0, 0] = 0.0
        back = np.zeros((count + 1, len(cuts)), np.int64)
        for k in range(1, count + 1):
            total = best[k - 1][:, None] + cost
            back[k], best[k] = total.argmin(axis=0), total.min(axis=0)
        k, j = int(best[1:, -1].argmin()) + 1, len(cuts) - 1
        found = []
        while k:
            i = int(back[k, j])
            found.append((i, j))
            k, j = k - 1, i
        found.reverse()
        upto = [_switch(fitted[a], fitted[b], float(size[cuts[a[1]] - 1]), float(size[cuts[a[1]]]))
                for a, b in pairwise(found)]
        return CurvePieces(
            np.array(upto),
            np.array([fitted[p][0] for p in found]),
            np.array([fitted[p][1] for p in found]),
            float(size[0]),
        )

    def at(self, size: Float64) -> Float64:
        """Return the times at the given sizes, µs; a piece never starts below the end of the piece before."""
        piece = np.searchsorted(self.upto, size, side="left")
        time_us = self.latency_us[piece] + self.us_per_byte[piece] * size
        ends = self.latency_us[:-1] + self.us_per_byte[:-1] * self.upto
        floor = np.concatenate([[0.0], np.maximum.accumulate(ends)]) if len(ends) else np.zeros(1)
        return np.maximum(time_us, floor[piece])


@dataclass
class FittedModel:
    """Pieces by measured setting, and a topology whose formulas predict other settings.

    Attributes:
        pieces: by kind, dtype, ranks, nodes, most and fewest ranks on a node.
        residual: log(measured / predicted) of sizes left out of a fit.
    """

    topology: Topology
    pieces: dict[Setting, CurvePieces]
    residual: Float64 = field(default_factory=lambda: np.zeros(0))

    @staticmethod
    def fit(measurements: CollectiveMeasurements, on: Topology, *, most_pieces: int = PROTOCOLS,
            intervals: bool = True) -> FittedModel:
        """Fit curves to all measured settings (kind, dtype and placement of ranks)."""
        points = measurements.aggregated().curves()
        formulas = DatasheetModel(on)
        pieces = {
            key: CurvePieces.fit(size, time_us, most_pieces) if len(size) > 1 else _scaled(formulas, key, size, time_us)
            for key, (size, time_us) in points.items()}
        residuals = []
        for size, time_us in points.values() if intervals else ():
            for fold in range(min(FOLDS, len(size) // 2)):
                out = np.arange(len(size)) % FOLDS == fold
                partial = CurvePieces.fit(size[~out], time_us[~out], most_pieces)
                residuals.append(np.log(time_us[out] / np.maximum(partial.at(size[out]), 1e-9)))
        return FittedModel(on, pieces, np.concatenate(residuals) if residuals else np.zeros(0))

    def predict(self, batch: CollectiveBatch) -> CommTimes:
        """Return the times of collectives from the nearest measured setting; ``Level.UNKNOWN`` without one."""
        out = CommTimes.empty(len(batch))
        first, setting = batch.settings()
        low, high = -DEFAULT_WIDTH, DEFAULT_WIDTH
        if len(self.residual) >= 8:
            low, high = np.quantile(self.residual, [0.1, 0.9])
        low, high = min(low, -FLOOR), max(high, FLOOR)
        formulas = DatasheetModel(self.topology)
        for index, row in enumerate(first.tolist()):
            rows = np.arange(len(batch)) if len(first) == 1 else np.flatnonzero(setting == index)
            key = setting_of(batch, row)
            near = self._nearest(key)
            if near is None:
                continue
            size, extra = batch.payload_bytes[rows], 0.0
            by_formula = formulas.predict(batch.take(rows))
            if near[0] == key[0] and near[2:] == key[2:]:
                time_us = self._at(near, size, formulas)
            else:
                time_us = self._scaled_formula(key, near, size, formulas)
                extra = ANCHORED_EXTRA * (1.0 if near[0] == key[0] and (near[3] > 1) == (key[3] > 1) else 2.0)
            out.time_us[rows] = time_us
            out.low_us[rows], out.high_us[rows] = time_us * np.exp(low - extra), time_us * np.exp(high + extra)
            out.level[rows], out.algorithm[rows] = int(Level.FITTED), by_formula.algorithm
        return out

    def _scaled_formula(self, key: Setting, near: Setting, size: Float64, formulas: DatasheetModel) -> Float64:
        """Return the formula of one setting times the ratio of fit to formula in another, µs, never decreasing with
        size.

        A ratio of rising curves may fall. So the product is taken at fixed sizes, kept from falling, and interpolated.
        """
        steps = int(np.ceil(np.log2(max(float(size.max(initial=1.0)), 2.0)) * FINENESS)) + 1
        grid = np.exp2(np.arange(steps + 1) / FINENESS)
        ours = formulas.predict(_like_sizes(key, grid)).time_us
        theirs = formulas.predict(_like_sizes(near, grid)).time_us
        level = np.maximum.accumulate(ours * self._at(near, grid, formulas) / np.maximum(theirs, 1e-9))
        return np.interp(size, grid, level)

    def _at(self, setting: Setting, size: Float64, formulas: DatasheetModel) -> Float64:
        """Return a fitted setting's times, µs; well below its smallest measured size the formula's shape takes over."""
        pieces = self.pieces[setting]
        time_us = pieces.at(size)
        below = size < pieces.smallest / BELOW
        if below.any():
            edge = np.array([pieces.smallest])
            there = formulas.predict(_like_sizes(setting, np.append(size[below], edge))).time_us
            least = float(pieces.at(edge / BELOW)[0])
            time_us[below] = np.minimum(pieces.at(edge)[0] * there[:-1] / max(there[-1], 1e-9), least)
        return time_us

    def _nearest(self, key: Setting) -> Setting | None:
        """Return the most similar measured setting: by kind, one node or several, size of the group, then width of the
        dtype."""
        width = DTYPE_BYTES[DTYPES[key[1]]]

        def distance(other: Setting) -> tuple[float, ...]:
            return (abs(np.log(other[2] / key[2])) + abs(np.log(other[3] / key[3])) + abs(np.log(other[4] / key[4])),
                    abs(np.log(DTYPE_BYTES[DTYPES[other[1]]] / width)), *other)

        usable = [s for s in self.pieces if s[2] > 1]
        return min(usable, key=lambda s: (s[0] != key[0], (s[3] > 1) != (key[3] > 1), *distance(s)), default=None)

    def state(self) -> dict[str, Any]:
        """Return the model as plain JSON values."""
        return {"topology": topology_state(self.topology), "oversubscription": self.topology.network.oversubscription,
                "residual": self.residual.tolist(),
                "pieces": [{"setting": [key[0], DTYPES[key[1]], *key[2:]], "upto": p.upto.tolist(),
                            "latency_us": p.latency_us.tolist(), "us_per_byte": p.us_per_byte.tolist(),
                            "smallest": p.smallest}
                           for key, p in self.pieces.items()]}

    @staticmethod
    def from_state(state: dict[str, Any]) -> FittedModel:
        """Return the model that ``state()`` stored. Raises ``CommError`` for other values."""
        try:
            stored = convert(state, _State)
            pieces = {}
            for entry in stored.pieces:
                upto, latency, rate = (np.array(part, np.float64) for part in (
                    entry.upto, entry.latency_us, entry.us_per_byte))
                if len(latency) != len(upto) + 1 or len(rate) != len(latency) or (np.diff(upto) < 0).any():
                    raise ValueError("a line is missing")
                pieces[stored_setting(entry.setting)] = CurvePieces(upto, latency, rate, entry.smallest)
            return FittedModel(topology_of_state(stored.topology, stored.oversubscription), pieces,
                               np.array(stored.residual, np.float64))
        except (DecodeError, ValueError) as error:
            raise CommError(f"The fitted lines cannot be read ({type(error).__name__}: {error}); fit them again with "
                            "'foretrace comm fit'.") from None


class _Pieces(msgspec.Struct):
    setting: StoredSetting
    upto: list[Bytes]
    latency_us: list[Cost]
    us_per_byte: list[Cost]
    smallest: Bytes


class _State(msgspec.Struct):
    """The stored form of a ``FittedModel``, as ``state()`` returns it."""

    topology: str | dict[str, Any]
    oversubscription: float
    pieces: list[_Pieces]
    residual: list[LogRatio]


def _like_sizes(setting: Setting, size: Float64) -> CollectiveBatch:
    """Return collectives of one setting with the given sizes."""
    columns = [np.full(len(size), value, np.int64) for value in setting]
    return CollectiveBatch(columns[0], size, *columns[1:])


def _scaled(formulas: DatasheetModel, setting: Setting, size: Float64, time_us: Float64) -> CurvePieces:
    """Return a curve from one measured size: the formula's line there, scaled to the measurement."""
    kind, group = CollectiveKind(setting[0]), RankGroup(*setting[2:])
    ways = nccl_lines(formulas.topology, kind, group)
    line = min(ways, key=lambda way: way.latency_us + way.us_per_byte * float(size[0]))
    there = line.latency_us + line.us_per_byte * float(size[0])
    scale = float(time_us[0]) / there if there else 1.0
    return CurvePieces(np.zeros(0), np.array([line.latency_us * scale]), np.array([line.us_per_byte * scale]),
                       float(size[0]))


def _switch(before: tuple[float, float], after: tuple[float, float], last: float, following: float) -> float:
    """Return the size at which the second line replaces the first, between ``last`` and ``following``.

    The lines cross there; it is the middle if the second lies above throughout, the start if it lies below.
    """
    def gap(size: float) -> float:
        return before[0] - after[0] + (before[1] - after[1]) * size

    if gap(last) > 0:
        return last
    if gap(following) > 0:
        return float((after[0] - before[0]) / (before[1] - after[1]))
    return float(np.sqrt(last * following))


def _line(size: Float64, time_us: Float64, weight: Float64) -> tuple[float, float]:
    """Return α and β, both ≥ 0, with the least weighted sum of squared relative errors."""
    a, b, w = 1.0 / time_us, size / time_us, weight
    aa, ab, bb = (w * a * a).sum(), (w * a * b).sum(), (w * b * b).sum()
    sa, sb = (w * a).sum(), (w * b).sum()
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (sa * bb - sb * ab) / determinant, (sb * aa - sa * ab) / determinant
        if alpha >= 0 and beta >= 0:
            return float(alpha), float(beta)
    only_alpha, only_beta = sa / aa, sb / bb if bb else 0.0
    # One parameter is zero: take the better of the two one-parameter fits.
    errors = [(w * (only_alpha * a - 1) ** 2).sum(), (w * (only_beta * b - 1) ** 2).sum()]
    return (float(only_alpha), 0.0) if errors[0] <= errors[1] else (0.0, float(only_beta))


def _robust_line(size: Float64, time_us: Float64) -> tuple[float, float]:
    """Fit α, β by reweighted least squares: first least absolute relative errors, then Cauchy's weights.

    One line cannot follow a change of protocol; Cauchy's weights let the sizes of one protocol decide.
    """
    weight: Float64 = np.ones(len(size))
    alpha, beta = _line(size, time_us, weight)
    for i in range(2 * ROUNDS):
        error = (alpha + beta * size) / time_us - 1.0
        weight = 1.0 / np.maximum(np.abs(error), 1e-3) if i < ROUNDS else 1.0 / (error**2 + CAUCHY_SCALE**2)
        alpha, beta = _line(size, time_us, weight)
    return alpha, beta
