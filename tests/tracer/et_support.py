"""Helpers of the tests of execution traces, joins, files and views: real traces and hand-made graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from kineto_support import real

from tracer.graph import ExecutionGraph, Meta, OpKind, Table, Thread


def graph_of(names: list[tuple[int, str]], parents: list[int] | None = None, **columns: Any) -> ExecutionGraph:
    """A graph of operations (thread, name), one microsecond after another, with optional further columns."""
    graph = empty_graph()
    strings = list(dict.fromkeys(name for _, name in names))
    ops = ExecutionGraph.TABLES["ops"].empty(len(names))
    ops.name[:] = [strings.index(name) for _, name in names]
    ops.thread[:] = [thread for thread, _ in names]
    ops.kind[:] = [OpKind.ANNOTATION if name.startswith(("ProfilerStep#", "##")) else OpKind.OPERATION
                   for _, name in names]
    ops.start_ns[:] = np.arange(len(names)) * 1000
    ops.duration_ns[:] = 1000
    if parents is not None:
        ops.parent[:] = parents
    for column, values in columns.items():
        getattr(ops, column)[:] = values
    graph.ops, graph.strings = ops, strings
    graph.threads = [Thread("7", str(thread)) for thread in range(max((t for t, _ in names), default=-1) + 1)]
    return graph


def empty_graph() -> ExecutionGraph:
    """A graph of nothing."""
    return ExecutionGraph(
        strings=[], threads=[], meta=Meta(), **{name: kind.empty() for name, kind in ExecutionGraph.TABLES.items()}
    )


def node(number: int, name: str, **other: Any) -> dict[str, Any]:
    """A node of schema 1.1.1. ``other``: parent, attributes by name, and inputs as a dict of its lists."""
    attributes = {"rf_id": number, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1, "fw_tid": 0, "op_schema": ""}
    parent = other.pop("parent", 1)
    arguments = {"values": [], "shapes": [], "types": [], "strides": []}
    inputs, outputs = other.pop("inputs", arguments), other.pop("outputs", arguments)
    attributes.update(other)
    return {
        "id": number, "name": name, "ctrl_deps": parent, "inputs": inputs, "outputs": outputs,
        "attrs": [{"name": key, "type": "", "value": value} for key, value in attributes.items()],
    }


def write_trace(path: Path, nodes: list[dict[str, Any]], schema: str = "1.1.1-chakra.0.0.4", pid: int = 1) -> Path:
    """Write an execution trace of the nodes, with the process and thread node PyTorch adds."""
    process = node(1, "[pytorch|profiler|execution_trace|process]", tid=0, rf_id=0, scope=7)
    thread = node(2, "[pytorch|profiler|execution_trace|thread]", rf_id=0, scope=7)
    path.write_text(json.dumps({"schema": schema, "pid": pid, "time": "", "start_ts": 0,
                                "nodes": [process, thread, *nodes], "finish_ts": 1}))
    return path


def assert_same(left: ExecutionGraph, right: ExecutionGraph) -> None:
    """Equal in every column, string, thread and field."""
    assert left.strings == right.strings
    assert left.threads == right.threads
    assert left.meta == right.meta
    for name in ExecutionGraph.TABLES:
        table: Table = getattr(left, name)
        for column, values in table.columns().items():
            other = getattr(getattr(right, name), column)
            assert values.dtype == other.dtype, (name, column)
            np.testing.assert_array_equal(values, other, err_msg=f"{name}.{column}")


__all__ = ["assert_same", "empty_graph", "graph_of", "node", "real", "write_trace"]
