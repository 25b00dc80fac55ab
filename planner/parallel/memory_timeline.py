"""``timeline``: what a rank of a stage has allocated over a step, from one task of its schedule to the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.parallel.memory_moments import kept_of, moments_of
from planner.parallel.memory_state import state_of
from planner.parallel.pieces import LayerPieces
from planner.parallel.schedule import BACKWARD, FORWARD, WEIGHTS, order_of
from tracer.parallel_plan import ParallelPlan, Schedule
from tracer.shape_only.transformer import TransformerShape


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A task of a stage.

    Attributes:
        task: "forward", "backward" or "weights".
        microbatch, chunk: of it.
        before, peak: bytes allocated when it begins, and at its fullest moment.
    """

    task: str
    microbatch: int
    chunk: int
    before: float
    peak: float


def timeline(plan: ParallelPlan, shape: TransformerShape, pieces: LayerPieces, stage: int) -> list[MemoryPoint]:
    """Return what a rank of a stage has allocated before and in each of its tasks.

    A forward adds what its chunk keeps, a backward (where weights' gradients are apart, those) lets it go; chunks are
    taken to keep equally much.
    """
    order = order_of(plan.schedule, plan.pp, plan.passes, plan.chunks)
    held = state_of(plan, shape, stage).total
    one, _ = kept_of(plan, shape, pieces, stage)
    each = one / plan.chunks
    moments = moments_of(plan, shape, pieces, stage)
    most = max(moment.total for moment in moments)
    kinds = order.kind[stage]
    lets_go = WEIGHTS if plan.schedule is Schedule.ZERO_BUBBLE else BACKWARD
    steps = np.where(kinds == FORWARD, each, np.where(kinds == lets_go, -each, 0.0))
    after = np.cumsum(steps)
    # The step's fullest moment is a backward while most is kept.
    beside = most - float(np.max(after))
    found = []
    for i, kind in enumerate(kinds.tolist()):
        before = held + (float(after[i - 1]) if i else 0.0)
        peak = held + float(after[i]) if kind == FORWARD else before + max(beside, 0.0)
        name = "forward" if kind == FORWARD else "weights" if kind == WEIGHTS else "backward"
        found.append(MemoryPoint(name, int(order.microbatch[stage, i]), int(order.chunk[stage, i]), before, peak))
    return found
