"""The terms that a plan's step is added from, priced: device work of a piece, and collectives in a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tracer.parallel_plan import Recomputation


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Device work in a row, µs.

    Attributes:
        products: of matrix products and fused attention.
        others: of everything else.
        low, high: 80% interval of the two together.
        launches: kernels.
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
        """All of it."""
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
    """Work of forward that backward does again, by kind of recomputation; of most pieces few kinds are looked at.

    Args:
        whole: all of forward.
        of: what a kind does again, where that is less.
    """

    def __init__(self, whole: LayerWork, of: Callable[[Recomputation], LayerWork]) -> None:
        super().__init__({Recomputation.FULL: whole})
        self._of = of

    def __missing__(self, kind: Recomputation) -> LayerWork:
        """Return the work of a kind, and keep it."""
        self[kind] = self._of(kind)
        return self[kind]


@dataclass(frozen=True, slots=True)
class PieceCost:
    """A piece for one micro-batch on one rank.

    Attributes:
        forward, backward: its work.
        core: of forward, what selective recomputation runs again: the plan's modules, else attention's core. With fused
            attention the core is empty.
        recomputed: of forward, what backward runs again, by kinds of recomputation that begin at a block's input. It is
            all, or all up to the last product, whose result backward does not need, without what is kept.
        weights: of backward, the products that give gradients of weights, which the zero-bubble schedule does later.
    """

    forward: LayerWork
    backward: LayerWork
    core: LayerWork
    recomputed: Mapping[Recomputation, LayerWork]
    weights: LayerWork


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives in a row: µs, the 80% interval's ends, how many, and over how many nodes they go at most."""

    us: float = 0.0
    low: float = 0.0
    high: float = 0.0
    count: int = 0
    nodes: int = 1

    @property
    def between_nodes(self) -> bool:
        """Return whether they leave the node."""
        return self.nodes > 1

    def times(self, factor: float) -> Exchange:
        """Return a share of all of them."""
        return Exchange(self.us * factor, self.low * factor, self.high * factor, self.count, self.nodes)

    def without_last(self) -> Exchange:
        """Return all of them, which are taken to be equal, but the last."""
        left = (self.count - 1) / self.count if self.count else 0.0
        return Exchange(self.us * left, self.low * left, self.high * left, max(self.count - 1, 0), self.nodes)


NOTHING = Exchange()
