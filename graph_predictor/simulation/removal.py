"""A program without some of its kernels and calls.

Rows stay where they are, so that every other column of the program keeps its meaning. A kernel that is gone takes no
time and adds none: no latency, no gap, no lag, no rendezvous and no entry of the launch queue. A call that is gone
waits for nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graph_predictor.simulation.program import Program
from graph_predictor.simulation.tape import entries_waited_for
from tracer.arrays import Bool, Int64
from tracer.graph import NONE


def without(program: Program, kernels: Bool, items: Bool) -> Program:
    """Return a program without some kernels and calls. Durations and costs are left to the caller.

    Args:
        program: the program. Columns of its dependencies that do not change are kept as they are (``same_order``).
        kernels: those that are gone.
        items: calls that are gone.
    """
    p = program
    return replace(
        p, kernel_latency=np.where(kernels, 0, p.kernel_latency), kernel_gap=np.where(kernels, 0, p.kernel_gap),
        edge_lag=np.where(np.repeat(kernels, np.diff(p.edge_ptr)), 0, p.edge_lag),
        **_waits(p, items), **_groups(p, kernels), **_queue(p, kernels, items))


def same_order(program: Program, other: Program) -> bool:
    """Return whether a program differs from another one it was made of in times alone."""
    return all(getattr(program, name) is getattr(other, name)
               for name in ("wait_kernel", "kernel_group", "queue_kernel"))


def _waits(p: Program, gone: Bool) -> dict[str, np.ndarray]:
    """Waits of the calls that stay."""
    count = np.diff(p.wait_ptr)
    if not count[gone].any():
        return {}
    kept = np.repeat(~gone, count)
    return {"wait_ptr": _pointer(np.where(gone, 0, count)), "wait_kernel": p.wait_kernel[kept],
            "wait_lag": p.wait_lag[kept]}


def _groups(p: Program, gone: Bool) -> dict[str, np.ndarray]:
    """Rendezvous of the kernels that stay."""
    leaves = gone & (p.kernel_group >= 0)
    if not leaves.any():
        return {}
    fewer = np.bincount(p.kernel_group[leaves], minlength=len(p.group_size))
    return {"kernel_group": np.where(leaves, NONE, p.kernel_group), "group_size": p.group_size - fewer}


def _queue(p: Program, gone: Bool, items: Bool) -> dict[str, np.ndarray]:
    """Launch queues without the entries of kernels that are gone, and without calls that are; as they are where no
    launch waits for room."""
    kept = ~gone[p.queue_kernel]
    if kept.all() or not (entries_waited_for(p) >= 0).any():
        return {}
    before = _pointer(kept)
    first = p.queue_ptr[np.maximum(p.item_channel, 0)]
    there = (p.item_channel >= 0) & (p.item_queue >= 0)
    entry = np.where(there, first + p.item_queue, 0)
    return {"queue_kernel": p.queue_kernel[kept], "queue_ptr": before[p.queue_ptr],
            "item_queue": np.where(there, before[entry] - before[np.where(there, first, 0)], p.item_queue),
            "item_channel": np.where(items, NONE, p.item_channel)}


def _pointer(counts: np.ndarray) -> Int64:
    """Return where each row begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
