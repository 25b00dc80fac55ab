"""Recordings of other profilers: a real trace written as they write it is read back as the same graph, and closes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from other_profilers import PID, SHIFT, write_nsys, write_rocprof
from said import Run

from graph_predictor import replay
from tracer.errors import TraceError
from tracer.graph import KernelKind
from tracer.job import read_job
from tracer.kineto import read_kineto
from tracer.translate.events import marked_range

RealTrace = Callable[[str], Path]


@pytest.mark.real_traces
def test_an_export_of_nsight_systems_is_the_graph_of_the_profilers_trace(data_folder: Path, tmp_path: Path) -> None:
    """A V100's recording with calls, kernels, copies and operations; the steps after the first."""
    cuda = read_kineto(next((data_folder / "traces" / "resnet50-V100").glob("*.json*")))
    write_nsys(cuda, tmp_path / "report.sqlite")
    (graph,) = read_job(str(tmp_path)).graphs
    assert len(graph.launches) == len(cuda.launches)
    assert (graph.kernels.start_ns == cuda.kernels.start_ns).all()
    assert (graph.kernels.duration_ns == cuda.kernels.duration_ns).all()
    assert [graph.string(c) for c in graph.kernels.name.tolist()[:500]] == [
        cuda.string(c) for c in cuda.kernels.name.tolist()[:500]]
    assert ((graph.kernels.launch >= 0) == (cuda.kernels.launch >= 0)).all()
    mine, theirs = replay([graph]), replay([cuda])
    assert len(mine.steps) == len(theirs.steps) > 1
    for one, two in zip(mine.steps, theirs.steps, strict=True):
        assert one.replayed_ns == pytest.approx(two.replayed_ns, rel=2e-4)
        assert one.replayed_ns == pytest.approx(one.measured_ns, rel=5e-3)
    assert graph.meta.device == cuda.meta.device and graph.meta.sm_count == cuda.meta.sm_count
    assert len(graph.ops) == len(cuda.ops) and (graph.ops.sequence == cuda.ops.sequence).all()
    mine, theirs = ([each.string(code) for code in each.ops.name.tolist()].count("aten::convolution")
                    for each in (graph, cuda))
    assert mine == theirs


@pytest.mark.real_traces
def test_results_of_rocprof_are_the_graph_of_the_profilers_trace(data_folder: Path, tmp_path: Path, run: Run) -> None:
    source = read_kineto(next((data_folder / "traces" / "resnet18-ddp-MI300X").glob("*.json*")))
    path = tmp_path / "1_results.json"
    write_rocprof(source, path)
    graph = read_kineto(path)
    for theirs in ("start_ns", "duration_ns"):
        mine, recorded = (np.sort(getattr(each.kernels, theirs)) for each in (graph, source))
        assert (mine - mine[0] == recorded - recorded[0]).all()
    assert graph.meta.device == source.meta.device
    copied = [each.kernels.bytes[each.kernels.kind == KernelKind.MEMCPY].tolist() for each in (graph, source)]
    assert copied[0] == copied[1]
    for one, two in zip(replay([graph]).steps, replay([source]).steps, strict=True):
        assert one.replayed_ns == pytest.approx(two.replayed_ns, rel=5e-3)
    assert run("breakdown", str(path)).code == 0


@pytest.mark.parametrize(("text", "category", "name"), [
    ("aten::linear, seq = 12, op_id = 3, sizes = [[8, 16], [32, 16], []]", "cpu_op", "aten::linear"),
    ("step 7", "user_annotation", "ProfilerStep#7"), ("Iteration_12", "user_annotation", "ProfilerStep#12"),
    ("ProfilerStep#3", "user_annotation", "ProfilerStep#3"), ("forward", "user_annotation", "forward"),
    ("LinearBackward0, seq = 4, op_id = 9", "cpu_op", "LinearBackward0"),
    ("aten::odd, sizes = [[broken", "cpu_op", "aten::odd"), ("batchnorm", "user_annotation", "batchnorm"),
    ("aten::mm, op_id = 3, sizes = " + "[" * 5000, "cpu_op", "aten::mm"),
    ("aten::a=b, seq = 3", "cpu_op", "aten::a=b, seq = 3")])
def test_ranges_are_steps_operations_or_annotations(text: str, category: str, name: str) -> None:
    found = marked_range(text)
    assert (found.category, found.name) == (category, name)
    assert name != "aten::linear" or found[2:] == (12, b"[[8,16],[32,16],[]]")


def small_export(path: Path, statements: str) -> Path:
    file = sqlite3.connect(path)
    file.executescript("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, "
                       "globalPid, shortName); CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, "
                       "correlationId, nameId);" + statements)
    file.commit()
    file.close()
    return path


def test_what_an_old_or_odd_export_lacks_is_left_out(tmp_path: Path) -> None:
    one, two = PID * SHIFT, 5 * SHIFT
    graph = read_kineto(small_export(tmp_path / "a.sqlite", (
        f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1000, 3000, {one + 1}, 1, 0), (4000, NULL, {one + 1}, 2, 0), "
        f"('x', 5000, {one + 1}, 3, 0);"
        f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5000, 9000, 0, 7, 1, {one}, 0), "
        f"(9500, 9900, 0, 7, 4, {one}, NULL), (1, 2, 0, 7, 1, {two}, 0);")))
    assert len(graph.kernels) == 2 and len(graph.launches) == 1
    assert graph.string(int(graph.kernels.name[0])) == "unnamed kernel"
    assert graph.kernels.launch.tolist() == [0, -1] and graph.kernels.start_ns.tolist() == [4000, 8500]
    assert any(f"process {PID} was read" in note and "and 5 were not" in note for note in graph.meta.loss.notes)
    record = {"start_timestamp": 5, "end_timestamp": 2, "kind": 99, "operation": -3, "thread_id": 1,
              "correlation_id": {"internal": 1}, "dispatch_info": {"workgroup_size": {"x": 0}, "kernel_id": 9}}
    (tmp_path / "a.json").write_text(json.dumps({"rocprofiler-sdk-tool": [
        {"buffer_records": {"kernel_dispatch": [record], "hip_api": [record, {**record, "operation": "hipMalloc"}],
                            "memory_copy": [record], "marker_api": [record]}}]}))
    graph = read_kineto(tmp_path / "a.json")
    assert len(graph.kernels) == 2
    assert {graph.string(c) for c in graph.launches.name.tolist()} == {"INVALID", "hipMalloc"}


@pytest.mark.parametrize(("make", "says"), [
    (lambda path: path.write_bytes(b"SQLite format 3\x00" + b"\xff" * 4000), "cannot be read as an SQLite file"),
    (lambda path: small_export(path, "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL; DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME;"),
     "without CUDA calls or kernels"),
    (lambda path: small_export(path, ""), "holds nothing to read"),
    # A view that would be computed for ever is no table of an export.
    (lambda path: small_export(path, "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL; DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME; "
     "CREATE VIEW CUPTI_ACTIVITY_KIND_RUNTIME AS WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 "
     "FROM n) SELECT start, start AS end, start AS globalTid, start AS correlationId FROM n;"),
     "without CUDA calls or kernels"),
    (lambda path: path.write_text('{"rocprofiler-sdk-tool": [{"buffer_records": {"hip_api": 7}}]}'),
     "cannot be read as rocprofv3's results"),
    (lambda path: path.write_text('{"rocprofiler-sdk-tool": []}'), "has no calls and no kernels"),
])
def test_a_bad_file_is_refused_in_a_sentence(make: Callable[[Path], object], says: str, tmp_path: Path,
                                             run: Run) -> None:
    path = tmp_path / "bad.sqlite"
    make(path)
    with pytest.raises(TraceError, match=says):
        read_kineto(path)
    ran = run("inspect", str(path))
    assert ran.code == 2 and says in " ".join(ran.err.split()) and "Traceback" not in ran.err
