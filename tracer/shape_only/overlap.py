"""First use of a collective's result: the model of what it can overlap.

On a GPU a collective runs on a stream of its own, and the compute stream waits for it where its result is used. A step
that never ran has no streams, but its data dependences say the same: the first later operation, views excepted, that
touches the storage of the result. A functional collective says it itself, by ``wait_tensor``.
"""

from __future__ import annotations

from tracer.graph import NONE


class WaitPoints:
    """Collectives under way and, by collective, the operation that first needed its result."""

    def __init__(self) -> None:
        self.first: dict[int, int] = {}
        """Number of the collective → row of the operation."""
        self.pending: dict[int, set[int]] = {}
        """Number of a storage → collectives that write it."""

    def started(self, collective: int, row: int, storages: list[int]) -> None:
        """A collective began at ``row``, and will write these storages."""
        for storage in storages:
            if storage != NONE:
                self.pending.setdefault(storage, set()).add(collective)

    def waited(self, row: int, storages: list[int]) -> None:
        """The result in these storages is needed at ``row``."""
        for storage in storages:
            for collective in self.pending.pop(storage, ()):
                self.first.setdefault(collective, row)
