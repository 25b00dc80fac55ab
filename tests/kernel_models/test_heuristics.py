"""Heuristic models: curves that never fall or jump, known answers, fits that find what was put in, states."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_models.device import device
from kernel_models.families.attention import attention
from kernel_models.heuristics.attention import padded_head
from kernel_models.heuristics.efficiency import Efficiencies, Efficiency, default_efficiencies, fit_efficiencies
from kernel_models.heuristics.embedding import even_distinct
from kernel_models.heuristics.products import NARROW, SINGLE, narrow_rows, padded_product_us, tiling, whole_depth
from kernel_models.heuristics.roofline import RooflineModel, heuristic_models
from kernel_models.heuristics.work import (
    L2_SPEEDUP,
    CallTable,
    bandwidth_gbps,
    link_us,
    memory_us,
    overlapped,
    peak_tflops,
)
from kernel_models.lookups import backward_call, forward_call
from kernel_models.op_call import DIMENSIONS, Family, OpCall, Source, TablePart
from kernel_models.operation import calls_of, operation
from kernel_models.pricing import price
from tracer.lookup_data.tables import histogram_of_zipf
from tracer.shape_only.devices import device_names

DEVICES = st.sampled_from([spec for spec in map(device, device_names()) if spec.vendor != "host"])
BYTES = st.floats(1.0, 1e11)


SOME_REUSE = (0.5, 0.3, 0.2) + (0.0,) * 14


def gemm(m: int, n: int, k: int, dtype: str = "bf16", batch: int = 1) -> OpCall:
    size = {"fp32": 4}.get(dtype, 2)
    return OpCall(Family.GEMM, "mm", (batch, m, n, k), dtype, "nt", flops=2.0 * batch * m * n * k,
                  bytes_read=float(size * batch * (m * k + n * k)), bytes_written=float(size * batch * m * n))


def lookup(lookups: int, rows: int, columns: int = 64, longest: int = 16, reuse: tuple[float, ...] = ()) -> OpCall:
    return forward_call([TablePart(rows, columns, "fp32", lookups, max(lookups // 16, 1), longest, reuse)])


def times(calls: list[OpCall], name: str = "h100-sxm") -> np.ndarray:
    return RooflineModel(calls[0].family, device(name)).predict(calls).time_us


@given(DEVICES, BYTES, st.floats(1e-6, 10.0))
def test_memory_curve_rises_without_jumps(spec, moved, more) -> None:
    near = moved * (1 + more)
    before, after = memory_us(np.array([moved, near]), spec)
    per_byte = 1 / (bandwidth_gbps(spec) * 1e3)
    assert after >= before + (near - moved) * per_byte / L2_SPEEDUP * (1 - 1e-6)
    # Its slope is bounded, so that it has no jumps: at most 1 + 2(1 − 1/s)·h' times that of the memory.
    assert after - before <= (near - moved) * per_byte * 2.0


@given(st.floats(1.0, 1e11), st.floats(1e-6, 10.0), st.floats(1.0, 900.0))
def test_link_curve_rises_without_jumps(moved, more, gbps) -> None:
    near = moved * (1 + more)
    before, after = link_us(np.array([moved, near]), gbps, 64e3)
    assert (near - moved) / (gbps * 1e3) * (1 - 1e-6) <= after - before <= 2.001 * (near - moved) / (gbps * 1e3)
    assert link_us(np.array([0.0]), gbps, 64e3)[0] == 0


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_overlap_lies_between_the_longer_and_the_sum_and_rises(a, b, more) -> None:
    one, later = overlapped(np.array([a, a + more]), np.array([b, b]))
    assert max(a, b) * (1 - 1e-12) - 1e-12 <= one <= a + b + 1e-9
    assert later >= one * (1 - 1e-12) - 1e-12


@settings(max_examples=60)
@given(DEVICES, st.tuples(*(st.integers(1, 9000),) * 3), st.integers(0, 2), st.integers(1, 600),
       st.sampled_from(["fp32", "fp16", "bf16"]))
def test_products_of_whole_rows_never_get_quicker_as_they_grow(spec, sizes, which, more, dtype) -> None:
    if dtype != "fp32":  # rows that are no whole number of loads take longer than longer ones that are
        sizes, more = [8 * size for size in sizes], 8 * more
    grown = list(sizes)
    grown[which] += more
    small, large = RooflineModel(Family.GEMM, spec).predict([gemm(*sizes, dtype), gemm(*grown, dtype)]).time_us
    assert large >= small * (1 - 1e-12)


def test_a_large_product_runs_at_the_peak_and_a_wave_more_costs_a_step() -> None:
    spec = device("a100-sxm-80g")
    one = np.ones(1)
    # 108 tiles of 256×128: one full wave, at the full rate of the units.
    full = padded_product_us(one, one * 256 * 12, one * 128 * 9, one * 4096, 312.0, spec)[0]
    assert full == pytest.approx(2 * 256 * 12 * 128 * 9 * 4096 / 312e6, rel=1e-6)
    beyond = padded_product_us(one, one * 256 * 12 + 1, one * 128 * 9, one * 4096, 312.0, spec)[0]
    assert full < beyond < 2 * full
    # A contraction that is split fills units that few tiles leave idle.
    few = padded_product_us(one, one * 64, one * 64, one * 65536, 989.4, device("h100-sxm"))[0]
    assert few < 2 * 64 * 64 * 65536 / (989.4e6 / 132) / 8
    # Contractions and heads are taken in whole steps.
    table = CallTable.of(Family.GEMM, [gemm(64, 64, k, "bf16") for k in (64, 80, 96)])
    assert whole_depth(table, device("h100-sxm")).tolist() == [64, 96, 96]
    assert padded_head(np.array([1.0, 64.0, 80.0, 128.0, 160.0, 300.0])).tolist() == [32, 64, 96, 128, 192, 320]


@settings(max_examples=30)
@given(DEVICES, st.tuples(*(st.integers(1, 9000),) * 4))
def test_the_terms_of_a_tiling_are_its_time(spec, sizes) -> None:
    batch, m, n, k = (np.array([float(size)]) for size in sizes)
    whole = 2 * batch * m * n * k / 100e6
    terms = tiling(batch, m, n, spec)
    assert float((whole * terms.tiles * terms.waves * terms.small)[0]) == pytest.approx(
        float(padded_product_us(batch, m, n, k, 100.0, spec)[0]))
    assert terms.tiles[0] >= 1 - 1e-12 and terms.small[0] >= 1 - 1e-12 and terms.waves[0] >= 1 - 1e-12


def test_rows_that_are_no_whole_number_of_loads_cost_more() -> None:
    whole, narrow, single = times([gemm(8192, n, 4096, "fp16") for n in (50304, 50260, 50257)], "a100-sxm-80g")
    assert single / whole == pytest.approx(SINGLE, rel=0.1)
    assert narrow / whole == pytest.approx(NARROW, rel=0.1) and whole < narrow < single
    # Nobody measured them on AMD's boards to be slower; those with GDDR memory have corrections of their own; fp32 is
    # computed without matrix units.
    for spec, dtype in (("mi250", "fp16"), ("rtx-4090", "fp16"), ("a100-sxm-80g", "fp32")):
        table = CallTable.of(Family.GEMM, [gemm(8192, 50257, 4095, dtype)])
        assert narrow_rows(table, device(spec))[0] == 1 and whole_depth(table, device(spec))[0] == 4095


@settings(max_examples=60)
@given(st.integers(1, 10**6), st.integers(1, 10**7), st.integers(1, 512), st.integers(1, 10**5), st.integers(1, 400))
def test_lookups_rise_with_their_number_the_table_its_columns_and_the_longest_bag(
        lookups, rows, columns, more, longer) -> None:
    base, larger, wide, long, reused, looked_up = times([
        lookup(lookups, rows, columns), lookup(lookups, rows + more, columns), lookup(lookups, rows, columns + more),
        lookup(lookups, rows, columns, 16 + longer), lookup(lookups, rows, reuse=SOME_REUSE),
        lookup(lookups + more, rows, reuse=SOME_REUSE)])
    assert min(larger, wide) >= base * (1 - 1e-9) and long >= base and looked_up >= reused * (1 - 1e-9)


@pytest.mark.parametrize(("call", "rows", "falls"), [
    (forward_call, 10**7, 0.9), (backward_call, 10**7, 0.9), (partial(backward_call, fused=False), 2 * 10**5, 1.01)])
def test_lookups_cost_less_the_more_rows_are_used_again(call, rows, falls) -> None:
    costs = times([call([TablePart(rows, 64, "fp32", 10**6, 10**5, 10, histogram_of_zipf(10**6, rows, skew))])
                   for skew in (0.0, 0.6, 0.9)])
    assert costs[2] <= falls * costs[0]
    if falls < 1:
        assert list(costs) == sorted(costs, reverse=True)


def test_tables_share_the_cache_and_long_bags_hold_up_a_kernel() -> None:
    small, large = (TablePart(rows, 64, "fp32", 10**6, 10**5, 10) for rows in (10**4, 10**7))
    alone, both, turned = times([forward_call([small]), forward_call([small, large]), forward_call([large, small])])
    large_alone = times([forward_call([large])])[0]
    assert both == pytest.approx(turned)
    assert both > max(alone, large_alone)
    # One long bag holds up a kernel.
    short, long = times([forward_call([TablePart(10**7, 16, "fp32", 13312, 384, longest)]) for longest in (35, 100)],
                        "v100-sxm2-32g")
    assert 60 < long < 75  # 66 µs on a recorded V100
    assert short < 0.5 * long
    # Drawing T times from T rows leaves 1/e of them untouched.
    assert even_distinct(np.array([1.0, 1e6, 1e9]), np.array([1e3, 1e6, 100.0])) == pytest.approx(
        [1.0, 1e6 * (1 - np.exp(-1)), 100.0], rel=1e-4)


def test_pageable_copies_are_slower_than_copies_within_the_device() -> None:
    found = times([OpCall(Family.TRANSFER, kind, (10**8,), "uint8", flags=flags, bytes_read=1e8, bytes_written=1e8)
                   for kind, flags in (("d2d", ()), ("h2d", ("pinned",)), ("h2d", ("pageable",)))])
    assert (np.diff(found) > 0).all()


@pytest.mark.parametrize("family", list(Family))
def test_every_family_prices_anything(family: Family) -> None:
    width = len(DIMENSIONS[family])
    calls = [OpCall(family, "anything", (0,) * width, "", flags=("unsized",)),
             OpCall(family, "anything", (7,) * width, "no such type", "strided", bytes_read=1e6, bytes_written=1e6),
             OpCall(family, "other", (1,), "fp32", flops=1e9, bytes_read=4.0)]
    model = RooflineModel(family, device("rtx-3090"))
    found = model.predict(calls)
    assert (found.low_us > 0).all() and (found.low_us <= found.time_us).all() and (found.time_us <= found.high_us).all()
    assert np.isfinite(found.high_us).all() and model.covers(calls).all() and model.source is Source.DATASHEET
    assert found.high_us[0] / found.low_us[0] > 20


def test_defaults_say_where_they_come_from() -> None:
    entries = default_efficiencies().entries
    assert {"gemm/bf16", "gemm/fp32", "attention", "elementwise", "norm", "*"} <= entries.keys()
    for key, entry in entries.items():
        assert entry.source, key
        assert "h100-vs-mi300" not in entry.source
        assert 0 < entry.compute <= 2.5 and 0 < entry.memory <= 3 and entry.low < 0 < entry.high
    assert default_efficiencies("host") is not default_efficiencies()
    assert heuristic_models(device("cpu"))[Family.GEMM].efficiencies is default_efficiencies("host")


def test_a_fit_finds_the_efficiencies_that_made_the_times() -> None:
    spec = device("a100-sxm-80g")
    true = Efficiencies({"*": Efficiency(0.6, 0.5, 2.0, -0.1, 0.1)})
    rng = np.random.default_rng(0)
    calls = [gemm(*(8 * int(size) for size in 2 ** rng.uniform(2, 10, 3))) for _ in range(400)]
    exact = RooflineModel(Family.GEMM, spec, true).predict(calls).time_us
    measured = exact * np.exp(rng.normal(0, 0.1, len(calls)))
    measured[:8] *= 20  # outliers
    fitted = fit_efficiencies(calls, measured, spec)
    found = RooflineModel(Family.GEMM, spec, fitted).predict(calls)
    assert fitted.fitted and found.time_us.sum() == pytest.approx(exact.sum(), rel=0.05)
    assert np.median(np.abs(np.log(found.time_us / exact))) < 0.05
    inside = (found.low_us <= measured) & (measured <= found.high_us)
    assert 0.7 <= inside.mean() <= 0.95
    # Short calls leave the rates alone.
    spec = device("h100-sxm")
    calls = [gemm(8 * i, 64, 64) for i in range(1, 40)]
    fitted = fit_efficiencies(calls, np.full(len(calls), 9.0), spec)
    large = [gemm(8192, 8192, 8192)]
    before = RooflineModel(Family.GEMM, spec).predict(large).time_us[0]
    assert RooflineModel(Family.GEMM, spec, fitted).predict(large).time_us[0] == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize(("measured", "said"), [([np.nan], "no usable"), ([1.0, 2.0], "1 calls have 2 times")])
def test_a_fit_without_measurements_says_so(measured: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit_efficiencies([gemm(8, 8, 8)], measured, device("t4"))


def test_states_bring_back_the_same_model() -> None:
    spec = device("mi300x")
    for model in heuristic_models(spec).values():
        state, arrays = model.state()
        again = RooflineModel.from_state(state, arrays)
        assert again.family is model.family and again.device == spec and again.source is model.source
    calls = [gemm(512, 512, 512), gemm(64, 8192, 1024, "fp32")]
    for each in (spec, device("rtx-3090")):  # which has corrections
        model = heuristic_models(each)[Family.GEMM]
        np.testing.assert_allclose(RooflineModel.from_state(*model.state()).predict(calls).time_us,
                                   model.predict(calls).time_us, rtol=1e-2)
    with pytest.raises((KeyError, ValueError)):
        Efficiencies.from_state({"entries": {"gemm": {"compute": 1, "memory": 1, "fixed": 1, "low": 0, "high": 0}}})


def sized(family: Family, size: int, other: int) -> OpCall:
    """A call of a family whose work grows with ``size``, with the bytes and operations it would have."""
    moved = {"bytes_read": 4.0 * size * other, "bytes_written": 4.0 * size * other}
    if family is Family.ATTENTION:
        return OpCall(family, "flash_forward", (1, 8, 8, size, size, 64, 64, 0), "bf16", flops=4.0 * 8 * size**2 * 64,
                      bytes_read=2.0 * 8 * 64 * 3 * size, bytes_written=2.0 * 8 * 64 * size)
    if family is Family.CONV:
        return OpCall(family, ("forward", "dgrad", "wgrad")[other % 3],
                      (size, 64, other, 1, 1, 14, 14, 1, 14, 14, 1, 3, 3, 1, 1, 1, 1, 1, 1), "fp16", "nhwc",
                      flops=2.0 * size * 196 * 64 * other * 9, bytes_read=2.0 * size * 196 * 64,
                      bytes_written=2.0 * size * 196 * other)
    dims = {Family.NORM: (size, other), Family.ELEMENTWISE: (size * other, 2, 2 * size * other),
            Family.SOFTMAX: (size, other, 1), Family.REDUCTION: (size, other, 1),
            Family.COPY: (size * other, other), Family.CONCAT: (size * other, 2, other),
            Family.INDEX: (size * other, other, size * other), Family.SORT: (size, other, 0),
            Family.TRANSFER: (4 * size * other,), Family.RECURRENT: (size, 8, 64, other, 1, 1)}[family]
    kind = "h2d" if family is Family.TRANSFER else "any"
    return OpCall(family, kind, dims, "fp32", flops=float(size * other), **moved)


@settings(max_examples=120)
@given(DEVICES, st.sampled_from([Family.ATTENTION, Family.CONV, Family.NORM, Family.SOFTMAX, Family.REDUCTION,
                                 Family.COPY, Family.CONCAT, Family.INDEX, Family.SORT, Family.TRANSFER,
                                 Family.RECURRENT, Family.ELEMENTWISE]),
       st.integers(1, 20_000), st.integers(1, 5_000), st.integers(1, 2048))
def test_no_family_gets_quicker_as_its_work_grows(spec, family, size, more, other) -> None:
    small, large = RooflineModel(family, spec).predict([sized(family, size, other), sized(family, size + more, other)],
                                                       ).time_us
    assert large >= small * (1 - 1e-9)
    assert family is Family.TRANSFER or small >= 0.5 * spec.kernel_floor_us


def test_few_rows_cost_a_cpu_the_weights_and_few_columns_a_whole_vector() -> None:
    """From 1 to 8 rows a product of 4 MB of weights grows little, from 256 to 2048 as its rows do.

    A product by LoRA's 8 columns takes as long as by 16, but for its bytes; from 16 on time grows with them.
    """
    found = times([gemm(m, 1024, 1024, "fp32") for m in (1, 8, 256, 2048)], "cpu")
    assert found[1] < 4 * found[0] and found[3] == pytest.approx(8 * found[2], rel=0.1)
    eight, sixteen, thirty_two = times([gemm(512, n, 256, "fp32") for n in (8, 16, 32)], "cpu")
    assert sixteen < 1.1 * eight and thirty_two > 1.5 * sixteen


def test_a_cpus_convolution_costs_its_preparation_unless_it_is_made_of_products() -> None:
    """As PyTorch chooses: 1×1 without a stride of fewer than 16 samples, and 3×3 of one small image."""
    def convolution(kernel: int, stride: int, batch: int, size: int = 8) -> OpCall:
        out = size // stride
        dims = (batch, 16, 16, 1, 1, size, size, 1, out, out, 1, kernel, kernel, 1, stride, stride, 1, 1, 1)
        values = 16.0 * batch * size * size
        return OpCall(Family.CONV, "forward", dims, "fp32", "nchw", flops=2.0 * 16 * values * kernel ** 2,
                      bytes_read=4.0 * (values + 256 * kernel ** 2), bytes_written=4 * values)
    plain, single, wide, strided = times([convolution(1, 1, 2), convolution(3, 1, 1), convolution(3, 1, 2),
                                          convolution(1, 2, 2)], "cpu")
    assert min(wide, strided) > 3 * max(plain, single)
    few, many = times([convolution(1, 1, 15), convolution(1, 1, 16)], "cpu")
    small, large = times([convolution(3, 1, 1, 35), convolution(3, 1, 1, 36)], "cpu")
    assert many > 2 * few and large > 1.3 * small


def test_rows_and_steps_of_a_cpu() -> None:
    """No units stay idle: few long rows cost what many short ones do; a layer's steps each read its weights."""
    rows = [OpCall(Family.SOFTMAX, "softmax", (outer, 1 << 20 >> outer.bit_length(), 1), "fp32",
                   bytes_read=float(1 << 22), bytes_written=float(1 << 22)) for outer in (1, 1024)]
    few, many = times(rows, "cpu")
    assert few == pytest.approx(many)
    layer = [OpCall(Family.RECURRENT, "lstm", (steps, 8, 64, 64, 1, 1), "fp32", flops=2.0 * steps * 8 * 4 * 64 * 128,
                    bytes_read=4.0 * 4 * 64 * 130, bytes_written=4.0 * steps * 8 * 64) for steps in (10, 100)]
    short, long = times(layer, "cpu")
    assert long == pytest.approx(10 * short, rel=0.1)


@pytest.mark.parametrize("kind", ["flash_forward", "flash_backward"])
def test_a_causal_mask_saves_a_cpu_little(kind: str) -> None:
    """Up to 512 tokens nothing, of 2,048 more than a third, and never the half that is not attended to."""
    for tokens, least, most in ((64, 1.0, 1.0), (512, 1.0, 1.0), (1024, 0.6, 0.8), (2048, 0.51, 0.66)):
        whole, causal = times([next(attention(kind, 1, 4, 4, tokens, tokens, 64, 64, "fp32", causal=causal))
                               for causal in (False, True)], "cpu")
        assert least * (1 - 1e-9) <= causal / whole <= most * (1 + 1e-9)


def test_a_processor_by_its_data_sheet_is_unsure_and_moves_no_more_than_its_memory() -> None:
    """Between the placeholder and a fitted one; and of 400 MB no byte comes faster than the channels let it."""
    (add,) = calls_of(operation("aten::add", [(6144, 6144), (6144, 6144)], "fp32"))
    widths = {}
    for name in ("cpu", "i9-10940x"):
        times = RooflineModel(add.family, device(name)).predict([add])
        widths[name] = float(np.log(times.high_us[0] / times.low_us[0]))
    assert widths["cpu"] > widths["i9-10940x"] + 1.5 > 2.5
    assert times.time_us[0] > add.bytes_moved / device("i9-10940x").memory_bandwidth_gbps / 1e3


def test_power_holds_large_products_back() -> None:
    def share(name: str, dtype: str, matrix: bool) -> float:
        return peak_tflops(device(name), dtype, matrix=matrix) / device(name).peak_tflops(dtype, matrix=matrix)

    assert share("rtx-pro-6000-max-q", "bf16", True) < 0.75 and share("rtx-pro-6000-max-q", "fp32", False) < 0.5
    assert share("rtx-pro-6000", "bf16", True) == share("rtx-5090", "bf16", True) == 1.0
    assert 0.6 < share("rtx-5090", "fp32", False) < share("h100-nvl", "fp32", False) == 1.0
    assert peak_tflops(device("l4"), "fp32", matrix=True) == pytest.approx(72 / 7.0)
    assert share("h100-sxm", "bf16", True) == share("v100-pcie-32g", "fp32", True) == 1.0


def test_attention_kernels_written_for_ampere_are_slower_than_hoppers_own_on_hopper_alone() -> None:
    def us(kind: str, name: str) -> float:
        call = next(attention(kind, 4, 16, 16, 8192, 8192, 128, 128, "bf16", causal=True))
        return float(price([call], device(name)).times_us[0])

    whole = next(attention("flash_forward", 4, 16, 16, 8192, 8192, 128, 128, "bf16", causal=False))
    assert us("flash_forward", "h100-sxm") / times([whole])[0] == pytest.approx(0.5, abs=0.03)
    for way in ("forward", "backward"):
        first, second, third, cudnn = (us(f"{name}_{way}", "h100-sxm") for name in ("flash1", "flash", "flash3",
                                                                                    "cudnn"))
        assert 1.4 < second / third < 1.8 and 1.6 < first / second < 2.0
        assert cudnn == pytest.approx(third, rel=0.05)
        assert us(f"flash_{way}", "a100-sxm-80g") == pytest.approx(us(f"cudnn_{way}", "a100-sxm-80g"), rel=0.05)
    # The backward pass of wide heads takes longer for its operations.
    def rate(kind: str, width: int) -> float:
        call = next(attention(kind, 4, 16, 16, 8192, 8192, width, 128, "bf16", causal=True))
        return call.flops / float(price([call], device("a100-sxm-80g")).times_us[0])

    assert rate("cudnn_backward", 192) / rate("cudnn_backward", 128) == pytest.approx(0.85, rel=0.03)
    assert rate("cudnn_forward", 192) / rate("cudnn_forward", 128) == pytest.approx(1.0, rel=0.03)
