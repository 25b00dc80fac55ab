"""What a survey's table says of a fleet: lost time by cause, regressions and their causes, tags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from said import Run, plain
from test_survey import write
from test_whatif_edits import CHAIN

import foretrace
from graph_predictor.simulation.program import Bound
from step_views.survey.facts import BOUND_COLUMNS
from step_views.survey.fleet import fleet
from step_views.survey.slower import path_by_cause, regressions
from step_views.survey.table import SurveyError

SD = 0.003


def row(job: str, rng: np.random.Generator, *, slower: float = 1.0, steps: int = 8, **other: Any) -> dict[str, Any]:
    """A job's row in the columns that are compared: a GPU that is busy for 80 of 100 ms, steps that vary by 0.3%."""
    step = 1e5 * slower
    path = {**dict.fromkeys(BOUND_COLUMNS, 0.0), "compute_us": 8e4, "host_us": 2e4, **other.pop("path", {})}
    return {"job": job, "program": "p", "profiled": True, "device": "H100", "ranks": 1, "world_size": 8,
            "step_time_us": step, "step_times_us": (step * np.exp(rng.normal(0, SD, steps))).tolist(),
            "operation_codes": [1, 2, 3], "operation_counts": [10, 10, 5], "saves_loading_us": 0.0, **path, **other}


def programs(seed: int, *, slower: float = 1.0, runs: int = 1, number: int = 20, **other: Any) -> list[dict[str, Any]]:
    """Jobs of several programs."""
    rng = np.random.default_rng(seed)
    return [row(f"{place}-{run}", rng, slower=slower, program=f"p{place}", **other) for place in range(number)
            for run in range(runs)]


def test_quiet_pairs_raise_no_alarm_and_three_percent_is_found() -> None:
    for seed in range(20):
        before, after = programs(seed), programs(seed + 100)
        assert regressions((before, []), (after, [])) == ([], 20)
    found, compared = regressions((programs(1), []), (programs(2, slower=1.03), []))
    assert compared == len(found) == 20
    assert all(one.low < 0.03 < one.high and one.change == pytest.approx(0.03, abs=0.01) for one in found)


def test_the_spread_of_steps_and_of_runs_is_taken_into_account() -> None:
    rng = np.random.default_rng(3)
    for runs, steps in ((4, 8), (1, 1)):
        sides = []
        for _ in range(2):
            # A machine whose runs differ by 3%, and runs of one step each, which vary as the others' do.
            jobs = [row(f"{place}-{run}", rng, slower=float(np.exp(rng.normal(0, 0.03 if runs > 1 else 0.008))),
                        program=f"p{place}", steps=steps) for place in range(20) for run in range(runs)]
            sides.append((jobs, []))
        assert regressions(*sides)[0] == []


@pytest.mark.parametrize(("path", "families", "cause"), [
    ({"host_us": 3e4}, {}, "host"), ({"launch_us": 9e3}, {}, "launch"),
    ({"exposed_communication_us": 1e4}, {}, "exposed communication"),
    ({"waiting_for_rank_us": 1e4}, {}, "waiting for rank"), ({"memory_copy_us": 1e4}, {}, "memory copy"),
    ({"compute_us": 9e4}, {"gemm": 6e4, "conv": 3e4}, "compute: gemm"),
    ({"compute_us": 9e4}, {"gemm": 5.6e4, "conv": 3.4e4}, "compute: all kernels"),
    ({"host_us": 3e4, "saves_loading_us": 1e4}, {}, "data loading")])
def test_what_grew_most_is_the_cause(path: dict[str, float], families: dict[str, float], cause: str) -> None:
    loading = path.pop("saves_loading_us", 0.0)
    old, new = programs(1, number=1), programs(2, number=1, slower=1.1, path=path, saves_loading_us=loading)
    kernels = [[{"job": "0-0", "family": name, "time_us": us} for name, us in side.items()]
               for side in ({"gemm": 5e4, "conv": 3e4}, families)]
    [found], _ = regressions((old, kernels[0]), (new, kernels[1]))
    assert found.cause == cause and found.gpu_s_an_hour == pytest.approx(3600 * 8 * 0.1 / 1.1, rel=0.05)


def test_versions_of_a_program_are_compared_and_other_programs_not() -> None:
    old = programs(1, number=1)
    changed = programs(2, number=1, slower=1.1, operation_codes=[1, 2, 3, 4], operation_counts=[10, 10, 5, 1])
    other = programs(3, number=1, slower=1.1, operation_codes=[5, 6, 7])
    elsewhere = programs(4, number=1, slower=1.1, device="A100")
    for rows in (changed, other, elsewhere):
        rows[0]["program"] = "another"
    assert [regressions((old, []), (rows, []))[1] for rows in (changed, other, elsewhere)] == [1, 0, 0]


def test_loading_in_the_step_s_own_thread_is_data_loading() -> None:
    found = path_by_cause(row("a", np.random.default_rng(1), saves_loading_us=5e3))
    assert (found["host"], found["data loading"]) == (1.5e4, 5e3) and sum(found.values()) == 1e5
    assert set(found) == {bound.label for bound in Bound}


def test_a_fleet_is_shown_from_its_table(tmp_path: Path, run: Run) -> None:
    slow = [replace(op, kernel=1) for op in CHAIN]
    write(tmp_path / "a" / "host.json", *slow, loading=300)
    write(tmp_path / "b" / "device.json")
    foretrace.survey(tmp_path / "a", tmp_path / "t", tags=["team=a"])
    foretrace.survey(tmp_path / "b", tmp_path / "t", tags=["team=b"])
    found = foretrace.fleet(tmp_path / "t")
    assert found.jobs == found.predicted == 2 and "2 jobs" in found.headline()
    assert {one.cause for one in found.lost} >= {"host", "data loading"}
    assert next(one for one in found.worst if one.cause == "data loading").job.endswith("host.json")
    assert sum(one.share for one in found.lost) < 1
    assert not found.to_pandas("lost").empty
    assert fleet(tmp_path / "t", tags=["team=b"]).jobs == 1
    ran = run("survey", "show", tmp_path / "t", "--since", tmp_path / "t")
    assert ran.code == 0 and "0 of 1 programs of both surveys" in plain(ran.out) and "data loading" in ran.out
    shown = run("survey", "show", tmp_path / "t", "--tag", "team=a", "--json").json
    assert shown["jobs"] == 1 and shown["slower"] == []
    with pytest.raises(SurveyError, match="is no survey"):
        fleet(tmp_path / "a")
