"""Why a step takes its time: its bottleneck, its critical path by bound and operation, and the sources of its times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.edited_repeats import GRAPH_LAUNCH_NS, EditedHost, kinds_of
from graph_predictor.prediction.pricing import KernelTimes
from graph_predictor.prediction.repeat import Repeated
from graph_predictor.prediction.result import PathItem
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.prediction.steady_state import SAME, Steady
from graph_predictor.recorded.facts import active_ns
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.engine import Causes, Path, PathStart, kernel_bounds, sums_back, walks_back
from graph_predictor.simulation.host_slices import HostSlices
from graph_predictor.simulation.program import Bound, ItemKind, Simulated, StartCause, pointers
from kernel_models.op_call import Source
from tracer.arrays import Bool, Float64, Int8, Int32, Int64
from tracer.graph import NONE, ExecutionGraph, KernelKind

HOST = "host"
_MERGED = {Bound.HOST: HOST, Bound.LAUNCH: HOST, Bound.SYNC: HOST}
"""Bounds that count together in the word for what decides: launch calls and return lags are part of the host. (A gap
between two queued kernels is bound by the launch too, but never decides.)"""
_WORDS = {bound.label: _MERGED.get(bound, bound.label) for bound in Bound}


def bottleneck(bounds: dict[str, float]) -> str:
    """Return the word for the largest bound (by label) along the critical path, with the host's parts added up.

    In a steady state everything happens one step time later from step to step. The resource with the longest period
    decides, a host thread or a stream of the device. A stream may decide even while the host still runs ahead and fills
    the launch queue, so that the recorded step waited for nothing::

        host      |== step 1 ==|== step 2 ==|== step 3 ==|                  5 ms from end to end
        stream    #### of step 1 ####|#### of step 2 ####|#### of step 3 ####    8 ms: the device decides

    The word is the largest part of the critical path of that steady state. ``Prediction.savings_us`` gives the
    evidence: the time that a host, a GPU or a network that takes no time would save.
    """
    merged: dict[str, float] = defaultdict(float)
    for label, word in _WORDS.items():
        merged[word] += bounds.get(label, 0.0)
    return max(merged, key=lambda name: merged[name])


OUTSIDE = "outside any op"
GRAPH_LAUNCH = "CUDA graph launch"


@dataclass(frozen=True, slots=True)
class PathTimes:
    """Parts of a path, in no order; the parts of one segment add up to its length.

    Attributes:
        segment: row of the path.
        name: a number of ``OperationNames``; -1 for none.
        ns: length.
    """

    segment: Int64
    name: Int64
    ns: Float64


class OperationNames:
    """Names of the operations behind a step's kernels and host time, by rows of the recorded program.

    Host work on a path is split in proportion to its slices' times after the edits.

    ::

        path       ── host work before a call ──[ call ]──[ kernel ]──
        time of    add   mul (half as long)      call's    kernel's operation

    Args:
        built: the job.
        slices: its host time.
        ns: time of each slice.
        items: mask of the items to name; all by default.
        kernel_labels, slice_labels: names of work that has replaced other work.
        graphed: whether all launches are one launch of a CUDA graph.
    """

    def __init__(self, built: Built, slices: HostSlices, ns: Float64, *, items: Bool | None = None,
                 kernel_labels: Mapping[int, str] | None = None, slice_labels: Mapping[int, str] | None = None,
                 graphed: bool = False) -> None:
        self._graphs = built.graphs
        self._offset = np.concatenate([[0], np.cumsum([len(graph.strings) for graph in built.graphs])])
        self._more: list[str] = []
        self._kernel: Int32 = np.concatenate([np.zeros(0, np.int32), *(
            self._numbers(rank, graph, graph.kernels.op, graph.kernels.name)
            for rank, graph in enumerate(built.graphs))])
        self._label(self._kernel, kernel_labels or {}, np.arange(len(self._kernel)))
        work = ~slices.is_cost & (ns > 0)
        rows = np.flatnonzero(work if items is None else work & items[slices.item])
        rows = rows[np.argsort(slices.item[rows], kind="stable")]
        program = built.program
        self._of_row: Int32 = np.full(len(rows), NONE, np.int32)
        self._item: Int32 = np.full(len(program.item_kind), NONE, np.int32)
        for rank, graph in enumerate(built.graphs):
            mine = np.flatnonzero(slices.rank[rows] == rank)
            self._of_row[mine] = self._numbers(rank, graph, slices.op[rows[mine]])
        self._label(self._of_row, slice_labels or {}, rows)
        item, self._ns = slices.item[rows], ns[rows]
        self._pointer = pointers(np.bincount(item, minlength=len(program.item_kind)))
        self._total = np.bincount(item, weights=self._ns, minlength=len(program.item_kind))
        # A marker is named after the operation that took most of the host time before it.
        by_length = np.argsort(self._ns, kind="stable")
        self._item[item[by_length]] = self._of_row[by_length]
        is_call = program.item_kind == ItemKind.CALL
        rank_of = program.thread_rank[program.item_thread()]
        for rank, graph in enumerate(built.graphs):
            calls = np.flatnonzero(is_call & (rank_of == rank))
            self._item[calls] = self._numbers(rank, graph, graph.launches.op[program.item_row[calls]])
        self._own = np.where(is_call, self._number(GRAPH_LAUNCH), self._item) if graphed else self._item

    def text(self, number: int) -> str:
        """Return the name with a number; ``OUTSIDE`` for -1."""
        if number < 0:
            return OUTSIDE
        if number >= self._offset[-1]:
            return self._more[number - int(self._offset[-1])]
        rank = int(np.searchsorted(self._offset, number, side="right")) - 1
        return self._graphs[rank].strings[number - int(self._offset[rank])]

    def along(self, path: Path, simulated: Simulated, item: Int64, kernel: Int64) -> PathTimes:
        """Return the operations of a path's time.

        Args:
            path: path of any program.
            simulated: the times of that program.
            item, kernel: for each row of that program, the recorded row that it is or copies.
        """
        length, name = (path.end_ns - path.start_ns).astype(np.float64), np.full(len(path.start_ns), NONE, np.int64)
        on_kernel, on_item = path.kernel >= 0, (path.kernel < 0) & (path.item >= 0)
        name[on_kernel] = self._kernel[kernel[path.kernel[on_kernel]]]
        own = on_item & ~path.is_work
        waits = ~np.isin(path.bound[own], (Bound.HOST, Bound.LAUNCH))
        rows = item[path.item[own]]
        name[own] = np.where(waits, self._item[rows], self._own[rows])
        # Time until a thread resumes after another thread's work is a lag of the hand-over and belongs to no operation.
        work = np.flatnonzero(on_item & path.is_work)
        work = work[simulated.item_start_cause[path.item[work]] != StartCause.OTHER_THREAD]
        of = item[path.item[work]]
        known = self._total[of] > 0
        work, of = work[known], of[known]
        count = np.diff(self._pointer)[of]
        segment = np.repeat(work, count)
        row = np.arange(len(segment)) + np.repeat(self._pointer[of] - (np.cumsum(count) - count), count)
        share = self._ns[row] / np.repeat(self._total[of], count) * length[segment]
        whole = np.ones(len(length), np.bool_)
        whole[work] = False
        return PathTimes(np.concatenate([np.flatnonzero(whole), segment]),
                         np.concatenate([name[whole], self._of_row[row]]), np.concatenate([length[whole], share]))

    def _numbers(self, rank: int, graph: ExecutionGraph, op: np.ndarray, otherwise: np.ndarray | int = NONE) -> Int32:
        """Return numbers of the names of a rank's operations; where there is none (-1), of the string ``otherwise``."""
        code = np.where(op >= 0, np.append(graph.ops.name, np.int32(NONE))[op], otherwise).astype(np.int32)
        return np.where(code >= 0, code + np.int32(self._offset[rank]), np.int32(NONE))

    def _number(self, text: str) -> int:
        """Return the number of a name that no graph has."""
        if text not in self._more:
            self._more.append(text)
        return int(self._offset[-1]) + self._more.index(text)

    def _label(self, numbers: Int32, labels: Mapping[int, str], rows: Int64) -> None:
        """Replace numbers by those of ``labels``, which are by row; ``rows`` are the rows of ``numbers``."""
        order = np.argsort(rows, kind="stable") if labels else rows
        for row, text in labels.items():
            number, at = self._number(text), int(np.searchsorted(rows, row, sorter=order))
            if at < len(rows) and rows[order[at]] == row:
                numbers[order[at]] = number


def step_names(scenario: Scenario, host: EditedHost) -> OperationNames:
    """Return the names of the operations of an edited step; kept for steps with the same host."""
    on_host, labels = scenario.built.computes_on_host, host.labels
    return scenario.shared.once("names", (scenario.built, scenario.slices, host), lambda: OperationNames(
        scenario.built, scenario.slices, host.ns, items=scenario.cycle.item, kernel_labels={} if on_host else labels,
        slice_labels=labels if on_host else {}, graphed=scenario.launches.graphed))


ROUNDING = 1e-6
"""A factor on host time counts as 1 if it differs from 1 by less than this (rounding)."""


def time_sources(scenario: Scenario, host: EditedHost, times: KernelTimes) -> tuple[dict[str, float], dict[str, float]]:
    """Return shares of a step's host and device time by the label of their source, the most certain first; then shares
    of device time alone. Both count all ranks, and also time that the step does not wait for.

    Removed time does not count. The best source of host time that an edit has changed is *anchored*.

    Args:
        scenario: the step with its edits.
        host: the host side after the edits.
        times: the times of its kernels.
    """
    shared = scenario.shared
    device = shared.once("device sources", (times, scenario.cycle), lambda: _sums(
        times.source[scenario.cycle.kernel], times.ns[scenario.cycle.kernel]))
    own = shared.once("host sources", (host, scenario.cycle, scenario.slices, int(scenario.host.source)),
                      lambda: _of_host(scenario, host))
    return _shares(device + own), _shares(device)


def _of_host(scenario: Scenario, host: EditedHost) -> Float64:
    """Return the host time by source, ns."""
    slices, source = scenario.slices, scenario.host.source
    mine = scenario.cycle.working[slices.item]
    ns, was = host.ns[mine], slices.ns[mine]
    changed = np.abs(ns - was) > ROUNDING * was
    sums = _sums(np.where(changed, max(source, Source.ANCHORED), source), ns)
    if scenario.host.guessed:
        guessed = scenario.host.guessed * sums
        sums -= guessed
        sums[Source.HEURISTIC] += float(guessed.sum())
    if scenario.launches.graphed:
        sums[Source.HEURISTIC] += GRAPH_LAUNCH_NS * scenario.host.factor * len(scenario.built.graphs)
    return sums


def _sums(source: np.ndarray, ns: Float64) -> Float64:
    return np.bincount(source, weights=ns, minlength=len(Source)).astype(np.float64)


def _shares(ns: Float64) -> dict[str, float]:
    total = float(ns.sum()) or 1.0
    return {source.label: float(ns[source]) / total for source in Source if ns[source] > 0}


@dataclass(frozen=True, slots=True)
class Explained:
    """One rank's period: ns by bound, the deciding bound in one word, GPU active time of a cycle (ns), and the place
    where its critical path starts."""

    bounds: dict[str, float]
    bound: str
    active_ns: int
    causes: Causes
    start: PathStart

    def path(self) -> Path:
        """Return the critical path, found by a walk back from its end."""
        return walks_back(self.causes, [self.start]).one(0)


def explain(scenario: Scenario, steady: Steady) -> list[Explained]:
    """Return the critical paths of all ranks' last periods."""
    repeated = steady.repeated
    layout = repeated.shared.once("layout", (scenario.built,), lambda: _Layout.of(repeated, scenario.built.graphs))
    causes = Causes(steady.copies.launches, steady.simulated, layout.bounds)
    starts = [PathStart(at, causes.end_ns(at), int(stop))
              for at, stop in zip(steady.periods.at, steady.periods.stop_ns, strict=True)]
    found, simulated = [], steady.simulated
    for start, sums, own, device in zip(
            starts, sums_back(causes, starts).tolist(), layout.computing, layout.device, strict=True):
        bounds = {bound.label: float(ns) for bound, ns in zip(Bound, sums, strict=True)}
        active = active_ns(simulated.kernel_start[own], simulated.kernel_end[own], device)
        found.append(Explained(bounds, bottleneck(bounds), active, causes, start))
    return found


def bottleneck_rank(period_ns: Int64, ranks: list[Explained]) -> int:
    """Return the rank whose critical path is the job's: among the slowest ranks, that with the least wait for others.

    Ranks that meet in collectives all take the time of the rank they wait for.
    """
    slowest = np.flatnonzero(period_ns >= (1.0 - SAME) * period_ns.max())
    return int(min(slowest.tolist(), key=lambda rank: ranks[rank].bounds[Bound.WAITING_FOR_RANK.label]))


@dataclass(frozen=True, slots=True)
class _Layout:
    """Properties of copies that do not depend on times: the bound of each kernel's own time, and for each rank the
    computing kernels of the last copy with their devices."""

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


def path_entries(scenario: Scenario, steady: Steady, path: Path) -> list[PathItem]:
    """Return the parts of a path by operation and bound, the longest first."""
    names = step_names(scenario, steady.copies.host)
    found = names.along(path, steady.simulated, steady.repeated.item, steady.repeated.kernel)
    total = float((path.end_ns - path.start_ns).sum()) or 1.0
    sums = np.bincount((found.name + 1) * len(Bound) + path.bound[found.segment], weights=found.ns)
    by_name: dict[tuple[str, int], float] = {}
    for each in np.flatnonzero(sums).tolist():
        # Each rank has its own table of strings, so equal names have different numbers.
        key = names.text(each // len(Bound) - 1), each % len(Bound)
        by_name[key] = by_name.get(key, 0.0) + float(sums[each])
    entries = [PathItem(name, Bound(bound).label, ns / scenario.cycle.steps / 1e3, ns / total)
               for (name, bound), ns in by_name.items()]
    return sorted(entries, key=lambda entry: (-entry.time_us, entry.operation))
