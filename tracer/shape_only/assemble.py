"""The assembly of an ``ExecutionGraph`` from the recorder's notes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tracer.graph import (
    NONE,
    SHAPE_ONLY,
    AllocationTable,
    CollectiveTable,
    ExecutionGraph,
    GapTable,
    KernelTable,
    LaunchTable,
    LossReport,
    Meta,
    OpKind,
    OpTable,
    OverheadTable,
    StepSource,
    StepTable,
    SyncTable,
    Thread,
    WaitSource,
    string_coder,
)

if TYPE_CHECKING:
    from tracer.shape_only.recorder import OperatorRecorder


def assemble(recorder: OperatorRecorder, meta: Meta) -> ExecutionGraph:
    """The graph of the recorded steps: operations 1 ns apart, without durations, launches or device work."""
    columns = recorder.columns
    count = len(columns)
    ops = OpTable.empty(count)
    for name, values in columns.ints.items():
        getattr(ops, name)[:] = np.array(values, np.int64)
    ops.kind[:] = OpKind.OPERATION
    ops.thread[:] = 0
    ops.start_ns[:] = np.arange(count)
    ops.duration_ns[:] = 0
    ops.forward_thread[:] = NONE
    ops.external_id[:] = np.arange(count)
    graph = ExecutionGraph(
        strings=list(columns.strings), threads=[Thread("0", "0", "the traced function")], ops=ops,
        launches=LaunchTable.empty(), kernels=KernelTable.empty(), collectives=CollectiveTable.empty(),
        syncs=SyncTable.empty(), gaps=GapTable.empty(), steps=_steps(recorder.step_ends, recorder.step_calls),
        overheads=OverheadTable.empty(), meta=meta)
    code_of = string_coder(graph)
    graph.steps.name[:] = [code_of(f"ProfilerStep#{i}") for i in range(len(recorder.step_ends))]
    graph.collectives = _collectives(recorder, code_of)
    graph.allocations = _allocations(recorder)
    meta.era = SHAPE_ONLY
    meta.window_ns = count
    meta.step_source = int(StepSource.PROFILER_STEP)
    return graph


def _allocations(recorder: OperatorRecorder) -> AllocationTable:
    changes = np.array(recorder.tracker.changes(), np.int64).reshape(-1, 4)
    table = AllocationTable.empty(len(changes))
    table.op[:] = table.start_ns[:] = changes[:, 0]
    table.address[:], table.bytes[:], table.holds[:] = changes[:, 1], changes[:, 2], changes[:, 3]
    table.total_bytes[:] = np.cumsum(changes[:, 2])
    table.thread[:], table.device[:] = 0, 0
    return table


def _steps(ends: list[int], calls: list[int]) -> StepTable:
    table = StepTable.empty(len(ends))
    table.start_ns[:] = [0, *ends[:-1]]
    table.duration_ns[:] = np.diff(np.array([0, *ends]))
    table.thread[:] = 0
    table.python_calls[:] = calls
    return table


def _collectives(recorder: OperatorRecorder, code_of: Any) -> CollectiveTable:
    rows = recorder.notes.rows
    table = CollectiveTable.empty(len(rows))
    order: dict[str, int] = {}
    for i, (row, op) in enumerate(zip(rows, recorder.collective_ops, strict=True)):
        place = order.get(row["group"], 0)
        order[row["group"]] = place + 1
        asynchronous = row["async"]
        values = {
            "op": op, "kind": code_of(row["kind"]), "group": code_of(row["group"]),
            "ranks": code_of(json.dumps(row["ranks"])) if row["ranks"] else NONE, "dtype": code_of(row["dtype"]),
            "elements_in": row["elements_in"], "elements_out": row["elements_out"],
            "group_size": len(row["ranks"]) if row["ranks"] else NONE, "order": place,
            "is_async": NONE if asynchronous is None else int(asynchronous),
            "wait_op": recorder.waits.first.get(i, NONE), "wait_source": int(WaitSource.MODELLED),
        }
        for name, value in values.items():
            getattr(table, name)[i] = value
    return table


def new_meta(device: str, capability: tuple[int, int], rank: int, world_size: int) -> Meta:
    """Return what is known of the traced step before it runs."""
    import torch

    return Meta(device=device, device_count=1, compute_capability=".".join(map(str, capability)) if any(capability)
                else "", rank=rank, world_size=world_size, torch_version=str(torch.__version__), loss=LossReport())
