"""Output of commands on a step's collectives, each by the best backend, and on what the step gains."""

from __future__ import annotations

from typing import Any

from graph_predictor.comm import mixing
from graph_predictor.figures import percent
from step_views.cli.console import Column, Report


def mixture_json(mixed: mixing.Mixture, step_us: float, single_us: float) -> dict[str, Any]:
    """Return each collective's backend, and the step's gain over the best single backend."""
    gain, low, high = mixed.step_gain(step_us, single_us)
    return {"comm_choices": mixed.to_json() | {
        "single_step_us": single_us, "step_gain_us": gain, "step_gain_interval_us": [low, high]}}


def report_mixture(mixed: mixing.Mixture, step_us: float, single_us: float) -> None:
    """Print the contents of ``mixture_json``."""
    report, best = Report(), mixed.best_single
    report.table("Collectives of a rank's step, each by the best backend (µs, one after another)", [
        Column("collective", name=True, whole=True), Column("ranks"), Column("size"),
        Column("backend", name=True, whole=True), Column("calls"), Column("time"),
        Column(f"{best}\nalone"), Column("gain"), Column("80%\nbetween")],
        mixed.table())
    report.line()
    report.line(mixed.headline())
    if mixed.rows:
        gain, low, high = mixed.step_gain(step_us, single_us)
        report.line(f"The step with {best} alone: {single_us / 1e3:,.3f} ms, {gain / 1e3:,.3f} ms more "
                    f"({percent(gain / step_us, 2)}; 80% between {low / 1e3:,.3f} and {high / 1e3:,.3f} ms).")
    report.notes(mixed.notes())
