"""``RecordedStep``: a recorded step of a job with embedding tables, divided into parts that a sharding changes and
parts that stay.

::

    GPU     |look-ups|..all-to-all..|dense|.all-to-all.|look-ups' gradients|      |   . collectives that overlap
    part     forward     waited      dense    waited         backward        host     nothing; host: nothing runs at all

On a CPU, operations take the place of kernels, with the self time of each; host time is time outside operations. Other
work on tables (a division of gradients, the optimizer's pass) belongs to the backward. It is recognised by tensors with
the shape of a table or of its sparse gradient. A collective's CPU time is part of the collective.

``sharding_source`` reads the tables from a file, from a workload of the suite, or from a trace or capture of a step
with look-ups. Work outside the look-ups is included if it is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import ceil
from pathlib import Path

import numpy as np

from graph_predictor.comm.recorded_calls import with_host_collectives
from graph_predictor.prediction.predictor import Baseline, recorded_device
from graph_predictor.synthesis.baseline import baseline_of
from graph_predictor.synthesis.step import calls_by_operation
from kernel_models.device import DeviceSpec, find_device, shape_device
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import Operation, calls_of
from kernel_models.pricing import Models, price
from planner.sharding.problem import DenseWork
from tracer import workloads
from tracer.arrays import Bool, Float64, Int64
from tracer.columns import nearest, union_ns
from tracer.device_memory import MemoryAccount
from tracer.graph import NONE, SHAPE_ONLY, ExecutionGraph, KernelKind, Phase
from tracer.input_file import open_input
from tracer.job import Job, read_job
from tracer.lookup_data.files import read_tables
from tracer.lookup_data.noted import BACKWARD, find_lookups, tables_of
from tracer.lookup_data.plan_file import ShardingError, ShardKind, TableSharding
from tracer.lookup_data.tables import QUANTIZED, EmbeddingTable
from tracer.workloads.places import shardings_of

COLLECTIVE_NAMES = ("c10d::", "record_param_comms", "nccl:", "gloo:", "_c10d_functional::")
"""Prefixes of operation names that are collectives."""


class StepPart(IntEnum):
    """The part of a step that an operation belongs to."""

    DENSE_FORWARD = 0
    DENSE_BACKWARD = 1
    OPTIMIZER = 2
    LOOKUPS = 3
    GRADIENTS = 4
    COLLECTIVE = 5
    NOTHING = 6


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step of a job, µs.

    Attributes:
        device: the device that ran it; ``None`` if unknown.
        step: its time, without waiting for ranks that were late for reasons other than their work.
        parts: time in each ``StepPart`` [parts, ranks]; each moment belongs to at most one part.
        exchanged: transfer time of all collectives, each from the arrival of its last rank.
        host: time in which the device was idle, or collectives took longer than their transfers.
    """

    device: DeviceSpec | None
    step: float
    parts: Float64
    exchanged: float
    host: float

    def mean(self, part: StepPart) -> float:
        """Return the mean of a part over the ranks, µs."""
        return float(self.parts[part].mean())


def recorded_step(job: Job) -> RecordedStep:
    """Divide a recorded job's typical step into its parts. Raises ``ForetraceError`` if it has no step."""
    found = baseline_of([with_host_collectives(graph) for graph in job.graphs])
    scenario = found.scenario
    on_host = scenario.built.computes_on_host
    steps, waited, host = [], [], []
    parts = np.zeros((len(StepPart), len(job.graphs)))
    for rank, graph in enumerate(scenario.built.graphs):
        part = np.append(parts_of(graph), StepPart.NOTHING)
        length = float(scenario.cycle.recorded_ns(rank).mean()) if scenario.profiled else float(found.measured_ns or 0)
        parts[:, rank], alone = (_of_host if on_host else _of_device)(found, rank, part, length)
        steps.append(length / 1e3)
        waited.append(alone)
        host.append(float(parts[StepPart.NOTHING, rank]))
    # The rank with the least time in collectives waits for no other rank.
    first = int(np.argmin(waited))
    # Transfers of all collectives of a step, each from the arrival of its last rank.
    built, cycle = scenario.built, scenario.cycle
    exchanged = sum(ns for members, ns in zip(built.rendezvous.groups, built.rendezvous.intrinsic_ns, strict=True)
                    if cycle.kernel[int(built.program.kernel_ptr[members[0][0]]) + members[0][1]]) / cycle.steps / 1e3
    return RecordedStep(scenario.devices.source, steps[first], parts, min(exchanged, waited[first]) if on_host
                        else exchanged, host[first] + max(waited[first] - exchanged, 0.0))


def parts_of(graph: ExecutionGraph) -> Int64:
    """Return the ``StepPart`` of every operation of a graph."""
    ops = graph.ops
    own = find_lookups(graph)
    found = np.full(len(ops), StepPart.DENSE_FORWARD, np.int64)
    found[ops.phase == Phase.BACKWARD] = StepPart.DENSE_BACKWARD
    found[ops.phase == Phase.OPTIMIZER] = StepPart.OPTIMIZER
    weights = [each for each in own if len(each.shape) == 2]
    tables = {each.shape for each in weights}
    # Sparse gradients have a row for each look-up; with one look-up a sample, other tensors have this shape too.
    tables |= {(each.lookups, each.shape[1]) for each in weights if each.lookups > each.bags}
    shaped = _with_shapes(graph, tables) & (ops.phase != Phase.FORWARD)
    found[shaped] = StepPart.GRADIENTS
    rows = np.array([row for each in own for row, _ in each.rows], np.int64)
    known: Bool = np.zeros(len(ops), np.bool_)
    known[rows] = True
    around = nearest(ops.parent, known, np.arange(len(ops)))
    gradient = np.array([*(text in BACKWARD for text in graph.strings), False], np.bool_)[ops.name]
    inside = around >= 0
    found[inside] = np.where(gradient[around[inside]] | (ops.phase[inside] == Phase.BACKWARD), StepPart.GRADIENTS,
                             StepPart.LOOKUPS)
    named = np.array([*(text.startswith(COLLECTIVE_NAMES) for text in graph.strings), False], np.bool_)[ops.name]
    found[nearest(ops.parent, named, np.arange(len(ops))) >= 0] = StepPart.COLLECTIVE
    return found


def _with_shapes(graph: ExecutionGraph, shapes: set[tuple[int, ...]]) -> Bool:
    """Return which operations have a tensor of one of these shapes among their arguments."""
    ops = graph.ops
    codes, of_code = np.unique(ops.shapes, return_inverse=True)
    first = np.zeros(len(codes), np.int64)
    first[of_code] = np.arange(len(ops))
    known = np.array([any(argument.shape is not None and tuple(argument.shape) in shapes
                          for argument in graph.arguments(int(row))) for row in first.tolist()], np.bool_)
    return known[of_code] if len(codes) else np.zeros(len(ops), np.bool_)


def _of_host(found: Baseline, rank: int, part: Int64, length_ns: float) -> tuple[Float64, float]:
    """Return the self time of each part on a CPU, and the collectives' time in the step, µs."""
    slices, cycle = found.scenario.slices, found.scenario.cycle
    mine = (slices.rank == rank) & cycle.working[slices.item]
    ns = found.scenario.host_times()[mine]
    times = np.bincount(part[slices.op[mine]], weights=ns, minlength=len(StepPart)) / cycle.steps / 1e3
    others = float(times.sum() - times[StepPart.COLLECTIVE])
    # Work differs between steps, so the difference may be too small: collectives take at least their own calls.
    return times, max(length_ns / 1e3 - others, float(times[StepPart.COLLECTIVE]))


def _of_device(found: Baseline, rank: int, part: Int64, length_ns: float) -> tuple[Float64, float]:
    """Return the device time of each part, and the time of collectives that overlap nothing, µs."""
    scenario, graph = found.scenario, found.built.graphs[rank]
    low, high = (int(end) for end in scenario.built.program.kernel_ptr[rank:rank + 2])
    rows = np.flatnonzero(scenario.cycle.kernel[low:high])
    kernels = graph.kernels
    start, end = kernels.start_ns[rows], kernels.start_ns[rows] + kernels.duration_ns[rows]
    collective = kernels.kind[rows] == KernelKind.COLLECTIVE
    of_kernel = part[np.where(kernels.op[rows] < 0, NONE, kernels.op[rows])]
    group = scenario.work.kernel_group[low:high][rows]
    for i in np.flatnonzero(group >= 0).tolist():  # fused look-ups are recognised by device work
        calls = scenario.work.calls[int(scenario.work.call_row[group[i]])]
        if calls and calls[0].family is Family.EMBEDDING:
            of_kernel[i] = StepPart.GRADIENTS if "backward" in calls[0].kind else StepPart.LOOKUPS
    of_kernel[~collective & (of_kernel >= StepPart.COLLECTIVE)] = StepPart.DENSE_FORWARD
    times = np.bincount(of_kernel[~collective], weights=(end - start)[~collective], minlength=len(StepPart))
    # The ``active_ns`` of reports leaves out collectives, whose time alone is needed here.
    busy, active = union_ns(start[~collective], end[~collective]), union_ns(start, end)
    times = times * (busy / max(times.sum(), 1.0))  # of no kernel, counts are whole numbers
    steps = scenario.cycle.steps
    times[StepPart.NOTHING] = max(length_ns * steps - active, 0.0)
    return times / steps / 1e3, (active - busy) / steps / 1e3


def collective_bytes(graph: ExecutionGraph, kind: str) -> float:
    """Return the input bytes of a step's collectives of one kind, with 4 bytes an element."""
    table = graph.collectives
    rows = [i for i, code in enumerate(table.kind.tolist()) if graph.string(int(code)) == kind]
    return 4.0 * float(sum(max(int(table.elements_in[i]), 0) for i in rows)) / max(len(graph.steps), 1)


FILES = (".csv", ".parquet", ".toml", ".json")
DEFAULT_DEVICE = "h200-sxm"
BATCH = 2048
"""Default samples of a rank's batch."""
FUSED_OPTIMIZER = "rowwise_adagrad"
"""Default optimizer of tables: TorchRec's examples train with it."""
_FEWEST_ROWS, _PEEKED = 8, 1 << 16
"""Choices: rows of the tables with which a workload is traced, and bytes in which a file shows that it is a trace."""
BOTTOM = ("bottom", "bot")
"""Words in the names of modules that overlap the look-ups' exchange."""


@dataclass(frozen=True, slots=True)
class ShardingSource:
    """The tables to be sharded and, if known, the rest of the step.

    Attributes:
        name: for reports.
        tables: the model's tables.
        samples: samples of a batch on one rank.
        dense: work outside the look-ups.
        notes: assumptions.
        recorded: the recorded step; ``None`` if the source is no recording.
        fused: whether one kernel looks up all tables of a rank and its backward trains them; false for recorded
            ``nn.EmbeddingBag``.
    """

    name: str
    tables: tuple[EmbeddingTable, ...]
    samples: int
    dense: DenseWork
    notes: tuple[str, ...] = ()
    recorded: RecordedSharding | None = None
    fused: bool = True


@dataclass(frozen=True, slots=True)
class RecordedSharding:
    """A recorded step of a job with tables, and how it was sharded.

    Attributes:
        step: the parts of the step.
        shardings: sharding of each table in the recording; ``None`` if unknown or not possible in a plan.
        ranks: number of ranks of the job.
        samples: samples of a batch on one rank.
        dense: modelled work outside the look-ups, on the recorded device and with the recorded batch.
        pipelined: whether the recording says that the next batch's indices were exchanged during the step.
    """

    step: RecordedStep
    shardings: tuple[TableSharding, ...] | None
    ranks: int
    samples: int
    dense: DenseWork
    pipelined: bool = False


def device_of(source: str) -> DeviceSpec:
    """Return the device of a recorded source; ``DEFAULT_DEVICE`` for other sources or an unknown device.

    Raises:
        ForetraceError: the source cannot be read.
    """
    found = None
    if source not in workloads.names() and not (Path(source).suffix.lower() in FILES and not _is_trace(source)):
        found = recorded_device(read_job([source]).graphs[0])
    return found or find_device(DEFAULT_DEVICE)


def sharding_source(source: str, device: DeviceSpec, models: Models | None = None, *, samples: int | None = None,
                    preset: str | None = None, settings: Sequence[str] = (),
                    step_region: str | None = None) -> ShardingSource:
    """Read the tables to be sharded and the rest of their step.

    Args:
        source: a workload's name, a file of tables, or a trace or capture.
        device: the device for which the dense part is traced and priced.
        samples: samples of a rank; by default the source's own, for a file ``BATCH``.
        preset, settings: preset and settings of the workload.
        step_region: name of the regions that are steps of a trace or capture.

    Raises:
        ForetraceError: the source cannot be read, or has no tables.
    """
    tables = Path(source).suffix.lower() in FILES and not _is_trace(source)
    if step_region is not None and (source in workloads.names() or tables):
        raise ShardingError(f"{source} is no recording, and --step-region names the steps of one; leave it out.")
    if source in workloads.names():
        return _of_workload(source, device, models, samples, preset, settings)
    if preset is not None or settings:
        raise ShardingError(f"{source} is no workload of the suite, and --preset and --set belong to one; leave them "
                            "out.")
    if tables:
        count = samples or BATCH
        notes = [] if samples else [f"A rank's batch is taken to have {BATCH:,} samples; give --batch where it is "
                                    "known."]
        notes.append("Only tables are given: the step is their look-ups and exchanges, without a dense part.")
        return ShardingSource(Path(source).name, tuple(read_tables(source)), count, DenseWork(), tuple(notes))
    return _of_trace(source, device, models, samples, step_region)


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
    if samples and any(text.strip().startswith("batch=") for text in settings):
        raise ShardingError("--batch and --set batch= both say how many samples a rank has; give one of them.")
    sized = [*settings, *([f"batch={samples}"] if samples else [])]
    found = workloads.parse(name, sized, preset=preset or "default")
    tables = found.embedding_tables()
    if not tables:
        raise ShardingError(f"The workload {name} has no embedding tables; dlrm has.")
    # A traced optimizer would pass over all rows of the tables. With few rows, only this work is missing.
    kept = [each for each in sized if not each.startswith(("rows=", "sharding=", "pipelined="))]
    small = workloads.parse(name, [*kept, f"rows={_FEWEST_ROWS}"], preset=preset or "default")
    from tracer.shape_only import trace_workload

    graph = trace_workload(small, shape_device(device))
    return ShardingSource(f"{name} {preset or 'default'}", _trained(tables), found.samples_per_step,
                          dense_of(graph, device, models),
                          (f"The tables are trained with {FUSED_OPTIMIZER.replace('_', '-')}, fused into the look-ups' "
                           "gradient.",))


def _of_trace(source: str, device: DeviceSpec, models: Models | None, samples: int | None,
              step_region: str | None) -> ShardingSource:
    job = read_job([source], step_region=step_region)
    step = None if any(graph.meta.era == SHAPE_ONLY for graph in job.graphs) else recorded_step(job)
    workload = job.graphs[0].meta.workload
    if workload:
        return _of_captured_workload(source, job, step, device, models, samples)
    tables, shardings, found = _tables_of_ranks(job)
    if not tables:
        raise ShardingError(f"{source} says of no embedding table how it is looked up; give a file of tables, or a "
                            "capture made with --lookups.")
    count = samples or found
    if not count:
        raise ShardingError(f"{source} does not say how many samples its batch has; give --batch.")
    ranks = max(job.world_size, len(job.graphs))
    gradients = collective_bytes(job.graphs[0], "all_reduce")
    dense = replace(dense_of(job.graphs[0], device, models), gradient_bytes=gradients)
    recorded = None
    if step is not None and step.device is not None:
        at = dense if step.device == device else replace(
            dense_of(job.graphs[0], step.device, None), gradient_bytes=gradients)
        recorded = RecordedSharding(step, shardings if len(job.graphs) == ranks else None, ranks, found or count, at)
    return ShardingSource(source, _trained(tables), count, dense, (
        "The optimizer's time of the recorded step is left out where it runs over the tables too.",
        *_TABLES_OF_RANKS[shardings is not None]), recorded)


def _of_captured_workload(source: str, job: Job, step: RecordedStep | None, device: DeviceSpec, models: Models | None,
                          samples: int | None) -> ShardingSource:
    workload, ranks = job.graphs[0].meta.workload, max(job.world_size, 1)
    values = [f"{key}={value}" for key, value in workload["settings"].items() if key in (
        "batch", "tables", "rows", "embedding", "pooling", "dense", "width", "depth", "skew", "columns_halved",
        "bags_halved")]
    found = _of_workload(workload["name"], device, models, samples, None, values)
    counted = {(table.name.rpartition(".")[2], table.rows, table.columns): table
               for graph in job.graphs for table in tables_of(graph)}
    tables = tuple(replace(each, name=table.name) if (each := counted.get((
        table.name.rpartition(".")[2], table.rows, table.columns))) is not None else table for table in found.tables)
    recorded = None
    if step is not None and step.device is not None:
        own = workloads.parse(workload["name"], values)
        text = workload["settings"].get("sharding") or "copy"
        shardings = tuple(shardings_of(own.embedding_tables(), text, ranks))
        at = _of_workload(workload["name"], step.device, models if step.device == device else None, None, None, values)
        recorded = RecordedSharding(step, shardings if len(job.graphs) == ranks else None, ranks, at.samples, at.dense,
                                    bool(workload["settings"].get("pipelined")))
    name = f"{workload['name']} of {source}"
    if step is not None and str(workload["settings"].get("sparse")).lower() == "true":
        trained = tuple(replace(table, optimizer=workload["settings"]["optimizer"].partition("-")[0])
                        for table in tables)
        return ShardingSource(name, trained, found.samples, found.dense, (_AS_RECORDED,), recorded, fused=False)
    return ShardingSource(name, _trained(tables), found.samples, found.dense, found.notes, recorded)


_AS_RECORDED = ("Tables are looked up one by one, with sparse gradients and an optimizer's step of their own, as they "
                "were recorded; --fused takes one kernel for a rank's tables instead.")


_TABLES_OF_RANKS = {False: (), True: (
    "Each rank has tables of its own, of which the trace tells rows and look-ups together: those of one look-up are "
    "taken to be equal.",)}


def _tables_of_ranks(job: Job) -> tuple[list[EmbeddingTable], tuple[TableSharding, ...] | None, int]:
    """Return the tables of all ranks, their shardings, and the samples of a rank (0 if unknown).

    A look-up that is equal on all ranks reads tables that every rank has; any other look-up reads a rank's own tables.
    Only noted tables have names. Without notes, the tables of one look-up are assumed to be equally large.
    """
    noted = {table.name: table for graph in job.graphs for table in tables_of(graph)}
    if noted or len(job.graphs) < 2:
        return list(noted.values()), None, 0
    looked: list[list[OpCall]] = []
    for graph in job.graphs:
        steps = {own.step for own in find_lookups(graph)}
        rows = [own.rows[0][0] for own in find_lookups(graph) if own.step == min(steps)]
        looked.append([call for row in rows for call in calls_of(Operation.from_graph(graph, row))
                       if call.family is Family.EMBEDDING and "backward" not in call.kind])
    everywhere = [call for call in looked[0] if all(call in each for each in looked)]
    ranks = len(job.graphs)
    tables: list[EmbeddingTable] = []
    shardings: list[TableSharding] = []
    samples = 0
    for rank, calls in enumerate(looked):
        for number, call in enumerate(calls):
            copied = call in everywhere
            if copied and rank:
                continue
            lookups, bags, rows_each, columns, count = call.dims
            samples = max(samples, bags // count // (1 if copied else ranks))
            bag = lookups / max(bags, 1)
            longest = ceil(bag * sum(1 / i for i in range(1, count + 1)))  # as in prices for unknown tables
            for i in range(count):
                tables.append(EmbeddingTable(f"rank{rank}.{number}.{i}", max(rows_each, 1), columns, bag=bag,
                                             longest_bag=longest))
                shardings.append(TableSharding(ShardKind.DATA_PARALLEL, tuple(range(ranks))) if copied else
                                 TableSharding(ShardKind.TABLE_WISE, (rank,)))
    return tables, tuple(shardings), samples


def _trained(tables: Sequence[EmbeddingTable]) -> tuple[EmbeddingTable, ...]:
    """Return the tables; those without an optimizer get ``FUSED_OPTIMIZER``, unless they are quantised."""
    return tuple(table if table.trained or table.dtype in QUANTIZED else replace(table, optimizer=FUSED_OPTIMIZER)
                 for table in tables)


def dense_of(graph: ExecutionGraph, device: DeviceSpec, models: Models | None) -> DenseWork:
    """Return the work of a graph's last step outside its look-ups, priced on a device.

    Work on tables, on their gradients and on tensors within the tables' module belongs to the look-ups.
    """
    ops = graph.ops
    rows = np.flatnonzero(ops.step == ops.step.max(initial=-1))
    part, within = parts_of(graph), _in_table_modules(graph)
    calls: dict[str, list[OpCall]] = {name: [] for name in (
        "bottom_forward", "bottom_backward", "top_forward", "top_backward", "optimizer", "inputs")}
    for op, each in calls_by_operation(graph, rows.tolist()).items():
        phase = int(ops.phase[op])
        if part[op] in (StepPart.LOOKUPS, StepPart.GRADIENTS, StepPart.COLLECTIVE) or within[op]:
            continue
        if phase == Phase.OPTIMIZER:
            name = "optimizer"
        elif phase not in (Phase.FORWARD, Phase.BACKWARD) or all(call.family is Family.TRANSFER for call in each):
            calls["inputs"] += [call for call in each if call.family is Family.TRANSFER]
            continue
        else:
            path = graph.string(int(ops.module[op])).lower()
            side = "bottom" if any(word in path for word in BOTTOM) else "top"
            name = f"{side}_{'backward' if phase == Phase.BACKWARD else 'forward'}"
        calls[name] += [call for call in each if call.family is not Family.EMBEDDING]
    if not graph.meta.memory:  # recorded: the optimizer's operations include the tables
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
    return DenseWork(**times, low=low - times["inputs"], high=high - times["inputs"],
                     gradient_bytes=float(memory.parameters), memory_bytes=float(memory.total),
                     sources={int(one): float(whole.times_us[source == one].sum()) for one in np.unique(source)})


def _in_table_modules(graph: ExecutionGraph) -> Bool:
    """Return which operations are in a module that contains modules with tables."""
    parents = {own.module.rpartition(".")[0] for own in find_lookups(graph)} - {""}
    inside = [path in parents or path.startswith(tuple(f"{parent}." for parent in parents))
              for path in (text.replace("/", ".") for text in graph.strings)]
    return np.array([*inside, False], np.bool_)[graph.ops.module]
