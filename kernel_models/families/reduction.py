"""Families that go along a dimension: reductions and scans, softmax, losses, sorts, and normalisation.

Reductions and scans. Dimensions: ``outer`` results, each of ``reduced`` values; ``inner`` is the stride between the
values of one result in elements (1: contiguous). A scan (cumsum) has as many results as values and is ``outer`` ×
``reduced`` too.

    FLOPs  = outer·reduced (norms, variances: twice that)
    Bytes  = outer·reduced read, outer written (scans: as much as is read; positions of maxima: int64)

Source: the definition. Where the reduced dimensions were not recorded, all dimensions are assumed to be reduced.

Softmax and log-softmax. Dimensions: ``outer`` rows of ``reduced`` values, ``inner`` the stride between the values of a
row in elements.

    FLOPs  = 5 an element forward (maximum, subtract, exponential, sum, divide), 4 backward
    Bytes  = the tensor read and written once; backward reads gradient and output

Source: the definition; a row is read once, as all fused kernels do. With ``half_to_float`` the output is fp32.

Losses. Dimensions: rows × classes. Losses that compare value by value have one class.

    FLOPs  = 3 a value compared (negative log-likelihood: 2 a row)
    Bytes  = negative log-likelihood: a value and an int64 target a row; its gradient writes the whole rows × classes.
             Value by value: both tensors read; gradients write one of their size

Source: the definitions. Results are assumed to be reduced to one number.

Sorting, top-k and operations built on them. Dimensions: rows × columns, each row sorted by itself, and the number k of
values kept (= columns for a full sort).

    FLOPs  = rows·columns·log2(columns) comparisons for a sort, rows·columns for a top-k
    Bytes  = values read once; values and int64 positions of the k kept written

Source: the definitions; radix sorts read and write several times, which a model's efficiency includes.

Layer, RMS, batch, group and instance normalisation, forward and backward.

Dimensions: rows × columns. Layer and RMS norm normalise each row's columns. For batch norm a row is a channel, and its
columns are the channel's values in the batch. For group norm a row is a group of one sample.

    FLOPs  = 8 an element forward (mean, variance, scale and shift), 6 for RMS norm, 14 backward.
    Bytes  = input read, output written, weights and row statistics once; backward reads gradient and input, writes the
             gradients of input and weights. Batch norm reads its input twice in training (statistics, then values).

Source: the definitions; a row that fits the chip is read once. Flags: "weight", "bias", "add" (a fused residual
addition), "eval" (batch norm with given statistics). Layout: "nhwc" for images in channels last.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2, prod

from kernel_models.families.registry import (
    Inputs,
    Unpriceable,
    backward,
    both,
    dimension,
    forward,
    without_gradient,
    words,
)
from kernel_models.op_call import Family, OpCall, TensorSpec, channels_last, itemsize

_TWICE = frozenset({"norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean", "logsumexp", "renorm", "dot"})
_POSITIONS = frozenset({"argmax", "argmin"})
_WITH_POSITIONS = frozenset({"max", "min", "mode", "aminmax", "cummax", "cummin"})
_TO_BOOL = frozenset({"any", "all", "equal"})
_SCANS = frozenset({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"})


def reduction(
    kind: str, outer: int, reduced: int, inner: int, dtype: str, out_dtype: str = "", flags: tuple[str, ...] = ()
) -> Iterator[OpCall]:
    """Yield the call of one reduction or scan; none if it has no values."""
    values = outer * reduced
    if not values:
        return
    results = values if kind in _SCANS else outer
    out_dtype = "bool" if kind in _TO_BOOL else out_dtype or dtype
    size = itemsize("int64") if kind in _POSITIONS else itemsize(out_dtype)
    if out_dtype != dtype and kind not in _TO_BOOL:
        flags = (*flags, f"out_{out_dtype}")
    reads = 2 if kind == "dot" else 1
    yield OpCall(
        Family.REDUCTION, kind, (outer, reduced, inner), dtype, flags=tuple(sorted(flags)),
        flops=float(values * (2 if kind in _TWICE else 1)),
        bytes_read=float(reads * values * itemsize(dtype)),
        bytes_written=float(results * (size + (8 if "positions" in flags else 0))),
    )


def over(kind: str, tensor: TensorSpec, dims: tuple[int, ...] | None, out_dtype: str = "") -> Iterator[OpCall]:
    """Yield the reduction of a tensor over the given dimensions; over all dimensions for ``None`` or ``()``."""
    rank = len(tensor.shape)
    chosen = {dimension(d, rank) for d in dims} if dims else set(range(rank))
    reduced = prod(size for d, size in enumerate(tensor.shape) if d in chosen)
    steps = [step for d, step in enumerate(tensor.strides) if d in chosen and tensor.shape[d] > 1]
    outer = prod(size for d, size in enumerate(tensor.shape) if d not in chosen)
    positions = kind in _WITH_POSITIONS and dims is not None
    yield from reduction(kind, outer, reduced, max(min(steps, default=1), 1), tensor.dtype, out_dtype,
                         ("positions",) if positions else ())


@forward(Family.REDUCTION, "aten::sum(self, dim, keepdim, dtype)", "aten::mean(self, dim, keepdim, dtype)",
         "aten::nansum(self, dim, keepdim, dtype)", "aten::amax(self, dim, keepdim)", "aten::amin(self, dim, keepdim)",
         "aten::var(self, dim)", "aten::std(self, dim)", "aten::var_mean(self, dim)", "aten::std_mean(self, dim)",
         "aten::logsumexp(self, dim)", "aten::count_nonzero(self, dim)", "aten::prod(self, dim)",
         "aten::linalg_vector_norm(self, ord, dim)", "aten::norm(self, p, dim)", "aten::native_norm(self, p, dim)")
def _sum(op: Inputs) -> Iterator[OpCall]:
    kind = "linalg_vector_norm" if "norm" in op.name else op.short_name
    yield from over(kind, op.tensor("self"), op.ints("dim"), op.dtype("dtype"))


@forward(Family.REDUCTION, "aten::max(self, dim)", "aten::min(self, dim)", "aten::argmax(self, dim)",
         "aten::argmin(self, dim)", "aten::any(self, dim)", "aten::all(self, dim)", "aten::mode(self, dim)",
         "aten::aminmax(self)", "aten::_aminmax(self)", "aten::equal(self, other)", "aten::trace(self)",
         "aten::_is_all_true(self)", "aten::_is_any_true(self)")
def _max(op: Inputs) -> Iterator[OpCall]:
    dim, kind = op.number("dim"), op.short_name.removeprefix("_is_").removesuffix("_true")
    yield from over(kind, op.tensor("self"), None if dim is None else (int(dim),))


@forward(Family.REDUCTION, "aten::cumsum(self, dim)", "aten::cumprod(self, dim)", "aten::logcumsumexp(self, dim)",
         "aten::_cummax_helper(self, values, indices, dim)", "aten::_cummin_helper(self, values, indices, dim)",
         "aten::cummax(self, dim)", "aten::cummin(self, dim)", "fbgemm::asynchronous_complete_cumsum(t_in)",
         "fbgemm::asynchronous_inclusive_cumsum(t_in)", "fbgemm::asynchronous_exclusive_cumsum(t_in)")
def _scan(op: Inputs) -> Iterator[OpCall]:
    kind = "cumsum" if "asynchronous" in op.name else op.short_name.removeprefix("_").removesuffix("_helper")
    yield from over(kind, op.tensor(op.names[0]), (op.integer("dim", -1),))


@forward(Family.REDUCTION, "aten::dot(self, tensor)", "aten::vdot(self, other)")
def _dot(op: Inputs) -> Iterator[OpCall]:
    yield from reduction("dot", 1, op.tensor("self").elements, 1, op.tensor("self").dtype)


without_gradient("aten::argmax", "aten::argmin", "aten::any", "aten::all", "aten::equal", "aten::count_nonzero",
                 "aten::_is_all_true", "aten::_is_any_true")


def softmax(kind: str, tensor: TensorSpec, dim: int | None, out_dtype: str = "") -> Iterator[OpCall]:
    """Yield one softmax along a dimension; ``kind`` ends in "_backward" for gradients."""
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


@backward(Family.SOFTMAX, "aten::_softmax(self, dim)", "aten::_log_softmax(self, dim)", "aten::softmax(self, dim)",
          "aten::log_softmax(self, dim)", "aten::_safe_softmax(self, dim)")
@forward(Family.SOFTMAX, "aten::_softmax(self, dim, half_to_float)", "aten::_log_softmax(self, dim, half_to_float)",
         "aten::softmax(self, dim, dtype)", "aten::log_softmax(self, dim, dtype)",
         "aten::_safe_softmax(self, dim, dtype)", "aten::special_softmax(self, dim, dtype)",
         "aten::_masked_softmax(self, mask, dim)",
         "aten::_softmax_backward_data(grad_output, output, dim, input_dtype)",
         "aten::_log_softmax_backward_data(grad_output, output, dim, input_dtype)",
         "aten::_masked_softmax_backward(grad_output, output, mask, dim)")
def _softmax(op: Inputs) -> Iterator[OpCall]:
    dim = op.number("dim")
    tensor = op.tensor("grad_output" if "grad_output" in op.names else "self")
    written = "fp32" if op.flag("half_to_float") else op.dtype("dtype") or op.dtype("input_dtype")
    yield from softmax(("log_softmax" if "log" in op.name else "softmax") + op.suffix, tensor,
                       None if dim is None else int(dim), written)


def sort(kind: str, rows: int, columns: int, k: int, dtype: str) -> Iterator[OpCall]:
    """Yield the call of one sort; none if there is nothing to sort."""
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
    """Yield a sort; the stable variant has a boolean before the dimension, for which the last dimension is taken."""
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


_BY_VALUE = words("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
                  "kl_div soft_margin_loss poisson_nll_loss")


def loss(kind: str, rows: int, classes: int, dtype: str) -> Iterator[OpCall]:
    """Yield the call of one loss or its gradient ("_backward"); none without rows."""
    if not rows * classes:
        return
    size, backwards = itemsize(dtype), kind.endswith("_backward")
    if kind.startswith("nll_loss"):
        read, written = rows * (8 if backwards else size + 8), rows * classes * size if backwards else size
        flops = 2.0 * rows
    else:
        read, written = 2 * rows * classes * size, rows * classes * size if backwards else size
        flops = 3.0 * rows * classes
    yield OpCall(Family.LOSS, kind, (rows, classes), dtype, flops=flops, bytes_read=float(read),
                 bytes_written=float(written))


def _nll(kind: str, scores: TensorSpec) -> Iterator[OpCall]:
    """Yield a negative log-likelihood; classes are the second dimension, or the only one."""
    classes = scores.shape[1] if len(scores.shape) > 1 else scores.elements
    yield from loss(kind, scores.elements // max(classes, 1), classes, scores.dtype)


@both(Family.LOSS, "aten::nll_loss_forward(self, target)", "aten::nll_loss(self, target)",
      "aten::nll_loss_nd(self, target)")
@forward(Family.LOSS, "aten::nll_loss2d_forward(self, target)", "aten::nll_loss2d(self, target)",
         "aten::nll_loss_backward(grad_output, self, target)", "aten::nll_loss2d_backward(grad_output, self, target)")
def _nll_loss(op: Inputs) -> Iterator[OpCall]:
    yield from _nll(f"nll_loss{op.suffix}", op.tensor("self"))


@forward(Family.LOSS, "aten::cross_entropy_loss(self, target)")
def _cross_entropy(op: Inputs) -> Iterator[OpCall]:
    scores = op.tensor("self")
    yield from softmax("log_softmax", scores, min(1, max(len(scores.shape) - 1, 0)))
    yield from _nll("nll_loss", scores)


@backward(Family.LOSS, "aten::cross_entropy_loss(self, target)")
def _cross_entropy_gradient(op: Inputs) -> Iterator[OpCall]:
    scores = op.tensor("self")
    yield from _nll("nll_loss_backward", scores)
    yield from softmax("log_softmax_backward", scores, min(1, max(len(scores.shape) - 1, 0)))


@both(Family.LOSS, *(f"aten::{name}(self, target)" for name in _BY_VALUE))
@forward(Family.LOSS, *(f"aten::{name}_backward(grad_output, self, target)" for name in _BY_VALUE if name not in (
    "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "l1_loss")))
def _by_value(op: Inputs) -> Iterator[OpCall]:
    tensor = op.optional("self") or op.tensor("target")
    yield from loss(op.short_name.removesuffix("_backward") + op.suffix, tensor.elements, 1, tensor.dtype)


@forward(Family.LOSS, "aten::_ctc_loss(log_probs, targets)", "aten::_cudnn_ctc_loss(log_probs, targets)",
         "aten::_ctc_loss_backward(grad, log_probs, targets)")
def _ctc(op: Inputs) -> Iterator[OpCall]:
    scores = op.tensor("log_probs")
    yield from loss(f"ctc_loss{op.suffix}", scores.elements // max(scores.shape[-1], 1), scores.shape[-1], scores.dtype)


def norm(
    kind: str, rows: int, columns: int, dtype: str, affine: int, *, weight: bool = True, bias: bool = True,
    flags: tuple[str, ...] = (), weight_dtype: str = "", layout: str = "",
) -> Iterator[OpCall]:
    """Yield one normalisation; ``affine`` is the length of its weight. No call if there is nothing to normalise."""
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
    """Return the length of a normalised row: the given length, else the weight's, else the last dimension's."""
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
    """Yield one half of a batch norm over several ranks, statistics or values, with one pass over the data."""
    yield from _by_channel(op, op.has("weight"), () if op.is_backward else ("eval",), typed=False)


def _by_channel(op: Inputs, weight: bool, flags: tuple[str, ...], typed: bool = True) -> Iterator[OpCall]:
    """Yield a batch norm; ``typed``: whether the type of its weight is used."""
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
    """Yield a weight norm: it scales each row of a weight to a given length."""
    saved = "saved_" if "backward" in op.name else ""
    value, length = op.tensor(f"{saved}v"), op.tensor(f"{saved}g")
    rows = max(length.elements, 1)
    yield from norm("weight_norm_backward" if saved else "weight_norm", rows, value.elements // rows, value.dtype,
                    value.elements // rows, weight=False, bias=False)
