"""Thousands of ranks that meet in collectives: rendezvous alone, without kernels, launches or host threads.

A *lane* is one in-order queue of a rank (its communication stream, say). Its *entries* are the collectives it takes
part in, in order, each with the work that comes before it::

    lane 0 (rank 0)  ──work──[ A ]──────work──────[ B ]──
    lane 1 (rank 1)  ─────work─────[ A ]──work──[ C ]────
                                   │ A starts when its last member arrives, and ends for all at once

Every entry is looked at once, so time and memory grow with the memberships of all groups together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graph_predictor.simulation.engine import SimulationStuck
from kernel_models.collectives import CommError
from tracer.arrays import Int32, Int64


@dataclass(slots=True)
class GroupJob:
    """Lanes and their entries (CSR). ``entry_work`` is ns before the entry since the one before in its lane."""

    lane_ptr: Int64
    entry_collective: Int32
    entry_work: Int64
    collectives: int

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self.lane_ptr) - 1


@dataclass(slots=True)
class GroupTimes:
    """Simulated times, ns. ``start`` of a collective is its last member's arrival, ``last`` that member's lane;
    ``lane_end`` is when a lane is done, ``lane_waited`` what it waited for others."""

    start: Int64
    end: Int64
    last: Int64
    lane_end: Int64
    lane_waited: Int64

    @property
    def step_ns(self) -> int:
        """When the last lane is done."""
        return int(self.lane_end.max(initial=0))


def job_of_groups(members: Sequence[npt.ArrayLike], lanes: int, work_ns: int | npt.ArrayLike = 0) -> GroupJob:
    """A job in which every lane does its collectives in the order they are listed.

    Args:
        members: Of each collective the lanes it joins, each once.
        lanes: Number of lanes.
        work_ns: Work before each entry: one for all, or one a collective.
    """
    arrays = [np.asarray(m, np.int64) for m in members]
    sizes = np.array([len(m) for m in arrays], np.int64)
    lane = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
    if (sizes == 0).any() or (len(lane) and (lane.min() < 0 or lane.max() >= lanes)):
        raise CommError(f"Each collective needs a member, and members are lanes from 0 to {lanes - 1}.")
    collective = np.repeat(np.arange(len(arrays), dtype=np.int32), sizes)
    order = np.argsort(lane, kind="stable")
    ptr = np.zeros(lanes + 1, np.int64)
    np.cumsum(np.bincount(lane, minlength=lanes), out=ptr[1:])
    work = np.broadcast_to(np.asarray(work_ns, np.int64), (len(arrays),))
    entries = collective[order]
    return GroupJob(ptr, entries, work[entries], len(arrays))


def simulate_groups(job: GroupJob, duration_ns: npt.ArrayLike) -> GroupTimes:
    """Simulate a job.

    Args:
        job: Lanes and entries.
        duration_ns: [collectives] from the last arrival to the end.

    Raises:
        SimulationStuck: Two groups wait for each other: some lanes do their collectives in opposite orders.
    """
    # Compiled with numba, whose import costs more than starting the command line may.
    from graph_predictor.comm.job_loop import run_groups

    duration = np.ascontiguousarray(np.broadcast_to(np.asarray(duration_ns, np.int64), (job.collectives,)))
    out = GroupTimes(*(np.zeros(n, np.int64) for n in (job.collectives, job.collectives, job.collectives, job.lanes,
                                                       job.lanes)))
    out.last.fill(-1)
    left = run_groups(job.lane_ptr, job.entry_collective, job.entry_work, duration, out.start, out.end, out.last,
                      out.lane_end, out.lane_waited)
    if left:
        raise SimulationStuck(f"{left} collectives never start: some ranks do them in opposite orders, which would "
                              "hang a real job too.")
    return out


def mesh_groups(sizes: Mapping[str, int]) -> dict[str, list[Int64]]:
    """Ranks of every group of a mesh, by dimension; the first named varies fastest (usually the tensor-parallel one).

    ``mesh_groups({"tp": 8, "dp": 4})`` has four groups "tp" of eight neighbours and eight groups "dp" of every eighth.
    """
    names = list(sizes)
    shape = [sizes[name] for name in reversed(names)]
    ranks = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    found = {}
    for axis, name in enumerate(reversed(names)):
        found[name] = list(np.moveaxis(ranks, axis, -1).reshape(-1, sizes[name]))
    return {name: found[name] for name in names}
