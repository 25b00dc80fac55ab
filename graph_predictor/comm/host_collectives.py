"""Collectives of a backend that works on the host (gloo), represented as device work is: on a stream each of its
threads.

::

    main      |c10d::allreduce_|  backward ...      |    waits    |  optimizer
    gloo 1           |~~~~~~~ all_reduce: waits for the others ===|

Nothing is launched and nothing runs on a device, but the recording shows the same three things: the call that asked for
the collective, the range in which the backend's thread was at it, and the time in which the host's thread did nothing
until it was over. As a launch, a kernel and a blocking call they go through everything that ranks' meetings go through:
matching, waiting for the last rank, what is exposed, the critical path across ranks. Only reports of recorded jobs look
at a job this way.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

import numpy as np

from graph_predictor.simulation.host_time import exclusive_time
from graph_predictor.simulation.rendezvous import HOST_RANGE
from tracer.arrays import Int64
from tracer.graph import NONE, ExecutionGraph, KernelKind, LaunchKind, Table

WAIT = "wait for a collective"
"""Name of the blocking calls."""
CALL_NS = 1_000
"""Assumed time of the call that hands a collective over, at the begin of its operation."""
WAITS = ("wait_tensor", "c10d::barrier", "c10d::monitored_barrier_")
"""Ends of the names of operations that wait for a collective themselves."""

SomeTable = TypeVar("SomeTable", bound=Table)


def with_host_collectives(graph: ExecutionGraph) -> ExecutionGraph:
    """Return the graph with the collectives of host backends as device work; itself where it has none."""
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
    """Return whether all device work of a graph is collectives of the host, as ``with_host_collectives`` tells them."""
    names = np.unique(graph.kernels.name).tolist()
    return bool(names) and all(graph.string(name).startswith(HOST_RANGE) for name in names)


def _matched(graph: ExecutionGraph) -> tuple[Int64, Int64]:
    """Rows of ``collectives`` and of ``ops``: each call and the range that did it. A backend takes calls in order."""
    ops, table = graph.ops, graph.collectives
    codes = [code for code, text in enumerate(graph.strings) if text.startswith(HOST_RANGE)]
    ranges = np.flatnonzero(np.isin(ops.name, codes))
    rows = np.flatnonzero((table.kernel < 0) & (table.op >= 0))
    ranges = ranges[np.argsort(ops.start_ns[ranges], kind="stable")]
    rows = rows[np.argsort(ops.start_ns[table.op[rows]], kind="stable")]
    calls, found = [], []
    at = 0
    for row in rows.tolist():
        # A range that began before was asked for before the recording.
        while at < len(ranges) and ops.start_ns[ranges[at]] < ops.start_ns[table.op[row]]:
            at += 1
        if at == len(ranges):
            break
        calls.append(row)
        found.append(int(ranges[at]))
        at += 1
    return np.array(calls, np.int64), np.array(found, np.int64)


def _waits(graph: ExecutionGraph, threads: Int64, begin: Int64, end: Int64) -> tuple[Int64, Int64, Int64]:
    """Thread, begin and end of the time in which host threads did nothing until a collective was over.

    That is time in no operation, or in one that waits, up to the last end of a collective in it.
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
    """Rows of two tables, one after the other."""
    return type(one)(**{field.name: np.concatenate([getattr(one, field.name), getattr(other, field.name)])
                        for field in fields(one)})
