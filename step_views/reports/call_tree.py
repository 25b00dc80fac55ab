"""The call tree of a step: phases, their modules, and the operations in these, with own host and GPU time.

Times are those of ``breakdown``, for the mean step that counts and all ranks together. A node's own time excludes the
nodes below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from graph_predictor.prediction.explain import OUTSIDE
from graph_predictor.prediction.path_attribution import attribute_paths, bound_sums
from graph_predictor.prediction.replay import WINDOW, Replay, ReplayedStep
from graph_predictor.recorded.module_paths import with_backward_modules
from graph_predictor.simulation.engine import Causes, Paths, walks_back
from graph_predictor.simulation.host_slices import exclusive_time, operation_of, waits
from graph_predictor.simulation.program import Bound
from step_views.reports.breakdown_loop import GPU, HOST, WAITING, sum_steps
from tracer.arrays import Int64
from tracer.columns import GroupSums, RowsByNumber, empty_room, grouped, kinds_of, spans, tallied, totals
from tracer.graph import NONE, ExecutionGraph, OpKind, Phase

STEP = "step"


@dataclass(slots=True)
class CallNode:
    """A phase, module or operation. ``parent`` is an index in the tree (-1 for the step). Times are sums over steps."""

    name: str
    kind: str
    parent: int
    calls: int = 0
    host_ns: int = 0
    waiting_ns: int = 0
    gpu_ns: int = 0


@dataclass(frozen=True, slots=True)
class CallTree:
    """Nodes, parents before their children, and the number of steps over which their times are summed."""

    nodes: list[CallNode]
    steps: int

    def inclusive(self, what: str) -> list[int]:
        """Return each node's time including all nodes below it, ns; ``what``: host_ns, waiting_ns or gpu_ns."""
        sums = [getattr(node, what) for node in self.nodes]
        for at in range(len(self.nodes) - 1, 0, -1):
            sums[self.nodes[at].parent] += sums[at]
        return sums


def call_tree(replay: Replay, counted: Sequence[tuple[int, str]] | None = None) -> CallTree:
    """Return the call tree of a replay's steps that count. ``counted`` selects steps by (rank, name) instead."""
    wanted = None if counted is None else set(counted)
    steps = [s for s in replay.steps if (s.counts if wanted is None else (s.rank, s.name) in wanted)]
    graphs = replay.graphs
    position = {(g.meta.rank if g.meta.rank >= 0 else i): i for i, g in enumerate(graphs)}
    causes = Causes(replay.program, replay.simulated, [g.kernels.kind for g in graphs])
    tree = _Growing()
    ranks: dict[int, _RankTree] = {}
    for step in steps:
        at = position[step.rank]
        if at not in ranks:
            ranks[at] = _RankTree(tree, OperationSums(replay, at, causes))
        ranks[at].add(step)
    return CallTree(tree.nodes, max(len(steps), 1))


class _Growing:
    """Nodes found so far, by parent, name and kind."""

    def __init__(self) -> None:
        self.nodes = [CallNode(STEP, STEP, -1)]
        self.known: dict[tuple[int, str, str], int] = {}

    def child(self, parent: int, name: str, kind: str) -> int:
        key = parent, name, kind
        if key not in self.known:
            self.known[key] = len(self.nodes)
            self.nodes.append(CallNode(name, kind, parent))
        return self.known[key]

    def base(self, phase: str, module: str) -> int:
        """Return the node of a module in a phase."""
        at = self.child(0, phase, "phase")
        for part in filter(None, module.split("/")):
            at = self.child(at, part, "module")
        return at


class _RankTree:
    """The nodes of one rank's operations."""

    def __init__(self, tree: _Growing, times: OperationSums) -> None:
        self.tree, self.times = tree, times
        # Rows are read one by one: a memory view is as small as the table and as fast as a list.
        self.node = np.full(len(times.graph.ops), NONE, np.int32).data
        self.bases: dict[tuple[int, int], int] = {}
        ops = times.graph.ops
        self.step_names = set(times.graph.steps.name.tolist())
        self.columns = [np.ascontiguousarray(column).data for column in (ops.name, ops.parent, ops.module, ops.phase)]

    def add(self, step: ReplayedStep) -> None:
        rows, sums = self.times.operation_sums(step)
        many = len(self.times.graph.ops)
        for row, calls, host, waiting, gpu in zip(rows.tolist(), *sums.tolist(), strict=True):
            node = self.tree.nodes[self._of(row) if row < many else self._apart(row - many)]
            node.calls += calls
            node.host_ns += host
            node.waiting_ns += waiting
            node.gpu_ns += gpu

    def _apart(self, which: int) -> int:
        return self.tree.child(self.tree.base(NO_PHASE, ""), (OUTSIDE, NO_LAUNCH)[which], "operation")

    def _of(self, row: int) -> int:
        """Return an operation's node: below its caller's if module and phase are equal, else below the module's."""
        chain = []
        names, parents, modules, phases = self.columns
        while self.node[row] < 0:
            chain.append(row)
            above = parents[row]
            if above < 0 or names[above] in self.step_names:
                break
            if modules[above] != modules[row] or phases[above] != phases[row]:
                break
            row = above
        at = self.node[row]
        if at < 0:
            at = self._base(modules[row], phases[row])
        for each in reversed(chain):
            at = self.node[each] = self.tree.child(at, self.times.graph.string(names[each]), "operation")
        return at

    def _base(self, module: int, phase: int) -> int:
        if (module, phase) not in self.bases:
            named = Phase(phase).name.lower() if phase >= 0 else NO_PHASE
            self.bases[module, phase] = self.tree.base(named, self.times.graph.string(module))
        return self.bases[module, phase]


"""Name for host time in no operation (Python, the framework's own code, the profiler), and for work launched then."""
NO_PHASE = "other"
"""Phase of operations without one."""
NO_LAUNCH = "launch not recorded"
"""Name for GPU work whose launch is outside the recorded window."""
_MISSING = 2
"""Number of negative codes: one for no operation, one for an unknown launch."""
_PHASES = {int(phase): phase.name.lower() for phase in Phase}
_ROOM = 1024
"""Initial room for sums in addition to one for each slot; it doubles if it is too small."""
_NO_SHARE = np.zeros(0)


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums by step and kind: rows in the order of steps, and within a step in the order of the kinds' numbers.

    Attributes:
        first: row at which each step begins, and at the end the number of rows [steps + 1].
        kind, values: kind [rows] and sums [rows, sums] of each row.
        label: returns a kind's key: the first fields of its entries.
    """

    first: Int64
    kind: Int64
    values: Int64
    label: Callable[[int], tuple[Any, ...]]

    @classmethod
    def of(cls, step: Int64, kind: Int64, values: Int64, count: int,
           label: Callable[[int], tuple[Any, ...]]) -> StepSums:
        """Return sums from rows whose steps are in order; ``count`` is the number of steps."""
        return cls(np.searchsorted(step, np.arange(count + 1)), kind, values, label)

    def of_step(self, at: int) -> list[tuple[Any, ...]]:
        """Return the key and sums of each kind in a step."""
        rows = slice(int(self.first[at]), int(self.first[at + 1]))
        return [(*self.label(kind), *sums) for kind, sums in
                zip(self.kind[rows].tolist(), self.values[rows].tolist(), strict=True)]

    def of_steps(self, steps: list[int]) -> list[tuple[tuple[Any, ...], list[int]]]:
        """Return the key and sums of each kind over several steps, in the order in which the steps' tables list the
        kinds."""
        low = self.first[steps]
        counts = self.first[np.array(steps) + 1] - low
        rows = spans(low, low + counts)
        kinds, place = grouped(self.kind[rows])
        values = self.values[rows]
        sums = np.stack([totals(place, each, len(kinds)) for each in values.T], axis=1)
        met = np.zeros(len(kinds), np.int64)
        met[place[::-1]] = np.arange(len(rows) - 1, -1, -1)
        order = [np.arange(len(kinds)), np.repeat(np.arange(len(steps)), counts)[met]]
        if values.shape[1] > WAITING:  # tables of host time, whose entries may tie
            own = values[met]
            order[1:1] = [-own[:, WAITING], -(own[:, HOST] + own[:, GPU])]
        by_step = np.lexsort(order)
        return [(self.label(kind), own) for kind, own in
                zip(kinds[by_step].tolist(), sums[by_step].tolist(), strict=True)]


StepTables = Mapping[str, StepSums]
"""The tables of a rank's steps, by name."""


@dataclass(frozen=True, slots=True)
class RankBreakdown:
    """Tables of some steps of a rank and, for each step, its span by bound, ns."""

    tables: StepTables
    bounds: list[dict[Bound, int]]


@dataclass(frozen=True, slots=True)
class _Places:
    """For each step: its row (-1 for the whole window), begin and end (ns in the window), and thread."""

    row: Int64
    start: Int64
    end: Int64
    thread: Int64


class OperationSums:
    """One rank's times by operation.

    It keeps what all steps of the rank share, so that the cost of a step grows only with the step's events.
    """

    def __init__(self, replay: Replay, position: int, causes: Causes) -> None:
        built = replay.built
        self.replay, self.position, self.causes = replay, position, causes
        self.graph: ExecutionGraph = with_backward_modules(built.graphs[position])
        self.host = exclusive_time(self.graph)
        self.share = None if built.without_profiler is None else built.without_profiler.shares[position]
        self.waits = waits(built.recorded_program, position, built.thread_number, built.clock_ns[position])
        self.operation = np.append(operation_of(self.graph), NONE)
        low, high = int(replay.program.kernel_ptr[position]), int(replay.program.kernel_ptr[position + 1])
        self.kernel_ns = (replay.simulated.kernel_end - replay.simulated.kernel_start)[low:high]
        ops, kernels = self.graph.ops, self.graph.kernels
        # Two more slots: one for time in no operation, one for device work with an unknown launch.
        launched_by = self.operation[kernels.op]
        launched_by[launched_by < 0] = len(ops)
        launched_by[kernels.launch < 0] = len(ops) + 1
        self.launched_by = launched_by
        self.ops_of = RowsByNumber(ops.step, len(self.graph.steps), ops.kind == OpKind.OPERATION)
        self.kernels_of = RowsByNumber(kernels.step, len(self.graph.steps))
        self.kernel_names, self.kernel_kind = grouped(kernels.name.astype(np.int64))
        self.modules = bool((ops.module >= 0).any())
        # Codes of (name, module): for operations, for kernels outside operations, and one for neither.
        width = len(self.graph.strings) + 1 if self.modules else 1
        pairs, place = grouped(np.concatenate([
            (ops.name.astype(np.int64) + 1) * width + (ops.module + 1 if self.modules else 0),
            (kernels.name.astype(np.int64) + 1) * width, [0]]))
        self.pairs = [(pair // width + NONE, pair % width + NONE) for pair in pairs.tolist()]
        self.pair_of_op, self.pair_of_kernel = place[:len(ops)], place[len(ops):-1]
        self.pair_of_none = int(place[-1])
        # Name, module and phase of each operation, then of the two additional slots.
        self.width = len(self.graph.strings) + len(Phase) + _MISSING
        columns = [np.append(column, [NONE, NONE - 1]).astype(np.int64) for column in (ops.name, ops.module, ops.phase)]
        self.view_of_op, example = kinds_of(*columns)
        self.views = np.stack([column[example] for column in columns], axis=1)
        orphans = np.flatnonzero(kernels.launch < 0)
        self.orphans = orphans[np.argsort(kernels.start_ns[orphans], kind="stable")]
        self.orphans_start = kernels.start_ns[self.orphans]

    def figures(self, steps: Sequence[ReplayedStep], *, spans: bool) -> RankBreakdown:
        """Return the tables of several steps in one pass; with ``spans`` also their spans."""
        places = self._places(steps)
        first, kernels = self._kernels_in(places)
        tables = {**self._host_views(places, first, kernels), "kernels": self._kernel_sums(first, kernels)}
        if not spans:
            return RankBreakdown(tables, [{} for _ in steps])
        paths = walks_back(self.causes, [step.span.path_start(self.replay.simulated) for step in steps])
        return RankBreakdown({"span": self._path_sums(paths), **tables}, bound_sums(paths))

    def operation_sums(self, step: ReplayedStep) -> tuple[Int64, Int64]:
        """Return the operations of a step: rows of ``graph.ops`` [rows], and [calls, own host ns, waiting ns, GPU ns]
        of each [4, rows].

        Two rows follow the last row of the table: time in no operation, and device work with an unknown launch.
        """
        places = self._places([step])
        rows = np.arange(len(self.graph.ops) + _MISSING)
        found = self._summed(places, *self._kernels_in(places), rows, self._row_room)
        used = found.sums.any(axis=1)
        return found.slot[used], found.sums[used].T

    @cached_property
    def _row_room(self) -> tuple[Int64, Int64]:
        return empty_room(len(self.graph.ops) + _MISSING, 4)

    def _places(self, steps: Sequence[ReplayedStep]) -> _Places:
        graph = self.graph
        window = np.array([step.name == WINDOW for step in steps], np.bool_)
        item = np.array([step.begin_item for step in steps], np.int64)
        row = np.full(len(steps), NONE, np.int64)
        row[~window] = self.replay.program.item_row[item[~window]]
        start, thread = np.zeros_like(row), np.full_like(row, NONE)
        end = np.full_like(row, max(graph.meta.window_ns, 1))
        own = row[~window]
        start[~window], thread[~window] = graph.steps.start_ns[own], graph.steps.thread[own]
        end[~window] = start[~window] + graph.steps.duration_ns[own]
        return _Places(row, start, end, thread)

    def _kernels_in(self, places: _Places) -> tuple[Int64, Int64]:
        """Return the device work of each step: where each step begins, and the kernels of all steps in a row. Kernels
        without a launch belong to the step in which they started."""
        low, high = self.kernels_of.bounds(places.row)
        orphans = [np.where(places.row < 0, 0, np.searchsorted(self.orphans_start, time)) for time in
                   (places.start, places.end)]
        every = np.concatenate([self.kernels_of.order, self.orphans])
        parts = [np.stack([own, len(self.kernels_of.order) + orphan], axis=1) for own, orphan in
                 zip((low, high), orphans, strict=True)]
        count = (parts[1] - parts[0]).sum(axis=1)
        return np.append(0, np.cumsum(count)), every[spans(parts[0].reshape(-1), parts[1].reshape(-1))]

    def _summed(self, places: _Places, first: Int64, kernels: Int64, slot_of: Int64,
                room: tuple[Int64, Int64]) -> GroupSums:
        """Return calls, own host time, waiting and GPU time by step and slot; ``slot_of`` maps operations to slots."""
        host, blocked = self.host, self.waits
        low, high = self.ops_of.bounds(places.row)
        calls = self.ops_of.order[spans(low, high)]
        among = {number: at for at, number in enumerate(host.thread[host.first[:-1]].tolist())}
        waiting = blocked.thread[blocked.first[:-1]].tolist()
        of_wait = np.array([among.get(number, NONE) for number in waiting], np.int64)
        share = _NO_SHARE if self.share is None else self.share
        state, parts = np.zeros(2, np.int64), []
        size = len(room[0]) + _ROOM
        while True:
            step, slot, sums = np.empty(size, np.int64), np.empty(size, np.int64), np.empty((size, 4), np.int64)
            state[0] = 0
            done = sum_steps(
                places.start, places.end, places.thread, host.first, host.thread, host.start_ns, host.end_ns, host.op,
                blocked.first, blocked.thread, blocked.start_ns, blocked.end_ns, blocked.latest_end, of_wait,
                first, kernels, self.launched_by, self.kernel_ns, np.append(0, np.cumsum(high - low)), calls,
                slot_of, share, *room, state, step, slot, sums)
            found = int(state[0])
            parts.append((step[:found], slot[:found], sums[:found]))
            if done == len(places.row):
                return GroupSums(*(np.concatenate(column) for column in zip(*parts, strict=True)))
            size *= 2

    def _path_sums(self, paths: Paths) -> StepSums:
        graph, first = self.graph, paths.first
        pieces = attribute_paths(self.replay, paths, self.position, self.host, self.operation, self.share)
        step = np.repeat(np.arange(len(first) - 1, dtype=np.int32), np.diff(first))[pieces.segment]
        pair = np.full(len(step), self.pair_of_none, np.int64)
        known = pieces.op >= 0
        pair[known] = self.pair_of_op[pieces.op[known]]
        alone = ~known & (pieces.kernel >= 0)
        pair[alone] = self.pair_of_kernel[pieces.kernel[alone]]
        by_step = RowsByNumber(step, len(first) - 1)
        begins, _ = by_step.bounds(np.arange(len(first) - 1))
        found = tallied(np.append(begins, len(step)), by_step.order, pair * len(Bound) + pieces.bound, pieces.ns,
                        len(self.pairs) * len(Bound))

        def label(kind: int) -> tuple[str, str, Bound]:
            name, module = self.pairs[kind // len(Bound)]
            return graph.string(name) or OUTSIDE, graph.string(module), Bound(kind % len(Bound))

        return StepSums.of(found.group, found.slot, found.sums[:, ::-1], len(first) - 1, label)

    def _host_views(self, places: _Places, first: Int64, kernels: Int64) -> dict[str, StepSums]:
        # Sums by name, module and phase together come first, because there are few combinations.
        found = self._summed(places, first, kernels, self.view_of_op, empty_room(len(self.views), 4))

        def by(label: Callable[..., tuple[str, ...]], *columns: int) -> StepSums:
            """Return sums by step and by some of the three codes."""
            kinds, kind = grouped(sum((self.views[:, column] + _MISSING) * self.width ** power
                                      for power, column in enumerate(reversed(columns))))
            keys, place = grouped(found.group * len(kinds) + kind[found.slot])
            values = np.stack([totals(place, each, len(keys)) for each in found.sums.T], axis=1)
            powers = self.width ** np.arange(len(columns))[::-1]
            return StepSums.of(keys // len(kinds), keys % len(kinds), values, len(places.row),
                               lambda kind: label(*(kinds[kind] // powers % self.width - _MISSING).tolist()))

        def text(code: int) -> str:
            return self.graph.string(code) if code >= 0 else {NONE: "", NONE - 1: NO_LAUNCH}[code]

        views = {"operations": by(lambda name: (text(name) or OUTSIDE,), 0),
                 "phases": by(lambda module, phase: (text(module), _PHASES.get(phase, NO_PHASE)), 1, 2)}
        if self.modules:
            views["modules"] = by(lambda module: (text(module),), 1)
        return views

    def _kernel_sums(self, first: Int64, kernels: Int64) -> StepSums:
        found = tallied(first, kernels, self.kernel_kind, self.kernel_ns, len(self.kernel_names))
        names = self.kernel_names
        return StepSums.of(found.group, found.slot, found.sums, len(first) - 1,
                           lambda kind: (self.graph.string(int(names[kind])),))
