"""The datasheet level: the fastest of NCCL's algorithms and protocols, as straight lines ``t = α + β · payload``.

The structure is that of NCCL's tuner. A launch has a base latency, a step a hop latency by the slowest link, and
traffic takes the bandwidth of the bottleneck. With n ranks on N nodes, g ranks on the widest node, and S bytes of
payload, the latency and the transfer of each algorithm are:

- ring: Steps · hop; all-reduce 2(n−1)/n · S/B, gathers (n−1)/n · S/B.
- tree: 2((g − 1) · hop + log2(N) · net); 2 S/B.
- NVLS: One pass through the switch; S / (5/6 · B), less on part of a node.
- NVLS tree: NVLS + 2 log2(N) · net; the slower of NVLS and 2(N−1)/N · S over the cards.
- hierarchical: Gathers inside, all-reduce across; 2(g−1)/g · S/B + 2(N−1)/N · S over the cards.
- direct: One step; busiest rank's link, or busiest node's cards.

In gathers and all-to-alls the channels also copy the rank's own part, ``S/n``.

Constants are numbers of NCCL's own tuner, by name (its ``src/graph/tuning.cc`` and ``src/graph/topo.h``, 2.30). NCCL's
authors measured them once; they are no calibration of a machine. Alone they are off by 15–37% on average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kernel_models.collectives.call import CollectiveBatch, CollectiveKind, CommTimes, Level, bus_factor
from kernel_models.collectives.topology import Topology


class Algorithm(IntEnum):
    """The route that the data of a collective take between the ranks."""

    RING = 0
    TREE = 1
    NVLS = 2
    """The switch reduces and multicasts."""
    NVLS_TREE = 3
    """NVLS inside nodes, a tree between them."""
    HIERARCHICAL = 4
    """Reduce-scatter inside nodes, all-reduce of each GPU's part between nodes, all-gather inside nodes."""
    DIRECT = 5
    """Every rank sends to its peers directly: all-to-all, send and receive."""

    @property
    def label(self) -> str:
        """The algorithm's name in lower case."""
        return self.name.lower().replace("_", "-")


class Protocol(IntEnum):
    """NCCL's way to hand over bytes: flags in every 8 bytes (LL), in every 128 (LL128), or fences (Simple)."""

    LL = 0
    LL128 = 1
    SIMPLE = 2

    @property
    def label(self) -> str:
        """Return the protocol's name as NCCL writes it."""
        return ("LL", "LL128", "Simple")[int(self)]


COMMUNICATOR_BYTES = 0.3e9
"""Bytes of NCCL's buffers for one group of ranks: 16 channels, sending and receiving, of 4 MiB (simple) and about 5 MiB
(its two low-latency protocols) each, by NCCL's defaults."""
BASE_LATENCY_US = {
    Algorithm.TREE: (6.8, 14.0, 8.4),
    Algorithm.RING: (6.6, 14.0, 8.4),
    Algorithm.NVLS: (0.0, 0.0, 0.0),
    Algorithm.NVLS_TREE: (0.0, 0.0, 0.0),
}
"""Latency of a launched collective by protocol LL, LL128, Simple (``baseLatencies``), µs. This and the following
constants come from NCCL's tuner where no other source is named."""

HOP_LATENCY_US = {
    "nvlink": {Algorithm.TREE: (0.6, 1.25, 4.0), Algorithm.RING: (0.6, 1.9, 3.4), Algorithm.NVLS: (25.0, 25.0, 25.0),
               Algorithm.NVLS_TREE: (25.0, 25.0, 25.0)},
    "pci": {Algorithm.TREE: (1.0, 1.9, 4.0), Algorithm.RING: (1.0, 2.5, 5.7), Algorithm.NVLS: (0.0, 0.0, 0.0),
            Algorithm.NVLS_TREE: (0.0, 0.0, 0.0)},
    "net": {Algorithm.TREE: (5.0, 8.5, 14.0), Algorithm.RING: (2.7, 4.0, 14.0), Algorithm.NVLS: (18.0, 18.0, 18.0),
            Algorithm.NVLS_TREE: (20.9, 20.9, 20.9)},
}
"""Latency of one step by the slowest link it uses, algorithm and protocol (``hwLatencies``), µs."""

LINK_SHARE = {"volta": 20.0 / 25.0, "ampere": 20.0 / 25.0, "ada": 1.0, "hopper": 20.6 / 25.0, "blackwell": 40.1 / 50.0,
              "rtx-blackwell": 1.0, "cdna2": 0.75, "cdna3": 0.75, "cdna4": 0.75, "host": 1.0}
"""Share of NVLink's rate that a ring gets: topo.h's figure for each link over the data sheet's 25 or 50 GB/s. For
Infinity Fabric the share is about three quarters, as RCCL's documentation reports (links of CDNA 2 and 4 are assumed to
be like CDNA 3's). Ada and RTX Blackwell have no NVLink."""

PCI_SHARE = 0.75
"""Share of a PCIe slot's rate that a ring gets (topo.h): 12 GB/s of a third-generation slot's 15.8 GB/s."""

EFFICIENCY = 0.92
"""Share of a ring's or tree's bandwidth that the Simple protocol reaches."""
LL128_SHARE = 120.0 / 128.0
"""Share of data in LL128's traffic: 8 of 128 bytes are flags."""
LL_SHARE = 0.5
"""Share of data in LL's traffic: 4 of 8 bytes are flags."""
LL_MOST_GBPS = {"volta": 39.0, "ampere": 87.7, "ada": 87.7, "hopper": 141.0, "blackwell": 282.0,
                "rtx-blackwell": 282.0, "cdna3": 141.0, "cdna4": 141.0, "host": 39.0}
"""Bandwidth cap of LL inside one node (``llMaxBws``; NCCL takes compute capability 12 as 10, and CDNA 4 is assumed to
be like CDNA 3)."""
CHANNEL_GBPS = {"volta": 20.0, "ampere": 20.0, "ada": 20.0, "hopper": 36.7, "blackwell": 40.0, "rtx-blackwell": 40.0,
                "cdna3": 36.7, "cdna4": 36.7}
"""Most that one channel (a thread block) moves, 10⁹ bytes/s (``perChMaxRingLL128Bws``)."""
CHANNELS = 24
"""Channels of a large collective on an NVSwitch node. Set, not measured."""
NVLS_EFFICIENCY = {"hopper": 0.85, "blackwell": 0.74}
"""Share of the links' rate that reductions in the switch reach (``nvlsEfficiency``)."""
NVLS_RATIO = 5.0 / 6.0
"""Algorithmic over bus bandwidth of NVLS."""
NETWORK_SIMPLE_RING = 1.4
"""Factor on the latency of rings over several nodes with the Simple protocol."""
SIMPLE_START_US = {"hopper": 4.4}
"""Time of a collective of the Simple protocol on one NVSwitch node in addition to the tuner's latency, µs, by
architecture. The tuner's figures order the algorithms, and NCCL chooses by them alone. Fitted to AIConfigurator's H200
of 1 MiB and more; its H100 was held out: 8.4% off in the median without, 6.7% with it. That table has no sends, and the
sends of Vidur's H100 node start as the tuner states."""
HOST_BASE_US, HOST_HOP_US = 40.0, 25.0
"""Base and step latency of Gloo over a host's loopback, assumed until ``foretrace comm bench`` measures it."""


US_PER_BYTE = 1e-3
"""Time of a byte at 10⁹ bytes/s, µs."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A group's size and placement: ranks, nodes, most and fewest ranks on a node."""

    ranks: int
    nodes: int
    widest: int
    narrowest: int


@dataclass(frozen=True, slots=True)
class Line:
    """The time ``latency_us + us_per_byte · payload`` of a collective by one algorithm and protocol."""

    algorithm: Algorithm
    protocol: Protocol
    latency_us: float
    us_per_byte: float


def intra_gbps(topology: Topology) -> float:
    """Return the bandwidth of one rank's ring inside a node, 10⁹ bytes/s, before the protocol's share."""
    node = topology.node
    share = PCI_SHARE if node.link == "pcie" else LINK_SHARE.get(node.architecture, EFFICIENCY)
    return node.peer_gbps * share


def ring_gbps(topology: Topology, group: RankGroup) -> float:
    """Return rings' bus bandwidth in a group, GB/s: inside a node, or through the cards of the narrowest node."""
    inside = intra_gbps(topology)
    if group.nodes == 1:
        return inside
    across = topology.node_gbps(group.narrowest)
    return min(inside, across) if group.widest > 1 else across


def lines(topology: Topology, kind: CollectiveKind, group: RankGroup) -> list[Line]:
    """Return a line for each way that NCCL would consider; hierarchical ones come last, for even groups only."""
    if group.ranks <= 1:
        return [Line(Algorithm.RING, Protocol.SIMPLE, 0.0, 0.0)]
    if kind is CollectiveKind.BARRIER:
        kind = CollectiveKind.ALL_REDUCE
    if kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.SEND_RECV):
        return [_direct(topology, kind, group, protocol) for protocol in _protocols(topology)]
    found = [_ring(topology, kind, group, protocol) for protocol in _protocols(topology)]
    if kind is CollectiveKind.ALL_REDUCE and topology.node.link != "loopback":
        if group.nodes > 1:
            found += [_tree(topology, group, protocol) for protocol in _protocols(topology)]
        if topology.node.in_switch_reduction and group.widest > 2 and group.narrowest == group.widest:
            found.append(_nvls(topology, group))
        if group.nodes > 1 and group.widest == group.narrowest > 1:
            found.append(_hierarchical(topology, group))
    return found


def _protocols(topology: Topology) -> tuple[Protocol, ...]:
    """Return the usable protocols: LL128 needs NVLink everywhere in a node."""
    if topology.node.link == "loopback":
        return (Protocol.SIMPLE,)
    if topology.node.link == "pcie":
        return (Protocol.LL, Protocol.SIMPLE)
    return (Protocol.LL, Protocol.LL128, Protocol.SIMPLE)


def _share(topology: Topology, group: RankGroup, protocol: Protocol, gbps: float) -> float:
    """Return the bandwidth that a protocol reaches where a ring's is ``gbps``, 10⁹ bytes/s."""
    if topology.node.link == "loopback":
        return gbps
    if protocol is Protocol.LL:
        cap = LL_MOST_GBPS.get(topology.node.architecture, 141.0) if group.nodes == 1 else math.inf
        return min(gbps * LL_SHARE, cap)
    return gbps * EFFICIENCY * (LL128_SHARE if protocol is Protocol.LL128 else 1.0)


def _hops(topology: Topology, algorithm: Algorithm, protocol: Protocol) -> tuple[float, float]:
    """Return the latencies of a step, µs: (inside a node, between nodes)."""
    if topology.node.link == "loopback":
        return HOST_HOP_US, HOST_HOP_US + topology.network.extra_latency_us
    inside = HOP_LATENCY_US["pci" if topology.node.link == "pcie" else "nvlink"][algorithm][protocol]
    return inside, HOP_LATENCY_US["net"][algorithm][protocol] + topology.network.extra_latency_us


def _base(topology: Topology, algorithm: Algorithm, protocol: Protocol) -> float:
    return HOST_BASE_US if topology.node.link == "loopback" else BASE_LATENCY_US[algorithm][protocol]


def _own_part(topology: Topology, kind: CollectiveKind, group: RankGroup) -> float:
    """Return the time per payload byte, µs, of copying a rank's own part: in gathers, scatters, all-to-alls; else 0."""
    if kind not in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL):
        return 0.0
    channel = CHANNEL_GBPS.get(topology.node.architecture)
    return US_PER_BYTE / group.ranks / (channel * CHANNELS) if channel else 0.0


def _ring(topology: Topology, kind: CollectiveKind, group: RankGroup, protocol: Protocol) -> Line:
    n, nodes = group.ranks, group.nodes
    passes = 2 if kind is CollectiveKind.ALL_REDUCE else 1
    steps = passes * (n - 1)
    across = passes * nodes if nodes > 1 else 0
    inside, between = _hops(topology, Algorithm.RING, protocol)
    latency = _base(topology, Algorithm.RING, protocol) + max(steps - across, 0) * inside + min(across, steps) * between
    if nodes > 1 and protocol is Protocol.SIMPLE and topology.node.link != "loopback":
        latency *= NETWORK_SIMPLE_RING
    gbps = _share(topology, group, protocol, ring_gbps(topology, group))
    per_byte = bus_factor(kind, n) / gbps * US_PER_BYTE + _own_part(topology, kind, group)
    return Line(Algorithm.RING, protocol, latency, per_byte)


def _tree(topology: Topology, group: RankGroup, protocol: Protocol) -> Line:
    inside, between = _hops(topology, Algorithm.TREE, protocol)
    latency = _base(topology, Algorithm.TREE, protocol) + 2.0 * (
        (group.widest - 1) * inside + math.log2(group.nodes) * between)
    gbps = _share(topology, group, protocol, ring_gbps(topology, group))
    return Line(Algorithm.TREE, protocol, latency, 2.0 / gbps * US_PER_BYTE)


def nvls_gbps(topology: Topology, per_node: int) -> float:
    """Return the switch's algorithmic bandwidth of an all-reduce, GB/s; on part of a node ``(n − 1) / n`` of it."""
    node = topology.node
    whole = (node.gpus - 1) / node.gpus
    part = (per_node - 1) / per_node / whole
    return intra_gbps(topology) * NVLS_EFFICIENCY.get(node.architecture, 0.85) * NVLS_RATIO * part


def _nvls(topology: Topology, group: RankGroup) -> Line:
    per_byte = US_PER_BYTE / nvls_gbps(topology, group.widest)
    inside, _ = _hops(topology, Algorithm.NVLS, Protocol.SIMPLE)
    if group.nodes == 1:
        return Line(Algorithm.NVLS, Protocol.SIMPLE, inside, per_byte)
    _, between = _hops(topology, Algorithm.NVLS_TREE, Protocol.SIMPLE)
    across = 2.0 * (group.nodes - 1) / group.nodes / topology.node_gbps(group.narrowest) * US_PER_BYTE
    return Line(Algorithm.NVLS_TREE, Protocol.SIMPLE, inside + 2.0 * math.log2(group.nodes) * between,
                max(per_byte, across))


def _hierarchical(topology: Topology, group: RankGroup) -> Line:
    g, nodes = group.widest, group.nodes
    inner = RankGroup(g, 1, g, g)
    inside = _ring(topology, CollectiveKind.REDUCE_SCATTER, inner, Protocol.SIMPLE)
    _, between = _hops(topology, Algorithm.RING, Protocol.SIMPLE)
    base = _base(topology, Algorithm.RING, Protocol.SIMPLE)
    across_latency = base + 2 * (nodes - 1) * between
    per_byte = 2.0 * (g - 1) / g / (intra_gbps(topology) * EFFICIENCY) * US_PER_BYTE
    across = 2.0 * (nodes - 1) / nodes / (topology.node_gbps(g) * EFFICIENCY) * US_PER_BYTE
    return Line(Algorithm.HIERARCHICAL, Protocol.SIMPLE, 2.0 * inside.latency_us + across_latency, per_byte + across)


def _direct(topology: Topology, kind: CollectiveKind, group: RankGroup, protocol: Protocol) -> Line:
    """Return the line of a send, or of an all-to-all (slower of rank's link inside, busiest node's cards)."""
    inside, between = _hops(topology, Algorithm.RING, protocol)
    latency = _base(topology, Algorithm.RING, protocol) + (between if group.nodes > 1 else inside)
    link = _share(topology, group, protocol, intra_gbps(topology))
    if kind is CollectiveKind.SEND_RECV:
        gbps = link if group.nodes == 1 else _share(topology, group, protocol, topology.node_gbps(1))
        return Line(Algorithm.DIRECT, protocol, latency, US_PER_BYTE / gbps)
    n, g = group.ranks, group.widest
    per_byte = (g - 1) / n / link * US_PER_BYTE
    for on_node in {group.widest, group.narrowest} if group.nodes > 1 else ():
        cards = _share(topology, group, protocol, topology.node_gbps(on_node))
        per_byte = max(per_byte, on_node * (n - on_node) / n / cards * US_PER_BYTE)
    return Line(Algorithm.DIRECT, protocol, latency, per_byte + _own_part(topology, kind, group))


INTERVAL_BYTES = (512 * 1024.0, 4 * 1024.0**2, 16 * 1024.0**2)
"""Sizes at which ``INTERVALS`` are given, bytes. Set."""
INTERVALS = {
    "nvswitch": ((0.22, 1.12), (0.26, 0.66), (0.13, 0.30)),
    "nvlink-mesh": ((0.48, 1.68), (0.60, 2.00), (0.50, 2.22)),
    "pcie": ((0.20, 1.75), (0.20, 2.75), (0.20, 2.85)),
    "nodes": ((0.30, 1.70), (0.30, 2.40), (0.30, 2.40)),
}
"""80% log half-widths (down, up) up to the first size, at the second, and from the third; interpolated over log size.
They enclose 80% of all tables of a kind, weighted equally (``python benchmarks/collectives.py`` prints them).

nvswitch: AIConfigurator's A100, H100 and H200, vTrain's A100, Vidur's A100 and H100 nodes. nvlink-mesh: vTrain's V100,
Vidur's pairwise-linked A100. pcie: AIConfigurator's L40S. nodes: Vidur's two nodes of A100 and of H100. Most times are
above a data sheet's, so the intervals extend further up. A host (loopback) takes those of nodes.
"""
CHECKED = {("nvswitch", "ampere"), ("nvswitch", "hopper"), ("nvlink-mesh", "volta"), ("nvlink-mesh", "ampere"),
           ("pcie", "ada")}
"""Links and architectures of single nodes in these tables."""
CHECKED_ANYWHERE = (CollectiveKind.ALL_REDUCE, CollectiveKind.SEND_RECV)
"""Kinds in every table of a mesh or of two nodes; tables of single switched and PCIe nodes have the next kinds too."""
CHECKED_INSIDE = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER,
                  CollectiveKind.ALL_TO_ALL)
CHECKED_NODES = 2
"""Number of nodes in Vidur's tables, the only tables of several nodes."""
ALGORITHM_CODE = len(Protocol)
"""``CommTimes.algorithm`` is ``algorithm * ALGORITHM_CODE + protocol``."""


def algorithm_label(code: int) -> str:
    """Return algorithm and protocol as text, such as "ring/LL128"; "" where a measurement does not name them."""
    if code < 0:
        return ""
    return f"{Algorithm(code // ALGORITHM_CODE).label}/{Protocol(code % ALGORITHM_CODE).label}"


@lru_cache(maxsize=4096)
def nccl_lines(topology: Topology, kind: CollectiveKind, group: RankGroup,
               algorithm: Algorithm | None = None, protocol: Protocol | None = None) -> tuple[Line, ...]:
    """Return the lines among which NCCL chooses (hierarchical ones only if ``algorithm`` asks for them), limited to a
    given algorithm and protocol; empty where these are not possible."""
    return tuple(line for line in lines(topology, kind, group) if protocol in (None, line.protocol) and (
        line.algorithm is not Algorithm.HIERARCHICAL if algorithm is None else line.algorithm is algorithm))


class DatasheetModel:
    """Formulas for any collective of a topology; ``algorithm`` and ``protocol`` restrict them to one of each."""

    def __init__(self, topology: Topology, algorithm: Algorithm | None = None,
                 protocol: Protocol | None = None) -> None:
        self.topology, self.algorithm, self.protocol = topology, algorithm, protocol

    def predict(self, batch: CollectiveBatch) -> CommTimes:
        """Return the times of all collectives; ``Level.UNKNOWN`` where the given algorithm cannot do the collective."""
        out = CommTimes.empty(len(batch))
        first, setting = batch.settings()
        for index, row in enumerate(first.tolist()):
            rows = slice(None) if len(first) == 1 else np.flatnonzero(setting == index)
            group = RankGroup(int(batch.ranks[row]), int(batch.nodes[row]), int(batch.widest[row]),
                              int(batch.narrowest[row]))
            kind = CollectiveKind(int(batch.kind[row]))
            ways = nccl_lines(self.topology, kind, group, self.algorithm, self.protocol)
            if not ways:
                continue
            size = batch.payload_bytes[rows]
            best: npt.NDArray[np.float64] = np.full(len(size), np.inf)
            code = np.full(len(size), -1, np.int64)
            for line in ways:
                time_us = line.latency_us + line.us_per_byte * size
                better = time_us < best
                best = np.where(better, time_us, best)
                code[better] = line.algorithm * ALGORITHM_CODE + line.protocol
            if group.nodes == 1 and self.topology.node.link == "nvswitch" and kind is not CollectiveKind.SEND_RECV:
                best += SIMPLE_START_US.get(self.topology.node.architecture, 0.0) * (
                    code % ALGORITHM_CODE == Protocol.SIMPLE)
            down, up = half_widths(self.topology, size, group.nodes)
            out.time_us[rows], out.algorithm[rows], out.level[rows] = best, code, int(Level.DATASHEET)
            out.low_us[rows], out.high_us[rows] = best * np.exp(-down), best * np.exp(up)
        return out


def half_widths(topology: Topology, size: npt.NDArray[np.float64],
                nodes: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return 80% log half-widths, down and up, at sizes in bytes; on several nodes at least the network's."""
    link = topology.node.link
    kinds = [name for name in ((link,) if nodes == 1 else (link, "nodes")) if name in INTERVALS] or ["nodes"]
    at = np.log(np.maximum(size, 1.0))
    down, up = (np.max([np.interp(at, np.log(INTERVAL_BYTES), [pair[side] for pair in INTERVALS[name]])
                        for name in kinds], axis=0) for side in (0, 1))
    return down, up


def interval_checked(topology: Topology, kind: CollectiveKind, nodes: int) -> bool:
    """Return whether measurements of such machines and collectives support the interval; else it is assumed."""
    node = topology.node
    if (node.link, node.architecture) not in CHECKED:
        return False
    if nodes == 1:
        return kind in (CHECKED_INSIDE if node.link in ("nvswitch", "pcie") else CHECKED_ANYWHERE)
    return nodes == CHECKED_NODES and node.link == "nvswitch" and kind in CHECKED_ANYWHERE
