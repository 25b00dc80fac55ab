"""Steps that a user names by a region: which ones they are, what is refused, and what saved files keep of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kineto_support import call, event, kernel, op, write

from tracer.errors import JobError, StepRegionError
from tracer.graph import ExecutionGraph, StepSource
from tracer.job import read_job, save_job
from tracer.kineto import read_kineto
from tracer.store import load_graph, save_graph


def marked(names: list[str], *, period: float = 1000, length: float = 900, kernel_end: float = 700,
           category: str = "user_annotation", thread: int = 1) -> list[dict[str, Any]]:
    """A region a period, each with an operation that launches one kernel; times in µs from the region's start.

        thread   |---- region (length) ----|      |---- region ----|
                   |mm|
        device        |-- kernel --| kernel_end
    """
    events = []
    for number, name in enumerate(names):
        at, work = period * number + 10, 100 * thread + number
        events += [event(category, name, at, length, tid=thread), op("aten::mm", at + 10, 50, tid=thread),
                   call("cudaLaunchKernel", at + 20, 5, work, tid=thread),
                   kernel("gemm", at + 40, kernel_end - 40, work)]
    return events


def steps_of(graph: ExecutionGraph) -> list[tuple[str, float, float]]:
    """(name, start from the first step's, duration) of each step, µs."""
    first = int(graph.steps.start_ns[0])
    return [(graph.string(int(name)), (start - first) / 1e3, duration / 1e3) for name, start, duration in zip(
        graph.steps.name.tolist(), graph.steps.start_ns.tolist(), graph.steps.duration_ns.tolist(), strict=True)]


@pytest.mark.parametrize(("kernel_end", "last"), [(700, 900), (1300, 1300)], ids=["region", "device work"])
def test_a_step_runs_to_the_next_region_and_the_last_to_the_end_of_its_work(
        tmp_path: Path, kernel_end: float, last: float) -> None:
    events = marked(["train_step"] * 3, kernel_end=kernel_end, period=2000)
    graph = read_kineto(write(tmp_path, events), step_region="train_step")
    assert steps_of(graph) == [("train_step 0", 0, 2000), ("train_step 1", 2000, 2000), ("train_step 2", 4000, last)]
    assert graph.meta.step_source == StepSource.REGION and graph.meta.step_region == "train_step"
    assert graph.kernels.step.tolist() == [0, 1, 2] and graph.launches.step.tolist() == [0, 1, 2]


PROFILER = [event("user_annotation", f"ProfilerStep#{i}", 2000 * i, 2000) for i in range(2)]


@pytest.mark.parametrize(("events", "region", "found"), [
    # Before other evidence.
    ([*marked(["train_step"] * 4), *PROFILER], "train_step", [f"train_step {i}" for i in range(4)]),
    ([*marked(["train_step"] * 4), *PROFILER], "ProfilerStep#*", ["ProfilerStep#0", "ProfilerStep#1"]),
    (marked([f"iteration {i}" for i in range(3)]), "iteration *", [f"iteration {i}" for i in range(3)]),
    (marked([f"iteration {i}" for i in range(3)]), "iteration 1", ["iteration 1"]),
    # An asterisk of the name is taken as it is first.
    (marked(["step*", "step*", "stepping"]), "step*", ["step* 0", "step* 1"]),
    # Regions of 2021 are operations of that name.
    (marked(["train_step"] * 3, category="cpu_op"), "train_step", [f"train_step {i}" for i in range(3)]),
    # One within its like is no step, and none is on a helper thread.
    ([*marked(["train_step"] * 3), event("user_annotation", "train_step", 200, 100),
      *(op("aten::add", 300 + 1000 * i, 5) for i in range(3)),
      *marked(["train_step"] * 6, thread=2, period=500, length=100, kernel_end=90)], "train_step",
     [f"train_step {i}" for i in range(3)])])
def test_regions_that_a_name_or_a_pattern_takes(tmp_path: Path, events: Any, region: str, found: list[str]) -> None:
    assert [name for name, _, _ in steps_of(read_kineto(write(tmp_path, events), step_region=region))] == found


def test_the_last_step_does_not_wait_for_work_of_others(tmp_path: Path) -> None:
    events = [*marked(["train_step"] * 2), call("cudaLaunchKernel", 1950, 5, 9), kernel("checkpoint", 1960, 5000, 9)]
    assert steps_of(read_kineto(write(tmp_path, events), step_region="train_step"))[-1][2] == 900


EPOCH = [*marked(["train_step"] * 4), *(event("user_annotation", "validate", 920 + 1000 * i, 80) for i in (1, 3)),
         event("user_annotation", "setup", 0, 5)]


@pytest.mark.parametrize(("events", "wanted", "told"), [
    (EPOCH, "trainstep", "trace.json has no region named 'trainstep'. Similar names: 'train_step' (4 times, 3.600 ms "
     "in all). Regions that repeat: 'validate' (2 times"),
    (EPOCH, "Train_Step", "Similar names: 'train_step' (4 times"),
    (EPOCH, "epoch", "Regions that repeat: 'train_step' (4 times, 3.600 ms in all), 'validate' (2 times, 0.160 ms in "
     "all)"),
    (EPOCH, "forward_*", "Regions that repeat: 'train_step' (4 times"),
    (EPOCH, " ", "is empty"),
    (marked([f"iteration {i}" for i in range(3)]), "iterations", "Similar names: 'iteration *' (3 times"),
    ([op("aten::mm", 10 * i, 5) for i in range(3)], "train_step",
     "has no regions that repeat: mark each step with record_function")])
def test_a_region_that_is_not_there_is_refused_with_those_that_are(
        tmp_path: Path, events: Any, wanted: str, told: str) -> None:
    with pytest.raises(StepRegionError) as refused:
        read_job(write(tmp_path, events), step_region=wanted)
    assert told in str(refused.value) and "setup" not in str(refused.value)


def test_a_capture_leaves_out_what_its_own_steps_took_without_the_profiler() -> None:
    capture = Path(__file__).resolve().parents[2] / "traces" / "cpu-small"
    assert read_job(capture).graphs[0].meta.unprofiled_step_ns
    job = read_job(capture, step_region="Optimizer.step#*")
    assert len(job.graphs[0].steps) and not job.graphs[0].meta.unprofiled_step_ns
    assert any("steps measured without the profiler are not the regions 'Optimizer.step#*'" in n for n in job.notes)
    with pytest.raises(StepRegionError, match=r"'Optimizer\.step#AdamW\.step' \(5 times"):
        read_job(capture, step_region="train_step")


def test_a_trace_without_steps_names_the_regions_that_may_be_some(tmp_path: Path) -> None:
    notes = read_kineto(write(tmp_path, marked(["train_step"] * 2))).meta.loss.notes
    assert any("Regions that repeat: 'train_step' (2 times" in note and "--step-region" in note for note in notes)
    notes = read_kineto(write(tmp_path, marked(["nccl:all_reduce"] * 2))).meta.loss.notes
    assert not any("--step-region" in note for note in notes)


def _ranks(folder: Path, names: list[str]) -> list[Path]:
    return [write(folder, marked([name] * 3), f"rank{rank}.json",
                  distributedInfo={"backend": "nccl", "rank": rank, "world_size": len(names)})
            for rank, name in enumerate(names)]


def test_all_ranks_need_the_region(tmp_path: Path) -> None:
    _ranks(tmp_path, ["train_step", "train_step"])
    assert [len(graph.steps) for graph in read_job(tmp_path, step_region="train_step").graphs] == [3, 3]
    _ranks(tmp_path, ["train_step", "other"])
    with pytest.raises(StepRegionError, match=r"rank1\.json has no region named 'train_step'"):
        read_job(tmp_path, step_region="train_step")


def test_a_saved_file_keeps_its_region_and_refuses_another(tmp_path: Path) -> None:
    path = write(tmp_path, marked(["train_step"] * 3))
    named, plain = tmp_path / "named.foretrace", tmp_path / "plain.foretrace"
    save_graph(read_kineto(path, step_region="train_step"), named)
    save_job(read_job(path), plain)
    for again in (load_graph(named), load_graph(named, step_region="train_step"), read_job(named).graphs[0]):
        assert len(again.steps) == 3 and again.meta.step_region == "train_step"
    with pytest.raises(StepRegionError, match="are the regions 'train_step', not the regions 'other'"):
        read_job(named, step_region="other")
    with pytest.raises(StepRegionError, match="are those that the trace marks, not the regions 'train_step'"):
        read_job(plain, step_region="train_step")


def test_saved_ranks_of_different_regions_are_no_job(tmp_path: Path) -> None:
    paths = _ranks(tmp_path, ["train_step", "train_step"])
    folder = tmp_path / "saved"
    folder.mkdir()
    save_graph(read_kineto(paths[0], step_region="train_step"), folder / "rank0.foretrace")
    save_graph(read_kineto(paths[1]), folder / "rank1.foretrace")
    with pytest.raises(JobError, match=r"marked by 'train_step', those in .* by no region"):
        read_job(folder)
    with pytest.raises(StepRegionError, match=r"rank1\.foretrace"):
        read_job(folder, step_region="train_step")
