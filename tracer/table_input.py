"""Tables of users: CSV, TSV, JSON lines and Parquet, read by the format in their names, or refused in one sentence.

This is the only reader of users' tables. An error begins with the place, ``runs.csv, line 3, column step_ms``, and ends
with what to do. Parquet is read only if its size is plausible for its bytes: a few bytes may encode billions of equal
cells.
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
"""Formats that are read unless others are named."""
_PARQUET = b"PAR1"
_OTHERS = {
    b"\x1f\x8b": "is compressed (gzip); unpack it, and give the table in it",
    b"PK\x03\x04": "is a zip archive or an Excel sheet; save its table as CSV",
    b"version https://git-lfs": "is a pointer of Git LFS, not the table itself; fetch it with: git lfs pull",
}
"""First bytes of other files that users give for tables: what such a file is, and what to do."""
_NOT_UTF8 = "{name} is named as {format} and is no text in UTF-8; save it in UTF-8."
_HEAD_BYTES = 4096  # chosen: enough lines to tell text from another format
_REASON = 120  # chosen: part of a sentence
_MORE_FIELDS = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")
_KEY = re.compile(rb'"[^"\\]*"(?=\s*:)')
_LONG_LINE = re.compile(rb'^[^"\n]{%d,}$' % MOST_COLUMNS, re.MULTILINE)
"""A line that may have too many cells. Lines with quotes are left out: a separator in quotes ends no cell."""
_OPEN_QUOTE = re.compile(r"EOF inside string starting at row (\d+)")


class TableInputError(ForetraceError):
    """A table cannot be read, or a row has an impossible value."""


class TableRow(NamedTuple):
    """A row of a user's table: its place, for errors, and its cells by column."""

    where: str
    cells: Mapping[Any, Any]

    def text(self, column: str, needed: bool = False) -> str:
        """Return a cell's text, empty if it or its column is missing. Raises ``TableInputError`` if ``needed``."""
        value = self.cells.get(column)
        text = "" if value is None or value != value else str(value).strip()
        if needed and not text:
            raise TableInputError(f"{self.where}, column {column}: the cell is empty; fill it, or remove the row.")
        return text

    def whole(self, column: str, what: str = "whole number from 1") -> int:
        """Return a whole number from 1. Raises ``TableInputError`` if the cell holds none."""
        text = self.text(column).removesuffix(".0")
        if not (text.isascii() and text.isdecimal() and 0 < len(text) < 8 and int(text)):
            raise cell_error(self.where, column, self.cells.get(column), what)
        return int(text)

    def positive_ms(self, column: str) -> float:
        """Return a time above 0, ms. Raises ``TableInputError`` if the cell holds none."""
        try:
            value = float(self.cells[column])
        except (TypeError, ValueError):
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise cell_error(self.where, column, self.cells[column], "positive number of milliseconds")
        return value


def cell_error(where: str, column: str, value: object, what: str) -> TableInputError:
    """Return the error for a cell that is not a ``what``, in a row at ``where``."""
    return TableInputError(f"{where}, column {column}: {str(value)[:40]!r} is no {what}; correct the cell, or remove "
                           "the row.")


def place(path: PathLike, row: int, comment: str | None = None) -> str:
    """Return a row's place, given its index: "runs.csv, line 3", or "runs.parquet, row 2", which has no lines."""
    return next(islice(_places(path, comment), row, None))


def _places(path: PathLike, comment: str | None = None) -> Iterator[str]:
    """Yield the place of each row. Lines count as in an editor: blank lines and lines within quotes are included."""
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
    yield from repeat(name)  # lines with other endings are not counted


def read_rows(path: PathLike, needed: Iterable[str], what: str, page: str) -> list[TableRow]:
    """Return the rows of a user's table with certain columns.

    Args:
        path: as for ``read_frame``.
        needed: columns that the table must have.
        what: subject of the table, for the error.
        page: page of the documentation that explains the columns.

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
    """Return the rows of a table as written: texts from CSV, values (lists too) from Parquet. Raises
    ``TableInputError`` if it cannot be read."""
    frame = read_frame(path, as_written=True)
    return [{str(name).strip(): cell.strip() if isinstance(cell, str) else cell for name, cell in row.items()}
            for row in frame.to_dict("records")]


def read_frame(path: PathLike, known: tuple[str, ...] = TABLES, *, comment: str | None = None,
               as_written: bool = False) -> pandas.DataFrame:
    """Return a user's table.

    Args:
        path: A local file or an fsspec URL; its ending gives the format.
        known: Endings of formats that are read here.
        comment: Sign after which the rest of a line is ignored.
        as_written: Keep cells of text as texts instead of reading them as numbers.

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
    """Raise ``TableInputError`` if the content does not match the format in the file's name."""
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
    """Return a table with plain columns: a Parquet column's dictionary may hold values that no row has.

    Readers would group by those values.
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
        if not isinstance(frame.index, pandas.RangeIndex):  # pandas takes surplus cells as names of the rows
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
    """Raise ``DecodeError`` if rows times columns of a text are more cells than its bytes can hold."""
    data = stream.read()
    stream.seek(0)
    if ending == ".jsonl":
        columns = len(set(_KEY.findall(data)))
    else:
        columns = data.partition(b"\n")[0].count(separator.encode()) + 1
    if columns > MOST_COLUMNS:
        raise DecodeError(f"it has {columns:,} columns, and measurements have at most {MOST_COLUMNS:,}")
    check_cells(data.count(b"\n") + 1, columns, len(data))
    # Cells beyond the columns would also be refused after parsing, which takes a minute for 300,000 cells.
    for line in _LONG_LINE.finditer(data) if ending != ".jsonl" else ():
        if (cells := line[0].count(separator.encode()) + 1) > MOST_COLUMNS:
            number = data.count(b"\n", 0, line.start()) + 1
            raise DecodeError(f"line {number:,} has {cells:,} cells, and "
                              f"measurements have at most {MOST_COLUMNS:,}")


def _is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are UTF-8; the last character may be incomplete."""
    try:
        io.TextIOWrapper(io.BytesIO(head[:-3] if len(head) == _HEAD_BYTES else head), "utf-8").read()
    except UnicodeError:
        return len(head) == _HEAD_BYTES and _is_text(head[:-4])
    return b"\0" not in head


def _why_unparsed(error: Exception) -> str:
    """Return a clause on why a text is no table, with what to do."""
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
        OSError, ValueError: likewise, raised by pyarrow.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    plain = parquet.ParquetFile(stream).schema_arrow.remove_metadata()  # metadata of other programs is not trusted
    if len(set(plain.names)) < len(plain.names):
        raise pyarrow.ArrowInvalid("two of its columns have one name")
    texts = [field.name for field in plain if field.type in (pyarrow.string(), pyarrow.binary())]
    # Read texts as dictionary codes: a long text may be repeated in every row.
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
    table.validate(full=True)  # texts that are no UTF-8, words beyond their dictionary
    for name in texts:
        column = table.column(name)
        longest = max((compute.max(compute.binary_length(chunk.dictionary)).as_py() or 0
                       for chunk in column.chunks if pyarrow.types.is_dictionary(chunk.type)), default=0)
        if longest * meta.num_rows > GROWTH * size + FREE_CELLS:
            raise pyarrow.ArrowInvalid(f"a text of {longest:,} bytes stands in {meta.num_rows:,} rows")
    return table.cast(plain)
