"""A rank's device memory: its account at the fullest moment, and its timeline. Needs no torch.

::

    profiler's [memory] events ──┐
    a step traced by shapes ─────┼─> ``MemoryTimeline``: bytes by kind at each change ─> ``MemoryAccount`` of its peak
    a snapshot of CUDA memory ───┘

A step traced by shapes knows what each storage holds (``tracer.shape_only.tensors``). For recorded memory this is
inferred from the times of allocation and release: allocated in forward and freed in backward is an activation.
Snapshots are read in ``tracer.memory_snapshot``. A plan's estimate fills the same account by formulas
(``planner.parallel.memory``), and edits scale the moments that a traced step keeps (``memory_moments``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

import numpy as np

from tracer.arrays import Bool, Float64, Int64
from tracer.errors import ForetraceError
from tracer.graph import NONE, SHAPE_ONLY, ExecutionGraph, Phase
from tracer.lazy import pandas as pd
from tracer.optimizer_memory import kept_by_optimizer
from tracer.shown import Chart, ChartSeries, Shown

PEAK = "peak"
"""Key in ``Meta.memory`` of the most bytes alive at once. The parts' keys are the attributes of ``MemoryAccount``."""


class Holds(str, Enum):
    """A purpose of bytes in memory."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    """Made in forward (or when forward is run again in backward) and still there in backward."""
    TEMPORARIES = "temporaries"
    """Made in the step and gone before backward, or made in backward or by the optimizer."""
    OTHER = "other"
    """Alive when the step began and none of the above: batches kept on the device, and the like."""
    RESERVED = "reserved"
    """Bytes that the program does not allocate: contexts, libraries' buffers, fragmentation. No trace shows them."""


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes of each ``Holds`` at the moment of largest memory."""

    parameters: float = 0
    buffers: float = 0
    gradients: float = 0
    optimizer_state: float = 0
    activations: float = 0
    temporaries: float = 0
    other: float = 0
    reserved: float = 0

    @staticmethod
    def of_trace(memory: Mapping[str, int]) -> MemoryAccount:
        """Return the account of a traced step's ``Meta.memory``; the unexplained rest is ``other``."""
        parts = {what.value: memory.get(what.value, 0) for what in Holds}
        parts[Holds.OTHER] += memory.get(PEAK, 0) - sum(parts.values())
        return MemoryAccount(**parts)

    @property
    def total(self) -> float:
        """Return the bytes of all kinds."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def allocated(self) -> float:
        """Return the bytes that the framework's allocator has handed out: all except reserved ones."""
        return self.total - self.reserved

    @property
    def parts(self) -> dict[str, float]:
        """Return the nonzero bytes of each kind, by name."""
        return {part.name: size for part in fields(self) if (size := getattr(self, part.name))}

    def lacking(self, limit_bytes: float, name: str) -> str | None:
        """Return a sentence on why the memory exceeds a device's; ``None`` if it fits or the limit is unknown (0)."""
        if not 0 < limit_bytes < self.total:
            return None
        return (f"It does not fit: it needs more than the {limit_bytes / 1e9:,.4g} GB of {name}; choose a larger "
                "device, a smaller batch, or recomputation.")

    def __str__(self) -> str:
        """Return text such as "1.50 GiB (parameters 1.00 GiB, activations 512.00 MiB)"."""
        shown = ", ".join(f"{name.replace('_', ' ')} {binary_size(size)}" for name, size in self.parts.items())
        return f"{binary_size(self.total)} ({shown})" if shown else binary_size(0)


def memory_moments(graph: ExecutionGraph) -> Float64:
    """Return the moments of a traced step that may be its peak at other sizes, [moments, 4].

    Columns are bytes that stay, of activations, of temporaries, and of the optimizer's temporaries.
    """
    if graph.meta.memory_moments:
        return np.array(graph.meta.memory_moments, np.float64)
    # Traced by an earlier version: the parts of the peak, and an estimate of the optimizer's step, in which all
    # gradients are alive and foreach operations make one more value for every parameter.
    account = MemoryAccount.of_trace(graph.meta.memory)
    foreach = any(text.startswith("aten::_foreach_") for text in graph.strings)
    others = graph.meta.memory.get("other", 0) + account.buffers + account.optimizer_state
    return np.array([[account.total - account.activations, account.activations, 0, 0],
                     [2 * account.parameters + others, 0, 0, account.parameters * foreach]], np.float64)


def scaled_account(graph: ExecutionGraph, factors: Float64) -> MemoryAccount:
    """Return a traced step's account at its largest moment, with factors on the columns of its moments, [4]."""
    traced = MemoryAccount.of_trace(graph.meta.memory)
    if (factors == 1.0).all():
        return traced
    moments = memory_moments(graph) * factors
    stays, activations, *temporaries = moments[np.argmax(moments.sum(axis=1))].tolist()
    # Of the bytes that stay, only gradients come and go within a step.
    account = replace(traced, gradients=0, activations=0, temporaries=0)
    gradients = stays - account.total
    account = replace(account, gradients=gradients) if gradients >= 0 else MemoryAccount(other=stays)
    return replace(account, activations=activations, temporaries=sum(temporaries))


def binary_size(size: float) -> str:
    """Return a number of bytes in words, such as "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


KINDS = tuple(Holds)


@dataclass(frozen=True, repr=False)
class MemoryTimeline(Shown):
    """Memory of one device over time.

    Attributes:
        source: Its origin, in words.
        time_ns: Time of each change; for a step traced by shapes, which has no times, the number of the operation.
        held_bytes: Bytes of each ``Holds`` after each change, [kinds, changes].
        places: Bytes alive at the peak by what allocated them: a module, an operation or a line of the program.
        inferred: Whether the contents were inferred from the times of allocation and release.
        timed: Whether ``time_ns`` is a time.
        steps: Name, begin and end of each step, in units of ``time_ns``.
        notes: Sentences that a reader must know.
        on_device: Whether it is the memory of a device, not of the host.
        lacks_earlier: Whether bytes allocated before the window are missing.
        earlier_bytes: An estimate of the missing bytes by ``Holds``, where the recording allows one.
    """

    source: str
    time_ns: Int64
    held_bytes: Int64
    places: Mapping[str, int]
    inferred: bool = False
    timed: bool = True
    steps: tuple[tuple[str, int, int], ...] = ()
    notes: tuple[str, ...] = ()
    on_device: bool = True
    lacks_earlier: bool = False
    earlier_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> Int64:
        """Bytes allocated after each change."""
        return self.held_bytes.sum(axis=0)  # type: ignore[no-any-return]

    @property
    def peak_at(self) -> int:
        """Return the index of the change at which memory peaks."""
        return int(np.argmax(self.total_bytes)) if len(self.time_ns) else 0

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that were allocated at once."""
        return int(self.total_bytes.max(initial=0))

    @property
    def at_peak(self) -> MemoryAccount:
        """Return the contents of memory at the peak."""
        held = self.held_bytes[:, self.peak_at] if len(self.time_ns) else np.zeros(len(KINDS))
        return MemoryAccount(**{kind.value: float(size) for kind, size in zip(KINDS, held.tolist(), strict=True)})

    def headline(self) -> str:
        """Return one line on the peak of memory."""
        return f"{self.source}: peak {self.at_peak}, {len(self.time_ns):,} changes"

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return ``peak`` (bytes by kind), ``places`` (who allocated them) and ``timeline`` (every change)."""
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
        """Return a chart of the contents of memory over time."""
        held = {kind.value: self.held_bytes[i] / 2**20 for i, kind in enumerate(KINDS) if self.held_bytes[i].any()}
        across = self.time_ns / 1e6 if self.timed else self.time_ns
        return Chart("areas", self.headline(), across, [ChartSeries(name.replace("_", " "), sizes)  # type: ignore
                                                        for name, sizes in held.items()], "MiB",
                     "ms" if self.timed else "operation")

    def to_json(self) -> dict[str, Any]:
        """Return plain values: the peak, its contents and what allocated them."""
        return {"source": self.source, "peak_bytes": self.peak_bytes, "peak_time_ns":
                int(self.time_ns[self.peak_at]) if self.timed and len(self.time_ns) else None,
                "holds_bytes": {name: int(size) for name, size in self.at_peak.parts.items()},
                "inferred": self.inferred, "places_bytes": dict(self.places), "changes": len(self.time_ns),
                "lacks_earlier": self.lacks_earlier, "earlier_bytes": dict(self.earlier_bytes),
                "notes": list(self.notes)}


def memory_timeline(graph: ExecutionGraph, device: int | None = None) -> MemoryTimeline:
    """Return the memory of a rank over its window.

    Args:
        graph: a step traced by shapes, or recorded with ``profile_memory=True``.
        device: number of the device, -1 for the host; by default the GPU with most changes, else the host.

    Raises:
        ForetraceError: nothing of its memory was recorded.
    """
    changes = graph.allocations
    # A step traced by shapes keeps its memory and order, even when it was given times.
    traced = graph.meta.era == SHAPE_ONLY or PEAK in graph.meta.memory
    if not len(changes) and traced:
        raise ForetraceError(
            f"{graph.meta.source or 'The step'} keeps nothing in the device's memory, as its model stayed on the "
            'CPU, or was traced by an earlier version: move model and batch with .cuda() or .to("cuda"), and trace it '
            "again.")
    if not len(changes):
        raise ForetraceError(
            f"{graph.meta.source or 'The trace'} says nothing of memory: record it with --profile-memory "
            "(profile_memory=True), or give a snapshot of torch.cuda.memory._dump_snapshot, or trace the program by "
            "shapes (SCRIPT.py:FUNCTION).")
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
        return timeline_of(shown, changes.start_ns[rows], changes.bytes[rows], known,
                         _at_peak(graph, rows, reused=False), inferred=False, timed=False, steps=steps)
    size, notes = changes.bytes[rows], []
    if (changes.address[rows] < 0).all():
        holds: Int64 = np.full(len(rows), KINDS.index(Holds.OTHER), np.int64)
        notes.append("The profiler of that time wrote no addresses: what memory holds cannot be told, nor for whom.")
    else:
        holds = _inferred(graph, rows)
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
    found = timeline_of(where, changes.start_ns[rows], size, holds, places,
                     inferred=True, timed=True, steps=steps, base=base, notes=notes, on_device=device >= 0)
    return found if device >= 0 else _of_host(found, graph)


def _of_host(found: MemoryTimeline, graph: ExecutionGraph) -> MemoryTimeline:
    """Note what is missing: PyTorch counts a host's memory only after profiling began (c10's CPUAllocator.cpp)."""
    parts = dict(zip((Holds.PARAMETERS.value, Holds.OPTIMIZER_STATE.value), kept_by_optimizer(graph), strict=True))
    earlier = {name: size for name, size in parts.items() if size}
    listed = ", ".join(f"{name.replace('_', ' ')} {binary_size(size)}" for name, size in earlier.items())
    about = f"By the optimizer's operations these are {binary_size(sum(earlier.values()))} or more ({listed})." if (
        earlier) else "How much that is, the recording does not tell; give --code SCRIPT.py:FUNCTION for a prediction."
    note = ("What was handed out before the window (parameters, the optimizer's state, data) is not in it: PyTorch's "
            f"profiler counts the host's memory from its own begin. {about}")
    return replace(found, notes=(*found.notes, note), lacks_earlier=True, earlier_bytes=earlier)


def timeline_of(source: str, time: Int64, size: Int64, holds: Int64, places: Mapping[str, int], *, inferred: bool,
                timed: bool, steps: tuple[tuple[str, int, int], ...] = (), base: int = 0,
                notes: Sequence[str] = (), on_device: bool = True) -> MemoryTimeline:
    """Return the timeline of changes of memory, given each one's content (an index into ``Holds``) and bytes.

    ``base`` are the bytes alive before the first change; other arguments are as in ``MemoryTimeline``.
    """
    change = np.zeros((len(KINDS), len(size)), np.int64)
    change[holds, np.arange(len(size))] = size
    held = np.cumsum(change, axis=1)
    held[KINDS.index(Holds.OTHER)] += base
    return MemoryTimeline(source, time, held, places, inferred, timed, steps, tuple(notes), on_device)


def matched_changes(address: Int64, size: Int64) -> tuple[Int64, Int64]:
    """Return the index of the change that frees each allocation, and that of each release's allocation; -1: none."""
    open_at: dict[int, int] = {}
    born, freed = np.full(len(size), -1, np.int64), np.full(len(size), -1, np.int64)
    for row, (place, change) in enumerate(zip(address.tolist(), size.tolist(), strict=True)):
        if change > 0:
            open_at[place] = row
        elif (since := open_at.pop(place, None)) is not None:
            born[row], freed[since] = since, row
    return freed, born


def inferred_holds(born: Int64, size: Int64, rules: Sequence[tuple[Bool, Holds]]) -> Int64:
    """Return the content of each change's memory, as an index into ``Holds``.

    Args:
        born: For each release, the change that allocated the memory (-1: before the window).
        size: Bytes of each change.
        rules: Pairs of a mask of allocations and their content. Later rules win; all others are temporaries.
    """
    found = np.full(len(size), KINDS.index(Holds.TEMPORARIES), np.int64)
    for rows, what in rules:
        found[rows] = KINDS.index(what)
    back = size < 0
    found[back] = np.where(born[back] >= 0, found[born[back]], KINDS.index(Holds.OTHER))
    return found


def _inferred(graph: ExecutionGraph, rows: Int64) -> Int64:
    """Return the content of recorded memory, by the phases in which it was allocated and freed."""
    changes = graph.allocations
    size, op = changes.bytes[rows], changes.op[rows]
    freed, born = matched_changes(changes.address[rows], size)
    phase = np.where(op >= 0, np.append(graph.ops.phase, NONE)[op], NONE)
    step = np.where(op >= 0, np.append(graph.ops.step, NONE)[op], NONE)
    until = np.where(freed >= 0, phase[freed], NONE)
    later = np.where(freed >= 0, step[freed] != step, True)
    return inferred_holds(born, size, [
        ((phase == Phase.FORWARD) & (until == Phase.BACKWARD), Holds.ACTIVATIONS),
        # Memory from backward that lives until the optimizer or the next step is a gradient.
        ((phase == Phase.BACKWARD) & ((until == Phase.OPTIMIZER) | later), Holds.GRADIENTS),
        ((phase == Phase.OPTIMIZER) & (freed < 0), Holds.OPTIMIZER_STATE),
        ((phase == NONE) & (freed < 0), Holds.OTHER)])


def _at_peak(graph: ExecutionGraph, rows: Int64, *, reused: bool) -> dict[str, int]:
    """Return the bytes alive at the peak by module, else operation, that allocated them, largest first; ``reused``
    tells whether an address may be allocated again."""
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
