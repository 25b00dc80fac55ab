"""The container: a zip of Parquet tables and a manifest, with version and checksum in the zip's comment.

The checksum covers every byte of the file: zip's own CRCs leave headers and directory unchecked. Small tables are lists
in the manifest, constant columns one value, other tables Parquet members. A member costs about 100 bytes a column and
0.3 ms to open, with any content. So below ``INLINE_ROWS`` rows a list of numbers is smaller and faster. Parquet members
are stored uncompressed (they compress themselves), the manifest is deflated.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
import zlib
from typing import Any

import msgspec
import numpy as np

from tracer.columns import NONE, Table, is_time
from tracer.errors import GraphFileError, reason_of
from tracer.input_file import open_anywhere, why_unopened
from tracer.lazy import fsspec, parquet, pyarrow
from tracer.output_file import replaced_file, why_unwritten

VERSION = 1
"""Version of the file format. Raise it when an older reader would misread a new file."""

MANIFEST = "manifest.json"

_COMMENT = re.compile(rb"foretrace (\d+) crc32 ([0-9a-f]{8})\Z")
_CHECKSUM_BYTES = 8  # 32 bits in hexadecimal
_COMMENT_BYTES = 64  # more than the longest comment
_ZIP_HEAD = b"PK\x03\x04"
_OWN_HEAD = 30  # bytes of a zip member's header before its name
# A manifest holds no per-event data beyond small tables; a bigger one is an attack, not a graph.
_MAX_MANIFEST_BYTES = 256 << 20
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)  # equal graphs give equal bytes


def is_graph_file(head: bytes) -> bool:
    """Return whether a file's first bytes (64 are enough) are those of a saved graph or job."""
    return head.startswith(_ZIP_HEAD) and head[_OWN_HEAD: _OWN_HEAD + len(MANIFEST)] == MANIFEST.encode()


def pack(members: dict[str, bytes]) -> bytes:
    """Return the container's bytes. The manifest must be the first member."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name, _FIXED_TIME)
            info.compress_type = zipfile.ZIP_DEFLATED if name == MANIFEST else zipfile.ZIP_STORED
            archive.writestr(info, content, compresslevel=9)
        archive.comment = f"foretrace {VERSION} crc32 ".encode() + b"0" * _CHECKSUM_BYTES
    return seal(stream.getvalue())


def seal(data: bytes) -> bytes:
    """Return the same container with a correct checksum, its last bytes."""
    body = data[:-_CHECKSUM_BYTES]
    return body + f"{zlib.crc32(body):08x}".encode()


def unpack(data: bytes, label: str) -> dict[str, bytes]:
    """Return the members of a container, after checking its version and checksum.

    Raises:
        GraphFileError: another format, a newer version, or a damaged file.
    """
    comment = _COMMENT.search(data[-_COMMENT_BYTES:])
    if comment is None:
        raise GraphFileError(_why_no_comment(data, label))
    version = int(comment.group(1))
    if version > VERSION:
        raise GraphFileError(
            f"{label} is of format version {version}, newer than this foretrace reads (up to {VERSION}); "
            "update foretrace or convert the traces again."
        )
    if zlib.crc32(memoryview(data)[:-_CHECKSUM_BYTES]) != int(comment.group(2), 16):
        raise corrupt(label, "its checksum does not match")
    members: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                limit = _MAX_MANIFEST_BYTES if info.filename == MANIFEST else len(data)
                stored = info.compress_type == zipfile.ZIP_STORED
                if info.filename in members or info.file_size > limit or not (stored or info.filename == MANIFEST):
                    raise corrupt(label, f"its member {info.filename[:80]!r} is not as foretrace writes it")
                members[info.filename] = archive.read(info)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise corrupt(label, str(error)) from None
    return members


def corrupt(label: str, reason: str) -> GraphFileError:
    """Return the error for a damaged file."""
    return GraphFileError(f"{label} is corrupt ({reason}); copy it again or convert the traces again.")


def _why_no_comment(data: bytes, label: str) -> str:
    if not data:
        return f"{label} is empty; convert the traces again."
    if is_graph_file(data[:64]):
        return f"{label} is truncated or damaged at its end; copy it again or convert the traces again."
    what = "is a zip archive but no saved graph" if data.startswith(_ZIP_HEAD) else "is no saved graph"
    return f"{label} {what}; give a file written by foretrace convert, or a trace."


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a local file or fsspec URL.

    Raises:
        GraphFileError: it cannot be read.
    """
    name = os.fspath(path)
    try:
        with open_anywhere(name)[0] as stream:
            return stream.read()
    except Exception as error:  # fsspec's back ends raise types of their own (missing package, bad credentials)
        raise GraphFileError(why_unopened(name, error)) from None


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a local file or fsspec URL so that readers see the old or the new content, never a mixture.

    Locally through a temporary file next to it, flushed to disk and renamed. Remote object stores publish an upload
    when it is complete.

    Raises:
        GraphFileError: it cannot be written; an existing file is left as it was.
    """
    name = os.fspath(path)
    try:
        if "://" in name:
            filesystem, remote = fsspec.core.url_to_fs(name)
            filesystem.pipe_file(remote, data)
        else:
            with replaced_file(name) as stream:
                stream.write(data)
    except OSError as error:
        raise GraphFileError(why_unwritten(name, error)) from error
    except Exception as error:  # as in read_file
        raise GraphFileError(f"{name} cannot be written ({reason_of(error)}); check the folder and its free space."
                             ) from None


# Measured: decoding a number from JSON takes 30-40 ns, so 15 columns of 256 rows cost what opening Parquet does.
INLINE_ROWS = 256
# Row numbers are int32.
MAX_ROWS = (1 << 31) - 1
_ENCODINGS = frozenset({"PLAIN", "RLE", "BYTE_STREAM_SPLIT"})
# Largest headers of a column's pages: a page holds about a megabyte.
_PAGE_BYTES = 1 << 16
_MAX_COLUMNS = 64  # chosen: more than any table has
# Numbers that are decoded at a time, in addition to the finished columns: 4 MB. Each further read costs 0.1 ms.
_READ_VALUES = 1 << 19
# zstd sets up its decoder for each column, which doubles the time to open a table of 1,000 rows; LZ4 costs such a
# table a sixth more bytes. Higher levels of zstd win under 2% on the real traces.
_SMALL_ROWS = 2048
_SMALL: dict[str, Any] = {"compression": "lz4"}
_LARGE: dict[str, Any] = {"compression": "zstd", "compression_level": 9}  # chosen: graphs are written once and kept


class TableRecord(msgspec.Struct, omit_defaults=True):
    """The manifest's record of one table. Each column is in ``constants``, in ``inline``, or in the Parquet member."""

    rows: int
    constants: dict[str, int] = {}
    inline: dict[str, list[int]] = {}


class StringsRecord(msgspec.Struct, omit_defaults=True):
    """The manifest's record of the strings; ``bytes`` is their total UTF-8 length."""

    rows: int
    bytes: int
    inline: list[str] = []


def decoded_bytes(kind: type[Table], rows: int) -> int:
    """Return the bytes that a table's arrays take in memory."""
    return rows * sum(dtype.itemsize for dtype in kind.layout().values())


def encode_table(table: Table) -> tuple[TableRecord, bytes]:
    """Return a table's record and Parquet bytes (empty if the record holds everything)."""
    record = TableRecord(len(table))
    rest: dict[str, Any] = {}
    for name, column in table.columns().items():
        integral = np.issubdtype(column.dtype, np.integer)
        if integral and len(column) and column.min() == column.max():
            record.constants[name] = int(column[0])
        elif integral and len(column) <= INLINE_ROWS:
            record.inline[name] = column.tolist()
        else:
            rest[name] = _arrow_numbers(column)
    if not len(table):
        record.inline = {}
        return record, b""
    return record, _to_parquet(rest) if rest else b""


def decode_table(kind: type[Table], record: TableRecord, parquet: bytes | None, label: str) -> Table:
    """Return the table of a record. The caller has checked that ``record.rows`` is plausible.

    Raises:
        GraphFileError: columns are missing, repeated, of another type, or of another length.
    """
    given = _from_parquet(parquet, record.rows, label) if parquet is not None else {}
    columns: dict[str, np.ndarray] = {}
    for name, dtype in kind.layout().items():
        try:
            if record.rows == 0:
                column = np.empty(0, dtype)
            elif name in given:
                column = given[name]
            elif name in record.inline:
                column = np.array(record.inline[name], dtype=dtype)
            elif name in kind.ADDED and name not in record.constants:
                column = np.broadcast_to(np.array(NONE, dtype), record.rows)
            else:
                column = np.broadcast_to(np.array(record.constants[name], dtype), record.rows)
                column = column.copy() if is_time(name) else column
        except KeyError:
            raise corrupt(label, f"column {name} is missing") from None
        except (OverflowError, ValueError):
            raise corrupt(label, f"column {name} holds a number that does not fit") from None
        if column.dtype != dtype or column.shape != (record.rows,):
            raise corrupt(label, f"column {name} has {len(column)} {column.dtype}, not {record.rows} {dtype}")
        columns[name] = column
    return kind(**columns)


def encode_strings(strings: list[str]) -> tuple[StringsRecord, bytes]:
    """Return the strings' record and Parquet bytes (empty if they are inline)."""
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in strings)
    if len(strings) <= INLINE_ROWS:
        return StringsRecord(len(strings), size, list(strings)), b""
    return StringsRecord(len(strings), size), _to_parquet({"string": _arrow_strings(strings)})


def decode_strings(record: StringsRecord, parquet: bytes | None, label: str) -> list[str]:
    """Return the strings of a record. The caller has checked that ``record.bytes`` is plausible.

    Raises:
        GraphFileError: the number or the length of the strings differs from the record.
    """
    if parquet is None:
        strings = record.inline
    else:
        strings = _string_column(parquet, record, label)
    if len(strings) != record.rows:
        raise corrupt(label, f"it holds {len(strings)} strings, not {record.rows}")
    return strings


# Arrow's functions for lists and NumPy arrays (``pyarrow.array``, ``to_numpy``) import pandas, which takes longer than
# everything else here.


def _arrow_numbers(column: np.ndarray) -> Any:
    """Return the column as an Arrow array, in the same memory if it has no gaps."""
    values = pyarrow.py_buffer(np.ascontiguousarray(column))
    return pyarrow.Array.from_buffers(pyarrow.from_numpy_dtype(column.dtype), len(column), [None, values])


def _arrow_strings(strings: list[str]) -> Any:
    """Return the strings as an Arrow array, made of the offsets of each text and one buffer of all texts."""
    encoded = [text.encode() for text in strings]
    places = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(text) for text in encoded], out=places[1:])
    return pyarrow.Array.from_buffers(pyarrow.large_string(), len(strings), [
        None, pyarrow.py_buffer(places), pyarrow.py_buffer(b"".join(encoded))]).cast(pyarrow.string())


def _to_parquet(columns: dict[str, Any]) -> bytes:
    """Return Arrow columns as the bytes of a Parquet file."""
    table = pyarrow.table(columns)
    table = table.cast(pyarrow.schema([field.with_nullable(False) for field in table.schema]))
    # Numbers split into their bytes are easy for zstd: 10-20% smaller and a third faster to read on the real traces
    # than delta coding of times with dictionaries for codes.
    quick = len(table) < _SMALL_ROWS and table.num_columns > 1
    split = {f.name: "BYTE_STREAM_SPLIT" for f in table.schema if f.type in (pyarrow.int32(), pyarrow.int64())}
    stream = io.BytesIO()
    parquet.write_table(
        table, stream, version="2.6", use_dictionary=False, column_encoding=split or None, write_statistics=False,
        store_schema=False, row_group_size=max(len(table), 1), **(_SMALL if quick else _LARGE),
    )
    return stream.getvalue()


def _open(data: bytes, rows: int, unpacked: int, label: str):  # type: ignore[no-untyped-def]
    """Open a Parquet member and check it before anything is decoded.

    It must hold as many rows as the manifest says. Its encodings must not unpack to more than ``unpacked`` bytes
    (dictionaries and run lengths can turn a few bytes into gigabytes; foretrace writes none).
    """
    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(data))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise corrupt(label, str(error).splitlines()[0]) from None
    if file.metadata.num_rows != rows:
        raise corrupt(label, f"a table has {file.metadata.num_rows} rows, not {rows}")
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    simple = all(set(chunk.encodings) <= _ENCODINGS for chunk in chunks)
    if not simple or sum(chunk.total_uncompressed_size for chunk in chunks) > unpacked + _PAGE_BYTES * len(chunks):
        raise corrupt(label, "a table unpacks to more than it says")
    return file


def _from_parquet(data: bytes, rows: int, label: str) -> dict[str, np.ndarray]:
    file = _open(data, rows, rows * 8 * _MAX_COLUMNS, label)
    names, at_once = file.schema_arrow.names, max(_READ_VALUES // max(rows, 1), 1)
    columns = {}
    for first in range(0, len(names), at_once):
        try:
            table = file.read(names[first:first + at_once], use_threads=False)
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            raise corrupt(label, str(error).splitlines()[0]) from None
        for name, column in zip(table.column_names, table.columns, strict=True):
            if not (pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type)) or \
                    column.null_count:
                raise corrupt(label, f"column {name} is not a column of numbers")
            columns[name] = np.array(np.from_dlpack(column.combine_chunks()))  # Arrow's memory is read-only
    return columns


def _string_column(data: bytes, record: StringsRecord, label: str) -> list[str]:
    file = _open(data, record.rows, record.bytes + 4 * record.rows, label)  # each text has a four-byte length
    try:
        column = file.read(use_threads=False).column(0)
        strings = column.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise corrupt(label, str(error).splitlines()[0]) from None
    if column.type != pyarrow.string() or column.null_count:
        raise corrupt(label, "its strings are no texts")
    return strings
