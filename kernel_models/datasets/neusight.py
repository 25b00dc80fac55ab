"""NeuSight's fp32 kernels: matrix products, softmax, layer norm and elementwise, on GPUs from P4 to L4.

In their tables ``N`` of products is the contraction and ``K`` the output's width. Convolutions have no shapes and are
left out. Their split marks the test rows, which are never fitted to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kernel_models.datasets.samples import Samples
from kernel_models.datasets.tables import Reader
from kernel_models.device import resolve_device
from kernel_models.families.elementwise import elementwise
from kernel_models.families.gemm import gemm
from kernel_models.families.norm import norm
from kernel_models.families.reduction import softmax
from kernel_models.op_call import OpCall
from kernel_models.tensors import TensorSpec

if TYPE_CHECKING:
    import pandas

_ONE_INPUT = ("relu", "tanh", "gelu", "powu", "mulu", "divu", "addu", "pow")
_TWO_INPUTS = ("add", "mul", "div")


def _call(op: str, b: int, h: int, m: int, n: int, k: int) -> Iterator[OpCall]:
    if op == "bmm":
        yield from gemm(b, m, k, n, "fp32", "nn")
    elif op == "linear":
        yield from gemm(1, m, k, n, "fp32", "nt", added="bias")
    elif op == "softmax":
        yield from softmax("softmax", TensorSpec((b, h), "fp32"), 1)
    elif op == "ln":
        yield from norm("layer_norm", b, h, "fp32", h)
    else:
        whole = TensorSpec((b, h), "fp32")
        yield from elementwise(op.removesuffix("u"), [whole, whole] if op in _TWO_INPUTS else [whole])


def read(frame: pandas.DataFrame, path: Path) -> Iterator[Samples]:
    """One samples object for each device and kind of kernel; the shape group is the sizes."""
    known = frame[frame.OPName.isin({"bmm", "linear", "softmax", "ln", *_ONE_INPUT, *_TWO_INPUTS})]
    family = known.OPName.map(lambda op: op if op in ("softmax", "ln") else
                              "gemm" if op in ("bmm", "linear") else "elementwise")
    for (gpu, _), rows in known.groupby(["Device", family], sort=True):
        # A linear layer's rows are counted in M where there is one, else in B.
        sizes = rows[["B", "H", "M", "N", "K"]].fillna(1).astype("int64").to_numpy().tolist()
        calls = [call for op, size in zip(rows.OPName, sizes, strict=True) for call in _call(op, *size)]
        yield Samples(resolve_device(str(gpu)).name, "neusight", path.name, calls, rows.latency_us.to_numpy(float),
                      {"shape": ["x".join(map(str, call.dims)) for call in calls]},
                      np.array(rows.split == "test", bool))


READER = Reader("NeuSight's kernels", frozenset({"OPName", "Device", "B", "H", "M", "N", "K", "split", "latency_us"}),
                read)
