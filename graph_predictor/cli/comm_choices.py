"""Output of ``--comm-choices``: who does which collective of a step, and what that gains."""

from __future__ import annotations

from typing import Any

from graph_predictor.cli.console import Column, Report, percent
from graph_predictor.comm import mixing
from graph_predictor.prediction import result


def mixture_json(mixed: mixing.Mixture | None, step: result.Prediction, single: result.Prediction) -> dict[str, Any]:
    """Return who does what, and what the step gains over the best single backend; nothing where nobody asked."""
    if mixed is None:
        return {}
    gain, low, high = _step_gain(mixed, step, single)
    return {"comm_choices": mixed.to_json() | {
        "single_step_us": single.step_time_us, "step_gain_us": gain, "step_gain_interval_us": [low, high]}}


def report_mixture(mixed: mixing.Mixture | None, step: result.Prediction, single: result.Prediction) -> None:
    """Show the same."""
    if mixed is None:
        return
    report, best = Report(), mixed.best_single
    report.table("Collectives of a rank's step, each by the best backend (µs, one after another)", [
        Column("collective", name=True, whole=True), Column("ranks"), Column("size"),
        Column("backend", name=True, whole=True), Column("calls"), Column("time"),
        Column(f"{best}\nalone"), Column("gain"), Column("80%\nbetween")],
        mixed.table())
    report.line()
    report.line(mixed.headline())
    if mixed.rows:
        gain, low, high = _step_gain(mixed, step, single)
        report.line(f"The step with {best} alone: {single.step_time_us / 1e3:,.3f} ms, {gain / 1e3:,.3f} ms more "
                    f"({percent(gain / step.step_time_us, 2)}; 80% between {low / 1e3:,.3f} and {high / 1e3:,.3f} ms).")
    report.notes(mixed.notes())


def _step_gain(mixed: mixing.Mixture, step: result.Prediction, single: result.Prediction) -> tuple[float, float, float]:
    """Return what the step gains, µs, and an interval: that of the collectives' gain times the share of it that the
    step gains."""
    gain, (whole, low, high) = single.step_time_us - step.step_time_us, mixed.gain_us
    share = gain / whole if whole else 0.0
    low, high = sorted((share * low, share * high))
    return gain, low, high
