"""Recordings whose device's work is not in them: nothing is predicted from them."""

from __future__ import annotations

import numpy as np

from tracer.graph import LAUNCHING, ExecutionGraph
from tracer.graph_capture import captured_launches, captured_of_steps


def unknown_device_work(graph: ExecutionGraph) -> str:
    """Say why what a rank's device did is not known, and what to do; empty where it is, or no device was used."""
    unread = graph.meta.loss.unreadable_device_events
    if unread and not len(graph.kernels):
        return (f"its device's work cannot be read: {unread:,} events are of a kind that this version does not know. "
                "What the step rests on is not known, so that nothing is predicted from it. Recordings of NVIDIA and "
                "AMD GPUs and of CPUs can be read; foretrace inspect shows what is known of this one.")
    captured = captured_launches(graph)
    launching = np.isin(graph.launches.kind, LAUNCHING)
    every = bool(captured.any()) and (
        bool((captured_of_steps(graph) > 0).all()) if len(graph.steps) else captured.sum() > launching.sum() / 2)
    if every:
        return (f"it is the recording of a CUDA graph's capture: {int(captured.sum()):,} launches only recorded the "
                "graph and ran nothing, so that the step is not the one that the program runs. Record steps that "
                "launch the graph: more warm-up steps before the profiler's window.")
    if launching.any() and not len(graph.kernels):
        return (f"it has {int(launching.sum()):,} launches and no device work: the profiler lost it, or was not "
                "allowed to see it. Record the device too (ProfilerActivity.CUDA; foretrace doctor says what a "
                "machine lacks).")
    return ""
