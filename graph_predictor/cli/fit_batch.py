"""``foretrace fit-batch``: the largest batch that fits a device."""

from __future__ import annotations

from typing import Annotated

import typer

from graph_predictor.cli.console import Column, Report, print_json, read, working
from graph_predictor.cli.options import Json, StepRegion, Window, in_one_sentence, shared
from graph_predictor.comm import traffic
from graph_predictor.request import memory_fit, program_memory, study
from kernel_models import device_choice
from tracer import device_memory


@in_one_sentence
def fit_batch(
    source: Annotated[list[str], typer.Argument(
        metavar="SOURCE", help="A program, SCRIPT.py:FUNCTION; or a capture of it or of a workload of the suite.")],
    device: Annotated[str, shared("--device", "whose memory is to be filled")],
    size: Annotated[str, typer.Option("--size", metavar="NAME", help="The size that is sought.")] = "batch",
    sizes: Annotated[list[str] | None, shared("--set", "which stays as it is said")] = None,
    code: Annotated[str | None, shared("--code")] = None,
    memory_limit: Annotated[str | None, shared("--memory-limit")] = None,
    window: Window = 0,
    step_region: StepRegion = None,
    json: Json = False,
) -> None:
    """Find the largest batch (or other size) that fits a device's memory.

    foretrace fit-batch train.py:build --device h100-sxm --set seq=2048

    The program is traced by shapes at a few sizes: FUNCTION takes the size by name, as in def build(batch=32).
    """
    limit = None if memory_limit is None else traffic.parse_memory(memory_limit, "--memory-limit", "80GiB")
    spec = device_choice.find_device(device)
    script = study.is_script(source, step_region)
    graph = None if script else read(source, window, step_region=step_region).graphs[0]
    with working("Tracing"):
        found = program_memory.fit_batch(graph, spec, name=size, code=source[0] if script else code, sizes=sizes
                                            or (), limit_bytes=limit)
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

