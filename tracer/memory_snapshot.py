"""Snapshots of CUDA memory (``torch.cuda.memory._snapshot``), read without running any code in them.

Such a file is a pickle, and a pickle is a program: it may call any function of any module. A snapshot consists of plain
values (dictionaries, lists, tuples, texts, numbers, None and booleans), which need no calls. So the standard library's
unpickler is reduced to the operations that build plain values; any other operation makes it refuse the file.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, ClassVar

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
from tracer.guard import MOST_PART, DecodeError, check_key, well_formed
from tracer.input_file import PathLike, open_input
from tracer.kineto.events import MAX_US

MOST_BYTES = 4 << 30
"""Largest file. Snapshots with stacks take some 100 bytes for each event."""
UNKNOWN_PLACE = "not recorded"
"""The place of an allocation without a stack."""
MOST_SIZE = 1 << 50
"""Bytes that no allocation reaches: a thousand times the memory of today's largest device."""
_AUTOGRAD = ("autograd::", "Engine::evaluate_function", ":backward")
_NAMES = {ord(operation.code): operation.name for operation in pickletools.opcodes}
_OPERATIONS = frozenset({
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING", "EMPTY_DICT",
    "EMPTY_LIST", "EMPTY_TUPLE", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST", "DICT", "APPEND", "APPENDS",
    "SETITEM", "SETITEMS", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "BINGET", "LONG_BINGET", "GET", "POP", "PROTO",
    "FRAME", "STOP"})
"""Pickle operations that build plain values of plain values; all others are refused."""
_KEYS = {"DICT": slice(None, None, 2), "SETITEM": slice(-2, -1), "SETITEMS": slice(None, None, 2)}
"""Positions of the keys on the stack, for operations that fill dictionaries."""


class SnapshotError(TraceError):
    """A file is no memory snapshot, or holds more than plain values."""


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
    """Return the value of a pickle that consists of plain values; nothing in it is run or imported.

    Raises:
        SnapshotError: it holds anything else, is damaged, or is too large.
    """
    # Check the size first: reading "at most 4 GiB" allocates 4 GiB.
    if stream.seek(0, os.SEEK_END) > MOST_BYTES:
        raise SnapshotError(f"{name} is larger than {MOST_BYTES >> 30} GiB; record less history "
                            "(max_entries of torch.cuda.memory._record_memory_history).")
    stream.seek(0)
    try:
        return _PlainUnpickler(io.BytesIO(stream.read()), encoding="utf-8", errors="replace").load()
    except KeyError as error:
        if error.args[0] in _NAMES:
            raise SnapshotError(f"{name} holds more than plain values (pickle operation {_NAMES[error.args[0]]}): it "
                                "could run a program, so it is not read. A snapshot of "
                                "torch.cuda.memory._dump_snapshot holds none of that.") from None
        why = "KeyError"
    except DecodeError as error:
        raise SnapshotError(f"{name} is no snapshot of CUDA memory: {error}; ask for it again, as "
                            "torch.cuda.memory._dump_snapshot writes it.") from None
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, TypeError, OverflowError, MemoryError,
            AttributeError, struct.error) as error:
        why = type(error).__name__
    raise SnapshotError(f"{name} is damaged, or no pickle ({why}); copy it again.")


def _checked(do: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """Wrap an operation that fills a dictionary, so that the keys on its stack are checked before they are hashed."""
    def checked(unpickler: Any) -> None:
        for key in unpickler.stack[keys]:
            check_key(key)
        do(unpickler)

    return checked


class _PlainUnpickler(pickle._Unpickler):
    """Python's own unpickler, reduced to the operations that build plain values."""

    dispatch: ClassVar = {code: _checked(do, _KEYS[_NAMES[code]]) if _NAMES[code] in _KEYS else do
                          for code, do in pickle._Unpickler.dispatch.items() if _NAMES[code] in _OPERATIONS}


def snapshot_timeline(path: PathLike, device: int | None = None) -> MemoryTimeline:
    """Return the memory in a snapshot of ``torch.cuda.memory._dump_snapshot``; nothing in it is run.

    Args:
        path: path of the file.
        device: number of the device; by default the one with the longest history.

    Raises:
        SnapshotError: it is not such a file, or holds more than plain values.
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
    now = sum(_size(one.get("allocated_size")) for one in segments)
    events = [one for one in (history[chosen] if history else []) if isinstance(one, dict)]
    rows = [(one, 1 if one["action"] == "alloc" else -1) for one in events
            if one.get("action") in ("alloc", "free_completed")]
    size = np.array([sign * _size(one.get("size")) for one, sign in rows], np.int64)
    if now + sum(map(abs, size.tolist())) >= 1 << 62:
        raise SnapshotError(f"{name} is damaged: its sizes add up to more bytes than a number of 64 bits holds; copy "
                            "it again.")
    address = np.array([_whole(one.get("addr")) for one, _ in rows], np.int64)
    time = np.array([min(_whole(one.get("time_us")), MAX_US) for one, _ in rows], np.int64) * 1000
    stacks = _Stacks()
    notes = []
    if not len(rows):
        notes.append("The snapshot has no history: torch.cuda.memory._record_memory_history() was not on. What is told "
                     "is the moment it was taken at.")
        held = np.zeros((len(KINDS), 1), np.int64)
        held[KINDS.index(Holds.OTHER)] = now
        return MemoryTimeline(f"snapshot of GPU {chosen}", np.zeros(1, np.int64), held, _block_places(segments, stacks),
                              True, False, (), tuple(notes))
    base = max(now - int(size.sum()), int(-np.cumsum(size).min()), 0)
    if base:
        notes.append(f"{binary_size(base)} were there before the history begins, and are told as other.")
    freed, born = matched_changes(address, size)
    phase = np.array([stacks.phase(one) for one, _ in rows], np.int64)
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
                     f"{binary_size(_size(oom[0].get('size')))}.")
    reserved = sum(_size(one.get("total_size")) for one in segments)
    notes.append(f"The allocator had reserved {binary_size(reserved)} when the snapshot was taken, "
                 f"{binary_size(now)} of it handed out.")
    return timeline_of(f"snapshot of GPU {chosen}", time, size, holds, _snapshot_places(rows, size, stacks),
                       inferred=True, timed=bool(time.any()), base=base, notes=notes)


def _whole(value: object) -> int:
    """Return an address or a time; 0 for any other value."""
    return value if type(value) is int and 0 <= value < 1 << 63 else 0


def _size(value: object) -> int:
    """Return a number of bytes; 0 for any other value."""
    return value if type(value) is int and 0 <= value < MOST_SIZE else 0


class _Stacks:
    """The facts in the stacks of one snapshot. Events share stacks, frames and texts, so each is read once."""

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[int, str]] = {}
        self._frames: dict[int, tuple[Phase | None, str, bool]] = {}
        self._texts: dict[str, tuple[bool, bool, bool, str]] = {}

    def phase(self, event: Mapping[str, Any]) -> int:
        """Return the phase that an allocation's stack shows; autograd's thread has no Python frames except hooks."""
        return self._stack(event)[0]

    def place(self, event: Mapping[str, Any]) -> str:
        """Return the innermost line of the program itself, not of an installed package or of C++."""
        return self._stack(event)[1]

    def _stack(self, event: Mapping[str, Any]) -> tuple[int, str]:
        frames = event.get("frames")
        found = self._stacks.get(id(frames))
        if found is None:
            found = self._stacks[id(frames)] = self._read(frames)
        return found

    def _read(self, frames: object) -> tuple[int, str]:
        there = [self._frame(frame) for frame in (frames if isinstance(frames, list) else ())
                 if isinstance(frame, dict)]
        phases = {phase for phase, _, _ in there}
        phase = (Phase.OPTIMIZER if Phase.OPTIMIZER in phases else
                 Phase.BACKWARD if Phase.BACKWARD in phases or not there else Phase.FORWARD)
        own = [(place, installed) for _, place, installed in there if place]
        mine = [place for place, installed in own if not installed] or [place for place, _ in own]
        return int(phase), mine[0] if mine else UNKNOWN_PLACE

    def _frame(self, frame: dict[str, Any]) -> tuple[Phase | None, str, bool]:
        """Return a frame's phase, its place if it is a Python frame, and whether that is in an installed package."""
        found = self._frames.get(id(frame))
        if found is not None:
            return found
        file, name = (text if isinstance(text, str) else "" for text in (frame.get("filename"), frame.get("name")))
        (optimizer, backward, installed, base), (in_optimizer, in_backward, _, _) = self._text(file), self._text(name)
        phase = (Phase.OPTIMIZER if optimizer or in_optimizer else
                 Phase.BACKWARD if backward or in_backward or name.startswith("backward") else None)
        place = f"{base}:{_whole(frame.get('line'))} {well_formed(name, MOST_PART)}" if file.endswith(".py") else ""
        self._frames[id(frame)] = phase, place, bool(place) and installed
        return self._frames[id(frame)]

    def _text(self, text: str) -> tuple[bool, bool, bool, str]:
        """Return whether a file's or function's name is the optimizer's, autograd's, or an installed package's, and its
        last part."""
        found = self._texts.get(text)
        if found is None:
            found = self._texts[text] = (
                "torch/optim" in text, any(part in text for part in _AUTOGRAD), "site-packages" in text,
                well_formed(text.rpartition("/")[2], MOST_PART))
        return found


def _snapshot_places(rows: Sequence[tuple[Mapping[str, Any], int]], size: Int64, stacks: _Stacks) -> dict[str, int]:
    peak = int(np.argmax(np.cumsum(size)))
    alive: dict[int, tuple[str, int]] = {}
    for event, sign in rows[:peak + 1]:
        address = _whole(event.get("addr"))
        if sign > 0:
            alive[address] = stacks.place(event), _size(event.get("size"))
        else:
            alive.pop(address, None)
    return _summed(alive.values())


def _block_places(segments: Sequence[Mapping[str, Any]], stacks: _Stacks) -> dict[str, int]:
    lists = {id(blocks): blocks for one in segments if isinstance(blocks := one.get("blocks"), list)}
    return _summed((stacks.place(block), _size(block.get("size"))) for blocks in lists.values() for block in blocks
                   if isinstance(block, dict) and block.get("state") == "active_allocated")


def _summed(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for place, size in parts:
        found[place] += size
    return dict(sorted(found.items(), key=lambda each: -each[1]))
