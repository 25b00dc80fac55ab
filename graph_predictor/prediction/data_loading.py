"""Batches: how long they take to load, in worker processes or in the training process, and how that limits a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.repeat import Cycle
from graph_predictor.prediction.step_spread import mean_spread, unprofiled_stretches
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_slices import HostSlices, fetch_ranges
from graph_predictor.simulation.program import ItemKind
from tracer.arrays import Float64, Int64
from tracer.graph import ExecutionGraph, OpKind
from tracer.step_work import WORKERS

FIXED_NS = 25_000.0
"""Time of a fetch of no samples, ns. A ``DataLoader`` of a tensor's rows, timed at batches of 1 to 32, takes
26 + 1.3 µs a sample."""


@dataclass(frozen=True, slots=True)
class DataLoading:
    """Factors on the time in which each rank's own process loads its batches, and the ends of their 80% intervals.

    ::

        fetch      |lead| sample | sample | sample | collate, copy |
        other      |lead| sample | sample | sample | sample | sample | sample | collate, copy     |

    The time to make, collate and copy samples is proportional to their number, as in worker processes. A few
    microseconds of the loader itself are not. A recorded fetch shows its length. If samples call the same operations
    one after another or are collated as a list, it also shows a part that samples surely take. The rest may be a batch
    that lay ready (a slice of a tensor, a filled buffer): the interval includes a fetch in which that part stays.

    ``recorded_ns`` is the loading time of the slowest rank in a recorded step.
    """

    expected: Float64
    low: Float64
    high: Float64
    recorded_ns: float

    def on(self, slices: HostSlices, factor: Float64) -> Float64:
        """Return the factor on each slice of host time."""
        return np.where(slices.fetched, factor[np.minimum(slices.rank, len(factor) - 1)], 1.0)

    def note(self) -> str:
        """Return the assumption as a sentence."""
        factor, low, high = (float(column.max()) for column in (self.expected, self.low, self.high))
        return (f"Batches are loaded in the training process, {self.recorded_ns / 1e6:,.3f} ms of the recorded step: "
                f"that is taken to be × {factor:.3g} for the new samples (80% between × {low:.3g} and × {high:.3g}).")


def data_loading_ns(cycle: Cycle, slices: HostSlices) -> Float64:
    """Return the time that each rank's own process takes to load its batches, ns a step."""
    mine = slices.fetched & cycle.working[slices.item]
    return np.bincount(slices.rank[mine], weights=slices.ns[mine], minlength=len(cycle.row)) / cycle.steps


def data_loading_of(built: Built, cycle: Cycle, slices: HostSlices, ranks: Sequence[int], factor: float,
                batch: int | None = None, grown: float | None = None) -> DataLoading | None:
    """Predict the loading time of batches of ``factor`` times the samples, from one capture; ``None`` if no rank loads.

    Args:
        built, cycle, slices: the recorded job, its steps and its host time.
        ranks: for each predicted rank, the recorded one.
        factor: factor on the number of samples of a batch.
        batch: the recorded number of samples, if known.
        grown: factor on all sizes that change: longer samples may take longer to load, or not.
    """
    grown = factor if grown is None else grown
    ns = data_loading_ns(cycle, slices)
    if not ns.any() or (factor == 1.0 and grown == 1.0):
        return None
    surely = np.array([_of_samples(built, cycle, rank, batch) for rank in ranks])
    own = np.array([len(_rows(built, cycle, rank)) / cycle.steps for rank in ranks])
    fixed = np.minimum(own * FIXED_NS / np.maximum(ns[list(ranks)], 1.0), 1.0)
    least, expected = np.minimum(surely, 1.0 - fixed), 1.0 - fixed
    ends = [1.0 + least * (factor - 1.0), 1.0 + expected * (factor - 1.0), np.full(len(own), factor),
            np.full(len(own), grown)]
    return DataLoading(ends[1], np.min(ends, axis=0), np.max(ends, axis=0), float(ns.max()))


def _rows(built: Built, cycle: Cycle, rank: int) -> Int64:
    graph = built.graphs[rank]
    rows = fetch_ranges(graph)
    return rows[np.isin(graph.ops.step[rows], cycle.row[rank])]


def _of_samples(built: Built, cycle: Cycle, rank: int, batch: int | None) -> float:
    """Return the least share (0 to 1) of a rank's fetching that samples take. Samples take the longer of two times:
    until a list of samples is collated, and the span of an operation that repeats for each sample."""
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
    """Return the longest time, ns, in which one operation repeats for each sample, its last repetition included."""
    longest = 0.0
    for name in np.unique(graph.ops.name[rows]).tolist():
        start = np.sort(graph.ops.start_ns[rows[graph.ops.name[rows] == name]])
        if _counts_samples(len(start), batch):
            longest = max(longest, float(start[-1] - start[0]) * len(start) / (len(start) - 1))
    return longest


def _listed_ns(graph: ExecutionGraph, rows: Int64, batch: int | None, begin: int) -> float:
    """Return the time, ns, from ``begin`` to the end of the last operation on a list of samples; 0 if there is none."""
    until = begin
    for row in rows.tolist():
        lists = [one.shape for one in graph.arguments(row) if one.dtype.startswith("TensorList") or _nested(one.shape)]
        if any(_counts_samples(len(shape), batch) for shape in lists if shape):
            until = max(until, int(graph.ops.start_ns[row] + graph.ops.duration_ns[row]))
    return float(until - begin)


def _nested(shape: object) -> bool:
    return isinstance(shape, tuple | list) and bool(shape) and all(isinstance(one, tuple | list) for one in shape)


def _counts_samples(count: int, batch: int | None) -> bool:
    """Return whether ``count`` repetitions may be one or more for each sample."""
    return count > 1 and (batch is None or (batch > 1 and count % batch == 0))


MOSTLY = 0.5
"""Least share of steps with a wait for the batch at which the loader counts as the cause, rather than single stalls."""
LEAST_WAIT = 0.2
"""Least wait for a batch, as a share of the step, that shows how long batches take to make. A shorter wait may be the
cost of taking a ready batch from the queue: mapping shared memory, rebuilding tensors, sharing a core with the worker.
A worker that made a batch in 2.5 ms was waited for 1.9 ms in steps of 20.6 ms."""
DECIDES = 0.98
"""Least time between two batches, as a share of the step, at which reports state that the loader decides the step."""
UPPER = 0.9
"""Quantile of an 80% interval's upper end."""


@dataclass(frozen=True, slots=True)
class Loader:
    """The data-loader worker processes of a job, by rank, ns.

    ::

        workers    |== batch 1 ==|== batch 2 ==|== batch 3 ==|        one batch every interval
        trainer    |= step =|wait|= step =|wait|= step =|wait|        the step is the longer of the two

    A recording shows when batches arrived, not how long they took. So a wait for a batch is never a duration, and a
    batch's arrival is no event of an edited step. Workers make one batch an interval, and a step is at least that long.
    If the trainer waited for much of the step, the interval equals the recorded step. If it waited little or not at
    all, the interval is unknown: every value up to the recorded step counts as equally likely.

    Attributes:
        interval_ns: expected time between two batches; 0 if batches were ready.
        at_most_ns: longest possible time between two batches; 0 for ranks without workers.
        spread: log half width of the 80% interval of ``interval_ns``, if the trainer waited.
    """

    interval_ns: Float64
    at_most_ns: Float64
    spread: float

    def scaled(self, factor: float) -> Loader:
        """Return a loader whose batches have ``factor`` times the samples, at the same time for each sample."""
        return replace(self, interval_ns=self.interval_ns * factor, at_most_ns=self.at_most_ns * factor)

    def of_ranks(self, ranks: int) -> Loader:
        """Return the loader for another number of ranks: further ranks take the last rank's times."""
        row = np.minimum(np.arange(ranks), len(self.interval_ns) - 1)
        return replace(self, interval_ns=self.interval_ns[row], at_most_ns=self.at_most_ns[row])

    def step_at_least(self) -> tuple[float, float]:
        """Return the 80% interval of the shortest step that the slowest rank's workers allow, ns. The lower end is 0
        where the recording does not show a limit."""
        slowest = float(self.interval_ns.max(initial=0.0))
        ready = float(self.at_most_ns[self.interval_ns == 0].max(initial=0.0))
        return slowest * float(np.exp(-self.spread)), max(slowest * float(np.exp(self.spread)), UPPER * ready)

    def note(self, step_ns: float) -> str:
        """Return a sentence on whether the loader limits a step of this length."""
        slowest, most = float(self.interval_ns.max(initial=0.0)), float(self.at_most_ns.max(initial=0.0))
        if not slowest:
            return (f"The loader's workers kept up with steps of {most / 1e6:,.3f} ms; whether they keep up "
                    "with shorter ones was not recorded, and the interval allows for it.")
        low, high = (end / 1e6 for end in self.step_at_least())
        decides = "which decides the step" if slowest >= step_ns * DECIDES else "and the step takes longer"
        return (f"The loader's workers make a batch every {slowest / 1e6:,.3f} ms (80% between {low:,.3f} and "
                f"{high:,.3f}), {decides}; changes of the training process leave that as it is.")


def loader_of(built: Built, cycle: Cycle) -> Loader | None:
    """Return the worker processes of a recorded job; ``None`` where no rank takes batches from workers."""
    ranks = range(len(built.graphs))
    uses = [any(WORKERS in text for text in graph.strings) for graph in built.graphs]
    if not any(uses):
        return None
    steps = np.array([_step_ns(built, cycle, rank) for rank in ranks])
    waited = np.array([waits_for_workers(built, cycle, rank) for rank in ranks])
    times = unprofiled_stretches(built) if not built.profiled else cycle.recorded_ns(0).astype(np.float64)
    return Loader(np.where(waited, steps, 0.0), np.where(uses, steps, 0.0), mean_spread(times))


def waits_for_workers(built: Built, cycle: Cycle, rank: int) -> bool:
    """Return whether most of a rank's repeated steps waited for their batch."""
    program = built.recorded_program
    rows = np.flatnonzero(cycle.item & (program.item_kind == ItemKind.DATA_READY)
                          & (program.thread_rank[program.item_thread()] == rank))
    waited = program.recorded_item_start[rows] - program.recorded_item_end[rows - 1] - program.item_work[rows]
    step = float(cycle.recorded_ns(rank).mean())
    return int((waited > LEAST_WAIT * step).sum()) > MOSTLY * cycle.steps


def _step_ns(built: Built, cycle: Cycle, rank: int) -> float:
    """Return the length of a rank's step, ns: the median without the profiler if the job excludes it, else the mean."""
    timed = built.graphs[rank].meta.unprofiled_step_ns
    if timed and not built.profiled:
        return float(np.median(timed))
    return float(cycle.recorded_ns(rank).mean())
