"""Exclusive use of a directory among processes."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

LOCK = ".lock"
_PATIENCE_S = 1.0
"""Another rank that only checks whether it could write holds the lock for milliseconds."""
_PAUSE_S = 0.02


class Busy(Exception):
    """Another process has the lock."""


class DirectoryLock:
    """Held from construction to ``release``; a process that ends, however it ends, gives it up.

    Where the system or the file system has no locks, nothing is locked.

    Raises:
        Busy: another process has it.
        OSError: the lock's file cannot be made, or something else lies there.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._file: IO[bytes] | None = None
        until = time.monotonic() + _PATIENCE_S
        while not self._taken():
            if time.monotonic() > until:
                raise Busy
            time.sleep(_PAUSE_S)

    def release(self) -> None:
        """Give it up and remove its file. Safe to repeat."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # while it is still ours
                self._path.unlink()
            file.close()

    def _taken(self) -> bool:
        try:
            import fcntl
        except ImportError:  # Windows
            return True
        # Neither through a link, nor waiting for the reader of a pipe.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.fdopen(os.open(self._path, flags, 0o666), "ab")
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size:  # ours has no content
            file.close()
            raise OSError(errno.EEXIST, f"{self._path} is no lock of foretrace")
        try:
            # A record lock is the process's own: forked data loaders that outlive it do not keep it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one who had it before may have removed the file between our opening and our locking it.
            is_current = self._path.exists() and os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except OSError as error:
            file.close()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            if isinstance(error, FileNotFoundError):
                return False
            with suppress(OSError):
                self._path.unlink()
            return True
        if not is_current:
            file.close()
            return False
        self._file = file
        return True
