"""What GPUs say of themselves, through stand-ins of their libraries; and ``foretrace doctor`` on this machine."""

from __future__ import annotations

import json
import shutil
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
from said import Run
from simulated_gpu.amdsmi import SimulatedAmdSmi
from simulated_gpu.cuda import SimulatedProperties, simulate_cuda
from simulated_gpu.driver import SimulatedGpu, simulated_torch
from simulated_gpu.nvml import SimulatedDevice, SimulatedNvml

from tracer.capture import readiness
from tracer.capture.context import ClockLog
from tracer.capture.readiness import MachineCheck, MachineVerdict
from tracer.capture_layout import read_capture
from tracer.gpu_state import SLOWED, GpuDevices, find_gpus, main_device, own_device, place_in_use

CPU_SMALL = Path(__file__).resolve().parents[2] / "traces" / "bert-cpu"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimulatedNvml:
    """Two devices: one held back by power, one that answers nothing but what it is."""
    module = SimulatedNvml([
        SimulatedDevice("GPU-a", reasons=0x4 | 0x1),  # 0x1 is idling
        SimulatedDevice("GPU-b", "00000000:86:00.0", "NVIDIA A2", refuses={"all"})])
    monkeypatch.setitem(sys.modules, "pynvml", module)
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    return module


@pytest.fixture
def amdsmi(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch) -> SimulatedAmdSmi:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    module = SimulatedAmdSmi(4)
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    return module


def gpus() -> GpuDevices:
    devices = find_gpus()
    assert devices is not None
    return devices


@pytest.mark.parametrize(("kinds", "verdict", "said"), [
    ("", "problem", "it recorded no operation"), ("CPU", "problem", "operations arrive, the device's kernels do not"),
    ("CPU CUDA", "ok", "operations and kernels arrive")])
def test_the_doctor_says_what_the_profiler_sees_of_a_gpu(kinds: str, verdict: str, said: str,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    events = [types.SimpleNamespace(name="aten::mm", device_type=f"DeviceType.{kind}") for kind in kinds.split()]
    with simulated_torch(SimulatedGpu(), monkeypatch) as torch:
        monkeypatch.setattr(torch.profiler, "profile", lambda **_: nullcontext(
            types.SimpleNamespace(events=lambda: events)))
        check, = readiness._profile()
    assert (check.verdict.value, check.found) == (verdict, said)


def test_a_device_tells_what_it_can(nvml: SimulatedNvml) -> None:
    devices = gpus()
    first, second = devices.state(0), devices.state(1)
    assert (len(devices), first.name, first.driver, first.sm_mhz, first.max_sm_mhz, first.power_w, first.bus) == (
        2, "NVIDIA H200", "580.1", 1200, 1980, 699.5, "0000:3b:00")
    assert first.slowed_by == ("its power limit",) and first.processes == 2 and first.busy == 0.97
    assert first.memory_bytes - first.used_bytes == 140 << 30
    assert (second.name, second.sm_mhz, second.processes, second.memory_bytes) == ("NVIDIA A2", 0, -1, -1)
    nvml.devices[0].refuses.add("nvmlDeviceGetCurrentClocksEventReasons")  # a driver before 535
    assert devices.state(0).slowed_by == ("its power limit",)


def test_an_amd_device_tells_what_it_can(amdsmi: SimulatedAmdSmi) -> None:
    amdsmi.throttled = True
    devices = gpus()
    found = devices.state(1)
    assert (len(devices), found.name, found.driver, found.sm_mhz, found.max_sm_mhz, found.memory_mhz) == (
        4, "AMD Instinct MI300X", "6.12.12", 1400, 2100, 1300)
    assert (found.power_w, found.power_limit_w, found.busy, found.processes, found.temperature_c) == (
        710, 750, 0.88, 1, 64)
    assert (found.memory_bytes, found.used_bytes) == (192 << 30, 2 << 30)
    assert found.slowed_by == ("its power limit",) and found.bus == "0000:c2:00" and found.uuid.startswith("01ff74a1")
    amdsmi.older = True
    older = devices.state(1)
    assert (older.power_w, older.power_limit_w, older.slowed_by) == (290, 300, ())
    amdsmi.count = 0
    assert find_gpus(by_library=True) is None


def test_reasons_are_those_of_the_library() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    assert list(SLOWED) == [getattr(pynvml, f"nvmlClocksThrottleReason{name}") for name in names]


@pytest.mark.parametrize(("rank", "visible", "number"), [("3", 8, 3), ("3", 1, 0), ("²", 8, 0), ("", 8, 0)])
def test_a_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch, rank: str, visible: int, number: int) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    assert own_device() == number


@pytest.mark.parametrize(("visible", "rank", "place"), [
    ("", "", 0), ("", "1", 1), ("", "2", None), ("", "²", 0), ("", "9" * 5000, 0),
    ("1", "5", 1), ("1,0", "1", 0), ("GPU-b", "", 1), ("b, GPU-a", "1", 0), ("GPU-z,0", "", None),
    ("²", "", None), ("7", "", None), ("-1", "", None),
    ("MIG-part", "", 1), ("MIG-none", "", None), ("MIG-GPU-b/1/0", "", 1)])
def test_the_environment_chooses_the_device(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch,
                                            visible: str, rank: str, place: int | None) -> None:
    nvml.parts = (SimulatedDevice("MIG-part", parent=nvml.devices[1]),)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")  # of another maker
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("LOCAL_RANK", rank)):
        if value:
            monkeypatch.setenv(name, value)
    assert place_in_use(gpus()) == place


@pytest.mark.parametrize(("variables", "place"), [
    ({"HIP_VISIBLE_DEVICES": "3,1"}, 3),
    ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, 3),
    ({"ROCR_VISIBLE_DEVICES": "GPU-02ff74a1-0000-1000-80ac-000000000002,1", "LOCAL_RANK": "1"}, 1)])
def test_the_environment_chooses_an_amd_device(amdsmi: SimulatedAmdSmi, monkeypatch: pytest.MonkeyPatch,
                                               variables: dict[str, str], place: int) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert place_in_use(gpus()) == place


@pytest.mark.parametrize(("device", "place"), [
    (SimulatedProperties(uuid="b"), 1), (SimulatedProperties(uuid="?", bus=0x86), 1), (SimulatedProperties(), 0)])
def test_pytorchs_device_is_found_among_the_machines(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch,
                                                     device: SimulatedProperties, place: int) -> None:
    """CUDA may number devices otherwise than the driver: by speed."""
    simulate_cuda(monkeypatch, [device])
    assert place_in_use(gpus()) == place


def an_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, rows: str, processes: str) -> None:
    """A machine without the libraries, with a command ``nvidia-smi``."""
    for module in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, module, None)
    (folder / "nvidia-smi").write_text(
        f"#!/bin/sh\ncase $1 in --query-gpu*) printf '%s\\n' '{rows}';; *) {processes};; esac\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_command_tells_the_place_too(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    an_smi(monkeypatch, tmp_path, "\n".join(
        f"NVIDIA A2, 550.1, 900, 6000, 1770, 40.1, 60.0, 50, 0x0000000000000008, 15000, 100, 3, GPU-{each}, "
        f"00000000:{bus}:00.0" for each, bus in (("a", "3B"), ("b", "86"))), "echo '7, GPU-b'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert place_in_use(gpus()) == 1
    state = gpus().state(1)
    assert (state.bus, state.processes, state.slowed_by) == ("0000:86:00", 1, ("a hardware slow-down",))


def test_words_in_the_place_of_numbers_are_not_known(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch,
                                                     tmp_path: Path) -> None:
    """As ``nvidia-smi`` writes them of a virtual GPU, of one that is lost, and of older drivers."""
    an_smi(monkeypatch, tmp_path, "NVIDIA A2, 550.1, [N/A], [Not Supported], [Unknown Error], ERR!, 60.0, , Active, "
           "15000, [N/A], 3, GPU-a, 00000000:3B:00.0", "exit 6")
    state = gpus().state(0)
    assert (state.name, state.sm_mhz, state.max_sm_mhz, state.power_w, state.temperature_c, state.processes) == (
        "NVIDIA A2", 0, 0, 0, 0, -1)
    assert state.power_limit_w == 60.0 and state.slowed_by == () and state.used_bytes == -1


@pytest.mark.parametrize(("device", "verdict", "said"), [
    (SimulatedDevice("GPU-a"), "note", "1200 of 1980 MHz, 700 of 700 W; 2 processes compute on it"),
    (SimulatedDevice("GPU-a", reasons=0x4), "note", "slowed by its power limit"),
    (SimulatedDevice("GPU-a", refuses={"all"}), "ok", "NVIDIA H200, driver 580.1")])
def test_the_doctor_says_what_hinders_a_gpu(nvml: SimulatedNvml, device: SimulatedDevice, verdict: str, said: str
                                            ) -> None:
    nvml.devices[:] = [device]
    (found,) = readiness._gpus()
    assert (found.subject, found.verdict.value) == ("GPU 0", verdict) and said in found.found
    assert bool(found.advice) == (verdict == "note")


@pytest.mark.parametrize(("text", "user", "found"), [
    ("RmProfilingAdminOnly: 1", 1000, "the administrator's alone"), ("RmProfilingAdminOnly: 1", 0, "allowed"),
    ("RmProfilingAdminOnly: 0", 1000, "allowed"), ("", 1000, "allowed"), (None, 1000, "")])
def test_the_doctor_says_whose_the_counters_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None,
                                                user: int, found: str) -> None:
    monkeypatch.setattr(readiness, "ADMIN_ONLY", tmp_path / "params")
    monkeypatch.setattr(readiness.os, "geteuid", lambda: user)
    if text is not None:
        (tmp_path / "params").write_text(f"EnableMSI: 1\n{text}\n")
    assert [found in check.found for check in readiness._counters()] == [True] * bool(found)


OLD = "The NVIDIA driver on your system is too old (found version 11040)"


@pytest.mark.parametrize(("build", "variable", "value"), [
    ("CUDA", "CUDA_VISIBLE_DEVICES", "nonsense"), ("HIP", "HIP_VISIBLE_DEVICES", ""), ("CUDA", "", ""),
    ("HIP", "ROCR_VISIBLE_DEVICES", "-1"), ("CPU", "", "")])
def test_the_doctor_says_that_torch_does_not_see_a_gpu_and_why(
        nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, build: str) -> None:
    torch = pytest.importorskip("torch")

    def refuse() -> None:
        raise RuntimeError(f"{OLD}.\nPlease update it.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if build == "CUDA" else None)
    monkeypatch.setattr(torch.version, "hip", "7.0" if build == "HIP" else None)
    if variable:
        monkeypatch.setenv(variable, value)
    unseen, profiler = readiness._profile()
    assert (unseen.subject, unseen.verdict, profiler.verdict) == (
        "GPU of PyTorch", MachineVerdict.PROBLEM, MachineVerdict.OK)
    hidden = f"{variable}={value}; " if variable else ""
    assert unseen.found == ("none: it is a build for CPUs" if build == "CPU" else
                            f"none: {hidden}{OLD}. Please update it")
    assert unseen.advice
    monkeypatch.setitem(sys.modules, "pynvml", SimulatedNvml([]))
    monkeypatch.setenv("PATH", "")
    assert [check.subject for check in readiness._profile()] == ["profiler"]  # a machine without a GPU


@pytest.mark.parametrize(("governor", "verdict"), [("powersave", "note"), ("performance", "ok")])
def test_the_doctor_says_if_the_processor_saves_power(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, governor: str,
                                                      verdict: str) -> None:
    monkeypatch.setattr(readiness, "GOVERNOR", tmp_path / "governor")
    (tmp_path / "governor").write_text(f"{governor}\n")
    (found,) = [check for check in readiness._processor() if check.subject == "processor's clock"]
    assert (found.verdict.value, found.found) == (verdict, f"governor {governor}")


def test_what_a_device_or_an_allocator_does_not_tell_is_no_error(nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch
                                                                 ) -> None:
    nvml.devices[0].refuses.add("nvmlDeviceGetUUID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    devices = gpus()
    assert devices.state(0).uuid == "" and place_in_use(devices) == 1
    simulate_cuda(monkeypatch, [SimulatedProperties("?")], allocated=0)
    assert main_device() is None and place_in_use(devices) == 1  # by the environment, which leaves it one

    def uncounted(device: int) -> int:
        raise RuntimeError("the pluggable allocator keeps no count")

    monkeypatch.setattr("torch.cuda.max_memory_allocated", uncounted)
    assert main_device() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    log = ClockLog()
    log.note("the timed steps")
    assert log.to_json() == {}
    monkeypatch.setattr("tracer.gpu_state.devices_in_use", lambda: [0, 1, 2])
    monkeypatch.setattr("tracer.gpu_state._most_bytes", {0: 5, 1: 9, 2: 1}.__getitem__)
    assert main_device() == 1


def test_a_library_that_prints_is_not_heard_and_none_is_no_error(
        nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    (tmp_path / "amdsmi.py").write_text("print('no libamd_smi.so')\nraise KeyError('libamd_smi.so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_gpus(by_library=True) is None and capsys.readouterr().out == ""
    monkeypatch.setenv("PATH", "")
    assert find_gpus() is None
    log = ClockLog()
    log.note("timed")
    assert log.to_json() == {}


def test_a_clock_that_was_held_back_is_told_where_the_capture_is_read(
        nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulate_cuda(monkeypatch, [SimulatedProperties("a")])
    log = ClockLog()
    log.note("the timed steps")
    nvml.devices[0].reasons = 0
    log.note("the profiled steps")
    nvml.devices[0].refuses.add("nvmlDeviceGetName")
    log.note("the profiled steps")  # a driver that fails during a training does not end it
    part = shutil.copytree(next(CPU_SMALL.rglob("context.json")).parent, tmp_path / "rank0")
    context = json.loads((part / "context.json").read_text())
    (part / "context.json").write_text(json.dumps({**context, **log.to_json()}))
    (note,) = (note for note in read_capture(tmp_path).notes if "clock" in note)
    assert "held back by its power limit in 1 of 2 samples" in note
    for damage in ({"rows": 3}, {"columns": ["slowed_by"], "rows": [4, [None], []]}, []):
        (part / "context.json").write_text(json.dumps({**context, "gpu_samples": damage}))
        assert not any("clock" in note for note in read_capture(tmp_path).notes)


def test_the_doctor_looks_at_this_machine(run: Run, tmp_path: Path) -> None:
    ran = run("doctor", "--no-record", "--out", tmp_path)
    assert ran.code == 0 and "PyTorch" in ran.out and "can be written" in ran.out and "kept in" in ran.out
    ran = run("doctor", "--json", "--out", tmp_path / "none")
    told = {each["subject"]: (each["verdict"], each["found"]) for each in json.loads(ran.out)}
    assert ran.code == 1 and told["captures' directory"][0] == "problem" and told["profiler"] == (
        "ok", "operations arrive")
    assert "cannot be written" in told["captures' directory"][1]


def test_a_check_that_fails_itself_is_a_note(monkeypatch: pytest.MonkeyPatch, nvml: SimulatedNvml) -> None:
    monkeypatch.setattr("tracer.capture.context.cpu_model", lambda: 1 / 0)
    found = list(readiness.examine(Path(), record=False))
    assert MachineCheck("processor", MachineVerdict.NOTE, "could not be looked at: division by zero") in found
    held_back = next(each for each in found if each.subject == "GPU 0")
    assert held_back.verdict is MachineVerdict.NOTE and "slowed by its power limit" in held_back.found
