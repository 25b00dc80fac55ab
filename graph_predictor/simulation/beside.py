"""What runs beside a collective: of every kernel the share of its time next to one, of every collective the reverse.

::

    computing    |====== kernel ======|      waiting 0.3, transfer 0.4
    collective   ──|~ waits ~|== transfers ==|── computing: 0.5 of its transfer

A collective's kernel that waits for its ranks holds multiprocessors and moves nothing; one that transfers takes memory
bandwidth too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracer.arrays import Bool, Float64, Int8, Int64
from tracer.graph import KernelKind
from tracer.intervals import covered, union


@dataclass(frozen=True, slots=True)
class Beside:
    """Shares of each kernel's time, 0 to 1.

    Attributes:
        transfer, waiting: of computing kernels, beside a collective that transfers, and beside one that only waits.
        computing: of collectives, what of their transfer lies beside computing kernels, on the rank where most does:
            all move at the pace of the slowest.
    """

    transfer: Float64
    waiting: Float64
    computing: Float64


def beside(kernel_ptr: Int64, kind: Int8, start: Int64, end: Int64, transfer_ns: Int64, group: Int64,
           asked: Bool | None = None) -> Beside:
    """Look at all kernels of a job, recorded or simulated.

    Args:
        kernel_ptr: kernels of rank r are rows ``kernel_ptr[r]`` to ``kernel_ptr[r + 1]``.
        kind: a ``KernelKind`` each.
        start, end: ns, on one clock within a rank.
        transfer_ns: of each collective, how long before its end all ranks had arrived.
        group: the rendezvous that each kernel is of, -1 for none.
        asked: kernels whose shares are asked for (of a rendezvous all or none), all by default; others get 0.
    """
    found = Beside(*(np.zeros(len(kind)) for _ in range(3)))
    arrived = np.maximum(end - transfer_ns, start)
    for low, high in zip(kernel_ptr[:-1].tolist(), kernel_ptr[1:].tolist(), strict=True):
        rows = np.arange(low, high)
        own, of = rows[kind[rows] == KernelKind.COMPUTE], rows[kind[rows] == KernelKind.COLLECTIVE]
        if not len(own) or not len(of):
            continue
        some, met_by = (each if asked is None else each[asked[each]] for each in (own, of))
        length = np.maximum(end[some] - start[some], 1)
        found.transfer[some] = covered(union(arrived[of], end[of]), start[some], end[some]) / length
        under_way = covered(union(start[of], end[of]), start[some], end[some]) / length
        found.waiting[some] = under_way - found.transfer[some]
        found.computing[met_by] = covered(union(start[own], end[own]), arrived[met_by], end[met_by]) / np.maximum(
            end[met_by] - arrived[met_by], 1)
    met = np.flatnonzero(group >= 0)
    most = np.zeros(int(group.max(initial=-1)) + 1)
    np.maximum.at(most, group[met], found.computing[met])
    found.computing[met] = most[group[met]]
    return found
