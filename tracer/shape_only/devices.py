"""The devices of ``tracer/devices``, one TOML file each: the facts that decide which operations run. Needs no torch.

``kernel_models.device`` reads all of the same files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tracer.input_file import from_toml
from tracer.shape_only.errors import ShapeOnlyError

FOLDER = Path(__file__).resolve().parents[1] / "devices"
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class TracedDevice:
    """A device that a step is traced for.

    Attributes:
        name: name in commands.
        capability: NVIDIA's compute capability; for AMD as torch reports it, such as (9, 4); (0, 0) for a processor.
        vendor: "nvidia", "amd" or "host".
        reported: its name as torch reports it.
        memory_bytes: approximate memory as torch reports it.
        sm_count: multiprocessors, compute units or cores.
    """

    name: str
    capability: tuple[int, int]
    vendor: str
    reported: str
    memory_bytes: int
    sm_count: int

    @classmethod
    def of(cls, name: str, vendor: str, capability: str, reported: Sequence[str], memory_gb: float, sm_count: int
           ) -> TracedDevice:
        """Return the device with the values of its file; ``capability`` is "9.0", or empty for a processor."""
        major, _, minor = capability.partition(".") if vendor != "host" else ("0", "", "0")
        return cls(name, (int(major), int(minor)), vendor, next(iter(reported), name), round(memory_gb * 1e9), sm_count)

    @property
    def is_gpu(self) -> bool:
        """Return whether substitutions apply; a step for a processor is traced as the CPU runs it."""
        return self.vendor != "host"

    @property
    def has_bf16(self) -> bool:
        """Return whether bf16 matrix products run natively."""
        return self.vendor == "amd" or self.capability >= (8, 0)


def device_names() -> list[str]:
    """Return the names of all devices, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def traced_device(name: str | TracedDevice) -> TracedDevice:
    """Return a device of ``tracer/devices`` for tracing; others come from ``kernel_models.device.find_device``. Raises
    ``ShapeOnlyError`` if no device has that name."""
    if isinstance(name, TracedDevice):
        return name
    if name not in device_names():
        raise ShapeOnlyError(f"There is no device {name!r}; choose one of {', '.join(device_names())}.")
    file = from_toml((FOLDER / f"{name}.toml").read_bytes())
    return TracedDevice.of(file["name"], file["vendor"], file["compute_capability"], file["reported_names"],
                           file["memory"]["capacity_gb"]["value"], file["compute"]["sm_count"]["value"])
