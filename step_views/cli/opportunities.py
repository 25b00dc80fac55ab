"""``foretrace opportunities``: the edits of a step that would save most."""

from __future__ import annotations

from typing import Annotated

import typer

from graph_predictor.edits import registry
from graph_predictor.figures import percent
from graph_predictor.recorded import facts
from graph_predictor.request import study as request_study
from kernel_models import device as known_devices
from step_views.cli.console import Column, Report, print_json, read, working
from step_views.cli.options import (
    Cycle,
    Json,
    Profiled,
    Step,
    StepRegion,
    Top,
    Window,
    in_one_sentence,
    loaded_profiles,
    shared,
    with_some_edits,
)
from step_views.reports import opportunities as reports_opportunities
from tracer.errors import ForetraceError


@with_some_edits("without-profiler", "ranks-alike")
@in_one_sentence
def opportunities(
    source: Annotated[list[str], typer.Argument(
        metavar="SOURCE", help="The step to start from: traces, a capture, a converted file, or SCRIPT.py:FUNCTION.")],
    device: Annotated[str | None, shared("--device", "what a step that never ran is traced for")] = None,
    from_device: Annotated[str | None, shared("--from-device")] = None,
    profile: Annotated[list[str] | None, shared("--profile", "repeatable")] = None,
    selected: Annotated[float | None, shared("--selected")] = None,
    step: Step = None,
    top: Top = None,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    profiled: Profiled = False,
    json: Json = False,
    **edits: bool,
) -> None:
    """List the changes of a step that would save most.

    Each is predicted by itself; gains do not add up. Changes that cannot be done are left out (--json says why).
    """
    script = source[0] if request_study.is_script(source, step_region) else None
    job = read(source, window, step_region=step_region, cycle=cycle) if script is None else None
    with working("Preparing"):
        study = request_study.Study(job, step, recorded_on=None if from_device is None
                                    else known_devices.find_device(from_device), profiles=loaded_profiles(profile),
                                    code=script, device=device, profiled=profiled)
    with working("Preparing" if script is None else "Tracing"):
        study.check_profiles([request_study.Configuration(device=device)])
        prepared = study.prepared(request_study.Configuration(device=device, selected=selected))
        if prepared.edits:
            raise ForetraceError("--device says what a step that never ran is traced for, and this one was "
                                 "recorded; give --from-device for the device it was recorded on, or see "
                                 "foretrace predict.")
    with working("Predicting"):
        given = {name.replace("_", "-"): True for name, wanted in edits.items() if wanted}
        result = reports_opportunities.opportunities(prepared.start, top=top or (1000 if json else 10),
                                                     edits=registry.made(given))
    if json:
        print_json(result.to_json())
    else:
        _report(result, [f"--{name}" for name in given])


def _report(result: reports_opportunities.Opportunities, given: list[str]) -> None:
    report = Report()
    before = result.baseline
    report.line()
    if before.recorded is not None:
        report.line(facts.recorded_line(before.recorded), style="bold")
    report.line(facts.step_line(before.times, before.step_time_us, before.interval_us,
                                cycle=before.cycle), style="bold")
    report.line(facts.decided_line(before.gpu_active_us, before.bound, before.gpu_active_interval_us))
    report.table("What would save most, each by itself",
                 [Column("change", name=True), Column("saves ms"), Column("share"), Column("80% between"),
                  Column("then decides", name=True), Column("predict", name=True)],
                 ([one.name + (" *" if one.bound else ""), _ms(one.gain_us), percent(one.gain),
                   f"{_ms(one.interval_us[0])} … {_ms(one.interval_us[1])}", one.decides, one.option]
                  for one in result.found))
    if not result.found:
        report.line("No change that is known would save time.")
    if given and result.found:
        report.line(f"Each besides {' '.join(given)}.")
    if any(one.bound for one in result.found):
        report.line("* a bound: what a perfect version could save at most")
    sources = sorted({name for one in result.found for name in one.sources})
    if sources:
        report.line(f"Times are {', '.join(sources)}; left out: {len(result.left_out)} changes (--json says why)")
    report.notes([*(f"Warning: {text}" for text in before.warnings), *before.notes])


def _ms(us: float) -> str:
    return f"{us / 1e3:,.3f}"
