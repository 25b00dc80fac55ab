"""Context of each operation: its module, its part of the step, and the calls of Python functions before it.

Modules and Python functions come from the profiler's ranges (with_stack, with_modules).
"""

from __future__ import annotations

import re

import numpy as np

from tracer.columns import named
from tracer.graph import NONE, OpKind, OpTable, Phase, StepTable
from tracer.guard import FREE_TEXT, MOST_DEPTH
from tracer.kineto.columns import MODULE_PREFIX, Interner
from tracer.kineto.events import DATA_LOADER
from tracer.kineto.nesting import Nesting, host_order, inherit, innermost, nest


class ModulePaths:
    """The module ranges of a window, and the paths of their modules, such as "Net_0/Linear_3".

    A path is stored as its own name and the path around it::

        number   own name   around
             0   Net_0        NONE
             1   Linear_3        0      "Net_0/Linear_3"

    and is written out once for all ranges that have it, however often the module was called. A range that lies deeper
    than ``MOST_DEPTH`` modules, or needs more text than recordings have, counts for the module around it.

    Args:
        ranges: columns of the module ranges; times on the clock of the window.
        strings: texts of the ranges' names.
    """

    def __init__(self, ranges: dict[str, np.ndarray], strings: Interner) -> None:
        order = host_order(ranges["thread"], ranges["start"], ranges["duration"], None)
        self.rows = {name: column[order] for name, column in ranges.items()}
        self.nesting = nest(self.rows["thread"], self.rows["start"], self.rows["duration"])
        self.texts: list[str] = []
        """Texts of the paths."""
        self.folded = 0
        """Number of ranges that were assigned to the module around them."""
        self.path = np.zeros(len(order), np.int64)
        """Number of each range's path."""
        self._number(list(strings))

    def _number(self, texts: list[str]) -> None:
        known: dict[tuple[int, int], int] = {}
        depths: list[int] = []
        paths: list[int] = []
        left = FREE_TEXT
        for name, parent in zip(self.rows["name"].tolist(), self.nesting.parent.tolist(), strict=True):
            around = paths[parent] if parent >= 0 else NONE
            number = known.get((around, name), NONE)
            if number == NONE:
                own = texts[name].removeprefix(MODULE_PREFIX)
                size = len(own) + (len(self.texts[around]) + 1 if around >= 0 else 0)
                depth = depths[around] + 1 if around >= 0 else 1
                if around >= 0 and (depth > MOST_DEPTH or size > left):
                    number = around
                else:
                    number = len(self.texts)
                    self.texts.append(f"{self.texts[around]}/{own}" if around >= 0 else own)
                    depths.append(depth)
                    left -= size
                known[around, name] = number
            self.folded += number == around
            paths.append(number)
        self.path[:] = paths

    def notes(self) -> list[str]:
        """Return sentences on what was folded, if anything."""
        if not self.folded:
            return []
        return [f"{self.folded:,} calls of modules lie deeper in others than models do (more than {MOST_DEPTH}), or "
                "have very long names; they count for the module around them."]

    def lines(self, frames: dict[str, np.ndarray], names: Interner) -> dict[str, str]:
        """Return for each module path the program's own function that called it first.

        Args:
            frames: columns of the program's own functions, times on the same clock.
            names: texts of the functions' names.
        """
        if not len(self.path) or len(frames["start"]) == 0:
            return {}
        order = host_order(frames["thread"], frames["start"], frames["duration"], None)
        own = {name: column[order] for name, column in frames.items()}
        calls = nest(own["thread"], own["start"], own["duration"])
        rows = self.rows
        caller = innermost(rows["thread"], rows["start"], self.nesting.end, own["thread"], own["start"], calls)
        texts = list(names)
        found: dict[str, str] = {}
        for at in np.argsort(rows["start"], kind="stable").tolist():
            if caller[at] >= 0:
                found.setdefault(self.texts[self.path[at]], texts[own["name"][caller[at]]])
        return found

    def of(self, strings: Interner, thread: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the codes of the module paths of operations (``NONE`` outside any module).

        Args:
            strings: the graph's strings; the paths are added.
            thread, start, end: columns of the operations, times on the same clock.
        """
        if not len(self.path) or len(start) == 0:
            return np.full(len(start), NONE, np.int32)
        codes = strings.codes(self.texts)[self.path]
        middle = start + (end - start) // 2
        found = innermost(thread, start, middle, self.rows["thread"], self.rows["start"], self.nesting)
        return np.where(found >= 0, codes[np.maximum(found, 0)], NONE).astype(np.int32)


_ENGINE = "autograd::engine::evaluate_function"
_BACKWARD_NODE = re.compile(r"(?:Backward\d*|AccumulateGrad)(?:: .*)?$")

AUTOGRAD_SHARE = 0.5
"""A thread belongs to autograd if at least this share of its top-level operations are backward nodes."""


def phases(ops: OpTable, nesting: Nesting, strings: list[str]) -> np.ndarray:
    """Return the ``Phase`` of each operation: that of its ancestor, unless an inner marker gives another.

    BACKWARD: below an autograd node, on a thread that runs mostly such nodes, or with a forward thread recorded.
    OPTIMIZER and DATA: inside the annotations of those names. FORWARD: what remains inside a step. Else OTHER. A
    closure that the optimizer calls (``optimizer.step(closure)``, as Lightning does) does not count as its work.
    """
    count = len(ops)
    own = np.full(count, NONE, np.int8)
    if count == 0:
        return own
    node = named(ops.name, strings, lambda text: text.startswith(_ENGINE) or _BACKWARD_NODE.search(text))
    own[named(ops.name, strings, lambda text: text.startswith("Optimizer."))] = Phase.OPTIMIZER
    own[named(ops.name, strings, DATA_LOADER.match)] = Phase.DATA
    own[node] = Phase.BACKWARD
    # 0 means "recorded in the forward pass" since 2022; the forward thread's number is 1 or more.
    own[(ops.forward_thread > 0) & (own == NONE)] = Phase.BACKWARD
    top = (ops.parent == NONE) & (ops.kind == OpKind.OPERATION)
    threads = int(ops.thread.max()) + 1
    tops = np.bincount(ops.thread[top], minlength=threads)
    nodes = np.bincount(ops.thread[top & node], minlength=threads)
    autograd = (tops > 0) & (nodes >= AUTOGRAD_SHARE * tops)
    out = inherit(own, nesting, NONE)
    out[_in_closures(ops, own, node, nesting)] = NONE
    rest = out == NONE
    out[rest & autograd[ops.thread]] = Phase.BACKWARD
    rest = out == NONE
    out[rest] = np.where(ops.step[rest] >= 0, Phase.FORWARD, Phase.OTHER)
    return out


def _in_closures(ops: OpTable, own: np.ndarray, node: np.ndarray, nesting: Nesting) -> np.ndarray:
    """Return a mask of the operations below an optimizer's annotation that belong to a closure it called.

    ::

        Optimizer.step#Adam.step  |--------------------------------------|
        the caller's thread         forward ops             adam's ops
        the autograd thread                     backward
                                    '-- the closure -------' (to the end of the last backward node)
    """
    found = np.zeros(len(ops), bool)
    markers = np.flatnonzero(own == Phase.OPTIMIZER)
    backward = np.flatnonzero(node)
    if not len(markers) or not len(backward):
        return found
    backward = backward[np.argsort(ops.start_ns[backward], kind="stable")]
    starts = ops.start_ns[backward]
    ends = ops.start_ns[backward] + ops.duration_ns[backward]
    low = np.searchsorted(starts, ops.start_ns[markers])
    high = np.searchsorted(starts, ops.start_ns[markers] + ops.duration_ns[markers])
    until = np.full(len(ops), np.iinfo(np.int64).min)
    for marker, first, last in zip(markers[high > low].tolist(), low[high > low].tolist(), high[high > low].tolist(),
                                   strict=True):
        until[marker] = ends[first:last].max()
    nearest = inherit(np.where(own != NONE, np.arange(len(ops)), NONE), nesting, NONE)
    below = (nearest != NONE) & (nearest != np.arange(len(ops)))
    found[below] = ops.start_ns[below] < until[nearest[below]]
    return found


def count_python_calls(ops: OpTable, steps: StepTable, functions: dict[str, np.ndarray],
                       modules: dict[str, np.ndarray]) -> None:
    """Write the number of functions called before each operation and in each step; nothing if none was recorded.

    Args:
        ops: Sorted by thread and start.
        steps: Steps of the window.
        functions: Thread and start of each call of a Python function, without calls of modules.
        modules: Thread and start of each call of a module, which the profiler records separately.
    """
    if not len(functions["start"]):
        return
    before_ops = ops.writable("python_calls")
    called = {name: np.concatenate([functions[name], modules[name]]) for name in ("thread", "start")}
    for thread in np.unique(ops.thread).tolist():
        starts = np.sort(called["start"][called["thread"] == thread])
        rows = np.flatnonzero(ops.thread == thread)
        begins = ops.start_ns[rows]
        before = np.append(0, np.searchsorted(starts, begins[:-1]))
        step = ops.step[rows]
        if len(steps):
            opened = np.where(step == NONE, 0, steps.start_ns[np.maximum(step, 0)])
            before = np.maximum(before, np.searchsorted(starts, opened))
        before_ops[rows] = np.maximum(np.searchsorted(starts, begins) - before, 0)
    for thread in np.unique(steps.thread).tolist():
        starts = np.sort(called["start"][called["thread"] == thread])
        rows = np.flatnonzero(steps.thread == thread)
        begin = steps.start_ns[rows]
        steps.python_calls[rows] = np.searchsorted(starts, begin + steps.duration_ns[rows]) - np.searchsorted(
            starts, begin)
