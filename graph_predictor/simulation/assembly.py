"""A job's program of its ranks' rows, whether these were inferred from a recording or synthesized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.simulation.host_items import HostItems
from graph_predictor.simulation.program import NEVER, ItemKind, Program
from graph_predictor.simulation.rendezvous import Rendezvous
from tracer.arrays import Float64, Int8, Int64


@dataclass(slots=True)
class RankRows:
    """One rank's rows of a program, counted from 0; times are ns on the rank's own clock.

    ``call_*`` have a row a call (``launches`` of its graph), ``kernel_*`` a row a kernel. ``call_channel`` is the
    channel of the launch queue that a call submits to (-1: none), ``call_queued`` how many entries of it come before
    the call, and ``queue_kernel`` these entries, channel by channel. Everything else is as in ``Program``.
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


def assemble(ranks: Sequence[RankRows], clock_ns: Sequence[int]) -> tuple[Program, list[int]]:
    """Concatenate ranks to one program without rendezvous.

    Args:
        ranks: of one job.
        clock_ns: when each rank's own clock starts on the job's.

    Returns:
        the program, and the first item of each rank.
    """
    item_offset = _pointer([len(rank.items.kind) for rank in ranks])
    kernel_ptr = _pointer([len(rank.kernel_call) for rank in ranks])
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
        table[f"{prefix}_ptr"] = _pointer(np.bincount(owner, minlength=size))
    program = Program(
        thread_ptr=_pointer(table.pop("thread_count")), queue_ptr=_pointer(table.pop("queue_count")),
        kernel_ptr=kernel_ptr, kernel_group=np.full(kernels_total, -1, np.int64), group_size=np.zeros(0, np.int64),
        **table)
    return program, item_offset[:-1].tolist()


def with_edges(program: Program, target: Int64, source: Int64, fraction: Float64) -> Program:
    """The program with more kernel-to-kernel edges (rows of the whole program), without lag."""
    own = np.repeat(np.arange(len(program.kernel_item)), np.diff(program.edge_ptr))
    owner = np.concatenate([own, target])
    order = np.argsort(owner, kind="stable")
    return replace(
        program, edge_ptr=_pointer(np.bincount(owner, minlength=len(program.kernel_item))),
        edge_kernel=np.concatenate([program.edge_kernel, source])[order],
        edge_fraction=np.concatenate([program.edge_fraction, fraction])[order],
        edge_lag=np.concatenate([program.edge_lag, np.zeros(len(target), np.int64)])[order])


def with_rendezvous(program: Program, rendezvous: Rendezvous) -> Program:
    """The program whose kernels of each rendezvous start and end together, after its intrinsic time."""
    group, duration = np.full(len(program.kernel_item), -1, np.int64), program.kernel_duration.copy()
    for number, members in enumerate(rendezvous.groups):
        rows = [int(program.kernel_ptr[rank]) + kernel for rank, kernel in members]
        group[rows], duration[rows] = number, rendezvous.intrinsic_ns[number]
    return replace(program, kernel_group=group, kernel_duration=duration,
                   group_size=np.array([len(members) for members in rendezvous.groups], np.int64))


def dissolve(rendezvous: Rendezvous, program: Program) -> None:
    """Take out of ``rendezvous`` what is none in the program any more."""
    kept = [program.kernel_group[program.kernel_ptr[rank] + k] >= 0 for (rank, k), *_ in rendezvous.groups]
    rendezvous.groups = [members for members, stays in zip(rendezvous.groups, kept, strict=True) if stays]
    rendezvous.intrinsic_ns = [ns for ns, stays in zip(rendezvous.intrinsic_ns, kept, strict=True) if stays]


def _pointer(counts: Int64 | Sequence[int]) -> Int64:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
