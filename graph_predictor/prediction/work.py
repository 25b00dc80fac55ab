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
from tracer.arrays import Int64
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
