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
    """Products belong to the forward or the backward, even where the optimizer calls them (Lightning does)."""
    job = tracer.read_job(captured(name))
    which, result = program(name), replay(job.graphs)
    assert len(job.graphs) == which.processes and not job.missing_ranks
    assert len(result.steps) == 2 * which.processes and result.max_abs_error <= CLOSES
    for graph in job.graphs:
        assert len(graph.meta.unprofiled_step_ns) == 4 and min(graph.meta.unprofiled_step_ns) > 0
        inside = (graph.ops.step >= 0) & (graph.ops.kind == OpKind.OPERATION)
        products = inside & np.isin(np.array(graph.strings)[graph.ops.name], [
            "aten::addmm", "aten::mm", "aten::convolution", "aten::bmm"])
        phases = set(graph.ops.phase[products].tolist())
        assert phases and phases <= {Phase.FORWARD, Phase.BACKWARD}
        assert (graph.ops.phase[inside] == Phase.OPTIMIZER).any()
    found = breakdown(result)
    assert found.bound and inspect_job(job)
    for step in found.steps:
        assert sum(step.totals.bounds.values()) == pytest.approx(step.simulated_ns, rel=1e-6)


def test_every_option_of_the_command_is_tried(tmp_path: Path) -> None:
    known = {field.name for field in fields(Configuration)}
    tried = edits_of(program("gru_forecast"), tmp_path, ("elsewhere", "batch=16"))
    assert {option for change in tried.values() for option in change} == known == configured() | {"edits"}
    assert set(EDITS) == {option.name for option in OPTIONS if not option.switches}
    options = {option.attribute for option in OPTIONS} | known - {"edits"}
    assert set(inspect.signature(command).parameters) == options | NO_EDITS | {"profiled", "typer_context"}


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
    found = lost_of(name, captured(name))
    for _ in range(ATTEMPTS - 1):
        if found:
            found = lost_of(name, captured_anew(name))
    assert found == []


def lost_of(name: str, path: Path) -> list[str]:
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


def work(host: float, device: float) -> Work:
    return Work(host, device, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("alone", "with_other", "shows"), [
    ((100.0, 80.0), (200.0, 170.0), True), ((100.0, 80.0), (200.0, 200.0), False),
    ((100.0, 80.0), (200.0, 220.0), False), ((100.0, 100.0 * (1 - MOVES / 2)), (200.0, 190.0), False)])
def test_an_edit_that_is_there_with_another_moves_the_step_as_alone(
        alone: tuple[float, float], with_other: tuple[float, float], shows: bool) -> None:
    assert shows_in_step(alone, with_other) is shows


@pytest.mark.parametrize(("alone", "other", "both", "lost"), [
    (work(5.0, 50.0), work(10.0, 100.0), work(10.0, 100.0), True),
    (work(5.0, 50.0), work(10.0, 100.0), work(5.0, 100.0), False),
    (work(10.0, 40.0), work(10.0, 100.0), work(10.0, 99.8), False),  # a fiftieth of it is left
    (work(10.0, 40.0), work(10.0, 100.0), work(10.0, 99.95), True),  # two hundredths of one per cent
    (work(5.0, 50.0), work(0.19, 50.0), work(0.19, 50.0), False),  # one launch is left of the host's time
    (work(5.0, 50.0), work(0.21, 50.0), work(0.21, 50.0), True),  # what is left could have moved
    (work(10.0, 50.0), work(10.0, 100.0), work(10.0, 100.0), False)])  # an edit that changes nothing
def test_what_is_lost_is_seen_in_the_work(alone: Work, other: Work, both: Work, lost: bool) -> None:
    assert lost_work(work(10.0, 50.0), alone, other, both) is lost
