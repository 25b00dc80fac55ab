"""Calibration: what is measured next, on which device, and what comes of it; the GPU is simulated."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from calibration_support import CONTEXT, H200, HEALTHY, Bench0, healthy, law_us, simulated
from said import Run
from slowly import mostly_slow

from kernel_models.calibration import checks, run
from kernel_models.calibration.checks import CalibrationError, Health
from kernel_models.calibration.figures import spec_of, with_measured
from kernel_models.calibration.planner import LEAST_TO_LEARN, FamilyProgress
from kernel_models.calibration.run import Request, calibrate, share_of_time
from kernel_models.calibration.source import GIVEN_UP, MOST_REFUSALS
from kernel_models.calibration.space import draw, families_of, limits_for, spaces
from kernel_models.datasets import read_samples
from kernel_models.datasets.campaign import calls_of_benchmark, is_intended
from kernel_models.datasets.samples import DataError
from kernel_models.device import DeviceError, DeviceSpec, device
from kernel_models.families.copy import memset, transfer
from kernel_models.families.gemm import gemm
from kernel_models.heuristics.efficiency import default_efficiencies
from kernel_models.kernel_names import family_hint
from kernel_models.learned import process
from kernel_models.learned.process import Kernel, Process, fit_process
from kernel_models.op_call import Family, OpCall, Source
from kernel_models.pricing import price
from kernel_models.profile import load_profile, save_profile
from tracer.campaign import CampaignError, Results, read_kernels
from tracer.campaign.families import FAMILIES
from tracer.campaign.items import side
from tracer.campaign.results import Index
from tracer.capture.interruption import Terminated
from tracer.errors import DiskFullError
from tracer.shape_only.devices import device_names

ROOT = Path(__file__).resolve().parents[2]
__all__ = ["simulated"]


def calibrated(work: Path, *families: str, minutes: float = 0.5, **options: Any) -> Any:
    return calibrate(Request(work, "cuda", minutes, families or ("gemm", "memset"), **options), probe=healthy)


def smooth(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, v = rng.uniform(4, 14, (n, 3)), rng.integers(0, 3, (n, 2))
    return x, v, 0.3 * np.sin(x[:, 0] / 2) + 0.05 * x[:, 1] * (v[:, 0] == 1) + 0.1 * v[:, 1]


def test_a_process_learns_a_smooth_law_and_knows_how_well() -> None:
    x, v, y = smooth(120)
    noisy = y + 0.02 * np.random.default_rng(1).standard_normal(120)
    process = fit_process(x, v, noisy)
    new_x, new_v, truth = smooth(300, 2)
    mean, deviation = process.predict(new_x, new_v)
    assert np.abs(mean - truth).mean() < 0.03
    assert np.mean(np.abs(mean - truth) < 2 * deviation) > 0.9
    far, _ = process.predict(new_x + 100, new_v)
    assert np.abs(far).max() < np.abs(y).max() + 0.5  # back to the formulas
    noisy[7] += 3.0  # one wild row does not bend the rest
    assert np.abs(fit_process(x, v, noisy).predict(new_x, new_v)[0] - truth).mean() < 0.05


def test_the_gradient_of_the_fit_is_that_of_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.optimize

    seen: list[Any] = []
    real = scipy.optimize.minimize
    monkeypatch.setattr(scipy.optimize, "minimize", lambda cost, begin, **options: (
        seen.append((cost, np.array(begin))), real(cost, begin, **options))[1])
    fit_process(*smooth(40))
    cost, begin = seen[0]
    at = begin + 0.1
    step = 1e-5 * np.eye(len(at))
    numeric = np.array([(cost(at + one)[0] - cost(at - one)[0]) / 2e-5 for one in step])
    assert cost(at)[1] == pytest.approx(numeric, abs=1e-5)


def test_rows_left_out_are_predicted_as_if_never_seen() -> None:
    x, v, y = smooth(30)
    process = Process(Kernel.start(3, 2), x, v, y, np.ones(30))
    group = np.arange(30) % 4
    by_formula = process.left_out_by(group)
    for one in range(4):
        out = group == one
        without = Process(process.kernel, x[~out], v[~out], y[~out], np.ones((~out).sum()))
        assert by_formula[out] == pytest.approx(without.predict(x[out], v[out])[0])
    one, _ = process.left_out()
    assert one == pytest.approx(process.left_out_by(np.arange(30)))


def products(count: int, seed: int = 0, dtype: str = "bf16") -> list[OpCall]:
    rng = np.random.default_rng(seed)
    sizes = (16 * 2.0 ** rng.uniform(0, 9, (count, 3))).astype(int)
    return [call for m, n, k in sizes.tolist() for call in gemm(1, m, n, k, dtype, "nt")]


def test_measurements_lower_the_error_and_the_need() -> None:
    progress = FamilyProgress(Family.GEMM, H200)
    calls, new = products(60), products(200, seed=9)
    truth = np.array([law_us(call) for call in new])
    formula = progress.predict(new)
    assert progress.error() == 1.0
    errors, needs = [], []
    for number, call in enumerate(calls, 1):
        progress.tell(call, law_us(call))
        progress.seconds += 0.1
        if number in (LEAST_TO_LEARN, 60):
            errors.append(progress.error())
            needs.append(progress.need())
    assert progress.measured == 60 and errors[1] < errors[0] < 1.0 and needs[1] < needs[0]
    assert np.abs(progress.predict(new) / truth - 1).mean() < 0.7 * np.abs(formula / truth - 1).mean()
    # A quicker visit counts when it is learned again.
    found = []
    for first_us in (50.0, 10.0):
        progress = FamilyProgress(Family.MEMSET, H200)
        for power in range(10, 10 + LEAST_TO_LEARN - 1):
            progress.tell(memset(1 << power), first_us if power == 12 else 10.0)
        progress.correct(2, memset(1 << 12), 10.0)
        progress.tell(memset(1 << 18), 10.0)
        found.append(progress.predict([memset(1 << 12)])[0])
    assert found[0] == found[1]


def test_every_benchmark_runs_its_family_and_names_what_ran() -> None:
    """One small setting of every space, measured for real; a GPU's kernels are told by the profiler in the same way."""
    pytest.importorskip("torch")
    from tracer.campaign.lab import Lab
    from tracer.campaign.micro import measure

    lab, spec = Lab("cpu"), device("cpu")
    limits = replace(limits_for(spec, 2e9), run_us=300.0, bytes=2e6)
    seen = set()
    for space in spaces("cpu"):
        rng = np.random.default_rng(1)
        one = next(found for found in (draw(space, spec, limits, rng) for _ in range(50)) if found is not None)
        for row in measure(space.benchmark, one.item.settings, lab):
            assert row["kernels"], space
            assert is_intended(one.call, {**row, **one.item.settings}), (space, row["kernels"])
            assert row["p10_us"] > 0
        seen.add(space.family.value)
    # Half-precision Triton kernels need a GPU; all else is there, and no family with efficiencies is missing.
    assert seen == {*families_of("cpu")} == {*families_of("cuda")} - {"triton"}
    assert {*families_of("cuda")} >= default_efficiencies().families() - {"other"}


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_what_is_drawn_is_within_the_limits_and_on_both_sides(kind: str) -> None:
    spec = device("h200-sxm" if kind == "cuda" else kind)
    limits = limits_for(spec, 4e9)
    for space in spaces(kind):
        rng = np.random.default_rng(3)
        drawn = [draw(space, spec, limits, rng) for _ in range(40)]
        found = [one for one in drawn if one is not None]
        assert len(found) > 30, space
        assert {one.split for one in found} == {"fit", "held-out"}, space
        for one in found:
            family = FAMILIES[one.item.name]
            assert family.checked(one.item.settings) == one.item.settings
            assert one.split == side(family, one.item.settings)
            assert one.call.family is space.family
            assert 1.5 * one.call.bytes_moved <= limits.bytes
            assert 0 < one.item.seconds < 2.0
        again = np.random.default_rng(3)
        assert draw(space, spec, limits, again) == drawn[0]


def test_little_memory_means_small_sizes() -> None:
    space = next(one for one in spaces("cuda") if one.benchmark == "memset")
    for free, most in ((100e9, 1 << 31), (1e9, 0.3e9)):
        limits = limits_for(H200, free)
        rng = np.random.default_rng(0)
        drawn = [draw(space, H200, limits, rng) for _ in range(200)]
        sizes = [one.call.bytes_moved for one in drawn if one is not None]
        assert most / 20 < max(sizes) <= most
    none = replace(limits_for(H200, 1e9), bytes=1.0)  # what does not fit is not drawn
    assert draw(space, H200, none, np.random.default_rng(0)) is None


@pytest.mark.parametrize(("health", "what", "fatal"), [
    (replace(HEALTHY, processes=1), "processes", False),
    (replace(HEALTHY, processes=None, utilization=0.8), "processes", False),
    (replace(HEALTHY, held_back_by=("its power limit",)), "clocks", False),
    (replace(HEALTHY, free_bytes=20e9), "memory", False),
    (replace(HEALTHY, free_bytes=1e9), "memory", True),
    (Health("cpu", "CPU", free_bytes=0.2e9, load=0.1), "memory", True),
    (Health("cpu", "CPU", free_bytes=8e9, load=9.0), "load", False),
])
def test_a_device_that_is_not_fit_is_noticed(health: Health, what: str, fatal: bool) -> None:
    found = checks.before(health)
    assert [(one.what, one.fatal) for one in found] == [(what, fatal)]
    assert found[0].text.endswith(".") and "\n" not in found[0].text


def test_a_device_that_is_fit_is_not_complained_of() -> None:
    assert not any(map(checks.before, (HEALTHY, Health("cpu", "CPU", free_bytes=8e9, load=0.2), Health("cuda"))))
    # A busy GPU at full clock, with our one process: as it should be.
    assert not checks.during(replace(HEALTHY, processes=1, utilization=1.0))
    assert [one.what for one in checks.during(replace(HEALTHY, processes=2))] == ["processes"]
    assert [one.what for one in checks.during(replace(HEALTHY, processes=1, clock_mhz=700.0, utilization=0.9))] == [
        "clocks"]
    assert not checks.during(replace(HEALTHY, processes=1, clock_mhz=345.0, utilization=0.0))  # idle just now


def test_health_is_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncase \"$*\" in\n*compute-apps*) printf '11, GPU-a\\n12, GPU-a\\n13, GPU-b\\n';;\n"
                    "*) echo 'NVIDIA H200, 580.1, 1200, 3201, 1980, 699.5, 700.00, 81, 0x0000000000000024, "
                    "143771, 3000, 97, GPU-a, 00000000:1B:00.0';;\nesac\n",
                    encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = checks.probe("cuda")
    assert (found.name, found.clock_mhz, found.highest_clock_mhz, found.processes) == ("NVIDIA H200", 1200, 1980, 2)
    assert found.held_back_by == ("its power limit", "its temperature (software)")
    assert found.free_bytes == (143771 - 3000) * 2**20 and found.utilization == 0.97
    tool.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    assert checks.probe("cuda") == Health("cuda")


def test_figures_of_a_cpu_or_an_unknown_gpu_are_the_best_that_was_measured() -> None:
    spec = spec_of({"device": "CPU"}, threads=2)
    assert spec.placeholder and spec.sm_count == 2
    product = next(gemm(1, 1000, 1000, 1000, "fp32", "nt"))
    big, small = memset(1 << 30), memset(64)
    found = with_measured(spec, [(product, 40_000.0), (product, 20_000.0), (big, 1e5), (small, 0.7)])
    assert not found.placeholder
    assert found.peak_tflops("fp32") == pytest.approx(0.1)  # 2·10⁹ operations in 20 ms
    assert found.memory_bandwidth_gbps == pytest.approx(10.74) and found.kernel_floor_us == 0.7
    assert with_measured(H200, [(product, 1.0)]) == H200  # a data sheet stays
    # A virtual machine sees the cache of its whole socket, and has a share of it.
    shared = with_measured(replace(spec, l2_mb=1024.0), [(product, 40_000.0), (memset(1 << 28), 1e5)])
    assert not shared.placeholder and shared.memory_bandwidth_gbps == pytest.approx(2.684)
    spec = spec_of({"device": "NVIDIA H900", "compute_capability": "9.0", "multi_processor_count": 100}, threads=0)
    products = [next(gemm(1, 4096, 4096, 4096, dtype, "nt")) for dtype in ("fp32", "bf16")]
    found = with_measured(spec, [(products[0], 2748.0), (products[1], 229.0), (memset(1 << 30), 500.0),
                                 (transfer("h2d", 1 << 28), 5000.0)])
    assert not found.placeholder
    assert found.peak_tflops("bf16", matrix=True) == pytest.approx(600, rel=1e-2)  # not as wide as fp32
    assert found.peak_tflops("bf16") == found.peak_tflops("fp32") == pytest.approx(50, rel=1e-2)
    assert found.memory_bandwidth_gbps == pytest.approx(2147, rel=1e-2)
    assert found.host_gbps == pytest.approx(53.7, rel=1e-2)
    assert found.sources["links.host_gbps"] == found.sources["matrix_tflops.bf16"] == "measured by foretrace calibrate"


def test_a_gpu_without_a_file_is_described_by_its_driver() -> None:
    spec = spec_of({"device": "NVIDIA RTX 9999", "total_memory": 48e9, "multi_processor_count": 99,
                    "l2_cache_size": 96 << 20, "compute_capability": "13.0", "memory_clock_rate": 10_501_000,
                    "memory_bus_width": 384, "shared_memory_per_multiprocessor": 102_400,
                    "regs_per_multiprocessor": 65_536, "clocks": {"max_sm_mhz": 2610, "power_limit_w": 450.0}},
                   threads=0)
    assert (spec.name, spec.sm_count, spec.memory_gb, spec.l2_mb) == ("nvidia-rtx-9999", 99, 48.0, 96.0)
    assert spec.placeholder and not spec.matrix_tflops
    clocked = spec_of({"device": "NVIDIA X1", "total_memory": 191e9, "multi_processor_count": 148,
                       "clock_rate": 1_965_000, "memory_clock_rate": 3_996_000, "memory_bus_width": 7680,
                       "compute_capability": "10.0"}, threads=0)
    assert (clocked.boost_clock_mhz, clocked.memory_bandwidth_gbps) == (1965.0, 7672.0)
    for name, memory, units in (("NVIDIA H100 80GB HBM3", 10e9, 16), ("AMD Instinct MI300X", 24e9, 38)):
        part = spec_of({"device": name, "total_memory": memory, "multi_processor_count": units}, threads=0)
        assert (part.sm_count, part.placeholder, part.memory_gb) == (units, True, memory / 1e9)
        assert part.name not in device_names()


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA X1"])
@pytest.mark.parametrize("wrong", [{"multi_processor_count": [132]}, {"total_memory": float("nan")},
                                   {"clocks": {"max_sm_mhz": "fast"}}, {"clocks": "fast"}])
def test_words_where_a_device_has_figures_are_refused(name: str, wrong: dict[str, object]) -> None:
    with pytest.raises(DeviceError, match=f"{name} is recorded with .*, where a number belongs"):
        spec_of({"device": name, "compute_capability": "9.0", "multi_processor_count": 132, **wrong}, threads=0)


def test_a_device_is_stored_whole() -> None:
    for name in device_names():
        stored = json.loads(json.dumps(device(name).to_json()))
        assert DeviceSpec.from_json(stored) == device(name)
    stored = device("cpu").to_json()
    for damage in ({"sm_count": "many"}, {"sm_count": 10.5}, {"sm_count": True}, {"memory_gb": -1.0},
                   {"vector_tflops": None}, {"placeholder": "yes"}):
        with pytest.raises(DeviceError, match="not complete"):
            DeviceSpec.from_json({**stored, **damage})
    del stored["l2_mb"]
    with pytest.raises(DeviceError, match="l2_mb"):
        DeviceSpec.from_json(stored)


def test_a_search_whose_time_is_over_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [[0] * rows for rows in (300, 100, 100)]  # each family gets its share of the time left
    assert [share_of_time(some[at:]) for at in range(3)] == [0.6, 0.5, 1.0]  # type: ignore[misc]
    x, v, y = smooth(60)
    begun = fit_process(x, v, y, until=-1.0).kernel
    assert (begun.smooth, begun.noise) == pytest.approx((Kernel.start(3, 2).smooth, Kernel.start(3, 2).noise))
    clock = itertools.count()
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    kernels = [fit_process(x, v, y, until=next(clock) + looks).kernel for looks in (1, 12, math.inf)]
    costs = [float(np.abs(Process(kernel, x, v, y, np.ones(60)).left_out()[0] - y).mean()) for kernel in kernels]
    assert costs[0] > costs[1] > 0.8 * costs[2]


@pytest.mark.slow
def test_a_gpu_is_calibrated_within_its_minutes(simulated: Bench0, tmp_path: Path) -> None:
    started, simulated.seconds = simulated.clock_s, 0.08
    found = calibrated(tmp_path / "work", minutes=1.0)
    assert 0.7 * 51 < simulated.clock_s - started <= 51 + 1  # a minute less what is kept for fitting
    names = {item.name for item in simulated.asked}
    assert {"gemm", "memset", "copy", "elementwise"} == names  # the last two as anchors only
    profile = found.profile
    assert profile.device == H200 and profile.families == [Family.GEMM, Family.MEMSET]
    for family, most in ((Family.GEMM, 0.15), (Family.MEMSET, 0.05)):
        entry = profile.entries_of(family)[0]
        held = entry.facts["held_out"]
        assert entry.kind == "gaussian" and held["mape"] < most and held["n"] >= 4
        assert held["mape"] < entry.facts["candidates"]["roofline"]["mape"]
    save_profile(found.profile, tmp_path / "h200.profile")
    again = load_profile(tmp_path / "h200.profile")
    calls = [call for call in products(50, seed=11) if call.flops > 1e8]
    ours, stored = (price(calls, one.device, one) for one in (profile, again))
    assert stored.time_us == pytest.approx(ours.time_us, rel=1e-3)  # efficiencies are stored with four decimals
    assert (ours.source == Source.LEARNED).all()
    assert not found.notes


def test_held_out_shapes_are_measured_and_never_fitted(simulated: Bench0, tmp_path: Path) -> None:
    found = calibrated(tmp_path / "work", "memset", minutes=0.4)
    assert found.profile.provenance["clock_mhz"] == 1980
    assert "clock" not in " ".join(found.profile.provenance["notes"])
    frame = read_kernels(tmp_path / "work", "memset")
    warm = frame[frame.variant == "warm"]
    entry = found.profile.entries_of(Family.MEMSET)[0]
    assert entry.rows == (warm.split == "fit").sum()
    assert entry.facts["held_out"]["n"] == (warm.split == "held-out").sum()
    assert 0.2 < (warm.split == "held-out").mean() < 0.3
    assert set(frame.variant) == {"warm", "cold"}
    # The same tables, by the ordinary way of fitting.
    samples = [one for one in read_samples([str(tmp_path / "work")]) if one.family is Family.MEMSET]
    assert sum(len(one) for one in samples) == len(warm) and samples[0].device == "h200-sxm"


@pytest.mark.slow
def test_interrupted_and_resumed_nothing_is_lost_and_nothing_measured_twice(simulated: Bench0, tmp_path: Path) -> None:
    simulated.interrupt_after, simulated.seconds = 120, 0.08
    with pytest.raises(KeyboardInterrupt):
        calibrated(tmp_path / "work")
    kept = dict(Results.read(tmp_path / "work").lines)
    assert len(kept) >= 110
    with pytest.raises(CampaignError, match="--resume"):
        calibrated(tmp_path / "work")
    simulated.interrupt_after, simulated.asked = 0, []
    found = calibrated(tmp_path / "work", resume=True)
    lines = Results.read(tmp_path / "work").lines
    canary = next(iter(kept))
    assert all(lines[name] == line for name, line in kept.items() if name != canary)
    assert {item.id for item in simulated.asked if item.id in kept} <= {canary}
    # With no time left only the fit is done again.
    simulated.asked = []
    same = calibrated(tmp_path / "work", resume=True)
    assert len(simulated.asked) <= 15 and same.profile.families == found.profile.families


def test_the_same_seed_measures_the_same(simulated: Bench0, tmp_path: Path) -> None:
    orders = []
    for number in range(2):
        simulated.asked, simulated.clock_s = [], 100.0
        calibrated(tmp_path / f"{number}", "softmax", minutes=0.25)
        orders.append([item.id for item in simulated.asked])
    assert orders[0] == orders[1] and len(orders[0]) > 40


FAILS = {
    "HIP": ("memset", "RuntimeError: HIP error: hipMemsetD8Async gave 1."),
    "no library": ("memset", "OSError: libcuda.so.1: cannot open shared object file."),
    "a compiler": ("fused", "InductorError: RuntimeError: Failed to find C compiler."),
}


@pytest.mark.parametrize("case", mostly_slow(list(FAILS), {"HIP"}))
def test_a_family_that_always_fails_costs_its_own_model_alone(simulated: Bench0, tmp_path: Path, case: str) -> None:
    name, reason = FAILS[case]
    family = "triton" if name == "fused" else name
    simulated.refuses = lambda item: reason if item.name == name else ""
    started, said = simulated.clock_s, []
    request = Request(tmp_path / "work", "cuda", 0.4, ("softmax", "norm", family))
    found = calibrate(request, probe=healthy, say=said.append)
    assert simulated.clock_s - started > 0.9 * 0.8 * 24
    assert [one.value for one in found.profile.families] == ["norm", "softmax"]
    tried = sum(item.name == name for item in simulated.asked)
    assert tried <= GIVEN_UP and simulated.dropped == tried * (case == "HIP")  # what is lost is that process alone
    told = f"{family} was given up with 0 measurements, since {tried} did not work; the last one: {reason}"
    assert told in found.notes and told in said and told in found.profile.provenance["notes"]


def test_a_broken_device_and_not_several_families_that_fail_ends_the_measurements(simulated: Bench0, tmp_path: Path
                                                                                 ) -> None:
    broken = ("memset", "index", "sort", "concat")
    simulated.refuses = lambda item: "RuntimeError: CUDA error: no." if item.name in broken else ""
    started = simulated.clock_s
    found = calibrated(tmp_path / "some", "norm", *broken, minutes=0.4)
    assert simulated.clock_s - started > 0.9 * 0.8 * 24
    assert found.profile.families == [Family.NORM]
    simulated.asked = []
    simulated.refuses = lambda item: "RuntimeError: CUDA error: lost." if len(simulated.asked) > 60 else ""
    found = calibrated(tmp_path / "work", "norm")
    assert len(simulated.asked) < 80
    assert "The measurements ended before their time: the last 10 items all failed." in found.notes


def test_running_out_of_memory_bounds_its_own_family(simulated: Bench0, tmp_path: Path) -> None:
    small = 1e6
    simulated.refuses = lambda item: ("RuntimeError: HIP out of memory." if item.name == "memset"
                                      and item.settings["bytes"] > small else "")
    found = calibrated(tmp_path / "work", "memset", "transfer", minutes=0.6)
    assert any("out of memory" in note for note in found.notes)
    assert found.profile.entries_of(Family.MEMSET)[0].facts["held_out"]["n"] >= 2
    later = simulated.asked[len(simulated.asked) // 4:]
    assert max(item.settings["bytes"] for item in later if item.name == "memset") <= small
    assert max(item.settings["bytes"] for item in later if item.name == "copy") > 1e8


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_attention_must_run_as_forced(simulated: Bench0, tmp_path: Path, backend: str) -> None:
    """Whatever is asked for, this build runs one implementation."""
    name = {"flash": "pytorch_flash::flash_fwd_kernel", "cudnn": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"}
    simulated.kernel = lambda call, item: name[backend] if item.name == "attention" else "gemm_kernel"
    calibrated(tmp_path / "work", "attention")
    samples = [one for one in read_samples([str(tmp_path / "work")]) if one.family is Family.ATTENTION]
    kinds = {call.kind.split("_")[0] for one in samples for call in one.calls}
    assert backend in kinds and "efficient" not in kinds
    tried = Counter((item.settings["op"], item.settings["causal"], item.settings["dtype"],
                     item.settings["heads"] != item.settings["kv_heads"]) for item in simulated.asked
                    if item.name == "attention" and item.settings["backend"] == "efficient")
    assert max(tried.values()) <= MOST_REFUSALS  # and is not asked for ever


def test_attention_is_known_by_the_kernels_of_each_library_and_drawn_for_those_that_have_it() -> None:
    settings = {"batch": 1, "heads": 4, "kv_heads": 4, "seq": 64, "kv_seq": 0, "head_dim": 64, "op": "forward",
                "causal": True, "dtype": "bf16"}
    calls = {backend: calls_of_benchmark("attention", {**settings, "backend": backend})[0]
             for backend in ("flash", "cudnn", "efficient")}
    for kernel, backends in (
            ("pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", {"flash"}),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", {"cudnn"}),
            ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", {"efficient"}), ("attn_fwd", {"flash", "efficient"}),
            ("bwd_kernel_dk_dv", {"flash", "efficient"}), ("_ZN5aiter18fmha_bwd_hd128_bf16E", {"flash", "efficient"}),
            ("void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<Pipeline>>", {"flash", "efficient"})):
        assert family_hint(kernel) is Family.ATTENTION
        assert {backend for backend, call in calls.items()
                if is_intended(call, {"kernels": [kernel], "backend": backend})} == backends, kernel
    limits, rng = limits_for(H200, 80e9), np.random.default_rng(0)
    drawn = [draw(space, H200, limits, rng) for space in spaces("cuda") if space.benchmark == "attention"
             for _ in range(60)]
    shared = {one.item.settings["backend"] for one in drawn if one is not None
              and one.item.settings["heads"] != one.item.settings["kv_heads"]}
    assert shared == {"flash", "cudnn"}


@pytest.mark.slow
def test_modes_refused_for_one_shape_are_tried_for_others(simulated: Bench0, tmp_path: Path) -> None:
    """Heads that are shared are refused, and so are a few odd shapes: neither says anything of the rest."""
    simulated.refuses = lambda item: "RuntimeError: No available kernel." if item.name == "attention" and (
        item.settings["heads"] != item.settings["kv_heads"] or item.settings["seq"] % 64) else ""
    calibrated(tmp_path / "work", "attention", minutes=0.4)
    lines = [line for line in Results.read(tmp_path / "work").lines.values() if line.name == "attention"]
    worked = {line.settings["backend"] for line in lines if line.status == "ok"}
    assert {"flash", "cudnn", "efficient"} <= worked
    assert sum(line.status == "ok" for line in lines) > len(lines) / 2


@pytest.mark.parametrize(("seen", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_what_torch_sees_and_not_what_tools_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: bool,
                                                         device: str) -> None:
    """A container without the management library, a partition, an AMD GPU without amdsmi."""
    def probe(name: str) -> Health:
        raise CalibrationError(name)

    monkeypatch.setattr(run, "torch_sees_gpu", lambda: seen)
    with pytest.raises(CalibrationError, match=device):
        calibrate(Request(tmp_path / "work", "auto", 1.0, ("gemm",)), probe=probe)


def test_times_of_a_part_are_not_fitted_as_the_whole_devices(simulated: Bench0, tmp_path: Path) -> None:
    simulated.context = {**CONTEXT, "hardware": {**CONTEXT["hardware"], "multi_processor_count": 60,
                                                 "clocks": {"max_sm_mhz": 2400}}}
    profile = calibrated(tmp_path / "work", "memset", minutes=0.3).profile
    assert any("at 1,980 MHz (median)" in note for note in profile.provenance["notes"])
    assert (profile.device.name, profile.device.sm_count, profile.device.placeholder) == ("nvidia-h200", 60, False)
    save_profile(profile, tmp_path / "new.profile")
    assert load_profile(tmp_path / "new.profile").device == profile.device
    with pytest.raises(DataError, match="measured on 60 of the 132 units of h200-sxm"):
        read_samples([str(tmp_path / "work")])


@pytest.mark.slow
def test_a_device_that_slows_down_or_is_shared_is_told(simulated: Bench0, tmp_path: Path) -> None:
    simulated.slower_after, simulated.seconds = 120, 0.08
    said: list[str] = []
    states = [HEALTHY, HEALTHY, replace(HEALTHY, processes=2), replace(HEALTHY, held_back_by=("a power brake",))]

    def probe(name: str) -> Health:
        return states.pop(0) if len(states) > 1 else states[0]

    found = calibrate(Request(tmp_path / "work", "cuda", 1.0, ("memset",)), probe=probe, say=said.append)
    told = " ".join(found.notes)
    assert "Another process computes on the GPU during" in told
    assert "a power brake" in told and "has become slower" in told and "at one speed" in told
    assert found.profile.provenance["notes"] == found.notes
    assert any("has become slower" in line for line in said)


MISTAKES = {
    "too little memory": ({"health": replace(HEALTHY, free_bytes=1e9)}, "Only 1.0 GB"),
    "an unknown device": ({"device": "tpu"}, "'tpu'"),
    "an unknown family": ({"families": ("gemm", "fft")}, "'fft'"),
    "not enough minutes": ({"minutes": 0.1}, "not enough for 1 families"),
    "no number of minutes": ({"minutes": float("nan")}, "cannot last nan minutes"),
    "minutes below zero": ({"minutes": -3.0}, "cannot last -3 minutes"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_before_anything_is_measured(tmp_path: Path, mistake: str) -> None:
    options, told = MISTAKES[mistake]
    options = {"families": ("gemm",), "device": "cuda", **options}
    health = options.pop("health", HEALTHY)
    with pytest.raises(CalibrationError) as error:
        calibrate(Request(tmp_path / "work", **options), probe=lambda name: health)
    assert told in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "work").exists()


def command(*arguments: str) -> subprocess.Popen[str]:
    # A shell's background job starts with Ctrl-C ignored, and so would this test's process.
    code = ("import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "sys.argv[0] = 'foretrace'; from foretrace.commands import main; sys.exit(main())")
    return subprocess.Popen([sys.executable, "-c", code, "calibrate", *arguments], text=True, cwd=ROOT,
                            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


@pytest.mark.parametrize(("error", "code", "word"), [
    (KeyboardInterrupt(), 130, "Interrupted"), (Terminated(), 143, "Terminated")])
def test_an_interrupted_command_says_how_to_go_on(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  error: BaseException, code: int, word: str) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        raise error

    monkeypatch.setattr("kernel_models.calibration.run.calibrate", interrupt)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        ran = run("calibrate", "-o", tmp_path / "a.profile", "--work", tmp_path / "w")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ran.code == code and ran.out == ""
    assert ran.err.startswith(f"foretrace: {word}. What was measured is kept in {tmp_path / 'w'}; go on with the same")
    assert ran.err.endswith(f"--work {tmp_path / 'w'} --resume.\n")


def test_measurements_outlive_a_profile_that_cannot_be_written(run: Run, simulated: Bench0, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    def full(profile: Any, path: Any) -> None:
        raise DiskFullError(f"{path} cannot be written (No space left on device).")

    monkeypatch.setattr("kernel_models.calibration.run.torch_sees_gpu", lambda: True)
    words = ("calibrate", "-o", tmp_path / "a.profile", "--families", "memset", "--minutes", "0.3")
    with monkeypatch.context() as patch:
        patch.setattr("kernel_models.profile.save_profile", full)
        ran = run(*words)
    assert ran.code == 2 and f"is kept in {tmp_path / 'a.measurements'}, and the same command with --resume" in ran.err
    assert run(*words, "--resume").code == 0 and (tmp_path / "a.profile").is_file()


@pytest.mark.slow
def test_the_command_is_interrupted_resumed_and_writes_a_profile(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    output, work = tmp_path / "cpu.profile", tmp_path / "cpu.measurements"
    options = ("-o", str(output), "--on", "cpu", "--families", "memset", "--minutes")
    process = command(*options, "2")  # far more than is waited for
    enough = 40  # for a model, should a busy machine leave the second run no time
    deadline = time.monotonic() + 110
    lines = work / "items.jsonl"
    while time.monotonic() < deadline and not (
            lines.exists() and lines.read_text(encoding="utf-8").count("\n") > enough):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=240)
    assert process.returncode == 130 and "--resume" in error and not output.exists()
    kept = set(Results.read(work).lines)
    assert len(kept) > enough
    process = command(*options, "0.25", "--resume", "--json")
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    told = json.loads(out)
    assert kept <= set(Results.read(work).lines)
    assert [model["family"] for model in told["models"]] == ["memset"]
    fitted = told["benchmarks"]["memset"]["fit"]
    assert 12 <= told["models"][0]["rows"] <= fitted and not told["device"]["placeholder"]
    profile = load_profile(output)
    assert profile.device.memory_bandwidth_gbps == told["device"]["memory_bandwidth_gbps"]
    assert price([memset(1 << 20)], profile.device, profile).source[0] == Source.LEARNED


def test_a_gpu_that_is_not_there_is_one_sentence(run: Run, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="measuring needs torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, out, error = run("calibrate", "-o", tmp_path / "a.profile", "--on", "cuda")
    assert code == 2 and out == ""
    assert "sees no CUDA device" in error and "--on cpu" in error and "--rehearse" not in error
    assert error.count("\n") == 1


def test_runs_of_other_threads_and_results_without_their_index_are_not_mixed(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    work = tmp_path / "cpu.measurements"
    work.mkdir()
    index = {**msgspec.to_builtins(Index()), "sessions": [{"torch_threads": 1}]}
    (work / "campaign.json").write_text(json.dumps(index))
    cores = os.cpu_count() or 1
    for threads, told in ((2, "--threads 1 and this run has 2" if cores > 1 else "more than the 1 cores"),
                          (cores + 1, f"more than the {cores} cores")):
        with pytest.raises(CalibrationError, match=told):
            calibrate(Request(work, "cpu", 1.0, ("memset",), resume=True, threads=threads))
    (work / "campaign.json").unlink()
    (work / "items.jsonl").write_text("precious")
    with pytest.raises(CampaignError, match=r"whose campaign\.json is gone"):
        calibrate(Request(work, "cpu", 1.0, ("memset",), resume=True))
    assert (work / "items.jsonl").read_text() == "precious"
    (work / "items.jsonl").rename(work / "mine.txt")
    with pytest.raises(CampaignError, match=r"other files \(mine\.txt\)"):
        calibrate(Request(work, "cpu", 1.0, ("memset",)))


def test_mistakes_end_the_command_with_2(run: Run, tmp_path: Path) -> None:
    (tmp_path / "letter.profile").write_text("precious")
    for options, told in (
            (("-o", str(tmp_path / "letter.profile")), "is no device profile"),
            (("-o", str(tmp_path / "a.profile"), "--families", ""), "names none"),
            (("-o", str(tmp_path / "no" / "a.profile")), "does not exist"),
            (("-o", str(tmp_path)), "is a directory"),
            (("-o", str(tmp_path / "a.profile"), "--on", "npu"), "'npu'")):
        code, out, error = run("calibrate", *options)
        assert code == 2 and out == "", error
        assert error.startswith("foretrace: ") and error.count("\n") == 1 and told in error
