"""Finding the training steps of a window: the regions that the user names, else the best evidence first.

1. `ProfilerStep#N` annotations: the step is the annotation.
2. `Optimizer.step#...` ends: a step runs from the end of the previous optimizer step to the end of its own, so the
   steps tile the window. The first starts at the first `zero_grad`, if in later steps `zero_grad` also comes first.
   Else it starts with the thread's first operation. A first step with fewer than half of the operations of a median
   step is left out (the window then began in its middle).
3. `enumerate(DataLoader)#...` starts: from one to the next; the last one is treated like the first above.
4. `execute_*` annotations (inference servers): the step is the annotation.
5. Periodicity: the thread's top-level operations repeat exactly, at least three times.

Where the user names a region that the program marked with ``record_function("train_step")``, it gives the steps::

    thread   |--train_step--|    |--train_step--|    |--train_step--|
    device      |--kernels---|      |--kernels---|      |--kernels------|
    steps    |------ 0 ----------|------ 1 ----------|------ 2 ---------|

A step then runs from its region's start to the next region's start. The last one runs to its region's end or, if that
is later, to the end of the device work that was launched in it.

Invalid steps are left out afterwards: repetitions that differ from each other, and empty steps at the window's borders.
PyTorch ends a ``ProfilerStep`` at each ``prof.step()`` and opens the next. What comes before the first or after the
last is written as a step too, although it holds no iteration::

    annotations   |------ ProfilerStep#0 ------|------ ProfilerStep#1 ------|#2|
    work            forward backward optimizer   forward backward optimizer       #2 holds none
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from tracer.arrays import Bool, Float64, Int64
from tracer.columns import named
from tracer.errors import StepRegionError, cut_text, listed
from tracer.graph import LAUNCHING, NONE, KernelTable, LaunchTable, LossReport, OpKind, OpTable, StepSource, StepTable
from tracer.kineto.columns import Interner
from tracer.kineto.events import ANNOTATION_NAME, DATA_LOADER

_PROFILER_STEP = re.compile(r"ProfilerStep#\d+$")
_OPTIMIZER = re.compile(r"Optimizer\.step#")
_ZERO_GRAD = re.compile(r"Optimizer\.zero_grad#")
_EXECUTE = re.compile(r"execute_")

WHOLE_STEP_SHARE = 0.5
"""A step at the window's border counts as whole with at least this share of a median step's operations."""

MAX_PERIOD_ROWS = 20_000
"""Periodicity is sought among at most this many top-level operations."""


def find_steps(ops: OpTable, op_end: np.ndarray, strings: Interner) -> tuple[StepTable, int]:
    """Return the steps of a window and their ``StepSource`` (``NONE`` and an empty table when there are none)."""
    if len(ops):
        texts = list(strings)
        names = {code: texts[code] for code in np.unique(ops.name).tolist()}
        for source, search in (
            (StepSource.PROFILER_STEP, lambda: marked_steps(ops, op_end, _rows(ops, names, _PROFILER_STEP))),
            (StepSource.OPTIMIZER, lambda: _optimizer(ops, op_end, names, strings)),
            (StepSource.DATA_LOADER, lambda: _data_loader(ops, op_end, names, strings)),
            (StepSource.ANNOTATION, lambda: marked_steps(ops, op_end, _rows(ops, names, _EXECUTE))),
            (StepSource.PERIOD, lambda: _periodic(ops, op_end, strings)),
        ):
            steps = search()
            if len(steps):
                return steps, source
    return StepTable.empty(), NONE


def _rows(ops: OpTable, names: dict[int, str], pattern: re.Pattern[str]) -> np.ndarray:
    codes = [code for code, text in names.items() if pattern.match(text)]
    return np.flatnonzero(np.isin(ops.name, codes)) if codes else np.zeros(0, np.int64)


def _table(name: np.ndarray, start: np.ndarray, end: np.ndarray, thread: np.ndarray) -> StepTable:
    return StepTable(name.astype(np.int32), start.astype(np.int64), (end - start).astype(np.int64),
                     thread.astype(np.int32), np.full(len(start), NONE, np.int32))


def _busiest(ops: OpTable, rows: np.ndarray) -> np.ndarray:
    """Return the rows on the thread with most operations of all kinds (ranges may repeat on helper threads)."""
    if len(rows) == 0:
        return rows
    counts = Counter(ops.thread[ops.kind == OpKind.OPERATION].tolist())
    thread = max(set(ops.thread[rows].tolist()), key=lambda t: (counts[t], -t))
    return rows[ops.thread[rows] == thread]


def marked_steps(ops: OpTable, op_end: np.ndarray, rows: np.ndarray) -> StepTable:
    """Return the steps that are annotations themselves; one inside another (a nested `execute_*`) is left out."""
    rows = _busiest(ops, rows)
    rows = rows[np.argsort(ops.start_ns[rows], kind="stable")]
    kept: list[int] = []
    for row in rows.tolist():
        if not kept or ops.start_ns[row] >= op_end[kept[-1]]:
            kept.append(row)
    chosen = np.array(kept, np.int64)
    return _table(ops.name[chosen], ops.start_ns[chosen], op_end[chosen], ops.thread[chosen])


def _counts(ops: OpTable, thread: int, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the operations of a thread that start in each interval."""
    starts = ops.start_ns[(ops.thread == thread) & (ops.kind == OpKind.OPERATION)]
    return np.searchsorted(starts, end) - np.searchsorted(starts, start)


def _whole(counts: np.ndarray, index: int) -> bool:
    others = np.delete(counts, index)
    return len(others) == 0 or counts[index] >= WHOLE_STEP_SHARE * np.median(others)


def _numbered(strings: Interner, start: np.ndarray, end: np.ndarray, thread: int) -> StepTable:
    names = strings.codes(f"step {number}" for number in range(len(start)))
    return _table(names, start, end, np.full(len(start), thread))


def _optimizer(ops: OpTable, op_end: np.ndarray, names: dict[int, str], strings: Interner) -> StepTable:
    rows = _busiest(ops, _rows(ops, names, _OPTIMIZER))
    if len(rows) == 0:
        return StepTable.empty()
    # Several optimizers may run in one step: the one that ends last closes it.
    last = rows[np.argmax(op_end[rows])]
    rows = rows[ops.name[rows] == ops.name[last]]
    thread = int(ops.thread[last])
    ends = np.sort(op_end[rows])
    first_op = int(ops.start_ns[ops.thread == thread].min())
    starts = np.concatenate([[first_op], ends[:-1]])
    zero = _rows(ops, names, _ZERO_GRAD)
    zero_starts = np.sort(ops.start_ns[zero[ops.thread[zero] == thread]])
    counts = _counts(ops, thread, starts, ends)
    if len(zero_starts) and len(ends) > 1:
        position = np.searchsorted(zero_starts, starts[1:])
        if (position < len(zero_starts)).all():
            before = _counts(ops, thread, starts[1:], zero_starts[position])
            if np.median(before) <= 0.1 * np.median(counts[1:]):  # zero_grad opens the step; data may come first
                starts[0] = min(int(zero_starts[0]), int(ends[0]))
                counts = _counts(ops, thread, starts, ends)
    if len(counts) > 1 and not _whole(counts, 0):
        starts, ends = starts[1:], ends[1:]
    return _numbered(strings, starts, ends, thread)


def _data_loader(ops: OpTable, op_end: np.ndarray, names: dict[int, str], strings: Interner) -> StepTable:
    rows = _busiest(ops, _rows(ops, names, DATA_LOADER))
    if len(rows) == 0:
        return StepTable.empty()
    thread = int(ops.thread[rows[0]])
    starts = np.sort(ops.start_ns[rows])
    ends = np.append(starts[1:], int(op_end[ops.thread == thread].max()))
    counts = _counts(ops, thread, starts, ends)
    if len(counts) > 1 and not _whole(counts, len(counts) - 1):
        starts, ends = starts[:-1], ends[:-1]
    return _numbered(strings, starts, ends, thread)


def _periodic(ops: OpTable, op_end: np.ndarray, strings: Interner) -> StepTable:
    top = np.flatnonzero((ops.parent == NONE) & (ops.kind == OpKind.OPERATION))
    top = _busiest(ops, top)
    if not 6 <= len(top) <= MAX_PERIOD_ROWS:
        return StepTable.empty()
    names = ops.name[top]
    for period in np.flatnonzero(names == names[0])[1:]:
        if len(names) < 3 * period:
            break
        if (names[period:] == names[:-period]).all():
            # A period of one or two operations is a loop inside a step, not a step; so are its multiples.
            if period < 3:
                break
            first = np.arange(0, len(names) - period + 1, period)
            starts = ops.start_ns[top[first]]
            ends = np.append(starts[1:], op_end[top[min(first[-1] + period, len(names)) - 1]])
            return _numbered(strings, starts, ends, int(ops.thread[top[0]]))
    return StepTable.empty()


MOST_LISTED = 5
"""Most regions that a sentence lists."""

SIMILAR = 0.6
"""Names with at least this share of characters in common are similar: the cutoff of Python's ``difflib``."""

_LONGEST_NAME = 60  # chosen: part of a line
_ANY = "*"
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Region:
    """Regions of one name in a window; names that differ by numbers alone count as one, such as ``iteration *``.

    Attributes:
        count: number of regions on the thread that has most of them.
        duration_ns: their time there, summed.
        own: whether the program marked them, not PyTorch.
    """

    name: str
    count: int
    duration_ns: int
    own: bool

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count:,} times"
        return f"{cut_text(self.name, _LONGEST_NAME)!r} ({times}, {self.duration_ns / 1e6:,.3f} ms in all)"


def region_steps(ops: OpTable, op_end: np.ndarray, calls: LaunchTable, kernels: KernelTable, strings: Interner,
                 name: str, source: str) -> StepTable:
    """Return the steps that regions of a name mark.

    Args:
        ops, op_end: The window's operations and annotations, and their ends, [ops] ns.
        calls, kernels: The window's calls and device work, linked.
        strings: The window's texts; the steps' names are added.
        name: Name of the regions; ``*`` matches any text where no region has exactly this name.
        source: The trace's name, for the error.

    Raises:
        StepRegionError: No region has this name.
    """
    texts = list(strings)
    rows = _rows_of(ops, texts, name)
    if not len(rows):
        raise StepRegionError(_missing(ops, texts, name, source))
    steps = marked_steps(ops, op_end, rows)
    start, end = steps.start_ns, steps.start_ns + steps.duration_ns
    end[-1] = max(int(end[-1]), _launched_end(calls, kernels, int(start[-1]), int(end[-1])))
    end[:-1] = start[1:]
    steps.duration_ns = end - start
    if len(np.unique(steps.name)) < len(steps):  # each step needs a name of its own
        steps.name = strings.codes(
            f"{texts[code]} {number}" for number, code in enumerate(steps.name.tolist())).astype(np.int32)
    return steps


def repeated_regions(ops: OpTable, texts: list[str]) -> list[Region]:
    """Return the regions that repeat: the program's own before PyTorch's, those with most time first."""
    return _repeated(_regions(ops, texts))


def first_regions(regions: list[Region]) -> str:
    """Return the first regions as a part of a sentence."""
    return ", ".join(map(str, regions[:MOST_LISTED]))


def _repeated(regions: list[Region]) -> list[Region]:
    return sorted((region for region in regions if region.count > 1),
                  key=lambda region: (not region.own, -region.duration_ns, region.name))


def _rows_of(ops: OpTable, texts: list[str], name: str) -> np.ndarray:
    """Return the rows with a name, among annotations, else among operations (traces of 2020 record regions so)."""
    named = {code: texts[code] for code in np.unique(ops.name).tolist()}
    exact = [code for code, text in named.items() if text == name]
    pattern = re.compile(".*".join(map(re.escape, name.split(_ANY))), re.DOTALL)
    wild = [code for code, text in named.items() if pattern.fullmatch(text)] if _ANY in name else []
    marks = ops.kind == OpKind.ANNOTATION
    for codes, allowed in ((exact, marks), (wild, marks), (exact, ~marks)):
        rows = np.flatnonzero(np.isin(ops.name, codes) & allowed)
        if len(rows):
            return rows
    return np.zeros(0, np.int64)


def _launched_end(calls: LaunchTable, kernels: KernelTable, start: int, end: int) -> int:
    """Return the end of the last device work launched by calls between two times; ``NONE`` if they launched nothing."""
    launch = np.maximum(kernels.launch, 0)
    if not len(calls) or not len(kernels):
        return NONE
    at = calls.start_ns[launch]
    mine = (kernels.launch >= 0) & (at >= start) & (at < end)
    return int((kernels.start_ns + kernels.duration_ns)[mine].max()) if mine.any() else NONE


def _regions(ops: OpTable, texts: list[str]) -> list[Region]:
    """Return the regions of a window by family of names, each on the thread that has most of them."""
    rows = np.flatnonzero(ops.kind == OpKind.ANNOTATION)
    if not len(rows):
        return []
    codes, at = np.unique(ops.name[rows], return_inverse=True)
    families: dict[str, list[str]] = {}
    seen: dict[str, int] = {}
    numbers = np.zeros(len(codes), np.int64)
    for place, code in enumerate(codes.tolist()):
        family = _DIGITS.sub(_ANY, texts[code])
        families.setdefault(family, []).append(texts[code])
        numbers[place] = seen.setdefault(family, len(seen))
    order = np.argsort(numbers[at], kind="stable")
    ends = np.cumsum(np.bincount(numbers[at], minlength=len(families)))
    found = []
    for (family, names), mine in zip(families.items(), np.split(rows[order], ends[:-1]), strict=True):
        threads, counts = np.unique(ops.thread[mine], return_counts=True)
        mine = mine[ops.thread[mine] == threads[np.argmax(counts)]]
        found.append(Region(names[0] if len(names) == 1 else family, len(mine), int(ops.duration_ns[mine].sum()),
                            ANNOTATION_NAME.match(names[0]) is None))
    return found


def _missing(ops: OpTable, texts: list[str], name: str, source: str) -> str:
    """Return the error that no region has a name, with the regions there are: similar ones, then the largest."""
    found = _regions(ops, texts)
    close = {region: SequenceMatcher(None, name.lower(), region.name.lower()).ratio() for region in found}
    similar = sorted((region for region in found if close[region] >= SIMILAR), key=lambda region: -close[region])
    others = [region for region in _repeated(found) if close[region] < SIMILAR]
    if not similar and not others:
        there = ("The trace has no regions that repeat: mark each step with record_function, or call prof.step() "
                 "after each iteration, and record again.")
    else:
        kinds = [f"{title}: {first_regions(shown)}" for title, shown in
                 (("Similar names", similar), ("Regions that repeat", others[:max(MOST_LISTED - len(similar), 0)]))
                 if shown]
        there = f"{'. '.join(kinds)}. Give --step-region (step_region=) the name of one, or leave it out."
    return f"{source} has no region named {cut_text(name, _LONGEST_NAME)!r}. {there}"


ALMOST_NO_WORK = 0.02
"""A step at the window's border is empty if it has at most this share of the other steps' work by every measure. After
the last ``prof.step()`` come a printed loss or a barrier: some operations, where a step has thousands."""
FEW_DEVICE_TIME, HALF = 0.05, 0.5
"""Where steps use a device, an empty step has at most the first share of their device time, and at most half of their
kernels, operations and launches."""
LIKE_WORK = 0.1
"""Repeats of one step run as many operations and launches as the median one, within this share. Chosen."""
LIKE_TIME = 2.0
"""Repeats of one step take the median one's time within this factor, on the host and on the device.
Chosen: repeats of a recording that were no steps took 344, 2.75 and 0.1 ms."""
SHOWN = 4
"""Most steps that a sentence names."""
_TRAINING = ("autograd::engine::evaluate_function", "Optimizer.step#")


def drop_step_faults(steps: StepTable, source: int, ops: OpTable, calls: LaunchTable, kernels: KernelTable,
                     strings: list[str], loss: LossReport) -> tuple[StepTable, int]:
    """Leave out invalid steps, count them and note why.

    Args:
        steps, source: As ``find_steps`` returns them.
        ops, calls, kernels: Tables with their ``step`` set; it is renumbered where steps are left out.
        strings: Texts of the tables' codes.
        loss: Receives the counts and sentences.

    Returns:
        The remaining steps and their source; no steps and ``NONE`` where the repetitions differ from each other.
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


def _empty_note(names: Sequence[str]) -> str:
    hold, are = ("holds", "is") if len(names) == 1 else ("hold", "are")
    return (f"{listed(names, SHOWN)} {hold} almost no work and {are} left out: PyTorch "
            "also marks as a step what comes before the first prof.step() and after the last one.")


def _unlike_note(steps: StepTable) -> str:
    shortest, longest = (float(ns) / 1e6 for ns in (steps.duration_ns.min(), steps.duration_ns.max()))
    return (f"The same operations repeat {len(steps):,} times, {shortest:,.3f} to {longest:,.3f} ms long: repeats so "
            "unlike each other are not taken for steps. Call prof.step() after each iteration to mark them.")


@dataclass(frozen=True, slots=True)
class _StepWork:
    """The work of each step, and how long it took; each [steps].

    Attributes:
        ops: Operations of all threads.
        launches: Calls that start device work.
        kernels: Pieces of device work that were launched in the step.
        device_ns: Time of that device work.
        host_ns: Time of the outermost operations. It includes waits for a device: it measures work only without one.
        length_ns: From the step's start to its end.
        trains: Whether it runs autograd's engine or an optimizer. Such a step is not empty, however small it is next to
            a first step that compiles.
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
        """Return the steps at either border that hold almost no work while the others do, [steps]."""
        found = np.zeros(len(self.ops), np.bool_)
        others = _OtherSteps([of.tolist() for of in (self.device_ns, self.kernels, self.launches, self.ops,
                                                     self.host_ns)])
        first, last = 0, len(found) - 1
        while first < last and self._holds_almost_none(last, others):
            found[last] = True
            last -= 1
        while first < last and self._holds_almost_none(first, others):
            found[first] = True
            first += 1
        return found

    def _holds_almost_none(self, step: int, others: _OtherSteps) -> bool:
        """Return whether a step holds almost none of the work of the others; if so it is none of them from then on."""
        if self.trains[step]:
            return False
        others.leave_out(step)
        device_ns, kernels, launches, ops, host_ns = others.usual()
        # Where steps use a device, device time decides, however few launches there are: before the window ends, a host
        # may still fetch a batch and clear a buffer.
        uses_device = 2 * len(others.sorted[1]) > others.count
        limits = [(self.device_ns, device_ns, FEW_DEVICE_TIME), (self.kernels, kernels, HALF),
                  (self.launches, launches, HALF), (self.ops, ops, HALF)]
        if not uses_device:
            limits = [(of, usual, ALMOST_NO_WORK) for of, usual in (
                (self.ops, ops), (self.launches, launches), (self.kernels, kernels), (self.host_ns, host_ns))]
        found = any(usual > 0 for _, usual, _ in limits) and all(
            of[step] <= limit * usual for of, usual, limit in limits)
        if not found:
            others.take_back(step)
        return found

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


class _OtherSteps:
    """The work of steps by several measures, sorted once: to sort it for each empty step takes quadratic time.

    Args:
        measures: values of all steps, by measure.
    """

    def __init__(self, measures: list[list[float]]) -> None:
        self._measures = measures
        self.count = len(measures[0])
        self.sorted = [sorted(value for value in values if value > 0) for values in measures]

    def leave_out(self, step: int) -> None:
        """Leave out a step."""
        self.count -= 1
        for values, there in zip(self._measures, self.sorted, strict=True):
            if values[step] > 0:
                del there[bisect_left(there, values[step])]

    def take_back(self, step: int) -> None:
        """Take back what was left out."""
        self.count += 1
        for values, there in zip(self._measures, self.sorted, strict=True):
            if values[step] > 0:
                insort(there, values[step])

    def usual(self) -> list[float]:
        """Return the upper median, by each measure, of the steps that have any: empty ones cannot hide each other."""
        return [there[len(there) // 2] if there else 0.0 for there in self.sorted]
