"""Files that a user gave: opened, checked and decoded; errors say what to do."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from functools import cache
from importlib import import_module
from typing import Any, BinaryIO, TypeVar, overload

from tracer.errors import reason_of
from tracer.guard import MOST_BITS, MOST_DEPTH
from tracer.guard import DecodeError as DecodeError
from tracer.lazy import fsspec, msgspec

PathLike = str | os.PathLike[str]


class NotAFile(OSError):
    """The path is no regular file: reading a pipe could block forever, a device never end."""

    def __init__(self, path: PathLike) -> None:
        super().__init__(errno.EINVAL, "it is a pipe or a device, not a file", os.fspath(path))


def open_input(path: PathLike) -> BinaryIO:
    """Open a regular file for reading. A link is followed and must lead to a regular file too.

    The file is checked before and after opening, since it may be replaced in between. Opening never waits.

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
    """Return all bytes of a regular file. Raises as ``open_input``."""
    with open_input(path) as stream:
        return stream.read()


def open_anywhere(path: PathLike) -> tuple[BinaryIO, int]:
    """Open a local file (see ``open_input``) or an fsspec URL; return it with its size in bytes, 0 if not known.

    Raises:
        OSError: a local file cannot be opened.
        Exception: an error of the URL's back end, of any type.
    """
    name = os.fspath(path)
    if "://" not in name:
        stream = open_input(name)
        return stream, os.fstat(stream.fileno()).st_size

    system, remote = fsspec.core.url_to_fs(name)
    return system.open(remote, "rb"), int(system.size(remote) or 0)


def why_not_read(path: PathLike) -> str:
    """Return what a path is if it is no file, as the end of a sentence; empty for a file or a missing path."""
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
    """Return the sentence on a file or URL that cannot be opened: what is there, and what to do."""
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


T = TypeVar("T")
_DIGITS = 300  # fewer cannot be over MOST_BITS (302 digits)
_LONG = re.compile(rf"[0-9]{{{_DIGITS}}}")
_LONG_BYTES = re.compile(rb"[0-9]{%d}" % _DIGITS)


@overload
def from_json(data: bytes | str) -> Any: ...


@overload
def from_json(data: bytes | str, kind: type[T]) -> T: ...


def from_json(data: bytes | str, kind: Any = Any) -> Any:
    """Decode JSON.

    Args:
        data: the whole text.
        kind: the type for msgspec; any type by default.

    Raises:
        DecodeError: it is no JSON, or does not fit the type.
    """
    try:
        value = _decoder(kind).decode(data)
        long = kind is not Any and (_LONG.search(data) if isinstance(data, str) else _LONG_BYTES.search(data))
        plain = _decoder(Any).decode(data) if long else value
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise DecodeError(_reason(error, "JSON")) from None
    if kind is Any or long:
        _check_plain(plain)
    return value


def value_of(text: str) -> Any:
    """Decode an argument's text in a profiler's form, such as "[[2, 3], []]"; ``None`` for invalid JSON.

    Texts of traces and saved graphs may be damaged in any way: cut off, endlessly nested, with numbers of thousands of
    digits or halves of characters.
    """
    try:
        value = msgspec.json.decode(text)
        if text.count("[") + text.count("{") > MOST_DEPTH or _LONG.search(text):
            _check_plain(value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError, DecodeError):
        return None
    return value


def list_of(text: str) -> list[Any]:
    """Decode an argument's text that is a list; return [] for anything else."""
    value = value_of(text) if text else None
    return value if isinstance(value, list) else []


def from_toml(data: bytes) -> dict[str, Any]:
    """Decode TOML.

    Raises:
        DecodeError: it is no TOML.
    """
    toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        value: dict[str, Any] = toml.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        raise DecodeError(_reason(error, "TOML")) from None
    _check_plain(value)
    return value


def convert(value: Any, kind: type[T]) -> T:
    """Convert a decoded value to a type.

    Raises:
        DecodeError: it does not fit the type; the reason names the field.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise DecodeError(_reason(error, "data")) from None


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _reason(error: BaseException, what: str) -> str:
    if isinstance(error, RecursionError):
        return f"its {what} is nested without end"
    text = reason_of(error)
    return text if isinstance(error, msgspec.ValidationError) else f"it is no {what}: {text}"


def _check_plain(value: Any) -> None:
    """Raise ``DecodeError`` if a value is nested deeper than ``MOST_DEPTH``, or a number has hundreds of digits."""
    level = [value]
    for _ in range(MOST_DEPTH):
        if any(type(each) is int and each.bit_length() > MOST_BITS for each in level):
            raise DecodeError("it has a number of more than three hundred digits")
        level = [part for each in level if isinstance(each, dict | list)
                 for part in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    raise DecodeError(f"it is nested more than {MOST_DEPTH} levels deep")
