"""Pairs fused embedding lookups (FBGEMM) with their gradients, which have half of what either needs each.

The forward operation records tables, indices and offsets; where the trace keeps no numbers, the columns of the tables
are missing. Its autograd node records only the gradient [samples, columns of all tables]. Neither carries the other's
number, but nodes are numbered in the order of the forward operations:

    forward   lookup A ─ lookup B                  (time →)
    backward              node 451 (of B) ─ node 450 (of A)

so within a step the i-th lookup belongs to the node with the i-th smallest sequence number, provided that there are as
many of both and that the bags of each are its samples times its tables.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernel_models.families.registry import Inputs, forward_rule
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, backward_calls_of, calls_of
from tracer.arrays import Int32, Int64
from tracer.graph import NONE, ExecutionGraph
from tracer.views import Argument

_KINDS = {  # part of the forward operation's name → of its node's
    "fbgemm::split_embedding_codegen_lookup_": "torch::autograd::CppNode<SplitLookupFunction_",
    "fbgemm::dense_embedding_codegen_lookup_": "torch::autograd::CppNode<SplitLookupFunction_Dense",
}


def pair_lookups(graph: ExecutionGraph) -> dict[int, tuple[int, int]]:
    """Rows of ``graph.ops`` that are such lookups or their nodes → row of the lookup, and columns of all its tables."""
    pairs: dict[int, tuple[int, int]] = {}
    for lookup, node in _KINDS.items():
        forwards, nodes = _rows(graph, lookup), _rows(graph, node, "_Dense" not in node)
        for step in np.unique(graph.ops.step[forwards]).tolist():
            ahead = forwards[graph.ops.step[forwards] == step]
            back = nodes[graph.ops.step[nodes] == step]
            back = back[np.argsort(graph.ops.sequence[back], kind="stable")]
            if len(ahead) != len(back):
                continue
            for one, other in zip(ahead[np.argsort(graph.ops.start_ns[ahead])].tolist(), back.tolist(), strict=True):
                width = _width(graph, one, other)
                if width:
                    pairs[one] = pairs[other] = one, width
    return pairs


def lookup_calls(graph: ExecutionGraph, op: int, pair: tuple[int, int]) -> tuple[OpCall, ...]:
    """Calls of a lookup or its node, from what both recorded."""
    lookup = Operation.from_graph(graph, pair[0])
    rule = forward_rule(lookup.name)
    if rule is not None and "total_D" in rule.names:
        arguments = list(lookup.arguments)
        arguments[rule.names.index("total_D")] = Argument("Scalar", (), None, str(pair[1]))
        lookup = replace(lookup, arguments=tuple(arguments))
    return calls_of(lookup) if op == pair[0] else backward_calls_of(lookup)


def _rows(graph: ExecutionGraph, start: str, without_dense: bool = False) -> Int64:
    codes = [i for i, text in enumerate(graph.strings)
             if text.startswith(start) and not (without_dense and "_Dense" in text)]
    return np.flatnonzero(np.isin(graph.ops.name, codes))


def _width(graph: ExecutionGraph, lookup: int, node: int) -> int:
    """Columns of the gradient if it fits the lookup's bags, else 0."""
    grad = graph.arguments(node)[:1]
    rule = forward_rule(graph.string(int(graph.ops.name[lookup])))
    if not grad or not grad[0].shape or len(grad[0].shape) != 2 or rule is None:
        return 0
    inputs = Inputs("", tuple(graph.arguments(lookup)), rule.names, "fp32")
    tables, offsets = inputs.optional("D_offsets"), inputs.optional("offsets")
    if tables is None or offsets is None:
        return 0
    samples, columns = grad[0].shape
    return int(columns) if samples * (tables.elements - 1) == offsets.elements - 1 else 0


def pairs_of(ops: Int32, pairs: dict[int, tuple[int, int]]) -> tuple[Int64, Int64]:
    """For each of some rows the lookup it belongs to and its width, ``NONE`` for rows that are none."""
    found = [pairs.get(op, (NONE, NONE)) for op in ops.tolist()] if pairs else []
    both = np.array(found, np.int64) if found else np.full((len(ops), 2), NONE, np.int64)
    return both[:, 0], both[:, 1]
