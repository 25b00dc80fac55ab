"""The device and the cluster that plans are tried on where a test names no other."""

from __future__ import annotations

import pytest

from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.device import device
from planner.parallel.layer_costs import LayerCosts


@pytest.fixture(scope="module")
def pieces() -> LayerCosts:
    return LayerCosts(device("h200-sxm"))


@pytest.fixture(scope="module")
def cluster() -> CollectiveModel:
    return CollectiveModel(find_topology("dgx-h200x2"))
