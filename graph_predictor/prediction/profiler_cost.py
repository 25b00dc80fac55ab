"""The profiler's cost, and host time without it.

A capture times steps with nothing watching before it profiles others, so that the difference is known. It has two
causes: each recorded operation and call costs something, and the machine may have been slower or faster in one of the
two phases. How much of it is whose follows from what events are known to cost, and from how far two phases differ by
chance. The profiler reads the clock last when an operation begins and first when it ends:

::

    recorded    |= aten::linear =|~~prof~~|= aten::addmm =|~~prof~~|= aten::linear =|

so that an event's cost lies in the time around its operation, that of the operation it is inside of, or of no
operation. On a CPU, where host time is all there is, a factor on what is left then makes the recorded steps take
exactly what they took unprofiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.scenario import Scenario
from graph_predictor.simulation.host_time import operation_of
from kernel_models.host.overheads import CALL_EVENTS, PYTHON_EVENTS, event_cost
from kernel_models.spreads import PROFILER_CALL, PROFILER_EVENT, TWO_PHASES
from tracer.arrays import Float64, Int64
from tracer.graph import NONE, ExecutionGraph

MOST_TAKEN = 0.6
"""Share of a host's time that events are believed to cost where no step was timed without them: 0.15 to 0.49 of 27
programs'. Where operations that only call others take longer than that allows, the host is slow for another reason."""
LEAST_LEFT = 0.1
"""Share of a piece of host time that is left in any case: an event's cost is a mean."""


@dataclass(frozen=True, slots=True)
class ProfilerCost:
    """Cost of one recorded event, ns, and the factor on the host time that is left."""

    event_ns: float
    factor: float


def unprofiled_step_ns(scenario: Scenario) -> float:
    """Median step of a capture with nothing watching, ns; 0 where none was timed."""
    truth = scenario.built.graphs[0].meta.unprofiled_step_ns
    return float(np.median(truth)) if truth else 0.0


def profiler_cost(scenario: Scenario) -> ProfilerCost | None:
    """Return the cost of a recorded job; ``None`` where it was not timed without the profiler."""
    unprofiled = unprofiled_step_ns(scenario)
    if not unprofiled:
        return None
    cycle, pieces = scenario.cycle, scenario.pieces
    events = events_of(scenario)
    mine = cycle.working[pieces.item] & (pieces.rank == 0)
    profiled = float(np.median(cycle.recorded_ns(0)))
    event_ns = _event_ns(scenario, float(events[mine].sum()) / cycle.steps, profiled - unprofiled, unprofiled)
    if not scenario.built.computes_on_host:
        return ProfilerCost(event_ns, 1.0)
    left = float(_less(pieces.ns[mine].astype(np.float64), events[mine], event_ns).sum()) / cycle.steps
    return ProfilerCost(event_ns, unprofiled / left if left > 0 else 1.0)


def without_profiler(scenario: Scenario, ns: Float64, cost: ProfilerCost) -> Float64:
    """Times of the host's pieces without the profiler's cost, ns."""
    return _less(ns, events_of(scenario), cost.event_ns) * cost.factor


def _event_ns(scenario: Scenario, events: float, difference_ns: float, unprofiled_ns: float) -> float:
    """Cost of one event, from what events are known to cost and what a capture's two phases differ by, each as far as
    it is sure. Where a device computes, the difference alone: only the part that the device does not hide is felt."""
    if events < 1.0:
        return 0.0
    if not scenario.built.computes_on_host:
        return max(difference_ns, 0.0) / events
    usual = event_cost(scenario.built.graphs[0])
    known, felt = 1.0 / max(usual.spread_ns, 1.0) ** 2, (events / (TWO_PHASES * unprofiled_ns)) ** 2
    return max((known * usual.ns + felt * difference_ns / events) / (known + felt), 0.0)


@dataclass(frozen=True, slots=True)
class ProfilerShare:
    """The profiler's share of a recorded job's host time, by what its events cost.

    Attributes:
        ns: of each piece.
        calls: of each piece, what of it is calls' rather than operations'.
        event_ns: cost of an event, by rank.
        events, step_ns: events of a step, and what they cost, by rank.
        believed: the recording's word for it was taken on all ranks (see ``MOST_TAKEN``).
    """

    ns: Float64
    calls: Float64
    event_ns: Float64
    events: Float64
    step_ns: Float64
    believed: bool

    def ends(self, ns: Float64) -> tuple[float, float]:
        """Return what is left of host times (ns, of each piece) in the mean at both ends of the 80% interval."""
        operations, calls = float((self.ns - self.calls).sum()), float(self.calls.sum())
        total = float(ns.sum())
        if not self.believed:
            return LEAST_LEFT * total, total
        apart = math.hypot(math.expm1(PROFILER_EVENT) * operations, math.expm1(PROFILER_CALL) * calls)
        left = total - operations - calls
        return max(left - apart, LEAST_LEFT * total), min(left + apart, total)


def profiler_share(scenario: Scenario) -> ProfilerShare:
    """Return the profiler's share of a recorded job where no step was timed without it."""
    pieces, graphs = scenario.pieces, scenario.built.graphs
    ns = scenario.host_times()
    costs = np.array([event_cost(graph).ns for graph in graphs])
    on_device = np.array([len(graph.kernels) > 0 for graph in graphs])[pieces.rank]
    events = events_of(scenario) + np.where(pieces.is_cost & on_device, CALL_EVENTS - 1.0, 0.0)
    for rank, graph in enumerate(graphs):
        mine = pieces.rank == rank
        events[mine] += PYTHON_EVENTS * graph.meta.python_events * ns[mine] / max(float(ns[mine].sum()), 1.0)
    cost = events * costs[pieces.rank]
    left = _less(ns, events, costs[pieces.rank])
    # An event's cost is a mean: what pieces shorter than it cannot hold lies in the others.
    believed = True
    for rank in range(len(graphs)):
        mine = pieces.rank == rank
        total, costs_ns = float(ns[mine].sum()), float(cost[mine].sum())
        believed &= costs_ns <= MOST_TAKEN * total
        left[mine] *= (total - min(costs_ns, MOST_TAKEN * total)) / max(float(left[mine].sum()), 1.0)
    taken = ns - left
    working = scenario.cycle.working[pieces.item]
    per_step, taken_ns = (
        np.bincount(pieces.rank[working], weights=of[working], minlength=len(graphs)) / scenario.cycle.steps
        for of in (events, taken))
    return ProfilerShare(taken, np.where(pieces.is_cost, taken, 0.0), costs, per_step, taken_ns,
                         believed)


def events_of(scenario: Scenario) -> Float64:
    """Recorded events whose cost each piece of host time holds: its call, and of the operations inside its operation
    (in a gap: of those inside none) the share that goes with its length."""
    pieces = scenario.pieces
    count = pieces.is_cost.astype(np.float64)
    for rank, graph in enumerate(scenario.built.graphs):
        rows = np.flatnonzero((pieces.rank == rank) & ~pieces.is_cost)
        inside, within = pieces.op[rows] >= 0, rows[pieces.op[rows] >= 0]
        op, first = np.unique(pieces.op[within], return_index=True)
        around = _around(graph)[op]
        owner = np.where(around >= 0, around, len(graph.ops) + pieces.item[within[first]])
        place = np.where(inside, pieces.op[rows], len(graph.ops) + pieces.item[rows])
        size = int(max(owner.max(initial=0), place.max(initial=0))) + 1
        events = np.bincount(owner, minlength=size)
        length = np.bincount(place, weights=pieces.ns[rows], minlength=size)
        count[rows] += events[place] * pieces.ns[rows] / np.maximum(length[place], 1.0)
        # Where there is no piece of the time around, the operation's own holds it.
        homeless = length[owner] <= 0
        count[within[first[homeless]]] += 1.0
    return count


def _around(graph: ExecutionGraph) -> Int64:
    """For every row of ``ops`` the operation that it is inside of; -1 for none."""
    above = graph.ops.parent
    return np.where(above >= 0, np.append(operation_of(graph), NONE)[above], NONE)


def _less(ns: Float64, events: Float64, event_ns: float | Float64) -> Float64:
    return np.maximum(ns - events * event_ns, LEAST_LEFT * ns)
