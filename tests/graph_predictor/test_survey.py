"""Surveys: which files are a job, what a row says, resuming after a kill, and what a fleet's table says."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet
from said import Run, plain
from test_cycles import loop
from test_whatif_edits import CHAIN, Op, trace_of

from graph_predictor.synthesis.baseline import baseline_of
from step_views.reports.opportunities import opportunities
from step_views.survey import facts, table
from step_views.survey.discovery import find_jobs
from step_views.survey.facts import BOUND_COLUMNS
from step_views.survey.fleet import fleet
from step_views.survey.run import survey
from step_views.survey.slower import regressions
from step_views.survey.table import SurveyError, read_tables
from tracer.cluster.workers import ClusterError
from tracer.job import read_job


def write(path: Path, *ops: Op, **settings: Any) -> Path:
    """A small trace, compressed where its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_name("plain.json")
    trace_of(list(ops) or CHAIN, **settings).write(plain)
    data = plain.read_bytes()
    plain.unlink()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return path


def jobs(*paths: Path | str) -> list[list[str]]:
    """Files of each job that is found, by name."""
    return [sorted(os.path.basename(path) for path in each.paths) for each in find_jobs(map(str, paths)).jobs]


def same(one: str, other: str) -> bool:
    """Whether two surveys have equal tables."""
    return all(rows.equals(read_tables(other)[name]) for name, rows in read_tables(one).items())


def test_ranks_of_one_job_lie_together(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / "a" / f"rank{rank}.json.gz", rank=rank, world_size=2)
        write(tmp_path / "b" / f"host_{4000 + rank}.17000{rank}.pt.trace.json", rank=rank, world_size=2)
        write(tmp_path / "c" / f"rank{rank}" / "trace.json", rank=rank, world_size=2)
        write(tmp_path / "d" / f"{'xy'[rank]}.json")
        for run in ("p", "q"):
            write(tmp_path / "e" / f"{run}_rank{rank}.json", rank=rank, world_size=2)
    assert jobs(tmp_path) == [["a"], ["b"], ["trace.json"] * 2, ["x.json"], ["y.json"],
                              ["p_rank0.json", "p_rank1.json"], ["q_rank0.json", "q_rank1.json"]]
    assert jobs(f"{tmp_path}/a/*.gz") == [["rank0.json.gz", "rank1.json.gz"]]
    assert jobs(tmp_path / "d" / "x.json", tmp_path / "d", f"{tmp_path}/**/x.json") == [["x.json"], ["y.json"]]


def test_a_capture_is_one_job_and_an_execution_trace_belongs_to_its_rank(data_folder: Path) -> None:
    here = Path(__file__).parents[2] / "traces"
    assert jobs(here / "dlrm-cpu", here / "llama-cpu") == [["dlrm-cpu"], ["llama-cpu"]]
    assert [job.files for job in find_jobs([str(data_folder / "traces" / "dlrm-8xV100-2023")]).jobs] == [16]


def test_what_is_no_recording_is_named_in_one_line(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x.json")
    for link, target in (("around", tmp_path), ("gone.json", tmp_path / "nowhere"), ("self.json", "self.json")):
        (tmp_path / "a" / link).symlink_to(target)
    (tmp_path / "many").mkdir()
    for number in range(300):
        (tmp_path / "many" / f"{number}.json").write_text('{"settings": 1}')
    os.mkfifo(tmp_path / "pipe.json")
    found = find_jobs([str(tmp_path), str(tmp_path / "nothing"), "strange://x", "", "a\0b"])
    assert [job.name for job in found.jobs] == [str(tmp_path / "a" / "x.json")]
    assert any("300 files in" in said for said in found.left_out)
    assert any("null character" in said for said in found.unreadable)
    assert len(found.left_out) + len(found.unreadable) == 8
    assert not any("\n" in said for said in (*found.left_out, *found.unreadable))


def test_urls_are_looked_through(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for rank in (0, 1):
        file = write(tmp_path / f"rank{rank}.json.gz", rank=rank, world_size=2)
        memory.pipe(f"/fleet/a/rank{rank}.json.gz", file.read_bytes())
    memory.pipe("/fleet/notes.txt", b"none")
    assert jobs("memory://fleet") == jobs("memory://fleet/*/*.gz") == [["rank0.json.gz", "rank1.json.gz"]]
    assert survey("memory://fleet", tmp_path / "out").to_pandas()["ranks"].tolist() == [2]


def test_a_row_says_what_the_commands_say(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json")
    result = survey(path, tmp_path / "out", tags=["team=ads"])
    row = result.to_pandas().iloc[0]
    step = opportunities(baseline_of(read_job(path))).baseline
    assert (row["step_time_us"], row["bound"], row["gpu_active_us"]) == (
        step.step_time_us, step.bound, step.gpu_active_us)
    assert row["low_us"], row["high_us"] == step.interval_us
    assert {name: row[f"{name.replace(' ', '_')}_us"] for name in step.bounds_us} == step.bounds_us
    assert row["recorded_step_us"] == step.recorded_us and len(row["step_times_us"]) == row["counted_steps"] == 3
    assert row["tags"].tolist() == ["team=ads"] and row["device"] == "NVIDIA A100-SXM4-80GB"
    families = result.to_pandas("families")
    assert dict(zip(families["family"], families["time_us"], strict=True)) == step.families_us
    assert len(result.to_pandas("opportunities")) > 0
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out" / "families"), families)


def apart_and_together(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch, together: int = 10**6) -> \
        tuple[dict[str, Any], dict[str, Any]]:
    """The row of a job whose ranks are read one after the other, and that of all in memory; facts of the recording are
    equal."""
    rows = []
    for name, most in (("apart", min(facts.MOST_TOGETHER, together - 1)), ("together", together)):
        monkeypatch.setattr(facts, "MOST_TOGETHER", most)
        survey(folder, out / name, workers=1)
        [row] = read_tables(out / name)["jobs"].to_pylist()
        rows.append(row)
    assert not rows[0]["error"] and rows[1]["simulated_ranks"] == sorted(rows[1]["simulated_ranks"])
    recorded = [name for name in table.COLUMNS["jobs"] if name not in PREDICTED]
    assert {name: rows[0][name] for name in recorded} == {name: rows[1][name] for name in recorded}
    return rows[0], rows[1]


PREDICTED = {"times", "step_time_us", "low_us", "high_us", "bound", "gpu_active_us", *BOUND_COLUMNS, "saves_host_us",
             "saves_gpu_us", "saves_network_us", "saves_loading_us", "simulated_ranks", "mfu", "warnings"}


def test_ranks_of_a_large_job_are_read_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighteen ranks meet in a collective at the end of each step: rank 4 comes last, rank 9 first."""
    late = [200 + (17 * rank) % 90 for rank in range(18)]
    late[4], late[9] = 400, 100
    for rank, us in enumerate(late):
        write(tmp_path / "runs" / f"rank{rank}.json", Op("aten::mm", [[64, 64], [64, 64]], us),
              Op("nccl:allreduce", [[64, 64]], 420 - us), rank=rank, world_size=18)
    apart, together = apart_and_together(tmp_path / "runs", tmp_path, monkeypatch)
    simulated = apart["simulated_ranks"]
    assert simulated == sorted(simulated, key=late.__getitem__) and (simulated[0], simulated[-1]) == (9, 4)
    assert len(simulated) == 16 and together["simulated_ranks"] == list(range(18))
    assert apart["warnings"].startswith("Of 18 recorded ranks 16 are simulated, from the quickest to the slowest")
    assert "of 18 ranks were recorded" not in apart["warnings"]
    for name in ("step_time_us", "compute_us", "saves_gpu_us"):
        assert apart[name] == pytest.approx(together[name], rel=1e-6)


def test_a_large_capture_and_alternating_steps_are_read_one_after_the_other(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(18):
        part = tmp_path / "a" / f"rank{rank}"
        part.mkdir(parents=True)
        (part / "kineto.json.gz").write_bytes(gzip.compress(json.dumps(loop("RU" * 3).document()).encode()))
        (part / "context.json").write_text(json.dumps({"rank": rank, "world_size": 18, "complete": True}))
    apart, _ = apart_and_together(tmp_path / "a", tmp_path, monkeypatch)
    assert (apart["ranks"], apart["steps"]) == (18, 3) and "a cycle of 2 of them" in apart["notes"]


def test_a_rank_of_a_large_job_that_cannot_be_read_is_noted(tmp_path: Path) -> None:
    for rank in range(18):
        write(tmp_path / "runs" / f"rank{rank}.json", rank=rank, world_size=18)
    (tmp_path / "runs" / "rank7.json").write_bytes(b'{"traceEvents": 7}')
    [row] = survey(tmp_path / "runs", tmp_path / "out", workers=1).to_pandas().to_dict("records")
    assert row["ranks"] == 17 and "Skipped: " in row["notes"] and "1 of 18 ranks were not recorded (7)" in row["notes"]
    write(tmp_path / "runs" / "rank7.json", rank=7, world_size=9)
    [(_, why)] = survey(tmp_path / "runs", tmp_path / "mixed", workers=1).unreadable
    assert "files of different jobs are mixed" in why
    for path in (tmp_path / "runs").iterdir():
        path.write_bytes(b'{"traceEvents": 7}')
    [(_, why)] = survey(tmp_path / "runs", tmp_path / "none", workers=1).unreadable
    assert "No profiler trace could be read" in why


def test_execution_traces_are_joined_rank_by_rank(data_folder: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    apart, together = apart_and_together(data_folder / "traces" / "dlrm-8xV100-2023", tmp_path, monkeypatch, 8)
    assert (len(apart["simulated_ranks"]), together["ranks"]) == (7, 8) and apart["bound"] == together["bound"]
    assert apart["step_time_us"] == pytest.approx(together["step_time_us"], rel=0.05)


def test_a_table_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    trace, out = write(tmp_path / "a.json"), tmp_path / "out"
    survey(trace, out, workers=1)
    [path] = (out / "jobs").iterdir()
    rows = parquet.read_table(path).drop_columns(["simulated_ranks"])
    for form in ("1", "2"):
        parquet.write_table(rows.replace_schema_metadata({"foretrace_survey": form}), path)
        if form == "1":
            assert read_tables(out)["jobs"]["simulated_ranks"].to_pylist() == [None]
    with pytest.raises(SurveyError, match="no column simulated_ranks"):
        read_tables(out)


def test_only_what_changed_is_read_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in "ab":
        write(tmp_path / "runs" / f"{name}.json")
    (tmp_path / "runs" / "c.json").write_text('{"traceEvents": [')
    first = survey(tmp_path / "runs", out)
    assert (first.read, first.unchanged, len(first.unreadable)) == (2, 0, 1)
    write(tmp_path / "runs" / "b.json", CHAIN[0])
    again = survey(tmp_path / "runs", out, tags=["new"])
    assert (again.read, again.unchanged, len(again.unreadable)) == (1, 1, 1)
    anew = survey(tmp_path / "runs", tmp_path / "anew", tags=["new"])
    assert anew.read == 2 and same(str(out), str(tmp_path / "anew"))
    assert sorted(os.listdir(out / "jobs")) == sorted(os.listdir(out / "families"))


@pytest.mark.parametrize("workers", [2, *(pytest.param(engine, marks=pytest.mark.slow) for engine in ("dask", "ray"))])
def test_workers_give_equal_tables(tmp_path: Path, workers: int | str) -> None:
    if workers != 2:
        pytest.importorskip("distributed" if workers == "dask" else "ray")
    for number in range(3):
        write(tmp_path / "runs" / f"{number}.json", *CHAIN[:number + 1])
    survey(tmp_path / "runs", tmp_path / "one", workers=1)
    survey(tmp_path / "runs", tmp_path / "two", workers=workers)
    assert same(str(tmp_path / "one"), str(tmp_path / "two"))
    with pytest.raises(ClusterError, match="no workers 'flink'"):
        survey(tmp_path / "runs", tmp_path / "three", workers="flink")


def test_a_killed_or_interrupted_survey_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        write(tmp_path / "runs" / f"{number}.json", CHAIN[0], steps=3 + number)
    out, whole, stopped = tmp_path / "out", tmp_path / "whole", tmp_path / "stopped"
    monkeypatch.setattr(table, "PART_JOBS", 2)
    process = os.fork()
    if not process:
        survey(tmp_path / "runs", out, workers=1)
        os._exit(0)
    until = time.monotonic() + 60
    while time.monotonic() < until and not list(out.glob("jobs/part-*")):
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)

    def interrupt(done: int, total: int, rows: Any) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        survey(tmp_path / "runs", stopped, workers=1, progress=interrupt)
    assert len(read_tables(stopped)["jobs"]) == 3
    survey(tmp_path / "runs", whole, workers=1)
    for each in (out, stopped):
        result = survey(tmp_path / "runs", each, workers=1)
        assert result.unchanged + result.read == 6 and result.unchanged >= 2
        assert same(str(each), str(whole))


@pytest.mark.parametrize(("name", "content", "why"), [
    ("file", b"text", "is no directory"), ("folder/other.txt", b"text", "holds other files"),
    ("folder/jobs/part-00000.parquet", b"PAR1", "cannot be read")])
def test_another_s_output_is_left_alone(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(SurveyError, match=why):
        survey(write(tmp_path / "a.json"), tmp_path / name.partition("/")[0])
    assert path.read_bytes() == content


@pytest.mark.parametrize(("name", "why"), [
    ("no\udcff", "not UTF-8"), ("n" * 300, "too long"), ("a\0b", "null"), ("file", "no directory"),
    ("file/x", "no directory"), ("table", "jobs cannot be written into"), ("locked", "cannot be written into .Perm")])
def test_an_output_that_cannot_be_written_is_refused_before_a_job_is_read(
        tmp_path: Path, name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "jobs").write_bytes(b"")
    monkeypatch.setattr("step_views.survey.run.find_jobs", lambda paths: pytest.fail("looked for jobs"))
    if name == "locked":  # root may write anywhere
        monkeypatch.setattr(table.tempfile, "TemporaryFile", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(SurveyError, match=why):
        survey("anywhere", tmp_path / name)


def test_the_exit_code_says_how_much_was_read(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    good, out = write(tmp_path / "a.json"), tmp_path / "out"
    bad = tmp_path / "bad.json"
    bad.write_bytes(b"")
    assert jobs(good, bad) == [["a.json"], ["bad.json"]]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{good}\n\n{bad}\n"))
    ran = run("survey", "-", "-o", out)
    assert ran.code == 1 and f"Not read: {bad}" in ran.err and "Traceback" not in ran.err
    ran = run("survey", good, bad, "-o", out, "--least-read", 0.5, "--json")
    assert ran.code == 0 and json.loads(ran.out)["unchanged"] == 1
    (tmp_path / "no.json.gz").write_bytes(b"no gzip" * 99)
    for path in (bad, tmp_path / "no.json.gz", tmp_path / "nothing"):
        assert run("survey", path, "-o", tmp_path / "none").code == 2


def test_a_damaged_part_of_a_table_names_what_to_remove(tmp_path: Path) -> None:
    trace, out = write(tmp_path / "a.json"), tmp_path / "out"
    survey(trace, out, workers=1)
    # A part without its jobs is none.
    (out / "families" / "part-00009.parquet").write_bytes(b"half")
    assert len(read_tables(out)["jobs"]) == 1
    survey(trace, out, workers=1)
    part = out / "families" / next((out / "jobs").iterdir()).name
    (out / "opportunities" / part.name).write_bytes(part.read_bytes())
    with pytest.raises(SurveyError, match="no column change"):
        read_tables(out)
    part.unlink()
    with pytest.raises(SurveyError, match=f"remove {out / 'jobs' / part.name}"):
        read_tables(out)
    (out / "jobs" / part.name).unlink()
    assert survey(trace, out, workers=1).read == 1 and len(read_tables(out)["jobs"]) == 1


SD = 0.003


def row(job: str, rng: np.random.Generator, *, slower: float = 1.0, steps: int = 8, sd: float = SD,
        **other: Any) -> dict[str, Any]:
    """A job's row in the columns that are compared: a GPU that is busy for 80 of 100 ms, steps that vary by 0.3%."""
    step = 1e5 * slower
    path = {**dict.fromkeys(BOUND_COLUMNS, 0.0), "compute_us": 8e4, "host_us": 2e4, **other.pop("path", {})}
    return {"job": job, "program": "p", "profiled": True, "device": "H100", "ranks": 1, "world_size": 8,
            "step_time_us": step, "step_times_us": (step * np.exp(rng.normal(0, sd, steps))).tolist(),
            "operation_codes": [1, 2, 3], "operation_counts": [10, 10, 5], "saves_loading_us": 0.0, **path, **other}


def programs(seed: int, *, slower: float = 1.0, runs: int = 1, number: int = 20, **other: Any) -> list[dict[str, Any]]:
    """Jobs of several programs."""
    rng = np.random.default_rng(seed)
    return [row(f"{place}-{run}", rng, slower=slower, program=f"p{place}", **other) for place in range(number)
            for run in range(runs)]


def test_quiet_pairs_raise_no_alarm_and_three_percent_is_found() -> None:
    for seed in range(20):
        assert regressions((programs(seed), []), (programs(seed + 100), []))[::2] == ([], 20)
    found, _, compared = regressions((programs(1), []), (programs(2, slower=1.03), []))
    assert compared == len(found) == 20
    assert all(one.low < 0.03 < one.high and one.change == pytest.approx(0.03, abs=0.01) for one in found)


@pytest.mark.parametrize(("runs", "steps", "spread"), [(4, 8, 0.03), (1, 1, 0.008)])
def test_the_spread_of_steps_and_of_runs_is_taken_into_account(runs: int, steps: int, spread: float) -> None:
    """A machine whose runs differ by 3%, and runs of one step each, which vary as the others' do."""
    rng = np.random.default_rng(3)
    sides = [([row(f"{place}-{run}", rng, slower=float(np.exp(rng.normal(0, spread))), program=f"p{place}", steps=steps)
               for place in range(20) for run in range(runs)], []) for _ in range(2)]
    assert regressions(*sides)[0] == []


def test_recordings_of_too_few_steps_say_what_they_could_tell() -> None:
    """Steps that vary by 1%: of one or two 3% cannot be told, which is said; what exceeds the named change is found."""
    def side(seed: int, steps: int, slower: float = 1.0) -> tuple[list[dict[str, Any]], list[Any]]:
        rng = np.random.default_rng(seed)
        usual = [row(f"long-{place}", rng, program=f"l{place}", steps=8, sd=0.01) for place in range(10)]
        return [*usual, *(row(f"{place}", rng, program=f"p{place}", steps=steps, slower=slower, sd=0.01)
                          for place in range(10))], []

    least = {}
    for steps in (1, 2, 100):
        found, untold, _ = regressions(side(1, steps), side(2, steps, 1.03))
        short = [one for one in untold if "long" not in one.job]
        assert not any("long" in one.job for one in found) and len(found) + len(short) == 10  # none in silence
        assert len(found) == 10 if steps == 100 else len(short) > 8
        least[steps] = max((one.least for one in short), default=0.0)
        assert all((one.steps_before, one.steps_after) == (steps, steps) for one in short)
    assert least[1] > least[2] > 0.03
    assert len(regressions(side(1, 1), side(2, 1, 1 + 1.4 * least[1]))[0]) == 10


def test_an_unsteady_program_hides_no_other_s_growth() -> None:
    """Its 60 steps vary by 10%, the eight steps of each other program by 0.3%."""
    sides = [([*programs(seed, slower=slower), row("wild", np.random.default_rng(seed), program="w", steps=60, sd=0.1)],
              []) for seed, slower in ((1, 1.0), (2, 1.03))]
    assert len(regressions(*sides)[0]) > 16


@pytest.mark.parametrize(("path", "families", "cause"), [
    ({"host_us": 3e4}, {}, "host"), ({"launch_us": 9e3}, {}, "launch"),
    ({"exposed_communication_us": 1e4}, {}, "exposed communication"),
    ({"compute_us": 9e4}, {"gemm": 6e4, "conv": 3e4}, "compute: gemm"),
    ({"compute_us": 9e4}, {"gemm": 5.6e4, "conv": 3.4e4}, "compute: all kernels"),
    ({"host_us": 3e4, "saves_loading_us": 1e4}, {}, "data loading")])
def test_what_grew_most_is_the_cause(path: dict[str, float], families: dict[str, float], cause: str) -> None:
    loading = path.pop("saves_loading_us", 0.0)
    old, new = programs(1, number=1), programs(2, number=1, slower=1.1, path=path, saves_loading_us=loading)
    kernels = [[{"job": "0-0", "family": name, "time_us": us} for name, us in side.items()]
               for side in ({"gemm": 5e4, "conv": 3e4}, families)]
    [found], _, _ = regressions((old, kernels[0]), (new, kernels[1]))
    assert found.cause == cause and found.gpu_s_an_hour == pytest.approx(3600 * 8 * 0.1 / 1.1, rel=0.05)


@pytest.mark.parametrize(("other", "compared"), [
    ({"operation_codes": [1, 2, 3, 4], "operation_counts": [10, 10, 5, 1]}, 1), ({"operation_codes": [5, 6, 7]}, 0),
    ({"device": "A100"}, 0)])
def test_versions_of_a_program_are_compared_and_other_programs_not(other: dict[str, Any], compared: int) -> None:
    rows = programs(2, number=1, slower=1.1, **other)
    rows[0]["program"] = "another"
    assert regressions((programs(1, number=1), []), (rows, []))[2] == compared


def test_a_fleet_is_shown_from_its_table(tmp_path: Path, run: Run) -> None:
    slow = [replace(op, kernel=1) for op in CHAIN]
    write(tmp_path / "a" / "host.json", *slow, loading=300)
    write(tmp_path / "b" / "device.json")
    survey(tmp_path / "a", tmp_path / "t", tags=["team=a"])
    survey(tmp_path / "b", tmp_path / "t", tags=["team=b"])
    found = fleet(tmp_path / "t")
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
    survey(tmp_path / "a", tmp_path / "one", tags="a\udcff")  # no UTF-8: kept as far as it can be
    assert read_tables(tmp_path / "one")["jobs"]["tags"].to_pylist() == [["a?"]]
