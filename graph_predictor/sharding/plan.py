"""``ShardingPlan``: where each embedding table lies, checked, and written and read as TorchRec writes such a plan.

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
from enum import Enum
from typing import Any

from tracer.decode import DecodeError, from_json
from tracer.errors import ForetraceError
from tracer.input_file import PathLike, read_input
from tracer.lookup_data.tables import EmbeddingTable
from tracer.output_file import whole_file

COLUMNS_MULTIPLE = 4
"""Columns of a shard are a multiple of this: what FBGEMM's kernels take."""
MODULE = "embeddings"
"""Name of the module that a written plan puts its tables in."""


class ShardingError(ForetraceError):
    """A sharding of tables is not possible, or not written as one."""


class ShardKind(str, Enum):
    """How one table is spread; the values are TorchRec's names."""

    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    DATA_PARALLEL = "data_parallel"

    @property
    def fused(self) -> bool:
        """Return whether the optimizer runs within the look-up's backward: not where gradients are all-reduced."""
        return self is not ShardKind.DATA_PARALLEL

    @staticmethod
    def of(text: str) -> ShardKind:
        """The kind of a name, also with hyphens or as TorchRec's tables abbreviate it (tw, cw, rw, twrw, dp).

        Raises:
            ShardingError: there is none.
        """
        plain = text.strip().lower().replace("-", "_")
        try:
            return ShardKind(_SHORT.get(plain, plain))
        except ValueError:
            raise ShardingError(f"{text!r} is no kind of sharding; known are "
                                f"{', '.join(kind.value for kind in ShardKind)}.") from None


_SHORT = {"tw": "table_wise", "cw": "column_wise", "rw": "row_wise", "twrw": "table_row_wise", "dp": "data_parallel"}
SHORT_KINDS = {ShardKind(name): short for short, name in _SHORT.items()}
"""Abbreviations for tables."""


@dataclass(frozen=True, slots=True)
class TableSharding:
    """How one table is spread.

    Attributes:
        kind: see the module.
        ranks: table-wise: the one rank; column-wise: the rank of each part of the columns, in their order;
            table-row-wise: the ranks of one node; else all ranks.
    """

    kind: ShardKind
    ranks: tuple[int, ...]


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

    def to_document(self) -> dict[str, Any]:
        """The plan as TorchRec's objects have it, as plain values.

        Tables lie in one module; of each: sharding type, compute kernel, ranks, and its shards with offsets, sizes and
        placement.
        """
        module: dict[str, Any] = {}
        for table, sharding in zip(self.tables, self.shardings, strict=True):
            fused = sharding.kind.fused
            module[table.name] = {
                "sharding_type": sharding.kind.value, "compute_kernel": "fused" if fused else "dense",
                "ranks": list(sharding.ranks),
                "sharding_spec": {"shards": [
                    {"shard_offsets": [shard.row, shard.column], "shard_sizes": [shard.rows, shard.columns],
                     "placement": f"rank:{shard.rank}/cuda:{shard.rank % self.per_node}"}
                    for shard in shards_of(table, sharding)]} if fused else None}
        return {"world_size": self.ranks, "local_world_size": self.per_node, "plan": {MODULE: module}}

    def save(self, path: PathLike) -> None:
        """Write it as JSON, atomically. Raises ``ForetraceError``."""
        import msgspec

        with whole_file(path) as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(self.to_document()), indent=1) + b"\n")


def load_plan(path: PathLike, tables: Sequence[EmbeddingTable]) -> ShardingPlan:
    """Read a plan of these tables as ``ShardingPlan.save`` wrote it.

    Raises:
        ShardingError: it cannot be read, lacks a table, or has one that is not among these.
    """
    try:
        return plan_of_document(from_json(read_input(path)), tables)
    except OSError as error:
        raise ShardingError(f"{path} cannot be read ({error.strerror or error}); check the path.") from None
    except DecodeError as error:
        raise ShardingError(f"{path} cannot be read as a plan: {error}.") from None


def plan_of_document(document: Any, tables: Sequence[EmbeddingTable]) -> ShardingPlan:
    """The plan of ``ShardingPlan.to_document``. Raises ``ShardingError``."""
    try:
        found: dict[str, TableSharding] = {}
        for module in document["plan"].values():
            for name, each in module.items():
                kind = ShardKind.of(str(each["sharding_type"]))
                found[name] = TableSharding(kind, tuple(int(rank) for rank in each["ranks"]))
        ranks, per_node = int(document["world_size"]), int(document["local_world_size"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ShardingError(f"This is no sharding plan ({type(error).__name__}: {error}); compare it with one that "
                            "foretrace shard --out writes.") from None
    if lacking := [table.name for table in tables if table.name not in found]:
        raise ShardingError(f"The plan says nothing of table {lacking[0]!r}; it must have all {len(tables)}.")
    if len(found) > len(tables):
        others = sorted(set(found) - {table.name for table in tables})
        raise ShardingError(f"The plan has table {others[0]!r}, which is not among the tables.")
    return ShardingPlan(tuple(tables), tuple(found[table.name] for table in tables), ranks, per_node)


def why_not(table: EmbeddingTable, sharding: TableSharding, ranks: int, per_node: int) -> str | None:
    """The reason why a table cannot lie so, as the end of a sentence; ``None`` if it can."""
    kind, on = sharding.kind, sharding.ranks
    if not on or min(on) < 0 or max(on) >= ranks:
        return f"its ranks {list(on)[:8]} are not among 0 to {ranks - 1}"
    if len(set(on)) < len(on):
        return "a rank is named twice"
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
