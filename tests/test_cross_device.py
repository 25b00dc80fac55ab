"""Transfer models: constants that several GPUs teach, used with another GPU's figures."""

from __future__ import annotations

import json
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cross_device import Figures, Measured, Residuals, Size, TransferModel, TransferredModel
from cross_device.choices import chosen, metric_of, recipe_of, recipes
from cross_device.model import leave_one_out, mixed, spread
from cross_device.power import PowerLaw
from cross_device.products import Products, operations
from cross_device.rows import Rows, RowWork, block_threads, row_time
from cross_device.streaming import StreamingExpert
from cross_device.tile_choice import TileChoice, tiles_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_models.device import device
from kernel_models.op_call import Family, OpCall

SOURCES = ("p4", "p100-pcie-16g", "v100-pcie-32g", "t4", "a100-pcie-40g")
EVERY = {name: Figures.of(device(name)) for name in (*SOURCES, "l4", "a100-pcie-80g", "h100-sxm")}
TRUE_STREAM = StreamingExpert(np.log([[0.8, 9.0, 25.0], [0.75, 8.0, 22.0]]))
TRUE_NORM = np.array([5.5, 0.0, 0.3, -0.2, -0.5, 0.0, 0.5, *np.log([0.8, 12.0, 30.0])])


def known(width: float = 0.1) -> Residuals:
    """Residuals of one width everywhere, for tests that look at something else."""
    errors = {size: [np.full(9, width)] for size in Size}
    return Residuals(errors, errors)


def elementwise_dims(count: int = 120, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    elements = np.round(10 ** generator.uniform(4, 8.5, count))
    inputs = generator.integers(1, 3, count)
    return np.stack([elements, inputs, elements * inputs], 1).astype(float)


def row_dims(count: int = 150, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.round(np.stack([10 ** generator.uniform(3, 5, count), 10 ** generator.uniform(2.5, 3.9, count)], 1))


def product_dims(count: int = 600, seed: int = 0, largest: float = 3.5) -> np.ndarray:
    generator = np.random.default_rng(seed)
    sizes = np.round(10 ** generator.uniform(2, largest, (count, 3)))
    return np.concatenate([np.ones((count, 1)), sizes], 1)


def products_on(figures: Figures, law: PowerLaw, dims: np.ndarray) -> Measured:
    """Products at 90% of the law's rate with tiles of 128×64, and the kernels' names."""
    blocks = np.ceil(dims[:, 1] / 64) * np.ceil(dims[:, 2] / 128)
    time = law.duration_us(figures, 2 * blocks * 128 * 64 * dims[:, 3]) / 0.9 + 20
    return Measured(figures, dims, time, np.full(len(dims), "ampere_sgemm_128x64_tn", object))


@pytest.fixture(scope="module")
def streaming_model() -> TransferModel:
    dims = elementwise_dims()
    return TransferModel(Family.ELEMENTWISE).fit(
        [Measured(EVERY[name], dims, TRUE_STREAM.time_us(EVERY[name], dims)) for name in SOURCES])


def test_what_all_sources_agree_on_holds_on_every_other_device(streaming_model: TransferModel) -> None:
    dims = elementwise_dims(seed=1)
    for name in ("l4", "a100-pcie-80g", "h100-sxm"):
        times = streaming_model.on(EVERY[name]).predict_dims(dims)
        np.testing.assert_allclose(times.time_us, TRUE_STREAM.time_us(EVERY[name], dims), rtol=0.01)
        assert (times.low_us < times.time_us).all() and (times.time_us < times.high_us).all()


def test_rows_recover_their_formula() -> None:
    dims = row_dims()
    data = [Measured(EVERY[name], dims, row_time(RowWork.NORM, TRUE_NORM, EVERY[name], dims[:, 0], dims[:, 1]))
            for name in SOURCES]
    model = TransferModel(Family.NORM, recipe=Rows(norm=True, drawn=1.0)).fit(data)
    new = row_dims(seed=3)
    truth = row_time(RowWork.NORM, TRUE_NORM, EVERY["l4"], new[:, 0], new[:, 1])
    large = new.prod(1) > 4e6
    error = np.abs(model.on(EVERY["l4"]).predict_dims(new).time_us / truth - 1)[large]
    assert large.sum() > 50 and error.mean() < 0.03


def test_products_recover_a_power_limited_device() -> None:
    law = PowerLaw(energy_pj=20, beta=0.5, boost=0.2, tau_us=2000, static=0.15, used=0.9)
    data = [products_on(EVERY[name], law, product_dims(900)) for name in SOURCES]
    recipe = Products(law=replace(law, energy_pj=12.0, used=0.8))
    model = TransferModel(Family.GEMM, recipe=recipe).fit(data, residuals=known())
    new = product_dims(200, seed=5)
    truth = products_on(EVERY["l4"], law, new)
    large = operations(new) > 1e9
    error = np.abs(model.on(EVERY["l4"]).predict_dims(new).time_us / truth.time_us - 1)[large]
    # Without the power law L4 would be taken for three times as fast as it is.
    assert (operations(new) / 1e6 / truth.time_us).max() < 0.6 * device("l4").peak_tflops("fp32")
    assert error.mean() < 0.12


def test_a_left_out_device_is_not_seen() -> None:
    dims = elementwise_dims()
    data = [Measured(EVERY[name], dims, TRUE_STREAM.time_us(EVERY[name], dims)) for name in SOURCES]
    recipe, metric = recipe_of(Family.ELEMENTWISE), metric_of(Family.ELEMENTWISE)
    slower = [replace(data[0], time_us=3 * data[0].time_us), *data[1:]]
    plain, changed = (leave_one_out(recipe, [metric], entries)[0] for entries in (data, slower))
    np.testing.assert_allclose(changed[0], plain[0] - np.log(3))
    # With its weight spread by distance, the changed device does move the others.
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(changed[1:], plain[1:], strict=True))


@pytest.mark.parametrize(("family", "batched"), [
    (Family.ELEMENTWISE, False), (Family.NORM, False), (Family.SOFTMAX, False), (Family.GEMM, False),
    (Family.GEMM, True)])
def test_weights_prefer_near_devices_and_the_device_itself(family: Family, batched: bool) -> None:
    sources, metric = [EVERY[name] for name in SOURCES], metric_of(family, batched)
    # The same chip on another board: nothing else is asked.
    assert metric.weights(EVERY["a100-pcie-80g"], sources)[SOURCES.index("a100-pcie-40g")] == pytest.approx(1)
    assert (metric.weights(EVERY["l4"], sources) > 1e-4).all()
    for i, source in enumerate(sources):
        weights = metric.weights(source, sources)
        assert weights.sum() == pytest.approx(1) and weights[i] > 0.999
    assert chosen(family, batched).recipe in recipes(family)


def test_an_interval_widens_with_distance_and_for_calls_the_host_decides(streaming_model: TransferModel) -> None:
    streaming_model.own_spread_ = dict.fromkeys(Size, 0.05)
    streaming_model.far_spread_ = {Size.SMALL: 0.5, Size.LARGE: 0.3, Size.BEYOND: 0.4}
    on_source, near, far = (streaming_model.on(EVERY[n]).spreads for n in ("a100-pcie-40g", "a100-pcie-80g", "l4"))
    assert on_source == dict.fromkeys(Size, pytest.approx(0.05))
    for size in (Size.LARGE, Size.BEYOND):
        assert on_source[size] < near[size] < far[size] <= streaming_model.far_spread_[size]
    # What a host needs for a launch is no figure of its GPU, however near that is to one that was measured.
    assert near[Size.SMALL] == far[Size.SMALL] == 0.5
    elements = np.array([1e4, 1e8, 10 * streaming_model.largest_])
    times = streaming_model.on(EVERY["l4"]).predict_dims(np.stack([elements, np.ones(3), elements], 1))
    for ratio in (times.high_us / times.time_us, times.time_us / times.low_us):
        np.testing.assert_allclose(np.log(ratio), [far[size] for size in (Size.SMALL, Size.LARGE, Size.BEYOND)])


def test_a_width_for_other_devices_holds_a_device_left_out_of_it() -> None:
    random = np.random.default_rng(0)
    # Errors of one device are much alike: 80% of the others' would hold fewer of its own.
    devices = [random.normal(offset, 0.02, 400) for offset in (-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3)]
    assert spread(devices, elsewhere=True) > 1.03 * spread(devices)
    # Where devices are alike the others' width holds a device's own calls as it is.
    alike = [random.normal(0, 0.1, 4000) for _ in devices]
    assert spread(alike, elsewhere=True) == pytest.approx(spread(alike), rel=0.05)
    assert spread(alike) == pytest.approx(0.128, rel=0.05)
    assert spread([np.zeros(5)], elsewhere=True) > 0 and spread([np.array([])]) > 0


def test_residuals_are_of_calls_that_were_not_fitted() -> None:
    dims = elementwise_dims(200)
    random = np.random.default_rng(0)
    data = [Measured(EVERY[name], dims, TRUE_STREAM.time_us(EVERY[name], dims) * np.exp(random.normal(0, 0.05, 200)))
            for name in SOURCES]
    left = Residuals.of(recipe_of(Family.ELEMENTWISE), metric_of(Family.ELEMENTWISE), data)
    for found in (left.own, left.far):
        assert [len(found[size]) for size in Size] == [len(SOURCES)] * 3
        assert 0.03 < np.std(np.concatenate(found[Size.LARGE])) < 0.08
    assert sum(len(e) for size in (Size.SMALL, Size.LARGE) for e in left.own[size]) == len(SOURCES) * 100
    assert sum(len(e) for size in (Size.SMALL, Size.LARGE) for e in left.far[size]) == len(SOURCES) * 200


def test_a_softmax_block_has_the_threads_that_the_launches_show() -> None:
    # Blocks recorded with softmax kernels of PyTorch; longer rows take no more than 512 threads (SoftMax_getBlockSize).
    columns = np.array([1025, 1031, 1033, 2053, 2065, 4094, 4096, 16384], float)
    np.testing.assert_array_equal(block_threads(columns), [128, 128, 256, 256, 512, 512, 512, 512])


@settings(max_examples=60, deadline=None)
@given(elements=st.integers(1, 10**10), inputs=st.integers(1, 3), wide=st.integers(32, 20_000),
       name=st.sampled_from(sorted(EVERY)))
def test_times_are_positive_monotone_and_continuous(elements: int, inputs: int, wide: int, name: str) -> None:
    sizes = np.array([elements, elements * 1.001, elements * 2])
    time = TRUE_STREAM.time_us(EVERY[name], np.stack([sizes, np.full(3, inputs), sizes * inputs], 1).astype(float))
    assert 0 < time[0] <= time[1] <= time[2] and time[1] / time[0] < 1.002
    rows = max(1, min(elements, 10**6))
    least = row_time(RowWork.BLOCK, TRUE_NORM, EVERY[name], np.ones(1), np.full(1, 2048.0))
    assert least[0] == pytest.approx(30.0, rel=0.01)  # a launch
    for work in (RowWork.NORM, RowWork.BLOCK):
        time = row_time(work, TRUE_NORM, EVERY[name], np.array([rows, 2.0 * rows]), np.full(2, float(wide)))
        assert 0 < time[0] <= time[1]
    time = row_time(RowWork.NORM, TRUE_NORM, EVERY[name], np.full(3, float(rows)), wide * np.array([1, 1.001, 2]))
    assert time[0] <= time[1] <= time[2] and time[1] / time[0] < 1.01


@settings(max_examples=60, deadline=None)
@given(log_operations=st.floats(3, 15), name=st.sampled_from(sorted(EVERY)), beta=st.sampled_from([0.0, 0.5, 1.0]))
def test_more_operations_take_longer_and_never_beat_the_peak(log_operations: float, name: str, beta: float) -> None:
    law, figures = PowerLaw(beta=beta), EVERY[name]
    one, more = law.duration_us(figures, 10 ** np.array([log_operations, log_operations + 0.01]))
    assert 0 < one < more
    peak = 2e-6 * figures.lanes * figures.clock_mhz
    assert 10 ** log_operations / 1e6 / one <= peak * (1 + 1e-9)
    hotter = law.duration_us(replace(figures, power_w=2 * figures.power_w), np.array([10 ** log_operations]))[0]
    assert hotter <= one


def test_tiles_come_from_kernel_names() -> None:
    names = ["ampere_sgemm_128x64_tn", "volta_sgemm_32x32_sliced1x4_nn", "gemv2T_kernel", "sgemm_32x32x32_NN"]
    np.testing.assert_array_equal(tiles_of(np.array(names, object)), [[128, 64], [32, 32], [np.nan, np.nan], [32, 32]])


def test_tile_choice_learns_a_rule() -> None:
    dims = product_dims(800)
    tiles = np.where(dims[:, 1:2] > 700, [[128.0, 128.0]], [[128.0, 64.0]])
    choice = TileChoice.fit(EVERY["t4"], dims, tiles)
    new = product_dims(300, seed=9)
    clear = np.abs(np.log(new[:, 1] / 700)) > 0.1
    expected = np.where(new[:, 1:2] > 700, [[128.0, 128.0]], [[128.0, 64.0]])
    assert (choice.predict(EVERY["t4"], new) == expected).all(1)[clear].mean() > 0.98


def test_state_is_plain_and_predicts_the_same() -> None:
    dims = product_dims(300)
    data = [products_on(EVERY[name], PowerLaw(), dims) for name in SOURCES]
    model = TransferModel(Family.GEMM).fit(data, residuals=known()).on(device("l4"))
    plain, arrays = model.state()
    assert all(isinstance(value, np.ndarray) and value.dtype.kind in "fiu" for value in arrays.values())
    again = TransferredModel.from_state(json.loads(json.dumps(plain)), arrays)
    np.testing.assert_array_equal(again.predict_dims(dims).high_us, model.predict_dims(dims).high_us)
    assert (model.predict_dims(dims).time_us > 0).all()


def test_calls_outside_the_measurements_are_not_covered(streaming_model: TransferModel) -> None:
    model = streaming_model.on(device("l4"))
    calls = [OpCall(Family.ELEMENTWISE, "add", (1000, 2, 2000), dtype, layout)
             for dtype, layout in (("fp32", ""), ("fp16", ""), ("fp32", "strided"))]
    calls.append(OpCall(Family.SOFTMAX, "softmax", (8, 8, 1), "fp32"))
    assert model.covers(calls).tolist() == [True, False, False, False]
    assert len(model.predict(calls[:1]).time_us) == 1
    with pytest.raises(ValueError, match="three devices"):
        dims = elementwise_dims(20)
        TransferModel(Family.ELEMENTWISE).fit([Measured(EVERY[n], dims, np.ones(20)) for n in SOURCES[:2]])


@pytest.fixture(scope="module")
def neusight() -> ModuleType:
    """The benchmark's reader of NeuSight's measurements; skips where these are absent."""
    import neusight_data

    if not (neusight_data.DATA / "kernels" / "neusight_fp32.parquet").exists():
        pytest.skip(f"{neusight_data.DATA / 'kernels'} is absent: set FORETRACE_DATA to the folder that holds kernels/")
    return neusight_data


@pytest.fixture(scope="module")
def train(neusight: ModuleType) -> Any:
    """Train rows of a group on every train GPU, a few of them."""
    table = neusight.read("train")

    def of(name: str, rows: int) -> list[Measured]:
        group, generator = group_of(neusight, name), np.random.default_rng(0)
        found = (neusight.measured(table, group, gpu) for gpu in neusight.TRAIN_GPUS)
        return [data.rows(generator.permutation(len(data))[:rows]) for data in found]

    return of


def group_of(neusight: ModuleType, name: str) -> Any:
    return next(group for group in neusight.GROUPS if group.name == name)


def mean_error(errors: np.ndarray) -> float:
    return float(100 * np.abs(np.expm1(errors)).mean())


@pytest.mark.real_traces
@pytest.mark.parametrize(("name", "family", "limit"), [
    # Mean over left-out train GPUs of all large rows: 6.8, 11.1 and 12.1 (benchmarks/neusight_protocol.py).
    ("elementwise", Family.ELEMENTWISE, 8.0),  # all of them, on GPUs never fitted, are tested below
    *(pytest.param(name, family, 15.0, marks=pytest.mark.slow)
      for name, family in (("softmax", Family.SOFTMAX), ("layer norm", Family.NORM)))])
def test_left_out_gpus_of_memory_bound_work(train: Any, name: str, family: Family, limit: float) -> None:
    errors = leave_one_out(recipe_of(family), [metric_of(family)], train(name, 300))[0]
    assert np.mean([mean_error(e) for e in errors]) < limit


@pytest.mark.slow  # products of left-out GPUs by the power law: the tests of recovered devices
@pytest.mark.real_traces
def test_a_left_out_a100_and_t4_of_products(train: Any) -> None:
    # All rows: 7.9 and 13.8; the T4 runs at half its boost clock there, which only the power law tells.
    data = train("FC", 1200)
    recipe = recipe_of(Family.GEMM)
    for left, limit in ((4, 13.0), (3, 20.0)):
        others = [entry for i, entry in enumerate(data) if i != left]
        large = data[left].rows(recipe.large(data[left]))
        time = mixed(metric_of(Family.GEMM), recipe.fit(others), [o.figures for o in others], large.figures, large.dims)
        assert mean_error(np.log(time / large.time_us)) < limit


@pytest.mark.real_traces
def test_the_contraction_is_n_and_the_output_width_k(neusight: ModuleType, train: Any) -> None:
    # Grids of tiles along n and m say so; swapped, no kernel's grid would fit.
    table = neusight.read("train")
    rows = table[(table.OPName == "bmm") & (table.Device == "NVIDIA A100-PCIE-40GB")].head(3000)
    dims, tiles = neusight.sizes(rows, Family.GEMM), tiles_of(rows["Kernel Name"].to_numpy(object))
    along_n, along_m = np.ceil(dims[:, 2] / tiles[:, 0]), np.ceil(dims[:, 1] / tiles[:, 1])
    assert ((along_n == rows["Grid x"]) & (along_m == rows["Grid y"])).mean() > 0.95


@pytest.mark.real_traces
def test_gpus_never_fitted(neusight: ModuleType, train: Any) -> None:
    # NeuSight: 19.3% and 56.7%. With all train rows: 3.3% and 12.1%.
    test = neusight.read("test")
    for name, family, limit in (("elementwise", Family.ELEMENTWISE, 6.0), ("layer norm", Family.NORM, 18.0)):
        group = group_of(neusight, name)
        model = TransferModel(family).fit(train(name, 700), residuals=known(0.2))
        errors = []
        for gpu in neusight.UNSEEN_GPUS:
            data = neusight.measured(test, group, gpu)
            errors.append(np.log(model.on(data.figures).predict_dims(data.dims).time_us / data.time_us))
        assert mean_error(np.concatenate(errors)) < limit
