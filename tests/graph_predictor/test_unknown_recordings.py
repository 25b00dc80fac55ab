"""Recordings that are not understood are not answered: devices that cannot be read, captured graphs, merged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from micro import Micro
from report_support import ROOT
from said import Run, plain

from tracer.errors import TraceError
from tracer.job import read_job
from tracer.kineto import read_kineto

CASES = ROOT.parent / "shared" / "data" / "cases"
ANSWERING = ("predict", "replay", "breakdown", "opportunities", "ranks", "report")


def case(name: str) -> Path:
    if not (CASES / name).is_dir():
        pytest.skip(f"{CASES / name} is absent")
    return CASES / name


def refused(run: Run, path: Path, why: str) -> None:
    for command in ANSWERING:
        more = ("-o", path.parent / "page.html") if command == "report" else ()
        ran = run(command, path, *more)
        assert (ran.code, ran.out) == (2, ""), command
        assert why in plain(ran.err) and "Traceback" not in ran.err
    assert not (path.parent / "page.html").exists()


# a device whose events cannot be read

def of_another_device(path: Path, category: str | None, pid: Any, flows: bool) -> Path:
    """Three steps of three operations each, whose device writes events of its own kind."""
    trace = Micro()
    for number in range(3):
        at = 1000.0 * number
        trace.step(at, at + 1000, number)
        for each in range(3):
            begin = at + 20 + 100 * each
            trace.op("aten::mm", begin, begin + 60)
            event = {"ph": "X", "name": "MatMulV2", "pid": pid, "tid": 2, "ts": begin + 50, "dur": 80, "args": {}}
            trace.events.append(event if category is None else {**event, "cat": category})
            if flows:
                for phase, where, moment in (("s", (1, 1), begin), ("f", (pid, 2), begin + 50)):
                    trace.events.append({"ph": phase, "cat": "async", "id": len(trace.events), "name": "async",
                                         "pid": where[0], "tid": where[1], "ts": moment})
    return trace.write(path)


@pytest.mark.parametrize(("category", "pid", "flows"), [
    (None, 4001, True), ("mtia_workloadd", 7, False), ("npu_kernel", "Ascend Hardware", False), ("hpu_op", 0, True)])
def test_a_device_that_cannot_be_read_is_not_predicted_from(tmp_path: Path, run: Run, category: str | None, pid: Any,
                                                            flows: bool) -> None:
    path = of_another_device(tmp_path / "trace.json", category, pid, flows)
    refused(run, path, "its device's work cannot be read: 9 events are of a kind")
    found = run("inspect", path, "--json").json
    assert found["loss"]["unreadable_device_events"] == 9
    assert "what the device did is unknown" in plain(run("inspect", path).out)


def test_unknown_events_of_the_host_do_no_harm(tmp_path: Path, run: Run) -> None:
    trace = Micro().step(0, 1000)
    trace.op("aten::mm", 10, 900)
    trace.events.append({"ph": "X", "cat": "mine", "name": "span", "pid": 1, "tid": 9, "ts": 20, "dur": 80})
    path = trace.write(tmp_path / "trace.json")
    assert run("predict", path).code == 0
    assert run("inspect", path, "--json").json["loss"]["unreadable_device_events"] == 0


def test_the_case_of_an_npu(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace_view.json"
    path.write_bytes((case("npu_trace_view") / "trace_view.json").read_bytes())
    refused(run, path, "its device's work cannot be read")


def test_launches_without_any_device_work_are_not_predicted_from(tmp_path: Path, run: Run) -> None:
    trace = Micro().step(0, 1000).op("aten::mm", 10, 60)
    trace.launch(20, 5), trace.launch(70, 5)
    refused(run, trace.write(tmp_path / "trace.json"), "2 launches and no device work")


# a CUDA graph's capture

def capturing(steps: int, replayed: int, *, vendor: str = "cuda", thread: int = 1) -> Micro:
    """Steps that record a graph of 20 launches each, then steps that launch one."""
    trace = Micro().calibrate()
    launch = f"{vendor}GraphLaunch"
    for number in range(1, steps + 1):
        at = 1000.0 * number
        trace.step(at, at + 1000, number)
        trace.call(f"{vendor}StreamBeginCapture", at + 10, 5)
        for each in range(20):
            trace.launch(at + 20 + 20 * each, 5, thread=thread, call=f"{vendor}LaunchKernel")
        trace.call(f"{vendor}StreamEndCapture", at + 900, 5)
        trace.launch(at + 920, 5, (7, at + 930, 20), call=launch)
    for number in range(steps + 1, steps + replayed + 1):
        at = 1000.0 * number
        trace.step(at, at + 1000, number)
        trace.launch(at + 20, 5, kernels=[(7, at + 30 + 41 * each, 40) for each in range(20)], call=launch)
    return trace


@pytest.mark.parametrize(("vendor", "thread"), [("cuda", 1), ("hip", 1), ("cuda", 2)])
def test_a_capture_is_refused(tmp_path: Path, run: Run, vendor: str, thread: int) -> None:
    trace = capturing(2, 0, vendor=vendor, thread=thread)
    trace.events = [e for e in trace.events if e["ts"] >= 1000]
    refused(run, trace.write(tmp_path / "trace.json"), "it is the recording of a CUDA graph's capture")


def test_a_step_that_captures_does_not_count(tmp_path: Path, run: Run) -> None:
    path = capturing(1, 3).write(tmp_path / "trace.json")
    ran = run("predict", path, "--json")
    assert ran.code == 0 and ran.json["recorded"]["step_us"] == 1000
    left = {each["step"]: each["why"] for each in ran.json["recorded"]["left_out"]}
    assert "20 of its launches only recorded a CUDA graph" in left["ProfilerStep#1"]


def test_steps_that_launch_a_graph_count(tmp_path: Path, run: Run) -> None:
    assert run("predict", capturing(0, 3).write(tmp_path / "trace.json")).code == 0


# several processes in one file

def merged(path: Path, *, collide: bool = True, one_device: bool = False, processes: int = 2) -> Path:
    """Steps of 1000 of several processes, each on its device; kernels of 100 more for each."""
    events = []
    for process in range(processes):
        trace = Micro()
        trace.correlation = 0 if collide else 1000 * process
        for number in range(3):
            at = 1000.0 * number
            trace.step(at, at + 1000, number)
            for each in range(3):
                trace.op("aten::mm", at + 20 + 60 * each, at + 60 + 60 * each)
                trace.launch(at + 30 + 60 * each, 5, (7, at + 60 + 250 * each, 100 * (process + 1)), name="sgemm",
                             device=0 if one_device else process)
            trace.call("cudaDeviceSynchronize", at + 300, 600)
        for event in trace.events:
            if event["cat"] != "kernel":
                event["pid"] = 1000 * (process + 1)
        events += trace.events
    events.sort(key=lambda event: event["ts"])
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


@pytest.mark.parametrize("collide", [True, False])
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_of_one_file_are_ranks(tmp_path: Path, run: Run, collide: bool, processes: int) -> None:
    path = merged(tmp_path / "trace.json", collide=collide, processes=processes)
    job = read_job(path)
    assert [graph.meta.rank for graph in job.graphs] == list(range(processes)) and job.world_size == processes
    for rank, graph in enumerate(job.graphs):
        assert len(graph.kernels) == 9 and (graph.kernels.launch >= 0).all()
        assert set(graph.kernels.duration_ns.tolist()) == {100_000 * (rank + 1)}
        assert graph.meta.loss.orphan_kernels == graph.meta.loss.launches_without_kernels == 0
        assert graph.meta.loss.other_process_events > 0
    found = run("predict", path, "--json").json
    assert found["recorded"]["step_us"] == 1000 and len(found["per_rank"]) == processes
    with pytest.raises(TraceError, match="each a rank of a job"):
        read_kineto(path)


def test_processes_on_one_device_are_told_apart_by_their_numbers(tmp_path: Path) -> None:
    job = read_job(merged(tmp_path / "trace.json", collide=False, one_device=True))
    assert [set(graph.kernels.duration_ns.tolist()) for graph in job.graphs] == [{100_000}, {200_000}]


def test_processes_that_cannot_be_told_apart_are_refused(tmp_path: Path, run: Run) -> None:
    path = merged(tmp_path / "trace.json", one_device=True)
    refused(run, path, "their device work cannot be told apart")


def test_the_cases_of_several_processes_and_devices(run: Run) -> None:
    two, one = (run("inspect", case(name), "--json").json for name in (
        "two_ranks_merged_in_one_file", "two_gpus_one_process"))
    assert (two["ranks"], two["kernels"], two["loss"]["launches_without_kernels"]) == (2, 18, 0)
    assert two["recorded"]["step_us"] == one["recorded"]["step_us"] == 1000
    assert (one["ranks"], one["kernels"]) == (1, 24)
