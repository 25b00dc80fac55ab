"""Bytes that each dimension of a parallel plan must communicate, by closed formulas, and a check against
recorded volumes.

Sources: Shoeybi et al. 2019 (1909.08053) and Korthikanti et al. 2022 (2205.05198) for tensor and sequence parallelism,
Rajbhandari et al. 2020 (1910.02054) for ZeRO, Anthony et al. 2024 (2408.10197) for the rest. Tests compare the formulas
with what PyTorch's own wrappers call. Bytes are payloads (size in nccl-tests) per rank and step; bytes on the wire are
payload × bus factor.

- Tensor: an all-reduce after attention and one after the feed-forward part; in backward one before each.
- Tensor with sequence parallelism: a reduce-scatter and an all-gather in place of each all-reduce. Backward gathers
  once more what the weights' gradients need.
- Context: keys and values go to all parts of the sequence, their gradients back. A state-space mixer does an all-to-all
  from tokens to heads and one back, in forward and in backward.
- Experts: an all-to-all to the experts and one back, in forward and in backward. Tensor-parallel ranks that share an
  expert and have tokens of their own gather these tokens before it and reduce them after it.
- Pipeline: the residual stream between stages, and its gradient back.
- Data: all-reduced gradients. Sharded: gradients are reduce-scattered, parameters gathered. Fully sharded: block by
  block. HSDP also all-reduces the gradients' shares among the copies of the shards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum

from kernel_models.collectives import CollectiveKind, CommError, bus_factor
from tracer.guard import MOST_RANKS
from tracer.input_file import DecodeError, from_toml, read_input
from tracer.parallel_plan import Sharding


class Pass(str, Enum):
    """The part of a step that communicates."""

    FORWARD = "forward"
    """Once a micro-batch; recomputed work communicates again."""
    BACKWARD = "backward"
    """Once a micro-batch."""
    STEP = "step"
    """Once a step, for any number of micro-batches."""


@dataclass(frozen=True, slots=True)
class Communication:
    """Equal collectives of one cause.

    Attributes:
        cause: a phrase for reports.
        dimension: the parallelism whose ranks take part, as ``ParallelPlan.group`` names it.
        kind: kind of the collective.
        payload_bytes: size of each in nccl-tests' sense, bytes.
        during: the pass in which it happens.
        count: number of collectives in one such pass.
    """

    cause: str
    dimension: str
    kind: CollectiveKind
    payload_bytes: float
    during: Pass
    count: int = 1


def of_block(stream: float, *, sequence_parallel: bool, keys: float = 0.0, routed: float = 0.0, shared: float = 0.0,
             split: int = 2, mixed: tuple[float, float] = (0.0, 0.0)) -> list[Communication]:
    """Return the communication of one block of a decoder.

    Args:
        stream: bytes of the residual stream of a micro-batch on one rank.
        sequence_parallel: as in ``ParallelPlan``.
        keys: bytes of all keys and values, which the parts of a sequence gather.
        routed: bytes that a rank sends to the experts: each of its tokens once for each of the token's experts.
        shared: bytes that tensor-parallel ranks sharing an expert gather for it.
        split: number of parts of the block whose work tensor-parallel ranks share: attention and the feed-forward part,
            or attention alone if each rank has experts of its own.
        mixed: bytes of a rank's tokens into and out of a state-space mixer's recurrence.
    """
    found = []
    gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    for during in (Pass.FORWARD, Pass.BACKWARD):
        again = during is Pass.BACKWARD
        if sequence_parallel:
            cause = "sequence-parallel activations"
            found += [Communication(cause, "tp", scatter, stream, during, split),
                      Communication(cause, "tp", gather, stream, during, 2 * split if again else split)]
        else:
            reduce = CollectiveKind.ALL_REDUCE
            found.append(Communication("tensor-parallel activations", "tp", reduce, stream, during, split))
        found.append(Communication("keys and values", "cp", gather, keys, during))
        if again:
            found.append(Communication("gradients of keys and values", "cp", scatter, keys, during))
        found += [Communication("tokens for heads of a mixer", "cp", CollectiveKind.ALL_TO_ALL, payload, during)
                  for payload in mixed if payload]
        found.append(Communication("expert dispatch and combine", "ep", CollectiveKind.ALL_TO_ALL, routed, during, 2))
        if shared:
            found += [Communication("tokens of shared experts", "etp", kind, shared, during)
                      for kind in (gather, scatter)]
    return found


def of_replicas(sharding: Sharding, gradients: float, parameters: float) -> list[Communication]:
    """Return the communication of data-parallel ranks, given bytes of gradients and of parameters."""
    kinds = CollectiveKind
    if sharding is Sharding.NONE:
        return [Communication("DDP gradients", "dpcp", kinds.ALL_REDUCE, gradients, Pass.STEP)]
    stage = f"ZeRO-{int(sharding)}"
    # Sharded gradients cannot be accumulated before they are reduced.
    reduced = Pass.STEP if sharding is Sharding.OPTIMIZER else Pass.BACKWARD
    gathered = (Pass.FORWARD, Pass.BACKWARD) if sharding is Sharding.PARAMETERS else (Pass.STEP,)
    return [Communication(f"{stage} gradients", "dpcp", kinds.REDUCE_SCATTER, gradients, reduced),
            *(Communication(f"{stage} parameters", "dpcp", kinds.ALL_GATHER, parameters, each) for each in gathered)]


FIRST_BUCKET, BUCKET = 1, 25
"""MiB of DDP's first bucket and of the later ones if no size is given (``torch.distributed``'s defaults)."""
MIB = 1 << 20


def buckets_of(gradients: Sequence[tuple[str, int]], bucket_mb: int | None = None) -> list[list[int]]:
    """Return the indices of the gradients in each bucket, in the order in which the buckets are reduced.

    DDP assigns them so once it knows the order of the gradients (``compute_bucket_assignment_by_size`` of PyTorch's
    reducer). A bucket has one dtype, and the gradient that reaches its size closes it. Incomplete buckets come last.

    Args:
        gradients: dtype and bytes of each gradient.
        bucket_mb: size of a bucket, MiB; ``None``: DDP's defaults.
    """
    limits = (FIRST_BUCKET, BUCKET) if bucket_mb is None else (bucket_mb, bucket_mb)
    opened: dict[str, list[int]] = {}
    closed: list[list[int]] = []
    seen: set[str] = set()
    for number, (dtype, _) in enumerate(gradients):
        bucket = opened.setdefault(dtype, [])
        bucket.append(number)
        if sum(gradients[each][1] for each in bucket) >= limits[dtype in seen] * MIB:
            closed.append(opened.pop(dtype))
            seen.add(dtype)
    return closed + list(opened.values())


def of_boundary(stream: float, tp: int, *, sequence_parallel: bool) -> list[Communication]:
    """Return the communication between two neighbouring stages: activations and their gradients."""
    sent = stream / tp if sequence_parallel else stream
    return [Communication("pipeline activations and gradients", "pp", CollectiveKind.SEND_RECV, sent, during)
            for during in (Pass.FORWARD, Pass.BACKWARD)]


_UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1000, "kib": 1 << 10, "m": 10**6, "mb": 10**6, "mib": 1 << 20,
          "g": 10**9, "gb": 10**9, "gib": 1 << 30, "t": 10**12, "tb": 10**12, "tib": 1 << 40}
MOST_BYTES = 1 << 50  # a pebibyte; chosen


def parse_bytes(text: str) -> float:
    """Return the bytes of "64MiB", "1.5GB" or "512". Raises ``CommError`` for other texts, or more than a pebibyte."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", text.lower())
    if not match or match.group(2) not in _UNITS:
        raise CommError(f"{text!r} is no size; write bytes such as 65536, 64KiB, 16MiB or 1.5GB.")
    value = float(match.group(1)) * _UNITS[match.group(2)]
    if value > MOST_BYTES:
        raise CommError(f"{text!r} is more than a pebibyte; give the bytes of one rank's buffer.")
    return value


def parse_memory(text: str, option: str, example: str) -> float:
    """Return the bytes of a memory option; a bare number is in GB. Raises ``CommError`` if it is no positive size."""
    try:
        found = parse_bytes(f"{float(text)}GB")
    except ValueError:
        found = parse_bytes(text)
    if found <= 0:
        raise CommError(f"{option} {text} leaves no memory for anything; give what there is, such as {example}.")
    return found


def bytes_text(value: float) -> str:
    """Return a number of bytes as text, such as "64 KiB", "1.5 MiB" or "100 B"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:.4g} B"


def parse_ranks(text: str) -> list[int]:
    """Return the ranks of "0-7,16,24-31" or, with a step, "0-63:8". Raises ``CommError`` for anything else."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?\s*", part)
        if not match:
            raise CommError(f"{text!r} is no group of ranks; write it like 0-7,16 or 0-63:8.")
        first, last, step = int(match.group(1)), int(match.group(2) or match.group(1)), int(match.group(3) or 1)
        if last < first or step < 1 or last >= MOST_RANKS:
            raise CommError(f"{part.strip()!r} is no range of ranks; write it like 0-7 or 0-63:8.")
        found += range(first, last + 1, step)
    return found


def parse_table(text: str) -> list[list[float]]:
    """Return the bytes from each rank to each rank. "1MiB,2MiB" means that every rank sends these to ranks 0, 1, …;
    "0,4;8,0" has a row for each sending rank. Raises ``CommError`` for anything else."""
    rows = [[parse_bytes(cell) for cell in row.split(",")] for row in text.split(";")]
    if len(rows) == 1:
        rows *= len(rows[0])
    if any(len(row) != len(rows) for row in rows):
        raise CommError(f"{text!r} is no table of sizes; write one size for each rank (a,b,c), or a row for each "
                        "sending rank (a,b;c,d).")
    return rows


SHARDING = {"ddp": Sharding.NONE, "zero1": Sharding.OPTIMIZER, "zero2": Sharding.GRADIENTS,
            "zero3": Sharding.PARAMETERS}
SCHEMES = (*SHARDING, "none")
TOLERANCE = 0.05
"""Volumes within this share agree: buckets are padded, losses and norms are reduced too. Chosen."""


MOST = 1e18
"""Largest value of any number of a job."""


@dataclass(frozen=True, slots=True)
class JobShape:
    """A job's sizes as its user states them. Sizes of parallelism are 1 where it is not used.

    Attributes:
        data_scheme: "ddp", "zero1", "zero2", "zero3" (FSDP) or "none".
        dp, tp, pp, ep: data-, tensor-, pipeline- and expert-parallel sizes.
        parameters: parameters of one rank's model part (after tensor and pipeline sharding).
        gradient_bytes, parameter_bytes: bytes of an element as it is communicated.
        layers: transformer layers of one rank; moe_layers: number of these layers with experts.
        sequence, batch, hidden: tokens of a sequence, sequences of a micro-batch, width.
        activation_bytes: bytes of an element of the activations.
        micro_batches: number in one step.
        top_k: experts of a token.
        sequence_parallel: whether reduce-scatter and all-gather replace the tensor-parallel all-reduces.
        full_recompute: whether backward repeats the forward pass.
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
    """Expected collectives of one cause: their total ``payload_bytes`` per rank and step, over ``ranks`` ranks."""

    cause: str
    kind: CollectiveKind
    ranks: int
    payload_bytes: float

    @property
    def wire_bytes(self) -> float:
        """Return the bytes that leave (or enter) a rank."""
        return self.payload_bytes * bus_factor(self.kind, self.ranks)


def expected_volumes(job: JobShape) -> list[Volume]:
    """Return all communication of a step, by cause."""
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
    """Expected and recorded payload of one kind of collective, bytes per rank and step."""

    kind: CollectiveKind
    causes: tuple[str, ...]
    expected_bytes: float
    recorded_bytes: float

    @property
    def agrees(self) -> bool:
        """Return whether both volumes are within the tolerance."""
        return abs(self.recorded_bytes - self.expected_bytes) <= TOLERANCE * max(self.expected_bytes, 1.0)


def check_volumes(job: JobShape, recorded: Mapping[CollectiveKind, float]) -> list[VolumeCheck]:
    """Compare expected and recorded payload bytes per rank and step by kind; unexpected recorded kinds are listed."""
    volumes = expected_volumes(job)
    kinds = sorted({v.kind for v in volumes} | {kind for kind, value in recorded.items() if value > 0})
    return [VolumeCheck(kind, tuple(dict.fromkeys(v.cause for v in volumes if v.kind is kind)),
                        sum(v.payload_bytes for v in volumes if v.kind is kind), float(recorded.get(kind, 0.0)))
            for kind in kinds]


def read_job_shape(path: str) -> JobShape:
    """Read a job's shape from a TOML file with ``JobShape``'s names. Raises ``CommError`` if the file is wrong."""
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
