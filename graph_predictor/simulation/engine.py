"""The simulator: a max-plus propagation over a ``Program``.

Host threads are advanced in the order of their simulated time; a kernel's start and end are known as soon as its
launch, its stream's previous kernel, its edges and (for a collective) all members of its rendezvous are. Nothing is
a stored duration of waiting, so every time is a maximum of sums of durations: it can only grow when one grows.
"""

from __future__ import annotations

import numpy as np

from graph_predictor.simulation.engine_loop import Workspace, run
from graph_predictor.simulation.program import Program, Simulated, Structure
from tracer.arrays import Int64
from tracer.errors import ForetraceError
from tracer.machine_code import columns


class SimulationStuck(ForetraceError):
    """The program has a cycle: some item or kernel waits for itself (an error of the builder, or of an edit)."""


def structure_of(program: Program) -> Structure:
    """The structure of a program, for ``simulate``."""
    p, kernels = program, len(program.kernel_item)
    return Structure(*_invert(p.kernel_item, len(p.item_kind)), *_invert(p.kernel_previous, kernels),
                     *_invert(p.edge_kernel, kernels), *_invert(p.kernel_group, len(p.group_size)),
                     np.repeat(np.arange(kernels, dtype=np.int64), np.diff(p.edge_ptr)))


def simulate(program: Program, *, structure: Structure | None = None) -> Simulated:
    """Simulate ``program``.

    Args:
        program: The job.
        structure: of the program, where it is known from one that differs in times only.

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
    """CSR of the rows that point to each target (rows with a negative target are left out)."""
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
