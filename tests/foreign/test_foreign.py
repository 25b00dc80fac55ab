"""Scripts of others, captured unchanged: what is recorded closes, commands can read it, and every edit applies.

Every edit that ``foretrace predict`` offers is tried, and every pair of them: see ``edits``. On all programs that is
``benchmarks/foreign_edits.py``; here on those that take little time. A recording of a CPU has no kernels, so that edits
of kernels and launches are tried on a step that was traced by shapes for a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from catalogue import BY_SHAPES, CATALOGUE, OTHER_SIZE, PROGRAMS, program
from edits import (
    EDITS,
    MOVES,
    Change,
    Predictor,
    Work,
    complaints,
    configured,
    edits_of,
    lost_work,
    pairs_of,
    shows_in_step,
)
from slowly import mostly_slow

import tracer
from graph_predictor import replay
from graph_predictor.edits.registry import OPTIONS
from graph_predictor.request.study import Configuration, read_source
from step_views import breakdown
from step_views.cli.predict import predict as command
from step_views.reports.inspection import inspect_job
from tracer.graph import OpKind, Phase

NAMES = [each.name for each in CATALOGUE]
EACH = mostly_slow(NAMES, {each.name for each in CATALOGUE if not each.needs} - {
    "compiled_mlp", "gru_forecast", "mixer_accumulation"})
"""The quick tests capture programs of PyTorch alone: to import the frameworks takes longer than to run all of these. Of
frameworks those of the hooks are quick (``tests/tracer/test_hooks.py``)."""
CLOSES = 0.01
"""The worst step of a CPU's trace replays within 1%."""
ATTEMPTS = 3
ALONE = ("lightning_autoencoder", "cnn_workers", "embedding_ranker")
IN_PAIRS: dict[str, tuple[int, set[str] | None]] = {
    "compiled_mlp": (60, None),
    "embedding_ranker": (45, {"compile", "fuse-elementwise", "recompute", "sizes by code"}),
}
"""Programs whose edits are tried in pairs: how many pairs there are at least, and what is in each: anything, or one of
the edits that the programs before refuse."""
WITH = {"sizes", "host_from", "device=a100-sxm-40g"}
"""Every edit of the step traced by shapes is tried with each of these."""
NO_EDITS = {"source", "from_device", "profile", "step", "step_region", "cycle", "price", "top", "window", "html",
            "json", "debug"}
"""Options of the command that say what is read or shown."""

Tried = tuple[Predictor, dict[str, Change]]


def test_every_program_is_in_the_catalogue_and_none_knows_foretrace() -> None:
    assert sorted(NAMES) == sorted(path.stem for path in PROGRAMS.glob("*.py")) and len(NAMES) >= 12
    for each in CATALOGUE:
        text = each.path.read_text(encoding="utf-8")
        assert "tracer" not in text and "foretrace" not in text


@pytest.mark.parametrize("name", EACH)
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


@pytest.mark.parametrize("name", EACH)
def test_forward_backward_and_optimizer_are_told_apart(name: str, captured: Callable[[str], Path]) -> None:
    """Products belong to the forward or the backward, even where the optimizer calls them (Lightning does)."""
    for graph in tracer.read_job(captured(name)).graphs:
        names = np.array(graph.strings)[graph.ops.name]
        inside = (graph.ops.step >= 0) & (graph.ops.kind == OpKind.OPERATION)
        products = inside & np.isin(names, ["aten::addmm", "aten::mm", "aten::convolution", "aten::bmm"])
        phases = set(graph.ops.phase[products].tolist())
        assert phases and phases <= {Phase.FORWARD, Phase.BACKWARD}
        assert (graph.ops.phase[inside] == Phase.OPTIMIZER).any()


def test_every_option_of_the_command_is_tried() -> None:
    known = {field.name for field in fields(Configuration)} - {"edits"}
    assert known == configured()
    assert set(EDITS) == {option.name for option in OPTIONS if not option.switches}
    edits = {option.attribute for option in OPTIONS}
    assert set(inspect.signature(command).parameters) == edits | known | NO_EDITS | {"profiled", "typer_context"}


def test_a_configuration_of_every_field_is_among_the_edits(tmp_path: Path) -> None:
    edits = edits_of(program("gru_forecast"), tmp_path, ("elsewhere", "batch=16"))
    assert {option for change in edits.values() for option in change} == {each.name for each in fields(Configuration)}


@lru_cache(maxsize=2)
def of_capture(name: str, path: Path) -> Tried:
    """The predictor of a capture, and its edits."""
    other = path.parent / OTHER_SIZE.replace(":", "-").replace("=", "")
    laws = (str(other), OTHER_SIZE.partition(":")[2]) if OTHER_SIZE.startswith(f"{name}:") else None
    return Predictor(tracer.read_job(path)), edits_of(program(name), path.parent, laws)


@pytest.mark.parametrize("name", mostly_slow(ALONE, ALONE[1:]), scope="module")
def test_each_edit_is_predicted_with_an_interval_or_refused_in_a_sentence(
        name: str, captured: Callable[[str], Path]) -> None:
    predict, edits = of_capture(name, captured(name))
    assert complaints(predict.base) == []
    wrong = {edit: found for edit, change in edits.items() if (found := complaints(predict(change)))}
    assert wrong == {}


def that_apply(predict: Predictor, edits: dict[str, Change]) -> dict[str, Change]:
    return {name: change for name, change in edits.items() if not isinstance(predict(change), str)}


@pytest.mark.parametrize("name", IN_PAIRS, scope="module")
def test_no_edit_loses_another(name: str, captured: Callable[[str], Path],
                               captured_anew: Callable[[str], Path]) -> None:
    """Where a machine that is busy with something else stopped an operation for longer than the others take together,
    what changes it alone decides the step: that shows in one recording, and what is lost in each."""
    found = lost(name, captured(name))
    for _ in range(ATTEMPTS - 1):
        if found:
            found = lost(name, captured_anew(name))
    assert found == []


def lost(name: str, path: Path) -> list[str]:
    """What is wrong with pairs of edits of a capture."""
    predict, edits = of_capture(name, path)
    edits = that_apply(predict, edits)
    least, among = IN_PAIRS[name]
    pairs = list(pairs_of(predict, edits, lambda one, other: among is None or bool({one, other} & among)))
    assert len(edits) > 10 and len(pairs) > least and (among is None or among <= set(edits))
    return [pair.told for pair in pairs if pair.wrong]


@pytest.mark.slow
def test_no_edit_of_a_step_on_a_gpu_loses_another(captured: Callable[[str], Path]) -> None:
    which = program(BY_SHAPES)
    path = captured(BY_SHAPES)
    predict = Predictor(read_source([which.code], device="h200-sxm"), code=which.code, hosts=tracer.read_job(path))
    edits = that_apply(predict, edits_of(which, path.parent, traced=True))
    assert {"cuda-graphs", "free-launches", "kernels=0.5", "clock=1.5", "bandwidth=2.0", "dtype=bf16"} <= set(edits)
    pairs = list(pairs_of(predict, edits, lambda one, other: bool({one, other} & WITH)))
    assert len(pairs) > 40
    assert [pair.told for pair in pairs if pair.wrong] == []


def test_what_is_lost_is_seen_in_the_step_or_in_the_work() -> None:
    assert shows_in_step((100.0, 80.0), (200.0, 170.0)) and not shows_in_step((100.0, 80.0), (200.0, 200.0))
    assert not shows_in_step((100.0, 80.0), (200.0, 220.0)), "turned round"
    assert not shows_in_step((100.0, 100.0 * (1 - MOVES / 2)), (200.0, 190.0)), "moves nothing alone"
    base, halved = Work(10.0, 50.0, 0.0, 0.0, 0.0, 0.0), Work(5.0, 50.0, 0.0, 0.0, 0.0, 0.0)
    hidden, both = Work(10.0, 100.0, 0.0, 0.0, 0.0, 0.0), Work(5.0, 100.0, 0.0, 0.0, 0.0, 0.0)
    assert lost_work(base, halved, hidden, hidden) and not lost_work(base, halved, hidden, both)
    scaled, barely = Work(10.0, 40.0, 0.0, 0.0, 0.0, 0.0), Work(10.0, 99.8, 0.0, 0.0, 0.0, 0.0)
    assert not lost_work(base, scaled, hidden, barely), "a fiftieth of it is left"
    assert lost_work(base, scaled, hidden, Work(10.0, 99.95, 0.0, 0.0, 0.0, 0.0)), "two hundredths of one per cent"
    without_host = Work(0.19, 50.0, 0.0, 0.0, 0.0, 0.0)
    assert not lost_work(base, halved, without_host, without_host), "one launch is left of the host's time"
    little = Work(0.21, 50.0, 0.0, 0.0, 0.0, 0.0)
    assert lost_work(base, halved, little, little), "what is left could have moved"
    assert not lost_work(base, base, hidden, hidden), "an edit that changes nothing"
