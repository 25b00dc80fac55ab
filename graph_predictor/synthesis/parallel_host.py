"""Processes that share a host's cores: what ranks on CPUs cost each other, and their collectives them.

::

    two ranks on two cores     main 0  |= backward =|=== gloo ===|= backward =|    a collective's threads send, receive
                               main 1  |= backward =|=== gloo ===|= backward =|    and add up on the cores that compute
    four ranks on two cores    each of the four has a core half of the time

A collective of gloo is work of the processor: its threads copy to and from the loopback and add up. Measured back to
back on two cores, two processes spend 0.44 to 0.92 (median 0.7) of its time on a core each, four 0.27 to 0.51 (median
0.39): the cores are busy for four fifths of it. What runs beside it gets that much less, so that it overlaps with
nothing.

A parallel plan costs the host more than what was recorded without it: hooks, and sharded tensors' dispatch::

    recorded        |view|        |addmm|                  one process alone
    under FSDP      hooks |all_gather| hooks |view|hooks|addmm|        what a host model knows of programs with hooks

The shipped host model has programs that ran under DDP and FSDP (``traces/host-parallel``); what it says of the traced
step beyond what it says of the recorded one is added, event by event, at this host's own speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.host_steps import named_host_step, traced_host_step
from graph_predictor.synthesis.program import OperationTimes
from graph_predictor.synthesis.recorded_operations import OperationMatch, RecordedOperations
from kernel_models.host.model import PLANS_HOST, shipped_host
from tracer.graph import ExecutionGraph, KernelKind, Meta

BUSY = 0.8
"""Share of the time of a collective in which it occupies as many cores as there are processes, or all of them."""


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Ranks on one host.

    Attributes:
        ranks: how many.
        cores: that they have together.
        threads: that operations of one of them compute with.
    """

    ranks: int
    cores: int
    threads: int

    @property
    def crowding(self) -> float:
        """Return how many times as long computing takes where all ranks compute at once."""
        return max(self.ranks * self.threads / self.cores, 1.0)

    @property
    def taken(self) -> float:
        """Return what a collective takes from computing beside it, as a share of its time: nothing where it has
        cores of its own."""
        wanted = BUSY * min(self.cores / self.ranks, 1.0)
        spare = max(self.cores / self.ranks - self.threads, 0.0)
        return BUSY * (1.0 - min(spare / wanted, 1.0))

    def apply(self, graph: ExecutionGraph, times: OperationTimes) -> OperationTimes:
        """Return one rank's times beside the other ranks'; collectives were measured beside them and stay.

        Args:
            graph: of the rank, traced by shapes.
            times: as if it had the host to itself.
        """
        factor = self.crowding
        before, inside = np.append(times.before, times.tail) * factor, times.inside * factor
        at_once = {int(op) for op, beside in zip(graph.collectives.op, graph.collectives.is_async, strict=True)
                   if not beside}
        for op, calls in times.calls.items():
            # For others the host itself waits: there is nothing beside them.
            if op not in at_once:
                before[op + 1] += self.taken * sum(
                    work.ns for call in calls for work in call.kernels if work.kind == KernelKind.COLLECTIVE)
        return replace(times, before=before[:-1], inside=inside, tail=float(before[-1]), fetch=times.fetch * factor)

    def note(self) -> str:
        """Return what was assumed, in a sentence."""
        return (f"{self.ranks} ranks share {self.cores} cores of the recorded host: their operations take "
                f"{self.crowding:.2f} times as long, and a collective takes {self.taken:.0%} of its time from what "
                "computes beside it.")


def cores_shared(meta: Meta, ranks: int) -> SharedCores | None:
    """Return how ranks share the host that one process was recorded on; ``None`` where the recording does not say, or
    was of several ranks itself."""
    if meta.host_cores < 1 or meta.world_size > 1 or ranks < 2:
        return None
    return SharedCores(ranks, meta.host_cores, min(max(meta.host_threads, 1), meta.host_cores))


def with_hooks(graph: ExecutionGraph, times: OperationTimes, recorded: RecordedOperations,
               pairs: OperationMatch) -> OperationTimes:
    """Return a traced rank's times with what its plan costs the host.

    Args:
        graph: traced by shapes under a plan.
        times: of its operations, by the recording.
        recorded: operations of one process without a plan.
        pairs: which of them stand for traced ones.
    """
    row = pairs.row
    mine, theirs = np.flatnonzero(row >= 0), row[row >= 0]
    computed = np.zeros(len(graph.ops))
    computed[mine] = recorded.compute[theirs]
    model = shipped_host(PLANS_HOST)
    before, inside = model.estimate(traced_host_step(graph, computed))
    was_before, was_inside = model.estimate(named_host_step(recorded.graph, recorded.op, recorded.compute))
    own = np.maximum(recorded.inside - recorded.compute, 0.0)
    speed = float(own[theirs].sum()) / max(float(was_inside[theirs].sum()), 1.0) if len(mine) else 1.0
    more_before, more_inside = speed * before, np.zeros(len(graph.ops))
    more_before[mine] = speed * np.maximum(before[mine] - was_before[theirs], 0.0)
    more_inside[mine] = speed * np.maximum(inside[mine] - was_inside[theirs], 0.0)
    tail = speed * max(float(before[-1] - was_before[-1]), 0.0)
    return replace(times, before=times.before + more_before[:-1], inside=times.inside + more_inside,
                   tail=times.tail + tail)
