"""Pooling by maximum or mean, interpolation and grid sampling. Layout: "nhwc" for images in channels last.

Pooling of one to three dimensions. Dimensions: channels in all (batch × channels), values of one channel in and out,
and values in a window.

    FLOPs  = channels·out_size·window
    Bytes  = input read and output written; maxima also write int64 positions, which backward reads back;
             backward reads the output's gradient and writes the input's

Source: the definition; overlapping windows read from cache. 2020–2022 traces recorded no window: halves and 2s are
assumed (flag "assumed").

Interpolation and grid sampling. Dimensions: channels in all (batch × channels), values of one channel in and out.

    FLOPs  = ``channels·out_size × values mixed`` (nearest 1, linear 2 a dimension, cubic 4 a dimension) × 2.
    Bytes  = input read, output written; grid sampling also reads its grid; backward the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from kernel_models.families.registry import Inputs, Unpriceable, both, forward, spread
from kernel_models.op_call import Family, OpCall, channels_last, itemsize


def pooling(
    kind: str, channels: int, in_size: int, out_size: int, window: int, dtype: str, flags: tuple[str, ...] = (),
    layout: str = "",
) -> Iterator[OpCall]:
    """Yield a pooling of kind "max", "avg", "adaptive_avg", "adaptive_max" or with "_backward"; none if it is empty."""
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


_MAX, _AVG = "(self, kernel_size, stride, padding, dilation)", "(self, kernel_size, stride, padding)"


@both(Family.POOLING, f"aten::max_pool2d_with_indices{_MAX}", f"aten::max_pool3d_with_indices{_MAX}",
      f"aten::max_pool2d{_MAX}", f"aten::max_pool3d{_MAX}", f"aten::avg_pool2d{_AVG}", f"aten::avg_pool3d{_AVG}")
@forward(Family.POOLING, f"aten::max_pool1d{_MAX}", f"aten::avg_pool1d{_AVG}",
         "aten::max_pool2d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation)",
         "aten::max_pool3d_with_indices_backward(grad_output, self, kernel_size, stride, padding, dilation)",
         "aten::avg_pool2d_backward(grad_output, self, kernel_size, stride, padding)",
         "aten::avg_pool3d_backward(grad_output, self, kernel_size, stride, padding)")
def _windows(op: Inputs) -> Iterator[OpCall]:
    """Yield a pooling; its sizes follow from the window, or from the gradient if that was recorded."""
    n, source = _spatial(op), op.tensor("self")
    size = source.shape[-n:]
    kernel, stride = op.ints("kernel_size"), op.ints("stride")
    flags: tuple[str, ...] = () if kernel else ("assumed",)
    kernel = spread(kernel, n, 2)
    steps, pads = spread(stride or kernel, n, 2), spread(op.ints("padding"), n, 0)
    dilation = spread(op.ints("dilation"), n, 1)
    reached = op.tensor("grad_output").shape[-n:] if "grad_output" in op.names else tuple(
        max((i + 2 * p - d * (k - 1) - 1) // s + 1, 0)
        for i, k, s, p, d in zip(size, kernel, steps, pads, dilation, strict=True))
    yield from pooling(("max" if "max" in op.name else "avg") + op.suffix, prod(source.shape[:-n]), prod(size),
                       prod(reached), prod(kernel), source.dtype, flags, channels_last(source))


@both(Family.POOLING, "aten::_adaptive_avg_pool2d(self, output_size)", "aten::adaptive_avg_pool2d(self, output_size)",
      "aten::adaptive_max_pool2d(self, output_size)")
@forward(Family.POOLING, *(f"aten::{name}(self, output_size)" for name in (
    "_adaptive_avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
    "adaptive_max_pool3d")), *(f"aten::{name}_backward(grad_output, self)" for name in (
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d")))
def _adaptive(op: Inputs) -> Iterator[OpCall]:
    n, source = _spatial(op), op.tensor("self")
    size = op.tensor("grad_output").shape[-n:] if "grad_output" in op.names else op.ints("output_size")
    in_size, out_size = prod(source.shape[-n:]), prod(spread(size, n, 1))
    kind = f"adaptive_{'max' if 'max' in op.name else 'avg'}{op.suffix}"
    yield from pooling(kind, prod(source.shape[:-n]), in_size, out_size, -(-in_size // max(out_size, 1)), source.dtype,
                       () if size else ("assumed",), channels_last(source))


_MODES = ("nearest_exact", "nearest", "bilinear", "bicubic", "trilinear", "linear", "grid")
_MIXED = {"nearest_exact": 1, "nearest": 1, "linear": 2, "bilinear": 4, "trilinear": 8, "bicubic": 16, "grid": 4}
"""Number of input values that make an output value, by the definition of each mode."""
_UPSAMPLES = ("nearest1d", "nearest2d", "nearest3d", "_nearest_exact1d", "_nearest_exact2d", "_nearest_exact3d",
              "linear1d", "bilinear2d", "bicubic2d", "trilinear3d", "_bilinear2d_aa", "_bicubic2d_aa")


def interpolate(kind: str, channels: int, in_size: int, out_size: int, dtype: str, layout: str = "",
                ) -> Iterator[OpCall]:
    """Yield a resize; its kind is the mode, with or without "_backward". No call if it has no elements."""
    if not channels * in_size * out_size:
        return
    size, mode = itemsize(dtype), kind.removesuffix("_backward")
    source, out = channels * in_size * size, channels * out_size * size
    read, written = (out, source) if kind.endswith("_backward") else (source, out)
    yield OpCall(Family.INTERPOLATE, kind, (channels, in_size, out_size), dtype, layout,
                 flops=2.0 * channels * out_size * _MIXED[mode], bytes_read=float(read), bytes_written=float(written))


def _mode(name: str) -> str:
    return next(mode for mode in _MODES if mode in name)


def _name(mode: str, suffix: str = "") -> str:
    return f"aten::{'_' if mode.startswith('_') else ''}upsample_{mode.lstrip('_')}{suffix}"


@both(Family.INTERPOLATE, *(f"{_name(mode)}(self, output_size)" for mode in _UPSAMPLES))
def _upsample(op: Inputs) -> Iterator[OpCall]:
    """Yield an interpolation; its output size was given, or follows from the given scale factors."""
    source, n = op.tensor("self"), _spatial(op)
    in_size = source.shape[-n:]
    size = op.ints("output_size")
    if not size:
        factors = next((a.value for a in op.arguments[2:] if a.value.startswith("[")), "")
        scales = [float(part) for part in factors.strip("[]").split(",") if part.strip()]
        if len(scales) != n:
            raise Unpriceable("neither size nor scale")
        size = tuple(int(i * s) for i, s in zip(in_size, scales, strict=True))
    yield from interpolate(_mode(op.name) + op.suffix, prod(source.shape[:-n]), prod(in_size), prod(size), source.dtype,
                           channels_last(source))


@forward(Family.INTERPOLATE, *(f"{_name(mode, '_backward')}(grad_output, output_size, input_size)"
                               for mode in _UPSAMPLES))
def _upsample_backward(op: Inputs) -> Iterator[OpCall]:
    grad, n = op.tensor("grad_output"), _spatial(op)
    size = op.ints("input_size")
    if not size:
        raise Unpriceable("the input's size")
    yield from interpolate(_mode(op.name) + op.suffix, prod(grad.shape[:-n]), prod(size[-n:]),
                           prod(grad.shape[-n:]), grad.dtype, channels_last(grad))


@forward(Family.INTERPOLATE, "aten::grid_sampler_2d(input, grid)", "aten::grid_sampler_3d(input, grid)",
         "aten::grid_sampler(input, grid)", "aten::cudnn_grid_sampler(input, grid)",
         "aten::grid_sampler_2d_backward(grad_output, input, grid)",
         "aten::grid_sampler_3d_backward(grad_output, input, grid)")
def _grid(op: Inputs) -> Iterator[OpCall]:
    source, grid = op.tensor("input"), op.tensor("grid")
    yield from interpolate(f"grid{op.suffix}", prod(source.shape[:2]), prod(source.shape[2:]), prod(grid.shape[1:-1]),
                           source.dtype, channels_last(source))


@forward(Family.INTERPOLATE, "torchvision::roi_align(input, rois, spatial_scale, pooled_height, pooled_width)")
def _regions(op: Inputs) -> Iterator[OpCall]:
    """Yield the bins of all regions, mixed from four neighbours each; only the image values that bins need are read."""
    source, regions = op.tensor("input"), op.tensor("rois")
    out = regions.shape[0] * _bins(op)
    read = min(4 * out, source.shape[0] * prod(source.shape[2:]))
    yield from interpolate("grid", source.shape[1], read, out, source.dtype, channels_last(source))


@forward(Family.INTERPOLATE, "torchvision::_roi_align_backward(grad, rois, spatial_scale, pooled_height, pooled_width, "
         "batch_size, channels, height, width)")
def _regions_back(op: Inputs) -> Iterator[OpCall]:
    grad = op.tensor("grad")
    image = op.integer("batch_size", 1) * op.integer("height", 1) * op.integer("width", 1)
    yield from interpolate("grid_backward", op.integer("channels", 1), image, op.tensor("rois").shape[0] * _bins(op),
                           grad.dtype, channels_last(grad))


def _bins(op: Inputs) -> int:
    return op.integer("pooled_height", 7) * op.integer("pooled_width", 7)
