"""``Assignment``: which way each table lies and where, and ``RankLoads``: what that adds up to on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.sharding.choices import Choices, Scope
from planner.sharding.plan import ShardingPlan
from planner.sharding.problem import ShardingProblem
from tracer.arrays import Float64, Int64
from tracer.lookup_data.plan_file import ShardKind, TableSharding

SUMS = ("forward_stream", "forward_flight", "backward_stream", "backward_flight", "lookups", "rows", "index_bytes",
        "sent_bytes", "memory", "host_bytes")
"""Columns that add up on a rank."""
CHAINS = ("forward_wait", "backward_wait")
"""Columns of which a rank has the longest."""


@dataclass(slots=True)
class Assignment:
    """A sharding as columns over units.

    Attributes:
        choice: of each unit.
        place: its rank; its node; or 0 for what lies on all ranks.
    """

    choice: Int64
    place: Int64

    def copy(self) -> Assignment:
        """Return another of the same."""
        return Assignment(self.choice.copy(), self.place.copy())

    def without(self, choices: Choices, table: int) -> Assignment:
        """The same without a table."""
        keep = choices.table[self.choice] != table
        return Assignment(self.choice[keep], self.place[keep])

    def plus(self, choice: int, places: Sequence[int]) -> Assignment:
        """The same with the units of one choice."""
        return Assignment(np.concatenate([self.choice, np.full(len(places), choice, np.int64)]),
                          np.concatenate([self.place, np.asarray(places, np.int64)]))

    def plan(self, problem: ShardingProblem, choices: Choices) -> ShardingPlan:
        """The plan it is."""
        order = np.lexsort((self.place, choices.table[self.choice]))
        choice, place = self.choice[order], self.place[order]
        first = np.searchsorted(choices.table[choice], np.arange(len(problem.tables) + 1))
        shardings = [choices.ranks_of(int(choice[low]), place[low:high].tolist(), problem.ranks, problem.per_node)
                     for low, high in zip(first[:-1].tolist(), first[1:].tolist(), strict=True)]
        return ShardingPlan(problem.tables, tuple(shardings), problem.ranks, problem.per_node)


EMPTY = Assignment(np.zeros(0, np.int64), np.zeros(0, np.int64))


def assignment_of(plan: ShardingPlan, choices: Choices) -> Assignment:
    """The assignment of a plan whose ways are among the choices.

    Raises:
        KeyError: a table's way is not.
    """
    choice: list[int] = []
    place: list[int] = []
    for i, sharding in enumerate(plan.shardings):
        row = choice_of(choices, i, sharding)
        if choices.scope[row] == Scope.ALL:
            places = [0]
        elif choices.scope[row] == Scope.NODE:
            places = [sharding.ranks[0] // plan.per_node]
        else:
            places = list(sharding.ranks)
        choice += [row] * len(places)
        place += places
    return Assignment(np.array(choice, np.int64), np.array(place, np.int64))


def choice_of(choices: Choices, table: int, sharding: TableSharding) -> int:
    """The row of a table's way. Raises ``KeyError`` if it is not among the choices."""
    parts = len(sharding.ranks) if sharding.kind is ShardKind.COLUMN_WISE else 1
    for row in choices.of_table(table):
        same = choices.kinds[row] is sharding.kind and choices.locations[row] == sharding.location
        if same and choices.parts[row] == parts:
            return row
    raise KeyError(table)


@dataclass(slots=True)
class RankLoads:
    """The load of each rank.

    Attributes:
        sums: [``SUMS``, ranks].
        chains: [``CHAINS``, ranks].
        node_bytes, cross_bytes: of each node [nodes].
        reduced_bytes, gradient_bytes, copy_us: the same on all ranks.
    """

    sums: Float64
    chains: Float64
    node_bytes: Float64
    cross_bytes: Float64
    reduced_bytes: float
    gradient_bytes: float
    copy_us: float

    def with_rank(self, rank: int, sums: Float64, chains: Float64) -> RankLoads:
        """The same with other loads on one rank."""
        out = replace(self, sums=self.sums.copy(), chains=self.chains.copy())
        out.sums[:, rank], out.chains[:, rank] = sums, chains
        return out

    @property
    def host_bytes(self) -> Float64:
        """Bytes of tables in the host's memory [ranks]."""
        found: Float64 = self.sums[SUMS.index("host_bytes")]
        return found

    @property
    def memory(self) -> Float64:
        """Bytes of tables and their buffers on the device [ranks]."""
        found: Float64 = self.sums[SUMS.index("memory")]
        return found


class Adder:
    """Adds up assignments of one problem."""

    def __init__(self, problem: ShardingProblem, choices: Choices) -> None:
        self.choices, self.ranks, self.nodes = choices, problem.ranks, problem.nodes
        self.node_of = np.arange(problem.ranks) // problem.per_node
        self.sums = np.array([getattr(choices, name) for name in SUMS])
        self.chains = np.array([getattr(choices, name) for name in CHAINS])

    def loads(self, assignment: Assignment) -> RankLoads:
        """The loads of an assignment."""
        choices, ranks = self.choices, self.ranks
        choice, place = assignment.choice, assignment.place
        scope = choices.scope[choice]
        on_rank, on_node, on_all = (scope == each for each in (Scope.RANK, Scope.NODE, Scope.ALL))
        sums, chains = np.zeros((len(SUMS), ranks)), np.zeros((len(CHAINS), ranks))
        one, at = choice[on_rank], place[on_rank]
        for row in range(len(SUMS)):
            sums[row] = np.bincount(at, self.sums[row, one], ranks)
        for row in range(len(CHAINS)):
            np.maximum.at(chains[row], at, self.chains[row, one])
        whole = choice[on_all]
        sums += self.sums[:, whole].sum(axis=1)[:, None]
        chains = np.maximum(chains, self.chains[:, whole].max(axis=1, initial=0.0)[:, None])
        node, at = choice[on_node], place[on_node]
        for unit, where in zip(node.tolist(), at.tolist(), strict=True):
            here = self.node_of == where
            sums[:, here] += self.sums[:, unit][:, None]
            chains[:, here] = np.maximum(chains[:, here], self.chains[:, unit][:, None])
        within, across = (np.bincount(at, column[node], self.nodes).astype(np.float64)
                          for column in (choices.node_bytes, choices.cross_bytes))
        return RankLoads(sums, chains, within, across,
                     float(choices.reduced_bytes[whole].sum()), float(choices.gradient_bytes[whole].sum()),
                     float(choices.copy_us[whole].sum()))
