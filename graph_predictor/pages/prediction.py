"""The page of a prediction: the step as it would be, beside the recorded one it rests on."""

from __future__ import annotations

from graph_predictor.pages.overview import path_table, predicted_overview
from graph_predictor.pages.parts import PageColumn as Column
from graph_predictor.pages.parts import PageSection, ReportPage, ms_cell, share_cell, table, text_column
from graph_predictor.pages.provenance import Provenance, provenance_section
from graph_predictor.pages.ranks import ranks_section
from graph_predictor.pages.roofline import roofline_section
from graph_predictor.pages.step_memory import scenario_memory
from graph_predictor.pages.timeline import timeline_section
from graph_predictor.prediction.predictor import SimulatedStep
from graph_predictor.prediction.result import Prediction
from graph_predictor.reports.ranks.report import rank_report
from graph_predictor.reports.ranks.times import predicted_times
from tracer.job import Job


def prediction_page(result: Prediction, simulated: SimulatedStep, where: Provenance,
                    job: Job | None = None) -> ReportPage:
    """Return the page of a prediction.

    Args:
        result: the prediction.
        simulated: the job it is read off.
        where: how it was made.
        job: what was read, if it was traces.
    """
    return ReportPage(where.title, sentence(result.headline()), [
        predicted_overview(result), *simulated_sections(result, simulated), provenance_section(where, job, result)])


def simulated_sections(result: Prediction, simulated: SimulatedStep) -> list[PageSection]:
    """Return timeline, operations, roofline, memory and ranks of a predicted step."""
    times = predicted_times(simulated)
    found = [timeline_section(times), _operations(result), roofline_section(times, simulated.scenario),
             scenario_memory(simulated.scenario)]
    if len(result.per_rank) > 1:
        found.append(ranks_section(rank_report(times)))
    return found


def sentence(text: str) -> str:
    """Return a headline as a sentence."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _operations(result: Prediction) -> PageSection:
    total = sum(result.families_us.values())
    families = table("families", "Device time by family of work, ms a step of the slowest rank",
                     [text_column("family"), Column("ms"), Column("share")],
                     ([name, ms_cell(us * 1e3), share_cell(us / total if total else None)]
                      for name, us in result.families_us.items()))
    tables = (path_table(result.critical_path), families)
    return PageSection("operations", "Operations", [part for part in tables if part.rows])
