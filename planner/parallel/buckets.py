"""``bucket_shares``: how PyTorch's DDP cuts a stage's gradients into buckets, each of which is one all-reduce.

``graph_predictor.comm.traffic.buckets_of`` is the rule. Gradients are complete in the order of backward: the head's;
of each block, the last one first, those of the feed-forward part's two products, of attention's output and of the rest;
and the embedding's, which a tied head shares. The last bucket is full when backward ends, so it is reduced after it: a
large embedding is never hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from graph_predictor.comm.traffic import buckets_of
from planner.parallel.stages import blocks_of_stage
from tracer.parallel_plan import ParallelPlan
from tracer.shape_only.transformer import TransformerShape


@lru_cache(maxsize=4096)
def bucket_shares(plan: ParallelPlan, shape: TransformerShape, stage: int, *, experts: bool = False
                  ) -> tuple[float, ...]:
    """Return the share of a stage's gradients, of the experts' or of all others, in each bucket of a plan that gives
    their size (``bucket_mb``), in the order in which they are reduced."""
    sizes = [size for size in (_experts if experts else _dense)(plan, shape, stage) if size]
    whole = sum(sizes)
    found = buckets_of([(shape.dtype, size * shape.element_bytes) for size in sizes], plan.bucket_mb)
    return tuple(sum(sizes[each] for each in bucket) / whole for bucket in found) or (1.0,)


def _dense(plan: ParallelPlan, shape: TransformerShape, stage: int) -> Iterator[int]:
    """Parameters of each tensor that no expert has, in the order of backward."""
    if stage == plan.pp - 1:
        shared = shape.vocabulary_parameters(plan.tp) if shape.tied and plan.pp == 1 else 0
        yield shape.head_parameters(plan.tp) - shared
    for kind, count, _ in reversed(blocks_of_stage(plan, shape, stage)):
        inner = kind.shared_ffn if kind.experts else kind.ffn
        down, forward = kind.hidden * inner // plan.tp, kind.feed_forward_parameters(plan.tp) if inner else 0
        out = kind.heads // plan.tp * kind.width_of_values * kind.hidden if kind.attends else 0
        rest = kind.dense_parameters(plan.tp) - forward - out
        for _ in range(count):
            yield from (down, forward - down, out, rest)
    if stage == 0:
        yield shape.embedding_parameters(plan.tp)


def _experts(plan: ParallelPlan, shape: TransformerShape, stage: int) -> Iterator[int]:
    """Parameters of each expert's two products, in the order of backward."""
    for kind, count, _ in reversed(blocks_of_stage(plan, shape, stage)):
        if kind.experts:
            each = kind.experts // plan.ep
            one = kind.expert_parameters(plan.ep, plan.expert_tp) // each
            down = kind.hidden * kind.ffn // plan.expert_tp
            for _ in range(count * each):
                yield from (down, one - down)
