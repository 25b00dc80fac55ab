"""``BusBandwidths``: a handful of measured bus bandwidths of a cluster, which correct the formulas of its topology.

A benchmark of a cluster reports "all-reduce 52 GB/s on 16 nodes": the busbw (nccl-tests, PERFORMANCE.md) over all GPUs
of 16 whole nodes for a large buffer. That is too little for curves (``profile``), but it gives the error of the
formulas' bandwidth for each kind of collective and number of nodes. With B the measured busbw and B₀ the formulas'
busbw for the same group, another group on the same number of nodes takes

    t(S) = t₀(0) + (t₀(S) − t₀(0)) · B₀ / B' + steps · h,     B' = max(B, half of one node's B)

where h adds the time that is missing if B is below B': a latency of each of the collective's steps at the measured
size. A cluster whose busbw falls as 1/N sends as much as before; its ranks wait for one another. Between measured
numbers of nodes log B is interpolated over log nodes; beyond them it is constant. An unmeasured kind takes the smallest
correction of the measured ones. Figures of one node alone correct traffic within a node; traffic between nodes is
corrected if two nodes or more were measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import exp, isfinite, log

import numpy as np

from kernel_models.collectives.call import CollectiveBatch, CollectiveKind, CommError, CommTimes, Level, bus_factor
from kernel_models.collectives.datasheet import DatasheetModel
from kernel_models.collectives.topology import Topology
from kernel_models.spreads import BUS_BANDWIDTH
from tracer.table_input import TableInputError, cell_error, read_rows

KINDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
"""Kinds of collectives, in their order in an option's text."""
UNKNOWN = (0.0, 0.0)  # a line of no measured rate
LASTING = 0.5
"""Least share of one node's busbw that several nodes keep for infinitely large buffers. The rest of the loss counts as
a latency of each step. Chosen: Hugging Face's cluster has 0.47 to 0.67 of it on 8 and 16 nodes in its quicker half."""
LARGE = float(1 << 30)
"""Assumed bytes of the buffer of a measured busbw: so large that bandwidth alone decides."""
MOST_NODES = 1_000_000
"""Most nodes of any cluster."""
_ENTRY = re.compile(r"(?:([0-9]+):)?([0-9.]+(?:e[0-9]+)?(?:/[0-9.]+(?:e[0-9]+)?){0,2})")
_NUMBERED = re.compile(r"[-+]?[0-9.]+:")
_FORM = ("Write GB/s of all-reduce/all-gather/reduce-scatter for a number of whole nodes, such as 1:458/265/265 or "
         "1:458/265/265,64:13/6/6; without a number they are of all nodes.")


@dataclass(frozen=True)
class BusBandwidths:
    """Measured busbw, 10⁹ bytes/s, by kind of collective and number of whole nodes; 0 nodes means all nodes."""

    gbps: Mapping[tuple[CollectiveKind, int], float]

    @staticmethod
    def parse(text: str) -> BusBandwidths | None:
        """Read an option's text; return ``None`` for a text of another form, which may be a file's name.

        Raises:
            CommError: a bandwidth that no network has, or a number of nodes given twice.
        """
        found: dict[tuple[CollectiveKind, int], float] = {}
        for part in text.split(","):
            entry = _ENTRY.fullmatch(part.strip())
            if entry is None:
                if _NUMBERED.match(part.strip()):
                    raise CommError(f"{part.strip()[:40]} is no bandwidth of a number of nodes. {_FORM}")
                return None
            nodes = int(entry[1] or 0)
            if entry[1] is not None and not 1 <= nodes <= MOST_NODES:
                raise CommError(f"{entry[1][:40]} in {text[:60]} is no number of nodes. {_FORM}")
            for kind, figure in zip(KINDS, entry[2].split("/"), strict=False):
                if (kind, nodes) in found:
                    raise CommError(f"{text} gives {nodes or 'all'} nodes twice; give each number once. {_FORM}")
                found[kind, nodes] = _checked(figure, text)
        return BusBandwidths(found)

    @staticmethod
    def read(path: str) -> BusBandwidths:
        """Read a table with a column ``nodes`` and at least one of ``all_reduce_gbps``, ``all_gather_gbps`` and
        ``reduce_scatter_gbps``.

        Raises:
            TableInputError: it cannot be read, or a cell is not such a figure.
        """
        found: dict[tuple[CollectiveKind, int], float] = {}
        for row in read_rows(path, ("nodes",), "bus bandwidths", "docs/parallel.md"):
            nodes = row.whole("nodes", "number of whole nodes")
            for kind in KINDS:
                column = f"{kind.label}_gbps"
                if text := row.text(column):
                    try:
                        found[kind, nodes] = _checked(text, path)
                    except CommError:
                        raise cell_error(row.where, column, text, "busbw in GB/s") from None
        if not found:
            raise TableInputError(f"{path} has no bandwidth; give it a column {KINDS[0].label}_gbps.")
        return BusBandwidths(found)

    def on(self, topology: Topology) -> MeasuredBus:
        """Return the corrections of a cluster's formulas by these bandwidths."""
        return MeasuredBus(topology, self)


@dataclass(frozen=True)
class MeasuredBus:
    """Corrections of a topology's formulas by measured bandwidths."""

    topology: Topology
    bandwidths: BusBandwidths

    @cached_property
    def _measured(self) -> dict[CollectiveKind, dict[int, float]]:
        """Return the measured busbw, 10⁹ bytes/s, by kind and number of nodes."""
        found: dict[CollectiveKind, dict[int, float]] = {}
        for (kind, nodes), gbps in sorted(self.bandwidths.gbps.items()):
            found.setdefault(kind, {})[nodes or self.topology.nodes] = gbps
        return found

    @cached_property
    def hop_us(self) -> float:
        """Return the time that each rank of further nodes adds to a gather, µs; 0 where it was not measured.

        On Hugging Face's cluster it is equal on 2 to 64 nodes: 36 to 39 µs in one state of the cluster, 265 to 320 in
        another, in which collectives within nodes are as slow (``benchmarks/nanotron.py``).
        """
        found = []
        for kind in KINDS[1:]:
            known = self._measured.get(kind, {})
            nodes = max(known, default=1)
            if nodes > 1:
                moved = 1e-3 * LARGE * max(1 / known[nodes] - 1 / self._of_one_node(kind), 0.0)
                found.append(moved / (self.topology.node.gpus * (nodes - 1)))
        return float(np.mean(found)) if found else 0.0

    def correct(self, batch: CollectiveBatch, times: CommTimes) -> None:
        """Correct formulas' times, in place, by measured bandwidths; unmeasured kinds by the least correction."""
        rows = np.flatnonzero(times.level == int(Level.DATASHEET))
        if not len(rows):
            return
        least = batch.take(rows)
        least.payload_bytes = np.ones(len(rows))
        latency = np.minimum(DatasheetModel(self.topology).predict(least).time_us, times.time_us[rows])
        for row, start in zip(rows.tolist(), latency.tolist(), strict=True):
            kind, nodes, ranks = (int(getattr(batch, name)[row]) for name in ("kind", "nodes", "ranks"))
            if (line := self._lines.get((kind, nodes)) or self._set_line(kind, nodes)) == UNKNOWN:
                continue
            factor, hop = line
            steps = (2 if kind == CollectiveKind.ALL_REDUCE else 1) * (ranks - 1) if kind in KINDS else 1
            us = start + (float(times.time_us[row]) - start) * factor + steps * hop
            exactly = nodes in self._measured.get(CollectiveKind(kind), {}) and ranks == nodes * self.topology.node.gpus
            times.level[row] = int(Level.MEASURED if exactly else Level.INTERPOLATED)
            times.time_us[row] = us
            times.low_us[row], times.high_us[row] = us * exp(-BUS_BANDWIDTH), us * exp(BUS_BANDWIDTH)

    @cached_property
    def _lines(self) -> dict[tuple[int, int], tuple[float, float]]:
        return {}

    def _set_line(self, kind: int, nodes: int) -> tuple[float, float]:
        """Return the factor on a transfer and the latency of a step, µs, for a kind on a number of nodes. A kind
        without bandwidths takes the smallest factor of a measured kind."""
        own = self._line(CollectiveKind(kind), nodes)
        known = [found for each in self._measured if (found := self._line(each, nodes)) != UNKNOWN]
        self._lines[kind, nodes] = own if own != UNKNOWN else min(known, default=UNKNOWN)
        return self._lines[kind, nodes]

    def _line(self, kind: CollectiveKind, nodes: int) -> tuple[float, float]:
        known = self._measured.get(kind, {})
        if nodes not in known and (nodes == 1 or max(known, default=1) == 1):
            return UNKNOWN
        at = np.log(np.array(list(known), np.float64))
        gbps = exp(float(np.interp(log(nodes), at, np.log(list(known.values())))))
        # A busbw far below one node's is due to waiting: further ranks add latency, further nodes take no bandwidth.
        lasting = max(gbps, LASTING * self._of_one_node(kind)) if nodes > 1 else gbps
        sheet, moved, ranks = self._formula(kind, nodes)
        steps = (2 if kind is CollectiveKind.ALL_REDUCE else 1) * (ranks - 1)
        return moved / lasting / sheet, moved * (1 / gbps - 1 / lasting) / steps

    def _formula(self, kind: CollectiveKind, nodes: int) -> tuple[float, float, int]:
        """Return the formulas' time of a large buffer on whole nodes, µs, the bytes / 1000 that move, and the ranks."""
        group = self.topology.first(nodes * self.topology.node.gpus)
        sheet = float(DatasheetModel(self.topology).predict(CollectiveBatch.of(kind, LARGE, group)).time_us[0])
        return sheet, 1e-3 * bus_factor(kind, group.ranks) * LARGE, group.ranks

    def _of_one_node(self, kind: CollectiveKind) -> float:
        """Return the bus bandwidth within a node, GB/s: measured, else by formula, else 0."""
        if 1 in (known := self._measured.get(kind, {})):
            return known[1]
        sheet, moved, _ = self._formula(kind, 1)
        return moved / sheet if sheet and moved else 0.0


def _checked(figure: str, text: str) -> float:
    try:
        gbps = float(figure)
    except ValueError:
        gbps = 0.0
    if not (isfinite(gbps) and 0 < gbps < 1e5):
        raise CommError(f"{figure} in {text} is no bandwidth in GB/s. {_FORM}")
    return gbps
