"""The capture hook on simulated GPUs: what it times, waits for, samples and says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forks import run_ranks
from said import plain
from simulated_gpu.amdsmi import SimulatedAmdSmi
from simulated_gpu.cuda import SimulatedCuda, SimulatedProperties, simulate_cuda
from simulated_gpu.nvml import SimulatedDevice, SimulatedNvml

torch = pytest.importorskip("torch")

import tracer  # noqa: E402
from tracer.capture import CaptureOptions  # noqa: E402
from tracer.capture.context import FreeRunning, tf32_in_use  # noqa: E402
from tracer.capture_layout import read_context  # noqa: E402
from tracer.graph import NONE  # noqa: E402

STEP_S = 0.0029
WINDOWS = {"steps": 2, "warmup": 2, "timed": 3, "execution_trace": "apart"}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimulatedNvml:
    for name in ("TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT"):
        monkeypatch.delenv(name, raising=False)
    module = SimulatedNvml([SimulatedDevice("GPU-a"), SimulatedDevice("GPU-b", "00000000:86:00.0", sm_mhz=900)])
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def record(out: Path, step: Callable[[], Any], **options: Any) -> Any:
    with tracer.capture(out, **{**WINDOWS, **options}) as capture:
        while not capture.finished:
            torch.ones(4) + 1
            step()
            capture.step()
    return capture


@pytest.mark.parametrize(("seconds", "cycles"), [(0.0, 1), (0.001, 2)])
def test_sampling_is_in_no_measured_step(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                         seconds: float, cycles: int) -> None:
    gpus = simulate_cuda(monkeypatch, [SimulatedProperties("a"), SimulatedProperties("b")])
    nvml.wait = lambda: gpus.clock.wait(seconds)
    capture = record(tmp_path, lambda: gpus.clock.wait(STEP_S), cycles=cycles)
    assert capture.complete and len(gpus.borders) == 1 + 4 * cycles
    in_profile = np.diff(gpus.borders)[[4 * cycle + 2 + step for cycle in range(cycles) for step in range(2)]]
    for found in (in_profile, capture.profiled_step_ns, capture.unprofiled_step_ns, [capture.free_running.mean_ns]):
        assert np.allclose(found, STEP_S * 1e9, rtol=0.01)
    assert capture.slowdown == pytest.approx(1.0)
    context, job = read_context(tmp_path / "rank0"), tracer.read_job(tmp_path)
    rows = context["gpu_samples"]["rows"]
    assert [row[0] for row in rows] == [
        "the warm-up steps", "the free-running steps", *["the profiled steps"] * cycles]
    assert context["gpu_samples"]["device"] == 0 and {row[1] for row in rows} == {1200}
    assert {graph.meta.clock_mhz for graph in job.graphs} == {1200}
    assert not any("without a wait" in note for note in job.notes)


RANK = """
import sys
import pytest, torch
import torch.distributed as dist
from simulated_gpu.cuda import SimulatedProperties, simulate_cuda
from simulated_gpu.nvml import SimulatedDevice, SimulatedNvml
import tracer

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
of_two = [SimulatedProperties(f"{n}") for n in range(2)]
gpus = simulate_cuda(pytest.MonkeyPatch(), of_two, in_use=(rank,), current=rank)
devices = [SimulatedDevice(f"GPU-{n}", sm_mhz=1000 + 500 * n) for n in range(2)]
nvml = SimulatedNvml(devices, lambda: gpus.clock.wait(0.001))
sys.modules["pynvml"] = nvml if rank == 0 or sys.argv[2] == "both" else None
with tracer.capture(sys.argv[1], steps=3, warmup=1, timed=5, execution_trace="none") as capture:
    while not capture.finished:
        gpus.clock.wait(0.008)
        now = torch.tensor(gpus.clock.now_ns)
        dist.all_reduce(now, dist.ReduceOp.MAX)  # the step's collective: each rank waits for the other
        gpus.clock.now_ns = int(now)
        capture.step()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
                    reason="torch was built without gloo")
@pytest.mark.parametrize("who", ["one", "both"])
def test_a_rank_that_samples_does_not_make_another_wait(tmp_path: Path, who: str) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    run_ranks(2, tmp_path / "rank.py", tmp_path / "job", who)
    contexts = [read_context(tmp_path / "job" / f"rank{rank}") for rank in range(2)]
    for name in ("unprofiled_step_ns", "profiled_step_ns"):
        assert all(np.allclose(context[name], 8e6, rtol=0.02) for context in contexts), name
    samples = [context.get("gpu_samples", {"device": None, "rows": []}) for context in contexts]
    assert [each["device"] for each in samples] == [0, 1 if who == "both" else None]
    assert [row[1] for each in samples for row in each["rows"]] == [1000] * 3 + [1500] * 3 * (who == "both")
    assert [context["timing"]["waited_for"] for context in contexts] == [[0], [1]]
    unlike = "The ranks' GPUs ran at different clocks: rank 0's at 1,000 MHz, rank 1's at 1,500 MHz."
    assert (unlike in tracer.read_job(tmp_path / "job").notes) == (who == "both")


def test_every_device_in_use_is_waited_for(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch,
                                           tmp_path: Path) -> None:
    """Two of three devices work, the second for longer, and is not the current one."""
    gpus = simulate_cuda(monkeypatch, [SimulatedProperties(str(each)) for each in range(3)], in_use=(0, 2))
    capture = record(tmp_path, lambda: (gpus.launch(0, 0.001), gpus.launch(2, STEP_S)))
    assert set(capture.unprofiled_step_ns) == set(capture.profiled_step_ns) == {round(STEP_S * 1e9)}
    assert set(gpus.waited) == {0, 2} and read_context(tmp_path / "rank0")["timing"]["waited_for"] == [0, 2]
    monkeypatch.delattr(torch._C, "_cuda_hasPrimaryContext")  # a torch that does not tell
    assert tracer.gpu_state.devices_in_use() == [0]


@pytest.fixture
def running_ahead(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    """A step whose host part, 4 ms, runs beside the device's 20 ms of the step before."""
    return simulate_cuda(monkeypatch, [SimulatedProperties("a")])


def launch_ahead(gpus: SimulatedCuda) -> None:
    gpus.clock.wait(0.004)
    gpus.launch(0, 0.02)


def test_a_loop_that_runs_ahead_is_timed_too(running_ahead: SimulatedCuda, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    capture = record(tmp_path, lambda: launch_ahead(running_ahead), timed=6)
    assert set(capture.unprofiled_step_ns) == set(capture.profiled_step_ns) == {24_000_000}
    assert capture.free_running == FreeRunning(4, 4 * 20_000_000 + 4_000_000)
    context, job = read_context(tmp_path / "rank0"), tracer.read_job(tmp_path)
    assert context["timing"]["free_running"] == {"steps": 4, "ns": 84_000_000}
    assert ("rank0: the measured steps, 24.000 ms, end with idle devices, as the recorded ones do; 4 steps without a "
            "wait between them took 21.000 ms each.") in job.notes
    assert job.graphs[0].meta.unprofiled_step_ns == capture.unprofiled_step_ns  # these remain the measured step
    import_module("step_views.cli.capture")._report(capture, str(tmp_path))
    out = plain(capsys.readouterr().out)
    assert "Step without the profiler: 24.000 ms (median of 6" in out
    assert "Running ahead of the device: 21.000 ms (mean of 4 steps without a wait between them)" in out


def test_other_work_cuts_the_steps_that_run_free(running_ahead: SimulatedCuda, tmp_path: Path) -> None:
    with tracer.capture(tmp_path, **{**WINDOWS, "timed": 4}) as capture:
        for step in range(1, capture.options.total_steps + 1):
            launch_ahead(running_ahead)
            capture.step()
            if step == 2 + 4 + 2:
                running_ahead.clock.wait(0.1)
                capture.leave_out("an evaluation")
    assert capture.finished and capture.free_running == FreeRunning(2, 2 * 20_000_000 + 4_000_000)
    assert "4 timed + 4 free-running + 2 profiler warm-up" in capture.options.parts
    assert CaptureOptions(timed=0).free_running == 0


@pytest.mark.parametrize(("seconds", "drawn"), [(0.02, [1, 8, 9, 12, 13]), (2, list(range(1, 14)))])
def test_progress_is_not_drawn_before_a_measured_step(running_ahead: SimulatedCuda, tmp_path: Path, seconds: float,
                                                      drawn: list[int]) -> None:
    """Steps from the third to the eighth, and the eleventh and the twelfth, are measured."""
    found: list[int] = []
    capture = tracer.capture(tmp_path, **WINDOWS)
    capture.progress = lambda done, needed: found.append(done)
    with capture:
        while not capture.finished:
            running_ahead.clock.wait(seconds)
            capture.step()
    assert found == drawn and capture.options.total_steps == 13


@pytest.mark.parametrize(("in_use", "allocated", "device"), [((), 0, "CPU"), ((0,), 0, "CPU"),
                                                            ((0, 1), 1 << 20, "NVIDIA H200")])
def test_the_device_is_where_the_program_ran(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                             in_use: tuple[int, ...], allocated: int, device: str) -> None:
    """On a machine with a GPU, whose profiler lists it whatever ran."""
    gpus = simulate_cuda(monkeypatch, [SimulatedProperties("b"), SimulatedProperties("a")], in_use=in_use,
                         allocated=allocated)
    capture = record(tmp_path, lambda: gpus.clock.wait(STEP_S))
    context = read_context(tmp_path / "rank0")
    assert context["hardware"]["device"] == device and ("gpu_samples" in context) == bool(in_use)
    assert ("allocated_bytes" in context["peak_memory"]) == bool(allocated)
    assert context["profiler"]["cupti_kept"] and capture.complete and gpus.in_use == in_use
    if allocated:
        assert context["hardware"]["total_memory"] == 143 << 30 and context["hardware"]["clocks"]["sm_mhz"] == 900
    graph = tracer.read_job(tmp_path).graphs[0]
    assert graph.meta.device == ("" if device == "CPU" else device)
    assert (graph.meta.device_memory_bytes == NONE) == (device == "CPU")


@pytest.mark.parametrize(("device", "cycles"), [("cpu", 1), ("cuda", 2)])
def test_cupti_is_kept_between_windows(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                       device: str, cycles: int) -> None:
    """Whether or not a graph is captured, which a profiler cannot know before."""
    wanted = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"} if device == "cuda" else {}
    prepared, true = [], torch.profiler.profile.prepare_trace

    def prepare_trace(self: Any) -> None:
        prepared.append({name: value for name, value in os.environ.items() if "CUPTI" in name})
        true(self)

    monkeypatch.setattr(torch.profiler.profile, "prepare_trace", prepare_trace)
    if device == "cuda":
        monkeypatch.setenv("TEARDOWN_CUPTI", "1")  # the program's own choice would crash its second window
        gpus = simulate_cuda(monkeypatch, [SimulatedProperties("a")])
    record(tmp_path, lambda: gpus.clock.wait(STEP_S) if wanted else None, cycles=cycles)
    assert prepared == [wanted] * cycles
    assert read_context(tmp_path / "rank0")["profiler"]["cupti_kept"] == bool(wanted)


def test_an_amd_gpu_is_sampled(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    smi = SimulatedAmdSmi(2)
    smi.throttled = True
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    gpus = simulate_cuda(monkeypatch, [SimulatedProperties(bus=0xc2)])
    record(tmp_path, lambda: gpus.clock.wait(STEP_S))
    samples = read_context(tmp_path / "rank0")["gpu_samples"]
    assert samples["device"] == 1 and gpus.current == 0
    assert samples["rows"][0] == ["the warm-up steps", 1400, 1300, 710.0, 64, ["its power limit"]]
    assert any("held back by its power limit in 3 of 3 samples" in note for note in tracer.read_job(tmp_path).notes)


@pytest.mark.parametrize("lacks", ["the class", "the option"])
def test_a_torch_without_synchronisation_events_records(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    from torch._C import _profiler

    from tracer.capture import recorder

    assert recorder._experimental_config() is not None
    if lacks == "the class":
        monkeypatch.delattr(_profiler, "_ExperimentalConfig")
    else:
        monkeypatch.setattr(_profiler, "_ExperimentalConfig", lambda verbose=False: None)
    assert recorder._experimental_config() is None


def test_tf32_before_torch_2_9_is_what_the_older_switches_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for matmul, cudnn in ((True, False), (False, True)):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=matmul))
        monkeypatch.setattr(torch.backends, "cudnn", SimpleNamespace(allow_tf32=cudnn))
        assert tf32_in_use() == (matmul, cudnn)
