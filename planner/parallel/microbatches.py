"""Calls of a piece for a larger micro-batch from those for two smaller ones: what grows with the sequences grows by as
much with each of them, so that two traces tell all others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernel_models.op_call import Family, OpCall


@dataclass(frozen=True, slots=True)
class TracedCalls:
    """Calls of a piece in their order, of forward and of backward."""

    forward: tuple[OpCall, ...]
    backward: tuple[OpCall, ...]


def grown(one: TracedCalls, two: TracedCalls, factor: int) -> TracedCalls | None:
    """Return the calls of ``factor`` times the sequences of ``one``; ``two`` has twice as many as ``one``.

    ``None`` where the two differ in more than sizes: a dimension of one sequence has strides of its own, and a number
    of tokens that does not divide is rounded.
    """
    passes = []
    for small, large in ((one.forward, two.forward), (one.backward, two.backward)):
        if len(small) != len(large):
            return None
        calls = [_grown(*pair, factor) for pair in zip(small, large, strict=True)]
        passes.append(tuple(call for call in calls if call is not None))
        if len(passes[-1]) != len(calls):
            return None
    return TracedCalls(*passes)


def _grown(one: OpCall, two: OpCall, factor: int) -> OpCall | None:
    if replace(two, dims=one.dims) != one:
        return None
    # Elements of a tensor that is broadcast over the sequences are there once, in a sum with those that are not.
    both = list(zip(one.dims, two.dims, strict=True))
    if one.family is not Family.ELEMENTWISE and any(b not in (a, 2 * a) for a, b in both):
        return None
    more = factor - 1
    return replace(
        one, dims=tuple(a + (b - a) * more for a, b in both),
        flops=one.flops + (two.flops - one.flops) * more,
        bytes_read=one.bytes_read + (two.bytes_read - one.bytes_read) * more,
        bytes_written=one.bytes_written + (two.bytes_written - one.bytes_written) * more)
