"""Steps that a program takes one after another, along a dimension of its data: another length is another number of
operations, which one recording does not have."""

from __future__ import annotations

import numpy as np

from graph_predictor.sizes.scaled_shapes import ScaledShapes
from kernel_models.operation import Operation
from tracer.graph import OpKind
from tracer.views import Argument

_ALL = frozenset({"aten::unbind"})
"""Operations that take a tensor apart along a dimension, into slices of one."""
_ONE = frozenset({"aten::select"})
"""Operations that take one slice along a dimension."""


def unrolled_size(scaled: ScaledShapes) -> int | None:
    """The old size of a dimension that changes and that the step goes along slice by slice; ``None`` if there is none.

    A tensor is taken apart at once, or as many different slices of it are taken as it has (a recurrent layer, a loop
    over time). Trusts the arguments' values; a trace without them has no such dimension.
    """
    ops, strings = scaled.graph.ops, scaled.graph.strings
    named = np.array([*(text in _ALL | _ONE for text in strings), False], np.bool_)[ops.name]
    rows = np.flatnonzero(named & (ops.kind == OpKind.OPERATION))
    if not len(rows):
        return None
    _, first = np.unique(np.stack([ops.name[rows], ops.shapes[rows], ops.scalars[rows]]), axis=1, return_index=True)
    taken: dict[tuple[tuple[int, ...], int], set[int]] = {}
    for row in rows[first].tolist():
        operation = Operation.from_graph(scaled.graph, row)
        at = _dimension(operation)
        if at is None:
            continue
        shape, dim = at
        new = scaled.operation_of(row).arguments[0].shape
        if new is None or new[dim] == shape[dim]:
            continue
        if operation.name in _ALL:
            return shape[dim]
        index = _whole(operation.arguments[2:])
        if index is not None:
            slices = taken.setdefault((shape, dim), set())
            slices.add(index % shape[dim])
            if len(slices) == shape[dim]:
                return shape[dim]
    return None


def _dimension(operation: Operation) -> tuple[tuple[int, ...], int] | None:
    """Shape of the tensor that is taken apart, and the dimension."""
    shape = operation.arguments[0].shape if operation.arguments else None
    dim = _whole(operation.arguments[1:])
    if not shape or dim is None or not -len(shape) <= dim < len(shape) or any(type(size) is not int for size in shape):
        return None
    at = dim % len(shape)
    return (tuple(shape), at) if shape[at] > 1 else None


def _whole(arguments: tuple[Argument, ...]) -> int | None:
    """The whole number that the first argument is."""
    try:
        return int(arguments[0].value) if arguments else None
    except ValueError:
        return None


__all__ = ["unrolled_size"]
