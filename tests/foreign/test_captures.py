"""Scripts of others, captured unchanged: what is recorded closes, and the commands that show a step can read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from catalogue import CATALOGUE, PROGRAMS, program

import tracer
from graph_predictor import breakdown, replay
from graph_predictor.reports.inspection import inspect_job
from tracer.graph import OpKind, Phase

NAMES = [each.name for each in CATALOGUE]
CLOSES = 0.01
"""What is told apart from closing: the worst step of a CPU's trace replays within 1%."""


def test_every_program_is_in_the_catalogue_and_none_knows_foretrace() -> None:
    assert sorted(NAMES) == sorted(path.stem for path in PROGRAMS.glob("*.py")) and len(NAMES) >= 12
    for each in CATALOGUE:
        text = each.path.read_text(encoding="utf-8")
        assert "tracer" not in text and "foretrace" not in text


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_closes_and_every_view_of_it_can_be_made(name: str, captured: Callable[[str], Path]) -> None:
    job = tracer.read_job(captured(name))
    which = program(name)
    assert len(job.graphs) == which.processes and not job.missing_ranks
    result = replay(job.graphs)
    assert len(result.steps) == 2 * which.processes
    assert result.max_abs_error <= CLOSES
    for graph in job.graphs:
        assert len(graph.meta.unprofiled_step_ns) == 4 and min(graph.meta.unprofiled_step_ns) > 0
    found = breakdown(result)
    assert found.bound
    for step in found.steps:
        assert sum(step.totals.bounds.values()) == pytest.approx(step.simulated_ns, rel=1e-6)
    assert inspect_job(job)


@pytest.mark.parametrize("name", NAMES)
def test_forward_backward_and_optimizer_are_told_apart(name: str, captured: Callable[[str], Path]) -> None:
    """Products belong to the forward or the backward, even where the optimizer calls them (Lightning does)."""
    for graph in tracer.read_job(captured(name)).graphs:
        names = np.array(graph.strings)[graph.ops.name]
        inside = (graph.ops.step >= 0) & (graph.ops.kind == OpKind.OPERATION)
        products = inside & np.isin(names, ["aten::addmm", "aten::mm", "aten::convolution", "aten::bmm"])
        phases = set(graph.ops.phase[products].tolist())
        assert phases and phases <= {Phase.FORWARD, Phase.BACKWARD}
        assert (graph.ops.phase[inside] == Phase.OPTIMIZER).any()
