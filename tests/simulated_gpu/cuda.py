"""``torch.cuda`` as on a machine with GPUs, of which a test says which the program uses. Nothing is computed on them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest


class SimulatedProperties:
    """A device's properties, as ``torch.cuda.get_device_properties`` gives them; no bus as before PyTorch 2.8."""

    name, major, minor, total_memory, multi_processor_count = "NVIDIA H200", 9, 0, 143 << 30, 132

    def __init__(self, uuid: str = "", bus: int | None = None) -> None:
        self.uuid = uuid
        if bus is not None:
            self.pci_domain_id, self.pci_bus_id, self.pci_device_id = 0, bus, 0


@dataclass
class SimulatedCuda:
    """What the program does with its devices.

    Attributes:
        devices: of the machine.
        in_use: those on which the program has started.
        allocated: bytes that it has had on each of these at most.
        busy_until: end of the work that was launched on each (``time.perf_counter``).
        waited: devices waited for, in order.
    """

    devices: list[SimulatedProperties]
    in_use: tuple[int, ...]
    allocated: int
    current: int
    busy_until: dict[int, float]
    waited: list[int]

    def launch(self, device: int, seconds: float) -> None:
        """Start work that takes so long, after what was started before."""
        self.busy_until[device] = max(time.perf_counter(), self.busy_until.get(device, 0.0)) + seconds

    def synchronize(self, device: int | None = None) -> None:
        """Wait for one device: the current one if none is given."""
        number = self.current if device is None else device
        self.waited.append(number)
        while (left := self.busy_until.get(number, 0.0) - time.perf_counter()) > 0:
            time.sleep(left)


def simulate_cuda(monkeypatch: pytest.MonkeyPatch, devices: list[SimulatedProperties], *,
                  in_use: tuple[int, ...] = (0,), allocated: int = 1 << 20, current: int = 0) -> SimulatedCuda:
    """Put the simulated devices in place of this machine's."""
    import torch

    found = SimulatedCuda(devices, in_use, allocated, current, {}, [])
    answers: dict[str, Any] = {
        "is_available": lambda: True, "is_initialized": lambda: bool(found.in_use),
        "device_count": lambda: len(devices), "current_device": lambda: found.current,
        "get_device_properties": lambda device: devices[device], "synchronize": found.synchronize,
        "max_memory_allocated": lambda device=None: found.allocated if _of(device, found) in found.in_use else 0,
        "max_memory_reserved": lambda device=None: found.allocated if _of(device, found) in found.in_use else 0}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device in found.in_use, raising=False)
    return found


def _of(device: int | None, found: SimulatedCuda) -> int:
    return found.current if device is None else device
