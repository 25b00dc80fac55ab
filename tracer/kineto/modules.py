"""What each operation belongs to: its module, the part of the step, and the calls of Python functions before it.

Modules and Python functions are known from the profiler's ranges (with_stack, with_modules).
"""

from __future__ import annotations

import re

import numpy as np

from tracer.graph import NONE, OpKind, OpTable, Phase, StepTable
from tracer.kineto.columns import MODULE_PREFIX, Interner
from tracer.kineto.events import DATA_LOADER
from tracer.kineto.nesting import Nesting, host_order, inherit, innermost, nest


def module_lines(ranges: dict[str, np.ndarray], frames: dict[str, np.ndarray], strings: Interner,
                 names: Interner) -> dict[str, str]:
    """Return by module path the program's own function that called it first.

    Args:
        ranges: columns of the module ranges.
        frames: columns of the program's own functions, times on the same clock.
        strings: texts of the ranges' names.
        names: texts of the functions' names.
    """
    if len(ranges["start"]) == 0 or len(frames["start"]) == 0:
        return {}
    rows, nesting, paths = _nested(ranges, strings)
    order = host_order(frames["thread"], frames["start"], frames["duration"], None)
    own = {name: column[order] for name, column in frames.items()}
    calls = nest(own["thread"], own["start"], own["duration"])
    caller = innermost(rows["thread"], rows["start"], nesting.end, own["thread"], own["start"], calls)
    texts = list(names)
    found: dict[str, str] = {}
    for at in np.argsort(rows["start"], kind="stable").tolist():
        if caller[at] >= 0:
            found.setdefault(paths[at], texts[own["name"][caller[at]]])
    return found


def _nested(ranges: dict[str, np.ndarray], strings: Interner) -> tuple[dict[str, np.ndarray], Nesting, list[str]]:
    """Module ranges in order, how they nest, and their paths."""
    order = host_order(ranges["thread"], ranges["start"], ranges["duration"], None)
    rows = {name: column[order] for name, column in ranges.items()}
    nesting = nest(rows["thread"], rows["start"], rows["duration"])
    texts = list(strings)
    paths: list[str] = []
    for name, parent in zip(rows["name"].tolist(), nesting.parent.tolist(), strict=True):
        own = texts[name].removeprefix(MODULE_PREFIX)
        paths.append(f"{paths[parent]}/{own}" if parent >= 0 else own)
    return rows, nesting, paths


def module_paths(ranges: dict[str, np.ndarray], strings: Interner, thread: np.ndarray, start: np.ndarray,
                 end: np.ndarray) -> np.ndarray:
    """Codes of paths such as "Net_0/Linear_3" for operations given by thread, start and end (``NONE`` outside any).

    Args:
        ranges: columns of the module ranges; times on the same clock as ``start`` and ``end``.
        strings: the graph's strings; new paths are added.
    """
    if len(ranges["start"]) == 0 or len(start) == 0:
        return np.full(len(start), NONE, np.int32)
    rows, nesting, paths = _nested(ranges, strings)
    codes = strings.codes(paths)
    middle = start + (end - start) // 2
    found = innermost(thread, start, middle, rows["thread"], rows["start"], nesting)
    return np.where(found >= 0, codes[np.maximum(found, 0)], NONE).astype(np.int32)


_ENGINE = "autograd::engine::evaluate_function"
_BACKWARD_NODE = re.compile(r"(?:Backward\d*|AccumulateGrad)(?:: .*)?$")

AUTOGRAD_SHARE = 0.5
"""A thread belongs to autograd if at least this share of its top-level operations are backward nodes."""


def phases(ops: OpTable, nesting: Nesting, strings: list[str]) -> np.ndarray:
    """``Phase`` of each operation. An operation inherits its ancestor's; the innermost marker wins.

    BACKWARD: below an autograd node, on a thread that runs mostly such nodes, or with a forward thread recorded.
    OPTIMIZER and DATA: inside the annotations of those names. FORWARD: what remains inside a step. Else OTHER.
    A closure that the optimizer calls (``optimizer.step(closure)``, as Lightning does) is no part of its own work.
    """
    count = len(ops)
    own = np.full(count, NONE, np.int8)
    if count == 0:
        return own
    node = np.zeros(count, bool)
    for code in np.unique(ops.name).tolist():
        text = strings[code]
        if text.startswith(_ENGINE) or _BACKWARD_NODE.search(text):
            node |= ops.name == code
        elif text.startswith("Optimizer."):
            own[ops.name == code] = Phase.OPTIMIZER
        elif DATA_LOADER.match(text):
            own[ops.name == code] = Phase.DATA
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
    """Return which operations below an optimizer's annotation belong to a closure that it called.

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
    """Write how many functions are called before each operation and in each step; nothing where none was recorded.

    Args:
        ops: sorted by thread and start.
        steps: of the window.
        functions: thread and start of each call of a Python function that is no module's.
        modules: the same of calls of modules, which the profiler names apart.
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
    for row, thread in enumerate(steps.thread.tolist()):
        starts = np.sort(called["start"][called["thread"] == thread])
        low, high = np.searchsorted(starts, [steps.start_ns[row], steps.start_ns[row] + steps.duration_ns[row]])
        steps.python_calls[row] = high - low
