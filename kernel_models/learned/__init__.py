"""Models learned from measurements: boosted trees on physically meant features, as plain arrays evaluated by us.

``BoostedModel`` (``boosted``) prices the calls of one family; ``fit_trees`` (``boosting``) and ``Trees`` (``trees``)
can be used by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from kernel_models.learned.bins import Bins
    from kernel_models.learned.boosted import BoostedModel
    from kernel_models.learned.boosting import Boosting, fit_trees
    from kernel_models.learned.trees import Trees

_HOMES = {
    "Bins": "kernel_models.learned.bins",
    "BoostedModel": "kernel_models.learned.boosted",
    "Boosting": "kernel_models.learned.boosting",
    "Trees": "kernel_models.learned.trees",
    "fit_trees": "kernel_models.learned.boosting",
}

__all__ = ["Bins", "BoostedModel", "Boosting", "Trees", "fit_trees"]

__getattr__, __dir__ = lazily(__name__, _HOMES)
