"""``Scores``: the objective of a search, for one assignment and for thousands of changes of it at once.

The objective is the step's time plus a small share of how unevenly each phase is spread. The step alone says nothing of
a move off one of two equally slow ranks, after which the next move would shorten it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.sharding.choices import Choices, Scope
from graph_predictor.sharding.loads import Adder, Assignment, Loads
from graph_predictor.sharding.problem import ShardingProblem
from graph_predictor.sharding.step import INDEX, MEMORY, SENT, Shared, StepModel
from tracer.arrays import Bool, Float64, Int64

POWER = 8
"""Of the mean over ranks that stands for unevenness: near the maximum, and still moved by the second slowest rank."""
SHARE = 0.05
"""Of unevenness in the objective."""


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
    loads: Loads
    shared: Shared
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
        self.room = problem.room_bytes

    def standing(self, assignment: Assignment) -> Standing:
        """The standing of an assignment."""
        return self.standing_of(assignment, self.adder.loads(assignment))

    def standing_of(self, assignment: Assignment, loads: Loads) -> Standing:
        """The standing of an assignment with these loads."""
        measures = np.array([*self.model.rank_us(loads.sums, loads.chains), loads.sums[INDEX], loads.sums[SENT]])
        scale = np.maximum(measures.max(axis=1), 1e-12)
        powers = ((measures / scale[:, None]) ** POWER).sum(axis=1)
        everywhere = self.model.exchanges.all_to_all
        # Indices cost what of them is not hidden; vectors go forth, their gradients back.
        slopes = np.array([1.0, 1.0, 1.0 / scale[2], 2.0 / scale[3]])
        slopes[2:] *= everywhere.us(scale[2:])
        shared = self.model.shared(loads)
        step = float(self.model.total(shared, *measures.max(axis=1)))
        score = step + SHARE * float((slopes * scale * (powers / self.problem.ranks) ** (1 / POWER)).sum())
        return Standing(assignment, loads, shared, measures, powers, scale, slopes, score, step)

    def fits(self, standing: Standing) -> bool:
        """Return whether every rank has the memory."""
        return bool((standing.loads.memory <= self.room).all())

    def changed(self, now: Standing, first: Int64, second: Int64, sums: tuple[Float64, Float64],
                chains: tuple[Float64, Float64]) -> tuple[Float64, Bool]:
        """Objectives after changes of two ranks each, and which of them fit.

        Args:
            first, second: the two ranks (the same where one alone changes), of any shape.
            sums, chains: what lies on each of the two afterwards, as ``Loads`` has it, of that shape behind.
        """
        kept = _others(now.measures, first, second)
        ends, powers = kept, now.powers.reshape(-1, *(1,) * (kept.ndim - 1))
        scale = now.scale.reshape(powers.shape)
        for rank, s, c in zip((first, second), sums, chains, strict=True):
            new = np.broadcast_arrays(*self.model.rank_us(s, c), s[INDEX], s[SENT])
            ends = np.maximum(ends, np.array(new))
            powers = powers + (np.array(new) / scale) ** POWER - (now.measures[:, rank] / scale) ** POWER
        step = self.model.total(now.shared, *ends)
        slopes = (now.slopes * now.scale).reshape(scale.shape)
        spread = (slopes * (np.maximum(powers, 0.0) / self.problem.ranks) ** (1 / POWER)).sum(axis=0)
        fits = (sums[0][MEMORY] <= self.room) & (sums[1][MEMORY] <= self.room)
        return step + SHARE * spread, fits

    def placed(self, now: Standing, choice: int, taken: Bool | None = None) -> tuple[Float64, Int64]:
        """Objectives with one more unit of a choice on each rank (infinite where it does not fit or may not lie).

        Args:
            taken: ranks where it may not lie [ranks].
        """
        ranks = np.arange(self.problem.ranks)
        sums = now.loads.sums + self.adder.sums[:, choice][:, None]
        chains = np.maximum(now.loads.chains, self.adder.chains[:, choice][:, None])
        kept = _others(now.measures, ranks, ranks)
        new = np.array([*self.model.rank_us(sums, chains), sums[INDEX], sums[SENT]])
        scale = now.scale[:, None]
        powers = now.powers[:, None] + (new / scale) ** POWER - (now.measures / scale) ** POWER
        step = self.model.total(now.shared, *np.maximum(kept, new))
        spread = ((now.slopes * now.scale)[:, None] * (np.maximum(powers, 0.0) / len(ranks)) ** (1 / POWER)).sum(axis=0)
        score = np.where(sums[MEMORY] <= self.room, step + SHARE * spread, np.inf)
        return (score if taken is None else np.where(taken, np.inf, score)), ranks

    def with_choice(self, now: Standing, choice: int) -> Standing | None:
        """The standing with all units of a choice, each where it is best; ``None`` if they fit nowhere."""
        scope, table = self.choices.scope[choice], int(self.choices.table[choice])
        if scope == Scope.RANK:
            pin = self.problem.pinned.get(self.problem.tables[table].name)
            taken = np.zeros(self.problem.ranks, np.bool_)
            if pin is not None:
                taken[:] = True
                taken[pin] = False
            for _ in range(int(self.choices.parts[choice])):
                scores, ranks = self.placed(now, choice, taken)
                best = int(scores.argmin())
                if not np.isfinite(scores[best]):
                    return None
                taken[best] = True
                now = self.standing_of(now.assignment.plus(choice, [int(ranks[best])]), self._added(now, choice, best))
            return now
        places = [0] if scope == Scope.ALL else range(self.problem.nodes)
        found = [self.standing(now.assignment.plus(choice, [place])) for place in places]
        found = [each for each in found if self.fits(each)]
        return min(found, key=lambda each: each.score, default=None)

    def _added(self, now: Standing, choice: int, rank: int) -> Loads:
        """The loads with one more unit on a rank."""
        sums, chains = now.loads.sums.copy(), now.loads.chains.copy()
        sums[:, rank] += self.adder.sums[:, choice]
        chains[:, rank] = np.maximum(chains[:, rank], self.adder.chains[:, choice])
        return Loads(sums, chains, now.loads.node_bytes, now.loads.cross_bytes, now.loads.reduced_bytes,
                     now.loads.gradient_bytes, now.loads.copy_us)


def _others(measures: Float64, first: Int64, second: Int64) -> Float64:
    """The largest of each measure over all ranks but two [4, ...]; 0 where there are no others."""
    order = np.argsort(-measures, axis=1)[:, :3]
    shape = np.broadcast_shapes(np.shape(first), np.shape(second))
    found = np.zeros((len(measures), *shape))
    for row in range(len(measures)):
        left = np.ones(shape, np.bool_)
        for rank in order[row].tolist():
            free = left & (first != rank) & (second != rank)
            found[row][free] = measures[row, rank]
            left &= ~free
    return found
