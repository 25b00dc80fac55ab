"""Calibration: the ``Rates`` at which a user's own measured steps are predicted, and how well they predict others.

A few steps of one program on one cluster say what no data sheet does: how long its kernels really take at the clocks it
runs at, what its host and its framework add, what its network gives. Seven factors are fitted to them, and what is left
is carried over to plans like theirs (``likeness``).

    measured plans ──loads_of──▶ Loads, µs ──fit_rates──▶ Rates ──estimate──▶ any other plan
                                    └──left out one by one──▶ the error to expect
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from planner.parallel.estimate import Rates, estimate
from planner.parallel.likeness import Likeness
from planner.parallel.loads import Loads
from planner.parallel.spreads import Z80
from tracer.arrays import Float64
from tracer.errors import ForetraceError

SPREADS: Mapping[str, float] = {"products": 0.3, "others": 0.3, "collectives": 0.5, "network": 0.5, "host_us": 0.7,
                                "host_collective_us": 0.7, "meet": 0.5}
"""Each fitted rate, and the standard deviation of its logarithm around where it starts: what a job may reasonably
differ by. It keeps a handful of steps from running away with what they say nothing of."""
ERROR = 0.05
"""Log scale of a step's error against which strangeness is weighed, and beyond which errors count by their size, not
its square. Of 0.02, 0.04 and 0.08 on five rows of each of LLM-Foundry's tables, predicting the others: 7.6, 7.1, 7.0%
in the mean of six draws (benchmarks/weak_scaling.py reads them)."""
MOST_FOLDS = 10
MOST_OFF = 100.0
"""Times that a measured step may be off what is expected; more is another unit, model or device."""


class MeasuredPlanError(ForetraceError):
    """Measured steps that nothing can be learned from."""


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan's step that was run: what it is made of, and how long it took, µs."""

    name: str
    loads: Loads
    us: float

    def log_ratio(self, rates: Rates) -> float:
        """Natural logarithm of predicted over measured time."""
        return float(np.log(estimate(self.loads, rates).time_us / self.us))

    def expected(self, rates: Rates) -> float:
        """Standard deviation of that logarithm to expect."""
        found = estimate(self.loads, rates)
        return float(np.log(found.high_us / found.time_us)) / Z80


@dataclass(frozen=True, slots=True)
class PlanCalibration:
    """Rates fitted to measured steps.

    Attributes:
        steps: that were measured.
        rates: fitted to all of them; their spreads shrink or grow with the errors of the steps left out.
        before: log of predicted over measured time of each step by the rates it started from [n].
        after: the same by rates fitted to other steps, all but it or but a tenth of all [n].
    """

    steps: tuple[MeasuredPlan, ...]
    rates: Rates
    before: Float64
    after: Float64

    def to_dict(self) -> dict[str, Any]:
        """Return the rates, and each step with its errors as shares."""
        rows = zip(self.steps, np.expm1(self.before).tolist(), np.expm1(self.after).tolist(), strict=True)
        return {"rates": {name: getattr(self.rates, name) for name in SPREADS}, "spreads": asdict(self.rates.spreads),
                "steps": [{"plan": step.name, "measured_ms": step.us / 1e3, "error_before": one, "error_after": other}
                          for step, one, other in rows]}

    def __str__(self) -> str:
        """Say what was learned, in one sentence."""
        fitted = ", ".join(f"{name} {getattr(self.rates, name):.3g}" for name in SPREADS)
        return (f"Calibrated on {len(self.steps)} measured steps: off by {_percent(self.before)} in the mean before, "
                f"by {_percent(self.after)} after, each step predicted from the others ({fitted}).")


def calibrate(steps: Sequence[MeasuredPlan], start: Rates = Rates()) -> PlanCalibration:  # noqa: B008
    """Fit the rates to measured steps, and to all but some of them in turn.

    Raises:
        MeasuredPlanError: fewer than two steps, or one that took no time.
    """
    if len(steps) < 2:
        raise MeasuredPlanError("A calibration needs two measured steps or more, of which one can be predicted from "
                                f"the others; there {'is one' if steps else 'are none'}.")
    wrong = [each.name for each in steps if not 0 < each.us < np.inf]
    if wrong:
        raise MeasuredPlanError(f"The measured step of {wrong[0]} has no time above 0; give its milliseconds.")
    for each in steps:
        ratio = abs(each.log_ratio(start))
        if ratio > np.log(MOST_OFF):
            usual_us = estimate(each.loads, start).time_us
            raise MeasuredPlanError(
                f"The measured step of {each.name}, {each.us / 1e3:,.4g} ms, is {np.exp(ratio):,.0f} times off the "
                f"{usual_us / 1e3:,.4g} ms expected, which no rates explain; give milliseconds of a step, and the "
                "device and model that ran it.")
    folds = min(len(steps), MOST_FOLDS)
    others = [fit_rates([each for i, each in enumerate(steps) if i % folds != fold], start) for fold in range(folds)]
    after = np.array([each.log_ratio(others[i % folds]) for i, each in enumerate(steps)])
    rates = fit_rates(steps, start)
    expected = [each.expected(rates) for each in steps]
    # Variance of a scaled inverse chi-squared's mean: what was expected counts as a step of its own.
    factor = float(np.sqrt((1 + np.sum((after / expected) ** 2)) / (1 + len(steps))))
    return PlanCalibration(tuple(steps), replace(rates, spreads=start.spreads.scaled(factor)),
                       np.array([each.log_ratio(start) for each in steps]), after)


def fit_rates(steps: Sequence[MeasuredPlan], start: Rates = Rates(), error: float = ERROR) -> Rates:  # noqa: B008
    """The rates with the least squared log errors, robustly, that are least strange, and what is left by likeness.

    Args:
        steps: that were measured.
        start: rates around which the fitted ones lie.
        error: as ``ERROR``.
    """
    from scipy.optimize import least_squares  # a fifth of a second, which most plans need not spend

    middle = np.log([getattr(start, name) for name in SPREADS])
    width = np.array(list(SPREADS.values()))

    def rates_of(values: Float64) -> Rates:
        return replace(start, **dict(zip(SPREADS, np.exp(values).tolist(), strict=True)))

    def residuals(values: Float64) -> Float64:
        rates = rates_of(values)
        return np.concatenate([np.array([each.log_ratio(rates) for each in steps]) / error, (values - middle) / width])

    rates = rates_of(least_squares(residuals, middle, loss="soft_l1", x_scale=width, diff_step=1e-3).x)
    left = -np.array([each.log_ratio(rates) for each in steps])
    return replace(rates, likeness=Likeness.of([each.loads for each in steps], left))


def _percent(log_ratio: Float64) -> str:
    return f"{100 * np.mean(np.abs(np.expm1(log_ratio))):.1f}%"
