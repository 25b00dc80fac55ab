"""``captured_operators``: the operations that a CUDA graph's kernels were captured of, from a trace of the capture.

While a graph is captured, operations launch its kernels and none runs; when it is launched, the kernels run and no
operation is there. The order of both is one::

    capture   begin ─[aten::mm: launch]─[vllm::…: launch, launch]─ end
    launch    [graph launch] ──▶ kernel, kernel, kernel
"""

from __future__ import annotations

import numpy as np

from planner.serving.errors import ServingError
from tracer.graph import ExecutionGraph, LaunchKind

BEGIN, END = "StreamBeginCapture", "StreamEndCapture"
NODES = (LaunchKind.KERNEL, LaunchKind.MEMCPY, LaunchKind.MEMSET)


def captured_operators(graph: ExecutionGraph, capture: ExecutionGraph) -> dict[int, str]:
    """Return the operation of each kernel of a graph launch, by its row, where a capture has as many launches.

    Args:
        graph: in which CUDA graphs are launched.
        capture: in which the same server captured them.

    Raises:
        ServingError: nothing was captured there.
    """
    by_count = {len(each): each for each in _captures(capture)}
    if not by_count:
        raise ServingError(f"{capture.meta.source or 'The trace of the capture'} captures no CUDA graph: there is no "
                           "call of cudaStreamBeginCapture with launches after it; record the server while it starts.")
    kernels = graph.kernels
    in_graphs = np.flatnonzero(graph.launches.kind == LaunchKind.GRAPH)
    found: dict[int, str] = {}
    for launch in in_graphs.tolist():
        rows = np.flatnonzero(kernels.launch == launch)
        rows = rows[np.argsort(kernels.start_ns[rows], kind="stable")]
        found |= dict(zip(rows.tolist(), by_count.get(len(rows), ()), strict=False))
    return found


def _captures(capture: ExecutionGraph) -> list[list[str]]:
    """Return the operation of every launch of each capture."""
    launches = capture.launches
    found: list[list[str]] = []
    ran = set(capture.kernels.launch.tolist())
    current: dict[int, list[str]] = {}
    for row in np.lexsort((launches.start_ns, launches.thread)).tolist():
        name, thread = capture.string(int(launches.name[row])), int(launches.thread[row])
        if BEGIN in name:
            current[thread] = []
        elif END in name:
            if captured := current.pop(thread, None):
                found.append(captured)
        elif thread in current and int(launches.kind[row]) in NODES and row not in ran:
            op = int(launches.op[row])
            current[thread].append(capture.string(int(capture.ops.name[op])) if op >= 0 else "")
    return found
