"""Boosted regression trees as flat arrays, stored and evaluated by foretrace; ``boosting`` grows them.

A node is one 32-bit word: the feature (8 bits), the last code that goes left (8 bits), and the left child's index in
its tree (16 bits). The right child follows the left one. A leaf is its own left child and every code goes left. So all
rows of a block walk a tree in step, without a branch, for as many levels as the tree is deep.

      word  = child << 16 | bin << 8 | feature
      next  = child + (code[feature] > bin)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kernel_models.learned.pricing_loop import BLOCK, find_codes, walk_trees

if TYPE_CHECKING:
    from kernel_models.op_call import Arrays, Float64

Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
MOST_EDGES = 254
"""Most edges per feature: codes are 0 to 254, so that 255 can mean "always left" in a leaf."""
FEATURE_BITS, CHILD_BITS, ALWAYS_LEFT = 8, 16, 255
"""First bits of the bin and of the child in a node's word, and the bin of a leaf."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Features as codes of one byte: the number of a feature's edges below the value.

    Edges are ascending: feature f has ``edges[start[f]:start[f + 1]]``."""

    edges: Float32
    start: npt.NDArray[np.int32]

    @property
    def features(self) -> int:
        """Return the number of features."""
        return len(self.start) - 1

    @classmethod
    def of(cls, features: Float32) -> Bins:
        """Return bins with edges between the values, at quantiles where there are more than ``MOST_EDGES``."""
        found = []
        places = np.quantile(np.arange(len(features)), np.linspace(0, 1, MOST_EDGES + 1), method="inverted_cdf")
        for column in np.sort(np.asarray(features, np.float32).T, axis=1):
            values = _distinct(column)
            if len(values) > MOST_EDGES + 1:
                values = _distinct(column[places])
            # Halfway between neighbours; float32 may round that up to the larger value, which would then go left.
            middle = (values[:-1].astype(np.float64) + values[1:]) / 2
            edges = middle.astype(np.float32)
            found.append(np.where(edges >= values[1:], values[:-1], edges).astype(np.float32))
        start = np.concatenate([[0], np.cumsum([len(edges) for edges in found])]).astype(np.int32)
        return cls(np.concatenate(found) if found else np.zeros(0, np.float32), start)

    def codes(self, features: Float32) -> Codes:
        """Return the codes of rows × features, [n, f]: ``code <= j`` exactly where ``value <= edges[j]``."""
        rows = np.ascontiguousarray(features, np.float32)
        result = np.zeros(rows.shape, np.uint8)
        find_codes(rows, self.edges, self.start, result)
        return result


def _distinct(ascending: Float32) -> Float32:
    """Return the distinct values among ascending ones."""
    return ascending[np.r_[True, ascending[1:] != ascending[:-1]]]


@dataclass(frozen=True, slots=True)
class Trees:
    """A sum of trees: ``baseline`` plus one leaf of each tree.

    Attributes:
        bins: mapping of features to codes.
        words: the nodes, [nodes].
        values: value of a leaf; 0 for inner nodes, [nodes].
        start: first node of each tree, and the end, [trees + 1].
        depth: levels below each tree's root, [trees].
        baseline: start of the sum.
    """

    bins: Bins
    words: npt.NDArray[np.uint32]
    values: npt.NDArray[np.float32]
    start: npt.NDArray[np.int32]
    depth: npt.NDArray[np.uint8]
    baseline: float

    @classmethod
    def mean(cls, parts: Sequence[Trees], weights: Sequence[float]) -> Trees:
        """Return the weighted mean of several ``Trees``, all with the bins of the first."""
        shares = np.array(weights) / sum(weights)
        start = [part.start[1:] + sum(len(before.words) for before in parts[:i]) for i, part in enumerate(parts)]
        return cls(parts[0].bins, np.concatenate([part.words for part in parts]),
                   np.concatenate([part.values * np.float32(share) for part, share in zip(parts, shares, strict=True)]),
                   np.concatenate([[0], *start]).astype(np.int32), np.concatenate([part.depth for part in parts]),
                   float(sum(part.baseline * share for part, share in zip(parts, shares, strict=True))))

    def part(self, first: int, end: int) -> Trees:
        """Return trees ``first`` to ``end`` (exclusive), whose sum begins at 0."""
        nodes = slice(self.start[first], self.start[end])
        return Trees(self.bins, self.words[nodes], self.values[nodes], self.start[first:end + 1] - self.start[first],
                     self.depth[first:end], 0.0)

    def predict(self, features: Float32) -> Float64:
        """Return the sum for each row of features, [n, f] → [n]."""
        if features.shape[1] != self.bins.features:
            raise ValueError(f"{features.shape[1]} features were given where the trees know {self.bins.features}.")
        return self.predict_codes(self.bins.codes(features))

    def predict_codes(self, codes: Codes) -> Float64:
        """Return the sum for each row of codes, [n, f] → [n]."""
        rows = len(codes)
        # Rows of a block are stored feature by feature, so that a feature's codes of the block share a cache line.
        padded = -(-max(rows, 1) // BLOCK) * BLOCK
        blocks = np.zeros((padded, codes.shape[1]), np.uint8)
        blocks[:rows] = codes
        result = np.full(padded, self.baseline)
        walk_trees(blocks, self.words, self.values, self.start, self.depth, np.empty(BLOCK, np.int64), result)
        return result[:rows]

    def arrays(self) -> Arrays:
        """Return the trees' arrays by name, to be stored."""
        return {"edges": self.bins.edges, "edge_start": self.bins.start, "words": self.words,
                "values": self.values, "start": self.start, "depth": self.depth,
                "baseline": np.array([self.baseline])}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Trees:
        """Return the trees that ``arrays()`` stored.

        Raises:
            ValueError: the arrays do not fit together; walking them would read outside of them.
        """
        trees = cls(Bins(_plain(arrays, "edges", np.float32), _plain(arrays, "edge_start", np.int32)),
                    _plain(arrays, "words", np.uint32), _plain(arrays, "values", np.float32),
                    _plain(arrays, "start", np.int32), _plain(arrays, "depth", np.uint8),
                    float(_plain(arrays, "baseline", np.float64)[0]))
        trees._check()
        return trees

    def _check(self) -> None:
        starts_fit = all(
            len(start) >= 2 and start[0] == 0 and start[-1] == total and bool((np.diff(start) >= least).all())
            for start, total, least in ((self.bins.start, len(self.bins.edges), 0), (self.start, len(self.words), 1)))
        if not starts_fit or len(self.values) != len(self.words) or len(self.depth) != len(self.start) - 1:
            raise ValueError("the arrays of its trees do not fit together")
        sizes = np.diff(self.start)
        child = (self.words >> CHILD_BITS).astype(np.int64)
        always_left = (self.words >> FEATURE_BITS & 0xFF) == ALWAYS_LEFT
        furthest = child + np.where(always_left, 0, 1)
        features = int((self.words & 0xFF).max())
        if (furthest >= np.repeat(sizes, sizes)).any() or features >= self.bins.features:
            raise ValueError("a tree points outside of itself")
        if int(np.diff(self.bins.start).max()) > ALWAYS_LEFT or not np.isfinite(self.values).all():
            raise ValueError("the arrays of its trees hold impossible values")


def _plain(arrays: Arrays, name: str, kind: Any) -> Any:
    if name not in arrays or arrays[name].ndim != 1:
        raise ValueError(f"the array {name!r} of its trees is missing or has another shape")
    return np.ascontiguousarray(arrays[name], kind)
