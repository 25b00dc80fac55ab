"""The time of one training step with a given sharding, and local search for a better sharding.

``Assignment`` is which choice each table takes and on which ranks it lies; ``RankLoads`` is the resulting load of each
rank. Times of collectives come from ``kernel_models.collectives.price_calls``, sampled as curves over their size,
because a search asks for millions of them. ``StepModel`` gives the step's time from the loads.

A collective ends after its slowest rank has arrived, so each phase lasts as long as on its slowest rank::

    indices ─▶ look-ups ─▶ vectors ─▶ interaction, top MLP ─▶ gradients ─▶ look-ups' backward, fused optimizer
     (1)        max rank    (2)        (rest of the dense part)  (2)          max rank │ dense all-reduce during it (3)

(1) Copies of the batch to the device; all-to-all of lengths, then of indices. With a pipeline they belong to the next
    batch and overlap the dense part.
(2) All-to-all of pooled vectors; reduce-scatter (backward: all-gather) of row-wise tables; for table-row-wise tables
    both within a node, then an all-to-all across nodes. The bottom MLP overlaps them.
(3) The all-reduce costs nothing while the look-ups' backward hides it, as in DDP. Gradients of data-parallel tables are
    ready only after that backward; their optimizer's pass follows.

Source: Naumov et al., 2019 (arXiv 1906.00091), section on parallelism; TorchRec's ``TrainPipelineSparseDist``.

``Scores`` computes the objective of the search, for one assignment or for thousands of changes of it at once. The
objective is the step's time plus a small share of how unevenly each phase is spread over ranks. The step's time alone
does not reward relieving one of two equally slow ranks, although the next move would then shorten the step.

``LocalSearch`` tries moves and swaps of units off the slowest ranks, and other choices for the tables on those ranks,
until no change helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kernel_models.collectives import CollectiveCall, CollectiveKind, Placement, price_calls
from kernel_models.collectives.call import Level
from kernel_models.lookups import batched_backward_us, batched_forward_us
from kernel_models.op_call import Source
from planner.sharding.choices import Choices, Scope
from planner.sharding.problem import ShardingPlan, ShardingProblem
from tracer.arrays import Bool, Float64, Int64
from tracer.lookup_data.plan_file import ShardKind

SUMS = ("forward_stream", "forward_flight", "backward_stream", "backward_flight", "lookups", "rows", "index_bytes",
        "sent_bytes", "memory", "host_bytes")
"""Columns of ``Choices`` that are summed over the units of a rank."""
CHAINS = ("forward_wait", "backward_wait")
"""Columns of ``Choices``: a rank takes the maximum over its units."""


@dataclass(slots=True)
class Assignment:
    """A sharding as columns over units (``Choices``).

    Attributes:
        choice: the choice that each unit belongs to.
        place: where each unit lies: its rank, or its node, or 0 for a unit on all ranks.
    """

    choice: Int64
    place: Int64

    def copy(self) -> Assignment:
        """Return a copy."""
        return Assignment(self.choice.copy(), self.place.copy())

    def without(self, choices: Choices, table: int) -> Assignment:
        """Return this assignment without the units of a table."""
        keep = choices.table[self.choice] != table
        return Assignment(self.choice[keep], self.place[keep])

    def plus(self, choice: int, places: Sequence[int]) -> Assignment:
        """Return this assignment with units of one choice added at these places."""
        return Assignment(np.concatenate([self.choice, np.full(len(places), choice, np.int64)]),
                          np.concatenate([self.place, np.asarray(places, np.int64)]))

    def plan(self, problem: ShardingProblem, choices: Choices) -> ShardingPlan:
        """Return the sharding plan that this assignment describes."""
        order = np.lexsort((self.place, choices.table[self.choice]))
        choice, place = self.choice[order], self.place[order]
        first = np.searchsorted(choices.table[choice], np.arange(len(problem.tables) + 1))
        shardings = [choices.ranks_of(int(choice[low]), place[low:high].tolist(), problem.ranks, problem.per_node)
                     for low, high in zip(first[:-1].tolist(), first[1:].tolist(), strict=True)]
        return ShardingPlan(problem.tables, tuple(shardings), problem.ranks, problem.per_node)


EMPTY = Assignment(np.zeros(0, np.int64), np.zeros(0, np.int64))


def assignment_of(plan: ShardingPlan, choices: Choices) -> Assignment:
    """Return the assignment of a plan.

    Raises:
        KeyError: a table's sharding is not among the choices.
    """
    choice: list[int] = []
    place: list[int] = []
    for i, sharding in enumerate(plan.shardings):
        parts = len(sharding.ranks) if sharding.kind is ShardKind.COLUMN_WISE else 1
        row = next((row for row in choices.of_table(i) if (
            choices.kinds[row], choices.locations[row], choices.parts[row]) == (
                sharding.kind, sharding.location, parts)), None)
        if row is None:
            raise KeyError(i)
        if choices.scope[row] == Scope.ALL:
            places = [0]
        elif choices.scope[row] == Scope.NODE:
            places = [sharding.ranks[0] // plan.per_node]
        else:
            places = list(sharding.ranks)
        choice += [row] * len(places)
        place += places
    return Assignment(np.array(choice, np.int64), np.array(place, np.int64))


@dataclass(slots=True)
class RankLoads:
    """The load of each rank.

    Attributes:
        sums: ``SUMS`` of each rank [len(SUMS), ranks].
        chains: ``CHAINS`` of each rank [len(CHAINS), ranks].
        node_bytes, cross_bytes: ``Choices``' columns summed for each node [nodes].
        reduced_bytes, gradient_bytes, copy_us: ``Choices``' columns summed; equal on all ranks.
    """

    sums: Float64
    chains: Float64
    node_bytes: Float64
    cross_bytes: Float64
    reduced_bytes: float
    gradient_bytes: float
    copy_us: float

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
    """Computes the loads of ranks from assignments, for one problem."""

    def __init__(self, problem: ShardingProblem, choices: Choices) -> None:
        self.choices, self.ranks, self.nodes = choices, problem.ranks, problem.nodes
        self.node_of = np.arange(problem.ranks) // problem.per_node
        self.sums = np.array([getattr(choices, name) for name in SUMS])
        self.chains = np.array([getattr(choices, name) for name in CHAINS])

    def ranks_of(self, choice: int, place: int) -> Int64:
        """Return the ranks on which a unit lies."""
        scope = self.choices.scope[choice]
        if scope == Scope.RANK:
            return np.array([place])
        return np.arange(self.ranks) if scope == Scope.ALL else np.flatnonzero(self.node_of == place)

    def loads(self, assignment: Assignment) -> RankLoads:
        """Return the loads of all ranks for an assignment."""
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


_FROM, _TO, _PER_OCTAVE = 6, 42, 4
"""Sizes at which the curves are sampled: from 2^6 = 64 B up to 2^42 B = 4 TB, four samples an octave."""


@dataclass(frozen=True, slots=True)
class PricedExchange:
    """A collective with its time and 80% interval, µs, and the source of the time. Without bytes ``call`` is None."""

    us: float = 0.0
    low: float = 0.0
    high: float = 0.0
    source: Source = Source.HEURISTIC
    call: CollectiveCall | None = None


class ExchangeCurve:
    """Time of one kind of collective in one group, as a curve over its payload.

    The payload of an uneven all-to-all is that of the busiest rank (``collectives.uneven_all_to_all``). If rank r sends
    S_r bytes, split evenly over all ranks, every rank receives the mean of S; the payload is therefore max S.
    """

    def __init__(self, problem: ShardingProblem, kind: CollectiveKind, placement: Placement) -> None:
        self._problem, self._kind, self._placement = problem, kind, placement
        self._sizes = 2.0 ** np.arange(_FROM, _TO, 1 / _PER_OCTAVE)
        self._us = np.maximum.accumulate(self._price(self._sizes.tolist())[0])

    def us(self, payload_bytes: npt.ArrayLike) -> Float64:
        """Return the interpolated times, µs; 0 for 0 bytes."""
        size = np.asarray(payload_bytes, np.float64)
        return np.where(size > 0, np.interp(size, self._sizes, self._us), 0.0)

    def priced(self, payload_bytes: float) -> PricedExchange:
        """Return the exact price of one payload, with its interval and source."""
        if payload_bytes <= 0:
            return PricedExchange()
        us, low, high, level = self._price([payload_bytes])
        source = Level(int(level[0])).source if self._problem.anchors.exchanges is None else Source.ANCHORED
        return PricedExchange(float(us[0]), float(low[0]), float(high[0]), source,
                              CollectiveCall(self._kind, payload_bytes, self._placement))

    def _price(self, sizes: Sequence[float]) -> tuple[Float64, Float64, Float64, npt.NDArray[np.int64]]:
        calls = [CollectiveCall(self._kind, size, self._placement) for size in sizes]
        found = price_calls(calls, self._problem.collectives)
        factor = self._problem.anchors.factor(self._problem.anchors.exchanges)
        return factor * found.time_us, factor * found.low_us, factor * found.high_us, found.level


class Exchanges:
    """The curves of all collectives in a problem's steps."""

    def __init__(self, problem: ShardingProblem) -> None:
        everywhere, node = problem.everywhere, Placement((problem.per_node,))
        across = Placement((1,) * problem.nodes)
        kinds = CollectiveKind

        def curve(kind: CollectiveKind, placement: Placement) -> ExchangeCurve:
            return ExchangeCurve(problem, kind, placement)

        self.all_to_all = curve(kinds.ALL_TO_ALL, everywhere)
        self.reduce_scatter = curve(kinds.REDUCE_SCATTER, everywhere)
        self.all_gather = curve(kinds.ALL_GATHER, everywhere)
        self.all_reduce = curve(kinds.ALL_REDUCE, everywhere)
        self.node_reduce_scatter = curve(kinds.REDUCE_SCATTER, node)
        self.node_all_gather = curve(kinds.ALL_GATHER, node)
        self.across_nodes = curve(kinds.ALL_TO_ALL, across)


INDEX, SENT, MEMORY, HOST = (SUMS.index(name) for name in ("index_bytes", "sent_bytes", "memory", "host_bytes"))
LENGTHS_BYTES = 64.0
"""Payload at which the latency of the lengths' all-to-all is priced. The lengths' bytes are sent with the indices."""


Values = float | Float64
"""Times of one step or of many steps, µs."""


@dataclass(frozen=True, slots=True)
class CommonTimes:
    """Times that are equal on all ranks, µs: exchanges of tables split by rows, and gradients of copied tables."""

    vectors: float
    gradients: float
    reduced: float
    copied: float


class StepModel:
    """Computes the times of steps, for one problem."""

    def __init__(self, problem: ShardingProblem) -> None:
        self.problem = problem
        self.exchanges = Exchanges(problem)
        dense = problem.dense
        self.hidden_us = dense.top_forward + dense.top_backward if problem.pipelined else 0.0
        self._dense = dense.top_forward + dense.top_backward + dense.optimizer + dense.host
        anchors = problem.anchors
        self._forward, self._backward = anchors.factor(anchors.forward), anchors.factor(anchors.backward)
        self._dense_reduced = float(self.exchanges.all_reduce.us(dense.gradient_bytes))
        self.returned = float(problem.trained)
        """How often vectors' bytes are sent back as gradients: 1 with training, else 0."""
        self._lengths = float(self.exchanges.all_to_all.us(LENGTHS_BYTES))

    def shared(self, loads: RankLoads) -> CommonTimes:
        """Return the times that are equal on all ranks."""
        e = self.exchanges
        node, cross = loads.node_bytes.max(initial=0.0), loads.cross_bytes.max(initial=0.0)
        across = float(e.across_nodes.us(cross))
        return CommonTimes(
            float(e.reduce_scatter.us(loads.reduced_bytes) + e.node_reduce_scatter.us(node)) + across,
            self.returned * (float(e.all_gather.us(loads.reduced_bytes) + e.node_all_gather.us(node)) + across),
            float(e.all_reduce.us(loads.gradient_bytes)), loads.copy_us)

    def total(self, shared: CommonTimes, forward: Values, backward: Values, index: Values, sent: Values) -> Float64:
        """Return steps' times, µs, from the slowest rank's look-ups (µs) and exchanges (bytes); arrays of any shape."""
        dense, e = self.problem.dense, self.exchanges
        indices = e.all_to_all.us(index)
        indices = indices + np.where(indices > 0, self._lengths, 0.0)
        vectors = e.all_to_all.us(sent)
        found: Float64 = (
            np.maximum(indices + dense.inputs - self.hidden_us, 0.0) + forward
            + np.maximum(vectors + shared.vectors, dense.bottom_forward) + self._dense
            + np.maximum(self.returned * vectors + shared.gradients, dense.bottom_backward) + backward
            + np.maximum(self._dense_reduced - backward, 0.0) + shared.reduced + shared.copied)
        return found

    def step_us(self, loads: RankLoads) -> float:
        """Return the time of one step, µs."""
        forward, backward = self.rank_us(loads.sums, loads.chains)
        return float(self.total(self.shared(loads), forward.max(), backward.max(), loads.sums[INDEX].max(),
                                loads.sums[SENT].max()))

    def rank_us(self, sums: Float64, chains: Float64) -> tuple[Float64, Float64]:
        """Return look-ups' forward and backward times, µs, from ranks' sums [SUMS, …] and chains [CHAINS, …]."""
        spec, shape = self.problem.device, sums.shape[1:]
        if shape != chains.shape[1:]:
            shape = np.broadcast_shapes(shape, chains.shape[1:])
            sums, chains = (np.broadcast_to(each, (len(each), *shape)) for each in (sums, chains))
        if self.problem.additive:
            return self._forward * sums[0], self._backward * sums[2]
        s, c = sums.reshape(len(sums), -1), chains.reshape(len(chains), -1)
        forward = self._forward * batched_forward_us(s[0], s[1], c[0], spec)
        backward = self._backward * batched_backward_us(s[2], s[3], c[1], s[4], s[5], spec)
        return forward.reshape(shape), backward.reshape(shape)


POWER = 8
"""Power (of two) in the mean over ranks that measures unevenness. Such a mean is near the maximum but still depends on
the second slowest rank."""
SHARE = 0.05
"""Weight of unevenness in the objective."""


@dataclass(slots=True)
class Standing:
    """An assignment with its loads, its score, and the terms by which changes of it are scored.

    Attributes:
        measures: [4, ranks]: look-ups' forward and backward, µs; indices and vectors, bytes.
        powers: [4]: sum over ranks of (measure / ``scale``) to the power ``POWER``.
        scale: [4]: largest value of each measure over ranks.
        slopes: [4]: µs for one unit of each measure.
        score, step_us: the objective and the step's time, µs.
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
        """Compute the loads and the score of an assignment."""
        return self.standing_of(assignment, self.adder.loads(assignment))

    def standing_of(self, assignment: Assignment, loads: RankLoads) -> Standing:
        """Compute the score of an assignment from its loads."""
        measures = np.array([*self.model.rank_us(loads.sums, loads.chains), loads.sums[INDEX], loads.sums[SENT]])
        scale = np.maximum(measures.max(axis=1), 1e-12)
        powers = _power(measures / scale[:, None]).sum(axis=1)
        everywhere = self.model.exchanges.all_to_all
        # Vectors are sent forth, and their gradients back.
        slopes = np.array([1.0, 1.0, 1.0 / scale[2], (1.0 + self.model.returned) / scale[3]])
        slopes[2:] *= everywhere.us(scale[2:])
        shared = self.model.shared(loads)
        step = float(self.model.total(shared, *measures.max(axis=1)))
        score = step + SHARE * float((slopes * scale * self._mean(powers)).sum())
        return Standing(assignment, loads, shared, measures, powers, scale, slopes, score, step)

    def fits(self, standing: Standing) -> bool:
        """Return whether every rank's device and host have enough memory."""
        return bool(self.within(standing.loads.sums).all())

    def within(self, sums: Float64) -> Bool:
        """Return for ranks' sums [len(SUMS), …] whether the device and the host have enough memory."""
        room, host_room = self.choices.room
        found: Bool = (sums[MEMORY] <= room) & (sums[HOST] <= host_room)
        return found

    def changed(self, now: Standing, first: int, second: Int64, sums: tuple[Float64, Float64],
                chains: tuple[Float64, Float64]) -> tuple[Float64, Bool]:
        """Return the objectives after many changes that each touch two ranks, and whether each fits the memory.

        Args:
            first: the rank that every change touches.
            second: the other rank that each change touches; any shape.
            sums, chains: loads of first and of second rank after each change, as in ``RankLoads``, shaped [row, …].
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
        """Return the standing with one more unit of a choice, on its best rank; ``None`` if no rank has room.

        Args:
            taken: ranks where the unit may not lie [ranks].
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
        loads = replace(now.loads, sums=now.loads.sums.copy(), chains=now.loads.chains.copy())
        loads.sums[:, rank], loads.chains[:, rank] = sums[:, rank], chains[:, rank]
        assignment = now.assignment.plus(choice, [rank])
        if (new[:, rank] > 1.25 * now.scale).any():
            return self.standing_of(assignment, loads)
        measures = now.measures.copy()
        measures[:, rank] = new[:, rank]
        return Standing(assignment, loads, now.shared, measures, powers[:, rank], now.scale, now.slopes,
                        float(score[rank]), float(step[rank]))

    def _mean(self, powers: Float64) -> Float64:
        """Return the power mean over ranks from sums of powers."""
        found = np.maximum(powers, 0.0) / self.problem.ranks
        for _ in range(POWER.bit_length() - 1):
            found = np.sqrt(found)
        return found

    def best_choice(self, now: Standing, options: Iterable[int]) -> Standing | None:
        """Return the best standing after adding one of these choices; ``None`` if none of them fits."""
        found = (self.with_choice(now, choice) for choice in options)
        return min((each for each in found if each is not None), key=lambda each: each.score, default=None)

    def with_choice(self, now: Standing, choice: int) -> Standing | None:
        """Return the standing with all units of a choice, each at its best place; ``None`` if one does not fit."""
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
    """Return the values to the power ``POWER``, by repeated squaring."""
    found = values
    for _ in range(POWER.bit_length() - 1):
        found = found * found
    return found


def _others(measures: Float64, but: int | None = None) -> Float64:
    """Return, for each rank, each measure's maximum over the other ranks (without rank ``but``) [4, ranks]; else 0."""
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
"""Most units of other ranks that are tried as swap partners at a time; drawn at random if there are more."""
MOST_SCORED = 40_000_000
"""Moves and swaps that one search scores at most: about 15 seconds."""
GOOD_MOVE = 1e-3
"""Share of the objective. If a move gains this much, swaps are not tried."""
RETHOUGHT = 4
"""Number of a slow rank's tables, largest first, for which other choices are tried."""


class LocalSearch:
    """Improves assignments of one problem.

    Args:
        scores: computes the objective.
        seed: of the random draw of swap partners (``PARTNERS``).
    """

    def __init__(self, scores: Scores, seed: int = 0) -> None:
        self.scores = scores
        self._draw = np.random.default_rng(seed)
        self._scored = 0
        choices, problem = scores.choices, scores.problem
        pinned = np.array([table.name in problem.pinned for table in problem.tables], np.bool_)
        self._fixed = pinned[choices.table]

    def improved(self, start: Standing, most: int, tick: Callable[[Standing], None] = lambda _: None) -> Standing:
        """Return the standing that the search reaches, after at most ``most`` changes.

        Args:
            tick: called with each improved standing.
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
        # The slowest rank of each phase, the slowest in look-ups first.
        both = now.measures[:2].sum(axis=0)
        for rank in dict.fromkeys([int(both.argmax()), *now.measures.argmax(axis=1).tolist()]):
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
        """Return the best move of one unit to another rank: the objective after it, and (units, new places)."""
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
        # A part may move neither to its own rank nor to a rank with another part of its table.
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
        """Return the best swap of two units, in the form of ``_moves``. Units of split tables are not swapped."""
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
        """Return the best standing with another choice for one table on a slow rank or for one on several ranks."""
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
                found = self.scores.best_choice(rest, options)
                if found is not None and (best is None or found.score < best.score):
                    best = found
        return best


def _chains_without(scores: Scores, now: Standing) -> Float64:
    """Return ``CHAINS`` of each unit's rank if the unit were removed [len(CHAINS), units]."""
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
