"""What is counted: a model of a library, in the kinds of step that it has."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

Step = Callable[[], Any]
LARGE = 1 << 18
"""Elements of a tensor that is not filled where a step is only tried."""


class LibraryCase(NamedTuple):
    """A model and its steps.

    Attributes:
        library: "torchvision", "transformers" or "timm".
        name: the model's, or its class's.
        kind: "train", "infer" or "generate", which is a call of ``generate`` for one new token (the prefill) and then
            more (the decode of each is what one more token adds).
        build: makes the step on a device, "cuda" or "cpu".
    """

    library: str
    name: str
    kind: str
    build: Callable[[str], Step]

    @property
    def stem(self) -> str:
        """Name of its file."""
        return f"{self.library}-{self.kind}-{self.name}"

    @property
    def order(self) -> str:
        """Where it stands in a list in which any beginning is a fair sample of the whole."""
        return hashlib.sha256(self.name.encode()).hexdigest()


def seeded() -> None:
    """Draw the same numbers in every run."""
    import torch

    torch.manual_seed(0)
    random.seed(0)


def large_left_zero() -> Any:
    """A mode in which large tensors are not filled with random numbers, which takes longer than a small step."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    slow = {aten.uniform_.default, aten.normal_.default, aten.erfinv_.default}

    class LargeLeftZero(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in slow and args[0].numel() > LARGE:
                return args[0]
            return func(*args, **(kwargs or {}))

    return LargeLeftZero()


def trained(model: Any, loss_of: Callable[[], Any]) -> Step:
    """The step that trains a model with AdamW."""
    import torch

    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def train() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return train


def summed(outputs: Any) -> Any:
    """The sum of everything a model gives that has a gradient: a loss that leaves nothing out."""
    import torch

    found = [one for one in _tensors(outputs) if one.requires_grad and one.is_floating_point()]
    return torch.stack([one.float().mean() for one in found]).sum()


def _tensors(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "values") and callable(value.values):
        value = list(value.values())
    return [one for part in value for one in _tensors(part)] if isinstance(value, (list, tuple)) else []
