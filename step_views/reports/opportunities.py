"""Opportunities: the edits of a step that would save most, one at a time.

Every change that ``graph_predictor.edits`` knows is predicted by itself from one prepared baseline; those that cannot
be done are left out, with the reason. Gains do not add up: two changes that shorten the same wait save it once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from graph_predictor.edits.registry import OPTIONS
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.result import Prediction
from graph_predictor.prediction.scenario import Edit
from graph_predictor.synthesis.baseline import baseline_of
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.job import Job
from tracer.lazy import pandas as pd
from tracer.shown import Chart, ChartSeries, Shown, frame_of

NOTHING = 5e-4
"""A gain of less than this share of the step is none."""
LEAST_US = 1e-6  # avoids a division by zero


@dataclass(frozen=True, slots=True)
class CandidateEdit:
    """A change that is tried: what to call it, the option of ``foretrace predict`` that makes it, and the edit.

    ``bound`` says that it is no plan but a bound: what a perfect version could save at most.
    """

    name: str
    option: str
    edit: Edit
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Opportunity:
    """A change and what it is predicted to save.

    Attributes:
        name, option, bound: as in ``CandidateEdit``.
        gain_us, gain: time a step it saves, and the share of the step.
        interval_us: 80% interval of ``gain_us``.
        step_time_us: the step with it.
        decides: what decides that step.
        sources: share of that step's time by source of its durations.
        notes: what the change assumed about this step.
    """

    name: str
    option: str
    bound: bool
    gain_us: float
    gain: float
    interval_us: tuple[float, float]
    step_time_us: float
    decides: str
    sources: dict[str, float]
    notes: tuple[str, ...] = ()


_TABLES = {"opportunities": ("name", "option", "is_bound", "gain_us", "gain", "interval_us", "step_time_us", "bound",
                             "sources", "notes"), "left_out": ("name", "reason")}
"""Columns of the tables, which they have without a row too."""


@dataclass(frozen=True, slots=True, repr=False)
class Opportunities(Shown):
    """The edits of a step that save most, and those left out.

    Attributes:
        baseline: the step as it is.
        found: the changes that save time, most first, at most as many as asked for.
        left_out: (name, why) of those that cannot be done or save nothing, and of those beyond the number asked for.
    """

    baseline: Prediction
    found: tuple[Opportunity, ...]
    left_out: tuple[tuple[str, str], ...]

    def headline(self) -> str:
        """Say what would save most in one line."""
        step = f"step {self.baseline.times} {self.baseline.step_time_us / 1e3:,.3f} ms"
        if not self.found:
            return f"{step}; nothing that was tried saves time"
        best = self.found[0]
        return f"{step}; {best.name} would save {best.gain:.1%}"

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return ``opportunities``, times in µs, and ``left_out`` with the reasons."""
        found = self.to_json()
        return {name: partial(frame_of, found[name], columns) for name, columns in _TABLES.items()}

    def chart(self) -> Chart:
        """Return what each change saves, with its interval."""
        return Chart("bars", self.headline(), [each.name for each in self.found], [ChartSeries(
            "saves", [each.gain_us / 1e3 for each in self.found], [each.interval_us[0] / 1e3 for each in self.found],
            [each.interval_us[1] / 1e3 for each in self.found])], "ms a step")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "times": self.baseline.times, "step_time_us": self.baseline.step_time_us,
            "recorded": None if self.baseline.recorded is None else self.baseline.recorded.to_json(),
            "gpu_active_us": self.baseline.gpu_active_us,
            "interval_us": list(self.baseline.interval_us), "bound": self.baseline.bound,
            "opportunities": [{
                "name": o.name, "option": o.option, "is_bound": o.bound, "gain_us": o.gain_us, "gain": o.gain,
                "interval_us": list(o.interval_us), "step_time_us": o.step_time_us, "bound": o.decides,
                "sources": o.sources, "notes": list(o.notes)} for o in self.found],
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
            "warnings": self.baseline.warnings, "notes": self.baseline.notes,
        }


def candidates() -> list[CandidateEdit]:
    """Return every change that is tried, as the edits declare them."""
    return [CandidateEdit(name, option.written(value), option.make(value), bound)
            for option in OPTIONS for values, bound in ((option.tries, False), (option.bounds, True))
            for name, value in values.items()]


def opportunities(source: Baseline | Job | ExecutionGraph | Sequence[ExecutionGraph], *, top: int = 10,
                  edits: Sequence[Edit] = (), evidence: bool = False) -> Opportunities:
    """Return the changes that would save most, each by itself.

    Args:
        source: a prepared baseline, or what to make one of.
        top: how many to keep.
        edits: changes that are made in any case.
        evidence: say of the step as it is what each resource would save that takes no time.

    Raises:
        ForetraceError: there is nothing to predict from, or one of ``edits`` cannot be done.
    """
    baseline = source if isinstance(source, Baseline) else baseline_of(source)
    before = baseline.predict(edits, evidence=evidence)
    if before.step_time_us <= 0:
        raise ForetraceError("The step takes no time, so that nothing can be saved of it; choose another with --step.")
    found: list[Opportunity] = []
    left_out: list[tuple[str, str]] = []
    for candidate in candidates():
        try:
            after = baseline.predict([*edits, candidate.edit], path=False)
        except ForetraceError as error:
            left_out.append((candidate.name, str(error)))
            continue
        opportunity = _opportunity(candidate, before, after)
        if opportunity.gain > NOTHING:
            found.append(opportunity)
        else:
            left_out.append((candidate.name, f"It saves nothing: the step would take {after.step_time_us / 1e3:,.3f} "
                                             f"ms, decided by {after.bound}."))
    found.sort(key=lambda one: (-one.gain_us, one.name))
    left_out += [(one.name, f"It saves {one.gain_us / 1e3:,.3f} ms ({one.gain:.1%}), less than those shown.")
                 for one in found[top:]]
    return Opportunities(before, tuple(found[:top]), tuple(left_out))


def _opportunity(candidate: CandidateEdit, before: Prediction, after: Prediction) -> Opportunity:
    gain = before.step_time_us - after.step_time_us
    return Opportunity(
        candidate.name, candidate.option, candidate.bound, gain, gain / before.step_time_us,
        gain_interval(before, after), after.step_time_us, after.bound, after.sources,
        tuple(note for note in after.notes if note not in before.notes))


def gain_interval(before: Prediction, after: Prediction) -> tuple[float, float]:
    """Return the 80% interval of a gain, µs.

    The uncertainty of the unedited step is common to both steps, so it scales the gain. The rest of the edited step's
    (logarithmic) width is the change's own, and adds in quadrature.
    """
    gain = before.step_time_us - after.step_time_us
    ends = []
    for end in (0, 1):
        own, common = (abs(math.log(max(one.interval_us[end], LEAST_US) / max(one.step_time_us, LEAST_US)))
                       for one in (after, before))
        change = after.step_time_us * math.expm1(math.sqrt(max(own**2 - common**2, 0.0)))
        ends.append(math.hypot(gain * common, change))
    # A step that takes longer saves less.
    return gain - ends[1], gain + ends[0]
