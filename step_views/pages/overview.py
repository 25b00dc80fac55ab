"""The overview section: the step's time and its interval, its parts, and what was lost in reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from graph_predictor.figures import count, milliseconds, small_percent
from graph_predictor.prediction.predictor import Baseline, SimulatedStep
from graph_predictor.prediction.replay import Replay, replay
from graph_predictor.prediction.result import Prediction, which_times
from graph_predictor.recorded.facts import RecordedFacts, folded_notes, recorded_line, savings_line, step_line
from graph_predictor.synthesis.baseline import baseline_of
from step_views.pages.comparison import opportunities_section
from step_views.pages.memory import fullest, scenario_memory, step_memory
from step_views.pages.page import Provenance, notes_part, provenance_section, sentence
from step_views.pages.parts import (
    Cell,
    Facts,
    IntervalBar,
    KeyFigure,
    KeyFigures,
    PageSection,
    PageTable,
    Part,
    Prose,
    ReportPage,
    Stack,
    count_cell,
    ms_cell,
    share_cell,
    table,
    text_column,
)
from step_views.pages.parts import PageColumn as Column
from step_views.pages.sections import operations_section, path_table, ranks_section, roofline_section
from step_views.pages.timeline import timeline_section
from step_views.reports.breakdown import Breakdown, breakdown
from step_views.reports.call_tree import call_tree
from step_views.reports.inspection import Inspection, inspect_job
from step_views.reports.opportunities import Opportunities, opportunities
from step_views.reports.ranks.report import JobReport, rank_report, replayed_ranks
from step_views.reports.ranks.times import JobTimes, predicted_times
from tracer.device_memory import MemoryTimeline
from tracer.errors import ForetraceError
from tracer.graph import SHAPE_ONLY, LossReport
from tracer.job import Job

COLOURS = {"host": "host", "launch": "launch", "compute": "compute", "memory copy": "copy",
           "exposed communication": "comm", "waiting for rank": "waiting", "data loading": "loading", "sync": "sync",
           "bubble": "loading", "idle": "other", "busy": "compute"}
"""Colour of each bound."""
_LOSSES = {
    "events_read": "events read", "orphan_kernels": "GPU work without a recorded launch",
    "leading_orphans": "of these, before their stream's first launched work",
    "launches_without_kernels": "launches without recorded GPU work", "clamped_children": "events cut to their parent",
    "dropped_events": "events dropped", "repaired_events": "events mended",
    "shifted_kernels": "GPU work moved with its clock", "early_kernels": "GPU work before its launch",
    "placed_kernels": "GPU work placed after its launch", "cut_kernels": "GPU work cut to a possible duration",
    "unreadable_device_events": "events of a device that cannot be read",
    "unreadable_device_calls": "calls of an accelerator whose work cannot be read",
    "other_process_events": "events of other processes in the file",
    "lossy_steps": "steps that lost device work", "empty_steps": "steps without work left out",
    "unlike_repeats": "repeats too unlike to be steps",
    "truncated_bytes": "bytes cut off at the end"}


def predicted_overview(result: Prediction, *, loss: LossReport | None = None) -> PageSection:
    """Return the overview of a prediction, for a recorded step or a changed step."""
    low, high = result.interval_us
    step = KeyFigure(f"Step {result.times}", f"{milliseconds(result.step_time_us * 1e3)} ms",
                     f"80% between {milliseconds(low * 1e3)} and {milliseconds(high * 1e3)} ms")
    figures = [step, KeyFigure("Decided by", result.bound, savings_line(result.savings_us, result.step_time_us))]
    if result.recorded is not None:
        # A recorded step begins with the recorded time, a changed step with the predicted time.
        figures.insert(1 if result.edits else 0, recorded_figure(result.recorded))
    if result.gpu_active_us > 0:
        figures.append(KeyFigure("GPU active", f"{milliseconds(result.gpu_active_us * 1e3)} ms", _active(result)))
    if result.mfu is not None:
        figures.append(KeyFigure("MFU", small_percent(result.mfu), "of the device's peak rate"))
    if result.items_per_second is not None:
        figures.append(KeyFigure("Throughput", f"{result.items_per_second:,.1f} /s", "samples"))
    if result.peak_memory_bytes is not None:
        figures.append(KeyFigure("Peak memory", f"{result.peak_memory_bytes / 1e9:.2f} GB"))
    if result.cost_per_step is not None:
        figures.append(KeyFigure("Cost", f"{result.cost_per_step:.3g}", "a step"))
    if result.device:
        figures.append(KeyFigure("Device", result.device, f"recorded on {result.recorded_on}" if (
            result.recorded_on and result.recorded_on != result.device) else ""))
    marks = []
    if result.recorded_us is not None:
        marks.append(("recorded under the profiler", result.recorded_us * 1e3))
    if result.unprofiled_us is not None:
        marks.append(("measured without it", result.unprofiled_us * 1e3))
    parts: list[Part] = [KeyFigures(figures), IntervalBar(
        "as it is" if result.as_measured else "predicted", low * 1e3, result.step_time_us * 1e3, high * 1e3, marks)]
    parts += bounds_stack("Where the time goes: the critical path by what it is spent on",
                          {name: us * 1e3 for name, us in result.bounds_us.items()})
    if result.edits:
        parts.insert(0, Prose([f"Changed: {'; '.join(result.edits)}."]))
    parts += notes_part([*(f"Warning: {text}" for text in result.warnings), *result.notes])
    if loss is not None:
        parts += loss_parts(loss)
    return PageSection("overview", "Overview", parts)


def broken_down_overview(result: Breakdown, *, loss: LossReport | None = None) -> PageSection:
    """Return the overview of a breakdown: the step, its bounds, and a table of all steps."""
    name = "Step" if result.steady is not None else "Replayed window"
    figures = [KeyFigure(f"{name} {which_times(result.profiled)}", f"{milliseconds(result.step_ns)} ms",
                         "steady state" if result.steady is not None else ""),
               KeyFigure("Decided by", result.bound)]
    if result.recorded is not None:
        figures.insert(0, recorded_figure(result.recorded))
    if result.steady is not None and result.steady.gpu_active_us > 0:
        figures.append(KeyFigure("GPU active", f"{milliseconds(result.steady.gpu_active_us * 1e3)} ms"))
    parts: list[Part] = [KeyFigures(figures)]
    parts += bounds_stack("Where the time goes: the critical path by what it is spent on, ms a step",
                          {name: us * 1e3 for name, us in result.bounds_us.items()})
    parts.append(steps_table(result))
    parts += notes_part(result.notes)
    if loss is not None:
        parts += loss_parts(loss)
    return PageSection("overview", "Overview", parts)


def recorded_figure(recorded: RecordedFacts) -> KeyFigure:
    """Return the figure of the recorded step."""
    return KeyFigure("Recorded step", f"{milliseconds(recorded.step_ns)} ms", recorded.how())


def steps_table(result: Breakdown) -> PageTable:
    """Return a table of every recorded step: whether it counts, and its own span by bound."""
    bounds = [bound for bound, ns in result.total().bounds.items() if ns]
    return table("steps", "Recorded steps, ms under the profiler, and the span of each as replayed by bound", [
        Column("rank"), text_column("step"), Column("recorded"), text_column("counts"), Column("span"),
        *(Column(b.label) for b in bounds)], (
        [count_cell(s.rank) if s.rank >= 0 else "–", s.name, ms_cell(s.measured_ns),
         f"no: {s.why_not}" if s.why_not else "yes", ms_cell(s.simulated_ns),
         *(ms_cell(s.totals.bounds[b]) for b in bounds)] for s in result.steps))


def bounds_stack(caption: str, bounds_ns: Mapping[str, float]) -> list[Stack]:
    """Return the bounds of a critical path as one bar; an empty list for a step without time."""
    total = sum(bounds_ns.values())
    if total <= 0:
        return []
    parts = [(name, f"{milliseconds(ns)} ms", ns / total, COLOURS.get(name, "other"))
             for name, ns in bounds_ns.items() if ns > 0]
    return [Stack(caption, parts)]


def saving_table(found: Opportunities) -> list[Part]:
    """Return a table of the changes that would save most."""
    step = found.baseline.step_time_us
    if not found.found:
        return [Prose(["Nothing that was tried would save time."])]
    return [table(
        "saving", "What would save most, each change by itself",
        [text_column("change"), Column("saves ms"), Column("share"), Column("80% from"), Column("to"),
         text_column("then decides"), text_column("option of foretrace predict")],
        ([f"{o.name}{' (a bound: at most)' if o.bound else ''}", ms_cell(o.gain_us * 1e3), share_cell(o.gain),
          ms_cell(o.interval_us[0] * 1e3), ms_cell(o.interval_us[1] * 1e3), o.decides, o.option]
         for o in found.found[:5]),
        note=f"Of a step of {milliseconds(step * 1e3)} ms; gains do not add up.")]


def loss_parts(loss: LossReport) -> list[Part]:
    """Return a list of what was lost or repaired when the traces were read."""
    values = asdict(loss)
    rows = [[Cell(name), count_cell(values[key])] for key, name in _LOSSES.items()
            if values[key] or key == "events_read"]
    worth = sum(values[key] for key in _LOSSES if key != "events_read")
    return [table("loss", f"Loss report: {count(worth) if worth else 'nothing'} lost, mended or left out",
                  [text_column("what"), Column("events")], rows), *notes_part(loss.notes)]


def inspected_facts(found: Inspection) -> Facts:
    """Return the facts about the traces' contents."""
    ranks = len(found.ranks)
    facts = [(count(ranks), "rank" if ranks == 1 else "ranks"), (count(found.steps), "steps"),
             *((count(found.total(what)), "host calls" if what == "calls" else what) for what in (
                 "ops", "calls", "kernels", "collectives"))]
    return Facts([(number, "operations" if what == "ops" else what) for number, what in facts])


def _active(result: Prediction) -> str:
    low, high = result.gpu_active_interval_us
    return f"80% between {milliseconds(low * 1e3)} and {milliseconds(high * 1e3)} ms" if high else ""


QUICK_EVENTS = 40_000
"""Most calls and kernels of a job for which opportunities are tried: each of some thirty changes is simulated."""


def report_page(job: Job, where: Provenance, *, step: str | None = None, profiled: bool = False,
                traced: MemoryTimeline | None = None) -> ReportPage:
    """Return the page of a job, recorded or traced by shapes. ``traced`` is the memory of the program traced by shapes,
    shown next to measured memory. Raises ``ForetraceError`` if there is nothing to show."""
    if any(graph.meta.era == SHAPE_ONLY for graph in job.graphs):
        baseline = baseline_of(job, step)
        prediction = baseline.predict()
        page = prediction_page(prediction, baseline.simulated(), where, job)
        return _with_what_ifs(page, _saving(baseline))
    found = replay(job.graphs, profiled=profiled)
    result = break_down(job, found, step)
    inspected = inspect_job(job)
    measured = fullest(job.graphs)
    times, said = replayed_ranks(job, step, profiled=profiled, known=found)
    replayed, ranks = replayed_sections(found, result, times), _ranks(times, said)
    # The replay of a large recording takes as much memory as the prediction, so its sections are made first.
    built = found.built.as_recorded()
    del found
    try:
        # Without a named step the prediction uses the last equal steps, as `foretrace predict` does.
        baseline = baseline_of(job, step, profiled=profiled, built=built)
        roofline = roofline_section(times, baseline.scenario)
        del times
        prediction = baseline.predict(evidence=True)
    except ForetraceError as error:
        result.notes.append(f"Nothing is predicted of it: {error}")
        overview = broken_down_overview(result, loss=inspected.loss())
        return ReportPage(where.title, sentence(result.headline()), [
            _with_facts(overview, inspected_facts(inspected), 1), *replayed,
            step_memory(None, None, measured, traced), *ranks, provenance_section(where, job)])
    overview = predicted_overview(prediction, loss=inspected.loss())
    overview = _with_facts(overview, inspected_facts(inspected), 2)
    overview = PageSection(overview.key, overview.title, [*overview.parts, steps_table(result)])
    scenario = baseline.scenario
    leads = "" if prediction.recorded is None else f"{recorded_line(prediction.recorded)}. "
    page = ReportPage(where.title, leads + sentence(prediction.headline()), [
        overview, *replayed, roofline, scenario_memory(scenario, measured, traced), *ranks,
        provenance_section(where, job, prediction)])
    return _with_what_ifs(page, _saving(baseline))


def breakdown_page(job: Job, found: Replay, result: Breakdown, where: Provenance, *, step: str | None,
                   profiled: bool) -> ReportPage:
    """Return the page of a breakdown: overview, timeline and operations."""
    times, _ = replayed_ranks(job, step, profiled=profiled, known=found)
    return ReportPage(where.title, sentence(result.headline()), [
        broken_down_overview(result), *replayed_sections(found, result, times), provenance_section(where, job)])


def ranks_page(found: JobReport, where: Provenance) -> ReportPage:
    """Return the page of a job's ranks, with their timeline."""
    which = which_times(found.times.profiled, ran=found.times.ran)
    recorded = found.times.recorded
    line = recorded_line(recorded) if recorded is not None else step_line(which, found.step_ns / 1e3)
    return ReportPage(where.title, sentence(line), [
        ranks_section(found), timeline_section(found.times), provenance_section(where)])


def break_down(job: Job, found: Replay, step: str | None) -> Breakdown:
    """Return the breakdown of a replay, with the notes of ``foretrace breakdown``."""
    result = breakdown(found, step=step)
    result.notes = [*job.notes, *folded_notes(job), *result.notes]
    return result


def replayed_sections(found: Replay, result: Breakdown, times: JobTimes) -> list[PageSection]:
    """Return the sections timeline and operations of a replayed job."""
    tree = call_tree(found, [(one.rank, one.name) for one in result.counted])
    lines = {path: line for graph in found.graphs for path, line in graph.meta.module_lines.items()}
    return [timeline_section(times), operations_section(result, tree, lines)]


def _ranks(times: JobTimes, said: list[str]) -> list[PageSection]:
    """Return the section of several ranks; an empty list for one rank."""
    if len(times.graphs) < 2:
        return []
    found = rank_report(times)
    found.notes[:0] = said
    return [ranks_section(found)]


def _with_facts(section: PageSection, facts: Facts, at: int) -> PageSection:
    return PageSection(section.key, section.title, [*section.parts[:at], facts, *section.parts[at:]], section.lead)


def _saving(baseline: Baseline) -> Opportunities | None:
    """Return the opportunities of a baseline; ``None`` if trying them would take long."""
    program = baseline.built.program
    if len(program.item_kind) + len(program.kernel_item) > QUICK_EVENTS:
        return None
    return opportunities(baseline)


def _with_what_ifs(page: ReportPage, found: Opportunities | None) -> ReportPage:
    """Return a page with the largest savings in its overview, and all tried changes in a section before the last."""
    overview = page.sections[0]
    if found is None:
        left = Prose([f"Changes were not tried: the job has more than {QUICK_EVENTS:,} calls and kernels, and each of "
                      "some thirty would be simulated; foretrace opportunities tries them."])
        what_ifs, parts = PageSection("what-ifs", "What-ifs", [left]), [*overview.parts]
    else:
        what_ifs = opportunities_section(found)
        at = next((i + 1 for i, part in enumerate(overview.parts) if isinstance(part, Stack)), 2)
        parts = [*overview.parts[:at], *saving_table(found), *overview.parts[at:]]
    page.sections = [PageSection(overview.key, overview.title, parts, overview.lead), *page.sections[1:-1], what_ifs,
                     page.sections[-1]]
    return page


def prediction_page(result: Prediction, simulated: SimulatedStep, where: Provenance,
                    job: Job | None = None) -> ReportPage:
    """Return the page of a prediction."""
    return ReportPage(where.title, sentence(result.headline()), [
        predicted_overview(result), *simulated_sections(result, simulated), provenance_section(where, job, result)])


def simulated_sections(result: Prediction, simulated: SimulatedStep) -> list[PageSection]:
    """Return the sections timeline, operations, roofline, memory and ranks of a predicted step."""
    times = predicted_times(simulated)
    found = [timeline_section(times), _operations(result), roofline_section(times, simulated.scenario),
             scenario_memory(simulated.scenario)]
    if len(result.per_rank) > 1:
        found.append(ranks_section(rank_report(times)))
    return found


def _operations(result: Prediction) -> PageSection:
    total = sum(result.families_us.values())
    families = table("families", "Device time by family of work, ms a step of the slowest rank",
                     [text_column("family"), Column("ms"), Column("share")],
                     ([name, ms_cell(us * 1e3), share_cell(us / total if total else None)]
                      for name, us in result.families_us.items()))
    tables = (path_table(result.critical_path), families)
    return PageSection("operations", "Operations", [part for part in tables if part.rows])
