"""The prior of a host nobody measured (``benchmarks/host_prior.py``), on hosts whose law is known."""

from __future__ import annotations

import numpy as np
import pytest
from host_prior import EXPONENT, HostFactor, fit_prior

from kernel_models.spreads import END


def _hosts(exponent: float, events: tuple[float, ...], missed: tuple[float, ...] = ()) -> list[HostFactor]:
    off = missed or (0.0,) * len(events)
    return [HostFactor(str(row), float(2.0 * np.exp(exponent * event + miss)), float(1e3 * np.exp(event)))
            for row, (event, miss) in enumerate(zip(events, off, strict=True))]


def test_the_exponent_lies_between_what_hosts_say_and_what_is_expected() -> None:
    """Two squared e-folds say 1, one says 0.5."""
    found = fit_prior(_hosts(1.0, (-1.0, 0.0, 1.0)))
    assert found.exponent == pytest.approx((2 * 1.0 + EXPONENT) / 3)
    assert found.factor(1e3) == pytest.approx(2.0)
    assert found.factor(1e3 * np.e) == pytest.approx(2.0 * np.exp(found.exponent))


def test_hosts_that_differ_widely_say_it_themselves() -> None:
    """Two hundred squared e-folds: what is expected makes no difference any more."""
    assert fit_prior(_hosts(0.2, (-10.0, 0.0, 10.0))).exponent == pytest.approx(0.2, abs=0.002)


def test_hosts_alike_leave_what_is_expected() -> None:
    """No host says what an event's cost does."""
    assert fit_prior(_hosts(0.0, (0.0, 0.0, 0.0))).exponent == EXPONENT


def test_the_interval_is_that_of_another_host() -> None:
    """Four hosts around a mean they share: their deviation, and how unsure their mean is."""
    found = fit_prior(_hosts(0.0, (0.0,) * 4, (0.3, -0.3, 0.1, -0.1)), exponent=0.0)
    assert found.spread == pytest.approx(END * np.sqrt(0.2 / 3 * 1.25))


def test_a_law_set_beforehand_is_kept() -> None:
    """The mean of hosts, whatever their events cost."""
    found = fit_prior(_hosts(1.0, (-1.0, 0.0, 1.0)), exponent=0.0)
    assert found.factor(1.0) == pytest.approx(2.0) == found.factor(1e6)
