"""``ShardingPlan``: where each embedding table lies, checked, and written and read as ``tracer.lookup_data.plan_file``
has it.

==============  ===================================  =================================================================
kind            a rank holds                         what moves in forward (backward: the reverse)
==============  ===================================  =================================================================
table-wise      a whole table                        indices to it; pooled vectors from it (all-to-all)
column-wise     some columns of every row            likewise, the indices once for each rank that has columns
row-wise        a block of rows, on all ranks        indices to their rows; partial sums (reduce-scatter)
table-row-wise  a block of rows, within one node     partial sums within the node, then an all-to-all across nodes
data-parallel   a whole table, on all ranks          nothing; dense gradients are all-reduced
==============  ===================================  =================================================================

Source: TorchRec, ``torchrec.distributed.types.ShardingType`` and ``sharding_plan``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tracer.input_file import PathLike
from tracer.lookup_data.plan_file import (
    ShardingError,
    ShardKind,
    TableSharding,
    WrittenCache,
    WrittenPlan,
    WrittenShard,
    WrittenShards,
    WrittenTable,
    kernel_name,
    read_plan,
)
from tracer.lookup_data.tables import EmbeddingTable
from tracer.output_file import whole_file

COLUMNS_MULTIPLE = 4
"""Columns of a shard are a multiple of this: what FBGEMM's kernels take."""
MODULE = "embeddings"
"""Name of the module that a written plan puts its tables in."""


@dataclass(frozen=True, slots=True)
class TableShard:
    """A part of a table on a rank: offsets and sizes in rows and columns."""

    rank: int
    row: int
    column: int
    rows: int
    columns: int


@dataclass(frozen=True)
class ShardingPlan:
    """A sharding of every table of a model.

    Attributes:
        tables: the model's.
        shardings: of each.
        ranks: of the job.
        per_node: ranks of a node; ranks fill the nodes in order.

    Raises:
        ShardingError: a table has ranks that its kind cannot have.
    """

    tables: tuple[EmbeddingTable, ...]
    shardings: tuple[TableSharding, ...]
    ranks: int
    per_node: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.per_node < 1:
            raise ShardingError(f"{self.ranks} ranks, {self.per_node} to a node, are none; give at least one.")
        if len(self.tables) != len(self.shardings):
            raise ShardingError(f"{len(self.tables)} tables have {len(self.shardings)} shardings; each needs one.")
        for table, sharding in zip(self.tables, self.shardings, strict=True):
            if (reason := why_not(table, sharding, self.ranks, self.per_node)) is not None:
                raise ShardingError(f"Table {table.name!r} cannot be {sharding.kind.value}: {reason}.")

    def shards(self) -> Iterator[tuple[int, TableShard]]:
        """Every part of every table that lies on a rank: (row of the table, part)."""
        for i, (table, sharding) in enumerate(zip(self.tables, self.shardings, strict=True)):
            for shard in shards_of(table, sharding):
                yield i, shard

    def written(self) -> WrittenPlan:
        """The plan as its file has it.

        Tables lie in one module; of each: sharding type, compute kernel, ranks, its shards with offsets, sizes and
        placement, and the share of rows that is cached where some are.
        """
        module = {}
        for table, sharding in zip(self.tables, self.shardings, strict=True):
            fused = sharding.kind.fused
            shards = WrittenShards(tuple(
                WrittenShard((shard.row, shard.column), (shard.rows, shard.columns),
                             f"rank:{shard.rank}/cuda:{shard.rank % self.per_node}")
                for shard in shards_of(table, sharding)))
            kernel = kernel_name(sharding, table.trained)
            cached = WrittenCache(table.cache_load_factor) if sharding.location == "uvm_cached" else msgspec.UNSET
            module[table.name] = WrittenTable(sharding.kind.value, kernel, sharding.ranks, shards if fused else None,
                                              cached)
        return WrittenPlan(self.ranks, self.per_node, {MODULE: module})

    def to_document(self) -> dict[str, Any]:
        """The plan as plain values."""
        found: dict[str, Any] = msgspec.to_builtins(self.written())
        return found

    def save(self, path: PathLike) -> None:
        """Write it as JSON, atomically. Raises ``ForetraceError``."""
        with whole_file(path) as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(self.written()), indent=1) + b"\n")


def load_plan(path: PathLike, tables: Sequence[EmbeddingTable]) -> ShardingPlan:
    """Read a plan of these tables as ``ShardingPlan.save`` wrote it.

    Raises:
        ShardingError: it cannot be read, lacks a table, or has one that is not among these.
    """
    found = read_plan(path)
    return ShardingPlan(tuple(tables), found.shardings(tables), found.world_size, found.local_world_size)


def why_not(table: EmbeddingTable, sharding: TableSharding, ranks: int, per_node: int) -> str | None:
    """The reason why a table cannot lie so, as the end of a sentence; ``None`` if it can."""
    kind, on = sharding.kind, sharding.ranks
    if not on or min(on) < 0 or max(on) >= ranks:
        return f"its ranks {list(on)[:8]} are not among 0 to {ranks - 1}"
    if len(set(on)) < len(on):
        return "a rank is named twice"
    if kind is ShardKind.DATA_PARALLEL and sharding.location != "hbm":
        return "copies lie in the devices' memory"
    if kind is ShardKind.TABLE_WISE and len(on) != 1:
        return f"that is one rank, and {len(on)} are named"
    if kind is ShardKind.COLUMN_WISE and not can_split_columns(table.columns, len(on)):
        return f"{table.columns} columns are no {len(on)} equal parts of a multiple of {COLUMNS_MULTIPLE} columns"
    if kind in (ShardKind.ROW_WISE, ShardKind.DATA_PARALLEL) and on != tuple(range(ranks)):
        return f"that takes all {ranks} ranks in order"
    if kind is ShardKind.TABLE_ROW_WISE and on != node_ranks(on[0] // per_node, ranks, per_node):
        return f"that takes all ranks of one node, {per_node} to a node"
    return None


def can_split_columns(columns: int, parts: int) -> bool:
    """Return whether so many columns are ``parts`` equal parts that FBGEMM takes."""
    return parts >= 1 and columns % parts == 0 and (parts == 1 or columns // parts % COLUMNS_MULTIPLE == 0)


def node_ranks(node: int, ranks: int, per_node: int) -> tuple[int, ...]:
    """The ranks of a node."""
    return tuple(range(node * per_node, min((node + 1) * per_node, ranks)))


def shards_of(table: EmbeddingTable, sharding: TableSharding) -> list[TableShard]:
    """The parts of one table: blocks of rows are equal but for the last, which may be shorter or empty."""
    kind, on, rows, columns = sharding.kind, sharding.ranks, table.rows, table.columns
    if kind is ShardKind.COLUMN_WISE:
        width = columns // len(on)
        return [TableShard(rank, 0, i * width, rows, width) for i, rank in enumerate(on)]
    if kind in (ShardKind.ROW_WISE, ShardKind.TABLE_ROW_WISE):
        block = -(-rows // len(on))
        return [TableShard(rank, min(i * block, rows), 0, max(min(block, rows - i * block), 0), columns)
                for i, rank in enumerate(on)]
    return [TableShard(rank, 0, 0, rows, columns) for rank in on]


def checked_names(names: Mapping[str, Any], tables: Sequence[EmbeddingTable], what: str) -> None:
    """Raise ``ShardingError`` if one of the names is no table's."""
    known = {table.name for table in tables}
    for name in names:
        if name not in known:
            raise ShardingError(f"{what} names table {name!r}, which is not among the {len(known)} tables.")
