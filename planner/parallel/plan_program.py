"""``plan_program``: the step of a plan as the simulator's program: one rank of each pipeline stage, whose peers do the
same at the same time.

Every task of the schedule is a copy of its rows (``plan_tasks``), in the stage's order; a task that needs another
stage's result starts after the kernel that sends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from graph_predictor.simulation.program import ItemKind, Program, whole_ns
from planner.parallel.estimate import Rates
from planner.parallel.loads import Loads
from planner.parallel.plan_tasks import PlanTasks
from planner.parallel.schedule import BACKWARD, FORWARD, order_of
from planner.parallel.task_rows import PlanStream, TaskRows
from tracer.arrays import Int64
from tracer.errors import ForetraceError
from tracer.parallel_plan import Schedule

MOST_KERNELS = 8_000_000
"""Kernels of the largest program that is made: some seconds and a gigabyte."""
TASKS = ("forward", "backward", "weights", "end of the step", "begin of the step")
"""Kinds of tasks, as ``schedule`` numbers the first of them."""
_END, _BEGIN = 3, 4


@dataclass(frozen=True, slots=True)
class PlanProgram:
    """A plan's step for the simulator.

    Attributes:
        program: of one rank of each stage.
        stream, name: of every kernel: a ``PlanStream``, and a row of ``names``.
        names: what kernels do.
        task_stage, task_kind, task_microbatch, task_chunk: of every task, stage by stage; ``task_kernel`` has its first
            kernel, and one more entry at the end.
    """

    program: Program
    stream: Int64
    name: Int64
    names: tuple[str, ...]
    task_stage: Int64
    task_kind: Int64
    task_microbatch: Int64
    task_chunk: Int64
    task_kernel: Int64


class TooManyKernels(ForetraceError):
    """A plan's step is too long to be simulated kernel by kernel."""


def plan_program(loads: Loads, rates: Rates) -> PlanProgram:
    """Make the program of a plan's step.

    Raises:
        TooManyKernels: it would have more than ``MOST_KERNELS``.
    """
    maker = _Maker(loads, rates)
    for stage in range(loads.plan.pp):
        maker.add_stage(stage)
    return maker.program()


class _Maker:
    """Collects the tasks of all stages."""

    def __init__(self, loads: Loads, rates: Rates) -> None:
        self._plan, self._tasks = loads.plan, PlanTasks(loads, rates)
        self._order = order_of(self._plan.schedule, self._plan.pp, self._plan.passes, self._plan.chunks)
        self._rows: dict[tuple[int, int, int, bool], TaskRows] = {}
        self._names: dict[str, int] = {}
        self._placed: list[tuple[int, int, int, int, TaskRows]] = []
        self._kernels = 0
        self._gathered: dict[int, list[int]] = {}

    def add_stage(self, stage: int) -> None:
        order = self._order
        if stage and self._tasks.gathers_first:
            rows, self._gathered[stage] = self._tasks.begin(stage)
            self._add(stage, _BEGIN, 0, 0, rows)
        for place in range(order.kind.shape[1]):
            kind, microbatch, chunk = (int(column[stage, place]) for column in (
                order.kind, order.microbatch, order.chunk))
            self._add(stage, kind, microbatch, chunk, self._of(stage, chunk, kind, microbatch))
        self._add(stage, _END, 0, 0, self._tasks.end(stage))

    def _of(self, stage: int, chunk: int, kind: int, microbatch: int) -> TaskRows:
        first, last = microbatch == 0, microbatch == self._plan.passes - 1
        special = first if kind == FORWARD else last
        key = stage, chunk, kind, special
        if key not in self._rows:
            self._rows[key] = (
                self._tasks.forward(stage, chunk, first=special) if kind == FORWARD else
                self._tasks.backward(stage, chunk, last=special) if kind == BACKWARD else
                self._tasks.weights(stage, chunk, last=special))
        return self._rows[key]

    def _add(self, stage: int, kind: int, microbatch: int, chunk: int, rows: TaskRows) -> None:
        self._kernels += len(rows.kernel_us)
        if self._kernels > MOST_KERNELS:
            raise TooManyKernels(f"A step of {self._plan} has more than {MOST_KERNELS:,} kernels to simulate; its "
                                 "estimate stands alone.")
        self._placed.append((stage, kind, microbatch, chunk, rows))

    def program(self) -> PlanProgram:
        placed, plan = self._placed, self._plan
        sizes = np.array([(len(rows.item_us), len(rows.kernel_us)) for *_, rows in placed], np.int64).reshape(-1, 2)
        items_at, kernels_at = (np.concatenate(([0], np.cumsum(column))) for column in sizes.T)
        stage = np.array([each[0] for each in placed], np.int64)
        arrays = {id(rows): _Arrays.of(rows, self._names) for *_, rows in placed}
        every = [arrays[id(rows)] for *_, rows in placed]
        stream = np.concatenate([each.stream for each in every])
        edges = [np.zeros((0, 2), np.int64), *(each.edges + start for each, start in
                                               zip(every, kernels_at, strict=False))]
        between, blocked = self._between(items_at, kernels_at)
        edge = np.concatenate([*edges, np.array(between, np.int64).reshape(-1, 2)])
        edge = edge[np.argsort(edge[:, 0], kind="stable")]
        wait = np.array(blocked, np.int64).reshape(-1, 2)  # in the order of items
        count, kernels = int(items_at[-1]), int(kernels_at[-1])
        stages = np.searchsorted(stage, np.arange(plan.pp + 1))
        kernel_ptr, thread_ptr = kernels_at[stages], items_at[stages]
        empty, nothing = np.zeros(0, np.int64), np.zeros(count, np.int64)
        never = np.zeros(kernels, np.int64)
        program = Program(
            thread_ptr=thread_ptr, thread_rank=np.arange(plan.pp, dtype=np.int32),
            thread_start=np.zeros(plan.pp, np.int64), item_kind=np.full(count, ItemKind.CALL, np.int8),
            item_row=np.full(count, -1, np.int32), item_work=nothing,
            item_cost=whole_ns(1e3 * np.concatenate([each.item_us for each in every])), item_external=nothing,
            item_queue=nothing - 1, item_channel=nothing - 1, item_return=nothing,
            after_ptr=np.zeros(count + 1, np.int64), after_item=empty, after_lag=empty,
            wait_ptr=_pointer(wait[:, 0], count), wait_kernel=wait[:, 1].copy(),
            wait_lag=np.zeros(len(wait), np.int64), kernel_ptr=kernel_ptr,
            kernel_item=np.concatenate([each.item + start for each, start in zip(every, items_at, strict=False)]),
            kernel_reference=np.zeros(kernels, np.int8), kernel_latency=never,
            kernel_previous=_previous(stream, kernel_ptr), kernel_gap=never,
            kernel_duration=whole_ns(1e3 * np.concatenate([each.kernel_us for each in every])), kernel_external=never,
            edge_ptr=_pointer(edge[:, 0], kernels), edge_kernel=edge[:, 1].copy(),
            edge_fraction=np.ones(len(edge)), edge_lag=np.zeros(len(edge), np.int64),
            kernel_group=never - 1, group_size=empty, queue_ptr=np.zeros(1, np.int64), queue_kernel=empty,
            queue_depth=empty, recorded_item_start=nothing, recorded_item_end=nothing, recorded_kernel_start=never,
            recorded_kernel_end=never)
        kind, microbatch, chunk = (np.array([each[i] for each in placed], np.int64) for i in (1, 2, 3))
        return PlanProgram(program, stream, np.concatenate([each.name for each in every]), tuple(self._names), stage,
                           kind, microbatch, chunk, kernels_at)

    def _between(self, items_at: Int64, kernels_at: Int64) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return (kernel, kernel it starts after) between tasks, and (call, kernel it waits for).

        A task starts after what another stage sends it, the step's end after the replicas' collectives. Megatron-LM's
        stages send and receive in one call that waits for the device (``batch_p2p_sync``), but for those of the
        interleaved schedule.
        """
        plan, found, blocked = self._plan, [], []
        sent: dict[tuple[int, int, int, int], int] = {}
        for (stage, kind, microbatch, chunk, rows), start in zip(self._placed, kernels_at, strict=False):
            if rows.sends >= 0:
                sent[kind, stage, chunk, microbatch] = int(start) + rows.sends
        blocking = plan.pp > 1 and plan.schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B)
        before: list[int] = []
        gathered: list[int] = []
        last, state = -1, -1
        for (stage, kind, microbatch, chunk, rows), item, start in zip(self._placed, items_at.tolist(),
                                                                       kernels_at.tolist(), strict=False):
            if stage != last:
                before, gathered, last, state = [], [], stage, -1
            if kind == _BEGIN:
                gathered = [start + row for row in self._gathered[stage]]
            key = self._source(kind, stage, chunk, microbatch)
            source = [sent[key]] if key in sent else []
            end = [state] if kind == _END and state >= 0 else []
            parameters = gathered[chunk:chunk + 1] if kind == FORWARD and microbatch == 0 else []
            # A task's first kernel, and its first call, are its start.
            found += [(start, other) for other in (*source, *before, *end, *parameters)]
            if blocking:
                blocked += [(item, other) for other in (*source, *before)]
                before = [start + rows.last_compute] + [start + rows.sends] * (rows.sends >= 0)
            on_state = [row for row, each in enumerate(rows.kernel_stream) if each == PlanStream.STATE]
            state = start + on_state[-1] if on_state else state
        return found, blocked

    def _source(self, kind: int, stage: int, chunk: int, microbatch: int) -> tuple[int, int, int, int] | None:
        """The task whose result another one needs, where it comes from another stage."""
        stages, chunks = self._plan.pp, self._plan.chunks
        if stages == 1 or kind not in (FORWARD, BACKWARD):
            return None
        if kind == FORWARD:
            there = (stage - 1, chunk) if stage else (stages - 1, chunk - 1) if chunk else None
        else:
            there = (stage + 1, chunk) if stage < stages - 1 else (0, chunk + 1) if chunk < chunks - 1 else None
        return None if there is None else (kind, *there, microbatch)


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The rows of a task as arrays."""

    item_us: np.ndarray
    item: Int64
    stream: Int64
    kernel_us: np.ndarray
    name: Int64
    edges: Int64

    @classmethod
    def of(cls, rows: TaskRows, names: dict[str, int]) -> _Arrays:
        codes = [names.setdefault(name, len(names)) for name in rows.kernel_name]
        return cls(np.array(rows.item_us), np.array(rows.kernel_item, np.int64),
                   np.array(rows.kernel_stream, np.int64), np.array(rows.kernel_us), np.array(codes, np.int64),
                   np.array(rows.edges, np.int64).reshape(-1, 2))


def _pointer(owner: Int64, rows: int) -> Int64:
    """Where each row's entries begin in a list in the order of their rows, and the list's end."""
    return np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=rows)))).astype(np.int64)


def _previous(stream: Int64, kernel_ptr: Int64) -> Int64:
    """The kernel before each one on its rank's stream; -1 for the first."""
    found = np.full(len(stream), -1, np.int64)
    for low, high in pairwise(kernel_ptr.tolist()):
        for each in PlanStream:
            rows = low + np.flatnonzero(stream[low:high] == each)
            found[rows[1:]] = rows[:-1]
    return found
