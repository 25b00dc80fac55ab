"""``foretrace survey``: the recordings of many jobs as one table, and what it says of a fleet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graph_predictor.figures import count, percent
from step_views.cli.console import Report, print_json
from step_views.cli.options import Json, StepRegion, in_one_sentence, shared
from step_views.cli.running import tell
from step_views.survey import run as survey_run
from tracer.errors import ForetraceError
from tracer.lazy import rich_console, rich_progress

LEAST_READ = 0.9
_SHOWN = 20  # chosen: a screen


class SurveyCommands(TyperGroup):
    """The commands; what does not begin with the name of one are the paths of a survey."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with the name of the command put before paths and their options."""
        if args and args[0] not in (*self.commands, "--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


survey = typer.Typer(cls=SurveyCommands, no_args_is_help=True, rich_markup_mode=None,
                     help="Survey the recordings of many jobs into one table, and show what it says of them. "
                          "'foretrace survey PATH… -o DIR' is short for 'foretrace survey run PATH… -o DIR'.")


@survey.command("run")
@in_one_sentence
def run_survey(
    paths: Annotated[list[str], typer.Argument(
        metavar="PATH", help="Traces, captures, directory trees, globs, or URLs of these; - reads a list of paths from "
                             "standard input, one a line.")],
    out: Annotated[str, shared("--out", "a directory of Parquet tables, such as survey.parquet; the same command goes "
                                        "on with it", short="-o")],
    workers: Annotated[str | None, typer.Option(
        metavar="N|dask|ray", help="Processes of this machine, by default one a core; or Dask's or Ray's, with "
                                   ":ADDRESS those of a cluster that runs.")] = None,
    tag: Annotated[list[str] | None, typer.Option(
        metavar="TAG", help="Kept with every job that is found, such as team=ads (repeatable).")] = None,
    least_read: Annotated[float, typer.Option(
        "--least-read", metavar="SHARE", min=0.0, max=1.0,
        help="Share of the jobs that must have been read for exit code 0.")] = LEAST_READ,
    step_region: StepRegion = None,
    json: Json = False,
) -> None:
    """Read the jobs of many recordings, each once, into a table with a row a job.

    Jobs whose files did not change since are kept. Ends with status 1 where less than --least-read of the jobs could be
    read, and with 2 where none could.
    """
    with _progress() as progress:
        found = survey_run.survey(list(_listed(paths)), out, workers=_workers(workers), tags=tag or (),
                                  step_region=step_region, progress=progress)
    for text in found.left_out:
        tell(f"Left out: {text}")
    for name, why in found.unreadable:
        tell(f"Not read: {name}{': ' if why else ''}{why.removeprefix(f'{name}: ')}")
    if json:
        print_json(found.to_json())
    else:
        report = Report()
        report.line(f"{count(found.found)} jobs: {count(found.read)} read, {count(found.unchanged)} unchanged, "
                    f"{count(len(found.unreadable))} could not be read ({percent(found.share_read)} are in the table).")
        report.line(f"Written to {out}: foretrace survey show {out}")
    if not found.found:
        raise ForetraceError("No recording was found; check the paths.")
    if found.share_read < least_read or not found.share_read:
        raise typer.Exit(1 if found.share_read else 2)


def _listed(paths: list[str]) -> Iterator[str]:
    for path in paths:
        if path == "-":
            yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip())
        else:
            yield path


def _workers(text: str | None) -> str | int | None:
    return int(text) if text is not None and text.lstrip("-").isdigit() else text


@contextmanager
def _progress() -> Iterator[Callable[..., None]]:
    """Draw a bar on a terminal; elsewhere say now and then how far it is."""
    if not sys.stderr.isatty():
        def say(done: int, total: int, _: Any) -> None:
            if done * 10 // total != (done - 1) * 10 // total:
                tell(f"{count(done)} of {count(total)} jobs")

        yield say
        return
    # No thread of its own draws it: processes that read jobs are copies of this one.
    columns = (rich_progress.TextColumn("Surveying"), rich_progress.BarColumn(), rich_progress.MofNCompleteColumn(),
               rich_progress.TimeRemainingColumn())
    with rich_progress.Progress(*columns, console=rich_console.Console(stderr=True), transient=True,
                                auto_refresh=False) as bar:
        task = bar.add_task("Surveying", total=None)
        yield lambda done, total, _: bar.update(task, completed=done, total=total, refresh=True)
