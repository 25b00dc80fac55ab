"""Greedy seeds: tables one after the other, the largest first, each where the objective is then least.

Baselines: the ways that tables are spread by without a model of the step, and TorchRec's planner's.

By size, by look-ups and by dimension are those that the literature compares with (DreamShard, arXiv 2210.02023): the
largest table first, to the rank whose sum is least and that has the memory. A table that fits no rank is cut into the
fewest parts that do; one that no device has room left for goes to the host's memory where tables may lie there.

Planning as TorchRec's planner does it, as a baseline: its estimate of a shard, its proposals, its placement.

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

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.sharding.choices import Choices, Scope
from planner.sharding.problem import ShardingProblem
from planner.sharding.scoring import Scores, Standing
from planner.sharding.step import EMPTY, Assignment
from tracer.arrays import Bool, Float64, Int64
from tracer.lookup_data.plan_file import ShardKind
from tracer.lookup_data.tables import TABLE_DTYPES, EmbeddingTable


def least_loaded(parts: int, free: Bool, sums: Float64, cost: float, draw: np.random.Generator | None = None,
                 ) -> list[int] | None:
    """Give the parts of a table to different ranks, each to the free one whose sum is least, or to one drawn.

    Args:
        parts: how many.
        free: ranks that may have one [ranks]; it is not changed.
        sums: of the ranks' costs [ranks]; the parts' are added.
        cost: of a part.
        draw: draws the ranks instead.

    Returns:
        The ranks; ``None`` where too few are free.
    """
    found: list[int] = []
    free = free.copy()
    for _ in range(parts):
        if not free.any():
            return None
        rank = int(draw.choice(np.flatnonzero(free)) if draw else np.where(free, sums, np.inf).argmin())
        free[rank] = False
        sums[rank] += cost
        found.append(rank)
    return found


def greedy(scores: Scores, order: Sequence[int], options: Sequence[Sequence[int]]) -> Standing | None:
    """Place tables in an order.

    Args:
        order: rows of tables.
        options: the choices of each table that are tried, all of them where it is its turn.

    Returns:
        ``None`` if a table fits nowhere.
    """
    now = scores.standing(EMPTY)
    for table in order:
        best: Standing | None = None
        for choice in options[table]:
            found = scores.with_choice(now, choice)
            if found is not None and (best is None or found.score < best.score):
                best = found
        if best is None:  # what was wanted fits nowhere: any other way that does
            for choice in scores.choices.of_table(table):
                found = scores.with_choice(now, choice)
                if found is not None and (best is None or found.score < best.score):
                    best = found
        if best is None:
            return None
        now = best
    return now


def orders(choices: Choices, alike: Int64) -> list[Int64]:
    """Orders of tables by several costs of their first way, the largest first.

    Args:
        alike: the choice that stands for each table [tables].
    """
    columns = [choices.work[alike], choices.memory[alike], choices.sent_bytes[alike], choices.index_bytes[alike]]
    mixed = sum((column / max(float(column.sum()), 1e-12) for column in columns), np.zeros(len(alike)))
    return [np.argsort(-column, kind="stable") for column in (mixed, *columns)]


def unsplit(choices: Choices) -> list[list[int]]:
    """The first way of each table that fits a rank: whole if it can, else in as few parts as it takes."""
    return [[_first_fit(choices, table)] for table in range(len(choices.first) - 1)]


def split_above(choices: Choices, ranks: int, share: float, prefer: ShardKind) -> list[list[int]]:
    """Likewise, but no unit may take more than a share of a rank's mean work, vectors or indices."""
    alike = np.array([each[0] for each in unsplit(choices)])
    means = [max(float((column[alike] * choices.parts[alike]).sum()) / ranks, 1e-12)
             for column in _columns(choices)]
    found = []
    for table in range(len(alike)):
        options = [row for row in choices.of_table(table) if choices.kinds[row] is not ShardKind.DATA_PARALLEL]
        options = [row for row in options if choices.fits[row]] or list(choices.of_table(table))
        small = [row for row in options if all(
            column[row] <= share * mean for column, mean in zip(_columns(choices), means, strict=True))]
        wanted = [row for row in small if choices.kinds[row] in (ShardKind.TABLE_WISE, prefer)]
        # The first that is small enough has the fewest parts.
        found.append([(wanted or small or [int(alike[table])])[0]])
    return found


def spilled(choices: Choices, ranks: int, per_node: int) -> list[list[int]]:
    """Those tables on the devices that gain most for their bytes, others in the hosts' memory, cached or not.

    Buffers of all tables lie on the devices in any case, and a twentieth is left free: parts do not fill them.
    """
    width = np.select([choices.scope == Scope.ALL, choices.scope == Scope.NODE], [ranks, per_node], choices.parts)
    whole = choices.memory * width
    near = [each[0] for each in unsplit(choices)]
    far = [[row for row in choices.of_table(table) if choices.locations[row] != "hbm" and choices.fits[row]]
           for table in range(len(near))]
    left = 0.95 * choices.room[0] * ranks - float((choices.buffer_bytes * width)[near].sum())
    gains = [0.0 if not each else float(min(choices.work[row] * width[row] for row in each)
                                        - choices.work[row_near] * width[row_near])
             / max(float(whole[row_near]), 1.0) for row_near, each in zip(near, far, strict=True)]
    found: list[list[int]] = [[] for _ in near]
    for table in sorted(range(len(near)), key=lambda table: (bool(far[table]), -gains[table])):
        need = float(choices.memory[near[table]] - choices.buffer_bytes[near[table]]) * float(width[near[table]])
        fits = choices.locations[near[table]] == "hbm" and need <= left
        if fits or not far[table]:
            left -= need
        found[table] = [near[table]] if fits or not far[table] else far[table]
    return found


def every_way(choices: Choices) -> list[list[int]]:
    """All ways of each table."""
    return [list(choices.of_table(table)) for table in range(len(choices.first) - 1)]


def _columns(choices: Choices) -> tuple[Float64, ...]:
    return choices.work, choices.sent_bytes, choices.index_bytes


def _first_fit(choices: Choices, table: int) -> int:
    rows = [row for row in choices.of_table(table) if choices.kinds[row] is not ShardKind.DATA_PARALLEL]
    rows = rows or list(choices.of_table(table))
    return next((row for row in rows if choices.fits[row]), rows[-1])


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


COSTS: dict[str, Callable[[EmbeddingTable], float]] = {
    "by size": lambda table: table.weight_bytes,
    "by look-ups": lambda table: table.bag * table.columns,
    "by dimension": lambda table: float(table.columns),
}
"""Cost of a table, by name of the baseline."""
RANDOM = "random"
TORCHREC = "TorchRec's planner"
NAMES = (*COSTS, RANDOM, TORCHREC)


def baselines(scores: Scores, seed: int = 0) -> Iterator[tuple[str, Assignment | None]]:
    """Every baseline by name, with its assignment; ``None`` where it finds none that fits."""
    ways = [[*each, *_in_host(scores.choices, table, each[0])] for table, each in enumerate(unsplit(scores.choices))]
    for name, cost in COSTS.items():
        yield name, _spread(scores, ways, np.array([cost(table) for table in scores.problem.tables]))
    yield RANDOM, _spread(scores, ways, None, seed)
    yield TORCHREC, planned(scores.problem, scores.choices)


def _in_host(choices: Choices, table: int, row: int) -> list[int]:
    """The same way with the weights in the host's memory: cached first."""
    same = [each for each in choices.of_table(table) if choices.kinds[each] is choices.kinds[row]
            and choices.parts[each] == choices.parts[row] and choices.locations[each] != "hbm" and each != row]
    return sorted(same, key=lambda each: choices.locations[each] != "uvm_cached")


def _spread(scores: Scores, ways: list[list[int]], costs: Float64 | None, seed: int = 0) -> Assignment | None:
    """Place each table's way: by its cost where the sum is least, or at random where there are no costs."""
    choices, problem = scores.choices, scores.problem
    draw, room = np.random.default_rng(seed), np.array(choices.room)[:, None]
    sums, held = np.zeros(problem.ranks), np.zeros((2, problem.ranks))
    node_of = scores.adder.node_of
    chosen: list[int] = []
    places: list[int] = []
    order = np.argsort(-costs, kind="stable") if costs is not None else np.arange(len(ways))
    # What lies on many ranks takes its memory first.
    for table in sorted(order.tolist(), key=lambda table: -int(choices.scope[ways[table][0]])):
        for row in ways[table]:
            cost = 0.0 if costs is None else float(costs[table]) / int(choices.parts[row])
            need = np.array([[choices.memory[row]], [choices.host_bytes[row]]])
            free = (held + need <= room).all(axis=0)
            if choices.scope[row] != Scope.RANK:
                node = int(np.bincount(node_of, held[0]).argmin()) if choices.scope[row] == Scope.NODE else 0
                here = node_of == node if choices.scope[row] == Scope.NODE else np.ones(problem.ranks, np.bool_)
                if free[here].all():
                    held[:, here] += need
                    chosen.append(row)
                    places.append(node)
                    break
                continue
            ranks = least_loaded(int(choices.parts[row]), problem.allowed(table, free), sums, cost,
                                 draw if costs is None else None)
            if ranks is not None:
                held[:, ranks] += need
                chosen += [row] * len(ranks)
                places += ranks
                break
        else:
            return None
    return Assignment(np.array(chosen, np.int64), np.array(places, np.int64))
