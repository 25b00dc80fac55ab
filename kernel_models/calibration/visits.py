"""Coming back to what was measured: on a shared CPU a single moment says little of what a shape takes.

Neighbours on a machine, their caches and memory traffic make the same product take up to twice as long, for moments
that last from milliseconds to seconds; they never make it quicker. So every benchmark is visited again, some seconds
later each time, until its two quickest visits agree: the quickest is then what the machine can do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from tracer.campaign.items import Item

GAP_S = 2.0
"""Least seconds between two visits: what disturbs one has mostly gone by then."""
AGREE = 0.08
"""Two visits agree if the slower one takes no more than this share longer."""
MOST_VISITS = 4


@dataclass
class _Shape:
    """One benchmark and what its visits took."""

    item: Item
    times_us: list[float]
    at_s: float
    failed: bool = field(default=False)

    def settled(self) -> bool:
        """Whether a further visit would say nothing new."""
        if self.failed or len(self.times_us) >= MOST_VISITS:
            return True
        if len(self.times_us) < 2:
            return False
        first, second = sorted(self.times_us)[:2]
        return second <= (1 + AGREE) * first


class Visits:
    """A queue of benchmarks to come back to, first measured first."""

    def __init__(self) -> None:
        self._queue: deque[_Shape] = deque()
        self._known: dict[str, _Shape] = {}

    def add(self, item: Item, time_us: float, now_s: float) -> None:
        """A benchmark was measured for the first time."""
        shape = _Shape(item, [time_us], now_s)
        self._known[item.id] = shape
        self._queue.append(shape)

    def due(self, now_s: float) -> Item | None:
        """The next visit, if one is due; it must be answered by ``took`` or ``failed`` before the next is asked for."""
        while self._queue and self._queue[0].settled():
            self._queue.popleft()
        if not self._queue or now_s - self._queue[0].at_s < GAP_S:
            return None
        shape = self._queue[0]
        return msgspec.structs.replace(shape.item, visit=len(shape.times_us) + 1)

    def took(self, item: Item, time_us: float, now_s: float) -> bool:
        """A visit took so long; returns whether it was the quickest so far."""
        shape = self._known[item.id]
        quicker = time_us < min(shape.times_us)
        shape.times_us.append(time_us)
        self._later(shape, now_s)
        return quicker

    def failed(self, item: Item) -> None:
        """A visit did not work: what was measured before stands."""
        self._known[item.id].failed = True

    def _later(self, shape: _Shape, now_s: float) -> None:
        shape.at_s = now_s
        self._queue.remove(shape)
        self._queue.append(shape)

    def spread(self) -> list[float]:
        """How much longer the slowest visit of each benchmark took than its quickest, shares."""
        return [max(shape.times_us) / min(shape.times_us) - 1 for shape in self._known.values()
                if len(shape.times_us) > 1]
