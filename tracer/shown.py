"""Results for people: one line of text, a table in HTML, DataFrames, and charts with matplotlib."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracer.errors import ForetraceError
from tracer.lazy import pandas as pd

MOST_BARS = 15  # chosen: more names are unreadable
_INTERVAL = "80% interval"


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """One row of numbers: ``low`` and ``high`` are the ends of their intervals, NaN where there is none."""

    name: str
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: horizontal "bars" by label, "lines" over numbers, or stacked "areas" over numbers."""

    kind: str
    title: str
    across: Sequence[Any]
    """Labels of bars, or the numbers on the horizontal axis of lines and areas."""
    series: Sequence[ChartSeries]
    unit: str
    across_name: str = ""
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)
    """Values at which a line is drawn, with its name."""


def table_chart(table: pd.DataFrame, title: str) -> Chart:
    """Return a chart of a table's first column of numbers as bars, labelled by its first column of texts.

    Raises:
        ForetraceError: it has no rows, or no numbers.
    """
    numbers = [name for name in table.columns if table[name].dtype.kind in "iuf" and name != "rank"]
    if table.empty or not numbers:
        raise ForetraceError("There is nothing to plot: the result's first table has no rows, or no numbers.")
    texts = [name for name in table.columns if table[name].dtype.kind not in "iufb"]
    value = numbers[0]
    shown = table.head(MOST_BARS)
    labels = [str(text) for text in (shown[texts[0]] if texts else shown.index)]
    return Chart("bars", title, labels, [ChartSeries(str(value), [float(each) for each in shown[value]])], str(value))


def time_chart(tables: Sequence[tuple[Any, Any]], title: str, what: str) -> Chart:
    """Return a chart of the names with the most time in tables of graphs, as bars. Each entry is (graph, table with
    ``name`` and ``duration_ns``)."""
    sums: dict[str, int] = {}
    for graph, table in tables:
        for code, time in zip(table.name.tolist(), table.duration_ns.tolist(), strict=True):
            name = graph.string(code)
            sums[name] = sums.get(name, 0) + time
    largest = sorted(sums.items(), key=lambda each: -each[1])[:MOST_BARS]
    return Chart("bars", title, [name for name, _ in largest], [ChartSeries(what, [ns / 1e6 for _, ns in largest])],
                 f"ms in the window ({what})")


def draw(chart: Chart, ax: Any = None) -> Any:
    """Draw a chart, into matplotlib's ``ax`` if one is given; return the ``Axes``.

    Raises:
        ForetraceError: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot
    except ImportError:
        raise ForetraceError("Plots need matplotlib, which is not installed: pip install 'foretrace[plot]'.") from None
    if ax is None:
        _, ax = matplotlib.pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    {"bars": _bars, "lines": _lines, "areas": _areas}[chart.kind](chart, ax)
    for value, name in chart.marks:
        (ax.axvline if chart.kind == "bars" else ax.axhline)(value, linestyle="--", color="grey", label=name)
    ax.set_title(chart.title, fontsize="medium", wrap=True)
    ax.grid(alpha=0.3)
    if len(chart.series) > 1 or chart.marks or any(each.low is not None for each in chart.series):
        ax.legend(fontsize="small")
    return ax


def _bars(chart: Chart, ax: Any) -> None:
    count, height = len(chart.across), 0.8 / len(chart.series)
    for number, each in enumerate(chart.series):
        places = [row + (number - (len(chart.series) - 1) / 2) * height for row in range(count)]
        ax.barh(places, each.values, height=height, label=each.name)
        if each.low is not None and each.high is not None:
            ax.errorbar(each.values, places, xerr=_around(each), fmt="none", ecolor="black", capsize=3, label=_INTERVAL)
    ax.set_yticks(range(count), [_short(label) for label in chart.across])
    ax.invert_yaxis()
    ax.set_xlabel(chart.unit)
    ax.set_ylabel(chart.across_name)


def _lines(chart: Chart, ax: Any) -> None:
    for each in chart.series:
        (line,) = ax.plot(chart.across, each.values, marker="o", label=each.name)
        if each.low is not None and each.high is not None:
            ax.fill_between(chart.across, each.low, each.high, alpha=0.2, color=line.get_color(),
                            label=f"{_INTERVAL} of {each.name}")
    ax.set_xlabel(chart.across_name)
    ax.set_ylabel(chart.unit)
    ax.set_ylim(bottom=0)


def _areas(chart: Chart, ax: Any) -> None:
    ax.stackplot(chart.across, *(each.values for each in chart.series), labels=[each.name for each in chart.series],
                 step="post")
    ax.set_xlabel(chart.across_name)
    ax.set_ylabel(chart.unit)
    ax.set_ylim(bottom=0)


def _around(each: ChartSeries) -> list[list[float]]:
    """Return the distances from values to the ends of their intervals, in matplotlib's form."""
    assert each.low is not None and each.high is not None
    return [[max(value - low, 0.0) for value, low in zip(each.values, each.low, strict=True)],
            [max(high - value, 0.0) for value, high in zip(each.values, each.high, strict=True)]]


def _short(label: object, most: int = 48) -> str:
    """Return a shortened label in which dollar signs do not start a formula of matplotlib."""
    text = str(label).replace("$", r"\$")
    return text if len(text) <= most else f"{text[:most - 1]}…"


def frame_of(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Return rows as a DataFrame; pandas is imported only here, since most commands need no DataFrames."""
    return pd.DataFrame(list(rows), columns=columns)


class Shown(ABC):
    """A result with a headline and tables."""

    __slots__ = ()

    @abstractmethod
    def headline(self) -> str:
        """Return the result in one line."""

    @abstractmethod
    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return makers of the result's tables, by name; a notebook shows the first."""

    def to_pandas(self, table: str | None = None) -> pd.DataFrame:
        """Return a table as a DataFrame; the first by default.

        Raises:
            KeyError: there is no such table; the message lists the tables.
        """
        tables = self.tables()
        if table is None:
            return next(iter(tables.values()))()
        if table not in tables:
            raise KeyError(f"{table!r} is no table; tables are: {', '.join(tables)}")
        return tables[table]()

    def chart(self) -> Chart:
        """Return the chart that ``plot`` draws: by default bars of the first numbers in the first table.

        Raises:
            ForetraceError: there is nothing to plot.
        """
        return table_chart(self.to_pandas(), self.headline())

    def plot(self, ax: Any = None) -> Any:
        """Draw the result and its intervals with matplotlib.

        Args:
            ax: matplotlib's ``Axes`` to draw into; by default new ones.

        Returns:
            The ``Axes``.

        Raises:
            ForetraceError: matplotlib is not installed, or there is nothing to plot.
        """
        return draw(self.chart(), ax)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline()}>"

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook: the headline and the first table's first rows."""
        first = self.to_pandas().head(12).to_html(index=False, border=0, float_format="{:,.3f}".format)
        return f"<p><b>{html.escape(self.headline())}</b></p>{first}"
