"""``ParallelPlan``: how a job is spread over its ranks, and the one parser of its text. Needs no torch.

Ranks are numbered as by Megatron-LM, torchtitan and most launchers: ranks that communicate most are neighbours.
``rank = ((stage × dp + replica) × cp + part of the sequence) × tp + shard``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from statistics import NormalDist

from tracer.errors import ForetraceError
from tracer.guard import MOST_RANKS


class PlanError(ForetraceError):
    """A plan, or a cluster for it, is impossible. The message names what was asked, the reason and what is possible."""


class Schedule(str, Enum):
    """Order of a pipeline stage's work."""

    GPIPE = "gpipe"
    """All forwards, then all backwards (Huang et al., 2019)."""
    ONE_F_ONE_B = "1f1b"
    """One forward, one backward (Narayanan et al., PipeDream-Flush)."""
    INTERLEAVED = "interleaved"
    """1F1B over several model chunks a stage (Narayanan et al., 2021)."""
    ZERO_BUBBLE = "zero_bubble"
    """1F1B with backward in two parts: gradients of activations at once, those of weights where a stage would wait. No
    more micro-batches are in flight than in the first stage of 1F1B (ZB-H1: Qi et al., "Zero Bubble Pipeline
    Parallelism", 2024, section 2.1)."""


class Sharding(IntEnum):
    """The state that data-parallel ranks split among them: the stages of ZeRO (Rajbhandari et al., 2020)."""

    NONE = 0
    """DDP: every rank holds all parameters; gradients are all-reduced in buckets."""
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3
    """FSDP with full sharding (PyTorch's FSDP2): each block is gathered when it is needed."""


class Recomputation(str, Enum):
    """The activations that are computed again in backward."""

    NONE = "none"
    SELECTIVE = "selective"
    """Activations of the attention core (Korthikanti et al., 2022); fused attention keeps none of them."""
    FULL = "full"
    """Every block as a whole, from its input: Megatron-LM's, and PyTorch's reentrant checkpoint."""
    NEEDED = "needed"
    """Every block from its input up to the last value that backward needs, so that its last product is not run again:
    PyTorch's non-reentrant checkpoint (FSDP2, torchtitan), and XLA, which drops unused results."""
    PROJECTIONS = "projections"
    """As ``NEEDED``, but queries, keys and values are kept as the products before attention return them (MaxText's
    remat policy ``save_qkv_proj``)."""
    OPERATORS = "operators"
    """As ``NEEDED``, but the results of attention and of the first, third, … product are kept (torchtitan's selective
    checkpointing by ``op``)."""

    @property
    def blocks(self) -> bool:
        """Return whether backward runs each block, all or part of it, again from the block's input."""
        return self not in (Recomputation.NONE, Recomputation.SELECTIVE)


class Dispatcher(str, Enum):
    """The way tokens go to their experts and back."""

    ALL_TO_ALL = "alltoall"
    """NCCL's all-to-all: a token is sent once for each of its experts (Megatron-Core's ``alltoall`` dispatcher)."""
    DEEPEP = "deepep"
    """A token is sent once to each rank that has any of its experts. To another node it is sent once and forwarded
    there (DeepSeek-AI, DeepEP; Megatron-Core's ``--moe-flex-dispatcher-backend deepep``)."""
    HYBRIDEP = "hybridep"
    """As ``DEEPEP``, with NVIDIA's kernels (``hybrid-ep`` of DeepEP; ``--moe-flex-dispatcher-backend hybridep``)."""

    @property
    def once(self) -> bool:
        """Return whether a token is sent to a rank only once, even if several of its experts are there."""
        return self is not Dispatcher.ALL_TO_ALL


class Graphs(str, Enum):
    """The part of a step that CUDA graphs replay, so that the host launches it in one call."""

    NONE = "none"
    PARTIAL = "partial"
    """All work except the experts', layer by layer (Megatron-Core's ``--cuda-graph-impl transformer_engine`` with the
    scopes attn, moe_router and moe_preprocess)."""
    WHOLE = "whole"
    """Forward and backward of all micro-batches (``--cuda-graph-impl full_iteration``)."""


MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act")
"""Modules that Megatron-Core recomputes in backward by name (``--recompute-modules``): attention's core, norms, the
products from latents with rotary positions, the feed-forward part of dense blocks, and experts' activation.
"""
MOST_TASKS = 1 << 18
"""Most forward passes of a step, summed over all stages' chunks; the largest published runs have some thousands."""
_DIMENSIONS = ("dp", "tp", "pp", "cp")
_UNSAID = ("microbatch", "microbatches", "bucket_mb", "first_layers", "last_layers", "etp",
           "recompute_layers")
"""Numbers that a plan may leave undefined."""
_SWITCHES = ("sequence_parallel", "tensor_overlap", "overlap", "embedding_layer", "loss_layer", "balanced",
             "half_gradients", "offload_optimizer", "expert_overlap", "fused_experts", "fp8_attention",
             "fp8_parameters")
_NUMBERS = (*_DIMENSIONS, "ep", "chunks", "replicate", *_UNSAID)
_ENUMS: dict[str, type[Enum]] = {"schedule": Schedule, "recompute": Recomputation, "dispatcher": Dispatcher,
                                 "graphs": Graphs}
_KINDS = {"ddp": Sharding.NONE, "fsdp2": Sharding.PARAMETERS}
_SYNONYMS = {"ddp": "dp", "fsdp2": "dp", "accumulation": "microbatches"}
_KNOWN = ("ddp, fsdp2, tp, pp, cp, ep, etp, microbatches, bucket_mb, dp with sharding=0 to 3, microbatch, chunks, "
          "schedule, recompute, recompute_layers, replicate, sequence_parallel, tensor_overlap, overlap, first_layers, "
           "last_layers, embedding_layer, loss_layer, balanced, half_gradients, offload_optimizer, dispatcher, "
           "expert_overlap, fused_experts, graphs, fp8_attention, fp8_parameters and recompute_modules; such as "
           "fsdp2=8,tp=8, ddp=4,pp=2,microbatches=8 or dp=8,sharding=1")
_MOST_DIGITS = 9  # such numbers fit into 32 bits


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """A rank's place in each dimension of the plan."""

    pp: int
    dp: int
    tp: int
    cp: int = 0


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """The spread of a job over ``world_size = pp × dp × cp × tp`` ranks.

    Attributes:
        dp, tp, pp, cp: Replicas, shards of each layer, pipeline stages, parts of each sequence.
        ep: Ranks among the ``dp × cp``, neighbours, that share the experts of a mixture of experts: each holds its own.
        etp: Ranks that share each expert: all of ``tp`` (``None``) or 1. With 1, ``ep`` counts tensor-parallel ranks
            too (Megatron-Core's ``--expert-tensor-parallel-size``).
        microbatch: Samples (a decoder's sequences) of a micro-batch on one replica; ``None`` where not given.
        microbatches: Micro-batches of a replica in a step, of the pipeline or of gradient accumulation; ``None`` where
            not given: in a pipeline, as many as it has stages.
        chunks: Model chunks of a stage, for the interleaved and the zero-bubble schedule.
        schedule: Order of work in the pipeline.
        sharding: State that replicas share: ``NONE`` is DDP, ``PARAMETERS`` is FSDP2.
        bucket_mb: MiB of gradients that DDP reduces together (``bucket_cap_mb``); ``None`` for DDP's default: 25, and 1
            for the first bucket.
        sequence_parallel: Norms, dropout and residuals on 1/``tp`` of the tokens.
        tensor_overlap: With sequence parallelism, its gathers and reduce-scatters overlap the products they belong to,
            in pieces (Transformer Engine's userbuffers).
        recompute: Which activations are computed again.
        recompute_layers: Number of blocks at the start of each chunk of a stage that are recomputed; ``None``: all
            (Megatron-Core's ``--recompute-method block --recompute-num-layers``).
        replicate: Copies of the shared state, each spread over ``dp / replicate`` replicas (and ``cp``): HSDP;
            torchtitan's ``data_parallel_replicate_degree``, Megatron-Core's ``--num-distributed-optimizer-instances``.
        half_gradients: Gradients are accumulated and reduced in the parameters' type, in place of fp32 (Megatron-Core's
            ``--grad-reduce-in-bf16``, NeMo's ``grad_reduce_in_fp32=False``).
        offload_optimizer: The optimizer and its state are in the host's memory (Megatron-Core's
            ``--optimizer-cpu-offload``).
        overlap: Gradients are reduced during the last backward, and parameters gathered during the previous block.
        dispatcher: How tokens go to their experts and back.
        expert_overlap: Experts' exchanges of one micro-batch overlap the work of another (Megatron-Core's
            ``--overlap-moe-expert-parallel-comm``).
        fused_experts: A kernel of grouped products casts and activates what it has computed (TE's op fuser with
            cuDNN's CuTe DSL kernels, ``--use-transformer-engine-op-fuser``).
        graphs: The part of a step that CUDA graphs replay.
        fp8_attention: Attention's products are in fp8 (``--fp8-dot-product-attention``).
        fp8_parameters: Linear layers in fp8 have no weights in 16 bits (``--fp8-param-gather``).
        recompute_modules: Modules that are recomputed (``MODULES``), in addition to ``recompute=selective``.
        lone_ddp: A single replica is wrapped in DDP, which still fills buckets.
        first_layers, last_layers: Layers of the pipeline's first and last stage. ``None``: as many as other stages
            have, or one less where layers do not divide (``planner.parallel.stages``).
        embedding_layer, loss_layer: The embedding, or the head with its loss, counts as a layer when layers are spread.
        balanced: Stages have equal shares of the parameters that products use, including the head's (nanotron).

    Raises:
        PlanError: A size is not a whole number of at least 1, or sizes contradict each other.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    microbatch: int | None = None
    microbatches: int | None = None
    chunks: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B
    sharding: Sharding = Sharding.NONE
    bucket_mb: int | None = None
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    recompute: Recomputation = Recomputation.NONE
    overlap: bool = True
    lone_ddp: bool = False
    first_layers: int | None = None
    last_layers: int | None = None
    embedding_layer: bool = False
    loss_layer: bool = False
    etp: int | None = None
    recompute_layers: int | None = None
    replicate: int = 1
    half_gradients: bool = False
    offload_optimizer: bool = False
    balanced: bool = False
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL
    expert_overlap: bool = False
    fused_experts: bool = False
    graphs: Graphs = Graphs.NONE
    fp8_attention: bool = False
    fp8_parameters: bool = False
    recompute_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is None and name in _UNSAID:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{name}={value!r} is not possible in a plan: give a whole number, 1 or more.")
        if self.world_size > MOST_RANKS:
            raise PlanError(f"A plan of {self.world_size:.4g} ranks is more than a job can have; give one of "
                            f"{MOST_RANKS:,} or fewer.")
        if self.microbatches is None and self.pp > 1:
            object.__setattr__(self, "microbatches", self.pp)
        if self.pp * self.chunks * self.passes > MOST_TASKS:
            raise PlanError(f"A plan with microbatches={self.passes} on pp={self.pp} stages has more work to put "
                            f"in order than the {MOST_TASKS:,} pieces that are simulated; choose fewer micro-batches.")
        self._check_experts()
        self._check_copies()
        if self.recompute_layers is not None and self.recompute not in (Recomputation.FULL, Recomputation.NEEDED):
            raise PlanError("recompute_layers are whole blocks that are computed again; give recompute=full or needed "
                            "too, or leave it out.")
        self._check_modules()
        if self.bucket_mb is not None and not self.ddp:
            raise PlanError("bucket_mb is of DDP, which reduces gradients in buckets: add ddp=2 or more, or leave "
                            "bucket_mb out.")
        self._check_schedule()
        self._check_layers()
        if self.sequence_parallel and self.tp == 1:
            raise PlanError("Sequence parallelism goes with tensor parallelism; give tp=2 or more, or leave it out.")
        if self.tensor_overlap and not self.sequence_parallel:
            raise PlanError("Tensor parallelism's collectives are overlapped with its products where they are gathers "
                            "and reduce-scatters; give sequence_parallel too, or leave tensor_overlap out.")
        if self.offload_optimizer and self.sharding > Sharding.OPTIMIZER:
            raise PlanError("offload_optimizer is known of DDP and ZeRO 1 (Megatron-Core's --optimizer-cpu-offload); "
                            "give sharding=0 or 1, or leave it out.")

    def _check_schedule(self) -> None:
        if (self.chunks > 1) != (self.schedule is Schedule.INTERLEAVED) and self.schedule is not Schedule.ZERO_BUBBLE:
            raise PlanError("The interleaved schedule has 2 or more chunks a stage, and no other has any but the "
                            "zero-bubble one, which may; give schedule=interleaved and chunks=2 or more together, or "
                            "neither.")
        if self.schedule is Schedule.ZERO_BUBBLE and self.recompute.blocks:
            raise PlanError("The zero-bubble schedule runs backward in two parts, each of which would compute the "
                            "block again; choose another schedule, or recompute=none or selective.")
        if self.chunks > 1 and self.pp == 1:
            raise PlanError("Interleaving needs a pipeline; give pp=2 or more, or chunks=1.")
        if self.chunks > 1 and self.passes % self.pp:
            raise PlanError(f"Interleaving runs micro-batches in groups of pp={self.pp}, and {self.passes} do "
                            "not divide into such; choose a multiple.")

    def _check_modules(self) -> None:
        unknown = [name for name in self.recompute_modules if name not in MODULES]
        if unknown:
            raise PlanError(f"recompute_modules={unknown[0]} is none of a block's modules; give some of "
                            f"{', '.join(MODULES)}, joined by +.")
        if self.recompute_modules and self.recompute is not Recomputation.SELECTIVE:
            raise PlanError("recompute_modules are what selective recomputation computes again; give "
                            "recompute=selective too, or leave them out.")
        if self.expert_overlap and self.ep == 1:
            raise PlanError("expert_overlap hides the exchanges of experts that ranks share; give ep=2 or more, or "
                            "leave it out.")
        if self.expert_overlap and self.pp > 1 and self.chunks == 1:
            raise PlanError("expert_overlap runs one micro-batch's exchanges beside another one's work, which "
                            "Megatron-Core does in the interleaved schedule alone; give schedule=interleaved and "
                            "chunks=2 or more, or leave it out.")

    def _check_experts(self) -> None:
        if self.etp not in (None, 1, self.tp):
            raise PlanError(f"etp={self.etp} is not possible: each expert is shared by all tp={self.tp} ranks of "
                            "tensor parallelism or by none of them; give etp=1, or leave it out.")
        if self.expert_tp < self.tp and not self.sequence_parallel:
            raise PlanError("Experts of their own for each tensor-parallel rank (etp=1) need tokens of their own: give "
                            "sequence_parallel too, or leave etp out.")
        ranks = self.dp * self.cp * self.tp // self.expert_tp
        if ranks % self.ep:
            kind = "data-parallel" if self.expert_tp == self.tp else "a stage's"
            raise PlanError(f"ep={self.ep} spreads the experts over {kind} ranks, whose number ({ranks}) it does not "
                            f"divide: add ddp=N or fsdp2=N with a multiple, such as fsdp2={self.ep}.")

    def _check_copies(self) -> None:
        if self.replicate == 1:
            return
        if not self.sharding or self.dp % self.replicate:
            raise PlanError(f"replicate={self.replicate} makes copies of what dp={self.dp} replicas share: give "
                            "sharding=1 to 3 (or fsdp2) and a divisor of dp, or leave replicate out.")
        if self.expert_replicas % self.replicate:
            raise PlanError(f"ep={self.ep} spreads the experts over more ranks than one of replicate={self.replicate} "
                            "copies has; choose fewer copies, or a smaller ep.")

    def _check_layers(self) -> None:
        given = self.first_layers is not None or self.last_layers is not None
        counted = self.embedding_layer or self.loss_layer
        if self.balanced and (given or counted or self.pp * self.chunks == 1 or self.chunks > 1):
            raise PlanError("balanced spreads the layers over a pipeline's stages by their parameters, one chunk a "
                            "stage; give pp=2 or more, and no other word on layers and chunks.")
        if (given or counted) and self.pp == 1:
            raise PlanError("Layers are spread over a pipeline's stages; give pp=2 or more, or leave first_layers, "
                            "last_layers, embedding_layer and loss_layer out.")
        if given and counted:
            raise PlanError("Layers of the first and last stage are either given (first_layers, last_layers) or follow "
                            "from counting embedding and loss as layers; leave one of the two out.")

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_tp(self) -> int:
        """Return the number of ranks that share each expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_replicas(self) -> int:
        """Return the number of ranks of a stage that have the same part of the same experts."""
        return self.dp * self.cp * self.tp // (self.expert_tp * self.ep)

    @property
    def shards(self) -> int:
        """Return over how many ranks the state outside of experts is spread, where the plan shards it."""
        return self.dp * self.cp // self.replicate

    @property
    def expert_shards(self) -> int:
        """Return over how many ranks the state of an expert's part is spread, where the plan shards it."""
        return self.expert_replicas // self.replicate

    @property
    def samples(self) -> int:
        """Return the number of samples of a micro-batch: ``microbatch``, or 1 where it is not given."""
        return self.microbatch or 1

    @property
    def passes(self) -> int:
        """Return a replica's number of micro-batches in a step: ``microbatches``, or 1 where it is not given."""
        return self.microbatches or 1

    @property
    def global_batch(self) -> int:
        """Return the number of samples of a step, over all replicas and micro-batches."""
        return self.dp * self.samples * self.passes

    @property
    def ddp(self) -> bool:
        """Return whether replicas all-reduce their gradients, as DDP does."""
        return self.sharding is Sharding.NONE and (self.dp > 1 or self.lone_ddp)

    @property
    def fsdp2(self) -> bool:
        """Return whether parameters are split among replicas, as FSDP2 does."""
        return self.sharding is Sharding.PARAMETERS

    @property
    def mesh(self) -> dict[str, int]:
        """Return name and size of each dimension of the device mesh, outermost first; each has a process group."""
        used = {"pp": self.pp > 1, "dp": self.ddp or bool(self.sharding), "cp": self.cp > 1, "tp": self.tp > 1}
        return {name: getattr(self, name) for name, is_used in used.items() if is_used} or {"dp": 1}

    def place(self, rank: int) -> MeshPlace:
        """Return a rank's place in each dimension. Raises ``PlanError`` if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise PlanError(f"There is no rank {rank} in a plan of {self.world_size} ranks.")
        outer, tp = divmod(rank, self.tp)
        outer, cp = divmod(outer, self.cp)
        pp, dp = divmod(outer, self.dp)
        return MeshPlace(pp, dp, tp, cp)

    def rank(self, place: MeshPlace) -> int:
        """Return the rank at a place."""
        return ((place.pp * self.dp + place.dp) * self.cp + place.cp) * self.tp + place.tp

    def group(self, dimension: str, stage: int = 0) -> list[int]:
        """Return the ranks of the first group of a dimension within a stage.

        Args:
            dimension: ``"tp"``, ``"cp"``, ``"dp"``, ``"ep"``; ``"etp"``: ranks that share an expert; ``"dpcp"``: all
                replicas and parts of the sequence; ``"experts"``: ranks of a stage with the same part of the same
                experts. ``"shards"`` and ``"expert shards"``: ranks of ``dpcp`` and of ``experts`` that share state;
                ``"copies"`` and ``"expert copies"``: ranks with the same share of state. ``"pp"``: a rank and its
                counterpart in the next stage; ``"ends"``: in the first and last stage.
        """
        if dimension == "pp":
            ranks = self.dp * self.cp * self.tp
            return [stage * ranks, (stage + 1) % self.pp * ranks]
        return list(self.spaced(dimension, stage))

    def spaced(self, dimension: str, stage: int = 0) -> range:
        """Return the ranks of ``group`` for any dimension except "pp"; they are equally far apart."""
        ranks = self.dp * self.cp * self.tp
        if dimension == "ends":
            return range(0, (self.pp - 1) * ranks + 1, max(self.pp - 1, 1) * ranks)
        base = stage * ranks
        size, step = {"tp": (self.tp, 1), "cp": (self.cp, self.tp), "dp": (self.dp, self.tp * self.cp),
                      "dpcp": (self.dp * self.cp, self.tp), "ep": (self.ep, self.expert_tp),
                      "etp": (self.expert_tp, 1),
                      "experts": (self.expert_replicas, self.expert_tp * self.ep),
                      "shards": (self.shards, self.tp),
                      "copies": (self.replicate, self.tp * self.shards),
                      "expert shards": (self.expert_shards, self.expert_tp * self.ep),
                      "expert copies": (self.replicate, ranks // self.replicate)}[dimension]
        return range(base, base + size * step, step)

    def __str__(self) -> str:
        """Return the text that ``parse`` reads, without default values."""
        kinds = {sharding: name for name, sharding in _KINDS.items()}
        parts = [f"{kinds.get(self.sharding, 'dp')}={self.dp}"] if self.ddp or self.sharding else []
        parts += [f"{name}={getattr(self, name)}" for name in ("tp", "pp", "cp") if getattr(self, name) > 1]
        parts = parts or ["dp=1"]
        parts += [f"{name}={value}" for name in _UNSAID
                  if (value := getattr(self, name)) is not None]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("ep", "chunks", "replicate", "sharding", *_ENUMS, "recompute_modules", *_SWITCHES) and (
                    value != field.default) and not (
                                  field.name == "sharding" and value in kinds):
                text = said(value)
                parts.append(field.name if text is True else f"{field.name}={str(text).lower()}")
        return ",".join(parts)

    @staticmethod
    def parse(text: str, world_size: int | None = None) -> ParallelPlan:
        """Read a plan such as "fsdp2=8,tp=2", "ddp,pp=2,microbatches=8" or "dp=8,sharding=1,recompute=full".

        ``ddp=8`` is ``dp=8``, ``fsdp2=8`` is ``dp=8,sharding=3``, ``accumulation`` is ``microbatches``.

        Args:
            text: names with their values, joined by commas; a switch without a value is on.
            world_size: ranks that the plan must have. One dimension may then omit its size: "ddp", "fsdp2", "tp" and
                "pp" alone take the whole world, in "fsdp2,tp=8" fsdp2 takes the remaining ranks.

        Raises:
            PlanError: the text is no plan, contradicts itself, or its sizes do not multiply to the world size.
        """
        values: dict[str, object] = {}
        kind = open_name = None
        for part in text.split(","):
            name, equals, value = (piece.strip().lower().replace("-", "_") for piece in part.partition("="))
            field = _SYNONYMS.get(name, name)
            if field in values or (field in _DIMENSIONS and not equals and open_name):
                raise PlanError(f"The plan {text!r} is not clear: name each dimension once, and leave the size out of "
                                "one at most.")
            if field in _DIMENSIONS and not equals and world_size is not None:
                open_name = field
            kind = _KINDS.get(name, kind)
            values[field] = 1 if field == open_name else _value(part.strip(), field, value if equals else "true")
        if kind is not None and values.setdefault("sharding", kind) != kind:
            raise PlanError(f"The plan {text!r} contradicts itself: ddp is sharding=0 and fsdp2 sharding=3; write "
                            "dp=N with another.")
        if open_name is not None and world_size is not None:
            product = _product(values)
            if world_size % max(product, 1):
                raise PlanError(f"The plan {text!r} does not fill the world: {product} does not divide the world size "
                                f"{world_size}.")
            values[open_name] = world_size // max(product, 1)
        values["lone_ddp"] = kind is Sharding.NONE and values["dp"] == 1
        plan = ParallelPlan(**values)  # type: ignore[arg-type]
        if world_size not in (None, plan.world_size):
            raise PlanError(f"The plan {text!r} does not fill the world: its sizes multiply to {plan.world_size}, "
                            f"which is not the world size {world_size}.")
        return plan


def slowest_of(ranks: int) -> float:
    """Return the expected largest of ``ranks`` normal values, in standard deviations from their mean (Blom 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def said(value: object) -> object:
    """Return a field's value as it appears in a plan's text."""
    return value.value if isinstance(value, Enum) else "+".join(value) if isinstance(value, tuple) else value


def _product(values: dict[str, object]) -> int:
    product = 1
    for name in _DIMENSIONS:
        size = values.get(name, 1)
        assert isinstance(size, int)
        product *= size
    return product


def _value(part: str, name: str, text: str) -> object:
    """Return the value of one part. Raises ``PlanError``."""
    if name in _NUMBERS:
        if text.isdecimal() and text.isascii() and len(text) <= _MOST_DIGITS:
            return int(text)
        raise PlanError(f"{part!r} is no part of a parallel plan: write sizes as whole numbers, such as fsdp2=8.")
    try:
        if name in _SWITCHES:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text]
        if name == "sharding":
            return Sharding(int(text)) if text.isdecimal() else Sharding[text.upper()]
        if name in _ENUMS:
            return _ENUMS[name](text)
        if name == "recompute_modules":
            return tuple(sorted(set(text.split("+"))))
    except (KeyError, ValueError):
        choices = _CHOICES.get(name, "true or false")
        raise PlanError(f"{name}={text} is not possible in a plan; give {choices}.") from None
    raise PlanError(f"{part!r} is no part of a parallel plan; there are {_KNOWN}.")


_CHOICES = {"sharding": "0 to 3",
            **{name: " or ".join(each.value for each in kind) for name, kind in _ENUMS.items()}}
