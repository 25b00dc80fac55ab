"""The times of a program whose like was simulated before: the same dependencies, other durations, many at once.

In which order things can be worked out depends on what waits for what, not on how long anything takes. The order that
the simulator found for one program is good for all that differ in times alone, and along it every time is a maximum of
sums of earlier ones: no thread waits its turn, and what waits for what is looked up once for all variants. What bound
what is not found; times are those of ``simulate`` to the nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.simulation.engine import Structure
from graph_predictor.simulation.program import Program
from graph_predictor.simulation.retiming_loop import retime
from tracer.arrays import Int64


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
        p, items, kernels = program, len(program.item_work), len(program.kernel_item)
        each = ProgramVariants.alone(p) if variants is None else variants
        count = each.work.shape[1]
        found = VariantTimes(*(np.empty((size, count), np.int64) for size in (items, items, kernels, kernels)))
        floor_of = np.full(items, -1, np.int64)
        floor_of[each.floor_items] = np.arange(len(each.floor_items))
        inputs = (
            self.nodes, self.opens, p.thread_start, each.item, each.work, each.cost, p.item_external, floor_of,
            each.floor, p.item_queue, p.item_channel, p.after_ptr, p.after_item, p.after_lag, p.wait_ptr, p.wait_kernel,
            p.wait_lag, p.kernel_item, p.kernel_anchor, p.kernel_latency, p.kernel_previous, p.kernel_gap,
            p.kernel_external, each.kernel, each.duration, p.edge_ptr, p.edge_kernel, p.edge_fraction, p.edge_lag,
            p.kernel_group, p.queue_ptr, p.queue_kernel, p.queue_depth, p.item_return, *self.structure.member,
        )
        retime(*map(np.ascontiguousarray, inputs, retime.dtypes),
               found.item_start, found.item_end, found.kernel_start, found.kernel_end,
               np.array(p.queue_ptr[:-1], np.int64), np.empty((len(p.queue_kernel), count), np.int64),
               np.full(len(p.group_size), -1, np.int64))
        return found
