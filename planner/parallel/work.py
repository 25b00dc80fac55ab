"""Priced terms that a plan's step is the sum of: device work of a piece, and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tracer.parallel_plan import Recomputation


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Device work of kernels that run one after another, µs.

    Attributes:
        products: time of matrix products and fused attention.
        others: time of all other kernels.
        low, high: 80% interval of the sum.
        launches: number of launches.
        sources: µs by ``Source``.
    """

    products: float = 0.0
    others: float = 0.0
    low: float = 0.0
    high: float = 0.0
    launches: int = 0
    sources: Mapping[int, float] = field(default_factory=dict)

    @property
    def us(self) -> float:
        """Time of all kernels, µs."""
        return self.products + self.others

    def __add__(self, other: LayerWork) -> LayerWork:
        sources = dict(self.sources)
        for source, us in other.sources.items():
            sources[source] = sources.get(source, 0.0) + us
        return LayerWork(self.products + other.products, self.others + other.others, self.low + other.low,
                         self.high + other.high, self.launches + other.launches, sources)

    def times(self, factor: float) -> LayerWork:
        """Return this work times ``factor``."""
        return LayerWork(self.products * factor, self.others * factor, self.low * factor, self.high * factor,
                         round(self.launches * factor), {source: us * factor for source, us in self.sources.items()})


class RecomputedWork(dict[Recomputation, LayerWork]):
    """Forward work that backward runs again, by kind of recomputation; computed when first asked for.

    Args:
        whole: all of forward, for full recomputation.
        of: returns the work of any other kind.
    """

    def __init__(self, whole: LayerWork, of: Callable[[Recomputation], LayerWork]) -> None:
        super().__init__({Recomputation.FULL: whole})
        self._of = of

    def __missing__(self, kind: Recomputation) -> LayerWork:
        """Compute and store the work of a kind."""
        self[kind] = self._of(kind)
        return self[kind]


@dataclass(frozen=True, slots=True)
class PieceCost:
    """Costs of a decoder's piece, such as a block, for one micro-batch on one rank.

    Attributes:
        forward, backward: work of the two passes.
        core: part of forward that selective recomputation runs again: the plan's modules, else attention's core. With
            fused attention the core is empty.
        recomputed: part of forward that backward runs again, by kind of recomputation that starts at a block's input.
            It is all calls, or those before the last product whose results are not kept.
        weights: part of backward: products of weight gradients, which the zero-bubble schedule runs later.
    """

    forward: LayerWork
    backward: LayerWork
    core: LayerWork
    recomputed: Mapping[Recomputation, LayerWork]
    weights: LayerWork


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives in a row: their time, µs, its 80% interval, their number, and the most nodes that one spans."""

    us: float = 0.0
    low: float = 0.0
    high: float = 0.0
    count: int = 0
    nodes: int = 1

    @property
    def between_nodes(self) -> bool:
        """Whether some collective leaves the node."""
        return self.nodes > 1

    def times(self, factor: float) -> Exchange:
        """Return these collectives with their time times ``factor``."""
        return Exchange(self.us * factor, self.low * factor, self.high * factor, self.count, self.nodes)

    def without_last(self) -> Exchange:
        """Return all collectives but the last; all are assumed to take the same time."""
        left = (self.count - 1) / self.count if self.count else 0.0
        return Exchange(self.us * left, self.low * left, self.high * left, max(self.count - 1, 0), self.nodes)


NOTHING = Exchange()
