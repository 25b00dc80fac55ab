"""The times of programs whose like was simulated before: the same dependencies, other durations, many at once.

In which order things can be worked out depends on what waits for what, not on how long anything takes. The order that
the simulator found for one program is good for all that differ in times alone, and along it every time is a maximum of
sums of earlier ones: no thread waits its turn, and what waits for what is looked up once, when the order is made into
tapes (``tape``). Times are those of ``simulate`` to the nanosecond.

::

    rows of host time ──┐                 ┌──▶ every start and end of one program, and its cause
    rows of durations ──┼──▶ a tape ──▶──┤
    lags of a program ──┘                 └──▶ a few ends of many variants

Copies of one item or kernel take their times from one row.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from graph_predictor.simulation.engine import simulate
from graph_predictor.simulation.program import (
    NEVER,
    ItemKind,
    Program,
    Simulated,
    Structure,
    entries_waited_for,
    pointers,
)
from graph_predictor.simulation.tape import Rows, Tape, TimeNumbers, constants_of
from graph_predictor.simulation.tape_loop import LANES, play, play_variants
from tracer.arrays import Bool, Int8, Int32, Int64
from tracer.graph import NONE

MOST_KEPT = 16_000_000
"""Numbers in the arrays that a thread keeps to work in again: 128 MB."""

Lanes = list[Int64]
"""Rows of variants, ``LANES`` side by side, [rows, LANES] each; the last one's are repeated."""


def lanes(rows: Int64) -> Lanes:
    """Return rows of variants, [rows, variants], as ``Lanes``."""
    missing = -rows.shape[1] % LANES
    if missing:
        rows = np.concatenate([rows, np.repeat(rows[:, -1:], missing, axis=1)], axis=1)
    return [np.ascontiguousarray(rows[:, at:at + LANES]) for at in range(0, rows.shape[1], LANES)]


def _lanes_of(rows: Int64, program: Int64) -> Lanes:
    """Return rows of programs, [programs, rows], as ``Lanes`` of variants, each one of the programs; most are the
    first one's."""
    program = np.append(program, np.repeat(program[-1:], -len(program) % LANES))
    found = []
    for of in program.reshape(-1, LANES):
        some: Int64 = np.empty((rows.shape[1], LANES), np.int64)
        some[:] = rows[of[0], :, None]
        for lane in np.flatnonzero(of != of[0]).tolist():
            some[:, lane] = rows[of[lane]]
        found.append(some)
    return found


@dataclass(frozen=True, slots=True)
class HostRows:
    """Host time of programs that take it from the same rows, ns, [programs, rows] each: work before items, and their
    own cost."""

    work: Int64
    cost: Int64


@dataclass(frozen=True, slots=True)
class HostLanes:
    """The same of the items that have taken in others, as ``Lanes``."""

    work: Lanes
    cost: Lanes


class WorkingOrder:
    """An order in which a program's items and kernels can be worked out, and those of every program that differs from
    it in times alone: in work, costs, lags, latencies, durations and gaps (which stay negative or not), and in external
    times that are there.

    Args:
        program: the program.
        structure: of it.
        rows: where its times are. Items of one row have the same work and cost, kernels of one row the same duration.
        items, kernels: those whose ends are asked for of variants, in any shape.

    Raises:
        SimulationStuck: the dependencies have a cycle.
    """

    def __init__(self, program: Program, structure: Structure, rows: Rows, items: Int64, kernels: Int64) -> None:
        self.program, self.structure, self.rows = program, structure, rows
        self.items, self.kernels = items, kernels
        self.times = TimeNumbers(program)

    @cached_property
    def _nodes(self) -> Int64:
        return simulate(self.program, structure=self.structure).order

    @cached_property
    def _tape(self) -> _SharedTape:
        return _SharedTape.of(self)

    def lags(self, program: Program) -> Int64:
        """Return the constants of a program as the tape takes them, to be kept for others with the same."""
        return constants_of(program)[self._tape.tape.constant]

    def simulate(self, lags: Int64, host: HostRows, duration: Int64, floor: Int64) -> Simulated:
        """Work out all times of one program, ns.

        Args:
            lags: its constants.
            host: its host time, [1, rows].
            duration: of its kernels, [rows].
            floor: the floors of its items, [rows].
        """
        t = self.times
        times: Int64 = np.empty(t.count, np.int64)
        cause: Int8 = np.zeros(t.count, np.int8)
        source: Int32 = np.full(t.count, NONE, np.int32)
        play(self._tape.tape.operations, lags, t.items, t.kernels, self.rows.item, host.work.ravel(),
             host.cost.ravel(), duration, floor, self.program.edge_fraction, times, cause, source)
        begins, ends = slice(0, t.items), slice(t.item_end, t.kernel_start)
        kernels = slice(t.kernel_start, t.kernel_end)
        return Simulated(
            item_start=times[begins], item_end=times[ends], item_start_cause=cause[begins],
            item_start_source=source[begins], item_end_cause=cause[ends], item_end_source=source[ends],
            kernel_start=times[kernels], kernel_end=times[t.kernel_end:t.left], kernel_cause=cause[kernels],
            kernel_source=source[kernels], group_last=source[t.met:], order=self._nodes)

    def host_lanes(self, host: HostRows, program: Int64) -> HostLanes:
        """Return the host time of variants, each that of one of the programs, as ``ends`` takes it."""
        work, cost = self._tape.summed(host)
        return HostLanes(_lanes_of(work, program), _lanes_of(cost, program))

    def ends(self, lags: Int64, host: HostLanes, duration: Lanes, floor: Lanes) -> tuple[Int64, Int64]:
        """When the items and kernels that are asked for end in variants, ns, [*rows, variants] each. Arguments as of
        ``simulate``, each with the variants side by side."""
        shared = self._tape
        times = _WORKSPACE.rows(shared.places)
        found = []
        for work, cost, length, least in zip(host.work, host.cost, duration, floor, strict=True):
            play_variants(shared.placed.operations, lags, work, cost, length, least, self.program.edge_fraction,
                          times)
            found.append((times[shared.at_items], times[shared.at_kernels]))
        item_end, kernel_end = (np.concatenate(parts, axis=-1) for parts in zip(*found, strict=True))
        return item_end, kernel_end


@dataclass(frozen=True, slots=True)
class _SharedTape:
    """The tape that variants share.

    Attributes:
        tape: with every time, and ``placed`` over places of times; ``places`` how many, ``at_items`` and ``at_kernels``
            those of the ends asked for.
        chain, pointer: the recorded rows that the work of each of its rows is the sum of, its own last.
    """

    tape: Tape
    placed: Tape
    places: int
    at_items: Int64
    at_kernels: Int64
    chain: Int64
    pointer: Int64

    @classmethod
    def of(cls, order: WorkingOrder) -> _SharedTape:
        """Make it."""
        p, alike, count = order.program, order.rows.item, order.times.items
        opens = np.zeros(count, np.bool_)
        opens[p.thread_ptr[:-1][np.diff(p.thread_ptr) > 0]] = True
        kept = np.zeros(count, np.bool_)
        kept[order.items] = True
        kept |= order.rows.floor >= 0
        taken = _taken_in(p, opens, alike, kept)
        own = np.flatnonzero(~taken)
        begins: Int64 = np.zeros(count, np.int64)
        begins[own] = np.concatenate([[0], own[:-1] + 1])[:len(own)]
        follows = np.full(count, NONE)
        follows[own] = np.where(opens[begins[own]], NONE, begins[own] - 1)
        _, first, row_of = np.unique(alike[own], return_index=True, return_inverse=True)
        row: Int64 = np.zeros(count, np.int64)
        row[own] = row_of
        shown = own[first]
        lengths = shown - begins[shown] + 1
        pointer = pointers(lengths)
        chain = np.arange(pointer[-1]) + np.repeat(begins[shown] - pointer[:-1], lengths)
        nodes = order._nodes
        nodes = nodes[~np.concatenate([taken, np.zeros(order.times.kernels, np.bool_)])[nodes]]
        tape = Tape.of(p, nodes, order.structure, replace(order.rows, item=row), follows)
        asked = np.concatenate([order.times.item_end + order.items.ravel(),
                                order.times.kernel_end + order.kernels.ravel()])
        placed, at, places = tape.placed(asked, order.times.count)
        split = order.items.size
        return cls(tape, placed, places, at[:split].reshape(order.items.shape), at[split:].reshape(order.kernels.shape),
                   alike[chain], pointer)

    def summed(self, host: HostRows) -> tuple[Int64, Int64]:
        """Work of items and all that they took in before them, and their own cost, [programs, rows]."""
        last = self.pointer[1:] - 1
        work, cost = (np.take(each, self.chain, axis=1) for each in (host.work, host.cost))  # a program after another
        own = np.take(cost, last, axis=1)
        cost[:, last] = 0
        return np.add.reduceat(work + cost, self.pointer[:-1], axis=1) if len(last) else work, own


def _taken_in(p: Program, opens: Bool, alike: Int64, kept: Bool) -> Bool:
    """Return which items are waited for by the next one of their thread alone, and wait for nothing but the one before:
    with all those alike."""
    follows = np.zeros(len(p.item_work), np.bool_)
    follows[:-1] = ~opens[1:]
    free = follows & ~kept & (p.item_kind != ItemKind.STEP_BEGIN) & (p.item_external <= NEVER)
    free &= (np.diff(p.after_ptr) == 0) & (np.diff(p.wait_ptr) == 0) & (entries_waited_for(p) < 0)
    free[p.after_item] = False
    free[p.kernel_item[p.kernel_item >= 0]] = False
    size = int(alike.max(initial=-1)) + 1
    # The same items must be before those alike: an item at the end of a copy is before the first of the next one.
    behind = np.flatnonzero(follows)
    before: Int64 = np.full(size, NONE, np.int64)
    before[alike[behind[::-1] + 1]] = alike[behind[::-1]]
    other = behind[before[alike[behind + 1]] != alike[behind]]
    free[other] = False
    refused = np.zeros(size + 1, np.bool_)  # the last one stands for no item
    refused[before[alike[np.append(other + 1, np.flatnonzero(opens))]]] = True
    refused[alike[~free]] = True
    return ~refused[alike]  # type: ignore[no-any-return]


class _Workspace(threading.local):
    """An array to work in that a thread uses again and again: the system hands new ones out page by page, which takes
    as long as the work."""

    def __init__(self) -> None:
        self._kept: Int64 = _aligned(0)

    def rows(self, size: int) -> Int64:
        """Return an array of so many rows of ``LANES``, of any content, good until the next call."""
        total = size * LANES
        kept = self._kept if total <= len(self._kept) else _aligned(total)
        if total <= MOST_KEPT:
            self._kept = kept
        return kept[:total].reshape(-1, LANES)


def _aligned(size: int) -> Int64:
    """Return an array of so many numbers that begins where a cache line does: no vector is in two of them."""
    found = np.empty(size + LANES, np.int64)
    skipped = -found.ctypes.data % 64 // found.itemsize
    return found[skipped:skipped + size]


_WORKSPACE = _Workspace()
