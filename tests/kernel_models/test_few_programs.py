"""A host of which few programs, or none, were recorded: the law of others, and their prior."""

from __future__ import annotations

import numpy as np
import pytest
from host_prior import EXPONENT, HostFactor, fit_prior

from kernel_models.host.events import HostStep
from kernel_models.host.fitting import fit_few, fit_host
from kernel_models.spreads import END, OTHER_HOSTS_PROGRAM

COSTS = {"mm": 2000.0, "add": 800.0, "relu": 500.0, "exp": 1200.0, "sin": 5000.0}


def _step(names: str, factor: float = 1.0, costs: dict[str, float] | None = None,
          calls: bool = False) -> HostStep:
    """A step whose operations cost what ``costs`` says, and half of that lies before each."""
    own = np.array([factor * {**COSTS, **(costs or {})}[name] for name in names.split()])
    return HostStep(np.array([f"aten::{name}" for name in names.split()], dtype=object), np.ones(len(own), np.int8),
                    np.zeros(len(own), np.int64), np.append(own, 100.0 * factor) / 2, own, np.zeros(len(own)),
                    calls=np.zeros(len(own) + 1) if calls else None)


def _total(model: object, step: HostStep) -> float:
    return float(sum(part.sum() for part in model.estimate(step)))  # type: ignore[attr-defined]


PROGRAMS = ("mm add relu", "add exp mm add", "relu sin mm", "exp relu add sin", "mm mm exp", "sin add relu exp")
LAW = fit_host([_step(names) for names in PROGRAMS], "others")


def test_operations_of_no_own_program_cost_what_others_do_times_the_factor() -> None:
    """One program of a host that takes twice as long says so of operations that it has not."""
    mine, asked = _step("mm add relu", 2.0), _step("sin exp sin", 2.0)
    found = fit_few([mine], "mine", LAW)
    factor = mine.host_ns / _total(LAW, mine)
    assert factor == pytest.approx(2.0, rel=0.1)
    assert _total(found, asked) == pytest.approx(factor * _total(LAW, asked), rel=0.02)
    assert found.host == "mine" and found.programs == 1
    alone = fit_host([_step("mm add relu", 2.0)])
    assert abs(np.log(_total(found, asked) / asked.host_ns)) < abs(np.log(_total(alone, asked) / asked.host_ns))


def test_what_own_programs_say_of_an_operation_draws_it() -> None:
    """On this host "mm" takes four times as long as others say: each own program that has it counts as much as all
    others together."""
    law = _total(LAW, _step("mm mm exp"))
    programs = ("mm add relu exp sin", "sin relu mm exp add", "exp add sin mm relu")
    few = [fit_few([_step(names, 1.0, {"mm": 8000.0}) for names in programs[:count]], "", LAW) for count in (1, 3)]
    told = [_total(model, _step("mm mm exp")) for model in few]
    true = _step("mm mm exp", 1.0, {"mm": 8000.0}).host_ns
    assert 1.5 * law < told[0] < told[1] < true


def test_interval_narrows_with_programs_that_agree_and_never_below_what_others_lie_apart() -> None:
    """Five that agree by chance are not surer than what programs of other hosts say of each other."""
    one, two, five = (fit_few([_step(names) for names in PROGRAMS[:count]], "", LAW).spread for count in (1, 2, 5))
    usual = max(OTHER_HOSTS_PROGRAM, LAW.spread / END)
    assert one == pytest.approx(END * usual * np.sqrt(2))
    assert five < two < one
    assert five > 0.6 * END * usual
    factors = (0.5, 1.0, 2.0, 1.0, 0.7)
    apart = fit_few([_step(names, factor) for names, factor in zip(PROGRAMS, factors, strict=False)], "", LAW)
    assert apart.spread > 2 * five
    # One odd program does not move the others.
    factors = (1.0, 1.0, 4.0, 1.0, 1.0)
    found = fit_few([_step(names, factor) for names, factor in zip(PROGRAMS, factors, strict=False)], "", LAW)
    mean = np.exp(np.mean(np.log(factors)))
    asked = _step(PROGRAMS[5])
    assert _total(found, asked) / asked.host_ns < mean


def test_calls_count_where_all_have_them_counted() -> None:
    law = fit_host([_step(names, calls=True) for names in PROGRAMS])
    assert law.counted is not None
    assert fit_few([_step("mm add", calls=True)], "", law).counted is not None
    assert fit_few([_step("mm add", calls=True), _step("relu exp")], "", law).counted is None


def _hosts(exponent: float, events: tuple[float, ...], missed: tuple[float, ...] = ()) -> list[HostFactor]:
    off = missed or (0.0,) * len(events)
    return [HostFactor(str(row), float(2.0 * np.exp(exponent * event + miss)), float(1e3 * np.exp(event)))
            for row, (event, miss) in enumerate(zip(events, off, strict=True))]


@pytest.mark.parametrize(("told", "events", "weight"), [
    (1.0, (-1.0, 0.0, 1.0), 2.0),  # two squared e-folds
    (0.2, (-10.0, 0.0, 10.0), 200.0), (0.0, (0.0, 0.0, 0.0), 0.0)])
def test_the_exponent_lies_between_what_hosts_say_and_what_is_expected(told: float, events: tuple[float, ...],
                                                                       weight: float) -> None:
    """What is expected weighs as much as one squared e-fold."""
    found = fit_prior(_hosts(told, events))
    assert found.exponent == pytest.approx((weight * told + EXPONENT) / (weight + 1))
    assert found.factor(1e3 * np.e) == pytest.approx(2.0 * np.exp(found.exponent))


def test_the_interval_is_that_of_another_host() -> None:
    """Four hosts around a mean they share: their deviation, and how unsure their mean is."""
    found = fit_prior(_hosts(0.0, (0.0,) * 4, (0.3, -0.3, 0.1, -0.1)), exponent=0.0)
    assert found.spread == pytest.approx(END * np.sqrt(0.2 / 3 * 1.25))
    # A law set beforehand is kept: the mean of hosts, whatever their events cost.
    found = fit_prior(_hosts(1.0, (-1.0, 0.0, 1.0)), exponent=0.0)
    assert found.factor(1.0) == pytest.approx(2.0) == found.factor(1e6)
