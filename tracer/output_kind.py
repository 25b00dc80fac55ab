"""Checks of an output path before the long work, so that its result is not lost."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tracer.errors import ForetraceError
from tracer.files import find_files
from tracer.input_file import open_input
from tracer.output_file import is_stream

_HEAD_BYTES = 512  # chosen: more than each kind's mark needs
_ZIP_HEAD, _ZIP_NAME = b"PK\x03\x04", 30
"""A zip's first bytes, and the position of its first member's name."""


@dataclass(frozen=True)
class Output:
    """A kind of file that commands write.

    Attributes:
        what: Its name in words.
        ours: Returns whether a file with these first bytes (decompressed) is of this kind: the command may replace it.
        stream: Whether it may be written to a pipe or device, such as ``/dev/stdout``.
    """

    what: str
    ours: Callable[[bytes], bool]
    stream: bool = False


def _zipped(member: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(_ZIP_HEAD) and head[_ZIP_NAME:].startswith(member)


def _begins(*texts: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(texts)


GRAPH = Output("converted trace", _zipped(b"manifest.json"))
PROFILE = Output("device profile", _zipped(b"profile.json"))
COMM_PROFILE = Output("profile of collectives", _begins(b'{"format": "foretrace-comm'))
MEASUREMENTS = Output("table of 'foretrace comm bench'", _begins(b'{"collective"'))
CHOICES = Output("file of 'foretrace comm tune'", _begins(b'{\n  "backends"'), stream=True)
TUNER = Output("tuner file of 'foretrace comm tune'", _begins(b"collective_type,"), stream=True)
TIMELINE = Output("timeline of foretrace", _begins(b'{"displayTimeUnit":"ms","traceEvents":['), stream=True)
CHAKRA = Output("Chakra trace of foretrace", lambda head: b"written_by" in head and b"foretrace" in head)
PERFETTO = Output("Perfetto trace of foretrace", lambda head: b"foretrace" in head)
TABLE_FILE = Output("table of 'foretrace export'", lambda head: True)
"""Any first bytes are accepted: ``exports.tables`` checks the columns."""
SHARDING_PLAN = Output("sharding plan", _begins(b'{\n "world_size"'), stream=True)
JUNIT = Output("JUnit report", lambda head: b"<testsuites" in head, stream=True)
MARKDOWN = Output("summary of 'foretrace check'", lambda head: b"foretrace check" in head.partition(b"\n")[0],
                  stream=True)
PAGE = Output("page of foretrace", lambda head: b'<meta name="generator" content="foretrace">' in head, stream=True)
HOST = Output("host model of 'foretrace calibrate --host'", _begins(b'{"host":'))
PLOT = Output("plot", lambda head: b"Matplotlib" in head or b"matplotlib" in head)
TABLE = Output("table of a sweep", lambda head: True)
"""Any first bytes are accepted: ``sweep.files`` checks the columns."""


def check_output(path: str, inputs: list[str], kind: Output) -> None:
    """Refuse an output that cannot be written, or would overwrite an input or a file that is not foretrace's.

    Args:
        path: Path of the output; a URL is left to its file system.
        inputs: Paths that the command reads.
        kind: Kind of the output; an existing file must be of this kind, or empty.

    Raises:
        ForetraceError: with the reason.
    """
    if "://" in path:
        return
    if is_stream(path):
        if kind.stream:
            return
        raise ForetraceError(f"{path} is no regular file; name another output.")
    if not path.strip():
        raise ForetraceError("The name of the output is empty; name a file.")
    target = Path(path)
    if target.is_dir():
        raise ForetraceError(f"{path} is a directory; name a file in it.")
    if target.is_symlink():
        raise ForetraceError(f"{path} is a link, which is not written through; name the file itself, or remove the "
                             "link.")
    folder = Path(os.path.realpath(target.parent))
    if not folder.is_dir():
        raise ForetraceError(f"{path} cannot be written: {folder} does not exist; create that directory first.")
    if not os.access(folder, os.W_OK):
        raise ForetraceError(f"{path} cannot be written: there is no permission to write to {folder}.")
    if not target.exists():
        return
    if any(os.path.samefile(target, source) for source in _local_files(inputs)):
        raise ForetraceError(f"{path} is one of the files being read and would be overwritten; name another output.")
    if target.stat().st_size and not kind.ours(_head(target)):
        raise ForetraceError(f"{path} exists and is no {kind.what}: it would be overwritten; remove it, or name "
                             "another output.")


def _head(path: Path) -> bytes:
    """Return a file's first bytes, decompressed; empty if it cannot be read."""
    try:
        with open_input(path) as stream:
            stored = stream.read(_HEAD_BYTES)
        return zlib.decompressobj(wbits=31).decompress(stored, _HEAD_BYTES) if stored[:2] == b"\x1f\x8b" else stored
    except (OSError, zlib.error):
        return b""


def _local_files(inputs: list[str]) -> list[str]:
    """Return the existing local files that the inputs name; missing ones raise when they are read."""
    found = []
    for path in inputs:
        try:
            found += [file.path for file in find_files([path], []) if "://" not in file.path]
        except ForetraceError:
            continue
    return [path for path in found if os.path.exists(path)]
