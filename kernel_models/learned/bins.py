"""Features as codes of one byte: the number of a feature's edges that lie below the value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernel_models.learned.binning_loop import find_codes

Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
MOST_EDGES = 254
"""Per feature: codes 0 to 254, so that 255 can mean "always left" in a leaf."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Edges of every feature, ascending: feature f has ``edges[start[f]:start[f + 1]]``."""

    edges: Float32
    start: npt.NDArray[np.int32]

    @property
    def features(self) -> int:
        """Return how many features."""
        return len(self.start) - 1

    @classmethod
    def of(cls, features: Float32, most: int = MOST_EDGES) -> Bins:
        """Edges between the values that occur, at quantiles of the rows where there are more than ``most``."""
        found = []
        places = np.quantile(np.arange(len(features)), np.linspace(0, 1, most + 1), method="inverted_cdf")
        for column in np.sort(np.asarray(features, np.float32).T, axis=1):
            values = _distinct(column)
            if len(values) > most + 1:
                values = _distinct(column[places])
            # Halfway between neighbours; float32 may round that up to the larger one, which would then go left.
            middle = (values[:-1].astype(np.float64) + values[1:]) / 2
            edges = middle.astype(np.float32)
            found.append(np.where(edges >= values[1:], values[:-1], edges).astype(np.float32))
        start = np.concatenate([[0], np.cumsum([len(edges) for edges in found])]).astype(np.int32)
        return cls(np.concatenate(found) if found else np.zeros(0, np.float32), start)

    def codes(self, features: Float32) -> Codes:
        """Codes of rows × features, [n, f]: ``code <= j`` exactly where ``value <= edges[j]``."""
        rows = np.ascontiguousarray(features, np.float32)
        result = np.zeros(rows.shape, np.uint8)
        find_codes(rows, self.edges, self.start, result)
        return result


def _distinct(ascending: Float32) -> Float32:
    """Return each of ascending values once."""
    return ascending[np.r_[True, ascending[1:] != ascending[:-1]]]
