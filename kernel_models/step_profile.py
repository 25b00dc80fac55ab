"""A device's profile from whole steps: corrections of the formulas, kept only if they help to predict steps left out.

    steps ──each graph left out once──▶ errors, before and after ──better?──▶ corrections of all steps, widths.
          (Families that measured kernels already price are taken as known, and their time off the step's.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kernel_models.datasets.samples import DataError, share_of
from kernel_models.device import DeviceSpec
from kernel_models.fitting import FEW_GROUPS, stamp
from kernel_models.heuristics.roofline import RooflineModel, heuristic_models
from kernel_models.learned.fit import FOLDS
from kernel_models.op_call import Family, OpCall
from kernel_models.pricing import price
from kernel_models.profile import DeviceProfile, ProfileEntry
from kernel_models.scores import errors_of
from kernel_models.step_fit import MeasuredStep, StepProblem, fit_widths
from tracer.arrays import Float64, Int64

LEAST_GRAPHS = 3
"""Fewest graphs: with fewer, the rest could not predict a graph left out, so the fit could not be judged. An unjudged
profile is not written."""
UNLIKELY = 3.0
"""If predictions of left-out steps are off by this factor, units or programs are taken to be wrong. Set."""
LEAST_ERRORS = 8
"""Fewest errors of left-out steps that give new standard deviations; else those of the starting corrections stay."""
BELIEF = (1.0, 0.1, 0.01)
"""Weights of the steps, relative to the starting corrections, that are tried. The weight that predicts left-out graphs
best is used, so that a few steps do not change much what many have taught."""
LEAST_LEFT = 0.2
"""Least share of a step's time outside the known families; with less the step shows nothing about the others. Set."""


class _LeftOut(NamedTuple):
    """Predictions of steps by fits to other graphs: those graphs' weight, µs [n], shares [n, families], families."""

    belief: float
    times_us: Float64
    shares: Float64
    families: list[str]


@dataclass(frozen=True, slots=True)
class NamedStep:
    """A measured step and the name of its graph: steps of one graph are left out together."""

    graph: str
    step: MeasuredStep
    software: str = ""


def fit_steps(steps: Sequence[NamedStep], spec: DeviceSpec, source: str, known: DeviceProfile | None = None,
              notes: Sequence[str] = (), *, shipped: bool = True) -> DeviceProfile:
    """Fit a profile to whole steps.

    Args:
        steps: Steps measured on the device.
        spec: The device.
        source: Source of the steps, such as a table's name.
        known: A profile fitted to measured kernels of the device: its families stay unchanged.
        notes: Sentences on data that could not be used.
        shipped: Whether the fit starts from the corrections that foretrace ships, and is pulled to them.

    Raises:
        DataError: There are no steps, fewer than ``LEAST_GRAPHS`` graphs, or the fit does not improve the prediction of
            graphs left out.
    """
    rest, fixed_us = _without_known(steps, known)
    if not rest:
        raise DataError(f"No step of {source} says anything of {spec.name} that measured kernels do not.")
    graphs = [one.graph for one in rest]
    fold = folds_of(graphs)
    if fold is None:
        known_too = " beside what measured kernels say" if known else ""
        raise DataError(
            f"{source} has steps of {len(set(graphs))} trace{'s' if len(set(graphs)) > 1 else ''} to learn from"
            f"{known_too}, where {LEAST_GRAPHS} or more are needed: each is left out in turn to judge what the others "
            "teach; add steps of other programs.")
    start = heuristic_models(spec)[Family.GEMM].corrections if shipped else None
    problem = StepProblem([one.step for one in rest], start)
    measured = problem.measured_us + fixed_us
    before = problem.times_us(np.zeros(len(problem.weights))) + fixed_us
    tried = _left_out(problem, fold)
    facts: dict[str, Any] = {"data": source, "rows": len(rest), "graphs": len(set(graphs)),
                             "before": errors_of(before, measured).to_json()}
    widths = dict(start.widths) if start else {}
    best = min(tried, key=lambda one: _factor(one.times_us + fixed_us, measured))
    _check_better(_factor(best.times_us + fixed_us, measured), _factor(before, measured), source)
    facts |= {"left_out": errors_of(best.times_us + fixed_us, measured).to_json(), "belief": best.belief}
    problem.weight = problem.weight * best.belief
    if len(rest) >= LEAST_ERRORS:
        widths |= fit_widths(best.shares, np.log(best.times_us / problem.measured_us), best.families)
    corrections = problem.corrections(problem.fit(), widths=widths, source=source)
    software = {one.software for one in rest}
    name = software.pop() if len(software) == 1 else ""
    entries = [_entry(RooflineModel(family, spec, None, corrections), calls, name, facts)
               for family, calls in _by_family(rest).items()]
    provenance = (dict(known.provenance) if known else stamp()) | {"steps": facts}
    provenance["data"] = sorted({*provenance.get("data", ()), source})
    if told := list(dict.fromkeys([*provenance.get("notes", ()), *notes])):
        provenance["notes"] = told
    if known is not None:
        return replace(known, entries=[*known.entries, *entries], provenance=provenance)
    return DeviceProfile(spec, entries, provenance)


def _without_known(steps: Sequence[NamedStep], known: DeviceProfile | None) -> tuple[list[NamedStep], Float64]:
    """Return the steps without the families that a profile prices, and the time of these families, µs."""
    if known is None:
        return list(steps), np.zeros(len(steps))
    families, kept, fixed = set(known.families), [], []
    for one in steps:
        step = one.step
        counts = {call: times for call, times in step.calls.items() if call.family in families}
        priced = price(counts, step.device, known)
        us = float(np.array(list(counts.values()), np.float64) @ priced.times_us) if counts else 0.0
        others = {call: times for call, times in step.calls.items() if call.family not in families}
        if others and us < (1.0 - LEAST_LEFT) * step.measured_us:
            kept.append(replace(one, step=replace(step, calls=others, measured_us=step.measured_us - us)))
            fixed.append(us)
    return kept, np.array(fixed, np.float64)


def _left_out(problem: StepProblem, fold: Int64) -> list[_LeftOut]:
    """Return for each ``BELIEF`` the prediction of each step from other graphs' steps; ``fold``: see ``folds_of``."""
    weight, found = problem.weight, []
    for belief in BELIEF:
        problem.weight = weight * belief
        times_us, parts = np.zeros(len(fold)), []
        families: list[str] = []
        for one in np.unique(fold).tolist():
            mine = np.flatnonzero(fold == one)
            values = problem.fit(np.flatnonzero(fold != one))
            times_us[mine] = problem.times_us(values)[mine]
            families, of_families = problem.family_times_us(values)
            parts.append((mine, of_families[mine]))
        shares = np.zeros((len(fold), len(families)))
        for mine, of_families in parts:
            shares[mine] = of_families / of_families.sum(axis=1, keepdims=True)
        found.append(_LeftOut(belief, times_us, shares, families))
    problem.weight = weight
    return found


def folds_of(graphs: Sequence[str]) -> Int64 | None:
    """Return the fold of each step; steps of one graph share a fold. ``None`` where there are too few graphs."""
    names, fold = np.unique(np.array(graphs), return_inverse=True)
    if len(names) < LEAST_GRAPHS:
        return None
    if len(names) <= FEW_GROUPS:
        return fold.astype(np.int64)
    order = np.argsort([share_of(name) for name in names.tolist()])
    place = np.empty(len(names), np.int64)
    place[order] = np.arange(len(names)) % FOLDS
    return place[fold]


def _factor(predicted_us: Float64, measured_us: Float64) -> float:
    """Return e to the mean absolute log error, a factor ≥ 1: 1.5 times too long and 1.5 times too short count alike."""
    return float(np.exp(np.mean(np.abs(np.log(predicted_us / measured_us)))))


def _check_better(after: float, before: float, source: str) -> None:
    if after >= before:
        raise DataError(
            f"What the steps of {source} teach makes other graphs' no better: with each graph left out times are off "
            f"by a factor of {after:.3f} in the mean, without any of them by {before:.3f}; measure more steps, of more "
            "unlike programs.")
    if after > UNLIKELY:
        raise DataError(
            f"The steps of {source} are off by a factor of {after:.3g} whatever the others teach: is step_ms in "
            "milliseconds, and of this device and these traces?")


def _by_family(steps: Sequence[NamedStep]) -> Mapping[Family, set[OpCall]]:
    found: dict[Family, set[OpCall]] = {}
    for one in steps:
        for call in one.step.calls:
            found.setdefault(call.family, set()).add(call)
    return dict(sorted(found.items(), key=lambda pair: pair[0].value))


def _entry(model: RooflineModel, calls: set[OpCall], software: str, facts: Mapping[str, Any]) -> ProfileEntry:
    return ProfileEntry("roofline", model, software, len(calls), {
        "data": facts["data"], "chosen": "roofline", "fit_rows": len(calls), "steps": facts["rows"]})
