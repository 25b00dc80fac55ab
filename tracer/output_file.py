"""Files that are written completely or not at all, full disks, and exclusive use of a directory."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from tracer.errors import ForetraceError
from tracer.input_file import PathLike

FULL = frozenset(getattr(errno, name) for name in ("ENOSPC", "EDQUOT") if hasattr(errno, name))
"""Error numbers of a full disk: no space, or no quota, left."""
SCARCE_BYTES = 1 << 30
"""Free bytes below which an incomplete trace is blamed on the disk: three steps of a large model take 1 GB."""
_URL = re.compile(r"[A-Za-z][\w+.-]+:/")
"""Beginning of a URL in a ``Path``: with one slash."""
_PROBE_BYTES = 1 << 20  # chosen: far more than fits on a full disk


def full_disk_error(error: BaseException | None) -> OSError | None:
    """Return the error of a full disk behind an exception; ``None`` if there is none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def writing_error(folder: Path) -> OSError | None:
    """Return the error of writing a megabyte to a folder now; ``None`` if it succeeds.

    For writers that report no error: torch's C++ side prints a line and leaves a short file, or none.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def free_bytes(folder: Path) -> int | None:
    """Return the bytes that can be written in a folder, ignoring quotas; ``None`` where the system has no number."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def free_text(folder: Path) -> str:
    """Return ``free_bytes`` in words, for brackets in a sentence; empty if unknown."""
    free = free_bytes(folder)
    return "" if free is None else f"{free / 1e6:,.1f} MB are free there"


_ABANDONED_S = 86400.0
"""Age, s, from which another machine's temporary file is abandoned. Chosen: every export writes within a day."""
_SYSTEM_LINKS = re.compile(r"/dev/(std(in|out|err)|fd/\d+)|/proc/[^/]+/fd/\d+")
"""``/dev/stdout`` is a link of the system, to what the shell opened; links in /dev/shm may come from anyone."""


@contextmanager
def whole_file(path: PathLike) -> Iterator[BinaryIO]:
    """Yield a stream whose content becomes the file at ``path`` when the block ends without an exception.

    It is written to a temporary file next to it and renamed, so that an existing file is kept until the new one is
    complete. A device or pipe (``/dev/stdout``) is written directly.

    Raises:
        ForetraceError: it cannot be written, or is a link; the sentence names the present content.
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
    """Yield a stream as ``whole_file`` does, for regular files only; the file is synced to disk when the block ends.

    Raises:
        OSError: it cannot be written, or the path is a link or no regular file. The old content is unchanged.
    """
    target = Path(path)
    mode = _mode_of(target)
    here = f"{zlib.crc32(os.uname().nodename.encode()) if hasattr(os, 'uname') else 0:08x}"
    _remove_leftovers(target, here)
    temporary = target.with_name(f".{target.name[:200]}.{here}-{os.getpid()}-{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as stream:  # never an existing file or a link
            if mode is not None and hasattr(os, "fchmod"):
                with suppress(OSError):  # file systems without modes
                    os.fchmod(stream.fileno(), mode)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    finally:
        with suppress(OSError):  # mostly it does not exist
            temporary.unlink()
    _sync_folder(target.parent)


def _remove_leftovers(target: Path, here: str) -> None:
    """Remove temporary files of this user's killed runs: those of ended processes here, and very old ones."""
    names = re.compile(rf"\.{re.escape(target.name[:200])}\.([0-9a-f]{{8}})-(\d{{1,9}})-[0-9a-f]{{12}}\.tmp")
    with suppress(OSError, AttributeError):  # Windows has neither owners nor process groups
        for file in os.scandir(target.parent):
            if (named := names.fullmatch(file.name)) and (found := os.lstat(file)).st_uid == os.geteuid():
                with suppress(ProcessLookupError):
                    if named[1] == here:
                        os.getpgid(int(named[2]))
                    if time.time() - found.st_mtime < _ABANDONED_S:
                        continue
                os.unlink(file)


def is_stream(path: PathLike) -> bool:
    """Return whether output to a path goes to a pipe or device, directly or by a name such as ``/dev/stdout``."""
    name = os.path.abspath(path)
    try:
        found = os.lstat(path)
    except OSError:
        return False
    if stat.S_ISLNK(found.st_mode):
        return bool(_SYSTEM_LINKS.fullmatch(name))
    return not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode)


def why_unwritten(path: PathLike, error: OSError) -> str:
    """Return the sentence for an output that could not be written: the reason, the present content, what to do."""
    reason = error.strerror or str(error)
    target = Path(path)
    if error.errno in FULL:
        reason = "; ".join(filter(None, [reason, free_text(target.parent)]))
    if is_stream(path):
        return f"{os.fspath(path)} cannot be written ({reason}); what was written before is there."
    left = "what was there is unchanged" if os.path.lexists(target) else "nothing of it was left"
    return f"{os.fspath(path)} cannot be written ({reason}), and {left}; check the folder and its free space."


def _mode_of(target: Path) -> int | None:
    """Return the permissions of an existing regular file, which the new file keeps; ``None`` if there is none."""
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
    """Sync a folder: on a POSIX disk a rename is durable only then."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    with suppress(OSError):  # not every file system can
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


LOCK = ".lock"
_PATIENCE_S = 1.0
"""Time to wait for a lock: another rank that only checks whether it could write holds it for milliseconds."""
_PAUSE_S = 0.02  # chosen: a fraction of the patience


class Busy(Exception):
    """Another process has the lock."""


class DirectoryLock:
    """A directory and the exclusive right to write there, held from construction to ``release``; the right ends with
    the process in any case.

    Missing directories are made; ``release`` removes those it made that are still empty. Without locks in the system or
    file system, nothing is locked.

    Raises:
        Busy: another process has the lock.
        OSError: the directory or the lock's file cannot be made, another kind of file is in its place, or it is a URL.
    """

    def __init__(self, folder: Path) -> None:
        if _URL.match(str(folder)):
            raise OSError(errno.EINVAL, "it is a URL, and this is written on a local disk")
        self._folder, self._path = folder, folder / LOCK
        self._file: IO[bytes] | None = None
        self._made: list[Path] = []
        until = time.monotonic() + _PATIENCE_S
        try:
            while not self._taken_now(until):
                if time.monotonic() > until:
                    raise Busy
                time.sleep(_PAUSE_S)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock and remove its file, and directories made for it that are empty. Safe to repeat."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # while the lock is still held
                self._path.unlink()
            file.close()
        made, self._made = self._made, []
        for folder in reversed(made):
            with suppress(OSError):  # it has files
                folder.rmdir()

    def _taken_now(self, until: float) -> bool:
        try:
            self._make()
            return self._taken()
        except FileNotFoundError:  # the process that made the directory has removed it meanwhile
            if time.monotonic() > until:
                raise
            return False

    def _make(self) -> None:
        for folder in reversed([self._folder, *self._folder.parents]):
            if folder.exists():
                continue
            try:
                folder.mkdir()
                self._made.append(folder)
            except FileExistsError:  # another process has made it meanwhile, or it is no directory
                if not folder.is_dir():
                    raise

    def _taken(self) -> bool:
        try:
            import fcntl  # not on Windows
        except ImportError:
            return True
        # Do not follow a link, and do not wait for the reader of a pipe.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.fdopen(os.open(self._path, flags, 0o666), "ab")
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size:  # ours has no content
            file.close()
            raise OSError(errno.EEXIST, f"{self._path} is no lock of foretrace")
        try:
            # A record lock belongs to the process: forked data loaders that outlive it do not keep it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file between opening and locking it here.
            is_current = self._path.exists() and os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except OSError as error:
            file.close()
            if error.errno in (errno.EACCES, errno.EAGAIN, errno.ENOENT):
                return False
            with suppress(OSError):
                self._path.unlink()
            return True
        if not is_current:
            file.close()
            return False
        self._file = file
        return True
