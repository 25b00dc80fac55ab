"""The plans that each training framework can run: the candidates of a search, and a plan as the framework's arguments.

Sources: Megatron-Core's arguments (``megatron/training/arguments.py`` of github.com/NVIDIA/Megatron-LM), torchtitan's
``[parallelism]`` and ``[activation_checkpoint]`` settings (``torchtitan/config/job_config.py`` of
github.com/pytorch/torchtitan) and PyTorch's ``fully_shard`` and ``DistributedDataParallel``.

A search tries every way to spread a decoder's step that the frameworks can run. ``with_batch`` sets the micro-batches
of a plan that a user names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product

from graph_predictor.comm.traffic import MIB
from planner.parallel.frameworks import PLAIN, FrameworkProfile
from planner.parallel.stages import spread
from tracer.parallel_plan import MOST_TASKS, Graphs, ParallelPlan, PlanError, Recomputation, Schedule, Sharding
from tracer.shape_only.transformer import TransformerShape


class Framework(str, Enum):
    """A framework that can train with a plan."""

    MEGATRON = "megatron"
    """Megatron-Core: DDP or the distributed optimizer; Megatron-FSDP without a pipeline."""
    TORCHTITAN = "torchtitan"
    FSDP = "fsdp"
    """PyTorch's FSDP2 or DDP around a model, without other parallelism."""
    NANOTRON = "nanotron"
    """Hugging Face's nanotron: DDP or ZeRO 1, tensor and pipeline parallelism, in plain PyTorch."""
    DEEPSPEED = "deepspeed"
    """DeepSpeed's engine around a model: ZeRO 1 to 3."""


@dataclass(frozen=True, slots=True)
class Ways:
    """The plans that a framework can run.

    Attributes:
        shardings, piped: what replicas may share, without and with a pipeline.
        copied: shardings for which several copies are possible (``replicate``).
        schedules, chunked: pipeline schedules, and those that may have several chunks a stage.
        recompute: kinds of recomputation.
        parts: shares of a chunk's blocks that may be recomputed, in addition to all blocks.
        layers: whether tensor and pipeline parallelism exist.
        sequences, experts: whether context parallelism and expert parallelism exist.
        plain_tensor: whether tensor parallelism is possible without sequence parallelism.
        overlapped: whether tensor parallelism's collectives can overlap products, piece by piece.
    """

    shardings: tuple[Sharding, ...]
    piped: tuple[Sharding, ...] = ()
    copied: tuple[Sharding, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    chunked: tuple[Schedule, ...] = ()
    recompute: tuple[Recomputation, ...] = (Recomputation.NONE, Recomputation.NEEDED)
    parts: tuple[float, ...] = ()
    layers: bool = True
    sequences: bool = True
    experts: bool = True
    plain_tensor: bool = False
    overlapped: bool = True


WAYS = {
    Framework.MEGATRON: Ways(
        shardings=(Sharding.NONE, Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS),
        piped=(Sharding.NONE, Sharding.OPTIMIZER), copied=(Sharding.OPTIMIZER,),
        schedules=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED), chunked=(Schedule.INTERLEAVED,),
        recompute=(Recomputation.NONE, Recomputation.SELECTIVE, Recomputation.FULL), parts=(0.25, 0.5, 0.75),
        plain_tensor=True),
    # A rank of torchtitan's multi-stage schedules has two chunks or more. Every n-th block may be recomputed.
    Framework.TORCHTITAN: Ways(
        shardings=(Sharding.GRADIENTS, Sharding.PARAMETERS), piped=(Sharding.PARAMETERS,),
        copied=(Sharding.GRADIENTS, Sharding.PARAMETERS),
        schedules=(Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE),
        chunked=(Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE), parts=(0.25, 0.5),
        recompute=(Recomputation.NONE, Recomputation.NEEDED, Recomputation.OPERATORS)),
    Framework.FSDP: Ways(
        shardings=(Sharding.NONE, Sharding.GRADIENTS, Sharding.PARAMETERS),
        copied=(Sharding.GRADIENTS, Sharding.PARAMETERS), layers=False, sequences=False, experts=False),
    # A stage of nanotron's 1F1B has one chunk, and a layer is recomputed to its end (its parallelism_config.py).
    Framework.NANOTRON: Ways(
        shardings=(Sharding.NONE, Sharding.OPTIMIZER), piped=(Sharding.NONE, Sharding.OPTIMIZER),
        schedules=(Schedule.GPIPE, Schedule.ONE_F_ONE_B), recompute=(Recomputation.NONE, Recomputation.FULL),
        sequences=False, experts=False, plain_tensor=True, overlapped=False),
    Framework.DEEPSPEED: Ways(
        shardings=(Sharding.NONE, Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS), layers=False,
        sequences=False, experts=False, recompute=(Recomputation.NONE, Recomputation.FULL)),
}
ANY = (Framework.MEGATRON, Framework.TORCHTITAN, Framework.FSDP)
"""Frameworks that are tried by default. The others have no further plans: they are tried only if named."""


def frameworks_of(plan: ParallelPlan, shape: TransformerShape, wanted: Framework | None = None
                  ) -> tuple[Framework, ...]:
    """Return the frameworks of ``ANY`` that can run a plan; with ``wanted``, only this framework is asked."""
    names = ANY if wanted is None else (wanted,)
    return tuple(name for name in names if _has(name, WAYS[name], plan, shape))


def _has(framework: Framework, ways: Ways, plan: ParallelPlan, shape: TransformerShape) -> bool:
    shares = plan.dp * plan.cp > 1
    shardings = ways.piped if plan.pp > 1 else ways.shardings
    tensor_ok = ways.layers or plan.tp == 1
    if plan.tp > 1 and not plan.sequence_parallel:
        # Megatron-Core requires sequence parallelism for experts with tensor parallelism.
        tensor_ok = ways.plain_tensor and not (any(run.experts for run in shape.runs))
    if framework is Framework.TORCHTITAN and plan.tp * plan.cp > 1:
        tensor_ok = tensor_ok and all(run.state is None for run in shape.runs)  # only Megatron-Core splits mixers
    alone = not shares and not plan.sharding
    # torchtitan's DDP cannot be combined with other parallelism.
    plain_ddp = framework is Framework.TORCHTITAN and not plan.sharding and plan.tp * plan.pp * plan.cp * plan.ep == 1
    return (
        tensor_ok
        and (plan.pp == 1 or (ways.layers and plan.schedule in ways.schedules))
        and (plan.schedule is not Schedule.ZERO_BUBBLE or plan.chunks > 1)
        and (plan.cp == 1 or ways.sequences)
        and (plan.ep == 1 or ways.experts)
        and (alone or plan.sharding in shardings or plain_ddp)
        and (plan.replicate == 1 or plan.sharding in ways.copied)
        and plan.recompute in ways.recompute
        and not (plan.half_gradients and framework in (Framework.TORCHTITAN, Framework.NANOTRON))
        and not (plan.tensor_overlap and framework is Framework.NANOTRON)
        and not (plan.balanced and framework is not Framework.NANOTRON)
        and not (plan.bucket_mb is not None and framework in (Framework.TORCHTITAN, Framework.DEEPSPEED))
        and (framework is Framework.MEGATRON or not (plan.offload_optimizer or _megatron_alone(plan)))
        and _layers_ok(framework, plan, shape)
    )


def _megatron_alone(plan: ParallelPlan) -> bool:
    """Return whether a plan uses dispatchers, CUDA graphs, kernels or recomputation that only Megatron-Core has."""
    return plan.dispatcher.once or plan.graphs is not Graphs.NONE or bool(plan.recompute_modules) or (
        plan.expert_overlap or plan.fused_experts or plan.fp8_attention or plan.fp8_parameters)


def _layers_ok(framework: Framework, plan: ParallelPlan, shape: TransformerShape) -> bool:
    """Return whether a framework can spread and recompute layers as the plan does."""
    if plan.recompute_layers is not None:
        least = min(sum(chunk) for stage in spread(plan, shape) for chunk in stage)
        every = plan.recompute_layers < least and least % plan.recompute_layers == 0
        if not (framework is Framework.MEGATRON or (framework is Framework.TORCHTITAN and every)):
            return False
    if framework is not Framework.MEGATRON or plan.pp == 1 or plan.first_layers or plan.last_layers:
        return framework is Framework.MEGATRON or not (plan.first_layers or plan.last_layers)
    return lacking(plan, shape) <= 2 or (plan.loss_layer and shape.predictions > 0)


def lacking(plan: ParallelPlan, shape: TransformerShape) -> int:
    """Return the number of layers that are missing for equal chunks on all stages. Megatron-Core allows one fewer on
    the last stage and one on the first, where loss and embedding then count as layers."""
    return -shape.layers % (plan.pp * plan.chunks)


_STRATEGY = {Sharding.GRADIENTS: "optim_grads", Sharding.PARAMETERS: "optim_grads_params"}
_TITAN = {Schedule.GPIPE: "GPipe", Schedule.ONE_F_ONE_B: "1F1B", Schedule.INTERLEAVED: "Interleaved1F1B",
          Schedule.ZERO_BUBBLE: "InterleavedZeroBubble"}


def exported(plan: ParallelPlan, shape: TransformerShape, framework: Framework) -> str:
    """Return a plan as the arguments of a framework.

    Raises:
        PlanError: the framework cannot run the plan, or this function does not know its arguments.
    """
    if framework not in (Framework.MEGATRON, Framework.TORCHTITAN):
        raise PlanError(f"{framework.value} has no arguments of its own that are written here; export to megatron or "
                        "torchtitan.")
    if framework not in frameworks_of(plan, shape):
        raise PlanError(f"{framework.value} does not have the plan {plan}; give --framework {framework.value} for the "
                        "best of its own.")
    return "\n".join(_megatron(plan, shape) if framework is Framework.MEGATRON else _torchtitan(plan, shape))


def _megatron(plan: ParallelPlan, shape: TransformerShape) -> list[str]:
    found = [f"--tensor-model-parallel-size {plan.tp}", f"--pipeline-model-parallel-size {plan.pp}",
             f"--context-parallel-size {plan.cp}", f"--micro-batch-size {plan.samples}",
             f"--global-batch-size {plan.global_batch}"]
    if any(run.experts for run in shape.runs):
        found += [f"--expert-model-parallel-size {plan.ep}", f"--expert-tensor-parallel-size {plan.expert_tp}"]
    found += ["--sequence-parallel"] * plan.sequence_parallel + ["--tp-comm-overlap"] * plan.tensor_overlap
    found += _megatron_stages(plan, shape)
    if plan.sharding:
        found.append("--use-distributed-optimizer")
    if plan.bucket_mb is not None:  # the option counts parameters
        found.append(f"--ddp-bucket-size {plan.bucket_mb * MIB // shape.element_bytes}")
    found += ["--grad-reduce-in-bf16"] * plan.half_gradients + ["--optimizer-cpu-offload"] * plan.offload_optimizer
    if plan.sharding in _STRATEGY:
        found += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {_STRATEGY[plan.sharding]}"]
    if plan.replicate > 1:
        found.append(f"--num-distributed-optimizer-instances {plan.replicate}")
    if plan.overlap and plan.dp * plan.cp > 1:
        found += ["--overlap-grad-reduce"] + ["--overlap-param-gather"] * bool(plan.sharding)
    found += _megatron_kernels(plan)
    if plan.recompute is Recomputation.SELECTIVE:
        found.append("--recompute-granularity selective")
        if plan.recompute_modules:
            found.append(f"--recompute-modules {' '.join(plan.recompute_modules)}")
    elif plan.recompute.blocks:
        # "block": number of recomputed blocks of each chunk. "uniform": number of blocks that share a stored input.
        method, layers = ("uniform", 1) if plan.recompute_layers is None else ("block", plan.recompute_layers)
        found += ["--recompute-granularity full", f"--recompute-method {method}", f"--recompute-num-layers {layers}"]
    return found


def _megatron_kernels(plan: ParallelPlan) -> list[str]:
    found = ["--moe-token-dispatcher-type flex",
             f"--moe-flex-dispatcher-backend {plan.dispatcher.value}"] if plan.dispatcher.once else []
    found += ["--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"] if plan.expert_overlap else []
    found += ["--use-transformer-engine-op-fuser"] * plan.fused_experts
    found += {Graphs.NONE: [], Graphs.WHOLE: ["--cuda-graph-impl full_iteration"], Graphs.PARTIAL: [
        "--cuda-graph-impl transformer_engine", "--cuda-graph-scope attn moe_router moe_preprocess"]}[plan.graphs]
    return found + ["--fp8-dot-product-attention"] * plan.fp8_attention + ["--fp8-param-gather"] * plan.fp8_parameters


def _megatron_stages(plan: ParallelPlan, shape: TransformerShape) -> list[str]:
    if plan.pp == 1:
        return []
    if plan.loss_layer and shape.predictions:
        return [f"--pipeline-model-parallel-layout {_layout(plan, shape)}"]
    short = lacking(plan, shape)
    given = plan.first_layers or plan.last_layers
    found = []
    if plan.chunks > 1:
        each = shape.layers // (plan.pp * plan.chunks)
        found.append(f"--num-virtual-stages-per-pipeline-rank {plan.chunks}" if short or given
                     else f"--num-layers-per-virtual-pipeline-stage {each}")
    if plan.first_layers:
        found.append(f"--decoder-first-pipeline-num-layers {plan.first_layers}")
    if plan.last_layers:
        found.append(f"--decoder-last-pipeline-num-layers {plan.last_layers}")
    if plan.embedding_layer or (short == 2 and not given):
        found.append("--account-for-embedding-in-pipeline-split")
    if plan.loss_layer or (short in (1, 2) and not given):
        found.append("--account-for-loss-in-pipeline-split")
    return found


def _layout(plan: ParallelPlan, shape: TransformerShape) -> str:
    """Return the content of each chunk in Megatron-Core's notation: E embedding, t block, m prediction module,
    L loss."""
    counts = [sum(chunk) for chunks in zip(*spread(plan, shape), strict=True) for chunk in chunks]
    counts[-1] -= shape.predictions
    return "|".join(f"{'E' * (i == 0)}{'t' * count}{('m' * shape.predictions + 'L') * (i == len(counts) - 1)}"
                    for i, count in enumerate(counts))


def _torchtitan(plan: ParallelPlan, shape: TransformerShape) -> list[str]:
    shared = plan.sharding is not Sharding.NONE
    copies = plan.replicate if shared else plan.dp
    # A replica's batch: with a pipeline all its micro-batches, else one micro-batch of gradient accumulation.
    own = plan.samples * (plan.passes if plan.pp > 1 else 1)
    found = ["[training]", f"local_batch_size = {own}", f"global_batch_size = {plan.global_batch}",
             f"seq_len = {shape.seq}", "", "[parallelism]", f"data_parallel_replicate_degree = {copies}",
             f"data_parallel_shard_degree = {plan.dp // copies}",
             f'fsdp_reshard_after_forward = "{"never" if plan.sharding is Sharding.GRADIENTS else "default"}"',
             f"tensor_parallel_degree = {plan.tp}",
             f"enable_async_tensor_parallel = {str(plan.tensor_overlap).lower()}",
             f"context_parallel_degree = {plan.cp}", f"pipeline_parallel_degree = {plan.pp}"]
    if plan.pp > 1:
        places = plan.pp * plan.chunks
        short = lacking(plan, shape)
        found += [f'pipeline_parallel_schedule = "{_TITAN[plan.schedule]}"',
                  f"pipeline_parallel_microbatch_size = {plan.samples}",
                  f"pipeline_parallel_layers_per_stage = {-(-shape.layers // places)}",
                  f"pipeline_parallel_first_stage_less_layers = {int(short > 1)}",
                  f"pipeline_parallel_last_stage_less_layers = {int(short > 0)}"]
    if any(run.experts for run in shape.runs):
        found += [f"expert_parallel_degree = {plan.ep}", f"expert_tensor_parallel_degree = {plan.expert_tp}"]
    return [*found, "", "[activation_checkpoint]", *_checkpoint(plan, shape)]


def _checkpoint(plan: ParallelPlan, shape: TransformerShape) -> list[str]:
    if plan.recompute is Recomputation.NONE:
        return ['mode = "none"']
    if plan.recompute is Recomputation.OPERATORS:
        return ['mode = "selective"', 'selective_ac_option = "op"']
    if plan.recompute_layers is None:
        return ['mode = "full"']
    every = -(-shape.layers // (plan.pp * plan.chunks)) // plan.recompute_layers
    return ['mode = "selective"', f'selective_ac_option = "{every}"']


MOST_MICROBATCH, MOST_PARTS, LEAST_TOKENS, MOST_CHUNKS = 16, 16, 1024, 16
"""Limits of a search; a named plan may exceed them. Most sequences of a micro-batch (kernels hardly gain beyond), most
parts of a sequence (cp), fewest tokens of a part. Most chunks of a stage (NVIDIA's published recipes have up to 12)."""
COPIES = (2, 4, 16, 64)
"""Numbers of copies of sharded state that are tried, each on whole nodes: a choice."""


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Sizes of a plan's dimensions: dp, tp, pp, cp and ep."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int

    @property
    def usual(self) -> ParallelPlan:
        """Return a plan of these sizes with all other options at their defaults."""
        own = bool(self.dp * self.cp % self.ep)
        return ParallelPlan(dp=self.dp, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, microbatches=1,
                            sequence_parallel=own, etp=1 if own else None)


Work = tuple[Schedule, int, int, int, bool, bool, int | None]
"""Schedule, chunks, sequences of a micro-batch, micro-batches, sequence parallelism, its overlap, ranks an expert."""
State = tuple[Sharding, int, Recomputation, int | None]
"""What replicas share, number of copies of it, kind of recomputation, and recomputed blocks of a chunk."""


@dataclass(frozen=True, slots=True)
class PlanFamily:
    """Plans that do the same work in the same order and differ only in stored state and activations. ``profile``
    belongs to the framework that runs them."""

    layout: MeshSizes
    work: Work
    states: tuple[State, ...]
    profile: FrameworkProfile = PLAIN

    @property
    def least(self) -> ParallelPlan:
        """Return the plan that recomputes least."""
        return self.plan(min(self.states, key=lambda state: state[2].blocks))

    def plan(self, state: State) -> ParallelPlan:
        """Return the family's plan with this state."""
        layout = self.layout
        schedule, chunks, size, count, sequence_parallel, overlap, etp = self.work
        sharding, copies, recomputed, layers = state
        plan = ParallelPlan(
            dp=layout.dp, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, microbatch=size, microbatches=count,
            chunks=chunks, schedule=schedule, sharding=sharding, sequence_parallel=sequence_parallel,
            tensor_overlap=overlap, recompute=recomputed, recompute_layers=layers, replicate=copies, etp=etp)
        return plan if self.profile is PLAIN else self.profile.planned(plan)


def candidates(shape: TransformerShape, gpus: int, global_batch: int, framework: Framework | None = None, *,
               node: int = 8) -> Iterator[ParallelPlan]:
    """Yield every plan of ``gpus`` GPUs with ``global_batch`` sequences a step; some of them may be impossible."""
    for layout in layouts(shape, gpus, global_batch):
        for family in families(layout, shape, global_batch, framework, node=node):
            yield from (family.plan(state) for state in family.states)


def layouts(shape: TransformerShape, gpus: int, global_batch: int) -> Iterator[MeshSizes]:
    """Yield every way to divide the GPUs among the dimensions."""
    experts = math.gcd(*(run.experts for run in shape.runs if run.experts))
    for tp in _divisors(gpus):
        for pp in _divisors(gpus // tp):
            for cp in _divisors(gpus // tp // pp):
                dp = gpus // tp // pp // cp
                if global_batch % dp or cp > max(1, min(MOST_PARTS, shape.seq // LEAST_TOKENS)):
                    continue
                for ep in _divisors(math.gcd(experts, dp * cp * tp)) if experts else [1]:
                    yield MeshSizes(dp, tp, pp, cp, ep)


def families(layout: MeshSizes, shape: TransformerShape, global_batch: int, framework: Framework | None = None, *,
             node: int = 8, profile: FrameworkProfile = PLAIN) -> Iterator[PlanFamily]:
    """Yield the plans of a layout that the frameworks can run.

    Args:
        framework: the only one to try; ``None`` for those in ``ANY``.
        node: GPUs of a node; a copy of sharded state takes whole nodes.
        profile: the framework's profile.
    """
    found: dict[Work, dict[State, None]] = {}
    for each in (framework,) if framework else ANY:
        ways = WAYS[each]
        if not _possible(ways, layout):
            continue
        shared = list(_shared(ways, each, layout, node))
        for work in _works(ways, layout, shape, global_batch, node):
            states = found.setdefault(work, {})
            recomputed = list(_recomputations(ways, work[0], shape, layout.pp * work[1]))
            states.update(((*one, *two), None) for one, two in product(shared, recomputed))
    yield from (PlanFamily(layout, work, tuple(states), profile) for work, states in found.items())


def _possible(ways: Ways, layout: MeshSizes) -> bool:
    return ((ways.layers or layout.tp * layout.pp == 1) and (ways.sequences or layout.cp == 1)
            and (ways.experts or layout.ep == 1))


def _works(ways: Ways, layout: MeshSizes, shape: TransformerShape, global_batch: int, node: int) -> Iterator[Work]:
    own = global_batch // layout.dp
    batches = [(size, own // size) for size in range(1, MOST_MICROBATCH + 1)
               if own % size == 0 and own // size * layout.pp <= MOST_TASKS]
    tensor = list(_tensor(ways, layout, shape, node))
    for (schedule, chunks), (size, count), modes in product(_schedules(ways, layout, shape), batches, tensor):
        if not (chunks > 1 and count % layout.pp) and count * layout.pp * chunks <= MOST_TASKS:
            yield (schedule, chunks, size, count, *modes)


def _shared(ways: Ways, framework: Framework, layout: MeshSizes, node: int) -> Iterator[tuple[Sharding, int]]:
    """Yield possible shardings, each with its number of copies."""
    if layout.dp * layout.cp == 1:
        yield Sharding.NONE, 1
        return
    if framework is Framework.TORCHTITAN and layout.tp * layout.pp * layout.cp * layout.ep == 1:
        yield Sharding.NONE, 1
    for sharding in ways.piped if layout.pp > 1 else ways.shardings:
        yield sharding, 1
        if sharding not in ways.copied:
            continue
        for copies in COPIES:
            own = layout.dp // copies * layout.cp
            if layout.dp % copies == 0 and own * layout.tp % node == 0 and own % layout.ep == 0:
                yield sharding, copies


def _tensor(ways: Ways, layout: MeshSizes, shape: TransformerShape,
            node: int) -> Iterator[tuple[bool, bool, int | None]]:
    """Yield (sequence parallelism, overlap of its collectives within a node, ranks of an expert)."""
    routed = any(run.experts for run in shape.runs)
    whole = (layout.dp * layout.cp) % layout.ep == 0
    if layout.tp == 1:
        if whole:
            yield False, False, None
        return
    for overlap in (False, True) if ways.overlapped and layout.tp <= node else (False,):
        if whole:
            yield True, overlap, None
        if routed:
            yield True, overlap, 1
    if ways.plain_tensor and not routed:
        yield False, False, None


def _schedules(ways: Ways, layout: MeshSizes, shape: TransformerShape) -> Iterator[tuple[Schedule, int]]:
    """Yield schedules with their chunks. Chunks are equally deep; those at both ends may have one layer fewer."""
    if layout.pp == 1:
        yield Schedule.ONE_F_ONE_B, 1
        return
    for schedule in ways.schedules:
        if schedule is Schedule.ONE_F_ONE_B:
            yield schedule, 1
        if schedule not in ways.chunked:
            continue
        for chunks in range(2, min(MOST_CHUNKS, shape.layers // layout.pp) + 1):
            if -shape.layers % (layout.pp * chunks) <= 2:
                yield schedule, chunks


def _recomputations(ways: Ways, schedule: Schedule, shape: TransformerShape,
                    places: int) -> Iterator[tuple[Recomputation, int | None]]:
    """Yield kinds of recomputation, each with its number of recomputed blocks of a chunk (``None`` for all)."""
    each = -(-shape.layers // places)
    for kind in ways.recompute:
        if (kind is Recomputation.SELECTIVE and shape.flash) or (kind.blocks and schedule is Schedule.ZERO_BUBBLE):
            continue
        yield kind, None
        if kind in (Recomputation.FULL, Recomputation.NEEDED):
            # Every second or fourth block needs a divisible count; recomputing a chunk's first blocks does not.
            some = {round(each * part) for part in ways.parts
                    if kind is Recomputation.FULL or each * part == int(each * part)}
            yield from ((kind, layers) for layers in sorted(some) if 0 < layers < each)


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return low + [number // each for each in reversed(low) if each * each != number]


def says_batch(text: str) -> bool:
    """Return whether a plan's text gives the number of micro-batches."""
    return "microbatches" in text or "accumulation" in text


def with_batch(plan: ParallelPlan, text: str, global_batch: int | None) -> ParallelPlan:
    """Return a plan with the micro-batches that give ``global_batch`` sequences a step, if its text gives none.

    Args:
        plan: the plan, parsed from ``text``.
        text: the plan's text.
        global_batch: sequences of a step; ``None`` for the plan's own.

    Raises:
        PlanError: the sequences cannot be spread evenly over the replicas, or the text gives another number of them.
    """
    if global_batch is None:
        return plan
    if says_batch(text):
        if plan.global_batch != global_batch:
            raise PlanError(f"The plan {text} has {plan.global_batch:,} sequences a step and not {global_batch:,}; "
                            "leave its microbatches or the batch out.")
        return plan
    passes, left = divmod(global_batch, plan.dp * plan.samples)
    if left or not passes:
        raise PlanError(f"A batch of {global_batch:,} sequences cannot be split evenly over dp={plan.dp} replicas with "
                        f"microbatch={plan.samples}; choose another batch.")
    if passes * plan.pp * plan.chunks > MOST_TASKS:
        raise PlanError(f"A batch of {global_batch:,} sequences is {passes:,} micro-batches on pp={plan.pp} stages, "
                        f"more than the {MOST_TASKS:,} pieces that are put in order; choose a smaller one.")
    return replace(plan, microbatches=passes)
