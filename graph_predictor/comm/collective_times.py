"""Times of a graph's collectives on a topology: what each moves, where its group lies, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graph_predictor.comm.pricing import recorded_call
from kernel_models.collectives import CollectiveBatch, CollectiveCall, CommProfile, CommTimes, Level, Topology
from kernel_models.collectives import topology as find_topology
from kernel_models.collectives.topology import node_names, node_type
from kernel_models.device import DeviceSpec
from tracer.arrays import Float64, Int64
from tracer.graph import ExecutionGraph
from tracer.parallel_plan import PlanError

WIDE = 0.7
"""Log half width of the 80% interval of a collective that no model knows, as of one without a topology."""


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """What prices the collectives of a cluster: its topology, and measurements of it where there are any.

    Attributes:
        backend: who carries them out, such as "nccl" or "gloo"; by default NCCL where that was measured, else what was.

    Raises:
        PlanError: nothing is known of that backend there.
    """

    topology: Topology
    profile: CommProfile | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        measured = [] if self.profile is None else self.profile.backend_names()
        usual = "gloo" if self.topology.node.link == "loopback" else "nccl"
        if self.backend in (None, *measured) or (self.backend == usual and not measured):
            return
        known = f"the profile has {', '.join(measured)}" if measured else (
            f"without measurements only {usual}'s are known there")
        raise PlanError(f"Nothing is known of {self.backend}'s collectives on {self.topology.name}: {known}; measure "
                        "them (foretrace comm bench, or fit its logs) and give --comm-profile.")

    def predict(self, calls: Sequence[CollectiveCall]) -> CommTimes:
        """Times of calls, in their order."""
        if not calls:
            return CommTimes.empty(0)
        profile = self.profile or CommProfile(self.topology)
        backend = self.backend if self.backend in profile.backends else None  # else the data sheet's formulas
        return profile.predict(CollectiveBatch.from_calls(list(calls)), backend, on=self.topology)

    def check_fits(self, world_size: int) -> None:
        """Raise ``PlanError`` if the cluster has fewer GPUs than the job has ranks."""
        if world_size > self.topology.gpus:
            per = self.topology.node.gpus
            raise PlanError(f"{world_size:,} ranks do not fit on {self.topology.name}, which has "
                            f"{self.topology.gpus:,} GPUs; name a larger one, such as {self.topology.node.name}x"
                            f"{-(-world_size // per)}.")


@dataclass(frozen=True, slots=True)
class PricedCollectives:
    """Of each row of a collectives table: ns, ``Source``, and the logs of the 80% interval's ends over the time.

    ``known`` is false where neither kind nor size tells what is moved; the other columns say nothing there.
    """

    known: np.ndarray
    ns: Float64
    source: Int64
    low: Float64
    high: Float64


def price_table(graph: ExecutionGraph, model: CollectiveModel) -> PricedCollectives:
    """Price all collectives of a graph, recorded or traced by shapes."""
    rows = len(graph.collectives)
    calls = [recorded_call([graph], [{row: row}], [(0, row)], model.topology) for row in range(rows)]
    known = np.array([call is not None for call in calls], np.bool_)
    times = model.predict([call for call in calls if call is not None])
    us = np.maximum(times.time_us, 1e-3)
    out = PricedCollectives(known, np.zeros(rows), np.zeros(rows, np.int64), np.full(rows, -WIDE), np.full(rows, WIDE))
    out.ns[known] = times.time_us * 1e3
    out.source[known] = [int(Level(level).source) for level in times.level.tolist()]
    out.low[known] = np.log(np.maximum(times.low_us, 1e-3) / us)
    out.high[known] = np.log(np.maximum(times.high_us, 1e-3) / us)
    return out


def topology_of(device: DeviceSpec, world_size: int) -> Topology:
    """The usual cluster of a device for so many ranks: its maker's eight-GPU node on that node's own network.

    Raises:
        PlanError: no node type has the device.
    """
    names = [name for name in node_names() if node_type(name).device == device.name]
    if not names:
        raise PlanError(f"No node type known to foretrace has the device {device.name}; name the cluster with "
                        "--topology (foretrace comm predict --help lists how).")
    name = min(names, key=lambda n: (not n.startswith("dgx"), -node_type(n).gpus, n))
    nodes = -(-max(world_size, 1) // node_type(name).gpus)
    return find_topology(f"{name}x{nodes}" if nodes > 1 else name)
