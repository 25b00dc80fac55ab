"""The device work of a job's kernels, as calls that models can price: what an edit changes.

Each kernel belongs to a *kernel group*: an operation's kernels, or one copy, memset or lone kernel. It has calls,
before and after the edits; the ratio of their prices scales the measured times of its kernels (see ``pricing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.simulation.build import Built
from kernel_models.op_call import OpCall
from kernel_models.trace_calls import FAMILIES, Basis, graph_calls
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import NONE, KernelKind

COLLECTIVE = len(FAMILIES)
"""Family code of collectives."""


@dataclass(frozen=True, slots=True)
class Work:
    """Columns over the kernels of a recorded program, and over the kernel groups.

    Attributes:
        kernel_group: of each kernel; -1 for collectives.
        family: position in ``FAMILIES`` of each kernel, ``COLLECTIVE`` for collectives.
        calls: those of kernel group i are ``calls[call_row[i]]``; groups that are equal share a row.
        call_row: of each kernel group.
        rank, op: of each kernel group; ``op`` is a row of its rank's ``ops``, -1 for none.
        sized: whether the group's sizes are known.
        measured_ns: duration of each group's kernels in all.
    """

    kernel_group: Int64
    family: Int64
    calls: list[tuple[OpCall, ...]]
    call_row: Int64
    rank: Int64
    op: Int64
    sized: np.ndarray
    measured_ns: Int64

    def regrouped(self, new: Sequence[tuple[OpCall, ...]]) -> tuple[Work, dict[int, tuple[OpCall, ...]]]:
        """Give kernel groups rows of calls by what they were and what they become.

        Args:
            new: calls of each kernel group after a change.

        Returns:
            The work with its new rows of calls, and the new calls of those that change.
        """
        numbers: dict[tuple[int, tuple[OpCall, ...]], int] = {}
        call_row = np.array([numbers.setdefault(pair, len(numbers))
                             for pair in zip(self.call_row.tolist(), new, strict=True)], np.int64)
        calls = [self.calls[number] for number, _ in numbers]
        after = {number: wanted for (_, wanted), number in numbers.items() if wanted != calls[number]}
        return replace(self, calls=calls, call_row=call_row), after


def describe_work(built: Built) -> Work:
    """The calls of every kernel of a recorded job."""
    kernels = len(built.program.kernel_item)
    kernel_group, family = np.full(kernels, NONE, np.int64), np.full(kernels, COLLECTIVE, np.int64)
    numbers: dict[tuple[OpCall, ...], int] = {}
    call_row, ranks, ops, sized, times = [], [], [], [], []
    groups = 0
    for rank, graph in enumerate(built.graphs):
        low = int(built.program.kernel_ptr[rank])
        found = graph_calls(graph)
        count = np.diff(found.kernel_offset)
        of_kernel = np.repeat(np.arange(len(found)), count)
        kernel_group[low + found.kernel] = groups + of_kernel
        family[low + found.kernel] = found.family[of_kernel]
        seen: dict[bytes, int] = {}
        for row in range(len(found)):
            key = found.call_index[found.call_offset[row]:found.call_offset[row + 1]].tobytes()
            if key not in seen:
                seen[key] = numbers.setdefault(found.calls_of_row(row), len(numbers))
            call_row.append(seen[key])
        ranks.append(np.full(len(found), rank, np.int64))
        ops.append(found.op.astype(np.int64))
        sized.append(found.basis != Basis.NAME)
        times.append(found.time_ns)
        groups += len(found)
        family[low + np.flatnonzero(graph.kernels.kind == KernelKind.COLLECTIVE)] = COLLECTIVE
    none = [np.zeros(0, np.int64)]
    return Work(kernel_group, family, list(numbers), np.array(call_row, np.int64), np.concatenate(ranks or none),
                np.concatenate(ops or none), np.concatenate(sized or none).astype(np.bool_),
                np.concatenate(times or none))


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
