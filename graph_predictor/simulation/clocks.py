"""The clocks of ranks, aligned by the collectives that they end together (as dPRO does, Hu et al., MLSys 2022).

::

    rank 0   ────|== all_reduce ==|────────|== all_gather ==|         ends on its own clock
    rank 1       ────|== all_reduce ==|────────|== all_gather ==|     ends on its own clock, each as much later

Ranks of one host share a clock, and their collectives end within 1 to 7 µs of each other. Hosts' clocks differ by
microseconds to milliseconds; ranks that were timed from different origins by anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graph_predictor.figures import signed_microseconds
from graph_predictor.simulation.rank_view import RankView
from graph_predictor.simulation.rendezvous import recorded_meetings, runs_on_host
from tracer.arrays import Float64
from tracer.graph import ExecutionGraph, StepSource

ONE_CLOCK_NS = 7 * 24 * 3600 * 10**9
"""Windows farther apart were not timed by one clock."""
ONE_HOST_NS = 20_000
"""Clocks nearer to each other are taken for one."""
STEADY_NS = 100_000
"""Median deviation of ends from an offset that changes evenly, beyond which it is no clock's."""
LEAST_MEETINGS = 3
DRIFT_TOLD_NS = 20_000
"""Change of an offset over the window that is told and set; a smaller one is how ends scatter."""


@dataclass(frozen=True, slots=True)
class JobClock:
    """When each rank's window starts on the job's clock, ns from the first; how much faster than it its own clock runs;
    and what was put right."""

    starts_ns: list[int]
    drifts: list[float]
    notes: list[str]


def window_starts(graphs: Sequence[ExecutionGraph]) -> list[int]:
    """Return when each rank's window starts by its own clock, ns from the first.

    Windows that lie more than a week apart were not timed by one clock: they are taken to start together.
    """
    starts = [graph.meta.base_time_ns for graph in graphs]
    first = min(starts, default=0)
    apart = max(starts, default=0) - first > ONE_CLOCK_NS
    return [0 if apart else start - first for start in starts]


def job_clock(views: Sequence[RankView]) -> JobClock:
    """Return the clock of a recorded job: each rank's own, set by its collectives where it is another host's."""
    starts = window_starts([view.graph for view in views])
    level = [0.0] * len(views)
    ends = _ends(views, starts) if len(views) > 1 else np.zeros((0, 0))
    if not len(ends):
        return JobClock(starts, level, [])
    # The rank whose collectives most others met is the reference.
    reference = int(np.isfinite(ends).sum(axis=0).argmax())
    notes, found, drifts = _other_steps([view.graph for view in views], reference), list(starts), level
    for position, view in enumerate(views):
        both = np.isfinite(ends[:, position]) & np.isfinite(ends[:, reference])
        ahead = (ends[:, position] - ends[:, reference])[both]
        if position == reference or len(ahead) < LEAST_MEETINGS:
            continue
        own = ends[both, position]
        drift = _drift(own, ahead)
        if abs(drift) * float(np.ptp(own)) <= DRIFT_TOLD_NS:
            drift = 0.0
        offsets = ahead - drift * (own - starts[position])
        offset = float(np.median(offsets))
        scatter = float(np.median(np.abs(offsets - offset)))
        if (abs(offset) <= ONE_HOST_NS and not drift) or scatter > STEADY_NS:
            continue
        found[position] -= round(offset)
        drifts[position] = drift
        more = (f", and changes by {signed_microseconds(drift * float(np.ptp(own)), 0)} µs over the window"
                if drift else "")
        notes.append(
            f"Rank {number_of(view.graph, position)}'s clock is {abs(offset) / 1e6:,.3f} ms "
            f"{'ahead' if offset > 0 else 'behind'} by the ends of {len(ahead)} collectives (within "
            f"{scatter / 1e3:,.1f} µs){more}; it was set.")
    first = min(found)
    return JobClock([start - first for start in found], drifts, notes)


def number_of(graph: ExecutionGraph, position: int) -> int:
    """Return a rank's number: its own, or its position where nobody recorded it."""
    return max(graph.meta.rank, position)


def _other_steps(graphs: Sequence[ExecutionGraph], reference: int) -> list[str]:
    """Return a sentence for each rank whose profiler marked none of the steps that the reference's marked."""
    marked = [[graph.string(int(name)) for name in graph.steps.name]
              if graph.meta.step_source == StepSource.PROFILER_STEP else [] for graph in graphs]
    of = marked[reference]
    return [f"Rank {number_of(graphs[position], position)} recorded {own[0]} to {own[-1]}, rank "
            f"{number_of(graphs[reference], reference)} {of[0]} to {of[-1]}: what they did is matched in order, as if "
            "these were the same steps; give one run's traces of the same steps." for position, own in enumerate(marked)
            if own and of and not set(own) & set(of)]


def _ends(views: Sequence[RankView], starts: Sequence[int]) -> Float64:
    """Ends of each collective on each rank's own clock, [collectives, ranks], ns; NaN where a rank was not in it."""
    rows = []
    for _, members in recorded_meetings(views, []):
        if runs_on_host(views, members):  # threads of a host end when its scheduler lets them
            continue
        row = np.full(len(views), np.nan)
        for position, kernel in members:
            row[position] = float(int(views[position].k_end[kernel]) + starts[position])
        rows.append(row)
    return np.array(rows)


def _drift(when: Float64, ahead: Float64) -> float:
    """Return by how much a clock runs faster than another, by a line through its offsets."""
    span = float(np.ptp(when))
    return float(np.polyfit((when - when.min()) / span, ahead, 1)[0]) / span if span > 0 else 0.0
