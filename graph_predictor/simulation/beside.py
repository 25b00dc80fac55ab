"""What runs beside a collective: of every kernel the share of its time next to one, of every collective the reverse.

::

    computing    |====== kernel ======|      waiting 0.3, transfer 0.4
    collective   ──|~ waits ~|== transfers ==|── computing: 0.5 of its transfer

A collective's kernel that waits for its ranks holds multiprocessors and moves nothing; one that transfers takes memory
bandwidth too.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tracer.arrays import Bool, Float64, Int8, Int64
from tracer.columns import covered
from tracer.graph import KernelKind


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


@dataclass(frozen=True)
class KernelsBeside:
    """The kernels of a job whose shares are asked for, and those they are looked for beside: found once for all times.

    Attributes:
        size: the number of kernels.
        ranks: of each rank that has both, the rows of all that compute and of those asked for, and of all collectives
            and of those asked for.
        met: rows of kernels of a rendezvous, and ``group`` its number.
    """

    size: int
    ranks: list[tuple[Int64, Int64, Int64, Int64]]
    met: Int64
    group: Int64

    @classmethod
    def of(cls, kernel_ptr: Int64, kind: Int8, group: Int64, asked: Bool | None = None) -> KernelsBeside:
        """Find them.

        Args:
            kernel_ptr: kernels of rank r are rows ``kernel_ptr[r]`` to ``kernel_ptr[r + 1]``.
            kind: a ``KernelKind`` each.
            group: the rendezvous that each kernel is of, -1 for none.
            asked: kernels whose shares are asked for (of a rendezvous all or none), all by default; others get 0.
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

    def shares(self, start: Int64, end: Int64, transfer_ns: Int64) -> Beside:
        """Look at all kernels, recorded or simulated.

        Args:
            start, end: ns, on one clock within a rank.
            transfer_ns: of each collective, how long before its end all ranks had arrived.
        """
        found = Beside(*(np.zeros(self.size) for _ in range(3)))
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
