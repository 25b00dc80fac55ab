"""Reading recorded PyTorch steps: trace files of every era into an ``ExecutionGraph``, ranks into a ``Job``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.errors import CaptureError, ForetraceError, GraphFileError, JobError, TraceError

if TYPE_CHECKING:
    from tracer.capture import capture
    from tracer.execution_trace import read_execution_trace
    from tracer.graph import ExecutionGraph, LossReport, Meta
    from tracer.job import Job, read_job
    from tracer.join import join_execution_trace
    from tracer.kineto import read_kineto
    from tracer.shape_only import trace_job, trace_step, trace_workload
    from tracer.store import load_graph, load_job, save_graph, save_job

_HOMES = {
    "capture": "capture", "ExecutionGraph": "graph", "LossReport": "graph", "Meta": "graph",
    "Job": "job", "read_job": "job",
    "join_execution_trace": "join", "read_execution_trace": "execution_trace", "read_kineto": "kineto",
    "trace_job": "shape_only", "trace_step": "shape_only", "trace_workload": "shape_only",
    "load_graph": "store", "load_job": "store", "save_graph": "store", "save_job": "store",
}

__all__ = [
    "CaptureError", "ExecutionGraph", "ForetraceError", "GraphFileError", "Job", "JobError", "LossReport", "Meta",
    "TraceError", "capture", "join_execution_trace", "load_graph", "load_job", "read_execution_trace", "read_job",
    "read_kineto", "save_graph", "save_job", "trace_job", "trace_step",
    "trace_workload",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that starting the command line stays quick."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"tracer.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'tracer' has no attribute {name!r}")
