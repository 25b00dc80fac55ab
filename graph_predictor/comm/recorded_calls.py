"""The collectives of graphs as calls that ``kernel_models.collectives.price`` prices.

Waiting is never priced: a rendezvous starts when its last rank arrives, and only the time from there to its end, which
replay takes from the recording, is replaced by a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from graph_predictor.simulation.build import Built
from graph_predictor.simulation.program import Program
from kernel_models.collectives import (
    CollectiveCall,
    CollectiveKind,
    CollectiveModel,
    CommTimes,
    Placement,
    Topology,
    price_calls,
)
from kernel_models.collectives.readers.traces import element_bytes, kind_of, payload_bytes
from kernel_models.device import DeviceSpec
from tracer.arrays import Float64, Int64
from tracer.decode import list_of
from tracer.graph import NONE, ExecutionGraph, KernelKind


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One collective of a job: its call, its kernels as (position of the rank, kernel row), and its recorded
    transfer."""

    call: CollectiveCall
    members: tuple[tuple[int, int], ...]
    recorded_ns: int
    alone: bool
    """Only one rank was recorded: its recorded time has waiting in it."""


def find_collectives(built: Built, on: Topology) -> tuple[list[RecordedCollective], int]:
    """The job's collectives whose call is known, and how many kernels of others there are."""
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
    """The call of one collective's kernels, (position of the rank, kernel row) each, on a cluster, else on one node;
    ``None`` where nothing tells what it moves."""
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
    """Ranks of a group as a trace lists them; none where the list is cut off or names one twice."""
    found = list_of(text)
    if not all(type(rank) is int and rank >= 0 for rank in found):
        return []
    return found if len(set(found)) == len(found) else []


def with_transfers(built: Built, collectives: Sequence[RecordedCollective], time_us: npt.ArrayLike) -> Program:
    """Return the job's program whose collectives' kernels, but for waiting, take other times (µs, one a collective)."""
    duration: Int64 = built.program.kernel_duration.copy()
    for collective, value in zip(collectives, np.asarray(time_us, np.float64).tolist(), strict=True):
        for position, kernel in collective.members:
            duration[int(built.program.kernel_ptr[position]) + kernel] = round(value * 1e3)
    return built.program.with_durations(duration)


def price_table(graph: ExecutionGraph, spec: DeviceSpec, model: CollectiveModel | None) -> CommTimes:
    """Price every row of a graph's collectives, recorded or traced by shapes.

    Args:
        spec: the graph's device.
        model: the cluster; without one collectives run over the device's own links. So does always what is of no known
            kind: its bytes are sent once.
    """
    calls = table_calls(graph, model)
    known = np.array([call is not None for call in calls], np.bool_)
    times = CommTimes.empty(len(calls))
    times.put(known, price_calls([call for call in calls if call is not None], model or spec))
    unknown = [_of_no_kind(graph, row) for row in np.flatnonzero(~known).tolist()]
    times.put(~known, price_calls(unknown, spec))
    return times


def payload_ratios(graph: ExecutionGraph, rows: Sequence[int], payload: Sequence[float], spec: DeviceSpec) -> Float64:
    """Return the price of rows of a graph's collectives with ``payload`` times as many bytes over that with their own.

    The clusters' latencies and rates are those of the device's own links. 1 where nothing tells what is moved.
    """
    found = table_calls(graph, None)
    calls = [found[row] or _of_no_kind(graph, row) for row in rows]
    more = [replace(call, payload_bytes=call.payload_bytes * times) for call, times in zip(calls, payload, strict=True)]
    old, new = (price_calls(each, spec).time_us for each in (calls, more))
    return np.divide(new, old, out=np.ones(len(old)), where=old > 0)


def table_calls(graph: ExecutionGraph, model: CollectiveModel | None) -> list[CollectiveCall | None]:
    """Return the call of every row of a graph's collectives; ``None`` where nothing tells what it moves."""
    on = None if model is None else model.topology
    return [recorded_call([graph], [{row: row}], [(0, row)], on) for row in range(len(graph.collectives))]


def _of_no_kind(graph: ExecutionGraph, row: int) -> CollectiveCall:
    """A collective of an unknown kind or size: what is known of its bytes is sent once."""
    table = graph.collectives
    dtype, width = element_bytes(graph, table, row)
    elements = max(int(table.elements_in[row]), int(table.elements_out[row]), 1)
    return CollectiveCall(CollectiveKind.BROADCAST, float(elements * width), Placement((2,)), dtype)
