"""One-hot: CUDA does not look at the values, while the CPU reads them to check their range.

Fake tensors have a third way of their own (comparing with a range), which no device takes.
"""

from __future__ import annotations

from typing import Any

import torch

from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.substitutions.substitution import Site, Substitution


def _install(site: Site) -> None:
    def one_hot(x: Any, num_classes: int = -1) -> Any:
        if num_classes <= 0:
            raise ShapeOnlyError("one_hot without num_classes takes the number of classes from the values, which a "
                                 "trace by shapes alone does not have: give num_classes.")
        site.used("one_hot")
        ones = torch.zeros([*x.shape, num_classes], dtype=x.dtype, device=x.device)
        return ones.scatter_(-1, x.unsqueeze(-1), 1)

    site.replace("one_hot", one_hot)


SUBSTITUTION = Substitution(
    "one_hot", "CUDA fills zeros and scatters ones; only the CPU checks the range of the values, and waits for it.",
    cpu=frozenset({"aten::min", "aten::max", "aten::fill_", "aten::_local_scalar_dense", "aten::zeros",
                   "aten::scatter_"}),
    gpu=frozenset({"aten::zeros", "aten::scatter_"}), install=_install)
