"""Host time without the profiler: what the profiler cost, and a recorded job without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.data_loading import waits_for_workers
from graph_predictor.prediction.repeat import Cycle, choose_steps
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.recorded.counted_steps import similar_steps
from graph_predictor.simulation.build import Built, WithoutProfiler
from graph_predictor.simulation.host_slices import HostSlices, host_slices, operation_of, with_host
from graph_predictor.simulation.program import NEVER, ItemKind, Program, total_ratio, whole_ns
from kernel_models.host.segments import CALL_EVENTS, PYTHON_EVENTS, event_cost
from kernel_models.spreads import PROFILER_CALL, PROFILER_EVENT, TWO_PHASES
from tracer.arrays import Float64, Int64
from tracer.columns import kinds_of
from tracer.graph import NONE, ExecutionGraph, OpKind

MOST_TAKEN = 0.6
"""Largest share of a host's time that events are assumed to cost if no step was timed without them: they cost 0.15 to
0.49 of the time of 27 programs. If the estimate is larger, the host is slow for another reason."""
LEAST_LEFT = 0.1
"""Least share of a slice of host time that is left after the profiler's cost, because an event's cost is a mean."""


@dataclass(frozen=True, slots=True)
class ProfilerCost:
    """Cost of one recorded event under the profiler, ns, and a factor on the remaining host time.

    A capture first times steps without the profiler and then profiles others, so their difference is known. It has two
    causes: each recorded operation and call costs time, and the machine may be slower or faster in one of the phases.
    The known costs of events and the usual difference between two phases give each cause's part. The profiler reads the
    clock last when an operation begins and first when it ends:

    ::

        recorded    |= aten::linear =|~~prof~~|= aten::addmm =|~~prof~~|= aten::linear =|

    So an event's cost lies in the time around its operation: in the operation that encloses it, or in no operation. On
    a CPU, host time is all there is. A factor on the rest then makes the recorded steps last exactly as long as the
    unprofiled ones.
    """

    event_ns: float
    factor: float


def profiler_cost(scenario: Scenario, stalled_ns: float = 0.0) -> ProfilerCost | None:
    """Return the profiler's cost in a recorded job; ``None`` if no step was timed without the profiler. ``stalled_ns``
    is the time of each recorded step that the scenario's host times do not include."""
    if not (timed := scenario.built.graphs[0].meta.unprofiled_step_ns):
        return None
    unprofiled = float(np.median(timed))
    cycle, slices = scenario.cycle, scenario.slices
    events = events_of(scenario)
    mine = cycle.working[slices.item] & (slices.rank == 0)
    profiled = float(np.median(cycle.recorded_ns(0))) - stalled_ns
    event_ns = _event_ns(scenario, float(events[mine].sum()) / cycle.steps, profiled - unprofiled, unprofiled)
    if not scenario.built.computes_on_host:
        return ProfilerCost(event_ns, 1.0)
    left = float(_less(slices.ns[mine].astype(np.float64), events[mine], event_ns).sum()) / cycle.steps
    return ProfilerCost(event_ns, unprofiled / left if left > 0 else 1.0)


def without_profiler(scenario: Scenario, ns: Float64, cost: ProfilerCost) -> Float64:
    """Return the times of the host's slices without the profiler's cost, ns."""
    return _less(ns, events_of(scenario), cost.event_ns) * cost.factor


def _event_ns(scenario: Scenario, events: float, difference_ns: float, unprofiled_ns: float) -> float:
    """Return the cost of one event, ns. On a CPU it is a mean of the known cost of events and of the difference of the
    capture's two phases, each weighted by its certainty. With a device it is the difference alone, since only cost that
    the device does not hide counts."""
    if events < 1.0:
        return 0.0
    if not scenario.built.computes_on_host:
        return max(difference_ns, 0.0) / events
    usual = event_cost(scenario.built.graphs[0])
    known, felt = 1.0 / max(usual.spread_ns, 1.0) ** 2, (events / (TWO_PHASES * unprofiled_ns)) ** 2
    return max((known * usual.ns + felt * difference_ns / events) / (known + felt), 0.0)


@dataclass(frozen=True, slots=True)
class ProfilerShare:
    """The profiler's share of a recorded job's host time, from the known cost of events.

    Attributes:
        ns: profiler's time in each slice.
        calls: the part of ``ns`` from calls rather than from operations, for each slice.
        event_ns: cost of an event, by rank.
        events, step_ns: number of events of a step, and their cost, by rank.
        believed: whether the estimate was below the limit on all ranks (see ``MOST_TAKEN``).
    """

    ns: Float64
    calls: Float64
    event_ns: Float64
    events: Float64
    step_ns: Float64
    believed: bool

    def ends(self, ns: Float64) -> tuple[float, float]:
        """Return total host time without the profiler at both ends of the 80% interval, from slices' times ``ns``."""
        operations, calls = float((self.ns - self.calls).sum()), float(self.calls.sum())
        total = float(ns.sum())
        if not self.believed:
            return LEAST_LEFT * total, total
        apart = math.hypot(math.expm1(PROFILER_EVENT) * operations, math.expm1(PROFILER_CALL) * calls)
        left = total - operations - calls
        return max(left - apart, LEAST_LEFT * total), min(left + apart, total)


def profiler_share(scenario: Scenario) -> ProfilerShare:
    """Return the profiler's share of a recorded job without steps timed without the profiler."""
    slices, graphs = scenario.slices, scenario.built.graphs
    ns = scenario.host_times()
    costs = np.array([event_cost(graph).ns for graph in graphs])
    on_device = np.array([len(graph.kernels) > 0 for graph in graphs])[slices.rank]
    events = events_of(scenario) + np.where(slices.is_cost & on_device, CALL_EVENTS - 1.0, 0.0)
    for rank, graph in enumerate(graphs):
        mine = slices.rank == rank
        events[mine] += PYTHON_EVENTS * graph.meta.python_events * ns[mine] / max(float(ns[mine].sum()), 1.0)
    cost = events * costs[slices.rank]
    left = _less(ns, events, costs[slices.rank])
    # An event's cost is a mean: cost that does not fit into a short slice is taken from the others.
    believed = True
    for rank in range(len(graphs)):
        mine = slices.rank == rank
        total, costs_ns = float(ns[mine].sum()), float(cost[mine].sum())
        believed &= costs_ns <= MOST_TAKEN * total
        left[mine] *= (total - min(costs_ns, MOST_TAKEN * total)) / max(float(left[mine].sum()), 1.0)
    taken = ns - left
    working = scenario.cycle.working[slices.item]
    per_step, taken_ns = (
        np.bincount(slices.rank[working], weights=of[working], minlength=len(graphs)) / scenario.cycle.steps
        for of in (events, taken))
    return ProfilerShare(taken, np.where(slices.is_cost, taken, 0.0), costs, per_step, taken_ns,
                         believed)


def events_of(scenario: Scenario) -> Float64:
    """Return the number of recorded events whose cost lies in each slice of host time. A slice has its own call and, by
    its length, a share of the operations directly inside its operation. Gaps share the outermost operations."""
    slices = scenario.slices
    count = slices.is_cost.astype(np.float64)
    for rank, graph in enumerate(scenario.built.graphs):
        rows = np.flatnonzero((slices.rank == rank) & ~slices.is_cost)
        inside, within = slices.op[rows] >= 0, rows[slices.op[rows] >= 0]
        op, first = np.unique(slices.op[within], return_index=True)
        around = _around(graph)[op]
        owner = np.where(around >= 0, around, len(graph.ops) + slices.item[within[first]])
        place = np.where(inside, slices.op[rows], len(graph.ops) + slices.item[rows])
        size = int(max(owner.max(initial=0), place.max(initial=0))) + 1
        events = np.bincount(owner, minlength=size)
        length = np.bincount(place, weights=slices.ns[rows], minlength=size)
        count[rows] += events[place] * slices.ns[rows] / np.maximum(length[place], 1.0)
        # If the time around an operation has no slice, the operation's own slice has its event.
        homeless = length[owner] <= 0
        count[within[first[homeless]]] += 1.0
    return count


def _around(graph: ExecutionGraph) -> Int64:
    """Return for every row of ``ops`` the operation around it; -1 for none."""
    above = graph.ops.parent
    return np.where(above >= 0, np.append(operation_of(graph), NONE)[above], NONE)


def _less(ns: Float64, events: Float64, event_ns: float | Float64) -> Float64:
    return np.maximum(ns - events * event_ns, LEAST_LEFT * ns)


def unprofiled(built: Built, steps: Sequence[int] | None = None) -> Built:
    """Return a recorded job with host times without the profiler; the job itself if no step was timed without it.

    A profiler makes every recorded operation and call longer, so a recording is slower than the step its user runs.
    Where a capture also timed steps without the profiler, the profiler's cost is first subtracted from the recorded
    host times. All later analyses and edits then see the step without the profiler.

    ::

        recorded        |= op =|prof|= op =|prof|── gap ──|
        without         |= op =|= op =|── gap ──|

    The whole job has one cost an event: with it, the chosen steps take on average the median time of the steps timed
    without the profiler. The median excludes outliers, so the chosen steps must not contain any.

    Args:
        built: the job as recorded.
        steps: numbers of the chosen steps; by default the steps that a prediction repeats.
    """
    if built.without_profiler is not None or not built.graphs[0].meta.unprofiled_step_ns:
        return built
    steps = similar_steps(built.graphs) if steps is None else steps
    cycle = None if steps is None else choose_steps(built, steps)
    if cycle is None:
        return built
    slices = host_slices(built)
    stalls = stalled_ns(built, slices)
    stalled = _per_step(cycle, slices, stalls)
    scenario = Scenario(built, cycle, replace(slices, ns=slices.ns - stalls))
    cost = profiler_cost(scenario, stalled)
    if cost is None:
        return built
    waited = [waits_for_workers(built, cycle, rank) for rank in range(len(built.graphs))]
    if any(waited):
        # The rest of such steps is waiting for a batch: it must not make the host's work longer.
        cost = replace(cost, factor=min(cost.factor, 1.0))
    recorded = slices.ns.astype(np.float64)
    left = without_profiler(scenario, recorded - stalls, cost)
    whole = replace(slices, ns=whole_ns(left))
    item_work, item_cost = with_host(built.program, whole, whole.ns.astype(np.float64))
    mine = cycle.working[slices.item]
    share = total_ratio(recorded[mine], left[mine])
    lag = whole_ns(built.program.after_lag * share)
    program = replace(built.program, item_work=item_work, item_cost=item_cost, after_lag=lag,
                      item_external=_arrivals(built, cycle, waited, share))
    shares = [_shares(slices, whole, rank, len(graph.ops)) for rank, graph in enumerate(built.graphs)]
    return replace(built, program=program, without_profiler=WithoutProfiler(built.program, whole, shares,
                                                                            _stalled(built, slices, stalls)))


STALLED = 3.0
"""A call counts as stalled if it takes over this many times the usual time of equal calls. The value is chosen: equal
calls on a quiet machine differ by less, and a scheduler stops a thread for milliseconds."""
LEAST_STALL_NS = 100_000
"""Shorter stops are within the usual differences of equal calls."""


def stalled_ns(built: Built, slices: HostSlices) -> Int64:
    """Return how long each slice of host time was stalled by the machine, doing no work, ns.

    ::

        step 0    | mm 0.4 | transpose 0.02 | mm 0.4 |         equal calls at one place of the steps:
        step 1    | mm 0.4 | transpose 3.9  | mm 0.4 |         transpose stalled for 3.88 ms

    Calls with the same name and sizes are equal. A stalled call takes over ``STALLED`` times both the usual time at its
    place in the other steps and the usual time of all equal calls. So an operation that is slow in every step (its
    memory lies differently) is not stalled. Time before an operation is compared in the same way. Jobs that compute on
    a device have no stalls: their host waits for the device, for varying times.
    """
    found: Int64 = np.zeros(len(slices), np.int64)
    if not built.computes_on_host:
        return found
    for rank, graph in enumerate(built.graphs):
        ops = graph.ops
        rows = np.flatnonzero((slices.rank == rank) & ~slices.is_cost & ~slices.data
                              & ((slices.op >= 0) | (slices.following >= 0)))
        inside = slices.op[rows] >= 0
        owner = np.where(inside, slices.op[rows], len(ops) + slices.following[rows])
        took = np.bincount(owner, weights=slices.ns[rows], minlength=2 * len(ops)).astype(np.float64)
        usual = _usual_ns(graph, took)
        stall = (took > STALLED * usual) & (took - usual > LEAST_STALL_NS)
        over = np.where(stall, 1.0 - usual / np.maximum(took, 1.0), 0.0)
        found[rows] = (slices.ns[rows] * over[owner]).astype(np.int64)
    return found


def _usual_ns(graph: ExecutionGraph, took: Float64) -> Float64:
    """Return the usual time of each call and of the time before it, [2 × ops] as ``took``. It is the larger of two
    medians: of equal calls at the same place of all steps, and of all equal calls. With one step it is ``took``."""
    ops = graph.ops
    usual = took.copy()
    rows = np.flatnonzero((ops.kind == OpKind.OPERATION) & (ops.step >= 0))
    if len(graph.steps) < 2 or not len(rows):
        return usual
    kind, _ = kinds_of(ops.name[rows].astype(np.int64), ops.shapes[rows].astype(np.int64))
    step = ops.step[rows].astype(np.int64)
    order = np.lexsort((rows, kind, step))
    changes = np.ones(len(order), np.bool_)
    changes[1:] = (np.diff(kind[order]) != 0) | (np.diff(step[order]) != 0)
    first = np.flatnonzero(changes)
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    place, _ = kinds_of(kind, number)
    for shift in (0, len(ops)):
        own = took[rows + shift]
        usual[rows + shift] = np.maximum(_lower_median(place, own), _lower_median(kind, own))
    return usual


def _lower_median(group: Int64, values: Float64) -> Float64:
    """Return the lower median of each value's group; a value alone in its group is the median."""
    order = np.lexsort((values, group))
    count = np.bincount(group)
    first = np.cumsum(count) - count
    return np.asarray(values[order][(first + (count - 1) // 2)[group]], np.float64)


def _per_step(cycle: Cycle, slices: HostSlices, ns: Int64) -> float:
    """Return the mean per step of a part of host time, over the repeated steps of the first rank, ns."""
    mine = cycle.working[slices.item] & (slices.rank == 0)
    return float(ns[mine].sum()) / cycle.steps


def _stalled(built: Built, slices: HostSlices, stalls: Int64) -> tuple[float, str]:
    """Return the stalled share of the first rank's recorded host time, and the operation with most of it."""
    rows = np.flatnonzero((stalls > 0) & (slices.rank == 0))
    if not len(rows):
        return 0.0, ""
    graph = built.graphs[0]
    name = np.where(slices.op[rows] >= 0, graph.ops.name[slices.op[rows]], NONE)
    codes, at = np.unique(name, return_inverse=True)
    worst = int(codes[np.argmax(np.bincount(at, weights=stalls[rows]))])
    share = float(stalls[rows].sum()) / float(slices.ns[slices.rank == 0].sum())
    return share, graph.string(worst) if worst != NONE else "no operation"


def on_unprofiled_clock(program: Program, built: Built) -> Program:
    """Return a program of recorded times (such as one with residuals) with the profiler's cost subtracted."""
    if built.without_profiler is None:
        return program
    recorded, left = built.without_profiler.recorded, built.program
    changes = {name: np.maximum(getattr(program, name) + getattr(left, name) - getattr(recorded, name), 0)
               for name in ("item_work", "item_cost", "after_lag")}
    known = left.item_external > NEVER
    arrivals = np.where(known, program.item_external + left.item_external - recorded.item_external, NEVER)
    return replace(program, **changes, item_external=arrivals)


def _arrivals(built: Built, cycle: Cycle, waited: Sequence[bool], share: float) -> Int64:
    """Return when batches of worker processes arrive without the profiler, by item.

    Ranks whose steps mostly did not wait for batches (``waited`` is false) have no arrivals. Their time without the
    profiler is all host work already, so a wait would count twice. On other ranks the work between a batch's arrival
    and the end of its step takes ``share`` of its time under the profiler.
    """
    program = built.program
    external, known = program.item_external.copy(), program.item_external > NEVER
    if not known.any():
        return external
    rank = program.thread_rank[program.item_thread()]
    for number in range(program.ranks):
        mine = np.flatnonzero(known & (rank == number))
        if not waited[number]:
            external[mine] = NEVER
            continue
        steps = cycle.recorded_ns(number)
        ratio = float(np.median(built.graphs[number].meta.unprofiled_step_ns or steps)) / float(steps.mean())
        ends = np.sort(program.recorded_item_end[(rank == number) & (program.item_kind == ItemKind.STEP_END)])
        end = ends[np.minimum(np.searchsorted(ends, external[mine]), len(ends) - 1)]
        rest = np.maximum(end - external[mine], 0)
        external[mine] = whole_ns((external[mine] + rest) * ratio - rest * share)
    return external


def _shares(recorded: HostSlices, left: HostSlices, rank: int, operations: int) -> Float64:
    """Return the share of a rank's recorded host time that is left, by operation; the last is of time outside any."""
    rows = recorded.of_rank(rank)
    op = np.where(recorded.op[rows] >= 0, recorded.op[rows], operations)
    before, after = (np.bincount(op, weights=of.ns[rows], minlength=operations + 1).astype(np.float64)
                     for of in (recorded, left))
    overall = total_ratio(before, after)
    return np.where(before > 0, after / np.maximum(before, 1.0), overall)
