"""The campaign's measuring code on simulated GPUs: what only runs on a device, with planted clocks and costs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated_gpu.driver import Driver, SimulatedGpu, simulated_torch

from tracer.campaign import lab as lab_module
from tracer.campaign import micro
from tracer.campaign.families import FAMILIES, Bench, overheads
from tracer.campaign.lab import CudaMachine, Lab
from tracer.campaign.plan import CampaignError
from tracer.campaign.processes import torch_gpus, torch_sees_gpu
from tracer.campaign.record import is_device_error, is_unsupported

ROOT = Path(__file__).resolve().parents[2]
MI300X = {"name": "AMD Instinct MI300X", "units": 304, "memory_bytes": 206_000_000_000, "l2_bytes": 4 << 20,
          "hip": "7.0"}

pytest.importorskip("torch", reason="measuring needs torch")

Start = Callable[..., tuple[SimulatedGpu, Any]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start torch with a simulated GPU: (figures) → (the GPU, torch)."""
    entered = []

    def started(**figures: Any) -> tuple[SimulatedGpu, Any]:
        gpu = SimulatedGpu(**figures)
        for module in (micro, overheads):
            monkeypatch.setattr(module, "time", gpu)
        context = simulated_torch(gpu, monkeypatch)
        entered.append(context)
        return gpu, context.__enter__()

    yield started
    for context in entered:
        context.__exit__(None, None, None)


def test_every_family_is_measured_on_a_gpu(start: Start) -> None:
    """The smallest setting of each space and backend; a CPU lacks some of a GPU's implementations."""
    gpu, _ = start(l2_bytes=1 << 20)
    lab, seen = Lab("cuda"), set()
    for family, space in ((each, space) for each in FAMILIES.values() for space in each.spaces):
        if space.device != "cuda" or family.name == "memset":
            continue
        sizes = {name: span.low if hasattr(span, "low") else span[0] for name, span in space.sizes.items()}
        settings = family.tiny(family.checked(family.fit({
            **sizes, **{name: values[0] for name, values in space.choices.items()}})))
        try:
            rows = micro.measure(family.name, settings, lab)
        except RuntimeError as error:
            assert is_unsupported(error), (family.name, settings)
            continue
        finally:
            lab.tidy()
        assert [row["variant"] for row in rows] == ["warm", "cold"]
        assert rows[0]["kernels"] == ["some_kernel"] and rows[0]["sm_clock_mhz"] == 1980
        kernels = rows[0]["p50_us"] / gpu.kernel_us  # no launch and no flush is among them
        assert kernels == pytest.approx(round(kernels)), family.name
        seen.add(family.name)
    assert {"gemm", "norm", "softmax", "copy", "fused", "recurrent"} <= seen


@pytest.mark.parametrize("figures", [{}, MI300X], ids=["NVIDIA", "AMD"])
def test_memory_is_set_by_the_devices_own_driver(start: Start, monkeypatch: pytest.MonkeyPatch,
                                                 figures: dict[str, Any]) -> None:
    gpu, torch = start(**{**figures, "memory_bytes": 1 << 28})
    driver = Driver(gpu)
    monkeypatch.setattr(lab_module.ctypes, "CDLL", driver.CDLL)
    rows = micro.measure("memset", {"bytes": 4096}, Lab("cuda"))
    assert rows[0]["p50_us"] == pytest.approx(gpu.kernel_us)
    target = torch.ones(64, dtype=torch.uint8)
    CudaMachine(torch).memset(target)
    assert not target.any() and len(driver.opened) == 2
    monkeypatch.delattr(torch.cuda, "clock_rate")  # without nvidia-ml-py it raises
    assert CudaMachine(torch).clock_mhz() is None
    failing = Driver(gpu, status=700)
    monkeypatch.setattr(lab_module.ctypes, "CDLL", failing.CDLL)
    with pytest.raises(RuntimeError, match=r"error: .*MemsetD8Async gave 700") as error:
        CudaMachine(torch).memset(target)
    assert is_device_error(str(error.value))


def test_the_runtime_that_torch_has_loaded_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = "7f00-7f01 r-xp 0 08:01 5 /opt/torch lib/libamdhip64.so.7.1\n7f02-7f03 rw-p 0 00:00 0\n"
    monkeypatch.setattr(lab_module.Path, "read_text", lambda self, **options: maps)
    assert lab_module._loaded("libamdhip64.so") == "/opt/torch lib/libamdhip64.so.7.1"
    assert lab_module._loaded("libcuda.so") == "libcuda.so"


@pytest.mark.parametrize(("figures", "least", "most"), [
    ({}, 200 << 20, 250 << 20), (MI300X, 512 << 20, 600 << 20), ({"l2_bytes": 0}, 512 << 20, 600 << 20),
    ({"memory_bytes": 1 << 30}, 64 << 20, 64 << 20)], ids=["H100", "MI300X", "unknown", "little memory"])
def test_the_flush_is_larger_than_the_last_cache(start: Start, monkeypatch: pytest.MonkeyPatch,
                                                 figures: dict[str, Any], least: int, most: int) -> None:
    _, torch = start(**figures)
    made: list[int] = []
    machine = CudaMachine(torch)
    monkeypatch.setattr(torch, "empty", lambda count, **options: made.append(4 * count) or torch.zeros(1))
    machine.flush()
    machine.flush()
    assert len(made) == 1 and least <= made[0] <= most


def test_a_stream_is_held_as_long_whatever_the_clock_does(start: Start) -> None:
    """An idle GPU's clock rises with the first work; the launch is not in the times all the same."""
    gpu, _ = start(clock_mhz=345.0, dispatch_us=40.0, memory_bytes=1 << 28)
    lab, bench = Lab("cuda"), Bench(lambda: (gpu.launch(3.0), gpu.launch(4.0)))
    lab.machine.scale_hold()
    for gpu.clock_mhz in (345.0, 1980.0, 1200.0):
        hold_us, run_us = micro._warm_up(bench, lab)
        for flush in (False, True):
            times = micro._repeat(bench, lab, hold_us, run_us, flush)
            assert times == pytest.approx([7.0] * micro.LEAST_RUNS), (gpu.clock_mhz, flush)  # steady at once


@pytest.mark.parametrize("case", overheads._CASES)
def test_overheads_are_those_planted(start: Start, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setitem(overheads.OVERLAP_SIZES, True, 64)
    gpu, _ = start(dispatch_us=6.0, kernel_us=3.0)
    rows = {row["variant"]: row["p50_us"] for row in micro.measure("overheads", {"case": case}, Lab("cuda"))}
    wanted = {"launch_idle": ("call", 6.02), "launch_busy": ("call", 6.02), "queue_depth": ("launches", 1023.0),
              "item": ("idle", 10.02), "synchronise": ("device_idle", 1.02), "events": ("record", 0.52),
              "graph": ("kernel_by_kernel", 3.01), "overlap": ("compute", 8 * 3.0)}[case]
    assert rows[wanted[0]] == pytest.approx(wanted[1], rel=0.03)
    if case == "graph":
        assert rows["one_replay"] == pytest.approx(overheads.CHAIN * 3.0)
    assert gpu.launched


def test_a_queue_that_never_fills_is_no_measurement(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    monkeypatch.setattr(overheads, "MOST_LAUNCHES", 0)
    with pytest.raises(RuntimeError, match="took no sample"):
        micro.measure("overheads", {"case": "queue_depth"}, Lab("cuda"))


# --- processes -------------------------------------------------------------------------------------------------------

TORCH = """
import os, types
seen = os.environ.get("CUDA_VISIBLE_DEVICES") != "-1"
cuda = types.SimpleNamespace(is_available=lambda: seen, device_count=lambda: 2 * seen)
"""


def test_torch_is_asked_for_a_gpu_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(TORCH, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert torch_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not torch_sees_gpu()

    def late(*arguments: Any, **options: Any) -> Any:
        raise subprocess.TimeoutExpired(arguments[0], 1)

    monkeypatch.setattr(subprocess, "run", late)
    assert not torch_sees_gpu()


def test_a_worker_of_the_gpu_tells_its_memory_and_one_without_a_gpu_says_so(
        start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from tracer.campaign.worker import _start

    _, torch = start()
    hardware = _start("cuda", 0)["hardware"]
    assert (hardware["device"], hardware["free_memory"]) == ("NVIDIA H100 80GB HBM3", 42_500_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"torch [\d.]+.* sees no CUDA device"):
        _start("cuda", 0)


def test_a_worker_gives_a_devices_memory_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from tracer.campaign.worker import _free_device_memory

    _, torch = start()
    given: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(True), raising=False)
    for initialized in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda there=initialized: there, raising=False)
        _free_device_memory()
        assert len(given) == initialized


@pytest.mark.parametrize(("settings", "why"), [
    ({"layout": "nn"}, "layout=nt only"), ({"op": "addmm"}, "layout=nt only"), ({"n": 24}, "multiples of 16"),
    ({"k": 8}, "multiples of 16")])
def test_products_in_fp8_are_those_that_torch_has(settings: dict[str, Any], why: str) -> None:
    gemm, wanted = FAMILIES["gemm"], {"m": 5, "n": 32, "k": 64, "dtype": "fp8", "layout": "nt"}
    called = gemm.called(gemm.checked(wanted))
    assert called.name == "aten::_scaled_mm" and called.flops == 2 * 5 * 32 * 64
    with pytest.raises(CampaignError, match=why):
        gemm.checked({**wanted, **settings})


@pytest.mark.parametrize(("reason", "broken"), [
    ("AcceleratorError: CUDA error: an illegal memory access was encountered.", True),
    ("RuntimeError: HIP error: unspecified launch failure.", True),
    ("OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB.", True),
    ("RuntimeError: Triton Error [HIP]: Code: 700.", True),
    ("RuntimeError: shape '[3]' is invalid for input of size 4.", False)])
def test_a_devices_errors_are_known_from_an_items(reason: str, broken: bool) -> None:
    assert is_device_error(reason) is broken
