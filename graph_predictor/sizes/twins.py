"""Find twins: dimensions of a step that have a named size by chance and mean something else.

If two independent dimensions have one size, scaling that size would let both grow. Examples: a sequence as long as
there are samples, as many heads as tokens, a source and a target of one length. This module finds twins that a trace
shows. Samples have no twins: they come first, and a tensor holds them once at most (``size_flow``).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graph_predictor.sizes.layout_rules import PRODUCTS, rule_of
from graph_predictor.sizes.layouts import Layout, Shape
from graph_predictor.sizes.size_flow import SizeFlow
from kernel_models.families import registry
from tracer.graph import NONE, ExecutionGraph, OpKind, Phase
from tracer.input_file import list_of
from tracer.views import arguments

COUNTED = frozenset({"indices", "target"})
"""Arguments that come from a step's input, which the samples lead, as the operations' schemas call them."""
OF_MODELS = frozenset({"heads", "head", "layers", "depth", "hidden", "hidden_size", "d_model", "dim", "embed_dim",
                       "channels", "classes", "experts", "rank", "vocab", "vocab_size", "vocabulary"})
"""Names of sizes of parameters, as papers and the configurations of transformers and timm write them: a choice."""
OF_DATA = frozenset({"seq", "seqlen", "seq_len", "sequence", "sequence_length", "length", "len", "tokens", "context",
                     "time", "frames", "steps", "image", "img", "resolution", "size", "points", "nodes", "edges",
                     "patches", "source", "target", "src", "tgt"})
"""Names of sizes of data: a choice."""
_COUNTS = ("n_", "num_", "number_of_")
_SPLITS = frozenset({"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::unflatten", "aten::_reshape_alias"})
_JOINS = frozenset({"aten::add", "aten::add_", "aten::mul", "aten::cat", "aten::stack"})
_PICKED = {"aten::index": 1, "aten::index_put": 1, "aten::index_select": 2, "aten::index_add": 2, "aten::gather": 2,
           "aten::scatter_add": 2}
"""For each operation, the place of the argument with the indices of rows to pick."""
_SQUARE = 2
"""Least number of equal dimensions at which a shape may be confused with its transpose."""


def bare(name: str) -> str:
    """Return a size's name without a prefix that only means a count: ``heads`` of ``num_heads``."""
    lower = name.lower()
    return next((lower[len(start):] for start in _COUNTS if lower.startswith(start)), lower)


def square_input(graph: ExecutionGraph, size: int) -> Shape | None:
    """Return the shape of indices or targets that have the size first and again later: samples, and something else.

    ``None`` if there is none. Also ``None`` if another input has the size after another number of samples; then the
    first dimension of the square input is not samples (buckets of relative positions, a mask).
    """
    shapes = [shape for _, _, shape in counted_inputs(graph)]
    if any(shape[0] not in (1, size) and size in shape[1:] for shape in shapes):
        return None
    return next((shape for shape in shapes if shape[0] == size and size in shape[1:]), None)


def split_parameter(graph: ExecutionGraph, widths: set[int], size: int) -> tuple[int, Shape] | None:
    """Find a width of parameters that the step splits into dimensions, one of this size: heads, or their width.

    Args:
        graph: the graph of the rank.
        widths: sizes of parameters' dimensions.
        size: the recorded size of the name.

    Returns:
        The width and its parts; ``None`` if there is none.
    """
    for row in _distinct(graph):
        if graph.string(int(graph.ops.name[row])) not in _SPLITS:
            continue
        taken = arguments(graph, row)
        if len(taken) > 1 and taken[0].shape and all(type(one) is int for one in taken[0].shape):
            target = [one for one in list_of(taken[1].value) if type(one) is int]
            for width, parts in _split_dimensions(tuple(taken[0].shape), target):
                if width in widths and width != size and size in parts:
                    return width, parts
    return None


def _split_dimensions(shape: Shape, target: list[int]) -> Iterator[tuple[int, Shape]]:
    """Yield each dimension that a view splits, and its parts; a size of -1 ends the search."""
    at = 0
    for width in shape:
        first, product = at, 1
        while at < len(target) and product < width and target[at] > 0:
            product *= target[at]
            at += 1
        if product != width:
            return
        if at - first > 1:
            yield width, tuple(target[first:at])


def confused_shape(flow: SizeFlow, size: int) -> Shape | None:
    """Return a shape in which different dimensions of two tensors follow the size, so that one tensor may have been
    taken for the other; ``None`` if there is none."""
    seen: dict[Shape, Layout] = {}
    return next((value.shape for value in flow.every() if value.shape.count(size) >= _SQUARE
                 and seen.setdefault(value.shape, value.layouts[0]) != value.layouts[0]), None)


def separate_inputs(graph: ExecutionGraph, size: int) -> list[Shape]:
    """Return shapes of index tensors of ``size`` entries whose looked-up rows are not added up before a layer takes
    them: a source and a target, two towers. Empty if one forward pass has fewer than two; the same inputs come again in
    other steps and micro-batches."""
    waiting: list[tuple[Shape, Shape]] = []  # indices, and the rows that they look up
    apart: list[Shape] = []
    ops = graph.ops
    order = np.argsort(ops.start_ns, kind="stable")
    step = NONE
    for row in order[ops.kind[order] == OpKind.OPERATION].tolist():
        name = graph.string(int(ops.name[row]))
        if ops.phase[row] in (Phase.BACKWARD, Phase.OPTIMIZER) or ops.step[row] != step:
            if len(apart) > 1:
                break
            step, waiting, apart = int(ops.step[row]), [], []
        if ops.phase[row] in (Phase.BACKWARD, Phase.OPTIMIZER):
            continue
        if name == "aten::embedding":
            shapes = [one.shape for one in arguments(graph, row)[:2]]
            if len(shapes) > 1 and shapes[0] and shapes[1] and shapes[1][0] not in (1, size) and size in shapes[1][1:]:
                found = (tuple(shapes[1]), (*shapes[1], shapes[0][-1]))
                if not waiting or int(ops.parent[row]) < 0 or graph.string(int(ops.name[ops.parent[row]])) != name:
                    waiting.append(found)
        elif name in _JOINS and len(waiting) > 1:
            joined = [one.shape for one in arguments(graph, row) if one.shape]
            joined = [tuple(part) for one in joined for part in (one if isinstance(one[0], tuple) else (one,))]
            rows = [number for number, (_, rows) in enumerate(waiting) if rows in joined]
            if len(rows) > 1 and len(joined) > 1:
                del waiting[rows[-1]]
        elif waiting and rule_of(name) in PRODUCTS:
            apart += [indices for indices, _ in waiting]
            waiting = []
    return apart if len(apart) > 1 else []


def counted_inputs(graph: ExecutionGraph) -> Iterator[tuple[str, str, Shape]]:
    """Yield the step's indices and targets: operation, argument and shape, each once."""
    ops = graph.ops
    pairs = np.unique(np.stack([ops.name, ops.shapes]), axis=1).T if len(ops) else np.zeros((0, 2), np.int64)
    for code, shapes in pairs.tolist():
        name = graph.string(code)
        rule = registry.forward_rule(name)
        if rule is None or shapes < 0:
            continue
        for argument, part in zip(rule.names, list_of(graph.string(shapes)), strict=False):
            if argument in COUNTED and isinstance(part, list) and part and all(type(one) is int for one in part):
                yield name, argument, tuple(part)


def picks_as_many(graph: ExecutionGraph, size: int) -> bool:
    """Return whether the step picks rows by a list of ``size`` indices: a graph may have as many edges as nodes."""
    ops = graph.ops
    for name, shapes in {(graph.string(int(ops.name[row])).rstrip("_"), int(ops.shapes[row]))
                         for row in _distinct(graph)}:
        at = _PICKED.get(name)
        parts = list_of(graph.string(shapes)) if at is not None and shapes >= 0 else []
        if at is not None and at < len(parts) and (parts[at] == [size] or [size] in parts[at]):
            return True
    return False


def _distinct(graph: ExecutionGraph) -> list[int]:
    """Return one row of each operation with different shapes or numbers."""
    ops = graph.ops
    if not len(ops):
        return []
    _, first = np.unique(np.stack([ops.name, ops.shapes, ops.scalars]), axis=1, return_index=True)
    found: list[int] = first.tolist()
    return found
