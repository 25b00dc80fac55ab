"""Tables of users: CSV, TSV, JSON lines and Parquet, read as what their names say, or refused in one sentence.

This is the one reader of users' tables. An error begins with the place, ``runs.csv, line 3, column step_ms``, and ends
with what to do. Parquet is read only if it holds no more than its bytes can: a few bytes may encode billions of
equal cells.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice, repeat
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tracer.errors import ForetraceError, reason_of
from tracer.guard import FREE_CELLS, GROWTH, MOST_COLUMNS, DecodeError, check_cells
from tracer.input_file import PathLike, open_anywhere, why_unopened
from tracer.lazy import compute, pandas, parquet, pyarrow

FORMATS = {".csv": "CSV", ".tsv": "TSV", ".jsonl": "JSON lines", ".parquet": "Parquet"}
"""Formats by the ending of a file's name."""
TABLES = (".csv", ".parquet")
"""Kinds that are read unless others are named."""
_PARQUET = b"PAR1"
_OTHERS = {
    b"\x1f\x8b": "is compressed (gzip); unpack it, and give the table in it",
    b"PK\x03\x04": "is a zip archive or an Excel sheet; save its table as CSV",
    b"version https://git-lfs": "is a pointer of Git LFS, not the table itself; fetch it with: git lfs pull",
}
"""First bytes of what users give for tables: what it is, and what to do."""
_NOT_UTF8 = "{name} is named as {format} and is no text in UTF-8; save it in UTF-8."
_HEAD_BYTES = 4096  # chosen: enough lines to tell text from another format
_REASON = 120  # chosen: part of a sentence
_MORE_FIELDS = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")
_KEY = re.compile(rb'"[^"\\]*"(?=\s*:)')
_LONG_LINE = re.compile(rb'^[^"\n]{%d,}$' % MOST_COLUMNS, re.MULTILINE)
"""A line that may have too many cells; in quotes a separator ends none."""
_OPEN_QUOTE = re.compile(r"EOF inside string starting at row (\d+)")


class TableInputError(ForetraceError):
    """A table cannot be read, or one of its rows cannot be what it says."""


class TableRow(NamedTuple):
    """A row of a user's table: where it stands, for errors, and its cells by column."""

    where: str
    cells: Mapping[Any, Any]

    def text(self, column: str, needed: bool = False) -> str:
        """Return a cell's text, empty where the cell or its column is. Raises ``TableInputError``: it is ``needed``."""
        value = self.cells.get(column)
        text = "" if value is None or value != value else str(value).strip()
        if needed and not text:
            raise TableInputError(f"{self.where}, column {column}: the cell is empty; fill it, or remove the row.")
        return text

    def whole(self, column: str, what: str = "whole number from 1") -> int:
        """Return a number from 1. Raises ``TableInputError``: the cell holds none."""
        text = self.text(column).removesuffix(".0")
        if not (text.isascii() and text.isdecimal() and 0 < len(text) < 8 and int(text)):
            raise cell_error(self.where, column, self.cells.get(column), what)
        return int(text)

    def positive_ms(self, column: str) -> float:
        """Return a time. Raises ``TableInputError``: the cell holds none."""
        try:
            value = float(self.cells[column])
        except (TypeError, ValueError):
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise cell_error(self.where, column, self.cells[column], "positive number of milliseconds")
        return value


def cell_error(where: str, column: str, value: object, what: str) -> TableInputError:
    """Return the error of a cell that is no ``what``, in a row at ``where``."""
    return TableInputError(f"{where}, column {column}: {str(value)[:40]!r} is no {what}; correct the cell, or remove "
                           "the row.")


def place(path: PathLike, row: int, comment: str | None = None) -> str:
    """Return where a row stands, counted from 0: "runs.csv, line 3", or "runs.parquet, row 2", which has no lines."""
    return next(islice(_places(path, comment), row, None))


def _places(path: PathLike, comment: str | None = None) -> Iterator[str]:
    """Yield where each row stands; lines as an editor counts them, with blank ones, and lines within quotes."""
    name = os.fspath(path)
    ending = PurePath(name).suffix.lower()
    if ending == ".parquet":
        yield from (f"{name}, row {number}" for number in count(1))
    quotes, names = 0, ending != ".jsonl"
    with open_anywhere(name)[0] as stream:
        for number, line in enumerate(stream, 1):
            begins = quotes % 2 == 0 and line.strip() and not (comment and line.startswith(comment.encode()))
            quotes += line.count(b'"') if ending != ".jsonl" else 0
            if begins and not names:
                yield f"{name}, line {number}"
            names = names and not begins
    yield from repeat(name)  # lines that end in another way are not counted


def read_rows(path: PathLike, needed: Iterable[str], what: str, page: str) -> list[TableRow]:
    """Return the rows of a user's table that has some columns.

    Args:
        path: as ``read_frame`` takes it.
        needed: columns without which it is none.
        what: the table is of, for the error.
        page: of the documentation that explains its columns.

    Raises:
        TableInputError: it cannot be read, lacks a column or has no row.
    """
    frame = read_frame(path)
    if lacking := [name for name in needed if name not in frame]:
        raise TableInputError(f"{path} is no table of {what}: it lacks the column {lacking[0]} (it has "
                              f"{', '.join(map(str, frame.columns[:6]))}); see {page}.")
    if not len(frame):
        raise TableInputError(f"{path} is an empty table; there is nothing to learn from it.")
    return [TableRow(where, cells) for where, cells in zip(_places(path), frame.to_dict("records"), strict=False)]


def read_cells(path: PathLike) -> list[dict[str, Any]]:
    """Return the rows of a table as they are written: texts of CSV, values (lists too) of Parquet. Raises
    ``TableInputError``: it cannot be read."""
    frame = read_frame(path, as_written=True)
    return [{str(name).strip(): cell.strip() if isinstance(cell, str) else cell for name, cell in row.items()}
            for row in frame.to_dict("records")]


def read_frame(path: PathLike, known: tuple[str, ...] = TABLES, *, comment: str | None = None,
               as_written: bool = False) -> pandas.DataFrame:
    """Return a user's table.

    Args:
        path: A local file or an fsspec URL; its ending says its format.
        known: Endings of formats that are read here.
        comment: Sign at which the rest of a line of text is left out.
        as_written: Cells of text stay texts, and are not read as numbers.

    Raises:
        TableInputError: It cannot be read; the sentence says what happened, the likely cause and what to do.
    """
    name = os.fspath(path)
    ending = PurePath(name).suffix.lower()
    try:
        with open_anywhere(name)[0] as stream:
            head = stream.read(_HEAD_BYTES)
            _check_content(name, head, ending, known)
            stream.seek(0)
            # From the open file: a path would be searched for partition=value folders.
            return _read(name, stream, ending, comment, as_written)
    except ForetraceError:
        raise
    except Exception as error:  # a URL's back end raises types of its own
        raise TableInputError(why_unopened(name, error)) from error


def _check_content(name: str, head: bytes, ending: str, known: tuple[str, ...]) -> None:
    """Refuse what is another thing than the file's name says."""
    if not head:
        raise TableInputError(f"{name} is an empty file, without a line of column names; was it written whole? "
                              "Write the table again.")
    for begin, what in _OTHERS.items():
        if head.startswith(begin):
            raise TableInputError(f"{name} {what}.")
    parquet = head.startswith(_PARQUET)
    if ending not in known:
        found = " (it holds Parquet: name it .parquet)" if parquet else ""
        raise TableInputError(f"{name} does not say by its name what table it is{found}; give a file whose name "
                              f"ends with {_either(list(known))}.")
    if parquet and ending != ".parquet":
        raise TableInputError(f"{name} is named as {FORMATS[ending]} and holds Parquet; rename it to end with "
                              ".parquet.")
    if ending == ".parquet" and not parquet:
        what = "text; if it is CSV, rename it to end with .csv" if _is_text(head) else "something else; name the table"
        raise TableInputError(f"{name} is named as Parquet and holds {what}.")
    if ending != ".parquet" and not _is_text(head):
        raise TableInputError(_NOT_UTF8.format(name=name, format=FORMATS[ending]))


def _without_categories(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return a table whose columns are plain values: a dictionary, as Parquet may store a column, is its writer's.

    Readers would group such a column by values that no row has.
    """
    for place, dtype in enumerate(frame.dtypes):
        if isinstance(dtype, pandas.CategoricalDtype):
            frame.isetitem(place, np.asarray(frame.iloc[:, place]))
    return frame


def _read(name: str, stream: BinaryIO, ending: str, comment: str | None, as_written: bool) -> pandas.DataFrame:
    if ending == ".parquet":
        try:
            table = read_parquet(stream)
            if as_written:
                return pandas.DataFrame(table.to_pylist(), dtype=object)
            return _without_categories(table.to_pandas())
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            stream.seek(-min(len(_PARQUET), stream.seek(0, os.SEEK_END)), os.SEEK_END)
            whole = stream.read() == _PARQUET
            why = reason_of(error, _REASON) if whole else "its end is missing"
            raise TableInputError(f"{name} is a damaged Parquet file ({why}): was it copied whole? Write or fetch "
                             "it again.") from error
    separator = "\t" if ending == ".tsv" else ","
    try:
        _check_cells(stream, ending, separator)
        if ending == ".jsonl":
            return pandas.read_json(stream, lines=True)
        frame = pandas.read_csv(stream, sep=separator, comment=comment, encoding="utf-8-sig", low_memory=False,
                                dtype=str if as_written else None, na_filter=not as_written)
        if not isinstance(frame.index, pandas.RangeIndex):  # pandas takes what is too much for the rows' names
            raise TableInputError(f"{place(name, 0, comment)}: it has more cells than the first line has names; put "
                                  "texts that hold the separator in quotes, or name every column.")
    except pandas.errors.EmptyDataError:
        raise TableInputError(f"{name} is empty: it has no line of column names; was it written whole? Write the table "
                              "again.") from None
    except UnicodeError as error:
        raise TableInputError(_NOT_UTF8.format(name=name, format=FORMATS[ending])) from error
    except (ValueError, OverflowError, RecursionError, DecodeError) as error:  # pandas' errors are ValueErrors
        raise TableInputError(f"{name} cannot be read as {FORMATS[ending]}: {_why_unparsed(error)}.") from error
    other = next((each for each in ";\t," if each != separator and each in str(frame.columns[0])), None)
    if len(frame.columns) == 1 and other is not None:
        named = {";": "semicolons", "\t": "tabs", ",": "commas"}
        raise TableInputError(f"{name} separates its columns by {named[other]}, where {FORMATS[ending]} has "
                              f"{named[separator]}; save it with {named[separator]}.")
    return frame


def _check_cells(stream: BinaryIO, ending: str, separator: str) -> None:
    """Raise ``DecodeError`` where the rows of a text, each with all columns, are more cells than its bytes hold."""
    data = stream.read()
    stream.seek(0)
    if ending == ".jsonl":
        columns = len(set(_KEY.findall(data)))
    else:
        columns = data.partition(b"\n")[0].count(separator.encode()) + 1
    if columns > MOST_COLUMNS:
        raise DecodeError(f"it has {columns:,} columns, and measurements have at most {MOST_COLUMNS:,}")
    check_cells(data.count(b"\n") + 1, columns, len(data))
    # What a row has beyond its columns is refused after parsing too, which takes a minute for 300,000 cells.
    for line in _LONG_LINE.finditer(data) if ending != ".jsonl" else ():
        if (cells := line[0].count(separator.encode()) + 1) > MOST_COLUMNS:
            number = data.count(b"\n", 0, line.start()) + 1
            raise DecodeError(f"line {number:,} has {cells:,} cells, and "
                              f"measurements have at most {MOST_COLUMNS:,}")


def _is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are UTF-8; its last character may be cut."""
    try:
        io.TextIOWrapper(io.BytesIO(head[:-3] if len(head) == _HEAD_BYTES else head), "utf-8").read()
    except UnicodeError:
        return len(head) == _HEAD_BYTES and _is_text(head[:-4])
    return b"\0" not in head


def _why_unparsed(error: Exception) -> str:
    """Say why a text is no table, as a clause with what to do."""
    text = str(error)
    if found := _MORE_FIELDS.search(text):
        fields, line, seen = found.groups()
        return (f"line {line} has {seen} fields where those before have {fields}; put texts that hold the separator "
                "in quotes, or mend the line")
    if found := _OPEN_QUOTE.search(text):
        return f"a quotation mark is opened in line {int(found.group(1)) + 1} and never closed; mend the line"
    return f"its lines are not of that form ({reason_of(error, _REASON)}); mend them, or write the table again"


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def read_parquet(stream: BinaryIO) -> pyarrow.Table:
    """Return the table of an open file.

    Raises:
        pyarrow.ArrowException: it is no Parquet, is damaged, or claims more than its bytes can hold.
        OSError, ValueError: likewise, of pyarrow's own.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    plain = parquet.ParquetFile(stream).schema_arrow.remove_metadata()  # what another program adds is not believed
    if len(set(plain.names)) < len(plain.names):
        raise pyarrow.ArrowInvalid("two of its columns have one name")
    texts = [field.name for field in plain if field.type in (pyarrow.string(), pyarrow.binary())]
    # Texts as the numbers that stand for them: a long one may stand in every row.
    file = parquet.ParquetFile(stream, read_dictionary=texts)
    meta = file.metadata
    try:
        check_cells(meta.num_rows, meta.num_columns, size)
    except DecodeError as error:
        raise pyarrow.ArrowInvalid(str(error)) from None
    unpacked = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
    if unpacked > GROWTH * size + FREE_CELLS:
        raise pyarrow.ArrowInvalid(f"{meta.num_rows:,} rows in {size:,} bytes are more than measurements take")
    table = file.read()
    for name in texts:
        column = table.column(name)
        longest = max((compute.max(compute.binary_length(chunk.dictionary)).as_py() or 0
                       for chunk in column.chunks if pyarrow.types.is_dictionary(chunk.type)), default=0)
        if longest * meta.num_rows > GROWTH * size + FREE_CELLS:
            raise pyarrow.ArrowInvalid(f"a text of {longest:,} bytes stands in {meta.num_rows:,} rows")
    return table.cast(plain)
