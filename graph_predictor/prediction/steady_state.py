"""The steady state of a repeated step: copies back to back whose period no longer changes from one to the next.

In a periodic program the limiting resource runs at the job's period: host threads, or a stream of the GPU. This is so
even while the host still runs ahead and fills the launch queue. So the period is the largest difference between two
copies over all threads and streams. It is found before the queues are full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graph_predictor.comm.contention import Overlapping, OverlappingKernels
from graph_predictor.figures import signed_percent
from graph_predictor.prediction.edited_repeats import EditedRepeats, KernelRows
from graph_predictor.prediction.pricing import KernelTimes
from graph_predictor.prediction.repeat import Cycle, Repeated, repeat
from graph_predictor.simulation.engine import simulate
from graph_predictor.simulation.program import Program, Simulated
from kernel_models.op_call import Source
from kernel_models.spreads import CONTENTION
from tracer.arrays import Float64, Int8, Int64
from tracer.errors import ForetraceError
from tracer.graph import KernelKind

if TYPE_CHECKING:
    from graph_predictor.comm.contention import Contention


FIRST_COPIES = 4
"""Least number of copies: two periods take three copies, after a first copy that has no copy before it."""
MOST_COPIES = 64
MOST_EVENTS = 4_000_000
"""Most copies, and most items and kernels in them. If the period still changes then, a prediction reports that."""
SAME = 1e-4
"""Two consecutive periods that differ by no more than this share are the steady state."""


@dataclass(frozen=True, slots=True)
class Periods:
    """The time from one copy of a cycle to the next, for each rank.

    Attributes:
        period_ns: period of a cycle, by rank.
        at: ("item" or "kernel", row) of the last copy's event that sets each rank's period.
        stop_ns: the time of the same event one copy earlier, by rank.
        reached: whether two consecutive periods agree.
    """

    period_ns: Int64
    at: list[tuple[str, int]]
    stop_ns: Int64
    reached: bool

    @classmethod
    def of(cls, repeated: Repeated, simulated: Simulated) -> Periods:
        """Return the time between the last two copies."""
        times = np.concatenate([simulated.item_end[repeated.end], simulated.kernel_end[repeated.tail]])
        period = times[:, -1] - times[:, -2]
        before = times[:, -2] - times[:, -3]
        at: list[tuple[str, int]] = []
        found, stop = np.zeros(len(repeated.end), np.int64), np.zeros(len(repeated.end), np.int64)
        reached = True
        for number, mine in enumerate(repeated.shared.once("ends", (), lambda: _ends_of_ranks(repeated))):
            best = int(mine[np.argmax(period[mine])])
            is_item = best < len(repeated.end)
            at.append(("item", int(repeated.end[best, -1])) if is_item
                      else ("kernel", int(repeated.tail[best - len(repeated.end), -1])))
            found[number], stop[number] = period[best], times[best, -2]
            reached &= bool(abs(int(before[mine].max()) - found[number]) <= SAME * max(int(found[number]), 1))
        return cls(found, at, stop, reached)


def _ends_of_ranks(repeated: Repeated) -> list[Int64]:
    """Return each rank's rows in the table of its steps' ends, followed by those of the streams' ends."""
    rank = np.concatenate([np.arange(len(repeated.end)), repeated.tail_rank])
    return [np.flatnonzero(rank == number) for number in range(len(repeated.end))]


@dataclass(frozen=True)
class Steady:
    """Copies of a cycle in their steady state, or in the nearest state that was reached.

    Attributes:
        copies: the copies with edits.
        kernels: durations of their kernels.
        simulated: simulated times of the copies.
        periods: periods of the copies.
    """

    copies: EditedRepeats
    kernels: KernelRows
    simulated: Simulated
    periods: Periods

    @property
    def repeated(self) -> Repeated:
        """Return the copies as recorded."""
        return self.copies.repeated

    @cached_property
    def program(self) -> Program:
        """Return the copies as simulated, with edited durations."""
        return self.copies.program(self.kernels)

    @property
    def kernel_duration(self) -> Int64:
        """Return the durations of the copies' kernels, ns."""
        return self.kernels.duration[:, 0][self.copies.rows.of.kernel]

    @property
    def period_ns(self) -> Int64:
        """Return the period of a cycle, by rank."""
        return self.periods.period_ns


def steady_state(cycle: Cycle, edit: Callable[[Repeated], tuple[EditedRepeats, KernelRows]], *,
                 once: bool = False) -> Steady:
    """Repeat a cycle until its period no longer changes (or ``MOST_COPIES``).

    Args:
        cycle: the steps to repeat.
        edit: puts the edits into copies.
        once: no other prediction will use these copies, so that a shared order of computation is not made.

    Raises:
        ForetraceError: the cycle is empty, so that it cannot be repeated.
    """
    copies, size = FIRST_COPIES, int(cycle.item.sum() + cycle.kernel.sum())
    if not cycle.item.any():
        raise ForetraceError("Nothing happens in the chosen step (its marker has no length, or no call lies in it), so "
                             "that it cannot be repeated; choose another with --step.")
    while True:
        edited, kernels = edit(repeat(cycle, copies))
        simulated = (simulate(edited.program(kernels), structure=edited.structure) if once
                     else edited.simulated(kernels))
        periods = Periods.of(edited.repeated, simulated)
        if periods.reached or 2 * copies > MOST_COPIES or 2 * copies * size > MOST_EVENTS:
            return Steady(edited, kernels, simulated, periods)
        copies *= 2


NOTHING = 1e-4
"""Largest change of device time, as a share of the step, that is not simulated again."""
TOLD = 0.01
"""Least change (log) of a kernel's time at which its source is no longer *measured*."""


def steady_shares(steady: Steady, kinds: Int8) -> Overlapping:
    """Return each recorded kernel's shares of overlap in a copy between two copies; 0 outside the cycle."""
    repeated, simulated = steady.repeated, steady.simulated
    program = repeated.program

    def asked() -> tuple[Int64, Int64, Int64, OverlappingKernels]:
        mine, kind = repeated.copy_of_kernel == repeated.copies - 2, kinds[repeated.kernel]
        rows = np.flatnonzero(mine)
        return rows, repeated.kernel[rows], np.flatnonzero(kind == KernelKind.COLLECTIVE), OverlappingKernels.of(
            program.kernel_ptr, kind, program.kernel_group, mine)

    rows, recorded, collectives, overlapping = repeated.shared.once("overlapping", (kinds,), asked)
    transfer = np.zeros(len(program.kernel_group), np.int64)
    length = (simulated.kernel_end - simulated.kernel_start)[collectives]
    transfer[collectives] = np.where(program.kernel_group[collectives] >= 0, np.minimum(
        steady.kernel_duration[collectives], length), length)
    found = overlapping.shares(simulated.kernel_start, simulated.kernel_end, transfer)
    shares = []
    for values in (found.transfer, found.waiting, found.computing):
        by_recorded = np.zeros(len(kinds))
        by_recorded[recorded] = values[rows]
        shares.append(by_recorded)
    return Overlapping(*shares)


def matters(change: Float64, times: KernelTimes, steady: Steady) -> bool:
    """Return whether a change of the kernels' times (logs) is large enough to be simulated."""
    moved = float((np.abs(np.expm1(change)) * times.ns).sum())
    return moved > NOTHING * float(steady.period_ns.max()) * steady.repeated.program.ranks


def slowed(times: KernelTimes, change: Float64, contention: Contention) -> KernelTimes:
    """Return the kernels' times with ``change`` (logs) applied, and a note that reports it.

    Recorded times include the cost of overlapping collectives. If an edit changes what overlaps, each kernel's time
    changes by the slow-down in the recording's own instances (``comm.contention``) × the change of its share. Shares
    depend on times and times on shares, so that both are recomputed alternately.
    """
    touched = (np.abs(change) > TOLD) & (times.ns > 0)
    wide, ns = CONTENTION * np.abs(change), times.ns * np.exp(change)
    notes = list(times.notes)
    if touched.any():
        seen = [f"× {one.factor:.2f} beside {what}" for one, what in (
            (contention.transfer, "one that transfers"), (contention.waiting, "one that waits")) if one.known]
        middle = f" (in this recording kernels take {', '.join(seen)}, in the middle)" if seen else ""
        notes.append(f"Other kernels run beside collectives than recorded: {touched.sum():,} of them take "
                     f"{signed_percent(ns[touched].sum() / times.ns[touched].sum() - 1)} in all{middle}.")
    return replace(times, ns=ns, low=-np.hypot(times.low, wide), high=np.hypot(times.high, wide), notes=tuple(notes),
                   source=np.where(touched, np.maximum(times.source, Source.ANCHORED), times.source))
