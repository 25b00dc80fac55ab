"""Bytes that a parallel training step must communicate, by closed formulas, and the check against recorded ones.

What a block, a replica and a stage communicate is in ``traffic``. All are payloads (nccl-tests' size) per rank and
step; wire bytes are payload × bus factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from graph_predictor.comm.traffic import Pass, of_block, of_boundary, of_replicas
from kernel_models.collectives import CollectiveKind, CommError, bus_factor
from tracer.decode import DecodeError, from_toml
from tracer.input_file import read_input
from tracer.parallel_plan import Sharding

SHARDING = {"ddp": Sharding.NONE, "zero1": Sharding.OPTIMIZER, "zero2": Sharding.GRADIENTS,
            "zero3": Sharding.PARAMETERS}
SCHEMES = (*SHARDING, "none")
TOLERANCE = 0.05
"""Volumes within 5% agree: buckets are padded, losses and norms are reduced too."""


MOST = 1e18
"""No job has more of anything."""


@dataclass(frozen=True, slots=True)
class JobShape:
    """A job's sizes as its user states them. Sizes of parallelism are 1 where it is not used.

    Attributes:
        data_scheme: "ddp", "zero1", "zero2", "zero3" (FSDP) or "none".
        dp, tp, pp, ep: data-, tensor-, pipeline- and expert-parallel sizes.
        parameters: parameters of one rank's model part (after tensor and pipeline sharding).
        gradient_bytes, parameter_bytes: of an element as it is communicated.
        layers: transformer layers of one rank; moe_layers: of them those with experts.
        sequence, batch, hidden: tokens of a sequence, sequences of a micro-batch, width.
        activation_bytes: of an element.
        micro_batches: of one step.
        top_k: experts of a token.
        sequence_parallel: whether tensor-parallel all-reduces are reduce-scatter and all-gather.
        full_recompute: whether the forward is done again in the backward.
        boundaries: pipeline neighbours of the rank (0, 1 or 2; by default 2 with three stages or more, else 1).
        chunks: virtual pipeline chunks of a rank.
    """

    data_scheme: str = "none"
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    parameters: float = 0.0
    gradient_bytes: int = 4
    parameter_bytes: int = 2
    layers: int = 0
    moe_layers: int = 0
    sequence: int = 0
    batch: int = 0
    hidden: int = 0
    activation_bytes: int = 2
    micro_batches: int = 1
    top_k: int = 1
    sequence_parallel: bool = False
    full_recompute: bool = False
    boundaries: int = -1
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.data_scheme not in SCHEMES:
            raise CommError(f"data_scheme is {self.data_scheme!r}; it is one of {', '.join(SCHEMES)}.")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not (-1 if item.name == "boundaries" else 0) <= value <= MOST:
                raise CommError(f"{item.name} of the job is {value:g}; give a number from 0 to {MOST:g}.")


@dataclass(frozen=True, slots=True)
class Volume:
    """Expected collectives of one cause: ``payload_bytes`` in all, per rank and step, over ``ranks`` ranks."""

    cause: str
    kind: CollectiveKind
    ranks: int
    payload_bytes: float

    @property
    def wire_bytes(self) -> float:
        """Bytes that leave (or enter) a rank."""
        return self.payload_bytes * bus_factor(self.kind, self.ranks)


def expected_volumes(job: JobShape) -> list[Volume]:
    """All that a step must communicate, by cause."""
    sharding = SHARDING.get(job.data_scheme)
    replicas = [] if sharding is None else of_replicas(
        sharding, job.parameters * job.gradient_bytes, job.parameters * job.parameter_bytes)
    stream = float(job.sequence * job.batch * job.hidden * job.activation_bytes)
    block = of_block(stream, sequence_parallel=job.sequence_parallel, routed=job.top_k * stream)
    neighbours = job.boundaries if job.boundaries >= 0 else (2 if job.pp > 2 else 1)
    stages = of_boundary(stream, job.tp, sequence_parallel=job.sequence_parallel)
    blocks = {"tp": job.layers, "ep": job.moe_layers, "cp": 0}
    ranks = {"dpcp": job.dp, "tp": job.tp, "ep": job.ep, "pp": job.pp}
    found: dict[tuple[str, CollectiveKind, int], float] = {}
    for each in (*replicas, *block, *stages):
        passes = 1 if each.during is Pass.STEP else job.micro_batches
        if each in block:
            passes *= blocks[each.dimension] * (1 + (job.full_recompute and each.during is Pass.FORWARD))
        elif each in stages:
            passes *= neighbours * job.chunks
        key = each.cause, each.kind, ranks.get(each.dimension, 1)
        found[key] = found.get(key, 0.0) + passes * each.count * each.payload_bytes
    return [Volume(*key, payload) for key, payload in found.items() if key[2] > 1 and payload > 0]


@dataclass(frozen=True, slots=True)
class VolumeCheck:
    """Expected and recorded payload of one kind, bytes per rank and step."""

    kind: CollectiveKind
    causes: tuple[str, ...]
    expected_bytes: float
    recorded_bytes: float

    @property
    def agrees(self) -> bool:
        """Return whether they are within the tolerance."""
        return abs(self.recorded_bytes - self.expected_bytes) <= TOLERANCE * max(self.expected_bytes, 1.0)


def check_volumes(job: JobShape, recorded: Mapping[CollectiveKind, float]) -> list[VolumeCheck]:
    """Compare by kind. ``recorded`` holds payload bytes per rank and step; kinds nobody expects are listed too."""
    volumes = expected_volumes(job)
    kinds = sorted({v.kind for v in volumes} | {kind for kind, value in recorded.items() if value > 0})
    return [VolumeCheck(kind, tuple(dict.fromkeys(v.cause for v in volumes if v.kind is kind)),
                        sum(v.payload_bytes for v in volumes if v.kind is kind), float(recorded.get(kind, 0.0)))
            for kind in kinds]


def read_job_shape(path: str) -> JobShape:
    """A job's shape from a TOML file of ``JobShape``'s names. Raises ``CommError`` naming what is wrong in it."""
    try:
        data = from_toml(read_input(path))
    except OSError as error:
        raise CommError(f"{path} cannot be read: {error.strerror}; name a TOML file that describes the job.") from None
    except DecodeError as error:
        raise CommError(f"{path} does not describe a job: {error}") from None
    known = {item.name: item.default for item in fields(JobShape)}
    for name, value in data.items():
        if name not in known:
            raise CommError(f"{path}: {name!r} is nothing a job says; known are {', '.join(known)}.")
        default = known[name]
        wanted = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, wanted) or (isinstance(value, bool) and not isinstance(default, bool)):
            raise CommError(f"{path}: {name} is {value!r}, and should be like {default!r}.")
    return JobShape(**data)
