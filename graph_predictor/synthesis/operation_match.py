"""The recorded operation that stands for a traced one.

Both sequences are aligned in program order, over everything: a program's layers look alike, and one that begins with
something else (a broadcast of buffers) must not be taken for its next layer. What has no partner there (a layer more, a
gradient summed in another place, a later step of a recurrent layer) is stood for by an operation of the same name, the
nearest in size: of several that near, one among the same neighbours, and of those the one whose time is their median,
since the first of many often took longer. What has no namesake stays without one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.operation_costs import numbered_names
from graph_predictor.recorded.likeness import most_alike_pairs
from graph_predictor.synthesis.recorded_operations import RecordedOperations
from tracer.alignment import run_hashes
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import NONE, ExecutionGraph

SAME_SIZE = 1e-9
"""Logs of sizes that differ by no more are of equal ones."""
NEAR, FAR = 1, 6
"""Operations on either side whose names tell how alike two places are."""


@dataclass(frozen=True, slots=True)
class OperationMatch:
    """The row of the recorded operation that stands for each traced one (-1: none), and whether it is its own partner
    rather than a namesake from another place."""

    row: Int64
    own: Bool


def out_of_place(name: str) -> str:
    """Strip the mark of those that work in place off an operation's name: autograd sums gradients in place or not."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def names_of_both(graph: ExecutionGraph) -> frozenset[str]:
    """Return the names of a trace's operations, in place and not, by which recorded ones are found."""
    own = {out_of_place(graph.string(code)) for code in np.unique(graph.ops.name).tolist()}
    return frozenset(own | {f"{name}_" for name in own})


def match(graph: ExecutionGraph, recorded: RecordedOperations) -> OperationMatch:
    """Find the recorded operations that stand for those of a traced rank."""
    numbers: dict[str, int] = {}
    traced = numbered_names(graph, np.arange(len(graph.ops)), numbers, out_of_place)
    known = numbered_names(recorded.graph, recorded.op, numbers, out_of_place)
    of_trace, of_record = _alike(graph, traced, np.arange(len(traced))), _alike(recorded.graph, known, recorded.op)
    partner = most_alike_pairs(of_trace, of_record)
    own = partner >= 0
    alone = np.flatnonzero(~own)
    if not len(alone) or not len(known):
        return OperationMatch(partner, own)
    sizes = np.array([_log_elements(recorded.graph, int(op)) for op in recorded.op.tolist()])
    near_trace, near_record = of_trace[1], of_record[1]
    took = recorded.host() + recorded.device()
    found: dict[tuple[int, int, int], int] = {}
    for op in alone.tolist():
        key = (int(traced[op]), int(graph.ops.shapes[op]), int(near_trace[op]))
        if key not in found:
            namesakes = np.flatnonzero(known == key[0])
            found[key] = _typical(namesakes, np.abs(sizes[namesakes] - _log_elements(graph, op)),
                                  near_record[namesakes] == key[2], took)
        partner[op] = found[key]
    return OperationMatch(partner, own)


def _typical(rows: Int64, distance: Float64, neighbours: Bool, took: Float64) -> int:
    """Choose the recorded operation that took the median time, among those nearest in size, with the same neighbours
    if any of them has; -1 of none."""
    if not len(rows):
        return NONE
    nearest = distance <= distance.min() + SAME_SIZE
    if (nearest & neighbours).any():
        nearest &= neighbours
    left = rows[nearest]
    return int(left[np.argsort(took[left], kind="stable")[(len(left) - 1) // 2]])


def _alike(graph: ExecutionGraph, tokens: Int64, ops: Int64) -> Int64:
    """Return what an alignment compares of each operation: its name, the names around it, near and far, and its
    sizes."""
    sizes = {code: round(1e6 * _log_elements(graph, int(ops[place])))
             for code, place in zip(*np.unique(graph.ops.shapes[ops], return_index=True), strict=True)}
    return np.stack([tokens, _around(tokens, NEAR), _around(tokens, FAR),
                     np.array([sizes[code] for code in graph.ops.shapes[ops].tolist()], np.int64)])


def _around(tokens: Int64, reach: int) -> Int64:
    """Return a number for the tokens up to ``reach`` before and after each, itself included."""
    return run_hashes(np.pad(tokens, reach, constant_values=NONE), 2 * reach + 1).astype(np.int64)


def _log_elements(graph: ExecutionGraph, op: int) -> float:
    """Return the log of the elements of all tensors among an operation's arguments."""
    def count(shape: object) -> int:
        if not isinstance(shape, tuple) or not shape:
            return 0
        return math.prod(shape) if all(isinstance(size, int) for size in shape) else sum(map(count, shape))
    return math.log1p(sum(count(argument.shape) for argument in graph.arguments(op)))
