"""The page of a recording: what ``inspect``, ``predict``, ``breakdown``, ``ranks`` and ``opportunities`` say of it."""

from __future__ import annotations

from graph_predictor.pages.operations import operations_section
from graph_predictor.pages.overview import (
    broken_down_overview,
    inspected_facts,
    predicted_overview,
    saving_table,
    steps_table,
)
from graph_predictor.pages.parts import Facts, PageSection, Prose, ReportPage, Stack
from graph_predictor.pages.prediction import prediction_page, sentence
from graph_predictor.pages.provenance import Provenance, provenance_section
from graph_predictor.pages.ranks import ranks_section
from graph_predictor.pages.roofline import roofline_section
from graph_predictor.pages.step_memory import fullest, scenario_memory, step_memory
from graph_predictor.pages.timeline import timeline_section
from graph_predictor.pages.what_ifs import opportunities_section
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.replay import Replay, replay
from graph_predictor.prediction.result import which_times
from graph_predictor.recorded.damage import folded_notes
from graph_predictor.reports.breakdown import Breakdown, breakdown
from graph_predictor.reports.call_tree import call_tree
from graph_predictor.reports.facts import recorded_line, step_line
from graph_predictor.reports.inspection import inspect_job
from graph_predictor.reports.opportunities import Opportunities, opportunities
from graph_predictor.reports.ranks.recorded import replayed_ranks
from graph_predictor.reports.ranks.report import JobReport, rank_report
from graph_predictor.reports.ranks.times import JobTimes
from graph_predictor.synthesis.baseline import baseline_of
from tracer.errors import ForetraceError
from tracer.graph import SHAPE_ONLY
from tracer.job import Job
from tracer.memory_timeline import MemoryTimeline

QUICK_EVENTS = 40_000
"""Calls and kernels of a job up to which its opportunities are tried: each of some thirty changes is simulated."""


def report_page(job: Job, where: Provenance, *, step: str | None = None, profiled: bool = False,
                traced: MemoryTimeline | None = None) -> ReportPage:
    """Return the page of a job, recorded or traced by shapes.

    Args:
        job: what was read.
        where: how it was made, for the last section.
        step: only this recorded step.
        profiled: times under the profiler.
        traced: memory of its program, traced by shapes, to be shown beside what was measured.

    Raises:
        ForetraceError: there is nothing to show.
    """
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
    try:
        # Without a step that is named, the prediction rests on the last ones alike, as `foretrace predict` does.
        baseline = baseline_of(job, step, profiled=profiled)
        prediction = baseline.predict(evidence=True)
    except ForetraceError as error:
        result.notes.append(f"Nothing is predicted of it: {error}")
        overview = broken_down_overview(result, loss=inspected.loss())
        page = ReportPage(where.title, sentence(result.headline()), [
            _with_facts(overview, inspected_facts(inspected), 1), *replayed_sections(found, result, times)])
        page.sections += [step_memory(None, None, measured, traced), *_ranks(times, said),
                          provenance_section(where, job)]
        return page
    overview = predicted_overview(prediction, loss=inspected.loss())
    overview = _with_facts(overview, inspected_facts(inspected), 2)
    overview = PageSection(overview.key, overview.title, [*overview.parts, steps_table(result)])
    scenario = baseline.scenario
    leads = "" if prediction.recorded is None else f"{recorded_line(prediction.recorded)}. "
    page = ReportPage(where.title, leads + sentence(prediction.headline()), [
        overview, *replayed_sections(found, result, times), roofline_section(times, scenario),
        scenario_memory(scenario, measured, traced), *_ranks(times, said), provenance_section(where, job, prediction)])
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
    """Return the breakdown of a replay, with the notes that ``foretrace breakdown`` has."""
    result = breakdown(found, step=step)
    result.notes = [*job.notes, *folded_notes(job), *result.notes]
    return result


def replayed_sections(found: Replay, result: Breakdown, times: JobTimes) -> list[PageSection]:
    """Return timeline and operations of a replayed job."""
    tree = call_tree(found, [(one.rank, one.name) for one in result.counted])
    lines = {path: line for graph in found.graphs for path, line in graph.meta.module_lines.items()}
    return [timeline_section(times), operations_section(result, tree, lines)]


def _ranks(times: JobTimes, said: list[str]) -> list[PageSection]:
    """Return the section of several ranks; none of one."""
    if len(times.graphs) < 2:
        return []
    found = rank_report(times)
    found.notes[:0] = said
    return [ranks_section(found)]


def _with_facts(section: PageSection, facts: Facts, at: int) -> PageSection:
    return PageSection(section.key, section.title, [*section.parts[:at], facts, *section.parts[at:]], section.lead)


def _saving(baseline: Baseline) -> Opportunities | None:
    """Return what would save most; ``None`` where trying takes long."""
    program = baseline.built.program
    if len(program.item_kind) + len(program.kernel_item) > QUICK_EVENTS:
        return None
    return opportunities(baseline)


def _with_what_ifs(page: ReportPage, found: Opportunities | None) -> ReportPage:
    """Return a page with what would save most in its overview, and all that was tried in a section before the last."""
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
