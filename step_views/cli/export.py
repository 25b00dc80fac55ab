"""``foretrace export`` and ``foretrace convert``: a job in other programs' formats, and in the one-file format."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated, Any

import typer

from graph_predictor.figures import count
from graph_predictor.prediction import replay
from graph_predictor.recorded import facts as damage
from graph_predictor.request import study as request_study
from kernel_models import device as known_devices
from step_views.cli.console import Report, print_json, read, working
from step_views.cli.options import (
    Cycle,
    Json,
    Paths,
    Step,
    StepRegion,
    Window,
    Workers,
    chosen_edits,
    in_one_sentence,
    loaded_profiles,
    shared,
    with_edits,
)
from step_views.exports import export as exports_export
from step_views.reports import breakdown
from tracer import graph as tracer_graph
from tracer import job as tracer_job
from tracer.output_kind import GRAPH, check_output


@with_edits
@in_one_sentence
def export(
    source: Annotated[list[str], typer.Argument(
        metavar="SOURCE", help="What to export: traces, a capture, a converted file, or SCRIPT.py:FUNCTION.")],
    out: Annotated[str, shared(
        "--out", "a file, whose ending says the format; a folder for all tables and for TensorBoard", short="-o")],
    format: Annotated[str | None, typer.Option(
        "--format", metavar="NAME", help="chrome (.json), perfetto (.pftrace), chakra (.et), csv, parquet or "
                                         "tensorboard.")] = None,
    table: Annotated[str | None, typer.Option(
        "--only-table", metavar="NAME", help="The table that a CSV or Parquet file gets; by default the first.")
    ] = None,
    at: Annotated[int, typer.Option("--at", metavar="N", help="TensorBoard's step, such as a commit's number.")] = 0,
    predicted: Annotated[bool, typer.Option(
        "--predicted", help="The predicted step though nothing is changed; by default what was recorded.")] = False,
    device: Annotated[str | None, shared("--device", "another than the recorded one")] = None,
    from_device: Annotated[str | None, shared("--from-device")] = None,
    profile: Annotated[list[str] | None, shared("--profile", "or of the one recorded on; repeatable")] = None,
    host_from: Annotated[str | None, shared("--host-from", "its time per operation and launch latencies")] = None,
    topology: Annotated[str | None, shared("--topology", "collectives there")] = None,
    comm_profile: Annotated[str | None, shared("--comm-profile")] = None,
    comm_backend: Annotated[str | None, shared("--comm-backend")] = None,
    from_topology: Annotated[str | None, shared("--from-topology")] = None,
    parallel: Annotated[str | None, shared("--parallel", "a workload's step on many ranks")] = None,
    sizes: Annotated[list[str] | None, shared("--set", "batch=32:64 where nothing says the recorded one")] = None,
    code: Annotated[str | None, shared("--code")] = None,
    selected: Annotated[float | None, shared("--selected", "by default as recorded")] = None,
    also: Annotated[list[str] | None, shared("--also")] = None,
    step: Step = None,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    json: Json = False,
    **edits: Any,
) -> None:
    """Export a job for Perfetto, Chakra, TensorBoard, or as tables.

    Without edits: the measured job and its replay. With edits as in predict: the predicted step, in its steady state.
    foretrace export runs/a -o a.pftrace; foretrace export runs/a --device h200-sxm -o a.et
    """
    chosen = exports_export.format_of(out, format)
    wanted = request_study.Configuration(
        device=device, parallel=parallel, topology=topology, from_topology=from_topology,
        comm_profile=comm_profile, comm_backend=comm_backend, host_from=host_from, sizes=tuple(sizes or ()),
        also=tuple(also or ()), code=code, selected=selected, edits=chosen_edits(edits))
    script = source[0] if request_study.is_script(source, step_region) else None
    job = read(source, window, step_region=step_region, cycle=cycle) if script is None else None
    ran = job is not None and not any(graph.meta.era == tracer_graph.SHAPE_ONLY for graph in job.graphs)
    prepared: request_study.Prepared | None = None
    if predicted or not ran or wanted != request_study.Configuration():
        with working("Preparing"):
            study = request_study.Study(job, step, recorded_on=None if from_device is None
                                        else known_devices.find_device(from_device),
                                        profiles=loaded_profiles(profile), code=script, device=device,
                                        read=partial(read, step_region=step_region, cycle=cycle))
            study.check_profiles([wanted])
            prepared = study.prepared(wanted)
    with working("Simulating"):
        made = _made(job, prepared, chosen)
    with working("Writing"):
        found = exports_export.export(made, out, format=chosen.value, table=table, at=at)
    notes = [*(job.notes if job is not None else []), *found.notes]
    if json:
        print_json({"format": found.format.value, "files": found.paths,
                    "bytes": sum(os.path.getsize(path) for path in found.paths if os.path.isfile(path)),
                    "notes": list(dict.fromkeys(notes))})
        return
    report = Report()
    for path in found.paths:
        size = f", {count(round(os.path.getsize(path) / 1e3))} kB" if os.path.isfile(path) else ""
        report.line(f"Wrote {path} ({found.format.value}{size}).")
    report.notes(notes)


def _made(job: tracer_job.Job | None, prepared: request_study.Prepared | None,
          chosen: exports_export.ExportFormat) -> object:
    """Return what to write: a simulated job, or results with tables and figures."""
    if prepared is not None:
        return prepared.start.simulated(prepared.edits) if chosen.of_job else prepared.predict()
    assert job is not None
    replayed = replay.replay(job.graphs)
    if chosen.of_job:
        return replayed
    parts = breakdown.breakdown(replay.replay(job.graphs, built=replayed.built, profiled=False))
    return parts if chosen is exports_export.ExportFormat.TENSORBOARD else {"": job, "replay": replayed,
                                                                            "breakdown": parts}


@in_one_sentence
def convert(
    paths: Paths,
    out: Annotated[str, shared(
        "--out", "a file, named *.foretrace by convention", short="-o")],
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    workers: Workers = "local",
    json: Json = False,
) -> None:
    """Convert traces to one file, which every command reads.

    The file is Parquet tables and a JSON manifest, smaller than the traces and many times faster to read.
    """
    check_output(out, paths, GRAPH)
    # As recorded, unless requested otherwise: readers of the file find the cycles of its loop, or take each step.
    job = read(paths, window, workers, step_region=step_region, cycle=cycle or 1)
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
