"""Trees as columns of parents (-1: a root): the ways up that readers and reports need."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracer.arrays import Bool, Int64

Parents = npt.NDArray[np.integer]


def outermost(parent: Parents) -> Int64:
    """Return the root that each row lies in, itself where it is one; by pointer jumping."""
    top = np.where(parent >= 0, parent, np.arange(len(parent))).astype(np.int64)
    while len(top) and not np.array_equal(following := top[top], top):
        top = following
    return top


def nearest(parent: Parents, chosen: Bool, rows: Int64) -> Int64:
    """Return the first chosen row at each of ``rows`` or above it; -1 where there is none."""
    found = rows.astype(np.int64)
    among = np.append(chosen, False)
    while (above := (found >= 0) & ~among[found]).any():
        found[above] = parent[found[above]]
    return found


def within(parent: Parents, chosen: Bool) -> Bool:
    """Return which rows are chosen or lie in a chosen one."""
    return nearest(parent, chosen, np.arange(len(parent))) >= 0


def depths(parent: Parents) -> Int64:
    """Return how many rows each row lies in, level by level."""
    depth = np.zeros(len(parent), np.int64)
    above = parent.astype(np.int64)
    while (inside := above >= 0).any():
        depth[inside] += 1
        above[inside] = parent[above[inside]]
    return depth
