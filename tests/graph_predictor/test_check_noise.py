"""The test of repeated measurements: false alarms at its level, and what it sees, on drawn samples with fixed seeds."""

from __future__ import annotations

import numpy as np
import pytest
from slowly import mostly_slow

from step_views.check.noise import Prior, Slowdown, slowdown

PRIOR = Prior(sd=0.03, weight=8)
LEAST, LEVEL = 0.01, 0.01
Runs = list[list[float]]


def drawn(rng: np.random.Generator, runs: int, factor: float = 1.0, between: float = 0.03, within: float = 0.02,
          number: int = 20) -> Runs:
    """Runs of steps: each has a level of its own, and neighbouring steps are alike."""
    found = []
    for _ in range(runs):
        noise = rng.normal(0.0, within, number)
        smooth = np.convolve(noise, np.ones(3) / 3**0.5, mode="same")
        found.append((5e6 * factor * np.exp(rng.normal(0.0, between) + smooth)).tolist())
    return found


def compared(base: Runs, new: Runs, prior: Prior = PRIOR, **options: object) -> Slowdown:
    return slowdown(base, new, prior, least=LEAST, level=LEVEL, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("runs", mostly_slow([1, 3], {1}))
def test_alarms_without_a_change_are_as_rare_as_the_level_says(runs: int) -> None:
    rng = np.random.default_rng(1)
    alarms = sum(compared(drawn(rng, runs), drawn(rng, runs)).p_value < LEVEL for _ in range(300))
    assert alarms <= 7  # 3 are expected at most: growth up to 1% counts as none


@pytest.mark.parametrize(("runs", "factor"), [(1, 1.3), (5, 1.15)])
def test_what_is_said_to_be_seen_is_seen(runs: int, factor: float) -> None:
    rng = np.random.default_rng(2)
    results = [compared(drawn(rng, runs), drawn(rng, runs, factor)) for _ in range(60)]
    assert sum(result.p_value < LEVEL for result in results) >= 57
    assert all(np.expm1(result.detectable) < factor - 1 for result in results)


def test_steps_that_scatter_see_less_and_many_steps_of_one_run_do_not_help() -> None:
    rng = np.random.default_rng(4)
    quiet, noisy = drawn(rng, 1, within=0.01), drawn(rng, 1, within=0.3)
    assert compared(noisy, noisy).detectable > compared(quiet, quiet).detectable
    long = drawn(rng, 1, within=0.01, number=10_000)
    assert compared(long, long).detectable > 0.9 * compared(quiet, quiet).detectable


def test_the_machine_and_its_disturbances_are_taken_into_account() -> None:
    rng = np.random.default_rng(5)
    base, new = drawn(rng, 1), drawn(rng, 1, 1.5)
    plain, shaken = compared(base, new), compared(base, new, disturbed=[0.0, 0.5])
    assert plain.p_value < LEVEL < min(compared(base, new, shared=0.4, shared_sd=0.02).p_value, shaken.p_value)
    assert shaken.difference == plain.difference and shaken.high > plain.high


def test_only_the_slower_half_of_a_run_is_no_growth() -> None:
    """A machine that had a bad moment."""
    result = compared([[5e6] * 20], [[5e6] * 9 + [9e6] * 11])
    assert result.difference == pytest.approx(0.0) and result.p_value > 0.4


def test_a_run_of_one_sample() -> None:
    """Peak memory: the prior alone says how far two runs differ."""
    large, small, none = (compared([[1e9]], [[1e9 * grown]], Prior(sd=0.002, weight=8, within=0.002))
                          for grown in (1.05, 1.005, 1.0))
    assert large.p_value < LEVEL < small.p_value
    assert none.low < 0 < none.high and none.confidence < 0.5
