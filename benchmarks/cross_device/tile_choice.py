"""Which output tile a GPU's library takes for a product, learned from the names of the kernels that ran.

The choice is a decision tree over the shape; it is kept as plain arrays. Names such as ``ampere_sgemm_128x64_tn``
give the tile; its first number lies along the output's columns (n), as the launch grids show.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cross_device.figures import Figures
from kernel_models.op_call import Arrays
from tracer.arrays import Float64

_TILE = re.compile(r"_(\d{1,5})x(\d{1,5})(?:x\d+)?_")
_LEAVES, _LEAST_ROWS = 100, 15


def tiles_of(kernels: npt.NDArray[np.object_]) -> Float64:
    """Tile along n and along m of each kernel's name, [n, 2]; NaN where the name gives none."""
    found = {}
    for name in set(kernels):
        match = _TILE.search(str(name))
        found[name] = (float(match[1]), float(match[2])) if match else (np.nan, np.nan)
    return np.array([found[name] for name in kernels], np.float64).reshape(len(kernels), 2)


def _features(figures: Figures, dims: Float64) -> Float64:
    batch, m, n, k = dims.T
    fills = [size / (np.ceil(size / tile) * tile) for tile in (128, 64, 32) for size in (m, n)]
    sizes = [np.log2(size) for size in (m, n, k, batch, batch * m * n / figures.units)]
    return np.stack([*sizes, *fills], axis=1)


@dataclass(frozen=True, slots=True)
class TileChoice:
    """A decision tree: inner nodes compare a feature, leaves name a tile.

    Attributes:
        feature: of each node; −1 for leaves.
        threshold: values up to this go left.
        left, right: children.
        tile: of a leaf, along n and along m, [nodes, 2].
    """

    feature: npt.NDArray[np.int32]
    threshold: Float64
    left: npt.NDArray[np.int32]
    right: npt.NDArray[np.int32]
    tile: Float64

    @classmethod
    def fit(cls, figures: Figures, dims: Float64, tiles: Float64) -> TileChoice:
        """Learn from shapes [n, 4] and the tiles [n, 2] that ran."""
        from sklearn.tree import DecisionTreeClassifier

        kinds, label = np.unique(tiles, axis=0, return_inverse=True)
        model = DecisionTreeClassifier(max_leaf_nodes=_LEAVES, min_samples_leaf=_LEAST_ROWS, random_state=0)
        tree = model.fit(_features(figures, dims), label.ravel()).tree_
        best = kinds[model.classes_[np.argmax(tree.value[:, 0, :], axis=1)]]
        feature = np.where(tree.children_left < 0, -1, tree.feature)
        return cls(feature.astype(np.int32), tree.threshold.astype(np.float64), tree.children_left.astype(np.int32),
                   tree.children_right.astype(np.int32), best)

    def predict(self, figures: Figures, dims: Float64) -> Float64:
        """Tiles of shapes on a device, [n, 2]."""
        features = _features(figures, dims).astype(np.float32)
        node = np.zeros(len(dims), np.int32)
        while True:
            feature = self.feature[node]
            inner = np.flatnonzero(feature >= 0)
            if not len(inner):
                return self.tile[node]
            at = node[inner]
            goes_left = features[inner, feature[inner]] <= self.threshold[at]
            node[inner] = np.where(goes_left, self.left[at], self.right[at])

    def arrays(self) -> Arrays:
        """What a profile stores."""
        return {"feature": self.feature, "threshold": self.threshold, "left": self.left, "right": self.right,
                "tile": self.tile}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> TileChoice:
        """The inverse of ``arrays``."""
        return cls(np.asarray(arrays["feature"], np.int32), np.asarray(arrays["threshold"], np.float64),
                   np.asarray(arrays["left"], np.int32), np.asarray(arrays["right"], np.int32),
                   np.asarray(arrays["tile"], np.float64))
