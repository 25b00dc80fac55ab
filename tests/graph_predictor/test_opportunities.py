"""What would save most: sorted, each by itself, and what cannot be done with its reason."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
from said import Run
from test_whatif_edits import BACKWARD, CHAIN, MATH, TRACES, Op, trace_of

import step_views
from foretrace.edits import NoDataLoading, ScaleBandwidth
from graph_predictor.synthesis.baseline import baseline_of
from step_views.reports.opportunities import Opportunities, candidates, gain_interval, opportunities
from tracer.errors import ForetraceError
from tracer.job import read_job

HALF = [replace(op, dtype="c10::Half") for op in (*MATH, *BACKWARD)]
RICH = [*CHAIN, *HALF, Op("aten::sum", [[64, 64]], 3, wait=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rich")
    trace_of(RICH, loading=300).write(path / "rich.json")
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> Opportunities:
    return opportunities(read_job(str(folder / "rich.json")), top=20)


def test_each_gain_is_the_difference_of_two_predictions(folder: Path, found: Opportunities) -> None:
    baseline = baseline_of(read_job(str(folder / "rich.json")))
    before = baseline.predict().step_time_us
    assert found.baseline.step_time_us == before
    by_name = {one.name: one for one in found.found}
    for edit, name in ((ScaleBandwidth(2.0), "2× memory bandwidth"), (NoDataLoading(), "no data loading")):
        one, after = by_name[name], baseline.predict([edit]).step_time_us
        assert (one.step_time_us, one.gain_us) == (after, before - after)
        assert one.gain == pytest.approx(one.gain_us / before)
        assert sum(one.sources.values()) == pytest.approx(1.0)
    # As much as the overlap of loading that does not bound the step.
    assert by_name["data loading overlapped"].gain_us == by_name["no data loading"].gain_us >= 300
    assert {"flash attention", "fused elementwise chains"} <= set(by_name)


def test_they_are_sorted_and_the_rest_is_told_with_its_reason(found: Opportunities, folder: Path) -> None:
    gains = [one.gain_us for one in found.found]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > 0
    for one in found.found:
        low, high = one.interval_us
        assert low < one.gain_us < high <= found.baseline.interval_us[1]
    reasons = dict(found.left_out)
    assert set(reasons) | {one.name for one in found.found} == {one.name for one in candidates()}
    assert "no collectives" in reasons["communication overlapped"]
    assert "nothing to fuse" in reasons["fused optimizer"]
    fewer = opportunities(read_job(str(folder / "rich.json")), top=2)
    assert fewer.found == found.found[:2]
    assert "less than those shown" in dict(fewer.left_out)[found.found[2].name]


def test_what_both_steps_are_unsure_of_cancels(found: Opportunities) -> None:
    """The same relative interval before and after: the gain has it too, and no more."""
    before, half = found.baseline, copy(found.baseline)
    half.step_time_us = gain = before.step_time_us / 2
    half.interval_us = (before.interval_us[0] / 2, before.interval_us[1] / 2)
    low, high = gain_interval(before, half)
    assert high - gain == pytest.approx(gain * math.log(before.step_time_us / before.interval_us[0]), rel=1e-6)
    assert gain - low == pytest.approx(gain * math.log(before.interval_us[1] / before.step_time_us), rel=1e-6)


def test_a_captures_profiler_is_left_out() -> None:
    job = read_job(str(TRACES / "llama-cpu"))
    result = step_views.opportunities(job, top=3)
    assert result.baseline.step_time_us == baseline_of(job).predict().step_time_us == pytest.approx(19_831, rel=0.01)
    assert "no GPU work" in dict(result.left_out)["CUDA graphs"]
    assert len(result.found) == 3


def test_the_command_prints_a_table_and_json(folder: Path, run: Run) -> None:
    source = folder / "rich.json"
    values = run("opportunities", source, "--json", "--top", 3).json
    first, second, _ = values["opportunities"]
    assert {"name", "option", "gain_us", "gain", "interval_us", "sources"} <= set(first)
    assert all(one["reason"] for one in values["left_out"])
    out = run("opportunities", source, "--top", 1).out
    assert first["name"] in out
    assert first["option"] in out
    assert second["option"] not in out
    out = run("opportunities", source, "--top", 1, "--without-profiler").out
    assert "Step without the profiler" in out
    assert "Each besides --without-profiler." in out
    for wrong in ([source, "--ranks-alike"], [folder / "none.json"]):
        code, out, err = run("opportunities", *wrong)
        assert (code, out) == (2, "")
        assert err.startswith("foretrace: ")
    with pytest.raises(ForetraceError, match="no graph"):
        opportunities([])
