"""Sorting, top-k and what is built on them.

Dimensions: rows × columns sorted each by itself, and the k that are kept (= columns for a full sort).

    FLOPs  = rows·columns·log2(columns) comparisons for a sort, rows·columns for a top-k
    bytes  = values read once; values and int64 positions of the k kept written

Source: the definitions; radix sorts read and write several times, which a model's efficiency carries.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

from kernel_models.dtypes import itemsize
from kernel_models.families.registry import Inputs, dimension, forward, without_gradient
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import TensorSpec


def sort(kind: str, rows: int, columns: int, k: int, dtype: str) -> Iterator[OpCall]:
    """The call of one sort; none if there is nothing to sort."""
    if not rows * columns:
        return
    comparisons = rows * columns * (log2(max(columns, 2)) if kind != "topk" else 1)
    yield OpCall(Family.SORT, kind, (rows, columns, k), dtype, flops=float(comparisons),
                 bytes_read=float(rows * columns * itemsize(dtype)),
                 bytes_written=float(rows * k * (itemsize(dtype) + 8)))


def _along(op: Inputs, tensor: TensorSpec, dim: int, k: int | None) -> Iterator[OpCall]:
    columns = tensor.shape[dimension(dim, len(tensor.shape))] if tensor.shape else 1
    kind = {"msort": "sort", "argsort": "sort", "kthvalue": "topk", "nanmedian": "median"}.get(
        op.short_name, op.short_name)
    yield from sort(kind, tensor.elements // max(columns, 1), columns, columns if k is None else k, tensor.dtype)


@forward(Family.SORT, "aten::sort(self, dim)", "aten::argsort(self, dim)")
def _sort(op: Inputs) -> Iterator[OpCall]:
    """The stable variant has a boolean before the dimension; the last dimension is taken then."""
    dim = op.number("dim") if op.text("dim") not in ("True", "False") else None
    yield from _along(op, op.tensor("self"), -1 if dim is None else int(dim), None)


@forward(Family.SORT, "aten::topk(self, k, dim)", "aten::kthvalue(self, k, dim)")
def _topk(op: Inputs) -> Iterator[OpCall]:
    yield from _along(op, op.tensor("self"), op.integer("dim", -1),
                      1 if op.short_name == "kthvalue" else op.integer("k", 1))


@forward(Family.SORT, "aten::median(self, dim)", "aten::nanmedian(self, dim)")
def _median(op: Inputs) -> Iterator[OpCall]:
    tensor, dim = op.tensor("self"), op.number("dim")
    if dim is None:
        yield from sort("median", 1, tensor.elements, 1, tensor.dtype)
    else:
        yield from _along(op, tensor, int(dim), 1)


@forward(Family.SORT, "aten::_unique2(self)", "aten::unique_dim(self)", "aten::unique_consecutive(self)",
         "aten::_unique(self)", "aten::msort(self)", "aten::unique_dim_consecutive(self)")
def _unique(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("self")
    yield from sort("unique" if "unique" in op.name else "sort", 1, tensor.elements, tensor.elements, tensor.dtype)


@forward(Family.SORT, "vllm::topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output)",
         "_moe_C::topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output)")
def _route(op: Inputs) -> Iterator[OpCall]:
    gates, kept = op.tensor("gating_output"), op.tensor("topk_weights")
    yield from sort("topk", gates.elements // max(gates.shape[-1], 1), gates.shape[-1], kept.shape[-1], gates.dtype)


without_gradient("aten::argsort", "aten::_unique2", "aten::unique_consecutive")
