"""Device work of a shape-only step by models alone: what its operations and collectives cost where nothing measured
stands for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from graph_predictor.synthesis.operation_times import COMMUNICATION_STREAM, DeviceWork
from kernel_models.device import DeviceSpec
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import placed_calls
from kernel_models.pricing import Models, price, sustained
from tracer.graph import NONE, ExecutionGraph, KernelKind

if TYPE_CHECKING:
    from kernel_models.collectives import CollectiveModel

LEAST_US = 1e-3
"""Least time of a collective whose interval is a ratio, µs: those that launch nothing take no time."""
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
    priced = sustained(price(every, spec, models), spec)
    ns = (priced.times_us * 1e3).tolist()
    source = priced.source[priced.index].tolist()
    # A step has many kernels of a family: what each errs by on its own averages out.
    low = (priced.common * np.log(priced.low_us / priced.time_us))[priced.index].tolist()
    high = (priced.common * np.log(priced.high_us / priced.time_us))[priced.index].tolist()
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
    if not len(graph.collectives):
        return {}
    from graph_predictor.comm.recorded_calls import price_table
    from kernel_models.collectives import Level

    table, times = graph.collectives, price_table(graph, spec, collectives)
    us = np.maximum(times.time_us, LEAST_US)
    low, high = (np.log(np.maximum(end, LEAST_US) / us).tolist() for end in (times.low_us, times.high_us))
    return {row: DeviceWork(f"collective: {graph.string(int(table.kind[row]))}", KernelKind.COLLECTIVE,
                            float(times.time_us[row] * 1e3), COMMUNICATION_STREAM, collective=row,
                            source=Level(level).source, low=low[row], high=high[row])
            for row, level in enumerate(times.level.tolist())}
