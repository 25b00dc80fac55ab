"""``nn.Module.to``, ``.double()`` and the like, on parameters without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tracer.shape_only.substitutions.substitution import Site, Substitution


def _install(site: Site) -> None:
    site.patch(torch.nn.Module, "_apply", _apply)


def _apply(self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """``nn.Module._apply`` with ``.data`` set; torch's own swaps fake parameters, which fails where anything refers to
    them."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for parameter in self._parameters.values():
        if parameter is None:
            continue
        with torch.no_grad():
            for tensor in (parameter, parameter.grad):
                applied = fn(tensor) if tensor is not None else None
                if applied is not tensor:
                    tensor.data = applied
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


SUBSTITUTION = Substitution(
    "conversions", "Parameters take their new type in place, as real ones do; torch would swap fake ones, and cannot.",
    frozenset(), frozenset(), _install)
