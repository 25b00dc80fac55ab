"""What a busy machine does to a capture: found, told at once, left out where it is known, and in every interval."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from forks import run_program
from kineto_support import event, op, write

from graph_predictor.edits.scale import ScaleHost
from graph_predictor.synthesis.baseline import baseline_of
from step_views.cli import capture
from tracer.capture.machine import REFILL_NS, SIBLING, Waiting, WaitingLog, alternation, verdict
from tracer.capture_layout import CONTEXT, MOST_NOISE
from tracer.job import read_job

QUIET = {"timed": Waiting(1_000_000_000, (5_000_000,) * 2, 3), "profiled": Waiting(300_000_000, (0,) * 3)}
STEADY = [100, 101, 99, 100, 102, 98, 100, 101, 99]


def ns(times: Sequence[float]) -> list[int]:
    return [round(1e6 * time) for time in times]


def test_a_quiet_machine_is_not_spoken_of() -> None:
    found = verdict(QUIET, ns(STEADY), 1.3)
    assert (found.reasons, found.sentence(), found.spread) == ((), "", 0.0)
    assert verdict({}, [], None).sentence() == ""
    # A wait that a device may have hidden is not left out.
    busy = {"timed": Waiting(10**9, (500_000_000,), 10)}
    assert verdict(busy, [], None, on_host=False).spread == pytest.approx(math.log(2))


@pytest.mark.parametrize(("phases", "times", "slowdown", "said", "spread"), [
    ({"timed": Waiting(10**9, (200_000_000, 110_000_000), 214, 0.0, 1.6)}, STEADY, 1.2,
     "steps waited 31% of their time for a processor and lost it 214 times, beside 1.6 busy processors of others",
     math.hypot(math.log1p(214 * REFILL_NS / 690_000_000), SIBLING)),
    ({"timed": Waiting(10**9, (0,), 0, 0.1)}, STEADY, 1.2, "other machines on its hardware took 10% of its time",
     -math.log(0.9)),
    (QUIET, STEADY, 0.6, "a step took 0.60 times as long under the profiler, which makes none shorter", -math.log(0.6)),
    (QUIET, [51, 221, 90, 258, 130, 240, 60, 222, 221], 1.2, "half of the timed steps are more than", 0.0),
    (QUIET, [100, 101, 103, 104, 108, 107, 112, 114, 115], 1.2, "the timed steps changed by +13% from first to last",
     0.0)])
def test_what_a_machine_does_is_named_with_what_to_do(phases: dict[str, Waiting], times: list[float], slowdown: float,
                                                      said: str, spread: float) -> None:
    found = verdict(phases, ns(times), slowdown)
    assert said in found.sentence() and "capture again with --replace" in found.sentence()
    assert found.spread == pytest.approx(spread)
    assert found.to_json()["reasons"] == list(found.reasons)


def test_a_loop_that_alternates_is_no_noise_also_beneath_its_waits() -> None:
    rollouts = [40, 10, 11, 10, 41, 10, 10, 11, 39, 10, 10, 10]
    assert alternation(ns(rollouts)) == (4, pytest.approx(4.0))
    assert verdict(QUIET, ns(rollouts), 1.2).sentence() == ""
    assert alternation(ns(STEADY)) is None and alternation(ns([10, 40, 10, 10, 11, 10, 40, 10])) is None
    times, waits = [40, 45, 11, 10, 41, 10, 44, 11], [0, 35, 0, 0, 0, 0, 34, 0]
    assert alternation(ns(times)) is None
    found = verdict({"timed": Waiting(sum(ns(times)), tuple(ns(waits)), 9)}, ns(times), 1.2)
    assert len(found.reasons) == 1 and "steps waited 33%" in found.sentence()


def test_a_step_that_begins_where_one_ended_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter([(0, 0), (5, 1), (9, 1), (100, 1), (103, 2)])
    monkeypatch.setattr("tracer.capture.machine._ThreadWaits.read", lambda self: next(reads, None))
    log = WaitingLog()
    log.enter("profiled")
    for next_begins in (True, False, False):
        log.begin()
        log.end(50, next_begins=next_begins)
    assert log.phases["profiled"].waited_ns == (5, 4, 3) and log.phases["profiled"].switches == 2
    unsaid = WaitingLog()  # where the system does not say
    unsaid.enter("timed")
    unsaid.begin()
    unsaid.end(100)
    unsaid.enter("")
    assert unsaid.to_json() == {}


def captured(folder: Path, transpose_us: Sequence[float], machine: dict[str, Any] | None = None, *,
             timed: Sequence[int] = (1_000_000,) * 4) -> Path:
    """Steps on a CPU: a product of 500 us, a transpose of 20 unless something stopped it, and a product."""
    events: list[dict[str, Any]] = []
    at = 1000.0
    for number, stopped in enumerate(transpose_us):
        events.append(event("user_annotation", f"ProfilerStep#{number}", at, 1000 + stopped))
        for name, time, shape in (("aten::mm", 500.0, [64, 64]), ("aten::transpose", stopped, [64, 8]),
                                  ("aten::mm", 500.0, [64, 64])):
            events.append(op(name, at, time, **{"Input Dims": [shape], "Input type": ["float"]}))
            at += time
    part = folder / "rank0"
    part.mkdir(parents=True)
    write(part, events, "kineto.json.gz")
    (part / CONTEXT).write_text(json.dumps({
        "rank": 0, "world_size": 1, "complete": True, "hardware": {"device": "CPU"}, "unprofiled_step_ns": list(timed),
        **({} if machine is None else {"machine": machine})}))
    return folder


@pytest.mark.parametrize(("times", "timed", "found", "stopped"), [
    ([20, 3900, 20], [1_000_000] * 4, 20, True),  # one of three: the step without the profiler had none of it
    ([3900, 3900, 3900], [4_800_000] * 4, 3900, False)])
def test_a_stopped_call_is_no_work_and_one_that_is_slow_in_every_step_is(
        tmp_path: Path, times: list[int], timed: list[int], found: float, stopped: bool) -> None:
    step = baseline_of(read_job(captured(tmp_path / "a", times, timed=timed))).predict()
    us = {entry.operation: entry.time_us for entry in step.critical_path}
    assert us["aten::transpose"] == pytest.approx(found, rel=0.25) and us["aten::mm"] > 950
    said = "Calls were stopped in 56% of the recorded host time (most in aten::transpose)"
    assert any(said in note for note in step.notes) == any("stopped" in note for note in step.notes) == stopped


def test_waits_are_left_out_of_timed_steps_and_the_rest_widens(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waits = [400_000, 390_000, 400_000, 410_000]
    busy = {"waiting": {"timed": {"ns": 4_000_000, "waited_ns": waits, "switches": 3, "stolen": 0.0, "others": 2.0}},
            "verdict": {"spread": 0.4, "sentence": "the machine was busy.", "reasons": ["x"]}}
    job = read_job(captured(tmp_path / "busy", [20, 20, 20], busy))
    assert job.graphs[0].meta.unprofiled_step_ns == [600_000, 610_000, 600_000, 590_000]
    assert any("the machine was busy. The timed steps stand here without the 1.6 ms" in note for note in job.notes)
    # What the capture says when it ends is what everyone who reads it will be told.
    done = SimpleNamespace(
        unprofiled_step_ns=[1_000_000] * 4, part=tmp_path / "busy" / "rank0", profiled_step_ns=[1] * 3,
        alternation=None, free_running=None, slowdown=None, options=SimpleNamespace(lookups=False), late_facts=dict)
    capture._report(cast(Any, done), "busy")
    assert ("Step without the profiler: 0.600 ms (median of 4, 0.590 to 0.610; 1.000 with what it waited for a "
            "processor)") in " ".join(capsys.readouterr().out.split())
    plain = read_job(captured(tmp_path / "quiet", [20, 20, 20], timed=job.graphs[0].meta.unprofiled_step_ns))
    wide, narrow = (baseline_of(each).predict() for each in (job, plain))
    assert wide.step_time_us == pytest.approx(narrow.step_time_us)
    assert wide.interval_us[1] / narrow.interval_us[1] > 1.05 and wide.interval_us[0] < narrow.interval_us[0]


def test_waits_among_operations_make_edits_unsure(tmp_path: Path) -> None:
    """Half of the profiled time was waiting, of which no call shows anything."""
    busy = {"waiting": {"profiled": {"ns": 3_060_000, "waited_ns": [510_000] * 3}}}
    waited, quiet = (baseline_of(read_job(captured(tmp_path / name, [20, 20, 20], machine))) for name, machine in (
        ("busy", busy), ("quiet", None)))
    assert waited.spreads.mixed == pytest.approx(math.log(2)) and quiet.spreads.mixed == 0.0
    assert waited.predict().interval_us == quiet.predict().interval_us
    edits = [ScaleHost(0.5)]
    (low, high), (least, most) = waited.predict(edits).interval_us, quiet.predict(edits).interval_us
    assert low < 0.7 * least and high > 1.4 * most
    found = baseline_of(read_job(captured(tmp_path / "found", [20, 3900, 20], {
        "waiting": {"profiled": {"ns": 6_940_000, "waited_ns": [0, 3_880_000, 0]}}})))
    assert found.spreads.mixed < 0.02


def test_what_ranks_of_one_machine_wait_for_each_other_is_the_jobs(tmp_path: Path) -> None:
    busy = {"waiting": {name: {"ns": 3_000_000, "waited_ns": [400_000] * 3} for name in ("timed", "profiled")}}
    path = captured(tmp_path / "a", [20, 20, 20], busy, timed=[1_000_000] * 3)
    assert read_job(path).graphs[0].meta.unprofiled_step_ns == [600_000] * 3
    context = path / "rank0" / CONTEXT
    context.write_text(json.dumps({**json.loads(context.read_text()), "world_size": 2}))
    meta = read_job(path).graphs[0].meta
    assert (meta.unprofiled_step_ns, meta.waited_share) == ([1_000_000] * 3, 0.0)


@pytest.mark.parametrize("machine", [
    {}, {"waiting": 3, "verdict": []},
    {"waiting": {"timed": {"ns": 1, "waited_ns": [1, 2]}}, "verdict": {"spread": "x"}},
    {"waiting": {"timed": {"ns": 4_000_000, "waited_ns": [-1] * 4}}, "verdict": {"spread": -1, "sentence": 4}},
    {"waiting": {"timed": {"ns": 10, "waited_ns": [10**18] * 4}}, "verdict": {"spread": 1e9}}])
def test_what_a_file_says_that_cannot_be_is_bounded(machine: dict[str, Any], tmp_path: Path) -> None:
    path = captured(tmp_path / "a", [20, 20], machine)
    context = path / "rank0" / CONTEXT
    context.write_text(json.dumps({**json.loads(context.read_text()), "profiled_step_ns": [10**30] * 3}))
    job = read_job(path)
    meta = job.graphs[0].meta
    assert 0 <= meta.noise <= MOST_NOISE and min(meta.unprofiled_step_ns) >= 1000
    assert not any("clock around" in note for note in job.notes)


LOOP = """
import os, subprocess, sys
import torch, tracer
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
with tracer.capture(sys.argv[1], warmup=1, timed=10, steps=3, execution_trace="none") as capture:
    busy = [subprocess.Popen([sys.executable, "-Sc", "while 1: pass"]) for _ in range(2)]
    try:
        while not capture.finished:
            model(torch.randn(256, 256)).sum().backward()
            capture.step()
    finally:
        for one in busy:
            one.kill()
            one.wait()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone says how long a thread waited")
def test_two_processes_on_its_processor_are_told_at_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    counted = Path("/proc/self/schedstat")
    if not counted.exists() or not int(counted.read_text().split()[2]):
        pytest.skip("this kernel does not count waits")
    ran = run_program(LOOP, tmp_path / "a")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("foretrace: Warning: the machine was busy") == 1
    machine = json.loads((tmp_path / "a" / "rank0" / CONTEXT).read_text())["machine"]
    assert machine["waiting"]["timed"]["switches"] > 0 and machine["verdict"]["spread"] > 0
    job = read_job(tmp_path / "a")
    assert job.graphs[0].meta.noise > 0 and any("waited" in note for note in job.notes)
