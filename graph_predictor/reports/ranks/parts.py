"""Parts of a rank's step: computing, communicating, waiting for other ranks, or idle.

::

    compute      ####          ####                   a kernel that is no collective
    collective      ==~~~~~~~==========               ~ until the last rank arrives, = the transfer
                 BBBBEwwwwwwwEEBBBBEEE.....           busy, exposed, waiting, idle

The parts of a window add up to it exactly. Of a rank without device work of its own, the host computes: it is busy
where it does not wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from graph_predictor.reports.ranks.times import JobTimes, Window
from graph_predictor.simulation.causes import EndCause, KernelCause
from tracer.arrays import Int8, Int64
from tracer.graph import KernelKind

POINT_TO_POINT = ("send", "recv", "send_recv")
"""Kinds of ``CollectiveTable`` between two stages of a pipeline."""


class RankPart(IntEnum):
    """The part that a nanosecond belongs to; where several hold, the first."""

    BUSY = 0
    EXPOSED = 1
    WAITING = 2
    BUBBLE = 3
    IDLE = 4


@dataclass(frozen=True, slots=True)
class RankParts:
    """A window taken apart. ``edge_ns`` bounds its pieces (one more than there are) and ``part`` says what each is.

    ``overlapped_ns`` is the busy time in which a collective was under way too.
    """

    edge_ns: Int64
    part: Int8
    overlapped_ns: int

    def ns(self, part: RankPart) -> int:
        """Time of one part."""
        return int(np.diff(self.edge_ns)[self.part == part].sum())


@dataclass(frozen=True, slots=True)
class Meetings:
    """Times at which a program's collective kernels could have started, and at which their last rank was there (ns).

    Kernels are rows of the program; other kernels have both at their start. ``point_to_point`` marks sends and
    receives.
    """

    ready: Int64
    met: Int64
    point_to_point: np.ndarray


def meetings(times: JobTimes) -> Meetings:
    """The meetings of a job's simulated collectives."""
    program, simulated = times.program, times.simulated
    ready, met = simulated.kernel_start.copy(), simulated.kernel_start.copy()
    grouped = program.kernel_group >= 0
    if grouped.any():
        met[grouped] = simulated.kernel_start[simulated.group_last[program.kernel_group[grouped]]]
    between = np.zeros(len(met), np.bool_)
    rank_of = program.kernel_rank()
    for rank, graph in enumerate(times.graphs):
        table = graph.collectives
        kinds = np.isin([graph.string(code) for code in table.kind.tolist()], POINT_TO_POINT)
        rows = table.kernel[kinds & (table.kernel >= 0)] if len(table) else table.kernel
        low, high = int(program.kernel_ptr[rank]), int(program.kernel_ptr[rank + 1])
        mine = np.arange(low, high)
        between[mine] = np.isin(times.graph_row(mine), rows)
    # A receive that started with another rank's send was there before it.
    sent = (simulated.kernel_cause == KernelCause.EDGE) & between
    for k in np.flatnonzero(sent).tolist():
        other = int(program.edge_kernel[int(simulated.kernel_source[k])])
        if rank_of[other] != rank_of[k]:
            ready[k] = min(_ready_alone(times, k, rank_of), int(met[k]))
    return Meetings(ready, met, between)


def _ready_alone(times: JobTimes, k: int, rank_of: Int64) -> int:
    """Return when a kernel could have started, as far as its own rank is concerned."""
    program, simulated = times.program, times.simulated
    at = []
    if program.kernel_item[k] >= 0:
        at.append(int(simulated.item_end[program.kernel_item[k]] + program.kernel_latency[k]))
    if program.kernel_previous[k] >= 0:
        at.append(int(simulated.kernel_end[program.kernel_previous[k]] + program.kernel_gap[k]))
    for edge in range(int(program.edge_ptr[k]), int(program.edge_ptr[k + 1])):
        other = int(program.edge_kernel[edge])
        if rank_of[other] == rank_of[k]:
            took = int(simulated.kernel_end[other] - simulated.kernel_start[other])
            at.append(int(simulated.kernel_start[other]) + int(program.edge_fraction[edge] * took)
                      + int(program.edge_lag[edge]))
    return max(at, default=int(simulated.kernel_start[k]))


def parts_of(times: JobTimes, meet: Meetings, window: Window) -> RankParts:
    """Take one window apart."""
    simulated = times.simulated
    low, high = (int(k) for k in times.program.kernel_ptr[window.rank: window.rank + 2])
    kernels, kind = np.arange(low, high), times.kinds[window.rank]
    device = kernels[kind != KernelKind.COLLECTIVE]
    collective = kernels[kind == KernelKind.COLLECTIVE]
    start, end = simulated.kernel_start, simulated.kernel_end
    busy = (start[device], end[device]) if len(device) else _host_busy(times, window.rank)
    ready, met = meet.ready[collective], meet.met[collective]
    paired = meet.point_to_point[collective]
    layers = [busy, (met, end[collective]), (ready[~paired], met[~paired]), (ready[paired], met[paired])]
    first, last = window.start_ns, max(window.end_ns, window.start_ns)
    clipped = [(np.clip(a, first, last), np.clip(b, first, last)) for a, b in layers]
    edges = np.unique(np.concatenate([[first, last], *(side for pair in clipped for side in pair)]))
    over = [_covered(edges, *pair) for pair in clipped]
    part = np.select(over, [np.int8(one) for one in list(RankPart)[:-1]], np.int8(RankPart.IDLE)).astype(np.int8)
    together = over[RankPart.BUSY] & (over[1] | over[2] | over[3])
    return RankParts(edges, part, int(np.diff(edges)[together].sum()))


def _covered(edges: Int64, start: Int64, end: Int64) -> np.ndarray:
    """Return whether at least one interval covers each piece between edges; all ends are edges."""
    change = np.zeros(len(edges), np.int64)
    np.add.at(change, np.searchsorted(edges, start), 1)
    np.add.at(change, np.searchsorted(edges, end), -1)
    return np.cumsum(change)[:-1] > 0


def _host_busy(times: JobTimes, rank: int) -> tuple[Int64, Int64]:
    """Return where a rank's host threads work: before each item, and in it unless it waits."""
    program, simulated = times.program, times.simulated
    items = np.flatnonzero(program.thread_rank[program.item_thread()] == rank)
    start, end = simulated.item_start[items], simulated.item_end[items]
    waits = simulated.item_end_cause[items] != EndCause.OWN_COST
    worked = np.where(waits, np.minimum(start + program.item_cost[items], end), end)
    return start - program.item_work[items], worked
