"""``Backends``: which of several backends does a collective, and what that costs (MCR-DL, Anthony et al., IPDPS 2023).

A cluster's backends are what its profile has measurements of: NCCL, the kernels of serving engines, NVSHMEM, UCC, MPI,
gloo. Without measurements they are NCCL's algorithms and protocols and the hierarchical all-reduce, by formula. One
of them, the ``base``, does what no other does faster; each collective that another one does pays for the way there and
back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from kernel_models.collectives.call import CollectiveBatch, CommError
from kernel_models.collectives.datasheet import DatasheetModel, algorithm_label
from kernel_models.collectives.nccl_constants import Algorithm, Protocol
from kernel_models.collectives.profile import DEFAULT_BACKEND, CommProfile
from kernel_models.collectives.times import CommTimes, Level
from kernel_models.collectives.topology import Topology
from tracer.arrays import Bool, Float64, Int64

CROSSING_US = 2.1
"""Handing a stream's order from one backend to another: an event recorded (1.0 µs) and waited for (1.05 µs), medians
of ``cudaEventRecordWithFlags`` and ``cudaStreamWaitEvent`` of PyTorch on eight H100 (nanogpt-8xH100, ranks 0 and 1)."""
SWITCH_US = 2 * CROSSING_US
"""A collective by another backend than the base: there and back. An upper end: backends on one stream, and two
collectives of one backend after each other, need none."""
PINNED = {f"{a.label}/{p.label}": (a, p) for a, p in product(Algorithm, Protocol)}
"""NCCL's algorithms and protocols, as backends."""


def usual_backend(on: Topology) -> str:
    """Return whose collectives a data sheet's formulas are: gloo's on a host, else NCCL's."""
    return "gloo" if on.node.link == "loopback" else DEFAULT_BACKEND


@dataclass(frozen=True)
class BackendChoices:
    """Who does each of n collectives.

    Attributes:
        names: of b backends, the base first.
        by_name: times of each [n]; ``Level.UNKNOWN`` where a backend cannot do it or nobody measured it.
        winner: row of ``names`` [n].
        times: of the winners, with the switch of those that are not the base [n].
    """

    names: tuple[str, ...]
    by_name: tuple[CommTimes, ...]
    winner: Int64
    times: CommTimes

    @cached_property
    def table_us(self) -> Float64:
        """Times [b, n], NaN where a backend is not known to do it."""
        return np.stack([np.where(each.level == int(Level.UNKNOWN), np.nan, each.time_us) for each in self.by_name])

    @cached_property
    def sure(self) -> Bool:
        """Return whether each winner leads every other backend by more than the two are known to: their 80%
        intervals in
        quadrature, as logarithms [n]. One that launches nothing is sure."""
        lead = np.full(self.table_us.shape, np.inf)
        own = self.table_us[self.winner, np.arange(len(self.winner))]
        up = _log_ratio(self.times.high_us, self.times.time_us)
        for row, each in enumerate(self.by_name):
            down = _log_ratio(each.time_us, each.low_us)
            other = (self.winner != row) & np.isfinite(self.table_us[row]) & (own > 0) & (each.time_us != own)
            lead[row, other] = (_log_ratio(each.time_us, own) - np.hypot(up, down))[other]
        return np.asarray((lead > 0).all(axis=0), np.bool_)

    def of_nccl(self, winner: int) -> bool:
        """Return whether a backend is NCCL, of any algorithm, and not another library."""
        name = self.names[winner]
        return name in PINNED or DEFAULT_BACKEND in name.lower()

    def label(self, row: int) -> str:
        """Return who does a collective, with the algorithm where a formula says it, such as "nccl (ring/LL)"."""
        name, code = self.names[self.winner[row]], int(self.times.algorithm[row])
        how = algorithm_label(code)
        return f"{name} ({how})" if how and how != name else name


@dataclass(frozen=True)
class Backends:
    """The backends of a cluster.

    Attributes:
        topology: the cluster.
        profile: measurements of its backends; without any, backends are NCCL's algorithms by formula.
        base: who does what no other does faster; by default whoever makes a step's collectives fastest.
        switch_us: what a collective by another backend costs besides.

    Raises:
        CommError: there is no such base.
    """

    topology: Topology
    profile: CommProfile
    base: str | None = None
    switch_us: float = SWITCH_US

    def __post_init__(self) -> None:
        if self.base is not None and self.base not in self._known():
            raise CommError(f"There is no backend {self.base!r} to choose; there are {', '.join(self._known())}.")

    def _known(self) -> list[str]:
        measured = self.profile.backend_names()
        return measured or [usual_backend(self.topology), *PINNED]

    @property
    def usual(self) -> str:
        """Return who does a collective that nobody was measured for: the base, else NCCL or the first."""
        known = self._known()
        return self.base or (DEFAULT_BACKEND if DEFAULT_BACKEND in known else known[0])

    def choose(self, batch: CollectiveBatch, counts: Float64 | None = None) -> BackendChoices:
        """Return who does each collective: the fastest, another than the base only if it gains more than the switch.

        A measured backend does what it was measured for, in its own or a neighbouring group, and the usual one also
        the rest. Where no base is named, it is the one of those that can do all with which all together are fastest.

        Args:
            batch: the collectives of a step.
            counts: how often each is done [n]; once by default.
        """
        names = [self.usual, *(name for name in self._known() if name != self.usual)]
        by_name = [self._times(name, batch, usual=row == 0) for row, name in enumerate(names)]
        cost = np.stack([np.where(each.level == int(Level.UNKNOWN), np.inf, each.time_us) for each in by_name])
        base = 0
        if self.base is None and len(batch):
            able = np.isfinite(cost).all(axis=1)
            together = np.minimum(cost[able], cost.min(axis=0) + self.switch_us)
            base = int(np.flatnonzero(able)[(together @ (np.ones(len(batch)) if counts is None else counts)).argmin()])
        order = [base, *(row for row in range(len(names)) if row != base)]
        cost = cost[order] + self.switch_us * (np.arange(len(names)) > 0)[:, None]
        by_name, winner = [by_name[row] for row in order], cost.argmin(axis=0).astype(np.int64)
        times = by_name[0].take(np.arange(len(batch)))
        for row, each in enumerate(by_name[1:], start=1):
            mine = winner == row
            if mine.any():
                taken = each.take(mine)
                for name in ("time_us", "low_us", "high_us"):
                    getattr(taken, name)[:] += self.switch_us
                times.put(mine, taken)
        return BackendChoices(tuple(names[row] for row in order), tuple(by_name), winner, times)

    def _times(self, name: str, batch: CollectiveBatch, *, usual: bool) -> CommTimes:
        """Return what a backend takes; of the usual one the best that is known, of others nothing that was not
        measured."""
        if name in PINNED and name not in self.profile.backends:
            times = DatasheetModel(self.topology, *PINNED[name]).predict(batch)
            if not usual:
                return times
            rest = times.level == int(Level.UNKNOWN)
            times.put(rest, self.profile.predict(batch, on=self.topology).take(rest))
            return times
        measured = name if name in self.profile.backends else None
        times = self.profile.predict(batch, measured, on=self.topology)
        if not usual and measured is not None:
            times.level[(times.level >= int(Level.FITTED))] = int(Level.UNKNOWN)
        return times



def _log_ratio(above: Float64, below: Float64) -> Float64:
    """Log of a ratio of times; 0 where either is none."""
    some = (above > 0) & (below > 0)
    found: Float64 = np.log(np.where(some, above, 1.0) / np.where(some, below, 1.0))
    return found
