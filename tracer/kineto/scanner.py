"""The fields of events as columns, read from their text; see ``scan_loop``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from tracer.kineto import scan_loop as loop
from tracer.kineto.events import NO_ARGS, Args, decimal_nanoseconds

_EVENT = {"ph": loop.TEXT, "cat": loop.TEXT_OR_NULL, "name": loop.TEXT, "pid": loop.NAMED, "tid": loop.NAMED,
          "ts": loop.TIME, "dur": loop.TIME, "args": loop.ARGS}
_ARGS = {
    **dict.fromkeys(("external_lower", "event_index", "sequence", "forward_thread", "record_id", "registers",
                     "shared_memory", "event_index_2022", "allocated", "total_allocated", "address", "memory_device",
                     "memory_kind"), loop.INTEGER),
    **dict.fromkeys(("external", "correlation", "device", "stream", "bytes", "wait_stream", "record_correlation"),
                    loop.LENIENT),
    **dict.fromkeys(("dims", "types", "strides", "scalars", "grid", "block", "dims_2020"), loop.RAW),
    **dict.fromkeys(("modules", "sync_kind", "collective"), loop.TEXT), "thread_name": loop.SCALAR,
    **dict.fromkeys(("elements_in", "elements_out", "group_size", "group", "group_id", "ranks", "is_async"),
                    loop.CHECKED), "dtype": loop.CHECKED_TEXT}
"""Treatment of each field of ``Event`` and ``Args`` (whose ``name`` is ``thread_name`` here)."""

EMPTY_TEXT, NULL, NO_JSON = 0, 1, 2
"""Codes of absent fields: for texts, for numbers that may be texts, and for JSON."""
_FIRST = ((b'""', loop.AS_TEXT, ""), (b"null", loop.AS_SCALAR, None), (b"", loop.AS_JSON, b""))
_DEEPEST = 1 << 11
"""Deepest nesting of brackets: more than the typed decoder takes."""
_LEAST_EVENTS, _LEAST_TOKENS, _LEAST_POOL = 64, 1 << 12, 1 << 18  # chosen: what a small trace needs; they grow
_ARGS_DECODER = msgspec.json.Decoder(Args)
_ENCODED = {info.name: info.encode_name for info in msgspec.structs.fields(Args)} | {"thread_name": "name"}


class HasValues(Protocol):
    """The texts and numbers behind the codes of a batch."""

    values: list[Any]


class EventBatch:
    """Columns of one piece's events, valid until the scanner reads the next piece. ``rows`` are row numbers."""

    def __init__(self, events: int, scanner: Scanner, args: dict[int, Args]) -> None:
        self.events = events
        self.collectives = args
        """Decoded arguments of the rows that name a collective."""
        self._scanner = scanner

    def number(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return int64 values of a field; its default where absent."""
        return self._scanner.numbers_at(name, rows)

    def code(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the token code of a field in each of the rows."""
        return self._scanner.codes_at(name, rows)

    def time(self, name: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return int64 nanoseconds of ``ts`` or ``dur``, and whether they are valid."""
        at = ("ts", "dur").index(name)
        return self._scanner.times[at][rows], self._scanner.timed[at][rows]

    def with_args(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows that have arguments."""
        return rows[self._scanner.spans[0][rows] > 0]


class TokenMap:
    """Maps codes of tokens to numbers; ``make`` gives a token's number when it is first met, in the order of rows."""

    def __init__(self, scanner: HasValues, make: Callable[[Any], int], dtype: Any = np.int32) -> None:
        self._scanner, self._make = scanner, make
        self._number = np.zeros(0, dtype)
        self._made: np.ndarray = np.zeros(0, np.bool_)

    def __call__(self, codes: np.ndarray) -> np.ndarray:
        """Return the numbers for the codes of tokens."""
        count = len(self._scanner.values)
        if len(self._number) < count:
            more = 2 * count - len(self._number)
            self._number = np.append(self._number, np.zeros(more, self._number.dtype))
            self._made = np.append(self._made, np.zeros(more, np.bool_))
        made = self._made[codes]
        if not made.all():
            for code in dict.fromkeys(codes[~made].tolist()):
                self._number[code] = self._make(self._scanner.values[code])
                self._made[code] = True
        return self._number[codes]


class Scanner:
    """Reads pieces of text, and keeps the distinct texts of all of them."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        """Values of tokens: text, a number, ``None``, or bytes for undecoded JSON."""
        self._state = np.zeros(6, np.int64)
        self._state[loop.SECRET] = int.from_bytes(os.urandom(8), "little", signed=True) | 1
        self._stack = np.zeros(_DEEPEST, np.int64)
        self._tokens = np.zeros((4, _LEAST_TOKENS), np.int64)
        self._slots = np.zeros(0, np.int64)
        self._pool: np.ndarray = np.zeros(_LEAST_POOL, np.uint8)
        for code, (text, kind, value) in enumerate(_FIRST):
            place = int(self._state[loop.POOL])
            self._pool[place:place + len(text)] = np.frombuffer(text, np.uint8)
            self._tokens[1:, code] = place, len(text), kind
            self._state[[loop.TOKENS, loop.POOL]] = code + 1, place + len(text)
            self.values.append(value)
        self._lay_out_fields()
        self.release()
        self._grow_tokens()

    def release(self) -> None:
        """Release the memory of the columns, which invalidates the last batch."""
        self._capacity = 0
        self._numbers, self._codes = np.empty((0, 0), np.int64), np.empty((0, 0), np.int32)
        self.times, self.spans, self._slow = (np.empty((rows, 0), np.int64) for rows in (2, 2, 4))
        self.timed = np.empty((2, 0), np.bool_)

    def scan(self, text: bytes | memoryview) -> EventBatch | None:
        """Read events separated by commas; ``None`` if anything in them is unusual."""
        data = np.frombuffer(text, np.uint8) if len(text) else np.zeros(0, np.uint8)
        before = self._state.copy()
        before[[loop.AT, loop.EVENTS, loop.SLOW]] = 0
        self._state[:] = before
        self._fields[2] = 0
        ended = self._run(data, len(text))
        batch = self._batch(text, int(before[loop.TOKENS])) if ended == loop.DONE else None
        if batch is None:
            self._forget(before)
        return batch

    def numbers_at(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the values of a number at rows of the last batch; its default where absent."""
        at = self._number_at[name]
        if self._fields[2, self._field_at[name]]:
            return self._numbers[at, rows]
        return np.full(len(rows), self._number_default[at])

    def codes_at(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the tokens of a text at rows of the last batch."""
        at = self._code_at[name]
        if self._fields[2, self._field_at[name]]:
            return self._codes[at, rows]
        return np.full(len(rows), self._code_default[at], np.int32)

    def _run(self, data: np.ndarray, end: int) -> int:
        while True:
            ended = loop.scan_events(
                data, end, self._state, self._key_slots, self._keys, self._key_bytes, self._fields,
                self._number_default, self._code_default, self._numbers, self._codes, self.times, self.timed,
                self.spans, self._slow, self._tokens, self._slots, self._pool, self._stack)
            if ended == loop.MORE_TOKENS:
                self._grow_tokens()
            elif ended == loop.MORE_EVENTS:
                at, events = int(self._state[loop.AT]), int(self._state[loop.EVENTS])
                rest = (end - at) * events // (at + 1) * 9 // 8
                self._make_room(self._capacity + max(_LEAST_EVENTS, self._capacity // 4, min(rest, 3 * self._capacity)))
            else:
                return ended

    def _batch(self, text: bytes | memoryview, known: int) -> EventBatch | None:
        count = int(self._state[loop.TOKENS])
        pool = self._pool[:self._state[loop.POOL]].tobytes() if count > known else b""
        base = int(self._tokens[1, known]) if count > known else 0
        pool = pool[base:]
        places, lengths, kinds = (each[known:count].tolist() for each in self._tokens[1:4])
        found: list[Any] = []
        try:
            for place, length, kind in zip(places, lengths, kinds, strict=True):
                token = pool[place - base:place - base + length]
                found.append(_value(token, kind))
            events = int(self._state[loop.EVENTS])
            args = {}
            if self._fields[2, self._field_at["collective"]]:
                named = self._codes[self._code_at["collective"]][:events]
                for row in np.flatnonzero(named != EMPTY_TEXT).tolist():
                    args[row] = _ARGS_DECODER.decode(text[self.spans[0, row]:self.spans[1, row]])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        self.values += found
        for row, which, begin, end in self._slow[:, :self._state[loop.SLOW]].T.tolist():
            self.times[which, row], self.timed[which, row] = decimal_nanoseconds(bytes(text[begin:end]))
        return EventBatch(events, self, args)

    def _forget(self, before: np.ndarray) -> None:
        """Forget the tokens of a text whose scan was given up."""
        if self._state[loop.TOKENS] != before[loop.TOKENS]:
            self._slots[:] = -1
            loop.place_tokens(self._tokens, self._slots, self._pool, int(before[loop.TOKENS]),
                              int(before[loop.SECRET]))
        self._state[:] = before

    def _make_room(self, events: int) -> None:
        """Make room for ``events`` events of a piece, and keep those that are stored."""
        there = int(self._state[loop.EVENTS])
        old, self._numbers = self._numbers, np.empty((len(self._number_default), events), np.int64)
        for name, column in self._number_at.items():
            if self._fields[2, self._field_at[name]]:
                self._numbers[column, :there] = old[column, :there]
                self._numbers[column, there:] = self._number_default[column]
        texts, self._codes = self._codes, np.empty((len(self._code_default), events), np.int32)
        for name, column in self._code_at.items():
            if self._fields[2, self._field_at[name]]:
                self._codes[column, :there] = texts[column, :there]
                self._codes[column, there:] = self._code_default[column]
        self.times, self.timed, self.spans = (_longer(each, events, there) for each in
                                              (self.times, self.timed, self.spans))
        self._slow = _longer(self._slow, 2 * events, int(self._state[loop.SLOW]))
        self._capacity = events

    def _grow_tokens(self) -> None:
        tokens = np.empty((4, 2 * self._tokens.shape[1]), np.int64)
        tokens[:, :self._tokens.shape[1]] = self._tokens
        self._tokens = tokens
        self._pool = np.append(self._pool, np.empty(len(self._pool), np.uint8))
        self._slots = np.full(4 * tokens.shape[1], -1, np.int64)
        loop.place_tokens(tokens, self._slots, self._pool, int(self._state[loop.TOKENS]),
                          int(self._state[loop.SECRET]))

    def _lay_out_fields(self) -> None:
        """Number the fields and their columns, and hash the fields' keys."""
        fields = [(0, name, name, action) for name, action in _EVENT.items()] + \
            [(1, name, _ENCODED[name], action) for name, action in _ARGS.items()]
        self._field_at = {name: at for at, (_, name, _, _) in enumerate(fields)}
        self._number_at: dict[str, int] = {}
        self._code_at: dict[str, int] = {}
        self._fields = np.zeros((3, len(fields)), np.int64)
        keys, joined = np.zeros((2, len(fields)), np.int64), b""
        self._key_slots = np.full((2, 256), -1, np.int64)
        for at, (level, name, key, action) in enumerate(fields):
            column = ("ts", "dur").index(name) if action == loop.TIME else 0
            if action in (loop.INTEGER, loop.LENIENT):
                column = self._number_at[name] = len(self._number_at)
            elif action in _ABSENT:
                column = self._code_at[name] = len(self._code_at)
            self._fields[:2, at] = action, column
            keys[:, at] = len(joined), len(key)
            joined += key.encode()
            slot = _key_hash(key.encode()) & 255
            while self._key_slots[level, slot] >= 0:
                slot = (slot + 1) & 255
            self._key_slots[level, slot] = at
        self._keys, self._key_bytes = keys, np.frombuffer(joined, np.uint8)
        self._number_default = np.array([getattr(NO_ARGS, name) for name in self._number_at], np.int64)
        self._code_default = np.array([_ABSENT[int(self._fields[0, self._field_at[name]])] for name in self._code_at],
                                      np.int64)


_ABSENT = {loop.TEXT: EMPTY_TEXT, loop.TEXT_OR_NULL: NULL, loop.NAMED: NULL, loop.SCALAR: NULL, loop.RAW: NO_JSON}


def _longer(rows: np.ndarray, count: int, there: int) -> np.ndarray:
    """Return rows with room for ``count`` entries, and copy the first ``there`` entries."""
    found = np.empty((len(rows), count), rows.dtype)
    found[:, :there] = rows[:, :there]
    return found


def _key_hash(key: bytes) -> int:
    mixed = 0
    for each in key:
        mixed = (mixed * 31 + each) & (2**64 - 1)
    mixed = mixed - 2**64 if mixed >= 2**63 else mixed  # shifts keep the sign
    return mixed ^ mixed >> 7


def _value(token: bytes, kind: int) -> Any:
    if kind == loop.AS_JSON:
        return token
    if kind == loop.AS_TEXT and token[:1] == b'"' and b"\\" not in token:
        return token[1:-1].decode()
    return msgspec.json.decode(token)
