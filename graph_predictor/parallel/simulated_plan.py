"""``simulate_plan``: a plan's step on the simulator that replays recordings, beside the estimate that searches use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from graph_predictor.parallel.estimate import Rates, slowest_of
from graph_predictor.parallel.loads import Loads
from graph_predictor.parallel.plan_program import TASKS, PlanProgram, plan_program
from graph_predictor.parallel.task_rows import PlanStream
from graph_predictor.simulation.engine import Simulated, simulate

_STREAMS = {PlanStream.COMPUTE: "work, and collectives it waits for",
            PlanStream.BESIDE: "layers' collectives beside it",
            PlanStream.STATE: "gradients and parameters", PlanStream.SEND: "to other stages"}
_TASKS, _HOST, _DEVICE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class SimulatedPlan:
    """A plan's step, simulated.

    Attributes:
        made: its program.
        times: of all its calls and kernels.
        time_us: of the step, with what its estimate adds for the slowest of all GPUs and for likeness.
    """

    made: PlanProgram
    times: Simulated
    time_us: float

    @property
    def stage_us(self) -> list[float]:
        """When each stage has ended, µs."""
        return [float(self.times.kernel_end[low:high].max()) / 1e3
                for low, high in pairwise(self.made.program.kernel_ptr.tolist())]

    def compute_busy(self) -> list[float]:
        """Return the share of the step in which each stage's GPU works or waits for collectives of its layers."""
        end, found = float(self.times.kernel_end.max()), []
        for low, high in pairwise(self.made.program.kernel_ptr.tolist()):
            rows = low + np.flatnonzero(self.made.stream[low:high] == PlanStream.COMPUTE)
            found.append(float((self.times.kernel_end[rows] - self.times.kernel_start[rows]).sum()) / end)
        return found


def simulate_plan(loads: Loads, rates: Rates) -> SimulatedPlan:
    """Simulate a plan's step.

    Raises:
        TooManyKernels: it is too long for that.
    """
    made = plan_program(loads, rates)
    times = simulate(made.program)
    ended = float(times.kernel_end.max()) / 1e3
    total = ended * (1 + rates.jitter * slowest_of(loads.plan.world_size)) + rates.step_us
    if rates.likeness is not None:
        total *= float(np.exp(rates.likeness.correction(loads)))
    return SimulatedPlan(made, times, total)


def write_plan_timeline(found: SimulatedPlan, path: str | os.PathLike[str]) -> None:
    """Write a simulated plan's timeline as a Chrome trace: each stage's tasks, host and streams.

    Raises:
        ForetraceError: the file cannot be written, or is there and no timeline.
    """
    from graph_predictor.reports.timeline import write_events
    from tracer.output_kind import TIMELINE, check_output

    check_output(os.fspath(path), [], TIMELINE)
    write_events(_events(found), path)


def _events(found: SimulatedPlan) -> Iterator[str]:
    from graph_predictor.reports.timeline import TimelineProcess, Tracks, json_text

    made, times, tracks = found.made, found.times, Tracks()
    program = made.program
    names = [json_text(name) for name in made.names]
    for stage in range(program.ranks):
        process = TimelineProcess(tracks, stage + 1, f"stage {stage}")
        tasks = np.flatnonzero(made.task_stage == stage)
        first, last = made.task_kernel[tasks], made.task_kernel[tasks + 1]
        spans = [_span(made, times, low, high) for low, high in zip(first.tolist(), last.tolist(), strict=True)]
        begin, end = (np.array(column, np.int64) for column in zip(*spans, strict=True))
        titles = [json_text(_title(made, task)) for task in tasks.tolist()]
        yield process.slices("task", [process.track(_TASKS, "tasks")] * len(tasks), begin, end - begin, titles)
        low, high = program.thread_ptr[stage:stage + 2].tolist()
        shown = low + np.flatnonzero(program.item_cost[low:high] > 0)
        yield process.slices("launches", [process.track(_HOST, "host")] * len(shown), times.item_start[shown],
                             times.item_end[shown] - times.item_start[shown], ['"launches"'] * len(shown))
        low, high = program.kernel_ptr[stage:stage + 2].tolist()
        for stream, label in _STREAMS.items():
            rows = low + np.flatnonzero((made.stream[low:high] == stream) & (program.kernel_duration[low:high] > 0))
            if len(rows):
                yield process.slices("kernel", [process.track(_DEVICE + stream, label)] * len(rows),
                                     times.kernel_start[rows], times.kernel_end[rows] - times.kernel_start[rows],
                                     [names[code] for code in made.name[rows].tolist()])
        yield process.metadata()


def _span(made: PlanProgram, times: Simulated, low: int, high: int) -> tuple[int, int]:
    """From the start of a task's work to its end, ns."""
    rows = low + np.flatnonzero((made.stream[low:high] == PlanStream.COMPUTE)
                                & (made.program.kernel_duration[low:high] > 0))
    if not len(rows):
        return int(times.kernel_start[low]), int(times.kernel_start[low])
    return int(times.kernel_start[rows].min()), int(times.kernel_end[rows].max())


def _title(made: PlanProgram, task: int) -> str:
    kind = TASKS[int(made.task_kind[task])]
    if made.task_kind[task] == len(TASKS) - 1:
        return kind
    chunk = f", chunk {made.task_chunk[task]}" if made.task_chunk.max() else ""
    return f"{kind} {made.task_microbatch[task]}{chunk}"
