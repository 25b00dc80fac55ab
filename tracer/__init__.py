"""Reading recorded PyTorch steps: trace files of every era into an ``ExecutionGraph``, ranks into a ``Job``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.errors import CaptureError, ForetraceError, GraphFileError, JobError, TraceError
from tracer.lazy import lazily

if TYPE_CHECKING:
    from tracer.capture import capture
    from tracer.execution_trace import read_execution_trace
    from tracer.graph import ExecutionGraph, LossReport, Meta
    from tracer.job import Job, load_job, read_job, save_job
    from tracer.join import join_execution_trace
    from tracer.kineto import read_kineto
    from tracer.shape_only import trace_job, trace_step, trace_workload
    from tracer.store import load_graph, save_graph

_HOMES = {
    "capture": "tracer.capture",
    "ExecutionGraph": "tracer.graph",
    "LossReport": "tracer.graph",
    "Meta": "tracer.graph",
    "Job": "tracer.job",
    "read_job": "tracer.job",
    "join_execution_trace": "tracer.join",
    "read_execution_trace": "tracer.execution_trace",
    "read_kineto": "tracer.kineto",
    "trace_job": "tracer.shape_only",
    "trace_step": "tracer.shape_only",
    "trace_workload": "tracer.shape_only",
    "load_graph": "tracer.store",
    "load_job": "tracer.job",
    "save_graph": "tracer.store",
    "save_job": "tracer.job",
}

__all__ = [
    "CaptureError", "ExecutionGraph", "ForetraceError", "GraphFileError", "Job", "JobError", "LossReport", "Meta",
    "TraceError", "capture", "join_execution_trace", "load_graph", "load_job", "read_execution_trace", "read_job",
    "read_kineto", "save_graph", "save_job", "trace_job", "trace_step",
    "trace_workload",
]

__getattr__, __dir__ = lazily(__name__, _HOMES)
