"""Clocks, power, memory and what slows GPUs down: from NVIDIA's and AMD's management libraries where they are installed
(the extra ``gpu``), else from ``nvidia-smi``. A question costs microseconds by a library, a tenth of a second by the
command."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol

SLOWED = {0x4: "its power limit", 0x8: "a hardware slow-down", 0x20: "its temperature (software)",
          0x40: "its temperature (hardware)", 0x80: "a power brake"}
"""NVML's reasons that lower a busy device's clock (``nvmlClocksEventReason…``); idling and set clocks are none."""
_SMI = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit",
        "temperature.gpu", "clocks_throttle_reasons.active", "memory.total", "memory.used", "utilization.gpu", "uuid")
_SMI_SECONDS = 10


@dataclass(frozen=True, slots=True)
class GpuState:
    """A device at one moment; 0 or 0.0 where a figure is not known.

    Attributes:
        name, driver: as the driver reports them.
        sm_mhz, memory_mhz, max_sm_mhz: clocks now, and the highest.
        power_w, power_limit_w, temperature_c: now, and the limit.
        slowed_by: what lowers its clock now.
        memory_bytes, used_bytes: its memory; -1 where not known.
        busy: share of time in which something runs on it; -1 where not known.
        processes: that compute on it, this one included if it does; -1 where not known.
        uuid: as the driver reports it.
    """

    name: str
    driver: str = ""
    sm_mhz: int = 0
    memory_mhz: int = 0
    max_sm_mhz: int = 0
    power_w: float = 0.0
    power_limit_w: float = 0.0
    temperature_c: int = 0
    slowed_by: tuple[str, ...] = ()
    memory_bytes: int = -1
    used_bytes: int = -1
    busy: float = -1.0
    processes: int = -1
    uuid: str = ""


class GpuDevices(Protocol):
    """The GPUs of this machine, through one library or command."""

    def __len__(self) -> int: ...

    def state(self, index: int) -> GpuState:
        """Return a device's state; what it does not tell stays unknown."""


class NvmlDevices:
    """NVIDIA's devices through ``nvidia-ml-py``. Raises ``ImportError`` or NVML's error where there are none."""

    def __init__(self) -> None:
        self._nvml: Any = import_module("pynvml")
        self._nvml.nvmlInit()
        self._driver = _text(self._nvml.nvmlSystemGetDriverVersion())
        self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]

    def __len__(self) -> int:
        return len(self._handles)

    def state(self, index: int) -> GpuState:
        """Return a device's state; what it does not tell stays unknown."""
        nvml, handle = self._nvml, self._handles[index]
        found: dict[str, Any] = {"name": _text(nvml.nvmlDeviceGetName(handle)), "driver": self._driver}
        for name, ask in {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "max_sm_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "slowed_by": lambda: _reasons(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
            "memory_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "used_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "busy": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
            "uuid": lambda: _text(nvml.nvmlDeviceGetUUID(handle)),
        }.items():
            with suppress(nvml.NVMLError, AttributeError):  # what a device or driver does not support
                found[name] = ask()
        return GpuState(**found)


class AmdDevices:
    """AMD's devices through ``amdsmi``. Raises ``ImportError`` or the library's error where there are none."""

    def __init__(self) -> None:
        self._smi: Any = import_module("amdsmi")
        self._smi.amdsmi_init()
        self._handles = list(self._smi.amdsmi_get_processor_handles())

    def __len__(self) -> int:
        return len(self._handles)

    def state(self, index: int) -> GpuState:
        """Return a device's state; what it does not tell stays unknown."""
        smi, handle = self._smi, self._handles[index]
        found: dict[str, Any] = {"name": "AMD GPU"}
        for take in (
            lambda: {"name": str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])},
            lambda: {"driver": str(smi.amdsmi_get_gpu_driver_info(handle)["driver_version"])},
            lambda: _amd_clock(smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)),
            lambda: {"power_w": float(smi.amdsmi_get_power_info(handle)["current_socket_power"])},
        ):
            with suppress(Exception):  # versions differ in names and in what they raise
                found |= take()
        return GpuState(**found)


class SmiDevices:
    """NVIDIA's devices through ``nvidia-smi``. Raises ``OSError`` or ``subprocess.SubprocessError`` where it fails."""

    def __init__(self) -> None:
        self._rows = _smi("gpu", _SMI)
        self._first: list[list[str]] | None = self._rows  # what was read to count them is the first answer

    def __len__(self) -> int:
        return len(self._rows)

    def state(self, index: int) -> GpuState:
        """Return a device's state; what it does not tell stays unknown."""
        rows, self._first = self._first or _smi("gpu", _SMI), None
        told = {name: value for name, value in zip(_SMI, rows[index], strict=True) if not value.startswith("[")}
        number = partial(_number, told)
        processes = -1
        with suppress(OSError, subprocess.SubprocessError):
            processes = sum(row[-1] == told.get("uuid") for row in _smi("compute-apps", ("pid", "gpu_uuid")))
        mib, busy = 1 << 20, number("utilization.gpu", -100.0)
        reasons = told.get("clocks_throttle_reasons.active", "0")
        return GpuState(
            told["name"], told.get("driver_version", ""), int(number("clocks.sm")), int(number("clocks.mem")),
            int(number("clocks.max.sm")), number("power.draw"), number("power.limit"), int(number("temperature.gpu")),
            _reasons(int(reasons, 16)) if reasons.startswith("0x") else (), int(number("memory.total", -1 / mib) * mib),
            int(number("memory.used", -1 / mib) * mib), busy / 100, processes, told.get("uuid", ""))


def find_gpus(*, by_library: bool = False) -> GpuDevices | None:
    """Return the GPUs that can be asked about themselves; ``None`` where there are none, or nothing to ask with.

    Args:
        by_library: leave ``nvidia-smi`` out, which takes too long to be asked between steps.
    """
    for devices in (NvmlDevices, AmdDevices, *(() if by_library else (SmiDevices,))):
        try:
            found: GpuDevices = devices()
            if len(found):
                return found
        except Exception:  # not installed, no driver, or one that does not answer; each library raises its own
            continue
    return None


def place_in_use(devices: GpuDevices) -> int | None:
    """Return the index of the first device that ``CUDA_VISIBLE_DEVICES`` leaves this process; ``None`` if it is not
    among them."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    if not first:
        return 0
    if first.isdigit():
        return int(first) if int(first) < len(devices) else None
    return next((index for index in range(len(devices)) if devices.state(index).uuid.startswith(first)), None)


def _smi(what: str, fields: tuple[str, ...]) -> list[list[str]]:
    ran = subprocess.run(["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"],
                         capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
    rows = [[cell.strip() for cell in line.split(",")] for line in ran.stdout.splitlines() if line.strip()]
    return [row for row in rows if len(row) == len(fields)]


def _number(told: dict[str, str], name: str, otherwise: float = 0.0) -> float:
    try:
        return float(told[name])
    except (KeyError, ValueError):
        return otherwise


def _amd_clock(found: dict[str, Any]) -> dict[str, int]:
    return {"sm_mhz": int(found["clk"]), "max_sm_mhz": int(found["max_clk"])}


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple(text for bit, text in SLOWED.items() if bits & bit)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
