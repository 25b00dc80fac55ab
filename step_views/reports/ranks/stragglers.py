"""Stragglers: ranks that arrive last at collectives, their cost to others, the job's gain if one is like the median.

Ranks that arrive within ``TOGETHER_NS`` count as arriving together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

import numpy as np

from graph_predictor.recorded.module_paths import is_collective, with_backward_modules
from graph_predictor.simulation.engine import Path, path_back
from graph_predictor.simulation.program import Bound, Program
from kernel_models.spreads import USUAL_STEPS
from step_views.reports.ranks.times import JobTimes, Meetings, Window, scaled_rank
from tracer.arrays import Float64, Int64
from tracer.graph import NONE, KernelKind
from tracer.lazy import special

NOT_YET = "before its first recorded call"
"""Name for time at the path's begin, before the rank's recording began."""


@dataclass(frozen=True, slots=True)
class PathPart:
    """Time of one operation and bound within a stretch, ns."""

    operation: str
    bound: Bound
    time_ns: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of the path between two hand-overs.

    Attributes:
        rank: position of the rank in the job.
        start_ns, end_ns: from the path's begin.
        after: the collective at which this rank took over the path ("" for the first stretch or an unnamed collective).
        parts: the time by operation and bound, largest first; the parts add up to the stretch.
    """

    rank: int
    start_ns: int
    end_ns: int
    after: str
    parts: list[PathPart]

    @property
    def length_ns(self) -> int:
        """Return the time from begin to end, ns."""
        return self.end_ns - self.start_ns


def path_ranks(program: Program, path: Path, alone: int) -> Int64:
    """Return the rank of each segment of a path; ``alone`` if none is known."""
    rank = np.full(len(path.start_ns), alone, np.int64)
    on_kernel, on_item = path.kernel >= 0, (path.kernel < 0) & (path.item >= 0)
    rank[on_kernel] = program.kernel_rank()[path.kernel[on_kernel]]
    rank[on_item] = program.thread_rank[program.item_thread()[path.item[on_item]]]
    nowhere = ~on_kernel & ~on_item
    if nowhere.any() and not nowhere.all():
        # Before its first recorded call a rank had not arrived: the time belongs to the next segment's rank.
        rank[nowhere] = rank[np.flatnonzero(~nowhere)[0]]
    return rank


def job_path(times: JobTimes, windows: list[Window]) -> list[Stretch]:
    """Return the path of one step, from the begin to the end of its longest window, in order."""
    window = max(windows, key=lambda w: (w.length_ns, w.end_ns))
    if window.at is None or not window.length_ns:
        return []
    program = times.program
    path = path_back(program, times.simulated, times.kinds, window.at, window.start_ns, across=True)
    rank = path_ranks(program, path, window.rank)
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(rank)) + 1, [len(rank)]])
    names = times.names()
    found = names.along(path, times.simulated, times.item, times.kernel)
    stretch = np.searchsorted(cuts, found.segment, side="right") - 1
    none = (path.kernel < 0) & (path.item < 0)
    sums: list[dict[tuple[str, Bound], float]] = [{} for _ in cuts[1:]]
    for at, number, segment, ns in zip(*(column.tolist() for column in (
            stretch, found.name, found.segment, found.ns)), strict=True):
        name = NOT_YET if none[segment] else names.text(number)
        key = name, Bound(int(path.bound[segment]))
        sums[at][key] = sums[at].get(key, 0.0) + ns
    return [Stretch(int(rank[low]), int(path.start_ns[low]) - window.start_ns,
                    int(path.end_ns[high - 1]) - window.start_ns,
                    collective_name(times, int(path.kernel[low])) if low else "", _parts(of))
            for (low, high), of in zip(pairwise(cuts.tolist()), sums, strict=True)]


def _parts(sums: dict[tuple[str, Bound], float]) -> list[PathPart]:
    """Return a stretch's parts in whole ns that add up to it, largest first."""
    reached = np.rint(np.cumsum(list(sums.values()))).astype(np.int64)
    whole = zip(sums, np.diff(reached, prepend=0).tolist(), strict=True)
    return [PathPart(*key, ns) for key, ns in sorted(whole, key=lambda one: (-one[1], one[0])) if ns]


def collective_name(times: JobTimes, kernel: int) -> str:
    """Return the kind and group of a collective kernel; "" for another kernel or -1."""
    if kernel < 0:
        return ""
    rank = int(times.program.kernel_rank()[kernel])
    row = int(times.graph_row(np.array([kernel]))[0])
    graph = times.graphs[rank]
    if graph.kernels.kind[row] != KernelKind.COLLECTIVE:
        return ""
    entry = np.flatnonzero(graph.collectives.kernel == row)
    if not len(entry):
        return graph.string(int(graph.kernels.name[row]))
    table = graph.collectives
    group = graph.string(int(table.group[entry[0]]))
    return graph.string(int(table.kind[entry[0]])) + (f" ({group})" if group else "")


TOGETHER_NS = 1_000
"""Ranks whose arrivals differ by at most this count as simultaneous: clocks of one host are no more exact."""
MOST_TRIED = 8
"""Most ranks that are simulated again with the median rank's work."""
LEVEL = 0.005
"""Chance that a rank is named in a job whose ranks do equal work, if steps are log-normal. If every seventh step of a
rank stalls for as long as a step, the chance is 1 to 5% (2 and 8 ranks, 3 and 6 steps)."""
PRIOR_STEPS = 2  # chosen: steps that the usual spread is worth
ABOVE_MEDIAN = 1.001
"""Ranks with at most this multiple of the median's work are not simulated again: the gain would be too small."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """One rank's arrivals at the collectives in which all recorded members took part.

    Attributes:
        met: number of these collectives.
        last: number at which the rank arrived last.
        held_ns: sum, over these, of the time from the last but one arrival to the rank's own.
        others_waited_ns: sum of the other members' waiting for it.
    """

    met: int
    last: int
    held_ns: int
    others_waited_ns: int


def arrivals(times: JobTimes, meet: Meetings) -> list[Arrivals]:
    """Return every rank's arrivals, summed over all windows."""
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
    """Return, for the ``MOST_TRIED`` ranks that delay most, the job's step (ns) with the median rank's work there.

    Device work and host time are each scaled as a whole. A rank with no more work than the median is left out. For an
    even number of ranks the lower median counts, so of two ranks the slower becomes like the other.
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
    """Return each rank's device work without collectives, and host time without waiting, over all windows, ns."""
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


@dataclass(frozen=True, slots=True)
class Late:
    """A rank that computes longer than the median rank, by more than its steps vary.

    Attributes:
        rank: position in the job.
        more_ns: its additional time a step.
        operations: operations with their modules and additional ns a step, the largest first; only those whose
            difference is more than the variation of their own steps.
        steps: number of steps that show it.
    """

    rank: int
    more_ns: float
    operations: list[tuple[str, float]]
    steps: int


def late_rank(times: JobTimes, found: list[Arrivals]) -> Late | None:
    """Return the rank that others waited for longest and that does compute longer; ``None`` if there is none.

    Compared is device work, or host work if there is no device work except collectives, with the lower median rank.
    """
    tables = [_by_operation(times, rank) for rank in range(times.program.ranks)]
    own = np.stack([np.sum(list(table.values()), axis=0) if table else np.zeros(len(times.windows))
                    for table in tables])
    waited = [one.others_waited_ns for one in found]
    for rank in sorted(range(len(found)), key=lambda rank: -waited[rank]):
        if waited[rank] and _later(own, rank, noisy=not times.predicted):
            break
    else:
        return None
    more: list[tuple[str, float]] = []
    nothing = np.zeros(len(times.windows))
    for name in tables[rank]:
        of_ranks = np.stack([table.get(name, nothing) for table in tables])
        if _later(of_ranks, rank, noisy=not times.predicted):
            more.append((name, _above_median(of_ranks, rank)))
    return Late(rank, _above_median(own, rank), sorted(more, key=lambda one: -one[1]), own.shape[1] * times.steps)


def _later(work: Float64, rank: int, *, noisy: bool) -> bool:
    """Return whether a rank's ``work`` [ranks, steps] exceeds the median rank's by more than steps vary.

    One-sided t-test of the logarithms of the steps' ratios, at ``LEVEL`` for all ranks together. The usual variation of
    steps counts as ``PRIOR_STEPS`` steps. A prediction has no noise.
    """
    typical = _median_low(work)
    if not (work[rank] > typical).any() or not noisy:
        return bool(work[rank].sum() > ABOVE_MEDIAN * typical.sum())
    counted = (work[rank] > 0) | (typical > 0)  # a step without work is ignored
    ratio = np.log(np.maximum(work[rank, counted], 1.0) / np.maximum(typical[counted], 1.0))
    steps = len(ratio)
    freedom = PRIOR_STEPS + steps - 1
    usual = 2.0 * USUAL_STEPS**2  # for the ratio of two ranks
    variance = (PRIOR_STEPS * usual + float(((ratio - ratio.mean()) ** 2).sum())) / freedom
    least = float(special.stdtrit(freedom, 1.0 - LEVEL / len(work))) * float(np.sqrt(variance / steps))
    return float(ratio.mean()) > least


def _above_median(work: Float64, rank: int) -> float:
    """Return by how many ns a rank exceeds the median rank: the median over steps of ``work`` [ranks, steps]."""
    return float(np.median(work[rank] - _median_low(work)))


def _median_low(work: Float64) -> Float64:
    """Return the lower median over the ranks, [steps]."""
    return np.asarray(np.sort(work, axis=0)[(len(work) - 1) // 2])


def _by_operation(times: JobTimes, rank: int) -> dict[str, Float64]:
    """Return a rank's computing time by operation and module, without collectives, ns a step [windows]."""
    graph = with_backward_modules(times.graphs[rank])
    names, modules = (np.append(column, NONE) for column in (graph.ops.name, graph.ops.module))
    if (graph.kernels.kind != KernelKind.COLLECTIVE).any():
        own = [each.kernels for step in times.windows for each in step if each.rank == rank]
        kernels = np.concatenate([np.zeros(0, np.int64), *own])
        rows = times.graph_row(kernels)
        ns, op = times.program.kernel_duration[kernels], graph.kernels.op[rows].astype(np.int64)
        window = np.repeat(np.arange(len(own)), [len(each) for each in own])
        # A kernel without an operation is listed by its own name.
        name = np.where(op >= 0, names[op], graph.kernels.name[rows])
        kept = graph.kernels.kind[rows] != KernelKind.COLLECTIVE
    else:
        rows = times.slices.of_rank(rank)
        op, ns = times.slices.op[rows].astype(np.int64), times.host_ns[rows]
        window = _windows_of_items(times, rank)[times.slices.item[rows]]
        name, kept = names[op], (op >= 0) & (window >= 0)
    op, ns, window, name = op[kept], ns[kept], window[kept], name[kept]
    keys, place = np.unique(np.stack([name, np.where(op >= 0, modules[op], NONE)]), axis=1, return_inverse=True)
    count = len(times.windows)
    sums = np.bincount(place.reshape(-1) * count + window, weights=ns, minlength=keys.shape[1] * count)
    found: dict[str, Float64] = {}
    for (code, path), sum_of in zip(keys.T.tolist(), sums.reshape(-1, count) / times.steps, strict=True):
        text, where = graph.string(code), graph.string(path)
        if not is_collective(text):
            found[text + (f" in {where}" if where else "")] = sum_of
    return found


def _windows_of_items(times: JobTimes, rank: int) -> Int64:
    """Return the window of each item of the built program, by its last simulated copy; -1 for none or other ranks."""
    program, simulated = times.program, times.simulated
    found = np.full(len(times.built.program.item_kind), -1, np.int64)
    mine = np.flatnonzero(program.thread_rank[program.item_thread()] == rank)
    end = simulated.item_end[mine]
    for number, step in enumerate(times.windows):
        for window in step:
            if window.rank == rank:
                inside = (end > window.start_ns) & (end <= window.end_ns)
                found[times.item[mine[inside]]] = number
    return found


def _runs(values: Int64) -> list[tuple[int, int]]:
    """Return begin and end of each run of equal values."""
    if not len(values):
        return []
    cuts = np.flatnonzero(np.diff(values)) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(values)], strict=True))
