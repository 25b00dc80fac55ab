"""The path across ranks: at each collective it goes on with the rank that arrived last.

::

    rank 0   ####------==####         rank 0's own work, then it waits
    rank 1   ##########==##--         path: rank 1 up to the collective, rank 0 from there on
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from graph_predictor.reports.operation_sums import OUTSIDE
from graph_predictor.reports.ranks.times import JobTimes, Window
from graph_predictor.simulation.critical_path import Bound, path_back
from tracer.arrays import Int64
from tracer.graph import ExecutionGraph, KernelKind

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
    spent = _Spent(times, np.unique(times.item[path.item[on_item]]))
    cuts = [0, *(np.flatnonzero(np.diff(rank)) + 1).tolist(), len(rank)]
    found = []
    for low, high in pairwise(cuts):
        sums: dict[tuple[str, Bound], int] = {}
        for row in range(low, high):
            length = int(path.end_ns[row] - path.start_ns[row])
            for name, ns in spent.split(int(path.kernel[row]), int(path.item[row]), length):
                key = name, Bound(int(path.bound[row]))
                sums[key] = sums.get(key, 0) + ns
        parts = [PathPart(*key, ns) for key, ns in sorted(sums.items(), key=lambda one: (-one[1], one[0]))]
        after = collective_name(times, int(path.kernel[low])) if low else ""
        found.append(Stretch(int(rank[low]), int(path.start_ns[low]) - window.start_ns,
                             int(path.end_ns[high - 1]) - window.start_ns, after, parts))
    return found


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


class _Spent:
    """Time of kernels and host items by the operation it was spent in."""

    def __init__(self, times: JobTimes, items: Int64) -> None:
        self.times = times
        pieces = times.pieces
        rows = np.flatnonzero(np.isin(pieces.item, items) & (pieces.ns > 0))
        self.of_item: dict[int, dict[str, int]] = {}
        for item, rank, op, ns in zip(*(column[rows].tolist() for column in (
                pieces.item, pieces.rank, pieces.op, pieces.ns)), strict=True):
            graph = times.graphs[rank]
            name = graph.string(int(graph.ops.name[op])) if op >= 0 else OUTSIDE
            sums = self.of_item.setdefault(item, {})
            sums[name] = sums.get(name, 0) + ns

    def split(self, kernel: int, item: int, length: int) -> list[tuple[str, int]]:
        """Split a time over the operation that launched a kernel (or the kernel), or those an item's host time is."""
        times = self.times
        if kernel >= 0:
            rank = int(times.program.kernel_rank()[kernel])
            graph: ExecutionGraph = times.graphs[rank]
            row = int(times.kernel[kernel] - times.built.program.kernel_ptr[rank])
            op = int(graph.kernels.op[row])
            return [(graph.string(int(graph.ops.name[op] if op >= 0 else graph.kernels.name[row])), length)]
        if item < 0:
            return [(NOT_YET, length)]
        sums = self.of_item.get(int(times.item[item]), {OUTSIDE: 1})
        reached = np.rint(np.cumsum(list(sums.values())) / sum(sums.values()) * length).astype(np.int64)
        return list(zip(sums, np.diff(reached, prepend=0).tolist(), strict=True))
