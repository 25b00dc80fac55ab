"""Pipeline schedules: the order of every stage's tasks, and the exact start and end of each.

Ranks of a stage do the same work at the same time, so one rank of each stage is simulated. A search tries thousands of
plans, so whole tasks are placed in time here, and not single kernels as in the simulator's engine.

    stage 0   F0 F1 F2 F3 .. .. B0 F4 B1 ..        1F1B: as many forwards ahead as stages follow
    stage 1      F0 F1 F2 .. B0 F3 B1 ..
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.parallel.schedule_loop import run_schedule
from tracer.arrays import Float64, Int64
from tracer.parallel_plan import Schedule

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
"""Kinds of tasks. In the zero-bubble schedule BACKWARD computes activation gradients, WEIGHTS weight gradients."""


@dataclass(frozen=True, slots=True)
class Order:
    """The order of each stage's tasks: kind, micro-batch and chunk, each [stage, task]."""

    kind: Int64
    microbatch: Int64
    chunk: Int64


@dataclass(frozen=True, slots=True)
class Pipelined:
    """A simulated pipeline, µs: start and end of every task [stage, task], and the busy time of each stage [stage]."""

    order: Order
    start: Float64
    end: Float64
    busy: Float64

    @property
    def stage_end(self) -> Float64:
        """Return the end of each stage's last task, µs."""
        ends: Float64 = self.end.max(axis=1)
        return ends

    @property
    def makespan(self) -> float:
        """Return the time from the first start to the last end."""
        return float(self.end.max())


@lru_cache(maxsize=32)
def order_of(schedule: Schedule, stages: int, microbatches: int, chunks: int = 1) -> Order:
    """Return the order of work on every stage.

    1F1B: stage i runs ``stages − i − 1`` forwards ahead. Interleaved: micro-batches go in groups of ``stages`` through
    all chunks, and stage i runs ``2 (stages − i − 1) + (chunks − 1) · stages`` ahead (Narayanan et al., 2021, as
    Megatron-LM schedules it). Zero-bubble: stage i runs ``stages − i − 1 + (chunks − 1) · stages`` ahead, and computes
    weight gradients i passes after activation gradients (ZB-H1 of Qi et al., 2024; PyTorch's
    ``ScheduleInterleavedZeroBubble``).
    """
    total = microbatches * chunks
    index = np.arange(total)
    if chunks == 1:
        chunk_of, mb_of = np.zeros(total, np.int64), index
    else:
        group = stages * chunks
        chunk_of, mb_of = index % group // stages, index // group * stages + index % stages
    if schedule is Schedule.ZERO_BUBBLE:
        return _zero_bubble(stages, chunk_of, mb_of, chunks)
    rows = []
    for stage in range(stages):
        if schedule is Schedule.GPIPE:
            ahead = total
        elif chunks == 1:
            ahead = min(stages - stage - 1, total)
        else:
            ahead = total if microbatches == stages else min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
        kind = np.empty(2 * total, np.int64)
        kind[:ahead] = FORWARD
        steady = total - ahead
        kind[ahead:ahead + 2 * steady:2], kind[ahead + 1:ahead + 2 * steady:2] = FORWARD, BACKWARD
        kind[ahead + 2 * steady:] = BACKWARD
        place = np.where(kind == FORWARD, np.cumsum(kind == FORWARD), np.cumsum(kind == BACKWARD)) - 1
        rows.append((kind, mb_of[place], np.where(kind == FORWARD, chunk_of[place], chunks - 1 - chunk_of[place])))
    return Order(*(np.array(column) for column in zip(*rows, strict=True)))


def _zero_bubble(stages: int, chunk_of: Int64, mb_of: Int64, chunks: int) -> Order:
    """Return the zero-bubble order of passes whose forwards take these chunks and micro-batches."""
    total, rows = len(mb_of), []
    for stage in range(stages):
        ahead = min(stages - stage - 1 + (chunks - 1) * stages, total)
        tasks = [(FORWARD, each) for each in range(ahead)]
        for each in range(total):
            if ahead + each < total:
                tasks.append((FORWARD, ahead + each))
            tasks.append((BACKWARD, each))
            if each >= stage:
                tasks.append((WEIGHTS, each - stage))
        tasks += [(WEIGHTS, each) for each in range(max(total - stage, 0), total)]
        kind, place = np.array(tasks, np.int64).T
        rows.append((kind, mb_of[place], np.where(kind == FORWARD, chunk_of[place], chunks - 1 - chunk_of[place])))
    return Order(*(np.array(column) for column in zip(*rows, strict=True)))


def simulate(order: Order, forward: Float64, backward: Float64, transfer: Float64, blocking: bool,
             weights: Float64 | None = None) -> Pipelined:
    """Simulate a schedule: every task starts when its stage is free and its input has arrived.

    Args:
        order: the order, from ``order_of``.
        forward, backward: µs of one micro-batch's work, [stage, chunk].
        transfer: µs between stage i and stage i + 1 (last entry: the last and the first), in either direction, [stage].
        weights: the part of ``backward`` for weight gradients, [stage, chunk], if they are separate tasks.
        blocking: whether the sender waits for the transfer too, as in Megatron-LM without interleaving.

    Raises:
        ValueError: the order is not possible, because a task waits for itself.
    """
    apart = np.zeros_like(backward) if weights is None else weights
    (stages, tasks), chunks = order.kind.shape, forward.shape[1]
    start, end = np.zeros((stages, tasks)), np.zeros((stages, tasks))
    columns = (np.ascontiguousarray(each) for each in (order.kind, order.microbatch, order.chunk))
    work = (np.ascontiguousarray(each, np.float64) for each in (forward, backward - apart, apart, transfer))
    done = np.full((2, stages, chunks, int(order.microbatch.max()) + 1), -1.0)
    if not run_schedule(*columns, *work, int(blocking), done, np.zeros(stages, np.int64), np.zeros(stages), start, end):
        raise ValueError("The order of work waits for itself.")
    return Pipelined(order, start, end, (end - start).sum(axis=1))
