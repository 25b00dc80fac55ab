"""Why a settled step takes as long as it does: the critical path of one period, by bound, operation and source."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from graph_predictor.critical_path import Bound, Path, path_back
from graph_predictor.prediction.host_pieces import HostPieces
from graph_predictor.prediction.pricing import KernelTimes
from graph_predictor.prediction.result import PathItem
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.prediction.settle import Steady
from graph_predictor.prediction.state import gpu_active_ns, kinds_of
from graph_predictor.program import Int64
from kernel_models.model import Source

OUTSIDE = "outside any op"
HOST = "host"
_MERGED = {Bound.HOST: HOST, Bound.LAUNCH: HOST, Bound.SYNC: HOST}
"""Bounds that count together where one word names what decides: launch calls and return lags are the host's. (A gap
between two queued kernels is a launch too, but never decides.)"""


@dataclass(frozen=True, slots=True)
class Explained:
    """One rank's period: ns by bound, path entries, ns of the path by source, and GPU active time of a cycle."""

    bounds: dict[str, float]
    path: list[PathItem]
    source_ns: dict[Source, float]
    active_ns: int

    @property
    def bound(self) -> str:
        """What decides, in one word."""
        return deciding(self.bounds)


def deciding(bounds: dict[str, float]) -> str:
    """The largest of the bounds, the host's parts taken together."""
    merged: dict[str, float] = defaultdict(float)
    for bound in Bound:
        merged[_MERGED.get(bound, bound.label)] += bounds.get(bound.label, 0.0)
    return max(merged, key=lambda name: merged[name])


def explain(scenario: Scenario, steady: Steady, times: KernelTimes, host_source: Source, rank: int) -> Explained:
    """The critical path of a rank's last period."""
    kinds = kinds_of(steady.repeated, scenario.built.graphs)
    path = path_back(steady.program, steady.simulated, kinds, steady.at[rank], int(steady.stop_ns[rank]))
    length = path.end_ns - path.start_ns
    sources: dict[Source, float] = defaultdict(float)
    on_kernel = path.kernel >= 0
    recorded = steady.repeated.kernel[np.maximum(path.kernel, 0)] if len(steady.repeated.kernel) else path.kernel
    for code in Source:
        mine = on_kernel & (times.source[recorded] == code) if len(times.source) else on_kernel
        sources[code] += float(length[mine].sum())
    sources[host_source] += float(length[~on_kernel].sum())
    bounds = {bound.label: float(length[path.bound == bound].sum()) for bound in Bound}
    return Explained(bounds, _entries(scenario, steady, path, length, recorded), dict(sources),
                     _active(steady, kinds, rank))


def _active(steady: Steady, kinds: list[np.ndarray], rank: int) -> int:
    """GPU active time of a rank's last copy."""
    pointer = steady.program.kernel_ptr
    rows = np.arange(pointer[rank], pointer[rank + 1])
    rows = rows[steady.repeated.copy_of_kernel[rows] == steady.repeated.copies - 1]
    return gpu_active_ns(steady.simulated.kernel_start, steady.simulated.kernel_end, rows, np.concatenate(kinds))


def _entries(scenario: Scenario, steady: Steady, path: Path, length: Int64, recorded: Int64) -> list[PathItem]:
    graphs, program = scenario.built.graphs, scenario.built.program
    total = float(length.sum()) or 1.0
    found: dict[tuple[str, int], float] = defaultdict(float)
    main = main_operation(scenario.pieces, len(program.item_kind))
    rank_of_kernel, rank_of_item = program.kernel_rank(), program.thread_rank[program.item_thread()]
    for row in range(len(length)):
        kernel, item = int(path.kernel[row]), int(path.item[row])
        name = ""
        if kernel >= 0:
            k = int(recorded[row])
            graph = graphs[int(rank_of_kernel[k])]
            local = k - int(program.kernel_ptr[rank_of_kernel[k]])
            op = int(graph.kernels.op[local])
            name = graph.string(int(graph.ops.name[op])) if op >= 0 else graph.string(int(graph.kernels.name[local]))
        elif item >= 0:
            i = int(steady.repeated.item[item])
            op = int(main[i])
            name = graphs[int(rank_of_item[i])].string(int(graphs[int(rank_of_item[i])].ops.name[op])) if op >= 0 else ""
        found[name or OUTSIDE, int(path.bound[row])] += float(length[row])
    steps = scenario.cycle.steps
    return [PathItem(name, Bound(bound).label, ns / steps / 1e3, ns / total)
            for (name, bound), ns in sorted(found.items(), key=lambda entry: -entry[1])]


def main_operation(pieces: HostPieces, items: int) -> Int64:
    """The operation that most of each item's host time was spent in; -1 for none."""
    best, op = np.zeros(items, np.int64), np.full(items, -1, np.int64)
    order = np.argsort(pieces.ns, kind="stable")
    best[pieces.item[order]] = pieces.ns[order]
    op[pieces.item[order]] = pieces.op[order]
    return op
