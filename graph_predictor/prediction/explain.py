"""The critical path of one period of a steady state, by bound, operation and source."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.deciding import deciding
from graph_predictor.prediction.edited_host import kinds_of
from graph_predictor.prediction.pricing import KernelTimes
from graph_predictor.prediction.repeat import Repeated
from graph_predictor.prediction.result import PathItem
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.prediction.steady_state import SAME, Steady
from graph_predictor.recorded.gpu_active import active_ns
from graph_predictor.simulation.critical_path import (
    Bound,
    Causes,
    Path,
    PathStart,
    grouped_sums_back,
    kernel_bounds,
    walks_back,
)
from graph_predictor.simulation.host_pieces import HostPieces
from graph_predictor.simulation.program import Program
from kernel_models.model import Source
from tracer.arrays import Int8, Int64
from tracer.graph import NONE, ExecutionGraph, KernelKind

OUTSIDE = "outside any op"
_LABELS = tuple(bound.label for bound in Bound)


@dataclass(frozen=True, slots=True)
class Explained:
    """One rank's period: ns by bound, what decides in one word, ns of its path by source, GPU active time of a cycle,
    and where its path is."""

    bounds: dict[str, float]
    bound: str
    source_ns: dict[Source, float]
    active_ns: int
    causes: Causes
    start: PathStart

    def path(self) -> Path:
        """Walk along the path."""
        return walks_back(self.causes, [self.start]).one(0)


def explain(scenario: Scenario, steady: Steady, times: KernelTimes, host_source: Source) -> list[Explained]:
    """The critical paths of all ranks' last periods."""
    repeated = steady.repeated
    layout = repeated.shared.once("layout", (scenario.built,), lambda: _Layout.of(repeated, scenario.built.graphs))
    source = repeated.shared.once("sources", (times,), lambda: times.source.astype(np.int8)[repeated.kernel])
    causes = Causes(steady.copies.launches, steady.simulated, layout.bounds, source)
    starts = [PathStart(at, causes.end_ns(at), int(stop))
              for at, stop in zip(steady.periods.at, steady.periods.stop_ns, strict=True)]
    return [_of_rank(steady, host_source, rank, causes, start, sums, layout) for rank, (start, sums) in enumerate(
        zip(starts, grouped_sums_back(causes, starts).tolist(), strict=True))]


def deciding_rank(period_ns: Int64, ranks: list[Explained]) -> int:
    """Return the rank whose path is the job's: of the slowest ranks the one that waits least for others.

    Ranks that meet in collectives all take as long as the one they wait for.
    """
    slowest = np.flatnonzero(period_ns >= (1.0 - SAME) * period_ns.max())
    return int(min(slowest.tolist(), key=lambda rank: ranks[rank].bounds[Bound.WAITING_FOR_RANK.label]))


@dataclass(frozen=True, slots=True)
class _Layout:
    """What copies have in common whatever they take: the bound of each kernel's own time, and of each rank the kernels
    of the last copy that are no collectives, with their devices."""

    bounds: Int8
    computing: list[Int64]
    device: list[np.ndarray]

    @classmethod
    def of(cls, repeated: Repeated, graphs: list[ExecutionGraph]) -> _Layout:
        kinds = kinds_of(repeated, graphs)
        last = repeated.copy_of_kernel == repeated.copies - 1
        pointer = repeated.program.kernel_ptr.tolist()
        computing = [low + np.flatnonzero(last[low:high] & (kind != KernelKind.COLLECTIVE))
                     for low, high, kind in zip(pointer[:-1], pointer[1:], kinds, strict=True)]
        device = np.concatenate([graph.kernels.device for graph in graphs])[repeated.kernel]
        return cls(kernel_bounds(kinds), computing, [device[rows] for rows in computing])


def _of_rank(steady: Steady, host_source: Source, rank: int, causes: Causes, start: PathStart, sums: list[int],
             layout: _Layout) -> Explained:
    bounds = {label: float(ns) for label, ns in zip(_LABELS, sums[:len(Bound)], strict=True)}
    on_kernels = sums[len(Bound):]
    sources = {source: float(on_kernels[source]) if source < len(on_kernels) else 0.0 for source in Source}
    sources[host_source] += float(sum(sums[:len(Bound)]) - sum(on_kernels))
    own, simulated = layout.computing[rank], steady.simulated
    active = active_ns(simulated.kernel_start[own], simulated.kernel_end[own], layout.device[rank])
    return Explained(bounds, deciding(bounds), sources, active, causes, start)


def _recorded(steady: Steady, path: Path) -> Int64:
    """The recorded kernel of each segment of a path; any where it has none."""
    return steady.repeated.kernel[np.maximum(path.kernel, 0)] if len(steady.repeated.kernel) else path.kernel


def path_entries(scenario: Scenario, steady: Steady, path: Path) -> list[PathItem]:
    """What a path consists of by operation and bound, the longest first."""
    length, recorded = path.end_ns - path.start_ns, _recorded(steady, path)
    graphs, program = scenario.built.graphs, scenario.built.program
    total = float(length.sum()) or 1.0
    names = _Names(graphs)
    of_kernel, of_item = scenario.shared.once("names", (scenario.built, scenario.pieces),
                                              lambda: _named(names, program, scenario.pieces))
    item = steady.repeated.item[np.maximum(path.item, 0)] if len(of_item) else path.item
    name: np.ndarray = np.full(len(length), NONE, np.int64)
    on_kernel, on_item = path.kernel >= 0, (path.kernel < 0) & (path.item >= 0)
    name[on_kernel], name[on_item] = of_kernel[recorded[on_kernel]], of_item[item[on_item]]
    by_host = on_item & (path.bound == Bound.HOST)
    spent = np.bincount(item[by_host], weights=length[by_host], minlength=len(of_item))
    piece_name, piece_ns, split = _host_entries(scenario, names, spent)
    # Of items without pieces the time stays with the item.
    left = np.where(by_host & split[item], 0, length) if len(of_item) else length
    name, bound = np.append(name, piece_name), np.append(path.bound, np.full(len(piece_ns), int(Bound.HOST)))
    sums = np.bincount((name + 1) * len(Bound) + bound, weights=np.append(left, piece_ns))
    key = np.flatnonzero(sums)
    entries = [PathItem(names.text(each // len(Bound) - 1) or OUTSIDE, Bound(each % len(Bound)).label,
                        ns / scenario.cycle.steps / 1e3, ns / total)
               for each, ns in zip(key.tolist(), sums[key].tolist(), strict=True)]
    return sorted(entries, key=lambda entry: (-entry.time_us, entry.operation))


def _named(names: _Names, program: Program, pieces: HostPieces) -> tuple[Int64, Int64]:
    """Names of the operations of all kernels, and of that most of each item's host time was spent in."""
    of_kernel = np.concatenate([names.of(rank, g.ops.name, g.kernels.op, g.kernels.name)
                                for rank, g in enumerate(names.graphs)])
    main = main_operation(pieces, len(program.item_kind))
    rank_of_item = program.thread_rank[program.item_thread()]
    none = np.full(len(main), NONE)
    of_item = np.full(len(main), NONE, np.int64)
    for rank, graph in enumerate(names.graphs):
        mine = rank_of_item == rank
        of_item[mine] = names.of(rank, graph.ops.name, main[mine], none[mine])
    return of_kernel, of_item


def _host_entries(scenario: Scenario, names: _Names, spent: np.ndarray) -> tuple[Int64, np.ndarray, np.ndarray]:
    """Name and share of each host piece in the time spent in its item, ns; and which items have pieces.

    An item reaches from one call to the next: where operations launch nothing, as on a CPU, over a whole step.
    """
    pieces = scenario.pieces
    ns = scenario.host_times()
    if scenario.host.weight is not None:
        ns = ns * scenario.host.weight
    whole = np.bincount(pieces.item, weights=ns, minlength=len(spent))
    kept = np.flatnonzero((spent[pieces.item] > 0) & (whole[pieces.item] > 0))
    share = ns[kept] / whole[pieces.item[kept]] * spent[pieces.item[kept]]
    name = np.full(len(kept), NONE, np.int64)
    none = np.full(len(kept), NONE)
    for rank, graph in enumerate(scenario.built.graphs):
        mine = pieces.rank[kept] == rank
        name[mine] = names.of(rank, graph.ops.name, pieces.op[kept][mine], none[mine])
    return name, share, whole > 0


class _Names:
    """Numbers of names over all ranks, each of which has its own table of strings."""

    def __init__(self, graphs: list[ExecutionGraph]) -> None:
        self.graphs = graphs
        self.offset = np.concatenate([[0], np.cumsum([len(g.strings) for g in graphs])])

    def of(self, rank: int, op_name: np.ndarray, op: np.ndarray, otherwise: np.ndarray) -> Int64:
        """The name of each operation, or where there is none (-1) the other string code; -1 for neither."""
        code = np.where(op >= 0, np.append(op_name, NONE)[op], otherwise).astype(np.int64)
        return np.where(code >= 0, code + self.offset[rank], NONE)

    def text(self, number: int) -> str:
        """The text of a number."""
        if number < 0:
            return ""
        rank = int(np.searchsorted(self.offset, number, side="right")) - 1
        return self.graphs[rank].strings[number - int(self.offset[rank])]


def main_operation(pieces: HostPieces, items: int) -> Int64:
    """The operation that most of each item's host time was spent in; -1 for none."""
    best, op = np.zeros(items, np.int64), np.full(items, -1, np.int64)
    order = np.argsort(pieces.ns, kind="stable")
    best[pieces.item[order]] = pieces.ns[order]
    op[pieces.item[order]] = pieces.op[order]
    return op
