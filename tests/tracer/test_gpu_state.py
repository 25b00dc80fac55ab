"""What GPUs say of themselves, through stand-ins of their libraries; and ``foretrace doctor`` on this machine."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from said import Run

from tracer.capture import readiness
from tracer.capture.context import ClockLog
from tracer.capture.readiness import MachineCheck, MachineVerdict
from tracer.capture_layout import read_capture
from tracer.gpu_state import find_gpus, place_in_use

CPU_SMALL = Path(__file__).resolve().parents[2] / "traces" / "bert-cpu"


class NvmlLike(types.ModuleType):
    """Two devices behind NVML's interface: one held back by power, one that answers nothing but its name."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        """NVML's own."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.reasons = 0x4 | 0x1  # 0x1 is idling
        self.nvmlInit = lambda: None
        self.nvmlSystemGetDriverVersion = lambda: b"580.1"
        self.nvmlDeviceGetCount = lambda: 2
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetName = lambda handle: ["NVIDIA H200", b"NVIDIA A2"][handle]
        first: dict[str, Any] = {
            "nvmlDeviceGetClockInfo": lambda kind: 1200 if kind == self.NVML_CLOCK_SM else 3201,
            "nvmlDeviceGetMaxClockInfo": lambda kind: 1980, "nvmlDeviceGetPowerUsage": lambda: 699_500,
            "nvmlDeviceGetEnforcedPowerLimit": lambda: 700_000, "nvmlDeviceGetTemperature": lambda kind: 71,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda: self.reasons,
            "nvmlDeviceGetMemoryInfo": lambda: types.SimpleNamespace(total=143 << 30, used=3 << 30),
            "nvmlDeviceGetUtilizationRates": lambda: types.SimpleNamespace(gpu=97),
            "nvmlDeviceGetComputeRunningProcesses": lambda: [object(), object()],
            "nvmlDeviceGetUUID": lambda: "GPU-a"}
        for name, answer in first.items():
            setattr(self, name, self._of_first(answer))

    def _of_first(self, answer: Any) -> Any:
        def ask(handle: int, *arguments: Any) -> Any:
            if handle:
                raise self.NVMLError("not supported")
            return answer(*arguments)

        return ask


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> NvmlLike:
    module = NvmlLike()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_a_device_tells_what_it_can(nvml: NvmlLike, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = find_gpus()
    assert devices is not None and len(devices) == 2
    first, second = devices.state(0), devices.state(1)
    assert (first.name, first.driver, first.sm_mhz, first.max_sm_mhz, first.power_w) == (
        "NVIDIA H200", "580.1", 1200, 1980, 699.5)
    assert first.slowed_by == ("its power limit",) and first.processes == 2 and first.busy == 0.97
    assert first.memory_bytes - first.used_bytes == 140 << 30
    assert (second.name, second.sm_mhz, second.processes, second.memory_bytes) == ("NVIDIA A2", 0, -1, -1)
    for chosen, place in (("", 0), ("1", 1), ("1,0", 1), ("GPU-a", 0), ("GPU-z", None), ("7", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert place_in_use(devices) == place


def test_without_a_library_or_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("PATH", "")
    assert find_gpus() is None
    log = ClockLog()
    log.note("timed")
    assert log.to_json() == {}


def test_a_clock_that_was_held_back_is_told_where_the_capture_is_read(nvml: NvmlLike, tmp_path: Path) -> None:
    log = ClockLog()
    log.note("the timed steps")
    nvml.reasons = 0
    log.note("the profiled steps")
    part = tmp_path / "rank0"
    part.mkdir()
    source = next(CPU_SMALL.rglob("context.json")).parent
    for file in source.iterdir():
        (part / file.name).write_bytes(file.read_bytes())
    context = json.loads((part / "context.json").read_text())
    (part / "context.json").write_text(json.dumps({**context, **log.to_json()}))
    (note,) = (note for note in read_capture(tmp_path).notes if "clock" in note)
    assert "held back by its power limit at the end of 1 of 2 measured steps" in note
    for damage in ({"rows": 3}, {"columns": ["slowed_by"], "rows": [4, [None], []]}, []):
        (part / "context.json").write_text(json.dumps({**context, "gpu_samples": damage}))
        assert not any("clock" in note for note in read_capture(tmp_path).notes)


def test_a_driver_that_fails_during_a_training_does_not_end_it(nvml: NvmlLike) -> None:
    log = ClockLog()
    log.note("the timed steps")

    def lost(handle: int) -> str:
        raise nvml.NVMLError("GPU is lost")

    nvml.nvmlDeviceGetName = lost
    log.note("the timed steps")
    nvml.nvmlDeviceGetName = lambda handle: "NVIDIA H200"
    log.note("the timed steps")
    assert len(log.to_json()["gpu_samples"]["rows"]) == 1


def test_the_doctor_looks_at_this_machine(run: Run, tmp_path: Path) -> None:
    ran = run("doctor", "--no-record", "--out", str(tmp_path))
    assert ran.code == 0 and "PyTorch" in ran.out and "can be written" in ran.out and "kept in" in ran.out
    ran = run("doctor", "--no-record", "--json", "--out", str(tmp_path / "none"))
    told = {each["subject"]: each for each in json.loads(ran.out)}
    assert ran.code == 1 and told["captures' directory"]["verdict"] == "problem"
    assert "cannot be written" in told["captures' directory"]["found"]


def test_a_profile_is_recorded_where_pytorch_is() -> None:
    pytest.importorskip("torch")
    (found,) = [each for each in readiness.examine(Path(), record=True) if each.subject == "profiler"]
    assert found.verdict is MachineVerdict.OK and found.found == "operations arrive"


def test_a_check_that_fails_itself_is_a_note(monkeypatch: pytest.MonkeyPatch, nvml: NvmlLike) -> None:
    def broken() -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("tracer.capture.context.cpu_model", broken)
    found = list(readiness.examine(Path(), record=False))
    assert MachineCheck("processor", MachineVerdict.NOTE, "could not be looked at: no such thing") in found
    held_back = next(each for each in found if each.subject == "GPU 0")
    assert held_back.verdict is MachineVerdict.NOTE and "slowed by its power limit" in held_back.found
