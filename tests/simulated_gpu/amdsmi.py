"""AMD's management library with devices that a test plans: ``amdsmi``'s names, arguments and forms of answers.

A device is the answers that differ: power, temperature, place. "N/A" is what the real one says of what a device lacks.
"""

from __future__ import annotations

from enum import IntEnum
from types import ModuleType
from typing import Any


class SimulatedAmdSmi(ModuleType):
    """See above. ``older`` has no name that came after ROCm 6.2."""

    class AmdSmiClkType(IntEnum):
        GFX, MEM = 0, 4

    class AmdSmiMemoryType(IntEnum):
        VRAM = 0

    class AmdSmiTemperatureType(IntEnum):
        HOTSPOT = 1

    class AmdSmiTemperatureMetric(IntEnum):
        CURRENT = 0

    class AmdSmiLibraryException(Exception):
        """The library's own."""

    def __init__(self, devices: int = 2, *, older: bool = False) -> None:
        super().__init__("amdsmi")
        self.count, self.older, self.throttled = devices, older, False

    def amdsmi_init(self, flag: Any = None) -> None:
        if not self.count:
            raise self.AmdSmiLibraryException(34)

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(self.count))

    def amdsmi_get_gpu_asic_info(self, processor_handle: int) -> dict[str, Any]:
        return {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "oam_id": processor_handle}

    def amdsmi_get_gpu_driver_info(self, processor_handle: int) -> dict[str, Any]:
        return {"driver_name": "amdgpu", "driver_version": "6.12.12", "driver_date": "N/A"}

    def amdsmi_get_clock_info(self, processor_handle: int, clock_type: AmdSmiClkType) -> dict[str, Any]:
        clk = 1400 if clock_type is self.AmdSmiClkType.GFX else 1300
        return {"clk": clk, "min_clk": 132, "max_clk": 2100, "clk_locked": False, "clk_deep_sleep": 0}

    def amdsmi_get_power_info(self, processor_handle: int) -> dict[str, Any]:
        if self.older:
            return {"current_socket_power": "N/A", "average_socket_power": 290, "power_limit": 300_000_000}
        return {"socket_power": 710, "current_socket_power": 710, "average_socket_power": "N/A",
                "power_limit": 750_000_000}

    def amdsmi_get_power_cap_info(self, processor_handle: int) -> dict[str, Any]:
        return {"power_cap": 300_000_000 if self.older else 750_000_000, "default_power_cap": 750_000_000, "dpm_cap": 0}

    def amdsmi_get_temp_metric(self, processor_handle: int, sensor_type: AmdSmiTemperatureType,
                               metric: AmdSmiTemperatureMetric) -> int:
        return 64

    def amdsmi_get_violation_status(self, processor_handle: int) -> dict[str, Any]:
        if self.older:
            raise self.AmdSmiLibraryException(2)
        return {"active_ppt_pwr": self.throttled, "active_socket_thrm": False, "active_vr_thrm": "N/A"}

    def amdsmi_get_gpu_memory_total(self, processor_handle: int, mem_type: AmdSmiMemoryType) -> int:
        return 192 << 30

    def amdsmi_get_gpu_memory_usage(self, processor_handle: int, mem_type: AmdSmiMemoryType) -> int:
        return 2 << 30

    def amdsmi_get_gpu_activity(self, processor_handle: int) -> dict[str, Any]:
        return {"gfx_activity": 88, "umc_activity": 12, "mm_activity": "N/A"}

    def amdsmi_get_gpu_process_list(self, processor_handle: int) -> list[dict[str, Any]]:
        return [{"name": "N/A", "pid": 11}]

    def amdsmi_get_gpu_device_uuid(self, processor_handle: int) -> str:
        return f"{processor_handle:02x}ff74a1-0000-1000-80ac-0000000000{processor_handle:02x}"

    def amdsmi_get_gpu_device_bdf(self, processor_handle: int) -> str:
        return f"0000:{0xc1 + processor_handle:02x}:00.0"
