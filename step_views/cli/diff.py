"""``foretrace diff``: why one recorded step takes longer than another."""

from __future__ import annotations

from typing import Annotated

import typer

from graph_predictor.figures import count, milliseconds, percent, signed_milliseconds
from graph_predictor.prediction import result as prediction_result
from graph_predictor.recorded import facts as reports_facts
from step_views.cli.console import Column, Report, print_json, read
from step_views.cli.options import (
    Cycle,
    Html,
    Json,
    Profiled,
    Step,
    StepRegion,
    Top,
    Window,
    check_html,
    in_one_sentence,
    write_html,
)
from step_views.diff import jobs as diff_jobs
from step_views.diff import result as diff_result
from step_views.pages import comparison
from tracer import capture_layout

HIDDEN_SHARE = 0.01
"""Least share of A's step from which changes off the critical path are shown."""


@in_one_sentence
def diff(
    before: Annotated[str, typer.Argument(
        metavar="A", help="The recording before: a trace, a converted file, a directory or glob of a job's ranks.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The recording after.")],
    step: Step = None,
    step_b: Annotated[str | None, typer.Option(
        "--step-b", metavar="NAME_OR_NUMBER", help="The step of B, where it is another one.")] = None,
    html: Html = None,
    top: Top = None,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    profiled: Profiled = False,
    json: Json = False,
) -> None:
    """Show what makes B's step take longer, or shorter, than A's.

    Operations are aligned by name, module and order; the parts add up to the difference of the step time exactly.
    """
    check_html(html, [before, after])
    jobs = [read([path], window, step_region=step_region, cycle=cycle) for path in (before, after)]
    result = diff_jobs.diff_jobs(*jobs, step=step, step_b=step_b,
                                            one_machine=_one_machine(before, after), profiled=profiled)
    if html is not None:
        write_html(html, [before, after], lambda where: comparison.difference_page(result, where))
    if json:
        print_json(result.to_json(top))
    else:
        _report(result, top or 10)


def _one_machine(before: str, after: str) -> bool | None:
    """Return whether two captures name the same processor and device; ``None`` if they do not name them."""
    found = []
    for path in (before, after):
        parts = capture_layout.find_parts(path) if "://" not in path else []
        hardware = capture_layout.read_context(parts[0].path).get("hardware") if parts else None
        found.append({name: hardware.get(name) for name in ("cpu", "device")} if isinstance(hardware, dict) else None)
    return found[0] == found[1] if found[0] and found[1] else None


def _report(result: diff_result.Difference, top: int) -> None:
    report = Report()
    before, total = result.before_ns, result.total_ns
    how = f"{milliseconds(1e3 * abs(result.shown_us()))} ms ({percent(abs(total) / before if before else None)}) " + (
        "longer" if total > 0 else "shorter")
    for name, facts in (("A", result.recorded_a), ("B", result.recorded_b)):
        if facts is not None:
            report.line(f"{name}: {reports_facts.recorded_line(facts)}")
    mean = f" (mean of {count(result.ranks)} ranks)" if result.ranks > 1 else ""
    report.line(f"A {milliseconds(before)} ms, B {milliseconds(result.after_ns)} ms "
                f"{prediction_result.which_times(result.profiled)}"
                f"{mean}: B's step is {how if total else 'as long'}.", style="bold")
    known = (("host", result.host_ratio), ("device", result.device_ratio))
    ratios = [f"{what} ×{ratio:.2f}" for what, ratio in known if ratio is not None]
    report.line(f"Aligned: {percent(result.aligned)} of the operations; attributed: {percent(result.attributed)} of "
                f"the difference; means of {count(result.steps_before)} and {count(result.steps_after)} steps."
                + (f" Unchanged work takes in B: {', '.join(ratios)}." if ratios else ""))

    def share(ns: int) -> str:
        return percent(ns / total if total else None)

    any_hidden = any(part.hidden_ns for part in result.parts)
    report.table(
        "The difference by kind, ms of a step (hidden: changed off the critical path, moves nothing)",
        [Column("kind", name=True), Column("ms"), Column("share"), *([Column("hidden ms")] if any_hidden else [])],
        ([kind.value, signed_milliseconds(time), share(time), *([signed_milliseconds(hidden)] if any_hidden else [])]
         for kind, time, hidden in result.by_kind()))
    modules = any(part.module for part in result.parts[:top])
    report.table(
        f"Causes: first of {count(len(result.parts))}, what is surest to matter first, ms of a step",
        [Column("kind", name=True), Column("what", name=True),
         *([Column("module", name=True, path=True)] if modules else []), Column("places"), Column("A"), Column("B"),
         Column("ms"), Column("sure ms")],
        ([part.kind.value, part.what, *([part.module] if modules else []), count(part.places) if part.places else "–",
          *_sides(part), milliseconds(part.certain_ns)] for part in result.top(top)))
    hidden = [part for part in result.hidden() if abs(part.hidden_ns) >= HIDDEN_SHARE * before]
    report.table("Hidden: what changed off the critical path, ms of a step",
                 [Column("kind", name=True), Column("what", name=True), Column("hidden ms"), Column("on path ms")],
                 ([part.kind.value, part.what, signed_milliseconds(part.hidden_ns), signed_milliseconds(part.time_ns)]
                  for part in hidden[:top]))
    report.notes(result.notes)


def _sides(part: diff_result.Part) -> list[str]:
    """Return a part's time in A and in B, and the difference of these as they are shown."""
    return [*("–" if ns is None else milliseconds(ns) for ns in (part.before_ns, part.after_ns)),
            signed_milliseconds(1e3 * part.shown_us())]
