"""``MemoryAccount``: a rank's device memory at its fullest moment, by what it holds. Needs no torch.

A trace by shapes follows every storage (``tracer.shape_only.memory``), a plan's estimate adds formulas up
(``planner.parallel.memory``), edits scale what a trace followed (``graph_predictor.prediction.memory``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum

PEAK = "peak"
"""Key in ``Meta.memory`` of the most bytes alive at once. The parts' keys are the attributes of ``MemoryAccount``."""


class Holds(str, Enum):
    """A purpose of bytes in memory."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    """Made in forward (or when forward is run again in backward) and still there in backward."""
    TEMPORARIES = "temporaries"
    """Made in the step and gone before backward, or made in backward or by the optimizer."""
    OTHER = "other"
    """There when the step began and none of the above: batches kept on the device, and the like."""
    RESERVED = "reserved"
    """Bytes beside the program's: contexts, libraries' workspaces and buffers, fragmentation. No trace sees them."""


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes of each ``Holds`` at the moment that needs most."""

    parameters: float = 0
    buffers: float = 0
    gradients: float = 0
    optimizer_state: float = 0
    activations: float = 0
    temporaries: float = 0
    other: float = 0
    reserved: float = 0

    @staticmethod
    def of_trace(memory: Mapping[str, int]) -> MemoryAccount:
        """Return the account of a traced step's ``Meta.memory``; what no part of it explains is ``other``."""
        parts = {what.value: memory.get(what.value, 0) for what in Holds}
        parts[Holds.OTHER] += memory.get(PEAK, 0) - sum(parts.values())
        return MemoryAccount(**parts)

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def allocated(self) -> float:
        """Return what the framework's allocator has handed out: all but what is reserved beside it."""
        return self.total - self.reserved

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by name of what is there at all."""
        return {field.name: size for field in fields(self) if (size := getattr(self, field.name))}

    def lacking(self, limit_bytes: float, name: str) -> str | None:
        """Return why it does not fit a device, as a sentence; ``None`` if it does, or its memory is unknown (0)."""
        if not 0 < limit_bytes < self.total:
            return None
        return (f"It does not fit: it needs more than the {limit_bytes / 1e9:,.4g} GB of {name}; choose a larger "
                "device, a smaller batch, or recomputation.")

    def __str__(self) -> str:
        """Return text such as "1.50 GiB (parameters 1.00 GiB, activations 512.00 MiB)"."""
        shown = ", ".join(f"{name.replace('_', ' ')} {binary_size(size)}" for name, size in self.parts.items())
        return f"{binary_size(self.total)} ({shown})" if shown else binary_size(0)


def binary_size(size: float) -> str:
    """Return a number of bytes in words, such as "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
