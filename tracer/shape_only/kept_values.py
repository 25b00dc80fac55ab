"""Values of fake tensors: real tensors kept beside them, and what fills the range between two known ends.

A tensor that is given other memory has the values of that memory from then on, however it was given (``.data =``,
``set_``, ``torch.utils.swap_tensors``, ``Module.half()``); one whose dtype or shape is another has none.

    corners.clamp(min=0, max=width)      scores.argmax(-1)      torch.rand(2, 16000)

Where a share is given, values that an operator keeps between two ends are assumed to fill that share of their range
around its middle, in order along the last dimension: corners clamped to an image are those of a box around its middle,
half as wide as it is for 0.5.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

ENDS = ("Values of data decide what the step does, and only the ends between which they lie are known: they are taken "
        "to fill the middle {:g} of that range, in order.")
MOST_CHANCE = 1 << 16
"""Most elements of a random tensor whose values are assumed: a larger one is an image, or weights."""
_CLAMPS = ("clamp", "clamp_")
_PLACES = ("argmax", "argmin")
_OF_ONE = ("rand", "rand_like")


def ends_of(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[float, float] | None:
    """Return between which ends an operator's result lies, both included; ``None`` where it says nothing of them."""
    if func.namespace != "aten" or not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return None
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    name = func.__name__.split(".")[0]
    if name in _CLAMPS:
        low, high = given.get("min"), given.get("max")
        numbers = isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high
        return (float(low), float(high)) if numbers else None
    if name in _PLACES or name == "multinomial":
        of, dim = given["self"], -1 if name == "multinomial" else given.get("dim")
        count = of.numel() if dim is None or not of.dim() else of.shape[dim]
        return 0.0, float(max(count - 1, 0))
    if result.numel() > MOST_CHANCE:
        return None
    if name in _OF_ONE:
        return 0.0, 1.0
    return (float(given.get("low", 0)), float(given["high"] - 1)) if name == "randint" else None


def spread(ends: tuple[float, float], share: float, like: Any) -> torch.Tensor:
    """Make the values of a tensor that fill a share of a range around its middle, in order along the last dimension."""
    low, high = ends
    count = like.shape[-1] if like.dim() else 1
    at = torch.linspace(-share / 2, share / 2, count, dtype=torch.float64) if count > 1 else torch.zeros(count)
    values = (low + high) / 2 + at * (high - low)
    if not like.dtype.is_floating_point:
        values = values.round()
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return made.copy_(values if like.dim() else values[0])


class Kept:
    """A tensor's kept values. Plain attributes: there are thousands."""

    __slots__ = ("assumed", "value")

    def __init__(self, value: torch.Tensor | None, assumed: tuple[str, ...]) -> None:
        self.value = value
        """The real tensor; ``None`` where only assumptions are kept."""
        self.assumed = assumed
        """Sentences that say what was assumed of the values."""


class KeptValues:
    """The store: memory → layout → what is kept. It lets memory go, and what is kept of it goes along."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, dict[Any, Kept]]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def get(self, tensor: Any) -> Kept | None:
        """Return what is kept of a tensor as it is now."""
        if not self._of or tensor.layout is not torch.strided:
            return None
        beside = self._beside(tensor.untyped_storage())
        return beside.get(_layout(tensor)) if beside else None

    def keep(self, tensor: Any, value: torch.Tensor | None, assumed: tuple[str, ...] = ()) -> None:
        """Keep the values of a tensor as it is now. A sparse one has no memory of its own, and nothing is kept."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        beside = self._beside(storage)
        if beside is None:
            key, beside = storage._cdata, {}
            self._of[key] = (weakref.ref(storage, self._gone(key)), beside)
        beside[_layout(tensor)] = Kept(value, assumed)

    def sharing(self, tensor: Any) -> Iterable[Kept]:
        """Return what is kept of all tensors that lie in the memory of this one."""
        if tensor.layout is not torch.strided:
            return ()
        return (self._beside(tensor.untyped_storage()) or {}).values()

    def forget(self, tensor: Any) -> None:
        """Forget all that lies in the memory of a tensor."""
        if tensor.layout is torch.strided:
            self._of.pop(tensor.untyped_storage()._cdata, None)

    def _beside(self, storage: Any) -> dict[Any, Kept] | None:
        reference, beside = self._of.get(storage._cdata, (None, None))
        return beside if reference is not None and reference() is storage else None

    def _gone(self, key: int) -> Callable[[Any], None]:
        def gone(reference: Any) -> None:
            if self._of.get(key, (None,))[0] is reference:
                del self._of[key]

        return gone


def _layout(tensor: Any) -> tuple[Any, ...]:
    """Return what tells a tensor from others in the same memory."""
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
