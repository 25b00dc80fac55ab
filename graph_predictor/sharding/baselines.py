"""Baselines: the ways that tables are spread by without a model of the step, and TorchRec's planner's.

By size, by look-ups and by dimension are those that the literature compares with (DreamShard, arXiv 2210.02023): the
largest table first, to the rank whose sum is least and that has the memory. A table that fits no rank is cut into the
fewest parts that do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from graph_predictor.sharding.choices import Scope
from graph_predictor.sharding.greedy import least_loaded, unsplit
from graph_predictor.sharding.loads import Assignment
from graph_predictor.sharding.planner_model import planned
from graph_predictor.sharding.scoring import Scores
from tracer.arrays import Float64
from tracer.lookup_data.tables import EmbeddingTable

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
    ways = [each[0] for each in unsplit(scores.choices, scores.room)]
    for name, cost in COSTS.items():
        yield name, _spread(scores, ways, np.array([cost(table) for table in scores.problem.tables]))
    yield RANDOM, _spread(scores, ways, None, seed)
    yield TORCHREC, planned(scores.problem, scores.choices)


def _spread(scores: Scores, ways: list[int], costs: Float64 | None, seed: int = 0) -> Assignment | None:
    """Place each table's way: by its cost where the sum is least, or at random where there are no costs."""
    choices, problem = scores.choices, scores.problem
    draw = np.random.default_rng(seed)
    sums, memory = np.zeros(problem.ranks), np.zeros(problem.ranks)
    node_of = scores.adder.node_of
    chosen: list[int] = []
    places: list[int] = []
    order = np.argsort(-costs, kind="stable") if costs is not None else np.arange(len(ways))
    # What lies on many ranks takes its memory first.
    for table in sorted(order.tolist(), key=lambda table: -int(choices.scope[ways[table]])):
        row = ways[table]
        cost = 0.0 if costs is None else float(costs[table]) / int(choices.parts[row])
        need = float(choices.memory[row])
        free = memory + need <= scores.room
        if choices.scope[row] != Scope.RANK:
            node = int(np.bincount(node_of, memory).argmin()) if choices.scope[row] == Scope.NODE else 0
            here = node_of == node if choices.scope[row] == Scope.NODE else np.ones(problem.ranks, np.bool_)
            if not free[here].all():
                return None
            memory[here] += need
            chosen.append(row)
            places.append(node)
            continue
        free = problem.allowed(table, free)
        ranks = least_loaded(int(choices.parts[row]), free, sums, cost, draw if costs is None else None)
        if ranks is None:
            return None
        memory[ranks] += need
        chosen += [row] * len(ranks)
        places += ranks
    return Assignment(np.array(chosen, np.int64), np.array(places, np.int64))
