"""How recorded steps differ: in host time, and in the work they do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from micro import Micro

from graph_predictor.prediction.replay import replay
from graph_predictor.prediction.step_spread import END, drift, mean_spread, step_kinds
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.spreads import USUAL_STEPS
from step_views.reports.breakdown import breakdown
from step_views.reports.inspection import inspect_job
from tracer.graph import NONE, ExecutionGraph, OpKind
from tracer.job import assemble_job


def steps_of(folder: Path, *host_us: float) -> ExecutionGraph:
    """CPU steps of one product that takes this long each."""
    trace, at = Micro(), 1000.0
    for number, time in enumerate(host_us):
        trace.step(at, at + time, number).op("aten::mm", at, at + time)
        at += time + 10
    return trace.read(folder)


def test_steps_that_differ_make_it_less_sure_than_steps_usually_are() -> None:
    assert mean_spread(np.array([5e6])) == pytest.approx(END * USUAL_STEPS)
    assert mean_spread(np.array([10.0, 10.0, 10.0])) < END * USUAL_STEPS
    assert mean_spread(np.array([10.0, 12.0, 10.0])) == pytest.approx(
        END * float(np.sqrt((USUAL_STEPS**2 + 2 / 3 * np.log(1.2) ** 2) / 3)))


@pytest.mark.parametrize(("times", "expected"), [
    ([20, 16, 15], np.log(0.75)), ([10, 10.5], None), ([10, 13, 12], None), ([10], None)])
def test_a_drift_goes_one_way(times: list[float], expected: float | None) -> None:
    assert drift(np.array(times)) == (None if expected is None else pytest.approx(expected))


def test_a_drift_is_told(tmp_path: Path) -> None:
    said = baseline_of(steps_of(tmp_path, 100, 115, 130)).predict().warnings
    assert any(text.startswith("Host time changed by +30%") and "changing its speed" in text for text in said)


def test_the_spread_is_that_of_the_repeated_steps_alone(tmp_path: Path) -> None:
    """What the steps after those of the prediction took is not known to it."""
    graph = steps_of(tmp_path, 100, 100, 300, 50)
    assert baseline_of(graph, range(2)).spreads.host == pytest.approx(END * USUAL_STEPS / np.sqrt(2))


FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def recording(folder: Path, rows: Sequence[int], evaluations: Sequence[int] = (),
              samples: Sequence[int] = ()) -> ExecutionGraph:
    """Steps on a CPU whose product has so many rows, with so many evaluations after it and samples before it."""
    trace, at = Micro(), 1000.0
    for number, size in enumerate(rows):
        begin = at
        for _ in range(samples[number] if samples else 0):
            trace.op(FETCH, at, at + 50)
            trace.op("aten::select", at + 10, at + 40)
            at += 60
        for name, time, shape in (("aten::mm", 10.0 * size, [size, 64]),
                                  *(("aten::addmm", 200.0, [200, 64]),) * (evaluations[number] if evaluations else 0)):
            trace.op(name, at, at + time, **{"Input Dims": [shape, [64, 64]], "Input type": ["float", "float"]})
            at += time + 5
        trace.step(begin, at, number)
    return trace.read(folder)


def test_equal_steps_are_of_one_kind_however_long_a_batch_took(tmp_path: Path) -> None:
    graph = recording(tmp_path, [40, 40, 40], samples=[3, 9, 1])
    assert step_kinds([graph]) is None
    assert not any("other work" in text for text in baseline_of(graph).predict().warnings)
    # Nor is a range without operations a step of another kind, as the one around a profiler's own start.
    trace = Micro().calibrate().step(1000, 1100, 0)
    for number in (1, 2):
        trace.step(1000 + 100 * number, 1100 + 100 * number, number)
        trace.op("aten::mm", 1010 + 100 * number, 1090 + 100 * number)
    assert step_kinds([trace.read(tmp_path)]) is None


@pytest.mark.parametrize(("rows", "evaluations", "said"), [
    ([40, 90, 20], (), r"aten::mm has sizes \[\[(90|20),.* and \[\[20|\[\[40"),
    ([40, 40, 40, 40], (0, 5, 0, 0), r"runs 6 operations where .* runs 1 \(aten::addmm 5 and 0 times\)")])
def test_other_work_is_named_and_in_the_interval(rows: list[int], evaluations: Sequence[int], said: str,
                                                 tmp_path: Path) -> None:
    graph = recording(tmp_path, rows, evaluations)
    predicted = baseline_of(graph).predict()
    warning = next(text for text in predicted.warnings if "do other work" in text)
    assert re.search(said, warning)
    lengths = graph.steps.duration_ns / 1e3
    assert predicted.interval_us[0] <= lengths.min() * 1.001
    assert predicted.interval_us[1] >= lengths.max() * 0.999
    assert any("do other work" in note for note in breakdown(replay([graph])).notes)
    assert any("do other work" in note for note in inspect_job(assemble_job([graph])).notes)


def test_operations_that_a_damaged_file_names_nowhere_are_left_out(tmp_path: Path) -> None:
    graph = recording(tmp_path, [40, 40, 40, 40], (0, 5, 0, 0))
    graph.ops.writable("name")[:1] = NONE
    found = step_kinds([graph])
    assert found is not None and "aten::addmm 5 and 0 times" in found.text
    graph.ops.writable("name")[graph.ops.kind == OpKind.OPERATION] = NONE
    found = step_kinds([graph])
    assert found is None or "operations without names" in found.text
