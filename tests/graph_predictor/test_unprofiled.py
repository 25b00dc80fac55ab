"""Whose time a step is: without the profiler wherever the capture knows it, whatever is edited and whoever reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from check_support import write_capture
from micro import Micro
from said import plain
from slowly import mostly_slow
from typer.testing import CliRunner

from foretrace.commands import app
from foretrace.edits import NoDataLoading, ScaleHost, Sizes
from graph_predictor import baseline_of, replay
from graph_predictor.simulation.build import build_program
from step_views import breakdown
from step_views.diff.jobs import diff_jobs
from step_views.reports.ranks.times import recorded_times
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.job import Job, assemble_job, read_job

TRACES = Path(__file__).parents[2] / "traces"
ITERATOR = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


@pytest.fixture(scope="module")
def foreign() -> Job:
    """A capture whose program nobody knows, so that it cannot be traced again."""
    job = read_job(str(TRACES / "bert-cpu"))
    job.graphs[0].meta.workload = {}
    return job


def test_smaller_sizes_hold_that_the_rest_of_the_host_shrinks_too(foreign: Job) -> None:
    """What does not compute stays, or follows the batch: near to a quarter of the step is the least of both."""
    baseline = baseline_of(foreign)
    smaller, larger = (baseline.predict([Sizes.parse([f"batch=4:{batch}"])]) for batch in (1, 16))
    quarter = baseline.predict().step_time_us / 4
    assert smaller.interval_us[0] < 1.35 * quarter < 1.5 * quarter < smaller.step_time_us
    below = [np.log(said.step_time_us / said.interval_us[0]) for said in (smaller, larger)]
    assert below[0] > 1.2 * below[1]
    assert [any("shrinks too" in note for note in said.notes) for said in (smaller, larger)] == [True, False]


# one clock for every report

def test_reports_agree_on_the_step(foreign: Job) -> None:
    predicted = baseline_of(foreign).predict().step_time_us
    unprofiled = replay(foreign.graphs, profiled=False)
    assert not unprofiled.profiled
    steps = [step.replayed_ns / 1e3 for step in unprofiled.steps]
    assert np.mean(steps) == pytest.approx(predicted, rel=2e-3)
    result = breakdown(unprofiled)
    assert not result.profiled
    for step in result.steps:
        assert sum(step.totals.bounds.values()) == step.simulated_ns == sum(e.time_ns for e in step.totals.span)
        # Without device work all of the step is the host's own time.
        assert sum(e.host_ns for e in step.totals.operations) == pytest.approx(step.simulated_ns, rel=2e-3)
    assert np.mean([row.length_ns for step in recorded_times(unprofiled).windows for row in step]) / 1e3 == (
        pytest.approx(np.mean(steps), rel=1e-6))
    under = replay(foreign.graphs)
    assert under.profiled and under.max_abs_error < 1e-3


def test_two_clocks_are_not_compared(foreign: Job) -> None:
    """Steps without the profiler are shorter than the measured ones on purpose: what the replay under it is off counts,
    here nothing, and 10% where its host is 10% too slow."""
    for residuals in (False, True):
        exact = replay(foreign.graphs, profiled=False, residuals=residuals)
        assert not exact.profiled and all(step.replayed_ns < 0.9 * step.measured_ns for step in exact.steps)
        assert not exact.inexact and exact.max_abs_error < 1e-3 and exact.reproducible
        assert not any("off" in note for note in [*exact.notes, *breakdown(exact).notes])
    slow = build_program(foreign.graphs)
    for name in ("item_work", "item_cost"):
        setattr(slow.program, name, np.rint(getattr(slow.program, name) * 1.1).astype(np.int64))
    off = replay(foreign.graphs, built=slow, profiled=False)
    assert [step.error for step in off.inexact] == [pytest.approx(0.1, abs=0.01)] * 3
    assert any("3 of 3 steps are replayed more than 1% off" in note and "+10.0%" in note for note in off.notes)


def test_the_difference_of_two_captures_is_that_of_their_steps(foreign: Job) -> None:
    other = read_job(str(TRACES / "bert-cpu"))
    other.graphs[0].meta.unprofiled_step_ns = [2 * ns for ns in other.graphs[0].meta.unprofiled_step_ns]
    found = diff_jobs(foreign, other)
    assert not found.profiled
    expected = [baseline_of(job).predict().step_time_us * 1e3 for job in (foreign, other)]
    assert [found.before_ns, found.after_ns] == [pytest.approx(ns, rel=0.02) for ns in expected]
    assert sum(part.time_ns for part in found.parts) == found.total_ns
    assert found.attributed > 0.95
    assert diff_jobs(foreign, other, profiled=True).total_ns == 0
    other.graphs[0].meta.unprofiled_step_ns = []
    mixed = diff_jobs(foreign, other)
    assert mixed.profiled and mixed.total_ns == 0
    assert any("B does not say what its step takes without the profiler" in note for note in mixed.notes)


@pytest.fixture
def no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the unedited step of ``opportunities`` is looked at."""
    monkeypatch.setattr(import_module("step_views.reports.opportunities"), "candidates", list)


@pytest.mark.usefixtures("no_candidates")
@pytest.mark.parametrize("command", ["predict", "breakdown", "opportunities", "diff", "sweep"])
def test_commands_say_which_times_they_are(command: str, tmp_path: Path) -> None:
    source = str(TRACES / "llama-cpu")
    more = {"diff": [str(TRACES / "llama-cpu")], "sweep": ["--host", "1,0.5", "--jobs", "1", "-o", "OUT"]}
    for option, which in (([], "without the profiler"), (["--profiled"], "under the profiler")):
        arguments = [str(tmp_path / f"{which[:4]}.csv") if text == "OUT" else text for text in more.get(command, [])]
        done = CliRunner().invoke(app, [command, source, *arguments, *option])
        assert done.exit_code == 0, done.output
        assert which in plain(done.output.split("Note:")[0])
        if command != "sweep":
            values = json.loads(CliRunner().invoke(app, [command, source, *arguments, *option, "--json"]).stdout)
            assert values["times"] == which


def test_replay_is_of_the_recorded_step_and_inspect_gives_what_predict_rests_on(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["replay", str(TRACES / "llama-cpu")])
    assert "Measured and replayed steps, under the profiler" in plain(done.output) and "0.000%" in done.output
    shown = CliRunner().invoke(app, ["inspect", str(TRACES / "llama-cpu")]).output
    assert "23.932 ms under the profiler (mean of 3 steps), 19.831 ms without it (median of 30)" in plain(shown)
    path = tmp_path / "paused.foretrace"
    paused(0).save(path)
    inspected = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout)["recorded"]
    done = CliRunner().invoke(app, ["predict", str(path), "--json"])
    predicted = json.loads(done.stdout)
    assert (predicted["recorded_us"], predicted["unprofiled_us"]) == (inspected["step_us"], inspected["unprofiled_us"])
    assert predicted["recorded_us"] == pytest.approx(24_553, abs=0.5)


def with_pause(graph: ExecutionGraph, number: int, share: float = 1.0) -> ExecutionGraph:
    """A pause shortly before the end of a step, as long as a share of it."""
    pause = round(share * int(graph.steps.duration_ns[number]))
    at = int(graph.steps.start_ns[number]) + int(graph.steps.duration_ns[number]) * 9 // 10
    for table in (graph.ops, graph.launches, graph.kernels, graph.gaps, graph.steps):
        end = table.start_ns + table.duration_ns
        table.duration_ns[(table.start_ns < at) & (end > at)] += pause
        table.start_ns[table.start_ns >= at] += pause
    graph.meta.window_ns += pause
    return graph


def stated_ms(source: Path, folder: Path, *option: str) -> dict[str, float]:
    """What every command says that the unedited step takes without the profiler, ms."""
    def values(*command: str) -> Any:
        done = CliRunner().invoke(app, [*command, *option, "--json"])
        assert done.exit_code == 0, (command, done.output)
        found = json.loads(done.stdout)
        assert found.get("times", "without the profiler") == "without the profiler", command
        return found

    path, table = str(source), str(folder / "sweep.csv")
    difference = values("diff", path, path)
    (unedited, _) = values("sweep", path, "--host", "1,0.5", "--jobs", "1", "-o", table)["rows"]
    stated = {name: values(name, path)["step_time_us"] for name in ("predict", "breakdown", "opportunities")}
    stated |= {"ranks": values("ranks", path)["replayed_step_us"], "sweep": unedited["step_time_us"],
               "diff": difference["before_us"], "diff B": difference["after_us"]}
    if not option:
        stated["inspect"] = values("inspect", path)["recorded"]["unprofiled_us"]
    return {name: us / 1e3 for name, us in stated.items()}


def two_ranks(folder: Path, make: Callable[[], ExecutionGraph]) -> Path:
    """Two ranks that did the same, without collectives."""
    for rank in range(2):
        graph = make()
        graph.meta.rank, graph.meta.world_size = rank, 2
        graph.save(folder / f"rank{rank}.foretrace")
    return folder


def paused(number: int) -> ExecutionGraph:
    return with_pause(read_job(str(TRACES / "llama-cpu")).graphs[0], number)


@pytest.mark.usefixtures("no_candidates")
@pytest.mark.parametrize("outlier", mostly_slow([1, 2], [2]))
def test_every_command_states_one_time_whichever_step_paused(outlier: int, tmp_path: Path) -> None:
    """Steps of 23, 24 and 25 ms, one of them with a pause as long as itself: the step is the median of the 30 timed."""
    (tmp_path / "job").mkdir()
    stated = stated_ms(two_ranks(tmp_path / "job", lambda: paused(outlier)), tmp_path)
    assert stated == {name: pytest.approx(19.831, abs=0.002) for name in stated}
    said = CliRunner().invoke(app, ["breakdown", str(tmp_path / "job")]).output
    assert "Step without the profiler: 19.83" in said and "1 of 3 steps do not count (ProfilerStep#" in plain(said)
    if outlier == 2:
        chosen = stated_ms(tmp_path / "job", tmp_path, "--step", "1")
        assert max(chosen.values()) == pytest.approx(min(chosen.values()), rel=1e-3)


@pytest.mark.usefixtures("no_candidates")
def test_every_command_states_one_time_of_a_device_or_of_a_loader_with_workers(tmp_path: Path) -> None:
    """Nine steps of 600 µs, decided by the host; one of them pauses for as long again. What was timed, 550, is more
    than taking the profiler's cost out of the host's events gives (a device hides some of it), which predict warns of;
    replayed one after the other or repeated, the step is the same. And work of 20 ms with a batch every 22, which is no
    wait for workers, or every 50, which is."""
    def make() -> ExecutionGraph:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return with_pause(read_job(str(write_capture(folder))).graphs[0], 8)

    (tmp_path / "job").mkdir()
    stated = stated_ms(two_ranks(tmp_path / "job", make), tmp_path)
    assert stated.pop("inspect") == pytest.approx(0.550, rel=1e-3)
    assert stated == {name: pytest.approx(stated["predict"], rel=0.005) for name in stated}
    assert stated["predict"] < 0.6
    for interval, unprofiled in ((22_000, 19_000), (50_000, 40_000)):
        two_ranks(tmp_path / "job", lambda: loading(tmp_path, 20_000, interval, unprofiled=unprofiled))  # noqa: B023
        stated = stated_ms(tmp_path / "job", tmp_path)
        assert stated == {name: pytest.approx(unprofiled / 1e3, rel=0.01) for name in stated}

# loaders with worker processes

def loading(folder: Path, work: float, interval: float, *, unprofiled: float | None = None,
            steps: int = 4) -> ExecutionGraph:
    """Steps on a CPU: the batch of a worker process is taken, waited for where it is not there, and worked on.

    ::

        trainer  |take|..wait..|===== work =====||take|..wait..|===== work =====|
        worker                 batch every interval    batch
    """
    trace = Micro()
    length = max(interval, work + 100)
    for n in range(steps):
        at = 10_000 + length * n
        ready = at + length - work
        trace.step(at, at + length, n + 1)
        trace.op(ITERATOR, at + 10, ready)
        trace.op("aten::mm", ready, at + length, **{
            "Input Dims": [[64, 128], [128, 128]], "Input type": ["float", "float"]})
    graph = trace.read(folder)
    graph.meta.unprofiled_step_ns = [] if unprofiled is None else [round(1000 * unprofiled)] * 5
    return graph


def test_a_step_that_waits_for_its_batch_is_as_long_as_its_workers_take(tmp_path: Path) -> None:
    """Work of 20 ms, a batch every 50: half the work changes nothing, thrice as much takes 60 and a little."""
    baseline = baseline_of(loading(tmp_path, 20_000, 50_000))
    for factor, expected in ((1.0, 50_000), (0.5, 50_000), (3.0, 60_000)):
        said = baseline.predict([ScaleHost(factor)])
        assert said.step_time_us == pytest.approx(expected, rel=0.01)
        assert said.interval_us[0] < 0.99 * said.step_time_us < 1.01 * said.step_time_us < said.interval_us[1]
    assert any("a batch every 50.000 ms" in note and "decides the step" in note for note in baseline.predict().notes)
    assert baseline.predict([NoDataLoading()]).step_time_us == pytest.approx(20_000, rel=0.02)
    # Larger batches take their workers longer.
    doubled = baseline_of(loading(tmp_path, 1_000, 50_000)).predict([Sizes.parse(["batch=64:128"])])
    assert doubled.step_time_us == pytest.approx(100_000, rel=0.01)


def test_arrivals_under_the_profiler_are_not_those_without_it(tmp_path: Path) -> None:
    """Recorded 50 ms apart, while a step without the profiler took 40: its batches come every 40."""
    baseline = baseline_of(loading(tmp_path, 20_000, 50_000, unprofiled=40_000))
    said = baseline.predict()
    assert said.step_time_us == pytest.approx(40_000, rel=0.01) and said.interval_us[1] > 1.01 * said.step_time_us
    assert baseline.predict([ScaleHost(0.5)]).step_time_us == pytest.approx(40_000, rel=0.01)
    # The work is what is left of 20 ms, never more: what a step takes beyond it is waiting.
    assert baseline.predict([NoDataLoading()]).step_time_us < 20_100
    steps = replay(baseline.built.graphs, profiled=False).steps
    assert [step.replayed_ns for step in steps] == [pytest.approx(40_000_000, rel=0.02)] * len(steps)


def test_workers_that_kept_up_may_be_too_slow_for_a_shorter_step(tmp_path: Path) -> None:
    """Batches were ready for steps of 30 ms. Half the work is expected to take half the time, but nobody knows; nor is
    the edited step surer than the recorded one."""
    baseline = baseline_of(loading(tmp_path, 30_000, 0))
    said = baseline.predict([ScaleHost(0.5)])
    assert said.step_time_us == pytest.approx(15_050, rel=0.01)
    assert said.interval_us[1] == pytest.approx(0.9 * 30_100, rel=0.01)
    assert any("kept up with steps of 30.100 ms" in note for note in said.notes)
    for each in (said, baseline.predict([ScaleHost(1e-6)])):
        assert np.log(each.interval_us[1] / each.step_time_us) >= 0.999 * baseline.spreads.host
        assert np.log(each.step_time_us / each.interval_us[0]) >= 0.999 * baseline.spreads.host
    # Work of 20 ms and a batch every 22: whether the short wait was for the worker or for its queue is not known.
    half = baseline_of(loading(tmp_path, 20_000, 22_000)).predict([ScaleHost(0.5)])
    assert half.step_time_us < 0.7 * 22_000 < half.interval_us[1]
    assert any("kept up with steps of" in note for note in half.notes)


# what no prediction may leave out

def test_no_interval_has_no_width(tmp_path: Path, foreign: Job) -> None:
    gpu = Micro().calibrate().step(1000, 1400, 1)
    gpu.launch(1010, 5, (7, 1020, 300))
    gpu.call("cudaDeviceSynchronize", 1100, 230)
    for graph in (loading(tmp_path, 20_000, 50_000, unprofiled=40_000), loading(tmp_path, 30_000, 0, steps=1), foreign,
                  gpu.read(tmp_path)):
        for some in ([], [ScaleHost(0.5)], [ScaleHost(1e-6)]):
            said = baseline_of(graph).predict(some)
            low, high = said.interval_us
            assert low < (1 - 5e-4) * said.step_time_us < (1 + 5e-4) * said.step_time_us < high
            low, high = said.gpu_active_interval_us
            assert low < said.gpu_active_us < high or low == said.gpu_active_us == 0
            assert said.to_json()["gpu_active_interval_us"] == [low, high]


@pytest.mark.real_traces
def test_an_unsteady_recording_is_so_on_any_device(real_trace: Callable[[str], Path]) -> None:
    """Its first step fills the launch queue; that is as true of the step on another device."""
    source = [str(real_trace("resnet50-V100")), "--step", "1", "--json"]
    for more in ([], ["--device", "a100-sxm-40g"]):
        values = json.loads(CliRunner().invoke(app, ["predict", *source, *more]).stdout)
        assert any("they were no steady state" in text for text in values["warnings"])


def test_the_profilers_cost_comes_before_other_ranks(foreign: Job) -> None:
    """A job of ranks is on one clock: that of the rank whose steps were timed."""
    second = read_job(str(TRACES / "bert-cpu")).graphs[0]
    job = assemble_job([foreign.graphs[0], second])
    assert baseline_of(job).predict().times == "without the profiler"


@pytest.mark.parametrize("times", [[1, 1, 1], ["a"], [10**18], {"a": 1}])
def test_times_that_no_step_takes_are_damage(tmp_path: Path, times: Any) -> None:
    folder = write_capture(tmp_path / "capture", unprofiled_step_ns=times)
    with pytest.raises(ForetraceError, match="times of steps that cannot be"):
        read_job([str(folder)])
