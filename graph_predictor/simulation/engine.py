"""The simulator, a max-plus propagation over a ``Program``, and the critical path of what it simulated.

Host threads are advanced in the order of their simulated time. A kernel's start and end are computed once its inputs
are known: its launch, its stream's previous kernel, its edges, and for a collective all members of its rendezvous. No
duration of waiting is stored. So every time is a maximum of sums of durations: it can only grow when one grows.

The critical path explains a step's time by work, back from its end. Each nanosecond between a step's simulated begin
and end is in exactly one segment, so the segments add up to the step time. The path stays in the step's own rank, and
waiting of a collective for a later rank is a segment of its own. With ``across`` the path continues instead in the last
rank to arrive. Where a receive waited for another rank's send, the path continues in that rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from graph_predictor.simulation.engine_loop import Workspace, run
from graph_predictor.simulation.path_loop import AT_ITEM, AT_KERNEL, AT_NOTHING, PathSegments, Walks, walk_back
from graph_predictor.simulation.program import Bound, Program, Simulated, Structure
from tracer.arrays import Int8, Int64
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph, KernelKind
from tracer.machine_code import columns


class SimulationStuck(ForetraceError):
    """The program has a cycle: some item or kernel waits for itself (an error of the builder, or of an edit)."""


def structure_of(program: Program) -> Structure:
    """Return the structure of a program, for ``simulate``."""
    p, kernels = program, len(program.kernel_item)
    return Structure(*_invert(p.kernel_item, len(p.item_kind)), *_invert(p.kernel_previous, kernels),
                     *_invert(p.edge_kernel, kernels), *_invert(p.kernel_group, len(p.group_size)),
                     np.repeat(np.arange(kernels, dtype=np.int64), np.diff(p.edge_ptr)))


def simulate(program: Program, *, structure: Structure | None = None) -> Simulated:
    """Simulate ``program``.

    Args:
        program: The job.
        structure: its dependencies, if they are known from a program that differs in times only.

    Raises:
        SimulationStuck: The dependencies have a cycle.
    """
    items, kernels = len(program.item_kind), len(program.kernel_item)
    out = Simulated(
        item_start=np.zeros(items, np.int64), item_end=np.zeros(items, np.int64),
        item_start_cause=np.zeros(items, np.int8), item_start_source=np.full(items, -1, np.int32),
        item_end_cause=np.zeros(items, np.int8), item_end_source=np.full(items, -1, np.int32),
        kernel_start=np.zeros(kernels, np.int64), kernel_end=np.zeros(kernels, np.int64),
        kernel_cause=np.zeros(kernels, np.int8), kernel_source=np.full(kernels, -1, np.int32),
        group_last=np.full(len(program.group_size), -1, np.int32), order=np.empty(items + kernels, np.int64))
    done = run(columns(Program, program), structure or structure_of(program), out, _workspace(program))
    if done != items + kernels:
        raise SimulationStuck(
            f"The simulation stopped with {items + kernels - done} of {items + kernels} events left: their "
            "dependencies form a cycle. Report the trace, or undo the last edit.")
    return out


def _invert(target: Int64, size: int) -> tuple[Int64, Int64]:
    """Return the CSR of the rows that point to each target; rows with a negative target are left out."""
    rows = np.nonzero(target >= 0)[0]
    order = rows[np.argsort(target[rows], kind="stable")]
    ptr = np.zeros(size + 1, np.int64)
    np.cumsum(np.bincount(target[rows], minlength=size), out=ptr[1:])
    return ptr, order.astype(np.int64)


def _workspace(p: Program) -> Workspace:
    threads, items, kernels = len(p.thread_rank), len(p.item_work), len(p.kernel_item)
    return Workspace(
        item_done=np.zeros(items, np.bool_), kernel_done=np.zeros(kernels, np.bool_),
        pending=np.zeros(kernels, np.int64),
        group_left=np.array(p.group_size, np.int64), stack=np.empty(kernels + 1, np.int64),
        heap_key=np.empty(threads + 1, np.int64), heap_thread=np.empty(threads + 1, np.int64),
        position=np.array(p.thread_ptr[:-1], np.int64), clock=np.array(p.thread_start, np.int64),
        parked_on_item=np.full(items, -1, np.int64), parked_on_kernel=np.full(kernels, -1, np.int64),
        next_parked=np.full(threads, -1, np.int64), runnable=np.empty(threads, np.int64),
        queue_at=np.array(p.queue_ptr[:-1], np.int64), left_by=np.full(len(p.queue_kernel), -1, np.int64))


ROOM = 1024
"""Initial room for segments; it doubles where that is too little."""
_AT = {"item": AT_ITEM, "kernel": AT_KERNEL}


@dataclass(slots=True)
class Path(PathSegments):
    """Segments in time order (ns of the simulated clock)."""

    @property
    def total_ns(self) -> int:
        """Return the sum of the segments, ns: the step's simulated time."""
        return int((self.end_ns - self.start_ns).sum())

    def by_bound(self) -> dict[str, int]:
        """Return the nanoseconds by bound; every bound is present."""
        sums = np.bincount(self.bound, weights=(self.end_ns - self.start_ns).astype(np.float64), minlength=len(Bound))
        return {b.label: int(sums[b]) for b in Bound}


@dataclass(frozen=True, slots=True)
class PathStart:
    """Where a walk back begins and stops. ``at`` is its first event, ("item" or "kernel", row) or ``None``; ``end_ns``
    is that event's end and ``stop_ns`` the time at which the walk stops, on the simulated clock."""

    at: tuple[str, int] | None
    end_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True)
class Paths:
    """Several paths in one table: path ``n`` is the segments ``first[n]`` to ``first[n + 1]`` of ``joined``."""

    joined: Path
    first: Int64

    def one(self, number: int) -> Path:
        """Return one path."""
        low, high = int(self.first[number]), int(self.first[number + 1])
        return Path(*(getattr(self.joined, each.name)[low:high] for each in fields(Path)))


class Causes:
    """The causes of a simulated program's times, laid out once for any number of walks.

    Args:
        program: The simulated program.
        simulated: Its times.
        kinds: ``KernelKind`` of the program's kernels, an array for each rank; or the bound of each kernel's own time
            (``kernel_bounds``).
    """

    def __init__(self, program: Program, simulated: Simulated, kinds: list[Int8] | Int8) -> None:
        self.program, self.simulated = program, simulated
        self._bounds = kernel_bounds(kinds) if isinstance(kinds, list) else kinds

    @cached_property
    def _columns(self) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], Int8]:
        """Return the program's columns, its times' columns, and which items are the first of their thread."""
        first = np.zeros(len(self.program.item_kind) + 1, np.int8)
        first[self.program.thread_ptr[:-1]] = 1
        return columns(Program, self.program), columns(Simulated, self.simulated), first

    def walk(self, starts: Sequence[PathStart], room: int, across: bool) -> tuple[PathSegments, Int64, Int64]:
        """Walk back along the critical paths from several events.

        Args:
            starts: where each walk begins and stops.
            room: initial room for segments; 0 to keep none.
            across: as for ``path_back``.

        Returns:
            Segments (with unused room at the end); the first segment of each walk; sums by bound, [walks, bounds], ns.
        """
        program, simulated, first = self._columns
        walks = Walks(
            np.array([AT_NOTHING if each.at is None else _AT[each.at[0]] for each in starts], np.int8),
            np.array([-1 if each.at is None else each.at[1] for each in starts], np.int64),
            np.array([each.end_ns for each in starts], np.int64), np.array([each.stop_ns for each in starts], np.int64),
            # State: no segments yet, at the first walk, at none of its events.
            np.array([0, 0, -1, -1, 0], np.int64), np.zeros(len(starts) + 1, np.int64), first, self._bounds)
        found = PathSegments(np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int8),
                             np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.bool_))
        sums = np.zeros((len(starts), len(Bound)), np.int64)
        while walk_back(program, simulated, walks, found, int(across), sums) < len(starts):
            found = PathSegments(*(np.concatenate([column, np.empty_like(column)]) for column in (
                getattr(found, each.name) for each in fields(found))))
        return found, walks.first, sums

    def end_ns(self, at: tuple[str, int]) -> int:
        """Return the simulated end of an item or kernel."""
        return int((self.simulated.item_end if at[0] == "item" else self.simulated.kernel_end)[at[1]])


def critical_path(program: Program, simulated: Simulated, graphs: list[ExecutionGraph], begin: int, end: int) -> Path:
    """Walk back from item ``end`` to the time of item ``begin`` (both items of one thread).

    Args:
        program: The simulated program.
        simulated: Its times.
        graphs: The job's graphs, one for each rank of the program.
        begin: Item of the step's begin.
        end: Item of the step's end.
    """
    return path_back(program, simulated, [g.kernels.kind for g in graphs], ("item", end),
                     int(simulated.item_end[begin]))


def path_back(program: Program, simulated: Simulated, kinds: list[Int8], at: tuple[str, int], stop_ns: int, *,
              across: bool = False) -> Path:
    """Walk back from the end of any item or kernel to a time.

    Args:
        program: The simulated program.
        simulated: Its times.
        kinds: ``KernelKind`` of the program's kernels, an array for each rank.
        at: ("item" or "kernel", row) at whose end the path ends.
        stop_ns: Time at which the path begins, on the simulated clock.
        across: Continue at a collective with the rank that arrived last; otherwise the path waits for it.
    """
    causes = Causes(program, simulated, kinds)
    return walks_back(causes, [PathStart(at, causes.end_ns(at), stop_ns)], across=across).one(0)


def walks_back(causes: Causes, starts: Sequence[PathStart], *, across: bool = False) -> Paths:
    """Walk back from several places, all in one pass; ``across`` as for ``path_back``."""
    found, first, _ = causes.walk(starts, ROOM, across)
    return Paths(Path(*(getattr(found, each.name)[:first[-1]] for each in fields(Path))), first)


def sums_back(causes: Causes, starts: Sequence[PathStart]) -> Int64:
    """Return the nanoseconds of each path by bound, [paths, bounds], without the paths themselves."""
    return causes.walk(starts, 0, False)[2]


def kernel_bounds(kinds: list[Int8]) -> Int8:
    """Return the bound of each kernel's own time, as ``Bound`` codes."""
    kind = np.concatenate(kinds) if kinds else np.zeros(0, np.int8)
    found = np.full(len(kind), int(Bound.MEMORY_COPY), np.int8)
    found[kind == KernelKind.COMPUTE] = Bound.COMPUTE
    found[kind == KernelKind.COLLECTIVE] = Bound.EXPOSED_COMMUNICATION
    return found
