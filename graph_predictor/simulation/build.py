"""Build of the simulator's ``Program`` from a job's execution graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from graph_predictor.simulation.changed_program import without_cycles
from graph_predictor.simulation.device_waits import (
    KernelEdges,
    LaunchQueue,
    infer_kernel_edges,
    infer_launch_queue,
    launch_latency,
)
from graph_predictor.simulation.host_items import (
    HostItems,
    HostWaits,
    allocation_waits,
    build_host_items,
    hold_back,
    infer_host_waits,
)
from graph_predictor.simulation.program import MOST_FACTOR, NEVER, ItemKind, LaunchReference, Program, owners, pointers
from graph_predictor.simulation.ranks import LONG_AGO, RankView, Rendezvous, job_clock, match_collectives, view_rank
from kernel_models.host.segments import LaunchConstants, LaunchSamples, fit_launch_constants
from tracer.arrays import Float64, Int8, Int64
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph, KernelKind

if TYPE_CHECKING:
    from graph_predictor.simulation.host_slices import HostSlices


@dataclass(slots=True)
class RankRows:
    """One rank's rows of a program, counted from 0; times are ns on the rank's own clock.

    ``call_*`` have a row for each call (``launches`` of its graph), ``kernel_*`` for each kernel. ``call_channel`` is a
    call's channel of the launch queue (-1: none). ``call_queued`` is the number of its entries before
    the call, and ``queue_kernel`` holds these entries, channel by channel. Everything else is as in ``Program``.
    """

    items: HostItems
    call_cost: Int64
    call_channel: Int64
    call_queued: Int64
    queue_return: int
    wait_call: Int64
    wait_kernel: Int64
    wait_lag: Int64
    kernel_call: Int64
    kernel_reference: Int8
    kernel_latency: Int64
    kernel_previous: Int64
    kernel_gap: Int64
    kernel_duration: Int64
    kernel_external: Int64
    kernel_start: Int64
    kernel_end: Int64
    edge_target: Int64
    edge_source: Int64
    edge_fraction: Float64
    edge_lag: Int64
    queue_count: Int64
    queue_kernel: Int64
    queue_depth: int


def assemble(ranks: Sequence[RankRows], clock_ns: Sequence[int]) -> Program:
    """Concatenate ranks to one program without rendezvous.

    Args:
        ranks: ranks of one job.
        clock_ns: start of each rank's own clock on the job's clock, ns.
    """
    item_offset = pointers([len(rank.items.kind) for rank in ranks])
    kernel_ptr = pointers([len(rank.kernel_call) for rank in ranks])
    rows: dict[str, list[np.ndarray]] = {}

    def add(**columns: np.ndarray) -> None:
        for name, column in columns.items():
            rows.setdefault(name, []).append(column)

    channels = 0
    for number, (rank, shift) in enumerate(zip(ranks, clock_ns, strict=True)):
        items, i0, k0 = rank.items, int(item_offset[number]), int(kernel_ptr[number])
        is_call = items.kind == ItemKind.CALL
        cost = np.zeros(len(items.kind), np.int64)
        queued, channel = (np.full(len(items.kind), -1, np.int64) for _ in range(2))
        cost[is_call] = rank.call_cost[items.row[is_call]]
        queued[is_call] = rank.call_queued[items.row[is_call]]
        own = rank.call_channel[items.row[is_call]]
        channel[is_call] = np.where(own >= 0, own + channels, -1)
        channels += len(rank.queue_count)
        add(thread_count=np.unique(items.thread, return_counts=True)[1],
            thread_rank=np.full(len(items.threads), number, np.int32), thread_start=items.thread_start + shift,
            item_kind=items.kind, item_row=items.row, item_work=items.work, item_cost=cost, item_queue=queued,
            item_channel=channel, item_return=np.full(len(items.kind), rank.queue_return, np.int64),
            item_external=np.where(items.external > NEVER, items.external + shift, NEVER),
            recorded_item_start=items.start + shift, recorded_item_end=items.end + shift)
        after = np.array(items.after, np.int64).reshape(-1, 3)
        add(after_owner=after[:, 0] + i0, after_item=after[:, 1] + i0, after_lag=after[:, 2])
        wait_item = items.item_of_call[rank.wait_call]
        kept = wait_item >= 0
        add(wait_owner=wait_item[kept] + i0, wait_kernel=rank.wait_kernel[kept] + k0, wait_lag=rank.wait_lag[kept])
        launched = rank.kernel_call >= 0
        item = np.where(launched, items.item_of_call[rank.kernel_call], -1) if len(items.item_of_call) else np.full(
            len(launched), -1, np.int64)
        add(kernel_item=np.where(item >= 0, item + i0, -1), kernel_reference=rank.kernel_reference,
            kernel_latency=rank.kernel_latency,
            kernel_previous=np.where(rank.kernel_previous >= 0, rank.kernel_previous + k0, -1),
            kernel_gap=rank.kernel_gap, kernel_duration=rank.kernel_duration,
            kernel_external=np.where(rank.kernel_external > NEVER, rank.kernel_external + shift, NEVER),
            recorded_kernel_start=rank.kernel_start + shift, recorded_kernel_end=rank.kernel_end + shift)
        add(edge_owner=rank.edge_target + k0, edge_kernel=rank.edge_source + k0, edge_fraction=rank.edge_fraction,
            edge_lag=rank.edge_lag)
        add(queue_count=rank.queue_count, queue_kernel=rank.queue_kernel + k0,
            queue_depth=np.full(len(rank.queue_count), rank.queue_depth, np.int64))

    table = {name: np.concatenate(columns) for name, columns in rows.items()}
    items_total, kernels_total = int(item_offset[-1]), int(kernel_ptr[-1])
    for prefix, size in (("after", items_total), ("wait", items_total), ("edge", kernels_total)):
        owner = table.pop(f"{prefix}_owner")
        order = np.argsort(owner, kind="stable")
        for name in [name for name in table if name.startswith(f"{prefix}_")]:
            table[name] = table[name][order]
        table[f"{prefix}_ptr"] = pointers(np.bincount(owner, minlength=size))
    return Program(
        thread_ptr=pointers(table.pop("thread_count")), queue_ptr=pointers(table.pop("queue_count")),
        kernel_ptr=kernel_ptr, kernel_group=np.full(kernels_total, -1, np.int64), group_size=np.zeros(0, np.int64),
        **table)


def with_edges(program: Program, target: Int64, source: Int64, fraction: Float64) -> Program:
    """Return the program with more kernel-to-kernel edges (rows of the whole program), without lag."""
    own = owners(program.edge_ptr)
    owner = np.concatenate([own, target])
    order = np.argsort(owner, kind="stable")
    return replace(
        program, edge_ptr=pointers(np.bincount(owner, minlength=len(program.kernel_item))),
        edge_kernel=np.concatenate([program.edge_kernel, source])[order],
        edge_fraction=np.concatenate([program.edge_fraction, fraction])[order],
        edge_lag=np.concatenate([program.edge_lag, np.zeros(len(target), np.int64)])[order])


def with_rendezvous(program: Program, rendezvous: Rendezvous) -> Program:
    """Return the program in which kernels of each rendezvous start together and last its intrinsic time."""
    group, duration = np.full(len(program.kernel_item), -1, np.int64), program.kernel_duration.copy()
    for number, members in enumerate(rendezvous.groups):
        rows = [int(program.kernel_ptr[rank]) + kernel for rank, kernel in members]
        group[rows], duration[rows] = number, rendezvous.intrinsic_ns[number]
    return replace(program, kernel_group=group, kernel_duration=duration,
                   group_size=np.array([len(members) for members in rendezvous.groups], np.int64))


def dissolve(rendezvous: Rendezvous, program: Program) -> None:
    """Remove from ``rendezvous`` the groups that are no rendezvous in the program any more."""
    kept = [program.kernel_group[program.kernel_ptr[rank] + k] >= 0 for (rank, k), *_ in rendezvous.groups]
    rendezvous.groups = [members for members, stays in zip(rendezvous.groups, kept, strict=True) if stays]
    rendezvous.intrinsic_ns = [ns for ns, stays in zip(rendezvous.intrinsic_ns, kept, strict=True) if stays]


@dataclass(slots=True)
class RankReport:
    """The builder's findings in one rank, with the delays that it cannot explain."""

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
    """Launches that returned although the inferred queue was full; they wait for no slot."""
    unexplained_ns: int
    window_ns: int
    unexplained: list[tuple[int, int]] = field(default_factory=list)

    @property
    def unexplained_share(self) -> float:
        """Return the delay no rule explains, as a share of the window."""
        return self.unexplained_ns / self.window_ns if self.window_ns else 0.0


@dataclass(frozen=True, slots=True)
class WithoutProfiler:
    """Facts kept with a program whose host times exclude the profiler's cost.

    Attributes:
        recorded: the program with the recorded host times.
        slices: host time without the profiler, in slices.
        shares: for each rank, the share of recorded host time that is left in each row of ``ops``; the last share is of
            time outside any operation.
        stalled: for the first rank, the share of recorded host time in which calls were stalled, and the operation
            with most of it.
    """

    recorded: Program
    slices: HostSlices
    shares: list[Float64]
    stalled: tuple[float, str] = (0.0, "")


@dataclass(slots=True)
class Built:
    """A job's program for the simulator, the recordings behind its rows, and a report on each rank."""

    program: Program
    graphs: list[ExecutionGraph]
    reports: list[RankReport]
    rendezvous: Rendezvous
    clock_ns: list[int]
    """Start of each rank's window on the job's clock (ns from the earliest window's start)."""
    thread_number: list[int] = field(default_factory=list)
    """Row of its rank's ``graph.threads`` for every thread of the program."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of inferred dependencies of each kind that were dropped because they closed a cycle."""
    without_profiler: WithoutProfiler | None = None
    """Set where host times are those without the profiler (``prediction.unprofiled``)."""

    @property
    def recorded_program(self) -> Program:
        """Return the program with the recorded host times, whether or not they were changed since."""
        return self.program if self.without_profiler is None else self.without_profiler.recorded

    def as_recorded(self) -> Built:
        """Return the job with the recorded host times."""
        return self if self.profiled else replace(self, program=self.recorded_program, without_profiler=None)

    @property
    def computes_on_host(self) -> bool:
        """Return whether no rank has device work other than collectives, see ``ExecutionGraph.computes_on_host``."""
        return all(graph.computes_on_host for graph in self.graphs)

    @property
    def profiled(self) -> bool:
        """Return whether host times are those under the profiler."""
        return self.without_profiler is None


def kernel_kinds(graphs: Sequence[ExecutionGraph]) -> Int8:
    """Return the kinds of a job's kernels, rank by rank."""
    return np.concatenate([np.zeros(0, np.int8), *(graph.kernels.kind for graph in graphs)]).astype(np.int8)


def kernel_factors(graphs: Sequence[ExecutionGraph], factor: float, collectives: bool = False) -> Float64:
    """Return factors on the durations of a job's kernels; collectives mostly wait and keep 1 unless ``collectives``.
    Raises ``ForetraceError`` if the factor is negative, no number or too large."""
    if not 0 <= factor <= MOST_FACTOR:
        raise ForetraceError(f"Kernel durations cannot be scaled by {factor:g}: give a factor from zero to "
                             f"{MOST_FACTOR:g}.")
    return np.where((kernel_kinds(graphs) == KernelKind.COLLECTIVE) & (not collectives), 1.0, factor)


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
        """Return the rank's rows of the program."""
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
    """Build the program of a recorded job, one graph for each rank.

    Its durations are the recorded ones without any waiting. Launch latencies, kernel gaps and return lags are
    constants of each trace.
    """
    parts = [_inferred(graph) for graph in graphs]
    job = job_clock([p.view for p in parts])
    clock = job.starts_ns
    rendezvous = match_collectives([p.view for p in parts], clock, job.drifts)
    rendezvous.notes += job.notes
    program = assemble([part.rows() for part in parts], clock)
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
    return Built(program, graphs, reports, rendezvous, clock, numbers, left_out)


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
