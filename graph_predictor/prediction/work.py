"""The device work of a job's kernels, as calls that models can price: what an edit changes.

Each kernel belongs to a *piece*: an operation's kernels, or one copy, memset or lone kernel. A piece has calls, before
and after the edits; the ratio of their prices scales the measured times of its kernels (see ``pricing``).
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
    """Columns over the kernels of a recorded program, and over the pieces.

    Attributes:
        piece: of each kernel; -1 for collectives.
        family: position in ``FAMILIES`` of each kernel, ``COLLECTIVE`` for collectives.
        calls: of each piece, in groups of equal pieces: ``calls[group[i]]`` are those of piece i.
        group: of each piece.
        rank, op: of each piece; ``op`` is a row of its rank's ``ops``, -1 for none.
        sized: whether the piece's sizes are known.
        measured_ns: duration of each piece's kernels in all.
    """

    piece: Int64
    family: Int64
    calls: list[tuple[OpCall, ...]]
    group: Int64
    rank: Int64
    op: Int64
    sized: np.ndarray
    measured_ns: Int64

    def regrouped(self, new: Sequence[tuple[OpCall, ...]]) -> tuple[Work, dict[int, tuple[OpCall, ...]]]:
        """Group the pieces again by what they were and what they become.

        Args:
            new: calls of each piece after a change.

        Returns:
            The work with its new groups, and the new calls of those that change.
        """
        numbers: dict[tuple[int, tuple[OpCall, ...]], int] = {}
        group = np.array([numbers.setdefault(pair, len(numbers))
                          for pair in zip(self.group.tolist(), new, strict=True)], np.int64)
        calls = [self.calls[number] for number, _ in numbers]
        after = {number: wanted for (_, wanted), number in numbers.items() if wanted != calls[number]}
        return replace(self, calls=calls, group=group), after


def describe_work(built: Built) -> Work:
    """The calls of every kernel of a recorded job."""
    kernels = len(built.program.kernel_item)
    piece, family = np.full(kernels, NONE, np.int64), np.full(kernels, COLLECTIVE, np.int64)
    numbers: dict[tuple[OpCall, ...], int] = {}
    groups, ranks, ops, sized, times = [], [], [], [], []
    pieces = 0
    for rank, graph in enumerate(built.graphs):
        low = int(built.program.kernel_ptr[rank])
        found = graph_calls(graph)
        count = np.diff(found.kernel_offset)
        of_kernel = np.repeat(np.arange(len(found)), count)
        piece[low + found.kernel] = pieces + of_kernel
        family[low + found.kernel] = found.family[of_kernel]
        seen: dict[bytes, int] = {}
        for row in range(len(found)):
            key = found.call_index[found.call_offset[row]:found.call_offset[row + 1]].tobytes()
            if key not in seen:
                seen[key] = numbers.setdefault(found.calls_of_row(row), len(numbers))
            groups.append(seen[key])
        ranks.append(np.full(len(found), rank, np.int64))
        ops.append(found.op.astype(np.int64))
        sized.append(found.basis != Basis.NAME)
        times.append(found.time_ns)
        pieces += len(found)
        family[low + np.flatnonzero(graph.kernels.kind == KernelKind.COLLECTIVE)] = COLLECTIVE
    none = [np.zeros(0, np.int64)]
    return Work(piece, family, list(numbers), np.array(groups, np.int64), np.concatenate(ranks or none),
                np.concatenate(ops or none), np.concatenate(sized or none).astype(np.bool_),
                np.concatenate(times or none))
