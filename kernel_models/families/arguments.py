"""Kinds of the arguments of registered operations: tensors, lists of tensors or numbers, and PyTorch's defaults.

Used for operations that are not recorded. Names are those of the schemas (``registry``); one name means one kind in all
of ``aten``, except those that ``kind_of`` distinguishes by operation.
"""

from __future__ import annotations

from kernel_models.families import registry
from kernel_models.op_call import Family

Value = bool | int | float | str | list[int] | list[float]

_NUMBERS = frozenset(registry.words("""
    C HxW N accumulate alpha batch_first batch_sizes beta bias_sizes bidirectional causal compute_log_sumexp
    custom_mask_type dilation dim dims dropout dropout_p dtype fill_value grad_input_mask group groups half_to_float
    has_biases head_size hidden_size impl_index include_last_offset input_dtype input_scale input_size input_sizes
    is_causal is_result kernel_size keepdim max_k max_q max_seqlen_k max_seqlen_q mode n normalized_shape num_groups
    num_layers num_samples num_weights ord out_dtype output_mask output_padding output_size p pad padding proj_size
    reverse s scale_grad_by_freq self_size size softmax_scale sparse split_sizes start stride train training transposed
    weight_size weight_stride0"""))
_LISTED = frozenset(registry.words("""
    bias_sizes batch_sizes dilation dims grad_input_mask input_size input_sizes kernel_size normalized_shape output_mask
    output_padding output_size pad padding repeats scale_factors self_size size split_sizes stride weight_size"""))
_TENSOR_LISTS = frozenset(registry.words(
    "tensors grads exp_avgs exp_avg_sqs max_exp_avg_sqs momentum_buffer_list state_sums params"))
_INTEGERS = frozenset(registry.words("indices index offsets target targets slot_mapping offs positions"))
_BOOLEANS = frozenset(("mask", "condition"))
_DEFAULTS: dict[Family, dict[str, Value]] = {
    Family.CONV: {"stride": [1], "padding": [0], "dilation": [1], "output_padding": [0], "transposed": False},
    Family.POOLING: {"padding": [0], "dilation": [1]},
    Family.ATTENTION: {"is_causal": False, "causal": False, "dropout_p": 0.0},
    Family.CONCAT: {"dim": 0},
    Family.RECURRENT: {"num_layers": 1, "bidirectional": False, "batch_first": False},
}
"""PyTorch's defaults, by family. Operations on a gradient derive most numbers from it, so they have none here."""
_FOREACH_LISTS = {"addcmul": 3, "addcdiv": 3, "add": 2, "sub": 2, "mul": 2, "div": 2, "maximum": 2, "minimum": 2,
                  "clamp_min": 2, "clamp_max": 2, "lerp": 2, "copy": 2, "pow": 2}
"""Lists of tensors that ``_foreach_*`` operations take if no number replaces the second; 1 if not named here."""


def kind_of(operation: str, argument: str) -> str:
    """Return the kind of an argument: "number", "list" (of tensors) or "tensor"."""
    plain = registry.plain_name(operation)
    if argument in _TENSOR_LISTS or (argument == "self" and ("_fused_" in operation or "_foreach_" in operation)):
        return "list"
    if (argument == "indices" and plain.lstrip("_").startswith(("index", "unsafe_index"))) or (
            argument == "hx" and plain == "lstm") or (argument == "weight" and plain in ("_cudnn_rnn", "miopen_rnn")):
        return "list"
    if argument in ("end", "repeats") and plain in ("arange", "range", "repeat"):
        return "number"
    if argument == "scale" and plain == "elu_backward":
        return "number"
    return "number" if argument in _NUMBERS else "tensor"


def is_listed(operation: str, argument: str) -> bool:
    """Return whether a number argument is a list, such as a stride."""
    rule = registry.forward_rule(operation)
    whole = ("sum", "mean", "nansum", "amax", "amin", "var", "std", "var_mean", "std_mean", "logsumexp",
             "count_nonzero", "prod", "linalg_vector_norm", "norm", "native_norm")
    over = argument == "dim" and rule is not None and registry.plain_name(operation) in whole
    return argument in _LISTED or over


def element_type(argument: str) -> str:
    """Return the element type of an argument that never has the operation's own type; "" for other arguments."""
    return "int64" if argument in _INTEGERS else "bool" if argument in _BOOLEANS else ""


def default_of(operation: str, argument: str) -> Value | None:
    """Return PyTorch's default of a number; ``None`` if it has none, or if the default does not change the price."""
    rule = registry.forward_rule(operation)
    if rule is None or any(name.startswith(("grad", "dout")) for name in rule.names):
        return None
    return _DEFAULTS.get(rule.family, {}).get(argument)


def more_values(operation: str) -> tuple[str, ...]:
    """Return the names of numbers that matter in addition to those of the registered schema."""
    rule, plain = registry.forward_rule(operation), registry.plain_name(operation)
    if rule is None:
        return ()
    if plain in ("lstm", "gru"):
        return ("hidden_size",)
    if rule.family is Family.INTERPOLATE and "output_size" in rule.names and "input_size" not in rule.names:
        return ("scale_factors",)
    if "_foreach_" in operation:
        return ("scalar", "other", "value", "weight", "exponent", "ord")
    return ("amsgrad",) if "_fused_adam" in operation else ()


def lists_of_foreach(operation: str, with_number: bool) -> int:
    """Return how many lists of tensors a ``_foreach_*`` operation takes; a number may replace the second list."""
    base, _, overload = operation.partition(".")
    name = registry.plain_name(base).lstrip("_").removeprefix("foreach_")
    count = _FOREACH_LISTS.get(name, 1)
    return 1 if count == 2 and (with_number or "Scalar" in overload) and name not in ("lerp", "copy") else count
