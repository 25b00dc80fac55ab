"""``ParallelPlan``: how a job is spread over its ranks. Needs no torch.

Ranks are numbered as torchtitan and most launchers do, the kind of parallelism that talks most lying closest
together: ``rank = (pipeline stage × dp + data-parallel place) × tp + tensor-parallel place``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tracer.fake_world.errors import FakeWorldError

MOST_RANKS = 1_000_000
"""Of a fake world: far above the largest job there is, and rank numbers still fit everywhere."""

_SIZES = {"pp": "pp", "tp": "tp", "ddp": "dp", "fsdp2": "dp", "dp": "dp"}
_MORE = ("microbatches", "bucket_mb", "ep")
_KNOWN = ("ddp, fsdp2, tp, pp, and sizes such as fsdp2=8,tp=8, ddp=4,pp=2,microbatches=8, ddp=8,bucket_mb=50 or "
          "fsdp2=8,ep=4")


class DataParallel(str, Enum):
    """How replicas share their gradients, and their parameters."""

    NONE = "none"
    DDP = "ddp"
    """Every rank holds all parameters; gradients are all-reduced in buckets."""
    FSDP2 = "fsdp2"
    """Parameters, gradients and optimizer state are sharded; blocks are gathered when they are needed."""


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """Where a rank stands: its place in each dimension of the plan."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """How a job is spread over ``world_size = pp × dp × tp`` ranks.

    Attributes:
        kind: what the ``dp`` replicas do; ``NONE`` where ``dp`` is 1.
        dp: replicas, each with batches of its own.
        tp: ranks that share each layer.
        pp: pipeline stages, run in the 1F1B schedule.
        microbatches: parts that a pipeline's batch is split into; 1 without a pipeline.
        bucket_mb: MiB of gradients that DDP reduces together (its ``bucket_cap_mb``); by default what DDP does
            without one: 25, and 1 for the first bucket.
        ep: of the ``dp`` replicas, neighbours that share the experts of a mixture of experts, each with its own.

    Raises:
        FakeWorldError: a size is no whole number of at least 1, or they contradict each other.
    """

    kind: DataParallel = DataParallel.NONE
    dp: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    bucket_mb: int | None = None
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "microbatches", "bucket_mb", "ep"):
            value = getattr(self, name)
            if name == "bucket_mb" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise FakeWorldError(f"{name}={value!r} is not possible in a plan: give a whole number, 1 or more.")
        if (self.kind is DataParallel.NONE) and self.dp > 1:
            raise FakeWorldError(f"A plan with {self.dp} replicas must say what they do: ddp={self.dp} or "
                                 f"fsdp2={self.dp}.")
        if self.pp == 1 and self.microbatches > 1:
            raise FakeWorldError("microbatches belong to a pipeline: add pp=2 or more, or accumulate gradients with "
                                 "--set accumulation instead.")
        if self.dp % self.ep:
            raise FakeWorldError(f"ep={self.ep} spreads the experts over data-parallel ranks, whose number ({self.dp}) "
                                 f"it does not divide: add ddp=N or fsdp2=N with a multiple, such as fsdp2={self.ep}.")
        if self.bucket_mb is not None and self.kind is not DataParallel.DDP:
            raise FakeWorldError("bucket_mb is of DDP, which reduces gradients in buckets: add ddp=2 or more, or leave "
                                 "bucket_mb out.")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.tp

    @property
    def mesh(self) -> dict[str, int]:
        """Name and size of each dimension of the device mesh, outermost first; every one a process group's size."""
        sizes = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        used = {"pp": self.pp > 1, "dp": self.kind is not DataParallel.NONE, "tp": self.tp > 1}
        return {name: size for name, size in sizes.items() if used[name]} or {"dp": 1}

    def place(self, rank: int) -> MeshPlace:
        """Return where a rank stands. Raises ``FakeWorldError`` if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise FakeWorldError(f"There is no rank {rank} in a plan of {self.world_size} ranks.")
        return MeshPlace(rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp)

    def rank(self, place: MeshPlace) -> int:
        """The rank that stands there."""
        return (place.pp * self.dp + place.dp) * self.tp + place.tp

    def __str__(self) -> str:
        """As ``parse_plan`` reads it."""
        parts = [f"{self.kind.value}={self.dp}"] if self.kind is not DataParallel.NONE else []
        parts += [f"tp={self.tp}"] if self.tp > 1 else []
        parts += [f"pp={self.pp}"] if self.pp > 1 else []
        parts += [f"microbatches={self.microbatches}"] if self.pp > 1 else []
        parts += [f"bucket_mb={self.bucket_mb}"] if self.bucket_mb is not None else []
        parts += [f"ep={self.ep}"] if self.ep > 1 else []
        return ",".join(parts) or "tp=1"


def check_world(world_size: int, rank: int) -> None:
    """Raise ``FakeWorldError`` unless there can be such a rank of such a world."""
    for name, value, least in (("world_size", world_size, 1), ("rank", rank, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise FakeWorldError(f"{name}={value!r} is not possible: give a whole number, {least} or more.")
    if world_size > MOST_RANKS:
        raise FakeWorldError(f"world_size={_number(world_size)} is more than a fake world can have; give "
                             f"{MOST_RANKS:,} or less.")
    if rank >= world_size:
        raise FakeWorldError(f"There is no rank {rank} in a world of {world_size}; choose one from 0 to "
                             f"{world_size - 1}.")


def _number(value: int) -> str:
    """A number in a sentence, however long."""
    return f"{value:,}" if value < 10**15 else f"10^{int(value.bit_length() * 0.30103)} or so"


def parse_plan(text: str, world_size: int) -> ParallelPlan:
    """A plan from its text: kinds with sizes, joined by commas; one kind may go without its size.

    ``ddp``, ``fsdp2``, ``tp`` or ``pp`` alone take the whole world; in ``fsdp2,tp=8`` fsdp2 takes what is left.
    ``microbatches=N`` goes with ``pp``; without it there are as many as stages. ``bucket_mb=N`` goes with ``ddp``,
    ``ep=N`` with ``ddp`` or ``fsdp2``, whose ranks it divides.

    Raises:
        FakeWorldError: the text is no plan, or its sizes do not multiply to the world size.
    """
    sizes: dict[str, int] = {}
    kind = DataParallel.NONE
    open_name = ""
    more: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip().lower() for piece in part.partition("="))
        if name in _MORE and name not in more and number.isdecimal() and len(number) <= 9:
            more[name] = int(number)
            continue
        if name not in _SIZES or name == "dp" or (equals and not number.isdecimal()) or len(number) > 9:
            raise FakeWorldError(f"{part.strip()!r} is no part of a parallel plan; there are {_KNOWN}.")
        dimension = _SIZES[name]
        if dimension in sizes or (open_name and not equals):
            raise FakeWorldError(f"The plan {text!r} is not clear: name each dimension once, and leave the size out of "
                                 "one at most.")
        if dimension == "dp":
            kind = DataParallel(name)
        if not equals:
            open_name = dimension
        sizes[dimension] = int(number) if equals else 1
    product = sizes.get("pp", 1) * sizes.get("dp", 1) * sizes.get("tp", 1)
    if 0 in sizes.values():
        raise FakeWorldError(f"The plan {text!r} has a dimension of size 0; give sizes of 1 or more.")
    if open_name and world_size % product == 0:
        sizes[open_name] = world_size // product
        product = world_size
    if product != world_size:
        shown = f"{product} does not divide" if open_name else f"its sizes multiply to {product}, which is not"
        raise FakeWorldError(f"The plan {text!r} does not fill the world: {shown} the world size {world_size}.")
    stages = sizes.get("pp", 1)
    return ParallelPlan(kind, sizes.get("dp", 1), sizes.get("tp", 1), stages, more.get("microbatches", stages),
                        more.get("bucket_mb"), more.get("ep", 1))
