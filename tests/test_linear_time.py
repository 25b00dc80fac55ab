"""Inputs that took time by the square of their length: twice the input now takes twice the time.

Each took from ten seconds to minutes of processor time at such a size. The limit says that each ends, not how fast: it
is more than five times what any takes now.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graph_predictor.recorded import counted_steps
from kernel_models.collectives import text_logs
from kernel_models.collectives.call import CommError, Placement
from kernel_models.collectives.measurements import join, make_measurements, of_cluster
from kernel_models.collectives.topology import find_topology
from planner.serving import trace_calibration
from step_views.cli import price_arguments
from step_views.cli.console import Column, Report
from step_views.diff.jobs import diff_jobs
from step_views.survey import discovery
from tracer.errors import ForetraceError, TraceError
from tracer.execution_trace import trace as execution_trace
from tracer.graph import GapTable, OverheadTable
from tracer.job import read_job
from tracer.kineto import read_kineto
from tracer.kineto.nesting import _profiled
from tracer.kineto.steps import _StepWork
from tracer.memory_snapshot import _Stacks

SECONDS = 5.0


@contextmanager
def quickly() -> Iterator[None]:
    begun = time.process_time()
    yield
    assert time.process_time() - begun < SECONDS


@pytest.mark.parametrize(("search", "text"), [
    (text_logs._RANK.search, "# Rank 1 " * 18_000),
    (text_logs._UCC_SIZE.search, "\n" * 180_000),
    (lambda text: text_logs._check_units(text, 1, "a.log"), "#(B)" + "(" * 180_000),
    (execution_trace._TENSOR_TYPE.search, "Tensor((a) " * 27_000),
    (trace_calibration._STEP.search, "execute_context_1(" * 21_000),
    (price_arguments._split, "," * 180_000),
    (lambda text: discovery._IN_HEAD["rank"].search(text.encode()), '"distributedInfo":{' * 21_000),
])
def test_a_text_is_searched_once(search: Callable[[str], object], text: str) -> None:
    with quickly():
        search(text)


def event(category: str, name: str, start: int, duration: int, tid: int = 1, pid: int = 1,
          **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration,
            "args": args}


def annotated(count: int) -> list[dict[str, Any]]:
    """Annotations of collectives, and operations with their arguments that lie in none."""
    return [each for at in range(count) for each in (
        event("user_annotation", "nccl:all_reduce", 4 * at, 1),
        event("cpu_op", "record_param_comms", 4 * at + 2, 1, **{"Collective name": "allreduce"}))]


def launched_deep(count: int) -> list[dict[str, Any]]:
    """Collectives that all are launched in the innermost of nested operations."""
    return [*(event("cpu_op", "aten::a", at, 10 * count - 2 * at) for at in range(count)),
            *(each for at in range(count) for each in (
                event("cuda_runtime", "cudaLaunchKernel", count + 2 * at, 1, correlation=at + 1),
                event("kernel", "ncclDevKernel_AllReduce_Sum_f32(x)", count + 2 * at + 1, 1, 7, 0, correlation=at + 1,
                      stream=7, device=0)))]


@pytest.mark.parametrize("make", [annotated, launched_deep])
def test_collectives_are_described_in_one_pass(make: Callable[[int], list[dict[str, Any]]], tmp_path: Path) -> None:
    read_kineto(written(tmp_path, make(3)))
    path = written(tmp_path, make(16_000))
    with quickly():
        graph = read_kineto(path)
    assert len(graph.collectives) == (32_000 if make is annotated else 16_000)


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    (folder / "a.json").write_text(json.dumps({"traceEvents": events}))
    return folder / "a.json"


def test_a_file_of_very_many_processes_is_refused(tmp_path: Path) -> None:
    """It is read once for each."""
    events = [each for at in range(3000) for each in (
        event("cpu_op", "aten::a", 10 * at, 8, pid=100 + at),
        event("cuda_runtime", "cudaLaunchKernel", 10 * at + 1, 1, pid=100 + at, correlation=at + 1),
        event("kernel", "k", 10 * at + 3, 1, 7, at, correlation=at + 1, stream=7, device=at))]
    with quickly(), pytest.raises(TraceError, match="holds 3,000 processes, too many to be read from one file"):
        read_kineto(written(tmp_path, events))


def test_gaps_are_the_profilers_by_the_overlap_of_all_its_work() -> None:
    count = 80_000
    start = np.arange(count) * 10
    gaps, work = GapTable.blank(count), np.zeros(count, np.int32)
    gaps.thread, gaps.start_ns, gaps.duration_ns = work, start, np.full(count, 4)
    threads = np.where(np.arange(count) % 2, 0, -1).astype(np.int32)
    overheads = OverheadTable(work, threads, start + 2, np.full(count, 4))
    with quickly():
        assert _profiled(gaps, overheads).all()
        overheads.duration_ns[:] = 1
        assert not _profiled(gaps, overheads).any()


def test_empty_steps_are_found_in_one_pass() -> None:
    count = 40_000
    values = np.r_[np.zeros(count), np.full(count // 50, 9)]
    work = _StepWork(*[values.astype(np.int64)] * 3, *[values] * 3, np.zeros(len(values), np.bool_))
    with quickly():
        assert np.array_equal(work.empty(), values == 0)


def test_runs_of_equal_steps_are_found_in_one_pass() -> None:
    count = 400_000
    with quickly():
        runs = counted_steps._runs(np.ones(count, np.bool_), np.full((count, 2), 9), 1, 6)
    assert len(runs) == 6 * count - 15


def test_recordings_of_very_many_steps_are_not_compared(tmp_path: Path) -> None:
    job = read_job([str(written(tmp_path, [
        one for at in range(5_000) for one in (event("user_annotation", f"ProfilerStep#{at}", 3 * at, 2),
                                               event("cpu_op", "a", 3 * at, 1))]))])
    with quickly(), pytest.raises(ForetraceError, match="A has 5,000 steps, and at most 1,000 a rank are compared"):
        diff_jobs(job, job)


def test_a_table_of_very_many_rows_ends() -> None:
    shown = io.StringIO()
    with quickly(), contextlib.redirect_stdout(shown):
        Report().table("Steps", [Column("step"), Column("ms")], ([str(at), "1"] for at in range(200_000)))
    assert "… and 199,500 rows more (--json has them)." in shown.getvalue()


def test_a_stacks_long_file_is_looked_at_once() -> None:
    file = "site-packagx" * 40_000 + ".py"
    frames: list[dict[str, Any]] = [{"filename": file} for _ in range(40_000)]
    with quickly():
        assert _Stacks().place({"frames": frames}).startswith("site-packagx")


def test_rows_of_very_many_gpus_are_refused() -> None:
    """Each name is compared with those of all known devices."""
    rows = join(make_measurements([("all_reduce", "float32", Placement((8,)), 1e6, 30.0)], device=f"G{number}")
                for number in range(2000))
    with quickly(), pytest.raises(CommError, match="of 2,000 different GPUs"):
        of_cluster(rows, find_topology("dgx-h100"))
