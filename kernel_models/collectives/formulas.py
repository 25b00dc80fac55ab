"""Straight lines ``t = α + β · payload`` of every algorithm and protocol on a topology, from constants only.

The structure is that of NCCL's tuner: a base latency for the launch, a hop latency for each step by the slowest link,
and traffic over the bandwidth of the bottleneck. n ranks on N nodes, g on the widest, S bytes of payload:

==============  =====================================  ============================================
ring            steps · hop                            all-reduce 2(n−1)/n · S/B; gathers (n−1)/n · S/B
tree            2((g − 1) · hop + log2(N) · net)       2 S/B
NVLS            one pass through the switch            S / (5/6 · B), less on part of a node
NVLS tree       NVLS + 2 log2(N) · net                 the slower of NVLS and 2(N−1)/N · S over the cards
hierarchical    gathers inside, all-reduce across      2(g−1)/g · S/B + 2(N−1)/N · S over the cards
direct          one step                               busiest rank's link, or busiest node's cards
==============  =====================================  ============================================

In gathers and all-to-alls the channels also copy the rank's own part, ``S/n``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernel_models.collectives.call import CollectiveKind, bus_factor
from kernel_models.collectives.nccl_constants import (
    BASE_LATENCY_US,
    CHANNEL_GBPS,
    CHANNELS,
    EFFICIENCY,
    HOP_LATENCY_US,
    HOST_BASE_US,
    HOST_HOP_US,
    LINK_SHARE,
    LL128_SHARE,
    LL_MOST_GBPS,
    LL_SHARE,
    NETWORK_SIMPLE_RING,
    NVLS_EFFICIENCY,
    NVLS_RATIO,
    PCI_SHARE,
    Algorithm,
    Protocol,
)
from kernel_models.collectives.topology import Topology

US_PER_BYTE = 1e-3
"""µs for a byte at 10⁹ bytes/s."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A group's size and placement: ranks, nodes, most and fewest ranks on a node."""

    ranks: int
    nodes: int
    widest: int
    narrowest: int


@dataclass(frozen=True, slots=True)
class Line:
    """``latency_us + us_per_byte · payload`` of one way to do a collective."""

    algorithm: Algorithm
    protocol: Protocol
    latency_us: float
    us_per_byte: float


def intra_gbps(topology: Topology) -> float:
    """Return what one rank's ring carries inside a node, 10⁹ bytes/s, before the protocol's share."""
    node = topology.node
    share = PCI_SHARE if node.link == "pcie" else LINK_SHARE.get(node.architecture, EFFICIENCY)
    return node.peer_gbps * share


def ring_gbps(topology: Topology, group: RankGroup) -> float:
    """Bus bandwidth of rings through the group: inside nodes, or across the narrowest node's cards."""
    inside = intra_gbps(topology)
    if group.nodes == 1:
        return inside
    across = topology.node_gbps(group.narrowest)
    return min(inside, across) if group.widest > 1 else across


def lines(topology: Topology, kind: CollectiveKind, group: RankGroup) -> list[Line]:
    """Every way to do the collective that NCCL would consider; hierarchical ones come last and only for even groups."""
    if group.ranks <= 1:
        return [Line(Algorithm.RING, Protocol.SIMPLE, 0.0, 0.0)]
    if kind is CollectiveKind.BARRIER:
        kind = CollectiveKind.ALL_REDUCE
    if kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.SEND_RECV):
        return [_direct(topology, kind, group, protocol) for protocol in _protocols(topology, group)]
    found = [_ring(topology, kind, group, protocol) for protocol in _protocols(topology, group)]
    if kind is CollectiveKind.ALL_REDUCE and topology.node.link != "loopback":
        if group.nodes > 1:
            found += [_tree(topology, group, protocol) for protocol in _protocols(topology, group)]
        if topology.node.in_switch_reduction and group.widest > 2 and group.narrowest == group.widest:
            found.append(_nvls(topology, group))
        if group.nodes > 1 and group.widest == group.narrowest > 1:
            found.append(_hierarchical(topology, group))
    return found


def _protocols(topology: Topology, group: RankGroup) -> tuple[Protocol, ...]:
    """LL128 needs NVLink everywhere in a node."""
    if topology.node.link == "loopback":
        return (Protocol.SIMPLE,)
    if topology.node.link == "pcie":
        return (Protocol.LL, Protocol.SIMPLE)
    return (Protocol.LL, Protocol.LL128, Protocol.SIMPLE)


def _share(topology: Topology, group: RankGroup, protocol: Protocol, gbps: float) -> float:
    """Bandwidth that a protocol reaches of a ring's."""
    if topology.node.link == "loopback":
        return gbps
    if protocol is Protocol.LL:
        cap = LL_MOST_GBPS.get(topology.node.architecture, 141.0) if group.nodes == 1 else math.inf
        return min(gbps * LL_SHARE, cap)
    return gbps * EFFICIENCY * (LL128_SHARE if protocol is Protocol.LL128 else 1.0)


def _hops(topology: Topology, algorithm: Algorithm, protocol: Protocol) -> tuple[float, float]:
    """(inside a node, between nodes) µs a step."""
    if topology.node.link == "loopback":
        return HOST_HOP_US, HOST_HOP_US + topology.network.extra_latency_us
    inside = HOP_LATENCY_US["pci" if topology.node.link == "pcie" else "nvlink"][algorithm][protocol]
    return inside, HOP_LATENCY_US["net"][algorithm][protocol] + topology.network.extra_latency_us


def _base(topology: Topology, algorithm: Algorithm, protocol: Protocol) -> float:
    return HOST_BASE_US if topology.node.link == "loopback" else BASE_LATENCY_US[algorithm][protocol]


def _own_part(topology: Topology, kind: CollectiveKind, group: RankGroup) -> float:
    """µs per byte of payload for a rank's own part, which the channels of a gather copy besides."""
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
    """Algorithmic bandwidth of an all-reduce in the switch; a part of a node gets ``(n − 1) / n`` of it."""
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
    """All-to-all: rank link inside, the busiest node's cards outside, at the same time. Send: one link or card."""
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
