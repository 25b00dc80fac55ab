"""Trees by absolute error: ``foretrace fit`` boosts by squared error."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel_models.learned.boosting import Boosting, grow_trees
from kernel_models.learned.trees import Bins, Trees


def fit_absolute(features: npt.NDArray[np.float32], target: npt.NDArray[np.float64], *, iterations: int,
                 learning_rate: float, leaves: int, least_rows: int = 20) -> Trees:
    """Boosted trees of features [n, f] and a target [n]; see ``Boosting`` for the settings."""
    bins = Bins.of(features)
    return grow_trees(bins, bins.codes(features), target, Boosting(iterations, learning_rate, leaves, 1.0, least_rows),
                      0, loss="absolute_error")
