"""Calibration: the ``CorrectionFactors`` at which a user's own measured steps are predicted, and how well they predict
others.

A few steps of a program on a cluster show what no data sheet has: kernels' times at real clocks, what host and
framework add, and the network's real rates. Seven factors are fitted to the steps, and the residuals are carried over
to similar plans (``ResidualModel``).

    measured plans ──costs_of_plan──▶ PlanCosts ──fit_plans──▶ CorrectionFactors ──estimate──▶ any other plan
                                          └──left out one by one──▶ the error to expect

Columns of a table of plans that were run:

    ``plan``       as ``foretrace plan --parallel`` takes it: "dp=8,tp=4,pp=2,microbatch=1,microbatches=16,sharding=1".
    ``step_ms``    measured time of a step without a profiler, milliseconds.
    ``gpus``       needed if the plan leaves one size out (default: as many as the plan has).
    ``model``      a workload, a config.json or a published model (default: the requested model).
    ``preset``     preset of a workload (default: the requested one).
    ``set``        settings of the model, separated by spaces, such as "seq=4096 layers=12" (default: the requested).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from kernel_models.collectives import CollectiveModel
from planner.parallel.corrections import UNCORRECTED, Z80, CorrectionFactors, ResidualModel, features, fit_factors
from planner.parallel.estimate import estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.plan_costs import PlanCosts, costs_of_plan
from tracer.arrays import Float64
from tracer.errors import ForetraceError
from tracer.parallel_plan import ParallelPlan
from tracer.shape_only.transformer import TransformerShape
from tracer.table_input import TableInputError, TableRow, read_rows

SPREADS: Mapping[str, float] = {"products": 0.3, "others": 0.3, "collectives": 0.5, "network": 0.5, "host_us": 0.7,
                                "host_collective_us": 0.7, "meet": 0.5}
"""Each fitted factor, and the standard deviation of its logarithm around its start: how much a job may reasonably
differ. It keeps a few steps from changing factors that they say nothing about."""
ERROR = 0.05
"""Scale of a step's error, as a logarithm, relative to which deviations of factors are weighed; larger errors count
linearly, not squared. Of 0.02, 0.04 and 0.08 on five rows of each of LLM-Foundry's tables, predicting the others: 7.6,
7.1, 7.0% in the mean of six draws (benchmarks/weak_scaling.py reads them)."""
MOST_FOLDS, MOST_OFF = 10, 100.0
"""Choices: most fits that leave steps out, and largest ratio of a step to its estimate; more means another unit, model
or device."""


class MeasuredPlanError(ForetraceError):
    """Measured steps from which nothing can be learned."""


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A measured step of a plan: name, costs of its parts, and time, µs."""

    name: str
    costs: PlanCosts
    us: float

    def log_ratio(self, rates: CorrectionFactors) -> float:
        """Return the natural logarithm of predicted over measured time."""
        return float(np.log(estimate(self.costs, rates).time_us / self.us))

    def expected(self, rates: CorrectionFactors) -> float:
        """Return the expected standard deviation of ``log_ratio``."""
        found = estimate(self.costs, rates)
        return float(np.log(found.high_us / found.time_us)) / Z80


@dataclass(frozen=True, slots=True)
class PlanCalibration:
    """Correction factors fitted to measured steps.

    Attributes:
        steps: the measured steps.
        rates: factors fitted to all steps; their spreads scale with the errors of left-out steps.
        before: logarithm of predicted over measured time of each step, by the factors before the fit [n].
        after: as ``before``, by factors fitted without the step (or without a tenth of the steps that includes it) [n].
    """

    steps: tuple[MeasuredPlan, ...]
    rates: CorrectionFactors
    before: Float64
    after: Float64

    def to_dict(self) -> dict[str, Any]:
        """Return the factors, and each step with its errors as shares."""
        rows = zip(self.steps, np.expm1(self.before).tolist(), np.expm1(self.after).tolist(), strict=True)
        return {"rates": {name: getattr(self.rates, name) for name in SPREADS}, "spreads": asdict(self.rates.spreads),
                "steps": [{"plan": step.name, "measured_ms": step.us / 1e3, "error_before": one, "error_after": other}
                          for step, one, other in rows]}

    def __str__(self) -> str:
        """Return the calibration's result in one sentence."""
        fitted = ", ".join(f"{name} {getattr(self.rates, name):.3g}" for name in SPREADS)
        return (f"Calibrated on {len(self.steps)} measured steps: off by {_percent(self.before)} in the mean before, "
                f"by {_percent(self.after)} after, each step predicted from the others ({fitted}).")


def calibrate(steps: Sequence[MeasuredPlan], start: CorrectionFactors = UNCORRECTED,
              widths: Mapping[str, float] = SPREADS) -> PlanCalibration:
    """Fit factors to measured steps, and without some of these to judge the fit. ``widths`` as in ``fit_factors``.

    Raises:
        MeasuredPlanError: there are fewer than two steps, or a time is not positive.
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
            usual_us = estimate(each.costs, start).time_us
            raise MeasuredPlanError(
                f"The measured step of {each.name}, {each.us / 1e3:,.4g} ms, is {np.exp(ratio):,.0f} times off the "
                f"{usual_us / 1e3:,.4g} ms expected, which no rates explain; give milliseconds of a step, and the "
                "device and model that ran it.")
    folds = min(len(steps), MOST_FOLDS)
    others = [fit_plans([each for i, each in enumerate(steps) if i % folds != fold], start, widths=widths)
              for fold in range(folds)]
    after = np.array([each.log_ratio(others[i % folds]) for i, each in enumerate(steps)])
    rates = fit_plans(steps, start, widths=widths)
    expected = [each.expected(rates) for each in steps]
    # Mean of a scaled inverse chi-squared distribution: the expectation counts as one step.
    factor = float(np.sqrt((1 + np.sum((after / expected) ** 2)) / (1 + len(steps))))
    return PlanCalibration(tuple(steps), replace(rates, spreads=start.spreads.scaled(factor)),
                       np.array([each.log_ratio(start) for each in steps]), after)


def fit_plans(steps: Sequence[MeasuredPlan], start: CorrectionFactors = UNCORRECTED, error: float = ERROR,
              widths: Mapping[str, float] = SPREADS) -> CorrectionFactors:
    """Fit factors and residuals to measured steps, with arguments as in ``fit_factors``. With a framework's own
    ``widths``, fewer steps than factors give no residuals: these would be chance."""
    rates = fit_factors(lambda rates: np.array([each.log_ratio(rates) for each in steps]), start, widths, error)
    if widths is not SPREADS and len(steps) < len(widths):
        return rates
    places = np.array([features(each.costs.plan, each.costs.shape) for each in steps])
    return replace(rates, residuals=ResidualModel.of(places, -np.array([each.log_ratio(rates) for each in steps])))


def _percent(log_ratio: Float64) -> str:
    return f"{100 * np.mean(np.abs(np.expm1(log_ratio))):.1f}%"


PLAN, STEP_MS = "plan", "step_ms"
OPTIONAL = ("gpus", "model", "preset", "set")

Model = Callable[[str, str, "list[str] | None"], TransformerShape]
"""Returns the decoder for a row's model, preset and settings, each empty if the row lacks it."""


def read_measured_plans(path: str, model: Model, pieces: LayerCosts, cluster: Callable[[int], CollectiveModel],
                        planned: Callable[[ParallelPlan], ParallelPlan] = lambda plan: plan) -> list[MeasuredPlan]:
    """Read measured steps from a table (CSV or Parquet), and price their parts.

    Args:
        model: returns the decoder of a row.
        pieces: costs on the measured device.
        cluster: returns the collectives of a number of GPUs.
        planned: returns a plan as the framework runs it.

    Raises:
        TableInputError: the table cannot be read or lacks a column, or a row's plan or time is invalid.
        MeasuredPlanError: the table has a column for a value that all rows must share.
    """
    rows = read_rows(path, (PLAN, STEP_MS), "measured plans", "docs/parallel.md")
    if unknown := [str(name) for name in rows[0].cells if name in ("device", "seq", "batch", "layers", "dtype")]:
        raise MeasuredPlanError(f"{path} has a column {unknown[0]}, which is not read; the runs of a table are of one "
                               "device, and what else a model was set to stands in the column set, as seq=4096.")
    return [_step(row, model, pieces, cluster, planned) for row in rows]


def _step(row: TableRow, model: Model, pieces: LayerCosts, cluster: Callable[[int], CollectiveModel],
          planned: Callable[[ParallelPlan], ParallelPlan]) -> MeasuredPlan:
    gpus, name, preset, settings = (row.text(column) for column in OPTIONAL)
    us, text = row.positive_ms(STEP_MS) * 1e3, row.text(PLAN, needed=True)
    world = row.whole("gpus", "number of GPUs") if gpus else None
    try:
        plan = planned(ParallelPlan.parse(text, world))
        shape = model(name, preset, settings.split() or None)
        return MeasuredPlan(text, costs_of_plan(plan, shape, pieces, cluster(plan.world_size)), us)
    except ForetraceError as error:
        raise TableInputError(f"{row.where}: the plan cannot be estimated: {error}") from error
