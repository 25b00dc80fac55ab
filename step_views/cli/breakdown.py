"""``foretrace breakdown``: where the time of the steps goes."""

from __future__ import annotations

from typing import Annotated

import typer

from graph_predictor.figures import count, microseconds, milliseconds, percent
from graph_predictor.prediction import replay
from graph_predictor.prediction import result as prediction_result
from graph_predictor.recorded import facts
from graph_predictor.recorded import facts as damage
from graph_predictor.simulation import engine
from step_views.cli.console import Column, Report, print_json, read
from step_views.cli.options import (
    Cycle,
    Html,
    Json,
    Paths,
    Profiled,
    Step,
    StepRegion,
    Top,
    Window,
    Workers,
    check_html,
    in_one_sentence,
    write_html,
)
from step_views.pages import overview
from step_views.reports import breakdown as reports_breakdown


@in_one_sentence
def breakdown(
    paths: Paths,
    step: Step = None,
    spans: Annotated[bool, typer.Option(
        "--spans", help="Also show each recorded step's own span by bound.")] = False,
    top: Top = None,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    profiled: Profiled = False,
    workers: Workers = "local",
    html: Html = None,
    json: Json = False,
) -> None:
    """Show where the time of the steps goes.

    Along the critical path of the steady state, by operation, by module (where the trace names them) and by kernel.
    """
    check_html(html, paths)
    job = read(paths, window, workers, step_region=step_region, cycle=cycle)
    found = replay.replay(job.graphs, profiled=profiled)
    result = reports_breakdown.breakdown(found, step=step, spans=spans or json or html is not None)
    result.notes = [*job.notes, *damage.folded_notes(job), *result.notes]
    if html is not None:
        write_html(html, paths, lambda where: overview.breakdown_page(job, found, result, where, step=step,
                                                                      profiled=profiled))
    if json:
        print_json(result.to_json(top))
    else:
        _report(result, top or 10, spans)


def _report(result: reports_breakdown.Breakdown, top: int, spans: bool) -> None:
    report = Report()
    total, steps = result.total(), max(len(result.counted), 1)
    report.line()
    if result.recorded is not None:
        report.line(facts.recorded_line(result.recorded), style="bold")
    if result.steady is not None:
        report.line(facts.step_line(prediction_result.which_times(result.profiled), result.step_ns / 1e3,
                                    what="steady state", cycle=1 if result.recorded is None else result.recorded.cycle),
                    style="bold")
    else:
        longest = max(result.steps, key=lambda step: step.measured_ns)
        report.line(f"Recorded {longest.name}: {milliseconds(longest.measured_ns)} ms under the profiler; replayed "
                    f"{prediction_result.which_times(result.profiled)} {milliseconds(result.step_ns)} ms", style="bold")
    report.line(facts.decided_line(None if result.steady is None else result.steady.gpu_active_us, result.bound))
    path = sum(result.bounds_us.values()) or 1.0
    report.table("Critical path by bound", [Column("bound", name=True), Column("ms"), Column("share")],
                 ([name, milliseconds(us * 1e3), percent(us / path)] for name, us in result.bounds_us.items() if us))
    report.table(f"Critical path: largest of {count(len(result.critical_path))} entries",
                 [Column("operation", name=True), Column("bound", name=True), Column("ms"), Column("share")],
                 ([e.operation, e.bound, milliseconds(e.time_us * 1e3), percent(e.share)]
                  for e in result.critical_path[:top]))
    if len(result.steps) > 1:
        report.table("Recorded steps, ms under the profiler",
                     [Column("rank"), Column("step", name=True), Column("recorded"), Column("counts", name=True)],
                     ([str(s.rank) if s.rank >= 0 else "–", s.name, milliseconds(s.measured_ns),
                       f"no: {s.why_not}" if s.why_not else "yes"] for s in result.steps))
    if spans:
        _spans(report, result)
    each = "ms" if len(result.steps) == 1 else f"ms a step, mean of {count(steps)} (all ranks)"

    report.table(f"By operation: largest of {count(len(total.operations))}, {each}; host time is its own, without "
                 "waiting", _host_columns("operation", total.operations),
                 (_host_row(e.operation, e, steps, total.operations) for e in total.operations[:top]))
    if any(e.module for e in total.modules):
        report.table(f"By module: largest of {count(len(total.modules))}, {each}",
                     _host_columns("module", total.modules),
                     (_host_row(e.module or "no module", e, steps, total.modules) for e in total.modules[:top]))
    report.table(f"By kernel: largest of {count(len(total.kernels))}, {each}; share of the GPU's time",
                 [Column("kernel", name=True), Column("count"), Column("ms"), Column("mean µs"), Column("share")],
                 ([e.kernel, count(e.count / steps), milliseconds(e.total_ns / steps), microseconds(e.mean_ns),
                   percent(e.share)] for e in total.kernels[:top]))
    report.notes(result.notes)


def _spans(report: Report, result: reports_breakdown.Breakdown) -> None:
    """Report every step's own span by bound: along its host's thread, or its device's if the device falls behind."""
    bounds = [bound for bound, ns in result.total().bounds.items() if ns]
    report.table("Span of each recorded step by bound, ms as replayed",
                 [Column("rank"), Column("step", name=True), Column("span"), *(Column(_heading(b)) for b in bounds)],
                 ([str(s.rank) if s.rank >= 0 else "–", s.name, milliseconds(s.simulated_ns),
                   *(milliseconds(s.totals.bounds[b]) for b in bounds)] for s in result.steps))


def _heading(bound: engine.Bound) -> str:
    """Return a bound's name in two short lines."""
    return bound.label.replace("communication", "comm.").replace(" ", "\n", 1)


def _host_columns(title: str, entries: list[reports_breakdown.OperationTime]
                  | list[reports_breakdown.ModuleTime]) -> list[Column]:
    """Return the table's columns. Waiting and GPU time have a column only if some entry has such time."""
    return [Column(title, name=True, path=title == "module"), Column("calls"), Column("host"),
            *([Column("waiting")] if any(e.waiting_ns for e in entries) else []),
            *([Column("GPU")] if any(e.gpu_ns for e in entries) else [])]


def _host_row(name: str, entry: reports_breakdown.OperationTime | reports_breakdown.ModuleTime, steps: int,
              entries: list[reports_breakdown.OperationTime] | list[reports_breakdown.ModuleTime]) -> list[str]:
    return [name, count(entry.calls / steps), milliseconds(entry.host_ns / steps),
            *([milliseconds(entry.waiting_ns / steps)] if any(e.waiting_ns for e in entries) else []),
            *([milliseconds(entry.gpu_ns / steps)] if any(e.gpu_ns for e in entries) else [])]
