"""Surveys: which files are a job, what a row says, resuming after a kill, and input that cannot be read."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from said import Run
from test_whatif_edits import CHAIN, Op, trace_of

from graph_predictor.synthesis.baseline import baseline_of
from step_views.reports.opportunities import opportunities
from step_views.survey import table
from step_views.survey.discovery import find_jobs
from step_views.survey.fleet import fleet
from step_views.survey.run import survey
from step_views.survey.table import SurveyError, SurveyTable, read_tables
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


def test_only_what_was_named_is_read(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "a.json"), tmp_path / "bad.json"
    bad.write_bytes(b"")
    (tmp_path / "no.json.gz").write_bytes(b"no gzip" * 99)
    assert len(survey([bad, tmp_path / "no.json.gz"], tmp_path / "out").unreadable) == 2
    assert jobs(good, bad) == [["a.json"], ["bad.json"]]


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
    (tmp_path / "a" / "around").symlink_to(tmp_path)
    (tmp_path / "a" / "gone.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "many").mkdir()
    for number in range(300):
        (tmp_path / "many" / f"{number}.json").write_text('{"settings": 1}')
    os.mkfifo(tmp_path / "pipe.json")
    found = find_jobs([str(tmp_path), str(tmp_path / "nothing"), "strange://x", ""])
    assert [job.name for job in found.jobs] == [str(tmp_path / "a" / "x.json")]
    assert len(found.left_out) == 3 and any("300 files in" in said for said in found.left_out)
    assert len(found.unreadable) == 3
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


def test_workers_give_equal_tables(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / "runs" / f"{number}.json", *CHAIN[:number + 1])
    survey(tmp_path / "runs", tmp_path / "one", workers=1)
    survey(tmp_path / "runs", tmp_path / "two", workers=2)
    assert same(str(tmp_path / "one"), str(tmp_path / "two"))
    with pytest.raises(ClusterError, match="no workers 'flink'"):
        survey(tmp_path / "runs", tmp_path / "three", workers="flink")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_clusters_give_equal_tables(tmp_path: Path, engine: str) -> None:
    pytest.importorskip("distributed" if engine == "dask" else "ray")
    for number in range(4):
        write(tmp_path / "runs" / f"{number}.json", *CHAIN[:number + 1])
    survey(tmp_path / "runs", tmp_path / "one", workers=1)
    survey(tmp_path / "runs", tmp_path / "two", workers=engine)
    assert same(str(tmp_path / "one"), str(tmp_path / "two"))


def test_a_killed_survey_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        write(tmp_path / "runs" / f"{number}.json", CHAIN[0], steps=3 + number)
    out, whole = tmp_path / "out", tmp_path / "whole"
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
    result = survey(tmp_path / "runs", out, workers=1)
    assert result.unchanged + result.read == 6 and result.unchanged >= 2
    survey(tmp_path / "runs", whole, workers=1)
    assert same(str(out), str(whole))


def test_a_part_without_its_jobs_is_none_and_the_last_row_counts(tmp_path: Path) -> None:
    path, out = write(tmp_path / "runs" / "a.json"), tmp_path / "out"
    survey(path, out)
    (out / "families" / "part-00009.parquet").write_bytes(b"half")
    before = read_tables(out)["jobs"]
    with SurveyTable(out) as opened:
        opened._write({**read_tables(out), "jobs": before})
    assert len(list((out / "jobs").iterdir())) == 2 and read_tables(out)["jobs"].equals(before)


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


def test_the_exit_code_says_how_much_was_read(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    good, out = write(tmp_path / "a.json"), tmp_path / "out"
    bad = tmp_path / "bad.json"
    bad.write_bytes(b"")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{good}\n\n{bad}\n"))
    ran = run("survey", "-", "-o", out)
    assert ran.code == 1 and f"Not read: {bad}" in ran.err and "Traceback" not in ran.err
    ran = run("survey", good, bad, "-o", out, "--least-read", 0.5, "--json")
    assert ran.code == 0 and json.loads(ran.out)["unchanged"] == 1
    assert run("survey", bad, "-o", tmp_path / "none").code == 2
    assert run("survey", tmp_path / "nothing", "-o", tmp_path / "none").code == 2


def test_an_interrupted_survey_keeps_what_was_read(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path / "runs" / f"{name}.json", CHAIN[0])

    def interrupt(done: int, total: int, rows: Any) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        survey(tmp_path / "runs", tmp_path / "out", workers=1, progress=interrupt)
    assert len(read_tables(tmp_path / "out")["jobs"]) == 2
    assert survey(tmp_path / "runs", tmp_path / "out", workers=1).unchanged == 2


def test_a_link_to_itself_and_a_null_character_stop_nothing(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a.json")
    (tmp_path / "runs" / "self.json").symlink_to("self.json")
    found = find_jobs([str(tmp_path / "runs"), "a\0b"])
    assert len(found.jobs) == 1 and len(found.unreadable) == 2
    assert "null character" in found.unreadable[0] + found.unreadable[1]


def test_a_damaged_part_of_a_table_names_what_to_remove(tmp_path: Path) -> None:
    trace, out = write(tmp_path / "a.json"), tmp_path / "out"
    survey(trace, out, workers=1)
    part, = (out / "families").iterdir()
    (out / "opportunities" / part.name).write_bytes(part.read_bytes())
    with pytest.raises(SurveyError, match="no column change"):
        read_tables(out)
    part.unlink()
    with pytest.raises(SurveyError, match=f"remove {out / 'jobs' / part.name}"):
        read_tables(out)
    (out / "jobs" / part.name).unlink()
    assert survey(trace, out, workers=1).read == 1 and len(read_tables(out)["jobs"]) == 1


def test_a_tag_that_is_no_utf_8_is_kept_as_far_as_it_can_be(tmp_path: Path) -> None:
    out = tmp_path / "out"
    survey(write(tmp_path / "a.json"), out, workers=1, tags=["a\udcff"])
    assert read_tables(out)["jobs"]["tags"].to_pylist() == [["a?"]]
    survey(tmp_path / "a.json", tmp_path / "one", workers=1, tags="team=ads")
    assert read_tables(tmp_path / "one")["jobs"]["tags"].to_pylist() == [["team=ads"]]
    assert fleet(tmp_path / "one", tags="team=ads").jobs == 1
