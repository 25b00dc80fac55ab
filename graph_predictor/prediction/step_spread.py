"""How recorded steps differ: in host time, which widens intervals, and in the work they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.repeat import Cycle
from graph_predictor.recorded.counted_steps import typical
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_items import waiting_calls
from graph_predictor.simulation.host_slices import HostSlices
from kernel_models.spreads import END, USUAL_STEPS
from tracer.arrays import Float64, Int64
from tracer.graph import ExecutionGraph
from tracer.step_work import DIFFERENT, WorkOfSteps, worked_steps

STRETCHES = 5
"""Number of parts into which steps without the profiler are cut: disturbances of a machine last longer than a step."""
RESOLVED = 1e-3
"""Least log half width of any step. Recorded times are whole microseconds, in steps of milliseconds; replays are off by
0.1% in the median trace (docs/accuracy.md)."""
DRIFT = 0.1
"""Reports mention a larger change (log) of host time from the first to the last repeated step. The value is over twice
the standard deviation of the usual difference between two steps."""


def unprofiled_stretches(built: Built) -> Float64:
    """Return medians of consecutive stretches of the steps that a capture timed without the profiler, ns."""
    times = np.array(built.graphs[0].meta.unprofiled_step_ns, np.float64)
    return np.array([np.median(part) for part in np.array_split(times, STRETCHES) if len(part)])


def mean_spread(times: Float64) -> float:
    """Return the log half width of the 80% interval of future steps, given the times of some steps.

    A few steps do not determine their spread, so it is shrunk towards a usual one. Neighbouring steps are correlated
    (clocks, other work on the machine), so the mean of several predicts future steps hardly better than one step does.
    Therefore the spread between steps also serves as that of their mean.
    """
    log = np.log(times[times > 0])
    squares = float(((log - log.mean()) ** 2).sum()) if len(log) else 0.0
    return END * float(np.sqrt((USUAL_STEPS**2 + squares) / max(len(log), 1)))


def least_spread(times: Int64, around_ns: float) -> float:
    """Return the log half width of the narrowest 80% interval around ``around_ns``, given steps' times in ns: their own
    variation, and at least ``RESOLVED``.

    Typical steps scatter normally, so a few of them determine the width. Outliers do not, and count by their number:
    the interval around the given time contains 80% of all steps.
    """
    times = times[times > 0]
    if len(times) < 2 or around_ns <= 0:
        return RESOLVED
    ordinary = np.log(times[typical(times)])
    between = float(np.std(ordinary, ddof=1)) if len(ordinary) > 1 else 0.0
    away = np.abs(np.log(times / around_ns))
    return max(END * between, float(np.quantile(away, 0.8, method="inverted_cdf")), RESOLVED)


def drift(times: Float64) -> float | None:
    """Return the total change (log) of steps that all change in one direction, if it is larger than ``DRIFT``."""
    change = np.diff(np.log(times)) if len(times) > 1 and (times > 0).all() else np.zeros(0)
    one_way = len(change) > 0 and bool((change > 0).all() or (change < 0).all())
    total = float(change.sum())
    return total if one_way and abs(total) > DRIFT else None


def step_totals(built: Built, cycle: Cycle, slices: HostSlices, *, unblocked: bool = False) -> Float64:
    """Return the first rank's host time of each step of the cycle, ns.

    ``unblocked`` leaves out calls that wait for the device. Their time beyond the wait for known device work depends on
    driver and device and moves between steps, so it does not show how fast the host works.
    """
    program, graph = built.program, built.graphs[0]
    start = graph.steps.start_ns[cycle.row[0]]
    rows = np.flatnonzero((slices.rank == 0) & cycle.working[slices.item])
    if unblocked:
        waits = slices.is_cost[rows]
        waits[waits] = waiting_calls(graph)[program.item_row[slices.item[rows[waits]]]]
        rows = rows[~waits]
    when = program.recorded_item_start[slices.item[rows]] - built.clock_ns[0]
    # A step ends at the instant at which the next one begins: work at that instant belongs to the step that ends.
    place = np.clip(np.searchsorted(start, when, side="left") - 1, 0, None)
    totals = np.bincount(place, weights=slices.ns[rows], minlength=cycle.steps)
    return np.asarray(totals, np.float64)


SHOWN = 60
"""Most characters of sizes that a sentence shows."""
QUANTILES = (0.1, 0.9)
"""Quantiles at the ends of an 80% interval."""


@dataclass(frozen=True, slots=True)
class StepKinds:
    """Differences in work between a job's recorded steps.

    ::

        recorded    | train | train + evaluate | train | train |         one median describes neither kind
        recorded    | [7, 33] | [7, 81] | [7, 24] |                      batches padded to their own longest

    A prediction is about the steps it is made from. Where other steps do other work, reports state it, and the interval
    covers these steps.

    Attributes:
        text: a sentence on the difference.
        shortest, longest: least and greatest length of the other steps (and of 80% of the steps timed without the
            profiler), relative to the steps a prediction is made from; 1 if no step is shorter or longer.
    """

    text: str
    shortest: float
    longest: float


def step_kinds(graphs: Sequence[ExecutionGraph], rests_on: Sequence[str] = ()) -> StepKinds | None:
    """Return how steps differ in their work, for the first rank with different steps; ``None`` if no steps differ.

    Args:
        graphs: recorded graphs, one for each rank.
        rests_on: names of the steps that a prediction is made from; by default the last step.
    """
    for graph in graphs:
        found = _of_rank(graph, rests_on)
        if found is not None:
            return found
    return None


def _of_rank(graph: ExecutionGraph, rests_on: Sequence[str]) -> StepKinds | None:
    steps = worked_steps(graph)
    if len(steps) < 2:
        return None
    names = [graph.string(int(graph.steps.name[step])) for step in steps.tolist()]
    mine = np.array([name in rests_on for name in names], np.bool_)
    reference = int(np.flatnonzero(mine)[-1]) if mine.any() else len(steps) - 1
    work = WorkOfSteps.of(graph, steps)
    share = work.apart(np.arange(len(steps)), np.full(len(steps), reference))
    if not (share > DIFFERENT).any():
        return None
    other = int(np.argmax(share))
    length = graph.steps.duration_ns[steps].astype(np.float64)
    own = float(length[mine].mean()) if mine.any() else float(length[reference])
    others = length[share > DIFFERENT]
    shortest, longest = float(others.min()) / own, float(others.max()) / own
    timed = np.array(graph.meta.unprofiled_step_ns or [], np.float64)
    if len(timed):
        low, high = np.quantile(timed, QUANTILES) / np.median(timed)
        shortest, longest = min(shortest, float(low)), max(longest, float(high))
    pair = [reference, other]
    said = _difference(graph, work, pair, steps[pair], [names[at] for at in pair])
    text = f"{len(others)} of {len(steps)} recorded steps do other work than {names[reference]}: {said}."
    return StepKinds(text, min(shortest, 1.0), max(longest, 1.0))


def _difference(graph: ExecutionGraph, work: WorkOfSteps, pair: Sequence[int], steps: Int64,
                names: Sequence[str]) -> str:
    """Return a phrase on the difference of two steps, by the operation with the largest difference in time."""
    ops, count = graph.ops, work.count[pair]
    name = ops.name[work.row]
    known = name >= 0  # a damaged file may lack some
    if not known.any():
        return "operations without names"
    worst = int(np.argmax(np.bincount(name[known], weights=(np.abs(count[1] - count[0]) * work.mean_ns)[known])))
    runs, whole = (column.astype(int).tolist() for column in (count[:, name == worst].sum(axis=1), count.sum(axis=1)))
    if runs[0] != runs[1]:
        return (f"{names[1]} runs {whole[1]:,} operations where {names[0]} runs {whole[0]:,} ({graph.string(worst)} "
                f"{runs[1]:,} and {runs[0]:,} times)")
    rows = [np.flatnonzero((ops.name == worst) & (ops.step == step)) for step in steps.tolist()]
    shapes = [ops.shapes[own[np.argsort(ops.start_ns[own], kind="stable")]][:min(map(len, rows))] for own in rows]
    first = int(np.argmax(shapes[0] != shapes[1]))
    sizes = _where_they_differ(*(graph.string(int(column[first])) for column in shapes))
    return f"{graph.string(worst)} has sizes {sizes[1]} in {names[1]} and {sizes[0]} in {names[0]}"


def _where_they_differ(one: str, other: str) -> tuple[str, str]:
    """Return two long texts, shortened to the part where they begin to differ."""
    at = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    begin = 0 if at < SHOWN // 2 else at - SHOWN // 4
    cut = ["…" * (begin > 0) + text[begin:begin + SHOWN] + "…" * (begin + SHOWN < len(text)) for text in (one, other)]
    return cut[0], cut[1]
