"""Tables, sentences and progress bars. A command's results go to stdout, everything else to stderr."""

from __future__ import annotations

import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from step_views.cli.running import one_line, printable, standard_output, tell
from tracer import cluster, job
from tracer.free_memory import free_memory
from tracer.lazy import msgspec, rich_box, rich_console, rich_progress, rich_table, rich_text

PLAIN_WIDTH = 100
"""Width of output in a file or pipe, characters; on a terminal the terminal's own width, at most 160."""
_PIECE = 1 << 14  # chosen: characters that a reader takes in one write
MOST_NOTES = 60
"""Number of notes that are shown."""
MOST_ROWS = 500
"""Number of a table's rows that are shown: the layout of a row takes about 1 ms."""
_UNPRINTABLE = re.compile(r"[^\x00-\x7e]")
NARROWEST = 12
"""Least length to which a name is cut."""


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column. Numbers are aligned right and never cut; names are cut if the line is too long.

    A ``path`` keeps its end, other names their beginning; a ``whole`` name, which users may type, is never cut.
    """

    title: str
    name: bool = False
    path: bool = False
    whole: bool = False


class Report:
    """Writes a command's tables and sentences to stdout."""

    def __init__(self) -> None:
        self.console = rich_console.Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
        self.console.on_broken_pipe = _reader_gone  # type: ignore[method-assign]
        self.width = min(self.console.width, 160) if self.console.is_terminal else PLAIN_WIDTH

    def table(self, title: str, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        """Print a table with its title, at most the first ``MOST_ROWS``; a table without rows is left out."""
        left = iter(rows)
        cells = [[one_line(cell) for cell in row] for row in islice(left, MOST_ROWS)]
        if not cells:
            return
        cells = _fitted(columns, cells, self.width)
        self.line()
        self.line(title, style="bold")
        # On a narrow terminal, a line that is too long is better than a number that is cut.
        self.console.width = max(self.width, sum(_widths(columns, cells)) + 2 * (len(columns) - 1))
        with standard_output():
            self.console.print(_table(columns, cells), crop=False)
        if more := sum(1 for _ in left):
            self.line(f"… and {more:,} rows more (--json has them).")

    def line(self, text: str = "", *, indent: int = 0, style: str = "") -> None:
        """Print one sentence, wrapped; lines after the first are indented by ``indent`` spaces."""
        lines = textwrap.wrap(printable(text), self.width, subsequent_indent=" " * indent, break_long_words=False,
                              break_on_hyphens=False) or [""]
        self.console.width = max(self.width, *map(len, lines))
        with standard_output():
            self.console.print(rich_text.Text("\n".join(lines), style=style))

    def notes(self, notes: Iterable[str]) -> None:
        """Print different sentences as a list of notes; at most the first ``MOST_NOTES``."""
        found = list(dict.fromkeys(notes))
        for i, note in enumerate(found[:MOST_NOTES]):
            if i == 0:
                self.line()
            self.line(f"Note: {note}", indent=6)
        if len(found) > MOST_NOTES:
            self.line(f"… and {len(found) - MOST_NOTES:,} notes more (--json has them).")

    def timeline(self, path: str | None) -> None:
        """Print where a timeline was written, if one was."""
        if path is not None:
            self.line()
            self.line(f"Timeline written to {path}: open it in ui.perfetto.dev or chrome://tracing.")


def _reader_gone() -> None:
    """Raise ``BrokenPipeError``; rich would end the process here, because the pipe's reader is gone."""
    raise BrokenPipeError


def _table(columns: Sequence[Column], cells: list[list[str]]) -> rich_table.Table:
    # Two spaces between columns: one of padding, one of the (invisible) divider.
    table = rich_table.Table(box=rich_box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.title, justify="left" if column.name else "right", vertical="bottom")
    for row in cells:
        table.add_row(*(rich_text.Text(cell, no_wrap=True) for cell in row))
    return table


def _title_width(column: Column) -> int:
    return max(len(word) for word in column.title.split("\n"))


def _widths(columns: Sequence[Column], cells: list[list[str]]) -> list[int]:
    return [max(_title_width(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]


def _fitted(columns: Sequence[Column], cells: list[list[str]], width: int) -> list[list[str]]:
    """Shorten names, in the longest columns first, until the table is no wider than ``width``."""
    widths = _widths(columns, cells)
    names = [i for i, column in enumerate(columns) if column.name and not column.whole]
    excess = sum(widths) + 2 * (len(columns) - 1) - width
    while excess > 0 and names:
        longest = max(names, key=lambda i: widths[i])
        others = [widths[i] for i in names if i != longest]
        # Cut down to the next longest column of names; from there on, both are cut.
        cut = min(excess, max(1, widths[longest] - max(others, default=0)))
        target = max(widths[longest] - cut, NARROWEST, _title_width(columns[longest]))
        if target == widths[longest]:
            break
        excess -= widths[longest] - target
        widths[longest] = target
    return [[shortened(cell, widths[i], keep_end=columns[i].path) if columns[i].name else cell
             for i, cell in enumerate(row)] for row in cells]


def shortened(text: str, width: int, *, keep_end: bool = False) -> str:
    """Shorten a text to ``width`` characters: drop a leading ``void``, then cut its end (or start: ``keep_end``)."""
    if len(text) > width:
        text = text.removeprefix("void ")
    if len(text) <= width:
        return text
    kept = max(width - 1, 0)
    return "…" + text[len(text) - kept:] if keep_end else text[:kept] + "…"


def print_json(value: Any) -> None:
    """Print a value as JSON (NaN and infinities as null)."""
    text = msgspec.json.format(msgspec.json.encode(_encodable(value)), indent=2).decode("utf-8") + "\n"
    text = _UNPRINTABLE.sub(_json_escape, text)
    # In pieces, because during one long unbuffered write it does not show that the reader has left.
    with standard_output():
        for at in range(0, len(text), _PIECE):
            sys.stdout.write(text[at:at + _PIECE])


def _json_escape(found: re.Match[str]) -> str:
    """Return the JSON escape of a terminal's control character; JSON itself only escapes those below a space."""
    character = found.group()
    if character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _encodable(value: Any) -> Any:
    """Return the value with valid Unicode in every text: half of a surrogate pair in a trace's name is replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(part) for key, part in value.items()}
    return [_encodable(part) for part in value] if isinstance(value, list) else value


def read(paths: list[str], window: int = 0, workers: str = "local", *,
         step_region: str | None = None, cycle: int | None = None) -> job.Job:
    """Read the job, with a progress bar on a terminal; ``workers`` read its traces.

    ``window`` is the number of a window in a capture. If ``step_region`` is given, the steps are the regions of this
    name; ``cycle`` of these regions are one step.
    """

    with cluster.open_workers(workers) as found:
        made = _read(paths, window, found, step_region, cycle)
    events = sum(len(graph.ops) + len(graph.launches) + len(graph.kernels) for graph in made.graphs)
    if events >= MANY_EVENTS and (said := too_large(events, free_memory())):
        tell(f"Warning: {said}")
    return made


MANY_EVENTS = 500_000
"""Number of operations, launches and kernels above which free memory is checked; commands on fewer use about 0.5 GB."""
BYTES_AN_EVENT = {"predict": 570, "report": 700, "opportunities": 780}
"""Peak memory, bytes per event: the most of recordings with 1.25 and 5 M events (``benchmarks/event_memory.py``)."""


def too_large(events: int, free: float | None) -> str:
    """Return advice if commands probably need more than the free memory; otherwise an empty text."""
    most = events * max(BYTES_AN_EVENT.values())
    if free is None or most <= free:
        return ""
    each = ", ".join(f"{name} {events * size / 1e9:.1f}" for name, size in BYTES_AN_EVENT.items())
    return (f"This recording has {events / 1e6:,.1f} million events and {free / 1e9:.1f} GB of memory are free; it "
            f"takes some GB: {each}. If that is too much, give fewer ranks or record fewer steps.")


def _read(paths: list[str], window: int, workers: cluster.TaskWorkers, step_region: str | None,
          cycle: int | None) -> job.Job:
    if not sys.stderr.isatty():
        return job.read_job(paths, window=window, workers=workers, step_region=step_region, cycle=cycle)

    # A separate thread that draws the bar would prevent forked reading processes (see ``forked.cores``).
    columns = (rich_progress.TextColumn("Reading"), rich_progress.BarColumn(), rich_progress.DownloadColumn(),
               rich_progress.TimeRemainingColumn())
    with rich_progress.Progress(*columns, console=rich_console.Console(stderr=True), transient=True,
                                auto_refresh=False) as bar:
        task = bar.add_task("Reading", total=None)
        return job.read_job(paths, window=window, workers=workers, progress=_drawn(bar, task), step_region=step_region,
                            cycle=cycle)


def _drawn(bar: rich_progress.Progress, task: rich_progress.TaskID) -> Callable[[int, int], None]:
    """Return a function of a task's bytes done and all bytes; it draws the bar at most ten times a second."""
    due = 0.0

    def show(done: int, total: int) -> None:
        nonlocal due
        bar.update(task, completed=done, total=total or None)
        if (now := time.monotonic()) >= due:
            due = now + 0.1
            bar.refresh()

    return show


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show on a terminal that work is in progress."""
    if not sys.stderr.isatty():
        yield
        return

    with rich_console.Console(stderr=True).status(rich_text.Text(printable(text))):
        yield


class ProgressLine:
    """One line on a terminal that is overwritten; elsewhere separate lines. Warnings always remain."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._open = False

    def say(self, text: str) -> None:
        """Show a line."""
        passing = " s: " in text or text.startswith(("fitting ", "round "))
        if self._on_terminal and passing:
            sys.stderr.write(f"\r\x1b[2K{one_line(text)}")
            self._open = True
        else:
            self.end()
            tell(text)
        sys.stderr.flush()

    def end(self) -> None:
        """End the line."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False
