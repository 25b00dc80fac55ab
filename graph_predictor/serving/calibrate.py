"""Calibration: what measured rows of one's own server say of its kernels, its host, and its first tokens.

As ``parallel.calibrate`` does with measured plans: a handful of factors that are least strange, and what is left is
carried over to rows like those that were measured.

    measured rows ──simulated──▶ log ratios ──fit──▶ Rates, likeness ──▶ any other row
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from graph_predictor.parallel.estimate import Rates
from graph_predictor.serving.batching import simulate_serving
from graph_predictor.serving.cache import CacheAccount, cache_account
from graph_predictor.serving.errors import ServingError
from graph_predictor.serving.load import Lengths, Requests
from graph_predictor.serving.setup import ServingSetup
from graph_predictor.serving.steps import ServingModel
from kernel_models.collectives import CollectiveModel
from kernel_models.device import DeviceSpec
from kernel_models.pricing import Models
from tracer.arrays import Float64
from tracer.shape_only.transformer import TransformerShape
from tracer.table_input import read_frame

FACTORS: Mapping[str, float] = {"products": 0.25, "others": 0.4, "collectives": 0.4, "host_us": 0.7, "step_us": 0.7}
"""What is fitted, and the standard deviation of its logarithm around where it starts."""
ERROR = 0.05
"""Log scale of a row's error against which strangeness is weighed."""
FIRST_WEIGHT = 0.25
"""Weight of a time to the first token beside one between tokens: it strays four times as much."""
REACH, NOISE = 2.0, 0.15
"""Of what is left, as ``parallel.likeness``: rows a factor of four apart in one figure are alike by half."""
NUMBERS = ("tp", "ep", "attention_dp", "prompt", "output", "concurrency")
LEAST_SPREAD = 0.35
MOST_OFF = 100.0


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """A measured row, and what predicts it.

    Attributes:
        name: of it.
        model: of its steps.
        cache: of its memory.
        load: that was asked.
        ttft_ms, tpot_ms: measured; NaN where one is not.
    """

    name: str
    model: ServingModel
    cache: CacheAccount
    load: Requests
    ttft_ms: float
    tpot_ms: float

    def log_ratios(self, rates: Rates) -> tuple[float, float]:
        """Return logarithms of measured over predicted: to the first token, and between tokens."""
        model = self.model.with_rates(rates)
        got = simulate_serving(self.load, model.setup, model.surface, self.cache)
        return (_log(self.ttft_ms * 1e3, got.mean_ttft_us()), _log(self.tpot_ms * 1e3, got.mean_tpot_us()))


@dataclass(frozen=True, slots=True)
class ServingCalibration:
    """Rates fitted to measured rows, and what is left of rows like them.

    Attributes:
        rows: how many were measured.
        rates: fitted.
        places: features of each row [n][d].
        first, between: weights of each row in what is left [n].
        bounds: of what is carried over, logarithms: of first tokens, and between tokens.
        before, after: mean absolute error between tokens: without, and each row predicted from the others.
        spread: factor on spreads: what is left over what was expected.
    """

    rows: int
    rates: Rates
    places: tuple[tuple[float, ...], ...]
    first: tuple[float, ...]
    between: tuple[float, ...]
    bounds: tuple[float, float]
    before: float
    after: float
    spread: float

    def ttft_factor(self, setup: ServingSetup, load: Requests) -> float:
        """Return by what a predicted time to the first token is multiplied."""
        return self._factor(setup, load, self.first, self.bounds[0])

    def tpot_factor(self, setup: ServingSetup, load: Requests) -> float:
        """Return by what a predicted time between tokens is multiplied."""
        return self._factor(setup, load, self.between, self.bounds[1])

    def _factor(self, setup: ServingSetup, load: Requests, weights: Sequence[float], most: float) -> float:
        kernel = _kernel(np.array([features(setup, load)]), np.array(self.places))
        return math.exp(float(np.clip(kernel @ np.array(weights), -most, most)[0]))

    def to_dict(self) -> dict[str, Any]:
        """Return the factors and the errors."""
        return {"rows": self.rows, "rates": {name: getattr(self.rates, name) for name in FACTORS},
                "tpot_error_before": self.before, "tpot_error_after": self.after, "spread": self.spread}

    def __str__(self) -> str:
        """Say what was learned, in one sentence."""
        fitted = ", ".join(f"{name} {getattr(self.rates, name):.3g}" for name in FACTORS)
        return (f"Calibrated on {self.rows} measured rows: TPOT off by {self.before:.1%} in the mean before, by "
                f"{self.after:.1%} after, each row predicted from the others ({fitted}).")


def features(setup: ServingSetup, load: Requests) -> tuple[float, ...]:
    """Return where a row lies among rows: logarithms to the base 2 of its figures."""
    return (math.log2(setup.tp), math.log2(setup.ep), math.log2(setup.attention_dp), math.log2(load.prompt.mean),
            math.log2(load.output.mean), math.log2(max(load.concurrency, load.rate, 1e-3)))


def calibrate_serving(rows: Sequence[MeasuredRow], start: Rates, *, check: bool = True) -> ServingCalibration:
    """Fit rates to measured rows, and carry over what is left.

    Args:
        rows: that were measured, of one engine on one kind of GPU.
        start: rates around which the fitted ones lie.
        check: tell the error of rows that are left out, which takes a fit each.

    Raises:
        ServingError: there are fewer than two, or one is far off what is expected.
    """
    if len(rows) < 2:
        raise ServingError("A calibration needs two measured rows or more, of which one can be predicted from the "
                           f"others; there {'is one' if rows else 'are none'}.")
    before = np.array([each.log_ratios(start) for each in rows])
    for each, ratios in zip(rows, before, strict=True):
        far = np.nanmax(np.abs(ratios)) if np.isfinite(ratios).any() else 0.0
        if far > math.log(MOST_OFF):
            raise ServingError(f"{each.name} is {math.exp(far):,.0f} times off what is expected, which no rates "
                               "explain; give milliseconds, and the model, device and engine that they are of.")
    found = _fitted(rows, start)
    after = found.before
    if check:
        errors = []
        for left in range(len(rows)):
            other = _fitted([each for row, each in enumerate(rows) if row != left], start)
            ratio = rows[left].log_ratios(other.rates)[1]
            errors.append(ratio - math.log(other.tpot_factor(rows[left].model.setup, rows[left].load)))
        kept = [each for each in errors if math.isfinite(each)]
        after = float(np.mean(np.abs(np.expm1(-np.array(kept))))) if kept else math.nan
    usual = float(np.nanmean(np.abs(np.expm1(-before[:, 1])))) if np.isfinite(before[:, 1]).any() else math.nan
    # What was expected counts as two rows of its own.
    spread = math.sqrt((2 + len(rows) * (after / 0.12) ** 2) / (2 + len(rows))) if math.isfinite(after) else 1.0
    return replace(found, before=usual, after=after, spread=min(max(spread, LEAST_SPREAD), 2.0),
                   rates=replace(found.rates, spreads=start.spreads.scaled(min(max(spread, LEAST_SPREAD), 2.0))))


def _fitted(rows: Sequence[MeasuredRow], start: Rates) -> ServingCalibration:
    names = [name for name in FACTORS if getattr(start, name) > 0]
    middle = np.log([getattr(start, name) for name in names])
    width = np.array([FACTORS[name] for name in names])

    def rates(values: Float64) -> Rates:
        return replace(start, **dict(zip(names, np.exp(values).tolist(), strict=True)))

    def residuals(values: Float64) -> Float64:
        ratios = np.array([each.log_ratios(rates(values)) for each in rows])
        first = np.nan_to_num(ratios[:, 0]) - np.nanmedian(np.append(ratios[:, 0], 0.0))
        return np.concatenate([np.nan_to_num(ratios[:, 1]) / ERROR, FIRST_WEIGHT * first / ERROR,
                               (values - middle) / width])

    found = rates(least_squares(residuals, middle, loss="soft_l1", x_scale=width, diff_step=1e-2, max_nfev=12).x)
    left = np.array([each.log_ratios(found) for each in rows])
    places = tuple(features(each.model.setup, each.load) for each in rows)
    kernel = _kernel(np.array(places), np.array(places)) + NOISE * np.eye(len(rows))
    first, between = (np.linalg.solve(kernel, np.nan_to_num(left[:, column])) for column in (0, 1))
    bounds = tuple(float(np.nanmax(np.abs(np.append(left[:, column], 0.0)))) for column in (0, 1))
    error = float(np.nanmean(np.abs(np.expm1(-left[:, 1])))) if np.isfinite(left[:, 1]).any() else math.nan
    return ServingCalibration(len(rows), found, places, tuple(first.tolist()), tuple(between.tolist()),
                              (bounds[0], bounds[1]), error, error, 1.0)


def read_measured_rows(path: str, shape: TransformerShape, setup: ServingSetup, device: DeviceSpec,
                       models: Models | None, cluster: Callable[[int], CollectiveModel]) -> list[MeasuredRow]:
    """Read measured rows of a table (CSV or Parquet).

    Columns: ``concurrency``, ``prompt``, ``output`` and at least one of ``ttft_ms`` and ``tpot_ms``, means; where they
    are not those of ``setup``, ``tp``, ``ep`` and ``attention_dp``.

    Raises:
        ServingError: a column is lacking, or a row cannot be.
        ForetraceError: the table cannot be read.
    """
    frame = read_frame(path)
    if lacking := [name for name in ("concurrency", "prompt", "output") if name not in frame]:
        raise ServingError(f"{path} is no table of measured rows: it lacks the column {lacking[0]} (it has "
                           f"{', '.join(map(str, frame.columns[:6]))}); see docs/serving.md.")
    if not {"ttft_ms", "tpot_ms"} & set(frame):
        raise ServingError(f"{path} has neither ttft_ms nor tpot_ms, of which one or both are needed.")
    known: dict[ServingSetup, ServingModel] = {}
    found = []
    for number, row in enumerate(frame.to_dict("records"), 1):
        name = f"Row {number} of {Path(path).name}"
        tp, ep, groups = (_whole(row[key], name, key) if key in row and row[key] == row[key] else getattr(setup, key)
                          for key in ("tp", "ep", "attention_dp"))
        own = replace(setup, tp=tp, ep=ep, attention_dp=groups)
        if own not in known:
            known[own] = ServingModel(shape, own, device, cluster(own.gpus), models)
        prompt, output = (Lengths.parse(str(row[key]).removesuffix(".0"), f"{name}: {key}")
                          for key in ("prompt", "output"))
        load = Requests(prompt, output, _whole(row["concurrency"], name, "concurrency"))
        times = [float(row[key]) if key in row and _is_time(row[key]) else math.nan for key in ("ttft_ms", "tpot_ms")]
        for key, value in zip(("ttft_ms", "tpot_ms"), times, strict=True):
            if key in row and row[key] == row[key] and row[key] is not None and not math.isfinite(value):
                raise ServingError(f"{name} holds {str(row[key])[:40]!r} as {key}, which is no positive number of "
                                   "milliseconds; correct or remove it.")
        if not any(map(math.isfinite, times)):
            raise ServingError(f"{name} has no time; correct or remove it.")
        cache = cache_account(shape, own, device, load.prompt.longest + load.output.longest)
        found.append(MeasuredRow(name, known[own], cache, load, times[0], times[1]))
    return found




def _is_time(value: object) -> bool:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return math.isfinite(number) and number > 0


def _whole(value: object, name: str, key: str) -> int:
    text = str(value).removesuffix(".0")
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 8 and int(text)):
        raise ServingError(f"{name} holds {text[:40]!r} as {key}, which is no whole number from 1; correct it.")
    return int(text)


def _kernel(one: Float64, other: Float64) -> Float64:
    distance = ((one[:, None, :] - other[None, :, :]) ** 2).sum(axis=2)
    return np.exp(-distance / (2 * REACH**2))


def _log(measured: float, predicted: float) -> float:
    return math.log(measured / predicted) if measured > 0 and predicted > 0 else math.nan
