"""Values that a program makes out of constants on its way to a model, such as a rate for each layer.

    rates = [rate.item() for rate in torch.linspace(0, 0.1, depth)]

A fake tensor has no values, but what comes of constants alone is the same wherever a program runs: small tensors of it
are made for real beside the fake ones, and read where a program asks for a number. What is random, comes from data or
is large has no value here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

MOST_ELEMENTS = 4096
"""A larger tensor is data, or weights."""
_MADE_OF_CONSTANTS = frozenset({"linspace", "logspace", "arange", "zeros", "ones", "full", "eye", "scalar_tensor"})
_READ = torch.ops.aten._local_scalar_dense.default
_LIFTED = torch.ops.aten.lift_fresh.default


class KnownValues:
    """The real tensors behind fake ones that were made of constants."""

    def __init__(self) -> None:
        self._of: Any = WeakIdKeyDictionary()

    def number(self, func: Any, args: Any) -> Any:
        """The number that an operator reads, where it is known; ``None`` otherwise."""
        if func is not _READ or args[0] not in self._of:
            return None
        with _disable_current_modes():
            return self._of[args[0]].item()

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the values of an operator's results, or forget all where it writes unknown ones into known tensors."""
        inputs = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        if not inputs and func.namespace == "aten" and func.__name__.split(".")[0] in _MADE_OF_CONSTANTS:
            if all(one.numel() <= MOST_ELEMENTS for one in _tensors(result)):
                self._note(func, args, {**kwargs, "device": torch.device("cpu")}, result)
        elif func is _LIFTED and inputs[0].numel() <= MOST_ELEMENTS:
            constant = inputs[0].constant if isinstance(inputs[0], FakeTensor) else inputs[0]
            if constant is not None:
                with _disable_current_modes():
                    self._of[result] = constant.detach().clone()
        elif inputs and self._of and any(one in self._of for one in inputs):
            if all(one in self._of for one in inputs) and _repeatable(func):
                self._note(func, args, kwargs, result)
            elif func._schema.is_mutable:
                self._of.clear()  # views of what was written are not told from other tensors

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        real = tree_map(lambda one: self._of[one] if isinstance(one, torch.Tensor) else one, (args, kwargs))
        outputs = _tensors(result)
        if sum(one.numel() for one in outputs) > MOST_ELEMENTS:
            return
        with _disable_current_modes(), torch.no_grad():
            found = _tensors(func(*real[0], **real[1]))
        for fake, one in zip(outputs, found, strict=False):
            self._of[fake] = one


def _repeatable(func: Any) -> bool:
    return func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags


def _tensors(result: Any) -> list[torch.Tensor]:
    return [one for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor)]
