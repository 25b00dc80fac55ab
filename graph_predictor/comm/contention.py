"""How much computation and collectives slow each other down, fitted to a recording's own instances.

The same kernel (name, launch and sizes) sometimes overlaps a collective and sometimes runs alone, on any rank. Its
slow-down is the logarithm of its longer time over its time alone, divided by the share of its time that overlapped.
Collectives of one kind, size and group are fitted in the same way. Different kernels are never compared. A kernel that
lacks one of the two kinds of instances takes the median slow-down of the kernels that have both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from graph_predictor.simulation.build import Built, build_program, kernel_kinds
from kernel_models.collectives.recorded import kind_of
from kernel_models.spreads import END
from tracer.arrays import Bool, Float64, Int8, Int32, Int64
from tracer.columns import covered
from tracer.graph import NONE, ExecutionGraph, KernelKind


@dataclass(frozen=True, slots=True)
class Overlapping:
    """Shares of each kernel's time that overlap other work, 0 to 1, one row for each kernel.

    Attributes:
        transfer, waiting: for computing kernels, the share that overlaps a collective while it transfers or only waits.
        computing: for collectives, the share of their transfer that overlaps computing kernels, on the rank where it is
            greatest, because the slowest rank holds up all others.
    """

    transfer: Float64
    waiting: Float64
    computing: Float64


@dataclass(frozen=True)
class OverlappingKernels:
    """Rows of the kernels whose overlap is wanted, and of the kernels that may overlap them. They hold for any times.

    Attributes:
        size: the number of kernels.
        ranks: for each rank with computing kernels and collectives, four arrays of rows: all computing kernels, the
            requested ones, all collectives, the requested ones.
        met, group: rows of the kernels that take part in a rendezvous, and the rendezvous' numbers.
    """

    size: int
    ranks: list[tuple[Int64, Int64, Int64, Int64]]
    met: Int64
    group: Int64

    @classmethod
    def of(cls, kernel_ptr: Int64, kind: Int8, group: Int64, asked: Bool | None = None) -> OverlappingKernels:
        """Find the rows of computing kernels and collectives of each rank.

        Args:
            kernel_ptr: kernels of rank r are rows ``kernel_ptr[r]`` to ``kernel_ptr[r + 1]``.
            kind: ``KernelKind`` of each kernel.
            group: rendezvous of each kernel, -1 for none.
            asked: mask of kernels to compute shares for (all or none of a rendezvous); by default all. Others get 0.
        """
        ranks = []
        for low, high in pairwise(kernel_ptr.tolist()):
            own, of = (low + np.flatnonzero(kind[low:high] == each) for each in (
                KernelKind.COMPUTE, KernelKind.COLLECTIVE))
            some, met_by = (each if asked is None else each[asked[each]] for each in (own, of))
            if len(own) and len(of):
                ranks.append((own, some, of, met_by))
        met = np.flatnonzero(group >= 0)
        return cls(len(kind), ranks, met, group[met])

    def shares(self, start: Int64, end: Int64, transfer_ns: Int64) -> Overlapping:
        """Return the shares of overlap. ``start`` and ``end`` of all kernels, recorded or simulated, are ns on one
        clock within a rank; ``transfer_ns`` is the time between a collective's last arrival and its end."""
        found = Overlapping(*(np.zeros(self.size) for _ in range(3)))
        for own, some, of, met_by in self.ranks:
            arrived, until = np.maximum(end[of] - transfer_ns[of], start[of]), end[of]
            begin, stop = start[some], end[some]
            length = np.maximum(stop - begin, 1)
            transfer = covered((arrived, until), begin, stop) / length
            found.transfer[some] = transfer
            found.waiting[some] = covered((start[of], until), begin, stop) / length - transfer
            stop = end[met_by]
            begin = np.maximum(stop - transfer_ns[met_by], start[met_by])
            found.computing[met_by] = covered((start[own], end[own]), begin, stop) / np.maximum(stop - begin, 1)
        most = np.zeros(int(self.group.max(initial=-1)) + 1)
        np.maximum.at(most, self.group, found.computing[self.met])
        found.computing[self.met] = most[self.group]
        return found


ALONE = 0.02
"""Largest share of overlap at which a kernel counts as running alone."""
MOSTLY = 0.5
"""Least share of overlap with one kind of work that is fitted; the share of the other kind must be under half of it."""
LEAST_ALONE, LEAST_BESIDE = 3, 2
"""Least number of instances of one kernel alone, and overlapping other work."""
LEAST_KERNELS = 5
"""Least number of kernels with both kinds of instances whose median the other kernels take."""
SHORTEST_NS, SHORTEST_TRANSFER_NS = 4_000.0, 50_000.0
"""Shorter kernels are not fitted: older traces round to 1 µs. Shorter transfers are dominated by latency."""
LAUNCH = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "registers", "shared_bytes")
"""Columns of a kernel's launch."""
MOST = np.log(4.0)
"""Greatest logarithm of a slow-down: more than a factor of four has another cause than overlap."""


@dataclass(frozen=True, slots=True)
class SlowDown:
    """How much one kind of work slows down where it overlaps another.

    Attributes:
        kernels: number of different kernels that were seen both alone and overlapping.
        instances: number of their overlapping instances.
        middle: median of the kernels' log slow-downs at full overlap; 0 where too few were seen.
        spread: log half width of the 80% interval of a single kernel's slow-down around the median.
    """

    kernels: int
    instances: int
    middle: float
    spread: float

    @property
    def factor(self) -> float:
        """Return the median slow-down."""
        return float(np.exp(self.middle))

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 80% interval of one kernel's slow-down factor; its lower end is at least 1."""
        return float(np.exp(max(self.middle - self.spread, 0.0))), float(np.exp(self.middle + self.spread))

    @property
    def known(self) -> bool:
        """Return whether enough kernels were seen both alone and overlapping."""
        return self.kernels >= LEAST_KERNELS

    def to_json(self) -> dict[str, Any]:
        """Return the slow-down as plain values."""
        low, high = self.interval
        return {"factor": self.factor if self.known else None, "factor_80": [low, high] if self.known else None,
                "kernels": self.kernels, "instances": self.instances}


@dataclass(frozen=True, slots=True)
class Contention:
    """The slow-downs of a recorded job.

    Attributes:
        transfer, waiting: slow-downs of computing kernels that overlap a collective's transfer, or its waiting.
        computing: slow-down of collectives' transfers that overlap computing kernels.
        of_transfer, of_waiting, of_computing: the log slow-down of each kernel of the job at full overlap.
    """

    transfer: SlowDown
    waiting: SlowDown
    computing: SlowDown
    of_transfer: Float64
    of_waiting: Float64
    of_computing: Float64

    @property
    def known(self) -> bool:
        """Return whether any slow-down is known."""
        return bool(self.of_transfer.any() or self.of_waiting.any() or self.of_computing.any())

    def log_factor(self, shares: Overlapping) -> Float64:
        """Return the logarithm of each kernel's time at these shares of overlap over its time alone."""
        found: Float64 = (self.of_transfer * shares.transfer + self.of_waiting * shares.waiting
                          + self.of_computing * shares.computing)
        return found


def contention(built: Built) -> Contention:
    """Fit the slow-downs of a recorded job's kernels."""
    program = built.program
    kind = kernel_kinds(built.graphs)
    transfer_ns = recorded_transfers(built)
    shares = OverlappingKernels.of(program.kernel_ptr, kind, program.kernel_group).shares(
        program.recorded_kernel_start, program.recorded_kernel_end, transfer_ns)
    own = kind == KernelKind.COMPUTE
    recorded = program.recorded_kernel_end - program.recorded_kernel_start
    logs = np.log(np.maximum(np.where(own, recorded, transfer_ns), 1))
    # One kernel of each collective is enough: all its ranks have the same transfer. If only one rank recorded the
    # collective, its transfer is unknown.
    _, first = np.unique(program.kernel_group, return_index=True)
    collective = np.zeros(len(kind), np.bool_)
    collective[first[program.kernel_group[first] >= 0]] = True
    return fitted(kernel_identities(built.graphs), own, logs, shares, own | collective)


def contention_of(graphs: Sequence[ExecutionGraph]) -> dict[str, SlowDown]:
    """Return the slow-downs of a recorded job, by a phrase that names both kinds of work; empty without collectives."""
    if not any((graph.kernels.kind == KernelKind.COLLECTIVE).any() for graph in graphs):
        return {}
    found = contention(build_program(list(graphs)))
    return {"kernels beside a transfer": found.transfer, "kernels beside a collective that waits": found.waiting,
            "transfers beside kernels": found.computing}


def fitted(code: Int64, own: Bool, logs: Float64, shares: Overlapping, used: Bool) -> Contention:
    """Fit slow-downs to the ``used`` instances. ``code`` is the number (from 0) of the kernel that each is an instance
    of; ``own`` states whether it computes (a used instance that does not is a collective); ``logs`` is the logarithm of
    its time in ns."""
    alone = np.where(own, shares.transfer + shares.waiting, shares.computing) <= ALONE
    own_used, collective = used & own, used & ~own
    beside_transfer = own_used & (shares.transfer >= MOSTLY) & (shares.waiting < MOSTLY / 2)
    beside_waiting = own_used & (shares.waiting >= MOSTLY) & (shares.transfer < MOSTLY / 2)
    computing = collective & (shares.computing >= MOSTLY / 2)
    transfer, of_transfer = _slow_downs(code, logs, own_used & alone, beside_transfer, shares.transfer, SHORTEST_NS)
    waiting, of_waiting = _slow_downs(code, logs, own_used & alone, beside_waiting, shares.waiting, SHORTEST_NS)
    of_collectives, of_computing = _slow_downs(code, logs, collective & alone, computing, shares.computing,
                                               SHORTEST_TRANSFER_NS)
    return Contention(transfer, waiting, of_collectives, np.where(own, of_transfer, 0.0),
                      np.where(own, of_waiting, 0.0), np.where(own, 0.0, of_computing))


def _slow_downs(code: Int64, logs: Float64, alone: Bool, beside_it: Bool, share: Float64,
                shortest_ns: float) -> tuple[SlowDown, Float64]:
    """Return the median slow-down, and the log slow-down at full overlap of each instance's kernel."""
    by_kernel: dict[int, tuple[list[float], list[tuple[float, float]]]] = defaultdict(lambda: ([], []))
    for row in np.flatnonzero(alone).tolist():
        by_kernel[int(code[row])][0].append(float(logs[row]))
    for row in np.flatnonzero(beside_it).tolist():
        by_kernel[int(code[row])][1].append((float(logs[row]), float(share[row])))
    own: dict[int, float] = {}
    instances = 0
    for kernel, (lone, others) in by_kernel.items():
        if len(lone) < LEAST_ALONE or len(others) < LEAST_BESIDE or np.median(lone) < np.log(shortest_ns):
            continue
        usual = float(np.median(lone))
        slope = float(np.median([(value - usual) / part for value, part in others]))
        own[kernel] = min(max(slope, 0.0), MOST)
        instances += len(others)
    values = np.array(list(own.values()))
    known = len(values) >= LEAST_KERNELS
    middle = float(np.median(values)) if known else 0.0
    spread = END * float(np.sqrt(np.mean((values - middle) ** 2))) if known else 0.0
    table = np.full(int(code.max(initial=0)) + 1, middle)
    for kernel, value in own.items():
        table[kernel] = value
    return SlowDown(len(values), instances, middle, spread), table[code] if len(code) else np.zeros(0)


def recorded_transfers(built: Built) -> Int64:
    """Return the transfer time of each collective kernel, ns; its whole time where other ranks were not recorded."""
    program = built.program
    found = (program.recorded_kernel_end - program.recorded_kernel_start).copy()
    for members, transfer in zip(built.rendezvous.groups, built.rendezvous.intrinsic_ns, strict=True):
        for position, kernel in members:
            found[int(program.kernel_ptr[position]) + kernel] = transfer
    return found


def kernel_identities(graphs: Sequence[ExecutionGraph]) -> Int64:
    """Return a number for each kernel of a job. Kernels of one number have the same name, launch and operation sizes,
    or are collectives of the same kind, elements and group size."""
    texts: dict[str, int] = {"": 0}
    rows = []
    for graph in graphs:
        kernels, ops, table = graph.kernels, graph.ops, graph.collectives
        shapes = np.where(kernels.op >= 0, np.append(ops.shapes, NONE)[kernels.op], NONE)
        moved = np.full((len(kernels), 4), NONE, np.int64)
        found = np.flatnonzero(table.kernel >= 0)
        kinds = [kind_of(graph, table, row) for row in found.tolist()]
        moved[table.kernel[found]] = np.stack([
            np.array([NONE if kind is None else int(kind) for kind in kinds], np.int64), table.elements_in[found],
            table.elements_out[found], table.group_size[found]], axis=1)
        rows.append(np.column_stack([
            _texts(graph, kernels.name, texts), _texts(graph, shapes, texts),
            *(getattr(kernels, name) for name in LAUNCH), moved]).astype(np.int64))
    if not rows:
        return np.zeros(0, np.int64)
    _, code = np.unique(np.concatenate(rows), axis=0, return_inverse=True)
    return code.reshape(-1).astype(np.int64)


def _texts(graph: ExecutionGraph, strings: Int32 | Int64, numbers: dict[str, int]) -> Int64:
    """Return numbers of texts; equal texts of all graphs have equal numbers, no text has 0."""
    of, where = np.unique(strings, return_inverse=True)
    known = [numbers.setdefault(graph.string(int(each)) if each >= 0 else "", len(numbers)) for each in of]
    return np.array(known, np.int64)[where.reshape(-1)] if len(of) else np.zeros(0, np.int64)
