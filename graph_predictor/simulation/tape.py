"""``Tape``: a program's dependencies as a list of operations, each a maximum of sums, in an order in which they can be
worked out.

::

    item       follows the one before, launches a kernel        start = end of the one before + work, …
    kernel     waits for its call and the kernel before it      start = max(call + latency, kernel before + gap), …
    item       waits for a kernel                               end ≥ kernel + lag

What waits for what is looked up once, when a tape is made; programs that differ in times alone share it. A launch and
its kernel are one operation, and items that only the next one of their thread waits for are taken in by that one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.simulation.program import (
    NEVER,
    EndCause,
    KernelCause,
    LaunchReference,
    Program,
    StartCause,
    Structure,
    entries_waited_for,
)
from graph_predictor.simulation.tape_loop import (
    BESIDE,
    CALL,
    CAUSE,
    CODE,
    COLUMNS,
    CONSTANTS,
    END,
    FLOOR,
    ITEM,
    KERNEL,
    KERNEL_ROW,
    LATER,
    LAUNCH,
    LEAST,
    LEAVES,
    LEFT,
    OF,
    OF_THE_LEFT,
    OPEN,
    PART,
    QUEUED_LAUNCH,
    ROW,
    RUN,
    SAME,
    SET,
    SOURCE,
    STAGED,
    START,
    TAKEN,
    TO,
    TO_LEFT,
    TO_START,
    place,
)
from tracer.arrays import Bool, Int32, Int64
from tracer.graph import NONE

Columns = dict[int, "Int64 | int"]
"""Values of operations by the column they are in."""
_BEFORE, _START, _AFTER, _END, _ROOM, _WAITS, _LEAST, _FLOOR = range(8)
"""What is worked out of an item, one after the other."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the times of a program's items and kernels are, and which are needed.

    Attributes:
        item: row of work and cost of each item.
        kernel: row of the duration of each kernel.
        floor: of each item the row of its floor, the time before which it cannot end; -1 for none.
    """

    item: Int64
    kernel: Int64
    floor: Int64


@dataclass(frozen=True, slots=True)
class TimeNumbers:
    """How the times of a program are numbered: starts of items, then their ends, starts of kernels, their ends, when
    queue entries have left, when all of a rendezvous have arrived."""

    items: int
    kernels: int
    entries: int
    groups: int

    @classmethod
    def of(cls, program: Program) -> TimeNumbers:
        """Those of a program."""
        return cls(len(program.item_kind), len(program.kernel_item), len(program.queue_kernel), len(program.group_size))

    @property
    def item_end(self) -> int:
        """Number of the first item's end."""
        return self.items

    @property
    def kernel_start(self) -> int:
        """Number of the first kernel's start."""
        return 2 * self.items

    @property
    def kernel_end(self) -> int:
        """Number of the first kernel's end."""
        return 2 * self.items + self.kernels

    @property
    def left(self) -> int:
        """Number of the time by which the first entry has left."""
        return 2 * (self.items + self.kernels)

    @property
    def met(self) -> int:
        """Number of the time at which all of the first rendezvous have arrived."""
        return self.left + self.entries

    @property
    def count(self) -> int:
        """How many there are."""
        return self.met + self.groups


@dataclass(frozen=True, slots=True)
class Tape:
    """Operations in an order in which they can be worked out.

    Attributes:
        operations: as of ``tape_loop``, [operations, columns].
        constant: which of the program's constants each takes, [operations, 3].
    """

    operations: Int32
    constant: Int64

    @classmethod
    def of(cls, program: Program, nodes: Int64, structure: Structure, rows: Rows, follows: Int64) -> Tape:
        """Make the tape of a program.

        Args:
            program: the program, and all that differ from it in times alone.
            nodes: its items by their rows and kernels by theirs behind all items, in an order in which they can be
                known; items that are left out are taken in by those behind them.
            structure: of the program.
            rows: where its times are.
            follows: of each item the one before it on its thread, among those that are there; -1 for none.
        """
        return _Sheet(program, nodes, structure, rows, follows).tape()

    def placed(self, kept: Int64, count: int) -> tuple[Tape, Int64, int]:
        """Return the tape over places that times have only while they are needed, the place of each of the ``kept``
        ones of its ``count`` times, and how many places there are."""
        operations = self.operations.copy()
        stays = np.zeros(count, np.bool_)
        stays[kept] = True
        at: Int64 = np.full(count, NONE, np.int64)
        until, first = at.copy(), np.full(max(len(operations), 1), NONE, np.int64)
        places = place(operations, stays, until, first, np.empty(count, np.int64), np.empty(count, np.int64), at)
        return replace(self, operations=operations), at[kept], places


def constants_of(program: Program) -> Int64:
    """A program's lags and other times that are no durations, one behind the other; the first is 0."""
    p = program
    return np.concatenate([np.zeros(1, np.int64), p.thread_start, p.item_external, p.item_return, p.after_lag,
                           p.wait_lag, p.kernel_external, p.kernel_latency, p.kernel_gap, p.edge_lag])


class _Constants:
    """Where each column of constants begins in ``constants_of``."""

    def __init__(self, p: Program) -> None:
        items, kernels = len(p.item_kind), len(p.kernel_item)
        lengths = (1, len(p.thread_start), items, items, len(p.after_lag), len(p.wait_lag), kernels, kernels, kernels)
        (self.thread_start, self.item_external, self.item_return, self.after_lag, self.wait_lag, self.kernel_external,
         self.kernel_latency, self.kernel_gap, self.edge_lag) = np.cumsum(lengths).tolist()


class _Sheet:
    """Operations of one program, each with its place in the order: that of its item or kernel, and one within it."""

    def __init__(self, program: Program, nodes: Int64, structure: Structure, rows: Rows,
                 follows: Int64) -> None:
        self.p, self.rows, self.follows, self.structure = program, rows, follows, structure
        self.times, self.constants = TimeNumbers.of(program), _Constants(program)
        items, kernels = self.times.items, self.times.kernels
        self.parts: list[tuple[Int64, Columns, Columns]] = []
        known: Int64 = np.full(items + kernels, NONE, np.int64)
        known[nodes] = np.arange(len(nodes))
        # Those of one rendezvous are known together.
        group = program.kernel_group
        met = np.flatnonzero(group >= 0)
        first = np.full(self.times.groups, len(nodes), np.int64)
        np.minimum.at(first, group[met], known[items + met])
        known[items + met] = first[group[met]]
        self.item_at, self.kernel_at = known[:items], known[items:]
        # Items that each takes in: those of its thread between it and the one it follows.
        begin = np.repeat(program.thread_ptr[:-1], np.diff(program.thread_ptr))
        self.taken = np.arange(items) - np.where(follows >= 0, follows + 1, begin)
        self.within = 4 * (len(nodes) + 2)  # places within one item or kernel, of its inputs; beyond them is its end

    def add(self, code: int, at: Int64, within: Int64 | int, columns: Columns,
            constants: Columns | None = None) -> None:
        """Add operations of one kind at places of the order."""
        if len(at):
            self.parts.append((at * (3 * self.within) + within, {CODE: code, **columns}, constants or {}))

    def tape(self) -> Tape:
        """Make all operations, and put them in order."""
        launches, alone = self._alone()
        self._items(launches)
        self._queues(launches)
        self._kernels(launches, alone)
        key = np.concatenate([key for key, _, _ in self.parts]) if self.parts else np.zeros(0, np.int64)
        operations: Int32 = np.full((len(key), COLUMNS), NONE, np.int32)
        constant: Int64 = np.zeros((len(key), CONSTANTS), np.int64)
        at = 0
        for keys, columns, constants in self.parts:
            for column, values in columns.items():
                operations[at:at + len(keys), column] = values
            for number, values in constants.items():
                constant[at:at + len(keys), number] = values
            at += len(keys)
        order = np.argsort(key, kind="stable")
        return Tape(operations[order], constant[order])

    def _alone(self) -> tuple[Int64, Bool]:
        """Return which items are one operation with the kernel they launch (that kernel; -1 for none), and which
        kernels wait for their call and the kernel before alone."""
        p, times = self.p, self.times
        call, before = p.kernel_item, p.kernel_previous
        read = np.zeros(times.kernels, np.bool_)  # starts that others wait for
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
        plain = (np.diff(pointer) == 1) & self._plain() & (np.diff(p.wait_ptr) == 0) & (p.item_external <= NEVER)
        return np.where(plain & (self.rows.floor < 0), launches, NONE), alone

    def _plain(self) -> Bool:
        """Items that follow another one and wait for no other thread, and whose start is only known with them."""
        p = self.p
        inside = np.zeros(self.times.items, np.bool_)
        calls = p.kernel_item[(p.kernel_reference == LaunchReference.CALL_START) & (p.kernel_item >= 0)]
        inside[calls] = True
        return (self.follows >= 0) & (np.diff(p.after_ptr) == 0) & ~inside & (self.item_at >= 0)

    def _submitted(self) -> Int64:
        """Return when in the order each item starts: where a kernel works within its call, before that."""
        p = self.p
        found = self.item_at.copy()
        inside = np.flatnonzero((p.kernel_reference == LaunchReference.CALL_START) & (p.kernel_item >= 0))
        np.minimum.at(found, p.kernel_item[inside], self.kernel_at[inside])
        return found

    def _items(self, launches: Int64) -> None:
        p, times, constants, row = self.p, self.times, self.constants, self.rows.item
        plain = self._plain()
        rows = np.flatnonzero(plain & (launches < 0))
        shown = np.diff(self.structure.launched_ptr)[rows] > 0
        self.add(ITEM, self.item_at[rows], _END, {
            TO: times.item_end + rows, TO_START: np.where(shown, rows, NONE), OF: times.item_end + self.follows[rows],
            ROW: row[rows], TAKEN: self.taken[rows]})
        begins = self._submitted()
        there = (self.item_at >= 0) & ~plain
        rows = np.flatnonzero(there & (self.follows >= 0))
        self.add(START, begins[rows], _START, {TO: rows, OF: times.item_end + self.follows[rows], ROW: row[rows],
                                               TAKEN: self.taken[rows]})
        rows = np.flatnonzero(there & (self.follows < 0))
        self.add(OPEN, begins[rows], _START, {TO: rows, ROW: row[rows], TAKEN: self.taken[rows]},
                 {0: constants.thread_start + np.searchsorted(p.thread_ptr, rows, side="right") - 1})
        rows = np.flatnonzero(there)
        self.add(END, self.item_at[rows], _END, {TO: times.item_end + rows, OF: rows, ROW: row[rows]})
        edge, item = _owners(p.after_ptr)
        self.add(LATER, begins[item], _AFTER, {
            TO: item, OF: times.item_end + p.after_item, CAUSE: int(StartCause.OTHER_THREAD), SOURCE: edge},
            {0: constants.after_lag + edge})
        edge, item = _owners(p.wait_ptr)
        self.add(LATER, self.item_at[item], _WAITS, {
            TO: times.item_end + item, OF: times.kernel_end + p.wait_kernel, CAUSE: int(EndCause.KERNEL),
            SOURCE: p.wait_kernel}, {0: constants.wait_lag + edge})
        rows = np.flatnonzero((p.item_external > NEVER) & (self.item_at >= 0))
        self.add(LEAST, self.item_at[rows], _LEAST, {TO: times.item_end + rows, CAUSE: int(EndCause.EXTERNAL)},
                 {0: constants.item_external + rows})
        rows = np.flatnonzero((self.rows.floor >= 0) & (self.item_at >= 0))
        self.add(FLOOR, self.item_at[rows], _FLOOR, {TO: times.item_end + rows, ROW: self.rows.floor[rows],
                                                     CAUSE: int(EndCause.EXTERNAL)})

    def _queues(self, launches: Int64) -> None:
        """Let entries leave the queues as far as items wait for them."""
        p, times, constants = self.p, self.times, self.constants
        entry = entries_waited_for(p)
        rows = np.flatnonzero((entry >= 0) & (self.item_at >= 0))
        begins = self._submitted()
        rows = rows[np.argsort(begins[rows], kind="stable")]
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
        # One entry more, for an item that is one operation with its kernel, is part of that.
        count = np.bincount(asked, minlength=times.items)
        joined = (launches[asked] >= 0) & (count[asked] == 1) & (earlier >= 0) & (entry[asked] == entries)
        self.queued: Int64 = np.full(times.items, NONE, np.int64)
        self.queued[asked[joined]] = entries[joined]
        for opens in (True, False):
            some = np.flatnonzero(~joined & ((earlier < 0) == opens))
            columns: Columns = {TO: times.left + entries[some], SOURCE: kernel[some], CAUSE: 0}
            of = times.kernel_end + kernel[some]
            columns |= {OF: of} if opens else {OF: times.left + earlier[some], BESIDE: of}
            self.add(SAME if opens else LEFT, begins[asked[some]], _BEFORE, columns)
        rows = rows[launches[rows] < 0]
        self.add(LATER, self.item_at[rows], _ROOM, {
            TO: times.item_end + rows, OF: times.left + entry[rows], CAUSE: int(EndCause.QUEUE), SOURCE: OF_THE_LEFT},
            {0: constants.item_return + rows})
        self.entry = entry

    def _kernels(self, launches: Int64, alone: Bool) -> None:
        p, times, constants, row = self.p, self.times, self.constants, self.rows.kernel
        items = np.flatnonzero(launches >= 0)
        kernel = launches[items]
        left = self.queued[items]
        # Where the queue has room already, or an entry that left before is enough, the launch waits for none.
        waits = (self.entry[items] >= 0) & (left < 0)
        for code, some in ((LAUNCH, np.flatnonzero((left < 0) & ~waits)), (QUEUED_LAUNCH, np.flatnonzero(left >= 0))):
            n, k = items[some], kernel[some]
            columns: Columns = {
                TO: times.item_end + n, TO_START: times.kernel_end + k, OF: times.item_end + self.follows[n],
                BESIDE: times.kernel_end + p.kernel_previous[k], ROW: self.rows.item[n], KERNEL_ROW: row[k],
                TAKEN: self.taken[n]}
            if code == QUEUED_LAUNCH:
                entry = left[some]
                columns |= {TO_LEFT: times.left + entry, CALL: times.left + entry - 1,
                            LEAVES: times.kernel_end + p.queue_kernel[entry]}
            self.add(code, self.item_at[n], _END, columns, {
                0: constants.item_return + n, 1: constants.kernel_latency + k, 2: constants.kernel_gap + k})
        n, k = items[waits], kernel[waits]
        self.add(ITEM, self.item_at[n], _END, {TO: times.item_end + n, TO_START: n,
                                               OF: times.item_end + self.follows[n], ROW: self.rows.item[n],
                                               TAKEN: self.taken[n]})
        self.add(LATER, self.item_at[n], _ROOM, {TO: times.item_end + n, OF: times.left + self.entry[n],
                                                 CAUSE: int(EndCause.QUEUE), SOURCE: OF_THE_LEFT},
                 {0: constants.item_return + n})
        apart = alone.copy()
        apart[kernel[~waits]] = False
        k = np.flatnonzero(apart)
        call, before = p.kernel_item[k], p.kernel_previous[k]
        first = self.item_at[call] < self.kernel_at[before]
        self.add(KERNEL, self.kernel_at[k], self.within, {
            TO: times.kernel_end + k, OF: times.item_end + call, CALL: call, BESIDE: times.kernel_end + before,
            KERNEL_ROW: row[k], CAUSE: np.where(first, int(KernelCause.LAUNCH), int(KernelCause.STREAM))},
            {1: constants.kernel_latency + k, 2: constants.kernel_gap + k})
        self._inputs(np.flatnonzero(~alone))

    def _inputs(self, k: Int64) -> None:
        """Work out kernels step by step: their inputs in the order in which they become known, then their ends."""
        p, times, constants, row = self.p, self.times, self.constants, self.rows.kernel
        at, start = self.kernel_at, times.kernel_start
        self.add(SET, at[k], 4, {TO: start + k, CAUSE: int(KernelCause.EXTERNAL)}, {0: constants.kernel_external + k})
        ready = np.zeros(times.kernels, np.int64)  # when the last input of each kernel is known

        def inputs(code: int, rows: Int64, known: Int64, minor: int, of: Int64, cause: KernelCause, source: Int64,
                   constant: Int64 | int, columns: Columns | None = None) -> None:
            np.maximum.at(ready, rows, known + 1)
            self.add(code, at[rows], 4 * (known + 2) + minor, {
                TO: start + rows, OF: of, CAUSE: int(cause), SOURCE: source, **(columns or {})}, {0: constant})

        launched = k[p.kernel_item[k] >= 0]
        for anchor in LaunchReference:
            mine = launched[p.kernel_reference[launched] == anchor]
            call = p.kernel_item[mine]
            lag = constants.kernel_latency + mine
            if anchor == LaunchReference.CALL_START:
                # Submitted within the call, as soon as the queue lets it in; the call may not have ended.
                previous = np.where(self.follows[call] >= 0, self.item_at[self.follows[call]], NONE)
                inputs(LATER, mine, previous, 1, call, KernelCause.LAUNCH, call, lag)
                held = self.entry[call] >= 0
                inputs(LATER, mine[held], previous[held], 1, times.left + self.entry[call[held]], KernelCause.LAUNCH,
                       call[held], lag[held])
            elif anchor == LaunchReference.STAGED:
                inputs(STAGED, mine, self.item_at[call], 1, times.item_end + call, KernelCause.LAUNCH, call, lag,
                       {BESIDE: call, KERNEL_ROW: row[mine]})
            else:
                inputs(LATER, mine, self.item_at[call], 1, times.item_end + call, KernelCause.LAUNCH, call, lag)
                inputs(LATER, mine, self.item_at[call], 1, call, KernelCause.LAUNCH, call, 0)
        mine = k[p.kernel_previous[k] >= 0]
        before = p.kernel_previous[mine]
        inputs(LATER, mine, at[before], 0, times.kernel_end + before, KernelCause.STREAM, before,
               constants.kernel_gap + mine)
        # With overlap (a negative gap) a kernel still does not start before its predecessor did.
        overlaps = p.kernel_gap[mine] < 0
        inputs(LATER, mine[overlaps], at[before[overlaps]], 0, start + before[overlaps], KernelCause.STREAM,
               before[overlaps], 0)
        edge, owner = _owners(p.edge_ptr)
        other = p.edge_kernel
        for ended in (True, False):
            some = np.flatnonzero((p.edge_fraction == 1.0) == ended)
            of = other[some]
            inputs(LATER if ended else PART, owner[some], at[of], 2, (times.kernel_end if ended else start) + of,
                   KernelCause.EDGE, edge[some], constants.edge_lag + edge[some],
                   {} if ended else {BESIDE: times.kernel_end + of, ROW: edge[some]})
        group = p.kernel_group
        lone = k[group[k] < 0]
        self.add(RUN, at[lone], 2 * self.within, {TO: times.kernel_end + lone, OF: start + lone, KERNEL_ROW: row[lone]})
        met = k[group[k] >= 0]
        met = met[np.lexsort((ready[met], group[met]))]
        opens = np.ones(len(met), np.bool_)
        opens[1:] = group[met[1:]] != group[met[:-1]]
        for first in (True, False):
            some = met[opens == first]
            self.add(SAME if first else LATER, at[some], self.within + (0 if first else 1 + ready[some]), {
                TO: times.met + group[some], OF: start + some, CAUSE: 0, SOURCE: some})
        self.add(RUN, at[met], 2 * self.within, {TO: times.kernel_end + met, OF: times.met + group[met],
                                                 KERNEL_ROW: row[met]})


def _owners(pointer: Int64) -> tuple[Int64, Int64]:
    """The rows of edges by their owner (CSR), and the owner of each."""
    owner = np.repeat(np.arange(len(pointer[1:])), np.diff(pointer))
    return np.arange(len(owner)), owner
