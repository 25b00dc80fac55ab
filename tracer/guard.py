"""Limits on files of other programs, which each reader of such files applies.

Such files come from colleagues and bug reports. A small file may claim, share or nest so much that it exhausts memory
or time. A name may be used by a million rows, a list may contain itself a thousand times, tuples may nest endlessly.
This module limits what one byte of a file may become, for all formats::

    JSON, TOML ─ ``MOST_DEPTH``             names of all formats ─ ``NameBudget``
    pickle ───── ``check_key``              rows of SQLite ─────── ``RowBudget``
    XML ──────── ``parse_xml``              tables, Parquet ────── ``check_cells``

A refusal is a ``DecodeError``: its message is the reason, and the reader puts it into its sentence on the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.errors import ForetraceError
from tracer.lazy import late

if TYPE_CHECKING:
    from xml.etree import ElementTree
else:
    ElementTree = late("xml.etree.ElementTree")

MOST_RANKS = 1_000_000
"""Ten times the largest training jobs there have been; a larger number is damage, or no job at all."""
MOST_DEPTH = 64
"""Deepest nesting of untyped values, of XML and of modules: code that handles them may recurse at each level. The
deepest modules of the recordings here nest 7 levels."""
MOST_BITS = 1000
"""Most bits of an integer; a longer one does not fit a floating-point number, so that any computation with it fails."""
MOST_NAME = 1 << 13
"""Characters of a name that are kept. The longest name of a recorded kernel has 5,123. Output with one row for each
event (a timeline) repeats the name in each."""
MOST_TEXT = 1 << 20
"""Most characters read of a marked range; ``tracer.kineto.salvage`` has the same limit for an event."""
MOST_PART = 255
"""Characters of a file's or function's name in a stack that are kept: the longest file name of common file systems."""
NAME_TEXT_A_BYTE, FREE_TEXT = 4, 64 << 20
"""Characters of all names together for each stored byte, and those allowed in any file. A name is stored once."""
LEAST_ROW_BYTES, FREE_ROWS = 8, 4096
"""Stored bytes of the smallest row of an export, and rows allowed in any file. By SQLite's file format a row of five
columns has six bytes of header, two for its place, two of length and number."""
MOST_OBJECTS_A_BYTE, FREE_OBJECTS = 1, 1 << 19
"""Objects of a results file for each stored byte, and those allowed in any file. A recording of 2,400 kernels has
0.014, compressed 0.23; half a million take 100 MB."""
CELLS_A_BYTE, FREE_CELLS = 16, 100_000
"""Cells of a table for each stored byte, and those allowed in any table. Published tables of measurements have up to
7.4 (by encoding of equal values), most less than one."""
MOST_COLUMNS = 2000
"""Most columns of a table of text: published tables have at most 43. Finding equal names takes quadratic time."""
GROWTH = 200
"""Bytes of text or values for each stored byte of a compressed file; those of real traces reach 30."""
MOST_XML_BYTES, MOST_XML_ELEMENTS = 4 << 20, 20_000
"""Largest XML map of a node. One of eight GPUs has 4 KB, 60 elements (``tests/kernel_models/test_node_maps.py``)."""


class DecodeError(ForetraceError):
    """The text does not have the expected form; the message is the reason, for the reader's sentence on the file."""


def check_key(key: Any) -> None:
    """Raise ``DecodeError`` if a dictionary's key is no plain text or number.

    Endlessly nested tuples would be hashed by a recursive C function, until the process dies. A number of a million
    digits is hashed again each time that it is a key.
    """
    if type(key) not in (str, int, float, bool, type(None)):
        raise DecodeError(f"it has a {type(key).__name__} as a dictionary's key, where texts are")
    if type(key) is int and key.bit_length() > MOST_BITS:
        raise DecodeError("it has a number of more than three hundred digits as a dictionary's key")


def check_cells(rows: int, columns: int, stored_bytes: int) -> None:
    """Raise ``DecodeError`` if a table claims more cells than its bytes can hold."""
    if rows * columns > CELLS_A_BYTE * stored_bytes + FREE_CELLS:
        raise DecodeError(f"{rows:,} rows of {columns:,} columns in {stored_bytes:,} bytes are more than measurements "
                          "take")


def check_objects(objects: int, stored_bytes: int) -> None:
    """Raise ``DecodeError`` if a file holds more objects than its bytes can."""
    if objects > max(MOST_OBJECTS_A_BYTE * stored_bytes, FREE_OBJECTS):
        raise DecodeError(f"it has {objects:,} objects in {stored_bytes:,} stored bytes, more than recordings take")


def well_formed(text: str, most: int = MOST_NAME) -> str:
    """Return a text without halves of characters, which files and terminals reject, cut to ``most`` characters."""
    kept = text if len(text) <= most else f"{text[:most - 1]}…"
    return kept if kept.isascii() else kept.encode("utf-8", "replace").decode()


class NameBudget:
    """The names of one file, each made well-formed; counts those that were cut.

    Args:
        stored_bytes: size of the file; names that are much longer in total are refused.
    """

    def __init__(self, stored_bytes: int) -> None:
        self.cut = 0
        self._left = max(NAME_TEXT_A_BYTE * stored_bytes, FREE_TEXT)

    def count(self, characters: int) -> None:
        """Count text that was read. Raises ``DecodeError`` if there is more than the file's bytes can hold."""
        self._left -= characters
        if self._left < 0:
            raise DecodeError("its names together are longer than the file; one name stands in very many rows")

    def kept(self, text: str) -> str:
        """Return a name in the form that is kept. Raises ``DecodeError`` as ``count`` does."""
        self.count(min(len(text), MOST_NAME))
        self.cut += len(text) > MOST_NAME
        return well_formed(text)

    def notes(self) -> list[str]:
        """Return sentences on what was cut, if anything."""
        if not self.cut:
            return []
        return [f"{self.cut} names are longer than {MOST_NAME:,} characters; their ends were left out."]


class RowBudget:
    """Counts the rows read from a file. An SQLite page that is used in many places gives endless rows."""

    def __init__(self, stored_bytes: int) -> None:
        self._left = max(stored_bytes // LEAST_ROW_BYTES, FREE_ROWS)

    def take(self, rows: int) -> None:
        """Count rows. Raises ``DecodeError`` if there are more than the file's bytes can hold."""
        self._left -= rows
        if self._left < 0:
            raise DecodeError(f"its tables have more rows than one for {LEAST_ROW_BYTES} stored bytes")


def parse_xml(text: str) -> ElementTree.Element:
    """Return the root of an XML text of limited size and depth, without entities.

    Raises:
        DecodeError: it is no complete XML, or larger or deeper than descriptions of hardware are.
    """
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise DecodeError("it declares entities, which no driver writes")
    if len(text) > MOST_XML_BYTES or text.count("<") > 2 * MOST_XML_ELEMENTS:
        raise DecodeError(f"it is larger than {MOST_XML_BYTES >> 20} MiB, or has more than {MOST_XML_ELEMENTS:,} "
                          "elements")
    parser: Any = ElementTree.XMLPullParser(("start", "end"))
    depth = 0
    root: ElementTree.Element | None = None
    try:
        parser.feed(text)
        for what, element in parser.read_events():
            root = element if root is None else root
            depth += 1 if what == "start" else -1
            if depth > MOST_DEPTH:
                raise DecodeError(f"it is nested more than {MOST_DEPTH} levels deep")
        parser.close()
    except (ElementTree.ParseError, ValueError) as error:  # ValueError: characters that are invalid in XML
        raise DecodeError(f"it is no whole XML: {error}") from None
    if root is None:
        raise DecodeError("it is an empty XML")
    return root
