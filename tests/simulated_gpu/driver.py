"""A GPU that is not there, under torch's own names: one stream, a clock of its own, planted costs and failures.

Tensors lie on the CPU and are worked on for real; only times are simulated. Whatever torch does launches one kernel.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_gpu.signatures import taken_by_driver

QUEUE = 1024
"""Launches that wait for the device before one more holds the host up."""
NOT_LAUNCHED = frozenset({"__get__", "__set__", "data_ptr", "dim", "size", "stride", "numel", "requires_grad_",
                          "is_floating_point", "backward"})


@dataclass
class SimulatedGpu:
    """The device and its host; times in microseconds.

    Attributes:
        name, units, memory_bytes, l2_bytes, hip: what the device reports.
        clock_mhz: of its units, which ``_sleep`` counts.
        dispatch_us: that the host takes to launch.
        kernel_us: that each kernel takes.
        kernel: its name.
        host_us, stream_us: the host's clock, and when the stream has done what it was given.
        launched: kernels so far.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    units: int = 132
    memory_bytes: int = 85_000_000_000
    l2_bytes: int = 50 << 20
    hip: str | None = None
    clock_mhz: float = 1980.0
    dispatch_us: float = 5.0
    kernel_us: float = 7.0
    kernel: str = "some_kernel"
    host_us: float = 0.0
    stream_us: float = 0.0
    launched: int = 0
    captured: list[float] | None = None
    waiting: deque[float] = field(default_factory=deque)

    def launch(self, takes_us: float) -> None:
        """Queue a kernel; the host waits where the queue is full."""
        if self.captured is not None:
            self.captured.append(takes_us)
            return
        self.launched += 1
        self.host_us += self.dispatch_us
        while self.waiting and self.waiting[0] <= self.host_us:
            self.waiting.popleft()
        if len(self.waiting) >= QUEUE:
            self.host_us = max(self.host_us, self.waiting.popleft())
        self.stream_us = max(self.stream_us, self.host_us) + takes_us
        self.waiting.append(self.stream_us)

    def wait(self) -> None:
        """Have the host wait for the device."""
        self.host_us = max(self.host_us, self.stream_us) + 1.0

    def perf_counter_ns(self) -> int:
        """The host's clock, as ``time`` has it; looking takes a little."""
        self.host_us += 0.02
        return round(self.host_us * 1e3)

    def perf_counter(self) -> float:
        """The same, in seconds."""
        return self.perf_counter_ns() / 1e9

    def profiled(self, **options: Any) -> Any:
        """``torch.profiler.profile``: an event for each kernel launched inside."""
        gpu = self

        class Profile:
            def __enter__(self) -> Profile:
                self.first = gpu.launched
                return self

            def __exit__(self, *error: object) -> None:
                self.count = gpu.launched - self.first

            def events(self) -> list[Any]:
                span = SimpleNamespace(start=0, elapsed_us=lambda: gpu.kernel_us)
                kind = SimpleNamespace(name="CUDA")
                return [SimpleNamespace(device_type=kind, name=gpu.kernel, time_range=span)] * self.count

        return Profile()


class SimulatedCuda:
    """``torch.cuda`` of the device."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu
        self.CUDAGraph = lambda: SimulatedGraph(gpu)
        self.Stream = lambda device=None, priority=0: SimulatedStream(gpu)
        self.current_device, self.device_count, self.memory_allocated = lambda: 0, lambda: 1, lambda device=None: 0
        self.is_available = self.is_initialized = lambda: True
        self.empty_cache, self.set_device = lambda: None, lambda device: None
        self.max_memory_allocated = self.max_memory_reserved = lambda device=None: 512  # what wakes the device up
        self.clock_rate = lambda device=None: int(gpu.clock_mhz)
        self.mem_get_info = lambda device=None: (gpu.memory_bytes // 2, gpu.memory_bytes)
        self.current_stream = lambda device=None: SimulatedStream(gpu)
        self.stream = lambda stream: nullcontext()

    def get_device_properties(self, device: Any) -> Any:
        """What the driver tells of the device."""
        gpu = self.gpu
        return SimpleNamespace(name=gpu.name, major=9, minor=0, total_memory=gpu.memory_bytes,
                               multi_processor_count=gpu.units, L2_cache_size=gpu.l2_bytes,
                               **({"gcnArchName": "gfx942"} if gpu.hip else {}))

    def synchronize(self, device: Any = None) -> None:
        """Wait for the device."""
        self.gpu.wait()

    def _sleep(self, cycles: int) -> None:
        self.gpu.launch(cycles / self.gpu.clock_mhz)

    def Event(self, enable_timing: bool = False) -> Any:
        """A point of the stream's time."""
        return SimulatedEvent(self.gpu)

    @contextmanager
    def graph(self, cuda_graph: SimulatedGraph) -> Iterator[None]:
        """Launches inside become the graph's."""
        self.gpu.captured = cuda_graph.kernels
        yield
        self.gpu.captured = None


class SimulatedEvent:
    """An event of ``torch.cuda``."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu, self.at_us = gpu, 0.0

    def record(self, stream: Any = None) -> None:
        """Take the time at which the stream gets here."""
        self._gpu.host_us += 0.5
        self._gpu.stream_us = self.at_us = max(self._gpu.stream_us, self._gpu.host_us)

    def elapsed_time(self, end_event: SimulatedEvent) -> float:
        """Milliseconds."""
        return (end_event.at_us - self.at_us) / 1e3

    def query(self) -> bool:
        """Return whether the stream has been here."""
        return self.at_us <= self._gpu.host_us

    def synchronize(self) -> None:
        """Wait for it."""
        self._gpu.host_us = max(self._gpu.host_us, self.at_us)


class SimulatedStream:
    """The one stream."""

    cuda_stream = 0

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.synchronize = gpu.wait
        self.wait_stream, self.wait_event = lambda stream: None, lambda event: None


class SimulatedGraph:
    """A CUDA graph: its kernels, launched as one."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu, self.kernels = gpu, list[float]()

    def replay(self) -> None:
        """Launch it."""
        self._gpu.launch(sum(self.kernels))


class Driver:
    """``ctypes.CDLL`` of a driver that has one function, which takes the arguments that ``signatures`` states."""

    def __init__(self, gpu: SimulatedGpu, status: int = 0) -> None:
        self._gpu, self._status = gpu, status
        self.opened: list[str] = []

    def CDLL(self, name: str) -> Any:
        """Open the library of the device's maker, and no other."""
        self.opened.append(name)
        library = name.rpartition("/")[2].partition(".so")[0]
        if library != ("libamdhip64" if self._gpu.hip else "libcuda"):
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        function = "hipMemsetD8Async" if self._gpu.hip else "cuMemsetD8Async"
        self._takes = taken_by_driver(function)
        return SimpleNamespace(**{function: self._memset})

    def _memset(self, *arguments: Any) -> int:
        assert tuple(map(type, arguments)) == self._takes
        if not self._status:
            where, value, size, _ = arguments
            ctypes.memset(where.value, value.value, size.value)
            self._gpu.launch(self._gpu.kernel_us)
        return self._status


@contextmanager
def simulated_torch(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Torch with the device: what is asked of it on "cuda" is done on the CPU and timed on the device."""
    import torch
    from torch.overrides import TorchFunctionMode

    def placed(value: Any) -> Any:
        is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
        return torch.device("cpu") if is_device and str(value).startswith("cuda") else value

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(function, "__name__", "")
            if name == "pin_memory":
                return args[0]
            found = function(*map(placed, args), **{key: placed(value) for key, value in (kwargs or {}).items()})
            if name not in NOT_LAUNCHED:
                gpu.launch(gpu.kernel_us)
            if name == "item":
                gpu.wait()
            return found

    real = torch.Generator
    monkeypatch.setattr(torch, "cuda", SimulatedCuda(gpu))
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": real("cpu"))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.version, "hip", gpu.hip)
    monkeypatch.setattr(torch.profiler, "profile", gpu.profiled)
    with OnCpu():
        yield torch
