"""``bucket_shares``: how PyTorch's DDP cuts a stage's gradients into buckets. Each bucket is one all-reduce.

``graph_predictor.comm.traffic.buckets_of`` is the rule. Gradients become complete in the order of backward: the head's,
the blocks' from the last to the first, then the embedding's with those of a tied head. In a block the order is: last
product of the feed-forward part, its other products, attention's output, all others. The last bucket is full only when
backward ends, so nothing hides its all-reduce. A large embedding is in it.
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
    """Return each bucket's share of a stage's gradients, in the order of reduction; ``plan.bucket_mb`` (MiB) limits a
    bucket. Counted are the experts' gradients with ``experts``, else all others."""
    sizes = [size for size in (_experts if experts else _dense)(plan, shape, stage) if size]
    whole = sum(sizes)
    found = buckets_of([(shape.dtype, size * shape.element_bytes) for size in sizes], plan.bucket_mb)
    return tuple(sum(sizes[each] for each in bucket) / whole for bucket in found) or (1.0,)


def _dense(plan: ParallelPlan, shape: TransformerShape, stage: int) -> Iterator[int]:
    """Yield the parameters of each tensor outside experts, in the order of backward."""
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
    """Yield the parameters of each expert's two products, in the order of backward."""
    for kind, count, _ in reversed(blocks_of_stage(plan, shape, stage)):
        if kind.experts:
            each = kind.experts // plan.ep
            one = kind.expert_parameters(plan.ep, plan.expert_tp) // each
            down = kind.hidden * kind.ffn // plan.expert_tp
            for _ in range(count * each):
                yield from (down, one - down)
