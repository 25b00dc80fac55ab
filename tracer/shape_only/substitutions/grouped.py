"""Grouped products: devices multiply groups of every floating-point type, fake tensors have a kernel for bf16 only."""

from __future__ import annotations

from typing import Any

import torch

from tracer.shape_only.substitutions.substitution import Site, Substitution, operator_of


def _install(site: Site) -> None:
    operator = operator_of("_grouped_mm")
    if operator is None:
        return

    def grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        if a.dtype == torch.bfloat16:
            return operator(a, b, offs, bias, out_dtype)
        if a.shape[-1] != b.shape[-2]:
            raise RuntimeError(f"grouped_mm: {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied")
        rows, columns = a.shape[-2], b.shape[-1]
        # Two matrices are multiplied by parts of the dimension they share, one result a part.
        groups = [offs.shape[0]] if a.dim() == b.dim() == 2 else [a.shape[0]] if a.dim() == b.dim() == 3 else []
        return torch.empty([*groups, rows, columns], dtype=out_dtype or a.dtype)

    site.rules[operator] = grouped_mm


SUBSTITUTION = Substitution(
    "grouped", "Groups of fp32 and fp16 are multiplied too, one after another.", cpu=frozenset(),
    gpu=frozenset({"aten::_grouped_mm"}), install=_install)
