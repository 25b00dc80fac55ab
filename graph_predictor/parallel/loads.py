"""``Loads``: everything a plan's step is made of, each priced on its own: work of every piece, every collective.

Collectives are those of Megatron-LM (tensor, sequence, context, expert and pipeline parallelism), DDP and FSDP, which
``graph_predictor.comm.traffic`` lists, and the vocabulary's: the embedding's all-reduce; the loss's three small ones;
the head's in backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_predictor.comm.traffic import Pass, of_block, of_boundary, of_replicas
from graph_predictor.parallel.decoder import check_decoder_plan
from graph_predictor.parallel.pieces import LayerPieces, LayerWork, PieceCost
from kernel_models.collectives import (
    CollectiveCall,
    CollectiveKind,
    CollectiveModel,
    CommTimes,
    Placement,
    price_calls,
)
from kernel_models.collectives.call import dtype_name
from tracer.parallel_plan import ParallelPlan, Sharding
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape

OVERLAP_PIECES = 4
"""A reduce-scatter after a product runs beside it in so many pieces, of which the last is waited for (userbuffers'
"pipeline" method, num_splits of NVIDIA's published configurations)."""
GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced in fp32, as Megatron-LM's are with half-precision parameters."""
FP32 = "float32"
_WORK = {"tp": "block", "cp": "context", "ep": "experts"}
"""Parts of a block's work that wait for the communication of each dimension of a plan."""
_SHARED = {CollectiveKind.ALL_GATHER: "gather", CollectiveKind.ALL_REDUCE: "reduce",
           CollectiveKind.REDUCE_SCATTER: "reduce"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives in a row: µs, the 80% interval's ends, how many, of how many ranks, whether they leave the node."""

    us: float = 0.0
    low: float = 0.0
    high: float = 0.0
    count: int = 0
    ranks: int = 1
    between_nodes: bool = False

    def times(self, factor: int) -> Exchange:
        """Return so many of them."""
        return Exchange(self.us * factor, self.low * factor, self.high * factor, self.count * factor, self.ranks,
                        self.between_nodes)


@dataclass(frozen=True, slots=True)
class Loads:
    """The work and the communication that the step of a plan is made of.

    Attributes:
        plan, shape: of it.
        block, embedding, head: work of the pieces for one micro-batch on one rank.
        optimizer: of one stage's blocks, and of what the first and last stage have more; with sharded state, a share.
        block_forward, block_backward: collectives of one block that its work waits for.
        beside_forward, beside_backward: those that its products hide, as far as they last.
        experts_forward, experts_backward: the same of its experts.
        context_forward, context_backward: of its attention, which may be hidden behind it.
        embedding_forward, head_forward, head_backward: the vocabulary's.
        transfer: between a stage and the next one, by stage.
        reduce: gradients of each stage; gather: its parameters, where the optimizer's state is sharded.
        block_gather, block_reduce, root_gather, root_reduce: of one block, and of embedding and head, fully sharded.
    """

    plan: ParallelPlan
    shape: TransformerShape
    block: PieceCost
    embedding: PieceCost
    head: PieceCost
    optimizer: tuple[LayerWork, ...]
    block_forward: Exchange
    block_backward: Exchange
    beside_forward: Exchange
    beside_backward: Exchange
    experts_forward: Exchange
    experts_backward: Exchange
    context_forward: Exchange
    context_backward: Exchange
    embedding_forward: Exchange
    head_forward: Exchange
    head_backward: Exchange
    transfer: tuple[Exchange, ...]
    reduce: tuple[Exchange, ...]
    gather: tuple[Exchange, ...]
    block_gather: Exchange
    block_reduce: Exchange
    root_gather: Exchange
    root_reduce: Exchange


class _Calls:
    """Collects calls under a key, and prices them all at once."""

    def __init__(self) -> None:
        self.calls: list[CollectiveCall] = []
        self.of: dict[object, list[tuple[int, int]]] = {}

    def add(self, key: object, kind: CollectiveKind, payload: float, place: Placement, dtype: str,
            count: int = 1) -> None:
        self.of.setdefault(key, [])
        if place.ranks > 1 and payload > 0 and count:
            self.of[key].append((len(self.calls), count))
            self.calls.append(CollectiveCall(kind, payload, place, dtype))

    def exchange(self, key: object, times: CommTimes) -> Exchange:
        us = low = high = 0.0
        number, ranks, between = 0, 1, False
        for row, count in self.of.get(key, ()):
            us += count * float(times.time_us[row])
            low += count * float(times.low_us[row])
            high += count * float(times.high_us[row])
            number += count
            ranks = max(ranks, self.calls[row].placement.ranks)
            between |= self.calls[row].placement.nodes > 1
        return Exchange(us, low, high, number, ranks, between)


def loads_of(plan: ParallelPlan, shape: TransformerShape, pieces: LayerPieces, collectives: CollectiveModel) -> Loads:
    """Price everything a plan's step is made of.

    Raises:
        PlanError: the model does not divide as the plan wants it, or the cluster is too small.
        ShapeOnlyError: a piece cannot be traced.
    """
    on = collectives.topology
    check_decoder_plan(plan, shape, on)
    part = TransformerPart(Piece.BLOCK, plan.samples, plan.tp, plan.cp, plan.ep, plan.sequence_parallel)
    outer = {
        piece: TransformerPart(piece, plan.samples, plan.tp, plan.cp) for piece in (Piece.EMBEDDING, Piece.HEAD)
    }
    calls = _Calls()
    _within_layers(calls, plan, shape, collectives)
    _of_parameters(calls, plan, shape, collectives)
    times = price_calls(calls.calls, collectives)

    def of(name: object) -> Exchange:
        return calls.exchange(name, times)

    one_block = pieces.optimizer(shape, part)
    per_parameter = one_block.times(1 / max(shape.block_parameters(plan.tp, plan.ep), 1))
    shards = plan.dp * plan.cp if plan.sharding else 1
    optimizer = tuple(per_parameter.times(stage_parameters(plan, shape, stage) / shards) for stage in range(plan.pp))
    return Loads(
        plan, shape, pieces.cost(shape, part), pieces.cost(shape, outer[Piece.EMBEDDING]),
        pieces.cost(shape, outer[Piece.HEAD]), optimizer, of("block forward"), of("block backward"),
        of("beside forward"), of("beside backward"), of("experts forward"), of("experts backward"),
        of("context forward"), of("context backward"), of("embedding"), of("loss"), of("head backward"),
        tuple(of(("transfer", stage)) for stage in range(plan.pp)),
        tuple(of(("reduce", stage)) for stage in range(plan.pp)),
        tuple(of(("gather", stage)) for stage in range(plan.pp)),
        of("block gather"), of("block reduce"), of("root gather"), of("root reduce"))


def stage_parameters(plan: ParallelPlan, shape: TransformerShape, stage: int) -> int:
    """Parameters of one rank of a stage."""
    count = shape.layers // plan.pp * shape.block_parameters(plan.tp, plan.ep)
    if stage == 0:
        count += shape.embedding_parameters(plan.tp)
    if stage == plan.pp - 1:
        count += shape.head_parameters(plan.tp)
    return count


def _within_layers(calls: _Calls, plan: ParallelPlan, shape: TransformerShape, collectives: CollectiveModel) -> None:
    on, dtype, width = collectives.topology, dtype_name(shape.dtype), shape.element_bytes
    tokens = plan.samples * shape.seq // plan.cp
    stream = float(tokens * shape.hidden * width)
    keys = float(2 * plan.samples * shape.seq * shape.kv_heads // plan.tp * shape.width_of_head * width)
    routed = stream * shape.top_k if shape.experts else 0.0
    for each in of_block(stream, sequence_parallel=plan.sequence_parallel, keys=keys, routed=routed):
        place, name = on.place(plan.group(each.dimension)), _WORK[each.dimension]
        # Overlapped gathers come piece by piece before their products; in backward all have one to run beside.
        forward = each.during is Pass.FORWARD
        beside = 0.0 if not plan.tensor_overlap or each.dimension != "tp" else (
            1 - 1 / OVERLAP_PIECES if forward and each.kind is CollectiveKind.REDUCE_SCATTER else 1.0)
        calls.add(f"{name} {each.during.value}", each.kind, each.payload_bytes * (1 - beside), place, dtype, each.count)
        calls.add(f"beside {each.during.value}", each.kind, each.payload_bytes * beside, place, dtype, each.count)
    tensor, reduce = on.place(plan.group("tp")), CollectiveKind.ALL_REDUCE
    calls.add("embedding", reduce, stream, tensor, dtype)
    calls.add("loss", reduce, float(tokens * 4), tensor, FP32, 3)
    calls.add("head backward", reduce, stream, tensor, dtype)
    there, _ = of_boundary(stream, plan.tp, sequence_parallel=plan.sequence_parallel)
    for stage in range(plan.pp if plan.pp > 1 else 0):
        calls.add(("transfer", stage), there.kind, there.payload_bytes, on.place(plan.group("pp", stage)), dtype)


def _of_parameters(calls: _Calls, plan: ParallelPlan, shape: TransformerShape, collectives: CollectiveModel) -> None:
    on, dtype, width = collectives.topology, dtype_name(shape.dtype), shape.element_bytes
    replicas = on.place(plan.group("dpcp"))
    if plan.sharding is Sharding.PARAMETERS:
        block = shape.block_parameters(plan.tp, plan.ep)
        root = shape.embedding_parameters(plan.tp) + shape.head_parameters(plan.tp)
        for name, count in (("block", block), ("root", root)):
            # What forward gathers of a block, backward gathers again: the estimate takes it twice.
            once = [each for each in of_replicas(plan.sharding, float(count * width), float(count * width))
                    if each.kind is not CollectiveKind.ALL_GATHER or each.during is Pass.FORWARD]
            for each in once:
                calls.add(f"{name} {_SHARED[each.kind]}", each.kind, each.payload_bytes, replicas, dtype)
        return
    for stage in range(plan.pp):
        # What each expert has is shared by fewer replicas.
        experts = shape.layers // plan.pp * shape.expert_parameters(plan.ep, plan.tp)
        dense = stage_parameters(plan, shape, stage) - experts
        groups = [(dense, on.place(plan.group("dpcp", stage)))]
        if experts and plan.dp * plan.cp > plan.ep:
            groups.append((experts, on.place(plan.group("experts", stage))))
        for count, place in groups:
            for each in of_replicas(plan.sharding, float(count * GRADIENT_BYTES), float(count * width)):
                name = _SHARED[each.kind]
                calls.add((name, stage), each.kind, each.payload_bytes, place, FP32 if name == "reduce" else dtype)
