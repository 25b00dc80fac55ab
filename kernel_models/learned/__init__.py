"""Models learned from measurements: boosted trees on physically meant features, as plain arrays evaluated by us.

``BoostedModel`` (``boosted``) prices the calls of one family; ``fit_trees`` (``boosting``) and ``Trees`` (``trees``)
can be used by themselves. scikit-learn is needed to fit, never to predict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_models.learned.bins import Bins
    from kernel_models.learned.boosted import BoostedModel
    from kernel_models.learned.boosting import Boosting, fit_trees
    from kernel_models.learned.trees import Trees

_HOMES = {"Bins": "bins", "BoostedModel": "boosted", "Boosting": "boosting", "Trees": "trees", "fit_trees": "boosting"}

__all__ = ["Bins", "BoostedModel", "Boosting", "Trees", "fit_trees"]


def __getattr__(name: str) -> Any:
    """Import public names on first use: predicting needs numba, and only then."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"kernel_models.learned.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'kernel_models.learned' has no attribute {name!r}")
