"""Steps traced by shapes alone: what a GPU would run, found out without one, in no time and no memory.

    graph = trace_step(build, device="h200-sxm")     # ``build()`` makes a model and returns its training step

``trace.py`` runs the step under fake tensors, ``recorder.py`` notes the operators, ``substitutions/`` is the written
list of what a GPU does otherwise than the CPU, ``memory.py`` follows every storage, ``overlap.py`` says where the
result of a collective is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.shape_only.devices import device_names
from tracer.shape_only.errors import ShapeOnlyError

if TYPE_CHECKING:
    from tracer.shape_only.trace import trace_job, trace_step, trace_workload

__all__ = ["ShapeOnlyError", "device_names", "trace_job", "trace_step", "trace_workload"]


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use."""
    if name in ("trace_job", "trace_step", "trace_workload"):
        from tracer.shape_only import trace

        return getattr(trace, name)
    raise AttributeError(f"module 'tracer.shape_only' has no attribute {name!r}")
