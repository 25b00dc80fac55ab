"""The three things ``foretrace check`` does with a directory: judge the models, judge a program, renew the baseline."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from graph_predictor.check.accuracy import FIGURES
from graph_predictor.check.baseline import BaselineFile
from graph_predictor.check.captures import CheckError, StoredCapture, find_captures, pair_captures
from graph_predictor.check.models_gate import TOLERANCE, check_models, new_entry
from graph_predictor.check.program_gate import LEAST, LEVEL, check_programs
from graph_predictor.check.verdict import GateOutcome, Status, Verdict
from graph_predictor.figures import signed_percent
from kernel_models.pricing import Models

Explain = Callable[[StoredCapture, StoredCapture], list[str]]
"""A function that explains the difference between an old and a new capture in lines, the largest cause first."""


def check_directory(directory: str, *, tolerance: float | None = None,
                    profiles: Mapping[str, Models] | None = None, step_region: str | None = None) -> GateOutcome:
    """Predict every capture of a directory again and compare with its baseline.

    Args:
        directory: captures and ``baseline.json``.
        tolerance: errors may be this much larger than the stored ones (as a share of what was measured); 5%.
        profiles: fitted models by name of the device.
        step_region: the captures' steps are the regions of this name.

    Raises:
        CheckError: there is no capture or no baseline, or they do not belong together.
    """
    captures = _captures(directory, step_region)
    stored = BaselineFile(directory).read_for(captures).captures
    allowed = TOLERANCE if tolerance is None else tolerance
    return GateOutcome(f"accuracy of the models on {directory}", check_models(captures, stored, allowed, profiles),
                       notes=_partial(captures))


def check_against(directory: str, new: str, *, tolerance: float | None = None, level: float = LEVEL,
                  resolution: float | None = None, explain: Explain | None = None,
                  step_region: str | None = None) -> GateOutcome:
    """Compare new captures with the baseline of a directory.

    Args:
        directory: captures and ``baseline.json``.
        new: a capture, or a directory of them.
        tolerance: growth of times and memory that is too small to matter; 1%.
        level: chance of a false alarm.
        resolution: growth that must be excluded, or a figure is inconclusive; 25%, of host memory 50%.
        explain: asked about every program that got worse.
        step_region: the captures' steps are the regions of this name, the old ones' and the new ones'.

    Raises:
        CheckError: as ``check_directory``; or a new capture is of none of its programs.
    """
    captures = _captures(directory, step_region)
    stored = BaselineFile(directory).read_for(captures).captures
    if new and Path(new).exists() and os.path.samefile(directory, new):
        raise CheckError(f"{new} is the baseline's own directory; name that of the new captures.")
    fresh = find_captures(new, step_region)
    for capture in fresh:
        if any(os.path.samefile(capture.path, each.path) for each in captures):
            raise CheckError(f"{capture.path} is one of the baseline's own captures; name a new capture.")
    pairs = pair_captures(captures, fresh)
    verdicts, notes = check_programs(pairs, stored, LEAST if tolerance is None else tolerance, level, resolution)
    found = GateOutcome(f"{new} against {directory}", verdicts, notes=[*_partial(fresh), *notes])
    left = sorted({capture.program for capture in captures} - {pair.program for pair in pairs})
    if left:
        found.notes.append(f"Not in {new}, and so not compared: {', '.join(left)}.")
    worse = {verdict.program for verdict in found.failures}
    for pair in pairs:
        if explain is not None and pair.program in worse:
            found.causes[pair.program] = explain(pair.old[0], pair.new[0])
    return found


def update_baseline(directory: str, reason: str, profiles: Mapping[str, Models] | None = None,
                    step_region: str | None = None) -> GateOutcome:
    """Measure and predict every capture and write the directory's baseline anew, whole or not at all.

    Raises:
        CheckError: no reason is given, a capture cannot be measured, or the old file is none of foretrace's.
    """
    if not reason.strip():
        raise CheckError("A new baseline needs a reason: --reason TEXT says why the figures changed.")
    captures = _captures(directory, step_region)
    file = BaselineFile(directory)
    # Before the work: one that must not be replaced is told at once.
    before = file.read().captures if file.path.exists() else {}
    entries = {capture.name: new_entry(capture, profiles) for capture in captures}
    file.write(entries, reason)
    return GateOutcome(f"new baseline of {directory}", [
        Verdict(name, FIGURES[figure], Status.STORED, before[name].accuracy.figures().get(figure) if name in before else
                None, value, "error", f"{FIGURES[figure]}: error {signed_percent(value, 2)}, stored")
        for name, entry in entries.items() for figure, value in entry.accuracy.figures().items()],
        notes=_partial(captures), stored=True)


def _partial(captures: list[StoredCapture]) -> list[str]:
    """A note on each capture that ended before it had everything."""
    return [f"The capture {capture.name} is not complete: {context.get('ended') or 'it ended early'}."
            for capture in captures for context in capture.contexts[:1] if context.get("complete") is False]


def _captures(directory: str, step_region: str | None) -> list[StoredCapture]:
    if Path(directory).is_file():
        raise CheckError(f"{directory} is a file; name the directory of captures that holds the baseline.")
    return find_captures(directory, step_region)
