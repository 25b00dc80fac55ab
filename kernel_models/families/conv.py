"""Convolutions of one to three dimensions: forward, gradient of the input (dgrad) and of the weight (wgrad).

Dimensions are those of the forward convolution, also for its gradients; sizes of missing dimensions are 1. A transposed
convolution is the input's gradient of another convolution, and has that convolution's dimensions. So its forward is a
"dgrad" flagged "transposed", with the channels and sizes of that convolution.

    FLOPs  = ``2 · batch · out_channels · out_d·out_h·out_w · (in_channels / groups) · kernel_d·kernel_h·kernel_w``
             for forward, dgrad and wgrad alike  (+ one addition an output with a bias).
    Bytes  = input + weight + output, two of them read and the third written.

Source: the definition (as NVIDIA's "Convolutional Layers User's Guide"): depthwise is groups = in_channels. 2020–2022
traces recorded neither strides nor paddings: stride 1 and half the kernel as padding are then assumed (flag "assumed").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from kernel_models.families.reduction import reduction
from kernel_models.families.registry import Inputs, Unpriceable, backward, forward, spread
from kernel_models.op_call import Family, OpCall, TensorSpec, itemsize, multiply_adds

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class _Convolution:
    """A forward convolution's sizes; spatial sizes as recorded, with one to three dimensions."""

    batch: int
    in_channels: int
    out_channels: int
    groups: int
    in_size: Sizes
    out_size: Sizes
    kernel: Sizes
    stride: Sizes
    dilation: Sizes
    dtype: str
    layout: str
    flags: tuple[str, ...] = ()

    def call(self, kind: str, bias: bool = False) -> Iterator[OpCall]:
        """Yield the call of forward, dgrad or wgrad; none if it has no elements."""
        size = itemsize(self.dtype)
        read_in = self.batch * self.in_channels * prod(self.in_size) * size
        out = self.batch * self.out_channels * prod(self.out_size)
        weight = self.out_channels * (self.in_channels // self.groups) * prod(self.kernel) * size
        if not out or not read_in:
            return
        written = {"forward": out * size, "dgrad": read_in, "wgrad": weight}[kind]
        added = self.out_channels if kind == "forward" else self.in_channels
        flops = 2.0 * out * (self.in_channels // self.groups) * prod(self.kernel) * multiply_adds(self.dtype)
        marks = {*self.flags, "bias"} if bias else set(self.flags)
        yield OpCall(
            Family.CONV, kind,
            (self.batch, self.in_channels, self.out_channels, self.groups, *_three(self.in_size),
             *_three(self.out_size), *_three(self.kernel), *_three(self.stride), *_three(self.dilation)),
            self.dtype, self.layout, tuple(sorted(marks)),
            flops=flops + (written / size if bias else 0),
            bytes_read=float(read_in + out * size + weight - written + (added * size if bias else 0)),
            bytes_written=float(written),
        )


def _three(sizes: Sizes) -> Sizes:
    return (1,) * (3 - len(sizes)) + sizes


def _layer(op: Inputs, source: TensorSpec, weight: TensorSpec, out: TensorSpec | None = None) -> _Convolution:
    """Return the forward convolution of a layer; ``source`` and ``out`` are the layer's input and output."""
    stride, groups = op.ints("stride"), op.integer("groups", 0)
    padding = (0,) if op.text("padding") == "valid" else op.ints("padding")
    transposed = "transpose" in op.name or op.flag("transposed")
    spatial = len(weight.shape) - 2
    if len(source.shape) == spatial + 1:
        source = TensorSpec((1, *source.shape), source.dtype)
    if spatial not in (1, 2, 3) or len(source.shape) != spatial + 2:
        raise Unpriceable(f"{op.name}: {source.shape} with weight {weight.shape}")
    kernel, size = weight.shape[2:], source.shape[2:]
    flags: tuple[str, ...] = ("transposed",) if transposed else ()
    known = stride is not None and padding is not None
    if not known and out is None:
        flags = (*flags, "assumed")
    steps = spread(stride, spatial, 1)
    spacing = spread(op.ints("dilation"), spatial, 1)
    pads = spread(padding, spatial, 0) if padding is not None else tuple(
        d * (k - 1) // 2 for k, d in zip(kernel, spacing, strict=True))
    if out is not None:
        reached = out.shape[2:]
        if stride is None:
            steps = tuple(max(round(max(a, b) / max(min(a, b), 1)), 1) for a, b in zip(size, reached, strict=True))
    elif transposed:
        more = spread(op.ints("output_padding"), spatial, 0)
        reached = tuple(
            (n - 1) * s - 2 * p + d * (k - 1) + 1 + e
            for n, s, p, d, k, e in zip(size, steps, pads, spacing, kernel, more, strict=True))
    else:
        reached = tuple(
            max((n + 2 * p - d * (k - 1) - 1) // s + 1, 0)
            for n, s, p, d, k in zip(size, steps, pads, spacing, kernel, strict=True))
    channels = source.shape[1]
    layout = "nhwc" if source.is_channels_last else "nchw"
    dtype = op.math_dtype(source)
    if transposed:
        # A transposed layer's input is the output of that convolution: weight [in, out / groups, kernel].
        return _Convolution(source.shape[0], weight.shape[1] * (groups or 1), channels, groups or 1, reached, size,
                            kernel, steps, spacing, dtype, layout, flags)
    groups = groups or max(channels // max(weight.shape[1], 1), 1)
    return _Convolution(source.shape[0], channels, weight.shape[0], groups, size, reached, kernel, steps, spacing,
                        dtype, layout, flags)


@forward(Family.CONV,
         "aten::conv1d(input, weight, bias, stride, padding, dilation, groups)",
         "aten::conv2d(input, weight, bias, stride, padding, dilation, groups)",
         "aten::conv3d(input, weight, bias, stride, padding, dilation, groups)",
         "aten::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)",
         "aten::_convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)",
         "aten::convolution_overrideable(input, weight, bias, stride, padding, dilation, transposed, output_padding, "
         "groups)",
         "aten::mkldnn_convolution(input, weight, bias, padding, stride, dilation, groups)",
         "aten::miopen_convolution(input, weight, bias, padding, stride, dilation, groups)",
         "aten::miopen_depthwise_convolution(input, weight, bias, padding, stride, dilation, groups)",
         "aten::cudnn_convolution_relu(input, weight, bias, stride, padding, dilation, groups)",
         "aten::miopen_convolution_relu(input, weight, bias, stride, padding, dilation, groups)",
         "aten::cudnn_convolution_add_relu(input, weight, z, alpha, bias, stride, padding, dilation, groups)",
         "aten::cudnn_convolution(input, weight, padding, stride, dilation, groups)",
         "aten::_conv_depthwise2d(input, weight, kernel_size, bias, stride, padding, dilation)",
         "aten::conv_depthwise3d(input, weight, kernel_size, bias, stride, padding, dilation)",
         "aten::thnn_conv2d(input, weight, kernel_size, bias, stride, padding)",
         "aten::_slow_conv2d_forward(input, weight, kernel_size, bias, stride, padding)",
         "aten::slow_conv3d_forward(input, weight, kernel_size, bias, stride, padding)",
         "aten::slow_conv_dilated2d(input, weight, kernel_size, bias, stride, padding, dilation)",
         "aten::conv_transpose1d(input, weight, bias, stride, padding, output_padding, groups, dilation)",
         "aten::conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups, dilation)",
         "aten::conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation)",
         "aten::cudnn_convolution_transpose(input, weight, padding, output_padding, stride, dilation, groups)",
         "aten::miopen_convolution_transpose(input, weight, bias, padding, output_padding, stride, dilation, groups)",
         "aten::slow_conv_transpose2d(input, weight, kernel_size, bias, stride, padding, output_padding, dilation)",
         "aten::slow_conv_transpose3d(input, weight, kernel_size, bias, stride, padding, output_padding, dilation)")
def _convolution(op: Inputs) -> Iterator[OpCall]:
    layer = _layer(op, op.tensor("input"), op.tensor("weight"))
    yield from layer.call("dgrad" if "transposed" in layer.flags else "forward", op.has("bias"))


@forward(Family.CONV,
         "aten::convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, "
         "output_padding, groups, output_mask)",
         "aten::convolution_backward_overrideable(grad_output, input, weight, stride, padding, dilation, transposed, "
         "output_padding, groups, output_mask)",
         "aten::cudnn_convolution_backward(self, grad_output, weight, padding, stride, dilation, groups)",
         "aten::miopen_convolution_backward(self, grad_output, weight, padding, stride, dilation, groups)",
         "aten::mkldnn_convolution_backward(self, grad_output, weight, padding, stride, dilation, groups)",
         "aten::_slow_conv2d_backward(grad_output, self, weight, kernel_size, stride, padding, output_mask)")
def _backward(op: Inputs) -> Iterator[OpCall]:
    """Yield the gradients that the mask asks for; operations of 2020 and of the CPU have no bias gradient."""
    grad = op.tensor("grad_output")
    source = op.tensor("input" if "input" in op.names else "self")
    mask = op.ints("output_mask") or (1, 1, int(bool(op.ints("bias_sizes"))))
    yield from _gradients(_layer(op, source, op.tensor("weight"), grad), mask, grad)


@forward(Family.CONV, "aten::cudnn_convolution_backward_input(self_size, grad_output, weight, padding, stride)",
         "aten::miopen_convolution_backward_input(self_size, grad_output, weight, padding, stride)")
def _input_gradient(op: Inputs) -> Iterator[OpCall]:
    """Yield the gradient of the input; an input size that was not recorded is assumed to equal the output's."""
    grad, weight = op.tensor("grad_output"), op.tensor("weight")
    size = op.ints("self_size")
    channels = weight.shape[1:2]
    source = TensorSpec(size or (*grad.shape[:1], *channels, *grad.shape[2:]), grad.dtype)
    layer = _layer(op, source, weight, grad)
    yield from replace(layer, flags=layer.flags if size else ("assumed",)).call("dgrad")


@forward(Family.CONV, "aten::cudnn_convolution_backward_weight(weight_size, grad_output, self, padding, stride)",
         "aten::miopen_convolution_backward_weight(weight_size, grad_output, self, padding, stride)")
def _weight_gradient(op: Inputs) -> Iterator[OpCall]:
    """Yield the gradient of the weight; for a weight size that was not recorded, a kernel of size 1 is assumed."""
    grad, source = op.tensor("grad_output"), op.tensor("self")
    size = op.ints("weight_size")
    ones = (1,) * (len(source.shape) - 2)
    weight = TensorSpec(size or (*grad.shape[1:2], *source.shape[1:2], *ones), grad.dtype)
    layer = _layer(op, source, weight, grad)
    yield from replace(layer, flags=layer.flags if size else ("assumed",)).call("wgrad")


@backward(Family.CONV,
          "aten::conv1d(input, weight, bias, stride, padding, dilation, groups)",
          "aten::conv2d(input, weight, bias, stride, padding, dilation, groups)",
          "aten::conv3d(input, weight, bias, stride, padding, dilation, groups)",
          "aten::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)",
          "aten::cudnn_convolution(input, weight, padding, stride, dilation, groups)",
          "aten::miopen_convolution(input, weight, bias, padding, stride, dilation, groups)",
          "aten::conv_transpose1d(input, weight, bias, stride, padding, output_padding, groups, dilation)",
          "aten::conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups, dilation)",
          "aten::conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation)")
def _layer_backward(op: Inputs) -> Iterator[OpCall]:
    layer = _layer(op, op.tensor("input"), op.tensor("weight"))
    transposed = "transposed" in layer.flags
    channels, size = (layer.in_channels, layer.in_size) if transposed else (layer.out_channels, layer.out_size)
    grad = TensorSpec((layer.batch, channels, *size), layer.dtype)
    yield from _gradients(layer, (1, 1, int(op.has("bias"))), grad)


def _gradients(layer: _Convolution, mask: Sizes, grad: TensorSpec) -> Iterator[OpCall]:
    """Yield the gradients; the input's gradient of a transposed convolution is a forward convolution."""
    if mask[0]:
        yield from layer.call("forward" if "transposed" in layer.flags else "dgrad")
    if mask[1]:
        yield from layer.call("wgrad")
    if mask[2:3] == (1,) and grad.elements:
        channels = grad.shape[1]
        yield from reduction("sum", channels, grad.elements // channels, 1 if layer.layout == "nchw" else channels,
                             grad.dtype)
