"""``foretrace doctor``: what this machine lacks to record, read and predict, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graph_predictor.cli.console import Column, Report, print_json, working
from graph_predictor.cli.options import Json, in_one_sentence, shared
from graph_predictor.cli.running import FAILED
from tracer import machine_code
from tracer.capture import readiness


@in_one_sentence
def doctor(
    out: Annotated[str, shared("--out", "of a capture, a directory", short="-o")] = ".",
    record: Annotated[bool, typer.Option(
        help="Also record a small profile with PyTorch, to see that its events arrive.")] = True,
    json: Json = False,
) -> None:
    """Look at this machine: GPU, driver, CUPTI rights, PyTorch, clocks, caches, disk; what is missing, what to do.

    Exits with 1 if something will not work.
    """
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
    place = machine_code.kept_in()
    if place is None:
        return readiness.MachineCheck("compiled code", readiness.MachineVerdict.NOTE, "cannot be kept anywhere",
                                      "Each command compiles its simulator anew, for some seconds: set NUMBA_CACHE_DIR "
                                      "to a "
                                      "directory that can be written.")
    return readiness.MachineCheck("compiled code", readiness.MachineVerdict.OK, f"kept in {place}")


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
