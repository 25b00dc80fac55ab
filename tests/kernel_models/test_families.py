"""Families of operations: calls, FLOPs and bytes against numbers worked out by hand, and the field's known traps."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_models.families.attention import attended_pairs
from kernel_models.op_call import DIMENSIONS, Family, OpCall, itemsize, promoted, scalar_type, short_dtype
from kernel_models.operation import Operation, backward_calls_of, calls_of, is_free, operation
from tracer.views import Argument


def only(calls: tuple[OpCall, ...]) -> OpCall:
    assert len(calls) == 1, calls
    return calls[0]


def named(call: OpCall) -> dict[str, int]:
    """Dimensions by name."""
    return dict(zip(DIMENSIONS[call.family], call.dims, strict=True))


# --- matrix products ------------------------------------------------------------------------------------------------


def test_linear_without_bias_is_a_product() -> None:
    call = only(calls_of(operation("aten::linear", [(4, 8, 16), (32, 16), None], "bf16")))
    assert (call.family, call.dims, call.dtype, call.layout, call.flags) == (
        Family.GEMM, (1, 32, 32, 16), "bf16", "nt", ())
    assert call.flops == 2 * 32 * 32 * 16
    assert (call.bytes_read, call.bytes_written) == (2 * (32 * 16 + 32 * 16), 2 * 32 * 32)


def test_linear_with_bias_adds_it() -> None:
    call = only(calls_of(operation("aten::linear", [(32, 16), (8, 16), (8,)], "fp32")))
    assert call.flags == ("bias",)
    assert call.flops == 2 * 32 * 8 * 16 + 32 * 8
    assert call.bytes_read == 4 * (32 * 16 + 8 * 16 + 8)


def test_linear_and_its_addmm_are_the_same_call() -> None:
    linear = calls_of(operation("aten::linear", [(32, 16), (8, 16), (8,)], "bf16"))
    addmm = calls_of(operation("aten::addmm", [(8,), (32, 16), (16, 8)], "bf16", strides=[(1,), (16, 1), (1, 16)]))
    assert linear == addmm


@pytest.mark.parametrize(("a", "b", "layout"), [
    ((16, 1), (8, 1), "nn"), ((16, 1), (1, 16), "nt"), ((1, 32), (8, 1), "tn"), ((1, 32), (1, 16), "tt"),
    ((32, 1), (8, 1), "nn"),  # rows further apart than they are long
    ((32, 2), (8, 1), "nn"),  # no layout of a library: copied first
])
def test_layouts_of_products(a: tuple[int, int], b: tuple[int, int], layout: str) -> None:
    call = only(calls_of(operation("aten::mm", [(32, 16), (16, 8)], "fp16", strides=[a, b])))
    assert call.layout == layout


def test_linear_backward_is_two_products_and_the_sum_of_the_bias() -> None:
    forward = operation("aten::linear", [(32, 16), (8, 16), (8,)], "bf16")
    dgrad, wgrad, bias = backward_calls_of(forward)
    assert (dgrad.dims, dgrad.layout) == ((1, 32, 16, 8), "nn")
    assert (wgrad.dims, wgrad.layout) == ((1, 8, 16, 32), "tn")
    assert (bias.family, bias.kind, bias.dims) == (Family.REDUCTION, "sum", (8, 32, 8))
    assert dgrad.flops == wgrad.flops == 2 * 32 * 16 * 8
    assert len(backward_calls_of(operation("aten::linear", [(32, 16), (8, 16), None], "bf16"))) == 2


def test_addmm_backward_gives_the_products_of_linear() -> None:
    addmm = operation("aten::addmm", [(8,), (32, 16), (16, 8)], "bf16", strides=[(1,), (16, 1), (1, 16)])
    linear = operation("aten::linear", [(32, 16), (8, 16), (8,)], "bf16")
    assert backward_calls_of(addmm) == backward_calls_of(linear)


def test_batched_products_and_what_they_accumulate() -> None:
    bmm = only(calls_of(operation("aten::bmm", [(5, 32, 16), (5, 16, 8)], "fp32")))
    assert (bmm.kind, bmm.dims, bmm.flops) == ("bmm", (5, 32, 8, 16), 2 * 5 * 32 * 8 * 16)
    added = only(calls_of(operation("aten::baddbmm", [(5, 32, 8), (5, 32, 16), (5, 16, 8)], "fp32")))
    assert added.flags == ("accumulate",)
    assert added.bytes_read == bmm.bytes_read + 4 * 5 * 32 * 8
    ignored = operation("aten::baddbmm", [(5, 32, 8), (5, 32, 16), (5, 16, 8), None], "fp32",
                        values=[None, None, None, 0])
    assert only(calls_of(ignored)) == bmm


def test_an_operand_shared_by_a_batch_is_read_once() -> None:
    call = only(calls_of(operation("aten::bmm", [(5, 32, 16), (5, 16, 8)], "fp32",
                                   strides=[(512, 16, 1), (0, 8, 1)])))
    assert call.flags == ("shared_b",)
    assert call.bytes_read == 4 * (5 * 32 * 16 + 16 * 8)


def test_scaled_mm_reads_bytes_and_writes_what_it_was_asked_for() -> None:
    op = operation("aten::_scaled_mm", [(64, 32), (32, 48), (), (), None, None, None],
                   ["c10::Float8_e4m3fn", "c10::Float8_e4m3fn", "float", "float", "", "", ""],
                   strides=[(32, 1), (1, 32), (), (), None, None, None], values=[None] * 6 + [15])
    call = only(calls_of(op))
    assert (call.dtype, call.layout, call.dims, call.flags) == ("fp8", "nt", (1, 64, 48, 32), ("out_bf16",))
    assert (call.bytes_read, call.bytes_written) == (64 * 32 + 32 * 48, 2 * 64 * 48)


def test_tf32_is_the_callers_word_and_only_for_fp32() -> None:
    assert only(calls_of(operation("aten::mm", [(4, 4), (4, 4)], "fp32"), tf32=True)).dtype == "tf32"
    assert only(calls_of(operation("aten::mm", [(4, 4), (4, 4)], "bf16"), tf32=True)).dtype == "bf16"


def test_matmul_folds_leading_dimensions_for_a_matrix_on_the_right() -> None:
    folded = only(calls_of(operation("aten::matmul", [(3, 5, 16), (16, 8)], "fp32")))
    assert folded.dims == (1, 15, 8, 16)
    assert only(calls_of(operation("aten::matmul", [(2, 3, 5, 16), (2, 3, 16, 8)], "fp32"))).dims == (6, 5, 8, 16)


def test_grouped_products_have_mean_heights() -> None:
    call = only(calls_of(operation("aten::_grouped_mm", [(96, 16), (4, 16, 8), (4,)], ["bf16", "bf16", "int32"])))
    assert (call.kind, call.dims, call.flops) == ("grouped", (4, 24, 8, 16), 2 * 96 * 8 * 16)


# --- convolutions ---------------------------------------------------------------------------------------------------


def conv(shape: tuple[int, ...], weight: tuple[int, ...], stride: list[int], padding: list[int], groups: int = 1,
         dilation: tuple[int, ...] = (1, 1), name: str = "aten::convolution", transposed: bool = False,
         **more: object) -> Operation:
    return operation(name, [shape, weight, None, None, None, None, None, None, None], "fp32", values=[
        None, None, None, stride, padding, list(dilation), transposed, [0] * len(stride), groups], **more)  # type: ignore


def test_convolution_that_is_not_square() -> None:
    call = only(calls_of(conv((2, 3, 17, 40), (8, 3, 3, 5), [2, 3], [1, 0])))
    sizes = named(call)
    assert (sizes["in_h"], sizes["in_w"], sizes["out_h"], sizes["out_w"]) == (17, 40, 9, 12)
    assert (sizes["kernel_h"], sizes["kernel_w"], sizes["stride_h"], sizes["stride_w"]) == (3, 5, 2, 3)
    assert call.flops == 2 * (2 * 8 * 9 * 12) * 3 * (3 * 5)
    assert call.bytes_read == 4 * (2 * 3 * 17 * 40 + 8 * 3 * 3 * 5)
    assert call.bytes_written == 4 * 2 * 8 * 9 * 12


def test_depthwise_and_grouped_convolutions_divide_their_work() -> None:
    plain = only(calls_of(conv((1, 32, 8, 8), (32, 32, 3, 3), [1, 1], [1, 1])))
    grouped = only(calls_of(conv((1, 32, 8, 8), (32, 8, 3, 3), [1, 1], [1, 1], groups=4)))
    depthwise = only(calls_of(conv((1, 32, 8, 8), (32, 1, 3, 3), [1, 1], [1, 1], groups=32)))
    assert plain.flops == 4 * grouped.flops == 32 * depthwise.flops
    assert depthwise.flops == 2 * 32 * 64 * 9
    assert named(depthwise)["groups"] == named(depthwise)["in_channels"] == 32


def test_dilation_and_three_dimensions() -> None:
    dilated = named(only(calls_of(conv((1, 4, 16, 16), (4, 4, 3, 3), [1, 1], [0, 0], dilation=(3, 2)))))
    assert (dilated["out_h"], dilated["out_w"], dilated["dilation_h"], dilated["dilation_w"]) == (10, 12, 3, 2)
    deep = named(only(calls_of(conv((1, 4, 6, 7, 8), (4, 4, 2, 3, 3), [1, 1, 1], [0, 1, 1], dilation=(1, 1, 1)))))
    assert (deep["out_d"], deep["out_h"], deep["out_w"], deep["kernel_d"]) == (5, 7, 8, 2)
    flat = named(only(calls_of(conv((1, 4, 100), (4, 4, 5), [2], [2], dilation=(1,)))))
    assert (flat["in_h"], flat["in_w"], flat["out_w"], flat["kernel_w"]) == (1, 100, 50, 5)


def test_transposed_convolution_is_the_gradient_of_the_convolution_it_mirrors() -> None:
    up = only(calls_of(conv((2, 16, 7, 9), (16, 8, 4, 4), [2, 2], [1, 1], transposed=True)))
    sizes = named(up)
    assert (up.kind, up.flags) == ("dgrad", ("transposed",))
    assert (sizes["in_channels"], sizes["out_channels"], sizes["in_h"], sizes["in_w"]) == (8, 16, 14, 18)
    assert (sizes["out_h"], sizes["out_w"]) == (7, 9)
    assert up.flops == 2 * (2 * 16 * 7 * 9) * 8 * 16


def test_channels_last_is_another_layout() -> None:
    strides = [(3 * 64, 1, 24, 3), (27, 9, 3, 1)]
    assert only(calls_of(conv((2, 3, 8, 8), (4, 3, 3, 3), [1, 1], [1, 1], strides=strides))).layout == "nhwc"
    assert only(calls_of(conv((2, 3, 8, 8), (4, 3, 3, 3), [1, 1], [1, 1]))).layout == "nchw"


@pytest.mark.parametrize(("mask", "kinds"), [
    ([True, True, False], ["dgrad", "wgrad"]), ([False, True, False], ["wgrad"]),
    ([True, True, True], ["dgrad", "wgrad", "sum"]),
])
def test_convolution_backward_follows_its_mask(mask: list[bool], kinds: list[str]) -> None:
    op = operation("aten::convolution_backward", [(2, 8, 8, 8), (2, 4, 8, 8), (8, 4, 3, 3)] + [None] * 8, "fp32",
                   values=[None, None, None, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask])
    calls = calls_of(op)
    assert [call.kind for call in calls] == kinds
    products = [call for call in calls if call.family is Family.CONV]
    assert {call.flops for call in products} == {2 * (2 * 8 * 64) * 4 * 9}


def test_a_convolution_without_recorded_strides_says_so() -> None:
    op = Operation("aten::cudnn_convolution", tuple(
        [Argument("float", (2, 4, 8, 8)), Argument("float", (8, 4, 3, 3))] + [Argument("GenericList", ())] * 3))
    call = only(calls_of(op))
    assert call.flags == ("assumed",)
    assert (named(call)["out_h"], named(call)["out_w"]) == (8, 8)


# --- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q", "kv", "causal", "window"), [
    (4, 4, False, 0), (4, 4, True, 0), (1, 9, True, 0), (3, 9, True, 0), (6, 6, True, 2), (3, 9, True, 4),
    (5, 5, True, 9), (7, 3, True, 0), (4, 4, False, 2),
])
def test_attended_pairs_by_counting(q: int, kv: int, causal: bool, window: int) -> None:
    def sees(i: int, j: int) -> bool:
        last = kv - q + i
        return not causal or (j <= last and (not window or j > last - window))

    counted = sum(sees(i, j) for i in range(q) for j in range(kv))
    if not causal and window:
        counted = q * min(window, kv)
    assert attended_pairs(q, kv, causal, window) == counted


def sdpa(name: str, *, causal: bool, dtype: str = "bf16", heads: int = 8, kv_heads: int = 8) -> Operation:
    shapes = [(2, heads, 64, 32), (2, kv_heads, 64, 32), (2, kv_heads, 64, 32), None, None]
    return operation(name, shapes, dtype, values=[None, None, None, 0.0, causal])


def test_attention_forward_and_backward() -> None:
    full = only(calls_of(sdpa("aten::_scaled_dot_product_flash_attention", causal=False)))
    assert (full.kind, full.dims, full.flags) == ("flash_forward", (2, 8, 8, 64, 64, 32, 32, 0), ())
    assert full.flops == 4 * 2 * 8 * 64 * 64 * 32
    causal = only(calls_of(sdpa("aten::_scaled_dot_product_flash_attention", causal=True)))
    assert causal.flags == ("causal",)
    assert causal.flops == pytest.approx(full.flops / 2, rel=1 / 64)
    back = only(backward_calls_of(sdpa("aten::_scaled_dot_product_flash_attention", causal=True)))
    assert (back.kind, back.flops) == ("flash_backward", 2.5 * causal.flops)


def test_grouped_queries_read_fewer_keys() -> None:
    many = only(calls_of(sdpa("aten::_scaled_dot_product_flash_attention", causal=False)))
    few = only(calls_of(sdpa("aten::_scaled_dot_product_flash_attention", causal=False, kv_heads=2)))
    assert named(few)["kv_heads"] == 2
    assert few.flops == many.flops
    assert many.bytes_read - few.bytes_read == 2 * 2 * (2 * 6 * 64 * 32)


def test_the_inner_attention_operation_has_heads_after_tokens() -> None:
    outer = sdpa("aten::_scaled_dot_product_flash_attention", causal=True)
    inner = operation("aten::_flash_attention_forward", [(2, 64, 8, 32)] * 3 + [None] * 6, "bf16",
                      values=[None] * 5 + [64, 64, 0.0, True])
    assert calls_of(inner) == calls_of(outer)


def test_attention_of_packed_sequences() -> None:
    op = operation("flash_attn::_flash_attn_varlen_forward", [(300, 8, 64), (300, 2, 64), (300, 2, 64), (4,), (4,)],
                   ["bf16", "bf16", "bf16", "int32", "int32"])
    call = only(calls_of(op))
    assert (call.dims, call.flags) == ((3, 8, 2, 100, 100, 64, 64, 0), ("varlen",))


def test_flash_attention_3_has_windows_and_packed_sequences() -> None:
    """Arguments as a training step's profile on H100 has them."""
    packed, lse, offsets = (16384, 6, 128), (6, 16384), (129,)
    forward = operation(
        "flash_attn_3::fwd", [packed] * 3 + [None] * 4 + [offsets] * 2 + [None] * 18,
        ["bf16"] * 7 + ["int32"] * 20, values=[None] * 12 + [2048, 2048] + [None] * 9 + [0.1, True, 63, 0])
    backward = operation(
        "flash_attn_3::bwd", [packed] * 5 + [lse] + [None] * 3 + [offsets] * 2 + [None] * 8,
        ["bf16"] * 5 + ["fp32"] + ["int32"] * 13, values=[None] * 13 + [2048, 2048, 0.1, True, 63, 0])
    ahead, back = only(calls_of(forward)), only(calls_of(backward))
    assert (ahead.kind, back.kind) == ("flash3_forward", "flash3_backward")
    assert ahead.dims == back.dims == (128, 6, 6, 128, 128, 128, 128, 64) and ahead.flags == ("causal", "varlen")
    pairs = 64 * 65 // 2 + 64 * 64
    assert ahead.flops == 4 * 128 * 6 * pairs * 128 and back.flops == 2.5 * ahead.flops
    dense = operation("flash_attn_3::_flash_attn_forward", [(2, 512, 8, 64)] * 3, "bf16")
    assert only(calls_of(dense)).dims == (2, 8, 8, 512, 512, 64, 64, 0)


def test_the_composite_takes_the_kernel_pytorch_would() -> None:
    name = "aten::scaled_dot_product_attention"
    masked = operation(name, [(2, 8, 64, 32)] * 3 + [(64, 64), None, None], "bf16")
    assert only(calls_of(operation(name, [(2, 8, 64, 32)] * 3, "bf16"))).kind == "flash_forward"
    assert only(calls_of(masked)).kind == "efficient_forward"
    assert only(calls_of(masked)).flags == ("bias",)
    assert only(calls_of(operation(name, [(2, 8, 64, 32)] * 3, "fp32"))).kind == "efficient_forward"


# --- elementwise, reductions, softmax, norms ------------------------------------------------------------------------


def test_a_broadcast_input_counts_once() -> None:
    call = only(calls_of(operation("aten::add", [(64, 1, 32), (16, 32), None], "fp32", values=[None, None, 1])))
    assert (call.dims, call.layout) == ((64 * 16 * 32, 2, 64 * 32 + 16 * 32), "broadcast")
    assert call.bytes_read == 4 * (64 * 32 + 16 * 32)
    assert call.bytes_written == 4 * 64 * 16 * 32
    expanded = operation("aten::mul", [(64, 32), (64, 32)], "fp32", strides=[(32, 1), (0, 1)])
    assert only(calls_of(expanded)).dims == (2048, 2, 2048 + 32)


def test_numbers_neither_count_nor_set_the_type() -> None:
    call = only(calls_of(operation("aten::mul", [(64,), ()], ["bf16", "double"])))
    assert (call.dims, call.dtype, call.bytes_read) == ((64, 1, 64), "bf16", 128)


def test_operands_of_different_types() -> None:
    call = only(calls_of(operation("aten::add", [(64,), (64,)], ["bf16", "fp32"])))
    assert (call.dtype, call.flags, call.bytes_read, call.bytes_written) == ("fp32", ("in_bf16=64",), 64 * 6, 64 * 4)
    less = only(calls_of(operation("aten::lt", [(64,), (64,)], "fp32")))
    assert (less.flags, less.bytes_written) == (("out_bool",), 64)


@pytest.mark.parametrize(("strides", "layout"), [
    ([(32, 1), (32, 1)], ""), ([(1, 64), (1, 64)], ""),
    ([(32, 1), (1, 64)], "strided"), ([(64, 1), (64, 1)], "strided"),
])
def test_layout_of_elementwise_operations(strides: list[tuple[int, int]], layout: str) -> None:
    assert only(calls_of(operation("aten::add", [(64, 32)] * 2, "fp32", strides=strides))).layout == layout


def test_in_place_and_out_variants_are_the_same_work() -> None:
    plain = calls_of(operation("aten::relu", [(64, 32)]))
    assert calls_of(operation("aten::relu_", [(64, 32)])) == plain
    # The profiler lists the output of an out variant among the inputs.
    assert calls_of(operation("aten::gelu", [(64, 32), None, (64, 32)])) == calls_of(
        operation("aten::gelu", [(64, 32)]))


def test_two_dimensional_layer_norm() -> None:
    shapes = [(2048, 125), None, (125,), (125,), None]
    given = only(calls_of(operation("aten::native_layer_norm", shapes, values=[None, [125], None, None, 1e-5])))
    assert (given.kind, given.dims, given.flags) == ("layer_norm", (2048, 125), ("bias", "weight"))
    # Old traces keep no list of numbers: the weight tells the length.
    assert calls_of(operation("aten::native_layer_norm", shapes)) == (given,)
    assert given.bytes_read == 4 * (2048 * 125 + 2 * 125)
    assert given.bytes_written == 4 * (2048 * 125 + 2 * 2048)


def test_layer_norm_over_two_dimensions_and_without_weight() -> None:
    call = only(calls_of(operation("aten::layer_norm", [(8, 4, 6), None, None, None], values=[None, [4, 6]])))
    assert (call.dims, call.flags) == ((8, 24), ())
    back = only(backward_calls_of(operation("aten::layer_norm", [(8, 4, 6), None, (4, 6), (4, 6)],
                                            values=[None, [4, 6], None, None])))
    assert (back.kind, back.dims) == ("layer_norm_backward", (8, 24))


def test_rms_norm_forward_and_backward_agree_on_sizes() -> None:
    forward = operation("aten::_fused_rms_norm", [(4, 64, 128), None, (128,)], "bf16", values=[None, [128], None])
    backward = operation("aten::_fused_rms_norm_backward", [(4, 64, 128), (4, 64, 128), None, (4, 64, 1), (128,)],
                         "bf16", values=[None, None, [128], None, None])
    assert only(calls_of(forward)).dims == (256, 128)
    assert calls_of(backward) == backward_calls_of(forward)


def test_batch_and_group_norm_rows() -> None:
    batch = operation("aten::cudnn_batch_norm", [(8, 16, 5, 7)] + [(16,)] * 4 + [None], values=[None] * 5 + [True])
    assert only(calls_of(batch)).dims == (16, 8 * 5 * 7)
    evaluated = operation("aten::native_batch_norm", [(8, 16, 5, 7)] + [(16,)] * 4 + [None],
                          values=[None] * 5 + [False])
    assert "eval" in only(calls_of(evaluated)).flags
    group = operation("aten::native_group_norm", [(8, 16, 5, 7), (16,), (16,), None, None, None, None],
                      values=[None, None, None, 8, 16, 35, 4])
    assert only(calls_of(group)).dims == (8 * 4, 4 * 35)


def test_gradients_of_elementwise_operations() -> None:
    relu = only(backward_calls_of(operation("aten::relu", [(64, 32)])))
    assert (relu.kind, relu.dims) == ("threshold_backward", (2048, 2, 4096))
    # One without a formula of its own reads the gradient beside its input.
    exp = only(backward_calls_of(operation("aten::exp", [(64, 32)])))
    assert (exp.flags, exp.dims, exp.bytes_read, exp.bytes_written) == (("backward",), (2048, 2, 4096), 16384, 8192)
    # A product has a gradient for each factor, summed where the factor was broadcast.
    kinds = [(call.kind, call.dims) for call in backward_calls_of(operation("aten::mul", [(64, 32), (32,)]))]
    assert kinds == [("mul", (2048, 2, 2080)), ("mul", (2048, 2, 4096)), ("sum", (32, 64, 32))]
    assert [call.kind for call in backward_calls_of(operation("aten::add", [(64, 32), (64, 32)]))] == []
    for name in ("aten::argmax", "aten::fill_", "aten::_foreach_add_", "aten::eq"):
        assert backward_calls_of(operation(name, [(64, 32)])) == ()


def test_reductions_know_where_their_values_lie() -> None:
    def dims(which: list[int] | None) -> tuple[int, ...]:
        return only(calls_of(operation("aten::sum", [(4, 5, 6), None, None], values=[None, which, False]))).dims

    assert dims([2]) == (20, 6, 1)
    assert dims([0]) == (30, 4, 30)
    assert dims([0, 1]) == (6, 20, 6)
    assert dims(None) == (1, 120, 1)
    assert dims([-1]) == dims([2])


def test_softmax_rows_and_their_strides() -> None:
    last = only(calls_of(operation("aten::_softmax", [(8, 4, 16), None, None], "fp16", values=[None, -1, False])))
    first = only(calls_of(operation("aten::_softmax", [(8, 4, 16), None, None], "fp16", values=[None, 0, True])))
    assert (last.kind, last.dims) == ("softmax", (32, 16, 1))
    assert (first.dims, first.flags, first.bytes_written) == ((64, 8, 64), ("out_fp32",), 4 * 512)
    back = only(backward_calls_of(operation("aten::_log_softmax", [(8, 16), None], values=[None, 1])))
    assert (back.kind, back.bytes_read) == ("log_softmax_backward", 2 * 4 * 128)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_copies_casts_and_runs() -> None:
    plain = only(calls_of(operation("aten::copy_", [(8, 16)] * 2)))
    assert (plain.kind, plain.dims, plain.layout) == ("copy", (128, 128), "")
    strided = only(calls_of(operation("aten::copy_", [(8, 16)] * 2, strides=[(16, 1), (32, 1)])))
    assert (strided.dims, strided.layout) == ((128, 16), "strided")
    transposed = only(calls_of(operation("aten::copy_", [(8, 16)] * 2, strides=[(16, 1), (1, 8)])))
    assert transposed.dims == (128, 1)
    both = only(calls_of(operation("aten::copy_", [(8, 16)] * 2, strides=[(1, 8), (1, 8)])))
    assert both.dims == (128, 128)
    cast = only(calls_of(operation("aten::copy_", [(8, 16)] * 2, ["bf16", "fp32"])))
    assert (cast.kind, cast.dtype, cast.flags, cast.bytes_moved) == ("cast", "bf16", ("in_fp32",), 128 * 6)


def test_to_is_free_unless_it_changes_the_type() -> None:
    def to(code: int) -> tuple[OpCall, ...]:
        return calls_of(operation("aten::to", [(8, 16), None], "fp32", values=[None, code]))

    assert to(6) == ()
    assert only(to(15)).kind == "cast"


def test_concatenation() -> None:
    call = only(calls_of(operation("aten::cat", [[(4, 3), (4, 5)], None], "bf16", values=[None, 1])))
    assert (call.family, call.dims, call.dtype) == (Family.CONCAT, (32, 2, 4), "bf16")
    assert call.bytes_moved == 2 * 2 * 32
    stacked = only(calls_of(operation("aten::stack", [[(4, 3), (4, 3)], None], "bf16", values=[None, 0])))
    assert stacked.dims == (24, 2, 12)


def test_embedding_and_bags() -> None:
    table = operation("aten::embedding", [(1000, 64), (8, 16)], ["bf16", "int64"])
    assert only(calls_of(table)).dims == (128, 128, 1000, 64, 1)
    # A dense gradient writes the whole table.
    assert only(backward_calls_of(table)).bytes_written == 2 * 1000 * 64
    bag = operation("aten::_embedding_bag", [(1000, 64), (300,), (33,), None, None, None, None, None],
                    ["fp32", "int64", "int64", "", "", "", "", ""], values=[None] * 7 + [True])
    call = only(calls_of(bag))
    assert (call.kind, call.dims) == ("bag", (300, 32, 1000, 64, 1))
    assert call.flops == 300 * 64


@pytest.mark.parametrize("kind", ["TensorList[bool]", "TensorList"])
def test_a_mask_goes_along_as_many_dimensions_as_it_has(kind: str) -> None:
    """DTensor's embedding zeroes tokens of other ranks: a mask of [2, 4096] on [2, 4096, 64] moves what is there."""
    shapes = [(2, 4096, 64), ((2, 4096),), ()]
    written = only(calls_of(operation("aten::index_put_", [*shapes, None], ["bf16", kind, "bf16", "Scalar"])))
    assert written.dims == (2 * 4096 * 64, 64, 2 * 4096 * 64)
    read = only(calls_of(operation("aten::index", shapes[:2], ["bf16", kind])))
    assert read.dims == (2 * 4096 * 64, 64, 2 * 4096 * 64)
    rows = only(calls_of(operation("aten::index", [(100, 64), ((7,),)], ["bf16", "TensorList[long int]"])))
    assert rows.dims == (7 * 64, 64, 6400)


def test_values_say_which_dimensions_a_list_of_indices_leaves_out() -> None:
    """``x[None, token] += y``: the list has the indices of the second dimension alone."""
    kinds = ["fp32", "TensorList[long int]", "fp32", "Scalar"]
    written = only(calls_of(operation("aten::index_put", [(1, 384, 128), ((48,),), (1, 48, 128), None], kinds)))
    assert written.dims == (48 * 128, 128, 384 * 128)
    same = only(calls_of(operation("aten::index_put", [(384, 128), ((48,),), (), None], kinds)))
    assert same.dims == (48 * 128, 128, 384 * 128)


def test_what_fsdp_copies_is_moved_once_and_waiting_for_a_collective_is_no_work() -> None:
    lists = "TensorList[c10::BFloat16]"
    into = only(calls_of(operation("fsdp::all_gather_copy_in", [((100,), (28,)), (1024,), None, None, None],
                                   [lists, "bf16", "ScalarList", "Scalar", "Scalar"])))
    assert (into.family, into.bytes_read, into.bytes_written) == (Family.CONCAT, 256, 256)
    out = only(calls_of(operation("fsdp::split_with_sizes_copy", [(8, 128), None, None, ((8, 100), (8, 28))],
                                  ["bf16", "ScalarList", "Scalar", lists])))
    assert (out.bytes_read, out.bytes_written) == (2048, 2048)
    reduced = only(calls_of(operation("fsdp::chunk_cat", [((80, 10), (224,)), None, None, (8, 128)],
                                      [lists, "Scalar", "Scalar", "bf16"])))
    assert (reduced.bytes_read, reduced.bytes_written) == (2048, 2048)
    assert calls_of(operation("_c10d_functional::wait_tensor", [(4096,)], "bf16")) == ()


def test_indexing_moves_pieces() -> None:
    call = only(calls_of(operation("aten::index_select", [(100, 64), None, (7,)], ["fp32", "", "int64"],
                                   values=[None, 0, None])))
    assert (call.dims, call.bytes_read) == ((448, 64, 6400), 4 * 448 + 8 * 7)
    added = only(calls_of(operation("aten::index_add_", [(100, 64), None, (7,), (7, 64)],
                                    ["fp32", "", "int32", "fp32"], values=[None, 0, None, None])))
    assert (added.kind, added.dims, added.flags) == ("index_add", (448, 64, 6400), ("index_int32",))


def test_windows_and_regions() -> None:
    windows = only(calls_of(operation("aten::im2col", [(2, 3, 8, 9)], "fp16", values=[
        None, [3, 3], [1, 1], [1, 1], [2, 2]])))
    assert (windows.family, windows.dims) == (Family.INDEX, (2 * 3 * 9 * 4 * 5, 1, 2 * 3 * 8 * 9))
    back = only(calls_of(operation("aten::col2im", [(2, 27, 20)], "fp16", values=[None, [8, 9], [3, 3], [1, 1], [1, 1],
                                                                                 [2, 2]])))
    assert (back.family, back.dims[0]) == (Family.INDEX, 2 * 27 * 20)
    regions = only(calls_of(operation("torchvision::roi_align", [(2, 16, 50, 60), (5, 5)], values=[
        None, None, 0.25, 7, 7, 2, False])))
    assert (regions.family, named(regions)) == (Family.INTERPOLATE, {"channels": 16, "in_size": 980, "out_size": 245})
    spread = only(calls_of(operation("torchvision::_roi_align_backward", [(5, 16, 7, 7), (5, 5)], values=[
        None, None, 0.25, 7, 7, 2, 16, 50, 60, 2, False])))
    assert named(spread) == {"channels": 16, "in_size": 6000, "out_size": 245}


def test_losses_and_cross_entropy() -> None:
    kinds = [call.kind for call in calls_of(operation("aten::cross_entropy_loss", [(256, 2000), (256,)],
                                                      ["fp32", "int64"]))]
    assert kinds == ["log_softmax", "nll_loss"]
    back = [call.kind for call in backward_calls_of(operation("aten::cross_entropy_loss", [(256, 2000), (256,)],
                                                              ["fp32", "int64"]))]
    assert back == ["nll_loss_backward", "log_softmax_backward"]


def test_pooling_and_interpolation_sizes() -> None:
    pool = only(calls_of(operation("aten::max_pool2d_with_indices", [(2, 3, 16, 18), None, None, None], values=[
        None, [3, 3], [2, 2], [1, 1]])))
    assert pool.dims == (6, 16 * 18, 8 * 9, 9)
    up = only(calls_of(operation("aten::upsample_bilinear2d", [(2, 3, 16, 18), None, None], values=[
        None, [32, 36], False])))
    assert (up.kind, up.dims) == ("bilinear", (6, 288, 1152))


def test_recurrent_layers() -> None:
    op = operation("aten::lstm", [(10, 4, 32), [(2, 4, 64), (2, 4, 64)], [(256, 32)]] + [None] * 6,
                   values=[None, None, None, True, 2, 0.0, True, False, False])
    call = only(calls_of(op))
    assert (call.kind, call.dims) == ("lstm", (10, 4, 32, 64, 2, 1))
    assert call.flops == 2 * 10 * 4 * 4 * 64 * ((32 + 64) + (64 + 64))


def test_foreach_and_fused_optimizers() -> None:
    lists = [[(10, 10), (50,)]] * 2
    add = only(calls_of(operation("aten::_foreach_add_", lists, "fp32")))
    assert (add.kind, add.dims, add.bytes_read, add.bytes_written) == ("foreach_add", (2, 150), 1200, 600)
    adam = only(calls_of(operation("aten::_fused_adamw_", [[(10, 10), (50,)]] * 4, "fp32")))
    assert (adam.kind, adam.bytes_read, adam.bytes_written) == ("fused_adamw", 4 * 600, 3 * 600)
    mixed = only(calls_of(operation("aten::_fused_adamw_", [[(100,)]] * 4, ["bf16", "bf16", "fp32", "fp32"])))
    assert mixed.bytes_read == 100 * (2 + 2 + 4 + 4)


def test_generated_kernels_by_their_arguments() -> None:
    call = only(calls_of(operation("triton_poi_fused_add_3", [(8, 16), (16,), (8, 16), None], "bf16",
                                   values=[None, None, None, 128])))
    assert (call.family, call.kind, call.bytes_read, call.bytes_written) == (
        Family.TRITON, "pointwise", 2 * (128 + 16), 2 * 128)


# --- nothing is free or unknown by accident -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["aten::view", "aten::transpose", "aten::empty", "aten::detach", "aten::expand",
                                  "aten::_unsafe_view", "aten::as_strided", "aten::split"])
def test_views_are_free(name: str) -> None:
    assert is_free(name)
    assert calls_of(operation(name, [(8, 16)])) == ()
    assert backward_calls_of(operation(name, [(8, 16)])) == ()


@pytest.mark.parametrize("name", ["aten::mm", "aten::add", "aten::sum", "aten::_softmax", "aten::copy_"])
def test_work_on_nothing_is_free(name: str) -> None:
    assert calls_of(operation(name, [(0, 16), (16, 8) if name == "aten::mm" else (0, 16)])) == ()


def test_an_unknown_operation_is_priced_by_its_bytes() -> None:
    call = only(calls_of(operation("mylib::fused_thing", [(8, 16), (16,), None], "bf16")))
    assert (call.family, call.kind, call.dims) == (Family.OTHER, "mylib::fused_thing", (128, 2, 144))
    assert (call.bytes_read, call.bytes_written) == (2 * 144, 2 * 128)


def test_an_operation_without_sizes_keeps_its_family_and_says_so() -> None:
    call = only(calls_of(Operation("aten::mm")))
    assert (call.family, call.kind, call.flags) == (Family.GEMM, "mm", ("unsized",))
    assert only(calls_of(Operation("mylib::fused_thing"))).flags == ("unsized",)


def test_arguments_that_do_not_fit_are_priced_by_bytes() -> None:
    call = only(calls_of(operation("aten::mm", [(4, 5), (6, 7)])))
    assert (call.family, call.bytes_read) == (Family.OTHER, 4 * (20 + 42))


# --- element types --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "short", "size"), [
    ("float", "fp32", 4), ("c10::BFloat16", "bf16", 2), ("c10::Half", "fp16", 2), ("long int", "int64", 8),
    ("c10::Float8_e4m3fn", "fp8", 1), ("signed char", "int8", 1), ("torch.bfloat16", "bf16", 2), ("bool", "bool", 1),
    ("c10::complex<float>", "complex64", 8), ("double", "fp64", 8),
])
def test_names_of_element_types(name: str, short: str, size: int) -> None:
    assert short_dtype(name) == short
    assert itemsize(short) == size


def test_number_types_are_no_element_types() -> None:
    assert [short_dtype(name) for name in ("Scalar", "Int", "Double", "TensorList", "")] == [""] * 5


def test_promotion_and_scalar_types() -> None:
    assert promoted(["bf16", "fp32"]) == "fp32"
    assert promoted(["bf16", "fp16"]) == "fp32"
    assert promoted(["int64", "bf16"]) == "bf16"
    assert (scalar_type("15"), scalar_type("6"), scalar_type("")) == ("bf16", "fp32", "")


# --- random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "p", "train", "draws"), [
    ("aten::dropout", "0.1", "True", True), ("aten::dropout", "0.", "True", False),
    ("aten::dropout", "0.1", "False", False), ("aten::dropout", "", "", True),
    ("aten::native_dropout", "0.", "True", True)])
def test_dropout_of_nothing_is_free(name: str, p: str, train: str, draws: bool) -> None:
    """The native operator draws its mask at p = 0 too; the other one hands its input back."""
    calls = calls_of(operation(name, [(64, 32), None, None], values=["", p, train]))
    assert [call.dims for call in calls] == [(64 * 32,)] * draws


@pytest.mark.parametrize("name", ["aten::div", "aten::clone"])
def test_a_sparse_tensor_costs_what_it_stores(name: str) -> None:
    number = Argument("Scalar", (), None, "")
    (sparse,) = calls_of(Operation(name, (Argument("float", (100_000, 16), None, "stored=500"), number)))
    (dense,) = calls_of(Operation(name, (Argument("float", (500, 16), None, ""), number)))
    assert sparse.bytes_moved == dense.bytes_moved == 2 * 500 * 16 * 4


def test_sparse_gradients_of_lookups_cost_the_rows_looked_up_whatever_the_table() -> None:
    pytest.importorskip("torch")
    from graph_predictor.synthesis.step import calls_by_operation
    from tracer.shape_only import trace_workload
    from tracer.workloads import configure

    def calls(rows: int) -> dict[str, OpCall]:
        graph = trace_workload(configure("dlrm", preset="tiny", sparse=True, optimizer="sgd", rows=rows), "h100-sxm")
        ops = np.flatnonzero(graph.ops.step == graph.ops.step.max()).tolist()
        found = calls_by_operation(graph, ops)
        return {graph.string(int(graph.ops.name[op])): each[0] for op, each in found.items() if each}

    small, large = calls(100), calls(100_000)
    added = small["aten::add_"]
    assert (added.family, added.kind) == (Family.INDEX, "index_add")
    assert small["aten::_embedding_bag_backward"].kind == "bag_backward_sparse"
    for name in ("aten::add_", "aten::_embedding_bag_backward"):
        assert large[name].bytes_moved == small[name].bytes_moved
