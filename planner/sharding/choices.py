"""``Choices``: every way in which each table may lie, as columns: what one unit of a choice adds to a rank.

A choice is a kind of sharding, a location of the weights, and one or more equal units. A unit lies on one rank, on all
ranks of a node, or on all ranks. It adds the same to each of its ranks, so sums and maxima over units describe a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np

from kernel_models.heuristics.embedding import WEIGHT_BYTES
from kernel_models.lookups import PartCosts, backward_call
from kernel_models.op_call import Family, OpCall, TablePart
from kernel_models.pricing import price
from planner.sharding.problem import ShardingProblem, can_split_columns, node_ranks
from tracer.arrays import Bool, Float64, Int64
from tracer.lookup_data.plan_file import ShardingError, ShardKind, TableSharding
from tracer.lookup_data.tables import EmbeddingTable

LENGTH_BYTES = 4.0
"""A bag's length, sent with its indices (TorchRec's ``KeyedJaggedTensor`` has them as int32)."""
INPUT_COPIES = 2.0
"""Copies of the indices in memory: this batch's and the prefetched next batch's (TorchRec's storage estimator takes two
for ``TRAIN_SPARSE_DIST``)."""
FEW_TABLES = 64
"""Up to this number of tables, all ways of each are looked at; above, tables that matter little get fewer ways."""
LARGE_SHARE = 0.15
"""With many tables: share of a rank's mean time, look-ups or memory from which a table may also be split."""
MOST_COPIED_BYTES = 1e5
"""With many trained tables: largest table that may be copied to every rank (its dense gradient is all-reduced)."""
MOST_PARTS, EVERY_PARTS = 16, 4
"""Columns are cut into at most ``MOST_PARTS`` parts: any number up to ``EVERY_PARTS``, then powers of two."""
_OPTIMIZER = {"sgd": ("fused_sgd", 2, 1), "adagrad": ("fused_adagrad", 3, 2),
              "rowwise_adagrad": ("fused_adagrad", 3, 2), "adam": ("fused_adam", 4, 3),
              "partial_rowwise_adam": ("fused_adam", 4, 3), "none": ("fused_sgd", 2, 1)}
"""PyTorch's dense kernel for each optimizer: its name, lists read and lists written."""


class Scope(IntEnum):
    """Where one unit (part of a table) lies: on a single rank, on all ranks of a node, or on all ranks."""

    RANK = 0
    NODE = 1
    ALL = 2


@dataclass(slots=True)
class Choices:
    """Ways to shard each table, one row for each choice; the choices of a table are adjacent.

    Attributes:
        table: index of the table.
        kinds: kind of sharding.
        locations: where the weights lie.
        parts: number of units: the parts into which the table is split.
        scope: ``Scope`` of each unit.
        forward_stream, forward_flight, forward_wait: look-up of a unit on each of its ranks, µs (``LookupTerms``).
        backward_stream, backward_flight, backward_wait: its backward with the optimizer; 0 if copied or untrained.
        lookups, rows: look-ups and rows of that backward.
        index_bytes: indices, their weights if any, and lengths that each of a unit's ranks receives.
        sent_bytes: pooled vectors that each of its ranks sends in the all-to-all of all ranks.
        reduced_bytes: partial sums that each rank puts into the reduce-scatter of all ranks (row-wise).
        node_bytes: partial sums that each rank puts into the reduce-scatter within the node (table-row-wise).
        cross_bytes: bytes that are then sent across nodes.
        gradient_bytes: dense gradients that are all-reduced (data-parallel).
        copy_us: time to make those gradients and of the optimizer's pass over them, µs.
        weight_bytes, state_bytes, gradient_memory, buffer_bytes: memory of a unit on each of its ranks' devices.
        host_bytes: memory of a unit on each of its ranks' hosts.
        first: row of each table's first choice, and at the end the number of choices [tables + 1].
        room: memory for tables on a rank's device and on its host, bytes.
        units: the part of the table that one unit is on each of its ranks.
        fits: whether an empty rank and its host have the memory for a unit.
        memory: all memory of a unit on each of its ranks' devices, bytes.
        work: streaming time of a unit, forward and backward, µs.
    """

    table: Int64
    kinds: list[ShardKind]
    locations: list[str]
    parts: Int64
    scope: Int64
    forward_stream: Float64
    forward_flight: Float64
    forward_wait: Float64
    backward_stream: Float64
    backward_flight: Float64
    backward_wait: Float64
    lookups: Float64
    rows: Float64
    index_bytes: Float64
    sent_bytes: Float64
    reduced_bytes: Float64
    node_bytes: Float64
    cross_bytes: Float64
    gradient_bytes: Float64
    copy_us: Float64
    weight_bytes: Float64
    state_bytes: Float64
    gradient_memory: Float64
    buffer_bytes: Float64
    host_bytes: Float64
    room: tuple[float, float]
    first: Int64
    units: list[TablePart]
    fits: Bool = field(init=False)
    memory: Float64 = field(init=False)
    work: Float64 = field(init=False)

    def __len__(self) -> int:
        return len(self.table)

    def __post_init__(self) -> None:
        self.memory = self.weight_bytes + self.state_bytes + self.gradient_memory + self.buffer_bytes
        self.fits = (self.memory <= self.room[0]) & (self.host_bytes <= self.room[1])
        self.work = self.forward_stream + self.backward_stream

    def reordered(self, order: Int64) -> Choices:
        """Return the same choices with the tables in another order [tables]."""
        rows = np.concatenate([np.arange(self.first[table], self.first[table + 1]) for table in order.tolist()])
        counts = np.diff(self.first)[order]
        found: dict[str, Any] = {"room": self.room, "table": np.repeat(np.arange(len(order)), counts),
                                 "first": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)}
        for each in fields(self):
            if each.init and each.name not in found:
                values = getattr(self, each.name)
                found[each.name] = [values[row] for row in rows] if isinstance(values, list) else values[rows]
        return Choices(**found)

    def of_table(self, table: int) -> range:
        """Return the rows of a table's choices."""
        return range(int(self.first[table]), int(self.first[table + 1]))

    def width(self, ranks: int, per_node: int) -> Int64:
        """Return the number of ranks on which all units of each choice together lie."""
        return np.select([self.scope == Scope.ALL, self.scope == Scope.NODE], [ranks, per_node], self.parts)

    def ranks_of(self, choice: int, places: Sequence[int], ranks: int, per_node: int) -> TableSharding:
        """Return the sharding of a choice whose units lie at these places (ranks or nodes)."""
        on = tuple(places)
        if self.scope[choice] == Scope.ALL:
            on = tuple(range(ranks))
        elif self.scope[choice] == Scope.NODE:
            on = node_ranks(places[0], ranks, per_node)
        return TableSharding(self.kinds[choice], on, self.locations[choice])


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to shard one table. ``held`` is the table with its weights at this way's location."""

    table: int
    held: EmbeddingTable
    kind: ShardKind
    parts: int
    part: TablePart


def choices_of(problem: ShardingProblem, needed: Sequence[TableSharding] | None = None) -> Choices:
    """Return every way in which the tables of a problem may lie.

    Args:
        needed: a given plan's sharding of each table, included even where it would not be tried.

    Raises:
        ShardingError: a table has no allowed way.
    """
    held = [{where: replace(table, location=where) for where in problem.locations(table)} for table in problem.tables]
    whole = [TablePart.of(next(iter(each.values())), problem.batch) for each in held]
    split = _worth_splitting(problem, whole)
    # Copies of untrained tables exchange nothing; gradients of trained copies are all-reduced.
    copied = [not problem.trained or len(problem.tables) <= FEW_TABLES or table.weight_bytes <= MOST_COPIED_BYTES
              for table in problem.tables]
    ways = []
    for i, table in enumerate(problem.tables):
        kinds = _kinds(problem, table, bool(split[i]), copied[i])
        # Copies lie on devices only. The first way has the table's given location.
        own = dict.fromkeys((kind, parts, where) for where in held[i] for kind, parts in kinds
                            if where == "hbm" or kind is not ShardKind.DATA_PARALLEL)
        if needed is not None:
            given = needed[i]
            own.setdefault((given.kind, len(given.ranks) if given.kind is ShardKind.COLUMN_WISE else 1, given.location))
        for kind, parts, where in own:
            if where not in held[i]:
                held[i][where] = replace(table, location=where)
            ways.append(_way(problem, i, held[i][where], kind, parts))
        if not own:
            raise ShardingError(f"Table {table.name!r} lies in the host's memory and cannot be copied to every rank; "
                                "allow another kind.")
    return _columns(problem, ways)


def _kinds(problem: ShardingProblem, table: EmbeddingTable, split: bool, copied: bool) -> list[tuple[ShardKind, int]]:
    """Return the kinds that a table may have, each with its number of parts. Raises ``ShardingError`` if none."""
    if table.name in problem.pinned:
        return [(ShardKind.TABLE_WISE, 1)]
    allowed = problem.kinds
    possible = [(ShardKind.TABLE_WISE, 1)]
    possible += [(ShardKind.COLUMN_WISE, parts) for parts in range(2, min(problem.ranks, MOST_PARTS) + 1)
                 if (parts <= EVERY_PARTS or parts & (parts - 1) == 0) and can_split_columns(table.columns, parts)]
    if problem.ranks > 1:
        possible.append((ShardKind.ROW_WISE, 1))
    if problem.nodes > 1 and problem.per_node > 1 and problem.even_nodes:
        possible.append((ShardKind.TABLE_ROW_WISE, 1))
    if problem.ranks > 1:
        possible.append((ShardKind.DATA_PARALLEL, 1))
    possible = [each for each in possible if each[0] in allowed]
    if not possible:
        raise ShardingError(f"Table {table.name!r} of {table.columns} columns can be sharded in none of the allowed "
                            f"kinds ({', '.join(sorted(kind.value for kind in allowed))}) over {problem.ranks} ranks.")
    # With many tables, splitting or copying is offered only for those that matter.
    narrow = [each for each in possible if each[0] is ShardKind.TABLE_WISE
              or (copied if each[0] is ShardKind.DATA_PARALLEL else split)]
    return narrow or possible


def _worth_splitting(problem: ShardingProblem, whole: list[TablePart]) -> list[bool]:
    """Return which tables take so much of a rank's mean time, look-ups, columns or memory that splits are tried."""
    count = len(whole)
    if count <= FEW_TABLES:
        return [True] * count
    costs = _costs(problem, whole)
    memory = np.array([table.weight_bytes + table.state_bytes for table in problem.tables])
    room = max(problem.room_bytes, 1.0) / memory.sum()
    large = np.zeros(count, np.bool_)
    for share in (costs.forward.stream_us + costs.backward.stream_us, np.array([part.lookups for part in whole]),
                  np.array([table.columns for table in problem.tables], np.float64)):
        large |= share * problem.ranks > LARGE_SHARE * share.sum() if share.sum() > 0 else False
    large |= memory / memory.sum() > LARGE_SHARE * room
    found: list[bool] = large.tolist()
    return found


def _costs(problem: ShardingProblem, parts: list[TablePart]) -> PartCosts:
    if problem.additive:
        return PartCosts.apart(parts, problem.device, problem.models, problem.fused)
    # Tables on one device share its cache: this is a device's part of all tables.
    return PartCosts.of(parts, problem.device, min(1.0, problem.ranks / len(problem.tables)))


def _way(problem: ShardingProblem, i: int, table: EmbeddingTable, kind: ShardKind, parts: int) -> _Way:
    whole = _whole(table, problem.samples if kind is ShardKind.DATA_PARALLEL else problem.batch)
    part = whole
    if kind is ShardKind.COLUMN_WISE:
        part = whole.cut(columns=table.columns // parts)
    elif kind is ShardKind.ROW_WISE:
        part = whole.cut(1.0 / problem.ranks)
    elif kind is ShardKind.TABLE_ROW_WISE:
        part = whole.cut(1.0 / problem.per_node)
    return _Way(i, table, kind, parts, part)


@lru_cache(maxsize=4096)
def _whole(table: EmbeddingTable, samples: int) -> TablePart:
    return TablePart.of(table, samples)


def _columns(problem: ShardingProblem, ways: list[_Way]) -> Choices:
    n, ranks, per_node = len(ways), problem.ranks, problem.per_node
    tables = [way.held for way in ways]
    costs = _costs(problem, [way.part for way in ways])
    is_kind = {kind: np.array([way.kind is kind for way in ways]) for kind in ShardKind}
    copied, rows_all, rows_node = (
        is_kind[kind] for kind in (ShardKind.DATA_PARALLEL, ShardKind.ROW_WISE, ShardKind.TABLE_ROW_WISE))
    sums = is_kind[ShardKind.TABLE_WISE] | is_kind[ShardKind.COLUMN_WISE]
    parts = np.array([way.parts for way in ways], np.int64)
    cut = np.where(rows_all, ranks, np.where(rows_node, per_node, parts)).astype(np.float64)
    weights, state, far_weights, far_state = np.array([
        (table.device_weight_bytes, table.device_state_bytes, table.host_weight_bytes, table.host_state_bytes)
        for table in tables], np.float64).reshape(n, 4).T
    rows = np.array([table.rows for table in tables], np.float64)
    # Blocks of rows are rounded up: a rank holds at most a whole block.
    by_rows = np.where(rows_all | rows_node, np.ceil(rows / cut) / rows, 1.0 / cut)
    out = np.array([problem.vectors(table, problem.batch) * table.columns * table.output_bytes for table in tables])
    silent = copied | (not problem.trained)
    bags = np.full(n, float(problem.batch))
    of_lookup = problem.index_bytes + WEIGHT_BYTES * np.array([table.weighted for table in tables])
    index = np.where(copied, 0.0, costs.lookups * of_lookup + bags * LENGTH_BYTES)
    sent = np.where(sums, out / parts, 0.0)
    elements = rows * np.array([table.columns for table in tables], np.float64)
    gradients = np.where(copied & problem.trained, 4.0 * elements, 0.0)
    # A sparse gradient has a row for each look-up until the optimizer has applied it.
    kept = np.array([4.0 * way.part.lookups * way.part.columns for way in ways]) * (not problem.fused)
    table = np.array([way.table for way in ways], np.int64)
    return Choices(
        table=table, kinds=[way.kind for way in ways], locations=[way.held.location for way in ways],
        parts=parts,
        scope=np.where(rows_all | copied, int(Scope.ALL), np.where(rows_node, int(Scope.NODE), int(Scope.RANK))),
        forward_stream=costs.forward.stream_us, forward_flight=costs.forward.flight_us,
        forward_wait=costs.forward.wait_us, backward_stream=np.where(silent, 0.0, costs.backward.stream_us),
        backward_flight=np.where(silent, 0.0, costs.backward.flight_us),
        backward_wait=np.where(silent, 0.0, costs.backward.wait_us), lookups=np.where(silent, 0.0, costs.lookups),
        rows=np.where(silent, 0.0, costs.rows),
        index_bytes=index, sent_bytes=sent, reduced_bytes=np.where(rows_all, out, 0.0),
        node_bytes=np.where(rows_node, out, 0.0), cross_bytes=np.where(rows_node, out / per_node, 0.0),
        gradient_bytes=gradients, copy_us=_copies(problem, ways),
        weight_bytes=np.where(copied, weights, weights * by_rows),
        state_bytes=np.where(copied, state, state * by_rows), gradient_memory=gradients + np.where(silent, 0.0, kept),
        buffer_bytes=np.where(copied, 0.0, INPUT_COPIES * index + np.where(sums, sent, out)),
        host_bytes=(far_weights + far_state) * by_rows, room=(problem.room_bytes, problem.host_room_bytes),
        first=np.searchsorted(table, np.arange(len(problem.tables) + 1)).astype(np.int64),
        units=[way.part for way in ways])


def _copies(problem: ShardingProblem, ways: list[_Way]) -> Float64:
    """Return the times to make copied tables' dense gradients and of the optimizer's pass over them, µs [ways]."""
    out = np.zeros(len(ways))
    rows = [i for i, way in enumerate(ways)
            if way.kind is ShardKind.DATA_PARALLEL and way.part.lookups and problem.trained]
    calls: list[OpCall] = []
    for i in rows:
        table = problem.tables[ways[i].table]
        elements = table.rows * table.columns
        kind, read, written = _OPTIMIZER[table.optimizer]
        swept = OpCall(Family.OPTIMIZER, kind, (1, elements), "fp32", bytes_read=4.0 * read * elements,
                       bytes_written=4.0 * written * elements)
        calls += [backward_call([ways[i].part], fused=False), swept]
    if calls:
        priced = price(calls, problem.device, problem.models).times_us.reshape(-1, 2).sum(axis=1)
        out[rows] = problem.anchors.factor(problem.anchors.backward) * priced
    return out
