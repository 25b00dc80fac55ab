"""Recordings that are not understood, or whose steps are none: not answered, or answered by the good steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from micro import Micro
from report_support import ROOT
from said import Run, plain
from said_facts import facts_of_page

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


def refused(run: Run, path: Path, why: str, commands: tuple[str, ...] = ("predict",)) -> None:
    for command in commands:
        more = ("-o", path.parent / "page.html") if command == "report" else ()
        ran = run(*command.split(), path, *more)
        assert (ran.code, ran.out) == (2, ""), command
        assert why in plain(ran.err) and "Traceback" not in ran.err
    assert not (path.parent / "page.html").exists()
    if "cannot be told apart" not in why:
        assert "Nothing is predicted from this recording." in plain(run("inspect", path).out)


def of_another_device(folder: Path, category: str | None, pid: Any, flows: bool = False, **about: Any) -> Path:
    """Three steps of three operations each, whose device writes events of its own kind."""
    trace = Micro(**about)
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
    return trace.write(folder / f"rank{about.get('rank', 0)}.json")


def with_events(folder: Path, *events: dict[str, Any]) -> Path:
    """An operation in a step, and events of others."""
    trace = Micro().step(0, 1000).op("aten::mm", 20, 80)
    trace.events += [{"pid": 1, "tid": 1, "args": {}, **event} for event in events]
    return trace.write(folder / "trace.json")


def launches_alone(folder: Path) -> Path:
    trace = Micro().step(0, 1000).op("aten::mm", 10, 60)
    trace.launch(20, 5), trace.launch(70, 5)
    return trace.write(folder / "trace.json")


def with_a_copy(folder: Path) -> Path:
    """A few readable events do not make a device readable."""
    path = of_another_device(folder, "npu_kernel", 9)
    document = json.loads(path.read_text())
    trace = Micro()
    trace.copy(400, 5, (7, 420, 2), "HtoD (Pageable -> Device)", 64)
    document["traceEvents"] += trace.events
    path.write_text(json.dumps(document))
    return path


def one_rank_of_two(folder: Path) -> Path:
    good = Micro(rank=0, world_size=2)
    for number in range(3):
        at = 1000.0 * number
        good.step(at, at + 1000, number).op("aten::mm", at + 20, at + 80)
        good.launch(at + 30, 5, (7, at + 60, 500))
    (folder / "job").mkdir()
    good.write(folder / "job" / "rank0.json")
    return of_another_device(folder / "job", "npu_kernel", 9, rank=1, world_size=2).parent


def capture(trace: Micro, at: float, vendor: str = "cuda", thread: int = 1) -> None:
    """A graph of 20 launches is recorded in the step from here on."""
    trace.call(f"{vendor}StreamBeginCapture", at + 10, 5)
    for each in range(20):
        trace.launch(at + 20 + 20 * each, 5, thread=thread, call=f"{vendor}LaunchKernel")
    trace.call(f"{vendor}StreamEndCapture", at + 900, 5)


def capturing(steps: int, replayed: int, *, vendor: str = "cuda", thread: int = 1) -> Micro:
    """Steps that record a graph, then steps that launch one."""
    trace = Micro().calibrate()
    launch = f"{vendor}GraphLaunch"
    for number in range(1, steps + replayed + 1):
        at = 1000.0 * number
        trace.step(at, at + 1000, number)
        if number <= steps:
            capture(trace, at, vendor, thread)
            trace.launch(at + 920, 5, (7, at + 930, 20), call=launch)
        else:
            trace.launch(at + 20, 5, kernels=[(7, at + 30 + 41 * each, 40) for each in range(20)], call=launch)
    return trace


def a_capture(folder: Path, steps: int = 2, without: str = "none", **others: Any) -> Path:
    trace = capturing(steps, 0, **others)
    trace.events = [e for e in trace.events if e["ts"] >= 1000 and without not in e["name"]]
    return trace.write(folder / "trace.json")


def captures_on_either_rank(folder: Path) -> Path:
    (folder / "job").mkdir()
    for rank in range(2):
        trace = Micro(rank=rank, world_size=2)
        for number in (1, 2):
            at = 1000.0 * number
            trace.step(at, at + 1000, number)
            if number == rank + 1:
                capture(trace, at)
            trace.launch(at + 920, 5, (7, at + 930, 20), call="cudaGraphLaunch")
        trace.write(folder / "job" / f"rank{rank}.json")
    return folder / "job"


NINE = "its device's work cannot be read: 9 events are of a kind"
CAPTURED = "it is the recording of a CUDA graph's capture"
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no category": (lambda folder: of_another_device(folder, None, 4001, True), NINE),
    "mtia": (lambda folder: of_another_device(folder, "mtia_workloadd", 7), NINE),
    "npu": (lambda folder: of_another_device(folder, "npu_kernel", "Ascend Hardware"), NINE),
    "hpu with flows": (lambda folder: of_another_device(folder, "hpu_op", 0, True), NINE),
    "a few readable events": (with_a_copy, NINE),
    "launches without any device work": (launches_alone, "2 launches and no device work"),
    "events that begin and end apart": (lambda folder: with_events(folder, *(
        {"ph": phase, "name": "MatMul", "pid": "NPU 0", "tid": 2, "ts": at} for phase, at in (("B", 40), ("E", 90)))),
        "its device's work cannot be read: 1 events are of a kind"),
    **{category: (lambda folder, category=category: with_events(folder, {
        "ph": "X", "cat": category, "name": "aclnnMatmul", "ts": 30, "dur": 10}),
        "1 calls of an accelerator's runtime have no device work")
        for category in ("privateuse1_runtime", "glow_driver")},
    "one rank of two": (one_rank_of_two, "rank1.json: its device's work cannot be read"),
    "a capture": (a_capture, CAPTURED),
    "a capture of HIP's": (lambda folder: a_capture(folder, vendor="hip"), CAPTURED),
    "a capture on another thread": (lambda folder: a_capture(folder, thread=2), CAPTURED),
    "a capture that began before": (lambda folder: a_capture(folder, 1, "BeginCapture"), f"{CAPTURED}: 20 launches"),
    "captures on either rank": (captures_on_either_rank, f"{CAPTURED}: 40 launches"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_recording_does_not_show_is_not_predicted_from(tmp_path: Path, run: Run, name: str) -> None:
    make, why = REFUSED[name]
    refused(run, make(tmp_path), why, ANSWERING if name in ("npu", "a capture") else ("predict",))


def test_what_cannot_be_read_is_counted(tmp_path: Path, run: Run) -> None:
    path = of_another_device(tmp_path, "npu_kernel", 7)
    assert run("inspect", path, "--json").json["loss"]["unreadable_device_events"] == 9
    assert "what the device did is unknown" in plain(run("inspect", path).out)
    path = REFUSED["glow_driver"][0](tmp_path)
    assert run("inspect", path, "--json").json["loss"]["unreadable_device_calls"] == 1


def test_the_case_of_an_npu(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace_view.json"
    path.write_bytes((case("npu_trace_view") / "trace_view.json").read_bytes())
    refused(run, path, "its device's work cannot be read")


def test_what_is_unknown_of_the_host_or_beside_many_kernels_does_no_harm(tmp_path: Path, run: Run) -> None:
    trace = Micro().calibrate()
    trace.events.append({"ph": "X", "cat": "power", "name": "700 W", "pid": "nvml", "tid": 0, "ts": 20, "dur": 80})
    for number, (path, unreadable) in enumerate((
            (with_events(tmp_path, {"ph": "X", "cat": "mine", "name": "span", "tid": 9, "ts": 20, "dur": 80}), 0),
            (with_events(tmp_path, {"ph": "X", "cat": "cuda_runtime", "name": "cudaGetDeviceCount", "ts": 30,
                                    "dur": 10, "args": {"correlation": 1}}), 0),
            (trace.write(tmp_path / "power.json"), 1), (capturing(0, 3).write(tmp_path / "graphs.json"), 0))):
        assert run("predict", path).code == 0, number
        assert run("inspect", path, "--json").json["loss"]["unreadable_device_events"] == unreadable


def test_a_step_that_captures_does_not_count(tmp_path: Path, run: Run) -> None:
    path = capturing(1, 3).write(tmp_path / "trace.json")
    ran = run("predict", path, "--json")
    assert ran.code == 0 and ran.json["recorded"]["step_us"] == 1000
    left = {each["step"]: each["why"] for each in ran.json["recorded"]["left_out"]}
    assert "20 of its launches only recorded a CUDA graph" in left["ProfilerStep#1"]


def test_a_step_that_captures_does_not_count_where_the_others_lost_work(tmp_path: Path) -> None:
    trace = capturing(1, 2)
    for each in range(9):  # the last step's launches beyond the graph's are without device work
        trace.launch(3100 + 20 * each, 5)
    trace.events = [e for e in trace.events
                    if e["ts"] >= 1000 and not (e["cat"] == "kernel" and 2000 <= e["ts"] < 3000)]
    counts = CountedSteps.of(read_job(trace.write(tmp_path / "trace.json")).graphs).counts
    assert not counts[0][0] and counts[0][1:].any()


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


@pytest.mark.parametrize(("collide", "processes"), [(True, 2), (False, 3)])
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


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The same file, with every event changed in place."""
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        change(event)
    path.write_text(json.dumps(document))
    return path


def on_swapped_devices(path: Path, later_us: float = 0.0, *, external: bool = False) -> Path:
    """The same file, whose devices 0 and 1 are each other, and what the second process and its device did is later."""
    def change(event: dict[str, Any]) -> None:
        device = event["args"].get("device")
        second = event["pid"] == 2000 or (event["cat"] == "kernel" and device == 1)
        event["ts"] += later_us if second else 0
        if event["cat"] == "kernel":
            event["pid"] = event["args"]["device"] = 1 - device
        if external and event["cat"] in ("cpu_op", "kernel"):
            event["args"]["External id"] = 2 if second else 1

    return changed(path, change)


def durations_us(path: Path) -> list[tuple[str, set[float]]]:
    """Each rank's process, and how long its kernels took."""
    return [(graph.threads[0].pid, {each / 1e3 for each in graph.kernels.duration_ns.tolist()})
            for graph in read_job(path).graphs]


@pytest.mark.parametrize("pids", [(9998, 10002), ("rank 2", "rank 10")])
def test_processes_are_ranks_in_their_numbers_order(tmp_path: Path, pids: tuple[Any, Any]) -> None:
    numbers = dict(zip((1000, 2000), pids, strict=True))
    path = changed(merged(tmp_path / "trace.json"),
                   lambda event: event.update(pid=numbers.get(event["pid"], event["pid"])))
    assert durations_us(path) == [(str(pids[0]), {100}), (str(pids[1]), {200})]


def test_devices_are_the_processes_that_launched_on_them_or_whose_operations_they_name(tmp_path: Path,
                                                                                       run: Run) -> None:
    for options in ({"later_us": 300}, {"external": True}):
        path = on_swapped_devices(merged(tmp_path / "trace.json"), **options)
        assert durations_us(path) == [("1000", {100}), ("2000", {200})]
        assert not any("paired in order" in note for note in read_job(path).graphs[0].meta.loss.notes)
    path = merged(tmp_path / "trace.json")
    assert durations_us(path) == [("1000", {100}), ("2000", {200})]
    assert "they were paired in order" in plain(run("inspect", path).out)


def test_a_process_of_calls_or_marks_alone_is_no_rank(tmp_path: Path) -> None:
    trace = Micro().calibrate()
    trace.op("aten::empty", 100, 105), trace.call("cudaGetDevice", 101, 1)
    trace.events[-1]["args"]["correlation"] = 1  # a launch's number in the other process
    marked = Micro().calibrate().op("aten::mm", 100, 120).step(0, 600)
    for one, others in ((trace, 2), (marked, 1)):
        for event in one.events[-others:]:
            event["pid"] = 77
        graphs = read_job(one.write(tmp_path / "trace.json")).graphs
        assert len(graphs) == 1 and len(graphs[0].kernels) == 7


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


@pytest.mark.parametrize("own", ["nothing", "numbers", "ids"])
def test_work_of_two_processes_on_one_device_is_not_all_given_to_one(tmp_path: Path, run: Run, own: str) -> None:
    """The second process has numbers (or operations' ids) of its own, the first one has none."""
    ids = {1000: 0, 2000: 0}

    def change(event: dict[str, Any]) -> None:
        if own == "ids" and event["cat"] == "cpu_op":
            ids[event["pid"]] += 1
            event["args"]["External id"] = ids[event["pid"]] + (4 if event["pid"] == 2000 else 0)
        elif own == "ids" and event["cat"] == "kernel":
            event["args"]["External id"] = 12
        elif own == "numbers" and event["args"].get("correlation") == 11 and (
                event["pid"] == 2000 or event["dur"] == 200):
            event["args"]["correlation"] = 5000

    refused(run, changed(merged(tmp_path / "trace.json", one_device=True), change),
            "their device work cannot be told apart")


def test_the_cases_of_several_processes_and_devices(run: Run) -> None:
    two, one = (run("inspect", case(name), "--json").json for name in (
        "two_ranks_merged_in_one_file", "two_gpus_one_process"))
    assert (two["ranks"], two["kernels"], two["loss"]["launches_without_kernels"]) == (2, 18, 0)
    assert two["recorded"]["step_us"] == one["recorded"]["step_us"] == 1000
    assert (one["ranks"], one["kernels"]) == (1, 24)


def planted(folder: Path, lengths: list[float], *, rank: int | None = None, lost: int = -1,
            last: float | None = None) -> Path:
    """Steps of these lengths in ms, of 100 launches each; one that lost half its kernels; a last one without work."""
    trace, at = Micro(rank=rank, world_size=1 if rank is None else 2), 1000.0
    for number, ms in enumerate(lengths):
        length = 1000.0 * ms
        each = length / 110
        trace.step(at, at + length, number)
        for launch in range(100):
            begin = at + each * (launch + 1)
            trace.op("aten::mm", begin, begin + 0.8 * each)
            kept = number != lost or launch >= 50
            trace.launch(begin + 2, 5, (7, begin + 12, 0.5 * each) if kept else None)
        at += length
    if last is not None:
        trace.step(at, at + 1000 * last, len(lengths))
        trace.call("cudaDeviceSynchronize", at + 1, 6)
    return trace.write(folder / f"rank{rank or 0}.json")


def says(run: Run, path: Path, ms: float, because: str) -> None:
    """Every command leads with the same recorded step, and the reason is in the notes; the interval holds the step."""
    for command in ("inspect", "predict", "breakdown", "replay"):
        ended, text, error = run(command, path)
        assert ended == 0, error
        said = plain(text).replace("recorded step ", "Recorded step: ")
        assert f"Recorded step: {ms:,.3f} ms" in said, (command, text)
        assert because in said, (command, text)
    found = run("predict", path, "--json").json
    assert found["recorded"]["step_us"] == pytest.approx(1000 * ms, abs=0.5)
    low, high = found["interval_us"]
    assert 0.8 * 1000 * ms <= low <= 1000 * ms * 1.001 and 1000 * ms * 0.999 <= high <= 1.2 * 1000 * ms


@pytest.mark.parametrize(("lengths", "last"), [([67.8], 0.012), ([67.8, 67.8, 67.8], 300.0)])
def test_an_empty_last_step_does_not_move_the_answer(tmp_path: Path, run: Run, lengths: list[float],
                                                     last: float) -> None:
    says(run, planted(tmp_path, lengths, last=last), 67.8, f"ProfilerStep#{len(lengths)} holds almost no work")


def test_an_empty_last_step_of_two_ranks(tmp_path: Path, run: Run) -> None:
    for rank in range(2):
        planted(tmp_path, [20.0, 20.0], rank=rank, last=0.5 + rank)
    says(run, tmp_path, 20.0, "ProfilerStep#2 holds almost no work")
    assert "steps left out: almost no work 2" in plain(run("inspect", tmp_path).out)


@pytest.mark.usefixtures("quick_pages")
def test_pages_say_the_good_step(tmp_path: Path, run: Run) -> None:
    path, page = planted(tmp_path, [67.8], last=0.012), tmp_path / "page.html"
    for command, option in (("predict", "--html"), ("breakdown", "--html"), ("report", "-o")):
        assert run(command, path, option, page)[0] == 0
        assert facts_of_page(page).get("recorded step", "67.800") == "67.800"
        assert "ProfilerStep#1 holds almost no work" in page.read_text(encoding="utf-8")


def test_a_step_that_lost_its_work_does_not_count(tmp_path: Path, run: Run) -> None:
    """The other of two steps is the good one: they are not as long as each other."""
    path = planted(tmp_path, [20.0, 24.0], lost=1)
    says(run, path, 20.0, "lost the device work of 50 launches")
    inspected = plain(run("inspect", path).out)
    assert "ProfilerStep#1 is damaged and does not count" in inspected
    assert "steps that lost device work 1" in inspected


def test_repeats_unlike_each_other_are_not_predicted_from(tmp_path: Path, run: Run) -> None:
    trace, at = Micro(), 0.0
    for length in (344_000.0, 2_750.0, 145.0):
        for k in range(4):
            trace.op(f"aten::op{k}", at + k * length / 4, at + (k + 0.9) * length / 4)
        trace.launch(at + 1, 2, (7, at + 5, 20))
        at += length
    path = trace.write(tmp_path / "trace.json")
    ended, text, _ = run("inspect", path)
    assert ended == 0 and "repeat 3 times, 0.141 to 344.000 ms long" in plain(text)
    for command in ("predict", "breakdown", "replay"):
        ended, text, error = run(command, path)
        assert "from: period" not in text and "2.750" not in text
        assert ended == 0 or (ended == 2 and "steps" in error and "Traceback" not in error), (command, text, error)
    assert run("predict", path)[0] == 2
