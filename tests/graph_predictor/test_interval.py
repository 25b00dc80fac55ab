"""What widens an interval: variants of kernels, and the error of the replay that it rests on."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from micro import Micro
from said import Run

from graph_predictor.prediction.interval import FamilyRows, GroupEnds, TimeErrors
from graph_predictor.prediction.pricing import KernelTimes
from graph_predictor.prediction.replay import ReplayErrors, replay
from graph_predictor.request.predict import predict
from graph_predictor.simulation.build import Built, build_program
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.spreads import END
from tracer.arrays import Float64, Int64
from tracer.graph import ExecutionGraph
from tracer.job import read_job

LARGE = 10**9
"""Events of a program whose errors are not drawn."""


def times_of(family: Int64) -> KernelTimes:
    random = np.random.default_rng(3)
    count = len(family)
    return KernelTimes(random.uniform(1, 99, count), np.zeros(count, np.int64), family, -random.uniform(0, 1, count),
                       random.uniform(0, 1, count), ())


def plain_factors(times: KernelTimes, groups: list[list[int]]) -> Float64:
    """A factor for each kernel and variant: 80% ends of one group, 1 of all others; the last two are as expected."""
    found = np.ones((len(times.ns), 2 * len(groups) + 2))
    for number, families in enumerate(groups):
        for kernel in np.flatnonzero(np.isin(times.family, families)).tolist():
            found[kernel, 2 * number] = np.exp(-END * (-times.low[kernel] / END))
            found[kernel, 2 * number + 1] = np.exp(END * (times.high[kernel] / END))
    return found


@pytest.mark.parametrize("families", [2, 9])
def test_errors_of_a_large_step_are_each_group_alone_at_both_ends(families: int) -> None:
    times = times_of(np.arange(40) % families)
    errors = TimeErrors.of(times, FamilyRows.of(times.family), LARGE)
    assert errors.ends is not None
    widest = [float((times.ns * np.maximum(times.high, -times.low))[times.family == each].sum())
              for each in range(families)]
    ranked = sorted(range(families), key=lambda each: -widest[each])
    groups = [[each] for each in ranked[:5]] + ([ranked[5:]] if families > 5 else [])
    variants = errors.variants(times.ns)
    assert np.array_equal(variants.over(variants.ns), times.ns[:, None] * plain_factors(times, groups))
    assert errors.effect == pytest.approx([sum(widest[each] for each in group) for group in groups])
    spread = errors.of_host(0.2)
    assert spread[:-2] == (1.0,) * (2 * len(groups)) and spread[-2] < 1.0 < spread[-1]


def test_errors_of_a_small_step_are_drawn_a_column_each() -> None:
    times = times_of(np.arange(12) % 3)
    errors = TimeErrors.of(times, FamilyRows.of(times.family), 12)
    assert errors.ends is None and errors.factors.shape == (12, len(errors.draws)) and len(errors.draws) > 100
    one = times.family == times.family[0]
    together = np.log(errors.factors[one]) / np.log(errors.factors[one][:1])
    assert (together > 0).all()  # kernels of one family err together


def test_rows_take_the_variants_of_their_kernels() -> None:
    ends = GroupEnds(np.array([1, -1, 0]), 2)
    columns = np.array([[10, 8, 13], [20, 18, 23], [30, 28, 33]])
    found = ends.over(columns, np.array([2, 1, 0]), 8)
    assert found.tolist() == [[8, 13, 10, 10, 10, 10, 10, 10], [20] * 8, [30, 30, 28, 33, 30, 30, 30, 30]]
    assert ends.over(columns).shape == (3, 6)
    assert FamilyRows.of(np.array([4, 2, 4])).with_weight(np.array([0.0, 0.0, 1.0])) == [4]


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


def test_replay_names_steps_that_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Kernels of 900 that take 990 make a step of 1000 9% longer; an exact replay says nothing."""
    graph = device_bound(tmp_path)
    exact = replay(graph)
    assert not exact.inexact
    assert not any("off" in note for note in exact.notes)
    assert exact.unexplained_share == 0
    result = replay(graph, built=too_long([graph]))
    assert [step.name for step in result.inexact] == ["ProfilerStep#1", "ProfilerStep#2"]
    assert any("2 of 3 steps are replayed more than 1% off" in note and "+9.0%" in note for note in result.notes)
    window = result.built.reports[0].window_ns
    assert result.unexplained_share == pytest.approx(180_000 / window), "what the host is off by is unexplained"
    assert not replay(graph, scale_kernels=2).inexact, "a what-if differs from the measured steps on purpose"
    monkeypatch.setattr(import_module("graph_predictor.prediction.replay"), "build_program", too_long)
    values = run("replay", tmp_path / "micro.json", "--json").json
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
