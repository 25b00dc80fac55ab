"""The laboratory of a worker: torch, one device, fresh random data, and settings put back after each benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from tracer.campaign.machine import CudaMachine, HostMachine, Machine

ZIPF_EXPONENT = 1.05
"""As the DLRM workload's look-ups."""


class Lab:
    """The tools that families prepare their benchmarks with. As a context manager it undoes one benchmark's settings.

    Attributes:
        torch: the module.
        device: "cuda" or "cpu".
        machine: its clock and streams.
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
        """Stay in a context until the benchmark is over."""
        self._stack.enter_context(context)

    def tf32(self, enabled: bool) -> None:
        """Switch TF32 for the rest of the benchmark."""
        from tracer.workloads.workload import tf32

        self.enter(tf32(enabled))

    def dtype(self, name: str) -> Any:
        """torch's type of a short name ("tf32" is stored as fp32), or what torch has by that name."""
        return getattr(self.torch, {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16",
                                    "fp8": "float8_e4m3fn"}.get(name, name))

    def function(self, name: str) -> Callable[..., Any]:
        """The function of an operator such as "aten::mm", by the shortest way into torch that there is."""
        torch, short = self.torch, name.removeprefix("aten::")
        is_method = short == "to" or short.endswith("_")
        homes = (torch, torch._C._nn, torch._C._linalg, torch.Tensor if is_method else torch.ops.aten)
        found: Callable[..., Any] = getattr(next(home for home in homes if hasattr(home, short)), short)
        return found

    def random(self, *shape: int, dtype: str = "fp32", grad: bool = False) -> Any:
        """Normal random numbers; zeros would run faster than real data."""
        x = self.torch.randn(shape, generator=self._generator, device=self.device, dtype=self.torch.float32)
        return x.to(self.dtype(dtype)).requires_grad_(grad)

    def random_like(self, other: Any) -> Any:
        """Normal random numbers of a tensor's shape, type and memory layout."""
        return self.torch.empty_like(other).normal_()

    def gradients(self, output: Any, inputs: Sequence[Any], gradient: Any = None) -> Callable[[], Any]:
        """Return what computes the gradients of some inputs, any number of times.

        A host's own time is measured around the call, and autograd's engine, which hands each graph to its own queue,
        takes tens of microseconds that a step pays once for its whole backward. On a host, graphs that are a chain are
        therefore run node by node.
        """
        torch = self.torch
        chain = None if self.is_cuda else _chain(output.grad_fn)
        if chain is None:
            return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)
        first = torch.ones_like(output) if gradient is None else gradient
        absent = [[None] * (len(node._input_metadata) - 1) for node, _ in chain]  # of outputs that nothing used

        def along() -> Any:
            found: Any = first
            with torch.no_grad():
                for (node, at), others in zip(chain, absent, strict=True):
                    found = node(found[at] if isinstance(found, tuple) else found, *others)
            return found

        return along

    def indices(self, count: int, *, high: int, law: str = "uniform") -> Any:
        """``count`` numbers below ``high``, int64; ``law`` "zipf" prefers few of them, which lie anywhere.

        "starts" gives the multiples of ``high`` instead: where bags of so many look-ups begin.
        """
        torch = self.torch
        if law == "starts":
            return torch.arange(count, device=self.device) * high
        if law == "uniform":
            return torch.randint(high, (count,), generator=self._generator, device=self.device)
        # The inverse of the continuous Zipf law's distribution, as good as exact for the tables here.
        u = torch.rand(count, generator=self._generator, device=self.device, dtype=torch.float64)
        power = 1.0 - ZIPF_EXPONENT
        rank = ((u * (float(high + 1) ** power - 1.0) + 1.0) ** (1.0 / power) - 1.0).long().clamp_(0, high - 1)
        places = torch.randperm(high, generator=self._generator, device=self.device)
        return places[rank]

    def pinned(self, tensor: Any) -> Any:
        """The host tensor in page-locked memory, where there is a GPU."""
        return tensor.pin_memory() if self.is_cuda else tensor

    def tidy(self) -> None:
        """Give cached device memory back."""
        if self.is_cuda:
            self.torch.cuda.empty_cache()


def _chain(node: Any) -> list[tuple[Any, int]] | None:
    """Return a graph's nodes, each with the place of its gradient among those the node before gives.

    ``None`` where it is no chain: a node leads to several, or a tensor has several gradients, which are summed.
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
