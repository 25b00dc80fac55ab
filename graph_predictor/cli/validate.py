"""``foretrace validate``: predict sizes of one's own program, run them, compare."""

from __future__ import annotations

from typing import Annotated

import typer

from graph_predictor.check import validate as check_validate
from graph_predictor.cli.check import share_of
from graph_predictor.cli.console import Column, Report, print_json, working
from graph_predictor.cli.options import Debug, Json, shared
from graph_predictor.cli.running import one_sentence
from graph_predictor.figures import signed_percent
from graph_predictor.sizes import retrace
from tracer.errors import ForetraceError

WORSE = 1
"""The exit code of a mean error above the largest that is wanted."""


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
    max_error: Annotated[str | None, typer.Option(
        metavar="PERCENT%", help="End with code 1 if the mean error is larger.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Capture a program once, predict it at other sizes, then run those and compare.

    foretrace validate train.py -o runs/check --set batch=8 --set batch=16 --set batch=32 -- --epochs 1

    All predictions are made before any of them is run. Exit code 1 if the mean error is above --max-error.
    """
    with one_sentence(debug):
        most = None if max_error is None else share_of(max_error, "--max-error")
        if (script is None) == (workload is None):
            raise ForetraceError("Name what to validate: a script, or a workload with --workload, and not both.")
        chosen = [retrace.parse_sets(text.split(","))[1] for text in sizes]
        options = ("--timed", str(timed), "--warmup", str(warmup), "--execution-trace", "none")
        program = check_validate.ValidatedProgram(script, tuple(arguments or ()), workload, options=options)
        with working("Validating"):
            found = check_validate.validate(program, chosen, out, captures=captured, profiles=profile or (), code=code)
        if json:
            print_json({**found.to_json(), "max_error": most, "passed": most is None or found.mape <= most})
        else:
            _report(found, [check_validate.size_label(one) for one in chosen[:captured]])
        if most is not None and found.mape > most:
            raise typer.Exit(WORSE)


def _report(found: check_validate.Validation, captured: list[str]) -> None:
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
