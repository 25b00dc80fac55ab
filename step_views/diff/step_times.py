"""The time of one step by place and resource: on its critical path, and in total, including hidden time."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from graph_predictor.prediction.path_attribution import attribute_paths
from graph_predictor.prediction.replay import WINDOW, Replay, ReplayedStep
from graph_predictor.simulation.engine import Causes, walks_back
from graph_predictor.simulation.host_slices import HostTime, exclusive_time, operation_of, split, waits
from graph_predictor.simulation.program import Bound, ItemKind
from step_views.diff.places import Places, next_aligned
from step_views.diff.step_tree import StepTree, Vocabulary, step_tree, with_loader
from tracer.arrays import Float64, Int64
from tracer.graph import NONE, KernelKind


class Resource(IntEnum):
    """A resource that time is spent on; the order is that of the tables ``[resources, places]``."""

    HOST = 0
    COMPUTE = 1
    COPY = 2
    COMMUNICATION = 3
    LAUNCH = 4
    SYNC = 5
    WAITING = 6
    LOADING = 7
    GAP = 8


_OF_BOUND = {
    Bound.HOST: Resource.HOST, Bound.LAUNCH: Resource.LAUNCH, Bound.COMPUTE: Resource.COMPUTE,
    Bound.MEMORY_COPY: Resource.COPY, Bound.EXPOSED_COMMUNICATION: Resource.COMMUNICATION,
    Bound.WAITING_FOR_RANK: Resource.WAITING, Bound.DATA_LOADING: Resource.LOADING, Bound.SYNC: Resource.SYNC,
}
_OF_KERNEL = {
    KernelKind.COMPUTE: Resource.COMPUTE, KernelKind.MEMCPY: Resource.COPY, KernelKind.MEMSET: Resource.COPY,
    KernelKind.COLLECTIVE: Resource.COMMUNICATION,
}
RESOURCES = len(Resource)
AT_ONCE = 1 << 16
"""Intervals or times that are processed at once: for millions, intermediate tables would take gigabytes."""


class RankSteps:
    """The data that all steps of one rank of a replayed job share."""

    def __init__(self, replay: Replay, position: int, vocabulary: Vocabulary) -> None:
        built = replay.built
        self.replay, self.position = replay, position
        self.graph = with_loader(built.graphs[position])
        self.causes = Causes(replay.program, replay.simulated, [graph.kernels.kind for graph in replay.graphs])
        self.codes = vocabulary.add(self.graph)
        self.cover = _cover(exclusive_time(self.graph))
        self.share = self._shares()
        self.nearest = np.append(operation_of(self.graph), NONE)
        self.busy = self._busy()
        low, high = int(replay.program.kernel_ptr[position]), int(replay.program.kernel_ptr[position + 1])
        self.kernel_ns = (replay.simulated.kernel_end - replay.simulated.kernel_start)[low:high]

    def _shares(self) -> Float64 | None:
        """Return the share of recorded host time that remains in each interval of the cover; ``None`` if profiled."""
        left = self.replay.built.without_profiler
        return None if left is None else left.shares[self.position][self.cover.op]

    def _busy(self) -> HostTime:
        """Return when threads were in launching calls or waited, which is not their operations' own work."""
        built = self.replay.built
        program = built.recorded_program
        blocked = waits(program, self.position, built.thread_number, built.clock_ns[self.position])
        thread = program.item_thread()
        calls = np.flatnonzero((program.thread_rank[thread] == self.position) & (program.item_queue >= 0)
                               & (program.item_kind == ItemKind.CALL))
        number = np.array([*built.thread_number, NONE], np.int64)[thread[calls]]
        start = program.recorded_item_start[calls] - built.clock_ns[self.position]
        return HostTime.ordered(
            np.concatenate([blocked.thread, number]), np.concatenate([blocked.start_ns, start]),
            np.concatenate([blocked.end_ns, start + program.item_cost[calls]]),
            np.full(len(blocked.op) + len(calls), NONE, np.int64))

    def row(self, step: ReplayedStep) -> int:
        """Return the step's row; -1 for the whole window."""
        return NONE if step.name == WINDOW else int(self.replay.program.item_row[step.begin_item])

    def kernels(self, row: int) -> Int64:
        """Return the device work of a step: work that it launched, and work without a launch that started in it."""
        kernels = self.graph.kernels
        if row < 0:
            return np.arange(len(kernels))
        start = int(self.graph.steps.start_ns[row])
        end = start + int(self.graph.steps.duration_ns[row])
        orphan = (kernels.launch < 0) & (kernels.start_ns >= start) & (kernels.start_ns < end)
        return np.flatnonzero((kernels.step == row) | orphan)

    def tree(self, step: ReplayedStep) -> StepTree:
        """Return the tree of a step's operations."""
        row = self.row(step)
        return step_tree(self.graph, self.codes, row, self.kernels(row))

    def times(self, step: ReplayedStep, tree: StepTree, place: Int64, places: Places,
              rows: tuple[Int64, Int64]) -> tuple[Int64, Int64]:
        """Return the time on the critical path, and the total time (ns), each [resources × places]. ``place`` is the
        place of each node of the tree; ``rows`` come from ``of_rows``."""
        replay, row = self.replay, self.row(step)
        if row < 0:
            start, end = 0, max(self.graph.meta.window_ns, 1)
        else:
            start = int(self.graph.steps.start_ns[row])
            end = start + int(self.graph.steps.duration_ns[row])
        paths = walks_back(self.causes, [step.span.path_start(replay.simulated)])
        size = places.irregular + 1
        operations = len(self.graph.ops)
        unit_resource, unit_place = self._units(tree, place, places)
        labelled = HostTime(self.cover.thread, self.cover.start_ns, self.cover.end_ns,
                            operations + np.arange(len(self.cover.op)))
        # The cover includes time between operations, so the last, unlabelled entry is never used.
        share = None if self.share is None else np.concatenate([np.ones(operations), self.share, [1.0]])
        pieces = attribute_paths(replay, paths, self.position, labelled, self.nearest, share)
        resource = np.array([_OF_BOUND[bound] for bound in Bound], np.int64)[pieces.bound]
        of_op, of_kernel = rows
        where = np.full(len(resource), places.end, np.int64)
        with_op = (pieces.op >= 0) & (pieces.op < operations)
        where[with_op] = of_op[pieces.op[with_op]]
        alone = ~with_op & (pieces.kernel >= 0)
        where[alone] = of_kernel[pieces.kernel[alone]]
        in_unit = pieces.op >= operations
        unit = pieces.op[in_unit] - operations
        where[in_unit] = unit_place[unit]
        plain = resource == Resource.HOST
        resource[in_unit & plain] = unit_resource[unit[plain[in_unit]]]
        resource[~in_unit & ~with_op & (pieces.kernel < 0) & plain] = Resource.GAP
        # Before the first recorded event, the device was already working.
        resource[(paths.joined.item[pieces.segment] < 0) & (paths.joined.kernel[pieces.segment] < 0)] = Resource.SYNC
        on_path = np.zeros(RESOURCES * size, np.int64)
        np.add.at(on_path, resource * size + where, pieces.ns)

        altogether = np.zeros(RESOURCES * size, np.int64)
        own = HostTime(self.cover.thread, self.cover.start_ns, self.cover.end_ns, np.arange(len(self.cover.op)))
        own = own.between(start, end)
        own_ns = own.end_ns - own.start_ns
        busy = self.busy.between(start, end)
        taken = split(own, busy.thread, busy.start_ns, busy.end_ns)
        for units, ns in ((own.op, own_ns), (taken.op[taken.op >= 0], -taken.ns[taken.op >= 0])):
            if self.share is not None:
                ns = np.rint(ns * self.share[units]).astype(np.int64)
            counted = unit_resource[units] == Resource.HOST
            np.add.at(altogether, Resource.HOST * size + unit_place[units[counted]], ns[counted])
        kernels = self.kernels(row)
        kind = np.array([_OF_KERNEL[each] for each in KernelKind], np.int64)[self.graph.kernels.kind[kernels]]
        np.add.at(altogether, kind * size + of_kernel[kernels], self.kernel_ns[kernels])
        return on_path, np.maximum(altogether, on_path)

    def of_rows(self, trees: list[tuple[StepTree, Int64]], places: Places) -> tuple[Int64, Int64]:
        """Return the place of every row of ``ops`` and of every kernel; ``end`` for rows without a node. ``trees`` are
        all steps' trees with the places of their nodes, because a lagging device works in one step on what an earlier
        step launched."""
        of_op = np.full(len(self.graph.ops) + 1, places.end, np.int64)
        for tree, place in trees:
            nodes = tree.op >= 0
            of_op[tree.op[nodes]] = place[nodes]
        by_op = np.where(self.nearest >= 0, of_op[self.nearest], places.end)
        of_kernel = by_op[self.graph.kernels.op] if len(self.graph.kernels) else np.zeros(0, np.int64)
        for tree, place in trees:
            alone = tree.op < 0
            of_kernel[tree.kernel[alone]] = place[alone]
        return by_op, of_kernel

    def _units(self, tree: StepTree, place: Int64, places: Places) -> tuple[Int64, Int64]:
        """Return the resource (host or gap) and place of every interval of the cover."""
        ops, cover = self.graph.ops, self.cover
        node_of = np.full(len(ops) + 1, NONE, np.int64)
        nodes = np.flatnonzero(tree.op >= 0).astype(np.int64)
        node_of[tree.op[nodes]] = nodes
        # The first child (outside operations: the thread's first outermost operation) that begins no earlier.
        start = ops.start_ns[tree.op[nodes]]
        threads = int(max(ops.thread.max(initial=0), cover.thread.max(initial=0))) + 1
        parent = tree.parent[nodes]
        family = np.where(parent >= 0, parent + threads, ops.thread[tree.op[nodes]])
        low = int(min(start.min(initial=0), cover.start_ns.min(initial=0)))
        span = int(max(start.max(initial=0), cover.end_ns.max(initial=0))) - low + 1
        key = family * span + start - low
        order = np.argsort(key, kind="stable")
        key, family, child_of = key[order], np.append(family[order], NONE), np.append(nodes[order], NONE)
        aligned = np.append(next_aligned(tree, place, places.end), places.end)
        place = np.append(place, NONE)
        resource, where = np.empty((2, len(cover.op)), np.int64)
        for first in range(0, len(cover.op), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            owner = node_of[cover.op[some]]
            mine = np.where(owner >= 0, owner + threads, cover.thread[some])
            at = np.searchsorted(key, mine * span + cover.start_ns[some] - low)
            following = aligned[np.where(family[at] == mine, child_of[at], NONE)]
            own = place[owner]
            hunk = self._hunk_places(own, following, places)
            where[some] = np.where(own >= places.end, own, np.where(hunk >= 0, hunk, np.where(
                owner >= 0, own, following)))
            resource[some] = np.where(owner >= 0, int(Resource.HOST), int(Resource.GAP))
        return resource, where

    def _hunk_places(self, parent: Int64, following: Int64, places: Places) -> Int64:
        """Return the place of the hunk between two neighbours; -1 if there is none."""
        if not places.hunk_at:
            return np.full(len(parent), NONE, np.int64)
        size = places.end + 2
        keys = np.array([(a + 1) * size + b for a, b in places.hunk_at], np.int64)
        order = np.argsort(keys)
        wanted = (parent + 1) * size + following
        at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
        numbers = np.array(list(places.hunk_at.values()), np.int64)
        return np.where(keys[order][at] == wanted, places.of_hunk(0) + numbers[order][at], NONE)


def _cover(own: HostTime) -> HostTime:
    """Return the intervals and those between them (operation -1), so that they cover all of a thread's time."""
    if not len(own.op):
        return own
    opens = np.ones(len(own.op), np.bool_)
    opens[1:] = own.thread[1:] != own.thread[:-1]
    closes = np.append(opens[1:], True)
    far = int(own.end_ns.max() - own.start_ns.min()) + 1
    low, high = int(own.start_ns.min()) - far, int(own.end_ns.max()) + far
    before = np.where(opens, low, np.concatenate([[0], own.end_ns[:-1]]))
    gap = before < own.start_ns
    thread = np.concatenate([own.thread, own.thread[gap], own.thread[closes]])
    start = np.concatenate([own.start_ns, before[gap], own.end_ns[closes]])
    end = np.concatenate([own.end_ns, own.start_ns[gap], np.full(int(closes.sum()), high)])
    op = np.concatenate([own.op, np.full(int(gap.sum() + closes.sum()), NONE, np.int64)])
    order = np.lexsort((start, thread))
    return HostTime(thread[order], start[order], end[order], op[order])
