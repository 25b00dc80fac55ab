"""The clock and streams of a device, with one set of names for CUDA and the host.

Measurements are written once against these; a rehearsal on the CPU so takes the same path as a run on a GPU.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

_FLUSH_MULTIPLE = 4
"""The buffer that evicts L2 is so many times its size."""
_LEAST_FLUSH_BYTES = 8 << 20
_DEFAULT_CYCLES_PER_US = 2000.0
"""Corrected by timing a sleep; 2 GHz is about the SM clock of a Hopper GPU at work."""


class CudaMachine:
    """A CUDA device: device events, streams, graphs; ``hold`` keeps the stream busy so that launches queue up."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._cuda = torch, torch.cuda
        size = int(getattr(self._cuda.get_device_properties(0), "L2_cache_size", 0) or 0)
        self._evict = torch.empty(max(_FLUSH_MULTIPLE * size, _LEAST_FLUSH_BYTES) // 4, device="cuda",
                                  dtype=torch.int32)
        self._cycles_per_us = _DEFAULT_CYCLES_PER_US
        self._calibrate()

    def _calibrate(self) -> None:
        cycles = 2_000_000
        self._cuda._sleep(cycles)
        first, second = self.event(), self.event()
        first.record()
        self._cuda._sleep(cycles)
        second.record()
        self.synchronize()
        elapsed_us = first.elapsed_time(second) * 1e3
        if elapsed_us > 0:
            self._cycles_per_us = cycles / elapsed_us

    def event(self) -> Any:
        """A timing event; ``a.elapsed_time(b)`` is in milliseconds."""
        return self._cuda.Event(enable_timing=True)

    def synchronize(self) -> None:
        """Wait for all device work."""
        self._cuda.synchronize()

    def hold(self, microseconds: float) -> None:
        """Keep the current stream busy for so long, without holding up the host."""
        self._cuda._sleep(int(microseconds * self._cycles_per_us))

    def flush(self) -> None:
        """Evict the L2 cache."""
        self._evict.zero_()

    def stream(self) -> Any:
        """A new stream."""
        return self._cuda.Stream()

    def current_stream(self) -> Any:
        """The stream work goes to now."""
        return self._cuda.current_stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work inside goes to the stream."""
        context: AbstractContextManager[Any] = self._cuda.stream(stream)
        return context

    def graph(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Capture what ``work`` launches; the result launches it as one graph."""
        side = self._cuda.Stream()
        side.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(side):
            work()
        self._cuda.current_stream().wait_stream(side)
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph):
            work()
        replay: Callable[[], Any] = graph.replay
        return replay

    def memset(self, tensor: Any) -> None:
        """Set a tensor's memory to zero by the driver's own call (``zero_`` launches a kernel instead)."""
        driver = ctypes.CDLL("libcuda.so.1")
        status = driver.cuMemsetD8Async(ctypes.c_uint64(tensor.data_ptr()), ctypes.c_ubyte(0),
                                        ctypes.c_size_t(tensor.nbytes),
                                        ctypes.c_void_p(self._cuda.current_stream().cuda_stream))
        if status:
            raise RuntimeError(f"CUDA error: cuMemsetD8Async gave {status}")

    def clock_mhz(self) -> int | None:
        """The SM clock now; None where it cannot be read (it needs nvidia-ml-py)."""
        with suppress(Exception):
            return int(self._cuda.clock_rate())
        return None


class HostEvent:
    """The time of a clock of the host at ``record``."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._at_ns = 0

    def record(self) -> None:
        """Take the time."""
        self._at_ns = self._clock_ns()

    def elapsed_time(self, later: HostEvent) -> float:
        """Milliseconds from this one to ``later``."""
        return (later._at_ns - self._at_ns) / 1e6

    def query(self) -> bool:
        """Host work has ended by then."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostStream:
    """The host itself, which does everything in order."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """In order anyway."""

    def wait_stream(self, stream: Any) -> None:
        """In order anyway."""


class HostMachine:
    """The CPU under the same names: events read the host's clock, and nothing is ever queued.

    Where torch computes with one thread, that thread's own clock is read: what other processes take from it meanwhile
    is not the operation's time.
    """

    def __init__(self, torch: Any) -> None:
        self._evict = torch.empty(_LEAST_FLUSH_BYTES // 4, dtype=torch.int32)
        self._clock_ns = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns

    def event(self) -> HostEvent:
        """A point in time; ``a.elapsed_time(b)`` is in milliseconds."""
        return HostEvent(self._clock_ns)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def hold(self, microseconds: float) -> None:
        """Nothing is queued on a host."""

    def flush(self) -> None:
        """Evict the core's caches (not a shared one)."""
        self._evict.zero_()

    def stream(self) -> HostStream:
        """The host."""
        return HostStream()

    def current_stream(self) -> HostStream:
        """The host."""
        return HostStream()

    @contextmanager
    def on(self, stream: HostStream) -> Iterator[None]:
        """Nothing changes."""
        yield

    def graph(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """``work`` itself."""
        return work

    def memset(self, tensor: Any) -> None:
        """Set a tensor's memory to zero."""
        tensor.zero_()

    def clock_mhz(self) -> int | None:
        """Not known."""
        return None


Machine = CudaMachine | HostMachine
