"""Baselines: the ways that tables are spread by without a model of the step, and TorchRec's planner's.

By size, by look-ups and by dimension are those that the literature compares with (DreamShard, arXiv 2210.02023): the
largest table first, to the rank whose sum is least and that has the memory. A table that fits no rank is cut into the
fewest parts that do; one that no device has room left for goes to the host's memory where tables may lie there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from planner.sharding.choices import Choices, Scope
from planner.sharding.greedy import least_loaded, unsplit
from planner.sharding.loads import Assignment
from planner.sharding.planner_model import planned
from planner.sharding.scoring import Scores
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
