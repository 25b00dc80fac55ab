"""Look-ups and exchanges as a recording has them: measured over modelled, which every sharding's prices are scaled by.

A sharding's look-ups take measured × model(sharding) / model(recorded), as all recorded work does after a change
(``prediction.anchoring``); exchanges likewise, where the job stays on its cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.anchoring import Prices, anchored
from graph_predictor.prediction.pricing import SHARED_VARIANCE
from kernel_models.spreads import MEASURED_KERNELS
from tracer.arrays import Float64


@dataclass(frozen=True, slots=True)
class WorkAnchor:
    """Measured work of one kind.

    Attributes:
        measured_us: of the recorded step.
        modelled_us, low_us, high_us: what the models say of it there, with the 80% interval.
        noise: log half width of the 80% interval of the measured time.
        elsewhere: whether the job is to run on another device.
    """

    measured_us: float
    modelled_us: float
    low_us: float
    high_us: float
    noise: float = MEASURED_KERNELS
    elsewhere: bool = False

    @property
    def factor(self) -> float:
        """Measured over modelled."""
        return self.measured_us / self.modelled_us

    def times(self, us: Float64, low: Float64, high: Float64) -> tuple[Float64, Float64, Float64]:
        """Times and intervals of modelled work, anchored, µs [n]; nothing stays nothing."""
        before, after = prices(np.full(len(us), self.modelled_us), np.full(len(us), self.low_us),
                                np.full(len(us), self.high_us)), prices(us, low, high)
        found = anchored(before, after, float(np.sqrt(1 - SHARED_VARIANCE)) if self.elsewhere else None)
        time = self.measured_us * found.ratio
        return (time, time * np.exp(-np.hypot(found.low, self.noise)),
                time * np.exp(np.hypot(found.high, self.noise)))


@dataclass(frozen=True, slots=True)
class Anchors:
    """The anchors of a problem; ``None`` where nothing was measured."""

    forward: WorkAnchor | None = None
    backward: WorkAnchor | None = None
    exchanges: WorkAnchor | None = None

    @staticmethod
    def factor(anchor: WorkAnchor | None) -> float:
        """The factor on the models' times; 1 without an anchor."""
        return 1.0 if anchor is None else anchor.factor


NO_ANCHORS = Anchors()
"""Anchors of a problem that nothing was measured of."""


def prices(us: Float64, low: Float64, high: Float64) -> Prices:
    """Times and ends of their intervals, µs, as ``Prices`` has them."""
    safe = np.maximum(us, 1e-9)
    return Prices(us, np.log(np.maximum(low, 1e-9) / safe), np.log(np.maximum(high, 1e-9) / safe))
