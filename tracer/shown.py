"""``Shown``: results that are pleasant in a notebook: one line as text, a table as HTML, tables as DataFrames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from tracer.charts import Chart


def frame_of(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Return rows as a DataFrame; pandas is imported only here, as most commands need none."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=columns)


class Shown(ABC):
    """A result with a headline and tables."""

    __slots__ = ()

    @abstractmethod
    def headline(self) -> str:
        """Say the result in one line."""

    @abstractmethod
    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Make its tables, by name; the first is what a notebook shows."""

    def to_pandas(self, table: str | None = None) -> pd.DataFrame:
        """Return a table as a DataFrame; the first by default.

        Raises:
            KeyError: there is no such table; the message lists those that are.
        """
        tables = self.tables()
        if table is None:
            return next(iter(tables.values()))()
        if table not in tables:
            raise KeyError(f"{table!r} is no table; tables are: {', '.join(tables)}")
        return tables[table]()

    def chart(self) -> Chart:
        """Return what ``plot`` draws: by default bars of the first table's first numbers.

        Raises:
            ForetraceError: there is nothing to plot.
        """
        from tracer.charts import table_chart

        return table_chart(self.to_pandas(), self.headline())

    def plot(self, ax: Any = None) -> Any:
        """Draw the result with matplotlib, its intervals with it.

        Args:
            ax: matplotlib's ``Axes`` to draw into; by default new ones.

        Returns:
            The ``Axes``.

        Raises:
            ForetraceError: matplotlib is not installed, or there is nothing to plot.
        """
        from tracer.charts import draw

        return draw(self.chart(), ax)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline()}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the headline and the first table's first rows."""
        import html

        first = self.to_pandas().head(12).to_html(index=False, border=0, float_format="{:,.3f}".format)
        return f"<p><b>{html.escape(self.headline())}</b></p>{first}"
