"""``price_calls``: the time of collectives. Every price of a collective comes from here.

Each collective gets the best known price (``Level``):

- measured, fitted: Measurements of the cluster: curves, their neighbours, an α–β model fitted to them (``profile``).
- data sheet: NCCL's formulas with the published constants of the cluster's topology (``datasheet``).
- links: No cluster is given; a ring over the links of one node of the device is assumed (here).

``Backends`` chooses between several backends for each collective (MCR-DL, Anthony et al., IPDPS 2023). A cluster's
backends are those that its profile has measured: NCCL, the kernels of serving engines, NVSHMEM, UCC, MPI, gloo. Without
measurements they are NCCL's algorithms and protocols and the hierarchical all-reduce, by formula. One backend, the
``base``, does each collective unless another is faster, the switch there and back included.

Flows on one link share it evenly (processor sharing, as NCCL's channels and fair queues do). Computation that overlaps
a collective loses the units that run NCCL's channels, or memory bandwidth. These losses are bounds from published
figures, not fits. A trace's own overlapped times are better where there are any.

Serving engines do all-reduces within a node by kernels that read and write the other GPUs' memory. An engine takes the
quicker of two (vLLM's and SGLang's ``custom_all_reduce``, TensorRT-LLM's one-shot and two-shot):

    - one shot:    Every GPU reads all others' buffers.      t = t₀ + (n − 1)·S / B
    - two shots:   Each reduces a share, then all gather.    t = 2·t₀ + 2·(n − 1)/n·S / B

with S the payload and B the share ``ENGINE_REACHED`` of a GPU's link rate one way. In ``custom_all_reduce_h200`` (2, 4
and 8 H200, 256 B to 8 MiB) slopes are 238 to 308 GB/s for one shot and 287 to 340 for two, of 450. Least times in CUDA
graphs are 2.3 to 4.7 µs. ``benchmarks/serving.py --rows kernels`` has every size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np

from kernel_models.collectives.bandwidths import BusBandwidths
from kernel_models.collectives.call import (
    BARRIER_BYTES,
    CollectiveBatch,
    CollectiveCall,
    CollectiveKind,
    CommError,
    CommTimes,
    Level,
    bus_factor,
)
from kernel_models.collectives.datasheet import CHANNELS, Algorithm, DatasheetModel, Protocol, algorithm_label
from kernel_models.collectives.profile import DEFAULT_BACKEND, CommProfile
from kernel_models.collectives.topology import NodeType, Topology, node_names, node_type
from kernel_models.collectives.topology import find_topology as find_topology
from kernel_models.device import DeviceSpec, find_device
from kernel_models.spreads import RING_COLLECTIVES
from tracer.arrays import Bool, Float64, Int64
from tracer.parallel_plan import PlanError

CROSSING_US = 2.1
"""Time to hand a stream's order from one backend to another: record an event (1.0 µs) and wait for it (1.05 µs).
Medians of PyTorch's ``cudaEventRecordWithFlags`` and ``cudaStreamWaitEvent`` on eight H100 (nanogpt-8xH100, ranks 0 and
1)."""
SWITCH_US = 2 * CROSSING_US
"""Cost of a collective by another backend than the base: the switch there and back. An upper limit: backends on one
stream, and consecutive collectives of one backend, need no switch."""
PINNED = {f"{a.label}/{p.label}": (a, p) for a, p in product(Algorithm, Protocol)}
"""NCCL's algorithm and protocol by the backend's name, such as "ring/LL"."""


def usual_backend(on: Topology) -> str:
    """Return the backend that a data sheet's formulas describe: gloo on a host, else NCCL."""
    return "gloo" if on.node.link == "loopback" else DEFAULT_BACKEND


@dataclass(frozen=True)
class BackendChoices:
    """The chosen backend of each of n collectives.

    Attributes:
        names: Names of the b backends, the base first.
        by_name: Times of each backend [n]; ``Level.UNKNOWN`` where it cannot do the collective or was not measured.
        winner: Index into ``names`` [n].
        times: Times of the winners; a winner other than the base includes the switch [n].
    """

    names: tuple[str, ...]
    by_name: tuple[CommTimes, ...]
    winner: Int64
    times: CommTimes

    @cached_property
    def table_us(self) -> Float64:
        """Times [b, n], µs; NaN where the backend's time is unknown."""
        return np.stack([np.where(each.level == int(Level.UNKNOWN), np.nan, each.time_us) for each in self.by_name])

    @cached_property
    def sure(self) -> Bool:
        """Return where the winner's lead over each other backend exceeds the two 80% intervals, added in quadrature as
        logarithms [n]. A collective that launches nothing is sure."""
        lead = np.full(self.table_us.shape, np.inf)
        own = self.table_us[self.winner, np.arange(len(self.winner))]
        up = _log_ratio(self.times.high_us, self.times.time_us)
        for row, each in enumerate(self.by_name):
            down = _log_ratio(each.time_us, each.low_us)
            other = (self.winner != row) & np.isfinite(self.table_us[row]) & (own > 0) & (each.time_us != own)
            lead[row, other] = (_log_ratio(each.time_us, own) - np.hypot(up, down))[other]
        return np.asarray((lead > 0).all(axis=0), np.bool_)

    def of_nccl(self, winner: int) -> bool:
        """Return whether the winner is NCCL, with any algorithm, and not another library."""
        name = self.names[winner]
        return name in PINNED or DEFAULT_BACKEND in name.lower()

    def label(self, row: int) -> str:
        """Return the backend of a collective, with the algorithm where a formula gives it, such as "nccl (ring/LL)"."""
        name, code = self.names[self.winner[row]], int(self.times.algorithm[row])
        how = algorithm_label(code)
        return f"{name} ({how})" if how and how != name else name


@dataclass(frozen=True)
class Backends:
    """The backends of a cluster.

    Attributes:
        topology: The cluster.
        profile: Measurements of its backends; without any, backends are NCCL's algorithms by formula.
        base: Backend of each collective that no other does faster; default: the backend with the fastest step.
        switch_us: Extra cost of a collective by another backend than the base, µs.

    Raises:
        CommError: There is no such base.
    """

    topology: Topology
    profile: CommProfile
    base: str | None = None
    switch_us: float = SWITCH_US

    def __post_init__(self) -> None:
        if self.base is not None and self.base not in self._known():
            raise CommError(f"There is no backend {self.base!r} to choose; there are {', '.join(self._known())}.")

    def _known(self) -> list[str]:
        measured = self.profile.backend_names()
        return measured or [usual_backend(self.topology), *PINNED]

    @property
    def usual(self) -> str:
        """Return the backend of collectives without a measurement: the base, else NCCL if known, else the first."""
        known = self._known()
        return self.base or (DEFAULT_BACKEND if DEFAULT_BACKEND in known else known[0])

    def choose(self, batch: CollectiveBatch, counts: Float64 | None = None) -> BackendChoices:
        """Return the backend of each collective: the base, or another if it is faster by more than the switch.

        A measured backend does the collectives that were measured, in its own or a neighbouring group; the usual one
        also does the rest. Without a named base, the base is the backend with the fastest step that can do them all.

        Args:
            batch: the collectives of a step.
            counts: runs of each collective [n]; once by default.
        """
        names = [self.usual, *(name for name in self._known() if name != self.usual)]
        by_name = [self._times(name, batch, usual=row == 0) for row, name in enumerate(names)]
        cost = np.stack([np.where(each.level == int(Level.UNKNOWN), np.inf, each.time_us) for each in by_name])
        base = 0
        if self.base is None and len(batch):
            able = np.isfinite(cost).all(axis=1)
            together = np.minimum(cost[able], cost.min(axis=0) + self.switch_us)
            base = int(np.flatnonzero(able)[(together @ (np.ones(len(batch)) if counts is None else counts)).argmin()])
        order = [base, *(row for row in range(len(names)) if row != base)]
        cost = cost[order] + self.switch_us * (np.arange(len(names)) > 0)[:, None]
        by_name, winner = [by_name[row] for row in order], cost.argmin(axis=0).astype(np.int64)
        times = by_name[0].take(np.arange(len(batch)))
        for row, each in enumerate(by_name[1:], start=1):
            mine = winner == row
            if mine.any():
                taken = each.take(mine)
                for name in ("time_us", "low_us", "high_us"):
                    getattr(taken, name)[:] += self.switch_us
                times.put(mine, taken)
        return BackendChoices(tuple(names[row] for row in order), tuple(by_name), winner, times)

    def _times(self, name: str, batch: CollectiveBatch, *, usual: bool) -> CommTimes:
        """Return a backend's times: for the usual backend from the best level, for others from measurements only."""
        if name in PINNED and name not in self.profile.backends:
            times = DatasheetModel(self.topology, *PINNED[name]).predict(batch)
            if not usual:
                return times
            rest = times.level == int(Level.UNKNOWN)
            times.put(rest, self.profile.predict(batch, on=self.topology).take(rest))
            return times
        measured = name if name in self.profile.backends else None
        times = self.profile.predict(batch, measured, on=self.topology)
        if not usual and measured is not None:
            times.level[(times.level >= int(Level.FITTED))] = int(Level.UNKNOWN)
        return times


def _log_ratio(above: Float64, below: Float64) -> Float64:
    """Return the log of a ratio of times; 0 where a time is 0."""
    some = (above > 0) & (below > 0)
    found: Float64 = np.log(np.where(some, above, 1.0) / np.where(some, below, 1.0))
    return found


RING_EFFICIENCY = 0.75
RING_US = 20.0
"""Share of the data sheet's rate, and fixed cost (µs), of a ring over a device's links; assumptions."""


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """A cluster whose collectives are priced: its topology, and measurements of it where there are any.

    Attributes:
        backend: Name, such as "nccl" or "gloo"; default: NCCL where that was measured, else a measured backend.
        mixed: Whether each collective takes the fastest backend (``backends``), with ``backend`` as the base.
        bandwidths: Measured busbw of whole nodes, which correct the topology's formulas.

    Raises:
        PlanError: No collectives of that backend are known on the cluster.
    """

    topology: Topology
    profile: CommProfile | None = None
    backend: str | None = None
    mixed: bool = False
    bandwidths: BusBandwidths | None = None
    known: dict[CollectiveCall, tuple[float, float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False)
    """Prices by call, kept because many plans have equal calls (``price_once``)."""

    def __post_init__(self) -> None:
        if self.mixed:
            _ = self.backends  # raises for an unknown backend
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
        """Return the backends to choose from. Raises ``CommError`` if ``backend`` is not among them."""
        return Backends(self.topology, self.profile or CommProfile(self.topology), self.backend)

    def by_one(self, backend: str | None = None) -> CollectiveModel:
        """Return this cluster with one backend for all collectives, as in a recorded job; default: the usual one."""
        return replace(self, backend=backend, mixed=False)

    def check_fits(self, world_size: int) -> None:
        """Raise ``PlanError`` if the cluster has fewer GPUs than the job has ranks."""
        if world_size > self.topology.gpus:
            per = self.topology.node.gpus
            raise PlanError(f"{world_size:,} ranks do not fit on {self.topology.name}, which has "
                            f"{self.topology.gpus:,} GPUs; name a larger one, such as {self.topology.node.name}x"
                            f"{-(-world_size // per)}.")


def price_calls(calls: Sequence[CollectiveCall], on: CollectiveModel | DeviceSpec) -> CommTimes:
    """Return times of collectives, µs, in their order, each from the best known ``Level``.

    Args:
        calls: Collectives with kind, payload and the placement of their ranks.
        on: The cluster; or a device, whose ranks then all lie on one node.
    """
    batch = CollectiveBatch.from_calls(calls)
    if isinstance(on, DeviceSpec):
        return _over_links(batch, on)
    if on.mixed:
        return on.backends.choose(batch).times
    profile = on.profile or CommProfile(on.topology)
    backend = on.backend if on.backend in profile.backends else None  # else the data sheet's formulas
    times = profile.predict(batch, backend, on=on.topology)
    if on.bandwidths is not None:
        on.bandwidths.on(on.topology).correct(batch, times)
    return times


def price_once(calls: Sequence[CollectiveCall], on: CollectiveModel) -> list[tuple[float, float, float]]:
    """Return times of collectives and both ends of their intervals, µs, in their order, as ``price_calls`` does. Each
    distinct call is priced once for a cluster, even if many plans have it."""
    if on.mixed:  # the backend of one collective depends on the others
        return _figures(price_calls(calls, on))
    new = [call for call in dict.fromkeys(calls) if call not in on.known]
    if new:
        on.known.update(zip(new, _figures(price_calls(new, on)), strict=True))
    return [on.known[call] for call in calls]


def _figures(times: CommTimes) -> list[tuple[float, float, float]]:
    return list(zip(times.time_us.tolist(), times.low_us.tolist(), times.high_us.tolist(), strict=True))


def _over_links(batch: CollectiveBatch, device: DeviceSpec) -> CommTimes:
    """Return times of a ring over one node's links: busiest link's bytes at a share of its rate, and a fixed cost."""
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


PCIE_SERVER = "pcie-l40s"
"""Node type whose layout is assumed for other PCIe devices: two host bridges with four GPUs and a card each."""
ASSUMED_SERVER = f"assumed: laid out as {PCIE_SERVER}, with the device's own links to its host"
"""Source of the figures of a node that no file describes."""


_SOLD = ("dgx-", "hgx-", "pcie-", "cpu")
"""First parts of names of nodes that are sold; others are single machines, used for devices of no sold node."""


def topology_of(device: DeviceSpec, world_size: int, network: str | None = None) -> Topology:
    """Return the usual cluster of a device for a world size: its maker's eight-GPU node on that node's own network.

    For a device with another memory size than the nodes' devices, nodes with the otherwise equal device are taken.

    Args:
        device: the GPU.
        world_size: least number of GPUs.
        network: name of the network between nodes; default: the node's own.

    Raises:
        PlanError: no node type has the device.
        CommError: there is no such network.
    """
    every = [(name, node_type(name).device) for name in node_names()]
    sold = [(name, held) for name, held in every if name.startswith(_SOLD)]
    names = [name for name, held in sold if held == device.name] or [
        name for name, held in sold if device.short_names and find_device(held).short_names == device.short_names] or [
        name for name, held in every if held == device.name]
    if not names and world_size <= 1:
        return _alone(device, network)
    if not names:
        raise PlanError(f"No node type known to foretrace has the device {device.name}: give --topology node.toml "
                        "(node.tomlx4 for four such nodes), a file that begins as foretrace topologies "
                        f"{PCIE_SERVER} --toml > node.toml and has your node's name, device, links and cards.")
    name = min(names, key=lambda n: (not n.startswith("dgx"), -node_type(n).gpus, n))
    nodes = -(-max(world_size, 1) // node_type(name).gpus)
    return find_topology((f"{name}x{nodes}" if nodes > 1 else name) + (f"@{network}" if network else ""))


def planned_topology(device: DeviceSpec, gpus: int) -> Topology:
    """Return a plan's cluster where none is named: the usual one (``topology_of``), else one server.

    Devices without a known node whose only connection is their host's PCIe are assumed to be in a server laid out like
    the known PCIe servers. Such a server has at most as many GPUs as the known ones.

    Raises:
        PlanError: the device has links whose layout is not known, or there are more GPUs than one server has.
    """
    try:
        return topology_of(device, gpus)
    except PlanError:
        layout = find_topology(PCIE_SERVER)
        if not device.pcie_width or device.peer_gbps or gpus > layout.node.gpus:
            raise
    node = replace(layout.node, name=f"pcie-{device.name}", device=device.name, architecture=device.architecture,
                   peer_gbps=device.host_gbps, sources=dict.fromkeys(layout.node.sources, ASSUMED_SERVER))
    return replace(layout, node=node)


def _alone(device: DeviceSpec, network: str | None) -> Topology:
    """Return a node of one GPU, which sends nothing."""
    card = find_topology(f"dgx-a100@{network or 'roce-200'}").network
    return Topology(NodeType(device.name, device.name, device.architecture, "pcie", card.name, 1,
                             max(device.host_gbps, 1.0), 1, False, {"gpus": "one GPU sends nothing"}), 1, card)


def shared_times(alone: CommTimes, latency: CommTimes, count: int) -> CommTimes:
    """Return the times of ``count`` equal collectives that start together on the same links.

    The links carry ``count`` times the bytes; latencies overlap.

    Args:
        alone: One collective's times.
        latency: The part of one collective's times that does not grow with its bytes.
        count: Number of collectives.
    """
    factor = count - (count - 1) * np.minimum(latency.time_us / np.maximum(alone.time_us, 1e-9), 1.0)
    return CommTimes(alone.time_us * factor, alone.low_us * factor, alone.high_us * factor, alone.level,
                     alone.algorithm)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Factors on the times of overlapping work; 1 means no slowdown."""

    compute_bound: float
    memory_bound: float
    collective: float


def overlap_slowdown(device: DeviceSpec, busbw_gbps: float) -> Overlap:
    """Return the slowdowns of a collective and of overlapping computation, bound by arithmetic or by memory.

    Each of the collective's ``CHANNELS`` is a thread block that occupies a multiprocessor.

    Args:
        device: The GPU.
        busbw_gbps: Bus bandwidth of the collective, 10⁹ bytes/s. Its memory traffic is twice that: each byte is read,
            and each received byte is written.
    """
    if device.sm_count <= CHANNELS or device.memory_bandwidth_gbps <= 0:
        return Overlap(1.0, 1.0, 1.0)
    taken = min(2.0 * busbw_gbps / device.memory_bandwidth_gbps, 0.9)
    return Overlap(device.sm_count / (device.sm_count - CHANNELS), 1.0 / (1.0 - taken), 1.0 + taken)


ENGINE_REACHED = 0.63
"""Share of the links' rate that the kernels reach: the median of the slopes in the module's text."""
ENGINE_STEP_US = 0.12
"""Time that each further GPU adds to the least time, µs, because the flags of all are awaited. From the same table."""
ENGINE_BYTES = 8 << 20
"""Payload up to which engines use these kernels (vLLM's and SGLang's buffers; TensorRT-LLM's workspace of 8 GPUs)."""
ENGINE_SPREAD = 0.25
"""Half width, a logarithm, of the 80% interval. In CUDA graphs up to 8 MiB 80% of the table's 144 times lie within
0.11; other devices, and GPUs that do not arrive together, are assumed to double that."""
LINKED = ("nvswitch", "nvlink-mesh")
LAUNCHED_US = {"ampere": (7.5, 1.72)}
LAUNCHED_LATER_US = 3.7, 1.57
"""Least time of NCCL's all-reduce launched by itself within such a node: µs, and µs for each GPU. Lines through the 8
KiB of ``nccl_single_node``: 11.0, 14.7, 21.3 µs on 2, 4, 8 A100 (NCCL 2.27); 6.8, 10.1, 16.2 on H100 (2.29)."""


def with_engine_kernels(times: CommTimes, batch: CollectiveBatch, on: Topology, least_us: float) -> CommTimes:
    """Return times in which an engine's kernel does the all-reduces within a node for which it is faster.

    Args:
        times: Times by the usual library.
        batch: The collectives.
        on: Their cluster; without links between its GPUs nothing changes.
        least_us: Least time of the kernel on two GPUs, µs; infinite for an engine without one, which uses NCCL.
    """
    ranks = np.asarray(batch.ranks, np.float64)
    if np.isinf(least_us):
        return _launched(times, batch, on)
    custom = kernel_us(np.asarray(batch.payload_bytes, np.float64), ranks, on.node.peer_gbps, least_us)
    can = ((batch.kind == CollectiveKind.ALL_REDUCE) & (batch.payload_bytes <= ENGINE_BYTES) & (batch.nodes == 1)
           & (ranks > 1) & (custom < times.time_us) & (on.node.link in LINKED))
    found = times.take(np.arange(len(batch)))
    found.time_us[can] = custom[can]
    found.low_us[can], found.high_us[can] = custom[can] * np.exp(-ENGINE_SPREAD), custom[can] * np.exp(ENGINE_SPREAD)
    found.level[can] = int(Level.DATASHEET)
    found.algorithm[can] = -1
    return found


def _launched(times: CommTimes, batch: CollectiveBatch, on: Topology) -> CommTimes:
    """Return times in which all-reduces within a node take at least as long as one that NCCL launches by itself."""
    start, each = LAUNCHED_US.get(on.node.architecture, LAUNCHED_LATER_US)
    least = start + each * np.asarray(batch.ranks, np.float64)
    mine = (batch.kind == CollectiveKind.ALL_REDUCE) & (batch.nodes == 1) & (batch.ranks > 1) & (
        on.node.link in LINKED) & (times.time_us < least)
    found = times.take(np.arange(len(batch)))
    for us in (found.low_us, found.high_us, found.time_us):
        us[mine] *= (least / times.time_us)[mine]
    return found


def kernel_us(payload: Float64, ranks: Float64, peer_gbps: float, least_us: float) -> Float64:
    """Return the time of an engine's all-reduce kernel, µs [n]: with one exchange or two, whichever is quicker."""
    rate = peer_gbps * ENGINE_REACHED * 1e3
    start = least_us + ENGINE_STEP_US * (ranks - 2.0)
    one: Float64 = start + (ranks - 1.0) * payload / rate
    two: Float64 = 2.0 * start + 2.0 * (ranks - 1.0) / ranks * payload / rate
    return np.minimum(one, two)
