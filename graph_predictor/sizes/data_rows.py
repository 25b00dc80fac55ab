"""``selections``: find rows whose number depends on data, such as the tokens of each expert of a mixture.

A capture has the rows of its own steps. If the number of tokens grows, each expert is assumed to take the same share,
so its rows follow what they are selected from. Selections are recognised by two kinds of operations:

- ``nonzero`` (also within ``where`` and boolean masks) gives a matrix [rows, dimensions of the mask], which the next
  operations take apart;
- tokens sorted by expert are cut into consecutive pieces of unequal length that cover all of them (``split`` by a list,
  slices). Pieces of equal length are those of a loop (``scaling.unrolled_size``). If there are as many pieces as a
  named size, they are sequences of unequal length, unless a parameter has that size (a router's experts).

An expert that takes a fixed number of tokens (its capacity) has them from ``topk`` (``layout_rules``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from graph_predictor.sizes.layout_rules import whole_number
from graph_predictor.sizes.layouts import Shape
from kernel_models.spreads import END
from tracer.graph import ExecutionGraph, OpKind, Phase
from tracer.input_file import list_of
from tracer.views import arguments

LEAST_ROWS = 8
"""Least rows of a selection: fewer may be a number of choices, dimensions or experts, and are hardly any work."""
_AHEAD = 4
"""Number of operations after ``nonzero`` among which the user of its result is searched."""
_SLICES = frozenset({"aten::slice", "aten::narrow"})


class Selection(NamedTuple):
    """Selected rows: their number, the shape they were selected from, the recorded step, and whether a mask did it."""

    rows: int
    source: Shape
    step: int
    masked: bool = False


@dataclass(slots=True)
class _Pieces:
    """Consecutive pieces that were cut off a dimension."""

    lengths: list[int] = field(default_factory=list)
    end: int = 0


def selections(graph: ExecutionGraph, named: Set[int], least: int = LEAST_ROWS) -> list[Selection]:
    """Return all selections of rows in a rank's recorded steps.

    Args:
        graph: the graph of the rank.
        named: recorded sizes that the user names and that no parameter has.
        least: smallest number of rows that is returned.
    """
    ops, names = graph.ops, {text: code for code, text in enumerate(graph.strings)}
    wanted = [names[one] for one in ("aten::nonzero", "aten::split_with_sizes", *_SLICES) if one in names]
    if not len(ops) or not np.isin(ops.name, wanted).any():
        return []
    order = np.argsort(ops.start_ns, kind="stable")
    order = order[(ops.kind[order] == OpKind.OPERATION) & ~np.isin(ops.phase[order], (Phase.BACKWARD, Phase.OPTIMIZER))]
    found = [*_by_masks(graph, order.tolist(), names.get("aten::nonzero", -1)),
             *_by_pieces(graph, order[np.isin(ops.name[order], wanted)].tolist(), named)]
    return [one for one in found if one.rows >= least]


def _by_masks(graph: ExecutionGraph, order: list[int], nonzero: int) -> Iterator[Selection]:
    ops = graph.ops
    for at, row in enumerate(order):
        if ops.name[row] != nonzero:
            continue
        taken = arguments(graph, row)
        mask = tuple(taken[0].shape) if taken and taken[0].shape else ()
        for other in order[at + 1:at + 1 + _AHEAD]:
            shapes = [one.shape for one in arguments(graph, other)[:1]]
            if shapes and len(shapes[0] or ()) == 2 and shapes[0][1] == len(mask):  # type: ignore[index]
                yield Selection(int(shapes[0][0]), mask, int(ops.step[row]), True)  # type: ignore[index]
                break


def _by_pieces(graph: ExecutionGraph, rows: list[int], named: Set[int]) -> Iterator[Selection]:
    ops, open_pieces = graph.ops, dict[tuple[Shape, int], _Pieces]()
    for row in rows:
        name, taken = graph.string(int(ops.name[row])), arguments(graph, row)
        shape = tuple(taken[0].shape) if taken and taken[0].shape else ()
        if not shape or name == "aten::nonzero":
            continue
        if name not in _SLICES:
            dim = whole_number(taken, 2) or 0
            lengths = [one for one in list_of(taken[1].value) if type(one) is int]
            yield from _unequal(lengths, shape, dim, named, int(ops.step[row]))
            continue
        at, start, stop = (whole_number(taken, place) for place in (1, 2, 3))
        if at is None or start is None or stop is None or not -len(shape) <= at < len(shape):
            continue
        pieces = open_pieces.setdefault((shape, at), _Pieces())
        stop = min(stop if name == "aten::slice" else start + stop, shape[at])
        if start != pieces.end:
            pieces.lengths, pieces.end = [], 0
        if start == pieces.end and start < stop:
            pieces.lengths.append(stop - start)
            pieces.end = stop
        if pieces.end == shape[at]:
            yield from _unequal(pieces.lengths, shape, at, named, int(ops.step[row]))
            pieces.lengths, pieces.end = [], 0


def _unequal(lengths: list[int], shape: Shape, dim: int, named: Set[int], step: int) -> Iterator[Selection]:
    """Yield pieces that cover a dimension, if they are tokens of experts."""
    if sum(lengths) == shape[dim] and len(lengths) > 2 and len(lengths) not in named and len(set(lengths[:-1])) > 1:
        yield from (Selection(length, (shape[dim],), step) for length in lengths)


def share_of(graph: ExecutionGraph) -> float | None:
    """Return the share of elements that a rank's recorded masks select; ``None`` without masks."""
    masks = [one for one in selections(graph, frozenset(), least=0) if one.masked]
    elements = sum(math.prod(one.source) for one in masks)
    return sum(one.rows for one in masks) / elements if elements else None


def spread_of(selected: Sequence[Selection]) -> float:
    """Return the log half width of the 80% interval of a step's selected rows, from their variation between steps. It
    is 0 for one recorded step, and if each step distributes all tokens."""
    totals = dict[int, int]()
    for one in selected:
        totals[one.step] = totals.get(one.step, 0) + one.rows
    return END * float(np.std(np.log(list(totals.values())), ddof=1)) if len(totals) > 1 else 0.0


def said_of(selected: Sequence[Selection], share: float) -> str:
    """Return the assumption about selected rows as a sentence; ``share`` is their share of the step's work."""
    shares = [one.rows / max(math.prod(one.source), 1) for one in selected]
    return (f"Rows that data select ({min(shares):.1%} to {max(shares):.1%} of what they are selected from) were taken "
            f"to stay that share at the new sizes: {share:.0%} of the work. Their spread from step to step is in the "
            "interval.")
