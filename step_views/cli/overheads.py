"""``foretrace overheads``: the host's time by kind; for two captures, the difference between their hosts."""

from __future__ import annotations

from typing import Annotated

import typer

from graph_predictor.figures import count, microseconds, milliseconds, percent
from graph_predictor.prediction import overheads as prediction_overheads
from graph_predictor.recorded import module_paths
from kernel_models.host import overheads as host_overheads
from kernel_models.host import segments
from step_views.cli.console import Column, Report, print_json, read
from step_views.cli.options import Cycle, Json, StepRegion, Top, Window, in_one_sentence
from tracer.errors import ForetraceError

TOP_OPERATIONS = 20  # chosen: a longer table would not be read
ALL = 1_000_000  # more operations than any program has
SYMBOLS = ("T1", "T2", "T3", "T4", "T5\nbetween", "T5\nwhole")
FEW_SHARED = 30
"""With fewer operations and calls in common, a comparison of two hosts has little meaning."""


@in_one_sentence
def overheads(
    traces: Annotated[list[str], typer.Argument(
        metavar="TRACE [OTHER]",
        help="A capture, trace file or directory of ranks; a second is compared with it.")],
    top: Top = None,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    json: Json = False,
) -> None:
    """Show what the host costs each step, by kind (T1 to T5), without waiting.

    With two captures, show what differs between their hosts.
    """
    if len(traces) > 2:
        raise ForetraceError(f"{len(traces)} captures were named, and two can be compared at a time: name one or "
                             "two; ranks of one job go into one directory or a quoted glob.")
    found = [prediction_overheads.measure_overheads(read([path], window, step_region=step_region, cycle=cycle))
             for path in traces]
    ratios = prediction_overheads.compare(found[0], found[1]) if len(found) == 2 else {}
    if json:
        print_json({"captures": [{"source": path, **part.to_json(top or ALL)}
                                 for path, part in zip(traces, found, strict=True)],
                    "second_over_first": {kind.name.lower() if kind is not None else "all": {
                        "shared_operations": ratio.shared, "ratio": ratio.ratio,
                        "quartiles": [ratio.low, ratio.high]}
                        for kind, ratio in ratios.items()}})
        return
    report = Report()
    for path, part in zip(traces, found, strict=True):
        _one(report, path, part, top)
    if len(found) == 2:
        _side_by_side(report, found, top or TOP_OPERATIONS)
        _difference(report, ratios)


def _one(report: Report, path: str, found: prediction_overheads.JobOverheads, top: int | None) -> None:
    report.line(f"{path}: {milliseconds(found.host_ns)} ms of host time in a step of {milliseconds(found.step_ns)} ms "
                f"(mean of {found.steps}), without waiting.")
    if found.computation_ns:
        report.line(f"The CPU's own computation, {milliseconds(found.computation_ns)} ms a step, is not among it.")
    if found.profiler_event_ns:
        report.line(f"The profiler cost {found.profiler_event_ns / 1e3:.2f} µs for each recorded operation and call, "
                    "by the steps measured without it; that is taken out.")
    elif found.profiler_event_ns is None:
        report.line("No step was measured without the profiler: its own cost is still in these times.")
    if found.stalls[0]:
        many = "1 stall that belongs" if found.stalls[0] == 1 else f"{found.stalls[0]} stalls that belong"
        report.line(f"{many} to no operation: {milliseconds(found.stalls[1])} ms a step, left out.")
    report.table(
        "Host time by kind (one event's quantiles in µs; shares of the host time, and of the step)",
        [Column("kind", name=True), Column("events\na step"), Column("ms\na step"), Column("of\nhost"),
         Column("of\nstep"), Column("p10"), Column("p25"), Column("median"), Column("p75"), Column("p90")],
        [[row.kind.label, count(row.events), milliseconds(row.step_ns), percent(row.share),
          percent(row.step_ns / found.step_ns) if found.step_ns else "–",
          *(microseconds(q) for q in row.quantiles_ns)] for row in found.kinds])
    rows = [[row.kind.label if i == 0 else "", name or "(end of the step)", count(n), microseconds(mean),
             percent(total / (row.step_ns * found.steps))]
            for row in found.kinds if row.step_ns for i, (name, n, mean, total) in enumerate(
                found.largest(row.kind, top or 5))]
    report.table("Largest of each kind (for T1 the operation that follows; mean µs; share of the kind)",
                 [Column("kind", name=True), Column("operation or call", name=True), Column("events"),
                  Column("mean µs"), Column("share")], rows)
    _operations(report, found, top or TOP_OPERATIONS)
    constants = found.constants
    if constants.samples:
        report.line()
        report.line(f"A kernel starts {microseconds(int(constants.latency[0]))} µs after its launch returned on an "
                    f"empty stream, and {microseconds(int(constants.gap[0, 0, 0]))} µs after the kernel before it on a "
                    "busy one.")
    report.notes(found.notes)
    report.line()


def _operations(report: Report, found: prediction_overheads.JobOverheads, top: int) -> None:
    rows = [[module_paths.plain_name(row.name), milliseconds(row.step_ns), percent(row.shared_ns / row.step_ns - 1),
             *_means(row)]
            for row in found.operations(top) if row.step_ns]
    report.table("Operations that cost the host most (mean µs of one event by kind; shared: how far off a step's time "
                 "is with the mean of each kind over all operations)",
                 [Column("operation", name=True), Column("ms\na step"), Column("shared"), *map(Column, SYMBOLS)], rows)


def _side_by_side(report: Report, found: list[prediction_overheads.JobOverheads], top: int) -> None:
    """Print a table of the operations that cost the first host most, with the second host's costs next to them."""
    theirs = {row.name: row for row in found[1].operations(ALL)}
    rows = [[module_paths.plain_name(row.name), *(f"{mine} | {other}" for mine, other in zip(
        _means(row), _means(theirs[row.name]), strict=True))]
            for row in found[0].operations(ALL) if row.name in theirs][:top]
    report.table("Operations of both hosts (mean µs of one event by kind, first | second)",
                 [Column("operation", name=True), *map(Column, SYMBOLS)], rows)


def _means(row: prediction_overheads.OperationRow) -> list[str]:
    return [microseconds(row.kinds[kind].mean_ns) if kind in row.kinds else "–" for kind in row.host_kinds()]


def _difference(report: Report, ratios: dict[segments.Overhead | None, host_overheads.HostRatio]) -> None:
    if not ratios:
        report.line("The two captures have no operation in common: their hosts cannot be compared.")
        return
    report.table(
        "The second host's time over the first's, for what both did",
        [Column("kind", name=True), Column("shared"), Column("ratio"), Column("p25"), Column("p75")],
        [["all kinds" if kind is None else kind.label, count(r.shared), f"{r.ratio:.2f}", f"{r.low:.2f}",
          f"{r.high:.2f}"] for kind, r in ratios.items()])
    shared = ratios[None].shared
    if shared < FEW_SHARED:
        report.notes([f"The captures have only {shared} operations and calls in common, which is too few to tell how "
                      "fast one host is beside the other; captures of one program tell more."])
