"""Calls of Python functions between operations, from the stacks of a recording (with_stack)."""

from __future__ import annotations

import numpy as np

from tracer.graph import NONE, OpTable, StepTable


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
