"""Batches made by a data loader's worker processes: how often one comes, and what that leaves of an edited step.

::

    workers    |== batch 1 ==|== batch 2 ==|== batch 3 ==|        one batch every interval
    trainer    |= step =|wait|= step =|wait|= step =|wait|        the step is the longer of the two

A recording shows when batches came, not what they cost: waiting for one is never a duration, and its arrival is no
event of an edited step. Workers are producers with an interval of their own, and no step can be shorter than that.
Where the trainer waited for much of the step, the interval is what a step took. Where it waited little or not at all,
the interval was shorter by an unknown amount: anything up to the step is then taken to be equally likely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.host_spread import mean_spread, unprofiled_stretches
from graph_predictor.prediction.repeat import Cycle
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_slices import WORKERS
from graph_predictor.simulation.program import ItemKind
from tracer.arrays import Float64
from tracer.graph import ExecutionGraph

MOSTLY = 0.5
"""Share of steps waiting for their batch from which on the loader is the reason rather than a stall."""
LEAST_WAIT = 0.2
"""Share of a step: less waiting for a batch than that may as well be taking a ready one from its queue (shared memory
is mapped, tensors are rebuilt, the worker wants the trainer's core), and says nothing of how long batches take to make.
A worker that made one in 2.5 ms was waited for 1.9 ms in steps of 20.6 ms."""
DECIDES = 0.98
"""Share of a step from which on the time between two batches is said to decide it."""
UPPER = 0.9
"""Quantile of an 80% interval's upper end."""


@dataclass(frozen=True, slots=True)
class Loader:
    """A job's worker processes, by rank, ns.

    Attributes:
        interval_ns: expected time between two batches; 0 where batches were ready.
        at_most_ns: longest time there can be between two; 0 where no batch is made by workers.
        spread: log half width of the interval's 80% interval, where the trainer waited.
    """

    interval_ns: Float64
    at_most_ns: Float64
    spread: float

    def scaled(self, factor: float) -> Loader:
        """Return a loader whose batches have ``factor`` times as many samples, each of which takes as long to make."""
        return replace(self, interval_ns=self.interval_ns * factor, at_most_ns=self.at_most_ns * factor)

    def of_ranks(self, ranks: int) -> Loader:
        """For another number of ranks: the last one stands for those beyond."""
        row = np.minimum(np.arange(ranks), len(self.interval_ns) - 1)
        return replace(self, interval_ns=self.interval_ns[row], at_most_ns=self.at_most_ns[row])

    def step_at_least(self) -> tuple[float, float]:
        """80% interval of the shortest step that the slowest rank's workers allow, ns; the lower end is 0 where nothing
        shows one."""
        slowest = float(self.interval_ns.max(initial=0.0))
        ready = float(self.at_most_ns[self.interval_ns == 0].max(initial=0.0))
        return slowest * float(np.exp(-self.spread)), max(slowest * float(np.exp(self.spread)), UPPER * ready)

    def note(self, step_ns: float) -> str:
        """Return what the loader does in a step of this length, in a sentence."""
        slowest, most = float(self.interval_ns.max(initial=0.0)), float(self.at_most_ns.max(initial=0.0))
        if not slowest:
            return (f"The loader's workers kept up with steps of {most / 1e6:,.3f} ms; whether they keep up "
                    "with shorter ones was not recorded, and the interval allows for it.")
        low, high = (end / 1e6 for end in self.step_at_least())
        decides = "which decides the step" if slowest >= step_ns * DECIDES else "and the step takes longer"
        return (f"The loader's workers make a batch every {slowest / 1e6:,.3f} ms (80% between {low:,.3f} and "
                f"{high:,.3f}), {decides}; changes of the training process leave that as it is.")


def loader_of(built: Built, cycle: Cycle) -> Loader | None:
    """The worker processes of a recorded job; ``None`` where no rank takes batches from any."""
    ranks = range(len(built.graphs))
    uses = [takes_from_workers(graph) for graph in built.graphs]
    if not any(uses):
        return None
    steps = np.array([_step_ns(built, cycle, rank) for rank in ranks])
    waited = np.array([waits_for_workers(built, cycle, rank) for rank in ranks])
    times = unprofiled_stretches(built) if not built.profiled else cycle.recorded_ns(0).astype(np.float64)
    return Loader(np.where(waited, steps, 0.0), np.where(uses, steps, 0.0), mean_spread(times))


def takes_from_workers(graph: ExecutionGraph) -> bool:
    """Return whether a rank's batches are made by worker processes."""
    return any(WORKERS in text for text in graph.strings)


def waits_for_workers(built: Built, cycle: Cycle, rank: int) -> bool:
    """Return whether most of a rank's repeated steps waited for their batch."""
    program = built.recorded_program
    rows = np.flatnonzero(cycle.item & (program.item_kind == ItemKind.DATA_READY)
                          & (program.thread_rank[program.item_thread()] == rank))
    waited = program.recorded_item_start[rows] - program.recorded_item_end[rows - 1] - program.item_work[rows]
    step = float(cycle.recorded_ns(rank).mean())
    return int((waited > LEAST_WAIT * step).sum()) > MOSTLY * cycle.steps


def _step_ns(built: Built, cycle: Cycle, rank: int) -> float:
    """A rank's step on the job's clock."""
    timed = built.graphs[rank].meta.unprofiled_step_ns
    if timed and not built.profiled:
        return float(np.median(timed))
    return float(cycle.recorded_ns(rank).mean())
