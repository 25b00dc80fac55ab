"""Answers of a model of collectives: times, intervals, and the level of knowledge behind each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kernel_models.model import Source, Times
from tracer.arrays import Bool, Float64, Int64


class Level(IntEnum):
    """The level of knowledge about a collective, best first."""

    NOTHING_TO_DO = 0
    """A world of one rank, or no bytes: nothing is launched."""
    MEASURED = 1
    """A measured curve of the same group size and placement has it."""
    INTERPOLATED = 2
    """Between, or just beyond, measured group sizes or dtypes."""
    FITTED = 3
    """The α–β model with parameters fitted to measurements."""
    DATASHEET = 4
    """The same formulas with published constants only."""
    LINKS = 5
    """No cluster is given: a ring over the links of the device, an assumption."""
    UNKNOWN = 6

    @property
    def label(self) -> str:
        """Return its name in reports and JSON."""
        return self.name.lower().replace("_", " ")

    @property
    def source(self) -> Source:
        """The level in the terms of all kernel models."""
        if self is Level.MEASURED:
            return Source.MEASURED
        if self is Level.NOTHING_TO_DO:
            return Source.HEURISTIC
        return Source.LEARNED if self in (Level.INTERPOLATED, Level.FITTED) else Source.DATASHEET


@dataclass(slots=True)
class CommTimes:
    """Times of n collectives: median expected and 80% interval, µs; ``level`` and ``algorithm`` say where from.

    ``algorithm`` holds codes into ``algorithms.ALGORITHMS``, -1 where a measurement does not say.
    """

    time_us: Float64
    low_us: Float64
    high_us: Float64
    level: Int64
    algorithm: Int64

    @staticmethod
    def empty(n: int) -> CommTimes:
        """n collectives nothing is known of."""
        return CommTimes(np.zeros(n), np.zeros(n), np.zeros(n), np.full(n, int(Level.UNKNOWN), np.int64),
                         np.full(n, -1, np.int64))

    def put(self, rows: Int64 | Bool, other: CommTimes) -> None:
        """Replace rows."""
        for name in ("time_us", "low_us", "high_us", "level", "algorithm"):
            getattr(self, name)[rows] = getattr(other, name)

    def take(self, rows: Int64 | Bool) -> CommTimes:
        """Return a copy of rows."""
        return CommTimes(self.time_us[rows], self.low_us[rows], self.high_us[rows], self.level[rows],
                         self.algorithm[rows])

    def times(self) -> Times:
        """Times and interval as other kernel models give them."""
        return Times(self.time_us, self.low_us, self.high_us)
