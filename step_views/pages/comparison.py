"""Pages of a difference of two recordings, of a check, and of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graph_predictor.figures import count, milliseconds, percent, signed_milliseconds, signed_percent
from graph_predictor.prediction.result import which_times
from step_views.check.verdict import GateOutcome, Status
from step_views.diff import result as diff_result
from step_views.diff.result import Difference
from step_views.pages.page import Provenance, notes_part, provenance_section, sentence
from step_views.pages.parts import (
    Cell,
    Facts,
    KeyFigure,
    KeyFigures,
    PagePlot,
    PageSection,
    PageTable,
    Part,
    Prose,
    ReportPage,
    count_cell,
    ms_cell,
    number_cell,
    share_cell,
    signed_cell,
    table,
    text_column,
)
from step_views.pages.parts import PageColumn as Column
from step_views.reports.opportunities import Opportunities
from step_views.sweep import Sweep

if TYPE_CHECKING:
    import pandas as pd


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
    """Return a waterfall plot from A's step to B's, by kind of difference."""
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
    # If steps are long compared with their difference, bars do not begin at zero; the axis shows this.
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


def _sides(part: diff_result.Part) -> list[Cell]:
    """Return a part's time in A and in B, and its difference."""
    return [*(Cell("–") if ns is None else ms_cell(ns) for ns in (part.before_ns, part.after_ns)),
            Cell(signed_milliseconds(1e3 * part.shown_us()), part.time_ns)]


def _hidden(result: Difference) -> PageTable:
    return table("hidden", "Hidden: what changed off the critical path, ms of a step", [
        text_column("kind"), text_column("what"), Column("hidden ms"), Column("on path ms")], (
        [part.kind.value, part.what, signed_cell(part.hidden_ns), signed_cell(part.time_ns)]
        for part in result.hidden()))


def check_page_of(found: GateOutcome, where: Provenance) -> ReportPage:
    """Return the page of a check."""
    numbers = [(status, sum(v.status is status for v in found.verdicts)) for status in Status]
    parts: list[Part] = [
        KeyFigures([KeyFigure(status.value, f"{number:,}", "figures") for status, number in numbers if number]),
        table("verdicts", f"KeyFigures: {found.what}", [
            text_column("program"), text_column("figure"), Column("before"), Column("now"), Column("change"),
            text_column("outcome"), text_column("what it means")], (
            [v.program, v.quantity, Cell(v.value(v.before), v.before), Cell(v.value(v.now), v.now),
             _change(v.before, v.now), v.status.value.upper() if v.failed or v.status is Status.INCONCLUSIVE
             else v.status.value, v.text] for v in found.verdicts))]
    tested = table("confidence", "Tests", [
        text_column("program"), text_column("figure"), Column("confidence that it got worse"),
        Column("smallest increase that could have shown")], (
        [v.program, v.quantity, number_cell(v.confidence, 3),
         Cell("–") if v.detectable is None else Cell(f"{v.detectable:.1%}", v.detectable)]
        for v in found.verdicts if v.confidence is not None))
    if tested.rows:
        parts.append(tested)
    causes = table("causes", "What made the step longer, the largest first", [text_column("program"),
                                                                            text_column("cause")],
                   ([program, cause] for program, every in found.causes.items() for cause in every))
    if causes.rows:
        parts.append(causes)
    parts += notes_part(found.notes)
    return ReportPage(where.title, found.summary, [PageSection("check", "Check", parts), provenance_section(where)])


def _change(before: float | None, now: float | None) -> Cell:
    if before is None or now is None or not before:
        return Cell("–")
    return Cell(signed_percent(now / before - 1), now / before - 1)


MOST_DRAWN = 60  # bars; chosen


def opportunities_section(found: Opportunities) -> PageSection:
    """Return the section of the tried changes."""
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
    """Return a plot of named times with intervals, in order: (name, value, low, high), ns."""
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


def sweep_page(found: Sweep, shown: pd.DataFrame, what: str, where: Provenance) -> ReportPage:
    """Return the page of a sweep. ``shown`` are the requested points in order; ``what`` describes them in words."""
    priced = shown[shown["step_time_us"].notna()].to_dict("records")
    refused = found.table[found.table["step_time_us"].isna()].to_dict("records")
    parts: list[Part] = [Facts([(count(len(found.table)), "points"), (count(len(priced)), "shown"),
                                (count(len(refused)), "not priced")])]
    if priced:
        rows = [(_name(row, found.axes), row["step_time_us"] * 1e3, row["low_us"] * 1e3, row["high_us"] * 1e3)
                for row in priced]
        parts.append(interval_plot("points", f"{what}, with their 80% intervals",
                                   "A bar is the step of a point, the line its 80% interval.", rows,
                                   _points(priced, found.axes, what)))
    else:
        parts.append(Prose(["No point is feasible."]))
    left = table("refused", "Not priced", [*(text_column(axis) for axis in found.axes), text_column("why")],
                 ([*(str(row[axis]) for axis in found.axes), str(row["refused"])] for row in refused))
    if left.rows:
        parts.append(left)
    best = f"{what}: {rows[0][0]}, {rows[0][1] / 1e6:,.3f} ms." if priced else "No point is feasible."
    return ReportPage(where.title, best, [PageSection("sweep", "Sweep", parts), provenance_section(where)])


def _name(row: dict[Any, Any], axes: tuple[str, ...]) -> str:
    return ", ".join(f"{axis} {row[axis]}" for axis in axes)


def _known(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def _scaled(value: Any, scale: float) -> float | None:
    known = _known(value)
    return None if known is None else known * scale


def _points(rows: list[dict[Any, Any]], axes: tuple[str, ...], what: str) -> PageTable:
    some = {name for name in ("items_per_second", "mfu", "peak_memory_bytes", "cost_per_step")
            if any(_known(row[name]) is not None for row in rows)}
    columns = [*(text_column(axis) for axis in axes), Column("ms"), Column("80% from"), Column("to"),
               *([Column("samples/s")] if "items_per_second" in some else []),
               *([Column("MFU")] if "mfu" in some else []),
               *([Column("memory GB")] if "peak_memory_bytes" in some else []),
               *([Column("cost of million steps")] if "cost_per_step" in some else []),
               text_column("bound"), Column("measured", note="share of the step time that rests on measured durations")]

    def cells(row: dict[Any, Any]) -> list[Cell | str]:
        return [*(Cell(str(row[axis]), _known(row[axis]) if isinstance(row[axis], int | float) else None)
                  for axis in axes),
                ms_cell(_scaled(row["step_time_us"], 1e3)), ms_cell(_scaled(row["low_us"], 1e3)),
                ms_cell(_scaled(row["high_us"], 1e3)),
                *([number_cell(_known(row["items_per_second"]), 1)] if "items_per_second" in some else []),
                *([share_cell(_known(row["mfu"]))] if "mfu" in some else []),
                *([number_cell(_scaled(row["peak_memory_bytes"], 1e-9))] if "peak_memory_bytes" in some else []),
                *([number_cell(_scaled(row["cost_per_step"], 1e6))] if "cost_per_step" in some else []),
                str(row["bound"]), share_cell(_known(row["measured_share"]))]

    return table("sweep-points", what, columns, map(cells, rows))
