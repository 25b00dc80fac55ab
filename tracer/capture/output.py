"""Writing one rank's part of a capture: whole files or none, and nothing that names a person or a machine."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tracer.capture_layout import (
    COLLECTIVES,
    CONTEXT,
    EXECUTION_TRACE,
    find_parts,
    is_complete,
    is_part_file,
    part_name,
    read_window,
    window_name,
)
from tracer.errors import CaptureError, GraphFileError, TraceError

_LINES_BYTES = 1 << 22
_COMPRESSION = 6
"""gzip's own default: level 9 takes four times as long for 3% on these files."""

_ANONYMOUS = (
    (re.compile(rb'("host_name":\s*)"[^"]*"'), rb'\1""'),
    # Inductor's cache lies in a directory named after the user; the trace's own name is its path.
    (re.compile(rb'("(?:kernel_file|kernel_hash_file|traceName)":\s*")[^"]*/([^"/]*)"'), rb'\1\2"'),
    (re.compile(rb'(")[^"\s]*/torchinductor_[^"\s]*/([^"/]*")'), rb"\1\2"),
)


class Part:
    """The directory of one rank, created and checked on construction.

    Raises:
        CaptureError: it cannot be created or written, or it holds a complete capture that may not be replaced.
    """

    def __init__(self, out: Path, rank: int, replace: bool, world_size: int = 1) -> None:
        self.path = out / part_name(rank)
        self.scratch = self.path / f".scratch-{os.getpid()}"
        if not replace and is_complete(self.path):
            raise CaptureError(f"{self.path} already holds a complete capture; choose another directory, remove it, or "
                               "pass --replace (replace=True).")
        # Ranks of a larger run that was here before would make one job of two; the first rank speaks for all.
        stale = [part for part in find_parts(out) if part.rank >= world_size] if rank == 0 else []
        if stale and not replace:
            raise CaptureError(f"{out} holds rank {stale[0].rank} of a larger job than this one; choose another "
                               "directory, remove it, or pass --replace (replace=True).")
        with self._explained():
            for part in stale:
                for old in (out / part_name(part.rank)).iterdir():
                    if is_part_file(old.name):
                        old.unlink()
            self.path.mkdir(parents=True, exist_ok=True)
            self.scratch.mkdir(exist_ok=True)
            # Room is not checked ahead: it may go at any time, and writing tells.
            (self.scratch / "probe").write_bytes(b"foretrace")
            for old in self.path.iterdir():
                if is_part_file(old.name):
                    old.unlink()

    def write_json(self, name: str, value: Any) -> None:
        """Write a small JSON file, atomically. Raises ``CaptureError``."""
        text = json.dumps(value, indent=1, allow_nan=False) + "\n"
        self._atomically(name, lambda file: file.write(text.encode()))

    def write_context(self, context: dict[str, Any]) -> None:
        """Write ``context.json``, whose ``complete`` is the mark of a whole capture, last. Raises ``CaptureError``."""
        self.write_json(CONTEXT, context)

    def store_trace(self, source: Path, name: str, unfinished_step: str = "") -> None:
        """Compress a trace that the profiler wrote, anonymised.

        Args:
            source: the profiler's file in the scratch directory; removed afterwards.
            name: file name in the part, ending in ".gz".
            unfinished_step: name of a step annotation that a crash or the end of the script cut off; it is renamed
                so that nobody takes it for a step.

        Raises:
            CaptureError: the profiler's file is not whole, or this one cannot be written.
        """
        renamed = unfinished_step.replace("ProfilerStep#", "UnfinishedStep#").encode()
        last = b""

        def copy(file: IO[bytes]) -> None:
            nonlocal last
            with open(source, "rb") as text, \
                    gzip.GzipFile(name, "wb", _COMPRESSION, fileobj=file, mtime=0) as packed:
                while lines := text.readlines(_LINES_BYTES):
                    block = b"".join(lines)
                    for pattern, replacement in _ANONYMOUS:
                        block = pattern.sub(replacement, block)
                    if unfinished_step:
                        block = block.replace(b'"' + unfinished_step.encode() + b'"', b'"' + renamed + b'"')
                    packed.write(block)
                    last = block.rstrip()[-1:] or last
            if last != b"}":
                raise CaptureError(f"The profiler could not write its trace in {self.path} to the end; the disk is "
                                   "probably full: free space or choose another directory.")

        self._atomically(name, copy)
        source.unlink(missing_ok=True)

    def convert(self, windows: int) -> None:
        """Replace the traces by the one-file form of each window. Raises ``CaptureError``."""
        try:
            for index in range(windows):
                graph = read_window(self.path, index)
                graph.meta.source = f"{self.path.name}/{window_name(index, 'json')}"
                temporary = self.scratch / window_name(index, "foretrace")
                graph.save(temporary)
                with self._explained():
                    os.replace(temporary, self.path / temporary.name)
            with self._explained():
                for name in (*(window_name(index, "json") for index in range(windows)), EXECUTION_TRACE, COLLECTIVES):
                    (self.path / name).unlink(missing_ok=True)
        except (GraphFileError, TraceError) as error:
            raise CaptureError(f"The capture could not be turned into its one-file form ({error}); its JSON files are "
                               f"in {self.path}.") from error

    def remove(self) -> None:
        """Give the directory up, if nothing but the capture was in it."""
        self.remove_scratch()
        with suppress(OSError):
            self.path.rmdir()

    def remove_scratch(self) -> None:
        """Remove what is only of use while recording."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _atomically(self, name: str, write: Callable[[IO[bytes]], Any]) -> None:
        temporary = self.scratch / f"{name}.part"
        with self._explained():
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path / name)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            raise CaptureError(f"The capture cannot be written to {self.path} ({why}): free space, or choose a "
                               "directory that can be written.") from error
