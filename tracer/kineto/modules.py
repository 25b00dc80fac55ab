"""The module path of each operation, from the profiler's `nn.Module: Name_i` ranges (with_stack/with_modules)."""

from __future__ import annotations

import numpy as np

from tracer.graph import NONE
from tracer.kineto.columns import MODULE_PREFIX, Interner
from tracer.kineto.nesting import host_order, innermost, nest


def module_paths(ranges: dict[str, np.ndarray], strings: Interner, thread: np.ndarray, start: np.ndarray,
                 end: np.ndarray) -> np.ndarray:
    """Codes of paths such as "Net_0/Linear_3" for operations given by thread, start and end (``NONE`` outside any).

    Args:
        ranges: columns of the module ranges; times on the same clock as ``start`` and ``end``.
        strings: the graph's strings; new paths are added.
    """
    if len(ranges["start"]) == 0 or len(start) == 0:
        return np.full(len(start), NONE, np.int32)
    order = host_order(ranges["thread"], ranges["start"], ranges["duration"], None)
    rows = {name: column[order] for name, column in ranges.items()}
    nesting = nest(rows["thread"], rows["start"], rows["duration"])
    texts = list(strings)
    paths: list[str] = []
    for name, parent in zip(rows["name"].tolist(), nesting.parent.tolist(), strict=True):
        own = texts[name].removeprefix(MODULE_PREFIX)
        paths.append(f"{paths[parent]}/{own}" if parent >= 0 else own)
    codes = strings.codes(paths)
    middle = start + (end - start) // 2
    found = innermost(thread, start, middle, rows["thread"], rows["start"], nesting)
    return np.where(found >= 0, codes[np.maximum(found, 0)], NONE).astype(np.int32)
