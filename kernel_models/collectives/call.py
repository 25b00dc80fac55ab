"""``CollectiveCall``: one collective by what it moves; ``CollectiveBatch``: many; ``CommTimes``: their times.

One convention of size holds everywhere: ``payload_bytes`` is nccl-tests' *size* column, the whole buffer of a rank.

- all_reduce: The buffer that is reduced.
- all_gather: The gathered output (each rank contributes ``payload / ranks``).
- reduce_scatter: The input (each rank keeps ``payload / ranks``).
- all_to_all: The input of a rank: all bytes it sends, to itself too; where ranks differ, see ``uneven_all_to_all``.
- broadcast, reduce: The buffer.
- send_recv: The message (``send`` and ``recv`` are the two ends of one message).
- barrier: Nothing (priced as an all-reduce of four bytes, as PyTorch and NCCL do it).

so that busbw = payload / time × ``bus_factor``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kernel_models.op_call import Source, Times
from tracer.arrays import Bool, Float64, Int64
from tracer.errors import ForetraceError
from tracer.guard import MOST_RANKS

BARRIER_BYTES = 4.0
"""Payload of a barrier: PyTorch and NCCL run it as an all-reduce of one 4-byte element."""


class CommError(ForetraceError):
    """A collective, topology, measurement or profile of collectives is not usable."""


class CollectiveKind(IntEnum):
    """Kinds of collectives; the names equal those of ``CollectiveTable.kind``."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_TO_ALL = 3
    BROADCAST = 4
    REDUCE = 5
    SEND_RECV = 6
    BARRIER = 7

    @property
    def label(self) -> str:
        """The kind's name in lower case, as commands, files and traces write it."""
        return self.name.lower()


_ALIASES = {
    "alltoall": "all_to_all", "alltoallv": "all_to_all", "all_to_all_single": "all_to_all",
    "alltoallsingle": "all_to_all",
    "allreduce": "all_reduce", "allgather": "all_gather", "allgatherbase": "all_gather",
    "all_gather_into_tensor": "all_gather", "reducescatter": "reduce_scatter", "reducescatterbase": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "sendrecv": "send_recv", "send": "send_recv", "recv": "send_recv",
    "p2p": "send_recv", "bcast": "broadcast",
}

DTYPE_BYTES = {"int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2,
               "int16": 2, "float32": 4, "int32": 4, "uint32": 4, "float64": 8, "int64": 8, "uint64": 8}
"""Bytes of an element, by PyTorch's names."""
DTYPES = tuple(DTYPE_BYTES)
_DTYPE_ALIASES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
                  "double": "float64", "fp64": "float64", "int": "int32", "long": "int64", "char": "int8",
                  "byte": "uint8",
                  "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "long int": "int64",
                  "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "half_float": "float16"}


def collective_kind(name: str) -> CollectiveKind:
    """Return the kind of collective with a name such as "all_reduce", "AllReduce" or "alltoall_perf".

    Raises:
        CommError: No collective has that name.
    """
    plain = name.strip().lower().replace("-", "_").removesuffix("_perf")
    plain = _ALIASES.get(plain, _ALIASES.get(plain.replace("_", ""), plain))
    try:
        return CollectiveKind[plain.upper()]
    except KeyError:
        raise CommError(f"{name!r} is no collective foretrace knows; it knows "
                        f"{', '.join(kind.label for kind in CollectiveKind)}.") from None


def dtype_name(name: str) -> str:
    """Return PyTorch's name of a dtype, given PyTorch's or NCCL's name.

    Raises:
        CommError: No such dtype.
    """
    plain = name.strip().lower().removeprefix("torch.").removeprefix("nccl")
    plain = _DTYPE_ALIASES.get(plain, plain)
    if plain not in DTYPE_BYTES:
        raise CommError(f"{name!r} is no dtype foretrace knows; it knows {', '.join(DTYPES)}.")
    return plain


def bus_factor(kind: CollectiveKind, ranks: int) -> float:
    """Return the bytes that cross the busiest link per byte of payload (nccl-tests, PERFORMANCE.md)."""
    if ranks <= 1:
        return 0.0
    if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.BARRIER):
        return 2.0 * (ranks - 1) / ranks
    if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL):
        return (ranks - 1) / ranks
    return 1.0


@dataclass(frozen=True, slots=True)
class Placement:
    """The number of ranks of a group on each node: ``per_node`` has an entry for each node with at least one rank."""

    per_node: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.per_node or min(self.per_node) < 1:
            raise CommError(f"A group needs a rank on each of its nodes, and {self.per_node} has none on some.")

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the group."""
        return sum(self.per_node)

    @property
    def nodes(self) -> int:
        """Number of nodes with ranks of the group."""
        return len(self.per_node)

    @property
    def widest(self) -> int:
        """Most ranks on one node."""
        return max(self.per_node)

    @property
    def narrowest(self) -> int:
        """Fewest ranks on one node."""
        return min(self.per_node)

    @staticmethod
    def even(ranks: int, per_node: int) -> Placement:
        """Return the placement of ``ranks`` in blocks of ``per_node``; the last node holds the remainder."""
        if ranks < 1 or per_node < 1:
            raise CommError(f"{ranks} ranks cannot lie {per_node} to a node; both must be at least one.")
        if ranks > MOST_RANKS:
            raise CommError(f"{ranks} ranks are more than any job has; a group has at most {MOST_RANKS:,}.")
        full, rest = divmod(ranks, per_node)
        return Placement((per_node,) * full + ((rest,) if rest else ()))


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective of one group.

    Attributes:
        kind: the kind of collective.
        payload_bytes: nccl-tests' size: the whole buffer of a rank (see the module).
        placement: number of ranks of the group on each node.
        dtype: PyTorch's name of the element type.
    """

    kind: CollectiveKind
    payload_bytes: float
    placement: Placement
    dtype: str = "float32"

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the group."""
        return self.placement.ranks


@dataclass(slots=True)
class CollectiveBatch:
    """Columns of n collectives. ``dtype`` holds indices into ``DTYPES``; the last four are the ``Placement``."""

    kind: Int64
    payload_bytes: Float64
    dtype: Int64
    ranks: Int64
    nodes: Int64
    widest: Int64
    narrowest: Int64

    def __len__(self) -> int:
        return len(self.kind)

    @staticmethod
    def of(kind: CollectiveKind, payload_bytes: npt.ArrayLike, placement: Placement,
           dtype: str = "float32") -> CollectiveBatch:
        """Return the batch of collectives that differ in size only."""
        payload = np.atleast_1d(np.asarray(payload_bytes, np.float64))
        n = len(payload)

        def same(value: int) -> Int64:
            return np.full(n, value, np.int64)

        return CollectiveBatch(same(int(kind)), payload, same(DTYPES.index(dtype_name(dtype))), same(placement.ranks),
                               same(placement.nodes), same(placement.widest), same(placement.narrowest))

    @staticmethod
    def from_calls(calls: Sequence[CollectiveCall]) -> CollectiveBatch:
        """Return the columns of a list of calls."""
        rows = [(int(c.kind), DTYPES.index(c.dtype), c.placement.ranks, c.placement.nodes, c.placement.widest,
                 c.placement.narrowest) for c in calls]
        columns = np.array(rows, np.int64).reshape(-1, 6)
        return CollectiveBatch(columns[:, 0], np.array([c.payload_bytes for c in calls], np.float64), *columns[:, 1:].T)

    def take(self, rows: Int64 | Bool) -> CollectiveBatch:
        """Return the batch of the given rows (numbers or mask)."""
        return CollectiveBatch(self.kind[rows], self.payload_bytes[rows], self.dtype[rows], self.ranks[rows],
                               self.nodes[rows], self.widest[rows], self.narrowest[rows])

    def settings(self) -> tuple[Int64, Int64]:
        """Group rows by all columns but the size: return (first row of each setting, setting of each row)."""
        # One number for all columns, in mixed radix: each column's values are small.
        key: Int64 = np.zeros(len(self), np.int64)
        for column in (self.kind, self.dtype, self.ranks, self.nodes, self.widest, self.narrowest):
            key = key * (int(column.max(initial=0)) + 1) + column
        if len(key) and (key == key[0]).all():
            return np.zeros(1, np.int64), np.zeros(len(key), np.int64)
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        return first, inverse.reshape(-1)


def uneven_all_to_all(sent_bytes: npt.ArrayLike) -> float:
    """Return the ``payload_bytes`` of an all-to-all whose ranks send different amounts.

    The busiest rank decides: its link carries ``max(sent, received)`` without the part that stays on the rank, and an
    even all-to-all of n ranks carries ``(n − 1) / n`` of its payload.

    Args:
        sent_bytes: [n, n], row i the bytes that rank i sends to each rank.
    """
    matrix = np.asarray(sent_bytes, np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix) or (matrix < 0).any():
        raise CommError("An all-to-all's bytes are a square table of numbers of zero or more, a row for each sending "
                        "rank.")
    n = len(matrix)
    if n == 1:
        return float(matrix[0, 0])
    away = matrix - np.diag(np.diag(matrix))
    return float(max(away.sum(axis=0).max(), away.sum(axis=1).max()) * n / (n - 1))


class Level(IntEnum):
    """How the time of a collective is known, best first."""

    NOTHING_TO_DO = 0
    """A world of one rank, or no bytes: nothing is launched."""
    MEASURED = 1
    """A curve measured for this group size and placement holds the time."""
    INTERPOLATED = 2
    """Interpolated between, or extrapolated just beyond, measured group sizes or dtypes."""
    FITTED = 3
    """The α–β model with parameters fitted to measurements."""
    DATASHEET = 4
    """The α–β model with published constants only."""
    LINKS = 5
    """Without a cluster: a ring over the links of the device is assumed."""
    UNKNOWN = 6

    @property
    def label(self) -> str:
        """Return the level's name in reports and JSON."""
        return self.name.lower().replace("_", " ")

    @property
    def source(self) -> Source:
        """Return the ``Source`` that corresponds to the level."""
        if self is Level.MEASURED:
            return Source.MEASURED
        if self is Level.NOTHING_TO_DO:
            return Source.HEURISTIC
        return Source.LEARNED if self in (Level.INTERPOLATED, Level.FITTED) else Source.DATASHEET


@dataclass(slots=True)
class CommTimes:
    """Times of n collectives: expected median and 80% interval, µs; ``level`` and ``algorithm`` give their origin.

    ``algorithm`` holds codes of ``datasheet.algorithm_label``, -1 where a measurement does not name the algorithm.
    """

    time_us: Float64
    low_us: Float64
    high_us: Float64
    level: Int64
    algorithm: Int64

    @staticmethod
    def empty(n: int) -> CommTimes:
        """Return a table for n collectives without times yet."""
        return CommTimes(np.zeros(n), np.zeros(n), np.zeros(n), np.full(n, int(Level.UNKNOWN), np.int64),
                         np.full(n, -1, np.int64))

    def put(self, rows: Int64 | Bool, other: CommTimes) -> None:
        """Replace the given rows by the rows of ``other``."""
        for name in ("time_us", "low_us", "high_us", "level", "algorithm"):
            getattr(self, name)[rows] = getattr(other, name)

    def take(self, rows: Int64 | Bool) -> CommTimes:
        """Return a copy of the given rows."""
        return CommTimes(self.time_us[rows], self.low_us[rows], self.high_us[rows], self.level[rows],
                         self.algorithm[rows])

    def times(self) -> Times:
        """Return times and intervals in the form that other kernel models use."""
        return Times(self.time_us, self.low_us, self.high_us)
