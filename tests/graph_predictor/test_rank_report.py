"""The ranks of a job side by side: known stragglers, bubbles and exposed time, worked out on paper; bad input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from micro import Micro, read_ranks
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from graph_predictor.comm.report import communication_report
from graph_predictor.prediction.replay import replay
from graph_predictor.request.study import Configuration, Study
from step_views.reports.ranks.report import JobReport, rank_report, timed_graphs, waiting_ns
from step_views.reports.ranks.times import JobTimes, predicted_times, recorded_times
from tracer.errors import ForetraceError
from tracer.job import read_job

ROOT = Path(__file__).resolve().parents[2]
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def described(kind: str, ranks: str = "[0, 1]", size: int = 2) -> dict[str, Any]:
    return {"Collective name": kind, "Process Group Name": "group", "Process Group Ranks": ranks, "Group size": size,
            "In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "Float"}


def one_late(rank: int, work_us: int, ranks: int = 3, base: float = 0.0) -> Micro:
    """Computes for ``work_us`` from 1020 on, then meets the others, who all end at 1380.

        compute     ## 1020 + work ##
        all-reduce                  ~~~ to 1340 ~~~ 1340 == 1380      (the slowest computes for 319: 40 us of transfer)
    """
    trace = Micro(rank=rank, world_size=ranks, base=base).calibrate().step(1000, 1400)
    trace.launch(1010, 5, (7, 1020, work_us))
    begin = 1020 + work_us + 1
    trace.launch(1020, 5, (7, begin, 1380 - begin), name=ALL_REDUCE,
                 **described("allreduce", str(list(range(ranks))), ranks))
    trace.call("cudaDeviceSynchronize", 1030, 355)
    return trace


def pipeline() -> list[Micro]:
    """Two stages; the second has nothing to do until 1220, and computes for 100 us then.

        stage 0   compute 1020-1220, send 1221-1251
        stage 1   recv 1020 ~~~~~~~~ 1221 == 1251, compute 1252-1352
    """
    first = Micro(rank=0, world_size=2).calibrate().step(1000, 1400)
    first.launch(1010, 5, (7, 1020, 200))
    first.launch(1020, 5, (7, 1221, 30), name=SEND_RECV, **described("send"))
    first.call("cudaDeviceSynchronize", 1030, 226)
    second = Micro(rank=1, world_size=2).calibrate().step(1000, 1400)
    second.launch(1010, 5, (7, 1020, 231), name=SEND_RECV, **described("recv"))
    second.launch(1020, 5, (7, 1252, 100))
    second.call("cudaDeviceSynchronize", 1030, 327)
    return [first, second]


def report_of(traces: list[Micro], folder: Path, step: str | None = "ProfilerStep#1") -> JobReport:
    return closing(rank_report(recorded_times(replay(read_ranks(traces, folder)), step)))


def closing(report: JobReport) -> JobReport:
    """Every sum adds up to the nanosecond."""
    for row in report.ranks:
        assert row.busy_ns + row.exposed_ns + row.waiting_ns + row.bubble_ns + row.idle_ns == row.step_ns
        assert 0 <= row.overlapped_ns <= row.busy_ns
    lengths = [max(w.length_ns for w in step) for step in report.times.windows]
    assert sum(s.length_ns for s in report.path) in lengths
    assert all(sum(p.time_ns for p in s.parts) == s.length_ns for s in report.path)
    assert all(a.end_ns == b.start_ns for a, b in pairwise(report.path))
    return report


def test_a_known_straggler_waiting_and_what_it_costs(tmp_path: Path) -> None:
    found = report_of([one_late(0, 119), one_late(1, 319), one_late(2, 139)], tmp_path)
    zero, one, two = found.ranks
    assert [row.busy_ns for row in found.ranks] == [119_000, 319_000, 139_000]
    assert [row.waiting_ns for row in found.ranks] == [200_000, 0, 180_000]
    assert [row.exposed_ns for row in found.ranks] == [40_000] * 3
    assert (zero.arrivals.last, one.arrivals.last, two.arrivals.last) == (0, 1, 0)
    # The last but one came 180 us before; the two others waited 200 and 180.
    assert (one.arrivals.held_ns, one.arrivals.others_waited_ns) == (180_000, 380_000)
    # Like the median, rank 1 would compute for 139 us: the job gains 180 us.
    assert one.like_median_ns == found.step_ns - 180_000
    assert zero.like_median_ns is None and two.like_median_ns is None
    assert found.imbalance["busy"] == pytest.approx(319 / ((119 + 319 + 139) / 3))
    row, = found.groups
    assert (row.group, row.kind, row.straggler, row.transfer_ns) == ("group", "all_reduce", (1, 1.0), 40_000)
    assert waiting_ns(row, None) == pytest.approx((200 + 0 + 180) / 3)


def later(trace: Micro, begin: float, end: float) -> Micro:
    """The same with another step."""
    trace.events = [event for event in trace.events if event["name"] != "ProfilerStep#1"]
    return trace.step(begin, end)


def test_the_path_crosses_to_the_straggler_and_back(tmp_path: Path) -> None:
    found = report_of([one_late(0, 119), later(one_late(1, 319), 1000, 1390), one_late(2, 139)], tmp_path)
    assert [s.rank for s in found.path] == [1, 0] and found.path[1].after == "all_reduce (group)"
    before, after = found.path
    assert before.length_ns == 340_000 and max(before.parts, key=lambda p: p.time_ns).time_ns == 319_000
    assert {p.bound.label for p in after.parts} >= {"exposed communication"}
    assert not any(p.bound.label == "waiting for rank" for s in found.path for p in s.parts)


def test_waiting_for_the_stage_before_is_a_bubble(tmp_path: Path) -> None:
    found = report_of(pipeline(), tmp_path)
    assert [(row.bubble_ns, row.waiting_ns, row.exposed_ns, row.busy_ns) for row in found.ranks] == [
        (0, 0, 30_000, 200_000), (201_000, 0, 30_000, 100_000)]


def test_overlapped_communication_is_not_exposed(tmp_path: Path) -> None:
    traces = []
    for rank in range(2):
        trace = Micro(rank=rank, world_size=2).calibrate().step(1000, 1400)
        trace.launch(1010, 5, (20, 1020, 100), name=ALL_REDUCE, **described("allreduce"))
        trace.launch(1040, 5, (7, 1050, 200))
        trace.call("cudaDeviceSynchronize", 1060, 195)
        traces.append(trace)
    found = report_of(traces, tmp_path)
    for row in found.ranks:
        assert (row.exposed_ns, row.overlapped_ns, row.busy_ns) == (30_000, 70_000, 200_000)
        assert row.idle_ns == row.step_ns - 230_000
        assert row.arrivals.met == 1 and row.arrivals.last == 0


def test_ranks_that_begin_apart_are_told(tmp_path: Path) -> None:
    found = report_of([one_late(0, 119), later(one_late(1, 119), 1005, 1400)], tmp_path)
    assert found.ranks[1].late_ns == 5_000
    assert not any("apart" in note for note in found.notes)
    notes = report_of([one_late(0, 119, 2), one_late(1, 119, 2, 100.0)], tmp_path).notes
    assert any("begin their recorded steps up to 0.100 ms apart (rank 1 last)" in note for note in notes)


@pytest.mark.real_traces
@pytest.mark.parametrize("name", ["dlrm-8xV100-2023", "rank0-1-of-128", "resnet50-ddp-2xA100/rank0.kineto.json.gz"])
def test_real_jobs_close(name: str, real_trace: Any) -> None:
    times: JobTimes = recorded_times(replay(read_job(real_trace(name)).graphs))
    found = closing(rank_report(times))
    # All that communicates while nothing computes is in one of three parts, or in none where a step's edge cuts it.
    told = communication_report(timed_graphs(times)).exposed_ns
    for row in found.ranks:
        assert row.exposed_ns + row.waiting_ns + row.bubble_ns <= told[row.rank] * 1.001 + 1_000
    if name == "dlrm-8xV100-2023":
        assert found.step_ns == max(row.step_ns for row in found.ranks)
        assert max(found.ranks, key=lambda row: row.arrivals.last).rank == 7
        for row in found.ranks:
            assert row.exposed_ns + row.waiting_ns == pytest.approx(told[row.rank], rel=1e-3)
    if len(found.ranks) == 1:
        assert any("Only rank" in note and "give the traces of the other ranks" in note for note in found.notes)


def test_one_rank_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = Micro(rank=0, world_size=1).calibrate().write(tmp_path / "alone.json")
    with pytest.raises(ForetraceError, match=r"one rank only.*--parallel"):
        rank_report(recorded_times(replay(read_job(path).graphs)))
    outcome = CliRunner().invoke(app, ["ranks", str(path)])
    assert outcome.exit_code == 2 and "Traceback" not in outcome.output


def test_the_command_its_json_and_its_timeline(tmp_path: Path) -> None:
    for rank, work in enumerate((119, 319)):
        one_late(rank, work, 2).write(tmp_path / f"rank{rank}.json")
    out = tmp_path / "out" / "ranks.json"
    out.parent.mkdir()
    paths = [str(tmp_path / f"rank{rank}.json") for rank in range(2)]
    outcome = CliRunner().invoke(app, ["ranks", *paths, "--step", "ProfilerStep#1", "--timeline", str(out), "--json"])
    assert outcome.exit_code == 0, outcome.output
    values = json.loads(outcome.output)
    assert values["ranks"][1]["arrives_last"] == 1.0 and values["ranks"][0]["waiting_us"] == 200.0
    for row in values["ranks"]:
        parts = [row[f"{part}_us"] for part in ("busy", "exposed", "waiting", "bubble", "idle")]
        assert sum(parts) == pytest.approx(row["step_us"])
    events = json.loads(out.read_text())["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert {"path across ranks", "rank 0", "rank 1", "ranks 0, 1: all_reduce (group)"} <= set(processes)
    parts = [e for e in events if e.get("cat") == "part" and e["pid"] == processes["rank 0"]]
    assert sum(e["dur"] for e in parts) == pytest.approx(values["ranks"][0]["step_us"])
    waiting = [e for e in events if e.get("cat") == "group" and e["name"] == "waiting for rank 1"]
    assert [e["dur"] for e in waiting] == [200.0]
    shown = CliRunner().invoke(app, ["ranks", *paths])
    assert shown.exit_code == 0 and "Path across ranks" in plain(shown.output)


def test_a_predicted_straggler_holds_the_others(tmp_path: Path) -> None:
    for rank in range(2):
        one_late(rank, 119, 2).write(tmp_path / f"rank{rank}.json")
    outcome = CliRunner().invoke(app, ["ranks", str(tmp_path), "--straggler", "1:300%", "--step", "0"])
    assert outcome.exit_code == 2 and "--step" in outcome.output
    outcome = CliRunner().invoke(app, ["ranks", str(tmp_path), "--straggler", "1:300%", "--json"])
    assert outcome.exit_code == 0, outcome.output
    values = json.loads(outcome.output)
    zero, one = values["ranks"]
    assert one["arrives_last"] == 1.0 and zero["waiting_us"] > 0.0 and one["waiting_us"] == 0.0
    assert one["job_step_like_median_us"] < values["step_time_us"]
    assert sum(s["time_us"] for s in values["path_across_ranks"]["stretches"]) / values["steps"] == pytest.approx(
        values["step_time_us"])


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), pytest.param(3, 6, marks=pytest.mark.slow)])
def test_the_bubble_of_a_pipeline_is_that_of_the_textbook(stages: int, microbatches: int) -> None:
    """1F1B's share of idle time is (p - 1) / (m + p - 1) where stages are even and communication is nearly free
    (Narayanan et al., 2021): of a model whose blocks are nearly all of its work, with a host that is far ahead."""
    pytest.importorskip("torch")
    from tracer import workloads
    from tracer.shape_only import trace_job

    settings = workloads.configure("llama", depth=stages, width=4096, heads=32, kv_heads=32, hidden=16384, seq=4096,
                                   batch=microbatches, vocabulary=64, dtype="bf16", optimizer="sgd")
    job = trace_job(settings, "h200-sxm", world_size=stages, parallel=f"pp={stages},microbatches={microbatches}",
                    warmup=0)
    prepared = Study(job).prepared(Configuration(topology="dgx-h200", edits={"host": 0.001}))
    times = predicted_times(prepared.start.simulated(prepared.edits))
    assert times.step_ns == pytest.approx(1e3 * prepared.predict().step_time_us)
    found = closing(rank_report(times))
    # The stages share one pace, that of the slower one: its receives wait for the other one's sends.
    assert np.ptp([row.step_ns for row in found.ranks]) <= 1e-3 * found.step_ns
    textbook = (stages - 1) / (microbatches + stages - 1)
    for row in found.ranks:
        assert row.bubble_ns / row.step_ns == pytest.approx(textbook, abs=0.02)
        assert 1 - row.busy_ns / row.step_ns == pytest.approx(textbook, abs=0.03)


def noisy(rank: int, works: Sequence[float]) -> Micro:
    """Steps of 600 us in which a rank computes for so long, and then meets the other, who is there at 500 at last."""
    trace = Micro(rank=rank, world_size=2)
    for number, work in enumerate(works):
        at = 600 * number
        trace.step(at, at + 600, number + 1)
        trace.op("aten::mm", at + 8, at + 18)
        trace.launch(at + 10, 5, (7, at + 20, work))
        trace.op("aten::mul", at + 19, at + 25)
        trace.launch(at + 20, 4, (7, at + 21 + work, 20))
        trace.launch(at + 26, 4, (7, at + 42 + work, 558 - work - 42), name=ALL_REDUCE, **described("allreduce"))
        trace.call("cudaDeviceSynchronize", at + 31, 560 - 31)
    return trace


@pytest.mark.parametrize(("first", "second", "late"), [
    ((200, 260, 180, 300, 220), (240, 190, 290, 210, 270), None),  # both vary by more than they differ
    ((200, 202, 199, 201, 200), (300, 299, 301, 303, 300), 1),
    ((420, 310, 440, 330, 460), (200, 260, 180, 220, 240), 0),  # noisy, but far apart
    ((200, 200), (210, 210), None),  # two steps show little
    ((200, 200, 200, 200, 200), (200, 200, 450, 200, 200), None),  # one stalled step
])
def test_a_rank_is_late_if_it_is_by_more_than_steps_differ(
        first: Sequence[float], second: Sequence[float], late: int | None, tmp_path: Path) -> None:
    for rank, works in enumerate((first, second)):
        noisy(rank, works).write(tmp_path / f"rank{rank}.json")
    ran = CliRunner().invoke(app, ["ranks", str(tmp_path)])
    if late is None:
        assert "No rank computes longer than the median one by more than steps differ." in plain(ran.output)
        return
    more = np.median(np.subtract(*((second, first) if late else (first, second)))) / 1e3
    assert f"Rank {late} computes {more:.3f} ms longer than the median rank: aten::mm {more:.3f} ms a step." in (
        plain(ran.output))
