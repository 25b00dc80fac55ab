"""Linear layers in fp8 and fp4: the products of a block in a narrower type, and the casts this takes.

As Transformer Engine runs them: a layer's input is cast once, by the norm where one comes before it, its output's
gradient once for both products of backward; master weights once a step. A cast writes a second, transposed copy where
the matrix units take operands in one order alone (Hopper's fp8) or where scales run along the rows of each (blocks, MX,
NVFP4).

    traced calls, bf16 ──narrowed──▶ products of the type, casts, everything else as it was
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kernel_models.device import DeviceSpec
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import itemsize
from tracer.parallel_plan import PlanError
from tracer.shape_only.state_space import SCAN
from tracer.shape_only.transformer import LINEARS, TransformerShape

_WIDTH = {"fp8": 1.0, "fp8_block": 1.0 + 4 / 128, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes of a value with its share of a scale."""


@dataclass(frozen=True, slots=True)
class NarrowType:
    """A type of linear layers' products on a device.

    Attributes:
        dtype: of the products.
        bytes: of a value.
        copies: that a cast writes.
    """

    dtype: str
    bytes: float
    copies: int


def narrow_type(linears: str, device: DeviceSpec) -> NarrowType | None:
    """Return the type of a shape's ``linears``; ``None`` for none.

    Raises:
        PlanError: there is no such type, or the device's matrix units do not have it.
    """
    if not linears:
        return None
    if linears not in LINEARS:
        raise PlanError(f"{linears} is no type of linear layers' products; give {', '.join(LINEARS)}.")
    dtype = "fp4" if linears == "nvfp4" else "fp8"
    scaled = linears in ("mxfp8", "nvfp4") and device.architecture in ("hopper", "ada", "cdna3")
    if dtype not in device.matrix_tflops or scaled:
        raise PlanError(f"The matrix units of {device.name} do not have {linears}; choose another type or device.")
    one_order = linears != "fp8" or device.architecture in ("hopper", "ada")
    return NarrowType(dtype, _WIDTH[linears], 2 if one_order else 1)


def narrowed(calls: Sequence[OpCall], shape: TransformerShape, to: NarrowType) -> list[OpCall]:
    """A block's calls with its linear layers' products in a narrower type.

    Args:
        calls: of forward or of backward, in order.
        shape: of the block.
    """
    found: list[OpCall] = []
    before: OpCall | None = None
    for call in calls:
        if _is_linear(call, shape):
            batch, m, _, k = call.dims
            # A product for gradients of weights reads what the one for gradients of inputs has had cast.
            by_norm = before is not None and before.family is Family.NORM
            if not call.layout.startswith("t") and not by_norm:
                found.append(_cast(batch * m * k, itemsize(call.dtype), to))
            found.append(_product(call, to))
        else:
            found.append(call)
        before = call
    return found


def kept_less(forward: Iterable[OpCall], shape: TransformerShape, to: NarrowType) -> float:
    """Bytes by which what backward needs is less: the inputs of linear layers are kept as they were cast."""
    return sum(call.dims[0] * call.dims[1] * call.dims[3] * (itemsize(call.dtype) - to.bytes)
               for call in forward if _is_linear(call, shape))


def weights_cast(shape: TransformerShape, parameters: float, to: NarrowType) -> OpCall:
    """The cast of so many weights, once a step."""
    return _cast(round(parameters), shape.element_bytes, to)


def _is_linear(call: OpCall, shape: TransformerShape) -> bool:
    """Return whether a product is one of a linear layer that is cast: experts' grouped ones are; routers and the
    products of
    unfused attention and of state-space mixers' recurrence are not."""
    if call.family is not Family.GEMM or SCAN in call.flags:
        return False
    batch, *sizes = call.dims
    if batch > 1:
        return bool(shape.experts) and shape.experts % batch == 0
    return not (shape.experts and shape.experts in sizes)


def _product(call: OpCall, to: NarrowType) -> OpCall:
    batch, m, n, k = call.dims
    packed = 2 if to.dtype == "fp4" else 1
    less = batch * (m * k + k * n) * (itemsize(call.dtype) - to.bytes)
    return replace(call, kind="scaled" if batch == 1 else "grouped", dims=(batch, m, n, max(k // packed, 1)),
                   dtype=to.dtype, flags=tuple(sorted({*call.flags, "out_bf16"})), flops=call.flops,
                   bytes_read=max(call.bytes_read - less, 0.0), bytes_written=call.bytes_written)


def _cast(elements: int, width: int, to: NarrowType) -> OpCall:
    return OpCall(Family.ELEMENTWISE, "cast", (elements, 1, elements), "bf16", flags=(f"to_{to.dtype}",),
                  flops=float(elements), bytes_read=float(elements * width),
                  bytes_written=elements * to.bytes * to.copies)

