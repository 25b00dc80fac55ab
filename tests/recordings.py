"""Recordings changed in ways that several tests need."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from tracer.graph import ExecutionGraph


def slowed(graph: ExecutionGraph, factor: int) -> ExecutionGraph:
    """The recording with all times so many times as long."""
    tables = {}
    for part in fields(graph):
        table = getattr(graph, part.name)
        if hasattr(table, "take"):
            table = tables[part.name] = table.take(np.arange(len(table)))
            for name in ("start_ns", "duration_ns"):
                if hasattr(table, name):
                    getattr(table, name)[:] *= factor
    meta = replace(graph.meta, window_ns=graph.meta.window_ns * factor,
                   base_time_ns=graph.meta.base_time_ns * factor,
                   unprofiled_step_ns=[factor * ns for ns in graph.meta.unprofiled_step_ns])
    return replace(graph, meta=meta, **tables)
