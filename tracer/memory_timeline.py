"""``MemoryTimeline``: device memory over time by what it holds, and who allocated it. Needs no torch.

::

    profiler's [memory] events ──┐
    a step traced by shapes ─────┼─> columns: time, bytes by kind ─> peak, tables, plot
    a snapshot of CUDA memory ───┘

A step traced by shapes knows what each storage holds. Of what was recorded it is inferred from when memory was handed
out and given back: made in forward and given back in backward is an activation, and so on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tracer.arrays import Int64
from tracer.charts import Chart, ChartSeries
from tracer.errors import ForetraceError
from tracer.graph import NONE, SHAPE_ONLY, ExecutionGraph, Phase
from tracer.input_file import PathLike
from tracer.memory_account import PEAK, Holds, MemoryAccount, binary_size
from tracer.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

KINDS = tuple(Holds)
UNKNOWN_PLACE = "not recorded"


@dataclass(frozen=True, repr=False)
class MemoryTimeline(Shown):
    """Memory of one device over time.

    Attributes:
        source: where it comes from, in words.
        time_ns: of each change; of a step traced by shapes the number of its operation, as it has no times.
        held_bytes: bytes of each ``Holds`` after each change, [kinds, changes].
        places: who allocated what was there at the peak: module, operation or line of the program; and bytes.
        inferred: whether what memory holds was inferred from when it was handed out and given back.
        timed: whether ``time_ns`` is a time.
        steps: begin and end of each step, as ``time_ns``.
        notes: what is to be known of it.
        on_device: whether it is a device's memory, not the host's.
    """

    source: str
    time_ns: Int64
    held_bytes: Int64
    places: Mapping[str, int]
    inferred: bool = False
    timed: bool = True
    steps: tuple[tuple[str, int, int], ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)
    on_device: bool = True

    @property
    def total_bytes(self) -> Int64:
        """Bytes handed out after each change."""
        return self.held_bytes.sum(axis=0)  # type: ignore[no-any-return]

    @property
    def peak_at(self) -> int:
        """Return which change the peak is at."""
        return int(np.argmax(self.total_bytes)) if len(self.time_ns) else 0

    @property
    def peak_bytes(self) -> int:
        """The most that was handed out at once."""
        return int(self.total_bytes.max(initial=0))

    @property
    def at_peak(self) -> MemoryAccount:
        """Return what memory held at the peak."""
        held = self.held_bytes[:, self.peak_at] if len(self.time_ns) else np.zeros(len(KINDS))
        return MemoryAccount(**{kind.value: float(size) for kind, size in zip(KINDS, held.tolist(), strict=True)})

    def headline(self) -> str:
        """Say the peak in one line."""
        return f"{self.source}: peak {self.at_peak}, {len(self.time_ns):,} changes"

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """``peak`` (bytes by kind), ``places`` (who allocated them) and ``timeline`` (every change)."""
        import pandas as pd

        peak = self.at_peak.parts
        clock = "time_ns" if self.timed else "operation"
        return {
            "peak": lambda: pd.DataFrame({"holds": list(peak), "bytes": [int(size) for size in peak.values()]}),
            "places": lambda: pd.DataFrame({"place": list(self.places), "bytes": list(self.places.values())}),
            "timeline": lambda: pd.DataFrame({
                clock: self.time_ns, **{kind.value: self.held_bytes[i] for i, kind in enumerate(KINDS)
                                        if self.held_bytes[i].any()}, "total_bytes": self.total_bytes}),
        }

    def chart(self) -> Chart:
        """Return what memory held over time, by kind."""
        held = {kind.value: self.held_bytes[i] / 2**20 for i, kind in enumerate(KINDS) if self.held_bytes[i].any()}
        across = self.time_ns / 1e6 if self.timed else self.time_ns
        return Chart("areas", self.headline(), across, [ChartSeries(name.replace("_", " "), sizes)  # type: ignore
                                                        for name, sizes in held.items()], "MiB",
                     "ms" if self.timed else "operation")

    def to_json(self) -> dict[str, Any]:
        """Plain values: the peak, what it holds and who allocated it."""
        return {"source": self.source, "peak_bytes": self.peak_bytes, "peak_time_ns":
                int(self.time_ns[self.peak_at]) if self.timed and len(self.time_ns) else None,
                "holds_bytes": {name: int(size) for name, size in self.at_peak.parts.items()},
                "inferred": self.inferred, "places_bytes": dict(self.places), "changes": len(self.time_ns),
                "notes": list(self.notes)}


def memory_timeline(graph: ExecutionGraph, device: int | None = None) -> MemoryTimeline:
    """Return the memory of a rank over its window.

    Args:
        graph: of a step traced by shapes, or recorded with ``profile_memory=True``.
        device: number of the device; by default the one with most changes; -1 is the host.

    Raises:
        ForetraceError: nothing of its memory was recorded.
    """
    changes = graph.allocations
    # A step traced by shapes that was given times keeps what it knows of memory, and its order.
    traced = graph.meta.era == SHAPE_ONLY or PEAK in graph.meta.memory
    if not len(changes) and traced:
        raise ForetraceError(
            f"{graph.meta.source or 'The step'} keeps nothing in the device's memory, as its model stayed on the "
            'CPU, or was traced by an earlier version: move model and batch with .cuda() or .to("cuda"), and trace it '
            "again.")
    if not len(changes):
        raise ForetraceError(
            f"{graph.meta.source or 'The trace'} says nothing of memory: record it with profile_memory=True, or give a "
            "snapshot of torch.cuda.memory._dump_snapshot, or trace the program by shapes (SCRIPT.py:FUNCTION).")
    numbers, counts = np.unique(changes.device, return_counts=True)
    if device is None:
        gpus = numbers[numbers >= 0]
        device = int(gpus[np.argmax(counts[numbers >= 0])]) if len(gpus) else NONE
    rows = np.flatnonzero(changes.device == device)
    if not len(rows):
        listed = ", ".join(str(number) for number in numbers.tolist())
        raise ForetraceError(f"No memory of device {device} was recorded; there is that of {listed} (-1: the host).")
    names = [graph.string(int(code)) for code in graph.steps.name]
    steps = tuple((name, int(start), int(start + length)) for name, start, length in zip(
        names, graph.steps.start_ns, graph.steps.duration_ns, strict=True))
    where = "the host's memory" if device < 0 else f"GPU {device}"
    if traced:
        known = changes.holds[rows].astype(np.int64)
        shown = f"traced for {graph.meta.device}" if graph.meta.device else "traced by shapes"
        return _timeline(shown, changes.start_ns[rows], changes.bytes[rows], known,
                         _at_peak(graph, rows, reused=False), inferred=False, timed=False, steps=steps)
    size, notes = changes.bytes[rows], []
    if (changes.address[rows] < 0).all():
        holds: Int64 = np.full(len(rows), KINDS.index(Holds.OTHER), np.int64)
        notes.append("The profiler of that time wrote no addresses: what memory holds cannot be told, nor for whom.")
    else:
        holds = _inferred(graph, rows, *_matched(changes.address[rows], size))
    total = changes.total_bytes[rows]
    base = int(total[0] - size[0]) if total[0] >= 0 else int(max(0, -np.cumsum(size).min()))
    if base:
        notes.append(f"{binary_size(base)} were there before the window, and are told as other.")
    if total[0] < 0:
        notes.append("The profiler of that time wrote no totals: memory that nothing in the window changed is missing.")
    missed = int(np.abs(np.diff(total) - size[1:]).max(initial=0)) if total[0] >= 0 else 0
    if missed:
        notes.append(f"The recorded changes do not add up to the recorded totals, by up to {binary_size(missed)}: some "
                     "were lost.")
    places = _at_peak(graph, rows, reused=True) if (changes.address[rows] >= 0).any() else {}
    if base:
        places = dict(sorted({**places, "before the window": base}.items(), key=lambda each: -each[1]))
    return _timeline(where, changes.start_ns[rows], size, holds, places,
                     inferred=True, timed=True, steps=steps, base=base, notes=notes, on_device=device >= 0)


def _timeline(source: str, time: Int64, size: Int64, holds: Int64, places: Mapping[str, int], *, inferred: bool,
              timed: bool, steps: tuple[tuple[str, int, int], ...] = (), base: int = 0,
              notes: Sequence[str] = (), on_device: bool = True) -> MemoryTimeline:
    change = np.zeros((len(KINDS), len(size)), np.int64)
    change[holds, np.arange(len(size))] = size
    held = np.cumsum(change, axis=1)
    held[KINDS.index(Holds.OTHER)] += base
    return MemoryTimeline(source, time, held, places, inferred, timed, steps, tuple(notes), on_device)


def _matched(address: Int64, size: Int64) -> tuple[Int64, Int64]:
    """For each change that gives back, the one that handed out (-1: before the window); and the reverse."""
    open_at: dict[int, int] = {}
    born, freed = np.full(len(size), -1, np.int64), np.full(len(size), -1, np.int64)
    for row, (place, change) in enumerate(zip(address.tolist(), size.tolist(), strict=True)):
        if change > 0:
            open_at[place] = row
        elif (since := open_at.pop(place, None)) is not None:
            born[row], freed[since] = since, row
    return freed, born


def _inferred(graph: ExecutionGraph, rows: Int64, freed: Int64, born: Int64) -> Int64:
    """What each change's memory holds, as a place in ``Holds``, by the phases it was handed out and given back in."""
    changes = graph.allocations
    op = changes.op[rows]
    phase = np.where(op >= 0, np.append(graph.ops.phase, NONE)[op], NONE)
    step = np.where(op >= 0, np.append(graph.ops.step, NONE)[op], NONE)
    until = np.where(freed >= 0, phase[freed], NONE)
    later = np.where(freed >= 0, step[freed] != step, True)
    forward, backward = phase == Phase.FORWARD, phase == Phase.BACKWARD
    found = np.full(len(rows), KINDS.index(Holds.TEMPORARIES), np.int64)
    found[forward & (until == Phase.BACKWARD)] = KINDS.index(Holds.ACTIVATIONS)
    # What backward makes and the optimizer or the next step gives back was there for the optimizer.
    found[backward & ((until == Phase.OPTIMIZER) | later)] = KINDS.index(Holds.GRADIENTS)
    found[(phase == Phase.OPTIMIZER) & (freed < 0)] = KINDS.index(Holds.OPTIMIZER_STATE)
    found[(phase == NONE) & (freed < 0)] = KINDS.index(Holds.OTHER)
    size = changes.bytes[rows]
    back = size < 0
    found[back] = np.where(born[back] >= 0, found[born[back]], KINDS.index(Holds.OTHER))
    return found


def _at_peak(graph: ExecutionGraph, rows: Int64, *, reused: bool) -> dict[str, int]:
    """Bytes there at the peak by the module that allocated them, or the operation, the largest first; ``reused`` says
    whether an address may be handed out again."""
    changes = graph.allocations
    alive = np.cumsum(changes.bytes[rows])
    peak = int(np.argmax(alive)) if len(alive) else 0
    sums: dict[int, int] = defaultdict(int)
    owner: dict[int, int] = {}
    modules, names = graph.ops.module, graph.ops.name
    for row in rows[:peak + 1].tolist():
        address, change, op = int(changes.address[row]), int(changes.bytes[row]), int(changes.op[row])
        if change > 0:
            owner.setdefault(address, op)
            if reused:
                owner[address] = op
        elif address not in owner:
            continue
        sums[owner[address]] += change
    found: dict[str, int] = defaultdict(int)
    for op, total in sums.items():
        if op < 0:
            found["outside any operation" if reused else "before the step"] += total
        else:
            module = graph.string(int(modules[op]))
            found[module or graph.string(int(names[op]))] += total
    return {name: total for name, total in sorted(found.items(), key=lambda each: -each[1]) if total > 0}


# -- snapshots of CUDA memory ------------------------------------------------------------------------------------------


def snapshot_timeline(path: PathLike, device: int | None = None) -> MemoryTimeline:
    """Return the memory that a snapshot of ``torch.cuda.memory._dump_snapshot`` tells of; nothing in it is run.

    Args:
        path: of the file.
        device: number of the device; by default the one with the longest history.

    Raises:
        SnapshotError: it is no such file, or holds more than plain values.
        ForetraceError: it has nothing of that device.
    """
    from tracer.memory_snapshot import read_snapshot

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
    freed, born = _matched(address, size)
    phase = np.array([_phase_of(one) for one, _ in rows], np.int64)
    until = np.where(freed >= 0, phase[freed], NONE)
    holds = np.full(len(rows), KINDS.index(Holds.TEMPORARIES), np.int64)
    holds[(phase == Phase.FORWARD) & (until == Phase.BACKWARD)] = KINDS.index(Holds.ACTIVATIONS)
    holds[(phase == Phase.BACKWARD) & (until != Phase.BACKWARD)] = KINDS.index(Holds.GRADIENTS)
    holds[(phase == Phase.OPTIMIZER) & (freed < 0)] = KINDS.index(Holds.OPTIMIZER_STATE)
    holds[(phase == Phase.FORWARD) & (freed < 0)] = KINDS.index(Holds.OTHER)
    back = size < 0
    holds[back] = np.where(born[back] >= 0, holds[born[back]], KINDS.index(Holds.OTHER))
    oom = [one for one in events if one.get("action") == "oom"]
    if oom:
        notes.append(f"{len(oom)} allocations failed for want of memory, the first of "
                     f"{binary_size(_whole(oom[0].get('size')))}.")
    reserved = sum(_whole(one.get("total_size")) for one in segments)
    notes.append(f"The allocator had reserved {binary_size(reserved)} when the snapshot was taken, "
                 f"{binary_size(now)} of it handed out.")
    return _timeline(f"snapshot of GPU {chosen}", time, size, holds, _snapshot_places(rows, size), inferred=True,
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


def _summed(parts: Any) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for place, size in parts:
        found[place] += size
    return dict(sorted(found.items(), key=lambda each: -each[1]))

