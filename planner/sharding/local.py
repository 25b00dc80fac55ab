"""Local search: moves and swaps off the slowest ranks and other ways for the tables on them, until none helps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.sharding.choices import Scope
from planner.sharding.loads import CHAINS, Assignment
from planner.sharding.scoring import Scores, Standing
from tracer.arrays import Float64, Int64

LEAST_GAIN = 1e-6
"""Least share of the objective that counts as a gain."""
PARTNERS = 600
"""Units on other ranks that those of a slow rank are swapped with at a time, drawn where there are more."""
MOST_SCORED = 40_000_000
"""Moves and swaps that one search scores: some 15 seconds."""
GOOD_MOVE = 1e-3
"""A move that gains this share needs no swap to be looked at."""
RETHOUGHT = 4
"""Tables of a slow rank that other ways are tried for, the largest first."""


class LocalSearch:
    """Improves assignments of one problem.

    Args:
        scores: of the problem.
        seed: of the choice of partners where there are more than ``PARTNERS``.
    """

    def __init__(self, scores: Scores, seed: int = 0) -> None:
        self.scores = scores
        self._draw = np.random.default_rng(seed)
        self._scored = 0
        choices, problem = scores.choices, scores.problem
        pinned = np.array([table.name in problem.pinned for table in problem.tables], np.bool_)
        self._fixed = pinned[choices.table]

    def improved(self, start: Standing, most: int, tick: Callable[[Standing], None] = lambda _: None) -> Standing:
        """The end of the search from a standing, after at most so many changes.

        Args:
            tick: called with every standing on the way.
        """
        now = start
        self._scored = 0
        for _ in range(most):
            better = self._better(now)
            if better is None or self._scored > MOST_SCORED:
                break
            now = better
            tick(now)
        return now

    def _better(self, now: Standing) -> Standing | None:
        found: Standing | None = None
        for rank in slow_ranks(now):
            units = np.flatnonzero((now.assignment.place == rank) & self._movable(now.assignment))
            chains = _chains_without(self.scores, now)
            best = now.score * (1 - LEAST_GAIN)
            change: tuple[Int64, Int64] | None = None
            for look in (self._moves, self._swaps):
                scored = look(now, rank, units, chains)
                if scored is not None and scored[0] < best:
                    best, change = scored[0], scored[1]
                if best < now.score * (1 - GOOD_MOVE):
                    break
            if change is not None:
                moved = now.assignment.copy()
                moved.place[change[0]] = change[1]
                found = self.scores.standing(moved)
            else:
                found = self._otherwise(now, rank)
            if found is not None and found.score < now.score * (1 - LEAST_GAIN):
                return found
            found = None
        return None

    def _movable(self, assignment: Assignment) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            (self.scores.choices.scope[assignment.choice] == Scope.RANK) & ~self._fixed[assignment.choice])
        return found

    def _moves(self, now: Standing, rank: int, units: Int64, without: Float64) -> tuple[
            float, tuple[Int64, Int64]] | None:
        """The best move of a unit to another rank: its objective, and (units, new places)."""
        ranks = self.scores.problem.ranks
        if not len(units) or ranks < 2:
            return None
        adder, loads = self.scores.adder, now.loads
        choice = now.assignment.choice[units]
        x, c = adder.sums[:, choice], adder.chains[:, choice]
        there = np.broadcast_to(np.arange(ranks), (len(units), ranks))
        left = (loads.sums[:, rank][:, None] - x)[:, :, None], without[:, units][:, :, None]
        arrived = loads.sums[:, None, :] + x[:, :, None], np.maximum(loads.chains[:, None, :], c[:, :, None])
        scores, fits = self.scores.changed(now, rank, there, (left[0], arrived[0]), (left[1], arrived[1]))
        # Where another of the table's parts lies, or the rank itself: not there.
        tables = self.scores.choices.table[now.assignment.choice]
        for row in np.flatnonzero(self.scores.choices.parts[choice] > 1).tolist():
            fits[row, now.assignment.place[tables == tables[units[row]]]] = False
        fits[:, rank] = False
        scores = np.where(fits, scores, np.inf)
        self._scored += scores.size
        row, to = np.unravel_index(int(scores.argmin()), scores.shape)
        return float(scores[row, to]), (units[[row]], np.array([to]))

    def _swaps(self, now: Standing, rank: int, units: Int64, without: Float64) -> tuple[
            float, tuple[Int64, Int64]] | None:
        """The best swap of two units likewise; units of split tables stay."""
        choices, adder, loads = self.scores.choices, self.scores.adder, now.loads
        choice, place = now.assignment.choice, now.assignment.place
        single = choices.parts[choice] == 1
        mine = units[single[units]]
        others = np.flatnonzero(self._movable(now.assignment) & single & (place != rank))
        if not len(mine) or not len(others):
            return None
        if len(others) > PARTNERS:
            others = self._draw.choice(others, PARTNERS, replace=False)
        away = place[others]
        dx = adder.sums[:, choice[mine]][:, :, None] - adder.sums[:, choice[others]][:, None, :]
        there = np.broadcast_to(away[None, :], (len(mine), len(others)))
        sums = loads.sums[:, rank][:, None, None] - dx, loads.sums[:, away][:, None, :] + dx
        chains = (np.maximum(without[:, mine][:, :, None], adder.chains[:, choice[others]][:, None, :]),
                  np.maximum(without[:, others][:, None, :], adder.chains[:, choice[mine]][:, :, None]))
        scores, fits = self.scores.changed(now, rank, there, sums, chains)
        scores = np.where(fits, scores, np.inf)
        self._scored += scores.size
        row, other = np.unravel_index(int(scores.argmin()), scores.shape)
        return float(scores[row, other]), (np.array([mine[row], others[other]]), np.array([away[other], rank]))

    def _otherwise(self, now: Standing, rank: int) -> Standing | None:
        """The best standing with another way for a table on a slow rank, or one that lies on several."""
        choices = self.scores.choices
        choice, place = now.assignment.choice, now.assignment.place
        here = (place == rank) & (choices.scope[choice] == Scope.RANK) & ~self._fixed[choice]
        wide = choices.scope[choice] != Scope.RANK
        best: Standing | None = None
        for group in (here, wide):
            rows = np.flatnonzero(group)
            rows = rows[np.argsort(-choices.work[choice[rows]], kind="stable")][:RETHOUGHT]
            for table in dict.fromkeys(choices.table[choice[rows]].tolist()):
                options = choices.of_table(table)
                if len(options) < 2:
                    continue
                rest = self.scores.standing(now.assignment.without(choices, table))
                for option in options:
                    found = self.scores.with_choice(rest, option)
                    if found is not None and (best is None or found.score < best.score):
                        best = found
        return best


def slow_ranks(now: Standing) -> list[int]:
    """The slowest rank of each phase, that of the look-ups first."""
    both = now.measures[:2].sum(axis=0)
    return list(dict.fromkeys([int(both.argmax()), *now.measures.argmax(axis=1).tolist()]))


def _chains_without(scores: Scores, now: Standing) -> Float64:
    """The longest chain of each unit's rank without it [2, units]."""
    choices, adder, assignment = scores.choices, scores.adder, now.assignment
    on_rank = choices.scope[assignment.choice] == Scope.RANK
    elsewhere = Assignment(assignment.choice[~on_rank], assignment.place[~on_rank])
    base = adder.loads(elsewhere).chains
    found = np.zeros((len(CHAINS), len(assignment.choice)))
    rows, ranks = np.flatnonzero(on_rank), scores.problem.ranks
    for row in range(len(CHAINS)):
        own, at = adder.chains[row, assignment.choice[rows]], assignment.place[rows]
        order = np.lexsort((-own, at))
        first = np.searchsorted(at[order], np.arange(ranks))
        longest, second = np.zeros(ranks), np.zeros(ranks)
        count = np.bincount(at, minlength=ranks)
        longest[count > 0] = own[order[first[count > 0]]]
        second[count > 1] = own[order[first[count > 1] + 1]]
        top = np.zeros(len(rows), np.bool_)
        top[order[first[count > 0]]] = True
        found[row, rows] = np.maximum(np.where(top, second[at], longest[at]), base[row, at])
    return found
