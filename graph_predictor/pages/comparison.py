"""The page of a difference of two recordings: what makes one step longer than the other."""

from __future__ import annotations

from typing import Any

from graph_predictor.diff.result import Difference, Part
from graph_predictor.figures import count, milliseconds, percent, signed_milliseconds
from graph_predictor.pages.page import notes_part
from graph_predictor.pages.parts import (
    Cell,
    Facts,
    KeyFigure,
    KeyFigures,
    PagePlot,
    PageSection,
    PageTable,
    ReportPage,
    count_cell,
    ms_cell,
    signed_cell,
    table,
    text_column,
)
from graph_predictor.pages.parts import PageColumn as Column
from graph_predictor.pages.prediction import sentence
from graph_predictor.pages.provenance import Provenance, provenance_section
from graph_predictor.prediction.result import which_times


def difference_page(result: Difference, where: Provenance) -> ReportPage:
    """Return the page of a difference."""
    total, before = result.total_ns, result.before_ns
    how = "longer" if total > 0 else "shorter"
    figures = KeyFigures([
        KeyFigure("A", f"{milliseconds(before)} ms",
               f"{which_times(result.profiled)}, {count(result.steps_before)} steps"),
        KeyFigure("B", f"{milliseconds(result.after_ns)} ms", f"{count(result.steps_after)} steps"),
        KeyFigure("B's step", f"{milliseconds(1e3 * abs(result.shown_us()))} ms {how}" if total else "as long as A's",
               percent(abs(total) / before if before else None))])
    facts = [(percent(result.aligned), "of the operations aligned"),
             (percent(result.attributed), "of the difference attributed")]
    facts += [(f"{milliseconds(each.step_ns)} ms", f"recorded step of {name}") for name, each in (
        ("A", result.recorded_a), ("B", result.recorded_b)) if each is not None]
    facts += [(f"×{ratio:.2f}", f"unchanged {what} work in B") for what, ratio in (
        ("host", result.host_ratio), ("device", result.device_ratio)) if ratio is not None]
    overview = PageSection("overview", "Overview", [
        figures, Facts(facts), _waterfall(result, _kinds(result)), *notes_part(result.notes)])
    causes = PageSection("causes", "Causes", [part for part in (_causes(result), _hidden(result)) if part.rows], (
        "What is surest to matter comes first; a part's ms is by how much it moves the step."))
    return ReportPage(where.title, sentence(result.headline()), [overview, causes, provenance_section(where)])


def _share(ns: int, total: int) -> Cell:
    return Cell(percent(ns / total), ns / total, abs(ns / total)) if total else Cell("–")


def _kinds(result: Difference) -> PageTable:
    return table("kinds", "The difference by kind, ms of a step",
                 [text_column("kind"), Column("ms"), Column("share"),
                  Column("hidden ms", note="changed off the critical path, moves nothing")],
                 ([kind.value, signed_cell(time), _share(time, result.total_ns), signed_cell(hidden)]
                  for kind, time, hidden in result.by_kind()))


def _waterfall(result: Difference, shown: PageTable) -> PagePlot:
    """Return the way from A's step to B's, kind by kind."""
    values: list[dict[str, Any]] = [{"name": "A", "low": 0.0, "high": result.before_ns / 1e6, "sign": "step",
                                     "text": milliseconds(result.before_ns)}]
    at = result.before_ns
    for kind, time, _ in result.by_kind():
        if time:
            values.append({"name": kind.value, "low": min(at, at + time) / 1e6, "high": max(at, at + time) / 1e6,
                           "sign": "longer" if time > 0 else "shorter", "text": signed_milliseconds(time)})
            at += time
    values.append({"name": "B", "low": 0.0, "high": result.after_ns / 1e6, "sign": "step",
                   "text": milliseconds(result.after_ns)})
    least = min(min(v["low"] for v in values if v["sign"] != "step") if len(values) > 2 else 0.0,
                values[0]["high"], values[-1]["high"])
    span = max(v["high"] for v in values) - least
    # Where the steps are long beside what they differ by, bars begin near it: the axis says so.
    start = max(least - 0.35 * span, 0.0) if span < 0.5 * least else 0.0
    for value in values:
        value["low"] = max(value["low"], start)
    y = {"field": "name", "type": "nominal", "sort": [value["name"] for value in values], "title": None,
         "axis": {"labelLimit": 230}}
    x = {"field": "low", "type": "quantitative", "title": "ms a step" + (", not from zero" if start else ""),
         "scale": {"zero": False, "domainMin": start}}
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json", "width": "container",
        "height": max(90, 24 * len(values)), "data": {"values": values},
        "layer": [
            {"mark": {"type": "bar", "height": 14}, "encoding": {
                "y": y, "x": x, "x2": {"field": "high"},
                "color": {"field": "sign", "type": "nominal", "title": None, "scale": {
                    "domain": ["step", "longer", "shorter"], "range": ["@{other}", "@{waiting}", "@{forward}"]}},
                "tooltip": [{"field": "name", "title": "what"}, {"field": "text", "title": "ms"}]}},
            {"mark": {"type": "text", "align": "left", "dx": 5, "fontSize": 12}, "encoding": {
                "y": y, "x": {"field": "high", "type": "quantitative"}, "text": {"field": "text"}}}],
    }
    return PagePlot("waterfall", "From A's step to B's", "Each bar is what one kind of cause adds to the step or takes "
                    "from it.", spec, shown)


def _causes(result: Difference) -> PageTable:
    modules = any(part.module for part in result.parts)
    return table("parts", "Causes, ms of a step", [
        text_column("kind"), text_column("what"), *([text_column("module", path=True)] if modules else []),
        Column("places"),
        Column("A", note="of work on the critical path of A or of B, without what the machine as a whole explains"),
        Column("B", note="the same work in B"), Column("ms"), Column("sure ms")], (
        [part.kind.value, part.what, *([part.module] if modules else []),
         count_cell(part.places) if part.places else "–", *_sides(part), ms_cell(part.certain_ns)]
        for part in result.parts))


def _sides(part: Part) -> list[Cell]:
    """A part's time in A and in B, and its difference."""
    return [*(Cell("–") if ns is None else ms_cell(ns) for ns in (part.before_ns, part.after_ns)),
            Cell(signed_milliseconds(1e3 * part.shown_us()), part.time_ns)]


def _hidden(result: Difference) -> PageTable:
    return table("hidden", "Hidden: what changed off the critical path, ms of a step", [
        text_column("kind"), text_column("what"), Column("hidden ms"), Column("on path ms")], (
        [part.kind.value, part.what, signed_cell(part.hidden_ns), signed_cell(part.time_ns)]
        for part in result.hidden()))
