"""Sparse gradients: fake tensors forget how many rows a sparse tensor has when it is copied or scaled.

An embedding with ``sparse=True`` has gradients of as many rows as it was asked for. ``clone``, ``mul`` and ``div`` of a
fake sparse tensor give one without any, so that reducing it would seem to cost nothing. The gradient of bags has none
either, as the CPU's forward does not say which row belongs to which bag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tracer.shape_only.substitutions.substitution import Site, Substitution

_SAME_ROWS = ("clone.default", *(f"{name}.{kind}" for name in ("mul", "div", "mul_", "div_")
                                 for kind in ("Tensor", "Scalar")))

_BAGS = torch.ops.aten._embedding_bag_backward.default
_NUM_WEIGHTS, _SPARSE = 6, 9
"""Places of arguments."""


def _gradient_of_bags(*args: Any, **kwargs: Any) -> Any:
    """A row for each index where the gradient is sparse."""
    if len(args) <= _SPARSE or not args[_SPARSE]:
        return _BAGS(*args, **kwargs)
    grad, indices = args[:2]
    rows = grad.new_empty(indices.numel(), grad.shape[1])
    return torch.sparse_coo_tensor(indices.reshape(1, -1), rows, (args[_NUM_WEIGHTS], grad.shape[1]),
                                   check_invariants=False)


def _install(site: Site) -> None:
    for name in _SAME_ROWS:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload, None)
        if operator is not None and operator not in site.rules:
            site.rules[operator] = _keeping_rows(operator, in_place=packet.endswith("_"))
    site.rules[_BAGS] = _gradient_of_bags


def _keeping_rows(operator: Any, *, in_place: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0]
        if tensor.layout is not torch.sparse_coo:
            return operator(*args, **kwargs)
        return tensor if in_place else torch.sparse_coo_tensor(
            tensor._indices(), tensor._values(), tensor.shape, check_invariants=False)

    return call


SUBSTITUTION = Substitution(
    "sparse", "Fake sparse tensors lose their rows when they are copied or scaled; no device does that.",
    cpu=frozenset(), gpu=frozenset(), install=_install)
