"""The page of a sweep: every point with its interval, the best first, and what could not be priced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graph_predictor.figures import count
from graph_predictor.pages.parts import (
    Cell,
    Facts,
    PageSection,
    PageTable,
    Part,
    Prose,
    ReportPage,
    ms_cell,
    number_cell,
    share_cell,
    table,
    text_column,
)
from graph_predictor.pages.parts import PageColumn as Column
from graph_predictor.pages.provenance import Provenance, provenance_section
from graph_predictor.pages.what_ifs import interval_plot
from graph_predictor.sweep import Sweep

if TYPE_CHECKING:
    import pandas as pd


def sweep_page(found: Sweep, shown: pd.DataFrame, what: str, where: Provenance) -> ReportPage:
    """Return the page of a sweep.

    Args:
        found: all points.
        shown: those that were asked for, in that order.
        what: which they are, in words.
        where: how it was made.
    """
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
