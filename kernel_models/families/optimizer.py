"""Kernels over many tensors: optimizers and lists (``_foreach_*``, ``_fused_*``, Apex), and what compilers generate.

Lists. Dimensions: tensors in the list and elements of all of them.

    FLOPs  = elements × operations an element (``_foreach_*``: 1, products with addition 3; Adam 12, Adagrad 8, SGD 4)
    bytes  = elements × (lists read + lists written), each in its own type

Source: the update rules as PyTorch's ``_fused_adam``, ``_fused_sgd`` and ``_fused_adagrad`` apply them. Profilers leave
out the sizes of lists of more than 30 tensors: such calls are "unsized".

Kernels of Triton and Inductor are priced by the tensors they are given. Dimensions: elements of the output (the last
tensor among the arguments), tensors, elements of all tensors.

    FLOPs  = one an element read (what is fused is not among the arguments)
    bytes  = every tensor read once but the output, which is written

Source: Inductor names its kernels ("poi": pointwise, "red" and "per": reductions, "tem": templates) and passes inputs
before outputs (``torch/_inductor/codegen/triton.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_models.families.registry import Inputs, forward, mixed_types, pattern, plain_name
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import TensorSpec, itemsize

_OPERATIONS = {"fused_adam": 12, "fused_adamw": 13, "fused_sgd": 4, "fused_adagrad": 8, "foreach_addcmul": 3,
               "foreach_addcdiv": 3, "foreach_lerp": 3, "foreach_norm": 2, "foreach_copy": 0, "foreach_zero": 0}
"""Floating-point operations an element, counted in the update rules above."""
_ONLY_READ = frozenset({"foreach_norm", "foreach_max"})
_ONLY_WRITTEN = frozenset({"foreach_zero"})


def optimizer(kind: str, lists: list[list[TensorSpec]], written: int) -> Iterator[OpCall]:
    """One pass over lists of equally large tensors, the first the results' sizes; ``written`` lists are written."""
    first = lists[0]
    elements = sum(tensor.elements for tensor in first)
    if not elements:
        return
    dtype = first[0].dtype
    total = sum(tensor.bytes for tensors in lists for tensor in tensors)
    stored = sum(tensor.elements for tensors in lists for tensor in tensors)
    read = 0 if kind in _ONLY_WRITTEN else total
    flags = [f"lists={len(lists)}"] if len(lists) > 1 and kind.startswith("foreach") else []
    if total != stored * itemsize(dtype) or stored != len(lists) * elements:
        flags.append(f"bytes={total}")
    yield OpCall(
        Family.OPTIMIZER, kind, (len(first), elements), dtype, flags=tuple(flags),
        flops=float(_OPERATIONS.get(kind, 1) * elements), bytes_read=float(read),
        bytes_written=float(written * elements * itemsize(dtype)),
    )


@pattern(Family.OPTIMIZER, r"aten::_foreach_\w+(\.\w+)?")
def _foreach(op: Inputs) -> Iterator[OpCall]:
    """Every list among the arguments is read once; one list is written, none by norms."""
    kind = plain_name(op.name).lstrip("_")
    lists = [tensors for tensors in op.lists() if tensors]
    if not lists:
        op.missing("lists")
    if kind == "foreach_copy":
        # The target comes first and is only written.
        yield from optimizer(kind, lists[1:2] or lists[:1], 1)
        return
    yield from optimizer(kind, lists, 0 if kind in _ONLY_READ else 1)


@forward(Family.OPTIMIZER, "aten::_fused_adam(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)",
         "aten::_fused_adamw(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)",
         "aten::_fused_sgd(self, grads, momentum_buffer_list)", "aten::_fused_adagrad(self, grads, state_sums)")
def _fused(op: Inputs) -> Iterator[OpCall]:
    """Parameters, gradients and states read; parameters and states written."""
    op.tensor_list("self")
    lists = [tensors for tensors in map(op.optional_list, op.names) if tensors]
    yield from optimizer(op.short_name.lstrip("_"), lists, len(lists) - 1)


@forward(Family.OPTIMIZER, "aten::_amp_foreach_non_finite_check_and_unscale(self, found_inf, inv_scale)")
def _unscale(op: Inputs) -> Iterator[OpCall]:
    yield from optimizer("foreach_unscale", [op.tensor_list("self")], 1)


@forward(Family.OPTIMIZER, "aten::_amp_update_scale(self)")
def _update_scale(op: Inputs) -> Iterator[OpCall]:
    yield from optimizer("amp_update_scale", [[op.tensor("self")]], 1)


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
