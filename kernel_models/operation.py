"""Device work of a framework operation: ``calls_of`` and ``backward_calls_of``.

An ``Operation`` is a name and its recorded arguments. Each family's file registers functions that turn operations into
calls (see ``kernel_models.families.registry``). Unknown operations are priced by bytes, as ``Family.OTHER``.

In a recorded step the kernels show which operations worked on the device. In a step that never ran, the place of an
operation's tensors shows it (``tracer.graph.Place``). An optimizer's step counters and a batch in assembly are on the
host; a batch that moves to the device crosses the link.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from kernel_models.device import device
from kernel_models.families import registry
from kernel_models.families.copy import transfer
from kernel_models.families.registry import Inputs, Unpriceable, unsized
from kernel_models.op_call import PRODUCTS, Family, OpCall, itemsize, scalar_type
from kernel_models.pricing import price
from tracer.graph import ExecutionGraph, Place
from tracer.views import Argument

TOLD: dict[str, str] = {
    "context": "tokens in the cache before those of the step, each sequence", "sequences": "sequences of the step",
    "window": "tokens that attention sees",
    "head_size": "features of a head", "kv": "type that the cache is stored in",
    "experts": "experts on this device", "visits": "experts that a token visits", "expert_width": "width of an expert",
    "weights": "type that experts' weights are stored in", "imbalance": "exponent of experts' popularity, 0 for even",
}
"""Values that operators of inference servers keep in the server's state; users may state them in ``Operation.told``."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A framework operation: its name, such as "aten::addmm", and its arguments in the order of its schema.

    ``told`` holds by name what no argument holds and the user states, such as ("context", "4096"): see ``TOLD``.

    Attributes:
        name: As the profiler writes it.
        arguments: The recorded facts of each argument; may be empty.
        list_dtype: Short dtype of tensors in lists that record none ("TensorList", unlike "TensorList[c10::Half]").
    """

    name: str
    arguments: tuple[Argument, ...] = ()
    list_dtype: str = "fp32"
    told: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_graph(cls, graph: ExecutionGraph, op: int, list_dtype: str = "fp32") -> Operation:
        """Return row ``op`` of ``graph.ops`` as an operation.

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
    """Return an operation from given shapes, without a recording.

    Args:
        name: Such as "aten::linear".
        shapes: One entry per argument: a tuple of sizes for a tensor, a list of tuples for a list of tensors, ``None``
            for anything else.
        dtypes: Element types by any of their names, one for all tensors or one per argument.
        strides: In elements, in the form of ``shapes``; ``None`` means contiguous.
        values: Numbers, booleans or lists of numbers for arguments that are not tensors; ``None`` for tensors.

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
    """Return the device work of an operation: no call if it is free or works on nothing, one or more otherwise.

    This raises no error: an operation that no family knows or that cannot be read becomes ``Family.OTHER`` by its
    bytes. An operation without any recorded size gives a call flagged "unsized".

    Args:
        op: the operation.
        tf32: whether fp32 products run on tensor cores as TF32; the framework's settings are not among the arguments.
    """
    rule = registry.forward_rule(op.name)
    if rule is None:
        return (by_bytes(op),)
    return _apply(rule, op, tf32)


def backward_calls_of(op: Operation, tf32: bool = False) -> tuple[OpCall, ...]:
    """Return the device work of an operation's gradient, for all of its floating-point inputs.

    If the family registers no gradient of its own, backward is assumed to read and write what forward does: the same
    call, flagged "backward". Elementwise operations read the gradient too.
    """
    rule = registry.backward_rule(op.name)
    if rule is not None:
        return _apply(rule, op, tf32)
    if not registry.has_gradient(op.name):
        return ()
    return tuple(_same_again(call) for call in calls_of(op, tf32))


def family_of(name: str) -> Family:
    """Return the family of an operation by its name; ``Family.OTHER`` if unknown or free (``is_free``)."""
    rule = registry.forward_rule(name)
    return rule.family if rule is not None else Family.OTHER


def is_free(name: str) -> bool:
    """Return whether operations of this name have no device work: they only make views or look at metadata."""
    rule = registry.forward_rule(name)
    return rule is not None and rule.is_free


def by_bytes(op: Operation) -> OpCall:
    """Return an unknown operation's call: it reads every tensor argument once and writes the size of the largest."""
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
    return replace(call, flags=tuple(sorted({*call.flags, "backward"})))


def _apply(rule: registry.Rule, op: Operation, tf32: bool) -> tuple[OpCall, ...]:
    if rule.is_free:
        return ()
    inputs = Inputs(op.name, op.arguments, rule.names, op.list_dtype, tf32, op.told, rule.is_gradient)
    try:
        return tuple(rule.function(inputs))
    except (Unpriceable, ArithmeticError, LookupError, TypeError, ValueError):
        # The arguments of another version's schema do not fit the formula; the price by bytes always works.
        if any(tensor.shape for tensor in inputs.tensors()):
            return (by_bytes(op),)
        return (unsized(rule.family, registry.plain_name(op.name)),)


HOST_TENSOR_NS = 2_000.0
"""Host time for each tensor an operation works on there: ``torch._foreach_add_`` of a number on 50 to 291 step counters
takes 1.8 to 2.3 µs a tensor (PyTorch 2.13, one thread of an AMD EPYC)."""
HOST_BYTES_PER_NS = 4.0
"""Reads and writes on the host, bytes/ns: ``torch.stack`` of 32 and 256 images reaches 4.6 and 2.1 on the same EPYC."""
_NON_BLOCKING = {"aten::_to_copy": 5, "aten::copy_": 2}
"""Position of the ``non_blocking`` argument. A non-blocking copy is assumed to use pinned host memory."""


def placed_calls(graph: ExecutionGraph, op: int) -> tuple[OpCall, ...]:
    """Return the device work of row ``op`` of ``graph.ops``: none on the host, a transfer between memories.

    Where no place is known, as in recorded windows, an operation counts as device work.

    Raises:
        IndexError: there is no such operation.
    """
    return calls_at(Operation.from_graph(graph, op), int(graph.ops.place[op]))


def calls_at(operation: Operation, place: int, tf32: bool = False) -> tuple[OpCall, ...]:
    """Return the device work of an operation at a ``Place``; an unknown place (``NONE``) counts as the device."""
    if place == Place.HOST:
        return ()
    if place in (Place.TO_DEVICE, Place.TO_HOST):
        size = _moved_bytes(operation)
        if size is not None:
            kind = "h2d" if place == Place.TO_DEVICE else "d2h"
            return (transfer(kind, size, ("pinned" if _is_asynchronous(operation) else "pageable",)),) if size else ()
    return calls_of(operation, tf32)


def host_work_ns(graph: ExecutionGraph, op: int) -> float:
    """Return the time of an operation's own work on the host, ns; 0 for views and for operations of the device.

    Each tensor costs ``HOST_TENSOR_NS``, each byte its share of ``HOST_BYTES_PER_NS``. Products take at least the time
    that a usual CPU's data sheet gives.
    """
    if graph.ops.place[op] != Place.HOST:
        return 0.0
    return work_on_host_ns(Operation.from_graph(graph, op))


def work_on_host_ns(operation: Operation) -> float:
    """Return the time of an operation that works on the host, ns."""
    if is_free(operation.name):
        return 0.0
    inputs = Inputs(operation.name, operation.arguments, (), operation.list_dtype)
    tensors = max((len(tensors) for tensors in inputs.lists()), default=0) or 1
    calls = [call for call in calls_of(operation) if "unsized" not in call.flags]
    by_bytes = tensors * HOST_TENSOR_NS + sum(call.bytes_moved for call in calls) / HOST_BYTES_PER_NS
    products = [call for call in calls if call.family in PRODUCTS]
    return max(by_bytes, 1e3 * price(products, device("cpu")).total_us) if products else by_bytes


def _moved_bytes(operation: Operation) -> int | None:
    """Return the bytes that cross the link, in the target's type: a copy that also casts does so at its source."""
    tensors = Inputs(operation.name, operation.arguments, (), operation.list_dtype).tensors()
    if not tensors:
        return None
    dtype = tensors[0].dtype
    if operation.name == "aten::_to_copy" and len(operation.arguments) > 1:
        dtype = scalar_type(operation.arguments[1].value) or dtype
    return prod(tensors[0].shape) * itemsize(dtype)


def _is_asynchronous(operation: Operation) -> bool:
    at = _NON_BLOCKING.get(operation.name)
    return at is not None and len(operation.arguments) > at and operation.arguments[at].value == "True"
