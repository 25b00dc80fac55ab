"""Reading JSON and TOML that foretrace or a user wrote: a value of the wanted form, or ``DecodeError``, nothing else.

Every file that is not a trace is read through here, so that a damaged one is one sentence whatever was done to it: cut
off, other types, other encodings, nesting without end, numbers that are none.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib import import_module
from typing import Any, TypeVar, overload

import msgspec

from tracer.errors import ForetraceError, reason_of

T = TypeVar("T")
MOST_DEPTH = 64
"""Deepest nesting of untyped values: what goes through them calls itself for each level."""
MOST_BITS = 1000
"""Most bits of a whole number; a longer one is no floating-point number, and whatever computes with it fails."""
_DIGITS = 300
_LONG = re.compile(rf"[0-9]{{{_DIGITS}}}")
_LONG_BYTES = re.compile(rb"[0-9]{%d}" % _DIGITS)


class DecodeError(ForetraceError):
    """The text is not of the wanted form; the message is the reason, to be put into the file's sentence."""


@overload
def from_json(data: bytes | str) -> Any: ...


@overload
def from_json(data: bytes | str, kind: type[T]) -> T: ...


def from_json(data: bytes | str, kind: Any = Any) -> Any:
    """Decode JSON.

    Args:
        data: the whole text.
        kind: what msgspec shall make of it; anything by default.

    Raises:
        DecodeError: it is no JSON, or not of that form.
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
    """Decode an argument's text as a profiler writes it, such as "[[2, 3], []]"; ``None`` for what is no JSON.

    Texts of traces and of saved graphs may be anything: cut off, nested without end, numbers of thousands of digits,
    halves of characters.
    """
    try:
        value = msgspec.json.decode(text)
        if text.count("[") + text.count("{") > MOST_DEPTH or _LONG.search(text):
            _check_plain(value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError, DecodeError):
        return None
    return value


def list_of(text: str) -> list[Any]:
    """Decode an argument's text that is a list; empty for anything else."""
    value = value_of(text) if text else None
    return value if isinstance(value, list) else []


def from_toml(data: bytes) -> dict[str, Any]:
    """Decode TOML.

    Raises:
        DecodeError: it is none.
    """
    toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        value: dict[str, Any] = toml.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        raise DecodeError(_reason(error, "TOML")) from None
    _check_plain(value)
    return value


def convert(value: Any, kind: type[T]) -> T:
    """Make a typed value of a decoded one.

    Raises:
        DecodeError: it is not of that form; the reason names the field.
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
    """Raise ``DecodeError`` where a value is nested deeper than ``MOST_DEPTH``, or a number has hundreds of digits."""
    level = [value]
    for _ in range(MOST_DEPTH):
        if any(type(each) is int and each.bit_length() > MOST_BITS for each in level):
            raise DecodeError("it has a number of more than three hundred digits")
        level = [part for each in level if isinstance(each, dict | list)
                 for part in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    raise DecodeError(f"it is nested more than {MOST_DEPTH} levels deep")
