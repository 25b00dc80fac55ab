"""``--step-region``: every command that reads a recording takes the same regions as its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from micro import Micro
from said import Run, plain

from step_views.sweep.run import SweepSource, _about
from step_views.sweep.space import SweepSpace
from tracer.job import read_job

STEP_MS = "1.250"
TIMED = ("inspect", "replay", "breakdown", "predict", "opportunities")
"""Commands that state the recorded step."""


def write(path: Path, name: str = "train_step", *, steps: int = 5, numbered: bool = False) -> Path:
    """Regions of 1,000 µs, one each 1,250, of four kernels of 150 µs, a wait for them, and an upload between.

        thread   |-- region: 4 launches, wait --|  |upload|  |-- region …
    """
    trace = Micro()
    trace.metadata["deviceProperties"] = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108}]
    for step in range(steps):
        at = 10_000 + 1250 * step
        trace._event("note", f"{name} {step}" if numbered else name, at, 1000, 1, 1)
        for kernel in range(4):
            trace.op("aten::mm", at + 10 + 60 * kernel, at + 50 + 60 * kernel)
            trace.launch(at + 20 + 60 * kernel, 5, (7, at + 50 + 155 * kernel, 150), name="sgemm")
        trace.call("cudaDeviceSynchronize", at + 300, 380)
        trace.op("aten::to", at + 1050, at + 1150)
    return trace.write(path)


@pytest.mark.parametrize(("name", "numbered"), [("train_step", False), ("## iteration ##", False), ("batch", True)])
def test_every_command_takes_the_regions_as_steps(name: str, numbered: bool, run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", name, numbered=numbered)
    for command in TIMED if name == "train_step" else ("predict",):
        ended, text, error = run(command, path, "--step-region", f"{name} *" if numbered else name)
        assert ended == 0, error
        assert f"{STEP_MS} ms under the profiler (mean of 4 of 5 steps)" in plain(text), command


def test_the_last_step_counts_where_it_is_the_only_one(run: Run, tmp_path: Path) -> None:
    ended, text, _ = run("inspect", write(tmp_path / "a.json", steps=1), "--step-region", "train_step")
    assert ended == 0 and "1.000 ms under the profiler" in plain(text)
    path = write(tmp_path / "b.json")
    assert "no: no region begins after it" in plain(run("replay", path, "--step-region", "train_step").out)
    text = plain(run("inspect", path).out)
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


def test_further_captures_are_read_with_the_region(run: Run, tmp_path: Path) -> None:
    path, other = write(tmp_path / "a.json"), write(tmp_path / "b.json", "other")
    ended, _, error = run("predict", path, "--step-region", "train_step", "--host-from", other)
    assert ended == 2 and "b.json has no region named 'train_step'" in plain(error)


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
    path = write(tmp_path / "a.json")
    first, second = (_about(SweepSource((str(path),)), read_job(path, step_region=region), SweepSpace([]), None)
                     for region in (None, "train_step"))
    assert (first["step region"], second["step region"]) == ("", "train_step")
    source = SweepSource((str(path),), step_region="train_step")
    assert source.study().job.graphs[0].meta.step_region == "train_step"


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
