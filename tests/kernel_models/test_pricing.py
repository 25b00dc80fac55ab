"""Pricing: order of sources, repeated calls, nothing free, and the command.

Products of a whole step run no faster than the board's power lets them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from typer.testing import CliRunner

from foretrace.commands import app
from kernel_models.device import DeviceSpec, device
from kernel_models.families.gemm import gemm as product_call
from kernel_models.heuristics.roofline import heuristic_models
from kernel_models.op_call import Family, OpCall, Source, Times
from kernel_models.pricing import LEAST_US, price, sustained, sustained_tflops

H100 = device("h100-sxm")


def gemm(m: int, k: int = 1024) -> OpCall:
    return OpCall(Family.GEMM, "mm", (1, m, 1024, k), "bf16", "nt", flops=2048.0 * m * k,
                  bytes_read=2.0 * (m * k + 1024 * k), bytes_written=2048.0 * m)


@dataclass
class Fixed:
    """A model that covers calls up to a height and gives them all one time."""

    source: Source
    most: int
    time_us: float
    family: Family = Family.GEMM

    def covers(self, calls: Sequence[OpCall]) -> np.ndarray:
        return np.array([call.dims[1] <= self.most for call in calls])

    def predict(self, calls: Sequence[OpCall]) -> Times:
        column = np.full(len(calls), self.time_us)
        return Times(column, column * 0.9, column * 1.1)

    def state(self):
        return {}, {}


@dataclass
class Profile:
    """Models in an order that must not matter."""

    models: list[Fixed]
    device: DeviceSpec = field(default=H100)

    def models_of(self, family: Family) -> list[Fixed]:
        return [model for model in self.models if model.family is family]


def test_the_best_source_that_covers_a_call_prices_it() -> None:
    profile = Profile([Fixed(Source.HEURISTIC, 500, 7.0), Fixed(Source.LEARNED, 100, 5.0)])
    priced = price([gemm(50), gemm(200), gemm(4000)], H100, profile)
    assert priced.source.tolist() == [Source.LEARNED, Source.HEURISTIC, Source.DATASHEET]
    assert priced.time_us[:2].tolist() == [5.0, 7.0]
    assert priced.time_us[2] == heuristic_models(H100)[Family.GEMM].predict([gemm(4000)]).time_us[0]
    assert sum(priced.share_by_source().values()) == pytest.approx(1.0)


@pytest.mark.parametrize("nonsense", [np.nan, -1.0, 0.0, np.inf])
def test_a_model_that_gives_nonsense_is_passed_over(nonsense: float) -> None:
    priced = price([gemm(50)], H100, Profile([Fixed(Source.LEARNED, 100, nonsense)]))
    assert priced.source[0] == Source.DATASHEET and priced.time_us[0] > 0


def test_repeated_calls_are_priced_once_and_counted_each_time() -> None:
    asked: list[int] = []

    class Counting(Fixed):
        def predict(self, calls: Sequence[OpCall]) -> Times:
            asked.append(len(calls))
            return super().predict(calls)

    price([gemm(m) for m in range(1, 201)] * 2, H100, Profile([Counting(Source.LEARNED, 10**9, 3.0)]))
    assert asked == [200]  # and all of them by columns
    priced = price([gemm(1), gemm(2), gemm(1), gemm(1)], H100)
    assert len(priced) == 4 and len(priced.calls) == 2
    assert priced.index.tolist() == [0, 1, 0, 0]
    assert priced.total_us == pytest.approx(3 * priced.time_us[0] + priced.time_us[1])
    low, high = priced.total_interval_us()
    assert 0 <= low < priced.total_us < high
    empty = price([], H100)
    assert len(empty) == 0 and empty.total_us == 0 and empty.share_by_source() == {}
    odd = price([OpCall(family, "?", (), "?") for family in Family], device("t4"))  # nothing is free or an error
    assert (odd.low_us > 0).all() and (odd.time_us >= LEAST_US).all() and np.isfinite(odd.high_us).all()


def run(*arguments: str):
    return CliRunner().invoke(app, ["price", *arguments])


def test_the_command_prices_a_linear_layer() -> None:
    ran = run("aten::linear", "--shapes", "8192x4096,11008x4096", "--dtype", "bf16", "--device", "h200-sxm", "--json")
    assert ran.exit_code == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["flops"] == 2 * 8192 * 4096 * 11008
    assert found["bytes"] == 2 * (8192 * 4096 + 11008 * 4096 + 8192 * 11008)
    # At the peak it takes 747 µs; nothing reaches more than nine tenths of that, or less than half.
    assert 747 / 0.95 < found["time_us"] < 747 / 0.5
    assert found["interval_us"][0] < found["time_us"] < found["interval_us"][1]
    assert found["source"] == "datasheet"
    # A gradient is two products, and the table shows each.
    arguments = ("aten::linear", "--shapes", "512x256,128x256,none", "--device", "NVIDIA H100 80GB HBM3")
    forward, backward = (json.loads(run(*arguments, "--json", *more).stdout) for more in ((), ("--backward",)))
    assert backward["flops"] == 2 * forward["flops"] and len(backward["calls"]) == 2
    shown = run(*arguments, "--backward").stdout
    assert shown.count("gemm") >= 2 and "datasheet" in shown


@pytest.mark.parametrize(("arguments", "told"), [
    (("liner", "--shapes", "8x8,8x8", "--device", "t4"), "aten::linear"),
    (("aten::view", "--shapes", "8x8", "--device", "t4"), "no device work"),
    (("aten::linear", "--shapes", "8x8", "--device", "t4"), "do not fit"),
    (("aten::linear", "--shapes", "8x8,8xx8", "--device", "t4"), "8xx8"),
    (("aten::linear", "--shapes", "8x٨,8x8", "--device", "t4"), "are no sizes"),
    (("aten::linear", "--shapes", "8x1099511627776,8x8", "--device", "t4"), "below 2^40 = 1,099,511,627,776"),
    (("aten::cat", "--shapes", "8x8,8x9", "--device", "t4"), "cannot join 8x8, 8x9"),
    (("aten::cat", "--shapes", "[8x8;8x8", "--device", "t4"), "brackets"),
    (("aten::stack", "--shapes", "8x8,7x8", "--device", "t4"), "must be equal"),
    (("aten::conv2d", "--shapes", "1x3x8x8,4x3x3x3", "--value", "stride", "--device", "t4"), "stride=2"),
    (("aten::conv2d", "--shapes", "1x64x8x8,64x3x3x3", "--device", "t4"), "3 channels a group"),
    (("aten::layer_norm", "--shapes", "64x1024,512", "--device", "t4"), "weight 512"),
    (("aten::embedding", "--shapes", "32x8,100x8", "--dtype", "int64,fp32", "--device", "t4"), "table before"),
    (("aten::lstm", "--shapes", "10x4x32", "--device", "t4"), "hidden_size"),
    (("aten::linear", "--shapes", "8x8,8x8", "--value", "stride=1", "--device", "t4"), "no argument 'stride'"),
    (("aten::conv2d", "--shapes", "1x3x8x8,4x3x3x3", "--value", "stride=two", "--device", "t4"), "stride=two"),
    (("aten::conv2d", "--shapes", "1x3x8x8,4x3x3x3", "--value", "stride=" + "9" * 5000, "--device", "t4"),
     "out of range"),
    (("aten::linear", "--shapes", "", "--device", "t4"), "sizes"),
    (("aten::linear", "--shapes", "8x8,8x8", "--dtype", "bf17", "--device", "t4"), "bf17"),
    (("aten::linear", "--shapes", "8x8,8x8", "--dtype", "bf16,bf16,bf16", "--device", "t4"), "3 element types"),
    (("aten::linear", "--shapes", "8x8,8x8", "--device", "h300"), "h200-sxm"),
    (("aten::linear", "--shapes", "8x8,8x8"), "--device"),
    (("aten::argmax", "--shapes", "8x8", "--device", "t4", "--backward"), "no gradient"),
    (("aten::linear", "--shapes", "8x8,8x8", "--profile", "/no/such.profile"), "such.profile"),
])
def test_bad_input_is_one_sentence_and_code_2(arguments: tuple[str, ...], told: str) -> None:
    ran = run(*arguments)
    assert ran.exit_code == 2
    assert ran.stderr.startswith("foretrace: ") and ran.stderr.count("\n") == 1 and told in ran.stderr


def priced(operation: str, shapes: str, *more: str, on: str = "h100-sxm") -> dict:
    ran = run(operation, "--shapes", shapes, "--device", on, *more, "--json")
    assert ran.exit_code == 0, ran.stderr
    return json.loads(ran.stdout)


def test_all_sizes_of_a_concatenation_count_and_optimizers_repeat_one_list() -> None:
    for shapes in ("1024x1024,512x1024,256x1024", "[1024x1024;512x1024;256x1024]"):
        assert priced("aten::cat", shapes)["bytes"] == 2 * 4 * 1792 * 1024
    assert priced("aten::stack", "64x64,64x64")["bytes"] == 2 * 4 * 2 * 64 * 64
    elements = 1024 * 1024 + 512
    adam = priced("aten::_fused_adamw_", "1024x1024,512")
    assert adam["assumed"] == {"lists": 4} and adam["bytes"] == 4 * elements * 7
    assert priced("aten::_foreach_add_", "1024x1024,512")["bytes"] == 4 * elements * 3
    assert priced("aten::_foreach_add_", "1024x1024,512", "--value", "scalar=1")["bytes"] == 4 * elements * 2


def test_an_unknown_operation_is_priced_by_its_bytes() -> None:
    found = priced("aten::liner", "1024x1024,1024x1024")
    assert found["calls"][0]["family"] == "other" and found["bytes"] == 3 * 4 * 2**20
    assert "No family knows aten::liner" in found["notes"][0] and "aten::linear" in found["notes"][0]
    assert priced("my::op", "1024x1024")["time_us"] > 0
    assert priced("linear", "8x8,8x8")["operation"] == "aten::linear"


@pytest.mark.parametrize(("operation", "shapes"), [
    ("aten::linear", "0x8,8x8"), ("aten::relu", "0x4"), ("aten::cat", "0x4,0x4"), ("my::op", "0x4")])
def test_without_elements_there_is_no_work(operation: str, shapes: str) -> None:
    found = priced(operation, shapes)
    assert found["time_us"] == 0 and found["interval_us"] == [0, 0] and "No work" in found["notes"][-1]


def test_numbers_are_given_by_name_and_the_others_are_pytorchs() -> None:
    shapes = "32x64x56x56,64x64x3x3"
    bare, same = priced("aten::conv2d", shapes), priced("aten::conv2d", shapes, "--value", "padding=1")
    assert bare["flops"] == 2 * 32 * 64 * 54 * 54 * 64 * 9 and same["flops"] == 2 * 32 * 64 * 56 * 56 * 64 * 9
    assert bare["assumed"] == {"stride": [1], "padding": [0], "dilation": [1], "groups": 1}
    assert same["values"] == {"padding": [1]} and "padding" not in same["assumed"]
    strided = priced("aten::conv2d", shapes, "--value", "stride=2x2", "--value", "padding=[1,1]")
    assert strided["flops"] == 2 * 32 * 64 * 28 * 28 * 64 * 9
    heads = ",".join(["2x16x512x64"] * 3)
    full = priced("aten::scaled_dot_product_attention", heads, "--dtype", "bf16")
    causal = priced("aten::scaled_dot_product_attention", heads, "--dtype", "bf16", "--value", "is_causal=true")
    assert full["assumed"]["is_causal"] is False and causal["flops"] < 0.51 * full["flops"]
    lstm = priced("aten::lstm", "10x4x32", "--value", "hidden_size=64")
    assert lstm["flops"] == 2 * 10 * 4 * 4 * 64 * (32 + 64)
    for value in ("output_size=128x128", "scale_factors=2"):
        assert priced("aten::upsample_bilinear2d", "8x3x64x64", "--value", value)["bytes"] == 4 * 24 * (64**2 + 128**2)
    # Types may be given an entry each.
    found = priced("aten::embedding", "1000x64,32", "--dtype", "fp32,int64")
    assert priced("aten::embedding", "1000x64,32")["bytes"] == found["bytes"]
    assert priced("aten::layer_norm", "8x64,none,64", "--dtype", "fp32,none,fp32")["time_us"] > 0
    assert priced("aten::mm", "64x64,64x64", "--dtype", "fp8_e4m3")["calls"][0]["dtype"] == "fp8"


def test_types_that_a_device_lacks_are_told_and_uncertain() -> None:
    sizes = "4096x4096,4096x4096"
    wide = priced("aten::mm", sizes, "--dtype", "fp8", on="a100-sxm-80g")
    half = priced("aten::mm", sizes, "--dtype", "fp16", on="a100-sxm-80g")
    assert wide["time_us"] == pytest.approx(half["time_us"], rel=0.15) and "priced as fp16" in wide["notes"][0]
    assert wide["interval_us"][1] / wide["interval_us"][0] > 3
    slow, single = (priced("aten::mm", sizes, "--dtype", dtype, on="p4")["time_us"] for dtype in ("fp16", "fp32"))
    assert slow == pytest.approx(single, rel=0.1)
    fp4, fp8 = (priced("aten::mm", sizes, "--dtype", dtype, on="b200") for dtype in ("fp4", "fp8"))
    assert fp4["flops"] == 2 * fp8["flops"] and fp4["time_us"] == pytest.approx(fp8["time_us"], rel=0.1)
    assert "fp8" in priced("aten::mm", sizes, "--dtype", "fp4")["notes"][0]
    real = priced("aten::mm", sizes)
    assert priced("aten::mm", sizes, "--dtype", "complex64")["flops"] == 4 * real["flops"]
    # Copies stream as elementwise kernels do.
    copied, relu = priced("aten::copy_", "8192x8192,8192x8192"), priced("aten::relu", "8192x8192")
    assert copied["bytes"] == relu["bytes"] and copied["time_us"] == pytest.approx(relu["time_us"], rel=0.2)


def test_layouts_that_a_profile_lacks_are_priced_by_those_it_has() -> None:
    class Forward(Fixed):
        def covers(self, calls: Sequence[OpCall]) -> np.ndarray:
            return np.array([call.layout == "nt" for call in calls])

    forward, gradient = gemm(2048), replace(gemm(2048), layout="nn")
    sheet = price([forward, gradient], H100)
    slow = Forward(Source.LEARNED, 0, 1.5 * float(sheet.time_us[0]))
    found = price([forward, gradient], H100, Profile([slow]))
    assert found.source.tolist() == [Source.LEARNED, Source.HEURISTIC] and found.by_variant.tolist() == [False, True]
    assert found.time_us[1] == pytest.approx(1.5 * sheet.time_us[1])
    assert found.high_us[1] / found.low_us[1] > found.high_us[0] / found.low_us[0]


@pytest.mark.real_traces
@pytest.mark.parametrize("name", ["h100-Qwen_Qwen1.5-0.5B-Chat", "h100-gaunernst_bert-small-uncased"])
def test_active_time_from_the_data_sheet_alone(real_trace, name: str) -> None:
    from kernel_models.trace_calls import Basis, graph_calls
    from tracer.kineto import read_kineto

    found = graph_calls(read_kineto(real_trace(f"h100-vs-mi300/{name}.json.gz")))
    rows = np.flatnonzero(found.basis != Basis.NAME)
    priced = price([call for row in rows for call in found.calls_of_row(int(row))], H100)
    assert priced.total_us == pytest.approx(found.time_ns[rows].sum() / 1e3, rel=0.25)
    assert priced.share_by_source() == {"datasheet": 1.0}


def product(size: int, dtype: str = "bf16") -> OpCall:
    return next(product_call(1, size, size, size, dtype, "nt"))


def test_a_large_product_ends_at_the_rate_that_the_power_feeds() -> None:
    spec = device("b200")
    burst = price([product(16_384)], spec)
    slowed = sustained(burst, spec)
    rate = burst.calls[0].flops / slowed.times_us[0] / 1e6
    assert rate == pytest.approx(sustained_tflops(spec, "bf16"))
    assert slowed.times_us[0] > 1.4 * burst.times_us[0]
    # The interval keeps its relative width; small products and traffic are left alone.
    np.testing.assert_allclose(slowed.low_us / slowed.time_us, burst.low_us / burst.time_us)
    calls = [product(256), OpCall(Family.ELEMENTWISE, "add", (10**8, 2, 2 * 10**8), "bf16", bytes_read=6e8)]
    np.testing.assert_array_equal(sustained(price(calls, spec), spec).times_us, price(calls, spec).times_us)


def test_more_power_is_never_slower_and_enough_of_it_changes_nothing() -> None:
    spec = device("h100-sxm")
    calls = [product(size) for size in (512, 2048, 8192, 16_384)]
    burst = price(calls, spec).times_us
    before = np.full(len(calls), np.inf)
    for watts in (350.0, 500.0, 700.0, 5_000.0):
        now = sustained(price(calls, spec), replace(spec, power_w=watts)).times_us
        assert (now <= before).all() and (now >= burst).all()
        before = now
    np.testing.assert_array_equal(before, burst)
    # An 8-bit product takes less energy than a 16-bit one, and more than half.
    spec = device("h200-sxm")
    assert 1.5 < sustained_tflops(spec, "fp8") / sustained_tflops(spec, "bf16") < 2
    hopper, blackwell = (sustained_tflops(device(name), "fp8") / device(name).power_w for name in ("h100-sxm", "gb200"))
    assert 1.2 < blackwell / hopper < 1.4, "narrow products on Blackwell have an energy of their own"
    assert sustained_tflops(device("gb200"), "fp4") > 1.5 * sustained_tflops(device("gb200"), "fp8")
    for name in ("v100-sxm2-32g", "rtx-4090", "cpu"):  # of which nothing is known
        assert sustained_tflops(device(name), "bf16") == np.inf
