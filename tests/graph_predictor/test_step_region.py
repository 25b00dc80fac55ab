"""``--step-region``: every command that reads a recording takes the same regions as its steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_support import ROOT
from said import Run, plain

CASE = ROOT.parent / "shared" / "data" / "cases" / "record_function_steps" / "trace.json"
STEP_MS = "1.250"
TIMED = ("inspect", "replay", "breakdown", "predict", "opportunities")
"""Commands that state the recorded step."""


def write(path: Path, name: str = "train_step", *, steps: int = 5, period: float = 1250, rank: int | None = None,
          numbered: bool = False) -> Path:
    """Regions of 1,000 µs, one a period, each with four kernels of 150 µs, a wait for them, and an upload between.

        thread   |-- region: 4 launches, wait --|  |upload|  |-- region …
    """
    events: list[dict[str, Any]] = []
    correlation = 0

    def add(category: str, what: str, at: float, length: float, pid: int = 1, tid: int = 1, **args: Any) -> None:
        events.append({"ph": "X", "cat": category, "name": what, "pid": pid, "tid": tid, "ts": 10_000 + at,
                       "dur": length, "args": args})

    for step in range(steps):
        at = step * period
        add("user_annotation", f"{name} {step}" if numbered else name, at, 1000)
        for kernel in range(4):
            correlation += 1
            add("cpu_op", "aten::mm", at + 10 + 60 * kernel, 40)
            add("cuda_runtime", "cudaLaunchKernel", at + 20 + 60 * kernel, 5, correlation=correlation)
            add("kernel", "sgemm", at + 50 + 155 * kernel, 150, 0, 7, correlation=correlation, device=0, stream=7)
        correlation += 1
        add("cuda_runtime", "cudaDeviceSynchronize", at + 300, 380, correlation=correlation)
        add("cpu_op", "aten::to", at + 1050, 100)
    about = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
    path.write_text(json.dumps({
        "schemaVersion": 1, "traceEvents": events, **about,
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108}]}), encoding="utf-8")
    return path


@pytest.mark.parametrize("command", TIMED)
@pytest.mark.parametrize(("name", "numbered"), [("train_step", False), ("## iteration ##", False), ("batch", True)])
def test_every_command_takes_the_regions_as_steps(command: str, name: str, numbered: bool, run: Run,
                                                  tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", name, numbered=numbered)
    ended, text, error = run(command, path, "--step-region", f"{name} *" if numbered else name)
    assert ended == 0, error
    assert f"{STEP_MS} ms under the profiler (mean of 4 of 5 steps)" in plain(text)


def test_the_last_step_counts_where_it_is_the_only_one(run: Run, tmp_path: Path) -> None:
    ended, text, _ = run("inspect", write(tmp_path / "a.json", steps=1), "--step-region", "train_step")
    assert ended == 0 and "1.000 ms under the profiler" in plain(text)
    text = plain(run("replay", write(tmp_path / "b.json"), "--step-region", "train_step").out)
    assert "no: no region begins after it" in text


def test_the_shared_case_takes_a_millisecond(run: Run) -> None:
    if not CASE.exists():
        pytest.skip(f"{CASE} is absent")
    ended, text, error = run("predict", CASE, "--step-region", "train_step")
    assert ended == 0, error
    assert "Recorded step: 1.000 ms" in plain(text) and "Step under the profiler: 1.000 ms" in plain(text)


def test_without_the_option_the_regions_are_offered(run: Run, tmp_path: Path) -> None:
    text = plain(run("inspect", write(tmp_path / "a.json")).out)
    assert "Regions that repeat: 'train_step' (5 times, 5.000 ms in all)" in text and "--step-region NAME" in text


@pytest.mark.parametrize("command", [*TIMED, "overheads", "memory", "comm report", "ranks", "diff", "convert", "report",
                                     "export", "sweep"])
def test_every_command_refuses_a_region_that_is_not_there(command: str, run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "a.json")
    more = {"diff": [path], "convert": ["-o", tmp_path / "a.foretrace"], "report": ["-o", tmp_path / "a.html"],
            "export": ["-o", tmp_path / "b.json"],
            "sweep": ["--host", "1,2", "-o", tmp_path / "a.csv"]}.get(command, [])
    ended, text, error = run(*command.split(), path, *more, "--step-region", "trainstep")
    assert (ended, text) == (2, "")
    assert "has no region named 'trainstep'. Similar names: 'train_step' (5 times" in plain(error)


def test_a_script_has_no_regions(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def build():\n    raise SystemExit\n")
    for command, *more in (("predict",), ("opportunities",), ("ranks",), ("memory",), (
            "fit-batch", "--device", "h100-sxm"), ("export", "-o", tmp_path / "a.json")):
        ended, _, error = run(command, f"{script}:build", *more, "--step-region", "train_step")
        assert ended == 2 and "--step-region names the steps of a recording" in plain(error), command


def test_a_converted_file_has_the_same_steps_and_refuses_others(run: Run, tmp_path: Path) -> None:
    path, out = write(tmp_path / "a.json"), tmp_path / "a.foretrace"
    assert run("convert", path, "-o", out, "--step-region", "train_step").code == 0
    for more in ((), ("--step-region", "train_step")):
        assert f"Recorded step: {STEP_MS} ms" in plain(run("replay", out, *more).out)
    ended, _, error = run("replay", out, "--step-region", "aten::mm")
    assert ended == 2 and "are the regions 'train_step'" in plain(error)


def test_a_sweep_does_not_go_on_with_other_steps(tmp_path: Path) -> None:
    from step_views.sweep.run import SweepSource, _about
    from step_views.sweep.space import SweepSpace
    from tracer.job import read_job

    path = write(tmp_path / "a.json")
    first, second = (_about(SweepSource((str(path),)), read_job(path, step_region=region), SweepSpace([]), None)
                     for region in (None, "train_step"))
    assert (first["step region"], second["step region"]) == ("", "train_step")
    source = SweepSource((str(path),), step_region="train_step")
    assert source.study().job.graphs[0].meta.step_region == "train_step"


def test_further_captures_are_read_with_the_region(run: Run, tmp_path: Path) -> None:
    path, other = write(tmp_path / "a.json"), write(tmp_path / "b.json", "other")
    ended, _, error = run("predict", path, "--step-region", "train_step", "--host-from", other)
    assert ended == 2 and "b.json has no region named 'train_step'" in plain(error)


def test_ranks_are_compared_by_their_regions(run: Run, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", rank=rank)
    ended, text, error = run("ranks", tmp_path, "--step-region", "train_step")
    assert ended == 0, error
    assert STEP_MS in text


def test_a_baseline_belongs_to_its_region(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    (folder / "one").mkdir(parents=True)
    write(folder / "one" / "a.json")
    ended, _, error = run("check", folder, "--update-baseline", "--reason", "first")
    assert ended == 2 and "name the region that marks them with --step-region" in plain(error)
    assert run("check", folder, "--update-baseline", "--reason", "first", "--step-region", "train_step").code == 0
    assert run("check", folder, "--step-region", "train_step").code == 0
    ended, _, error = run("check", folder)
    assert ended == 2 and "the steps of one were the regions 'train_step' then (--step-region)" in plain(error)


def test_where_nothing_is_recorded_there_is_no_region(run: Run, tmp_path: Path) -> None:
    ended, _, error = run("shard", "dlrm", "--gpus", "8", "--step-region", "train_step")
    assert ended == 2 and "--step-region names the steps of one" in plain(error)
    ended, _, error = run("serve", "llama-3.1-8b", "--step-region", "decode")
    assert ended == 2 and "give --anchor too" in plain(error)
