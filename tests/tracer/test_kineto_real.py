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
    targets = {column: len(getattr(graph, f"{column}s")) for column in ("op", "step", "kernel")}
    targets |= {"launch": len(graph.launches), "thread": len(graph.threads)}
    for table, kind in ExecutionGraph.TABLES.items():
        sizes = {**targets, "parent": len(getattr(graph, table)), **dict.fromkeys(
            kind.STRING_COLUMNS, len(graph.strings))}
        for column, values in getattr(graph, table).columns().items():
            assert values.dtype == kind.layout()[column], (table, column)
            assert len(values) == len(getattr(graph, table))
            if column in sizes:
                least = 0 if column == "thread" else NONE
                assert values.min(initial=0) >= least and values.max(initial=NONE) < sizes[column], (table, column)
            if column in ("start_ns", "duration_ns"):
                assert values.min(initial=0) >= 0
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


STEPS = [
    ("resnet50-V100/rank0.kineto.json.gz", StepSource.PROFILER_STEP, "kineto", [35.1, 72.1, 95.7, 95.6, 95.7]),
    ("resnet50-ddp-2xA100/rank0.kineto.json.gz", StepSource.PROFILER_STEP, "kineto", [222.4, 219.7, 224.9]),
    ("rank3-of-8xA100-6steps/rank3.kineto.json.gz", StepSource.PROFILER_STEP, "kineto-2022",
     [75.5, 76.9, 76.2, 76.7, 78.5, 81.1]),
    ("vllm-eager-B200/rank0.json.gz", StepSource.ANNOTATION, "kineto", [87.4]),
    ("vllm-cuda-graph/graph-execution.json.gz", StepSource.ANNOTATION, "kineto", [26.4]),
    ("dlrm-8xV100-2023/rank3.kineto.json.gz", StepSource.PROFILER_STEP, "kineto", [19.3]),
    ("resnet50-V100-2021/loader-workers-0.json.gz", StepSource.PROFILER_STEP, "kineto-2021",
     [159.4, 149.0, 148.7, 151.7, 153.2, 155.7]),
    ("resnet50-V100-2021/list-form-2020.json.gz", None, "list-2020", None),
    ("linear-2080Ti/kineto.json.gz", StepSource.OPTIMIZER, "kineto", None),
]


@pytest.mark.parametrize(("name", "source", "era", "milliseconds"), STEPS)
def test_steps_and_eras(name: str, source: StepSource | None, era: str, milliseconds: list[float] | None) -> None:
    graph = graph_of(name)
    steps = graph.steps
    assert graph.meta.era == era
    assert source is None or graph.meta.step_source == source
    if milliseconds:
        assert (steps.duration_ns / 1e6).round(1).tolist() == pytest.approx(milliseconds, abs=0.06)
    if source == StepSource.OPTIMIZER:
        assert len(steps) == 40
        assert (steps.start_ns[1:] == (steps.start_ns + steps.duration_ns)[:-1]).all()
        kernels = np.bincount(graph.kernels.step[graph.kernels.step >= 0])
        assert (kernels[1:] == kernels[1]).all()


def test_dlrm_collectives() -> None:
    graph = graph_of("dlrm-8xV100-2023/rank5.kineto.json.gz")
    found = graph.collectives
    assert names(graph, found.kind) == ["all_to_all"] * 4 + ["all_reduce", "all_to_all", "all_reduce", "all_reduce"]
    assert found.elements_in.tolist() == [6144, 24, 384, 3392, 394241, 6144, 112, 226960]
    assert names(graph, found.dtype) == ["float32", "int64", "int32", "int32", *["float32"] * 4]
    assert found.order.tolist() == list(range(8))
    assert (graph.kernels.kind[found.kernel] == KernelKind.COLLECTIVE).all()


@pytest.mark.parametrize(("name", "kinds", "dtypes", "device_work"), [
    ("resnet50-ddp-2xA100/rank0.kineto.json.gz", {"all_reduce": 15, "broadcast": 6}, {"float32", "int64"}, True),
    ("resnet50-V100/rank0.kineto.json.gz", {"all_reduce": 25, "broadcast": 10}, set(), False),  # of one rank: no kernel
    ("vllm-eager-B200/rank0.json.gz", {"all_reduce": 73, "all_gather": 1}, {"bfloat16"}, True)])  # custom all-reduce
def test_collectives_count_once(name: str, kinds: dict[str, int], dtypes: set[str], device_work: bool) -> None:
    graph = graph_of(name)
    found = graph.collectives
    assert Counter(names(graph, found.kind)) == kinds
    assert (found.kernel >= 0).all() == device_work == (found.kernel != NONE).any()
    assert not dtypes or set(names(graph, found.dtype)) == dtypes
    if "ddp" in name:
        assert set(names(graph, found.ranks)) == {"[0, 1]"} and set(found.group_size.tolist()) == {2}
        assert (found.elements_in == found.elements_out).all()


def test_recorded_synchronisations() -> None:
    graph = graph_of("cuda-sync-A100/cuda_event_sync/event_sync_trace.json.gz")
    syncs = graph.syncs
    calls = names(graph, graph.launches.name[syncs.launch])
    assert sorted(zip(syncs.kind.tolist(), calls, strict=True)) == sorted([
        (SyncKind.EVENT_SYNC, "cudaEventSynchronize"), (SyncKind.EVENT_SYNC, "cudaEventQuery"),
        (SyncKind.STREAM_SYNC, "cudaStreamSynchronize"), (SyncKind.DEVICE_SYNC, "cudaDeviceSynchronize")])
    recorded = syncs.record_correlation[syncs.kind == SyncKind.EVENT_SYNC]
    rows = [int(np.flatnonzero(graph.launches.correlation == each)[0]) for each in recorded]
    assert set(graph.launches.kind[rows].tolist()) == {LaunchKind.EVENT_RECORD}


def test_modules_phases_and_metadata() -> None:
    graph = graph_of("h100-vs-mi300/h100-gaunernst_bert-small-uncased.json.gz")
    paths = {graph.string(int(code)) for code in graph.ops.module}
    assert any(path.startswith("BertLMHeadModel_0/BertModel_0/") and "/Linear_" in path for path in paths)
    graph = graph_of("resnet50-V100/rank0.kineto.json.gz")
    phase = {p: set(graph.ops.thread[graph.ops.phase == p].tolist()) for p in Phase}
    assert len(phase[Phase.BACKWARD]) == 1 and phase[Phase.BACKWARD].isdisjoint(phase[Phase.FORWARD])
    assert not phase[Phase.OTHER] and phase[Phase.OPTIMIZER]
    meta = graph_of("vllm-eager-B200/rank0.json.gz").meta
    assert (meta.device, meta.rank, meta.world_size, meta.backend) == ("NVIDIA B200", 0, 8, "nccl")
    assert meta.compute_capability == "10.0" and len(meta.process_groups) == 15  # of 71: cut by the writer
    assert meta.versions["cuda_runtime_version"] == "12090"
    assert meta.profiler_flags["with_stack"] and meta.profiler_flags["record_shapes"]
