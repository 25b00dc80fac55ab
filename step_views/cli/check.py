"""``foretrace check`` and ``foretrace validate``: has a model or a program got worse, and do predictions hold?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from graph_predictor.figures import milliseconds, signed_percent
from graph_predictor.sizes import retrace as named_sizes
from step_views.check import baseline, gate, measure
from step_views.check import validate as check_validate
from step_views.check import verdict as check_verdict
from step_views.cli.console import Column, Report, print_json, working
from step_views.cli.options import (
    Cycle,
    Html,
    Json,
    StepRegion,
    check_html,
    in_one_sentence,
    loaded_profiles,
    shared,
    write_html,
)
from step_views.diff import jobs, result
from step_views.pages import comparison
from tracer import output_file
from tracer.errors import ForetraceError
from tracer.output_kind import JUNIT, MARKDOWN, check_output

WORSE = 1
"""Exit code if something got worse, or if a mean error is above the allowed one."""
UNDECIDED = 3
"""Exit code if something may have got worse, but nothing surely did. Exit code 2 is for an impossible check."""


class Undecided(str, Enum):
    """How to treat an inconclusive check."""
    REPORT = "report"
    FAIL = "fail"
    PASS = "pass"


WHY = "what made the step longer (A: baseline, B: new; see foretrace diff)"


@in_one_sentence
def check(
    directory: Annotated[str, typer.Argument(
        metavar="DIR|SCRIPT.py", help="Captures, one directory each, and their baseline.json; with --base a script.")],
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="ARGS", help="Arguments of the script, after --.")] = None,
    base: Annotated[str | None, typer.Option(
        metavar="COMMIT|DIR", help="Run SCRIPT.py alternately as it is and as it was there: is it slower?")] = None,
    pairs: Annotated[int | None, typer.Option(
        metavar="N", help="With --base: how often each of the two is run (8).")] = None,
    against: Annotated[str | None, typer.Option(
        "--against", metavar="NEW", help="New captures of the same programs: did a program get slower?")] = None,
    tolerance: Annotated[str | None, typer.Option(
        metavar="PERCENT", help="Growth that is no failure: of errors (5%), with --against or --base of times "
                                "(1%).")] = None,
    resolution: Annotated[str | None, typer.Option(
        metavar="PERCENT", help="With --against or --base: growth that must be excluded, or a time is inconclusive "
                                "(25%).")] = None,
    inconclusive: Annotated[Undecided, typer.Option(
        help="An inconclusive check ends with code 3 (report), 1 (fail) or 0 (pass).")] = Undecided.REPORT,
    update: Annotated[bool, typer.Option(
        "--update-baseline", help="Write a new baseline.json from the captures; needs --reason.")] = False,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why the baseline changes; kept in it.")] = "",
    profile: Annotated[list[str] | None, shared("--profile", "repeatable")] = None,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    junit: Annotated[str | None, typer.Option(metavar="FILE", help="Also write JUnit XML.")] = None,
    markdown: Annotated[str | None, typer.Option(
        metavar="FILE", help="Also write a Markdown summary for a pull request.")] = None,
    html: Html = None,
    json: Json = False,
) -> None:
    """Compare captures with their baseline; exit code 1 if something got worse, 3 if noise hides whether it did.

    Without --against every capture is predicted again: did the models get worse? With it the new captures are compared:
    did the program get slower, beyond noise? With --base a script runs here and now, alternately with its base version:
    foretrace check train.py --base main -- --batch 8
    """
    check_html(html, [])
    share = None if tolerance is None else share_of(tolerance)
    excluded = None if resolution is None else share_of(resolution, "--resolution")
    _check_options(update, reason, against)
    _check_script(directory, base, arguments, pairs, against is not None or update or bool(profile) or
                  step_region is not None or cycle is not None)
    if base is not None:
        _check_reports(junit, markdown, [directory])
    elif junit is not None or markdown is not None:
        folders = [directory] if against is None else [directory, against]
        _check_reports(junit, markdown, [
            *(file for folder in folders for each in measure.find_captures(folder) for file in each.files),
            baseline.BaselineFile(directory).path, *(profile or [])])
    profiles = {one.device.name: one for one in loaded_profiles(profile)}
    with working("Checking"):
        if base is not None:
            found = gate.check_script(directory, base, arguments or [], pairs=gate.PAIRS
                                      if pairs is None else pairs,
                                      tolerance=share, resolution=excluded, explain=explain)
        elif update:
            found = gate.update_baseline(directory, reason, profiles, step_region, cycle)
        elif against is not None:
            found = gate.check_against(directory, against, tolerance=share, resolution=excluded,
                                       explain=explain, step_region=step_region, cycle=cycle)
        else:
            found = gate.check_directory(directory, tolerance=share, profiles=profiles,
                                         step_region=step_region, cycle=cycle)
    _write(found, junit, markdown)
    if html is not None:
        write_html(html, [directory if against is None else f"{directory} and {against}"],
                   lambda where: comparison.check_page_of(found, where))
    if json:
        print_json(found.to_json())
    else:
        _report(found)
    if found.failures or (found.inconclusive and inconclusive is Undecided.FAIL):
        raise typer.Exit(WORSE)
    if found.inconclusive and inconclusive is Undecided.REPORT:
        raise typer.Exit(UNDECIDED)


def share_of(text: str, option: str = "--tolerance") -> float:
    """Return the share that "5%" or "0.05" expresses. Raises ``ForetraceError`` if it is neither or negative, and for a
    number such as 5, which more likely means 5% than 500%."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = float("nan")
    if value >= 1 and not text.endswith("%"):
        raise ForetraceError(f"{option} {text} would be {value:.0%}; write {text}% if that is meant in percent, or "
                             f"{value * 100:g}%.")
    if not 0 <= value < 10:
        raise ForetraceError(f"{option} {text} is no share: give it like 5% or 0.05.")
    return value


def _check_options(update: bool, reason: str, against: str | None) -> None:
    if update and against is not None:
        raise ForetraceError("--update-baseline and --against exclude each other: to make new captures the baseline, "
                             "put them into the directory in the place of the old ones, then --update-baseline.")
    if update and not reason.strip():
        raise ForetraceError("--update-baseline needs --reason TEXT: say why the figures changed.")
    if reason and not update:
        raise ForetraceError("--reason belongs to --update-baseline.")


def _check_script(path: str, base: str | None, arguments: list[str] | None, pairs: int | None, others: bool) -> None:
    """Refuse a script's options if no script is to be run, and captures' options if one is."""
    if base is None:
        if path.endswith(".py"):
            raise ForetraceError(f"{path} is a script; say with --base what it is compared with, a commit such as HEAD "
                                 "or the directory of another version.")
        if arguments or pairs is not None:
            what = "--pairs" if pairs is not None else (arguments or [""])[0]
            raise ForetraceError(f"{what} belongs to a script that is run: foretrace check SCRIPT.py --base COMMIT.")
        return
    if not path.endswith(".py"):
        raise ForetraceError(f"--base is for a script that is run, and {path} is none; captures are compared with "
                             "--against.")
    if others:
        raise ForetraceError("--base runs a script and needs no captures: leave --against, --update-baseline, "
                             "--profile and --step-region out.")


def _check_reports(junit: str | None, markdown: str | None, read: Sequence[str | Path]) -> None:
    """Refuse reports that cannot be written, or that would replace each other or a file that the check needs."""
    kept = {os.path.realpath(each) for each in read}
    for path, kind in ((junit, JUNIT), (markdown, MARKDOWN)):
        if path is None:
            continue
        check_output(path, [], kind)
        if os.path.realpath(path) in kept:
            raise ForetraceError(f"{path} belongs to what is checked and would be overwritten; name another file for "
                                 "the report.")
    if junit is not None and markdown is not None and Path(junit).resolve() == Path(markdown).resolve() and (
            not Path(junit).exists() or Path(junit).is_file()):
        raise ForetraceError(f"--junit and --markdown both name {junit}, and one would replace the other; name two "
                             "files.")


def explain(old: measure.StoredCapture, new: measure.StoredCapture, decided: bool = True) -> list[str]:
    """Return lines on the causes of the new capture's longer step; or the reason why the two cannot be compared. Unless
    something is ``decided``, changes of time alone are named only if they are certain."""
    try:
        found = jobs.diff_jobs(old.job, new.job)
    except ForetraceError as error:
        return [str(error)]
    least = gate.RESOLUTION * found.before_ns
    named = [change for change in found.changes() if change.counted or (
        change.time_ns + max(change.hidden_ns, 0) > 0 if decided else change.certain_ns >= least)]
    # Changes that certainly saved time come last.
    named.sort(key=lambda change: change.certain_ns < -result.NOTABLE * found.before_ns)
    if fewer := measure.environment_of(old).fewer_threads(measure.environment_of(new)):
        named.insert(0, result.Change(f"{fewer}, of the whole step", True, time_ns=found.total_ns))
    return [_told(change) for change in named[:5]]


def _told(change: result.Change) -> str:
    """Return a change and its time: if certain, the median step's, which interrupted steps do not affect."""
    time = change.steady_ns if change.certain_ns else change.time_ns
    hidden = f" ({milliseconds(change.hidden_ns)} ms more hidden)" if change.hidden_ns > 0 else ""
    return f"{change.what}, {milliseconds(time)} ms{hidden}"


def _write(found: check_verdict.GateOutcome, junit: str | None, markdown: str | None) -> None:
    for path, text in ((junit, check_verdict.junit_xml),
                       (markdown, lambda each: check_verdict.markdown(each).encode())):
        if path is not None:
            with output_file.whole_file(path) as stream:
                stream.write(text(found))


def _report(found: check_verdict.GateOutcome) -> None:
    report = Report()
    report.line(f"Check: {found.what}", style="bold")
    report.table("Figures", [Column("program", name=True), Column("figure", name=True), Column("before"),
                             Column("now"), Column("outcome", name=True)],
                 ([v.program, v.quantity, v.value(v.before), v.value(v.now), v.status.value.upper() if v.failed or
                   v.status is check_verdict.Status.INCONCLUSIVE else v.status.value] for v in found.verdicts))
    for verdict in found.verdicts:
        if verdict.failed or verdict.confidence is not None:
            report.line()
            report.line(f"{verdict.program}: {verdict.text}.", indent=2)
    for program, causes in found.causes.items():
        report.line()
        report.line(f"{program}: {WHY}", style="bold")
        for cause in causes:
            report.line(f"  {cause}", indent=4)
    report.notes(found.notes)
    report.line()
    report.line(found.summary, style="bold")


@in_one_sentence
def validate(
    out: Annotated[str, shared(
        "--out", "a directory for the captures; earlier ones of a size are replaced", short="-o")],
    sizes: Annotated[list[str], shared(
        "--set", "several with commas: batch=8,seq=64; the first is captured, the others are predicted, then run")],
    script: Annotated[str | None, typer.Argument(metavar="SCRIPT.py", help="The script; its arguments follow "
                                                                           "after --.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="ARGS", help="Arguments of the script, {batch} for a size; one that is not named so is added as "
                             "--batch 8.")] = None,
    workload: Annotated[str | None, shared("--workload", "instead of a script")] = None,
    captured: Annotated[int, typer.Option(
        "--captured", metavar="N", min=1, help="How many of the sizes are captured; the nearest one is scaled.")] = 1,
    timed: Annotated[int, typer.Option(help="Steps timed without the profiler.")] = 10,
    warmup: Annotated[int, typer.Option(help="Steps before anything is measured.")] = 3,
    profile: Annotated[list[str] | None, shared("--profile", "or of this machine (foretrace calibrate); repeatable")
                       ] = None,
    code: Annotated[str | None, shared("--code")] = None,
    selected: Annotated[float | None, shared("--selected", "by default as recorded")] = None,
    max_error: Annotated[str | None, typer.Option(
        metavar="PERCENT%", help="End with code 1 if the mean error is larger.")] = None,
    json: Json = False,
) -> None:
    """Capture a program once, predict it at other sizes, then run those and compare.

    foretrace validate train.py -o runs/check --set batch=8 --set batch=16 --set batch=32 -- --epochs 1

    All predictions are made before any of them is run. Exit code 1 if the mean error is above --max-error.
    """
    most = None if max_error is None else share_of(max_error, "--max-error")
    if (script is None) == (workload is None):
        raise ForetraceError("Name what to validate: a script, or a workload with --workload, and not both.")
    chosen = [named_sizes.parse_sets(text.split(","))[1] for text in sizes]
    options = ("--timed", str(timed), "--warmup", str(warmup), "--execution-trace", "none")
    program = check_validate.ValidatedProgram(script, tuple(arguments or ()), workload, options=options)
    with working("Validating"):
        found = check_validate.validate(program, chosen, out, captures=captured, profiles=profile or (), code=code,
                                        selected=selected)
    if json:
        print_json({**found.to_json(), "max_error": most, "passed": most is None or found.mape <= most})
    else:
        _report_validation(found, [check_validate.size_label(one) for one in chosen[:captured]])
    if most is not None and found.mape > most:
        raise typer.Exit(WORSE)


def _report_validation(found: check_validate.Validation, captured: list[str]) -> None:
    report = Report()
    report.table(f"Predicted from {' and '.join(captured)}, then run",
                 [Column("never run before", name=True), Column("predicted ms"), Column("80% interval"),
                  Column("measured ms"), Column("error"), Column("", name=True)],
                 ([check_validate.size_label(case.sizes), f"{case.predicted_us / 1e3:,.2f}",
                   f"{case.low_us / 1e3:,.2f} to {case.high_us / 1e3:,.2f}", f"{case.measured_us / 1e3:,.2f}",
                   signed_percent(case.error), "" if case.covered else "outside"] for case in found.cases))
    report.line()
    report.line(f"{found.headline()[:1].upper()}{found.headline()[1:]}")
    warnings = [f"Warning: {check_validate.size_label(case.sizes)}: {text}" for case in found.cases
                for text in case.warnings]
    report.notes([*found.notes, *warnings])
