"""``foretrace trace``: a training step traced by shapes, of a function or a workload, as a GPU would run it."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from graph_predictor.figures import count
from graph_predictor.sizes import retrace
from kernel_models import device as known_devices
from step_views.cli.console import Report, print_json, working
from step_views.cli.options import Json, in_one_sentence, shared
from step_views.reports import inspection
from tracer import graph as tracer_graph
from tracer import job as tracer_job
from tracer import shape_only, workloads
from tracer.errors import CaptureError
from tracer.lookup_data import indices as lookup_data_indices
from tracer.lookup_data import noted
from tracer.output_kind import GRAPH, check_output
from tracer.shape_only import devices
from tracer.shape_only import trace as shape_only_trace


@in_one_sentence
def trace(
    out: Annotated[str, shared(
        "--out", "a file, named *.foretrace by convention", short="-o")],
    function: Annotated[str | None, typer.Argument(
        metavar="SCRIPT.py:FUNCTION", help="A function that builds a model and returns its training step.")] = None,
    device: Annotated[str, shared("--device", "the step is traced for it")] = "h200-sxm",
    world_size: Annotated[int | None, shared("--world-size")] = None,
    rank: Annotated[int | None, shared(
        "--rank", "by default 0, and with --parallel one of each class of equal ranks")] = None,
    parallel: Annotated[str | None, shared("--parallel", "of a workload; also ddp, fsdp2, tp or pp alone")] = None,
    workload: Annotated[str | None, shared("--workload", "instead of a function")] = None,
    assignments: Annotated[list[str] | None, shared("--set")] = None,
    preset: Annotated[str, shared("--preset")] = "default",
    selected: Annotated[float | None, shared("--selected", "such steps are refused without")] = None,
    indices: Annotated[str | None, shared("--indices", "in the place of the workload's own law")] = None,
    json: Json = False,
) -> None:
    """Trace a training step by shapes alone: no GPU, no time, no memory.

    The graph has the operations the device would run, its collectives, and the step's peak memory.
    """
    if (function is None) == (workload is None):
        raise CaptureError("Name what to trace: SCRIPT.py:FUNCTION, or a workload with --workload.")
    check_output(out, [], GRAPH)
    given = None if indices is None else lookup_data_indices.read_indices(indices)
    traced_for = known_devices.shape_device(known_devices.find_device(device))
    with working("Tracing"):
        if workload is not None:
            if selected is not None:
                raise CaptureError("--selected belongs to a function: no workload selects by data.")
            job = _workload(workload, assignments or [], preset, traced_for, world_size, rank, parallel)
        else:
            if parallel:
                raise CaptureError("--parallel belongs to --workload: a function makes its own model, and wraps it "
                                   "itself (DDP, fully_shard) when --world-size is given.")
            job = tracer_job.assemble_job([_function(str(function), assignments or [], traced_for, world_size, rank
                                                     or 0,
                                           selected)])
    if given is not None:
        for graph in job.graphs:
            graph.meta.loss.notes += noted.note_indices(graph, given)
    if len(job.graphs) > 1 or job.classes:
        tracer_job.save_job(job, out)
    else:
        job.graphs[0].save(out)
    _report(job, out, json)


def _workload(name: str, assignments: list[str], preset: str, device: devices.TracedDevice, world_size: int
              | None, rank: int | None, parallel: str | None) -> tracer_job.Job:

    settings = workloads.parse(name, assignments, preset=preset)
    if world_size is not None and parallel is not None and rank is None:
        return shape_only.trace_job(settings, device, world_size=world_size, parallel=parallel)
    graph = shape_only.trace_workload(settings, device, world_size=world_size, rank=rank or 0, parallel=parallel)
    return tracer_job.assemble_job([graph])


def _function(target: str, assignments: list[str], device: devices.TracedDevice, world_size: int | None,
              rank: int, selected: float | None) -> tracer_graph.ExecutionGraph:

    _, sizes = retrace.parse_settings(assignments)  # as `foretrace predict SCRIPT.py:FUNCTION --set` reads them
    return shape_only_trace.trace_script(target, device, world_size=world_size, rank=rank, arguments=sizes,
                                         selected=selected)


def _report(job: tracer_job.Job, output: str, json: bool) -> None:
    graph = max(job.graphs, key=lambda each: each.meta.memory.get("peak", 0))
    meta = graph.meta
    ops = sum(len(each.ops) for each in job.graphs)
    collectives = sum(len(each.collectives) for each in job.graphs)
    notes = [*job.notes, *meta.loss.notes]
    size = os.path.getsize(output) if "://" not in output else None
    if json:
        values: dict[str, Any] = {
            "file": output, "bytes": size, "device": meta.device, "ranks_traced": [g.meta.rank for g in job.graphs],
            "world_size": meta.world_size if meta.world_size > 0 else None, "ops": ops, "collectives": collectives,
            "memory_bytes": meta.memory, "substitutions": meta.substitutions, "notes": notes}
        print_json(values)
        return
    report = Report()
    ranks = ", ".join(str(each.meta.rank) for each in job.graphs)
    of = f" as rank {ranks} of {count(meta.world_size)}" if meta.world_size > 0 else ""
    also = f", {count(collectives)} collectives" if collectives else ""
    report.line(f"Traced {meta.source} for {meta.device}{of}: {count(ops)} operations{also}.")
    for line in inspection.memory_lines(meta.memory):
        report.line(line, indent=2)
    if meta.substitutions:
        used = ", ".join(f"{name} {count(number)}" for name, number in meta.substitutions.items())
        report.line(f"As a GPU runs them, not the CPU: {used}", indent=2)
    report.line(f"Wrote {output}" + (f", {count(round(size / 1e3))} kB" if size else ""))
    report.notes(notes)
