"""Judge whether a program got slower: new captures of it against the baseline's.

Counts (launches, host reads, collectives, bytes) repeat exactly from run to run, so an increase by one is a failure. If
a count changes from step to step, an increase by one over the largest earlier count is a failure. Times and memory do
not repeat: each is tested (``noise``) after the machine's own effect is subtracted (``machine_slowdown``). All tests of
a check share one level by Holm's method: for any number of programs, the chance that a check fails without a change is
``LEVEL``. A quantity that did not fail passes only if the measurements exclude a growth that matters; else it is
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graph_predictor.figures import signed_percent
from step_views.check.baseline import BUSY, BaselineEntry, disturbance, machine_slowdown, retyped
from step_views.check.measure import Count, Environment, MeasuredProgram, Pair, Run, at_other_sizes, measure
from step_views.check.noise import Prior, Slowdown, slowdown
from step_views.check.verdict import Status, Verdict, in_unit

LEVEL = 0.01
"""Chance of a false alarm of a whole check."""
LEAST = 0.01
"""Growth of times and memory by at most this share never fails."""
RESOLUTION = 0.25
"""Growth by this share must be excluded (with 95% confidence), else the result is inconclusive. Two calm runs of one
program exclude growth of 12 to 20% (docs/checks.md)."""
MEMORY_RESOLUTION = 0.5
"""``RESOLUTION`` for host memory, which varies by 10% from run to run."""
MACHINE_SD = 0.02
"""Standard deviation of the log of ``machine_slowdown``, which is measured on profiled steps, moments after the timed
ones."""
NOTABLE = 0.05
"""A slowdown of the machine by at least this share is reported."""
SHAKEN = 0.5
"""Standard deviation of the log of a run's step, as a share of ``disturbance``. Chosen, with ``CALM``, ``QUANTILES``
and the witness, on 108 recordings of nine programs on two shared cores, most of them disturbed: 2 of 1,188 pairs
fail."""
LEAST_LEFT = 0.2
"""Share of a profiled step that always remains when the profiler's cost is subtracted."""
TIME = Prior(sd=0.03, weight=8, within=0.01)
DEVICE_TIME = Prior(sd=0.015, weight=8, within=0.005)
DEVICE_MEMORY = Prior(sd=0.002, weight=8, within=0.002)
HOST_MEMORY = Prior(sd=0.1, weight=8, within=0.01)
"""Noise from run to run; docs/checks.md has the sources of the figures."""

COUNTED = {
    "operations": "operations", "launches": "launches", "kernels": "kernels", "host_reads": "values read by the host",
    "blocking_syncs": "blocking synchronisations", "collectives": "collectives",
    "communicated_bytes": "bytes communicated"}
"""The counts and their names in reports, per step."""


@dataclass(frozen=True, slots=True)
class _Test:
    """One quantity of one program that is to be tested."""

    program: str
    quantity: str
    unit: str
    base: Sequence[Sequence[float]]
    new: Sequence[Sequence[float]]
    prior: Prior
    machine: float = 0.0
    disturbed: Sequence[float] = ()
    witness: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]] | None = None
    """The same quantity at another moment of each run: a real growth is seen there too."""
    resolution: float = RESOLUTION


def check_programs(
    pairs: Sequence[Pair],
    stored: Mapping[str, BaselineEntry],
    least: float = LEAST,
    resolution: float | None = None,
) -> tuple[list[Verdict], list[str]]:
    """Compare programs with their baseline. ``stored`` are the baseline's entries by name of the capture. Growth by
    ``least`` is too small to matter. Growth by ``resolution`` (by default each quantity's own) must be excluded for a
    quantity to pass. Raises ``CheckError`` if a new capture is empty or has no steps.

    Returns:
        The verdicts in order of programs, and notes.
    """
    verdicts: list[Verdict] = []
    tests: list[_Test] = []
    notes: list[str] = []
    for pair in pairs:
        old = [stored[capture.name] for capture in pair.old]
        new = [measure(capture) for capture in pair.new]
        verdicts += [*compare_counts(pair.program, [entry.counts for entry in old], [each.counts for each in new]),
                     *compare_types(pair), *_compare_threads(pair.program, old[0].environment, new[0].environment)]
        if at_other_sizes(pair.old[0].job, pair.new[0].job):
            notes.append(f"{pair.program}: most operations have other sizes than in the baseline; times are compared "
                         "all the same. If the sizes are meant, make the new captures the baseline.")
        found, skipped = _tests(pair, old, new, notes)
        tests += found
        verdicts += skipped
        torch_before, torch_now = old[0].environment.torch, new[0].environment.torch
        if torch_before and torch_now and torch_before != torch_now:
            notes.append(f"{pair.program}: PyTorch {torch_before} before, {torch_now} now, which changes operations "
                         "and kernels by itself.")
    verdicts += _judged([test if resolution is None else replace(test, resolution=resolution) for test in tests],
                        least)
    order = {pair.program: place for place, pair in enumerate(pairs)}
    return sorted(verdicts, key=lambda verdict: (
        order[verdict.program], not verdict.failed, verdict.status is not Status.INCONCLUSIVE)), notes


def compare_types(pair: Pair) -> list[Verdict]:
    """Judge whether equal operations still have inputs of the same element types; empty without recorded types."""
    found = retyped(pair.old[0].job, pair.new[0].job)
    if found is None:
        return []
    number, change = found
    mostly = f", mostly {change}" if number else ""
    return [Verdict(pair.program, "element types", Status.FAILED if number else Status.PASSED, 0, number, "",
                    f"element types: {number:,} operations a step have inputs of other types than before{mostly} "
                    "(counted)")]


def _compare_threads(program: str, before: Environment, now: Environment) -> list[Verdict]:
    """Return a failure if operations run on fewer threads of the same processor; else nothing."""
    fewer = before.fewer_threads(now)
    return [Verdict(program, "threads", Status.FAILED, before.threads, now.threads, "",
                    f"{fewer}, on the same processor (counted)")] if fewer else []


def compare_counts(program: str, before_all: Sequence[Mapping[str, Count]],
                   now_all: Sequence[Mapping[str, Count]]) -> list[Verdict]:
    """Judge for every count whether it grew; each mapping has one run's counts by name."""
    found = []
    # With a device its launches are counted; without one, every operation counts like a launch.
    device = any(counts[name].most for name in ("launches", "kernels") for counts in (*before_all, *now_all))
    for name, words in COUNTED.items():
        before, now = (_together([counts[name] for counts in side]) for side in (before_all, now_all))
        if not (before.most or now.most) or (name == "operations" and device):
            continue
        unit = "bytes" if name == "communicated_bytes" else ""
        more = now.typical > (before.typical if before.steady else before.most)
        change = (f"{in_unit(now.typical - before.typical, unit)} more" if more else
                  "as before" if now.typical == before.typical else "no more than before")
        found.append(Verdict(
            program, words, Status.FAILED if more else Status.PASSED, before.typical, now.typical, unit,
            f"{words} a step: {in_unit(before.typical, unit)} → {in_unit(now.typical, unit)}, {change} (counted)"))
    return found


def _together(counts: Sequence[Count]) -> Count:
    """Combine repeated runs: the median run's typical count, steady only if all runs agree, and the largest count."""
    typical = sorted(count.typical for count in counts)[(len(counts) - 1) // 2]
    steady = all(count.steady and count.typical == typical for count in counts)
    return Count(typical, steady, max(count.most for count in counts))


def _tests(pair: Pair, old: Sequence[BaselineEntry], new: Sequence[MeasuredProgram], notes: list[str]) -> tuple[
        list[_Test], list[Verdict]]:
    """Return the tests of one program's quantities, and verdicts on quantities that cannot be tested."""
    program = pair.program
    before, now = [entry.run for entry in old], [each.run for each in new]
    elsewhere = next((text for entry in old for each in new
                      if (text := entry.environment.other_machine(each.environment))), "")
    tests: list[_Test] = []
    skipped: list[Verdict] = []

    def add(quantity: str, unit: str, samples: Callable[[Run], list[int]], prior: Prior, why_not: str = "",
            **known: Any) -> None:
        base, after = (_samples(side, samples) for side in (before, now))
        if not all(base) or not all(after):
            if all(base) and any(any(run) for run in base):
                skipped.append(_skipped(program, quantity, "the new capture does not have it"))
            return
        if why_not:
            skipped.append(_skipped(program, quantity, why_not))
            return
        tests.append(_Test(program, quantity, unit, base, after, prior, **known))

    other = f"another machine ({elsewhere})" if elsewhere else ""
    watched = {run.profiled for run in (*before, *now)}
    mixed = "timed under the profiler on one side only" if len(watched) > 1 else ""
    host, device, disturbed = (0.0, 0.0, []) if elsewhere else _machine(pair, before)
    add("step time", "ns", lambda run: run.step_ns, TIME, other or mixed, machine=host, disturbed=disturbed,
        witness=None if watched != {False} else _watched(before, now))
    add("GPU active time", "ns", lambda run: run.gpu_active_ns, DEVICE_TIME, other, machine=device)
    add("peak device memory", "bytes", lambda run: _known(run.peak_device_bytes), DEVICE_MEMORY,
        other if "device" in elsewhere else "")
    add("peak host memory", "bytes", lambda run: _known(run.peak_host_bytes), HOST_MEMORY, other,
        resolution=MEMORY_RESOLUTION)
    slower = max(host, device)
    if slower > np.log1p(NOTABLE):
        notes.append(f"{program}: work that did not change took {np.expm1(slower):.0%} longer than in the baseline, so "
                     "the machine was slower (busy, throttled, other libraries); that much was taken off what "
                     "times grew by.")
    if elsewhere:
        notes.append(f"{program}: recorded on {other}; times and host memory were not compared, counts were.")
    return tests, skipped


def _samples(runs: Sequence[Run], samples: Callable[[Run], list[int]]) -> list[list[float]]:
    return [[float(value) for value in samples(run)] for run in runs]


def _watched(before: Sequence[Run], now: Sequence[Run]) -> tuple[list[list[float]], list[list[float]]]:
    """Return profiled steps minus the profiler's cost in the baseline; they show a change as the timed steps do."""
    base, after = (_samples(side, lambda run: run.profiled_ns) for side in (before, now))
    cost = max(float(np.median([np.median(run) for run in base])
                     - np.median([np.median(run.step_ns) for run in before])), 0.0)
    return [[max(ns - cost, LEAST_LEFT * ns) for ns in run] for run in base], [
        [max(ns - cost, LEAST_LEFT * ns) for ns in run] for run in after]


def _machine(pair: Pair, before: Sequence[Run]) -> tuple[float, float, list[float]]:
    """Return the log of the machine's slowdown, for the step and for device work, and how each run was disturbed.

    A faster machine counts as unchanged, so that it cannot make the program look slower.
    """
    old, new = ([graph for capture in side for graph in capture.job.graphs] for side in (pair.old, pair.new))
    has_device = any(len(graph.kernels) for graph in old) and any(len(graph.kernels) for graph in new)
    device = max(machine_slowdown(old, new, device_decides=True), 0.0) if has_device else 0.0
    busy = [float(np.median(run.gpu_active_ns) / np.median(run.step_ns)) for run in before
            if run.gpu_active_ns and run.step_ns]
    decides = bool(busy) and float(np.median(busy)) >= BUSY
    host = device if decides else max(machine_slowdown(old, new, device_decides=False), 0.0)
    return host, device, [SHAKEN * disturbance(capture.job.graphs, device_decides=decides)
                          for capture in (*pair.old, *pair.new)]


def _known(value: int) -> list[int]:
    return [value] if value else []


def _skipped(program: str, quantity: str, why: str) -> Verdict:
    return Verdict(program, quantity, Status.SKIPPED, None, None, "", f"{quantity}: not compared, {why}")


def _judged(tests: Sequence[_Test], least: float) -> list[Verdict]:
    """Run all tests, at one level for all of them together (Holm 1979)."""
    tested = [_tested(test, least, LEVEL / len(tests)) for test in tests]
    results = [_least_sure(sides) for sides in tested]
    failed: set[int] = set()
    for rank, place in enumerate(sorted(range(len(tests)), key=lambda i: results[i].p_value)):
        if results[place].p_value > LEVEL / (len(tests) - rank):
            break
        failed.add(place)
    return [_verdict(test, sides, place in failed) for place, (test, sides) in enumerate(
        zip(tests, tested, strict=True))]


def _tested(test: _Test, least: float, level: float) -> list[Slowdown]:
    """Return the result for the test's own runs and, if there are any, for its ``witness`` runs."""
    sides = [(test.base, test.new), *([test.witness] if test.witness is not None else [])]
    return [slowdown(base, new, test.prior, least=least, level=level, shared=_taken_off(test, base, new),
                     shared_sd=MACHINE_SD if test.machine else 0.0, disturbed=test.disturbed) for base, new in sides]


def _taken_off(test: _Test, base: Sequence[Sequence[float]], new: Sequence[Sequence[float]]) -> float:
    """Return the log of the growth that a slower machine explains. The slowdown is measured in profiled steps, and
    cannot explain more than the growth of the times themselves."""
    before, now = (float(np.median([np.median(run) for run in side])) for side in (base, new))
    return min(test.machine, max(float(np.log(now / before)), 0.0)) if test.machine and before and now else test.machine


def _least_sure(sides: Sequence[Slowdown]) -> Slowdown:
    """Return the result with the larger p-value, because a real change shows at both moments."""
    return max(sides, key=lambda result: result.p_value)


def _verdict(test: _Test, sides: Sequence[Slowdown], failed: bool) -> Verdict:
    before, now = (float(np.median([np.median(run) for run in side])) for side in (test.base, test.new))
    result = _least_sure(sides)
    low, change, high = (float(np.expm1(value)) for value in (sides[0].low, sides[0].difference, sides[0].high))
    detectable = float(np.expm1(result.detectable))
    text = (f"{test.quantity}: {in_unit(before, test.unit)} → {in_unit(now, test.unit)}, {signed_percent(change)}"
            f"{'' if (change > 0) == (now > before) else ' in the quickest steps'} "
            f"(90% between {signed_percent(low)} and {signed_percent(high)})")
    if machine := _taken_off(test, test.base, test.new):
        text += f" after {np.expm1(machine):.1%} were taken off for a slower machine"
    if result is not sides[0]:
        text += f", of the profiled steps {signed_percent(np.expm1(result.difference))}"
    # Growth that only one of the two moments shows is not excluded.
    undecided = not failed and max(float(np.expm1(side.high)) for side in sides) > test.resolution
    if failed:
        text += f"; larger with {sure(result.confidence)} confidence"
    elif undecided:
        text += (f"; undecided: it may have grown by {test.resolution:.0%} or more, and only growth of "
                 f"{detectable:,.0%} would have been seen; repeat the runs on a quieter machine")
    else:
        text += f"; no evidence that it grew (growth of {detectable:,.0%} or more would have been seen)"
    status = Status.FAILED if failed else Status.INCONCLUSIVE if undecided else Status.PASSED
    return Verdict(test.program, test.quantity, status, before, now, test.unit, text, confidence=result.confidence,
                   detectable=detectable)


def sure(confidence: float) -> str:
    """Return a confidence in percent, with all its nines, but at most five."""
    if confidence >= 0.99999:
        return "over 99.999%"
    decimals = next(n for n in range(1, 6) if confidence < 0.99 or round(confidence * 100, n) < 100)
    return f"{confidence * 100:.{decimals}f}%"
