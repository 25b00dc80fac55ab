"""``foretrace convert``: traces to the one-file form."""

from __future__ import annotations

import os
from typing import Annotated

from graph_predictor.cli.console import Report, print_json, read, working
from graph_predictor.cli.options import (
    Json,
    Paths,
    Scheduler,
    StepRegion,
    Window,
    Workers,
    in_one_sentence,
    shared,
)
from graph_predictor.figures import count
from graph_predictor.recorded import facts as damage
from tracer import job as tracer_job
from tracer.output_kind import GRAPH, check_output


@in_one_sentence
def convert(
    paths: Paths,
    out: Annotated[str, shared(
        "--out", "a file, named *.foretrace by convention", short="-o")],
    window: Window = 0,
    step_region: StepRegion = None,
    workers: Workers = "local",
    scheduler: Scheduler = None,
    json: Json = False,
) -> None:
    """Convert traces to one file, which every command reads.

    The file is Parquet tables and a JSON manifest, smaller than the traces and many times faster to read.
    """
    check_output(out, paths, GRAPH)
    job = read(paths, window, workers, scheduler, step_region=step_region)
    with working("Writing"):
        tracer_job.save_job(job, out)
    size = os.path.getsize(out) if "://" not in out else None
    sources = [graph.meta.source for graph in job.graphs]
    stored = [os.path.getsize(source) for source in sources if os.path.isfile(source)]
    before = sum(stored) if len(stored) == len(sources) else None
    notes = [*job.notes, *damage.damage_notes(job.graphs)]
    rows = sum(len(getattr(graph, table)) for graph in job.graphs for table in graph.TABLES)
    if json:
        print_json({"file": out, "bytes": size, "trace_bytes": before, "ranks": job.known_ranks, "rows": rows,
                    "notes": notes})
        return
    report = Report()
    ranks = "1 rank" if job.known_ranks == 1 else f"{count(job.known_ranks)} ranks"
    smaller = f" ({size / before:.0%} of the traces' {count(round(before / 1e3))} kB)" if size and before else ""
    written = f", {count(round(size / 1e3))} kB{smaller}" if size else ""
    report.line(f"Wrote {out}: {ranks}, {count(rows)} rows{written}.")
    report.notes(notes)
