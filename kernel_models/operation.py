"""Device work of a framework operation: ``calls_of`` and ``backward_calls_of``.

An ``Operation`` is a name and its recorded arguments. Each family's file registers functions that turn operations into
calls (see ``kernel_models.families.registry``). What no family knows is priced by its bytes, as ``Family.OTHER``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernel_models.dtypes import itemsize
from kernel_models.families import registry
from kernel_models.families.registry import Inputs, Unpriceable, unsized
from kernel_models.op_call import Family, OpCall
from tracer.graph import ExecutionGraph
from tracer.views import Argument

TOLD: dict[str, str] = {
    "context": "tokens in the cache before those of the step, each sequence", "sequences": "sequences of the step",
    "window": "tokens that attention sees",
    "head_size": "features of a head", "kv": "type that the cache is stored in",
    "experts": "experts on this device", "visits": "experts that a token visits", "expert_width": "width of an expert",
    "weights": "type that experts' weights are stored in", "imbalance": "exponent of experts' popularity, 0 for even",
}
"""What operators of inference servers leave to their state, and ``Operation.told`` may say."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A framework operation: its name, such as "aten::addmm", and its arguments in the order of its schema.

    Attributes:
        name: as the profiler writes it.
        arguments: what was recorded of each; may be empty.
        list_dtype: short name of the element type of tensors in lists where it was not recorded; profilers write
            "TensorList" only, and "TensorList[c10::Half]" is understood.
        told: what no argument holds and somebody knows, such as ("context", "4096"), by name: see ``TOLD``.
    """

    name: str
    arguments: tuple[Argument, ...] = ()
    list_dtype: str = "fp32"
    told: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_graph(cls, graph: ExecutionGraph, op: int, list_dtype: str = "fp32") -> Operation:
        """Row ``op`` of ``graph.ops``.

        Raises:
            IndexError: there is no such operation.
        """
        return cls(graph.string(int(graph.ops.name[op])), tuple(graph.arguments(op)), list_dtype)


def operation(
    name: str,
    shapes: Sequence[Any],
    dtypes: str | Sequence[str] = "fp32",
    strides: Sequence[Any] | None = None,
    values: Sequence[Any] | None = None,
) -> Operation:
    """An operation put together by hand.

    Args:
        name: such as "aten::linear".
        shapes: one entry an argument: a tuple of sizes for a tensor, a list of tuples for a list of tensors, ``None``
            for anything else.
        dtypes: element types by any of their names, one for all tensors or one an argument.
        strides: in elements, in the form of ``shapes``; ``None`` means contiguous.
        values: numbers, booleans or lists of numbers of the arguments that are no tensors, else ``None``.

    >>> operation("aten::linear", shapes=[(32, 128), (256, 128), None], dtypes="bf16").arguments[1].shape
    (256, 128)
    """
    kinds = [dtypes] * len(shapes) if isinstance(dtypes, str) else list(dtypes)
    arguments = []
    for i in range(max(len(shapes), len(values or ()))):
        shape = shapes[i] if i < len(shapes) else None
        value = values[i] if values is not None and i < len(values) else None
        stride = strides[i] if strides is not None and i < len(strides) else None
        if isinstance(shape, list):
            steps = None if stride is None else tuple(tuple(s) for s in stride)
            arguments.append(Argument(f"TensorList[{kinds[i]}]", tuple(tuple(s) for s in shape), steps))
        elif shape is not None:
            arguments.append(Argument(kinds[i], tuple(shape), None if stride is None else tuple(stride)))
        elif value is None:
            arguments.append(Argument(""))
        else:
            kind = "ScalarList" if isinstance(value, (list, tuple)) else "Scalar"
            text = str(list(value)) if kind == "ScalarList" else str(value)
            arguments.append(Argument(kind, (), None, text))
    return Operation(name, tuple(arguments))


def calls_of(op: Operation, tf32: bool = False) -> tuple[OpCall, ...]:
    """The device work of an operation: no call if it is free or works on nothing, one or more otherwise.

    Never an error: what no family knows, or cannot be read, becomes ``Family.OTHER`` by its bytes. Operations without
    any recorded size give a call flagged "unsized".

    Args:
        op: the operation.
        tf32: whether fp32 products run on tensor cores as TF32; the framework's settings are not among the arguments.
    """
    rule = registry.forward_rule(op.name)
    if rule is None:
        return (by_bytes(op),)
    return _apply(rule, op, tf32)


def backward_calls_of(op: Operation, tf32: bool = False) -> tuple[OpCall, ...]:
    """The device work of an operation's gradient, all of its floating-point inputs wanting one.

    Operations whose family registers no gradient of their own are taken to read and write in backward what they
    read and write in forward, once more: the same call, flagged "backward". Elementwise ones read the gradient too.
    """
    rule = registry.backward_rule(op.name)
    if rule is not None:
        return _apply(rule, op, tf32)
    if not registry.has_gradient(op.name):
        return ()
    return tuple(_same_again(call) for call in calls_of(op, tf32))


def family_of(name: str) -> Family:
    """The family an operation of this name belongs to; ``Family.OTHER`` where none knows it or it is free."""
    rule = registry.forward_rule(name)
    return rule.family if rule is not None else Family.OTHER


def is_free(name: str) -> bool:
    """Return whether an operation of this name only makes a view or looks at metadata: it has no device work."""
    rule = registry.forward_rule(name)
    return rule is not None and rule.is_free


def by_bytes(op: Operation) -> OpCall:
    """An unknown operation: it reads every tensor among its arguments once and writes as much as the largest."""
    inputs = Inputs(op.name, op.arguments, (), op.list_dtype)
    tensors = inputs.tensors()
    kind = re.sub(r"[0-9a-fx]{6,}|\d+(?=\W|$)", "", op.name.split("(")[0]).strip() or op.name
    if not tensors:
        return unsized(Family.OTHER, kind)
    largest = max(tensors, key=lambda tensor: tensor.bytes)
    elements = sum(tensor.stored for tensor in tensors)
    return OpCall(
        Family.OTHER, kind, (largest.stored, len(tensors), elements), largest.dtype,
        flags=registry.mixed_types(tensors, largest.dtype),
        bytes_read=float(sum(tensor.bytes for tensor in tensors)), bytes_written=float(largest.bytes),
    )


def _same_again(call: OpCall) -> OpCall:
    if call.family is Family.ELEMENTWISE and "unsized" not in call.flags:
        elements, inputs, elements_in = call.dims
        call = replace(call, dims=(elements, inputs + 1, elements_in + elements),
                       bytes_read=call.bytes_read + elements * itemsize(call.dtype))
    return registry.with_flags(call, "backward")


def _apply(rule: registry.Rule, op: Operation, tf32: bool) -> tuple[OpCall, ...]:
    if rule.is_free:
        return ()
    inputs = Inputs(op.name, op.arguments, rule.names, op.list_dtype, tf32, op.told)
    try:
        return tuple(rule.function(inputs))
    except (Unpriceable, ArithmeticError, LookupError, TypeError, ValueError):
        # Arguments of another version's schema do not fit the formula: bytes always do.
        if any(tensor.shape for tensor in inputs.tensors()):
            return (by_bytes(op),)
        return (unsized(rule.family, rule.kind(op.name)),)
