"""The times of a program whose like was simulated before: the same dependencies, other durations, many at once.

In which order things can be worked out depends on what waits for what, not on how long anything takes. The order that
the simulator found for one program is good for all that differ in times alone, and along it every time is a maximum of
sums of earlier ones: no thread waits its turn, and what waits for what is looked up once for all variants. What bound
what is not found; times are those of ``simulate`` to the nanosecond.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from graph_predictor.simulation.engine import Structure
from graph_predictor.simulation.program import Program
from graph_predictor.simulation.retiming_loop import LANES, retime
from tracer.arrays import Int64

MOST_KEPT = 16_000_000
"""Numbers in the arrays that a thread keeps to work in again: 128 MB."""


@dataclass(frozen=True, slots=True)
class ProgramVariants:
    """What differs between variants of one program, ns, each with the variants side by side.

    Attributes:
        item: the row of ``work`` and ``cost`` that is each item's.
        work, cost: as of ``Program``, [rows, variants].
        kernel: the row of ``duration`` that is each kernel's.
        duration: as of ``Program``, [rows, variants].
        floor_items: items that end no earlier than a variant says, with those times in ``floor`` [items, variants].
    """

    item: Int64
    work: Int64
    cost: Int64
    kernel: Int64
    duration: Int64
    floor_items: Int64
    floor: Int64

    @property
    def count(self) -> int:
        """How many variants there are."""
        return int(self.work.shape[1])

    @classmethod
    def alone(cls, program: Program) -> ProgramVariants:
        """A program as the only variant of itself."""
        return cls(np.arange(len(program.item_work)), program.item_work[:, None], program.item_cost[:, None],
                   np.arange(len(program.kernel_duration)), program.kernel_duration[:, None], np.zeros(0, np.int64),
                   np.zeros((0, 1), np.int64))


@dataclass(frozen=True, slots=True)
class VariantTimes:
    """Simulated times of every item and kernel, ns, [rows, variants]."""

    item_start: Int64
    item_end: Int64
    kernel_start: Int64
    kernel_end: Int64


@dataclass(frozen=True, slots=True)
class WorkingOrder:
    """An order in which a program's items and kernels can be worked out, and of every program that differs from it in
    times alone: in work, costs, lags, latencies, gaps, durations and external times.

    Attributes:
        nodes: items by their row, kernels by theirs behind all items.
        opens: of each item the thread that it is the first of, else -1.
        structure: of the program.
    """

    nodes: Int64
    opens: Int64
    structure: Structure

    @classmethod
    def of(cls, program: Program, nodes: Int64, structure: Structure) -> WorkingOrder:
        """Make it of the order in which a simulation of the program went (``engine.simulate_in_order``)."""
        opens = np.full(len(program.item_work), -1, np.int64)
        threads = np.flatnonzero(np.diff(program.thread_ptr) > 0)
        opens[program.thread_ptr[threads]] = threads
        return cls(nodes, opens, structure)

    def times(self, program: Program, variants: ProgramVariants | None = None) -> VariantTimes:
        """The times of a program or, with its other times, of variants of it."""
        each = ProgramVariants.alone(program) if variants is None else variants
        found = [[column.copy() for column in (one.item_start, one.item_end, one.kernel_start, one.kernel_end)]
                 for one in self._blocks(program, each)]
        return VariantTimes(*(np.concatenate(columns, axis=1)[:, :each.count] for columns in zip(*found, strict=True)))

    def ends(self, program: Program, variants: ProgramVariants | None, items: Int64,
             kernels: Int64) -> tuple[Int64, Int64]:
        """When some items and kernels end in a program, or in variants of it, ns, [*rows, variants] each."""
        each = ProgramVariants.alone(program) if variants is None else variants
        found = [(one.item_end[items], one.kernel_end[kernels]) for one in self._blocks(program, each)]
        item_end, kernel_end = (np.concatenate(parts, axis=-1)[..., :each.count] for parts in zip(*found, strict=True))
        return item_end, kernel_end

    def _blocks(self, program: Program, each: ProgramVariants) -> Iterator[VariantTimes]:
        """Yield the times of ``LANES`` variants after the other, all in the same arrays; of those beyond the last, the
        last's."""
        p, items, kernels = program, len(program.item_work), len(program.kernel_item)
        floor_of = np.full(items, -1, np.int64)
        floor_of[each.floor_items] = np.arange(len(each.floor_items))
        *columns, left = _WORKSPACE.rows(items, items, kernels, kernels, len(p.queue_kernel))
        found = VariantTimes(*columns)
        for at in range(0, each.count, LANES):
            work, cost, duration, floor = (_lanes(column, at) for column in (each.work, each.cost, each.duration,
                                                                             each.floor))
            inputs = (
                self.nodes, self.opens, p.thread_start, each.item, work, cost, p.item_external, floor_of, floor,
                p.item_queue, p.item_channel, p.after_ptr, p.after_item, p.after_lag, p.wait_ptr, p.wait_kernel,
                p.wait_lag, p.kernel_item, p.kernel_anchor, p.kernel_latency, p.kernel_previous, p.kernel_gap,
                p.kernel_external, each.kernel, duration, p.edge_ptr, p.edge_kernel, p.edge_fraction, p.edge_lag,
                p.kernel_group, p.queue_ptr, p.queue_kernel, p.queue_depth, p.item_return, *self.structure.member,
            )
            retime(*map(np.ascontiguousarray, inputs, retime.dtypes),
                   found.item_start, found.item_end, found.kernel_start, found.kernel_end,
                   np.array(p.queue_ptr[:-1], np.int64), left,
                   np.full(len(p.group_size), -1, np.int64))
            yield found


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
