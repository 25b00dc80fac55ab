"""Places in two aligned programs: an aligned operation, or a spot where operations were added or lost.

::

    A   |- linear -|- relu -|               |- linear -|
    B   |- linear -|- relu -|- layer_norm --|- linear -|
    place   0          1        hunk (before 2)     2

Time between a hunk's neighbours, in either program, is the hunk's: without the added operation there is one pause
before the second ``linear``, with it there are two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from graph_predictor.diff.step_tree import StepTree
from tracer.arrays import Int64
from tracer.graph import NONE


@dataclass(slots=True)
class Hunk:
    """Operations of A, of B, or of both, in the place of each other: outermost nodes of the two trees."""

    removed: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Places:
    """All places of two aligned trees. Place numbers: pairs first, then ``end``, the hunks, and ``irregular``.

    ``before_end`` is the end of a list of operations; ``irregular`` holds what only some steps of a program have.
    """

    left: Int64
    """Node of A's tree of each pair, in order."""
    right: Int64
    hunks: list[Hunk]
    hunk_at: dict[tuple[int, int], int]
    """Hunk by the place of the parent (-1: none) and of the next aligned sibling (``end``: none)."""
    place_a: Int64
    """Place of every node of A's tree."""
    place_b: Int64

    @property
    def pairs(self) -> int:
        """Number of aligned pairs."""
        return len(self.left)

    @property
    def end(self) -> int:
        """The place behind the last operation."""
        return len(self.left)

    @property
    def irregular(self) -> int:
        """The place of what is not in every step."""
        return len(self.left) + 1 + len(self.hunks)

    def of_hunk(self, hunk: int) -> int:
        """Place of a hunk."""
        return len(self.left) + 1 + hunk


def find_places(one: StepTree, other: StepTree, pair: Int64) -> Places:
    """Number the places of two trees.

    Args:
        one, other: the trees of A and B.
        pair: for every node of A its partner in B (-1: none).
    """
    left = np.flatnonzero(pair >= 0)
    right = pair[left]
    place_a, place_b = np.full(len(one), NONE, np.int64), np.full(len(other), NONE, np.int64)
    place_a[left], place_b[right] = np.arange(len(left)), np.arange(len(left))
    places = Places(left, right, [], {}, place_a, place_b)
    for tree, place, side in ((one, place_a, "removed"), (other, place_b, "added")):
        following = next_aligned(tree, place, len(left))
        lone = np.flatnonzero(place < 0)
        above = tree.parent[lone]
        outermost = lone[(above < 0) | (place[above] >= 0)]
        for node in outermost.tolist():
            parent = int(tree.parent[node])
            key = (int(place[parent]) if parent >= 0 else NONE, int(following[node]))
            at = places.hunk_at.setdefault(key, len(places.hunks))
            if at == len(places.hunks):
                places.hunks.append(Hunk())
            getattr(places.hunks[at], side).append(node)
    for tree, place, side in ((one, place_a, "removed"), (other, place_b, "added")):
        for at, hunk in enumerate(places.hunks):
            for node in getattr(hunk, side):
                place[node:node + int(tree.size[node])] = places.of_hunk(at)
    return places


def next_aligned(tree: StepTree, place: Int64, end: int) -> Int64:
    """For every node the place of the first aligned one among itself and its later siblings (``end``: none)."""
    order = np.lexsort((np.arange(len(tree)), tree.parent))
    aligned = (place[order] >= 0) & (place[order] < end)
    # Backwards over all lists of siblings; what was found in the next list does not count.
    at = np.where(aligned, np.arange(len(order)), len(order))
    at = np.minimum.accumulate(at[::-1])[::-1]
    found = np.append(order, NONE)[at]
    same = (found >= 0) & (tree.parent[found] == tree.parent[order])
    result = np.empty(len(tree), np.int64)
    result[order] = np.where(same, place[found], end)
    return result
