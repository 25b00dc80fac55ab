"""Neighbours of a decoder's sizes: the same model with one of them changed, where it can be built and split so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tracer.parallel_plan import ParallelPlan
from tracer.shape_only.transformer import TransformerShape

HEAD_SIZES = range(32, 257, 8)
"""Sizes of heads that are tried: those that fused attention has kernels for, in steps of one load."""
STEPS = (8, 64, 128, 256)
"""Multiples, on each rank, that inner widths and vocabularies are rounded to."""
NEAR, MOST_WIDTHS = 0.04, 6
"""How far inner widths and widths are changed, and how many of each kind to either side are tried."""


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """A change of one size.

    Attributes:
        setting: which: "heads", "ffn", "vocab", "hidden", "microbatch", "tp" or "".
        value: the new one, as people write it.
        shape, plan: the decoder and its plan with it.
        credited: more parameters count as more model: time is compared for each of them.
    """

    setting: str
    value: str
    shape: TransformerShape
    plan: ParallelPlan
    credited: bool = False


def neighbours(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    """Yield the changes, setting by setting; none of them is the decoder itself."""
    seen = {(shape, plan)}
    for each in (*_heads(shape, plan), *_inner(shape, plan), *_vocabulary(shape, plan), *_widths(shape, plan),
                 *_microbatches(shape, plan), *_tensor(shape, plan)):
        if (each.shape, each.plan) not in seen:
            seen.add((each.shape, each.plan))
            yield each


def changed(shape: TransformerShape, **values: Any) -> TransformerShape:
    """Return the decoder with other sizes, in every run of its blocks that has the decoder's own."""
    own = {name: getattr(shape, name) for name in values}
    stack = tuple(replace(run, hidden=values.get("hidden", run.hidden), **{
        name: value for name, value in values.items() if getattr(run, name) == own[name]}) for run in shape.stack)
    return replace(shape, stack=stack, **values)


def _heads(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    """As many parameters in other heads: of queries, and in the same proportion of keys and values."""
    if shape.latent is not None or not any(run.attends for run in shape.runs):
        return
    size = shape.width_of_head
    inner, keys = shape.heads * size, shape.kv_heads * size
    for new in HEAD_SIZES:
        heads, kv_heads = inner // new, keys // new
        if inner % new or keys % new or heads % kv_heads or heads % plan.tp or kv_heads % plan.tp:
            continue
        given = new if shape.head_size or inner != shape.hidden else 0
        yield ShapeChange("heads", f"{heads} of {new}",
                          changed(shape, heads=heads, kv_heads=kv_heads, head_size=given), plan)


def _around(size: int, ranks: int) -> list[int]:
    """Multiples of ``STEPS`` times the ranks nearest to a size, and the nearest of a tile's width."""
    found = set()
    for step in (each * ranks for each in STEPS):
        for value in (size // step * step, -(-size // step) * step):
            found.add(value)
    wide = 128 * ranks
    for offset in range(1, MOST_WIDTHS + 1):
        found |= {(size // wide - offset + 1) * wide, (size // wide + offset) * wide}
    near = sorted(each for each in found if each > 0 and abs(each / size - 1) <= NEAR)
    below, above = [each for each in near if each < size], [each for each in near if each > size]
    return below[-MOST_WIDTHS:] + above[:MOST_WIDTHS]


def _inner(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    ranks = plan.expert_tp if shape.experts else plan.tp
    if not shape.ffn:
        return
    for ffn in _around(shape.ffn, ranks):
        yield ShapeChange("ffn", f"{ffn:,}", changed(shape, ffn=ffn), plan, credited=True)


def _vocabulary(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    """Larger ones alone: a token that there is cannot be left out, and one that nobody uses is no more model."""
    for step in STEPS:
        vocab = -(-shape.vocab // (step * plan.tp)) * step * plan.tp
        yield ShapeChange("vocab", f"{vocab:,}", changed(shape, vocab=vocab), plan)


def _widths(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    """More or fewer heads of the same size, with an inner width in proportion."""
    if shape.latent is not None or shape.heads * shape.width_of_head != shape.hidden or any(
            run.state is not None for run in shape.runs):
        return  # a mixer's width goes with the stream's
    group = shape.heads // shape.kv_heads
    found = []
    for heads in range(1, 2 * shape.heads):
        kv_heads, hidden = heads // group, heads * shape.width_of_head
        if heads % (group * plan.tp) or kv_heads % plan.tp or heads == shape.heads or (
                abs(hidden / shape.hidden - 1) > 2 * NEAR):
            continue
        step = 64 * plan.tp
        ffn = max(round(shape.ffn * hidden / shape.hidden / step), 1) * step
        found.append(ShapeChange("hidden", f"{hidden:,}", changed(
            shape, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn), plan, credited=True))
    found.sort(key=lambda each: abs(each.shape.hidden - shape.hidden))
    yield from found[:MOST_WIDTHS]


def _microbatches(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    for count in (plan.samples // 2, plan.samples - 1, plan.samples + 1, 2 * plan.samples, 4 * plan.samples):
        if count > 0 and count != plan.samples:
            yield ShapeChange("microbatch", f"{count}", shape, replace(plan, microbatch=count))


def _tensor(shape: TransformerShape, plan: ParallelPlan) -> Iterator[ShapeChange]:
    for tp in (plan.tp // 2, 2 * plan.tp, 4 * plan.tp):
        if tp > 0:
            yield ShapeChange("tp", f"{tp}", shape, replace(plan, tp=tp, sequence_parallel=(
                plan.sequence_parallel and tp > 1), tensor_overlap=plan.tensor_overlap and tp > 1))
