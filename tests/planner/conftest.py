"""The devices and the cluster that plans are tried on where a test names no other."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest

from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.device import device
from planner.parallel.layer_costs import LayerCosts
from tracer.job import Job, read_job


@pytest.fixture(scope="session")
def pieces() -> LayerCosts:
    return LayerCosts(device("h200-sxm"))


@pytest.fixture(scope="session")
def hopper() -> LayerCosts:
    return LayerCosts(device("h100-sxm"))


@pytest.fixture(scope="session")
def cluster() -> CollectiveModel:
    return CollectiveModel(find_topology("dgx-h200x2"))


@pytest.fixture(scope="session")
def node() -> CollectiveModel:
    return CollectiveModel(find_topology("dgx-h100"))


@lru_cache(maxsize=3)
def _job(paths: tuple[str, ...], **how: object) -> Job:
    return read_job(list(paths), **how)  # type: ignore[arg-type]


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """What reads a recording, once for all tests; shardings and served steps are read with it."""
    def read(paths: list[str], **how: object) -> Job:
        return _job(tuple(paths), **how)

    for module in ("planner.serving.trace_calibration", "planner.sharding.sources"):
        monkeypatch.setattr(f"{module}.read_job", read)
    return read
