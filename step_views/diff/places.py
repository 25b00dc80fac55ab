"""Places in two aligned programs: an aligned operation, or a spot where operations were added or lost.

::

    A   |- linear -|- relu -|               |- linear -|
    B   |- linear -|- relu -|- layer_norm --|- linear -|
    place   0          1        hunk (before 2)     2

Time between a hunk's neighbours, in either program, belongs to the hunk: without the added operation there is one pause
before the second ``linear``, with it there are two.

A hunk is named by its operations: added, lost, or replacing others. The backward of an added operation has the same
cause: autograd's sequence number links it to its forward. The same holds for an unchanged operation that works
differently because its inputs have other strides (a copy in place of a view).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from graph_predictor.recorded.module_paths import is_collective, plain_name
from step_views.diff.result import DifferenceKind
from step_views.diff.step_tree import StepTree, Vocabulary
from tracer.arrays import Int64
from tracer.errors import listed
from tracer.graph import HOST_READ, NONE, ExecutionGraph, LaunchKind, Phase

MOST_NAMES = 5  # chosen: they fit one line


@dataclass(slots=True)
class Hunk:
    """Operations without a partner at one spot: outermost nodes of A's tree (``removed``) and of B's (``added``)."""

    removed: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Places:
    """All places of two aligned trees. Place numbers: pairs first, then ``end``, the hunks, and ``irregular``.

    ``end`` is the end of a list of operations; ``irregular`` is for operations of only some steps of a program.
    """

    left: Int64
    """A's node of each pair, in order."""
    right: Int64
    hunks: list[Hunk]
    hunk_at: dict[tuple[int, int], int]
    """Hunk, by the place of its parent (-1 for none) and the place of the next aligned sibling (``end`` for none)."""
    place_a: Int64
    """Place of each node of A's tree."""
    place_b: Int64

    @property
    def pairs(self) -> int:
        """Number of aligned pairs."""
        return len(self.left)

    @property
    def end(self) -> int:
        """The place after the last operation."""
        return len(self.left)

    @property
    def irregular(self) -> int:
        """The place of operations that are not in every step."""
        return len(self.left) + 1 + len(self.hunks)

    def of_hunk(self, hunk: int) -> int:
        """Return the place of a hunk."""
        return len(self.left) + 1 + hunk


def find_places(one: StepTree, other: StepTree, pair: Int64) -> Places:
    """Number the places of two trees. ``pair`` is the partner in B of every node of A (-1 for none)."""
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
    """Return for every node the place of the first aligned node among it and its later siblings (``end`` for none)."""
    order = np.lexsort((np.arange(len(tree)), tree.parent))
    aligned = (place[order] >= 0) & (place[order] < end)
    # Backwards over all lists of siblings; a node found in the next list does not count.
    at = np.where(aligned, np.arange(len(order)), len(order))
    at = np.minimum.accumulate(at[::-1])[::-1]
    found = np.append(order, NONE)[at]
    same = (found >= 0) & (tree.parent[found] == tree.parent[order])
    result = np.empty(len(tree), np.int64)
    result[order] = np.where(same, place[found], end)
    return result


@dataclass(frozen=True, slots=True)
class HunkCause:
    """Kind and name of a hunk's cause.

    Attributes:
        counts: whether it counts as a cause; false for a backward, which belongs to its forward.
        only: the side that alone has it; ``None`` if both sides have operations here.
        root: the hunk from which its name comes.
    """

    kind: DifferenceKind
    what: str
    module: str
    counts: bool
    only: DifferenceKind | None
    root: int


def hunk_causes(places: Places, one: StepTree, other: StepTree, graphs: tuple[ExecutionGraph, ExecutionGraph],
                vocabulary: Vocabulary) -> list[HunkCause]:
    """Return the cause of every hunk."""
    if not places.hunks:
        return []
    sides = [(one, places.place_a, graphs[0], "removed"), (other, places.place_b, graphs[1], "added")]
    forward: dict[int, int] = {}
    reading, gathering = set(), set()
    for tree, place, graph, side in sides:
        forward |= _forward_hunks(tree, place, graph, places, side)
        first = places.of_hunk(0)
        marked = _marked(tree, graph, vocabulary)
        reading |= set((place[marked[0]] - first).tolist())
        gathering |= set((place[marked[1]] - first).tolist())
    _follow_strides(forward, places, one, other)
    found = []
    for at in range(len(places.hunks)):
        root, seen = at, {at}
        while (before := forward.get(root)) is not None and before not in seen:
            root = before
            seen.add(root)
        found.append(_named(places.hunks[root], one, other, vocabulary, reads=root in reading,
                            gathers=root in gathering, counts=root == at, root=root))
    return found


def _named(hunk: Hunk, one: StepTree, other: StepTree, vocabulary: Vocabulary, *, reads: bool, gathers: bool,
           counts: bool, root: int) -> HunkCause:
    removed = _listed(one, hunk.removed, vocabulary)
    added = _listed(other, hunk.added, vocabulary)
    what = f"{removed} → {added}" if removed and added else removed or added
    only = None if removed and added else DifferenceKind.REMOVED if removed else DifferenceKind.ADDED
    kind = only or DifferenceKind.REPLACED
    if gathers or reads:
        kind = DifferenceKind.COLLECTIVE if gathers else DifferenceKind.SYNC
        if only is not None:
            what = f"{what} ({only.value})"
    tree, node = (other, hunk.added[0]) if hunk.added else (one, hunk.removed[0])
    return HunkCause(kind, what, vocabulary.texts[int(tree.module[node])], counts, only, root)


def _listed(tree: StepTree, nodes: list[int], vocabulary: Vocabulary) -> str:
    """Return the nodes' names with their numbers, most frequent first."""
    names = Counter(plain_name(vocabulary.texts[code]) for code in tree.name[nodes].tolist())
    return listed([f"{name} ×{number}" if number > 1 else name for name, number in names.most_common()], MOST_NAMES)


def _follow_strides(causes: dict[int, int], places: Places, one: StepTree, other: StepTree) -> None:
    """Make the preceding hunk the cause of hunks inside aligned operations whose inputs have other strides."""
    unlike = np.zeros(places.pairs, np.bool_)
    a, b = one.strides[places.left], other.strides[places.right]
    unlike[:] = (a > 0) & (b > 0) & (a != b) & (one.shapes[places.left] == other.shapes[places.right])
    keys = list(places.hunk_at)
    for tree, nodes in ((other, places.right), (one, places.left)):
        side = "added" if tree is other else "removed"
        where = sorted((getattr(hunk, side)[0], at) for at, hunk in enumerate(places.hunks) if getattr(hunk, side))
        for (_, before), (_, at) in pairwise(where):
            above = keys[at][0]
            node = int(nodes[above]) if above >= 0 else NONE
            place = places.place_b if tree is other else places.place_a
            while node >= 0:
                if unlike[place[node]]:
                    causes.setdefault(at, before)
                    break
                node = int(tree.parent[node])


def _forward_hunks(tree: StepTree, place: Int64, graph: ExecutionGraph, places: Places, side: str) -> dict[int, int]:
    """Return, for hunks of backward operations, the hunk of the forward operation."""
    nodes = np.flatnonzero(tree.op >= 0)
    sequence = graph.ops.sequence[tree.op[nodes]]
    backward = tree.phase[nodes] == Phase.BACKWARD
    with_number = sequence >= 0
    ahead = with_number & ~backward
    # Several operations may have one number; the last of them made the node of autograd's graph.
    source = dict(zip(sequence[ahead].tolist(), nodes[ahead].tolist(), strict=True))
    first = places.of_hunk(0)
    found: dict[int, int] = {}
    behind = with_number & backward & (place[nodes] >= first) & (place[nodes] < places.irregular)
    for node, number in zip(nodes[behind].tolist(), sequence[behind].tolist(), strict=True):
        origin = source.get(number)
        if origin is None:
            continue
        own, of_forward = int(place[node]) - first, int(place[origin]) - first
        if of_forward >= 0 and of_forward != own and getattr(places.hunks[of_forward], side):
            found.setdefault(own, of_forward)
    return found


def _marked(tree: StepTree, graph: ExecutionGraph, vocabulary: Vocabulary) -> tuple[Int64, Int64]:
    """Return the nodes that make the host wait for a value or for the device, and nodes that are collectives."""
    texts = vocabulary.texts
    reads = tree.name == vocabulary.codes.get(HOST_READ, -1)
    codes = np.array([is_collective(text) for text in texts], np.bool_)
    gathers = codes[tree.name]
    node_of = np.full(len(graph.ops) + 1, -1, np.int64)
    nodes = np.flatnonzero(tree.op >= 0)
    node_of[tree.op[nodes]] = nodes
    blocking = graph.launches.op[graph.launches.kind == LaunchKind.BLOCKING_SYNC]
    waiting = node_of[blocking]
    reads[waiting[waiting >= 0]] = True
    collective = node_of[graph.collectives.op]
    gathers[collective[collective >= 0]] = True
    return np.flatnonzero(reads), np.flatnonzero(gathers)
