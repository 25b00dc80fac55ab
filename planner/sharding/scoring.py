"""``Scores``: the objective of a search, for one assignment and for thousands of changes of it at once.

The objective is the step's time plus a small share of how unevenly each phase is spread. The step alone says nothing of
a move off one of two equally slow ranks, after which the next move would shorten it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.sharding.choices import Choices, Scope
from planner.sharding.loads import Adder, Assignment, RankLoads
from planner.sharding.problem import ShardingProblem
from planner.sharding.step import HOST, INDEX, MEMORY, SENT, CommonTimes, StepModel
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
