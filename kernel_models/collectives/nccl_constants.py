"""Constants of NCCL's own tuner (its ``src/graph/tuning.cc`` and ``src/graph/topo.h``, 2.30), as numbers by name.

They are what NCCL's authors measured once, not a calibration of any machine: alone they are off by 15–37% on average.
"""

from __future__ import annotations

from enum import IntEnum


class Algorithm(IntEnum):
    """An algorithm that does a collective."""

    RING = 0
    TREE = 1
    NVLS = 2
    """The switch reduces and multicasts."""
    NVLS_TREE = 3
    """NVLS inside nodes, a tree across."""
    HIERARCHICAL = 4
    """Reduce-scatter inside nodes, all-reduce across them on each GPU's part, all-gather inside."""
    DIRECT = 5
    """Every rank sends to every other: all-to-all, send and receive."""

    @property
    def label(self) -> str:
        """Lower-case name."""
        return self.name.lower().replace("_", "-")


class Protocol(IntEnum):
    """A protocol that hands bytes over: flags in every 8 bytes, in every 128 bytes, or behind fences."""

    LL = 0
    LL128 = 1
    SIMPLE = 2

    @property
    def label(self) -> str:
        """Return its name as NCCL writes it."""
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
"""Latency of a launched collective by protocol LL, LL128, Simple (``baseLatencies``), µs."""

HOP_LATENCY_US = {
    "nvlink": {Algorithm.TREE: (0.6, 1.25, 4.0), Algorithm.RING: (0.6, 1.9, 3.4), Algorithm.NVLS: (25.0, 25.0, 25.0),
               Algorithm.NVLS_TREE: (25.0, 25.0, 25.0)},
    "pci": {Algorithm.TREE: (1.0, 1.9, 4.0), Algorithm.RING: (1.0, 2.5, 5.7), Algorithm.NVLS: (0.0, 0.0, 0.0),
            Algorithm.NVLS_TREE: (0.0, 0.0, 0.0)},
    "net": {Algorithm.TREE: (5.0, 8.5, 14.0), Algorithm.RING: (2.7, 4.0, 14.0), Algorithm.NVLS: (18.0, 18.0, 18.0),
            Algorithm.NVLS_TREE: (20.9, 20.9, 20.9)},
}
"""Latency of one step by the slowest link it uses, then as above (``hwLatencies``), µs."""

LINK_SHARE = {"volta": 20.0 / 25.0, "ampere": 20.0 / 25.0, "ada": 1.0, "hopper": 20.6 / 25.0, "blackwell": 40.1 / 50.0,
              "rtx-blackwell": 1.0, "cdna3": 0.75, "cdna4": 0.75, "host": 1.0}
"""Share of NVLink's rate that a ring gets: topo.h's figure for each link over the data sheet's 25 or 50 GB/s; for
Infinity Fabric the one that RCCL's documentation reports (about three quarters; CDNA 4's links are assumed to be like
it). Ada and RTX Blackwell have no NVLink."""

PCI_SHARE = 0.75
"""topo.h: 12 GB/s of a third-generation slot's 15.8 GB/s."""

EFFICIENCY = 0.92
"""Share of a ring's or tree's bandwidth that the Simple protocol reaches."""
LL128_SHARE = 120.0 / 128.0
"""Share of data: 8 of 128 bytes are flags."""
LL_SHARE = 0.5
"""Share of data: 4 of 8 bytes are flags."""
LL_MOST_GBPS = {"volta": 39.0, "ampere": 87.7, "ada": 87.7, "hopper": 141.0, "blackwell": 282.0,
                "rtx-blackwell": 282.0, "cdna3": 141.0, "cdna4": 141.0, "host": 39.0}
"""Bandwidth cap of LL inside one node (``llMaxBws``; NCCL takes compute capability 12 as 10, and CDNA 4 is assumed to
be like CDNA 3)."""
CHANNEL_GBPS = {"volta": 20.0, "ampere": 20.0, "ada": 20.0, "hopper": 36.7, "blackwell": 40.0, "rtx-blackwell": 40.0,
                "cdna3": 36.7, "cdna4": 36.7}
"""Most that one channel (a thread block) moves, 10⁹ bytes/s (``perChMaxRingLL128Bws``)."""
CHANNELS = 24
"""Channels of a large collective behind NVSwitch."""
NVLS_EFFICIENCY = {"hopper": 0.85, "blackwell": 0.74}
NVLS_RATIO = 5.0 / 6.0
"""Algorithmic over bus bandwidth of NVLS."""
NETWORK_SIMPLE_RING = 1.4
"""Multi-node rings with Simple take this factor of latency."""
HOST_BASE_US, HOST_HOP_US = 40.0, 25.0
"""Gloo over a host's loopback: a stand-in until ``foretrace comm bench`` has measured the host."""
