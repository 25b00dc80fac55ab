"""A path's time by operation, of the step as edited: host work is split by what its slices take after the edits.

::

    path       ── host work before a call ──[ call ]──[ kernel ]──
    time of    add   mul (half as long)      call's    kernel's operation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.edited_host import EditedHost
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.causes import Bound, StartCause
from graph_predictor.simulation.critical_path import Path
from graph_predictor.simulation.engine import Simulated
from graph_predictor.simulation.host_slices import HostSlices
from graph_predictor.simulation.program import ItemKind
from tracer.arrays import Float64, Int64
from tracer.graph import NONE, ExecutionGraph

OUTSIDE = "outside any op"
GRAPH_LAUNCH = "CUDA graph launch"


@dataclass(frozen=True, slots=True)
class PathTimes:
    """Parts of a path, in no order; those of one segment add up to its length.

    Attributes:
        segment: row of the path.
        name: a number of ``OperationNames``; -1 for none.
        ns: length.
    """

    segment: Int64
    name: Int64
    ns: Float64


class OperationNames:
    """What the operations of a step's kernels and host time are called, by rows of the recorded program.

    Args:
        built: the job.
        slices: its host time.
        ns: what each slice takes.
        kernel_labels, slice_labels: names of work that has taken the place of other work.
        graphed: whether calls are one launch of a CUDA graph.
    """

    def __init__(self, built: Built, slices: HostSlices, ns: Float64, *, kernel_labels: Mapping[int, str] | None = None,
                 slice_labels: Mapping[int, str] | None = None, graphed: bool = False) -> None:
        self._graphs = built.graphs
        self._offset = np.concatenate([[0], np.cumsum([len(graph.strings) for graph in built.graphs])])
        self._more: list[str] = []
        self._kernel = np.concatenate([np.zeros(0, np.int64), *(
            self._numbers(rank, graph, graph.kernels.op, graph.kernels.name)
            for rank, graph in enumerate(built.graphs))])
        self._label(self._kernel, kernel_labels or {})
        rows = np.flatnonzero(~slices.is_cost & (ns > 0))
        rows = rows[np.argsort(slices.item[rows], kind="stable")]
        program = built.program
        of_slice: Int64 = np.full(len(slices), NONE, np.int64)
        self._item: Int64 = np.full(len(program.item_kind), NONE, np.int64)
        for rank, graph in enumerate(built.graphs):
            mine = slices.of_rank(rank)
            of_slice[mine] = self._numbers(rank, graph, slices.op[mine])
        self._label(of_slice, slice_labels or {})
        self._of_row, self._ns = of_slice[rows], ns[rows]
        count = np.bincount(slices.item[rows], minlength=len(program.item_kind))
        self._pointer = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        self._total = np.bincount(slices.item[rows], weights=ns[rows], minlength=len(program.item_kind))
        # A marker is in the operation that most of the host time before it was spent in.
        longest = rows[np.argsort(ns[rows], kind="stable")]
        self._item[slices.item[longest]] = of_slice[longest]
        is_call = program.item_kind == ItemKind.CALL
        rank_of = program.thread_rank[program.item_thread()]
        for rank, graph in enumerate(built.graphs):
            calls = np.flatnonzero(is_call & (rank_of == rank))
            self._item[calls] = self._numbers(rank, graph, graph.launches.op[program.item_row[calls]])
        self._own = np.where(is_call, self._number(GRAPH_LAUNCH), self._item) if graphed else self._item

    def text(self, number: int, none: str = OUTSIDE) -> str:
        """Return the name of a number; ``none`` for -1."""
        if number < 0:
            return none
        if number >= self._offset[-1]:
            return self._more[number - int(self._offset[-1])]
        rank = int(np.searchsorted(self._offset, number, side="right")) - 1
        return self._graphs[rank].strings[number - int(self._offset[rank])]

    def along(self, path: Path, simulated: Simulated, item: Int64, kernel: Int64) -> PathTimes:
        """Return the operations of a path's time.

        Args:
            path: of any program.
            simulated: its times.
            item, kernel: the recorded row that each row of that program is, or is a copy of.
        """
        length, name = (path.end_ns - path.start_ns).astype(np.float64), np.full(len(path.start_ns), NONE, np.int64)
        on_kernel, on_item = path.kernel >= 0, (path.kernel < 0) & (path.item >= 0)
        name[on_kernel] = self._kernel[kernel[path.kernel[on_kernel]]]
        own = on_item & ~path.is_work
        waits = ~np.isin(path.bound[own], (Bound.HOST, Bound.LAUNCH))
        rows = item[path.item[own]]
        name[own] = np.where(waits, self._item[rows], self._own[rows])
        # Time until a thread goes on after another one's work is a lag of the hand-over, and no operation's.
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

    def _numbers(self, rank: int, graph: ExecutionGraph, op: np.ndarray, otherwise: np.ndarray | int = NONE) -> Int64:
        """Return numbers of the names of a rank's operations, or where there is none (-1), of the other string."""
        code = np.where(op >= 0, np.append(graph.ops.name, NONE)[op], otherwise).astype(np.int64)
        return np.where(code >= 0, code + self._offset[rank], NONE)

    def _number(self, text: str) -> int:
        """Return the number of a name that no graph has."""
        if text not in self._more:
            self._more.append(text)
        return int(self._offset[-1]) + self._more.index(text)

    def _label(self, numbers: Int64, labels: Mapping[int, str]) -> None:
        for row, text in labels.items():
            numbers[row] = self._number(text)


def step_names(scenario: Scenario, host: EditedHost) -> OperationNames:
    """Return what the operations of an edited step are called; made once for all with the same host."""
    on_host, labels = scenario.built.computes_on_host, host.labels
    return scenario.shared.once("names", (scenario.built, scenario.slices, host), lambda: OperationNames(
        scenario.built, scenario.slices, host.ns, kernel_labels={} if on_host else labels,
        slice_labels=labels if on_host else {}, graphed=scenario.launches.graphed))
