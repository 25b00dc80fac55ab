"""Elementwise operations, their usual fusions, and kernels over lists of tensors: optimizers, generated code.

Dimensions: elements of the output, number of tensors read, and elements of all inputs as stored. A broadcast input
counts once; numbers and tensors without dimensions do not count.

    FLOPs  = elements × operations an element (1, more for the activations listed in ``OPERATIONS``)
    Bytes  = every input's distinct elements read, every output element written, each in its own type

Source: the definition. Layout: "" where all tensors have one memory order without holes, "broadcast" where an input is
smaller than the output, "strided" where one has holes or another order of dimensions.

Lists (``_foreach_*``, ``_fused_*``, Apex). Dimensions: tensors in the list and elements of all of them.

    FLOPs  = elements × operations an element (``_foreach_*``: 1, products with addition 3; Adam 12, Adagrad 8, SGD 4)
    Bytes  = elements × (lists read + lists written), each in its own type

Source: the update rules as PyTorch's ``_fused_adam``, ``_fused_sgd`` and ``_fused_adagrad`` apply them. Profilers leave
out the sizes of lists of more than 30 tensors: such calls are "unsized".

Kernels of Triton and Inductor are priced by their tensor arguments. Dimensions: elements of the output (the last tensor
among the arguments), tensors, elements of all tensors.

    FLOPs  = one an element read (what is fused is not among the arguments)
    Bytes  = every tensor read once but the output, which is written

Source: Inductor names its kernels ("poi": pointwise, "red" and "per": reductions, "tem": templates) and passes inputs
before outputs (``torch/_inductor/codegen/triton.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod

from kernel_models.families.reduction import reduction
from kernel_models.families.registry import (
    Inputs,
    backward,
    compute_dtype,
    forward,
    mixed_types,
    pattern,
    plain_name,
    without_gradient,
    words,
)
from kernel_models.op_call import Family, OpCall, TensorSpec, broadcast, itemsize

_NUMBER = re.compile(r"-?(?=.{1,30}$)[0-9]*\.?[0-9]+")
OPERATIONS = {
    "gelu": 8, "gelu_backward": 14, "silu": 4, "silu_backward": 7, "sigmoid": 3, "tanh": 5, "softplus": 4, "mish": 8,
    "exp": 1, "addcmul": 3, "addcdiv": 3, "lerp": 3, "sigmoid_backward": 3, "tanh_backward": 3, "silu_and_mul": 5,
    "gelu_and_mul": 9, "rotary_embedding": 3, "nan_to_num": 3, "glu": 4, "glu_backward": 6, "fill": 0, "clone": 0,
}
"""Floating-point operations per element, where not 1; counted from the formulas, one for each function."""

_COMPARISONS = words(
    "eq ne lt le gt ge isin logical_and logical_or logical_xor isclose not_equal greater greater_equal less less_equal")
_TESTS = words("isnan isinf isfinite isneginf isposinf logical_not signbit isreal")
_UNARY = words(
    "abs absolute acos acosh angle asin asinh atan atanh bitwise_not ceil celu conj_physical _conj_physical cos cosh "
    "deg2rad digamma elu erf erfc erfinv exp exp2 expm1 floor frac frexp gelu hardshrink hardsigmoid "
    "hardswish hardtanh i0 leaky_relu lgamma log log10 log1p log2 logit log_sigmoid log_sigmoid_forward mish "
    "mvlgamma nan_to_num neg "
    "negative polygamma positive rad2deg reciprocal relu relu6 round rrelu rrelu_with_noise rsqrt selu sgn sigmoid "
    "sign silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold trunc prelu _prelu_kernel "
    "special_erfcx special_expit special_i1 special_log_ndtr special_ndtri tril triu clamp clamp_min clamp_max clip "
    "fake_quantize_per_tensor_affine alpha_dropout")
_BINARY = words(
    "add sub mul div divide multiply subtract true_divide floor_divide remainder fmod pow float_power atan2 arctan2 "
    "maximum minimum fmax fmin copysign hypot nextafter logaddexp logaddexp2 xlogy heaviside gcd lcm ldexp rsub "
    "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ "
    "__rshift__ __ilshift__ __irshift__ __iand__ __ior__ __ixor__ igamma igammac special_zeta special_xlog1py dist "
    "sigmoid_backward tanh_backward silu_backward gelu_backward threshold_backward hardtanh_backward "
    "hardswish_backward hardsigmoid_backward leaky_relu_backward softplus_backward mish_backward "
    "logit_backward hardshrink_backward softshrink_backward log_sigmoid_backward "
    "_prelu_kernel_backward masked_fill native_dropout_backward rrelu_with_noise_backward")
_FILLS = words("fill zero zeros ones full empty_full new_zeros new_ones new_full zeros_like ones_like full_like eye "
               "arange linspace logspace scalar_tensor range masked_fill_scalar")


def elementwise(
    kind: str, inputs: Sequence[TensorSpec], shape: tuple[int, ...] | None = None, out_dtype: str = "", *,
    dtype: str = "",
) -> Iterator[OpCall]:
    """Yield one pass over the broadcast shape of the inputs (or ``shape``); none if the shape is empty."""
    shape = broadcast([tensor.shape for tensor in inputs]) if shape is None else shape
    elements = prod(shape)
    if elements <= 0:
        return
    dtype = dtype or (compute_dtype(list(inputs)) if inputs else out_dtype or "fp32")
    written = out_dtype or dtype
    read = [tensor for tensor in inputs if tensor.shape] or list(inputs)
    yield OpCall(
        Family.ELEMENTWISE, kind, (elements, len(read), sum(tensor.stored for tensor in read)), dtype,
        _layout(read, shape), mixed_types(read, dtype, written),
        flops=float(OPERATIONS.get(kind, 1) * elements),
        bytes_read=float(sum(tensor.bytes for tensor in read)), bytes_written=float(elements * itemsize(written)),
    )


def _layout(tensors: list[TensorSpec], shape: tuple[int, ...]) -> str:
    whole = [tensor for tensor in tensors if tensor.shape == shape and tensor.stored == tensor.elements]
    if any(not tensor.is_dense for tensor in whole) or len({tensor.order for tensor in whole}) > 1:
        return "strided"
    return "broadcast" if len(whole) < len(tensors) and any(t.elements > 1 or t.shape for t in tensors) else ""


@forward(Family.ELEMENTWISE, *(f"aten::{name}(self)" for name in _UNARY if name != "prelu"))
def _unary(op: Inputs) -> Iterator[OpCall]:
    yield from elementwise(op.short_name, [op.tensor("self")])


@forward(Family.ELEMENTWISE, *(f"aten::{name}(self, other)" for name in _BINARY if not name.endswith("backward")
                               and name != "masked_fill"),
         "aten::masked_fill(self, mask)", *(f"aten::{name}(grad_output, self)" for name in _BINARY
                                            if name.endswith("backward")), "aten::prelu(self, weight)")
def _binary(op: Inputs) -> Iterator[OpCall]:
    tensors = op.named()
    floating = "div" in op.short_name and "floor" not in op.short_name
    dtype = compute_dtype(tensors[:1] if op.short_name == "masked_fill" else tensors)
    if floating and not dtype.startswith(("fp", "bf", "tf", "complex")):
        dtype = "fp32"
    stored = op.stored_entries("other") if op.short_name in ("add", "sub") else None
    if stored is not None:  # an optimizer's step with a sparse gradient: only the looked-up rows
        from kernel_models.families.index import index  # that module imports this one

        row = prod(tensors[0].shape[1:])
        yield from index("index_add", stored * row, row, tensors[0].elements, tensors[0].dtype)
        return
    in_place = op.name.split(".")[0].endswith("_") and not op.name.endswith("__")
    yield from elementwise(op.short_name, tensors, out_dtype=tensors[0].dtype if in_place else dtype, dtype=dtype)


@forward(Family.ELEMENTWISE, "aten::addcmul(self, tensor1, tensor2)", "aten::addcdiv(self, tensor1, tensor2)",
         "aten::lerp(self, end, weight)", "aten::where(condition, self, other)")
def _ternary(op: Inputs) -> Iterator[OpCall]:
    tensors = op.named()
    values = [t for t in map(op.optional, op.names[1:]) if t is not None] if op.short_name == "where" else tensors
    yield from elementwise(op.short_name, tensors, dtype=compute_dtype(values or tensors))


@forward(Family.ELEMENTWISE, *(f"aten::{name}(self, other)" for name in _COMPARISONS),
         *(f"aten::{name}(self)" for name in _TESTS))
def _comparison(op: Inputs) -> Iterator[OpCall]:
    yield from elementwise(op.short_name, op.named(), out_dtype="bool")


@forward(Family.ELEMENTWISE, "aten::elu_backward(grad_output, alpha, scale, input_scale, is_result, self_or_result)")
def _elu_backward(op: Inputs) -> Iterator[OpCall]:
    yield from elementwise("elu_backward", [op.tensor("grad_output"), op.tensor("self_or_result")])


@forward(Family.ELEMENTWISE, "aten::fill(self)", "aten::zero(self)", "aten::zeros_like(self)", "aten::ones_like(self)",
         "aten::full_like(self)", "aten::new_zeros(self, size)", "aten::new_ones(self, size)",
         "aten::new_full(self, size)", "aten::_fill_mem_eff_dropout_mask(self)")
def _fill(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("self")
    shape = op.ints("size") or tensor.shape
    yield from elementwise("fill", [], shape, tensor.dtype)


@forward(Family.ELEMENTWISE, "aten::zeros(size, dtype)", "aten::ones(size, dtype)",
         "aten::full(size, fill_value, dtype)")
def _new(op: Inputs) -> Iterator[OpCall]:
    shape = op.ints("size")
    if shape is None:
        op.tensor("size")
    yield from elementwise("fill", [], shape, op.dtype("dtype") or "fp32")


@forward(Family.ELEMENTWISE, "aten::scalar_tensor(s, dtype)")
def _number(op: Inputs) -> Iterator[OpCall]:
    if not op.text("s"):
        op.missing("number")
    yield from elementwise("fill", [], (), op.dtype("dtype") or "fp32")


@forward(Family.ELEMENTWISE, "aten::arange(end)", "aten::linspace(start)", "aten::eye(n)", "aten::range(end)",
         "aten::logspace(start)")
def _sequence(op: Inputs) -> Iterator[OpCall]:
    """Yield a range; its length is that of the recorded output, else it follows from the numbers."""
    outputs = [tensor for tensor in op.tensors() if tensor.shape]
    if outputs and outputs[-1].elements:
        yield from elementwise("fill", [], outputs[-1].shape, outputs[-1].dtype)
        return
    texts = [argument.value for argument in op.arguments]
    numbers = [float(text) for text in texts if _NUMBER.fullmatch(text)]
    if not numbers:
        op.missing("length")
    start, end, step = (0.0, numbers[0], 1.0) if len(numbers) == 1 else (*numbers[:2], (*numbers[2:3], 1.0)[0])
    length = abs(end - start) / abs(step or 1.0)
    yield from elementwise("fill", [], (max(int(length), 1),), outputs[-1].dtype if outputs else "int64")


@forward(Family.ELEMENTWISE, "aten::glu(self)")
def _glu(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("self")
    yield from elementwise("glu", [tensor], (tensor.elements // 2,))


@forward(Family.ELEMENTWISE, "aten::glu_backward(grad_output, self)")
def _glu_backward(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("self")
    yield from elementwise("glu_backward", [op.tensor("grad_output"), tensor], tensor.shape)


@forward(Family.ELEMENTWISE, "aten::_fused_moving_avg_obs_fq_helper(self)", "aten::complex(real)", "aten::polar(abs)")
def _to_complex(op: Inputs) -> Iterator[OpCall]:
    yield from elementwise(op.short_name, [op.tensor(op.names[0])])


@forward(Family.ELEMENTWISE, "_C::silu_and_mul(out, input)", "_C::gelu_and_mul(out, input)",
         "_C::gelu_tanh_and_mul(out, input)", "_C::swigluoai_and_mul(out, input)",
         "_C::static_scaled_fp8_quant(out, input, scale)", "_C::dynamic_scaled_fp8_quant(out, input, scale)",
         "_C::dynamic_per_token_scaled_fp8_quant(out, input, scale)", "_C::scaled_fp4_quant(out, input)")
def _into_output(op: Inputs) -> Iterator[OpCall]:
    source, out = op.tensor("input"), op.tensor("out")
    yield from elementwise(op.short_name, [source], out.shape, out.dtype)


@forward(Family.ELEMENTWISE, "_C::rotary_embedding(positions, query, key, head_size, cos_sin_cache)",
         "vllm::rotary_embedding(positions, query, key, head_size, cos_sin_cache)")
def _rotary(op: Inputs) -> Iterator[OpCall]:
    """Yield a rotation of query and key in place: each element times a cosine plus its partner times a sine."""
    query, key = op.tensor("query"), op.optional("key")
    tensors = [query] if key is None else [query, key]
    elements = sum(tensor.elements for tensor in tensors)
    yield from elementwise("rotary_embedding", [TensorSpec((elements,), query.dtype)], (elements,))


_QUANTIZERS = {
    "FloatToFP8RowwiseQuantized": "uint8", "FP8RowwiseQuantizedToFloat": "fp32", "FloatToHFP8Quantized": "uint8",
    "HFP8QuantizedToFloat": "fp32", "FloatToBfloat16Quantized": "bf16", "Bfloat16QuantizedToFloat": "fp32",
    "FloatOrHalfToFused8BitRowwiseQuantized": "uint8", "Fused8BitRowwiseQuantizedToFloat": "fp32",
}


@forward(Family.ELEMENTWISE, *(f"fbgemm::{name}(input)" for name in _QUANTIZERS))
def _quantize(op: Inputs) -> Iterator[OpCall]:
    """Yield casts between floats and packed bytes, one value per element (a few bytes of row scales are left out)."""
    source = op.tensor("input")
    yield from elementwise(op.short_name, [source], source.shape, _QUANTIZERS[op.short_name])


@backward(Family.ELEMENTWISE, "aten::relu(self)", "aten::gelu(self)", "aten::silu(self)", "aten::sigmoid(self)",
          "aten::tanh(self)", "aten::hardtanh(self)", "aten::leaky_relu(self)", "aten::elu(self)", "aten::mish(self)",
          "aten::hardswish(self)", "aten::hardsigmoid(self)", "aten::softplus(self)", "aten::clamp_min(self)")
def _activation_backward(op: Inputs) -> Iterator[OpCall]:
    tensor = op.tensor("self")
    name = {"relu": "threshold", "clamp_min": "threshold"}.get(op.short_name, op.short_name)
    yield from elementwise(f"{name}_backward", [tensor, tensor])


@backward(Family.ELEMENTWISE, "aten::add(self, other)", "aten::sub(self, other)", "aten::mul(self, other)",
          "aten::div(self, other)")
def _gradients_of_operands(op: Inputs) -> Iterator[OpCall]:
    """Yield for each operand the products of the gradient with its factor (none for a sum, which passes the gradient
    on), and a sum where the operand was broadcast."""
    products = {"mul": 1, "div": 2}.get(op.short_name, 0)
    operands = [tensor for tensor in map(op.optional, op.names) if tensor is not None]
    shape = broadcast([tensor.shape for tensor in operands])
    whole = TensorSpec(shape, compute_dtype(operands) if operands else "fp32")
    with_sizes = [tensor for tensor in operands if tensor.shape]
    for place, operand in enumerate(with_sizes):
        for _ in range(products if len(with_sizes) > 1 and place else min(products, 1)):
            yield from elementwise("mul" if products == 1 else "div",
                                   [whole, *with_sizes[:place], *with_sizes[place + 1:]])
        if 0 < operand.elements < whole.elements:
            yield from reduction("sum", operand.elements, whole.elements // operand.elements,
                                 operand.elements, whole.dtype)


@backward(Family.ELEMENTWISE, "aten::sum(self, dim)", "aten::mean(self, dim)")
def _spread(op: Inputs) -> Iterator[OpCall]:
    """Yield the broadcast of a gradient: no call for a sum (a view), a division by the count for a mean."""
    if op.short_name == "mean":
        tensor = op.tensor("self")
        yield from elementwise("div", [TensorSpec(tensor.shape, tensor.dtype, (0,) * len(tensor.shape))], tensor.shape)


without_gradient(*(f"aten::{name}" for name in (*_COMPARISONS, *_TESTS, *_FILLS)))


_OPERATIONS = {"fused_adam": 12, "fused_adamw": 13, "fused_sgd": 4, "fused_adagrad": 8, "foreach_addcmul": 3,
               "foreach_addcdiv": 3, "foreach_lerp": 3, "foreach_norm": 2, "foreach_copy": 0, "foreach_zero": 0}
"""Floating-point operations per element, counted in the update rules above."""
_ONLY_READ = frozenset({"foreach_norm", "foreach_max"})
_ONLY_WRITTEN = frozenset({"foreach_zero"})


def optimizer(kind: str, lists: list[list[TensorSpec]], written: int) -> Iterator[OpCall]:
    """Yield one pass over lists of equally large tensors; the first is the result, ``written`` lists are written."""
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
    """Yield the work on lists of tensors: each list is read once; one list is written (none by norms)."""
    kind = plain_name(op.name).lstrip("_")
    lists = [tensors for tensors in op.lists() if tensors]
    if not lists:
        op.missing("lists")
    if kind == "foreach_copy":
        # The target list comes first and is only written.
        yield from optimizer(kind, lists[1:2] or lists[:1], 1)
        return
    yield from optimizer(kind, lists, 0 if kind in _ONLY_READ else 1)


@forward(Family.OPTIMIZER, "aten::_fused_adam(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)",
         "aten::_fused_adamw(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)",
         "aten::_fused_sgd(self, grads, momentum_buffer_list)", "aten::_fused_adagrad(self, grads, state_sums)")
def _fused(op: Inputs) -> Iterator[OpCall]:
    """Yield a fused optimizer: it reads parameters, gradients and states, and writes parameters and states."""
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
    """Return the kind of a generated kernel: "triton_poi_fused_add_0" → "pointwise"; "user" for hand-written ones."""
    parts = name.split("_")
    return _KINDS.get(parts[1], "user") if parts[0] == "triton" and len(parts) > 1 else "user"
