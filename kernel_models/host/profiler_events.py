"""The cost of PyTorch's profiler to the host for each event that it records, told by the recording itself.

An operation made of others (``aten::t`` of ``aten::transpose``) does next to nothing besides calling them, so that its
own recorded time is the profiler's: that of noting its parts.

::

    recorded    |= aten::t =|~prof~|= aten::transpose =|~prof~|= aten::t =|       own time of aten::t ≈ one event

Its median is longer on a slower host, as the profiler is, and with each option that makes events cost more. Of 27
programs that were recorded beside unprofiled steps (``traces/host``, ``traces/host-held-out``) the profiler's true cost
of an event is 0.76 to 1.39 times this median, 1.02 times in the median (``benchmarks/profiler_cost.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracer.arrays import Float64
from tracer.graph import NONE, ExecutionGraph

LEAST_WRAPPERS = 8
"""So many operations made of others tell what an event costs."""
SPREAD = 0.2
"""Standard deviation of the logarithm of the true cost over that median: 0.16 of 19 programs, 0.20 of eight others."""
USUAL_NS, USUAL_SPREAD_NS = 1_000.0, 2_000.0
"""An event where a recording has too few of them, and its standard deviation: the median of those programs is 0.9 µs,
on one CPU; half of 72 captures on another, busy one lie between 1.8 and 5.6 µs."""
OBSERVED_NS, OBSERVED_SPREAD_NS = 20_000.0, 10_000.0
"""Added cost of an event, and its standard deviation, where an execution trace is recorded in the same window."""
PYTHON_EVENTS = 0.3
"""Events that the record of a call of a Python function counts for: 0.16 µs beside 0.4 to 0.7 µs of an operation's, in
loops that do nothing else (the same CPU)."""
CALL_EVENTS = 1.5
"""Events that a call of the device's runtime counts for: its own record, and that of the work it starts. Set, not
measured: nobody timed one with and without. Launches of ten published traces then take 2.1 µs in the median."""


@dataclass(frozen=True, slots=True)
class EventCost:
    """Cost of one recorded event, ns, and its standard deviation."""

    ns: float
    spread_ns: float


def event_cost(graph: ExecutionGraph) -> EventCost:
    """Return what one recorded event costs a rank's host, before anything is known of steps without the profiler."""
    own, wraps = _own_ns(graph)
    known = int(wraps.sum()) >= LEAST_WRAPPERS
    ns = float(np.median(own[wraps])) if known else USUAL_NS
    found = EventCost(ns, SPREAD * ns) if known else EventCost(USUAL_NS, USUAL_SPREAD_NS)
    if graph.meta.profiler_flags.get("execution_trace"):
        return EventCost(found.ns + OBSERVED_NS, float(np.hypot(found.spread_ns, OBSERVED_SPREAD_NS)))
    return found


def _own_ns(graph: ExecutionGraph) -> tuple[Float64, np.ndarray]:
    """Own time of each operation, and which ones of PyTorch's own are made of others."""
    ops = graph.ops
    inside = ops.parent != NONE
    parts = np.bincount(ops.parent[inside], weights=ops.duration_ns[inside], minlength=len(ops))
    named = np.array([text.startswith("aten::") for text in graph.strings], np.bool_)
    wraps = np.zeros(len(ops), np.bool_)
    wraps[ops.parent[inside]] = True
    # What launches does more than call its parts.
    launches = graph.launches.op[graph.launches.op != NONE]
    wraps[launches] = False
    own: Float64 = ops.duration_ns.astype(np.float64) - parts
    return own, wraps & named[ops.name]
