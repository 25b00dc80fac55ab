"""Launches whose device work a recording lost: a profiler whose buffers run full drops kernels, not calls."""

from __future__ import annotations

import numpy as np

from tracer.arrays import Int64
from tracer.graph import LAUNCHING, ExecutionGraph
from tracer.graph_capture import while_capturing

LOST_SHARE = 0.01
"""A step lost device work where more than this share of its launches has none: steps of equal work differ by less."""


def lost_launches(graph: ExecutionGraph) -> Int64:
    """Return the launches of each step whose device work was not recorded although that of other steps was, [steps].

    Launches without device work that every step has are no loss: copies of no bytes, launches that fail. Launches that
    are captured into a CUDA graph start nothing. A step that lacks at most ``LOST_SHARE`` of its launches lost none.
    """
    calls, steps = graph.launches, len(graph.steps)
    launching = np.isin(calls.kind, LAUNCHING) & (calls.step >= 0)
    launching &= ~while_capturing(calls, graph.strings)
    missing = launching.copy()
    missing[graph.kernels.launch[graph.kernels.launch >= 0]] = False
    every, count = (np.bincount(calls.step[rows], minlength=steps).astype(np.int64) for rows in (launching, missing))
    count -= count.min(initial=int(count.max(initial=0)))
    return np.where(count > LOST_SHARE * every, count, 0)
