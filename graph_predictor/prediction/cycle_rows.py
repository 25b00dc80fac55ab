"""Rows that copies of a cycle take their times from: nothing of the other recorded steps, each item and kernel once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.repeat import Cycle, Repeated
from graph_predictor.simulation.program import ItemKind, LaunchReference, Program, whole_ns
from graph_predictor.simulation.tape import Rows
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import NONE


@dataclass(frozen=True, slots=True)
class CycleRows:
    """What copies of a cycle are copies of.

    Attributes:
        items: rows of the recorded items.
        begins: which of them begin steps.
        kernels: rows of the recorded kernels; ``recorded`` their lengths, ns.
        own, kernel: recorded lengths of the kernels that differ, ns, and which kernel of the cycle each of them is;
            ``None`` for all in turn.
        rank: of each of ``own``, the rank.
        first: which of ``own`` are of the first copy.
        of: row of each item and kernel of the copies, and of the first items of the copies (``starts``).
        starts: these items.
        fed: copies that their calls feed, by rows of the cycle.
    """

    items: Int64
    begins: Bool
    kernels: Int64
    recorded: Int64
    own: Int64
    kernel: Int64 | None
    rank: Int64
    first: Bool
    of: Rows
    starts: Int64
    fed: FedCopies

    @classmethod
    def make(cls, cycle: Cycle, repeated: Repeated) -> CycleRows:
        """Find them."""
        source, own = cycle.built.program, repeated.program.kernel_duration
        items, kernels = np.flatnonzero(cycle.item), np.flatnonzero(cycle.kernel)
        item, kernel = np.full(len(source.item_kind), NONE), np.full(len(source.kernel_item), NONE)
        item[items], kernel[kernels] = np.arange(len(items)), np.arange(len(kernels))
        recorded, row = source.kernel_duration[kernels], kernel[repeated.kernel]
        starts = np.flatnonzero(np.isin(repeated.item, cycle.first))
        floor = np.full(len(repeated.item), NONE)
        floor[starts] = np.arange(len(starts))
        begins = source.item_kind[items] == ItemKind.STEP_BEGIN
        fed = FedCopies.of(source).within(item, kernel)
        if np.array_equal(own, recorded[row]):  # as nearly always: then all copies of a kernel are as long
            return cls(items, begins, kernels, recorded, recorded, None, source.kernel_rank()[kernels],
                       np.ones(len(kernels), np.bool_), Rows(item[repeated.item], row, floor), starts, fed)
        return cls(items, begins, kernels, recorded, own, row, repeated.program.kernel_rank(),
                   repeated.copy_of_kernel == 0, Rows(item[repeated.item], np.arange(len(own)), floor), starts, fed)

    @property
    def recorded_kernel(self) -> Int64:
        """Return the recorded kernel of each of ``own``."""
        return self.kernels if self.kernel is None else self.kernels[self.kernel]

    def of_cycle(self, rows: Int64) -> Int64:
        """Return which kernels of the cycle some of ``own`` are."""
        return rows if self.kernel is None else self.kernel[rows]

    def durations(self, kernel_ns: Float64) -> Int64:
        """Durations of ``own``, ns, where the kernels of the cycle take ``kernel_ns`` [kernels, variants]."""
        # A ratio, since the recorded duration of a collective whose other members are outside the cycle is another one.
        known = self.recorded > 0
        recorded, own, row = self.recorded[:, None], self.own[:, None], self.kernel
        if known.all():
            ratio = kernel_ns / recorded
            return whole_ns(np.maximum(own * (ratio if row is None else ratio[row]), 0.0))
        factor = np.where(known[:, None], kernel_ns / np.maximum(recorded, 1), 1.0)
        if row is not None:
            factor, known, kernel_ns = factor[row], known[row], kernel_ns[row]
        return whole_ns(np.maximum(np.where(known[:, None], own * factor, kernel_ns), 0.0))


@dataclass(frozen=True, slots=True)
class FedCopies:
    """Copies from pageable memory that calls feed: it is the link that both wait for.

    Attributes:
        kernel, item: the copies, and their calls.
        feeding: ns of each call in which it feeds its copy.
        recorded: ns of the copies.
    """

    kernel: Int64
    item: Int64
    feeding: Int64
    recorded: Int64

    @classmethod
    def of(cls, program: Program) -> FedCopies:
        """Find those of a recorded program."""
        kernel = np.flatnonzero((program.kernel_reference == LaunchReference.STAGED) & (program.kernel_item >= 0))
        kernel = kernel[program.kernel_duration[kernel] > 0]
        item = program.kernel_item[kernel]
        feeding = program.recorded_item_end[item] - np.maximum(program.recorded_kernel_start[kernel],
                                                               program.recorded_item_start[item])
        return cls(kernel, item, np.clip(feeding, 0, program.item_cost[item]), program.kernel_duration[kernel])

    def within(self, item: Int64, kernel: Int64) -> FedCopies:
        """Return those whose item and kernel have a row, by these."""
        inside = (kernel[self.kernel] >= 0) & (item[self.item] >= 0)
        return FedCopies(kernel[self.kernel[inside]], item[self.item[inside]], self.feeding[inside],
                         self.recorded[inside])

    def change(self, kernel_ns: Float64) -> Float64:
        """Return what the calls take more where kernels take ``kernel_ns`` [kernels, variants], [copies, variants]."""
        return self.feeding[:, None] * (kernel_ns[self.kernel] / self.recorded[:, None] - 1.0)

    def changed(self, cost: Int64, change: Float64) -> Int64:
        """Costs of items, ns [variants, items], with such a change."""
        found = cost.copy()
        more = np.broadcast_to(np.rint(change).astype(np.int64).T, (len(found), len(self.item)))
        for own, each in zip(found, more, strict=True):
            np.add.at(own, self.item, each)
        return np.maximum(found, 0)
