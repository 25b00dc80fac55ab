"""Commands on recordings whose kernels have impossible times: they give the step that really was, and say what was
mended."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_kernels import Event, changed, kernels, reading_steps, shifted, stamp, steps, write
from report_support import ROOT
from said import Run, plain
from said_facts import facts_of_text

from graph_predictor import replay
from tracer.job import read_job

CASES = ROOT.parent / "shared" / "data" / "cases"
COMMANDS = ("predict", "inspect", "breakdown", "replay")


def check(run: Run, path: Path, note: str) -> None:
    """Every command gives the recorded step of 1 ms, the GPU active time if it has one, and the note."""
    for command in COMMANDS:
        ended, text, error = run(command, path)
        assert ended == 0, error
        found = facts_of_text(text)
        assert (found["recorded step"], found.get("GPU active", "0.600")) == ("1.000", "0.600"), command
        assert note in plain(text), (command, text)


def test_kernels_that_overlap_on_one_stream_are_no_fault(run: Run) -> None:
    path = CASES / "kernels_overlap_one_stream"
    if not path.is_dir():
        pytest.skip(f"{path} is absent")
    assert "impossible" not in run("inspect", path).out
    assert not read_job(path).graphs[0].meta.loss.mistimed_kernels


@pytest.mark.parametrize(("events", "note"), [
    (changed(steps(6), [5], stamp(early=1e11)), "1 piece of GPU work had an impossible start (up to 27.8 h off)"),
    (changed(steps(6), [5, 14], stamp(early=6e8)), "2 pieces of GPU work had an impossible start (up to 600 s off)"),
    (changed(steps(6), [9], stamp(late=9e8)), "1 piece of GPU work had an impossible start (up to 900 s off)"),
    (changed(steps(6), [5, 6], stamp(ts=0)), "2 pieces of GPU work had an impossible start (2 at time 0)"),
    (changed(steps(6), [7, 13], stamp(dur=5e5)), "2 pieces of GPU work had an impossible duration (up to 500 ms)"),
    (shifted(steps(6), -300), "The clock of device 0 was 275 µs behind the host's")], ids=lambda value: str(value)[:24])
def test_planted_faults(run: Run, tmp_path: Path, events: list[Event], note: str) -> None:
    check(run, write(tmp_path / "trace.json", events), note)


def test_inspect_counts_each_kind(run: Run, tmp_path: Path) -> None:
    events = changed(changed(changed(steps(6), [5], stamp(early=1e11)), [10], stamp(dur=2e6)), [14],
                     stamp(ts=0, dur=0))
    text = plain(run("inspect", write(tmp_path / "trace.json", events)).out)
    for row in ("placed after its launch 2", "impossible duration, cut 1",
                "launches whose GPU work was not recorded 0"):
        assert row in text
    assert run("inspect", tmp_path / "trace.json", "--json").json["loss"]["cut_kernels"] == 1


def test_one_rank_of_two(run: Run, tmp_path: Path) -> None:
    """Only the rank with the fault is named."""
    for rank in range(2):
        events = changed(steps(6), [5] if rank else [], stamp(dur=2e6))
        write(tmp_path / f"rank{rank}.json", events, distributedInfo={"backend": "nccl", "rank": rank, "world_size": 2})
    check(run, tmp_path, "Rank 1: 1 piece of GPU work had an impossible duration")


@pytest.mark.parametrize(("behind_us", "streams"), [(60, (7, 20)), (200, (7,)), (700, (7, 20)), (20_000, (7,))])
def test_a_clock_behind_the_hosts_does_not_open_the_replay(
        tmp_path: Path, behind_us: float, streams: tuple[int, ...]) -> None:
    """Without the shift, waits for the device look like time that no kernel explains, and are replayed as nothing."""
    job = read_job(write(tmp_path / "trace.json", shifted(reading_steps(streams=streams), -behind_us)))
    assert job.graphs[0].meta.loss.shifted_kernels == len(job.graphs[0].kernels)
    steps = replay(job).steps
    assert [step.replayed_ns for step in steps] == pytest.approx([step.measured_ns for step in steps], rel=0.001)


def test_a_clock_that_drifts_is_refused_with_a_reason(run: Run, tmp_path: Path) -> None:
    events = steps(6)
    for place, event in enumerate(kernels(events)):
        event["ts"] -= 100 + 40 * place
    path = write(tmp_path / "trace.json", events)
    assert "behind the host's by a time that changes" in plain(run("inspect", path).out)
    text = plain(run("predict", path).out)
    assert "behind the host's by a time that changes" in text and "not reproducible" in text
