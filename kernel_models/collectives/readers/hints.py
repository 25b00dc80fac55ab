"""Facts that a log leaves out and the user gives its reader."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_models.collectives.call import CollectiveKind, CommError, Placement


@dataclass(frozen=True, slots=True)
class Hints:
    """``ranks`` in blocks of ``per_node`` (all on one node by default), the collective, the dtype, and the backend."""

    ranks: int | None = None
    per_node: int | None = None
    kind: CollectiveKind | None = None
    dtype: str = "float32"
    backend: str = "nccl"

    def placement(self) -> Placement:
        """The placement of ``ranks``. Raises ``CommError`` if it is not given."""
        if self.ranks is None:
            raise CommError("The number of ranks is not known; give --ranks.")
        return Placement.even(self.ranks, self.per_node or self.ranks)
