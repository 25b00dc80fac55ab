"""Families of operations: calls, FLOPs and bytes against numbers worked out by hand, and the field's known traps."""

from __future__ import annotations

from typing import Any

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


def expects(**fields: Any) -> dict[str, Any]:
    """Fields of a call, or some of its dimensions by name."""
    return fields


def conv(shape: tuple[int, ...], weight: tuple[int, ...], stride: list[int], padding: list[int], groups: int = 1,
         dilation: tuple[int, ...] = (1, 1), transposed: bool = False, strides: Any = None) -> Operation:
    values = [None, None, None, stride, padding, list(dilation), transposed, [0] * len(stride), groups]
    return operation("aten::convolution", [shape, weight] + [None] * 7, "fp32", strides, values)


FLASH = "aten::_scaled_dot_product_flash_attention"
COMPOSITE = "aten::scaled_dot_product_attention"
LISTS = "TensorList[c10::BFloat16]"


def sdpa(*, causal: bool, kv_heads: int = 8) -> Operation:
    shapes = [(2, 8, 64, 32), (2, kv_heads, 64, 32), (2, kv_heads, 64, 32), None, None]
    return operation(FLASH, shapes, "bf16", values=[None, None, None, 0.0, causal])


CALLS = {
    # Matrix products
    "linear without bias": (
        operation("aten::linear", [(4, 8, 16), (32, 16), None], "bf16"),
        expects(family=Family.GEMM, dims=(1, 32, 32, 16), dtype="bf16", layout="nt", flags=(), flops=2 * 32 * 32 * 16,
                bytes_read=2 * (32 * 16 + 32 * 16), bytes_written=2 * 32 * 32)),
    "batched": (
        operation("aten::bmm", [(5, 32, 16), (5, 16, 8)], "fp32"),
        expects(kind="bmm", dims=(5, 32, 8, 16), flops=2 * 5 * 32 * 8 * 16)),
    "accumulated": (
        operation("aten::baddbmm", [(5, 32, 8), (5, 32, 16), (5, 16, 8)], "fp32"),
        expects(flags=("accumulate",), bytes_read=4 * 5 * (32 * 16 + 16 * 8 + 32 * 8))),
    "an operand shared by a batch is read once": (
        operation("aten::bmm", [(5, 32, 16), (5, 16, 8)], "fp32", strides=[(512, 16, 1), (0, 8, 1)]),
        expects(flags=("shared_b",), bytes_read=4 * (5 * 32 * 16 + 16 * 8))),
    "scaled": (
        operation("aten::_scaled_mm", [(64, 32), (32, 48), (), (), None, None, None],
                  ["c10::Float8_e4m3fn", "c10::Float8_e4m3fn", "float", "float", "", "", ""],
                  strides=[(32, 1), (1, 32), (), (), None, None, None], values=[None] * 6 + [15]),
        expects(dtype="fp8", layout="nt", dims=(1, 64, 48, 32), flags=("out_bf16",), bytes_read=64 * 32 + 32 * 48,
                bytes_written=2 * 64 * 48)),
    "leading dimensions are folded": (
        operation("aten::matmul", [(3, 5, 16), (16, 8)], "fp32"), expects(dims=(1, 15, 8, 16))),
    "grouped products have mean heights": (
        operation("aten::_grouped_mm", [(96, 16), (4, 16, 8), (4,)], ["bf16", "bf16", "int32"]),
        expects(kind="grouped", dims=(4, 24, 8, 16), flops=2 * 96 * 8 * 16)),

    "linear with bias": (
        operation("aten::linear", [(32, 16), (8, 16), (8,)], "fp32"),
        expects(flags=("bias",), flops=2 * 32 * 8 * 16 + 32 * 8, bytes_read=4 * (32 * 16 + 8 * 16 + 8))),

    "grouped over the contraction": (
        operation("aten::_grouped_mm", [(96, 16), (16, 8), (4,)], ["bf16", "bf16", "int32"]),
        expects(dims=(4, 96, 8, 4))),

    # Convolutions
    "not square": (
        conv((2, 3, 17, 40), (8, 3, 3, 5), [2, 3], [1, 0]),
        expects(in_h=17, in_w=40, out_h=9, out_w=12, kernel_h=3, kernel_w=5, stride_h=2, stride_w=3, layout="nchw",
                flops=2 * (2 * 8 * 9 * 12) * 3 * (3 * 5), bytes_written=4 * 2 * 8 * 9 * 12,
                bytes_read=4 * (2 * 3 * 17 * 40 + 8 * 3 * 3 * 5))),
    "in groups": (
        conv((1, 32, 8, 8), (32, 8, 3, 3), [1, 1], [1, 1], groups=4), expects(flops=2 * 32 * 64 * 8 * 9)),
    "depthwise": (
        conv((1, 32, 8, 8), (32, 1, 3, 3), [1, 1], [1, 1], groups=32),
        expects(flops=2 * 32 * 64 * 9, groups=32, in_channels=32)),
    "dilated": (
        conv((1, 4, 16, 16), (4, 4, 3, 3), [1, 1], [0, 0], dilation=(3, 2)),
        expects(out_h=10, out_w=12, dilation_h=3, dilation_w=2)),
    "of three dimensions": (
        conv((1, 4, 6, 7, 8), (4, 4, 2, 3, 3), [1, 1, 1], [0, 1, 1], dilation=(1, 1, 1)),
        expects(out_d=5, out_h=7, out_w=8, kernel_d=2)),
    "of one dimension": (
        conv((1, 4, 100), (4, 4, 5), [2], [2], dilation=(1,)), expects(in_h=1, in_w=100, out_w=50, kernel_w=5)),
    "transposed, it is the gradient of the one it mirrors": (
        conv((2, 16, 7, 9), (16, 8, 4, 4), [2, 2], [1, 1], transposed=True),
        expects(kind="dgrad", flags=("transposed",), in_channels=8, out_channels=16, in_h=14, in_w=18, out_h=7,
                out_w=9, flops=2 * (2 * 16 * 7 * 9) * 8 * 16)),
    "channels last": (
        conv((2, 3, 8, 8), (4, 3, 3, 3), [1, 1], [1, 1], strides=[(3 * 64, 1, 24, 3), (27, 9, 3, 1)]),
        expects(layout="nhwc")),
    "without recorded strides": (
        Operation("aten::cudnn_convolution", (Argument("float", (2, 4, 8, 8)), Argument("float", (8, 4, 3, 3)),
                                              *[Argument("GenericList", ())] * 3)),
        expects(flags=("assumed",), out_h=8, out_w=8)),

    # Attention
    "all attended": (
        sdpa(causal=False), expects(kind="flash_forward", dims=(2, 8, 8, 64, 64, 32, 32, 0), flags=(),
                                    flops=4 * 2 * 8 * 64 * 64 * 32, bytes_read=2 * 3 * (2 * 8 * 64 * 32))),
    "causal": (
        sdpa(causal=True), expects(flags=("causal",), flops=4 * 2 * 8 * (64 * 65 // 2) * 32)),
    "grouped queries read fewer keys": (
        sdpa(causal=False, kv_heads=2), expects(kv_heads=2, bytes_read=2 * (8 + 2 + 2) * (2 * 64 * 32))),
    "packed sequences": (
        operation("flash_attn::_flash_attn_varlen_forward", [(300, 8, 64), (300, 2, 64), (300, 2, 64), (4,), (4,)],
                  ["bf16", "bf16", "bf16", "int32", "int32"]),
        expects(dims=(3, 8, 2, 100, 100, 64, 64, 0), flags=("varlen",))),
    "the composite takes the kernel PyTorch would": (
        operation(COMPOSITE, [(2, 8, 64, 32)] * 3, "bf16"), expects(kind="flash_forward")),
    "of fp32": (
        operation(COMPOSITE, [(2, 8, 64, 32)] * 3, "fp32"), expects(kind="efficient_forward")),
    "with a mask": (
        operation(COMPOSITE, [(2, 8, 64, 32)] * 3 + [(64, 64), None, None], "bf16"),
        expects(kind="efficient_forward", flags=("bias",))),

    # Elementwise, reductions, softmax, norms
    "a broadcast input counts once": (
        operation("aten::add", [(64, 1, 32), (16, 32), None], "fp32", values=[None, None, 1]),
        expects(dims=(64 * 16 * 32, 2, 64 * 32 + 16 * 32), layout="broadcast",
                bytes_read=4 * (64 * 32 + 16 * 32), bytes_written=4 * 64 * 16 * 32)),
    "an expanded one too": (
        operation("aten::mul", [(64, 32), (64, 32)], strides=[(32, 1), (0, 1)]), expects(dims=(2048, 2, 2048 + 32))),
    "numbers neither count nor set the type": (
        operation("aten::mul", [(64,), ()], ["bf16", "double"]),
        expects(dims=(64, 1, 64), dtype="bf16", bytes_read=128)),
    "operands of different types": (
        operation("aten::add", [(64,), (64,)], ["bf16", "fp32"]),
        expects(dtype="fp32", flags=("in_bf16=64",), bytes_read=64 * 6, bytes_written=64 * 4)),
    "comparisons": (
        operation("aten::lt", [(64,), (64,)], "fp32"), expects(flags=("out_bool",), bytes_written=64)),
    "layer norm": (
        operation("aten::native_layer_norm", [(2048, 125), None, (125,), (125,), None],
                  values=[None, [125], None, None, 1e-5]),
        expects(kind="layer_norm", dims=(2048, 125), flags=("bias", "weight"), bytes_read=4 * (2048 * 125 + 2 * 125),
                bytes_written=4 * (2048 * 125 + 2 * 2048))),
    "RMS norm": (
        operation("aten::_fused_rms_norm", [(4, 64, 128), None, (128,)], "bf16", values=[None, [128], None]),
        expects(dims=(256, 128))),
    "batch norm": (
        operation("aten::cudnn_batch_norm", [(8, 16, 5, 7)] + [(16,)] * 4 + [None], values=[None] * 5 + [True]),
        expects(dims=(16, 8 * 5 * 7), flags=("bias", "weight"))),
    "batch norm evaluated": (
        operation("aten::native_batch_norm", [(8, 16, 5, 7)] + [(16,)] * 4 + [None], values=[None] * 5 + [False]),
        expects(flags=("bias", "eval", "weight"))),
    "group norm": (
        operation("aten::native_group_norm", [(8, 16, 5, 7), (16,), (16,)] + [None] * 4,
                  values=[None, None, None, 8, 16, 35, 4]),
        expects(dims=(8 * 4, 4 * 35))),
    "softmax": (
        operation("aten::_softmax", [(8, 4, 16), None, None], "fp16", values=[None, -1, False]),
        expects(kind="softmax", dims=(32, 16, 1))),
    "softmax over the first dimension": (
        operation("aten::_softmax", [(8, 4, 16), None, None], "fp16", values=[None, 0, True]),
        expects(dims=(64, 8, 64), flags=("out_fp32",), bytes_written=4 * 512)),

    # Memory
    "copied": (
        operation("aten::copy_", [(8, 16)] * 2), expects(kind="copy", dims=(128, 128), layout="")),
    "copied from rows apart": (
        operation("aten::copy_", [(8, 16)] * 2, strides=[(16, 1), (32, 1)]),
        expects(dims=(128, 16), layout="strided")),
    "transposed": (
        operation("aten::copy_", [(8, 16)] * 2, strides=[(16, 1), (1, 8)]), expects(dims=(128, 1))),
    "cast": (
        operation("aten::copy_", [(8, 16)] * 2, ["bf16", "fp32"]),
        expects(kind="cast", dtype="bf16", flags=("in_fp32",), bytes_moved=128 * 6)),
    "cast by to": (
        operation("aten::to", [(8, 16), None], "fp32", values=[None, 15]), expects(kind="cast")),
    "concatenated": (
        operation("aten::cat", [[(4, 3), (4, 5)], None], "bf16", values=[None, 1]),
        expects(family=Family.CONCAT, dims=(32, 2, 4), dtype="bf16", bytes_moved=2 * 2 * 32)),
    "stacked": (
        operation("aten::stack", [[(4, 3), (4, 3)], None], "bf16", values=[None, 0]), expects(dims=(24, 2, 12))),
    "median along": (
        operation("aten::median", [(32, 64), None, None], "bf16", values=[None, 1, 0]),
        expects(kind="median", dims=(32, 64, 1), bytes_written=32 * (2 + 8))),
    "layer without a batch": (
        operation("aten::mkldnn_rnn_layer", [(20, 24), (160, 24), (160, 40), (160,), (160,), (32, 40), (32, 40)]),
        expects(family=Family.OTHER)),
    "stacked inside": (
        operation("aten::stack", [[(4, 3), (4, 3)], None], "bf16", values=[None, 1]), expects(dims=(24, 2, 3))),
    "stacked last": (
        operation("aten::stack", [[(4, 3), (4, 3)], None], "bf16", values=[None, -1]), expects(dims=(24, 2, 1))),
    "side by side": (
        operation("aten::hstack", [[(4, 3), (4, 3)]], "bf16", values=[None]), expects(dims=(24, 2, 3))),
    "looked up": (
        operation("aten::embedding", [(1000, 64), (8, 16)], ["bf16", "int64"]),
        expects(dims=(128, 128, 1000, 64, 1))),
    "a bag": (
        operation("aten::_embedding_bag", [(1000, 64), (300,), (33,)] + [None] * 5,
                  ["fp32", "int64", "int64"] + [""] * 5, values=[None] * 7 + [True]),
        expects(kind="bag", dims=(300, 32, 1000, 64, 1), flops=300 * 64)),
    "selected": (
        operation("aten::index_select", [(100, 64), None, (7,)], ["fp32", "", "int64"], values=[None, 0, None]),
        expects(dims=(448, 64, 6400), bytes_read=4 * 448 + 8 * 7)),
    "added at indices": (
        operation("aten::index_add_", [(100, 64), None, (7,), (7, 64)], ["fp32", "", "int32", "fp32"],
                  values=[None, 0, None, None]),
        expects(kind="index_add", dims=(448, 64, 6400), flags=("index_int32",))),
    # DTensor's embedding zeroes tokens of other ranks: a mask of [2, 4096] on [2, 4096, 64] moves what is there.
    "a mask goes along as many dimensions as it has": (
        operation("aten::index_put_", [(2, 4096, 64), ((2, 4096),), (), None],
                  ["bf16", "TensorList[bool]", "bf16", "Scalar"]),
        expects(dims=(2 * 4096 * 64, 64, 2 * 4096 * 64))),
    "rows by their numbers": (
        operation("aten::index", [(100, 64), ((7,),)], ["bf16", "TensorList[long int]"]),
        expects(dims=(7 * 64, 64, 6400))),
    # x[None, token] += y: the list has the indices of the second dimension alone.
    "values say which dimensions a list leaves out": (
        operation("aten::index_put", [(1, 384, 128), ((48,),), (1, 48, 128), None],
                  ["fp32", "TensorList[long int]", "fp32", "Scalar"]),
        expects(dims=(48 * 128, 128, 384 * 128))),
    "gathered by FSDP": (
        operation("fsdp::all_gather_copy_in", [((100,), (28,)), (1024,), None, None, None],
                  [LISTS, "bf16", "ScalarList", "Scalar", "Scalar"]),
        expects(family=Family.CONCAT, bytes_read=256, bytes_written=256)),
    "split by FSDP": (
        operation("fsdp::split_with_sizes_copy", [(8, 128), None, None, ((8, 100), (8, 28))],
                  ["bf16", "ScalarList", "Scalar", LISTS]),
        expects(bytes_read=2048, bytes_written=2048)),
    "reduced by FSDP": (
        operation("fsdp::chunk_cat", [((80, 10), (224,)), None, None, (8, 128)], [LISTS, "Scalar", "Scalar", "bf16"]),
        expects(bytes_read=2048, bytes_written=2048)),
    "windows": (
        operation("aten::im2col", [(2, 3, 8, 9)], "fp16", values=[None, [3, 3], [1, 1], [1, 1], [2, 2]]),
        expects(family=Family.INDEX, dims=(2 * 3 * 9 * 4 * 5, 1, 2 * 3 * 8 * 9))),
    "regions": (
        operation("torchvision::roi_align", [(2, 16, 50, 60), (5, 5)], values=[None, None, 0.25, 7, 7, 2, False]),
        expects(family=Family.INTERPOLATE, dims=(16, 980, 245))),
    "regions spread": (
        operation("torchvision::_roi_align_backward", [(5, 16, 7, 7), (5, 5)],
                  values=[None, None, 0.25, 7, 7, 2, 16, 50, 60, 2, False]),
        expects(dims=(16, 6000, 245))),
    "pooled": (
        operation("aten::max_pool2d_with_indices", [(2, 3, 16, 18), None, None, None],
                  values=[None, [3, 3], [2, 2], [1, 1]]),
        expects(dims=(6, 16 * 18, 8 * 9, 9))),
    "recurrent": (
        operation("aten::lstm", [(10, 4, 32), [(2, 4, 64), (2, 4, 64)], [(256, 32)]] + [None] * 6,
                  values=[None, None, None, True, 2, 0.0, True, False, False]),
        expects(kind="lstm", dims=(10, 4, 32, 64, 2, 1), flops=2 * 10 * 4 * 4 * 64 * ((32 + 64) + (64 + 64)))),
    "an optimizer of mixed types": (
        operation("aten::_fused_adamw_", [[(100,)]] * 4, ["bf16", "bf16", "fp32", "fp32"]),
        expects(bytes_read=100 * (2 + 2 + 4 + 4))),
    "generated": (
        operation("triton_poi_fused_add_3", [(8, 16), (16,), (8, 16), None], "bf16", values=[None, None, None, 128]),
        expects(family=Family.TRITON, kind="pointwise", bytes_read=2 * (128 + 16), bytes_written=2 * 128)),

    # Nothing is free or unknown by accident
    "unknown, by its bytes": (
        operation("mylib::fused_thing", [(8, 16), (16,), None], "bf16"),
        expects(family=Family.OTHER, kind="mylib::fused_thing", dims=(128, 2, 144), bytes_read=2 * 144,
                bytes_written=2 * 128)),
    "without sizes": (
        Operation("aten::mm"), expects(family=Family.GEMM, kind="mm", flags=("unsized",))),
    "unknown without sizes": (
        Operation("mylib::fused_thing"), expects(flags=("unsized",))),
    "attention of other ranks": (
        operation("vllm::unified_attention", [(32, 64, 128, 2), (32, 8, 128), (32, 8, 128)], "bf16"),
        expects(family=Family.OTHER)),
    "a single sequence of other ranks": (
        operation("flashinfer::single_decode_with_kv_cache", [(8, 64), (8, 64), (8, 64)], "bf16"),
        expects(family=Family.OTHER)),
    "arguments that do not fit, by their bytes": (
        operation("aten::mm", [(4, 5), (6, 7)]), expects(family=Family.OTHER, bytes_read=4 * (20 + 42))),
}


@pytest.mark.parametrize("case", CALLS)
def test_an_operation_is_the_call_that_was_worked_out_by_hand(case: str) -> None:
    op, wanted = CALLS[case]
    call = only(calls_of(op))
    sizes = named(call)
    assert {name: sizes[name] if name in sizes else getattr(call, name) for name in wanted} == wanted


LINEAR = operation("aten::linear", [(32, 16), (8, 16), (8,)], "bf16")
ADDMM = operation("aten::addmm", [(8,), (32, 16), (16, 8)], "bf16", strides=[(1,), (16, 1), (1, 16)])
EQUAL = {
    "a linear layer and its product": (LINEAR, ADDMM),
    "nothing is accumulated times zero": (
        operation("aten::baddbmm", [(5, 32, 8), (5, 32, 16), (5, 16, 8), None], values=[None, None, None, 0]),
        operation("aten::bmm", [(5, 32, 16), (5, 16, 8)])),
    "heads after tokens in the inner attention": (
        operation("aten::_flash_attention_forward", [(2, 64, 8, 32)] * 3 + [None] * 6, "bf16",
                  values=[None] * 5 + [64, 64, 0.0, True]), sdpa(causal=True)),
    "in place": (operation("aten::relu_", [(64, 32)]), operation("aten::relu", [(64, 32)])),
    # The profiler lists the output of an out variant among the inputs.
    "into an output": (
        operation("aten::gelu", [(64, 32), None, (64, 32)]), operation("aten::gelu", [(64, 32)])),
    # Old traces keep no list of numbers: the weight tells the length.
    "layer norm without its numbers": (
        operation("aten::native_layer_norm", [(8, 125), None, (125,), (125,), None]),
        operation("aten::native_layer_norm", [(8, 125), None, (125,), (125,), None], values=[None, [125]])),
}


@pytest.mark.parametrize("case", EQUAL)
def test_operations_of_the_same_work_are_the_same_call(case: str) -> None:
    one, other = EQUAL[case]
    assert calls_of(one) == calls_of(other) != ()


@pytest.mark.parametrize(("a", "b", "layout"), [
    ((16, 1), (8, 1), "nn"), ((16, 1), (1, 16), "nt"), ((1, 32), (8, 1), "tn"), ((1, 32), (1, 16), "tt"),
    ((32, 1), (8, 1), "nn"),  # rows further apart than they are long
    ((32, 2), (8, 1), "nn"),  # no layout of a library: copied first
])
def test_layouts_of_products(a: tuple[int, int], b: tuple[int, int], layout: str) -> None:
    call = only(calls_of(operation("aten::mm", [(32, 16), (16, 8)], "fp16", strides=[a, b])))
    assert call.layout == layout


def test_linear_backward_is_two_products_and_the_sum_of_the_bias() -> None:
    dgrad, wgrad, bias = backward_calls_of(LINEAR)
    assert (dgrad.dims, dgrad.layout) == ((1, 32, 16, 8), "nn")
    assert (wgrad.dims, wgrad.layout) == ((1, 8, 16, 32), "tn")
    assert (bias.family, bias.kind, bias.dims) == (Family.REDUCTION, "sum", (8, 32, 8))
    assert dgrad.flops == wgrad.flops == 2 * 32 * 16 * 8
    assert len(backward_calls_of(operation("aten::linear", [(32, 16), (8, 16), None], "bf16"))) == 2
    assert backward_calls_of(ADDMM) == (dgrad, wgrad, bias)


def test_tf32_is_the_callers_word_and_only_for_fp32() -> None:
    for dtype, computed in (("fp32", "tf32"), ("bf16", "bf16")):
        assert only(calls_of(operation("aten::mm", [(4, 4), (4, 4)], dtype), tf32=True)).dtype == computed


@pytest.mark.parametrize(("mask", "kinds"), [
    ([False, True, False], ["wgrad"]), ([True, True, True], ["dgrad", "wgrad", "sum"])])
def test_convolution_backward_follows_its_mask(mask: list[bool], kinds: list[str]) -> None:
    op = operation("aten::convolution_backward", [(2, 8, 8, 8), (2, 4, 8, 8), (8, 4, 3, 3)] + [None] * 8, "fp32",
                   values=[None, None, None, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask])
    calls = calls_of(op)
    assert [call.kind for call in calls] == kinds
    assert {call.flops for call in calls if call.family is Family.CONV} == {2 * (2 * 8 * 64) * 4 * 9}


@pytest.mark.parametrize(("q", "kv", "causal", "window"), [
    (4, 4, False, 0), (1, 9, True, 0), (3, 9, True, 0), (6, 6, True, 2), (3, 9, True, 4), (5, 5, True, 9),
    (7, 3, True, 0), (4, 4, False, 2),
])
def test_attended_pairs_by_counting(q: int, kv: int, causal: bool, window: int) -> None:
    def sees(i: int, j: int) -> bool:
        last = kv - q + i
        return not causal or (j <= last and (not window or j > last - window))

    counted = sum(sees(i, j) for i in range(q) for j in range(kv))
    if not causal and window:
        counted = q * min(window, kv)
    assert attended_pairs(q, kv, causal, window) == counted


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


@pytest.mark.parametrize(("strides", "layout"), [
    ([(32, 1), (32, 1)], ""), ([(1, 64), (1, 64)], ""), ([(32, 1), (1, 64)], "strided"),
    ([(64, 1), (64, 1)], "strided"),
])
def test_layout_of_elementwise_operations(strides: list[tuple[int, int]], layout: str) -> None:
    assert only(calls_of(operation("aten::add", [(64, 32)] * 2, "fp32", strides=strides))).layout == layout


GRADIENTS = {
    "attention": (sdpa(causal=True), [("flash_backward", (2, 8, 8, 64, 64, 32, 32, 0))]),
    "layer norm": (operation("aten::layer_norm", [(8, 4, 6), None, (4, 6), (4, 6)], values=[None, [4, 6]]),
                   [("layer_norm_backward", (8, 24))]),
    "log-softmax": (operation("aten::_log_softmax", [(8, 16), None], values=[None, 1]),
                    [("log_softmax_backward", (8, 16, 1))]),
    "relu": (operation("aten::relu", [(64, 32)]), [("threshold_backward", (2048, 2, 4096))]),
    # One without a formula of its own reads the gradient beside its input.
    "exp": (operation("aten::exp", [(64, 32)]), [("exp", (2048, 2, 4096))]),
    # A product has a gradient for each factor, summed where the factor was broadcast.
    "a product": (operation("aten::mul", [(64, 32), (32,)]),
                  [("mul", (2048, 2, 2080)), ("mul", (2048, 2, 4096)), ("sum", (32, 64, 32))]),
    "cross-entropy": (operation("aten::cross_entropy_loss", [(256, 2000), (256,)], ["fp32", "int64"]),
                      [("nll_loss_backward", (256, 2000)), ("log_softmax_backward", (256, 2000, 1))]),
    "a sum": (operation("aten::add", [(64, 32), (64, 32)]), []),
    "no gradient": (operation("aten::argmax", [(64, 32)]), []),
    "an optimizer's": (operation("aten::_foreach_add_", [(64, 32)]), []),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_are_calls_of_their_own(case: str) -> None:
    op, wanted = GRADIENTS[case]
    assert [(call.kind, call.dims) for call in backward_calls_of(op)] == wanted


def test_gradients_move_what_the_forward_kept() -> None:
    def back(case: str) -> OpCall:
        return only(backward_calls_of(GRADIENTS[case][0]))

    assert back("attention").flops == 2.5 * only(calls_of(sdpa(causal=True))).flops
    assert (back("exp").flags, back("exp").bytes_read, back("exp").bytes_written) == (("backward",), 16384, 8192)
    assert back("log-softmax").bytes_read == 2 * 4 * 128
    # A dense gradient writes the whole table.
    assert only(backward_calls_of(CALLS["looked up"][0])).bytes_written == 2 * 1000 * 64
    backward = operation("aten::_fused_rms_norm_backward", [(4, 64, 128), (4, 64, 128), None, (4, 64, 1), (128,)],
                         "bf16", values=[None, None, [128], None, None])
    assert calls_of(backward) == backward_calls_of(CALLS["RMS norm"][0])
    assert [call.kind for call in calls_of(GRADIENTS["cross-entropy"][0])] == ["log_softmax", "nll_loss"]


@pytest.mark.parametrize(("which", "dims"), [
    ([2], (20, 6, 1)), ([-1], (20, 6, 1)), ([0], (30, 4, 30)), ([0, 1], (6, 20, 6)), (None, (1, 120, 1))])
def test_reductions_know_where_their_values_lie(which: list[int] | None, dims: tuple[int, ...]) -> None:
    assert only(calls_of(operation("aten::sum", [(4, 5, 6), None, None], values=[None, which, False]))).dims == dims


@pytest.mark.parametrize("name", ["aten::view", "aten::empty", "aten::detach", "aten::_unsafe_view", "aten::split"])
def test_views_are_free(name: str) -> None:
    assert is_free(name)
    assert calls_of(operation(name, [(8, 16)])) == backward_calls_of(operation(name, [(8, 16)])) == ()


@pytest.mark.parametrize("op", [
    operation("aten::mm", [(0, 16), (16, 8)]), operation("aten::add", [(0, 16)] * 2),
    operation("aten::sum", [(0, 16)] * 2), operation("aten::copy_", [(0, 16)] * 2),
    operation("aten::_softmax", [(0, 16), None, None], values=[None, -1, False]),
    operation("_c10d_functional::wait_tensor", [(4096,)], "bf16"),  # waits for a collective
    operation("aten::to", [(8, 16), None], "fp32", values=[None, 6])])  # the type that it has
def test_work_on_nothing_is_free(op: Operation) -> None:
    assert calls_of(op) == ()


@pytest.mark.parametrize(("name", "short", "size"), [
    ("float", "fp32", 4), ("c10::BFloat16", "bf16", 2), ("c10::Half", "fp16", 2), ("long int", "int64", 8),
    ("c10::Float8_e4m3fn", "fp8", 1), ("signed char", "int8", 1), ("torch.bfloat16", "bf16", 2), ("bool", "bool", 1),
    ("c10::complex<float>", "complex64", 8), ("double", "fp64", 8),
])
def test_names_of_element_types(name: str, short: str, size: int) -> None:
    assert short_dtype(name) == short
    assert itemsize(short) == size


def test_number_types_are_no_element_types_and_types_are_promoted() -> None:
    assert [short_dtype(name) for name in ("Scalar", "Int", "Double", "TensorList", "")] == [""] * 5
    assert [promoted(["bf16", "fp32"]), promoted(["bf16", "fp16"]), promoted(["int64", "bf16"])] == [
        "fp32", "fp32", "bf16"]
    assert (scalar_type("15"), scalar_type("6"), scalar_type("")) == ("bf16", "fp32", "")


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
