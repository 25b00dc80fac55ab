"""Costs of a recorded step's operations, call by call, at the level of a trace by shapes.

::

    recorded   |--- aten::linear ---|                       operations nest
                 |t| |- aten::addmm -|
    traced       t      addmm                               what the dispatcher runs below autograd

The outermost recorded operations with names that occur in the trace have one row each in the table of costs
(``prediction.operation_costs``). Here each row also has its calls and their kernels.

``match`` aligns the recorded and the traced operations in program order, over the whole step. Layers look alike, so a
local match could take a layer for the next one, for instance after a broadcast of buffers. An operation may have no
partner: it belongs to an added layer, a gradient summed elsewhere, or a later step of a recurrent layer. It then takes
the recorded operation of the same name that is nearest in size. Ties are broken by the same neighbours, then by the
median time: the first of many often took longer. An operation whose name was not recorded has no match.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.operation_costs import (
    OperationCosts,
    numbered_names,
    operation_costs,
    operations_named,
    rows_within,
    step_spans,
)
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.program import ItemKind
from kernel_models.kernel_names import uses_tf32
from tracer.alignment_loop import most_alike_pairs, run_hashes
from tracer.arrays import Bool, Float64, Int64
from tracer.columns import outermost
from tracer.graph import NONE, ExecutionGraph

SAME_SIZE = 1e-9
"""Sizes whose logs differ by no more than this are equal."""
NEAR, FAR = 1, 6
"""Number of operations on either side whose names are compared to judge how similar two places are."""


@dataclass(frozen=True, slots=True)
class RecordedOperations:
    """One rank's operations of one step, in the order they began. Times are means over the steps that were alike.

    Attributes:
        costs: the table of their costs, step by step.
        before, inside: host time before each operation and in it, without calls, ns.
        compute: the part of ``inside`` that a CPU computes.
        calls: calls of each operation.
        call_ns, kernel_ns: unblocked cost of each call, and duration of each kernel, ns.
        tf32: whether each operation's fp32 products ran as TF32.
        tail: host time after the last operation, ns.
    """

    costs: OperationCosts
    before: Float64
    inside: Float64
    compute: Float64
    calls: RecordedCalls
    call_ns: Float64
    kernel_ns: Float64
    tf32: Bool
    tail: float

    def __len__(self) -> int:
        return len(self.op)

    @property
    def graph(self) -> ExecutionGraph:
        """Return the recorded rank."""
        return self.costs.graph

    @property
    def op(self) -> Int64:
        """Return the row of ``graph.ops`` of each operation."""
        return self.costs.op

    def host(self) -> Float64:
        """Return the host time of each operation, including its calls and the time before it, ns."""
        return self.before + self.inside + self.calls.by_operation(self.call_ns)

    def device(self) -> Float64:
        """Return the device time of each operation's own calls, ns."""
        calls = self.calls
        kernels = np.concatenate([[0.0], np.cumsum(self.kernel_ns)])[calls.kernel_ptr]
        return calls.by_operation(np.where(calls.within, np.diff(kernels), 0.0))


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """The calls of a step's operations and their kernels.

    Attributes:
        ptr, row, within: calls of each operation (rows of ``graph.launches``), and whether they lie in the operation
            itself rather than before it.
        kernel_ptr, kernel: kernels of each call (rows of ``graph.kernels``).
    """

    ptr: Int64
    row: Int64
    within: Bool
    kernel_ptr: Int64
    kernel: Int64

    def by_operation(self, values: Float64) -> Float64:
        """Return the sums of ``values`` (one for each call) by operation."""
        total = np.concatenate([[0.0], np.cumsum(values)])
        found: Float64 = total[self.ptr[1:]] - total[self.ptr[:-1]]
        return found

    def like(self, other: RecordedCalls) -> bool:
        """Return whether each operation has the same number of calls and kernels as in ``other``."""
        return np.array_equal(self.ptr, other.ptr) and np.array_equal(self.kernel_ptr, other.kernel_ptr)


def recorded_operations(scenario: Scenario, rank: int, names: Iterable[str]) -> RecordedOperations:
    """Return the operations of a recorded rank that match a trace with operations of the given names."""
    built, cycle = scenario.built, scenario.cycle
    graph, program = built.graphs[rank], built.program
    owner = operations_named(graph, names)
    costs = operation_costs(cycle, scenario.slices, rank, owner)
    spans = step_spans(cycle, rank)
    rows = [rows_within(graph, owner, *span) for span in spans]
    by_step = [_calls(built, rank, owner, one, span) for one, span in zip(rows, spans, strict=True)]
    last = by_step[-1]
    alike = [number for number, one in enumerate(rows)
             if all(np.array_equal(column[one], column[costs.op]) for column in (graph.ops.name, graph.ops.shapes))
             and by_step[number].like(last)]
    _, cost = _call_costs(built, rank)
    low = int(program.kernel_ptr[rank])
    call_ns = np.mean([cost[by_step[number].row] for number in alike], axis=0)
    kernel_ns = np.mean([program.kernel_duration[low + by_step[number].kernel] for number in alike], axis=0)
    between, inside, compute = (column[alike].mean(axis=0) for column in (
        costs.before - costs.calls_before, costs.inside - costs.calls_inside, costs.compute))
    between += np.mean([_hand_overs(built, rank, rows[number], spans[number]) for number in alike], axis=0)
    kernel_row = np.repeat(np.repeat(np.arange(len(costs)), np.diff(last.ptr)), np.diff(last.kernel_ptr))
    return RecordedOperations(
        costs, between[:-1], inside, compute, last, call_ns, kernel_ns,
        _tf32(graph, last.kernel, kernel_row, len(costs)), float(between[-1]))


def _calls(built: Built, rank: int, owner: Int64, rows: Int64, span: tuple[int, int]) -> RecordedCalls:
    """Return the calls of one step's operations; calls after the last operation count as calls at its end."""
    graph = built.graphs[rank]
    calls, kernels = graph.launches, graph.kernels
    of_op = np.full(len(graph.ops) + 1, NONE, np.int64)
    of_op[rows] = np.arange(len(rows))
    item, _ = _call_costs(built, rank)
    top = np.flatnonzero((item >= 0) & (calls.start_ns >= span[0]) & (calls.start_ns < span[1]))
    top = top[np.argsort(calls.start_ns[top], kind="stable")] if len(rows) else top[:0]
    row = of_op[np.append(owner, NONE)[calls.op[top]]]
    within = row >= 0
    following = np.searchsorted(graph.ops.start_ns[rows], calls.start_ns[top], side="left")
    row = np.where(row >= 0, row, np.minimum(following, len(rows) - 1))
    order = np.argsort(row, kind="stable")
    top, row, within = top[order], row[order], within[order]

    by_call = np.argsort(kernels.launch, kind="stable")
    launch = kernels.launch[by_call]
    outer = outermost(calls.parent)
    if len(calls):
        by_call = by_call[launch >= 0]
        by_call = by_call[np.lexsort((kernels.start_ns[by_call], outer[kernels.launch[by_call]]))]
        launch = outer[kernels.launch[by_call]]
    low, high = np.searchsorted(launch, top, side="left"), np.searchsorted(launch, top, side="right")
    kernel_ptr = np.concatenate([[0], np.cumsum(high - low)]).astype(np.int64)
    kernel = by_call[np.repeat(low - kernel_ptr[:-1], high - low) + np.arange(kernel_ptr[-1])].astype(np.int64)
    return RecordedCalls(np.searchsorted(row, np.arange(len(rows) + 1)).astype(np.int64), top, within, kernel_ptr,
                         kernel)


def _call_costs(built: Built, rank: int) -> tuple[Int64, Int64]:
    """Return the item of each call of a rank (-1: nested, or of a thread without items) and its unblocked cost, ns."""
    program, calls = built.program, built.graphs[rank].launches
    item, cost = np.full(len(calls), NONE, np.int64), np.zeros(len(calls), np.int64)
    mine = np.flatnonzero((program.thread_rank[program.item_thread()] == rank) & (program.item_kind == ItemKind.CALL))
    item[program.item_row[mine]] = mine
    cost[program.item_row[mine]] = program.item_cost[mine]
    return item, cost


def _hand_overs(built: Built, rank: int, rows: Int64, span: tuple[int, int]) -> Float64:
    """Return the time of hand-overs between threads before each of a step's operations and after the last one, ns. The
    recorded program has this time between its threads; a step traced by shapes has only one thread."""
    program = built.program
    item = np.repeat(np.arange(len(program.item_kind)), np.diff(program.after_ptr))
    start = program.recorded_item_start[item] - built.clock_ns[rank]
    mine = (program.thread_rank[program.item_thread()][item] == rank) & (start >= span[0]) & (start < span[1])
    place = np.searchsorted(built.graphs[rank].ops.start_ns[rows], start[mine], side="left")
    return np.bincount(place, weights=program.after_lag[mine], minlength=len(rows) + 1).astype(np.float64)


def _tf32(graph: ExecutionGraph, kernel: Int64, row: Int64, rows: int) -> Bool:
    names = np.unique(graph.kernels.name[kernel])
    speaking = [code for code in names.tolist() if uses_tf32(graph.string(code))]
    found = np.zeros(rows, np.bool_)
    found[row[np.isin(graph.kernels.name[kernel], speaking)]] = True
    return found


@dataclass(frozen=True, slots=True)
class OperationMatch:
    """The row of the recorded operation that matches each traced one (-1: none). ``own`` is true for a partner in the
    alignment, false for an operation of the same name from another place."""

    row: Int64
    own: Bool


def out_of_place(name: str) -> str:
    """Return an operation's name without the mark of in-place ones (``add_``): autograd may sum gradients in place."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def names_of_both(graph: ExecutionGraph) -> frozenset[str]:
    """Return the names of a trace's operations, in place and out of place, to find recorded ones by."""
    own = {out_of_place(graph.string(code)) for code in np.unique(graph.ops.name).tolist()}
    return frozenset(own | {f"{name}_" for name in own})


def match(graph: ExecutionGraph, recorded: RecordedOperations) -> OperationMatch:
    """Find the recorded operations that match those of a traced rank."""
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
    """Choose, among the operations nearest in size (with the same neighbours, if any has them), that with the median
    time; -1 for none."""
    if not len(rows):
        return NONE
    nearest = distance <= distance.min() + SAME_SIZE
    if (nearest & neighbours).any():
        nearest &= neighbours
    left = rows[nearest]
    return int(left[np.argsort(took[left], kind="stable")[(len(left) - 1) // 2]])


def _alike(graph: ExecutionGraph, tokens: Int64, ops: Int64) -> Int64:
    """Return four numbers of each operation for an alignment: its name, names near and far around it, its sizes."""
    sizes = {code: round(1e6 * _log_elements(graph, int(ops[place])))
             for code, place in zip(*np.unique(graph.ops.shapes[ops], return_index=True), strict=True)}
    return np.stack([tokens, _around(tokens, NEAR), _around(tokens, FAR),
                     np.array([sizes[code] for code in graph.ops.shapes[ops].tolist()], np.int64)])


def _around(tokens: Int64, reach: int) -> Int64:
    """Return for each token a number that identifies the tokens from ``reach`` before to ``reach`` after it."""
    return run_hashes(np.pad(tokens, reach, constant_values=NONE), 2 * reach + 1).astype(np.int64)


def _log_elements(graph: ExecutionGraph, op: int) -> float:
    """Return the log of the total number of elements of an operation's tensor arguments."""
    def count(shape: object) -> int:
        if not isinstance(shape, tuple) or not shape:
            return 0
        return math.prod(shape) if all(isinstance(size, int) for size in shape) else sum(map(count, shape))
    return math.log1p(sum(count(argument.shape) for argument in graph.arguments(op)))
