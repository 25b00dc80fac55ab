"""Histograms: CUDA counts whole numbers too, which the CPU's kernel, run in place of a fake one, refuses."""

from __future__ import annotations

from typing import Any

import torch

from tracer.shape_only.substitutions.substitution import Site, Substitution


def _install(site: Site) -> None:
    def histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
        return torch.empty(bins, dtype=x.dtype)

    site.rules[torch.ops.aten.histc.default] = histc


SUBSTITUTION = Substitution(
    "counting", "CUDA makes histograms of whole numbers, which are on the CPU of floating-point numbers only.",
    cpu=frozenset(), gpu=frozenset({"aten::histc"}), install=_install)
