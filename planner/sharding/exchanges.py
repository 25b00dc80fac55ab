"""Times of a sharded step's collectives: all have one price (``kernel_models.collectives.price_calls``), here as curves
over their size, so that a search asks for millions of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernel_models.collectives import CollectiveCall, CollectiveKind, Placement, price_calls
from kernel_models.collectives.call import Level
from kernel_models.model import Source
from planner.sharding.problem import ShardingProblem
from tracer.arrays import Float64

_FROM, _TO, _PER_OCTAVE = 6, 42, 4
"""Sizes of the curves: 64 B to 4 TB, four an octave."""


@dataclass(frozen=True, slots=True)
class PricedExchange:
    """One collective: its time and 80% interval, µs, where that comes from, and what it is, unless it is nothing."""

    us: float = 0.0
    low: float = 0.0
    high: float = 0.0
    source: Source = Source.HEURISTIC
    call: CollectiveCall | None = None


class ExchangeCurve:
    """Time of one kind of collective of one group over its payload.

    The payload of an uneven all-to-all is that of the busiest rank (``collectives.uneven_all_to_all``): where rank r
    sends S_r split evenly over all, every rank receives the mean of S, so that max S is it.
    """

    def __init__(self, problem: ShardingProblem, kind: CollectiveKind, placement: Placement) -> None:
        self._problem, self._kind, self._placement = problem, kind, placement
        self._sizes = 2.0 ** np.arange(_FROM, _TO, 1 / _PER_OCTAVE)
        self._us = np.maximum.accumulate(self._price(self._sizes.tolist())[0])

    def us(self, payload_bytes: npt.ArrayLike) -> Float64:
        """Times, µs; nothing for no bytes."""
        size = np.asarray(payload_bytes, np.float64)
        return np.where(size > 0, np.interp(size, self._sizes, self._us), 0.0)

    def priced(self, payload_bytes: float) -> PricedExchange:
        """The price itself."""
        if payload_bytes <= 0:
            return PricedExchange()
        us, low, high, level = self._price([payload_bytes])
        source = Level(int(level[0])).source if self._problem.anchors.exchanges is None else Source.ANCHORED
        return PricedExchange(float(us[0]), float(low[0]), float(high[0]), source,
                              CollectiveCall(self._kind, payload_bytes, self._placement))

    def _price(self, sizes: Sequence[float]) -> tuple[Float64, Float64, Float64, npt.NDArray[np.int64]]:
        calls = [CollectiveCall(self._kind, size, self._placement) for size in sizes]
        found = price_calls(calls, self._problem.collectives)
        factor = self._problem.anchors.factor(self._problem.anchors.exchanges)
        return factor * found.time_us, factor * found.low_us, factor * found.high_us, found.level


class Exchanges:
    """The collectives of a problem's steps."""

    def __init__(self, problem: ShardingProblem) -> None:
        everywhere, node = problem.everywhere, Placement((problem.per_node,))
        across = Placement((1,) * problem.nodes)
        kinds = CollectiveKind

        def curve(kind: CollectiveKind, placement: Placement) -> ExchangeCurve:
            return ExchangeCurve(problem, kind, placement)

        self.all_to_all = curve(kinds.ALL_TO_ALL, everywhere)
        self.reduce_scatter = curve(kinds.REDUCE_SCATTER, everywhere)
        self.all_gather = curve(kinds.ALL_GATHER, everywhere)
        self.all_reduce = curve(kinds.ALL_REDUCE, everywhere)
        self.node_reduce_scatter = curve(kinds.REDUCE_SCATTER, node)
        self.node_all_gather = curve(kinds.ALL_GATHER, node)
        self.across_nodes = curve(kinds.ALL_TO_ALL, across)
