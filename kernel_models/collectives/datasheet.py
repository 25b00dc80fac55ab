"""The datasheet level: the fastest of NCCL's algorithms and protocols by published constants."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kernel_models.collectives.call import CollectiveBatch, CollectiveKind
from kernel_models.collectives.formulas import Group, Line, lines
from kernel_models.collectives.nccl_constants import Algorithm, Protocol
from kernel_models.collectives.times import CommTimes, Level
from kernel_models.collectives.topology import Topology

INTERVAL_BYTES = (1024.0**2, 16 * 1024.0**2)
INTERVAL_LOG = (0.42, 0.20)
"""80% log half-widths up to the first and from the second size, in between by log size: of the A100, H100 and H200
single-node table (benchmarks/collectives.py prints the coverage)."""
ELSEWHERE, BRIDGES = 2.0, 6.0
"""Factors on them for other links and several nodes, and for PCIe, whose bridges no data sheet describes."""
ALGORITHM_CODE = len(Protocol)
"""``CommTimes.algorithm`` is ``algorithm * ALGORITHM_CODE + protocol``."""


def algorithm_label(code: int) -> str:
    """Such as "ring/LL128"; empty where a measurement does not say."""
    if code < 0:
        return ""
    return f"{Algorithm(code // ALGORITHM_CODE).label}/{Protocol(code % ALGORITHM_CODE).label}"


@lru_cache(maxsize=4096)
def nccl_lines(topology: Topology, kind: CollectiveKind, group: Group,
               algorithm: Algorithm | None = None) -> tuple[Line, ...]:
    """The ways NCCL chooses among (no hierarchical one), or those of one algorithm (none: not possible here)."""
    return tuple(line for line in lines(topology, kind, group) if (
        line.algorithm is not Algorithm.HIERARCHICAL if algorithm is None else line.algorithm is algorithm))


class DatasheetModel:
    """Prices any collective of a topology. ``algorithm`` restricts it to one, such as the hierarchical."""

    def __init__(self, topology: Topology, algorithm: Algorithm | None = None) -> None:
        self.topology, self.algorithm = topology, algorithm

    def predict(self, batch: CollectiveBatch) -> CommTimes:
        """Times of all collectives; ``Level.UNKNOWN`` where the one algorithm cannot do it."""
        out = CommTimes.empty(len(batch))
        first, setting = batch.settings()
        for index, row in enumerate(first.tolist()):
            rows = slice(None) if len(first) == 1 else np.flatnonzero(setting == index)
            group = Group(int(batch.ranks[row]), int(batch.nodes[row]), int(batch.widest[row]),
                          int(batch.narrowest[row]))
            ways = nccl_lines(self.topology, CollectiveKind(int(batch.kind[row])), group, self.algorithm)
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
            half = self._half_width(size, group)
            out.time_us[rows], out.algorithm[rows], out.level[rows] = best, code, int(Level.DATASHEET)
            out.low_us[rows], out.high_us[rows] = best * np.exp(-half), best * np.exp(half)
        return out

    def _half_width(self, size: npt.NDArray[np.float64], group: Group) -> npt.NDArray[np.float64]:
        half = np.interp(np.log(np.maximum(size, 1.0)), np.log(INTERVAL_BYTES), INTERVAL_LOG)
        node = self.topology.node
        if node.link == "pcie":
            return half * BRIDGES
        return half if node.link == "nvswitch" and group.nodes == 1 else half * ELSEWHERE
