"""A sharding plan in TorchRec's form: how each embedding table is spread over ranks, and the plan's file.

::

    {"world_size": 4, "local_world_size": 4, "plan": {"embeddings": {"tables.0": {
        "sharding_type": "column_wise", "compute_kernel": "fused", "ranks": [2, 0],
        "sharding_spec": {"shards": [{"shard_offsets": [0, 0], "shard_sizes": [1000, 16], "placement": "rank:2/cuda:2"},
                                     …]}}, …}}}

Source: TorchRec, ``torchrec.distributed.types.ShardingType`` and ``ParameterSharding``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import msgspec

from tracer.errors import ForetraceError
from tracer.guard import MOST_RANKS
from tracer.input_file import DecodeError, PathLike, from_json, read_input
from tracer.lookup_data.tables import EmbeddingTable

Ranks = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
"""A number of ranks."""


class ShardingError(ForetraceError):
    """A sharding of tables is impossible, or its text is not valid."""


class ShardKind(str, Enum):
    """The way in which one table is spread; the values are TorchRec's names."""

    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    DATA_PARALLEL = "data_parallel"

    @property
    def fused(self) -> bool:
        """Return whether the optimizer runs within the look-up's backward: not if gradients are all-reduced."""
        return self is not ShardKind.DATA_PARALLEL

    @staticmethod
    def of(text: str) -> ShardKind:
        """Return the kind with a name, which may have hyphens or be TorchRec's abbreviation (tw, cw, rw, twrw, dp).

        Raises:
            ShardingError: there is no such kind.
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
    """The way in which one embedding table is spread over ranks.

    Attributes:
        kind: One of ``ShardKind``.
        ranks: Table-wise: the one rank; column-wise: the rank of each part of the columns, in order; table-row-wise:
            the ranks of one node; otherwise all ranks.
        location: Location of the weights (``tracer.lookup_data.tables.LOCATIONS``).
    """

    kind: ShardKind
    ranks: tuple[int, ...]
    location: str = "hbm"


def kernel_name(sharding: TableSharding, trained: bool) -> str:
    """Return TorchRec's name of the look-up kernel (``EmbeddingComputeKernel``)."""
    if not sharding.kind.fused:
        return "dense"
    return _KERNELS[sharding.location].replace("fused", "fused" if trained else "quant", 1)


def location_of_kernel(kernel: str) -> str:
    """Return the location of the weights for a kernel's name.

    Raises:
        ShardingError: there is no such kernel.
    """
    plain = "fused" if kernel == "dense" else kernel.replace("quant", "fused", 1)
    for location, known in _KERNELS.items():
        if plain == known:
            return location
    raise ShardingError(f"{kernel!r} is no compute kernel that is known; known are dense, "
                        f"{', '.join(_KERNELS.values())}, and these with quant in place of fused.")


_KERNELS = {"hbm": "fused", "uvm": "fused_uvm", "uvm_cached": "fused_uvm_caching"}


class WrittenShard(msgspec.Struct, frozen=True):
    """A part of a table in the file: offsets and sizes in rows and columns."""

    shard_offsets: tuple[int, int]
    shard_sizes: tuple[int, int]
    placement: str


class WrittenShards(msgspec.Struct, frozen=True):
    """All parts of a table in the file."""

    shards: tuple[WrittenShard, ...]


class WrittenCache(msgspec.Struct, frozen=True):
    """The cache of a table in the host's memory: the share of its rows that the device keeps."""

    load_factor: float


class WrittenTable(msgspec.Struct, frozen=True):
    """A table in the file; ``ranks`` may be missing (null) if all ranks have it."""

    sharding_type: str
    compute_kernel: str
    ranks: tuple[int, ...] | None = None
    sharding_spec: WrittenShards | None = None
    cache_params: WrittenCache | msgspec.UnsetType = msgspec.UNSET


class WrittenPlan(msgspec.Struct, frozen=True):
    """The file: tables by name, grouped by the modules that hold them."""

    world_size: Ranks
    local_world_size: Ranks
    plan: dict[str, dict[str, WrittenTable]]

    def shardings(self, tables: Sequence[EmbeddingTable]) -> tuple[TableSharding, ...]:
        """Return the spread of each of these tables.

        Raises:
            ShardingError: the plan lacks a table, has one that is not among these, or an unknown kind or compute
                kernel.
        """
        found = {name: TableSharding(ShardKind.of(each.sharding_type), tuple(
            range(self.world_size) if each.ranks is None else each.ranks), location_of_kernel(each.compute_kernel))
            for module in self.plan.values() for name, each in module.items()}
        if lacking := [table.name for table in tables if table.name not in found]:
            raise ShardingError(f"The plan says nothing of table {lacking[0]!r}; it must have all {len(tables)}.")
        if len(found) > len(tables):
            others = sorted(set(found) - {table.name for table in tables})
            raise ShardingError(f"The plan has table {others[0]!r}, which is not among the tables.")
        written = {name: each for module in self.plan.values() for name, each in module.items()}
        for table in tables:
            _check_size(table, written[table.name])
            if odd := [rank for rank in found[table.name].ranks if not 0 <= rank < self.world_size]:
                raise ShardingError(f"The plan has table {table.name!r} on rank {odd[0]}, and is for "
                                    f"{self.world_size} ranks; make it anew.")
        return tuple(found[table.name] for table in tables)


def _check_size(table: EmbeddingTable, written: WrittenTable) -> None:
    """Raise ``ShardingError`` if the parts of a table in a plan add up to another size."""
    if written.sharding_spec is None:
        return
    shards = written.sharding_spec.shards
    rows, columns = (max((shard.shard_offsets[axis] + shard.shard_sizes[axis] for shard in shards), default=0)
                     for axis in (0, 1))
    covered = sum(shard.shard_sizes[0] * shard.shard_sizes[1] for shard in shards)
    if (rows, columns) != (table.rows, table.columns):
        raise ShardingError(f"The plan's parts of table {table.name!r} are of {rows:,} rows and {columns:,} columns, "
                            f"and the table has {table.rows:,} and {table.columns:,}; make a plan for these tables.")
    if covered != rows * columns:
        raise ShardingError(f"The plan's parts of table {table.name!r} leave some of it out or overlap; make it anew.")


def read_plan(path: PathLike) -> WrittenPlan:
    """Read the file of a plan.

    Raises:
        ShardingError: it cannot be read, or is no plan.
    """
    try:
        return from_json(read_input(path), WrittenPlan)
    except OSError as error:
        raise ShardingError(f"{path} cannot be read ({error.strerror or error}); check the path.") from None
    except DecodeError as error:
        raise ShardingError(f"{path} is no sharding plan ({error}); compare it with one that foretrace shard --out "
                            "writes.") from None
