"""The table of a sweep as a file, and as a plot.

The journal of a sweep has every finished point, one per line, so that an interrupted sweep can continue.

The first line identifies the sweep. A line that a killed process left incomplete is dropped, and its point predicted
again. So is the point of a damaged line, which is named in a note.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec
import pandas as pd

from step_views.exports.tables import table_columns
from step_views.sweep.space import SweepError
from tracer.input_file import DecodeError, from_json
from tracer.kept_files import OWN_FILE, check_own
from tracer.output_file import whole_file

TABLES = (".parquet", ".csv")
PLOTS = (".png", ".svg", ".pdf")
MOST_LINES = 12  # chosen


def check_table(path: str) -> None:
    """Raise ``SweepError`` if the name's ending is no known format of tables."""
    _check(path, TABLES, "A table")


def check_not_anothers(path: str) -> None:
    """Raise ``SweepError`` if the file exists and is not a sweep's table."""
    if os.path.lexists(path) and not {"step_time_us", "low_us", "high_us", "refused"} <= set(table_columns(path)):
        raise SweepError(f"{path} exists and is no table of a sweep; remove it, or name another output.")


def check_plot(path: str) -> None:
    """Raise ``SweepError`` if the name's ending is no known format of plots, or matplotlib is not installed."""
    _check(path, PLOTS, "A plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SweepError("Plots need matplotlib; install it with: pip install 'foretrace[plot]'.") from None


def write_plot(table: pd.DataFrame, axes: tuple[str, ...], path: str) -> None:
    """Plot step times with intervals over the numeric axis with most values: one line per value of the other axes.

    Raises:
        SweepError: no axis has numbers, or nothing was priced.
        ForetraceError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    draw_sweep(table, axes, figure.subplots())
    with whole_file(path) as stream:
        figure.savefig(stream, format=Path(path).suffix[1:].lower())


def draw_sweep(table: pd.DataFrame, axes: tuple[str, ...], chart: Any = None) -> Any:
    """Draw ``write_plot``'s plot into matplotlib's ``Axes`` (by default new ones) and return them. Raises
    ``SweepError`` as ``write_plot`` does, or if matplotlib is not installed."""
    priced = table[table["step_time_us"].notna()]
    numbers = [name for name in axes if pd.api.types.is_numeric_dtype(table[name]) and table[name].nunique() > 1]
    if priced.empty or not numbers:
        raise SweepError("There is nothing to plot: " + ("no point was priced." if priced.empty else
                         "no axis has several numbers; sweep a size, a factor or --world-size."))
    across = max(numbers, key=lambda name: int(table[name].nunique()))
    others = [name for name in axes if name != across and table[name].nunique() > 1]
    if chart is None:
        try:
            import matplotlib.pyplot
        except ImportError:
            raise SweepError("Plots need matplotlib; install it with: pip install 'foretrace[plot]'.") from None
        _, chart = matplotlib.pyplot.subplots(figsize=(8, 5), layout="constrained")
    for values, line in priced.groupby(others, sort=False) if others else [((), priced)]:
        if len(chart.lines) >= MOST_LINES:
            chart.set_title(f"the first {MOST_LINES} lines")
            break
        own = line.sort_values(across)
        label = ", ".join(f"{name} {value}" for name, value in zip(others, values, strict=True))
        drawn = chart.plot(own[across], own["step_time_us"] / 1e3, marker="o", label=label or None)
        chart.fill_between(own[across], own["low_us"] / 1e3, own["high_us"] / 1e3, alpha=0.15,
                           color=drawn[0].get_color())
    chart.set_xlabel(across)
    chart.set_ylabel("step time, ms (80% interval shaded)")
    chart.set_ylim(bottom=0)
    if others:
        chart.legend(fontsize="small")
    chart.grid(alpha=0.3)
    return chart


def _check(path: str, known: tuple[str, ...], what: str) -> None:
    if Path(path).suffix.lower() not in known:
        raise SweepError(f"{path} cannot be written: {what.lower()}'s name ends with {' or '.join(known)}.")


FORMAT = 1  # of the journal; to be raised if an older reader would misread a new journal
_HEAD = b'{"foretrace_sweep":'
"""The first bytes of every journal."""
SUFFIX = ".journal"


class Journal:
    """The finished points of one output file; written by one process at a time.

    Args:
        output: the table's path; the journal is in the same folder.
        about: plain values that identify the sweep; a journal with other values is refused.

    Raises:
        SweepError: the journal is of another sweep or a newer version, cannot be read or written, or is in use.
    """

    def __init__(self, output: str | os.PathLike[str], about: dict[str, Any]) -> None:
        self.path = Path(f"{os.fspath(output)}{SUFFIX}")
        self._about = about
        self.rows: dict[str, dict[str, Any]] = {}
        """Rows of the finished points by their keys."""
        self.notes: list[str] = []
        """Which lines are damaged."""
        try:
            self._file: IO[bytes] = _opened(self.path)
        except OSError as error:
            raise SweepError(f"{self.path} cannot be written ({error.strerror or error}); check the folder.") from None
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Close the file, and remove it if it has no points."""
        if not self.rows:
            self.remove()
        self._file.close()

    def add(self, rows: dict[str, dict[str, Any]]) -> None:
        """Append rows of finished points, by their keys; they are on the disk when this returns. Raises ``SweepError``
        if they cannot be written."""
        lines = b"".join(msgspec.json.encode({"key": key, "row": row}) + b"\n" for key, row in rows.items())
        self._write(lines)
        self.rows.update(rows)

    def remove(self) -> None:
        """Remove the journal, after its points were written to the table."""
        with suppress(OSError):
            self.path.unlink()

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise SweepError(f"{self.path} cannot be written ({error.strerror}); the points before are kept, and the "
                             "same command goes on from there.") from None

    def _lock(self) -> None:
        try:
            import fcntl  # not on Windows
        except ImportError:
            return
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SweepError(f"{self.path} is being written by another sweep; wait for it, or name another "
                             "output.") from None

    def _read(self) -> None:
        self._file.seek(0)
        data = self._file.read()
        if not (data.startswith(_HEAD) or _HEAD.startswith(data)):
            raise self._broken()
        whole = data[:data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if not lines:
            self._file.truncate(0)
            try:
                head = msgspec.json.encode({"foretrace_sweep": FORMAT, "about": self._about})
            except UnicodeEncodeError:
                raise SweepError("An option of this sweep is not valid UTF-8; write it in characters.") from None
            self._write(head + b"\n")
            return
        self._check(_decoded(lines[0]))
        damaged = []
        for number, line in enumerate(lines[1:], 2):
            entry = _decoded(line)
            if isinstance(entry, dict) and isinstance(entry.get("row"), dict) and "key" in entry:
                self.rows[str(entry["key"])] = entry["row"]
            else:
                damaged.append(str(number))
        if damaged:
            are, whose = ("is", "its point was") if len(damaged) == 1 else ("are", "their points were")
            named = ", ".join(damaged[:8]) + (", …" if len(damaged) > 8 else "")
            self.notes.append(f"{self.path}: line {named} {are} damaged; {whose} predicted again.")
        if len(whole) < len(data):
            self._file.truncate(len(whole))

    def _check(self, head: Any) -> None:
        if not isinstance(head, dict) or not isinstance(head.get("foretrace_sweep"), int):
            raise self._broken()
        if head["foretrace_sweep"] > FORMAT:
            raise SweepError(f"{self.path} was written by a newer foretrace; use that, or name another output.")
        theirs, ours = head.get("about"), msgspec.json.decode(msgspec.json.encode(self._about))
        if theirs != ours:
            differing = [name for name in ours if not isinstance(theirs, dict) or theirs.get(name) != ours[name]]
            raise SweepError(f"{self.path} is of a sweep with another {differing[0] if differing else 'content'}; "
                             "name another output, or remove it to start anew.")

    def _broken(self) -> SweepError:
        return SweepError(f"{self.path} is no journal of a sweep, or is damaged; remove it to start anew, or name "
                          "another output.")


def _opened(path: Path) -> IO[bytes]:
    """Open or make a journal for reading and appending. Links and pipes are refused, and so are files into which
    another user could have written points."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | OWN_FILE, 0o600), "a+b")
    try:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        check_own(found, "it")
    except OSError:
        file.close()
        raise
    return file


def _decoded(line: bytes) -> Any:
    try:
        return from_json(line)
    except DecodeError:
        return None
