"""Pooling by maximum or mean, of one to three dimensions, forward and backward.

Dimensions: channels in all (batch × channels), values of one channel in and out, and values a window looks at.

    FLOPs  = channels·out_size·window
    bytes  = input read and output written; maxima also write int64 positions, which backward reads back;
             backward reads the output's gradient and writes the input's

Source: the definition; overlapping windows read from cache. 2020–2022 traces recorded no window: halves and 2s are
assumed (flag "assumed"). Layout: "nhwc" for images in channels last.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from kernel_models.dtypes import itemsize
from kernel_models.families.registry import Inputs, backward, forward
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import TensorSpec, channels_last

Sizes = tuple[int, ...]


def pooling(
    kind: str, channels: int, in_size: int, out_size: int, window: int, dtype: str, flags: tuple[str, ...] = (),
    layout: str = "",
) -> Iterator[OpCall]:
    """Kinds "max", "avg", "adaptive_avg", "adaptive_max" and these with "_backward"; none if it works on nothing."""
    if not channels * in_size * out_size:
        return
    size = itemsize(dtype)
    out = channels * out_size * (size + (8 if "max" in kind else 0))
    source = channels * in_size * size
    backwards = kind.endswith("_backward")
    yield OpCall(
        Family.POOLING, kind, (channels, in_size, out_size, window), dtype, layout, flags,
        flops=float(channels * out_size * window),
        bytes_read=float(out if backwards else source), bytes_written=float(source if backwards else out),
    )


def _spatial(op: Inputs) -> int:
    return next((int(digit) for digit in "123" if f"{digit}d" in op.name), 2)


def _windows(op: Inputs, kind: str, source: TensorSpec, out: TensorSpec | None = None) -> Iterator[OpCall]:
    """Sizes from the window's, or from the gradient where that was recorded."""
    n = _spatial(op)
    size = source.shape[-n:]
    kernel, stride, padding = op.ints("kernel_size"), op.ints("stride"), op.ints("padding")
    flags: tuple[str, ...] = () if kernel else ("assumed",)
    kernel = _spread(kernel, n, 2)
    steps, pads = _spread(stride or kernel, n, 2), _spread(padding, n, 0)
    dilation = _spread(op.ints("dilation") if "dilation" in op.names else None, n, 1)
    reached = out.shape[-n:] if out is not None else tuple(
        max((i + 2 * p - d * (k - 1) - 1) // s + 1, 0)
        for i, k, s, p, d in zip(size, kernel, steps, pads, dilation, strict=True))
    yield from pooling(kind, prod(source.shape[:-n]), prod(size), prod(reached), prod(kernel), source.dtype,
                       flags, channels_last(source))


def _spread(sizes: Sizes | None, n: int, missing: int) -> Sizes:
    return (missing,) * n if not sizes else sizes * n if len(sizes) == 1 else sizes[:n]


_MAX, _AVG = "(self, kernel_size, stride, padding, dilation)", "(self, kernel_size, stride, padding)"


@forward(Family.POOLING, f"aten::max_pool2d_with_indices{_MAX}", f"aten::max_pool3d_with_indices{_MAX}",
         f"aten::max_pool1d{_MAX}", f"aten::max_pool2d{_MAX}", f"aten::max_pool3d{_MAX}",
         f"aten::avg_pool1d{_AVG}", f"aten::avg_pool2d{_AVG}", f"aten::avg_pool3d{_AVG}")
def _forward(op: Inputs) -> Iterator[OpCall]:
    yield from _windows(op, "max" if "max" in op.name else "avg", op.tensor("self"))


@backward(Family.POOLING, f"aten::max_pool2d_with_indices{_MAX}", f"aten::max_pool2d{_MAX}", f"aten::avg_pool2d{_AVG}",
          f"aten::max_pool3d_with_indices{_MAX}", f"aten::avg_pool3d{_AVG}", f"aten::max_pool3d{_MAX}")
def _gradient(op: Inputs) -> Iterator[OpCall]:
    yield from _windows(op, "max_backward" if "max" in op.name else "avg_backward", op.tensor("self"))


@forward(Family.POOLING,
         "aten::max_pool2d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation)",
         "aten::max_pool3d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation)",
         "aten::avg_pool2d_backward(grad_output, self, kernel_size, stride, padding)",
         "aten::avg_pool3d_backward(grad_output, self, kernel_size, stride, padding)")
def _backward(op: Inputs) -> Iterator[OpCall]:
    kind = "max_backward" if "max" in op.name else "avg_backward"
    yield from _windows(op, kind, op.tensor("self"), op.tensor("grad_output"))


@forward(Family.POOLING, *(f"aten::{name}(self, output_size)" for name in (
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")))
def _adaptive(op: Inputs) -> Iterator[OpCall]:
    yield from _adapted(op, op.tensor("self"), op.ints("output_size"))


@backward(Family.POOLING, "aten::_adaptive_avg_pool2d(self, output_size)",
          "aten::adaptive_avg_pool2d(self, output_size)",
          "aten::adaptive_max_pool2d(self, output_size)")
def _adaptive_gradient(op: Inputs) -> Iterator[OpCall]:
    yield from _adapted(op, op.tensor("self"), op.ints("output_size"), "_backward")


@forward(Family.POOLING, "aten::_adaptive_avg_pool2d_backward(grad_output, self)",
         "aten::_adaptive_avg_pool3d_backward(grad_output, self)",
         "aten::adaptive_max_pool2d_backward(grad_output, self)")
def _adaptive_backward(op: Inputs) -> Iterator[OpCall]:
    yield from _adapted(op, op.tensor("self"), op.tensor("grad_output").shape[-_spatial(op):], "_backward")


def _adapted(op: Inputs, source: TensorSpec, size: Sizes | None, suffix: str = "") -> Iterator[OpCall]:
    n = _spatial(op)
    in_size, out_size = prod(source.shape[-n:]), prod(_spread(size, n, 1))
    kind = f"adaptive_{'max' if 'max' in op.name else 'avg'}{suffix}"
    yield from pooling(kind, prod(source.shape[:-n]), in_size, out_size, -(-in_size // max(out_size, 1)), source.dtype,
                       () if size else ("assumed",), channels_last(source))
