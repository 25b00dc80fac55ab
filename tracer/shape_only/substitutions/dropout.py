"""Dropout: one fused kernel on CUDA, random numbers and two products on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from tracer.shape_only.substitutions.substitution import Site, Substitution


def _install(site: Site) -> None:
    aten = torch.ops.aten

    def dropout(x: Any, p: float, train: bool) -> Any:
        if not train or p == 0 or x.numel() == 0:
            return x
        if p < 1:
            site.used("dropout")
            return aten.native_dropout(x, p, train)[0]
        return x * torch.zeros((), dtype=x.dtype)

    site.replace("dropout", dropout)


SUBSTITUTION = Substitution(
    "dropout", "CUDA draws, masks and scales in one kernel, and keeps a mask of one byte an element.",
    cpu=frozenset({"aten::empty_like", "aten::bernoulli_", "aten::div_", "aten::mul"}),
    gpu=frozenset({"aten::native_dropout", "aten::native_dropout_backward"}),
    install=_install)
