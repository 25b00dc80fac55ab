"""Loops that alternate: every command takes whole cycles of recorded steps for the step."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from micro import Micro
from said import Run, plain

from graph_predictor.prediction.replay import replay
from graph_predictor.prediction.scenario import EditError
from graph_predictor.request.study import Configuration, Study
from graph_predictor.sizes.retrace import trace_again
from graph_predictor.synthesis.baseline import baseline_of
from tracer.capture_layout import CONTEXT
from tracer.errors import CycleError
from tracer.job import read_job
from tracer.step_work import period_of

PPO = "RUUU"
"""A rollout and its update, and three updates more."""
UPDATE, ROLLOUT, BETWEEN = 100, 300, 4
"""What they take, and the time between two steps, us."""
CYCLE_MS = (ROLLOUT + 4 * UPDATE + 3 * BETWEEN) / 1000


def loop(pattern: str, *, slower: Sequence[float] = (), rank: int | None = None) -> Micro:
    """Steps on a CPU: each an update of 100 us, behind a rollout of 300 us where the pattern has R.

    ``slower`` is what the machine makes of each step's update, a factor.
    """
    trace, at = Micro(rank=rank, world_size=2 if rank is not None else 1), 1000.0
    for number, kind in enumerate(pattern):
        begin = at
        sizes: list[tuple[str, float, list[int]]] = [("aten::mm", UPDATE * (slower[number] if slower else 1), [64, 8])]
        if kind == "R":
            sizes = [("aten::addmm", ROLLOUT / 3, [128, 8])] * 3 + sizes
        for name, time, shape in sizes:
            trace.op(name, at, at + time, **{"Input Dims": [shape, [8, 8]], "Input type": ["float", "float"]})
            at += time
        trace.step(begin, at, number)
        at += BETWEEN
    return trace


def write(path: Path, pattern: str = PPO * 2) -> Path:
    return loop(pattern).write(path)


@pytest.mark.parametrize(("pattern", "period"), [
    ("UUUU", 1), (PPO * 2, 4), (PPO * 3, 4), ("UURUUURUUU", 4), ("RURU", 2), ("RUURUU", 3), (PPO, 1), ("RUU", 1),
    (PPO + "RUU", 1), ("RUURUUURUU", 1), ("U" + PPO + PPO, 4)])
def test_the_period_is_where_the_work_repeats(pattern: str, period: int, tmp_path: Path) -> None:
    assert period_of([loop(pattern).read(tmp_path)]) == period


@pytest.mark.parametrize(("pattern", "slower", "period"), [
    ("U" * 8, [4.0, 1.0, 1.0, 1.0] * 2, 1), (PPO * 2, [1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 3.0], 4)])
def test_durations_make_no_period(tmp_path: Path, pattern: str, slower: list[float], period: int) -> None:
    assert period_of([loop(pattern, slower=slower).read(tmp_path)]) == period


def test_a_period_is_that_of_all_ranks(tmp_path: Path) -> None:
    job = read_job([loop(pattern, rank=rank).write(tmp_path / f"rank{rank}.json")
                    for rank, pattern in enumerate(("RURU" * 2, PPO * 2))])
    assert [(graph.meta.cycle, len(graph.steps)) for graph in job.graphs] == [(4, 2)] * 2


@pytest.mark.parametrize("before", ["", "UU"])
def test_a_cycle_is_one_step_and_all_of_its_work_is_in_it(tmp_path: Path, before: str) -> None:
    """First steps that are left over belong to none."""
    graph, left = read_job(write(tmp_path / "a.json", before + PPO * 2)).graphs[0], len(before)
    assert [graph.string(int(name)) for name in graph.steps.name] == [
        f"ProfilerStep#{left}-{left + 3}", f"ProfilerStep#{left + 4}-{left + 7}"]
    assert graph.steps.duration_ns.tolist() == [round(1e6 * CYCLE_MS)] * 2
    names = np.array(graph.strings)[graph.ops.name]
    assert [np.bincount(1 + graph.ops.step[names == name], minlength=3).tolist()
            for name in ("aten::mm", "aten::addmm")] == [[left, 4, 4], [0, 3, 3]]


def test_device_work_and_calls_go_with_their_steps(tmp_path: Path) -> None:
    trace = Micro()
    for number in range(4):
        at = 1000.0 + 200 * number
        trace.step(at, at + 190, number)
        for call in range(2 if number % 2 else 5):
            begin = at + 10 + 30 * call
            trace.op("aten::mm", begin, begin + 20, **{"Input Dims": [[8, 8]]})
            trace.launch(begin + 5, 5, (7, begin + 15, 12))
    found = read_job(trace.write(tmp_path / "a.json")).graphs[0]
    assert found.meta.cycle == 2
    assert np.bincount(found.kernels.step).tolist() == np.bincount(found.launches.step).tolist() == [7, 7]
    assert replay([found]).max_abs_error < 1e-3


@pytest.mark.parametrize("command", ["inspect", "replay", "breakdown", "predict", "opportunities"])
def test_every_command_takes_the_same_cycles(command: str, run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "a.json")
    said = plain(run(command, path).out)
    assert f"{CYCLE_MS:.3f} ms under the profiler (mean of 2 cycles of 4 steps)" in said
    assert "the loop alternates, its work repeats after 4 recorded steps" in said
    alone = plain(run(command, path, "--cycle", "1").out)
    assert "cycle" not in alone and "0.100 ms under the profiler (mean of 6 of 8 steps)" in alone
    if command == "inspect":
        assert f"{2 * UPDATE / 1000 + BETWEEN / 1000:.3f} ms" in plain(
            run(command, write(tmp_path / "b.json", "UUUU"), "--cycle", "2").out)


def test_a_cycle_closes_and_is_predicted_as_it_was_measured(run: Run, tmp_path: Path) -> None:
    graphs = read_job(write(tmp_path / "a.json")).graphs
    assert replay(graphs).max_abs_error == 0.0
    assert baseline_of(graphs).predict().step_time_us == pytest.approx(1000 * CYCLE_MS, rel=1e-6)
    said = plain(run("predict", tmp_path / "a.json").out)
    assert f"{CYCLE_MS:.3f} ms, 80% between" in said and "a cycle of 4 steps, 0.178 ms each in the mean" in said
    assert "It rests on 2 recorded cycles of 4 steps, ProfilerStep#0-3 to ProfilerStep#4-7" in said


def test_a_size_works_on_the_whole_cycle(tmp_path: Path) -> None:
    """Rows of 128 are in rollouts alone: no step of the median kind has them."""
    path = write(tmp_path / "a.json")
    wanted = Configuration(sizes=("rows=128:1280",))
    whole = Study(read_job(path))
    assert whole.predict(wanted).step_time_us > 1.3 * whole.predict(Configuration()).step_time_us
    with pytest.raises(EditError):
        Study(read_job(path, cycle=1)).predict(wanted)


@pytest.mark.parametrize(("timed_us", "cycles_us"), [([90, 80, 380, 90, 90, 80, 380, 90, 90, 80], [640, 640]),
                                                     ([90, 80], [])])
def test_timed_steps_are_summed_over_cycles(tmp_path: Path, timed_us: list[int], cycles_us: list[int]) -> None:
    """Wherever the timing began, a cycle has each of its steps once."""
    part = tmp_path / "a" / "rank0"
    part.mkdir(parents=True)
    (part / "kineto.json.gz").write_bytes(gzip.compress(write(tmp_path / "a.json").read_bytes()))
    (part / CONTEXT).write_text(json.dumps({
        "rank": 0, "world_size": 1, "complete": True, "hardware": {"device": "CPU"},
        "unprofiled_step_ns": [1000 * us for us in timed_us]}))
    job = read_job(tmp_path / "a")
    assert job.graphs[0].meta.unprofiled_step_ns == [1000 * us for us in cycles_us]
    if cycles_us:
        assert baseline_of(job.graphs).predict().step_time_us == pytest.approx(640, rel=1e-4)
    else:
        assert any("the 2 steps timed without the profiler are fewer than a cycle of 4" in note for note in job.notes)


def test_of_less_than_two_cycles_it_is_said_what_to_record(run: Run, tmp_path: Path) -> None:
    said = plain(run("predict", write(tmp_path / "a.json", PPO + "RU")).out)
    assert "2 of 6 recorded steps do other work than" in said
    assert "record two whole rounds of them or more (foretrace capture --steps N)" in said
    assert f"{CYCLE_MS:.3f} ms" in plain(run("predict", tmp_path / "a.json", "--cycle", "4").out)


def test_impossible_cycles_are_refused(run: Run, tmp_path: Path) -> None:
    path, cycles, steps = tmp_path / "a.json", tmp_path / "cycles.foretrace", tmp_path / "steps.foretrace"
    ended, _, error = run("predict", write(path, "UUU"), "--cycle", "4")
    assert ended == 2 and "has 3 steps, fewer than a cycle of 4: record 2 cycles or more" in plain(error)
    with pytest.raises(CycleError, match="cycle=0 is not possible"):
        read_job(path, cycle=0)
    assert run("convert", write(path), "-o", cycles, "--cycle", "4").code == 0
    assert read_job(cycles).graphs[0].meta.cycle == 4
    ended, _, error = run("replay", cycles, "--cycle", "1")
    assert ended == 2 and "was saved with steps that are cycles of 4, and cycles of 1 were asked for" in plain(error)
    # Where it is not asked for, a converted file keeps its steps, and shows its cycles.
    assert run("convert", path, "-o", steps).code == 0
    assert [len(read_job(steps, cycle=cycle).graphs[0].steps) for cycle in (1, None)] == [8, 2]


def test_cycles_are_not_compared_with_steps(run: Run, tmp_path: Path) -> None:
    one, other = write(tmp_path / "a.json"), write(tmp_path / "b.json", "U" * 8)
    ended, _, error = run("diff", one, other)
    assert ended == 2 and "A step of A is 4 of its recorded steps and one of B 1" in plain(error)
    assert run("diff", one, other, "--cycle", "4").code == 0
    ended, _, error = run("predict", one, "--set", "rows=64:128", "--also", f"{other}:rows=128")
    assert ended == 2 and "is 1 of its recorded steps and one of the source's is 4" in plain(error)


def test_a_check_compares_cycles_with_cycles(run: Run, tmp_path: Path) -> None:
    for folder, pattern in (("old", PPO * 2), ("new", "U" * 8)):
        (tmp_path / folder / "train").mkdir(parents=True)
        write(tmp_path / folder / "train" / "a.json", pattern)
    assert run("check", tmp_path / "old", "--update-baseline", "--reason", "first").code == 0
    stored = json.loads((tmp_path / "old" / "baseline.json").read_text())
    assert [entry["counts"]["operations"]["typical"] for entry in stored["captures"].values()] == [7]
    assert run("check", tmp_path / "old").code == 0
    ended, _, error = run("check", tmp_path / "old", "--against", tmp_path / "new")
    assert ended == 2 and "a step of the baseline's capture is a cycle of 4 recorded steps" in plain(error)


SCRIPT = """
import torch

def build(envs=4, whole=0):
    model, state = torch.nn.Linear(8, 8), {"steps": 0}
    optimizer = torch.optim.Adam(model.parameters())

    def update():
        if state["steps"] % 4 == 0:
            with torch.no_grad():
                state["seen"] = model(torch.randn(envs, 8)).relu()
        state["steps"] += 1
        optimizer.zero_grad()
        model(state["seen"]).sum().backward()
        optimizer.step()

    def cycle():
        for _ in range(4):
            update()

    return cycle if whole else update
"""


@pytest.mark.parametrize("whole", [0, 1])
def test_a_program_is_traced_for_a_whole_cycle(whole: int, tmp_path: Path) -> None:
    """Its function makes one of the cycle's steps, or all of them."""
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    recorded = read_job(write(tmp_path / "a.json")).graphs[0]
    found = trace_again(recorded, {"envs": 16, "whole": whole} if whole else {"envs": 16}, "cpu", f"{script}:build")
    names = np.array(found.strings)[found.ops.name][found.ops.step == 0].tolist()
    assert len(found.steps) == 1 and [names.count(name) for name in ("aten::relu", "aten::addmm")] == [1, 5]
