"""What a recorded step's operations cost, at the level at which a step is traced by shapes.

::

    recorded   |--- aten::linear ---|                       operations nest
                 |t| |- aten::addmm -|
    traced       t      addmm                               what the dispatcher runs below autograd
    slots      [gap]t[gap][ addmm   ]                       a traced operation's own time, and the host's before it

The outermost recorded operation with a name that the trace knows is a *slot*. Host time, calls and device work inside
it are its own; what lies between two slots (Python, wrappers, autograd) belongs to the later one. So a step's host time
is the sum over its slots and what comes after the last one, waiting left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from graph_predictor.prediction.fetching import fetched_ns
from graph_predictor.prediction.overheads import computing_operations
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_pieces import fetch_ranges, fetching_operations
from graph_predictor.simulation.host_time import exclusive_time
from graph_predictor.simulation.program import ItemKind
from kernel_models.kernel_names import uses_tf32
from tracer.arrays import Float64, Int64
from tracer.graph import NONE, ExecutionGraph, OpKind
from tracer.trees import outermost

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RecordedSlots:
    """One rank's slots of one step, in the order they began, mean times of the steps that were alike.

    Attributes:
        graph: the recorded rank.
        op: row of ``graph.ops``.
        before, inside: host time before each slot and in it, without calls and waiting, ns.
        compute: of ``inside``, a CPU's own computation.
        call_ptr, call, call_ns, call_owned: calls of each slot (rows of ``graph.launches``), what they cost unblocked,
            and whether they lie in the slot itself rather than before it.
        kernel_ptr, kernel, kernel_ns: device work of each call (rows of ``graph.kernels``).
        tf32: whether fp32 products ran as TF32.
        tail: host time after the last slot, ns.
        fetch: host time of loading batches in the training process, which is in none of the others, ns.
    """

    graph: ExecutionGraph
    op: Int64
    before: Float64
    inside: Float64
    compute: Float64
    call_ptr: Int64
    call: Int64
    call_ns: Float64
    call_owned: Bools
    kernel_ptr: Int64
    kernel: Int64
    kernel_ns: Float64
    tf32: Bools
    tail: float
    fetch: float = 0.0

    def __len__(self) -> int:
        return len(self.op)

    def names(self) -> list[str]:
        """Name of each slot's operation."""
        return [self.graph.string(code) for code in self.graph.ops.name[self.op].tolist()]

    def host(self) -> Float64:
        """Host time of each slot, with that of its calls and that before it, ns."""
        calls = np.concatenate([[0.0], np.cumsum(self.call_ns)])
        return self.before + self.inside + calls[self.call_ptr[1:]] - calls[self.call_ptr[:-1]]

    def device(self) -> Float64:
        """Device time of each slot's own calls, ns."""
        owned = np.repeat(self.call_owned, np.diff(self.kernel_ptr))
        kernels = np.concatenate([[0.0], np.cumsum(self.kernel_ns * owned)])
        per_call = kernels[self.kernel_ptr]
        return per_call[self.call_ptr[1:]] - per_call[self.call_ptr[:-1]]


def slot_of_operations(graph: ExecutionGraph, names: Iterable[str]) -> Int64:
    """For every row of ``ops`` the row of the slot it lies in (itself for a slot); -1 for none."""
    ops = graph.ops
    wanted = frozenset(names)
    known = np.array([*(text in wanted for text in graph.strings), False], np.bool_)[ops.name]
    known &= (ops.kind == OpKind.OPERATION) & ~fetching_operations(graph)
    parent = ops.parent.astype(np.int64)
    # An operation that calls itself is an overload made of another one, which is what a trace shows.
    doubled = np.flatnonzero(known & (parent >= 0))
    doubled = doubled[known[parent[doubled]] & (ops.name[doubled] == ops.name[parent[doubled]])]
    known[parent[doubled]] = False
    owner = np.where(known, np.arange(len(ops)), NONE)
    # Level by level: the outermost one counts, so that what a parent belongs to goes before.
    above = parent.copy()
    while (inside := above >= 0).any():
        found = inside & known[np.maximum(above, 0)]
        owner[found] = above[found]
        above = np.where(inside, parent[np.maximum(above, 0)], NONE)
    return owner.astype(np.int64)


def slots_of(scenario: Scenario, rank: int, names: Iterable[str]) -> RecordedSlots:
    """The slots of a recorded rank for a trace that knows operations of the given names."""
    built = scenario.built
    graph = built.graphs[rank]
    owner = slot_of_operations(graph, names)
    steps = _steps(scenario, rank)
    parts = [_step(built, rank, owner, *span) for span in steps]
    last = parts[-1]
    alike = [part for part in parts if _alike(part, last)]
    return _without_fetches(_mean(alike), scenario, rank, steps[-1])


def _without_fetches(slots: RecordedSlots, scenario: Scenario, rank: int, step: tuple[int, int]) -> RecordedSlots:
    """The same with the time of loading batches taken out of what lies before the slots, and after them."""
    total = float(fetched_ns(scenario.cycle, scenario.pieces)[rank])
    ops = slots.graph.ops
    rows = fetch_ranges(slots.graph)
    rows = rows[(ops.start_ns[rows] >= step[0]) & (ops.start_ns[rows] < step[1])]
    if not total or not len(rows):
        return slots
    length = ops.duration_ns[rows].astype(np.float64)
    at = np.searchsorted(ops.start_ns[slots.op], ops.start_ns[rows], side="left")
    fetched = np.bincount(at, weights=total * length / max(float(length.sum()), 1.0), minlength=len(slots) + 1)
    around = np.append(slots.before, slots.tail)
    fetched = np.minimum(fetched, around)
    left = around - fetched
    return replace(slots, before=left[:-1], tail=float(left[-1]), fetch=float(fetched.sum()))


def slot_places(scenario: Scenario, rank: int, names: Iterable[str]) -> tuple[Int64, Int64, int]:
    """Return where a recorded rank's operations lie among the slots of their step.

    Returns:
        For every row of ``ops`` the number of the slot it lies in and that of the first slot which begins no earlier,
        -1 for none and in steps that are unlike the last one; and how many slots there are.
    """
    graph = scenario.built.graphs[rank]
    ops, owner = graph.ops, slot_of_operations(graph, names)
    inside, later = np.full(len(ops) + 1, NONE, np.int64), np.full(len(ops), NONE, np.int64)
    spans = _steps(scenario, rank)
    slots = [_slot_rows(graph, owner, *span) for span in spans]
    for (begin, end), rows in zip(spans, slots, strict=True):
        if not np.array_equal(ops.name[rows], ops.name[slots[-1]]):
            continue
        inside[rows] = np.arange(len(rows))
        mine = np.flatnonzero((ops.start_ns >= begin) & (ops.start_ns < end))
        found = np.searchsorted(ops.start_ns[rows], ops.start_ns[mine], side="left")
        later[mine] = np.where(found < len(rows), found, NONE)
    return inside[owner], later, len(slots[-1])


def _slot_rows(graph: ExecutionGraph, owner: Int64, begin: int, end: int) -> Int64:
    """The slots of one step, rows of ``ops`` in the order they began."""
    ops = graph.ops
    rows = np.flatnonzero((ops.start_ns >= begin) & (ops.start_ns < end) & (owner == np.arange(len(ops))))
    found: Int64 = rows[np.lexsort((rows, ops.start_ns[rows]))]
    return found


def _steps(scenario: Scenario, rank: int) -> list[tuple[int, int]]:
    """Begin and end of the repeated steps, ns of the rank's window."""
    program, built = scenario.built.program, scenario.built
    mine = scenario.cycle.item & (program.thread_rank[program.item_thread()] == rank)
    rows = np.unique(program.item_row[mine & (program.item_kind == ItemKind.STEP_BEGIN)])
    steps = built.graphs[rank].steps
    return [(int(steps.start_ns[row]), int(steps.start_ns[row] + steps.duration_ns[row])) for row in rows.tolist()]


def _step(built: Built, rank: int, owner: Int64, begin: int, end: int) -> RecordedSlots:
    graph, program = built.graphs[rank], built.program
    ops, calls = graph.ops, graph.launches
    rows = _slot_rows(graph, owner, begin, end)
    slot_of = np.full(len(ops) + 1, NONE, np.int64)
    slot_of[rows] = np.arange(len(rows))
    starts, ends = ops.start_ns[rows], (ops.start_ns + ops.duration_ns)[rows]
    # Until when something ran before each slot, and after the last.
    until = np.maximum.accumulate(np.concatenate([[begin], ends]))
    before = np.maximum(starts - until[:-1], 0).astype(np.float64)
    own = (ends - starts).astype(np.float64)
    tail = float(max(end - int(until[-1]), 0))

    item, cost = _call_costs(built, rank)
    top = np.flatnonzero((item >= 0) & (calls.start_ns >= begin) & (calls.start_ns < end))
    top = top[np.argsort(calls.start_ns[top], kind="stable")]
    slot = slot_of[np.append(owner, NONE)[calls.op[top]]]
    owned = slot >= 0
    following = np.searchsorted(starts, calls.start_ns[top], side="right")
    slot = np.where(owned, slot, following)
    if len(rows):
        np.subtract.at(own, slot[owned], calls.duration_ns[top[owned]])
        loose = ~owned & (slot < len(rows))
        np.subtract.at(before, slot[loose], calls.duration_ns[top[loose]])
        # What is called after the last slot is called at its end, with the host time there left where it is.
        tail -= float(calls.duration_ns[top[~owned & (slot >= len(rows))]].sum())
        slot = np.minimum(slot, len(rows) - 1)
    else:
        top, slot, owned = top[:0], slot[:0], owned[:0]
    for when, waited in _data_waits(built, rank):
        at = int(np.searchsorted(starts, when, side="left"))
        if begin <= when <= end and at < len(rows):
            before[at] -= waited
    compute = _compute(graph, owner, slot_of, len(rows))
    before, own, compute, tail = _without_profiler(
        built, rank, _Parts(starts, begin, end, owner, slot_of), np.maximum(before, 0.0), np.maximum(own, 0.0), compute,
        max(tail, 0.0))
    order = np.argsort(slot, kind="stable")
    top, slot, owned = top[order], slot[order], owned[order]

    kernels = graph.kernels
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
    kernel_ns = program.kernel_duration[int(program.kernel_ptr[rank]) + kernel].astype(np.float64)
    call_ptr = np.searchsorted(slot, np.arange(len(rows) + 1)).astype(np.int64)
    return RecordedSlots(
        graph,
        rows,
        before,
        own,
        compute,
        call_ptr,
        top,
        cost[top].astype(np.float64),
        owned,
        kernel_ptr,
        kernel,
        kernel_ns,
        _tf32(graph, kernel, np.repeat(slot, high - low), len(rows)),
        tail,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """One step's slots: when each starts, the step's begin and end, and of every row of ``ops`` its slot's row and of
    that the slot."""

    starts: Int64
    begin: int
    end: int
    owner: Int64
    slot_of: Int64


def _without_profiler(built: Built, rank: int, parts: _Parts, before: Float64, own: Float64, compute: Float64,
                      tail: float) -> tuple[Float64, Float64, Float64, float]:
    """Time before, in, computed in and after the slots, with the profiler's cost taken out where the job's is."""
    if built.without_profiler is None:
        return before, own, compute, tail
    graph, shares = built.graphs[rank], built.without_profiler.shares[rank]
    host = exclusive_time(graph).between(parts.begin, parts.end)
    ns = (host.end_ns - host.start_ns).astype(np.float64)
    slot = parts.slot_of[np.append(parts.owner, NONE)[host.op]]
    inside = slot >= 0
    computing = inside & computing_operations(graph)[host.op]
    # What runs between two slots belongs to the later one; time outside any operation has a share of its own.
    following = np.searchsorted(parts.starts, host.start_ns[~inside], side="right")
    size = len(parts.starts)
    between = _kept(np.append(before, tail), following, ns[~inside], shares[host.op[~inside]], float(shares[-1]))
    return (between[:size], _kept(own, slot[inside], ns[inside], shares[host.op[inside]]),
            _kept(compute, slot[computing], ns[computing], shares[host.op[computing]]), float(between[size]))


def _kept(total: Float64, place: Int64, ns: Float64, share: Float64, elsewhere: float | None = None) -> Float64:
    """Times that are left of some totals, whose parts (by place) keep a share each.

    Args:
        total: by place.
        place, ns, share: of each part.
        elsewhere: the share of what no part covers; by default that of the parts.
    """
    covered = np.bincount(place, weights=ns, minlength=len(total))
    left = np.bincount(place, weights=ns * share, minlength=len(total))
    mean = np.where(covered > 0, left / np.maximum(covered, 1.0), 1.0)
    if elsewhere is None:
        return total * mean
    inside = np.minimum(covered, total)
    return inside * mean + (total - inside) * elsewhere


def _call_costs(built: Built, rank: int) -> tuple[Int64, Int64]:
    """Item of every call of a rank (-1: nested, or of a thread that takes no part) and its unblocked cost, ns."""
    program, calls = built.program, built.graphs[rank].launches
    item, cost = np.full(len(calls), NONE, np.int64), np.zeros(len(calls), np.int64)
    mine = np.flatnonzero((program.thread_rank[program.item_thread()] == rank) & (program.item_kind == ItemKind.CALL))
    item[program.item_row[mine]] = mine
    cost[program.item_row[mine]] = program.item_cost[mine]
    return item, cost


def _data_waits(built: Built, rank: int) -> list[tuple[int, float]]:
    """(end, length) of the waits for a batch, ns of the rank's window."""
    program = built.recorded_program
    rows = np.flatnonzero((program.item_kind == ItemKind.DATA_READY)
                          & (program.thread_rank[program.item_thread()] == rank))
    found = []
    for row in rows.tolist():
        length = program.recorded_item_start[row] - program.recorded_item_end[row - 1] - program.item_work[row]
        found.append((int(program.recorded_item_end[row]) - built.clock_ns[rank], max(float(length), 0.0)))
    return found


def _compute(graph: ExecutionGraph, owner: Int64, slot_of: Int64, slots: int) -> Float64:
    """A CPU's own computation in each slot; none where a device computes."""
    if not graph.computes_on_host:
        return np.zeros(slots, np.float64)
    own = exclusive_time(graph)
    slot = slot_of[owner[own.op]]
    mine = (slot >= 0) & computing_operations(graph)[own.op]
    return np.bincount(slot[mine], weights=(own.end_ns - own.start_ns)[mine], minlength=slots).astype(np.float64)


def _tf32(graph: ExecutionGraph, kernel: Int64, slot: Int64, slots: int) -> Bools:
    names = np.unique(graph.kernels.name[kernel])
    speaking = [code for code in names.tolist() if uses_tf32(graph.string(code))]
    found = np.zeros(slots, np.bool_)
    found[slot[np.isin(graph.kernels.name[kernel], speaking)]] = True
    return found


def _alike(one: RecordedSlots, other: RecordedSlots) -> bool:
    """Return whether two steps ran the same operations with as many calls and kernels each."""
    return (np.array_equal(one.graph.ops.name[one.op], other.graph.ops.name[other.op])
            and np.array_equal(one.graph.ops.shapes[one.op], other.graph.ops.shapes[other.op])
            and np.array_equal(one.call_ptr, other.call_ptr) and np.array_equal(one.kernel_ptr, other.kernel_ptr))


def _mean(steps: list[RecordedSlots]) -> RecordedSlots:
    """The last step with the mean times of all."""
    last = steps[-1]
    columns = {name: np.mean([getattr(step, name) for step in steps], axis=0)
               for name in ("before", "inside", "compute", "call_ns", "kernel_ns")}
    # What computes can be no longer than the slot (another thread's share of one operation).
    columns["compute"] = np.minimum(columns["compute"], columns["inside"])
    return RecordedSlots(last.graph, last.op, columns["before"], columns["inside"], columns["compute"], last.call_ptr,
                         last.call, columns["call_ns"], last.call_owned, last.kernel_ptr, last.kernel,
                         columns["kernel_ns"], last.tf32, float(np.mean([step.tail for step in steps])))
