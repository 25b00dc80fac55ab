"""``price_calls``: what collectives cost, the one place where their price comes from.

Each collective gets the best that is known of it (``Level``):

=====================  ===============================================================================================
measured, fitted       measurements of the cluster: curves, their neighbours, an α–β model fitted to them (``profile``)
data sheet             NCCL's formulas with the published constants of the cluster's topology (``datasheet``)
links                  no cluster is given: a ring over the links of one node of the device, an assumption (here)
=====================  ===============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kernel_models.collectives.backends import Backends, usual_backend
from kernel_models.collectives.call import BARRIER_BYTES, CollectiveBatch, CollectiveCall, CollectiveKind, bus_factor
from kernel_models.collectives.profile import CommProfile
from kernel_models.collectives.times import CommTimes, Level
from kernel_models.collectives.topology import Topology, node_names, node_type
from kernel_models.collectives.topology import find_topology as find_topology
from kernel_models.device import DeviceSpec
from kernel_models.device_choice import find_device
from kernel_models.spreads import RING_COLLECTIVES
from tracer.parallel_plan import PlanError

RING_EFFICIENCY = 0.75
RING_US = 20.0
"""A ring over a device's links: the share of the data sheet's rate, and a fixed cost; assumptions."""


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """A cluster whose collectives are priced: its topology, and measurements of it where there are any.

    Attributes:
        backend: who carries them out, such as "nccl" or "gloo"; by default NCCL where that was measured, else what was.
        mixed: each is done by the backend that is fastest for it (``backends``), and ``backend`` does the rest.

    Raises:
        PlanError: nothing is known of that backend there.
    """

    topology: Topology
    profile: CommProfile | None = None
    backend: str | None = None
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.mixed:
            _ = self.backends  # refuses a backend that is none
            return
        measured = [] if self.profile is None else self.profile.backend_names()
        usual = usual_backend(self.topology)
        if self.backend in (None, *measured) or (self.backend == usual and not measured):
            return
        known = f"the profile has {', '.join(measured)}" if measured else (
            f"without measurements only {usual}'s are known there")
        raise PlanError(f"Nothing is known of {self.backend}'s collectives on {self.topology.name}: {known}; measure "
                        "them (foretrace comm bench, or fit its logs) and give --comm-profile.")

    @property
    def backends(self) -> Backends:
        """Return the backends to choose from. Raises ``CommError`` where ``backend`` is none of them."""
        return Backends(self.topology, self.profile or CommProfile(self.topology), self.backend)

    def by_one(self, backend: str | None = None) -> CollectiveModel:
        """Return the same where one backend does all, by default the usual one, as of a recorded job."""
        return replace(self, backend=backend, mixed=False)

    def check_fits(self, world_size: int) -> None:
        """Raise ``PlanError`` if the cluster has fewer GPUs than the job has ranks."""
        if world_size > self.topology.gpus:
            per = self.topology.node.gpus
            raise PlanError(f"{world_size:,} ranks do not fit on {self.topology.name}, which has "
                            f"{self.topology.gpus:,} GPUs; name a larger one, such as {self.topology.node.name}x"
                            f"{-(-world_size // per)}.")


def price_calls(calls: Sequence[CollectiveCall], on: CollectiveModel | DeviceSpec) -> CommTimes:
    """Return times of collectives in their order, by the best that is known.

    Args:
        calls: each with its kind, payload and where its ranks lie.
        on: the cluster; a device where none is given, whose ranks then all lie on one node of it.
    """
    batch = CollectiveBatch.from_calls(calls)
    if isinstance(on, DeviceSpec):
        return _over_links(batch, on)
    if on.mixed:
        return on.backends.choose(batch).times
    profile = on.profile or CommProfile(on.topology)
    backend = on.backend if on.backend in profile.backends else None  # else the data sheet's formulas
    return profile.predict(batch, backend, on=on.topology)


def _over_links(batch: CollectiveBatch, device: DeviceSpec) -> CommTimes:
    """A ring over one node's links: bytes over the busiest link at a share of its rate, and a fixed cost."""
    out = CommTimes.empty(len(batch))
    gbps = max(device.peer_gbps, device.host_gbps, 1.0) * RING_EFFICIENCY
    factor = np.array([bus_factor(CollectiveKind(kind), ranks)
                       for kind, ranks in zip(batch.kind.tolist(), batch.ranks.tolist(), strict=True)])
    payload = np.where(batch.kind == CollectiveKind.BARRIER, BARRIER_BYTES, batch.payload_bytes)
    launched = (batch.ranks > 1) & (payload > 0)
    out.time_us = np.where(launched, RING_US + factor * payload / gbps * 1e-3, 0.0)
    out.low_us, out.high_us = (out.time_us * np.exp(side * RING_COLLECTIVES) for side in (-1, 1))
    out.level = np.where(launched, int(Level.LINKS), int(Level.NOTHING_TO_DO))
    return out


def topology_of(device: DeviceSpec, world_size: int, network: str | None = None) -> Topology:
    """Return the usual cluster of a device for so many ranks: its maker's eight-GPU node on that node's own network.

    A device with another memory than the nodes' is in nodes like theirs.

    Args:
        device: the GPU.
        world_size: ranks that it must hold.
        network: between nodes, by name; by default the node's own.

    Raises:
        PlanError: no node type has the device.
        CommError: there is no such network.
    """
    names = [name for name in node_names() if node_type(name).device == device.name] or [
        name for name in node_names()
        if device.short_names and find_device(node_type(name).device).short_names == device.short_names]
    if not names:
        raise PlanError(f"No node type known to foretrace has the device {device.name}; name the cluster with "
                        "--topology (foretrace comm predict --help lists how).")
    name = min(names, key=lambda n: (not n.startswith("dgx"), -node_type(n).gpus, n))
    nodes = -(-max(world_size, 1) // node_type(name).gpus)
    return find_topology((f"{name}x{nodes}" if nodes > 1 else name) + (f"@{network}" if network else ""))
