"""The capture hook in one process: what it records, in which order, and what it leaves when things go wrong."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_support import small_disk
from forks import run_program
from said import Run, plain

torch = pytest.importorskip("torch")

import tracer  # noqa: E402
from graph_predictor import replay  # noqa: E402
from tracer.capture import CaptureOptions, CaptureWarning, output  # noqa: E402
from tracer.capture.options import PROFILER_WARMUP, TRACED_APART  # noqa: E402
from tracer.capture_layout import apply_context, find_parts, read_context, read_window  # noqa: E402
from tracer.device_memory import memory_timeline  # noqa: E402
from tracer.errors import CaptureError, DiskFullError, ForetraceError, TraceError  # noqa: E402
from tracer.execution_trace import read_execution_trace  # noqa: E402
from tracer.graph import ExecutionGraph, GapKind, OpKind  # noqa: E402
from tracer.output_file import full_disk_error, writing_error  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"steps": 2, "warmup": 1, "timed": 3}
SHORT_STEPS = 1 + 3 + PROFILER_WARMUP + 2 + TRACED_APART
STEP_ERROR = 0.03
"""The issue's target for a replay against the profiled steps."""


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Training:
    """A tiny training step with what real scripts have: autocast, checkpointing, accumulation, where asked for."""

    def __init__(self, forward: Callable[..., Any] | None = None, *, accumulate: int = 1, checkpoint: bool = False,
                 autocast: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, foreach=True)
        self.forward = forward(self.model) if forward else self.model
        if checkpoint:
            self.forward = partial(torch.utils.checkpoint.checkpoint, self.model, use_reentrant=False)
        self.accumulate, self.autocast = accumulate, autocast
        self.profiled: list[bool] = []

    def step(self, batch: Any = None) -> None:
        self.profiled.append(torch.autograd._profiler_enabled())
        batch = torch.randn(8, 16) if batch is None else batch
        self.optimizer.zero_grad()
        for _ in range(self.accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = self.forward(batch).float().square().mean()
            loss.backward()
        self.optimizer.step()


def record(out: Path, training: Training, **options: Any) -> Any:
    with tracer.capture(out, **{**SHORT, **options}) as capture:
        while not capture.finished:
            training.step()
            capture.step()
    return capture


def step_names(graph: ExecutionGraph) -> list[str]:
    return [graph.string(code) for code in graph.steps.name.tolist()]


def assert_joined_both_ways(graph: ExecutionGraph, part: Path) -> None:
    """Every operation has its node and every node of that window its operation, steps themselves apart."""
    steps = np.array([name.startswith("ProfilerStep#") for name in graph.strings])[graph.ops.name]
    assert graph.meta.et_joined == graph.meta.et_candidates == int((~steps).sum()) > 0
    assert ((graph.ops.et_node >= 0) == ~steps).all()
    trace = read_execution_trace(part / "et.json.gz")
    ids = graph.ops.record_id[graph.ops.record_id > 0]
    inside = (trace.record_id >= ids.min()) & (trace.record_id <= ids.max())
    assert np.isin(trace.record_id[inside], ids).all()
    by_node = dict(zip(trace.id.tolist(), trace.record_id.tolist(), strict=True))
    joined = graph.ops.et_node >= 0
    assert [by_node[node] for node in graph.ops.et_node[joined].tolist()] == graph.ops.record_id[joined].tolist()


def assert_replays(graphs: list[ExecutionGraph], steps: int) -> None:
    """The annotation's borders lie some microseconds outside the two clock readings. A busy machine may give the
    processor to another in between, for as long as it likes."""
    result = replay(graphs)
    assert len(result.steps) == steps * len(graphs) and result.max_abs_error <= STEP_ERROR
    for graph in graphs:
        context = read_context(Path(graph.meta.source).parent)
        mine = [step.replayed_ns for step in result.steps if step.rank == max(graph.meta.rank, 0)]
        pairs = list(zip(mine, context["profiled_step_ns"][:steps], strict=True))
        assert all(outer > inner * (1 - STEP_ERROR) for outer, inner in pairs)
        assert context["machine"]["verdict"]["reasons"] or any(
            outer == pytest.approx(inner, rel=STEP_ERROR, abs=1_000_000) for outer, inner in pairs)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Training]:
    torch.set_num_threads(1)
    training = Training()
    out = tmp_path_factory.mktemp("capture") / "a"
    record(out, training)
    return out, training


# --- what is recorded --------------------------------------------------------------------------------------------


def test_truth_comes_before_the_profile(eager: tuple[Path, Training]) -> None:
    out, training = eager
    assert training.profiled == [False] * (4 + PROFILER_WARMUP) + [True] * 2 + [False] * TRACED_APART
    context = read_context(out / "rank0")
    timed, profiled = context["unprofiled_step_ns"], context["profiled_step_ns"]
    assert context["complete"] is True and (len(timed), len(profiled)) == (3, 2)
    assert context["unprofiled_median_ns"] == sorted(timed)[1]
    assert context["profiler_slowdown"] == pytest.approx(np.median(profiled) / sorted(timed)[1], rel=1e-3)
    assert context["hardware"]["cpu"] and context["hardware"]["cores"] >= 1
    assert context["software"]["torch"] == torch.__version__ and context["torch_threads"] == 1
    assert context["peak_memory"]["host_bytes"] > 10_000_000
    assert context["switches"]["cudnn_benchmark"] is False


def test_reading_gives_the_job_with_its_context(eager: tuple[Path, Training]) -> None:
    out, _ = eager
    job = tracer.read_job(out)
    (graph,) = job.graphs
    # On a busy machine, which is said, steps are without what they waited for a processor.
    notes = [note for note in job.notes if "the machine" not in note]
    assert (graph.meta.rank, graph.meta.world_size, job.missing_ranks, notes) == (0, 1, [], [])
    assert step_names(graph) == ["ProfilerStep#2", "ProfilerStep#3"]
    pairs = zip(graph.meta.unprofiled_step_ns, read_context(out / "rank0")["unprofiled_step_ns"], strict=True)
    assert all(0 < own <= timed for own, timed in pairs)
    assert graph.meta.profiler_flags["record_shapes"] and not graph.meta.profiler_flags["with_stack"]
    matmul = np.flatnonzero(np.array(graph.strings)[graph.ops.name] == "aten::addmm")[0]
    assert [argument.shape for argument in graph.arguments(int(matmul))][:3] == [(32,), (8, 16), (16, 32)]
    assert graph.string(int(graph.ops.strides[matmul]))
    one_rank = tracer.read_job(out / "rank0")
    assert one_rank.graphs[0].meta.unprofiled_step_ns == graph.meta.unprofiled_step_ns


@pytest.mark.parametrize("cycles", [1, 2])
def test_join_and_replay_eager(tmp_path: Path, cycles: int) -> None:
    record(tmp_path, Training(accumulate=2, autocast=True), cycles=cycles, execution_trace="all")
    check_windows(tmp_path, cycles)


def test_checkpointing(tmp_path: Path) -> None:
    """Recomputation ends early by an exception out of its last operation, which the execution trace then leaves out."""
    record(tmp_path, Training(checkpoint=True), execution_trace="all")
    (graph,) = tracer.read_job(tmp_path).graphs
    interrupted = np.flatnonzero((graph.ops.et_node < 0) & (graph.ops.kind == OpKind.OPERATION))
    names = [graph.string(int(code)) for code in graph.ops.name[interrupted]]
    assert names in ([], ["aten::linear", "aten::addmm"] * 2)
    assert graph.meta.et_joined == graph.meta.et_candidates - len(names)
    assert_replays([graph], 2)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_join_and_replay_compiled_one_cycle_and_two(tmp_path: Path) -> None:
    training = Training(torch.compile)
    for cycles in (1, 2):
        record(tmp_path / str(cycles), training, cycles=cycles, execution_trace="all")
        check_windows(tmp_path / str(cycles), cycles)
        names = read_window(tmp_path / str(cycles) / "rank0").strings
        assert any("Compiled" in name or "cpp_fused" in name for name in names)


def check_windows(out: Path, cycles: int) -> None:
    (part,) = find_parts(out)
    assert len(part.windows) == cycles
    for window in range(cycles):
        job = tracer.read_job(out, window=window)
        first = window * (PROFILER_WARMUP + 2) + PROFILER_WARMUP
        assert step_names(job.graphs[0]) == [f"ProfilerStep#{first}", f"ProfilerStep#{first + 1}"]
        assert_joined_both_ways(job.graphs[0], part.path)
        if window == 0:
            assert_replays(job.graphs, 2)
    with pytest.raises(TraceError, match=f"has {'one window' if cycles == 1 else '2 windows'}"):
        tracer.read_job(out, window=cycles)


def test_execution_trace_in_a_step_of_its_own(tmp_path: Path, run: Run) -> None:
    """No operation of a window pays for it, and one step of each window is joined to it by sequence."""
    out, saved = tmp_path / "a", tmp_path / "second.foretrace"
    record(out, Training(), cycles=2)
    trace = read_execution_trace(out / "rank0" / "et.json.gz")
    for window, names in enumerate((["ProfilerStep#2", "ProfilerStep#3"], ["ProfilerStep#6", "ProfilerStep#7"])):
        (graph,) = tracer.read_job(out, window=window).graphs
        assert graph.meta.et_joined == graph.meta.et_candidates > 0
        assert trace.record_id[trace.record_id > 0].min() > graph.ops.record_id.max()
        assert len(np.unique(graph.ops.step[graph.ops.et_node >= 0])) == 1
        found = run("replay", out, "--window", window, "--json").json["steps"]
        assert step_names(graph) == [step["step"] for step in found] == names
    told = run("breakdown", out, "--window", 1, "--json").out
    assert "ProfilerStep#6" in told and "ProfilerStep#2" not in told
    told = run("inspect", out).out
    assert "--window N (window=N) reads another, from 0 to 1" in plain(told)
    assert run("inspect", out, "--window", 1).out != told
    assert run("convert", out, "--window", 1, "-o", saved).code == 0
    assert step_names(tracer.read_job(saved).graphs[0]) == names
    for wrong, says in ((("inspect", out, "--window", 2), "2 windows, so there is no window 2; choose one from 0"),
                        (("replay", saved, "--window", 1), "only the directory of a capture has several")):
        code, _, err = run(*wrong)
        assert code == 2 and says in err and err.count("\n") == 1
    with pytest.raises(TraceError, match="no window -1"):
        tracer.read_job(out, window=-1)
    record(tmp_path / "none", Training(), execution_trace="none")
    assert not (tmp_path / "none" / "rank0" / "et.json.gz").exists()


def test_one_file_form_holds_the_same_graph(tmp_path: Path) -> None:
    record(tmp_path, Training(), form="foretrace")
    assert sorted(path.name for path in (tmp_path / "rank0").iterdir()) == ["context.json", "graph.foretrace"]
    (graph,) = tracer.read_job(tmp_path).graphs
    assert graph.meta.et_joined == graph.meta.et_candidates > 0 and graph.meta.source == "rank0/kineto.json.gz"
    assert len(graph.meta.unprofiled_step_ns) == 3
    assert replay(graph).max_abs_error <= STEP_ERROR


def test_no_names_of_people_machines_or_places(eager: tuple[Path, Training]) -> None:
    out, _ = eager
    text = b"".join(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                    for path in (out / "rank0").iterdir())
    for name in (socket.gethostname(), str(out), os.path.expanduser("~") + "/", os.path.dirname(sys.executable)):
        assert name.encode() not in text
    assert not list((out / "rank0").glob(".*"))


def test_any_loader_shows_as_data_loading(tmp_path: Path) -> None:
    training = Training()
    with tracer.capture(tmp_path, **SHORT) as capture:
        loader = capture.wrap([torch.randn(8, 16)] * 20)
        assert len(loader) == 20
        for batch in loader:
            training.step(batch)
            capture.step()
    graph = tracer.read_job(tmp_path).graphs[0]
    assert any(name.startswith("enumerate(DataLoader)#list") for name in graph.strings)
    assert capture.finished and (graph.gaps.kind == GapKind.DATA_LOADING).any()
    torch_loader = torch.utils.data.DataLoader([1])
    assert capture.wrap(torch_loader) is torch_loader


def test_decorator_and_what_is_left_of_it(tmp_path: Path) -> None:
    training = Training()
    decorated = tracer.capture(tmp_path, **SHORT)(training.step)
    for _ in range(SHORT_STEPS + 3):
        decorated()
    assert training.profiled == [False] * (4 + PROFILER_WARMUP) + [True] * 2 + [False] * (TRACED_APART + 3)
    assert read_context(tmp_path / "rank0")["complete"] is True


# --- when things go wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "windows", "timed"), [(2, 0, 1), (SHORT_STEPS - 1 - TRACED_APART, 1, 3)])
def test_a_crash_leaves_its_exception_and_what_was_recorded(tmp_path: Path, at: int, windows: int, timed: int) -> None:
    training, crash = Training(), ValueError("mine")
    with pytest.raises(ValueError) as caught, warnings.catch_warnings():
        warnings.simplefilter("error")
        with tracer.capture(tmp_path, execution_trace="all", **SHORT) as capture:
            for number in range(100):
                training.step()
                if number == at:
                    raise crash
                capture.step()
    assert caught.value is crash and crash.__cause__ is None and crash.__context__ is None
    assert not torch.autograd._profiler_enabled()
    context = read_context(tmp_path / "rank0")
    assert (context["complete"], context["ended"]) == (False, "the step raised ValueError.")
    assert len(context["unprofiled_step_ns"]) == timed
    assert len(find_parts(tmp_path)[0].windows) == windows
    if not windows:
        with pytest.raises(TraceError, match=r"1 timed step and no trace.*ValueError"):
            tracer.read_job(tmp_path)
        return
    job = tracer.read_job(tmp_path)
    assert step_names(job.graphs[0]) == ["ProfilerStep#2"]  # the one that crashed is no step
    assert "UnfinishedStep#3" in job.graphs[0].strings
    assert any("not complete" in note for note in job.notes)
    assert_joined_both_ways(job.graphs[0], tmp_path / "rank0")
    with pytest.raises(CaptureError, match=r"partial capture \(3 timed steps and 1 trace: the step raised ValueError"):
        record(tmp_path, Training())
    assert read_context(tmp_path / "rank0") == context  # nothing is lost unasked
    record(tmp_path, Training(), replace=True)
    assert read_context(tmp_path / "rank0")["complete"] is True


@pytest.mark.parametrize("steps", [0, 4, SHORT_STEPS - 1 - TRACED_APART, SHORT_STEPS - 1])
def test_too_few_steps_warn_and_stay_readable(tmp_path: Path, steps: int) -> None:
    training = Training()
    with pytest.warns(CaptureWarning, match=f"after {steps} of the {SHORT_STEPS} steps it needs"), \
            tracer.capture(tmp_path, **SHORT) as capture:
        for _ in range(steps):
            training.step()
            capture.step()
    assert read_context(tmp_path / "rank0")["complete"] is False
    if steps >= SHORT_STEPS - 1 - TRACED_APART:
        names = ["ProfilerStep#2", "ProfilerStep#3"][:steps - SHORT_STEPS + 2 + TRACED_APART]
        assert step_names(tracer.read_job(tmp_path).graphs[0]) == names
    else:
        with pytest.raises(TraceError, match="no trace"):
            tracer.read_job(tmp_path)
    if steps == 0:
        record(tmp_path, training)  # where nothing was measured there is nothing to keep


def test_too_few_steps_say_how_they_are_counted(tmp_path: Path) -> None:
    parts = r"\(1 warm-up \+ 3 timed \+ 2 profiler warm-up \+ 2 profiled \+ 1 traced"
    with pytest.warns(CaptureWarning, match=rf"{parts}\): capture\.step\(\) was never called"), \
            tracer.capture(tmp_path / "a", **SHORT):
        pass
    decorating = tracer.capture(tmp_path / "b", **SHORT)
    decorated = decorating(Training().step)
    for batch in decorating.wrap([torch.randn(8, 16)] * 2):  # a function's capture begins with its first call
        decorated(batch)
    with pytest.warns(CaptureWarning, match=rf"after 2 of the {SHORT_STEPS} calls of the decorated function it needs "
                                            rf"{parts}; each call is one step\), in the timed steps"):
        decorating.__exit__(None, None, None)
    twice = CaptureOptions(warmup=0, timed=0, cycles=2)
    assert twice.parts == "2 × (2 profiler warm-up + 3 profiled) + 1 traced" and twice.total_steps == 11
    assert CaptureOptions(warmup=0, timed=0, cycles=2, execution_trace="all").total_steps == 10


@pytest.mark.parametrize(("wrong", "says"), [
    *[({name: value}, name) for name, value in (
        ("steps", 0), ("warmup", -1), ("timed", 1.5), ("cycles", True), ("form", "pickle"),
        ("execution_trace", "some"))],
    ({"out": None}, "give a path"), ({"out": ""}, "is no directory for a capture"), ({"out": " "}, "is no directory"),
    ({"out": "a\nb"}, "has a line break"), ({"out": "a\0b"}, "a null character"),
    ({"out": "s3://bucket/run"}, "give a local directory")])
def test_wrong_arguments_one_sentence_each(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        tracer.capture(**{"out": tmp_path, **wrong})


def test_a_capture_begins_once_and_not_inside_another(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="before the capture began"):
        tracer.capture(tmp_path).step()
    with pytest.raises(CaptureError, match=r"wrap\(\) was called before the capture began"):
        tracer.capture(tmp_path).wrap([1])
    assert not any(tmp_path.iterdir())
    with pytest.warns(CaptureWarning), tracer.capture(tmp_path / "outer") as outer:
        with pytest.raises(CaptureError, match=r"outer is already running.*do not nest"), \
                tracer.capture(tmp_path / "inner"):
            pass
        assert not outer.finished and not (tmp_path / "inner").exists()
    with pytest.raises(CaptureError, match="runs once"):
        outer.__enter__()


def test_another_profiler_or_an_unwritable_directory_is_told_before_a_step(tmp_path: Path) -> None:
    own, training = partial(torch.profiler.profile, activities=[torch.profiler.ProfilerActivity.CPU]), Training()
    with own(), pytest.raises(CaptureError, match="Another torch profiler"), tracer.capture(tmp_path / "deep" / "a"):
        raise AssertionError("the loop was entered")
    assert not any(tmp_path.iterdir())
    with contextlib.ExitStack() as stack, pytest.raises(CaptureError, match="Another torch profiler"), \
            tracer.capture(tmp_path, **SHORT) as capture:
        for number in range(20):
            training.step()
            capture.step()
            if number == 1:
                stack.enter_context(own())
    assert number == 2
    with pytest.raises(TraceError, match=r"1 timed step and no trace.*another torch profiler was running"):
        tracer.read_job(tmp_path)
    record(tmp_path, Training(), replace=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match=r"cannot be written to .*file.*Not a directory"), \
            tracer.capture(tmp_path / "file"):
        raise AssertionError("the loop was entered")


def test_a_complete_capture_is_not_overwritten_unasked(eager: tuple[Path, Training], tmp_path: Path) -> None:
    part = tmp_path / "a" / "rank0"
    shutil.copytree(eager[0], tmp_path / "a")
    (part / "mine.txt").write_text("keep")
    with pytest.raises(CaptureError, match="already holds a complete capture"), tracer.capture(tmp_path / "a"):
        pass
    before = sorted(path.name for path in part.iterdir())
    with pytest.warns(CaptureWarning), tracer.capture(tmp_path / "a", replace=True):
        pass
    assert sorted(path.name for path in part.iterdir()) == before  # by nothing it is not replaced
    with pytest.warns(CaptureWarning), tracer.capture(tmp_path / "a", warmup=0, replace=True) as capture:
        capture.step()
    assert sorted(path.name for path in part.iterdir()) == ["context.json", "mine.txt"]


HOLDER = """
import sys, time
from pathlib import Path
from tracer.output_file import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_two_processes_do_not_capture_into_one_directory(eager: tuple[Path, Training], tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fcntl")
    part = tmp_path / "a" / "rank0"
    shutil.copytree(eager[0] / "rank0", part)
    (part / ".scratch-1").mkdir()
    monkeypatch.setattr("tracer.output_file._PATIENCE_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(part)], stdout=subprocess.PIPE,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        for replace in (False, True):
            with pytest.raises(CaptureError, match=r"Another process is capturing into .*rank0"), \
                    tracer.capture(tmp_path / "a", replace=replace):
                raise AssertionError("the loop was entered")
        assert read_context(part)["complete"] is True and (part / ".scratch-1").exists()
        holder.kill()
    # A process that was killed keeps nobody out, and what it left goes.
    assert sorted(path.name for path in part.glob(".*")) == [".lock", ".scratch-1"]
    record(tmp_path / "a", Training(), replace=True)
    assert not list(part.glob(".*"))


def test_ranks_of_a_larger_run_do_not_stay_behind(eager: tuple[Path, Training], tmp_path: Path) -> None:
    """Left beside the new rank 0, they would be read as one job with it, which they are not."""
    shutil.copytree(eager[0] / "rank0", tmp_path / "a" / "rank1")
    (tmp_path / "a" / "rank1" / "mine.txt").write_text("keep")
    with pytest.raises(CaptureError, match="rank 1 of a larger job"), tracer.capture(tmp_path / "a"):
        pass
    assert (tmp_path / "a" / "rank1" / "context.json").exists()
    with pytest.warns(CaptureWarning), tracer.capture(tmp_path / "a", replace=True):
        pass
    assert [path.name for path in (tmp_path / "a" / "rank1").iterdir()] == ["mine.txt"]


def test_a_disk_that_fills_up_under_the_profiler_is_told(tmp_path: Path) -> None:
    """torch's C++ side prints a line and leaves no file."""
    with small_disk(tmp_path, "100k") as disk:
        with pytest.raises(DiskFullError, match=r"The disk is full: .*a/rank0 \(No space left on device; 0\.\d MB"):
            record(disk / "a", Training(accumulate=20))
        with pytest.raises(TraceError, match=r"3 timed steps and no trace: .*the disk was full"):
            tracer.read_job(disk / "a")
        assert not list((disk / "a" / "rank0").glob(".*"))


@pytest.mark.parametrize(("problem", "free", "error", "said"), [
    (OSError(errno.ENOSPC, "No space left on device"), 0, DiskFullError, "The disk is full: .*No space left on device"),
    (None, 300_000, DiskFullError, r"The disk is full: .*broke off; 0\.3 MB are free there"),
    (None, 10**12, CaptureError, r"to the end, although 1,000,000\.0 MB are free there"),
    (OSError(errno.EFBIG, "File too large"), 10**12, CaptureError, r"\(File too large\): free space"),
])
def test_a_trace_that_broke_off_is_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: OSError | None,
                                             free: int, error: type[Exception], said: str) -> None:
    monkeypatch.setattr(output, "writing_error", lambda folder: problem)
    monkeypatch.setattr("tracer.output_file.free_bytes", lambda folder: free)
    monkeypatch.setattr(output, "free_bytes", lambda folder: free)
    for text in (None, '{"traceEvents": [{'):
        part = output.PartWriter(tmp_path, 0, False)
        if text is not None:
            (part.scratch / "kineto-0.json").write_text(text)
        with pytest.raises(CaptureError, match=said) as told:
            part.store_trace(part.scratch / "kineto-0.json", "kineto.json.gz")
        part.close()
        assert type(told.value) is error and not any(tmp_path.iterdir())
        assert (full_disk_error(told.value) is not None) == (error is DiskFullError)


def test_a_full_disk_is_found_among_causes(tmp_path: Path) -> None:
    told, full = TraceError("cannot be written"), OSError(errno.ENOSPC, "No space left on device")
    told.__cause__ = full
    assert full_disk_error(told) is full
    assert full_disk_error(OSError(errno.EACCES, "no")) is None and full_disk_error(None) is None
    assert writing_error(tmp_path) is None and not any(tmp_path.iterdir())
    missing = writing_error(tmp_path / "nowhere")
    assert missing is not None and missing.errno == errno.ENOENT


def test_what_ran_at_the_borders_of_all_steps_is_told(eager: tuple[Path, Training], tmp_path: Path) -> None:
    out = tmp_path / "a"
    shutil.copytree(eager[0], out)
    context = read_context(out / "rank0")
    took = tracer.read_job(out).graphs[0].steps.duration_ns
    least = max(2_000_000, int(took.max()) // 2)  # a busy machine makes long steps, of which this is no small part
    for shorter, notes in (([least, 2 * least], 1), ([least, 0], 0)):
        changed = {**context, "profiled_step_ns": (took - np.array(shorter)).tolist()}
        (out / "rank0" / "context.json").write_text(json.dumps(changed))
        told = [note for note in tracer.read_job(out).notes if "at its borders" in note]
        assert len(told) == notes and all(f"lasts at least {least / 1e6:.3f} ms longer" in each for each in told)


def test_changes_of_memory_are_recorded_where_asked_for(eager: tuple[Path, Training], tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match=r"record it with --profile-memory \(profile_memory=True\)"):
        memory_timeline(tracer.read_job(eager[0]).graphs[0])
    record(tmp_path, Training(), profile_memory=True)
    graph = tracer.read_job(tmp_path).graphs[0]
    assert graph.meta.profiler_flags["profile_memory"] and len(memory_timeline(graph).steps) == 2


@pytest.mark.parametrize(("name", "text"), [("collectives", '{"rows": [{"op": 1}]}'), ("context", '{"complete": tr')])
def test_damaged_side_files_are_told(eager: tuple[Path, Training], tmp_path: Path, name: str, text: str) -> None:
    shutil.copytree(eager[0] / "rank0", tmp_path / "rank0")
    (tmp_path / "rank0" / f"{name}.json").write_text(text)
    with pytest.raises(TraceError, match=rf"{name}\.json cannot be read"):
        tracer.read_job(tmp_path)


def test_the_committed_trace_is_a_part_too() -> None:
    graph = tracer.read_job(ROOT / "traces" / "cpu-small").graphs[0]
    assert len(graph.meta.unprofiled_step_ns) == 30
    graph.meta.unprofiled_step_ns = []
    assert apply_context(graph, ROOT / "traces" / "cpu-small") and not apply_context(graph, ROOT / "tests")


# --- programs without a line for it ------------------------------------------------------------------------------

SCRIPT = '''
import sys
import torch
from torch import nn

def main():
    asked = dict(zip(sys.argv[1::2], map(int, sys.argv[2::2])))
    net, head = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    other = torch.optim.Adam(head.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    data = torch.utils.data.TensorDataset(torch.randn(8192, 16))
    for number, (batch,) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
        if number == 2 * asked.get("--updates", 1000):
            break
        if number == asked.get("--fail-at"):
            raise KeyError("the script's own")
        if number == asked.get("--exit-at"):
            sys.exit(3)
        head(net(batch)).square().mean().backward()
        if number % 2:
            optimizer.step()
            other.step()
            optimizer.zero_grad()
            other.zero_grad()
            schedule.step()
    print("ran to its end")

if __name__ == "__main__":
    main()
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


COMMAND = "import sys; sys.argv[0] = 'foretrace'; from foretrace.commands import main; sys.exit(main())"
COUNTS = ("--warmup", "1", "--timed", "2", "--steps", "2")


def test_an_unmodified_script_that_changes_its_directory(script: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    script.write_text("import os\nos.chdir('elsewhere')\n" + SCRIPT)
    result = run_program(COMMAND, "capture", *COUNTS, "--out", "out", script, "--", "--updates", 500, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"Recorded 2 steps in {Path('out', 'rank0')}\n" in result.stdout
    assert "ran to its end" not in result.stdout and not any((tmp_path / "elsewhere").iterdir())
    for noise in ("lr_scheduler", "USDT", "Execution Trace Observer"):
        assert noise not in result.stderr
    (graph,) = tracer.read_job(tmp_path / "out").graphs
    assert step_names(graph) == ["ProfilerStep#2", "ProfilerStep#3"]
    names = np.array(graph.strings)[graph.ops.name]
    for step in range(2):
        inside = names[graph.ops.step == step]
        assert (inside == "Optimizer.step#SGD.step").sum() == (inside == "Optimizer.step#Adam.step").sum() == 1
        assert sum(name.startswith("enumerate(DataLoader)#") for name in inside) == 2  # both micro-batches
    assert graph.meta.loss.clamped_children == 0
    assert graph.meta.et_joined == graph.meta.et_candidates == int((graph.ops.step == 1).sum()) - 1  # its step apart
    assert_replays([graph], 2)


def test_a_script_too_short_and_one_that_fails(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> \
        None:
    from tracer.capture import Capture, CaptureOptions
    from tracer.capture.script import run_script

    options = CaptureOptions(steps=2, warmup=1, timed=2)
    with pytest.raises(CaptureError, match=r"after 8 of the 9 optimizer steps it needs \(1 first \+ 1 warm-up"):
        run_script(script, ["--updates", "8"], Capture(tmp_path / "short", options))
    assert capsys.readouterr().out == "ran to its end\n"
    assert run_script(script, ["--updates", "9"], Capture(tmp_path / "enough", options)).finished
    with pytest.raises(KeyError, match="the script's own"):
        run_script(script, ["--fail-at", "15"], Capture(tmp_path / "failed", options))
    assert read_context(tmp_path / "failed" / "rank0")["ended"] == "the step raised KeyError."
    assert step_names(tracer.read_job(tmp_path / "failed").graphs[0]) == ["ProfilerStep#2"]
    done = run_script(script, ["--updates", "12"], Capture(tmp_path / "on", options), afterwards="continue")
    assert done.finished and capsys.readouterr().out == "ran to its end\n"
    (tmp_path / "no.py").write_text("print('no training here')")
    with pytest.raises(CaptureError, match="without a single optimizer step"):
        run_script(tmp_path / "no.py", [], Capture(tmp_path / "no", options))
    with pytest.raises(CaptureError, match="There is no script"):
        run_script(tmp_path / "absent.py", [], Capture(tmp_path / "no", options))


def test_a_script_that_ends_early_is_told_as_python_would_and_what_was_kept(
        script: Path, tmp_path: Path, run: Run) -> None:
    def captured(*arguments: str) -> tuple[int, list[str]]:
        code, _, err = run("capture", "--out", tmp_path / "deep" / "out", *COUNTS, script, "--", *arguments)
        return code, [line for line in err.splitlines() if "profiler" not in line]

    code, lines = captured("--fail-at", "1")  # before the first optimizer step
    assert code == 1 and lines[0] == "Traceback (most recent call last):"
    frames = [line for line in lines if line.startswith("  File ")]
    assert all(f'"{script}"' in frame for frame in frames)
    assert [frame.rpartition(", in ")[2] for frame in frames] == ["<module>", "main"]
    assert lines[-2:] == ["KeyError: \"the script's own\"",
                          f"foretrace: {script} failed with KeyError; nothing was recorded."]
    code, lines = captured("--exit-at", "1")
    assert (code, lines) == (3, [f"foretrace: {script} ended itself with exit status 3; nothing was recorded."])
    assert not (tmp_path / "deep").exists()
    code, lines = captured("--exit-at", "9")
    part = tmp_path / "deep" / "out" / "rank0"
    assert (code, lines) == (3, [
        f"foretrace: {script} ended itself with exit status 3; {part} holds a partial capture (2 timed steps and no "
        "trace: the script ended itself)."])
    (tmp_path / "broken.py").write_text("def f(:\n")
    code, _, err = run("capture", "--out", tmp_path / "b", tmp_path / "broken.py")
    assert code == 1 and "Traceback" not in err and "SyntaxError: invalid syntax" in err


def test_our_frames_are_taken_out_of_a_chain_of_exceptions(script: Path, tmp_path: Path) -> None:
    """An optimizer's own closure fails inside our wrapper, and the script wraps that in its own exception."""
    from tracer.capture.script import run_script, without_our_frames

    script.write_text("import torch\n"
                      "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])\n"
                      "optimizer.step()\n"
                      "try:\n"
                      "    optimizer.step(lambda: 1 / 0)\n"
                      "except ZeroDivisionError as error:\n"
                      "    raise ValueError('mine') from error\n")
    with pytest.raises(ValueError, match="mine") as told:
        run_script(script, [], tracer.capture(tmp_path / "out"))
    text = "".join(traceback.format_exception(without_our_frames(told.value, script)))
    assert text.count(f'File "{script}"') == 3 and "optimizer.py" in text  # torch's own frames stay
    assert str(ROOT / "tracer") not in text and "runpy" not in text


def test_wrong_command_lines_are_one_sentence(script: Path, tmp_path: Path, run: Run) -> None:
    for arguments, told in (
            ((), "Name what to capture: a script, or a workload"),
            ((script, "--workload", "llama"), f"Both the script {script} and the workload llama are named"),
            ((script, "--updates", "3"), f"put -- before the script's arguments: {script} -- --updates"),
            ((script, "--set", "a=b"), "--set belongs to --workload"),
            ((script, "--optimizer", "-1"), "optimizer=-1 is not possible"),
            (("--optimizer", "0", "--workload", "llama"), "optimizer")):
        code, _, err = run("capture", "--out", tmp_path / "out", *arguments)
        assert code == 2 and told in err and err.startswith("foretrace: ") and err.count("\n") == 1
    code, _, err = run("capture", "--out", tmp_path / "out", "--workload", "llama", "--nonsense")
    assert code == 2 and "No such option: --nonsense" in err and " -- " not in err


def test_a_workload_of_the_suite(tmp_path: Path, run: Run) -> None:
    code, _, err = run("capture", *COUNTS, "--out", tmp_path / "w", "--workload", "llama", "--preset", "tiny")
    assert code == 0, err
    workload = read_context(tmp_path / "w" / "rank0")["workload"]
    assert workload["name"] == "llama" and workload["split"] in ("fit", "held-out")
    assert_replays(tracer.read_job(tmp_path / "w").graphs, 2)


# --- what scripts do ---------------------------------------------------------------------------------------------


ADVERSARIAL = """
import torch
first, second = torch.nn.Linear(4, 4), torch.nn.Linear(8, 8)
one, other = torch.optim.SGD(first.parameters()), torch.optim.Adam(second.parameters())
for number in range(200):
    first(torch.ones(2, 4)).sum().backward()
    one.step()
    if number % 5 == 4:
        second(torch.ones(2, 8)).sum().backward()
        other.step()
"""


def test_optimizers_that_step_at_different_rates(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "gan.py"
    path.write_text(ADVERSARIAL)
    told = "while optimizer 1 (Adam, 72 parameters) made 1 meanwhile, not as many in each; --optimizer 1 counts"
    code, out, _ = run("capture", "--out", tmp_path / "a", *COUNTS, path)
    assert code == 0 and told in plain(out)
    assert any(told in note for note in tracer.read_job(tmp_path / "a").notes)
    assert read_context(tmp_path / "a" / "rank0")["optimizers"]["seen"][0] == {
        "class": "SGD", "parameters": 20, "steps": 8}
    code, out, _ = run("capture", "--out", tmp_path / "b", *COUNTS, "--optimizer", "1", path)
    assert code == 0 and "Note" not in out
    (graph,) = tracer.read_job(tmp_path / "b").graphs
    names = np.array(graph.strings)[graph.ops.name]
    for step in range(2):
        assert (names[graph.ops.step == step] == "Optimizer.step#SGD.step").sum() == 5
        assert (names[graph.ops.step == step] == "Optimizer.step#Adam.step").sum() == 1
    code, _, err = run("capture", "--out", tmp_path / "c", *COUNTS, "--optimizer", "2", path)
    assert code == 2 and "no optimizer 2: those that made a step are 0 (SGD, 20 parameters), 1 (Adam" in err
    assert not (tmp_path / "c").exists()


def test_without_torch_it_is_one_sentence(script: Path, tmp_path: Path) -> None:
    """Only commands need torch: a capture is made without, however ``tracer.capture`` is imported."""
    code = ("import json, sys; sys.modules['torch'] = None; import tracer\n"
            "from tracer.capture.script import run_script\n"
            "from tracer import capture\n"
            "assert tracer.capture('x').finished is False and capture('x') is not None\n"
            "from foretrace.commands import main\n"
            "for words in json.loads(sys.argv[1]):\n"
            "    sys.argv = ['foretrace', *words]\n"
            "    try:\n        main()\n"
            "    except SystemExit as error:\n        print(error.code)\n")
    capture, llama = ["capture", "--out", str(tmp_path / "out")], ["--workload", "llama"]
    world = [*capture, *llama, "--world-size", "4", "--parallel"]
    commands = [[*capture, *llama], [*capture, str(script)], [*world, "ddp"],
                ["trace", *llama, "-o", str(tmp_path / "a.foretrace")], [*world, "tp=3"]]
    result = subprocess.run([sys.executable, "-c", code, json.dumps(commands)], cwd=ROOT, capture_output=True,
                            text=True, timeout=120, check=False)
    *said, last = result.stderr.splitlines()
    assert result.stdout.split() == ["2"] * 5 and len(said) == 4, result.stderr
    assert all("PyTorch; install it with: pip install 'foretrace[capture]'" in line for line in said)
    assert "which is not the world size 4" in last  # what is wrong with the command itself is told first
    assert not (tmp_path / "out").exists()
