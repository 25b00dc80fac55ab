"""The search for the fastest shardings: greedy seeds, local search from the best of them, exact where small.

Branch and bound over every sharding of a small problem: the fastest, proven.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, count

import numpy as np

from planner.sharding.baselines import baselines, every_way, greedy, orders, spilled, split_above, unsplit
from planner.sharding.choices import Choices, Scope, choices_of
from planner.sharding.problem import ShardingProblem
from planner.sharding.scoring import LocalSearch, Scores, Standing
from planner.sharding.step import EMPTY, INDEX, SENT, SUMS, Assignment, RankLoads, StepModel
from tracer.arrays import Float64, Int64
from tracer.device_memory import binary_size
from tracer.lookup_data.plan_file import ShardingError, ShardKind

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


FEW_TABLES = 128
"""With no more, every way of each table is weighed when it is its turn, and more seeds are tried."""
SEVERAL_TABLES = 1_000
"""With no more, the best baseline is improved as well as the best greedy placement, else the better of the two."""
MOST_CHANGES = 3_000
"""Changes of one local search."""
ROUNDS = 6
"""Times that a small problem's best sharding is shaken and improved again."""
SHAKEN = 3
"""Tables that each time go elsewhere."""
SHARES = (1.0, 0.5, 0.25)
"""Shares of a rank's mean that no unit of a seed takes more than."""


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


def search(problem: ShardingProblem, top: int = 5, seed: int = 0, tick: Callable[[], None] = lambda: None,
           model: StepModel | None = None) -> ShardingSearch:
    """Find the fastest shardings of a problem.

    Args:
        top: how many different ones.
        seed: of what is drawn: shakes, partners of swaps among very many tables, the random baseline.
        tick: called after each seed and search.
        model: of the problem, where it is there already.

    Raises:
        ShardingError: a table fits nowhere, or all together do not.
    """
    model = model or StepModel(problem)
    own, order = problem.in_own_order()
    choices = choices_of(own)
    given = choices.reordered(np.argsort(order))
    found = _search(Scores(own, choices, model), top, seed, tick)
    back = _Translation(choices, given, order)
    return replace(
        found, scores=Scores(problem, given, model), best=[(us, back.of(each)) for us, each in found.best],
        baselines={name: None if known is None else (known[0], back.of(known[1]))
                   for name, known in found.baselines.items()})


class _Translation:
    """From assignments of tables in one order to those of the same tables as they were given."""

    def __init__(self, own: Choices, given: Choices, order: Int64) -> None:
        self._moved = given.first[order][own.table] - own.first[own.table]

    def of(self, assignment: Assignment) -> Assignment:
        """The same assignment by the given choices."""
        return Assignment(assignment.choice + self._moved[assignment.choice], assignment.place)


def _search(scores: Scores, top: int, seed: int, tick: Callable[[], None]) -> ShardingSearch:
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
        tick()
    given = len(starts)
    for standing in _seeds(scores):
        pool.add(standing)
        starts.append(standing)
        tick()
    if not starts:
        raise ShardingError(
            f"No sharding of {len(problem.tables)} tables was found that fits {problem.ranks} ranks of "
            f"{binary_size(problem.limit_bytes)}; raise --memory, take more GPUs or allow more --kinds.")
    few = len(problem.tables) <= FEW_TABLES
    ends = []
    first = _different(scores, starts)[:4 if few else 1]
    if not few and len(problem.tables) <= SEVERAL_TABLES:
        # Splits and whole tables end far apart: the best of each is improved.
        first = [each for of in (starts[:given], starts[given:]) for each in _different(scores, of)[:1]]
    for standing in first:
        ends.append(local.improved(standing, MOST_CHANGES, pool.add))
        tick()
    best = min(ends, key=lambda each: each.step_us)
    draw = np.random.default_rng(seed)
    for _ in range(ROUNDS if few else 0):
        end = local.improved(_shaken(scores, best, draw), MOST_CHANGES, pool.add)
        best = min((best, end), key=lambda each: each.step_us)
        tick()
    result = ShardingSearch(scores, pool.best(), found, looked_at=pool.seen)
    if small(scores):
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
