"""From a job's execution graphs to the simulator's ``Program``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from graph_predictor.simulation.acyclic import without_cycles
from graph_predictor.simulation.host_items import HostItems, build_host_items
from graph_predictor.simulation.host_waits import HostWaits, infer_host_waits
from graph_predictor.simulation.kernel_waits import KernelEdges, infer_kernel_edges, launch_latency
from graph_predictor.simulation.launch_queue import LaunchQueue, infer_launch_queue
from graph_predictor.simulation.program import NEVER, Anchor, ItemKind, Program
from graph_predictor.simulation.rank_view import LONG_AGO, RankView, view_rank
from graph_predictor.simulation.rendezvous import Rendezvous, match_collectives
from kernel_models.launch_constants import LaunchConstants, LaunchSamples, fit_launch_constants
from tracer.arrays import Float64, Int64
from tracer.graph import ExecutionGraph

if TYPE_CHECKING:
    from graph_predictor.simulation.host_pieces import HostPieces

_ONE_CLOCK_NS = 7 * 24 * 3600 * 10**9

@dataclass(slots=True)
class RankReport:
    """What the builder found in one rank; the honest part of a replay."""

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
    """What a program whose host times are those without the profiler was made of.

    Attributes:
        recorded: the program with the recorded host times.
        pieces: host time without the profiler, in pieces.
        shares: of each rank, the share of recorded host time that is left of each row of ``ops``; the last one is of
            time outside any operation.
    """

    recorded: Program
    pieces: HostPieces
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
    """How many inferred dependencies of each kind closed a cycle that the recorded times contradict."""
    without_profiler: WithoutProfiler | None = None
    """Set where host times are those without the profiler (``prediction.unprofiled``)."""

    @property
    def recorded_program(self) -> Program:
        """The program with the recorded host times, whether or not they were changed since."""
        return self.program if self.without_profiler is None else self.without_profiler.recorded

    @property
    def computes_on_host(self) -> bool:
        """Whether no rank has device work but collectives, see ``ExecutionGraph.computes_on_host``."""
        return all(graph.computes_on_host for graph in self.graphs)

    @property
    def profiled(self) -> bool:
        """Whether host times are those under the profiler."""
        return self.without_profiler is None


@dataclass(slots=True)
class _RankParts:
    view: RankView
    items: HostItems
    edges: KernelEdges
    waits: HostWaits
    queue: LaunchQueue
    constants: LaunchConstants


def window_starts(graphs: Sequence[ExecutionGraph]) -> list[int]:
    """Return when each rank's window starts on the job's clock, ns from the first.

    Windows that lie more than a week apart were not timed by one clock: they are taken to start together.
    """
    starts = [graph.meta.base_time_ns for graph in graphs]
    first = min(starts, default=0)
    apart = max(starts, default=0) - first > _ONE_CLOCK_NS
    return [0 if apart else start - first for start in starts]


def build_program(graphs: list[ExecutionGraph], *, by_order: bool = False) -> Built:
    """Build the program of a job, one graph a rank.

    Durations in it are the recorded ones less all waiting; launch latencies, kernel gaps and return lags are
    constants of each trace. With ``by_order`` collectives are matched by their order alone, whenever they end.
    """
    clock = window_starts(graphs)
    parts = [_rank_parts(graph) for graph in graphs]
    rendezvous = match_collectives([p.view for p in parts], clock, by_order=by_order)
    program, item_offset = _assemble(parts, clock, rendezvous)
    program, left_out = without_cycles(program)
    _dissolve(rendezvous, program)
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


def _dissolve(rendezvous: Rendezvous, program: Program) -> None:
    """Take out of ``rendezvous`` what is none in the program any more."""
    kept = [program.kernel_group[program.kernel_ptr[rank] + k] >= 0 for (rank, k), *_ in rendezvous.groups]
    rendezvous.groups = [members for members, stays in zip(rendezvous.groups, kept, strict=True) if stays]
    rendezvous.intrinsic_ns = [ns for ns, stays in zip(rendezvous.intrinsic_ns, kept, strict=True) if stays]


def _rank_parts(graph: ExecutionGraph) -> _RankParts:
    view = view_rank(graph)
    constants = fit_launch_constants(_samples(view))
    edges = infer_kernel_edges(view, constants)
    waits = infer_host_waits(view, constants)
    queue = infer_launch_queue(view, waits.cost, constants)
    constants.queue_depth = queue.depth
    return _RankParts(view, build_host_items(view), edges, waits, queue, constants)


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


def _assemble(parts: list[_RankParts], clock: list[int], rendezvous: Rendezvous) -> tuple[Program, list[int]]:
    """Concatenate the ranks, shifting indices and clocks."""
    item_offset = np.concatenate([[0], np.cumsum([len(p.items.kind) for p in parts])]).astype(np.int64)
    kernel_ptr = np.concatenate([[0], np.cumsum([len(p.view.graph.kernels) for p in parts])]).astype(np.int64)
    rows: dict[str, list[np.ndarray]] = {}

    def add(**columns: np.ndarray) -> None:
        for name, column in columns.items():
            rows.setdefault(name, []).append(column)

    channels = 0
    for rank, p in enumerate(parts):
        graph, view, items, shift = p.view.graph, p.view, p.items, clock[rank]
        kernels = graph.kernels
        i0, k0 = int(item_offset[rank]), int(kernel_ptr[rank])
        is_call = items.kind == ItemKind.CALL
        cost = np.zeros(len(items.kind), np.int64)
        queue_at, channel = (np.full(len(items.kind), -1, np.int64) for _ in range(2))
        cost[is_call] = p.queue.cost[items.row[is_call]]
        queue_at[is_call] = p.queue.before_call[items.row[is_call]]
        own = p.queue.channel[items.row[is_call]]
        channel[is_call] = np.where(own >= 0, own + channels, -1)
        channels += len(p.queue.count)
        add(thread_count=np.unique(items.thread, return_counts=True)[1],
            thread_rank=np.full(len(items.threads), rank, np.int32), thread_start=items.thread_start + shift,
            item_kind=items.kind, item_row=items.row, item_work=items.work, item_cost=cost, item_queue=queue_at,
            item_channel=channel,
            item_return=np.full(len(items.kind), p.constants.queue_return, np.int64),
            item_external=np.where(items.external > NEVER, items.external + shift, NEVER),
            recorded_item_start=items.start + shift, recorded_item_end=items.end + shift)
        after = np.array(items.after, np.int64).reshape(-1, 3)
        add(after_owner=after[:, 0] + i0, after_item=after[:, 1] + i0, after_lag=after[:, 2])
        wait_item = items.item_of_call[p.waits.call]
        kept = wait_item >= 0
        add(wait_owner=wait_item[kept] + i0, wait_kernel=p.waits.kernel[kept] + k0, wait_lag=p.waits.lag[kept])
        launched = view.k_call >= 0
        item = np.where(launched, items.item_of_call[view.k_call], -1) if len(items.item_of_call) else np.full(
            len(kernels), -1, np.int64)
        kind = kernels.kind
        constants = p.constants
        no_gap: Int64 = np.zeros(len(kernels), np.int64)
        gap = constants.gap[kind[view.k_previous], kind, view.k_in_graph.astype(np.int64)] if len(kernels) else no_gap
        add(kernel_item=np.where(item >= 0, item + i0, -1),
            kernel_anchor=np.select([view.k_in_call, view.k_staged], [Anchor.CALL_START, Anchor.STAGED],
                                    Anchor.CALL_END).astype(np.int8),
            kernel_latency=launch_latency(view, constants),
            kernel_previous=np.where(view.k_previous >= 0, view.k_previous + k0, -1), kernel_gap=gap,
            kernel_duration=kernels.duration_ns.astype(np.int64),
            kernel_external=np.where(p.edges.external > NEVER, p.edges.external + shift, NEVER),
            recorded_kernel_start=kernels.start_ns + shift, recorded_kernel_end=view.k_end + shift)
        add(edge_owner=p.edges.target + k0, edge_kernel=p.edges.source + k0, edge_fraction=p.edges.fraction,
            edge_lag=p.edges.lag)
        add(queue_count=p.queue.count, queue_kernel=p.queue.kernel + k0,
            queue_depth=np.full(len(p.queue.count), p.queue.depth, np.int64))

    table = {name: np.concatenate(columns) for name, columns in rows.items()}
    items_total, kernels_total = int(item_offset[-1]), int(kernel_ptr[-1])
    group = np.full(kernels_total, -1, np.int64)
    for g, members in enumerate(rendezvous.groups):
        for rank, k in members:
            group[kernel_ptr[rank] + k] = g
            table["kernel_duration"][kernel_ptr[rank] + k] = rendezvous.intrinsic_ns[g]
    after_ptr, order = _csr(table.pop("after_owner"), items_total)
    table["after_item"], table["after_lag"] = table["after_item"][order], table["after_lag"][order]
    wait_ptr, order = _csr(table.pop("wait_owner"), items_total)
    table["wait_kernel"], table["wait_lag"] = table["wait_kernel"][order], table["wait_lag"][order]
    edge_ptr, order = _csr(table.pop("edge_owner"), kernels_total)
    for name in ("edge_kernel", "edge_fraction", "edge_lag"):
        table[name] = table[name][order]
    program = Program(
        thread_ptr=_pointer(table.pop("thread_count")), kernel_ptr=kernel_ptr, after_ptr=after_ptr, wait_ptr=wait_ptr,
        edge_ptr=edge_ptr, queue_ptr=_pointer(table.pop("queue_count")), kernel_group=group,
        group_size=np.array([len(m) for m in rendezvous.groups], np.int64), **table,
    )
    return program, item_offset[:-1].tolist()


def _pointer(counts: Int64) -> Int64:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _csr(owner: Int64, size: int) -> tuple[Int64, Int64]:
    """Pointer array and row order of edges grouped by owner."""
    return _pointer(np.bincount(owner, minlength=size)), np.argsort(owner, kind="stable")
