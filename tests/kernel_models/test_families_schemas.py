"""What families say of operations' arguments, against PyTorch's own schemas (skips where PyTorch is absent)."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_models.families import load, registry
from kernel_models.op_call import Family
from kernel_models.operation import family_of

torch = pytest.importorskip("torch")
load()

# One signature may serve operations that give the same argument different names: ours → theirs.
_THEIRS = {
    "input": {"self"}, "self": {"input", "count", "elements"}, "other": {"exponent", "values", "test_elements"},
    "pad": {"padding"}, "grad_output": {"grad", "grad_out"}, "split_sizes": {"split_size"},
}
_THEIRS_OF = {("aten::sigmoid_backward", "self"): "output", ("aten::tanh_backward", "self"): "output",
              ("aten::native_dropout_backward", "self"): "mask", ("aten::range", "end"): "start",
              ("aten::randint", "size"): "high"}
_DROPPED = {
    "_cat", "_index_copy", "_scatter_reduce", "cudnn_convolution_backward", "cudnn_convolution_backward_input",
    "cudnn_convolution_backward_weight", "miopen_convolution_backward", "miopen_convolution_backward_input",
    "miopen_convolution_backward_weight", "mkldnn_convolution_backward",
}
"""Operations of older releases, which PyTorch no longer has."""


def schemas(name: str) -> list[Any]:
    """All overloads of an operation and of its in-place variant, in this PyTorch."""
    return [schema for variant in (name, f"{name}_") for schema in torch._C._jit_get_schemas_for_operator(variant)]


def agrees(name: str, ours: tuple[str, ...], schema: Any) -> bool:
    """Whether each argument stands where we look for it."""
    theirs = [argument.name for argument in schema.arguments]
    return len(ours) <= len(theirs) and all(
        one == other or other in _THEIRS.get(one, ()) or _THEIRS_OF.get((name, one)) == other
        for one, other in zip(ours, theirs, strict=False))


RULES = sorted(
    (name, rule.names) for table in (registry.FORWARD, registry.BACKWARD) for name, rule in table.items()
    if name.startswith("aten::") and rule.names and name.removeprefix("aten::") not in _DROPPED)


def test_arguments_stand_where_the_schema_puts_them() -> None:
    wrong = {name: (names, [str(schema) for schema in schemas(name)]) for name, names in RULES
             if not any(agrees(name, names, schema) for schema in schemas(name))}
    assert len(RULES) > 500 and not wrong


def test_free_operations_return_views_or_nothing_new() -> None:
    """What we call free aliases an input, reserves memory, or returns no tensor, by its schema."""
    makes_memory = ("empty", "resize", "_cudnn_rnn_flatten_weight", "new_empty", "_efficientzerotensor",
                    "_cudnn_init_dropout_state")
    wrong = []
    for name, rule in registry.FORWARD.items():
        if not (rule.is_free and name.startswith("aten::")) or any(word in name for word in makes_memory):
            continue
        for schema in torch._C._jit_get_schemas_for_operator(name):
            new = [one for one in schema.returns if str(one.type) == "Tensor" and one.alias_info is None]
            if new and not schema.overload_name:
                wrong.append(str(schema))
    # These alias in practice though their schemas do not say so.
    allowed = ("_unsafe_view", "result_type", "_nested", "unsafe_", "_functional_assert", "resolve_", "meshgrid",
               "flatten", "_make_dual", "atleast", "_sparse_broadcast_to", "_fw_primal", "_unpack_dual", "lift")
    assert not [text for text in wrong if not any(word in text for word in allowed)]


def test_pointwise_operations_of_pytorch_are_known() -> None:
    """PyTorch tags its pointwise operations; all but a few exotic ones belong to a family."""
    missed = set()
    for name in {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")}:
        operator = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        if operator is None or "special_" in name:
            continue
        tags = [tag for one in operator.overloads() for tag in getattr(operator, one).tags]
        if torch.Tag.pointwise in tags and family_of(name) is Family.OTHER:
            missed.add(name)
    assert not missed
