"""The page of a recording: what ``inspect``, ``predict``, ``breakdown``, ``ranks`` and ``opportunities`` say of it."""

from __future__ import annotations

from graph_predictor.pages.operations import operations_section
from graph_predictor.pages.overview import (
    broken_down_overview,
    inspected_figures,
    predicted_overview,
    steps_table,
)
from graph_predictor.pages.parts import PageSection, ReportPage
from graph_predictor.pages.provenance import Provenance, provenance_section
from graph_predictor.pages.timeline import timeline_section
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.replay import Replay, replay
from graph_predictor.prediction.result import Prediction, which_times
from graph_predictor.recorded.damage import folded_notes
from graph_predictor.reports.breakdown import Breakdown, breakdown
from graph_predictor.reports.call_tree import call_tree
from graph_predictor.reports.figures import milliseconds
from graph_predictor.reports.inspection import inspect_job
from graph_predictor.reports.opportunities import Opportunities, opportunities
from graph_predictor.reports.ranks.recorded import replayed_ranks
from graph_predictor.synthesis.baseline import baseline_of
from tracer.errors import ForetraceError
from tracer.graph import SHAPE_ONLY
from tracer.job import Job

QUICK_EVENTS = 40_000
"""Calls and kernels of a job up to which its opportunities are tried: each of some thirty changes is simulated."""


def report_page(job: Job, where: Provenance, *, step: str | None = None, profiled: bool = False) -> ReportPage:
    """Return the page of a job, recorded or traced by shapes.

    Args:
        job: what was read.
        where: how it was made, for the last section.
        step: only this recorded step.
        profiled: times under the profiler.

    Raises:
        ForetraceError: there is nothing to show.
    """
    if any(graph.meta.era == SHAPE_ONLY for graph in job.graphs):
        raise ForetraceError("not yet")
    found = replay(job.graphs, profiled=profiled)
    result = break_down(job, found, step)
    inspected = inspect_job(job)
    page = ReportPage(_title(where), "")
    try:
        baseline = baseline_of(job, step, profiled=profiled)
        prediction: Prediction | None = baseline.predict()
    except ForetraceError as error:
        baseline, prediction = None, None
        result.notes.append(str(error))
    loss = inspected.loss()
    if prediction is not None and baseline is not None:
        saving = _saving(baseline)
        overview = predicted_overview(prediction, loss=loss, saving=saving)
        page.headline = prediction.headline()[:1].upper() + prediction.headline()[1:] + "."
        overview = PageSection(overview.key, overview.title, [
            *overview.parts[:2], *inspected_figures(inspected), *overview.parts[2:], steps_table(result)])
    else:
        overview = broken_down_overview(result, loss=loss)
        page.headline = f"{milliseconds(result.step_ns)} ms a step {which_times(result.profiled)}."
    page.sections.append(overview)
    page.sections += replayed_sections(job, found, result, step=step, profiled=profiled)
    page.sections.append(provenance_section(where, job, prediction))
    return page


def break_down(job: Job, found: Replay, step: str | None) -> Breakdown:
    """Return the breakdown of a replay, with the notes that ``foretrace breakdown`` has."""
    result = breakdown(found, step=step)
    result.notes = [*job.notes, *folded_notes(job), *result.notes]
    return result


def replayed_sections(job: Job, found: Replay, result: Breakdown, *, step: str | None, profiled: bool) -> list[
        PageSection]:
    """Return timeline and operations of a replayed job."""
    times, _ = replayed_ranks(job, step, profiled=profiled, known=found)
    tree = call_tree(found, [(one.rank, one.name) for one in result.typical])
    return [timeline_section(times), operations_section(result, tree)]


def _saving(baseline: Baseline) -> Opportunities | None:
    """Return what would save most; ``None`` where trying takes long."""
    program = baseline.built.program
    if len(program.item_kind) + len(program.kernel_item) > QUICK_EVENTS:
        return None
    return opportunities(baseline)


def _title(where: Provenance) -> str:
    names = [source.rstrip("/").rpartition("/")[2] or source for source in where.sources[:2]]
    return ", ".join(names) + (" …" if len(where.sources) > 2 else "")
