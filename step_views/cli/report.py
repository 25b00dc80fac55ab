"""``foretrace report``: one page about a recording."""

from __future__ import annotations

import os
from typing import Annotated

from graph_predictor.request import program_memory
from step_views.cli.console import Report, print_json, read, working
from step_views.cli.options import (
    Cycle,
    Json,
    Paths,
    Profiled,
    Step,
    StepRegion,
    Window,
    check_html,
    in_one_sentence,
    shared,
    write_html,
)
from step_views.pages import overview
from tracer.errors import ForetraceError


@in_one_sentence
def report(
    paths: Paths,
    out: Annotated[str, shared("--out", "one HTML file, which needs no network to be looked at", short="-o")],
    step: Step = None,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    profiled: Profiled = False,
    code: Annotated[str | None, shared("--code", "for the memory predicted beside what was measured")] = None,
    selected: Annotated[float | None, shared("--selected")] = None,
    json: Json = False,
) -> None:
    """Write one HTML page of a recording: overview, timeline, operations, roofline, memory, ranks, what-ifs.

    foretrace report runs/mine -o report.html
    """
    check_html(out, paths)
    table = next((path for path in paths if path.lower().endswith((".csv", ".parquet"))), None)
    if table is not None:
        raise ForetraceError(f"{table} is a table, not a recording; a sweep's page is written beside its table, by "
                             "foretrace sweep … -o TABLE --html PAGE.")

    job = read(paths, window, step_region=step_region, cycle=cycle)
    traced = None
    if code is not None:
        with working("Tracing"):
            traced = program_memory.program_memory(job.graphs[0], code, selected=selected)
    with working("Looking"):
        write_html(out, paths, lambda where: overview.report_page(job, where, step=step, profiled=profiled,
                                                        traced=traced))
    size = os.path.getsize(out) if os.path.isfile(out) else None
    if json:
        print_json({"report": out, "bytes": size})
    else:
        said = "" if size is None else f" ({size / 1e6:,.2f} MB)"
        Report().line(f"Report written to {out}{said}: open it in a browser.")
