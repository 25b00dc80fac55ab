"""Snapshots of CUDA memory (``torch.cuda.memory._snapshot``), read without running anything in them.

Such a file is a pickle, and a pickle is a program: it may call any function of any module. What a snapshot consists of
(dictionaries, lists, tuples, texts, numbers, None and booleans) needs none of that. So the operations are decoded by
the standard library's ``pickletools``, which runs none, and only those that build plain values are done here; with the
first other one the file is refused. Sizes and depths are bounded before anything is built.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from tracer.errors import TraceError
from tracer.input_file import PathLike, open_input

MOST_BYTES = 4 << 30
"""Of a file. Snapshots with stacks take some 100 bytes an event."""
MOST_OPERATIONS = 400_000_000
MOST_DEPTH = 1_000
"""Of values on the stack that are not yet in one another: a snapshot needs some ten."""
MOST_TEXT = 1 << 20
"""Characters of a text."""
MOST_DIGITS = 9
"""Bytes of a whole number."""

_MARK = object()
_LITERALS = frozenset({
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT",
    "BINFLOAT", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"})
_IGNORED = frozenset({"PROTO", "FRAME"})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


class SnapshotError(TraceError):
    """A file is no snapshot of memory, or holds more than plain values."""


def read_snapshot(path: PathLike) -> dict[str, Any]:
    """Return a snapshot as plain values.

    Raises:
        SnapshotError: the file is no pickle of plain values, is damaged, or too large.
    """
    name = str(path)
    with open_input(path) as stream:
        found = plain_pickle(stream, name)
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise SnapshotError(f"{name} is no snapshot of CUDA memory (it has no list of segments); write one with "
                            "torch.cuda.memory._dump_snapshot.")
    return found


def plain_pickle(stream: BinaryIO, name: str) -> Any:
    """Return the value of a pickle that consists of plain values alone; nothing in it is run or imported.

    Raises:
        SnapshotError: it holds anything else, is damaged, or is too large.
    """
    data = stream.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise SnapshotError(f"{name} is larger than {MOST_BYTES >> 30} GiB; record less history "
                            "(max_entries of torch.cuda.memory._record_memory_history).")
    try:
        return _Machine(name, len(data)).run(_operations(data))
    except SnapshotError:
        raise
    except (ValueError, IndexError, TypeError, OverflowError, MemoryError, UnicodeError, AttributeError) as error:
        raise SnapshotError(f"{name} is damaged, or no pickle ({type(error).__name__}); copy it again.") from None


def _operations(data: bytes) -> Iterator[tuple[str, Any]]:
    """Names and arguments of the operations, as the standard library decodes them: it runs none."""
    for operation, argument, _ in pickletools.genops(data):
        yield operation.name, argument


@dataclass
class _Machine:
    """The stack of values that are not yet in one another, and those that were put aside to be used again."""

    name: str
    size: int

    def __post_init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.marks = 0
        self.done: dict[str, Callable[[Any], None]] = {
            "EMPTY_DICT": lambda _: self._push({}), "EMPTY_LIST": lambda _: self._push([]),
            "EMPTY_TUPLE": lambda _: self._push(()), "MARK": self._mark, "TUPLE": self._tuple,
            "TUPLE1": lambda _: self._short_tuple(1), "TUPLE2": lambda _: self._short_tuple(2),
            "TUPLE3": lambda _: self._short_tuple(3), "LIST": lambda _: self._push(self._to_mark()),
            "DICT": lambda _: self._push(_pairs(self._to_mark())), "APPEND": self._append, "APPENDS": self._appends,
            "SETITEM": self._set_item, "SETITEMS": self._set_items,
            "MEMOIZE": lambda _: self._put(len(self.memo)), "BINPUT": self._put, "LONG_BINPUT": self._put,
            "PUT": self._put, "BINGET": self._get, "LONG_BINGET": self._get, "GET": self._get,
            "POP": lambda _: self._pop()}

    def run(self, operations: Iterator[tuple[str, Any]]) -> Any:
        """Do the operations until the last."""
        for count, (operation, argument) in enumerate(operations):
            if count > MOST_OPERATIONS or len(self.stack) > MOST_DEPTH + self.marks * self.size:
                raise SnapshotError(f"{self.name} is nested too deeply, or too large, for a snapshot of memory.")
            if operation in _LITERALS:
                self._push(_literal(operation, argument, self.name))
            elif operation == "STOP":
                found = self._pop()
                if self.stack:
                    raise ValueError("values that are in nothing")
                return found
            elif operation not in _IGNORED:
                self._do(operation, argument)
        raise SnapshotError(f"{self.name} ends in the midst: it was cut off; copy it again.")

    def _do(self, operation: str, argument: Any) -> None:
        if operation not in self.done:
            raise SnapshotError(f"{self.name} holds more than plain values (pickle operation {operation}): it could "
                                "run a program, so it is not read. A snapshot of torch.cuda.memory._dump_snapshot "
                                "holds none of that.")
        self.done[operation](argument)

    def _push(self, value: Any) -> None:
        self.stack.append(value)

    def _pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark is no value")
        return value

    def _mark(self, _: Any) -> None:
        self.marks += 1
        if self.marks > MOST_DEPTH:
            raise SnapshotError(f"{self.name} is nested too deeply for a snapshot of memory.")
        self.stack.append(_MARK)

    def _to_mark(self) -> list[Any]:
        """Take the values above the last mark, and the mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("no mark")
        found = self.stack[at + 1:]
        del self.stack[at:]
        self.marks -= 1
        return found

    def _tuple(self, _: Any) -> None:
        self._push(tuple(self._to_mark()))

    def _short_tuple(self, size: int) -> None:
        values = [self._pop() for _ in range(size)]
        self._push(tuple(reversed(values)))

    def _append(self, _: Any) -> None:
        value = self._pop()
        self._list().append(value)

    def _appends(self, _: Any) -> None:
        values = self._to_mark()
        self._list().extend(values)

    def _set_item(self, _: Any) -> None:
        value, key = self._pop(), self._pop()
        self._dict().update(_pairs([key, value]))

    def _set_items(self, _: Any) -> None:
        values = self._to_mark()
        self._dict().update(_pairs(values))

    def _list(self) -> list[Any]:
        if type(self.stack[-1]) is not list:
            raise ValueError("no list to append to")
        return self.stack[-1]  # type: ignore[no-any-return]

    def _dict(self) -> dict[Any, Any]:
        if type(self.stack[-1]) is not dict:
            raise ValueError("no dictionary to put into")
        return self.stack[-1]  # type: ignore[no-any-return]

    def _put(self, place: int) -> None:
        if not 0 <= place <= self.size or self.stack[-1] is _MARK:
            raise ValueError("no such place")
        self.memo[place] = self.stack[-1]

    def _get(self, place: int) -> None:
        if place not in self.memo:
            raise ValueError("no such place")
        self._push(self.memo[place])


def _pairs(values: list[Any]) -> dict[Any, Any]:
    """Keys and values in turn as a dictionary; keys are texts, numbers or tuples of these."""
    if len(values) % 2:
        raise ValueError("a key without a value")
    return dict(zip(values[::2], values[1::2], strict=True))


def _literal(operation: str, argument: Any, name: str) -> Any:
    if operation in _CONSTANTS:
        return _CONSTANTS[operation]
    if isinstance(argument, bytes):
        argument = argument.decode("utf-8", "replace")
    if isinstance(argument, str) and len(argument) > MOST_TEXT:
        raise SnapshotError(f"{name} holds a text of {len(argument):,} characters, which no snapshot of memory has.")
    if isinstance(argument, int) and argument.bit_length() > 8 * MOST_DIGITS:
        raise SnapshotError(f"{name} holds a number of {argument.bit_length():,} bits, which no snapshot of memory "
                            "has.")
    return argument
