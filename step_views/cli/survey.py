"""``foretrace survey``: the recordings of many jobs as one table, and what it says of a fleet."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graph_predictor.figures import count, milliseconds, percent
from step_views.cli.console import Column, Report, print_json
from step_views.cli.options import Json, StepRegion, in_one_sentence, shared
from step_views.cli.running import tell
from step_views.survey import fleet as survey_fleet
from step_views.survey import run as survey_run
from step_views.survey import slower
from tracer.errors import ForetraceError
from tracer.lazy import rich_console, rich_progress

LEAST_READ = 0.9  # chosen
MOST_UNTOLD = 10
"""Rows of programs that have too few steps; all are in the JSON."""


class SurveyCommands(TyperGroup):
    """The commands of ``survey``. Arguments that do not begin with a command's name are paths for ``run``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, with ``run`` put before them if they do not begin with a command's name."""
        if args and args[0] not in (*self.commands, "--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


survey = typer.Typer(cls=SurveyCommands, no_args_is_help=True, rich_markup_mode=None,
                     help="Survey the recordings of many jobs into one table, and show what it says of them.\n\n"
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
        tell(text)
    for name, why in found.unreadable:
        tell(f"Not read: {name}{': ' if why else ''}{why.removeprefix(f'{name}: ')}")
    if json:
        print_json(found.to_json())
    else:
        report = Report()
        report.line(f"Jobs: {count(found.found)} found, {count(found.read)} read, {count(found.unchanged)} unchanged, "
                    f"{count(len(found.unreadable))} could not be read ({percent(found.share_read)} are in the table).")
        if found.read or found.unchanged:
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
                tell(f"Jobs: {count(done)} of {count(total)}")

        yield say
        return
    # No thread of its own draws it: processes that read jobs are copies of this one.
    columns = (rich_progress.TextColumn("Surveying"), rich_progress.BarColumn(), rich_progress.MofNCompleteColumn(),
               rich_progress.TimeRemainingColumn())
    with rich_progress.Progress(*columns, console=rich_console.Console(stderr=True), transient=True,
                                auto_refresh=False) as bar:
        task = bar.add_task("Surveying", total=None)
        yield lambda done, total, _: bar.update(task, completed=done, total=total, refresh=True)


@survey.command("show")
@in_one_sentence
def show(
    table: Annotated[str, typer.Argument(metavar="DIR", help="What foretrace survey wrote.")],
    since: Annotated[str | None, typer.Option(
        metavar="OLDER", help="An earlier survey: which programs are slower now, and by what.")] = None,
    tag: Annotated[list[str] | None, typer.Option(
        metavar="TAG", help="Only jobs with this tag (repeatable: with all of them).")] = None,
    top: Annotated[int | None, shared("--top", "by default 3 jobs for each cause", least=1)] = None,
    json: Json = False,
) -> None:
    """Show what a survey says: distributions, the jobs that lose most by cause, and what got slower.

    Only the table is read. A program is compared with the same one of the older survey, by its operations.
    """
    found = survey_fleet.fleet(table, since=since, tags=tag or (), top=top or 3)
    if json:
        print_json(found.to_json())
        return
    report = Report()
    untold = found.untold[:MOST_UNTOLD]
    within = _common([*(one.job for one in found.worst), *(one.job for one in found.slower),
                      *(one.job for one in untold)])
    report.line(f"Jobs: {count(found.jobs)}, {count(found.predicted)} predicted, {count(found.unreadable)} could not "
                f"be read.{f' Jobs below are in {within}' if within else ''}")
    report.table("Distribution over the jobs",
                 [Column("quantity", name=True), Column("jobs"), Column("p10"), Column("median"), Column("p90"),
                  Column("unit", name=True)],
                 ([one.quantity, count(one.jobs), f"{one.p10:,.1f}", f"{one.median:,.1f}", f"{one.p90:,.1f}", one.unit]
                  for one in found.distributions))
    report.table("GPU time lost, by cause (an hour in which every job runs)",
                 [Column("cause", name=True), Column("GPU-s\nlost"), Column("of all\nGPU time"),
                  Column("jobs that lose\nmost to it")],
                 ([one.cause, count(round(one.gpu_s_an_hour)), percent(one.share), count(one.jobs)]
                  for one in found.lost))
    for cause in dict.fromkeys(one.cause for one in found.worst):
        report.table(f"Jobs that lose most to {cause}",
                     [Column("job", name=True, path=True), Column("GPU-s\nan hour"), Column("of its\nstep"),
                      Column("what would save most", name=True), Column("saves ms"), Column("80% between")],
                     ([one.job[len(within):], count(round(one.gpu_s_an_hour)), percent(one.share), one.change or "–",
                       _ms(one.gain_us), f"{_ms(one.low_us)} … {_ms(one.high_us)}"]
                      for one in found.worst if one.cause == cause))
    report.table(f"Slower than in {since}",
                 [Column("job", name=True, path=True), Column("runs"), Column("before\nms"), Column("now\nms"),
                  Column("change"), Column("90% between"), Column("what grew most", name=True),
                  Column("GPU-s lost\nan hour")],
                 ([one.job[len(within):], f"{one.runs_before}, {one.runs_after}", _ms(one.before_us), _ms(one.after_us),
                   percent(one.change), f"{percent(one.low)} … {percent(one.high)}", one.cause,
                   count(round(one.gpu_s_an_hour))] for one in found.slower))
    report.table(f"Too few steps to tell whether they are {percent(slower.TOLD)} slower",
                 [Column("job", name=True, path=True), Column("runs"), Column("steps"),
                  Column("smallest change\nthat could be told")],
                 ([one.job[len(within):], f"{one.runs_before}, {one.runs_after}",
                   f"{one.steps_before}, {one.steps_after}", percent(one.least)] for one in untold))
    if found.compared is not None:
        report.line()
        report.line(f"{count(len(found.slower))} of {count(found.compared)} programs of both surveys are slower than "
                    f"{since} has them; {count(len(found.untold))} others have too few steps to tell.")
    report.notes(found.notes)


def _common(jobs: list[str]) -> str:
    """Return the directory that all jobs are in, with its slash; empty where there is none."""
    folder = os.path.commonprefix(jobs).rpartition("/")[0]  # noqa: RUF071 -- cut at a slash, and of URLs too
    return f"{folder}/" if folder and len(set(jobs)) > 1 else ""


def _ms(us: float | None) -> str:
    return "–" if us is None else milliseconds(us * 1e3)
