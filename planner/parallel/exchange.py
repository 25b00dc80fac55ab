"""``Exchange``: collectives in a row of a plan's step, priced."""

from __future__ import annotations

from dataclasses import dataclass


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
