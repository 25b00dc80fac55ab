"""The laboratory of a worker: torch, one device with its clock and streams, random data, and settings that are undone.

Benchmarks are written once, for ``Machine``. So a rehearsal on the CPU takes the same path as a run on a GPU.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

_FLUSH_MULTIPLE = 4
"""Size of the buffer that evicts L2, as a multiple of L2's size."""
_LEAST_FLUSH_BYTES = 8 << 20  # chosen: more than the caches of small devices and cores
_UNKNOWN_L2_BYTES = 128 << 20  # more than the largest known (B200, B300: 126 MB)
_BEHIND_L2_BYTES = 256 << 20
"""Bytes of AMD's Infinity Cache, behind the L2 of MI300X and similar GPUs; the driver does not report it."""
_FLUSH_SHARE = 1 / 16
"""Largest share of the memory that the buffer takes."""
_TIMED_CYCLES = 200_000
"""Cycles of a sleep of about 0.1 ms; its measured time converts cycles at the present clock to microseconds."""


class CudaMachine:
    """A CUDA device: device events, streams, graphs; ``hold`` keeps the stream busy so that launches queue up."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._cuda = torch, torch.cuda
        self._is_amd = bool(torch.version.hip)
        self._cycles_per_us = 0.0

    @cached_property
    def _evict(self) -> Any:
        """Return a buffer that fills the caches when it is written."""
        properties = self._cuda.get_device_properties(self._cuda.current_device())
        size = int(getattr(properties, "L2_cache_size", 0) or _UNKNOWN_L2_BYTES)
        wanted = max(_FLUSH_MULTIPLE * size, 2 * _BEHIND_L2_BYTES * self._is_amd, _LEAST_FLUSH_BYTES)
        most = int(_FLUSH_SHARE * properties.total_memory)
        return self._torch.empty(min(wanted, most) // 4, device="cuda", dtype=self._torch.int32)

    def scale_hold(self) -> None:
        """Measure the present cycles per microsecond: clocks rise with work, and fall under a power limit."""
        first, second = self.event(), self.event()
        self._cuda._sleep(_TIMED_CYCLES)  # one-time launch costs are paid here
        first.record()
        self._cuda._sleep(_TIMED_CYCLES)
        second.record()
        self.synchronize()
        self._cycles_per_us = _TIMED_CYCLES / max(first.elapsed_time(second) * 1e3, 1.0)

    def event(self) -> Any:
        """Return a timing event; ``a.elapsed_time(b)`` is in milliseconds."""
        return self._cuda.Event(enable_timing=True)

    def synchronize(self) -> None:
        """Wait for all device work."""
        self._cuda.synchronize()

    def hold(self, microseconds: float) -> None:
        """Keep the current stream busy for a time, without blocking the host; call ``scale_hold`` before."""
        self._cuda._sleep(int(microseconds * self._cycles_per_us))

    def flush(self) -> None:
        """Evict the L2 cache."""
        self._evict.zero_()

    def stream(self) -> Any:
        """Return a new stream."""
        return self._cuda.Stream()

    def current_stream(self) -> Any:
        """Return the stream that receives work now."""
        return self._cuda.current_stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which work goes to the stream."""
        context: AbstractContextManager[Any] = self._cuda.stream(stream)
        return context

    def graph(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Capture the launches of ``work``; return a function that launches them as one graph."""
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
        name = "hipMemsetD8Async" if self._is_amd else "cuMemsetD8Async"
        status = getattr(self._driver, name)(
            ctypes.c_void_p(tensor.data_ptr()), ctypes.c_ubyte(0), ctypes.c_size_t(tensor.nbytes),
            ctypes.c_void_p(self._cuda.current_stream().cuda_stream))
        if status:
            raise RuntimeError(f"{'HIP' if self._is_amd else 'CUDA'} error: {name} gave {status}")

    @cached_property
    def _driver(self) -> Any:
        """Return NVIDIA's driver, or the HIP runtime that torch has loaded, which may be its own copy."""
        return ctypes.CDLL(_loaded("libamdhip64.so") if self._is_amd else "libcuda.so.1")

    def clock_mhz(self) -> int | None:
        """Return the present SM clock, MHz; None where it cannot be read (it needs nvidia-ml-py, or amdsmi)."""
        with suppress(Exception):
            return int(self._cuda.clock_rate())
        return None


def _loaded(name: str) -> str:
    """Return the path of a library that this process has loaded, in any version, or the given name if there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            path = line.partition("/")[2]
            if name in path.rpartition("/")[2]:
                return f"/{path}"
    return name


class HostEvent:
    """The reading of a host clock at ``record``."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._at_ns = 0

    def record(self) -> None:
        """Read the clock."""
        self._at_ns = self._clock_ns()

    def elapsed_time(self, later: HostEvent) -> float:
        """Return the milliseconds from this event to ``later``."""
        return (later._at_ns - self._at_ns) / 1e6

    def query(self) -> bool:
        """Return true: host work ends before this is asked."""
        return True

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""


class HostStream:
    """The host itself, which does everything in order."""

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: all runs in order anyway."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: all runs in order anyway."""


class HostMachine:
    """The CPU with the interface of ``CudaMachine``: events read the host's clock, and nothing is ever queued.

    If torch computes with one thread, that thread's CPU time is read, which excludes the time that other processes
    take. ``clock_ns`` is another clock.
    """

    def __init__(self, torch: Any, clock_ns: Callable[[], int] | None = None) -> None:
        self._evict = torch.empty(_LEAST_FLUSH_BYTES // 4, dtype=torch.int32)
        self._clock_ns = clock_ns or (
            time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns)

    def event(self) -> HostEvent:
        """Return a point in time; ``a.elapsed_time(b)`` is in milliseconds."""
        return HostEvent(self._clock_ns)

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def scale_hold(self) -> None:
        """Do nothing: nothing is held on a host."""

    def hold(self, microseconds: float) -> None:
        """Do nothing: nothing is queued on a host."""

    def flush(self) -> None:
        """Evict the core's caches (not a shared one)."""
        self._evict.zero_()

    def stream(self) -> HostStream:
        """Return the host's only stream."""
        return HostStream()

    def current_stream(self) -> HostStream:
        """Return the host's only stream."""
        return HostStream()

    @contextmanager
    def on(self, stream: HostStream) -> Iterator[None]:
        """Enter a context that changes nothing."""
        yield

    def graph(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``work`` itself."""
        return work

    def memset(self, tensor: Any) -> None:
        """Set a tensor's memory to zero."""
        tensor.zero_()

    def clock_mhz(self) -> int | None:
        """Return ``None``: the clock is not known."""
        return None


Machine = CudaMachine | HostMachine


ZIPF_EXPONENT = 1.05
"""Exponent of the DLRM workload's look-ups."""


class Lab:
    """The tools with which families prepare their benchmarks. As a context manager it undoes one benchmark's settings.

    Attributes:
        torch: the module.
        device: "cuda" or "cpu".
        machine: its clock, events and streams.
    """

    def __init__(self, device: str) -> None:
        import torch

        self.torch: Any = torch
        self.device = device
        self.machine: Machine = CudaMachine(torch) if self.is_cuda else HostMachine(torch)
        self._generator = torch.Generator(device).manual_seed(0)
        self._stack = ExitStack()

    @property
    def is_cuda(self) -> bool:
        """Return whether the device is a GPU."""
        return self.device == "cuda"

    def __enter__(self) -> Lab:
        self._stack = ExitStack()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._stack.close()

    def enter(self, context: AbstractContextManager[Any]) -> None:
        """Enter a context that ends with the benchmark."""
        self._stack.enter_context(context)

    def tf32(self, enabled: bool) -> None:
        """Switch TF32 for the rest of the benchmark."""
        from tracer.workloads.workload import tf32

        self.enter(tf32(enabled))

    def dtype(self, name: str) -> Any:
        """Return torch's type of a short name ("tf32" is stored as fp32), or torch's attribute of that name."""
        return getattr(self.torch, {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16",
                                    "fp8": "float8_e4m3fn"}.get(name, name))

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function of an operator such as "aten::mm", by the most direct call that torch has."""
        torch, short = self.torch, name.removeprefix("aten::")
        is_method = short == "to" or short.endswith("_")
        homes = (torch, torch._C._nn, torch._C._linalg, torch.Tensor if is_method else torch.ops.aten)
        found: Callable[..., Any] = getattr(next(home for home in homes if hasattr(home, short)), short)
        return found

    def random(self, *shape: int, dtype: str = "fp32", grad: bool = False) -> Any:
        """Return normal random numbers; zeros would run faster than real data."""
        x = self.torch.randn(shape, generator=self._generator, device=self.device, dtype=self.torch.float32)
        return x.to(self.dtype(dtype)).requires_grad_(grad)

    def random_like(self, other: Any) -> Any:
        """Return normal random numbers of a tensor's shape, type and memory layout."""
        return self.torch.empty_like(other).normal_()

    def gradients(self, output: Any, inputs: Sequence[Any], gradient: Any = None) -> Callable[[], Any]:
        """Return a function that computes the gradients of some inputs, any number of times.

        On a host, graphs that are a chain run node by node, because a host's time is measured around the call.
        Autograd's engine, which hands each graph to its own queue, adds tens of microseconds; a step pays them once for
        its whole backward.
        """
        torch = self.torch
        chain = None if self.is_cuda else _chain(output.grad_fn)
        if chain is None:
            return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)
        first = torch.ones_like(output) if gradient is None else gradient
        absent = [[None] * (len(node._input_metadata) - 1) for node, _ in chain]  # for outputs without a gradient

        def along() -> Any:
            found: Any = first
            with torch.no_grad():
                for (node, at), others in zip(chain, absent, strict=True):
                    found = node(found[at] if isinstance(found, tuple) else found, *others)
            return found

        return along

    def indices(self, count: int, *, high: int, law: str = "uniform") -> Any:
        """Return ``count`` numbers below ``high``, int64; ``law`` "zipf" prefers a few values, spread over the range.

        ``law`` "starts" gives the multiples of ``high`` instead: the starts of bags with ``high`` look-ups each.
        """
        torch = self.torch
        if law == "starts":
            return torch.arange(count, device=self.device) * high
        if law == "uniform":
            return torch.randint(high, (count,), generator=self._generator, device=self.device)
        # The inverse of the continuous Zipf distribution, almost exact for the tables here.
        u = torch.rand(count, generator=self._generator, device=self.device, dtype=torch.float64)
        power = 1.0 - ZIPF_EXPONENT
        rank = ((u * (float(high + 1) ** power - 1.0) + 1.0) ** (1.0 / power) - 1.0).long().clamp_(0, high - 1)
        places = torch.randperm(high, generator=self._generator, device=self.device)
        return places[rank]

    def pinned(self, tensor: Any) -> Any:
        """Return the host tensor in page-locked memory, if there is a GPU."""
        return tensor.pin_memory() if self.is_cuda else tensor

    def tidy(self) -> None:
        """Release cached device memory."""
        if self.is_cuda:
            self.torch.cuda.empty_cache()


def _chain(node: Any) -> list[tuple[Any, int]] | None:
    """Return a graph's nodes, each with the index of its gradient among the outputs of the previous node.

    ``None`` if it is not a chain: a node leads to several nodes, or a tensor has several gradients, which are summed.
    """
    found, at, leaves = [], 0, []
    while True:
        found.append((node, at))
        edges = [(place, *edge) for place, edge in enumerate(node.next_functions) if edge[0] is not None]
        leaves += [leaf for _, leaf, _ in edges if leaf.name() == _LEAF]
        inner = [edge for edge in edges if edge[1].name() != _LEAF]
        if not inner:
            return found if len(set(leaves)) == len(leaves) else None
        if len(inner) > 1 or inner[0][2] != 0:
            return None
        at, node = inner[0][:2]


_LEAF = "torch::autograd::AccumulateGrad"
