"""The path across ranks: at each collective it goes on with the rank that arrived last.

::

    rank 0   ####------==####         rank 0's own work, then it waits
    rank 1   ##########==##--         path: rank 1 up to the collective, rank 0 from there on
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from graph_predictor.reports.ranks.times import JobTimes, Window
from graph_predictor.simulation.critical_path import Bound, path_back
from tracer.graph import KernelKind

NOT_YET = "before its first recorded call"
"""Name of time at the path's begin in which the rank's recording had not begun."""


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
        rank: position of the rank.
        start_ns, end_ns: from the path's begin.
        after: the collective at which the rank took the path over ("" for the first stretch, or where it has no name).
        parts: what the time consists of, the largest first; they add up to the stretch.
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


def job_path(times: JobTimes, windows: list[Window]) -> list[Stretch]:
    """The path of one step, back from the end of its longest window to that window's begin; in time order."""
    window = max(windows, key=lambda w: (w.length_ns, w.end_ns))
    if window.at is None or not window.length_ns:
        return []
    program = times.program
    path = path_back(program, times.simulated, times.kinds, window.at, window.start_ns, across=True)
    rank = np.full(len(path.start_ns), window.rank, np.int64)
    on_kernel, on_item = path.kernel >= 0, (path.kernel < 0) & (path.item >= 0)
    rank[on_kernel] = program.kernel_rank()[path.kernel[on_kernel]]
    rank[on_item] = program.thread_rank[program.item_thread()[path.item[on_item]]]
    nowhere = ~on_kernel & ~on_item
    if nowhere.any() and not nowhere.all():
        # Before its first recorded call a rank was not there yet: it is the next segment's that came late.
        rank[nowhere] = rank[np.flatnonzero(~nowhere)[0]]
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(rank)) + 1, [len(rank)]])
    found = times.names.along(path, times.simulated, times.item, times.kernel)
    stretch = np.searchsorted(cuts, found.segment, side="right") - 1
    none = (path.kernel < 0) & (path.item < 0)
    sums: list[dict[tuple[str, Bound], float]] = [{} for _ in cuts[1:]]
    for at, number, segment, ns in zip(*(column.tolist() for column in (
            stretch, found.name, found.segment, found.ns)), strict=True):
        name = NOT_YET if none[segment] else times.names.text(number)
        key = name, Bound(int(path.bound[segment]))
        sums[at][key] = sums[at].get(key, 0.0) + ns
    return [Stretch(int(rank[low]), int(path.start_ns[low]) - window.start_ns,
                    int(path.end_ns[high - 1]) - window.start_ns,
                    collective_name(times, int(path.kernel[low])) if low else "", _parts(of))
            for (low, high), of in zip(pairwise(cuts.tolist()), sums, strict=True)]


def _parts(sums: dict[tuple[str, Bound], float]) -> list[PathPart]:
    """Parts of a stretch in whole ns that add up to it, the largest first."""
    reached = np.rint(np.cumsum(list(sums.values()))).astype(np.int64)
    whole = zip(sums, np.diff(reached, prepend=0).tolist(), strict=True)
    return [PathPart(*key, ns) for key, ns in sorted(whole, key=lambda one: (-one[1], one[0])) if ns]


def collective_name(times: JobTimes, kernel: int) -> str:
    """Kind and group of a collective kernel of the program; "" for other kernels and none."""
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
