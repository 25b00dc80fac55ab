"""Kernels that an edit moves to beside a collective, or away from one, take longer or less.

Recorded times hold what a collective beside them cost. Where an edit changes what lies beside what, each kernel's time
changes by the slow-down that the recording's own instances show (``comm.contention``) times the change of its share.
Shares follow from times and times from shares, so that both are found in turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graph_predictor.figures import signed_percent
from graph_predictor.prediction.pricing import KernelTimes
from graph_predictor.prediction.steady_state import Steady
from graph_predictor.simulation.overlapping import Overlapping, OverlappingKernels
from kernel_models.model import Source
from kernel_models.spreads import CONTENTION
from tracer.arrays import Float64, Int8, Int64
from tracer.graph import KernelKind

if TYPE_CHECKING:
    from graph_predictor.comm.contention import Contention

NOTHING = 1e-4
"""Change of device time, as a share of the step, that is left alone."""
TOLD = 0.01
"""Change of a kernel's time from which it is no longer measured."""


def steady_shares(steady: Steady, kinds: Int8) -> Overlapping:
    """Return the shares of each recorded kernel in a copy that has others before and behind it; 0 of the others'."""
    repeated, simulated = steady.repeated, steady.simulated
    program = repeated.program

    def asked() -> tuple[Int64, Int64, Int64, OverlappingKernels]:
        mine, kind = repeated.copy_of_kernel == repeated.copies - 2, kinds[repeated.kernel]
        rows = np.flatnonzero(mine)
        return rows, repeated.kernel[rows], np.flatnonzero(kind == KernelKind.COLLECTIVE), OverlappingKernels.of(
            program.kernel_ptr, kind, program.kernel_group, mine)

    rows, recorded, collectives, beside = repeated.shared.once("beside", (kinds,), asked)
    transfer = np.zeros(len(program.kernel_group), np.int64)
    length = (simulated.kernel_end - simulated.kernel_start)[collectives]
    transfer[collectives] = np.where(program.kernel_group[collectives] >= 0, np.minimum(
        steady.kernel_duration[collectives], length), length)
    found = beside.shares(simulated.kernel_start, simulated.kernel_end, transfer)
    shares = []
    for values in (found.transfer, found.waiting, found.computing):
        by_recorded = np.zeros(len(kinds))
        by_recorded[recorded] = values[rows]
        shares.append(by_recorded)
    return Overlapping(*shares)


def matters(change: Float64, times: KernelTimes, steady: Steady) -> bool:
    """Return whether a change of the kernels' times (logarithms) is worth simulating."""
    moved = float((np.abs(np.expm1(change)) * times.ns).sum())
    return moved > NOTHING * float(steady.period_ns.max()) * steady.repeated.program.ranks


def slowed(times: KernelTimes, change: Float64, contention: Contention) -> KernelTimes:
    """Return the kernels' times with a logarithm each added, and a note that says so."""
    touched = np.abs(change) > TOLD
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
