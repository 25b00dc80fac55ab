"""``PlanCosts``: the work and the collectives of a plan's step, each priced on its own.

Collectives are those of Megatron-LM (tensor, sequence, context, expert and pipeline parallelism), DDP and FSDP;
``graph_predictor.comm.traffic`` lists them. The vocabulary adds the embedding's all-reduce, three small ones of the
loss, and the head's in backward.

Fully sharded parameters without a pipeline are gathered block by block in every pass. With a pipeline each stage
gathers its own once a step and keeps them until the last micro-batch's backward. It accumulates gradients in fp32 and
reduces them once, as torchtitan does by default (``fsdp_reshard_after_forward = "default"``).

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
"""Bandwidth of host memory for each GPU's part of the update, 10⁹ bytes/s. It is about half of a GPU's share where two
sockets with eight channels of DDR5-4800 (614.4 GB/s together) serve eight GPUs."""
UPDATE_BYTES = 28
"""Bytes that the update of one parameter moves, in fp32: it reads parameter, gradient and both moments, and writes all
except the gradient."""
SPREAD = 2.0
"""Factor from the time to either end of its 80% interval."""


def offloaded_step(parameters: float, gradient_bytes: int, parameter_bytes: int, device: DeviceSpec) -> LayerWork:
    """Return the optimizer's step with its state in host memory, as with Megatron-Core's ``--optimizer-cpu-offload``.
    One after another, gradients go to the host, its cores update (Adam in fp32), and parameters come back. No
    measurement has tested this: the link is the data sheet's, the host's share is assumed.

    Args:
        parameters: number of parameters whose state the rank has.
        gradient_bytes, parameter_bytes: bytes that go to the host, and come back, for each parameter.
    """
    link = device.host_gbps or HOST_GBPS
    us = parameters * ((gradient_bytes + parameter_bytes) / link + (UPDATE_BYTES + parameter_bytes) / HOST_GBPS) * 1e-3
    return LayerWork(others=us, low=us / SPREAD, high=us * SPREAD, sources={int(Source.HEURISTIC): us})


OVERLAP_PIECES = 4
"""Pieces of a reduce-scatter that overlaps the product before it; only the last piece is exposed (userbuffers'
"pipeline" method, num_splits of NVIDIA's published configurations)."""
GRADIENT_BYTES = 4
"""Bytes of a gradient that is accumulated and reduced in fp32, as in Megatron-LM with half-precision parameters."""
FP32 = "float32"
CallName = str | tuple[int, str] | tuple[str, int]
"""Name of an exchange: a word, (row of ``TransformerShape.kinds``, word), or (word, stage)."""
_WORK = {"tp": "block", "cp": "context", "ep": "experts", "etp": "experts"}
"""Parts of a block's work that wait for the communication of each dimension of a plan."""
_SHARED = {CollectiveKind.ALL_GATHER: "gather", CollectiveKind.ALL_REDUCE: "reduce",
           CollectiveKind.REDUCE_SCATTER: "reduce"}


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """The work and the communication of a plan's step.

    Attributes:
        plan, shape: the plan, and the decoder.
        blocks: work of one block of each kind of ``shape.kinds``, for one micro-batch on one rank.
        counts: blocks of each kind, [stage][chunk][kind]; recomputed: how many of them backward computes again.
        embedding, head: work of these pieces for one micro-batch on one rank.
        optimizer: the optimizer's work on a rank of each stage.
        exchanges: collectives by name (``plan_calls``): a block's for one micro-batch, the vocabulary's, those between
            stages. Gradients and parameters are a stage's or, fully sharded, a block's and the rest's ("root").
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
        """Return the collectives of a name; ``NOTHING`` if there are none."""
        return self.exchanges.get(name, NOTHING)

    def held(self, stage: int, chunk: int) -> list[tuple[int, int, int]]:
        """Return (kind, count, recomputed) of the blocks of a stage's chunk: the row of ``blocks``, how many there
        are, and how many of these backward computes again."""
        counts = zip(self.counts[stage][chunk], self.recomputed[stage][chunk], strict=True)
        return [(kind, count, rerun) for kind, (count, rerun) in enumerate(counts) if count]

    @property
    def whole(self) -> list[tuple[PieceCost, int]]:
        """Return each kind of block of the model with its number of blocks."""
        return [(block, sum(row[kind] for stage in self.counts for row in stage))
                for kind, block in enumerate(self.blocks)]


class PlanCalls:
    """The collectives of a plan's step, equal ones once, grouped by the name of their ``Exchange``.

    Attributes:
        calls: the collectives.
        of: by name, pairs of a row of ``calls`` and its count.
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
    """Price all work and collectives of a plan's step.

    Raises:
        PlanError: the plan does not divide the model's sizes, or the cluster is too small.
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
    """Price a plan's work without the optimizer's; ``exchanges`` are its priced collectives."""
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
    """Return the experts' exchanges of a dispatcher that does not use NCCL's all-to-all; else nothing."""
    if not plan.dispatcher.once or plan.ep == 1:
        return {}
    place = on.place(plan.spaced("ep"))
    tokens = plan.samples * shape.seq / plan.cp / (plan.tp if plan.sequence_parallel else 1)
    return {(row, f"experts {which.value}"): dispatched(tokens, kind, place, on)
            for row, kind in enumerate(shape.kinds) if kind.experts for which in (Pass.FORWARD, Pass.BACKWARD)}


def block_part(plan: ParallelPlan, microbatch: int) -> TransformerPart:
    """Return a rank's share of a block for a micro-batch of ``microbatch`` sequences."""
    return TransformerPart(Piece.BLOCK, microbatch, plan.tp, plan.cp, plan.ep, plan.sequence_parallel, plan.etp,
                           plan.dispatcher.once and plan.ep > 1)


def plan_calls(plan: ParallelPlan, shape: TransformerShape, on: Topology) -> PlanCalls:
    """Collect the collectives of a plan that ``check_decoder_plan`` accepts."""
    calls = PlanCalls()
    _within_layers(calls, plan, shape, on)
    _of_parameters(calls, plan, shape, on)
    return calls


def gradient_bytes(plan: ParallelPlan, shape: TransformerShape) -> int:
    """Return the bytes of one parameter's accumulated gradient."""
    return shape.element_bytes if plan.half_gradients else GRADIENT_BYTES


def stage_parameters(plan: ParallelPlan, shape: TransformerShape, stage: int) -> int:
    """Return the number of parameters on one rank of a stage."""
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
    """Return the number of the experts' parameters on one rank of a stage."""
    return sum(blocks * kind.expert_parameters(plan.ep, plan.expert_tp)
               for kind, blocks, _ in blocks_of_stage(plan, shape, stage))


def optimizer_parameters(plan: ParallelPlan, shape: TransformerShape, stage: int) -> float:
    """Return for how many parameters one rank of a stage holds optimizer state. Sharded state of experts is divided
    among ranks with the same experts, other state among the replicas that share it."""
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
        # Overlapped gathers come piece by piece before their products; in backward every collective has a product to
        # overlap. Pieces are written into other GPUs' memory (userbuffers, symmetric memory): only within a node.
        forward = each.during is Pass.FORWARD
        beside = 0.0 if not plan.tensor_overlap or each.dimension != "tp" or place.nodes > 1 else (
            1 - 1 / OVERLAP_PIECES if forward and each.kind is CollectiveKind.REDUCE_SCATTER else 1.0)
        for what, share in ((name, 1 - beside), ("beside", beside)):
            calls.add((row, f"{what} {each.during.value}"), each.kind, each.payload_bytes * share, place, dtype,
                      each.count)


def _routed(plan: ParallelPlan, kind: TransformerShape, stream: float) -> tuple[float, float]:
    """Return the bytes that the most loaded rank sends to experts, and that it gathers for them. With sequence
    parallelism each tensor-parallel rank sends its own tokens, and ranks that share an expert gather them there
    (Megatron-Core's all-to-all dispatcher). Without it, each rank sends all tokens."""
    times = expected_places(kind.top_k, kind.experts, plan.ep) if plan.dispatcher.once and kind.experts else kind.top_k
    every = stream * times * kind.imbalance if kind.experts else 0.0
    if not plan.sequence_parallel:
        return every, 0.0
    return every / plan.tp, every if plan.expert_tp > 1 else 0.0


def _shared_forward(plan: ParallelPlan, kind: TransformerShape) -> bool:
    """Return whether tensor-parallel ranks share the work of a block's feed-forward part. With sequence parallelism
    they share only the shared experts'."""
    if kind.experts and plan.sequence_parallel:
        return kind.shared_ffn > 0
    return kind.experts > 0 or kind.ffn > 0


def _of_parameters(calls: PlanCalls, plan: ParallelPlan, shape: TransformerShape, on: Topology) -> None:
    width = shape.element_bytes
    if plan.sharding is Sharding.PARAMETERS and plan.pp == 1:
        # Experts' parameters have fewer replicas.
        counts: list[tuple[int | None, bool, int]] = [(None, False, shape.root_parameters(plan.tp))]
        for row, kind in enumerate(shape.kinds):
            counts += [(row, False, kind.dense_parameters(plan.tp)),
                       (row, True, kind.expert_parameters(plan.ep, plan.expert_tp))]
        for block, experts, count in counts:
            # Backward gathers a block's parameters again: the estimate counts this call twice.
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
    """Add a collective of replicas. If there are copies of the sharded state (HSDP), it runs among the ranks of one
    copy, and their reduced gradients are then all-reduced among the copies."""
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
