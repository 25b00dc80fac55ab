"""The parts of a page: sections of figures, tables, plots and timelines. ``page`` turns them into HTML.

Python writes the text of cells, so a figure on a page equals the command line's to the last digit. Cells also carry the
numbers that a browser sorts by and draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from graph_predictor.figures import count, microseconds, milliseconds, percent, signed_milliseconds
from step_views.pages.events import PackedColumns

STATIC_ROWS = 12
"""Longest table that is plain HTML; longer tables can be sorted, filtered and paged."""
MOST_ROWS = 1_000
"""Most rows of a table; further rows are left out, and the page says so."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A text with its number (``None``: sorted as text) and a share that is drawn as a bar."""

    text: str
    number: float | None = None
    share: float | None = None


def ms_cell(ns: float | None) -> Cell:
    """Return a time in ms."""
    return Cell("–") if ns is None else Cell(milliseconds(ns), ns)


def us_cell(ns: float | None) -> Cell:
    """Return a time in µs."""
    return Cell("–") if ns is None else Cell(microseconds(ns), ns)


def share_cell(share: float | None) -> Cell:
    """Return a share with a bar."""
    return Cell(percent(share), share, share)


def count_cell(number: float | None) -> Cell:
    """Return a count."""
    return Cell("–") if number is None else Cell(count(number), number)


def number_cell(number: float | None, digits: int = 2) -> Cell:
    """Return a cell with a number rounded to ``digits`` decimals, or a dash for ``None``."""
    return Cell("–") if number is None else Cell(f"{number:,.{digits}f}", number)


def signed_cell(ns: float) -> Cell:
    """Return a difference of times in ms."""
    return Cell(signed_milliseconds(ns), ns)


@dataclass(frozen=True, slots=True)
class PageColumn:
    """A table's column: its title, whether it holds numbers, and a note on it."""

    title: str
    number: bool = True
    note: str = ""
    path: bool = False
    """Whether a long text is shortened at its beginning, because its end matters."""


def text_column(title: str, note: str = "", *, path: bool = False) -> PageColumn:
    """Return a column of names."""
    return PageColumn(title, number=False, note=note, path=path)


@dataclass(frozen=True, slots=True)
class PageTable:
    """Rows of cells under a caption; ``total`` is the number of rows before any were left out."""

    kind: ClassVar[str] = "table"
    key: str
    caption: str
    columns: Sequence[PageColumn]
    rows: Sequence[Sequence[Cell]]
    total: int
    note: str = ""
    folded: bool = False
    """Whether the table is hidden at first, because a plot shows its content."""
    page: int = STATIC_ROWS
    """Rows of a long table that are visible at once."""

    @property
    def static(self) -> bool:
        """Return whether the table is short enough to be plain HTML."""
        return len(self.rows) <= STATIC_ROWS

    def data(self) -> dict[str, Any]:
        """Return a long table's content for the browser: texts, and by column the numbers to sort by and the shares."""
        columns = [[row[i] for row in self.rows] for i in range(len(self.columns))]
        return {
            "page": self.page, "path": [column.path for column in self.columns],
            "titles": [column.title for column in self.columns], "number": [column.number for column in self.columns],
            "rows": [[cell.text for cell in row] for row in self.rows],
            "order": [[cell.number for cell in cells] if any(cell.number is not None for cell in cells) else None
                      for cells in columns],
            "share": [[cell.share for cell in cells] if any(cell.share is not None for cell in cells) else None
                      for cells in columns]}


def table(key: str, caption: str, columns: Sequence[PageColumn], rows: Iterable[Sequence[Cell | str]], *,
          note: str = "", folded: bool = False, most: int = MOST_ROWS, page: int = STATIC_ROWS) -> PageTable:
    """Return a table of the first ``most`` rows; plain texts become cells."""
    cells = [[Cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    if len(cells) > most:
        note = " ".join(filter(None, [note, f"The first {most:,} of {len(cells):,} rows."]))
    return PageTable(key, caption, columns, cells[:most], len(cells), note, folded, page)


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """A prominent figure: its name, its text, and a detail."""

    name: str
    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class KeyFigures:
    """Figures side by side."""

    kind: ClassVar[str] = "figures"
    figures: Sequence[KeyFigure]


@dataclass(frozen=True, slots=True)
class IntervalBar:
    """A time with its interval, drawn to scale with marks at measured times (ns)."""

    kind: ClassVar[str] = "interval"
    label: str
    low_ns: float
    value_ns: float
    high_ns: float
    marks: Sequence[tuple[str, float]] = ()

    @property
    def scale(self) -> tuple[float, float]:
        """The drawn range, ns: all drawn times, plus 12% of their range on either side."""
        every = [self.low_ns, self.high_ns, self.value_ns, *(ns for _, ns in self.marks)]
        low, high = min(every), max(every)
        margin = 0.12 * max(high - low, 1e-3 * high, 1.0)
        return low - margin, high + margin

    def at(self, ns: float) -> str:
        """Return the position of a time, in percent of the width."""
        low, high = self.scale
        return f"{(ns - low) / (high - low) * 100:.3f}"

    def text(self, ns: float) -> str:
        """Return a time in ms."""
        return milliseconds(ns)


@dataclass(frozen=True, slots=True)
class Stack:
    """Parts of a whole as one bar, with their texts: (name, text, share, colour)."""

    kind: ClassVar[str] = "stack"
    caption: str
    parts: Sequence[tuple[str, str, float, str]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Numbers and what they count, on one line."""

    kind: ClassVar[str] = "facts"
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Prose:
    """Paragraphs."""

    kind: ClassVar[str] = "prose"
    paragraphs: Sequence[str]


@dataclass(frozen=True, slots=True)
class PageNotes:
    """Notes and warnings; many of them are folded."""

    kind: ClassVar[str] = "notes"
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class PagePlot:
    """A Vega or Vega-Lite plot; ``description`` says in words what it shows, ``table`` has its content."""

    kind: ClassVar[str] = "plot"
    key: str
    caption: str
    description: str
    spec: dict[str, Any]
    table: PageTable | None = None
    vega: bool = False


@dataclass(frozen=True, slots=True)
class TrackEvents:
    """A timeline of packed events (``events``), with caption, description and note."""

    kind: ClassVar[str] = "timeline"
    key: str
    caption: str
    description: str
    columns: PackedColumns
    note: str = ""


Part = KeyFigures | IntervalBar | Stack | Facts | Prose | PageNotes | PageTable | PagePlot | TrackEvents


@dataclass(frozen=True, slots=True)
class PageSection:
    """One section of a page."""

    key: str
    title: str
    parts: Sequence[Part]
    lead: str = ""


@dataclass(slots=True)
class ReportPage:
    """A page: its title, a headline that states the result, and its sections; sections without parts are not shown."""

    title: str
    headline: str
    sections: list[PageSection] = field(default_factory=list)
