"""Families that go along a dimension: reductions and scans, softmax, losses, and sorts.

Reductions and scans. Dimensions: ``outer`` results, each of ``reduced`` values; ``inner`` is the stride between the
values of one result in elements (1: they lie side by side). A scan (cumsum) has as many results as values and is
``outer`` × ``reduced`` too.

    FLOPs  = outer·reduced (norms, variances: twice that)
    bytes  = outer·reduced read, outer written (scans: as much as is read; positions of maxima: int64)

Source: the definition. Where the reduced dimensions were not recorded, everything is taken to be reduced.

Softmax and log-softmax. Dimensions: ``outer`` rows of ``reduced`` values, ``inner`` the stride between the values of a
row in elements.

    FLOPs  = 5 an element forward (maximum, subtract, exponential, sum, divide), 4 backward
    bytes  = the tensor read and written once; backward reads gradient and output

Source: the definition; a row is read once, as all fused kernels do. With ``half_to_float`` the output is fp32.

Losses. Dimensions: rows × classes. Losses that compare value by value have one class.

    FLOPs  = 3 a value compared (negative log-likelihood: 2 a row)
    bytes  = negative log-likelihood: a value and an int64 target a row; its gradient writes the whole rows × classes.
             Value by value: both tensors read; gradients write one of their size

Source: the definitions. Results are taken to be reduced to one number.

Sorting, top-k and what is built on them. Dimensions: rows × columns sorted each by itself, and the k that are kept (=
columns for a full sort).

    FLOPs  = rows·columns·log2(columns) comparisons for a sort, rows·columns for a top-k
    bytes  = values read once; values and int64 positions of the k kept written

Source: the definitions; radix sorts read and write several times, which a model's efficiency carries.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2, prod

from kernel_models.families.registry import Inputs, backward, both, dimension, forward, without_gradient, words
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import TensorSpec, itemsize

_TWICE = frozenset({"norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean", "logsumexp", "renorm", "dot"})
_POSITIONS = frozenset({"argmax", "argmin"})
_WITH_POSITIONS = frozenset({"max", "min", "mode", "aminmax", "cummax", "cummin"})
_TO_BOOL = frozenset({"any", "all", "equal"})
_SCANS = frozenset({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"})


def reduction(
    kind: str, outer: int, reduced: int, inner: int, dtype: str, out_dtype: str = "", flags: tuple[str, ...] = ()
) -> Iterator[OpCall]:
    """The call of one reduction or scan; none if it has no values to look at."""
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
    """Reduce the given dimensions of a tensor; all of them for ``None`` or none."""
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


_BY_VALUE = words("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
                  "kl_div soft_margin_loss poisson_nll_loss")


def loss(kind: str, rows: int, classes: int, dtype: str) -> Iterator[OpCall]:
    """The call of one loss or its gradient ("_backward"); none without rows."""
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
    """Classes are the second dimension, or the only one."""
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
