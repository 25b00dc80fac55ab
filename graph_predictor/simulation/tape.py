"""``Tape``: a program's dependencies as a list of operations, each a maximum of sums, in an order of computation.

::

    item:      follows an item, launches a kernel                start = end before + work, …
    kernel:    follows its call and a kernel                     start = max(call + latency, end before + gap), …
    item:      waits for a kernel                                end ≥ kernel + lag

Dependencies are looked up once, when a tape is made; programs that differ in times alone share it. A launch and its
kernel are one operation. An item that only the next item of its thread depends on is merged into that item.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from graph_predictor.simulation import tape_loop as op
from graph_predictor.simulation.program import (
    NEVER,
    EndCause,
    KernelCause,
    LaunchReference,
    Program,
    StartCause,
    Structure,
    entries_waited_for,
    owners,
)
from tracer.arrays import Bool, Int32, Int64
from tracer.graph import NONE

_CONSTANTS = ("lag", "latency", "gap")
"""Names of the constants of operations."""
_TIMES = ("thread_start", "item_external", "item_return", "after_lag", "wait_lag", "kernel_external", "kernel_latency",
          "kernel_gap", "edge_lag")
"""Columns of a program with the values of these constants."""
_BEFORE, _START, _AFTER, _END, _ROOM, _WAITS, _LEAST, _FLOOR = range(8)
"""Order of the operations within one item."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the tables from which a program's items and kernels take their times.

    Attributes:
        item: row of work and cost of each item.
        kernel: row of the duration of each kernel.
        floor: row of each item's floor, the time before which it cannot end; -1 for none.
    """

    item: Int64
    kernel: Int64
    floor: Int64


class TimeNumbers:
    """Numbers of a program's times. Attributes are the first number of each kind, in this order: starts of items, their
    ends (``item_end``), starts of kernels, their ends, queue entries leaving (``left``), rendezvous (``met``)."""

    def __init__(self, program: Program) -> None:
        self.items, self.kernels = len(program.item_kind), len(program.kernel_item)
        self.item_end, self.kernel_start = self.items, 2 * self.items
        self.kernel_end, self.left = self.kernel_start + self.kernels, self.kernel_start + 2 * self.kernels
        self.met = self.left + len(program.queue_kernel)
        self.count = self.met + len(program.group_size)


@dataclass(frozen=True, slots=True)
class Tape:
    """Operations in an order in which each one's inputs are computed before it.

    Attributes:
        operations: see ``tape_loop``, [operations, columns].
        constant: indices into ``constants_of`` that each operation takes, [operations, 3].
    """

    operations: Int32
    constant: Int32

    @classmethod
    def of(cls, program: Program, nodes: Int64, structure: Structure, rows: Rows, follows: Int64) -> Tape:
        """Make the tape of a program.

        Args:
            program: the program; the tape is also valid for programs that differ from it in times alone.
            nodes: rows of items, and of kernels (plus the number of items), in an order of computation. Left-out items
                are merged into the next item.
            structure: dependencies of the program.
            rows: the rows of the program's times.
            follows: for each item, the item before it on its thread among ``nodes``; -1 for none.
        """
        return _Sheet(program, nodes, structure, rows, follows).tape()

    def placed(self, kept: Int64, count: int) -> tuple[Tape, Int64, int]:
        """Return a tape that reuses places of times no longer needed. Also return the place of each ``kept`` time, and
        the number of places. ``count`` is the number of all times."""
        operations = self.operations.copy()
        stays = np.zeros(count, np.bool_)
        stays[kept] = True
        at: Int64 = np.full(count, NONE, np.int64)
        until, first = at.copy(), np.full(max(len(operations), 1), NONE, np.int64)
        places = op.place(operations, stays, until, first, np.empty(count, np.int64), np.empty(count, np.int64), at)
        return replace(self, operations=operations), at[kept], places


def constants_of(program: Program) -> Int64:
    """Return a program's lags and other times that are no durations, as one array; the first entry is 0."""
    return np.concatenate([np.zeros(1, np.int64), *(getattr(program, name) for name in _TIMES)])


class _Sheet:
    """Collects a program's operations. They are ordered by item or kernel, then by their number within it."""

    def __init__(self, program: Program, nodes: Int64, structure: Structure, rows: Rows, follows: Int64) -> None:
        self.p, self.rows, self.follows, self.structure = program, rows, follows, structure
        self.times = TimeNumbers(program)
        begins = np.cumsum([1, *(len(getattr(program, name)) for name in _TIMES)]).tolist()
        self.constants = SimpleNamespace(**dict(zip(_TIMES, begins, strict=False)))  # where each column begins
        items, kernels = self.times.items, self.times.kernels
        self.parts: list[tuple[Int64, dict[str, Int64 | int]]] = []
        known: Int64 = np.full(items + kernels, NONE, np.int64)
        known[nodes] = np.arange(len(nodes))
        # Kernels of one rendezvous are known together.
        group = program.kernel_group
        met = np.flatnonzero(group >= 0)
        first = np.full(len(program.group_size), len(nodes), np.int64)
        np.minimum.at(first, group[met], known[items + met])
        known[items + met] = first[group[met]]
        self.item_at, self.kernel_at = known[:items], known[items:]
        # Number of items merged into each item: those of its thread between it and the item it follows.
        begin = np.repeat(program.thread_ptr[:-1], np.diff(program.thread_ptr))
        self.taken = np.arange(items) - np.where(follows >= 0, follows + 1, begin)
        inside = np.flatnonzero((program.kernel_reference == LaunchReference.CALL_START) & (program.kernel_item >= 0))
        # Place in the order at which each item starts: before a kernel that works within its call.
        self.begins = self.item_at.copy()
        np.minimum.at(self.begins, program.kernel_item[inside], self.kernel_at[inside])
        # Items that follow another one and wait for no other thread, and whose start no kernel needs before their end.
        self.plain = (follows >= 0) & (np.diff(program.after_ptr) == 0) & (self.item_at >= 0)
        self.plain[program.kernel_item[inside]] = False
        self.within = 4 * (len(nodes) + 2)  # places for the inputs of an item or kernel; its end comes after

    def add(self, code: int, at: Int64, within: Int64 | int, **columns: Int64 | int) -> None:
        """Add operations of one kind at places of the order, with their columns and constants by name."""
        if len(at):
            self.parts.append((at * (3 * self.within) + within, {"code": code, **columns}))

    def tape(self) -> Tape:
        """Return the tape of all operations, in order."""
        launches, alone = self._alone()
        self._items(launches)
        self._queues(launches)
        self._kernels(launches, alone)
        counts = [len(key) for key, _ in self.parts]
        order = np.argsort(np.concatenate([np.zeros(0, np.int64), *(key for key, _ in self.parts)]), kind="stable")
        place: Int32 = np.empty(len(order), np.int32)  # where each operation goes: sorting the table would copy it
        place[order] = np.arange(len(order), dtype=np.int32)
        operations: Int32 = np.full((len(order), op.COLUMNS), NONE, np.int32)
        constant: Int32 = np.zeros((len(order), op.CONSTANTS), np.int32)
        for at, (_, columns) in zip(np.split(place, np.cumsum(counts)[:-1]), self.parts, strict=False):
            for name, values in columns.items():
                if name in _CONSTANTS:
                    constant[at, _CONSTANTS.index(name)] = values
                else:
                    operations[at, getattr(op, name.upper())] = values
        return Tape(operations, constant)

    def _alone(self) -> tuple[Int64, Bool]:
        """Return the kernel of each item that is one operation with the kernel it launches (-1 for none), and which
        kernels wait for their call and the previous kernel alone."""
        p, times = self.p, self.times
        call, before = p.kernel_item, p.kernel_previous
        read = np.zeros(times.kernels, np.bool_)  # kernels whose start other work waits for
        read[before[(p.kernel_gap < 0) & (before >= 0)]] = True
        read[p.edge_kernel[p.edge_fraction != 1.0]] = True
        alone = ((p.kernel_group < 0) & (call >= 0) & (before >= 0) & (p.kernel_reference == LaunchReference.CALL_END)
                 & (p.kernel_external <= NEVER) & (np.diff(p.edge_ptr) == 0) & ((p.kernel_gap >= 0) | (before < 0)))
        alone &= ~read
        launches: Int64 = np.full(times.items, NONE, np.int64)
        known = np.flatnonzero(alone)
        known = known[self.kernel_at[before[known]] < self.item_at[call[known]]]
        launches[call[known]] = known
        pointer = self.structure.launched_ptr
        plain = (np.diff(pointer) == 1) & self.plain & (np.diff(p.wait_ptr) == 0) & (p.item_external <= NEVER)
        return np.where(plain & (self.rows.floor < 0), launches, NONE), alone

    def _items(self, launches: Int64) -> None:
        p, times, constants, begins = self.p, self.times, self.constants, self.begins
        ends, there = times.item_end, self.item_at >= 0
        rows = np.flatnonzero(self.plain & (launches < 0))
        shown = np.diff(self.structure.launched_ptr)[rows] > 0
        self._item(rows, np.where(shown, rows, NONE))
        opens = there & ~self.plain
        rows = np.flatnonzero(opens & (self.follows >= 0))
        self.add(op.START, begins[rows], _START, to=rows, of=ends + self.follows[rows], row=self.rows.item[rows],
                 taken=self.taken[rows])
        rows = np.flatnonzero(opens & (self.follows < 0))
        self.add(op.OPEN, begins[rows], _START, to=rows, row=self.rows.item[rows], taken=self.taken[rows],
                 lag=constants.thread_start + np.searchsorted(p.thread_ptr, rows, side="right") - 1)
        rows = np.flatnonzero(opens)
        self.add(op.END, self.item_at[rows], _END, to=ends + rows, of=rows, row=self.rows.item[rows])
        item = owners(p.after_ptr)
        edge = np.arange(len(item))
        self.add(op.LATER, begins[item], _AFTER, to=item, of=ends + p.after_item, cause=StartCause.OTHER_THREAD,
                 source=edge, lag=constants.after_lag + edge)
        item = owners(p.wait_ptr)
        edge = np.arange(len(item))
        self.add(op.LATER, self.item_at[item], _WAITS, to=ends + item, of=times.kernel_end + p.wait_kernel,
                 cause=EndCause.KERNEL, source=p.wait_kernel, lag=constants.wait_lag + edge)
        rows = np.flatnonzero((p.item_external > NEVER) & there)
        self.add(op.LEAST, self.item_at[rows], _LEAST, to=ends + rows, cause=EndCause.EXTERNAL,
                 lag=constants.item_external + rows)
        rows = np.flatnonzero((self.rows.floor >= 0) & there)
        self.add(op.FLOOR, self.item_at[rows], _FLOOR, to=ends + rows, row=self.rows.floor[rows],
                 cause=EndCause.EXTERNAL)

    def _item(self, rows: Int64, start: Int64) -> None:
        """Add items that wait only for the item before them; ``start`` numbers their kept starts, -1: not kept."""
        ends = self.times.item_end
        self.add(op.ITEM, self.item_at[rows], _END, to=ends + rows, to_start=start, of=ends + self.follows[rows],
                 row=self.rows.item[rows], taken=self.taken[rows])

    def _room(self, rows: Int64) -> None:
        """Add operations that let items end no earlier than there is room in the launch queue."""
        self.add(op.LATER, self.item_at[rows], _ROOM, to=self.times.item_end + rows, cause=EndCause.QUEUE,
                 of=self.times.left + self.entry[rows], source=op.OF_THE_LEFT, lag=self.constants.item_return + rows)

    def _queues(self, launches: Int64) -> None:
        """Add the operations by which entries leave the queues, for entries that items wait for."""
        p, times = self.p, self.times
        self.entry = entry = entries_waited_for(p)
        rows = np.flatnonzero((entry >= 0) & (self.item_at >= 0))
        rows = rows[np.argsort(self.begins[rows], kind="stable")]
        none: Int64 = np.zeros(0, np.int64)
        leaving, before, first_asked = [none], [none], [none]
        for channel in range(len(p.queue_depth)):
            mine = rows[p.item_channel[rows] == channel]
            if not len(mine):
                continue
            low = int(p.queue_ptr[channel])
            reached = np.maximum.accumulate(entry[mine])
            every = np.arange(low, int(reached[-1]) + 1)
            leaving.append(every)
            before.append(np.where(every > low, every - 1, NONE))
            first_asked.append(mine[np.searchsorted(reached, every, side="left")])
        entries, earlier, asked = (np.concatenate(part) for part in (leaving, before, first_asked))
        kernel = p.queue_kernel[entries]
        # If an item is one operation with its kernel, that operation also lets one queue entry leave.
        count = np.bincount(asked, minlength=times.items)
        joined = (launches[asked] >= 0) & (count[asked] == 1) & (earlier >= 0) & (entry[asked] == entries)
        self.queued: Int64 = np.full(times.items, NONE, np.int64)
        self.queued[asked[joined]] = entries[joined]
        for opens in (True, False):
            some = np.flatnonzero(~joined & ((earlier < 0) == opens))
            leaves = times.kernel_end + kernel[some]
            self.add(op.SAME if opens else op.LEFT, self.begins[asked[some]], _BEFORE, to=times.left + entries[some],
                     of=leaves if opens else times.left + earlier[some], other=NONE if opens else leaves,
                     source=kernel[some], cause=0)
        self._room(rows[launches[rows] < 0])

    def _kernels(self, launches: Int64, alone: Bool) -> None:
        p, times, constants, row = self.p, self.times, self.constants, self.rows.kernel
        items = np.flatnonzero(launches >= 0)
        kernel, left = launches[items], self.queued[items]
        # One operation if the queue has room, or if the entry that the launch waits for leaves within that operation.
        waits = (self.entry[items] >= 0) & (left < 0)
        for queued in (False, True):
            some = np.flatnonzero((left >= 0) if queued else (left < 0) & ~waits)
            n, k, entry = items[some], kernel[some], left[some]
            leaving = {"to_left": times.left + entry, "call": times.left + entry - 1,
                       "leaves": times.kernel_end + p.queue_kernel[entry]} if queued else {}
            self.add(op.QUEUED_LAUNCH if queued else op.LAUNCH, self.item_at[n], _END, to=times.item_end + n,
                     to_start=times.kernel_end + k, of=times.item_end + self.follows[n],
                     other=times.kernel_end + p.kernel_previous[k], row=self.rows.item[n], kernel_row=row[k],
                     taken=self.taken[n], lag=constants.item_return + n, latency=constants.kernel_latency + k,
                     gap=constants.kernel_gap + k, **leaving)
        self._item(items[waits], items[waits])
        self._room(items[waits])
        apart = alone.copy()
        apart[kernel[~waits]] = False
        k = np.flatnonzero(apart)
        call, before = p.kernel_item[k], p.kernel_previous[k]
        first = self.item_at[call] < self.kernel_at[before]
        self.add(op.KERNEL, self.kernel_at[k], self.within, to=times.kernel_end + k, of=times.item_end + call,
                 call=call, other=times.kernel_end + before, kernel_row=row[k], latency=constants.kernel_latency + k,
                 gap=constants.kernel_gap + k, cause=np.where(first, KernelCause.LAUNCH, KernelCause.STREAM))
        self._inputs(np.flatnonzero(~alone))

    def _inputs(self, k: Int64) -> None:
        """Add kernels step by step: their inputs in the order in which they become known, then their ends."""
        p, times, constants, row = self.p, self.times, self.constants, self.rows.kernel
        at, start = self.kernel_at, times.kernel_start
        self.add(op.SET, at[k], 4, to=start + k, cause=KernelCause.EXTERNAL, lag=constants.kernel_external + k)
        ready = np.zeros(times.kernels, np.int64)  # place at which the last input of each kernel is known

        def inputs(code: int, rows: Int64, known: Int64, minor: int, **columns: Int64 | int) -> None:
            np.maximum.at(ready, rows, known + 1)
            self.add(code, at[rows], 4 * (known + 2) + minor, to=start + rows, **columns)

        launched = k[p.kernel_item[k] >= 0]
        for reference in LaunchReference:
            mine = launched[p.kernel_reference[launched] == reference]
            call = p.kernel_item[mine]
            lag, ended, cause = constants.kernel_latency + mine, times.item_end + call, KernelCause.LAUNCH
            if reference == LaunchReference.CALL_START:
                # Submitted within the call, as soon as the queue lets it in; the call may not have ended.
                previous = np.where(self.follows[call] >= 0, self.item_at[self.follows[call]], NONE)
                inputs(op.LATER, mine, previous, 1, of=call, cause=cause, source=call, lag=lag)
                held = self.entry[call] >= 0
                inputs(op.LATER, mine[held], previous[held], 1, of=times.left + self.entry[call[held]], cause=cause,
                       source=call[held], lag=lag[held])
            elif reference == LaunchReference.STAGED:
                inputs(op.STAGED, mine, self.item_at[call], 1, of=ended, cause=cause, source=call, lag=lag, other=call,
                       kernel_row=row[mine])
            else:
                inputs(op.LATER, mine, self.item_at[call], 1, of=ended, cause=cause, source=call, lag=lag)
                inputs(op.LATER, mine, self.item_at[call], 1, of=call, cause=cause, source=call, lag=0)
        mine = k[p.kernel_previous[k] >= 0]
        before = p.kernel_previous[mine]
        inputs(op.LATER, mine, at[before], 0, of=times.kernel_end + before, cause=KernelCause.STREAM, source=before,
               lag=constants.kernel_gap + mine)
        # With overlap (a negative gap) a kernel still does not start before its predecessor did.
        overlaps = p.kernel_gap[mine] < 0
        mine, before = mine[overlaps], before[overlaps]
        inputs(op.LATER, mine, at[before], 0, of=start + before, cause=KernelCause.STREAM, source=before, lag=0)
        owner = owners(p.edge_ptr)
        for ends in (True, False):
            some = np.flatnonzero((p.edge_fraction == 1.0) == ends)
            of, lag = p.edge_kernel[some], constants.edge_lag + some
            part = {} if ends else {"other": times.kernel_end + of, "row": some}
            inputs(op.LATER if ends else op.PART, owner[some], at[of], 2, cause=KernelCause.EDGE, source=some,
                   of=(times.kernel_end if ends else start) + of, lag=lag, **part)
        group = p.kernel_group
        lone = k[group[k] < 0]
        self.add(op.RUN, at[lone], 2 * self.within, to=times.kernel_end + lone, of=start + lone, kernel_row=row[lone])
        met = k[group[k] >= 0]
        met = met[np.lexsort((ready[met], group[met]))]
        opens = np.ones(len(met), np.bool_)
        opens[1:] = group[met[1:]] != group[met[:-1]]
        for first in (True, False):
            some = met[opens == first]
            self.add(op.SAME if first else op.LATER, at[some], self.within + (0 if first else 1 + ready[some]),
                     to=times.met + group[some], of=start + some, cause=0, source=some)
        self.add(op.RUN, at[met], 2 * self.within, to=times.kernel_end + met, of=times.met + group[met],
                 kernel_row=row[met])
