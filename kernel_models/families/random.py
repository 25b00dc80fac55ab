"""Random numbers and dropout.

Dimensions: elements.

    FLOPs  = 10 an element (a Philox round's share; Salmon et al. 2011), one more for dropout's scaling
    bytes  = elements written; dropout reads its input and writes output and a one-byte mask

Source: the definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from kernel_models.families.elementwise import elementwise
from kernel_models.families.reduction import sort
from kernel_models.families.registry import Inputs, backward, forward, without_gradient, words
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import TensorSpec, itemsize

_IN_PLACE = words("uniform normal bernoulli random exponential cauchy log_normal geometric rand_like randn_like "
                  "randint_like poisson binomial _standard_gamma _sample_dirichlet")
_NEW = words("rand randn randint")
_HAND_BACK = words("dropout feature_dropout")
"""Dropouts that do nothing at p = 0 (ATen/native/Dropout.cpp); the native operator draws its mask all the same."""


def random(kind: str, elements: int, dtype: str) -> Iterator[OpCall]:
    """Random numbers of that many elements; kind "dropout" drops an input's."""
    if not elements:
        return
    size, drops = itemsize(dtype), kind == "dropout"
    yield OpCall(Family.RANDOM, kind, (elements,), dtype, flops=float(elements * (11 if drops else 10)),
                 bytes_read=float(elements * size if drops else 0),
                 bytes_written=float(elements * (size + (1 if drops else 0))))


@forward(Family.RANDOM, *(f"aten::{name}(self)" for name in _IN_PLACE))
def _fill(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("self")
    yield from random(op.short_name, tensor.elements, tensor.dtype)


@forward(Family.RANDOM, *(f"aten::{name}(size)" for name in _NEW))
def _new(op: Inputs) -> Iterator[OpCall]:
    """A new tensor: its size is the first list of numbers; fp32, or int64 for integers, where no type tells."""
    lists = [argument.value for argument in op.arguments if argument.value.startswith("[")]
    if not lists:
        op.tensor("size")
    sizes = [int(part) for part in lists[0].strip("[]").split(",") if part.strip()]
    yield from random(op.short_name, prod(sizes), "int64" if "int" in op.short_name else "fp32")


@forward(Family.RANDOM, "aten::native_dropout(input, p, train)", "aten::_fused_dropout(input, p)",
         "aten::dropout(input, p, train)", "aten::feature_dropout(input, p, train)")
def _dropout(op: Inputs) -> Iterator[OpCall]:
    """Nothing outside training, nor where nothing is to be dropped: the input is handed back."""
    tensor = op.tensor("input")
    drops = op.short_name not in _HAND_BACK or op.number("p") != 0
    if drops and op.flag("train", True):
        yield from random("dropout", tensor.elements, tensor.dtype)


@backward(Family.ELEMENTWISE, "aten::native_dropout(input, p, train)", "aten::_fused_dropout(input, p)",
          "aten::dropout(input, p, train)")
def _dropout_backward(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("input")
    if op.flag("train", True):
        yield from elementwise(
            "native_dropout_backward", [tensor, TensorSpec(tensor.shape, "bool")], dtype=tensor.dtype
        )


@forward(Family.RANDOM, "aten::randperm(n)")
def _permutation(op: Inputs) -> Iterator[OpCall]:
    n = op.integer("n", 0) or max((t.elements for t in op.tensors()), default=0)
    if not n:
        op.tensor("n")
    yield from random("randperm", n, "int64")
    yield from sort("sort", 1, n, n, "int64")


@forward(Family.RANDOM, "aten::multinomial(self, num_samples)")
def _multinomial(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("self")
    yield from random("multinomial", tensor.elements, tensor.dtype)


without_gradient(*(f"aten::{name}" for name in (*_IN_PLACE, *_NEW, "randperm", "multinomial")))
