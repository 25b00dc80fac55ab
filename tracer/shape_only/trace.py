"""``trace_step``: one training step by shapes alone, as a GPU would run it, without a GPU, time or memory."""

from __future__ import annotations

import gc
import inspect
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tracer import fake_world
from tracer.errors import ForetraceError
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
from tracer.job import Job, folded_job
from tracer.lookup_data.noted import note_tables
from tracer.parallel_plan import ParallelPlan
from tracer.shape_only.devices import TracedDevice, traced_device
from tracer.shape_only.errors import ShapeOnlyError, UnknownSizeError, explained, function_line, unexplained
from tracer.shape_only.known_values import KnownValues, NumbersInLists
from tracer.shape_only.recorder import ModuleStack, OperatorRecorder
from tracer.shape_only.substitutions import CPU, GPU, operators
from tracer.shape_only.substitutions.operators import Site, installed
from tracer.shape_only.substitutions.placement import DevicePlacement
from tracer.shape_only.tensors import MemoryTracker, resize_watch
from tracer.shape_only.uncompiled import UncompiledFakeMode, shardings_are_not_kept, without_compiler
from tracer.shape_only.whole_program import WholeProgram
from tracer.user_code import find_command, find_importable, with_sizes
from tracer.workloads import Settings, as_plain, create
from tracer.workloads.places import check_alone, pieces_of, tables_at

Step = Callable[[], Any]


def trace_step(
    fn: Callable[[], Step] | WholeProgram, device: str | TracedDevice = "h200-sxm", *, world_size: int | None = None,
    rank: int = 0, steps: int = 1, warmup: int | None = None, source: str = "", selected: float | None = None,
) -> ExecutionGraph:
    """Trace a training step by shapes alone.

    Args:
        fn: Builds model, optimizer and data and returns the step, a function without arguments that does one whole
            training step. It runs inside the trace, once; anything made outside it is real memory and real time.
        device: The device whose operations are wanted; "cpu" for those of the CPU.
        world_size: Ranks of the job; ``fn`` then runs as rank ``rank`` of a fake world (``tracer.fake_world``), in
            which DDP, FSDP2, tensor and pipeline parallelism work unchanged. None: no process group.
        steps: Recorded steps.
        warmup: Steps before them; by default 1, and 2 with a world. The first step differs from all later ones
            because it makes the optimizer's state, and DDP regroups its buckets at the second.
        source: What to name as the graph's source; the function's name if empty.
        selected: Share that a mask made of data is assumed to select of its elements (boxes with a high score, tokens
            of an expert). Numbers between ends that an operator gives fill that share of their range (corners of boxes
            clamped to an image). The graph notes it. ``None`` refuses steps that depend on either.

    Returns:
        The graph of rank ``rank``. Its operations are those the dispatcher runs below autograd, with the arguments
        the profiler would note, 1 ns apart and without durations (``meta.era`` is ``SHAPE_ONLY``). Collectives say
        where their results are first needed. ``meta.memory`` has the peak memory of the recorded steps and
        ``meta.substitutions`` what was put in the place of the CPU's operations.

    Raises:
        ShapeOnlyError: An unknown device; ``fn`` returns no function; or the step cannot be traced, with the user's
            line and the way out: control flow that depends on values, an operator without a fake kernel.
        FakeWorldError: The world cannot be put up.
    """
    target = traced_device(device)
    warmup = (1 if world_size is None else 2) if warmup is None else warmup
    if selected is not None and not 0 <= selected <= 1:
        raise ShapeOnlyError(f"selected={selected:g} is no share: give a number from 0 to 1.")
    if steps < 1 or warmup < 0:
        raise ShapeOnlyError(f"steps={steps} and warmup={warmup} are not possible: give 1 or more, and 0 or more.")
    with ExitStack() as stack:
        if world_size is not None:
            stack.enter_context(fake_world.fake_world(world_size, rank))
        return _traced(fn, target, steps, warmup, rank, world_size, source or getattr(fn, "__name__", "a function"),
                       selected)


def trace_workload(
    settings: Settings, device: str | TracedDevice = "h200-sxm", *, world_size: int | None = None, rank: int = 0,
    parallel: ParallelPlan | str | None = None, steps: int = 1, warmup: int | None = None,
) -> ExecutionGraph:
    """Trace a step of a workload of the suite, on the given device; ``settings.device`` is ignored.

    Args:
        settings: as ``tracer.workloads.configure`` makes them.
        parallel: how the job is spread over ``world_size`` ranks: a plan, or its text ("fsdp2=8,tp=8").

    Raises:
        ShapeOnlyError, FakeWorldError: as ``trace_step``; or a plan without a world.
        PlanError: the text is no plan, or the plan does not fit.
        WorkloadError: the settings have tables on other ranks, and there is no plan.
    """
    plan: Any = None
    if parallel is not None:
        if world_size is None:
            raise ShapeOnlyError("A parallel plan needs a world: give world_size.")
        plan = ParallelPlan.parse(parallel, world_size) if isinstance(parallel, str) else parallel
        fake_world.check_plan(settings, plan)
        if warmup is None:
            warmup = 2 if plan.ddp else 1
    else:
        check_alone(settings)
    target = traced_device(device)
    placed = replace(settings, device="cuda" if target.is_gpu else "cpu")

    def build() -> Step:
        workload: Any = create(placed)
        if plan is not None:
            workload = fake_world.parallelize(workload, plan)
        batches = iter(workload.batches())
        return lambda: workload.step(next(batches))

    graph = trace_step(build, device, world_size=world_size, rank=rank, steps=steps, warmup=warmup,
                       source=f"workload {settings.WORKLOAD}")
    graph.meta.workload = {"name": settings.WORKLOAD, "settings": as_plain(placed)}
    tables = settings.embedding_tables()
    sharding: str = getattr(settings, "sharding", "")
    if sharding and plan is not None:
        pieces = pieces_of(tables, sharding, plan.dp)
        tables = tables_at(tables, pieces, plan.place(rank).dp)
    if tables:
        graph.meta.loss.notes += note_tables(graph, tables)
    return graph


def trace_job(
    settings: Settings,
    device: str | TracedDevice = "h200-sxm",
    *,
    world_size: int,
    parallel: ParallelPlan | str,
    steps: int = 1,
    warmup: int | None = None,
) -> Job:
    """Trace a workload on every rank of a world: once for each class of ranks that do the same work.

    Returns:
        The folded job; ``job.classes`` says which ranks each graph represents.

    Raises:
        ShapeOnlyError, FakeWorldError, PlanError: as ``trace_workload``.
    """
    plan = ParallelPlan.parse(parallel, world_size) if isinstance(parallel, str) else parallel
    classes = fake_world.rank_classes(plan, settings)
    graphs = [trace_workload(settings, device, world_size=world_size, rank=each.first, parallel=plan, steps=steps,
                             warmup=warmup) for each in classes]
    return folded_job(graphs, [each.ranks for each in classes], world_size)


def trace_script(target: str, device: str | TracedDevice = "h200-sxm", *, world_size: int | None = None, rank: int = 0,
                 arguments: Mapping[str, int | str] | None = None, selected: float | None = None,
                 steps: int = 1) -> ExecutionGraph:
    """Trace the step that ``SCRIPT.py:FUNCTION``, ``package.module:FUNCTION`` or a notebook's function returns, with
    the other arguments of ``trace_step``.

    A whole program with its arguments, ``SCRIPT.py --batch {batch}`` or ``-m package.train``, is traced too: an
    optimizer marks its steps, as in a capture.

    ``arguments`` are passed to the function by name: sizes, as in ``def build(batch=32)``, and settings as text,
    converted to the type of the function's default (``def build(opt="adamw", fused=False, lr=0.1)``). Several ``steps``
    form one cycle, recorded after a whole one. A whole program has them in the place of {NAME}, else as --NAME SIZE.

    The file runs inside the trace, as a module (``__name__`` is not ``"__main__"``). So its imports are traced too, and
    its decorators see a GPU that does not exist. Its command line is its own path without arguments: options that it
    parses have their defaults. It must not have run in this process before (``trace_apart``).

    Raises:
        UnknownSizeError: the function takes no such argument.
        ShapeOnlyError: there is no such file or function, a whole program ends too early, or as ``trace_step``.
    """
    # A whole cycle comes first: an optimizer makes its state at its first step, which may be the cycle's last step.
    warmup = None if steps == 1 else max(steps, 2)
    if (command := find_command(target)) is not None:
        if world_size is not None:
            raise ShapeOnlyError(f"{target} starts its process groups itself, and a step of several ranks is traced "
                                 f"from a function that builds it: name {command.code.name}:FUNCTION.")
        given = replace(command, arguments=tuple(with_sizes(command.arguments, arguments or {})))
        return trace_step(WholeProgram(given), device, steps=steps, warmup=warmup, source=target, selected=selected)
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise ShapeOnlyError(f"{target!r} names no function, and no program that exists; write it as "
                             "script.py:function, or as 'script.py --batch {batch}'.")
    code = find_importable(path)
    if code is None:
        raise ShapeOnlyError(f"{path} does not exist; check the path.")

    def build() -> Any:
        with code.importing():
            found = code.names_for(name)
            function = found.get(name)
            if not callable(function):
                there = ", ".join(key for key, value in found.items() if callable(value) and not key.startswith("_")
                                  and code.defines(value))
                raise ShapeOnlyError(f"{path} has no function {name!r}" + (f"; it has {there}." if there else "."))
            return function(**{argument: _taken(target, function, argument, value)
                               for argument, value in (arguments or {}).items()})

    return trace_step(build, device, world_size=world_size, rank=rank, steps=steps, warmup=warmup, source=target,
                      selected=selected)


def _taken(target: str, function: Any, argument: str, value: int | str) -> Any:
    """Return an argument as a function takes it: text becomes a number or boolean where the default is one.

    Raises:
        UnknownSizeError: the function takes no argument of this name.
        ShapeOnlyError: a text does not fit the type of the default.
    """
    parameters = inspect.signature(function).parameters
    if argument not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        there = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
        raise UnknownSizeError(f"{target} takes no argument {argument!r} ({there}); let it take its sizes by name, as "
                               f"in def {target.rpartition(':')[2]}({argument}="
                               f"{32 if isinstance(value, int) else value!r}).")
    default = parameters[argument].default if argument in parameters else None
    if not isinstance(value, str) or not isinstance(default, bool | int | float):
        return value
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        return float(value) if isinstance(default, float) else int(value)
    except (KeyError, ValueError):
        wanted = "true or false" if isinstance(default, bool) else f"a number, as {default} is"
        raise ShapeOnlyError(f"{argument}={value} names no size or setting of {target}: it takes {wanted}.") from None


@contextmanager
def _short_collections() -> Iterator[None]:
    """Keep garbage collections from visiting existing objects: with PyTorch's modules among them, one takes longer than
    tracing a small step. Objects that the trace makes are collected as usual."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@_short_collections()
def _traced(fn: Callable[[], Step] | WholeProgram, device: TracedDevice, steps: int, warmup: int, rank: int,
            world_size: int | None, source: str, selected: float | None) -> ExecutionGraph:
    with _quiet(), without_compiler(), installed(device, GPU if device.is_gpu else CPU) as site:
        tracker, modules = MemoryTracker(), ModuleStack()
        site.patch(torch.UntypedStorage, "resize_", resize_watch(tracker))
        if world_size is not None:
            from torch.distributed.tensor import _dispatch

            site.patch(_dispatch, "_are_we_tracing", shardings_are_not_kept)
        placement = DevicePlacement(tracker, one_device=world_size is None) if device.is_gpu else None
        operators.install(site, placement)
        if placement is not None:
            placement.install(site)
        recorder = OperatorRecorder(tracker, modules, site.rules, placement, KnownValues(site.note, selected))
        recorder.values.install(site)
        try:
            with ExitStack() as modes:
                modes.enter_context(UncompiledFakeMode(allow_non_fake_inputs=True))
                modes.enter_context(modules)
                modes.enter_context(recorder)
                modes.enter_context(NumbersInLists(recorder.values.forget))
                if placement is not None:
                    modes.enter_context(placement)
                _run(fn, source, recorder, steps, warmup, site, placement)
        except (ForetraceError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a program may also exit
            raise explained(error) or unexplained(error) from error
        finally:
            modules.modules.clear()
        meta = new_meta(device.name, device.capability, rank if world_size is not None else -1,
                        world_size if world_size is not None else -1)
        return _finished(recorder, site, placement, meta, source)


def _run(fn: Callable[[], Step] | WholeProgram, source: str, recorder: OperatorRecorder, steps: int, warmup: int,
         site: Site, placement: DevicePlacement | None) -> None:
    borders = _borders(recorder, steps, warmup, site, placement)
    if isinstance(fn, WholeProgram):
        fn.run_between(borders)
        return
    step = fn()
    if not callable(step):
        raise ShapeOnlyError(f"{source} returned {type(step).__name__} where the step was expected: let it build "
                             "model, optimizer and data, and return a function without arguments that does one "
                             "training step.")
    check_no_arguments(step)
    for _ in borders:
        step()


def _borders(recorder: OperatorRecorder, steps: int, warmup: int, site: Site,
             placement: DevicePlacement | None) -> Iterator[None]:
    """Yield at the begin of each step; those that are not recorded come first."""
    for _ in range(warmup):
        yield
    gc.collect()
    site.counts.clear()
    if placement is not None:
        placement.copies = 0
    recorder.begin_memory()
    for _ in range(steps):
        with recorder.step():
            yield
    recorder.tracker.end()


def check_no_arguments(step: Step) -> None:
    """Raise ``ShapeOnlyError`` if a step wants arguments."""
    try:
        inspect.signature(step).bind()
    except ValueError:  # some callables have no signature
        return
    except TypeError as error:
        raise ShapeOnlyError(f"{function_line(step)} is the step, and wants arguments ({error}): return a function "
                             "without arguments that takes its batch itself.") from None


def _finished(recorder: OperatorRecorder, site: Site, placement: DevicePlacement | None, meta: Any,
              source: str) -> ExecutionGraph:
    if not len(recorder.columns):
        raise ShapeOnlyError(f"{source}: the step called no operator, so that there is nothing to trace; let the "
                             "returned function do one whole training step.")
    if placement is not None and placement.copies:
        site.counts["placement"] = placement.copies
    if placement is not None and not recorder.tracker.anything_on_device():
        site.note("The model stayed on the CPU: nothing of the step lies on the device, so that a machine with a GPU "
                  "would not use it; move model and batch with .cuda() or .to(\"cuda\").")
    meta.source = source
    meta.memory = recorder.tracker.report()
    meta.memory_moments = recorder.tracker.moments()
    meta.substitutions = dict(sorted(site.counts.items()))
    meta.profiler_flags = recorder.tf32
    meta.backend = "fake" if meta.world_size > 0 else ""
    meta.loss.notes = list(site.notes)
    return assemble(recorder, meta)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warnings about a missing GPU, and its tracebacks of errors that are also raised."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_is_below_error)
    with warnings.catch_warnings():
        for message in (".*CUDA is not available.*", ".*Can't initialize NVML.*", ".*lr_scheduler.step.*",
                        ".*torch.cuda.amp.GradScaler is enabled.*", ".*pin_memory.*",
                        ".*Accessing the data pointer of FakeTensor.*", "FSDP2-wrapped module",
                        "(?s).*Overriding a previously registered kernel"):
            warnings.filterwarnings("ignore", message=message)
        try:
            yield
        finally:
            log.removeFilter(_is_below_error)


def _is_below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def assemble(recorder: OperatorRecorder, meta: Meta) -> ExecutionGraph:
    """Return the graph of the recorded steps: operations 1 ns apart, without durations, launches or device work."""
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
    """Return the metadata of a step before it is traced."""
    return Meta(device=device, device_count=1, compute_capability=".".join(map(str, capability)) if any(capability)
                else "", rank=rank, world_size=world_size, torch_version=str(torch.__version__), loss=LossReport())
