"""Steps traced by shapes alone: what a GPU would run, found out without one, in no time and no memory.

    graph = trace_step(build, device="h200-sxm")     # ``build()`` makes a model and returns its training step

``trace.py`` runs the step under fake tensors. ``recorder.py`` notes the operators, and where the result of a collective
is needed. ``substitutions/`` is the written list of what a GPU does otherwise than the CPU. ``tensors.py`` follows
every storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily
from tracer.shape_only.devices import device_names
from tracer.shape_only.errors import ShapeOnlyError

if TYPE_CHECKING:
    from tracer.shape_only.trace import trace_job, trace_script, trace_step, trace_workload

__all__ = ["ShapeOnlyError", "device_names", "trace_job", "trace_script", "trace_step", "trace_workload"]

__getattr__, __dir__ = lazily(__name__, dict.fromkeys(("trace_job", "trace_script", "trace_step", "trace_workload"),
                                                      "tracer.shape_only.trace"))
