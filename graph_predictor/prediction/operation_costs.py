"""Costs of a recorded step's operations: the one table of times for other sizes, steps traced by shapes, other hosts.

::

    recorded   |---- aten::linear ----|             |- aten::relu -|
                |t| |-- aten::addmm --|
    rows        t        addmm                           relu           here: the operations a trace by shapes has
    host       [b]t[ b ][    addmm    ][     before     ][  relu   ]    time in each, and before it

The caller chooses the operations that have a row: all (with their self time), the outermost, or the outermost with some
names. Host time in no row counts as time before the row that begins next. Rows contain no waiting. They also leave out
loading a batch in the training process, which is predicted separately (``data_loading``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.data_loading import data_loading_ns
from graph_predictor.prediction.repeat import Cycle
from graph_predictor.simulation.host_slices import HostSlices, top_operations
from kernel_models.op_call import Family
from kernel_models.operation import family_of
from tracer.alignment_loop import align_windows
from tracer.arrays import Bool, Float64, Int64
from tracer.columns import nearest
from tracer.graph import NONE, ExecutionGraph, OpKind
from tracer.step_work import data_loading_operations

WRITTEN_OUT = frozenset({"aten::_scaled_dot_product_attention_math"})
"""Operators of a family that are computed by operations of other families."""


@dataclass(frozen=True, slots=True)
class OperationCosts:
    """The last repeated step of one rank, one row for each operation in the order they began; ns.

    Operations of the other repeated steps belong to the row at the same place. The last column of ``before`` is the
    time after the last operation.

    Attributes:
        graph: the graph of the rank.
        op: row of ``graph.ops`` of each operation.
        before: host time before each operation and outside of any row, [steps, rows + 1].
        inside: host time in each operation, [steps, rows].
        calls_before, calls_inside: the part of ``before`` and ``inside`` that calls take.
        compute: the part of ``inside`` that a CPU computes, [steps, rows].
        device: time of its kernels, [steps, rows].
        fetch: time a step in which the training process loads its batch.
        slice_row, row, within: the slices of the rank's host time that lie in the table; the row of each (the number
            of rows: after the last one); and whether it lies in that row or before it.
    """

    graph: ExecutionGraph
    op: Int64
    before: Float64
    inside: Float64
    calls_before: Float64
    calls_inside: Float64
    compute: Float64
    device: Float64
    fetch: float
    slice_row: Int64
    row: Int64
    within: Bool

    def __len__(self) -> int:
        return len(self.op)

    def by_slice(self, slices: HostSlices, inside: Float64, before: Float64, fetch: float, other: float) -> Float64:
        """Return a value for each slice of host time, [slices of all ranks]; slices that belong to no row get
        ``other``.

        Args:
            slices: the slices that the table was made from.
            inside: value of slices in each row, [rows].
            before: value of slices before each row, and after the last one, [rows + 1].
            fetch: value of slices that load batches.
            other: value of the other slices.
        """
        found: Float64 = np.where(slices.fetched, fetch, other)
        found[self.slice_row] = np.where(self.within, np.append(inside, other)[self.row], before[self.row])
        return found


def every_operation(graph: ExecutionGraph) -> Int64:
    """Return for every row of ``ops`` the row itself if it is an operation, else -1."""
    ops = graph.ops
    return np.where(_counted(graph), np.arange(len(ops)), NONE)


def outermost_operations(graph: ExecutionGraph) -> Int64:
    """Return for every row of ``ops`` the outermost operation it lies in; -1 for none."""
    top = np.zeros(len(graph.ops), np.bool_)
    top[top_operations(graph)] = True
    return nearest(graph.ops.parent, top & _counted(graph), np.arange(len(graph.ops)))


def operations_named(graph: ExecutionGraph, names: Iterable[str]) -> Int64:
    """Return for every row of ``ops`` the outermost operation with one of these names that it lies in; -1 for none."""
    ops = graph.ops
    wanted = frozenset(names)
    known = np.array([*(text in wanted for text in graph.strings), False], np.bool_)[ops.name] & _counted(graph)
    parent = ops.parent.astype(np.int64)
    # An operation that calls itself is an overload that calls another overload; a trace by shapes shows the inner one.
    doubled = np.flatnonzero(known & (parent >= 0))
    doubled = doubled[known[parent[doubled]] & (ops.name[doubled] == ops.name[parent[doubled]])]
    known[parent[doubled]] = False
    owner = np.where(known, np.arange(len(ops)), NONE)
    # Level by level up to the outermost operation: what a row's parents find later replaces what was found before.
    above = parent.copy()
    while (inside := above >= 0).any():
        found = inside & known[np.maximum(above, 0)]
        owner[found] = above[found]
        above = np.where(inside, parent[np.maximum(above, 0)], NONE)
    return owner.astype(np.int64)


def operation_costs(cycle: Cycle, slices: HostSlices, rank: int, owner: Int64) -> OperationCosts:
    """Return the table of one rank.

    Args:
        cycle: the repeated steps.
        slices: the job's host time.
        rank: position in the job.
        owner: for every row of ``ops`` the operation with a row of its own that encloses it; -1 for none.
    """
    graph, program = cycle.built.graphs[rank], cycle.built.program
    ops, steps = graph.ops, cycle.steps
    spans = step_spans(cycle, rank)
    rows = [rows_within(graph, owner, *span) for span in spans]
    reference = rows[-1]
    size = len(reference)
    places = [_partners((graph, one), (graph, reference)) for one in rows]
    of_owner = np.full(len(ops) + 1, NONE, np.int64)
    for one, place in zip(rows, places, strict=True):
        of_owner[one] = place
    of_op = np.append(of_owner[owner], NONE)
    begins = np.array([begin for begin, _ in spans], np.int64)

    slice_row = np.flatnonzero((slices.rank == rank) & cycle.working[slices.item] & ~slices.fetched)
    start, op = slices.start_ns[slice_row], slices.op[slice_row]
    step = np.clip(np.searchsorted(begins, start, side="right") - 1, 0, steps - 1)
    row = of_op[op]
    within = np.append(owner, NONE)[op] >= 0
    for number, (one, place) in enumerate(zip(rows, places, strict=True)):
        mine = ~within & (step == number)
        row[mine] = np.append(place, size)[np.searchsorted(ops.start_ns[one], start[mine], side="left")]
    kept = row >= 0
    slice_row, step, row, within = slice_row[kept], step[kept], row[kept], within[kept]

    def table(chosen: Bool | Int64, width: int) -> Float64:
        sums = np.bincount(step[chosen] * width + row[chosen], weights=slices.ns[slice_row[chosen]],
                           minlength=steps * width)
        return np.asarray(sums.reshape(steps, width), np.float64)

    compute: Float64 = np.zeros((steps, size))
    if graph.computes_on_host:
        compute = table(within & ~slices.is_cost[slice_row] & np.append(computing_operations(graph), False)[
            slices.op[slice_row]], size)
    low, high = int(program.kernel_ptr[rank]), int(program.kernel_ptr[rank + 1])
    of_kernel = of_op[graph.kernels.op]
    launched = np.append(ops.start_ns, 0)[graph.kernels.op]
    at = np.clip(np.searchsorted(begins, launched, side="right") - 1, 0, steps - 1)
    mine = (of_kernel >= 0) & cycle.kernel[low:high]
    device: Float64 = np.bincount(at[mine] * size + of_kernel[mine], weights=program.kernel_duration[low:high][mine],
                         minlength=steps * size).astype(np.float64)
    called = slices.is_cost[slice_row]
    return OperationCosts(
        graph, reference, table(~within, size + 1), table(within, size), table(~within & called, size + 1),
        table(within & called, size), compute, device.reshape(steps, size), float(data_loading_ns(cycle, slices)[rank]),
        slice_row, row, within)


def step_spans(cycle: Cycle, rank: int) -> list[tuple[int, int]]:
    """Return begin and end of a rank's repeated steps, ns of its window."""
    steps = cycle.built.graphs[rank].steps
    return [(int(steps.start_ns[row]), int(steps.start_ns[row] + steps.duration_ns[row]))
            for row in cycle.row[rank].tolist()]


def rows_within(graph: ExecutionGraph, owner: Int64, begin: int, end: int) -> Int64:
    """Return the operations with a row of their own that begin in a step, in the order they began."""
    ops = graph.ops
    rows = np.flatnonzero((ops.start_ns >= begin) & (ops.start_ns < end) & (owner == np.arange(len(ops))))
    found: Int64 = rows[np.lexsort((rows, ops.start_ns[rows]))]
    return found


def partners(mine: OperationCosts, theirs: OperationCosts) -> Int64:
    """Return the row of ``theirs`` that matches each row of ``mine`` (-1: none); aligned in program order by thread."""
    return _partners((mine.graph, mine.op), (theirs.graph, theirs.op))


def numbered_names(graph: ExecutionGraph, op: Int64, numbers: dict[str, int],
                   spelling: Callable[[str], str] = str) -> Int64:
    """Return the number of each operation's name, spelled by ``spelling``; ``numbers`` is shared by several graphs."""
    codes = graph.ops.name[op]
    known = {code: numbers.setdefault(spelling(graph.string(code)), len(numbers)) for code in np.unique(codes).tolist()}
    return np.array([known[code] for code in codes.tolist()], np.int64)


def _partners(mine: tuple[ExecutionGraph, Int64], theirs: tuple[ExecutionGraph, Int64]) -> Int64:
    numbers: dict[str, int] = {}
    (one, left), (other, right) = ((numbered_names(graph, op, numbers), _by_thread(graph, op))
                                   for graph, op in (mine, theirs))
    one, other = one[left], other[right]
    found: Int64 = np.full(len(one), NONE, np.int64)
    if np.array_equal(one, other):
        found = np.arange(len(one))
    elif len(one) and len(other):
        found = align_windows(one, other)
    partner = np.full(len(one), NONE, np.int64)
    partner[left] = np.where(found >= 0, right[found] if len(right) else NONE, NONE)
    return partner


def _by_thread(graph: ExecutionGraph, op: Int64) -> Int64:
    """Return the operations thread by thread; threads are in the order of their first operation."""
    _, first, thread = np.unique(graph.ops.thread[op], return_index=True, return_inverse=True)
    return np.lexsort((np.arange(len(op)), first[thread.reshape(-1)]))


def _counted(graph: ExecutionGraph) -> Bool:
    return (graph.ops.kind == OpKind.OPERATION) & ~data_loading_operations(graph)


def computing_operations(graph: ExecutionGraph) -> Bool:
    """Return which operations compute: the innermost ones of each family (``aten::addmm`` in ``aten::linear``).

    An operator that operations of other families compute (``WRITTEN_OUT``) does not compute itself.
    """
    ops = graph.ops
    numbers = {family: number for number, family in enumerate(Family)}
    family = np.array([*(numbers[family_of(name)] for name in graph.strings), numbers[Family.OTHER]])[ops.name]
    known = (family != numbers[Family.OTHER]) & (ops.kind == OpKind.OPERATION)
    wraps = np.zeros(len(ops), np.bool_)
    written_out = np.array([*(name in WRITTEN_OUT for name in graph.strings), False], np.bool_)[ops.name]
    inner = np.flatnonzero(known)
    above = ops.parent[inner]
    while len(inner):
        inside = above >= 0
        inner, above = inner[inside], above[inside]
        wraps[above[(family[above] == family[inner]) | written_out[above]]] = True
        above = ops.parent[above]
    return known & ~wraps
