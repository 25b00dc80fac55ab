"""``PlanCosts``: everything a plan's step is made of, each priced on its own: work of every piece, every collective.

Collectives are those of Megatron-LM (tensor, sequence, context, expert and pipeline parallelism), DDP and FSDP, which
``graph_predictor.comm.traffic`` lists, and the vocabulary's: the embedding's all-reduce; the loss's three small ones;
the head's in backward.

Fully sharded parameters without a pipeline are gathered block by block in every pass. With a pipeline each stage
gathers its own once a step, keeps them until the last micro-batch's backward, adds gradients up in fp32 and reduces
them once, as torchtitan does by default (``fsdp_reshard_after_forward = "default"``).

Gradients that replicas all-reduce go in one call, or in a plan's buckets (``bucket_mb``), each with its latency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graph_predictor.comm.traffic import Communication, Pass, of_block, of_boundary, of_replicas
from kernel_models.collectives import (
    CollectiveCall,
    CollectiveKind,
    CollectiveModel,
    Placement,
    Topology,
    price_once,
)
from kernel_models.collectives.call import dtype_name
from kernel_models.device import DeviceSpec
from kernel_models.op_call import Source
from planner.parallel.buckets import bucket_shares
from planner.parallel.decoder import check_decoder_plan
from planner.parallel.dispatch import dispatched
from planner.parallel.layer_costs import BlockKernels, LayerCosts
from planner.parallel.stages import Counts, blocks_of_stage, recomputed, spread
from planner.parallel.work import NOTHING, Exchange, LayerWork, PieceCost
from tracer.parallel_plan import ParallelPlan, Sharding
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape, expected_places

HOST_GBPS = 40.0
"""Bandwidth of the host's memory that each GPU's part of the update gets, 10⁹ bytes/s: about half of what two sockets
with eight channels of DDR5-4800 have for eight GPUs (614.4 GB/s)."""
UPDATE_BYTES = 28
"""Bytes moved by a parameter's update: parameter, gradient and both moments read, all but the gradient written, in
fp32."""
SPREAD = 2.0
"""An 80% interval is a factor of two either way."""


def offloaded_step(parameters: float, gradient_bytes: int, parameter_bytes: int, device: DeviceSpec) -> LayerWork:
    """Return the optimizer's step of so many parameters whose state is in the host's memory, as Megatron-Core's
    ``--optimizer-cpu-offload`` does it: gradients go to the host, its cores update (Adam in fp32), and parameters come
    back, one after another. No measurement has tested this: the link is the data sheet's, the host's share is assumed.

    Args:
        parameters: whose state the rank has.
        gradient_bytes: of a gradient as it is sent to the host; parameter_bytes: of what comes back.
    """
    link = device.host_gbps or HOST_GBPS
    us = parameters * ((gradient_bytes + parameter_bytes) / link + (UPDATE_BYTES + parameter_bytes) / HOST_GBPS) * 1e-3
    return LayerWork(others=us, low=us / SPREAD, high=us * SPREAD, sources={int(Source.HEURISTIC): us})


OVERLAP_PIECES = 4
"""A reduce-scatter after a product runs beside it in so many pieces, of which the last is waited for (userbuffers'
"pipeline" method, num_splits of NVIDIA's published configurations)."""
GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced in fp32, as Megatron-LM's are with half-precision parameters."""
FP32 = "float32"
CallName = str | tuple[int, str] | tuple[str, int]
"""Name of an exchange: its own, with the kind of block (a row of ``TransformerShape.kinds``), or with the stage."""
_WORK = {"tp": "block", "cp": "context", "ep": "experts", "etp": "experts"}
"""Parts of a block's work that wait for the communication of each dimension of a plan."""
_SHARED = {CollectiveKind.ALL_GATHER: "gather", CollectiveKind.ALL_REDUCE: "reduce",
           CollectiveKind.REDUCE_SCATTER: "reduce"}


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """The work and the communication that the step of a plan is made of.

    Attributes:
        plan, shape: of it.
        blocks: work of one block of each kind of ``shape.kinds``, for one micro-batch on one rank.
        counts: blocks of each kind, [stage][chunk][kind]; recomputed: those of them that backward computes again.
        embedding, head: work of these pieces for one micro-batch on one rank.
        optimizer: of one stage's blocks, and of what the first and last stage have more; with sharded state, a share.
        exchanges: by name (``plan_calls``): those of a block for one micro-batch, the vocabulary's, those between
            stages, and gradients and parameters of each stage or, fully sharded, of each block and the rest ("root").
    """

    plan: ParallelPlan
    shape: TransformerShape
    blocks: tuple[PieceCost, ...]
    counts: Counts
    recomputed: Counts
    embedding: PieceCost
    head: PieceCost
    optimizer: tuple[LayerWork, ...]
    exchanges: Mapping[CallName, Exchange]

    def exchange(self, name: CallName) -> Exchange:
        """Return the collectives of a name, none where there are none."""
        return self.exchanges.get(name, NOTHING)

    def held(self, stage: int, chunk: int) -> list[tuple[int, int, int]]:
        """Return the kinds of blocks of a stage's chunk (rows of ``blocks``), how many there are of each, and how many
        of them backward computes again."""
        counts = zip(self.counts[stage][chunk], self.recomputed[stage][chunk], strict=True)
        return [(kind, count, rerun) for kind, (count, rerun) in enumerate(counts) if count]

    @property
    def whole(self) -> list[tuple[PieceCost, int]]:
        """Return the kinds of blocks of the model, and how many there are of each."""
        return [(block, sum(row[kind] for stage in self.counts for row in stage))
                for kind, block in enumerate(self.blocks)]


class PlanCalls:
    """The collectives of a plan's step, each kind of them once, under the name of the ``Exchange`` they make up.

    Attributes:
        calls: each once.
        of: by name, rows of ``calls`` and how many of each.
    """

    def __init__(self) -> None:
        self.calls: list[CollectiveCall] = []
        self.of: dict[CallName, list[tuple[int, int]]] = {}

    def add(self, key: CallName, kind: CollectiveKind, payload: float, place: Placement,
            dtype: str, count: int = 1) -> None:
        """Add ``count`` equal calls, if there is anything to communicate."""
        self.of.setdefault(key, [])
        if place.ranks > 1 and payload > 0 and count:
            self.of[key].append((len(self.calls), count))
            self.calls.append(CollectiveCall(kind, payload, place, dtype))

    def exchange(self, key: CallName, times: Sequence[tuple[float, float, float]]) -> Exchange:
        """Return all calls of a name, priced (``price_once``)."""
        rows = self.of[key]
        us = low = high = 0.0
        for row, count in rows:
            time, least, most = times[row]
            us += count * time
            low += count * least
            high += count * most
        return Exchange(us, low, high, sum(count for _, count in rows),
                        max((self.calls[row].placement.nodes for row, _ in rows), default=1))


def costs_of_plan(plan: ParallelPlan, shape: TransformerShape, pieces: LayerCosts,
                  collectives: CollectiveModel) -> PlanCosts:
    """Price everything a plan's step is made of.

    Raises:
        PlanError: the model does not divide as the plan wants it, or the cluster is too small.
        ShapeOnlyError: a piece cannot be traced.
    """
    check_decoder_plan(plan, shape, collectives.topology)
    part = block_part(plan, plan.samples)
    usual = max(shape.runs, key=lambda run: run.layers)
    per_parameter = pieces.optimizer(usual, part).times(1 / max(usual.block_parameters(plan.tp, plan.ep, plan.etp), 1))
    counts = [optimizer_parameters(plan, shape, stage) for stage in range(plan.pp)]
    optimizer = tuple(
        offloaded_step(count, gradient_bytes(plan, shape), shape.element_bytes, pieces.device)
        if plan.offload_optimizer else per_parameter.times(count) for count in counts)
    return replace(costs_of_layers(plan, shape, pieces, exchanges_of(plan, shape, collectives)), optimizer=optimizer)


def costs_of_layers(plan: ParallelPlan, shape: TransformerShape, pieces: LayerCosts,
                    exchanges: Mapping[CallName, Exchange]) -> PlanCosts:
    """Price a plan's work, all but the optimizer's."""
    part, kernels = block_part(plan, plan.samples), BlockKernels.of(plan)
    embedding, head = (pieces.cost(shape, TransformerPart(piece, plan.samples, plan.tp, plan.cp))
                       for piece in (Piece.EMBEDDING, Piece.HEAD))
    return PlanCosts(plan, shape, tuple(pieces.cost(kind, part, kernels) for kind in shape.kinds), spread(plan, shape),
                     recomputed(plan, shape), embedding, head, (), exchanges)


def exchanges_of(plan: ParallelPlan, shape: TransformerShape,
                 collectives: CollectiveModel) -> dict[CallName, Exchange]:
    """Price a plan's collectives."""
    calls = plan_calls(plan, shape, collectives.topology)
    times = price_once(calls.calls, collectives)
    return {name: calls.exchange(name, times) for name in calls.of} | _dispatched(plan, shape, collectives.topology)


def _dispatched(plan: ParallelPlan, shape: TransformerShape, on: Topology) -> dict[CallName, Exchange]:
    """Return the experts' exchanges that are no all-to-all of NCCL's."""
    if not plan.dispatcher.once or plan.ep == 1:
        return {}
    place = on.place(plan.spaced("ep"))
    tokens = plan.samples * shape.seq / plan.cp / (plan.tp if plan.sequence_parallel else 1)
    return {(row, f"experts {which.value}"): dispatched(tokens, kind, place, on)
            for row, kind in enumerate(shape.kinds) if kind.experts for which in (Pass.FORWARD, Pass.BACKWARD)}


def block_part(plan: ParallelPlan, microbatch: int) -> TransformerPart:
    """Return a rank's share of a block for so many sequences."""
    return TransformerPart(Piece.BLOCK, microbatch, plan.tp, plan.cp, plan.ep, plan.sequence_parallel, plan.etp,
                           plan.dispatcher.once and plan.ep > 1)


def plan_calls(plan: ParallelPlan, shape: TransformerShape, on: Topology) -> PlanCalls:
    """Collect the collectives of a plan that ``check_decoder_plan`` lets pass."""
    calls = PlanCalls()
    _within_layers(calls, plan, shape, on)
    _of_parameters(calls, plan, shape, on)
    return calls


def gradient_bytes(plan: ParallelPlan, shape: TransformerShape) -> int:
    """Bytes that one parameter's accumulated gradient takes."""
    return shape.element_bytes if plan.half_gradients else GRADIENT_BYTES


def stage_parameters(plan: ParallelPlan, shape: TransformerShape, stage: int) -> int:
    """Parameters of one rank of a stage."""
    held = blocks_of_stage(plan, shape, stage)
    count = sum(blocks * kind.block_parameters(plan.tp, plan.ep, plan.etp) for kind, blocks, _ in held)
    if plan.pp == 1:
        return count + shape.root_parameters(plan.tp)
    if stage == 0:
        count += shape.embedding_parameters(plan.tp)
    if stage == plan.pp - 1:
        count += shape.head_parameters(plan.tp)
    return count


def stage_experts(plan: ParallelPlan, shape: TransformerShape, stage: int) -> int:
    """Parameters of one rank of a stage that are experts'."""
    return sum(blocks * kind.expert_parameters(plan.ep, plan.expert_tp)
               for kind, blocks, _ in blocks_of_stage(plan, shape, stage))


def optimizer_parameters(plan: ParallelPlan, shape: TransformerShape, stage: int) -> float:
    """Parameters whose optimizer's state one rank of a stage has: with sharded state, a share of the experts' among the
    ranks that have the same ones, of all others among all replicas."""
    whole = stage_parameters(plan, shape, stage)
    if not plan.sharding:
        return whole
    experts = stage_experts(plan, shape, stage)
    return (whole - experts) / plan.shards + experts / plan.expert_shards


def _within_layers(calls: PlanCalls, plan: ParallelPlan, shape: TransformerShape, on: Topology) -> None:
    dtype, width = dtype_name(shape.dtype), shape.element_bytes
    tokens = plan.samples * shape.seq // plan.cp
    stream = float(tokens * shape.hidden * width)
    for row, kind in enumerate(shape.kinds):
        _within_block(calls, plan, kind, row, stream, on)
    if shape.tied and plan.pp > 1:
        tied = float(shape.vocabulary_parameters(plan.tp) * gradient_bytes(plan, shape))
        calls.add("tied", CollectiveKind.ALL_REDUCE, tied, on.place(plan.spaced("ends")), FP32)
    tensor, reduce = on.place(plan.spaced("tp")), CollectiveKind.ALL_REDUCE
    calls.add("embedding", reduce, stream, tensor, dtype)
    calls.add("loss", reduce, float(tokens * 4), tensor, FP32, 3)
    calls.add("head backward", reduce, stream, tensor, dtype)
    there, _ = of_boundary(stream, plan.tp, sequence_parallel=plan.sequence_parallel)
    for stage in range(plan.pp if plan.pp > 1 else 0):
        calls.add(("transfer", stage), there.kind, there.payload_bytes, on.place(plan.group("pp", stage)), dtype)


def _within_block(calls: PlanCalls, plan: ParallelPlan, kind: TransformerShape, row: int, stream: float,
                  on: Topology) -> None:
    dtype, width = dtype_name(kind.dtype), kind.element_bytes
    keys = float(plan.samples * kind.seq * kind.kv_width // plan.tp * width)
    tokens = plan.samples * kind.seq // plan.cp
    mixed = (0.0, 0.0) if kind.state is None else (
        float(tokens * kind.state.projected // plan.tp * width), float(tokens * kind.state.inner // plan.tp * width))
    parts = int(kind.attends or kind.state is not None) + _shared_forward(plan, kind)
    routed, shared = _routed(plan, kind, stream)
    for each in of_block(stream, sequence_parallel=plan.sequence_parallel, keys=keys, mixed=mixed, split=parts,
                         routed=routed, shared=shared):
        place, name = on.place(plan.spaced(each.dimension)), _WORK[each.dimension]
        # Overlapped gathers come piece by piece before their products; in backward all have one to run beside. They
        # are written into the other GPUs' memory (userbuffers, symmetric memory), which those of a node alone allow.
        forward = each.during is Pass.FORWARD
        beside = 0.0 if not plan.tensor_overlap or each.dimension != "tp" or place.nodes > 1 else (
            1 - 1 / OVERLAP_PIECES if forward and each.kind is CollectiveKind.REDUCE_SCATTER else 1.0)
        for what, share in ((name, 1 - beside), ("beside", beside)):
            calls.add((row, f"{what} {each.during.value}"), each.kind, each.payload_bytes * share, place, dtype,
                      each.count)


def _routed(plan: ParallelPlan, kind: TransformerShape, stream: float) -> tuple[float, float]:
    """Return bytes that the most loaded rank sends to experts, and gathers for them. With sequence parallelism each
    tensor-parallel rank sends its own tokens, and those that share an expert gather them there (Megatron-Core's
    all-to-all dispatcher); without, each sends all of them."""
    times = expected_places(kind.top_k, kind.experts, plan.ep) if plan.dispatcher.once and kind.experts else kind.top_k
    every = stream * times * kind.imbalance if kind.experts else 0.0
    if not plan.sequence_parallel:
        return every, 0.0
    return every / plan.tp, every if plan.expert_tp > 1 else 0.0


def _shared_forward(plan: ParallelPlan, kind: TransformerShape) -> bool:
    """Return whether tensor-parallel ranks share the work of a block's feed-forward part; with sequence parallelism
    experts are their ranks' own."""
    if kind.experts and plan.sequence_parallel:
        return kind.shared_ffn > 0
    return kind.experts > 0 or kind.ffn > 0


def _of_parameters(calls: PlanCalls, plan: ParallelPlan, shape: TransformerShape, on: Topology) -> None:
    width = shape.element_bytes
    if plan.sharding is Sharding.PARAMETERS and plan.pp == 1:
        # What each expert has is shared by fewer replicas.
        counts: list[tuple[int | None, bool, int]] = [(None, False, shape.root_parameters(plan.tp))]
        for row, kind in enumerate(shape.kinds):
            counts += [(row, False, kind.dense_parameters(plan.tp)),
                       (row, True, kind.expert_parameters(plan.ep, plan.expert_tp))]
        for block, experts, count in counts:
            # What forward gathers of a block, backward gathers again: the estimate takes it twice.
            once = [each for each in of_replicas(plan.sharding, float(count * width), float(count * width))
                    if each.kind is not CollectiveKind.ALL_GATHER or each.during is Pass.FORWARD]
            for each in once:
                name = _SHARED[each.kind]
                key: CallName = f"root {name}" if block is None else (block, name)
                _of_state(calls, key, each, plan, shape, on, experts=experts)
        return
    once_a_step = Sharding.OPTIMIZER if plan.sharding is Sharding.PARAMETERS else plan.sharding
    for stage in range(plan.pp):
        experts_count = stage_experts(plan, shape, stage)
        dense = stage_parameters(plan, shape, stage) - experts_count
        for experts, count in ((False, dense), (True, experts_count if plan.expert_replicas > 1 else 0)):
            for each in of_replicas(once_a_step, float(count * gradient_bytes(plan, shape)), float(count * width)):
                _of_state(calls, (_SHARED[each.kind], stage), each, plan, shape, on, stage, experts=experts)


def _of_state(calls: PlanCalls, key: CallName, each: Communication, plan: ParallelPlan, shape: TransformerShape,
              on: Topology, stage: int = 0, *, experts: bool) -> None:
    """A collective of replicas, among those that share their state; what these have reduced of gradients is then
    all-reduced with the other copies of it (HSDP)."""
    kind = "expert " if experts else ""
    dtype = dtype_name(shape.dtype)
    if plan.pp > 1 or plan.sharding is not Sharding.PARAMETERS:
        dtype = FP32 if each.kind is not CollectiveKind.ALL_GATHER and not plan.half_gradients else dtype
    if plan.replicate == 1:
        ranks = plan.spaced("experts" if experts else "dpcp", stage)
        count = 1 if plan.bucket_mb is None else len(bucket_shares(plan, shape, stage, experts=experts))
        calls.add(key, each.kind, each.payload_bytes / count, on.place(ranks), dtype, count)
        return
    shards = plan.spaced(f"{kind}shards", stage)
    calls.add(key, each.kind, each.payload_bytes, on.place(shards), dtype)
    if each.kind is not CollectiveKind.ALL_GATHER:
        calls.add(key, CollectiveKind.ALL_REDUCE, each.payload_bytes / len(shards),
                  on.place(plan.spaced(f"{kind}copies", stage)), dtype)
