"""Communication of a recorded job: volume, bandwidth, exposure, skew and stragglers, by group and kind.

Transfer is the time from the last rank's arrival to the end (replay's intrinsic time); the rest of a rank's recorded
kernel is waiting. Time of a collective kernel is *exposed* where no computation runs on its rank's device, else
*overlapped*. Skew is the last arrival less the first.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graph_predictor.comm.recorded_calls import on_host
from graph_predictor.recorded.facts import check_device_work
from graph_predictor.simulation.ranks import job_clock, match_collectives, view_rank
from kernel_models.collectives import CollectiveKind, bus_factor
from kernel_models.collectives.recorded import element_bytes, kind_of, payload_bytes
from tracer.arrays import Int64
from tracer.columns import covered, union
from tracer.graph import NONE, ExecutionGraph, KernelKind, LaunchKind


@dataclass(slots=True)
class Traffic:
    """One group's collectives of one kind. ``members`` is the list of its ranks in the trace: groups of one name may
    differ.

    Times are sums over the ranks' collectives divided by the number of ranks (ns).

    ``transfer_ns`` is the sum of transfer times of matched collectives and ``matched`` their number; without any,
    bandwidths are unknown. ``last`` counts, by rank, how often the rank arrived last.
    """

    group: str
    members: str
    kind: str
    ranks: int
    count: int = 0
    payload_bytes: float = 0.0
    matched: int = 0
    matched_bytes: float = 0.0
    transfer_ns: int = 0
    kernel_ns: float = 0.0
    exposed_ns: float = 0.0
    skew_ns: list[int] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    recorded: int = 1
    """Number of the group's ranks that were recorded; ``count`` is the sum over them."""

    @property
    def wire_bytes(self) -> float:
        """Return the bytes that left one rank."""
        return self.payload_bytes * (bus_factor(CollectiveKind[self.kind.upper()], self.ranks) if
                                     self.kind.upper() in CollectiveKind.__members__ else 0.0)

    @property
    def algbw_gbps(self) -> float | None:
        """Return the payload over transfer time, 10⁹ bytes/s."""
        return self.matched_bytes / self.transfer_ns if self.transfer_ns else None

    @property
    def busbw_gbps(self) -> float | None:
        """Return ``algbw`` × bus factor."""
        if self.algbw_gbps is None or self.kind.upper() not in CollectiveKind.__members__:
            return None
        return self.algbw_gbps * bus_factor(CollectiveKind[self.kind.upper()], self.ranks)

    @property
    def straggler(self) -> tuple[int, float] | None:
        """Return the rank that arrived last most often, and the share of collectives in which it did."""
        if not self.last:
            return None
        rank = min(self.last, key=lambda r: (-self.last[r], r))
        return rank, self.last[rank] / sum(self.last.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        straggler = self.straggler
        return {
            "group": self.group, "members": self.members, "kind": self.kind, "ranks": self.ranks, "count": self.count,
            "payload_bytes": self.payload_bytes, "wire_bytes": self.wire_bytes, "algbw_gbps": self.algbw_gbps,
            "busbw_gbps": self.busbw_gbps, "kernel_us": self.kernel_ns / 1e3, "exposed_us": self.exposed_ns / 1e3,
            "overlapped_us": (self.kernel_ns - self.exposed_ns) / 1e3,
            "transfer_us": self.transfer_ns / 1e3 if self.matched else None,
            "median_skew_us": float(np.median(self.skew_ns)) / 1e3 if self.skew_ns else None,
            "max_skew_us": max(self.skew_ns) / 1e3 if self.skew_ns else None,
            "straggler": straggler[0] if straggler else None, "straggler_share": straggler[1] if straggler else None}


@dataclass(slots=True)
class CommReport:
    """A job's communication. ``histogram`` counts collectives by kind and power of two of bytes (``NONE``: unknown).
    ``exposed_ns`` and ``kernel_ns`` are by rank; ``steps`` is the mean number of steps of a rank."""

    traffic: list[Traffic]
    histogram: dict[str, dict[int, int]]
    exposed_ns: dict[int, int]
    kernel_ns: dict[int, int]
    window_ns: dict[int, int]
    steps: float
    unknown_sizes: int
    notes: list[str]

    def recorded_payload(self) -> dict[CollectiveKind, float]:
        """Return the payload bytes of each kind, per rank and step (mean over ranks)."""
        total: dict[CollectiveKind, float] = defaultdict(float)
        for row in self.traffic:
            if row.kind.upper() in CollectiveKind.__members__:
                total[CollectiveKind[row.kind.upper()]] += row.payload_bytes
        ranks = max(len(self.window_ns), 1)
        return {kind: value / ranks / max(self.steps, 1.0) for kind, value in total.items()}


def communication_report(graphs: list[ExecutionGraph]) -> CommReport:
    """Return the communication of the recorded ranks. Raises ``ForetraceError`` if a device's work is unknown."""
    check_device_work(graphs)
    traffic: dict[tuple[str, str, str, int], Traffic] = {}
    histogram: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    row_key: dict[tuple[int, int], tuple[Traffic, float]] = {}
    exposed_by_rank: dict[int, int] = {}
    kernel_by_rank: dict[int, int] = {}
    window: dict[int, int] = {}
    unknown = 0
    counted: dict[tuple[str, str, str, int], set[int]] = defaultdict(set)
    for position, graph in enumerate(graphs):
        rank = graph.meta.rank if graph.meta.rank >= 0 else position
        table, kernels = graph.collectives, graph.kernels
        exposed = _exposed(graph)
        on_device = kernels.kind == KernelKind.COLLECTIVE
        kernel_by_rank[rank] = int(kernels.duration_ns[on_device].sum())
        exposed_by_rank[rank] = int(exposed[on_device].sum())
        window[rank] = int(graph.meta.window_ns)
        for i in range(len(table)):
            kind = kind_of(graph, table, i)
            label = kind.label if kind is not None else "unknown"
            ranks = int(table.group_size[i]) if table.group_size[i] != NONE else max(graph.meta.world_size, len(graphs))
            name = graph.string(int(table.group[i])) if table.group[i] != NONE else "(all)"
            members = graph.string(int(table.ranks[i])) if table.ranks[i] != NONE else ""
            key = (name, members, label, ranks)
            row = traffic.setdefault(key, Traffic(name, members, label, ranks))
            size = float("nan")
            if kind is not None:
                _, width = element_bytes(graph, table, i)
                size = payload_bytes(kind, int(table.elements_in[i]), int(table.elements_out[i]), width, ranks)
            row.count += 1
            counted[key].add(rank)
            if size == size:
                row.payload_bytes += size
                histogram[label][int(np.log2(size)) if size >= 1 else 0] += 1
            else:
                unknown += 1
                histogram[label][NONE] += 1
            kernel = int(table.kernel[i])
            if kernel >= 0:
                row.kernel_ns += float(kernels.duration_ns[kernel])
                row.exposed_ns += float(exposed[kernel])
                row_key[position, kernel] = (row, size)
    views = [view_rank(graph) for graph in graphs]
    job = job_clock(views)
    clock = job.starts_ns
    matched = match_collectives(views, clock, job.drifts)
    for kernels_of, transfer in zip(matched.groups, matched.intrinsic_ns, strict=True):
        found = row_key.get(kernels_of[0])
        if found is None:
            continue
        row = found[0]
        sizes = [row_key[m][1] for m in kernels_of if m in row_key]
        arrivals = {p: int(graphs[p].kernels.start_ns[k]) + clock[p] for p, k in kernels_of}
        late = max(arrivals, key=lambda p: arrivals[p])
        rank = graphs[late].meta.rank if graphs[late].meta.rank >= 0 else late
        row.skew_ns.append(max(arrivals.values()) - min(arrivals.values()))
        row.last[rank] = row.last.get(rank, 0) + 1
        if all(s == s for s in sizes) and sizes:
            row.matched += 1
            row.matched_bytes += max(sizes)
            row.transfer_ns += int(transfer)
    for key, row in traffic.items():
        # Means over the ranks that took part, because times of ranks that run at once do not add up.
        took_part = max(len(counted[key]), 1)
        row.recorded = took_part
        row.kernel_ns /= took_part
        row.exposed_ns /= took_part
    steps = float(np.mean([max(len(g.steps), 1) for g in graphs])) if graphs else 0.0
    return CommReport(sorted(traffic.values(), key=lambda r: -r.kernel_ns), {k: dict(v) for k, v in histogram.items()},
                      exposed_by_rank, kernel_by_rank, window, steps, unknown, [*matched.notes, *job.notes])


def _exposed(graph: ExecutionGraph) -> Int64:
    """Return each collective kernel's time, ns, in which no computation or copy runs on its device (else 0).

    For collectives of the host it is the time in which the host waits for them.
    """
    kernels, calls = graph.kernels, graph.launches
    out: Int64 = np.zeros(len(kernels), np.int64)
    if on_host(graph):
        waits = np.flatnonzero(calls.kind == LaunchKind.BLOCKING_SYNC)
        for row in range(len(kernels)):
            low = np.maximum(calls.start_ns[waits], kernels.start_ns[row])
            high = np.minimum(calls.start_ns[waits] + calls.duration_ns[waits],
                              kernels.start_ns[row] + kernels.duration_ns[row])
            out[row] = np.maximum(high - low, 0).sum()
        return out
    for device in np.unique(kernels.device):
        busy = np.flatnonzero((kernels.device == device) & (kernels.kind != KernelKind.COLLECTIVE))
        mine = np.flatnonzero((kernels.device == device) & (kernels.kind == KernelKind.COLLECTIVE))
        if not len(mine):
            continue
        begin, end = kernels.start_ns[mine], kernels.start_ns[mine] + kernels.duration_ns[mine]
        out[mine] = kernels.duration_ns[mine]
        if not len(busy):
            continue
        joined = union(kernels.start_ns[busy], kernels.start_ns[busy] + kernels.duration_ns[busy])
        out[mine] -= covered(joined, begin, end)
    return out
