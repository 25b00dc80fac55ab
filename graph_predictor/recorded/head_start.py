"""How far a rank's host was ahead of its device when the recording began: what nothing had watched until then.

::

    host     … launches |window opens|──[ first call ]──
    device   ══ work launched before the window ══════════|== the first call's kernel ==|
                                          └─ head start ──┘

A host that decides how long its steps take has its device waiting: what it launches starts at once. A device that
still has work for milliseconds when the profiler looks for the first time belongs to a host that runs ahead.
"""

from __future__ import annotations

import numpy as np

from tracer.graph import ExecutionGraph

AHEAD = 0.05
"""Share of a step that a host must be ahead. Hosts that decide are 0.01 to 0.06 ms ahead, 0.1% of their steps or less;
those of two jobs whose devices decide, without the profiler, 15% to 100% of theirs (benchmarks/jobs.py)."""


def head_start_ns(graph: ExecutionGraph) -> int:
    """Return how long after its call the first launched kernel began, as far as work launched before the recording kept
    its device busy until then; 0 where no such work was recorded."""
    kernels = graph.kernels
    launched = np.flatnonzero(kernels.launch >= 0)
    before = kernels.launch < 0
    if not len(launched) or not before.any():
        return 0
    call = graph.launches.start_ns[kernels.launch[launched]]
    first = int(launched[np.argmin(call)])
    start, called = int(kernels.start_ns[first]), int(call.min())
    busy = np.minimum(kernels.start_ns[before] + kernels.duration_ns[before], start) - np.maximum(
        kernels.start_ns[before], called)
    return min(start - called, int(np.maximum(busy, 0).sum()))


def runs_ahead(graph: ExecutionGraph) -> bool:
    """Return whether a rank's host was ahead of its device by more than one that decides ever is."""
    if not len(graph.steps):
        return False
    return head_start_ns(graph) > AHEAD * float(np.median(graph.steps.duration_ns))
