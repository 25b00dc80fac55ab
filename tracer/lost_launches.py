"""Launches without device work: what a recording lost, and what a CUDA graph was recorded from.

A profiler whose buffers run full drops kernels, not calls. Between ``cudaStreamBeginCapture`` and
``cudaStreamEndCapture`` launches are put into a graph instead of a stream, those of other threads too (the backward is
launched by autograd's). A step that records its graph takes a host's time and no device's, and is not the step that the
program runs afterwards::

    calls    begin capture | launch launch launch … | end capture, instantiate | launch graph
    stream                                                                       ######### the step's kernels #########
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from tracer.arrays import Bool, Int64
from tracer.columns import named
from tracer.graph import LAUNCHING, ExecutionGraph, LaunchTable

_BEGIN, _END = (re.compile(rf"(?:cuda|cu|hip)Stream{what}Capture") for what in ("Begin", "End"))


def while_capturing(calls: LaunchTable, strings: Sequence[str]) -> Bool:
    """Return which calls were made while a graph was recorded, [calls]: those of other threads too."""
    begins, ends = (np.flatnonzero(named(calls.name, strings, pattern.match)) for pattern in (_BEGIN, _END))
    if not len(begins) and not len(ends):
        return np.zeros(len(calls), np.bool_)
    begin = np.sort(calls.start_ns[begins])
    end = np.sort(calls.start_ns[ends])
    # A capture lasts to the next end. One that the window cuts off lasts from the window's start, or to its end.
    if len(end) and (not len(begin) or end[0] < begin[0]):
        begin = np.concatenate([[np.iinfo(np.int64).min], begin])
    after = np.searchsorted(end, begin)
    until = np.append(end, np.iinfo(np.int64).max)[after]
    latest = np.searchsorted(begin, calls.start_ns, side="right") - 1
    return (latest >= 0) & (calls.start_ns < until[np.maximum(latest, 0)])


def captured_launches(graph: ExecutionGraph) -> Bool:
    """Return which calls are launches without device work while a graph was recorded, [calls]."""
    calls = graph.launches
    found = while_capturing(calls, graph.strings)
    if found.any():
        found &= np.isin(calls.kind, LAUNCHING)
        found[graph.kernels.launch[graph.kernels.launch >= 0]] = False
    return found


def captured_of_steps(graph: ExecutionGraph) -> Int64:
    """Return how many launches of each step only recorded a graph, [steps]."""
    captured = captured_launches(graph)
    step = graph.launches.step[captured]
    return np.bincount(step[step >= 0], minlength=len(graph.steps)).astype(np.int64)


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
