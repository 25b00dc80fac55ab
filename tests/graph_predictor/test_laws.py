"""Sizes and times that follow laws through several captures, from hand-made traces whose answer is known on paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from micro import Micro
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from foretrace.edits import Edit, HostFrom, ScaleHost, SizeLaws
from graph_predictor.prediction.anchoring import OF_HOST, OF_KERNELS, Trend
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.scenario import EditError
from graph_predictor.sizes.named_sizes import captured_sizes, parse_also, parse_sets
from graph_predictor.sizes.number_laws import NoLawError, NumberLaws
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.operation import Operation
from tracer.graph import ExecutionGraph, OpKind

A100 = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85 * 10**9, "numSms": 108}
WIDTH = 1024


def on_gpu(folder: Path, batch: int, kernel_us: float, *, op: str = "aten::addmm", rows: int | None = None) -> Baseline:
    """Steps of 30 µs on the host and one product of ``batch`` × 16 rows that takes ``kernel_us``; the GPU decides."""
    trace = Micro()
    trace.metadata["deviceProperties"] = [A100]
    trace.calibrate()
    end = 0.0
    for n in range(4):
        at = 1000 + (kernel_us + 1) * n
        shapes = [[WIDTH], [rows or 16 * batch, WIDTH], [WIDTH, WIDTH]]
        trace.step(at, at + 30, n + 1)
        trace.op(op, at + 2, at + 20, **{"Input Dims": shapes, "Input type": ["float"] * 3})
        begin = max(at + 20, end + 1 if n else 0)
        trace.launch(at + 5, 10, (7, begin, kernel_us))
        end = begin + kernel_us
    return baseline_of(trace.read(folder))


def on_cpu(folder: Path, batch: int, product_us: float, unprofiled_us: float | None = None, *,
           profiled: bool = False) -> Baseline:
    """Steps on a CPU: a product that takes ``product_us``, and 100 µs of Python after it; one event a step."""
    trace = Micro()
    for n in range(4):
        at = 1000 + 2 * (product_us + 100) * n
        trace.step(at, at + product_us + 100, n)
        trace.op("aten::mm", at, at + product_us, **{
            "Input Dims": [[16 * batch, WIDTH], [WIDTH, WIDTH]], "Input type": ["float"] * 2})
    graph = trace.read(folder)
    if unprofiled_us is not None:
        graph.meta.unprofiled_step_ns = [int(1000 * unprofiled_us)] * 5
    return baseline_of(graph, profiled=profiled)


# the laws of numbers

SIZES = [{"batch": 4, "seq": 64}, {"batch": 8, "seq": 192}]
NEW = {"batch": 2, "seq": 96}


@pytest.mark.parametrize(("values", "expected"), [
    ((7, 7), 7),  # constant
    ((48, 96), 24),  # 12·batch
    ((64, 192), 96),  # seq
    ((256, 1536), 192),  # batch·seq
    ((64 * 64, 192 * 192), 96 * 96),  # seq²
    ((4 * 64 * 64, 8 * 192 * 192), 2 * 96 * 96),  # attention's scores
    ((65, 193), 97),  # a token before the others
    ((63, 191), 95),  # shifted targets
])
def test_the_laws_that_tensors_have(values: tuple[int, int], expected: int) -> None:
    assert NumberLaws(SIZES, NEW).value(values) == expected


@pytest.mark.parametrize(("values", "why"), [
    ((100, 137), "follow no law"),
    ((0, 5), "fit several laws"),
    ((1, 2), "would become 0.5, which is no size"),  # batch/4
])
def test_numbers_without_a_law_are_refused(values: tuple[int, int], why: str) -> None:
    with pytest.raises(NoLawError, match=why):
        NumberLaws(SIZES, NEW).value(values)


def test_what_fits_two_laws_is_refused_until_a_capture_decides() -> None:
    both = [{"batch": 4, "seq": 64}, {"batch": 8, "seq": 128}]
    with pytest.raises(NoLawError, match=r"fit several laws.*one more capture"):
        NumberLaws(both, NEW).value((512, 1024))
    assert NumberLaws([*both, {"batch": 8, "seq": 64}], NEW).value((512, 1024, 1024)) == 256  # 128·batch
    assert NumberLaws([*both, {"batch": 8, "seq": 64}], NEW).value((512, 1024, 512)) == 768  # 8·seq


@given(factor=st.integers(1, 50), powers=st.sampled_from([(1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 0), (2, 1)]),
       new=st.tuples(st.integers(1, 40), st.integers(1, 300)))
def test_three_captures_find_any_product(factor: int, powers: tuple[int, int], new: tuple[int, int]) -> None:
    def law(batch: int, seq: int) -> int:
        return factor * batch ** powers[0] * seq ** powers[1]

    captured = [(3, 50), (7, 50), (3, 110)]
    found = NumberLaws([{"batch": b, "seq": s} for b, s in captured], {"batch": new[0], "seq": new[1]})
    assert found.value(tuple(law(*one) for one in captured)) == law(*new)


def test_means_divide_by_what_they_count() -> None:
    laws = NumberLaws(SIZES, NEW)
    assert laws.real((1 / 256, 1 / 1536)) == pytest.approx(1 / 192)
    assert laws.real((0.1, 0.1)) == 0.1
    assert laws.real((0.1, 0.77)) == 0.1  # no law: a constant of the program


# the laws of times

def _trend(times: list[float], work: list[float], slope: float = 1.0, noise: float = 1e-4) -> Trend:
    return Trend(np.log([times]), np.full((1, len(times)), noise), np.log([work]), np.array([slope]), OF_KERNELS)


def test_between_and_at_captures_times_are_those_captured() -> None:
    trend = _trend([10.0, 30.0], [1.0, 4.0])
    found = [float(np.exp(trend.at(np.log([work])))[0]) for work in (1.0, 2.0, 4.0)]
    assert found == pytest.approx([10.0, np.sqrt(300.0), 30.0], rel=1e-3)


@pytest.mark.parametrize(("slope", "expected"), [(1.0, 30.0), (0.0, 10.0)])
def test_through_one_capture_the_trend_is_the_models_ratio(slope: float, expected: float) -> None:
    """10 µs of twice a unit of work, at six: what computes grows with it, what does not stays."""
    assert float(np.exp(_trend([10.0], [2.0], slope).at(np.log([6.0])))[0]) == pytest.approx(expected)


def test_times_of_a_shared_host_move_the_slope_less_than_a_gpus() -> None:
    """Two captures, twice the work apart, of which one was disturbed by a sixth; truth grows as the work does."""
    work, times = np.log([[1.0, 2.0]]), np.log([[10.0, 2.0 * 10.0 * 0.85]])
    found = [float(Trend(times, np.full((1, 2), doubt.noise_floor), work, np.ones(1), doubt).at(np.log([4.0]))[0])
             for doubt in (OF_HOST, OF_KERNELS)]
    assert abs(found[0] - np.log(40.0)) < 0.7 * abs(found[1] - np.log(40.0))


def test_beyond_them_a_fixed_cost_stays_fixed() -> None:
    """10 µs and 3 µs for each unit of work: 13 at 1, 22 at 4, and so 46 at 12 and 11.5 at 0.5."""
    trend = _trend([13.0, 22.0], [1.0, 4.0])
    for work, expected in ((12.0, 46.0), (0.5, 11.5)):
        assert float(np.exp(trend.at(np.log([work])))[0]) == pytest.approx(expected, rel=0.01)


def test_past_a_caches_edge_time_grows_as_the_work() -> None:
    trend = _trend([10.0, 80.0], [1.0, 4.0])
    assert float(np.exp(trend.at(np.log([8.0])))[0]) == pytest.approx(160.0, rel=0.01)


def test_noisy_times_say_little_against_what_is_expected() -> None:
    trend = _trend([10.0, 80.0], [1.0, 4.0], noise=3.0)
    middle = float(np.exp(trend.at(np.log([2.0])))[0])
    end = float(np.exp(trend.at(np.log([4.0])))[0])
    assert end / middle == pytest.approx(2.0, rel=0.02)


# both in a step

def test_kernels_follow_the_captures(tmp_path: Path) -> None:
    """10 µs and 0.02 µs for each of a batch: at 2,048 and 4,096, so 174 µs at 8,192, and 92 in the capture itself."""
    first, second = on_gpu(tmp_path, 2048, 51), on_gpu(tmp_path, 4096, 92)
    captured = [{"batch": 2048}, {"batch": 4096}]
    result = first.predict([SizeLaws([first, second], captured, {"batch": 8192})])
    assert result.gpu_active_us == pytest.approx(174, rel=0.04)
    assert result.items_per_second == pytest.approx(8192 / result.step_time_us * 1e6)
    assert result.interval_us[0] < 174 < result.interval_us[1]
    assert list(result.kernel_sources) == ["anchored"]
    there = first.predict([SizeLaws([first, second], captured, {"batch": 4096})])
    assert there.gpu_active_us == pytest.approx(92, rel=0.02)
    same = first.predict([SizeLaws([first, second], captured, {"batch": 2048})])
    assert same.step_time_us == first.predict().step_time_us


def test_shapes_at_a_new_size_are_those_of_a_capture_there(tmp_path: Path) -> None:
    first, second, third = (on_gpu(tmp_path, batch, 50) for batch in (32, 64, 48))
    found = SizeLaws([first, second], [{"batch": 32}, {"batch": 64}], {"batch": 48}).operations()
    graph = third.built.graphs[0]
    last = np.flatnonzero((graph.ops.step == graph.ops.step.max()) & (graph.ops.kind == OpKind.OPERATION))
    assert found == [Operation.from_graph(graph, int(row)) for row in last]


def test_a_cpus_steps_follow_the_captures(tmp_path: Path) -> None:
    """100 µs of Python at any size, 1 µs of product for each of a batch."""
    first, second = on_cpu(tmp_path, 100, 100), on_cpu(tmp_path, 400, 400)
    captured = [{"batch": 100}, {"batch": 400}]
    for batch, expected in ((200, 300), (800, 900), (50, 150)):
        result = first.predict([SizeLaws([first, second], captured, {"batch": batch})])
        assert result.step_time_us == pytest.approx(expected, rel=0.08)


def test_three_captures_say_more_than_two(tmp_path: Path) -> None:
    """A product that is slow below a batch of 200 and quick above: two captures do not see the edge."""
    few = [on_cpu(tmp_path, batch, time) for batch, time in ((100, 300), (400, 420))]
    sizes = [{"batch": 100}, {"batch": 400}]
    more = [*few, on_cpu(tmp_path, 200, 310)]
    nearer = more[0].predict([SizeLaws(more, [*sizes, {"batch": 200}], {"batch": 210})]).step_time_us
    farther = few[0].predict([SizeLaws(few, sizes, {"batch": 210})]).step_time_us
    assert abs(nearer - 412) < abs(farther - 412)


def test_far_outside_is_told_and_less_sure(tmp_path: Path) -> None:
    first, second = on_gpu(tmp_path, 2048, 51), on_gpu(tmp_path, 4096, 92)
    captured = [{"batch": 2048}, {"batch": 4096}]
    near, far = (first.predict([SizeLaws([first, second], captured, {"batch": batch})]) for batch in (3072, 65536))
    assert not [text for text in near.warnings if "outside" in text]
    assert any("batch=65536 is 16 times outside what was captured (2048 to 4096)" in text for text in far.warnings)
    widths = [one.interval_us[1] / one.interval_us[0] for one in (near, far)]
    assert widths[1] > 1.5 * widths[0]


def _laws(folder: Path, sizes: list[dict[str, int]], new: dict[str, int], **second: Any) -> tuple[Baseline, Edit]:
    captures = [on_gpu(folder, 32, 50), on_gpu(folder, 64, 80, **second)]
    return captures[0], SizeLaws(captures[:len(sizes)], sizes, new)


@pytest.mark.parametrize(("make", "why"), [
    (lambda d: _laws(d, [{"batch": 32}], {"batch": 64}), "two captures or more"),
    (lambda d: _laws(d, [{"batch": 32}, {}], {"batch": 128}), "does not say its batch"),
    (lambda d: _laws(d, [{"batch": 32}, {"batch": 32}], {"batch": 128}), "32 in every capture"),
    (lambda d: _laws(d, [{"batch": 32, "seq": 8}, {"batch": 64, "seq": 8}], {"seq": 16}), "seq is 8 in every capture"),
    (lambda d: _laws(d, [{"batch": 32}, {"batch": 64}], {"batch": 0}), "batch=0 is no size"),
    (lambda d: _laws(d, [{"batch": 32}, {"batch": 64}], {"batch": 99999999999999}), "is no size"),
    (lambda d: _laws(d, [{"batch": 32}, {"batch": 64}], {}), "name the size to predict"),
    (lambda d: _laws(d, [{"batch": 32}, {"batch": 64}], {"batch": 96}, op="aten::bmm"),
     r"aten::addmm of the one at batch=32 has no partner.*nor has aten::bmm of the one at batch=64.*libraries"),
    (lambda d: _laws(d, [{"batch": 32}, {"batch": 64}], {"batch": 96}, rows=777), "follow no law in batch"),
])
def test_laws_that_cannot_be_found_say_why(tmp_path: Path, make: Callable[[Path], tuple[Baseline, Edit]],
                                           why: str) -> None:
    with pytest.raises(EditError, match=why):
        baseline, edit = make(tmp_path)
        baseline.predict([edit])


def test_a_peak_that_is_known_follows_the_sizes(tmp_path: Path) -> None:
    first, edit = _laws(tmp_path, [{"batch": 32}, {"batch": 64}], {"batch": 128})
    assert first.predict([edit]).peak_memory_bytes is None
    first.built.graphs[0].meta.memory.update(peak=100, activations=30)
    assert first.predict([edit]).peak_memory_bytes == 100 + 3 * 30


@pytest.mark.parametrize("pause", [0, 150])
def test_what_takes_no_time_needs_no_law(tmp_path: Path, pause: int) -> None:
    """The CPU's attention takes a buffer by blocks of queries: 3,136 numbers at one length and 14,464 at another.

    A pause of the machine that falls into it, in one of the steps, is no work of its, and that step is left out."""
    captures = []
    for batch, buffer in ((100, 3136), (400, 14464)):
        trace = Micro()
        for n in range(3):
            at, paused = 1000 + 900 * n, pause * (n == 1)
            trace.step(at, at + batch + 110 + paused, n).op("aten::empty", at, at + 1 + paused, **{
                "Input Dims": [[], []], "Input type": ["ScalarList", "Scalar"],
                "Concrete Inputs": [f"[{buffer}]", "6"]})
            trace.op("aten::mm", at + 10 + paused, at + 10 + batch + paused, **{
                "Input Dims": [[16 * batch, WIDTH], [WIDTH, WIDTH]], "Input type": ["float"] * 2})
        captures.append(baseline_of(trace.read(tmp_path)))
    laws = SizeLaws(captures, [{"batch": 100}, {"batch": 400}], {"batch": 200})
    assert [operation.name for operation in laws.operations()] == ["aten::empty", "aten::mm"]
    assert captures[0].predict([laws]).step_time_us == pytest.approx(310, rel=0.1)


def test_the_edited_capture_must_be_among_them(tmp_path: Path) -> None:
    _, edit = _laws(tmp_path, [{"batch": 32}, {"batch": 64}], {"batch": 128})
    with pytest.raises(EditError, match="not among"):
        on_gpu(tmp_path, 32, 50).predict([edit])


def test_one_host_at_a_time(tmp_path: Path) -> None:
    first, edit = _laws(tmp_path, [{"batch": 32}, {"batch": 64}], {"batch": 96})
    for pair in ([edit, HostFrom(first.built.graphs)], [HostFrom(first.built.graphs), edit]):
        with pytest.raises(EditError, match="both change the host"):
            first.predict(pair)


# without the profiler

def test_a_step_is_the_one_without_the_profiler_where_the_capture_timed_it(tmp_path: Path) -> None:
    said = on_cpu(tmp_path, 100, 100, 170).predict()
    assert (said.times, said.unprofiled_us, said.recorded_us) == ("without the profiler", 170, 200)
    assert said.step_time_us == pytest.approx(170, abs=0.01)
    assert not [note for note in said.notes if "under the profiler" in note]
    assert on_cpu(tmp_path, 100, 100, 170).predict([ScaleHost(2.0)]).step_time_us == pytest.approx(340, abs=0.01)


def test_the_step_under_the_profiler_is_there_on_request(tmp_path: Path) -> None:
    said = on_cpu(tmp_path, 100, 100, 170, profiled=True).predict()
    assert (said.times, said.step_time_us) == ("under the profiler", 200)
    assert any("without it the recorded step took 0.170 ms" in note for note in said.notes)


def test_the_profilers_cost_at_another_size(tmp_path: Path) -> None:
    """The profiler costs 30 µs a step at any size."""
    first, second = on_cpu(tmp_path, 100, 100, 170), on_cpu(tmp_path, 400, 400, 470)
    captured = [{"batch": 100}, {"batch": 400}]
    for batch, expected in ((400, 470), (200, 270)):
        result = first.predict([SizeLaws([first, second], captured, {"batch": batch})])
        assert result.step_time_us == pytest.approx(expected, rel=0.07)


def test_a_trace_that_was_not_timed_without_the_profiler_says_so(tmp_path: Path) -> None:
    said = on_cpu(tmp_path, 100, 100).predict()
    assert (said.times, said.step_time_us, said.unprofiled_us) == ("under the profiler", 200, None)
    assert any("nothing says what the step takes without it" in note for note in said.notes)


def test_times_with_and_without_the_profiler_are_not_mixed(tmp_path: Path) -> None:
    captured = [{"batch": 100}, {"batch": 400}]
    first, second = on_cpu(tmp_path, 100, 100, 170), on_cpu(tmp_path, 400, 400)
    with pytest.raises(EditError, match="Only some of the captures say"):
        SizeLaws([first, second], captured, {"batch": 200})
    laws = SizeLaws([first, on_cpu(tmp_path, 400, 400, 470)], captured, {"batch": 200})
    with pytest.raises(EditError, match="not on the clock"):
        baseline_of(first.built.graphs, profiled=True).predict([laws])


# as a user writes it

def test_sizes_as_users_write_them() -> None:
    assert parse_sets(["batch=32:128", "seq=64"]) == ({"batch": 32}, {"batch": 128, "seq": 64})
    assert parse_also("runs/b:batch=64,seq=128") == ("runs/b", {"batch": 64, "seq": 128})
    assert parse_also("runs/batch=64") == ("runs/batch=64", {})
    with pytest.raises(EditError, match="names no size"):
        parse_sets(["batch"])
    with pytest.raises(EditError, match="set twice"):
        parse_sets(["batch=1", "batch=2"])


def _noted(folder: Path, name: str, **settings: object) -> ExecutionGraph:
    graph = Micro().calibrate().read(folder)
    graph.meta.workload = {"name": name, "settings": settings}
    return graph


def test_workloads_of_the_suite_note_their_sizes(tmp_path: Path) -> None:
    pair = [_noted(tmp_path, "bert", batch=batch, seq=64, dtype="fp32") for batch in (4, 12)]
    assert captured_sizes(pair, [{}, {}], {"batch": 6}) == [{"batch": 4}, {"batch": 12}]
    assert captured_sizes(pair, [{}, {"batch": 5}], {"seq": 6}) == [{"seq": 64, "batch": 4}, {"seq": 64, "batch": 5}]
    with pytest.raises(EditError, match="captures are of bert and vit"):
        captured_sizes([pair[0], _noted(tmp_path, "vit", batch=4)], [{}, {}], {"batch": 6})
    with pytest.raises(EditError, match="differ in dtype"):
        captured_sizes([pair[0], _noted(tmp_path, "bert", batch=8, seq=64, dtype="bf16")], [{}, {}], {"batch": 6})


def test_the_command_takes_captures_at_other_sizes(tmp_path: Path) -> None:
    for name, batch, kernel in (("a", 32, 50.0), ("b", 64, 80.0)):
        (tmp_path / name).mkdir()
        on_gpu(tmp_path / name, batch, kernel)
    first, second = (str(tmp_path / name / "micro.json") for name in "ab")
    done = CliRunner().invoke(app, ["predict", first, "--also", f"{second}:batch=64", "--set", "batch=32:128"])
    assert done.exit_code == 0, done.output
    assert "batch → 128 from captures at 32 and 64" in plain(done.output)
    for wrong in (["--also", second, "--set", "batch=32:128"], ["--also", f"{second}:batch=64"]):
        assert CliRunner().invoke(app, ["predict", first, *wrong]).exit_code == 2
