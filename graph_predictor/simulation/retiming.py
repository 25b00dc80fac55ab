"""The times of a program whose like was simulated before: the same dependencies, other durations, many at once.

In which order things can be worked out depends on what waits for what, not on how long anything takes. The order that
the simulator found for one program is good for all that differ in times alone, and along it every time is a maximum of
sums of earlier ones: no thread waits its turn, and what waits for what is looked up once for all variants. What bound
what is not found; ends are those of ``simulate`` to the nanosecond.

Host items that nothing but the next one of their thread waits for are added to that one: sums of whole nanoseconds are
the same in any order.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

import numpy as np

from graph_predictor.simulation.engine import Structure
from graph_predictor.simulation.program import NEVER, ItemKind, Program
from graph_predictor.simulation.retiming_loop import LANES, place_nodes, retime
from tracer.arrays import Bool, Int64

MOST_KEPT = 16_000_000
"""Numbers in the arrays that a thread keeps to work in again: 128 MB."""


@dataclass(frozen=True, slots=True)
class ProgramVariants:
    """What differs between variants of one program, ns, each with the variants side by side.

    Attributes:
        item: the row of ``work`` and ``cost`` that is each item's.
        work, cost: as of ``Program``, [rows, hosts].
        host: which column of them is each variant's.
        kernel: the row of ``duration`` that is each kernel's.
        duration: as of ``Program``, [rows, variants].
        floor_items: begins of steps that end no earlier than a variant says, with those times in ``floor`` [items,
            variants].
    """

    item: Int64
    work: Int64
    cost: Int64
    host: Int64
    kernel: Int64
    duration: Int64
    floor_items: Int64
    floor: Int64

    @property
    def count(self) -> int:
        """How many variants there are."""
        return len(self.host)

    @classmethod
    def alone(cls, program: Program) -> ProgramVariants:
        """A program as the only variant of itself."""
        return cls(np.arange(len(program.item_work)), program.item_work[:, None], program.item_cost[:, None],
                   np.zeros(1, np.int64), np.arange(len(program.kernel_duration)), program.kernel_duration[:, None],
                   np.zeros(0, np.int64), np.zeros((0, 1), np.int64))


@dataclass(frozen=True, slots=True)
class WorkingOrder:
    """An order in which a program's items and kernels can be worked out, and of every program that differs from it in
    times alone: in work, costs, lags, latencies, gaps, durations and external times that are there.

    Attributes:
        nodes: items by their row, kernels by theirs behind all items; no item that another one has taken in.
        opens: of each item the thread that it is the first of, else -1.
        previous: of each item the one before it on its thread.
        place: where the times of each node are worked out; of items that were taken in -1.
        places: how many there are.
        row: of each item its row among those whose work and cost are summed.
        chain, chain_ptr: the items whose work and cost each such row is the sum of, its own last.
        items, kernels: those whose ends are asked for.
        structure: of the program.
    """

    nodes: Int64
    opens: Int64
    previous: Int64
    place: Int64
    places: int
    row: Int64
    chain: Int64
    chain_ptr: Int64
    items: Int64
    kernels: Int64
    structure: Structure

    @classmethod
    def of(cls, program: Program, nodes: Int64, structure: Structure, alike: Int64, items: Int64,
           kernels: Int64) -> WorkingOrder:
        """Make it of the order in which a simulation of the program went (``engine.simulate_in_order``).

        Args:
            program: what was simulated.
            nodes: the order.
            structure: of the program.
            alike: a number of each item; those of one number have the same work and cost in every variant.
            items, kernels: whose ends are asked for, in any shape.
        """
        p, count = program, len(program.item_work)
        opens: Int64 = np.full(count, -1, np.int64)
        threads = np.flatnonzero(np.diff(p.thread_ptr) > 0)
        opens[p.thread_ptr[threads]] = threads
        kept = np.zeros(count + len(p.kernel_item), np.bool_)
        kept[items], kept[count + kernels] = True, True
        taken = _taken_in(p, opens, alike, kept[:count])
        own = np.flatnonzero(~taken)
        begins: Int64 = np.zeros(count, np.int64)
        begins[own] = np.concatenate([[0], own[:-1] + 1])[:len(own)]
        opens[own] = opens[begins[own]]
        _, first, row_of = np.unique(alike[own], return_index=True, return_inverse=True)
        row: Int64 = np.zeros(count, np.int64)
        row[own] = row_of
        shown = own[first]
        lengths = shown - begins[shown] + 1
        pointer = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        chain = np.arange(pointer[-1]) + np.repeat(begins[shown] - pointer[:-1], lengths)
        nodes = nodes[~np.concatenate([taken, np.zeros(len(p.kernel_item), np.bool_)])[nodes]]
        place, places = _places(p, nodes, opens, begins - 1, structure, kept)
        return cls(nodes, opens, begins - 1, place, places, row, chain, pointer, items, kernels, structure)

    def ends(self, program: Program, variants: ProgramVariants | None = None) -> tuple[Int64, Int64]:
        """When the items and kernels that are asked for end in a program or, with its other times, in variants of it,
        ns, [*rows, variants] each."""
        p, items = program, len(program.item_work)
        each = ProgramVariants.alone(program) if variants is None else variants
        floor_of: Int64 = np.full(items, -1, np.int64)
        floor_of[each.floor_items] = np.arange(len(each.floor_items))
        start, end, left = _WORKSPACE.rows(self.places, self.places, len(p.queue_kernel))
        work, cost = self._summed(each)
        at_items, at_kernels = self.place[self.items], self.place[items + self.kernels]
        found = []
        for at in range(0, each.count, LANES):
            of = each.host[np.minimum(np.arange(at, at + LANES), each.count - 1)]
            inputs = (
                self.nodes, self.opens, self.previous, self.place, p.thread_start, self.row, work[:, of], cost[:, of],
                p.item_external, floor_of, _lanes(each.floor, at), p.item_queue, p.item_channel, p.after_ptr,
                p.after_item, p.after_lag, p.wait_ptr, p.wait_kernel, p.wait_lag, p.kernel_item, p.kernel_anchor,
                p.kernel_latency, p.kernel_previous, p.kernel_gap, p.kernel_external, each.kernel,
                _lanes(each.duration, at), p.edge_ptr, p.edge_kernel, p.edge_fraction, p.edge_lag, p.kernel_group,
                p.queue_ptr, p.queue_kernel, p.queue_depth, p.item_return, *self.structure.member,
            )
            retime(*map(np.ascontiguousarray, inputs, retime.dtypes), start, end, np.array(p.queue_ptr[:-1], np.int64),
                   left, np.full(len(p.group_size), -1, np.int64))
            found.append((end[at_items], end[at_kernels]))
        item_end, kernel_end = (np.concatenate(parts, axis=-1)[..., :each.count] for parts in zip(*found, strict=True))
        return item_end, kernel_end

    def _summed(self, each: ProgramVariants) -> tuple[Int64, Int64]:
        """Work of items and all that they took in before them, and their own cost, [rows, hosts]."""
        last = self.chain_ptr[1:] - 1
        rows = each.item[self.chain]
        work, cost = each.work[rows], each.cost[rows]
        own = cost[last]
        cost[last] = 0
        return np.add.reduceat(work + cost, self.chain_ptr[:-1], axis=0) if len(last) else work, own


def _taken_in(p: Program, opens: Int64, alike: Int64, kept: Bool) -> Bool:
    """Return which items are waited for by the next one of their thread alone, and wait for nothing but the one before:
    with all those alike."""
    count = len(p.item_work)
    follows = np.zeros(count, np.bool_)
    follows[:-1] = opens[1:] < 0
    free = follows & ~kept & (p.item_kind != ItemKind.STEP_BEGIN) & (p.item_external <= NEVER)
    free &= (np.diff(p.after_ptr) == 0) & (np.diff(p.wait_ptr) == 0)
    free[p.after_item] = False
    free[p.kernel_item[p.kernel_item >= 0]] = False
    if len(p.queue_depth):
        depth = p.queue_depth[np.maximum(p.item_channel, 0)]
        free &= (p.item_channel < 0) | (depth <= 0) | (p.item_queue < depth)
    size = int(alike.max(initial=-1)) + 1
    # The same items must be before those alike: an item at the end of a copy is before the first of the next one.
    behind = np.flatnonzero(follows)
    before: Int64 = np.full(size, -1, np.int64)
    before[alike[behind[::-1] + 1]] = alike[behind[::-1]]
    other = behind[before[alike[behind + 1]] != alike[behind]]
    free[other] = False
    refused = np.zeros(size + 1, np.bool_)  # the last one stands for no item
    refused[before[alike[np.append(other + 1, np.flatnonzero(opens >= 0))]]] = True
    refused[alike[~free]] = True
    return ~refused[alike]  # type: ignore[no-any-return]


def _places(p: Program, nodes: Int64, opens: Int64, previous: Int64, structure: Structure,
            kept: Bool) -> tuple[Int64, int]:
    """Places for the times of nodes, and how many there are; those ``kept`` share theirs with nothing."""
    count = len(kept)
    place: Int64 = np.full(count, -1, np.int64)
    inputs = (nodes, opens, previous, p.item_queue, p.item_channel, p.after_ptr, p.after_item, p.kernel_item,
              p.kernel_anchor, p.kernel_previous, p.wait_ptr, p.wait_kernel, p.edge_ptr, p.edge_kernel, p.kernel_group,
              p.queue_ptr, p.queue_kernel, p.queue_depth, *structure.member, kept)
    work = (np.array(p.queue_ptr[:-1], np.int64), np.zeros(len(p.group_size), np.int64), np.full(count, -1, np.int64),
            np.full(len(nodes), -1, np.int64), np.full(count, -1, np.int64), np.empty(count, np.int64),
            np.zeros(2, np.int64), place)
    return place, place_nodes(*map(np.ascontiguousarray, inputs, place_nodes.dtypes), *work)


class _Workspace(threading.local):
    """Arrays to work in that a thread uses again and again: the system hands new ones out page by page, which takes as
    long as the work."""

    def __init__(self) -> None:
        self._kept: Int64 = _aligned(0)

    def rows(self, *sizes: int) -> list[Int64]:
        """Return arrays of so many rows of ``LANES``, of any content, good until the next call."""
        total = sum(sizes) * LANES
        kept = self._kept if total <= len(self._kept) else _aligned(total)
        if total <= MOST_KEPT:
            self._kept = kept
        ends = np.cumsum([0, *sizes]) * LANES
        return [kept[low:high].reshape(-1, LANES) for low, high in itertools.pairwise(ends.tolist())]


def _aligned(size: int) -> Int64:
    """Return an array of so many numbers that begins where a cache line does: no row is in two of them."""
    found = np.empty(size + LANES, np.int64)
    skipped = -found.ctypes.data % (LANES * found.itemsize) // found.itemsize
    return found[skipped:skipped + size]


_WORKSPACE = _Workspace()


def _lanes(rows: Int64, at: int) -> Int64:
    """``LANES`` columns from one on; those beyond the last are the last."""
    found = rows[:, at:at + LANES]
    missing = LANES - found.shape[1]
    return found if not missing else np.concatenate([found, np.repeat(found[:, -1:], missing, axis=1)], axis=1)
