"""Batches fetched in the training process (``num_workers=0``): what another number of samples makes of that time.

::

    fetch      |lead| sample | sample | sample | collate, copy |
    other      |lead| sample | sample | sample | sample | sample | sample | collate, copy     |

Making samples, collating and copying them go with the samples, as they do in worker processes; a few microseconds of
the loader's own do not. One recorded fetch shows its length and, where samples call the same operations one after
another or are collated as a list, how much of it samples surely take. The rest may be a batch that lay ready (a slice
of a tensor, a buffer filled elsewhere): the interval holds a fetch in which that stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.repeat import Cycle
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_pieces import HostPieces, fetch_ranges
from tracer.arrays import Float64, Int64
from tracer.graph import ExecutionGraph, OpKind

FIXED_NS = 25_000.0
"""Time of a fetch without any sample. A ``DataLoader`` of a tensor's rows, timed at batches of 1 to 32, takes
26 + 1.3 µs a sample."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """Factors on the time each rank's own process takes to load its batches, and the ends of their 80% intervals.

    ``recorded_ns`` is what the slowest rank takes in a recorded step.
    """

    expected: Float64
    low: Float64
    high: Float64
    recorded_ns: float

    def on(self, pieces: HostPieces, factor: Float64) -> Float64:
        """Factor on each piece of host time."""
        return np.where(pieces.fetched, factor[np.minimum(pieces.rank, len(factor) - 1)], 1.0)

    def note(self) -> str:
        """Return what was assumed, in a sentence."""
        factor, low, high = (float(column.max()) for column in (self.expected, self.low, self.high))
        return (f"Batches are loaded in the training process, {self.recorded_ns / 1e6:,.3f} ms of the recorded step: "
                f"that is taken to be × {factor:.3g} for the new samples (80% between × {low:.3g} and × {high:.3g}).")


def fetched_ns(cycle: Cycle, pieces: HostPieces) -> Float64:
    """Time a step that each rank's own process takes to load its batches."""
    mine = pieces.fetched & cycle.working[pieces.item]
    return np.bincount(pieces.rank[mine], weights=pieces.ns[mine], minlength=len(cycle.row)) / cycle.steps


def fetching_of(built: Built, cycle: Cycle, pieces: HostPieces, ranks: Sequence[int], factor: float,
                batch: int | None = None, grown: float | None = None) -> Fetching | None:
    """Fetches of batches of ``factor`` times as many samples, from one capture; ``None`` where no rank fetches.

    Args:
        built, cycle, pieces: the recorded job, its steps and its host time.
        ranks: of each predicted rank the recorded one.
        factor: on the samples of a batch.
        batch: the recorded number of samples, where known.
        grown: factor on all sizes that change: samples of another length may take longer to load, or not.
    """
    grown = factor if grown is None else grown
    ns = fetched_ns(cycle, pieces)
    if not ns.any() or (factor == 1.0 and grown == 1.0):
        return None
    surely = np.array([_of_samples(built, cycle, rank, batch) for rank in ranks])
    own = np.array([_fetches(built, cycle, rank) for rank in ranks])
    fixed = np.minimum(own * FIXED_NS / np.maximum(ns[list(ranks)], 1.0), 1.0)
    least, expected = np.minimum(surely, 1.0 - fixed), 1.0 - fixed
    ends = [1.0 + least * (factor - 1.0), 1.0 + expected * (factor - 1.0), np.full(len(own), factor),
            np.full(len(own), grown)]
    return Fetching(ends[1], np.min(ends, axis=0), np.max(ends, axis=0), float(ns.max()))


def _fetches(built: Built, cycle: Cycle, rank: int) -> float:
    """Fetches in a step."""
    return len(_rows(built, cycle, rank)) / cycle.steps


def _rows(built: Built, cycle: Cycle, rank: int) -> Int64:
    graph = built.graphs[rank]
    rows = fetch_ranges(graph)
    return rows[np.isin(graph.ops.step[rows], cycle.row[rank])]


def _of_samples(built: Built, cycle: Cycle, rank: int, batch: int | None) -> float:
    """Share of a rank's fetching that samples surely take: up to where their list is collated, or as long as the same
    operation comes again and again, once or more a sample."""
    graph = built.graphs[rank]
    ops = graph.ops
    surely = whole = 0.0
    for row in _rows(built, cycle, rank).tolist():
        begin, length = int(ops.start_ns[row]), int(ops.duration_ns[row])
        mine = (ops.kind == OpKind.OPERATION) & (ops.thread == ops.thread[row])
        mine &= (ops.start_ns >= begin) & (ops.start_ns < begin + length)
        inside = np.flatnonzero(mine)
        surely += max(_repeated_ns(graph, inside, batch), _listed_ns(graph, inside, batch, begin))
        whole += length
    return min(surely / whole, 1.0) if whole else 0.0


def _repeated_ns(graph: ExecutionGraph, rows: Int64, batch: int | None) -> float:
    """Time in which an operation comes once or more for each sample, with one of its turns more."""
    longest = 0.0
    for name in np.unique(graph.ops.name[rows]).tolist():
        start = np.sort(graph.ops.start_ns[rows[graph.ops.name[rows] == name]])
        if _counts_samples(len(start), batch):
            longest = max(longest, float(start[-1] - start[0]) * len(start) / (len(start) - 1))
    return longest


def _listed_ns(graph: ExecutionGraph, rows: Int64, batch: int | None, begin: int) -> float:
    """Time until an operation takes a list of samples: they were made one by one."""
    until = begin
    for row in rows.tolist():
        lists = [one.shape for one in graph.arguments(row) if one.dtype.startswith("TensorList") or _nested(one.shape)]
        if any(_counts_samples(len(shape), batch) for shape in lists if shape):
            until = max(until, int(graph.ops.start_ns[row] + graph.ops.duration_ns[row]))
    return float(until - begin)


def _nested(shape: object) -> bool:
    return isinstance(shape, tuple | list) and bool(shape) and all(isinstance(one, tuple | list) for one in shape)


def _counts_samples(count: int, batch: int | None) -> bool:
    """Return whether so many of one kind are one or more for each sample."""
    return count > 1 and (batch is None or (batch > 1 and count % batch == 0))

