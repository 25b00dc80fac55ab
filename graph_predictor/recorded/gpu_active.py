"""Time in which a GPU computes: one definition for recorded steps and for predicted ones.

Device work other than collectives counts, as a collective's kernel mostly waits for other ranks. Work of several
streams at one time counts once. Of several devices the one that is active longest counts.
"""

from __future__ import annotations

import numpy as np

from tracer.arrays import Bool, Int64
from tracer.columns import union_ns
from tracer.graph import ExecutionGraph, KernelKind


def active_ns(start: Int64, end: Int64, device: np.ndarray) -> int:
    """Return how long the most active device works, ns.

    Args:
        start, end: of device work other than collectives, ns.
        device: of each piece of it.
    """
    devices = np.unique(device)
    if len(devices) <= 1:
        return union_ns(start, end)
    return max(union_ns(start[device == one], end[device == one]) for one in devices.tolist())


def step_active_ns(graph: ExecutionGraph, step: int) -> int:
    """Return how long the GPU is active with the work that a recorded step launched, ns."""
    kernels = graph.kernels
    rows = np.flatnonzero((kernels.step == step) & (kernels.kind != KernelKind.COLLECTIVE))
    start = kernels.start_ns[rows]
    return active_ns(start, start + kernels.duration_ns[rows], kernels.device[rows])


def mean_active_ns(graph: ExecutionGraph, steps: Bool) -> float:
    """Return the mean of ``step_active_ns`` of some steps, ns.

    Args:
        graph: a rank's.
        steps: which, [steps].
    """
    kernels = graph.kernels
    chosen = np.append(steps, False)[kernels.step] & (kernels.kind != KernelKind.COLLECTIVE)
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return 0.0
    start, step = kernels.start_ns[rows] - kernels.start_ns[rows].min(), kernels.step[rows].astype(np.int64)
    # Each step's work on a stretch of time of its own, so that one union is the sum of the steps'.
    start += step * (int(start.max()) + int(kernels.duration_ns[rows].max()) + 1)
    return active_ns(start, start + kernels.duration_ns[rows], kernels.device[rows]) / int(steps.sum())
