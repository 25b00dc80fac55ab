"""The tasks of ``foretrace check``: judge the models, judge a program, renew the baseline, each for a directory; and
test a script.

The test of a script compares its present version with another one. Both run here and now, alternately. Other work,
clocks or a new kernel change a machine between two sessions, and no later correction removes their effect. In
alternating runs both versions meet the same changes. Each pair of runs gives the log ratio of its two median steps. The
only assumption is that without a change of the program these logs are symmetric around zero.

* p-value: Wilcoxon's signed-rank test of "longer by no more than ``least``", exact for few pairs;
* estimate: the median of all means of two pairs (Hodges and Lehmann 1963);
* interval: the means of two pairs that the same test does not exclude. One pair on a busy machine changes it little.

Counts are compared as with a baseline.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graph_predictor.figures import signed_percent
from kernel_models.pricing import Models
from step_views.check.baseline import BaselineEntry, BaselineFile
from step_views.check.measure import CheckError, Pair, StoredCapture, find_captures, measure, pair_captures
from step_views.check.noise import other_tree, run_in_turns
from step_views.check.program_gate import (
    LEAST,
    LEVEL,
    RESOLUTION,
    check_programs,
    compare_counts,
    compare_types,
    sure,
)
from step_views.check.validate import FIGURES, Accuracy, accuracy
from step_views.check.verdict import GateOutcome, Status, Verdict, in_unit
from tracer.arrays import Float64
from tracer.kept_files import scratch_folder

Explain = Callable[[StoredCapture, StoredCapture, bool], list[str]]
"""A function that explains the difference between an old and a new capture in lines, the largest cause first. The last
argument is whether something certainly got worse; otherwise the function may name certain causes only."""


def check_directory(directory: str, *, tolerance: float | None = None,
                    profiles: Mapping[str, Models] | None = None, step_region: str | None = None,
                    cycle: int | None = None) -> GateOutcome:
    """Predict every capture of a directory again, and compare the errors with its baseline.

    Args:
        directory: the captures and ``baseline.json``.
        tolerance: share of the measured value by which errors may exceed the stored ones; 5% by default.
        profiles: fitted models by device name.
        step_region: name of the regions that are the captures' steps.
        cycle: recorded steps that make one step (``tracer.read_job``).

    Raises:
        CheckError: there is no capture or no baseline, or they do not belong together.
    """
    captures = _captures(directory, step_region, cycle)
    stored = BaselineFile(directory).read_for(captures).captures
    allowed = TOLERANCE if tolerance is None else tolerance
    return GateOutcome(f"accuracy of the models on {directory}", check_models(captures, stored, allowed, profiles),
                       notes=_partial(captures))


def check_against(directory: str, new: str, *, tolerance: float | None = None,
                  resolution: float | None = None, explain: Explain | None = None,
                  step_region: str | None = None, cycle: int | None = None) -> GateOutcome:
    """Compare new captures with the baseline of a directory.

    Args:
        directory: the captures and ``baseline.json``.
        new: a capture, or a directory of captures.
        tolerance: share by which times and memory may grow without mattering; 1% by default.
        resolution: growth that must be excluded, else a figure is inconclusive; 25% by default, 50% for host memory.
        explain: called for every program that got worse.
        step_region: name of the regions that are the steps of old and new captures.
        cycle: recorded steps that make one step (``tracer.read_job``).

    Raises:
        CheckError: as in ``check_directory``; or a new capture belongs to none of the programs.
    """
    captures = _captures(directory, step_region, cycle)
    stored = BaselineFile(directory).read_for(captures).captures
    if new and Path(new).exists() and os.path.samefile(directory, new):
        raise CheckError(f"{new} is the baseline's own directory; name that of the new captures.")
    fresh = find_captures(new, step_region, cycle)
    for capture in fresh:
        if any(os.path.samefile(capture.path, each.path) for each in captures):
            raise CheckError(f"{capture.path} is one of the baseline's own captures; name a new capture.")
    pairs = pair_captures(captures, fresh)
    verdicts, notes = check_programs(pairs, stored, LEAST if tolerance is None else tolerance, resolution)
    found = GateOutcome(f"{new} against {directory}", verdicts, notes=[*_partial(fresh), *notes])
    left = sorted({capture.program for capture in captures} - {pair.program for pair in pairs})
    if left:
        found.notes.append(f"Not in {new}, and so not compared: {', '.join(left)}.")
    for pair in pairs:
        _name_causes(found, pair, explain)
    return found


def _name_causes(found: GateOutcome, pair: Pair, explain: Explain | None) -> None:
    """Add the causes of what got worse, or possible causes if noise hides whether anything did."""
    decided = pair.program in {verdict.program for verdict in found.failures}
    undecided = pair.program in {verdict.program for verdict in found.inconclusive}
    if explain is not None and (decided or undecided) and (
            causes := explain(pair.old[0], pair.new[0], decided)):
        found.causes[pair.program] = causes


def update_baseline(directory: str, reason: str, profiles: Mapping[str, Models] | None = None,
                    step_region: str | None = None, cycle: int | None = None) -> GateOutcome:
    """Measure and predict every capture, and replace the directory's baseline, whole or not at all. Raises
    ``CheckError`` if no reason is given, a capture cannot be measured, or the existing file is not foretrace's."""
    if not reason.strip():
        raise CheckError("A new baseline needs a reason: --reason TEXT says why the figures changed.")
    captures = _captures(directory, step_region, cycle)
    file = BaselineFile(directory)
    # Read first, so that a file that must not be replaced is reported before the work.
    before = file.read().captures if file.path.exists() else {}
    entries = {capture.name: new_entry(capture, profiles) for capture in captures}
    file.write(entries, reason)
    return GateOutcome(f"new baseline of {directory}", [
        Verdict(name, FIGURES[figure], Status.STORED, before[name].accuracy.figures().get(figure) if name in before else
                None, value, "error", f"{FIGURES[figure]}: error {signed_percent(value, 2)}, stored")
        for name, entry in entries.items() for figure, value in entry.accuracy.figures().items()],
        notes=_partial(captures), stored=True)


def _partial(captures: list[StoredCapture]) -> list[str]:
    """Return a note on each capture that ended early."""
    return [f"The capture {capture.name} is not complete: {context.get('ended') or 'it ended early'}."
            for capture in captures for context in capture.contexts[:1] if context.get("complete") is False]


def _captures(directory: str, step_region: str | None, cycle: int | None) -> list[StoredCapture]:
    if Path(directory).is_file():
        raise CheckError(f"{directory} is a file; name the directory of captures that holds the baseline.")
    return find_captures(directory, step_region, cycle)


TOLERANCE = 0.05
"""Share of the measured value by which errors may grow."""


def new_entry(capture: StoredCapture, profiles: Mapping[str, Models] | None = None) -> BaselineEntry:
    """Return the baseline entry of a capture. Raises ``CheckError`` if it cannot be measured or predicted."""
    measured = measure(capture)
    return BaselineEntry(capture.program, capture.digest, measured.environment, measured.counts, measured.run,
                         accuracy(capture, profiles), capture.step_region or "")


def check_models(captures: list[StoredCapture], stored: Mapping[str, BaselineEntry], tolerance: float = TOLERANCE,
                 profiles: Mapping[str, Models] | None = None) -> list[Verdict]:
    """Predict every capture again, and compare its errors with the stored ones. Errors may grow by ``tolerance``, a
    share of the measured value. Raises ``CheckError`` if a capture cannot be predicted."""
    return [verdict for capture in captures
            for verdict in judge(capture.name, stored[capture.name].accuracy, accuracy(capture, profiles), tolerance)]


def judge(name: str, before: Accuracy, now: Accuracy, tolerance: float) -> list[Verdict]:
    """Return verdicts on whether one capture's errors grew from ``before`` (stored) to ``now``."""
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


PAIRS = 8
"""Default number of pairs, two runs each."""
FEWEST = 7
"""Fewest pairs that can show a slowdown: that all are slower by chance has the probability 2⁻⁷, less than ``LEVEL``."""
SIDED = 0.05
"""Probability that the true value lies beyond one given end of the interval: chosen, as usual, a 90% interval."""


@dataclass(frozen=True, slots=True)
class Paired:
    """The difference between the second and the first runs of pairs, as logarithms of ratios.

    Attributes:
        difference: the estimate.
        low, high: ends of its two-sided 90% interval.
        p_value: probability of pairs at least this slow, if the slowdown were at most ``least``.
    """

    difference: float
    low: float
    high: float
    p_value: float


def paired(logs: Sequence[float], least: float) -> Paired:
    """Compare pairs of runs. ``logs`` are logarithms of each pair's ratio, new over old, at least ``FEWEST`` of them.
    ``least`` is the ratio − 1 that is too small to matter."""
    values = np.asarray(logs, np.float64)
    number = len(values)
    rows, columns = np.triu_indices(number)
    means = np.sort((values[rows] + values[columns]) / 2.0)
    # Below each end lie as many means as a rank sum may reach with at most this probability.
    chances = _chances(number)
    outside = int(np.searchsorted(np.cumsum(chances), SIDED, side="right"))
    outside = min(max(outside, 1), len(means) // 2)
    floor = float(np.log1p(least))
    # The rank sum of positive values is the number of means above the floor (Tukey 1949); ties count half.
    above = (means > floor).sum() + 0.5 * (means == floor).sum()
    p_value = float(chances[max(int(np.floor(above)), 0):].sum())
    return Paired(float(np.median(means)), float(means[outside - 1]), float(means[-outside]), min(p_value, 1.0))


def _chances(number: int) -> Float64:
    """Return the probability of each sum of ranks from 1 to ``number``, each rank included with probability 1/2."""
    chances = np.ones(1)
    for rank in range(1, number + 1):
        chances = (np.append(chances, np.zeros(rank)) + np.append(np.zeros(rank), chances)) / 2.0
    return chances


def check_script(script: str, base: str, arguments: Sequence[str] = (), *, pairs: int = PAIRS,
                 tolerance: float | None = None, resolution: float | None = None,
                 explain: Explain | None = None) -> GateOutcome:
    """Run a script alternately in two trees and compare its steps. ``base`` is as in ``noise.other_tree``. Growth of
    the step time up to ``tolerance`` (1%) is too small to matter. Growth by ``resolution`` (25%) must be excluded, else
    the step time is inconclusive. Raises ``CheckError`` if there are too few pairs or no such tree or script, or if the
    script fails."""
    if pairs < FEWEST:
        raise CheckError(f"{pairs} pairs cannot show with {1 - LEVEL:.0%} confidence that a program got slower: give "
                         f"--pairs {FEWEST} or more.")
    with scratch_folder("foretrace-check-") as folder, other_tree(base) as trees:
        old, new = run_in_turns(script, arguments, trees, pairs, Path(folder))
        both = Pair(script, old, new)
        before, now = ([measure(capture) for capture in side] for side in (old, new))
        verdicts = [_step_time(script, [each.run.step_ns for each in before], [each.run.step_ns for each in now],
                               LEAST if tolerance is None else tolerance,
                               RESOLUTION if resolution is None else resolution),
                    *compare_counts(script, [each.counts for each in before], [each.counts for each in now]),
                    *compare_types(both)]
        found = GateOutcome(f"{script} against {base}, {pairs} pairs of runs in turns", verdicts)
        at = _typical_pair([each.run.step_ns for each in before], [each.run.step_ns for each in now])
        _name_causes(found, Pair(script, [old[at]], [new[at]]), explain)
    return found


def _typical_pair(before: Sequence[Sequence[int]], now: Sequence[Sequence[int]]) -> int:
    """Return the index of the pair with the lower median ratio: other pairs' causes may lie in a disturbed machine."""
    ratios = [float(np.median(after)) / float(np.median(was)) for was, after in zip(before, now, strict=True)]
    return int(np.argsort(ratios, kind="stable")[(len(ratios) - 1) // 2])


def _step_time(script: str, before: Sequence[Sequence[int]], now: Sequence[Sequence[int]], least: float,
               resolution: float) -> Verdict:
    medians = [np.array([float(np.median(run)) for run in side]) for side in (before, now)]
    result = paired(np.log(medians[1] / medians[0]).tolist(), least)
    low, change, high = (float(np.expm1(value)) for value in (result.low, result.difference, result.high))
    was, will = (float(np.median(side)) for side in medians)
    text = (f"step time: {in_unit(was, 'ns')} → {in_unit(will, 'ns')}, {signed_percent(change)} in {len(before)} pairs "
            f"(90% between {signed_percent(low)} and {signed_percent(high)})")
    if result.p_value <= LEVEL:
        status = Status.FAILED
        text += f"; larger with {sure(1.0 - result.p_value)} confidence"
    elif high > resolution:
        status = Status.INCONCLUSIVE
        text += f"; undecided: it may have grown by {resolution:.0%} or more; repeat it with more --pairs"
    else:
        status = Status.PASSED
        text += f"; growth of {max(high, 0.0):.1%} or more is excluded"
    return Verdict(script, "step time", status, was, will, "ns", text, confidence=1.0 - result.p_value)
