"""The timeline of a simulated plan, as a Chrome trace that Perfetto and chrome://tracing open: a process for each
stage, with its tasks, its host and its streams."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from graph_predictor.reports.timeline import TimelineProcess, Tracks, json_text, write_events
from graph_predictor.simulation.program import Simulated
from planner.parallel.plan_program import TASKS, PlanProgram
from planner.parallel.schedule import WEIGHTS
from planner.parallel.simulated_plan import SimulatedPlan
from planner.parallel.task_rows import PlanStream
from tracer.output_kind import TIMELINE, check_output

STREAMS = {PlanStream.COMPUTE: "work, and collectives it waits for",
            PlanStream.BESIDE: "layers' collectives beside it",
            PlanStream.STATE: "gradients and parameters", PlanStream.SEND: "to other stages"}
"""The streams of a rank, in words."""
_TASKS, _HOST, _DEVICE = 0, 1, 2


def write_plan_timeline(found: SimulatedPlan, path: str | os.PathLike[str]) -> None:
    """Write a simulated plan's timeline as a Chrome trace: each stage's tasks, host and streams.

    Raises:
        ForetraceError: the file cannot be written, or is there and no timeline.
    """
    check_output(os.fspath(path), [], TIMELINE)
    write_events(_events(found), path)


def _events(found: SimulatedPlan) -> Iterator[str]:
    made, times, tracks = found.made, found.times, Tracks()
    program = made.program
    names = [json_text(name) for name in made.names]
    for stage in range(program.ranks):
        process = TimelineProcess(tracks, stage + 1, f"stage {stage}")
        tasks = np.flatnonzero(made.task_stage == stage)
        first, last = made.task_kernel[tasks], made.task_kernel[tasks + 1]
        spans = [span_of_task(made, times, low, high) for low, high in zip(first.tolist(), last.tolist(), strict=True)]
        begin, end = (np.array(column, np.int64) for column in zip(*spans, strict=True))
        titles = [json_text(title_of_task(made, task)) for task in tasks.tolist()]
        yield process.slices("task", [process.track(_TASKS, "tasks")] * len(tasks), begin, end - begin, titles)
        low, high = program.thread_ptr[stage:stage + 2].tolist()
        shown = low + np.flatnonzero(program.item_cost[low:high] > 0)
        yield process.slices("launches", [process.track(_HOST, "host")] * len(shown), times.item_start[shown],
                             times.item_end[shown] - times.item_start[shown], ['"launches"'] * len(shown))
        low, high = program.kernel_ptr[stage:stage + 2].tolist()
        for stream, label in STREAMS.items():
            rows = low + np.flatnonzero((made.stream[low:high] == stream) & (program.kernel_duration[low:high] > 0))
            if len(rows):
                yield process.slices("kernel", [process.track(_DEVICE + stream, label)] * len(rows),
                                     times.kernel_start[rows], times.kernel_end[rows] - times.kernel_start[rows],
                                     [names[code] for code in made.name[rows].tolist()])
        yield process.metadata()


def span_of_task(made: PlanProgram, times: Simulated, low: int, high: int) -> tuple[int, int]:
    """Return the start of a task's work and its end, ns."""
    rows = low + np.flatnonzero((made.stream[low:high] == PlanStream.COMPUTE)
                                & (made.program.kernel_duration[low:high] > 0))
    if not len(rows):
        return int(times.kernel_start[low]), int(times.kernel_start[low])
    return int(times.kernel_start[rows].min()), int(times.kernel_end[rows].max())


def title_of_task(made: PlanProgram, task: int) -> str:
    """Return what a task is, in words."""
    kind = TASKS[int(made.task_kind[task])]
    if made.task_kind[task] > WEIGHTS:
        return kind
    chunk = f", chunk {made.task_chunk[task]}" if made.task_chunk.max() else ""
    return f"{kind} {made.task_microbatch[task]}{chunk}"
