"""Takes over from a joined execution trace what the profiler's own trace lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracer.arrays import Int64
from tracer.execution_trace.profiler_form import profiler_arguments
from tracer.graph import NONE, ExecutionGraph
from tracer.kineto.collectives import collective_kind
from tracer.rank_classes import MOST_RANKS
from tracer.string_codes import CodeOf, string_coder

if TYPE_CHECKING:
    from tracer.execution_trace import CommNode, ExecutionTrace

# PyTorch's scalar types, as execution traces name them → the names of CollectiveTable.
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Int": "int32",
    "Long": "int64", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "Float8_e4m3fn": "float8_e4m3fn", "Float8_e5m2": "float8_e5m2",
}

# A collective's launch lies at most this many ranges inside its record_param_comms.
_LEVELS = 4


def fill_from_trace(graph: ExecutionGraph, trace: ExecutionTrace, node: Int64) -> dict[str, int]:
    """Fill what is missing in ``graph`` and count it by column; nothing recorded is overwritten.

    ``node`` is the row of ``trace`` for each row of ``ops``, -1 for none.
    """
    code_of = string_coder(graph)
    filled = _fill_arguments(graph, trace, node, code_of)
    filled.update(_fill_collectives(graph, trace, node, code_of))
    if trace.process_groups and not graph.meta.process_groups:
        graph.meta.process_groups = [dict(group) for group in trace.process_groups]
        filled["process_groups"] = len(trace.process_groups)
    world = next((c.group_size for c in trace.comms if c.group_description == "default_pg" and c.group), NONE)
    if graph.meta.world_size == NONE and 0 < world <= MOST_RANKS:
        graph.meta.world_size = world
        filled["world_size"] = 1
    return filled


def _fill_arguments(graph: ExecutionGraph, trace: ExecutionTrace, node: Int64, code_of: CodeOf) -> dict[str, int]:
    ops = graph.ops
    columns = {"shapes": ops.shapes, "dtypes": ops.dtypes, "strides": ops.strides, "scalars": ops.scalars}
    lacking = {name: (column < 0) & (node >= 0) for name, column in columns.items()}
    rows = np.flatnonzero(np.logical_or.reduce(list(lacking.values())))
    at = node[rows]
    keys = np.stack([trace.input_shapes[at], trace.input_types[at], trace.input_strides[at], trace.inputs[at]], axis=1)
    # Many nodes share shapes and types, and the tensor ids among the values change nothing: translate each once.
    seen: dict[tuple[int, ...], tuple[int, int, int, int]] = {}
    translated = np.full((len(rows), 4), NONE, dtype=np.int32)
    for place, key in enumerate(map(tuple, keys.tolist())):
        if key not in seen:
            texts = profiler_arguments(
                trace.string(key[3]), trace.string(key[0]), trace.string(key[1]), trace.string(key[2])
            )
            seen[key] = (code_of(texts.shapes), code_of(texts.dtypes), code_of(texts.strides), code_of(texts.scalars))
        translated[place] = seen[key]
    filled = {}
    for index, name in enumerate(columns):
        wanted = lacking[name][rows] & (translated[:, index] >= 0)
        if wanted.any():
            ops.writable(name)[rows[wanted]] = translated[wanted, index]
            filled[name] = int(np.count_nonzero(wanted))
    return filled


def _fill_collectives(graph: ExecutionGraph, trace: ExecutionTrace, node: Int64, code_of: CodeOf) -> dict[str, int]:
    by_node = {comm.node: comm for comm in trace.comms if comm.name != "wait"}
    described = np.flatnonzero(np.isin(node, list(by_node)))
    comm_of_op = {row: by_node[int(node[row])] for row in described.tolist()}
    collectives = graph.collectives
    filled: dict[str, int] = {}
    if not comm_of_op or not len(collectives):
        return filled
    unknown = graph.strings.index("unknown") if "unknown" in graph.strings else None
    inner = _first_inside(graph, comm_of_op)
    for row in range(len(collectives)):
        comm = _comm_of(graph, int(collectives.op[row]), comm_of_op, inner)
        if comm is None:
            continue
        kind = collective_kind(comm.name)
        values = {
            "kind": code_of(kind) if kind != "unknown" else NONE,
            "group": code_of(comm.group),
            "ranks": code_of(comm.ranks),
            "dtype": code_of(_DTYPES.get(comm.dtype, comm.dtype)),
            "elements_in": comm.elements_in,
            "elements_out": comm.elements_out,
            "group_size": comm.group_size,
        }
        for name, value in values.items():
            column = getattr(collectives, name)
            missing = column[row] == NONE or (name == "kind" and column[row] == unknown)
            if missing and value != NONE:
                column[row] = value
                filled[f"collectives.{name}"] = filled.get(f"collectives.{name}", 0) + 1
    return filled


def _first_inside(graph: ExecutionGraph, comm_of_op: dict[int, CommNode]) -> dict[int, CommNode]:
    """The first collective inside each of the few ranges around it."""
    inside: dict[int, CommNode] = {}
    for op, comm in sorted(comm_of_op.items()):
        parent = int(graph.ops.parent[op])
        for _ in range(_LEVELS):
            if parent < 0:
                break
            inside.setdefault(parent, comm)
            parent = int(graph.ops.parent[parent])
    return inside


def _comm_of(
    graph: ExecutionGraph, op: int, comm_of_op: dict[int, CommNode], inner: dict[int, CommNode]
) -> CommNode | None:
    """The collective an operation is, lies in, or contains."""
    ancestor = op
    for _ in range(_LEVELS):
        if ancestor < 0:
            break
        if ancestor in comm_of_op:
            return comm_of_op[ancestor]
        ancestor = int(graph.ops.parent[ancestor])
    return inner.get(op)
