"""Initial weights: drawing them again until all lie within bounds reads values, which fake tensors do not have.

How often a program draws again says nothing about its steps, which is why meta tensors skip it too.
"""

from __future__ import annotations

from typing import Any

import torch

from tracer.shape_only.substitutions.substitution import Site, Substitution


def _install(site: Site) -> None:
    def drawn_once(tensor: Any, mean: float, std: float, *bounds: Any, generator: Any = None, **more: Any) -> Any:
        with torch.no_grad():
            return tensor.normal_(mean, std)

    site.patch(torch.nn.init, "_no_grad_trunc_normal_", drawn_once)


SUBSTITUTION = Substitution(
    "initialization", "Truncated normal weights are drawn once, since nothing tells which of them are out of bounds.",
    cpu=frozenset(), gpu=frozenset(), install=_install)
