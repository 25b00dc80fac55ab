"""Losses and their gradients.

Dimensions: rows × classes. Losses that compare value by value have one class.

    FLOPs  = 3 a value compared (negative log-likelihood: 2 a row)
    bytes  = negative log-likelihood: a value and an int64 target a row; its gradient writes the whole rows × classes.
             Value by value: both tensors read; gradients write one of their size

Source: the definitions. Results are taken to be reduced to one number.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_models.dtypes import itemsize
from kernel_models.families.registry import Inputs, backward, forward, words
from kernel_models.families.softmax import softmax
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import TensorSpec

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


@forward(Family.LOSS, "aten::nll_loss_forward(self, target)", "aten::nll_loss2d_forward(self, target)",
         "aten::nll_loss(self, target)", "aten::nll_loss2d(self, target)", "aten::nll_loss_nd(self, target)")
def _nll_forward(op: Inputs) -> Iterator[OpCall]:
    yield from _nll("nll_loss", op.tensor("self"))


@forward(Family.LOSS, "aten::nll_loss_backward(grad_output, self, target)",
         "aten::nll_loss2d_backward(grad_output, self, target)")
def _nll_backward(op: Inputs) -> Iterator[OpCall]:
    yield from _nll("nll_loss_backward", op.tensor("self"))


@backward(Family.LOSS, "aten::nll_loss_forward(self, target)", "aten::nll_loss(self, target)",
          "aten::nll_loss_nd(self, target)")
def _nll_gradient(op: Inputs) -> Iterator[OpCall]:
    yield from _nll("nll_loss_backward", op.tensor("self"))


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


@forward(Family.LOSS, *(f"aten::{name}(self, target)" for name in _BY_VALUE),
         *(f"aten::{name}_backward(grad_output, self, target)" for name in _BY_VALUE if name not in (
             "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "l1_loss")))
def _by_value(op: Inputs) -> Iterator[OpCall]:
    tensor = op.optional("self") or op.tensor("target")
    yield from loss(op.short_name, tensor.elements, 1, tensor.dtype)


@backward(Family.LOSS, *(f"aten::{name}(self, target)" for name in _BY_VALUE))
def _by_value_gradient(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("self")
    yield from loss(f"{op.short_name}_backward", tensor.elements, 1, tensor.dtype)


@forward(Family.LOSS, "aten::_ctc_loss(log_probs, targets)", "aten::_cudnn_ctc_loss(log_probs, targets)",
         "aten::_ctc_loss_backward(grad, log_probs, targets)")
def _ctc(op: Inputs) -> Iterator[OpCall]:
    scores = op.tensor("log_probs")
    kind = "ctc_loss_backward" if "backward" in op.name else "ctc_loss"
    yield from loss(kind, scores.elements // max(scores.shape[-1], 1), scores.shape[-1], scores.dtype)
