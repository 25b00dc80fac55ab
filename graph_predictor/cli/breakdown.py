"""``foretrace breakdown``: where the time of the steps goes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from graph_predictor.cli.console import Column, Report, count, microseconds, milliseconds, percent, print_json, read
from graph_predictor.cli.errors import one_sentence
from graph_predictor.cli.html import Html, check_html, write_html
from graph_predictor.cli.options import Debug, Json, Paths, Profiled, Scheduler, Step, Top, Window, Workers

if TYPE_CHECKING:
    from graph_predictor.reports.breakdown import Breakdown, ModuleTime, OperationTime, StepBreakdown
    from graph_predictor.simulation.critical_path import Bound

DEFAULT_TOP = 10


def breakdown(
    paths: Paths,
    step: Step = None,
    top: Top = None,
    window: Window = 0,
    profiled: Profiled = False,
    workers: Workers = "local",
    scheduler: Scheduler = None,
    html: Html = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show where the time of the steps goes.

    By bound, along the critical path, by operation, by module (where the trace names them) and by kernel.
    """
    with one_sentence(debug):
        # The submodules' functions, not the modules of the same names.
        from graph_predictor.prediction.replay import replay
        from graph_predictor.recorded.damage import folded_notes
        from graph_predictor.reports.breakdown import breakdown as break_down

        check_html(html, paths)
        job = read(paths, window, workers, scheduler)
        found = replay(job.graphs, profiled=profiled)
        result = break_down(found, step=step)
        result.notes = [*job.notes, *folded_notes(job), *result.notes]
        if html is not None:
            from graph_predictor.pages.recording import breakdown_page

            write_html(html, paths, lambda where: breakdown_page(job, found, result, where, step=step,
                                                                 profiled=profiled))
        if json:
            print_json(result.to_json(top))
        else:
            _report(result, top or DEFAULT_TOP)


def _report(result: Breakdown, top: int) -> None:
    from graph_predictor.prediction.result import which_times

    report = Report()
    typical = result.typical
    total, steps = result.total(), max(len(typical), 1)
    bounds = [bound for bound, ns in total.bounds.items() if ns]
    rows = [[str(s.rank) if s.rank >= 0 else "–", s.name, milliseconds(s.simulated_ns),
             *(milliseconds(s.totals.bounds[b]) for b in bounds)] for s in result.steps]
    report.line()
    ranks = len({step.rank for step in typical})
    report.line(f"Step {which_times(result.profiled)}: {milliseconds(result.step_ns)} ms"
                + (f", mean of {count(steps // ranks)} steps" if steps > ranks else "")
                + (f" of the slowest of {count(ranks)} ranks" if ranks > 1 else ""), style="bold")
    if len(result.steps) > 1:
        time = sum(s.simulated_ns for s in typical)
        rows += [["mean", "", milliseconds(time / steps), *(milliseconds(total.bounds[b] / steps) for b in bounds)],
                 ["share", "", percent(1.0), *(percent(total.bounds[b] / time if time else 0.0) for b in bounds)]]
    report.table(f"Time by bound, ms of each step {which_times(result.profiled)} (critical path)",
                 [Column("rank"), Column("step", name=True), Column("time"),
                  *(Column(_heading(b)) for b in bounds)], rows)
    report.line()
    report.line(f"Decided by: {_decided_by(result.steps)}")
    each = "ms" if len(result.steps) == 1 else f"ms a step, mean of {count(steps)} (all ranks)"

    time = sum(total.bounds.values())
    modules = any(e.module for e in total.path)
    report.table(
        f"Critical path: largest of {count(len(total.path))} entries, {each}",
        [Column("operation", name=True), *([Column("module", name=True, path=True)] if modules else []),
         Column("bound", name=True), Column("ms"), Column("share")],
        ([e.operation, *([e.module] if modules else []), e.bound.label, milliseconds(e.time_ns / steps),
          percent(e.time_ns / time if time else 0.0)] for e in total.path[:top]))
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


def _decided_by(steps: list[StepBreakdown]) -> str:
    """Return what decides the steps, and how many of them where it is not one for all."""
    counts = Counter(step.bound for step in steps)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({count(number)} of {count(len(steps))} steps)" for name, number in counts.most_common())


def _heading(bound: Bound) -> str:
    """A bound's name in two short lines."""
    return bound.label.replace("communication", "comm.").replace(" ", "\n", 1)


def _host_columns(title: str, entries: list[OperationTime] | list[ModuleTime]) -> list[Column]:
    """Waiting and the GPU get a column where there is any."""
    return [Column(title, name=True, path=title == "module"), Column("calls"), Column("host"),
            *([Column("waiting")] if any(e.waiting_ns for e in entries) else []),
            *([Column("GPU")] if any(e.gpu_ns for e in entries) else [])]


def _host_row(name: str, entry: OperationTime | ModuleTime, steps: int,
              entries: list[OperationTime] | list[ModuleTime]) -> list[str]:
    return [name, count(entry.calls / steps), milliseconds(entry.host_ns / steps),
            *([milliseconds(entry.waiting_ns / steps)] if any(e.waiting_ns for e in entries) else []),
            *([milliseconds(entry.gpu_ns / steps)] if any(e.gpu_ns for e in entries) else [])]
