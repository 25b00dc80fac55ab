"""What the profiler costs: planted in a trace, it comes out again, where it was put."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from micro import Micro

from foretrace.edits import Sizes, TakeOutProfiler
from graph_predictor import baseline_of
from graph_predictor.prediction.scenario import EditError
from graph_predictor.prediction.unprofiled import profiler_cost, unprofiled
from kernel_models.host.segments import CALL_EVENTS, OBSERVED_NS, USUAL_NS, event_cost
from tracer.graph import ExecutionGraph

LAYERS = 40
WORK, OWN, PYTHON = 4.0, 3.0, 3.0
"""Of each layer, µs without the profiler: its product, the operation around it, and Python before."""
STEP = LAYERS * (WORK + OWN + PYTHON)
SHAPES = {"Input Dims": [[32, 64], [64, 128]], "Input type": ["float", "float"]}


def planted(folder: Path, event: float, steps: int = 2) -> ExecutionGraph:
    """Layers of a product inside a wrapper; each event's cost (µs) lies before it, in what is around it.

    ::

        Python |~prof~|linear |~prof~| aten::mm | linear|  Python …
    """
    folder.mkdir(exist_ok=True)
    trace = Micro()
    at = 0.0
    for number in range(steps):
        begin = at
        for _ in range(LAYERS):
            at += PYTHON + event
            start = at
            at += OWN / 2 + event
            trace.op("aten::mm", at, at + WORK, **SHAPES)
            at += WORK + OWN / 2
            trace.op("planted::linear", start, at)
        trace.step(begin, at, number)
        at += 50.0
    graph = trace.read(folder)
    graph.meta.unprofiled_step_ns = [round(STEP * 1e3)] * 5
    graph.meta.device = ""
    return graph


def test_a_planted_cost_is_found_and_taken_out_where_it_was_put(tmp_path: Path) -> None:
    """What computes keeps its time, which holds none of the cost; wrapper and Python lose what was put there."""
    event = 6.0
    recorded = baseline_of(planted(tmp_path, event), profiled=True).scenario
    cost = profiler_cost(recorded)
    assert cost is not None
    assert cost.event_ns == pytest.approx(event * 1e3, rel=0.12)  # drawn a little to what is usual
    assert cost.factor == pytest.approx(1.0, abs=0.06)
    left = unprofiled(recorded.built)
    assert left.without_profiler is not None
    pieces, graph = left.without_profiler.slices, left.graphs[0]
    name = np.array([*graph.strings, "Python"])[np.append(graph.ops.name, -1)[pieces.op]]
    mine = recorded.cycle.working[pieces.item]
    for what, expected in (("aten::mm", WORK), ("planted::linear", OWN), ("Python", PYTHON)):
        time = pieces.ns[mine & (name == what)].sum() / recorded.cycle.steps / LAYERS / 1e3
        assert time == pytest.approx(expected, rel=0.12, abs=0.4), what
    assert baseline_of(planted(tmp_path, event)).predict().step_time_us == pytest.approx(STEP, rel=1e-3)


def test_chance_between_two_phases_is_not_taken_for_events(tmp_path: Path) -> None:
    """Of few, long operations a slower machine says nothing about events: the difference is a factor on all of them."""
    graph = planted(tmp_path, 0.0)
    for table in (graph.ops, graph.steps):
        table.start_ns *= 1000
        table.duration_ns *= 1000
    graph.meta.unprofiled_step_ns = [round(STEP * 1e6 * 0.9)] * 5
    cost = profiler_cost(baseline_of(graph, profiled=True).scenario)
    assert cost is not None
    assert cost.event_ns == pytest.approx(USUAL_NS, rel=0.1)
    assert cost.factor == pytest.approx(0.9, abs=0.02)


def test_an_execution_trace_in_the_window_is_expected_to_cost_more(tmp_path: Path) -> None:
    graph = planted(tmp_path, (USUAL_NS + OBSERVED_NS) / 1e3)
    graph.meta.profiler_flags["execution_trace"] = True
    cost = profiler_cost(baseline_of(graph, profiled=True).scenario)
    assert cost is not None and cost.event_ns == pytest.approx(USUAL_NS + OBSERVED_NS, rel=0.02)


def test_another_batch_scales_the_work_and_not_the_profiler(tmp_path: Path) -> None:
    """The cost of the products' own events is no part of the products: four times the batch is four times their work,
    and nothing else."""
    larger = Sizes.parse(["batch=32:128"])
    predicted = [baseline_of(planted(tmp_path / str(event), event)).predict([larger]).step_time_us
                 for event in (0.0, 6.0)]
    assert predicted[1] == pytest.approx(predicted[0], rel=0.06)
    assert predicted[0] > 1.2 * STEP


def wrapped(folder: Path, event: float, calls: int = 40) -> ExecutionGraph:
    """Steps of views inside views, which do nothing themselves, and launches; an event costs the host ``event`` µs."""
    trace, at = Micro().calibrate(), 1000.0
    for number in (1, 2):
        begin = at
        for _ in range(calls):
            at += PYTHON + event
            start = at
            at += event
            trace.op("aten::transpose", at, at + 1.0)
            trace.op("aten::t", start, at + 1.0)
            at += 1.0
            trace.launch(at, 3.0 + CALL_EVENTS * event, (7, at + 4.0 + CALL_EVENTS * event, 1.0))
            at += 3.0 + CALL_EVENTS * event
        trace.step(begin, at, number)
        at += 50.0
    graph = trace.read(folder)
    graph.meta.device = "NVIDIA A100-SXM4-40GB"
    return graph


def test_operations_that_only_call_others_tell_the_profilers_cost(tmp_path: Path) -> None:
    """The step without it is what is left when each event's cost goes, and the interval holds it."""
    event = 2.5
    graph = wrapped(tmp_path, event)
    assert event_cost(graph).ns == pytest.approx(event * 1e3, rel=0.01)
    job = baseline_of(graph)
    said, recorded = job.predict([TakeOutProfiler()]), job.predict()
    truth = 40 * (PYTHON + 1.0 + 3.0)
    assert recorded.step_time_us == pytest.approx(truth + 40 * (2 + CALL_EVENTS) * event, rel=0.02)
    assert said.step_time_us == pytest.approx(truth, rel=0.05)
    assert said.interval_us[0] < truth < said.interval_us[1] and not said.profiled
    assert any("The step was not timed without the profiler" in note for note in said.notes)
    slow = baseline_of(wrapped(tmp_path, 100.0)).predict([TakeOutProfiler()])
    assert any("slow for another reason" in warning for warning in slow.warnings)
    assert slow.interval_us[1] / slow.interval_us[0] > 4
    with pytest.raises(EditError, match="without the profiler already"):
        baseline_of(planted(tmp_path, 2.0)).predict([TakeOutProfiler()])
