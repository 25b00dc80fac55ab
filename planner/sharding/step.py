"""``Assignment``: which way each table lies and where, and ``RankLoads``: what that adds up to on each rank.

Times of a sharded step's collectives: all have one price (``kernel_models.collectives.price_calls``), here as curves
over their size, so that a search asks for millions of them.

``StepModel``: the time of one step from what lies on each rank.

A collective ends when its slowest rank has come, so that each phase takes what its slowest rank takes::

    indices ─▶ look-ups ─▶ vectors ─▶ interaction, top MLP ─▶ gradients ─▶ look-ups' backward, fused optimizer
     (1)        max rank    (2)        (rest of the dense part)  (2)          max rank │ dense all-reduce beside it (3)

(1) Copies of the batch to the device; all-to-all of lengths, then of indices. With a pipeline they are the next batch's
    and the dense part hides them.
(2) All-to-all of pooled vectors; reduce-scatter (backward: all-gather) of row-wise tables; for table-row-wise ones the
    same within a node and an all-to-all across nodes. The bottom MLP runs meanwhile.
(3) What the look-ups' backward hides is free, as DDP does it; gradients of data-parallel tables are ready only after
    it, and their optimizer's pass follows.

Source: Naumov et al., 2019 (arXiv 1906.00091), section on parallelism; TorchRec's ``TrainPipelineSparseDist``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kernel_models.collectives import CollectiveCall, CollectiveKind, Placement, price_calls
from kernel_models.collectives.call import Level
from kernel_models.lookups import batched_backward_us, batched_forward_us
from kernel_models.op_call import Source
from planner.sharding.choices import Choices, Scope
from planner.sharding.problem import ShardingPlan, ShardingProblem
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


_FROM, _TO, _PER_OCTAVE = 6, 42, 4
"""Sizes of the curves: 64 B to 4 TB, four an octave."""


@dataclass(frozen=True, slots=True)
class PricedExchange:
    """One collective: its time and 80% interval, µs, where that comes from, and what it is, unless it is nothing."""

    us: float = 0.0
    low: float = 0.0
    high: float = 0.0
    source: Source = Source.HEURISTIC
    call: CollectiveCall | None = None


class ExchangeCurve:
    """Time of one kind of collective of one group over its payload.

    The payload of an uneven all-to-all is that of the busiest rank (``collectives.uneven_all_to_all``): where rank r
    sends S_r split evenly over all, every rank receives the mean of S, so that max S is it.
    """

    def __init__(self, problem: ShardingProblem, kind: CollectiveKind, placement: Placement) -> None:
        self._problem, self._kind, self._placement = problem, kind, placement
        self._sizes = 2.0 ** np.arange(_FROM, _TO, 1 / _PER_OCTAVE)
        self._us = np.maximum.accumulate(self._price(self._sizes.tolist())[0])

    def us(self, payload_bytes: npt.ArrayLike) -> Float64:
        """Times, µs; nothing for no bytes."""
        size = np.asarray(payload_bytes, np.float64)
        return np.where(size > 0, np.interp(size, self._sizes, self._us), 0.0)

    def priced(self, payload_bytes: float) -> PricedExchange:
        """The price itself."""
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
    """The collectives of a problem's steps."""

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
"""Payload by which the latency of the all-to-all of lengths is priced; their bytes go with the indices'."""


Values = float | Float64
"""Times of one step, or of many."""


@dataclass(frozen=True, slots=True)
class CommonTimes:
    """Parts of a step that do not depend on single ranks, µs."""

    vectors: float
    gradients: float
    reduced: float
    copied: float


class StepModel:
    """Prices steps of one problem."""

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
        """Times that the vectors' bytes come back, as gradients."""
        self._lengths = float(self.exchanges.all_to_all.us(LENGTHS_BYTES))

    def shared(self, loads: RankLoads) -> CommonTimes:
        """Return what is the same whatever lies on single ranks."""
        e = self.exchanges
        node, cross = loads.node_bytes.max(initial=0.0), loads.cross_bytes.max(initial=0.0)
        across = float(e.across_nodes.us(cross))
        return CommonTimes(
            float(e.reduce_scatter.us(loads.reduced_bytes) + e.node_reduce_scatter.us(node)) + across,
            self.returned * (float(e.all_gather.us(loads.reduced_bytes) + e.node_all_gather.us(node)) + across),
            float(e.all_reduce.us(loads.gradient_bytes)), loads.copy_us)

    def total(self, shared: CommonTimes, forward: Values, backward: Values, index: Values, sent: Values) -> Float64:
        """Steps, µs, from the slowest rank of each phase: look-ups in µs, exchanges in bytes; any shape."""
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
        """One step, µs."""
        forward, backward = self.rank_us(loads.sums, loads.chains)
        return float(self.total(self.shared(loads), forward.max(), backward.max(), loads.sums[INDEX].max(),
                                loads.sums[SENT].max()))

    def rank_us(self, sums: Float64, chains: Float64) -> tuple[Float64, Float64]:
        """Look-ups, forward and backward, µs, from sums [``SUMS``, …] and chains [``CHAINS``, …] of ranks."""
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
