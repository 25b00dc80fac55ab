"""Calibrations that do not go as they should: what a user is told, and what the profile is worth; all is simulated.

Coming back to benchmarks on a shared CPU: when a visit is due, when enough is known, what the tables then say.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
from calibration_support import CONTEXT, CPU_CONTEXT, Bench0, healthy, host_law_us, no_capture, simulated

from kernel_models.calibration import run
from kernel_models.calibration.checks import CalibrationError, Health
from kernel_models.calibration.planner import GAPS, Visits
from kernel_models.calibration.run import Request, calibrate, fit_measurements
from kernel_models.calibration.source import COVERAGE, MOST_REFUSALS
from kernel_models.datasets.campaign import calls_of_benchmark
from kernel_models.host.overheads import HostOverheads
from kernel_models.op_call import Family
from kernel_models.pricing import price
from tracer.campaign import processes, runner, tables
from tracer.campaign.families import FAMILIES
from tracer.campaign.items import Item, kernel_item
from tracer.campaign.processes import NoWorkerError
from tracer.campaign.record import Answer, Task
from tracer.campaign.results import Results
from tracer.campaign.tables import read_kernels
from tracer.errors import ForetraceError
from tracer.job import read_job

TRACE = Path(__file__).resolve().parents[2] / "traces" / "cpu-small"
QUIET = Health("cpu", "CPU", free_bytes=8e9, load=0.1)
__all__ = ["simulated"]


def calibrated(work: Path, *families: str, device: str = "cuda", minutes: float = 0.5, **options: Any) -> Any:
    """Calibrate the simulated device."""
    host = options.pop("host", None)
    return calibrate(Request(work, device, minutes, families, **options), host=host,
                     probe=lambda name: QUIET if name == "cpu" else healthy(name))


def asked(simulated: Bench0) -> Counter[str]:
    return Counter(item.name for item in simulated.asked)


def test_a_family_whose_kernels_are_not_seen_leaves_the_time_to_the_others(simulated: Bench0, tmp_path: Path) -> None:
    """Where the profiler may not look, nothing tells which generated kernel ran."""
    found = calibrated(tmp_path / "work", "softmax", "triton", minutes=0.3)
    assert asked(simulated)["fused"] <= COVERAGE and asked(simulated)["softmax"] > 2 * COVERAGE
    assert found.profile.families == [Family.SOFTMAX]
    assert [note for note in found.notes if note.startswith("triton was given up with 0 measurements")]
    assert "measurements of fused show the profiler no kernel" in " ".join(found.notes)
    again = calibrated(tmp_path / "work", "softmax", "triton", minutes=0.35, resume=True)
    assert asked(simulated)["fused"] <= COVERAGE + 3 and again.profile.families == [Family.SOFTMAX]


def test_a_family_that_only_runs_other_kernels_is_given_up(simulated: Bench0, tmp_path: Path) -> None:
    simulated.kernel = lambda call, item: "nvjet_gemm"
    found = calibrated(tmp_path / "work", "gemm", "softmax", minutes=0.3)
    assert asked(simulated)["softmax"] == COVERAGE and found.profile.families == [Family.GEMM]
    assert (f"softmax was given up with 0 measurements, since {COVERAGE} did not work; the last one: such measurements "
            "ran other kernels than meant.") in found.notes


@pytest.mark.parametrize(("change", "told"), [
    ({"law": lambda call: 20.0 * (call.dtype != "fp32" or call.family is not Family.SOFTMAX)},
     "measurements of softmax have no time and were left out"),
    ({"kernel": lambda call, item: "nvjet_gemm" if call.dtype == "fp32" else "softmax_warp_forward"},
     "ran other kernels than meant")])
def test_measurements_that_say_nothing_are_left_out_and_told(simulated: Bench0, tmp_path: Path,
                                                             change: dict[str, Any], told: str) -> None:
    vars(simulated).update(change)
    found = calibrated(tmp_path / "work", "softmax", minutes=0.3)
    assert any(told in note for note in found.notes)
    model = found.profile.entries_of(Family.SOFTMAX)[0].model
    assert set(model.points.parts[1]) == {"bf16", "fp16"}


def test_what_was_refused_is_not_asked_again_after_an_interruption(simulated: Bench0, tmp_path: Path) -> None:
    simulated.refuses = lambda item: "RuntimeError: not supported." if item.settings.get("dtype") == "fp16" else ""
    simulated.interrupt_after = 50
    with pytest.raises(KeyboardInterrupt):
        calibrated(tmp_path / "work", "softmax")
    simulated.interrupt_after = 0
    found = calibrated(tmp_path / "work", "softmax", resume=True)
    assert len(simulated.asked) > 100 and any("not supported here" in note for note in found.notes)
    tried = Counter((item.settings["log"], item.settings["op"]) for item in simulated.asked
                    if item.name == "softmax" and item.settings["dtype"] == "fp16")
    assert len(tried) == 4 and max(tried.values()) <= MOST_REFUSALS


def test_what_only_the_first_measurement_takes_is_not_expected_of_the_next(simulated: Bench0, tmp_path: Path) -> None:
    """The profiler and libraries start with it, which on a busy machine takes longer than all that is left."""
    simulated.first_s = 15.0
    calibrated(tmp_path / "work", "memset")
    assert len(simulated.asked) > 30


def disturbed(at_s: float) -> float:
    """In every other second on average, by so much more as the second has it."""
    lucky, much = np.random.default_rng(int(at_s)).random(2)
    return 1.0 if lucky < 0.5 else 1.2 + much


@pytest.mark.slow  # visits of simulated measurements: the next test
def test_visits_on_a_busy_host_find_how_quick_it_is(simulated: Bench0, tmp_path: Path) -> None:
    simulated.context, simulated.disturbed, simulated.seconds = CPU_CONTEXT, disturbed, 0.08
    found = calibrated(tmp_path / "work", "memset", device="cpu", minutes=1.0)
    frame = read_kernels(tmp_path / "work", "memset")
    frame["over"] = frame.p10_us / [host_law_us(calls_of_benchmark("memset", {"bytes": size})[0]) for size in
                                    frame.bytes.astype(int)]
    first = frame[frame.variant == "warm"].set_index("id").over
    quickest = frame[frame.variant.str.startswith("warm")].groupby("id").over.min()
    assert (first < 1.01).mean() < 0.3 and (quickest < 1.01).mean() > 0.7 and len(first) > 100
    assert any(note.startswith("Visits of one benchmark differ by") for note in found.notes)
    calls = [calls_of_benchmark("memset", {"bytes": size})[0] for size in (1 << 14, 1 << 18, 1 << 22)]
    told = price(calls, found.profile.device, found.profile).time_us
    assert told == pytest.approx([host_law_us(call) for call in calls], rel=0.12)


def test_visits_survive_an_interruption_and_those_that_fail(simulated: Bench0, tmp_path: Path) -> None:
    simulated.context, simulated.disturbed, simulated.interrupt_after = CPU_CONTEXT, disturbed, 80
    with pytest.raises(KeyboardInterrupt):
        calibrated(tmp_path / "work", "memset", device="cpu")
    simulated.interrupt_after, simulated.asked = 0, []
    simulated.refuses = lambda item: "RuntimeError: bad luck." if item.visit == 2 and item.id[0] in "02468ace" else ""
    found = calibrated(tmp_path / "work", "memset", device="cpu", resume=True)
    assert max(item.visit for item in simulated.asked) > 2
    # A visit adds a row and takes nothing away; one that fails leaves the benchmark as it was.
    frame = read_kernels(tmp_path / "work", "memset")
    first = frame[frame.variant == "warm"]
    assert found.profile.entries_of(Family.MEMSET)[0].rows == (first.split == "fit").sum()
    assert first.id.is_unique and set(first.id) == set(frame.id) == set(frame[frame.variant == "cold"].id)
    failed = {item.id for item in simulated.asked if simulated.refuses(item)}
    second = frame[frame.variant == "warm 2"].id
    assert len(second) and second.is_unique and failed and not failed & set(second)
    lines = [line for line in Results.read(tmp_path / "work").lines.values() if line.name == "memset"]
    assert len(lines) == len(first) and {line.status for line in lines} == {"ok"}


def on(**hardware: Any) -> dict[str, Any]:
    return {**CONTEXT, "hardware": {**CONTEXT["hardware"], **hardware}}


@pytest.mark.parametrize(("device", "before", "after", "told"), [
    ("cuda", CONTEXT, on(multi_processor_count=60),
     r"on NVIDIA H200 \(132 units\) and this is NVIDIA H200 \(60 units\)"),
    ("cpu", CPU_CONTEXT, {**CPU_CONTEXT, "hardware": {"device": "CPU", "cpu": "Another CPU"}},
     r"on CPU \(Some CPU\) and this is CPU \(Another CPU\)")], ids=["a part", "CPU"])
def test_another_device_is_refused_before_it_is_measured(simulated: Bench0, tmp_path: Path, device: str,
                                                         before: dict[str, Any], after: dict[str, Any], told: str
                                                         ) -> None:
    """Its measurements would be worth nothing there, and those that are there nothing with them."""
    simulated.context = before
    calibrated(tmp_path / "work", "memset", device=device, minutes=0.3)
    simulated.context, simulated.asked = after, []
    with pytest.raises(CalibrationError, match=told):
        calibrated(tmp_path / "work", "memset", device=device, resume=True)
    assert not simulated.asked


def test_a_folder_of_unknown_runs_or_of_two_devices_is_not_fitted(simulated: Bench0, tmp_path: Path) -> None:
    calibrated(tmp_path / "work", "memset", minutes=0.3)
    path = tmp_path / "work" / "kernels" / "memset.parquet"
    frame = read_kernels(tmp_path / "work", "memset")
    for session in (3, -1, 0):
        frame.loc[0, "session"] = session
        frame.to_parquet(path)
        if session:
            with pytest.raises(CalibrationError, match="changed or damaged"):
                fit_measurements(tmp_path / "work", [Family.MEMSET])
    results = Results(tmp_path / "work")
    results.open("calibration", "", resume=True, rehearsal=False)
    results.begin_session(on(device="NVIDIA A100-SXM4-80GB"))
    results.close()
    with pytest.raises(CalibrationError, match=r"several devices \(NVIDIA H200 .*NVIDIA A100"):
        fit_measurements(tmp_path / "work", [Family.MEMSET])


def test_a_folder_without_a_measurement_is_not_fitted(simulated: Bench0, tmp_path: Path) -> None:
    results = Results(tmp_path / "none")
    results.open("calibration", "", resume=False, rehearsal=False)
    results.begin_session(CONTEXT)
    results.close()
    with pytest.raises(CalibrationError, match="no measurement to fit to"):
        fit_measurements(tmp_path / "none", [Family.MEMSET])
    simulated.refuses = lambda item: "OSError: libcuda.so.1: no such file." if item.name == "memset" else ""
    with pytest.raises(CalibrationError, match=r"no measurement of memset \(memset was given up .*no such file\)"):
        calibrated(tmp_path / "work", "memset")


OLD = "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update it."


@pytest.mark.parametrize(("reason", "device", "told"), [
    (OLD, "cuda", f"{OLD} --on cpu calibrates the CPU."),
    ("the process was ended by signal 9 (killed).", "cpu", "the process was ended by signal 9 (killed)."),
    ("ModuleNotFoundError: No module named 'torch'.", "cuda", "PyTorch is needed (pip install 'foretrace[capture]')")])
def test_why_nothing_can_be_measured_is_told_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str,
                                                   device: str, told: str) -> None:
    def take(**options: Any) -> None:
        raise NoWorkerError(reason)

    monkeypatch.setattr(runner, "Workers", lambda *_: SimpleNamespace(take=take, close=lambda: None))
    with pytest.raises(CalibrationError) as error:
        calibrated(tmp_path / "work", "memset", device=device)
    assert told in str(error.value) and str(error.value).startswith("Nothing can be measured here: ")
    assert not (tmp_path / "work").exists()


def test_a_gpu_that_torch_does_not_see_is_named_where_the_cpu_is_calibrated(
        simulated: Bench0, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulated.context = CPU_CONTEXT
    monkeypatch.setattr(run, "torch_sees_gpu", lambda: False)
    monkeypatch.setattr(run, "find_gpus", lambda: [object()])
    found = calibrated(tmp_path / "work", "memset", device="auto")
    assert found.profile.device.name == "cpu"
    assert any("does not see this machine's GPU" in note for note in found.notes)


def kept(task: Task) -> list[Answer]:
    """Answer as a worker that keeps the graph of a captured step."""
    name = f"{task.item.file_stem}.foretrace"
    read_job(TRACE).graphs[0].save(Path(task.folder) / name)
    return [Answer("measured", values={"median_ns": 10**6}),
            Answer("done", values={"median_ns": 10**6, "content": "graph"}, file=name)]


def lost(task: Task) -> list[Answer]:
    """Answer as a worker that cannot read the trace that it recorded."""
    return [Answer("measured", values={"median_ns": 10**6}), Answer("done", values={
        "median_ns": 10**6, "content": "times", "notes": ["The trace could not be kept: no kernels."]})]


def refused(graphs: Any) -> HostOverheads:
    raise ForetraceError("It has no steps.")


OVERHEADS = HostOverheads({}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(("capture", "host", "told"), [
    (kept, lambda graphs: OVERHEADS, ""), (kept, refused, "could not be fitted: It has no steps."),
    (no_capture, lambda graphs: OVERHEADS, "was not kept: NotImplementedError: simulated."),
    (lost, lambda graphs: OVERHEADS, "was not kept: The trace could not be kept: no kernels.")])
def test_a_profile_without_the_hosts_overheads_says_why(simulated: Bench0, tmp_path: Path, capture: Any, host: Any,
                                                        told: str) -> None:
    simulated.capture, simulated.seconds = capture, 3.0
    found = calibrated(tmp_path / "work", "memset", minutes=2.2, host=host)
    assert (found.profile.host is OVERHEADS) == (not told)
    notes = [note for note in found.notes if "overheads" in note and "measurements of" not in note]
    assert [told in note for note in notes] == [True] * bool(told)
    assert len([item for item in simulated.asked if item.name == "overheads"]) == 4


def test_a_process_that_was_started_ahead_does_not_idle_on_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path
                                                                     ) -> None:
    """It would count as another one that computes there."""
    alive: list[Any] = []

    class Worker:
        tasks_done = 0

        def __init__(self, *_: Any) -> None:
            alive.append(self)

        def wait_ready(self) -> None:
            pass

        def kill(self) -> None:
            alive.remove(self)

    monkeypatch.setattr(processes, "Worker", Worker)
    workers = processes.Workers("cuda", 0, tmp_path)
    captured = workers.take(fresh=True)
    captured.tasks_done = 1
    workers.prepare_next()
    assert len(alive) == 2
    ahead = workers.take(fresh=False)
    assert alive == [ahead] and ahead is not captured
    assert workers.take(fresh=False) is ahead
    workers.close()
    assert not alive


def test_families_whose_minutes_are_over_get_the_formulas_and_a_word(
        simulated: Bench0, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calibrated(tmp_path / "work", "memset", "softmax", minutes=0.3)
    notes: list[str] = []
    late = fit_measurements(tmp_path / "work", [Family.MEMSET, Family.SOFTMAX], None, notes,
                            until=simulated.clock_s - 1)
    assert [entry.kind for entry in late.entries] == ["roofline"] * 2
    assert any("The minutes were over before memset, softmax could be fitted" in note for note in notes)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: 0.0))  # the search has the machine's clock
    early = fit_measurements(tmp_path / "work", [Family.MEMSET], None, notes, until=0.5)
    assert any("models of memset are what their share of the minutes allowed" in note for note in notes)
    call = calls_of_benchmark("memset", {"bytes": 1 << 24})[0]
    times = [float(price([call], one.device, one).time_us[0]) for one in (late, early)]
    assert times[0] == pytest.approx(simulated.law(call), rel=0.5) and times[1] == pytest.approx(times[0], rel=0.5)


@pytest.mark.parametrize(("change", "told"), [
    ({"seconds": 1.5}, "memset rests on"),
    ({"disturbed": lambda at_s, rng=np.random.default_rng(0): float(rng.uniform(0.5, 1.5))},  # noqa: B008
     "Runs of one measurement scatter by")])
def test_few_measurements_and_times_that_scatter_are_told(simulated: Bench0, tmp_path: Path, change: dict[str, Any],
                                                          told: str) -> None:
    vars(simulated).update(change)
    assert any(told in note for note in calibrated(tmp_path / "work", "memset", minutes=0.4).notes)


def item(size: int) -> Item:
    return kernel_item("memset", FAMILIES["memset"].checked({"bytes": size}), seconds=0.1)


def test_a_benchmark_is_visited_later_and_later_until_two_visits_agree() -> None:
    visits = Visits(begun_s=0.0, time_s=96.0)
    visits.add(item(64), 100.0, now_s=10.0)
    assert visits.due(15.9) is None
    again = visits.due(16.0)
    assert again is not None and again.visit == 2 and again.id == item(64).id
    assert not visits.took(again, 130.0, now_s=16.0)  # slower: no agreement
    assert visits.due(31.9) is None
    again = visits.due(32.0)
    assert again is not None and again.visit == 3
    assert visits.took(again, 95.0, now_s=32.0)  # 100 and 95 agree
    assert visits.due(1e9) is None
    assert visits.spread() == [pytest.approx(130 / 95 - 1)]


def test_visits_that_never_agree_end_and_one_that_took_no_time_is_not_compared() -> None:
    visits = Visits(begun_s=0.0, time_s=96.0)
    visits.add(item(64), 0.0, now_s=0.0)
    again = visits.due(10.0)
    assert again is not None
    visits.took(again, 1.0, now_s=10.0)
    assert visits.spread() == []
    visits = Visits(begun_s=0.0, time_s=96.0)
    visits.add(item(64), 100.0, now_s=0.0)
    for number, time_us in enumerate((80.0, 64.0, 51.0)):
        again = visits.due(1e6 * (number + 1))
        assert again is not None
        visits.took(again, time_us, now_s=1e6 * number)
    assert visits.due(1e9) is None and len(GAPS) == 3
    # Near the end visits come early.
    visits = Visits(begun_s=0.0, time_s=100.0)
    visits.add(item(64), 100.0, now_s=84.0)
    visits.add(item(128), 100.0, now_s=84.5)
    assert visits.due(84.9) is None  # due at 90.25
    first, second = visits.due(86.0), visits.due(86.0)
    assert first is not None and second is not None and {first.id, second.id} == {item(64).id, item(128).id}
    assert visits.due(86.0) is None
    visits.took(first, 50.0, now_s=86.0)
    assert visits.due(86.5) is None  # within a second of the last one it would see the same disturbance


def test_the_quickest_visit_has_the_times_and_the_first_one_the_rest() -> None:
    rows = [{"id": "a", "variant": "warm", "p10_us": 9.0, "p50_us": 11.0, "kernels": ["k"]},
            {"id": "a", "variant": "cold", "p10_us": 1.0, "p50_us": 1.0, "kernels": ["k"]},
            {"id": "a", "variant": "warm 2", "p10_us": 7.0, "p50_us": 8.0, "kernels": None},
            {"id": "a", "variant": "warm 3", "p10_us": 8.0, "p50_us": 8.5, "kernels": None},
            {"id": "b", "variant": "warm", "p10_us": 5.0, "p50_us": 6.0, "kernels": ["l"]},
            {"id": "c", "variant": "warm 2", "p10_us": 5.0, "p50_us": 6.0, "kernels": None}]
    others = dict.fromkeys(("runs", "min_us", "p25_us", "p75_us", "p90_us", "event_overhead_us"), 1.0)
    frame = pandas.DataFrame([{**others, **row} for row in rows])
    found = tables.quickest_visits(frame)
    assert found.id.tolist() == ["a", "b"]
    assert found.p10_us.tolist() == [7.0, 5.0] and found.p50_us.tolist() == [8.0, 6.0]
    assert found.kernels.tolist() == [["k"], ["l"]]
