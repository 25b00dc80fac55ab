"""``Scores``: the objective of a search, for one assignment and for thousands of changes of it at once.

The objective is the step's time plus a small share of how unevenly each phase is spread. The step alone says nothing of
a move off one of two equally slow ranks, after which the next move would shorten it.

Local search: moves and swaps off the slowest ranks and other ways for the tables on them, until none helps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.sharding.choices import Choices, Scope
from planner.sharding.problem import ShardingProblem
from planner.sharding.step import (
    CHAINS,
    HOST,
    INDEX,
    MEMORY,
    SENT,
    Adder,
    Assignment,
    CommonTimes,
    RankLoads,
    StepModel,
)
from tracer.arrays import Bool, Float64, Int64

POWER = 8
"""Power of the mean over ranks that stands for unevenness, a power of two: near the maximum, and still moved by the
second slowest rank."""
SHARE = 0.05
"""Weight of unevenness in the objective."""


@dataclass(slots=True)
class Standing:
    """An assignment with its loads and what changes of it are compared with.

    Attributes:
        measures: [4, ranks]: look-ups forward and backward in µs, indices and vectors in bytes.
        powers: [4], the sum over ranks of each measure's ``POWER``, scaled by ``scale``.
        scale: [4], the largest of each measure.
        slopes: [4], µs for one of a measure's units.
        score, step_us: the objective and the step, µs.
    """

    assignment: Assignment
    loads: RankLoads
    shared: CommonTimes
    measures: Float64
    powers: Float64
    scale: Float64
    slopes: Float64
    score: float
    step_us: float


class Scores:
    """Scores assignments of one problem."""

    def __init__(self, problem: ShardingProblem, choices: Choices, model: StepModel) -> None:
        self.problem, self.choices, self.model = problem, choices, model
        self.adder = Adder(problem, choices)

    def standing(self, assignment: Assignment) -> Standing:
        """The standing of an assignment."""
        return self.standing_of(assignment, self.adder.loads(assignment))

    def standing_of(self, assignment: Assignment, loads: RankLoads) -> Standing:
        """The standing of an assignment with these loads."""
        measures = np.array([*self.model.rank_us(loads.sums, loads.chains), loads.sums[INDEX], loads.sums[SENT]])
        scale = np.maximum(measures.max(axis=1), 1e-12)
        powers = _power(measures / scale[:, None]).sum(axis=1)
        everywhere = self.model.exchanges.all_to_all
        # Indices cost what of them is not hidden; vectors go forth, their gradients back.
        slopes = np.array([1.0, 1.0, 1.0 / scale[2], (1.0 + self.model.returned) / scale[3]])
        slopes[2:] *= everywhere.us(scale[2:])
        shared = self.model.shared(loads)
        step = float(self.model.total(shared, *measures.max(axis=1)))
        score = step + SHARE * float((slopes * scale * self._mean(powers)).sum())
        return Standing(assignment, loads, shared, measures, powers, scale, slopes, score, step)

    def fits(self, standing: Standing) -> bool:
        """Return whether every rank and its host have the memory."""
        return bool(self.within(standing.loads.sums).all())

    def within(self, sums: Float64) -> Bool:
        """Return which of some ranks' sums [``SUMS``, …] their devices and hosts have the memory for."""
        room, host_room = self.choices.room
        found: Bool = (sums[MEMORY] <= room) & (sums[HOST] <= host_room)
        return found

    def changed(self, now: Standing, first: int, second: Int64, sums: tuple[Float64, Float64],
                chains: tuple[Float64, Float64]) -> tuple[Float64, Bool]:
        """Objectives after changes of two ranks each, and which of them fit.

        Args:
            first: the rank that all of them change.
            second: the other rank of each, of any shape.
            sums, chains: what lies on each of the two afterwards, as ``RankLoads`` has it, of that shape behind.
        """
        ends = _others(now.measures, first)[:, second]
        shape = (4,) + (1,) * (ends.ndim - 1)
        powers, scale = now.powers.reshape(shape), now.scale.reshape(shape)
        befores = now.measures[:, first].reshape(shape), now.measures[:, second]
        for before, s, c in zip(befores, sums, chains, strict=True):
            new = np.empty((4, *np.broadcast_shapes(s.shape[1:], c.shape[1:])))
            new[0], new[1] = self.model.rank_us(s, c)
            new[2], new[3] = s[INDEX], s[SENT]
            ends = np.maximum(ends, new)
            powers = powers + _power(new / scale) - _power(before / scale)
        step = self.model.total(now.shared, *ends)
        spread = ((now.slopes * now.scale).reshape(shape) * self._mean(powers)).sum(axis=0)
        return step + SHARE * spread, self.within(sums[0]) & self.within(sums[1])

    def placed(self, now: Standing, choice: int, taken: Bool | None = None) -> Standing | None:
        """The standing with one more unit of a choice on the rank that is best; ``None`` if it fits nowhere.

        Args:
            taken: ranks where it may not lie [ranks].
        """
        sums = now.loads.sums + self.adder.sums[:, choice][:, None]
        chains = np.maximum(now.loads.chains, self.adder.chains[:, choice][:, None])
        free = self.within(sums)
        if taken is not None:
            free &= ~taken
        if not free.any():
            return None
        new = np.empty((4, len(free)))
        new[0], new[1] = self.model.rank_us(sums, chains)
        new[2], new[3] = sums[INDEX], sums[SENT]
        scale = now.scale[:, None]
        powers = now.powers[:, None] + _power(new / scale) - _power(now.measures / scale)
        step = self.model.total(now.shared, *np.maximum(_others(now.measures), new))
        spread = ((now.slopes * now.scale)[:, None] * self._mean(powers)).sum(axis=0)
        score = np.where(free, step + SHARE * spread, np.inf)
        rank = int(score.argmin())
        loads = now.loads.with_rank(rank, sums[:, rank], chains[:, rank])
        assignment = now.assignment.plus(choice, [rank])
        if (new[:, rank] > 1.25 * now.scale).any():
            return self.standing_of(assignment, loads)
        measures = now.measures.copy()
        measures[:, rank] = new[:, rank]
        return Standing(assignment, loads, now.shared, measures, powers[:, rank], now.scale, now.slopes,
                        float(score[rank]), float(step[rank]))

    def _mean(self, powers: Float64) -> Float64:
        """The mean over ranks that sums of powers stand for."""
        found = np.maximum(powers, 0.0) / self.problem.ranks
        for _ in range(POWER.bit_length() - 1):
            found = np.sqrt(found)
        return found

    def with_choice(self, now: Standing, choice: int) -> Standing | None:
        """The standing with all units of a choice, each where it is best; ``None`` if they fit nowhere."""
        scope, table = self.choices.scope[choice], int(self.choices.table[choice])
        if scope == Scope.RANK:
            taken = ~self.problem.allowed(table, np.ones(self.problem.ranks, np.bool_))
            for _ in range(int(self.choices.parts[choice])):
                found = self.placed(now, choice, taken)
                if found is None:
                    return None
                now = found
                taken[now.assignment.place[-1]] = True
            return now
        places = [0] if scope == Scope.ALL else range(self.problem.nodes)
        every = (self.standing(now.assignment.plus(choice, [place])) for place in places)
        return min((each for each in every if self.fits(each)), key=lambda each: each.score, default=None)


def _power(values: Float64) -> Float64:
    """To the ``POWER``-th, by squaring."""
    found = values
    for _ in range(POWER.bit_length() - 1):
        found = found * found
    return found


def _others(measures: Float64, but: int | None = None) -> Float64:
    """The largest of each measure over all ranks but one and each [4, ranks]; 0 where there are no others."""
    kept = measures if but is None else measures.copy()
    if but is not None:
        kept[:, but] = 0.0
    rows = np.arange(len(kept))
    top = kept.argmax(axis=1)
    found = np.repeat(kept[rows, top][:, None], kept.shape[1], axis=1)
    rest = kept.copy()
    rest[rows, top] = 0.0
    found[rows, top] = rest.max(axis=1)
    return found


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
