"""``torch.cuda`` as on a machine with GPUs. A test says which the program uses; nothing is computed on them.

Time is a clock of their own, which goes on where something is said to take time: what a busy machine does is not seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class SimulatedClock:
    """In place of the captures' ``time``."""

    now_ns: int = 0

    def perf_counter_ns(self) -> int:
        """Return the time."""
        return self.now_ns

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now_ns += round(seconds * 1e9)


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
        clock: by which the capture measures.
        busy_until_ns: end of the work that was launched on each.
        waited: devices waited for, in order.
        borders: the time of each border of the profiler's steps: its start first.
    """

    devices: list[SimulatedProperties]
    in_use: tuple[int, ...]
    allocated: int
    current: int
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    busy_until_ns: dict[int, int] = field(default_factory=dict)
    waited: list[int] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)

    def launch(self, device: int, seconds: float) -> None:
        """Start work that takes so long, after what was started before."""
        begins = max(self.clock.now_ns, self.busy_until_ns.get(device, 0))
        self.busy_until_ns[device] = begins + round(seconds * 1e9)

    def synchronize(self, device: int | None = None) -> None:
        """Wait for one device: the current one if none is given."""
        number = self.current if device is None else device
        self.waited.append(number)
        self.clock.now_ns = max(self.clock.now_ns, self.busy_until_ns.get(number, 0))


def simulate_cuda(monkeypatch: pytest.MonkeyPatch, devices: list[SimulatedProperties], *,
                  in_use: tuple[int, ...] = (0,), allocated: int = 1 << 20, current: int = 0) -> SimulatedCuda:
    """Put the simulated devices in place of this machine's."""
    import torch

    from tracer.capture import session

    found = SimulatedCuda(devices, in_use, allocated, current)
    answers: dict[str, Any] = {
        "is_available": lambda: True, "is_initialized": lambda: bool(found.in_use),
        "device_count": lambda: len(devices), "current_device": lambda: found.current,
        "get_device_properties": lambda device: devices[device], "synchronize": found.synchronize,
        "max_memory_allocated": lambda device=None: found.allocated if _of(device, found) in found.in_use else 0,
        "max_memory_reserved": lambda device=None: found.allocated if _of(device, found) in found.in_use else 0}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    class HostProfiler(torch.profiler.profile):
        """A PyTorch without CUDA has no profiler of it, and would record events of its own for each operation."""

        def __init__(self, *, activities: Any, experimental_config: Any = None, **others: Any) -> None:
            super().__init__(activities=[each for each in activities if each.name == "CPU"], **others)

        def start(self) -> None:
            found.borders.append(found.clock.now_ns)
            super().start()

        def step(self) -> None:
            super().step()
            found.borders.append(found.clock.now_ns)

    monkeypatch.setattr(session, "time", found.clock)
    monkeypatch.setattr(torch.profiler, "profile", HostProfiler)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device in found.in_use, raising=False)
    return found


def _of(device: int | None, found: SimulatedCuda) -> int:
    return found.current if device is None else device
