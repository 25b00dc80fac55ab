"""Learned models: bins, trees beside scikit-learn's, features on paper, intervals, coverage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from learned_support import QUICK, gemm_samples
from sklearn.ensemble import HistGradientBoostingRegressor

from kernel_models.datasets.samples import Samples
from kernel_models.device import device
from kernel_models.families.attention import attention
from kernel_models.families.gemm import gemm
from kernel_models.families.reduction import norm
from kernel_models.learned.boosted import BoostedModel, Intervals
from kernel_models.learned.boosting import MOST_BINS, Boosting, Member, fit_trees
from kernel_models.learned.features import RECIPES, Figures, Variants, attention_work, gemm_baseline_us, gemm_work
from kernel_models.learned.fit import Problem
from kernel_models.learned.neighbours import Neighbours
from kernel_models.learned.trees import MOST_EDGES, Bins, Trees
from kernel_models.op_call import Family
from kernel_models.scores import errors_of

H200 = device("h200-sxm")


def features(rows: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    found = random.normal(size=(rows, 6)).astype(np.float32)
    found[:, 1] = np.round(found[:, 1])
    found[:, 2] = 7.0
    return found


def target(x: np.ndarray) -> np.ndarray:
    return (x[:, 0] * x[:, 1] + np.sin(2 * x[:, 3]) + (x[:, 4] > 0.2)).astype(np.float64)


def test_codes_count_the_edges_below() -> None:
    x = features(3000)
    bins = Bins.of(x)
    probe = np.vstack([x[:500], features(500, 1) * 3, np.repeat(bins.edges[:1], 6)[None]]).astype(np.float32)
    codes = bins.codes(probe)
    for f in range(6):
        edges = bins.edges[bins.start[f]:bins.start[f + 1]]
        assert (np.diff(edges) > 0).all() and len(edges) <= MOST_EDGES
        assert (codes[:, f] == np.searchsorted(edges, probe[:, f], side="left")).all()
    assert bins.start[3] == bins.start[2]  # a constant feature has no edge
    x = np.array([[1.0], [np.nextafter(np.float32(1), np.float32(2))], [3.0]], np.float32)
    assert Bins.of(x).codes(x)[:, 0].tolist() == [0, 1, 2]


def test_trees_say_what_scikit_learn_says() -> None:
    x, probe = features(2000), features(777, 5)
    ours = fit_trees(x, target(x), Boosting(80, 0.1, 31, 0.5, 5))
    codes = [ours.bins.codes(rows) for rows in (x, probe)]
    theirs = HistGradientBoostingRegressor(max_iter=80, learning_rate=0.1, max_features=0.5, min_samples_leaf=5,
                                           max_bins=MOST_BINS, early_stopping=False, random_state=0)
    theirs.fit(codes[0], target(x))
    for rows, code in zip((x, probe), codes, strict=True):
        assert np.allclose(ours.predict(rows), theirs.predict(code), atol=1e-5)
    assert np.abs(ours.predict(x) - target(x)).mean() < 0.5 * np.abs(target(x)).mean()


def test_trees_are_limited_and_the_same_for_the_same_seed() -> None:
    x = features(500)
    trees = fit_trees(x, target(x), Boosting(7, 0.2, 8, 0.5, 40, depth=2))
    assert len(trees.depth) == 7 and trees.depth.max() == 2
    assert (np.diff(trees.start) <= 7).all()  # four leaves of two levels
    one = fit_trees(x, target(x), Boosting(1, 1.0, 63, 1.0, 40))
    values, count = np.unique(one.predict(x), return_counts=True)
    assert len(values) > 2 and count.min() >= 40
    x = features(500)
    how = Boosting(20, 0.2, 8, 0.4, 5)
    again, other = (fit_trees(x, target(x), how, seed=seed) for seed in (0, 1))
    assert (fit_trees(x, target(x), how).words == again.words).all()
    assert len(other.words) != len(again.words) or (other.words != again.words).any()
    assert set((again.words[again.values == 0] & 0xFF).tolist()) == {0, 1, 3, 4, 5}  # all but the constant one


def test_trees_that_see_some_features_are_averaged_with_those_that_see_all() -> None:
    x = features(500)
    how = Boosting(20, 0.2, 8, 1.0, 5)
    two = replace(how, members=(Member(share=0.5, weight=0.25), Member(neighbours=True, weight=0.75)))
    few, every, both = (fit_trees(x[:, :3], target(x), replace(how, iterations=10)), fit_trees(x, target(x), how),
                        fit_trees(x, target(x), two, plain=3))
    assert len(both.depth) == 30
    assert np.allclose(both.predict(x), few.predict(x[:, :3]) / 4 + every.predict(x) * 3 / 4, atol=1e-5)


def test_trees_survive_storing_and_any_number_of_rows() -> None:
    x = features(500)
    trees = fit_trees(x, target(x), Boosting(20, 0.2, 8, 1.0, 5))
    again = Trees.from_arrays(trees.arrays())
    for rows in (0, 1, 15, 16, 17, 500):
        assert (again.predict(x[:rows]) == trees.predict(x)[:rows]).all()
    with pytest.raises(ValueError, match="5 features"):
        trees.predict(x[:, :5])


@pytest.mark.parametrize("name, place, value", [
    ("words", 0, 0xFFFF0000), ("words", 0, 0x000100FE), ("start", 1, 0), ("edge_start", 1, 10**6), ("depth", None, 0),
    ("values", 0, np.nan), ("edges", None, 0)])
def test_damaged_trees_are_refused(name: str, place: int | None, value: float) -> None:
    x = features(500)
    arrays = fit_trees(x, target(x), Boosting(5, 0.2, 8, 1.0, 5)).arrays()
    changed = arrays[name].copy()
    if place is None:
        changed = changed[:-1]
    else:
        changed[place] = value
    with pytest.raises(ValueError):
        Trees.from_arrays({**arrays, name: changed})


@pytest.mark.parametrize("dtype", ["fp32", "fp8"])
def test_gemm_work_is_the_calls_own(dtype: str) -> None:
    calls = [next(gemm(b, m, n, k, dtype, "nt", out_dtype="bf16" if dtype == "fp8" else ""))
             for b, m, n, k in ((8, 256, 33, 5), (1, 1, 1, 1))]
    variants = Variants.of(Family.GEMM, calls)
    columns = variants.columns(calls, work=True)
    _, flops, a, b, out, baseline = gemm_work(columns, Figures.of(H200, variants.known))
    assert flops == pytest.approx([call.flops for call in calls])
    assert a + b + out == pytest.approx([call.bytes_moved for call in calls])
    assert (baseline > 2.0).all()


def test_attention_work_is_the_calls_own() -> None:
    shapes = [(kind, causal, window, q, kv) for kind in ("flash_forward", "flash_backward") for causal in (True, False)
              for window in (0, 1, 100, 4096) for q, kv in ((512, 512), (1, 777), (128, 1000))]
    calls = [next(attention(kind, 2, 8, 2, q, kv, 128, 64, "bf16", causal=causal, window=window))
             for kind, causal, window, q, kv in shapes]
    variants = Variants.of(Family.ATTENTION, calls)
    columns = variants.columns(calls, work=True)
    pairs, flops, _, _ = attention_work(columns, Figures.of(H200, variants.known))
    assert flops == pytest.approx([call.flops for call in calls])
    assert (pairs >= 1).all()


def test_each_recipe_gives_finite_numbers_at_the_smallest_sizes() -> None:
    for call, start in ((next(gemm(1, 1, 1, 1, "bf16", "nt")), "gemm"),
                        (next(attention("flash_forward", 1, 1, 1, 1, 1, 1, 1, "bf16")), "attention"),
                        (next(norm("layer_norm", 1, 1, "bf16", 1)), "streaming")):
        variants = Variants.of(call.family, [call])
        for recipe in (recipe for name, recipe in RECIPES.items() if name.startswith(start)):
            found, baseline = recipe.describe(variants.columns([call], work=True), Figures.of(H200, variants.known))
            assert np.isfinite(found).all() and baseline[0] > 0


def test_variants_look_through_what_does_not_matter() -> None:
    known = next(gemm(1, 64, 64, 64, "bf16", "nt"))
    variants = Variants.of(Family.GEMM, [known])
    asked = [next(gemm(1, 64, 64, 64, "bf16", "nt", added="bias")), next(gemm(1, 64, 64, 64, "fp16", "nt")),
             next(gemm(1, 64, 64, 64, "bf16", "nn")), next(gemm(1, 64, 64, 64, "fp32", "nt")),
             next(gemm(1, 64, 64, 64, "bf16", "nt", added="accumulate"))]
    assert variants.columns(asked, work=False).code.tolist() == [0, 0, -1, -1, -1]


def test_intervals_cover_four_fifths() -> None:
    random = np.random.default_rng(0)
    predicted = np.exp(random.uniform(0, 8, 4000))
    spread = np.where(predicted < 50, 0.2, 0.02)
    measured = predicted * np.exp(random.normal(0, spread))
    intervals = Intervals.of(predicted[:2000], measured[:2000])
    low, high = intervals.around(predicted[2000:])
    inside = (low <= measured[2000:]) & (measured[2000:] <= high)
    assert 0.77 < inside.mean() < 0.85
    assert (high / low)[predicted[2000:] < 10].mean() > 3 * (high / low)[predicted[2000:] > 1000].mean() - 2
    alone = Intervals.of(np.array([5.0]), np.array([6.0]))
    assert alone.around(np.array([5.0]))[1] == pytest.approx(6.0)


@pytest.fixture(scope="module")
def law() -> tuple[Problem, BoostedModel]:
    problem = Problem.of(gemm_samples(), H200)
    predicted, done, _ = problem.out_of_fold(QUICK, folds=2)
    return problem, problem.model(QUICK, Intervals.of(predicted[done], problem.measured_us[done]))


def test_a_law_of_waves_is_learned(law: tuple[Problem, BoostedModel]) -> None:
    fresh = gemm_samples(600, 0.0, seed=9)
    times = law[1].predict(fresh.calls)
    errors = errors_of(times.time_us, fresh.measured_us, times.low_us, times.high_us)
    assert errors.mape < 0.04 and abs(errors.bias) < 0.01
    assert errors.coverage is not None and errors.coverage > 0.75
    assert (times.low_us <= times.time_us).all() and (times.time_us <= times.high_us).all()
    # Unseen folds stay together.
    sites: dict[tuple[int, int], set[int]] = {}
    for dims, fold in zip(law[0].columns.dims.tolist(), law[0].fold.tolist(), strict=True):
        sites.setdefault((dims[2], dims[3]), set()).add(fold)
    assert all(len(folds) == 1 for folds in sites.values()) and len(set.union(*sites.values())) == 5


def test_coverage_ends_where_the_data_do(law: tuple[Problem, BoostedModel]) -> None:
    model = law[1]
    asked = [next(gemm(1, 300, 1000, 1000, "bf16", "nt")), next(gemm(1, 8192, 8192, 8192, "bf16", "nt")),
             next(gemm(1, 10_000, 1024, 1024, "bf16", "nt")), next(gemm(1, 128, 16, 128, "bf16", "nt")),
             next(gemm(1, 128, 128, 128, "bf16", "tn")), next(gemm(4, 128, 128, 128, "bf16", "nt"))]
    assert model.covers(asked).tolist() == [True, True, False, False, False, False]
    assert model.covers([]).tolist() == [] and len(model.predict([]).time_us) == 0
    with pytest.raises(ValueError, match="not fitted"):
        model.predict(asked[4:5])


def test_damaged_states_are_refused(law: tuple[Problem, BoostedModel]) -> None:
    values, arrays = law[1].state()  # what comes back is the same model: test_profile.py
    for damaged in ({**values, "recipe": "gemm-99"}, {**values, "variants": []}, {**values, "intervals": {
            "log_us": [], "low": [], "high": []}}, {**values, "intervals": {
            "log_us": [0.0], "low": [[0.0]], "high": [0.0]}}):
        with pytest.raises(ValueError):
            BoostedModel.from_state(damaged, arrays)


def _near(samples: Samples) -> tuple[Problem, Neighbours]:
    problem = Problem.of(samples, H200)
    return problem, Neighbours.of(problem.columns, problem.target, problem.baseline_us)


def _seen(problem: Problem, near: Neighbours, m: int, n: int, k: int) -> np.ndarray:
    columns = problem.variants.columns([next(gemm(1, m, n, k, "bf16", "nt"))], work=False)
    return near.features(columns, lambda asked: gemm_baseline_us(asked, problem.figures))[0]


def test_neighbours_interpolate_time_along_the_contraction() -> None:
    shapes = [(128, 512, 1024), (128, 512, 4096), (128, 1024, 2048), (512, 512, 1024), (512, 512, 4096)]
    times = [10.0, 22.0, 30.0, 20.0, 44.0]
    samples = Samples("h200-sxm", "lib", "table", [next(gemm(1, *shape, "bf16", "nt")) for shape in shapes],
                      np.array(times))
    problem, near = _near(samples)
    baseline = {shape: float(base) for shape, base in zip(shapes, problem.baseline_us, strict=True)}
    base = float(gemm_baseline_us(problem.variants.columns([next(gemm(1, 128, 512, 2048, "bf16", "nt"))], work=False),
                             problem.figures)[0])
    found = _seen(problem, near, 128, 512, 2048)
    # A third of the way from k = 1024 to 4096.
    assert base * np.exp(found[7]) == pytest.approx(14.0, rel=1e-5)
    assert found[3] == pytest.approx(np.log(10.0 / baseline[128, 512, 1024]), abs=1e-6)
    assert found[4] == pytest.approx(1.0) and found[6] == pytest.approx(1.0)
    assert found[9] == -20.0 and found[11] == pytest.approx(np.log(30.0 / baseline[128, 1024, 2048]), abs=1e-6)
    # m = 256 lies halfway between 128 and 512, by logarithm.
    halfway = _seen(problem, near, 256, 512, 2048)
    assert halfway[7] == pytest.approx((found[7] + _seen(problem, near, 512, 512, 2048)[7]) / 2, abs=1e-5)
    # Its own time is never among what a product sees; beyond all of them is like at the edge.
    assert _seen(problem, near, 512, 512, 1024)[3] == -20.0
    assert (_seen(problem, near, 4096, 512, 2048) == _seen(problem, near, 512, 512, 2048)).all()


def test_a_plane_through_neighbours_is_found_again() -> None:
    random = np.random.default_rng(0)
    n, k = 2 ** random.integers(6, 13, 40), 2 ** random.integers(6, 13, 40)
    calls = list(dict.fromkeys(next(gemm(1, 64, int(a), int(b), "bf16", "nt")) for a, b in zip(n, k, strict=True)))
    problem = Problem.of(Samples("h200-sxm", "lib", "table", calls, np.ones(len(calls))), H200)
    logs = np.log2(problem.columns.dims[:, 2:])
    near = Neighbours.of(problem.columns, 0.3 + 0.02 * logs[:, 0] - 0.05 * logs[:, 1], problem.baseline_us)
    assert _seen(problem, near, 64, 1000, 700)[0] == pytest.approx(
        0.3 + 0.02 * np.log2(1000) - 0.05 * np.log2(700), abs=1e-3)


@pytest.mark.slow
def test_neighbours_tell_what_sizes_do_not(law: tuple[Problem, BoostedModel]) -> None:
    """Each m has waves of its own over (n, k): to be learned one by one, but the same in neighbouring weights."""
    samples = gemm_samples(3000)
    m, n, k = np.array([call.dims for call in samples.calls]).T[1:]
    phase = np.random.default_rng(5).uniform(0, 2 * np.pi, 5000)[m]
    secret = 0.3 * np.sin(phase + 0.8 * np.log2(n) + 0.6 * np.log2(k))
    problem = Problem.of(replace(samples, measured_us=samples.measured_us * np.exp(secret)), H200)
    seeing = replace(QUICK, members=(Member(), Member(neighbours=True)))
    alone, with_them = (problem.out_of_fold(how, folds=2) for how in (QUICK, seeing))
    errors = [errors_of(found.time_us[found.done], problem.measured_us[found.done]).median
              for found in (alone, with_them)]
    assert errors[1] < 0.9 * errors[0]
    assert with_them.members[1].weight > 0.5  # those that see more predict left-out rows better
    model = problem.model(seeing, law[1].intervals)
    values, arrays = model.state()
    again = BoostedModel.from_state(values, arrays)
    assert (again.predict(samples.calls[:200]).time_us == model.predict(samples.calls[:200]).time_us).all()
    for name, wrong in (("near_start", arrays["near_start"][:-1]), ("near_site", arrays["near_site"] * 0),
                        ("near_value", arrays["near_value"] * np.nan), ("near_head", arrays["near_head"] + 9)):
        with pytest.raises(ValueError, match="neighbours of a model"):
            BoostedModel.from_state(values, {**arrays, name: wrong})


def test_of_very_many_neighbours_some_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_models.learned import neighbours

    problem, near = _near(gemm_samples(1200))
    assert len(near.value) == len(problem.target)
    monkeypatch.setattr(neighbours, "MOST_SITES", 20)
    fewer = Neighbours.of(problem.columns, problem.target, problem.baseline_us)
    assert len({tuple(site) for site in fewer.site.tolist()}) == 20
    monkeypatch.setattr(neighbours, "MOST_PRODUCTS", 30)
    assert len(Neighbours.of(problem.columns, problem.target, problem.baseline_us).value) == 30
