"""The tables to be sharded, and the ranks they go to: ``ShardingProblem``.

``ShardingPlan``: where each embedding table lies, checked, and written and read as ``tracer.lookup_data.plan_file``
has it.

==================  ==================================  ==============================================================
kind                a rank holds                        what moves in forward (backward: the reverse)
==================  ==================================  ==============================================================
``table-wise``      a whole table                       indices to it; pooled vectors from it (all-to-all).
``column-wise``     some columns of every row           likewise, the indices once for each rank that has columns.
``row-wise``        a block of rows, on all ranks       indices to their rows; partial sums (reduce-scatter).
``table-row-wise``  a block of rows, within one node    partial sums within the node, then an all-to-all across nodes.
``data-parallel``   a whole table, on all ranks         nothing; dense gradients are all-reduced.
==================  ==================================  ==============================================================

Source: TorchRec, ``torchrec.distributed.types.ShardingType`` and ``sharding_plan``.

Look-ups and exchanges as a recording has them: measured over modelled, which every sharding's prices are scaled by.

A sharding's look-ups take measured × model(sharding) / model(recorded), as all recorded work does after a change
(``prediction.pricing``); exchanges likewise, where the job stays on its cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from graph_predictor.prediction.pricing import Prices, change_ratios
from kernel_models.collectives import CollectiveModel, Placement
from kernel_models.device import DeviceSpec
from kernel_models.pricing import Models
from kernel_models.spreads import MEASURED_KERNELS
from tracer.arrays import Bool, Float64, Int64
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
from tracer.lookup_data.tables import LOCATIONS, EmbeddingTable
from tracer.output_file import whole_file


@dataclass(frozen=True, slots=True)
class WorkAnchor:
    """Measured work of one kind.

    Attributes:
        measured_us: of the recorded step.
        modelled_us, low_us, high_us: what the models say of it there, with the 80% interval.
        noise: log half width of the 80% interval of the measured time.
        elsewhere: whether the job is to run on another device.
    """

    measured_us: float
    modelled_us: float
    low_us: float
    high_us: float
    noise: float = MEASURED_KERNELS
    elsewhere: bool = False

    @property
    def factor(self) -> float:
        """Measured over modelled."""
        return self.measured_us / self.modelled_us

    def times(self, us: Float64, low: Float64, high: Float64) -> tuple[Float64, Float64, Float64]:
        """Times and intervals of modelled work, anchored, µs [n]; nothing stays nothing."""
        before, after = prices(np.full(len(us), self.modelled_us), np.full(len(us), self.low_us),
                                np.full(len(us), self.high_us)), prices(us, low, high)
        found = change_ratios(before, after, self.elsewhere)
        time = self.measured_us * found.ratio
        return (time, time * np.exp(-np.hypot(found.low, self.noise)),
                time * np.exp(np.hypot(found.high, self.noise)))


@dataclass(frozen=True, slots=True)
class Anchors:
    """The anchors of a problem; ``None`` where nothing was measured."""

    forward: WorkAnchor | None = None
    backward: WorkAnchor | None = None
    exchanges: WorkAnchor | None = None

    @staticmethod
    def factor(anchor: WorkAnchor | None) -> float:
        """The factor on the models' times; 1 without an anchor."""
        return 1.0 if anchor is None else anchor.factor


NO_ANCHORS = Anchors()
"""Anchors of a problem that nothing was measured of."""


def prices(us: Float64, low: Float64, high: Float64) -> Prices:
    """Times and ends of their intervals, µs, as ``Prices`` has them."""
    safe = np.maximum(us, 1e-9)
    return Prices(us, np.log(np.maximum(low, 1e-9) / safe), np.log(np.maximum(high, 1e-9) / safe))


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
    """Return whether ``columns`` columns divide into ``parts`` equal parts that FBGEMM takes."""
    return parts >= 1 and columns % parts == 0 and (parts == 1 or columns // parts % COLUMNS_MULTIPLE == 0)


def node_ranks(node: int, ranks: int, per_node: int) -> tuple[int, ...]:
    """The ranks of a node."""
    return tuple(range(node * per_node, min((node + 1) * per_node, ranks)))


def shards_of(table: EmbeddingTable, sharding: TableSharding) -> list[TableShard]:
    """The parts of one table: blocks of rows are equal, except the last, which may be shorter or empty."""
    kind, on, rows, columns = sharding.kind, sharding.ranks, table.rows, table.columns
    if kind is ShardKind.COLUMN_WISE:
        width = columns // len(on)
        return [TableShard(rank, 0, i * width, rows, width) for i, rank in enumerate(on)]
    if kind in (ShardKind.ROW_WISE, ShardKind.TABLE_ROW_WISE):
        block = -(-rows // len(on))
        return [TableShard(rank, min(i * block, rows), 0, max(min(block, rows - i * block), 0), columns)
                for i, rank in enumerate(on)]
    return [TableShard(rank, 0, 0, rows, columns) for rank in on]


RESERVED_BYTES = 3e9
"""Memory of a device for contexts, workspaces, NCCL's buffers and fragmentation: what plans assume too."""


@dataclass(frozen=True, slots=True)
class DenseWork:
    """A rank's work outside the look-ups for one step, µs with its 80% interval; nothing where only tables are given.

    Attributes:
        bottom_forward, bottom_backward: of the MLP that needs no look-ups: it hides the exchange of pooled vectors.
        top_forward, top_backward: of the rest: interaction, top MLP and loss.
        optimizer: of the dense parameters.
        inputs: copies of a batch to the device; with a pipeline they are the next batch's and overlap the rest.
        low, high: ends of the interval of all of it.
        gradient_bytes: that data parallelism all-reduces.
        memory_bytes: parameters, gradients, optimizer state and activations.
        sources: µs by ``Source``.
        host: in which a recorded step's device had nothing to do: it is the same for all shardings.
    """

    bottom_forward: float = 0.0
    bottom_backward: float = 0.0
    top_forward: float = 0.0
    top_backward: float = 0.0
    optimizer: float = 0.0
    inputs: float = 0.0
    low: float = 0.0
    high: float = 0.0
    gradient_bytes: float = 0.0
    memory_bytes: float = 0.0
    sources: Mapping[int, float] = field(default_factory=dict)
    host: float = 0.0

    @property
    def us(self) -> float:
        """All of it but the inputs' and the host's."""
        return (self.bottom_forward + self.bottom_backward + self.top_forward + self.top_backward + self.optimizer)


@dataclass(frozen=True)
class ShardingProblem:
    """Tables, the cluster they are sharded over, and what a plan may do.

    Attributes:
        tables: with names of their own.
        samples: of a batch on one rank.
        ranks: of the job.
        device: of each rank.
        collectives: the cluster and what is known of its collectives.
        models: fitted models of the device.
        dense: work outside the look-ups.
        memory_bytes: of a device; by default all it has.
        host_bytes: of a node's host, for tables: each of its ranks has an equal share. With any, a table that lies in
            the device's memory may lie there too; without, none may.
        kinds: that tables may have.
        pinned: tables that must lie whole on a rank.
        index_bytes: of an index.
        pipelined: whether the next batch's indices are exchanged while this one's dense part runs, as TorchRec's
            ``TrainPipelineSparseDist`` does.
        anchors: what was measured of look-ups and exchanges.
        fused: whether a rank's tables are looked up by one kernel, whose gradient has the optimizer in it (FBGEMM's).
            Else table by table with a sparse gradient and an optimizer's step, as ``nn.EmbeddingBag`` does.

    Raises:
        ShardingError: the tables are larger than all memory, some are trained and others not, or a pin or number is
            not possible.
    """

    tables: tuple[EmbeddingTable, ...]
    samples: int
    ranks: int
    device: DeviceSpec
    collectives: CollectiveModel
    models: Models | None = None
    dense: DenseWork = DenseWork()
    memory_bytes: float | None = None
    host_bytes: float = 0.0
    kinds: frozenset[ShardKind] = frozenset(ShardKind)
    pinned: Mapping[str, int] = field(default_factory=dict)
    index_bytes: float = 8.0
    pipelined: bool = True
    anchors: Anchors = NO_ANCHORS
    fused: bool = True

    def __post_init__(self) -> None:
        self.collectives.check_fits(self.ranks)
        if self.samples < 1:
            raise ShardingError(f"A batch of {self.samples} samples on each rank is none; give at least one.")
        if not self.kinds:
            raise ShardingError("No kind of sharding is allowed; allow at least one.")
        known = {table.name for table in self.tables}
        for name, rank in self.pinned.items():
            if name not in known:
                raise ShardingError(f"--pin names table {name!r}, which is not among the {len(known)} tables.")
            if not 0 <= rank < self.ranks:
                raise ShardingError(f"--pin puts table {name!r} on rank {rank}; ranks are 0 to {self.ranks - 1}.")
        self._check_tables_agree()
        self._check_host_memory()
        # What a recorded step had is not asked (infinite).
        if self.memory_bytes is not None and self.device.memory_gb * 1e9 < self.memory_bytes < float("inf"):
            raise ShardingError(f"A {self.device.name} has {self.device.memory_gb:,.4g} GB, and --memory gives it "
                                f"{self.memory_bytes / 1e9:,.4g}; leave --memory out to use all of it.")
        if self.room_bytes <= 0:
            raise ShardingError(
                f"Of {self.limit_bytes / 1e9:,.4g} GB of a {self.device.name}, {RESERVED_BYTES / 1e9:g} are reserved, "
                f"the dense part takes {self.dense.memory_bytes / 1e9:,.4g} and vectors of {self.samples:,} samples "
                f"{self.received_bytes / 1e9:,.4g}, so that nothing is left for tables; take a smaller --batch or "
                "raise --memory.")
        needed = sum(table.weight_bytes + table.state_bytes for table in self.tables)
        room = max(self.room_bytes, 0.0) * self.ranks
        if needed > room + self.host_room_bytes * self.ranks:
            host = f", their hosts {self.host_room_bytes * self.ranks / 1e9:,.4g} GB" if self.host_bytes else ""
            raise ShardingError(
                f"The tables take {needed / 1e9:,.4g} GB with their optimizer's state, and {self.ranks} × "
                f"{self.device.name} have {room / 1e9:,.4g} GB for them{host}; take more GPUs, a smaller dtype, raise "
                "--memory, or put tables in the hosts' memory with --host-memory.")

    def _check_tables_agree(self) -> None:
        for table in self.tables:
            if table.location != "hbm" and self.device.vendor == "host":
                raise ShardingError(f"Table {table.name!r} is to be read over a device's link to its host "
                                    f"({table.location}), and {self.device.name} has none; give it location hbm, or "
                                    "name a GPU with --device.")
            if table.location != "hbm" and not self.host_bytes:
                raise ShardingError(f"Table {table.name!r} lies in the host's memory ({table.location}), and no host "
                                    "memory is given; say how much a node has for tables with --host-memory.")
            if table.trained != self.trained:
                odd, other = (table, self.tables[0]) if self.trained else (self.tables[0], table)
                raise ShardingError(f"Table {odd.name!r} is only looked up and {other.name!r} is trained; one step "
                                    "does either, so give all tables optimizer none, or none of them.")

    def _check_host_memory(self) -> None:
        if not self.host_bytes:
            return
        if self.device.vendor == "host":
            raise ShardingError(f"{self.device.name} has its tables in the host's memory anyway; leave --host-memory "
                                "out, or name a GPU with --device.")
        if not self.fused:
            raise ShardingError("Tables in the hosts' memory are looked up by FBGEMM's fused kernels alone, and these "
                                "tables are looked up one by one; say --fused, or leave --host-memory out.")

    @property
    def additive(self) -> bool:
        """Return whether the times of a rank's tables add up: table by table, or on a CPU, where nothing overlaps."""
        return not self.fused or self.device.vendor == "host"

    @property
    def trained(self) -> bool:
        """Return whether the step trains its tables, or only looks them up."""
        return not self.tables or self.tables[0].trained

    @property
    def host_room_bytes(self) -> float:
        """Memory of its host that a rank's tables may have."""
        return self.host_bytes / self.per_node

    def locations(self, table: EmbeddingTable) -> tuple[str, ...]:
        """Where a table's weights may lie: where it says, or if that is the device and hosts have memory anywhere."""
        return LOCATIONS if table.location == "hbm" and self.host_bytes else (table.location,)

    @property
    def limit_bytes(self) -> float:
        """Memory of a device."""
        return self.memory_bytes if self.memory_bytes is not None else self.device.memory_gb * 1e9

    @cached_property
    def room_bytes(self) -> float:
        """Memory that tables and their buffers may have on a rank."""
        return self.limit_bytes - RESERVED_BYTES - self.dense.memory_bytes - self.received_bytes

    @cached_property
    def received_bytes(self) -> float:
        """Pooled vectors of a rank's own samples, and their gradients: the same under every plan."""
        vectors = sum(self.vectors(table, self.samples) * table.columns * table.output_bytes for table in self.tables)
        return (1.0 + self.trained) * vectors

    @property
    def batch(self) -> int:
        """Samples of a step on all ranks."""
        return self.samples * self.ranks

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return min(self.collectives.topology.node.gpus, self.ranks)

    @property
    def nodes(self) -> int:
        """Nodes that have ranks."""
        return -(-self.ranks // self.per_node)

    @property
    def even_nodes(self) -> bool:
        """Return whether every node has as many ranks as the others."""
        return self.ranks % self.per_node == 0

    @property
    def everywhere(self) -> Placement:
        """All ranks."""
        return Placement.even(self.ranks, self.per_node)

    def allowed(self, table: int, free: Bool) -> Bool:
        """Return which of some ranks [ranks] may have a table: only the one it is pinned to, if it is."""
        pin = self.pinned.get(self.tables[table].name)
        return free if pin is None else free & (np.arange(self.ranks) == pin)

    def vectors(self, table: EmbeddingTable, samples: float) -> float:
        """Vectors that a table gives for ``samples`` samples: one each with pooling, else one a look-up."""
        return samples if table.pooling != "none" else table.lookups(samples)


def own_order(tables: Sequence[EmbeddingTable]) -> Int64:
    """An order of tables by their properties, names last. Searches and draws follow it, so that their results do not
    depend on the order in which tables are given."""
    keys = [(*astuple(table)[1:], table.name) for table in tables]
    return np.array(sorted(range(len(keys)), key=lambda i: keys[i]), np.int64)
