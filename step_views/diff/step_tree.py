"""One step's operations as a tree in columns, with codes that two programs share, ready to be aligned.

Nodes are in pre-order: the subtree of node ``i`` is the rows ``i`` to ``i + size[i]``. First come operations of the
step's own thread and of autograd threads, by the time of the outermost operation, then those of other threads. Last
comes device work without a recorded operation, one node each.

Two trees are aligned from the outermost operations inwards. The children of two aligned operations are two sequences of
names. Equal subtrees at both ends are paired first; ``tracer.alignment_loop`` aligns the rest. Only equal names form
pairs. Among several alignments, the one with the most similar pairs is chosen: in subtrees, modules and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from graph_predictor.simulation.host_slices import operation_of
from tracer.alignment_loop import most_alike_pairs
from tracer.arrays import Bool, Int64
from tracer.columns import outermost
from tracer.graph import NONE, ExecutionGraph, OpKind, Phase

UInt64 = npt.NDArray[np.uint64]

LOADER = "enumerate(DataLoader)"
"""Prefix of the names of the profiler's ranges for a data loader, which are treated as operations."""
_BASE = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ over the golden ratio, odd (Knuth)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))


@dataclass(slots=True)
class Vocabulary:
    """Codes of texts, shared by all compared traces; 0 means "none"."""

    texts: list[str] = field(default_factory=lambda: [""])
    codes: dict[str, int] = field(default_factory=lambda: {"": 0})

    def add(self, graph: ExecutionGraph) -> Int64:
        """Return the shared code of every string of a graph, and a last entry for ``NONE``."""
        found = []
        for text in graph.strings:
            code = self.codes.setdefault(text, len(self.texts))
            if code == len(self.texts):
                self.texts.append(text)
            found.append(code)
        return np.array([*found, 0], np.int64)


@dataclass(slots=True)
class StepTree:
    """Nodes of one step, [n].

    Name, module, shapes, types and strides are codes of the ``Vocabulary`` (0: not recorded). ``parent`` is a node,
    ``size`` the number of nodes of the subtree, ``digest`` a hash of the subtree's names. ``op`` is the row of ``ops``;
    if it is -1, the node is device work, with row ``kernel`` of ``kernels``. ``loading`` marks nodes that fetch data.
    """

    name: Int64
    parent: Int64
    size: Int64
    op: Int64
    kernel: Int64
    module: Int64
    shapes: Int64
    dtypes: Int64
    strides: Int64
    digest: UInt64
    phase: Int64
    loading: Bool

    def __len__(self) -> int:
        return len(self.name)

    def children(self, node: int) -> Int64:
        """Return the children of a node in order; for -1 the outermost nodes."""
        low, high = (0, len(self)) if node < 0 else (node + 1, node + int(self.size[node]))
        return low + np.flatnonzero(self.parent[low:high] == node)


def with_loader(graph: ExecutionGraph) -> ExecutionGraph:
    """Return a graph in which the data loader's ranges are operations."""
    codes = [code for code, text in enumerate(graph.strings) if text.startswith(LOADER)]
    if not codes:
        return graph
    kind = np.where(np.isin(graph.ops.name, codes), np.int8(OpKind.OPERATION), graph.ops.kind).astype(np.int8)
    return replace(graph, ops=replace(graph.ops, kind=kind))


def step_tree(graph: ExecutionGraph, codes: Int64, row: int, kernels: Int64) -> StepTree:
    """Return the tree of one step. ``graph`` has its loader as operations (``with_loader``), ``codes`` come from
    ``Vocabulary.add``; ``row`` is -1 for the whole window."""
    ops = graph.ops
    nearest = np.append(operation_of(graph), NONE)
    rows = np.flatnonzero((ops.kind == OpKind.OPERATION) & ((ops.step == row) | (row < 0)))
    place = np.full(len(ops) + 1, NONE, np.int64)
    place[rows] = np.arange(len(rows))
    above = ops.parent[rows]
    parent = place[np.where(above >= 0, nearest[above], NONE)]
    root = outermost(parent)
    thread = int(graph.steps.thread[row]) if row >= 0 else int(ops.thread[rows[0]]) if len(rows) else NONE
    main = np.unique(ops.thread[rows][ops.phase[rows] == Phase.BACKWARD]).tolist()
    aside = ~np.isin(ops.thread[rows], [thread, *main])
    order = np.lexsort((np.arange(len(rows)), ops.start_ns[rows][root], aside[root]))
    position = np.empty(len(rows) + 1, np.int64)
    position[order], position[-1] = np.arange(len(rows)), NONE
    parent, rows = position[parent[order]], rows[order]

    launched = place[nearest[graph.kernels.op[kernels]]] if len(kernels) else kernels
    alone = kernels[launched < 0]
    if len(rows):
        # Work launched before the recording belongs to another step, and is reported separately.
        alone = alone[graph.kernels.launch[alone] >= 0]
    alone = alone[np.argsort(graph.kernels.start_ns[alone], kind="stable")]
    number = len(rows) + len(alone)
    nothing = np.zeros(len(alone), np.int64)
    none = np.full(len(alone), NONE, np.int64)
    parent = np.concatenate([parent, none])
    size = _sizes(parent)
    name = np.concatenate([codes[ops.name[rows]], codes[graph.kernels.name[alone]]])
    texts = [graph.strings[code].startswith(LOADER) for code in ops.name[rows].tolist()]
    loading = np.zeros(number, np.bool_)
    for node in np.flatnonzero(texts).tolist():
        loading[node:node + int(size[node])] = True
    return StepTree(
        name=name, parent=parent, size=size, op=np.concatenate([rows, none]),
        kernel=np.concatenate([np.full(len(rows), NONE, np.int64), alone]),
        module=np.concatenate([codes[ops.module[rows]], nothing]),
        shapes=np.concatenate([codes[ops.shapes[rows]], nothing]),
        dtypes=np.concatenate([codes[ops.dtypes[rows]], nothing]),
        strides=np.concatenate([codes[ops.strides[rows]], nothing]), digest=_digests(name, size),
        phase=np.concatenate([ops.phase[rows].astype(np.int64), nothing]), loading=loading)


def _sizes(parent: Int64) -> Int64:
    """Return the number of nodes of each subtree, level by level."""
    size = np.ones(len(parent), np.int64)
    above = parent
    while (inside := above >= 0).any():
        np.add.at(size, above[inside], 1)
        above = np.where(inside, parent[above], NONE)
    return size


def _digests(name: Int64, size: Int64) -> UInt64:
    """Return a polynomial hash (mod 2⁶⁴) of every subtree: names and sizes in pre-order identify the tree."""
    with np.errstate(over="ignore"):
        tokens = _mixed(name.astype(np.uint64) * np.uint64(0x100000001B3) + size.astype(np.uint64))
        powers = np.cumprod(np.concatenate([np.ones(1, np.uint64), np.full(len(name), _BASE)]))
        inverse = np.cumprod(np.concatenate([np.ones(1, np.uint64), np.full(len(name), _INVERSE)]))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(tokens * powers[:-1])])
        first = np.arange(len(name))
        return np.asarray((sums[first + size] - sums[first]) * inverse[:-1], np.uint64)


def _mixed(values: UInt64) -> UInt64:
    """Return the values mixed by the finaliser of splitmix64 (Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)), np.uint64)


def align_trees(one: StepTree, other: StepTree) -> Int64:
    """Return for every node of ``one`` the corresponding node of ``other`` (-1 for none). The order is kept."""
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
                # Equal neighbouring subtrees are one range of rows in both trees.
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
    """Return the number of equal leading values."""
    least = min(len(one), len(other))
    unlike = np.flatnonzero(one[:least] != other[:least])
    return int(unlike[0]) if len(unlike) else least


def _sequences(one: StepTree, other: StepTree, a: Int64, b: Int64) -> tuple[Int64, Int64]:
    """Align two lists of nodes; return those of each list that have a partner, partners at equal positions."""
    if not len(a) or not len(b):
        return a[:0], b[:0]
    if len(a) == 1 and len(b) == 1:
        return (a, b) if one.name[a[0]] == other.name[b[0]] else (a[:0], b[:0])
    columns = [[getattr(tree, key)[nodes].astype(np.int64) for key in ("name", "digest", "module", "shapes")]
               for tree, nodes in ((one, a), (other, b))]
    met = most_alike_pairs(*(np.stack(side) for side in columns))
    rows = np.flatnonzero(met >= 0)
    return a[rows], b[met[rows]]
