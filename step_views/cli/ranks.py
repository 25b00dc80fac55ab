"""``foretrace ranks``: the ranks of a job next to each other, and the critical path across them."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from graph_predictor.figures import count, milliseconds, percent
from graph_predictor.prediction import result
from graph_predictor.recorded import facts
from graph_predictor.recorded import facts as damage
from graph_predictor.request import study as request_study
from step_views.cli.console import Column, Report, print_json, read, working
from step_views.cli.options import (
    Cycle,
    Html,
    Json,
    Profiled,
    Step,
    StepRegion,
    Top,
    Window,
    check_html,
    in_one_sentence,
    shared,
    write_html,
)
from step_views.pages import overview
from step_views.reports import timeline as reports_timeline
from step_views.reports.ranks import report as ranks_report
from step_views.reports.ranks import stragglers
from step_views.reports.ranks import times as ranks_times
from tracer import graph as tracer_graph
from tracer.errors import ForetraceError
from tracer.output_kind import TIMELINE, check_output


@in_one_sentence
def ranks(
    source: Annotated[list[str], typer.Argument(
        metavar="SOURCE", help="A job's ranks: traces, a directory or glob; or one step with --parallel.")],
    parallel: Annotated[str | None, shared("--parallel", "predicted")] = None,
    device: Annotated[str | None, shared("--device", "predicted")] = None,
    topology: Annotated[str | None, shared("--topology", "predicted")] = None,
    comm_profile: Annotated[str | None, shared("--comm-profile", "predicted")] = None,
    comm_backend: Annotated[str | None, shared("--comm-backend", "predicted")] = None,
    comm_choices: Annotated[str | None, shared("--comm-choices", "predicted")] = None,
    straggler: Annotated[str | None, shared("--straggler", "predicted")] = None,
    host_from: Annotated[str | None, shared("--host-from", "predicted")] = None,
    sizes: Annotated[list[str] | None, shared("--set", "predicted")] = None,
    selected: Annotated[float | None, shared("--selected")] = None,
    step: Step = None,
    timeline: Annotated[str | None, shared("--timeline", "tracks of ranks and groups")] = None,
    html: Html = None,
    top: Top = None,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    profiled: Profiled = False,
    json: Json = False,
) -> None:
    """Compare the ranks of a job: waiting, stragglers, bubbles, and the path across them.

    foretrace ranks dlrm-8xV100/ --timeline ranks.json.gz
    """
    check_html(html, source)
    if timeline is not None:
        check_output(timeline, source, TIMELINE)
    wanted = request_study.Configuration(
        device=device, parallel=parallel, topology=topology, comm_profile=comm_profile, comm_backend=comm_backend,
        comm_choices=comm_choices, host_from=host_from, sizes=tuple(sizes or ()), selected=selected,
        edits={} if straggler is None else {"straggler": straggler})
    times, notes = _times(source, window, step_region, cycle, wanted, step, profiled)
    with working("Comparing"):
        found = ranks_report.rank_report(times)
    found.notes[:0] = notes
    if timeline is not None:
        reports_timeline.write_events(ranks_report.rank_events(found), timeline)
    if html is not None:
        write_html(html, source, lambda where: overview.ranks_page(found, where))
    if json:
        print_json({**found.to_json(top), "timeline": timeline})
    else:
        _report(found, top or 20, timeline)


def _times(source: list[str], window: int, step_region: str | None, cycle: int | None,
           wanted: request_study.Configuration, step: str | None, profiled: bool) -> tuple[
               ranks_times.JobTimes, list[str]]:
    """Return the times of the simulated job, and the notes from reading it."""
    script = source[0] if request_study.is_script(source, step_region) else None
    reader = partial(read, step_region=step_region, cycle=cycle)
    with working("Reading" if script is None else "Tracing"):
        job = request_study.read_source(source, window, wanted.device, selected=wanted.selected, read=reader)
    notes = damage.folded_notes(job)

    if not wanted.differences() and all(graph.meta.era != tracer_graph.SHAPE_ONLY for graph in job.graphs):
        with working("Replaying"):
            found, said = ranks_report.replayed_ranks(job, step, profiled=profiled)
            return found, [*job.notes, *notes, *said]
    if step is not None:
        raise ForetraceError("--step chooses a recorded step; a predicted job has one step, its steady "
                             "state. Leave --step, or "
                             "the changes, out.")
    with working("Predicting"):
        study = request_study.Study(job, code=script, profiled=profiled, read=reader)
        prepared = study.prepared(wanted)
        times = ranks_times.predicted_times(prepared.start.simulated(prepared.edits))
        return times, [] if wanted.parallel is not None else notes


def _report(found: ranks_report.JobReport, top: int, timeline: str | None) -> None:
    report = Report()
    steps, name = found.steps, "step" if found.times.predicted else "replayed"
    report.line()
    which = result.which_times(found.times.profiled, ran=found.times.ran)
    if found.times.recorded is not None:
        report.line(facts.recorded_line(found.times.recorded), style="bold")
    if found.times.predicted:
        what = "; ".join(found.times.edits) or ("predicted" if found.times.ran else "as traced")
        report.line(facts.step_line(which, found.step_ns / 1e3, what=what, cycle=1 if found.times.recorded is None
                                    else found.times.recorded.cycle), style="bold")
    else:
        mean = f", mean of {count(steps)} steps" if steps > 1 else ""
        report.line(f"Replayed {which}: {milliseconds(found.step_ns)} ms, the longest of {count(len(found.ranks))} "
                    f"ranks in each step{mean}")
    report.line("Largest over mean of the ranks: " + ", ".join(
        f"{name} {share:.3f}" for name, share in found.imbalance.items()) + " (own: busy and idle).")
    if not found.shows_meetings:
        report.table("By rank, ms a step", [Column("rank"), Column(name), Column("begins\nlater by")], (
            [str(r.rank), milliseconds(r.step_ns / steps), milliseconds(r.late_ns / steps)] for r in found.ranks))
        _path(report, found, top)
        _end(report, found, timeline)
        return
    bubbles, late = any(r.bubble_ns for r in found.ranks), any(r.late_ns for r in found.ranks)
    report.table(
        "By rank, ms a step; busy to idle add up to the step",
        [Column("rank"), Column(name), Column("busy"), Column("exposed\ncomm."), Column("waiting\nfor ranks"),
         *([Column("bubble")] if bubbles else []), Column("idle"), Column("overlapped\ncomm."),
         *([Column("begins\nlater by")] if late else [])],
        ([str(r.rank), *(milliseconds(ns / steps) for ns in (r.step_ns, r.busy_ns, r.exposed_ns, r.waiting_ns,
                                                             *([r.bubble_ns] if bubbles else []), r.idle_ns,
                                                             r.overlapped_ns, *([r.late_ns] if late else [])))]
         for r in found.ranks))
    late_ranks = sorted((r for r in found.ranks if r.arrivals.last), key=lambda r: -r.arrivals.held_ns)
    report.table(
        "Who arrives last at collectives (ms a step; job: its step if the rank had the median's work)",
        [Column("rank"), Column("last"), Column("of"), Column("behind the\nlast but one"),
         Column("others waited,\nall together"), Column("job like\nmedian"), Column("gain")],
        ([str(r.rank), count(r.arrivals.last / steps), count(r.arrivals.met / steps),
          milliseconds(r.arrivals.held_ns / steps), milliseconds(r.arrivals.others_waited_ns / steps),
          "–" if r.like_median_ns is None else milliseconds(r.like_median_ns),
          percent(None if r.like_median_ns is None else 1 - r.like_median_ns / found.step_ns)] for r in late_ranks))
    if len(found.ranks) > 1:
        report.line()
        report.line(_late(found))
    _groups(report, found)
    _path(report, found, top)
    _end(report, found, timeline)


def _late(found: ranks_report.JobReport) -> str:
    """Return a sentence on the rank that is late because it computes longer, and on its operations."""
    late = found.late
    if late is None:
        return "No rank computes longer than the median one by more than steps differ."
    said = f"Rank {found.times.number(late.rank)} computes {milliseconds(late.more_ns)} ms longer than the median rank"
    once = "" if late.steps > 1 or found.times.predicted else (
        "; of one recorded step nothing shows whether it is so in others")
    if not late.operations:
        return f"{said}, spread over many operations{once}."
    return f"{said}: " + ", ".join(
        f"{name} {milliseconds(ns)} ms" for name, ns in late.operations[:4]) + f" a step{once}."


def _path(report: Report, found: ranks_report.JobReport, top: int) -> None:
    total = sum(s.length_ns for s in found.path) or 1
    report.table(
        f"Path across ranks ({found.path_step}): {min(top, len(found.path)):,} of {len(found.path):,} "
        "stretches in order",
        [Column("rank"), Column("from ms"), Column("ms"), Column("share"), Column("takes over at", name=True),
         Column("mostly", name=True)],
        ([str(found.times.number(s.rank)), milliseconds(s.start_ns), milliseconds(s.length_ns),
          percent(s.length_ns / total), s.after, _mostly(s)] for s in found.path[:top]))


def _end(report: Report, found: ranks_report.JobReport, timeline: str | None) -> None:
    report.notes(found.notes)
    report.timeline(timeline)


def _groups(report: Report, found: ranks_report.JobReport) -> None:
    steps = found.steps
    rows = []
    for row in found.groups:
        waited = ranks_report.waiting_ns(row, None)
        last = row.straggler if row.skew_ns and max(row.skew_ns) > stragglers.TOGETHER_NS else None
        rows.append([row.group, row.kind, count(row.ranks), count(row.count / steps / row.recorded),
                     milliseconds(row.transfer_ns / steps) if row.matched else "–",
                     "–" if waited is None else milliseconds(waited * 1e3 / steps),
                     milliseconds(row.exposed_ns / steps), milliseconds((row.kernel_ns - row.exposed_ns) / steps),
                     f"{last[0]} ({percent(last[1], 0)})" if last else "–"])
    report.table("By process group and kind, ms a step (means over its ranks)",
                 [Column("group", name=True), Column("kind", name=True), Column("ranks"), Column("calls"),
                  Column("transfer"), Column("waiting"), Column("exposed"), Column("overlapped"), Column("last\nrank")],
                 rows)


def _mostly(stretch: stragglers.Stretch) -> str:
    return "; ".join(f"{p.bound.label} {milliseconds(p.time_ns)} {p.operation}" for p in stretch.parts[:2])
