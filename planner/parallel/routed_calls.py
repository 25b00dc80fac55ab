"""The calls of a block's routed experts for any number of tokens and experts of a rank, from few traces.

In a block with experts, calls between the router and the weighted sum depend on two numbers only: rows of an expert and
experts of a rank. The other calls depend on neither. So a block is always traced with ``ROWS`` rows an expert, and the
experts' calls in it are replaced. Their sizes are derived from traces of four combinations of rows ``r`` and experts
``c``, because every figure is a + b·r + d·c + e·r·c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kernel_models.op_call import OpCall
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape

ROWS = 601
"""Rows of an expert in traced blocks: a usual number, and a prime, so that no other size equals it by accident."""
Trace = Callable[[TransformerShape, TransformerPart], tuple[Sequence[OpCall], int]]
"""Traces one pass of a part: returns its calls, and the bytes that forward keeps for backward."""


def evened(shape: TransformerShape, part: TransformerPart) -> tuple[TransformerShape, TransformerPart] | None:
    """Return the part that is traced in place of this one: the part itself if it has no experts or each expert gets a
    whole number of rows per sequence. ``None`` if the experts' calls may not follow the rule of this module."""
    one = replace(part, microbatch=1)
    if part.piece is not Piece.BLOCK or not shape.experts or (
            shape.imbalance == 1.0 and (one.sent_rows(shape) / (shape.experts // part.ep)).is_integer()):
        return shape, part
    if part.once or not (counts := _mixed(shape)):
        return None
    return _with_rows(shape, replace(part, ep=shape.experts // counts[0], etp=1 if part.sequence_parallel else None),
                      ROWS)


def at_ranks(shape: TransformerShape, part: TransformerPart, tp: int) -> tuple[TransformerShape, TransformerPart]:
    """Return a part with another number of tensor-parallel ranks and the same number of rows of an expert."""
    other = replace(part, tp=tp)
    if not shape.experts or other.rows_of_expert(shape) == (rows := part.rows_of_expert(shape)):
        return shape, other
    return _with_rows(shape, other, rows)


@dataclass(frozen=True, slots=True)
class RoutedCalls:
    """The experts' calls in one pass of a block, for any number of rows and experts.

    Attributes:
        counts: the one or two numbers of experts of a rank that were traced.
        corners: for each of ``counts``, the calls with ``ROWS`` rows and with one row more.
        row_bytes: for each of ``counts``, bytes kept for backward by one row of each of the rank's experts.
    """

    counts: tuple[int, ...]
    corners: tuple[tuple[OpCall, ...], ...]
    row_bytes: tuple[int, ...]

    def of(self, rows: int, count: int) -> list[OpCall]:
        """Return the calls with ``rows`` rows of an expert and ``count`` experts of a rank."""
        more = rows - ROWS
        found = [along(*pair, more, 1) for pair in zip(self.corners[0], self.corners[1], strict=True)]
        if len(self.counts) == 1:
            return found
        other = [along(*pair, more, 1) for pair in zip(self.corners[2], self.corners[3], strict=True)]
        first, second = self.counts
        return [along(*pair, count - first, second - first) for pair in zip(found, other, strict=True)]

    def kept_bytes(self, rows: int, count: int) -> int:
        """Return the bytes that forward keeps for backward with these rows an expert and experts a rank."""
        first, *second = self.row_bytes
        if not second:
            return rows * first
        return rows * (first + (second[0] - first) * (count - self.counts[0]) // (self.counts[1] - self.counts[0]))


def routed_calls(shape: TransformerShape, part: TransformerPart, trace: Trace) -> RoutedCalls | None:
    """Trace the experts' calls of parts like this one; ``None`` if they differ in more than sizes.

    Args:
        shape, part: a block. From ``part``, only ``expert_tp`` and ``ep`` matter.
        trace: traces one pass.
    """
    mixed = _mixed(shape)
    own = shape.experts // part.ep
    # Everything but the experts is left out of the traced block.
    shape = replace(shape, merges=False, attends=False, state=None, shared_ffn=0)
    alone = TransformerPart(Piece.BLOCK, 1, part.expert_tp)

    def at(count: int, rows: int) -> tuple[Sequence[OpCall], int]:
        return trace(*_with_rows(shape, replace(alone, ep=shape.experts // count), rows))

    (base, _), (longer, _) = at(mixed[0], ROWS), at(mixed[0], ROWS + 1)
    if len(base) != len(longer) or base == longer:
        return None
    apart = [i for i, (one, two) in enumerate(zip(base, longer, strict=True)) if one != two]
    before, after = apart[0], len(base) - apart[-1] - 1
    counts = mixed if own in _sorted_again(shape) else (own,)
    whole, kept = zip(*(at(count, rows) for count in counts for rows in (ROWS, ROWS + 1)), strict=True)
    corners = tuple(tuple(calls[before:len(calls) - after]) for calls in whole)
    if any(calls[:before] != base[:before] or calls[len(calls) - after:] != base[len(base) - after:]
           for calls in whole) or not all(_alike(*calls) for calls in zip(*corners, strict=False)) or len(
               {len(calls) for calls in corners}) > 1:
        return None
    return RoutedCalls(counts, corners, tuple(more - less for less, more in zip(kept[::2], kept[1::2], strict=True)))


def with_experts(calls: Sequence[OpCall], usual: Sequence[OpCall], experts: Sequence[OpCall]) -> list[OpCall] | None:
    """Return a pass with the calls ``usual`` replaced by ``experts``; ``None`` if ``usual`` is not found in it."""
    for start in range(len(calls) - len(usual) + 1):
        if list(calls[start:start + len(usual)]) == list(usual):
            return [*calls[:start], *experts, *calls[start + len(usual):]]
    return None


def _with_rows(shape: TransformerShape, part: TransformerPart, rows: int) -> tuple[TransformerShape, TransformerPart]:
    """Return the block whose experts get ``rows`` rows each."""
    even = part.sent_rows(replace(shape, imbalance=1.0))
    return replace(shape, imbalance=rows * (shape.experts // part.ep) / even), part


def _sorted_again(shape: TransformerShape) -> list[int]:
    """Return the numbers of experts of a rank whose rows arrive in order of their senders and are sorted again."""
    return [count for count in range(2, shape.experts) if shape.experts % count == 0]


def _mixed(shape: TransformerShape) -> tuple[int, ...]:
    """Return the two least numbers of ``_sorted_again``, or as many as there are."""
    return tuple(_sorted_again(shape)[:2])


def _alike(*calls: OpCall) -> bool:
    """Return whether calls differ in sizes only."""
    return all(replace(call, dims=calls[0].dims) == calls[0] for call in calls)


def along(one: OpCall, two: OpCall, steps: int, of: int) -> OpCall:
    """Return the call at ``steps``/``of`` of the way from ``one`` to ``two``, by linear interpolation of its sizes."""
    if not steps or (one.dims, one.flops, one.bytes_read, one.bytes_written) == (
            two.dims, two.flops, two.bytes_read, two.bytes_written):
        return one
    return replace(one, dims=tuple(a + (b - a) * steps // of for a, b in zip(one.dims, two.dims, strict=True)), **{
        name: a + (getattr(two, name) - a) * steps / of
        for name in ("flops", "bytes_read", "bytes_written") for a in (getattr(one, name),)})
