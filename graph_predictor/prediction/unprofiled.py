"""A recorded job with the host times it has without the profiler.

A profiler makes every recorded operation and call longer, so that a recording is not the step its user runs. Where a
capture timed that step too, the profiler's cost (``profiler_cost``) is taken out of the recorded host times first,
before anything else looks at them: whatever is edited then is the step without the profiler, and nothing later goes
back to the recorded one.

::

    recorded        |= op =|prof|= op =|prof|── gap ──|
    without         |= op =|= op =|── gap ──|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graph_predictor.prediction.loader import waits_for_workers
from graph_predictor.prediction.profiler_cost import profiler_cost, without_profiler
from graph_predictor.prediction.repeat import Cycle, choose_steps
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.recorded.counted_steps import similar_steps
from graph_predictor.simulation.build import Built, WithoutProfiler
from graph_predictor.simulation.host_slices import HostSlices, host_slices, with_host
from graph_predictor.simulation.program import NEVER, ItemKind, Program, total_ratio, whole_ns
from tracer.arrays import Float64, Int64


def unprofiled(built: Built, steps: Sequence[int] | None = None) -> Built:
    """A recorded job with host times without the profiler; the job itself where no step was timed without it.

    The profiler's cost is one for the whole job: that with which the chosen steps take, in the mean, what the steps
    timed without it took. Outliers are not among them, as the median of the timed ones knows none.

    Args:
        built: as recorded.
        steps: numbers of the steps that stand for the step; by default those that a prediction repeats.
    """
    if built.without_profiler is not None or not built.graphs[0].meta.unprofiled_step_ns:
        return built
    steps = similar_steps(built.graphs) if steps is None else steps
    cycle = None if steps is None else choose_steps(built, steps)
    if cycle is None:
        return built
    slices = host_slices(built)
    scenario = Scenario(built, cycle, slices)
    cost = profiler_cost(scenario)
    if cost is None:
        return built
    waited = [waits_for_workers(built, cycle, rank) for rank in range(len(built.graphs))]
    if any(waited):
        # What such steps take beyond the host's work is waiting for a batch: no reason to make the work longer.
        cost = replace(cost, factor=min(cost.factor, 1.0))
    recorded = slices.ns.astype(np.float64)
    left = without_profiler(scenario, recorded, cost)
    whole = replace(slices, ns=whole_ns(left))
    item_work, item_cost = with_host(built.program, whole, whole.ns.astype(np.float64))
    mine = cycle.working[slices.item]
    share = total_ratio(recorded[mine], left[mine])
    lag = whole_ns(built.program.after_lag * share)
    program = replace(built.program, item_work=item_work, item_cost=item_cost, after_lag=lag,
                      item_external=_arrivals(built, cycle, waited, share))
    shares = [_shares(slices, whole, rank, len(graph.ops)) for rank, graph in enumerate(built.graphs)]
    return replace(built, program=program, without_profiler=WithoutProfiler(built.program, whole, shares))


def on_unprofiled_clock(program: Program, built: Built) -> Program:
    """A program of the recorded times, such as one with residuals, with the profiler's cost taken out of it."""
    if built.without_profiler is None:
        return program
    recorded, left = built.without_profiler.recorded, built.program
    changes = {name: np.maximum(getattr(program, name) + getattr(left, name) - getattr(recorded, name), 0)
               for name in ("item_work", "item_cost", "after_lag")}
    known = left.item_external > NEVER
    arrivals = np.where(known, program.item_external + left.item_external - recorded.item_external, NEVER)
    return replace(program, **changes, item_external=arrivals)


def _arrivals(built: Built, cycle: Cycle, waited: Sequence[bool], share: float) -> Int64:
    """Return when batches of worker processes arrive where steps follow one another as they do without the profiler.

    A rank's steps that mostly did not wait for theirs (``waited``) have none: all that they took without the profiler
    is the host's work already, and a wait beside it would count twice. In others a batch comes as long before the end
    of its step as work then takes: ``share`` of what it took under the profiler.
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
    """Share of a rank's recorded host time that is left, by operation; the last one is of time outside any."""
    rows = recorded.of_rank(rank)
    op = np.where(recorded.op[rows] >= 0, recorded.op[rows], operations)
    before, after = (np.bincount(op, weights=of.ns[rows], minlength=operations + 1).astype(np.float64)
                     for of in (recorded, left))
    overall = total_ratio(before, after)
    return np.where(before > 0, after / np.maximum(before, 1.0), overall)
