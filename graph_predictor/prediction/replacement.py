"""The work of a step in units, and which of them are replaced by other work: what edits read and say (see ``units``,
``rewriting``)."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_models.op_call import OpCall
from tracer.arrays import Bool, Float64, Int64


@dataclass(slots=True)
class Units:
    """Columns of equal length, sorted by rank, lane and time.

    Attributes:
        rank: position in the job.
        lane: the stream (on a CPU: the thread).
        row: the piece of ``Scenario.work`` (on a CPU: the operation).
        op: row of the rank's ``ops``, -1 for none.
        phase, step: as in ``ops``.
        start: recorded start, ns.
        kernels: how many kernels it has; 1 on a CPU.
        follows: whether it comes next after the unit before it on its lane, with no other work between, and waits for
            nothing else.
        watched: whether the host, or work of another stream, waits for it.
        calls: after the edits of sizes and precision; replaced units have the new ones.
        alive: whether it is still there.
        on_host: whether these are a CPU's operations.
    """

    rank: Int64
    lane: Int64
    row: Int64
    op: Int64
    phase: Int64
    step: Int64
    start: Int64
    kernels: Int64
    follows: Bool
    watched: Bool
    calls: list[tuple[OpCall, ...]]
    alive: Bool
    on_host: bool

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class Replacement:
    """Units (in time order) whose place other work takes: it runs where the first of them did, the others vanish."""

    units: Int64
    calls: tuple[OpCall, ...]

    def carry_out(self, units: Units) -> None:
        """Put the new work into the table."""
        units.alive[self.units[1:]] = False
        units.calls[int(self.units[0])] = self.calls


@dataclass(slots=True)
class Rewriting:
    """Replacements by one edit, and a factor on each piece of host time (row of ``Scenario.pieces``) beside them."""

    replacements: list[Replacement]
    host_weight: Float64 | None = None


def sized(calls: tuple[OpCall, ...]) -> bool:
    """Return whether calls have sizes, so that they can be priced."""
    return bool(calls) and not any("unsized" in call.flags for call in calls)
