"""The what-ifs section: changes of a step and what they would save, and the points of a sweep, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graph_predictor.pages.parts import PageColumn as Column
from graph_predictor.pages.parts import PagePlot, PageSection, PageTable, Part, ms_cell, share_cell, table, text_column
from graph_predictor.reports.opportunities import Opportunities

MOST_DRAWN = 60


def opportunities_section(found: Opportunities) -> PageSection:
    """Return the section of the changes that were tried."""
    rows = [(o.name + (" (a bound)" if o.bound else ""), o.step_time_us * 1e3,
             (found.baseline.step_time_us - o.interval_us[1]) * 1e3,
             (found.baseline.step_time_us - o.interval_us[0]) * 1e3) for o in found.found]
    low, high = found.baseline.interval_us
    drawn = [("as it is", found.baseline.step_time_us * 1e3, low * 1e3, high * 1e3), *rows]
    shown = table(
        "what-ifs", "Changes by themselves, ms a step",
        [text_column("change"), Column("step"), Column("saves"), Column("share"), Column("80% from"), Column("to"),
         text_column("then decides"), text_column("option of foretrace predict")],
        ([o.name + (" (a bound)" if o.bound else ""), ms_cell(o.step_time_us * 1e3), ms_cell(o.gain_us * 1e3),
          share_cell(o.gain), ms_cell(o.interval_us[0] * 1e3), ms_cell(o.interval_us[1] * 1e3), o.decides, o.option]
         for o in found.found))
    parts: list[Part] = [] if not rows else [interval_plot(
        "what-if-plot", "The step with each change, and the 80% interval of what it saves",
        "A bar is the step's time with a change, the line its interval: the step as it is, less the interval of the "
        "gain.", drawn, shown)]
    left = table("left-out", "Changes that were left out", [text_column("change"), text_column("why")],
                 ([name, why] for name, why in found.left_out), folded=True)
    return PageSection("what-ifs", "What-ifs", [*parts, *([left] if left.rows else [])], (
        "Each change is predicted by itself; gains do not add up. A bound says what a perfect version could save at "
        "most."))


def interval_plot(key: str, caption: str, description: str, rows: Sequence[tuple[str, float, float, float]],
                  shown: PageTable | None) -> PagePlot:
    """Return a plot of named times with their intervals: (name, value, low, high), ns, in their order."""
    values: list[dict[str, Any]] = [
        {"name": name, "ms": value / 1e6, "low": max(low, 0.0) / 1e6, "high": high / 1e6,
         "text": f"{value / 1e6:,.3f} ms", "between": f"{low / 1e6:,.3f} to {high / 1e6:,.3f} ms"}
        for name, value, low, high in rows[:MOST_DRAWN]]
    y = {"field": "name", "type": "nominal", "sort": [value["name"] for value in values], "title": None,
         "axis": {"labelLimit": 210, "labelOverlap": False}}
    tooltip = [{"field": "name", "title": "what"}, {"field": "text", "title": "step"},
               {"field": "between", "title": "80%"}]
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json", "width": "container",
        "height": max(60, 21 * len(values)), "data": {"values": values},
        "layer": [
            {"mark": {"type": "bar", "color": "@{bar}", "height": 12},
             "encoding": {"y": y, "x": {"field": "ms", "type": "quantitative", "title": "ms a step"},
                          "tooltip": tooltip}},
            {"mark": {"type": "rule", "strokeWidth": 2, "color": "@{compute}"},
             "encoding": {"y": y, "x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"},
                          "tooltip": tooltip}},
            {"mark": {"type": "point", "filled": True, "size": 46, "opacity": 1, "color": "@{accent}"},
             "encoding": {"y": y, "x": {"field": "ms", "type": "quantitative"}, "tooltip": tooltip}}],
    }
    fewer = f" The first {MOST_DRAWN} of {len(rows):,} are drawn." if len(rows) > MOST_DRAWN else ""
    return PagePlot(key, caption, description + fewer, spec, shown)
