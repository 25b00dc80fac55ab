"""A replay that is off is reported, and what rests on it is wider."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from micro import Micro
from typer.testing import CliRunner

from foretrace.commands import app
from graph_predictor.prediction.replay import ReplayErrors, replay
from graph_predictor.simulation.build import Built, build_program
from graph_predictor.synthesis.baseline import baseline_of, predict
from tracer.graph import ExecutionGraph
from tracer.job import read_job


def device_bound(folder: Path) -> ExecutionGraph:
    """Two steps of 1000, a kernel of 900 each, which the step waits for."""
    trace = Micro().calibrate()
    for number in (1, 2):
        at = 1000 * number
        trace.step(at, at + 1000, number)
        trace.launch(at + 10, 5, (7, at + 20, 900))
        trace.call("cudaDeviceSynchronize", at + 30, 900)
    return trace.read(folder)


def too_long(graphs: list[ExecutionGraph]) -> Built:
    """What a missing rule does: kernels in the way for 10% longer than they were."""
    built = build_program(graphs)
    built.program.kernel_duration = np.rint(built.program.kernel_duration * 1.1).astype(np.int64)
    return built


def test_an_exact_replay_says_nothing(tmp_path: Path) -> None:
    result = replay(device_bound(tmp_path))
    assert not result.inexact and not any("off" in note for note in result.notes)
    assert result.unexplained_share == 0


def test_replay_names_steps_that_are_off(tmp_path: Path) -> None:
    """Kernels of 900 that take 990 make a step of 1000 9% longer."""
    graph = device_bound(tmp_path)
    result = replay(graph, built=too_long([graph]))
    assert [step.name for step in result.inexact] == ["ProfilerStep#1", "ProfilerStep#2"]
    assert any("2 of 3 steps are replayed more than 1% off" in note and "+9.0%" in note for note in result.notes)
    window = result.built.reports[0].window_ns
    assert result.unexplained_share == pytest.approx(180_000 / window), "what the host is off by is unexplained"
    what_if = replay(graph, scale_kernels=2)
    assert not what_if.inexact, "a what-if differs from the measured steps on purpose"


def test_json_carries_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("graph_predictor.prediction.replay"), "build_program", too_long)
    path = tmp_path / "micro.json"
    device_bound(tmp_path)
    values = json.loads(CliRunner().invoke(app, ["replay", str(path), "--json"]).stdout)
    assert values["inexact_steps"] == 2
    assert values["reproducible"] is False


def test_a_prediction_is_wider_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = device_bound(tmp_path)
    exact = predict(graph)
    monkeypatch.setattr(import_module("graph_predictor.prediction.predictor"), "build_program", too_long)
    baseline = baseline_of(graph)
    assert baseline.replay_error.error == pytest.approx(0.09)
    off = baseline.predict()
    narrow, wide = (one.interval_us[1] / one.interval_us[0] for one in (exact, off))
    assert wide / narrow == pytest.approx(1.09 ** 2, rel=0.03)
    assert any("replayed 9.0% off" in warning for warning in off.warnings)
    assert not any("off" in warning for warning in exact.warnings)


def test_closing_widens_both_ways() -> None:
    assert ReplayErrors().widened(90, 110) == (90, 110)
    assert ReplayErrors(error=0.009, unexplained=0.004).widened(90, 110) == (90, 110)
    assert ReplayErrors(error=0.1).widened(90, 110) == pytest.approx((90 / 1.1, 110 * 1.1))
    # A third of the window is explained: the step could take three times as long.
    assert ReplayErrors(unexplained=2 / 3).widened(90, 110) == pytest.approx((30, 330))


@pytest.mark.real_traces
def test_what_is_not_reproducible_has_no_narrow_interval(real_trace: Callable[[str], Path]) -> None:
    found = predict(read_job(real_trace("rank0-1-of-128/sampled_rank-0.json.gz")).graphs)
    assert found.interval_us[1] > 2 * found.interval_us[0]
    assert any("not reproducible" in warning for warning in found.warnings)
