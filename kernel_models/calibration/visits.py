"""Coming back to what was measured: on a shared CPU a single moment says little of what a shape takes.

Neighbours on a machine, their caches and memory traffic make the same work take up to twice as long, for milliseconds
or for a minute; they never make it quicker. So every benchmark is visited again, later each time, until its two
quickest visits agree: the quickest is then what the machine can do.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import msgspec

from tracer.campaign.items import Item

GAPS = (1 / 16, 1 / 6, 1 / 3)
"""From each visit to the next, shares of the time there is: what disturbs one has mostly gone by the next."""
LEAST_GAP_S = 1.0
CLOSING = 0.85
"""After this share of the time visits come before they are due, so that what was measured last has one too."""
AGREE = 0.08
"""Two visits agree if the slower one takes no more than this share longer."""


@dataclass
class _Shape:
    """One benchmark, what its visits took, and when the last one was."""

    item: Item
    times_us: list[float]
    at_s: float

    def settled(self) -> bool:
        """Return whether a further visit would say nothing new."""
        if len(self.times_us) > len(GAPS):
            return True
        first, *others = sorted(self.times_us)
        return bool(others) and others[0] <= (1 + AGREE) * first


class Visits:
    """Benchmarks to come back to.

    Args:
        begun_s: when the measuring began, by the caller's clock.
        time_s: how long it may last.
    """

    def __init__(self, begun_s: float, time_s: float) -> None:
        self._begun_s, self._time_s = begun_s, time_s
        self._shapes: dict[str, _Shape] = {}
        self._due: list[tuple[float, str]] = []

    def add(self, item: Item, time_us: float, now_s: float) -> None:
        """A benchmark was measured for the first time."""
        self._plan(_Shape(item, [time_us], now_s))

    def due(self, now_s: float) -> Item | None:
        """The next visit if one is due; near the end whichever is due first. ``took`` answers it, if it worked."""
        if not self._due:
            return None
        due_s, name = self._due[0]
        shape = self._shapes[name]
        closing = now_s - self._begun_s > CLOSING * self._time_s
        if due_s > now_s and not (closing and now_s - shape.at_s >= LEAST_GAP_S):
            return None
        heapq.heappop(self._due)
        return msgspec.structs.replace(shape.item, visit=len(shape.times_us) + 1)

    def took(self, item: Item, time_us: float, now_s: float) -> bool:
        """A visit took so long; returns whether it was the quickest so far."""
        shape = self._shapes[item.id]
        quicker = time_us < min(shape.times_us)
        shape.times_us.append(time_us)
        shape.at_s = now_s
        self._plan(shape)
        return quicker

    def spread(self) -> list[float]:
        """Return how much longer the slowest visit of each benchmark took than its quickest, shares."""
        return [max(shape.times_us) / min(shape.times_us) - 1 for shape in self._shapes.values()
                if len(shape.times_us) > 1]

    def _plan(self, shape: _Shape) -> None:
        self._shapes[shape.item.id] = shape
        if not shape.settled():
            gap_s = max(GAPS[len(shape.times_us) - 1] * self._time_s, LEAST_GAP_S)
            heapq.heappush(self._due, (shape.at_s + gap_s, shape.item.id))
