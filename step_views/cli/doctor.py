"""``foretrace doctor``: what this machine lacks for recording, reading and predicting, and how to mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from step_views.acceptance import run
from step_views.cli.console import Column, ProgressLine, Report, print_json, working
from step_views.cli.options import Json, in_one_sentence, shared
from step_views.cli.running import BAD_INPUT, FAILED
from tracer import kept_files
from tracer.capture import readiness
from tracer.errors import ForetraceError, cut_text

ACCEPTANCE_MINUTES = 10.0  # chosen; parts that do not fit wait for the next call


@in_one_sentence
def doctor(
    out: Annotated[str, shared("--out", "of a capture, a directory", short="-o")] = ".",
    record: Annotated[bool, typer.Option(
        help="Also record a small profile with PyTorch, to see that its events arrive.")] = True,
    gpu: Annotated[bool, typer.Option(
        "--gpu", help="Accept this machine: prove each path of foretrace on its GPU, in parts, some 25 minutes in all; "
                      "on its CPU where it has none. --out is the run's directory.")] = False,
    minutes: Annotated[float | None, shared(
        "--minutes", "with --gpu; parts that do not fit are left for the next call; default: 10")] = None,
    parts: Annotated[str | None, typer.Option(metavar="N,N,…", help=(
        "With --gpu: run these parts, even if they have run; default: all that are left."))] = None,
    json: Json = False,
) -> None:
    """Look at this machine: GPU, driver, CUPTI rights, PyTorch, clocks, caches, disk; what is missing, what to do.

    Exits with 1 if something will not work, or a part of --gpu failed, with 2 if one could not run.
    """
    if not out:
        raise ForetraceError("--out is empty: name a directory, such as --out runs/accept.")
    if gpu:
        _accept(Path(out), ACCEPTANCE_MINUTES if minutes is None else minutes, parts, as_json=json)
        return
    if minutes is not None or parts is not None:
        raise ForetraceError("--minutes and --parts are of an acceptance run; give --gpu too.")
    with working("Looking"):
        found = [*readiness.examine(Path(out), record=record), _compiled_code()]
    if json:
        print_json([{"subject": each.subject, "verdict": each.verdict.value, "found": each.found,
                     "advice": each.advice} for each in found])
    else:
        _print(found)
    if any(each.verdict is readiness.MachineVerdict.PROBLEM for each in found):
        raise typer.Exit(FAILED)


def _compiled_code() -> readiness.MachineCheck:
    refused = kept_files.why_unkept()
    place = next((path for path, why in refused.items() if not why), None)
    why = "; ".join(f"{path}: {why}" for path, why in refused.items() if why)
    if place is None:
        return readiness.MachineCheck("compiled code", readiness.MachineVerdict.NOTE, f"is kept nowhere ({why})",
                                      "Each command compiles its simulator anew, for some seconds: set XDG_CACHE_HOME "
                                      "to a directory that you alone can write.")
    return readiness.MachineCheck("compiled code", readiness.MachineVerdict.OK,
                                  f"kept in {place}" + (f" (not in {why})" if why else ""))


def _print(found: list[readiness.MachineCheck]) -> None:
    report = Report()
    report.table("This machine", [Column("", whole=True, name=True), Column("", name=True, whole=True),
                                  Column("found", name=True, whole=True)],
                 ([each.verdict.value, each.subject, each.found] for each in found))
    advice = [each for each in found if each.advice]
    for place, each in enumerate(advice):
        if not place:
            report.line()
        report.line(f"{each.subject}: {each.advice}", indent=2)


def _accept(folder: Path, minutes: float, parts: str | None, *, as_json: bool) -> None:
    words = [word for word in (parts or "").split(",") if word.strip()]
    try:
        again = [int(word) for word in words]
    except ValueError:
        words = []
    if parts is not None and not words:
        raise ForetraceError(f"{cut_text(parts, 60)!r} names no parts: give their numbers, such as --parts 1,2.")
    line = ProgressLine()
    try:
        found = run.accept(folder, minutes, run.torch_device(), again, line.say)
    except KeyboardInterrupt:
        line.say("Parts that ended are kept; the same command goes on.")
        raise
    finally:
        line.end()
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        _print_parts(found)
    if found.numbers(run.PointVerdict.FAILED):
        raise typer.Exit(FAILED)
    if found.numbers(run.PointVerdict.INTERRUPTED) or found.unrun:
        raise typer.Exit(BAD_INPUT)


def _print_parts(found: run.AcceptanceResults) -> None:
    report = Report()
    for part in found.parts:
        report.table(f"Part {part.number}, {part.title}: {part.verdict.value} ({part.seconds:.0f} s)",
                     [Column("", whole=True, name=True), Column("", name=True, whole=True),
                      Column("asked", name=True, whole=True), Column("measured", name=True, whole=True)],
                     ([point.verdict.value, point.name, point.asked, point.measured] for point in part.points))
        if part.failure:
            report.line(f"Part {part.number}: {part.failure}", indent=2)
    report.line()
    counts = {verdict: sum(part.verdict is verdict for part in found.parts) for verdict in run.PointVerdict}
    told = ", ".join(f"{number} {verdict.value}" for verdict, number in counts.items() if number) or "none has run"
    report.line(f"On {found.machine or 'this machine'}: {told} of {len(run.PARTS)} parts.")
    for number, why in found.unrun.items():
        report.line(f"Part {number} did not run: {why}.")
    if again := found.numbers(run.PointVerdict.FAILED):
        report.line(f"Failed: {again}. The same command with --parts {again} begins them anew.")
    if again := found.numbers(run.PointVerdict.NOTED):
        report.line(f"Noted: {again}, which ran while the machine was busy. Give --parts {again} when it is quiet.")
    if found.left:
        report.line(f"Left: {', '.join(str(part.number) for part in found.left)}; without --parts the command "
                    "goes on with them.")
