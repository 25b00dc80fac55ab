"""What was chosen for each family, and what it was chosen from.

Every choice has the least mean of two errors: each train GPU of NeuSight's measurements (P4, P100, V100, T4,
A100-40G) left out in turn and predicted by the others; and the same with the largest quarter of the sizes left out of
the fit and only those predicted. Calls below ``large`` do not count. One weighting serves elementwise work, norms and
softmax, another one both kinds of products: each has the least sum over its groups. ``benchmarks/neusight_protocol.py
--choices`` scores all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from cross_device.figures import Metric
from cross_device.power import PowerLaw
from cross_device.products import FEATURES, Products
from cross_device.rows import Rows
from cross_device.streaming import Streaming
from kernel_models.op_call import Family

METRICS = [Metric(generation, kernels, size, memory, power)
           for generation, kernels, size, memory, power in product(
               (0.3, 1.0), (0.0, 1.0, 3.0), (0.1, 0.5), (0.0, 1.0, 3.0), (1.0, 2.0, 4.0))]
"""Every weighting tried."""

_FEATURES = {
    "all": FEATURES,
    "no weights": tuple(f for f in FEATURES if f not in ("weights", "stride", "reused")),
    "no size": tuple(f for f in FEATURES if f not in ("weights", "stride", "duration", "padding")),
    "no duration": tuple(f for f in FEATURES if f not in ("weights", "stride", "reused", "duration", "padding")),
}

LAWS = [PowerLaw(beta=beta, static=static) for beta in (0.0, 0.5, 1.0) for static in (0.15, 0.25, 0.35)]
"""Every shape of the power law tried; scored on the best rates of a left-out GPU."""


def recipes(family: Family) -> dict[str, Any]:
    """Every way of fitting a family that was tried, by name."""
    if family is Family.ELEMENTWISE:
        return {"streaming": Streaming()}
    if family is Family.GEMM:
        return {name: Products(law=_LAW, features=features) for name, features in _FEATURES.items()}
    return {f"drawn {drawn:g}": Rows(norm=family is Family.NORM, drawn=drawn) for drawn in (0.1, 0.3, 1.0, 3.0, 30.0)}


@dataclass(frozen=True, slots=True)
class Choice:
    """A family's recipe by name, and the weighting of its sources."""

    recipe: str
    metric: Metric


_MEMORY_BOUND = Metric(generation=0.3, kernels=3.0, size=0.1, memory=3.0, power=2.0)
_PRODUCTS = Metric(generation=0.3, kernels=3.0, size=0.1, memory=1.0, power=1.0)
_LAW = PowerLaw(beta=0.5, static=0.15)
_CHOSEN: dict[tuple[Family, bool], Choice] = {
    (Family.ELEMENTWISE, False): Choice("streaming", _MEMORY_BOUND),
    (Family.NORM, False): Choice("drawn 0.1", _MEMORY_BOUND),
    (Family.SOFTMAX, False): Choice("drawn 0.1", _MEMORY_BOUND),
    (Family.GEMM, False): Choice("all", _PRODUCTS),
    (Family.GEMM, True): Choice("all", _PRODUCTS),
}


def chosen(family: Family, batched: bool = False) -> Choice:
    """What was chosen for a family."""
    return _CHOSEN[family, batched]


def recipe_of(family: Family, batched: bool = False) -> Any:
    """The chosen way of fitting."""
    return recipes(family)[chosen(family, batched).recipe]


def metric_of(family: Family, batched: bool = False) -> Metric:
    """The chosen weighting."""
    return chosen(family, batched).metric
