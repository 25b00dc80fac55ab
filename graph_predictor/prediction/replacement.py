"""The work of a step in units, and which of them are replaced by other work: what edits read and say (see ``units``,
``rewriting``)."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_models.op_call import OpCall
from tracer.arrays import Bool, Float64, Int64


@dataclass(slots=True)
class WorkUnits:
    """Columns of equal length, sorted by rank, lane and time.

    Attributes:
        rank: position in the job.
        lane: the stream (on a CPU: the thread).
        row: the kernel group of ``Scenario.work`` (on a CPU: the operation).
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
    """Units (in time order) whose place other work takes: it runs where the first of them did, the others vanish.
    Without calls nothing takes their place, and all of them vanish."""

    units: Int64
    calls: tuple[OpCall, ...]

    def carry_out(self, units: WorkUnits) -> None:
        """Put the new work into the table."""
        units.alive[self.units[1 if self.calls else 0:]] = False
        if self.calls:
            units.calls[int(self.units[0])] = self.calls

    @property
    def label(self) -> str:
        """Return what reports call the new work; "" where the operation it runs in says it: it replaces that alone."""
        if len(self.units) == 1 or not self.calls:
            return ""
        return f"{self.calls[0].family.value} {self.calls[0].kind}"


@dataclass(slots=True)
class Rewriting:
    """Replacements by one edit, and what it changes beside them.

    Attributes:
        replacements: of units by other work, or by none.
        host_weight: factor on each slice of host time (row of ``Scenario.slices``).
        removed: of each rank, operations that are gone with everything in them: host time, launches, kernels and waits,
            in units or not.
    """

    replacements: list[Replacement]
    host_weight: Float64 | None = None
    removed: list[Bool] | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """What a step no longer has.

    Attributes:
        operations: of each rank, rows of ``ops``.
        kernels, items: rows of the recorded program.
    """

    operations: list[Bool]
    kernels: Bool
    items: Bool


def sized(calls: tuple[OpCall, ...]) -> bool:
    """Return whether calls have sizes, so that they can be priced."""
    return bool(calls) and not any("unsized" in call.flags for call in calls)
