"""What the profiler costs, and host time without it.

A capture times steps with nothing watching before it profiles others, so that the difference is known. Each recorded
operation and call costs the same; on a CPU, where host time is all there is, a factor on it then makes the recorded
steps take exactly what they took unwatched (the machine may also have been faster in one of the two phases).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.scenario import Scenario
from graph_predictor.program import Float64, Int64

LEAST_LEFT = 0.1
"""Share of a piece of host time that is left in any case: an event's cost is a mean."""


@dataclass(frozen=True, slots=True)
class ProfilerCost:
    """Cost of one recorded event, ns, and the factor on the host time that is left."""

    event_ns: float
    factor: float


def unwatched_ns(scenario: Scenario) -> float:
    """Median step of a capture with nothing watching, ns; 0 where none was timed."""
    truth = scenario.built.graphs[0].meta.unprofiled_step_ns
    return float(np.median(truth)) if truth else 0.0


def profiler_cost(scenario: Scenario, event_ns: float | None = None, truth_ns: float | None = None) -> \
        ProfilerCost | None:
    """Of a capture; ``None`` where it was not timed without the profiler.

    Args:
        scenario: of the capture; host times that an edit has set are taken for its own.
        event_ns: cost of one event, if known better than from this capture alone.
        truth_ns: what the step takes unwatched, if not the capture's own.
    """
    unwatched = unwatched_ns(scenario) if truth_ns is None else truth_ns
    if not unwatched:
        return None
    cycle, pieces = scenario.cycle, scenario.pieces
    events = events_of(scenario)
    mine = cycle.working[pieces.item] & (pieces.rank == 0)
    if event_ns is None:
        first = int(scenario.built.program.item_row[cycle.first[0]])
        watched = float(np.median(scenario.built.graphs[0].steps.duration_ns[first:first + cycle.steps]))
        event_ns = max(watched - unwatched, 0.0) * cycle.steps / max(int(events[mine].sum()), 1)
    if len(scenario.built.program.kernel_item):
        return ProfilerCost(event_ns, 1.0)
    ns = pieces.ns.astype(np.float64) if scenario.host_ns is None else scenario.host_ns
    left = float(_less(ns[mine], events[mine], event_ns).sum()) / cycle.steps
    return ProfilerCost(event_ns, unwatched / left if left > 0 else 1.0)


def without_profiler(scenario: Scenario, ns: Float64, cost: ProfilerCost) -> Float64:
    """Times of the host's pieces without the profiler's cost, ns."""
    return _less(ns, events_of(scenario), cost.event_ns) * cost.factor


def events_of(scenario: Scenario) -> Int64:
    """Recorded events that each piece of host time holds: its call, or its operation at the first of its pieces."""
    pieces = scenario.pieces
    count = pieces.is_cost.astype(np.int64)
    rows = np.flatnonzero(~pieces.is_cost & (pieces.op >= 0))
    key = pieces.rank[rows] * (int(pieces.op.max(initial=0)) + 1) + pieces.op[rows]
    _, first = np.unique(key, return_index=True)
    count[rows[first]] += 1
    return count


def _less(ns: Float64, events: Int64, event_ns: float) -> Float64:
    return np.maximum(ns - events * event_ns, LEAST_LEFT * ns)
