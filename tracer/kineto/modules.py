"""The module path of each operation, from the profiler's `nn.Module: Name_i` ranges (with_stack/with_modules)."""

from __future__ import annotations

import numpy as np

from tracer.graph import NONE
from tracer.kineto.columns import MODULE_PREFIX, Interner
from tracer.kineto.nesting import Nesting, host_order, innermost, nest


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
