"""Who arrives last at the collectives, what that costs the others, and what the job gains if a rank is like the median.

Ranks count as arriving together where they are apart by no more than ``TOGETHER_NS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low

import numpy as np

from graph_predictor.diff.names import is_collective
from graph_predictor.module_paths import with_backward_modules
from graph_predictor.program import Int64
from graph_predictor.rank_report.parts import Meetings
from graph_predictor.rank_report.times import JobTimes, scaled_rank
from tracer.graph import KernelKind

TOGETHER_NS = 1_000
"""Clocks of one host agree no better."""
MOST_TRIED = 8
"""Ranks that are simulated again as the median rank."""
ABOVE_MEDIAN = 1.001
"""A rank with no more work than this much of the median's would gain nothing that is worth a simulation."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """One rank at the collectives that all recorded members took part in.

    Attributes:
        met: how many of them.
        last: at how many it arrived last.
        held_ns: how much later than the last but one it then came, all of them together.
        others_waited_ns: what all other members together waited then.
    """

    met: int
    last: int
    held_ns: int
    others_waited_ns: int


def arrivals(times: JobTimes, meet: Meetings) -> list[Arrivals]:
    """Of every rank, over all windows."""
    program = times.program
    ranks = program.ranks
    met, last, held, waited = (np.zeros(ranks, np.int64) for _ in range(4))
    chosen = np.concatenate([w.kernels for step in times.windows for w in step] or [np.zeros(0, np.int64)])
    chosen = chosen[program.kernel_group[chosen] >= 0]
    group = program.kernel_group[chosen]
    whole = np.bincount(group, minlength=len(program.group_size)) == program.group_size
    chosen = chosen[whole[group]] if len(whole) else chosen
    order = chosen[np.lexsort((meet.ready[chosen], program.kernel_group[chosen]))]
    group, at, rank = program.kernel_group[order], meet.ready[order], program.kernel_rank()[order]
    np.add.at(met, rank, 1)
    for low, high in _runs(group):
        if high - low < 2 or at[high - 1] - at[low] <= TOGETHER_NS:
            continue
        late = rank[high - 1]
        last[late] += 1
        held[late] += at[high - 1] - at[high - 2]
        waited[late] += int((at[high - 1] - at[low:high]).sum())
    return [Arrivals(*values) for values in zip(*(c.tolist() for c in (met, last, held, waited)), strict=True)]


def like_the_median(times: JobTimes, found: list[Arrivals]) -> dict[int, float]:
    """The job's step time (ns) if a rank had the median rank's device work and host time, for ranks that hold others.

    Both are scaled as a whole; a rank that does no more than the median is left out. Of an even number of ranks the
    lower median is taken, so that of two ranks the slower is made like the other.
    """
    device, host = _own_work(times)
    typical = median_low(device), median_low(host)
    tried = sorted((rank for rank, one in enumerate(found) if one.last), key=lambda rank: -found[rank].held_ns)
    gained: dict[int, float] = {}
    for rank in tried[:MOST_TRIED]:
        factors = [usual / own if own > ABOVE_MEDIAN * usual else 1.0
                   for own, usual in zip((device[rank], host[rank]), typical, strict=True)]
        if min(factors) < 1.0:
            gained[rank] = times.again(scaled_rank(times, rank, *factors))
    return gained


def _own_work(times: JobTimes) -> tuple[list[int], list[int]]:
    """Device work but collectives, and host time without waiting, of every rank over all windows, ns."""
    program, simulated = times.program, times.simulated
    device, host = [0] * program.ranks, [0] * program.ranks
    rank_of_item = program.thread_rank[program.item_thread()]
    for step in times.windows:
        for window in step:
            low = int(program.kernel_ptr[window.rank])
            own = window.kernels[times.kinds[window.rank][window.kernels - low] != KernelKind.COLLECTIVE]
            device[window.rank] += int(program.kernel_duration[own].sum())
            inside = (simulated.item_end > window.start_ns) & (simulated.item_end <= window.end_ns)
            inside &= rank_of_item == window.rank
            host[window.rank] += int((program.item_work[inside] + program.item_cost[inside]).sum())
    return device, host


def more_work(times: JobTimes, rank: int) -> list[tuple[str, float]]:
    """What a rank computes longer than the (lower) median rank: operation with its module, and ns a step.

    Device work counts, or the host's where there is none but collectives; the largest first.
    """
    tables = [_by_operation(times, each) for each in range(times.program.ranks)]
    more = [(name, ns - median_low([table.get(name, 0.0) for table in tables])) for name, ns in tables[rank].items()]
    return sorted(((name, ns) for name, ns in more if ns > 0), key=lambda one: -one[1])


def _by_operation(times: JobTimes, rank: int) -> dict[str, float]:
    """Computing time of each operation of a rank, ns a recorded step."""
    graph = with_backward_modules(times.graphs[rank])
    device = np.flatnonzero(graph.kernels.kind != KernelKind.COLLECTIVE)
    if len(device):
        low = int(times.built.program.kernel_ptr[rank])
        op, ns = graph.kernels.op[device].astype(np.int64), times.built.program.kernel_duration[low + device]
    else:
        rows = times.pieces.of_rank(rank)
        op, ns = times.pieces.op[rows], times.pieces.ns[rows]
    found: dict[str, float] = {}
    steps = max(len(graph.steps), 1)
    for row, time in zip(op.tolist(), ns.tolist(), strict=True):
        if row >= 0 and not is_collective(graph.string(int(graph.ops.name[row]))):
            module = graph.string(int(graph.ops.module[row]))
            name = graph.string(int(graph.ops.name[row])) + (f" in {module}" if module else "")
            found[name] = found.get(name, 0.0) + time / steps
    return found


def _runs(values: Int64) -> list[tuple[int, int]]:
    """Begin and end of each run of equal values."""
    if not len(values):
        return []
    cuts = np.flatnonzero(np.diff(values)) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(values)], strict=True))
