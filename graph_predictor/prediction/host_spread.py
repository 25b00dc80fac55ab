"""Intervals of host time: from how much the repeated steps differ, and what steps usually differ by.

Few steps say little of their own spread, so that it is drawn to a usual one. Steps near each other are alike (clocks,
other work on the machine): the mean of several is hardly surer of the steps to come than one of them is, and the
spread between steps is taken for that of their mean.
"""

from __future__ import annotations

import numpy as np

from graph_predictor.prediction.repeat import Cycle
from graph_predictor.recorded.step_lengths import typical
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_slices import HostSlices
from graph_predictor.simulation.host_waits import waiting_calls
from kernel_models.spreads import END, USUAL_STEPS
from tracer.arrays import Bool, Float64, Int64

STRETCHES = 5
"""Parts that steps without the profiler are cut into: what a machine does to a run lasts longer than a step."""
RESOLVED = 1e-3
"""Log half width below which no step is known: recorded times are whole microseconds, of steps of milliseconds, and
replayed ones are off by 0.1% in the median trace (docs/accuracy.md)."""
DRIFT = 0.1
"""Reported is a larger change (log) of host time from the first to the last of the repeated steps: over twice the
standard deviation of what two steps usually differ by."""


def unprofiled_stretches(built: Built) -> Float64:
    """Medians of consecutive stretches of the steps that a capture timed without the profiler, ns."""
    times = np.array(built.graphs[0].meta.unprofiled_step_ns, np.float64)
    return np.array([np.median(part) for part in np.array_split(times, STRETCHES) if len(part)])


def mean_spread(times: Float64) -> float:
    """Log half width of the 80% interval of steps to come, from steps that took these times."""
    log = np.log(times[times > 0])
    squares = float(((log - log.mean()) ** 2).sum()) if len(log) else 0.0
    return END * float(np.sqrt((USUAL_STEPS**2 + squares) / max(len(log), 1)))


def least_spread(times: Int64, around_ns: float) -> float:
    """Log half width of the narrowest 80% interval that a step can have: what steps of these lengths differ by
    themselves, and never less than what a timer and a simulation resolve.

    Typical steps scatter like normal errors, of which few are enough to know the width. Outliers do not, and count by
    their number: 80% of all steps lie in the interval around the given time.
    """
    times = times[times > 0]
    if len(times) < 2 or around_ns <= 0:
        return RESOLVED
    ordinary = np.log(times[typical(times)])
    between = float(np.std(ordinary, ddof=1)) if len(ordinary) > 1 else 0.0
    away = np.abs(np.log(times / around_ns))
    return max(END * between, float(np.quantile(away, 0.8, method="inverted_cdf")), RESOLVED)


def drift(times: Float64) -> float | None:
    """Return by how much (log) steps went one way from first to last, if they did and by more than ``DRIFT``."""
    change = np.diff(np.log(times)) if len(times) > 1 and (times > 0).all() else np.zeros(0)
    one_way = len(change) > 0 and bool((change > 0).all() or (change < 0).all())
    total = float(change.sum())
    return total if one_way and abs(total) > DRIFT else None


def step_totals(built: Built, cycle: Cycle, slices: HostSlices) -> Float64:
    """Host time of each step of the cycle, ns, of the first rank."""
    return _totals(built, cycle, slices, np.ones(len(slices), np.bool_))


def unblocked_totals(built: Built, cycle: Cycle, slices: HostSlices) -> Float64:
    """The same without the calls that wait for the device: what they take beyond the wait for known device work is
    the driver's and the device's, and goes from one step to another; how fast the host works it does not say."""
    program, mine = built.program, (slices.rank == 0) & slices.is_cost
    waits = np.zeros(len(slices), np.bool_)
    waits[mine] = waiting_calls(built.graphs[0])[program.item_row[slices.item[mine]]]
    return _totals(built, cycle, slices, ~waits)


def _totals(built: Built, cycle: Cycle, slices: HostSlices, counted: Bool) -> Float64:
    program, graph = built.program, built.graphs[0]
    start = graph.steps.start_ns[cycle.row[0]]
    rows = np.flatnonzero(counted & (slices.rank == 0) & cycle.working[slices.item])
    when = program.recorded_item_start[slices.item[rows]] - built.clock_ns[0]
    # The end of a step is the instant at which the next one begins: what it ends with is its own.
    place = np.clip(np.searchsorted(start, when, side="left") - 1, 0, None)
    totals = np.bincount(place, weights=slices.ns[rows], minlength=cycle.steps)
    return np.asarray(totals, np.float64)
