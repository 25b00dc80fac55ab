"""Snapshots of CUDA memory (``torch.cuda.memory._snapshot``), read without running anything in them.

Such a file is a pickle, and a pickle is a program: it may call any function of any module. What a snapshot consists of
(dictionaries, lists, tuples, texts, numbers, None and booleans) needs none of that. So the standard library's unpickler
is left with the operations that build plain values; with the first other one the file is refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
from tracer.input_file import PathLike, open_input

MOST_BYTES = 4 << 30
"""Of a file. Snapshots with stacks take some 100 bytes an event."""
UNKNOWN_PLACE = "not recorded"
"""The place of an allocation without a stack."""
_NAMES = {ord(operation.code): operation.name for operation in pickletools.opcodes}
_OPERATIONS = frozenset({
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING", "EMPTY_DICT",
    "EMPTY_LIST", "EMPTY_TUPLE", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST", "DICT", "APPEND", "APPENDS",
    "SETITEM", "SETITEMS", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "BINGET", "LONG_BINGET", "GET", "POP", "PROTO",
    "FRAME", "STOP"})
"""Operations that build plain values of plain values; no other is done."""


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
        return _PlainUnpickler(io.BytesIO(data), encoding="utf-8", errors="replace").load()
    except KeyError as error:
        if error.args[0] in _NAMES:
            raise SnapshotError(f"{name} holds more than plain values (pickle operation {_NAMES[error.args[0]]}): it "
                                "could run a program, so it is not read. A snapshot of "
                                "torch.cuda.memory._dump_snapshot holds none of that.") from None
        why = "KeyError"
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, TypeError, OverflowError, MemoryError,
            AttributeError) as error:
        why = type(error).__name__
    raise SnapshotError(f"{name} is damaged, or no pickle ({why}); copy it again.")


class _PlainUnpickler(pickle._Unpickler):
    """Python's own unpickler, without the operations that are not of plain values: it does not know them."""

    dispatch: ClassVar = {code: do for code, do in pickle._Unpickler.dispatch.items() if _NAMES[code] in _OPERATIONS}


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
