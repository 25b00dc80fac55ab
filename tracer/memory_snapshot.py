"""Snapshots of CUDA memory (``torch.cuda.memory._snapshot``), read without running anything in them.

Such a file is a pickle, and a pickle is a program: it may call any function of any module. What a snapshot consists of
(dictionaries, lists, tuples, texts, numbers, None and booleans) needs none of that. So the operations are decoded by
the standard library's ``pickletools``, which runs none, and only those that build plain values are done here; with the
first other one the file is refused. Sizes and depths are bounded before anything is built.
"""

from __future__ import annotations

import pickletools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from tracer.arrays import Int64
from tracer.device_memory import (
    KINDS,
    Holds,
    MemoryTimeline,
    binary_size,
    inferred_holds,
    matched_changes,
    timeline_of,
)
from tracer.errors import ForetraceError, TraceError
from tracer.graph import NONE, Phase
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

UNKNOWN_PLACE = "not recorded"
"""The place of an allocation without a stack."""
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
        return _Machine(name, len(data)).run(data)
    except SnapshotError:
        raise
    except (ValueError, IndexError, TypeError, OverflowError, MemoryError, UnicodeError, AttributeError) as error:
        raise SnapshotError(f"{name} is damaged, or no pickle ({type(error).__name__}); copy it again.") from None


class _Machine:
    """The stack of values that are not yet in one another, and those that were put aside to be used again."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
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

    def run(self, data: bytes) -> Any:
        """Do the operations until the last, as the standard library decodes them: it runs none."""
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            operation = opcode.name
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


def snapshot_timeline(path: PathLike, device: int | None = None) -> MemoryTimeline:
    """Return the memory that a snapshot of ``torch.cuda.memory._dump_snapshot`` tells of; nothing in it is run.

    Args:
        path: of the file.
        device: number of the device; by default the one with the longest history.

    Raises:
        SnapshotError: it is no such file, or holds more than plain values.
        ForetraceError: it has nothing of that device.
    """
    name = str(path)
    snapshot = read_snapshot(path)
    history = snapshot.get("device_traces")
    history = [events if isinstance(events, list) else [] for events in history] if isinstance(history, list) else []
    chosen = max(range(len(history)), key=lambda at: len(history[at]), default=0) if device is None else device
    segments = [one for one in snapshot["segments"] if isinstance(one, dict) and one.get("device", 0) == chosen]
    if not 0 <= chosen < max(len(history), 1) or (not segments and not (history and history[chosen])):
        raise ForetraceError(f"{name} says nothing of GPU {chosen}; it has a history of {len(history)} devices.")
    now = sum(_whole(one.get("allocated_size")) for one in segments)
    events = [one for one in (history[chosen] if history else []) if isinstance(one, dict)]
    rows = [(one, 1 if one["action"] == "alloc" else -1) for one in events
            if one.get("action") in ("alloc", "free_completed")]
    size = np.array([sign * _whole(one.get("size")) for one, sign in rows], np.int64)
    address = np.array([_whole(one.get("addr")) for one, _ in rows], np.int64)
    time = np.array([_whole(one.get("time_us")) for one, _ in rows], np.int64) * 1000
    notes = []
    if not len(rows):
        notes.append("The snapshot has no history: torch.cuda.memory._record_memory_history() was not on. What is told "
                     "is the moment it was taken at.")
        held = np.zeros((len(KINDS), 1), np.int64)
        held[KINDS.index(Holds.OTHER)] = now
        return MemoryTimeline(f"snapshot of GPU {chosen}", np.zeros(1, np.int64), held, _block_places(segments),
                              True, False, (), tuple(notes))
    base = max(now - int(size.sum()), int(-np.cumsum(size).min()), 0)
    if base:
        notes.append(f"{binary_size(base)} were there before the history begins, and are told as other.")
    freed, born = matched_changes(address, size)
    phase = np.array([_phase_of(one) for one, _ in rows], np.int64)
    until = np.where(freed >= 0, phase[freed], NONE)
    forward, backward, optimizer = (phase == each for each in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))
    holds = inferred_holds(born, size, [
        (forward & (until == Phase.BACKWARD), Holds.ACTIVATIONS),
        (backward & (until != Phase.BACKWARD), Holds.GRADIENTS),
        (optimizer & (freed < 0), Holds.OPTIMIZER_STATE),
        (forward & (freed < 0), Holds.OTHER)])
    oom = [one for one in events if one.get("action") == "oom"]
    if oom:
        notes.append(f"{len(oom)} allocations failed for want of memory, the first of "
                     f"{binary_size(_whole(oom[0].get('size')))}.")
    reserved = sum(_whole(one.get("total_size")) for one in segments)
    notes.append(f"The allocator had reserved {binary_size(reserved)} when the snapshot was taken, "
                 f"{binary_size(now)} of it handed out.")
    return timeline_of(f"snapshot of GPU {chosen}", time, size, holds, _snapshot_places(rows, size), inferred=True,
                     timed=bool(time.any()), base=base, notes=notes)


def _whole(value: object) -> int:
    """A number of bytes or an address; 0 for what is none."""
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else 0


def _phase_of(event: Mapping[str, Any]) -> int:
    """The phase that an allocation's stack shows: autograd's thread has no Python frames but those of hooks."""
    frames = _frames(event)
    texts = [f"{frame.get('filename', '')}:{frame.get('name', '')}" for frame in frames]
    if any("torch/optim" in text for text in texts):
        return int(Phase.OPTIMIZER)
    if any("autograd::" in text or "Engine::evaluate_function" in text or ":backward" in text for text in texts):
        return int(Phase.BACKWARD)
    if not texts:
        return int(Phase.BACKWARD)
    return int(Phase.FORWARD)


def _frames(event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    frames = event.get("frames")
    return [frame for frame in frames if isinstance(frame, dict)] if isinstance(frames, list) else []


def _place_of(event: Mapping[str, Any]) -> str:
    """The innermost line of the program itself: not of an installed package, nor of C++."""
    frames = _frames(event)
    own = [frame for frame in frames if str(frame.get("filename", "")).endswith(".py")]
    mine = [frame for frame in own if "site-packages" not in str(frame.get("filename"))] or own
    if not mine:
        return UNKNOWN_PLACE
    frame = mine[0]
    return f"{str(frame.get('filename')).rpartition('/')[2]}:{_whole(frame.get('line'))} {frame.get('name', '')}"


def _snapshot_places(rows: Sequence[tuple[Mapping[str, Any], int]], size: Int64) -> dict[str, int]:
    peak = int(np.argmax(np.cumsum(size)))
    alive: dict[int, tuple[str, int]] = {}
    for event, sign in rows[:peak + 1]:
        address = _whole(event.get("addr"))
        if sign > 0:
            alive[address] = _place_of(event), _whole(event.get("size"))
        else:
            alive.pop(address, None)
    return _summed(alive.values())


def _block_places(segments: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    blocks = [block for segment in segments for block in segment.get("blocks") or [] if isinstance(block, dict)]
    return _summed((_place_of(block), _whole(block.get("size"))) for block in blocks
                   if block.get("state") == "active_allocated")


def _summed(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for place, size in parts:
        found[place] += size
    return dict(sorted(found.items(), key=lambda each: -each[1]))
