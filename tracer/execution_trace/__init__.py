"""PyTorch execution traces (ET): the typed reader, the columnar ``ExecutionTrace``, and its collectives."""

from tracer.execution_trace.model import CommNode, ExecutionTrace
from tracer.execution_trace.reader import is_execution_trace, read_execution_trace

__all__ = ["CommNode", "ExecutionTrace", "is_execution_trace", "read_execution_trace"]
