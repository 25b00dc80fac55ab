"""Softmax and log-softmax, forward and backward.

Dimensions: ``outer`` rows of ``reduced`` values, ``inner`` the stride between the values of a row in elements.

    FLOPs  = 5 an element forward (maximum, subtract, exponential, sum, divide), 4 backward
    bytes  = the tensor read and written once; backward reads gradient and output

Source: the definition; a row is read once, as all fused kernels do. With ``half_to_float`` the output is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_models.dtypes import itemsize
from kernel_models.families.registry import Inputs, backward, dimension, forward
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import TensorSpec


def softmax(kind: str, tensor: TensorSpec, dim: int | None, out_dtype: str = "") -> Iterator[OpCall]:
    """One softmax along a dimension; ``kind`` ends in "_backward" for gradients."""
    if not tensor.elements:
        return
    at = dimension(dim, len(tensor.shape))
    reduced = tensor.shape[at] if tensor.shape else 1
    inner = max(tensor.strides[at], 1) if tensor.shape else 1
    size, backwards = itemsize(tensor.dtype), kind.endswith("_backward")
    written = itemsize(out_dtype or tensor.dtype)
    yield OpCall(
        Family.SOFTMAX, kind, (tensor.elements // reduced, reduced, inner), tensor.dtype,
        flags=(f"out_{out_dtype}",) if out_dtype and out_dtype != tensor.dtype else (),
        flops=float(tensor.elements * (4 if backwards else 5)),
        bytes_read=float(tensor.elements * size * (2 if backwards else 1)),
        bytes_written=float(tensor.elements * written),
    )


@forward(Family.SOFTMAX, "aten::_softmax(self, dim, half_to_float)", "aten::_log_softmax(self, dim, half_to_float)")
def _forward(op: Inputs) -> Iterator[OpCall]:
    dim = op.number("dim")
    yield from softmax(op.short_name.lstrip("_"), op.tensor("self"), None if dim is None else int(dim),
                       "fp32" if op.flag("half_to_float") else "")


@forward(Family.SOFTMAX, "aten::softmax(self, dim, dtype)", "aten::log_softmax(self, dim, dtype)",
         "aten::_safe_softmax(self, dim, dtype)", "aten::special_softmax(self, dim, dtype)")
def _composite(op: Inputs) -> Iterator[OpCall]:
    dim, dtype = op.number("dim"), op.dtype("dtype")
    kind = "log_softmax" if "log" in op.short_name else "softmax"
    yield from softmax(kind, op.tensor("self"), None if dim is None else int(dim), dtype)


@forward(Family.SOFTMAX, "aten::_softmax_backward_data(grad_output, output, dim, input_dtype)",
         "aten::_log_softmax_backward_data(grad_output, output, dim, input_dtype)",
         "aten::_masked_softmax_backward(grad_output, output, mask, dim)")
def _backward(op: Inputs) -> Iterator[OpCall]:
    dim = op.number("dim")
    kind = "log_softmax_backward" if "log" in op.name else "softmax_backward"
    yield from softmax(kind, op.tensor("grad_output"), None if dim is None else int(dim),
                       op.dtype("input_dtype") if "input_dtype" in op.names else "")


@forward(Family.SOFTMAX, "aten::_masked_softmax(self, mask, dim)")
def _masked(op: Inputs) -> Iterator[OpCall]:
    dim = op.number("dim")
    yield from softmax("softmax", op.tensor("self"), None if dim is None else int(dim))


@backward(Family.SOFTMAX, "aten::_softmax(self, dim)", "aten::_log_softmax(self, dim)", "aten::softmax(self, dim)",
          "aten::log_softmax(self, dim)", "aten::_safe_softmax(self, dim)")
def _gradient(op: Inputs) -> Iterator[OpCall]:
    dim = op.number("dim")
    kind = "log_softmax_backward" if "log" in op.name else "softmax_backward"
    yield from softmax(kind, op.tensor("self"), None if dim is None else int(dim))
