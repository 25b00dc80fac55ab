"""The acceptance run: its judges on planted faults, its parts as processes, and the whole on this machine's CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from said import Run, plain
from simulated_gpu.driver import Driver, SimulatedGpu, simulated_torch

from kernel_models.calibration.checks import Health
from kernel_models.device import DeviceError, find_device
from kernel_models.profile import DeviceProfile, save_profile
from step_views.acceptance import calibration, captures, collectives, machine, predictions, programs, units, worker
from step_views.acceptance import run as acceptance
from step_views.acceptance.parts import PARTS, SCALES
from step_views.acceptance.points import (
    AcceptancePoint,
    PointVerdict,
    absent,
    at_least,
    at_most,
    guarded,
    is_true,
    near,
    verdict_of,
)
from step_views.check.validate import ValidatedCase, size_label
from tracer.campaign import lab
from tracer.campaign.plan import CampaignBusyError
from tracer.campaign.results import ItemResult, Results
from tracer.capture.interruption import TERMINATIONS
from tracer.errors import DiskFullError, ForetraceError
from tracer.gpu_state import GpuState
from tracer.job import read_job

TRACES = Path(__file__).resolve().parents[2] / "traces"
CUDA = SCALES["cuda"]


def failed(points: Iterable[AcceptancePoint]) -> list[str]:
    """What the points that failed are about, without the model's or the program's name."""
    return [point.name.rpartition(": ")[2] for point in points if point.verdict is PointVerdict.FAILED]


def refusing(error: BaseException) -> Callable[..., Any]:
    """A function that raises an error, whatever it is given."""
    def refuse(*_: object) -> None:
        raise error

    return refuse


@pytest.mark.parametrize("point", [
    at_most("x", None, 1.0), at_most("x", float("nan"), 1.0), at_most("x", 1.1, 1.0), at_least("x", 0.9, 1.0),
    near("x", 1.06, 1.0, 0.05), near("x", 0.6, 0.0, 0.5)])
def test_a_figure_that_is_missing_or_off_fails(point: AcceptancePoint) -> None:
    assert point.verdict is PointVerdict.FAILED
    assert verdict_of([point, at_most("y", 0.0, 1.0)]) is PointVerdict.FAILED


def test_a_part_without_a_point_fails_and_one_that_is_not_here_does_neither() -> None:
    assert verdict_of([]) is PointVerdict.FAILED
    assert verdict_of(units.units(Path(), SCALES["cpu"])) is PointVerdict.ABSENT
    assert verdict_of([at_most("x", 1.0, 1.0)]) is PointVerdict.PASSED


@pytest.mark.parametrize(("gpus", "known", "what"), [
    ([GpuState("NVIDIA H100")], True, ["device of PyTorch"]), (None, False, ["device known"])])
def test_a_gpu_that_only_the_driver_shows_and_one_without_a_data_sheet_fail(
        gpus: list[GpuState] | None, known: bool, what: list[str], monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(machine, "find_gpus", lambda: gpus)
    monkeypatch.setattr(machine.readiness, "examine", lambda folder: [])
    if not known:
        monkeypatch.setattr(machine, "resolve_device", refusing(DeviceError("No data sheet has the device.")))
    assert failed(machine.machine(tmp_path, SCALES["cpu"])) == what


def test_events_that_differ_from_the_profiler_and_a_cache_that_was_not_evicted_fail() -> None:
    rows = [{"kernel_count": 1.0, "kernel_us": kernel, "event_overhead_us": 1.0, "p50_us": kernel + 1.2}
            for kernel in (3.0, 40.0, 400.0)]
    assert failed(units.judged_events(rows)) == []
    assert len(failed(units.judged_events([{**row, "event_overhead_us": 0.0} for row in rows]))) == 2  # 1% of 400 is 4
    assert failed(units.judged_events([{**rows[0], "kernel_count": None, "kernel_us": None}])) == ["kernels compared"]
    assert failed([units.judged_cache({"p50_us": 10.0}, {"p50_us": 10.1})]) and not failed(
        [units.judged_cache({"p50_us": 10.0}, {"p50_us": 15.0})])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    """A simulated GPU that part 1 finds, its driver's memset, and little to measure."""
    pytest.importorskip("torch")
    for name, value in {"BUSY_RUNS": 3, "BUSY_SIDE": 64, "IDLE_S": 0.0, "SIZES": ((64, 64),) * 3,
                        "CACHE_BYTES": 1e5}.items():
        monkeypatch.setattr(units, name, value)
    found = SimulatedGpu()
    monkeypatch.setattr(lab.ctypes, "CDLL", Driver(found).CDLL)
    with simulated_torch(found, monkeypatch):
        yield found


def test_units_are_judged_on_a_gpu(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = "cold over warm at 20 MB"  # the simulated GPU has no cache
    found = list(units.units(Path(), CUDA))
    assert failed(found) == [cold] and len(found) == 11
    monkeypatch.setattr(lab.CudaMachine, "hold", lambda self, us: gpu.launch(2.0 * us))
    monkeypatch.setattr(lab.CudaMachine, "memset", lambda self, tensor: None)
    monkeypatch.setattr(lab.CudaMachine, "graph", lambda self, work: work)
    monkeypatch.setattr(lab.CudaMachine, "clock_mhz", lambda self: None)
    found = list(units.units(Path(), CUDA))
    assert failed(found) == ["hold, cold", "hold, hot", "runs of a graph's work", "numbers left by a memset", cold]
    assert any(point.name == "clock" and point.verdict is PointVerdict.ABSENT for point in found)
    monkeypatch.setattr(lab.CudaMachine, "memset", None)
    assert "graph, memset, clock" in failed(units.units(Path(), CUDA))


def test_launches_without_work_and_a_step_that_holds_the_samples_of_its_clock_fail() -> None:
    graph = read_job(TRACES / "cpu-small").graphs[0]
    assert failed(captures.judged_graph("x", graph, False)) == []
    graph.meta.loss.launches_without_kernels = 3
    assert failed(captures.judged_graph("x", graph, True)) == ["kernels", "launches without work"]
    # A step of 2.9 ms, of which thirteen calls of the management library made 17.5; at most 4% may be the samples'.
    for pairs, what in (([(0.0029, 0.0175)], ["clock"]), ([], ["clock"]), ([(0.0029, 0.00302)], []),
                        ([(0.0029, 0.00304)], ["clock"])):
        assert failed([captures.judged_clock("clock", pairs * 4, 0.01)]) == what
    for context, on_gpu, verdict in (({}, False, PointVerdict.ABSENT), ({}, True, PointVerdict.FAILED), (
            {"unprofiled_median_ns": 100, "timing": {"free_running": {"steps": 4, "ns": 388}}}, True,
            PointVerdict.NOTED)):
        told = captures.free_running("x", context, on_gpu)
        assert told.verdict is verdict and ("-3.0%" in told.measured) == (verdict is PointVerdict.NOTED)


def test_predictions_that_are_off_fail_one_by_one_and_together() -> None:
    good = {name: ValidatedCase({}, 1.04, 0.9, 1.1, 1.0, 3) for name in "abcd"}
    assert failed(predictions.judged(good, CUDA)) == []
    one_off = {**good, "e": ValidatedCase({}, 1.5, 1.4, 1.6, 1.0, 3)}
    assert len(failed(predictions.judged(one_off, CUDA))) == 2  # its own, and the mean
    assert failed(predictions.judged({name: replace(case, low_us=1.03) for name, case in good.items()}, CUDA)) == [
        "inside the 80% interval"]
    assert failed(predictions.judged({}, CUDA)) == ["predictions"]


def test_products_of_a_cpu_that_other_work_interrupted_are_not_held_against_a_calibration(tmp_path: Path) -> None:
    tiny = SCALES["tiny"]
    profile, captured = tmp_path / "cpu.profile", tmp_path / size_label(tiny.captured[0])
    save_profile(DeviceProfile(find_device("cpu"), [], {}), profile)

    def found() -> tuple[float, float]:
        taken, error = predictions._products(tmp_path, tiny, str(profile))
        assert taken.value is not None and error.value is not None
        assert "quickest" in taken.name and "quickest" in error.name and "other work" in taken.measured
        return taken.value, error.value

    graph = read_job(TRACES / "bert-cpu").graphs[0]
    graph.save(captured)
    before = found()
    products = [row for row in range(len(graph.ops)) if graph.string(int(graph.ops.name[row])) == "aten::mm"]
    like = [row for row in products if all(column[row] == column[products[0]] for column in (
        graph.ops.shapes, graph.ops.strides))]
    assert len(like) > 1 and before[0] >= 1.0
    graph.ops.writable("duration_ns")[like[0]] += 10**9  # a second in which it did not run
    graph.save(captured)
    after = found()
    assert after[0] > before[0] + 1.0 and after[1] == pytest.approx(before[1], rel=0.01)


def test_what_cannot_be_predicted_fails_but_for_variants_of_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path
                                                                  ) -> None:
    scale = replace(SCALES["tiny"], unseen=({"bananas": 4},), variants={
        "dtype": ("int3", {"dtype": "int3"}), "fused-optimizer": (True, {"optimizer": "adamw-fused"})})
    for sizes in scale.captured:
        read_job(TRACES / "bert-cpu").graphs[0].save(tmp_path / size_label(sizes))
    predicted, refused = predictions._predicted(tmp_path, scale, [])
    assert set(refused) == {size_label(scale.unseen[0]), "dtype"}
    # An edit is predicted from the first recorded size.
    (edited,) = predicted.values()
    assert edited.sizes == scale.captured[0]
    assert 0 < edited.interval_us[0] < edited.predicted_us < edited.interval_us[1]
    monkeypatch.setattr(predictions, "capture_program", lambda *_: None)
    monkeypatch.setattr(predictions, "_predicted", lambda *_: ({}, refused))
    monkeypatch.setattr(predictions, "_run_in_turns", lambda *_: iter(()))
    (tmp_path / "part3").mkdir()
    for device, variant in ((scale.device, PointVerdict.ABSENT), ("cuda", PointVerdict.FAILED)):
        points = predictions.predictions(tmp_path, replace(scale, device=device))
        assert [point.verdict for point in points] == [PointVerdict.FAILED, variant, PointVerdict.FAILED]
    assert failed(predictions.with_profile(tmp_path, scale)) == ["files of parts 3 and 4"]


def test_a_capture_that_cannot_be_replayed_or_lacks_its_clock_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "replay", refusing(ForetraceError("It has no steps.")))
    assert failed(captures.judged_graph("x", read_job(TRACES / "cpu-small").graphs[0], False)) == ["replay"]
    monkeypatch.setattr(captures, "find_spec", lambda name: object())
    for context, verdict in (({"gpu_samples": []}, PointVerdict.PASSED), ({}, PointVerdict.FAILED)):
        assert captures._samples("x", context, True, True).verdict is verdict


def test_a_snapshot_is_held_against_the_peak_that_its_program_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path
                                                                   ) -> None:
    program = next(one for one in programs.PROGRAMS if one.name == "snapshot")
    monkeypatch.setattr(programs.subprocess, "run", lambda words, **_: types.SimpleNamespace(
        returncode=0, stdout="peak 1000\n", stderr=""))
    monkeypatch.setattr(programs, "read_context", lambda part: {"hardware": {"device": "NVIDIA H100"}, "peak_memory": {
        "allocated_bytes": 1000}})
    monkeypatch.setattr(programs, "read_job", lambda out: read_job(TRACES / "cpu-small"))
    for peak, wrong in ((1000, []), (100, ["peak of the snapshot over PyTorch's"])):
        monkeypatch.setattr(programs, "snapshot_timeline", lambda path, peak=peak: types.SimpleNamespace(
            peak_bytes=peak))
        assert failed(programs._captured(tmp_path, program, "cuda")) == wrong


def test_a_busy_place_ends_a_part_and_other_errors_are_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(error: Exception) -> Iterator[AcceptancePoint]:
        yield at_most("x", 0.0, 1.0)
        raise error

    assert failed(guarded("y", points(RuntimeError("no driver")))) == ["y"]
    with pytest.raises(CampaignBusyError):
        list(guarded("y", points(CampaignBusyError("Another campaign is writing to x."))))
    pytest.importorskip("torch")
    assert acceptance.torch_device() in SCALES
    monkeypatch.setattr(acceptance, "find_spec", lambda name: None)
    with pytest.raises(ForetraceError, match=r"needs PyTorch; install it with: pip install 'foretrace\[capture\]'"):
        acceptance.torch_device()


def test_a_calibration_that_lacks_a_family_or_errs_fails() -> None:
    class Profile:
        families = (types.SimpleNamespace(value="gemm"), types.SimpleNamespace(value="sort"))
        judged = "gemm"

        def entries_of(self, family: Any) -> list[Any]:
            held = {"n": 9, "median": 0.3} if family.value == self.judged else None
            return [types.SimpleNamespace(facts={"held_out": held}, rows=12)]

    scale = replace(CUDA, families=("gemm", "sort", "norm"))
    found = list(calibration.judged_profile(Profile(), scale))  # type: ignore[arg-type]
    assert failed(found) == ["families", "median error, held out", "measurements"]  # 12 and 9 of gemm, 12 of sort
    assert "without norm" in found[0].measured
    Profile.judged = "sort"  # whose errors are shown alone
    *_, noted = calibration.judged_profile(Profile(), scale)  # type: ignore[arg-type]
    assert (noted.verdict, noted.measured) == (PointVerdict.NOTED, "30.00%")


@pytest.mark.parametrize(("earlier_s", "kept"), [(50.0, True), (2.0, False)])
def test_minutes_of_a_calibration_that_was_interrupted_count(earlier_s: float, kept: bool, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(calibration.part_folder(tmp_path, 4) / "measurements")
    results.open("calibration", "", resume=False, rehearsal=False)
    results.save([ItemResult(id="a", kind="kernel", name="gemm", settings={}, split="fit", status="ok",
                             seconds=earlier_s)])
    results.close()
    asked: list[bool] = []

    def calibrated(request: Any, **_: Any) -> Any:
        asked.append(request.resume)
        return types.SimpleNamespace(profile=None, notes=[])

    monkeypatch.setattr(calibration.run, "calibrate", calibrated)
    monkeypatch.setattr(calibration, "save_profile", lambda *_: None)
    monkeypatch.setattr(calibration, "judged_profile", lambda *_: iter(()))
    used, = calibration.calibration(tmp_path, SCALES["tiny"])  # a minute
    assert asked == [True] and (used.verdict is PointVerdict.PASSED) == kept


@pytest.mark.parametrize(("scale", "load", "judged"), [("cpu", 0.6, True), ("cpu", 5.0, False), ("cuda", 5.0, True)])
def test_times_of_a_cpu_that_is_busy_are_told_and_not_judged(
        scale: str, load: float, judged: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker, "probe", lambda device: Health(device, load=load))
    chosen, points = worker.judged_here(3, SCALES[scale])
    assert (chosen == SCALES[scale]) == judged == (not points)
    assert not worker.judged_here(1, SCALES[scale])[1]  # has no times to judge
    found = list(predictions.judged({"a": ValidatedCase({}, 2.0, 1.9, 2.1, 1.0, 3)}, chosen))
    verdict = PointVerdict.FAILED if judged else PointVerdict.NOTED
    assert verdict_of([*points, *found, absent("bf16", "no matrix units")]) is verdict
    assert [point.value for point in found] == [1.0, 1.0, 1.0, 0.0]  # told in either case
    # A part does not pass by what else it found, and fails by it.
    assert verdict_of([*points, at_least("minutes used", 0.1, 0.8)]) is PointVerdict.FAILED
    for name in ("part3/measured.json", "part4/device.profile"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}", encoding="utf-8")
    errors = iter((1.0, 2.0))  # without the profile, and with it
    monkeypatch.setattr(predictions, "_predicted", lambda *_: ({}, {}))
    monkeypatch.setattr(predictions, "_products", lambda *_: iter(()))
    monkeypatch.setattr(predictions, "_beside", lambda *_: {
        "a": ValidatedCase({}, next(errors) + 1.0, 0.9, 1.1, 1.0, 3)})
    assert (failed(predictions.with_profile(tmp_path, chosen)) == []) == (not judged)


@pytest.mark.parametrize(("context", "peak", "what"), [
    ({"hardware": {"device": "NVIDIA H100"}}, None, ["device"]), ({}, None, ["device"]),
    ({"hardware": {"device": "CPU"}, "peak_memory": {"allocated_bytes": 95}}, 100, ["peak of memory over PyTorch's"]),
    ({"hardware": {"device": "CPU"}, "peak_memory": {"allocated_bytes": 99}}, 100, [])])
def test_a_program_on_the_wrong_device_or_with_another_peak_fails(context: dict[str, Any], peak: int | None,
                                                                  what: list[str]) -> None:
    assert failed(programs.judged_context("x", context, "cpu", peak)) == what


@pytest.mark.parametrize(("said", "verdicts"), [
    ("foretrace: This host is too busy to be calibrated: left out in turn, its small programs …", ["not here"]),
    ("foretrace: no", ["FAIL", "FAIL"])])
def test_a_busy_host_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, verdicts: list[str]
                                   ) -> None:
    ended = subprocess.CompletedProcess([], 2, "", f"round 1\n{said}\n")
    monkeypatch.setattr(collectives.subprocess, "run", lambda *_, **__: ended)
    monkeypatch.setattr(collectives, "_job", lambda *_: iter(()))
    points = collectives.collectives(tmp_path, SCALES["tiny"])
    assert [point.verdict.value for point in points] == verdicts


def test_collectives_without_a_name_or_size_fail() -> None:
    graph = read_job(TRACES / "cpu-small").graphs[0]
    assert failed(collectives.judged_collectives([graph], 1)) == ["collectives", "sizes", "groups"]
    table = types.SimpleNamespace(kind=np.array([0]), elements_in=np.array([8]), elements_out=np.array([8]),
                                  group_size=np.array([1]))
    fake = types.SimpleNamespace(collectives=table, string=lambda code: "unknown", meta=graph.meta)
    points = collectives.judged_collectives([fake, graph], 1)  # type: ignore[list-item]
    assert failed([next(points), next(points)]) == ["ranks", "collectives"]


STUB = """
import os, sys, time, msgspec
number, folder = int(sys.argv[1]), sys.argv[2]
line = b'{"name":"x","asked":"1","measured":"1","verdict":"pass","value":1.0}\\n'
with open(f"{folder}/part{number}/points.jsonl", "wb") as file:
    file.write(line + line[:20 * (number == 1)])
if number == 1:
    sys.stderr.write("CUDA error: an illegal memory access\\n"); sys.stderr.flush(); os.abort()
if number == 2:
    if "STUB_WATCHES" in os.environ:
        from tracer.capture.interruption import end_with_parent
        end_with_parent()
    print(os.getpid(), flush=True)
    if "STUB_ENDS_THE_RUN" in os.environ:
        os.kill(os.getppid(), int(os.environ["STUB_ENDS_THE_RUN"]))
    time.sleep(60)
"""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder; parts are a program of which number 1 aborts and number 2 hangs."""
    script = tmp_path / "stub.py"
    script.write_text(STUB, encoding="utf-8")
    monkeypatch.setattr(acceptance, "WORKER", (sys.executable, "-X", "faulthandler", str(script)))
    short = tuple(part._replace(cpu_s=2.0 if part.number == 2 else 30.0) for part in PARTS)
    monkeypatch.setattr(acceptance, "PARTS", short)
    monkeypatch.setattr(acceptance, "torch_device", lambda: "cpu")
    return tmp_path / "out"


@pytest.mark.slow
def test_a_run_goes_on_where_its_time_ended(stub: Path) -> None:
    told: list[str] = []
    first = acceptance.accept(stub, 0.06, "cpu", say=told.append)
    assert [part.number for part in first.parts] == [2] and "Part 0 is left: it may take 0.5 minutes" in told
    second = acceptance.accept(stub, 10, "cpu", say=told.append)
    assert not second.left and told.count("Part 2: captures of five models") == 1
    acceptance.accept(stub, 10, "cpu", [2], say=told.append)
    assert told.count("Part 2: captures of five models") == 2


def test_a_part_that_ended_begins_anew_and_one_that_was_interrupted_goes_on(
        stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acceptance.accept(stub, 10, "cpu", [0, 3, 4])
    measured = stub / "part4" / "measurements"
    measured.mkdir()
    acceptance.accept(stub, 10, "cpu", [3])
    assert measured.is_dir()
    acceptance.accept(stub, 10, "cpu", [4])
    assert not measured.exists()
    measured.mkdir()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(acceptance, "_ended", refusing(KeyboardInterrupt()))
        acceptance.accept(stub, 10, "cpu", [4])
    results = acceptance.read_results(stub)
    assert results is not None and {part.number for part in results.parts} == {0, 3} and not measured.exists()
    measured.mkdir()
    acceptance.accept(stub, 10, "cpu", [4])
    assert measured.is_dir()


def test_a_part_that_cannot_begin_anew_keeps_what_it_found(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, own = acceptance.accept(stub, 10, "cpu", [1, 4]), stub / "part1"
    with monkeypatch.context() as patch, pytest.raises(ForetraceError, match=r"part1 cannot be written \(It is full\)"):
        patch.setattr(acceptance, "writing_error", lambda folder: OSError(28, "It is full"))
        acceptance.accept(stub, 10, "cpu", [1])
    with pytest.raises(ForetraceError, match=r"part1 cannot be written \(Not a directory\)"):
        acceptance._remove([own / acceptance.OUTPUT / "x"], own)
    (own / "notes.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(ForetraceError, match=r"part1 has notes.txt, which part 1 did not leave, .* move it elsewhere"):
        acceptance.accept(stub, 10, "cpu", [1])
    own.rename(stub / "elsewhere")
    own.symlink_to(stub / "elsewhere")
    with pytest.raises(ForetraceError, match=r"part1 is a link, .* remove the link"):
        acceptance.accept(stub, 10, "cpu", [1])
    own.unlink()
    own.write_text("precious", encoding="utf-8")
    with pytest.raises(ForetraceError, match=r"part1 cannot be written \(File exists\)"):
        acceptance.accept(stub, 10, "cpu", [1])
    assert acceptance.read_results(stub) == before and own.read_text(encoding="utf-8") == "precious"
    assert sorted(os.listdir(stub / "elsewhere")) == ["notes.txt", acceptance.OUTPUT, worker.POINTS]


@pytest.mark.parametrize("number", TERMINATIONS)
def test_a_run_that_is_ended_from_outside_ends_its_part_too(stub: Path, monkeypatch: pytest.MonkeyPatch, number: int
                                                            ) -> None:
    monkeypatch.setenv("STUB_ENDS_THE_RUN", str(int(number)))
    before = signal.signal(number, signal.SIG_DFL)  # nohup, under which tests may run, has one ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            acceptance.accept(stub, 10, "cpu", [2])
    finally:
        signal.signal(number, before)
    assert acceptance.read_results(stub) is None
    pid = int((stub / "part2" / acceptance.OUTPUT).read_text(encoding="utf-8"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_run_that_is_killed_does_not_leave_its_part(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_WATCHES", "1")
    monkeypatch.setenv("STUB_ENDS_THE_RUN", "9")
    script = ("import sys; from pathlib import Path; from step_views.acceptance import run; "
              f"run.WORKER = {acceptance.WORKER!r}; run.accept(Path(sys.argv[1]), 10, 'cpu', [2])")
    assert subprocess.run([sys.executable, "-c", script, str(stub)], check=False).returncode == -9
    part = int((stub / "part2" / acceptance.OUTPUT).read_text(encoding="utf-8"))
    for _ in range(500):
        try:
            os.kill(part, 0)
        except ProcessLookupError:
            break
        # Who adopts it may not wait for it.
        if Path(f"/proc/{part}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        pytest.fail("the part lives on")


@pytest.mark.parametrize(("error", "verdict"), [
    (CampaignBusyError("Another campaign is writing to x."), PointVerdict.INTERRUPTED),
    (DiskFullError("The disk is full."), PointVerdict.INTERRUPTED),
    (ForetraceError("Nothing can be measured."), PointVerdict.FAILED)])
def test_a_part_that_could_not_run_is_left(error: ForetraceError, verdict: PointVerdict, stub: Path,
                                           monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(worker, "work", refusing(error))
    with pytest.raises(SystemExit) as ended:
        worker.main(4, stub, "cpu")
    said = capsys.readouterr().err
    assert said == f"{error}\n"
    monkeypatch.setattr(acceptance, "WORKER", (
        sys.executable, "-c", f"import sys; sys.stderr.write({said!r}); sys.exit({ended.value.code})"))
    found = acceptance.accept(stub, 10, "cpu", [4])
    assert found.parts[0].verdict is verdict and str(error) in found.parts[0].failure
    assert (PARTS[4].number in {part.number for part in found.left}) == (verdict is PointVerdict.INTERRUPTED)
    # Of a traceback the error is shown, not the place in the code.
    text = "half way\nTraceback (most recent call last):\n  File \"x.py\", line 3, in f\n    y()\nKeyError: 'a'\n"
    assert acceptance.last_words(text) == "half way | KeyError: 'a'"


@pytest.mark.parametrize(("where", "minutes", "scale", "again", "sentence"), [
    ("out", 10, "cuda", (), "holds results of cpu"), ("out", 10, "cpu", (9,), "no part 9"),
    ("out", 0, "cpu", (), "0 minutes"), ("stub.py", 10, "cpu", (), "cannot be written"),
    ("s3://bucket/run", 10, "cpu", (), "cannot be written .it is a URL")])
def test_what_cannot_be_run_is_refused(stub: Path, where: str, minutes: float, scale: str, again: tuple[int, ...],
                                       sentence: str) -> None:
    write_results(stub, [])
    with pytest.raises(ForetraceError, match=sentence):
        acceptance.accept(Path(where) if ":" in where else stub.parent / where, minutes, scale, again)


PART = {"number": 0, "title": "", "verdict": "pass", "seconds": 1.0, "points": [
    {"name": "x", "asked": "", "measured": "", "verdict": "pass"}]}


def write_results(folder: Path, parts: list[dict[str, Any]], **more: Any) -> bytes:
    """Write a run's results, and return what the file then holds."""
    folder.mkdir()
    path = folder / acceptance.RESULTS
    path.write_text(json.dumps({"scale": "cpu", "parts": parts, **more}), encoding="utf-8")
    return path.read_bytes()


@pytest.mark.parametrize(("damage", "said"), [
    ({"number": 9}, "there is no part 9"), ({"number": -1}, "there is no part -1"),
    ({"number": 3}, "part 3 is in it twice"), ({"seconds": -1.0}, "part 0 took -1 seconds"),
    ({"seconds": float("nan")}, r"cannot be read.*points\.jsonl"),
    ({"verdict": "FAIL"}, "part 0 is FAIL, which its points are not"),
    ({"failure": "It hung."}, "part 0 is pass, which"), ({"points": []}, "part 0 is pass, which"),
    ({"verdict": "interrupted"}, "part 0 is interrupted, which")])
def test_results_that_no_run_writes_are_refused_and_left(stub: Path, damage: dict[str, Any], said: str) -> None:
    damaged = write_results(stub, [{**PART, **damage}, {**PART, "number": 3}])
    with pytest.raises(ForetraceError, match=said):
        acceptance.accept(stub, 10, "cpu", [4])
    assert (stub / acceptance.RESULTS).read_bytes() == damaged and not (stub / "part4").exists()


def test_two_runs_do_not_share_a_folder(run: Run, stub: Path) -> None:
    pytest.importorskip("fcntl")
    stub.mkdir()
    holder = ("import sys; from pathlib import Path; from tracer.output_file import DirectoryLock; "
              "lock = DirectoryLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", holder, str(stub)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                          ) as first:
        assert first.stdout is not None and first.stdout.readline() == b"held\n"
        refused = run("doctor", "--gpu", "--parts", "0", "--out", str(stub))
        first.kill()
    assert refused.code == 2 and f"Another acceptance run is writing to {stub}: wait for it" in plain(refused.err)
    assert not (stub / acceptance.RESULTS).exists()
    assert not run("doctor", "--gpu", "--parts", "0", "--out", str(stub)).code
    assert sorted(os.listdir(stub)) == ["part0", acceptance.RESULTS]


def test_a_run_in_which_no_part_fits_says_so_and_leaves_no_folder(run: Run, stub: Path) -> None:
    ran = run("doctor", "--gpu", "--minutes", "0.001", "--out", str(stub))
    assert ": none has run of 8 parts." in plain(ran.out) and "Left: 0, 1, 2" in plain(ran.out) and not stub.exists()


@pytest.mark.parametrize(("gpus", "ranks"), [(8, 2), (1, 1), (0, 1)])
def test_the_job_has_two_ranks_where_there_are_two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int,
                                                        ranks: int) -> None:
    monkeypatch.setattr(collectives, "torch_gpus", lambda: gpus)
    monkeypatch.setattr(collectives, "_ran", lambda what, command: is_true(what, "", True, " ".join(command)))
    monkeypatch.setattr(collectives, "read_job", lambda out: read_job(TRACES / "cpu-small"))
    points = list(collectives._job(tmp_path, SCALES["cuda"]))
    ran = next(point for point in points if point.name.startswith("torchrun"))
    assert ran.name == f"torchrun, {ranks} ranks, nccl" and f"--nproc-per-node {ranks}" in ran.measured
    assert (points[0].name == "GPUs") == (ranks == 1)


@pytest.mark.parametrize(("more", "sentence"), [
    ({"version": 99}, "is of version 99, and this foretrace reads 1"),
    # A folder that is taken to the next GPU, driver or PyTorch does not become a table of two.
    ({"machine": "NVIDIA H200 (driver 580.1) with PyTorch 2.6.0"}, "NVIDIA H200.* and this is .*PyTorch")])
def test_results_of_another_version_or_machine_are_refused_and_left(stub: Path, more: dict[str, Any], sentence: str
                                                                    ) -> None:
    before = write_results(stub, [PART], **more)
    with pytest.raises(ForetraceError, match=sentence):
        acceptance.accept(stub, 10, "cpu")
    assert (stub / acceptance.RESULTS).read_bytes() == before
    (stub / acceptance.RESULTS).unlink()
    (stub / acceptance.RESULTS).mkdir()
    with pytest.raises(ForetraceError, match="is no file"):
        acceptance.accept(stub, 10, "cpu", [0])
    assert not (stub / "part0").exists()


@pytest.mark.parametrize(("asked", "why"), [
    (("5",), "Part 5 did not run: it needs part 3."),
    (("0", "--minutes", "0.01"), "Part 0 did not run: it may take 0.5 minutes.")])
def test_a_part_that_was_asked_for_and_did_not_run_is_no_success(run: Run, stub: Path, asked: tuple[str, ...], why: str
                                                                 ) -> None:
    ran = run("doctor", "--gpu", "--out", str(stub), "--parts", *asked)
    assert ran.code == 2 and why in plain(ran.out)


def test_a_part_that_aborts_or_hangs_fails_with_its_last_words_and_the_others_go_on(run: Run, stub: Path) -> None:
    found = acceptance.accept(stub, 10, "cpu")
    aborted, hung = found.parts[1:3]
    assert len(found.parts) == len(PARTS) and found.numbers(PointVerdict.FAILED) == "1,2" and not found.left
    assert "signal 6" in aborted.failure and "illegal memory access" in aborted.failure
    assert "stub.py\", line" in aborted.failure and "Extension modules" not in aborted.failure
    assert len(aborted.points) == 1  # the one that was written whole
    assert "after 2 s" in hung.failure and acceptance.read_results(stub) == found
    ran = run("doctor", "--gpu", "--out", str(stub))
    assert ran.code == 1 and "Part 1, units: clocks, caches, events: FAIL" in ran.out
    assert plain(ran.out).endswith(" --parts 1,2 begins them anew.")
    assert "6 pass, 2 FAIL of 8 parts" in plain(ran.out) and "illegal memory access" in plain(ran.out)
    assert json.loads(run("doctor", "--gpu", "--json", "--out", str(stub)).out)["scale"] == "cpu"


@pytest.mark.parametrize(("wrong", "said"), [
    (["--minutes", "3"], "give --gpu too"), (["--gpu", "--parts", "two"], "names no parts"),
    (["--gpu", "--parts", "8"], "There is no part 8"), (["--gpu", "--out", ""], "--out is empty"),
    (["--gpu", "--parts", ",,"], "names no parts"), (["--gpu", "--parts", ""], "names no parts")])
def test_options_of_no_run_are_refused(run: Run, stub: Path, wrong: list[str], said: str) -> None:
    refused = run("doctor", "--out", str(stub), *wrong)
    assert refused.code == 2 and said in plain(refused.err)


@pytest.mark.slow
def test_the_whole_runs_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does: parts may take longer here than a person waits."""
    pytest.importorskip("torch")
    monkeypatch.setattr(acceptance, "PARTS", tuple(part._replace(cpu_s=6 * part.cpu_s) for part in PARTS))
    monkeypatch.setattr(programs, "LONGEST_S", 600.0)
    found = acceptance.accept(tmp_path, 240, "tiny")
    assert not found.numbers(PointVerdict.FAILED) and not found.left, found
    assert any("own clock" in point.name for part in found.parts if part.number == 2 for point in part.points)
