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

from graph_predictor.simulation.rank_view import RankView
from graph_predictor.simulation.rendezvous import recorded_meetings, runs_on_host
from tracer.arrays import Float64
from tracer.graph import ExecutionGraph

ONE_CLOCK_NS = 7 * 24 * 3600 * 10**9
"""Windows farther apart were not timed by one clock."""
ONE_HOST_NS = 20_000
"""Clocks nearer to each other are taken for one."""
STEADY_NS = 100_000
"""Median deviation of ends from a constant offset, beyond which it is no clock's."""
LEAST_MEETINGS = 3
DRIFT_TOLD_NS = 20_000
"""Least change of an offset over the window that is reported."""


@dataclass(frozen=True, slots=True)
class JobClock:
    """When each rank's window starts on the job's clock, ns from the first, and what was put right."""

    starts_ns: list[int]
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
    if len(views) < 2:
        return JobClock(starts, [])
    ends = _ends(views, starts)
    if not len(ends):
        return JobClock(starts, [])
    # The rank whose collectives most others met is the reference.
    reference = int(np.isfinite(ends).sum(axis=0).argmax())
    notes, found = [], list(starts)
    for position, view in enumerate(views):
        both = np.isfinite(ends[:, position]) & np.isfinite(ends[:, reference])
        ahead = (ends[:, position] - ends[:, reference])[both]
        if position == reference or len(ahead) < LEAST_MEETINGS:
            continue
        offset = float(np.median(ahead))
        scatter = float(np.median(np.abs(ahead - offset)))
        if abs(offset) <= ONE_HOST_NS or scatter > STEADY_NS:
            continue
        found[position] -= round(offset)
        drift = _drift_ns(ends[both, reference], ahead)
        more = f", and changes by {drift / 1e3:+,.0f} µs over the window" if abs(drift) > DRIFT_TOLD_NS else ""
        notes.append(
            f"Rank {max(view.graph.meta.rank, position)}'s clock is {abs(offset) / 1e6:,.3f} ms "
            f"{'ahead' if offset > 0 else 'behind'} by the ends of {len(ahead)} collectives (within "
            f"{scatter / 1e3:,.1f} µs){more}; it was set.")
    first = min(found)
    return JobClock([start - first for start in found], notes)


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


def _drift_ns(when: Float64, ahead: Float64) -> float:
    """Change of an offset from the first to the last collective, by a line through them."""
    span = float(np.ptp(when))
    return float(np.polyfit((when - when.min()) / span, ahead, 1)[0]) if span > 0 else 0.0
