"""The command ``foretrace``. One module a command; what is slow to import is imported when a command runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from graph_predictor.cli.breakdown import breakdown
from graph_predictor.cli.calibrate import calibrate
from graph_predictor.cli.campaign import campaign
from graph_predictor.cli.capture import CaptureCommand, capture
from graph_predictor.cli.check import check
from graph_predictor.cli.comm import comm
from graph_predictor.cli.convert import convert
from graph_predictor.cli.devices import devices, topologies
from graph_predictor.cli.diff import diff
from graph_predictor.cli.errors import one_sentence
from graph_predictor.cli.export import export
from graph_predictor.cli.fit import fit
from graph_predictor.cli.fit_batch import fit_batch
from graph_predictor.cli.inspect import inspect
from graph_predictor.cli.memory import memory
from graph_predictor.cli.models import models
from graph_predictor.cli.opportunities import opportunities
from graph_predictor.cli.overheads import overheads
from graph_predictor.cli.plan import plan
from graph_predictor.cli.predict import predict
from graph_predictor.cli.price import price
from graph_predictor.cli.ranks import ranks
from graph_predictor.cli.replay import replay
from graph_predictor.cli.shapes import shapes
from graph_predictor.cli.shard import shard
from graph_predictor.cli.sweep import sweep
from graph_predictor.cli.text import ClosedOutput, finish_output, standard_output
from graph_predictor.cli.trace import trace
from graph_predictor.cli.validate import validate
from graph_predictor.cli.workloads import workloads

app = typer.Typer(
    name="foretrace", no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
    help="Read recorded PyTorch steps, see where their time goes, and replay them. PATH is a profiler trace, a file "
         "of 'foretrace convert', a directory or glob of a job's ranks, or a URL of these.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        try:
            number = metadata.version("foretrace")
        except metadata.PackageNotFoundError:
            number = "unknown (not installed)"
        typer.echo(f"foretrace {number}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option(
        "--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options before the command."""


for command in (inspect, breakdown, diff, replay, predict, opportunities, ranks, sweep, plan, shapes, shard, overheads,
                convert, export, memory, fit_batch, calibrate, fit, price, check, validate):
    app.command()(command)
app.command(cls=CaptureCommand)(capture)
app.command()(trace)
app.command()(workloads)
app.command()(devices)
app.command()(topologies)
app.add_typer(campaign, name="campaign")
app.add_typer(comm, name="comm")
app.add_typer(models, name="models")


def main() -> None:
    """Run the command line; ends the process with 0, or 2 for bad input (see ``errors.one_sentence``)."""
    if sys.stdout is None or sys.stderr is None:
        _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show µ gets a question mark, not a crash.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        with one_sentence(debug=False), standard_output():
            _run()
    except typer.Exit as ended:
        sys.exit(ended.exit_code)


def _run() -> None:
    try:
        app()
    except SystemExit as ended:
        if not ended.code:
            finish_output()  # of --help too, which is no command's
        raise


def _open_closed_streams() -> None:
    """Put the null device where a shell closed a stream (``>&-``), so that no output file gets its number."""
    if sys.stdout is None:
        sys.stdout = ClosedOutput(open(os.devnull, "wb"))  # noqa: SIM115 -- until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


__all__ = ["app", "main"]
