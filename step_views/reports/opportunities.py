"""Opportunities: the edits of a step that would save most, each by itself.

Every edit that ``graph_predictor.edits`` offers is predicted by itself from one prepared baseline. Impossible edits are
left out, with the reason. Gains do not add up: two edits that shorten the same wait save it only once.
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
"""Gains of less than this share of the step count as none."""
LEAST_US = 1e-6  # avoids a division by zero


@dataclass(frozen=True, slots=True)
class CandidateEdit:
    """An edit to be tried: its name, the option of ``foretrace predict`` for it, and the edit.

    ``bound``: it is not a real change but a bound, the most that a perfect version could save.
    """

    name: str
    option: str
    edit: Edit
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Opportunity:
    """An edit and its predicted saving.

    Attributes:
        name, option, bound: as in ``CandidateEdit``.
        gain_us, gain: time saved per step, µs, and as a share of the step.
        interval_us: 80% interval of ``gain_us``.
        step_time_us: time of the edited step.
        decides: the resource that limits the edited step.
        sources: share of the edited step's time by source of its durations.
        notes: assumptions of the edit about this step.
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
"""Columns of the tables, also for tables without rows."""


@dataclass(frozen=True, slots=True, repr=False)
class Opportunities(Shown):
    """The edits of a step that save most, and those that are left out.

    Attributes:
        baseline: the step without the edits.
        found: the edits that save time, largest gain first, up to the requested number.
        left_out: (name, reason) of edits that are impossible or save nothing, and of those beyond the requested number.
    """

    baseline: Prediction
    found: tuple[Opportunity, ...]
    left_out: tuple[tuple[str, str], ...]

    def headline(self) -> str:
        """Return one line about the edit that would save most."""
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
        """Return a chart of each edit's saving, with its interval."""
        return Chart("bars", self.headline(), [each.name for each in self.found], [ChartSeries(
            "saves", [each.gain_us / 1e3 for each in self.found], [each.interval_us[0] / 1e3 for each in self.found],
            [each.interval_us[1] / 1e3 for each in self.found])], "ms a step")

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
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
    """Return every edit to be tried, as the edits declare them."""
    return [CandidateEdit(name, option.written(value), option.make(value), bound)
            for option in OPTIONS for values, bound in ((option.tries, False), (option.bounds, True))
            for name, value in values.items()]


def opportunities(source: Baseline | Job | ExecutionGraph | Sequence[ExecutionGraph], *, top: int = 10,
                  edits: Sequence[Edit] = (), evidence: bool = False) -> Opportunities:
    """Return the edits that would save most, each by itself.

    Args:
        source: a prepared baseline, or its source.
        top: the most edits to return.
        edits: edits that are made in every case.
        evidence: whether to add to the baseline what the step would save if a resource took no time.

    Raises:
        ForetraceError: there is nothing to predict from, or one of ``edits`` is impossible.
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

    The uncertainty of the unedited step is common to both steps, so it scales the gain. The remaining (logarithmic)
    width of the edited step is due to the edit and is added in quadrature.
    """
    gain = before.step_time_us - after.step_time_us
    ends = []
    for end in (0, 1):
        own, common = (abs(math.log(max(one.interval_us[end], LEAST_US) / max(one.step_time_us, LEAST_US)))
                       for one in (after, before))
        change = after.step_time_us * math.expm1(math.sqrt(max(own**2 - common**2, 0.0)))
        ends.append(math.hypot(gain * common, change))
    # A longer step means a smaller gain.
    return gain - ends[1], gain + ends[0]
