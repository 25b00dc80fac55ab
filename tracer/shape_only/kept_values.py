"""Real tensors behind fake ones, kept by the memory and the layout of the fake ones.

A tensor that is given other memory has the values of that memory from then on, however it was given (``.data =``,
``set_``, ``torch.utils.swap_tensors``, ``Module.half()``); one whose dtype or shape is another has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


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
