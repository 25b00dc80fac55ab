"""Telling a full disk from the other ways in which writing fails."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

FULL = frozenset(getattr(errno, name) for name in ("ENOSPC", "EDQUOT") if hasattr(errno, name))
"""No space, or no quota, left."""
SCARCE_BYTES = 1 << 30
"""Free bytes below which a trace that broke off is put down to the disk: three steps of a large model take 1 GB."""
_PROBE_BYTES = 1 << 20


def full_disk_error(error: BaseException | None) -> OSError | None:
    """The error of a full disk that an exception is or came from; ``None`` if it did not."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def writing_error(folder: Path) -> OSError | None:
    """Return what writing a megabyte to a folder fails with now; ``None`` if it does not.

    For writers that do not tell: torch's C++ side prints a line and leaves a short file, or none.
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
    """Bytes that can be written in a folder (its quota apart); ``None`` where the system does not say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def free_text(folder: Path) -> str:
    """``free_bytes`` in words, for the brackets of a sentence; empty if not known."""
    free = free_bytes(folder)
    return "" if free is None else f"{free / 1e6:,.1f} MB are free there"
