"""Files for later processes, with results that stay true, in places where no other user can put a file.

A place is a folder of this user alone, made 0700. The folders above it belong to root or this user, and only these can
write to them; a sticky one, such as ``/tmp``, may be open to all. Each use walks there again from the root, by
descriptors and through no link, and checks owner and mode on the way. A file is then opened by its name in that
descriptor: nothing that another user puts in the way afterwards is read. A place or file that fails a check is neither
used nor repaired: then nothing is stored, and the work is done again.

Each file is the HMAC-SHA-256 of its name and contents, then the contents. The key is this user's secret, in the place.
A file that was damaged, half written, or made by another user counts as missing. Where the system has no separate users
(Windows), the user's own cache is the place and nothing is checked.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tracer.errors import ForetraceError

KEY = "key"
"""File of the secret key."""
_KEY_BYTES = _DIGEST = 32
"""Bytes of an HMAC-SHA-256, and of its key."""
MOST_FILES = 2000
"""Most files stored at a time, of some kilobytes each: a search for a plan stores tens."""
OTHERS_WRITE, OTHERS_READ = 0o022, 0o077
"""Mode bits that let another user change a file, and those that let another user change or read it."""
_USERS = hasattr(os, "geteuid")
OWN_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags to open a file without following a link or waiting for the writer of a pipe."""
_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_PATH", 0)
"""Flags to enter folders on the way without permission to list them (``O_PATH``)."""


class Unsafe(OSError):
    """Another user could have made or changed a file or folder, or could still do it."""


class _Place(NamedTuple):
    path: str  # no other user can redirect it
    before: str  # prefix of the names of its files
    descriptor: int | None  # descriptor in which they are opened


def check_own(found: os.stat_result, name: str, others: int = OTHERS_WRITE, way: bool = False) -> None:
    """Raise ``Unsafe`` unless a file or folder is this user's and has no mode bits of ``others`` (Windows has neither).
    On the ``way``, root's folders and sticky ones pass too: only the owner can replace what is in a sticky one."""
    if _USERS and found.st_uid != os.geteuid() and not (way and found.st_uid == 0):
        raise Unsafe(f"{name} belongs to another user")
    if _USERS and found.st_mode & others and not (way and found.st_mode & stat.S_ISVTX):
        raise Unsafe(f"{name} is open to other users")


def places() -> Iterator[str]:
    """Yield the folders in which files may be stored, the best first: the user's cache, and one for temporary files."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # as the XDG specification says
        home = os.path.join(os.path.expanduser("~"), ".cache")
    # Without a home there is no cache: a folder of the working directory may be another user's.
    if os.path.isabs(home):
        yield os.path.join(home, "foretrace")
    if _USERS:
        with suppress(OSError):
            yield os.path.join(tempfile.gettempdir(), f"foretrace-{os.geteuid()}")


def read_kept(name: str) -> bytes | None:
    """Return the file stored under a name, from the first place that has it; ``None`` where none has."""
    for path in places():
        with suppress(OSError), _entered(path) as place:
            kept = _read(place, name)
            if hmac.compare_digest(kept[:_DIGEST], _signature(place, name, kept[_DIGEST:])):
                return kept[_DIGEST:]
    return None


def write_kept(name: str, content: bytes) -> bool:
    """Store a file under a name, completely or not at all, in the first place that can; return whether one could."""
    for path in places():
        with suppress(OSError), _entered(path, make=True) as place:
            try:
                _signature(place, name, content)
            except FileNotFoundError:  # of two processes that make a key, the later one's stays
                _write(place, KEY, secrets.token_bytes(_KEY_BYTES))
            _write(place, name, _signature(place, name, content) + content)
            _tidy(place.path)
            return True
    return False


def why_unkept() -> dict[str, str]:
    """Return each place with the reason why nothing is stored there; empty for a place in use."""
    found = {}
    for path in places():
        try:
            with _entered(path, make=True) as place, suppress(FileNotFoundError):
                _signature(place, "", b"")
            found[path] = "" if os.access(path, os.W_OK) else "it cannot be written"
        except OSError as error:
            found[path] = error.strerror or str(error)
    return found


def scratch_folder(prefix: str = "foretrace-") -> tempfile.TemporaryDirectory[str]:
    """Return a new folder for temporary files that no other user can swap. Raises ``ForetraceError`` without one."""
    for path, own in ((tempfile.gettempdir(), False), *((path, True) for path in places())):
        with suppress(OSError), _entered(path, make=own, own=own) as place:
            return tempfile.TemporaryDirectory(prefix=prefix, dir=place.path)
    raise ForetraceError("No folder for temporary files is safe from other users; name one of yours with TMPDIR.")


def read_shipped(path: Path, module: Path) -> bytes:
    """Return a file shipped with a module. Raises ``OSError`` if it is easier to change than the running module."""
    for file, runs in ((path.stat(), module.stat()), (path.parent.stat(), module.parent.stat())):
        if _USERS and (file.st_uid not in (0, os.geteuid(), runs.st_uid)
                       or file.st_mode & ~runs.st_mode & OTHERS_WRITE):
            raise Unsafe(f"{path} is open to more users than {module}")
    return path.read_bytes()


@contextmanager
def _entered(path: str, make: bool = False, own: bool = True) -> Iterator[_Place]:
    """Walk to a folder, ``make`` missing folders on the way, and leave it at the end. With ``own`` it must be this
    user's, else only safe to pass. Raises ``OSError`` if it is missing, ``Unsafe`` if another user could replace it."""
    if not _USERS:
        os.makedirs(path, exist_ok=True)
        yield _Place(path, os.path.join(path, ""), None)
        return
    above, name = os.path.split(path)
    way = os.path.join(os.path.realpath(above), name) if own else os.path.realpath(path)
    at, folder = "/", os.open("/", _FOLDER)
    try:
        for name in Path(way).parts[1:]:
            check_own(os.fstat(folder), at, way=True)
            at = os.path.join(at, name)
            if make:
                with suppress(OSError):  # mostly it exists; otherwise opening it fails too
                    os.mkdir(name, 0o700, dir_fd=folder)
            inner = os.open(name, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        check_own(os.fstat(folder), at, way=not own)
        yield _Place(way, "", folder)
    finally:
        os.close(folder)


def _read(place: _Place, name: str, others: int = OTHERS_WRITE) -> bytes:
    with os.fdopen(os.open(place.before + name, os.O_RDONLY | OWN_FILE, dir_fd=place.descriptor), "rb") as file:
        found = os.fstat(file.fileno())
        check_own(found, name, others)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:  # it may have another name anywhere
            raise Unsafe(f"{name} is no file of its own")
        return file.read()


def _write(place: _Place, name: str, content: bytes) -> None:
    before, folder = place.before, place.descriptor
    temporary = f"{before}.{secrets.token_hex(8)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OWN_FILE, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, before + name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:  # a full disk, above all
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _signature(place: _Place, name: str, content: bytes) -> bytes:
    """Return the HMAC of a file. Raises ``FileNotFoundError`` without a key, ``Unsafe`` if the key is no secret."""
    key = _read(place, KEY, OTHERS_READ)
    if len(key) != _KEY_BYTES:
        raise Unsafe(f"{KEY} is no key")
    return hmac.digest(key, name.encode() + b"\0" + content, "sha256")


@lru_cache(maxsize=8)
def _tidy(path: str) -> None:
    """Remove the oldest files, once in a process, so that at most ``MOST_FILES`` are left."""
    with suppress(OSError):  # another process removes them too
        files = [file for file in os.scandir(path) if file.name != KEY and not file.is_dir()]
        for file in sorted(files, key=lambda file: os.lstat(file).st_mtime)[:-MOST_FILES]:
            os.unlink(file.path)
