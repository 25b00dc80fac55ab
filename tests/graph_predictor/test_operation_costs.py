"""What the operations of a recorded step cost, from hand-made traces whose answer is known on paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from micro import Micro

from foretrace.edits import HostFrom
from graph_predictor.prediction.operation_costs import (
    every_operation,
    operation_costs,
    operations_named,
    outermost_operations,
    partners,
)
from graph_predictor.synthesis.baseline import baseline_of
from tracer.arrays import Int64
from tracer.graph import ExecutionGraph


def linear_steps(*pauses: float) -> Micro:
    """Steps of 500 us: 100 us, ``aten::linear`` of 100 (20, ``aten::addmm`` of 60, 20), a pause, ``aten::relu`` of
    50, and what is left."""
    trace = Micro()
    for number, pause in enumerate(pauses):
        at = 1000.0 * (number + 1)
        trace.step(at, at + 500, number + 1)
        trace.op("aten::linear", at + 100, at + 200).op("aten::addmm", at + 120, at + 180)
        trace.op("aten::relu", at + 200 + pause, at + 250 + pause)
    return trace


def some(graph: ExecutionGraph) -> Int64:
    return operations_named(graph, {"aten::addmm", "aten::relu"})


@pytest.mark.parametrize(("owner", "names", "inside", "before"), [
    (every_operation, ["aten::linear", "aten::addmm", "aten::relu"], [40, 60, 50], [100, 0, 40, 210]),
    (outermost_operations, ["aten::linear", "aten::relu"], [100, 50], [100, 40, 210]),
    (some, ["aten::addmm", "aten::relu"], [60, 50], [120, 60, 210]),
])
def test_every_microsecond_of_a_step_is_in_an_operation_or_before_it(
        tmp_path: Path, owner: Callable[[ExecutionGraph], Int64], names: list[str], inside: list[float],
        before: list[float]) -> None:
    """At each level, with pauses of 30 and 50 us: 40 on average."""
    base = baseline_of(linear_steps(30, 50).read(tmp_path), range(2))
    graph = base.built.graphs[0]
    found = operation_costs(base.cycle, base.slices, 0, owner(graph))
    assert [graph.string(int(code)) for code in graph.ops.name[found.op]] == names
    assert found.inside.mean(axis=0) / 1e3 == pytest.approx(inside)
    assert found.before.mean(axis=0) / 1e3 == pytest.approx(before)
    assert found.before.sum() + found.inside.sum() == base.slices.ns[base.cycle.working[base.slices.item]].sum()
    assert np.array_equal(partners(found, found), np.arange(len(found)))


def test_time_before_an_operation_that_a_step_lacks_is_not_taken_from_another_host(tmp_path: Path) -> None:
    """The other program has a ``aten::dropout`` of 50 us more, 300 us after what was before it."""
    graphs = []
    for more in (0, 350):
        trace = Micro()
        for at in (2000.0, 4000.0):
            trace.step(at, at + 500 + more, int(at)).op("aten::mm", at + 100, at + 200)
            if more:
                trace.op("aten::dropout", at + 500, at + 550)
            trace.op("aten::relu", at + 300 + more, at + 400 + more)
        graphs.append(trace.read(tmp_path))
    mine, other = graphs
    assert baseline_of(other).predict().step_time_us == pytest.approx(850)
    assert baseline_of(mine).predict([HostFrom([other])]).step_time_us == pytest.approx(500)
