"""Data within a page: JSON that nothing in it can break out of, and packed columns of numbers.

A page is one file that may hold a hundred thousand events. Their columns are written as bytes, plane by plane (all
first bytes, then all second ones, …, which compresses best), gzipped, in base64; a browser undoes that in some
milliseconds.
"""

from __future__ import annotations

import base64
import gzip
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from markupsafe import Markup

_LEVEL = 6
_PACKED_FROM = 4_000
"""JSON of more bytes is gzipped."""
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """Named columns of whole numbers from zero up, and what a browser has to know beside them."""

    columns: dict[str, np.ndarray]
    head: dict[str, Any]


def safe_json(value: Any) -> str:
    """Return JSON that ends no script element, starts no comment or tag and has no line ends of its own."""
    text = msgspec.json.encode(_valid(value)).decode()
    return "".join(_ESCAPES.get(character, character) for character in text) if any(
        character in text for character in _ESCAPES) else text


def data_element(key: str, value: Any) -> Markup:
    """Return the script element, of no script, that holds a value: as JSON, or as gzipped JSON where that is
    shorter."""
    text = safe_json(value)
    if len(text) < _PACKED_FROM:
        return Markup('<script type="application/json" id="{}">{}</script>').format(key, Markup(text))
    return packed_element(key, text.encode(), "json")


def packed_element(key: str, content: bytes, form: str) -> Markup:
    """Return the element of some gzipped bytes; ``form`` says what they are."""
    packed = base64.b64encode(gzip.compress(content, _LEVEL, mtime=0)).decode()
    return Markup('<script type="application/octet-stream" id="{}" data-form="{}">{}</script>').format(
        key, form, Markup(packed))


def columns_element(key: str, packed: PackedColumns) -> Markup:
    """Return the element of packed columns: a line of JSON with their names, widths and lengths, then their bytes."""
    head, planes = [], []
    for name, column in packed.columns.items():
        width = _width(column)
        head.append([name, width, len(column)])
        little = np.ascontiguousarray(column.astype(f"<u{width}")).view(np.uint8).reshape(-1, width)
        planes.append(little.T.tobytes())
    first = safe_json({**packed.head, "columns": head})
    return packed_element(key, first.encode() + b"\n" + b"".join(planes), "columns")


def _width(column: np.ndarray) -> int:
    most = int(column.max()) if len(column) else 0
    return 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4


def _valid(value: Any) -> Any:
    """The value with every text valid Unicode and every number one that JSON has."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_valid(key): _valid(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(part) for part in value]
    if isinstance(value, np.generic):
        return _valid(value.item())
    return value
