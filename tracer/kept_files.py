"""Files kept for the next process, in places where nobody else can put one: what was worked out once and stays true.

Each is the SHA-256 of its contents, then the contents: a damaged or half-written one is as good as none.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_DIGEST = 32
"""Bytes of a SHA-256."""


def kept_folders() -> Iterator[Path]:
    """Yield the folders in which files may be kept, the best first: the user's cache, and the private one."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # as the XDG specification says
        home = os.path.join(os.path.expanduser("~"), ".cache")
    # Without a home there is none: a folder of the working directory may be anybody's.
    if os.path.isabs(home):
        yield Path(home) / "foretrace"
    if (private := private_folder()) is not None:
        yield Path(private)


def private_folder() -> str | None:
    """Return a folder in the temporary directory that nobody else can write to: machine code is loaded from it."""
    if not hasattr(os, "getuid"):
        return None
    try:
        path = os.path.join(tempfile.gettempdir(), f"foretrace-{os.getuid()}")
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError:
        return None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
    return path if private else None


def read_kept(path: Path) -> bytes | None:
    """Return what a kept file holds, or ``None`` where there is none or it is damaged."""
    try:
        if not path.is_file():  # reading a pipe would wait for a writer
            return None
        kept = path.read_bytes()
    except OSError:
        return None
    return kept[_DIGEST:] if hashlib.sha256(kept[_DIGEST:]).digest() == kept[:_DIGEST] else None


def write_kept(folder: Path, name: str, content: bytes) -> bool:
    """Keep a file in a folder, whole or not at all; returns whether that went well."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, written = tempfile.mkstemp(dir=folder)
    except OSError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.chmod(written, 0o644)
        os.replace(written, folder / name)
    except OSError:  # a full disk, above all
        with suppress(OSError):
            os.unlink(written)
        return False
    return True


def drop_oldest(folder: Path, pattern: str, most: int) -> None:
    """Remove the oldest files of a folder that match a pattern, so that no more than ``most`` are left."""
    try:
        found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
        for path in found[:max(len(found) - most, 0)]:
            path.unlink()
    except OSError:  # another process removes them too
        return
