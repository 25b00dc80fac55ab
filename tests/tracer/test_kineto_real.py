"""Every real trace against an independent, slow reading of the same file with Python's own JSON decoder."""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from kineto_support import KINETO, decoded, names, real
from slowly import mostly_slow

from tracer.graph import NONE, ExecutionGraph, KernelKind, LaunchKind, OpKind, Phase, StepSource, SyncKind
from tracer.kineto import read_kineto

pytestmark = pytest.mark.real_traces

HOST = {"cpu_op", "user_annotation", "Operator"}
CALLS = {"cuda_runtime", "cuda_driver", "Runtime"}
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}

ALIKE = re.compile("owlv2|nanogpt-8xH100/rank[^0]|dlrm-8xV100-2023/rank[^35]")
"""Traces of the same profiler and model as another one, which make slow reads."""

# The scope lets all tests of one trace follow one another, so that it is read once.
every_trace = pytest.mark.parametrize(
    "name", mostly_slow(KINETO, {name for name in KINETO if not ALIKE.search(name)}) or [
        pytest.param("", marks=pytest.mark.skip(
            reason="the shared traces are absent: set FORETRACE_DATA to the folder that holds traces/"))],
    scope="module")


@lru_cache(maxsize=4)
def graph_of(name: str) -> ExecutionGraph:
    return read_kineto(real(name))


@lru_cache(maxsize=2)
def events_of(name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return decoded(real(name))


def ns(value: Any) -> int:
    return int(Decimal(str(value)) * 1000)


@every_trace
def test_nothing_is_lost(name: str) -> None:
    graph, (events, _) = graph_of(name), events_of(name)
    counts = Counter(event.get("cat") for event in events if event.get("ph") == "X")
    assert graph.meta.loss.events_read == len(events)
    assert len(graph.ops) == sum(counts[c] for c in HOST)
    assert len(graph.launches) == sum(counts[c] for c in CALLS)
    assert len(graph.kernels) == sum(counts[c] for c in DEVICE)
    assert len(graph.syncs) == counts["cuda_sync"]
    assert len(graph.overheads) == counts["overhead"]
    assert graph.meta.python_events == counts["python_function"]
    assert graph.meta.loss.dropped_events == graph.meta.loss.repaired_events == graph.meta.loss.truncated_bytes == 0


@every_trace
def test_times_are_exact(name: str) -> None:
    graph, (events, metadata) = graph_of(name), events_of(name)
    timed = [e for e in events if e.get("ph") == "X" and e.get("cat") not in ("Trace", "gpu_user_annotation")]
    first = min(ns(e["ts"]) for e in timed)
    assert graph.meta.base_time_ns == first + int(metadata.get("baseTimeNanoseconds", 0))
    assert graph.meta.window_ns == max(ns(e["ts"]) + ns(e["dur"]) for e in timed) - first
    device = sorted((ns(e["ts"]) - first, ns(e["dur"])) for e in timed if e.get("cat") in DEVICE)
    assert sorted(zip(graph.kernels.start_ns.tolist(), graph.kernels.duration_ns.tolist(), strict=True)) == device
    host = sorted(ns(e["ts"]) - first for e in timed if e.get("cat") in HOST)
    assert sorted(graph.ops.start_ns.tolist()) == host


@every_trace
def test_kernels_belong_to_the_call_of_their_correlation(name: str) -> None:
    graph, (events, _) = graph_of(name), events_of(name)
    known = {e["args"].get("correlation") for e in events if e.get("cat") in CALLS}
    kernels, launches = graph.kernels, graph.launches
    linked = kernels.launch >= 0
    assert (linked == np.isin(kernels.correlation, list(known))).all()
    assert (launches.correlation[kernels.launch[linked]] == kernels.correlation[linked]).all()
    assert graph.meta.loss.orphan_kernels == int((~linked).sum())


@every_trace
def test_kernels_are_tied_to_the_operation_that_launched_them(name: str) -> None:
    graph, (events, _) = graph_of(name), events_of(name)
    kernels, ops = graph.kernels, graph.ops
    if len(ops) == 0:
        pytest.skip("no host operations")
    linked = kernels.launch >= 0
    assert (kernels.op[linked] >= 0).mean() >= 0.99
    if name.endswith("list-form-2020.json.gz"):
        # Its autograd engine launched 102 gradient sums outside any operation; the runtime events say so. They are
        # tied to the backward function before them, which does not surround them.
        outside = [e["args"]["correlation"] for e in events
                   if e.get("cat") == "Runtime" and e["args"].get("external id") == 0]
        sums = linked & np.isin(kernels.correlation, outside)
        after = ops.start_ns[kernels.op[sums]] + ops.duration_ns[kernels.op[sums]]
        assert (graph.launches.start_ns[kernels.launch[sums]] >= after).all()
        linked &= ~sums
    calls = graph.launches
    rows = kernels.launch[linked & (kernels.op >= 0)]
    op = calls.op[rows]
    middle = calls.start_ns[rows] + calls.duration_ns[rows] // 2
    assert (ops.thread[op] == calls.thread[rows]).all()
    assert ((ops.start_ns[op] <= middle) & (middle <= ops.start_ns[op] + ops.duration_ns[op])).all()
    # innermost: no other operation of that thread lies inside `op` and around the call
    for row, own in list(zip(rows.tolist(), op.tolist(), strict=True))[:200]:
        at = int(calls.start_ns[row] + calls.duration_ns[row] // 2)
        around = np.flatnonzero((ops.thread == ops.thread[own]) & (ops.start_ns <= calls.start_ns[row])
                                & (ops.start_ns + ops.duration_ns >= at))
        assert own == around.max()


@every_trace
def test_tables_are_sorted_and_refer_to_existing_rows(name: str) -> None:
    graph = graph_of(name)
    sizes = {table: len(getattr(graph, table)) for table in ExecutionGraph.TABLES}
    references = {
        "ops": {"parent": "ops", "step": "steps"}, "launches": {"op": "ops", "parent": "launches", "step": "steps"},
        "kernels": {"launch": "launches", "op": "ops", "step": "steps"},
        "collectives": {"kernel": "kernels", "op": "ops"}, "syncs": {"launch": "launches"}, "gaps": {"step": "steps"}}
    for table, kind in ExecutionGraph.TABLES.items():
        columns = getattr(graph, table).columns()
        for column, values in columns.items():
            assert values.dtype == kind.layout()[column], (table, column)
            assert len(values) == sizes[table]
        for column in kind.STRING_COLUMNS:
            assert columns[column].min(initial=0) >= NONE and columns[column].max(initial=NONE) < len(graph.strings)
        for column, target in references.get(table, {}).items():
            assert columns[column].min(initial=0) >= NONE and columns[column].max(initial=NONE) < sizes[target]
        if "thread" in columns:
            assert columns["thread"].min(initial=0) >= 0 and columns["thread"].max(initial=-1) < len(graph.threads)
        if "duration_ns" in columns:
            assert columns["duration_ns"].min(initial=0) >= 0 and columns["start_ns"].min(initial=0) >= 0
    for table in (graph.kernels, graph.syncs, graph.steps, graph.overheads):
        assert (np.diff(table.start_ns) >= 0).all()
    for table in (graph.ops, graph.launches):
        order = np.lexsort((table.start_ns, table.thread))
        assert (table.thread[order] == table.thread).all() and (table.start_ns[order] == table.start_ns).all()


@every_trace
def test_gaps_operations_and_calls_do_not_overlap(name: str) -> None:
    graph = graph_of(name)
    gaps, ops, calls = graph.gaps, graph.ops, graph.launches
    work = (ops.kind == OpKind.OPERATION)
    for thread in range(len(graph.threads)):
        mine = gaps.thread == thread
        starts = gaps.start_ns[mine]
        ends = starts + gaps.duration_ns[mine]
        assert (starts[1:] >= ends[:-1]).all() and (ends > starts).all()
        run = work & (ops.thread == thread)
        for begin, length in ((ops.start_ns[run], ops.duration_ns[run]),
                              (calls.start_ns[calls.thread == thread], calls.duration_ns[calls.thread == thread])):
            at = np.searchsorted(ends, begin, side="right")  # the first gap that ends after the event begins
            inside = at < len(starts)
            assert (starts[at[inside]] >= (begin + length)[inside]).all()


STEPS = {
    "resnet50-V100/rank0.kineto.json.gz": (StepSource.PROFILER_STEP, [35.1, 72.1, 95.7, 95.6, 95.7]),
    "resnet50-ddp-2xA100/rank0.kineto.json.gz": (StepSource.PROFILER_STEP, [222.4, 219.7, 224.9]),
    "rank3-of-8xA100-6steps/rank3.kineto.json.gz": (StepSource.PROFILER_STEP, [75.5, 76.9, 76.2, 76.7, 78.5, 81.1]),
    "vllm-eager-B200/rank0.json.gz": (StepSource.ANNOTATION, [87.4]),
    "vllm-cuda-graph/graph-execution.json.gz": (StepSource.ANNOTATION, [26.4]),
    "dlrm-8xV100-2023/rank3.kineto.json.gz": (StepSource.PROFILER_STEP, [19.3]),
    "resnet50-V100-2021/loader-workers-0.json.gz":
        (StepSource.PROFILER_STEP, [159.4, 149.0, 148.7, 151.7, 153.2, 155.7]),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str) -> None:
    graph = graph_of(name) if real(name) else None
    assert graph is not None
    source, milliseconds = STEPS[name]
    assert graph.meta.step_source == source
    assert (graph.steps.duration_ns / 1e6).round(1).tolist() == pytest.approx(milliseconds, abs=0.06)


def test_steps_from_the_optimizer() -> None:
    graph = graph_of("linear-2080Ti/kineto.json.gz") if real("linear-2080Ti/kineto.json.gz") else None
    assert graph is not None
    assert len(graph.steps) == 40 and graph.meta.step_source == StepSource.OPTIMIZER
    ends = graph.steps.start_ns + graph.steps.duration_ns
    assert (graph.steps.start_ns[1:] == ends[:-1]).all()
    per_step = np.bincount(graph.kernels.step[graph.kernels.step >= 0])
    assert (per_step[1:] == per_step[1]).all()


def test_eras() -> None:
    expected = {"resnet50-V100-2021/list-form-2020.json.gz": "list-2020",
                "resnet50-V100-2021/loader-workers-0.json.gz": "kineto-2021",
                "rank3-of-8xA100-6steps/rank3.kineto.json.gz": "kineto-2022",
                "vllm-eager-B200/rank0.json.gz": "kineto"}
    for name, era in expected.items():
        real(name)
        assert graph_of(name).meta.era == era


def test_dlrm_collectives() -> None:
    name = "dlrm-8xV100-2023/rank5.kineto.json.gz"
    real(name)
    graph = graph_of(name)
    found = graph.collectives
    assert names(graph, found.kind) == ["all_to_all"] * 4 + ["all_reduce", "all_to_all", "all_reduce", "all_reduce"]
    assert found.elements_in.tolist() == [6144, 24, 384, 3392, 394241, 6144, 112, 226960]
    assert names(graph, found.dtype) == ["float32", "int64", "int32", "int32", *["float32"] * 4]
    assert found.order.tolist() == list(range(8))
    assert (graph.kernels.kind[found.kernel] == KernelKind.COLLECTIVE).all()


def test_ddp_collectives_have_arguments_and_count_once() -> None:
    name = "resnet50-ddp-2xA100/rank0.kineto.json.gz"
    real(name)
    graph = graph_of(name)
    found = graph.collectives
    assert Counter(names(graph, found.kind)) == {"all_reduce": 15, "broadcast": 6}
    assert set(names(graph, found.ranks)) == {"[0, 1]"} and set(found.group_size.tolist()) == {2}
    assert (found.kernel >= 0).all() and (found.elements_in == found.elements_out).all()


def test_collectives_without_device_work_are_kept() -> None:
    name = "resnet50-V100/rank0.kineto.json.gz"  # a job of one rank: NCCL launches no kernel
    real(name)
    graph = graph_of(name)
    assert len(graph.collectives) == 35 and set(graph.collectives.kernel.tolist()) == {NONE}


def test_custom_all_reduce_kernels_are_collectives() -> None:
    name = "vllm-eager-B200/rank0.json.gz"
    real(name)
    graph = graph_of(name)
    assert Counter(names(graph, graph.collectives.kind)) == {"all_reduce": 73, "all_gather": 1}
    assert set(names(graph, graph.collectives.dtype)) == {"bfloat16"}


def test_recorded_synchronisations() -> None:
    name = "cuda-sync-A100/cuda_event_sync/event_sync_trace.json.gz"
    real(name)
    graph = graph_of(name)
    assert Counter(graph.syncs.kind.tolist()) == {SyncKind.EVENT_SYNC: 2, SyncKind.STREAM_SYNC: 1,
                                                  SyncKind.DEVICE_SYNC: 1}
    calls = names(graph, graph.launches.name[graph.syncs.launch])
    assert Counter(calls) == {"cudaEventSynchronize": 1, "cudaEventQuery": 1, "cudaStreamSynchronize": 1,
                              "cudaDeviceSynchronize": 1}
    waits = graph.syncs.kind == SyncKind.EVENT_SYNC
    recorded = graph.syncs.record_correlation[waits]
    rows = [int(np.flatnonzero(graph.launches.correlation == c)[0]) for c in recorded]
    assert set(graph.launches.kind[rows].tolist()) == {LaunchKind.EVENT_RECORD}


def test_modules_and_phases() -> None:
    name = "h100-vs-mi300/h100-gaunernst_bert-small-uncased.json.gz"
    real(name)
    graph = graph_of(name)
    paths = {graph.string(int(code)) for code in graph.ops.module}
    assert any(path.startswith("BertLMHeadModel_0/BertModel_0/") and "/Linear_" in path for path in paths)
    name = "resnet50-V100/rank0.kineto.json.gz"
    graph = graph_of(name)
    phase = {p: set(graph.ops.thread[graph.ops.phase == p].tolist()) for p in Phase}
    assert len(phase[Phase.BACKWARD]) == 1 and phase[Phase.BACKWARD].isdisjoint(phase[Phase.FORWARD])
    assert not phase[Phase.OTHER] and phase[Phase.OPTIMIZER]


def test_metadata() -> None:
    name = "vllm-eager-B200/rank0.json.gz"
    real(name)
    meta = graph_of(name).meta
    assert (meta.device, meta.rank, meta.world_size, meta.backend) == ("NVIDIA B200", 0, 8, "nccl")
    assert meta.compute_capability == "10.0" and len(meta.process_groups) == 15  # of 71: cut by the writer
    assert meta.versions["cuda_runtime_version"] == "12090"
    assert meta.profiler_flags["with_stack"] and meta.profiler_flags["record_shapes"]
