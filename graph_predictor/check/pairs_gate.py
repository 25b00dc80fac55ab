"""Whether a script got slower: its present version against another one, both run here and now, in turns.

What a machine does between two sessions (other work, clocks, a changed kernel) is no difference of two programs, and
nothing taken off afterwards makes up for it. Runs in turns have it on both sides: each pair gives one log of the ratio
of its two median steps, which without a change is as likely above zero as below, by as much. That is all that is
assumed:

* p-value: Wilcoxon's signed-rank test of "longer by no more than ``least``", exact for few pairs;
* estimate: the median of the pairs' means two by two (Hodges and Lehmann 1963);
* interval: those of these means that the same test does not exclude, so that one pair in which the machine was busy
  moves none of them much.

What is counted is compared as with a baseline.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graph_predictor.check.captures import CheckError, Pair, StoredCapture
from graph_predictor.check.measure import measure
from graph_predictor.check.program_gate import LEAST, LEVEL, RESOLUTION, compare_counts, compare_types, sure
from graph_predictor.check.turns import Progress, other_tree, run_in_turns
from graph_predictor.check.verdict import GateOutcome, Status, Verdict, in_unit
from graph_predictor.figures import signed_percent
from tracer.arrays import Float64

PAIRS = 8
"""Default number of pairs, two runs each."""
FEWEST = 7
"""Pairs that can show anything: all of them longer happen by chance once in 2⁷, less than ``LEVEL``."""
SIDED = 0.05
"""Chance that the truth lies beyond one end of the interval."""

Explain = Callable[[StoredCapture, StoredCapture], list[str]]


@dataclass(frozen=True, slots=True)
class Paired:
    """The difference of the second runs of pairs from the first ones, as logs of ratios.

    Attributes:
        difference: the estimate.
        low, high: ends of its two-sided 90% interval.
        p_value: how likely pairs this long were, if they were longer by ``least`` at most.
    """

    difference: float
    low: float
    high: float
    p_value: float


def paired(logs: Sequence[float], least: float) -> Paired:
    """Compare pairs of runs.

    Args:
        logs: of each pair's ratio, new over old; ``FEWEST`` or more.
        least: ratio − 1 that is too small to matter.
    """
    values = np.asarray(logs, np.float64)
    number = len(values)
    rows, columns = np.triu_indices(number)
    means = np.sort((values[rows] + values[columns]) / 2.0)
    # As many means lie below each end as ranks of one sign may add up to with this chance at most.
    chances = _chances(number)
    outside = int(np.searchsorted(np.cumsum(chances), SIDED, side="right"))
    outside = min(max(outside, 1), len(means) // 2)
    floor = float(np.log1p(least))
    # The rank sum of the positive ones is the number of means above the floor (Tukey 1949); ties count as half.
    above = (means > floor).sum() + 0.5 * (means == floor).sum()
    p_value = float(chances[max(int(np.floor(above)), 0):].sum())
    return Paired(float(np.median(means)), float(means[outside - 1]), float(means[-outside]), min(p_value, 1.0))


def _chances(number: int) -> Float64:
    """Chance of each sum of the ranks 1 to ``number`` of which every one is as likely in as out."""
    chances = np.ones(1)
    for rank in range(1, number + 1):
        chances = (np.append(chances, np.zeros(rank)) + np.append(np.zeros(rank), chances)) / 2.0
    return chances


def check_script(script: str, base: str, arguments: Sequence[str] = (), *, pairs: int = PAIRS,
                 tolerance: float | None = None, level: float = LEVEL, resolution: float | None = None,
                 explain: Explain | None = None, progress: Progress = lambda at, of: None) -> GateOutcome:
    """Run a script in two trees in turns and compare its steps.

    Args:
        script: its path from the current directory.
        base: a commit, or the directory of another version; see ``turns.other_tree``.
        arguments: of the script.
        pairs: of runs.
        tolerance: growth of the step time that is too small to matter; 1%.
        level: chance of a false alarm.
        resolution: growth that must be excluded, or the step time is inconclusive; 25%.
        explain: asked where it got slower.
        progress: told before each pair.

    Raises:
        CheckError: too few pairs, no such tree or script, or the script fails in one of them.
    """
    if pairs < FEWEST:
        raise CheckError(f"{pairs} pairs cannot show with {1 - level:.0%} confidence that a program got slower: give "
                         f"--pairs {FEWEST} or more.")
    with tempfile.TemporaryDirectory(prefix="foretrace-check-") as folder, other_tree(base) as trees:
        old, new = run_in_turns(script, arguments, trees, pairs, Path(folder), progress)
        both = Pair(script, old, new)
        before, now = ([measure(capture) for capture in side] for side in (old, new))
        verdicts = [_step_time(script, [each.run.step_ns for each in before], [each.run.step_ns for each in now],
                               LEAST if tolerance is None else tolerance, level,
                               RESOLUTION if resolution is None else resolution),
                    *compare_counts(script, [each.counts for each in before], [each.counts for each in now]),
                    *compare_types(both)]
        found = GateOutcome(f"{script} against {base}, {pairs} pairs of runs in turns", verdicts)
        if found.failures and explain is not None:
            found.causes[script] = explain(old[0], new[0])
    return found


def _step_time(script: str, before: Sequence[Sequence[int]], now: Sequence[Sequence[int]], least: float, level: float,
               resolution: float) -> Verdict:
    medians = [np.array([float(np.median(run)) for run in side]) for side in (before, now)]
    result = paired(np.log(medians[1] / medians[0]).tolist(), least)
    low, change, high = (float(np.expm1(value)) for value in (result.low, result.difference, result.high))
    was, will = (float(np.median(side)) for side in medians)
    text = (f"step time: {in_unit(was, 'ns')} → {in_unit(will, 'ns')}, {signed_percent(change)} in {len(before)} pairs "
            f"(90% between {signed_percent(low)} and {signed_percent(high)})")
    if result.p_value <= level:
        status = Status.FAILED
        text += f"; larger with {sure(1.0 - result.p_value)} confidence"
    elif high > resolution:
        status = Status.INCONCLUSIVE
        text += f"; undecided: it may have grown by {resolution:.0%} or more; repeat it with more --pairs"
    else:
        status = Status.PASSED
        text += f"; growth of {max(high, 0.0):.1%} or more is excluded"
    return Verdict(script, "step time", status, was, will, "ns", text, confidence=1.0 - result.p_value)
