"""Recordings that are not understood are not answered: devices that cannot be read, captured graphs, merged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from micro import Micro
from report_support import ROOT
from said import Run, plain

from graph_predictor.recorded.counted_steps import CountedSteps
from tracer.errors import TraceError
from tracer.job import read_job
from tracer.kineto import read_kineto

CASES = ROOT.parent / "shared" / "data" / "cases"
ANSWERING = ("predict", "replay", "breakdown", "opportunities", "ranks", "overheads", "report", "comm report")


def case(name: str) -> Path:
    if not (CASES / name).is_dir():
        pytest.skip(f"{CASES / name} is absent")
    return CASES / name


def refused(run: Run, path: Path, why: str) -> None:
    for command in ANSWERING:
        more = ("-o", path.parent / "page.html") if command == "report" else ()
        ran = run(*command.split(), path, *more)
        assert (ran.code, ran.out) == (2, ""), command
        assert why in plain(ran.err) and "Traceback" not in ran.err
    assert not (path.parent / "page.html").exists()
    if "cannot be told apart" not in why:
        assert "Nothing is predicted from this recording." in plain(run("inspect", path).out)


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
    (None, 4001, True), ("mtia_workloadd", 7, False), ("npu_kernel", "Ascend Hardware", False), ("hpu_op", 0, True),
    ("mtia_ccp_events", 1, False)])
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


def test_a_few_readable_events_do_not_make_a_device_readable(tmp_path: Path, run: Run) -> None:
    path = of_another_device(tmp_path / "trace.json", "npu_kernel", 9, False)
    document = json.loads(path.read_text())
    trace = Micro()
    trace.copy(400, 5, (7, 420, 2), "HtoD (Pageable -> Device)", 64)
    document["traceEvents"] += trace.events
    path.write_text(json.dumps(document))
    refused(run, path, "its device's work cannot be read: 9 events are of a kind")


def test_a_few_unknown_events_beside_many_kernels_do_no_harm(tmp_path: Path, run: Run) -> None:
    trace = Micro().calibrate()
    trace.events.append({"ph": "X", "cat": "power", "name": "700 W", "pid": "nvml", "tid": 0, "ts": 20, "dur": 80})
    path = trace.write(tmp_path / "trace.json")
    assert run("predict", path).code == 0
    assert run("inspect", path, "--json").json["loss"]["unreadable_device_events"] == 1


def test_device_events_that_begin_and_end_apart_are_not_overlooked(tmp_path: Path, run: Run) -> None:
    trace = Micro().step(0, 1000).op("aten::mm", 20, 80)
    trace.events += [{"ph": phase, "name": "MatMul", "pid": "NPU 0", "tid": 2, "ts": at, "args": {}}
                     for phase, at in (("B", 40), ("E", 90))]
    refused(run, trace.write(tmp_path / "trace.json"), "its device's work cannot be read: 1 events are of a kind")


@pytest.mark.parametrize("category", ["privateuse1_runtime", "hpu_runtime", "glow_driver"])
def test_an_accelerators_calls_without_device_work_are_not_predicted_from(tmp_path: Path, run: Run,
                                                                          category: str) -> None:
    trace = Micro().step(0, 1000).op("aten::mm", 20, 80)
    trace.call("aclnnMatmul", 30, 10)
    trace.events[-1]["cat"] = category
    path = trace.write(tmp_path / "trace.json")
    refused(run, path, "1 calls of an accelerator's runtime have no device work")
    assert run("inspect", path, "--json").json["loss"]["unreadable_device_calls"] == 1


def test_calls_that_ask_for_a_gpu_do_no_harm(tmp_path: Path, run: Run) -> None:
    trace = Micro().step(0, 1000).op("aten::mm", 20, 80)
    trace.call("cudaGetDeviceCount", 30, 10)
    assert run("predict", trace.write(tmp_path / "trace.json")).code == 0


def test_one_rank_that_cannot_be_read_refuses_the_job(tmp_path: Path, run: Run) -> None:
    job = tmp_path / "job"
    job.mkdir()
    good = Micro(rank=0, world_size=2)
    for number in range(3):
        at = 1000.0 * number
        good.step(at, at + 1000, number).op("aten::mm", at + 20, at + 80)
        good.launch(at + 30, 5, (7, at + 60, 500))
    good.write(job / "rank0.json")
    of_another_device(job / "rank1.json", "npu_kernel", 9, False)
    other = json.loads((job / "rank1.json").read_text())
    other["distributedInfo"] = {"backend": "nccl", "rank": 1, "world_size": 2}
    (job / "rank1.json").write_text(json.dumps(other))
    refused(run, job, "rank1.json: its device's work cannot be read")


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


def test_a_capture_that_began_before_the_window_is_one(tmp_path: Path, run: Run) -> None:
    trace = capturing(1, 0)
    trace.events = [e for e in trace.events if e["ts"] >= 1000 and "BeginCapture" not in e["name"]]
    refused(run, trace.write(tmp_path / "trace.json"), "it is the recording of a CUDA graph's capture: 20 launches")


def test_a_step_that_captures_on_either_rank_does_not_count(tmp_path: Path, run: Run) -> None:
    job = tmp_path / "job"
    job.mkdir()
    for rank in range(2):
        trace = Micro(rank=rank, world_size=2)
        for number in (1, 2):
            at = 1000.0 * number
            trace.step(at, at + 1000, number)
            if number == rank + 1:
                trace.call("cudaStreamBeginCapture", at + 10, 5)
                for each in range(20):
                    trace.launch(at + 20 + 20 * each, 5)
                trace.call("cudaStreamEndCapture", at + 900, 5)
            trace.launch(at + 920, 5, (7, at + 930, 20), call="cudaGraphLaunch")
        trace.write(job / f"rank{rank}.json")
    refused(run, job, "it is the recording of a CUDA graph's capture: 40 launches")


def test_a_step_that_captures_does_not_count_where_the_others_lost_work(tmp_path: Path) -> None:
    trace = capturing(1, 2)
    for each in range(9):  # the last step's launches beyond the graph's are without device work
        trace.launch(3100 + 20 * each, 5)
    trace.events = [e for e in trace.events if not (e["cat"] == "kernel" and 2000 <= e["ts"] < 3000)]
    trace.events = [e for e in trace.events if e["ts"] >= 1000]
    counts = CountedSteps.of(read_job(trace.write(tmp_path / "trace.json")).graphs).counts
    assert not counts[0][0] and counts[0][1:].any()


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


def renumbered(path: Path, pids: dict[int, Any]) -> Path:
    """The same file, whose processes have other numbers."""
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        event["pid"] = pids.get(event["pid"], event["pid"])
    path.write_text(json.dumps(document))
    return path


def on_swapped_devices(path: Path, later_us: float = 0.0, *, external: bool = False) -> Path:
    """The same file, whose devices 0 and 1 are each other, and what the second process and its device did is later."""
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        device = event["args"].get("device")
        second = event["pid"] == 2000 or (event["cat"] == "kernel" and device == 1)
        event["ts"] += later_us if second else 0
        if event["cat"] == "kernel":
            event["pid"] = event["args"]["device"] = 1 - device
        if external and event["cat"] in ("cpu_op", "kernel"):
            event["args"]["External id"] = 2 if second else 1
    path.write_text(json.dumps(document))
    return path


def durations_us(path: Path) -> list[tuple[str, set[float]]]:
    """Each rank's process, and how long its kernels took."""
    return [(graph.threads[0].pid, {each / 1e3 for each in graph.kernels.duration_ns.tolist()})
            for graph in read_job(path).graphs]


@pytest.mark.parametrize("pids", [(9998, 10002), ("rank 2", "rank 10")])
def test_processes_are_ranks_in_their_numbers_order(tmp_path: Path, pids: tuple[Any, Any]) -> None:
    path = renumbered(merged(tmp_path / "trace.json"), {1000: pids[0], 2000: pids[1]})
    assert durations_us(path) == [(str(pids[0]), {100}), (str(pids[1]), {200})]


def test_devices_are_the_processes_that_may_have_launched_on_them(tmp_path: Path) -> None:
    path = on_swapped_devices(merged(tmp_path / "trace.json"), later_us=300)
    assert durations_us(path) == [("1000", {100}), ("2000", {200})]
    assert not any("paired in order" in note for note in read_job(path).graphs[0].meta.loss.notes)


def test_devices_are_the_processes_whose_operations_their_work_names(tmp_path: Path) -> None:
    path = on_swapped_devices(merged(tmp_path / "trace.json"), external=True)
    assert durations_us(path) == [("1000", {100}), ("2000", {200})]


def test_devices_that_nothing_tells_apart_are_paired_in_order_and_that_is_noted(tmp_path: Path, run: Run) -> None:
    path = merged(tmp_path / "trace.json")
    assert durations_us(path) == [("1000", {100}), ("2000", {200})]
    assert "they were paired in order" in plain(run("inspect", path).out)


def test_a_process_that_launches_nothing_is_no_rank(tmp_path: Path) -> None:
    trace = Micro().calibrate()
    trace.op("aten::empty", 100, 105), trace.call("cudaGetDevice", 101, 1)
    trace.events[-2]["pid"] = trace.events[-1]["pid"] = 77
    trace.events[-1]["args"]["correlation"] = 1  # a launch's number in the other process
    graphs = read_job(trace.write(tmp_path / "trace.json")).graphs
    assert len(graphs) == 1 and len(graphs[0].kernels) == 7


def test_a_process_of_marks_alone_is_no_rank(tmp_path: Path) -> None:
    trace = Micro().calibrate().op("aten::mm", 100, 120)
    trace.step(0, 600)
    trace.events[-1]["pid"] = 77
    assert len(read_job(trace.write(tmp_path / "trace.json")).graphs) == 1


def test_processes_without_a_gpu_are_ranks_by_their_steps(tmp_path: Path) -> None:
    events = []
    for process in range(2):
        trace = Micro()
        for number in range(3):
            trace.step(1000.0 * number, 1000.0 * number + 1000, number).op(
                "aten::mm", 1000.0 * number + 20, 1000.0 * number + 400 + 100 * process)
        events += [{**event, "pid": 1000 * (process + 1)} for event in trace.events]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    assert [len(graph.steps) for graph in read_job(path).graphs] == [3, 3]


def test_processes_on_one_device_are_told_apart_by_their_numbers(tmp_path: Path) -> None:
    job = read_job(merged(tmp_path / "trace.json", collide=False, one_device=True))
    assert [set(graph.kernels.duration_ns.tolist()) for graph in job.graphs] == [{100_000}, {200_000}]


def test_processes_that_cannot_be_told_apart_are_refused(tmp_path: Path, run: Run) -> None:
    path = merged(tmp_path / "trace.json", one_device=True)
    refused(run, path, "their device work cannot be told apart")


@pytest.mark.parametrize("external", [False, True])
def test_work_of_two_processes_on_one_device_is_not_all_given_to_one(tmp_path: Path, run: Run, external: bool) -> None:
    """The second process has numbers (or operations' ids) of its own, the first one has none."""
    path = merged(tmp_path / "trace.json", one_device=True)
    document = json.loads(path.read_text())
    ids = {1000: 0, 2000: 0}
    for event in document["traceEvents"]:
        if external and event["cat"] == "cpu_op":
            ids[event["pid"]] += 1
            event["args"]["External id"] = ids[event["pid"]] + (4 if event["pid"] == 2000 else 0)
        elif external and event["cat"] == "kernel":
            event["args"]["External id"] = 12
        elif not external and event["args"].get("correlation") == 11 and (event["pid"] == 2000 or event["dur"] == 200):
            event["args"]["correlation"] = 5000
    path.write_text(json.dumps(document))
    refused(run, path, "their device work cannot be told apart")


def test_the_cases_of_several_processes_and_devices(run: Run) -> None:
    two, one = (run("inspect", case(name), "--json").json for name in (
        "two_ranks_merged_in_one_file", "two_gpus_one_process"))
    assert (two["ranks"], two["kernels"], two["loss"]["launches_without_kernels"]) == (2, 18, 0)
    assert two["recorded"]["step_us"] == one["recorded"]["step_us"] == 1000
    assert (one["ranks"], one["kernels"]) == (1, 24)
