"""Corrections of the formulas: what tells calls apart, what a fit to whole steps finds, and how they price."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from kernel_models.device import DeviceSpec, device
from kernel_models.heuristics.call_classes import Classes, grouped, sizes_of
from kernel_models.heuristics.corrections import (
    KNOTS,
    Corrections,
    accumulates_at_half,
    excess_of,
    shipped_corrections,
    traffic_factor,
)
from kernel_models.heuristics.roofline import RooflineModel, heuristic_models
from kernel_models.heuristics.work import CallTable, peak_tflops
from kernel_models.op_call import Family, OpCall, Source
from kernel_models.operation import calls_of, operation
from kernel_models.pricing import PricedCalls, price
from kernel_models.step_fit import MeasuredStep, StepProblem, fit_widths

GPU = device("rtx-3090")


def linear(tokens: int, width: int, out: int) -> OpCall:
    return calls_of(operation("aten::linear", [(tokens, width), (out, width), None], "fp16"))[0]


def add(elements: int) -> OpCall:
    return calls_of(operation("aten::add", [(elements,), (elements,)], "fp16"))[0]


def convolution(channels: int, groups: int, *, last: bool = False) -> OpCall:
    strides = [(channels * 1024, 1, 32 * channels, channels), None, None] if last else None
    return calls_of(operation("aten::convolution", [(8, channels, 32, 32), (channels, channels // groups, 3, 3), None],
                              "fp16", strides, [None, None, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups]))[0]


def alone(call: OpCall, corrections: Corrections | None = None) -> float:
    """Time of one call, µs."""
    return float(RooflineModel(call.family, GPU, corrections=corrections).predict([call]).time_us[0])


def steps(rng: np.random.Generator, count: int, factor: dict[Family, float]) -> list[MeasuredStep]:
    """Steps whose families take ``factor`` times what the formulas say."""
    found = []
    for _ in range(count):
        product = linear(int(rng.integers(1, 40)) * 256, 1024, int(rng.integers(1, 9)) * 512)
        calls = {product: float(rng.integers(1, 30)), add(int(rng.integers(1, 64)) << 20): float(rng.integers(1, 60))}
        total = sum(times * factor.get(call.family, 1.0) * alone(call) for call, times in calls.items())
        found.append(MeasuredStep(calls, GPU, total))
    return found


def classes_of(call: OpCall, on: DeviceSpec = GPU) -> Classes:
    [group] = grouped([call], on)
    return group.classes


def test_a_call_belongs_to_classes_from_wide_to_narrow() -> None:
    def names(call: OpCall, on: DeviceSpec = GPU) -> dict[str, int]:
        return dict(classes_of(call, on).names)

    depthwise = names(convolution(64, 64, last=True))
    assert [depthwise[name] for name in ("conv", "conv/forward/depthwise", "conv/forward/depthwise/nhwc")] == [0, 1, 2]
    assert "conv/spatial" in names(convolution(64, 1)) and "conv/grouped" in names(convolution(64, 2))
    # A P4 multiplies 16-bit numbers in fp32, and what steps taught of matrix units does not hold there.
    half = linear(512, 512, 512)
    assert "gemm/mm/fp16" in names(half) and "gemm/mm/fp32" in names(half, device("p4"))
    # Alignment is a class of products: of rows of operands and result, which are k and n long.
    aligned, odd, rows = (names(linear(tokens, 1024, out)) for tokens, out in (
        (256, 50304), (256, 50257), (255, 50304)))
    assert not any("not aligned" in name for name in aligned) and set(rows) == set(aligned)
    assert {f"gemm/fp16/n not aligned by {number}" for number in (2, 4, 8, 16, 32, 64)} <= set(odd)
    # Both 16-bit types are one but of products.
    brain = calls_of(operation("aten::add", [(4096,), (4096,)], "bf16"))[0]
    assert classes_of(add(4096)) == classes_of(brain)


def test_copies_in_one_run_are_of_the_element_wise_classes() -> None:
    run, turned = (calls_of(operation("aten::copy_", [(512, 512), (512, 512)], "fp16", [strides, None]))[0]
                   for strides in (None, (1, 512)))
    assert classes_of(run).family is Family.ELEMENTWISE and classes_of(turned).family is Family.COPY
    relu = calls_of(operation("aten::relu", [(512, 512)], "fp16"))[0]
    assert sizes_of(run, 1e6) == sizes_of(relu, 1e6)
    for call in (linear(3, 5, 7), add(9), convolution(32, 32), run):  # every curve has a size
        assert {place for _, place, _ in classes_of(call).curves} == set(range(len(sizes_of(call, 1e6))))


def test_slow_traffic_of_products_is_less_where_multiprocessors_are_faster() -> None:
    """Twice the time of the 3090's memory on a device with more cycles a byte is less than twice its memory's."""
    classes = classes_of(convolution(64, 64))
    slow = Corrections({f"memory nvidia {classes.names[0][0]}": 0.7}, {}, frozenset({"conv"}))
    fast = replace(slow, points={name: -value for name, value in slow.points.items()})
    other = device("rtx-4090")
    assert excess_of(GPU) == pytest.approx(1.0, rel=0.01) and 0.4 < excess_of(other) < 0.5
    call = CallTable.of(Family.CONV, [convolution(64, 64)])
    assert slow.factors(call, GPU)[1][0] == pytest.approx(np.exp(0.7))
    assert slow.factors(call, other)[1][0] == pytest.approx(1 + excess_of(other) * (np.exp(0.7) - 1))
    assert fast.factors(call, GPU)[1][0] == fast.factors(call, other)[1][0] == pytest.approx(np.exp(-0.7))


def test_the_slope_of_traffic_is_its_own_difference() -> None:
    sums, excess = np.array([-1.0, -0.2, 0.3, 1.5]), np.array([0.5, 1.0, 0.4, 2.0])
    factor, slope = traffic_factor(sums, excess)
    more = traffic_factor(sums + 1e-6, excess)[0]
    assert slope == pytest.approx(np.log(more / factor) / 1e-6, rel=1e-4)


def test_whole_steps_tell_how_long_each_family_takes() -> None:
    """No step says what its products or its additions took; many steps do."""
    truth = {Family.GEMM: 0.8, Family.ELEMENTWISE: 1.5}
    rng = np.random.default_rng(7)
    measured = steps(rng, 60, truth)
    problem = StepProblem(measured)
    values = problem.fit()
    fitted = problem.corrections(values, widths={"gemm": 0.1}, source="a test")
    for call in (linear(5000, 1024, 2048), add(30 << 20)):
        assert alone(call, fitted) / alone(call) == pytest.approx(truth[call.family], rel=0.06)
    for step in steps(rng, 20, truth):
        predicted = sum(times * alone(call, fitted) for call, times in step.calls.items())
        assert predicted == pytest.approx(step.measured_us, rel=0.06)
    # The fit's own times are those that its corrections price.
    for step, total in zip(measured, problem.times_us(values), strict=True):
        again = sum(times * alone(call, fitted) for call, times in step.calls.items())
        assert again == pytest.approx(total, rel=1e-9)
    # What no step has stays as the formulas have it.
    assert fitted.families == {"gemm", "elementwise"}
    sort = calls_of(operation("aten::sort", [(64, 4096)], "fp32", values=[None, -1, False]))[0]
    assert alone(sort, fitted) == alone(sort)
    assert not np.any(fitted.sums([sort], device("h100-sxm")))
    # Corrections survive being stored.
    back = Corrections.from_json(json.loads(json.dumps(fitted.to_json())))
    calls = [linear(256 * i, 1024, 512) for i in range(1, 9)]
    assert np.allclose(fitted.sums(calls, GPU)[1], back.sums(calls, GPU)[1], atol=0.01)
    assert (back.widths, back.devices, back.source) == ({"gemm": 0.1}, (GPU.name,), "a test")
    with pytest.raises(ValueError, match="1 steps have no device work"):
        StepProblem([*measured[:2], MeasuredStep({add(1 << 20): 1.0}, GPU, 0.0)])


def test_a_second_fit_goes_on_from_the_first_and_an_outlier_hardly_moves_one() -> None:
    """A user's own steps move shipped corrections, and one that agrees with them hardly does."""
    rng = np.random.default_rng(5)
    first = StepProblem(steps(rng, 40, {Family.GEMM: 0.8}))
    shipped = first.corrections(first.fit())
    own = StepProblem(steps(rng, 40, {Family.GEMM: 0.9}), shipped)
    moved = own.corrections(own.fit())
    call = linear(5000, 1024, 2048)
    assert alone(call, shipped) / alone(call) == pytest.approx(0.8, rel=0.06)
    assert alone(call, moved) / alone(call) == pytest.approx(0.9, rel=0.06)
    sound = steps(np.random.default_rng(11), 40, {Family.GEMM: 0.7})
    spoilt = [*sound, MeasuredStep(sound[0].calls, GPU, 20 * sound[0].measured_us)]
    call = linear(5000, 1024, 2048)
    times = []
    for some in (sound, spoilt):
        problem = StepProblem(some)
        times.append(alone(call, problem.corrections(problem.fit())))
    assert times[1] == pytest.approx(times[0], rel=0.05)


@pytest.mark.parametrize(("key", "value"), [
    ("curves", {"memory gemm over m": [0.0] * (KNOTS - 1)}), ("points", {"memory gemm": float("inf")}),
    ("widths", {"gemm": -0.1}), ("points", {"memory gemm": "many"})])
def test_stored_corrections_of_another_form_are_refused(key: str, value: object) -> None:
    good = {"source": "", "devices": [], "widths": {}, "points": {}, "curves": {}}
    with pytest.raises((TypeError, ValueError)):
        Corrections.from_json(good | {key: value})


def test_a_familys_own_corrections_price_it_alike() -> None:
    shipped = shipped_corrections()
    assert shipped is not None
    calls = [linear(4096, 1024, 1024), convolution(256, 1, last=True), add(1 << 24), linear(512, 512, 512), add(9)]
    for call in calls:
        for spec in (GPU, device("h100-sxm"), device("mi300x")):
            mine = shipped.of_family(call.family, spec)
            assert np.array_equal(np.array(shipped.sums([call], spec)), np.array(mine.sums([call], spec)))
    # Grouped calls keep their places.
    assert {tuple(group.rows.tolist()) for group in grouped(calls, GPU)} == {(0, 3), (1,), (2, 4)}


def test_the_source_says_whether_the_devices_own_steps_taught_it() -> None:
    assert heuristic_models(GPU)[Family.CONV].source == Source.HEURISTIC
    assert heuristic_models(device("rtx-5090"))[Family.CONV].source == Source.DATASHEET
    assert heuristic_models(device("l40s"))[Family.CONV].corrections is not None
    for name in ("cpu", "mi300x", "h100-sxm"):
        assert heuristic_models(device(name))[Family.CONV].corrections is None
    # Another device has wider intervals.
    call = convolution(256, 1)
    own, other = (heuristic_models(spec)[Family.CONV].predict([call]) for spec in (GPU, device("rtx-5090")))
    assert own.common is not None and other.common is not None
    for times in (own, other):
        assert times.low_us[0] < times.time_us[0] < times.high_us[0]
        assert 0 < times.common[0] <= 1
    widths = [np.log(times.high_us[0] / times.low_us[0]) * times.common[0] for times in (own, other)]
    assert widths[1] > 1.3 * widths[0]


def test_what_calls_err_by_on_their_own_averages_out_in_a_sum() -> None:
    calls = [add(i << 20) for i in range(1, 65)]
    times = np.full(64, 10.0)

    def width(common: float) -> float:
        low, high = PricedCalls(calls, np.arange(64), times, times / 2, times * 2, np.zeros(64, np.int8),
                                common=np.full(64, common)).total_interval_us()
        return high - low

    assert width(1.0) == pytest.approx(64 * 15.0)
    assert width(0.0) == pytest.approx(8 * 15.0)
    assert width(0.0) < width(0.5) < width(1.0)


def test_widths_are_those_that_errors_were_drawn_with() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet((1.0, 1.0), 4000)
    errors = rng.normal(size=4000) * np.sqrt((shares**2) @ np.square([0.3, 0.05]))
    found = fit_widths(shares, errors, ["conv", "norm"])
    assert found["conv"] == pytest.approx(0.3, rel=0.15)
    assert found["norm"] == pytest.approx(0.05, abs=0.03)


def test_prices_with_corrections_are_sound_for_any_size() -> None:
    calls = [linear(m, k, n) for m in (1, 7, 4096, 1 << 20) for k in (1, 64, 1 << 14) for n in (1, 50257)]
    for spec in (GPU, device("h100-sxm"), device("mi300x"), device("t4")):
        priced = price(calls, spec)
        assert np.isfinite(priced.time_us).all() and (priced.low_us <= priced.time_us).all()
        assert (priced.time_us <= priced.high_us).all()


@pytest.mark.parametrize("name", ["rtx-3090", "rtx-4090", "rtx-5090", "l40s", "h100-sxm", "v100-sxm2-16g", "b200"])
def test_no_correction_makes_a_product_quicker_than_its_device(name: str) -> None:
    """Layouts and types that no table has are corrected by their neighbours', within what the device can do."""
    spec = device(name)
    assert accumulates_at_half(spec) == name.startswith("rtx-")
    limit = 1.1 if accumulates_at_half(spec) else 0.95
    for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8"):
        calls = [calls_of(operation("aten::mm", [(n, n), (n, n)], dtype))[0] for n in (512, 4096, 16384)]
        least = [call.flops / peak_tflops(spec, dtype, matrix=True) / 1e6 / limit for call in calls]
        assert (heuristic_models(spec)[Family.GEMM].predict(calls).time_us >= np.array(least) * (1 - 1e-9)).all()


def test_no_correction_makes_traffic_quicker_than_a_cache() -> None:
    quick = Corrections({"memory nvidia elementwise": -2.0}, {}, frozenset({"elementwise"}))
    call = add(1 << 30)
    assert alone(call, quick) > call.bytes_moved / (2.5 * GPU.memory_bandwidth_gbps * 1e3)
