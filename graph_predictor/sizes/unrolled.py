"""Steps that a program takes one after another, along a dimension of its data: another length is another number of
operations, which one recording does not have.

Whatever takes the dimension apart (a slice, ``split``, ``chunk``, ``unbind``, an index) takes a part of it from one
place to another. Where parts of one length cover the dimension, the step goes along it piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from graph_predictor.sizes.layouts import Dim, Shape
from graph_predictor.sizes.scaled_shapes import ScaledShapes
from kernel_models.operation import Operation
from tracer.decode import list_of
from tracer.graph import OpKind
from tracer.views import Argument

Part = tuple[int, int]
"""A part of a dimension: its begin and its end."""
_FEW, _MOST_OF = 2, 4
"""Elements that no part holds, at most, where the others are gone along (the last target, a class token), and at most
one in so many."""


def unrolled_size(scaled: ScaledShapes) -> int | None:
    """The old size of a dimension that changes and that the step goes along piece by piece; ``None`` if there is none.

    Trusts the arguments' values; a trace without them has no such dimension.
    """
    taken: dict[tuple[Shape, int, Dim], set[Part]] = {}
    for row in _rows(scaled):
        operation = Operation.from_graph(scaled.graph, row)
        value = scaled.flow.values(row).get((0, -1))
        place, parts = _VIEWS[operation.name]
        dim = _whole(operation.arguments, place)
        if value is None or dim is None or not -len(value.shape) <= dim < len(value.shape):
            continue
        at = dim % len(value.shape)
        size, follows = value.shape[at], value.layouts[0][at]
        if scaled.sizes.resized(size, follows) != size:
            taken.setdefault((value.shape, at, follows), set()).update(parts(operation.arguments, size))
    for (shape, at, follows), found in taken.items():
        if _gone_along(shape[at], found, math.prod(old**power for old, power in zip(
                scaled.sizes.old, follows.powers, strict=True))):
            return shape[at]
    return None


def _rows(scaled: ScaledShapes) -> list[int]:
    """One row of each way in which the step takes a part of a tensor."""
    ops, strings = scaled.graph.ops, scaled.graph.strings
    named = np.array([*(text in _VIEWS for text in strings), False], np.bool_)[ops.name]
    rows = np.flatnonzero(named & (ops.kind == OpKind.OPERATION))
    if not len(rows):
        return []
    _, first = np.unique(np.stack([ops.name[rows], ops.shapes[rows], ops.scalars[rows]]), axis=1, return_index=True)
    found: list[int] = rows[first].tolist()
    return found


def _gone_along(size: int, parts: Iterable[Part], named: int) -> bool:
    """Return whether parts of one length cover a dimension, and would be more at another size.

    Args:
        size: elements of the dimension.
        parts: what is taken of it.
        named: the named sizes' product that the dimension follows. Parts of that length, or of some of it, are as many
            at every size: the halves of two batches that were put together.
    """
    inside = sorted({part for part in parts if part[0] < part[1]})
    for length in {stop - start for start, stop in inside if 2 * (stop - start) <= size}:
        if length % named == 0 and size // length % named:
            continue
        left, reached = 0, 0
        for start, stop in inside:
            if stop - start <= length:
                left += max(start - reached, 0)
                reached = max(reached, stop)
        if left + size - reached <= min(_FEW, size // _MOST_OF):
            return True
    return False


def _all(arguments: tuple[Argument, ...], size: int) -> list[Part]:
    """Parts of ``aten::unbind``."""
    del arguments
    return [(at, at + 1) for at in range(size)]


def _selected(arguments: tuple[Argument, ...], size: int) -> list[Part]:
    """That of ``aten::select``, which takes one."""
    index = _whole(arguments, 2)
    return [] if index is None else [(index % size, index % size + 1)]


def _sliced(arguments: tuple[Argument, ...], size: int) -> list[Part]:
    """That of ``aten::slice``; none where it leaves elements out in between."""
    start, stop, step = (_whole(arguments, place) for place in (2, 3, 4))
    return [_within(start or 0, size if stop is None else stop, size)] if step in (None, 1) else []


def _narrowed(arguments: tuple[Argument, ...], size: int) -> list[Part]:
    """That of ``aten::narrow``, which is given a length."""
    start, length = (_whole(arguments, place) for place in (2, 3))
    if start is None or length is None:
        return []
    start = start % size
    return [_within(start, start + length, size)]


def _split(arguments: tuple[Argument, ...], size: int) -> list[Part]:
    """Return the parts of ``aten::split``, of one length or of a list of them."""
    length = _whole(arguments, 1)
    if length is not None:
        return [_within(start, start + length, size) for start in range(0, size, length)] if length > 0 else []
    lengths = [one for one in list_of(arguments[1].value) if type(one) is int]
    ends = np.cumsum([0, *lengths]).tolist()
    return [_within(start, stop, size) for start, stop in pairwise(ends)]


def _chunked(arguments: tuple[Argument, ...], size: int) -> list[Part]:
    """Return the parts of ``aten::chunk``, at most as many as it is given."""
    count = _whole(arguments, 1)
    if count is None or count < 1:
        return []
    length = -(-size // count)
    return [_within(start, start + length, size) for start in range(0, size, length)]


def _within(start: int, stop: int, size: int) -> Part:
    """A part whose ends may count from the dimension's own end, or lie beyond it."""
    first, last = (min(max(end + size if end < 0 else end, 0), size) for end in (start, stop))
    return first, last


def _whole(arguments: tuple[Argument, ...], place: int) -> int | None:
    """The whole number that an argument is; ``None`` where it is none, or not recorded."""
    try:
        return int(arguments[place].value) if place < len(arguments) else None
    except ValueError:
        return None


_VIEWS: dict[str, tuple[int, Callable[[tuple[Argument, ...], int], list[Part]]]] = {
    "aten::unbind": (1, _all), "aten::select": (1, _selected), "aten::slice": (1, _sliced),
    "aten::narrow": (1, _narrowed), "aten::split": (2, _split), "aten::split_with_sizes": (2, _split),
    "aten::unsafe_split": (2, _split), "aten::unsafe_split_with_sizes": (2, _split), "aten::chunk": (2, _chunked),
    "aten::unsafe_chunk": (2, _chunked),
}
"""Operations that take parts of a tensor: the argument that names the dimension, and which parts they take."""
