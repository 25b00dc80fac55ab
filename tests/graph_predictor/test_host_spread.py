"""How sure host time is, from steps whose times are given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from micro import Micro

from graph_predictor.prediction.step_spread import END, drift, mean_spread
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.spreads import USUAL_STEPS
from tracer.graph import ExecutionGraph


def steps_of(folder: Path, *host_us: float) -> ExecutionGraph:
    """CPU steps of one product that takes this long each."""
    trace, at = Micro(), 1000.0
    for number, time in enumerate(host_us):
        trace.step(at, at + time, number).op("aten::mm", at, at + time)
        at += time + 10
    return trace.read(folder)


def test_one_step_is_as_sure_as_steps_usually_are() -> None:
    assert mean_spread(np.array([5e6])) == pytest.approx(END * USUAL_STEPS)


def test_steps_that_differ_make_it_less_sure() -> None:
    same, apart = mean_spread(np.array([10.0, 10.0, 10.0])), mean_spread(np.array([10.0, 12.0, 10.0]))
    assert same < END * USUAL_STEPS < apart
    assert apart == pytest.approx(END * float(np.sqrt((USUAL_STEPS**2 + 2 / 3 * np.log(1.2) ** 2) / 3)))


@pytest.mark.parametrize(("times", "expected"), [
    ([10, 12], np.log(1.2)), ([20, 16, 15], np.log(0.75)), ([10, 10.5], None), ([10, 13, 12], None), ([10], None)])
def test_a_drift_goes_one_way(times: list[float], expected: float | None) -> None:
    assert drift(np.array(times)) == (None if expected is None else pytest.approx(expected))


def test_a_drift_is_told(tmp_path: Path) -> None:
    def told(*host_us: float) -> list[str]:
        said = baseline_of(steps_of(tmp_path, *host_us)).predict()
        return [text for text in said.warnings if "changing its speed" in text]

    assert told(100, 115, 130)[0].startswith("Host time changed by +30%")
    assert not told(100, 130, 100)


def test_the_spread_is_that_of_the_repeated_steps_alone(tmp_path: Path) -> None:
    """What the steps after those of the prediction took is not known to it."""
    graph = steps_of(tmp_path, 100, 100, 300, 50)
    assert baseline_of(graph, range(2)).spreads.host == pytest.approx(END * USUAL_STEPS / np.sqrt(2))
