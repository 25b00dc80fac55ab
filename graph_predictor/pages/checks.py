"""The page of a check: every figure before and now, its verdict, and what made the difference."""

from __future__ import annotations

from graph_predictor.check.verdict import GateOutcome, Status
from graph_predictor.figures import signed_percent
from graph_predictor.pages.page import notes_part
from graph_predictor.pages.parts import (
    Cell,
    KeyFigure,
    KeyFigures,
    PageSection,
    Part,
    ReportPage,
    number_cell,
    table,
    text_column,
)
from graph_predictor.pages.parts import PageColumn as Column
from graph_predictor.pages.provenance import Provenance, provenance_section


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
