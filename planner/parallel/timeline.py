"""``StepTimeline``: the tasks of a plan's step in time, as its estimate has them, for pages and trace viewers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from graph_predictor.reports.timeline import TimelineProcess, Tracks, json_text, write_events
from planner.parallel.estimate import Estimate, StepSchedule
from tracer.arrays import Int64
from tracer.output_kind import TIMELINE, check_output

PASSES = ("forward", "backward", "weights")
"""Kinds of a schedule's tasks, as ``schedule`` numbers them."""
KINDS = (*PASSES, "gradients and parameters", "optimizer", "waiting for the slowest GPU", "once a step")
"""Kinds of tasks: those of the schedule, and what ends the step, in its order."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The tasks of a rank of each stage. Gradients and parameters are those that nothing hides, after the last task.

    Attributes:
        stages: how many there are.
        stage, kind: of every task, stage by stage; ``kind`` is a row of ``KINDS``.
        titles: of every task.
        start_ns, end_ns: of every task.
    """

    stages: int
    stage: Int64
    kind: Int64
    titles: list[str]
    start_ns: Int64
    end_ns: Int64

    @classmethod
    def of(cls, step: StepSchedule, whole: Estimate) -> StepTimeline:
        """Lay out a plan's step; the last task ends with the step of its estimate."""
        run, order = step.run, step.run.order
        stages, tasks = run.start.shape
        # What measured steps say of plans like this one stretches all of its tasks.
        factor = (whole.time_us - whole.stragglers - whole.fixed) / max(step.ends)
        after = np.array([step.exposed, step.optimizer]).T
        slowest = np.array([whole.stragglers, whole.fixed]) / factor
        end = np.hstack([run.end, run.stage_end[:, None] + np.cumsum(after, axis=1),
                         np.tile(max(step.ends) + np.cumsum(slowest), (stages, 1))])
        start = np.hstack([run.start, run.stage_end[:, None], end[:, tasks:-1]])
        start[:, -2] = max(step.ends)
        kind = np.hstack([order.kind, np.tile(np.arange(len(PASSES), len(KINDS)), (stages, 1))])
        chunks = int(order.chunk.max()) + 1
        titles = []
        for columns in zip(order.kind.tolist(), order.microbatch.tolist(), order.chunk.tolist(), strict=True):
            titles += [f"{KINDS[each]} {microbatch}" + (f", chunk {chunk}" if chunks > 1 else "")
                       for each, microbatch, chunk in zip(*columns, strict=True)] + list(KINDS[len(PASSES):])
        shown = np.flatnonzero(end > start)
        stage = np.repeat(np.arange(stages), kind.shape[1])
        return cls(stages, stage[shown], kind.reshape(-1)[shown], [titles[row] for row in shown.tolist()],
                   *(np.rint(1e3 * factor * each.reshape(-1)[shown]).astype(np.int64) for each in (start, end)))


def write_step_timeline(found: StepTimeline, path: str | os.PathLike[str]) -> None:
    """Write a step as a Chrome trace that Perfetto and chrome://tracing open: a process for each stage.

    Raises:
        ForetraceError: the file cannot be written, or is there and no timeline.
    """
    check_output(os.fspath(path), [], TIMELINE)
    write_events(_events(found), path)


def _events(found: StepTimeline) -> Iterator[str]:
    tracks = Tracks()
    for stage in range(found.stages):
        process = TimelineProcess(tracks, stage + 1, f"stage {stage}")
        rows = np.flatnonzero(found.stage == stage)
        yield process.slices("task", [process.track(0, "tasks")] * len(rows), found.start_ns[rows],
                             found.end_ns[rows] - found.start_ns[rows],
                             [json_text(found.titles[row]) for row in rows.tolist()])
        yield process.metadata()
