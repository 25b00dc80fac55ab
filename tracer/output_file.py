"""Writing an output file whole or not at all, and never through a link."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tracer.disk import FULL, free_text
from tracer.errors import ForetraceError

PathLike = str | os.PathLike[str]
_SYSTEM_LINKS = ("/dev/", "/proc/")
"""``/dev/stdout`` is a link too: the system's own, to what the shell opened for writing."""


@contextmanager
def whole_file(path: PathLike) -> Iterator[BinaryIO]:
    """A stream whose content becomes the file at ``path`` when the block ends without an exception.

    It goes to a temporary file beside it and is renamed, so that an existing file is kept until the new one is
    complete. A device or pipe (``/dev/stdout``) is written directly.

    Raises:
        ForetraceError: it cannot be written, or is a link; the sentence says what is there now.
    """
    try:
        if is_stream(path):
            with open(path, "wb") as stream:
                yield stream
            return
        with replaced_file(path) as stream:
            yield stream
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ForetraceError(why_unwritten(path, error)) from error


@contextmanager
def replaced_file(path: PathLike) -> Iterator[BinaryIO]:
    """The same for a regular file alone, on the disk when the block ends.

    Raises:
        OSError: it cannot be written, or what is there is a link or no regular file. What was there is unchanged.
    """
    target = Path(path)
    mode = _mode_of(target)
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as stream:  # never an existing file, nor through a link
            if mode is not None and hasattr(os, "fchmod"):
                with suppress(OSError):  # file systems without modes
                    os.fchmod(stream.fileno(), mode)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    finally:
        with suppress(OSError):  # mostly it is not there
            temporary.unlink()
    _sync_folder(target.parent)


def is_stream(path: PathLike) -> bool:
    """Return whether output to a path goes to a pipe or device, or to what ``/dev/stdout`` and its like stand for."""
    name = os.path.abspath(path)
    try:
        found = os.lstat(path)
    except OSError:
        return False
    if stat.S_ISLNK(found.st_mode):
        return name.startswith(_SYSTEM_LINKS)
    return not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode)


def why_unwritten(path: PathLike, error: OSError) -> str:
    """The sentence of an output that could not be written: why, what is there now, what to do."""
    reason = error.strerror or str(error)
    target = Path(path)
    if error.errno in FULL:
        reason = "; ".join(filter(None, [reason, free_text(target.parent)]))
    if is_stream(path):
        return f"{os.fspath(path)} cannot be written ({reason}); what was written before is there."
    left = "what was there is unchanged" if os.path.lexists(target) else "nothing of it was left"
    return f"{os.fspath(path)} cannot be written ({reason}), and {left}; check the folder and its free space."


def _mode_of(target: Path) -> int | None:
    """Permissions of an existing regular file, which the new one takes over; ``None`` if there is none."""
    try:
        found = os.lstat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a link, which is not written through: name the file itself, or remove the "
                                   "link")
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return stat.S_IMODE(found.st_mode)


def _sync_folder(folder: Path) -> None:
    """The rename itself is on a POSIX disk only once the folder is."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    with suppress(OSError):  # not every file system can
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
