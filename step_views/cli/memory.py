"""``foretrace memory`` and ``foretrace fit-batch``: contents of a device's memory, and the largest batch that fits."""

from __future__ import annotations

from typing import Annotated

import typer

from graph_predictor.comm import traffic
from graph_predictor.figures import percent
from graph_predictor.request import memory_fit, program_memory, study
from kernel_models import device as known_devices
from step_views.cli.console import Column, Report, print_json, read, working
from step_views.cli.options import Cycle, Json, StepRegion, Top, Window, in_one_sentence, shared
from tracer import device_memory, memory_snapshot
from tracer import graph as tracer_graph
from tracer.errors import ForetraceError

SNAPSHOTS = (".pickle", ".pkl", ".p")


@in_one_sentence
def memory(
    source: Annotated[list[str], typer.Argument(
        metavar="SOURCE", help="A trace with memory, a capture, SCRIPT.py:FUNCTION, or a snapshot of "
                               "torch.cuda.memory._dump_snapshot (.pickle).")],
    code: Annotated[str | None, shared("--code", "for the prediction beside what was measured")] = None,
    selected: Annotated[float | None, shared("--selected")] = None,
    sizes: Annotated[list[str] | None, shared("--set", "of the prediction")] = None,
    device: Annotated[str | None, shared("--device", "that the prediction is for; by default the recorded one")] = None,
    gpu: Annotated[int | None, typer.Option(
        "--memory-of", metavar="N", help="Number of the device in the recording; -1 is the host's memory.")] = None,
    top: Top = None,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    json: Json = False,
) -> None:
    """Show what memory held at its fullest: by kind, by module, measured next to predicted.

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
        graph = read(source, window, step_region=step_region, cycle=cycle).graphs[0]
        if len(graph.allocations):
            found = device_memory.memory_timeline(graph, gpu)
            measured, predicted = (None, found) if not found.inferred else (found, None)
    if predicted is None and (code is not None or (graph is not None and graph.meta.workload)):
        with working("Tracing"):
            predicted = program_memory.program_memory(graph, code, sizes or (), device, selected)
    if measured is None and predicted is None:
        assert graph is not None
        device_memory.memory_timeline(graph, gpu)
        raise ForetraceError("Nothing is known of the step's memory.")
    if json:
        print_json({"measured": None if measured is None else measured.to_json(),
                    "predicted": None if predicted is None else predicted.to_json()})
    else:
        _report(measured, predicted, top or 12)


def _report(measured: device_memory.MemoryTimeline | None, predicted: device_memory.MemoryTimeline
            | None, top: int) -> None:
    report = Report()
    known = [(name, one) for name, one in (("measured", measured), ("predicted", predicted)) if one is not None]
    report.line()
    for name, one in known:
        lacks = ", without what was there before the window" * one.lacks_earlier
        report.line(f"Peak {name} ({one.source}): {device_memory.binary_size(one.peak_bytes)}{lacks}", style="bold")
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


@in_one_sentence
def fit_batch(
    source: Annotated[list[str], typer.Argument(
        metavar="SOURCE", help="A program, SCRIPT.py:FUNCTION; or a capture of it or of a workload of the suite.")],
    device: Annotated[str, shared("--device", "whose memory is to be filled")],
    size: Annotated[str, typer.Option("--size", metavar="NAME", help="The size that is sought.")] = "batch",
    sizes: Annotated[list[str] | None, shared("--set", "which stays as it is said")] = None,
    code: Annotated[str | None, shared("--code")] = None,
    selected: Annotated[float | None, shared("--selected")] = None,
    memory_limit: Annotated[str | None, shared("--memory-limit")] = None,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    json: Json = False,
) -> None:
    """Find the largest batch (or other size) that fits a device's memory.

    foretrace fit-batch train.py:build --device h100-sxm --set seq=2048

    The program is traced by shapes at a few sizes: FUNCTION takes the size by name, as in def build(batch=32).
    """
    limit = None if memory_limit is None else traffic.parse_memory(memory_limit, "--memory-limit", "80GiB")
    spec = known_devices.find_device(device)
    script = study.is_script(source, step_region)
    graph = None if script else read(source, window, step_region=step_region, cycle=cycle).graphs[0]
    with working("Tracing"):
        found = program_memory.fit_batch(graph, spec, name=size, code=source[0] if script else code, sizes=sizes
                                            or (), limit_bytes=limit, selected=selected)
    if json:
        print_json(found.to_json())
        return
    report = Report()
    report.line()
    report.line(f"{found.headline()[:1].upper()}{found.headline()[1:]}", style="bold")
    if text := program_memory.said_sizes(found):
        report.line(text)
    report.table("Sizes that were traced", [Column(size), Column("expected"), Column("at least"), Column("at most"),
                                            Column("", name=True)],
                 ([f"{at:,}", device_memory.binary_size(memory.account.total),
                   device_memory.binary_size(memory.low), device_memory.binary_size(memory.high),
                   memory_fit.fit_of(memory, found.limit_bytes).value] for at, memory in found.tried.items()))
    report.notes(["Nothing was run: the peak is that of the program's storages, rounded as none are; contexts and "
                  "fragmentation beside it are assumed (docs/memory.md)."])
