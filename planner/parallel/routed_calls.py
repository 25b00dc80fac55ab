"""The calls of a block's routed experts for any number of tokens and experts of a rank, from few traces.

In a block with experts the calls between the router and the weighted sum know two numbers alone: rows of an expert and
experts of a rank. All others know neither. So a block is always traced with ``ROWS`` rows an expert, and
the experts' calls are put in their place. Those come from traces of four combinations of rows ``r`` and experts ``c``,
for every figure of theirs is a sum of multiples of 1, r, c and r · c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kernel_models.op_call import OpCall
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape

ROWS = 601
"""Rows of an expert in traced blocks: about as many as there are, and a prime, so that nothing else is as large."""
Trace = Callable[[TransformerShape, TransformerPart], tuple[Sequence[OpCall], int]]
"""Traces one pass of a part: its calls, and the bytes that forward keeps for backward."""


def evened(shape: TransformerShape, part: TransformerPart) -> tuple[TransformerShape, TransformerPart] | None:
    """Return the part that is traced in place of one: itself where it has no experts, or those of a sequence get a
    whole number of rows each; ``None`` where experts are not known to be alike for any number of them."""
    one = replace(part, microbatch=1)
    if part.piece is not Piece.BLOCK or not shape.experts or (
            shape.imbalance == 1.0 and (one.sent_rows(shape) / (shape.experts // part.ep)).is_integer()):
        return shape, part
    if part.once or not (counts := _mixed(shape)):
        return None
    return _with_rows(shape, replace(part, ep=shape.experts // counts[0], etp=1 if part.sequence_parallel else None),
                      ROWS)


def at_ranks(shape: TransformerShape, part: TransformerPart, tp: int) -> tuple[TransformerShape, TransformerPart]:
    """Return a part with other tensor-parallel ranks and as many rows of an expert."""
    other = replace(part, tp=tp)
    if not shape.experts or other.rows_of_expert(shape) == (rows := part.rows_of_expert(shape)):
        return shape, other
    return _with_rows(shape, other, rows)


@dataclass(frozen=True, slots=True)
class RoutedCalls:
    """The calls of experts in one pass of a block.

    Attributes:
        counts: experts of a rank, one number or two.
        corners: the calls with ``ROWS`` rows and with one more, for each of ``counts``.
        row_bytes: what forward keeps for backward of one row of each of the rank's experts, for each of ``counts``.
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
        """Return the bytes that forward keeps for backward: ``rows`` rows an expert, ``count`` experts a rank."""
        first, *second = self.row_bytes
        if not second:
            return rows * first
        return rows * (first + (second[0] - first) * (count - self.counts[0]) // (self.counts[1] - self.counts[0]))


def routed_calls(shape: TransformerShape, part: TransformerPart, trace: Trace) -> RoutedCalls | None:
    """Trace the experts' calls of such parts; ``None`` where they are not alike.

    Args:
        shape, part: of a block; of the part, ``expert_tp`` counts, and whether experts are sorted once more.
        trace: of one pass.
    """
    mixed = _mixed(shape)
    own = shape.experts // part.ep
    # Nothing but the experts is looked at.
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
    """Return a pass with other experts' calls in the place of the usual ones; ``None`` where these are not found."""
    for start in range(len(calls) - len(usual) + 1):
        if list(calls[start:start + len(usual)]) == list(usual):
            return [*calls[:start], *experts, *calls[start + len(usual):]]
    return None


def _with_rows(shape: TransformerShape, part: TransformerPart, rows: int) -> tuple[TransformerShape, TransformerPart]:
    """Return the block whose experts get ``rows`` rows each."""
    even = part.sent_rows(replace(shape, imbalance=1.0))
    return replace(shape, imbalance=rows * (shape.experts // part.ep) / even), part


def _sorted_again(shape: TransformerShape) -> list[int]:
    """Return the numbers of a rank's experts whose rows come sorted by their senders."""
    return [count for count in range(2, shape.experts) if shape.experts % count == 0]


def _mixed(shape: TransformerShape) -> tuple[int, ...]:
    """Return the two least of them, as far as there are."""
    return tuple(_sorted_again(shape)[:2])


def _alike(*calls: OpCall) -> bool:
    """Return whether calls differ in sizes alone."""
    return all(replace(call, dims=calls[0].dims) == calls[0] for call in calls)


def along(one: OpCall, two: OpCall, steps: int, of: int) -> OpCall:
    """Return the call that lies ``steps`` of ``of`` from one to another. All figures are whole."""
    if not steps or (one.dims, one.flops, one.bytes_read, one.bytes_written) == (
            two.dims, two.flops, two.bytes_read, two.bytes_written):
        return one
    return replace(one, dims=tuple(a + (b - a) * steps // of for a, b in zip(one.dims, two.dims, strict=True)), **{
        name: a + (getattr(two, name) - a) * steps / of
        for name in ("flops", "bytes_read", "bytes_written") for a in (getattr(one, name),)})
