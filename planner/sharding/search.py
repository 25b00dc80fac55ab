"""The search for the fastest shardings: greedy seeds, then local search from the best of them; exact for few tables.

*Greedy seeds* place one table after another, the largest first, each where the objective is then least.

*Baselines* place tables without a model of the step. The literature compares with orders by size, by look-ups and by
dimension (DreamShard, arXiv 2210.02023). The largest table goes first, to the rank with enough memory whose sum is
least. A table that fits no rank is cut into the fewest parts that do. If no device has room left, it goes to the host's
memory if allowed. The last baseline is TorchRec's planner: its estimate of a shard, its proposals, its placement.

A shard's time there is bytes over bandwidths, forward and backward, without any reuse of rows::

    ``moved``     = B·bag·8 + B·bag·columns·element + B·columns·element      (row-wise: the first two over the ranks);
    ``forward``   = moved · penalty(columns) / memory + B·columns·element / link;
    ``backward``  = 2 × forward's computation + 2.455 × copies + the same exchange
                    (data-parallel: all-reduce of rows·columns).

Proposals take each table's best way by its largest shard, then by the sum of its shards, then one kind for all tables.
After each greedy proposal, the table with most memory changes to its next best way. The largest remaining shard goes to
the rank with the least sum of estimates. The proposal whose largest sum is smallest wins.

Source: torchrec.distributed.planner (``constants``, ``shard_estimators``, ``proposers``, ``partitioners``); written
from its published formulas, with this cluster's bandwidths in place of its default A100's.

*Exact*: branch and bound over all shardings of a small problem proves which one is fastest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, count

import numpy as np

from planner.sharding.choices import Choices, Scope, choices_of
from planner.sharding.problem import ShardingProblem, own_order
from planner.sharding.step import (
    EMPTY,
    INDEX,
    SENT,
    SUMS,
    Assignment,
    LocalSearch,
    RankLoads,
    Scores,
    Standing,
    StepModel,
)
from tracer.arrays import Float64, Int64
from tracer.device_memory import binary_size
from tracer.lookup_data.plan_file import ShardingError, ShardKind
from tracer.lookup_data.tables import TABLE_DTYPES, EmbeddingTable


class _Placing:
    """Shards of tables placed on ranks one after another, for a baseline.

    Attributes:
        sums: sum of the costs on each rank [ranks].
        held: bytes taken on the devices and on their hosts [2, ranks].
    """

    def __init__(self, problem: ShardingProblem, choices: Choices) -> None:
        self._problem, self._choices = problem, choices
        self.sums, self.held = np.zeros(problem.ranks), np.zeros((2, problem.ranks))
        self.node_of = np.arange(problem.ranks) // problem.per_node
        self._chosen: list[int] = []
        self._places: list[int] = []

    def put(self, row: int, cost: float, nodes: Float64, draw: np.random.Generator | None = None) -> bool:
        """Place the units of a choice; return whether there was room.

        Args:
            row: the choice. Units that lie on single ranks take different ones, each the free rank of the least sum.
            cost: cost of a unit, added to ``sums``.
            nodes: load of each node [nodes]; a unit that lies on a node takes the least loaded.
            draw: if given, ranks are drawn at random instead.
        """
        choices, problem = self._choices, self._problem
        need = np.array([[choices.memory[row]], [choices.host_bytes[row]]])
        free = (self.held + need <= np.array(choices.room)[:, None]).all(axis=0)
        places: list[int] = []
        if choices.scope[row] == Scope.RANK:
            free = problem.allowed(int(choices.table[row]), free).copy()
            for _ in range(int(choices.parts[row])):
                if not free.any():
                    return False
                rank = int(draw.choice(np.flatnonzero(free)) if draw else np.where(free, self.sums, np.inf).argmin())
                free[rank] = False
                self.sums[rank] += cost
                places.append(rank)
            self.held[:, places] += need
        else:
            places = [int(nodes.argmin()) if choices.scope[row] == Scope.NODE else 0]
            here = self.node_of == places[0] if choices.scope[row] == Scope.NODE else np.ones(problem.ranks, np.bool_)
            if not free[here].all():
                return False
            self.sums[here] += cost
            self.held[:, here] += need
        self._chosen += [row] * len(places)
        self._places += places
        return True

    def assignment(self) -> Assignment:
        """Return the assignment made so far."""
        return Assignment(np.array(self._chosen, np.int64), np.array(self._places, np.int64))


def greedy(scores: Scores, order: Sequence[int], options: Sequence[Sequence[int]]) -> Standing | None:
    """Place tables one after another, each by the choice that is best at its turn.

    Args:
        order: tables (rows) in the order in which they are placed.
        options: the choices tried for each table.

    Returns:
        ``None`` if a table fits nowhere.
    """
    now = scores.standing(EMPTY)
    for table in order:
        # If no option fits, any other choice of the table will do.
        best = scores.best_choice(now, options[table]) or scores.best_choice(now, scores.choices.of_table(table))
        if best is None:
            return None
        now = best
    return now


def orders(choices: Choices, alike: Int64) -> list[Int64]:
    """Return orders of the tables by several costs, largest first.

    Args:
        alike: a choice of each table, whose costs are used [tables].
    """
    columns = [choices.work[alike], choices.memory[alike], choices.sent_bytes[alike], choices.index_bytes[alike]]
    mixed = sum((column / max(float(column.sum()), 1e-12) for column in columns), np.zeros(len(alike)))
    return [np.argsort(-column, kind="stable") for column in (mixed, *columns)]


def unsplit(choices: Choices) -> list[list[int]]:
    """Return each table's first way that fits a rank: whole if possible, else in the fewest parts."""
    return [[_first_fit(choices, table)] for table in range(len(choices.first) - 1)]


def split_above(choices: Choices, ranks: int, share: float, prefer: ShardKind) -> list[list[int]]:
    """Return one way for each table whose units take at most a share of a rank's mean work, vectors or indices."""
    alike = np.array([each[0] for each in unsplit(choices)])
    means = [max(float((column[alike] * choices.parts[alike]).sum()) / ranks, 1e-12)
             for column in _columns(choices)]
    found = []
    for table in range(len(alike)):
        options = [row for row in choices.of_table(table) if choices.kinds[row] is not ShardKind.DATA_PARALLEL]
        options = [row for row in options if choices.fits[row]] or list(choices.of_table(table))
        small = [row for row in options if all(
            column[row] <= share * mean for column, mean in zip(_columns(choices), means, strict=True))]
        wanted = [row for row in small if choices.kinds[row] in (ShardKind.TABLE_WISE, prefer)]
        # Ways are in order of their parts: the first small one has the fewest.
        found.append([(wanted or small or [int(alike[table])])[0]])
    return found


def spilled(choices: Choices, ranks: int, per_node: int) -> list[list[int]]:
    """Return ways with the tables that gain most per byte on the devices, and all others in the hosts' memory.

    Buffers of all tables lie on the devices in any case. 5% of the memory is left free, because tables do not fill it.
    """
    width = choices.width(ranks, per_node)
    whole = choices.memory * width
    near = [each[0] for each in unsplit(choices)]
    far = [[row for row in choices.of_table(table) if choices.locations[row] != "hbm" and choices.fits[row]]
           for table in range(len(near))]
    left = 0.95 * choices.room[0] * ranks - float((choices.buffer_bytes * width)[near].sum())
    gains = [0.0 if not each else float(min(choices.work[row] * width[row] for row in each)
                                        - choices.work[row_near] * width[row_near])
             / max(float(whole[row_near]), 1.0) for row_near, each in zip(near, far, strict=True)]
    found: list[list[int]] = [[] for _ in near]
    for table in sorted(range(len(near)), key=lambda table: (bool(far[table]), -gains[table])):
        need = float(choices.memory[near[table]] - choices.buffer_bytes[near[table]]) * float(width[near[table]])
        fits = choices.locations[near[table]] == "hbm" and need <= left
        if fits or not far[table]:
            left -= need
        found[table] = [near[table]] if fits or not far[table] else far[table]
    return found


def every_way(choices: Choices) -> list[list[int]]:
    """Return all choices of each table."""
    return [list(choices.of_table(table)) for table in range(len(choices.first) - 1)]


def _columns(choices: Choices) -> tuple[Float64, ...]:
    return choices.work, choices.sent_bytes, choices.index_bytes


def _first_fit(choices: Choices, table: int) -> int:
    rows = [row for row in choices.of_table(table) if choices.kinds[row] is not ShardKind.DATA_PARALLEL]
    rows = rows or list(choices.of_table(table))
    return next((row for row in rows if choices.fits[row]), rows[-1])


INPUT_BYTES, LEAST_COLUMNS = 8, 32
FULL_COLUMNS, HALF_PENALTY, QUARTER_PENALTY = 128, 1.15, 1.75
BACKWARD_FACTOR, WEIGHTED_FACTOR, COPY_FACTOR, ELEMENTWISE_FACTOR, HOST_FACTOR = 2.0, 1.1, 2.455, 9.22, 10.0
"""TorchRec's constants (``planner/constants.py``), which it calls empirical."""
MOST_PROPOSALS, MOST_PLACED = 200, 40_000
"""Most proposals of each greedy proposer, and most shards placed by all proposals. TorchRec itself has no limit: it
stops when no table has a next way."""


def planned(problem: ShardingProblem, choices: Choices) -> Assignment | None:
    """Return the assignment that TorchRec's planner rates best; ``None`` if it can place no proposal."""
    perf = shard_us(problem, choices)
    best: tuple[float, Assignment] | None = None
    seen = set()
    for proposal in _proposals(problem, choices, perf):
        key = tuple(proposal)
        if key in seen:
            continue
        seen.add(key)
        placed = _partition(problem, choices, perf, proposal)
        if placed is not None and (best is None or placed[0] < best[0]):
            best = placed
    return None if best is None else best[1]


def shard_us(problem: ShardingProblem, choices: Choices) -> Float64:
    """Return TorchRec's estimate of one unit of each choice on one rank, µs."""
    topology = problem.collectives.topology
    near, host = problem.device.memory_bandwidth_gbps * 1e3, problem.device.host_gbps * 1e3  # bytes/µs
    inside = topology.node.peer_gbps * 1e3
    across = topology.node_gbps(problem.per_node) / problem.per_node * 1e3
    link = inside if problem.nodes == 1 else across
    found = np.zeros(len(choices))
    for row, kind in enumerate(choices.kinds):
        table = problem.tables[int(choices.table[row])]
        element = TABLE_DTYPES[table.dtype]
        kept = table.cache_load_factor
        memory = {"hbm": near, "uvm": host / HOST_FACTOR,
                  "uvm_cached": (kept * near + (1 - kept) * host) / HOST_FACTOR}[choices.locations[row]]
        columns = table.columns // int(choices.parts[row])
        batch = float(problem.samples if kind is ShardKind.DATA_PARALLEL else problem.batch)
        cut = {ShardKind.ROW_WISE: problem.ranks, ShardKind.TABLE_ROW_WISE: problem.per_node}.get(kind, 1)
        inputs = table.bag * batch / cut
        out = problem.vectors(table, batch) * columns * table.output_bytes
        moved = inputs * (INPUT_BYTES * (2 if table.weighted else 1) + max(columns, LEAST_COLUMNS) * element) + out
        penalty = 1.0 if columns >= FULL_COLUMNS else HALF_PENALTY if columns >= FULL_COLUMNS // 2 else QUARTER_PENALTY
        forward = moved * penalty / memory
        backward = forward * BACKWARD_FACTOR + (forward * WEIGHTED_FACTOR if table.weighted else 0.0)
        if kind is ShardKind.DATA_PARALLEL:
            gradient = table.rows * table.columns * element
            exchanged = gradient / link
            backward += gradient * ELEMENTWISE_FACTOR / memory
        elif kind is ShardKind.TABLE_ROW_WISE:
            exchanged = 2 * (out / inside + out * problem.per_node / problem.ranks / across)
            backward += out * COPY_FACTOR / memory
        else:
            exchanged = 2 * out / link
            backward += out * COPY_FACTOR / memory if kind is not ShardKind.TABLE_WISE else 0.0
        found[row] = forward + backward + exchanged
    return found


def _proposals(problem: ShardingProblem, choices: Choices, perf: Float64) -> Iterator[list[int]]:
    """Yield TorchRec's proposals: one choice for each table."""
    tables = range(len(problem.tables))
    width = choices.width(problem.ranks, problem.per_node)
    for score in (perf, perf * width):
        ordered = [sorted(choices.of_table(table), key=lambda row: float(score[row])) for table in tables]
        at = [0] * len(ordered)
        for _ in range(min(MOST_PROPOSALS, max(MOST_PLACED // len(ordered) // 2, 1))):
            yield [rows[i] for rows, i in zip(ordered, at, strict=True)]
            left = [table for table in tables if at[table] + 1 < len(ordered[table])]
            if not left:
                break
            largest = max(left, key=lambda table: float(choices.memory[ordered[table][at[table]]]))
            at[largest] += 1
    for kind in ShardKind:
        rows = [[row for row in choices.of_table(table) if choices.kinds[row] is kind] for table in tables]
        if all(rows):
            yield [min(each, key=lambda row: float(perf[row])) for each in rows]


def _partition(problem: ShardingProblem, choices: Choices, perf: Float64, proposal: list[int]) -> tuple[
        float, Assignment] | None:
    """Place a proposal and return its largest sum and the assignment; ``None`` if it does not fit. Units on all ranks
    come first, then units on nodes, then on ranks; among these the largest first, each where the sum is least."""
    placing = _Placing(problem, choices)
    for row in sorted(proposal, key=lambda row: (-int(choices.scope[row]), -float(perf[row]))):
        nodes = np.array([placing.sums[placing.node_of == node].max() for node in range(problem.nodes)])
        if not placing.put(row, float(perf[row]), nodes):
            return None
    return float(placing.sums.max()), placing.assignment()


COSTS: dict[str, Callable[[EmbeddingTable], float]] = {
    "by size": lambda table: table.weight_bytes,
    "by look-ups": lambda table: table.bag * table.columns,
    "by dimension": lambda table: float(table.columns),
}
"""Cost by which a baseline orders and spreads tables, by name of the baseline."""
RANDOM = "random"
TORCHREC = "TorchRec's planner"
NAMES = (*COSTS, RANDOM, TORCHREC)


def baselines(scores: Scores, seed: int = 0) -> Iterator[tuple[str, Assignment | None]]:
    """Yield each baseline's name, and its assignment or, if the baseline finds none that fits, ``None``."""
    ways = [[*each, *_in_host(scores.choices, table, each[0])] for table, each in enumerate(unsplit(scores.choices))]
    for name, cost in COSTS.items():
        yield name, _spread(scores, ways, np.array([cost(table) for table in scores.problem.tables]))
    yield RANDOM, _spread(scores, ways, None, seed)
    yield TORCHREC, planned(scores.problem, scores.choices)


def _in_host(choices: Choices, table: int, row: int) -> list[int]:
    """Return the rows of choices like ``row`` with the weights in the host's memory, cached ones first."""
    same = [each for each in choices.of_table(table) if choices.kinds[each] is choices.kinds[row]
            and choices.parts[each] == choices.parts[row] and choices.locations[each] != "hbm" and each != row]
    return sorted(same, key=lambda each: choices.locations[each] != "uvm_cached")


def _spread(scores: Scores, ways: list[list[int]], costs: Float64 | None, seed: int = 0) -> Assignment | None:
    """Place each table by the first of its ways that fits: on the ranks with the least sums of costs, or on random
    ranks without ``costs``. Return ``None`` if a table fits in no way."""
    choices, placing = scores.choices, _Placing(scores.problem, scores.choices)
    draw = np.random.default_rng(seed) if costs is None else None
    order = np.argsort(-costs, kind="stable") if costs is not None else np.arange(len(ways))
    # Tables on all ranks or on a node come first, while every rank has memory.
    for table in sorted(order.tolist(), key=lambda table: -int(choices.scope[ways[table][0]])):
        cost = 0.0 if costs is None else float(costs[table])
        for row in ways[table]:
            nodes = np.bincount(placing.node_of, placing.held[0]).astype(np.float64)
            own = cost / int(choices.parts[row]) if choices.scope[row] == Scope.RANK else 0.0
            if placing.put(row, own, nodes, draw):
                break
        else:
            return None
    return placing.assignment()


MOST_TABLES, MOST_RANKS = 10, 4
"""Largest problems that are searched exactly. ``choices_of`` offers every way of each table in problems this small."""
MOST_NODES = 30_000
"""Partial shardings that are looked at before the exact search gives up."""


@dataclass(slots=True)
class Proven:
    """The result of branch and bound.

    Attributes:
        best: the fastest shardings with the times of their steps, µs; the fastest first.
        complete: whether the search finished, so that no other sharding is faster.
    """

    best: list[tuple[float, Assignment]] = field(default_factory=list)
    complete: bool = True


def fastest(scores: Scores, known_us: float, top: int = 1, most_nodes: int = MOST_NODES) -> Proven:
    """Find the fastest shardings. Shardings that differ only by exchanging equal ranks count as one.

    Args:
        known_us: a step's time that ``top`` known shardings reach; slower partial shardings are not followed.
        top: number of shardings wanted.
    """
    choices, problem = scores.choices, scores.problem
    pinned = [table.name in problem.pinned for table in problem.tables]
    first = [int(row) for row in choices.first[:-1]]
    # Pinned tables come first: afterwards, ranks with equal loads are interchangeable.
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
        # The child with the lowest bound is looked at first.
        stack += [(depth + 1, child) for _, _, child in sorted(children, reverse=True)]
    best = [(-step, assignment) for step, _, assignment in sorted(found, key=lambda each: (-each[0], each[1]))]
    return Proven(best, nodes <= most_nodes)


def _places(scores: Scores, choice: int, loads: RankLoads) -> Iterator[list[int]]:
    """Yield the places of a choice, without those equal up to an exchange of ranks with equal loads in one node."""
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
    """Return the least sums that the tables from each depth on add to all ranks together [depth][len(SUMS)]."""
    width = choices.width(ranks, per_node)
    least = np.array([[float((getattr(choices, name)[rows] * width[rows]).min()) for name in SUMS]
                      for rows in (list(choices.of_table(table)) for table in order)])
    return [least[depth:].sum(axis=0) for depth in range(len(order) + 1)]


def _bound(scores: Scores, loads: RankLoads, rest: Float64) -> float:
    """Return a lower bound of the step's time, µs, for all completions of a partial sharding. It comes from the slowest
    ranks so far, and from the mean over ranks with the remaining tables added."""
    ranks = scores.problem.ranks
    mean = (loads.sums.sum(axis=1) + rest) / ranks
    # The ranks and, as last column, the mean are priced in one call, which is cheaper.
    us = scores.model.rank_us(np.column_stack([loads.sums, mean]),
                              np.column_stack([loads.chains, loads.chains.min(axis=1)]))
    ends = [float(each.max()) for each in us]
    ends += [max(float(loads.sums[row].max()), float(mean[row])) for row in (INDEX, SENT)]
    return float(scores.model.total(scores.model.shared(loads), *ends))


FEW_TABLES = 128
"""Up to this number of tables, each table tries all its choices at its turn, and more seeds are tried."""
SEVERAL_TABLES = 1_000
"""Up to this number (chosen), the best baseline and the best greedy placement are improved; above, the better one."""
MOST_CHANGES, ROUNDS, SHAKEN, SHARES = 3_000, 6, 3, (1.0, 0.5, 0.25)
"""Chosen values. Most changes in one local search. How often a small problem's best sharding is shaken and improved.
Tables moved by each shake. Limits of a unit in seeds (``split_above``), as shares of a rank's mean."""


@dataclass(slots=True)
class ShardingSearch:
    """The result of a search.

    Attributes:
        scores: the objective by which shardings were compared.
        best: different shardings with the times of their steps, µs; the fastest first.
        baselines: by name, with the times of their steps, µs; ``None`` if a baseline found no sharding that fits.
        proven: whether the exact search finished: no sharding has a lower predicted time.
        looked_at: number of whole shardings that were scored, without single changes of them.
    """

    scores: Scores
    best: list[tuple[float, Assignment]]
    baselines: dict[str, tuple[float, Assignment] | None] = field(default_factory=dict)
    proven: bool = False
    looked_at: int = 0


class _Pool:
    """The fastest different shardings seen. Shardings that differ only by exchanging equal ranks count as one."""

    def __init__(self, scores: Scores, top: int) -> None:
        self._scores, self._top = scores, top
        self._known: dict[tuple[bytes, ...], tuple[float, Assignment]] = {}
        self._worst = np.inf
        self.seen = 0

    def add(self, standing: Standing) -> None:
        """Add a sharding if it fits and is among the fastest."""
        self.seen += 1
        if standing.step_us >= self._worst or not self._scores.fits(standing):
            return
        self._known.setdefault(signature(self._scores, standing.assignment), (standing.step_us, standing.assignment))
        if len(self._known) > 4 * self._top:
            kept = sorted(self._known.items(), key=lambda each: each[1][0])[:2 * self._top]
            self._known = dict(kept)
            self._worst = kept[-1][1][0]

    def best(self) -> list[tuple[float, Assignment]]:
        """Return the fastest shardings, fastest first."""
        return sorted(self._known.values(), key=lambda each: each[0])[:self._top]


def signature(scores: Scores, assignment: Assignment) -> tuple[bytes, ...]:
    """Return a key that is equal for shardings that differ only by exchanging equal ranks."""
    ranks = scores.problem.ranks
    on_rank = scores.choices.scope[assignment.choice] == Scope.RANK
    order = np.lexsort((assignment.choice, assignment.place))
    choice, place = assignment.choice[order], assignment.place[order]
    single = on_rank[order]
    ends = np.searchsorted(place[single], np.arange(ranks + 1))
    alone = choice[single]
    per_rank = [alone[low:high].tobytes() for low, high in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    wide = choice[~single].tobytes() + place[~single].tobytes()
    if not (scores.choices.scope[assignment.choice] == Scope.NODE).any() and not scores.problem.pinned:
        per_rank.sort()
    return (*per_rank, wide)


def search(problem: ShardingProblem, top: int = 5, seed: int = 0, model: StepModel | None = None,
           prove: bool = True) -> ShardingSearch:
    """Find the fastest shardings of a problem.

    Args:
        top: number of shardings wanted.
        seed: of random draws: shakes, swap partners (``PARTNERS``), the random baseline.
        model: the problem's step model, if it exists already.
        prove: also search exactly if there are few tables and ranks; this doubles the time.

    Raises:
        ShardingError: a table fits nowhere, or all tables together do not fit.
    """
    model = model or StepModel(problem)
    order = own_order(problem.tables)
    own = replace(problem, tables=tuple(problem.tables[i] for i in order.tolist()))
    choices = choices_of(own)
    given = choices.reordered(np.argsort(order))
    found = _search(Scores(own, choices, model), top, seed, prove)
    moved = given.first[order][choices.table] - choices.first[choices.table]

    def back(known: tuple[float, Assignment]) -> tuple[float, Assignment]:
        """Return a step's time and its assignment, with the choices numbered in the given order of tables."""
        return known[0], Assignment(known[1].choice + moved[known[1].choice], known[1].place)

    return replace(found, scores=Scores(problem, given, model), best=[back(each) for each in found.best],
                   baselines={name: None if known is None else back(known) for name, known in found.baselines.items()})


def _search(scores: Scores, top: int, seed: int, prove: bool) -> ShardingSearch:
    problem = scores.problem
    _check_each_fits(scores)
    pool, local = _Pool(scores, max(top, 1)), LocalSearch(scores, seed)
    found: dict[str, tuple[float, Assignment] | None] = {}
    starts: list[Standing] = []
    for name, assignment in baselines(scores, seed):
        if assignment is None:
            found[name] = None
            continue
        standing = scores.standing(assignment)
        found[name] = standing.step_us, assignment
        pool.add(standing)
        starts.append(standing)
    given = len(starts)
    for standing in _seeds(scores):
        pool.add(standing)
        starts.append(standing)
    if not starts:
        raise ShardingError(
            f"No sharding of {len(problem.tables)} tables was found that fits {problem.ranks} ranks of "
            f"{binary_size(problem.limit_bytes)}; raise --memory, take more GPUs or allow more --kinds.")
    few = len(problem.tables) <= FEW_TABLES
    first = _different(scores, starts)[:4 if few else 1]
    if not few and len(problem.tables) <= SEVERAL_TABLES:
        # Placements with split and with whole tables end far apart, so the best of each kind is improved.
        first = [each for of in (starts[:given], starts[given:]) for each in _different(scores, of)[:1]]
    ends = [local.improved(standing, MOST_CHANGES, pool.add) for standing in first]
    best = min(ends, key=lambda each: each.step_us)
    draw = np.random.default_rng(seed)
    for _ in range(ROUNDS if few else 0):
        end = local.improved(_shaken(scores, best, draw), MOST_CHANGES, pool.add)
        best = min((best, end), key=lambda each: each.step_us)
    result = ShardingSearch(scores, pool.best(), found, looked_at=pool.seen)
    if prove and len(problem.tables) <= MOST_TABLES and problem.ranks <= MOST_RANKS:
        known = result.best[-1][0] if len(result.best) >= top else np.inf
        exact = fastest(scores, known, max(top, 1))
        for _, assignment in exact.best:
            pool.add(scores.standing(assignment))
        result.best, result.proven = pool.best(), exact.complete
    return result


def _seeds(scores: Scores) -> list[Standing]:
    choices, problem = scores.choices, scores.problem
    few = len(problem.tables) <= FEW_TABLES
    whole = unsplit(choices)
    by = orders(choices, np.array([each[0] for each in whole]))
    tried = [(order, whole) for order in (by if few else by[:1])]
    for share in SHARES if few else SHARES[1:2]:
        tried += [(by[0], split_above(choices, problem.ranks, share, prefer))
                  for prefer in (ShardKind.COLUMN_WISE, ShardKind.ROW_WISE)[:2 if few else 1]]
    if few:
        tried.append((by[0], every_way(choices)))
    if problem.host_bytes:
        split = spilled(choices, problem.ranks, problem.per_node)
        # Tables that belong on the devices are placed first.
        far = np.array([choices.locations[each[0]] != "hbm" for each in split])
        tried += [(order[np.argsort(far[order], kind="stable")], split) for order in (by if few else by[:1])]
    found = (greedy(scores, order.tolist(), options) for order, options in tried)
    return [each for each in found if each is not None]


def _different(scores: Scores, standings: list[Standing]) -> list[Standing]:
    """Return the different standings that fit, fastest first."""
    kept: dict[tuple[bytes, ...], Standing] = {}
    for each in sorted(standings, key=lambda each: each.score):
        if scores.fits(each):
            kept.setdefault(signature(scores, each.assignment), each)
    return list(kept.values())


def _shaken(scores: Scores, start: Standing, draw: np.random.Generator) -> Standing:
    """Return a start with a few tables drawn at random that get another choice, and a few units another rank."""
    now = start
    count = len(scores.problem.tables)
    for table in draw.choice(count, min(SHAKEN, count), replace=False).tolist():
        rest = scores.standing(now.assignment.without(scores.choices, table))
        options = list(scores.choices.of_table(table))
        option = options[int(draw.integers(len(options)))]
        again = scores.with_choice(rest, option)
        if again is not None:
            now = again
    for _ in range(SHAKEN):
        whole = np.flatnonzero((scores.choices.scope[now.assignment.choice] == Scope.RANK)
                               & (scores.choices.parts[now.assignment.choice] == 1))
        rows = [row for row in whole.tolist() if scores.problem.tables[int(
            scores.choices.table[now.assignment.choice[row]])].name not in scores.problem.pinned]
        if not rows:
            break
        moved = now.assignment.copy()
        moved.place[rows[int(draw.integers(len(rows)))]] = int(draw.integers(scores.problem.ranks))
        standing = scores.standing(moved)
        if scores.fits(standing):
            now = standing
    return now


def _check_each_fits(scores: Scores) -> None:
    choices, problem = scores.choices, scores.problem
    possible = np.logical_or.reduceat(choices.fits, choices.first[:-1])
    if not possible.all():
        least = np.where(possible, 0.0, np.minimum.reduceat(choices.memory, choices.first[:-1]))
        table, room = problem.tables[int(least.argmax())], choices.room[0]
        host = ", whose host has no room for it either" if problem.host_bytes else ""
        raise ShardingError(
            f"Table {table.name!r} fits no rank: its smallest allowed part takes "
            f"{binary_size(float(least.max()))}, and a {problem.device.name} has {binary_size(max(room, 0.0))} "
            f"for tables and buffers{host}; allow row- or column-wise sharding, take more GPUs, or raise --memory"
            f"{' or --host-memory' if host else ''}.")
