"""Events of a timeline as packed columns: tracks of rows, in which no two events overlap.

If a page would hold too many events, the shortest are merged with their neighbours, and the page says so.
"""

from __future__ import annotations

import base64
import gzip
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from markupsafe import Markup

from tracer.arrays import Bool, Int64

_PACKED_FROM = 4_000
"""JSON of more bytes than this is gzipped."""
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """Named columns of whole numbers from zero up, and the header by which a browser reads them."""

    columns: dict[str, np.ndarray]
    head: dict[str, Any]


def safe_json(value: Any) -> str:
    """Return JSON that cannot end a script element, start a comment or tag, or contain line ends."""
    text = msgspec.json.encode(_valid(value)).decode()
    return "".join(_ESCAPES.get(character, character) for character in text) if any(
        character in text for character in _ESCAPES) else text


def data_element(key: str, value: Any) -> Markup:
    """Return a script element that holds data, not code: a value as JSON, or as gzipped JSON if that is shorter."""
    text = safe_json(value)
    if len(text) < _PACKED_FROM:
        return Markup('<script type="application/json" id="{}">{}</script>').format(key, Markup(text))
    return packed_element(key, text.encode(), "json")


def packed_element(key: str, content: bytes, form: str) -> Markup:
    """Return the element with some gzipped bytes; ``form`` names their format."""
    packed = base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()
    return Markup('<script type="application/octet-stream" id="{}" data-form="{}">{}</script>').format(
        key, form, Markup(packed))


def columns_element(key: str, packed: PackedColumns) -> Markup:
    """Return the element with packed columns: a line of JSON with names, widths and lengths, then their bytes."""
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
    """Return a value in which every text is valid Unicode and every number exists in JSON."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_valid(key): _valid(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(part) for part in value]
    if isinstance(value, np.generic):
        return _valid(value.item())
    return value


MOST_EVENTS = 120_000
"""Most events of one timeline."""
_CELLS = 1 << 32  # times are packed into 32 bits
_STEPS = 40
"""Number of lengths that are tried as the limit of merging, each 1.6 times the previous."""

KINDS = (
    ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer"), ("operation", "other"),
    ("call", "sync"), ("kernel", "compute"), ("memory copy", "copy"), ("collective", "comm"), ("step", "other"),
    ("host", "host"), ("launch", "launch"), ("exposed communication", "comm"), ("waiting for rank", "waiting"),
    ("data loading", "loading"), ("sync", "sync"), ("several short ones", "other"), ("task", "forward"))
"""Kinds of events, each with its name and colour."""
KIND_CODE = {name: code for code, (name, _) in enumerate(KINDS)}


@dataclass(slots=True)
class Track:
    """A track of events: title, group (such as its rank), and whether it was measured or simulated. Columns from
    ``row`` to ``lit`` belong to its events; times in ns."""

    title: str
    group: str
    source: str
    row: Int64
    start: Int64
    end: Int64
    name: Int64
    kind: Int64
    lit: Bool
    open: bool = False


@dataclass(slots=True)
class EventNames:
    """Numbers of texts, each text once."""

    codes: dict[str, int] = field(default_factory=dict)

    def code(self, text: str) -> int:
        """Return the number of a text."""
        return self.codes.setdefault(text, len(self.codes))

    def of(self, codes: np.ndarray, strings: list[str]) -> Int64:
        """Return the numbers of a column of codes into ``strings``; negative codes are the empty text."""
        different, place = np.unique(codes, return_inverse=True)
        own = np.array([self.code(strings[code] if code >= 0 else "") for code in different.tolist()], np.int64)
        return own[place.reshape(-1)] if len(own) else np.zeros(0, np.int64)


def pack(tracks: list[Track], names: EventNames, length_ns: int, *, most: int = MOST_EVENTS) -> tuple[
        PackedColumns, str]:
    """Return the packed events of tracks, and a note on merged events. ``length_ns`` is the time from the first to the
    last moment; at most ``most`` events remain."""
    tracks = [track for track in tracks if len(track.start)]
    number = np.repeat(np.arange(len(tracks)), [len(track.start) for track in tracks])
    columns = {what: np.concatenate([getattr(track, what) for track in tracks] or [np.zeros(0, np.int64)])
               for what in ("row", "start", "end", "name", "kind", "lit")}
    order = np.lexsort((columns["start"], columns["row"], number))
    number = number[order]
    columns = {what: column[order].astype(np.int64) for what, column in columns.items()}
    every, below = len(number), 0
    if every > most:
        below = _threshold(columns, number, most)
        number, columns = _merged(columns, number, names, below)
    unit = max(1, -(-int(length_ns) // (_CELLS - 1)))
    start, end = columns["start"] // unit, -(-columns["end"] // unit)
    opens = np.ones(len(number), bool)
    opens[1:] = (np.diff(number) != 0) | (np.diff(columns["row"]) != 0)
    delta = np.diff(start, prepend=0)
    delta[opens] = start[opens]
    firsts = np.flatnonzero(opens)
    counts = np.diff(np.append(firsts, len(number)))
    shown: list[dict[str, Any]] = [
        {"title": track.title, "group": track.group, "source": track.source, "open": track.open, "runs": []}
        for track in tracks]
    for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        shown[int(number[first])]["runs"].append([first, count])
    used = np.unique(columns["kind"])
    head = {"length_ns": int(length_ns), "unit_ns": unit, "names": list(names.codes), "kinds": [list(k) for k in KINDS],
            # Kinds of one colour, such as calls and waits, are on different tracks: the legend shows the first one.
            "legend": list({KINDS[kind][1]: list(KINDS[kind]) for kind in used[::-1].tolist()
                            if KINDS[kind][0] != "step"}.values())[::-1], "tracks": shown}
    packed = PackedColumns({"start": np.maximum(delta, 0), "length": np.maximum(end - start, 0),
                            "name": columns["name"], "kind": columns["kind"], "lit": columns["lit"]}, head)
    said = f"{len(number):,} events."
    if below:
        said = (f"{len(number):,} events of {every:,}: those shorter than {below / 1e3:,.1f} µs are merged with the "
                "short ones beside them.")
    return packed, said


def _threshold(columns: dict[str, Int64], number: Int64, most: int) -> int:
    """Return the length in ns below which events must be merged, so that at most ``most`` remain."""
    length = columns["end"] - columns["start"]
    below = max(int(np.percentile(length, 5)), 1)
    for _ in range(_STEPS):
        if int(_heads(columns, number, below).sum()) <= most:
            break
        below = int(below * 1.6) + 1
    return below


def _heads(columns: dict[str, Int64], number: Int64, below: int) -> Bool:
    """Return which events stay; the others are merged into the one before them."""
    small = columns["end"] - columns["start"] < below
    goes_on = np.zeros(len(number), bool)
    goes_on[1:] = (small[1:] & small[:-1] & (np.diff(number) == 0) & (np.diff(columns["row"]) == 0)
                   & (columns["start"][1:] - columns["end"][:-1] < 4 * below))
    return ~goes_on


def _merged(columns: dict[str, Int64], number: Int64, names: EventNames, below: int) -> tuple[Int64, dict[str, Int64]]:
    heads = _heads(columns, number, below)
    first = np.flatnonzero(heads)
    count = np.diff(np.append(first, len(heads)))
    end = np.maximum.reduceat(columns["end"], first)
    lit = np.maximum.reduceat(columns["lit"], first)
    found = {what: column[first] for what, column in columns.items()}
    several = count > 1
    found["end"], found["lit"] = end, lit
    found["kind"] = np.where(several, KIND_CODE["several short ones"], found["kind"])
    labels = {n: names.code(f"{n:,} short events") for n in np.unique(count[several]).tolist()}
    found["name"] = np.where(several, np.array([labels.get(n, 0) for n in count.tolist()], np.int64), found["name"])
    return number[first], found
