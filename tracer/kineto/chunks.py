"""Cutting a trace's text into pieces at event boundaries, and each piece into columns of its events' fields.

The text is never held completely. Blocks come in, and everything up to the last event boundary of a block is scanned at
once (see ``scanner``); the rest waits for the next block. A piece with something unusual in it is decoded as ``[``
piece ``]``. If that fails, it is decoded event by event (see ``salvage``), and the result is written as plain text and
scanned. So the care for invalid files costs valid ones nothing.

    { "metadata": ..., "traceEvents": [ {event} , {event} , {event} ], "more": ... }
      \\_____ header _____/               \\__ piece __/^ boundary      \\_ footer _/
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import msgspec

from tracer.errors import TraceError
from tracer.graph import LossReport
from tracer.guard import FREE_OBJECTS
from tracer.kineto.events import EVENTS, Event, plain_text
from tracer.kineto.salvage import ARRAY_END, BOUNDARY, DECODE_ERRORS, Salvaged, salvage
from tracer.kineto.scanner import EventBatch, Scanner

_EVENTS_KEY = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_EMPTY_ARRAY = re.compile(rb"\s*\]")
_HEADER_LIMIT = 256 << 20  # chosen: memory for text before or after the events
_EVENT_LIMIT = 128 << 20  # chosen: no profiler writes an event so long
_LONG_PIECE = 8 << 20
"""Pieces above this length are checked before they are scanned. A piece is a block, a quarter of this, and a rest."""
_CANDIDATES = 256  # chosen: brackets tried in a damaged tail; each try decodes the rest
_MOST_ENDS = 1 << 16  # chosen: brackets that are kept; a footer has a few
_WINDOWS = (1 << 14, 1 << 18, 1 << 62)  # chosen: an event, an event with a stack, all of the text


class EventStream:
    """Yields the events piece by piece, once. Afterwards ``metadata`` holds the file's top-level fields."""

    def __init__(self, blocks: Iterable[bytes], name: str, loss: LossReport, scanner: Scanner) -> None:
        self.metadata: dict[str, Any] = {}
        self.is_list = False
        self.complete = False
        """Whether the end of the event array was found."""
        self._blocks = iter(blocks)
        self._name = name
        self._loss = loss
        self._scanner = scanner
        self._footer: list[bytes] = []

    def __iter__(self) -> Iterator[EventBatch]:
        searched = ahead = 0
        carry, waiting = self._read_header(), [block for block in (next(self._blocks, None),) if block is not None]
        if waiting:
            # The header's block is a separate piece: joined with the next block it would be the largest.
            waiting, carry = [*waiting, carry], b""
        while not self.complete:
            block = waiting.pop() if waiting else next(self._blocks, None)
            if block is None:
                yield self._last_piece(carry)
                break
            size = max(len(block), 1)
            text = b"".join((carry, block, *islice(self._blocks, ahead)))
            del block, carry  # each is megabytes
            cut = last_boundary(text, searched)
            searched = 0
            # Of an event of many blocks twice as many are read each time, so that its bytes are copied twice in all.
            ahead = 0 if cut >= 0 else min(2 * ahead + 1, max(_EVENT_LIMIT - len(text), 0) // size)
            if cut < 0:
                if len(text) > _EVENT_LIMIT:
                    raise TraceError(f"{self._name} has {len(text) >> 20} MiB of text without the start of an event: "
                                     "it is damaged or no profiler trace; record or copy it again.")
                carry, searched = text, len(text)
                continue
            carry = text[cut + 1:]
            batch = self._scan(memoryview(text)[:cut])
            if batch is not None:
                del text  # else it would stay in memory with the next one
                yield batch
                continue
            piece = decode_piece(memoryview(text)[:cut], self._loss)
            yield self._plain(piece.events)
            if piece.pending:
                carry = piece.pending + b"," + carry
            if piece.rest is not None:
                self.complete = True
                self._footer += [piece.rest, b",", carry]
        self._read_footer()

    def _read_header(self) -> bytes:
        """Read up to the first event; return the text after the opening bracket of the event array."""
        text = b""
        for block in self._blocks:
            searched = max(0, len(text) - 64)
            text = (text + block) if text else block.removeprefix(b"\xef\xbb\xbf")
            head = text[:4096].lstrip()
            if not head:
                text = b""
                continue
            if head.startswith(b"["):
                self.is_list = True
                return text[text.index(b"[") + 1:]
            if not head.startswith(b"{"):
                # The content is not shown: a link in a shared directory may lead to another user's private file.
                raise TraceError(f"{self._name} is not JSON: it begins neither with {{ nor with [; give the .json or "
                                 ".json.gz file written by the PyTorch profiler.")
            found = _EVENTS_KEY.search(text, searched)
            if found:
                self._parse_metadata(text[:found.start()].rstrip().rstrip(b",") + b"}", "before")
                return text[found.end():]
            if len(text) > _HEADER_LIMIT:
                break
        raise TraceError(self._why_no_events(text))

    def _why_no_events(self, text: bytes) -> str:
        if not text.strip():
            return f"{self._name} is empty: the profiler probably died before it wrote anything; record it again."
        try:
            value = msgspec.json.decode(text)
        except RecursionError:
            return f"{self._name} is nested too deeply to be a trace; it is damaged or was not written by a profiler."
        except DECODE_ERRORS as error:
            if "truncated" in str(error):
                return (f"{self._name} ends before its first event: the file was cut off while it was written or "
                        "copied; copy or record it again.")
            return f"{self._name} is not valid JSON ({error}) and holds no events; record or copy the trace again."
        if isinstance(value, dict) and "nodes" in value and "schema" in value:
            return (f"{self._name} is a PyTorch execution trace, not a profiler trace: it has no times; "
                    "give the profiler's Kineto file, or the directory that holds both.")
        return (f"{self._name} is JSON but no profiler trace (it has no \"traceEvents\"): "
                "check that it is the right file.")

    def _scan(self, text: bytes | memoryview) -> EventBatch | None:
        """Scan a piece. Raises ``TraceError`` for a long one of objects only, whose columns would fill memory."""
        if len(text) > _LONG_PIECE and bytes(text).count(b"{") > FREE_OBJECTS:
            raise TraceError(f"{self._name} has {len(text) >> 20} MiB of objects that are no events: it is damaged or "
                             "no profiler trace; record or copy it again.")
        return self._scanner.scan(text)

    def _plain(self, events: list[Event]) -> EventBatch:
        """Scan events whose text was unusual."""
        batch = self._scanner.scan(plain_text(events))
        if batch is None:
            raise TraceError(f"{self._name} holds events that could be decoded and not be read; this is a fault of "
                             "foretrace: report it, with the trace.")
        return batch

    def _last_piece(self, text: bytes) -> EventBatch:
        end, footer = find_array_end(text, self.is_list)
        if end >= 0:
            self.complete = True
            inside = text[:end].rstrip().removesuffix(b",")
            batch = self._scan(inside)
            if batch is not None:
                self._footer = [footer]
                return batch
            piece = decode_piece(inside, self._loss)
            if piece.pending:
                self._loss.dropped_events += 1  # the text ends within the event: nothing can complete it
            self._footer = [piece.rest, footer] if piece.rest is not None else [footer]
        else:
            piece = salvage(text, self._loss, at_end=True)
            self.complete = piece.rest is not None
            self._footer = [piece.rest or b""]
        return self._plain(piece.events)

    def _read_footer(self) -> None:
        if self.is_list:
            return
        held = 0
        for block in self._blocks:
            held += len(block)
            if held <= _HEADER_LIMIT:
                self._footer.append(block)
        text = b"".join(self._footer).strip().lstrip(b",").rstrip()
        if text == b"":
            if self.complete:
                self._loss.notes.append("The file ends right after its events, without the closing brace: metadata "
                                        "that followed may be lost.")
            return
        if text == b"}":
            return
        self._parse_metadata(b"{" + text, "after")

    def _parse_metadata(self, text: bytes, where: str) -> None:
        try:
            self.metadata.update(msgspec.json.decode(text, type=dict[str, Any]))
        except DECODE_ERRORS:
            if text.strip() in (b"{}", b"}", b"{"):
                return
            kept = _fields_one_by_one(text)
            self.metadata.update(kept)
            self._loss.notes.append(f"The metadata {where} the events is invalid JSON; {len(kept)} of its fields "
                                    "could be read.")


def last_boundary(text: bytes, searched: int = 0) -> int:
    """Return the position of the comma at the last event boundary of ``text``, -1 if there is none; the first
    ``searched`` bytes are known to have none."""
    least = max(0, searched - _WINDOWS[0])
    for window in _WINDOWS:
        start = max(least, len(text) - window)
        last = None
        for last in BOUNDARY.finditer(text, start):  # noqa: B007  (the last match is what is wanted)
            pass
        if last is not None:
            return last.start("comma")
        if start == least:
            break
    return -1


def decode_piece(text: bytes | memoryview, loss: LossReport) -> Salvaged:
    """Decode whole events: all at once if they are valid, else one by one."""
    try:
        return Salvaged(EVENTS.decode(b"".join((b"[", text, b"]"))))
    except DECODE_ERRORS:
        return salvage(bytes(text), loss, at_end=False)


def find_array_end(text: bytes, is_list: bool) -> tuple[int, bytes]:
    """Return (position of the event array's closing bracket or -1, the text after it) in the file's last text.

    The right bracket is the first whose following text completes the top-level object: later ones close arrays of the
    metadata.
    """
    if is_list:
        stripped = text.rstrip()
        return (len(stripped) - 1, b"") if stripped.endswith(b"]") else (-1, b"")
    if _EMPTY_ARRAY.match(text):
        return text.index(b"]"), text[text.index(b"]") + 1:]
    best, failures, looked_at = -1, 0, 0
    for match in reversed(deque(ARRAY_END.finditer(text), _MOST_ENDS)):
        footer = text[match.end():].strip()
        looked_at += len(footer)
        if footer == b"}" or (footer.startswith(b",") and _completes(footer)):
            best, failures = match.end() - 1, 0
            continue
        failures += 1
        if failures > (_CANDIDATES if best < 0 else _CANDIDATES // 16) or looked_at > _EVENT_LIMIT:
            break
    return (best, text[best + 1:]) if best >= 0 else (-1, b"")


def _completes(footer: bytes) -> bool:
    try:
        msgspec.json.decode(b'{"":0' + footer)
    except DECODE_ERRORS:
        return False
    return True


_FIELD = re.compile(rb'"(baseTimeNanoseconds|schemaVersion|displayTimeUnit|traceName|record_shapes|with_stack|'
                    rb'profile_memory|with_flops|with_modules)"\s*:\s*(-?\d+|"[^"\\]*")')
_OBJECTS = 16  # chosen: a trace has two
_OBJECT = re.compile(rb'"(distributedInfo|deviceProperties)"\s*:\s*')


def _fields_one_by_one(text: bytes) -> dict[str, Any]:
    """Return the most important fields from metadata that is invalid as a whole."""
    found: dict[str, Any] = {}
    for match in _FIELD.finditer(text):
        with suppress(*DECODE_ERRORS):
            found[match.group(1).decode()] = msgspec.json.decode(match.group(2))
    for match in islice(_OBJECT.finditer(text), _OBJECTS):
        for end in islice(re.finditer(rb"[}\]]", text[match.end():match.end() + (1 << 20)]), _CANDIDATES):
            try:
                found[match.group(1).decode()] = msgspec.json.decode(text[match.end():match.end() + end.end()])
                break
            except DECODE_ERRORS:
                continue
    return found
