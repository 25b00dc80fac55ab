"""Alignment of two steps' trees of operations, from the outermost operations inwards.

The children of two aligned operations are two sequences of names. Subtrees alike at both ends are taken off, the rest
is aligned by ``recorded.likeness``: only equal names may meet, and of several ways the one wins whose pairs are most
alike within, in their modules and in their shapes.
"""

from __future__ import annotations

import numpy as np

from graph_predictor.diff.step_tree import StepTree
from graph_predictor.recorded.likeness import most_alike_pairs
from tracer.arrays import Int64
from tracer.graph import NONE


def align_trees(one: StepTree, other: StepTree) -> Int64:
    """Return for every node of ``one`` the node of ``other`` it corresponds to (-1: none). The order is kept."""
    pair = np.full(len(one), NONE, np.int64)
    blocks = [(NONE, NONE)]
    while blocks:
        left, right = blocks.pop()
        a, b = one.children(left), other.children(right)
        if not len(a) or not len(b):
            continue
        head = _alike(one.digest[a], other.digest[b])
        rest_a, rest_b = a[head:], b[head:]
        tail = _alike(one.digest[rest_a][::-1], other.digest[rest_b][::-1])
        for x, y, count in ((a, b, head), (rest_a[len(rest_a) - tail:], rest_b[len(rest_b) - tail:], tail)):
            if count:
                # Equal subtrees side by side are one stretch of rows in both.
                rows = int(x[count - 1] + one.size[x[count - 1]] - x[0])
                pair[x[0]:x[0] + rows] = np.arange(y[0], y[0] + rows)
        middle_a, middle_b = rest_a[: len(rest_a) - tail], rest_b[: len(rest_b) - tail]
        met_a, met_b = _sequences(one, other, middle_a, middle_b)
        same = one.digest[met_a] == other.digest[met_b]
        for x, y, equal in zip(met_a.tolist(), met_b.tolist(), same.tolist(), strict=True):
            if equal:
                pair[x:x + int(one.size[x])] = np.arange(y, y + int(one.size[x]))
            else:
                pair[x] = y
                blocks.append((x, y))
    return pair


def _alike(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many leading values are equal."""
    least = min(len(one), len(other))
    unlike = np.flatnonzero(one[:least] != other[:least])
    return int(unlike[0]) if len(unlike) else least


def _sequences(one: StepTree, other: StepTree, a: Int64, b: Int64) -> tuple[Int64, Int64]:
    """Align two lists of nodes: those of each that have a partner, partner beside partner."""
    if not len(a) or not len(b):
        return a[:0], b[:0]
    if len(a) == 1 and len(b) == 1:
        return (a, b) if one.name[a[0]] == other.name[b[0]] else (a[:0], b[:0])
    columns = [[getattr(tree, key)[nodes].astype(np.int64) for key in ("name", "digest", "module", "shapes")]
               for tree, nodes in ((one, a), (other, b))]
    met = most_alike_pairs(*(np.stack(side) for side in columns))
    rows = np.flatnonzero(met >= 0)
    return a[rows], b[met[rows]]
