"""What a user shards: a file of tables, a workload of the suite with tables, or a trace or capture of a step that looks
rows up; with the work outside the look-ups where it is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graph_predictor.sharding.problem import DenseWork
from graph_predictor.synthesis.modelled import calls_by_operation
from kernel_models.device import DeviceSpec
from kernel_models.device_choice import shape_device
from kernel_models.op_call import Family, OpCall
from kernel_models.pricing import Models, price
from tracer.graph import ExecutionGraph, Phase
from tracer.input_file import open_input
from tracer.job import read_job
from tracer.lookup_data.files import read_tables
from tracer.lookup_data.noted import tables_of
from tracer.lookup_data.plan_file import ShardingError
from tracer.lookup_data.tables import EmbeddingTable
from tracer.memory_account import MemoryAccount

FILES = (".csv", ".parquet", ".toml", ".json")
BATCH = 2048
"""Samples of a rank where nothing says how many."""
FUSED_OPTIMIZER = "rowwise_adagrad"
"""Of tables whose source does not say: what TorchRec's examples train with."""
_FEWEST_ROWS = 8
_PEEKED = 1 << 16
BOTTOM = ("bottom", "bot")
"""Parts of the module names of what runs beside the look-ups' exchange."""


@dataclass(frozen=True, slots=True)
class ShardingSource:
    """Tables and, where it is known, the rest of the step.

    Attributes:
        name: for reports.
        tables: of the model.
        samples: of a batch on one rank.
        dense: work outside the look-ups.
        notes: what was assumed.
    """

    name: str
    tables: tuple[EmbeddingTable, ...]
    samples: int
    dense: DenseWork
    notes: tuple[str, ...] = ()


def sharding_source(source: str, device: DeviceSpec, models: Models | None = None, *, samples: int | None = None,
                    preset: str | None = None, settings: Sequence[str] = ()) -> ShardingSource:
    """Read what is to be sharded.

    Args:
        source: a workload's name, a file of tables, or a trace or capture.
        device: the dense part is traced for it and priced on it.
        samples: of a rank; by default the source's own, for a file ``BATCH``.
        preset, settings: of the workload.

    Raises:
        ForetraceError: it cannot be read, or has no tables.
    """
    from tracer import workloads

    if source in workloads.names():
        return _of_workload(source, device, models, samples, preset, settings)
    if preset is not None or settings:
        raise ShardingError(f"{source} is no workload of the suite, and --preset and --set belong to one; leave them "
                            "out.")
    if Path(source).suffix.lower() in FILES and not _is_trace(source):
        count = samples or BATCH
        notes = [] if samples else [f"A rank's batch is taken to have {BATCH:,} samples; give --batch where it is "
                                    "known."]
        notes.append("Only tables are given: the step is their look-ups and exchanges, without a dense part.")
        return ShardingSource(Path(source).name, tuple(read_tables(source)), count, DenseWork(), tuple(notes))
    return _of_trace(source, device, models, samples)


def _is_trace(path: str) -> bool:
    if not path.lower().endswith(".json"):
        return False
    try:
        with open_input(path) as stream:
            return b'"traceEvents"' in stream.read(_PEEKED)
    except OSError:
        return False


def _of_workload(name: str, device: DeviceSpec, models: Models | None, samples: int | None, preset: str | None,
                 settings: Sequence[str]) -> ShardingSource:
    from tracer import workloads

    sized = [*settings, *([f"batch={samples}"] if samples else [])]
    found = workloads.parse(name, sized, preset=preset or "default")
    tables = getattr(found, "embedding_tables", None)
    if tables is None:
        raise ShardingError(f"The workload {name} has no embedding tables; dlrm has.")
    # The tables' own optimizer would run over all their rows: traced with a few rows, the rest of the step is the same.
    small = workloads.parse(name, [*[each for each in sized if not each.startswith(("rows=", "sharding="))],
                                   f"rows={_FEWEST_ROWS}"], preset=preset or "default")
    from tracer.shape_only import trace_workload

    graph = trace_workload(small, shape_device(device))
    return ShardingSource(f"{name} {preset or 'default'}", _trained(tables()), found.samples_per_step,
                          dense_of(graph, device, models),
                          (f"The tables are trained with {FUSED_OPTIMIZER.replace('_', '-')}, fused into the look-ups' "
                           "gradient.",))


def _of_trace(source: str, device: DeviceSpec, models: Models | None, samples: int | None) -> ShardingSource:
    graph = read_job([source]).graphs[0]
    workload = graph.meta.workload
    if workload:
        values = [f"{key}={value}" for key, value in workload["settings"].items() if key in (
            "batch", "tables", "rows", "embedding", "pooling", "dense", "width", "depth", "skew", "columns_halved",
            "bags_halved")]
        found = _of_workload(workload["name"], device, models, samples, None, values)
        noted = tables_of(graph)
        same = len(noted) == len(found.tables)
        return ShardingSource(f"{workload['name']} of {source}", _trained(noted) if same else found.tables,
                              found.samples, found.dense, found.notes)
    tables = tables_of(graph)
    if not tables:
        raise ShardingError(f"{source} says of no embedding table how it is looked up; give a file of tables, or a "
                            "capture made with --indices.")
    if samples is None:
        raise ShardingError(f"{source} does not say how many samples its batch has; give --batch.")
    return ShardingSource(source, _trained(tables), samples, dense_of(graph, device, models),
                          ("The optimizer's time of the recorded step is left out: it runs over the tables too.",))


def _trained(tables: Sequence[EmbeddingTable]) -> tuple[EmbeddingTable, ...]:
    """The tables with an optimizer that can be fused, where they have none of their own."""
    from dataclasses import replace

    return tuple(replace(table, optimizer=FUSED_OPTIMIZER) if table.optimizer == "none" else table for table in tables)


def dense_of(graph: ExecutionGraph, device: DeviceSpec, models: Models | None) -> DenseWork:
    """The work of a graph's last step outside its look-ups, priced on a device."""
    ops = graph.ops
    rows = np.flatnonzero(ops.step == ops.step.max(initial=-1))
    calls: dict[str, list[OpCall]] = {name: [] for name in (
        "bottom_forward", "bottom_backward", "top_forward", "top_backward", "optimizer")}
    for op, each in calls_by_operation(graph, rows.tolist()).items():
        phase = int(ops.phase[op])
        if phase == Phase.OPTIMIZER:
            name = "optimizer"
        elif phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        else:
            path = graph.string(int(ops.module[op])).lower()
            part = "bottom" if any(word in path for word in BOTTOM) else "top"
            name = f"{part}_{'backward' if phase == Phase.BACKWARD else 'forward'}"
        calls[name] += [call for call in each if call.family is not Family.EMBEDDING]
    if not graph.meta.memory:  # recorded: an optimizer that runs over the tables too
        calls["optimizer"] = []
    every = [call for each in calls.values() for call in each]
    if not every:
        return DenseWork()
    whole = price(every, device, models)
    low, high = whole.total_interval_us()
    source = whole.source[whole.index]
    times, at = {}, 0
    for name, own in calls.items():
        times[name] = float(whole.times_us[at:at + len(own)].sum())
        at += len(own)
    memory = MemoryAccount.of_trace(graph.meta.memory) if graph.meta.memory else MemoryAccount()
    return DenseWork(**times, low=low, high=high, gradient_bytes=float(memory.parameters),
                     memory_bytes=float(memory.total),
                     sources={int(one): float(whole.times_us[source == one].sum()) for one in np.unique(source)})
