"""Branch and bound over every sharding of a small problem: the fastest, proven."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, count

import numpy as np

from planner.sharding.choices import Choices, Scope
from planner.sharding.loads import EMPTY, SUMS, Assignment, RankLoads
from planner.sharding.scoring import Scores
from planner.sharding.step import INDEX, SENT
from tracer.arrays import Float64

MOST_TABLES, MOST_RANKS = 10, 4
"""Problems that are tried; larger ones have too many shardings. Of these ``choices`` leaves no way of a table out."""
MOST_NODES = 30_000
"""Partial shardings that are looked at before it is given up."""


@dataclass(slots=True)
class Proven:
    """The end of a branch and bound.

    Attributes:
        best: the fastest shardings with their steps in µs, the fastest first.
        complete: whether no other sharding is faster.
    """

    best: list[tuple[float, Assignment]] = field(default_factory=list)
    complete: bool = True


def small(scores: Scores) -> bool:
    """Return whether a problem is small enough to be tried."""
    return len(scores.problem.tables) <= MOST_TABLES and scores.problem.ranks <= MOST_RANKS


def fastest(scores: Scores, known_us: float, top: int = 1, most_nodes: int = MOST_NODES) -> Proven:
    """The fastest shardings, each different from the others also when equal ranks change places.

    Args:
        known_us: steps that ``top`` different shardings are known to reach: partial ones that take longer are left.
        top: how many.
    """
    choices, problem = scores.choices, scores.problem
    pinned = [table.name in problem.pinned for table in problem.tables]
    first = [int(row) for row in choices.first[:-1]]
    # Tables with a rank of their own come first: ranks that look alike afterwards are alike.
    order = sorted(range(len(pinned)), key=lambda table: (not pinned[table], -choices.work[first[table]]))
    rest = _remaining(choices, order, problem.ranks, problem.per_node)
    found: list[tuple[float, int, Assignment]] = []
    serial = count()
    limit = known_us * (1 + 1e-9)
    nodes = 0
    stack: list[tuple[int, Assignment]] = [(0, EMPTY)]
    while stack:
        depth, assignment = stack.pop()
        if depth == len(order):
            step = scores.model.step_us(scores.adder.loads(assignment))
            heapq.heappush(found, (-step, next(serial), assignment))
            if len(found) > top:
                heapq.heappop(found)
            if len(found) == top:
                limit = min(limit, -found[0][0])
            continue
        nodes += 1
        if nodes > most_nodes:
            break
        children = []
        loads = scores.adder.loads(assignment)
        for choice in choices.of_table(order[depth]):
            for places in _places(scores, choice, loads):
                child = assignment.plus(choice, places)
                own = scores.adder.loads(child)
                if not scores.within(own.sums).all():
                    continue
                bound = _bound(scores, own, rest[depth + 1])
                if bound < limit:
                    children.append((bound, next(serial), child))
        # The most promising is looked at first.
        stack += [(depth + 1, child) for _, _, child in sorted(children, reverse=True)]
    best = [(-step, assignment) for step, _, assignment in sorted(found, key=lambda each: (-each[0], each[1]))]
    return Proven(best, nodes <= most_nodes)


def _places(scores: Scores, choice: int, loads: RankLoads) -> Iterator[list[int]]:
    """Every set of places of a choice that differs from the others; ranks with equal loads on one node are equal."""
    problem, scope = scores.problem, scores.choices.scope[choice]
    pin = problem.pinned.get(problem.tables[int(scores.choices.table[choice])].name)
    if scope == Scope.ALL:
        yield [0]
    elif scope == Scope.NODE:
        yield from ([node] for node in range(problem.nodes))
    elif pin is not None:
        yield [pin]
    else:
        seen = set()
        alike = np.concatenate([loads.sums, loads.chains, scores.adder.node_of[None, :].astype(np.float64)
                                if problem.nodes > 1 else np.zeros((1, problem.ranks))])
        for places in combinations(range(problem.ranks), int(scores.choices.parts[choice])):
            key = tuple(sorted(alike[:, place].tobytes() for place in places))
            if key not in seen:
                seen.add(key)
                yield list(places)


def _remaining(choices: Choices, order: list[int], ranks: int, per_node: int) -> list[Float64]:
    """The least that tables from each depth on add to all ranks together [depth][SUMS]."""
    width = np.select([choices.scope == Scope.ALL, choices.scope == Scope.NODE], [ranks, per_node], choices.parts)
    least = np.array([[float((getattr(choices, name)[rows] * width[rows]).min()) for name in SUMS]
                      for rows in (list(choices.of_table(table)) for table in order)])
    return [least[depth:].sum(axis=0) for depth in range(len(order) + 1)]


def _bound(scores: Scores, loads: RankLoads, rest: Float64) -> float:
    """A time that no completion of a partial sharding is below: its own slowest ranks, and the mean with the rest."""
    ranks = scores.problem.ranks
    mean = (loads.sums.sum(axis=1) + rest) / ranks
    own = scores.model.rank_us(loads.sums, loads.chains)
    mean_us = scores.model.rank_us(mean[:, None], loads.chains.min(axis=1)[:, None])
    ends = [max(float(each.max()), float(even[0])) for each, even in zip(own, mean_us, strict=True)]
    ends += [max(float(loads.sums[row].max()), float(mean[row])) for row in (INDEX, SENT)]
    return float(scores.model.total(scores.model.shared(loads), *ends))
