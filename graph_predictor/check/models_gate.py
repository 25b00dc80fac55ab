"""Whether the models got worse: every capture predicted again, its errors beside the stored ones."""

from __future__ import annotations

from collections.abc import Mapping

from graph_predictor.check.accuracy import FIGURES, Accuracy, accuracy
from graph_predictor.check.baseline import BaselineEntry
from graph_predictor.check.captures import StoredCapture
from graph_predictor.check.measure import measure
from graph_predictor.check.verdict import Status, Verdict
from graph_predictor.figures import signed_percent
from kernel_models.pricing import Models

TOLERANCE = 0.05
"""Errors may grow by this share of what was measured."""


def new_entry(capture: StoredCapture, profiles: Mapping[str, Models] | None = None) -> BaselineEntry:
    """All there is to store of a capture. Raises ``CheckError`` if it cannot be measured or predicted."""
    measured = measure(capture)
    return BaselineEntry(capture.program, capture.digest, measured.environment, measured.counts, measured.run,
                         accuracy(capture, profiles), capture.step_region or "")


def check_models(captures: list[StoredCapture], stored: Mapping[str, BaselineEntry], tolerance: float = TOLERANCE,
                 profiles: Mapping[str, Models] | None = None) -> list[Verdict]:
    """Predict every capture again and compare its errors with the stored ones.

    Args:
        captures: those of the directory.
        stored: the baseline's entries, by name.
        tolerance: an error this much larger (as a share of what was measured) is no failure.
        profiles: fitted models by name of the device.

    Raises:
        CheckError: a capture cannot be predicted.
    """
    return [verdict for capture in captures
            for verdict in judge(capture.name, stored[capture.name].accuracy, accuracy(capture, profiles), tolerance)]


def judge(name: str, before: Accuracy, now: Accuracy, tolerance: float) -> list[Verdict]:
    """Verdicts on one capture's figures: those that were stored, and those that are new."""
    old, new = before.figures(), now.figures()
    return [_judge_figure(name, figure, old.get(figure), new.get(figure), tolerance)
            for figure in FIGURES if figure in old or figure in new]


def _judge_figure(name: str, figure: str, old: float | None, new: float | None, tolerance: float) -> Verdict:
    what = FIGURES[figure]
    if old is None:
        return Verdict(name, what, Status.SKIPPED, None, new, "error",
                       f"{what}: no error was stored; --update-baseline stores it")
    if new is None:
        return Verdict(name, what, Status.FAILED, old, None, "error",
                       f"{what}: had an error of {signed_percent(old, 2)} and can no longer be predicted")
    grown = abs(new) - abs(old)
    worse = grown > tolerance
    change = "got worse" if worse else "got better" if grown < 0 else "as stored" if grown == 0 else "within tolerance"
    return Verdict(name, what, Status.FAILED if worse else Status.PASSED, old, new, "error",
                   f"{what}: error {signed_percent(new, 2)}, stored {signed_percent(old, 2)}, {change} "
                   f"(tolerance {tolerance:.1%})")
