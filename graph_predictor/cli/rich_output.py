"""The terminal as rich writes to it; a module of its own, so that ``--help`` does not wait for rich to be imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


class RichOutput(Console):
    """Rich's console without its own way of ending the process when the reader has gone."""

    def on_broken_pipe(self) -> None:
        """Say that the reader has gone."""
        raise BrokenPipeError

    def print_table(self, columns: Iterable[tuple[str, bool]], rows: Iterable[Sequence[str]]) -> None:
        """Print rows of cells below the titles of their columns, those of names set left, others right."""
        # Two spaces between columns: one of padding, one of the (invisible) divider.
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for title, name in columns:
            table.add_column(title, justify="left" if name else "right", vertical="bottom")
        for row in rows:
            table.add_row(*(Text(cell, no_wrap=True) for cell in row))
        self.print(table, crop=False)

    def print_text(self, text: str, style: str = "") -> None:
        """Print text as it is, in a style."""
        self.print(Text(text, style=style))
