"""Opening a trace: a local path or any fsspec URL, plain or gzip, as a stream of decompressed blocks."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import IO, Any

from tracer.errors import TraceError
from tracer.guard import FREE_TEXT, GROWTH
from tracer.input_file import open_anywhere, why_unopened

BLOCK_BYTES = 2 << 20
"""Decompressed bytes in one block: columns of the smallest events in a block take some 10 MB, and smaller blocks cost
more time."""

_COMPRESSED_READ = 1 << 20  # chosen: memory for a piece of a compressed file
_SMALL_READ = 128  # chosen: at most this much is lost before the damage
_GZIP = b"\x1f\x8b"
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive", b"\x28\xb5\x2f\xfd": "compressed with zstd", b"\xfd7zXZ": "compressed with xz",
    b"BZh": "compressed with bzip2", b"PAR1": "a Parquet file", b"\x80\x04\x95": "a Python pickle",
}

_SQLITE = b"SQLite format 3\x00"
_ROCPROF = b'"rocprofiler-sdk-tool"'

Progress = Callable[[int, int], None]


class TraceSource:
    """One trace file. ``blocks()`` yields its text in pieces of at most ``BLOCK_BYTES``.

    ``damage`` is afterwards a description of faults in the compressed stream, empty without any.
    ``progress(done, total)`` is called with bytes of the stored (compressed) file; ``total`` is 0 if unknown.
    """

    def __init__(self, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
        self.name = os.fspath(path)
        self.damage = ""
        self.notes: list[str] = []
        """Sentences on what the trace lacks if it was translated from another profiler's."""
        self.bytes_read = 0
        self.stored_bytes = 0
        """Bytes of the stored file read so far, before decompression."""
        self._progress = progress
        self._begun: Iterator[bytes] | None = None

    def whole_if(self, wanted: Callable[[bytes], bool]) -> bytes | None:
        """Return the whole text if ``wanted`` accepts its first block; else ``None``, and ``blocks`` yields the text.

        Raises:
            TraceError: as ``blocks``.
        """
        texts = self._texts()
        first = next(texts, b"")
        if wanted(first):
            return b"".join([first, *texts])
        self._begun = chain([first] if first else [], texts)
        return None

    def blocks(self) -> Iterator[bytes]:
        """Yield the decompressed text.

        Raises:
            TraceError: the file cannot be opened or is another format.
        """
        texts, self._begun = self._begun or self._texts(), None
        yield from texts

    def _texts(self) -> Iterator[bytes]:
        try:
            handle, total = open_anywhere(self.name)
        except Exception as error:  # fsspec's back ends raise their own types (missing package, bad credentials)
            raise TraceError(why_unopened(self.name, error)) from error
        with handle:
            try:
                first = handle.read(_COMPRESSED_READ)
                for magic, what in _OTHER_FORMATS.items():
                    if first.startswith(magic):
                        raise TraceError(f"{self.name} is {what}, which is not read as a profiler trace; "
                                         "give the profiler's .json or .json.gz file.")
                if first.startswith(_GZIP):
                    yield from self._gunzip(handle, first, total)
                else:
                    yield from self._plain(handle, first, total)
            except OSError as error:
                raise TraceError(f"{self.name} could not be read to its end ({error}); "
                                 "check the disk or the connection and try again.") from error

    def _report(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)

    def _plain(self, handle: IO[bytes], first: bytes, total: int) -> Iterator[bytes]:
        parts = [first + handle.read(BLOCK_BYTES - len(first)) if len(first) == _COMPRESSED_READ else first]
        del first
        while parts[0]:
            self.bytes_read += len(parts[0])
            self.stored_bytes = self.bytes_read
            self._report(self.bytes_read, total)
            yield parts.pop()
            parts.append(handle.read(BLOCK_BYTES))

    def _gunzip(self, handle: IO[bytes], data: bytes, total: int) -> Iterator[bytes]:
        inflater: Any = zlib.decompressobj(wbits=31)
        done = len(data)
        parts: list[bytes] = []
        held = 0
        while True:
            if not data:
                data = handle.read(_COMPRESSED_READ)
                done += len(data)
            ended = not data
            before = inflater.copy()
            try:
                piece = inflater.decompress(data, BLOCK_BYTES - held)  # bounded: a gzip bomb costs time, not memory
            except zlib.error as error:
                self.damage = f"its gzip stream is corrupt ({error})"
                parts.append(_until_error(before, data))
                held += len(parts[-1])
                break
            data = inflater.unconsumed_tail
            parts.append(piece)
            held += len(piece)
            if held >= BLOCK_BYTES:
                self._report(done, total)
                self.bytes_read += held
                self.stored_bytes = done
                parts, held = [b"".join(parts)], 0
                yield parts.pop()
                if self.bytes_read > max(FREE_TEXT, GROWTH * (total or done)):
                    self.damage = (f"its gzip stream unpacks to more than {GROWTH} times its size, where "
                                   "traces unpack to some 10 to 30 times")
                    return
            if inflater.eof:
                # A file may have several gzip members in a row; zero bytes after the last one are padding.
                data = inflater.unused_data.lstrip(b"\0") or handle.read(_COMPRESSED_READ).lstrip(b"\0")
                done = min(done + len(data), total) if total else done
                if not data.startswith(_GZIP):
                    break
                inflater = zlib.decompressobj(wbits=31)
            elif ended and not piece:
                self.damage = "its gzip stream ends too early"
                break
        self._report(total or done, total)
        self.stored_bytes = done
        if held:
            self.bytes_read += held
            yield b"".join(parts)


def _until_error(inflater: Any, data: bytes) -> bytes:
    """Return what can be decompressed before the damage, fed in small pieces, since a failing call returns nothing."""
    out = bytearray()
    with contextlib.suppress(zlib.error):
        for at in range(0, len(data), _SMALL_READ):
            out += inflater.decompress(data[at:at + _SMALL_READ])
    return bytes(out)


def is_rocprof(head: bytes) -> bool:
    """Return whether a file's text begins like results of rocprofv3."""
    begin = head[:4096]  # a block is megabytes, and stripping copies it
    return begin.lstrip()[:1] == b"{" and _ROCPROF in begin


def local_export(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a local SQLite file."""
    with contextlib.suppress(OSError):
        if "://" not in os.fspath(path) and os.path.isfile(path):
            with open(path, "rb") as file:
                return file.read(len(_SQLITE)) == _SQLITE
    return False
