"""The critical path of one period of a steady state, by bound and operation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.bottleneck import bottleneck
from graph_predictor.prediction.edited_host import kinds_of
from graph_predictor.prediction.path_operations import step_names
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
    kernel_bounds,
    sums_back,
    walks_back,
)
from tracer.arrays import Int8, Int64
from tracer.graph import ExecutionGraph, KernelKind

_LABELS = tuple(bound.label for bound in Bound)


@dataclass(frozen=True, slots=True)
class Explained:
    """One rank's period: ns by bound, what decides in one word, GPU active time of a cycle, and where its path is."""

    bounds: dict[str, float]
    bound: str
    active_ns: int
    causes: Causes
    start: PathStart

    def path(self) -> Path:
        """Walk along the path."""
        return walks_back(self.causes, [self.start]).one(0)


def explain(scenario: Scenario, steady: Steady) -> list[Explained]:
    """The critical paths of all ranks' last periods."""
    repeated = steady.repeated
    layout = repeated.shared.once("layout", (scenario.built,), lambda: _Layout.of(repeated, scenario.built.graphs))
    causes = Causes(steady.copies.launches, steady.simulated, layout.bounds)
    starts = [PathStart(at, causes.end_ns(at), int(stop))
              for at, stop in zip(steady.periods.at, steady.periods.stop_ns, strict=True)]
    return [_of_rank(steady, rank, causes, start, sums, layout) for rank, (start, sums) in enumerate(
        zip(starts, sums_back(causes, starts).tolist(), strict=True))]


def bottleneck_rank(period_ns: Int64, ranks: list[Explained]) -> int:
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


def _of_rank(steady: Steady, rank: int, causes: Causes, start: PathStart, sums: list[int],
             layout: _Layout) -> Explained:
    bounds = {label: float(ns) for label, ns in zip(_LABELS, sums, strict=True)}
    own, simulated = layout.computing[rank], steady.simulated
    active = active_ns(simulated.kernel_start[own], simulated.kernel_end[own], layout.device[rank])
    return Explained(bounds, bottleneck(bounds), active, causes, start)


def path_entries(scenario: Scenario, steady: Steady, path: Path) -> list[PathItem]:
    """What a path consists of by operation and bound, the longest first."""
    names = step_names(scenario, steady.copies.host)
    found = names.along(path, steady.simulated, steady.repeated.item, steady.repeated.kernel)
    total = float((path.end_ns - path.start_ns).sum()) or 1.0
    sums = np.bincount((found.name + 1) * len(Bound) + path.bound[found.segment], weights=found.ns)
    by_name: dict[tuple[str, int], float] = {}
    for each in np.flatnonzero(sums).tolist():
        # Ranks have tables of strings of their own.
        key = names.text(each // len(Bound) - 1), each % len(Bound)
        by_name[key] = by_name.get(key, 0.0) + float(sums[each])
    entries = [PathItem(name, Bound(bound).label, ns / scenario.cycle.steps / 1e3, ns / total)
               for (name, bound), ns in by_name.items()]
    return sorted(entries, key=lambda entry: (-entry.time_us, entry.operation))
