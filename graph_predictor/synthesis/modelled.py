"""Device work of a shape-only step by models alone: what its operations and collectives cost where nothing measured
stands for them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from graph_predictor.comm.collective_times import CollectiveModel, price_table
from graph_predictor.synthesis.operation_times import COMMUNICATION_STREAM, DeviceWork
from kernel_models.device import DeviceSpec
from kernel_models.dtypes import itemsize, short_dtype
from kernel_models.model import Source
from kernel_models.op_call import Family, OpCall
from kernel_models.placed import placed_calls
from kernel_models.pricing import Models, price
from kernel_models.spreads import RING_COLLECTIVES
from tracer.graph import NONE, ExecutionGraph, KernelKind

RING_EFFICIENCY = 0.75
COLLECTIVE_ALPHA_NS = 20_000.0
"""A collective by a ring over the device's links: the share of the data sheet's rate, and a fixed cost; assumptions."""
_COPIES = {("h2d", "pageable"): "Memcpy HtoD (Pageable -> Device)", ("h2d", "pinned"): "Memcpy HtoD (Pinned -> Device)",
           ("d2h", "pageable"): "Memcpy DtoH (Device -> Pageable)", ("d2h", "pinned"): "Memcpy DtoH (Device -> Pinned)"}
"""Names of copies as CUDA reports them: a call waits for those with pageable memory (see ``rank_view``)."""


def calls_by_operation(graph: ExecutionGraph, rows: Iterable[int]) -> dict[int, tuple[OpCall, ...]]:
    """The calls of operations of a shape-only graph; equal ones are looked at once."""
    known: dict[tuple[int, ...], tuple[OpCall, ...]] = {}
    ops = graph.ops
    columns = (ops.name, ops.shapes, ops.dtypes, ops.strides, ops.scalars, ops.place)
    found = {}
    for op in rows:
        key = tuple(int(column[op]) for column in columns)
        if key not in known:
            known[key] = placed_calls(graph, op)
        found[op] = known[key]
    return found


def modelled_works(calls: dict[int, tuple[OpCall, ...]], spec: DeviceSpec, models: Models | None) -> dict[
        int, list[DeviceWork]]:
    """Device work of operations by their calls, each of which becomes one kernel."""
    every = [call for of in calls.values() for call in of]
    if not every:
        return {op: [] for op in calls}
    priced = price(every, spec, models)
    ns = (priced.times_us * 1e3).tolist()
    source = priced.source[priced.index].tolist()
    low = np.log(priced.low_us / priced.time_us)[priced.index].tolist()
    high = np.log(priced.high_us / priced.time_us)[priced.index].tolist()
    found: dict[int, list[DeviceWork]] = {}
    at = 0
    for op, of in calls.items():
        found[op] = [_work(call, ns[i], source[i], low[i], high[i]) for i, call in enumerate(of, at)]
        at += len(of)
    return found


def _work(call: OpCall, ns: float, source: int, low: float, high: float) -> DeviceWork:
    copy = _COPIES.get((call.kind, "pageable" if "pageable" in call.flags else "pinned")) if (
        call.family is Family.TRANSFER) else None
    if copy is None:
        return DeviceWork(f"{call.family.value}: {call.kind} {call.dtype}", KernelKind.COMPUTE, ns, source=source,
                          low=low, high=high)
    return DeviceWork(copy, KernelKind.MEMCPY, ns, moved=call.dims[0] if call.dims else NONE, source=source, low=low,
                      high=high, in_call="-> Pageable" in copy)


def collective_works(graph: ExecutionGraph, spec: DeviceSpec, collectives: CollectiveModel | None) -> dict[
        int, DeviceWork]:
    """Device work of each row of the rank's collectives."""
    table = graph.collectives
    found = {row: DeviceWork(f"collective: {graph.string(int(table.kind[row]))}", KernelKind.COLLECTIVE,
                             ring_ns(graph, row, spec), COMMUNICATION_STREAM, collective=row, source=Source.DATASHEET,
                             low=-RING_COLLECTIVES, high=RING_COLLECTIVES) for row in range(len(table))}
    if collectives is not None and found:
        priced = price_table(graph, collectives)
        for row in np.flatnonzero(priced.known).tolist():
            work = found[row]
            work.ns, work.source = float(priced.ns[row]), int(priced.source[row])
            work.low, work.high = float(priced.low[row]), float(priced.high[row])
    return found


def ring_ns(graph: ExecutionGraph, row: int, spec: DeviceSpec, payload: float = 1.0) -> float:
    """A collective over one node's links: every byte goes (n-1)/n times, twice for an all-reduce; ``payload`` times as
    many bytes as the graph says."""
    table = graph.collectives
    size = int(table.group_size[row])
    n = size if size > 0 else max(graph.meta.world_size, 1)
    bandwidth = max(spec.peer_gbps, spec.host_gbps, 1.0) * RING_EFFICIENCY
    rounds = 2.0 if graph.string(int(table.kind[row])) == "all_reduce" else 1.0
    return COLLECTIVE_ALPHA_NS + rounds * (n - 1) / n * payload * collective_bytes(graph, row) / bandwidth


def collective_bytes(graph: ExecutionGraph, row: int) -> int:
    """Bytes of the larger of what a rank gives and gets."""
    table = graph.collectives
    elements = max(int(table.elements_in[row]), int(table.elements_out[row]), 0)
    return elements * itemsize(short_dtype(graph.string(int(table.dtype[row]))) or "fp32")
