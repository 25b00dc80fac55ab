"""Opening files that others may have put there: regular files only, whatever a link in a shared directory points at."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from tracer.errors import reason_of

PathLike = str | os.PathLike[str]


class NotAFile(OSError):
    """The path is there and is no regular file: a pipe would block for ever, a device never end."""

    def __init__(self, path: PathLike) -> None:
        super().__init__(errno.EINVAL, "it is a pipe or a device, not a file", os.fspath(path))


def open_input(path: PathLike) -> BinaryIO:
    """Open a regular file for reading; a link is followed, and what it leads to must be a regular file too.

    It is looked at before and after it is opened, which never waits: what lies there may be exchanged in between.

    Raises:
        NotAFile: it is a pipe, socket or device.
        OSError: as ``open`` raises.
    """
    _check(os.stat(path), path)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
                         | getattr(os, "O_BINARY", 0))
    try:
        _check(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_input(path: PathLike) -> bytes:
    """All bytes of a regular file. Raises as ``open_input``."""
    with open_input(path) as stream:
        return stream.read()


def open_anywhere(path: PathLike) -> tuple[BinaryIO, int]:
    """Open a local file (see ``open_input``) or an fsspec URL, with its size in bytes, 0 if that is not known.

    Raises:
        OSError: a local file cannot be opened.
        Exception: what the URL's back end raises, of types of its own.
    """
    name = os.fspath(path)
    if "://" not in name:
        stream = open_input(name)
        return stream, os.fstat(stream.fileno()).st_size
    import fsspec  # slow to import, and needed for remote files only

    system, remote = fsspec.core.url_to_fs(name)
    return system.open(remote, "rb"), int(system.size(remote) or 0)


def why_not_read(path: PathLike) -> str:
    """Say what lies at a path in place of a file, as the end of a sentence; empty for a file, or nothing at all."""
    link = os.path.islink(path)
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return "is a link that leads to nothing" if link else ""
    if stat.S_ISREG(mode):
        return ""
    what = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device"
    return f"is a link to {what}, not a file" if link else f"is {what}, not a file"


def why_unopened(path: PathLike, error: Exception) -> str:
    """The sentence of a file or URL that cannot be opened: what lies there, and what to do."""
    name = os.fspath(path)
    remote = "://" in name
    if not remote and (why := why_not_read(name)):
        return f"{name} {why}; name the file itself."
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{name} does not exist; check the path."
    if remote:
        return (f"{name} cannot be fetched ({type(error).__name__}: {reason_of(error)}); check the address, and that "
                "the fsspec back end of its protocol is installed.")
    if isinstance(error, PermissionError):
        return f"There is no permission to read {name}; check its owner and mode."
    reason = getattr(error, "strerror", None) or reason_of(error)
    return f"{name} cannot be read ({reason}); check the file and its disk."


def _check(found: os.stat_result, path: PathLike) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise NotAFile(path)
