"""Boosted regression trees as flat arrays, evaluated without scikit-learn.

A node is one 32-bit word: the feature (8 bits), the last code that goes left (8 bits), and the left child's place in
its tree (16 bits); the right child follows the left one. A leaf is its own left child and everything goes left, so all
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

from kernel_models.compiled import compiled
from kernel_models.learned.bins import Bins

if TYPE_CHECKING:
    from kernel_models.model import Arrays, Float64

_ALWAYS_LEFT = 255
_BLOCK = 16
"""Rows that walk a tree together: enough to hide the loads' latency, few enough to stay in the first cache."""
_FEATURE_BITS, _BIN_BITS = 8, 8


@dataclass(frozen=True, slots=True)
class Trees:
    """A sum of trees: ``baseline`` plus one leaf of each tree.

    Attributes:
        bins: how features become codes.
        words: the nodes, [nodes].
        values: what a leaf adds; 0 for inner nodes, [nodes].
        start: first node of each tree, and the end, [trees + 1].
        depth: levels below each tree's root, [trees].
        baseline: the sum starts here.
    """

    bins: Bins
    words: npt.NDArray[np.uint32]
    values: npt.NDArray[np.float32]
    start: npt.NDArray[np.int32]
    depth: npt.NDArray[np.uint8]
    baseline: float

    @classmethod
    def from_sklearn(cls, models: Sequence[Any], bins: Bins) -> Trees:
        """The mean of ``HistGradientBoostingRegressor`` models that were fitted on ``bins.codes`` of the features.

        Args:
            models: with loss "squared_error", "absolute_error" or "quantile", no missing values, no categories.
            bins: what made the codes.
        """
        words, values, sizes, depths = [], [], [], []
        for model in models:
            for (predictor,) in model._predictors:
                node_words, node_values, depth = _tree(predictor.nodes)
                words.append(node_words)
                values.append(node_values / len(models))
                sizes.append(len(node_words))
                depths.append(depth)
        if not sizes:
            raise ValueError("There are no trees.")
        baseline = float(np.mean([np.ravel(model._baseline_prediction)[0] for model in models]))
        return cls(bins, np.concatenate(words), np.concatenate(values).astype(np.float32),
                   np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32), np.array(depths, np.uint8), baseline)

    def predict(self, features: npt.NDArray[np.float32]) -> Float64:
        """The sum for each row of features, [n, f] → [n]."""
        if features.shape[1] != self.bins.features:
            raise ValueError(f"{features.shape[1]} features were given where the trees know {self.bins.features}.")
        return self.predict_codes(self.bins.codes(features))

    def predict_codes(self, codes: npt.NDArray[np.uint8]) -> Float64:
        """The same from codes."""
        rows = len(codes)
        # A block's rows lie feature by feature, so that a feature's codes of the block share a cache line.
        padded = -(-max(rows, 1) // _BLOCK) * _BLOCK
        blocks = np.zeros((padded, codes.shape[1]), np.uint8)
        blocks[:rows] = codes
        result = np.full(padded, self.baseline)
        _walk(blocks, self.words, self.values, self.start, self.depth, result)
        return result[:rows]

    def arrays(self) -> Arrays:
        """All there is to store."""
        return {"edges": self.bins.edges, "edge_start": self.bins.start, "words": self.words,
                "values": self.values, "start": self.start, "depth": self.depth,
                "baseline": np.array([self.baseline])}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Trees:
        """The trees of ``arrays()``.

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
        child = (self.words >> (_FEATURE_BITS + _BIN_BITS)).astype(np.int64)
        always_left = (self.words >> _FEATURE_BITS & 0xFF) == _ALWAYS_LEFT
        furthest = child + np.where(always_left, 0, 1)
        features = int((self.words & 0xFF).max())
        if (furthest >= np.repeat(sizes, sizes)).any() or features >= self.bins.features:
            raise ValueError("a tree points outside of itself")
        if int(np.diff(self.bins.start).max()) > _ALWAYS_LEFT or not np.isfinite(self.values).all():
            raise ValueError("the arrays of its trees hold impossible values")


def _plain(arrays: Arrays, name: str, kind: Any) -> Any:
    if name not in arrays or arrays[name].ndim != 1:
        raise ValueError(f"the array {name!r} of its trees is missing or has another shape")
    return np.ascontiguousarray(arrays[name], kind)


def _tree(nodes: Any) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float64], int]:
    """Words and values of one of scikit-learn's trees, children side by side, and its depth."""
    order = [0]  # our place → their place
    child: list[int] = []
    level = [0]
    at = 0
    while at < len(order):
        node = nodes[order[at]]
        if node["is_leaf"]:
            child.append(at)
        else:
            child.append(len(order))
            order += [int(node["left"]), int(node["right"])]
            level += [level[at] + 1] * 2
        at += 1
    mine = nodes[order]
    leaf = mine["is_leaf"].astype(bool)
    if len(order) > 1 << 16 or mine["feature_idx"].max() > 255 or mine["is_categorical"].any():
        raise ValueError("These trees have too many nodes or features, or categories.")
    # Codes are whole numbers and thresholds lie between them.
    last_left = np.where(leaf, _ALWAYS_LEFT, np.floor(np.where(leaf, 0.0, mine["num_threshold"]))).astype(np.uint32)
    feature = np.where(leaf, 0, mine["feature_idx"]).astype(np.uint32)
    words = np.array(child, np.uint32) << (_FEATURE_BITS + _BIN_BITS) | last_left << _FEATURE_BITS | feature
    return words.astype(np.uint32), np.where(leaf, mine["value"], 0.0), max(level)


@compiled(nogil=True)
def _walk(codes, words, values, start, depth, result):  # type: ignore[no-untyped-def]
    place = np.zeros(_BLOCK, np.int64)
    for block in range(0, codes.shape[0], _BLOCK):
        rows = codes[block:block + _BLOCK]
        for tree in range(depth.shape[0]):
            first = start[tree]
            for r in range(_BLOCK):
                place[r] = 0
            for _ in range(depth[tree]):
                for r in range(_BLOCK):
                    word = words[first + place[r]]
                    goes_right = rows[r, word & 0xFF] > (word >> 8) & 0xFF
                    place[r] = (word >> 16) + (1 if goes_right else 0)
            for r in range(_BLOCK):
                result[block + r] += values[first + place[r]]
