"""What a compiler generates of a step's operations: bytes known on paper, and its choice of layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from graph_predictor.edits.generated_kernels import channels_last, generated_kernels
from graph_predictor.prediction.scenario import WorkUnits
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import calls_of, operation
from tracer.graph import Phase

IMAGES, CHANNELS, SIDE = 64, 128, 28
N = IMAGES * CHANNELS * SIDE * SIDE
IMAGE = (IMAGES, CHANNELS, SIDE, SIDE)
TOKENS, WIDTH = (64, 197, 384), 384
T = 64 * 197 * 384


def units_of(calls: list[tuple[OpCall, ...]], phase: Phase = Phase.FORWARD) -> WorkUnits:
    """Work that follows one after another on one stream."""
    n = len(calls)
    one, none = np.ones(n, np.int64), np.zeros(n, np.int64)
    return WorkUnits(none, none, np.arange(n), np.arange(n), np.full(n, int(phase)), none, np.arange(n), one,
                 np.ones(n, np.bool_), np.zeros(n, np.bool_), calls, np.ones(n, np.bool_), False)


def conv(bias: bool = False, groups: int = 1, inputs: int = CHANNELS, outputs: int = CHANNELS) -> tuple[OpCall, ...]:
    """A 3×3 convolution in fp16."""
    shape = (IMAGES, inputs, SIDE, SIDE)
    return calls_of(operation(
        "aten::convolution", [shape, (outputs, inputs // groups, 3, 3), (outputs,) if bias else None, *[None] * 6],
        "fp16", values=["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", str(groups)]))


def simple(name: str, *shapes: tuple[int, ...], dtypes: str | list[str] = "fp16") -> tuple[OpCall, ...]:
    return calls_of(operation(name, list(shapes), dtypes))


def batch_norm() -> tuple[OpCall, ...]:
    """Batch norm with given statistics."""
    return calls_of(operation("aten::native_batch_norm", [IMAGE, *[(CHANNELS,)] * 4, None, None, None],
                              ["fp16", *["fp32"] * 4, "", "", ""], values=["", "", "", "", "", "False", "0.1", "1e-5"]))


def norm() -> tuple[OpCall, ...]:
    return calls_of(operation("aten::native_layer_norm", [TOKENS, None, (WIDTH,), (WIDTH,), None],
                              "fp32", values=["", f"[{WIDTH}]", "", "", "1e-5"]))


def cast(shape: tuple[int, ...] = TOKENS) -> tuple[OpCall, ...]:
    return calls_of(operation("aten::_to_copy", [shape, None], "fp32", values=["", "5"]))


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> tuple[OpCall, ...]:
    rows = 64 * 197
    return calls_of(operation("aten::addmm", [(outputs,), (rows, inputs), (inputs, outputs)], "fp16"))


def residual() -> tuple[OpCall, ...]:
    """fp32 + fp16."""
    return simple("aten::add", TOKENS, TOKENS, dtypes=["fp32", "fp16"])


def kernels(calls: list[tuple[OpCall, ...]]) -> dict[tuple[int, ...], tuple[OpCall, ...]]:
    return {tuple(one.units.tolist()): one.calls for one in generated_kernels(units_of(calls))}


def test_what_lies_between_two_convolutions_is_one_kernel_that_adds_the_bias_too() -> None:
    found = kernels([conv(bias=True), batch_norm(), simple("aten::relu_", IMAGE), conv()])
    (fused,) = found[1, 2]
    assert (fused.family, fused.bytes_written) == (Family.ELEMENTWISE, 2 * N)
    assert fused.bytes_read == pytest.approx(2 * N, rel=0.001)
    (first,) = found[0,]
    assert (first.layout, first.flags, found[3,][0].layout) == ("nhwc", (), "nhwc")
    product, added = kernels([conv(bias=True), conv()])[0,]  # nothing takes the bias up
    assert (product.flags, added.bytes_read, added.bytes_written) == ((), 2 * N, 2 * N)


def test_a_residual_and_its_norm_are_one_kernel_that_writes_both() -> None:
    found = kernels([linear(), residual(), norm(), cast(), linear(), residual(), norm(), cast(), linear()])
    (fused,) = found[1, 2, 3]
    # fp16 of the product and the fp32 stream; the sum, which the next block adds to, and the normalised values.
    assert fused.bytes_read == pytest.approx((2 + 4) * T, rel=0.001)
    assert fused.bytes_written == (4 + 2) * T
    # Nobody reads the last sum again.
    assert found[5, 6, 7][0].bytes_written == 2 * T


def test_a_shortcut_is_read_once_more_and_was_written_already() -> None:
    block = [conv(), batch_norm(), simple("aten::add_", IMAGE, IMAGE), simple("aten::relu_", IMAGE)]
    found = kernels([*block, *block, conv()])
    (fused,) = found[5, 6, 7]
    assert fused.bytes_read == pytest.approx(2 * 2 * N, rel=0.001)
    assert found[1, 2, 3][0].bytes_written == fused.bytes_written == 2 * N


def test_a_gate_reads_again_what_its_mean_was_taken_of() -> None:
    mean = calls_of(operation("aten::mean", [IMAGE, None, None], "fp16", values=["", "[2, 3]", "True"]))
    gated = simple("aten::mul", IMAGE, (IMAGES, CHANNELS, 1, 1))
    found = kernels([conv(), simple("aten::silu_", IMAGE), mean, linear(), gated, conv()])
    (fused,) = found[1, 2]
    assert fused.bytes_read == pytest.approx(2 * N, rel=0.001)
    assert fused.bytes_written == pytest.approx(2 * N, rel=0.002)  # and the means
    assert (4,) not in found  # one operation alone is as before


def test_tensors_are_put_together_by_what_makes_them() -> None:
    half = (IMAGES, CHANNELS // 2, SIDE, SIDE)
    cat, made, narrow = calls_of(operation("aten::cat", [[half, half]], "fp16")), simple("aten::relu", half), conv(
        outputs=CHANNELS // 2)
    found = kernels([narrow, made, narrow, made, cat, conv()])
    assert found[1, 3, 4][0].bytes_moved == pytest.approx(2 * 2 * N)
    # What products wrote is copied, and what follows is another kernel.
    found = kernels([narrow, narrow, cat, simple("aten::relu", IMAGE), conv()])
    assert not any(len(members) > 1 for members in found)


def test_nothing_is_fused_over_what_another_stream_or_the_host_waits_for() -> None:
    calls = [conv(bias=True), batch_norm(), simple("aten::relu_", IMAGE), conv()]
    assert (1, 2) in kernels(calls)
    for column, at in (("watched", 1), ("follows", 2)):
        units = units_of(calls)
        getattr(units, column)[at] = column == "watched"
        assert all(len(one.units) == 1 for one in generated_kernels(units))
    assert not generated_kernels(units_of(calls, Phase.OPTIMIZER))
    on_cpu = replace(units_of(calls), on_host=True)  # whose convolutions stay as they are
    assert [one.units.tolist() for one in generated_kernels(on_cpu)] == [[1, 2]]


@pytest.mark.parametrize(("calls", "inference", "training"), [
    ([conv()] * 2, True, True), ([conv(groups=4)] * 2, False, False), ([conv(groups=CHANNELS)] * 2, True, True),
    ([conv(inputs=64, outputs=64)] * 2, True, False), ([conv(), conv(inputs=256, outputs=64)], True, False),
    # One convolution among hundreds of other operations is no reason to turn anything.
    ([conv(), *[simple("aten::relu", IMAGE)] * 200], False, False)])
def test_training_keeps_the_layout_of_small_and_shrinking_and_all_that_of_grouped_convolutions(
        calls: list[tuple[OpCall, ...]], inference: bool, training: bool) -> None:
    assert (channels_last(units_of(calls), False), channels_last(units_of(calls), True)) == (inference, training)
