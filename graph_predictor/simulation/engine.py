"""The simulator: a max-plus propagation over a ``Program``.

Host threads are advanced in the order of their simulated time; a kernel's start and end are known as soon as its
launch, its stream's previous kernel, its edges and (for a collective) all members of its rendezvous are. Nothing is
a stored duration of waiting, so every time is a maximum of sums of durations: it can only grow when one grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.simulation.engine_loop import run
from graph_predictor.simulation.program import Program
from tracer.arrays import Int8, Int32, Int64
from tracer.errors import ForetraceError


@dataclass(slots=True)
class Simulated:
    """Simulated times (ns) of every item and kernel, and what each was bound by.

    ``item_cause`` is the item, kernel or edge index behind ``item_start_cause`` / ``item_end_cause``;
    ``kernel_ready`` is when a kernel could have started had its rendezvous not waited for others (equal to
    ``kernel_start``); ``group_last`` is the kernel that arrived last at each rendezvous.
    """

    item_start: Int64
    item_end: Int64
    item_start_cause: Int8
    item_start_source: Int64 | Int32
    item_end_cause: Int8
    item_end_source: Int64 | Int32
    kernel_start: Int64
    kernel_end: Int64
    kernel_cause: Int8
    kernel_source: Int64 | Int32
    group_last: Int64 | Int32


class SimulationStuck(ForetraceError):
    """The program has a cycle: some item or kernel waits for itself (an error of the builder, or of an edit)."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The order within a program, whatever anything takes: rows by what they point to, as (pointer, rows) each, and
    the kernel of every edge."""

    launched: tuple[Int64, Int64]
    successor: tuple[Int64, Int64]
    out: tuple[Int64, Int64]
    member: tuple[Int64, Int64]
    owner: Int64


def structure_of(program: Program) -> Structure:
    """The structure of a program, for ``simulate``."""
    p, kernels = program, len(program.kernel_item)
    return Structure(_invert(p.kernel_item, len(p.item_kind)), _invert(p.kernel_previous, kernels),
                     _invert(p.edge_kernel, kernels), _invert(p.kernel_group, len(p.group_size)),
                     np.repeat(np.arange(kernels, dtype=np.int64), np.diff(p.edge_ptr)))


def simulate(program: Program, *, intrinsic: Int64 | None = None, structure: Structure | None = None) -> Simulated:
    """Simulate ``program``.

    Args:
        program: The job.
        intrinsic: For kernels of a rendezvous, ns from the last arrival to the end; default ``kernel_duration``.
        structure: of the program, where it is known from one that differs in times only.

    Raises:
        SimulationStuck: The dependencies have a cycle.
    """
    return simulate_in_order(program, intrinsic=intrinsic, structure=structure)[0]


def simulate_in_order(program: Program, *, intrinsic: Int64 | None = None,
                      structure: Structure | None = None) -> tuple[Simulated, Int64]:
    """Simulate a program as ``simulate`` does; also return the order in which things became known, items by their row
    and kernels by theirs behind all items. Raises as ``simulate``."""
    items, kernels = len(program.item_kind), len(program.kernel_item)
    resolved: Int64 = np.empty(items + kernels, np.int64)
    out = Simulated(
        item_start=np.zeros(items, np.int64), item_end=np.zeros(items, np.int64),
        item_start_cause=np.zeros(items, np.int8), item_start_source=np.full(items, -1, np.int64),
        item_end_cause=np.zeros(items, np.int8), item_end_source=np.full(items, -1, np.int64),
        kernel_start=np.zeros(kernels, np.int64), kernel_end=np.zeros(kernels, np.int64),
        kernel_cause=np.zeros(kernels, np.int8), kernel_source=np.full(kernels, -1, np.int64),
        group_last=np.full(len(program.group_size), -1, np.int64),
    )
    p = program
    known = structure_of(p) if structure is None else structure
    inputs = (
        p.thread_ptr, p.thread_rank, p.thread_start, p.item_work, p.item_cost, p.item_external, p.item_queue,
        p.item_channel,
        p.after_ptr, p.after_item, p.after_lag, p.wait_ptr, p.wait_kernel, p.wait_lag,
        p.kernel_item, p.kernel_reference, p.kernel_latency, p.kernel_previous, p.kernel_gap, p.kernel_duration,
        p.kernel_external, p.edge_ptr, p.edge_kernel, p.edge_fraction, p.edge_lag, p.kernel_group, p.group_size,
        p.queue_ptr, p.queue_kernel, p.queue_depth, p.item_return,
        p.kernel_duration if intrinsic is None else intrinsic,
        *known.launched, *known.successor, *known.out, known.owner, *known.member,
    )
    done = run(
        *map(np.ascontiguousarray, inputs, run.dtypes),
        out.item_start, out.item_end, out.item_start_cause, out.item_start_source, out.item_end_cause,
        out.item_end_source, out.kernel_start, out.kernel_end, out.kernel_cause, out.kernel_source, out.group_last,
        *_workspace(p), resolved,
    )
    if done != items + kernels:
        raise SimulationStuck(
            f"The simulation stopped with {items + kernels - done} of {items + kernels} events left: their "
            "dependencies form a cycle. Report the trace, or undo the last edit."
        )
    return out, resolved


def _invert(target: Int64, size: int) -> tuple[Int64, Int64]:
    """CSR of the rows that point to each target (rows with a negative target are left out)."""
    rows = np.nonzero(target >= 0)[0]
    order = rows[np.argsort(target[rows], kind="stable")]
    ptr = np.zeros(size + 1, np.int64)
    np.cumsum(np.bincount(target[rows], minlength=size), out=ptr[1:])
    return ptr, order.astype(np.int64)


def _workspace(program: Program) -> tuple[np.ndarray, ...]:
    """Return the arrays that ``run`` works in, in the order of its arguments."""
    p = program
    threads, items, kernels = len(p.thread_rank), len(p.item_work), len(p.kernel_item)
    return (
        np.zeros(items, np.bool_), np.zeros(kernels, np.bool_), np.zeros(kernels, np.int64),
        np.array(p.group_size, np.int64),
        # A stack of kernels whose inputs are all known; each enters once.
        np.empty(kernels + 1, np.int64),
        # Threads that can run, ordered by the time of their next item. Keys and threads move together in the heap.
        np.empty(threads + 1, np.int64), np.empty(threads + 1, np.int64),
        np.array(p.thread_ptr[:-1], np.int64), np.array(p.thread_start, np.int64),
        # A parked thread waits for one item or one kernel; chains by array links.
        np.full(items, -1, np.int64), np.full(kernels, -1, np.int64), np.full(threads, -1, np.int64),
        np.empty(threads, np.int64),
        # Launch queue of each channel: entries up to ``queue_at`` are settled, and leave in order: each together with
        # ``left_by``, the last to end of those up to it.
        np.array(p.queue_ptr[:-1], np.int64), np.full(len(p.queue_kernel), -1, np.int64),
    )
