"""Interpolation and grid sampling, forward and backward.

Dimensions: channels in all (batch × channels), values of one channel in and out.

    FLOPs  = channels·out_size × values mixed (nearest 1, linear 2 a dimension, cubic 4 a dimension) × 2
    bytes  = input read, output written; grid sampling also reads its grid; backward the other way round

Source: the definition. Layout: "nhwc" for images in channels last.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from kernel_models.dtypes import itemsize
from kernel_models.families.registry import Inputs, Unpriceable, backward, forward
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import channels_last

_MODES = ("nearest_exact", "nearest", "bilinear", "bicubic", "trilinear", "linear", "grid")
_MIXED = {"nearest_exact": 1, "nearest": 1, "linear": 2, "bilinear": 4, "trilinear": 8, "bicubic": 16, "grid": 4}
_UPSAMPLES = ("nearest1d", "nearest2d", "nearest3d", "_nearest_exact1d", "_nearest_exact2d", "_nearest_exact3d",
              "linear1d", "bilinear2d", "bicubic2d", "trilinear3d", "_bilinear2d_aa", "_bicubic2d_aa")


def interpolate(kind: str, channels: int, in_size: int, out_size: int, dtype: str, layout: str = "",
                ) -> Iterator[OpCall]:
    """Kinds are the modes, and these with "_backward"; none if it works on nothing."""
    if not channels * in_size * out_size:
        return
    size, mode = itemsize(dtype), kind.removesuffix("_backward")
    source, out = channels * in_size * size, channels * out_size * size
    read, written = (out, source) if kind.endswith("_backward") else (source, out)
    yield OpCall(Family.INTERPOLATE, kind, (channels, in_size, out_size), dtype, layout,
                 flops=2.0 * channels * out_size * _MIXED[mode], bytes_read=float(read), bytes_written=float(written))


def _mode(name: str) -> str:
    return next(mode for mode in _MODES if mode in name)


def _spatial(name: str) -> int:
    return next(int(digit) for digit in "321" if f"{digit}d" in name)


def _name(mode: str, suffix: str = "") -> str:
    return f"aten::{'_' if mode.startswith('_') else ''}upsample_{mode.lstrip('_')}{suffix}"


@forward(Family.INTERPOLATE, *(
    f"{_name(mode)}(self, output_size)" for mode in _UPSAMPLES))
def _upsample(op: Inputs) -> Iterator[OpCall]:
    yield from _forward(op, "")


@backward(Family.INTERPOLATE, *(
    f"{_name(mode)}(self, output_size)" for mode in _UPSAMPLES))
def _upsample_gradient(op: Inputs) -> Iterator[OpCall]:
    yield from _forward(op, "_backward")


def _forward(op: Inputs, suffix: str) -> Iterator[OpCall]:
    """By the output's size, or by scale factors where those were given instead."""
    source, n = op.tensor("self"), _spatial(op.name)
    in_size = source.shape[-n:]
    size = op.ints("output_size")
    if not size:
        factors = next((a.value for a in op.arguments[2:] if a.value.startswith("[")), "")
        scales = [float(part) for part in factors.strip("[]").split(",") if part.strip()]
        if len(scales) != n:
            raise Unpriceable("neither size nor scale")
        size = tuple(int(i * s) for i, s in zip(in_size, scales, strict=True))
    yield from interpolate(_mode(op.name) + suffix, prod(source.shape[:-n]), prod(in_size), prod(size), source.dtype,
                           channels_last(source))


@forward(Family.INTERPOLATE, *(f"{_name(mode, '_backward')}(grad_output, output_size, input_size)"
                               for mode in _UPSAMPLES))
def _upsample_backward(op: Inputs) -> Iterator[OpCall]:
    grad, n = op.tensor("grad_output"), _spatial(op.name)
    size = op.ints("input_size")
    if not size:
        raise Unpriceable("the input's size")
    yield from interpolate(_mode(op.name) + "_backward", prod(grad.shape[:-n]), prod(size[-n:]),
                           prod(grad.shape[-n:]), grad.dtype, channels_last(grad))


@forward(Family.INTERPOLATE, "aten::grid_sampler_2d(input, grid)", "aten::grid_sampler_3d(input, grid)",
         "aten::grid_sampler(input, grid)", "aten::cudnn_grid_sampler(input, grid)",
         "aten::grid_sampler_2d_backward(grad_output, input, grid)",
         "aten::grid_sampler_3d_backward(grad_output, input, grid)")
def _grid(op: Inputs) -> Iterator[OpCall]:
    source, grid = op.tensor("input"), op.tensor("grid")
    kind = "grid_backward" if "backward" in op.name else "grid"
    yield from interpolate(kind, prod(source.shape[:2]), prod(source.shape[2:]), prod(grid.shape[1:-1]), source.dtype,
                           channels_last(source))


@forward(Family.INTERPOLATE, "torchvision::roi_align(input, rois, spatial_scale, pooled_height, pooled_width)")
def _regions(op: Inputs) -> Iterator[OpCall]:
    """Values of each region's bins, mixed from four neighbours; of the image no more is read than the bins ask for."""
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
