"""``Loads``: everything a plan's step is made of, each priced on its own: work of every piece, every collective.

Collectives are those of Megatron-LM (tensor, sequence, context, expert and pipeline parallelism), DDP and FSDP:

=================  ====================================================================================================
tensor             an all-reduce after attention and one after the feed-forward part, in backward one before each; with
                   sequence parallelism a reduce-scatter and an all-gather in place of each
context            keys and values to all parts of the sequence, their gradients back
experts            an all-to-all to the experts and one back, in either direction
vocabulary         the embedding's all-reduce; the loss's three small ones; the head's in backward
pipeline           the residual stream between stages, and its gradient back
data               gradients all-reduced; sharded: reduce-scattered, parameters gathered; fully: block by block
=================  ====================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

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
        """So many of them."""
        return Exchange(self.us * factor, self.low * factor, self.high * factor, self.count * factor, self.ranks,
                        self.between_nodes)


@dataclass(frozen=True, slots=True)
class Loads:
    """What the step of a plan is made of.

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
        of("beside forward"), of("beside backward"), of("experts"), of("experts"), of("context forward"),
        of("context backward"), of("embedding"), of("loss"), of("head backward"),
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
    tensor = on.place(plan.group("tp"))
    reduce, gather, scatter = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    if plan.tensor_overlap:
        # Gathers come piece by piece before their products; in backward all have a product of their own to run beside.
        calls.add("block forward", scatter, stream / OVERLAP_PIECES, tensor, dtype, 2)
        calls.add("beside forward", scatter, stream * (1 - 1 / OVERLAP_PIECES), tensor, dtype, 2)
        calls.add("beside forward", gather, stream, tensor, dtype, 2)
        calls.add("beside backward", scatter, stream, tensor, dtype, 2)
        calls.add("beside backward", gather, stream, tensor, dtype, 4)
    elif plan.sequence_parallel:
        for key, more in (("block forward", 0), ("block backward", 2)):
            calls.add(key, scatter, stream, tensor, dtype, 2)
            # What the products' weights need of their inputs is gathered once more in backward.
            calls.add(key, gather, stream, tensor, dtype, 2 + more)
    else:
        for key in ("block forward", "block backward"):
            calls.add(key, reduce, stream, tensor, dtype, 2)
    calls.add("embedding", reduce, stream, tensor, dtype)
    calls.add("loss", reduce, float(tokens * 4), tensor, FP32, 3)
    calls.add("head backward", reduce, stream, tensor, dtype)
    keys = float(2 * plan.samples * shape.seq * shape.kv_heads // plan.tp * shape.width_of_head * width)
    context = on.place(plan.group("cp"))
    calls.add("context forward", gather, keys, context, dtype)
    calls.add("context backward", gather, keys, context, dtype)
    calls.add("context backward", scatter, keys, context, dtype)
    if shape.experts:
        calls.add("experts", CollectiveKind.ALL_TO_ALL, stream * shape.top_k, on.place(plan.group("ep")), dtype, 2)
    sent = stream / plan.tp if plan.sequence_parallel else stream
    for stage in range(plan.pp if plan.pp > 1 else 0):
        calls.add(("transfer", stage), CollectiveKind.SEND_RECV, sent, on.place(plan.group("pp", stage)), dtype)


def _of_parameters(calls: _Calls, plan: ParallelPlan, shape: TransformerShape, collectives: CollectiveModel) -> None:
    on, dtype, width = collectives.topology, dtype_name(shape.dtype), shape.element_bytes
    reduce, gather, scatter = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    replicas = on.place(plan.group("dpcp"))
    if plan.sharding is Sharding.PARAMETERS:
        block = shape.block_parameters(plan.tp, plan.ep)
        root = shape.embedding_parameters(plan.tp) + shape.head_parameters(plan.tp)
        for name, count in (("block", block), ("root", root)):
            calls.add(f"{name} gather", gather, float(count * width), replicas, dtype)
            calls.add(f"{name} reduce", scatter, float(count * width), replicas, dtype)
        return
    for stage in range(plan.pp):
        # What each expert has is shared by fewer replicas.
        experts = shape.layers // plan.pp * shape.expert_parameters(plan.ep, plan.tp)
        dense = stage_parameters(plan, shape, stage) - experts
        groups = [(dense, on.place(plan.group("dpcp", stage)))]
        if experts and plan.dp * plan.cp > plan.ep:
            groups.append((experts, on.place(plan.group("experts", stage))))
        for count, place in groups:
            if plan.sharding is Sharding.NONE:
                calls.add(("reduce", stage), reduce, float(count * GRADIENT_BYTES), place, FP32)
            else:
                calls.add(("reduce", stage), scatter, float(count * GRADIENT_BYTES), place, FP32)
                calls.add(("gather", stage), gather, float(count * width), place, dtype)
