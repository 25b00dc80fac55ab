"""Steps that are none: empty ones at the window's borders, and repeats of operations that are unlike each other.

PyTorch ends a ``ProfilerStep`` at each ``prof.step()`` and opens the next. What comes before the first or after the
last is written as a step too, although it holds no iteration::

    annotations   |------ ProfilerStep#0 ------|------ ProfilerStep#1 ------|#2|
    work            forward backward optimizer   forward backward optimizer       #2 holds none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracer.arrays import Bool, Float64, Int64
from tracer.columns import named
from tracer.graph import LAUNCHING, NONE, KernelTable, LaunchTable, LossReport, OpKind, OpTable, StepSource, StepTable

ALMOST_NO_WORK = 0.02
"""A step at the window's border with at most this share of the other steps' work, by every measure, is empty: after the
last ``prof.step()`` come a loss that is printed or a barrier, some operations of the thousands of a step."""
FEW_DEVICE_TIME, HALF = 0.05, 0.5
"""Where steps use a device, an empty one has at most this share of their device time, and of their operations and
launches at most half."""
LIKE_WORK = 0.1
"""Repeats of one step run as many operations and launches as the median one, within this share."""
LIKE_TIME = 2.0
"""Repeats of one step take as long as the median one, within this factor, on the host and on the device."""
SHOWN = 4
"""Steps that a sentence names."""
_TRAINING = ("autograd::engine::evaluate_function", "Optimizer.step#")


def drop_step_faults(steps: StepTable, source: int, ops: OpTable, calls: LaunchTable, kernels: KernelTable,
                     strings: list[str], loss: LossReport) -> tuple[StepTable, int]:
    """Leave out steps that are none, count them and say why.

    Args:
        steps, source: as found.
        ops, calls, kernels: whose ``step`` is set; it is renumbered where steps are left out.
        strings: texts of the tables' codes.
        loss: gets the counts and sentences.

    Returns:
        The steps that are left and their source; none and ``NONE`` where the repeats are unlike each other.
    """
    if len(steps) < 2 or source == StepSource.REGION:  # the user says which regions are steps
        return steps, source
    work = _StepWork.of(steps, ops, calls, kernels, strings)
    if source == StepSource.PERIOD:
        kept: Bool = np.full(len(steps), work.alike())
    else:
        kept = ~work.empty()
    if kept.all():
        return steps, source
    if kept.any():
        loss.empty_steps += int((~kept).sum())
        loss.notes.append(_empty_note([strings[code] for code in steps.name[~kept].tolist()]))
    else:
        loss.unlike_repeats += len(steps)
        loss.notes.append(_unlike_note(steps))
    numbers = np.append(np.where(kept, np.cumsum(kept) - 1, NONE), NONE).astype(np.int32)
    for table in (ops, calls, kernels):
        table.step = numbers[table.step]
    return steps.take(kept), source if kept.any() else NONE


def first_names(names: Sequence[str]) -> str:
    """Return the first of some steps' names, and the number of the others."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


def _empty_note(names: Sequence[str]) -> str:
    hold, are = ("holds", "is") if len(names) == 1 else ("hold", "are")
    return (f"{first_names(names)} {hold} almost no work and {are} left out: PyTorch "
            "also marks as a step what comes before the first prof.step() and after the last one.")


def _unlike_note(steps: StepTable) -> str:
    shortest, longest = (float(ns) / 1e6 for ns in (steps.duration_ns.min(), steps.duration_ns.max()))
    return (f"The same operations repeat {len(steps):,} times, {shortest:,.3f} to {longest:,.3f} ms long: repeats so "
            "unlike each other are not taken for steps. Call prof.step() after each iteration to mark them.")


@dataclass(frozen=True, slots=True)
class _StepWork:
    """The work of each step, and how long it took; each [steps].

    Attributes:
        ops: operations of all threads.
        launches: calls that start device work.
        kernels: pieces of device work that were launched in the step.
        device_ns: their time.
        host_ns: time of the outermost operations. They wait for a device too: it measures work only without one.
        length_ns: from the step's start to its end.
        trains: whether it runs autograd's engine or an optimizer: a small share of a first step that compiles may be a
            whole step.
    """

    ops: Int64
    launches: Int64
    kernels: Int64
    device_ns: Float64
    host_ns: Float64
    length_ns: Float64
    trains: Bool

    @classmethod
    def of(cls, steps: StepTable, ops: OpTable, calls: LaunchTable, kernels: KernelTable,
           strings: list[str]) -> _StepWork:
        runs = (ops.step >= 0) & (ops.kind == OpKind.OPERATION)
        outermost = runs & ((ops.parent < 0) | (ops.kind[ops.parent] != OpKind.OPERATION))
        worked = kernels.step >= 0
        number = len(steps)
        training_ops = named(ops.name, strings, lambda text: text.startswith(_TRAINING)) & (ops.step >= 0)
        return cls(
            np.bincount(ops.step[runs], minlength=number),
            np.bincount(calls.step[(calls.step >= 0) & np.isin(calls.kind, LAUNCHING)], minlength=number),
            np.bincount(kernels.step[worked], minlength=number),
            np.bincount(kernels.step[worked], kernels.duration_ns[worked], number).astype(np.float64),
            np.bincount(ops.step[outermost], ops.duration_ns[outermost], number).astype(np.float64),
            steps.duration_ns.astype(np.float64), np.bincount(ops.step[training_ops], minlength=number) > 0)

    def empty(self) -> Bool:
        """Return which steps, from either border on, hold almost no work while the others do, [steps]."""
        found = np.zeros(len(self.ops), np.bool_)
        first, last = 0, len(found) - 1
        while first < last and self._holds_almost_none(last, range(first, last)):
            found[last] = True
            last -= 1
        while first < last and self._holds_almost_none(first, range(first + 1, last + 1)):
            found[first] = True
            first += 1
        return found

    def _holds_almost_none(self, step: int, others: range) -> bool:
        """Return whether a step holds almost none of the work of the others.

        The others' work is the upper median, by each measure, of those that have any: empty ones cannot hide each
        other.
        """
        if self.trains[step]:
            return False
        # Where steps use a device, its time says whether one is a step, however few launches they have: before the end
        # a host may still fetch a batch, and clear a buffer.
        uses_device = 2 * (self.kernels[others.start:others.stop] > 0).sum() > len(others)
        limits = [(self.device_ns, FEW_DEVICE_TIME), (self.kernels, HALF), (self.launches, HALF), (self.ops, HALF)]
        if not uses_device:
            limits = [(of, ALMOST_NO_WORK) for of in (self.ops, self.launches, self.kernels, self.host_ns)]
        worked = False
        for measure, limit in limits:
            some = np.sort(measure[others.start:others.stop])
            some = some[some > 0]
            usual = float(some[len(some) // 2]) if len(some) else 0.0
            if measure[step] > limit * usual:
                return False
            worked |= usual > 0
        return worked

    def alike(self) -> bool:
        """Return whether most of the steps do the same work as the median one."""
        same = np.ones(len(self.ops), np.bool_)
        for counts in (self.ops, self.launches, self.kernels):
            median = np.median(counts)
            same &= np.abs(counts - median) <= LIKE_WORK * median
        for times in (self.length_ns, self.device_ns):
            median = np.median(times)
            same &= (times <= LIKE_TIME * median) & (median <= LIKE_TIME * times)
        return bool(2 * same.sum() > len(same))
