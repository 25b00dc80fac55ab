"""``ShardingProblem``: the tables to be sharded and the ranks they go to. ``ShardingPlan``: where each table lies.

A plan is checked when it is made. Its file has the format of ``tracer.lookup_data.plan_file``.

==================  ==================================  ==============================================================
kind                a rank holds                        what moves in forward (backward: the reverse)
==================  ==================================  ==============================================================
``table-wise``      a whole table                       indices to it; pooled vectors from it (all-to-all).
``column-wise``     some columns of every row           the same; indices go to each rank that has columns.
``row-wise``        a block of rows, on all ranks       indices to their rows; partial sums (reduce-scatter).
``table-row-wise``  a block of rows, within one node    partial sums within the node, then an all-to-all across nodes.
``data-parallel``   a whole table, on all ranks         nothing; dense gradients are all-reduced.
==================  ==================================  ==============================================================

Source: TorchRec, ``torchrec.distributed.types.ShardingType`` and ``sharding_plan``.

``Anchors``: measured over modelled time of a recording's look-ups and exchanges, by which all prices are scaled. A
sharding's look-ups take measured × model(sharding) / model(recorded), like any recorded work after a change
(``prediction.pricing``). Exchanges are scaled in the same way if the job stays on its cluster.
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
    """Work of one kind in a recorded step: its measured and its modelled time.

    Attributes:
        measured_us: time in the recorded step.
        modelled_us, low_us, high_us: time that the models predict for it there, and the 80% interval.
        noise: half width of the measured time's 80% interval, as a logarithm.
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
        """Measured over modelled time."""
        return self.measured_us / self.modelled_us

    def times(self, us: Float64, low: Float64, high: Float64) -> tuple[Float64, Float64, Float64]:
        """Return modelled times and intervals of other work, µs [n], scaled by this anchor; 0 stays 0."""
        before, after = prices(np.full(len(us), self.modelled_us), np.full(len(us), self.low_us),
                                np.full(len(us), self.high_us)), prices(us, low, high)
        found = change_ratios(before, after, self.elsewhere)
        time = self.measured_us * found.ratio
        return (time, time * np.exp(-np.hypot(found.low, self.noise)),
                time * np.exp(np.hypot(found.high, self.noise)))


@dataclass(frozen=True, slots=True)
class Anchors:
    """The measurements (``WorkAnchor``) of a problem by kind of work; ``None`` for a kind that was not measured."""

    forward: WorkAnchor | None = None
    backward: WorkAnchor | None = None
    exchanges: WorkAnchor | None = None

    @staticmethod
    def factor(anchor: WorkAnchor | None) -> float:
        """Return the factor on the models' times; 1 without an anchor."""
        return 1.0 if anchor is None else anchor.factor


NO_ANCHORS = Anchors()
"""Anchors of a problem without measurements."""


def prices(us: Float64, low: Float64, high: Float64) -> Prices:
    """Return times and the ends of their intervals, µs, as ``Prices``."""
    safe = np.maximum(us, 1e-9)
    return Prices(us, np.log(np.maximum(low, 1e-9) / safe), np.log(np.maximum(high, 1e-9) / safe))


COLUMNS_MULTIPLE = 4
"""FBGEMM's kernels need the columns of a shard to be a multiple of this."""
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
        tables: the model's tables.
        shardings: the sharding of each table.
        ranks: number of ranks of the job.
        per_node: number of ranks on a node; ranks fill the nodes in order.

    Raises:
        ShardingError: a table's ranks are not possible for its kind of sharding.
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
        """Yield every part of a table on a rank, with the table's index."""
        for i, (table, sharding) in enumerate(zip(self.tables, self.shardings, strict=True)):
            for shard in shards_of(table, sharding):
                yield i, shard

    def written(self) -> WrittenPlan:
        """Return the plan in the form of its file.

        Tables lie in one module. Each has its sharding type, compute kernel, ranks, and its shards with offsets, sizes
        and placement, and the cached share of its rows if any are cached.
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
        """Return the plan as plain dictionaries and lists."""
        found: dict[str, Any] = msgspec.to_builtins(self.written())
        return found

    def save(self, path: PathLike) -> None:
        """Write the plan as JSON, atomically. Raises ``ForetraceError``."""
        with whole_file(path) as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(self.written()), indent=1) + b"\n")


def load_plan(path: PathLike, tables: Sequence[EmbeddingTable]) -> ShardingPlan:
    """Read a plan of these tables as ``ShardingPlan.save`` wrote it.

    Raises:
        ShardingError: the file cannot be read, lacks a table, or has one that is not among ``tables``.
    """
    found = read_plan(path)
    return ShardingPlan(tuple(tables), found.shardings(tables), found.world_size, found.local_world_size)


def why_not(table: EmbeddingTable, sharding: TableSharding, ranks: int, per_node: int) -> str | None:
    """Return why a table cannot have a sharding, as the end of a sentence; ``None`` if it can."""
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
    """Return the ranks of a node."""
    return tuple(range(node * per_node, min((node + 1) * per_node, ranks)))


def shards_of(table: EmbeddingTable, sharding: TableSharding) -> list[TableShard]:
    """Return the parts of one table. Blocks of rows are equal, except the last, which may be shorter or empty."""
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
"""Memory of a device for contexts, workspaces, NCCL's buffers and fragmentation; ``plan`` assumes the same."""


@dataclass(frozen=True, slots=True)
class DenseWork:
    """A rank's work outside the look-ups in one step, µs, with its 80% interval; 0 if only tables are given.

    Attributes:
        bottom_forward, bottom_backward: the MLP that needs no look-ups; it hides the exchange of pooled vectors.
        top_forward, top_backward: the rest: interaction, top MLP and loss.
        optimizer: the optimizer's pass over the dense parameters.
        inputs: copies of a batch to the device; with a pipeline, those of the next batch, which overlap the rest.
        low, high: ends of the interval of the sum.
        gradient_bytes: gradients that data parallelism all-reduces.
        memory_bytes: parameters, gradients, optimizer state and activations.
        sources: µs by ``Source``.
        host: time in which the recorded step's device was idle, waiting for the host; equal for all shardings.
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
        """Sum of the times, without ``inputs`` and ``host``."""
        return (self.bottom_forward + self.bottom_backward + self.top_forward + self.top_backward + self.optimizer)


@dataclass(frozen=True)
class ShardingProblem:
    """Tables, the cluster they are sharded over, and what a plan may do.

    Attributes:
        tables: the tables, with unique names.
        samples: samples of a batch on one rank.
        ranks: number of ranks of the job.
        device: the device of each rank.
        collectives: prices of collectives on the cluster.
        models: models fitted for the device.
        dense: work outside the look-ups.
        memory_bytes: memory of a device to use; by default all of it.
        host_bytes: memory of a node's host for tables, shared evenly by its ranks. If positive, a table whose location
            is the device may also lie in the host's memory.
        kinds: kinds of sharding that tables may have.
        pinned: rank of each table that must lie whole on that rank, by name.
        index_bytes: bytes of one index.
        pipelined: whether the next batch's indices are exchanged during this batch's dense part, as in TorchRec's
            ``TrainPipelineSparseDist``.
        anchors: measurements of look-ups and exchanges.
        fused: whether one kernel looks up all of a rank's tables and its backward includes the optimizer (FBGEMM).
            If not, each table has a look-up, a sparse gradient and an optimizer step, as with ``nn.EmbeddingBag``.

    Raises:
        ShardingError: the tables exceed all memory, only some of them are trained, or a pin or number is not possible.
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
        # A recorded step's device may have any memory (infinite).
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
        """Whether the times of a rank's tables add up: with one kernel a table, or on a CPU, where nothing overlaps."""
        return not self.fused or self.device.vendor == "host"

    @property
    def trained(self) -> bool:
        """Whether the step trains its tables; else it only looks them up."""
        return not self.tables or self.tables[0].trained

    @property
    def host_room_bytes(self) -> float:
        """Memory of the host that one rank's tables may use, bytes."""
        return self.host_bytes / self.per_node

    def locations(self, table: EmbeddingTable) -> tuple[str, ...]:
        """Return where a table's weights may lie: its location, or anywhere if that is the device and hosts have
        room."""
        return LOCATIONS if table.location == "hbm" and self.host_bytes else (table.location,)

    @property
    def limit_bytes(self) -> float:
        """Usable memory of a device, bytes."""
        return self.memory_bytes if self.memory_bytes is not None else self.device.memory_gb * 1e9

    @cached_property
    def room_bytes(self) -> float:
        """Memory for tables and their buffers on a rank, bytes."""
        return self.limit_bytes - RESERVED_BYTES - self.dense.memory_bytes - self.received_bytes

    @cached_property
    def received_bytes(self) -> float:
        """Bytes of pooled vectors of a rank's own samples, and of their gradients; equal under every plan."""
        vectors = sum(self.vectors(table, self.samples) * table.columns * table.output_bytes for table in self.tables)
        return (1.0 + self.trained) * vectors

    @property
    def batch(self) -> int:
        """Samples of a step, over all ranks."""
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
        """Whether all nodes have equally many ranks."""
        return self.ranks % self.per_node == 0

    @property
    def everywhere(self) -> Placement:
        """Placement of a collective over all ranks."""
        return Placement.even(self.ranks, self.per_node)

    def allowed(self, table: int, free: Bool) -> Bool:
        """Return which of the ``free`` ranks [ranks] may hold a table; for a pinned table, only its rank."""
        pin = self.pinned.get(self.tables[table].name)
        return free if pin is None else free & (np.arange(self.ranks) == pin)

    def vectors(self, table: EmbeddingTable, samples: float) -> float:
        """Return the number of vectors that a table gives: one a sample with pooling, else one a look-up."""
        return samples if table.pooling != "none" else table.lookups(samples)


def own_order(tables: Sequence[EmbeddingTable]) -> Int64:
    """Return an order of the tables by their properties, by name last. Searches and random draws follow it, so their
    results do not depend on the order in which tables are given."""
    keys = [(*astuple(table)[1:], table.name) for table in tables]
    return np.array(sorted(range(len(keys)), key=lambda i: keys[i]), np.int64)
