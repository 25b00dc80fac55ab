"""``program_memory``: the memory of a step's program over its operations, traced by shapes."""

from __future__ import annotations

from collections.abc import Sequence

from graph_predictor.request.study import DEFAULT_DEVICE
from graph_predictor.sizes.named_sizes import parse_sets
from graph_predictor.sizes.retrace import trace_again
from kernel_models.device_choice import find_device, shape_device
from tracer.device_memory import MemoryTimeline, memory_timeline
from tracer.graph import ExecutionGraph


def program_memory(graph: ExecutionGraph | None, code: str | None = None, sizes: Sequence[str] = (),
                   device: str | None = None) -> MemoryTimeline:
    """Return what the device's memory holds while the program runs; nothing is run.

    Args:
        graph: of a recorded step of it; of a workload of the suite unless ``code`` is given.
        code: "train.py:build", a function that builds the step.
        sizes: other sizes, such as "batch=64".
        device: by default the recorded one.

    Raises:
        ForetraceError: it cannot be traced, or keeps nothing in the device's memory.
    """
    spec = find_device(device or (graph.meta.device if graph is not None and graph.meta.device else DEFAULT_DEVICE))
    return memory_timeline(trace_again(graph, parse_sets(sizes)[1], shape_device(spec), code))
