"""Programs that are slower in one survey than in an earlier one, beyond what steps and runs differ by; and why.

Jobs of one program on one kind of machine are its runs. The test is that of ``foretrace check``
(``step_views.check.noise``), on the tables' step times. The spread within a run is that of its steps. The spread
between runs is that of a program's runs in one survey. Both are shrunk towards the fleet's spread.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graph_predictor.simulation.program import Bound
from step_views.check.noise import Prior, Slowdown, slowdown
from step_views.check.program_gate import LEAST, LEVEL
from step_views.survey.facts import BOUND_COLUMNS
from tracer.arrays import Float64
from tracer.lazy import special

ALIKE = 0.9
"""Programs that share this much of their operations (by name, sizes and number in a step) are versions of one. Chosen:
a changed layer of ten, or a value read for each sample, and not another batch."""
LEAST_SD = 0.002
"""Least standard deviation of the log of a step from run to run, and from step to step: chosen, a quiet machine's."""
USUAL_SD = 0.01
"""Standard deviation of the log from step to step where no run of either survey has three steps (chosen)."""
RUNS, STEPS, MOST_STEPS, LEAST_PROGRAMS = 20.0, 4.0, 100.0, 5
"""Weight of the fleet's spreads, in runs and steps of a program (chosen). If ``LEAST_PROGRAMS`` programs have three
steps, the weight in steps is estimated, up to ``MOST_STEPS``."""
MEDIAN = 1.25
"""Standard error of a median over that of a mean, of normal errors: √(π / 2). Of one or two steps the median is the
mean."""
TOLD = 0.03
"""Growth that every pair of programs is expected to show: a pair that could not have shown it is named (chosen)."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Regression:
    """A program that got slower.

    Attributes:
        job: its slowest run now.
        before_us, after_us: median step of the runs; ``change`` is after / before − 1 and ``low`` … ``high`` its 90%
            interval.
        runs_before, runs_after: jobs that were compared.
        cause: the part of the critical path that grew most; of computation with the family of kernels that did.
        grown_us: by how much that part grew.
        gpu_s_an_hour: GPU-seconds lost an hour of all runs of now.
    """

    job: str
    before_us: float
    after_us: float
    change: float
    low: float
    high: float
    runs_before: int
    runs_after: int
    cause: str
    grown_us: float
    gpu_s_an_hour: float


@dataclass(frozen=True, slots=True)
class Untold:
    """A program that may have got slower by more than ``TOLD``: its recordings have too few steps to tell.

    Attributes:
        job: its slowest run now.
        steps_before, steps_after: of all runs.
        runs_before, runs_after: jobs that were compared.
        least: smallest change that these steps and runs would have shown with 95% probability.
    """

    job: str
    steps_before: int
    steps_after: int
    runs_before: int
    runs_after: int
    least: float


def regressions(before: tuple[Sequence[Row], Sequence[Row]], after: tuple[Sequence[Row], Sequence[Row]]) -> tuple[
        list[Regression], list[Untold], int]:
    """Return what got slower, most GPU time lost first; pairs with too few steps; and the number of programs in both.

    Args:
        before, after: rows of ``jobs`` and of ``families`` of either survey.
    """
    old, new = _programs(before[0]), _programs(after[0])
    pairs = [(old[was], runs) for program, runs in new.items() if (was := _partner(program, runs, old))]
    prior = _between([*old.values(), *new.values()]), _within([*old.values(), *new.values()])
    families = _families(before[1]), _families(after[1])
    tested = [_tested(pair, prior, LEVEL / max(len(pairs), 1)) for pair in pairs]
    found = []
    # One level for all of them (Holm 1979).
    places = sorted(range(len(pairs)), key=lambda at: tested[at].p_value)
    for rank, place in enumerate(places):
        if tested[place].p_value > LEVEL / (len(pairs) - rank):
            break
        found.append(_regression(pairs[place], tested[place], families))
    others = (_untold(pairs[place], tested[place]) for place in places[len(found):])
    return (sorted(found, key=lambda one: -one.gpu_s_an_hour),
            sorted((one for one in others if one.least > TOLD), key=lambda one: -one.least), len(pairs))


def path_by_cause(row: Row) -> dict[str, float]:
    """Return a job's critical path by cause, µs: by bound, with the host's time that loading costs as data loading."""
    found = {label: row[column] or 0.0 for column, label in BOUND_COLUMNS.items()}
    host, loading = Bound.HOST.label, Bound.DATA_LOADING.label
    own = min(max((row["saves_loading_us"] or 0.0) - found[loading], 0.0), found[host])
    return {**found, host: found[host] - own, loading: found[loading] + own}


def _programs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the runs of each program."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["program"] and row["step_times_us"] and row["step_time_us"]:
            found[f"{row['program']} {row['profiled']}"].append(row)
    return found


def _partner(program: str, runs: Sequence[Row], old: Mapping[str, list[Row]]) -> str:
    """Return the same program of the earlier survey, else the one most like it; empty where there is none."""
    if program in old:
        return program
    names = ("device", "ranks", "world_size", "profiled")
    likeness = {was: _likeness(runs[0], theirs[0]) for was, theirs in old.items()
                if all(runs[0][name] == theirs[0][name] for name in names)}
    best = max(likeness, key=lambda was: likeness[was], default="")
    return best if likeness.get(best, 0.0) >= ALIKE else ""


def _likeness(one: Row, other: Row) -> float:
    """Return the share of the larger program's operations that both have."""
    a, b = (Counter(dict(zip(row["operation_codes"], row["operation_counts"], strict=True))) for row in (one, other))
    return (a & b).total() / max(a.total(), b.total(), 1)


def _logs(runs: Sequence[Row]) -> list[Float64]:
    return [np.log(np.maximum(np.array(run["step_times_us"], np.float64), 1e-3)) for run in runs]


def _squares(samples: Sequence[Float64]) -> tuple[float, int]:
    """Return the squared deviations from each one's mean, and the degrees of freedom."""
    return sum(float(((each - each.mean()) ** 2).sum()) for each in samples), sum(len(each) - 1 for each in samples)


def _between(programs: Sequence[Sequence[Row]]) -> float:
    """Return the standard deviation of the log of a step from run to run, over all programs."""
    squares, freedom = _squares([np.array([np.median(each) for each in _logs(runs)]) for runs in programs])
    return max(float(np.sqrt(squares / freedom)) if freedom else 0.0, LEAST_SD)


def _within(programs: Sequence[Sequence[Row]]) -> tuple[float, float]:
    """Return the variance of the log from step to step of a usual program, and how many steps that is worth.

    Programs differ: one that varies by 10% says little of one that varies by 0.1%. Their variances s² with d degrees of
    freedom are taken as s0² F(d, d0). The mean and the spread of ln s² give s0² and d0 (Smyth 2004, "Linear models and
    empirical Bayes methods", section 6.2).
    """
    known = [_squares([each for each in _logs(runs) if len(each) > 2]) for runs in programs]
    d = np.array([freedom for _, freedom in known if freedom], np.float64)
    s2 = np.array([squares / freedom for squares, freedom in known if freedom], np.float64)
    if len(d) < LEAST_PROGRAMS:
        return max(float((d * s2).sum() / d.sum()), LEAST_SD**2) if len(d) else USUAL_SD**2, STEPS
    e = np.log(np.maximum(s2, LEAST_SD**2)) - special.psi(d / 2) + np.log(d / 2)
    spread = float(e.var(ddof=1) - special.polygamma(1, d / 2).mean())
    weight = min(2 * _inverse_trigamma(spread), MOST_STEPS) if spread > 0 else MOST_STEPS
    return float(np.exp(e.mean() + special.psi(weight / 2) - np.log(weight / 2))), weight


def _inverse_trigamma(value: float) -> float:
    """Return y with ψ'(y) = value, by Newton's method on 1 / ψ' (Smyth 2004, appendix)."""
    y = 0.5 + 1.0 / value
    for _ in range(20):
        now = float(special.polygamma(1, y))
        y += now * (1.0 - now / value) / float(special.polygamma(2, y))
    return y


def _tested(pair: tuple[Sequence[Row], Sequence[Row]], fleet: tuple[float, tuple[float, float]], level: float) -> \
        Slowdown:
    squares, freedom = _squares([each for runs in pair for each in _logs(runs)])
    few = all(len(run["step_times_us"]) <= 2 for runs in pair for run in runs)
    variance, weight = fleet[1]
    within = (1.0 if few else MEDIAN) * float(np.sqrt((weight * variance + squares) / (weight + freedom)))
    base, new = ([run["step_times_us"] for run in runs] for runs in pair)
    return slowdown(base, new, Prior(fleet[0], RUNS, within, weight + freedom), least=LEAST, level=level)


def _untold(pair: tuple[Sequence[Row], Sequence[Row]], tested: Slowdown) -> Untold:
    before, after = (sum(len(run["step_times_us"]) for run in runs) for runs in pair)
    # A change of ``detectable`` is found in half of all cases; one that is longer by half of the 90% interval, in 95%.
    least = float(np.expm1(tested.detectable + tested.high - tested.difference))
    return Untold(_slowest(pair[1]), before, after, len(pair[0]), len(pair[1]), least)


def _slowest(runs: Sequence[Row]) -> str:
    job: str = max(runs, key=lambda run: float(np.median(run["step_times_us"])))["job"]
    return job


def _families(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        found[row["job"]][row["family"]] = row["time_us"]
    return found


def _regression(pair: tuple[Sequence[Row], Sequence[Row]], tested: Slowdown,
                families: tuple[Mapping[str, Mapping[str, float]], Mapping[str, Mapping[str, float]]]) -> Regression:
    before, after = (float(np.median([np.median(run["step_times_us"]) for run in runs])) for runs in pair)
    path = [[path_by_cause(run) for run in runs] for runs in pair]
    parts = [{label: float(np.mean([run[label] for run in runs])) for label in runs[0]} for runs in path]
    grown = {label: parts[1][label] - parts[0][label] for label in parts[0]}
    cause = max(grown, key=lambda label: grown[label])
    said = cause
    if cause == Bound.COMPUTE.label:
        said = f"{cause}: {_family(pair, families)}"
    gpus = sum(run["world_size"] for run in pair[1])
    change, low, high = (float(np.expm1(value)) for value in (np.log(after / before), tested.low, tested.high))
    return Regression(_slowest(pair[1]), before, after, change, low, high, len(pair[0]), len(pair[1]), said,
                      grown[cause], 3600.0 * gpus * max(1.0 - before / after, 0.0))


def _family(pair: tuple[Sequence[Row], Sequence[Row]],
            families: tuple[Mapping[str, Mapping[str, float]], Mapping[str, Mapping[str, float]]]) -> str:
    """Return the family of kernels that grew most, or that all of them did."""
    sides = []
    for runs, known in zip(pair, families, strict=True):
        names = {name for run in runs for name in known.get(run["job"], {}) if name != "collective"}
        sides.append({name: float(np.mean([known.get(run["job"], {}).get(name, 0.0) for run in runs]))
                      for name in names})
    was, now = sides
    grown = {name: us - was.get(name, 0.0) for name, us in now.items()}
    total, whole = sum(grown.values()), sum(was.values())
    if not grown or whole <= 0:
        return "all kernels"
    large = [name for name, us in was.items() if us > 0.02 * whole]
    ratio = total / whole
    if len(large) > 1 and all(grown.get(name, 0.0) / was[name] > 0.5 * ratio for name in large):
        return "all kernels"
    return max(grown, key=lambda name: grown[name])
