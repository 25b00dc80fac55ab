"""Planning as TorchRec's planner does it, as a baseline: its estimate of a shard, its proposals, its placement.

A shard's time is bytes over bandwidths, forward and backward, with nothing of what the rows reuse::

    moved     = B·bag·8 + B·bag·columns·element + B·columns·element      (row-wise: the first two over the ranks)
    forward   = moved · penalty(columns) / memory + B·columns·element / link
    backward  = 2 × forward's computation + 2.455 × copies + the same exchange
                (data-parallel: all-reduce of rows·columns)

Proposals take each table's best way by its largest shard, then by the sum of its shards, then one kind for all; from
each greedy one, the table with most memory goes on to its next best way. A rank gets the next largest shard where the
sum of estimates is least, and the proposal with the smallest largest sum wins.

Source: torchrec.distributed.planner (``constants``, ``shard_estimators``, ``proposers``, ``partitioners``); written
from its published formulas, with this cluster's bandwidths in place of its default A100's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.sharding.choices import Choices, Scope
from planner.sharding.greedy import least_loaded
from planner.sharding.loads import Assignment
from planner.sharding.problem import ShardingProblem
from tracer.arrays import Float64
from tracer.lookup_data.plan_file import ShardKind
from tracer.lookup_data.tables import TABLE_DTYPES

INPUT_BYTES = 8
FULL_COLUMNS, HALF_PENALTY, QUARTER_PENALTY = 128, 1.15, 1.75
LEAST_COLUMNS = 32
BACKWARD_FACTOR = 2.0
WEIGHTED_FACTOR = 1.1
COPY_FACTOR = 2.455
ELEMENTWISE_FACTOR = 9.22
HOST_FACTOR = 10.0
"""TorchRec's constants (``planner/constants.py``), which it calls empirical."""
MOST_PROPOSALS, MOST_PLACED = 200, 40_000
"""Most proposals of each greedy proposer, and shards that all proposals place; TorchRec's own goes on for as long as
there is a next way."""


def planned(problem: ShardingProblem, choices: Choices) -> Assignment | None:
    """The assignment with the best rating of all proposals; ``None`` if none can be placed."""
    perf = shard_us(problem, choices)
    best: tuple[float, Assignment] | None = None
    seen = set()
    for proposal in _proposals(problem, choices, perf):
        key = tuple(proposal)
        if key in seen:
            continue
        seen.add(key)
        placed = _partition(problem, choices, perf, proposal)
        if placed is not None and (best is None or placed[0] < best[0]):
            best = placed
    return None if best is None else best[1]


def shard_us(problem: ShardingProblem, choices: Choices) -> Float64:
    """The estimate of one unit of each choice on one rank, µs."""
    topology = problem.collectives.topology
    near, host = problem.device.memory_bandwidth_gbps * 1e3, problem.device.host_gbps * 1e3  # bytes/µs
    inside = topology.node.peer_gbps * 1e3
    across = topology.node_gbps(problem.per_node) / problem.per_node * 1e3
    link = inside if problem.nodes == 1 else across
    found = np.zeros(len(choices))
    for row, kind in enumerate(choices.kinds):
        table = problem.tables[int(choices.table[row])]
        element = TABLE_DTYPES[table.dtype]
        kept = table.cache_load_factor
        memory = {"hbm": near, "uvm": host / HOST_FACTOR,
                  "uvm_cached": (kept * near + (1 - kept) * host) / HOST_FACTOR}[choices.locations[row]]
        columns = table.columns // int(choices.parts[row])
        batch = float(problem.samples if kind is ShardKind.DATA_PARALLEL else problem.batch)
        cut = {ShardKind.ROW_WISE: problem.ranks, ShardKind.TABLE_ROW_WISE: problem.per_node}.get(kind, 1)
        inputs = table.bag * batch / cut
        out = problem.vectors(table, batch) * columns * table.output_bytes
        moved = inputs * (INPUT_BYTES * (2 if table.weighted else 1) + max(columns, LEAST_COLUMNS) * element) + out
        forward = moved * _penalty(columns) / memory
        backward = forward * BACKWARD_FACTOR + (forward * WEIGHTED_FACTOR if table.weighted else 0.0)
        if kind is ShardKind.DATA_PARALLEL:
            gradient = table.rows * table.columns * element
            exchanged = gradient / link
            backward += gradient * ELEMENTWISE_FACTOR / memory
        elif kind is ShardKind.TABLE_ROW_WISE:
            exchanged = 2 * (out / inside + out * problem.per_node / problem.ranks / across)
            backward += out * COPY_FACTOR / memory
        else:
            exchanged = 2 * out / link
            backward += out * COPY_FACTOR / memory if kind is not ShardKind.TABLE_WISE else 0.0
        found[row] = forward + backward + exchanged
    return found


def _penalty(columns: int) -> float:
    if columns >= FULL_COLUMNS:
        return 1.0
    return HALF_PENALTY if columns >= FULL_COLUMNS // 2 else QUARTER_PENALTY


def _proposals(problem: ShardingProblem, choices: Choices, perf: Float64) -> Iterator[list[int]]:
    """One choice for each table, proposal after proposal."""
    tables = range(len(problem.tables))
    width = np.select([choices.scope == Scope.ALL, choices.scope == Scope.NODE], [problem.ranks, problem.per_node],
                      choices.parts)
    for score in (perf, perf * width):
        ordered = [sorted(choices.of_table(table), key=lambda row: float(score[row])) for table in tables]
        at = [0] * len(ordered)
        for _ in range(min(MOST_PROPOSALS, max(MOST_PLACED // len(ordered) // 2, 1))):
            yield [rows[i] for rows, i in zip(ordered, at, strict=True)]
            left = [table for table in tables if at[table] + 1 < len(ordered[table])]
            if not left:
                break
            largest = max(left, key=lambda table: float(choices.memory[ordered[table][at[table]]]))
            at[largest] += 1
    for kind in ShardKind:
        rows = [[row for row in choices.of_table(table) if choices.kinds[row] is kind] for table in tables]
        if all(rows):
            yield [min(each, key=lambda row: float(perf[row])) for each in rows]


def _partition(problem: ShardingProblem, choices: Choices, perf: Float64, proposal: list[int]) -> tuple[
        float, Assignment] | None:
    """Uniform ways first, then nodes, then ranks, each the largest shard where the sum is least; with its rating."""
    ranks, per_node = problem.ranks, problem.per_node
    sums, held, room = np.zeros(ranks), np.zeros((2, ranks)), np.array(choices.room)[:, None]
    chosen: list[int] = []
    places: list[int] = []
    node_of = np.arange(ranks) // per_node
    order = sorted(proposal, key=lambda row: (-int(choices.scope[row]), -float(perf[row])))
    for row in order:
        need, us = np.array([[choices.memory[row]], [choices.host_bytes[row]]]), float(perf[row])
        if choices.scope[row] == Scope.RANK:
            free = problem.allowed(int(choices.table[row]), (held + need <= room).all(axis=0))
            ranks_of = least_loaded(int(choices.parts[row]), free, sums, us)
            if ranks_of is None:
                return None
            held[:, ranks_of] += need
            chosen += [row] * len(ranks_of)
            places += ranks_of
            continue
        here = np.ones(ranks, np.bool_)
        node = 0
        if choices.scope[row] == Scope.NODE:
            node = int(min(range(problem.nodes), key=lambda each: float(sums[node_of == each].max())))
            here = node_of == node
        sums[here] += us
        held[:, here] += need
        if (held > room).any():
            return None
        chosen.append(row)
        places.append(node)
    return float(sums.max()), Assignment(np.array(chosen, np.int64), np.array(places, np.int64))
