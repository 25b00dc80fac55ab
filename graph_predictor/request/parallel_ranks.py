"""A recorded step spread over ranks it never ran on: the program is traced again in a fake world under a parallel plan.

Collectives and their buffers are then where the framework puts them: DDP's buckets as gradients become ready, FSDP2's
gathers and reduce-scatters, tensor parallelism's pairs, a pipeline's sends. Every operation that was also recorded
keeps its measured time.

A program that cannot be run again gets data parallelism added to the recording itself, which is approximate. The
recorded step shows when each parameter's gradient was ready and how large it is (autograd's ``AccumulateGrad``). Then
the rules of DistributedDataParallel apply. Gradients go into buckets in that order, the all-reduce of a full bucket
overlaps the rest of backward, and the optimizer waits for all buckets::

    recorded   backward … grad₁ … grad₂ … grad₃ | optimizer
    spread     backward … grad₁ … grad₂ [all-reduce 1, 2 …] grad₃ [all-reduce 3 …] wait, copy back | optimizer

Two things that recordings do not show are left out: buffers that DDP broadcasts, and parameters without gradients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graph_predictor.comm.traffic import buckets_of
from graph_predictor.prediction.operation_costs import operations_named, rows_within
from graph_predictor.prediction.overheads import computing_operations
from graph_predictor.prediction.repeat import Cycle
from graph_predictor.prediction.scenario import EditError
from graph_predictor.recorded.module_paths import ACCUMULATE
from graph_predictor.synthesis.baseline import retraced
from kernel_models.collectives import CollectiveModel
from kernel_models.op_call import itemsize, short_dtype
from kernel_models.trace_calls import graph_calls
from tracer import shape_only, workloads
from tracer.arrays import Int64
from tracer.graph import (
    NONE,
    SHAPE_ONLY,
    CollectiveTable,
    ExecutionGraph,
    GapTable,
    KernelTable,
    LaunchTable,
    OpKind,
    OpTable,
    OverheadTable,
    Phase,
    Place,
    StepSource,
    StepTable,
    SyncTable,
    Thread,
    WaitSource,
    string_coder,
)
from tracer.job import Job, folded_job
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.devices import TracedDevice

if TYPE_CHECKING:
    from graph_predictor.prediction.predictor import Baseline

ALL_REDUCE = "c10d::allreduce_"
GROUP = "0"
_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
NOTE = ("Approximate: the program was not run again. The recording has DDP's buckets and all-reduces added where its "
        "gradients became ready; buffers that DDP would broadcast are left out.")
MOST_SEPARATE = 8
"""Worlds up to this size are simulated rank by rank; larger worlds by one rank of each class of equal ranks."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter's gradient: its shape, the profiler's name of its element type, and the time when it was ready (ns
    of the window)."""

    shape: tuple[int, ...]
    dtype: str
    ready_ns: int

    @property
    def elements(self) -> int:
        """Return the gradient's number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return the gradient's size in bytes."""
        return self.elements * itemsize(short_dtype(self.dtype))


def spread_recording(graph: ExecutionGraph, cycle: Cycle, world_size: int, bucket_mb: int | None = None) -> Job:
    """Return the last repeated step of a recording of one rank, with the work that each rank of a DDP job would do.

    Args:
        graph: recorded graph of one rank.
        cycle: its repeated steps.
        world_size: number of ranks; all do the same work.
        bucket_mb: as ``ParallelPlan.bucket_mb``, MiB.

    Returns:
        A folded job of operations without times, for ``Baseline.retraced``.

    Raises:
        EditError: the recording does not show the gradients, or not their sizes.
    """
    step = int(cycle.built.program.item_row[cycle.last[0]])
    begin = int(graph.steps.start_ns[step])
    end = begin + int(graph.steps.duration_ns[step])
    gradients = gradients_of(graph, begin, end)
    buckets = buckets_of([(each.dtype, each.bytes) for each in gradients], bucket_mb)
    spread = _with_buckets(graph, _slots(graph, begin, end), gradients, buckets, world_size)
    return folded_job([spread], [((0, world_size, 1),)], world_size)


def gradients_of(graph: ExecutionGraph, begin_ns: int, end_ns: int) -> list[Gradient]:
    """Return the gradients of a step in the order they became ready; with micro-batches, those of the last one.

    Raises:
        EditError: as ``spread_recording``.
    """
    ops = graph.ops
    rows = np.flatnonzero((ops.name == _code(graph, ACCUMULATE)) & (ops.start_ns >= begin_ns) & (ops.start_ns < end_ns))
    if not len(rows):
        raise EditError("The recording does not show when gradients become ready (autograd's AccumulateGrad), so that "
                        "DDP's buckets are not known; record a whole training step on the CPU side too.")
    rows = rows[np.argsort(ops.start_ns[rows], kind="stable")]
    passes = _passes(graph, rows, begin_ns, end_ns)
    kinds = [[(int(ops.shapes[row]), int(ops.dtypes[row])) for row in one] for one in passes]
    if any(one != kinds[0] for one in kinds):
        raise EditError("The step has backward passes of different parameters, and the recording does not tell which "
                        "of them DDP would reduce together; trace the program under the plan with foretrace trace "
                        "SCRIPT.py:FUNCTION --world-size N.")
    return [_gradient(graph, row) for row in passes[-1]]


def _gradient(graph: ExecutionGraph, row: int) -> Gradient:
    argument = next(iter(graph.arguments(row)), None)
    shape, dtype = (argument.shape, argument.dtype) if argument is not None else (None, "")
    if shape is None or not all(isinstance(size, int) for size in shape) or short_dtype(dtype) not in _DTYPES:
        raise EditError("The recording does not have the sizes of its gradients, so that DDP's buckets are not known; "
                        "record with record_shapes=True (foretrace capture does).")
    return Gradient(tuple(shape), dtype, int(graph.ops.start_ns[row] + graph.ops.duration_ns[row]))


def _passes(graph: ExecutionGraph, rows: Int64, begin_ns: int, end_ns: int) -> list[list[int]]:
    """Return the rows by backward pass; forward work separates two passes."""
    ops = graph.ops
    forward = np.sort(ops.start_ns[(ops.phase == Phase.FORWARD) & (ops.start_ns >= begin_ns) & (ops.start_ns < end_ns)
                                   & (ops.kind == OpKind.OPERATION) & _computes(graph)])
    number = np.searchsorted(forward, ops.start_ns[rows])
    return [rows[number == each].tolist() for each in np.unique(number)]


def _slots(graph: ExecutionGraph, begin_ns: int, end_ns: int) -> Int64:
    """Return the operations that hold the step's work, in order: those that launched it, or on a CPU computed it."""
    ops = graph.ops
    holders = _computes(graph) & (ops.start_ns >= begin_ns) & (ops.start_ns < end_ns)
    names = {graph.string(code) for code in np.unique(ops.name[holders]).tolist()}
    plain = {name[:-1] if name.endswith("_") and not name.endswith("__") else name for name in names}
    return rows_within(graph, operations_named(graph, plain | {f"{name}_" for name in plain}), begin_ns, end_ns)


def _computes(graph: ExecutionGraph) -> np.ndarray:
    if not len(graph.kernels):
        return computing_operations(graph)
    found = np.zeros(len(graph.ops) + 1, np.bool_)
    found[graph_calls(graph).op] = True
    return found[:-1]


def _with_buckets(graph: ExecutionGraph, slots: Int64, gradients: list[Gradient], buckets: list[list[int]],
                  world_size: int) -> ExecutionGraph:
    """Return a graph of ``slots`` plus DDP's work: copies of gradients into buckets, all-reduces, and copies back."""
    strings = list(graph.strings)
    place = NONE if not len(graph.kernels) else int(Place.DEVICE)
    table = OpTable.empty(0)
    meta = replace(graph.meta, era=SHAPE_ONLY, rank=0, world_size=world_size, backend="fake", memory={},
                   memory_moments=[], unprofiled_step_ns=[], step_source=int(StepSource.PROFILER_STEP))
    spread = ExecutionGraph(
        strings, [Thread("0", "0", "the recorded step")], table, LaunchTable.empty(), KernelTable.empty(),
        CollectiveTable.empty(), SyncTable.empty(), GapTable.empty(), StepTable.empty(1), OverheadTable.empty(), meta)
    code = string_coder(spread)

    inserted = _insertions(gradients, buckets)
    when = np.array([at for at, *_ in inserted], np.int64)
    before = np.searchsorted(graph.ops.start_ns[slots], when, side="left")
    count = len(slots) + len(inserted)
    new = np.arange(len(inserted)) + before
    old = np.setdiff1d(np.arange(count), new)
    ops = OpTable.empty(count)
    for name in ("name", "sequence", "shapes", "dtypes", "strides", "scalars", "module", "phase"):
        getattr(ops, name)[old] = getattr(graph.ops, name)[slots]
    for row, (_, name, shapes, dtypes) in zip(new.tolist(), inserted, strict=True):
        ops.name[row], ops.phase[row] = code(name), int(Phase.BACKWARD)
        ops.shapes[row], ops.dtypes[row] = code(json.dumps(shapes)), code(json.dumps(dtypes))
        ops.strides[row] = ops.scalars[row] = ops.module[row] = ops.sequence[row] = NONE
    ops.kind[:], ops.parent[:], ops.thread[:], ops.step[:] = OpKind.OPERATION, NONE, 0, 0
    ops.start_ns[:], ops.duration_ns[:] = np.arange(count), 0
    ops.forward_thread[:], ops.external_id[:], ops.place[:] = NONE, np.arange(count), place
    spread.ops = ops
    spread.steps.name[:], spread.steps.start_ns[:], spread.steps.duration_ns[:] = code("ProfilerStep#0"), 0, count
    spread.steps.thread[:] = 0
    reduces = [row for row, (_, name, *_) in zip(new.tolist(), inserted, strict=True) if name == ALL_REDUCE]
    returns = [row for row, (_, name, *_) in zip(new.tolist(), inserted, strict=True) if name == "aten::copy_"]
    spread.collectives = _collectives(gradients, buckets, reduces, returns, world_size, code)
    meta.window_ns = count
    return spread


def _insertions(gradients: list[Gradient], buckets: list[list[int]]) -> list[tuple[int, str, list[Any], list[str]]]:
    """Return (time, name, shapes, types) of the operations that DDP adds to backward, in order. Each gradient is scaled
    into its bucket. A full bucket is reduced after the buckets before it. After backward, gradients are copied back."""
    found: list[tuple[int, str, list[Any], list[str]]] = []
    for gradient in gradients:
        shape = list(gradient.shape)
        found.append((gradient.ready_ns, "aten::mul", [shape, [], shape], [gradient.dtype, "double", gradient.dtype]))
    at = 0
    for bucket in buckets:
        at = max(at, *(gradients[number].ready_ns for number in bucket))
        size = sum(gradients[number].elements for number in bucket)
        found.append((at, ALL_REDUCE, [[[size]], [], [], [], [], []],
                      [f"TensorList[{gradients[bucket[0]].dtype}]", "", "", "", "Scalar", "Scalar"]))
    for bucket in buckets:
        for number in bucket:
            shape, dtype = list(gradients[number].shape), gradients[number].dtype
            found.append((at, "aten::copy_", [shape, shape, []], [dtype, dtype, "Scalar"]))
    return sorted(found, key=lambda each: each[0])  # stable: operations of one time keep their order


def _collectives(gradients: list[Gradient], buckets: list[list[int]], reduces: list[int], returns: list[int],
                 world_size: int, code: Any) -> CollectiveTable:
    table = CollectiveTable.empty(len(buckets))
    copied = np.concatenate([[0], np.cumsum([len(bucket) for bucket in buckets])])
    for row, bucket in enumerate(buckets):
        size = sum(gradients[number].elements for number in bucket)
        values = {"op": reduces[row], "kind": code("all_reduce"), "group": code(GROUP),
                  "ranks": code(json.dumps(list(range(world_size)))),
                  "dtype": code(_DTYPES[short_dtype(gradients[bucket[0]].dtype)]), "elements_in": size,
                  "elements_out": size, "group_size": world_size, "order": row, "is_async": 1,
                  "wait_op": returns[int(copied[row])], "wait_source": int(WaitSource.MODELLED)}
        for name, value in values.items():
            getattr(table, name)[row] = value
    return table


def _code(graph: ExecutionGraph, text: str) -> int:
    return graph.strings.index(text) if text in graph.strings else NONE - 1


def settings_under(plan: ParallelPlan, sizes: Mapping[str, int | str]) -> dict[str, int | str]:
    """Return the workload's settings that change: those of ``sizes``, and the micro-batches that the plan states.

    Raises:
        PlanError: the two contradict each other.
    """
    own = {} if plan.microbatch is None else {"batch": plan.samples * (plan.passes if plan.pp > 1 else 1)}
    if plan.pp == 1 and plan.microbatches is not None:
        own["accumulation"] = plan.passes
    for name, value in own.items():
        if sizes.get(name, value) != value:
            raise PlanError(f"The plan says {name}={value} and the sizes say {name}={sizes[name]}; leave one of them "
                            "out.")
    return {**sizes, **own}


def traced(plan: ParallelPlan, workload: dict[str, Any], device: str | TracedDevice, *,
           sizes: Mapping[str, int | str] | None = None, also: Sequence[int] = ()) -> Job:
    """Return a workload's step under a plan, traced by shapes: all ranks of a small world, else one of each kind.

    Args:
        workload: name and settings as a capture or trace keeps them.
        sizes: settings to change.
        also: further ranks that get a graph of their own.

    Raises:
        PlanError: the plan does not fit the workload.
    """
    values = {name: value for name, value in workload["settings"].items() if name != "device"}
    settings = workloads.configure(workload["name"], **{**values, **settings_under(plan, sizes or {})})
    # Without a pipeline, micro-batches are a setting of the workload.
    spread = replace(plan, microbatch=None, microbatches=plan.microbatches if plan.pp > 1 else None)
    job = shape_only.trace_job(settings, device, world_size=plan.world_size, parallel=spread)
    return unfolded(job, plan.world_size, also)


def unfolded(job: Job, world_size: int, also: Sequence[int] = ()) -> Job:
    """Return the ranks of a folded job that are simulated one by one: all of a small world, else one of each kind.

    Raises:
        EditError: one of ``also`` is no rank of the world.
    """
    wrong = [rank for rank in also if not 0 <= rank < world_size]
    if wrong:
        raise EditError(f"There is no rank {wrong[0]} among {world_size:,} ranks; name one from 0 to "
                        f"{world_size - 1:,}.")
    small = range(world_size) if world_size <= MOST_SEPARATE else ()
    own = sorted({*small, *also, *(graph.meta.rank for graph in job.graphs)})
    return replace(job, graphs=[job.rank(rank) for rank in own], classes=[])


def on_ranks(baseline: Baseline, plan: ParallelPlan, collectives: CollectiveModel | None = None, *,
             sizes: Mapping[str, int | str] | None = None, also: Sequence[int] = ()) -> Baseline:
    """Return a recorded step as it would be on many ranks: traced again under the plan, or else by ``with_ddp``.

    Args:
        baseline: a recording of one rank.
        plan: how the step is spread; its micro-batches become the workload's ``batch`` and ``accumulation``.
        collectives: the cluster; by default the device's usual links.
        sizes, also: as ``traced``.

    Raises:
        EditError: the recording is of several ranks, or lacks information that the plan needs.
        PlanError: the plan does not fit the workload, or the cluster is too small.
    """
    graphs: list[ExecutionGraph] = baseline.built.graphs
    if len(graphs) > 1 or graphs[0].meta.world_size > 1:
        raise EditError("Only a step that was recorded on one rank can be spread over others; this is one of several.")
    workload = graphs[0].meta.workload
    if collectives is not None:
        collectives.check_fits(plan.world_size)
    if workload:
        job = traced(plan, workload, baseline.scenario.known_source().name, sizes=sizes, also=also)
        more = "".join(f", {name} {value}" for name, value in (sizes or {}).items())
        return retraced(baseline, job, f"{_described(plan)}{more}", collectives=collectives)
    return with_ddp(baseline, plan, collectives, also=also)


def with_ddp(baseline: Baseline, plan: ParallelPlan, collectives: CollectiveModel | None = None, *,
             also: Sequence[int] = ()) -> Baseline:
    """Return a recorded step of a program that cannot be traced again, with DDP added to the recording: approximate.

    Raises:
        EditError: the plan has more than DDP, or the recording does not show the gradients and their sizes.
    """
    if not plan.ddp or plan != ParallelPlan(dp=plan.dp, bucket_mb=plan.bucket_mb, lone_ddp=plan.lone_ddp):
        raise EditError("The recording does not say which workload of the suite it is of, so that it cannot be traced "
                        "again under a plan, and only ddp=N can be added to it as it is; record it with --workload, or "
                        "trace your own script under a plan with foretrace trace SCRIPT.py:FUNCTION --world-size N.")
    job = spread_recording(baseline.built.graphs[0], baseline.cycle, plan.world_size, plan.bucket_mb)
    found = retraced(baseline, unfolded(job, plan.world_size, also), f"{_described(plan)}, approximate",
                     collectives=collectives)
    found.notes.insert(0, NOTE)
    return found


def _described(plan: ParallelPlan) -> str:
    return f"{plan} on {plan.world_size:,} ranks"
