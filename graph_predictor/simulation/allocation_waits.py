"""Calls that allocate or free memory and wait for one another: the driver serves one thread at a time.

::

    thread 1      |==== cudaMalloc ====|
    thread 2             |=== waits ===|== own work ==|

Such calls seldom wait, and nothing in a recording says that one did. A wait is claimed only where the rest of the call
is nearer its usual time, by its name, than the whole of it is, and at most half of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.simulation.rank_view import RankView
from tracer.arrays import Bool, Int64
from tracer.graph import NONE, ExecutionGraph

IMPLICIT_SYNCS = ("cudaFree", "hipFree", "hipHostFree", "hipFreeHost")
"""Frees that wait for all work of the device (CUDA programming guide, implicit synchronization; HIP's reference)."""
ALLOCATING = ("cudaMalloc", "cudaMallocHost", "cudaHostAlloc", "cudaFreeHost", "cuMemAlloc_v2", "hipMalloc",
              "hipExtMallocWithFlags", "hipHostMalloc", "hipHostAlloc")
"""Calls that may wait for the device or for another thread's call, and mostly do not."""
RETURNS_WITHIN_NS = 30_000
"""A call that returns at most this long after a kernel's end can have waited for that kernel."""
WAITING_SHARE = 0.5
"""A call waited for at least this share of it, or nothing says so: of 1,460 hipMalloc on an MI300X, with a median of
8 µs, eleven took 30–40 µs, and a kernel ended beside four of those, all in their first 6 µs."""


@dataclass(slots=True)
class AllocationWaits:
    """What calls of several threads that allocate waited for. A row a call of ``launches``."""

    holder: Int64
    """The other thread's call that it waited for, or -1."""
    begins: Int64
    """When its own work began (ns of the window): its start, or the holder's end."""
    usual: dict[int, int]
    """Median duration (ns) of the calls of ``ALLOCATING`` that cannot have waited, by code of their name."""

    def rest_is_usual(self, name: int, whole_ns: int, rest_ns: int) -> bool:
        """Return whether the rest of a call after a wait is nearer (by ratio) its usual time than the whole is."""
        waited = whole_ns - rest_ns >= WAITING_SHARE * whole_ns
        return waited and name in self.usual and whole_ns * rest_ns > self.usual[name] ** 2


def named(graph: ExecutionGraph, names: tuple[str, ...]) -> Bool:
    """Return which calls of ``graph.launches`` have one of these names."""
    code = np.array([text in names for text in graph.strings], np.bool_)
    found: Bool = code[graph.launches.name] if code.any() else np.zeros(len(graph.launches), np.bool_)
    return found


def allocation_waits(view: RankView, taking_part: Bool) -> AllocationWaits:
    """Find the calls that waited for another thread's allocation or free.

    Args:
        view: one rank.
        taking_part: which calls are items of the program; the others decide nothing.

    A call waits for the last one that began before it and ended between its begin and its end.
    """
    calls = view.graph.launches
    found = AllocationWaits(np.full(len(calls), NONE, np.int64), calls.start_ns.copy(), {})
    top = taking_part & (calls.parent == NONE)
    allocating = np.flatnonzero(named(view.graph, ALLOCATING) & top)
    holders = np.flatnonzero(named(view.graph, ALLOCATING + IMPLICIT_SYNCS) & top)
    begin, end, thread = calls.start_ns[holders], view.c_end[holders], calls.thread[holders]
    met: dict[int, Int64] = {}
    for call in allocating.tolist():
        met[call] = np.flatnonzero((begin < calls.start_ns[call]) & (end > calls.start_ns[call])
                                   & (thread != calls.thread[call]))
    alone = np.array([not len(met[call]) for call in allocating.tolist()], np.bool_)
    free = allocating[alone & ~_after_a_kernel(view, allocating)]
    for name in np.unique(calls.name[free]).tolist():
        found.usual[name] = int(np.median(calls.duration_ns[free[calls.name[free] == name]]))
    for call in allocating.tolist():
        before = met[call][end[met[call]] < view.c_end[call]]
        if len(before):
            last = int(before[np.argmax(end[before])])
            rest = int(view.c_end[call] - end[last])
            if found.rest_is_usual(int(calls.name[call]), int(calls.duration_ns[call]), rest):
                found.holder[call], found.begins[call] = holders[last], end[last]
    return found


def _after_a_kernel(view: RankView, call: Int64) -> Bool:
    """Return which calls returned just after a kernel that ended beside them, and not only as they are short."""
    ends = np.sort(view.k_end)
    begin, returned = view.graph.launches.start_ns[call], view.c_end[call]
    recent = np.searchsorted(ends, returned, side="right") > np.searchsorted(
        ends, np.maximum(begin, returned - RETURNS_WITHIN_NS), side="left")
    found: Bool = recent & (returned - begin > RETURNS_WITHIN_NS)
    return found
