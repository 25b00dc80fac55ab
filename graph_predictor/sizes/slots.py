"""The operations of one step of a capture, each with its mean times, and their partners in captures at other sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graph_predictor.prediction.scenario import Scenario
from graph_predictor.simulation.host_pieces import fetching_operations
from tracer.alignment import align
from tracer.arrays import Float64, Int64
from tracer.graph import NONE, ExecutionGraph, OpKind


@dataclass(frozen=True, slots=True)
class Slots:
    """The last repeated step of one rank, operation by operation, threads in order of their first one.

    A *slot* is a place in that step's program; operations of the other repeated steps belong to the slot of the same
    place. Times are ns by step and slot; the last column of ``gap`` is the time after the last operation.

    Attributes:
        graph: the rank's.
        op: row of ``graph.ops`` of each slot.
        token: number of each one's name.
        slot_of_op: of every row of ``graph.ops``, -1 outside the cycle.
        own: host time in the operation itself, [steps, slots].
        gap: host time before it outside any operation, [steps, slots + 1].
        device: time of its kernels, [steps, slots].
    """

    graph: ExecutionGraph
    op: Int64
    token: Int64
    slot_of_op: Int64
    own: Float64
    gap: Float64
    device: Float64


def slots_of(scenario: Scenario, rank: int, names: dict[str, int]) -> Slots:
    """The slots of one rank of a capture; ``names`` numbers the names of all captures alike."""
    graph, cycle, pieces = scenario.built.graphs[rank], scenario.cycle, scenario.pieces
    ops = graph.ops
    first = int(scenario.built.program.item_row[cycle.first[rank]])
    numbers = np.array([names.setdefault(text, len(names)) for text in graph.strings] or [0], np.int64)
    by_step = [_in_order(graph, first + number) for number in range(cycle.steps)]
    reference = by_step[-1]
    token = numbers[ops.name[reference]]
    slot_of_op = np.full(len(ops) + 1, NONE, np.int64)
    for rows in by_step:
        partner = _partners(numbers[ops.name[rows]], token)
        slot_of_op[rows[partner >= 0]] = partner[partner >= 0]
    step_of_op = np.append(ops.step.astype(np.int64) - first, NONE)
    size = len(reference)

    def table(op: Int64, ns: npt.NDArray[np.floating | np.integer], width: int) -> Float64:
        slot, step = slot_of_op[op], step_of_op[op]
        kept = (slot >= 0) & (step >= 0) & (step < cycle.steps)
        sums = np.bincount(step[kept] * width + slot[kept], weights=ns[kept], minlength=cycle.steps * width)
        return np.asarray(sums.reshape(cycle.steps, width), np.float64)

    # Batches that the training process loads have a law of their own.
    mine = np.flatnonzero((pieces.rank == rank) & cycle.working[pieces.item] & ~pieces.fetched)
    inside = mine[pieces.op[mine] >= 0]
    between = mine[(pieces.op[mine] < 0) & (pieces.following[mine] >= 0)]
    tail = mine[(pieces.op[mine] < 0) & (pieces.following[mine] < 0)]
    gap = table(pieces.following[between], pieces.ns[between], size + 1)
    gap[:, size] = pieces.ns[tail].sum() / cycle.steps
    low, high = int(scenario.built.program.kernel_ptr[rank]), int(scenario.built.program.kernel_ptr[rank + 1])
    op = operation_of_kernels(scenario, rank)
    owned = np.flatnonzero((op >= 0) & cycle.kernel[low:high])
    device = table(op[owned], graph.kernels.duration_ns[owned], size)
    own = table(pieces.op[inside], pieces.ns[inside], size)
    return Slots(graph, reference, token, slot_of_op[:-1], own, gap, device)


def operation_of_kernels(scenario: Scenario, rank: int) -> Int64:
    """Operation that each kernel of a rank is priced with (the nearest with sizes); of collectives their own."""
    work, program = scenario.work, scenario.built.program
    low, high = int(program.kernel_ptr[rank]), int(program.kernel_ptr[rank + 1])
    piece = work.piece[low:high]
    own = scenario.built.graphs[rank].kernels.op.astype(np.int64)
    return np.where(piece >= 0, np.append(work.op, NONE)[piece], own)


def partners(mine: Slots, theirs: Slots) -> Int64:
    """The other capture's slot of each of ours, -1 where it has none."""
    return _partners(mine.token, theirs.token)


def _in_order(graph: ExecutionGraph, step: int) -> Int64:
    ops = graph.ops
    rows = np.flatnonzero((ops.kind == OpKind.OPERATION) & (ops.step == step) & ~fetching_operations(graph))
    thread = ops.thread[rows]
    order = sorted(set(thread.tolist()), key=lambda t: int(ops.start_ns[rows[thread == t]].min()))
    return np.concatenate([rows[thread == t] for t in order] or [rows])


def _partners(mine: Int64, theirs: Int64) -> Int64:
    if np.array_equal(mine, theirs):
        return np.arange(len(mine))
    none = np.full(len(mine), NONE, np.int64)
    if not len(mine) or not len(theirs):
        return none
    return align(mine, theirs, none, np.full(len(theirs), NONE, np.int64))
