"""An operation's arguments at sizes nobody recorded: the law of every number among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graph_predictor.sizes.number_laws import NoLawError, NumberLaws
from kernel_models.families import registry
from tracer.decode import value_of
from tracer.views import Argument

EXACT_INTEGERS = 2**31
"""Larger numbers among the arguments are seeds and addresses, which have no law and cost nothing."""


def new_arguments(laws: NumberLaws, name: str, recorded: Sequence[tuple[Argument, ...]]) -> tuple[Argument, ...]:
    """Arguments at the new sizes of an operation that had these in each capture.

    Those that its formula does not read (an RNN's workspace, whose size goes by a library's blocks) keep their size
    where they follow no law.

    Raises:
        NoLawError: an argument follows no law.
    """
    if len({len(arguments) for arguments in recorded}) > 1:
        raise NoLawError("it has more arguments in one than in another")
    rule = registry.forward_rule(name)
    read = len(recorded[0]) if rule is None or not rule.names else len(rule.names)
    found = []
    for place, versions in enumerate(zip(*recorded, strict=True)):
        try:
            found.append(_argument(laws, versions))
        except NoLawError:
            if place < read:
                raise
            found.append(versions[0])
    return tuple(found)


def _argument(laws: NumberLaws, recorded: tuple[Argument, ...]) -> Argument:
    own = recorded[0]
    if all(one == own for one in recorded):
        return own
    shape = own.shape
    if any(one.shape != shape for one in recorded):
        shape = _sizes(laws, [one.shape for one in recorded])
    stride = own.stride
    if any(one.stride != stride for one in recorded):
        stride = _strides(laws, recorded, shape)
    value = own.value
    if any(one.value != value for one in recorded):
        value = _number(laws, [one.value for one in recorded])
    return Argument(own.dtype, shape, stride, value)


def _sizes(laws: NumberLaws, shapes: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes of a tensor, or of a list of tensors."""
    if any(shape is None for shape in shapes) or len({len(shape) for shape in shapes}) > 1:
        raise NoLawError("a tensor has more dimensions in one than in another")
    return tuple(laws.value(values) if all(isinstance(v, int) for v in values) else _sizes(laws, values)
                 for values in zip(*shapes, strict=True))


def _strides(laws: NumberLaws, recorded: tuple[Argument, ...], shape: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    try:
        return _sizes(laws, [one.stride for one in recorded])
    except NoLawError:
        # Strides are products of sizes whose laws may be sums: of a dense tensor they follow from the new sizes.
        return _dense(recorded[0].shape, recorded[0].stride, shape)


def _dense(old: Any, stride: Any, new: Any) -> tuple[Any, ...] | None:
    """Strides of a dense tensor of other sizes, its dimensions in the order they had; ``None`` for any other."""
    if not old or stride is None or new is None or not all(isinstance(size, int) for size in old):
        return None
    order = sorted(range(len(old)), key=lambda i: (stride[i], -i))
    expected = after = 1
    found = [0] * len(old)
    for i in order:
        if old[i] > 1 and stride[i] != expected:
            return None
        found[i], expected, after = after, expected * old[i], after * new[i]
    return tuple(found)


def _number(laws: NumberLaws, texts: list[str]) -> str:
    """A number or a list of numbers; other texts, seeds and addresses stay."""
    values = [value_of(text) for text in texts]
    if all(isinstance(value, list) for value in values) and len({len(value) for value in values}) == 1:
        return "[" + ", ".join(_number(laws, [str(one) for one in parts]) for parts in zip(*values, strict=True)) + "]"
    if all(type(value) is int for value in values):
        return texts[0] if any(abs(value) > EXACT_INTEGERS for value in values) else str(laws.value(tuple(values)))
    if all(type(value) in (int, float) for value in values):
        return repr(laws.real(tuple(map(float, values))))
    return texts[0]
