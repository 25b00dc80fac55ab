"""Predictions from hand-made traces whose answer is known on paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fitted_times import Fitted
from micro import Micro, read_ranks
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from foretrace.edits import (
    CudaGraphs,
    Device,
    Edit,
    FusedOptimizer,
    HostFrom,
    Precision,
    ScaleBandwidth,
    ScaleClock,
    ScaleHost,
    ScaleKernels,
    Sizes,
)
from graph_predictor.prediction.replay import replay
from graph_predictor.prediction.scenario import EditError
from graph_predictor.request.predict import predict
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device import device
from kernel_models.operation import calls_of, operation
from kernel_models.pricing import price
from step_views.reports.breakdown import breakdown
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph

SIZES: dict[str, Any] = {"Input Dims": [[4096, 1024], [1024, 1024], [1024]],
                         "Input type": ["float", "float", "float"]}


@pytest.fixture
def graph(tmp_path: Path) -> ExecutionGraph:
    return waiting_steps().read(tmp_path)


def waiting_steps(number: int = 3, host: float = 20, kernel: float = 100, *, shapes: bool = True) -> Micro:
    """Steps of 300 µs after a calibration: the host launches one product and waits for it.

        calls    |10 launch 15|  |25 synchronise ···············|
        kernel                 20 ─────── 120                    (latency 5)
        step     0                                   +5 lag     300
    """
    trace = Micro()
    trace.metadata["deviceProperties"] = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85 * 10**9,
                                           "numSms": 108}]
    trace.calibrate()
    for n in range(number):
        at = 1000 + 300 * n
        args = SIZES if shapes else {}
        trace.step(at, at + 300, n + 1).op("aten::linear", at + host - 12, at + host - 3, **args)
        trace.launch(at + host - 10, 5, (7, at + host, kernel))
        _synchronise(trace, at + host + 5, kernel)
    return trace


def _synchronise(trace: Micro, at: float, duration: float) -> None:
    trace.op("aten::item", at - 1, at + duration + 1)
    trace.call("cudaDeviceSynchronize", at, duration)


def queued_steps(number: int = 4, kernel: float = 50) -> Micro:
    """Steps of 20 µs on the host whose one kernel takes longer: the GPU falls behind from the first step on."""
    trace = Micro().calibrate()
    end = 0.0
    for n in range(number):
        at = 1000 + 20 * n
        trace.step(at, at + 20, n + 1)
        begin = max(at + 10, end + 1 if n else 0)
        trace.launch(at + 2, 3, (7, begin, kernel))
        end = begin + kernel
    return trace


def test_no_edit_is_the_replay(graph: ExecutionGraph) -> None:
    result = predict(graph, price_per_hour=3.6)
    replayed = [s.replayed_ns / 1e3 for s in replay(graph).steps if s.name in result.steps]
    assert result.steps == ("ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3")
    assert result.step_time_us == pytest.approx(np.mean(replayed), abs=1e-9) == 300
    assert result.sources == result.kernel_sources == {"measured": 1.0}
    assert sum(result.bounds_us.values()) == pytest.approx(result.step_time_us)
    assert result.gpu_active_us == 100
    assert result.interval_us[0] < result.step_time_us < result.interval_us[1]
    values = result.to_json()
    assert {"step_time_us", "interval_us", "gpu_active_us", "bound", "per_rank", "sources", "peak_memory_bytes",
            "warnings"} <= set(values)
    assert values["cost_per_step"] == pytest.approx(3.6 * 300e-6 / 3600)
    assert values["per_rank"][0]["step_time_us"] == 300


def test_the_pace_is_that_of_the_gpu_though_the_recorded_steps_were_short(tmp_path: Path) -> None:
    """The host, 20 a step, runs ahead for the whole window; a step takes the kernel and the gap after it."""
    result = predict(queued_steps().read(tmp_path))
    assert result.recorded_us == result.step_time_us == 51
    assert result.bound == "compute"
    assert not result.warnings


def test_steps_of_seconds(tmp_path: Path) -> None:
    """2³¹ ns are 2.1 s: a step of 3 s is counted right."""
    trace = Micro().calibrate()
    for n in range(2):
        trace.step(1000 + 3_000_000 * n, 1000 + 3_000_000 * (n + 1), n + 1)
        trace.launch(1100 + 3_000_000 * n, 5, (7, 1110 + 3_000_000 * n, 20))
    assert predict(trace.read(tmp_path)).step_time_us == 3_000_000


def test_twice_as_long_everywhere_is_twice_as_long(graph: ExecutionGraph, tmp_path: Path) -> None:
    """Every duration doubled by edits: kernels and host; what is left are latency (5) and lag of the wait (5)."""
    baseline = baseline_of(graph)
    twice = baseline.predict([ScaleKernels(2), ScaleHost(2)])
    assert twice.step_time_us - 10 == pytest.approx(2 * (300 - 10), abs=1e-6)
    assert baseline.predict([ScaleKernels(2)]).step_time_us == 400
    half = baseline.predict([ScaleKernels(0.5)])
    assert half.step_time_us == 250
    assert half.kernel_sources == {"anchored": 1.0}
    assert half.sources["anchored"] == pytest.approx(50 / 253)  # beside 203 µs of the host
    queued = baseline_of(queued_steps().read(tmp_path))
    assert queued.predict([ScaleKernels(2)]).step_time_us == 101


def test_what_is_left_of_kernels_without_time_is_measured(graph: ExecutionGraph, tmp_path: Path) -> None:
    """Without kernels the recorded host decides, which nothing changed; no device time has no sources."""
    result = predict(graph, [ScaleKernels(0)])
    assert (result.kernel_sources, result.families_us, result.gpu_active_us) == ({}, {}, 0)
    said = CliRunner().invoke(app, ["predict", str(tmp_path / "micro.json"), "--kernels", "0"]).output
    assert "of what is left; none of it was changed" in plain(said)
    assert predict(graph, [ScaleHost(0.5)]).sources["anchored"] > 0.1


def test_another_device_scales_the_measured_time_by_the_models_ratio(graph: ExecutionGraph, tmp_path: Path) -> None:
    target = device("h100-sxm")
    calls = calls_of(operation("aten::linear", [(4096, 1024), (1024, 1024), (1024,)]))
    ratio = price(calls, target).total_us / price(calls, device("a100-sxm-80g")).total_us
    result = predict(graph, [Device(target)])
    assert 0.1 < ratio < 0.9
    assert result.gpu_active_us == pytest.approx(100 * ratio, rel=1e-4)
    assert result.step_time_us == pytest.approx(300 - 100 + 100 * ratio, abs=0.01)
    assert (result.device, result.recorded_on) == ("h100-sxm", "a100-sxm-80g")
    assert result.interval_us[1] - result.interval_us[0] > 0.1 * result.gpu_active_us
    same = predict(graph, [Device("a100-sxm-80g")])
    assert same.step_time_us == 300
    assert same.kernel_sources == {"measured": 1.0}
    without_sizes = predict(waiting_steps(shapes=False).read(tmp_path), [Device("h100-sxm")])
    assert 20 < without_sizes.gpu_active_us < 90
    assert any("typical work" in note for note in without_sizes.notes)


def test_the_host_of_another_trace(graph: ExecutionGraph, tmp_path: Path) -> None:
    """The other host takes 60 instead of 20 until the kernel starts: 40 more before the launch, 40 less after."""
    slower = predict(graph, [HostFrom([waiting_steps(host=60).read(tmp_path)], "b")])
    assert predict(graph, [HostFrom([graph], "itself")]).step_time_us == pytest.approx(300, abs=0.01)
    assert slower.step_time_us == pytest.approx(300, abs=0.01)
    assert slower.gpu_active_us == 100
    assert any("100% of it by the same operation" in note for note in slower.notes)


def test_cuda_graphs_leave_the_kernel_and_larger_batches_scale_the_data(graph: ExecutionGraph) -> None:
    assert 100 < predict(graph, [CudaGraphs()]).step_time_us < 140
    result = predict(graph, [Sizes.parse(["batch=4096:8192"])])
    assert 160 < result.gpu_active_us < 215
    assert result.items_per_second == pytest.approx(8192 / result.step_time_us * 1e6)
    assert predict(graph, [Sizes.parse(["batch=4096:4096"])]).step_time_us == 300


EDITS: list[Edit] = [
    Device("h100-sxm"), ScaleClock(0.8), ScaleBandwidth(1.5), ScaleHost(0.7), ScaleKernels(1.2),
    Precision("tf32"), Sizes((("batch", 4096, 2048),))]


def test_edits_commute(graph: ExecutionGraph) -> None:
    baseline = baseline_of(graph)
    for pair in combinations(EDITS, 2):
        one, other = baseline.predict([*pair]), baseline.predict([*pair[::-1]])
        assert one.step_time_us == pytest.approx(other.step_time_us, rel=1e-12)
        assert one.interval_us == pytest.approx(other.interval_us, rel=1e-9)


IMPOSSIBLE = [
    ([Sizes((("batch", 77, 78),))], "No tensor of the step has 77"),
    ([Sizes((("width", 1024, 2048),))], "ambiguous"),
    ([Precision("int3")], "choose bf16"),
    ([Precision("fp32")], "No operation of the step changes"),
    ([FusedOptimizer()], "nothing to fuse"),
    ([ScaleHost(0.0)], "positive factor"),
    ([ScaleKernels(math.nan)], "a factor from zero"),
    ([ScaleClock(-1.0)], "positive factor"),
    ([Device("b2000")], "no device named|No known device"),
    ([Device("h100-sxm"), Device("b200")], "both change the device"),
]


@pytest.mark.parametrize(("edits", "why"), IMPOSSIBLE)
def test_an_edit_that_cannot_be_done_says_why_and_changes_nothing(graph: ExecutionGraph, edits: list[Edit],
                                                                  why: str) -> None:
    baseline = baseline_of(graph)
    before = baseline.built.program.copy()
    with pytest.raises(ForetraceError, match=why):
        baseline.predict(edits)
    assert np.array_equal(before.item_work, baseline.built.program.item_work)
    assert baseline.predict().step_time_us == 300


def test_no_price_and_no_room_are_refused(graph: ExecutionGraph) -> None:
    for price_per_hour in (math.nan, math.inf, -1.0):
        with pytest.raises(EditError, match="is none"):
            predict(graph, price_per_hour=price_per_hour)
    graph.meta.memory["peak"] = 60 * 10**9
    assert predict(graph).peak_memory_bytes == 60 * 10**9
    with pytest.raises(EditError, match="does not fit"):
        predict(graph, [Device("a100-sxm-40g")])


@pytest.mark.parametrize("recorded", [queued_steps, waiting_steps])
def test_an_unknown_gpu_is_asked_for_or_predicted_from_by_its_properties(
        recorded: Callable[[], Micro], tmp_path: Path) -> None:
    graph = recorded().read(tmp_path)
    if recorded is queued_steps:
        with pytest.raises(EditError, match="--from-device"):
            predict(graph, [Device("h100-sxm")])
    known = predict(graph, [Device("h100-sxm")], from_device=device("v100-sxm2-16g"))
    assert known.step_time_us < predict(graph).step_time_us
    graph.meta.device, graph.meta.sm_count, graph.meta.device_memory_bytes = "NVIDIA X1", 80, 17 * 10**9
    graph.meta.compute_capability = "7.0"
    unknown = predict(graph, [Device("h100-sxm")])
    assert any("NVIDIA X1 is an unknown GPU (80 SMs, 17 GB)" in note for note in unknown.notes)
    assert unknown.step_time_us == pytest.approx(known.step_time_us, rel=0.2)
    assert unknown.interval_us[1] - unknown.interval_us[0] > known.interval_us[1] - known.interval_us[0]


def test_a_mig_slice_is_said_to_be_one(tmp_path: Path) -> None:
    graph = queued_steps().read(tmp_path)
    graph.meta.device = "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    same = predict(graph)
    assert any("h100-sxm-mig-3g-40gb is a MIG slice of h100-sxm" in note for note in same.notes)
    assert predict(graph, [Device("h100-sxm")]).step_time_us < same.step_time_us
    graph.meta.device, graph.meta.device_memory_bytes, graph.meta.sm_count = "AMD Instinct MI300X", 24 * 10**9, 38
    assert any("mi300x-cpx is a compute partition of mi300x" in note for note in predict(graph).notes)


def test_steps_can_be_chosen(graph: ExecutionGraph) -> None:
    assert predict(graph, step=0).steps == ("ProfilerStep#0",)
    assert predict(graph, step=-1).steps == ("ProfilerStep#3",)
    with pytest.raises(ForetraceError, match=r"There is no step 4: the trace has ProfilerStep#0, .* from 0 to 3 "):
        predict(graph, step=4)
    for wanted in ("4", "-5", "ProfilerStep#4"):
        with pytest.raises(ForetraceError, match=f"There is no step '{wanted}': ") as predicted:
            predict(graph, step=wanted)
        with pytest.raises(ForetraceError) as shown:
            breakdown(replay(graph), step=wanted)
        assert str(shown.value) == str(predicted.value)


def test_nothing_to_predict_from(tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match="no graph"):
        predict([])
    trace = Micro()
    trace.launch(10, 5, (7, 20, 30))
    with pytest.raises(ForetraceError, match="no steps"):
        predict(trace.read(tmp_path))
    trace = Micro()
    for n in range(2):
        trace.step(1000 + 100 * n, 1100 + 100 * n, n).op("aten::mm", 1010 + 100 * n, 1090 + 100 * n)
    with pytest.raises(EditError, match="no kernel to scale"):
        predict(trace.read(tmp_path), [ScaleKernels(0.5)])


def test_fitted_durations_are_medians_and_means_of_the_steps(tmp_path: Path) -> None:
    """Two steps with kernels of 100 and 120: the median 110 in both; the host's time is theirs on average."""
    trace = waiting_steps(1)
    trace.step(1300, 1620, 2).op("aten::linear", 1308, 1317, **SIZES)
    trace.launch(1310, 5, (7, 1320, 120))
    _synchronise(trace, 1325, 120)
    result = predict(trace.read(tmp_path), [Fitted()], step=range(1, 3))
    assert result.step_time_us == pytest.approx(310, abs=0.01)
    assert result.gpu_active_us == 110
    assert result.kernel_sources == {"learned": 1.0}


def test_ranks_go_at_the_pace_of_the_slowest(tmp_path: Path) -> None:
    """Two ranks meet in a collective every step; alone the first would take 150 and the second 250."""
    traces = []
    for rank, host in enumerate((100, 200)):
        trace = Micro(rank=rank, world_size=2).calibrate()
        for n in range(3):
            at = 1000 + 250 * n
            trace.step(at, at + 250, n + 1)
            start = at + host + 10
            trace.launch(at + host, 5, (7, start, at + 240 - start), name="ncclKernel_AllReduce")
            trace.call("cudaDeviceSynchronize", at + host + 5, 235 - host)
        traces.append(trace)
    result = predict(read_ranks(traces, tmp_path))
    assert [r.rank for r in result.per_rank] == [0, 1]
    assert [r.step_time_us for r in result.per_rank] == pytest.approx([250, 250], abs=0.01)
    faster = predict(read_ranks(traces, tmp_path), [ScaleHost(0.5)])
    assert faster.step_time_us < 160


def test_a_call_that_feeds_a_copy_follows_the_link(tmp_path: Path) -> None:
    """Copies of 8 MB from pageable memory, fed by calls of 400 for 300 of them: on a link twice as fast 150 less each.

        calls      |=== copy call 400 ===|   |= sync =|
        stream 7         ##### copy 350 #####
    """
    trace = Micro().calibrate()
    for number in (1, 2, 3):
        at = 1000 * number
        trace.step(at, at + 1000, number)
        trace.copy(at + 10, 400, (7, at + 110, 350), "HtoD (Pageable -> Device)", 8_000_000)
        trace.call("cudaDeviceSynchronize", at + 420, 50)
    graph = trace.read(tmp_path)
    slow = device("v100-sxm2-32g")
    fast = replace(slow, name="twice the link", host_gbps=2 * slow.host_gbps)
    before = predict(graph, from_device=slow)
    after = predict(graph, [Device(fast)], from_device=slow)
    ratio = after.families_us["transfer"] / before.families_us["transfer"]
    assert 0.5 <= ratio < 0.6
    assert before.step_time_us == 1000
    assert after.step_time_us == pytest.approx(1000 - 300 * (1 - ratio), abs=1)
