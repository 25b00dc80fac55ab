"""The ranks section: what each rank does while others wait, who comes late, and the collectives of the groups."""

from __future__ import annotations

from typing import Any

from graph_predictor.figures import count, milliseconds
from graph_predictor.pages.page import notes_part
from graph_predictor.pages.parts import (
    Cell,
    KeyFigure,
    KeyFigures,
    PagePlot,
    PageSection,
    PageTable,
    Part,
    count_cell,
    ms_cell,
    number_cell,
    share_cell,
    table,
    text_column,
)
from graph_predictor.pages.parts import PageColumn as Column
from graph_predictor.prediction.result import which_times
from graph_predictor.reports.ranks.report import JobReport, waiting_ns
from graph_predictor.reports.ranks.stragglers import TOGETHER_NS

_PARTS = {"busy": "@{compute}", "exposed communication": "@{comm}", "waiting for ranks": "@{waiting}",
          "bubble": "@{loading}", "idle": "@{other}"}
_FIELDS = {"busy": "busy_ns", "exposed communication": "exposed_ns", "waiting for ranks": "waiting_ns",
           "bubble": "bubble_ns", "idle": "idle_ns"}
SHOWN_PARTS = 3


def ranks_section(found: JobReport) -> PageSection:
    """Return the section of a job's ranks, with the figures of ``foretrace ranks``."""
    steps = found.steps
    recorded, which = found.times.recorded, which_times(found.times.profiled, ran=found.times.ran)
    longest = f"the longest of {count(len(found.ranks))} ranks"
    figures = [KeyFigure("Recorded step", f"{milliseconds(recorded.step_ns)} ms", recorded.how())
               if recorded is not None else
               KeyFigure(f"{'Step' if found.times.predicted else 'Replayed'} {which}",
                         f"{milliseconds(found.step_ns)} ms", longest),
               *(KeyFigure(f"Largest over mean, {name}", f"{share:.3f}") for name, share in found.imbalance.items())]
    parts: list[Part] = [KeyFigures(figures)]
    if found.late is not None:
        parts.append(KeyFigures([KeyFigure(
            "Late because it computes longer", f"rank {found.times.number(found.late.rank)}",
            f"{milliseconds(found.late.more_ns)} ms a step more than the median rank")]))
    rows = _rank_table(found, steps)
    parts += [_bars(found, rows, steps)] if found.shows_meetings else [rows]
    if found.shows_meetings:
        parts += [_arrivals(found, steps), _groups(found, steps)]
    parts.append(_path(found))
    parts += notes_part(found.notes)
    return PageSection("ranks", "Ranks", [p for p in parts if not isinstance(p, PageTable) or p.rows], (
        "Busy is computing; exposed communication has nothing computed beside it; waiting is for the last rank to "
        "arrive at a collective."))


def _bars(found: JobReport, rows: PageTable, steps: int) -> PagePlot:
    used = {name: field for name, field in _FIELDS.items() if any(getattr(r, field) for r in found.ranks)}
    values: list[dict[str, Any]] = [
        {"rank": r.rank, "part": name, "ms": getattr(r, field) / steps / 1e6,
         "text": milliseconds(getattr(r, field) / steps), "order": i}
        for r in found.ranks for i, (name, field) in enumerate(used.items())]
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json", "width": "container",
        "height": max(120, min(18 * len(found.ranks) + 30, 560)), "data": {"values": values},
        "mark": {"type": "bar", "cornerRadius": 1},
        "encoding": {
            "y": {"field": "rank", "type": "ordinal", "title": "rank", "sort": "ascending",
                  "axis": {"labelOverlap": True, "labelAngle": 0}},
            "x": {"field": "ms", "type": "quantitative", "title": "ms a step", "stack": "zero"},
            "order": {"field": "order"},
            "color": {"field": "part", "type": "nominal", "title": None, "sort": list(used),
                      "scale": {"domain": list(used), "range": [_PARTS[name] for name in used]}},
            "tooltip": [{"field": "rank"}, {"field": "part"}, {"field": "text", "title": "ms a step"}]},
    }
    return PagePlot("rank-parts", "Each rank's step, ms", "What each rank's step consists of; the parts add up to it.",
                    spec, rows)


def _rank_table(found: JobReport, steps: int) -> PageTable:
    bubbles, late = any(r.bubble_ns for r in found.ranks), any(r.late_ns for r in found.ranks)
    name = "step" if found.times.predicted else "replayed"
    return table(
        "by-rank", "By rank, ms a step; busy to idle add up to the step",
        [Column("rank"), Column(name), Column("busy"), Column("exposed comm."), Column("waiting for ranks"),
         *([Column("bubble")] if bubbles else []), Column("idle"), Column("overlapped comm."),
         *([Column("begins later by")] if late else [])],
        ([count_cell(r.rank), *(ms_cell(ns / steps) for ns in (
            r.step_ns, r.busy_ns, r.exposed_ns, r.waiting_ns, *([r.bubble_ns] if bubbles else []), r.idle_ns,
            r.overlapped_ns, *([r.late_ns] if late else [])))] for r in found.ranks), folded=False)


def _arrivals(found: JobReport, steps: int) -> PageTable:
    rows = sorted((r for r in found.ranks if r.arrivals.last), key=lambda r: -r.arrivals.held_ns)
    return table(
        "arrivals", "Who arrives last at collectives, ms a step",
        [Column("rank"), Column("last"), Column("of"), Column("behind the last but one"),
         Column("others waited, all together"), Column("job like median", note="the job's step if the rank had the "
                                                                             "median rank's work"), Column("gain")],
        ([count_cell(r.rank), count_cell(r.arrivals.last / steps), count_cell(r.arrivals.met / steps),
          ms_cell(r.arrivals.held_ns / steps), ms_cell(r.arrivals.others_waited_ns / steps), ms_cell(r.like_median_ns),
          share_cell(None if r.like_median_ns is None else 1 - r.like_median_ns / found.step_ns)] for r in rows))


def _groups(found: JobReport, steps: int) -> PageTable:
    rows = []
    for row in found.groups:
        waited = waiting_ns(row, None)
        last = row.straggler if row.skew_ns and max(row.skew_ns) > TOGETHER_NS else None
        rows.append([
            Cell(row.group), Cell(row.kind), count_cell(row.ranks), count_cell(row.count / steps / max(row.ranks, 1)),
            number_cell(row.payload_bytes / steps / max(row.ranks, 1) / 1e6),
            ms_cell(row.transfer_ns / steps if row.matched else None),
            ms_cell(None if waited is None else waited * 1e3 / steps), ms_cell(row.exposed_ns / steps),
            ms_cell((row.kernel_ns - row.exposed_ns) / steps), number_cell(row.busbw_gbps, 1),
            Cell(f"{last[0]} ({last[1]:.0%})" if last else "–")])
    return table("groups", "Collectives by process group and kind, ms a step (means over its ranks)",
                 [text_column("group"), text_column("kind"), Column("ranks"), Column("calls"), Column("MB a rank"),
                  Column("transfer"), Column("waiting"), Column("exposed"), Column("overlapped"),
                  Column("bus GB/s"), text_column("last rank")], rows)


def _path(found: JobReport) -> PageTable:
    total = sum(s.length_ns for s in found.path) or 1
    return table(
        "rank-path", f"Path across ranks ({found.path_step}), in order",
        [Column("rank"), Column("from ms"), Column("ms"), Column("share"), text_column("takes over at"),
         text_column("mostly")],
        ([count_cell(found.times.number(s.rank)), ms_cell(s.start_ns), ms_cell(s.length_ns),
          share_cell(s.length_ns / total), s.after,
          "; ".join(f"{p.bound.label} {milliseconds(p.time_ns)} {p.operation}" for p in s.parts[:SHOWN_PARTS])]
         for s in found.path), most=200)
