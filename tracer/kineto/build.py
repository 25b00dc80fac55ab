"""The linked tables of an ``ExecutionGraph``, built from columns of raw events."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from tracer.columns import is_constant, named
from tracer.errors import listed
from tracer.graph import (
    NONE,
    AllocationTable,
    ExecutionGraph,
    KernelKind,
    KernelTable,
    LaunchTable,
    Meta,
    OpKind,
    OpTable,
    OverheadTable,
    StepSource,
    SyncTable,
    Thread,
)
from tracer.input_file import list_of
from tracer.kineto.columns import MEMORY_COLUMNS, Collector
from tracer.kineto.events import ANNOTATION_NAME, Args, NameGroup, is_collective_kernel, sync_kind
from tracer.kineto.linking import (
    LinkedWork,
    adopt_gradient_sums,
    base_time_ns,
    classify,
    count_losses,
    fill_meta,
    find_collectives,
    link,
)
from tracer.kineto.modules import ModulePaths, count_python_calls, phases
from tracer.kineto.nesting import Nesting, find_gaps, host_order, innermost, nest
from tracer.kineto.steps import (
    SHOWN,
    drop_step_faults,
    find_steps,
    first_regions,
    region_steps,
    repeated_regions,
)
from tracer.step_work import lost_launches, step_of


def build_graph(collected: Collector, metadata: dict[str, Any], is_list: bool, source: str,
                step_region: str = "") -> ExecutionGraph:
    """Sort, nest, link and describe the collected events. ``collected`` is emptied.

    If ``step_region`` is given, the regions of that name are the steps; raises ``StepRegionError`` if there are none.
    """
    loss = collected.loss
    first = collected.first_ns or 0
    meta = Meta(source=source, step_region=step_region, loss=loss, python_events=collected.python_events)
    meta.base_time_ns = first + base_time_ns(metadata)
    meta.window_ns = collected.last_ns - first

    ops, nesting, op_rank = _operations(collected)
    calls = _calls(collected, ops, nesting)
    kernels, kernel_rank = _device_work(collected)
    fill_meta(meta, metadata, is_list, collected.categories, kernels.device)
    _infer_era(meta, collected)

    texts = list(collected.strings)
    work = LinkedWork(kernels.kind, kernels.device, kernels.stream, kernels.start_ns, kernels.correlation)
    kernels.launch = link(work, calls, collected.threads.processes()[calls.thread])
    calls.kind = classify(calls, texts, kernels.launch, kernels.kind)
    count_losses(loss, work, calls, texts, kernels.launch, bool((kernels.launch >= 0).any()))
    launch = np.maximum(kernels.launch, 0)
    linked = kernels.launch >= 0
    if linked.any():
        kernels.op = np.where(linked, calls.op[launch], NONE).astype(np.int32)

    if step_region:
        steps = region_steps(ops, nesting.end, calls, kernels, collected.strings, step_region, source)
        meta.step_source = int(StepSource.REGION)
    else:
        steps, found_by = find_steps(ops, nesting.end, collected.strings)
        meta.step_source = int(found_by)
    ops.step = step_of(steps, ops.start_ns)
    calls.step = step_of(steps, calls.start_ns)
    if linked.any():
        kernels.step = np.where(linked, calls.step[launch], NONE).astype(np.int32)
    steps, meta.step_source = drop_step_faults(steps, meta.step_source, ops, calls, kernels,
                                               list(collected.strings), loss)

    modules = collected.of_window(NameGroup.PYTHON)
    functions = collected.of_window(NameGroup.PYTHON_CALL)
    count_python_calls(ops, steps, functions, modules)
    frames = collected.of_window(NameGroup.FRAME)
    paths_of = ModulePaths(modules, collected.strings)
    meta.module_lines = paths_of.lines(frames, collected.frames)
    paths = paths_of.of(collected.strings, ops.thread, ops.start_ns, nesting.end)
    loss.notes += paths_of.notes()
    ops.module = np.where(paths >= 0, paths, ops.module).astype(np.int32)
    texts = list(collected.strings)
    ops.phase = phases(ops, nesting, texts)
    if adopted := adopt_gradient_sums(calls, ops):
        kernels.op = np.where(linked, calls.op[launch], NONE).astype(np.int32)
        loss.notes.append(f"{adopted} launches lie in no operation, between two of the autograd engine: they are "
                          "gradient sums and count for the backward function before them.")
    overheads = _overheads(collected)
    gaps = find_gaps(ops, nesting.end, calls, steps, overheads, texts)
    gaps.step = step_of(steps, gaps.start_ns)
    syncs = _syncs(collected, calls, texts)
    collectives = find_collectives(ops, kernels, _by_row(collected.operation_comms, op_rank),
                                   _by_row(collected.device_comms, kernel_rank), collected.strings)
    graph = ExecutionGraph(
        strings=list(collected.strings), threads=_threads(collected), ops=ops, launches=calls, kernels=kernels,
        collectives=collectives, syncs=syncs, gaps=gaps, steps=steps, overheads=overheads, meta=meta,
        allocations=_allocations(collected, first, ops, nesting))
    hosts = {thread.pid for thread in graph.threads}
    loss.unreadable_device_events = collected.unreadable_events + sum(
        count for pid, count in collected.unknown_places.items() if pid not in hosts)
    loss.unreadable_device_calls = collected.accelerator_calls if not len(graph.kernels) else 0
    _note_absences(graph, collected.unknown)
    _note_lost_work(graph)
    return graph


def _allocations(collected: Collector, first: int, ops: OpTable, nesting: Nesting) -> AllocationTable:
    """Return the memory changes that the profiler saw, each with the innermost operation around it."""
    raw = collected.memory.finish(MEMORY_COLUMNS)
    raw["start"] = raw["start"] - first
    kept = np.flatnonzero((raw["start"] >= 0) & (raw["start"] <= collected.last_ns - first))
    kept = kept[np.argsort(raw["start"][kept], kind="stable")]
    found = AllocationTable.empty(len(kept))
    found.start_ns = raw["start"][kept].astype(np.int64)
    found.thread, found.bytes, found.total_bytes = raw["thread"][kept], raw["bytes"][kept], raw["total"][kept]
    found.address, found.device = raw["address"][kept], raw["device"][kept]
    if len(kept):
        found.op = innermost(found.thread, found.start_ns, found.start_ns, ops.thread, ops.start_ns, nesting)
    return found


def _rank_of(order: np.ndarray) -> np.ndarray:
    """Return the row in the sorted table for each collected row."""
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank


def _by_row(comms: list[tuple[int, Args]], rank: np.ndarray) -> dict[int, Args]:
    return {int(rank[row]): args for row, args in comms}


def _operations(collected: Collector) -> tuple[OpTable, Nesting, np.ndarray]:
    raw = collected.of_window(NameGroup.OPERATION)
    order = host_order(raw["thread"], raw["start"], raw["duration"], raw.pop("order"))
    rows = {name: _ordered(raw.pop(name), order) for name in list(raw)}
    nesting = nest(rows["thread"], rows["start"], rows.pop("duration"))
    collected.loss.clamped_children += nesting.clamped
    ops = OpTable.blank(len(order))
    for name in ("name", "thread", "sequence", "forward_thread", "external_id", "record_id", "shapes", "dtypes",
                 "strides", "scalars", "module"):
        setattr(ops, name, rows[name])
    ops.start_ns = rows["start"]
    ops.duration_ns = nesting.end - rows["start"]
    ops.parent = nesting.parent
    annotation = rows["annotation"] | named(ops.name, list(collected.strings), ANNOTATION_NAME.match)
    ops.kind = np.where(annotation, OpKind.ANNOTATION, OpKind.OPERATION).astype(np.int8)
    return ops, nesting, _rank_of(order)


def _ordered(column: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the column in the given order."""
    return column if is_constant(column) else column[order]


def _calls(collected: Collector, ops: OpTable, nesting: Nesting) -> LaunchTable:
    raw = collected.of_window(NameGroup.CALL)
    order = host_order(raw["thread"], raw["start"], raw["duration"], None)
    calls = LaunchTable.blank(len(order))
    calls.name, calls.thread, calls.correlation, calls.start_ns = (
        _ordered(raw.pop(key), order) for key in ("name", "thread", "correlation", "start"))
    nested = nest(calls.thread, calls.start_ns, raw.pop("duration")[order])
    collected.loss.clamped_children += nested.clamped
    calls.parent = nested.parent
    calls.duration_ns = nested.end - calls.start_ns
    # The call's middle decides: calls and operations are recorded by different clocks, and borders differ slightly.
    middle = calls.start_ns + calls.duration_ns // 2
    calls.op = innermost(calls.thread, calls.start_ns, middle, ops.thread, ops.start_ns, nesting)
    lost = np.flatnonzero(calls.op == NONE)
    if len(lost):
        calls.op[lost] = innermost(calls.thread[lost], middle[lost], middle[lost], ops.thread, ops.start_ns, nesting)
    return calls


def _device_work(collected: Collector) -> tuple[KernelTable, np.ndarray]:
    raw = collected.of_window(NameGroup.DEVICE)
    order = np.lexsort((raw["stream"], raw["device"], raw["start"]))
    kernels = KernelTable.blank(len(order))
    raw["start_ns"], raw["duration_ns"] = raw.pop("start"), raw.pop("duration")
    raw["device"] = raw["device"].astype(np.int32)
    for name in ("name", "stream", "correlation", "registers", "shared_bytes", "bytes", "start_ns", "duration_ns",
                 "device"):
        setattr(kernels, name, _ordered(raw.pop(name), order))
    kernels.kind = raw["kind"][order]
    extents = np.array([_extent(text) for text in collected.extents], np.int64).reshape(-1, 3)
    for name in ("grid", "block"):
        codes = raw[name]
        if is_constant(codes) and codes[0] == NONE:
            continue
        codes = codes[order]
        for axis, letter in enumerate("xyz"):
            values = np.where(codes >= 0, extents[np.maximum(codes, 0), axis], NONE) if len(extents) else codes
            setattr(kernels, f"{name}_{letter}", values.astype(np.int32))
    collective = named(kernels.name, list(collected.strings), is_collective_kernel)
    kernels.kind[(kernels.kind == KernelKind.COMPUTE) & collective] = KernelKind.COLLECTIVE
    return kernels, _rank_of(order)


def _extent(text: str) -> tuple[int, int, int]:
    values = list_of(text)
    if len(values) > 3 or any(type(v) is not int or not 0 <= v < 2**31 for v in values):
        values = []
    x, y, z = ([*values, 1, 1, 1] if values else [NONE] * 3)[:3]
    return x, y, z


def _syncs(collected: Collector, calls: LaunchTable, texts: list[str]) -> SyncTable:
    raw = collected.of_window(NameGroup.SYNC)
    order = np.argsort(raw["start"], kind="stable")
    syncs = SyncTable.empty(len(order))
    syncs.start_ns, syncs.duration_ns = raw["start"][order], raw["duration"][order]
    for name in ("stream", "correlation", "wait_stream", "record_correlation"):
        setattr(syncs, name, raw[name][order])
    kinds = {code: int(sync_kind(texts[code])) for code in np.unique(raw["kind_text"]).tolist()}
    syncs.kind = np.array([kinds[code] for code in raw["kind_text"][order].tolist()], np.int8)
    rows = np.flatnonzero(calls.correlation >= 0)
    rows = rows[np.argsort(calls.correlation[rows], kind="stable")]
    if len(rows) and len(order):
        at = np.minimum(np.searchsorted(calls.correlation[rows], syncs.correlation), len(rows) - 1)
        syncs.launch = np.where(calls.correlation[rows[at]] == syncs.correlation, rows[at], NONE).astype(np.int32)
    return syncs


def _overheads(collected: Collector) -> OverheadTable:
    raw = collected.of_window(NameGroup.OVERHEAD)
    order = np.argsort(raw["start"], kind="stable")
    return OverheadTable(raw["name"][order], raw["thread"][order], raw["start"][order], raw["duration"][order])


def _threads(collected: Collector) -> list[Thread]:
    return [Thread(pid, tid, collected.thread_names.get((pid, tid), "")) for pid, tid in
            collected.threads.keys_in_order]


def _infer_era(meta: Meta, collected: Collector) -> None:
    if meta.era == "kineto" and "async_cpu_to_gpu" in collected.flow_categories:
        meta.era = "kineto-2022"
    flags = meta.profiler_flags
    flags.setdefault("with_stack", collected.python_events > 0)


def _note_absences(graph: ExecutionGraph, unknown: Counter[str]) -> None:
    loss = graph.meta.loss
    if unknown:
        most = ", ".join(f"{count} of {what}" for what, count in unknown.most_common(4))
        loss.notes.append(f"{sum(unknown.values())} events were left out, whose kind this version does not know "
                          f"({most}): what they recorded is missing here.")
    if len(graph.kernels) == 0:
        why = "a CPU run, or the profiler was not allowed to trace the device"
        if loss.unreadable_device_events:
            why = (f"{loss.unreadable_device_events} events of a device are of a kind that this version cannot read; "
                   "what the device did is unknown")
        elif loss.unreadable_device_calls:
            why = (f"{loss.unreadable_device_calls} calls of an accelerator's runtime started none that this version "
                   "can read; what the device did is unknown")
        elif loss.truncated_bytes or loss.dropped_events or unknown:
            why = "it may have been in what was lost"
        loss.notes.append(f"The trace has no GPU work: {why}.")
    if len(graph.ops) == 0:
        loss.notes.append("The trace has no host operations: nothing can be tied to operations, modules or phases.")
    if len(graph.steps) == 0:
        loss.notes.append("The trace marks no steps (no ProfilerStep, Optimizer.step, data loader or execute ranges): "
                          "the window counts as a whole.")
        own = [region for region in repeated_regions(graph.ops, graph.strings) if region.own]
        if own:
            loss.notes.append(f"Regions that repeat: {first_regions(own)}. If each is one step, name them: "
                              "--step-region NAME (step_region=).")
    if loss.orphan_kernels:
        loss.notes.append(f"{loss.orphan_kernels} pieces of GPU work have no recorded launch, {loss.leading_orphans} "
                          "of them before their stream's first launched work (launched before the window).")


def _note_lost_work(graph: ExecutionGraph) -> None:
    """Count and name the steps that lost device work."""
    lost = lost_launches(graph)
    rows = np.flatnonzero(lost)
    if not len(rows):
        return
    are, do, they = ("is", "does", "it") if len(rows) == 1 else ("are", "do", "they")
    names = listed([graph.string(code) for code in graph.steps.name[rows].tolist()], SHOWN)
    graph.meta.loss.lossy_steps = len(rows)
    graph.meta.loss.notes.append(
        f"{names} {are} damaged and {do} not count: {they} lost the device work of {int(lost.sum()):,} launches, which "
        "other steps have. The profiler's buffers may have run full.")
