"""``ClusterPlan``: how a decoder's step is spread over a cluster, and whether it can be.

Ranks are numbered as Megatron-LM and torchtitan do, what talks most lying closest together:
``rank = ((stage × dp + replica) × cp + part of the sequence) × tp + shard``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum, IntEnum

from graph_predictor.comm.collective_times import PlanError
from kernel_models.collectives import Placement, Topology
from tracer.shape_only.transformer import TransformerShape


class Schedule(str, Enum):
    """Order of a pipeline stage's work."""

    GPIPE = "gpipe"
    """All forwards, then all backwards (Huang et al., 2019)."""
    ONE_F_ONE_B = "1f1b"
    """One forward, one backward (Narayanan et al., PipeDream-Flush)."""
    INTERLEAVED = "interleaved"
    """1F1B over several model chunks a stage (Narayanan et al., 2021)."""


class Sharding(IntEnum):
    """What data-parallel ranks share: the stages of ZeRO (Rajbhandari et al., 2020)."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3
    """FSDP with full sharding: each block is gathered when it is needed."""


class Recomputation(str, Enum):
    """Which activations are computed again in backward."""

    NONE = "none"
    SELECTIVE = "selective"
    """Those of the attention core (Korthikanti et al., 2022); with fused attention nothing is left to recompute."""
    FULL = "full"
    """Every block, from its input."""


MOST_TASKS = 1 << 18
"""Forward passes of all stages' chunks in a step; the largest published runs have some thousands."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A plan.

    Attributes:
        dp, tp, pp, cp: replicas, shards of each layer, pipeline stages, parts of each sequence.
        ep: ranks, among the ``dp × cp`` ones, that share the experts.
        microbatch: sequences of a micro-batch on one replica.
        microbatches: micro-batches a replica does in a step (of gradient accumulation, or of the pipeline).
        chunks: model chunks of a stage, for the interleaved schedule.
        schedule: of the pipeline.
        sharding: what replicas share.
        sequence_parallel: norms, dropout and residuals on 1/``tp`` of the tokens.
        tensor_overlap: with sequence parallelism, its gathers and reduce-scatters run beside the products they belong
            to, in pieces (Transformer Engine's userbuffers).
        recompute: which activations are computed again.
        overlap: gradients are reduced beside the last backward; parameters gathered beside the block before.

    Raises:
        PlanError: a size is no whole number of at least 1, or sizes contradict each other.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    microbatch: int = 1
    microbatches: int = 1
    chunks: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B
    sharding: Sharding = Sharding.NONE
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    recompute: Recomputation = Recomputation.NONE
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "microbatch", "microbatches", "chunks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{name}={value!r} is not possible in a plan; give a whole number, 1 or more.")
        if self.pp * self.chunks * self.microbatches > MOST_TASKS:
            raise PlanError(f"A plan with microbatches={self.microbatches} on pp={self.pp} stages has more work to put "
                            f"in order than the {MOST_TASKS:,} pieces that are simulated; choose fewer micro-batches.")
        if (self.chunks > 1) != (self.schedule is Schedule.INTERLEAVED):
            raise PlanError("The interleaved schedule has 2 or more chunks a stage, and no other schedule has any; "
                            "give schedule=interleaved and chunks=2 or more together, or neither.")
        if self.chunks > 1 and self.pp == 1:
            raise PlanError("Interleaving needs a pipeline; give pp=2 or more, or chunks=1.")
        if self.chunks > 1 and self.microbatches % self.pp:
            raise PlanError(f"Interleaving runs micro-batches in groups of pp={self.pp}, and {self.microbatches} do "
                            "not divide into such; choose a multiple.")
        if self.sequence_parallel and self.tp == 1:
            raise PlanError("Sequence parallelism goes with tensor parallelism; give tp=2 or more, or leave it out.")
        if self.tensor_overlap and not self.sequence_parallel:
            raise PlanError("Tensor parallelism's collectives are overlapped with its products where they are gathers "
                            "and reduce-scatters; give sequence_parallel too, or leave tensor_overlap out.")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.dp * self.microbatch * self.microbatches

    def __str__(self) -> str:
        """As ``parse`` reads it; what is as usual is left out."""
        parts = [f"{name}={getattr(self, name)}" for name in ("dp", "tp", "pp", "cp", "ep")
                 if getattr(self, name) > 1] or ["dp=1"]
        parts += [f"microbatch={self.microbatch}", f"microbatches={self.microbatches}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("chunks", "schedule", "sharding", "recompute", "sequence_parallel", "tensor_overlap",
                              "overlap") and value != field.default:
                text = value.value if isinstance(value, Enum) else value
                parts.append(field.name if text is True else f"{field.name}={str(text).lower()}")
        return ",".join(parts)

    @staticmethod
    def parse(text: str) -> ClusterPlan:
        """A plan from text such as "dp=8,tp=4,pp=2,microbatch=2,microbatches=16,recompute=full,sharding=1".

        Raises:
            PlanError: an unknown name or value, or a plan that contradicts itself.
        """
        known = {field.name: field for field in fields(ClusterPlan)}
        values: dict[str, object] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip().lower().replace("-", "_") for piece in part.partition("="))
            if name not in known or name in values:
                raise PlanError(f"{part.strip()!r} {'is there twice' if name in values else 'is no part of a plan'}; "
                                f"a plan has {', '.join(known)}.")
            values[name] = _value(name, value if equals else "true", known[name].default)
        return ClusterPlan(**values)  # type: ignore[arg-type]

    def group(self, dimension: str, stage: int = 0) -> list[int]:
        """Ranks of the first group of a dimension ("tp", "cp", "dp", "ep" or "dpcp") within a stage."""
        base = stage * self.dp * self.cp * self.tp
        size, step = {"tp": (self.tp, 1), "cp": (self.cp, self.tp), "dp": (self.dp, self.tp * self.cp),
                      "dpcp": (self.dp * self.cp, self.tp), "ep": (self.ep, self.tp)}[dimension]
        return [base + i * step for i in range(size)]

    def place(self, dimension: str, on: Topology, stage: int = 0) -> Placement:
        """Return where such a group lies."""
        return on.place(self.group(dimension, stage))

    def neighbours(self, on: Topology, stage: int = 0) -> Placement:
        """Return where a rank of a stage and its counterpart in the next one lie."""
        step = self.dp * self.cp * self.tp
        return on.place([stage * step, (stage + 1) % self.pp * step])


def _value(name: str, text: str, default: object) -> object:
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text]
        if isinstance(default, Sharding):
            return Sharding(int(text)) if text.isdecimal() else Sharding[text.upper()]
        if isinstance(default, Enum):
            return type(default)(text)
        return int(text)
    except (KeyError, ValueError):
        raise PlanError(f"{name}={text} is not possible in a plan; give {_choices(default)}.") from None


def _choices(default: object) -> str:
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, Sharding):
        return "0 to 3"
    if isinstance(default, Enum):
        return " or ".join(each.value for each in type(default))
    return "a whole number"


def check_plan(plan: ClusterPlan, shape: TransformerShape, on: Topology) -> None:
    """Raise ``PlanError``, in one sentence, unless the model divides as the plan wants it and the cluster holds it."""
    if plan.world_size > on.gpus:
        raise PlanError(f"The plan's {plan.world_size:,} ranks do not fit on {on.name}, which has {on.gpus:,} GPUs; "
                        "name a larger topology.")
    for what, value, name, by in (
            ("heads", shape.heads, "tp", plan.tp), ("heads of keys and values", shape.kv_heads, "tp", plan.tp),
            ("features of the feed-forward part", shape.ffn, "tp", plan.tp),
            ("layers", shape.layers, "pp × chunks" if plan.chunks > 1 else "pp", plan.pp * plan.chunks),
            ("tokens of a sequence", shape.seq, "2 cp", 2 * plan.cp if plan.cp > 1 else 1),
            ("tokens of a rank", shape.seq // plan.cp, "tp", plan.tp if plan.sequence_parallel else 1),
            ("experts", shape.experts, "ep", plan.ep), ("data-parallel ranks", plan.dp * plan.cp, "ep", plan.ep)):
        if value % by:
            raise PlanError(f"{value:,} {what} cannot be split evenly by {name}={by}; choose a divisor.")
    if plan.ep > 1 and not shape.experts:
        raise PlanError(f"ep={plan.ep} needs experts, and the model has none; leave it out.")
    if plan.sharding is Sharding.PARAMETERS and plan.pp > 1:
        raise PlanError("Sharded parameters with a pipeline would be gathered for every micro-batch of every stage, "
                        "which no framework does by default; choose sharding=1 or pp=1.")


__all__ = ["ClusterPlan", "PlanError", "Recomputation", "Schedule", "Sharding", "check_plan"]
