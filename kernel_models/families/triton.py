"""Kernels that compilers generate (Triton, Inductor): priced by the tensors they are given.

Dimensions: elements of the output (the last tensor among the arguments), tensors, elements of all tensors.

    FLOPs  = one an element read (what is fused is not among the arguments)
    bytes  = every tensor read once but the output, which is written

Source: Inductor names its kernels ("poi": pointwise, "red" and "per": reductions, "tem": templates) and passes inputs
before outputs (``torch/_inductor/codegen/triton.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_models.families.registry import Inputs, mixed_types, pattern
from kernel_models.op_call import Family, OpCall

_KINDS = {"poi": "pointwise", "red": "reduction", "per": "persistent_reduction", "tem": "template",
          "for": "foreach", "spl": "split_scan"}


@pattern(Family.TRITON, r"triton_\w+|_?\w+_kernel\w*_\d+(d\d+)+")
def _generated(op: Inputs) -> Iterator[OpCall]:
    tensors = op.tensors()
    if not tensors:
        op.missing("tensors")
    out = tensors[-1]
    if not out.elements:
        return
    total = sum(tensor.bytes for tensor in tensors)
    read = total - out.bytes if len(tensors) > 1 else total
    elements = sum(tensor.stored for tensor in tensors)
    yield OpCall(
        Family.TRITON, triton_kind(op.name), (out.stored, len(tensors), elements), out.dtype,
        flags=mixed_types(tensors, out.dtype), flops=float(elements), bytes_read=float(read),
        bytes_written=float(out.bytes),
    )


def triton_kind(name: str) -> str:
    """ "triton_poi_fused_add_0" → "pointwise"; "user" for kernels people wrote."""
    parts = name.split("_")
    return _KINDS.get(parts[1], "user") if parts[0] == "triton" and len(parts) > 1 else "user"
