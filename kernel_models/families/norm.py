"""Layer, RMS, batch, group and instance normalisation, forward and backward.

Dimensions: rows × columns. Layer and RMS norm normalise each row's columns; for batch norm a row is a channel and its
columns the batch's values in it; for group norm a row is a group of one sample.

    FLOPs  = 8 an element forward (mean, variance, scale and shift), 6 for RMS norm, 14 backward
    bytes  = input read, output written, weights and row statistics once; backward reads gradient and input, writes the
             gradients of input and weights. Batch norm reads its input twice in training (statistics, then values).

Source: the definitions; a row that fits the chip is read once. Flags: "weight", "bias", "add" (a fused residual
addition), "eval" (batch norm with given statistics). Layout: "nhwc" for images
in channels last.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from kernel_models.families.registry import Inputs, Unpriceable, both, forward
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import TensorSpec, channels_last, itemsize


def norm(
    kind: str, rows: int, columns: int, dtype: str, affine: int, *, weight: bool = True, bias: bool = True,
    flags: tuple[str, ...] = (), weight_dtype: str = "", layout: str = "",
) -> Iterator[OpCall]:
    """One normalisation; ``affine`` is the length of its weight. None if there is nothing to normalise."""
    elements = rows * columns
    if not elements:
        return
    size, backwards = itemsize(dtype), kind.endswith("_backward")
    weights = affine * (int(weight) + int(bias)) * itemsize(weight_dtype or dtype)
    moments = 4 * rows * (1 if kind.startswith("rms") else 2)
    twice = kind == "batch_norm" and "eval" not in flags
    added = "add" in flags
    marks = [*flags, *(["weight"] if weight else []), *(["bias"] if bias else [])]
    if weight_dtype and weight_dtype != dtype and (weight or bias):
        marks.append(f"weight_{weight_dtype}")
    if (weight or bias) and affine != (rows if kind.startswith("batch") else columns):
        marks.append(f"affine={affine}")
    yield OpCall(
        Family.NORM, kind, (rows, columns), dtype, layout, tuple(sorted(marks)),
        flops=float(elements * (14 if backwards else 6 if kind.startswith("rms") else 8)),
        bytes_read=float(elements * size * (2 if backwards or twice or added else 1) + weights
                         + (moments if backwards else 0)),
        bytes_written=float(elements * size * (2 if added else 1) + (weights if backwards else moments)),
    )


def _columns(op: Inputs, tensor: TensorSpec) -> int:
    """Length of what is normalised: as given, else the weight's, else the last dimension's."""
    given = op.ints("normalized_shape")
    if given:
        return prod(given)
    weight = op.optional("weight")
    if weight is not None and weight.elements:
        return weight.elements
    if not tensor.shape:
        raise Unpriceable("a number has no rows")
    return tensor.shape[-1]


def _rows(op: Inputs, kind: str, tensor: TensorSpec, flags: tuple[str, ...] = ()) -> Iterator[OpCall]:
    columns = max(_columns(op, tensor), 1)
    weight = op.optional("weight")
    yield from norm(kind, tensor.elements // columns, columns, tensor.dtype, columns, weight=weight is not None,
                    bias=op.has("bias"), flags=flags,
                    weight_dtype="" if weight is None else weight.dtype)


@both(Family.NORM, "aten::native_layer_norm(input, normalized_shape, weight, bias)",
      "aten::layer_norm(input, normalized_shape, weight, bias)",
      "aten::rms_norm(input, normalized_shape, weight)", "aten::_fused_rms_norm(input, normalized_shape, weight)")
@forward(Family.NORM,
         "aten::native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias)",
         "aten::_fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight)")
def _by_rows(op: Inputs) -> Iterator[OpCall]:
    yield from _rows(op, ("rms_norm" if "rms" in op.name else "layer_norm") + op.suffix, op.tensor("input"))


@forward(Family.NORM, "_C::fused_add_rms_norm(input, residual, weight)", "_C::rms_norm(out, input, weight)")
def _inference(op: Inputs) -> Iterator[OpCall]:
    yield from _rows(op, "rms_norm", op.tensor("input"), ("add",) if "residual" in op.names else ())


_BATCH = "(input, weight, bias, running_mean, running_var, training)"


@both(Family.NORM, f"aten::native_batch_norm{_BATCH}", f"aten::cudnn_batch_norm{_BATCH}",
      f"aten::miopen_batch_norm{_BATCH}", f"aten::batch_norm{_BATCH}")
@forward(Family.NORM, f"aten::_batch_norm_impl_index{_BATCH}", f"aten::_native_batch_norm_legit{_BATCH}",
         f"aten::_native_batch_norm_legit_functional{_BATCH}",
         "aten::_batch_norm_with_update(input, weight, bias, running_mean, running_var)",
         "aten::_batch_norm_with_update_functional(input, weight, bias, running_mean, running_var)",
         "aten::_native_batch_norm_legit_no_training(input, weight, bias, running_mean, running_var)",
         "aten::_batch_norm_no_update(input, weight, bias, running_mean, running_var)",
         "aten::native_batch_norm_backward(grad_out, input, weight)",
         "aten::batch_norm_backward(grad_out, input, weight)",
         "aten::cudnn_batch_norm_backward(input, grad_output, weight)",
         "aten::miopen_batch_norm_backward(input, grad_output, weight)",
         "aten::_batch_norm_impl_index_backward(impl_index, input, grad_output, weight)")
def _batch_norm(op: Inputs) -> Iterator[OpCall]:
    evaluating = not op.is_backward and (not op.flag("training", True) or "no_" in op.name)
    yield from _by_channel(op, op.has("weight"), ("eval",) if evaluating else ())


@forward(Family.NORM, "aten::batch_norm_stats(input)", "aten::batch_norm_elemt(input, weight)",
         "aten::batch_norm_backward_reduce(grad_out, input, mean, invstd, weight)",
         "aten::batch_norm_backward_elemt(grad_out, input, mean, invstd, weight)")
def _synchronised(op: Inputs) -> Iterator[OpCall]:
    """The halves of a batch norm over several ranks: statistics or values, each one pass."""
    yield from _by_channel(op, op.has("weight"), () if op.is_backward else ("eval",), typed=False)


def _by_channel(op: Inputs, weight: bool, flags: tuple[str, ...], typed: bool = True) -> Iterator[OpCall]:
    """A batch norm; ``typed`` says whether its weight's own type counts."""
    tensor = op.tensor("input")
    if len(tensor.shape) < 2:
        raise Unpriceable(f"{op.name}: {tensor.shape}")
    channels = tensor.shape[1]
    yield from norm(f"batch_norm{op.suffix}", channels, tensor.elements // max(channels, 1), tensor.dtype, channels,
                    weight=weight, bias=weight, flags=flags, layout=channels_last(tensor),
                    weight_dtype=op.tensor("weight").dtype if weight and typed else "")


@both(Family.NORM, "aten::native_group_norm(input, weight, bias, N, C, HxW, group)",
      "aten::group_norm(input, num_groups, weight, bias)")
@forward(Family.NORM, "aten::native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group)")
def _group_norm(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("input")
    if len(tensor.shape) < 2:
        raise Unpriceable(f"{op.name}: {tensor.shape}")
    groups = op.integer("group" if "group" in op.names else "num_groups", 32)
    rows = tensor.shape[0] * max(groups, 1)
    weight = op.has("weight")
    yield from norm(f"group_norm{op.suffix}", rows, tensor.elements // max(rows, 1), tensor.dtype, tensor.shape[1],
                    weight=weight, bias=weight, layout=channels_last(tensor))


@forward(Family.NORM, "aten::instance_norm(input, weight, bias)")
def _instance_norm(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("input")
    rows = prod(tensor.shape[:2])
    weight = op.has("weight")
    yield from norm("group_norm", rows, tensor.elements // max(rows, 1), tensor.dtype, tensor.shape[1],
                    weight=weight, bias=weight)


@forward(Family.NORM, "aten::_weight_norm_interface(v, g)",
         "aten::_weight_norm_interface_backward(grad_w, saved_v, saved_g)", "aten::_weight_norm(v, g)")
def _weight_norm(op: Inputs) -> Iterator[OpCall]:
    """A weight's rows, each scaled to a given length."""
    saved = "saved_" if "backward" in op.name else ""
    value, length = op.tensor(f"{saved}v"), op.tensor(f"{saved}g")
    rows = max(length.elements, 1)
    yield from norm("weight_norm_backward" if saved else "weight_norm", rows, value.elements // rows, value.dtype,
                    value.elements // rows, weight=False, bias=False)
