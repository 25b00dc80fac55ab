"""``foretrace replay``: measured and replayed time of every step."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from graph_predictor.figures import count, microseconds, milliseconds, percent, signed_percent
from graph_predictor.prediction import replay as prediction_replay
from graph_predictor.recorded import facts
from graph_predictor.recorded import facts as damage
from graph_predictor.recorded import facts as reports_facts
from graph_predictor.simulation import build
from step_views.cli.console import Column, Report, print_json, read, working
from step_views.cli.options import (
    Cycle,
    Json,
    Paths,
    StepRegion,
    Window,
    Workers,
    in_one_sentence,
    shared,
)
from step_views.reports import timeline as reports_timeline
from tracer import graph
from tracer.lazy import numpy as np
from tracer.output_kind import TIMELINE, check_output


@in_one_sentence
def replay(
    paths: Paths,
    timeline: Annotated[str | None, shared("--timeline", "measured and replayed")] = None,
    residuals: Annotated[bool, typer.Option(
        "--residuals", help="Add each event's own residual: an exact playback, not a test of the model.")] = False,
    scale_kernels: Annotated[float, typer.Option(
        metavar="FACTOR", help="What if kernels took FACTOR times as long (collectives excepted).")] = 1.0,
    constants: Annotated[bool, typer.Option("--constants", help="Show the constants that were fitted.")] = False,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    workers: Workers = "local",
    json: Json = False,
) -> None:
    """Replay the steps and compare with what was measured.

    Waiting is never a stored duration: it comes back only from the dependencies. Launch latencies and kernel gaps
    are a few constants a trace.
    """
    if timeline is not None:
        check_output(timeline, paths, TIMELINE)
    job = read(paths, window, workers, step_region=step_region, cycle=cycle)
    with working("Replaying"):
        result = prediction_replay.replay(job.graphs, residuals=residuals, scale_kernels=scale_kernels)
    recorded = facts.recorded_facts(job.graphs)
    notes = [*job.notes, *damage.folded_notes(job), *_notes(result, residuals, scale_kernels), *result.notes]
    if timeline is not None:
        with working("Writing the timeline"):
            reports_timeline.write_timeline(result, timeline)
    if json:
        print_json({"recorded": None if recorded is None else recorded.to_json(),
                    **_to_json(result, residuals, scale_kernels, notes, timeline, constants)})
    else:
        _report(result, recorded, residuals, scale_kernels, notes, timeline, constants)


def kernel_end_p95_share(result: prediction_replay.Replay, scale_kernels: float) -> float | None:
    """Return the 95th percentile of the kernels' absolute errors at their ends, as a share of the median measured step;
    ``None`` if kernels are scaled."""
    errors = result.kernel_end_errors_ns()
    step = float(np.median([s.measured_ns for s in result.steps])) if result.steps else 0.0
    if scale_kernels != 1.0 or not len(errors) or step <= 0:
        return None
    return float(np.percentile(np.abs(errors), 95)) / step


def _notes(result: prediction_replay.Replay, residuals: bool, scale_kernels: float) -> list[str]:
    notes = []
    if not len(result.program.kernel_item):
        notes.append("The trace has no GPU work. The replay is a playback of the host's own recorded time: it closes "
                     "by construction, says nothing about a GPU, and kernel durations change nothing.")
    if not result.reproducible:
        notes.append(f"GPU timeline not reproducible: no rule explains {percent(result.unexplained_share)} of a "
                     "window, so the times of kernels, and what-ifs, are not to be trusted here.")
    if residuals:
        notes.append("With residuals the replay is a playback: its errors show that the bookkeeping is right, "
                     "nothing about the model.")
    if scale_kernels != 1.0:
        notes.append(f"What-if: kernel durations × {scale_kernels:g}, collectives as recorded. The error is the "
                     "change against the measured step.")
    return notes


def _to_json(result: prediction_replay.Replay, residuals: bool, scale_kernels: float, notes: list[str], timeline: str
             | None, constants: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "steps": [
            {"rank": s.rank, "step": s.name, "measured_us": s.measured_ns / 1e3, "replayed_us": s.replayed_ns / 1e3,
             "error": s.error, "counts": s.counts, "why_not": s.why_not or None}
            for s in result.steps],
        "times": "under the profiler",
        "median_abs_error": result.median_abs_error, "max_abs_error": result.max_abs_error,
        "inexact_steps": len(result.inexact),
        "unexplained_share": result.unexplained_share, "reproducible": result.reproducible,
        "kernel_end_p95_share": kernel_end_p95_share(result, scale_kernels), "scale_kernels": scale_kernels,
        "left_out": result.built.left_out, "residuals": residuals, "gpu_work": bool(len(result.program.kernel_item)),
        "ranks": [
            {"rank": rank, "unexplained_share": r.unexplained_share, "launch_queue_depth": r.queue_depth or None,
             "launch_queue_source": r.queue_source, "launch_queue_shared": r.queue_shared,
             "launch_queue_contradicted": r.queue_contradicted, "blocked_calls": r.blocked_calls,
             "blocked_launches": r.blocked_launches, "hand_overs": r.hand_overs, "edges": r.edges}
            for rank, r in _by_rank(result)],
        "timeline": timeline, "notes": list(dict.fromkeys(notes)),
    }
    if constants:
        values["constants"] = [
            {"rank": rank, **{name: ns / 1e3 for name, ns, _ in _constants(r)}} for rank, r in _by_rank(result)]
    return values


def _by_rank(result: prediction_replay.Replay) -> list[tuple[int, build.RankReport]]:
    return [(g.meta.rank if g.meta.rank >= 0 else i, report)
            for i, (g, report) in enumerate(zip(result.graphs, result.built.reports, strict=True))]


def _report(result: prediction_replay.Replay, recorded: facts.RecordedFacts | None, residuals: bool,
            scale_kernels: float, notes: list[str], timeline: str | None, constants: bool) -> None:

    report = Report()
    if recorded is not None:
        report.line()
        report.line(reports_facts.recorded_line(recorded), style="bold")
    mode = "with per-event residuals" if residuals else "constants mode"
    has_kernels = bool(len(result.program.kernel_item))
    what = f", kernels × {scale_kernels:g}" if scale_kernels != 1.0 else ""
    report.table(
        f"Measured and replayed steps, under the profiler ({mode}{what})",
        [Column("rank"), Column("step", name=True), Column("measured ms"), Column("replayed ms"),
         Column("change" if what else "error"), Column("counts", name=True)],
        ([str(s.rank), s.name, milliseconds(s.measured_ns), milliseconds(s.replayed_ns), signed_percent(s.error, 3),
          f"no: {s.why_not}" if s.why_not else "yes"] for s in result.steps))
    report.line()
    what = "change" if scale_kernels != 1.0 else "error"
    report.line(f"median |{what}| {percent(result.median_abs_error, 3)}, max {percent(result.max_abs_error, 3)}")
    p95 = kernel_end_p95_share(result, scale_kernels)
    if p95 is not None:
        report.line(f"kernel ends: 95% within {percent(p95, 3)} of a step of their recorded time")
    if has_kernels:
        _report_ranks(report, result)
    if constants:
        _report_constants(report, result)
    report.notes(notes)
    report.timeline(timeline)


def _report_ranks(report: Report, result: prediction_replay.Replay) -> None:
    ranks = _by_rank(result)
    if len(ranks) == 1:
        one = ranks[0][1]
        report.line(f"unexplained delay: {percent(one.unexplained_share, 3)} of the window")
        report.line(f"launch queue: {_queue(one)}; {count(one.blocked_launches)} launches and "
                    f"{count(one.blocked_calls)} other calls were blocked")
        return
    report.table(
        "By rank (unexplained delay: share of the window)",
        [Column("rank"), Column("unexplained"), Column("launch queue", name=True), Column("blocked\nlaunches"),
         Column("blocked\ncalls")],
        ([str(rank), percent(r.unexplained_share, 3), _queue(r), count(r.blocked_launches), count(r.blocked_calls)]
         for rank, r in ranks))


def _queue(rank: build.RankReport) -> str:
    if not rank.queue_depth:
        return rank.queue_source
    return f"{count(rank.queue_depth)} deep ({rank.queue_source}{', one for all streams' if rank.queue_shared else ''})"


def _report_constants(report: Report, result: prediction_replay.Replay) -> None:
    for rank, r in _by_rank(result):
        report.table(
            f"Constants of rank {rank} (n: samples they rest on; none for a default)",
            [Column("constant", name=True), Column("µs"), Column("n")],
            ([name, microseconds(ns), count(n) if n else "–"] for name, ns, n in _constants(r)))


def _constants(rank: build.RankReport) -> list[tuple[str, int, int]]:
    """Return (name, ns, samples) of every constant, including defaults without measurements."""
    c = rank.constants
    found = []
    for kind in graph.KernelKind:
        for name, values in (("latency", c.latency), ("latency_in_call", c.latency_in_call)):
            key = f"{name}/{kind.name}"
            if name == "latency" or key in c.samples:
                found.append((f"{name}/{kind.name.lower()}", int(values[kind]), c.samples.get(key, 0)))
    for before in graph.KernelKind:
        for kind in graph.KernelKind:
            for in_graph, suffix in enumerate(("", "graph")):
                key = f"gap/{before.name}/{kind.name}/{suffix}"
                if key in c.samples:
                    found.append((key.lower().rstrip("/"), int(c.gap[before, kind, in_graph]), c.samples[key]))
    for table, values_by_name in (("returns", c.returns), ("base_cost", c.base_cost)):
        found += [(f"{table}/{name}", ns, c.samples.get(f"{table}/{name}", 0)) for name, ns in values_by_name.items()]
    found.append(("queue_return", c.queue_return, c.samples.get("queue_return", 0)))
    if "staged_tail" in c.samples:
        found.append(("staged_tail", c.staged_tail, c.samples["staged_tail"]))
    return found
