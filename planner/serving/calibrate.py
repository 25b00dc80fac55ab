"""Calibration on measured rows of a user's own server: correction factors, and residuals of similar rows.

Like ``parallel.calibrate`` for plans: a few factors are fitted that deviate least from their usual values, and the
residuals are applied to similar rows.

    measured rows ──simulated──▶ log ratios ──fit──▶ CorrectionFactors, residuals ──▶ any other row
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kernel_models.collectives import CollectiveModel
from kernel_models.device import DeviceSpec
from kernel_models.pricing import Models
from planner.parallel.corrections import CorrectionFactors, ResidualModel, fit_factors
from planner.serving.batching import simulate_serving
from planner.serving.setup import CacheAccount, Lengths, Requests, ServingError, ServingSetup, cache_account
from planner.serving.steps import ServingModel
from tracer.arrays import Float64, Int64
from tracer.shape_only.transformer import TransformerShape
from tracer.table_input import read_rows

FACTORS: Mapping[str, float] = {"products": 0.25, "others": 0.4, "collectives": 0.4, "host_us": 0.7, "step_us": 0.7}
"""The fitted factors, and the standard deviation of each one's logarithm around its start."""
ERROR = 0.05
"""Scale of a row's error, as a logarithm, relative to which deviations of factors are weighed."""
FIRST_WEIGHT = 0.25
"""Weight of a time to the first token relative to a time between tokens: its errors are four times as large."""
REACH, NOISE, WILD = 2.0, 0.15, math.inf
"""Settings of ``ResidualModel``: rows a factor of four apart in one figure share about half of a residual."""
STEPS, NUDGE = 2, 0.05
"""Rounds of fitting with all rows simulated again, and the change of a factor's logarithm by which its effect is
measured."""
USUAL, EXPECTED = 0.18, 0.25
"""Mean error between tokens that spreads without a calibration imply (0.8 of their standard deviation), and the number
of rows for which it counts. Set so that with ten known rows about 80% of the looked-at half of the serving table lie
inside the interval."""
LEAST_SPREAD, MOST_SPREAD, MOST_OFF, DOUBTFUL = 0.15, 2.0, 100.0, 0.3
"""Choices: limits of the factor on spreads, largest ratio of a row to its prediction, and the remaining error from
which the rows are doubted."""


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """A measured row of a server, and the models that predict it.

    Attributes:
        name: where the row stands.
        model: model of the steps.
        cache: memory of the replica.
        load: the load.
        ttft_ms, tpot_ms: measured means; NaN if not measured.
    """

    name: str
    model: ServingModel
    cache: CacheAccount
    load: Requests
    ttft_ms: float
    tpot_ms: float

    def log_ratios(self, rates: CorrectionFactors) -> tuple[float, float]:
        """Return the logarithms of measured over predicted times: to the first token, and between tokens."""
        model = self.model.with_rates(rates)
        got = simulate_serving(self.load, model.setup, model.surface, self.cache)
        return (_log(self.ttft_ms * 1e3, got.mean_ttft_us()), _log(self.tpot_ms * 1e3, got.mean_tpot_us()))


@dataclass(frozen=True, slots=True)
class ServingCalibration:
    """Correction factors fitted to measured rows, and the residuals.

    Attributes:
        rows: number of measured rows.
        rates: the fitted factors.
        first, between: residuals of times to the first token, and of times between tokens, by ``features``.
        before, after: mean absolute error of times between tokens: before, and with each row predicted from the others.
        spread: factor on spreads: remaining error over expected error.
    """

    rows: int
    rates: CorrectionFactors
    first: ResidualModel
    between: ResidualModel
    before: float
    after: float
    spread: float

    def to_dict(self) -> dict[str, Any]:
        """Return the factors and errors as plain values."""
        return {"rows": self.rows, "rates": {name: getattr(self.rates, name) for name in FACTORS},
                "tpot_error_before": self.before, "tpot_error_after": self.after, "spread": self.spread}

    def __str__(self) -> str:
        """Return the calibration's result in one sentence."""
        fitted = ", ".join(f"{name} {getattr(self.rates, name):.3g}" for name in FACTORS)
        if not math.isfinite(self.before):
            return f"Calibrated on {self.rows} measured rows, of first tokens alone ({fitted})."
        doubt = ("; the rows contradict each other or are of another model, device or engine: check them"
                 if not self.after < DOUBTFUL else "")
        return (f"Calibrated on {self.rows} measured rows: TPOT off by {self.before:.1%} in the mean before, by "
                f"{self.after:.1%} after, each row predicted from the others ({fitted}){doubt}.")


def features(setup: ServingSetup, load: Requests) -> tuple[float, ...]:
    """Return a row's coordinates for ``ResidualModel``: logarithms to base 2 of its figures."""
    return (math.log2(setup.tp), math.log2(setup.ep), math.log2(setup.attention_dp), math.log2(load.prompt.mean),
            math.log2(load.output.mean), math.log2(max(load.concurrency, load.rate, 1e-3)))


def calibrate_serving(rows: Sequence[MeasuredRow], start: CorrectionFactors) -> ServingCalibration:
    """Fit correction factors to measured rows, and keep the residuals for similar rows.

    Args:
        rows: measured rows of one engine on one kind of GPU.
        start: factors around which the fitted ones lie.

    Raises:
        ServingError: there are fewer than two rows, or a row is far off its prediction.
    """
    if len(rows) < 2:
        raise ServingError("A calibration needs two measured rows or more, of which one can be predicted from the "
                           f"others; there {'is one' if rows else 'are none'}.")
    names = [name for name in FACTORS if getattr(start, name) > 0]
    first = here = _Linear.of(rows, names, start)
    for each, ratios in zip(rows, first.left, strict=True):
        far = abs(ratios[1]) if math.isfinite(ratios[1]) else abs(ratios[0])
        if far > math.log(MOST_OFF):
            raise ServingError(f"{each.name} is {math.exp(far):,.0f} times off what is expected, which no rates "
                               "explain; give milliseconds, and the model, device and engine that they are of.")
    everything = np.arange(len(rows))
    rates = start
    for _ in range(STEPS):
        rates = here.fitted(start, everything)
        here = _Linear.of(rows, names, rates)
    places = np.array([features(each.model.setup, each.load) for each in rows])
    errors = []
    for row, place in enumerate(places):
        others = everything != row
        left = here.left_by(here.fitted(start, others))
        errors.append(left[row, 1] - _carried(places[others], left[others, 1]).at(tuple(place)))
    after = _error(np.array(errors))
    spread = math.sqrt((EXPECTED + len(rows) * (after / USUAL) ** 2) / (EXPECTED + len(rows))) if (
        math.isfinite(after)) else 1.0
    spread = min(max(spread, LEAST_SPREAD), MOST_SPREAD)
    return ServingCalibration(
        len(rows), replace(rates, spreads=start.spreads.scaled(spread)), _carried(places, here.left[:, 0]),
        _carried(places, here.left[:, 1]), _error(first.left[:, 1]), after, spread)


@dataclass(frozen=True, slots=True)
class _Linear:
    """Logarithms of measured over predicted times of n rows, and their slopes over logarithms of factors.

    Attributes:
        names: names of the factors.
        at: logarithms of the factors with which the rows were predicted.
        left: for times to the first token and between tokens [n, 2]; NaN if not measured.
        slopes: change of the predicted logarithms with each factor's logarithm [n, 2, factors].
    """

    names: Sequence[str]
    at: Float64
    left: Float64
    slopes: Float64

    @staticmethod
    def of(rows: Sequence[MeasuredRow], names: Sequence[str], rates: CorrectionFactors) -> _Linear:
        """Simulate the rows with these factors, and with each factor a little larger."""
        def left(**moved: Any) -> Float64:
            return np.array([each.log_ratios(replace(rates, **moved)) for each in rows])

        here = left()
        slopes = [(here - left(**{name: getattr(rates, name) * math.exp(NUDGE)})) / NUDGE for name in names]
        return _Linear(names, np.log([getattr(rates, name) for name in names]), here, np.stack(slopes, axis=2))

    def left_by(self, rates: CorrectionFactors) -> Float64:
        """Return ``left`` for other factors, by the slopes."""
        return self.left - self.slopes @ (np.log([getattr(rates, name) for name in self.names]) - self.at)

    def fitted(self, start: CorrectionFactors, rows: Int64) -> CorrectionFactors:
        """Return the factors fitted to these rows."""
        # For first tokens only differences between rows count: their mean depends on how a benchmark begins.
        known = np.isfinite(self.left[rows, 0])
        middle = np.median(self.left[rows, 0][known]) if known.any() else 0.0

        def log_ratios(rates: CorrectionFactors) -> Float64:
            first, between = (column[np.isfinite(column)] for column in self.left_by(rates)[rows].T)
            return -np.concatenate([FIRST_WEIGHT * (first - middle), between])

        return fit_factors(log_ratios, start, {name: FACTORS[name] for name in self.names}, ERROR, firm=True)


def _carried(places: Float64, left: Float64) -> ResidualModel:
    """Return a model of the rows' residuals; it corrects by no more than the largest residual seen, up or down."""
    found = ResidualModel.of(places, np.nan_to_num(left), REACH, NOISE, WILD)
    most = max(-found.least, found.most)
    return replace(found, least=-most, most=most)


def _error(log_ratios: Float64) -> float:
    known = log_ratios[np.isfinite(log_ratios)]
    return float(np.mean(np.abs(np.expm1(-known)))) if len(known) else math.nan


def read_measured_rows(path: str, shape: TransformerShape, setup: ServingSetup, device: DeviceSpec,
                       models: Models | None, cluster: Callable[[int], CollectiveModel], longest: int = 0
                       ) -> list[MeasuredRow]:
    """Read measured rows from a table (CSV or Parquet).

    Columns: ``concurrency``, ``prompt``, ``output``, and the means ``ttft_ms`` and ``tpot_ms``, at least one of them.
    ``tp``, ``ep`` and ``attention_dp`` are needed where they differ from ``setup``.

    Raises:
        TableInputError: the table cannot be read, lacks a column, or has an invalid cell.
        ServingError: a row is not possible.
    """
    rows = read_rows(path, ("concurrency", "prompt", "output"), "measured rows", "docs/serving.md")
    if not {"ttft_ms", "tpot_ms"} & set(rows[0].cells):
        raise ServingError(f"{path} has neither ttft_ms nor tpot_ms; give one or both columns.")
    known: dict[ServingSetup, ServingModel] = {}
    found = []
    for number, row in enumerate(rows, 1):
        tp, ep, groups = (row.whole(key) if row.text(key) else getattr(setup, key)
                          for key in ("tp", "ep", "attention_dp"))
        own = replace(setup, tp=tp, ep=ep, attention_dp=groups)
        if own not in known:
            known[own] = ServingModel(shape, own, device, cluster(own.gpus), models)
        prompt, output = (Lengths.parse(row.text(key).removesuffix(".0"), f"{row.where}, column {key}:")
                          for key in ("prompt", "output"))
        load = Requests(prompt, output, row.whole("concurrency"), apart=True)
        times = [row.positive_ms(key) if row.text(key) else math.nan for key in ("ttft_ms", "tpot_ms")]
        if not any(map(math.isfinite, times)):
            raise ServingError(f"{row.where}: it has no time; give one, or remove the row.")
        tokens = load.prompt.longest + load.output.longest
        if longest and tokens > longest:
            raise ServingError(f"{row.where}: it has prompts and answers of {tokens:,} tokens, more than the "
                               f"{longest:,} that the model takes; give the rows of this model.")
        cache = cache_account(shape, own, device, tokens)
        cache.check(1, tokens, f"{row.where}: the model")
        found.append(MeasuredRow(f"Row {number} of {Path(path).name}", known[own], cache, load, times[0], times[1]))
    return found


def _log(measured: float, predicted: float) -> float:
    return math.log(measured / predicted) if measured > 0 and predicted > 0 else math.nan
