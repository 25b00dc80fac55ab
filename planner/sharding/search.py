"""Greedy seeds: tables one after the other, the largest first, each where the objective is then least.

Baselines: the ways that tables are spread by without a model of the step, and TorchRec's planner's.

The literature compares with orders by size, by look-ups and by dimension (DreamShard, arXiv 2210.02023). The largest
table goes first, to the rank that has the memory and whose sum is least. A table that fits no rank is cut into the
fewest parts that do. If no device has room left, it goes to the host's memory where tables may lie there.

Planning as TorchRec's planner does it, as a baseline: its estimate of a shard, its proposals, its placement.

A shard's time is bytes over bandwidths, forward and backward, with nothing of what the rows reuse::

    ``moved``     = B·bag·8 + B·bag·columns·element + B·columns·element      (row-wise: the first two over the ranks);
    ``forward``   = moved · penalty(columns) / memory + B·columns·element / link;
    ``backward``  = 2 × forward's computation + 2.455 × copies + the same exchange
                    (data-parallel: all-reduce of rows·columns).

Proposals take each table's best way by its largest shard, then by the sum of its shards, then one kind for all. From
each greedy proposal, the table with most memory goes on to its next best way. The rank with the least sum of estimates
gets the next largest shard, and the proposal with the smallest largest sum wins.

Source: torchrec.distributed.planner (``constants``, ``shard_estimators``, ``proposers``, ``partitioners``); written
from its published formulas, with this cluster's bandwidths in place of its default A100's.

The search for the fastest shardings: greedy seeds, local search from the best of them, exact where small.

Branch and bound over every sharding of a small problem: the fastest, proven.
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
    """Ranks that ways of tables are put on one after another.

    Attributes:
        sums: of the ranks' costs [ranks].
        held: bytes of the devices and of their hosts [2, ranks].
    """

    def __init__(self, problem: ShardingProblem, choices: Choices) -> None:
        self._problem, self._choices = problem, choices
        self.sums, self.held = np.zeros(problem.ranks), np.zeros((2, problem.ranks))
        self.node_of = np.arange(problem.ranks) // problem.per_node
        self._chosen: list[int] = []
        self._places: list[int] = []

    def put(self, row: int, cost: float, nodes: Float64, draw: np.random.Generator | None = None) -> bool:
        """Put the units of a choice where there is room; return whether there is.

        Args:
            row: of the choice. Units of ranks go to different ones, each to the free one whose sum is least.
            cost: of a unit, added to the sums.
            nodes: the load of each node; the least loaded is taken [nodes].
            draw: draws the ranks instead.
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
        """Return what was put where."""
        return Assignment(np.array(self._chosen, np.int64), np.array(self._places, np.int64))


def greedy(scores: Scores, order: Sequence[int], options: Sequence[Sequence[int]]) -> Standing | None:
    """Place tables in an order.

    Args:
        order: rows of tables.
        options: the choices of each table that are tried, all of them where it is its turn.

    Returns:
        ``None`` if a table fits nowhere.
    """
    now = scores.standing(EMPTY)
    for table in order:
        # Where what was wanted fits nowhere, any other way that does.
        best = scores.best_choice(now, options[table]) or scores.best_choice(now, scores.choices.of_table(table))
        if best is None:
            return None
        now = best
    return now


def orders(choices: Choices, alike: Int64) -> list[Int64]:
    """Orders of tables by several costs of their first way, the largest first.

    Args:
        alike: the choice that represents each table [tables].
    """
    columns = [choices.work[alike], choices.memory[alike], choices.sent_bytes[alike], choices.index_bytes[alike]]
    mixed = sum((column / max(float(column.sum()), 1e-12) for column in columns), np.zeros(len(alike)))
    return [np.argsort(-column, kind="stable") for column in (mixed, *columns)]


def unsplit(choices: Choices) -> list[list[int]]:
    """The first way of each table that fits a rank: whole if it can, else in as few parts as it takes."""
    return [[_first_fit(choices, table)] for table in range(len(choices.first) - 1)]


def split_above(choices: Choices, ranks: int, share: float, prefer: ShardKind) -> list[list[int]]:
    """Likewise, but no unit may take more than a share of a rank's mean work, vectors or indices."""
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
        # The first that is small enough has the fewest parts.
        found.append([(wanted or small or [int(alike[table])])[0]])
    return found


def spilled(choices: Choices, ranks: int, per_node: int) -> list[list[int]]:
    """Those tables on the devices that gain most for their bytes, others in the hosts' memory, cached or not.

    Buffers of all tables lie on the devices in any case, and a twentieth is left free: parts do not fill them.
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
    """All ways of each table."""
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
"""Most proposals of each greedy proposer, and shards that all proposals place; TorchRec's own goes on for as long as
there is a next way."""


def planned(problem: ShardingProblem, choices: Choices) -> Assignment | None:
    """The assignment with the best rating of all proposals; ``None`` if none can be placed."""
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
    """The estimate of one unit of each choice on one rank, µs."""
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
    """One choice for each table, proposal after proposal."""
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
    """Uniform ways first, then nodes, then ranks, each the largest shard where the sum is least; with its rating."""
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
    choices, placing = scores.choices, _Placing(scores.problem, scores.choices)
    draw = np.random.default_rng(seed) if costs is None else None
    order = np.argsort(-costs, kind="stable") if costs is not None else np.arange(len(ways))
    # What lies on many ranks takes its memory first.
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
    width = choices.width(ranks, per_node)
    least = np.array([[float((getattr(choices, name)[rows] * width[rows]).min()) for name in SUMS]
                      for rows in (list(choices.of_table(table)) for table in order)])
    return [least[depth:].sum(axis=0) for depth in range(len(order) + 1)]


def _bound(scores: Scores, loads: RankLoads, rest: Float64) -> float:
    """A time that no completion of a partial sharding is below: its own slowest ranks, and the mean with the rest."""
    ranks = scores.problem.ranks
    mean = (loads.sums.sum(axis=1) + rest) / ranks
    # The ranks and, last, the mean, priced together: a call costs more than its columns.
    us = scores.model.rank_us(np.column_stack([loads.sums, mean]),
                              np.column_stack([loads.chains, loads.chains.min(axis=1)]))
    ends = [float(each.max()) for each in us]
    ends += [max(float(loads.sums[row].max()), float(mean[row])) for row in (INDEX, SENT)]
    return float(scores.model.total(scores.model.shared(loads), *ends))


FEW_TABLES = 128
"""With no more, every way of each table is weighed when it is its turn, and more seeds are tried."""
SEVERAL_TABLES = 1_000
"""With no more, the best baseline is improved as well as the best greedy placement, else the better one. Chosen."""
MOST_CHANGES, ROUNDS, SHAKEN, SHARES = 3_000, 6, 3, (1.0, 0.5, 0.25)
"""Choices. Changes of one local search. Times that a small problem's best sharding is shaken and improved again. Tables
that go elsewhere each time. Upper limits of a seed's unit, as shares of a rank's mean."""


@dataclass(slots=True)
class ShardingSearch:
    """The result of a search.

    Attributes:
        scores: of the problem: with what shardings were compared.
        best: different shardings with their steps in µs, the fastest first.
        baselines: by name, with their steps; ``None`` where one finds no sharding that fits.
        proven: whether nothing is faster by these sums: every way of every table was weighed.
        looked_at: shardings that were compared step by step, changes of them apart.
    """

    scores: Scores
    best: list[tuple[float, Assignment]]
    baselines: dict[str, tuple[float, Assignment] | None] = field(default_factory=dict)
    proven: bool = False
    looked_at: int = 0


class _Pool:
    """The fastest different shardings seen; equal ones, also when equal ranks change places, count once."""

    def __init__(self, scores: Scores, top: int) -> None:
        self._scores, self._top = scores, top
        self._known: dict[tuple[bytes, ...], tuple[float, Assignment]] = {}
        self._worst = np.inf
        self.seen = 0

    def add(self, standing: Standing) -> None:
        """Add one, if it fits and is among the fastest."""
        self.seen += 1
        if standing.step_us >= self._worst or not self._scores.fits(standing):
            return
        self._known.setdefault(signature(self._scores, standing.assignment), (standing.step_us, standing.assignment))
        if len(self._known) > 4 * self._top:
            kept = sorted(self._known.items(), key=lambda each: each[1][0])[:2 * self._top]
            self._known = dict(kept)
            self._worst = kept[-1][1][0]

    def best(self) -> list[tuple[float, Assignment]]:
        """The fastest first."""
        return sorted(self._known.values(), key=lambda each: each[0])[:self._top]


def signature(scores: Scores, assignment: Assignment) -> tuple[bytes, ...]:
    """The same for shardings that differ by the names of equal ranks alone."""
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
        top: how many different ones.
        seed: of what is drawn: shakes, partners of swaps among very many tables, the random baseline.
        model: of the problem, where it is there already.
        prove: weigh every sharding of a few tables over a few ranks; it doubles the time.

    Raises:
        ShardingError: a table fits nowhere, or all together do not.
    """
    model = model or StepModel(problem)
    order = own_order(problem.tables)
    own = replace(problem, tables=tuple(problem.tables[i] for i in order.tolist()))
    choices = choices_of(own)
    given = choices.reordered(np.argsort(order))
    found = _search(Scores(own, choices, model), top, seed, prove)
    moved = given.first[order][choices.table] - choices.first[choices.table]

    def back(known: tuple[float, Assignment]) -> tuple[float, Assignment]:
        """Return the same assignment by the choices as they were given."""
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
        # Splits and whole tables end far apart: the best of each is improved.
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
        # What is to lie on the devices takes its place there first.
        far = np.array([choices.locations[each[0]] != "hbm" for each in split])
        tried += [(order[np.argsort(far[order], kind="stable")], split) for order in (by if few else by[:1])]
    found = (greedy(scores, order.tolist(), options) for order, options in tried)
    return [each for each in found if each is not None]


def _different(scores: Scores, standings: list[Standing]) -> list[Standing]:
    """The fastest first, each once."""
    kept: dict[tuple[bytes, ...], Standing] = {}
    for each in sorted(standings, key=lambda each: each.score):
        if scores.fits(each):
            kept.setdefault(signature(scores, each.assignment), each)
    return list(kept.values())


def _shaken(scores: Scores, start: Standing, draw: np.random.Generator) -> Standing:
    """The same with a few tables elsewhere or otherwise."""
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
