"""Device work and host work of an operation in a step traced by shapes alone.

A recorded step shows by its kernels which operations worked on the device. One that never ran shows it by where its
tensors lay (``tracer.graph.Place``): an optimizer's step counters and a batch that is put together live on the host,
and a batch that moves to the device crosses the link.
"""

from __future__ import annotations

from math import prod

from kernel_models.device import device
from kernel_models.dtypes import itemsize, scalar_type
from kernel_models.families.copy import transfer
from kernel_models.families.registry import Inputs
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import Operation, calls_of, is_free
from kernel_models.pricing import price
from tracer.graph import ExecutionGraph, Place

HOST_TENSOR_NS = 2_000.0
"""Host time for each tensor an operation works on there: ``torch._foreach_add_`` of a number on 50 to 291 step counters
takes 1.8 to 2.3 µs a tensor (PyTorch 2.13, one thread of an AMD EPYC)."""
HOST_BYTES_PER_NS = 4.0
"""Read and written on the host, 10⁹ bytes/s: ``torch.stack`` of 32 and 256 images reaches 4.6 and 2.1 there."""
_PRODUCTS = (Family.GEMM, Family.CONV, Family.ATTENTION, Family.RECURRENT)
_NON_BLOCKING = {"aten::_to_copy": 5, "aten::copy_": 2}
"""Position of that argument. Who copies without blocking has pinned the host's side, or gains nothing by it."""


def placed_calls(graph: ExecutionGraph, op: int) -> tuple[OpCall, ...]:
    """The device work of row ``op`` of ``graph.ops``: none on the host, a transfer between memories.

    Where no place is known, as in recorded windows, every operation counts as one of the device.

    Raises:
        IndexError: there is no such operation.
    """
    return calls_at(Operation.from_graph(graph, op), int(graph.ops.place[op]))


def calls_at(operation: Operation, place: int, tf32: bool = False) -> tuple[OpCall, ...]:
    """The device work of an operation that works at a ``Place`` (``NONE``: unknown, taken for the device)."""
    if place == Place.HOST:
        return ()
    if place in (Place.TO_DEVICE, Place.TO_HOST):
        size = _moved_bytes(operation)
        if size is not None:
            kind = "h2d" if place == Place.TO_DEVICE else "d2h"
            return (transfer(kind, size, ("pinned" if _is_asynchronous(operation) else "pageable",)),) if size else ()
    return calls_of(operation, tf32)


def host_work_ns(graph: ExecutionGraph, op: int) -> float:
    """Time of an operation's own work on the host, ns; 0 for views and for operations of the device.

    Each tensor costs ``HOST_TENSOR_NS``, each byte its share of ``HOST_BYTES_PER_NS``. Products take at least what the
    data sheet of a usual CPU says.
    """
    if graph.ops.place[op] != Place.HOST:
        return 0.0
    return work_on_host_ns(Operation.from_graph(graph, op))


def work_on_host_ns(operation: Operation) -> float:
    """The same of an operation that is known to work on the host."""
    if is_free(operation.name):
        return 0.0
    inputs = Inputs(operation.name, operation.arguments, (), operation.list_dtype)
    tensors = max((len(tensors) for tensors in inputs.lists()), default=0) or 1
    calls = [call for call in calls_of(operation) if "unsized" not in call.flags]
    by_bytes = tensors * HOST_TENSOR_NS + sum(call.bytes_moved for call in calls) / HOST_BYTES_PER_NS
    products = [call for call in calls if call.family in _PRODUCTS]
    return max(by_bytes, 1e3 * price(products, device("cpu")).total_us) if products else by_bytes


def _moved_bytes(operation: Operation) -> int | None:
    """Bytes that cross the link: a copy that also casts casts where its source is, so those of the target's type."""
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
