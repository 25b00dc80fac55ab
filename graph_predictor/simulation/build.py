"""Build of the simulator's ``Program`` from a job's execution graphs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from graph_predictor.simulation.acyclic import without_cycles
from graph_predictor.simulation.allocation_waits import allocation_waits
from graph_predictor.simulation.assembly import RankRows, assemble, dissolve, with_rendezvous
from graph_predictor.simulation.clocks import job_clock
from graph_predictor.simulation.host_items import HostItems, build_host_items, hold_back
from graph_predictor.simulation.host_waits import HostWaits, infer_host_waits
from graph_predictor.simulation.kernel_waits import KernelEdges, infer_kernel_edges, launch_latency
from graph_predictor.simulation.launch_queue import LaunchQueue, infer_launch_queue
from graph_predictor.simulation.program import LaunchReference, Program
from graph_predictor.simulation.rank_view import LONG_AGO, RankView, view_rank
from graph_predictor.simulation.rendezvous import Rendezvous, match_collectives
from kernel_models.launch_constants import LaunchConstants, LaunchSamples, fit_launch_constants
from tracer.arrays import Float64
from tracer.graph import ExecutionGraph

if TYPE_CHECKING:
    from graph_predictor.simulation.host_slices import HostSlices


@dataclass(slots=True)
class RankReport:
    """The builder's findings in one rank; the honest part of a replay."""

    constants: LaunchConstants
    edges: dict[str, int]
    hand_overs: int
    blocked_calls: int
    blocked_launches: int
    queue_depth: int
    queue_source: str
    queue_shared: bool
    """Whether all streams share one launch queue."""
    queue_contradicted: int
    """Launches that returned although the queue was full by this account: they wait for no slot."""
    unexplained_ns: int
    window_ns: int
    unexplained: list[tuple[int, int]] = field(default_factory=list)

    @property
    def unexplained_share(self) -> float:
        """Delay no rule explains, as a share of the window."""
        return self.unexplained_ns / self.window_ns if self.window_ns else 0.0


@dataclass(frozen=True, slots=True)
class WithoutProfiler:
    """The parts of a program whose host times are those without the profiler.

    Attributes:
        recorded: the program with the recorded host times.
        slices: host time without the profiler, in slices.
        shares: of each rank, the share of recorded host time that is left of each row of ``ops``; the last one is of
            time outside any operation.
    """

    recorded: Program
    slices: HostSlices
    shares: list[Float64]


@dataclass(slots=True)
class Built:
    """A program, where its rows come from, and the reports of its ranks."""

    program: Program
    graphs: list[ExecutionGraph]
    reports: list[RankReport]
    rendezvous: Rendezvous
    clock_ns: list[int]
    """Start of each rank's window on the job's clock (ns from the earliest window's start)."""
    item_offset: list[int]
    thread_number: list[int] = field(default_factory=list)
    """Row of its rank's ``graph.threads`` for every thread of the program."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of inferred dependencies of each kind that closed a cycle, which the recorded times contradict."""
    without_profiler: WithoutProfiler | None = None
    """Set where host times are those without the profiler (``prediction.unprofiled``)."""

    @property
    def recorded_program(self) -> Program:
        """The program with the recorded host times, whether or not they were changed since."""
        return self.program if self.without_profiler is None else self.without_profiler.recorded

    def as_recorded(self) -> Built:
        """Return it with the recorded host times."""
        return self if self.profiled else replace(self, program=self.recorded_program, without_profiler=None)

    @property
    def computes_on_host(self) -> bool:
        """Return whether no rank has device work but collectives, see ``ExecutionGraph.computes_on_host``."""
        return all(graph.computes_on_host for graph in self.graphs)

    @property
    def profiled(self) -> bool:
        """Return whether host times are those under the profiler."""
        return self.without_profiler is None


@dataclass(slots=True)
class _Inferred:
    """Everything inferred from one rank's recording."""

    view: RankView
    items: HostItems
    edges: KernelEdges
    waits: HostWaits
    queue: LaunchQueue
    constants: LaunchConstants

    def rows(self) -> RankRows:
        """The rank's rows of the program."""
        view, constants, kernels = self.view, self.constants, self.view.graph.kernels
        kind = kernels.kind
        gap = constants.gap[kind[view.k_previous], kind, view.k_in_graph.astype(np.int64)] if len(kind) else np.zeros(
            0, np.int64)
        return RankRows(
            items=self.items, call_cost=self.queue.cost, call_channel=self.queue.channel,
            call_queued=self.queue.before_call, queue_return=constants.queue_return,
            wait_call=self.waits.call, wait_kernel=self.waits.kernel, wait_lag=self.waits.lag,
            kernel_call=view.k_call,
            kernel_reference=np.select([view.k_in_call, view.k_staged],
                                       [LaunchReference.CALL_START, LaunchReference.STAGED],
                                    LaunchReference.CALL_END).astype(np.int8),
            kernel_latency=launch_latency(view, constants), kernel_previous=view.k_previous, kernel_gap=gap,
            kernel_duration=kernels.duration_ns.astype(np.int64), kernel_external=self.edges.external,
            kernel_start=kernels.start_ns, kernel_end=view.k_end,
            edge_target=self.edges.target, edge_source=self.edges.source, edge_fraction=self.edges.fraction,
            edge_lag=self.edges.lag,
            queue_count=self.queue.count, queue_kernel=self.queue.kernel, queue_depth=self.queue.depth)


def build_program(graphs: list[ExecutionGraph]) -> Built:
    """Build the program of a recorded job, one graph a rank.

    Durations in it are the recorded ones less all waiting; launch latencies, kernel gaps and return lags are
    constants of each trace.
    """
    parts = [_inferred(graph) for graph in graphs]
    job = job_clock([p.view for p in parts])
    clock = job.starts_ns
    rendezvous = match_collectives([p.view for p in parts], clock, job.drifts)
    rendezvous.notes += job.notes
    program, item_offset = assemble([part.rows() for part in parts], clock)
    program, left_out = without_cycles(with_rendezvous(program, rendezvous))
    dissolve(rendezvous, program)
    reports = [
        RankReport(
            constants=p.constants, edges=p.edges.counts, hand_overs=p.items.hand_overs,
            blocked_calls=p.waits.blocked, blocked_launches=p.queue.blocked, queue_depth=p.queue.depth,
            queue_source=p.queue.source, queue_shared=p.queue.shared, queue_contradicted=p.queue.contradicted,
            unexplained_ns=p.edges.unexplained_ns + p.waits.unexplained_ns,
            window_ns=p.view.graph.meta.window_ns, unexplained=p.edges.unexplained,
        )
        for p in parts
    ]
    numbers = [number for p in parts for number in p.items.threads]
    return Built(program, graphs, reports, rendezvous, clock, item_offset, numbers, left_out)


def _inferred(graph: ExecutionGraph) -> _Inferred:
    view = view_rank(graph)
    constants = fit_launch_constants(_samples(view))
    edges = infer_kernel_edges(view, constants)
    items = build_host_items(view)
    allocations = allocation_waits(view, items.item_of_call >= 0)
    hold_back(items, allocations)
    waits = infer_host_waits(view, constants, allocations)
    queue = infer_launch_queue(view, waits.cost, constants)
    constants.queue_depth = queue.depth
    return _Inferred(view, items, edges, waits, queue, constants)


def _samples(view: RankView) -> LaunchSamples:
    kernels = view.graph.kernels
    launched = np.nonzero(view.k_call >= 0)[0]
    previous = view.k_previous[launched]
    has = previous >= 0
    return LaunchSamples(
        kind=kernels.kind[launched], start=kernels.start_ns[launched], call_start=view.k_call_start[launched],
        call_end=view.k_call_end[launched], previous_end=np.where(has, view.k_end[previous], LONG_AGO),
        previous_kind=np.where(has, kernels.kind[previous], -1).astype(np.int8),
        in_graph=view.k_in_graph[launched], in_call=view.k_in_call[launched],
        staged=view.k_staged[launched], end=view.k_end[launched],
    )
