"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Paths = Annotated[list[str], typer.Argument(
    metavar="PATH", help="Traces or converted files, a directory or glob of a job's ranks, or URLs.")]
Window = Annotated[int, typer.Option(
    min=0, metavar="N", help="Which window of a capture with several cycles, from 0.")]
Profiled = Annotated[bool, typer.Option(
    "--profiled", help="The step under the profiler, as it was recorded; by default it is the step without the "
                       "profiler, where the capture says what that takes.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to stdout.")]
Debug = Annotated[bool, typer.Option(
    "--debug", envvar="FORETRACE_DEBUG", show_envvar=False, help="Print the traceback of an error.")]
