"""The datasheet level: the fastest of NCCL's algorithms and protocols by published constants."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kernel_models.collectives.call import CollectiveBatch, CollectiveKind
from kernel_models.collectives.formulas import Line, RankGroup, lines
from kernel_models.collectives.nccl_constants import Algorithm, Protocol
from kernel_models.collectives.times import CommTimes, Level
from kernel_models.collectives.topology import Topology

INTERVAL_BYTES = (512 * 1024.0, 4 * 1024.0**2, 16 * 1024.0**2)
INTERVALS = {
    "nvswitch": ((0.22, 1.12), (0.26, 0.66), (0.13, 0.30)),
    "nvlink-mesh": ((0.48, 1.68), (0.60, 2.00), (0.50, 2.22)),
    "pcie": ((0.20, 1.75), (0.20, 2.75), (0.20, 2.85)),
    "nodes": ((0.30, 1.70), (0.30, 2.40), (0.30, 2.40)),
}
"""80% log half-widths (down, up) up to the first size, at the second and from the third, in between by log size: what
encloses 80% of all tables of a kind together, each counting the same (``python benchmarks/collectives.py`` prints it).

nvswitch: AIConfigurator's A100, H100 and H200, vTrain's A100, Vidur's A100 and H100 nodes. nvlink-mesh: vTrain's V100,
Vidur's pairwise-linked A100. pcie: AIConfigurator's L40S. nodes: Vidur's two nodes of A100 and of H100. Most times are
above a data sheet's, so the intervals reach up further than down. A host's (loopback) takes those of nodes.
"""
CHECKED = {("nvswitch", "ampere"), ("nvswitch", "hopper"), ("nvlink-mesh", "volta"), ("nvlink-mesh", "ampere"),
           ("pcie", "ada")}
"""Links and architectures of one node that the tables have."""
CHECKED_ANYWHERE = (CollectiveKind.ALL_REDUCE, CollectiveKind.SEND_RECV)
"""Kinds that every table with a mesh or two nodes has; single switched and PCIe nodes have the next ones too."""
CHECKED_INSIDE = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER,
                  CollectiveKind.ALL_TO_ALL)
CHECKED_NODES = 2
ALGORITHM_CODE = len(Protocol)
"""``CommTimes.algorithm`` is ``algorithm * ALGORITHM_CODE + protocol``."""


def algorithm_label(code: int) -> str:
    """Write algorithm and protocol, such as "ring/LL128"; empty where a measurement does not say."""
    if code < 0:
        return ""
    return f"{Algorithm(code // ALGORITHM_CODE).label}/{Protocol(code % ALGORITHM_CODE).label}"


@lru_cache(maxsize=4096)
def nccl_lines(topology: Topology, kind: CollectiveKind, group: RankGroup,
               algorithm: Algorithm | None = None, protocol: Protocol | None = None) -> tuple[Line, ...]:
    """The ways NCCL chooses among (no hierarchical one), or those of one algorithm and protocol (none: not possible
    here)."""
    return tuple(line for line in lines(topology, kind, group) if protocol in (None, line.protocol) and (
        line.algorithm is not Algorithm.HIERARCHICAL if algorithm is None else line.algorithm is algorithm))


class DatasheetModel:
    """Prices any collective of a topology. ``algorithm`` and ``protocol`` restrict it to one, such as the
    hierarchical."""

    def __init__(self, topology: Topology, algorithm: Algorithm | None = None,
                 protocol: Protocol | None = None) -> None:
        self.topology, self.algorithm, self.protocol = topology, algorithm, protocol

    def predict(self, batch: CollectiveBatch) -> CommTimes:
        """Times of all collectives; ``Level.UNKNOWN`` where the one algorithm cannot do it."""
        out = CommTimes.empty(len(batch))
        first, setting = batch.settings()
        for index, row in enumerate(first.tolist()):
            rows = slice(None) if len(first) == 1 else np.flatnonzero(setting == index)
            group = RankGroup(int(batch.ranks[row]), int(batch.nodes[row]), int(batch.widest[row]),
                              int(batch.narrowest[row]))
            ways = nccl_lines(self.topology, CollectiveKind(int(batch.kind[row])), group, self.algorithm,
                              self.protocol)
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
            down, up = half_widths(self.topology, size, group.nodes)
            out.time_us[rows], out.algorithm[rows], out.level[rows] = best, code, int(Level.DATASHEET)
            out.low_us[rows], out.high_us[rows] = best * np.exp(-down), best * np.exp(up)
        return out


def half_widths(topology: Topology, size: npt.NDArray[np.float64],
                nodes: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """80% log half-widths down and up at sizes in bytes; of several PCIe or meshed nodes the wider of both kinds."""
    link = topology.node.link
    kinds = [name for name in ((link,) if nodes == 1 else (link, "nodes")) if name in INTERVALS] or ["nodes"]
    at = np.log(np.maximum(size, 1.0))
    down, up = (np.max([np.interp(at, np.log(INTERVAL_BYTES), [pair[side] for pair in INTERVALS[name]])
                        for name in kinds], axis=0) for side in (0, 1))
    return down, up


def interval_checked(topology: Topology, kind: CollectiveKind, nodes: int) -> bool:
    """Return whether measurements of such a machine and collective stand behind the interval; elsewhere it is
    assumed."""
    node = topology.node
    if (node.link, node.architecture) not in CHECKED:
        return False
    if nodes == 1:
        return kind in (CHECKED_INSIDE if node.link in ("nvswitch", "pcie") else CHECKED_ANYWHERE)
    return nodes == CHECKED_NODES and node.link == "nvswitch" and kind in CHECKED_ANYWHERE
