"""``Site``: where the substitutions of one trace put their kernels.

Operators are replaced in PyTorch's dispatcher, at the key ``AutogradCPU``: below autocast and above autograd, which is
where the operator itself would choose between its CPU and its CUDA implementation. So every caller is met, from Python
or from C++, in forward and when checkpointing runs forward again, and autograd keeps what CUDA's derivative keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tracer.shape_only.devices import TracedDevice

_MISSING = object()


@dataclass
class Site:
    """The place of substitutions for one trace.

    Attributes:
        device: the device the step is traced for.
        rules: operator → a function that makes its outputs, for operators without a kernel for fake tensors.
        counts: how often each substitution was used.
    """

    device: TracedDevice
    rules: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)
    library: Any = None

    def used(self, name: str) -> None:
        """Count one use."""
        self.counts[name] = self.counts.get(name, 0) + 1

    def note(self, text: str) -> None:
        """Say something once in the graph's loss report."""
        if text not in self.notes:
            self.notes.append(text)

    def replace(self, operator: str, kernel: Callable[..., Any]) -> None:
        """Run ``kernel`` in an operator's place, above autograd; ``operator`` is "rms_norm" or "lstm.input"."""
        if operator_of(operator) is not None:
            self.library.impl(operator, kernel, "AutogradCPU")

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until the trace ends; one the owner lacks is left alone."""
        before = vars(owner).get(name, _MISSING)
        if before is _MISSING and not hasattr(owner, name):
            return
        setattr(owner, name, value)
        self.stack.callback(_restore, owner, name, before)


@contextmanager
def installed(device: TracedDevice, substitutions: Iterable[Callable[[Site], None]]) -> Iterator[Site]:
    """Put substitutions in place; everything is as before at the end."""
    site = Site(device, library=torch.library.Library("aten", "IMPL"))
    with site.stack:
        site.stack.callback(site.library._destroy)
        for install in substitutions:
            install(site)
        yield site


def operator_of(name: str) -> Any:
    """``aten``'s operator of that name ("lstm.input"), None where this torch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _restore(owner: Any, name: str, before: Any) -> None:
    if before is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def below_autograd(operator: Any, *args: Any) -> Any:
    """Call an operator as autograd's own functions do: seen by the recorder, not differentiated again."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def is_gpu(device: Any) -> bool:
    """Return whether a device argument asks for a GPU; a bare number does."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] in ("cuda", "hip")
    return isinstance(device, int) and not isinstance(device, bool)
