"""Sizes as users write them, the nearest of several captures, and steps with and without the profiler."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from micro import Micro
from said import Run

from foretrace.edits import ScaleHost, Sizes
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.scenario import EditError
from graph_predictor.request.study import Configuration, Study
from graph_predictor.sizes.retrace import captured_sizes, nearest, parse_also, parse_sets
from graph_predictor.synthesis.baseline import baseline_of
from tracer.graph import ExecutionGraph
from tracer.job import read_job

A100 = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85 * 10**9, "numSms": 108}
WIDTH = 1024


def on_gpu(folder: Path, batch: int, kernel_us: float) -> str:
    """Steps of 30 µs on the host and one product of ``batch`` rows that takes ``kernel_us``; the GPU decides."""
    trace = Micro()
    trace.metadata["deviceProperties"] = [A100]
    trace.calibrate()
    end = 0.0
    for n in range(4):
        at = 1000 + (kernel_us + 1) * n
        trace.step(at, at + 30, n + 1)
        trace.op("aten::addmm", at + 2, at + 20, **{
            "Input Dims": [[WIDTH], [batch, WIDTH], [WIDTH, WIDTH]], "Input type": ["float"] * 3})
        begin = max(at + 20, end + 1 if n else 0)
        trace.launch(at + 5, 10, (7, begin, kernel_us))
        end = begin + kernel_us
    folder.mkdir()
    return str(trace.write(folder / "micro.json"))


def on_cpu(folder: Path, batch: int, product_us: float, unprofiled_us: float | None = None, *,
           profiled: bool = False, python_us: float = 100) -> Baseline:
    """Steps on a CPU: a product that takes ``product_us``, and ``python_us`` of Python after it; one event a step."""
    trace = Micro()
    for n in range(4):
        at = 1000 + 2 * (product_us + python_us) * n
        trace.step(at, at + product_us + python_us, n)
        trace.op("aten::mm", at, at + product_us, **{
            "Input Dims": [[16 * batch, WIDTH], [WIDTH, WIDTH]], "Input type": ["float"] * 2})
    folder.mkdir(exist_ok=True)
    graph = trace.read(folder)
    if unprofiled_us is not None:
        graph.meta.unprofiled_step_ns = [int(1000 * unprofiled_us)] * 5
    return baseline_of(graph, profiled=profiled)


# without the profiler

@pytest.mark.parametrize(("unprofiled_us", "profiled", "step_us", "note"), [
    (170, False, 170, ""), (170, True, 200, "without it the recorded step took 0.170 ms"),
    (None, False, 200, "nothing says what the step takes without it")])
def test_a_step_is_the_one_without_the_profiler_where_the_capture_timed_it(
        tmp_path: Path, unprofiled_us: float | None, profiled: bool, step_us: float, note: str) -> None:
    base = on_cpu(tmp_path, 100, 100, unprofiled_us, profiled=profiled)
    said = base.predict()
    times = "without the profiler" if step_us == 170 else "under the profiler"
    assert (said.times, said.unprofiled_us, said.recorded_us) == (times, unprofiled_us, 200)
    assert said.step_time_us == pytest.approx(step_us, abs=0.01)
    assert any(note in each for each in said.notes)
    assert any("under the profiler" in each for each in said.notes) is bool(note)
    assert base.predict([ScaleHost(2.0)]).step_time_us == pytest.approx(2 * step_us, abs=0.01)


def test_a_step_at_another_size_is_another_run_than_the_capture(tmp_path: Path) -> None:
    """However little of it changes: processes that run the same steps differ."""
    found = on_cpu(tmp_path, 100, 100, 170).predict([Sizes.parse(["batch=1600:1616"])])
    assert found.interval_us[1] >= found.step_time_us * math.exp(0.065)
    assert found.interval_us[0] <= found.step_time_us * math.exp(-0.065)


# as a user writes it

def test_sizes_as_users_write_them() -> None:
    assert parse_sets(["batch=32:128", "seq=64"]) == ({"batch": 32}, {"batch": 128, "seq": 64})
    assert parse_also("runs/b:batch=64,seq=128") == ("runs/b", {"batch": 64, "seq": 128})
    assert parse_also("runs/batch=64") == ("runs/batch=64", {})
    for wrong, why in ((["batch"], "names no size"), (["batch=1", "batch=2"], "set twice")):
        with pytest.raises(EditError, match=why):
            parse_sets(wrong)
    with pytest.raises(EditError, match="batch=0 is no size"):
        nearest([{"batch": 4}], {"batch": 0})


def _noted(folder: Path, name: str, **settings: object) -> ExecutionGraph:
    graph = Micro().calibrate().read(folder)
    graph.meta.workload = {"name": name, "settings": settings}
    return graph


def test_workloads_of_the_suite_note_their_sizes(tmp_path: Path) -> None:
    four, twelve, vit, bf16 = (_noted(tmp_path, name, batch=batch, seq=64, dtype=dtype) for name, batch, dtype in (
        ("bert", 4, "fp32"), ("bert", 12, "fp32"), ("vit", 4, "fp32"), ("bert", 8, "bf16")))
    pair = [four, twelve]
    assert captured_sizes(pair, [{}, {}], {"batch": 6}) == [{"batch": 4}, {"batch": 12}]
    assert captured_sizes(pair, [{}, {"batch": 5}], {"seq": 6}) == [{"seq": 64, "batch": 4}, {"seq": 64, "batch": 5}]
    for other, sizes, why in ((twelve, {"image": 5}, "does not say its image"), (bf16, {}, "differ in dtype"),
                              (vit, {}, "captures are of bert and vit")):
        with pytest.raises(EditError, match=why):
            captured_sizes([four, other], [{}, sizes], {"batch": 6})


@pytest.mark.parametrize(("wanted", "expected"), [
    ({"batch": 7, "seq": 64}, 0), ({"batch": 9, "seq": 64}, 1), ({"batch": 8, "seq": 64}, 0),  # √(4 · 16) = 8
    ({"batch": 4, "seq": 500}, 2)])
def test_the_nearest_capture_is_that_of_the_least_ratios(wanted: dict[str, int], expected: int) -> None:
    assert nearest([{"batch": 4, "seq": 64}, {"batch": 16, "seq": 64}, {"batch": 4, "seq": 512}], wanted) == expected


def test_the_command_scales_the_nearest_capture(tmp_path: Path, run: Run) -> None:
    first, second = on_gpu(tmp_path / "a", 2048, 51.0), on_gpu(tmp_path / "b", 4096, 92.0)

    def predicted(source: str, sizes: str, *more: str) -> dict[str, Any]:
        return run("predict", source, "--set", f"batch={sizes}", "--json", *more).json

    also = ("--also", f"{second}:batch=4096")
    far, near, there = (predicted(first, f"2048:{batch}", *also) for batch in (6144, 2560, 4096))
    assert far["step_time_us"] == predicted(second, "4096:6144")["step_time_us"]
    assert any("Of the captures at batch=2048 and batch=4096 the one at batch=4096 is nearest" in note
               for note in far["notes"])
    assert near["step_time_us"] == predicted(first, "2048:2560")["step_time_us"]
    assert there["gpu_active_us"] == 92
    following = [{"name": "batch", "operation": "addmm", "argument": "input", "shape": [2048, 1024], "dimension": 0}]
    assert near["sizes"] == {"route": "one capture scaled", "following": following,
                             "changes": [{"name": "batch", "old": 2048, "new": 2560}]}
    assert there["sizes"]["route"] == "as captured"
    assert any("the one at batch=4096 has the wanted size" in note for note in there["notes"])
    for wrong in (["--also", second, "--set", "batch=32:128"], ["--also", f"{second}:batch=64"]):
        assert run("predict", first, *wrong).code == 2


@pytest.mark.parametrize(("slower", "apart"), [(1.5, 0.04), (1 / 1.5, 0.06)])
def test_a_machine_that_drifts_between_two_captures_is_not_growth(tmp_path: Path, slower: float, apart: float) -> None:
    """The Python that stays shows it: a capture of twice the batch on a slower machine predicts as on the first one."""
    on_cpu(tmp_path / "a", 64, 10_000, python_us=5_000)
    study = Study(read_job(tmp_path / "a" / "micro.json"))
    found = []
    for name, factor in (("quiet", 1.0), ("slow", slower)):
        on_cpu(tmp_path / name, 128, 20_000 * factor, python_us=5_000 * factor)
        also = (f"{tmp_path / name / 'micro.json'}:batch=2048",)
        found.append(study.predict(Configuration(sizes=("batch=1024:4096",), also=also)))
    quiet, slow = found
    assert abs(math.log(slow.step_time_us / quiet.step_time_us)) < apart
    assert any(f"{'slower' if slower > 1 else 'quicker'} during that capture" in note for note in slow.notes)
    assert not any("The machine was" in note for note in quiet.notes)


# captures that are not of the sizes they are given

def test_a_capture_of_another_size_than_it_is_given_is_refused(tmp_path: Path, run: Run) -> None:
    paths = {name: on_gpu(tmp_path / name, batch, kernel) for name, batch, kernel in (
        ("a", 2048, 51.0), ("b", 4096, 92.0), ("c", 2048, 51.0))}
    for other, batch, why in (("a", 4096, "no shape differs between the two captures"),
                              ("c", 4096, "no shape differs between the two captures"),
                              ("b", 6144, "(2048 has become 4096)"), ("b", 6144, "b/micro.json:batch=4096"),
                              ("b", 2048, "name its own sizes")):
        refused = run("predict", paths["a"], "--set", f"batch=2048:{batch}", "--also", f"{paths[other]}:batch={batch}")
        assert refused.code == 2
        assert why.replace(" ", "") in "".join(refused.err.split())
