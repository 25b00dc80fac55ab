"""The collectives of graphs as calls that ``kernel_models.collectives.price`` prices.

Waiting is never priced. A rendezvous starts when its last rank arrives. A prediction replaces only the recorded time
from that moment to the end.

Collectives of a backend that works on the host (gloo) are represented as device work, one stream for each thread::

    main      |c10d::allreduce_|  backward ...      |    waits    |  optimizer
    gloo 1           |~~~~~~~ all_reduce: waits for the others ===|

Nothing is launched and nothing runs on a device. But the recording shows the call that asked for the collective, the
range in which the backend's thread worked on it, and the time that the host's thread waited. These become a launch, a
kernel and a blocking call. So collectives on the host are matched, wait for their last rank, are exposed and lie on the
critical path like those of a device. Only reports of recorded jobs use this view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_slices import exclusive_time
from graph_predictor.simulation.program import Program
from graph_predictor.simulation.ranks import HOST_RANGE
from kernel_models.collectives import (
    CollectiveCall,
    CollectiveKind,
    CollectiveModel,
    CommTimes,
    Placement,
    Topology,
    price_calls,
)
from kernel_models.collectives.recorded import element_bytes, kind_of, payload_bytes
from kernel_models.device import DeviceSpec
from tracer.arrays import Float64, Int64
from tracer.graph import NONE, ExecutionGraph, KernelKind, LaunchKind, Table
from tracer.input_file import list_of


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One collective of a job: its call, its kernels as (position of the rank, kernel row), and its recorded
    transfer."""

    call: CollectiveCall
    members: tuple[tuple[int, int], ...]
    recorded_ns: int
    alone: bool
    """Whether only one rank was recorded, so that the recorded time includes waiting."""


def find_collectives(built: Built, on: Topology) -> tuple[list[RecordedCollective], int]:
    """Return the job's collectives whose call is known, and the number of kernels of other collectives."""
    graphs = built.graphs
    row_of = [{int(k): i for i, k in enumerate(g.collectives.kernel.tolist()) if k >= 0} for g in graphs]
    grouped = {member for members in built.rendezvous.groups for member in members}
    found: list[RecordedCollective] = []
    unknown = 0
    for members, recorded in zip(built.rendezvous.groups, built.rendezvous.intrinsic_ns, strict=True):
        call = recorded_call(graphs, row_of, members, on)
        if call is None:
            unknown += len(members)
        else:
            found.append(RecordedCollective(call, tuple(members), int(recorded), False))
    for position, graph in enumerate(graphs):
        for kernel in np.flatnonzero(graph.kernels.kind == KernelKind.COLLECTIVE).tolist():
            if (position, kernel) in grouped:
                continue
            call = recorded_call(graphs, row_of, [(position, kernel)], on)
            if call is None:
                unknown += 1
            else:
                found.append(RecordedCollective(call, ((position, kernel),), int(graph.kernels.duration_ns[kernel]),
                                                True))
    return found, unknown


def recorded_call(graphs: Sequence[ExecutionGraph], row_of: list[dict[int, int]],
                  members: Sequence[tuple[int, int]], on: Topology | None) -> CollectiveCall | None:
    """Return the call of one collective, given its kernels as (position of the rank, kernel row). It is placed on a
    cluster, or by default on one node. ``None`` where the recording does not show its kind and size."""
    size, kind, dtype = float("nan"), None, "float32"
    ranks: list[int] = []
    named: list[int] = []
    group_size = 0
    for position, kernel in members:
        graph, row = graphs[position], row_of[position].get(kernel)
        if row is None:
            return None
        table = graph.collectives
        kind = kind_of(graph, table, row)
        if kind is None:
            return None
        ranks.append(graph.meta.rank if graph.meta.rank >= 0 else position)
        world = max(graph.meta.world_size, len(graphs))
        group_size = max(group_size, int(table.group_size[row]) if table.group_size[row] != NONE else (
            world if len(members) == 1 else len(members)))
        named = named or _named_ranks(graph.string(int(table.ranks[row])) if table.ranks[row] != NONE else "")
        dtype, width = element_bytes(graph, table, row)
        value = payload_bytes(kind, int(table.elements_in[row]), int(table.elements_out[row]), width, group_size)
        size = value if not size >= value else size
    if kind is None or size != size:
        return None
    if on is None:
        placement = Placement((group_size,))
    elif len(members) < group_size and len(named) == group_size and max(named) < on.gpus:
        placement = on.place(named)
    elif len(members) < group_size:
        placement = on.first(min(group_size, on.gpus))
    else:
        placement = on.place(ranks)
    return CollectiveCall(kind, size, placement, dtype)


def _named_ranks(text: str) -> list[int]:
    """Return the ranks of a group as a trace lists them; empty if the list is cut off or names a rank twice."""
    found = list_of(text)
    if not all(type(rank) is int and rank >= 0 for rank in found):
        return []
    return found if len(set(found)) == len(found) else []


def with_transfers(built: Built, collectives: Sequence[RecordedCollective], time_us: npt.ArrayLike) -> Program:
    """Return the job's program in which each of ``collectives`` transfers for its ``time_us``; waiting is simulated."""
    duration: Int64 = built.program.kernel_duration.copy()
    for collective, value in zip(collectives, np.asarray(time_us, np.float64).tolist(), strict=True):
        for position, kernel in collective.members:
            duration[int(built.program.kernel_ptr[position]) + kernel] = round(value * 1e3)
    return built.program.with_durations(duration)


def price_table(graph: ExecutionGraph, spec: DeviceSpec, model: CollectiveModel | None) -> CommTimes:
    """Return prices for every row of a graph's collectives, recorded or traced by shapes. Without ``model`` they run
    over the device's own links. Collectives of unknown kind always do: their bytes are sent once."""
    calls = table_calls(graph, model)
    known = np.array([call is not None for call in calls], np.bool_)
    times = CommTimes.empty(len(calls))
    times.put(known, price_calls([call for call in calls if call is not None], model or spec))
    unknown = [_of_no_kind(graph, row) for row in np.flatnonzero(~known).tolist()]
    times.put(~known, price_calls(unknown, spec))
    return times


def payload_ratios(graph: ExecutionGraph, rows: Sequence[int], payload: Sequence[float], spec: DeviceSpec) -> Float64:
    """Return the price of collectives with ``payload`` times their bytes over the price with their own bytes, by row.

    The latencies and rates are those of the device's own links. The ratio is 1 where a price is 0.
    """
    found = table_calls(graph, None)
    calls = [found[row] or _of_no_kind(graph, row) for row in rows]
    more = [replace(call, payload_bytes=call.payload_bytes * times) for call, times in zip(calls, payload, strict=True)]
    old, new = (price_calls(each, spec).time_us for each in (calls, more))
    return np.divide(new, old, out=np.ones(len(old)), where=old > 0)


def table_calls(graph: ExecutionGraph, model: CollectiveModel | None) -> list[CollectiveCall | None]:
    """Return the call of every row of a graph's collectives; ``None`` where kind or size is unknown."""
    on = None if model is None else model.topology
    return [recorded_call([graph], [{row: row}], [(0, row)], on) for row in range(len(graph.collectives))]


def _of_no_kind(graph: ExecutionGraph, row: int) -> CollectiveCall:
    """Return a collective of an unknown kind or size: its known bytes are sent once."""
    table = graph.collectives
    dtype, width = element_bytes(graph, table, row)
    elements = max(int(table.elements_in[row]), int(table.elements_out[row]), 1)
    return CollectiveCall(CollectiveKind.BROADCAST, float(elements * width), Placement((2,)), dtype)


WAIT = "wait for a collective"
"""Name of the blocking calls."""
CALL_NS = 1_000
"""Assumed time of the call that submits a collective, at the begin of its operation."""
WAITS = ("wait_tensor", "c10d::barrier", "c10d::monitored_barrier_")
"""Ends of the names of operations that themselves wait for a collective."""

SomeTable = TypeVar("SomeTable", bound=Table)


def with_host_collectives(graph: ExecutionGraph) -> ExecutionGraph:
    """Return the graph with the collectives of host backends as device work; the graph itself if it has none."""
    calls, ranges = _matched(graph)
    if not len(calls):
        return graph
    ops, table = graph.ops, graph.collectives
    asked = table.op[calls]
    begin, end = ops.start_ns[ranges], ops.start_ns[ranges] + ops.duration_ns[ranges]
    thread, low, high = _waits(graph, np.unique(ops.thread[asked]), begin, end)
    strings = [*graph.strings, WAIT]
    first, number = len(graph.launches), len(calls)
    launches = graph.launches.empty(number + len(low))
    for name, of_calls, of_waits in (
        ("name", ops.name[asked], len(strings) - 1), ("kind", LaunchKind.KERNEL, LaunchKind.BLOCKING_SYNC),
        ("op", asked, NONE), ("parent", NONE, NONE), ("thread", ops.thread[asked], thread),
        ("start_ns", ops.start_ns[asked], low),
        ("duration_ns", np.minimum(ops.duration_ns[asked], CALL_NS), high - low),
        ("correlation", NONE, NONE), ("step", ops.step[asked], _step(graph, low)),
    ):
        getattr(launches, name)[:number], getattr(launches, name)[number:] = of_calls, of_waits
    kernels = graph.kernels.empty(number)
    kernels.name[:], kernels.kind[:] = ops.name[ranges], KernelKind.COLLECTIVE
    kernels.launch[:], kernels.op[:] = first + np.arange(number), asked
    kernels.device[:], kernels.stream[:] = 0, ops.thread[ranges]
    kernels.start_ns[:], kernels.duration_ns[:], kernels.step[:] = begin, end - begin, ops.step[asked]
    met = table.take(np.arange(len(table)))
    met.kernel[calls] = len(graph.kernels) + np.arange(number)
    return replace(graph, strings=strings, launches=_joined(graph.launches, launches),
                   kernels=_joined(graph.kernels, kernels), collectives=met)


def on_host(graph: ExecutionGraph) -> bool:
    """Return whether all device work of a graph is collectives of the host (see ``with_host_collectives``)."""
    names = np.unique(graph.kernels.name).tolist()
    return bool(names) and all(graph.string(name).startswith(HOST_RANGE) for name in names)


def _matched(graph: ExecutionGraph) -> tuple[Int64, Int64]:
    """Return rows of ``collectives`` and ``ops``: each call and the range that carried it out, in the calls' order."""
    ops, table = graph.ops, graph.collectives
    codes = [code for code, text in enumerate(graph.strings) if text.startswith(HOST_RANGE)]
    ranges = np.flatnonzero(np.isin(ops.name, codes))
    rows = np.flatnonzero((table.kernel < 0) & (table.op >= 0))
    ranges = ranges[np.argsort(ops.start_ns[ranges], kind="stable")]
    rows = rows[np.argsort(ops.start_ns[table.op[rows]], kind="stable")]
    calls, found = [], []
    at = 0
    for row in rows.tolist():
        # An earlier range belongs to a call from before the recording.
        while at < len(ranges) and ops.start_ns[ranges[at]] < ops.start_ns[table.op[row]]:
            at += 1
        if at == len(ranges):
            break
        calls.append(row)
        found.append(int(ranges[at]))
        at += 1
    return np.array(calls, np.int64), np.array(found, np.int64)


def _waits(graph: ExecutionGraph, threads: Int64, begin: Int64, end: Int64) -> tuple[Int64, Int64, Int64]:
    """Return the thread, begin and end of the time in which host threads did nothing until a collective was over.

    It is time in no operation, or in one that waits, up to the last end of a collective within that time.
    """
    own = exclusive_time(graph)
    waiting = np.array([text.endswith(WAITS) for text in graph.strings], np.bool_)
    own_thread, own_start, own_end = (column[~waiting[graph.ops.name[own.op]]] for column in (
        own.thread, own.start_ns, own.end_ns))
    found: list[tuple[int, int, int]] = []
    for thread in threads.tolist():
        mine = own_thread == thread
        start, stop = own_start[mine], own_end[mine]
        low = np.append(int(begin.min()), stop)
        high = np.append(start, np.iinfo(np.int64).max)
        at = np.searchsorted(low, end, side="left") - 1
        inside = (at >= 0) & (end <= high[at]) & (begin < end)
        for gap in np.unique(at[inside]).tolist():
            ends = end[inside & (at == gap)]
            found.append((thread, int(low[gap]), int(ends.max())))
    columns = np.array(found, np.int64).reshape(-1, 3).T
    return columns[0], columns[1], columns[2]


def _step(graph: ExecutionGraph, at: Int64) -> Int64:
    steps = graph.steps
    if not len(steps):
        return np.full(len(at), NONE, np.int64)
    row = np.searchsorted(steps.start_ns, at, side="right") - 1
    inside = (row >= 0) & (at < (steps.start_ns + steps.duration_ns)[np.maximum(row, 0)])
    return np.where(inside, row, NONE)


def _joined(one: SomeTable, other: SomeTable) -> SomeTable:
    """Return the rows of two tables, one after the other."""
    return type(one)(**{field.name: np.concatenate([getattr(one, field.name), getattr(other, field.name)])
                        for field in fields(one)})
