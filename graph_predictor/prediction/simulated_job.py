"""``SimulatedJob``: a job as it was simulated, replayed or predicted, with the recorded row behind each of its rows.

Exports and timelines read it, and need not know whether a recorded window was replayed or its last steps were edited
and repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.prediction.edited_repeats import EditedHost
from graph_predictor.prediction.predictor import Baseline, SimulatedStep
from graph_predictor.prediction.repeat import Repeated
from graph_predictor.prediction.replay import Replay, replay
from graph_predictor.prediction.scenario import Gone, Scenario
from graph_predictor.recorded.facts import rank_number
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.host_slices import HostSlices, host_slices
from graph_predictor.simulation.program import ItemKind, Program, Simulated
from tracer.arrays import Float64, Int64
from tracer.graph import ExecutionGraph


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One simulated step of one rank: its name, and its first and last item."""

    rank: int
    name: str
    begin_item: int
    end_item: int


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """The simulated program of a job, and the recording behind it.

    Attributes:
        built: the recorded (or synthetic) job behind it.
        program, simulated: the simulated program and its times.
        item, kernel: row of ``built.program`` that each item and kernel of ``program`` is, or is a copy of.
        copy: number of the copy that each item belongs to; 0 if nothing was repeated.
        scenario: the predicted scenario; ``None`` for a replay.
        title: a few words on the job.
        notes: notes and warnings.
        step_ns: time of a step, ns: the steady state's of a predicted job; the mean of the steps that count, of the
            slowest rank, in a replay; ``None`` without steps.
        host: the host side of a predicted job after the edits.
    """

    built: Built
    program: Program
    simulated: Simulated
    item: Int64
    kernel: Int64
    copy: Int64
    scenario: Scenario | None
    title: str
    notes: tuple[str, ...] = ()
    step_ns: float | None = None
    host: EditedHost | None = None

    @property
    def predicted(self) -> bool:
        """Return whether steps were repeated and maybe edited; otherwise the recorded window was replayed."""
        return self.scenario is not None

    @property
    def gone(self) -> Gone | None:
        """Return the work that edits removed; ``None`` if they removed nothing."""
        return None if self.host is None else self.host.gone

    def host_slices(self) -> tuple[HostSlices, Float64]:
        """Return the slices of host time, and the time of each slice, ns."""
        if self.scenario is not None and self.host is not None:
            return self.scenario.slices, self.host.ns
        slices = host_slices(self.built)
        return slices, slices.ns.astype(np.float64)

    @property
    def graphs(self) -> list[ExecutionGraph]:
        """Return the graphs, one for each rank of the program."""
        return self.built.graphs

    def rank_of(self, position: int) -> int:
        """Return the number of the rank at a position of the job."""
        return rank_number(self.graphs[position], position)

    def kernel_rows(self, position: int) -> tuple[Int64, Int64]:
        """Return a rank's kernels in the program, and their rows of ``graph.kernels``."""
        low, high = (int(at) for at in self.program.kernel_ptr[position:position + 2])
        return np.arange(low, high), self.kernel[low:high] - int(self.built.program.kernel_ptr[position])

    def thread_numbers(self) -> Int64:
        """Return the row of ``graph.threads`` of every item."""
        of_thread = np.array(self.built.thread_number, np.int64)
        if not len(self.item):
            return np.zeros(0, np.int64)
        return of_thread[self.built.program.item_thread()[self.item]]

    def steps(self) -> list[StepSpan]:
        """Return the simulated steps of every rank, in order; copies of a step are numbered."""
        program, found = self.program, []
        rank = program.thread_rank[program.item_thread()]
        several = self.predicted and bool(len(self.copy)) and int(self.copy.max(initial=0)) > 0
        for position, graph in enumerate(self.graphs):
            mine = rank == position
            begins, ends = (np.flatnonzero(mine & (program.item_kind == kind))
                            for kind in (ItemKind.STEP_BEGIN, ItemKind.STEP_END))
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=False):
                name = graph.string(int(graph.steps.name[program.item_row[begin]]))
                shown = f"{name} ({int(self.copy[begin]) + 1})" if several else name
                found.append(StepSpan(position, shown, begin, end))
        return found


def replayed_job(result: Replay) -> SimulatedJob:
    """Return a replay as a simulated job."""
    built, program = result.built, result.program
    items, kernels = (np.arange(len(rows), dtype=np.int64) for rows in (program.item_kind, program.kernel_item))
    return SimulatedJob(built, program, result.simulated, items, kernels, np.zeros(len(items), np.int64), None,
                        "replayed", tuple(result.notes), result.step_ns or None)


def predicted_job(step: SimulatedStep) -> SimulatedJob:
    """Return a predicted step as a simulated job: its steady state's copies, one after the other."""
    steady, scenario = step.steady, step.scenario
    repeated: Repeated = steady.repeated
    title = f"predicted: {'; '.join(step.edits)}" if step.edits else "predicted"
    return SimulatedJob(scenario.built, steady.program, steady.simulated, repeated.item, repeated.kernel,
                        repeated.copy_of_item, scenario, title, step.notes,
                        float(steady.period_ns.max()) / scenario.cycle.steps, steady.copies.host)


def simulated_job(source: object) -> SimulatedJob:
    """Return any source as a simulated job: a replay, a predicted step, or a job (replayed; predicted if it never ran).

    Raises:
        ForetraceError: it is no such source, or cannot be simulated.
    """
    if isinstance(source, SimulatedJob):
        return source
    if isinstance(source, Replay):
        return replayed_job(source)
    if isinstance(source, SimulatedStep):
        return predicted_job(source)
    if isinstance(source, Baseline):
        return predicted_job(source.simulated())
    return replayed_job(replay(source))  # type: ignore[arg-type]
