"""``foretrace memory``: what the device's memory held over a step, measured and predicted."""

from __future__ import annotations

from typing import Annotated

import typer

from graph_predictor.cli.console import Column, Report, print_json, read, working
from graph_predictor.cli.options import Json, StepRegion, Top, Window, in_one_sentence, shared
from graph_predictor.figures import percent
from graph_predictor.request import program_memory, study
from tracer import device_memory, memory_snapshot
from tracer import graph as tracer_graph
from tracer.errors import ForetraceError

SNAPSHOTS = (".pickle", ".pkl", ".p")
DEFAULT_TOP = 12


@in_one_sentence
def memory(
    source: Annotated[list[str], typer.Argument(
        metavar="SOURCE", help="A trace with memory, a capture, SCRIPT.py:FUNCTION, or a snapshot of "
                               "torch.cuda.memory._dump_snapshot (.pickle).")],
    code: Annotated[str | None, shared("--code", "for the prediction beside what was measured")] = None,
    sizes: Annotated[list[str] | None, shared("--set", "of the prediction")] = None,
    device: Annotated[str | None, shared("--device", "that the prediction is for; by default the recorded one")] = None,
    gpu: Annotated[int | None, typer.Option(
        "--memory-of", metavar="N", help="Number of the device in the recording; -1 is the host's memory.")] = None,
    top: Top = None,
    window: Window = 0,
    step_region: StepRegion = None,
    json: Json = False,
) -> None:
    """Show what memory held at its fullest: by kind, by module, measured beside predicted.

    A snapshot is read as plain values: nothing in it is run. foretrace memory snapshot.pickle --code train.py:build
    """
    measured: device_memory.MemoryTimeline | None = None
    predicted: device_memory.MemoryTimeline | None = None
    graph: tracer_graph.ExecutionGraph | None = None
    if len(source) == 1 and source[0].lower().endswith(SNAPSHOTS):
        with working("Reading"):
            measured = memory_snapshot.snapshot_timeline(source[0], gpu)
    elif study.is_script(source, step_region):
        code = source[0]
    else:
        graph = read(source, window, step_region=step_region).graphs[0]
        if len(graph.allocations):
            found = device_memory.memory_timeline(graph, gpu)
            measured, predicted = (None, found) if not found.inferred else (found, None)
    if predicted is None and (code is not None or (graph is not None and graph.meta.workload)):
        with working("Tracing"):
            predicted = program_memory.program_memory(graph, code, sizes or (), device)
    if measured is None and predicted is None:
        assert graph is not None
        device_memory.memory_timeline(graph, gpu)
        raise ForetraceError("Nothing is known of the step's memory.")
    if json:
        print_json({"measured": None if measured is None else measured.to_json(),
                    "predicted": None if predicted is None else predicted.to_json()})
    else:
        _report(measured, predicted, top or DEFAULT_TOP)


def _report(measured: device_memory.MemoryTimeline | None, predicted: device_memory.MemoryTimeline
            | None, top: int) -> None:
    report = Report()
    known = [(name, one) for name, one in (("measured", measured), ("predicted", predicted)) if one is not None]
    report.line()
    for name, one in known:
        report.line(f"Peak {name} ({one.source}): {device_memory.binary_size(one.peak_bytes)}", style="bold")
    parts = [one.at_peak.parts for _, one in known]
    holds = list(dict.fromkeys(name for each in parts for name in each))
    report.table("At the peak, by what it holds", [Column("holds", name=True), *(Column(name) for name, _ in known)],
                 ([name.replace("_", " "), *(device_memory.binary_size(each.get(name, 0)) for each in parts)]
                  for name in holds))
    for name, one in known:
        places = list(one.places.items())
        if places:
            report.table(f"At the peak, by who allocated it: largest of {len(places)} ({name})",
                         [Column("place", name=True), Column("bytes"), Column("share")],
                         ([place, device_memory.binary_size(size), percent(size / max(one.peak_bytes, 1))]
                          for place, size in places[:top]))
    notes = [note for _, one in known for note in one.notes]
    if measured is not None and measured.inferred:
        notes.append("What measured memory holds is inferred from the phases it was handed out and given back in.")
    report.notes(notes)
