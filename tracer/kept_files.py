"""Files kept for the next process, in places where no other user can put one: what was worked out once and stays true.

A place is a folder of this user alone, made 0700. The folders above it are root's or this user's, and only these can
write to them; a sticky one, such as ``/tmp``, may be open to all. Each use walks there again from the root, by
descriptors and through no link, and checks owner and mode on the way. A file is then opened by its name in that
descriptor: what another user puts in the way afterwards is never seen. A place or file that fails a check is neither
used nor mended; nothing is kept then, and the work is done again.

Each file is the HMAC-SHA-256 of its name and contents, then the contents. The key is this user's secret, in the place:
a file that was damaged, half written, or made by somebody else is as good as none. Where there are no users to tell
apart (Windows), the user's own cache is the place and nothing is checked.
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
"""Bytes of an HMAC-SHA-256; its key has as many."""
MOST_FILES = 2000
"""Most files kept at a time, of some kilobytes each: a search for a plan keeps tens."""
OTHERS_WRITE, OTHERS_READ = 0o022, 0o077
"""Modes that let another user change a file; or change or read it."""
_USERS = hasattr(os, "geteuid")
OWN_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags to open a file neither through a link nor waiting for the writer of a pipe."""
_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_PATH", 0)
"""Flags to enter folders on the way without listing them (``O_PATH``)."""


class Unsafe(OSError):
    """Another user could have made or changed what was found, or could yet."""


class _Place(NamedTuple):
    path: str  # which no other user can turn elsewhere
    before: str  # what goes before the names of its files,
    descriptor: int | None  # and what they are opened in


def check_own(found: os.stat_result, name: str, others: int = OTHERS_WRITE, way: bool = False) -> None:
    """Raise ``Unsafe`` unless what was found is this user's and has none of the modes ``others`` (Windows has neither).
    On the ``way`` root's will do, and a sticky folder: what lies there is its owner's to replace."""
    if _USERS and found.st_uid != os.geteuid() and not (way and found.st_uid == 0):
        raise Unsafe(f"{name} belongs to another user")
    if _USERS and found.st_mode & others and not (way and found.st_mode & stat.S_ISVTX):
        raise Unsafe(f"{name} is open to other users")


def places() -> Iterator[str]:
    """Yield the folders in which files may be kept, the best first: the user's cache, and one for temporary files."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # as the XDG specification says
        home = os.path.join(os.path.expanduser("~"), ".cache")
    # Without a home there is none: a folder of the working directory may be anybody's.
    if os.path.isabs(home):
        yield os.path.join(home, "foretrace")
    if _USERS:
        with suppress(OSError):
            yield os.path.join(tempfile.gettempdir(), f"foretrace-{os.geteuid()}")


def read_kept(name: str) -> bytes | None:
    """Return what is kept under a name, in the first place that has it; ``None`` where none has."""
    for path in places():
        with suppress(OSError), _entered(path) as place:
            kept = _read(place, name)
            if hmac.compare_digest(kept[:_DIGEST], _signature(place, name, kept[_DIGEST:])):
                return kept[_DIGEST:]
    return None


def write_kept(name: str, content: bytes) -> bool:
    """Keep a file under a name, whole or not at all, in the first place that can; returns whether one could."""
    for path in places():
        with suppress(OSError), _entered(path, make=True) as place:
            try:
                _signature(place, name, content)
            except FileNotFoundError:  # of two processes that make one, the later's stays
                _write(place, KEY, secrets.token_bytes(_KEY_BYTES))
            _write(place, name, _signature(place, name, content) + content)
            _tidy(place.path)
            return True
    return False


def why_unkept() -> dict[str, str]:
    """Return each place with the reason why nothing is kept there; empty for a place in use."""
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
    """Return a new folder for temporary files where no other user can swap it. Raises ``ForetraceError``: nowhere."""
    for path, own in ((tempfile.gettempdir(), False), *((path, True) for path in places())):
        with suppress(OSError), _entered(path, make=own, own=own) as place:
            return tempfile.TemporaryDirectory(prefix=prefix, dir=place.path)
    raise ForetraceError("No folder for temporary files is safe from other users; name one of yours with TMPDIR.")


def read_shipped(path: Path, module: Path) -> bytes:
    """Return a file that came with a module. Raises ``OSError``: it is easier to change than the running module."""
    for file, runs in ((path.stat(), module.stat()), (path.parent.stat(), module.parent.stat())):
        if _USERS and (file.st_uid not in (0, os.geteuid(), runs.st_uid)
                       or file.st_mode & ~runs.st_mode & OTHERS_WRITE):
            raise Unsafe(f"{path} is open to more users than {module}")
    return path.read_bytes()


@contextmanager
def _entered(path: str, make: bool = False, own: bool = True) -> Iterator[_Place]:
    """Walk to a folder, and ``make`` what is missing of the way; leave it again. It is this user's ``own`` or, else, on
    the way to one. Raises ``OSError``: it is not there; ``Unsafe``: another user could put another in its place."""
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
                with suppress(OSError):  # it is there, mostly; else it cannot be opened either
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
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:  # another name of it may lie anywhere
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
    """Return the HMAC of a file. Raises ``FileNotFoundError``: there is no key; ``Unsafe``: it is no secret."""
    key = _read(place, KEY, OTHERS_READ)
    if len(key) != _KEY_BYTES:
        raise Unsafe(f"{KEY} is no key")
    return hmac.digest(key, name.encode() + b"\0" + content, "sha256")


@lru_cache(maxsize=8)
def _tidy(path: str) -> None:
    """Remove what was kept first, once a process, so that no more than ``MOST_FILES`` are left."""
    with suppress(OSError):  # another process removes them too
        files = [file for file in os.scandir(path) if file.name != KEY and not file.is_dir()]
        for file in sorted(files, key=lambda file: os.lstat(file).st_mtime)[:-MOST_FILES]:
            os.unlink(file.path)
