"""Decoding of a piece of text that is invalid as a whole: event by event, with repairs where possible.

Some profilers write unescaped quotes, stray backslashes, control bytes, NaN, commas. Such faults are repaired in the
text of *one* event, so that damage stays local. The rule for quotes: a quote inside a string ends the string only if
the next characters look like the rest of an object (``: `` after a key; ``,`` + value, ``}`` or ``]`` after a value).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from tracer.graph import LossReport
from tracer.kineto.events import EVENT, Event, coerce_event

MAX_EVENT_BYTES = 1 << 20
"""Longer fragments are not repaired: real events are much shorter (the longest seen has 40 KB)."""

_AFTER_KEY = re.compile(r"\s*:\s*[\"{\[\-0-9tfnNI]")
_AFTER_VALUE = re.compile(r"\s*(?:[}\]]|,\s*[\"{\[\-0-9tfnNI}\]]|$)")
_ESCAPE = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})")
_LONE_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})|"
    r"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_BARE = re.compile(r"-?(?:NaN|Infinity|inf|nan)\b")
_TRAILING_COMMA = re.compile(r",\s*(?=[}\]])")
_PLAIN = re.compile(r"[^\"\\\x00-\x1f]+")


def repair_event(text: bytes) -> bytes | None:
    """Return the event's text with the known faults repaired, or None if it is too long to try.

    The result may still be invalid JSON: the caller decodes it.
    """
    if len(text) > MAX_EVENT_BYTES:
        return None
    source = text.decode("utf-8", errors="replace")
    out: list[str] = []
    at = 0
    while at < len(source):
        quote = source.find('"', at)
        if quote < 0:
            out.append(_outside(source[at:]))
            break
        out.append(_outside(source[at:quote]))
        body, at = _string(source, quote + 1)
        out.append(f'"{body}"')
    return "".join(out).encode()


def _outside(text: str) -> str:
    return _TRAILING_COMMA.sub("", _BARE.sub("null", text))


def _string(source: str, at: int) -> tuple[str, int]:
    """Return the repaired body of the string that starts at ``at`` and the position after its closing quote."""
    out: list[str] = []
    escapes: list[int] = []
    raw_backslashes = False
    while at < len(source):
        plain = _PLAIN.match(source, at)
        if plain:
            out.append(plain.group())
            at = plain.end()
            continue
        char = source[at]
        if char == '"':
            if _AFTER_KEY.match(source, at + 1) or _AFTER_VALUE.match(source, at + 1):
                return _body(out, escapes, raw_backslashes), at + 1
            out.append('\\"')
            at += 1
        elif char == "\\":
            escape = _ESCAPE.match(source, at)
            if escape:
                escapes.append(len(out))
                out.append(escape.group())
                at = escape.end()
            else:
                raw_backslashes = True
                out.append("\\\\")
                at += 1
        else:
            out.append(f"\\u{ord(char):04x}")
            at += 1
    return _body(out, escapes, raw_backslashes), at


def _body(parts: list[str], escapes: list[int], raw_backslashes: bool) -> str:
    """Join a string's parts. If one backslash was unescaped, all were: `C:\\qath\\file` has no form feed."""
    if raw_backslashes:
        for index in escapes:
            if parts[index][1].isalpha():
                parts[index] = "\\" + parts[index]
    return _LONE_SURROGATE.sub(r"\\ufffd", "".join(parts))


# An event starts with one of these keys in every writer seen. Other objects after `}, {` (device properties: "id",
# process groups: "pg_name") do not, so that metadata is not mistaken for events.
BOUNDARY = re.compile(rb'\}\s*(?P<comma>,)\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|s|bp)"\s*:)')

ARRAY_END = re.compile(rb"\}\s*(?:,\s*)?\]")  # not \s*,?\s*: of spaces without end that tries every pair
_RAW_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_JOINS = 16  # chosen: most pieces from which one event is assembled
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Salvaged(NamedTuple):
    """The events found in a piece of text."""

    events: list[Event]
    rest: bytes | None = None
    """The text after the event array, if the array ends in the piece."""
    pending: bytes = b""
    """An unfinished event at the piece's end, to be put before the next text."""


def elements(text: bytes, loss: LossReport) -> list[Event] | None:
    """Decode a piece that is valid JSON but whose fields have unexpected types; None if it is not valid."""
    try:
        found = _RAW_LIST.decode(b"".join((b"[", text, b"]")))
    except DECODE_ERRORS:
        return None
    events = []
    for raw in found:
        event = _decode(bytes(raw)) or _mend(bytes(raw), loss)
        if event is not None:
            events.append(event)
    return events


def salvage(text: bytes, loss: LossReport, at_end: bool) -> Salvaged:
    """Decode the events of ``text`` one at a time; repair invalid ones, or drop and count them.

    Args:
        text: Events separated by commas, perhaps with the end of the array and the text after it.
        loss: Counts repairs, drops and truncated bytes.
        at_end: The file ends here, so an unfinished last event is a truncation.

    """
    if (valid := elements(text, loss)) is not None:
        return Salvaged(valid)
    cuts = [match.start("comma") for match in BOUNDARY.finditer(text)]
    starts = [0, *(cut + 1 for cut in cuts)]
    ends = [*cuts, len(text)]
    events: list[Event] = []
    index = 0
    while index < len(starts):
        fragment = text[starts[index]:ends[index]]
        used = 1
        event = _decode(fragment)
        if event is None and _is_unfinished(fragment):
            # A list of objects inside an event looks like a boundary: try to join the pieces of the event again.
            for more in range(1, min(_JOINS, len(starts) - index)):
                event = _decode(text[starts[index]:ends[index + more]])
                if event is not None:
                    used = more + 1
                    break
        if event is None:
            for end in list(ARRAY_END.finditer(fragment))[:_JOINS]:
                event = _decode(fragment[:end.start() + 1])
                if event is not None:
                    events.append(event)
                    return Salvaged(events, rest=text[starts[index] + end.end():])
        if event is None and at_end and index == len(starts) - 1:
            _truncated_tail(fragment, events, loss)
            return Salvaged(events)
        if event is None and index == len(starts) - 1 and len(fragment) < MAX_EVENT_BYTES and _is_unfinished(fragment):
            return Salvaged(events, pending=fragment)
        if event is None:
            event = _mend(fragment, loss)
        if event is not None:
            events.append(event)
        index += used
    return Salvaged(events)


def _decode(fragment: bytes) -> Event | None:
    try:
        return EVENT.decode(fragment)
    except msgspec.ValidationError:
        try:
            return coerce_event(msgspec.json.decode(fragment))
        except DECODE_ERRORS:
            return None
    except DECODE_ERRORS:
        return None


def _is_unfinished(fragment: bytes) -> bool:
    try:
        EVENT.decode(fragment)
    except msgspec.ValidationError:
        return False
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    except DECODE_ERRORS:
        return False
    return False


def _mend(fragment: bytes, loss: LossReport) -> Event | None:
    stripped = fragment.strip().strip(b",").strip()
    if not stripped:
        return None  # only a trailing comma
    mended = repair_event(stripped)
    event = _decode(mended) if mended is not None else None
    if event is None:
        loss.dropped_events += 1
    else:
        loss.repaired_events += 1
    return event


def _truncated_tail(fragment: bytes, events: list[Event], loss: LossReport) -> None:
    """Handle the last fragment of a file whose event array never ends: a complete event, a broken one, or a part."""
    stripped = fragment.strip().rstrip(b",] \n\r\t")
    if not stripped:
        return
    event = _decode(stripped)
    if event is None and stripped.endswith(b"}") and (mended := repair_event(stripped)) is not None:
        event = _decode(mended)
        loss.repaired_events += event is not None
    if event is None:
        loss.truncated_bytes += len(fragment)
    else:
        events.append(event)
