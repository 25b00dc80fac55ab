"""The careful path for a piece of text that does not decode as a whole: event by event, mending what can be mended."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from tracer.graph import LossReport
from tracer.kineto.events import EVENT, Event, coerce_event
from tracer.kineto.repair import MAX_EVENT_BYTES, repair_event

# An event starts with one of these keys in every writer seen; other objects after `}, {` (device properties: "id",
# process groups: "pg_name") do not, so the metadata is not mistaken for events.
BOUNDARY = re.compile(rb'\}\s*(?P<comma>,)\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|s|bp)"\s*:)')

ARRAY_END = re.compile(rb"\}\s*(?:,\s*)?\]")  # not \s*,?\s*: of spaces without end that tries every pair
_RAW_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_JOINS = 16
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Salvaged(NamedTuple):
    """The events found in a piece of text."""

    events: list[Event]
    rest: bytes | None = None
    """The text after the event array, if its end lay in the piece."""
    pending: bytes = b""
    """An unfinished event at the piece's end, to be put before the text that follows."""


def elements(text: bytes, loss: LossReport) -> list[Event] | None:
    """Decode a piece that is valid JSON but whose fields have unexpected types; None if it is not valid."""
    try:
        found = _RAW_LIST.decode(b"".join((b"[", text, b"]")))
    except _ERRORS:
        return None
    events = []
    for raw in found:
        event = _decode(bytes(raw)) or _mend(bytes(raw), loss)
        if event is not None:
            events.append(event)
    return events


def salvage(text: bytes, loss: LossReport, at_end: bool) -> Salvaged:
    """Decode the events of ``text`` one at a time, repairing or dropping (and counting) those that are invalid.

    Args:
        text: events separated by commas, perhaps with the end of the array and what follows it.
        loss: counts repairs, drops and truncated bytes.
        at_end: the file ends here, so an unfinished last event is a truncation.

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
            # A list of objects inside an event looks like a boundary: try to put the event together again.
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
        except _ERRORS:
            return None
    except _ERRORS:
        return None


def _is_unfinished(fragment: bytes) -> bool:
    try:
        EVENT.decode(fragment)
    except msgspec.ValidationError:
        return False
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    except _ERRORS:
        return False
    return False


def _mend(fragment: bytes, loss: LossReport) -> Event | None:
    stripped = fragment.strip().strip(b",").strip()
    if not stripped:
        return None  # nothing but a trailing comma
    mended = repair_event(stripped)
    event = _decode(mended) if mended is not None else None
    if event is None:
        loss.dropped_events += 1
    else:
        loss.repaired_events += 1
    return event


def _truncated_tail(fragment: bytes, events: list[Event], loss: LossReport) -> None:
    """The last fragment of a file whose event array never ends: a whole event, a broken one, or a part of one."""
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
