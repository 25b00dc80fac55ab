"""Clocks, power, memory and throttling of GPUs: from NVIDIA's and AMD's management libraries where they are installed
(the extra ``gpu``), else from ``nvidia-smi``. A query takes microseconds by a library, a tenth of a second by the
command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from tracer.errors import reason_of

SLOWED = {0x4: "its power limit", 0x8: "a hardware slow-down", 0x20: "its temperature (software)",
          0x40: "its temperature (hardware)", 0x80: "a power brake"}
"""NVML's reasons that lower a busy device's clock (``nvmlClocksEventReason…``); idling and set clocks are left out."""
_SMI = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit",
        "temperature.gpu", "clocks_throttle_reasons.active", "memory.total", "memory.used", "utilization.gpu", "uuid",
        "pci.bus_id")
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that choose among the devices, and may hide all of them."""
_SMI_SECONDS = 10  # chosen: a driver that hangs never answers
_AMD_SLOWED = {"active_ppt_pwr": "its power limit", "active_socket_thrm": "its temperature (socket)",
               "active_vr_thrm": "its temperature (voltage regulator)", "active_hbm_thrm": "its temperature (memory)",
               "active_prochot_thrm": "a hardware slow-down"}
"""Violations that ``amdsmi`` reports on MI300 and later."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """A device at one moment; 0 or 0.0 where a figure is not known, unless stated otherwise.

    Attributes:
        name, driver: As the driver reports them.
        sm_mhz, memory_mhz, max_sm_mhz: Present clocks, and the highest, MHz.
        power_w, power_limit_w, temperature_c: Present power, its limit, and temperature.
        slowed_by: What lowers its clock at present.
        memory_bytes, used_bytes: All and used memory; -1 where not known.
        busy: Share of time in which something runs on it; -1 where not known.
        processes: Number of processes that compute on it, this one included; -1 where not known.
        uuid: As the driver reports it.
        bus: Its place on the PCI bus, "0000:3b:00": domain, bus and device; empty where not known.
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
    bus: str = ""


class GpuDevices(Protocol):
    """The GPUs of this machine, through one library or command."""

    def __len__(self) -> int: ...

    def state(self, index: int) -> GpuState:
        """Return a device's state; what it does not report stays unknown."""

    def named(self, uuid: str) -> int | None:
        """Return the index of the device that has this identifier or a MIG part with it; ``None`` if there is none."""


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
        """Return a device's state; what it does not report stays unknown."""
        nvml, handle = self._nvml, self._handles[index]
        found: dict[str, Any] = {"name": _text(nvml.nvmlDeviceGetName(handle)), "driver": self._driver}
        for name, ask in {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "max_sm_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "slowed_by": lambda: _reasons(self._clock_reasons(handle)),
            "memory_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "used_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "busy": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
            "uuid": lambda: _text(nvml.nvmlDeviceGetUUID(handle)),
            "bus": lambda: _bus(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        }.items():
            with suppress(nvml.NVMLError, AttributeError):  # what a device or driver does not support
                found[name] = ask()
        return GpuState(**found)

    def named(self, uuid: str) -> int | None:
        """Return the index of the device that has this identifier or a MIG part with it; ``None`` if there is none."""
        nvml = self._nvml
        if uuid.startswith("MIG-GPU-"):  # before driver 470: MIG-GPU-<the device's>/<instance>/<instance>
            uuid = uuid.removeprefix("MIG-").partition("/")[0]
        elif uuid.startswith("MIG-"):
            with suppress(nvml.NVMLError, AttributeError):
                whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(uuid))
                uuid = _text(nvml.nvmlDeviceGetUUID(whole))
        return _index_of(uuid, [self._uuid(handle) for handle in self._handles])

    def _clock_reasons(self, handle: Any) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        except (self._nvml.NVMLError, AttributeError):  # before driver 535, by its earlier name
            return int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))

    def _uuid(self, handle: Any) -> str:
        with suppress(self._nvml.NVMLError):
            return _text(self._nvml.nvmlDeviceGetUUID(handle))
        return ""


class AmdDevices:
    """AMD's devices through ``amdsmi``. Raises ``ImportError`` or the library's error where there are none."""

    def __init__(self) -> None:
        with redirect_stdout(None):  # where its shared library is missing, it prints that
            self._smi: Any = import_module("amdsmi")
        self._smi.amdsmi_init()
        self._handles = list(self._smi.amdsmi_get_processor_handles())

    def __len__(self) -> int:
        return len(self._handles)

    def state(self, index: int) -> GpuState:
        """Return a device's state; what it does not report stays unknown."""
        smi, handle = self._smi, self._handles[index]
        found: dict[str, Any] = {"name": "AMD GPU"}
        asks: tuple[Callable[[], dict[str, Any]], ...] = (
            lambda: {"name": str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])},
            lambda: {"driver": str(smi.amdsmi_get_gpu_driver_info(handle)["driver_version"])},
            lambda: _amd_clock(smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)),
            lambda: {"memory_mhz": int(smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.MEM)["clk"])},
            lambda: {"power_w": _amd_power(smi.amdsmi_get_power_info(handle))},
            lambda: {"power_limit_w": smi.amdsmi_get_power_cap_info(handle)["power_cap"] / 1e6},
            lambda: {"temperature_c": int(smi.amdsmi_get_temp_metric(
                handle, smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT))},
            lambda: {"slowed_by": _amd_reasons(smi.amdsmi_get_violation_status(handle))},
            lambda: {"memory_bytes": int(smi.amdsmi_get_gpu_memory_total(handle, smi.AmdSmiMemoryType.VRAM))},
            lambda: {"used_bytes": int(smi.amdsmi_get_gpu_memory_usage(handle, smi.AmdSmiMemoryType.VRAM))},
            lambda: {"busy": int(smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]) / 100},
            lambda: {"processes": len(smi.amdsmi_get_gpu_process_list(handle))},
            lambda: {"uuid": str(smi.amdsmi_get_gpu_device_uuid(handle))},
            lambda: {"bus": _bus(str(smi.amdsmi_get_gpu_device_bdf(handle)))},
        )
        for ask in asks:
            with suppress(Exception):  # versions differ in names and in what they raise
                found |= ask()
        return GpuState(**found)

    def named(self, uuid: str) -> int | None:
        """Return the index of the device with this identifier; ``None`` if there is none."""
        return _index_of(uuid, [self.state(index).uuid for index in range(len(self))])


class SmiDevices:
    """NVIDIA's devices through ``nvidia-smi``. Raises ``OSError`` or ``subprocess.SubprocessError`` where it fails."""

    def __init__(self) -> None:
        self._rows = _smi("gpu", _SMI)
        self._first: list[list[str]] | None = self._rows  # read to count the devices; the first answer

    def __len__(self) -> int:
        return len(self._rows)

    def state(self, index: int) -> GpuState:
        """Return a device's state; what it does not report stays unknown."""
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
            int(number("memory.used", -1 / mib) * mib), busy / 100, processes, told.get("uuid", ""),
            _bus(told.get("pci.bus_id", "")))

    def named(self, uuid: str) -> int | None:
        """Return the index of the device with this identifier; parts of a device (MIG) are not known."""
        return _index_of(uuid, [row[_SMI.index("uuid")] for row in self._rows])


def find_gpus(*, by_library: bool = False) -> GpuDevices | None:
    """Return the GPUs that can be queried; ``None`` where there are none, or no library and command to query them.

    Args:
        by_library: do not use ``nvidia-smi``, which is too slow between steps.
    """
    for devices in (NvmlDevices, AmdDevices, *(() if by_library else (SmiDevices,))):
        try:
            found: GpuDevices = devices()
            if len(found):
                return found
        except Exception:  # not installed, no driver, or one that does not answer; each library raises its own
            continue
    return None


def why_none() -> str:
    """Return why PyTorch, which is imported, sees no GPU, as words after a colon; empty where it gives no reason."""
    torch = sys.modules["torch"]
    if not (torch.version.cuda or torch.version.hip):
        return "it is a build for CPUs"
    chosen = [f"{name}={os.environ[name]}" for name in HIDING if name in os.environ]
    try:
        torch.cuda.init()
    except Exception as error:  # an error of the driver or of PyTorch
        chosen.append(reason_of(error, 200).rstrip("."))
    return "; ".join(chosen)


def devices_in_use() -> list[int]:
    """Return the devices on which this process has started PyTorch, by PyTorch's numbers. Imports no torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        return [int(torch.cuda.current_device())]
    return [number for number in range(torch.cuda.device_count()) if has_context(number)]


def main_device() -> int | None:
    """Return the device with the program's highest memory peak, by PyTorch's numbers; ``None`` if it used none."""
    held = {number: _most_bytes(number) for number in devices_in_use()}
    return max(held, key=held.__getitem__) if any(held.values()) else None


def _most_bytes(number: int) -> int:
    try:
        return int(sys.modules["torch"].cuda.max_memory_allocated(number))
    except Exception:  # an allocator that keeps no count
        return 1


def place_in_use(devices: GpuDevices) -> int | None:
    """Return the index of the device that this process computes on; ``None`` if it is not among them.

    PyTorch's device is found by its PCI address or identifier, since CUDA numbers devices by speed and these libraries
    by address. Before PyTorch has started a device, ``LOCAL_RANK`` counts among the devices that the environment leaves
    to this process.
    """
    if used := devices_in_use():
        torch, number = sys.modules["torch"], main_device()
        number = used[0] if number is None else number
        properties = torch.cuda.get_device_properties(number)
        states = [devices.state(index) for index in range(len(devices))]
        bus, uuid = _bus_in(properties), _plain(str(getattr(properties, "uuid", "")))
        for index, state in enumerate(states):
            if (bus and state.bus == bus) or (uuid and _plain(state.uuid) == uuid):
                return index
    else:
        number = _local_rank()
    left = _left_by(_visible(devices), devices)
    return left[number] if number < len(left) else left[0] if len(left) == 1 else None


def _visible(devices: GpuDevices) -> tuple[str, ...]:
    """Return the variables that choose devices; each chooses from the devices that the previous one leaves."""
    return ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES" if os.environ.get("HIP_VISIBLE_DEVICES") else
            "CUDA_VISIBLE_DEVICES") if isinstance(devices, AmdDevices) else ("CUDA_VISIBLE_DEVICES",)


def _left_by(variables: tuple[str, ...], devices: GpuDevices) -> list[int]:
    """Return the devices that variables leave, in order. An unknown device hides all after it."""
    left = list(range(len(devices)))
    for variable in variables:
        if chosen := os.environ.get(variable, ""):
            among, left = left, []
            for name in map(str.strip, chosen.split(",")):
                number = _device_number(name)
                place = devices.named(name) if number is None else among[number] if number < len(among) else None
                if place is None:
                    break
                left.append(place)
    return left


def _local_rank() -> int:
    return _device_number(os.environ.get("LOCAL_RANK", "")) or 0


def own_device() -> int:
    """Return PyTorch's number of this rank's device: its ``LOCAL_RANK``, or 0 where it sees only one device, as when a
    scheduler gives each rank its own."""
    return _local_rank() if sys.modules["torch"].cuda.device_count() != 1 else 0


def _device_number(text: str) -> int | None:
    """Return a device's number; ``None`` for other texts, including "²" and thousands of digits."""
    return int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else None


def _index_of(uuid: str, uuids: list[str]) -> int | None:
    """Return the index of a device among identifiers, else ``None``; as in CUDA, an identifier's beginning suffices."""
    return next((index for index, each in enumerate(uuids) if uuid and _plain(each).startswith(_plain(uuid))), None)


def _plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def _bus(text: str) -> str:
    """Return "0000:3b:00" of "00000000:3B:00.0"."""
    domain, _, rest = text.strip("\0 ").lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest.partition('.')[0]}" if rest else ""


def _bus_in(properties: Any) -> str:
    """Return a device's PCI address from PyTorch's properties; empty before PyTorch 2.8."""
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"


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


def _amd_power(found: dict[str, Any]) -> float:
    """Return the power of the socket, W. Devices and versions have it under one of these names, and "N/A" elsewhere."""
    names = ("socket_power", "current_socket_power", "average_socket_power")
    return float(next(value for name in names if isinstance(value := found.get(name), int | float) and value > 0))


def _amd_reasons(found: dict[str, Any]) -> tuple[str, ...]:
    return tuple(text for name, text in _AMD_SLOWED.items() if found.get(name) is True)


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple(text for bit, text in SLOWED.items() if bits & bit)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
