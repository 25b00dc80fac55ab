"""Leave one step out: every kernel's duration replaced by what the same kernel took in the other steps.

A replay with a step's own durations cannot be wrong about them; this one can. Its error is what a prediction of one
more step of the same run would have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.simulation.build import Built
from graph_predictor.simulation.program import Program
from tracer.arrays import Int64
from tracer.graph import ExecutionGraph, KernelKind


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A program whose kernel durations (ns) come from the other steps, and the share of kernels that have any.

    ``matched_share`` counts kernels launched within a step, collectives apart; those without a match keep their
    recorded duration.
    """

    program: Program
    matched_share: float


def leave_one_out(built: Built) -> LeftOut:
    """Replace every kernel's duration by the mean of the same kernel in the other steps of its rank.

    Two kernels of different steps are the same if they have the same name and are the n-th of that name in their
    step, in order of launch. Collectives keep their durations: they are mostly waiting for other ranks.
    """
    p = built.program
    durations = p.kernel_duration.copy()
    matched = considered = 0
    for rank, graph in enumerate(built.graphs):
        low = int(p.kernel_ptr[rank])
        rows, mean = _means_of_others(graph)
        durations[low + rows] = np.rint(mean).astype(np.int64)
        matched += len(rows)
        considered += int(_in_steps(graph).sum())
    return LeftOut(p.with_durations(durations), matched / considered if considered else 0.0)


def _in_steps(graph: ExecutionGraph) -> np.ndarray:
    kernels = graph.kernels
    return (kernels.step >= 0) & (kernels.launch >= 0) & (kernels.kind != KernelKind.COLLECTIVE)


def _means_of_others(graph: ExecutionGraph) -> tuple[Int64, np.ndarray]:
    """Rows of the kernels that other steps have too, and the mean duration there (ns)."""
    kernels = graph.kernels
    rows = np.nonzero(_in_steps(graph))[0]
    if not len(rows):
        return rows, np.zeros(0)
    launched = graph.launches.start_ns[kernels.launch[rows]]
    rows = rows[np.lexsort((kernels.start_ns[rows], launched, kernels.name[rows], kernels.step[rows]))]
    name, step = kernels.name[rows], kernels.step[rows]
    first = np.ones(len(rows), np.bool_)
    first[1:] = (name[1:] != name[:-1]) | (step[1:] != step[:-1])
    opening = np.nonzero(first)[0]
    number = np.arange(len(rows)) - np.repeat(opening, np.diff(np.append(opening, len(rows))))
    _, key = np.unique(np.stack([name.astype(np.int64), number]), axis=1, return_inverse=True)
    key = key.reshape(-1)
    duration = kernels.duration_ns[rows].astype(np.float64)
    total, count = np.bincount(key, weights=duration), np.bincount(key)
    others = count[key] - 1
    kept = others > 0
    return rows[kept], ((total[key] - duration)[kept] / others[kept])
