"""The devices a step can be traced for: only what decides which operations run. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tracer.shape_only.errors import ShapeOnlyError

CPU = "cpu"

_NVIDIA: dict[tuple[int, int], tuple[str, ...]] = {
    (6, 0): ("p100-pcie-16g",),
    (6, 1): ("p4",),
    (7, 0): ("v100-pcie-16g", "v100-pcie-32g", "v100-sxm2-16g", "v100-sxm2-32g"),
    (7, 5): ("t4", "rtx-2080ti"),
    (8, 0): ("a100-pcie-40g", "a100-sxm-40g", "a100-pcie-80g", "a100-sxm-80g"),
    (8, 6): ("a10", "a40", "rtx-3090", "rtx-a6000"),
    (8, 9): ("l4", "l20", "l40s", "rtx-4090", "rtx-6000-ada"),
    (9, 0): ("h20", "h100-pcie", "h100-nvl", "h100-sxm", "h200-sxm"),
    (10, 0): ("b200", "gb200"),
    (10, 3): ("b300", "gb300"),
    (12, 0): ("rtx-5090", "rtx-pro-6000", "rtx-pro-6000-max-q"),
}
_GIB: dict[str, int] = {
    "p100-pcie-16g": 16, "p4": 8, "v100-pcie-16g": 16, "v100-pcie-32g": 32, "v100-sxm2-16g": 16, "v100-sxm2-32g": 32,
    "t4": 16, "rtx-2080ti": 11, "a100-pcie-40g": 40, "a100-sxm-40g": 40, "a100-pcie-80g": 80, "a100-sxm-80g": 80,
    "a10": 24, "a40": 48, "rtx-3090": 24, "rtx-a6000": 48, "l4": 24, "l20": 48, "l40s": 48, "rtx-4090": 24,
    "rtx-6000-ada": 48, "h20": 96, "h100-pcie": 80, "h100-nvl": 94, "h100-sxm": 80, "h200-sxm": 141, "rtx-5090": 32,
    "rtx-pro-6000": 96, "rtx-pro-6000-max-q": 96, "mi210": 64, "mi250": 64, "mi300x": 192, "mi325x": 256, "mi355x": 288,
}
"""Memory as it is sold, unknown for those not here; a device of MI250 is half a board."""
_AMD = {"mi210": (9, 0), "mi250": (9, 0), "mi300x": (9, 4), "mi325x": (9, 4), "mi355x": (9, 5)}


@dataclass(frozen=True, slots=True)
class TracedDevice:
    """A device by name.

    Attributes:
        capability: NVIDIA's compute capability; for AMD as torch reports it, such as (9, 4); (0, 0) for the CPU.
        vendor: "nvidia", "amd" or "cpu".
        own_memory_bytes: memory of a device that is not among ours.
    """

    name: str
    capability: tuple[int, int]
    vendor: str
    own_memory_bytes: int = 0

    @property
    def is_gpu(self) -> bool:
        """Return whether substitutions apply: on "cpu" a step is traced as the CPU runs it."""
        return self.vendor != "cpu"

    @property
    def memory_bytes(self) -> int:
        """Memory as it is sold (a program sees a few percent less or more); 0 where unknown."""
        return self.own_memory_bytes or _GIB.get(self.name, 0) << 30

    @property
    def has_bf16(self) -> bool:
        """Return whether bf16 matrix products run natively."""
        return self.vendor == "amd" or self.capability >= (8, 0)


_DEVICES = {
    CPU: TracedDevice(CPU, (0, 0), "cpu"),
    **{name: TracedDevice(name, capability, "nvidia") for capability, names in _NVIDIA.items() for name in names},
    **{name: TracedDevice(name, capability, "amd") for name, capability in _AMD.items()},
}


def device_names() -> list[str]:
    """Every name ``find_device`` knows, the CPU first."""
    return list(_DEVICES)


def find_device(name: str | TracedDevice) -> TracedDevice:
    """The device of a name. Raises ``ShapeOnlyError`` if there is none."""
    if isinstance(name, TracedDevice):
        return name
    if name not in _DEVICES:
        raise ShapeOnlyError(f"There is no device {name!r}; choose one of {', '.join(_DEVICES)}.")
    return _DEVICES[name]
