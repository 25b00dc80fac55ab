"""Hosts that were ahead of their devices when the recording began do not decide the step without the profiler.

A recorded job is in ``test_contention``."""

from __future__ import annotations

from pathlib import Path

import pytest
from micro import Micro

from foretrace.edits import TakeOutProfiler
from graph_predictor import baseline_of
from graph_predictor.recorded.facts import head_start_ns, runs_ahead
from tracer.graph import ExecutionGraph

STEPS, LAUNCHES, EVERY, KERNEL = 3, 50, 20.0, 12.0
"""Launches of a step, µs from one to the next on the host, and µs of each kernel: the host takes 1,000 µs a step, the
device 600."""


def recorded(folder: Path, ahead: float) -> ExecutionGraph:
    """Steps in which the device still had ``ahead`` µs of earlier work to do when the recording began."""
    trace = Micro(base=10_000.0)
    free = ahead
    if ahead:
        trace.device_work(7, -100.0, 100.0 + ahead, 900_000)
    for launch in range(STEPS * LAUNCHES):
        at = EVERY * launch
        start = max(at + 10.0, free + 1.0)
        trace.op("aten::gelu", at, at + 8.0).launch(at + 2.0, 3.0, kernel=(7, start, KERNEL))
        free = start + KERNEL
    for number in range(STEPS):
        trace.step(EVERY * LAUNCHES * number, EVERY * LAUNCHES * (number + 1), number)
    return trace.read(folder)


def test_a_device_that_had_work_left_decides(tmp_path: Path) -> None:
    graphs = [recorded(tmp_path, us) for us in (300.0, 0.0, 30.0)]  # the last is ahead by 3% of a step
    assert [runs_ahead(graph) for graph in graphs] == [True, False, False]
    assert [head_start_ns(graph) for graph in graphs[:2]] == pytest.approx([298_000, 0], abs=2_000)
    ahead, level = (baseline_of(graph, device=None).predict([TakeOutProfiler()]) for graph in graphs[:2])
    assert ahead.step_time_us == pytest.approx(LAUNCHES * (KERNEL + 1.0), rel=0.05)
    assert level.step_time_us > 1.2 * ahead.step_time_us
    assert any("hosts run ahead" in note for note in ahead.notes)
    assert not any("hosts run ahead" in note for note in level.notes)
