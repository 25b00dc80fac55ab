"""Writes one rank's part of a capture: complete files or none, and nothing that names a person or a machine."""

from __future__ import annotations

import errno
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
    LOOKUPS,
    PYTHON_CALLS,
    find_parts,
    is_part_file,
    others_files,
    part_name,
    read_context,
    read_window,
    what_it_holds,
    window_name,
)
from tracer.errors import CaptureError, DiskFullError, GraphFileError, TraceError
from tracer.output_file import (
    FULL,
    SCARCE_BYTES,
    Busy,
    DirectoryLock,
    free_bytes,
    free_text,
    full_disk_error,
    writing_error,
)

_SCRATCH = ".scratch-"
_OWN_SCRATCH = re.compile(r"\.scratch-\d+$")
_LINES_BYTES = 1 << 22  # chosen: memory for a block of lines
_COMPRESSION = 6
"""gzip's own default: level 9 takes four times as long for 3% on these files."""

_ANONYMOUS = (
    (re.compile(rb'("host_name":\s*)"[^"]*"'), rb'\1""'),
    # Inductor's cache lies in a directory named after the user; the trace's own name is its path.
    (re.compile(rb'("(?:kernel_file|kernel_hash_file|traceName)":\s*")[^"]*/([^"/]*)"'), rb'\1\2"'),
    (re.compile(rb'(")[^"\s]*/torchinductor_[^"\s]*/([^"/]*")'), rb"\1\2"),
)

class PartWriter:
    """The directory of one rank, created, locked and checked on construction; ``close`` releases it.

    An earlier capture stays until this one writes its first file. In a fake world ``fake`` is the context's description
    of it: parts of other ranks may stay only if they have the same description.

    Raises:
        CaptureError: it cannot be created or written, another process captures into it, or it holds a capture that
            may not be replaced.
    """

    def __init__(self, out: Path, rank: int, replace: bool, world_size: int = 1,
                 fake: dict[str, Any] | None = None) -> None:
        self.path = out / part_name(rank)
        self.scratch = self.path / f"{_SCRATCH}{os.getpid()}"
        self._lock: DirectoryLock | None = None
        self._replaced: list[Path] = []
        try:
            with self._explained():
                self._make_and_lock()
            self._find_old(out, rank, replace, world_size, fake)
            with self._explained():
                for left in self.path.iterdir():  # left by a killed process, as it has no lock
                    if _OWN_SCRATCH.match(left.name) and not left.is_symlink():
                        shutil.rmtree(left)
                self.scratch.mkdir()
                # Free space is not checked ahead: it may shrink at any time, and writing reports it.
                (self.scratch / "probe").write_bytes(b"foretrace")
        except BaseException:
            self.close()
            raise

    @property
    def has_written(self) -> bool:
        """Return whether this capture has written its first file."""
        return not self._replaced

    @property
    def replaces(self) -> bool:
        """Return whether there is an earlier capture of this rank, which the first file will replace."""
        return bool(self._replaced) and what_it_holds(self.path) != ""

    def _make_and_lock(self) -> None:
        if self.path.is_symlink():
            raise CaptureError(f"{self.path} is a link, which a capture is not written through: remove it, or choose "
                               "another directory.")
        try:
            self._lock = DirectoryLock(self.path)
        except Busy:
            raise CaptureError(
                f"Another process is capturing into {self.path}: wait for it, or choose another directory (if it "
                "is another rank of this job, call init_process_group, or set RANK and WORLD_SIZE, before the "
                "capture begins).") from None

    def _find_old(self, out: Path, rank: int, replace: bool, world_size: int, fake: dict[str, Any] | None) -> None:
        """Find the parts that the first file replaces. Raises ``CaptureError`` if they must not be replaced."""
        if foreign := others_files(self.path):
            raise CaptureError(f"{self.path} holds {', '.join(foreign[:3])}, which no capture of foretrace wrote; "
                               "choose another directory, or move it away.")
        held = what_it_holds(self.path)
        if held and not replace:
            raise CaptureError(f"{self.path} already holds {held}; choose another directory, remove it, or pass "
                               "--replace (replace=True).")
        # Ranks of an earlier run would be mixed with this run's ranks.
        others = [part for part in find_parts(out) if part.path != self.path]
        if fake is not None:  # no other rank will replace them
            stale = [part for part in others if not _is_of_run(part.path, fake)]
        else:  # each rank replaces its own; the first one those of ranks that this run lacks
            stale = [part for part in others if part.rank >= world_size] if rank == 0 else []
        if stale and not replace:
            which = "another job than this one" if fake is not None else "a larger job than this one"
            raise CaptureError(f"{out} holds rank {stale[0].rank} of {which}; choose another directory, remove it, or "
                               "pass --replace (replace=True).")
        self._replaced = [self.path, *(out / part_name(part.rank) for part in stale)]

    def _remove_old(self) -> None:
        replaced, self._replaced = self._replaced, []
        for folder in replaced:
            if folder.is_symlink():
                folder.unlink()  # only the link is removed
                continue
            if not folder.is_dir():
                continue
            for old in folder.iterdir():
                if is_part_file(old.name):
                    old.unlink()
            if folder != self.path:
                with suppress(OSError):  # it has other files
                    folder.rmdir()

    def write_json(self, name: str, value: Any) -> None:
        """Write a small JSON file, atomically. Raises ``CaptureError``."""
        text = json.dumps(value, indent=1, allow_nan=False) + "\n"
        self._atomically(name, lambda file: file.write(text.encode()))

    def write_context(self, context: dict[str, Any]) -> None:
        """Write ``context.json`` last: its ``complete`` marks a complete capture. Raises ``CaptureError``."""
        self.write_json(CONTEXT, context)

    def store_trace(self, source: Path, name: str, unfinished_step: str = "") -> None:
        """Compress and anonymise a trace that the profiler wrote.

        Args:
            source: The profiler's file in the scratch directory; removed afterwards.
            name: File name in the part, ending in ".gz".
            unfinished_step: Name of a step annotation that a crash or the end of the script cut off; it is renamed so
                that it does not count as a step.

        Raises:
            CaptureError: The profiler's file is not whole, or this one cannot be written.
        """
        if not source.is_file():
            raise self._broken_off()
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
                raise self._broken_off()

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
                traces = [window_name(index, "json") for index in range(windows)]
                for name in (*traces, EXECUTION_TRACE, COLLECTIVES, LOOKUPS, PYTHON_CALLS):
                    (self.path / name).unlink(missing_ok=True)
        except (GraphFileError, TraceError) as error:
            if (full := full_disk_error(error)) is not None:
                raise self._cannot_write(full) from error
            raise CaptureError(f"The capture could not be turned into its one-file form ({error}); its JSON files are "
                               f"in {self.path}.") from error

    def close(self) -> None:
        """Remove files that are needed only while recording, release the lock, and remove empty directories."""
        if self._lock is not None:  # without it the files are another process's
            self.remove_scratch()
            self._lock.release()
            self._lock = None
            with suppress(OSError):
                self.path.rmdir()

    def remove_scratch(self) -> None:
        """Remove the profiler's files, which are needed only while recording."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _atomically(self, name: str, write: Callable[[IO[bytes]], Any]) -> None:
        with self._explained():
            self.scratch.mkdir(exist_ok=True)
            temporary = self.scratch / f"{name}.part"
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            self._remove_old()
            os.replace(temporary, self.path / name)

    def _broken_off(self) -> CaptureError:
        """Return the error for a trace that torch did not finish: its C++ side raises none."""
        error, free = writing_error(self.scratch), free_bytes(self.scratch)
        if error is None and free is not None and free > SCARCE_BYTES:
            return CaptureError(f"The profiler could not write its trace in {self.path} to the end, although "
                                f"{free_text(self.path)}: its own message above may say why; record again.")
        return self._cannot_write(error or OSError(errno.ENOSPC, "the profiler's trace broke off"))

    def _cannot_write(self, error: OSError) -> CaptureError:
        why = error.strerror or str(error)
        if error.errno in FULL:
            facts = "; ".join(filter(None, [why, free_text(self.path)]))
            full = DiskFullError(f"The disk is full: the capture cannot be written to {self.path} ({facts}); free "
                                 "space, or choose a directory on another disk.")
            full.__cause__ = error
            return full
        return CaptureError(f"The capture cannot be written to {self.path} ({why}): free space, or choose a "
                            "directory that can be written.")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._cannot_write(error) from error


def _is_of_run(part: Path, fake: dict[str, Any]) -> bool:
    """Return whether a part belongs to the same fake world: size, plan and workload."""
    try:
        return _run_of(read_context(part)) == _run_of(fake)
    except TraceError:
        return False


def _run_of(context: dict[str, Any]) -> tuple[Any, ...]:
    parallel, workload = (value if isinstance(value := context.get(name), dict) else {}
                          for name in ("parallel", "workload"))
    return (context.get("fake_world") is True, context.get("world_size"), parallel.get("plan"),
            *(json.loads(json.dumps(workload.get(name))) for name in ("name", "settings")))
