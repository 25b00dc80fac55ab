"""The work of the repeated steps one unit after another, as edits that replace some of it by other work see it.

On a GPU a unit is a piece of device work (see ``work``); on a CPU, where operations are the kernels, an operation that
computes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from graph_predictor.prediction.overheads import computing_operations
from graph_predictor.prediction.replacement import Units
from graph_predictor.prediction.scenario import Scenario
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_of
from tracer.arrays import Bool, Float64, Int64
from tracer.columns import nearest
from tracer.graph import NONE


def units_of(scenario: Scenario) -> Units:
    """The units of a scenario's cycle, with its edits of sizes and precision."""
    return _host_units(scenario) if scenario.built.computes_on_host else _device_units(scenario)


def _device_units(scenario: Scenario) -> Units:
    work, program, cycle = scenario.work, scenario.built.program, scenario.cycle
    mine = np.flatnonzero(cycle.kernel & (work.piece >= 0))
    rank = program.kernel_rank()
    stream = np.concatenate([g.kernels.stream for g in scenario.built.graphs]).astype(np.int64)
    order = mine[np.lexsort((mine, program.recorded_kernel_start[mine], stream[mine], rank[mine]))]
    pieces, first_at, count = np.unique(work.piece[order], return_index=True, return_counts=True)
    by_time = np.argsort(first_at, kind="stable")
    pieces, first, count = pieces[by_time], order[first_at[by_time]], count[by_time]
    last = np.full(len(work.group), NONE, np.int64)
    last[work.piece[order]] = order  # the last one written stays
    # What starts a kernel beside its launch and its stream's previous one, and what waits for it.
    previous = program.kernel_previous[first]
    owner = np.repeat(np.arange(len(program.kernel_item)), np.diff(program.edge_ptr))
    other = program.edge_kernel != program.kernel_previous[owner]
    awaits = np.zeros(len(program.kernel_item), np.bool_)
    awaits[owner[other]] = True
    seen = np.zeros(len(program.kernel_item), np.bool_)
    seen[program.edge_kernel[other]] = True
    seen[program.wait_kernel] = True
    watched_piece = np.zeros(len(work.group), np.bool_)
    watched_piece[work.piece[np.flatnonzero(seen & (work.piece >= 0))]] = True
    follows = np.zeros(len(pieces), np.bool_)
    follows[1:] = (previous[1:] == last[pieces[:-1]]) & ~awaits[first[1:]]
    new = [tuple(n for call in scenario.kernels.calls.get(number, calls) for n in scenario.kernels.edited(call))
           for number, calls in enumerate(work.calls)]
    calls = [new[number] for number in work.group[pieces].tolist()]
    op = work.op[pieces]
    phase, step = (_of_ops(scenario, work.rank[pieces], op, name) for name in ("phase", "step"))
    return Units(work.rank[pieces], stream[first], pieces, op, phase, step, program.recorded_kernel_start[first], count,
                 follows, watched_piece[pieces], calls, np.ones(len(pieces), np.bool_), False)


def _host_units(scenario: Scenario) -> Units:
    pieces, parts = scenario.pieces, []
    calls: list[tuple[OpCall, ...]] = []
    for rank, graph in enumerate(scenario.built.graphs):
        rows = np.flatnonzero((pieces.rank == rank) & (pieces.op >= 0) & scenario.cycle.working[pieces.item])
        op = np.unique(pieces.op[rows])
        op = op[computing_operations(graph)[op]]
        op = op[np.lexsort((graph.ops.start_ns[op], graph.ops.thread[op]))]
        thread = graph.ops.thread[op].astype(np.int64)
        # What one operation that computes does before and after another inside it lies between that one's neighbours.
        around = _around(graph.ops.parent, op)
        follows = np.zeros(len(op), np.bool_)
        follows[1:] = (thread[1:] == thread[:-1]) & (around[1:] == around[:-1])
        parts.append((np.full(len(op), rank, np.int64), thread, op, graph.ops.start_ns[op], follows))
        known: dict[tuple[int, ...], tuple[OpCall, ...]] = {}
        table = graph.ops
        for row in op.tolist():
            key = tuple(int(c[row]) for c in (table.name, table.shapes, table.dtypes, table.strides, table.scalars))
            if key not in known:
                known[key] = tuple(new for call in calls_of(Operation.from_graph(graph, row))
                                   for new in scenario.kernels.edited(call))
            calls.append(known[key])
    rank_of, lane, op, start, follows = (np.concatenate([part[i] for part in parts]) for i in range(5))
    phase, step = (_of_ops(scenario, rank_of, op, name) for name in ("phase", "step"))
    return Units(rank_of, lane, op, op, phase, step, start, np.ones(len(op), np.int64), follows,
                 np.zeros(len(op), np.bool_), calls, np.ones(len(op), np.bool_), True)


def _around(parent: npt.NDArray[np.integer], op: Int64) -> Int64:
    """The nearest of the operations that each of them lies in; -1 for none."""
    among = np.zeros(len(parent), np.bool_)
    among[op] = True
    return nearest(parent, among, parent[op].astype(np.int64))


def _of_ops(scenario: Scenario, rank: Int64, op: Int64, column: str) -> Int64:
    """A column of ``ops`` for operations of several ranks; -1 for none."""
    found = np.full(len(op), NONE, np.int64)
    for number, graph in enumerate(scenario.built.graphs):
        mine = (rank == number) & (op >= 0)
        found[mine] = getattr(graph.ops, column)[op[mine]]
    return found


def host_weight(scenario: Scenario, chosen: list[Bool], factor: float, before: list[Bool] | None = None) -> Float64:
    """Factor on each piece of host time, where chosen operations take another time.

    Args:
        scenario: of the host time.
        chosen: operations of each rank, on whose time the factor is.
        factor: on their time and on that before them; time of loading data stays.
        before: operations before which time has the factor; by default the chosen ones.
    """
    pieces = scenario.pieces
    weight = np.ones(len(pieces))
    for rank in range(len(scenario.built.graphs)):
        rows = np.flatnonzero((pieces.rank == rank) & ~pieces.data)
        op, following = pieces.op[rows], pieces.following[rows]
        ahead = np.append(chosen[rank] if before is None else before[rank], False)
        weight[rows[np.where(op >= 0, np.append(chosen[rank], False)[op], ahead[following])]] = factor
    return weight
