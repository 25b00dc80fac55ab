"""PyTorch execution traces (ET): the typed reader, the columnar ``ExecutionTrace``, and its collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from tracer.execution_trace.reader import is_execution_trace, read_execution_trace
    from tracer.execution_trace.trace import CommNode, ExecutionTrace

__all__ = ["CommNode", "ExecutionTrace", "is_execution_trace", "read_execution_trace"]

__getattr__, __dir__ = lazily(__name__, {
    **dict.fromkeys(("CommNode", "ExecutionTrace"), "tracer.execution_trace.trace"),
    **dict.fromkeys(("is_execution_trace", "read_execution_trace"), "tracer.execution_trace.reader")})
