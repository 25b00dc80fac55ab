"""Finding the training steps of a window: the regions that the user names, else the best evidence first.

1. `ProfilerStep#N` annotations: the step is the annotation.
2. `Optimizer.step#...` ends: a step runs from the end of the previous optimizer step to the end of its own, so the
   steps tile the window. The first starts at the first `zero_grad`, if in later steps `zero_grad` also comes first,
   else with the thread's first operation; it is left out if it holds fewer than half of the operations of a median
   step (the window then began in its middle).
3. `enumerate(DataLoader)#...` starts: from one to the next; the last one is treated like the first above.
4. `execute_*` annotations (inference servers): the step is the annotation.
5. Periodicity: the thread's top-level operations repeat exactly, at least three times.

What holds no work, or repeats that are unlike each other, is left out afterwards (``step_faults``). Where the user
names a region, what ``record_function("train_step")`` marked, its regions are the steps instead::

    thread   |--train_step--|    |--train_step--|    |--train_step--|
    device      |--kernels---|      |--kernels---|      |--kernels------|
    steps    |------ 0 ----------|------ 1 ----------|------ 2 ---------|

A step then runs from its region's start to the next region's start. The last one runs to its region's end or, if that
is later, to the end of the device work that was launched in it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from tracer.errors import StepRegionError, cut_text
from tracer.graph import NONE, KernelTable, LaunchTable, OpKind, OpTable, StepSource, StepTable
from tracer.kineto.columns import Interner
from tracer.kineto.names import ANNOTATION_NAME, DATA_LOADER

_PROFILER_STEP = re.compile(r"ProfilerStep#\d+$")
_OPTIMIZER = re.compile(r"Optimizer\.step#")
_ZERO_GRAD = re.compile(r"Optimizer\.zero_grad#")
_EXECUTE = re.compile(r"execute_")

WHOLE_STEP_SHARE = 0.5
"""A step at the window's border counts as whole with at least this share of a median step's operations."""

MAX_PERIOD_ROWS = 20_000
"""Periodicity is sought among at most this many top-level operations."""


def find_steps(ops: OpTable, op_end: np.ndarray, strings: Interner) -> tuple[StepTable, int]:
    """The steps of a window and their ``StepSource`` (``NONE`` and an empty table when there are none)."""
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


def step_of(steps: StepTable, thread: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The step each event starts in: by time, the same for the step's thread and all others (they overlap none)."""
    if len(steps) == 0:
        return np.full(len(start), NONE, np.int32)
    found = np.searchsorted(steps.start_ns, start, side="right") - 1
    inside = (found >= 0) & (start < (steps.start_ns + steps.duration_ns)[np.maximum(found, 0)])
    return np.where(inside, found, NONE).astype(np.int32)


def _rows(ops: OpTable, names: dict[int, str], pattern: re.Pattern[str]) -> np.ndarray:
    codes = [code for code, text in names.items() if pattern.match(text)]
    return np.flatnonzero(np.isin(ops.name, codes)) if codes else np.zeros(0, np.int64)


def _table(name: np.ndarray, start: np.ndarray, end: np.ndarray, thread: np.ndarray) -> StepTable:
    return StepTable(name.astype(np.int32), start.astype(np.int64), (end - start).astype(np.int64),
                     thread.astype(np.int32), np.full(len(start), NONE, np.int32))


def _busiest(ops: OpTable, rows: np.ndarray) -> np.ndarray:
    """Return the rows on the thread that has most of all operations (ranges may repeat on helper threads)."""
    if len(rows) == 0:
        return rows
    counts = Counter(ops.thread[ops.kind == OpKind.OPERATION].tolist())
    thread = max(set(ops.thread[rows].tolist()), key=lambda t: (counts[t], -t))
    return rows[ops.thread[rows] == thread]


def marked_steps(ops: OpTable, op_end: np.ndarray, rows: np.ndarray) -> StepTable:
    """Steps that are annotations themselves; one inside another (a nested `execute_*`) is left out."""
    rows = _busiest(ops, rows)
    rows = rows[np.argsort(ops.start_ns[rows], kind="stable")]
    kept: list[int] = []
    for row in rows.tolist():
        if not kept or ops.start_ns[row] >= op_end[kept[-1]]:
            kept.append(row)
    chosen = np.array(kept, np.int64)
    return _table(ops.name[chosen], ops.start_ns[chosen], op_end[chosen], ops.thread[chosen])


def _counts(ops: OpTable, thread: int, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Operations of a thread that start in each interval."""
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
    # Several optimizers take turns in one step: the one that ends last closes it.
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
            # A period of one or two operations is a loop inside a step, not a step; and so are several times one.
            if period < 3:
                break
            first = np.arange(0, len(names) - period + 1, period)
            starts = ops.start_ns[top[first]]
            ends = np.append(starts[1:], op_end[top[min(first[-1] + period, len(names)) - 1]])
            return _numbered(strings, starts, ends, int(ops.thread[top[0]]))
    return StepTable.empty()


MOST_LISTED = 5
"""Regions that a sentence lists at most."""

SIMILAR = 0.6
"""Names with at least this share of characters in common are similar: the cutoff of Python's ``difflib``."""

_LONGEST_NAME = 60
_ANY = "*"
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Region:
    """Regions of one name in a window; names that differ by numbers alone count as one, such as ``iteration *``.

    Attributes:
        count: regions on the thread that has most of them.
        duration_ns: their time there, summed.
        own: the program marked them, not PyTorch.
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
        ops: the window's operations and annotations, with their ends, [ops] ns.
        calls, kernels: the window's calls and device work, linked.
        strings: the window's texts; the steps' names are added.
        name: of the regions; ``*`` matches any text where no region has exactly this name.
        source: the trace's name, for the error.

    Raises:
        StepRegionError: no region has this name.
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
    """Return the regions that repeat, those that take most time first, the program's own before PyTorch's."""
    return _repeated(_regions(ops, texts))


def listed(regions: list[Region]) -> str:
    """Return the first regions as a part of a sentence."""
    return ", ".join(map(str, regions[:MOST_LISTED]))


def _repeated(regions: list[Region]) -> list[Region]:
    return sorted((region for region in regions if region.count > 1),
                  key=lambda region: (not region.own, -region.duration_ns, region.name))


def _rows_of(ops: OpTable, texts: list[str], name: str) -> np.ndarray:
    """Return the rows of a name, sought among annotations, then among operations (what 2020's traces call them)."""
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
    """Return when the last device work ends that calls between two times launched; ``NONE`` without any."""
    launch = np.maximum(kernels.launch, 0)
    if not len(calls) or not len(kernels):
        return NONE
    at = calls.start_ns[launch]
    mine = (kernels.launch >= 0) & (at >= start) & (at < end)
    return int((kernels.start_ns + kernels.duration_ns)[mine].max()) if mine.any() else NONE


def _regions(ops: OpTable, texts: list[str]) -> list[Region]:
    """Return the regions of a window by family of names, each as on the thread that has most of them."""
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
    """Say that no region has a name, and which ones there are: similar ones first, then the largest that repeat."""
    found = _regions(ops, texts)
    close = {region: SequenceMatcher(None, name.lower(), region.name.lower()).ratio() for region in found}
    similar = sorted((region for region in found if close[region] >= SIMILAR), key=lambda region: -close[region])
    others = [region for region in _repeated(found) if close[region] < SIMILAR]
    if not similar and not others:
        there = ("The trace has no regions that repeat: mark each step with record_function, or call prof.step() "
                 "after each iteration, and record again.")
    else:
        kinds = [f"{title}: {listed(shown)}" for title, shown in
                 (("Similar names", similar), ("Regions that repeat", others[:max(MOST_LISTED - len(similar), 0)]))
                 if shown]
        there = f"{'. '.join(kinds)}. Give --step-region (step_region=) the name of one, or leave it out."
    return f"{source} has no region named {cut_text(name, _LONGEST_NAME)!r}. {there}"
