"""NVIDIA's management library with devices that a test plans: ``pynvml``'s names, arguments and errors, and what a
call takes. ``tests/tracer/test_simulated_gpu.py`` compares the arguments with the real package's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass
class SimulatedDevice:
    """A device, or with ``parent`` a part of one (MIG)."""

    uuid: str = "GPU-0"
    bus: str = "00000000:3B:00.0"
    name: str = "NVIDIA H200"
    sm_mhz: int = 1200
    power_mw: int = 699_500
    reasons: int = 0
    parent: SimulatedDevice | None = None
    refuses: set[str] = field(default_factory=set)
    """Calls that end in an error; "all" but the name and the identifiers."""


class SimulatedNvml(ModuleType):
    """See above.

    Attributes:
        wait: called at the begin of each call, which takes time.
        calls: the names of the calls so far.
    """

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NOT_FOUND, NVML_ERROR_GPU_IS_LOST = 3, 6, 15

    class NVMLError(Exception):
        """NVML's own, with its number."""

    def __init__(self, devices: list[SimulatedDevice], wait: Callable[[], None] = lambda: None) -> None:
        super().__init__("pynvml")
        self.devices, self.wait = devices, wait
        self.parts: tuple[SimulatedDevice, ...] = ()
        self.calls: list[str] = []

    def _call(self, name: str, handle: SimulatedDevice | None = None) -> None:
        self.calls.append(name)
        self.wait()
        if handle is not None and (name in handle.refuses or "all" in handle.refuses):
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        self._call("nvmlInit")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> SimulatedDevice:
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> SimulatedDevice:
        whole = [*self.devices, *self.parts]
        found = next((each for each in whole if each.uuid == uuid), None)
        if found is None:
            raise self.NVMLError(self.NVML_ERROR_NOT_FOUND)
        return found

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: SimulatedDevice) -> SimulatedDevice:
        if migDevice.parent is None:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return migDevice.parent

    def nvmlDeviceGetName(self, handle: SimulatedDevice) -> str:
        self._call("nvmlDeviceGetName")
        if "nvmlDeviceGetName" in handle.refuses:
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return handle.name

    def nvmlDeviceGetUUID(self, handle: SimulatedDevice) -> str:
        self._call("nvmlDeviceGetUUID")
        if "nvmlDeviceGetUUID" in handle.refuses:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return handle.uuid

    def nvmlDeviceGetPciInfo(self, handle: SimulatedDevice) -> Any:
        self._call("nvmlDeviceGetPciInfo")
        return SimpleNamespace(busId=handle.bus.encode())

    def nvmlDeviceGetClockInfo(self, handle: SimulatedDevice, type: int) -> int:
        self._call("nvmlDeviceGetClockInfo", handle)
        return handle.sm_mhz if type == self.NVML_CLOCK_SM else 3201

    def nvmlDeviceGetMaxClockInfo(self, handle: SimulatedDevice, type: int) -> int:
        self._call("nvmlDeviceGetMaxClockInfo", handle)
        return 1980

    def nvmlDeviceGetPowerUsage(self, handle: SimulatedDevice) -> int:
        self._call("nvmlDeviceGetPowerUsage", handle)
        return handle.power_mw

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: SimulatedDevice) -> int:
        self._call("nvmlDeviceGetEnforcedPowerLimit", handle)
        return 700_000

    def nvmlDeviceGetTemperature(self, handle: SimulatedDevice, sensor: int) -> int:
        self._call("nvmlDeviceGetTemperature", handle)
        return 71

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: SimulatedDevice) -> int:
        self._call("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return handle.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: SimulatedDevice) -> int:
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return handle.reasons

    def nvmlDeviceGetMemoryInfo(self, handle: SimulatedDevice, version: Any = None) -> Any:
        self._call("nvmlDeviceGetMemoryInfo", handle)
        return SimpleNamespace(total=143 << 30, used=3 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: SimulatedDevice) -> Any:
        self._call("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: SimulatedDevice) -> list[Any]:
        self._call("nvmlDeviceGetComputeRunningProcesses", handle)
        return [SimpleNamespace(pid=1), SimpleNamespace(pid=2)]
