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
    names = dict(classes_of(convolution(64, 64, last=True)).names)
    assert names["conv"] == 0 and names["conv/forward/depthwise"] == 1 and names["conv/forward/depthwise/nhwc"] == 2
    assert "conv/spatial" in dict(classes_of(convolution(64, 1)).names)
    assert "conv/grouped" in dict(classes_of(convolution(64, 2)).names)


def test_alignment_is_a_class_of_products() -> None:
    aligned, odd = (dict(classes_of(linear(256, 1024, out)).names) for out in (50304, 50257))
    assert not any("not aligned" in name for name in aligned)
    assert {f"gemm/fp16/n not aligned by {number}" for number in (2, 4, 8, 16, 32, 64)} <= set(odd)
    # Rows of a linear layer's operands and result are k and n long: how many there are changes no access.
    assert set(dict(classes_of(linear(255, 1024, 50304)).names)) == set(aligned)


def test_products_are_of_the_type_that_is_computed() -> None:
    """A P4 multiplies 16-bit numbers in fp32, and what steps taught of matrix units does not hold there."""
    half = linear(512, 512, 512)
    assert "gemm/mm/fp16" in dict(classes_of(half).names)
    assert "gemm/mm/fp32" in dict(classes_of(half, device("p4")).names)


def test_both_16_bit_types_are_one_but_of_products() -> None:
    half, brain = (calls_of(operation("aten::add", [(4096,), (4096,)], dtype))[0] for dtype in ("fp16", "bf16"))
    assert classes_of(half) == classes_of(brain)


def test_copies_in_one_run_are_of_the_element_wise_classes() -> None:
    def copied(strides: list[tuple[int, ...] | None]) -> OpCall:
        return calls_of(operation("aten::copy_", [(512, 512), (512, 512)], "fp16", strides))[0]

    run, turned = copied([None, None]), copied([(1, 512), None])
    assert classes_of(run).family is Family.ELEMENTWISE and classes_of(turned).family is Family.COPY
    relu = calls_of(operation("aten::relu", [(512, 512)], "fp16"))[0]
    assert sizes_of(run, 1e6) == sizes_of(relu, 1e6)


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


def test_families_that_nothing_measured_keep_their_times() -> None:
    problem = StepProblem(steps(np.random.default_rng(4), 20, {Family.GEMM: 1.6, Family.ELEMENTWISE: 1.6}))
    fitted = problem.corrections(problem.fit())
    assert fitted.families == {"gemm", "elementwise"}
    sort = calls_of(operation("aten::sort", [(64, 4096)], "fp32", values=[None, -1, False]))[0]
    assert alone(sort, fitted) == alone(sort)


def test_every_curve_has_a_size() -> None:
    for call in (linear(3, 5, 7), add(9), convolution(32, 32)):
        sizes = sizes_of(call, 1e6)
        assert {place for _, place, _ in classes_of(call).curves} == set(range(len(sizes)))
        assert min(sizes) >= 0


def test_whole_steps_tell_how_long_each_family_takes() -> None:
    """No step says what its products or its additions took; many steps do."""
    truth = {Family.GEMM: 0.8, Family.ELEMENTWISE: 1.5}
    rng = np.random.default_rng(7)
    problem = StepProblem(steps(rng, 60, truth))
    fitted = problem.corrections(problem.fit())
    for call in (linear(5000, 1024, 2048), add(30 << 20)):
        assert alone(call, fitted) / alone(call) == pytest.approx(truth[call.family], rel=0.06)
    unseen = steps(rng, 20, truth)
    for step in unseen:
        predicted = sum(times * alone(call, fitted) for call, times in step.calls.items())
        assert predicted == pytest.approx(step.measured_us, rel=0.06)


def test_what_no_step_has_stays_as_the_formulas_have_it() -> None:
    problem = StepProblem(steps(np.random.default_rng(1), 10, {Family.GEMM: 0.5}))
    fitted = problem.corrections(problem.fit())
    call = calls_of(operation("aten::_softmax", [(512, 512), None, None], "fp32", values=[None, -1, False]))[0]
    compute, memory, fixed = fitted.sums([call], device("h100-sxm"))
    assert compute[0] == memory[0] == fixed[0] == 0


def test_a_fit_prices_as_its_corrections_do() -> None:
    measured = steps(np.random.default_rng(3), 12, {Family.ELEMENTWISE: 2.0})
    problem = StepProblem(measured)
    values = problem.fit()
    fitted = problem.corrections(values)
    for step, total in zip(measured, problem.times_us(values), strict=True):
        again = sum(times * alone(call, fitted) for call, times in step.calls.items())
        assert again == pytest.approx(total, rel=1e-9)


def test_a_second_fit_goes_on_from_the_first() -> None:
    """A user's own steps move shipped corrections, and one that agrees with them hardly does."""
    rng = np.random.default_rng(5)
    first = StepProblem(steps(rng, 40, {Family.GEMM: 0.8}))
    shipped = first.corrections(first.fit())
    own = StepProblem(steps(rng, 40, {Family.GEMM: 0.9}), shipped)
    moved = own.corrections(own.fit())
    call = linear(5000, 1024, 2048)
    assert alone(call, shipped) / alone(call) == pytest.approx(0.8, rel=0.06)
    assert alone(call, moved) / alone(call) == pytest.approx(0.9, rel=0.06)


def test_an_outlier_hardly_moves_a_fit() -> None:
    sound = steps(np.random.default_rng(11), 40, {Family.GEMM: 0.7})
    spoilt = [*sound, MeasuredStep(sound[0].calls, GPU, 20 * sound[0].measured_us)]
    call = linear(5000, 1024, 2048)
    times = []
    for some in (sound, spoilt):
        problem = StepProblem(some)
        times.append(alone(call, problem.corrections(problem.fit())))
    assert times[1] == pytest.approx(times[0], rel=0.05)


def test_corrections_survive_being_stored() -> None:
    problem = StepProblem(steps(np.random.default_rng(2), 10, {Family.GEMM: 0.5}))
    fitted = problem.corrections(problem.fit(), widths={"gemm": 0.1}, source="a test")
    back = Corrections.from_json(json.loads(json.dumps(fitted.to_json())))
    calls = [linear(256 * i, 1024, 512) for i in range(1, 9)]
    assert np.allclose(fitted.sums(calls, GPU)[1], back.sums(calls, GPU)[1], atol=0.01)
    assert (back.widths, back.devices, back.source) == ({"gemm": 0.1}, (GPU.name,), "a test")


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
    for call in (linear(4096, 1024, 1024), convolution(256, 1, last=True), add(1 << 24)):
        for spec in (GPU, device("h100-sxm"), device("mi300x")):
            mine = shipped.of_family(call.family, spec)
            assert np.array_equal(np.array(shipped.sums([call], spec)), np.array(mine.sums([call], spec)))


def test_a_model_with_corrections_survives_being_stored() -> None:
    model = heuristic_models(GPU)[Family.CONV]
    back = RooflineModel.from_state(json.loads(json.dumps(model.state()[0])), {})
    call = convolution(256, 1, last=True)
    assert back.predict([call]).time_us[0] == pytest.approx(model.predict([call]).time_us[0], rel=0.01)
    assert back.source == model.source


def test_the_source_says_whether_the_devices_own_steps_taught_it() -> None:
    assert heuristic_models(GPU)[Family.CONV].source == Source.HEURISTIC
    assert heuristic_models(device("rtx-5090"))[Family.CONV].source == Source.DATASHEET
    assert heuristic_models(device("l40s"))[Family.CONV].corrections is not None
    for name in ("cpu", "mi300x", "h100-sxm"):
        assert heuristic_models(device(name))[Family.CONV].corrections is None


def test_another_device_has_wider_intervals() -> None:
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


def test_geforce_boards_accumulate_at_half_rate() -> None:
    assert all(accumulates_at_half(device(name)) for name in ("rtx-3090", "rtx-4090", "rtx-5090"))
    assert not any(accumulates_at_half(device(name)) for name in ("rtx-a6000", "l40s", "a100-sxm-80g", "h100-sxm"))


def test_widths_are_those_that_errors_were_drawn_with() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet((1.0, 1.0), 4000)
    errors = rng.normal(size=4000) * np.sqrt((shares**2) @ np.square([0.3, 0.05]))
    found = fit_widths(shares, errors, ["conv", "norm"])
    assert found["conv"] == pytest.approx(0.3, rel=0.15)
    assert found["norm"] == pytest.approx(0.05, abs=0.03)


def test_grouped_calls_keep_their_places() -> None:
    calls = [linear(256, 512, 512), add(5 << 20), linear(512, 512, 512), add(7 << 20)]
    found = {tuple(group.rows.tolist()) for group in grouped(calls, GPU)}
    assert found == {(0, 2), (1, 3)}


def test_prices_with_corrections_are_sound_for_any_size() -> None:
    calls = [linear(m, k, n) for m in (1, 7, 4096, 1 << 20) for k in (1, 64, 1 << 14) for n in (1, 50257)]
    for spec in (GPU, device("h100-sxm"), device("mi300x"), device("t4")):
        priced = price(calls, spec)
        assert np.isfinite(priced.time_us).all() and (priced.low_us <= priced.time_us).all()
        assert (priced.time_us <= priced.high_us).all()


def test_a_step_without_device_work_is_refused() -> None:
    with pytest.raises(ValueError, match="1 steps have no device work"):
        StepProblem([*steps(np.random.default_rng(0), 2, {}), MeasuredStep({add(1 << 20): 1.0}, GPU, 0.0)])


@pytest.mark.parametrize("name", ["rtx-3090", "rtx-4090", "rtx-5090", "h100-sxm", "a100-sxm-80g", "v100-sxm2-16g",
                                  "b200"])
def test_no_correction_makes_a_product_quicker_than_its_device(name: str) -> None:
    """Layouts and types that no table has are corrected by their neighbours', within what the device can do."""
    spec = device(name)
    limit = 1.1 if accumulates_at_half(spec) else 0.95
    for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8"):
        calls = [calls_of(operation("aten::mm", [(n, n), (n, n)], dtype))[0] for n in (512, 4096, 16384)]
        least = [call.flops / peak_tflops(spec, dtype, matrix=True) / 1e6 / limit for call in calls]
        assert (heuristic_models(spec)[Family.GEMM].predict(calls).time_us >= np.array(least) * (1 - 1e-9)).all()


def test_no_correction_makes_traffic_quicker_than_a_cache() -> None:
    quick = Corrections({"memory nvidia elementwise": -2.0}, {}, frozenset({"elementwise"}))
    call = add(1 << 30)
    assert alone(call, quick) > call.bytes_moved / (2.5 * GPU.memory_bandwidth_gbps * 1e3)
