"""Host overheads: segments worked out on paper, sums on real traces, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from micro import Micro
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from graph_predictor.prediction.overheads import measure_overheads, recorded_overheads
from kernel_models.host.overheads import HostOverheads, compare_hosts, fit_overheads, record
from kernel_models.host.segments import HostIntervals, Overhead, host_segments
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.job import Job, read_job

TRACES = Path(__file__).resolve().parents[2] / "traces"


def one_step(tmp_path: Path, scale: float = 1.0) -> ExecutionGraph:
    """One step whose pieces are known::

        step     0 ------------------------------------------------------- 200
        ops          10 [ aten::linear        60 ]   80 [ aten::view ] 90
        calls           20[launch]25 30[launch]38             100[query]102
        inside linear: a nested aten::addmm 15–50, which does not cut
    """
    trace = Micro().step(0, 200 * scale)
    trace.op("aten::linear", 10 * scale, 60 * scale)
    trace.op("aten::addmm", 15 * scale, 50 * scale)
    trace.launch(20 * scale, 5 * scale, (7, 30 * scale, 5 * scale))
    trace.launch(30 * scale, 8 * scale, (7, 45 * scale, 5 * scale))
    trace.op("aten::view", 80 * scale, 90 * scale)
    trace.call("cudaEventQuery", 100 * scale, 2 * scale)
    return trace.read(tmp_path)


def totals_us(graph: ExecutionGraph, excluded: HostIntervals | None = None) -> dict[Overhead, float]:
    segments = host_segments(graph, excluded)
    inside = segments.step >= 0
    return {kind: float(segments.duration_ns[inside & (segments.kind == kind)].sum()) / 1e3
            for kind in Overhead if (inside & (segments.kind == kind)).any()}


def test_the_pieces_of_a_step_less_what_is_excluded(tmp_path: Path) -> None:
    """T1 10 + 20 + 10 + 98 (to the step's end), T2 10, T4 5 + 8 + 2, T5 5 between and 10 whole, T3 22: 200 in all.
    Of what is excluded 65–75 lies in T1, 45–55 in T3; overlapping and empty intervals count once and not at all."""
    graph = one_step(tmp_path)
    pieces = {Overhead.BETWEEN_OPS: 138, Overhead.BEFORE_CALL: 10, Overhead.AFTER_CALL: 22, Overhead.CALL: 15,
              Overhead.BETWEEN_CALLS: 5, Overhead.NO_CALL: 10}
    assert totals_us(graph) == pieces
    excluded = HostIntervals(*np.array([
        [int(graph.steps.thread[0])] * 4, [65_000, 70_000, 45_000, 5_000], [72_000, 75_000, 55_000, 5_000]]))
    assert totals_us(graph, excluded) == {**pieces, Overhead.BETWEEN_OPS: 128, Overhead.AFTER_CALL: 12}
    covered = HostIntervals(*np.array([[1, 2], [10, 0], [20, 100]]))  # of two threads
    assert covered.within(np.array([1, 2, 3]), np.array([0, 50, 0]), np.array([15, 60, 99])).tolist() == [5, 10, 0]


def test_calls_and_events_are_counted_and_pooled_for_what_was_never_seen(tmp_path: Path) -> None:
    """The first segment of aten::linear (10–20) holds the begin of two operations; the call at 100 is under no op."""
    recorded = record(one_step(tmp_path))
    first = np.flatnonzero(recorded.segments.kind == Overhead.BEFORE_CALL)
    assert recorded.segments.events[first].sum() == 2
    assert recorded.op[recorded.detail == "cudaEventQuery"].tolist() == [""]
    assert recorded.without_profiler(4_000).segments.duration_ns[first].sum() == 10_000 - 2 * 4_000
    fitted = fit_overheads([recorded])
    assert fitted.estimate_ns(recorded).sum() == pytest.approx(recorded.segments.duration_ns.sum())
    unseen = fitted._estimate((Overhead.CALL, "aten::never_seen", "cudaLaunchKernel"))
    assert unseen == 6_500  # the mean of both launches
    assert fitted._estimate((Overhead.CALL, "aten::never_seen", "cudaOther")) == (6_500 + 2_000) / 2  # of both names


def test_overheads_survive_json_and_scale(tmp_path: Path) -> None:
    fitted = fit_overheads([record(one_step(tmp_path))], {"cpu": "paper"})
    again = HostOverheads.from_json(json.loads(json.dumps(fitted.to_json())))
    assert again == fitted
    slow = fit_overheads([record(one_step(tmp_path, 2.0))])
    for other in (again.scaled(2.0), slow):
        found = compare_hosts(fitted, other)
        assert {kind: ratio.ratio for kind, ratio in found.items()} == pytest.approx(dict.fromkeys(found, 2.0))
        assert None in found and Overhead.CALL in found
    with pytest.raises(ForetraceError, match="positive factor"):
        fitted.scaled(0.0)
    with pytest.raises(ForetraceError, match="damaged"):
        HostOverheads.from_json({"rows": [[1, 2]]})


def test_operations_have_each_kind_of_their_own(tmp_path: Path) -> None:
    """linear: T1 10 before it, T2 10, T4 5 and 8, T5 5, T3 22; view: T1 20 before it, T5 10 whole."""
    found = measure_overheads(Job([one_step(tmp_path)]))
    rows = {row.name: row for row in found.operations(20)}
    means = {kind: d.mean_ns for kind, d in rows["aten::linear"].kinds.items()}
    assert means == {Overhead.BETWEEN_OPS: 10_000, Overhead.BEFORE_CALL: 10_000, Overhead.CALL: 6_500,
                     Overhead.BETWEEN_CALLS: 5_000, Overhead.AFTER_CALL: 22_000}
    assert rows["aten::linear"].step_ns == 60_000 and rows["aten::view"].step_ns == 30_000
    assert rows["aten::view"].shared_ns != rows["aten::view"].step_ns
    assert [row.name for row in found.operations(1)] == ["aten::linear"]


def test_a_stall_is_what_comes_once(tmp_path: Path) -> None:
    """Of four steps one has a 3 ms pause before aten::view, the others 20 µs; each has a 2 ms one before aten::add."""
    trace = Micro()
    for number in range(4):
        at = number * 10_000
        pause = 3_000 if number == 2 else 20
        trace.step(at, at + 9_000, number)
        trace.op("aten::mul", at, at + 10)
        trace.op("aten::view", at + 10 + pause, at + 20 + pause)
        for piece in range(10):  # many short ones: the median is short, the long one recurs
            trace.op("aten::add", at + 4_000 + 20 * piece, at + 4_010 + 20 * piece)
        trace.op("aten::add", at + 6_200, at + 6_210)
    recorded = record(trace.read(tmp_path))
    stalls = recorded.stalls()
    assert recorded.segments.duration_ns[stalls].tolist() == [3_000_000]
    assert recorded.op[stalls].tolist() == ["aten::view"]


def test_waiting_is_no_overhead(tmp_path: Path) -> None:
    """cudaDeviceSynchronize at 60 returns at 405, 5 after the kernel: of its 345 only its own cost is overhead."""
    trace = Micro().calibrate().step(1_000, 1_500).op("aten::mm", 1_010, 1_030)
    trace.launch(1_015, 5, (7, 1_025, 375))
    trace.call("cudaDeviceSynchronize", 1_060, 345)
    recorded, event_ns = recorded_overheads(trace.read(tmp_path))
    assert event_ns is None
    assert 0 < recorded.segments.duration_ns[recorded.detail == "cudaDeviceSynchronize"].sum() <= 6_000


@pytest.mark.real_traces
@pytest.mark.parametrize(("name", "steps"), [("resnet50-V100", (1, 2, 3)), ("resnet50-ddp-2xA100", (0, 1, 2))])
def test_two_steps_give_the_third(name: str, steps: tuple[int, int, int],
                                  real_trace: Callable[[str], Path]) -> None:
    """The V100's first recorded step is its host's start-up; the next three are taken."""
    recorded, _ = recorded_overheads(read_job(real_trace(f"{name}/rank0.kineto.json.gz")).graphs[0])
    recorded = recorded.take(~recorded.stalls())
    third = recorded.steps(steps[2:])
    estimate = fit_overheads([recorded.steps(steps[:2])]).estimate_ns(third).sum()
    assert estimate == pytest.approx(third.segments.duration_ns.sum(), rel=0.03)


def test_the_command() -> None:
    def shown(*names: str) -> str:
        found = CliRunner().invoke(app, ["overheads", *(str(TRACES / name) for name in names)])
        assert found.exit_code == 0, found.output
        return plain(found.output)

    found = CliRunner().invoke(app, ["overheads", str(TRACES / "llama-cpu"), str(TRACES / "bert-cpu"), "--json"])
    result = json.loads(found.stdout)
    first = result["captures"][0]
    assert sum(kind["us_per_step"] for kind in first["kinds"].values()) == pytest.approx(first["host_us"])
    assert first["computation_us"] > 0 and first["launch_latency_us"] is None
    shares = sum(kind["share_of_step"] for kind in first["kinds"].values())
    assert shares == pytest.approx(first["host_us"] / first["step_us"])
    assert result["second_over_first"]["all"]["ratio"] > 0
    assert "in common, which is too few" in shown("cpu-small", "llama-cpu")
    assert "in common, which is too few" not in shown("host/llama/round0", "host/bert/round0")
    assert "T1 between operations" in shown("llama-cpu")


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    for arguments in ([str(tmp_path / "none.json")], ["a", "b", "c"]):
        refused = CliRunner().invoke(app, ["overheads", *arguments])
        assert refused.exit_code == 2
        assert "Traceback" not in refused.output
    with pytest.raises(ForetraceError, match="no host time"):
        measure_overheads(Job([Micro().op("aten::mm", 10, 30).read(tmp_path)], 1))
