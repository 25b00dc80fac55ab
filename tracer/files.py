"""Finds a job's files, and recognises the kind of each by its first bytes."""

from __future__ import annotations

import glob
import os
import re
import zlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tracer import execution_trace
from tracer.capture_layout import SIDE_FILES
from tracer.errors import TraceError
from tracer.input_file import open_anywhere, why_unopened
from tracer.lazy import fsspec

SUFFIXES = (".json", ".json.gz", ".foretrace", ".pt.trace.gz", ".trace.gz", ".trace", ".sqlite")
_HEAD_BYTES = 1 << 16  # chosen: the fields that distinguish kinds of files come first
_GLOB = re.compile(r"[*?\[]")


class FileKind(Enum):
    """A kind of file, by its first bytes."""

    TRACE = "profiler trace"
    EXECUTION_TRACE = "execution trace"
    GRAPH = "saved graph"


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file to read. ``named``: the user gave its path; otherwise it was found in a directory or by a glob."""

    path: str
    kind: FileKind
    size: int
    named: bool


def find_files(paths: list[str], notes: list[str]) -> list[FoundFile]:
    """Expand files, directories, globs and URLs of these in the given order, each file once; a directory's by name.

    Empty files are noted and left out. An empty file that is the only path given is kept: reading it explains the
    error.

    Raises:
        TraceError: a path does not exist, or a directory or glob holds no trace.
    """
    found: list[FoundFile] = []
    seen: set[str] = set()
    for path in paths:
        members, named = _expand(path)
        for member in members:
            if member in seen:
                continue
            seen.add(member)
            file = _look_at(member, named)
            if file.size == 0 and (not named or len(paths) > 1):
                notes.append(f"{member} is empty (0 bytes): that rank's profiler probably died; it was left out.")
            else:
                found.append(file)
    return found


def _expand(path: str) -> tuple[list[str], bool]:
    """Return the files that a path leads to, and whether it named a file itself."""
    remote = "://" in path
    system: Any = _Local() if not remote else None
    local = path
    if remote:
        try:
            system, local = fsspec.core.url_to_fs(path)
        except Exception as error:  # a back end's own types: unknown protocol, missing package
            raise TraceError(why_unopened(path, error)) from error
    try:
        if system.isdir(local):
            entries = [e if isinstance(e, str) else e["name"] for e in system.ls(local, detail=False)]
            members = sorted(e for e in entries if e.endswith(SUFFIXES) and not os.path.basename(e).startswith(".")
                             and (remote or os.path.isfile(e) or os.path.islink(e))
                             and os.path.basename(e) not in SIDE_FILES)
            if not members:
                deeper = [e for e in entries if system.isdir(e)]
                hint = f"it has {len(deeper)} subdirectories; name one of them" if deeper else "check the path"
                raise TraceError(f"The directory {path} holds no trace file ({', '.join(SUFFIXES[:3])}); {hint}.")
        elif _GLOB.search(local) and not system.exists(local):
            members = sorted(system.glob(local))
            if not members:
                raise TraceError(f"No file matches {path}; check the pattern.")
        else:
            return [path], True
    except OSError as error:
        raise TraceError(f"{path} could not be listed ({error}); check the path and its permissions.") from error
    return [system.unstrip_protocol(m) if remote else m for m in members], False


class _Local:
    """The few calls needed of fsspec's file systems, without importing it for local paths."""

    isdir = staticmethod(os.path.isdir)
    exists = staticmethod(os.path.exists)
    glob = staticmethod(glob.glob)

    @staticmethod
    def ls(path: str, detail: bool = False) -> list[str]:
        return [os.path.join(path, name) for name in os.listdir(path)]


def _look_at(path: str, named: bool) -> FoundFile:
    stored, head, size = first_bytes(path)
    return FoundFile(path, kind_of(path, stored, head), size, named)


def first_bytes(path: str) -> tuple[bytes, bytes, int]:
    """Return a file's first bytes, the same decompressed (empty if that fails), and the file's size, bytes.

    Raises:
        TraceError: it cannot be opened or read.
    """
    try:
        handle, size = open_anywhere(path)
        with handle:
            stored = handle.read(_HEAD_BYTES)
    except Exception as error:  # fsspec's back ends raise their own types
        raise TraceError(why_unopened(path, error)) from error
    head = stored
    if stored.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(wbits=31).decompress(stored, _HEAD_BYTES)
        except zlib.error:
            head = b""
    return stored, head, size or len(stored)


def kind_of(path: str, stored: bytes, head: bytes) -> FileKind:
    """Return a file's kind by its name and ``first_bytes``; anything unknown counts as a profiler's trace."""
    if path.endswith(".foretrace") or stored.startswith(b"PK\x03\x04"):
        return FileKind.GRAPH
    if execution_trace.is_execution_trace(head):
        return FileKind.EXECUTION_TRACE
    return FileKind.TRACE
