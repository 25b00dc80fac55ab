"""Which steps are repeated, and that their prediction and every report of the recording agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from micro import Micro
from test_predict import queued_steps
from typer.testing import CliRunner

from foretrace.commands import app
from foretrace.edits import ScaleHost
from graph_predictor.prediction.interval import spread_by
from graph_predictor.prediction.replay import replay
from graph_predictor.prediction.result import Prediction
from graph_predictor.prediction.step_spread import RESOLVED, least_spread
from graph_predictor.recorded.counted_steps import similar_steps
from graph_predictor.synthesis.baseline import baseline_of
from step_views.reports.breakdown import breakdown
from tracer.graph import ExecutionGraph
from tracer.job import read_job


def recorded(folder: Path, lengths: Sequence[float], kernels: Sequence[int] = (), polls: Sequence[int] = ()) -> \
        ExecutionGraph:
    """Steps of these lengths (µs) that the host decides, of so many kernels and so many questions whether the device is
    done."""
    trace, at = Micro(), 1000.0
    for number, length in enumerate(lengths):
        trace.step(at, at + length, number).op("aten::linear", at, at + length)
        for kernel in range(kernels[number] if kernels else 1):
            trace.launch(at + 20 + 20 * kernel, 5, (7, at + 30 + 20 * kernel, 10))
        for poll in range(polls[number] if polls else 0):
            trace.call("cudaEventQuery", at + 200 + 2 * poll, 1)
        at += length
    return trace.read(folder)


def agrees(graphs: list[ExecutionGraph], width: float, rel: float) -> Prediction:
    """The prediction of what was recorded: the breakdown's mean, in an interval that holds most steps."""
    said = baseline_of(graphs).predict()
    lengths = [step.measured_ns / 1e3 for step in breakdown(replay(graphs)).steps if not step.why_not]
    assert said.step_time_us == pytest.approx(np.mean(lengths), rel=rel) and said.as_measured
    low, high = said.interval_us
    assert np.mean([low <= length <= high for length in lengths]) >= 0.8 and high / low < width
    return said


@pytest.mark.parametrize(("kernels", "lengths", "expected"), [
    ([1, 3, 1, 3], [500] * 4, range(4)), ([1, 3, 1, 3, 1], [500] * 5, range(1, 5)),
    ([1, 1, 4, 1, 1, 4], [500] * 6, range(6)), ([1, 1, 4, 1], [500] * 4, range(2)),
    ([5, 4, 3, 2], [500] * 4, range(3, 4)), ([9, 1, 1, 1], [500] * 4, range(1, 4)),
    # The run nearest to the mean: not the last one, when the steps get longer.
    ([1] * 12, [500, 501, 502, 503, 504, 505, 506, 507, 508, 509, 530, 540], range(5, 11))])
def test_of_steps_that_take_turns_whole_rounds_are_repeated(tmp_path: Path, kernels: list[int], lengths: list[float],
                                                            expected: range) -> None:
    """One round alone, or steps that all differ, are no turns."""
    assert similar_steps([recorded(tmp_path, lengths, kernels)]) == expected


def test_the_interval_covers_the_recorded_steps(tmp_path: Path) -> None:
    """Questions whether the device is done are no work."""
    graph = recorded(tmp_path, [755, 769, 762, 767, 785, 811], polls=[1, 40, 90, 70, 75, 90])
    assert similar_steps([graph]) == range(6)
    agrees([graph], 1.12, 0.002)


def test_another_cause_of_errors_adds_in_quadrature() -> None:
    low, high = spread_by(100 / np.exp(0.3), 100 * np.exp(0.3), 100, 0.4)
    assert (low, high) == (pytest.approx(100 / np.exp(0.5)), pytest.approx(100 * np.exp(0.5)))
    assert spread_by(0.0, 150, 100, 0.4)[0] == 0


def test_outliers_count_by_their_number() -> None:
    steps = np.array([20, 21, 20, 19, 20, 20, 21, 19, 20], np.int64) * 1_000_000
    quiet, one = least_spread(steps, 20e6), least_spread(np.append(steps, 200_000_000), 20e6)
    assert one < 1.2 * quiet
    assert least_spread(steps[:1], 20e6) == RESOLVED


def test_steps_of_a_device_that_falls_behind_are_counted_on_it(tmp_path: Path) -> None:
    """Steps of 20 on the host while the queue fills, each with 51 of device work: that is what a step takes."""
    baseline = baseline_of(queued_steps().read(tmp_path))
    said, edited = baseline.predict(), baseline.predict([ScaleHost(0.5)])
    assert said.recorded_us == said.step_time_us == edited.step_time_us == 51
    for one in (said, edited):
        assert 45 < one.interval_us[0] < 51 < one.interval_us[1] < 57
    assert said.as_measured and said.recorded and "The host runs ahead of its device" in said.recorded.notes()[-1]
    assert "(as recorded)" in CliRunner().invoke(app, ["predict", str(tmp_path / "micro.json")]).stdout


def freeing(folder: Path, free: Sequence[float], host: Sequence[float]) -> list[str]:
    """What is said of a drift in steps of 2000 µs; the host works for some of it, then frees memory for some."""
    trace = Micro().calibrate()
    for number, (freed, worked) in enumerate(zip(free, host, strict=True)):
        at = 2000.0 * (number + 1)
        trace.step(at, at + 2000, number + 1)
        trace.launch(at + 1, 5, (7, at + 11, 1980))
        trace.op("aten::mm", at + 10, at + 10 + worked)
        trace.call("hipFree", at + 20 + worked, freed)
        trace.call("cudaDeviceSynchronize", at + 30 + worked + freed, 1964 - worked - freed)
    said = baseline_of(trace.read(folder)).predict()
    return [text for text in said.warnings if "changing its speed" in text]


def test_time_that_moves_between_blocked_calls_is_no_drift(tmp_path: Path) -> None:
    assert not freeing(tmp_path, [50, 300, 700], [100, 100, 100])
    assert freeing(tmp_path, [300, 300, 300], [100, 300, 600])


@pytest.mark.real_traces
@pytest.mark.parametrize("name", [
    "rank3-of-8xA100-6steps/rank3.kineto.json.gz", "nanogpt-rank0-of-8xH100/hook.kineto.json.gz",
    "resnet18-ddp-MI300X/rank0.kineto.json.gz"])
def test_real_steps_are_in_the_interval(real_trace: Callable[[str], Path], name: str) -> None:
    said = agrees(read_job(real_trace(name)).graphs, 1.15, 0.005)
    assert not any("changing its speed" in text for text in said.warnings)
