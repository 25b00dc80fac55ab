"""Steps that a user names by a region: what ``record_function("train_step")`` marked.

    thread   |--train_step--|    |--train_step--|    |--train_step--|
    device      |--kernels---|      |--kernels---|      |--kernels------|
    steps    |------ 0 ----------|------ 1 ----------|------ 2 ---------|

A step runs from its region's start to the next region's start. The last one runs to its region's end or, if that is
later, to the end of the device work that was launched in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from tracer.errors import StepRegionError, cut_text
from tracer.graph import NONE, KernelTable, LaunchTable, OpKind, OpTable, StepTable
from tracer.kineto.columns import Interner
from tracer.kineto.names import ANNOTATION_NAME
from tracer.kineto.steps import marked_steps

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
